"""Torch's CUDA kernels under the filter: same bits at init, one mask, blocks, no waiting."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gfsa import GFSA, graph_filter_attention
from gfsa.functional import which_backend
from gfsa.operators import AttentionOperator, DenseOperator, Visibility, blocked
from support.attention import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N, D = 64, 64
KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    "math": (SDPBackend.MATH, torch.float32),
}
every_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS.values(), ids=KERNELS)


def draw(dtype: torch.dtype, kv_heads: int = 4) -> list[Tensor]:
    shapes = (2, 4, N, D), (2, kv_heads, N, D), (2, kv_heads, N, D)
    return [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]


@every_kernel
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_identity_at_init(kernel, dtype: torch.dtype, is_causal: bool, dropout_p: float) -> None:
    """Bits, first gradients and the generator are those of torch's attention."""
    inputs, filter = draw(dtype), GFSA(4).cuda()
    options = {"is_causal": is_causal, "dropout_p": dropout_p}
    with sdpa_kernel(kernel):
        torch.manual_seed(1)
        expected = F.scaled_dot_product_attention(*inputs, **options)
        generator = torch.cuda.get_rng_state()
        torch.manual_seed(1)
        y = graph_filter_attention(*inputs, filter.coefficients(), **options, backend="sdpa")
        assert torch.equal(y, expected)
        assert torch.equal(torch.cuda.get_rng_state(), generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["padding", "causal padding", "bias", "head groups"])
def test_identity_at_init_whatever_kernel_torch_picks(dtype: torch.dtype, kind: str) -> None:
    """A bool mask is handed over as numbers here, and still gives the bits it gives plain."""
    grouped = kind == "head groups"
    q, k, v = draw(dtype, kv_heads=2 if grouped else 4)
    seen = torch.arange(N, device="cuda") < torch.tensor([[N - 7], [N]], device="cuda")
    mask = {
        "padding": seen[:, None, None],
        "causal padding": seen[:, None, None] & torch.ones_like(q[0, 0], dtype=torch.bool).tril(),
        "bias": torch.randn(4, N, N, device="cuda").to(dtype),
    }.get(kind)
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
    coeffs = GFSA(4).cuda().coefficients()
    y = graph_filter_attention(q, k, v, coeffs, mask, enable_gqa=grouped, backend="sdpa")
    assert torch.equal(y, expected)


@every_kernel
def test_one_dropout_mask_for_all_passes(kernel, dtype: torch.dtype) -> None:
    """The dropped map, recovered from its action on the identity, is what gets squared."""
    q, k, _ = draw(dtype)
    identity = torch.eye(N, dtype=dtype, device="cuda").expand(2, 4, N, N).contiguous()

    def power(exponent: int) -> Tensor:
        torch.manual_seed(3)
        coeffs = torch.eye(3, device="cuda")[exponent]
        with sdpa_kernel(kernel):
            return graph_filter_attention(
                q, k, identity, coeffs, dropout_p=0.5, backend="sdpa"
            ).double()

    dropped = power(1)
    assert 0.3 < (dropped == 0).double().mean() < 0.7
    room = 1e-4 if dtype == torch.float32 else 2e-2
    assert relative_error(power(2), dropped @ dropped) <= room


