"""What is shown while a run goes: text, or in a notebook a block that leaves nothing in the saved file."""

import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.errors import ParameterError
from labkit.launcher import progress
from labkit.runs import records
from labkit.runs.folder import RunFolder
from labkit.runs.records import RecordWriter

RECORDS = Path(__file__).parent / "programs" / "records.py"


def test_a_tail_gives_each_line_once_and_whole(tmp_path):
    path = tmp_path / "log"
    tail = progress.TailReader(path)
    assert tail.read_lines() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read_lines() == ["one"]
        file.write("o\nthré".encode()[:-1])
        assert tail.read_lines() == ["two"]
        file.write("é".encode()[-1:])
        assert tail.read_lines() == []
        assert tail.read_lines(has_ended=True) == ["thré"]
        assert tail.read_lines(has_ended=True) == []


def test_text_has_a_line_at_the_start_at_each_quarter_and_at_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_PROGRESS", "text")
    folder = RunFolder(tmp_path)
    shown = progress.RunMonitor(folder, "strips", range(2), progress.choose_display())
    shown.update()
    writer = RecordWriter(tmp_path, 0)
    writer.write("scalar", "planned_steps", -1, value=8, unit="steps")
    folder.pid(1).write_text("1")
    folder.log(1).write_text("hello\nworld")
    for step in range(-1, 8):
        writer.write("span", "step", step, start_us=0.0, dur_us=1.0)
        writer.write("span", "forward", step + 50, start_us=0.0, dur_us=1.0)
        shown.update()
    writer.close()
    shown.close("ok")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "strips: ranks started 0/2, 0 s",
        "[rank 1] hello",
        "strips: ranks started 1/2, step 2 of 8, 0 s",
        "strips: ranks started 1/2, step 4 of 8, 0 s",
        "strips: ranks started 1/2, step 6 of 8, 0 s",
        "strips: ranks started 1/2, step 8 of 8, 0 s",
        "[rank 1] world",
        "strips: ranks started 1/2, step 8 of 8, 0 s: ok",
    ]
    assert "\r" not in captured.err


def test_off_shows_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    shown = progress.RunMonitor(RunFolder(tmp_path), "strips", range(1), progress.choose_display())
    (tmp_path / "rank_00000.log").write_text("hello\n")
    shown.update()
    shown.close("ok")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("loud", "LABKIT_PROGRESS='loud' is none of off, text, notebook; unset it"),
        ("notebook", "LABKIT_PROGRESS='notebook' draws in a Jupyter kernel, and this is none: set it to text or off"),
    ],
)
def test_a_display_that_there_is_not_is_refused_before_a_run(monkeypatch, tmp_path, wanted, message):
    monkeypatch.setenv("LABKIT_PROGRESS", wanted)
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    with pytest.raises(ParameterError, match=message):
        labkit.run(RECORDS)
    assert not (tmp_path / "runs").exists()


STRANGE_LINES = [
    "5",
    "[]",
    "null",
    '"text"',
    '{"name": "planned_steps"}',
    '{"name": "planned_steps", "value": []}',
    '{"name": "planned_steps", "value": NaN}',
    '{"name": "planned_steps", "value": Infinity}',
    '{"name": ["step"], "kind": []}',
    '{"name": "step", "kind": "span"}',
    '{"name": "step", "kind": "span", "step": "many"}',
    '{"name": "step", "kind": "span", "step": 1' + 400 * "0" + "}",
    '{"name": "step", "kind": "span", "step": 1' + 5000 * "0" + "}",
    10_000 * "[",
]


def test_strange_records_do_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_PROGRESS", "text")
    shown = progress.RunMonitor(RunFolder(tmp_path), "strips", range(1), progress.choose_display())
    good = ['{"name": "planned_steps", "value": 8}', '{"name": "step", "kind": "span", "step": 3}']
    for number in range(len(STRANGE_LINES) + 1):  # each of them also as the last
        lines = good + STRANGE_LINES[:number]
        records.record_path(tmp_path, 0).write_text("".join(f"{line}\n" for line in lines))
        shown.state.done_steps = 0
        shown._records = progress.TailReader(records.record_path(tmp_path, 0))
        shown.update()
        assert shown.state.planned_steps == 8
        assert shown.state.done_steps == (4 if number < 12 else 8), "no more than planned"
    assert "step 4 of 8" in capsys.readouterr().err


def test_a_long_line_is_cut_where_it_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_PROGRESS", "text")
    folder = RunFolder(tmp_path)
    shown = progress.RunMonitor(folder, "strips", range(1), progress.choose_display())
    folder.log(0).write_text("short\n" + 1_000_000 * "x" + "\n" + 2000 * "y")
    shown.close("ok")
    err = capsys.readouterr().err
    for letter in "xy":
        assert 1000 * letter in err
        assert 1001 * letter not in err
    assert f"... (1,000,000 characters; all are in {folder.log(0)})" in err
    assert len(err) < 3000


CELL = f"""
import labkit
print("before")
result = labkit.run({str(RECORDS)!r}, nproc=2, steps=4, pause_s=0.4)
print("after", result.value("step_ms"))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """An executed notebook, what was drawn while it ran, and the file it was saved to."""
    nbclient = pytest.importorskip("nbclient", reason="needs Jupyter")
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter")
    from traitlets.config import Config

    drawn = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] == "update_display_data":
                drawn.append(message["content"]["data"]["text/html"])
            return super().process_message(message, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    path = tmp_path_factory.mktemp("notebook") / "progress.ipynb"
    # Through files: before a kernel binds the ports that were free, ranks of other tests may have taken one.
    sockets = {"transport": "ipc", "ip": str(path.with_name("kernel"))}
    Client(notebook, timeout=60, config=Config(KernelManager=sockets)).execute()
    nbformat.write(notebook, path)
    return notebook, drawn, path


def test_in_a_notebook_progress_and_output_are_drawn_live(executed):
    _, drawn, _ = executed
    assert any('value="0.500"' in html and "ranks started 2/2, step 2 of 4" in html for html in drawn)
    assert any("&lt;rank&gt; 0 has" in html and "[rank 1] &lt;rank&gt; 1 has" in html for html in drawn)


def test_nothing_of_it_stays_in_the_saved_notebook(executed):
    notebook, _, _ = executed
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["stream", "display_data", "stream"]
    assert [outputs[0].text, outputs[2].text] == ["before\n", "after 2.0\n"]
    assert outputs[1].data == {"text/html": ""}
    assert "widgets" not in notebook.metadata


@pytest.mark.long  # so nbval does with the progress of each run of a solved notebook
def test_nbval_finds_the_same_when_it_runs_it_again(executed):
    pytest.importorskip("nbval", reason="needs nbval")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", str(executed[2])]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=executed[2].parent)
    assert answer.returncode == 0, answer.stdout
    assert "1 passed" in answer.stdout


def test_it_can_be_shown_as_a_page(executed):
    nbconvert = pytest.importorskip("nbconvert", reason="needs nbconvert")
    page, _ = nbconvert.HTMLExporter().from_filename(str(executed[2]))
    assert "after 2.0" in page
    assert "<progress" not in page.split("<body")[1]
