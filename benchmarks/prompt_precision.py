"""What 8-bit scores of prompts cost, on a CPU: errors on random rows, and the KL of a prompt of a real model.

    python benchmarks/prompt_precision.py prompt-precision.json

Queries and keys are rounded as `prompt_precision="8bit"` says (`quantkv/implementations/reference/eight_bit.py`),
and in other ways: one scale a key, or one for more keys than 64; keys whose mean is not taken off. Errors are
relative, the norm of the difference over the norm, against attention in float64 over the same bf16 rows. Weights and
values are not rounded. The KL is of the next token's probabilities at every position of a prompt, against the same
model whose scores are float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from quantkv.cli import models, text
from quantkv.implementations.reference import eight_bit

HQ, HK, D = 32, 8, 128
KEYS, TOKENS = (1024, 2048, 4096), 4096
BLOCKS = (1, 64, 80, 128)


def scores(q: torch.Tensor, k: torch.Tensor, block: int, mean: bool) -> torch.Tensor:
    """`eight_bit.scores`, or without the keys' mean taken off."""
    if mean:
        return eight_bit.scores(q, k, block)
    rows, columns = eight_bit.quantize(q), eight_bit.quantize(k, block)
    return (rows.codes @ columns.codes.mT) * rows.scales[..., None] * columns.scales[..., None, :]


def attend(score: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of as many queries as keys, by scores `[G, N, N]`."""
    keys = score.shape[-1]
    return (score * scale).masked_fill(torch.ones(keys, keys, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v


def random_rows(keys: int, shift: float) -> list[dict[str, object]]:
    """Errors over kv heads of normal rows. shift: of every key of a head, the same normal row times it."""
    found = {(block, mean): [0.0, 0.0] for block in BLOCKS for mean in (True, False)}
    generator = torch.Generator().manual_seed(keys)
    for _ in range(HK):
        q, k, v, c = (torch.randn(*shape, D, generator=generator) for shape in ((HQ // HK, keys), (keys,), (keys,), (1,)))
        q, k, v = q.bfloat16().float(), (k + shift * c).bfloat16().float(), v.bfloat16().double()
        want = attend(q.double() @ k.double().mT, v, D**-0.5)
        for (block, mean), sums in found.items():
            got = attend(scores(q, k, block, mean).double(), v, D**-0.5)
            sums[0] += float((got - want).square().sum())
            sums[1] += float(want.square().sum())
    return [
        {"keys": keys, "shift": shift, "block": block, "mean taken off": mean, "error": (off / all_) ** 0.5}
        for (block, mean), (off, all_) in found.items()
    ]


def prompt_kl(source: str | None, texts: tuple[str, ...] = ("news", "docs")) -> list[dict[str, object]]:
    """KL in nats of one prompt of each text."""
    loaded, how = models.load(source), {}

    def attention(module, query, key, value, mask, scaling=None, **_):
        q, k, v = query[0].unflatten(0, (key.shape[1], -1)), key[0], value[0]
        heads = []
        for rows, keys, values in zip(q, k, v):
            rows, keys = rows.bfloat16().float(), keys.bfloat16().float()
            score = scores(rows, keys, how["block"], how["mean"]) if how else rows @ keys.mT
            heads.append(attend(score, values, scaling))
        return torch.cat(heads).transpose(0, 1)[None].contiguous(), None

    AttentionInterface.register("prompt_precision", attention)
    AttentionMaskInterface.register("prompt_precision", lambda *args, **kwargs: None)
    loaded.model.set_attn_implementation("prompt_precision")
    found = []
    for name in texts:
        ids = text.cut(text.load(name, TOKENS), loaded.tokenizer, TOKENS, TOKENS)
        with torch.inference_mode():
            how.clear()
            want = loaded.model(ids).logits[0].log_softmax(-1)
            for block, mean in ((64, True), (1, True), (128, True), (64, False)):
                how.update(block=block, mean=mean)
                got = loaded.model(ids).logits[0].log_softmax(-1)
                kl = sum(float((w.exp() * (w - g)).sum()) for w, g in zip(want.split(256), got.split(256))) / TOKENS
                same = float((got.argmax(-1) == want.argmax(-1)).float().mean())
                found.append({"model": loaded.name, "text": name, "block": block, "mean taken off": mean, "kl": kl, "top-1": same})
                print(found[-1], flush=True)
    return found


def main(out: str, source: str | None = None) -> None:
    torch.set_num_threads(1)
    rows = [row for shift in (0.0, 2.0) for keys in KEYS for row in random_rows(keys, shift)]
    for row in rows:
        print(row, flush=True)
    Path(out).write_text(json.dumps({"random rows": rows, "prompts": prompt_kl(source)}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
