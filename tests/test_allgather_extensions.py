"""launch/allgather_extensions: exactly plain training, bytes as in theory, and losses as close as the bytes allow."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit import requirements
from labkit.errors import ParameterError
from labkit.models.protocol import random_normal
from labkit.parallel.compiling import apply_compile
from labkit.parallel.extensions import apply_extension
from labkit.parity import extensions as parity
from labkit.tensors import plain_tensors
from labkit.theory import extensions as theory

STEPS = 10
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(bool(requirements.compiler_problem()), reason="torch.compile needs a C++ compiler")


def compare(extension, steps):
    return parity.compare_extension_training(init_device_mesh("cpu", (dist.get_world_size(),)), CPU, extension, steps)


def from_meta(extension):
    return parity.train_from_meta_device(init_device_mesh("cpu", (dist.get_world_size(),)), CPU, extension, STEPS)


@pytest.mark.parametrize(("extension", "halves", "nproc"), [("two_tensor", 2, 2), ("two_tensor", 2, 4), ("fp32", 1, 2)])
def test_ten_steps_are_exactly_those_of_plain_training(ranks, extension, halves, nproc):
    for verdict in ranks(nproc)(compare, extension, STEPS):
        assert verdict["ok"], verdict
        assert verdict["max_rel_error"] == 0
        assert verdict["gradients_alive"]
        # with and without resharding: the loss and 6 parameters of each half, and 6 gradients, which are plain
        assert verdict["compared"] == verdict["expected"] == 2 * STEPS * (7 * halves + 6)


def test_the_comparison_sees_what_int8_rounds(ranks):
    verdict, _ = ranks(2)(compare, "int8", 1)
    assert not verdict["ok"]
    assert verdict["max_rel_error"] > 1e-5


@pytest.mark.parametrize("extension", ["two_tensor", "int8"])
def test_a_model_built_without_memory_is_set_and_trained_in_bfloat16(ranks, extension):
    for verdict in ranks(2)(from_meta, extension):
        assert verdict.pop("first_loss") > verdict.pop("last_loss")
        # with and without resharding
        counts = {"parameters": 12, "compared": 12, "on_meta": 12, "poisoned": 12, "nan_after": 0, "trained": 12}
        assert verdict == {"check": "meta", **counts, "ok": True}


def forget_one(extension):
    forgotten = []
    initialise = parity._initialise_shard
    parity._initialise_shard = lambda parameter: initialise(parameter) if forgotten else forgotten.append(parameter)
    try:
        return from_meta(extension)
    finally:
        parity._initialise_shard = initialise


def test_a_parameter_that_was_never_set_is_found(ranks):
    for verdict in ranks(2)(forget_one, "two_tensor"):
        assert verdict["poisoned"] == 12 and verdict["nan_after"] > 0
        assert not verdict["ok"]


CELLS = {
    "none": {"extension": "none", "steps": 1},
    "policy": {"extension": "none", "policy": "bf16", "steps": 1},
    "both": {"extension": "int8", "policy": "bf16", "steps": 1},
    "wire": {"check": "wire"},
    "loss": {"check": "loss", "steps": 36},
    "eager": {"extension": "int8", "steps": 3},
}


@pytest.fixture(scope="module")
def runs():
    """Of the cells by name, in one launch."""
    return dict(zip(CELLS, run_cells("allgather_extensions", 2, list(CELLS.values())), strict=True))


@pytest.fixture(scope="module")
def wire(runs):
    return json.loads(runs["wire"].ranks[0].log().splitlines()[-1])


def test_the_bytes_on_the_wire_are_those_of_theory(wire):
    dim = 128
    expected = {name: theory.step_gather_bytes(shapes_of(dim), 2, name) for name in theory.EXTENSION_BYTES}
    assert wire == {
        "check": "wire",
        "compared": len(theory.EXTENSION_BYTES),
        **expected,
        "theory": expected,
        "ok": True,
    }


def shapes_of(dim):
    return [(dim, 768), *[(4 * dim, dim), (dim, 4 * dim)] * 2, (10, dim)]


def test_a_policy_halves_the_bytes_and_what_is_held_and_reduces_in_float32(runs):
    plain, policy, both = (runs[name] for name in ("none", "policy", "both"))
    for run, sent, compute_bytes in ((plain, "fp32", 4), (policy, "bf16", 2), (both, "int8", 2)):
        assert run.value("all_gather_bytes") == theory.step_gather_bytes(shapes_of(128), 2, sent)
        held = [theory.held_bytes(shape, 2, sent, compute_bytes=compute_bytes) for shape in shapes_of(128)]
        assert run.value("held_bytes") == sum(held)
        assert run.value("reduce_scatter_bytes") == theory.step_gather_bytes(shapes_of(128), 2, "fp32")
    assert plain.value("hooks_ms") == policy.value("hooks_ms") == 0
    assert 0 < both.value("hooks_ms") < both.value("gather_ms")


def test_what_rounding_does_to_the_loss_is_measured_with_equal_weights_and_samples(runs):
    assert runs["none"].value("loss_change") == runs["none"].value("weight_rms_error") == 0
    for name in ("policy", "both", "eager"):
        assert 1e-7 < abs(runs[name].value("loss_change")) < 1e-2
        assert 0 < runs[name].value("weight_rms_error") < 0.01


def wire_against_a_wrong_theory():
    """Whether bytes pass that are not those of theory."""
    original = theory.step_gather_bytes
    theory.step_gather_bytes = lambda *args, **how: original(*args, **how) + 1
    try:
        mesh = init_device_mesh("cpu", (2,))

        def build(name):
            return apply_extension(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)), mesh, name)

        return parity.compare_bytes(mesh, build, lambda model: model(torch.ones(1, 8)), False)
    finally:
        theory.step_gather_bytes = original


def test_a_byte_that_theory_does_not_know_is_seen(ranks):
    for verdict in ranks(2)(wire_against_a_wrong_theory):
        assert not verdict["ok"]
        assert {name: size - 1 for name, size in verdict["theory"].items()} == {
            name: verdict[name] for name in theory.EXTENSION_BYTES
        }


def test_half_the_bytes_for_bf16_and_about_a_quarter_for_8_bits(wire):
    assert wire["bf16"] * 2 == wire["fp32"]
    assert wire["two_tensor"] == wire["fp32"] * 2
    assert wire["float8"] <= 0.26 * wire["fp32"]
    assert wire["int8"] <= 0.26 * wire["fp32"]


def loss_limits(limits):
    """Whether losses pass that differ from fp32's by these parts, without training."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {"fp32": 0.5} | {name: 0.5 * (1 + part) for name, part in limits.items()}
    # a rank's own losses: high before the end, and apart from each other, so that only their mean is right
    apart = 0.1 * (2 * dist.get_rank() - 1)
    verdict = parity.compare_final_losses(
        mesh, lambda name: [torch.tensor(9.0)] + [torch.tensor(ends[name] + apart)] * 10
    )
    return verdict["ok"], verdict["fp32"]


