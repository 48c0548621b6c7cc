#!/usr/bin/env bash
# What results/kernels.md needs of a GPU, on the one of this machine:
#   benchmarks/gpu.sh check      the tests that need a GPU; two minutes and more
#   benchmarks/gpu.sh measure    every suite; rows go to $CSV; five minutes
# GFSA_COMMIT names the commit if the files came without git; the packages may be installed or on
# PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
FUSED=tests/kernels
MODELS=32x12x128x64,256x6x197x64,8x12x1024x64:causal
SHORT=1024x6x64x64,32x12x128x64,256x6x197x64,32x12x256x64,32x12x512x64,8x12x1024x64:causal
LONG=4x16x4096x64,2x16x8192x128,2x16x8192x128:causal
PADDED=32x12x128x64:padded,32x12x256x64:padded,32x12x512x64:padded
FAILED=0

check() {
  python -m pytest -n "${WORKERS:-12}" -p no:cacheprovider -vv -rfE "$@" $FUSED/test_gpu*.py \
    tests/operators/test_*_cuda.py tests/baselines/test_baseline_cuda.py \
    tests/scale/test_long_padded_rows.py
}

# the other suites run even if one fails
bench() {
  python -m gfsa_benchmarks --csv "$CSV" "$@" || { echo "failed: gfsa bench $*"; FAILED=1; }
}

measure() {
  bench --suite ops --variants "gfsa degree 1,gfsa,gfsa sdpa" --rounds 9 \
    --shapes 32x12x128x64,256x6x197x64,32x12x256x64,8x12x1024x64:causal
  # three runs of each shape, one after the other
  bench --suite ops --graphs --variants "gfsa degree 1,gfsa,gfsa sdpa" --rounds 5 \
    --shapes "$SHORT,$LONG,$SHORT,$LONG,$SHORT,$LONG,$PADDED"
  bench --suite models --rounds 15
  bench --suite models --compile --variants gfsa --shapes "$MODELS" --rounds 9
  bench --suite models --compile-blocks --variants gfsa --shapes "$MODELS" --rounds 9
  bench --suite models --graphs --variants "gfsa,gfsa even layers" --shapes "$MODELS" --rounds 9
  bench --suite pretrain-step --compile-blocks --rounds 9
  bench --suite lengths --rounds 3
  bench --suite decode --rounds 9
  return $FAILED
}

case "${1:-}" in
  check | measure) "$@" ;;
  *)
    echo "expected benchmarks/gpu.sh check or measure, got '${1:-}'" >&2
    exit 2
    ;;
esac
