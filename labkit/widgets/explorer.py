"""What all explorers share: controls, the figure that theory gives at once, and a button that asks real ranks.

An explorer says three things: what theory predicts for the chosen values, how that is drawn, and which run measures it.
This module makes controls of the values, draws again whenever one is moved, and runs in a thread, so that a control
still answers and *cancel* is heard. What was measured stays with the values that it was measured for.

Controls are native buttons and selections: each has a label that a screen reader finds, and a keyboard reaches all of
them. Without a front end that shows widgets (papermill, nbconvert, nbval) an explorer is the figure of its defaults.
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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from labkit.environment import ENV_WIDGETS
from labkit.errors import ParameterError
from labkit.launcher.progress import Display, ProgressState, in_kernel, use_display
from labkit.plots import style
from labkit.plots.runs import text_comparison_table
from labkit.runs.result import RunResult

FRONT_END_VARIABLES = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")
"""Variables that a kernel has where somebody looks at it: of a Jupyter server's session, of VS Code, of Colab."""
MAX_BUTTONS = 6
"""Up to so many values are buttons side by side; more are a list."""
DPI = 100


def can_show_widgets() -> bool:
    """Whether a front end can show widgets. LABKIT_WIDGETS=1 or 0 says so where labkit cannot know.

    Raises:
        ParameterError: LABKIT_WIDGETS is neither.
    """
    said = os.environ.get(ENV_WIDGETS)
    if said not in (None, "", "0", "1"):
        raise ParameterError(
            f"{ENV_WIDGETS}={said!r} is neither 0 (a figure) nor 1 (controls); unset it to have labkit choose"
        )
    return (
        said == "1"
        if said
        else in_kernel() and any(name in os.environ for name in FRONT_END_VARIABLES)
    )


@dataclass(frozen=True)
class Control:
    """One knob.

    Attributes:
        label: what it sets, with its unit.
        values: what it can be set to, in order; with a mapping, the values by the words that stand on the buttons.
        default: the value it starts with.
        only_drawn: it chooses what the figure shows, and changes nothing that a run measures: what was measured stays.
    """

    label: str
    values: Sequence[Any] | Mapping[str, Any]
    default: Any
    only_drawn: bool = False

    @property
    def options(self) -> list[tuple[str, Any]]:
        """The values with what stands on them."""
        if isinstance(self.values, Mapping):
            return list(self.values.items())
        return [
            (f"{value:,}" if isinstance(value, int) else str(value), value) for value in self.values
        ]


