"""pyproject.toml describes the package. Made here is only what a package index shows: README.md, where relative links lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURE = r"!\[[^\]]*\]\([^)]*\)"
LINK = re.compile(rf"(!?)\[((?:{PICTURE}|[^\[\]])*)\]\((?!\w+:|#)([^)\s]+)\)")  # its text may be a picture: a badge


def long_description(readme: str, source: str | None) -> str:
    """The README, with relative links under `source`, where the repository can be read; without one the links are their text, and pictures
    are left out."""

    def absolute(match: re.Match[str]) -> str:
        picture, text, path = match[1], LINK.sub(absolute, match[2]), match[3]
        if source is None:
            return "" if picture else text
        return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, readme)


def source_url(pyproject: str) -> str | None:
    """`Source` of [project.urls]; None where it has none."""
    found = re.search(r'^Source = "([^"]+)"', pyproject, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    source = source_url((ROOT / "pyproject.toml").read_text("utf-8"))
    setup(long_description=long_description((ROOT / "README.md").read_text("utf-8"), source), long_description_content_type="text/markdown")
