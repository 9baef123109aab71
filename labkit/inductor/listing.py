"""A program to look at: collectives, waits and compute, as text or, in a notebook, in colours."""

import re
from collections.abc import Iterator, Mapping
from html import escape

from labkit.inductor.program import InductorProgram, ProgramLine

KIND_COLOURS = {
    "collective": "#F0E442",
    "wait": "#D55E00",
    "kernel": "#E69F00",
    "extern": "#E69F00",
}
"""All-reduce, exposed and backward, as on a time line (Okabe and Ito's palette); black text is
legible on each.
"""
PLAIN_COLOUR = "#E8E8E8"
HIGHLIGHT_COLOURS = {"asks": "#F7F0A0", "waits": "#F5C9A8", "hides": "#FBE3B3"}
"""The same colours, paler, for the rows of the bucket that somebody looks at."""
MAX_BUFFERS = 4
_FOLDER_PATTERN = re.compile(r"""(?<![\w/.])/(?:[\w.+@-]+/)+""")
_KERNEL_PATH_PATTERN = re.compile(r"^\s*# kernel path: .*\n", re.MULTILINE)
_LABEL_STYLE = (
    "display:inline-block;width:6.5em;padding:0 .5em;margin:0 1em;color:black;background:"
)
_HIGHLIGHT_STYLE = "{color:black;background:"
_SCROLL_STYLE = (
    "overflow-x:auto;white-space:pre;line-height:1.5;font-size:13px;font-family:monospace"
)


class ProgramListing:
    """What a program computes, asks for and waits for, a line each.

    Attributes:
        code: the text as inductor wrote it.
        names: what to call buffers beside their own name, if known: {"arg4_1": "fc4.weight"}.
    """

    def __init__(self, code: str, names: Mapping[str, str] | None = None):
        self.code, self.names = code, dict(names or {})
        self._program = InductorProgram(code)

    @property
    def full_text(self) -> str:
        """The whole program, without folders and names of cached files."""
        return _FOLDER_PATTERN.sub("", _KERNEL_PATH_PATTERN.sub("", self.code))

    def __repr__(self) -> str:
        return "\n".join(
            f"{line.number:>5}  {kind:<10}  {text}" for line, kind, text in self._program_rows()
        )

    def _repr_html_(self) -> str:
        """Point at a line that asks or waits, or reach it by Tab: its request and what hides it are
        marked, by CSS.
        """
        rows = "".join(
            f"<div{self._row_attributes(line)}>{line.number:>5}"
            f'<span style="{_LABEL_STYLE}{KIND_COLOURS.get(line.kind, PLAIN_COLOUR)}">'
            f"{kind}</span>{escape(text)}</div>"
            for line, kind, text in self._program_rows()
        )
        return (
            f"<style>{self._css_rules()}</style>"
            f'<div class="labkit-program" style="{_SCROLL_STYLE}">{rows}</div>'
            f"<details><summary>the whole program, {len(self.full_text.splitlines())}"
            " lines</summary>"
            f'<pre style="{_SCROLL_STYLE};max-height:30em;overflow-y:auto">'
            f"{escape(self._text_with_line_numbers())}</pre></details>"
        )

    def _row_attributes(self, line: ProgramLine) -> str:
        """Classes of a row, by bucket: asked or waited for here, which takes the focus, or hidden
        by this.
        """
        classes, title = [], ""
        for index, request in enumerate(self._program.all_reduces):
            hiding = self._program.overlap_lines(request)
            named = [("asks", [request.line]), ("waits", request.waits), ("hides", hiding)]
            classes += [f"{name}-{index}" for name, lines in named if line in lines]
            if line in (request.line, *request.waits):
                between = (
                    f"{len(hiding)} lines compute meanwhile"
                    if hiding
                    else "nothing computes meanwhile"
                )
                title = f"bucket {index}, asked for in line {request.line.number}: {between}"
        found = f' class="{" ".join(classes)}"' if classes else ""
        return found + (f' tabindex="0" title="{title}"' if title else "")

    def _css_rules(self) -> str:
        """What is marked while somebody points at a row, or has the focus on it."""
        rules = []
        for index in range(len(self._program.all_reduces)):
            looked_at = ",".join(
                f".{name}-{index}:{how}" for name in ("asks", "waits") for how in ("hover", "focus")
            )
            inside = f".labkit-program:has({looked_at})"
            rules += [
                f"{inside} .{name}-{index}{_HIGHLIGHT_STYLE}{colour}}}"
                for name, colour in HIGHLIGHT_COLOURS.items()
            ]
        return "".join(rules)

    def _text_with_line_numbers(self) -> str:
        """The whole program with the numbers of its lines, from ``def call`` on."""
        lines = self.full_text.splitlines()
        start = next(
            index for index, line in enumerate(lines) if line.lstrip().startswith("def call(")
        )
        numbered = enumerate(lines, 1 - start)
        return "\n".join(f"{number if number > 0 else '':>5}  {line}" for number, line in numbered)

    def _program_rows(self) -> Iterator[tuple[ProgramLine, str, str]]:
        """Lines to show, each with its kind and as a short call with the bucket that it asks or
        waits for.
        """
        notes = {}
        for index, request in enumerate(self._program.all_reduces):
            notes[request.line.number] = f"  asks for bucket {index}"
            notes |= {wait.number: f"  waits for bucket {index}" for wait in request.waits}
        for line in self._program.lines:
            kind = "return" if line.name == "return" else str(line.kind)
            if kind in (*KIND_COLOURS, "return"):
                names = [self._buffer_label(buffer) for buffer in line.buffers[:MAX_BUFFERS]]
                names += (
                    [f"... {len(line.buffers)} in all"] if len(line.buffers) > MAX_BUFFERS else []
                )
                yield line, kind, f"{line.name}({', '.join(names)}){notes.get(line.number, '')}"

    def _buffer_label(self, buffer: str) -> str:
        return f"{buffer}: {self.names[buffer]}" if buffer in self.names else buffer
