"""`quantkv generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..policy_file import PRESETS
from . import completion, options, policies
from .interrupt import Interrupted
from .options import CalibrationFile, Device, Dtype, FullPrecisionOption, Model
from .waiting import waiting

if TYPE_CHECKING:
    from .decoding import Step
    from .generate import Writer
    from .models import Loaded


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("generate")(generate_command)


def generate_command(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", show_default=False, help="What to continue or, for a chat model, to answer.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Go on with the lines of standard input, typed or piped: each is a turn, all in one cache.")
    ] = False,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            metavar="4bit|FORMAT|FILE.json",
            autocompletion=completion.caches,
            help=f"Cache: a preset ({', '.join(PRESETS)}); {options.KV_HELP} Or a policy of tune.",
        ),
    ] = "4bit",
    calibration: CalibrationFile = None,
    full_precision: FullPrecisionOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also run the exact cache; show where the two part.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of an answer, at most.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Let a model write from a quantized cache: one answer, or a conversation."""
    if chat and (compare or raw):
        raise ValueError(f"{'--compare' if compare else '--raw'}: not with --chat")
    if prompt is None and not chat:
        raise ValueError("PROMPT: what to continue is needed, or --chat")
    name, policy = policies.one_policy(kv, calibration, full_precision)
    errors = options.stderr()
    found = options.find(model, device, dtype, errors)
    policies.fitting({name: policy}, found.config, strict=True)
    loaded = options.load(found, device, dtype, errors)
    from . import generate

    writer = generate.Writer(loaded.model, loaded.tokenizer, policy, write)
    if chat:
        _chat(writer, loaded, prompt, max_new_tokens, errors)
        return
    from rich.console import Console

    out, ids = Console(highlight=False), generate.encode(loaded.tokenizer, str(prompt), raw)
    _check_room(loaded, len(ids), max_new_tokens, "a PROMPT")
    out.rule(f"{name} cache", align="left", style="cyan")
    steps = _answer(writer, ids, max_new_tokens, errors)
    if compare:
        out.rule("exact cache", align="left", style="cyan")
        exact_writer = generate.Writer(loaded.model, loaded.tokenizer, None, write)
        _print_comparison(out, loaded.tokenizer, name, steps, _answer(exact_writer, ids, max_new_tokens))


def write(text: str) -> None:
    """To standard output, at once."""
    print(text, end="", flush=True)


def _chat(writer: Writer, loaded: Loaded, prompt: str | None, max_new_tokens: int, errors: Any) -> None:
    from . import generate

    conversation = generate.Conversation(loaded.tokenizer)
    for line in _lines(prompt, errors):
        ids = conversation.asked(line)
        _check_room(loaded, writer.held + len(writer.unread) + len(ids), max_new_tokens, "a conversation")
        conversation.answered(_answer(writer, ids, max_new_tokens, errors))


def _lines(prompt: str | None, errors: Any) -> Iterator[str]:
    """PROMPT, then the lines of standard input that are not empty. ValueError for bytes that are not UTF-8."""
    if prompt is not None:
        yield prompt
    terminal = sys.stdin.isatty()
    if terminal:
        options.say(errors, "Each line is a turn. Ctrl-D ends.")
    while True:
        if terminal:
            write("> ")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: not UTF-8 ({error.reason}); UTF-8 text is needed") from None
        if not line:
            return
        if line.strip():
            yield line.strip()


def _check_room(loaded: Loaded, count: int, max_new_tokens: int, what: str) -> None:
    """ValueError where the model has too few positions for `count` tokens and an answer, whose last token is not read."""
    from . import models

    argument = f"--max-new-tokens {max_new_tokens} after {what} of {count:,} tokens"
    models.check_positions(loaded, argument, count + max_new_tokens - 1, count - 1)


def _answer(writer: Writer, ids: Sequence[int], max_new_tokens: int, errors: Any = None) -> list[Step]:
    """Stream an answer, then say on `errors` what the cache holds. After Ctrl-C `Interrupted`, with how much was written."""
    steps: list[Step] = []
    read = len(writer.unread) + len(ids)
    try:
        with waiting(options.stderr(), f"reading {read:,} tokens") as now:
            writer.answer(ids, max_new_tokens, steps, lambda: now(None))
    except KeyboardInterrupt:
        if not steps:
            raise
        write("\n")
        raise Interrupted(f"the {len(steps):,} tokens above were finished") from None
    write("\n")
    if errors is not None:
        cache, held = writer.cache, writer.held
        sixteen_bits = sum(2 * spec.elements_per_token for spec in cache.specs) * held
        size = f"the cache holds {held:,} tokens in {cache.nbytes:,} bytes; 16 bits would take {sixteen_bits:,}"
        if copies := cache.full_precision_nbytes:
            size += f". Copies of the first and latest tokens take {copies:,}, however many tokens there are"
        options.say(errors, f"{read:,} tokens read, {len(steps):,} written; {size}")
    return steps


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
