"""labkit.session.session.meter_class: the meter that another package may put in place of the session's own."""

import subprocess
import sys

import pytest
import torch

import labkit
from labkit.runs.folder import ENV_PROCESS_RANKS, rank_of_process
from labkit.runs.records import RecordWriter
from labkit.session.session import meter_class

PROGRAM = """
import sys
import torch
from labkit import rank
from labkit.session import session
from labkit.session.meter import Meter

assert "labkit_simulate" not in sys.modules, "the core needs no simulator"

class NoNumbers(Meter):
    tensors_have_values = False
    pins_cores = False

    def device_kind_and_name(self):
        return "abacus", "Abacus of wood"

session.meter_class = NoNumbers
with rank.session() as here:
    assert not here.tensors_have_values
    here.record_scalar("tensor of the run", torch.ones(()))
    here.record_scalar("number of the run", 3)
    for step in here.steps(1):
        step.record_scalar("tensor of a step", torch.ones(()))
        step.record_scalar("number of a step", 4)
"""


@pytest.fixture
def result(tmp_path):
    program = tmp_path / "hooked.py"
    program.write_text(PROGRAM)
    return labkit.run(program, nproc=1, device="cpu")


def test_a_session_takes_another_meter_and_the_name_of_its_device_from_it(result):
    assert (result.device, result.session["device_name"]) == ("abacus", "Abacus of wood")
    assert result.stamp.startswith("Abacus of wood · 1 rank")
    assert (result.value("number of the run"), result.value("number of a step")) == (3, 4)
    assert not [name for name in result.frame["name"] if name.startswith("tensor")]


def test_without_another_package_a_rank_measures_on_its_own_device():
    assert meter_class.tensors_have_values and meter_class.pins_cores
    meter = meter_class(RecordWriter(None, rank=0), torch.device("cpu"))
    assert meter.device_kind_and_name() == ("cpu", "CPU")


def test_a_process_of_torchrun_has_its_index_as_rank_or_what_the_launcher_chose(monkeypatch):
    monkeypatch.delenv(ENV_PROCESS_RANKS, raising=False)
    assert [rank_of_process(index) for index in range(3)] == [0, 1, 2]
    monkeypatch.setenv(ENV_PROCESS_RANKS, "[0, 1023]")
    assert [rank_of_process(index) for index in range(2)] == [0, 1023]


def test_the_core_imports_the_simulator_only_when_it_is_asked_for():  # the explorers do: one of them estimates steps
    ask = (
        "import sys, labkit, labkit.rank, labkit.plots, labkit_course.checks.fsdp\n"
        "assert 'labkit_simulate' not in sys.modules\n"
        "labkit.simulate, labkit.plan, labkit.SearchResult\n"
        "assert 'labkit_simulate' in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", ask]).returncode == 0
