#!/usr/bin/env bash
# Compiles the Triton kernels ahead of time, without a GPU, by older releases of Triton than .venv has: the oldest that pyproject.toml
# allows, and the one that PyTorch 2.11 brings. Every codec, and every kernel. Each release is fetched once, 0.2 GB, into .triton. The other
# packages are those of .venv, which is made where there is none, or of the interpreter that $PYTHON names. Arguments are releases to try
# in place of both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || scripts/setup.sh
if [ $# -eq 0 ]; then
    oldest=$(sed -nE 's/^triton = \["triton>=([0-9.]+).*/\1.0/p' pyproject.toml)
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))' || oldest=3.5.0 # the first with wheels for Python 3.14
    set -- "$oldest" 3.6.0
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
for version; do
    folder=$PWD/.triton/$version-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
    if [ ! -d "$folder" ]; then
        echo "Fetching Triton $version"
        rm -rf "$folder.part"
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$folder.part" "triton==$version"
        mv "$folder.part" "$folder"
    fi
    (
        export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
        found=$("$python" -c 'import triton; print(triton.__version__)')
        printf '\n== Triton %s\n' "$found"
        [ "$found" = "$version" ] # not .venv's
        # Every codec, option and kind of latents for sm80, prefill and its steps for Hopper, and what says which pages have copies. None for
        # AMD: Triton 3.4 needs a linker of ROCm's there.
        "$python" -m pytest tests/test_aot.py -k "(sm80 or int4-sm90-80 or copies) and not gfx942"
    )
done
