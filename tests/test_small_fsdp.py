"""labkit.parallel.small_fsdp: equal to one device, and never more in memory than theory says."""

import warnings

import pytest
import torch
from torch import nn

import labkit
from labkit.models.mlp import MLPStack
from labkit.models.toy import ToyModel
from labkit.parallel.fsdp import random_block_index
from labkit.parallel.small_fsdp import FlatShards, flatten_tensors
from labkit.theory import fsdp as theory


def stack(wrap):
    """A sharded stack whose units' sizes 3 ranks do not divide, and the units."""
    warnings.filterwarnings("ignore", message=".*is deprecated")
    torch.manual_seed(0)
    model = MLPStack(dim=7, batch=1)
    units = {"": model} if wrap == "root" else {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    return FlatShards(model, units), units


def held_in_a_step(wrap):
    """Bytes of whole parameters, over one training step: at each moment when memory is taken or given back."""
    model, units = stack(wrap)
    sizes = {
        p.untyped_storage()._cdata: 0 for unit in units.values() for p in unit.parameters()
    }  # all empty between steps
    moments, resize = [], torch.UntypedStorage.resize_

    def seen(storage, size):
        resize(storage, size)
        if storage._cdata in sizes:
            sizes[storage._cdata] = size
            moments.append(sum(sizes.values()))

    torch.UntypedStorage.resize_ = seen
    try:
        model(torch.randn(1, 8, 7)).square().mean().backward()
    finally:
        torch.UntypedStorage.resize_ = resize
    rests = [p.untyped_storage().nbytes() for unit in units.values() for p in unit.parameters()]
    grads = [p.grad for unit in units.values() for p in unit.parameters()]
    shares = [(len(shard), len(shard.grad)) for shard in model.shards]
    return moments, max(rests), [each for each in grads if each is not None], shares


@pytest.mark.parametrize("wrap", ["block", "root"])
def test_whole_parameters_are_one_unit_at_a_time_and_none_between_steps(ranks, wrap):
    numbers = [7 * 7 * 2 * times + 7 * (times + 1) for times in (3, 4, 3)]
    numbers = [sum(numbers)] if wrap == "root" else numbers
    padded = [-(-each // 3) * 3 for each in numbers]
    order = padded + padded[::-1]  # the forward pass, then the backward pass
    for moments, at_rest, gradients, shares in ranks(3)(held_in_a_step, wrap):
        assert moments == [size for each in order for size in (4 * each, 0)]
        assert at_rest == 0 and gradients == []
        assert shares == [(each // 3, each // 3) for each in padded]


def whole_again():
    model, _ = stack("block")
    before = [p.clone() for p in MLPStack_like()]
    model(torch.randn(1, 8, 7)).square().mean().backward()
    whole = model.unshard_model()
    same = all(torch.equal(a, b) for a, b in zip(before, whole.parameters(), strict=True))
    return same, all(p.grad is not None and p.grad.shape == p.shape for p in whole.parameters())


def MLPStack_like():
    torch.manual_seed(0)
    return list(MLPStack(dim=7, batch=1).parameters())


def test_the_whole_model_comes_back_by_name(ranks):
    assert ranks(2)(whole_again) == [(True, True)] * 2


def refused(what):
    model = ToyModel(hidden=8, narrow=8)
    blocks = {str(index): block for index, block in enumerate(model.net) if not isinstance(block, nn.ReLU)}
    try:
        if what == "left out":
            FlatShards(model, dict(list(blocks.items())[1:]))
        if what == "twice":
            FlatShards(model, blocks | {"again": model.net[0]})
        if what == "no share":
            FlatShards(model, blocks, lambda unit: nn.Parameter(torch.zeros(3)))
        if what == "nothing":
            FlatShards(model, blocks, lambda unit: None)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("left out", "net.0.weight is in no unit, and only units gather: they must hold each parameter once"),
        ("twice", "two units share a parameter"),
        ("no share", "unit 0 has 88 numbers, so each of 2 ranks keeps 44 in a flat nn.Parameter; the function gave a "
         "Parameter of shape (3,)"),
        ("nothing", "the function gave a NoneType"),
    ],
)  # fmt: skip
def test_units_that_leave_something_out_and_what_is_no_share_are_refused(ranks, what, said):
    assert all(said in each for each in ranks(2)(refused, what))


def test_a_flat_row_ends_in_zeros_until_the_ranks_divide_it():
    row = flatten_tensors([torch.ones(2, 2), torch.ones(3)], 4)
    assert row.tolist() == [1] * 7 + [0]
    assert len(flatten_tensors([torch.ones(8)], 4)) == 8


@pytest.mark.parametrize("ranks_asked", [pytest.param(2, marks=pytest.mark.long), 3])
def test_it_trains_as_one_device_and_holds_what_theory_says(ranks_asked):
    labkit.run("fsdp_wrap", nproc=ranks_asked, device="cpu", fsdp="yours", model="mlp_stack", check="parity", steps=3)
    how = {"device": "cpu", "fsdp": "yours", "model": "mlp_stack", "dim": 120, "batch": 1, "steps": 1}
    result = labkit.run("fsdp_wrap", nproc=ranks_asked, **how)
    units = [4 * (2 * times * 120**2 + (times + 1) * 120) for times in (3, 4, 3)]  # 2 and 3 divide them
    layers = theory.mlp_stack_layers("block", 120)
    exact = theory.step_collectives(layers, ranks_asked) | {"end_parameter_bytes": sum(units) // ranks_asked}
    assert {name: result.value(name) for name in exact} == exact
    peak = theory.small_fsdp_peak_bytes(units, ranks_asked)
    assert peak < result.value("peak_total_bytes") < 1.03 * peak, "activations come on top"


def test_a_riddle_is_drawn_by_its_seed():
    assert {random_block_index(seed, 9) for seed in range(100)} == set(range(9))
    forgotten = random_block_index(3, 9)
    riddle, told = (
        labkit.run("fsdp_matrix", device="cpu", steps=1, **how) for how in ({"forget": 3}, {"skip": (forgotten,)})
    )
    for name in ("all_gather_count", "all_gather_bytes"):
        assert riddle.value(name) == told.value(name)


def test_passes_over_the_wire():
    assert theory.wire_bytes(800, 8) == {"all_gather": 1400, "reduce_scatter": 700}
    assert sum(theory.wire_bytes(800, 8).values()) == 1.5 * sum(theory.wire_bytes(800, 8, all_gathers=1).values())
    assert theory.tokens_to_hide(4e14, 4.5e11, 8) == pytest.approx(7e14 / 9e11)
    compute_s = 6 * 1e9 * theory.tokens_to_hide(4e14, 4.5e11, 8) / 4e14
    assert compute_s == pytest.approx(sum(theory.wire_bytes(2e9, 8).values()) / 4.5e11)


def test_ddps_peak_is_what_theory_says():
    result = labkit.run("fsdp_wrap", device="cpu", wrap="none", model="mlp_stack", dim=64, batch=32, steps=1)
    peak = theory.ddp_step_peak(theory.mlp_stack_layers("block", 64), 256)
    assert result.value("peak_total_bytes") == pytest.approx(peak["total"], rel=0.05)
