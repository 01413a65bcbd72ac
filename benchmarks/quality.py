"""What the cache costs on real models, row by row against what was aimed at: `python benchmarks/quality.py --out quality.json`.

SmolLM2-135M is the default model; others are named by path (`--qwen DIR --gemma DIR`), and a row of a model that is not given is left out.
For each text the calibration and the formats by layer come from the other text. transformers' own 4-bit caches run beside the policies
where their packages (optimum-quanto, hqq) are installed. `--parts` runs some of it, "" nothing; a file that exists is added to.
`--into FILE.md ...` replaces the lines between `<!-- quality:NAME -->` and `<!-- /quality:NAME -->`: summary, targets, rivals.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkv.calibration import Calibration
from quantkv.cli import eval as evaluation
from quantkv.cli import html, models, readers, report, text, trials, tune
from quantkv.cli.allocation import allocate
from quantkv.cli.metrics import Comparison
from quantkv.cli.policies import full_precision_of
from quantkv.formats import get_format
from quantkv.integrations.transformers import calibrate
from quantkv.model_analysis.sensitivity import sensitivities
from quantkv.policy import Policy

MODELS = ("smollm2", "qwen", "gemma")
PARTS = ("kl", "copy", "codes", "long", "rivals")
CHOICES = ("trellis2", "levels3", "levels4", "levels5", "levels6", "levels8")  # of formats by layer
WINDOW, SHORT_WINDOW, LONG_WINDOW, NO_WINDOW = "16,24", "16,8", "16,128", "16,0"
FEW_WINDOW, FEWEST_WINDOW = "4,16", "4,4"
FINER_KEYS = ("levels3/trellis2", "tuned")
CALIBRATED_ON = 4096  # tokens
TAIL = 126  # tokens that they keep at 16 bits, at most 127; hqq packs two groups in a byte, and needs an even number of them


@dataclass(frozen=True)
class Row:
    """One target. figure: of a policy's JSON; least: smaller is better. formats: uniform ones, and "tuned" for formats by layer that fill
    `limit` bytes of a token and kv head at head size 64, or `limit` of the model's own."""

    label: str
    part: str
    model: str
    limit: float
    formats: tuple[str, ...]
    must: float
    aim: float
    full_precision: str = WINDOW
    head_size: int = 64

    @property
    def less_is_better(self) -> bool:
        return self.part in ("kl", "long")


ROWS = (
    Row("KL, <= 104 bytes", "kl", "smollm2", 104, ("levels6/levels5",), 0.0003, 0.0001),
    Row("KL, <= 80", "kl", "smollm2", 80, ("levels4", "tuned"), 0.0012, 0.0008),
    Row("KL, <= 72", "kl", "smollm2", 72, ("tuned",), 0.0024, 0.0016),
    Row("KL, <= 64", "kl", "smollm2", 64, ("levels3", "tuned"), 0.0033, 0.0022),
    Row("KL, <= 64, fewer full-precision tokens", "kl", "smollm2", 64, ("tuned",), 0.0033, 0.0022, FEW_WINDOW),
    Row("KL, <= 56", "kl", "smollm2", 56, ("tuned",), 0.0078, 0.0055),
    Row("KL, <= 48", "kl", "smollm2", 48, ("levels2", "trellis2"), 0.0187, 0.0120),
    Row("KL, <= 48, fewer full-precision tokens", "kl", "smollm2", 48, ("tuned",), 0.0187, 0.0120, SHORT_WINDOW),
    Row("KL, <= 40, first tokens exact only", "kl", "smollm2", 40, ("trellis2",), 0.17, 0.12, NO_WINDOW),
    Row("copied passage found, %, <= 80", "copy", "smollm2", 80, ("levels4",), 96.2, 96.7),
    Row("copied passage found, %, <= 64", "copy", "smollm2", 64, ("levels4/trellis2", "tuned"), 95.5, 96.2),
    Row("copied passage found, %, <= 48", "copy", "smollm2", 48, ("levels2", "trellis2"), 92.9, 95.0),
    Row("copied passage found, %, <= 48, fewer full-precision tokens", "copy", "smollm2", 48, FINER_KEYS, 92.9, 95.0, FEWEST_WINDOW),
    Row("digits of codes right, %, <= 80", "codes", "smollm2", 80, ("levels4",), 78.0, 78.8),
    Row("digits of codes right, %, <= 60", "codes", "smollm2", 60, ("tuned",), 78.0, 78.5),
    Row("digits of codes right, %, <= 48", "codes", "smollm2", 48, ("levels2", "trellis2"), 68.0, 74.0),
    Row("digits of codes right, %, <= 48, fewer full-precision tokens", "codes", "smollm2", 48, FINER_KEYS, 68.0, 74.0, FEWEST_WINDOW),
    Row("KL, context 4,096, <= 80", "long", "smollm2", 80, ("levels4",), 0.0004, 0.0003, LONG_WINDOW),
    Row("KL, context 4,096, <= 48", "long", "smollm2", 48, ("trellis2",), 0.0091, 0.0065, LONG_WINDOW),
    Row("Qwen2 (key bias): KL, <= 80", "kl", "qwen", 80, ("levels4", "tuned"), 0.0031, 0.002),
    Row("Qwen2 (key bias): KL, <= 52", "kl", "qwen", 52, ("tuned",), 0.029, 0.018),
    Row("Gemma 3 270M: KL, 4 bits", "kl", "gemma", 80, ("levels4", "tuned"), 0.0038, 0.0025, head_size=256),
    Row("Gemma 3 270M: KL, 2 bits", "kl", "gemma", 48, ("trellis2", "tuned"), 0.06, 0.04, head_size=256),
)
CONTEXTS = {"kl": 1024, "copy": 2048, "codes": 2048, "long": 4096, "rivals": 1024}
SUMMARY = ("int4", "levels4 +16,24", "tuned 64 +16,24", "trellis2 +16,24")  # of the first model and text
PASSAGE = 256  # copied from the beginning of a context of 2,048: 1,700 tokens back