@every_kernel
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_a_key(kernel, dtype: torch.dtype, kind: str) -> None:
    if kernel == SDPBackend.FLASH_ATTENTION:
        pytest.skip("torch's flash kernel takes no mask")
    q, k, v = draw(dtype)
    allowed = torch.ones(N, N, dtype=torch.bool, device="cuda").tril()
    allowed[:5] = False
    mask = (
        allowed if kind == "bool" else torch.zeros_like(q[0, 0]).masked_fill(~allowed, -torch.inf)
    )
    coeffs = torch.tensor([0.5, 0.7, -0.3], device="cuda", requires_grad=True)
    with sdpa_kernel(kernel):
        y = graph_filter_attention(q, k, v, coeffs, mask, backend="sdpa")
        y.float().square().sum().backward()
    torch.testing.assert_close(y[..., :5, :], 0.5 * v[..., :5, :])
    for x in (q, k, v, coeffs):
        assert x.grad.isfinite().all()
    exact = graph_filter_attention(
        q.double(), k.double(), v.double(), coeffs, allowed, backend="dense"
    )
    assert relative_error(y, exact) <= (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kv_heads", "options"),
    [(4, {"is_causal": True}), (2, {"is_causal": True, "enable_gqa": True}), (4, {"scale": -0.2})],
)
def test_agrees_with_dense(dtype: torch.dtype, kv_heads: int, options: dict) -> None:
    q, k, v = draw(dtype, kv_heads)
    coeffs = torch.randn(4, 4, device="cuda")
    y = graph_filter_attention(q, k, v, coeffs, **options, backend="sdpa")
    exact = graph_filter_attention(
        q.double(), k.double(), v.double(), coeffs, **options, backend="dense"
    )
    assert relative_error(y, exact) <= (1e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_never_waits_for_the_device(backend: str, dropout_p: float) -> None:
    q, k, v = draw(torch.bfloat16)
    filter = GFSA(4).cuda()
    padding = (torch.arange(N, device="cuda") < 50)[None, None, None, :]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (None, padding):
            graph_filter_attention(
                q, k, v, filter.coefficients(), mask, dropout_p, backend=backend
            ).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph() -> None:
    """Captured without dropout; with it another operator has to serve, for the generator's sake."""
    q, k, v = (x.detach() for x in draw(torch.bfloat16))
    coeffs = torch.tensor([0.1, 1.0, 0.3], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = graph_filter_attention(q, k, v, coeffs, backend="sdpa")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = graph_filter_attention(q, k, v, coeffs, backend="sdpa")
        # in float32, which no fused kernel takes
        choice = which_backend(q.float(), k.float(), v.float(), coeffs, dropout_p=0.1)
    graph.replay()
    assert torch.equal(captured, expected)
    assert choice.backend != "sdpa"


def test_filter_is_built_where_torch_builds() -> None:
    with torch.device("cuda"):
        filter = GFSA(4, w0=0.1, wK=[0.1, 0.2, 0.3, 0.4])
    assert {x.device.type for x in (*filter.parameters(), *filter.buffers())} == {"cuda"}
    expected = GFSA(4, w0=0.1, wK=[0.1, 0.2, 0.3, 0.4]).coefficients()
    assert torch.equal(filter.coefficients().cpu(), expected)


LONG = 1024


def described(name: str) -> Visibility:
    keys = torch.ones(2, 1, LONG, dtype=torch.bool, device="cuda")
    keys[0, :, : LONG // 3] = False
    if name == "documents":
        documents = torch.arange(LONG, device="cuda")[None] // 300
        return Visibility(causal=True, documents=documents, in_order=True)
    return Visibility(keys, causal=True, window=200 if name == "padding and window" else None)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2)],
)
@pytest.mark.parametrize("entries", [2**16, 2**25])
@pytest.mark.parametrize("name", ["causal padding", "documents", "padding and window"])
def test_a_compiled_step_in_blocks_is_the_dense_one(
    name: str, entries: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "MOST_ENTRIES", entries)
    torch._dynamo.reset()
    torch.manual_seed(0)
    visible = described(name)
    q, k, v = (torch.randn(2, heads, LONG, D, device="cuda", dtype=dtype) for heads in (4, 2, 2))
    coeffs = torch.tensor([[0.3, 0.9, -0.4]] * 4, device="cuda", dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, coeffs: Tensor) -> Tensor:
        operator = AttentionOperator(q, k, enable_gqa=True, visible=visible, backend="sdpa")
        return operator.polynomial(coeffs, v)

    inputs = [q, k, v, coeffs.to(torch.promote_types(dtype, torch.float32))]
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dense = DenseOperator.from_qk(*exact[:2], visible.rows(0, LONG, LONG, q.device))
    expected = dense.polynomial(exact[3], exact[2])
    y = torch.compile(attend, fullgraph=True)(*inputs)
    assert relative_error(y, expected) < tolerance
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, inputs, g)
    wanted = torch.autograd.grad(expected, exact, g.double())
    assert all(error < tolerance for error in map(relative_error, found, wanted))
