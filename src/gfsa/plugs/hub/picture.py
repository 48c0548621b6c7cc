"""A picture of filters: every coefficient of every head over the layers, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# one panel per coefficient, each in a colour that is legible on white and on black
_COLOURS = ("#3b82c4", "#c2571a", "#2e9e6b", "#9b5fc0", "#b8860b")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 220, 150, 46, 26, 18


def coefficients_svg(layers: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> str:
    """One panel for each c_k: a dot per head at its layer, and the line of ordinary attention.

    Args:
        layers: layer names with ``coefficients[head][k]``.
    """
    powers = max(len(head) for _, heads in layers for head in heads)
    width = powers * (_WIDTH + _LEFT + _GAP) + _GAP
    height = _TOP + _HEIGHT + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for k in range(powers):
        parts += _panel(k, _GAP + k * (_WIDTH + _LEFT + _GAP) + _LEFT, layers)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(k: int, left: int, layers: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> list[str]:
    plain = 1.0 if k == 1 else 0.0
    values = [head[k] for _, heads in layers for head in heads if k < len(head)]
    low, high = min(plain, *values), max(plain, *values)
    # a panel in which nothing moved still has a scale
    margin = 0.08 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (high - value) / (high - low)

    def x(layer: int) -> float:
        return left + _WIDTH * (layer + 0.5) / len(layers)

    colour = _COLOURS[k % len(_COLOURS)]
    bottom = _TOP + _HEIGHT
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#999999"/>',
        f'<text x="{left}" y="{_TOP - 8}" fill="#222222">coefficient of A^{k}, each head</text>',
        f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y(plain):.1f}" y2="{y(plain):.1f}" '
        'stroke="#999999" stroke-dasharray="4 3"/>',
        f'<text x="{left}" y="{bottom + 28}" fill="#222222">layers 1 to {len(layers)}; dashed: '
        "ordinary attention</text>",
    ]
    for value in (low + margin, high - margin):
        parts.append(
            f'<text x="{left - 5}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#222222">'
            f"{value:.3g}</text>"
        )
    for layer, (name, heads) in enumerate(layers):
        for number, head in enumerate(heads):
            if k < len(head):
                parts.append(
                    f'<circle cx="{x(layer):.1f}" cy="{y(head[k]):.1f}" r="2.6" fill="{colour}" '
                    f'fill-opacity="0.6"><title>{escape(name)}, head {number}: {head[k]:.4g}'
                    "</title></circle>"
                )
    return parts
