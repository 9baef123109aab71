"""Recorded results for a room without enough cores: asked for, never in silence, stamped wherever they are shown."""

import json
import zipfile

import pytest

import labkit
from labkit.launcher import run as launcher
from labkit.plots import latency_bars
from labkit.theory.emulated import read_emulated
from labkit_course import recorded_runs
from notebooks.tools import record_runs


@pytest.fixture(scope="module")
def recorded():
    """run.json of each recorded run by its folder in the archive."""
    with zipfile.ZipFile(recorded_runs.ARCHIVE) as archive:
        names = json.loads(archive.read("names.json"))
        return {name: json.loads(archive.read(f"{name}/run.json")) for name in names.values()}


def arguments_of(info):
    """The arguments of ``labkit.run`` that gave this run."""
    return {"nproc": info["nproc"], "emulate": read_emulated(info["emulate"]), **info["given_params"]}


class Measured(Exception):
    """The run would have started ranks."""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LABKIT_RECORDED", "1")

    def execute(*_):
        raise Measured

    monkeypatch.setattr(launcher, "execute_request", execute)


def test_every_recorded_run_is_found_by_the_labs_arguments(asked, recorded, capsys):
    assert len(recorded) >= 9
    for info in recorded.values():
        result = labkit.run(info["program"], **arguments_of(info))
        assert result.info["start"] == info["start"] and result.world_size == info["nproc"]
        assert len(result.frame) > 0 and result.ranks[0].log() is not None
        said = capsys.readouterr().out
        assert said.startswith(f"{info['program']}, {info['nproc']} ranks: not measured here (LABKIT_RECORDED=1), but")
        assert "recorded on 20" in said


def test_a_recorded_result_is_stamped_wherever_it_is_shown(asked, recorded):
    info = next(each for each in recorded.values() if each["program"] == "convnext_spatial" and not each["emulate"])
    result = labkit.run("convnext_spatial", **arguments_of(info))
    stamp = f"recorded on {info['start'][:10]} with "
    assert stamp in repr(result) and stamp in result._repr_html_() and stamp in result.stamp
    drawn = latency_bars({"recorded": result})
    assert stamp in drawn.figure.get_supxlabel()
    assert stamp in labkit.load(result.folder).stamp, "also when it is read again, later"


def test_what_is_not_recorded_is_measured_and_that_is_said(asked, recorded, capsys, tmp_path):
    info = next(each for each in recorded.values() if each["nproc"] == 4 and not each["emulate"])
    program, arguments = info["program"], arguments_of(info)
    own = tmp_path / f"{program}.py"
    own.write_text((recorded_runs.ARCHIVE.parents[2] / "launch" / own.name).read_text())
    changes = ({"steps": 7}, {"nproc": 8}, {"device": "cuda"}, {"emulate": labkit.Emulated(latency_us=123)})
    cases = [(own, arguments), *((program, arguments | change) for change in changes)]
    for program, given in cases:
        with pytest.raises(Measured):
            labkit.run(program, **given)
        assert "measured here, since no recorded result has these arguments" in capsys.readouterr().out


def test_a_learners_function_is_never_answered_by_a_record(asked, recorded, capsys):
    info = next(iter(recorded.values()))
    request = launcher.make_run_request(info["program"], **arguments_of(info))
    assert recorded_runs.find_recorded(request) is not None
    request.use = {"exchange_halo": "def exchange_halo(): ..."}
    assert recorded_runs.find_recorded(request) is None
    assert "measured here" in capsys.readouterr().out


def test_without_being_asked_nothing_is_taken_from_the_records(asked, recorded, monkeypatch):
    info = next(iter(recorded.values()))
    for value in ("", "0"):
        monkeypatch.setenv("LABKIT_RECORDED", value)
        with pytest.raises(Measured):
            labkit.run(info["program"], **arguments_of(info))
    monkeypatch.setenv("LABKIT_RECORDED", "yes")
    with pytest.raises(labkit.ParameterError, match="LABKIT_RECORDED='yes' is none of"):
        labkit.run(info["program"], **arguments_of(info))


def test_too_many_ranks_for_the_cores_are_told_of_the_records(asked):
    with pytest.raises(labkit.ParameterError, match="LABKIT_RECORDED=1 for results of the labs' runs"):
        labkit.run("all_reduce", nproc=100_000)


def test_records_are_small_and_hold_nothing_of_the_machine(recorded):
    assert recorded_runs.ARCHIVE.stat().st_size <= record_runs.MAX_BYTES
    with zipfile.ZipFile(recorded_runs.ARCHIVE) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {"names.json", *recorded}
        for name in archive.namelist():
            assert not any(place in archive.read(name) for place in (b"/home/", b"/root", b"/tmp/", b"/work/")), name
    for info in recorded.values():
        assert info["recorded"] is True and info["exit"] in ("ok", "differs") and not info["use"]


def test_runs_of_own_functions_failed_and_foreign_ones_are_not_packed(asked, recorded, tmp_path):
    name, info = next(iter(recorded.items()))
    with zipfile.ZipFile(recorded_runs.ARCHIVE) as archive:
        archive.extractall(tmp_path / "kept", [each for each in archive.namelist() if each.startswith(name)])
    runs, packed = tmp_path / "kept", tmp_path / "packed.zip"
    assert record_runs.pack(runs, packed) == 1
    wrong = ({"exit": "failed"}, {"use": {"f": "def f(): ..."}}, {"hosts": ["far"]}, {"target": "/tmp/all_reduce.py"})
    for change in wrong:
        (runs / name / "run.json").write_text(json.dumps(info | change))
        assert record_runs.pack(runs, packed) == 0, change
    (runs / name / "run.json").write_text(json.dumps(info))
    (runs / name / "given.pickle").write_text("")
    assert record_runs.pack(runs, packed) == 0