@pytest.mark.parametrize(
    ("limits", "ok"),
    [
        ({"bf16": 0.019, "float8": -0.099, "int8": 0.099}, True),
        ({"bf16": 0.021, "float8": 0.0, "int8": 0.0}, False),
        ({"bf16": 0.0, "float8": 0.101, "int8": 0.0}, False),
        ({"bf16": 0.0, "float8": 0.0, "int8": -0.101}, False),
    ],
)
def test_the_final_loss_is_the_mean_of_all_ranks_and_has_a_limit(ranks, limits, ok):
    for found, fp32 in ranks(2)(loss_limits, limits):
        assert found is ok
        assert fp32 == pytest.approx(0.5)


def test_fewer_bytes_train_as_well_on_a_photo(runs):
    final = json.loads(runs["loss"].ranks[0].log().splitlines()[-1])
    assert final["ok"]
    assert final["fp32"] < 0.8 * math.log(10), "or nothing was learned, and any two are close"
    assert len({final[name] for name in ("fp32", "bf16", "float8", "int8")}) == 4, "or nothing was rounded"
    assert final["bf16"] == pytest.approx(final["fp32"], rel=0.02)
    assert final["int8"] == pytest.approx(final["fp32"], rel=0.10)
    assert final["float8"] == pytest.approx(final["fp32"], rel=0.10)


