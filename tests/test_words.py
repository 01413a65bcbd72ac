"""How documents are written: docs/ and what stands beside it say what is true now, in the field's words; history is in notebook/.

CONTRIBUTING.md has the rules. Here is what of them a program can see.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

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

# What no document says, with what it says in its place. Only words whose identifiers in code, if any, stand in backticks, which are
# not looked at.
BANNED = {
    r"pieces?": "split-KV partial, or chunk of a prompt, or part of a batch",
    r"teams?": "consumer warpgroup",
    r"spans?": "KV tile of 64 tokens",
    r"whole pairs?": "(sequence, kv head) that one block or cluster serves",
    r"many columns": "decode by wgmma, many packed query rows",
    r"query columns?|columns of a kv head": "packed query rows",
    r"parked": "spilled to shared memory",
    r"shadows?": "16-bit copy",
    r"exact (tokens|rows)": "full-precision tokens",
    r"rounded in (the|a) metric|(key|value) metrics?": "rounded by a Hessian",
    r"(key|position) offsets?|offsets? (by|of) positions?": "key mean by position",
    r"searched for": "trellis-coded",
    r"honoured": "supported",
    r"recipes?": "cache configuration, policy",
    r"times smaller": "compression factor",
    r"dense (prompts?|implementation)": "prefill",
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
# The same of what code calls and says. Old names live where they are deprecated, and where a test or a reader of files takes them.
BANNED_IN_CODE = {
    r"pieces?|teams?|spans?|reread|judged|parked|honoured|[Rr]ecipes?|RECIPES": "as in documents",
    r"promis(e[ds]?|ing)": "upper bound",
    r"MERGED|merge_splits": "combine",
    r"TURNED": "transposed",
    r"whole_?pairs?|many_?columns|query_?columns?": "unsplit; packed query rows",
    r"shadows?|exact_?tokens": "16-bit copies, full-precision tokens",
    r"(keep|attach|check)_exact|KeepsExact|ExactGroup|exact_(layers|of_prompts)": "full-precision tokens",
    r"key_?offsets?|score_offsets|offset_(stride|groups|gain|bucket|head)|offsets_of": "key means",
    r"(key|value)_metrics?|in the metric": "Hessian",
    r"Turn[A-Z]\w*|AFTER_WRITE(?<!PDL_AFTER_WRITE)|FOLLOWS": "programmatic dependent launch (PDL)",
}
OLD_NAMES = {
    "src/quantkv/calibration.py",
    "src/quantkv/copies.py",
    "src/quantkv/deprecated.py",
    "src/quantkv/exact.py",
    "src/quantkv/shadow.py",
    "tests/test_layering.py",
    "tests/test_old_names.py",
    "tests/test_words.py",
}
# Words of documents that say what is true now, tables included, as `wc -w` counts them: more are history, or are said twice.
BUDGETS = {
    ("CHANGELOG.md", "docs/kernels.md", "docs/performance.md", "docs/reliability.md"): 6000,
    ("docs/how-it-works.md",): 1000,
    ("docs/four-bits.md",): 1600,
    ("docs/features.md",): 1000,
}
HASH = re.compile(r"(?<![\w.#-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w+-]|\.\d)|\bcommit [0-9a-f]{7,40}\b")
NAMED = re.compile(r"(?<![\w/.])(?:docs|tests|benchmarks|scripts|examples|notebook)/[\w/.-]+\.(?:py|md|cuh?|jsonl?|sh|svg|safetensors)\b")
FILE = re.compile(r"(?<![\w/.{}*<-])([A-Za-z_][\w/-]*\.(?:py|cuh?|sh))\b(?!\()")
MADE_UP = {  # by tests of what happens where a file is not there; results that a command is to write
    "tests/test_documents.py": {"benchmarks/none.py"},
    "tests/test_packaging.py": {"docs/a.md", "tests/b.py"},
    "tests/test_readme.py": {"docs/a.svg", "docs/b.md", "setup.py"},
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


def comments(path: Path) -> str:
    """What a file of code says to its reader: comments, and in Python docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return "\n".join(re.findall(r"#.*" if path.suffix == ".sh" else r"//.*", text))
    said = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n".join([*said, *(ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented))])


