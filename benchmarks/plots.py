"""Plots as SVG: bars, and ranges on a logarithmic axis. They are readable on light and on dark pages.

They use no external fonts, scripts or colours. The same numbers make the same file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH = 720
_LABEL_WIDTH = 250
_VALUE_WIDTH = 90
_ROW = 26
_TOP = 34
_AXIS = 26

_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.soft { fill: #57606a }
.ours { fill: #0969da; stroke: #0969da }
.other { fill: #8c959f; stroke: #8c959f }
.grid { stroke: #d0d7de; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .soft { fill: #9198a1 }
  .ours { fill: #4493f8; stroke: #4493f8 }
  .other { fill: #6e7681; stroke: #6e7681 }
  .grid { stroke: #3d444d }
}
</style>"""


def bars(title: str, rows: Sequence[tuple[str, float]], *, ours: str = "pgoutbox") -> str:
    """Draw a horizontal bar for each label, from zero. Bars whose label begins with `ours` are highlighted."""
    shown = [(label, value) for label, value in rows if math.isfinite(value)]
    longest = max((value for _, value in shown), default=0.0) or 1.0
    room = _WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    parts = []
    for index, (label, value) in enumerate(shown):
        y = _TOP + index * _ROW
        size = f'width="{max(1.0, room * value / longest):.1f}" height="{_ROW - 9}"'
        parts += [
            _text(_LABEL_WIDTH - 8, y + 16, label, anchor="end"),
            f'<rect class="{_kind(label, ours)}" x="{_LABEL_WIDTH}" y="{y + 4}" {size}/>',
            _text(_LABEL_WIDTH + room * value / longest + 6, y + 16, number(value), kind="soft"),
        ]
    return _document(title, _TOP + len(shown) * _ROW + 6, parts)


def ranges(title: str, rows: Sequence[tuple[str, Sequence[float]]], *, unit: str, ours: str = "pgoutbox") -> str:
    """Draw a line from the first to the last of each row's values, with a dot for each, on a logarithmic axis."""
    shown = [(label, [v for v in values if math.isfinite(v) and v > 0]) for label, values in rows]
    shown = [(label, values) for label, values in shown if values]
    everything = [value for _, values in shown for value in values] or [1.0]
    low, high = math.floor(math.log10(min(everything))), math.ceil(math.log10(max(everything)))
    high = max(high, low + 1)
    room = _WIDTH - _LABEL_WIDTH - 30

    def place(value: float) -> float:
        return _LABEL_WIDTH + room * (math.log10(value) - low) / (high - low)

    bottom = _TOP + len(shown) * _ROW
    parts = []
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts += [
            f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>',
            _text(x, bottom + 16, f"{10.0**power:g} {unit}", anchor="middle", kind="soft"),
        ]
    for index, (label, values) in enumerate(shown):
        y = _TOP + index * _ROW + _ROW / 2
        kind = _kind(label, ours)
        xs = [place(value) for value in values]
        parts += [
            _text(_LABEL_WIDTH - 8, y + 4, label, anchor="end"),
            f'<line class="{kind}" stroke-width="3" x1="{min(xs):.1f}" y1="{y:.1f}" x2="{max(xs):.1f}" y2="{y:.1f}"/>',
            *(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>' for x in xs),
        ]
    return _document(title, bottom + _AXIS, parts)


def number(value: float) -> str:
    """Format a value for people: three significant digits, with separators for thousands."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 999.5:
        digits = 3 - len(str(round(abs(value))))
        return f"{round(value, digits):,.0f}"
    return f"{value:.3g}"


def _kind(label: str, ours: str) -> str:
    return "ours" if label.startswith(ours) else "other"


def _text(x: float, y: float, content: str, *, anchor: str = "start", kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _document(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height:.0f}"'
        f' width="{_WIDTH}" height="{height:.0f}">'
    )
    lines = [head, f"<title>{escape(title)}</title>", _STYLE, _text(8, 20, title, kind="title"), *parts, "</svg>"]
    return "\n".join(lines) + "\n"
