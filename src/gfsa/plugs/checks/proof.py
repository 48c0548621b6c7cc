"""Prove that attention is that of tokens to themselves: other maps have no powers.

Gradients show it. The scores of row i and column i, and row i of the values, may depend on one
token of the module's inputs alone, and no two rows on the same token. That refuses
cross-attention, maps over channels, projections that mix tokens, and queries, keys or values in
different orders, whatever operations the module uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gfsa.plugs.adapter import GIVEN_COPIES, NAME, plain_class

REASON = "cross-attention has no powers: its queries and keys are different tokens"

OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments in which the forwards of many libraries take the tokens of another sequence."""


def require_same_tokens(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raise unless ``query`` and ``key`` hold the same tokens, as :func:`are_same_tokens` says.

    A graph that is compiled or captured compares two tensors each time it runs, if an earlier
    forward has shown that this module is called with equal copies.
    """
    same = are_same_tokens(query, key)
    if same is None and GIVEN_COPIES in module.__dict__:
        # torch.func, partitioned and nested tensors have no such assertion, nor have other devices
        whole = not (is_transformed() or query.is_nested or hasattr(query, "device_mesh"))
        if whole and query.device.type in ("cpu", "cuda"):
            torch._assert_async(_alike(query, key).all(), refusal_of_call(module, _OTHER_VALUES))
    elif same is None:
        raise ValueError(
            f"{name_of(module)} was plugged as self-attention, but its key is another tensor "
            "than its query, and their values cannot be compared while a graph is compiled or "
            "captured. Pass the same tensor for both, run one forward without that first, or, if "
            "this is cross-attention, leave this layer out with gfsa.plug(model, layers=...)"
        )
    elif not same:
        shapes = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
        raise ValueError(
            refusal_of_call(module, _OTHER_VALUES if query.shape == key.shape else shapes)
        )
    elif query is not key and not has_no_values(query):
        module.__dict__[GIVEN_COPIES] = True


_OTHER_VALUES = "its key has other values than its query"


def refusal_of_call(module: nn.Module, got: str) -> str:
    """Why a call of a plugged module is an error: ``got`` says how it is no self-attention."""
    return (
        f"{name_of(module)} was plugged as self-attention, but {got}. Cross-attention and "
        "keys that come from a cache have no powers; leave this layer out with "
        "gfsa.plug(model, layers=...)"
    )


def are_same_tokens(first: Tensor, second: Tensor) -> bool | None:
    """Whether two tensors are one, the same view of one, or equal copies; None if it is unknown.

    Where values cannot be read, views of a whole tensor are known to be the same.
    """
    if first is second:
        return True
    if first.shape != second.shape or first.device != second.device:
        return False
    if first.is_meta:
        return True
    alike = first.stride() == second.stride() and first.dtype == second.dtype
    if not (has_no_values(first) or has_no_values(second)):
        if (alike and first.data_ptr() == second.data_ptr()) or torch.equal(first, second):
            return True
        return bool(_alike(first, second).all())
    # of a whole tensor, because a compiler does not know the storage offset of a part
    base = first._base
    if alike and base is not None and base is second._base and first.numel() == base.numel():
        return True
    if torch.compiler.is_compiling() or not is_transformed():
        return None
    same = _alike(first, second)
    while torch._C._functorch.is_functorch_wrapped_tensor(same):
        # of vmap, the entries of every sample
        same = torch._C._functorch.get_unwrapped(same)
    return None if has_no_values(same) else bool(same.all())


def _alike(query: Tensor, key: Tensor) -> Tensor:
    """Where two tensors are equal; a diverged model has NaN at the same positions of both."""
    return (query == key) | (query.isnan() & key.isnan())


def name_of(module: nn.Module) -> str:
    """A plugged module in an error: its name in the model and the class that it had before."""
    name = module.__dict__.get(NAME)
    kind = plain_class(module).__name__
    return f"{name} ({kind})" if name else kind


# random halves of the rows whose tokens are compared; each finds one pair of rows that is mixed up
# with a chance of one half, and an order that differs from another almost surely
_HALVES = 2


@dataclass(eq=False)
class Evidence:
    """Which tokens of a module's inputs one attention product depends on, by gradients."""

    # leaves of the graph, by name
    inputs: Mapping[str, Tensor]
    # the map before its softmax, (..., H, N, N); or queries and keys
    scores: Sequence[Tensor]
    # (..., H, N, D)
    values: Tensor
    # whether each score depends on its whole row, because the softmax is an autograd function; then
    # the order of queries and keys is not compared
    hidden: bool = False

    def __post_init__(self) -> None:
        self.rows = torch.Size((*self.values.shape[:-3], 1, self.values.shape[-2]))
        self.random = torch.Generator(self.values.device).manual_seed(0)

    def separates_lead(self, merged: bool) -> bool:
        """Whether no token is in two places of the leading axes, the heads apart.

        If ``merged``, an axis of the inputs may hold tokens and features, so none holds the latter.
        """
        half = self._half(self.rows[:-1])[..., None].expand(self.rows)
        one, other, row = map(self._of_values, (half, ~half, self._row(0)))
        axes = {name: [] if merged else _extent([row[name]]) for name in self.inputs}
        return not any(
            _meet(_without(one[name], axes[name]), _without(other[name], axes[name]))
            for name in self.inputs
        )

    def refusal(self) -> str | None:
        """Why this is not attention of tokens to themselves, or None if it is."""
        halves = [self._half(self.rows) for _ in range(_HALVES)]
        pairs = [(half, ~half) for half in halves]
        self.halves = [(*map(self._of_scores, p, p), *map(self._of_values, p)) for p in pairs]
        within, beyond, *of_values = self.halves[0]
        across = self._of_scores(halves[0], ~halves[0])
        rows = {name for name in self.inputs if _meet(across[name], within[name])}
        columns = {name for name in self.inputs if _meet(across[name], beyond[name])}
        if not (rows or columns):
            # one token in each place, or a mask that shows each token itself alone
            every = torch.ones_like(halves[0])
            rows = columns = {n for n, x in self._of_scores(every, every).items() if bool(x.any())}
        values = {n for n in self.inputs if bool((of_values[0][n] | of_values[1][n]).any())}
        for side, names in {"queries": rows, "keys": columns, "values": values}.items():
            if not names:
                return (
                    f"how its {side} follow from its inputs could not be followed, so whether "
                    "queries and keys are the same tokens is unknown"
                )
        shapes = {self.inputs[name].shape for name in values}
        sequences = {name for name in rows if self.inputs[name].shape in shapes}
        if self.hidden and not sequences <= values:
            return (
                f"its softmax is an autograd function of its own, so which of {_listed(sequences)} "
                "its queries and keys come from could not be followed"
            )
        shared = rows & columns
        # positions may be an input, too, and be added to the queries and keys of two sequences
        if not values <= shared and rows != columns:
            return (
                f"its queries come from {_listed(rows)} and its keys from {_listed(columns)}, "
                "which hold different tokens: cross-attention has no powers"
            )
        if values & shared:
            found = [self._refusal_of(name, name) for name in sorted(values & shared)]
            return next(filter(None, found), None)
        # the values have an input of their own; of those that are shared, some may hold positions
        found = [self._refusal_of(name, max(values)) for name in sorted(shared)]
        return None if None in found else found[0]

    def _refusal_of(self, name: str, of_values: str) -> str | None:
        """Why rows and columns are not the same tokens of the input ``name``, or None if they are.

        The values come from ``of_values``; those of another input are at the same places.
        """
        rows = [self._row(self.rows.numel() // 2), self._row(-1)]
        one_row = [(self._of_scores(r, r, 1)[name], self._of_values(r)[of_values]) for r in rows]
        halves: list[tuple[Tensor, ...]] = [
            (s[name], t[name], v[of_values], w[of_values]) for s, t, v, w in self.halves
        ]
        n = self.rows[-1]
        mixes = (
            f"its map is {n}×{n} over channels, not tokens, or its projections mix tokens: a row "
            "of its scores or values depends on several tokens"
        )
        if any(_meet(values, others) for _, _, values, others in halves):
            return mixes
        features = _extent([v if bool(v.any()) else pair for pair, v in one_row])
        collapsed = [tuple(_without(x, features) for x in half) for half in halves]
        if not any(_meet(values, others) for _, _, values, others in collapsed):
            # otherwise tokens and their features are merged into one axis
            halves = collapsed
            one_row = [(_without(pair, features), _without(v, features)) for pair, v in one_row]
            tokens = max(int(pair.sum()) for pair, _ in one_row)
            if tokens > 2:
                return mixes
            if tokens > 1:
                return _other_order(name)
        if any(_meet(scores, others) for scores, others, _, _ in halves):
            return _other_order(name)
        if any(_meet(s, w) or _meet(t, v) for s, t, v, w in halves) or (
            halves is collapsed
            and any(
                pair.shape == v.shape and pair.any() and v.any() and not _meet(pair, v)
                for pair, v in one_row
            )
        ):
            return (
                "its values are other tokens than its keys, or the same tokens in another order: "
                "the product of its map with itself would join different tokens"
            )
        return None

    def _row(self, place: int) -> Tensor:
        row = torch.zeros(self.rows, dtype=torch.bool, device=self.values.device)
        row.view(-1)[place] = True
        return row

    def _half(self, shape: Sequence[int]) -> Tensor:
        """About half of the rows, by chance; the first is not among them, the second is."""
        chosen = torch.rand(shape, generator=self.random, device=self.values.device) < 0.5
        chosen.view(-1)[:2] = torch.tensor([False, True], device=chosen.device)[: chosen.numel()]
        return chosen

    def _of_scores(
        self, rows: Tensor, columns: Tensor, heads: int | None = None
    ) -> dict[str, Tensor]:
        """The places of the inputs that the scores of some rows and columns depend on."""
        if self.hidden and not bool(rows.all()):
            return {name: torch.zeros_like(x, dtype=torch.bool) for name, x in self.inputs.items()}
        if len(self.scores) == 1:
            chosen = [rows[..., :, None] & columns[..., None, :]]
        else:
            chosen = [rows[..., None], columns[..., None]]
        return self._touched([x[..., :heads, :, :] for x in self.scores], chosen)

    def _of_values(self, rows: Tensor) -> dict[str, Tensor]:
        """The places of the inputs that some rows of the values depend on."""
        return self._touched([self.values], [rows[..., None]])

    def _touched(self, outputs: Sequence[Tensor], chosen: Sequence[Tensor]) -> dict[str, Tensor]:
        """The places of the inputs with a gradient of the chosen entries."""
        used: list[Tensor] = []
        weights: list[Tensor] = []
        for x, mask in zip(outputs, chosen, strict=True):
            if x.requires_grad:
                random = torch.rand(x.shape, generator=self.random, device=x.device) + 0.5
                used.append(x)
                weights.append(torch.where(mask, random, 0).to(x.dtype))
        grads: Sequence[Tensor | None] = [None] * len(self.inputs)
        if used:
            leaves = list(self.inputs.values())
            grads = torch.autograd.grad(used, leaves, weights, retain_graph=True, allow_unused=True)
        found = {}
        for (name, leaf), gradient in zip(self.inputs.items(), grads, strict=True):
            sizes = torch.zeros_like(leaf) if gradient is None else gradient.detach().abs()
            # what cancels exactly on one device leaves a rounding on another
            found[name] = sizes > 1e-7 * sizes.amax() if sizes.numel() else sizes.bool()
        return found


def _other_order(name: str) -> str:
    return (
        f"its queries and keys are different parts of {name}, or the same tokens in another order: "
        "the product of its map with itself would join different tokens"
    )


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two sets of places have one in common; places of other inputs say nothing."""
    return one.shape == other.shape and bool((one & other).any())


def _extent(sets: Iterable[Tensor]) -> list[int]:
    """The axes along which one of these sets has more than one place."""
    axes = {
        axis
        for places in sets
        for axis in range(places.dim())
        if int(places.movedim(axis, 0).flatten(1).any(1).sum()) > 1
    }
    return sorted(axes)


def _without(places: Tensor, axes: list[int]) -> Tensor:
    """A set of places without the axes of features."""
    return places.any(axes, keepdim=True) if axes else places


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def noise_like(x: Tensor) -> Tensor:
    """Numbers between 0.01 and 0.03 in the shape of x, the same each time."""
    places = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
    return (0.01 + 0.02 * (places * 0.7548776662466927).frac()).to(x.dtype).view(x.shape)


# make_fx records operations, a fake mode computes shapes
_MODES_WITHOUT_VALUES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor's values cannot be read now: it is traced, transformed or captured."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES_WITHOUT_VALUES):
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_transformed() -> bool:
    """Whether torch.func runs the model now (vmap, grad, …), a constant to the compiler.

    The compiler asks while it traces, when the transforms of what it traces are entered.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


# all that torch.compiler.assume_constant_result does, which imports the whole compiler to do it
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
