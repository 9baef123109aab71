"""labkit.session.memory_cap: what fits under a cap runs, what does not says so, and the cap ends with its block."""

import contextlib
import resource
import sys

import pytest
import torch

import labkit
import labkit.rank
from labkit import requirements
from labkit.errors import MemoryCapExceeded
from labkit.session.memory_cap import cap_memory
from launch import fsdp_matrix

CPU, MIB = torch.device("cpu"), 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="a cap on CPU memory needs Linux")


def held(mib):
    return torch.zeros(mib * MIB // 4)


@linux
def test_what_fits_is_allocated_and_what_does_not_is_refused():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with cap_memory(300, CPU):
        assert held(200).sum() == 0
    refused = pytest.raises(
        MemoryCapExceeded, match=r"more than its cap of 100 MiB was needed .*: shard over more ranks"
    )
    with refused, cap_memory(100, CPU):
        held(200)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert held(200).sum() == 0


@linux
def test_other_errors_pass_and_no_cap_caps_nothing():
    with pytest.raises(RuntimeError, match="mine"), cap_memory(100, CPU):
        raise RuntimeError("mine")
    with cap_memory(None, CPU):
        assert held(200).sum() == 0


def test_another_system_says_that_it_cannot(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="needs a GPU or Linux"), cap_memory(100, CPU):
        pass


@linux
def test_a_program_caps_what_its_model_takes(monkeypatch, lone_rank):
    monkeypatch.setattr(labkit.rank, "session", lambda: contextlib.nullcontext(lone_rank))
    with pytest.raises(MemoryCapExceeded, match="more than its cap of 64 MiB was needed"):
        fsdp_matrix.main(fsdp_matrix.Config(hidden=6000, memory_cap_mib=64))


@pytest.mark.long  # the labs' solved notebooks do the same
@linux
def test_a_model_that_one_rank_cannot_hold_fits_where_it_is_sharded():
    how = {
        "device": "cpu",
        "hidden": 3000,
        "narrow": 16,
        "batch": 1,
        "steps": 1,
        "wrap": "layer",
        "memory_cap_mib": 320,
    }
    with pytest.raises(labkit.RankFailed, match="more than its cap of 320 MiB was needed") as caught:
        labkit.run("fsdp_matrix", nproc=2, **how | {"wrap": "none"})
    assert caught.value.exc_type == "MemoryCapExceeded"
    assert labkit.run("fsdp_matrix", nproc=4, **how).ok, "torch 2.11 gathers more than later ones: two would not do"


@pytest.mark.long
@linux
def test_an_image_that_fits_only_when_it_is_sharded(monkeypatch):
    monkeypatch.setenv("LABKIT_WARM", "0")  # the test before has warm ranks
    how = {"device": "cpu", "height": 512, "width": 1024, "steps": 1, "memory_cap_mib": 250}
    with pytest.raises(labkit.RankFailed, match="more than its cap of 250 MiB was needed"):
        labkit.run("convnext_spatial", nproc=1, strategy="plain", **how)
    assert labkit.run("convnext_spatial", nproc=2, strategy="local", **how).ok


@linux
@pytest.mark.long
def test_threads_of_sixteen_cores_do_not_count_as_memory_of_the_step(monkeypatch):
    """Seen on a machine of 16 cores, where no number of ranks could train."""
    monkeypatch.setattr(requirements, "usable_cores", lambda: list(range(16)))
    how = {"device": "cpu", "height": 512, "width": 1024, "steps": 1, "memory_cap_mib": 220}
    assert labkit.run("convnext_spatial", nproc=2, strategy="local", **how).session["threads"] == 8
