"""What mkdocs does not do by itself: files that lie outside of docs/ become part of the site, under the names here."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DESIGN.md": "design.md",
    "benchmarks/results/h200-growth.svg": "h200-growth.svg",
}


def on_files(files: Files, config: Any) -> Files:
    """The files of the site, with those of `OUTSIDE`."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's text, whose links to files outside of docs/ lead to where the site has them; those of a page from outside, likewise."""
    above = "../" * (page.file.src_uri.count("/"))
    for path, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{above}{path}", f"]({above}{name}")
    return markdown.replace("](docs/", "](") if page.file.src_uri in OUTSIDE.values() else markdown
