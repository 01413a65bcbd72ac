"""The text that an evaluation runs over: a file, or one of two that need no network."""

from __future__ import annotations

import codecs
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BYTES_PER_TOKEN = 32  # more than a token of any common text takes: bounds what is read from a large file


@dataclass(frozen=True)
class LoadedText:
    """A text and the words by which a table or a plot names it."""

    name: str
    text: str


def _news_file() -> Path | None:
    """gensim's file of 300 news items, found without importing gensim: its dependencies may be absent."""
    try:
        package = importlib.util.find_spec("gensim")
    except (ImportError, ValueError):
        return None
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "test" / "test_data" / "lee_background.cor"
    return file if file.is_file() else None


def news() -> LoadedText:
    """News of 2000 and 2001, one item a paragraph. ValueError if gensim, which ships it, is not installed."""
    file = _news_file()
    if file is None:
        raise ValueError("--text news: comes with gensim, which is not installed: pip install --no-deps gensim")
    return LoadedText("news", file.read_text(encoding="utf-8").replace("\n", "\n\n"))


def docs() -> LoadedText:
    """Python's own documentation, its topics in alphabetical order. It differs a little between versions of Python."""
    from pydoc_data.topics import topics

    return LoadedText(f"documentation of Python {platform.python_version()}", "\n\n".join(topics[name] for name in sorted(topics)))


def read_file(path: Path, max_bytes: int | None = None) -> LoadedText:
    """The first `max_bytes` of a UTF-8 file. ValueError for one that is empty or binary, FileNotFoundError for none."""
    if not path.exists():
        raise FileNotFoundError(f"--text {path}: no such file; allowed: a UTF-8 text file, news, docs")
    if not path.is_file():
        raise ValueError(f"--text {path}: not a file; allowed: a UTF-8 text file, news, docs")
    with path.open("rb") as file:
        data = file.read(-1 if max_bytes is None else max_bytes)
        complete = not file.read(1)
    if b"\0" in data:
        raise ValueError(f"--text {path}: a binary file (NUL at byte {data.index(0)}); UTF-8 text is needed")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=complete)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text {path}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); convert it, for example with iconv -t utf-8"
        ) from None
    if not text.strip():
        raise ValueError(f"--text {path}: the file is empty; a text of at least one context is needed")
    return LoadedText(path.name, text)


def load(source: str | None, num_tokens: int) -> LoadedText:
    """The text named by `source`: "news", "docs" or a file; by default news where gensim is installed, else docs."""
    if source is None:
        source = "docs" if _news_file() is None else "news"
    if source in ("news", "docs"):
        return news() if source == "news" else docs()
    return read_file(Path(source), max(1 << 20, num_tokens * BYTES_PER_TOKEN))


def named(given: list[str] | None) -> list[str | None]:
    """`--text` given several times, or as a list such as news,docs; None for the default."""
    names: list[str | None] = []
    for words in given or []:
        names += [words] if Path(words).exists() else [word.strip() for word in words.split(",")]
    return names or [None]


def cut(text: LoadedText, tokenizer: Any, context: int, num_tokens: int) -> torch.Tensor:
    """The text's first `num_tokens` tokens as contexts `[N, context]` int64, whole contexts only.

    Each begins with the tokens that the tokenizer begins a text with, as a prompt would. ValueError if the text or `num_tokens` is
    shorter than one context.
    """
    if num_tokens < context:
        raise ValueError(f"--tokens {num_tokens}: at least one context is needed (--context {context})")
    begin = beginning(tokenizer)
    size = context - len(begin)
    if size < 1:
        raise ValueError(f"--context {context}: more than the {len(begin)} tokens that a text begins with are needed")
    ids = plain(tokenizer, text.text)[: num_tokens // context * size]
    if len(ids) < size:
        raise ValueError(
            f"--text {text.name}: {len(begin) + len(ids)} tokens, fewer than one context (--context {context}); "
            "give a longer text or a shorter context"
        )
    contexts = torch.tensor(ids[: len(ids) // size * size], device="cpu").view(-1, size)
    return torch.cat([torch.tensor(begin, dtype=torch.long, device="cpu").expand(len(contexts), -1), contexts], 1)


def beginning(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts before any text: mostly none, or one."""
    return list(tokenizer("")["input_ids"])


def plain(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text, without those that it begins with."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
