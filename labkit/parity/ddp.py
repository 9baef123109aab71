"""Do DDP, ``replicate`` and their compiled versions give one device's gradients and buckets?"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit import inductor
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parallel.ddp import DDPCase
from labkit.parity import comparison
from labkit.parity.one_device import OneDevice, draw_samples, make_sgd
from labkit.session.traffic import BucketRecorder, CommunicationCounter
from labkit.theory.ddp import chain_buckets

COMPARISON_MODES: tuple[ddp.DDPMode, ...] = ("ddp", "replicate", "compiled_ddp", "compiled")


def build_chain(
    dim: int, case: DDPCase, device: torch.device, batch: int, layers: int = 4
) -> LinearChain:
    """Build the model of both checks and of the training, equal on all ranks."""
    torch.manual_seed(0)
    return LinearChain(dim, case.checkpoint, batch, layers).to(device)


def compare_techniques(
    build: Callable[[], LinearChain],
    mesh: DeviceMesh,
    case: DDPCase,
    *,
    steps: int = 2,
    modes: Sequence[ddp.DDPMode] = COMPARISON_MODES,
    inductor: bool = True,
    **how: Any,
) -> dict[str, Any]:
    """Train a LinearChain with each technique and on one device, and compare. A collective.

    It compares every step's output and gradients, and every parameter after the last step; ``how``
    is passed on to ``ddp.apply_technique``. ``sent_without_sync`` of the verdict should be 0 bytes.
    """
    one_device = OneDevice(lambda _: build(), mesh.size(), batches=len(case.batches))
    # Techniques are compared with one device rather than with each other, since two that are wrong
    # in the same way would agree. It trains first: their contexts would compile its backward pass.
    found, rank = comparison.Parity(), mesh.get_local_rank()
    expected = one_device.record_steps(steps, rank, found, "gradient")
    reference = one_device.copies[rank]
    sent_bytes, backwards, without_sync, as_asked = {}, {}, 0, True
    for mode in modes:
        lab, before = build(), ddp.count_traced_backwards()
        technique = ddp.apply_technique(lab, mesh, mode, case, inductor=inductor, **how)
        with technique as (model, programs):
            results, sent = _train(lab, model, case, rank, steps)
        # A learner may call another of their functions theirs: name the one that use= replaces.
        label = "data_parallel" if mode == "yours" else mode
        found.compare_steps(label, results, expected)
        after = (comparison.tensors_by_name(each, "parameter") for each in (lab, reference))
        found.compare_named(f"{label}, parameter", *after)
        traced = ddp.count_traced_backwards() - before
        sending = sum("_c10d_functional" in program for program in programs)
        backwards[mode] = sending if inductor else traced
        # Were the passes compiled as asked? Inductor writes a program for each, and only those of
        # backward passes send; without it there are traces alone.
        compiled = mode.startswith("compiled")
        as_asked &= (traced > 0) == compiled
        written = sending > 0, len(programs) > sending
        as_asked &= written == (compiled and inductor, compiled and inductor and case.forward)
        sent_bytes[mode] = sent.total()
        without_sync += sent[False]
    a_mode = steps * (1 + comparison.count_tensors(reference, "gradient"))
    a_mode += comparison.count_tensors(reference, "parameter")
    verdict = found.verdict(comparison.LIMITS[case.dtype], len(modes) * a_mode)
    return verdict | {
        "dtype": str(case.dtype).removeprefix("torch."),
        "sent_bytes": sent_bytes,
        "sent_without_sync": without_sync,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and as_asked and not without_sync,
    }


def _train(
    lab: LinearChain, model: nn.Module, case: DDPCase, rank: int, steps: int
) -> tuple[Sequence[comparison.NamedTensors], Counter[bool]]:
    """Return what each step left, and the bytes sent in batches with and without a sync."""
    optimizer, sent, results = make_sgd(lab), Counter[bool](), []
    for step in range(steps):
        optimizer.zero_grad()
        for batch, synced in enumerate(case.batches):
            with CommunicationCounter() as counter, ddp.gradient_sync(model, synced):
                output = _run_backward(lab, model, step, rank, batch, len(case.batches))
            sent[synced] += counter.bytes["all_reduce"]
        results.append({"output": output, **comparison.clone_tensors(lab, "gradient")})
        optimizer.step()
    return results, sent


def _run_backward(lab: LinearChain, model: nn.Module, step: int, rank: int, *batch: int) -> Tensor:
    """Run one of a rank's batches forward and backward, and return the output."""
    inputs = draw_samples(lab, lab.fc1.weight.device, step, rank, *batch)
    output: Tensor = model(*inputs)
    lab.get_loss(inputs, output).backward()
    return output.detach()


