"""A rank's process does at its end what Python does at a program's end, although it leaves with os._exit."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import labkit
from labkit.errors import RankFailed

LEFTOVERS, LEAVING = (Path(__file__).parent / "programs" / name for name in ("leftovers.py", "leaving.py"))


@pytest.fixture(scope="module")
def leftovers(tmp_path_factory):
    """What the same program leaves behind under a bare torchrun and under labkit.run, and why the latter failed."""
    folders = {way: tmp_path_factory.mktemp(way) for way in ("torchrun", "labkit")}
    with mock.patch.dict(os.environ, {"LEFTOVERS": str(folders["torchrun"])}):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(LEFTOVERS)]
        bare = subprocess.run(command, capture_output=True, text=True, timeout=100)
    with mock.patch.dict(os.environ, {"LEFTOVERS": str(folders["labkit"])}), pytest.raises(RankFailed) as caught:
        labkit.run(LEFTOVERS, nproc=3, device="cpu")
    return contents_of(folders["torchrun"]), contents_of(folders["labkit"]), bare, caught.value


def contents_of(folder):
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: gzip.decompress(found) if name.endswith(".gz") else found for name, found in contents.items()}


def test_a_rank_does_at_its_end_what_it_does_under_a_bare_torchrun(leftovers):
    bare, ours, torchrun, failed = leftovers
    assert ours.keys() == bare.keys()
    assert {name for name in ours if ours[name] != bare[name]} <= {
        f"{r}_{w}" for r in range(3) for w in ("pid", "random")
    }
    for rank in range(3):  # it ends, it ends through rank.start, it raises
        assert ours[f"{rank}_left_open"] == f"text of rank {rank}\n".encode()
        assert ours[f"{rank}_left_open_binary"] == b"bytes"
        assert ours[f"{rank}_compressed.gz"] == b"text\n"
        assert ours[f"{rank}_log"] == b"kept in memory\n"
        assert {f"{rank}_{what}" for what in ("atexit", "finalizer", "thread", "process")} <= set(ours)
        log = failed.log.with_name(f"rank_{rank:05d}.log").read_text()
        assert log.count("printed by native code") == 1
        assert log.count("an exit function that fails") == torchrun.stderr.count("an exit function that fails") / 3
    assert (failed.rank, failed.message) == (2, "rank 2 fails")


def test_a_rank_begins_as_under_a_bare_torchrun(leftovers):
    bare, ours, _, _ = leftovers
    facts = json.loads(ours["0_facts"])
    assert facts["leader"] and facts["handlers"] == [True, True] and facts["main"] == "__main__" and not facts["argv"]
    assert all(ours[f"{rank}_facts"] == bare[f"{rank}_facts"] for rank in range(3))
    assert len({ours[f"{rank}_random"] for rank in range(3)}) == 3, "each with a seed of its own"


FORKS = """
import atexit, os, sys, weakref
from labkit.session.process_exit import reset_exit_handlers, exit_process

class Held:
    pass

held, file = Held(), open("file", "w")
atexit.register(print, "exit function")
weakref.finalize(held, print, "finalizer")
file.write("once ")
if (child := os.fork()) == 0:
    reset_exit_handlers()
    atexit.register(print, "of the child")
    own = open("own", "w")
    own.write("text of the child")
    exit_process(3 + 256)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("of the parent, after status", status, flush=True)
exit_process(0)
"""


def test_a_forked_process_leaves_its_parents_end_to_the_parent(tmp_path):
    answer = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert answer.stdout.splitlines() == [
        "of the child",
        "of the parent, after status 3",
        "finalizer",
        "exit function",
    ]
    assert (tmp_path / "own").read_text() == "text of the child"
    assert (tmp_path / "file").read_text() == "once "


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        pytest.param("well", 0, "", marks=pytest.mark.long),
        ("raise", 1, "RuntimeError: the rank fails\n"),
        ("status", 3, ""),
        pytest.param("words", 1, "some words\n", marks=pytest.mark.long),
    ],
)
def test_a_rank_without_labkits_worker_is_not_taken_apart_either(how, status, said, monkeypatch):
    monkeypatch.delenv("LABKIT_RUN_FOLDER", raising=False)
    done = subprocess.run([sys.executable, str(LEAVING), "--ends", how], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said) and ("Traceback" in done.stderr) == (how == "raise")
