"""Fixtures for checks: ``answer_to`` makes a function from text, ``ranks_at_hand`` judges it without a launch.

A check launches its ranks anew, which takes seconds. The processes of ``fixture_ranks`` are there already, and do the
same: so many wrong answers can be judged, each by the check itself.
"""

import importlib.util
import itertools
import json
import textwrap
from pathlib import Path

import pytest
import torch

import labkit
from labkit.checks.ranks import answer_program


@pytest.fixture
def answer_to(tmp_path):
    """Makes a function from its head and the text of its body, with a file behind it; ``imports`` come before."""
    numbers = itertools.count()

    def made(head, body, imports=""):
        name = f"cell_{tmp_path.name}_{next(numbers)}"
        path = tmp_path / f"{name}.py"
        path.write_text(f"{imports}{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n")
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
        failures = rank_pool.run(nproc, be_a_rank, (folder, digest, lab, setup), timeout_s)
        for rank, failure in enumerate(failures):
            if failure:
                raise labkit.RankFailed(rank, *failure, "", Path(folder) / "run" / "log")

    monkeypatch.setattr(labkit, "run", run)


def be_a_rank(folder, digest, lab, setup):
    """What the program of the checks does in its session; the type and message of what it raises."""
    allclose, answer_program.PEER_WAIT_S = torch.allclose, 0  # these processes stay anyway
    try:
        answer_program.save_answer_output(Path(folder), digest, lab, json.loads(setup))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        torch.allclose = allclose  # which an answer may have replaced, and these processes judge no other by it
