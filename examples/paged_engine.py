"""A small engine over quantkv: continuous batching, prefix reuse, prompts in chunks, and a CUDA graph for decode where there is a GPU.

    python examples/paged_engine.py                    # SmolLM2-135M in int4, beside transformers' generate: about a minute
    python examples/paged_engine.py --kv tq4 --requests 32 --device cuda

It shows how an engine of your own uses quantkv. `PageTable` says which pages of the cache each sequence holds; a `PagedCache` for each
layer holds their bytes; each step makes one `prepare_write` and one `prepare_attend`, which all layers share; `warm_up` compiles before
the first request. The model is any of transformers with full attention in all layers (Llama, Qwen, SmolLM, ...): it calls `attention`
below.

The same prompts go through the engine twice. With a cache that is not quantized ("none") its answers must be those of transformers, token
for token, or the exit code is 1 (checked where the model computes in float32). Then with --kv; it says how many bytes a token takes, how
many tokens of the prompts were found in pages that other sequences held, and tokens a second of both engines in this one run.
"""

import argparse
import math
import sys
import time
from itertools import takewhile

import torch
from transformers import AttentionInterface

from quantkv import PagedCache, get_format, prepare_attend, prepare_write, warm_up
from quantkv.cli import models
from quantkv.page_table import PageTable


def attention(module, query, key, value, mask, scaling=None, step=None, **options):
    """transformers calls it in each layer, with rows `[1, heads, T, D]`: stores the new ones, then attends to all."""
    given = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if given or not math.isclose(scaling or 0, query.shape[-1] ** -0.5):
        raise NotImplementedError(f"{', '.join(given) or f'scaling={scaling}'}: PagedCache.attend has it, this engine does not pass it on")
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    step.write(step.caches[module.layer_idx], key, value)
    return step.attend(step.caches[module.layer_idx], query)[None], None


AttentionInterface.register("engine", attention)  # no mask function is registered beside it, so transformers makes no mask


class Step:
    """One forward pass over T new tokens of S sequences: its tensors, and the two calls that serve every layer.

    ids, positions, slots: `[T]`. block_table: `[S, pages]`. seq_lens: `[S]`, with the new tokens. ends: `[S + 1]`, where each sequence's
    new tokens begin and end. lengths: (new tokens, all tokens) of each sequence where the host knows them; a graph's step has none.
    """

    def __init__(self, caches, tensors, lengths=None, max_seq_len=None):
        self.caches, self.tensors = caches, [t.to(caches[0].device) for t in tensors]
        self.ids, self.positions, slots, block_table, seq_lens, ends = self.tensors
        self.last = ends[1:].long() - 1
        self.write = prepare_write(slots)
        known = {"lengths": lengths} if lengths else {"max_query_len": 1, "max_seq_len": max_seq_len}
        self.attend = prepare_attend(block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=ends, **known)

    def run(self, model):
        """The likeliest next token of each sequence, `[S]`."""
        inputs = {"input_ids": self.ids[None], "position_ids": self.positions[None], "logits_to_keep": self.last}
        return model(**inputs, use_cache=False, step=self).logits[0].argmax(-1)


