"""Execute a notebook, with progress on the terminal, and clean what execution leaves in it."""

from __future__ import annotations

import base64
import io
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from PIL import Image

from notebooks.tools.source import Notebook

CELL_TIMEOUT_S = 600
"""Ten times what the longest cell takes alone: on a machine that others use, too, it is late and not lost."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class CellFailed(Exception):
    """A cell of a notebook ended in an error; the message shows it, and where the notebook up to there was kept."""


def execute(notebook: Notebook, output: Path, *, title: str, parameters: dict[str, Any] | None = None) -> Notebook:
    """Execute every cell, in a folder of its own, and write the notebook to ``output`` after each.

    Args:
        notebook: what to execute; it is not changed.
        output: where to write; a failed notebook stays there.
        title: a name for the progress line.
        parameters: values for those of the cell tagged parameters.

    Raises:
        CellFailed: a cell raised an error, took longer than CELL_TIMEOUT_S or ended its kernel.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with Progress(notebook, title) as progress, tempfile.TemporaryDirectory() as working_folder:
        try:
            done: Notebook = papermill.execute_notebook(
                notebook,
                output.resolve(),
                parameters=parameters,
                cwd=working_folder,
                progress_bar=False,
                execution_timeout=CELL_TIMEOUT_S,
                store_widget_state=False,
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
                on_cell_start=progress.cell_starts,
            )
        except PapermillExecutionError as error:
            shown = without_colours("\n".join(error.traceback)) or f"{error.ename}: {error.evalue}"
            raise CellFailed(f"{progress.place()}\n{shown}\nup to there: {output}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            raise CellFailed(f"{progress.place()}\n{error}\nup to there: {output}") from None
    return done


class Progress:
    """Says which cell runs: on one line that counts the seconds in a terminal, as a line per section elsewhere."""

    def __init__(self, notebook: Notebook, title: str, stream: TextIO | None = None):
        self.title, self.stream = title, stream or sys.stderr
        self.live = self.stream.isatty()
        self.sections = sections(notebook)
        self.total = sum(cell.cell_type == "code" for cell in notebook.cells)
        self.number, self.section = 0, ""
        self.start_s = time.perf_counter()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self.live:
            self._ticker.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.live:
            self._ticker.join()
            self.stream.write("\r\x1b[K")
        verdict = "done" if exc_type is None else f"stopped at {self.place()}"
        self.stream.write(f"{self.title}: {verdict} after {self.elapsed_s():.0f} s\n")
        self.stream.flush()

    def cell_starts(self, cell: Notebook, cell_index: int) -> None:
        """Called before each cell."""
        if cell.cell_type != "code":
            return
        self.number += 1
        section = self.sections.get(cell.get("id", ""), self.section)
        if section != self.section and not self.live:
            when = f"[{self.elapsed_s():3.0f} s]"
            self.stream.write(f"{self.title}: {when} cell {self.number} of {self.total}: {section}\n")
            self.stream.flush()
        self.section = section

    def place(self) -> str:
        """The cell that runs now, in words."""
        return f"cell {self.number} of {self.total}" + (f" ({self.section})" if self.section else "")

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_s

    def _tick(self) -> None:
        while not self._ended.wait(0.2):
            line = f"{self.title}: {self.place()} [{self.elapsed_s():.0f} s]"
            self.stream.write(f"\r\x1b[K{line[:110]}")
            self.stream.flush()


def sections(notebook: Notebook) -> dict[str, str]:
    """For each cell's id, the nearest heading at or above it, without its marks; "" above the first."""
    found, heading = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", cell.source, flags=re.MULTILINE)
            heading = headings[-1] if headings else heading
        found[cell.id] = heading
    return found


def strip(notebook: Notebook) -> None:
    """Leave only what says the same every time: no times, no papermill metadata, no widgets, no split-up streams."""
    for kind in ("papermill", "widgets"):
        notebook.metadata.pop(kind, None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            cell.outputs = joined([output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})])
            for data in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
                data["image/png"] = packed(data["image/png"])


def packed(png: str) -> str:
    """A picture, base64, with 256 colours at most: it takes a third of the bytes, and looks the same."""
    picture, after = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    if picture.mode == "P":
        return png
    picture.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(after, "png", optimize=True)
    return base64.b64encode(after.getvalue()).decode()


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs with neighbouring pieces of one stream put together; where they were cut is chance."""
    kept: list[Any] = []
    for output in outputs:
        same_stream = kept and kept[-1].get("name") == output.get("name") is not None
        if same_stream and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def without_colours(text: str) -> str:
    """The text without a terminal's colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
