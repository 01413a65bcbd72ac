"""K and V at different widths: keys decide the loss, so they get more bits. Any other pair has a name too:
"int8/turboquant_4bit_nc"."""

from __future__ import annotations

from ..format import Format, register
from .int2 import INT2
from .int4 import INT4
from .int8 import INT8

_BY_BITS = {8: INT8, 4: INT4, 2: INT2}
for _k, _key in _BY_BITS.items():
    for _v, _value in _BY_BITS.items():
        if _k > _v:
            register(Format(f"k{_k}v{_v}", _key, _value, f"{_key.name} keys, {_value.name} values"))
