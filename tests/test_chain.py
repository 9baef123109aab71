"""labkit.models.chain: the size that fills buckets, and checkpointing that changes nothing but memory."""

import pytest
import torch

from labkit.models.chain import LinearChain


def test_the_default_is_the_size_of_the_original():
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in LinearChain().named_parameters()}
    assert list(shapes) == [f"fc{index}.{part}" for index in (1, 2, 3, 4) for part in ("weight", "bias")]
    assert {shapes[name] for name in shapes} == {(2000, 2000), (2000,)}


@pytest.mark.parametrize("layers", [1, 100])
def test_there_are_as_many_layers_as_asked_for(layers):
    model = LinearChain(3, layers=layers)
    assert [name for name, _ in model.named_children()] == [f"fc{index}" for index in range(1, layers + 1)]
    inputs = model.get_input(torch.device("cpu"))
    model.get_loss(inputs, model(*inputs)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def gradients(checkpoint):
    torch.manual_seed(0)
    model = LinearChain(8, checkpoint, batch=3)
    calls = []
    model.fc1.register_forward_pre_hook(lambda *_: calls.append("fc1"))
    inputs = model.get_input(torch.device("cpu"), seed=1)
    model.get_loss(inputs, model(*inputs)).backward()
    return len(calls), [parameter.grad for parameter in model.parameters()]


def test_checkpointing_goes_through_fc1_twice_and_gives_the_same_gradients():
    (once, plain), (twice, recomputed) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    assert len(plain) == 8
    for expected, actual in zip(plain, recomputed, strict=True):
        assert expected.abs().max() > 0
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("batch", [1, 5])
def test_samples_are_the_same_for_the_same_seed(batch):
    model = LinearChain(4, batch=batch)
    first, again, other = (model.get_input(torch.device("cpu"), seed)[0] for seed in (1, 1, 2))
    assert first.shape == (batch, 4)
    assert torch.equal(first, again) and not torch.equal(first, other)
