#!/usr/bin/env bash
# Measures what results/kernels.md reports, on the GPU of this machine:
#   benchmarks/gpu.sh check      the tests that need a GPU, and beside them models are compiled to
#                                warm up; two minutes and more
#   benchmarks/gpu.sh measure    every suite; rows go to $CSV; five minutes
#   benchmarks/gpu.sh sanitize   every kind of kernel under compute-sanitizer
# GFSA_COMMIT names the commit if the files came without git.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
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

case "${1:-}" in
  check | measure | sanitize) "$@" ;;
  *)
    echo "benchmarks/gpu.sh check | measure | sanitize, got '${1:-}'" >&2
    exit 2
    ;;
esac