def compiled_and_not():
    """Losses of three steps, eager and compiled, and how many graphs were compiled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    losses = []
    torch._dynamo.reset()
    counters.clear()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = parity.three_mlps(CPU)
        if compiled:
            apply_compile(model, ("MLP",))
        apply_extension(model, mesh, "two_tensor")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        for step in range(3):
            loss = (model(random_normal(2, 8, device=CPU, seed=step)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(plain_tensors(loss.detach())[0].item())
    return losses[:3], losses[3:], counters["stats"]["unique_graphs"]


@needs_compiler
def test_two_tensors_train_alike_when_their_layers_are_compiled(ranks):
    for eager, compiled, graphs in ranks(2)(compiled_and_not):
        assert graphs > 0, "or nothing was compiled"
        assert compiled == pytest.approx(eager, rel=1e-6)
        assert eager[2] < eager[0]


def test_training_records_losses_and_the_error_of_the_weights(runs):
    training_is_recorded(runs["eager"])


@needs_compiler
@pytest.mark.long  # the program, compiled; above, its layers are
def test_compiled_training_does_too():
    training_is_recorded(labkit.run("allgather_extensions", nproc=2, device="cpu", **CELLS["eager"], compile=True))


def training_is_recorded(result):
    losses = result.frame.query("kind == 'scalar' and name == 'loss' and rank == 0")["value"]
    assert len(losses) >= 3 and losses.iloc[-1] < losses.iloc[0]
    assert 0 < result.value("weight_error") <= theory.rounding_error("int8") + 1e-6


@pytest.mark.parametrize(
    ("nproc", "parameters", "message"),
    [
        (1, {}, "at least 2 ranks: with 1 FSDP2 gathers nothing"),
        (2, {"check": "parity", "extension": "int8"}, "int8 rounds: only two_tensor and fp32 can be equal"),
        (2, {"check": "meta", "compile": True}, "check meta trains models that are not compiled"),
        (
            2,
            {"check": "wire", "policy": "bf16"},
            "policy bf16 is for a measured run: check wire has a policy of its own",
        ),
        (2, {"check": "loss"}, "steps 10: the final loss is a mean over 10: take 20"),
        (2, {"check": "wire", "dim": 64}, "dim 64: a row of fewer than 128 numbers"),
        (2, {"scales": "row", "extension": "bf16"}, "extension bf16 has no scales to choose: take float8 or int8 or"),
        (2, {"weights": "nowhere.pt"}, "weights 'nowhere.pt' is no file: give what torch.save wrote"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(nproc, parameters, message):
    with pytest.raises(ParameterError, match=message):
        labkit.run("allgather_extensions", nproc=nproc, device="cpu", **parameters)


def test_compiling_without_a_compiler_is_refused_before_a_launch(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ParameterError, match=r"torch.compile needs a C\+\+ compiler: CXX is 'no-such-compiler'"):
        labkit.run("allgather_extensions", nproc=2, device="cpu", compile=True)


def test_theory_pads_the_last_shard():
    assert theory.gather_bytes((10, 128), 4, "fp32") == 3 * 128 * 4
    assert theory.gather_bytes((10, 128), 4, "bf16") == 3 * 128 * 2
    assert theory.gather_bytes((10, 128), 4, "float8") == 3 * 128 + 4
    assert theory.gather_bytes((10, 128), 4, "int8") == 3 * 128 + 3 * 4
    assert theory.step_gather_bytes([(10, 128)], 4, "fp32", reshard=False) == 3 * 128 * 4
    with pytest.raises(ValueError, match="'int3' is none of fp32"):
        theory.gather_bytes((10, 128), 4, "int3")
