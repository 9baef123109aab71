"""labkit.models.delay: how long a pause is, when it comes, and that values do not change."""

import contextlib
import copy
import time
from unittest import mock

import pytest
import torch
from torch import nn

from labkit import torch_private
from labkit.models import delay, moe
from labkit.models.delay import ModuleWithDelay, NestedWithDelay, delay_compute, delay_reduction, pause_device
from labkit.models.mlp import MLP, MLPStack
from labkit.models.moe import MixtureOfExperts
from labkit.models.transformer import TransformerWithSharedParams
from launch import fsdp_matrix

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch):
    """What happens in a step, in order: pauses are noted, not waited for."""
    noted = []
    for module in (delay, moe):
        monkeypatch.setattr(module, "pause_device", lambda ms, device: noted.append(f"pause {ms}") if ms > 0 else None)
    return noted


def watch(block, name, events):
    """Note when each parameter of a block has its gradient."""
    for key, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: events.append(f"{name}.{key}"))


def test_a_pause_lasts_as_long_as_it_says():
    start = time.perf_counter()
    pause_device(20, CPU)
    assert 0.02 <= time.perf_counter() - start < 0.2


def test_a_pause_on_a_gpu_is_as_many_cycles_as_its_clock_makes_in_that_time(monkeypatch):
    cycles, event = [], mock.Mock(elapsed_time=lambda end: 40.0)  # ms for 20 million cycles: 0.5 GHz
    monkeypatch.setattr(torch_private, "sleep", cycles.append, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    pause_device(3, torch.device("cuda", 99))
    assert cycles[-1] == 1_500_000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pause_on_a_gpu_occupies_its_stream_and_not_the_host():
    device = torch.device("cuda", torch.cuda.current_device())
    pause_device(1, device)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = time.perf_counter()
    start.record()
    pause_device(50, device)
    end.record()
    assert time.perf_counter() - before < 0.02
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx(50, rel=0.2)


def test_compute_is_delayed_once_in_the_forward_and_first_in_the_backward(events):
    block = nn.Linear(2, 2)
    delay_compute(block, 7)
    watch(block, "block", events)
    output = block(torch.ones(1, 2))
    assert events == ["pause 7"]
    output.sum().backward()
    assert events[:2] == ["pause 7", "pause 7"]
    assert sorted(events[2:]) == ["block.bias", "block.weight"]


def test_reduction_is_delayed_when_the_block_has_its_gradients_and_the_one_before_has_not(events):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    delay_reduction(second, 7)
    watch(first, "first", events)
    watch(second, "second", events)
    second(first(torch.ones(1, 2))).sum().backward()
    assert sorted(events[:2]) == ["second.bias", "second.weight"]
    assert events[2] == "pause 7"
    assert sorted(events[3:]) == ["first.bias", "first.weight"]


def test_reduction_of_a_first_block_is_delayed_before_its_gradients(events):
    block = nn.Linear(2, 2)
    delay_reduction(block, 7)
    watch(block, "block", events)
    block(torch.ones(1, 2)).sum().backward()
    assert events[0] == "pause 7"
    assert sorted(events[1:]) == ["block.bias", "block.weight"]


def test_a_block_with_several_inputs_pauses_once(events):
    class Sum(nn.Module):
        def forward(self, x, *, other):
            return {"sum": x + other, "difference": x - other}

    for change in (delay_compute, delay_reduction):
        block = Sum()
        change(block, 3)
        x, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        output = block(x, other=other)
        events.clear()
        (output["sum"] + 2 * output["difference"]).sum().backward()
        assert events == ["pause 3"]
        assert torch.equal(x.grad, torch.full((2,), 3.0))
        assert torch.equal(other.grad, torch.full((2,), -1.0))


def test_no_gradient_no_pause_in_the_backward(events):
    block = nn.Linear(2, 2)
    delay_compute(block, 7)
    delay_reduction(block, 5)
    with torch.no_grad():
        block(torch.ones(1, 2))
    assert events == ["pause 7"]


@pytest.mark.parametrize("change", [delay_compute, delay_reduction])
def test_a_delay_of_nothing_leaves_the_block_alone(change):
    block = nn.Linear(2, 2)
    change(block, 0)
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_the_model_with_delays_pauses_after_the_loss_and_at_every_block(events):
    inner = MLPStack()
    get_loss = inner.get_loss
    inner.get_loss = lambda *given: events.append("loss") or get_loss(*given)
    model = ModuleWithDelay(inner, 5, 3)
    assert model.block_types == ("MLP",)
    inputs = model.get_input(CPU)
    loss = model.get_loss(inputs, model(*inputs))
    assert events == ["loss", "pause 5"]
    model.run_backward(loss)
    assert events == ["loss", "pause 5", "pause 3", "pause 3", "pause 3"]


@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({"model": "moe", "delay_before_free_ms": 4}, ["pause 4", "pause 4"]),
        ({"model": "delay", "delay_after_loss_ms": 5}, ["pause 5"]),
        ({"model": "delay", "delay_before_reduction_ms": 3}, ["pause 3", "pause 3", "pause 3"]),
    ],
)
def test_the_model_of_the_program_pauses_as_its_options_say(events, options, pauses):
    model = fsdp_matrix.build_model(fsdp_matrix.Config(**options), CPU, 0)
    inputs = model.get_input(CPU)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    assert events == pauses


def test_the_nested_model_pauses_at_inner_blocks_too(events):
    model = NestedWithDelay(delay_before_reduction_ms=3)
    assert model.block_types == ("NestedBlock",)
    inputs = model.get_input(CPU)
    model.run_backward(model.get_loss(inputs, model(*inputs)))
    assert events == ["pause 3"] * 3


def test_delays_change_no_value():
    plain = TransformerWithSharedParams(dropout=0.0)
    delayed = ModuleWithDelay(copy.deepcopy(plain), 1, 1)
    for block in delayed.modules():
        if type(block).__name__ in delayed.block_types:
            delay_compute(block, 1)
    results = []
    for model in (plain, delayed):
        inputs = model.get_input(CPU, seed=4)
        loss = model.get_loss(inputs, model(*inputs))
        model.run_backward(loss)
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    (loss, gradients), (other_loss, others) = results
    assert torch.equal(loss, other_loss)
    assert len(gradients) == len(others) > 20
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_the_mixture_pauses_once_its_shared_part_and_its_expert_have_computed(events, monkeypatch):
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *rest: events.append(x.shape[-1]) or linear(x, *rest))
    model = MixtureOfExperts(delay_before_free_ms=4)
    inputs = model.get_input(CPU)
    model(*inputs)
    assert events == [8, 12, "pause 4", 23, "pause 4", 12]
    events.clear()
    MixtureOfExperts()(*inputs)
    assert events == [8, 12, 23, 12]


def test_a_delayed_block_can_be_checkpointed():
    torch.manual_seed(0)
    block, x = MLP(4), torch.randn(2, 4)
    plain = copy.deepcopy(block)
    delay_compute(block, 1)
    delay_reduction(block, 1)
    gradients = []
    for one in (plain, block):
        leaf = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(one, leaf, use_reentrant=False).square().sum().backward()
        gradients.append([leaf.grad, *(parameter.grad for parameter in one.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("change", [delay_compute, delay_reduction])
def test_a_delayed_block_returns_no_view(change):
    """A block that returns a view makes FSDP2 warn, since its hook would be lost with an operation in place."""
    block = nn.ReLU()
    change(block, 1)
    assert block(torch.ones(2, requires_grad=True))._base is None