class Explorer(ABC):
    """Controls over a figure of theory, and a run that confirms it."""

    title: ClassVar[str]
    controls: ClassVar[Mapping[str, Control]]
    formulas: ClassVar[Sequence[Callable[..., Any]]]
    """The functions of ``labkit.theory`` that predict; their text is shown on request."""
    tolerances: ClassVar[Mapping[str, float]] = {}
    """How far a measured value may be off, as a part of it; 0, equality, for those that are not named."""
    size: ClassVar[tuple[float, float]] = (8.5, 3.6)
    """Width and height of the figure, in inches."""

    def __init__(self) -> None:
        self.chosen = {name: control.default for name, control in self.controls.items()}
        self.measured: dict[tuple[Any, ...], RunResult] = {}
        self._panel: _Panel | None = None

    @abstractmethod
    def predict(self, **chosen: Any) -> dict[str, float]:
        """What theory says, by the names that ``result.value`` takes.

        Raises:
            ValueError: the values do not go together; the message says what to change.
        """

    @abstractmethod
    def draw(
        self,
        figure: Figure,
        predicted: Mapping[str, float],
        result: RunResult | None,
        **chosen: Any,
    ) -> str:
        """Draw into an empty figure, what was measured over what is predicted; one sentence on what is to be seen.

        The explorer sets the margins: finding a layout takes longer than drawing, and nothing is to jump.
        """

    @abstractmethod
    def launch(self, **chosen: Any) -> RunResult:
        """The run that measures what ``predict`` gives, on real ranks."""

    def predict_from_run(self, result: RunResult, **chosen: Any) -> dict[str, float]:
        """What theory says with the costs that a run has measured of its machine, such as times; nothing by default."""
        return {}

    def refusal_reason(self, **chosen: Any) -> str:
        """Why this machine cannot measure the chosen values, and what to change; "" where it can."""
        return ""

    @property
    def prediction(self) -> dict[str, float]:
        """What theory says for the values that are chosen now; with this machine's costs once they were measured."""
        result, said = self.result, self.predict(**self.chosen)
        return said if result is None else said | self.predict_from_run(result, **self.chosen)

    @property
    def result(self) -> RunResult | None:
        """What was measured for the values that are chosen now."""
        return self.measured.get(self._run_key())

    def run_current(self) -> RunResult:
        """Launch for the values that are chosen now, and keep what was measured.

        Raises:
            ValueError: this machine cannot measure them.
        """
        key, chosen = self._run_key(), dict(self.chosen)
        if refusal := self.refusal_reason(**chosen):
            raise ValueError(refusal)
        self.measured[key] = result = self.launch(**chosen)
        return result

    def _run_key(self) -> tuple[Any, ...]:
        """What a run depends on, of the values that are chosen now."""
        return tuple(
            value for name, value in self.chosen.items() if not self.controls[name].only_drawn
        )

    def render_figure(self) -> tuple[bytes, str]:
        """The figure for the values that are chosen now, as PNG, and in words."""
        figure = Figure(figsize=self.size, dpi=DPI)
        words = self.draw(figure, self.prediction, self.result, **self.chosen)
        if self.result is not None:
            style.add_stamp(figure.axes[0], [self.result])
        return _encode_png(figure), words

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if not can_show_widgets():
            png, words = self.render_figure()
            return {
                "image/png": base64.b64encode(png).decode(),
                "text/plain": f"{self.title}: {words}",
            }
        if self._panel is None:
            self._panel = _Panel(self)
        shown: dict[str, Any] = self._panel.box._repr_mimebundle_()
        return shown


def _encode_png(figure: Figure) -> bytes:
    """The figure as PNG. ``savefig`` draws twice and packs for long; this takes half the time."""
    canvas, packed = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    Image.fromarray(numpy.asarray(canvas.buffer_rgba())).convert("RGB").save(
        packed, "png", compress_level=1
    )
    return packed.getvalue()


class _StatusLine(Display):
    """How a run goes, in one line of the panel; ``cancel`` ends the run at its next look."""

    def __init__(self, line: Any):
        self._line, self._cancelled = line, False

    def clear_cancellation(self) -> None:
        """Forget a cancellation that came too late for the run before."""
        self._cancelled = False
        self._update_line("starts")

    def cancel(self) -> None:
        self._cancelled = True

    def show_wait_reason(self, text: str) -> None:
        self._update_line(text)

    def show(self, state: ProgressState, lines: list[str]) -> None:
        self._update_line(str(state), state.fraction if state.planned_steps else None)

    def _update_line(self, text: str, fraction: float | None = None) -> None:
        if self._cancelled:
            self._cancelled = False  # the run is still followed while it ends
            raise KeyboardInterrupt
        value = "" if fraction is None else f' max="1" value="{fraction:.3f}"'
        self._line.value = f'<div role="status"><progress aria-label="progress"{value}></progress> {escape(text)}</div>'


