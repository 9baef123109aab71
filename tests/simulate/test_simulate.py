"""labkit.simulate against real ranks: sizes and counts to the byte, no values, and errors that name the line."""

from pathlib import Path

import pytest
from fixture_long import long_but

import labkit
from labkit.__main__ import main
from labkit.theory.two_dim import mlp_pairs
from labkit_simulate.memory_fit import memory_fit
from labkit_simulate.run_simulation import make_simulation_request
from labkit_simulate.theory.allocator import OUTSIDE_ALLOCATOR_BYTES

PROGRAMS = Path(__file__).parents[1] / "programs"
PLAIN, DDP = PROGRAMS / "plain_training.py", PROGRAMS / "ddp_training.py"
FOR_GPUS = PROGRAMS / "gpu_training.py"

LABS = {
    "spatial": ("convnext_spatial", {"drop_path_rate": 0.1, "steps": 1}),
    "fsdp": ("fsdp_wrap", {"model": "transformer", "steps": 1}),
    "extensions": ("allgather_extensions", {"extension": "int8", "steps": 1}),
    "two_dim": ("two_dim", {"seq": True, "checkpointing": True, "steps": 1}),
}
MORE = {
    "hybrid": ("fsdp_matrix", {"hybrid": 2, "steps": 2}),
    "replicated": ("fsdp_wrap", {"wrap": "none", "steps": 2}),
    "data x space": ("convnext_spatial", {"mesh": "2x2", "steps": 2}),
    "decoder": ("decoder", {"precision": "bf16", "checkpointing": "selective", "steps": 2}),
    "decoder, tp": ("decoder", {"tp": 2, "precision": "bf16", "steps": 2}),
    "decoder, tp and sequence": ("decoder", {"tp": 2, "seq": True, "checkpointing": "full", "steps": 2}),
    "decoder, hybrid": ("decoder", {"hybrid": 2, "reshard": False, "steps": 2}),
    "all_reduce": ("all_reduce", {"repeats": 1}),
    "ddp": (DDP, {"bucket_mb": 0.5}),
    "ddp, gradients in buckets": (DDP, {"views": True}),
    "ddp, unused parameters": (DDP, {"unused": True}),
    "two batches a step": ("fsdp_matrix", {"accumulate": 2, "scaler": True, "steps": 1}),
}
OWN = ("resident_bytes", "gpu_allocated_bytes", "gpu_reserved_bytes")
"""What the process of a rank held, which is no business of a simulation, and what it would take of a GPU."""


def sizes_of(result):
    """Every value in bytes and every count, of every rank."""
    rows = result.summary().to_dict("index")
    return {rank: {name: row[name] for name in row if is_size(name)} for rank, row in rows.items()}


def is_size(name):
    return name.endswith(("_bytes", "_count")) and name not in OWN


@pytest.mark.parametrize("ranks", long_but([2], [2, 4]))
@pytest.mark.parametrize("lab", LABS)
def test_sizes_and_counts_are_those_of_real_ranks(lab, ranks):
    program, params = LABS[lab]
    real = labkit.run(program, nproc=ranks, device="cpu", **params)
    simulated = labkit.simulate(program, world_size=ranks, rank=[0, ranks - 1], **params)
    assert sizes_of(simulated) == {rank: sizes_of(real)[rank] for rank in (0, ranks - 1)}
    assert len(sizes_of(real)[0]) > 5


@pytest.mark.parametrize("case", long_but(["data x space", "decoder, tp and sequence"], MORE))
def test_so_they_are_on_other_meshes(case):
    program, params = MORE[case]
    real = labkit.run(program, nproc=4, device="cpu", **params)
    simulated = labkit.simulate(program, world_size=4, rank=3, **params)
    assert sizes_of(simulated) == {3: sizes_of(real)[3]}


