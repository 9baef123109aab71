"""What all explorers share: controls, theory's figure, and a button that measures on real ranks.

An explorer says what theory predicts for the chosen values, how to draw that, and which run
measures it. Controls are native buttons and selections, with labels for screen readers, and work by
keyboard. Without a front end that shows widgets (papermill, nbconvert, nbval) an explorer is the
figure of its defaults.
"""

import base64
import inspect
import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar

import numpy
import pandas
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from labkit import requirements
from labkit.environment import ENV_WIDGETS, read_choice
from labkit.launcher.progress import Display, ProgressState, in_kernel, use_display
from labkit.plots import style
from labkit.plots.runs import comparison_row
from labkit.runs.result import RunResult

# Set in the kernels of a Jupyter server's session, of VS Code, and of Colab.
FRONT_END_VARIABLES = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")
# With more values, or more letters, than this, a list is shown instead of buttons.
MAX_BUTTONS, MAX_LETTERS = 6, 40
DPI = 100
MIN_FIGURE_PIXELS = 680

Numbers = Mapping[str, float]
Measured = RunResult | None


def can_show_widgets() -> bool:
    """Return whether a front end can show widgets; LABKIT_WIDGETS=1 or 0 overrides the guess."""
    if choice := read_choice(ENV_WIDGETS, "0 (a figure)", "1 (controls)"):
        return choice == "1"
    return in_kernel() and any(name in os.environ for name in FRONT_END_VARIABLES)


@dataclass(frozen=True)
class Control:
    """A setting that the reader can change."""

    label: str  # with its unit
    values: Sequence[Any] | Mapping[str, Any]  # in order, or by the words on their buttons
    default: Any
    # It changes the figure alone, so that earlier measurements remain valid.
    only_drawn: bool = False

    @property
    def options(self) -> list[tuple[str, Any]]:
        """The values with their words."""
        if isinstance(self.values, Mapping):
            return list(self.values.items())
        return [(f"{each:,}" if isinstance(each, int) else str(each), each) for each in self.values]


