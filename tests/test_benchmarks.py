"""The benchmarks' plumbing, with little work: their figures are for people to take on a quiet machine."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import labkit

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    """Imports a benchmark by its name; what it sets in the environment is put back."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    for name, value in {"LABKIT_RUNS": "", "LABKIT_PROGRESS": "off", "LABKIT_QUEUE": "0"}.items():
        monkeypatch.setenv(name, value)
    return load


def test_the_gpu_benchmark_on_a_cpu_writes_what_ran_what_did_not_and_why(bench, tmp_path, monkeypatch, capsys):
    gpu = bench("gpu")
    every = gpu.jobs("small", 2)
    assert {job.lab for job in every if job.checks} == {"spatial", "fsdp", "extensions", "ddp", "two_dim"}
    assert {job.lab for job in every if not job.checks} == {"spatial", "fsdp", "extensions", "ddp", "two_dim"}
    broken = gpu.Job("fsdp", "fsdp_wrap", {"model": "nobody"})
    chosen = [every[0], next(job for job in every if job.program == "fsdp_wrap" and not job.checks), broken]
    large = gpu.Job("two_dim", "two_dim", {}, least_ranks=3)
    monkeypatch.setattr(gpu, "jobs", lambda preset, ranks: [*chosen, large])
    with pytest.raises(SystemExit) as caught:
        gpu.main(gpu.Options(preset="small", device="cpu", folder=tmp_path))
    assert caught.value.code == 1, "one run failed"
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["ran"], summary["skipped"], summary["ok"]) == (3, 1, False)
    content = json.loads(Path(summary["file"]).read_text())
    parity, measured, failed, skipped = content["rows"]
    assert parity["compared"] == 57 and parity["max_rel_error"] < 1e-5 and parity["backend"] == "gloo"
    assert measured["end_parameter_bytes"] == measured["theory"]["end_parameter_bytes"] > 0 < measured["step_ms"]
    assert "nobody" in failed["error"] and "takes 3 ranks or more" in skipped["skipped"]
    assert content["torch"] and content["device"] == "cpu"
    assert Path(summary["file"]).with_suffix(".png").stat().st_size > 5000


def test_the_gpu_benchmark_without_a_gpu_says_what_to_do(bench, tmp_path):
    gpu = bench("gpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="sees no GPU; --device cpu"):
        gpu.main(gpu.Options(folder=tmp_path))


@pytest.mark.long  # warm and cold, twice
def test_the_launch_benchmark_compares_and_breaks_down(bench, tmp_path, capsys):
    launch = bench("launch")
    launch.main(launch.Options(ways=("warm", "cold"), rounds=1, breakdown=True, figure=tmp_path / "launch.png"))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < result["warm_s"] < result["cold_s"]
    for way in ("warm", "cold"):
        assert sum(result["breakdown_ms"][way].values()) > 50 and min(result["breakdown_ms"][way].values()) >= 0
    assert (tmp_path / "launch.png").stat().st_size > 5000


@pytest.mark.long  # test_run_queue.py has six runs at once; here a check is among them
def test_a_crowd_comes_in_turn_and_a_right_answer_is_not_called_wrong():
    words = [sys.executable, FOLDER / "crowd.py", "--processes", "5"]  # all that such a process has left is the crowd's
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"] and said["right"] == 5, done.stdout


def test_the_published_benchmark_holds_the_formulas_against_what_others_measured(bench, capsys):
    bench("published").main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["ok"] and result["held_out"] == 8 and 1 < result["speed_factor"] < 1.1
    fitted = [number for number, line in enumerate(lines) if "fitted to this row" in line]
    assert [lines[number - 1] for number in fitted] == ["h100-96gb-8x", "a100-8x"], "the first row of each machine"


@pytest.mark.long  # test_planner.py simulates such a plan, too
def test_the_benchmark_of_a_plan_keeps_what_the_explorer_begins_with(bench, tmp_path, capsys):
    bench("plan").main(["--layers", "1", "--world-size", "8", "--checkpointing", "full", "--keep", str(tmp_path)])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = labkit.SearchResult.load(tmp_path)
    assert (
        said["simulated"] == len(kept.fitting_rows) / len(kept.hardware_names) == 5
        and said["of_forty_s"] > said["took_s"] > 0
    )
    assert not any(candidate.folder for candidate in kept.candidates), "no paths of this machine"


@pytest.mark.long  # test_process.py and test_compile_cache.py kill on purpose what this kills at random
def test_the_benchmark_of_kills_finds_nothing_left():
    words = [sys.executable, FOLDER / "kills.py", "--kills", "2", "--compiles", "1", "--longest-s", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"] and said["kills"] == 2, done.stdout
