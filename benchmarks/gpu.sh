#!/usr/bin/env bash
# What results/kernels.md and the plans of results/plans need of a GPU, on the one of this machine:
#   benchmarks/gpu.sh check      the tests that need a GPU, and beside them models are compiled to
#                                warm up; two minutes and more
#   benchmarks/gpu.sh measure    every suite; rows go to $CSV; five minutes
#   benchmarks/gpu.sh sanitize   every kind of kernel under compute-sanitizer
#   benchmarks/gpu.sh train PLAN …   trains plans one after another in the background, runs side by side:
#                                rows go to $RESULTS, runs, log and pid to $RUNS. Beside it:
#                                gfsa bench --pause $(cat $RUNS/pid)
# GFSA_COMMIT names the commit if the files came without git.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
RUNS=${RUNS:-runs}
# check and measure share compiled code
export TORCHINDUCTOR_FX_GRAPH_CACHE=1
COMPILED=(--suite models --compile --variants gfsa)
BLOCKS=(--suite models --compile-blocks --variants gfsa)
MODELS="32x12x128x64 256x6x197x64 8x12x1024x64:causal"
TESTS="tests/operators/fused/test_gpu.py tests/operators/fused/test_gpu_packed.py tests/operators/fused/test_gpu_sweep.py tests/operators/fused/test_gpu_wide.py tests/operators/fused/test_gpu_decode.py tests/operators/test_sdpa_cuda.py tests/baselines/test_baseline_cuda.py"
SHORT=1024x6x64x64,32x12x128x64,256x6x197x64,32x12x256x64,32x12x512x64,8x12x1024x64:causal
LONG=4x16x4096x64,2x16x8192x128,2x16x8192x128:causal
PADDED=32x12x128x64:padded,32x12x256x64:padded,32x12x512x64:padded

check() {
  local failed=0 compiling=() model
  for model in $MODELS; do
    gfsa bench "${COMPILED[@]}" --shapes "$model" --rounds 1 --no-append >/dev/null &
    compiling+=($!)
    gfsa bench "${BLOCKS[@]}" --shapes "$model" --rounds 1 --no-append >/dev/null &
    compiling+=($!)
  done
  # shellcheck disable=SC2086
  pytest -n "${WORKERS:-12}" -p no:cacheprovider "$@" $TESTS || failed=1
  for model in "${compiling[@]}"; do wait "$model" || failed=1; done
  return $failed
}

sanitize() {
  # compiled first: under the tool that takes minutes
  python benchmarks/sanitize.py || return 1
  # racecheck also reports hazards within cuDNN's kernels
  for options in "memcheck" "racecheck --kernel-name-exclude kernel_substring=cudnn"; do
    # shellcheck disable=SC2086
    compute-sanitizer --tool $options --error-exitcode 1 python benchmarks/sanitize.py || return 1
  done
}

# the other suites run even if one fails
FAILED=0
bench() {
  gfsa bench --csv "$CSV" "$@" || { echo "failed: gfsa bench $*"; FAILED=1; }
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
  bench --suite packed --graphs --variants "plain causal rows,gfsa" --rounds 5
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
  check | measure | sanitize | train) "$@" ;;
  *)
    echo "benchmarks/gpu.sh check | measure | sanitize | train PLAN …, got '${1:-}'" >&2
    exit 2
    ;;
esac