def compare_buckets(
    build: Callable[[], LinearChain],
    mesh: DeviceMesh,
    case: DDPCase,
    *,
    bucket_mb: float,
    fuse: ddp.FuseMode = "coalesced",
    **how: Any,
) -> dict[str, Any]:
    """Compile a backward pass without gradients and one that adds to them; compare their buckets.

    A collective. The buckets are predicted by theory, counted by inductor, parsed from the program
    that it writes, and recorded when they are sent. Lists in the verdict have a value per pass.
    """
    lab = build()
    layers = len(list(lab.children()))
    way: Literal["compiled", "backward_only"] = "compiled" if case.forward else "backward_only"
    expected = chain_buckets(lab.dim, bucket_mb, way=way, layers=layers)
    predicted_bytes = [sum(bucket.values()) for bucket in expected]
    counted, written, sent = [], [], []
    how |= {"bucket_mb": bucket_mb, "fuse": fuse}
    technique = ddp.apply_technique(lab, mesh, "compiled", case, **how)
    with technique as (model, programs):
        for step in range(2):
            with BucketRecorder() as wire:
                _run_backward(lab, model, step, mesh.get_local_rank())
            counted.append(ddp.pop_bucket_count())
            written.append(programs[-1])
            sent.append(wire.gradients_by_bucket(lab.named_parameters()))
    listed = [inductor.find_buckets(program) for program in written]
    orders = list(map(request_wait_order, listed))
    result: dict[str, Any] = {
        "predicted": len(expected),
        "predicted_bytes": predicted_bytes,
        "counted": counted,
        "listed_bytes": [[bucket.bytes for bucket in buckets] for buckets in listed],
        "handed_bytes": [[sum(bucket.values()) for bucket in buckets] for buckets in sent],
        # Every tensor that is sent has a wait: with concat, one for a bucket.
        "waits": [[len(bucket.waits) for bucket in buckets] for buckets in listed],
        "programs": len(set(written)),
        "orders": orders,
        "most_in_flight": list(map(_max_in_flight, orders)),
        "waits_missing": sum(len(inductor.missing_waits(program)) for program in written),
    }
    # Gradients have an order in their bucket, which dicts do not compare.
    in_order = [[list(bucket.items()) for bucket in buckets] for buckets in [*sent, expected]]
    requests = [f"request {index}" for index in range(len(expected))]
    waits = [f"wait {index}" for index in range(len(expected))]
    tensors = [1 if fuse == "concat" else len(bucket) for bucket in expected]
    ok = (
        counted == [len(expected)] * 2
        and result["listed_bytes"] == result["handed_bytes"] == [predicted_bytes] * 2
        and in_order == [in_order[-1]] * 3
        and result["waits"] == [tensors] * 2
        and (result["programs"], result["waits_missing"]) == (2, 0)
        and all([event for event in order if event in requests] == requests for order in orders)
        and list(dict.fromkeys(event for event in orders[0] if event in waits)) == waits
        and (result["most_in_flight"][0] == len(expected) or not how.get("late_waits", True))
    )
    return {"check": "buckets", "compared": len(expected), **result, "ok": ok}


def request_wait_order(buckets: Sequence[inductor.Bucket]) -> list[str]:
    """Return the requests and waits of a program in its order, as "request 0" and "wait 0"."""
    events = []
    for index, bucket in enumerate(buckets):
        events.append((bucket.request.number, f"request {index}"))
        events += [(wait.number, f"wait {index}") for wait in bucket.waits]
    return [event for event, _ in itertools.groupby(text for _, text in sorted(events))]


def _max_in_flight(order: Sequence[str]) -> int:
    """Return how many buckets are requested and not yet waited for, at most, in a program."""
    # It is all of them if no result is needed before the end. A program that adds to existing
    # gradients may wait for some buckets earlier, because it adds each one as it arrives.
    first = dict.fromkeys(order)
    return max(itertools.accumulate(1 if event.startswith("request") else -1 for event in first))
