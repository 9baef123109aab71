"""Do DDP, ``replicate`` and their compiled versions give one device's gradients, in the buckets
that theory predicts?

One device goes through every rank's samples in turn and averages. Techniques are compared with it
rather than with each other, since two that are wrong in the same way would agree.
"""

import copy
import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit import inductor
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parallel.ddp import DDPCase
from labkit.parity.one_device import OneDevice, draw_samples, make_sgd
from labkit.parity.training import LIMITS, Parity, TensorList, count_tensors, tensors_by_name
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
    mesh: DeviceMesh,
    device: torch.device,
    case: DDPCase,
    *,
    dim: int,
    batch: int = 1,
    layers: int = 4,
    steps: int = 2,
    modes: Sequence[ddp.DDPMode] = COMPARISON_MODES,
    **how: Any,
) -> dict[str, Any]:
    """Train a LinearChain with each technique and on one device, and compare. A collective.

    It compares every step's output and gradients, and every parameter after the last step. Each
    rank has samples of its own, ``batch`` in a batch; the chain has ``layers`` layers of width
    ``dim``; ``how`` is passed on to ``ddp.apply_technique``.

    Returns:
        The arguments of ``Session.finish_check``.
        ``sent_bytes``: bytes that a rank passes to all-reduces in all steps, by technique.
        ``sent_without_sync``: the part of these in batches that should send nothing.
        ``compiled_backwards``: the number of programs with communication that inductor wrote or,
            without inductor, of backward passes that compiled autograd traced. It shows that the
            runs were really compiled.
    """
    build = partial(build_chain, dim, case, device, batch, layers)
    one_device = OneDevice(
        lambda rank: build(), mesh.size(), device=device, batches=len(case.batches)
    )
    reference, found, expected = one_device.copies[0], Parity(), []
    for step in range(steps):
        one_device.train_step(step)
        found.count_gradients(reference)
        output = one_device.outputs[mesh.get_local_rank()].detach()
        expected.append((output, copy.deepcopy(tensors_by_name(reference, "gradient"))))
    sent_bytes, backwards, without_sync = {}, {}, 0
    with_inductor = how.get("inductor", True)
    for mode in modes:
        lab, before = build(), ddp.count_traced_backwards()
        with ddp.apply_technique(lab, mesh, mode, case, **how) as (model, programs):
            sent = _train_and_compare(
                found, mode, lab, model, case, mesh.get_local_rank(), expected
            )
        found.compare_named(
            f"{mode}, parameter",
            tensors_by_name(lab, "parameter"),
            tensors_by_name(reference, "parameter"),
        )
        sent_bytes[mode] = sent.total()
        traced = ddp.count_traced_backwards() - before
        backwards[mode] = (
            sum("_c10d_functional" in program for program in programs) if with_inductor else traced
        )
        without_sync += sent[False]
    each = steps * (1 + count_tensors(reference, "gradient")) + count_tensors(
        reference, "parameter"
    )
    verdict = found.verdict(LIMITS[case.dtype], len(modes) * each)
    compiled = all((backwards[mode] > 0) == mode.startswith("compiled") for mode in modes)
    return verdict | {
        "dtype": str(case.dtype).removeprefix("torch."),
        "sent_bytes": sent_bytes,
        "sent_without_sync": without_sync,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and compiled and not without_sync,
    }


def _train_and_compare(
    found: Parity,
    mode: str,
    lab: LinearChain,
    model: nn.Module,
    case: DDPCase,
    rank: int,
    expected: list[tuple[Tensor, TensorList]],
) -> Counter[bool]:
    """Train with one technique, compare each step's last output and gradients, and return the bytes
    sent, by whether the batch was synchronised.
    """
    optimizer, sent, batches = make_sgd(lab), Counter[bool](), len(case.batches)
    for step, (expected_output, gradients) in enumerate(expected):
        optimizer.zero_grad()
        for batch, synced in enumerate(case.batches):
            with CommunicationCounter() as counter, ddp.gradient_sync(model, synced):
                output, loss = _output_and_loss(lab, model, step, rank, batch, batches)
                loss.backward()
            sent[synced] += counter.bytes["all_reduce"]
        found.compare_tensor(f"{mode}, step {step}, output", output.detach(), expected_output)
        found.compare_named(
            f"{mode}, step {step}, gradient", tensors_by_name(lab, "gradient"), gradients
        )
        optimizer.step()
    return sent


