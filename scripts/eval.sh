#!/usr/bin/env bash
# Sets up .venv, then measures what a cache loses on a real model: the README's table, and formats.png. It calibrates the model first, for
# two of the rows: eval/ keeps the calibration, and a policy file of each. Arguments, if any, go to `quantkv eval`, and nothing is calibrated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
if [ $# -eq 0 ]; then
    mkdir -p eval
    .venv/bin/quantkv calibrate --out eval/calibration.safetensors
    for format in levels4 trellis2; do
        printf '{"policy_version": 1, "format": "%s", "calibration": "calibration.safetensors", "full_precision": {"sink": 16, "recent": 24}}\n' \
            "$format" >"eval/$format-calibrated.json"
    done
    set -- --kv int8,fp8,int4,tq4,int2,eval/levels4-calibrated.json,eval/trellis2-calibrated.json
fi
exec .venv/bin/quantkv eval --plot formats.png "$@"
