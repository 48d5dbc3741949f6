"""The charts of README and docs as SVG.

``benchmarks/tables.py`` writes them with the tables. A picture is text, the same bytes each time, on a white card that
can be read on a light and on a dark page. One colour a method: cores orange, LoRA navy, the base model grey.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from frozencore.tune.figures import BLACK, BLUE, GREY, NAVY, ORANGE

__all__ = [
    "BLUE",
    "GREY",
    "NAVY",
    "ORANGE",
    "Kind",
    "Panel",
    "Point",
    "against",
    "bars",
    "chart",
    "planes",
]

INK, LIGHT, SOFT = BLACK, "#dddddd", "#666666"  # words, a fill, words that explain
LINE, TITLE = 26, 32  # a row of a chart, and the height of a title, in pixels


@dataclass(frozen=True)
class Point:
    """A value with its interval, None where a method was not run."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """A heading, and a value for each row of the chart; ``zero`` draws a line at no difference."""

    heading: str
    points: Sequence[Point | None]
    digits: int
    zero: bool = False


# ----------------------------------------------------------------------------------------------------------- the pieces


def card(width: int, height: int, title: str, about: str, parts: Iterable[str]) -> str:
    """A whole picture on its white card, below its message; ``about`` is for those who cannot see it."""
    height += TITLE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(about)}" font-family="Helvetica, Arial, sans-serif" font-size="14">'
    )
    arrow = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    top = [box(0, 0, width, height, "#ffffff", radius=8), words(16, 28, title, size=16, bold=True)]
    return "\n".join([head, arrow, *top, f'<g transform="translate(0 {TITLE})">', *parts, "</g>", "</svg>", ""])


def box(x: float, y: float, width: float, height: float, fill: str, *, edge: str = "none", radius: int = 2) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" stroke="{edge}"/>'
    )


def words(
    x: float, y: float, text: str, *, at: str = "start", colour: str = INK, size: int = 14, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{colour}" font-size="{size}"{weight}>{escape(text)}</text>'
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="{width:g}"/>'


# ----------------------------------------------------------------------------------------------------------- the charts


def chart(
    labels: Sequence[str], colours: Sequence[str], panels: Sequence[Panel], title: str, about: str, note: str
) -> str:
    """A row a method, beside each other a panel a measure: a dot with its interval and its number."""
    left, wide, gap = 215, 255, 32
    width = left + len(panels) * (wide + gap)
    top, bottom = 44, 44 + LINE * len(labels)
    parts = [
        words(left - 14, top + LINE * row + 18, label, at="end", colour=INK if colour != GREY else SOFT)
        for row, (label, colour) in enumerate(zip(labels, colours, strict=True))
    ]
    for number, panel in enumerate(panels):
        x0 = left + number * (wide + gap)
        parts += [words(x0, 26, panel.heading), *_dots(panel, colours, x0, wide - 62, top, bottom)]
    parts.append(words(16, bottom + 26, note, size=12, colour=SOFT))
    return card(width, bottom + 40, title, about, parts)


def _dots(panel: Panel, colours: Sequence[str], x0: float, wide: float, top: float, bottom: float) -> Iterable[str]:
    found = [point for point in panel.points if point]
    least = min([point.low for point in found] + [0.0] * panel.zero)
    most = max([point.high for point in found] + [0.0] * panel.zero)

    def place(value: float) -> float:
        return round(x0 + wide * (0.03 + 0.94 * (value - least) / (most - least)), 1)

    for row in range(len(panel.points)):
        yield line(x0, top + LINE * row + 13, x0 + wide, top + LINE * row + 13, "#eeeeee")
    if panel.zero:
        yield line(place(0), top, place(0), bottom, GREY)
    for row, (point, colour) in enumerate(zip(panel.points, colours, strict=True)):
        y = top + LINE * row + 13
        if point is None:
            yield words(x0 + wide + 8, y + 5, "not run", colour=GREY, size=12)
            continue
        number = f"{point.value:{'+' if panel.zero else ''}.{panel.digits}f}"
        yield line(place(point.low), y, place(point.high), y, colour, 2.5)
        yield f'<circle cx="{place(point.value):g}" cy="{y:g}" r="5" fill="{colour}"/>'
        yield words(x0 + wide + 8, y + 5, number.replace("-", "−"), colour=INK, size=13)


def bars(
    labels: Sequence[str], colours: Sequence[str], panels: Sequence[Panel], title: str, about: str, note: str
) -> str:
    """A row a way of serving, beside each other a panel a measure: a bar from zero with its number."""
    left, wide, gap = 215, 255, 32
    top, bottom = 44, 44 + 34 * len(labels)
    parts = [words(left - 14, top + 34 * row + 21, label, at="end") for row, label in enumerate(labels)]
    for number, panel in enumerate(panels):
        x0, most = left + number * (wide + gap), max(point.high for point in panel.points if point)
        parts.append(words(x0, 26, panel.heading))
        for row, (point, colour) in enumerate(zip(panel.points, colours, strict=True)):
            y = top + 34 * row
            if point is None:
                parts.append(words(x0, y + 21, "has no slots", colour=SOFT, size=12))
                continue
            length = max(2.0, round((wide - 62) * point.value / most, 1))
            parts += [
                box(x0, y + 5, length, 22, colour),
                words(x0 + length + 8, y + 21, f"{point.value:,.0f}", size=13),
            ]
    parts.append(words(16, bottom + 26, note, size=12, colour=SOFT))
    return card(left + len(panels) * (wide + gap), bottom + 40, title, about, parts)


Segment = tuple[float, float, float, float]
"""From x, y to x, y."""


@dataclass(frozen=True)
class Kind:
    """Points of one kind, each at its abscissa with a short name, and joined: one arm at several ranks or rates."""

    label: str
    colour: str
    places: Sequence[tuple[float, str, Point]]


def planes(
    panels: Sequence[tuple[str, Sequence[Kind]]],
    abscissa: str,
    title: str,
    about: str,
    note: Sequence[str],
    *,
    of_bytes: bool,
) -> str:
    """Panels (heading, kinds) beside each other; kinds keep their colours.

    Args:
        of_bytes: The abscissa is bytes, on a logarithmic axis, where points of the same bytes are moved apart.
    """
    left, tall, gap, y0 = 44, 250, 52, 44
    wide = 310 if len(panels) > 1 else 660
    width = left + len(panels) * (wide + gap)
    parts: list[str] = []
    for column, (heading, kinds) in enumerate(panels):
        x0 = left + column * (wide + gap)
        parts += [words(x0, y0 - 16, heading), *_plane(kinds, x0, y0, wide, tall, of_bytes)]
        parts.append(words(x0 + wide / 2, y0 + tall + 36, abscissa, at="middle", size=12, colour=SOFT))
    y = y0 + tall + 64
    seen = {kind.label: kind.colour for _, kinds in panels for kind in kinds}
    for place, (label, colour) in enumerate(seen.items()):
        x = left + place % 3 * ((width - left) / 3)
        at = y + 22 * (place // 3)
        parts += [f'<circle cx="{x + 6:g}" cy="{at:g}" r="5" fill="{colour}"/>', words(x + 18, at + 5, label, size=13)]
    y += 22 * -(-len(seen) // 3) + 8
    parts += [words(16, y + 18 * place, text, size=12, colour=SOFT) for place, text in enumerate(note)]
    return card(width, round(y + 18 * len(note)), title, about, parts)


def _plane(kinds: Sequence[Kind], x0: float, y0: float, wide: float, tall: float, of_bytes: bool) -> Iterable[str]:
    found = [place for kind in kinds for place in kind.places]
    scale: Callable[[float], float] = log10 if of_bytes else float
    least, most = (pick(scale(x) for x, _, _ in found) for pick in (min, max))
    low, high = min(point.low for _, _, point in found), max(point.high for _, _, point in found)
    margin = 0.1 * (high - low)
    low, high = low - margin, high + margin

    def height(value: float) -> float:
        return round(y0 + tall * (high - value) / (high - low), 1)

    def across(x: float) -> float:
        return round(x0 + 42 + (wide - 90) * (scale(x) - least) / (most - least), 1)

    yield box(x0, y0, wide, tall, "none", edge=LIGHT)
    for tick in _ticks(low, high):
        yield line(x0, height(tick), x0 + wide, height(tick), "#eeeeee")
        yield words(x0 - 6, height(tick) + 4, f"{tick:g}".replace("-", "−"), at="end", size=11)
    for x, text in _bytes(least, most) if of_bytes else [(tick, f"{tick:g}") for tick in _ticks(least, most)]:
        yield words(across(x), y0 + tall + 18, text, at="middle", size=11, colour=SOFT)
        yield line(across(x), y0 + tall, across(x), y0 + tall + 4, GREY)
    taken: list[float] = []
    drawn: list[Segment] = []
    named: list[tuple[str, float, Sequence[float]]] = []
    for kind in kinds:
        joined = []
        for x, name, point in kind.places:
            beside = (across(x) + sign * shift for shift in count(0, 14) for sign in (1, -1))
            at = next(at for at in beside if not of_bytes or all(abs(at - other) >= 14 for other in taken))
            taken.append(at)
            top, middle, bottom = height(point.high), height(point.value), height(point.low)
            named.append((name, at, (top, middle, bottom)))
            joined.append((at, middle))
            drawn += [(at, bottom, at, top), (at - 5, middle, at + 5, middle)]
            yield line(at, bottom, at, top, kind.colour, 2)
            yield f'<circle cx="{at:g}" cy="{middle:g}" r="5" fill="{kind.colour}"/>'
        for one, other in pairwise(joined):
            drawn.append((*one, *other))
            yield line(*one, *other, kind.colour)
    for name, at, heights in named:
        left, base = _free(drawn, name, at, *heights)
        drawn += [(left, base - 4 * row, left + 7 * len(name), base - 4 * row) for row in range(3)]
        yield words(left, base, name, size=12)


def against(
    panels: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    ordinate: str,
    title: str,
    about: str,
    note: Sequence[str],
) -> str:
    """Panels (label of the abscissa, points) with one logarithmic scale; on the line both are equal."""
    left, wide, gap, y0 = 56, 230, 44, 40
    width = left + len(panels) * (wide + gap)
    every = [log10(value) for _, points in panels for point in points for value in point]
    least, most = min(every) - 0.06, max(every) + 0.06

    def share(value: float) -> float:
        return round(wide * (log10(value) - least) / (most - least), 1)

    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if least <= log10(tick) <= most]
    parts = [words(16, y0 - 14, ordinate, size=12, colour=SOFT)]
    for column, (label, points) in enumerate(panels):
        x0 = left + column * (wide + gap)
        parts.append(box(x0, y0, wide, wide, "none", edge=LIGHT))
        for tick in ticks:
            x, y = x0 + share(tick), y0 + wide - share(tick)
            parts += [line(x0, y, x0 + wide, y, "#eeeeee"), line(x, y0, x, y0 + wide, "#eeeeee")]
            parts += [words(x0 - 6, y + 4, f"{tick:g}", at="end", size=11)] if column == 0 else []
            parts.append(words(x, y0 + wide + 16, f"{tick:g}", at="middle", size=11))
        parts.append(line(x0, y0 + wide, x0 + wide, y0, GREY))
        parts += [
            f'<circle cx="{x0 + share(x):g}" cy="{y0 + wide - share(y):g}" r="4" fill="{ORANGE}" fill-opacity=".8"/>'
            for x, y in points
        ]
        parts.append(words(x0 + wide / 2, y0 + wide + 36, label, at="middle", size=12, colour=SOFT))
    y = y0 + wide + 64
    parts += [words(16, y + 18 * place, text, size=12, colour=SOFT) for place, text in enumerate(note)]
    return card(width, y + 18 * len(note), title, about, parts)


def _ticks(low: float, high: float) -> list[float]:
    """At most seven round values of a range."""
    step = next(one for one in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if (high - low) / one <= 6)
    return [round(tick * step, 3) for tick in range(ceil(low / step), floor(high / step) + 1)]


def _bytes(least: float, most: float) -> Iterable[tuple[float, str]]:
    """Round numbers of bytes between two powers of ten."""
    found = [times * 10**power for power in range(floor(least), ceil(most)) for times in (1, 2, 5)]
    return [
        (size, f"{size / 1e6:g} MB" if size >= 1e6 else f"{size / 1e3:g} KB")
        for size in found
        if least <= log10(size) <= most
    ]


def _free(
    drawn: Sequence[Segment], name: str, at: float, top: float, middle: float, bottom: float
) -> tuple[float, float]:
    """Where a point's name begins: above, below or beside the point, where it meets the fewest lines."""
    long = 6.5 * len(name)
    above_or_below = [(at - long / 2, base) for base in (top - 6, bottom + 14, middle - 10, middle + 18)]
    beside = [(left, middle + shift) for shift in (4, -6, 14, -16, 24) for left in (at + 9, at - 9 - long)]

    def meets(place: tuple[float, float]) -> int:
        left, base = place
        steps = [
            (x + (to_x - x) * step / 50, y + (to_y - y) * step / 50) for x, y, to_x, to_y in drawn for step in range(51)
        ]
        return sum(left - 2 <= x <= left + long + 2 and base - 11 <= y <= base + 2 for x, y in steps)

    left, base = min(above_or_below + beside, key=meets)
    return round(left, 1), round(base, 1)
