#!/usr/bin/env bash
# Sets up .venv, then builds the documentation site into site/; a warning is an error. `scripts/docs.sh serve` shows it and follows changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export NO_MKDOCS_2_WARNING=1 # an advertisement of the theme's
exec .venv/bin/mkdocs "${1:-build}" --strict "${@:2}"
