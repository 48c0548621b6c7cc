#!/usr/bin/env bash
# Everything that results/kernels.md reports, on the GPU of this machine, unattended:
#   benchmarks/gpu.sh check     the kernels' tests, and compiled models warmed up beside them
#   benchmarks/gpu.sh measure   every suite; rows go to $CSV
# GFSA_COMMIT names the commit where the files came without their history.
set -uo pipefail
cd "$(dirname "$0")/.."
CSV=${CSV:-results/bench.csv}
# where compiled code is kept between the two
export TORCHINDUCTOR_FX_GRAPH_CACHE=1
COMPILED=(--suite models --compile --variants "gfsa,gfsa sdpa" --shapes 32x12x128x64,32x12x128x64:padded)
SHORT=1024x6x64x64,32x12x128x64,256x6x197x64,32x12x256x64,32x12x512x64,8x12x1024x64:causal
LONG=4x16x4096x64,2x16x8192x128,2x16x8192x128:causal

check() {
  gfsa bench "${COMPILED[@]}" --rounds 1 --no-append >/dev/null 2>&1 &
  pytest -n "${WORKERS:-8}" tests/operators/fused/test_gpu.py
  local failed=$?
  wait
  return $failed
}

measure() {
  bench() { gfsa bench --csv "$CSV" "$@" || echo "failed: gfsa bench $*"; }
  bench --suite ops --shapes 32x12x128x64,256x6x197x64,32x12x256x64,8x12x1024x64:causal --rounds 9
  bench --suite models --rounds 5
  for _ in 1 2 3; do
    bench --suite ops --graphs --shapes $SHORT --variants "gfsa,gfsa sdpa" --rounds 9
  done
  bench "${COMPILED[@]}" --rounds 5
  bench --suite ops --graphs --shapes 32x12x128x64:padded,32x12x256x64:padded,32x12x512x64:padded \
    --variants "gfsa,gfsa sdpa" --rounds 9
  for _ in 1 2 3; do
    bench --suite ops --shapes $LONG --variants "gfsa,gfsa sdpa" --rounds 5
  done
  bench --suite lengths --rounds 5
  bench --suite decode --rounds 5
  bench --suite ops --graphs --shapes $SHORT --variants published --rounds 5
}

"$@"
