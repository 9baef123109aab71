"""labkit.instrument: FSDP2 really calls what was put in place, and the original is back on any exit."""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit import instrument, torch_private
from labkit.instrument import DummyDDP, DummyProcessGroup

BLOCKS = 3
PATCHES = {
    "all_gather": instrument.patch_all_gather,
    "reduce_scatter": instrument.patch_reduce_scatter,
    "all_reduce": instrument.patch_all_reduce,
    "unshard": instrument.patch_unshard,
    "reshard": instrument.patch_reshard,
    "post_backward": instrument.patch_post_backward,
    "hook_backward": instrument.patch_register_post_backward_hook_backward,
}


def stored():
    """Everything that is ever replaced, as it is stored."""
    group = torch_private.get("FSDPParamGroup")
    hook = torch_private.get("RegisterPostBackwardFunction")
    places = [(dist, name) for name in vars(dist) if name.startswith(("all_gather", "reduce_scatter", "all_reduce"))]
    places += [(group, "unshard"), (group, "reshard"), (group, "post_backward"), (hook, "backward")]
    return [vars(owner)[name] for owner, name in places]


@contextlib.contextmanager
def counting(calls, what):
    """Count calls, and do what the original does."""

    def counted(*args, **kwargs):
        calls[what] = calls.get(what, 0) + 1
        return original(*args, **kwargs)

    with PATCHES[what](counted) as original:
        yield


def sharded_model(mesh, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)  # holds no parameters of its own: no unit


def step(model):
    x = torch.ones(2, 4, requires_grad=True)
    model(x).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def counts_of_a_step(shape, reshard_after_forward):
    before = stored()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    expected = step(sharded_model(mesh))
    calls = {}
    model = sharded_model(mesh, reshard_after_forward=reshard_after_forward)
    with contextlib.ExitStack() as stack:
        for what in PATCHES:
            stack.enter_context(counting(calls, what))
        model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    assert stored() == before
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert all(gradient.any() for gradient in gradients)
    return calls


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2 * BLOCKS), (False, BLOCKS)])
def test_fsdp2_calls_each_replacement_once_for_a_unit(ranks, reshard, gathers):
    for calls in ranks(2)(counts_of_a_step, (2,), reshard):
        assert calls["all_gather"] == gathers
        assert calls["reduce_scatter"] == calls["post_backward"] == calls["hook_backward"] == BLOCKS
        assert calls["unshard"] >= gathers
        assert calls["reshard"] >= BLOCKS
        assert "all_reduce" not in calls


def test_replicated_shards_are_all_reduced_once_for_a_unit(ranks):
    for calls in ranks(2)(counts_of_a_step, (2, 1), True):
        assert calls["all_reduce"] == BLOCKS


def test_threads_see_one_original(threads):
    before = stored()
    calls = []

    def counted(*args, **kwargs):
        calls.append(dist.get_rank())
        return original(*args, **kwargs)

    original = dist.all_reduce

    def body():
        for _ in range(20):
            with instrument.patch_all_reduce(counted) as mine:
                assert mine is original
                dist.all_reduce(torch.ones(1))

    threads(3)(body)
    assert sorted(calls) == [0] * 20 + [1] * 20 + [2] * 20
    assert stored() == before


def test_a_thread_that_is_late_finds_the_original_at_its_start_and_its_replacement_until_its_end(threads):
    original = dist.all_reduce

    def body():
        time.sleep(0.05 * dist.get_rank())
        with instrument.patch_all_reduce(print) as mine:
            time.sleep(0.05 * dist.get_rank())
            return mine is original, dist.all_reduce

    assert threads(3)(body) == [(True, print)] * 3
    assert dist.all_reduce is original


NAMES = {"all_gather": {"all_gather_single", "all_gather_into_tensor"}, "all_reduce": {"all_reduce"}}
NAMES["reduce_scatter"] = {"reduce_scatter_single", "reduce_scatter_tensor"}


@pytest.mark.parametrize("what", NAMES)
def test_a_collective_is_replaced_under_all_its_names(what):
    with PATCHES[what](print):
        assert {name for name, value in vars(dist).items() if value is print} == NAMES[what] & vars(dist).keys()


@pytest.mark.parametrize("what", PATCHES)
def test_the_original_is_back_however_the_block_ends(what):
    before = stored()

    def new(*args, **kwargs):
        raise AssertionError("never called")

    with PATCHES[what](new) as original:
        assert stored() != before
        assert callable(original)
        assert original is not new
    assert stored() == before
    with pytest.raises(KeyError), PATCHES[what](new):
        raise KeyError("from the block")
    assert stored() == before

    def generator():
        with PATCHES[what](new):
            yield

    suspended = generator()
    next(suspended)
    assert stored() != before
    suspended.close()
    assert stored() == before


def raise_in_the_block_of_rank_1():
    before = stored()
    try:
        with instrument.patch_all_gather(print):
            if dist.get_rank() == 1:
                raise KeyError("from the block")
            return "rank 0 waits at the end of the block"
    finally:
        assert stored() == before


def test_a_rank_that_fails_in_the_block_does_not_wait_for_the_others(ranks):
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n[\s\S]*KeyError: 'from the block'"):
        ranks(2, timeout_s=20)(raise_in_the_block_of_rank_1)


def dtypes_of_reduced_gradients(expected):
    def check(output):
        assert output.dtype == expected, f"reduced in {output.dtype}"

    model = sharded_model(init_device_mesh("cpu", (2,)))

    def checked(*args, **kwargs):
        return instrument.reduce_scatter_with_assert(original, check, *args, **kwargs)

    with instrument.patch_reduce_scatter(checked) as original:
        step(model)


def test_an_assertion_on_the_reduce_scatter_holds_or_fails(ranks):
    ranks(2)(dtypes_of_reduced_gradients, torch.float32)
    with pytest.raises(AssertionError, match=r"reduced in torch\.float32"):
        ranks(2)(dtypes_of_reduced_gradients, torch.bfloat16)


def test_reduce_scatter_with_assert_takes_its_output_by_place_or_by_name():
    seen = []
    checked = functools.partial(instrument.reduce_scatter_with_assert, lambda *a, **k: list(map(id, seen)), seen.append)
    output, shard = torch.zeros(1), torch.zeros(2)
    assert checked(output, shard) == [id(output)], "before the reduction"
    assert checked(output=output, input=shard) == [id(output)] * 2
    with pytest.raises(ValueError, match=r"needs output first or by name; it was called with \['input'\]"):
        checked(input=shard)


def test_a_dummy_process_group_counts_and_changes_nothing():
    group, gradient = DummyProcessGroup(rank=2, size=4), torch.ones(3)
    work = group.allreduce([gradient])
    assert (group.rank(), group.size(), group.all_reduces) == (2, 4, 1)
    assert work.wait()
    assert work.get_future().wait() == 1
    assert torch.equal(gradient, torch.ones(3))


def test_dummy_ddp_counts_one_all_reduce_a_gradient():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    inner[0].bias.requires_grad_(False)
    model = DummyDDP(inner)
    x = torch.ones(1, 2)
    assert torch.equal(model(x), inner(x))
    assert model.all_reduces == 0
    for backward in (1, 2):
        model(x).sum().backward()
        assert model.all_reduces == 2 * backward
    group = DummyProcessGroup(0, 2)
    DummyDDP(nn.Linear(2, 2), group)(x).sum().backward()
    assert group.all_reduces == 2
