"""Print a program's collectives, waits and compute, as text or, in a notebook, in colours."""

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
"""Colours as on a time line (Okabe and Ito's palette); black text is legible on each."""
PLAIN_COLOUR = "#E8E8E8"
HIGHLIGHT_COLOURS = {"asks": "#F7F0A0", "waits": "#F5C9A8", "hides": "#FBE3B3"}
"""Paler shades of the same colours, for the rows of the bucket under the pointer."""
MAX_BUFFERS = 4
_FOLDER_PATTERN = re.compile(r"""(?<![\w/.])/(?:[\w.+@-]+/)+""")
_KERNEL_PATH_PATTERN = re.compile(r"^\s*# kernel path: .*\n", re.MULTILINE)
_LABEL_STYLE = (
    "display:inline-block;width:6.5em;padding:0 .5em;margin:0 1em;color:black;background:"
)
_SCROLL_STYLE = (
    "overflow-x:auto;white-space:pre;line-height:1.5;font-size:13px;font-family:monospace"
)


class ProgramListing:
    """A program's compute, collectives and waits, one line each.

    Attributes:
        code: the text as inductor wrote it.
        names: labels for buffers, such as {"arg4_1": "fc4.weight"}.
    """

    def __init__(self, code: str, names: Mapping[str, str] | None = None):
        self.code, self.names = code, dict(names or {})
        self._program = InductorProgram(code)

    @property
    def full_text(self) -> str:
        """The whole program, without folders and names of cached files."""
        return _FOLDER_PATTERN.sub("", _KERNEL_PATH_PATTERN.sub("", self.code))

    def __repr__(self) -> str:
        rows = self._program_rows()
        return "\n".join(f"{line.number:>5}  {kind:<10}  {text}" for line, kind, text in rows)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<div{self._row_attributes(line)}>{line.number:>5}"
            f'<span style="{_LABEL_STYLE}{KIND_COLOURS.get(line.kind, PLAIN_COLOUR)}">'
            f"{kind}</span>{escape(text)}</div>"
            for line, kind, text in self._program_rows()
        )
        return (
            f"<style>{self._css_rules()}</style>"
            f'<div class="labkit-program" style="{_SCROLL_STYLE}">{rows}</div><details>'
            f"<summary>the whole program, {len(self.full_text.splitlines())} lines</summary>"
            f'<pre style="{_SCROLL_STYLE};max-height:30em;overflow-y:auto">'
            f"{escape(self._text_with_line_numbers())}</pre></details>"
        )

    def _row_attributes(self, line: ProgramLine) -> str:
        """Classes by bucket, for the CSS rules; rows that ask or wait also take the focus."""
        classes, title = [], ""
        for index, request in enumerate(self._program.all_reduces):
            hiding = self._program.overlap_lines(request)
            named = [("asks", [request.line]), ("waits", request.waits), ("hides", hiding)]
            classes += [f"{name}-{index}" for name, lines in named if line in lines]
            if line in (request.line, *request.waits):
                computing = f"{len(hiding)} lines compute" if hiding else "nothing computes"
                title = (
                    f"bucket {index}, asked for in line {request.line.number}: "
                    f"{computing} meanwhile"
                )
        found = f' class="{" ".join(classes)}"' if classes else ""
        return found + (f' tabindex="0" title="{title}"' if title else "")

    def _css_rules(self) -> str:
        """Highlight a bucket's rows while one of them is under the pointer or has the focus."""
        rules = []
        for index in range(len(self._program.all_reduces)):
            looked_at = ",".join(
                f".{name}-{index}:{how}" for name in ("asks", "waits") for how in ("hover", "focus")
            )
            for name, colour in HIGHLIGHT_COLOURS.items():
                row = f".labkit-program:has({looked_at}) .{name}-{index}"
                rules.append(f"{row}{{color:black;background:{colour}}}")
        return "".join(rules)

    def _text_with_line_numbers(self) -> str:
        lines = self.full_text.splitlines()
        heads = [line.lstrip().startswith("def call(") for line in lines]
        numbered = enumerate(lines, 1 - heads.index(True))
        return "\n".join(f"{number if number > 0 else '':>5}  {line}" for number, line in numbered)

    def _program_rows(self) -> Iterator[tuple[ProgramLine, str, str]]:
        """Yield each line to show with its kind and text, which names its bucket if it has one."""
        notes = {}
        for index, request in enumerate(self._program.all_reduces):
            notes[request.line.number] = f"  asks for bucket {index}"
            for wait in request.waits:
                notes[wait.number] = f"  waits for bucket {index}"
        for line in self._program.lines:
            kind = "return" if line.name == "return" else str(line.kind)
            if kind not in (*KIND_COLOURS, "return"):
                continue
            names = [self._buffer_label(buffer) for buffer in line.buffers[:MAX_BUFFERS]]
            if len(line.buffers) > MAX_BUFFERS:
                names.append(f"... {len(line.buffers)} in all")
            yield line, kind, f"{line.name}({', '.join(names)}){notes.get(line.number, '')}"

    def _buffer_label(self, buffer: str) -> str:
        return f"{buffer}: {self.names[buffer]}" if buffer in self.names else buffer
