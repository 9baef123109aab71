"""What explorers share: a figure where no front end is, controls where one is, a run, its end and its failure."""

import threading
import time
from html import unescape

import ipywidgets
import nbformat
import pytest
from nbconvert import HTMLExporter

import labkit
from labkit.environment import ENV_WIDGETS
from labkit.errors import ParameterError
from labkit.launcher import progress
from labkit_course import widgets
from labkit_course.widgets import explorer as module
from labkit_course.widgets.explorer import Control, Explorer
from notebooks.tools.build import FOLDER
from notebooks.tools.execute import WIDGET_VIEW
from notebooks.tools.source import find_labs

EVERY = [getattr(widgets, name) for name in widgets.__all__]
each_explorer = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)


class Messages(Explorer):
    """The smallest explorer there can be: how many bytes four steps of an all-reduce hand over."""

    title = "What is handed over?"
    controls = {"ranks": Control("ranks", (2, 3, 1), 2), "loud": Control("drawn", (1, 2), 1, only_drawn=True)}  # noqa: RUF012
    formulas = (round,)

    def predict(self, ranks, loud):
        if ranks == 1:
            raise ValueError("1 rank has nobody to talk to: take 2")
        return {"loss": 1.0}

    def draw(self, figure, predicted, result, ranks, loud):
        figure.subplots().plot([0, ranks * loud])
        return f"{ranks} ranks & no more, {'measured' if result else 'predicted'}"

    def launch(self, ranks, loud):
        return labkit.run(self.program, nproc=ranks, device="cpu")


@pytest.fixture
def panel(monkeypatch, tmp_path):
    """That of Messages, whose program stops until the file ``go_on`` is there."""
    monkeypatch.setenv(ENV_WIDGETS, "1")
    program = tmp_path / "loss.py"
    program.write_text(PROGRAM)
    Messages.program = program
    each = Messages()
    assert each._repr_mimebundle_().keys() == {WIDGET_VIEW, "text/plain"}
    return each._panel


PROGRAM = """
import os, time
from pathlib import Path
from labkit.runs.records import RecordWriter
while not Path(__file__).with_name("go_on").exists():
    time.sleep(0.02)
if Path(__file__).with_name("go_on").read_text() == "fail":
    raise KeyError("no such thing")
writer = RecordWriter(Path(os.environ["LABKIT_RUN_FOLDER"]), int(os.environ["RANK"]))
writer.write("scalar", "loss", 0, value=1.0, unit="nats")
"""


def ends(panel):
    give_up = time.monotonic() + 60
    while not panel._cancel.disabled or "progress" in panel._line.value:
        assert time.monotonic() < give_up, panel._line.value
        time.sleep(0.02)


def knobs(panel):
    return panel._knobs


def test_controls_have_labels_and_a_moved_one_redraws(panel):
    assert [knob.description for knob in knobs(panel).values()] == ["ranks", "drawn"]
    assert isinstance(knobs(panel)["ranks"], ipywidgets.ToggleButtons)
    before = panel._picture.value
    assert 'alt="2 ranks &amp; no more, predicted"' in before
    assert ">2 ranks &amp; no more, predicted.</p>" in before, "what the figure shows is there for all to read"
    knobs(panel)["ranks"].value = 3
    assert panel._picture.value != before and 'alt="3 ranks' in panel._picture.value


def test_what_does_not_go_together_is_said_in_place_of_the_figure(panel):
    knobs(panel)["ranks"].value = 1
    assert panel._picture.value == '<p role="alert">1 rank has nobody to talk to: take 2</p>'
    assert panel._run.disabled and panel._table.value == ""
    panel._reset.click()
    assert "<img" in panel._picture.value and not panel._run.disabled


def test_a_run_is_laid_over_the_prediction_and_stays_with_its_values(panel, tmp_path):
    (tmp_path / "go_on").write_text("")
    assert panel._table.value.count("–") == 2
    panel.start_run()
    assert panel._run.disabled and not panel._cancel.disabled
    ends(panel)
    assert "measured" in panel._picture.value and "right" in panel._table.value
    assert "–" not in panel._table.value
    knobs(panel)["loud"].value = 2
    assert "no more, measured" in panel._picture.value, "drawn otherwise, and still that run"
    knobs(panel)["ranks"].value = 3
    assert "no more, predicted" in panel._picture.value
    panel._reset.click()
    assert "no more, measured" in panel._picture.value


def test_cancel_ends_the_run_and_the_next_one_is_not_cancelled(panel, tmp_path):
    panel.start_run()
    panel._cancel.click()
    ends(panel)
    assert "cancelled: no process of the run is left" in panel._line.value
    panel._cancel.click()  # too late for any run
    (tmp_path / "go_on").write_text("")
    panel.start_run()
    ends(panel)
    assert "no more, measured" in panel._picture.value


def test_a_run_that_fails_says_why(panel, tmp_path):
    (tmp_path / "go_on").write_text("fail")
    panel.start_run()
    ends(panel)
    assert "RankFailed" in panel._line.value and "no such thing" in unescape(panel._line.value)
    assert not panel._run.disabled


def test_a_display_of_one_thread_is_not_that_of_another():
    mine, seen = progress.Display(), []
    with progress.use_display(mine):
        assert progress.choose_display() is mine
        thread = threading.Thread(target=lambda: seen.append(progress.choose_display()))
        thread.start()
        thread.join()
    assert seen[0] is not mine and progress.choose_display() is not mine


@pytest.mark.parametrize(
    ("said", "kernel", "session", "expected"),
    [
        ("", True, True, True),
        ("", True, False, False),
        ("", False, True, False),
        ("1", False, False, True),
        ("0", True, True, False),
    ],
)
def test_who_sees_controls(monkeypatch, said, kernel, session, expected):
    for name in module.FRONT_END_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ENV_WIDGETS, said)
    monkeypatch.setattr(module, "in_kernel", lambda: kernel)
    if session:
        monkeypatch.setenv("JPY_SESSION_NAME", "lab.ipynb")
    assert module.can_show_widgets() is expected


def test_a_wish_that_cannot_be_understood(monkeypatch):
    monkeypatch.setenv(ENV_WIDGETS, "yes")
    with pytest.raises(ParameterError, match="LABKIT_WIDGETS='yes' is none of 0"):
        module.can_show_widgets()


@each_explorer
def test_without_a_front_end_it_is_the_figure_of_its_defaults_and_always_the_same_words(kind, monkeypatch):
    monkeypatch.setenv(ENV_WIDGETS, "0")
    first, second = (kind()._repr_mimebundle_() for _ in range(2))
    assert first.keys() == {"image/png", "text/plain"}
    assert first == second and any(letter.isdigit() for letter in first["text/plain"]), "words with numbers"


@each_explorer
def test_a_solved_lab_keeps_its_figure_and_no_state(kind):
    shown = 0
    for lab in find_labs(FOLDER):
        notebook = nbformat.read(lab.solved, as_version=4)
        assert "widgets" not in notebook.metadata
        for cell in notebook.cells:
            if cell.source.strip().endswith(f"widgets.{kind.__name__}()"):
                data = [output.get("data", {}) for output in cell.outputs]
                shown += sum("image/png" in each and WIDGET_VIEW not in each for each in data)
                notebook.cells = [cell]
                page, _ = HTMLExporter().from_notebook_node(notebook)
                assert page.count('src="data:image/png') == 1
                break
    assert shown == 1, f"widgets.{kind.__name__}() belongs into its lab"