class Bench:
    """One model over one text, calibrated and tuned on another."""

    def __init__(self, name: str, loaded: models.Loaded, on: str, by: str, count: int) -> None:
        self.name, self.loaded, self.on, self.count = name, loaded, text.load(on, 1 << 16), count
        self.other = text.load(by, 1 << 16)
        self.rows = [row for row in ROWS if row.model == name]
        self._calibration: Calibration | None = None
        self._lost: dict[str, Any] = {}

    @property
    def calibration(self) -> Calibration:
        if self._calibration is None:
            ids = text.cut(self.other, self.loaded.tokenizer, CALIBRATED_ON, CALIBRATED_ON)
            say(f"{self.name}: calibrating on {self.other.name}")
            self._calibration = calibrate(self.loaded.model, ids, limit=8192)
        return self._calibration

    def policy(self, name: str, row: Row) -> tuple[str, Policy] | None:
        """A name and a calibrated policy with the row's full-precision tokens; None for a format that is not there."""
        full_precision = full_precision_of(row.full_precision)
        if name == "tuned":
            return f"tuned {row.limit:g} +{row.full_precision}", self.tuned(row)
        try:
            get_format(name)
        except ValueError:
            return None
        return f"{name} +{row.full_precision}", Policy(name, calibration=self.calibration, full_precision=full_precision)

    def tuned(self, row: Row) -> Policy:
        """Formats by layer that fill the row's bytes, chosen by what each layer loses over the other text."""
        base = Policy(CHOICES[0], calibration=self.calibration, full_precision=full_precision_of(row.full_precision))
        if row.full_precision not in self._lost:
            ids = text.cut(self.other, self.loaded.tokenizer, 1024, 1024)
            say(f"{self.name}: sensitivities over {self.other.name}")
            self._lost[row.full_precision] = sensitivities(self.loaded.model, ids, CHOICES, base)
        room = tune.Room(self.loaded.config, list(CHOICES), base, CONTEXTS["kl"])
        limit = row.limit * row.head_size / 64
        return tune.policy_of(allocate(room.choices(self._lost[row.full_precision]), room.left(limit)), base)

    def trials(self, part: str) -> list[trials.Trial]:
        """Contexts of unseen text, and what is asked of them."""
        context, tokenizer = CONTEXTS[part], self.loaded.tokenizer
        contexts = text.cut(self.on, tokenizer, context, context * self.count)
        if part == "copy":
            return trials.copies(contexts, PASSAGE, [0.0])
        if part == "codes":
            begin = text.beginning(tokenizer)
            return [trials.codes(ids[len(begin) :].tolist(), tokenizer, begin, context, seed) for seed, ids in enumerate(contexts)]
        return [trials.TextTrial(ids) for ids in contexts]

    def run(self, part: str) -> dict[str, Any] | None:
        """The figures of all policies of a part; None where no row asks for it."""
        made: dict[str, Policy] = {}
        for row in self.rows:
            if row.part == part:
                made |= dict(named for named in (self.policy(name, row) for name in row.formats) if named is not None)
        if not made:
            return None
        if part in ("kl", "copy", "codes"):
            made["int4"] = Policy("int4")  # as others store it
        say(f"{self.name}, {self.on.name}, {part}: {', '.join(made)}")
        asked = self.trials(part)
        result = evaluation.evaluate(self.loaded.model, asked, made, context=CONTEXTS[part] if part == "long" else 1024)
        told = {
            "part": part,
            "model": self.name,
            "text": self.on.name,
            "calibrated_on": self.other.name,
            "read": readers.TeacherForced.name,
        }
        return {**told, "contexts": len(asked), **result.to_dict()}

    def rivals(self) -> dict[str, Any]:
        """transformers' own quantized caches and this project's, over the last tokens of contexts."""
        contexts = text.cut(self.on, self.loaded.tokenizer, CONTEXTS["rivals"], CONTEXTS["rivals"] * self.count)
        row = next(row for row in self.rows if row.limit == 80)
        tails = [trials.TextTrial(ids, TAIL) for ids in contexts]
        ours = dict([self.policy("levels4", row), ("int4", Policy("int4"))])
        say(f"{self.name}, {self.on.name}, rivals")
        rows = evaluation.evaluate(self.loaded.model, tails, ours).to_dict()["formats"]
        for backend, options in (("quanto", {}), ("hqq", {"axis_key": 1, "axis_value": 1})):
            try:
                rows.append(rival(self.loaded.model, contexts, backend, options))
            except ImportError as error:
                say(f"{backend} is left out: {str(error).splitlines()[0]}")
        return {"part": "rivals", "model": self.name, "text": self.on.name, "tokens": TAIL * len(contexts), "formats": rows}


