#!/usr/bin/env bash
# What results/kernels.md and the plans of results/plans need of a GPU, on the one of this machine:
#   benchmarks/gpu.sh check      the tests that need a GPU, and beside them models are compiled to
#                                warm up; two minutes and more
#   benchmarks/gpu.sh measure    every suite; rows go to $CSV; five minutes
#   benchmarks/gpu.sh kernels    the tests of the Gluon kernels file by file, each within its time
#   benchmarks/gpu.sh targets [--pause PID] [OPTION …]   what has a target in results/kernels.md and
#                                was not reached or not timed yet, most wanted first; options of
#                                gfsa bench. PID trains, and may end meanwhile
#   benchmarks/gpu.sh sanitize [PART …]   kinds of kernels under compute-sanitizer, all by default
#   benchmarks/gpu.sh train PLAN …   trains plans one after another in the background, runs side by side:
#                                rows go to $RESULTS, runs, log and pid to $RUNS. Beside it:
#                                gfsa bench --pause $(cat $RUNS/pid)
# GFSA_COMMIT names the commit if the files came without git; the packages may be installed or, but
# for train, on PYTHONPATH. Logs of kernels and targets go to $LOGS. SANITIZE_TOOLS and
# SANITIZE_SECONDS choose the sanitizer's tools and the time that each of them has.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
LOGS=${LOGS:-${TMPDIR:-/tmp}}
RUNS=${RUNS:-runs}
# check and measure share compiled code
export TORCHINDUCTOR_FX_GRAPH_CACHE=1
COMPILED=(--suite models --compile --variants gfsa)
BLOCKS=(--suite models --compile-blocks --variants gfsa)
MODELS="32x12x128x64 256x6x197x64 8x12x1024x64:causal"
TESTS="tests/kernels/test_gpu.py tests/kernels/test_gpu_packed.py tests/kernels/test_gpu_sweep.py tests/kernels/test_gpu_wide.py tests/kernels/test_gpu_decode.py tests/kernels/test_gpu_tune.py tests/operators/test_sdpa_cuda.py tests/operators/test_registered_rows_cuda.py tests/baselines/test_baseline_cuda.py tests/scale/test_long_padded_rows.py"
SHORT=1024x6x64x64,32x12x128x64,256x6x197x64,32x12x256x64,32x12x512x64,8x12x1024x64:causal
LONG=4x16x4096x64,2x16x8192x128,2x16x8192x128:causal
PADDED=32x12x128x64:padded,32x12x256x64:padded,32x12x512x64:padded
WIDE=4x16x4096x128:causal,8x32/8x2048x128:causal,1x16x32768x128:causal
CAUSAL=4x16x4096x128:causal,8x32/8x2048x128:causal,8x12x1024x64:causal,64x8x1024x64:causal,16x16x2048x64:causal
FUSED=tests/kernels

gfsa_bench() { python -m gfsa_benchmarks "$@"; }

FAILED=0
# limited SECONDS NAME COMMAND …: what the command prints goes to $LOGS/NAME.log, its end to the
# terminal; what follows runs even if it fails
limited() {
  local seconds=$1 name=$2 began=$SECONDS code=0
  shift 2
  timeout -k 10 "$seconds" "$@" >"$LOGS/$name.log" 2>&1 || code=$?
  tail -n "${TAIL:-12}" "$LOGS/$name.log"
  if [ "$code" = 124 ]; then
    echo "$name: stopped after $seconds s"
    # a run that is stopped has no summary
    grep -E "(FAILED|ERROR) tests/" "$LOGS/$name.log"
  fi
  echo "$name: exit $code, $((SECONDS - began)) s"
  [ "$code" = 0 ] || FAILED=1
}

tests() {
  local seconds=$1 name=$2
  shift 2
  limited "$seconds" "$name" python -m pytest -n "${WORKERS:-4}" -p no:cacheprovider -vv -rfE "$@"
}

kernels() {
  tests "${TEST_SECONDS:-150}" sweep $FUSED/test_gpu_sweep.py
  tests "${TEST_SECONDS:-150}" packed $FUSED/test_gpu_packed.py
  tests "${TEST_SECONDS:-150}" wide $FUSED/test_gpu_wide.py
  tests "${TEST_SECONDS:-150}" hopper $FUSED/test_gpu.py -k "hopper or degree_one"
  tests "${TEST_SECONDS:-150}" decode $FUSED/test_gpu_decode.py
  return $FAILED
}