class Explorer(ABC):
    """Controls, a figure of what theory predicts for them, and a run that confirms it."""

    title: ClassVar[str]
    controls: ClassVar[Mapping[str, Control]]
    # The functions of labkit.theory that predict; their docstrings are shown on request.
    formulas: ClassVar[Sequence[Callable[..., Any]]]
    # Allowed relative errors of measured values; values without one must be equal.
    tolerances: ClassVar[Numbers] = {}
    run_tip: ClassVar[str] = "measure this on real ranks of this machine"
    # Width and height of the figure, in inches.
    size: ClassVar[tuple[float, float]] = (8.5, 3.6)

    def __init__(self) -> None:
        self.chosen = {name: control.default for name, control in self.controls.items()}
        self.measured: dict[tuple[Any, ...], RunResult] = {}
        self._panel: _Panel | None = None

    @abstractmethod
    def predict(self, **chosen: Any) -> dict[str, float]:
        """Return what theory predicts, by the names that ``result.value`` takes.

        Raise a ValueError that says what to change if the values do not go together.
        """

    @abstractmethod
    def draw(self, figure: Figure, predicted: Numbers, result: Measured, **chosen: Any) -> str:
        """Draw prediction and measurement into an empty figure; return it in one sentence."""

    @abstractmethod
    def launch(self, **chosen: Any) -> RunResult:
        """Measure what ``predict`` returns on real ranks."""

    def measured_value(self, name: str, result: RunResult) -> float:
        """Return a value of a run; a time in slow motion as it would be on the hardware."""
        hardware = result.emulated if name.endswith("_ms") else None
        return result.value(name) / (hardware.slower if hardware else 1)

    def table_row(self, name: str, predicted: float, result: Measured) -> dict[str, str]:
        """Return one predicted value beside the measured one, as text, and how far it is off."""
        measured = self.measured_value(name, result) if result else None
        tolerance = self.tolerances.get(name, 0.0)
        return comparison_row({"theory": predicted}, "measured", measured, tolerance)

    def too_many_ranks_text(self, ranks: int) -> str:
        """Return why this machine cannot run as many ranks, and what to change; "" if it can."""
        most = 4 * len(requirements.usable_cores())
        if ranks <= most:
            return ""
        return (
            f"{ranks} ranks are theory here: "
            f"to run it, take {most} or fewer on this machine's cores"
        )

    def refusal_reason(self, **chosen: Any) -> str:
        """Return why this machine cannot measure these values, and what to change; "" if it can."""
        return ""

    @property
    def prediction(self) -> dict[str, float]:
        """Predictions for the chosen values."""
        return self.predict(**self.chosen)

    @property
    def result(self) -> Measured:
        """The run of the chosen values, if there is one."""
        return self.measured.get(self._run_key())

    def run_current(self) -> RunResult:
        """Launch a run of the chosen values and keep its result, or raise why that cannot be."""
        # The controls may move while it runs.
        key, chosen = self._run_key(), dict(self.chosen)
        if refusal := self.refusal_reason(**chosen):
            raise ValueError(refusal)
        self.measured[key] = result = self.launch(**chosen)
        return result

    def _run_key(self) -> tuple[Any, ...]:
        """Return the chosen values that a run depends on."""
        chosen = self.chosen.items()
        return tuple(value for name, value in chosen if not self.controls[name].only_drawn)

    def render_figure(self) -> tuple[bytes, str]:
        """Return the figure of the chosen values as PNG, and its description."""
        # Explorers set fixed margins: a layout engine takes longer than drawing, and the
        # panels would move at each click.
        figure = Figure(figsize=self.size, dpi=DPI)
        words = self.draw(figure, self.prediction, self.result, **self.chosen)
        if self.result is not None:
            style.add_stamp(figure.axes[0], [self.result])
        # savefig draws twice and compresses slowly; this takes half the time.
        canvas, packed = FigureCanvasAgg(figure), io.BytesIO()
        canvas.draw()
        image = Image.fromarray(numpy.asarray(canvas.buffer_rgba())).convert("RGB")
        image.save(packed, "png", compress_level=1)
        return packed.getvalue(), words

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if not can_show_widgets():
            png, words = self.render_figure()
            text = f"{self.title}: {words}"
            return {"image/png": base64.b64encode(png).decode(), "text/plain": text}
        if self._panel is None:
            self._panel = _Panel(self)
        shown: dict[str, Any] = self._panel.box._repr_mimebundle_()
        return shown


