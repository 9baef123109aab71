"""labkit.rank: sessions begin and end in order, the device is the right one, a check ends as it must."""

import gc
import json
import math
import os
import subprocess
import sys
import time
import warnings
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit import rank, requirements
from labkit.errors import ParameterError
from labkit.runs import records

SESSION = sys.modules["labkit.session.session"]
OF_A_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone():
    """No environment of a run, none left behind, and the CPU even where there are GPUs."""
    with mock.patch.dict(os.environ):
        for name in (*OF_A_RUN, "LABKIT_RUN_FOLDER"):
            os.environ.pop(name, None)
        os.environ["LABKIT_DEVICE"] = "cpu"
        yield
    assert not dist.is_initialized()


def test_a_program_alone_is_one_rank():
    with rank.session() as here:
        assert (here.rank, here.world_size, here.device.type) == (0, 1, "cpu")
        assert dist.get_backend() == "gloo"
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
        assert here.mesh(data=1, space=1).mesh_dim_names == ("data", "space")
    assert not dist.is_initialized()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has SCHED_BATCH")
def test_gloo_threads_do_not_interrupt_the_rank():
    before = set(os.listdir("/proc/self/task"))
    with rank.session() as here:
        here.mesh(data=1, space=1)
        policies = []
        for _ in range(100):  # a thread takes its name once it runs
            started = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
            gloo = [task for task in started if comm_of(task).startswith(("gloo", "pt_gloo"))]
            policies = [os.sched_getscheduler(task) for task in gloo]
            if len(policies) >= 2:
                break
            time.sleep(0.1)
        assert len(policies) >= 2, "a loop and a worker at least, or the workers alone: their names differ by version"
        assert set(policies) == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def comm_of(task):
    with open(f"/proc/self/task/{task}/comm") as comm:
        return comm.read()


def test_a_process_group_outlives_its_session():
    """Or a DDP model that is alive at the rank's end destroys it, and can hang."""
    with rank.session() as here:
        mesh = here.mesh(data=1, space=1)
        groups = [weakref.ref(group) for group in (dist.group.WORLD, mesh.get_group("space"))]
    del mesh
    gc.collect()
    assert all(group() is not None for group in groups)


@pytest.mark.parametrize("error", [ValueError("widths differ"), KeyboardInterrupt(), SystemExit(1)])
def test_a_session_is_left_in_order_whatever_happens(error, capsys):
    with pytest.raises(type(error)), rank.session() as here:
        here.record_scalar("loss", 1.0)
        raise error
    assert not dist.is_initialized()
    assert capsys.readouterr().out == "", "no table of a run that failed"


def test_a_folder_that_is_not_there_leaves_no_group_behind(tmp_path):
    os.environ["LABKIT_RUN_FOLDER"] = str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError), rank.session():
        pass
    assert not dist.is_initialized()


def train(here, steps=3):
    model = torch.nn.Linear(4, 4)
    for step in here.steps(steps, track=[model]):
        with step.span("forward"):
            loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        step.record_scalar("loss", loss)


def test_a_program_alone_prints_its_table_last(capsys):
    with rank.session() as here:
        train(here)
        assert capsys.readouterr().out == ""
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0"
    shown = {line.split()[0]: line for line in lines[1:]}
    assert shown["forward"].endswith(" ms    median of 3 steps")
    assert shown["all_reduce"].split()[1:] == ["64", "bytes", "in", "1", "calls", "a", "step"]
    assert shown["peak_parameter"].endswith(" 80 bytes")
    assert "loss" not in shown


def test_the_table_shows_medians_of_the_timed_steps():
    writer = records.RecordWriter(None, 3)
    for step, took_us in enumerate((10_000, 20_000, 60_000)):
        writer.write("span", "forward", step, start_us=0.0, dur_us=float(took_us))
    assert SESSION.records_text(writer).split() == ["rank", "3", "forward", "20.0", "ms", "median", "of", "3", "steps"]


def test_under_a_run_records_go_into_its_folder_and_nothing_is_printed(tmp_path, capsys):
    os.environ["LABKIT_RUN_FOLDER"] = str(tmp_path)
    with rank.session() as here:
        train(here)
    assert capsys.readouterr().out == ""
    found = records.read_records(tmp_path)
    assert {"span", "scalar", "memory", "comm"} == {line["kind"] for line in found.lines}
    session = json.loads((tmp_path / "session.json").read_text())
    assert session.keys() >= {"device", "device_name", "backend", "world_size", "cores", "threads", "torch", "note"}
    assert (session["device"], session["backend"], session["torch"]) == ("cpu", "gloo", torch.__version__)
    assert session["cores"] >= 1


