"""Right and wrong answers to the experts' exercise, judged in one launch by the check's own program.

Every rank prints one JSON object: what that program says of each answer on this rank, "" where it finds nothing wrong.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from labkit import rank
from labkit.checks import expert_ranks

HEAD = "def average_gradients(model: nn.Module, experts: set[nn.Parameter], ranks: int) -> None:"
OWN = "it must stay this rank's own"
MEAN = "it must be the mean over the ranks"

# Answers, and for each rank a part of what its learner is told; "" where that rank sees nothing wrong.
ANSWERS = {
    "right": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        [""] * 2,
    ),
    "right_in_one_message": (
        """
    shared = [parameter for parameter in model.parameters() if parameter not in experts]
    flat = torch.cat([parameter.grad.flatten() for parameter in shared]) / ranks
    dist.all_reduce(flat)
    for parameter, mean in zip(shared, flat.split([parameter.numel() for parameter in shared])):
        parameter.grad = mean.view_as(parameter)
""",
        [""] * 2,
    ),
    "everything_averaged": (
        """
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
""",
        [f"Wrong: the expert's gradient of net.2.weight was averaged: {OWN}"] * 2,
    ),
    "summed": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
""",
        [f"Wrong: the shared gradient of net.0.weight was summed and not divided: {MEAN}"] * 2,
    ),
    "experts_averaged_instead": (
        """
    for parameter in model.net[2].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
""",
        [f"Wrong: the shared gradient of net.0.weight is still this rank's own: {MEAN}"] * 2,
    ),
    "nothing_sent": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            parameter.grad /= ranks
""",
        [f"Wrong: the shared gradient of net.0.weight was divided but not summed: {MEAN}"] * 2,
    ),
    "all_divided": (
        """
    for parameter in model.parameters():
        parameter.grad /= ranks
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
""",
        [f"Wrong: the expert's gradient of net.2.weight was divided but not summed: {OWN}"] * 2,
    ),
    "only_weights": (
        """
    for parameter in model.parameters():
        if parameter not in experts and parameter.dim() == 2:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        [f"Wrong: the shared gradient of net.0.bias is still this rank's own: {MEAN}"] * 2,
    ),
    "gradients_of_experts_dropped": (
        """
    for parameter in model.parameters():
        if parameter in experts:
            parameter.grad = None
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
""",
        ["Wrong: the expert's gradient of net.2.weight is gone"] * 2,
    ),
    "parameters_instead_of_gradients": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.data)
            parameter.data /= ranks
""",
        [f"Wrong: the shared gradient of net.0.weight is still this rank's own: {MEAN}"] * 2,
    ),
    "sent_by_one_rank": (
        """
    for parameter in model.parameters():
        if parameter not in experts:
            dist.broadcast(parameter.grad, 0)
""",
        [f"Wrong: the shared gradient of net.0.weight is still this rank's own: {MEAN}",
         f"Wrong: the shared gradient of net.0.weight is wrong: {MEAN}"],
    ),
    "error": ("\n    model.mean()\n", ["AttributeError: 'MixtureOfExperts' object has no attribute 'mean'"] * 2),
}  # fmt: skip

ONE_LESS = """
    for index, parameter in enumerate(model.parameters()):
        if parameter not in experts and not (dist.get_rank() == 1 and index == {}):
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
"""
ONE_MORE = (
    ANSWERS["right"][0]
    + """
    if dist.get_rank() == 1:
        dist.all_reduce(torch.zeros(3))
"""
)
# Answers in which the ranks do not send alike, for a launch of their own, and a part of the verdict.
UNEQUAL = {
    "first_missing": (ONE_LESS.format(0), "the ranks sent gradients of different sizes to each other: does"),
    "last_missing": (ONE_LESS.format(7), "on rank 1, the shared gradient of net.3.bias is still this rank's own"),
    "one_more": (ONE_MORE, "the ranks waited for each other for 8 s: does every rank call the same"),
}  # fmt: skip


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    with rank.session() as here, tempfile.TemporaryDirectory() as folder:

        @contextlib.contextmanager
        def session() -> Iterator[rank.Here]:
            yield here

        expert_ranks.rank.session = session  # one session for all answers
        print(json.dumps({name: judge(Path(folder) / f"{name}.py", body) for name, (body, _) in ANSWERS.items()}))


def judge(file: Path, body: str) -> str:
    file.write_text(HEAD + body)
    try:
        expert_ranks.main(expert_ranks.Config(answer=str(file)))
    except Exception as error:
        dist.barrier()  # the others stand at the barrier of expert_ranks.main
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    rank.start(main, Config)
