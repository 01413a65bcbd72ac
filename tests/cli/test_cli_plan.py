"""`quantkv plan`, `formats` and `doctor`: what they print, what they refuse, and that a plan loads no torch."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkv import Format, get_format
from quantkv.cli import machine
from quantkv.format import available_formats, register, unregister
from quantkv.geometry import read
from quantkv.known_models import config_of
from quantkv.policy_file import PRESETS

WITHOUT = "import runpy, sys; sys.modules[sys.argv.pop(1)] = None; runpy.run_module('quantkv', run_name='__main__', alter_sys=True)"


@pytest.fixture
def planned(run):
    """What `quantkv plan ... --json` says."""

    def planned(*args):
        code, out, err = run("plan", *args, "--json")
        assert code == 0, err
        made = json.loads(out)
        return made, {row["name"]: row for row in made["formats"]}

    return planned


def test_plan_counts(planned):
    made, rows = planned("llama-3-8b", "--memory", "24GiB", "--share", "1", "--context", "4096")
    free = 24 * 2**30 - 2 * 8_030_261_248
    assert (made["parameters"], made["weights_bytes"], made["cache_bytes_per_rank"]) == (8_030_261_248, 16_060_522_496, free)
    assert made["layers"] == [
        {"count": 32, "kind": "full", "window": 0, "states": False, "kv_heads": 8, "head_size": 128, "head_size_v": 128}
    ]
    token = {"bf16": 512, "int8": 264, "int4": 136, "tq3": 102, "trellis2": 68}
    for name, size in token.items():
        page = 32 * 8 * size * 16
        assert rows[name]["bytes_per_token"] == 32 * 8 * size
        assert (rows[name]["sequence_bytes"], rows[name]["sequences"]) == (256 * page, free // (256 * page))
        assert rows[name]["tokens"] == free // page * 16
    assert rows["int4"]["speed"] == {"least": pytest.approx(3.3, abs=0.05), "most": pytest.approx(3.4, abs=0.05)}
    assert rows["trellis2"]["speed"] is None


def test_plan_of_ranks_and_shares(planned):
    one, _ = planned("llama-3-8b", "--memory", "48GiB")
    made, rows = planned("llama-3-8b", "--memory", "48GiB", "--tp", "4")
    assert one["cache_bytes_per_rank"] == int(48 * 2**30 * 0.9) - 16_060_522_496
    assert made["cache_bytes_per_rank"] == int(48 * 2**30 * 0.9) - 16_060_522_496 // 4
    assert rows["int4"]["bytes_per_token"] == 32 * 2 * 136


def test_plan_of_a_policy(planned, tmp_path):
    policy = {"policy_version": 1, "format": "int4", "layers": {"0": "none", "1-2": "int8"}, "full_precision": {"sink": 16, "recent": 24}}
    (tmp_path / "mine.json").write_text(json.dumps(policy))
    _, rows = planned("llama-3-8b", "--kv", f"int4,{tmp_path / 'mine.json'}", "--context", "1024")
    sizes = [512, 264, 264, *[136] * 29]
    assert rows["mine"]["bytes_per_token"] == 8 * sum(sizes)
    copies = 31 * 8 * 512 * 16 * 5  # first 16: a page; latest 24: 3; one to spare. The layer of 16 bits needs none
    assert rows["mine"]["sequence_bytes"] == 8 * sum(sizes) * 1024 + copies
    assert rows["int4"]["sequence_bytes"] == 8 * 32 * 136 * 1024


def test_plan_of_presets(planned):
    """By name, and in front of what `all` lists. Latents have a format of their own."""
    _, rows = planned("llama-3-8b", "--kv", "4bit,levels4", "--context", "1024")
    assert list(rows) == ["levels4", "4bit"] and rows["4bit"]["bytes_per_token"] == rows["levels4"]["bytes_per_token"] == 32 * 8 * 132
    copies = 32 * 8 * 512 * 16 * 5
    assert rows["4bit"]["sequence_bytes"] == rows["levels4"]["sequence_bytes"] + copies == 32 * 8 * 132 * 1024 + copies
    _, every = planned("llama-3-8b")
    assert set(every) == {*PRESETS, *available_formats()}
    _, rows = planned("deepseek-v3", "--kv", "4bit,4bit")
    assert rows["4bit"]["bytes_per_token"] == 61 * 328


def test_plan_of_a_policy_in_vllm(planned, run, tmp_path):
    """Of full layers and layers with windows, blocks are packed where pages differ; layers of one kind keep their pages."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"policy_version": 1, "format": "int4", "layers": {"0": "int8"}}))
    asked = ("--kv", f"int4,{file}", "--memory", "80GB", "--context", "32768")
    made, rows = planned("gemma-3-4b", *asked)
    int4, int8 = (4 * size for size in (264, 520))  # of a token in 4 kv heads of 256
    full, sliding = -(-32768 // 16), (1023 + 2 * 8192) // 16 + 2  # blocks; of a window with what is in flight, begun within a block
    uniform = 16 * 5 * int4, 6 * sliding + full  # 5 layers a group, or one less
    mine = 48 * 5 * int4, 2 * sliding + -(-32768 // 48)  # two groups of windows: of 48 tokens, full layers take as much as these of 16
    assert mine[0] - 16 * (13 * int4 + int8) > 0 and mine[0] - 16 * 15 * int4 == 0
    for name, (block, held) in (("int4", uniform), ("mine", mine)):
        assert rows[name]["vllm_sequence_bytes"] == held * block
        assert rows[name]["vllm_tokens"] == made["cache_bytes_per_rank"] // block * 32768 // held
    needed = 16 * (sliding * int8 + (28 * sliding + 5 * full) * int4)
    assert rows["mine"]["vllm_padding"] == pytest.approx(mine[0] * mine[1] / needed) and 1 < rows["mine"]["vllm_padding"] < 1.01
    assert rows["int4"]["vllm_padding"] == pytest.approx(30 / 29, rel=0.01)  # a place for a layer stays empty
    _, rows = planned("llama-3-8b", *asked)
    assert rows["mine"]["vllm_padding"] == 1 and rows["mine"]["vllm_sequence_bytes"] == rows["mine"]["sequence_bytes"]
    assert rows["mine"]["vllm_tokens"] == pytest.approx(rows["mine"]["tokens"], abs=16)
    _, rows = planned("deepseek-v2-lite", "--kv", "int4", "--weights", "1GB")
    assert rows["int4"]["vllm_tokens"] is None


def test_plan_of_states_in_vllm(planned, run):
    """A block holds a state; a sequence of few tokens takes one all the same, which is said."""
    asked = ("--kv", "int4", "--memory", "200GB", "--context", "2500")
    _, rows = planned("qwen3-next-80b-a3b", *asked)
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 2
    row = 2 * 264  # int4, of 2 kv heads of 256
    tokens = -(-state // (16 * row)) * 16
    assert rows["int4"]["vllm_sequence_bytes"] == 12 * tokens * row * (3 * 2 + -(-2500 // tokens))
    code, out, _ = run("plan", "qwen3-next-80b-a3b", *asked)
    said = [line for line in out.splitlines() if "vLLM" in line]
    assert code == 0 and len(said) == 1 and said[0].startswith("int4: vLLM's blocks have one size for all layers")
    assert f"{rows['int4']['vllm_padding']:.2f}x" in said[0] and f"{rows['int4']['vllm_tokens']:,} tokens fit" in said[0]


def test_plan_of_windows_states_and_refusals(planned):
    _, rows = planned("gemma-3-4b", "--context", "8192", "--kv", "int8")
    pages = 5 * 8192 // 16 + 29 * (1024 // 16 + 1)
    assert rows["int8"]["sequence_bytes"] == pages * 4 * 16 * (512 + 8)
    _, rows = planned("phi-3-mini")
    assert "head_size=96: int2 takes powers of two" in rows["int2"]["refused"] and rows["levels4"]["refused"] is None


def test_plan_of_files(planned, model_dir, tmp_path):
    """Weights are counted in the files, or by their index."""
    files, _ = planned(model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    assert files["weights_bytes"] == sum(t.nbytes for t in tensors.values())
    assert files["parameters"] == sum(t.numel() for t in tensors.values()) and "1 safetensors file" in files["weights_source"]
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    index = {"metadata": {"total_size": 12345}, "weight_map": {"a": "absent.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    alone, _ = planned(tmp_path / "config.json")
    assert (alone["weights_bytes"], alone["parameters"]) == (12345, None)


def test_plan_of_a_decoder_with_an_encoder(planned, tmp_path):
    """Of a model of images and text without its files, the encoder is not counted, and the plan says so."""
    path = _config(tmp_path, {"model_type": "gemma3", "text_config": config_of("gemma-3-4b"), "vision_config": {"hidden_size": 1152}})
    made, rows = planned(path)
    alone, same = planned("gemma-3-4b")
    assert rows == same and made["weights_bytes"] == alone["weights_bytes"]
    assert made["weights_source"] == f"{alone['weights_source']}; of its decoder alone"


def test_plan_of_numbers(planned):
    numbers = "layers=4,kv_heads=2,head_size=64,heads=8,window=100,windowed=3,parameters=1e6"
    made, rows = planned(numbers, "--context", "500", "--memory", "1GB")
    pages = 32 + 3 * 8
    assert rows["int8"]["sequence_bytes"] == pages * 2 * 16 * 2 * 68 and made["weights_bytes"] == 2_000_000


def test_plan_prints(run):
    code, out, err = run("plan", "gemma-3-4b", "--memory", "24GiB", "--kv", "int4,trellis2")
    assert code == 0 and not err
    assert "29 sliding (1,024 tokens), 4 kv heads of 256; 5 full" in out and "3.88 billion parameters" in out
    assert [line.split()[0] for line in out.splitlines() if line.strip().startswith(("int4", "trellis2"))] == ["int4", "trellis2"]
    code, out, err = run("plan", "qwen3-next-80b-a3b", "--gpu", "RTX 1")
    assert "nothing was measured on 'RTX 1'; recorded: NVIDIA H200" in out and "states: 74.2 MiB a sequence" in out


def test_plan_and_its_help_load_no_torch():
    code = "import sys; from quantkv.cli import app\ntry: app(sys.argv[1:])\nexcept SystemExit as e: print(e.code, 'torch' in sys.modules)"
    for args in (["plan", "llama-3-8b", "--memory", "24GiB", "--policy", "absent.json"], ["plan", "gpt-oss-20b"], ["plan", "--help"]):
        found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert found.stdout.splitlines()[-1] == f"{2 if 'absent.json' in args else 0} False", found.stderr


def _config(tmp_path, text):
    (tmp_path / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return tmp_path / "config.json"


LLAMA = config_of("llama-3-8b")


@pytest.mark.parametrize(
    "args,message",
    [
        (["llama3-8b"], "'llama3-8b' is unknown: did you mean llama-3-8b"),
        (["folder/absent"], "folder/absent: no such file or directory"),
        (["absent.json"], "absent.json: no such file or directory"),
        (["llama-3-8b", "--memory", "24XB"], "--memory 24XB: a size such as 24GiB"),
        (["llama-3-8b", "--memory", "-1GiB"], "--memory -1GiB"),
        (["llama-3-8b", "--memory", "nan"], "--memory nan"),
        (["llama-3-8b", "--memory", "8GiB"], "90% of it is 7.20 GiB, the weights take 14.96 GiB; allowed: more"),
        (["llama-3-8b", "--memory", "24GiB", "--share", "1.5"], "--share 1.5: a number above 0"),
        (["llama-3-8b", "--tp", "3"], "--tp 3: a divisor of the model's 32 query heads"),
        (["llama-3-8b", "--tp", "0"], "--tp 0: a positive number"),
        (["llama-3-8b", "--kv", "int5"], "--kv: format='int5' is unknown: did you mean 'int"),
        (["llama-3-8b", "--kv", "quantkv_INT4"], "--kv: format='quantkv_INT4' is unknown: did you mean 'int4'"),
        (["llama-3-8b", "--kv", ","], "at least one name is needed"),
        (["llama-3-8b", "--page", "12"], "--page 12: a multiple of 8"),
        (["layers=4,kv_heads=2"], "layers, kv_heads, head_size are needed"),
        (["layers=4,kv_heads=2,head_size=x"], "'head_size=x'; allowed: positive whole numbers"),
        (["layers=4,kv_heads=3,heads=8,head_size=64"], "heads is a multiple of kv_heads"),
        (["layers=4,kv_heads=2,head_size=64,windowed=3"], "windowed, of a window"),
        (["layers=4,kv_heads=2,head_size=64", "--memory", "1GiB"], "--weights SIZE"),
        (['{"model_type": "llama", '], "cut short"),
        (['[1]'], "list is no object"),
        ([{**LLAMA, "num_hidden_layers": -2}], "num_hidden_layers=-2"),
        ([{"model_type": "t5", "is_encoder_decoder": True}], "t5 is an encoder-decoder"),
        ([{"model_type": "bert"}], "bert is an encoder"),
        ([{"model_type": "gpt5"}], "'gpt5' is unknown: did you mean gpt"),
    ],
)  # fmt: skip
def test_plan_refuses_in_one_line(run, tmp_path, args, message):
    given = args[0]
    if not isinstance(given, str) or given.startswith(("{", "[")):
        args = [_config(tmp_path, given), *args[1:]]
    code, out, err = run("plan", *args)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err
    assert (isinstance(given, str) and not given.startswith(("{", "["))) or "config.json" in err


def rope(factor):
    """The text of a configuration with this factor, which need not be JSON of Python's."""
    given = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": "F"}}
    return json.dumps(given).replace('"F"', factor)


HOSTILE = {
    "nested": ("[" * 100_000, "no JSON, or cut short"),
    **{
        f"factor {value[:9]}": (rope(value), "config.rope_parameters.factor=")
        for value in ("[]", "{}", "null", "Infinity", "-1", "9" * 400)
    },
    "factor of nothing": (rope('""'), "config.rope_parameters.factor=''"),
    "positions of letters": ({**LLAMA, "max_position_embeddings": "abc"}, "config.max_position_embeddings='abc': a positive integer"),
    "positions below 0": ({**LLAMA, "max_position_embeddings": -1}, "config.max_position_embeddings=-1: a positive integer"),
    "a list of types": ({**LLAMA, "model_type": ["llama"]}, "config.model_type=['llama']: a name such as llama is needed"),
    "a layer's own letters": ({**LLAMA, "per_layer_config": {"0": "x"}}, "config.per_layer_config={'0': 'x'}: an object such as"),
    "own fields of no layer": ({**LLAMA, "per_layer_config": {"x": {}}}, "config.per_layer_config={'x': {}}: an object such as"),
    "10^400 layers": ({**LLAMA, "num_hidden_layers": 10**400}, "config.num_hidden_layers=1000"),
    "10^8 layers": ({**LLAMA, "num_hidden_layers": 10**8}, "config.num_hidden_layers=100000000: a positive integer is needed, of at most"),
    "10^8 layers by a rule": ({**config_of("gemma-2-9b"), "num_hidden_layers": 10**8}, "config.num_hidden_layers=100000000"),
    "a list of shared layers": ({**LLAMA, "num_kv_shared_layers": [1]}, "config.num_kv_shared_layers=[1]: a positive integer"),
    "weights of letters": ({**LLAMA, "quantization_config": "abc"}, "config.quantization_config='abc': an object"),
    "wide": ({**LLAMA, "intermediate_size": 10**400}, "config.intermediate_size=1000"),
    "states of letters": (
        {**config_of("qwen3-next-80b-a3b"), "linear_num_value_heads": "abc"},
        "config.linear_num_value_heads='abc': a positive integer",
    ),
    "states of nothing": (
        {**config_of("qwen3-next-80b-a3b"), "linear_conv_kernel_dim": None},
        "config.linear_conv_kernel_dim=None: a positive",
    ),
    "wide values of latents": ({**config_of("deepseek-v3"), "v_head_dim": 10**400}, "config.v_head_dim=1000"),
    "windows from letters on": (
        {**config_of("qwen3-0.6b"), "use_sliding_window": True, "sliding_window": 64, "max_window_layers": "abc"},
        "config.layer_types: of which type each layer is cannot be worked out (TypeError",
    ),
    "heads of nothing": ({"model_type": "gpt2", "n_embd": 4, "n_head": 8}, "config.head_dim=0: a positive integer"),
}


@pytest.mark.parametrize("given, message", HOSTILE.values(), ids=HOSTILE)
def test_plan_refuses_fields_that_are_anything(run, tmp_path, given, message):
    code, out, err = run("plan", _config(tmp_path, given))
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err and "config.json" in err and len(err) < 2100


def test_plan_of_too_many_layers(run):
    code, _, err = run("plan", "layers=1e8,kv_heads=8,head_size=128")
    assert code == 2 and "'layers=1e8'; allowed: positive whole numbers" in err and "at most 10,000" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "shape, offsets", [([10**30], [0, 4]), ([1, -1], [0, 4]), ([2.0], [0, 4]), (["x"], [0, 4]), ([1], [4, 8]), ("x", [0, 4])]
)
def test_plan_refuses_tensors_that_their_bytes_cannot_hold(run, tmp_path, shape, offsets):
    _config(tmp_path, LLAMA)
    header = json.dumps(
        {"t": {"dtype": "F32", "shape": shape, "data_offsets": offsets}, "u": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    )
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    code, _, err = run("plan", tmp_path)
    assert (code == 0) == (shape == [1]) and err.count("\n") == (code and 1)
    assert code == 0 or "model.safetensors: cut short or damaged" in err


@pytest.mark.parametrize("total", [10**400, -1, "x", None, "[" * 50_000])
def test_plan_refuses_indices_that_are_anything(run, tmp_path, total):
    _config(tmp_path, LLAMA)
    text = json.dumps({"metadata": {"total_size": "T"}, "weight_map": {"a": "absent.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text.replace('"T"', total if str(total)[0] == "[" else json.dumps(total)))
    code, _, err = run("plan", tmp_path)
    assert code == 2 and "model.safetensors.index.json: no index" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "policy,message",
    [
        ({"format": "int5"}, "int5"),
        ({"format": "int4", "layers": {"40": "int8"}}, "layers 0 to 31"),
        ({"format": "int4", "latents": "int5+int8"}, "int5"),
    ],
)
def test_plan_refuses_policies(run, tmp_path, policy, message):
    (tmp_path / "p.json").write_text(json.dumps({"policy_version": 1, **policy}))
    code, _, err = run("plan", "llama-3-8b", "--policy", tmp_path / "p.json")
    assert code == 2 and "--policy" in err and message in err and err.count("\n") == 1


def test_plan_refuses_damaged_weights(run, model_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    whole = (model_dir / "model.safetensors").read_bytes()
    for damaged in (whole[:4], whole[:100], whole[:-1], b"\xff" * 16):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        code, _, err = run("plan", tmp_path)
        assert code == 2 and "model.safetensors" in err and "cut short or damaged" in err and err.count("\n") == 1
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    code, _, err = run("plan", tmp_path)
    assert code == 2 and "model.safetensors.index.json" in err and err.count("\n") == 1


def test_json_is_printed_or_written(run, tmp_path, monkeypatch):
    """A bare --json prints, wherever it stands; --json=FILE writes, and the table is there as well."""
    monkeypatch.chdir(tmp_path)
    expected = run("plan", "llama-3-8b", "--json")
    assert expected[0] == 0 and json.loads(expected[1])["model"] == "llama-3-8b"
    assert run("plan", "--json", "llama-3-8b") == expected and list(tmp_path.iterdir()) == []
    for args in (("plan", "llama-3-8b"), ("formats",), ("doctor",)):
        printed, (usual, table, _) = run(*args, "--json")[1], run(*args)
        code, out, err = run(*args, "--json=out.json")
        assert out == table and err == "figures: out.json\n"
        assert code == usual == (args == ("doctor",) and not torch.cuda.is_available())  # without a GPU something is missing
        assert (tmp_path / "out.json").read_text() == printed
        code, out, err = run(*args, "--json=no/out.json")
        assert (code, out) == (2, "") and "--json no/out.json: no such directory" in err and err.count("\n") == 1


def test_formats_lists_the_registry(run):
    code, out, _ = run("formats", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and rows["int4"]["aliases"] == ["int4_per_token_head"] and rows["int4"]["bytes"] == 136
    assert rows["int4"]["k"] == "4 bits, rotated, 4 bytes a row" and rows["fp8"]["k"] == "float8_e4m3"
    assert rows["fp32"]["read"] == ["prefill", "triton", "cpu", "reference"] and rows["fp8"]["written"] == ["hopper", "triton", "reference"]
    assert rows["trellis2"]["written"] == ["hopper", "cpu", "reference"] and rows["trellis2"]["calibration"] == "key mean and Hessian"
    assert (rows["int4"]["calibration"], rows["int8"]["calibration"], rows["k4v2"]["bits"]) == ("key mean", "key mean", 3.25)
    int8 = get_format("int8")
    register(Format("mine", dataclasses.replace(int8.k, name="mine", hopper=None), int8.v, "of this test"), "me")
    try:
        code, out, _ = run("formats")
        (line,) = [line for line in out.splitlines() if line.strip().startswith("mine")]
        assert line.split()[:2] == ["mine", "me"] and "PTCR" in line and "HPTCR" not in line
    finally:
        unregister("mine")


@pytest.fixture
def doctor(run):
    def doctor(*args):
        code, out, err = run("doctor", *args, "--json")
        assert out, err
        return code, json.loads(out)

    return doctor


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_doctor_without_a_gpu(doctor, run):
    code, told = doctor()
    assert code == told["exit_code"] == 1
    assert {"level": "slower", "what": "no GPU: attention runs on the CPU", "mend": None} in told["findings"]
    kinds = ["write of a token", "write of 512 tokens", "decode", "verification of 4 drafts", "a prompt", "a prompt with 8-bit scores"]
    assert [row["what"] for row in told["serves"]] == kinds and told["versions"]["torch"] in torch.__version__
    code, out, _ = run("doctor", "llama-3-8b")
    assert code == 1 and "slower: no GPU" in out and "take: with nothing set up: 8bit, 4bit, 3bit, 2bit" in out


def test_doctor_without_torch():
    for package, args in (("torch", ["doctor", "llama-3-8b"]), ("torch", ["doctor", "--json"])):
        found = subprocess.run([sys.executable, "-c", WITHOUT, package, *args], capture_output=True, text=True)
        assert found.returncode == 2 and not found.stderr
        assert "torch is not installed" in found.stdout and "pip install 'torch>=2.8'" in found.stdout


def test_torch_that_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "broken_torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    module, reason = machine.load("broken_torch")
    assert module is None and reason == "broken_torch cannot be loaded: libcudart.so.13: cannot open shared object file"
    (finding,) = machine.findings(None, reason, [])
    assert finding.level == machine.CANNOT and "libcudart" in finding.what


class Cuda:
    """torch.cuda of another machine."""

    def __init__(self, available=True, capability=(9, 0)):
        self.is_available, self.get_device_capability = lambda: available, lambda index: capability
        self.get_device_name = lambda index: "Some GPU"


class Torch:
    def __init__(self, cuda, built="13.0", version="2.13.0"):
        self.cuda, self.__version__ = cuda, version
        self.version = type("version", (), {"cuda": built, "hip": None})


GPU = [{"name": "Some GPU", "driver_version": "535.1", "memory.total": "1 MiB", "compute_cap": "9.0"}]


def test_findings_of_other_machines(monkeypatch):
    def told(*args):
        return [(finding.level, finding.what, finding.mend) for finding in machine.findings(*args)]

    assert ("slower", "torch 2.13.0+cpu is built without CUDA: Some GPU is not used", machine.TORCH) in told(
        Torch(Cuda(False), None, "2.13.0+cpu"), None, GPU
    )
    old = next(what for level, what, _ in told(Torch(Cuda(False)), None, GPU) if level == "slower")
    assert old == "Some GPU cannot be used: torch is built for CUDA 13.0, the driver is 535.1"
    assert ("ok", "Some GPU, compute capability 8.9", None) in told(Torch(Cuda(capability=(8, 9))), None, GPU)
    import quantkv.implementations.hopper.host.launch as launch

    monkeypatch.setattr(launch, "missing", lambda: "the package cuda.core is missing")
    hopper = [what for level, what, _ in told(Torch(Cuda()), None, GPU) if level == "slower"]
    assert hopper[-1] == "Hopper's kernels cannot be compiled: the package cuda.core is missing"
    monkeypatch.setattr(machine, "version_of", lambda package: {"transformers": "9.0", "vllm": "0.99"}.get(package))
    monkeypatch.setattr(machine, "needed", lambda package: {"torch": ">=2.8", "transformers": "<5.24,>=5.17"}.get(package))
    levels = {what.split(":")[0]: level for level, what, _ in told(Torch(Cuda(False), version="2.1.0"), None, [])}
    assert levels == {"torch 2.1.0": "cannot run", "no GPU": "slower", "transformers 9.0": "unsupported", "vllm 0.99": "unsupported"}


def test_what_prompts_lack(monkeypatch):
    def told(capability, *packages):
        monkeypatch.setattr(machine, "version_of", lambda package: "1.13" if package in packages else None)
        found = machine.findings(Torch(Cuda(capability=capability)), None, GPU)
        return [(finding.level, finding.mend) for finding in found if finding.what.startswith("prompts")]

    assert told((8, 0)) == told((8, 0), "flash_attn_3") == told((12, 0)) == [("ok", "pip install nvidia-cudnn-frontend")]
    assert told((9, 0)) == told((8, 9), "nvidia-cudnn-frontend") == told((7, 5)) == []


def test_doctor_of_a_model(doctor, model_dir, tmp_path):
    """Biases and outlier channels are read from the weights."""
    tensors = load_file(model_dir / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3] *= 50
    tensors[name.replace("weight", "bias")] = torch.tensor([0.5, -7.0] + [0.0] * (len(tensors[name]) - 2))
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    _, told = doctor(tmp_path)
    keys, norms = told["model"]["keys"], tensors[name].norm(dim=1)
    assert (keys["layers"], keys["biased"], keys["largest_bias"], keys["bias_layer"], keys["ratio_layer"]) == (2, 1, 7.0, 1, 1)
    assert keys["ratio"] == pytest.approx(float(norms.max() / norms.median()))
    assert told["model"]["key_biases"] and any("presets and calibrations take biases off" in note for note in told["model"]["notes"])
    _, plain = doctor(model_dir)
    assert plain["model"]["keys"]["biased"] == 0 and not plain["model"]["key_biases"]


@pytest.mark.parametrize(
    "name,biased,refused,advice",
    [
        ("qwen2.5-7b", True, set(), "none of 4 bits, as keys have biases"),
        ("llama-3-8b", False, set(), "with nothing set up: 8bit, 4bit, 3bit, 2bit"),
        ("phi-3-mini", False, {"int2", "tq3", "tq4", "tq_k3v4", "k4v2", "k8v2"}, "with nothing set up: 8bit, 4bit, 3bit, 2bit"),
        ("deepseek-v2-lite", False, set(), "with nothing set up: 8bit, 4bit, 3bit, 2bit"),
    ],
)
def test_doctor_advises(doctor, name, biased, refused, advice):
    _, told = doctor(name)
    assert told["model"]["key_biases"] is biased and set(told["model"]["refused"]) == refused
    assert any(advice in line for line in told["model"]["advice"])
    assert any("quantkv tune" in line for line in told["model"]["advice"]) == (name != "deepseek-v2-lite")
    unsupported = " ".join(finding["what"] for finding in told["findings"] if finding["level"] == "unsupported")
    assert all(format in unsupported for format in refused) and ("MLA" in unsupported) == (name == "deepseek-v2-lite")


def test_doctor_knows_presets(doctor):
    assert doctor("--kv", "2bit")[1]["kv"] == "trellis2" and doctor("--kv", "8bit")[1]["kv"] == "int8"


@pytest.mark.parametrize("args", [["absent-model"], ["--kv", "int5"]])
def test_doctor_refuses_in_one_line(run, args):
    code, out, err = run("doctor", *args)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


def test_the_readers_agree(model_dir):
    from transformers import AutoConfig

    from quantkv.integrations.transformers_model import geometry_of

    made, theirs = (
        read(json.loads((model_dir / "config.json").read_text())),
        geometry_of(AutoConfig.from_pretrained(model_dir, trust_remote_code=False)),
    )
    assert {number: layer.heads for number, layer in made.attention.items()} == dict(theirs.heads)
