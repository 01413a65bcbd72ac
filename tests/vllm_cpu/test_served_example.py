"""examples/serve_vllm.py as it stands: it starts the server by scripts/vllm_cpu.sh, and asks it."""

import importlib.util
from pathlib import Path

from quantkv import get_format

LAYERS, HEADS, HEAD_SIZE, MEMORY = 30, 3, 64, 1 << 30  # SmolLM2, and $VLLM_CPU_KVCACHE_SPACE
BLOCK = 128  # tokens of a page that vLLM takes on a CPU


def test_a_server_answers_from_quantized_pages(capsys):
    file = Path(__file__).parent.parent.parent / "examples" / "serve_vllm.py"
    spec = importlib.util.spec_from_file_location("serve_vllm", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--kv", "quantkv_tq4", "--wait", "400"]) == 0
    out = capsys.readouterr().out
    block = get_format("tq4").cache_spec(HEADS, HEAD_SIZE, block_size=BLOCK).block_bytes
    assert f"tokens that the cache holds: {MEMORY // (LAYERS * block) * BLOCK:,}\n" in out
    assert "quantkv: 30 layers of tq4: " in out
