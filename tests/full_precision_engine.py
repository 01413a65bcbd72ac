"""An engine with full-precision tokens, small enough to be checked: pages are given out, moved and taken away, and what every query must
read is worked out again in plain Python, page by page and token by token."""

import torch

from quantkv import PagedCache, get_format, prepare_attend, prepare_write
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.full_precision import FullPrecisionTokens

SIZE, HEADS, GROUP, D = 16, 2, 2, 32


class Sequence:
    """Pages of a sequence, and the rows that were stored of it: `[L, HK, D]`."""

    def __init__(self):
        self.pages, self.key, self.value = [], torch.zeros(0, HEADS, D), torch.zeros(0, HEADS, D)

    def __len__(self):
        return len(self.key)


class Pool:
    """Which pages have a copy: dictionaries and loops, nothing else."""

    def __init__(self, size):
        self.copies, self.stamp, self.now = {}, [0] * size, 0

    def lose(self, page):
        if page in self.copies:
            self.stamp[self.copies.pop(page)] = 0

    def step(self, interest, written):
        """interest: pages that sequences read exactly if they can, in order; written: those of which the first slot is written now."""
        self.now += 1
        for page in interest:
            if page in self.copies:
                self.stamp[self.copies[page]] = self.now
        order = sorted(range(len(self.stamp)), key=lambda i: (self.stamp[i], i))
        claims = [page for page in dict.fromkeys(interest) if page in written and page not in self.copies]
        for page, taken in zip(claims, order):
            if self.stamp[taken] == self.now:
                continue
            for owner in [p for p, s in self.copies.items() if s == taken]:
                del self.copies[owner]
            self.copies[page], self.stamp[taken] = taken, self.now


