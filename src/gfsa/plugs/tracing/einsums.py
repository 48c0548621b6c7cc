"""Einsums that take an attention map: those that mix its heads, and its product with values."""

from __future__ import annotations

from typing import Any, NamedTuple


class ProductEquations(NamedTuple):
    """An einsum of a map with values as three steps, of which the second is ``A·v``.

    Args:
        values: the einsum that gives the values the axes ``(lead of the map, keys, features)``,
            without those of the lead that they share, such as the heads of multi-query attention.
        shared: the axes that are missing, in order: the values get one of size 1 for each.
        result: the einsum that gives ``A·v`` the axes of the result.
    """

    values: str
    shared: tuple[int, ...]
    result: str


def operands_of_einsum(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of ``torch.einsum(*args)``, which takes them one by one or as a list."""
    operands = args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        return tuple(operands[0])
    return operands


def keeps_map(equation: str, place: int) -> bool:
    """Whether the result is still a map: both axes of the operand at ``place`` are in it."""
    inputs, arrow, out = _parts(equation)
    return bool(arrow) and set(inputs[place][-2:]) <= set(out)


def product_equations(equation: str, place: int) -> ProductEquations | None:
    """The steps of a product of the map at ``place`` with values, or None if it is another."""
    inputs, arrow, out = _parts(equation)
    if len(inputs) != 2 or not arrow or "." in equation:
        return None
    of_map, of_values = inputs[place], inputs[1 - place]
    lead, row, column = of_map[:-2], of_map[-2], of_map[-1]
    features = [letter for letter in of_values if letter not in of_map]
    if len(features) != 1 or column not in of_values or row in of_values:
        return None
    own = "".join(letter for letter in lead if letter in of_values)
    return ProductEquations(
        values=f"{of_values}->{own}{column}{features[0]}",
        shared=tuple(axis for axis, letter in enumerate(lead) if letter not in of_values),
        result=f"{lead}{row}{features[0]}->{out}",
    )


def _parts(equation: str) -> tuple[list[str], str, str]:
    """The letters of each operand, the arrow if there is one, and the letters of the result."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    return inputs.split(","), arrow, out
