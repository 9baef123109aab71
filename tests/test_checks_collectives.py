"""labkit_course.checks.collectives: other right ways pass, a deadlock is told as one, the reference is one device's.

The notebook's own answers and wrong ones are in tests/test_exercises.py.
"""

import pytest
import torch
from torch import nn

from labkit_course.checks import collectives as checks
from labkit_course.checks.ranks.collectives import LEARNING_RATE, STEPS, make_rank_model, rank_batches, train_all_ranks

IMPORTS = "import torch\nfrom torch import distributed as dist\nfrom torch import nn\n\n\n"
RING = "def ring(mine, rank, ranks):"
OTHER_WAYS = {
    "blocking, even ranks send first": (
        checks.shift,
        "def shift(mine, rank, ranks):",
        """
arrived = torch.empty_like(mine)
for send in (True, False) if rank % 2 == 0 else (False, True):
    if send:
        dist.send(mine, (rank + 1) % ranks)
    else:
        dist.recv(arrived, (rank - 1) % ranks)
return arrived
""",
    ),
    "a ring the other way around, in batches": (
        checks.ring_all_reduce,
        RING,
        """
parts = [part.clone() for part in mine.tensor_split(ranks)]
for step in range(2 * ranks - 2):
    out, place = parts[(rank + step) % ranks], (rank + step + 1) % ranks
    arrived = torch.empty_like(parts[place])
    operations = [dist.P2POp(dist.isend, out, (rank - 1) % ranks), dist.P2POp(dist.irecv, arrived, (rank + 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    parts[place] = arrived + parts[place] if step < ranks - 1 else arrived
return torch.cat(parts)
""",
    ),
    "all gradients in one flat tensor": (
        checks.train,
        "def train(model, batches, learning_rate):",
        """
parameters = list(model.parameters())
for parameter in parameters:
    dist.broadcast(parameter.detach(), src=0)
for inputs, targets in batches:
    gradients = torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), parameters)
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    weights = nn.utils.parameters_to_vector(parameters) - learning_rate * flat / dist.get_world_size()
    nn.utils.vector_to_parameters(weights.detach(), parameters)
""",
    ),
}


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_another_right_way_passes(name, answer_to):
    check, head, body = OTHER_WAYS[name]
    verdict = check(answer_to(head, body, IMPORTS))
    assert verdict.ok, verdict


def test_ranks_that_all_receive_first_are_stopped_and_told_why(answer_to):
    body = (
        "arrived = torch.empty_like(mine)\ndist.recv(arrived, (rank - 1) % ranks)\ndist.send(mine, (rank + 1) % ranks)"
    )
    verdict = checks.shift(answer_to("def shift(mine, rank, ranks):", body, IMPORTS), timeout_s=5)
    assert verdict.state == "wrong"
    assert "the ranks waited for each other" in repr(verdict)
    assert "does each rank start its send and its receive before it waits for either?" in repr(verdict)


def test_the_reference_of_training_is_one_device_with_all_samples():
    model = make_rank_model(0)
    for step in range(STEPS):
        model.zero_grad()
        batches = [rank_batches(rank)[step] for rank in range(4)]
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.data -= LEARNING_RATE * parameter.grad
    for parameters in train_all_ranks(4):
        for found, expected in zip(parameters, model.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("change", [{"together": False}, {"factor": 4.0}, {"same_start": False}, {"forget": False}])
def test_each_likely_mistake_ends_with_other_weights(change):
    right, wrong = train_all_ranks(4), train_all_ranks(4, **change)
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(right[1], wrong[1], strict=True))
