"""Do DDP, ``replicate`` and their compiled versions give one device's gradients, in the buckets that theory predicts?

One device goes through every rank's samples in turn and averages. Techniques are compared with it rather than with each
other, since two that are wrong in the same way would agree.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit import generated
from labkit.meter import CommunicationCounter
from labkit.models.chain import LinearChain
from labkit.parallel import ddp
from labkit.parallel.ddp import Case
from labkit.parity.one_device import optimizer_of
from labkit.parity.training import Parity
from labkit.theory.ddp import chain_buckets
from labkit.wire import Wire

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest relative error by the type that travels: bfloat16 rounds to 1 part in 256, float16 to 1 in 2048."""
MODES: tuple[ddp.Mode, ...] = ("ddp", "replicate", "compiled_ddp", "compiled")


def chain(dim: int, case: Case, device: torch.device) -> LinearChain:
    """The model of both checks, equal on all ranks."""
    torch.manual_seed(0)
    return LinearChain(dim, case.checkpoint).to(device)


def of_case(
    mesh: DeviceMesh,
    device: torch.device,
    case: Case,
    *,
    dim: int,
    steps: int = 2,
    **how: Any,
) -> dict[str, Any]:
    """Train a LinearChain with each technique and on one device, and compare. A collective.

    Compared are every gradient of every step and every parameter after the last. Each rank has samples of its own.

    Args:
        mesh: one axis.
        device: of this rank.
        case: what is trained, and how.
        dim: width of the chain.
        steps: with SGD and momentum.
        **how: passed on to ``ddp.applied``.

    Returns:
        What ``Here.verdict`` takes. ``sent_bytes``: what a rank hands to all-reduces in all steps, by technique.
        ``sent_without_sync``: the part of it in batches that should send nothing. ``compiled_backwards``: how many
        programs with communication inductor wrote, or without it, how many backward passes compiled autograd traced,
        so that nobody compares eager runs with each other.
    """
    gradients, parameters = one_device(case, dim, device, mesh.size(), steps)
    alive = all(bool(gradient.abs().max() > 0) for step in gradients for gradient in step.values())
    found, sent_bytes, backwards, without_sync = Parity(), {}, {}, 0
    inductor = how.get("inductor", True)
    for mode in MODES:
        lab, before = chain(dim, case, device), ddp.backwards_traced()
        with ddp.applied(lab, mesh, mode, case, **how) as (model, programs):
            sent = _train(found, mode, lab, model, case, mesh.get_local_rank(), gradients)
        found.add_all(f"{mode}, parameter", lab.named_parameters(), parameters.items())
        sent_bytes[mode] = sent.total()
        traced = ddp.backwards_traced() - before
        backwards[mode] = sum("_c10d_functional" in program for program in programs) if inductor else traced
        without_sync += sent[False]
    limit = LIMITS[case.dtype]
    verdict = found.verdict(limit)
    compiled = all((backwards[mode] > 0) == mode.startswith("compiled") for mode in MODES)
    return verdict | {
        "dtype": str(case.dtype).removeprefix("torch."),
        "limit": limit,
        "gradients_alive": alive,
        "sent_bytes": sent_bytes,
        "sent_without_sync": without_sync,
        "compiled_backwards": backwards,
        "ok": verdict["ok"] and alive and compiled and not without_sync,
    }