@pytest.mark.parametrize(
    ("cores", "ranks", "index", "own"),
    [
        ([0, 1], 1, 0, [0, 1]),
        ([0, 1], 2, 1, [1]),
        ([2, 3, 6, 7, 8], 2, 0, [2, 3]),
        ([2, 3, 6, 7, 8], 2, 1, [6, 7]),
        ([0, 1], 4, 3, None),
    ],
)
def test_a_rank_stays_on_its_share_of_the_cores(monkeypatch, cores, ranks, index, own):
    chosen = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, wanted: chosen.append(wanted), raising=False)
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(index))
    SESSION.pin_to_own_cores(cores)
    assert chosen == ([own] if own else []), "with fewer cores than ranks the scheduler decides"


@pytest.mark.parametrize(
    ("wish", "gpus", "ranks", "index", "device", "note"),
    [
        ("auto", 0, 1, 0, "cpu", ""),
        ("auto", 0, 4, 3, "cpu", ""),
        ("auto", 1, 1, 0, "cuda:0", ""),
        ("auto", 4, 4, 3, "cuda:3", ""),
        ("auto", 8, 2, 1, "cuda:1", ""),
        ("auto", 1, 4, 2, "cpu", "1 GPU for 4 ranks: ran on CPU"),
        ("cuda", 2, 2, 1, "cuda:1", ""),
        ("cpu", 4, 4, 3, "cpu", ""),
        ("cpu", 1, 4, 3, "cpu", ""),
    ],
)
def test_choice_of_the_device(monkeypatch, wish, gpus, ranks, index, device, note):
    set_machine(monkeypatch, wish, gpus, ranks, index)
    assert SESSION.choose_device() == (torch.device(device), note)


def test_hosts_that_were_made_on_one_machine_share_its_gpus(monkeypatch):
    set_machine(monkeypatch, "auto", gpus=4, ranks=2, index=1)
    os.environ.update(LABKIT_HOST_ON_THIS_MACHINE="1-host1", RANK="3", WORLD_SIZE="4")
    assert SESSION.choose_device() == (torch.device("cuda:3"), "")
    os.environ.update(WORLD_SIZE="8", RANK="3")
    assert SESSION.choose_device() == (torch.device("cpu"), "4 GPU for 8 ranks: ran on CPU")


@pytest.mark.parametrize(("gpus", "backend", "bound"), [(2, "nccl", "cuda:1"), (0, "gloo", None), (1, "gloo", None)])
def test_the_backend_is_nccl_where_every_rank_has_a_gpu(monkeypatch, gpus, backend, bound):
    set_machine(monkeypatch, "auto", gpus, 2, index=1)
    chosen = []

    def join(name, device_id):
        chosen.append((name, device_id and str(device_id)))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError), rank.session():
        pass
    assert chosen == ([bound] if bound else []) + [(backend, bound)]


def test_a_session_joins_as_the_rank_that_its_environment_names(monkeypatch):
    os.environ.update(RANK="2", WORLD_SIZE="3", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_PORT="1234")
    seen = {}

    def join(name, device_id):
        seen.update(os.environ)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError), rank.session():
        pass
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [seen[name] for name in names] == ["2", "3", "1", "localhost", "1234"]


