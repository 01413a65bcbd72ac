"""The commands. They raise for bad input, `Interrupted` with what is left to say after Ctrl-C; `app` makes one line of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import bench, calibrate, doctor, eval_command, formats, html, options, plan, tune
from .common import recipe_of
from .options import Device, Dtype, Model

commands = typer.Typer(
    name="quantkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantized KV caches: what each format costs and saves on a real model.",
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

    errors = options.stderr()
    loaded = options.load(options.find(model, device, dtype, errors), device, dtype, errors)
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
        f"{len(ids)} + {len(steps)} tokens in {cache.nbytes + cache.exact_nbytes:,} bytes; 16 bits would take {sixteen_bits:,}",
        style="dim",
        highlight=False,
    )
    if compare:
        out.rule("exact cache", align="left", style="cyan")
        exact, _ = generate.run(loaded.model, loaded.tokenizer, ids, None, max_new_tokens, write)
        print()
        _print_comparison(out, loaded.tokenizer, name, steps, exact)


eval_command.add_to(commands)
tune.add_to(commands)
html.add_to(commands)
bench.add_to(commands)
calibrate.add_to(commands)
plan.add_to(commands)
formats.add_to(commands)
doctor.add_to(commands)


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