def one_device(
    case: Case, dim: int, device: torch.device, ranks: int, steps: int
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Averaged gradients of every step, and the parameters after the last, without any communication."""
    lab = chain(dim, case, device)
    optimizer, gradients = optimizer_of(lab), []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in range(len(case.batches)):
            for rank in range(ranks):
                (_loss(lab, lab, step, batch, rank) / ranks).backward()
        gradients.append({name: p.grad.clone() for name, p in lab.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, {name: parameter.detach() for name, parameter in lab.named_parameters()}


def _train(
    found: Parity,
    mode: str,
    lab: LinearChain,
    model: nn.Module,
    case: Case,
    rank: int,
    gradients: list[dict[str, Tensor]],
) -> Counter[bool]:
    """Train with one technique and compare each step's gradients; bytes sent in batches with and without sync."""
    optimizer, sent = optimizer_of(lab), Counter[bool]()
    for step, expected in enumerate(gradients):
        optimizer.zero_grad()
        for batch, synced in enumerate(case.batches):
            with CommunicationCounter() as counter, ddp.gradient_sync(model, synced):
                _loss(lab, model, step, batch, rank).backward()
            sent[synced] += counter.bytes["all_reduce"]
        actual = [(name, parameter.grad) for name, parameter in lab.named_parameters()]
        found.add_all(f"{mode}, step {step}, gradient", actual, expected.items())
        optimizer.step()
    return sent


def _loss(lab: LinearChain, model: nn.Module, step: int, batch: int, rank: int) -> Tensor:
    inputs = lab.get_input(lab.fc1.weight.device, seed=10_000 * step + 1000 * batch + rank)
    return lab.get_loss(inputs, model(*inputs))


def of_buckets(
    mesh: DeviceMesh, device: torch.device, case: Case, *, dim: int, bucket_mb: float, **how: Any
) -> dict[str, Any]:
    """Compile a backward pass twice, without gradients and on top of them, and look for its buckets. A collective.

    They are predicted, counted by inductor, read from the program that it writes, and seen on the wire, with names.

    Args:
        mesh: one axis.
        device: of this rank.
        case: forward pass compiled or not; checkpointed or not. Fusing needs gradients in float32.
        dim: width of the chain.
        bucket_mb: size of a bucket in MiB.
        **how: passed on to ``ddp.applied``.

    Returns:
        What ``Here.verdict`` takes; lists hold a value for each of the two backward passes.
    """
    expected = chain_buckets(dim, bucket_mb, way="compiled" if case.forward else "backward_only")
    predicted_bytes = [sum(bucket.values()) for bucket in expected]
    lab, rounds = chain(dim, case, device), []
    with ddp.applied(lab, mesh, "compiled", case, bucket_mb=bucket_mb, **how) as (model, programs):
        for step in range(2):
            with Wire() as wire:
                _loss(lab, model, step, 0, mesh.get_local_rank()).backward()
            rounds.append((ddp.buckets_counted(), programs[-1], wire.buckets(lab.named_parameters())))
    listed = [generated.buckets(program) for _, program, _ in rounds]
    result: dict[str, Any] = {
        "predicted": len(expected),
        "predicted_bytes": predicted_bytes,
        "counted": [counted for counted, _, _ in rounds],
        "listed_bytes": [[bucket.bytes for bucket in buckets] for buckets in listed],
        "wire_bytes": [[sum(bucket.values()) for bucket in buckets] for _, _, buckets in rounds],
        "programs": len({program for _, program, _ in rounds}),
        "waits_last": list(map(_waits_last, listed)),
        "waits_missing": sum(len(generated.missing_waits(program)) for _, program, _ in rounds),
    }
    ok = (
        result["counted"] == [len(expected)] * 2
        and result["listed_bytes"] == result["wire_bytes"] == [predicted_bytes] * 2
        and [_in_order(buckets) for _, _, buckets in rounds] == [_in_order(expected)] * 2
        and (result["programs"], result["waits_missing"]) == (2, 0)
        and (result["waits_last"][0] or not how.get("late_waits", True))
    )
    return {"check": "buckets", **result, "ok": ok}


def _waits_last(buckets: list[generated.Bucket]) -> bool:
    """Whether a program asks for all buckets before it waits for any."""
    waits = [wait.number for bucket in buckets for wait in bucket.waits]
    return max(bucket.request.number for bucket in buckets) < min(waits)


def _in_order(buckets: list[dict[str, int]]) -> list[list[tuple[str, int]]]:
    return [list(bucket.items()) for bucket in buckets]
