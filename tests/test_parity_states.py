"""labkit.parity.states: what is right is counted, what is wrong is named, on two real ranks with FSDP1 and FSDP2."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from labkit import parity
from labkit.session.traffic import CommunicationCounter

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def small_model():
    """Six parameters and three buffers; 3 and 5 rows, so that shards are uneven on two ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))


def wrapped(model, kind):
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        )  # fmt: skip
    if kind != "plain":
        for block in model:
            half = kind == "fsdp2 in bfloat16" and isinstance(block, nn.Linear)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, output_dtype=torch.float32)
            fully_shard(block, reshard_after_forward=False, mp_policy=policy)
        return fully_shard(model)
    return model


def two_models(with_gradients=True):
    """A replicated and an FSDP2 model after one backward pass on the same samples."""
    replicated = small_model()
    sharded = wrapped(copy.deepcopy(replicated), "fsdp2")
    if with_gradients:
        x = torch.arange(8.0).reshape(2, 4)
        for model in (replicated, sharded):
            model(x).square().mean().backward()
    for block in sharded:
        block.reshard()
    return replicated, sharded


def message_of(error, function, *args):
    with pytest.raises(error) as raised:
        function(*args)
    return str(raised.value)


def compared_tensors():
    both = parity.check_sharded_parity(*two_models())
    return both, parity.check_sharded_parity(*two_models(with_gradients=False))


def test_values_and_gradients_are_counted(ranks):
    assert ranks(2)(compared_tensors) == [(12, 6)] * 2


def wrong_value_on_rank_1():
    """Only this rank's shard is wrong, and only this rank can see it."""
    replicated, sharded = two_models()
    if dist.get_rank() == 0:
        return parity.check_sharded_parity(replicated, sharded)
    with torch.no_grad():
        sharded[2].weight.to_local()[0, 0] += 0.1
    return message_of(AssertionError, parity.check_sharded_parity, replicated, sharded)


def wrong_reference_on_rank_1():
    """The replicated model differs between ranks: rank 0's must not be taken for it."""
    replicated, sharded = two_models()
    if dist.get_rank() == 0:
        return parity.check_sharded_parity(replicated, sharded)
    with torch.no_grad():
        replicated[2].weight += 0.1
    return message_of(AssertionError, parity.check_sharded_parity, replicated, sharded)


def wrong_gradient_on_rank_1():
    replicated, sharded = two_models()
    if dist.get_rank() == 0:
        return parity.check_sharded_parity(replicated, sharded)
    sharded[1].bias.grad.to_local()[0] *= 2
    return message_of(AssertionError, parity.check_sharded_parity, replicated, sharded)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (wrong_value_on_rank_1, "parameter 2.weight"),
        (wrong_reference_on_rank_1, "parameter 2.weight"),
        (wrong_gradient_on_rank_1, "gradient of 1.bias"),
    ],
)
def test_a_wrong_shard_is_named_by_the_rank_that_holds_it(ranks, body, what):
    right, wrong = ranks(2, timeout_s=20)(body)  # a collective would wait for the rank that has stopped
    assert right == 12
    assert wrong.startswith(f"{what}, the shard of rank 1: ")


def missing_and_plain():
    replicated, sharded = two_models()
    check, found = parity.check_sharded_parity, {}
    replicated[2].bias.grad = None
    found["gradient here"] = message_of(AssertionError, check, replicated, sharded)
    sharded[2].bias.grad = None
    found["neither"] = check(replicated, sharded)
    sharded[0].bias.grad = None
    found["gradient there"] = message_of(AssertionError, check, replicated, sharded)
    found["plain"] = message_of(ValueError, check, replicated, replicated)
    found["names"] = message_of(AssertionError, check, nn.Sequential(replicated), sharded)
    backwards = nn.Sequential(OrderedDict(reversed(list(sharded.named_children()))))
    found["order"] = message_of(AssertionError, check, replicated, backwards)
    return found


