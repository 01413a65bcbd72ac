"""`quantkv doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..policy_file import PRESETS
from . import completion, output
from .machine import CANNOT, OK, SLOWER, UNSUPPORTED, Finding
from .output import Json
from .plan import MODEL_HELP

if TYPE_CHECKING:
    from .configs import Described
    from .keys import Keys

HEADS = (32, 8, 128, 128)  # of queries, of keys and values, their sizes: without a model
CODES = {OK: 0, SLOWER: 1, UNSUPPORTED: 1, CANNOT: 2}
STYLES = {OK: "green", SLOWER: "yellow", UNSUPPORTED: "yellow", CANNOT: "red"}


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("doctor")(doctor_command)


def doctor_command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
    kv: Annotated[
        str, typer.Option("--kv", metavar="FORMAT", autocompletion=completion.caches, help="Who serves this format, or a preset's.")
    ] = "int4",
    json_file: Json = None,
) -> int:
    """Say what this machine can run, what is in the way of something faster, and which format suits a model.

    Exit code 0: all is well. 1: something is slower, or not supported. 2: nothing can run, or MODEL cannot be read.
    """
    from . import configs, machine
    from .common import formats_of

    output.check_file("--json", json_file)
    described = None if model is None else configs.describe(model)
    torch, reason = machine.load("torch")
    gpus = machine.gpus_of_driver()
    found = machine.findings(torch, reason, gpus)
    served: list[dict[str, Any]] = []
    if torch is not None:
        (kv,) = formats_of(PRESETS[kv]["format"] if kv in PRESETS else kv, single=True)
        heads = HEADS if described is None else _heads(described)
        served, more = ([], []) if heads is None else _served(torch, kv, heads)
        found += more
    facts = {"versions": machine.versions(), "gpus": gpus, "kv": kv, "serves": served}
    told = None
    if described is not None:
        told, more = _model(described, torch is not None)
        found += more
    code = max(CODES[finding.level] for finding in found)
    every = {**facts, "model": told, "findings": [asdict(finding) for finding in found], "exit_code": code}
    output.write_json(json_file, json.dumps(every, indent=1))
    if json_file != output.PRINTED:
        _print(facts, told, found, described)
    return code


def _heads(described: Described) -> tuple[int, int, int, int] | None:
    """Heads of its first layer with keys and values; None for latents, which have one head of another kind."""
    layers = [layer for layer in described.model.attention.values() if layer.kind != "latent"]
    return (described.model.num_heads, *layers[0].heads) if layers else None


def _served(torch: Any, kv: str, heads: tuple[int, int, int, int]) -> tuple[list[dict[str, Any]], list[Finding]]:
    from . import machine

    try:
        rows = machine.serves(torch, kv, *heads)
    except ValueError as error:
        return [], [Finding(UNSUPPORTED, f"{kv} is not for this model: {error}", "--kv with another format: quantkv formats")]
    slower = []
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0) and rows[0]["not"].get("hopper"):
        slower = [Finding(SLOWER, f"{kv}: {rows[0]['what']} not by hopper: {rows[0]['not']['hopper']}")]
    return rows, slower


def _model(described: Described, with_torch: bool) -> tuple[dict[str, Any], list[Finding]]:
    """What the model is, what each format does with it, and what to take."""
    from ..capacity import capacity
    from ..format_table import available
    from ..parameters import key_biases
    from ..policy_file import PolicyFile
    from . import configs, keys

    model, formats, refused = described.model, {}, {}
    for name in available():
        try:
            made = capacity(model, PolicyFile(name, {}))
            formats[name] = {"bits": made.bits_per_element, "bytes_per_token": made.bytes_per_token}
        except (ValueError, NotImplementedError) as error:
            refused[name] = str(error)
    read = keys.read(described.folder) if described.folder is not None and with_torch else None
    biased = bool(read.biased) if read is not None else key_biases(model.fields)
    found = [Finding(UNSUPPORTED, f"{', '.join(sorted(names))}: not for this model: {why}") for why, names in _by_reason(refused).items()]
    latent = any(layer.kind == "latent" for layer in model.attention.values())
    if latent:
        found.append(Finding(UNSUPPORTED, "latents (MLA): a calibration file, rotations of a policy, SGLang"))
    told = {
        "model": described.name,
        "model_type": model.model_type,
        "layers": configs.layer_groups(model),
        "max_positions": model.max_positions,
        "key_biases": biased,
        "keys": None if read is None else read._asdict(),
        "formats": formats,
        "refused": refused,
        "notes": _notes(described, read, biased),
        "advice": _advice(latent, biased, formats),
    }
    return told, found


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    """Names of formats by the reason without the codec's name."""
    groups: dict[str, list[str]] = {}
    for name, why in refused.items():
        size, _, rest = why.partition(": ")
        groups.setdefault(f"{size}: {rest.partition(' ')[2]}", []).append(name)
    return groups


