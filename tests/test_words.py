"""How documents are written: docs/ and what stands beside it say what is true now, in the field's words; history is in notebook/.

CONTRIBUTING.md has the rules. Here is what of them a program can see.
"""

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("markdown_it")
from documents import PAGES, PARSER, ROOT

NOTEBOOK = ROOT / "notebook"
CODE = tuple(
    path
    for folder in ("src", "tests", "scripts", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu", ".cuh", ".sh") and "__pycache__" not in path.parts
)
USER_PAGES = tuple(page for page in PAGES if page == "README.md" or page.startswith("docs/"))

# What no user document says, with what it says in its place. Only words whose identifiers in code, if any, stand in backticks, which are
# not looked at.
BANNED = {
    r"pieces?": "split-KV partial, or chunk of a prompt, or part of a batch",
    r"teams?": "consumer warpgroup",
    r"spans?": "KV tile of 64 tokens",
    r"whole pairs?": "(sequence, kv head) that one block or cluster serves",
    r"query columns?|columns of a kv head": "packed query rows",
    r"parked": "spilled to shared memory",
    r"shadows?": "16-bit copy",
    r"rounded in (the|a) metric": "rounded by a Hessian",
    r"searched for": "trellis-coded",
    r"judged|reread": "fake-quantized evaluation, teacher-forced",
    r"stand and fall": "are correlated",
    r"of use longest ago": "least recently used",
    r"answers part\b": "answers diverge",
    r"in an order by chance": "in random order",
    r"of an hour's age": "when it came is history, for notebook/",
    r"no script does it|before at|which was chosen before": "history, for notebook/",
    r"in place of \d+": "what a figure was before is history, for notebook/",
    r"(at|of|by) commit": "provenance, for notebook/",
}
HASH = re.compile(r"(?<![\w.#-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w+-]|\.\d)|\bcommit [0-9a-f]{7,40}\b")
NAMED = re.compile(r"(?<![\w/.])(?:docs|tests|benchmarks|scripts|examples|notebook)/[\w/.-]+\.(?:py|md|cuh?|jsonl?|sh|svg|safetensors)\b")
MADE_UP = {  # by tests of what happens where a file is not there; results that a command is to write
    "tests/test_documents.py": {"benchmarks/none.py"},
    "tests/test_packaging.py": {"docs/a.md", "tests/b.py"},
    "tests/test_readme.py": {"docs/a.svg", "docs/b.md"},
    "tests/test_words.py": None,
    "benchmarks/eval_table.py": {"benchmarks/results/eval.json"},
    "benchmarks/measure.py": {"benchmarks/results/GPU.json"},
}


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs, headings and cells of a document, with `x` for what stands in backticks, and whether each is a cell."""
    in_table = False
    for token in PARSER.parse(text):
        in_table = token.type == "table_open" or (in_table and token.type != "table_close")
        if token.type == "inline":
            kinds = {"text": lambda child: child.content, "softbreak": lambda _: " ", "code_inline": lambda _: "`x`"}
            if token.content.startswith(":::"):  # a module whose docstrings become the page's text
                continue
            said = "".join(kinds[child.type](child) for child in token.children if child.type in kinds)
            yield " ".join(said.split()), in_table


def faults(text: str) -> list[str]:
    """What a document says in banned words, each with what it should say."""
    said = "\n".join(words for words, _ in prose(text))
    return [
        f"{found[0]!r}: {instead}" for banned, instead in BANNED.items() for found in re.finditer(rf"\b(?:{banned})\b", said, re.IGNORECASE)
    ]


def sentences(text: str) -> list[str]:
    """The sentences of a document's paragraphs and items; a colon or semicolon before a new beginning ends one too."""
    end = re.compile(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z`(\[\"*0-9])")
    parts = (end.split(words) for words, is_cell in prose(text) if not is_cell)
    return [sentence for of in parts for sentence in of if len(sentence.split()) >= 3]


@pytest.mark.parametrize("page", USER_PAGES)
def test_user_documents_use_the_fields_words(page):
    assert faults((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", USER_PAGES)
def test_sentences_are_short(page):
    """On average at most 25 words, which is what each one may have."""
    lengths = [len(sentence.split()) for sentence in sentences((ROOT / page).read_text())]
    assert not lengths or sum(lengths) / len(lengths) <= 25


@pytest.mark.parametrize("page", USER_PAGES)
def test_few_sentences_are_long(page):
    """Over 25 words have three sentences of a page, or one in twenty: those that a formula or a list of names makes long."""
    found = sentences((ROOT / page).read_text())
    long = [sentence for sentence in found if len(sentence.split()) > 25]
    assert len(long) <= max(3, len(found) / 20), long


@pytest.mark.parametrize("page", USER_PAGES)
def test_tables_have_at_most_seven_columns(page):
    for line in re.findall(r"^\|[ :|-]+\|$", (ROOT / page).read_text(), re.MULTILINE):
        assert line.count("|") <= 8, line


def test_lines_of_cuda_have_at_most_120_characters():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in CODE
        if path.suffix in (".cu", ".cuh") and (lines := [line for line in path.read_text().splitlines() if len(line) > 120])
    }
    assert long == {}


def test_commit_hashes_stand_in_the_notebook_alone():
    found = {str(path.relative_to(ROOT)): HASH.findall(path.read_text()) for path in (*(ROOT / page for page in PAGES), *CODE)}
    found.pop("tests/test_words.py")
    assert {path: hashes for path, hashes in found.items() if hashes} == {}


def test_files_that_documents_and_comments_name_exist():
    missing = {}
    for path in (*(ROOT / page for page in PAGES), *CODE):
        allowed = MADE_UP.get(str(path.relative_to(ROOT)), set())
        if allowed is not None:
            gone = {name for name in NAMED.findall(path.read_text()) if not (ROOT / name).exists()} - allowed
            missing |= {str(path.relative_to(ROOT)): gone} if gone else {}
    assert missing == {}


def test_tests_that_documents_and_comments_name_exist():
    defined = {name for path in CODE for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)}
    defined |= {path.stem for path in CODE if path.parent.name in ("tests", "cli") or "tests" in path.parts}
    for path in (*(ROOT / page for page in PAGES), *CODE):
        if path.name != "test_words.py":
            named = {name for name in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)(?:\.py)?`", path.read_text())}
            assert named <= defined, path


def test_entries_of_the_notebook_are_dated_and_listed():
    listed = set(re.findall(r"\]\(([\w.-]+\.md)\)", (NOTEBOOK / "README.md").read_text()))
    entries = {path.name for path in NOTEBOOK.glob("*.md")} - {"README.md"}
    assert entries == listed
    for name in entries:
        assert re.match(r"20\d\d-\d\d-\d\d-[a-z0-9.-]+\.md$", name)
        text = (NOTEBOOK / name).read_text()
        assert text.startswith("# ") and text.split("\n\n")[1].strip(), name


def test_what_is_looked_for_is_found():
    assert len(faults("The team takes a span in place of 12, at commit.")) == 4
    assert faults("`pieces.py` has a `team` of `shadow` pages, in place of a matrix. A spanner.") == []
    for text, count in (
        ("of d15c6e4.", 1),
        ("commit 1059700,", 1),
        ("1.1754944e-38f 0x9e3779b9 65504 9.5e10 deadbeef defaced0 -2.1219444e-4", 1),
        ("effaced", 0),
    ):
        assert len(HASH.findall(text)) == count, text
    assert sentences("One is here. It has `two` words; no: Three of these.\n\n| a cell of a table |\n|---|\n| and that is another |") == [
        "One is here.",
        "It has `x` words; no:",
        "Three of these.",
    ]
    assert NAMED.findall("(tests/nothing.py) ../docs/x.md src/tests/y.py") == ["tests/nothing.py"]
