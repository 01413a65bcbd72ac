"""What the bytes of pages mean, in one place: for page files, `PageStore`, copies between caches, and the connectors of engines.

Pages are only exchanged where they mean the same on both sides. `PageMeaning` says it of one layer, `rows_meaning` of a layer whose
geometry an engine compares itself. `meaning_digest` makes 16 hexadecimal digits of either; a refusal has the digests of both sides.

Three things are left out, as no byte of a page depends on them: Hessians, which guide who writes; the 16-bit copies of full-precision
tokens, which stay where they are, beside pages that hold the same tokens quantized; the memory in which pages lie, and its strides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from . import checks, names
from .format import Format, get_format
from .maps import LayerMaps

if TYPE_CHECKING:
    from .cache import PagedCache
    from .page_views import PageViews

DIGITS = 16  # of a digest
FIELDS = ("spec", "maps", "scales")  # of a page file's header too
MOST_BRACKETS = 16  # that a field opens: a writer's has at most five, and others could nest too deeply to be compared


@dataclass(frozen=True)
class PageMeaning:
    """What the bytes of one layer's pages mean, as plain values, of a cache or of what a file's header says.

    spec: geometry, codecs and their metadata (`CacheSpec.to_dict()`); a record is `K codes | V codes | K meta | V meta`.
    maps: rotations and key means of the layer (`LayerMaps.fingerprint()`).
    scales: per-tensor scales of K and V.
    A header may hold anything: no value is trusted, and what differs is refused.
    """

    spec: Any
    maps: Any
    scales: Any

    @classmethod
    def of(cls, cache: PagedCache | PageViews) -> PageMeaning:
        """That of a cache's pages."""
        spec = json.loads(json.dumps(cache.spec.to_dict()))  # tuples become lists, as in a header
        return cls(spec, cache.maps.fingerprint(), [float(cache.k.scale), float(cache.v.scale)])

    @classmethod
    def of_header(cls, metadata: Mapping[str, Any]) -> PageMeaning:
        """What the strings of a header say; a field that is no JSON list or object stands for itself, one that is missing is None."""
        return cls(*(_plain(metadata.get(name)) for name in FIELDS))

    def header(self) -> dict[str, str]:
        """Each field in JSON or plain words, as `of_header` reads it."""
        return {name: v if isinstance(v, str) else json.dumps(v, sort_keys=True) for name in FIELDS for v in [getattr(self, name)]}

    @property
    def digest(self) -> str:
        """16 hexadecimal digits: those of two sides are equal where bytes mean the same."""
        return meaning_digest(self._compared())

    def check_same(self, theirs: PageMeaning, argument: str, needs: str) -> None:
        """ValueError where bytes mean something else on the other side: the first field that differs, of both, and both digests.

        argument: what goes before the field's name in the message. needs: what goes before our value of it."""
        ours, others = self._compared(), theirs._compared()
        for name in FIELDS:
            if ours[name] != others[name]:
                found, expected = getattr(theirs, name), getattr(self, name)
                if isinstance(found, dict) and isinstance(expected, dict):  # what differs says more than all of both
                    keys = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
                    found, expected = ({key: value.get(key) for key in keys} for value in (found, expected))
                refuse_other(f"{argument}{name}", found, f"{needs} {expected}", meaning_digest(others), meaning_digest(ours))

    def _compared(self) -> dict[str, Any]:
        """The fields as they are compared: a format is what its codecs are, whatever it is called."""
        spec = {**self.spec, "format": codecs_of(self.spec.get("format"))} if isinstance(self.spec, dict) else self.spec
        return {"spec": spec, "maps": self.maps, "scales": self.scales}


def rows_meaning(fmt: Format, maps: LayerMaps) -> list[str]:
    """What the bytes of a layer's rows mean, whatever their number and size: its codecs, and its maps for all kv heads."""
    return [codecs_of(fmt), maps.fingerprint()]


def codecs_of(fmt: Format | Any) -> Any:
    """The codecs of a format or of its name: `int8/int4` of `k8v4`. A name that is none here is itself."""
    try:
        fmt = get_format(fmt)
    except ValueError:
        return fmt
    return ("+" if names.is_latent(fmt.name) else "/").join((fmt.k.name, fmt.v.name))


def meaning_digest(meaning: Any) -> str:
    """16 hexadecimal digits of a SHA-256 of plain values: of what bytes mean."""
    return hashlib.sha256(json.dumps(meaning, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]


def refuse_other(argument: str, found: Any, needs: str, theirs: str, ours: str) -> NoReturn:
    """Refuse pages of another meaning, by both digests."""
    checks.refuse(argument, found, f"{needs}; what the bytes mean has the digest {theirs}, {ours} is needed")


def _plain(field: Any) -> Any:
    """A field's value, so that 1 and 1.0 are equal; the field itself where it is no JSON list or object."""
    if not isinstance(field, str) or not field.startswith(("[", "{")) or field.count("[") + field.count("{") > MOST_BRACKETS:
        return field
    try:
        return json.loads(field)
    except ValueError:
        return field
