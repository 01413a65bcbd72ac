"""`quantkv plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import completion, output
from .output import Json

if TYPE_CHECKING:
    from ..capacity import Capacity
    from ..geometry import Model
    from ..measured import Speed
    from ..policy_file import PolicyFile

CONTEXT = 8192
GPU = "NVIDIA H200"
MODEL_HELP = "A name such as llama-3-8b, a transformers directory, a config.json, or layers=32,kv_heads=8,head_size=128."


@dataclass(frozen=True)
class Row:
    """One format or policy. refused: why the model's heads cannot be stored so; the rest is None then. What asks for memory is None
    without it.

    vllm_sequence_bytes, vllm_padding, vllm_tokens: as of `Pool`, for a sequence of the plan's tokens; None where vLLM plans otherwise.
    """

    name: str
    refused: str | None = None
    bits: float | None = None
    bytes_per_token: float | None = None
    sequence_bytes: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    speed: Speed | None = None
    vllm_sequence_bytes: int | None = None
    vllm_padding: float | None = None
    vllm_tokens: int | None = None


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("plan")(plan_command)


def plan_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Of one GPU, such as 24GiB: what fits into it.")] = None,
    context: Annotated[int | None, typer.Option("--context", metavar="N", help="Tokens of each sequence.")] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="GPUs that share the heads (tensor parallel).")] = 1,
    kv: Annotated[
        str,
        typer.Option(
            "--kv", metavar="A,B,FILE.json", autocompletion=completion.caches, help="Presets, formats; K/V pairs two. Or policies."
        ),
    ] = "all",
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Also formats by layer, with full-precision tokens.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="SIZE", help="What the weights take, where that is not known.")
    ] = None,
    share: Annotated[
        float, typer.Option("--share", metavar="X", help="Of the memory for weights and cache; the rest is for activations.")
    ] = 0.9,
    page: Annotated[int, typer.Option("--page", metavar="N", help="Tokens of a page.")] = 16,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="Of which GPU recorded speeds are shown.")] = GPU,
    json_file: Json = None,
) -> None:
    """Work out how many tokens of a model fit into your memory in each format, without its weights, a GPU or torch."""
    from ..capacity import check_ranks
    from . import configs

    output.check_file("--json", json_file)
    described = configs.describe(model)
    total = None if memory is None else configs.size_of(memory, "--memory")
    held = None if weights is None else configs.size_of(weights, "--weights")
    for name, value in (("--context", context), ("--tp", tp)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: a positive number is needed")
    if not 0 < share <= 1:
        raise ValueError(f"--share {share}: a number above 0 and up to 1 is needed")
    if held is None and described.weights is not None:
        held = described.weights.nbytes
    if total is not None and held is None:
        raise ValueError(f"MODEL {model}: what its weights take is not known; allowed: --weights SIZE, such as --weights 16GB")
    positions = described.model.max_positions
    tokens = context if context is not None else min(CONTEXT, positions or CONTEXT)
    free = None if total is None else int(total * share) - -(-held // tp)
    if free is not None and free <= 0:
        taken = f"the weights take {_size(-(-held // tp))}{f' on each of {tp} GPUs' if tp > 1 else ''}"
        raise ValueError(f"--memory {memory}: {share:.0%} of it is {_size(int(total * share))}, {taken}; allowed: more, or a larger --tp")
    policies = _policies(kv, policy, described.model)
    check_ranks(described.model, tp)
    if page < 8 or page % 8:
        raise ValueError(f"--page {page}: a multiple of 8 is needed")
    rows = [_row(described.model, name, policy, tp, page, tokens, free, gpu) for name, policy in policies]
    known = described.weights
    facts = {
        "model": described.name,
        "model_type": described.model.model_type,
        "layers": configs.layer_groups(described.model),
        "max_positions": positions,
        "parameters": None if known is None else known.parameters,
        "weights_bytes": held,
        "weights_source": "--weights" if weights is not None else None if known is None else known.source,
        "ranks": tp,
        "page": page,
        "context": tokens,
        "memory_bytes": total,
        "cache_bytes_per_rank": free,
        "gpu": gpu,
    }
    output.write_json(json_file, json.dumps({**facts, "formats": [_dict(row) for row in rows]}, indent=1))
    if json_file != output.PRINTED:
        _print(facts, rows, configs.in_words(described.model), described.model)


def _policies(kv: str, policy: Path | None, model: Model) -> list[tuple[str, PolicyFile]]:
    """Formats by name, then presets and policies, each with its name."""
    from ..format_table import available, layout_of
    from ..policy_file import PRESETS, PolicyFile
    from .common import caches_of

    words, files = caches_of(kv)
    files = [*PRESETS, *files] if "all" in words else files
    given = [("--kv", file) for file in dict.fromkeys(files)] + ([] if policy is None else [("--policy", str(policy))])
    names = [name for word in words for name in (available() if word == "all" else [word])]
    if not words and not files:
        raise ValueError(f"--kv {kv}: at least one name is needed, of {', '.join([*PRESETS, *available()])}")
    policies = []
    for name in dict.fromkeys(names):
        try:
            layout_of(name)
        except ValueError as error:
            raise ValueError(f"--kv: {error}") from error
        policies.append((name, PolicyFile(name, {})))
    return policies + [(Path(file).stem, _policy(argument, file, model)) for argument, file in given]


def _policy(argument: str, file: str, model: Model) -> PolicyFile:
    """A preset, or the policy of a file. ValueError for one that is damaged, or of another model."""
    from .. import policy_file
    from ..format_table import layout_of

    try:
        given = policy_file.named(file)
        policy_file.check_layers(len(model.layers), layers=given.layers)
        for name in (given.format, given.latents or given.format, *given.layers.values()):
            layout_of(name)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    return given


def _row(model: Model, name: str, policy: PolicyFile, tp: int, page: int, tokens: int, free: int | None, gpu: str) -> Row:
    from ..capacity import capacity
    from ..measured import speed
    from ..vllm_pages import pool

    try:
        made: Capacity = capacity(model, policy, tp, page)
    except (ValueError, NotImplementedError) as error:
        return Row(name, refused=str(error))
    sizes = {layer.heads.head_size for layer in model.attention.values() if layer.kind != "latent"}
    found = speed(gpu, name, sizes.pop()) if len(sizes) == 1 and policy.full_precision is None else None
    fits = (None, None) if free is None else (made.longest(free), made.sequences(free, tokens))
    row = Row(name, None, made.bits_per_element, made.bytes_per_token, made.sequence_bytes(tokens), *fits, found)
    blocks = pool(model, made, tp)
    if blocks is None:
        return row
    held = None if free is None else blocks.tokens(free, tokens)
    return replace(row, vllm_sequence_bytes=blocks.sequence_bytes(tokens), vllm_padding=blocks.padding(tokens), vllm_tokens=held)


def _dict(row: Row) -> dict[str, Any]:
    found = asdict(row)
    return {**found, "speed": None if row.speed is None else row.speed._asdict()}


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def _print(facts: dict[str, Any], rows: list[Row], layers: str, model: Model) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..capacity import state_bytes
    from ..measured import gpus
    from ..vllm_pages import WORTH_SAYING
    from .common import print_table

    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(Text(line, style="dim"), soft_wrap=True)

    tokens, ranks, on_each = facts["context"], facts["ranks"], " on each GPU" if facts["ranks"] > 1 else ""
    count = "" if facts["parameters"] is None else f"{facts['parameters'] / 1e9:.2f} billion parameters, "
    say(f"{facts['model']}: {layers}")
    if facts["weights_bytes"] is not None:
        say(f"weights: {count}{_size(facts['weights_bytes'])} ({facts['weights_source']})")
    if facts["memory_bytes"] is not None:
        say(f"for the cache{on_each}: {_size(facts['cache_bytes_per_rank'])} of {_size(facts['memory_bytes'])}")
    states = state_bytes(model, ranks)
    if states:
        say(f"states: {_size(states)} a sequence{on_each}, in every row")
    elif states is None:
        say("states: what they take is not known for this family, and not counted")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ["format", "bits a value", f"bytes a token{on_each}", f"a sequence of {tokens:,}"]
    heads += ["tokens that fit", f"sequences of {tokens:,}"] if facts["memory_bytes"] is not None else []
    for index, head in enumerate([*heads, "decode"]):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in sorted(rows, key=lambda row: -(row.sequence_bytes or 0)):
        if row.refused is None:
            cells = [f"{row.bits:.2f}", f"{row.bytes_per_token:,.0f}", _size(row.sequence_bytes)]
            cells += [] if row.tokens is None else [f"{row.tokens:,}", f"{row.sequences:,}"]
            table.add_row(row.name, *cells, _speed(row.speed))
    print_table(table)
    for row in rows:
        if row.refused is not None:
            say(f"{row.name}: not for this model: {row.refused}")
    for row in rows:
        if row.vllm_padding is not None and row.vllm_padding > WORTH_SAYING:
            fits = "" if row.vllm_tokens is None else f"; {row.vllm_tokens:,} tokens fit"
            taken = f"{_size(row.vllm_sequence_bytes)} for a sequence of {tokens:,}, {row.vllm_padding:.2f}x of what its formats need{fits}"
            say(f"{row.name}: vLLM's blocks have one size for all layers of this model: {taken}")
    measured = gpus().get(facts["gpu"])
    if measured is None:
        say(f"decode: nothing was measured on {facts['gpu']!r}; recorded: {', '.join(gpus())}")
    else:
        say(f"decode: attention alone, 4 query heads a kv head, beside {measured['beside']} on an {facts['gpu']}; -: not measured")
    if facts["max_positions"] and tokens > facts["max_positions"]:
        say(f"the model has {facts['max_positions']:,} positions")


def _speed(found: Speed | None) -> str:
    if found is None:
        return "-"
    least, most = f"{found.least:.1f}", f"{found.most:.1f}"
    return f"{least}x" if least == most else f"{least} to {most}x"
