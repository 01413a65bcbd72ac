"""Two engines behind one server (data parallelism), each with a cache of its own: each says what one engine says."""

import re
import urllib.request

import engine
import features
import pytest

ENGINES = 0, 1
SERVER = ["--data-parallel-size", "2", "--api-server-count", "1", "--block-size", str(engine.COMMON["block_size"])]
SHARED = {"CPU_VISIBLE_MEMORY_NODES": "0,0"}  # vLLM gives each engine a node of memory of its own, and there may be one alone


def count(metrics: str, name: str, number: int) -> float:
    """What the server counted of one engine."""
    return sum(float(value) for value in re.findall(rf'^vllm:{name}{{engine="{number}",.*}} (.*)$', metrics, re.MULTILINE))


def processes(log: str, said: str) -> set[str]:
    """Those that said so."""
    return set(re.findall(rf"pid=(\d+)\).*{said}", log))


def test_each_of_two_engines_says_what_one_says(smollm2, tmp_path):
    """Each measures the model for itself, and stores its rows in what the preset says."""
    given = {"tokens": features.TOKENS, "max_num_seqs": 1}
    one, plain = (engine.run(smollm2, name, features.PROMPTS, **given) for name in ("quantkv_4bit", "quantkv_fp32"))
    assert one.error == plain.error == ""
    (said,), (unquantized,) = one.answers, plain.answers
    assert said.logprobs[2] != pytest.approx(unquantized.logprobs[2], abs=10 * features.SAME)  # what is stored shows
    with features.served(tmp_path, "quantkv_4bit", *SERVER, **SHARED) as port:
        found = [[features.completion(port, prompt, number) for prompt in features.PROMPTS] for number in ENGINES]
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    for number, answers in zip(ENGINES, found):
        assert [tokens for tokens, _ in answers] == said.tokens
        for (_, logprobs), wanted in zip(answers, said.logprobs):
            assert logprobs == pytest.approx(wanted, abs=features.SAME)
        assert count(metrics, "request_success_total", number) == len(answers)
        assert count(metrics, "generation_tokens_total", number) == len(answers) * features.TOKENS
    log = (tmp_path / "server.log").read_text()
    assert len(processes(log, "quantkv: 30 layers of levels4: write of 1 tokens by ")) == len(ENGINES)
    assert len(processes(log, "key means and Hessians of 30 layers")) == len(ENGINES)