def test_a_simulation_says_what_it_is_and_holds_no_values_and_no_times():
    result = labkit.simulate(
        "fsdp_matrix", world_size=1024, rank=[0, 1023], hybrid=8, model="mlp_stack", dim=1024, steps=2
    )
    assert result.ok and result.is_simulated and (result.world_size, result.active_ranks) == (1024, [0, 1023])
    assert result.stamp.startswith("simulated · 1024 ranks on 128 hosts")
    assert result.stamp.splitlines()[0] in repr(result)
    assert set(result.frame["kind"]) == {"memory", "comm"} and list(result.summary()["host"]) == ["host 0", "host 127"]
    again = labkit.load(result.folder)
    assert again.frame.equals(result.frame) and again.is_simulated and again.info["simulated"] is True
    # groups of 8 are a host, and each replicates its shard on all others
    assert result.value("data/all_gather_between_hosts_count") == 0 < result.value("data/all_gather_count")
    crossing = result.value("replicate/all_reduce_between_hosts_bytes")
    assert crossing == result.value("replicate/all_reduce_bytes") > 0
    numbers = sum(2 * width * inner + width + inner for width, inner in mlp_pairs(1024))
    assert result.value("peak_parameter_bytes") == 4 * numbers / 8


@pytest.mark.parametrize(
    ("program", "how", "message"),
    [
        ("fsdp_matrix", {"world_size": 6, "hybrid": 4}, "6 ranks cannot be cut into groups of hybrid = 4"),
        ("two_dim", {"world_size": 1000, "tp": 16}, "1000 ranks cannot be cut into lines of tp = 16"),
        ("decoder", {"world_size": 16, "tp": 4, "hybrid": 8}, "16 ranks are 4 lines of tp = 4, which cannot be cut"),
        ("convnext_spatial", {"world_size": 1024}, "1024"),
        ("fsdp_wrap", {"world_size": 0}, "world_size = 0 is not a number of ranks"),
        ("fsdp_wrap", {"world_size": 4, "rank": 4}, "rank = 4: give one from 0 to 3"),
        ("fsdp_wrap", {"world_size": 4, "rank": []}, "rank = []: give one from 0 to 3"),
        ("fsdp_wrap", {"world_size": 65, "rank": "all"}, "rank = 'all' of 65: 64 processes are the limit"),
        ("fsdp_wrap", {"world_size": 4, "rank": "some"}, "rank = 'some': give one from 0 to 3"),
        ("fsdp_wrap", {"world_size": 4, "ranks_per_host": -1}, "ranks_per_host = -1 is not a number of GPUs"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic_before_anything_starts(program, how, message):
    with pytest.raises(labkit.ParameterError) as refused:
        make_simulation_request(program, **how)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("program", "rank", "params", "chosen"),
    [
        ("fsdp_wrap", "different", {}, [0, 4, 7]),
        ("convnext_spatial", "different", {"mesh": "2x4"}, [0, 2, 3]),
        (PLAIN, "different", {}, [0, 4, 7]),
        ("fsdp_wrap", "all", {}, list(range(8))),
    ],
)
def test_ranks_that_differ_are_the_programs_choice(program, rank, params, chosen):
    assert make_simulation_request(program, world_size=8, rank=rank, **params).ranks == chosen


def test_a_plain_program_is_watched_and_its_steps_are_those_of_its_optimizer():
    result = labkit.simulate(PLAIN, world_size=64, rank=3)
    assert result.stamp.startswith("simulated · 64 ranks on 8 hosts")
    weights = 64 * 64 + 64
    assert result.value("data/reduce_scatter_count") == result.value("reduce_scatter_count") == 4
    assert result.value("reduce_scatter_bytes") == 4 * 4 * weights
    assert result.value("all_gather_bytes") == 2 * 4 * 4 * weights // 64, "forward and backward"
    steps = result.frame.query("kind == 'comm' and name == 'all_gather' and axis == ''")["step"]
    assert list(steps) == [-1, 0, 1], "the first may be another, and is the warm-up"
    assert 4 * 4 * weights <= result.value("start_peak_total_bytes"), "the model is whole on every rank at first"
    assert 0 < result.value("peak_optstate_bytes") < result.value("peak_total_bytes")


@pytest.mark.long  # eight simulations
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_program_for_gpus_holds_and_sends_what_it_does_on_cpus(how, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if how == "fsdp":
        monkeypatch.setenv("SHARD", "1")
    with_gpus = labkit.simulate(FOR_GPUS, world_size=16, rank=[0, 13])
    monkeypatch.setenv("ON_CPU", "1")
    without = labkit.simulate(FOR_GPUS, world_size=16, rank=[0, 13])
    assert sizes_of(with_gpus) == sizes_of(without) and len(sizes_of(without)[13]) > 10
    said, *_ = with_gpus.ranks[13].log().splitlines()
    _, nothing, _, held, most = said.split()
    assert nothing == "nan" and 0 < int(held) <= int(most), "held is what the simulation holds, and no time is known"
    start, later = (with_gpus.value(name) for name in ("start_peak_total_bytes", "peak_total_bytes"))
    assert int(most) == max(start, later)
    assert "held" not in without.ranks[13].log()
    assert "nothing is saved in training.pt" in with_gpus.ranks[0].log() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "exc_type", "message"),
    [
        (
            "torch.empty(2, device=f'cuda:{dist.get_rank()}')",
            "ParameterError",
            "cuda:13 is not there: a host has 8 GPUs",
        ),
        ("dist.destroy_process_group(); dist.init_process_group('nccl', rank=0)", "ParameterError", "joins as rank 0"),
        ("dist.init_process_group('nccl', world_size=8)", "ParameterError", "simulate with world_size=8"),
        ("torch.multiprocessing.spawn(print, nprocs=4)", "ParameterError", "the program starts 4 ranks, and 16"),
        ("torch.cuda.mem_get_info()", "LabError", "asks for what only a GPU knows"),
    ],
)
def test_what_a_program_for_gpus_cannot_have_is_said(line, exc_type, message, monkeypatch):
    monkeypatch.setenv("ASK", line)
    with pytest.raises(labkit.RankFailed) as failed:
        labkit.simulate(FOR_GPUS, world_size=16, rank=13)
    assert failed.value.exc_type == exc_type and message in failed.value.message


def test_a_program_that_starts_its_own_ranks_is_one_of_them(monkeypatch):
    monkeypatch.setenv("ASK", "torch.multiprocessing.spawn(print, args=('of 8',), nprocs=torch.cuda.device_count())")
    result = labkit.simulate(FOR_GPUS, world_size=16, rank=13)
    assert "5 of 8" in result.ranks[13].log().splitlines()


@pytest.mark.parametrize("program", long_but([PLAIN], [PLAIN, "allgather_extensions"]))
def test_a_program_that_reads_a_number_is_told_its_line(program, monkeypatch):
    monkeypatch.setenv("READ", "1")
    params = {} if program == PLAIN else {"check": "loss", "steps": 60}
    with pytest.raises(labkit.RankFailed) as failed:
        labkit.simulate(program, world_size=8, rank=5, **params)
    assert (failed.value.rank, failed.value.exc_type) == (5, "NoValues")
    assert "simulated tensors have none" in failed.value.message
    if program == PLAIN:
        line = PLAIN.read_text().splitlines().index('    print("loss", loss.item())') + 1
        assert f"{PLAIN}:{line} reads a number" in failed.value.message
        assert failed.value.message.splitlines()[0].endswith('print("loss", loss.item())')
        assert "site-packages" not in failed.value.traceback
        assert "run_rank.py" not in failed.value.traceback, "a learner's own frames come first"


def test_a_compiled_program_is_refused_by_name():
    with pytest.raises(labkit.RankFailed, match=r"what torch\.compile makes cannot be simulated"):
        labkit.simulate("ddp_compile", world_size=2)


def test_whether_it_fits_is_said_with_the_margin():
    result = labkit.simulate("fsdp_wrap", world_size=64, model="mlp_stack", dim=2048, steps=2)
    curve = list(map(int, result.ranks[0].artifact("memory").split()))
    assert max(curve) >= result.value("peak_total_bytes") and curve[-1] == result.value("end_total_bytes")
    assert max(curve) <= result.value("gpu_allocated_bytes") <= result.value("gpu_reserved_bytes")
    needed = (result.value("gpu_reserved_bytes") + sum(OUTSIDE_ALLOCATOR_BYTES.values())) / 2**30
    assert memory_fit(result, needed + 1) and memory_fit(result, needed + 1).margin_bytes == pytest.approx(2**30, abs=1)
    assert not memory_fit(result, needed / 2) and "are missing" in str(memory_fit(result, needed / 2))


def test_the_command_line_simulates(capsys):
    assert main(["simulate", "all_reduce", "--world-size", "16", "--rank", "0", "15", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "all_reduce_between_hosts_bytes" in shown and "recorded in" in shown
    with pytest.raises(SystemExit):
        main(["simulate"])
    assert "PROGRAM" in capsys.readouterr().err
    assert main(["simulate", "all_reduce", "--world-size", "1"]) == 2
    assert "an all-reduce needs at least 2 ranks" in capsys.readouterr().err
