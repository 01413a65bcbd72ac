"""benchmarks/end_to_end.py: a small model on a CPU, what it writes, and what it refuses to time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from quantkv.implementations.cpu.compiling import missing

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FORMATS = ("bf16", "int8", "tq4", "int2")
SERVES = "reference" if missing() else "cpu"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    return load("end_to_end")


def run(script, monkeypatch, tmp_path, *more):
    path = tmp_path / "out.json"
    arguments = ["x", "--tiny", "--device", "cpu", "--sequences", "2", "--steps", "2", "--json", str(path), *more]
    monkeypatch.setattr(sys, "argv", arguments)
    return script.main(), json.loads(path.read_text())


def test_every_cache_side_by_side(script, monkeypatch, tmp_path):
    code, figures = run(script, monkeypatch, tmp_path, "--formats", *FORMATS)
    rows = figures["end_to_end"]
    assert code == 0 and [r["stores"] for r in rows] == list(FORMATS)
    assert {r["implementation"] for r in rows} == {SERVES} and all(r["tokens_per_s"] > 0 for r in rows)
    # 2 layers of 2 sequences of 68 tokens in pages of 16, 2 kv heads of 32
    assert rows[0]["cache_bytes"] == 2 * 2 * 80 * 2 * 2 * 32 * 2
    errors = {r["stores"]: (r["row_error"], r["attention_error"], r["logits_error"]) for r in rows}
    assert errors["bf16"] == (0, 0, 0) and errors["int8"] < errors["tq4"] < errors["int2"]
    tables = load("tables")
    text = tables.update("<!-- bench:end_to_end -->\n<!-- /bench -->", tables.blocks(figures))
    assert text.count(f"| quantkv {SERVES} |") == len(FORMATS) and "2 sequences of 64 tokens" in text


def test_attention_that_loses_keys_is_not_timed(script, monkeypatch, tmp_path, capsys):
    """A format that reads back something else than its rows' error allows."""
    attention = script.Decoding.attention

    def forgetful(self, layer, *rows):
        lost = 20 if self.caches[0].format.name == "int8" else 0
        self.seq_lens -= lost
        out = attention(self, layer, *rows)
        self.seq_lens += lost
        return out

    monkeypatch.setattr(script.Decoding, "attention", forgetful)
    code, figures = run(script, monkeypatch, tmp_path, "--formats", "bf16", "int8")
    assert code == 1 and [r["stores"] for r in figures["end_to_end"]] == ["bf16"]
    assert "int8: attention differs" in capsys.readouterr().err


def test_a_step_is_a_step_of_the_model(script):
    """Two steps over a cache give the logits of attention over all tokens at once, by PyTorch."""
    geometry, sequences = script.TINY, 2
    torch.manual_seed(0)
    model = script.Model(geometry, torch.device("cpu"))
    batch = script.Decoding(model, "bf16", script.QUANTKV, sequences, 20, 2)
    history = []
    for cache in batch.caches:
        slots = (batch.block_table[:, torch.arange(20) // 16].long() * 16 + torch.arange(20) % 16).flatten()
        history.append([rows.view(sequences, 20, geometry.kv_heads, -1).to(script.DTYPE) for rows in cache.dequantize(slots)])

    def attention(layer, q, k, v):
        history[layer] = [torch.cat([old, new[:, None]], 1) for old, new in zip(history[layer], (k, v))]
        keys, values = (rows.transpose(1, 2) for rows in history[layer])
        out = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]

    tokens = batch.tokens.clone()
    for step in range(2):
        expected = model(tokens, torch.full((sequences,), 20 + step), attention)
        got = batch.step()
        assert (got - expected).norm() <= 3 * torch.finfo(script.DTYPE).eps * expected.norm()
        tokens = expected.argmax(-1)
        assert torch.equal(tokens, batch.tokens) and batch.seq_lens.tolist() == [21 + step] * sequences
