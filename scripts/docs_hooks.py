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
    """Makes a list of the arguments and fields that a docstring explains, `name: ` or `name, other: `, and links of documents' names."""

    START = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)  # of a line
    AFTER = re.compile(r"(?<=[.;])\s+(?=([a-z_]\w*(?:, [a-z_]\w*)*): )")  # of a sentence

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is None:
            return
        value = re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", obj.docstring.value)  # the reference's pages are in docs/api
        names = {name for name, member in obj.members.items() if isinstance(member, griffe.Attribute)}
        for function in (obj, obj.members.get("__init__")):
            names |= {p.name for p in function.parameters} if isinstance(function, griffe.Function) else set()
        obj.docstring.value = "\n\n".join(self._listed(paragraph, names) for paragraph in value.split("\n\n"))

    def _listed(self, paragraph: str, names: set[str]) -> str:
        apart = self.AFTER.sub(lambda found: "\n" if names.issuperset(found[1].split(", ")) else found[0], paragraph)
        first = self.START.search(apart)
        if first is None:
            return paragraph
        before, arguments = apart[: first.start()].rstrip(), apart[first.start() :]
        return (before + "\n\n" if before else "") + self.START.sub(r"- **\1**: ", arguments)