@torch.inference_mode()
def rival(model: Any, contexts: torch.Tensor, backend: str, options: dict[str, int]) -> dict[str, Any]:
    """transformers' cache of 4 bits over the last TAIL tokens, which it keeps exact from one to the next as it would step by step."""
    from transformers import QuantizedCache

    comparison, size = Comparison(), 0.0
    for ids in contexts.to(model.device):
        full_precision = readers.last_logits(model, ids[None], TAIL, use_cache=False)[0]
        cache = QuantizedCache(backend, model.config, nbits=4, **options)
        model(ids[None, :-TAIL], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = model(ids[None, -TAIL:], past_key_values=cache, use_cache=True).logits[0]
        comparison.add(full_precision, logits, ids[-TAIL:])
        geometry = model.config.get_text_config()
        heads = len(cache.layers) * geometry.num_key_value_heads
        stored = sum(nbytes(layer._quantized_keys) + nbytes(layer._quantized_values) for layer in cache.layers) / (len(ids) - TAIL)
        elements = heads * 2 * (getattr(geometry, "head_dim", None) or geometry.hidden_size // geometry.num_attention_heads)
        half = (TAIL + 1) / 2 / len(ids)  # of the tokens, on average, are at 16 bits
        size = (stored * (1 - half) + 2 * elements * half) / heads
    return {"format": f"transformers {backend} 4-bit", "bytes_per_head": size, "kl": comparison.kl, "kl_error": comparison.kl_error}


def nbytes(value: Any) -> float:
    """Bytes of all tensors inside, with floats (scales, zero points) as 16 bits each."""
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        if names:
            return sum(nbytes(getattr(value, name)) for name in names)
        return value.numel() * (2 if value.is_floating_point() else value.element_size())
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def figure(row: Row, found: dict[str, Any]) -> tuple[float, float | None]:
    """What a policy's JSON says for a row, with its standard error."""
    if row.less_is_better:
        return found["kl"], found["kl_error"]
    return found[row.part]["share"], found[row.part]["error"]


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown: every target with what was measured, the best policy within the bytes first; exact caches' shares beside theirs."""
    texts = list(dict.fromkeys(run["text"] for run in runs))
    lines = ["| target | must | aim | " + " | ".join(texts) + " |", "|---|--:|--:|" + "---|" * len(texts)]
    for row in ROWS:
        cells = []
        for name in texts:
            run = next((r for r in runs if (r["part"], r["model"], r["text"]) == (row.part, row.model, name)), None)
            cells.append("" if run is None else "; ".join(measured(row, run)))
        if any(cells):
            lines.append(f"| {row.label} | {row.must:g} | {row.aim:g} | " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


def measured(row: Row, run: dict[str, Any]) -> list[str]:
    """A row's policies, each with its bytes, figure and standard error; bold where it reaches what it must."""
    names = {f"{name} +{row.full_precision}" for name in row.formats if name != "tuned"} | {f"tuned {row.limit:g} +{row.full_precision}"}
    shown = []
    for found in run["formats"]:
        if found["format"] in names:
            value, error = figure(row, found)
            reached = value <= row.must if row.less_is_better else value >= row.must
            text_ = report.with_error(value, error, 1 if not row.less_is_better else 4 if value > 0.002 else 5)
            shown.append(
                (
                    value if row.less_is_better else -value,
                    f"{'**' * reached}{text_}{'**' * reached} `{found['format']}` {found['bytes_per_head']:.1f} B",
                )
            )
    full_precision = "" if row.less_is_better else [f"16 bits {run['reference'][row.part]['share']:.1f}"]
    return [words for _, words in sorted(shown)] + list(full_precision)


def summary(runs: list[dict[str, Any]]) -> list[str]:
    """Markdown: a few policies over the first model and text."""
    first = {part: next((r for r in runs if r["part"] == part), {"formats": []}) for part in ("kl", "copy")}
    kl, copied = ({found["format"]: found for found in run["formats"]} for run in first.values())
    told = "reference" in first["copy"]
    rows = [("cache", "bytes", "KL", "perplexity", "copy accuracy"), ("---", "--:", "--:", "--:", "--:")]
    if told:
        rows.append(("16 bits", "256", "", "", f"{first['copy']['reference']['copy']['share']:.1f} %"))
    for name in SUMMARY:
        if name in kl:
            found, again = kl[name], copied.get(name)
            value = report.with_error(found["kl"], found["kl_error"], 4)
            share = "" if again is None else f"{again['copy']['share']:.1f} %"
            rows.append((f"`{name}`", f"{found['bytes_per_head']:.0f}", value, f"{found['perplexity_change']:+.2f} %", share))
    return ["| " + " | ".join(row if told else row[:-1]) + " |" for row in rows]


def fill(path: Path, blocks: dict[str, list[str]], kind: str = "quality") -> None:
    """Replace the blocks that a document has."""
    written = path.read_text()
    for name, lines in blocks.items():
        begin, end = f"<!-- {kind}:{name} -->\n", f"<!-- /{kind}:{name} -->"
        if begin in written and lines:
            head, rest = written.split(begin)
            written = head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    path.write_text(written)


def rivals_table(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["| model, text | cache | bytes | KL |", "|---|---|--:|--:|"]
    for run in runs:
        for found in run["formats"] if run["part"] == "rivals" else ():
            kl = report.with_error(found["kl"], found["kl_error"], 4)
            lines.append(f"| {run['model']}, {run['text']} | {found['format']} | {found['bytes_per_head']:.1f} | {kl} |")
    return lines if len(lines) > 2 else []


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", metavar="DIR", help="instead of the package's; none to leave it out")
    parser.add_argument("--qwen", metavar="DIR", help="a Qwen2 with key biases, head size 64")
    parser.add_argument("--gemma", metavar="DIR", help="Gemma 3 270M")
    parser.add_argument("--texts", default="news,docs", help="two, each calibrated on the other")
    parser.add_argument("--on", help="one of the texts; all if left out")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "quality.json")
    parser.add_argument("--html", type=Path, help="a report as well")
    parser.add_argument("--into", type=Path, nargs="*", default=[], help="documents whose blocks are replaced")
    given = parser.parse_args()
    texts = given.texts.split(",")
    runs = report.read_json(given.out)["runs"] if given.out.exists() else []
    for name in MODELS:
        source = getattr(given, name)
        if source == "none" or (source is None and name != "smollm2"):
            continue
        loaded = models.load(source, given.device) if given.parts else None
        for on, by in ((texts[0], texts[-1]), (texts[-1], texts[0])):
            bench = Bench(name, loaded, on, by, given.contexts)
            for part in filter(None, given.parts.split(",") if given.on in (None, on) else ()):
                run = bench.rivals() if part == "rivals" else bench.run(part)
                if run is None:
                    continue
                runs = [r for r in runs if (r["part"], r["model"], r["text"]) != (part, name, run["text"])] + [run]
                runs.sort(key=lambda r: (MODELS.index(r["model"]), PARTS.index(r["part"])))  # tables show the first model's first
                given.out.write_text(report.in_json(runs) + "\n", encoding="utf-8")
    print("\n".join([*table(runs), "", *rivals_table(runs)]))
    for path in given.into:
        fill(path, {"summary": summary(runs), "targets": table(runs), "rivals": rivals_table(runs)})
    if given.html:
        html.write(given.html, [run for run in runs if run["part"] != "rivals"])


if __name__ == "__main__":
    main()