class _Panel(Display):
    """The widgets of one explorer; a run shows its progress in one line of them."""

    def __init__(self, explorer: Explorer):
        import ipywidgets

        self._explorer, self._knobs = explorer, {}
        # Whether controls move without a redraw, and whether the run is to end at its next update.
        self._hold = self._cancelled = False
        for name, control in explorer.controls.items():
            self._knobs[name] = knob = _control_widget(control, explorer.chosen[name])
            knob.observe(self._on_control_change, "value")
        self._picture, self._table, self._line = (ipywidgets.HTML() for _ in range(3))
        buttons = []
        for text, tip, act in (
            ("run it", explorer.run_tip, self.start_run),
            ("cancel", "end the run and all its processes", self.cancel),
            ("reset", "back to the values at the start", self._restore_defaults),
        ):
            buttons.append(ipywidgets.Button(description=text, tooltip=tip))
            buttons[-1].on_click(act)
        self._run, self._cancel, self._reset = buttons
        self._cancel.disabled = True
        look = {"flex_flow": "row wrap", "align_items": "center"}
        title = ipywidgets.HTML(f"<strong>{escape(explorer.title)}</strong>")
        knobs = ipywidgets.Box(list(self._knobs.values()), layout=look)
        row = ipywidgets.Box(buttons, layout=look)
        formulas = ipywidgets.HTML("".join(map(_formula_html, explorer.formulas)))
        parts = [title, knobs, self._picture, self._table, row, self._line, formulas]
        self.box = ipywidgets.VBox(parts)
        self.redraw()

    def redraw(self) -> None:
        """Draw the chosen values, or say in the place of the figure why they do not go together."""
        explorer = self._explorer
        try:
            png, words = explorer.render_figure()
        except ValueError as error:
            self._picture.value, self._table.value = f'<p role="alert">{escape(str(error))}</p>', ""
            self._run.disabled = True
            return
        data = base64.b64encode(png).decode()
        # In a narrow window the figure scrolls, before its letters are too small to read. Screen
        # readers have the sentence from the image. It comes first: each value is one more message.
        self._picture.value = (
            f'<div style="overflow-x: auto"><img src="data:image/png;base64,{data}"'
            f' alt="{escape(words)}" width="{round(explorer.size[0] * DPI)}"'
            f' style="max-width: 100%; min-width: {MIN_FIGURE_PIXELS}px"></div>'
            f'<p aria-hidden="true" style="max-width: 80ch">{escape(words)}.</p>'
        )
        self._table.value = self._table_html()
        running, refusal = not self._cancel.disabled, explorer.refusal_reason(**explorer.chosen)
        self._run.disabled = running or bool(refusal)
        if not running:
            self._show_text(refusal)

    def _table_html(self) -> str:
        explorer, rows = self._explorer, {}
        for name, predicted in explorer.prediction.items():
            rows[name] = explorer.table_row(name, predicted, explorer.result)
        table = pandas.DataFrame.from_dict(rows, orient="index").to_html(border=0)
        # JupyterLab and VS Code style the tables of outputs, but not those of widgets.
        cell = 'style="text-align: right; padding: 1px 12px"'
        table = table.replace("<th>", f"<th {cell}>").replace("<td>", f"<td {cell}>")
        return f'<div style="overflow-x: auto">{table}</div>'

    def start_run(self, _: Any = None) -> None:
        """Run in a thread, so that the controls and *cancel* still respond."""
        self._run.disabled, self._cancel.disabled = True, False
        # A cancellation may have come too late for the previous run.
        self._cancelled = False
        self.show_wait_reason("starts")
        threading.Thread(target=self._run_in_thread, daemon=True).start()

    def cancel(self, _: Any = None) -> None:
        # The thread of the run sees this at its next update.
        self._cancelled = True

    def _run_in_thread(self) -> None:
        said = ""
        try:
            with use_display(self):
                self._explorer.run_current()
        except KeyboardInterrupt:
            said = "cancelled: no process of the run is left"
        # An exception that leaves a thread would not reach the notebook.
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._cancel.disabled = True
        self.redraw()
        self._show_text(said)

    def show(self, state: ProgressState, lines: list[str]) -> None:
        known = f' max="1" value="{state.fraction:.3f}"' if state.planned_steps else ""
        self.show_wait_reason(str(state), known)

    def show_wait_reason(self, text: str, known: str = "") -> None:
        if self._cancelled:
            # While the run ends, its updates must not raise again.
            self._cancelled = False
            raise KeyboardInterrupt
        self._show_text(text, f'<progress aria-label="progress"{known}></progress> ')

    def _show_text(self, text: str, bar: str = "") -> None:
        self._line.value = f'<div role="status">{bar}{escape(text)}</div>'

    def _on_control_change(self, _: Any = None) -> None:
        if not self._hold:
            self._explorer.chosen = {name: knob.value for name, knob in self._knobs.items()}
            self.redraw()

    def _restore_defaults(self, _: Any) -> None:
        # One redraw for all controls, instead of one for each.
        self._hold = True
        for name, control in self._explorer.controls.items():
            self._knobs[name].value = control.default
        self._hold = False
        self._on_control_change()


def _control_widget(control: Control, value: Any) -> Any:
    import ipywidgets

    words = [text for text, _ in control.options]
    shared = {"options": control.options, "value": value, "description": control.label}
    shared["layout"] = {"width": "auto", "margin": "0 18px 6px 0"}
    style = {"description_width": "initial"}
    if len(words) > MAX_BUTTONS or sum(map(len, words)) > MAX_LETTERS:
        return ipywidgets.Dropdown(**shared, style=style)
    return ipywidgets.ToggleButtons(**shared, style=style | {"button_width": "auto"})


def _formula_html(function: Callable[..., Any]) -> str:
    name = escape(f"{function.__module__}.{function.__name__}")
    text = escape(inspect.getdoc(function) or "")
    return f"<details><summary>formula: {name}</summary><pre>{text}</pre></details>"
