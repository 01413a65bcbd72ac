#!/usr/bin/env bash
# Runs the examples with SmolLM2 in .venv, or with the interpreter that $PYTHON names: some minutes of one core. All but the one for vLLM.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
example() {
    printf '\n== python %s\n' "$*"
    "$python" "$@"
}
example examples/chat.py --say "My name is Ada." --say "What is my name?" --max-new-tokens 32
example examples/saved_prefix.py --tokens 500
example examples/speculative.py
example examples/paged_engine.py --requests 8
