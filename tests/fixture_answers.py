"""Fixtures for checks: ``answer_to`` makes a function from text, ``ranks_at_hand`` judges it without a launch.

A check launches its ranks anew, which takes seconds. The processes of ``fixture_ranks`` are there already, and do the
same: so many wrong answers can be judged, each by the check itself.
"""

import importlib.util
import itertools
import json
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fixture_ranks import RankFailure

import labkit
from labkit.session import counted_group
from labkit_course.checks.ranks import answer_program

PEERS_S = 2.0
"""How long a rank that failed waits for others to end."""


@pytest.fixture
def answer_to(tmp_path):
    """Makes a function from its head and the text of its body, with a file behind it; ``imports`` come before."""
    numbers = itertools.count()

    def made(head, body, imports=""):
        name = f"cell_{tmp_path.name}_{next(numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(f"{imports}{head}\n{textwrap.indent(textwrap.dedent(body).strip(chr(10)), '    ')}\n")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, head.split()[1].split("(")[0])

    return made


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fails a test that starts a run."""
    monkeypatch.setattr(labkit, "run", lambda *arguments, **parameters: pytest.fail("a run was started"))


@pytest.fixture
def ranks_at_hand(rank_pool, monkeypatch):
    """Lets checks run their program on the processes of ``fixture_ranks``, as labkit.run would on new ones."""

    def run(path, *, nproc, device, timeout_s, folder, digest, lab, setup):
        try:
            rank_pool.run(nproc, be_a_rank, (folder, digest, lab, setup), timeout_s)
        except RankFailure as failure:
            if not any(Path(folder).glob("failure_*")):
                # gloo aborts a process that receives too much; where it ends all of them, none leaves a file.
                ended = re.search(r"rank (\d+) .*ended with exit status -(\d+)", str(failure), flags=re.DOTALL)
                if not ended:
                    raise
                name = signal.Signals(int(ended[2])).name
                raise labkit.RankFailed(int(ended[1]), name, "", "", Path(folder) / "run" / "log") from failure
        for rank in range(nproc):
            failure = failure_path(folder, rank)
            if failure.exists():
                raise labkit.RankFailed(rank, *json.loads(failure.read_text()), "", Path(folder) / "run" / "log")

    monkeypatch.setattr(labkit, "run", run)


def failure_path(folder, rank):
    return Path(folder) / f"failure_{rank}"


def be_a_rank(folder, digest, lab, setup):
    """What the program of the checks does in its session. What it raises is left in a file."""
    allclose, answer_program.PEER_WAIT_S = torch.allclose, 0  # these processes stay anyway
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        answer_program.save_answer_output(Path(folder), digest, lab, json.loads(setup))
    except Exception as error:
        failure_path(folder, rank).write_text(json.dumps([type(error).__name__, str(error)]))
        # as torchrun would, end those that still wait for this rank
        give_up = time.monotonic() + PEERS_S
        while not all(has_ended(folder, each) for each in range(ranks)):
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    finally:
        torch.allclose = allclose  # which an answer may have replaced, and these processes judge no other by it
        # A rank's process would end now, and with it the threads and sockets of groups that it has left.
        for kept in (counted_group._replaced_groups, counted_group.calls, counted_group.messages):
            kept.clear()


def has_ended(folder, rank):
    return failure_path(folder, rank).exists() or answer_program.output_path(Path(folder), rank).exists()