class Engine:
    """Sequences in `places`, each a row of the page table. One that has ended stays in its place until another needs it or its pages: who
    begins with the same tokens shares those pages meanwhile, and a page that two hold is copied before one writes to it."""

    def __init__(self, model, kv="int4", num_pages=512, max_sequences=8, max_length=1024, chunk=512):
        config = model.config
        if {*(getattr(config, "layer_types", None) or ["full_attention"])} != {"full_attention"}:
            raise NotImplementedError(f"model: layers of types {config.layer_types}; this engine knows full_attention")
        model.set_attn_implementation("engine")
        self.model, self.chunk, self.max_length = model, chunk, max_length
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.spec = get_format(kv, model.dtype).cache_spec(config.num_key_value_heads, head_size)
        self.caches = [PagedCache(self.spec, num_pages, model.device) for _ in range(config.num_hidden_layers)]
        self.table = PageTable(self.spec.block_size, max_sequences, num_pages)
        self.tokens = [[] for _ in range(max_sequences)]  # of the sequence in each place; the cache holds the first table.lengths[i]
        self.limits = {}  # of the places at work: the length at which each ends
        self.idle = list(range(max_sequences))  # the others, those idle for longest first
        self.reused = self.generated = 0
        sizes = {"batch_sizes": (1, max_sequences), "write_sizes": (max_sequences, chunk), "max_seq_len": max_length}
        self.served = warm_up(
            self.caches[0], config.num_attention_heads, dtype=model.dtype, query_lens=(1, min(chunk, max_length)), **sizes
        )
        self.graph = None
        if model.device.type == "cuda":
            self.capture()

    def generate(self, prompts, new_tokens):
        """The greedy answer to prompt i, `new_tokens[i]` tokens."""
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens)):
            most = min(self.max_length, self.table.num_pages * self.spec.block_size)
            if not prompt or len(prompt) + count > most:
                raise ValueError(f"prompts[{i}]: {len(prompt)} tokens and {count} new ones; 1 to {most} in all are allowed")
        waiting, answers, at = list(range(len(prompts))), {}, {}  # at: the request in each place
        while waiting or self.limits:
            for request in list(waiting):
                place = self.admit(prompts[request], len(prompts[request]) + new_tokens[request])
                if place is not None:
                    at[place] = request
                    waiting.remove(request)
            for place in self.step():
                request = at.pop(place)
                answers[request] = self.tokens[place][len(prompts[request]) :]
        return [answers[request] for request in range(len(prompts))]

    def pages(self, i):
        """The most that place i holds until its sequence ends, those that it shares included."""
        return self.spec.num_blocks(self.limits[i]) if i in self.limits else len(self.table.rows[i])

    def admit(self, prompt, limit):
        """Give a sequence a place, with the pages of whoever begins as it does -> the place; None: it has to wait."""
        num_pages, needed = self.table.num_pages, self.spec.num_blocks(limit)
        if not self.idle or needed + sum(map(self.pages, self.limits)) > num_pages:
            return None
        alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], tokens))) for tokens in self.tokens]
        held = [min(same, length) for same, length in zip(alike, self.table.lengths)]
        donor = max(range(len(held)), key=held.__getitem__)
        if max((alike[i] for i in self.limits), default=0) - held[donor] >= self.spec.block_size:
            return None  # what it begins with is being computed
        place = self.idle.pop(0)
        rows, lengths = list(range(len(held))), list(self.table.lengths)
        rows[place], lengths[place] = donor, held[donor]
        self.table.select(rows)  # the place now shares all pages of the donor,
        self.table.truncate(lengths)  # and gives back those beyond what both begin with
        self.tokens[place], self.limits[place] = list(prompt), limit
        self.reused += held[donor]
        for i in self.idle:  # the pages of those that ended go when the others may need them
            if sum(map(self.pages, range(len(held)))) > num_pages:
                self.table.truncate([0 if i == j else n for j, n in enumerate(self.table.lengths)])
        return place

    def step(self):
        """One forward pass: a token for each sequence that decodes, and prompts as far as the chunk has room -> places that ended."""
        left = {i: len(self.tokens[i]) - self.table.lengths[i] for i in self.limits}  # tokens that the cache does not hold
        counts, room = {}, self.chunk
        for i in sorted(left, key=left.get):
            if room:
                counts[i] = min(left[i], room)
                room -= counts[i]
        copies = self.table.append([counts.get(i, 0) for i in range(len(self.tokens))])
        if copies:
            source, target = torch.tensor(copies, device=self.model.device).T
            for cache in self.caches:
                cache.copy_pages(source, target)
        for i, token in zip(counts, self.forward(counts)):
            if self.table.lengths[i] == len(self.tokens[i]):
                self.tokens[i].append(token)
                self.generated += 1
        ended = [i for i in counts if len(self.tokens[i]) == self.limits[i]]
        for i in ended:
            del self.limits[i]
            self.idle.append(i)
        return ended

    @torch.inference_mode()
    def forward(self, counts):
        """The likeliest token after the first `counts[i]` tokens of place i that were not computed yet, for each i."""
        if self.graph is None or max(counts.values()) > 1:
            return Step(self.caches, *self.inputs(counts)).run(self.model).tolist()
        for fixed, now in zip(self.static.tensors, self.inputs(counts, len(self.tokens))[0]):
            fixed.copy_(now)
        self.graph.replay()
        return self.output.tolist()

    def inputs(self, counts, pad_to=0):
        """What `Step` takes. pad_to: sequences; those that there are not store nothing (slot -1) and read one token of page 0."""
        width, size = self.spec.num_blocks(self.max_length), self.spec.block_size
        ids, positions, slots, rows, lengths = [], [], [], [], []
        for i, count in counts.items():
            stop, row = self.table.lengths[i], self.table.rows[i]
            ids += self.tokens[i][stop - count : stop]
            positions += range(stop - count, stop)
            slots += [row[p // size] * size + p % size for p in range(stop - count, stop)]
            rows.append(row + [0] * (width - len(row)))
            lengths.append((count, stop))
        more = max(pad_to - len(rows), 0)
        ids, positions, slots = ids + [0] * more, positions + [0] * more, slots + [-1] * more
        rows, lengths = rows + [[0] * width] * more, lengths + [(1, 1)] * more
        queries, keys = torch.tensor(lengths, dtype=torch.int32).T
        ends = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
        tensors = (torch.tensor(ids), torch.tensor(positions), *(torch.tensor(x, dtype=torch.int32) for x in (slots, rows)), keys, ends)
        return tensors, lengths

    @torch.inference_mode()
    def capture(self):
        """The pass of one token a sequence as a graph: its launches cost the host nothing after this. It runs over fixed tensors, whose
        contents `forward` replaces; block table and lengths are read on the device, so that pages and lengths may change."""
        self.static = Step(self.caches, self.inputs({}, len(self.tokens))[0], max_seq_len=self.max_length)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.static.run(self.model)  # the first call prepares, and allocates what lasts
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.output = self.static.run(self.model)
        torch.cuda.synchronize()


QUESTIONS = ("What is a planet?", "Name three colours.", "Who wrote Hamlet?", "What do bees make?", "Why is the sky blue?", "What is rain?")
SYSTEM = "You are a patient teacher. You answer in plain words, in one or two sentences, and you say so when you do not know something. "


def requests(tokenizer, count):
    """Prompts that begin alike, and 8 to 48 new tokens for each."""
    texts = [f"{SYSTEM * 3}\nQuestion {i}: {QUESTIONS[i % len(QUESTIONS)]}\nAnswer:" for i in range(count)]
    return [tokenizer(text)["input_ids"] for text in texts], [8 + 8 * (3 * i % 6) for i in range(count)]


@torch.inference_mode()
def by_transformers(model, prompts, new_tokens, batch_size):
    """The same by `generate`, in batches that are padded on the left and wait for their longest answer; exact 16- or 32-bit cache."""
    answers = []
    for first in range(0, len(prompts), batch_size):
        batch, counts = prompts[first : first + batch_size], new_tokens[first : first + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=model.device)
        options = {"do_sample": False, "max_new_tokens": max(counts), "eos_token_id": [-1], "pad_token_id": 0}
        out = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()
        answers += [tokens[:count] for tokens, count in zip(out, counts)]
    return answers


def timed(call):
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--kv", default="int4", help="format of the cache")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=8, help="at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    loaded = models.load(options.model, options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    model, (prompts, new_tokens) = loaded.model, requests(loaded.tokenizer, options.requests)
    wanted, plain_s = timed(lambda: by_transformers(model, prompts, new_tokens, options.sequences))

    def engine(kv):
        made = Engine(model, kv, max_sequences=options.sequences, num_pages=2048)
        answers, seconds = timed(lambda: made.generate(prompts, new_tokens))
        same = sum(a == b for mine, theirs in zip(answers, wanted) for a, b in zip(mine, theirs))
        return made, seconds, same

    exact, _, same = engine("none")
    total = sum(new_tokens)
    print(f"{loaded.name}, {len(prompts)} prompts of {sum(map(len, prompts)):,} tokens in all, {total} new tokens, {options.device}")
    print(f"cache of {exact.spec.format}: {same} of {total} tokens are those of transformers")
    right = same == total or model.dtype != torch.float32
    made, seconds, same = engine(options.kv)
    times = exact.spec.bytes_per_token / made.spec.bytes_per_token
    print(f"cache of {options.kv}: {same} of {total}; compression {times:.2f}x against {exact.spec.format}")
    print(f"{made.reused:,} tokens of the prompts were found in the cache; {made.table.used_pages} pages in use")
    print(f"tokens a second: {total / seconds:.1f} by this engine, {total / plain_s:.1f} by transformers' generate")
    print("served by: " + ", ".join(sorted(set(made.served.values()))))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
