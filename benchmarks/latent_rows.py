"""What codes of latents (MLA) lose on rows of a real model, for want of a model with latents: keys and values of a token as one row.

    python benchmarks/latent_rows.py --model FOLDER [--text FILE] [--formats levels4 int4+int8]

Llama's kind of attention keeps keys and values of all kv heads; here a token's, each side over its root mean square and without the mean
of the rows, are one latent. They are stored in real pages and read back. The first 16 and the latest 32 tokens stay as they are, as with
presets. Printed is KL, nats a token, of 256 tokens that are read in one pass behind 1,024, which lose nothing themselves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from quantkv import PagedCache, get_format

CONTEXT, READ, SINK, RECENT, PAGE, ROPE = 1024, 256, 16, 32, 16, 16


def stored(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Rows `[T, D]` as pages of latents give them back. Rotated dimensions are zeros."""
    spec = get_format(name).latent_spec(rows.shape[1], ROPE, PAGE, torch.float32)
    pages, slots = PagedCache(spec, len(rows) // PAGE), torch.arange(len(rows))
    pages.write(rows[:, None].contiguous(), torch.zeros(len(rows), 1, ROPE), slots)
    return pages.dequantize(slots)[0][:, 0]


def replace(layer, name: str) -> None:
    """Put what pages give back in the place of a layer's keys and values `[1, HK, T, D]`."""
    sides = layer.keys[0], layer.values[0]
    sizes = [t.square().mean().sqrt() for t in sides]
    rows = torch.cat([t / size for t, size in zip(sides, sizes)]).transpose(0, 1)  # [T, 2 HK, D]
    mean = rows.flatten(1).mean(0)
    found = (stored(rows.flatten(1) - mean, name) + mean).view_as(rows).transpose(0, 1).chunk(2)
    for side, size, back in zip(sides, sizes, found):
        side[:, SINK : CONTEXT - RECENT] = back[:, SINK : CONTEXT - RECENT] * size


def read(model, ids: torch.Tensor, name: str | None) -> torch.Tensor:
    """Logarithms of probabilities `[READ, vocabulary]` behind a context that is stored in a format; None: as it is."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :CONTEXT], past_key_values=cache)
    for layer in () if name is None else cache.layers:
        replace(layer, name)
    return model(ids[:, CONTEXT:], past_key_values=cache).logits[0].log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "DESIGN.md")
    parser.add_argument("--formats", nargs="+", default=["levels4", "int4+int8", "levels5", "levels6", "int8"])
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, : CONTEXT + READ]
    want = read(model, ids, None)
    for name in args.formats:
        found = read(model, ids, name)
        kl = (want.exp() * (want - found)).sum(-1)
        same = (want.argmax(-1) == found.argmax(-1)).float().mean()
        print(f"{name}: {kl.mean():.5f} +- {kl.std() / READ**0.5:.5f} nats a token, {same:.1%} of the likeliest tokens", flush=True)


if __name__ == "__main__":
    main()
