#!/usr/bin/env bash
# compute-sanitizer over every kernel of quantkv's: memcheck, racecheck (every hazard), synccheck, initcheck. Needs a GPU and CUDA's tools.
# Prints a line for each tool: the reports that name a kernel of ours, which must be 0, and those of others (cuDNN's attention, which
# "prefill" calls). Arguments go to small_run.py. Exit code 1 where a kernel of ours is reported or a result is wrong.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1
OURS="\b($(grep -rhoE --include=*.cu --include=*.cuh --include=*.py '\b[a-z_0-9]+_kernel\b' src/quantkv/implementations src/quantkv/formats | sort -u | paste -sd '|'))\b"
log=${OUT:-$(mktemp -d)}/sanitize.log
run() { python benchmarks/small_run.py --implementation hopper triton prefill "$@"; }
run "$@" >"$log.warm" 2>&1 || { tail -20 "$log.warm"; exit 1; } # compiles the kernels, which are kept
failed=0
for tool in memcheck racecheck synccheck initcheck; do
  more=(--print-limit 100000); [ $tool = racecheck ] && more+=(--racecheck-report all)
  # What cuDNN stores by bulk copies, initcheck does not see: "prefill", which reads it, would be reported.
  who="hopper triton prefill"; [ $tool = initcheck ] && who="hopper triton"
  # API errors: the CUDA binding asks for entry points that a driver may lack.
  # shellcheck disable=SC2086
  timeout "${SECONDS_EACH:-240}" compute-sanitizer --tool $tool --report-api-errors no "${more[@]}" \
    python benchmarks/small_run.py --implementation $who "$@" >"$log.$tool" 2>&1
  status=$?
  reports=$(grep -cE '^========= (Invalid|Error:|Warning:|Info:|Barrier|Uninitialized|Program hit|Race)' "$log.$tool")
  ours=$(grep -E '^=========.* (in|at|by) ' "$log.$tool" | grep -cE "$OURS")
  echo "$tool: exit $status, $reports reports, $ours name a kernel of ours; $(grep -E 'SUMMARY' "$log.$tool" | tail -1)"
  [ "$ours" = 0 ] && [ $status = 0 ] || failed=1
done
exit $failed
