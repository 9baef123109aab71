"""launch/ddp_compile: three buckets at width 2000, in theory, by inductor's count, in its program and on the wire."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit import doctor, inductor, requirements
from labkit.config import build_config, read_config
from labkit.errors import ParameterError
from labkit.launcher.run import find_program
from labkit.parallel import ddp
from labkit.parity import ddp as parity
from labkit.theory.ddp import chain_buckets

ASK_FOR_ALL = ["request 0", "request 1", "request 2", "wait 0", "wait 1", "wait 2"]
ON_TOP = {  # of older gradients: what has arrived is added to them when the compiler sees fit, not in turn
    "coalesced": ["request 0", "wait 0", "request 1", "request 2", "wait 1", "wait 2"],
    "concat": ["request 0", "request 1", "request 2", "wait 1", "wait 0", "wait 2"],
}
if requirements.torch_version() < (2, 13):  # it saw fit to wait at once
    ON_TOP["coalesced"] = ["request 0", "wait 0", "request 1", "wait 1", "request 2", "wait 2"]
GPUS = torch.cuda.device_count()


def last_line(result):
    return json.loads(result.ranks[0].log().splitlines()[-1])


def look(dim, bucket_mb, fuse, case="cpu"):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    build = partial(parity.build_chain, dim, ddp.DDP_CASES[case], torch.device("cpu"), batch=1)
    return parity.compare_buckets(build, mesh, ddp.DDP_CASES[case], bucket_mb=bucket_mb, fuse=fuse)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("dim", "bucket_mb", "fuse", "case", "buckets"),
    [
        pytest.param(2000, 25.0, "coalesced", "cpu", 3, marks=pytest.mark.long),
        pytest.param(2000, 25.0, "concat", "cpu", 3, marks=pytest.mark.long),
        pytest.param(2000, 1.0, "coalesced", "cpu", 5, marks=pytest.mark.long),
        pytest.param(2000, 5.0, "concat", "cpu", 5, marks=pytest.mark.long),
        pytest.param(2000, 100.0, "coalesced", "cpu", 2, marks=pytest.mark.long),
        pytest.param(512, 1.6, "coalesced", "backward_only", 3, marks=pytest.mark.long),
        (512, 1.6, "concat", "cpu", 3),
    ],
)
def test_buckets_are_as_predicted_without_gradients_and_on_top_of_them(ranks, dim, bucket_mb, fuse, case, buckets):
    for verdict in ranks(2, timeout_s=180)(look, dim, bucket_mb, fuse, case):
        assert verdict["ok"], verdict
        assert verdict["predicted"] == buckets
        assert verdict["counted"] == [buckets, buckets]
        assert len(verdict["predicted_bytes"]) == buckets
        assert verdict["listed_bytes"] == verdict["handed_bytes"] == [verdict["predicted_bytes"]] * 2
        assert sum(verdict["predicted_bytes"]) == 4 * 4 * (dim * dim + dim)
        assert verdict["programs"] == 2 and verdict["waits_missing"] == 0
        waits = [sum(buckets) for buckets in verdict["waits"]]
        assert waits == [buckets if fuse == "concat" else 8] * 2, "one for every tensor that is sent"
        if (dim, bucket_mb) == (2000, 25.0):
            assert verdict["orders"] == [ASK_FOR_ALL, ON_TOP[fuse]]


def look_with_a_wrong_size():
    """Let inductor fuse in another size than theory is asked about."""
    fused = ddp.fuse_all_reduces
    ddp.fuse_all_reduces = lambda mode, bucket_mb, **how: fused(mode, 100.0, **how)
    try:
        return look(512, 1.6, "coalesced")
    finally:
        ddp.fuse_all_reduces = fused


@pytest.mark.long
def test_a_size_that_is_not_kept_is_seen(ranks):
    for verdict in ranks(2)(look_with_a_wrong_size):
        assert not verdict["ok"]
        assert (verdict["predicted"], verdict["counted"]) == (3, [2, 2])


MEASURED = [("compiled", "cpu"), ("ddp", "cpu_no_sync"), ("replicate", "bf16")]


@pytest.fixture(scope="module")
def runs():
    """Of MEASURED by mode, and "parity", in one launch."""
    setup = {"dim": 512, "bucket_mb": 1.6, "steps": 2}
    cells = {mode: setup | {"mode": mode, "case": case, "timeline": mode == "ddp"} for mode, case in MEASURED}
    cells["parity"] = {"check": "parity", "case": "cpu_no_sync", "dim": 64, "inductor": False}
    return dict(zip(cells, run_cells("ddp_compile", 2, list(cells.values())), strict=True))


@pytest.mark.timeout(200)
def test_parity_prints_how_many_numbers_it_compared(runs):
    verdict = last_line(runs["parity"])
    assert verdict["ok"] and (verdict["check"], verdict["case"]) == ("parity", "cpu_no_sync")
    assert verdict["compared"] == 104 and verdict["max_rel_error"] <= verdict["limit"] == 1e-5


SPY = """
from labkit.models.chain import LinearChain
from launch import ddp_compile

original = LinearChain.get_input

def told(self, *arguments, **named):
    inputs = original(self, *arguments, **named)
    print("samples:", len(inputs[0]))
    return inputs

