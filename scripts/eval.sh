#!/usr/bin/env bash
# Sets up .venv, then measures what a cache loses on a real model: the README's table, and formats.png. Arguments go to `quantkv eval`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/quantkv eval --plot formats.png "$@"
