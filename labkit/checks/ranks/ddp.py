"""Run a learner's functions that average gradients, in buckets or in half precision."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.session import counted_group
from labkit.session.counted_group import GroupCall, GroupTraffic

WIDTHS = (6, 9, 7, 5)
ROWS = 3
# From the last layer on, the gradients have 20, 140, 28, 252, 36 and 216 bytes: three buckets.
LIMIT_BYTES = 170
# Rank 1 starts its backward pass this much later, so a rank that does not wait for the all-reduce
# reads gradients that are not summed yet.
DELAY_S = 0.05


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Call the answer; ``what`` is "small_ddp", "accumulate" or "half_hook".

    The last two return ``gradients``; calls and bytes ``sent``, by collective, and their
    ``dtypes``; and ``gave``, the dtypes of what a hook's futures hold.
    """
    if what == "small_ddp":
        return run_small_ddp(answer)
    model, gave = DistributedDataParallel(make_linear_model()), set[str]()
    count = micro_batches(dist.get_world_size())
    batches = [step_batch(dist.get_rank(), step) for step in range(count)]
    if what == "half_hook":
        model.register_comm_hook(None, note_future_dtypes(answer, gave))
    # DDP sends all-reduces from C++, which its group sees as well.
    with GroupTraffic() as traffic:
        if what == "half_hook":
            mean_squared_error(model, *batches[0]).backward()
        else:
            answer(model, batches)
    dtypes = sorted({call.dtype for call in traffic.calls()})
    found = {"gradients": clone_gradients(model), "sent": traffic.totals(), "dtypes": dtypes}
    return found | {"gave": sorted(gave)}


def note_future_dtypes(hook: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
    """Return a communication hook that adds to ``seen`` the dtype of each tensor in a future."""

    # DDP reads the annotations of a hook.
    @functools.wraps(hook)
    def note(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        # DDP says what it thinks of anything else; a handle's future is no torch.futures.Future.
        if not hasattr(future, "then"):
            return future

        def look(done: Any) -> Any:
            value = done.value()
            seen.add(str(value.dtype) if isinstance(value, Tensor) else type(value).__name__)
            return value

        return future.then(look)

    return note


def run_small_ddp(answer: Callable[[nn.Module, int], Any]) -> dict[str, Any]:
    """Let the answer put hooks on a small model, and run two backward passes.

    ``seen`` lists the events of a pass in order: "gradient", "asked <bytes>" for an all-reduce, and
    "waited". ``sent`` holds calls and bytes by collective.
    """
    model, passes, events = make_linear_model(), [], list[str]()
    # Hooks run in the order of their registration: these note a gradient before the answer sees it.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    answer(model, LIMIT_BYTES)

    wait = dist.Work.wait

    def wait_and_note(*args: Any, **kwargs: Any) -> Any:
        events.append("waited")
        return wait(*args, **kwargs)

    def note_call(call: GroupCall) -> None:
        if call.name == "all_reduce":
            events.append(f"asked {call.bytes}")

    for step in range(2):
        model.zero_grad()
        loss = mean_squared_error(model, *step_batch(dist.get_rank(), step))
        time.sleep(DELAY_S if dist.get_rank() == 1 and step == 0 else 0)
        events.clear()
        with (
            GroupTraffic() as traffic,
            patch.object(dist.Work, "wait", wait_and_note),
            patch.object(counted_group, "listeners", [note_call]),
        ):
            loss.backward()
        noted = {"seen": [*events], "sent": traffic.totals()}
        passes.append({"gradients": clone_gradients(model)} | noted)
    return {"passes": passes}


def make_linear_model() -> nn.Sequential:
    """Return three linear layers, equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def micro_batches(ranks: int) -> int:
    """Return how many micro-batches a rank has: another number for each number of ranks."""
    return ranks + 1


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
