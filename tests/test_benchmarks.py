"""The benchmarks' plumbing, with little work: their figures are for people to take on a quiet machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixture_long import share_of_today

import labkit
from labkit.launcher.run import make_run_request

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


def test_the_gpu_benchmark_writes_each_result_at_once_and_a_page_of_all(bench, tmp_path, monkeypatch, capsys):
    gpu = bench("gpu")
    parity = gpu.Experiment("parity", ranks=2, **gpu.parity("convnext_spatial", width=128))
    wrong = gpu.Experiment("parity", ranks=2, **gpu.parity("fsdp_matrix", model="nobody"))
    raises = next(each for each in gpu.failures(2) if each.params["how"] == "raise")
    timed = gpu.Experiment("measured", "fsdp_wrap", 2)
    monkeypatch.setattr(gpu, "experiments", lambda gpus, preset: [parity, wrong, raises, timed])
    assert gpu.main(["--device", "cpu", "--folder", str(tmp_path)]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["experiments"], summary["wrong"]) == (4, [1])
    rows = [json.loads((tmp_path / f"0{number}.json").read_text()) for number in range(4)]
    assert rows[0]["compared"] > 50 and rows[0]["max_rel_error"] < 1e-5 and rows[0]["session"]["backend"] == "gloo"
    assert "nobody" in rows[1]["error"] and rows[2]["error"].startswith("RankFailed") and rows[2]["ok"]
    assert rows[3]["step_ms"] > 0 and (tmp_path / "kept" / "03" / "run.json").exists()
    assert "step_ms" in (tmp_path / "README.md").read_text() and (tmp_path / "steps.png").stat().st_size > 5000
    assert json.loads((tmp_path / "facts.json").read_text())["torch"] == torch.__version__


def test_the_gpu_benchmark_asks_what_is_worth_most_first_and_takes_no_longer_than_its_limit(bench, tmp_path):
    gpu = bench("gpu")
    one, eight = gpu.experiments(1, "paper"), gpu.experiments(8, "paper")
    assert {each.ranks for each in one} == {1, 2, 4} and {each.ranks for each in eight} == {1, 2, 4, 8}
    shared = [each for each in one if each.ranks > 1 and each.question != "launch"]
    assert all(each.environment["LABKIT_SHARE_GPUS"] == "1" for each in shared)
    assert [each.question for each in one[:7]] == ["launch"] * 6 + ["one rank"] and one[-1].question == "measured"
    assert "skipped" in gpu.run(one[0], "cpu", 5, tmp_path)


@pytest.mark.parametrize("preset", ["small", "paper"])
@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_what_the_gpu_benchmark_asks_is_accepted_by_the_programs(bench, gpus, preset):
    for each in bench("gpu").experiments(gpus, preset):
        make_run_request(each.program, nproc=each.ranks, **each.params)


@pytest.mark.long
@pytest.mark.timeout(480)
def test_experiments_of_the_gpu_benchmark_come_out_right_without_a_gpu(bench, tmp_path, monkeypatch, capsys):
    """A sixth of all today."""
    gpu = bench("gpu")
    chosen = share_of_today(gpu.experiments(0, "small"), 6)
    monkeypatch.setattr(gpu, "experiments", lambda gpus, preset: chosen)
    assert gpu.main(["--device", "cpu", "--preset", "small", "--folder", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["wrong"] == [] and summary["experiments"] == len(chosen) > 6


@pytest.mark.long
def test_what_the_gpu_benchmark_has_asked_is_on_disk_when_it_is_killed(tmp_path):
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"
    for printed in (1, 3):
        folder = tmp_path / f"{printed}"
        command = [sys.executable, str(script), "--device", "cpu", "--preset", "small", "--folder", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            for _ in range(printed):
                assert "ok" in running.stdout.readline()
            running.kill()
        rows = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
        assert len(rows) >= printed and all(row["ok"] for row in rows)
        assert json.loads((folder / "facts.json").read_text())["torch"] == torch.__version__
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "holds results already: name another with --folder" in again.stderr


def test_the_gpu_benchmark_without_a_gpu_says_what_to_do(bench, tmp_path, capsys):
    gpu = bench("gpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main(["--folder", str(tmp_path)])
    assert "sees no GPU; --device cpu" in capsys.readouterr().err


def test_the_core_runs_without_tyro_and_cloudpickle(tmp_path):
    """As on a machine that has torch and little else."""
    for name in ("tyro", "cloudpickle", "IPython", "ipywidgets"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)")
    code = "import labkit\nprint(labkit.check('fsdp_wrap', model='toy', device='cpu').ok)"
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}", "LABKIT_RUNS": str(tmp_path / "runs")}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert said.stdout.split()[-1:] == ["True"], said.stderr


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
    assert said["ok"] and said["right"] == 5, done.stdout + done.stderr


@pytest.mark.long  # five kernels with PyTorch each
@pytest.mark.timeout(300)
def test_notebooks_that_share_a_machine_come_right_and_nothing_is_left():
    words = [sys.executable, FOLDER / "classroom.py", "--kernels", "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"] and (said["right"], said["runs"]) == (5, 10), done.stdout + done.stderr


def test_the_published_benchmark_holds_the_formulas_against_what_others_measured(bench, capsys):
    bench("published").main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["ok"] and result["held_out"] == 47 and result["within"] >= 0.8
    assert result["see_network"] >= 20 and result["planted_off"] >= 0.5
    fitted = [line.split()[0] for line in lines if line.endswith("fitted")]
    assert fitted == ["torchtitan", "torchtitan", "GPT"], "the first row of each source and machine"


def test_the_network_benchmark_predicts_what_it_did_not_see_and_a_planted_network_is_off(
    bench, capsys, tmp_path, monkeypatch
):
    network = bench("network")
    monkeypatch.setattr(network, "FITTED", {"b200-8x": network.FITTED["b200-8x"]})
    monkeypatch.setattr(sys, "argv", ["network.py", "--figure", str(tmp_path / "network.png")])
    network.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] and result["held_out"]["b200-8x, planted"]["within_25"] == 0
    assert (tmp_path / "network.png").stat().st_size > 10_000


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


@pytest.mark.alone  # it gives what it kills 5 seconds, which beside a compiling test may not be enough
@pytest.mark.long  # test_process.py and test_compile_cache.py kill on purpose what this kills at random
def test_the_benchmark_of_kills_finds_nothing_left():
    words = [sys.executable, FOLDER / "kills.py", "--kills", "2", "--compiles", "1", "--longest-s", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ok"] and said["kills"] == 2, done.stdout