def _notes(described: Described, read: Keys | None, biased: bool | None) -> list[str]:
    """What is worth knowing of the model's layers and keys."""
    model, notes = described.model, []
    windows = sum(layer.window > 0 for layer in model.attention.values())
    if windows:
        notes.append(
            f"{windows} of {len(model.attention)} layers with a cache have a window: they stop growing, and keep no full-precision sink"
        )
    states = sum(layer.states for layer in model.layers)
    if states:
        notes.append(f"{states} layers keep states of one size, at the model's precision: no format makes them smaller")
    if biased:
        size = "" if read is None else f", up to {read.largest_bias:.3g} (layer {read.bias_layer})"
        notes.append(f"keys have biases{size}: plain formats of 4 bits and fewer lose much; presets and calibrations take biases off")
    elif biased is None:
        notes.append("whether keys have biases is not known without the weights")
    if read is not None:
        notes.append(f"channels of keys: the longest row of k_proj is {read.ratio:.1f} times the median one (layer {read.ratio_layer})")
    return notes


def _advice(latent: bool, biased: bool | None, formats: dict[str, Any]) -> list[str]:
    """Which cache to take: as the README and docs/choose.md say."""
    presets = [name for name, of in PRESETS.items() if of["format"] in formats]
    lines = [f"with nothing set up: {', '.join(presets)}"]
    if "int4" in formats:
        lines.append("vLLM's own bytes: " + ("none of 4 bits, as keys have biases" if biased else "int4, which loses more than 4bit"))
    if "levels4" in formats and not latent:  # which take no calibration file
        lines.append(
            "for the bytes that you have, formats by layer: quantkv tune MODEL --budget BYTES --calibration FILE --full-precision 16,24"
        )
    return lines


def _print(facts: dict[str, Any], told: dict[str, Any] | None, found: list[Finding], described: Described | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from . import configs

    console = Console(highlight=False)

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    say("; ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items()), "dim")
    for gpu in facts["gpus"]:
        say(f"{gpu['name']}, driver {gpu['driver_version']}, {gpu['memory.total']}", "dim")
    if facts["serves"]:
        say(f"\n{facts['kv']} here:", "bold")
        for row in facts["serves"]:
            say(f"  {row['what']}: {row['by']}")
            for name, why in row["not"].items():
                say(f"    not {name}: {why}", "dim")
    if told is not None:
        say(f"\n{told['model']}: {configs.in_words(described.model)}", "bold")
        for line in told["notes"]:
            say(f"  {line}")
        say("  " + ", ".join(f"{name} {16 / held['bits']:.2f}x" for name, held in told["formats"].items()) + " smaller than 16 bits", "dim")
        for line in told["advice"]:
            say(f"  take: {line}")
    say("")
    for finding in found:
        say(f"{finding.level}: {finding.what}", STYLES[finding.level])
        if finding.mend is not None:
            say(f"  {finding.mend}")
