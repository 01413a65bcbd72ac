"""Pages from one process in another: through a socket, a file, shared memory, and a cache that is sent as it is."""

import socket
from multiprocessing import shared_memory

import torch
import torch.multiprocessing

from quantkv import PagedCache, copy_pages_between, get_format

FORMATS = ("int4", "tq3")
PAGES, HEADS, SIZE, LENGTH = 6, 2, 64, 37
TABLE, HERE = [4, 1, 3], [0, 5, 2]  # pages of the sequence in the first process and in the second


def spec_of(name):
    return get_format(name).cache_spec(HEADS, SIZE)


def sender(name):
    """A cache with one sequence."""
    cache = PagedCache(spec_of(name), PAGES)
    key, value = torch.randn(2, LENGTH, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    cache.write(key, value, torch.tensor([TABLE[t // 16] * 16 + t % 16 for t in range(LENGTH)]))
    return cache


def answer(cache, pages):
    q = torch.randn(1, 4, SIZE, generator=torch.Generator().manual_seed(1))
    table, lens = torch.tensor([pages], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32)
    return cache.attend(q, block_table=table, seq_lens=lens, return_lse=True)


def receive(ways, results):
    """In the other process: the sequence's pages by each way, into pages of a cache of its own -> their bytes and attention over them."""
    torch.set_num_threads(1)
    try:
        for name, (port, path, memory, sent) in ways.items():
            caches = {way: PagedCache(spec_of(name), PAGES) for way in ("socket", "file", "shared memory", "cache")}
            with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as stream:
                caches["socket"].load(stream, HERE)
            caches["file"].load(path, HERE)
            shared = shared_memory.SharedMemory(memory)
            theirs = PagedCache.wrap(torch.frombuffer(shared.buf, dtype=torch.uint8, count=sent.nbytes).view(sent.buffer.shape), sent.spec)
            copy_pages_between(theirs, caches["shared memory"], TABLE, HERE)
            copy_pages_between(sent, caches["cache"], TABLE, HERE)
            sent.buffer[0] = 7  # is seen by the process that sent it
            for way, cache in caches.items():
                out, lse = answer(cache, HERE)
                results.put((name, way, cache.buffer[HERE].numpy(), out.numpy(), lse.numpy()))
            del theirs
            shared.close()
    except BaseException as error:
        results.put(error)
        raise


def test_another_process_gets_the_same_pages_and_the_same_attention(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results, ways, caches, servers, memories = context.Queue(), {}, {}, [], []
    for name in FORMATS:
        cache = caches[name] = sender(name)
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(60)
        memory = shared_memory.SharedMemory(create=True, size=cache.nbytes)
        memory.buf[: cache.nbytes] = cache.buffer.numpy().tobytes()
        cache.save(tmp_path / name, TABLE)
        ways[name] = server.getsockname()[1], str(tmp_path / name), memory.name, cache
        servers.append(server)
        memories.append(memory)
    expected = {name: (cache.buffer[TABLE].clone(), *answer(cache, TABLE)) for name, cache in caches.items()}
    process = context.Process(target=receive, args=(ways, results))
    process.start()
    try:
        for name, server in zip(FORMATS, servers):
            connection, _ = server.accept()
            with connection, connection.makefile("wb") as stream:
                caches[name].save(stream, TABLE)
        for _ in range(4 * len(FORMATS)):
            found = results.get(timeout=60)
            assert not isinstance(found, BaseException), found
            name, way, *parts = found
            for got, want in zip(parts, expected[name]):
                assert torch.equal(torch.from_numpy(got), want), (name, way)
        process.join(60)
        assert process.exitcode == 0
        assert all((cache.buffer[0] == 7).all() for cache in caches.values())  # a cache is sent by its memory, not by its bytes
    finally:
        process.kill()
        for server in servers:
            server.close()
        for memory in memories:
            memory.close()
            memory.unlink()
