"""Questions about a long document: its cache is computed once, saved, and loaded for every question from then on.

    python examples/saved_prefix.py                                # news, about a minute
    python examples/saved_prefix.py --document FILE --question "Who ...?" --tokens 4000

Each question is asked twice: of the cache that read the document, and of one loaded from the file. What was loaded must be what was saved,
byte for byte, and the answers the same, token for token; else the exit code is 1. It says how long reading and loading took, and how large
the file is.

A `QuantizedCache` is saved by pickle, which runs what a file says: load files that you wrote, no others. For files that others wrote there
are page files, which are data and carry checksums: `PagedCache.save`, for engines of one's own (docs/pages.md).
"""

import argparse
import copy
import pickle
import sys
import tempfile
import time
from pathlib import Path

import torch

from quantkv.cli import models, text
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention

QUESTIONS = ("In one sentence, the text above is about", "The country that it names first is")  # begun answers: a small model goes on


@torch.inference_mode()
def read(model, ids, kv):
    """The cache of a document, `ids [1, T]`. Its logits are not needed."""
    cache = QuantizedCache(model.config, kv, dtype=model.dtype)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def save(cache, file):
    with Path(file).open("wb") as out:
        pickle.dump(cache, out, pickle.HIGHEST_PROTOCOL)


def load(file):
    with Path(file).open("rb") as written:
        return pickle.load(written)


def answer(model, cache, ids, question, max_new_tokens):
    """The greedy answer, tokens. cache: of `ids`, the document; it holds question and answer as well then."""
    whole = torch.cat([ids, question], 1)
    options = {"past_key_values": cache, "max_new_tokens": max_new_tokens, "do_sample": False}
    return model.generate(input_ids=whole, attention_mask=torch.ones_like(whole), **options)[0, whole.shape[1] :].tolist()


def pages(cache):
    """The bytes of the document's pages, layer by layer."""
    layers = cache.quantized_layers.values()
    return [layer.pages.buffer[layer.sequences.table.rows[0]] for layer in layers]


def timed(call, *arguments):
    start = time.perf_counter()
    return call(*arguments), time.perf_counter() - start


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--kv", default="levels4", help="format of the cache")
    parser.add_argument("--document", help="a UTF-8 file; news that a package brings if left out, or Python's documentation")
    parser.add_argument("--tokens", type=int, default=1000, help="of the document that are read")
    parser.add_argument("--question", action="append")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    loaded = models.load(options.model, options.device)
    model, tokenizer = use_quantkv_attention(loaded.model), loaded.tokenizer

    def tokens(what):
        return torch.tensor([tokenizer(what, add_special_tokens=False)["input_ids"]], device=model.device)

    ids = tokens(text.load(options.document, options.tokens).text[: 32 * options.tokens])[:, : options.tokens]
    cache, reading = timed(read, model, ids, options.kv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "document.kv")
        save(cache, file)
        plain = ids.shape[1] * 2 * cache.spec.elements_per_token * len(cache.quantized_layers)
        print(f"{ids.shape[1]:,} tokens read in {reading:.2f} s; {file.stat().st_size:,} bytes saved, {plain:,} would be 16 bits")
        again, loading = timed(load, file)
        intact = all(torch.equal(a, b) for a, b in zip(pages(cache), pages(again), strict=True))
        print(f"loaded in {loading:.3f} s; the pages are {'those' if intact else 'NOT those'} that were saved")
        same = True
        for question in options.question or QUESTIONS:
            asked = tokens(f"\n\n{question}")
            before = answer(model, copy.deepcopy(cache), ids, asked, options.max_new_tokens)
            after = answer(model, load(file), ids, asked, options.max_new_tokens)
            same &= before == after
            print(f"{question} -> {tokenizer.decode(after, skip_special_tokens=True)!r}" + ("" if before == after else " (another before)"))
    print("every answer is the one that was given before saving" if same else "answers differ")
    return 0 if intact and same else 1


if __name__ == "__main__":
    sys.exit(main())
