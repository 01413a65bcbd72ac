"""NIXL between two engines of vLLM on this host: prefill in one, decode in the other, with faults in between.

An answer is compared with one from pages that stayed: asked twice of one engine, the second time all of a prompt but its last token is
found in the prefix cache. So both decode from the same bytes in the same steps, and no tolerance is needed.
"""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import peers
import pytest
import tiny_models

from quantkv.maps import LayerMaps, LinearMap, hadamard
from quantkv.policy import Policy

pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12: it has no other wheels, and these work without CUDA")

BLOCK, TOKENS = 16, 8
LENGTH = 8 * BLOCK + 1  # the last token is computed where it is decoded
ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
NO_PEER = {"kv_transfer_config": None}
TURN = LinearMap((hadamard(64) / 8).float()[None], (hadamard(64) / 8).float()[None])
BYTES = "vllm:nixl_bytes_transferred"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def start(llama, tmp_path):
    """Engines of these types and arguments, started side by side, and killed in the end."""
    made = []

    def started(*asked):
        made.extend(peers.Peer(llama, stored, tmp_path, **{**ARGUMENTS, **more}) for stored, more in asked)
        return [peer.ready() for peer in made[-len(asked) :]]

    yield started
    for peer in made:
        with contextlib.suppress(OSError):
            peer.kill()


def prompt(seed, length=LENGTH):
    return tiny_models.prompt(seed, length)


def said(answer):
    return answer["tokens"], answer["logprobs"]


def from_pages(peer, seed):
    """What pages that stayed say. peer: with a prefix cache."""
    first, second = (peer.ask(prompt(seed), TOKENS) for _ in range(2))
    assert first["cached"] == 0 and second["cached"] == LENGTH - 1
    return second


def sent_bytes(token_bytes):
    """Of a prompt's blocks: 2 layers of 2 kv heads, and bytes of K and V of a token and head."""
    return -(-LENGTH // BLOCK) * BLOCK * 2 * 2 * token_bytes


STAYS = {**NO_PEER, "enable_prefix_caching": True}


def test_prefill_here_decode_there(start):
    """In equal tokens; in as many bytes as the pages have, beside those of 16 bits."""
    here, there, plain = start(("quantkv_int4", {}), ("quantkv_int4", {}), ("quantkv_int4", STAYS))
    for seed in range(3):
        answer = there.ask(prompt(seed), TOKENS, here.fill(prompt(seed)))
        assert answer["finish"] == "length" and said(answer) == said(from_pages(plain, seed))
        assert answer["metrics"][BYTES] == (seed + 1) * sent_bytes(72)
    assert answer["metrics"]["vllm:nixl_num_failed_transfers"] == 0
    here, there = start(*[("quantkv_bf16", {})] * 2)
    assert there.ask(prompt(0), TOKENS, here.fill(prompt(0)))["metrics"][BYTES] == sent_bytes(256)


def test_two_ranks_read_the_pages_of_one(start):
    """Each rank reads its own kv head. Together they take the bytes of one rank, and answer as from pages that stayed.

    Log-probabilities are within 1e-4, since two ranks add their parts of a sum in another order.
    """
    two = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    here, there, plain = start(("quantkv_int4", {}), ("quantkv_int4", two), ("quantkv_int4", STAYS))
    for seed in range(2):
        answer, stayed = there.ask(prompt(seed), TOKENS, here.fill(prompt(seed))), from_pages(plain, seed)
        assert answer["finish"] == "length" and answer["tokens"] == stayed["tokens"]
        assert answer["logprobs"] == pytest.approx(stayed["logprobs"], abs=1e-4)
    assert answer["metrics"][BYTES] == 2 * sent_bytes(72)


def test_a_sender_that_is_killed_loses_no_request(start):
    """Before the first handshake, and after it, with pages that were announced: what was not sent is computed where it is needed."""
    first, second, there, plain = start(*[("quantkv_int4", {})] * 3, ("quantkv_int4", NO_PEER))
    expected = [said(plain.ask(prompt(seed), TOKENS)) for seed in range(3)]
    given = first.fill(prompt(0))
    first.kill()
    assert said(there.ask(prompt(0), TOKENS, given)) == expected[0]
    given = [second.fill(prompt(seed)) for seed in (1, 2)]
    sent = there.ask(prompt(1), TOKENS, given[0])
    assert sent["metrics"][BYTES] == sent_bytes(72)
    second.kill()
    again = there.ask(prompt(2), TOKENS, given[1])
    assert said(again) == expected[2] and again["metrics"][BYTES] == sent["metrics"][BYTES]
    assert there.log.count("failure_type") >= 2


def test_a_transfer_that_is_cut_is_computed_again(start):
    """The sender stands still when its pages are asked for, and is killed before it goes on."""
    tcp = {"environment": {"UCX_TLS": "tcp,self"}}  # by which a sender has to do something; memory that both see is read without it
    here, there, plain = start(("quantkv_int4", tcp), ("quantkv_int4", tcp), ("quantkv_int4", NO_PEER))
    expected = [said(plain.ask(prompt(seed), TOKENS)) for seed in range(2)]
    given = [here.fill(prompt(seed)) for seed in range(2)]
    before = there.ask(prompt(0), TOKENS, given[0])["metrics"][BYTES]
    here.stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.ask, prompt(1), TOKENS, given[1])
        with pytest.raises(TimeoutError):
            waiting.result(timeout=5)
        here.kill()
        answer = waiting.result(timeout=300)
    assert said(answer) == expected[1] and answer["metrics"][BYTES] == before


