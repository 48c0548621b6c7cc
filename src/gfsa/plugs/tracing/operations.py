"""Torch's operations by name, as the tracer tells them apart, and how to read their arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_TRANSPOSES = [vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH")]
RESHAPES = {
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "ravel",
}  # fmt: skip
REORDERS = {
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint",
}  # fmt: skip
MOVES = RESHAPES | REORDERS
"""Operations that give every entry another place and change none."""

_OPERANDS = ("input", "self", "batch1", "mat1", "tensor1", "other", "batch2", "mat2", "tensor2")
PRODUCTS = {"matmul", "__matmul__", "mm", "bmm"}
# axis by axis, the argument that names the axis whose entries move
ALONG = {"roll": 2, "flip": 1, "index_select": 1, "gather": 1, "take_along_dim": 2}
# operations whose result may have the shape of their input and yet another order
SCRAMBLES = {
    "sort", "msort", "topk", "rot90", "fliplr", "flipud", "take", "as_strided", "channel_shuffle",
    "pixel_shuffle", "pixel_unshuffle", "grid_sample", "scatter", "scatter_add", "scatter_reduce",
    "index_put", "index_copy", "index_add", "index_fill", "masked_scatter", "masked_select",
}  # fmt: skip
WRITES = {
    "__setitem__", "copy_", "scatter_", "scatter_add_", "index_put_", "index_copy_", "index_add_",
    "masked_scatter_", "set_", "swap_tensors",
}  # fmt: skip
# products over axes that no rule above knows
NOT_FOLLOWED = {
    "tensordot", "inner", "bilinear", "kron", "chain_matmul", "multi_dot", "addbmm", "addmv", "mv",
    "cdist", "inv", "pinv", "solve", "matrix_exp", "matrix_power",
}  # fmt: skip
WITHOUT_VALUES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor", "zero_", "fill_", "bernoulli",
}  # fmt: skip
PIECES = {"chunk", "split", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split",
           "split_with_sizes", "unsafe_split_with_sizes"}  # fmt: skip
# functions that make, change or use an attention map
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
DROPOUT = (F.dropout, torch.dropout)
MATMUL = (
    torch.matmul,
    torch.linalg.matmul,
    torch.bmm,
    torch.mm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.mm,
)
ADDED_MATMUL = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)

MAP_PRODUCTS = (*MATMUL, *ADDED_MATMUL, torch.einsum)


def named_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first two arguments by position, where the caller gave them by name."""
    for place, name in enumerate(("input", "weight")):
        if len(args) == place and name in kwargs:
            args = (*args, kwargs[name])
            kwargs = {key: value for key, value in kwargs.items() if key != name}
    return args, kwargs


def joined_arguments(args: Any, kwargs: Any) -> tuple[list[Tensor], int]:
    tensors = args[0] if args else kwargs["tensors"]
    axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return list(tensors), axis


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of a product in their order, by position or by name."""
    return [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]


def name_of(func: Any) -> str:
    """The name of a function that torch dispatches; that of a property for its getter."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__" and func in _TRANSPOSES:
        return "transpose"
    return name


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
