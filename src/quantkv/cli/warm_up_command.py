"""`quantkv warm-up`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ..assumed import GPUS
from . import completion
from .plan import MODEL_HELP

CONTEXT = 8192


def add_to(commands: typer.Typer) -> None:
    """Register the command."""
    commands.command("warm-up")(warm_up_command)


def warm_up_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    kv: Annotated[
        str, typer.Option("--kv", metavar="FORMAT|4bit|FILE.json", autocompletion=completion.caches, help="What the engine will store.")
    ] = "4bit",
    gpu: Annotated[str, typer.Option("--gpu", metavar="|".join(GPUS), help="Which GPU it will run on; this machine needs none.")] = "h100",
    context: Annotated[int, typer.Option("--context", metavar="N", help="Keys of a sequence, at most: vLLM's max_model_len.")] = CONTEXT,
    seqs: Annotated[int, typer.Option("--seqs", metavar="N", help="Sequences of a step, at most: max_num_seqs.")] = 256,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="New tokens of a step, at most: max_num_batched_tokens.")] = 8192,
    verified: Annotated[int, typer.Option("--verified", metavar="N", help="Queries of a sequence that verifies drafts; 1: none.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="GPUs that share the heads (tensor parallel).")] = 1,
    page: Annotated[int, typer.Option("--page", metavar="N", help="Tokens of a page.")] = 16,
) -> None:
    """Compile ahead what an engine compiles at its first start, such as in a container's build.

    Kernels are kept where the engine looks for them: QUANTKV_CACHE and TRITON_CACHE_DIR, else the user's cache folders.
    """
    from ..capacity import check_ranks
    from ..vllm_pages import table_width
    from . import configs

    if gpu.lower() not in GPUS:
        raise ValueError(f"--gpu {gpu}: one of {', '.join(GPUS)} is needed")
    for name, value in (("--context", context), ("--seqs", seqs), ("--tokens", tokens), ("--verified", verified), ("--page", page)):
        if value < 1:
            raise ValueError(f"{name} {value}: at least 1 is needed")
    described = configs.describe(model)
    check_ranks(described.model, tp)
    policy = _policy(kv)
    policy.check(len(described.model.layers))
    _compile(described.model, policy, gpu.lower(), (seqs, tokens, context, verified, table_width(context, page)), tp, page)


def _policy(kv: str) -> Any:
    from ..policy import Policy
    from ..policy_file import PRESETS, VERSION

    if kv in PRESETS:
        return Policy.from_dict({"policy_version": VERSION, **PRESETS[kv]})
    return Policy.load(kv) if kv.endswith(".json") else Policy(kv)


def _compile(model: Any, policy: Any, gpu: str, limits: tuple[int, ...], ranks: int, page: int) -> None:
    import torch

    from ..engine.ahead import compile_ahead
    from ..engine.warm_up import StepLimits
    from ..forked import ForkedExecutor
    from ..implementations.hopper.host import nvrtc

    executor, total = None, 0
    if hasattr(os, "fork"):
        torch.set_num_threads(1)  # a process that forks has no threads
        executor = ForkedExecutor()
    for made in compile_ahead(model, policy, GPUS[gpu], StepLimits(*limits), ranks=ranks, block_size=page, executor=executor):
        total += sum(made.kernels.values())
        by = ", ".join(f"{count} by {name}" for name, count in made.kernels.items() if count)
        print(f"{len(made.layers)} layers of {made.format}: {by or 'nothing to compile'}; {made.seconds:.0f} s", flush=True)
    if executor is not None and executor.failed:
        raise ValueError(f"{executor.failed} of {total} kernels could not be compiled: the lines above say why")
    if not total:
        raise ValueError("nothing was compiled: no layer of this model keeps keys and values that kernels read")
    print(f"{total} kernels for {gpu}; those of NVRTC are in {nvrtc.cache_folder()}")
