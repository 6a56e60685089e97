"""The picture of how long streams wait for a change of weights, by mode and context."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks/results/gpu-h200-pause-modes.json"
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 90, 580, 30, 340
"""The edges of the plot itself, in the units of the drawing."""
SECONDS = 0.01, 30.0
COLOURS = {"in_place": "#2f9e5b", "retract": "#3b7dd8", "abort and resend": "#e8833a"}
LABELS = {"abort and resend": "abort, sent again"}
SHIFT = {"retract": 9, "abort and resend": -9}
"""How far labels are moved up or down, because two lines nearly meet."""
STYLE = """<style>
text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; \
fill: #1f2933; }
.grid { stroke: #e4e7eb; } .line { fill: none; stroke-width: 2.5; }
</style>"""


def picture() -> str:
    """An SVG drawing with one line for each mode; both axes are logarithmic."""
    contexts = json.loads(RESULTS.read_text())["contexts"]
    lengths = sorted(map(int, contexts))

    def x(length: float) -> float:
        share = math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0])
        return round(LEFT + share * (RIGHT - LEFT), 1)

    def y(seconds: float) -> float:
        share = math.log(seconds / SECONDS[0]) / math.log(SECONDS[1] / SECONDS[0])
        return round(BOTTOM - share * (BOTTOM - TOP), 1)

    def waits(mode: str) -> list[tuple[int, float]]:
        return [(n, _wait(contexts[str(n)], mode)) for n in lengths]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" aria-label="Seconds until the last stream goes on after a change '
        'of weights, by context length and mode">',
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
    ]
    for seconds in (0.01, 0.1, 1, 10):
        at = y(seconds)
        parts += [
            f'<path class="grid" d="M{LEFT} {at}H{RIGHT}"/>',
            f'<text x="{LEFT - 10}" y="{at + 5}" text-anchor="end">'
            f"{seconds:g} s</text>",
        ]
    for length in lengths:
        parts.append(
            f'<text x="{x(length)}" y="{BOTTOM + 24}" text-anchor="middle">'
            f"{length // 1024} k</text>"
        )
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 48}" text-anchor="middle">'
        "tokens of context</text>"
    )
    for mode, colour in COLOURS.items():
        points = waits(mode)
        line = " ".join(f"{x(length)},{y(wait)}" for length, wait in points)
        label = LABELS.get(mode, mode)
        end = y(points[-1][1]) + 5 + SHIFT.get(mode, 0)
        parts += [
            f'<polyline class="line" stroke="{colour}" points="{line}"/>',
            f'<text x="{RIGHT + 12}" y="{end}">{label}: {points[-1][1]:.2g} s</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _wait(context: dict[str, Any], mode: str) -> float:
    wait: float = context["modes"][mode]["next_token_max_s"]
    return wait
