"""Line charts as SVG, written by hand: two axes and some lines need no plotting library."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN, _KEY = 560, 320, 48, 190
_COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5572", "#e09f3e", "#4a4e69", "#00798c", "#6b705c")


def fractions(title: str, lines: Mapping[str, Sequence[float]], x_name: str) -> str:
    """An SVG of lines with values 0 to 1 at x = 1, 2, ..., the legend to their right."""
    longest = max(map(len, lines.values()), default=1)

    def at(place: int, value: float) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * place / max(longest - 1, 1)
        return round(x, 1), round(_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * value, 1)

    def label(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
        style = f'text-anchor="{anchor}" font-size="{size}"'
        return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _KEY} {_HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{_WIDTH + _KEY}" height="{_HEIGHT}" fill="white"/>',
        label(_MARGIN, 24, title, size=14),
        label(_WIDTH / 2, _HEIGHT - 8, x_name, "middle"),
    ]
    for step in range(5):
        (left, y), (right, _) = at(0, step / 4), at(longest - 1, step / 4)
        parts.append(f'<path d="M{left} {y}H{right}" stroke="#ddd"/>')
        parts.append(label(left - 6, y + 4, f"{step / 4:.2f}", "end"))
    parts += [label(*at(place, -0.09), str(place + 1), "middle") for place in range(longest)]
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        dashes = "" if number < len(_COLOURS) else ' stroke-dasharray="5 3"'
        points = " ".join(f"{x},{y}" for x, y in map(at, range(len(values)), values))
        style = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
        parts.append(f'<polyline points="{points}" {style}/>')
        y = _MARGIN + 18 * number
        parts.append(f'<path d="M{_WIDTH - 30} {y}h22" {style}/>')
        parts.append(label(_WIDTH - 2, y + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"
