"""Write src/quantkv/format_table.json, the bytes of every registered format, for what must not load torch:
`python scripts/format_table.py`. tests/test_capacity.py compares it with the registry."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from quantkv.format import aliases_of, available_formats, get_format  # noqa: E402
from quantkv.format_table import FILE, to_dict  # noqa: E402


def text() -> str:
    lines = (json.dumps(to_dict(get_format(name).layout, aliases_of(name))) for name in available_formats())
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    (ROOT / "src" / "quantkv" / FILE).write_text(text())
