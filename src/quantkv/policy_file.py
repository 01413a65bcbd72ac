"""The JSON file of a policy, as it is written. Pure Python: `Policy` adds the tensors that the file names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from . import deprecated, plain_json, whole_file
from .full_precision import FullPrecisionTokens
from .names import PRECISIONS
from .refusals import integer, refuse

VERSION = 1
DIGITS = 5  # of a layer's number in a file: a longer one is damage, and a range of so many layers would take all memory
STATISTICS = ("off", "auto", "require")  # whether an engine measures the model where nothing was calibrated
PROMPTS = ("own", "stored")  # what sequences with several new tokens read of these
# Fields, and what each may be, the first by default.
CHOICES = {"statistics": STATISTICS, "prompt": PROMPTS, "prompt_precision": PRECISIONS}
FIELDS = ("policy_version", "format", "layers", "latents", "maps", "calibration", "full_precision", *CHOICES)
_WINDOW = {"sink": 16, "recent": 24}
PRESETS: dict[str, dict[str, Any]] = {  # policies by bits, which are right with nothing set up
    "8bit": {"format": "int8", "full_precision": _WINDOW, "statistics": "auto"},
    # Over latents levels4 is slower than 16 bits: its products are of 16 bits, those of int4 of 8.
    "4bit": {"format": "levels4", "latents": "int4+int8", "full_precision": _WINDOW, "statistics": "auto"},
    "3bit": {"format": "levels3", "full_precision": _WINDOW, "statistics": "auto"},
    "2bit": {"format": "trellis2", "full_precision": _WINDOW, "statistics": "auto"},
}


@dataclass(frozen=True)
class PolicyFile:
    """What a file says.

    format: of the layers that `layers` does not name. layers: format of a layer by its number. maps, calibration: names of files beside
    it; None: it names none. full_precision: tokens with 16-bit copies; None: there are none. statistics, prompt,
    prompt_precision: of `CHOICES`. latents: in place of `format` where layers keep latents (MLA); None: it is `format`.
    """

    format: str
    layers: dict[int, str]
    maps: str | None = None
    calibration: str | None = None
    full_precision: FullPrecisionTokens | None = None
    statistics: str = "off"
    prompt: str = PROMPTS[0]
    prompt_precision: str = PRECISIONS[0]
    latents: str | None = None

    def of_latents(self) -> PolicyFile:
        """The same for a model whose layers keep latents."""
        return self if self.latents is None else replace(self, format=self.latents, latents=None)

    def name_of(self, layer: int) -> str:
        """Name of a layer's format."""
        return self.layers.get(layer, self.format)


def read(path: str | Path, elsewhere: bool = False) -> PolicyFile:
    """Read a file; `Policy.load` says what stands in it, and what `elsewhere` allows. ValueError naming what is wrong."""
    try:
        with whole_file.reading(path) as file:
            given = plain_json.parse(file.read().decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"policy={str(path)!r}: {error}") from error
    return parse(given, elsewhere)


def is_name(text: str) -> bool:
    """Whether a text names a policy, where names of formats are taken too: a preset, or a file."""
    return text in PRESETS or text.endswith(".json")


def named(name: str) -> PolicyFile:
    """The policy that `is_name` found in a text. ValueError as of `read`."""
    return parse({"policy_version": VERSION, **PRESETS[name]}) if name in PRESETS else read(name)


def parse(given: Any, elsewhere: bool = False) -> PolicyFile:
    """What the object of a file says; elsewhere: as of `read`. ValueError naming what is wrong."""
    if isinstance(given, dict):
        given = deprecated.current(given, "policy.", exact="full_precision")
    if not isinstance(given, dict) or given.keys() - set(FIELDS) or "format" not in given:
        refuse("policy", given, f"an object with format and, where needed, {', '.join(FIELDS)} is needed")
    if given.get("policy_version") != VERSION:
        refuse("policy_version", given.get("policy_version"), f"{VERSION} is needed")
    for name in ("maps", "calibration"):
        if not isinstance(given.get(name, ""), str):
            refuse(f"policy.{name}", given[name], "the name of a file beside the policy is needed")
        if name in given and not elsewhere:
            check_name(f"policy.{name}", given[name])
    layers, full_precision = _layers(given.get("layers", {})), _full_precision(given.get("full_precision"))
    if not isinstance(latents := given.get("latents"), (str, type(None))):
        refuse("policy.latents", latents, "the name of a format, such as int4+int8, is needed")
    chosen = {name: check_choice(f"policy.{name}", name, given.get(name, allowed[0])) for name, allowed in CHOICES.items()}
    return PolicyFile(given["format"], layers, given.get("maps"), given.get("calibration"), full_precision, **chosen, latents=latents)


def check_choice(argument: str, name: str, given: Any) -> str:
    """One of `CHOICES[name]` as it is. ValueError for anything else."""
    if not isinstance(given, str) or given not in CHOICES[name]:
        refuse(argument, repr(given), f"one of {', '.join(CHOICES[name])} is needed")
    return given


def check_name(argument: str, name: str) -> None:
    """ValueError unless a name, whichever system reads it, is of a file in the policy's folder or below it."""
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.anchor or ".." in path.parts or not path.name:
            allowed = "the name of a file in the policy's folder is needed, or Policy.load(.., elsewhere=True)"
            refuse(argument, repr(name), allowed)


def check_layers(num_layers: int, **named: Iterable[int]) -> None:
    """ValueError where a part of a policy, by its name, names a layer that a model of `num_layers` lacks."""
    integer("num_layers", num_layers, 1, "a number of layers")
    for name, numbers in named.items():
        beyond = sorted(number for number in numbers if number >= num_layers)
        if beyond:
            refuse(f"policy.{name}", beyond, f"the model has layers 0 to {num_layers - 1}")


def _layers(given: Any) -> dict[int, str]:
    """ "3", 3 and "2-5" as numbers of layers."""
    if not isinstance(given, dict):
        refuse("policy.layers", given, 'an object such as {"0": "int8", "2-5": "k8v4"} is needed')
    layers: dict[int, str] = {}
    for key, name in given.items():
        first, dash, last = str(key).partition("-")
        last = last if dash else first
        if not all(n.isdecimal() and len(n) <= DIGITS for n in (first, last)) or int(last) < int(first):
            allowed = f'a number of a layer such as "3", or a range such as "2-5", of at most {DIGITS} digits, is needed'
            refuse("policy.layers", key, allowed)
        for number in range(int(first), int(last) + 1):
            if number in layers:
                refuse("policy.layers", key, f"layer {number} is named twice")
            layers[number] = name
    return layers


def _full_precision(given: Any) -> FullPrecisionTokens | None:
    if given is None:
        return None
    if isinstance(given, dict):
        given = deprecated.current(given, "policy.full_precision.", first="sink", latest="recent")
    if not isinstance(given, dict) or given.keys() - {"sink", "recent"}:
        refuse("policy.full_precision", given, 'an object such as {"sink": 16, "recent": 24} is needed')
    return FullPrecisionTokens(**given)
