"""Run a learner's functions that average gradients, in buckets or in half precision."""

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.session.traffic import CommunicationCounter

WIDTHS = (6, 9, 7, 5)
ROWS = 3
# From the last layer on, the gradients have 20, 140, 28, 252, 36 and 216 bytes: three buckets.
LIMIT_BYTES = 170
# Rank 1 starts its backward pass this much later, so a rank that does not wait for the all-reduce
# reads gradients that are not summed yet.
DELAY_S = 0.05
MICRO_BATCHES = 3


class CallOrderCounter(CommunicationCounter):
    """Keep ``seen``, events in order; each all-reduce adds "asked" with its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls, handed = self.counts["all_reduce"], self.bytes["all_reduce"]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.counts["all_reduce"] > calls:
            self.seen.append(f"asked {self.bytes['all_reduce'] - handed}")
        return result


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer; ``what`` is "small_ddp", "accumulate" or "half_hook".

    The last two return ``gradients``, and the ``calls`` and ``handed`` bytes of all-reduce.
    """
    if what == "small_ddp":
        return run_small_ddp(answer)
    model = DistributedDataParallel(make_linear_model())
    batches = [step_batch(dist.get_rank(), step) for step in range(MICRO_BATCHES)]
    if what == "half_hook":
        model.register_comm_hook(None, answer)
    # DDP sends all-reduces from C++, which the counter sees as well.
    with CommunicationCounter() as traffic:
        if what == "half_hook":
            mean_squared_error(model, *batches[0]).backward()
        else:
            answer(model, batches)
    calls, handed = traffic.counts["all_reduce"], traffic.bytes["all_reduce"]
    return {"gradients": clone_gradients(model), "calls": calls, "handed": handed}


def run_small_ddp(answer: Callable[[nn.Module, int], Any]) -> dict[str, Any]:
    """Let the answer put hooks on a small model, and run two backward passes.

    ``seen`` lists the events of a pass in order: "gradient", "asked <bytes>" and "waited".
    """
    model, watches, passes = make_linear_model(), [CallOrderCounter()], []
    # Hooks run in the order of their registration: these note a gradient before the answer sees it.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: watches[-1].seen.append("gradient"))
    answer(model, LIMIT_BYTES)

    wait = dist.Work.wait

    def wait_and_note(*args: Any, **kwargs: Any) -> Any:
        watches[-1].seen.append("waited")
        return wait(*args, **kwargs)

    for step in range(2):
        model.zero_grad()
        loss = mean_squared_error(model, *step_batch(dist.get_rank(), step))
        time.sleep(DELAY_S if dist.get_rank() == 1 and step == 0 else 0)
        watches.append(CallOrderCounter())
        with watches[-1], patch.object(dist.Work, "wait", wait_and_note):
            loss.backward()
        passes.append({"gradients": clone_gradients(model), "seen": list(watches[-1].seen)})
    return {"passes": passes}


def make_linear_model() -> nn.Sequential:
    """Return three linear layers, equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def step_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets of a step."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(ROWS, WIDTHS[0], generator=draw)
    return inputs, torch.randn(ROWS, WIDTHS[-1], generator=draw)


def mean_squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of a model."""
    return nn.functional.mse_loss(model(inputs), targets)


def clone_gradients(model: nn.Module) -> list[Tensor | None]:
    """Copy the gradients of all parameters."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
