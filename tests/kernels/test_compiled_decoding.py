"""A compiled step with a static cache: what the kernel writes is written in place, and captured.

The code is that of torch's compiler for a CPU, for a GPU that is made up. A cache that is copied
around the operator, or whose address a CUDA graph may not keep, would cost more than the kernel.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch._inductor import compile_fx  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402

import gfsa  # noqa: E402
from support.decoders import decoder  # noqa: E402
from support.nothing_launched import nothing_launched  # noqa: E402

LAYERS, HEADS, DIM, ROWS, HELD = 2, 2, 64, 128, 100


def model(degree: int) -> Any:
    sizes = {"width": HEADS * DIM, "heads": HEADS, "key_heads": HEADS, "layers": LAYERS}
    plugged = decoder("gpt2", vocabulary=50, positions=ROWS, **sizes)
    gfsa.plug(plugged, K=3 if degree == 2 else None, w0=0.1, w1=0.8)
    return plugged


def filled(plugged: Any, degree: int) -> Any:
    """A static cache as it is on a GPU, with counters."""
    cache = transformers.StaticCache(config=plugged.config, max_cache_len=ROWS)
    with torch.no_grad():
        plugged(torch.randint(50, (1, HELD)), past_key_values=cache)
    for layer in cache.layers:
        counters = torch.zeros(HEADS, dtype=torch.int32)
        torch._dynamo.mark_static_address(counters)
        if degree == 1:
            layer.gfsa_counters = counters
        else:
            (((companion,),),) = (layer.gfsa_powers.values(),)
            companion.gfsa_counters = counters
    return cache


class WrittenError(Exception):
    """The compiler has written its code, which need not be built."""


def compiled_step(plugged: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The code of one step, and what the compiler was given for it."""
    found: list[str] = []
    given: list[dict[str, Any]] = []
    inner = compile_fx.compile_fx_inner

    def stop(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        found.append(code.value)
        raise WrittenError

    def keep(module: Any, inputs: Any, **options: Any) -> Any:
        given.append({"graph": module.graph, **options})
        return inner(module, inputs, **options)

    def compiler(module: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=keep)

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)
    torch.compiler.reset()
    # pytest's own patches would leave the settings hidden
    gradients = torch._functorch.config.patch(enable_autograd_cache=False)
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with nothing_launched(), torch.no_grad(), gradients, graphs:
        step = torch.compile(plugged.forward, fullgraph=True, backend=compiler)
        token, position = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), HELD)
        with pytest.raises(BackendCompilerFailed, match="Written"):
            step(token, past_key_values=cache, position_ids=position)
    torch.compiler.reset()
    (code,), (options,) = found, given
    return code, options


@pytest.mark.parametrize("degree", [1, 2])
def test_the_cache_is_written_where_it_is(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plugged = model(degree)
    code, given = compiled_step(plugged, filled(plugged, degree), monkeypatch)
    calls = re.findall(r"torch\.ops\.gfsa\.decode\.default\((.*)\)", code)
    assert len(calls) == LAYERS
    assert "scaled_dot" not in code
    for call in calls:
        k, v, u, *_, counters, _, _ = call.split(", ")[-11:]
        # arguments of the graph itself, not copies of them
        for tensor in (k, v, u, counters) if degree == 2 else (k, v, counters):
            assert re.fullmatch(r"arg\d+_1", tensor), call
        assert (u == "None") is (degree == 1)
    # nothing else is as large as a layer's keys
    made = re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", code)
    assert made
    sizes = [torch.Size(int(x) for x in re.findall(r"\d+", shape)).numel() for shape in made]
    assert max(sizes) < HEADS * ROWS * DIM

    static, inputs = set(given["static_input_idxs"]), {}
    for index, node in enumerate(given["graph"].find_nodes(op="placeholder")):
        inputs[node] = index
    # a replayed graph copies all that is not static: the token and its position
    assert len(inputs) - len(static) == 2
    written = {
        node.args[0]
        for node in given["graph"].find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default
        )
    }
    # the length, counters and with degree 2 U of each layer
    assert len(written) == (degree + 1) * LAYERS
    assert {inputs[node] for node in written} <= static
