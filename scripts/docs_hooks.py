"""What mkdocs and mkdocstrings do not do by themselves: files that lie outside of docs/ become part of the site, and the arguments that a
docstring explains become a list."""

import re
from pathlib import Path
from typing import Any

import griffe
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


class Arguments(griffe.Extension):
    """Lines of docstrings that begin with `name: ` or `name, other: ` as items of a list, and names of documents as links."""

    LINE = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is None:
            return
        value = re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", obj.docstring.value)  # the reference's pages are in docs/api
        paragraphs = value.split("\n\n")
        obj.docstring.value = "\n\n".join(map(self._listed, paragraphs))

    def _listed(self, paragraph: str) -> str:
        first = self.LINE.search(paragraph)
        if first is None:
            return paragraph
        before, arguments = paragraph[: first.start()].rstrip(), paragraph[first.start() :]
        return (before + "\n\n" if before else "") + self.LINE.sub(r"- **\1**: ", arguments)