class _Panel:
    """The widgets of one explorer."""

    def __init__(self, explorer: Explorer):
        import ipywidgets

        self._explorer = explorer
        self._knobs = {
            name: _control_widget(control, explorer.chosen[name])
            for name, control in explorer.controls.items()
        }
        for knob in self._knobs.values():
            knob.observe(self._on_control_change, "value")
        self._picture, self._table, self._line = (ipywidgets.HTML() for _ in range(3))
        self._status = _StatusLine(self._line)
        self._run, self._cancel, self._reset = (
            ipywidgets.Button(description=text, tooltip=tip)
            for text, tip in (
                ("run it", "measure this on real ranks of this machine"),
                ("cancel", "end the run and all its processes"),
                ("reset", "back to the values at the start"),
            )
        )
        self._cancel.disabled = True
        self._run.on_click(lambda _: self.start_run())
        self._cancel.on_click(lambda _: self._status.cancel())
        self._reset.on_click(lambda _: self._restore_defaults())
        look = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HTML(f"<strong>{escape(explorer.title)}</strong>"),
                ipywidgets.Box(list(self._knobs.values()), layout=look),
                self._picture,
                self._table,
                ipywidgets.Box([self._run, self._cancel, self._reset], layout=look),
                self._line,
                ipywidgets.HTML(_formula_html(explorer.formulas)),
            ]
        )
        self._hold = False
        self.redraw()

    def redraw(self) -> None:
        """Draw for the values that are chosen now; what is wrong with them is said in the place of the figure."""
        try:
            png, words = self._explorer.render_figure()
        except ValueError as error:
            self._picture.value, self._table.value = f'<p role="alert">{escape(str(error))}</p>', ""
            self._run.disabled = True
            return
        running, refusal = (
            not self._cancel.disabled,
            self._explorer.refusal_reason(**self._explorer.chosen),
        )
        self._run.disabled = running or bool(refusal)
        rows = text_comparison_table(
            self._explorer.prediction, self._explorer.result, self._explorer.tolerances
        )
        cell = 'style="text-align: right; padding: 1px 12px"'
        self._table.value = (
            rows.to_html(border=0).replace("<th>", f"<th {cell}>").replace("<td>", f"<td {cell}>")
        )
        data = base64.b64encode(png).decode()
        width = round(self._explorer.size[0] * DPI)
        self._picture.value = f'<img src="data:image/png;base64,{data}" alt="{escape(words)}" width="{width}" style="max-width: 100%">'
        if not running:
            self._show_text(refusal)

    def start_run(self) -> None:
        """Run in a thread, so that controls and *cancel* are heard meanwhile."""
        self._run.disabled, self._cancel.disabled = True, False
        self._status.clear_cancellation()
        threading.Thread(target=self._run_in_thread, daemon=True).start()

    def _run_in_thread(self) -> None:
        said = ""
        try:
            with use_display(self._status):
                self._explorer.run_current()
        except KeyboardInterrupt:
            said = "cancelled: no process of the run is left"
        except Exception as error:  # whatever it is, nobody else would hear of it in a thread
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._cancel.disabled = True
        self.redraw()
        self._show_text(said)

    def _show_text(self, text: str) -> None:
        self._line.value = f'<div role="status">{escape(text)}</div>'

    def _on_control_change(self, _: Any) -> None:
        if not self._hold:
            self._explorer.chosen = {name: knob.value for name, knob in self._knobs.items()}
            self.redraw()

    def _restore_defaults(self) -> None:
        self._hold = True
        for name, control in self._explorer.controls.items():
            self._knobs[name].value = control.default
        self._hold = False
        self._on_control_change(None)


def _control_widget(control: Control, value: Any) -> Any:
    """The widget of a control."""
    import ipywidgets

    words = [text for text, _ in control.options]
    shared = {"options": control.options, "value": value, "description": control.label}
    layout = {"width": "auto", "margin": "0 18px 6px 0"}
    if len(words) > MAX_BUTTONS or sum(map(len, words)) > 40:
        return ipywidgets.Dropdown(**shared, layout=layout, style={"description_width": "initial"})
    style = {"description_width": "initial", "button_width": "auto"}
    return ipywidgets.ToggleButtons(**shared, layout=layout, style=style)


def _formula_html(functions: Sequence[Callable[..., Any]]) -> str:
    """The formulas' names and texts, folded."""
    texts = [
        f"<details><summary>formula: {escape(function.__module__)}.{escape(function.__name__)}</summary>"
        f"<pre>{escape(inspect.getdoc(function) or '')}</pre></details>"
        for function in functions
    ]
    return "".join(texts)
