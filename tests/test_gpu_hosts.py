"""What a host with GPUs would see, as far as it shows without one."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from fixture_cuda import write_site
from fixture_long import long_but

import labkit
from labkit import plots
from labkit.launcher import torchrun, worker
from labkit.session import timeline

PROGRAMS = Path(__file__).parent / "programs"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = sorted((SHARED / "traces").glob("*.json.gz"))

# A torch that notes who asks for GPUs.
NOTING = """
def replace(real):
    def is_available():
        with open(os.environ["ASKED"], "a") as file:
            file.write(f"{os.environ.get('RANK', 'launcher')}\\n")
        return real()
    return is_available
"""


@pytest.mark.parametrize("warm", long_but([True], [True, False]))
def test_neither_torchrun_nor_the_warm_parent_asks_for_gpus(warm, tmp_path, monkeypatch):
    """Whoever asks can no longer be forked: on a GPU host each rank would start a new Python."""
    write_site(tmp_path, NOTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    result = labkit.run(PROGRAMS / "asking_for_gpus.py", nproc=2, warm=warm)
    asked = (tmp_path / "asked").read_text().split()
    assert set(asked) == {"0", "1"}, "the ranks ask, and nobody else"
    assert result.info["warm"] is warm
    found = [json.loads(each.artifact("gpus")) for each in result.ranks]
    assert found == [[torch.cuda.is_available(), "cpu", False]] * 2


@pytest.mark.parametrize("file", ["/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu"])
def test_a_process_that_has_opened_a_driver_is_not_forked(file, monkeypatch):
    assert torchrun.can_fork()
    monkeypatch.setattr(os, "readlink", lambda path: file)
    assert not torchrun.can_fork()


def test_the_cause_is_told_where_taking_the_group_down_waits_for_all_ranks():
    with pytest.raises(labkit.RankFailed, match="the cause") as failure:
        labkit.run(PROGRAMS / "failing_rank.py", nproc=2, timeout_s=60)
    assert (failure.value.rank, failure.value.exc_type) == (1, "ValueError")


@pytest.mark.parametrize(
    ("text", "echo"),
    [
        ("NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0", False),
        ("NCCL error: Cuda failure 2 'out of memory'", False),
        ("NCCL communicator was aborted on rank 0", True),
    ],
)
def test_what_nccl_says_of_itself_is_a_cause_and_no_echo(text, echo):
    assert worker.is_echo(torch.distributed.DistBackendError(text)) is echo


def test_a_figure_does_not_mix_devices(monkeypatch):
    runs = [labkit.run("all_reduce", nproc=2, repeats=1, device="cpu") for _ in range(2)]
    plots.style.add_stamp(plots.style.make_axes(None), runs)
    monkeypatch.setitem(runs[1].info["session"], "device", "cuda")
    with pytest.raises(ValueError, match=r"one kind of device.*LABKIT_DEVICE=cpu"):
        plots.style.add_stamp(plots.style.make_axes(None), runs)


def test_the_environment_names_the_device_of_all_runs(monkeypatch):
    monkeypatch.setenv("LABKIT_DEVICE", "gpu")
    with pytest.raises(labkit.ParameterError, match="LABKIT_DEVICE='gpu' is none of auto, cpu, cuda"):
        labkit.run("all_reduce")
    monkeypatch.setenv("LABKIT_DEVICE", "cuda")
    with pytest.raises(labkit.RankFailed, match="device cuda needs a GPU a rank: 0 GPUs for 2 ranks"):
        labkit.run("all_reduce", repeats=1)


@pytest.mark.skipif(not TRACES, reason="no traces of GPUs beside this checkout")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[:20])
def test_real_traces_of_gpus_are_read(path):
    """Each row of the GPU has the phase of what launched it; NCCL's kernels have the name of their collective."""
    with gzip.open(path, "rt") as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X" and "dur" in each]
    marked = mark_a_step(events)
    step_us, bars = timeline.step_us_and_bars(marked, "cuda")
    assert step_us > 0 and any(bar.lane == "compute" for bar in bars)
    assert {bar.phase for bar in bars if bar.lane == "compute"} <= {"forward", "backward", "optimizer"}
    collectives = {bar.phase for bar in bars if bar.lane == "communication"}
    assert collectives <= {*timeline._COLLECTIVE_NAMES, "send_recv", "collective"}
    if any("nccl" in each["name"].lower() and each.get("cat") == "kernel" for each in marked):
        assert collectives
    without = [each for each in marked if each.get("cat") not in timeline._GPU_CATEGORIES]
    with pytest.raises(ValueError, match="no row of the GPU"):
        timeline.step_us_and_bars(without, "cuda")


def mark_a_step(events):
    """The events, with labkit's mark over the step that the profiler named, or over all."""
    steps = [each for each in events if each["name"].startswith("ProfilerStep") and "gpu" not in str(each.get("cat"))]
    first = min(events, key=lambda each: each["ts"])
    whole = {"ts": first["ts"], "dur": max(each["ts"] + each["dur"] for each in events) - first["ts"], "tid": 0}
    step = dict(steps[0] if steps else whole, name=timeline.STEP_MARK, cat="user_annotation", args={})
    return [step, *(each | {"args": each.get("args", {})} for each in events if each not in steps)]


@pytest.mark.skipif(not SHARED.exists(), reason="no list of NCCL's kernels beside this checkout")
def test_every_kernel_of_nccl_has_the_name_of_a_collective():
    names = (SHARED / "nccl_2.29.7_kernels.txt").read_text().split()
    known = {*timeline._COLLECTIVE_NAMES, "send_recv", "collective"}
    seen = {name: timeline._collective_name(name) for name in names if "nccl" in name.lower()}
    assert len(seen) > 50 and set(seen.values()) <= known
    others = [name for name, what in seen.items() if what == "collective"]
    assert others == ["ncclDevKernelGinResetSignalsAndCounters", "ncclDevKernel_Generic"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parity_of_convnext_holds_where_convolutions_round_to_tf32(ranks):
    program, how = PROGRAMS / "tf32_convolutions.py", {"nproc": ranks, "width": 64 * ranks, "device": "cpu"}
    right, wrong = (labkit.check(program, force=force, **how) for force in (False, True))
    assert right.ok and right.value("max_rel_error") < 1e-5
    assert not wrong.ok and wrong.value("max_rel_error") > 1e-5, "as without the check's setting"
    assert (right.session["tf32_convolutions"], wrong.session["tf32_convolutions"]) == (False, True)
