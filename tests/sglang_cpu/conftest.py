"""Stock SGLang on a CPU, run by `scripts/sglang_cpu.sh test` in an environment of its own; the ordinary run collects nothing here."""

import os
import sys
from pathlib import Path

import pytest

RUNS_HERE = "QUANTKV_SGLANG_SUITE" in os.environ
collect_ignore_glob = [] if RUNS_HERE else ["test_*.py"]

if RUNS_HERE:
    sys.path.append(str(Path(__file__).parent.parent / "vllm_cpu"))  # tiny_models, references
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.mem_cache.kv_cache_configurator
    import sglang.srt.models.registry
    import sglang.srt.plugins.hook_registry  # noqa: F401  once, before `engine.run` forks

    import quantkv.integrations.sglang.backend  # noqa: F401
    from quantkv.cli import models

    @pytest.fixture(scope="session")
    def smollm2() -> str:
        """The folder of SmolLM2-135M-Instruct, converted to float32: 30 layers of 3 kv heads of 64."""
        return str(models.converted(models.packaged_gguf()))
