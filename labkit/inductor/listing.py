"""Print a program's collectives, waits and compute, as text or, in a notebook, in colours."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape

from labkit.inductor.program import InductorProgram

KIND_COLOURS = {
    "collective": "#F0E442",
    "wait": "#D55E00",
    "kernel": "#E69F00",
    "extern": "#E69F00",
    "return": "#E8E8E8",
}
"""Colours as on a time line (Okabe and Ito's palette); black text is legible on each."""
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

    ``names`` are labels for buffers, such as {"arg4_1": "fc4.weight"}.
    """

    def __init__(self, code: str, names: Mapping[str, str] | None = None):
        self.code, self.names = code, dict(names or {})
        self._program = InductorProgram(code)

    @property
    def full_text(self) -> str:
        """The whole program, without folders and names of cached files."""
        return _FOLDER_PATTERN.sub("", _KERNEL_PATH_PATTERN.sub("", self.code))

    def __repr__(self) -> str:
        rows = self._rows()
        return "\n".join(f"{number:>5}  {kind:<10}  {text}" for number, kind, text, _ in rows)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<div {attributes}>{number:>5}<span style="{_LABEL_STYLE}{KIND_COLOURS[kind]}">'
            f"{kind}</span>{escape(text)}</div>"
            for number, kind, text, attributes in self._rows()
        )
        return (
            f"<style>{self._css_rules()}</style>"
            f'<div class="labkit-program" style="{_SCROLL_STYLE}">{rows}</div><details>'
            f"<summary>the whole program, {len(self.full_text.splitlines())} lines</summary>"
            f'<pre style="{_SCROLL_STYLE};max-height:30em;overflow-y:auto">'
            f"{escape(self._text_with_line_numbers())}</pre></details>"
        )

    def _css_rules(self) -> str:
        """Highlight a bucket's rows while one of them is under the pointer or has the focus."""
        rules = ""
        for index in range(len(self._program.all_reduces)):
            rows = (f"asks-{index}", f"waits-{index}")
            looked_at = ",".join(f".{row}:hover,.{row}:focus" for row in rows)
            for name, colour in HIGHLIGHT_COLOURS.items():
                row = f".labkit-program:has({looked_at}) .{name}-{index}"
                rules += f"{row}{{color:black;background:{colour}}}"
        return rules

    def _text_with_line_numbers(self) -> str:
        lines = self.full_text.splitlines()
        # Counted from ``def call``, as in the rows above; the lines before it have no number.
        heads = [line.lstrip().startswith("def call(") for line in lines]
        numbered = enumerate(lines, 1 - heads.index(True))
        return "\n".join(f"{number if number > 0 else '':>5}  {line}" for number, line in numbered)

    def _rows(self) -> Iterator[tuple[int, str, str, str]]:
        """Yield number, kind, text and HTML attributes of each line to show."""
        notes: dict[int, str] = {}
        titles: dict[int, str] = {}
        classes: defaultdict[int, list[str]] = defaultdict(list)
        for index, request in enumerate(self._program.all_reduces):
            hiding, start = self._program.overlap_lines(request), request.line.number
            computing = f"{len(hiding)} lines compute" if hiding else "nothing computes"
            title = f"bucket {index}, asked for in line {start}: {computing} meanwhile"
            for name, lines in (("asks", [request.line]), ("waits", request.waits)):
                for line in lines:
                    notes[line.number] = f"  {name} for bucket {index}"
                    # The keyboard reaches these rows, too.
                    titles[line.number] = f' tabindex="0" title="{title}"'
                    classes[line.number].append(f"{name}-{index}")
            for line in hiding:
                classes[line.number].append(f"hides-{index}")
        for line in self._program.lines:
            kind = "return" if line.name == "return" else str(line.kind)
            # Allocations, views and checks would hide the order of what costs time.
            if kind not in KIND_COLOURS:
                continue
            shown = [self._buffer_label(buffer) for buffer in line.buffers[:MAX_BUFFERS]]
            if len(line.buffers) > MAX_BUFFERS:
                shown.append(f"... {len(line.buffers)} in all")
            text = f"{line.name}({', '.join(shown)}){notes.get(line.number, '')}"
            attributes = f'class="{" ".join(classes[line.number])}"{titles.get(line.number, "")}'
            yield line.number, kind, text, attributes

    def _buffer_label(self, buffer: str) -> str:
        return f"{buffer}: {self.names[buffer]}" if buffer in self.names else buffer