def _output_and_loss(
    lab: LinearChain, model: nn.Module, step: int, rank: int, *batch: int
) -> tuple[Tensor, Tensor]:
    """Return the output and the loss of one of a rank's batches."""
    inputs = draw_samples(lab, lab.fc1.weight.device, step, rank, *batch)
    output = model(*inputs)
    return output, lab.get_loss(inputs, output)


def compare_buckets(
    mesh: DeviceMesh,
    device: torch.device,
    case: DDPCase,
    *,
    dim: int,
    batch: int = 1,
    layers: int = 4,
    bucket_mb: float,
    **how: Any,
) -> dict[str, Any]:
    """Compile a backward pass twice, without gradients and adding to existing ones, and compare its
    buckets. A collective.

    The buckets are predicted by theory, counted by inductor, parsed from the program that it
    writes, and recorded when they are sent, with the names of their gradients. Fusing needs
    gradients in float32. The arguments are those of ``compare_techniques``.

    Returns:
        The arguments of ``Session.finish_check``; lists hold one value for each of the two backward
        passes.
    """
    expected = chain_buckets(
        dim, bucket_mb, way="compiled" if case.forward else "backward_only", layers=layers
    )
    predicted_bytes = [sum(bucket.values()) for bucket in expected]
    assert predicted_bytes, "a chain has gradients, and they are in some bucket"
    lab, rounds = build_chain(dim, case, device, batch, layers), []
    with ddp.apply_technique(lab, mesh, "compiled", case, bucket_mb=bucket_mb, **how) as (
        model,
        programs,
    ):
        for step in range(2):
            with BucketRecorder() as wire:
                _output_and_loss(lab, model, step, mesh.get_local_rank())[1].backward()
            rounds.append(
                (
                    ddp.pop_bucket_count(),
                    programs[-1],
                    wire.gradients_by_bucket(lab.named_parameters()),
                )
            )
    counts, written, sent = zip(*rounds, strict=True)
    listed = [inductor.find_buckets(program) for program in written]
    result: dict[str, Any] = {
        "predicted": len(expected),
        "predicted_bytes": predicted_bytes,
        "counted": list(counts),
        "listed_bytes": [[bucket.bytes for bucket in buckets] for buckets in listed],
        "handed_bytes": [[sum(bucket.values()) for bucket in buckets] for buckets in sent],
        "programs": len(set(written)),
        "orders": list(map(request_wait_order, listed)),
        "most_in_flight": list(map(_max_in_flight, listed)),
        "waits_missing": sum(len(inductor.missing_waits(program)) for program in written),
    }
    ok = (
        result["counted"] == [len(expected)] * 2
        and result["listed_bytes"] == result["handed_bytes"] == [predicted_bytes] * 2
        and all(
            list(map(OrderedDict, buckets)) == list(map(OrderedDict, expected)) for buckets in sent
        )
        and (result["programs"], result["waits_missing"]) == (2, 0)
        and all(_is_in_bucket_order(order, "request") for order in result["orders"])
        and _is_in_bucket_order(result["orders"][0], "wait")
        and (result["most_in_flight"][0] == len(expected) or not how.get("late_waits", True))
    )
    return {"check": "buckets", "compared": len(expected), **result, "ok": ok}


def request_wait_order(buckets: Sequence[inductor.Bucket]) -> list[str]:
    """Return the requests and waits of a program in its order, as "request 0" and "wait 0".

    Each bucket appears once or more.
    """
    events = [(bucket.request.number, f"request {index}") for index, bucket in enumerate(buckets)]
    events += [
        (wait.number, f"wait {index}")
        for index, bucket in enumerate(buckets)
        for wait in bucket.waits
    ]
    return [event for event, _ in itertools.groupby(text for _, text in sorted(events))]


def _is_in_bucket_order(order: list[str], what: str) -> bool:
    """Tell whether the first requests, or waits, of all buckets follow the order of the buckets."""
    first = list(dict.fromkeys(int(event.split()[1]) for event in order if event.startswith(what)))
    return first == sorted(first)


def _max_in_flight(buckets: Sequence[inductor.Bucket]) -> int:
    """Return how many buckets are requested and not yet waited for, at most, in a program.

    It is all of them if no result is needed before the end. A program that adds to existing
    gradients may wait for some buckets earlier, because it adds each one as it arrives.
    """
    sent = [(bucket.request.number, 1) for bucket in buckets]
    arrived = [(min(wait.number for wait in bucket.waits), -1) for bucket in buckets]
    return max(itertools.accumulate(change for _, change in sorted(sent + arrived)))
