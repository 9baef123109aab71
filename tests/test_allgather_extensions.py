"""launch/allgather_extensions: exactly plain training, bytes as in theory, and losses as close as the bytes allow."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from fixture_cells import run_cells
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import labkit
from labkit import requirements
from labkit.errors import ParameterError
from labkit.models.mlp import MLP
from labkit.models.protocol import random_normal
from labkit.parallel.compiling import apply_compile
from labkit.parallel.extensions import apply_extension
from labkit.parity import extensions as parity
from labkit.session.traffic import CommunicationCounter
from labkit.tensors import plain_shards, plain_tensors
from labkit.theory import extensions as theory

STEPS = 10
MLPS = [(32, 8), (8, 32)] * 3
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
        assert verdict["all_gathers"] == {"with reshard": 2 * 3 * STEPS, "without": 3 * STEPS}, "3 units"


def compare_two_alike(reshard):
    """The verdict on models of which none, or all, free their parameters after the forward pass."""
    apply = parity.apply_extension
    parity.apply_extension = lambda *args, reshard_after_forward: apply(*args, reshard_after_forward=reshard)
    try:
        return compare("two_tensor", 3)
    finally:
        parity.apply_extension = apply


@pytest.mark.parametrize("reshard", [True, False])
def test_the_comparison_sees_that_it_has_compared_one_way_twice(ranks, reshard):
    for verdict in ranks(2)(compare_two_alike, reshard):
        assert verdict["max_rel_error"] == 0 and not verdict["ok"]


def kept_gradients():
    """For each step of the reference and of the model, whether the gradient is still the same tensor."""
    kept, forward_backward = {False: [], True: []}, parity._forward_backward

    def watch(model, *args):
        parameter = next(model.parameters())
        before = parameter.grad
        loss = forward_backward(model, *args)
        kept[isinstance(parameter, DTensor)].append(parameter.grad is before)
        return loss

    parity._forward_backward = watch
    try:
        compare("fp32", 5)
    finally:
        parity._forward_backward = forward_backward
    return kept[False], kept[True]


def test_gradients_are_removed_and_set_to_zero_in_turn(ranks):
    both_ways = [False, False, True, False, True] * 2  # in the first step there are none
    assert ranks(2)(kept_gradients) == [(both_ways, both_ways)] * 2


@pytest.mark.parametrize("to_none", [True, False])
def test_no_gradient_of_the_step_before_is_left(to_none):
    model, x = parity.three_mlps(CPU), torch.ones(2, 8)
    optimizer = parity.make_foreach_adam(model.parameters())
    parity._forward_backward(model, optimizer, x)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    parity._forward_backward(model, optimizer, x, to_none)
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(model.parameters(), first, strict=True))


def samples_of_three_steps():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [parity._local_samples(mesh, CPU, step).flatten().tolist() for step in range(3)]


def test_every_rank_has_samples_of_its_own_in_every_step(ranks):
    samples = [step for rank in ranks(2)(samples_of_three_steps) for step in rank]
    assert {len(step) for step in samples} == {2 * 8}
    assert len(set(map(tuple, samples))) == 6


def test_the_comparison_sees_what_int8_rounds(ranks):
    verdict, _ = ranks(2)(compare, "int8", 1)
    assert not verdict["ok"]
    assert verdict["max_rel_error"] > 1e-5


def watched_from_meta(extension):
    """The verdict, the bytes that were gathered, and the dtypes in which the first unit answered."""
    computed_in, forward = set(), MLP.forward

    def watch(mlp, x):
        output = forward(mlp, x)
        computed_in.add(output.dtype)
        return output

    MLP.forward = watch
    try:
        with CommunicationCounter() as counter:
            return from_meta(extension), counter.bytes["all_gather"], computed_in
    finally:
        MLP.forward = forward


@pytest.mark.parametrize("extension", ["two_tensor", "int8"])
def test_a_model_built_without_memory_is_set_and_trained_in_bfloat16(ranks, extension):
    for verdict, sent, computed_in in ranks(2)(watched_from_meta, extension):
        assert verdict.pop("first_loss") > verdict.pop("last_loss")
        # with and without resharding
        counts = {"parameters": 12, "compared": 12, "on_meta": 12, "poisoned": 12, "nan_after": 0, "trained": 12}
        assert verdict == {"check": "meta", **counts, "ok": True}
        assert sent == sum(theory.step_gather_bytes(MLPS, 2, extension, reshard=way) for way in (True, False)) * STEPS
        assert computed_in == {torch.bfloat16}


def initialised_shard(extension):
    """A shard of each half of a parameter, after the values that were drawn for it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    apply_extension(model, init_device_mesh("cpu", (2,)), extension)
    torch.manual_seed(0)
    parity._initialise_shard(model[0].weight)
    return [plain.clone() for plain in plain_shards(model[0].weight)]


@pytest.mark.parametrize("extension", ["two_tensor", "int8"])
def test_initial_values_are_normal_and_equal_in_both_halves(ranks, extension):
    for first, *others in ranks(2)(initialised_shard, extension):
        assert first.numel() == 64 * 64 / 2
        assert first.std().item() == pytest.approx(0.2, rel=0.05)
        assert first.mean().item() == pytest.approx(0, abs=0.02)
        assert 0.6 < first.abs().max() < 2
        assert all(other.equal(first) for other in others)


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
    "wire, kept": {"check": "wire", "reshard_after_forward": False},
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


def test_a_network_that_keeps_its_parameters_gathers_them_once(runs, wire):
    kept = json.loads(runs["wire, kept"].ranks[0].log().splitlines()[-1])
    assert kept["ok"] and all(2 * kept[name] == wire[name] for name in theory.EXTENSION_BYTES)


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


SENT = [
    *((name, "fp32") for name in ("none", "bf16", "float8", "int8", "two_tensor")),
    ("none", "bf16"),
    ("int8", "bf16"),
]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "dim", "batch"), [(2, 128, 1), (3, 136, 64)])
def test_the_peak_of_a_rank_is_that_of_the_ledger_to_the_byte(ranks, dim, batch):
    cells = [{"extension": name, "policy": policy, "dim": dim, "batch": batch, "steps": 1} for name, policy in SENT]
    for (name, policy), run in zip(SENT, run_cells("allgather_extensions", ranks, cells), strict=True):
        sent, compute_bytes = policy if name == "none" else name, {"fp32": 4, "bf16": 2}[policy]
        expected = theory.step_peak(dim, batch, ranks, sent, compute_bytes=compute_bytes)
        assert run.value("peak_total_bytes") == expected["total"], (name, policy)


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


@pytest.mark.long
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
        (2, {"check": "parity", "steps": 2}, "steps 2: the third is the first that sets gradients to zero: take 3"),
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
