"""A result: numbers by name from records written by hand, what it shows, and reading it again later."""

import json
import subprocess
import sys

import pytest

import labkit
from labkit.errors import RecordError
from labkit.records import Writer, path_of

COLUMNS = ["rank", "step", "kind", "name", "start_us", "dur_us", "value", "unit", "bytes", "count"]


@pytest.fixture
def folder(tmp_path):
    """A finished run of two ranks: a warm-up, steps 0 and 1, and step 2 for memory and traffic."""
    for rank in range(2):
        writer = Writer(tmp_path, rank)
        if rank == 0:
            writer.write("scalar", "planned_steps", -1, value=2, unit="steps")
        for step, milliseconds in ((-1, 900.0), (0, 10.0), (1, 20.0)):
            writer.write("span", "forward", step, start_us=0.0, dur_us=1000 * milliseconds * (rank + 1))
            writer.write("scalar", "loss", step, value=5.0 - step + rank, unit="")
        writer.write("span", "setup", -1, start_us=0.0, dur_us=7000.0)
        writer.write("memory", "peak", -1, bytes=500 - rank)
        writer.write("memory", "peak", 2, bytes=400)
        writer.write("comm", "all_reduce", -1, count=50, bytes=5000)
        writer.write("comm", "all_reduce", 2, count=1, bytes=64)
        writer.write("comm", "all_reduce", 2, count=2, bytes=36 + rank)
        writer.close()
    session = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "2.13.0", "note": ""}
    info = {"program": "strips", "params": {"width": 8}, "nproc": 2, "exit": "ok", "session": session}
    (tmp_path / "run.json").write_text(json.dumps(info))
    (tmp_path / "rank_00000.log").write_text("hello\n")
    return tmp_path


def change(folder, **changed):
    info = json.loads((folder / "run.json").read_text())
    for name, value in changed.items():
        (info if name in info else info["session"])[name] = value
    (folder / "run.json").write_text(json.dumps(info))
    return labkit.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward_ms", 30.0),  # mean of steps 0 and 1 on the slower rank
        ("setup_ms", 7.0),  # only ever outside the timed steps
        ("peak_bytes", 500),
        ("all_reduce_count", 3),
        ("all_reduce_bytes", 101),
        ("loss", 4.5),
        ("planned_steps", 2),
    ],
)
def test_a_value_by_name(folder, name, value):
    assert labkit.load(folder).value(name) == value


def test_an_unknown_value_lists_the_known_ones(folder):
    with pytest.raises(KeyError) as caught:
        labkit.load(folder).value("forward")
    known = "all_reduce_bytes, all_reduce_count, forward_ms, loss, peak_bytes, planned_steps, setup_ms"
    assert str(caught.value) == f"this run has no value 'forward'; it has: {known}"
    assert isinstance(caught.value, labkit.LabError)


def test_the_summary_has_a_row_a_rank(folder):
    table = labkit.load(folder).summary()
    assert list(table.index) == [0, 1]
    assert set(table.columns) == {
        "forward_ms",
        "setup_ms",
        "peak_bytes",
        "all_reduce_count",
        "all_reduce_bytes",
        "loss",
    }
    assert list(table["forward_ms"]) == [15.0, 30.0]
    assert list(table["peak_bytes"]) == [500, 499]
    assert list(table["all_reduce_bytes"]) == [100, 101]
    assert list(table["loss"]) == [4.0, 5.0]


def test_the_frame_has_a_row_a_record(folder):
    frame = labkit.load(folder).frame
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 25
    assert frame["bytes"].sum() == 500 + 499 + 2 * (400 + 5000 + 64 + 36) + 1


def test_what_a_result_says_of_itself(folder):
    result = labkit.load(folder)
    assert (result.ok, result.world_size, result.device, result.params) == (True, 2, "cpu", {"width": 8})
    assert [rank.log() for rank in result.ranks] == ["hello\n", ""]
    assert result.truncated == []


@pytest.mark.parametrize(
    ("changed", "stamp"),
    [
        ({}, "CPU · 2 ranks on 2 cores · torch 2.13.0"),
        ({"cores": 1}, "CPU · 2 ranks on 1 core · mechanism, not speed · torch 2.13.0"),
        (
            {"note": "1 GPU for 2 ranks: ran on CPU"},
            "CPU · 2 ranks on 2 cores · torch 2.13.0 · 1 GPU for 2 ranks: ran on CPU",
        ),
        ({"device": "cuda", "device_name": "NVIDIA H200", "cores": 1}, "NVIDIA H200 · 2 ranks · torch 2.13.0"),
        ({"session": {}}, "unknown · 2 ranks"),
    ],
)
def test_the_stamp_says_where_the_numbers_come_from(folder, changed, stamp):
    result = change(folder, **changed)
    assert result.stamp == stamp
    assert repr(result).startswith(f"strips: {stamp}\n")
    assert f"<p>strips: {stamp}</p><table" in result._repr_html_()


def test_a_result_that_did_not_end_well_says_so(folder):
    result = change(folder, exit="timed out")
    assert not result.ok
    assert repr(result).startswith("strips [timed out]: CPU")


def test_html_is_escaped(folder):
    assert "&lt;b&gt;" in change(folder, program="<b>")._repr_html_()


def test_a_run_without_any_record(folder):
    for rank in range(2):
        path_of(folder, rank).unlink()
    result = labkit.load(folder)
    assert result.frame.empty
    assert result.summary().shape == (2, 0)
    assert "strips: CPU" in repr(result)


def test_cut_off_record_files_are_named(folder):
    with path_of(folder, 1).open("a") as file:
        file.write('{"v":')
    result = labkit.load(folder)
    assert result.truncated == [path_of(folder, 1)]
    assert repr(result).endswith("rank_00001.jsonl: the last line is cut off (the rank was killed while it wrote)")


def test_a_malformed_record_is_an_error(folder):
    with path_of(folder, 1).open("a") as file:
        file.write("oops\n")
    with pytest.raises(RecordError, match=r"rank_00001\.jsonl:13: not JSON"):
        labkit.load(folder)


def test_a_run_that_never_ended_takes_its_session_from_the_ranks(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "session.json").write_text(json.dumps(info.pop("session")))
    (folder / "run.json").write_text(json.dumps(info | {"exit": "running"}))
    result = labkit.load(str(folder))
    assert (result.ok, result.device) == (False, "cpu")


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run\.json: give the folder of a run"):
        labkit.load(tmp_path)


def test_reading_a_result_needs_no_torch(folder):
    code = f"import labkit, sys; print(labkit.load({str(folder)!r}).value('loss'), 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "4.5 False\n", answer.stderr
