"""What a first-time user's cache loses: KL through a real `QuantizedCache`, of the prompt and of the tokens decoded after it.

    python benchmarks/through_cache.py --model DIR|GGUF --kv int4,4bit,2bit [--text news|docs|FILE] [--device cuda] [--json FILE]

A prompt is read in one pass (or in chunks of --chunk tokens), then the text's next tokens are read one at a time. Each row is one
configuration, as typed: no file is prepared. KL in nats a token against the same model's own 16- or 32-bit cache; lower is better.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from quantkv.cli import models, text
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--kv", default="none,int4,int8,8bit,4bit,3bit,2bit", help="presets, formats, files of policies")
    parser.add_argument("--text", help="news, docs or a file")
    parser.add_argument("--ids", type=Path, help="tokens [N, prompt + decode] of a file of torch.save, in place of a text")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens read one at a time after it")
    parser.add_argument("--chunk", type=int, help="tokens of a pass of the prompt; the KL of the last chunk is shown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loaded = models.load(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    length = arguments.prompt + arguments.decode
    if arguments.ids is not None:
        contexts = torch.load(arguments.ids)[: arguments.contexts, :length]
    else:
        tokens = arguments.contexts * length
        contexts = text.cut(text.load(arguments.text, tokens), loaded.tokenizer, length, tokens)
    rows = measure(loaded.model, contexts.to(arguments.device), arguments)
    print(
        f"{loaded.name}, {len(contexts)} contexts of {arguments.prompt} + {arguments.decode} tokens, {arguments.dtype}, {arguments.device}"
    )
    print(f"{'cache':>8} {'prompt KL':>10} {'decode KL':>10} {'top-1 %':>8} {'bytes':>6} {'first s':>8}")
    for row in rows:
        print("{kv:>8} {prompt:10.5f} {decode:10.5f} {top1:8.1f} {bytes:6.1f} {first:8.2f}".format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": loaded.name, "prompt": arguments.prompt, "rows": rows}, indent=1) + "\n")


@torch.no_grad()
def measure(model, contexts: torch.Tensor, arguments: argparse.Namespace) -> list[dict]:
    """A row for each configuration."""
    expected = [model(ids[None], use_cache=False).logits[0].float().log_softmax(-1) for ids in contexts]
    use_quantkv_attention(model)
    rows = []
    for name in arguments.kv.split(","):
        seconds, found = [], []
        for ids, reference in zip(contexts, expected):
            cache = QuantizedCache(model.config, name)
            began = time.perf_counter()
            logits = [
                model(part[None], past_key_values=cache).logits[0] for part in ids[: arguments.prompt].split(arguments.chunk or len(ids))
            ]
            float(logits[-1][-1, 0])  # wait
            seconds.append(time.perf_counter() - began)
            shown = min(arguments.chunk or arguments.prompt, arguments.prompt)
            logits += [model(one[None, None], past_key_values=cache).logits[0] for one in ids[arguments.prompt :]]
            given = torch.cat(logits).float().log_softmax(-1)
            kl = (reference.exp() * (reference - given)).sum(-1)
            same = (reference.argmax(-1) == given.argmax(-1))[arguments.prompt :]
            found.append((kl[arguments.prompt - shown : arguments.prompt].mean(), kl[arguments.prompt :].mean(), same.float().mean()))
        prompt, decode, same = (float(torch.stack(column).mean()) for column in zip(*found))
        heads = sum(spec.num_kv_heads for spec in cache.specs)
        held = sum(spec.bytes_per_token for spec in cache.specs) / heads
        held += cache.full_precision_nbytes / heads / len(contexts[0])
        rows.append({"kv": name, "prompt": prompt, "decode": decode, "top1": 100 * same, "bytes": held, "first": seconds[0]})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
