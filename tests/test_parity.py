"""labkit.parity: what counts as equal, what is counted, and that nothing passes unseen."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from labkit import parity
from labkit.parity import Parity, relative_error


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
    found = Parity()
    for name, error in (("first", 1e-7), ("second", 1e-3), ("third", 1e-5)):
        found.add(name, torch.tensor([1 + error], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert (found.compared, found.worst) == (3, "second")
    assert found.max_rel_error == pytest.approx(1e-3)
    verdict = found.verdict(limit=1e-4)
    assert (verdict["compared"], verdict["worst"], verdict["ok"]) == (3, "second", False)
    assert found.verdict(limit=1e-2)["ok"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_anywhere_is_not_ok(place):
    found = Parity()
    for index in range(3):
        found.add(str(index), torch.tensor([math.nan if index == place else 1.0]), torch.ones(1))
    verdict = found.verdict(limit=1e-5)
    assert math.isnan(verdict["max_rel_error"])
    assert (verdict["ok"], verdict["worst"], verdict["compared"]) == (False, str(place), 3)


def test_nothing_compared_is_not_ok():
    verdict = Parity().verdict(limit=1e-5)
    assert (verdict["compared"], verdict["max_rel_error"], verdict["ok"]) == (0, 0.0, False)


def test_a_verdict_is_one_json_object_as_promised():
    found = Parity()
    found.add("only", torch.ones(2), torch.ones(2))
    verdict = json.loads(json.dumps(found.verdict(limit=1e-5)))
    assert verdict == {"check": "parity", "compared": 1, "max_rel_error": 0.0, "worst": "", "ok": True}


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
        Parity().add("weight", actual, expected)


def two_models():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, copy.deepcopy(model)


def test_names_on_one_side_only_are_an_error():
    model, _ = two_models()
    other = nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"parameter: only on one side: \['bias'\]"):
        Parity().add_training(model, other, "parameter")


def test_a_missing_gradient_is_an_error():
    model, other = two_models()
    with pytest.raises(ValueError, match="gradient weight: the distributed side has none"):
        Parity().add_training(model, other, "gradient")
    for one in (model, other):
        one(torch.ones(1, 3)).sum().backward()
    other.bias.grad = None
    with pytest.raises(ValueError, match="gradient bias: the single-device side has none"):
        Parity().add_training(model, other, "gradient")


def test_a_training_step_compares_outputs_gradients_and_parameters():
    model, other = two_models()
    outputs = []
    for one in (model, other):
        out = one(torch.ones(1, 3))
        out.square().sum().backward()
        outputs.append(out.detach())
    assert parity.of_training_step(model, outputs[0], other, outputs[1], limit=1e-5)["ok"]
    assert parity.of_training_step(model, outputs[0], other, outputs[1], limit=1e-5)["compared"] == 5
    for change, worst in (
        (lambda: outputs[0].mul_(1.001), "outputs"),
        (lambda: model.weight.grad.mul_(1.01), "gradient weight"),
        (lambda: model.bias.data.mul_(1.1), "parameter bias"),
    ):
        change()
        verdict = parity.of_training_step(model, outputs[0], other, outputs[1], limit=1e-5)
        assert (verdict["ok"], verdict["worst"]) == (False, worst)


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
    other = parity.seeded_copy(model, seed=3)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, other.weight)
    with torch.no_grad():
        other.weight.zero_()
    assert model.weight.any()