targets() {
  local pause=
  TAIL=40
  if [ "${1:-}" = --pause ]; then
    pause=$2
    shift 2
  fi
  # timed SECONDS NAME OPTION …; the training that is paused may have ended since the last one
  timed() {
    local seconds=$1 name=$2 stopped=()
    shift 2
    if [ -n "$pause" ] && kill -0 "$pause" 2>/dev/null; then stopped=(--pause "$pause"); fi
    limited "$seconds" "bench-$name" python -m gfsa_benchmarks --csv "$CSV" "${stopped[@]}" "$@"
  }
  timed 120 lengths --suite lengths --graphs --rounds 3 --variants gfsa \
    --shapes 1x16x32768x128:causal "$@"
  timed 150 decode --suite decode-static --compile --rounds 9 \
    --variants "gfsa kernel,gfsa degree 1,gfsa degree 1 kernel" --shapes 1x12x1023x64,16x12x1023x64 "$@"
  timed 150 causal --suite ops --graphs --rounds 5 --variants gfsa --shapes "$CAUSAL" "$@"
  timed 120 ordered --suite ops --graphs --rounds 3 --variants "gfsa deterministic" \
    --shapes "$WIDE" "$@"
  timed 150 packed --suite packed --graphs --rounds 5 --shapes 4x16x8192x64,4x16x8192x128 \
    --variants "plain causal rows,gfsa causal rows,gfsa,gfsa degree 1 causal rows,gfsa degree 1" "$@"
  timed 120 padded --suite ops --graphs --rounds 3 --variants "gfsa,gfsa degree 1,gfsa sdpa" \
    --shapes 8x32/8x2048x128:causal:padded,8x32/8x2047x128:causal:padded,8x12x1024x64:causal:padded "$@"
  return $FAILED
}

check() {
  local failed=0 compiling=() model
  for model in $MODELS; do
    gfsa_bench "${COMPILED[@]}" --shapes "$model" --rounds 1 --no-append >/dev/null &
    compiling+=($!)
    gfsa_bench "${BLOCKS[@]}" --shapes "$model" --rounds 1 --no-append >/dev/null &
    compiling+=($!)
  done
  # shellcheck disable=SC2086
  python -m pytest -n "${WORKERS:-12}" -p no:cacheprovider -vv -rfE "$@" $TESTS || failed=1
  for model in "${compiling[@]}"; do wait "$model" || failed=1; done
  return $failed
}

sanitize() {
  local tool sanitizer excluded
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  # compiled first: under the tool that takes minutes
  python benchmarks/sanitize.py "$@" || return 1
  for tool in ${SANITIZE_TOOLS:-memcheck racecheck}; do
    # racecheck reports hazards within cuDNN's kernels; torch's own take time alone
    excluded=native
    if [ "$tool" = racecheck ]; then excluded=cudnn; fi
    timeout -k 10 "${SANITIZE_SECONDS:-1800}" "$sanitizer" --tool "$tool" --error-exitcode 1 \
      --kernel-name-exclude kernel_substring="$excluded" python benchmarks/sanitize.py "$@" ||
      return 1
  done
}

# the other suites run even if one fails
bench() {
  gfsa_bench --csv "$CSV" "$@" || { echo "failed: gfsa bench $*"; FAILED=1; }
  echo "$SECONDS s"
}

measure() {
  bench --suite ops --variants "gfsa degree 1,gfsa,gfsa sdpa" --rounds 9 \
    --shapes 32x12x128x64,256x6x197x64,32x12x256x64,8x12x1024x64:causal
  bench --suite models --rounds 15
  # three runs of each shape, one after the other
  bench --suite ops --graphs --variants "gfsa degree 1,gfsa,gfsa sdpa" --rounds 5 \
    --shapes "$SHORT,$LONG,$SHORT,$LONG,$SHORT,$LONG,$PADDED"
  bench "${COMPILED[@]}" --shapes "${MODELS// /,}" --rounds 9
  bench "${BLOCKS[@]}" --shapes "${MODELS// /,}" --rounds 9
  bench --suite models --graphs --variants "gfsa,gfsa even layers" --shapes "${MODELS// /,}" --rounds 9
  bench --suite lengths --rounds 3
  bench --suite packed --graphs --rounds 5 \
    --variants "plain causal rows,gfsa,gfsa degree 1 causal rows,gfsa degree 1"
  bench --suite decode --rounds 9
  return $FAILED
}

train() {
  local plan
  [ $# -gt 0 ] || { echo "benchmarks/gpu.sh train PLAN …, for example results/plans/pretrain-controls.txt" >&2; return 2; }
  for plan in "$@"; do
    [ -f "$plan" ] || { echo "no plan is called $plan; results/plans has ours" >&2; return 2; }
  done
  if [ -f "$RUNS/pid" ] && kill -0 "$(cat "$RUNS/pid")" 2>/dev/null; then
    echo "process $(cat "$RUNS/pid") trains already (see $RUNS/log)" >&2
    return 2
  fi
  mkdir -p "$RUNS/mps"
  # a folder of its own: an error in one client of MPS ends all, so tests and benchmarks stay out
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  CUDA_MPS_PIPE_DIRECTORY=$(realpath "$RUNS/mps")
  CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d || echo "without MPS: runs take turns on the GPU" >&2
  export RUNS RESULTS=${RESULTS:-results} JOBS=${JOBS:-6} GFSA_DATA=${GFSA_DATA:-data}
  # shellcheck disable=SC2016
  setsid bash -c 'for plan; do
      gfsa train --plan "$plan" --missing --jobs "$JOBS" --results "$RESULTS" --out "$RUNS" || echo "failed: $plan"
    done' train "$@" >"$RUNS/log" 2>&1 &
  echo $! >"$RUNS/pid"
}

case "${1:-}" in
  check | measure | kernels | targets | sanitize | train) "$@" ;;
  *)
    echo "benchmarks/gpu.sh check | measure | kernels | targets | sanitize [PART …] | train PLAN …, got '${1:-}'" >&2
    exit 2
    ;;
esac