def policy(folder, made):
    folder.mkdir()
    made.save(folder / "policy.json")
    return {"additional_config": {"quantkv_policy": str(folder / "policy.json")}}


@pytest.mark.parametrize("after", ["recompute", "fail"])
def test_pages_of_another_meaning_are_refused_by_both_digests(start, tmp_path, after):
    """Of as many bytes: rotated keys in one policy, rotated values in the other. No byte is sent."""
    made = {"one": Policy("int4", {}, {1: LayerMaps(TURN)}), "two": Policy("int4", {}, {1: LayerMaps(v=TURN)})}
    one, two = (policy(tmp_path / name, of) for name, of in made.items())
    stored = "quantkv_policy"
    here, there, plain = start((stored, one), (stored, {**two, "policy": after}), (stored, {**two, **NO_PEER}))
    answer = there.ask(prompt(0), TOKENS, here.fill(prompt(0)))
    if after == "recompute":
        assert said(answer) == said(plain.ask(prompt(0), TOKENS))
    else:
        assert answer["finish"] == "error"
    assert not answer["metrics"].get(BYTES)
    digest = f"of {stored}:([0-9a-f]{{16}})"
    found = re.search(rf"NIXL compatibility hash mismatch. Local: [0-9a-f]{{64}} {digest}, Remote: [0-9a-f]{{64}} {digest}\.", there.log)
    ours, theirs = found.groups()
    assert ours != theirs


def test_blocks_that_are_sent_whole_are_of_as_many_ranks(start):
    """In the layout BHLNC one rank reads one rank's, in equal tokens; two ranks refuse one rank's before a byte is sent."""
    environment = {"VLLM_KV_CACHE_LAYOUT": "BHLNC"}
    one = {"environment": environment}
    two = {"tensor_parallel_size": 2, "environment": {**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "policy": "fail"}
    here, there, others = start(("quantkv_int4", one), ("quantkv_int4", one), ("quantkv_int4", two))
    (plain,) = start(("quantkv_int4", STAYS))
    answer = there.ask(prompt(0), TOKENS, here.fill(prompt(0)))
    assert answer["finish"] == "length" and said(answer) == said(from_pages(plain, 0))
    assert answer["metrics"][BYTES] == sent_bytes(72)
    answer = others.ask(prompt(1), TOKENS, here.fill(prompt(1)))
    assert answer["finish"] == "error" and not answer["metrics"].get(BYTES)
    assert re.search(r"hash mismatch. Local: \S+ of \S+ in BHLNC of 2 ranks, Remote: \S+ of \S+ in BHLNC of 1 ranks\.", others.log)
