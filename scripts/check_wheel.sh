#!/usr/bin/env bash
# Builds the sdist, from it the wheel, and tries the wheel in empty environments; below a minute once pip has setuptools in its cache.
# The packages that quantkv needs are those of .venv, or of the interpreter that $PYTHON names. A folder as argument keeps both files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-.venv/bin/python}
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "build>=1" "setuptools>=77"
"$python" scripts/check_wheel.py "$work" "$@"
