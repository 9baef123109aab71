"""launch/two_dim: equal to one device on 2 x 2 ranks, compiled too; each axis carries what theory says."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from fixture_cells import run_cells
from programs.two_dim_cases import COMPILED, DIM, EAGER
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit import requirements
from labkit.errors import ParameterError
from labkit.models.chain import LinearChain
from labkit.models.mlp import MLPStack
from labkit.parity import Parity, draw_samples
from labkit.parity import two_dim as parity
from labkit.theory import fsdp
from labkit.theory import two_dim as theory
from launch import two_dim

PROGRAM = Path(__file__).parent / "programs" / "two_dim_cases.py"
TENSORS = {"fsdp_tp": 12, "ddp_tp": 8, "transformer": 18}
needs_compiler = pytest.mark.skipif(
    bool(requirements.compiler_problem()), reason=f"torch.compile needs a C++ compiler: {requirements.COMPILER_FIX}"
)
pytestmark = pytest.mark.timeout(250)  # compiling on a machine that does other things, too


def verdicts(**parameters):
    log = labkit.run(PROGRAM, nproc=4, device="cpu", timeout_s=240, **parameters).ranks[0].log()
    return json.loads(log.splitlines()[-1]) | {"log": log}


@pytest.fixture(scope="module")
def eager():
    return verdicts()


@pytest.fixture(scope="module")
def compiled():
    return verdicts(compile=True)


MEASURED = [{}, {"seq": True, "checkpointing": True}, {"plan": "ddp_tp"}, {"layers": "yours"}, {"tp": 4}]
CHECKED = {"plan": "ddp_tp", "check": "parity", "compile": False}


@pytest.fixture(scope="module")
def measured():
    """Results of MEASURED, and of CHECKED at the end."""
    return run_cells("two_dim", 4, [*({"dim": 32, "batch": 16, "steps": 1} | case for case in MEASURED), CHECKED])


def compared(case):
    """Tensors in two steps: an output, gradients and parameters in each."""
    return 2 * (1 + 2 * TENSORS[case.get("network", case.get("plan", "fsdp_tp"))])


@pytest.mark.parametrize("name", EAGER)
def test_four_ranks_compute_what_one_device_computes(eager, name):
    verdict = eager[name]
    assert verdict["compared"] == compared(EAGER[name])
    assert verdict["ok"] and verdict["max_rel_error"] <= 1e-5, verdict


@pytest.mark.long  # four ranks that compile on two cores; test_ddp_compile.py and test_fsdp.py compile, too
@needs_compiler
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager_and_one_device(compiled, name):
    verdict = compiled[name]
    assert verdict["compared"] == 2 * compared(COMPILED[name]), "of each version"
    assert verdict["compiled_graphs"] > 0
    assert (verdict["compiled_backwards"] > 0) == (COMPILED[name].get("plan") == "ddp_tp")
    assert verdict["ok"] and verdict["max_rel_error"] <= 1e-5 and verdict["compiled_vs_eager"] <= 1e-5, verdict


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("name", ["nothing compiled", "backward not compiled"])
def test_what_is_not_compiled_is_seen_though_it_is_right(compiled, name):
    verdict = compiled[name]
    assert verdict["compiled_backwards"] == 0
    assert (verdict["compiled_graphs"] > 0) == (name == "backward not compiled"), "those of earlier cases do not count"
    assert not verdict["ok"] and verdict["max_rel_error"] <= 1e-5 and verdict["compiled_vs_eager"] <= 1e-5, verdict


@pytest.mark.long
@needs_compiler
def test_beside_a_compiled_version_the_eager_one_has_ddps_own_reducer(compiled):
    assert compiled["backward not compiled"]["python_reducers"] == [False, True]


def compared_with_a_compiled_version_that_differs():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tp"))

    def apply(lab, compile=False):
        if compile:
            nn.init.zeros_(lab.fc4.bias)
        return lab

    build = partial(two_dim.build_model, two_dim.Config(plan="ddp_tp", dim=8), mesh, torch.device("cpu"))
    return parity.compare_mesh_training(build, apply, mesh, torch.device("cpu"), 1, compile=True)


def test_a_compiled_version_that_differs_from_eager_is_seen(ranks):
    (verdict,) = ranks(1)(compared_with_a_compiled_version_that_differs)
    assert verdict["compiled_vs_eager"] > 1e-2 and not verdict["ok"]


def test_a_comparison_is_quiet_and_leaves_torchs_logger_as_it_was(eager):
    assert "sequential all_gather" not in eager["log"]
    before, after = eager["levels"]
    assert before == after


def test_a_rank_of_ddp_tp_keeps_what_theory_says(eager):
    assert eager["kept with ddp"] == theory.mesh_resident_bytes(theory.chain_pairs(DIM), data=2, tp=2, plan="ddp_tp")


def test_gradients_that_are_not_averaged_are_seen(eager):
    verdict = eager["not averaged"]
    assert not verdict["ok"] and "gradient" in verdict["worst"] and verdict["max_rel_error"] > 1e-2


def test_replicated_dtensors_leave_no_parameters_to_compare(eager):
    assert eager["as torch does it"] == [8, 0], "else PlainParameters is not needed any more"


def test_a_gradient_or_parameter_that_is_missing_is_an_error():
    layer, found = nn.Linear(2, 2), Parity()
    layer(torch.ones(1, 2)).sum().backward()
    whole = parity.gradients_and_parameters(layer)
    with pytest.raises(ValueError, match=r"only on one side: \['gradient bias', 'gradient weight'\]"):
        found.compare_steps("eager", [parity.gradients_and_parameters(nn.Linear(2, 2))], [whole])
    with pytest.raises(ValueError, match=r"only on one side: .*'parameter weight'"):
        found.compare_steps("eager", [parity.gradients_and_parameters(nn.ReLU())], [whole])
    assert not found.compared


def test_the_program_prints_its_verdict_last(measured):
    verdict = json.loads(measured[-1].ranks[0].log().splitlines()[-1])
    assert verdict["check"] == "parity" and verdict["ok"] and verdict["compared"] == 51


def test_a_transformers_block_sums_seven_times_along_tp():
    result = labkit.run("two_dim", nproc=4, device="cpu", network="transformer", dim=16, steps=1)
    assert result.value("tp/all_reduce_count") == 2 * theory.BLOCK_SUMS == 14
    assert result.value("tp/all_reduce_bytes") == 14 * 4 * (4 * 8) * 16, "each of all tokens and the whole width"


def first_loss(plan, batch, line):
    """What a line of tp loses at first on its samples, on one device."""
    torch.manual_seed(0)
    lab = (MLPStack if plan == "fsdp_tp" else LinearChain)(32, batch=batch)
    inputs = draw_samples(lab, torch.device("cpu"), 0, line)
    return lab.get_loss(inputs, lab(*inputs)).item()


@pytest.mark.parametrize("index", range(len(MEASURED)), ids=[str(case) for case in MEASURED])
def test_every_axis_carries_what_theory_says_and_a_rank_keeps_its_share(measured, index):
    result, case = measured[index], two_dim.Config(**MEASURED[index])
    plan, tp = case.plan, case.tp
    data = 4 // tp
    if plan == "ddp_tp":
        predicted = theory.step_collectives_by_axis(theory.chain_pairs(32), 16 // data, data=data, tp=tp, plan=plan)
    else:
        pairs, places = theory.mlp_pairs(32), 16 // data * 8
        how = {"sequence_parallel": case.seq, "checkpointing": case.checkpointing}
        predicted = theory.step_collectives_by_axis(pairs, places, data=data, tp=tp, **how)
        predicted |= theory.mesh_resident_bytes(pairs, data=data, tp=tp)
        if not any(how.values()):  # to FSDP, what a rank of tp holds is simply a thinner model
            peak = fsdp.fsdp_step_peak(theory.rank_layers(pairs, tp), places, data)["total"]
            assert result.value("peak_total_bytes") == pytest.approx(peak, rel=0.01)
    assert {name: result.value(name) for name in predicted} == predicted
    losses = result.frame.query("kind == 'scalar' and name == 'loss'").groupby("rank")["value"].first()
    assert losses.to_list() == pytest.approx([first_loss(plan, 16 // data, rank // tp) for rank in range(4)], rel=1e-4)
    by_axis = {name for name in result.summary() if "/" in name}
    counted = {name for name in by_axis if not name.endswith("_wire_bytes")}  # which follow from the others
    assert counted - {"data/all_reduce_count"} == {name for name in predicted if "/" in name}, "and nothing else"
    for total in (name for name in result.summary() if name.endswith("_count") and "/" not in name):
        parts = [result.value(name) for name in by_axis if name.endswith(f"/{total}")]
        assert sum(parts) == result.value(total), "every collective runs along an axis"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tp": 3}, "4 ranks cannot be cut into lines of tp = 3: it must divide them"),
        ({"dim": 6}, "4 ranks cannot share a width of 6: 6 % 4 = 2"),
        ({"dim": 5, "plan": "ddp_tp"}, "2 ranks cannot share a width of 5: 5 % 2 = 1"),
        ({"batch": 3}, "2 ranks cannot share a batch of 3: 3 % 2 = 1"),
        ({"seq": True, "plan": "ddp_tp"}, "seq and checkpointing are for MLPs, and plan ddp_tp has none"),
        ({"checkpointing": True, "plan": "ddp_tp"}, "seq and checkpointing are for MLPs, and plan ddp_tp has none"),
        ({"layers": "yours", "seq": True}, "layers yours share the pairs of plan fsdp_tp, with the sequence whole"),
        ({"layers": "yours", "tp": 1}, "layers yours share the pairs of plan fsdp_tp"),
        ({"layers": "yours", "plan": "ddp_tp"}, "layers yours share the pairs of plan fsdp_tp"),
        ({"layers": "yours", "check": "parity"}, "layers yours are compared as they are, not compiled"),
        ({"network": "transformer", "plan": "ddp_tp"}, "a transformer is cut by plan fsdp_tp, with the sequence whole"),
        ({"network": "transformer", "seq": True}, "a transformer is cut by plan fsdp_tp, with the sequence whole"),
        ({"network": "transformer", "dim": 12}, "a width of 12 makes no whole heads of 8 features: 12 % 8 = 4"),
        ({"network": "transformer", "dim": 16, "tp": 4}, "4 ranks cannot share heads, of which there are 2: 2 % 4 = 2"),
        ({"seq": True, "tp": 1}, "seq cuts the sequence over tp, but tp is 1: take 2 or more"),
    ],
)
def test_what_cannot_work_is_refused_with_the_arithmetic(parameters, message):
    with pytest.raises(ParameterError, match=message):
        labkit.run("two_dim", nproc=4, **parameters)


def test_without_a_compiler_only_what_is_compiled_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ParameterError, match="CXX is 'no-such-compiler'"):
        labkit.run("two_dim", nproc=4, check="parity")
    two_dim.Config(check="parity", compile=False).validate(4)
    two_dim.Config().validate(4)