def test_missing_gradients_names_and_plain_tensors(ranks):
    for found in ranks(2)(missing_and_plain):
        assert found["gradient here"] == "2.bias: only the replicated module has no gradient"
        assert found["neither"] == 11
        assert found["gradient there"] == "0.bias: only the sharded module has no gradient"
        assert found["plain"].startswith("0.weight is a plain tensor, not a shard")
        assert "names of the replicated and the sharded parameters differ: ['0.0.bias'" in found["names"]
        assert found["order"].endswith("differ: the order alone differs")


def gradient_placed_otherwise():
    """FSDP would take this whole gradient for a shard."""
    replicated, sharded = two_models()
    bias = sharded[2].bias
    bias.grad = bias.grad.redistribute(placements=[Replicate()])
    return message_of(AssertionError, parity.check_sharded_parity, replicated, sharded)


def test_a_gradient_must_be_placed_as_its_parameter(ranks):
    for message in ranks(2)(gradient_placed_otherwise):
        assert message.startswith("gradient of 2.bias: placed as (Replicate(),), and its parameter as (Shard(dim=0),)")


def inside_a_wrapper():
    replicated, sharded = two_models()
    replicated = nn.Sequential(OrderedDict(outer=replicated))
    sharded = nn.Sequential(OrderedDict(outer=nn.Sequential(OrderedDict(inner=sharded))))
    check = parity.check_sharded_parity
    return message_of(AssertionError, check, replicated, sharded), check(replicated, sharded, ("inner.",))


def test_prefixes_of_wrappers_are_ignored_wherever_they_stand(ranks):
    message, compared = ranks(2)(inside_a_wrapper)[0]
    assert "outer.inner.0.bias" in message
    assert compared == 12


