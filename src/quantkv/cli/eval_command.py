"""`quantkv eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..policy_file import PRESETS
from . import completion, options, output, policies
from .common import print_table
from .interrupt import Interrupted
from .options import CalibrationFile, Device, Dtype, FullPrecisionOption
from .output import Json
from .waiting import progress, waiting

if TYPE_CHECKING:
    from ..policy import Policy
    from .eval import Reader
    from .models import Found
    from .text import LoadedText
    from .trials import Trial

CONTINUED = 64  # tokens of a greedy continuation
DECODED = 256  # tokens of a context that are decoded, where nothing else is said
DEFAULT_KV = "int4,8bit,4bit,3bit,2bit"
BATCH = 8  # prompts that are continued side by side
LOGITS_AT_ONCE = 1 << 28  # of the exact cache, which are held: so many contexts are decoded side by side


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("eval")(eval_command)


def eval_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="DIR|GGUF", show_default=options.DEFAULT_MODEL, help=options.MODEL_HELP + " May be given several times."
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="FILE|news|docs", show_default=options.DEFAULT_TEXT, help=options.TEXT_HELP + " May be given several times."
        ),
    ] = None,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            "--kv",
            metavar="A,B,FILE.json",
            show_default=DEFAULT_KV,
            autocompletion=completion.caches,
            help=f"Caches: presets ({', '.join(PRESETS)}); {options.KV_HELP} Or policies of tune. all: every format. May be given several "
            "times.",
        ),
    ] = None,
    calibration: CalibrationFile = None,
    full_precision: FullPrecisionOption = None,
    tests: Annotated[
        str,
        typer.Option(
            "--tests",
            metavar="kl,copy,codes,greedy",
            help="kl: predictions of text. copy: a passage from earlier found again. codes: names and codes asked again. greedy: how "
            "long a continuation agrees.",
        ),
    ] = "kl",
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of a context; each starts an empty cache.")] = 1024,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of text, rounded down to whole contexts.")] = 4096,
    lengths: Annotated[str, typer.Option("--lengths", metavar="N,M,...", help="Of copy and codes: tokens of a context.")] = "2048",
    passage: Annotated[int, typer.Option("--passage", min=1, help="Of copy: tokens of a passage.")] = 64,
    depths: Annotated[
        str, typer.Option("--depths", metavar="A,B,...", help="Of copy: where passages stand, from 0 (first) to 1.")
    ] = "0,0.25,0.5,0.75,1",
    decode: Annotated[
        int | None,
        typer.Option(
            "--decode",
            min=1,
            show_default=f"a quarter of the context, at most {DECODED}",
            help="Tokens of each context that are read one at a time, behind a prompt of the others.",
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            min=1,
            show_default="the whole prompt",
            help="Tokens of a prompt that one forward pass reads; its loss is then that of the last pass.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Teacher-forced, without a cache: one pass in which every token sees what decoding would. Prompts are not tried.",
        ),
    ] = False,
    json_file: Json = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|svg", help="Plot loss against bytes.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report: tables and plots in one file.")] = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Measure what each preset, format or policy costs: how its predictions of a text differ from those of the exact cache.

    Through the cache, as a user fills it: a prompt, then one token at a time.
    """
    from ..calibration import MIN_TOKENS
    from . import html, report

    output.check_file("--json", json_file)
    output.check_file("--plot", plot_file, (".png", ".svg"))
    output.check_file("--html", html_file)
    html.check_plots("--plot", plot_file)
    html.check_plots("--html", html_file)
    if tokens < context:
        raise ValueError(f"--tokens {tokens}: at least one context is needed (--context {context})")
    if tokens < MIN_TOKENS:
        raise ValueError(f"--tokens {tokens}: at least {MIN_TOKENS} are needed for figures that say anything")
    if quick and (decode, chunk) != (None, None):
        raise ValueError(f"{'--chunk' if decode is None else '--decode'}: --quick fills no cache; leave it out")
    plan = EvalPlan(tests, context, tokens, lengths, passage, depths, 0 if quick else decode, chunk)
    chosen = policies.policies_of(",".join(kv or [DEFAULT_KV]), calibration, full_precision)
    strict = kv not in (None, ["all"])
    console = options.stderr()
    from . import text as texts

    loaded_texts = [texts.load(name, max(tokens, *plan.lengths)) for name in texts.named(text)]
    found = [options.find(name, device, dtype, console) for name in model or [None]]
    prepared = [_prepare(one, plan, chosen, strict, loaded_texts, console) for one in found]
    from .readers import TeacherForced, ThroughCache

    read = TeacherForced() if quick else ThroughCache(chunk)
    runs: list[dict[str, Any]] = []
    with output.tables(json_file):
        for one, (usable, trials) in zip(found, prepared):
            _run(one, usable, list(zip(loaded_texts, trials)), plan, read, runs, device, dtype, console)
            if not runs[-1]["complete"]:
                break
    output.write_json(json_file, report.in_json(runs))
    if plot_file is not None:
        from . import plot

        plot.draw(plot_file, runs[0])  # of the first model and text
        options.say(console, f"plot: {plot_file}")
    if html_file is not None:
        html.write(html_file, runs)
        options.say(console, f"report: {html_file}")
    if not runs[-1]["complete"]:
        last = runs[-1]
        raise Interrupted(
            f"the figures are over {last['contexts']} of {last['contexts_asked']} contexts, of {len(last['formats'])} of "
            f"{last['formats_asked']} formats"
        )


