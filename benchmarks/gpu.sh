#!/usr/bin/env bash
# What results/kernels.md reports, on the GPU of this machine, unattended, in about five minutes:
#   benchmarks/gpu.sh check     the kernels' tests, and beside them models compiled to warm up
#   benchmarks/gpu.sh measure   every suite; rows go to $CSV
# GFSA_COMMIT names the commit where the files came without their history.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
# compiled code is kept between the two
export TORCHINDUCTOR_FX_GRAPH_CACHE=1
COMPILED=(--suite models --compile --variants gfsa --shapes 32x12x128x64)
SHORT=1024x6x64x64,32x12x128x64,256x6x197x64,32x12x256x64,32x12x512x64,8x12x1024x64:causal
LONG=4x16x4096x64,2x16x8192x128,2x16x8192x128:causal
PADDED=32x12x128x64:padded,32x12x256x64:padded,32x12x512x64:padded

check() {
  gfsa bench "${COMPILED[@]}" --rounds 1 --no-append >/dev/null &
  local compiling=$! failed=0
  pytest -n "${WORKERS:-8}" -p no:cacheprovider "$@" tests/operators/fused/test_gpu.py || failed=1
  wait $compiling || failed=1
  return $failed
}

bench() {
  gfsa bench --csv "$CSV" "$@" || echo "failed: gfsa bench $*"
  echo "$SECONDS s"
}

measure() {
  bench --suite ops --variants "gfsa,gfsa sdpa" --rounds 9 \
    --shapes 32x12x128x64,256x6x197x64,32x12x256x64,8x12x1024x64:causal
  bench --suite models --rounds 3
  # three runs of each shape, one after the other
  bench --suite ops --graphs --variants "gfsa,gfsa sdpa" --rounds 5 \
    --shapes "$SHORT,$LONG,$SHORT,$LONG,$SHORT,$LONG,$PADDED"
  bench "${COMPILED[@]}" --rounds 5
  bench --suite lengths --rounds 3
  bench --suite decode --rounds 3
}

"$@"
