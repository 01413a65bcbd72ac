#!/usr/bin/env bash
# Resolves what scripts/setup.sh installs, and each extra, for every supported Python, from the package index alone: no configuration of
# pip or uv, no local wheels, nothing installed. Downloads metadata only; some minutes. Exit code 1 if one fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "uv>=0.9" tomli
env -u UV_FIND_LINKS -u UV_CONSTRAINT -u UV_OVERRIDE UV_NO_CONFIG=1 PATH="$work/venv/bin:$PATH" \
    "$work/venv/bin/python" scripts/check_resolution.py
