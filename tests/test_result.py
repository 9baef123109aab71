"""A result: numbers by name from records written by hand, what it shows, and reading it again later."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

import labkit
from labkit import inductor, plots
from labkit.__main__ import main
from labkit.errors import ParameterError, RecordError
from labkit.runs.folder import RunFolder
from labkit.runs.records import RecordWriter, record_path

OLD_RUNS = Path(__file__).parent / "data" / "version_1"

COLUMNS = [
    *("rank", "step", "kind", "name", "start_us", "dur_us", "lane", "phase", "index", "bytes", "value", "unit"),
    *("axis", "group_size", "hosts", "count"),
]


@pytest.fixture
def folder(tmp_path):
    """A finished run of two ranks: a warm-up, steps 0 and 1, and step 2 for memory and traffic."""
    for rank in range(2):
        writer = RecordWriter(tmp_path, rank)
        if rank == 0:
            writer.write("scalar", "planned_steps", -1, value=2, unit="steps")
        for step, milliseconds in ((-1, 900.0), (0, 10.0), (1, 20.0)):
            writer.write("span", "forward", step, start_us=0.0, dur_us=1000 * milliseconds * (rank + 1))
            writer.write("scalar", "loss", step, value=5.0 - step + rank, unit="")
        writer.write("span", "setup", -1, start_us=0.0, dur_us=7000.0)
        writer.write("memory", "peak", -1, bytes=500 - rank)
        writer.write("memory", "peak", 2, bytes=400)
        writer.write("comm", "all_reduce", -1, axis="", count=50, bytes=5000)
        writer.write("comm", "all_reduce", 2, axis="", count=1, bytes=64)
        writer.write("comm", "all_reduce", 2, axis="", count=2, bytes=36 + rank)
        writer.write("comm", "all_reduce", 2, axis="tp", count=1, bytes=36 + rank)
        writer.write("bar", "layers.0", 2, lane="compute", phase="forward", start_us=0.0, dur_us=5e6)
        writer.write("bucket", "fc4.weight", -1, index=0, bytes=7)
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
        ("tp/all_reduce_count", 1),
        ("tp/all_reduce_bytes", 37),
        ("loss", 4.5),
        ("planned_steps", 2),
    ],
)
def test_a_value_by_name(folder, name, value):
    assert labkit.load(folder).value(name) == value


@pytest.mark.parametrize(
    ("sent", "wire"),
    [
        ([("all_reduce", 4, 1000)], {"all_reduce_wire_bytes": 1500}),
        ([("all_reduce", 3, 100)], {"all_reduce_wire_bytes": 400 / 3}),
        ([("all_gather", 4, 1000), ("all_gather", 2, 1000)], {"all_gather_wire_bytes": 4000, "all_gather_bytes": 2000}),
        ([("all_reduce", 1, 1000), ("recv", 4, 8)], {"all_reduce_wire_bytes": 0, "recv_wire_bytes": 0}),
        ([("all_reduce", 0, 1000)], {"all_reduce_bytes": 1000}),
        ([("scatter", 4, 1000)], {"scatter_bytes": 1000}),
    ],
)
def test_bytes_on_the_wire_come_from_those_handed_to_the_call_and_the_group(tmp_path, sent, wire):
    writer = RecordWriter(tmp_path, 0)
    for name, ranks, size in sent:
        writer.write("comm", name, 2, axis="", group_size=ranks, count=1, bytes=size)
    (tmp_path / "run.json").write_text(json.dumps(INFO | {"nproc": 1}))
    result = labkit.load(tmp_path)
    for name, value in wire.items():
        assert result.value(name) == value
    assert {name for name in wire if "wire" in name} == {name for name in result.summary() if "wire" in name}


def test_runs_without_the_size_of_a_group_say_nothing_of_the_wire(folder):
    with pytest.raises(KeyError, match="no value 'all_reduce_wire_bytes'; it has: all_reduce_bytes, all_reduce_count"):
        labkit.load(folder).value("all_reduce_wire_bytes")


def test_an_unknown_value_lists_the_known_ones(folder):
    with pytest.raises(KeyError) as caught:
        labkit.load(folder).value("forward")
    known = "all_reduce_bytes, all_reduce_count, forward_ms, loss, peak_bytes, setup_ms"
    assert str(caught.value) == (
        f"this run has no value 'forward'; it has: {known}, tp/all_reduce_bytes, tp/all_reduce_count"
    )
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
        "tp/all_reduce_count",
        "tp/all_reduce_bytes",
        "loss",
    }
    assert list(table["forward_ms"]) == [15.0, 30.0]
    assert list(table["peak_bytes"]) == [500, 499]
    assert list(table["all_reduce_bytes"]) == [100, 101]
    assert list(table["loss"]) == [4.0, 5.0]


def test_the_frame_has_a_row_a_record(folder):
    frame = labkit.load(folder).frame
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 31
    assert frame["bytes"].sum() == 500 + 499 + 2 * (400 + 5000 + 64 + 36) + 1 + 36 + 37 + 2 * 7
    assert frame.loc[frame["kind"] == "bucket", "index"].to_list() == [0, 0]


def test_what_a_result_says_of_itself(folder):
    result = labkit.load(folder)
    assert (result.ok, result.world_size, result.device, result.params) == (True, 2, "cpu", {"width": 8})
    assert [rank.log() for rank in result.ranks] == ["hello\n", ""]
    assert result.incomplete_files == []


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


def test_losses_are_the_mean_over_ranks_of_the_steps_that_all_have_recorded(folder):
    assert labkit.load(folder).losses.to_dict() == {0: 5.5, 1: 4.5}
    RecordWriter(folder, 1).write("scalar", "loss", 2, value=9.0, unit="")
    assert labkit.load(folder).losses.to_dict() == {0: 5.5, 1: 4.5}


def test_a_result_that_did_not_end_well_says_so(folder):
    result = change(folder, exit="timed out")
    assert not result.ok
    assert repr(result).startswith("strips [timed out]: CPU")


def test_html_is_escaped(folder):
    assert "&lt;b&gt;" in change(folder, program="<b>")._repr_html_()


def test_the_table_of_a_terminal_fits_and_has_a_column_for_each_rank(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for rank in range(2):
        for number in range(20):
            RecordWriter(folder, rank).write("scalar", f"some_rather_long_name_{number}", 0, value=1.25, unit="")
    RecordWriter(folder, 0).write("scalar", "only_here", 0, value=123_456_789_012.0, unit="")
    result = labkit.load(folder)
    lines = result.table_text().splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].split() == ["rank", "0", "1"]
    assert ["only_here", "123,456,789,012", "–"] in map(str.split, lines)
    assert ["some_rather_long_name_7", "1.25", "1.25"] in map(str.split, lines)
    assert "\n".join(lines) in repr(result)
    monkeypatch.setenv("COLUMNS", "45")
    assert max(map(len, result.table_text().splitlines())) <= 45 < max(map(len, lines)), "rank 1 in a second block"


def test_a_run_without_any_record(folder):
    for rank in range(2):
        record_path(folder, rank).unlink()
    result = labkit.load(folder)
    assert result.frame.empty
    assert result.summary().shape == (2, 0)
    assert "strips: CPU" in repr(result)


def test_cut_off_record_files_are_named(folder):
    with record_path(folder, 1).open("a") as file:
        file.write('{"v":')
    result = labkit.load(folder)
    assert result.incomplete_files == [record_path(folder, 1)]
    assert repr(result).endswith("rank_00001.jsonl: the last line is cut off (the rank was killed while it wrote)")


def test_a_malformed_record_is_an_error(folder):
    with record_path(folder, 1).open("a") as file:
        file.write("oops\n")
    with pytest.raises(RecordError, match=r"rank_00001\.jsonl:16: not JSON"):
        labkit.load(folder)


def test_a_file_that_cannot_be_read_is_named(folder):
    record_path(folder, 7).mkdir()
    with pytest.raises(RecordError, match=r"rank_00007\.jsonl: cannot be read \(Is a directory\)"):
        labkit.load(folder)
    record_path(folder, 7).rmdir()
    (folder / "run.json").rename(folder / "elsewhere.json")
    (folder / "run.json").mkdir()
    with pytest.raises(RecordError, match=r"run\.json: cannot be read \(Is a directory\)"):
        labkit.load(folder)


def test_what_is_not_needed_may_be_damaged(folder):
    (folder / "session.json").write_text("half of it")
    assert labkit.load(folder).device == "cpu", "run.json has the session of a run that ended"


def test_a_run_that_never_ended_takes_its_session_from_the_ranks(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "session.json").write_text(json.dumps(info.pop("session")))
    (folder / "run.json").write_text(json.dumps(info | {"exit": "running"}))
    result = labkit.load(str(folder))
    assert (result.ok, result.device) == (False, "cpu")


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run\.json: give the folder of a run") as caught:
        labkit.load(tmp_path)
    assert isinstance(caught.value, labkit.LabError)


SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "2.13.0", "note": ""}
INFO = {"version": 2, "program": "strips", "params": {}, "nproc": 2, "exit": "ok", "session": SESSION}
RECORD = {"v": 2, "rank": 0, "step": 0, "kind": "scalar", "name": "loss", "value": 1.0, "unit": ""}


def without(content, *names):
    return {name: value for name, value in content.items() if name not in names}


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("run.json", b"", "not JSON"),
        ("run.json", b'{"program": "str', "not JSON"),
        ("run.json", b"\xff\xfe", "not JSON"),
        ("run.json", b"[" * 100_000, "not JSON"),
        ("run.json", [], "a JSON list, not an object"),
        ("run.json", {}, "holds no 'program'"),
        *(("run.json", without(INFO, name), f"holds no {name!r}") for name in ("program", "params", "nproc", "exit")),
        ("run.json", INFO | {"nproc": "two"}, "nproc = 'two' is not int"),
        ("run.json", INFO | {"nproc": 10**22}, "nproc = 10000000000000000000000 is not between 1 and"),
        ("run.json", INFO | {"nproc": -1}, "nproc = -1 is not between 1 and 1000000"),
        ("run.json", INFO | {"params": []}, "params = [] is not dict"),
        ("run.json", INFO | {"session": []}, "session = [] is not dict"),
        ("run.json", INFO | {"verdict": 1}, "verdict = 1 is not dict"),
        ("run.json", INFO | {"verdict": {"ok": "yes"}}, "ok = 'yes' is not bool"),
        ("run.json", INFO | {"session": without(SESSION, "cores")}, "holds no 'cores'"),
        ("run.json", {"version": 3}, "version 3 is not known here: update labkit, this one reads 1 and 2"),
        ("run.json", INFO | {"version": []}, "version [] is not known here"),
        ("session.json", b'{"device": "cp', "not JSON"),
        ("session.json", b"7", "a JSON int, not an object"),
        ("session.json", SESSION | {"cores": "two"}, "cores = 'two' is not int"),
        ("rank_00001.jsonl:1", RECORD | {"kind": []}, "kind [] is none of span"),
        ("rank_00001.jsonl:1", RECORD | {"value": 10**22}, "value has 23 digits, more than 64 bits hold"),
        ("rank_00001.jsonl:1", b"5", "not a JSON object"),
        ("rank_00001.jsonl:1", {"name": "planned_steps"}, "version None is none of 1, 2"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_the_rule_and_the_fix(tmp_path, capsys, file, content, problem):
    texts = {"run.json": json.dumps(without(INFO, "session" if file == "session.json" else "")).encode()}
    name, _, line = file.partition(":")
    texts[name] = (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n" * bool(line)
    for each, text in texts.items():
        (tmp_path / each).write_bytes(text)
    with pytest.raises(RecordError) as caught:
        labkit.load(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / file}: {problem}")
    assert said.endswith(("run again", "reads 1 and 2"))
    assert main(["show", str(tmp_path)]) == 1
    assert capsys.readouterr() == ("", f"{said}\n")


@pytest.mark.parametrize("program", ["two_dim", "fsdp_wrap", "ddp_compile"])
def test_a_run_of_version_1_has_the_summary_that_it_had(program):
    """``summary.json`` is what the labkit that wrote these runs said of them."""
    said = json.loads((OLD_RUNS / program / "summary.json").read_text())
    result = labkit.load(OLD_RUNS / program)
    table = result.summary()
    assert list(table.columns) == said["columns"]
    assert [list(row) for row in table.to_numpy(dtype=float)] == [pytest.approx(row, rel=1e-12) for row in said["rows"]]
    assert not any(math.isnan(value) for row in said["rows"] for value in row)
    assert result.stamp == said["stamp"]


def test_figures_of_runs_of_version_1_can_still_be_drawn():
    compiled = labkit.load(OLD_RUNS / "ddp_compile")
    assert "fc4.weight" in compiled.frame.query("kind == 'bucket' and index == 0")["name"].tolist()
    assert len(inductor.find_buckets(compiled.ranks[1].artifact("code"))) == 3
    for result in (compiled, labkit.load(OLD_RUNS / "fsdp_wrap")):
        plots.timeline(result)
    pyplot.close("all")


def test_a_text_is_kept_under_its_name(folder):
    run = RunFolder(folder)
    assert run.artifact(1, "code").name == "rank_00001.code.txt", "as in runs of version 1"
    run.artifact(1, "code").write_bytes("a\r\né\n".encode())
    run.artifact(1, "my-plan_2").write_text("")
    [first, second] = labkit.load(folder).ranks
    assert second.artifact("code") == "a\r\né\n"
    assert second.artifact("my-plan_2") == ""
    with pytest.raises(FileNotFoundError) as caught:
        second.artifact("log")
    assert str(caught.value).startswith(f"rank 1 kept no 'log' in {folder}, it kept code, my-plan_2: take one of these")
    assert isinstance(caught.value, labkit.LabError)
    with pytest.raises(FileNotFoundError, match=r"rank 0 kept no 'code' in .*, it kept nothing: "):
        first.artifact("code")


@pytest.mark.parametrize("name", ["", "../code", "a/b", "a.b", "é", "a\n", "x" * 101])
def test_a_name_that_is_no_part_of_a_files_name_is_refused(folder, name):
    with pytest.raises(ParameterError, match="use letters, digits, - and _"):
        labkit.load(folder).ranks[0].artifact(name)


def test_reading_a_result_needs_no_torch(folder):
    code = f"import labkit, sys; print(labkit.load({str(folder)!r}).value('loss'), 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "4.5 False\n", answer.stderr
