"""Figures as SVG by the few methods of matplotlib that the explorers call, in plain Python.

What is drawn is what the explorers ask for, in matplotlib's units: lengths in points, places in data. Looks that none
of them asks for are not there; an unknown method is an AttributeError, so that nothing is left out in silence.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from types import SimpleNamespace
from typing import Any

DPI = 100
POINT = DPI / 72
CYCLE = ("#1f77b4", "#ff7f0e", "#2ca02c")
ANCHORS = {"left": "start", "center": "middle", "right": "end"}
# How far below its place a text's baseline is, as a share of the font's size.
DROPS = {"center": 0.35, "bottom": -0.2, "top": 0.8, "baseline": 0.0}
LETTER_WIDTH = 0.62
DASHES = {"--": "5,3", ":": "1.5,2.5", "-": "", "none": ""}
NAMED_COLOURS = {"white": "#ffffff", "black": "#000000", "none": "none"}
NAMES = {
    "lw": "linewidth",
    "ls": "linestyle",
    "ms": "markersize",
    "mec": "markeredgecolor",
    "mfc": "markerfacecolor",
}


def to_rgb(colour: Any) -> tuple[float, float, float]:
    """Return a colour's channels, from 0 to 1."""
    if isinstance(colour, str):
        colour = NAMED_COLOURS.get(colour, colour)
        return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(colour[:3])


def paint(colour: Any, attribute: str) -> str:
    """Write a colour as an attribute; a pair is a colour and its opacity."""
    opacity = ""
    if isinstance(colour, tuple) and len(colour) == 2:
        colour, strength = colour
        opacity = f' {attribute}-opacity="{strength}"'
    if not isinstance(colour, str):
        colour = "#" + "".join(f"{round(255 * channel):02x}" for channel in colour[:3])
    return f' {attribute}="{NAMED_COLOURS.get(colour, colour)}"{opacity}'


def number(value: float) -> str:
    """Write a place on the page, in pixels."""
    return f"{value:.1f}".removesuffix(".0")


