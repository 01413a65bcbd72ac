"""The code blocks of README.md and docs/, as `test_documents.py` runs them. What a block needs besides stands in a comment right
before it, which no reader of the rendered page sees:

    <!-- given: model, inputs -->       the reader has these; the test makes them (`GIVEN`)
    <!-- not run: needs a GPU -->       why it cannot be run
    <!-- shows: tests/five_bits.py -->  it is that file, which other tests run
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = tuple(str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))))
MARK = re.compile(r"<!-- (given|not run|shows): (.*?) -->", re.DOTALL)
PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block. language: what stands behind its fence, "" for shell. marks: of the comments right before it."""

    page: str
    line: int
    language: str
    code: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order. ValueError for a mark that no block follows."""
    found, marks = [], {}
    for token in PARSER.parse((ROOT / page).read_text()):
        if token.type == "html_block":
            marks |= {name: " ".join(what.split()) for name, what in MARK.findall(token.content)}
        elif token.type == "fence":
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, marks))
            marks = {}
        elif marks:
            raise ValueError(f"{page}: no block follows {marks}")
    return found


def inline_code(page: str) -> Iterator[str]:
    """What stands between backticks in the text of a page."""
    for token in PARSER.parse((ROOT / page).read_text()):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, as lists of words."""
    for line in script.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        for word in lexer:
            if set(word) <= set("|&;<>"):
                yield words
                words = []
            else:
                words.append(word)
        yield words


# ---- What a reader has


def tiny_model(vocab_size: int = 64) -> Any:
    """A Llama with random weights that takes no time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, eos_token_id=None, pad_token_id=0, **sizes, **heads)).eval()


def byte_tokenizer() -> Any:
    """transformers' tokenizer of 256 tokens, one for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def saved_model() -> str:
    """A folder below this one with `tiny_model` and its tokenizer."""
    tiny_model(vocab_size=256).save_pretrained("saved")
    byte_tokenizer().save_pretrained("saved")
    return "saved"


def prompt(*shape: int) -> Any:
    """Tokens of `tiny_model`."""
    import torch

    return torch.arange(shape[0] * shape[1]).reshape(shape) % 64


def caches(count: int = 2, pages: int = 600) -> list[Any]:
    """One cache for each layer, 8 kv heads of 128."""
    from quantkv import PagedCache, get_format

    spec = get_format("int4").cache_spec(num_kv_heads=8, head_size=128, block_size=16)
    return [PagedCache(spec, pages) for _ in range(count)]


def step(lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """A step of a batch in pages of 16 tokens. lengths: queries and keys of each sequence."""
    import torch

    from quantkv.testing import rows

    queries, keys = zip(*lengths)
    pages = [-(-n // 16) for n in keys]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    first, slots = 1, []
    for s, (new, length) in enumerate(lengths):
        table[s, : pages[s]] = torch.arange(first, first + pages[s])
        slots += [first * 16 + position for position in range(length - new, length)]
        first += pages[s]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query, key, value = (rows(len(slots), heads, 128, torch.float32, seed) for seed, heads in enumerate((32, 8, 8)))
    lens, slot_mapping = torch.tensor(keys, dtype=torch.int32), torch.tensor(slots)
    names = {"table": table, "lens": lens, "starts": starts, "block_table": table, "seq_lens": lens, "cu_seqlens_q": starts}
    return names | {
        "slot_mapping": slot_mapping,
        "query": query,
        "q": query,
        "key": key,
        "value": value,
        "layers": [(query, key, value)] * 2,
    }


def buffers() -> list[Any]:
    """Memory that an engine owns, for `caches`."""
    return [cache.buffer for cache in caches()]


MIXED = ((1, 4096), (512, 512))  # a decode and a prompt, as the README's lengths say
GIVEN: dict[str, Callable[[], Any]] = {
    "model": tiny_model,
    "MODEL": saved_model,
    "inputs": lambda: {"input_ids": prompt(1, 8), "max_new_tokens": 4},
    "ids": lambda: prompt(4, 128),
    "caches": caches,
    "buffers": buffers,
    "a step": lambda: step(MIXED),
    "a decode step": lambda: step([(1, 40 + s) for s in range(64)]),
}


def given(names: str) -> dict[str, Any]:
    """What a mark names: `GIVEN`'s entries; a step stands for all of its names."""
    made: dict[str, Any] = {}
    for name in names.split(", "):
        value = GIVEN[name]()
        made |= value if name.startswith("a ") else {name: value}
    return made
