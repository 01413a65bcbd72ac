"""`quantkv bench` end to end on a CPU."""

import json

SHAPES = "B2xL64xHQ4xHK2xD64,N20xHQ4xHK2xD64"


def test_bench(run, tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.svg"
    code, out, err = run("bench", "--device", "cpu", "--shape", SHAPES, "--kv", "int4,int8", "--json", files[0], "--plot", files[1])
    assert code == 0, err
    assert "Decode" in out and "Write" in out and out.count("quantkv reference") == 4 and out.count("quantkv cpu") == 3
    assert "no GPU: " in err and "by quantkv's kernels for CPUs" in err
    rows = json.loads(files[0].read_text())["rows"]
    assert [(r["kind"], r["name"], r["stores"]) for r in rows] == [
        (kind, name, stores)
        for kind, rival in (("decode", "SDPA"), ("write", "index_copy_"))
        for name, stores in (*((f"quantkv {i}", f) for f in ("int4", "int8") for i in ("reference", "cpu")), (rival, "bf16"))
    ]
    (unavailable,) = [r for r in rows if r["status"] != "ok"]
    assert unavailable["kind"] == "write" and unavailable["stores"] == "int8" and "nothing to gain" in unavailable["reason"]
    assert all(r["vs_16bit"] > 0 for r in rows if r is not unavailable)
    assert files[1].read_text().startswith("<?xml")


def test_a_models_geometry(run, tmp_path):
    """A shape for each kind of its layers; what a shape names goes before."""
    config = {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 24, "sliding_window_pattern": 3, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}))
    args = (
        "bench",
        "--device",
        "cpu",
        "--model",
        tmp_path,
        "--kv",
        "int8",
        "--implementations",
        "reference",
        "--no-rivals",
        "--json",
        "--shape",
    )
    code, out, err = run(*args, "L40,B2xL16xHK4")
    assert code == 0, err
    shapes = [row["shape"] for row in json.loads(out)["rows"]]
    assert err.count("quantkv reference") == 8 and "figures:" not in err  # the tables, and the progress
    assert shapes == [f"{text}xW24" for text in ("L40xHQ4xHK2xD32", "B2xL16xHQ4xHK4xD32")] + ["L40xHQ4xHK2xD32", "B2xL16xHQ4xHK4xD32"]


def test_known_models_have_the_default_shapes():
    from quantkv.bench.shapes import DEFAULT, SMALL
    from quantkv.cli.bench import _shapes, heads_of

    assert _shapes(None, "decode,write", "cuda", heads_of("llama-3-8b")) == [*DEFAULT["decode"], *DEFAULT["write"]]
    made = _shapes(None, "decode", "cpu", heads_of("qwen3-32b"))
    assert [(s.B, s.L, s.HQ, s.HK, s.D) for s in made] == [(s.B, s.L, 64, 8, 128) for s in SMALL["decode"]]


def test_bad_input(run, tmp_path):
    for arguments, word in (
        (("--shape", "B8"), "shape"),
        (("--shape", "L99999999999999"), "at most"),
        (("--model", "llama-8b"), "llama-3-8b"),
        (("--model", "deepseek-v3"), "latent"),
        (("--model", tmp_path), "--model"),
        (("--kinds", "read"), "--kinds"),
        (("--kv", "int5"), "int4"),
        (("--kv", "4bit"), "a preset, which is more than a format; its format is levels4"),
        (("--implementations", "cuda"), "--implementations"),
        (("--peers", tmp_path / "none"), "--peers"),
        (("--json", tmp_path / "no" / "file"), "--json"),
        ((f"--json={tmp_path}",), "--json"),
        (("--plot", tmp_path / "a.txt"), "--plot"),
    ):
        code, _, err = run("bench", "--device", "cpu", *arguments)
        assert code == 2 and word in err and len(err.strip().splitlines()) == 1, (arguments, err)
