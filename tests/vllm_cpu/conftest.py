"""Stock vLLM on a CPU, run by `scripts/vllm_cpu.sh test` in an environment of its own; the ordinary run collects nothing here."""

import os

import pytest

RUNS_HERE = "QUANTKV_VLLM_SUITE" in os.environ
collect_ignore_glob = [] if RUNS_HERE else ["test_*.py"]

if RUNS_HERE:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine and its counters stay in the process that asks
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401  once, before `engine.run` forks

    from quantkv.cli import models

    @pytest.fixture(scope="session")
    def smollm2() -> str:
        """The folder of SmolLM2-135M-Instruct, converted to float32: 30 layers of 3 kv heads of 64."""
        return str(models.converted(models.packaged_gguf()))
