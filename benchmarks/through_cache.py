"""What caches lose through a real cache, with nothing prepared: the table of quality, part by part, row by row.

    python benchmarks/through_cache.py [--model NAME=DIR|GGUF ...] [--domain FILE ...] [--part presets ...] --out FILE.json

A prompt is read in one pass, then the text's next tokens one at a time; each cache is as typed. Parts:

presets: what `quantkv eval` shows, over news and documentation
parts: the 4-bit preset without one part each
rivals: transformers' own 4-bit caches, where optimum-quanto and hqq are installed
chunked: the last pass of a prompt that is read in several
domains: the 4-bit preset over the texts of `--domain`
short, long: greedy continuations
codes, far-codes: passkeys asked again in 1,536 and 5,120 tokens

Every row is in FILE.json as soon as it is measured, and what is there is not measured again.

A prompt in one pass reads its own rows, whatever the format. So a model's MLPs compute it once, for the exact cache, and each policy's pass
over it repeats their outputs; attention and the cache are real. `--whole` computes everything, and shows the prompt's loss.
`--into` writes a table of each part between `<!-- through:PART -->` and `<!-- /through:PART -->`. `--model none` measures nothing.
`--add` takes in what other processes or machines measured: of two figures of one cache over one text, that of more contexts stays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from quality import fill, nbytes

from quantkv.calibration import Calibration
from quantkv.cli import eval as evaluation
from quantkv.cli import models, policies, readers, report, text, trials
from quantkv.cli.eval_command import DEFAULT_KV
from quantkv.model_analysis.statistics import statistics_of
from quantkv.policy import Policy
from quantkv.spec import CacheSpec

WITHOUT = ("prompt rows", "exact tokens", "key mean", "Hessian", "statistics")
RIVALS = {"quanto": {}, "hqq": {"axis_key": 1, "axis_value": 1}}
CONTINUED = 40  # tokens of a greedy continuation
ALIKE = ("part", "model", "text", "read", "whole")  # of runs of which a table shows one row a cache
HEAD = (*ALIKE, "context", "decoded", "contexts", "device")  # of runs whose rows are of the same predictions


@dataclass(frozen=True)
class Part:
    """A part of the table. make: its trials of contexts `[N, T]`, by the tokens that are decoded. prompt: tokens before these."""

    make: Callable[[torch.Tensor, Any, int, int | None], list[trials.Trial]]
    texts: tuple[str, ...] = ("news",)
    kv: str = DEFAULT_KV
    contexts: int = 4
    prompt: int = 960
    decode: int = 64
    chunk: int | None = None


def read_on(contexts: torch.Tensor, tokenizer: Any, decode: int, last_pass: int | None) -> list[trials.Trial]:
    """Text that goes on behind a prompt. last_pass: tokens of the prompt whose loss is shown, too."""
    return [trials.TextTrial(contexts, decode + (last_pass or 0), decode)]


def continue_greedily(contexts: torch.Tensor, *_: Any) -> list[trials.Trial]:
    """Prompts that each cache continues."""
    return [trials.Greedy(contexts, CONTINUED + 1)]


def ask_codes(contexts: torch.Tensor, tokenizer: Any, *_: Any) -> list[trials.Trial]:
    """Passkeys between the tokens of each context."""
    begin = text.beginning(tokenizer)
    made = [trials.codes(ids[len(begin) :].tolist(), tokenizer, begin, contexts.shape[1], seed) for seed, ids in enumerate(contexts)]
    return list(made)


PARTS = {
    "presets": Part(read_on, texts=("news", "docs")),
    "parts": Part(read_on, kv="4bit"),
    "rivals": Part(read_on, kv="4bit"),
    "chunked": Part(read_on, kv="4bit,int4", contexts=1, prompt=8176, decode=16, chunk=2048),
    "domains": Part(read_on, texts=(), kv="4bit"),
    "short": Part(continue_greedily, contexts=24, prompt=64, decode=0),
    "long": Part(continue_greedily, contexts=8, prompt=1024, decode=0),
    "codes": Part(ask_codes, kv="4bit,2bit", contexts=2, prompt=1536, decode=0),
    "far-codes": Part(ask_codes, kv="4bit,2bit", contexts=2, prompt=5120, decode=0),
}


def without(part: str, model: Any) -> Policy:
    """The 4-bit preset for a model without one of its `WITHOUT`."""
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


class PromptOnce:
    """What the MLPs of a model put out for a batch, noted in the exact pass and repeated in passes over its beginning."""

    def __init__(self, model: Any) -> None:
        self.noted: dict[int, torch.Tensor] = {}
        self.repeating = False
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "mlp":
                module.forward = self._around(id(module), module.forward)

    def _around(self, key: int, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
            tokens = hidden.shape[1]
            if self.repeating and tokens > 1:
                return self.noted[key][:, :tokens]
            made = own(hidden, *more)
            if tokens > 1 and not self.repeating:
                self.noted[key] = made
            return made

        return forward

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Passes of several tokens are of the batch that the last exact pass read."""
        self.repeating = True
        try:
            yield
        finally:
            self.repeating = False


