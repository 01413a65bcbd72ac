"""How long an engine's start takes for our kernels: seconds of a layer's warm-up on a fresh machine, and again; what compiles, by whom.

    PYTHONPATH=src python benchmarks/start.py [--formats int4 4bit] [--heads 32/8/128 16/4/512] [--json FILE]

Each figure is of a process of its own with empty caches, as `quantkv_int4` and `quantkv_4bit` start in vLLM (limits: `--seqs`, `--tokens`,
`--keys`). First the imports and the GPU's context, then warm-up; the second process finds what the first one kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


def one(fmt: str, heads: str, limits: tuple[int, int, int], kernels: bool) -> dict[str, object]:
    """Warm up one layer in this process: what it took."""
    begun = time.perf_counter()
    import torch
    import triton

    from quantkv import under_way
    from quantkv.engine.layer import LayerAttention, PagedLayer
    from quantkv.engine.layer_config import LayerConfig
    from quantkv.engine.warm_up import StepLimits, summary, warm_up
    from quantkv.formats import get_format
    from quantkv.full_precision import FullPrecisionTokens
    from quantkv.geometry import Heads
    from quantkv.implementations.hopper.host import nvrtc
    from quantkv.maps import LayerMaps
    from quantkv.policy_file import PRESETS

    torch.zeros(1, device="cuda")
    imported = time.perf_counter() - begun
    found: list[tuple[str, str, float]] = []
    counted = under_way.compiling

    @contextmanager
    def timed(what: str):
        start = time.perf_counter()
        with counted(what):
            yield
        found.append(("nvrtc", what, time.perf_counter() - start))

    def listener(src=None, metadata=None, metadata_group=None, times=None, cache_hit=False, **_):
        if not cache_hit:
            found.append(("triton", src.name, sum(us for _, us in times.lowering_stages) / 1e6))

    nvrtc.compiling = timed
    triton.knobs.compilation.listener = listener
    query_heads, kv_heads, size = map(int, heads.split("/"))
    maps, tokens = LayerMaps(), None
    if fmt in PRESETS:
        from calibrated_write import maps_of

        name = PRESETS[fmt]["format"]
        maps = maps_of(name, size, True, True).heads(0, kv_heads)
        tokens = FullPrecisionTokens(**PRESETS[fmt]["full_precision"])
    else:
        name = fmt
    layer = PagedLayer(LayerConfig(get_format(name), maps, tokens), Heads(kv_heads, size, size), torch.bfloat16)
    sequences, most, keys = limits
    pages = layer.allocate(64, 16, torch.device("cuda"))
    begun = time.perf_counter()
    who = warm_up(layer, LayerAttention(query_heads), StepLimits(sequences, most, keys, 1, -(-keys // 16)), pages)
    taken = time.perf_counter() - begun
    by = Counter(kind for kind, _, _ in found)
    seconds = {kind: round(sum(s for k, _, s in found if k == kind), 1) for kind in by}
    if kernels:
        for kind, what, s in found:
            print(f"  {kind}\t{what}\t{s:.2f}", file=sys.stderr)
    return dict(imports=round(imported, 1), warm_up=round(taken, 1), compiled=dict(by), seconds=seconds, calls=len(who), who=summary(who))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "4bit"])
    parser.add_argument("--heads", nargs="+", default=["32/8/128", "16/2/512"], help="query heads/kv heads/head size")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--kernels", action="store_true", help="print each kernel and its seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    limits = args.seqs, args.tokens, args.keys
    if args.one:
        print(json.dumps(one(*args.one.split(), limits, args.kernels)))
        return
    results = []
    for heads in args.heads:
        for fmt in args.formats:
            with tempfile.TemporaryDirectory() as folder:
                caches = {"QUANTKV_CACHE": f"{folder}/quantkv", "TRITON_CACHE_DIR": f"{folder}/triton"}
                for when in ("fresh", "again"):
                    command = [sys.executable, __file__, "--one", f"{fmt} {heads}", *(["--kernels"] if args.kernels else [])]
                    command += ["--seqs", str(args.seqs), "--tokens", str(args.tokens), "--keys", str(args.keys)]
                    answer = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True)
                    if answer.returncode:
                        print(heads, fmt, when, "failed", sep="\t", flush=True)
                        break
                    row = dict(heads=heads, format=fmt, when=when) | json.loads(answer.stdout.splitlines()[-1])
                    results.append(row)
                    print(*(v for k, v in row.items() if k != "who"), sep="\t", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