class EvalPlan:
    """What is tried, by the command's options. ValueError for those that make no sense, before anything is loaded."""

    def __init__(
        self, tests: str, context: int, tokens: int, lengths: str, passage: int, depths: str, decode: int | None, chunk: int | None
    ) -> None:
        from .trials import TESTS

        self.tests = [name.strip() for name in tests.split(",") if name.strip()]
        if not self.tests or not set(self.tests) <= set(TESTS):
            raise ValueError(f"--tests {tests}: allowed: {', '.join(TESTS)}")
        self.context, self.tokens, self.passage = context, tokens, passage
        self.decoded = min(DECODED, -(-context // 4)) if decode is None else decode  # 0: all, in one pass
        if self.decoded >= context:
            raise ValueError(f"--decode {decode}: fewer than the {context} tokens of a context are needed, whose others are the prompt")
        prompt = context - self.decoded
        self.scored = self.decoded and self.decoded + (prompt if chunk is None else (prompt - 1) % chunk + 1)
        retrieval = {"copy", "codes"} & set(self.tests)
        self.lengths = [int(_number("--lengths", word, 64, 1 << 30)) for word in lengths.split(",")] if retrieval else [context]
        self.depths = [_number("--depths", word, 0, 1) for word in depths.split(",")]
        if "greedy" in self.tests and context < 2 * CONTINUED:
            raise ValueError(f"--context {context}: of {2 * CONTINUED} tokens or more for --tests greedy, which continues {CONTINUED}")

    def trials(self, text: LoadedText, tokenizer: Any, vocabulary: int) -> list[Trial]:
        """What a text is cut into. ValueError where it is too short."""
        from ..calibration import MIN_TOKENS
        from . import text as texts
        from . import trials

        made: list[Trial] = []
        contexts = texts.cut(text, tokenizer, self.context, self.tokens)
        if contexts.numel() < MIN_TOKENS:
            raise ValueError(f"--text {text.name}: {contexts.numel()} tokens in whole contexts; {MIN_TOKENS} are needed")
        if "kl" in self.tests:
            if self.decoded:
                side_by_side = max(LOGITS_AT_ONCE // (self.scored * vocabulary), 1)
                made += [trials.TextTrial(ids, self.scored, self.decoded) for ids in contexts.split(side_by_side)]
            else:
                made += [trials.TextTrial(ids) for ids in contexts]
        for length in self.lengths:
            longer = texts.cut(text, tokenizer, length, max(length, self.tokens))
            if "copy" in self.tests:
                made += trials.copies(longer, self.passage, self.depths)
            if "codes" in self.tests:
                begin = texts.beginning(tokenizer)
                made += [trials.codes(ids[len(begin) :].tolist(), tokenizer, begin, length, seed) for seed, ids in enumerate(longer)]
        if "greedy" in self.tests:
            made += [trials.Greedy(ids[:, :-CONTINUED], CONTINUED + 1) for ids in contexts.split(BATCH)]
        return made


def _number(argument: str, word: str, low: float, high: float) -> float:
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ValueError(f"{argument} {word}: a number from {low:,} to {high:,} is needed")
    return value


def _prepare(
    found: Found, plan: EvalPlan, chosen: dict[str, Policy], strict: bool, texts: list[LoadedText], console: Any
) -> tuple[dict[str, Policy], list[list[Trial]]]:
    """The policies that the model can take, and the trials of each text. ValueError for what does not fit the model."""
    from . import models
    from .trials import TextTrial

    for length in {plan.context, *plan.lengths}:
        models.check_positions(found, f"--{'context' if length == plan.context else 'lengths'} {length}", length)
    usable, reasons = policies.fitting(chosen, found.config, strict)
    for name, reason in reasons.items():
        options.say(console, f"{name} is left out: {reason}", "yellow")
    if not usable:
        raise ValueError(f"--model {found.name}: no format can take its head size")
    vocabulary = found.config.get_text_config(decoder=True).vocab_size
    trials = [plan.trials(text, found.tokenizer, vocabulary) for text in texts]
    for text, made in zip(texts, trials):
        seen = sum(trial.ids.numel() for trial in made if isinstance(trial, TextTrial))
        if "kl" in plan.tests and seen < plan.tokens // plan.context * plan.context:
            options.say(console, f"--text {text.name}: only {seen:,} tokens in whole contexts", "yellow")
    return usable, trials


def _run(
    found: Found,
    usable: dict[str, Policy],
    tried: list[tuple[LoadedText, list[Trial]]],
    plan: EvalPlan,
    read: Reader,
    runs: list[dict[str, Any]],
    device: str | None,
    dtype: str,
    console: Any,
) -> None:
    """One model over each text; each is printed and added to `runs` when it is through, or interrupted."""
    from . import costs, report
    from . import eval as evaluation

    loaded = options.load(found, device, dtype, console)
    with waiting(console, "trying the formats"):
        beyond = costs.beyond(loaded.model, usable, read)
    for text, trials in tried:
        with progress(console, costs.steps_of(trials, usable, read), beyond) as on_step:
            result = evaluation.evaluate(loaded.model, trials, usable, read=read, on_step=on_step, context=plan.context)
        asked = {"contexts": result.trials, "contexts_asked": sum(trial.sequences for trial in trials), "formats_asked": len(usable)}
        runs.append({"model": found.name, "text": text.name, "read": read.name, **result.to_dict(), **asked})
        print_table(report.table(runs[-1]))
        if not result.complete:
            return
