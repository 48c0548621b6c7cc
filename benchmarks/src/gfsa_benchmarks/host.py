"""``python -m gfsa_benchmarks.host``: what the host does around the kernels, without a GPU."""

from __future__ import annotations

import torch

from gfsa_benchmarks import host_models
from gfsa_benchmarks.host_calls import calls, nothing_launched


def main() -> None:
    torch.set_num_threads(1)
    keys = torch.ones(1, 1, 1, 128, dtype=torch.bool)
    with nothing_launched():
        for name, found in (
            ("128 tokens", calls(128, False)),
            ("128 tokens, padding mask", calls(128, False, keys)),
            ("1024 tokens, causal", calls(1024, True)),
        ):
            print(f"{name:26}", *(f"{what} {time:.0f} µs;" for what, time in found.items()))
    host_models.main()


if __name__ == "__main__":
    main()
