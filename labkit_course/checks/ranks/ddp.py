"""Run a learner's functions that average gradients, in buckets or in half precision."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.buckets import assign_buckets
from labkit.parallel.small_ddp import average_buckets
from labkit.session import counted_group
from labkit.session.counted_group import GroupCall, GroupTraffic
from labkit_course.checks.judge import WrongAnswer

WIDTHS = (6, 9, 7, 5)
ROWS = 3
# From the last layer on, the gradients have 20, 140, 28, 252, 36 and 216 bytes: three buckets.
LIMIT_BYTES = 170
# Rank 1 starts its backward pass this much later, so a rank that does not wait for the all-reduce
# reads gradients that are not summed yet.
DELAY_S = 0.05


def run_answer(answer: Callable[..., Any], what: str) -> dict[str, Any]:
    """Return results of ``run_send`` and ``run_row`` for "send" and "row".

    For "accumulate" and "half_hook" return ``gradients``; calls and bytes ``sent``, by collective,
    and their ``dtypes``; ``gave``, the dtypes of what a hook's futures hold; and its ``waits``.
    """
    if what == "send":
        return run_send(answer)
    if what == "row":
        return run_row(answer)
    model = DistributedDataParallel(make_linear_model())
    gave, waits, problems = set[str](), list[int](), list[str]()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if what == "half_hook":
        model.register_comm_hook(None, watch_hook(answer, gave, waits, problems))
    # DDP sends all-reduces from C++, which its group sees as well.
    with GroupTraffic() as traffic:
        if what == "half_hook":
            mean_squared_error(model, *step_batch(rank, 0)).backward()
        else:
            answer(model, [step_batch(*each) for each in micro_batches(rank, ranks)])
    if problems:
        raise WrongAnswer(problems[0])
    dtypes = sorted({call.dtype for call in traffic.calls()})
    found = {"gradients": clone_gradients(model), "sent": traffic.totals(), "dtypes": dtypes}
    return found | {"gave": sorted(gave), "waits": len(waits)}


def watch_hook(
    hook: Callable[..., Any], gave: set[str], waits: list[int], problems: list[str]
) -> Callable[..., Any]:
    """Return a communication hook that also notes the dtype of the tensor in each future.

    ``waits`` gets a number for each time that the hook waits before it returns. ``problems`` gets
    what DDP would say in many lines: a future of something else than a tensor. DDP then gets the
    bucket as it was.
    """

    # DDP reads the annotations of a hook.
    @functools.wraps(hook)
    def note(state: Any, bucket: Any) -> Any:
        with note_waits(lambda: waits.append(1)):
            future = hook(state, bucket)
        # DDP says what it thinks of anything else; a handle's future is no torch.futures.Future.
        if not hasattr(future, "then"):
            return future

        def look(done: Any) -> Any:
            try:
                value = done.value()
            except Exception as error:
                problems.append(f"the function in .then(…) raised {callback_error(error)}")
                return bucket.buffer()
            if isinstance(value, list):
                held = f"a list of {len(value)} tensor, as gloo left it, not a tensor"
                problems.append(
                    f"the future holds {held}: .then(lambda future: future.value()[0]…)"
                )
            elif not isinstance(value, Tensor):
                held = f"{type(value).__name__}, not a tensor"
                problems.append(f"the future holds {held}: return the gradients from .then(…)")
            else:
                gave.add(str(value.dtype))
                return value
            return bucket.buffer()

        return future.then(look)

    return note


def callback_error(error: Exception) -> str:
    """Return what a future's function raised, without PyTorch's frame of words around it."""
    text = str(error).rpartition("running the callback: ")[2]
    return text.partition("\n\nAt:")[0].strip()


def run_send(answer: Callable[..., Any]) -> dict[str, Any]:
    """Let the answer put hooks on a small model, and run two steps of it.

    ``seen`` lists the events of a backward pass in order: "gradient", "asked <bytes>" for an
    all-reduce, "finish <buckets>", and "waited". ``sent`` holds a step's calls and bytes by
    collective.
    """
    model, passes, events = make_linear_model(), [], list[str]()
    parameters = parameters_in_order(model)
    # Hooks run in the order of their registration: these note a gradient before the answer sees it.
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))

    def finish(in_flight: Any) -> None:
        refuse_other_forms(in_flight)
        events.append(f"finish {len(in_flight)}")
        average_buckets(in_flight)

    answer([[parameters[place] for place in bucket] for bucket in bucket_places()], finish)

    def note_call(call: GroupCall) -> None:
        if call.name == "all_reduce":
            events.append(f"asked {call.bytes}")

    for step in range(2):
        model.zero_grad()
        with GroupTraffic() as traffic:
            loss = mean_squared_error(model, *step_batch(dist.get_rank(), step))
            time.sleep(DELAY_S if dist.get_rank() == 1 and step == 0 else 0)
            events.clear()
            with (
                note_waits(lambda: events.append("waited")),
                patch.object(counted_group, "listeners", [note_call]),
            ):
                loss.backward()
        noted = {"seen": [*events], "sent": traffic.totals()}
        passes.append({"gradients": clone_gradients(model)} | noted)
    return {"passes": passes}


def run_row(answer: Callable[..., Any]) -> dict[str, Any]:
    """Let the answer fill rows like those of ``thrifty_ddp`` in lab 4, and run three steps.

    Before the second step the gradients are None, before the third they are 0. ``passes`` have the
    ``gradients``, whether they are pieces of the rows (``in_row``), what was ``sent``, and what the
    rows alone would have been (``asked``), by collective.
    """
    model, rows, passes = make_linear_model(), [], []
    parameters = parameters_in_order(model)
    for places in bucket_places():
        bucket = [parameters[place] for place in places]
        row = torch.zeros(sum(each.numel() for each in bucket))
        pieces = row.split([each.numel() for each in bucket])
        views = [piece.view_as(each) for each, piece in zip(bucket, pieces, strict=True)]
        rows.append((bucket, row, views))
        for parameter, view in zip(bucket, views, strict=True):
            parameter.grad = view
    for step in range(3):
        if step:
            model.zero_grad(set_to_none=step == 1)
        mean_squared_error(model, *step_batch(dist.get_rank(), step)).backward()
        with GroupTraffic() as traffic:
            for bucket, row, views in rows:
                answer([*bucket], [*views])
                dist.all_reduce(row)
                row /= dist.get_world_size()
        in_row = all(
            each.grad is not None and each.grad.data_ptr() == view.data_ptr()
            for bucket, _, views in rows
            for each, view in zip(bucket, views, strict=True)
        )
        asked = {"all_reduce": [len(rows), sum(row.nbytes for _, row, _ in rows)]}
        noted = {"in_row": in_row, "sent": traffic.totals(), "asked": asked}
        passes.append({"gradients": clone_gradients(model)} | noted)
    return {"passes": passes}


def refuse_other_forms(in_flight: Any) -> None:
    """Raise WrongAnswer unless this is a list of buckets on their way."""
    form = "a list of (bucket, row, handle)"
    if not isinstance(in_flight, list) or not all(
        isinstance(each, tuple | list) and len(each) == 3 for each in in_flight
    ):
        raise WrongAnswer(f"finish got {type(in_flight).__name__}, not {form}")
    for bucket, row, handle in in_flight:
        kinds = [type(each).__name__ for each in (bucket, row, handle)]
        if not isinstance(bucket, list) or not isinstance(row, Tensor):
            raise WrongAnswer(f"finish got a ({', '.join(kinds)}) in its list, not {form}")
        if not hasattr(handle, "wait"):
            said = f"finish got {kinds[2]} as the handle of a bucket"
            raise WrongAnswer(f"{said}: dist.all_reduce gives one with async_op=True")


@contextlib.contextmanager
def note_waits(note: Callable[[], Any]) -> Iterator[None]:
    """Call a function whenever somebody waits for a collective inside the block."""
    with contextlib.ExitStack() as patches:
        # A handle's future can be waited for as well.
        for kind in (dist.Work, torch.Future):

            def wait_and_note(*args: Any, wait: Any = kind.wait, **kwargs: Any) -> Any:
                note()
                return wait(*args, **kwargs)

            patches.enter_context(patch.object(kind, "wait", wait_and_note))
        yield


def parameters_in_order(model: nn.Module | None = None) -> list[nn.Parameter]:
    """Return the parameters of a model from the last to the first, as gradients become ready."""
    return list((model or make_linear_model()).parameters())[::-1]


def bucket_places() -> list[list[int]]:
    """Return the buckets as positions in ``parameters_in_order``."""
    return assign_buckets([each.nbytes for each in parameters_in_order()], LIMIT_BYTES)


def make_linear_model() -> nn.Sequential:
    """Return three linear layers, equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def micro_batches(rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """Return the rank, step and rows of a rank's micro-batches.

    They differ in size, in another order on each rank, but every rank has the same number of rows.
    Their number depends on the number of ranks.
    """
    count = ranks + 1
    return [(rank, step, 1 + (rank + step) % count) for step in range(count)]


def step_batch(rank: int, step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets of a step."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(rows, WIDTHS[0], generator=draw)
    return inputs, torch.randn(rows, WIDTHS[-1], generator=draw)


def mean_squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of a model."""
    return nn.functional.mse_loss(model(inputs), targets)


def clone_gradients(model: nn.Module) -> list[Tensor | None]:
    """Copy the gradients of all parameters."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
