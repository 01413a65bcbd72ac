#!/usr/bin/env bash
# Sets up .venv, then lints and runs the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
.venv/bin/ruff check --no-cache . # a cached answer does not see that a module moved to another folder
.venv/bin/ruff format --check .
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the two workers share the cores; numpy's BLAS and child processes too
export MALLOC_PERTURB_="${MALLOC_PERTURB_:-90}" # glibc fills memory that nothing wrote with bytes that are no zeros: what relies on it fails always, not now and then
exec .venv/bin/python -m pytest -n 2 "$@"