def nice_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Return round values between two, at most ``most`` steps apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the ticks of a linear axis, all with as many decimals as the finest needs."""
    digits = next(digits for digits in range(12) if all(abs(round(each, digits) - each) < 1e-9 for each in ticks))
    return [f"{each:.{digits}f}".replace("-", "\N{MINUS SIGN}") for each in ticks]


class Handle(SimpleNamespace):
    """What a legend shows: a patch or a line."""


def patch(**look: Any) -> Handle:
    """Stand in for matplotlib.patches.Patch."""
    return Handle(shape="patch", **look)


def line_2d(_x: Any, _y: Any, **look: Any) -> Handle:
    """Stand in for matplotlib.lines.Line2D."""
    return Handle(shape="line", **look)


class PercentFormatter:
    """Stand in for matplotlib.ticker.PercentFormatter."""

    def __init__(self, whole: float):
        self.whole = whole

    def __call__(self, value: float) -> str:
        return f"{100 * value / self.whole:.0f}%"


class Text:
    """A text at a place of the data, moved by a shift in points."""

    def __init__(self, place: tuple[Any, float], words: str, shift: tuple[float, float] = (0, 0), **look: Any):
        self.place, self.words, self.shift = place, words, shift
        self.look = {"ha": "left", "va": "baseline", "fontsize": 10, "color": "black"} | look

    def set(self, x: float | None = None, **look: Any) -> None:
        """Move the text, or change its look."""
        if x is not None:
            self.place = (x, self.place[1])
        self.look |= look

    def set_fontweight(self, weight: str) -> None:
        """Make the text bold."""
        self.look["weight"] = weight

    def set_fontsize(self, size: float) -> None:
        """Change the size of the letters, in points."""
        self.look["fontsize"] = size

    def set_bbox(self, box: dict[str, Any]) -> None:
        """Put white behind the letters."""
        self.look["bbox"] = box


def text_svg(x: float, y: float, text: Text, *, turned: bool = False) -> str:
    """Write a text, of one line or more, at a place of the page."""
    look, size = text.look, (text.look["fontsize"] or 10) * POINT
    lines = str(text.words).split("\n")
    top = y + DROPS[look["va"]] * size - {"bottom": 1, "center": 0.5}.get(look["va"], 0) * 1.2 * size * (len(lines) - 1)
    shared = f' text-anchor="{ANCHORS[look["ha"]]}" font-size="{number(size)}"{paint(look["color"], "fill")}'
    if look.get("weight") == "bold":
        shared += ' font-weight="bold"'
    if "bbox" in look:
        # A white edge of the letters has the effect of matplotlib's box.
        shared += ' stroke="#ffffff" stroke-width="3" paint-order="stroke"'
    if turned:
        shared += f' transform="rotate(-90 {number(x)} {number(y)})"'
    return "".join(
        f'<text x="{number(x)}" y="{number(top + 1.2 * size * row)}"{shared} xml:space="preserve">{escape(line)}</text>'
        for row, line in enumerate(lines)
    )


class Axis:
    """One of the two directions: its limits, its scale, its ticks."""

    def __init__(self) -> None:
        self.scale, self.name, self.fontsize = "linear", "", 10.0
        self.limits: list[float | None] = [None, None]
        self.seen: list[float] = []
        self.sticky: set[float] = set()
        self.ticks: list[float] | None = None
        self.labels: list[Text] = []
        self.formatter: Any = None
        self.inverted, self.margin, self.steps, self.length = False, 0.05, 9, 3.5
        self.minor = True
        self.label = SimpleNamespace(set_fontsize=self._set_fontsize)

    def _set_fontsize(self, size: float) -> None:
        self.fontsize = size

    def set_major_formatter(self, formatter: Any) -> None:
        """Write the ticks by a function."""
        self.formatter = formatter

    def forward(self, value: float) -> float:
        """Return a value on the scale of the axis."""
        return math.log10(value) if self.scale == "log" else value

    def ends(self) -> tuple[float, float]:
        """Return the limits: given ones, or those that hold everything drawn."""
        seen = [value for value in self.seen if self.scale != "log" or value > 0] or [0.0, 1.0]
        low, high = min(seen), max(seen)
        room = self.margin * (self.forward(high) - self.forward(low))
        raw = (self.forward(low) - room * (low not in self.sticky), self.forward(high) + room)
        free = tuple(10**each for each in raw) if self.scale == "log" else raw
        first, last = (given if given is not None else own for given, own in zip(self.limits, free, strict=True))
        return (last, first) if self.inverted else (first, last)

    def share(self, value: float) -> float:
        """Return where a value is between the ends, 0 to 1."""
        first, last = map(self.forward, self.ends())
        return (self.forward(value) - first) / ((last - first) or 1.0)

    def shown_ticks(self) -> list[tuple[float, Text]]:
        """Return the ticks within the limits, with their labels."""
        low, high = sorted(self.ends())
        if self.ticks is not None:
            return list(zip(self.ticks, self.labels, strict=True))
        if self.scale == "log":
            powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
            powers = powers[:: 1 + len(powers) // 8]
            raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
            return [(10.0**power, Text((0, 0), "10" + str(power).translate(raised))) for power in powers]
        ticks = nice_ticks(low, high, self.steps)
        texts = [self.formatter(each) for each in ticks] if callable(self.formatter) else tick_texts(ticks)
        return [(tick, Text((0, 0), text)) for tick, text in zip(ticks, texts, strict=True)]


class Axes:
    """One panel; its box is in pixels of the page."""

    def __init__(self, figure: "Figure", left: float, top: float, width: float, height: float):
        self.figure, self.box = figure, (left, top, width, height)
        self.xaxis, self.yaxis = Axis(), Axis()
        self.texts: list[Text] = []
        self.shapes: list[tuple[str, Any, dict[str, Any]]] = []
        self.handles: list[Handle] = []
        self.legends: list[tuple[list[Handle], dict[str, Any]]] = []
        self.title = ""
        self.hidden: set[str] = set()
        self.spines = _Spines(self.hidden)

    # What explorers call.

    def bar(self, x: float, height: float, width: float, bottom: float = 0.0, **look: Any) -> None:
        """Draw a bar from ``bottom`` up."""
        self._box(x - width / 2, bottom, width, height, look)
        self.yaxis.sticky.add(bottom)

    def barh(self, y: float, width: float, height: float, left: float = 0.0, **look: Any) -> None:
        """Draw a bar from ``left`` to the right."""
        self._box(left, y - height / 2, width, height, look)
        self.xaxis.sticky.add(left)

    def broken_barh(self, spans: Iterable[tuple[float, float]], row: tuple[float, float], **look: Any) -> None:
        """Draw pieces of a bar, each given by its start and its width."""
        look["facecolor"] = look.pop("facecolors", look.get("facecolor"))
        for start, width in spans:
            self._box(start, row[0], width, row[1], look)

    def _box(self, x: float, y: float, width: float, height: float, look: dict[str, Any]) -> None:
        look = {NAMES.get(name, name): value for name, value in look.items()}
        self.shapes.append(("box", (x, y, width, height), look))
        self.xaxis.seen += [x, x + width]
        self.yaxis.seen += [y, y + height]

    def plot(self, xs: Any, ys: Any, mark: str = "", **look: Any) -> None:
        """Draw a line, or marks alone where ``mark`` is one."""
        look = {NAMES.get(name, name): value for name, value in look.items()}
        xs, ys = ([each] if isinstance(each, int | float) else list(each) for each in (xs, ys))
        look.setdefault("color", CYCLE[len(self.handles) % len(CYCLE)])
        look |= {"marker": mark, "linestyle": "none"} if mark else {}
        self.shapes.append(("line", (xs, ys), look))
        self.xaxis.seen += xs
        self.yaxis.seen += ys
        if "label" in look:
            self.handles.append(Handle(shape="line", **look))

    def text(self, x: float, y: float, words: str, **look: Any) -> Text:
        """Write words at a place of the data."""
        self.texts.append(Text((x, y), words, **look))
        return self.texts[-1]

    def annotate(self, words: str, point: Any, shift: Any, textcoords: str = "", **look: Any) -> Text:
        """Write words near a place of the data, moved by a shift in points."""
        if textcoords != "offset points":
            raise NotImplementedError(f"texts at {textcoords}")
        self.texts.append(Text(point, words, shift, **look))
        return self.texts[-1]

    def legend(self, handles: list[Handle] | None = None, **look: Any) -> None:
        """Put a legend above the panel."""
        self.legends = [(self.handles if handles is None else handles, look)]

    def set(self, **values: Any) -> None:
        """Call the setter of each name."""
        if "yticks" in values:
            self.set_yticks(values.pop("yticks"), values.pop("yticklabels"))
        for name, value in values.items():
            pair = isinstance(value, tuple) and name.endswith("lim")
            getattr(self, f"set_{name}")(*value if pair else (value,))

    def set_xlabel(self, name: str, fontsize: float = 10) -> None:
        """Name the horizontal axis."""
        self.xaxis.name, self.xaxis.fontsize = name, fontsize

    def set_ylabel(self, name: str, fontsize: float = 10) -> None:
        """Name the vertical axis."""
        self.yaxis.name, self.yaxis.fontsize = name, fontsize

    def set_xlim(self, left: float | None = None, right: float | None = None) -> None:
        """Set the ends of the horizontal axis."""
        self.xaxis.limits = [left, right]

    def set_ylim(self, bottom: float | None = None, top: float | None = None) -> None:
        """Set the ends of the vertical axis."""
        self.yaxis.limits = [bottom, top]

    def set_xscale(self, scale: str) -> None:
        """Make the horizontal axis logarithmic."""
        self.xaxis.scale = scale

    def set_yscale(self, scale: str) -> None:
        """Make the vertical axis logarithmic."""
        self.yaxis.scale = scale

    def set_xticks(self, ticks: Iterable[float], labels: Iterable[str]) -> None:
        """Mark these places of the horizontal axis."""
        self.xaxis.ticks, self.xaxis.labels = list(ticks), [Text((0, 0), each) for each in labels]
        self.xaxis.seen += self.xaxis.ticks

    def set_yticks(self, ticks: Iterable[float], labels: Iterable[str]) -> None:
        """Mark these places of the vertical axis."""
        self.yaxis.ticks, self.yaxis.labels = list(ticks), [Text((0, 0), each) for each in labels]
        self.yaxis.seen += self.yaxis.ticks

    def set_title(self, title: str, **_look: Any) -> None:
        """Write a title above the panel, at its left."""
        self.title = title

    def get_xticklabels(self) -> list[Text]:
        """Return the labels of the horizontal axis."""
        return self.xaxis.labels

    def get_yticklabels(self) -> list[Text]:
        """Return the labels of the vertical axis."""
        return self.yaxis.labels

    def tick_params(self, axis: str, length: float) -> None:
        """Set how long the ticks are."""
        (self.xaxis if axis == "x" else self.yaxis).length = length

    def locator_params(self, axis: str, nbins: int) -> None:
        """Set how many ticks there are at most."""
        (self.xaxis if axis == "x" else self.yaxis).steps = nbins

    def margins(self, y: float) -> None:
        """Set how much room is above what is drawn, as a share."""
        self.yaxis.margin = y

    def minorticks_off(self) -> None:
        """Leave out what is between the ticks, which is never drawn here."""

    def invert_yaxis(self) -> None:
        """Have values grow downwards."""
        self.yaxis.inverted = True

    # How it is written.

    def _at(self, x: float, y: float) -> tuple[float, float]:
        left, top, width, height = self.box
        return left + width * self.xaxis.share(x), top + height * (1 - self.yaxis.share(y))

    def svg(self) -> str:
        """Write the panel."""
        left, top, width, height = self.box
        clip = f"clip{id(self) % 10**8}"
        written = [f'<clipPath id="{clip}"><rect x="{number(left)}" y="{number(top - 3)}"']
        written += [f' width="{number(width + 3)}" height="{number(height + 3)}"/></clipPath>']
        written += [
            f'<g clip-path="url(#{clip})">',
            *(self._shape(*shape) for shape in self.shapes),
            "</g>",
        ]
        written += self._frame()
        for text in self.texts:
            x, y = self._at(*text.place)
            written.append(text_svg(x + text.shift[0] * POINT, y - text.shift[1] * POINT, text))
        if self.title:
            written.append(text_svg(left, top - 8, Text((0, 0), self.title, fontsize=9)))
        written += [self._legend(*legend) for legend in self.legends]
        return "".join(written)

    def _shape(self, kind: str, where: Any, look: dict[str, Any]) -> str:
        if kind == "box":
            x, y, width, height = where
            (first, upper), (last, lower) = self._at(x, y + height), self._at(x + width, y)
            first, last, upper, lower = (
                min(first, last),
                max(first, last),
                min(upper, lower),
                max(upper, lower),
            )
            fill = look.get("facecolor", look.get("color")) if look.get("fill", True) else "none"
            size = f'width="{number(last - first)}" height="{number(lower - upper)}"'
            return f'<rect x="{number(first)}" y="{number(upper)}" {size}{paint(fill, "fill")}{stroke(look)}/>'
        points = [self._at(x, y) for x, y in zip(*where, strict=True)]
        drawn = ""
        if look.get("linestyle", "-") != "none" and len(points) > 1:
            path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
            line = {"edgecolor": look["color"], "linewidth": 1.5} | look
            drawn = f'<polyline points="{path}" fill="none"{stroke(line)}/>'
        if look.get("marker"):
            radius = look.get("markersize", 6) / 2 * POINT
            fill = look.get("markerfacecolor", look["color"])
            edge = stroke({"edgecolor": look.get("markeredgecolor", look["color"]), "linewidth": 1})
            drawn += "".join(
                f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"{paint(fill, "fill")}{edge}/>'
                for x, y in points
            )
        return drawn

    def _frame(self) -> list[str]:
        left, top, width, height = self.box
        bottom, right = top + height, left + width
        edges = {"left": (left, top, left, bottom), "bottom": (left, bottom, right, bottom)}
        edges |= {"top": (left, top, right, top), "right": (right, top, right, bottom)}
        lines = [edge for name, edge in edges.items() if name not in self.hidden]
        written = []
        for tick, label in self.xaxis.shown_ticks():
            x = left + width * self.xaxis.share(tick)
            lines.append((x, bottom, x, bottom + self.xaxis.length * POINT))
            label.look |= {"ha": "center", "va": "top"}
            written.append(text_svg(x, bottom + (self.xaxis.length + 3.5) * POINT, label))
        room = 0.0
        for tick, label in self.yaxis.shown_ticks():
            y = top + height * (1 - self.yaxis.share(tick))
            lines.append((left, y, left - self.yaxis.length * POINT, y))
            label.look |= {"ha": "right", "va": "center"}
            written.append(text_svg(left - (self.yaxis.length + 3.5) * POINT, y, label))
            room = max(room, len(label.words) * LETTER_WIDTH * 10 * POINT)
        path = " ".join(f"M{number(x)} {number(y)}L{number(to_x)} {number(to_y)}" for x, y, to_x, to_y in lines)
        written.append(f'<path d="{path}" fill="none" stroke="#000000" stroke-width="1"/>')
        names = {"ha": "center", "va": "center"}
        if self.xaxis.name:
            place = (left + width / 2, bottom + 27 * POINT)
            written.append(text_svg(*place, Text((0, 0), self.xaxis.name, fontsize=self.xaxis.fontsize, **names)))
        if self.yaxis.name:
            place = (max(9.0, left - room - 20 * POINT), top + height / 2)
            name = Text((0, 0), self.yaxis.name, fontsize=self.yaxis.fontsize, **names)
            written.append(text_svg(*place, name, turned=True))
        return written

    def _legend(self, handles: list[Handle], look: dict[str, Any]) -> str:
        left, top, width, _ = self.box
        size = look.get("fontsize", 10) * POINT
        rows = -(-len(handles) // look["ncols"])
        # As matplotlib does, columns are filled one by one.
        columns = [handles[place : place + rows] for place in range(0, len(handles), rows)]
        key, space = look.get("handlelength", 2.0) * size, look.get("columnspacing", 2.0) * size
        widths = [key + 0.8 * size + LETTER_WIDTH * size * max(len(each.label) for each in own) for own in columns]
        x = left + width * look["bbox_to_anchor"][0] - (sum(widths) + space * (len(columns) - 1)) / 2
        written = []
        for own, wide in zip(columns, widths, strict=True):
            for row, handle in enumerate(own):
                y = top - (rows - row - 0.5) * 1.35 * size - 0.4 * size
                written.append(_key(handle, x, y, key, size))
                label = Text((0, 0), handle.label, fontsize=size / POINT, va="center")
                written.append(text_svg(x + key + 0.8 * size, y, label))
            x += wide + space
        return "".join(written)


def _key(handle: Handle, x: float, y: float, width: float, size: float) -> str:
    """Write what stands before a legend's words."""
    look = vars(handle)
    if handle.shape == "patch":
        fill = look.get("facecolor", look.get("color"))
        box = f'x="{number(x)}" y="{number(y - 0.35 * size)}" width="{number(width)}" height="{number(0.7 * size)}"'
        return f"<rect {box}{paint(fill, 'fill')}{stroke(look)}/>"
    line = {"edgecolor": look.get("color"), "linewidth": 1.5} | look
    return f'<path d="M{number(x)} {number(y)}h{number(width)}" fill="none"{stroke(line)}/>'