def code_faults(text: str) -> list[str]:
    """What code says in banned words or names."""
    return [f"{found[0]!r}: {instead}" for banned, instead in BANNED_IN_CODE.items() for found in re.finditer(rf"\b(?:{banned})\b", text)]


def switches_of(text: str) -> list[str]:
    """Names of a module's constants that are True or False."""
    assigned = [node for node in ast.parse(text).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    flags = [node for node in assigned if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool)]
    targets = [ast.unparse(target) for node in flags for target in getattr(node, "targets", None) or [node.target]]
    return [name for name in targets if name.isupper()]


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


@pytest.mark.parametrize("page", PAGES)
def test_documents_use_the_fields_words(page):
    assert faults((ROOT / page).read_text()) == []


def test_code_uses_the_fields_words():
    found = {str(path.relative_to(ROOT)): code_faults(path.read_text()) for path in CODE}
    assert {path: said for path, said in found.items() if said and path not in OLD_NAMES} == {}
    assert {path for path in OLD_NAMES if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("path", [path for path in CODE if path.suffix == ".py" and "src" in path.parts], ids=lambda p: p.name)
def test_a_docstring_opens_with_what_the_thing_is(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    assert [text for node in nodes if (text := ast.get_docstring(node) or "").startswith(("Of ", "By "))] == []


def test_no_switch_of_an_ablation_is_in_the_package():
    """A constant that is True or False is one that no user can reach: benchmarks patch what they vary. What an implementation says of
    itself is none."""
    switches = {
        str(path.relative_to(ROOT)): names
        for path in CODE
        if "src" in path.parts and path.suffix == ".py" and (names := set(switches_of(path.read_text())) - {"LATENTS"})
    }
    assert switches == {}


def test_what_a_class_is_called_says_which():
    """Five were called Plan, three Read: a name that several things could have is no class's in two modules."""
    defined = [
        node.name
        for path in CODE
        if "src" in path.parts and path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name: n for name in ("Plan", "Read", "Batch", "Text", "Part", "Recipe") if (n := defined.count(name)) > 1} == {}


@pytest.mark.parametrize("pages", BUDGETS, ids=lambda pages: pages[-1])
def test_documents_are_short(pages):
    assert sum(len((ROOT / page).read_text().split()) for page in pages) <= BUDGETS[pages]


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


def test_files_that_are_named_without_their_folder_exist():
    """A source file by its name alone, or with some of its folders, as comments do."""
    there = {str(path.relative_to(ROOT)) for path in CODE}
    tails = {"/".join(name.split("/")[at:]) for name in there for at in range(name.count("/") + 1)}
    missing = {}
    for path in (*(ROOT / page for page in PAGES), *CODE):
        if MADE_UP.get(str(path.relative_to(ROOT)), ()) is not None:
            named = FILE.findall(path.read_text() if path.suffix == ".md" else comments(path))
            gone = set(named) - tails - MADE_UP.get(str(path.relative_to(ROOT)), set())
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
    assert len(code_faults("teams of key_offset AFTER_WRITE PDL_AFTER_WRITE PDL_AFTER_WRITES")) == 3
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
    assert switches_of("A = True\nB: bool = False\nC = 1\n_state = False\ndef f():\n    D = True") == ["A", "B"]
    assert FILE.findall("`decode/unsplit.py`, combine.cuh; tests/x.json a.python()") == ["decode/unsplit.py", "combine.cuh"]
    assert NAMED.findall("(tests/nothing.py) ../docs/x.md src/tests/y.py") == ["tests/nothing.py"]