class Engine:
    """Sequences over layers with copies; what the last layer reads is checked. room: sequences that the pool has room for. own: whether
    steps read their own rows as given. runs: whether the lengths are known, so that where calls are cut, each run is a call of its own; see
    `quantkv.implementations.batches`. how: of `prepare_attend`."""

    def __init__(
        self, fmt="int4", first=16, latest=24, *, seqs=4, room=None, num_blocks=64, runs=False, seed=0, layers=1, device="cpu", **how
    ):
        self.own = how.pop("own", False)
        self.tokens, self.generator, self.how = FullPrecisionTokens(first, latest), torch.Generator().manual_seed(seed), how
        self.device, self.full_precision = torch.device(device), CopiedPages(self.tokens, SIZE, room or seqs, num_blocks, device)
        self.caches = []
        for _ in range(layers):
            pages = PagedCache(get_format(fmt).cache_spec(HEADS, D, block_size=SIZE), num_blocks, device)
            pages.buffer.random_(0, 256)
            copies = cache_of_copies(pages, self.full_precision.num_copies, torch.float32)
            copies.buffer.fill_(0xFF)
            self.caches.append(CacheWithCopies(pages, copies, self.full_precision))
        self.full_precision.watch(self.caches[-1].pages)
        self.pages = self.caches[-1].pages
        self.pool, self.runs = Pool(self.full_precision.num_copies), runs
        order = torch.randperm(num_blocks, generator=self.generator).tolist()
        self.free, self.references = order, dict.fromkeys(order, 0)
        self.seqs = [Sequence() for _ in range(seqs)]

    def new_step(self, num_seqs, num_tokens):
        return FullPrecisionStep(self.tokens, SIZE, num_seqs, num_tokens, self.device)

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def take(self):
        page = self.free.pop(0)
        self.references[page] = 1
        return page

    def drop(self, i):
        """A sequence ends, or is preempted; its pages are taken again soon."""
        for page in self.seqs[i].pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.free.insert(0, page)
        self.seqs[i] = Sequence()

    def share(self, source, target, pages):
        """Sequence `target` begins with whole pages of `source`."""
        old, new = self.seqs[source], Sequence()
        new.pages = old.pages[:pages]
        for page in new.pages:
            self.references[page] += 1
        new.key, new.value = old.key[: pages * SIZE].clone(), old.value[: pages * SIZE].clone()
        self.seqs[target] = new

    def move(self, i):
        """Whole pages of a sequence are copied to others, bytes and nothing else: as from host memory."""
        seq, old = self.seqs[i], self.seqs[i].pages
        seq.pages = [self.take() for _ in old]
        for cache in self.caches:
            cache.pages.copy_pages(torch.tensor(old), torch.tensor(seq.pages))
        for page in seq.pages:
            self.pool.lose(page)
        for page in old:
            self.references[page] -= 1
            self.free.insert(0, page)

    def overwrite(self, i, page, slots=range(SIZE)):
        """Somebody stores other rows in some slots of the page of number `page` of a sequence."""
        places = torch.tensor([self.seqs[i].pages[page] * SIZE + slot for slot in slots], device=self.device)
        for cache in self.caches:
            cache.pages.write(*(self.rand(len(places), HEADS, D).to(self.device) for _ in "kv"), places)

    def interest(self, length):
        """Numbers of the pages of a sequence that are to be exact."""
        pages = -(-length // SIZE)
        first = range(min(-(-self.tokens.sink // SIZE), pages))
        return [*first, *range(self.first_recent_page(length), pages)]

    def first_recent_page(self, length):
        """The page in which the latest tokens begin."""
        return max(length - self.tokens.recent, 0) // SIZE if self.tokens.recent else -(-length // SIZE)

    def full_precision_set(self, seq, length, queries, joined):
        """Positions that are read exactly: the first pages up to the first without a copy, and the latest back to the first without."""
        pages = -(-length // SIZE)
        has = [page in self.pool.copies for page in seq.pages[:pages]]
        begin = 0
        while begin < min(-(-self.tokens.sink // SIZE), pages) and has[begin]:
            begin += 1
        end = pages
        while end > self.first_recent_page(length) and has[end - 1]:
            end -= 1
        end = max(end, begin)
        latest_from = end * SIZE if end < pages or begin == pages else length
        if joined and end > begin and latest_from > length - queries + 1:
            begin = 0
        return {j for j in range(length) if j < begin * SIZE or j >= latest_from}

    def step(self, counts, **options):
        """One step with `counts[i]` new tokens of sequence i, stored and queried -> the exact positions of each sequence. AssertionError
        where a query reads something else than it must."""
        before, written, interest = [len(s) for s in self.seqs], set(), []
        for seq, count in zip(self.seqs, counts):
            seq.key, seq.value = torch.cat([seq.key, self.rand(count, HEADS, D)]), torch.cat([seq.value, self.rand(count, HEADS, D)])
            while len(seq.pages) * SIZE < len(seq):
                seq.pages.append(self.take())
            written |= {seq.pages[j // SIZE] for j in range(len(seq) - count, len(seq)) if j % SIZE == 0}
            interest += [seq.pages[p] for p in self.interest(len(seq))]
        self.pool.step(interest, written)
        lengths, total = [len(s) for s in self.seqs], sum(counts)
        table = torch.full((len(counts), max(len(s.pages) for s in self.seqs) + 1), -(2**30), dtype=torch.int32)
        for row, seq in zip(table, self.seqs):
            row[: len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
        places = [s.pages[j // SIZE] * SIZE + j % SIZE for s, b in zip(self.seqs, before) for j in range(b, len(s))]
        slot_mapping = torch.tensor(places, dtype=torch.int64)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        key, value = (torch.cat([getattr(s, n)[b:] for s, b in zip(self.seqs, before)]) for n in ("key", "value"))
        q = self.rand(total, HEADS * GROUP, D)
        given = [t.to(self.device) for t in (table, seq_lens, starts, slot_mapping, key, value, q)]
        out = self.serve(*given, max(counts), options).cpu()
        self._consistent()
        found = []
        for i, (seq, count) in enumerate(zip(self.seqs, counts)):
            few = (count if self.runs else max(counts)) <= (1 if self.own else 8)
            exact = self.full_precision_set(seq, len(seq), count, few and not options)
            if self.own and count > 1:
                exact |= set(range(len(seq) - count, len(seq)))
            found.append(exact)
            self._compare(seq, count, exact, q[starts[i] : starts[i + 1]], out[starts[i] : starts[i + 1]], options)
        return found

    def _consistent(self):
        """Each page that has a copy is the one that owns it, and each owner has it."""
        owners, copies = self.full_precision.owner[:-1].tolist(), self.full_precision.copy_of[:-1].tolist()
        assert {p: s for s, p in enumerate(owners) if p >= 0} == {p: s for p, s in enumerate(copies) if s >= 0}

    def serve(self, table, seq_lens, starts, slots, key, value, q, longest, options):
        step = self.new_step(len(seq_lens), len(slots))
        write = prepare_write(slots, full_precision=step)
        batch = {"block_table": table, "seq_lens": seq_lens, "cu_seqlens_q": starts, "max_query_len": longest}
        if self.runs:
            batch["lengths"] = list(zip(starts.diff().tolist(), seq_lens.tolist()))
        return self.run(
            step, write, prepare_attend(**batch, full_precision=step, **self.how, **options), table, seq_lens, starts, slots, key, value, q
        )

    def run(self, step, write, attend, table, seq_lens, starts, slots, key, value, q):
        self.full_precision.advance(table, seq_lens, starts, slots, step)
        for cache in self.caches:
            write(cache, key, value)
        return attend(self.caches[-1], q, own=(key, value) if self.own else None)

    def _compare(self, seq, count, exact, q, out, options):
        for i, (expected, largest) in enumerate(self._expected(seq, count, exact, q, options)):
            error = (out[i] - expected).abs().max()
            assert error <= 1e-5 * largest, f"position {len(seq) - count + i} of {len(seq)}: off by {error:.3f}"

    def _expected(self, seq, count, exact, q, options):
        """Each query's output, and the largest value."""
        slots = torch.tensor([seq.pages[j // SIZE] * SIZE + j % SIZE for j in range(len(seq))], dtype=torch.int64)
        if not count:
            return
        rows = [t.cpu() for t in self.pages.dequantize(slots.to(self.device), dtype=torch.float64)]
        chosen = torch.tensor([j in exact for j in range(len(seq))])[:, None, None]
        key, value = (torch.where(chosen, own.double(), read) for own, read in zip((seq.key, seq.value), rows))
        key, value = key.repeat_interleave(GROUP, 1), value.repeat_interleave(GROUP, 1)
        for i in range(count):
            seen = len(seq) - count + i + 1
            low = max(seen - options["window"], 0) if options.get("window") else 0
            score = torch.einsum("hd,jhd->hj", q[i].double(), key[low:seen]) * D**-0.5
            if "alibi_slopes" in options:
                score += options["alibi_slopes"].double()[:, None] * (torch.arange(low, seen) - (len(seq) - count))
            yield torch.einsum("hj,jhd->hd", score.softmax(-1), value[low:seen]), value.abs().max()


class Captured(Engine):
    """On a GPU: steps of one token a sequence are one CUDA graph, which is replayed over other numbers."""

    graph = None

    def serve(self, *given):
        *tensors, longest, options = given
        if longest > 1:
            return super().serve(*given)
        wide = torch.full((len(tensors[1]), 32), -(2**30), dtype=torch.int32, device=self.device)
        wide[:, : tensors[0].shape[1]] = tensors[0]
        tensors[0] = wide
        if self.graph is not None:
            for held, t in zip(self.held, tensors):
                held.copy_(t)
            self.graph.replay()
            return self.out
        self.held, step = tensors, self.new_step(len(tensors[1]), len(tensors[3]))
        table, seq_lens, starts, slots, *_ = tensors
        batch = {"block_table": table, "seq_lens": seq_lens, "cu_seqlens_q": starts, "max_query_len": 1}
        calls = step, prepare_write(slots, full_precision=step), prepare_attend(**batch, full_precision=step, **self.how, **options)
        out = self.run(*calls, *tensors).clone()  # compiles, and allocates what lasts
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.out = self.run(*calls, *tensors)
        return out