def stroke(look: dict[str, Any]) -> str:
    """Write the line around a shape."""
    width = look.get("linewidth", 1.0)
    if look.get("edgecolor") is None or not width:
        return ""
    dashes = DASHES[look.get("linestyle", "-")]
    written = f'{paint(look["edgecolor"], "stroke")} stroke-width="{number(width * POINT)}"'
    return written + (f' stroke-dasharray="{dashes}"' if dashes else "")


class _Spines:
    def __init__(self, hidden: set[str]):
        self.hidden = hidden

    def __getitem__(self, names: list[str]) -> SimpleNamespace:
        return SimpleNamespace(set_visible=lambda seen: None if seen else self.hidden.update(names))


class Figure:
    """A figure of this size in inches."""

    def __init__(self, figsize: tuple[float, float]):
        self.width, self.height = figsize[0] * DPI, figsize[1] * DPI
        self.axes: list[Axes] = []

    def subplots(
        self,
        rows: int = 1,
        columns: int = 1,
        *,
        gridspec_kw: dict[str, Any],
        width_ratios: Sequence[float] | None = None,
    ) -> Any:
        """Return panels in rows and columns: one, or a list."""
        grid = gridspec_kw
        left, right = self.width * grid["left"], self.width * grid["right"]
        top, bottom = self.height * (1 - grid["top"]), self.height * (1 - grid["bottom"])
        widths = self._split(right - left, width_ratios or [1] * columns, grid.get("wspace", 0.2))
        heights = self._split(bottom - top, grid.get("height_ratios", [1] * rows), grid.get("hspace", 0.2))
        self.axes = [Axes(self, left + x, top + y, width, height) for y, height in heights for x, width in widths]
        return self.axes if len(self.axes) > 1 else self.axes[0]

    @staticmethod
    def _split(whole: float, ratios: Sequence[float], space: float) -> list[tuple[float, float]]:
        """Return where each part begins, and its length; ``space`` is a share of the mean length."""
        mean = whole / (len(ratios) + space * (len(ratios) - 1))
        lengths = [mean * len(ratios) * each / sum(ratios) for each in ratios]
        return [(sum(lengths[:place]) + place * space * mean, length) for place, length in enumerate(lengths)]

    def svg(self, words: str) -> str:
        """Write the figure; ``words`` are for those who hear the page."""
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(words)}"'
        page = f'<rect width="{number(self.width)}" height="{number(self.height)}" fill="#ffffff"/>'
        panels = "".join(each.svg() for each in self.axes)
        return f'{head} font-family="DejaVu Sans, Verdana, sans-serif">{page}{panels}</svg>'
