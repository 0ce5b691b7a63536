"""Scatter plots and lines as SVG, written without any library and readable on light and on dark paper.

Colours are attributes, and a style sheet within the file replaces them where the reader prefers dark: a renderer
that knows no style sheets shows the light ones. Text is text, so it can be searched and scales with the figure.

Holds always: every point drawn lies inside the frame; what is endless is left out, and so is, on a logarithmic
axis without a beginning, what is not above zero; equal figures give equal bytes. It draws no histograms and places
no labels cleverly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 820, 480
LEFT, RIGHT, TOP, BOTTOM = 78, 218, 44, 56
"""Margins; the right one holds the legend."""
SERIES_MAX = 20
LIGHT = ("#0b6e4f", "#c8553d", "#3d5a98", "#8e5aa8", "#b8860b", "#2a9db0", "#7a7a2e", "#a83f6b", "#555555",
         "#6b4a2f")  # fmt: skip
DARK = ("#4fd1a1", "#ff9b85", "#8fb0ff", "#cf9be8", "#f0c24b", "#6fd6e8", "#c6c66a", "#f08bb6", "#bbbbbb",
        "#d0a680")  # fmt: skip
MARKS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction. ``label`` ends in its unit."""

    label: str
    logarithmic: bool = False
    least: float | None = None
    """Where it begins; None: a little below the least value. On a logarithmic axis what is less, 0 too, is drawn
    there."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value in both directions, with the ends of its bars where it has some."""

    x: float
    y: float
    x_bar: tuple[float, float] | None = None
    y_bar: tuple[float, float] | None = None
    label: str = ""
    """Written beside it, small."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind, in order."""

    name: str
    points: tuple[Point, ...]
    line: bool = True
    """Whether they are joined."""
    strong: bool = False
    """Drawn thicker: what the figure is about."""
    dashed: bool = False
    """A bound or a reference."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is drawn."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels."""

    axis: Axis
    low: float
    high: float
    from_px: float
    until_px: float

    def at(self, value: float) -> float:
        """Where a value lies; beyond the ends, at the end."""
        low, high = self._bent(self.low), self._bent(self.high)
        part = (self._bent(max(self.low, min(self.high, value))) - low) / (high - low)
        return self.from_px + part * (self.until_px - self.from_px)

    def _bent(self, value: float) -> float:
        return math.log10(value) if self.axis.logarithmic else value


def svg(figure: Figure) -> str:
    """The whole file."""
    assert len(figure.series) <= SERIES_MAX, f"a figure has at most {SERIES_MAX} series"
    x, y = scales(figure)
    body = [
        f'<rect class="paper" x="0" y="0" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text class="ink" x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#1c1c1c">'
        f"{escape(figure.title)}</text>",
        *_grid(x, y),
    ]
    order = sorted(range(len(figure.series)), key=lambda number: figure.series[number].strong)
    for number in order:
        body += _series(figure.series[number], number, x, y)
    body += _legend(figure.series)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" role="img">',
            f"<title>{escape(figure.title)}</title>",
            _style(),
            *body,
            "</svg>",
            "",
        ]
    )


def scales(figure: Figure) -> tuple[_Scale, _Scale]:
    """Both directions' scales; ``AssertionError`` if nothing can be drawn."""
    points = [point for series in figure.series for point in series.points]
    x = _scale(figure.x, [v for p in points for v in (p.x, *(p.x_bar or ()))], LEFT, WIDTH - RIGHT)
    y = _scale(figure.y, [v for p in points for v in (p.y, *(p.y_bar or ()))], HEIGHT - BOTTOM, TOP)
    return x, y


def _scale(axis: Axis, values: Sequence[float], from_px: float, until_px: float) -> _Scale:
    drawn = [value for value in values if _drawable(axis, value)]
    assert drawn, f"the axis {axis.label!r} has no value to draw"
    low, high = min(drawn), max(drawn)
    if axis.logarithmic:
        low = low / 1.15 if axis.least is None else axis.least
        return _Scale(axis, low, max(high, low) * 1.15, from_px, until_px)
    if axis.least is not None:
        low = min(low, axis.least)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return _Scale(axis, low if low == axis.least else low - room, high + room, from_px, until_px)


def _drawable(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.logarithmic or axis.least is not None)


def ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round values between the ends: 1, 2, 5 × powers of ten; at most about eight."""
    if logarithmic:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if math.log10(high / low) <= 3 else (1,)
        every = max(1, (last - first) // 8)
        tens = range(first, last + 1, every)
        return [step * 10.0**ten for ten in tens for step in steps if low <= step * 10.0**ten <= high]
    raw = (high - low) / 6
    ten = 10.0 ** math.floor(math.log10(raw))
    step = next(times * ten for times in (1, 2, 5, 10) if times * ten >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.10g}" if value == round(value) else f"{value:.3g}"


def _px(value: float) -> str:
    return f"{value:.1f}"


def _grid(x: _Scale, y: _Scale) -> list[str]:
    lines = []
    for value in ticks(x.low, x.high, x.axis.logarithmic):
        at = _px(x.at(value))
        lines.append(_line(at, _px(y.until_px), at, _px(y.from_px), "grid", "#e3e3e3", 1))
        lines.append(_text(at, _px(y.from_px + 18), _number(value), "middle", 12))
    for value in ticks(y.low, y.high, y.axis.logarithmic):
        at = _px(y.at(value))
        lines.append(_line(_px(x.from_px), at, _px(x.until_px), at, "grid", "#e3e3e3", 1))
        lines.append(_text(_px(x.from_px - 8), _px(y.at(value) + 4), _number(value), "end", 12))
    left, right, bottom, top = _px(x.from_px), _px(x.until_px), _px(y.from_px), _px(y.until_px)
    lines.append(_line(left, bottom, right, bottom, "edge", "#666666", 1.2))
    lines.append(_line(left, top, left, bottom, "edge", "#666666", 1.2))
    lines.append(_text(_px((x.from_px + x.until_px) / 2), _px(HEIGHT - 14), x.axis.label, "middle", 13))
    middle = _px((y.from_px + y.until_px) / 2)
    turned = f'transform="rotate(-90 18 {middle})"'
    lines.append(_text("18", middle, y.axis.label, "middle", 13, turned))
    return lines


def _line(x1: str, y1: str, x2: str, y2: str, kind: str, colour: str, width: float) -> str:
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line class="{kind}" {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: str, y: str, text: str, anchor: str, size: int, more: str = "") -> str:
    return (
        f'<text class="ink" x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="#1c1c1c" {more}>'
        f"{escape(text)}</text>"
    )


def _series(series: Series, number: int, x: _Scale, y: _Scale) -> list[str]:
    colour = number % len(LIGHT)
    light, width = LIGHT[colour], 2.6 if series.strong else 1.4
    dash = ' stroke-dasharray="6 4"' if series.dashed else ""
    points = [p for p in series.points if _drawable(x.axis, p.x) and _drawable(y.axis, p.y)]
    drawn: list[str] = []
    if series.line and len(points) > 1:
        path = " ".join(f"{_px(x.at(p.x))},{_px(y.at(p.y))}" for p in points)
        drawn.append(
            f'<polyline class="s{colour}" points="{path}" fill="none" stroke="{light}" '
            f'stroke-width="{width}"{dash}/>'
        )
    for p in points:
        at_x, at_y = x.at(p.x), y.at(p.y)
        if p.x_bar is not None:
            drawn.append(_bar(x.at(p.x_bar[0]), at_y, x.at(p.x_bar[1]), at_y, colour))
        if p.y_bar is not None:
            drawn.append(_bar(at_x, y.at(p.y_bar[0]), at_x, y.at(p.y_bar[1]), colour))
        if not series.dashed:
            drawn.append(_mark(at_x, at_y, number, 5.0 if series.strong else 3.8))
        if p.label:
            drawn.append(_text(_px(at_x + 7), _px(at_y - 6), p.label, "start", 10))
    return drawn


def _bar(x1: float, y1: float, x2: float, y2: float, colour: int) -> str:
    return (
        f'<line class="s{colour}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}" '
        f'stroke="{LIGHT[colour]}" stroke-width="1" opacity="0.55"/>'
    )


def _mark(x: float, y: float, number: int, r: float) -> str:
    colour = number % len(LIGHT)
    paint = f'class="f{colour}" fill="{LIGHT[colour]}"'
    match MARKS[number // len(LIGHT) % len(MARKS)]:
        case "circle":
            return f'<circle {paint} cx="{_px(x)}" cy="{_px(y)}" r="{r}"/>'
        case "square":
            return f'<rect {paint} x="{_px(x - r)}" y="{_px(y - r)}" width="{2 * r}" height="{2 * r}"/>'
        case "diamond":
            corners = [(x, y - 1.3 * r), (x + 1.3 * r, y), (x, y + 1.3 * r), (x - 1.3 * r, y)]
        case _:
            corners = [(x, y - 1.2 * r), (x + 1.2 * r, y + r), (x - 1.2 * r, y + r)]
    path = " ".join(f"{_px(a)},{_px(b)}" for a, b in corners)
    return f'<polygon {paint} points="{path}"/>'


def _legend(every: Sequence[Series]) -> list[str]:
    drawn = []
    x = WIDTH - RIGHT + 18
    for number, series in enumerate(every):
        y = TOP + 10 + 19 * number
        colour = number % len(LIGHT)
        dash = ' stroke-dasharray="6 4"' if series.dashed else ""
        if series.line:
            drawn.append(
                f'<line class="s{colour}" x1="{x}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="{LIGHT[colour]}" '
                f'stroke-width="{2.6 if series.strong else 1.4}"{dash}/>'
            )
        if not series.dashed:
            drawn.append(_mark(x + 10, y, number, 4.0))
        drawn.append(_text(str(x + 27), str(y + 4), series.name, "start", 12))
    return drawn


def _style() -> str:
    dark = ".paper{fill:#14171a}.ink{fill:#e8e8e8}.grid{stroke:#33383d}.edge{stroke:#9a9a9a}"
    dark += "".join(f".s{n}{{stroke:{c}}}.f{n}{{fill:{c}}}" for n, c in enumerate(DARK))
    return f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>"
