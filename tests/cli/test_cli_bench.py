"""`quantkv bench` end to end on a CPU."""

import json

SHAPES = "B2xL64xHQ4xHK2xD64,N20xHQ4xHK2xD64"


def test_bench(run, tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.svg"
    code, out, err = run("bench", "--device", "cpu", "--shape", SHAPES, "--kv", "int4,int8", "--json", files[0], "--plot", files[1])
    assert code == 0, err
    assert "Decode" in out and "Write" in out and out.count("quantkv reference") == 4 and "no GPU" in err
    rows = json.loads(files[0].read_text())["rows"]
    assert [(r["kind"], r["stores"], r["status"]) for r in rows] == [
        ("decode", "int4", "ok"),
        ("decode", "int8", "ok"),
        ("write", "int4", "ok"),
        ("write", "int8", "ok"),
    ]
    assert files[1].read_text().startswith("<?xml")


def test_bad_input(run, tmp_path):
    for arguments, word in (
        (("--shape", "B8"), "shape"),
        (("--kinds", "read"), "--kinds"),
        (("--kv", "int5"), "int4"),
        (("--implementations", "cuda"), "--implementations"),
        (("--peers", tmp_path / "none"), "--peers"),
        (("--json", tmp_path / "no" / "file"), "--json"),
        (("--plot", tmp_path / "a.txt"), "--plot"),
    ):
        code, _, err = run("bench", "--device", "cpu", *arguments)
        assert code == 2 and word in err and len(err.strip().splitlines()) == 1, (arguments, err)
