"""A picture of figures beside their references, as SVG: two marks a line, on a scale of tenfold steps."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from figures import Figure

LINE, TOP, SCALE, RIGHT, WORDS = 22, 52, 320, 24, 8
# As the other pictures of docs/pictures; white below, for pages of either colour.
STYLE = (
    "text{font:12px sans-serif;fill:#1f2933}.s{fill:#52606d}.e{text-anchor:end}.m{text-anchor:middle}"
    ".p{fill:#fff}line{stroke:#d9e2ec}.g{stroke:#627d98;stroke-width:2}"
    ".o{fill:#0b7a6b}.r{fill:#fff;stroke:#627d98;stroke-width:2}"
)


def picture(title: str, figures: Sequence[Figure]) -> str:
    """All of one unit, and above zero: the scale has no place for it."""
    values = [value for one in figures for value in (one.value, _reference(one)) if value is not None]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left = 16 + round(6.2 * max(len(one.name) for one in figures))
    height = TOP + LINE * len(figures) + 12
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + SCALE + RIGHT} {height}" role="img" '
        f'aria-label="{html.escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="p" width="{left + SCALE + RIGHT}" height="{height}"/>',
        f'<circle class="o" cx="{left}" cy="16" r="5"/><text x="{left + 10}" y="20">Headwater</text>',
        f'<circle class="r" cx="{left + 100}" cy="16" r="4"/>'
        f'<text x="{left + 110}" y="20">its reference, in {html.escape(figures[0].unit)}</text>',
    ]

    def x(value: float) -> str:
        return f"{left + (math.log10(value) - low) / (high - low) * SCALE:.1f}"

    for power in range(low, high + 1):
        at = x(10.0**power)
        made.append(f'<line x1="{at}" x2="{at}" y1="{TOP - 8}" y2="{height - 8}"/>')
        made.append(f'<text class="s m" x="{at}" y="{TOP - 12}">{10.0**power:,g}</text>')
    for number, one in enumerate(figures):
        y = TOP + LINE * number + LINE // 2
        made.append(f'<text class="e" x="{left - WORDS}" y="{y + 4}">{html.escape(one.name)}</text>')
        if (reference := _reference(one)) is not None:
            made.append(f'<line class="g" x1="{x(one.value)}" x2="{x(reference)}" y1="{y}" y2="{y}"/>')
            made.append(f'<circle class="r" cx="{x(reference)}" cy="{y}" r="4"/>')
        made.append(f'<circle class="o" cx="{x(one.value)}" cy="{y}" r="5"/>')
    return "\n".join([*made, "</svg>", ""])


def _reference(figure: Figure) -> float | None:
    return figure.reference_value if figure.reference_unit == figure.unit else None
