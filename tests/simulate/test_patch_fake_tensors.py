"""What an operator returns without memory is looked up faster, and is what torch itself would return."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from labkit_simulate.flop_counter import OperatorCounter
from labkit_simulate.patch_fake_tensors import describe_arguments, read_faster


@pytest.fixture
def faster(monkeypatch):
    """Let FakeTensorMode read arguments as in a simulation, with nothing remembered yet."""
    FakeTensorMode.cache_clear()
    monkeypatch.setattr(FakeTensorMode, "_prep_args_for_hash", read_faster(FakeTensorMode._prep_args_for_hash))
    yield
    FakeTensorMode.cache_clear()


def train_a_step():
    """The operators of a small model's step, forward and backward."""
    with FakeTensorMode(allow_non_fake_inputs=True), OperatorCounter() as counter:
        half = {"dtype": torch.bfloat16}
        layers = nn.Linear(8, 16, **half), nn.GELU(), nn.LayerNorm(16, **half), nn.Linear(16, 4, **half)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for rows in (3, 3, 5):
            logits = model(torch.ones(rows, 8, dtype=torch.bfloat16)).float()
            functional.cross_entropy(logits, torch.zeros(rows, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return counter.operators


def test_a_step_has_the_same_operators_flops_and_bytes(monkeypatch, faster):
    found = train_a_step()
    assert FakeTensorMode.cache_info().hits > 100, "it was looked up"
    monkeypatch.undo()
    FakeTensorMode.cache_clear()
    assert found == train_a_step() and len(found) > 100


def test_whatever_changes_what_is_returned_is_told_apart(faster):
    with FakeTensorMode() as mode:
        square, wide = torch.empty(4, 4), torch.empty(2, 8)
        assert (square * 2).dtype == torch.float32 and (square.long() * 2).dtype == torch.int64
        assert (square.long() * 2.0).dtype == torch.float32, "2 and 2.0 are equal in Python"
        assert (square.long() + True).dtype == torch.int64 == (square.long() + 1).dtype
        assert square.sum(0).shape == (4,) and square.sum([0, 1]).shape == ()
        assert (square.t() + 0).stride() == (1, 4) and (square + 0).stride() == (4, 1)
        assert wide.view(16).shape == (16,) and wide.view(4, 4).shape == (4, 4)
        assert wide[1].storage_offset() == 8 and wide[0].storage_offset() == 0
        assert torch.ones_like(square, dtype=torch.half).dtype == torch.half
        different = [
            *((square,), (wide,), (square.t(),), (square.half(),), (square[:2],), (square[2:],)),
            *((torch.empty(4, 4, requires_grad=True),), (1,), (1.0,), (True,), ([1],), ((1,),), ("1",)),
            *({"dim": 1}, {"dim": 1.0}, {"keep": 1}),
        ]
        known = [describe_arguments(mode, each) for each in different]
    assert None not in known and len(set(known)) == len(different)


def test_what_is_unusual_is_left_to_torch(faster):
    with FakeTensorMode() as mode:
        own = torch.empty(2)
    with FakeTensorMode() as other:
        assert describe_arguments(other, (own,)) is None, "of another mode"
        assert describe_arguments(other, ([torch.empty(2), print],)) is None
        constant = torch.tensor(3)
        assert constant.constant is not None and describe_arguments(other, (constant,)) is None
    assert describe_arguments(mode, (own,)) is not None and describe_arguments(mode, (torch.Tensor(),)) is None