def twice_sharded():
    """By hand, as (Shard(0), Shard(0)), and by FSDP2 over tensor parallelism, which cuts the other way round."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    by_hand = nn.Linear(4, 4, bias=False)
    plain = copy.deepcopy(by_hand)
    by_hand.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, (Shard(0), Shard(0))))
    by_fsdp = parallelize_module(copy.deepcopy(plain), mesh["tensor"], ColwiseParallel())
    fully_shard(by_fsdp, mesh=mesh["data"])
    refused = [message_of(ValueError, parity.check_sharded_parity, plain, model) for model in (by_hand, by_fsdp)]
    by_hand.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, (Shard(0), Shard(1))))
    return refused, parity.check_sharded_parity(plain, by_hand)


def test_two_shardings_of_one_dim_are_refused_with_the_reason(ranks):
    messages, compared = ranks(2)(twice_sharded)[0]
    assert compared == 1, "of two dims they are clear"
    for message in messages:
        assert message.startswith("weight: two mesh axes shard the same dim, (")
        assert "which one cut first decides which rows a rank holds" in message


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="nothing to compare: ReLU has no parameters"):
        parity.check_sharded_parity(nn.ReLU(), nn.ReLU())


def states_on_every_rank():
    model, found = small_model(), {}
    model[0].weight.data[0, 0] = torch.nan  # equal bits are equal
    parity.assert_module_states(model)
    if dist.get_rank() == 1:
        model[1].running_mean += 1
    found["buffer"] = message_of(AssertionError, parity.assert_module_states, model)
    if dist.get_rank() == 2:
        model[2].bias.data[-1] += 1e-6
    found["parameter first"] = message_of(AssertionError, parity.assert_module_states, model)
    if dist.get_rank() == 0:
        model.register_buffer("extra", torch.ones(1))
    found["ranks 1 and 2"] = None
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return found
    found["ranks 1 and 2"] = message_of(AssertionError, parity.assert_module_states, model, pair)
    return found


def test_module_states_name_the_first_that_differs_and_the_ranks(ranks):
    for rank, found in enumerate(ranks(3)(states_on_every_rank)):
        assert found["buffer"].startswith("1.running_mean differs between ranks: ranks 0, 2 hold ")
        assert "; rank 1 holds " in found["buffer"]
        assert found["parameter first"].startswith("2.bias differs between ranks: ranks 0, 1 hold ")
        assert rank == 0 or found["ranks 1 and 2"].startswith("2.bias differs")


def states_that_cannot_be_compared():
    _, sharded = two_models(with_gradients=False)
    mesh = init_device_mesh("cpu", (2,))
    replicated = nn.Linear(2, 2)
    replicated.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    replicated.bias.data.zero_()
    parity.assert_module_states(replicated)
    shard = message_of(ValueError, parity.assert_module_states, sharded)
    nothing = message_of(ValueError, parity.assert_module_states, nn.ReLU())
    own, shaped = nn.ReLU(), nn.ReLU()
    if dist.get_rank() == 1:
        own.register_buffer("extra", torch.ones(1))
    shaped.register_buffer("mask", torch.ones((1, 2) if dist.get_rank() else (2,)))
    missing, other_shape = (message_of(AssertionError, parity.assert_module_states, each) for each in (own, shaped))
    return shard, nothing, missing, other_shape


def test_shards_and_empty_modules_are_refused_and_a_missing_tensor_is_named(ranks):
    shard, nothing, missing, shape = ranks(2)(states_that_cannot_be_compared)[0]
    assert shard.startswith("0.weight is a shard, (Shard(dim=0),)")
    assert nothing == "nothing to compare: ReLU has neither parameters nor buffers"
    assert missing.startswith("extra differs between ranks: rank 0 holds none; rank 1 holds ")
    assert shape.startswith("mask differs between ranks")


def states_by_a_function_of_ones_own():
    """Pairs that the function gets, whether differences pass that it allows, and what it says of others."""
    model, pairs = small_model(), []
    model[2].bias.data[0] = float(dist.get_rank())
    parity.assert_module_states(model, assert_fn=lambda first, other: pairs.append((first, other)))
    biases = [(first[0].item(), other[0].item()) for first, other in pairs if first.shape == (5,)]
    close = partial(torch.testing.assert_close, rtol=0, atol=1.5)
    far = message_of(AssertionError, partial(parity.assert_module_states, assert_fn=close), model)
    pair = dist.new_group([1, 2])
    if dist.get_rank():
        parity.assert_module_states(model, pair, assert_fn=close)
    if dist.get_rank() == 1:
        model.register_buffer("extra", torch.ones(1))
    return (
        len(pairs),
        biases,
        far,
        message_of(AssertionError, partial(parity.assert_module_states, assert_fn=close), model),
    )


def test_a_function_of_ones_own_decides_which_module_states_are_equal(ranks):
    for count, biases, far, missing in ranks(3)(states_by_a_function_of_ones_own):
        assert count == 2 * (6 + 3), "every tensor, of ranks 1 and 2"
        assert biases == [(0.0, 1.0), (0.0, 2.0)], "rank 0's first"
        assert far.startswith("2.bias, ranks 0 and 2: ")
        assert missing.startswith("extra differs between ranks: ranks 0, 2 hold none; rank 1 holds ")


def outer_parameters(kind):
    """Those that ``full_params`` gives without ``recurse``, and its all-gathers with and without."""
    plain = small_model()
    model, gathers = wrapped(copy.deepcopy(plain), kind), []
    for recurse in (True, False):
        with CommunicationCounter() as counter:
            found = parity.full_params(model, recurse=recurse)
        gathers.append(counter.counts["all_gather"])
    named = dict(plain.named_parameters())
    assert all(torch.equal(tensor, named[name]) for name, tensor in found.items())
    return list(found), gathers


@pytest.mark.parametrize(
    ("kind", "names", "gathers"),
    # FSDP1's outer unit has the parameters of the batch norm, FSDP2's has none
    [("plain", NAMES, [0, 0]), ("fsdp1", ["1.weight", "1.bias"], [3, 1]), ("fsdp2", [], [6, 0])],
)
def test_parameters_of_nested_units_may_be_left_where_they_are(ranks, kind, names, gathers):
    assert ranks(2)(outer_parameters, kind) == [(names, gathers)] * 2


def zeroed_by_one_rank(kind):
    """How many numbers are left when rank 0 alone sets its shards to zero, of all and of both ranks' shards."""
    model = wrapped(small_model(), kind)
    nn.init.ones_(model[1].bias)
    numbers = sum(int(tensor.count_nonzero()) for tensor in parity.full_params(model).values())
    if dist.get_rank() == 0:
        parity.zero_model(model, summon_full=False)
    own = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    left = sum(int(tensor.count_nonzero()) for tensor in parity.full_params(model).values())
    return numbers, left, sum(each.numel() for each in own)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_rank_may_set_its_own_shards_to_zero(ranks, kind):
    first, second = ranks(2, timeout_s=20)(zeroed_by_one_rank, kind)  # a collective would wait for rank 1
    assert first[:2] == second[:2]
    assert first[0] == 41 and first[1] == second[2] == first[0] - first[2] > 0


