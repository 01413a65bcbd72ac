import pytest

from quantkv.cli import text


def words(string, verbose=False, add_special_tokens=True):
    return {"input_ids": [len(word) for word in string.split()]}


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"ELF\0\1", "binary file .NUL at byte 3"),
        (b"caf\xe9 au lait", "not UTF-8 .byte 0xe9 at 3"),
        ("pi\u00f1ata".encode()[:3], "not UTF-8"),
    ],
)
def test_refuses_what_is_no_text(tmp_path, content, reason):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"a.txt.*{reason}"):
        text.load(str(file), 10)


def test_refuses_a_directory_and_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="not a file"):
        text.load(str(tmp_path), 10)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        text.load(str(tmp_path / "nowhere.txt"), 10)


def test_reads_a_prefix_that_ends_inside_a_character(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("ab\u00f1" * 10, encoding="utf-8")
    assert text.read_file(file, max_bytes=7).text == "ab\u00f1ab"  # byte 7 is the first half of a character
    assert text.read_file(file).text == "ab\u00f1" * 10


def test_docs_need_no_file_and_no_network():
    assert "operator" in text.load("docs", 10).text


def test_news_without_gensim_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(text, "_news_file", lambda: None)
    with pytest.raises(ValueError, match="pip install --no-deps gensim"):
        text.load("news", 10)
    assert text.load(None, 10).name.startswith("documentation of Python")


def test_cut_keeps_whole_contexts():
    sample = text.LoadedText("sample", "a bb ccc dddd eeeee")
    assert text.cut(sample, words, context=2, num_tokens=5).tolist() == [[1, 2], [3, 4]]
    assert text.cut(sample, words, context=2, num_tokens=3).tolist() == [[1, 2]]
    with pytest.raises(ValueError, match=r"sample: 5 tokens.*--context 6"):
        text.cut(sample, words, context=6, num_tokens=6)
    begun = lambda string, add_special_tokens=True, **options: {"input_ids": [7] * add_special_tokens + words(string)["input_ids"]}
    assert text.cut(sample, begun, context=2, num_tokens=5).tolist() == [[7, 1], [7, 2]]
    with pytest.raises(ValueError, match="--tokens 1"):
        text.cut(sample, words, context=2, num_tokens=1)
