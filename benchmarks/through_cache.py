"""What caches lose through a real cache, as `quantkv eval` measures it: presets, what each of their parts is worth, and other caches.

    python benchmarks/through_cache.py --model DIR|GGUF [--text news,docs] [--device cuda] --out through-cache.json [--into FILE.md ...]

A prompt is read in one pass (or in passes of --chunk tokens, of which the last one's loss is shown), then the text's next tokens are read
one at a time. Nothing is prepared: each row is a cache as typed. `--parts` adds the 4-bit preset without one part each; `--rivals` adds
transformers' own 4-bit caches, where optimum-quanto and hqq are installed. A file that exists is added to. `--into` writes tables between
`<!-- through:NAME -->` and `<!-- /through:NAME -->`: presets, parts, models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from quality import fill, nbytes

from quantkv.calibration import Calibration
from quantkv.cli import eval as evaluation
from quantkv.cli import models, policies, readers, report, text, trials
from quantkv.cli.eval_command import DEFAULT_KV
from quantkv.integrations.transformers.statistics import statistics_of
from quantkv.policy import Policy
from quantkv.spec import CacheSpec

PARTS = ("prompt rows", "exact tokens", "key mean", "Hessian", "statistics")
RIVALS = {"quanto": {}, "hqq": {"axis_key": 1, "axis_value": 1}}


def without(part: str, model: Any) -> Policy:
    """The 4-bit preset for a model without one of its `PARTS`."""
    policy = Policy.given("4bit")
    if part == "statistics":
        return replace(policy, statistics="off")
    made = statistics_of(model)
    policy = replace(policy, statistics="off", calibration=made)
    if part == "prompt rows":
        return replace(policy, prompt="stored")
    if part == "exact tokens":
        return replace(policy, full_precision=None)
    eye = lambda hessian: torch.eye(hessian.shape[-1]).expand_as(hessian).contiguous()
    changed = {
        number: replace(of, key_mean=None)
        if part == "key mean"
        else replace(of, key_hessian=eye(of.key_hessian), value_hessian=eye(of.value_hessian))
        for number, of in made.layers.items()
    }
    return replace(policy, calibration=Calibration(made.num_layers, changed, made.made_of))


class Rival(readers.ThroughCache):
    """transformers' own cache of 4 bits, in the quantized cache's place. size: what it holds for the last contexts, 16-bit tokens too."""

    def __init__(self, backend: str, chunk: int | None) -> None:
        super().__init__(chunk, self._cache, lambda model: nullcontext())
        self.backend, self.size, self.held = backend, None, None

    def _cache(self, model: Any, policy: Any) -> Any:
        from transformers import QuantizedCache

        self.held = QuantizedCache(self.backend, model.config, nbits=4, **RIVALS[self.backend])
        self.held.quantized_layers, self.held.specs = {}, []
        return self.held

    def __call__(self, model: Any, ids: torch.Tensor, *given: Any) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        found = super().__call__(model, ids, *given)
        geometry = model.config.get_text_config()
        held = lambda layer: nbytes([layer._quantized_keys, layer._quantized_values, layer.keys, layer.values])
        stored = sum(map(held, self.held.layers)) / ids.numel()
        heads = len(self.held.layers) * geometry.num_key_value_heads
        size = getattr(geometry, "head_dim", None) or geometry.hidden_size // geometry.num_attention_heads
        self.size = policies.Size(stored, stored / heads, 2 * size * heads)
        return found


def measure(loaded: models.Loaded, made: list[trials.Trial], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs over one text, each as the file has it."""
    model, read = loaded.model, readers.ThroughCache(given.chunk)
    tried = policies.policies_of(given.kv)
    if given.parts:
        tried |= {f"4bit without {part}": without(part, model) for part in PARTS}
    say = lambda name, step: print(f"{name}, pass {step}", file=sys.stderr, flush=True) if step % 16 == 0 else None
    result = evaluation.evaluate(model, made, tried, read=read, on_step=say, context=made[0].ids.shape[-1])
    yield {"read": read.name, **result.to_dict()}
    for backend in RIVALS if given.rivals else ():
        rival, name = Rival(backend, given.chunk), f"transformers {backend} 4-bit"
        measured = evaluation.measure
        evaluation.measure = lambda result, *of, rival=rival: setattr(result, "size", rival.size)  # no geometry of ours
        try:
            result = evaluation.evaluate(model, made, {name: Policy("int4")}, read=rival, on_step=say)
        except ImportError as error:
            print(f"{backend} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        finally:
            evaluation.measure = measured
        yield {"read": read.name, **result.to_dict()}


def table(runs: list[dict[str, Any]], shown: Any) -> list[str]:
    """Markdown of the rows whose names are `shown`."""
    lines = [
        "| model, text | cache | bytes | KL of decoded tokens | same top-1, % | perplexity, % | KL of the prompt |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for run in runs:
        for row in run["formats"]:
            if shown(row["format"]):
                kl, prompt = (report.kl_with_error(of) for of in (row, row["prompt"]))
                lines.append(
                    f"| {run['model']}, {run['text']} | `{row['format']}` | {row['bytes_per_head']:.0f} | {kl} | {row['same_top1']:.1f} | "
                    f"{row['perplexity_change']:+.2f} | {prompt} |"
                )
    return lines if len(lines) > 2 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers directory or a GGUF file; SmolLM2 if left out; none to write tables alone")
    parser.add_argument("--name", help="of the model, in the file")
    parser.add_argument("--kv", default=DEFAULT_KV, help="presets, formats, files of policies")
    parser.add_argument("--text", default="news", help="news, docs or files, separated by commas")
    parser.add_argument("--contexts", type=int, default=4, help="read side by side")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--decode", type=int, default=256, help="tokens read one at a time after it")
    parser.add_argument("--chunk", type=int, help="tokens of a pass of the prompt")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--into", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    runs = report.read_json(given.out)["runs"] if given.out.exists() else []
    if given.model != "none":
        loaded, length = models.load(given.model, given.device, getattr(torch, given.dtype)), given.prompt + given.decode
        scored = given.decode + (given.prompt if given.chunk is None else (given.prompt - 1) % given.chunk + 1)
        for source in given.text.split(","):
            tokens = given.contexts * length
            chosen = text.load(source, tokens)
            ids = text.cut(chosen, loaded.tokenizer, length, tokens)
            for run in measure(loaded, [trials.TextTrial(ids, scored, given.decode)], given):
                runs.append({"model": given.name or loaded.name, "text": chosen.name, **run})
                given.out.write_text(report.in_json(runs) + "\n", encoding="utf-8")
    presets = lambda name: "without" not in name and "transformers" not in name
    blocks = {"presets": table(runs, presets), "parts": table(runs, lambda name: "without" in name or name == "4bit")}
    blocks["models"] = table(runs, lambda name: True)
    print("\n".join(blocks["models"]))
    for path in given.into:
        fill(path, blocks, "through")


if __name__ == "__main__":
    main()