LinearChain.get_input = told
ddp_compile.main(ddp_compile.Config(dim=8, batch=7, steps=1, mode="ddp", inductor=False, check=CHECK))
"""


@pytest.mark.parametrize("check", [pytest.param("none", marks=pytest.mark.long), "parity"])
def test_a_check_takes_the_batch_that_is_trained(tmp_path, check):
    (tmp_path / "spy.py").write_text(SPY.replace("CHECK", repr(check)))
    log = labkit.run(tmp_path / "spy.py", nproc=2, device="cpu").ranks[0].log()
    assert {line for line in log.splitlines() if line.startswith("samples:")} == {"samples: 7"}


@pytest.mark.skipif(GPUS < 1, reason="case gpu needs a GPU; run this on a host with one")
def test_the_gpu_case_equals_one_gpu():
    result = labkit.run("ddp_compile", nproc=min(GPUS, 2), device="cuda", check="parity", case="gpu", dim=256)
    assert last_line(result)["ok"]


def buckets_of(result):
    """Names and bytes of what rank 0 sent, by bucket, in order."""
    sent = result.frame.query("kind == 'bucket' and rank == 0")
    found: dict[int, dict[str, int]] = {}
    for index, name, size in zip(sent["index"], sent["name"], sent["bytes"], strict=True):
        found.setdefault(index, {})[name] = int(size)
    assert list(found) == list(range(len(found)))
    return list(found.values())


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("mode", "case"), MEASURED)
def test_a_measured_run_records_buckets_times_and_the_program(runs, mode, case):
    result = runs[mode]
    way = "compiled" if mode == "compiled" else "eager"
    theory = chain_buckets(512, 1.6, way=way, compressed=case == "bf16")
    assert [list(bucket.items()) for bucket in buckets_of(result)] == [list(bucket.items()) for bucket in theory]
    assert result.value("all_reduce_count") == len(theory), "the traced step runs compiled code, and no batch too many"
    assert result.value("all_reduce_bytes") == sum(sum(bucket.values()) for bucket in theory)
    assert all(result.value(f"{part}_ms") > 0 for part in ("forward", "backward", "optimizer", "step"))
    if mode == "compiled":
        assert repr(inductor.ProgramListing(result.ranks[0].artifact("code"))).count(" collective ") == 3
    else:
        with pytest.raises(FileNotFoundError):
            result.ranks[0].artifact("code")
    if mode == "ddp":
        bars = result.frame.query("kind == 'bar'")[["lane", "phase", "name"]].itertuples(index=False, name=None)
        assert {("compute", "backward", "fc4"), ("communication", "all_reduce", "bucket 1")} <= set(bars)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mode": "ddp", "case": "backward_only"}, "mode ddp compiles nothing"),
        ({"mode": "compiled", "graph": "split"}, "graph compiles the module inside DDP"),
        ({"mode": "ddp", "graph": "whole", "sizes_mb": (1.0,)}, "graph compiles the module inside DDP"),
        ({"check": "buckets", "fuse": "none"}, "use fuse coalesced or concat"),
        ({"check": "buckets", "inductor": False}, "and inductor"),
        ({"check": "buckets", "case": "bf16"}, "check buckets looks at one float32 backward pass, not at case bf16"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(parameters, message):
    with pytest.raises(ParameterError, match=message):
        labkit.run("ddp_compile", nproc=2, device="cpu", **parameters)


def test_the_gpu_case_wants_a_gpu_for_every_rank():
    # the hosts of a run may have the GPUs that this machine lacks, so only the ranks can tell
    with pytest.raises(labkit.RankFailed, match="case gpu was sent to device cpu: use case cpu"):
        labkit.run("ddp_compile", nproc=GPUS + 1, check="parity", case="gpu", inductor=False)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(requirements.sys, "platform", "linux")
    return tmp_path


@pytest.mark.parametrize(
    ("program", "parameters"),
    [
        ("ddp_compile", {}),
        ("ddp_compile", {"mode": "ddp", "check": "parity"}),
        ("ddp_compile", {"check": "buckets"}),
        ("fsdp_matrix", {"compile": True}),
    ],
)
def test_without_a_compiler_a_lab_says_so_before_a_launch(no_compiler, program, parameters):
    with pytest.raises(ParameterError, match=r"needs a C\+\+ compiler: no g\+\+; to get one: apt-get install g\+\+"):
        labkit.run(program, nproc=2, device="cpu", **parameters)
    assert doctor.check_compiler().fix == requirements.COMPILER_FIX


def test_a_compiler_that_inductor_would_not_call_is_named(no_compiler):
    program = no_compiler / "clang++"
    program.write_text("#!/bin/sh\necho clang 99\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match=r"no g\+\+; set CXX=clang\+\+ to use the compiler that is here"):
        requirements.refuse_without_compiler()


def test_cxx_decides(no_compiler, monkeypatch):
    monkeypatch.setenv("CXX", str(no_compiler / "mine"))
    with pytest.raises(ValueError, match="mine', which is no program"):
        requirements.refuse_without_compiler()
    (no_compiler / "mine").write_text("#!/bin/sh\necho mine 1.0\n")
    (no_compiler / "mine").chmod(0o755)
    requirements.refuse_without_compiler()
    assert doctor.check_compiler().detail == "mine 1.0"


def test_what_compiles_nothing_needs_no_compiler(no_compiler):
    config_class = read_config(find_program("ddp_compile")[0])
    assert config_class is not None
    for parameters in ({"mode": "ddp"}, {"inductor": False}):
        assert build_config(config_class, parameters, world_size=2)
