"""Explorers for pages of the book: the same predictions, drawn without torch, numpy and matplotlib."""

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from docs.book import browser_python, explorers, labs
from docs.live import explorers as live
from docs.live.figure import Figure, nice_ticks, tick_texts
from labkit_course import widgets


@pytest.fixture(scope="module")
def found():
    return explorers.read_explorers(every_position=False)


def kernel_answer(name, **chosen):
    explorer = getattr(widgets, name)()
    explorer.chosen |= chosen
    return explorer.prediction, explorer.render_figure()[1]


def test_the_first_answers_are_the_kernels(found):
    assert {"RingExplorer", "StepExplorer"} <= found.keys()
    for name, explorer in found.items():
        predicted, words = kernel_answer(name)
        assert explorer["first"]["numbers"] == predicted and explorer["first"]["words"] == f"{words}."
        ElementTree.fromstring(explorer["first"]["svg"])


def ask(name, requests):
    """Return the answers to several requests, in a process of its own, as the stand-ins need it."""
    program = (
        "import json, sys; from docs.live import explorers, stand_ins; stand_ins.install(explorers.ROOT);"
        "name, requests = json.load(sys.stdin);"
        "given = [explorers.defaults(name) | each for each in requests];"
        "json.dump([explorers.answer(name, each) for each in given], sys.stdout)"
    )
    sent = json.dumps([name, requests])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=live.ROOT, input=sent, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "key"), sorted(live.ANY_NUMBER))
def test_any_number_between_the_limits_gives_the_kernels_answer(name, key):
    low, high, whole = live.ANY_NUMBER[name, key]
    numbers = [low, high, round((low * high + 0.01) ** 0.5, 0 if whole else 2)]
    answers = ask(name, [{key: {"number": number}} for number in numbers])
    for number, answer in zip(numbers, answers, strict=True):
        predicted, words = kernel_answer(name, **{key: int(number) if whole else number})
        assert answer["numbers"] == predicted and answer["words"] == f"{words}.", number


@pytest.mark.parametrize("number", [0, 1e9, None, 2.5])
def test_other_numbers_are_refused_with_the_limits(number):
    (answer,) = ask("RingExplorer", [{"messages": {"number": number}}])
    assert answer == {"error": "messages: take a whole number from 1 to 10,000"}


def test_every_live_explorer_stands_in_a_lab(repository, found):
    seen = set()
    for path in (repository / "notebooks/solved").glob("*.ipynb"):
        notebook = labs.lab_of_the_book(repository / "notebooks" / path.name, path, [])
        explorers.bring_to_life(notebook, found, has_python=True)
        shown = "".join(
            "".join(each["data"].get("text/html", ""))
            for cell in notebook["cells"]
            for each in cell.get("outputs", [])
            if "data" in each
        )
        seen |= set(re.findall(r'"name": "(\w+)", "title"', shown))
    assert seen == found.keys()


def test_what_is_no_method_of_the_figure_is_an_error_and_not_left_out():
    panel = Figure((4, 3)).subplots(gridspec_kw={"left": 0.1, "right": 0.9, "top": 0.9, "bottom": 0.1})
    with pytest.raises(AttributeError):
        panel.imshow([[1]])
    with pytest.raises(AttributeError):
        panel.set(aspect="equal")


def test_bars_and_limits_are_at_their_places():
    figure = Figure((4, 3))
    panel = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.9, "top": 0.9, "bottom": 0.1})
    panel.barh(0, 5, 0.5, 2, facecolor="#112233")
    panel.set(xlim=(0, 10), ylim=(-1, 1))
    bar = re.search(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="#112233"', panel.svg())
    # 400 x 300 pixels; the panel is 320 wide from 40 on, and 240 high from 30 on.
    assert list(map(float, bar.groups())) == [40 + 0.2 * 320, 30 + 240 * 0.375, 160, 60]


def test_ticks_are_round_and_written_alike():
    assert nice_ticks(0, 1.9) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75])
    assert tick_texts([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"] and tick_texts([-10, 0]) == ["−10", "0"]


def test_another_archive_than_the_pinned_one_is_not_taken(tmp_path):
    wrong = tmp_path / "pyodide.tgz"
    wrong.write_bytes(b"something else")
    assert browser_python.read_files(wrong) is None and browser_python.read_files(tmp_path / "missing") is None


def test_without_npm_the_book_is_built_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(browser_python, "ARCHIVE", tmp_path / "pyodide.tgz")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser_python.main() == 0
    assert "no npm" in capsys.readouterr().out
