"""benchmarks/vllm_engine/traffic.py: a serving mix, and latencies of its tokens."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def traffic():
    file = Path(__file__).parent.parent / "benchmarks" / "vllm_engine" / "traffic.py"
    spec = importlib.util.spec_from_file_location("traffic_script", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_mix_is_the_same_each_time_and_within_its_bounds(traffic):
    made = traffic.mix(500, 5.0, (512, 8192), (64, 64))
    assert made == traffic.mix(500, 5.0, (512, 8192), (64, 64)) and made == sorted(made)
    assert all(512 <= one.prompt <= 8192 and one.answer == 64 for one in made)
    assert made[-1].at == pytest.approx(100, rel=0.15)


def test_latencies(traffic):
    found = traffic.Latencies()
    found.arrived("a", 1.0)
    found.arrived("b", 2.0)
    found.answered("a", 1, 1.5)
    found.answered("b", 1, 2.5)
    found.answered("a", 2, 1.7)  # together: each waited half of it
    assert found.tokens == 4
    said = found.found(4.0)
    assert said["tokens_per_s"] == 1.0
    assert said["first_token_s"][50] == said["first_token_s"][95] == 0.5
    assert said["between_tokens_ms"][50] == said["between_tokens_ms"][95] == 100.0