def unpack_without_compiler() -> None:
    """Let quanto unpack its codes by torch: of its extensions that is all a cache needs, and for a GPU their compiler takes minutes.
    ImportError without quanto."""
    from optimum.quanto.library.extensions import get_extension, is_extension_available

    unpack = lambda packed, bits: torch.cat([packed >> bits * i & 2**bits - 1 for i in range(8 // bits)])
    for name in ("quanto_cpp", "quanto_cuda"):
        if is_extension_available(name):
            get_extension(name)._lib = SimpleNamespace(unpack=unpack)


class Rival(readers.ThroughCache):
    """transformers' own cache of 4 bits, in the quantized cache's place. size: what it holds for the last contexts, 16-bit tokens too."""

    def __init__(self, backend: str, chunk: int | None) -> None:
        super().__init__(chunk, self._cache, lambda model: nullcontext())
        self.backend, self.size, self.held = backend, None, None

    def _cache(self, model: Any, policy: Any) -> Any:
        from transformers import QuantizedCache

        self.held = QuantizedCache(self.backend, model.config, nbits=4, **RIVALS[self.backend])
        self.held.quantized_layers, self.held.specs = {}, []
        if self.backend == "quanto":
            unpack_without_compiler()
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


class Reader:
    """Each policy by the reader that suits it: a rival by its own, the others through a `QuantizedCache`. once: by which a prompt in one
    pass is computed once; None: each cache's is computed."""

    def __init__(self, chunk: int | None, once: PromptOnce | None, rivals: dict[int, Rival]) -> None:
        self.own, self.once, self.rivals = readers.ThroughCache(chunk), once, rivals
        self.name = self.own.name

    def __call__(self, model: Any, ids: torch.Tensor, policy: Policy, *given: Any) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        shared = self.once is not None and self.own.chunk is None and policy.prompt == "own"
        with self.once.repeated() if shared else nullcontext():
            return self.rivals.get(id(policy), self.own)(model, ids, policy, *given)

    def passes(self, tokens: int, prompt: int) -> list[int]:
        """As the cache's."""
        return self.own.passes(tokens, prompt)

    def measure(self, result: Any, specs: Any, policy: Policy, *of: Any) -> None:
        """A rival's bytes are what it holds: it has no geometry of ours."""
        if id(policy) in self.rivals:
            result.size = self.rivals[id(policy)].size
        else:
            MEASURE(result, specs, policy, *of)


MEASURE = evaluation.measure


def caches(name: str, part: Part, model: Any, kv: str | None) -> tuple[dict[str, Policy], dict[int, Rival]]:
    """The caches of a part by name, or those of `--kv`, and the readers of those that are not ours. ValueError for unknown names."""
    tried, rivals = policies.policies_of(part.kv), {}
    if name == "parts":
        tried |= {f"4bit without {of}": without(of, model) for of in WITHOUT}
    if name == "rivals":
        for backend in RIVALS:
            stand_in = Policy("int4")
            tried[f"transformers {backend} 4-bit"], rivals[id(stand_in)] = stand_in, Rival(backend, part.chunk)
    if kv is not None:
        chosen = [{of: tried[of]} if of in tried else policies.policies_of(of) for of in kv.split(",")]
        tried = {of: policy for one in chosen for of, policy in one.items()}
    return tried, rivals


def same(run: dict[str, Any], head: dict[str, Any]) -> bool:
    """Whether a run of the file is of the same model, text, tokens and device."""
    return all(run.get(key) == value for key, value in head.items())


def add(runs: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    """Take runs of another file into `runs`. Of two rows of one part, model, text and cache, the one over more contexts stays, and of as
    many the added one; a run without rows goes."""
    alike = lambda run: [run[key] for key in ALIKE]
    for new in more:
        rows = list(new["formats"])
        for old in [run for run in runs if alike(run) == alike(new)]:
            stays = {row["format"] for row in old["formats"]} if old["contexts"] > new["contexts"] else set()
            rows = [row for row in rows if row["format"] not in stays]
            taken = {row["format"] for row in rows}
            old["formats"] = [row for row in old["formats"] if row["format"] not in taken]
        if (run := next((run for run in runs if same(run, {key: new[key] for key in HEAD})), None)) is None:
            runs.append({**new, "formats": rows})
        else:
            run["formats"] += rows
    runs[:] = [run for run in runs if run["formats"]]


def measure(loaded: models.Loaded, name: str, source: str, given: argparse.Namespace, runs: list[dict[str, Any]], save: Any) -> None:
    """One part over one text: rows that `runs` lacks are measured, and saved one by one."""
    part = PARTS[name]
    contexts, decode = given.contexts or part.contexts, given.decode if given.decode and part.decode else part.decode
    length = part.prompt + decode
    chosen = text.load(source, contexts * length)
    ids = text.cut(chosen, loaded.tokenizer, length, contexts * length)
    last_pass = None if part.chunk is None else (part.prompt - 1) % part.chunk + 1
    if given.whole and part.make is read_on:
        last_pass = last_pass or part.prompt
    made = part.make(ids, loaded.tokenizer, decode, last_pass)
    tried, rivals = caches(name, part, loaded.model, given.kv)
    once = None if given.whole or part.chunk is not None else given.once
    reader = Reader(part.chunk, once, rivals)
    evaluation.measure = reader.measure
    head = {"part": name, "model": loaded.name, "text": chosen.name, "read": reader.name, "whole": once is None}
    head |= {"context": length, "decoded": decode, "contexts": len(ids), "device": device_name(loaded.model.device)}
    run = next((run for run in runs if same(run, head)), None)
    known = {row["format"] for row in run["formats"]} if run else set()
    left = {name: policy for name, policy in tried.items() if name not in known}

    def keep(result: evaluation.Result) -> None:
        nonlocal run
        if result.trials < len(ids):
            return
        values = result.to_dict()
        if run is None:
            run = {**values, **head, "formats": []}
            runs.append(run)
        taken = {row["format"] for row in values["formats"]}
        run["formats"] = [row for row in run["formats"] if row["format"] not in taken] + values["formats"]
        save()

    say = lambda cache, step: print(f"{name}, {chosen.name}: {cache}, pass {step}", file=sys.stderr, flush=True) if step % 32 == 0 else None
    for unit in [left] if len(made) > 1 else [{name: policy} for name, policy in left.items()] if rivals else [left]:
        if not unit:
            continue
        try:
            evaluation.evaluate(loaded.model, made, unit, read=reader, on_step=say, on_finished=keep, context=length)
        except ImportError as error:
            print(f"{', '.join(unit)}: left out: {str(error).splitlines()[0]}", file=sys.stderr)


def device_name(device: torch.device) -> str:
    """A GPU by its name, anything else by its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown of a part's rows, the largest of a run first: what was tried of them."""
    columns = [
        ("model, text", "---", lambda run, row: f"{run['model']}, {run['text']}"),
        ("cache", "---", lambda run, row: f"`{row['format']}`"),
        ("bytes", "--:", lambda run, row: f"{row['bytes_per_head']:.0f}"),
    ]
    if any("kl" in row for run in runs for row in run["formats"]):
        columns += [
            ("KL of decoded tokens", "--:", lambda run, row: exactly(row)),
            ("same top-1, %", "--:", lambda run, row: f"{row['same_top1']:.1f}"),
            ("perplexity, %", "--:", lambda run, row: f"{row['perplexity_change']:+.2f}"),
        ]
    if any("prompt" in row for run in runs for row in run["formats"]):
        columns.append(("KL of the prompt", "--:", lambda run, row: exactly(row["prompt"]) if "prompt" in row else ""))
    if any("greedy" in row for run in runs for row in run["formats"]):
        columns += [
            ("identical", "--:", lambda run, row: f"{row['greedy']['identical']} of {row['greedy']['continuations']}"),
            ("tokens until they part", "--:", lambda run, row: report.with_error(row["greedy"]["tokens"], row["greedy"]["error"])),
        ]
    if any("codes" in row for run in runs for row in run["formats"]):
        columns += [
            ("codes right, % (16 bits)", "--:", lambda run, row: f"{row['codes']['whole']:.0f} ({run['reference']['codes']['whole']:.0f})"),
            ("digits right, %", "--:", lambda run, row: report.with_error(row["codes"]["share"], row["codes"]["error"])),
        ]
    lines = ["| " + " | ".join(of[index] for of in columns) + " |" for index in (0, 1)]
    rows = [(run, row) for run in runs for row in sorted(run["formats"], key=lambda row: -row["bytes_per_head"])]
    lines += ["| " + " | ".join(cell(*row) for *_, cell in columns) + " |" for row in rows]
    return lines if len(lines) > 2 else []


def exactly(row: dict[str, Any]) -> str:
    """A KL with its standard error, six decimals below a thousandth."""
    if abs(row["kl"]) < 1e-7:
        return "0"
    return report.with_error(row["kl"], row["kl_error"], 6 if row["kl"] < 0.001 else 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="NAME=DIR|GGUF, several times; SmolLM2 if left out; none to write tables alone")
    parser.add_argument("--part", action="append", choices=PARTS, help="several times; all if left out")
    parser.add_argument("--kv", help="these caches in place of a part's, or some of these")
    parser.add_argument("--text", help="this text in place of a part's: news, docs, a file")
    parser.add_argument("--domain", action="append", default=[], help="a text of another kind, several times")
    parser.add_argument("--contexts", type=int, help="read side by side, where a part says another number")
    parser.add_argument("--decode", type=int, help="tokens read one at a time behind a prompt, where a part says another number")
    parser.add_argument("--whole", action="store_true", help="compute each cache's prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="files of this script whose rows go into that of --out")
    parser.add_argument("--into", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # no TF32: an exact cache loses nothing but roundings of float32
    torch.backends.cudnn.allow_tf32 = False
    PARTS["domains"] = replace(PARTS["domains"], texts=tuple(given.domain))
    runs = report.read_json(given.out)["runs"] if given.out.exists() else []
    save = lambda: given.out.write_text(report.in_json(runs) + "\n", encoding="utf-8")
    for file in given.add:
        add(runs, report.read_json(file)["runs"])
        save()
    for named in given.model or ["SmolLM2-135M"]:
        if named == "none":
            continue
        name, _, path = named.partition("=")
        loaded = replace(models.load(path or None, given.device, getattr(torch, given.dtype)), name=name)
        began, cpu = time.perf_counter(), time.process_time()
        statistics_of(loaded.model)
        took = time.perf_counter() - began, time.process_time() - cpu
        print(f"{name}: statistics in {took[0]:.1f} s, {took[1]:.1f} s of CPU", file=sys.stderr, flush=True)
        given.once = None if given.whole else PromptOnce(loaded.model)
        for part in given.part or PARTS:
            for source in [given.text] if given.text else PARTS[part].texts:
                measure(loaded, part, source, given, runs, save)
    blocks = {name: table([run for run in runs if run.get("part") == name]) for name in PARTS}
    print("\n\n".join("\n".join(lines) for lines in blocks.values() if lines))
    for path in given.into:
        fill(path, blocks, "through")


if __name__ == "__main__":
    main()
