"""What a shell completes: names that are known without loading torch."""

from __future__ import annotations

from pathlib import Path

from ..format_table import available
from ..policy_file import PRESETS


def caches(incomplete: str) -> list[str]:
    """For `--kv`: presets and formats, also in a list A,B, formats in a pair K/V, and the policies of the folder."""
    given, comma, word = incomplete.rpartition(",")
    key, slash, name = word.rpartition("/")
    found = [preset for preset in PRESETS if preset.startswith(word)]
    found += [key + slash + known for known in available() if known.startswith(name)]
    found += sorted(str(file) for file in Path(word).parent.glob("*.json") if str(file).startswith(word))
    return [given + comma + one for one in found]


def models(incomplete: str) -> list[str]:
    """For `quantkv bench --model`: models whose sizes are known by name."""
    from ..known_models import MODELS

    return [name for name in MODELS if name.startswith(incomplete.lower())]
