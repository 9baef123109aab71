"""labkit.parity: what counts as equal, what is counted, and that nothing passes unseen."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from labkit import parity
from labkit.instrument import DummyDDP
from labkit.models.mlp import MLPStack
from labkit.parity import LIMITS, Parity, relative_error
from labkit.parity.comparison import count_tensors
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training
from labkit.parity.one_device import require_gradients
from labkit.parity.spatial import compare_spatial_step


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([3.0, -4.0], [1.0, -4.0], 0.5),
        ([0.0, 1.0], [0.0, 0.0], math.inf),
        ([math.inf], [1.0], math.inf),
    ],
)
def test_relative_error(actual, expected, error):
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == error


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([math.nan, 1.0], [1.0, 1.0]), ([1.0], [math.nan]), ([math.nan], [math.nan]), ([math.inf], [math.inf])],
)
def test_nan_stays_visible(actual, expected):
    assert math.isnan(relative_error(torch.tensor(actual), torch.tensor(expected)))


def test_the_error_does_not_depend_on_the_scale_of_a_tensor():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for scale in (1e-12, 1.0, 1e12):
        assert relative_error(x * scale * (1 + 1e-6), x * scale) == pytest.approx(1e-6)


def test_the_worst_tensor_is_named_and_every_tensor_counted():
    found = comparison()
    for name, error in (("first", 1e-7), ("second", 1e-3), ("third", 1e-5)):
        found.compare_tensor(name, torch.tensor([1 + error], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert (found.compared, found.worst) == (3, "second")
    assert found.max_rel_error == pytest.approx(1e-3)
    verdict = found.verdict(limit=1e-4, expected=3)
    assert (verdict["compared"], verdict["worst"], verdict["ok"]) == (3, "second", False)
    assert found.verdict(limit=1e-2, expected=3)["ok"]


def comparison():
    """One that has seen gradients which are alive."""
    found, model = Parity(), nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    found.count_gradients(model)
    return found


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_another_number_of_tensors_than_there_were_is_not_ok(expected):
    found = comparison()
    for name in ("first", "second"):
        found.compare_tensor(name, torch.ones(1), torch.ones(1))
    verdict = found.verdict(limit=1e-5, expected=expected)
    assert (verdict["compared"], verdict["expected"], verdict["ok"]) == (2, expected, False)
    assert found.verdict(limit=1e-5, expected=2)["ok"]


def zero_all(model):
    for parameter in model.parameters():
        parameter.grad.zero_()


@pytest.mark.parametrize(
    ("change", "some_zeros", "ok"),
    [
        (lambda model: None, False, True),
        (lambda model: model.bias.grad.zero_(), False, False),
        (lambda model: setattr(model.bias, "grad", None), False, False),
        (zero_all, False, False),
        (lambda model: model.bias.grad.zero_(), True, True),
        (zero_all, True, False),
        (lambda model: model.requires_grad_(False), False, False),
    ],
)
def test_equal_zeros_are_no_proof(change, some_zeros, ok):
    model, found = nn.Linear(3, 2), Parity()
    model(torch.ones(1, 3)).sum().backward()
    change(model)
    found.count_gradients(model, some_zeros=some_zeros)
    found.compare_tensor("output", torch.ones(1), torch.ones(1))
    verdict = found.verdict(limit=1e-5, expected=1)
    assert verdict["ok"] is verdict["gradients_alive"] is ok


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_anywhere_is_not_ok(place):
    found = comparison()
    for index in range(3):
        found.compare_tensor(str(index), torch.tensor([math.nan if index == place else 1.0]), torch.ones(1))
    verdict = found.verdict(limit=1e-5, expected=3)
    assert math.isnan(verdict["max_rel_error"])
    assert (verdict["ok"], verdict["worst"], verdict["compared"]) == (False, str(place), 3)


def test_nothing_compared_is_not_ok():
    verdict = comparison().verdict(limit=1e-5, expected=0)
    assert (verdict["compared"], verdict["max_rel_error"], verdict["ok"]) == (0, 0.0, False)


def test_a_verdict_is_one_json_object_as_promised():
    found = comparison()
    found.compare_tensor("only", torch.ones(2), torch.ones(2))
    verdict = json.loads(json.dumps(found.verdict(limit=1e-5, expected=1)))
    numbers = {"compared": 1, "expected": 1, "max_rel_error": 0.0, "limit": 1e-5}
    assert verdict == {"check": "parity", **numbers, "worst": "", "gradients_alive": True, "ok": True}


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (None, torch.ones(1), "weight: the distributed side has none to compare"),
        (torch.ones(1), None, "weight: the single-device side has none to compare"),
        (torch.ones(2), torch.ones(1, 2), r"weight: shape \(2,\) is not \(1, 2\)"),
    ],
)
def test_what_cannot_be_compared_is_an_error(actual, expected, message):
    with pytest.raises(ValueError, match=message):
        Parity().compare_tensor("weight", actual, expected)


def two_models():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, copy.deepcopy(model)


def test_names_on_one_side_only_are_an_error():
    model, _ = two_models()
    other = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"parameter: only on one side: \['bias'\]"):
        Parity().compare_models(model, other, "parameter")


def test_a_missing_gradient_is_an_error():
    model, other = two_models()
    with pytest.raises(ValueError, match="gradient weight: the distributed side has none"):
        Parity().compare_models(model, other, "gradient")
    for one in (model, other):
        one(torch.ones(1, 3)).sum().backward()
    other.bias.grad = None
    with pytest.raises(ValueError, match="gradient bias: the single-device side has none"):
        Parity().compare_models(model, other, "gradient")


def test_a_training_step_compares_the_gradients_of_its_images():
    model, other = two_models()
    images = [torch.ones(1, 3, requires_grad=True) for _ in range(2)]
    outputs = [one(each) for one, each in zip((model, other), images, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    both = model, outputs[0].detach(), other, outputs[1].detach()
    assert compare_spatial_step(*both, inputs=tuple(images))["compared"] == 6
    images[0].grad *= 1.01
    verdict = compare_spatial_step(*both, inputs=tuple(images))
    assert (verdict["ok"], verdict["worst"]) == (False, "gradient of the images")


def test_a_training_step_compares_outputs_gradients_and_parameters():
    model, other = two_models()
    outputs = []
    for one in (model, other):
        out = one(torch.ones(1, 3))
        out.square().sum().backward()
        outputs.append(out.detach())
    assert compare_spatial_step(model, outputs[0], other, outputs[1])["ok"]
    assert compare_spatial_step(model, outputs[0], other, outputs[1])["compared"] == 5
    for change, worst in (
        (lambda: outputs[0].mul_(1.001), "outputs"),
        (lambda: model.weight.grad.mul_(1.01), "gradient weight"),
        (lambda: model.bias.data.mul_(1.1), "parameter bias"),
    ):
        change()
        verdict = compare_spatial_step(model, outputs[0], other, outputs[1])
        assert (verdict["ok"], verdict["worst"]) == (False, worst)


def trained(steps, input_gradients=False):
    """A model that has taken some steps as the only rank, one device that has not, and what the steps left."""
    one_device = parity.OneDevice(lambda rank: seeded_stack(), ranks=1, input_gradients=input_gradients)
    model, left = seeded_stack(), []
    optimizer = parity.make_sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = parity.draw_samples(model, torch.device("cpu"), step, rank=0)
        inputs = require_gradients(inputs) if input_gradients else inputs
        output = model(*inputs)
        left.append(StepOutcome(model.get_loss(inputs, output), output, inputs))
        left[-1].loss.backward()
        optimizer.step()
    return one_device, model, left


def seeded_stack():
    torch.manual_seed(0)
    return MLPStack(8)


def test_a_model_that_trains_as_one_device_is_ok():
    verdict = compare_fsdp_training(*trained(2), rank=0, steps=2)
    assert verdict["ok"] and verdict["compared"] == verdict["expected"] == 2 * 2 + 12 + 12
    assert verdict["limit"] == LIMITS[torch.float32] == 1e-5


def test_losses_of_no_step_are_an_error():
    with pytest.raises(
        ValueError, match="no loss, so nothing was trained that could be compared: train 1 step or more"
    ):
        compare_fsdp_training(*trained(0), rank=0, steps=0)


def test_fewer_steps_than_were_asked_for_are_not_ok():
    verdict = compare_fsdp_training(*trained(1), rank=0, steps=2)
    assert (verdict["compared"], verdict["expected"], verdict["ok"]) == (26, 28, False)


def test_an_output_that_differs_is_seen():
    one_device, model, left = trained(2)
    left[1] = left[1]._replace(output=left[1].output * 1.01)
    verdict = compare_fsdp_training(one_device, model, left, rank=0, steps=2)
    assert (verdict["ok"], verdict["worst"]) == (False, "output of step 1")


def test_an_inputs_gradient_that_differs_is_seen():
    one_device, model, left = trained(2, input_gradients=True)
    verdict = compare_fsdp_training(one_device, model, left, rank=0, steps=2)
    assert verdict["ok"] and verdict["compared"] == verdict["expected"] == 2 * 3 + 12 + 12
    one_device, model, left = trained(2, input_gradients=True)
    left[1].inputs[0].grad *= 1.01
    verdict = compare_fsdp_training(one_device, model, left, rank=0, steps=2)
    assert (verdict["ok"], verdict["worst"]) == (False, "gradient of input 0 of step 1")


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
def test_a_tensor_of_the_last_step_that_differs_is_seen(kind):
    one_device, model, left = trained(2)
    weight = model.layers[1].out_proj.weight
    (weight.grad if kind == "gradient" else weight.data).mul_(1.01)
    verdict = compare_fsdp_training(one_device, model, left, rank=0, steps=2)
    assert (verdict["ok"], verdict["worst"]) == (False, f"{kind} layers.1.out_proj.weight")


def test_a_model_that_has_lost_its_gradients_is_an_error():
    one_device, model, losses = trained(2)
    model.layers[1].out_proj.bias.grad = None
    with pytest.raises(ValueError, match=r"gradient layers.1.out_proj.bias: the distributed side has none to compare"):
        compare_fsdp_training(one_device, model, losses, rank=0, steps=2)


def test_a_model_that_lacks_a_parameter_is_an_error():
    one_device, model, losses = trained(2)
    model.layers[1].out_proj.bias = None
    with pytest.raises(ValueError, match=r"gradient: only on one side: \['layers.1.out_proj.bias'\]"):
        compare_fsdp_training(one_device, model, losses, rank=0, steps=2)


def test_a_reference_may_be_made_by_a_function_of_ones_own():
    wrapped = []

    def wrap(copy):
        wrapped.append(DummyDDP(copy))
        return wrapped[-1]

    _, model, left = trained(2)
    one_device = parity.OneDevice(lambda rank: seeded_stack(), ranks=1, init_fn=wrap)
    assert compare_fsdp_training(one_device, model, left, rank=0, steps=2)["ok"]
    assert [wrapper.all_reduces for wrapper in wrapped] == [2 * 12], "a gradient of each parameter in two steps"


@pytest.mark.parametrize("rounding", ["parameters", "autocast", "everything"])
def test_what_the_function_gives_is_called_in_every_precision(rounding):
    calls = []

    class Counting(DummyDDP):
        def forward(self, *inputs):
            calls.append(inputs[0].dtype)
            return super().forward(*inputs)

    how = {"rounding": rounding, "init_fn": Counting, "mean": True}
    one_device = parity.OneDevice(lambda rank: seeded_stack(), 2, torch.bfloat16, **how)
    one_device.train_step(0)
    assert calls == [torch.float32 if rounding == "autocast" else torch.bfloat16] * 2
    assert all(each.grad.any() for copy in one_device.copies for each in copy.parameters())


def test_a_reference_that_starts_elsewhere_is_not_equal():
    def start_elsewhere(copy):
        parity.seed_parameters(copy, seed=1)
        return copy

    _, model, left = trained(1)
    one_device = parity.OneDevice(lambda rank: seeded_stack(), ranks=1, init_fn=start_elsewhere)
    assert not compare_fsdp_training(one_device, model, left, rank=0, steps=1)["ok"]


def test_frozen_parameters_are_compared_without_gradients():
    model = MLPStack(8)
    model.layers[0].requires_grad_(False)
    assert count_tensors(model, "gradient", "parameter", "buffer") == 8 + 12


def test_every_batch_has_a_seed_of_its_own():
    seeds = {
        parity.sample_seed(step, rank, batch, 3) for step in (0, 1, 9998) for rank in (0, 1, 3332) for batch in range(3)
    }
    assert len(seeds) == 27


def test_one_rank_with_four_batches_has_the_samples_of_four_ranks():
    assert [parity.sample_seed(5, 0, batch, 4) for batch in range(4)] == [
        parity.sample_seed(5, rank) for rank in range(4)
    ]


def test_gradients_of_several_batches_add_up():
    """Two batches a step are, with a loss that is a sum, one batch of both."""
    one_device = parity.OneDevice(lambda rank: seeded_stack(), ranks=2, batches=2)
    one_device.train_step(0)
    whole = seeded_stack()
    for rank, batch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inputs = parity.draw_samples(whole, torch.device("cpu"), 0, rank, batch, 2)
        (whole.get_loss(inputs, whole(*inputs)) / 2).backward()
    for mine, other in zip(one_device.copies[1].parameters(), whole.parameters(), strict=True):
        assert relative_error(mine.grad, other.grad) < 1e-6


def test_seeded_parameters_are_not_degenerate():
    def made(seed):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        parity.seed_parameters(model, seed)
        return model

    model, again, other = made(1), made(1), made(2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
        assert len(parameter.unique()) == parameter.numel(), f"{name} has equal entries"
        assert parameter.requires_grad


def test_a_seeded_copy_is_equal_and_independent():
    model, _ = two_models()
    before = model.weight.detach().clone()
    other = parity.seed_and_copy(model, seed=3)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, other.weight)
    with torch.no_grad():
        other.weight.zero_()
    assert model.weight.any()
