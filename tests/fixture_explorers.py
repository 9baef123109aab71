"""What the tests of explorers share: every control moved, and what a launch asks for, in one launch for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fixture_cells import run_cells
from matplotlib.figure import Figure

import labkit
from labkit.runs.result import RunResult
from labkit_course.widgets.explorer import Explorer


def default(explorer: type[Explorer]) -> dict[str, Any]:
    """What is chosen at the start."""
    return {name: control.default for name, control in explorer.controls.items()}


def one_moved(explorer: type[Explorer]) -> list[dict[str, Any]]:
    """The default, and every value of every control alone moved from it."""
    moved = [{name: value} for name, control in explorer.controls.items() for _, value in control.options]
    return [
        default(explorer),
        *(default(explorer) | each for each in moved if each.items() - default(explorer).items()),
    ]


def drawn(explorer: Explorer, result: RunResult | None = None, **chosen: Any) -> tuple[Figure, str]:
    """The figure and the sentence for these values."""
    figure = Figure(figsize=explorer.size)
    return figure, explorer.draw(figure, explorer.predict(**chosen), result, **chosen)


def sentence(explorer: Explorer, **chosen: Any) -> str:
    """What is said of these values, beside those that are chosen already."""
    explorer.chosen |= chosen
    return explorer.draw(Figure(), explorer.prediction, explorer.result, **explorer.chosen)


def held_against_time(explorer: Explorer, time: str, most: float) -> None:
    """Launch until the named time is within this factor of what was predicted, three times at most; sizes are equal."""
    ratios = []
    for _ in range(3):  # what disturbs a machine for a moment can only spoil a time
        result = explorer.run_current()
        predicted = explorer.predict(**explorer.chosen)
        for name in predicted.keys() - {time}:
            assert result.value(name) == predicted[name]
        ratios.append(predicted[time] / explorer.measured_value(time, result))
        if 1 / most < ratios[-1] < most:
            break
    else:
        pytest.fail(f"predicted to measured: {ratios}")
    assert "; it took" in sentence(explorer)


def launched(explorer: Explorer, chosen: Sequence[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``launch`` measures for each of these, all on the same number of ranks: one launch for all."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(labkit, "run", lambda program, **how: asked.append({"program": program} | how))
    for each in chosen:
        explorer.launch(**each)
    monkeypatch.undo()
    programs, counts = ({each.pop(name) for each in asked} for name in ("program", "nproc"))
    return run_cells(programs.pop(), counts.pop(), asked)