def gathered_and_zeroed(kind, after_forward):
    plain = small_model()
    model = wrapped(copy.deepcopy(plain), kind)

    def keep_full_parameters():
        if after_forward:  # until the backward pass
            with torch.no_grad():
                model.eval()(torch.ones(2, 4))

    keep_full_parameters()
    full = parity.full_params(model)
    assert list(full) == NAMES
    for name, parameter in plain.named_parameters():
        assert not isinstance(full[name], DTensor)
        assert torch.equal(full[name], parameter), name
    full["0.weight"].zero_()
    assert parity.full_params(model)["0.weight"].any(), "what is given is a copy"
    keep_full_parameters()
    parity.zero_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the shards themselves must be zero
    assert not any(tensor.any() for tensor in parity.full_params(model).values())
    assert all(buffer.any() for name, buffer in model.named_buffers() if name.endswith("running_var"))
    parity.zero_model(model, zero_buffers=True)
    assert not any(buffer.any() for buffer in model.buffers())
    assert not model(torch.ones(2, 4)).any(), "the zeros are what the model computes with"
    return len(full)


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2", "fsdp2 in bfloat16"])
def test_parameters_are_gathered_and_zeroed(ranks, kind, after_forward):
    assert ranks(2)(gathered_and_zeroed, kind, after_forward) == [6, 6]


def received_state():
    mine = dist.get_rank()
    state = {"weight": torch.full((2,), float(mine)), "count": torch.tensor(mine)}
    received = parity.broadcast_state_dict(state)
    assert state["weight"].tolist() == [mine, mine], "the argument stays as it is"
    assert all(tensor.is_meta for tensor in parity.broadcast_state_dict(state, device="meta").values())
    alone = parity.broadcast_state_dict(state if mine == 0 else None)
    pair = dist.new_group([1, 2])
    among = parity.broadcast_state_dict(state, pair) if mine else {}
    missing = message_of(ValueError, parity.broadcast_state_dict, None)
    shard = {"weight": distribute_tensor(torch.ones(3), init_device_mesh("cpu", (3,)), [Shard(0)])}
    sharded = message_of(ValueError, parity.broadcast_state_dict, shard)
    return (
        [{name: tensor.tolist() for name, tensor in each.items()} for each in (received, alone, among)],
        missing,
        sharded,
    )


def test_a_state_dict_is_the_first_ranks_on_every_rank(ranks):
    for rank, (states, missing, sharded) in enumerate(ranks(3)(received_state)):
        of_rank_0, of_rank_1 = {"weight": [0.0, 0.0], "count": 0}, {"weight": [1.0, 1.0], "count": 1}
        assert states == [of_rank_0, of_rank_0, of_rank_1 if rank else {}]
        assert missing == "cannot broadcast a state dict: rank 0 has no state"
        assert sharded == "cannot broadcast a state dict: weight is a shard: gather it first, with full_params"


def test_a_state_dict_is_a_copy_in_the_wanted_type_and_the_model_stays():
    model = small_model()
    half = parity.copy_state_dict(model, cpu_offload=True, half=True)
    assert half["0.weight"].dtype == half["1.running_mean"].dtype == torch.float16
    assert half["1.num_batches_tracked"].dtype == torch.int64
    assert model[0].weight.dtype == torch.float32
    state = parity.copy_state_dict(model)
    assert list(state) == list(model.state_dict())
    state["0.weight"].zero_()
    assert model[0].weight.any()