def set_machine(monkeypatch, wish, gpus, ranks, index=0):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    # A card in MIG mode is eight slices to NVML, of which CUDA shows one.
    initialized = []
    monkeypatch.setattr(torch.cuda, "init", lambda: initialized.append(True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus if initialized else 8)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old GPU")
    os.environ.update(LABKIT_DEVICE=wish, LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(index))


@pytest.mark.parametrize(
    ("gpus", "ranks", "index", "device", "note"),
    [
        (1, 3, 2, "cuda:0", "shared GPU: mechanism, not speed"),
        (2, 3, 1, "cuda:1", "shared GPU: mechanism, not speed"),
        (2, 2, 1, "cuda:1", ""),
        (0, 2, 1, "cpu", ""),
    ],
)
def test_ranks_share_gpus_on_request(monkeypatch, gpus, ranks, index, device, note):
    set_machine(monkeypatch, "auto", gpus, ranks, index)
    os.environ.update(LABKIT_SHARE_GPUS="1", RANK=str(index))
    assert SESSION.choose_device() == (torch.device(device), note)
    # NCCL takes two ranks of one GPU for a mistake, unless it believes them on several hosts
    assert os.environ.get("NCCL_HOSTID") == (f"labkit-{index}" if note else None)


def test_ranks_on_the_cpu_do_not_ask_the_driver(monkeypatch):
    set_machine(monkeypatch, "cpu", 1, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the driver was asked"))
    assert SESSION.choose_device() == (torch.device("cpu"), "")


@pytest.mark.parametrize(
    ("capability", "used"), [((7, 5), True), ((8, 9), True), ((12, 1), True), ((6, 1), False), ((7, 0), False)]
)
def test_a_gpu_without_kernels_in_this_torch_is_not_used(monkeypatch, capability, used):
    set_machine(monkeypatch, "auto", 1, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    device, note = SESSION.choose_device()
    assert device.type == ("cuda" if used else "cpu")
    name = "sm_" + "".join(map(str, capability))
    built = "this torch has kernels for sm_75, sm_80, sm_90, sm_120 alone"
    assert note == ("" if used else f"no GPU is used: Old GPU is {name}, and {built}")


def test_a_drivers_version_is_its_number(monkeypatch, tmp_path):
    said = tmp_path / "version"
    monkeypatch.setattr(requirements, "DRIVER_VERSION_FILE", said)
    assert requirements.driver_version() == ""
    said.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13"
    )
    assert requirements.driver_version() == "580.159.04"


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    set_machine(monkeypatch, "auto", 0, 1)

    def warn():
        warnings.warn("The NVIDIA driver on your system is too old (found version 12040). Please update", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(requirements, "has_nvidia_driver", lambda: True)
    said = "no GPU is used: The NVIDIA driver on your system is too old (found version 12040)"
    assert SESSION.choose_device() == (torch.device("cpu"), said)
    monkeypatch.setattr(requirements, "has_nvidia_driver", lambda: False)
    assert SESSION.choose_device() == (torch.device("cpu"), "")


@pytest.mark.parametrize(("gpus", "ranks", "device"), [(1, 4, "cpu"), (4, 4, "cuda"), (0, 1, "cpu")])
def test_a_lab_computes_on_one_kind_of_device(monkeypatch, gpus, ranks, device):
    set_machine(monkeypatch, "auto", gpus, ranks)
    monkeypatch.delenv("LABKIT_DEVICE")
    assert labkit.use_one_device(ranks) == device == os.environ["LABKIT_DEVICE"]
    assert labkit.use_one_device(1) == device, "the first choice holds"


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (1, 2)])
def test_cuda_without_enough_gpus_is_refused(monkeypatch, gpus, ranks):
    set_machine(monkeypatch, "cuda", gpus, ranks)
    message = f"device cuda needs a GPU a rank: {gpus} GPUs for {ranks} ranks; use device='auto' or 'cpu'"
    with pytest.raises(ParameterError, match=message), rank.session():
        pass


def test_a_mesh_must_cover_the_ranks():
    with rank.session() as here, pytest.raises(ValueError, match="mesh 2 x 2 = 4 does not cover 1 ranks"):
        here.mesh(data=2, space=2)


def test_plain_steps_are_not_measured(tmp_path):
    os.environ["LABKIT_RUN_FOLDER"] = str(tmp_path)
    with rank.session() as here:
        for step in here.plain_steps(5, track=[]):
            with step.span("forward"):
                pass
            step.record_scalar("loss", 1.0)
    assert records.read_records(tmp_path).lines == []


def test_a_verdict_that_is_ok_is_the_last_line_and_is_recorded(tmp_path, capsys):
    os.environ["LABKIT_RUN_FOLDER"] = str(tmp_path)
    with rank.session() as here:
        here.finish_check(check="parity", compared=3, max_rel_error=1e-7, worst="bias", ok=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {"check": "parity", "compared": 3, "max_rel_error": 1e-7, "worst": "bias", "ok": True}
    values = {line["name"]: line["value"] for line in records.read_records(tmp_path).lines}
    assert values.items() >= {"compared": 3, "max_rel_error": 1e-7}.items()
    assert "worst" not in values


def test_a_verdict_that_is_not_ok_ends_a_rank_of_labkits_with_status_0(tmp_path, capsys):
    os.environ["LABKIT_RUN_FOLDER"] = str(tmp_path)
    with pytest.raises(SystemExit) as caught, rank.session() as here:
        here.finish_check(check="parity", compared=3, max_rel_error=math.nan, ok=False)
    assert caught.value.code == 0, "labkit reads the verdict, and takes another status for a failure"
    assert json.loads((tmp_path / "verdict.json").read_text())["ok"] is False
    assert '"ok": false' in capsys.readouterr().out.splitlines()[-1]
    assert math.isnan({line["name"]: line["value"] for line in records.read_records(tmp_path).lines}["max_rel_error"])


@pytest.mark.parametrize("compared", [0, math.nan])
def test_a_verdict_on_nothing_is_not_ok_whatever_it_says(compared, capsys):
    with pytest.raises(SystemExit) as caught, rank.session() as here:
        here.finish_check(check="parity", compared=compared, ok=True)
    assert caught.value.code == 1
    assert '"ok": false' in capsys.readouterr().out.splitlines()[-1]


def test_a_verdict_is_not_ok_if_that_of_another_rank_is_not(monkeypatch, capsys):
    def gather(everyone, own):
        everyone[:] = [own, False, own]

    with pytest.raises(SystemExit), rank.session() as here:
        here.world_size = 3
        monkeypatch.setattr(dist, "all_gather_object", gather)
        here.finish_check(check="parity", compared=3, ok=True)
    assert '"ok": false' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("missing", ["ok", "compared"])
def test_a_verdict_that_does_not_say_whether_it_is_ok_or_what_it_compared_is_refused(missing):
    result = {"ok": True, "compared": 3}
    del result[missing]
    with rank.session() as here, pytest.raises(ValueError, match=f"and {missing} is missing"):
        here.finish_check(**result)


@dataclass
class Config:
    width: int = 4
    """Must be even."""

    def validate(self, world_size):
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")


def test_start_reads_the_command_line_and_leaves_with_status_0(monkeypatch):
    called = []
    monkeypatch.setattr(sys, "argv", ["program", "--width", "6"])
    monkeypatch.setattr(SESSION, "exit_process", called.append)  # which would run the exit functions of this process
    rank.run_main(called.append, Config)
    assert called == [Config(width=6), 0]


def test_an_error_of_the_program_passes_through_start_to_labkits_worker(monkeypatch):
    def fail(config):
        raise ValueError("widths differ")

    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setenv("LABKIT_RUN_FOLDER", "anywhere")
    monkeypatch.setattr(SESSION, "exit_process", lambda status: pytest.fail("the error was swallowed"))
    with pytest.raises(ValueError, match="widths differ"):
        rank.run_main(fail, Config)


def test_start_refuses_in_one_line_of_rank_0(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--width", "3"])
    with pytest.raises(SystemExit) as caught:
        rank.run_main(pytest.fail, Config)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "width 3 is odd\n"


def test_other_ranks_wait_for_rank_0_to_say_it(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(SESSION.time, "sleep", waits.append)
    os.environ["RANK"] = "2"
    with pytest.raises(SystemExit) as caught:
        rank.exit_with_reason("width 3 is odd")
    assert (caught.value.code, capsys.readouterr().err) == (2, "")
    assert waits and waits[0] > 0


def test_only_rank_0_prints(capsys):
    for index in range(2):
        rank.Session(index, 2, torch.device("cpu"), records.RecordWriter(None, index)).print_on_rank_0(f"rank {index}")
    assert capsys.readouterr().out == "rank 0\n"


def test_the_lab_program_runs_alone(repository):
    small = ["--strategy", "plain", "--height", "16", "--width", "16", "--dims", "4", "4", "--steps", "2"]
    command = [sys.executable, "-m", "launch.convnext_spatial", *small]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=repository)
    assert answer.returncode == 0, answer.stderr
    shown = {line.split()[0] for line in answer.stdout.splitlines()}
    assert shown >= {"rank", "forward", "backward", "optimizer", "step", "resident", "peak_activation"}
    assert "median of 2 steps" in answer.stdout


@pytest.mark.long  # three busy processes for a minute, which tests beside it would feel
def test_a_rank_may_leave_as_soon_as_it_has_joined(tmp_path):
    """Without a barrier gloo's other ranks may still be connecting, and fail: pytorch/pytorch#53270."""
    program = tmp_path / "leaves_at_once.py"
    program.write_text("from labkit import rank\nwith rank.session():\n    pass\n")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for _ in range(25):
            labkit.run(program, nproc=2, warm=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
