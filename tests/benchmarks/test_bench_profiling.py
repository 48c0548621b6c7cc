"""Where GPU time goes: kernels recorded by hand, since a CPU has none."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.table import Table

from gfsa_benchmarks import profiling, run_suite
from gfsa_benchmarks.profiling import Kernel, Spent

OWN = {"attend", "grad_keys", "add_parts"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void cudnn::fusion::compute_dot_do_o<true, 64>", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_3", "kernels of the compiler"),
        ("grad_keys", "attention"),
        ("add_parts", "coefficients of filters"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("triton_per_fused__to_copy_add_mul_rsqrt_12", "kernels of the compiler"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMath>", "optimizer and clipping"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::reduce_kernel<512, 1>", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert profiling.kind_of(name, OWN) == kind


def test_idle_time_is_what_no_kernel_covers() -> None:
    ms = 1_000_000
    ran = [
        Kernel("attend", 4 * ms, 6 * ms),
        # on another stream, at the same time
        Kernel("triton_poi_fused_add_0", 5 * ms, 7 * ms),
        # inside of the former: the gap begins where the longer one ends
        Kernel("attend", 5 * ms, 6 * ms),
        Kernel("memcpy", 10 * ms, 11 * ms),
        Kernel("nvjet", 1 * ms, 3 * ms),
        # the same kernel to the compiler, numbered within its graph
        Kernel("triton_poi_fused_add_7", 11 * ms, 12 * ms),
    ]
    found = profiling.summarised(ran, 2, OWN)
    assert found.ms == 5.5
    assert found.kinds[profiling.IDLE] == Spent(2, 0)
    assert found.kinds["attention"] == Spent(1.5, 1)
    assert found.kinds["matrix products"] == Spent(1, 0.5)
    assert found.kernels["attend"] == Spent(1.5, 1)
    assert found.kernels["triton_poi_fused_add"] == Spent(1.5, 1)


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        profiling.summarised([], 1, OWN)


def rows_of(table: Table) -> list[str]:
    """The body of a printed table, cells separated by single spaces."""
    console = Console(width=160, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().split("\n")  # type: ignore[attr-defined]
    return [" ".join(line.replace("│", " ").split()) for line in lines if line.startswith("│")]


def test_tables_show_what_a_filter_adds() -> None:
    ms = 1_000_000
    plain = profiling.summarised([Kernel("sdpa", 0, ms), Kernel("nvjet", ms, 4 * ms)], 1, OWN)
    ran = [Kernel("attend", 0, 2 * ms), Kernel("add_parts", 2 * ms, 3 * ms)]
    ran.append(Kernel("nvjet", 3 * ms, 6 * ms))
    profiles = {"plain": plain, "gfsa": profiling.summarised(ran, 1, OWN)}
    lines = rows_of(profiling.kinds_table(profiles))
    assert "attention 1.000 1 2.000 1 +1.000" in lines
    assert "coefficients of filters 0.000 0 1.000 1 +1.000" in lines
    assert "matrix products 3.000 1 3.000 1 +0.000" in lines
    assert "step 4.000 2 6.000 3 +2.000" in lines
    # what differs most comes first
    names = [line.split()[0] for line in rows_of(profiling.kernels_table(profiles))]
    assert names[0] == "attend"
    assert set(names[1:3]) == {"sdpa", "add_parts"}
    assert names[3] == "nvjet"


def test_own_kernels_are_found_by_their_decorator() -> None:
    pytest.importorskip("triton")
    import gfsa.kernels.op  # noqa: F401

    found = profiling.own_kernels()
    assert {"attend", "combine", "grad_keys", "attend_once", "fold", "unfold", "add_parts"} <= found
    assert not any(name.startswith("triton_") for name in found)


def test_a_cpu_has_no_kernels_to_profile() -> None:
    with pytest.raises(ValueError, match="launched on CUDA, got the device cpu"):
        run_suite.run_suite(
            *("ops", "cpu", "float32", [], 1, False, None, [], None, Console()), profile=True
        )
    assert not torch.cuda.is_initialized()
