"""Do parameters with all-gather extensions train like plain ones, and send what theory predicts?

All comparisons are collectives, and return the arguments of ``Session.finish_check``.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit import tensors
from labkit.models.mlp import MLP
from labkit.models.protocol import random_normal, upcast_to_float32
from labkit.parallel.extensions import ExtensionChoice, add_extension_hooks, apply_extension
from labkit.parity.comparison import LIMITS, Parity, count_tensors, local_shard
from labkit.parity.one_device import sample_seed
from labkit.session.traffic import CommunicationCounter
from labkit.theory import extensions as theory

DIM, BATCH = 8, 2
make_foreach_adam = partial(torch.optim.Adam, lr=1e-2, foreach=True)


def three_mlps(device: torch.device | str) -> nn.Sequential:
    """Build the model of the first two checks, each MLP a unit, as in torch's own test of them."""
    return nn.Sequential(*(MLP(DIM, device, bias=False) for _ in range(3)))


def compare_extension_training(
    mesh: DeviceMesh, device: torch.device, extension: ExtensionChoice, steps: int
) -> dict[str, Any]:
    """Compare every loss, gradient and shard with plain training, summed by hand.

    It trains with Adam, lr 1e-2, with and without resharding. Every difference must be exactly 0,
    and no gradient may be all zeros.
    """
    found, halves, gathers = Parity(), 1, Counter[bool]()
    for reshard in (True, False):
        torch.manual_seed(0)
        reference = three_mlps(device)
        whole = copy.deepcopy(reference)
        model = apply_extension(whole, mesh, extension, reshard_after_forward=reshard)
        halves = len(tensors.plain_shards(next(model.parameters())))
        optimizers = [make_foreach_adam(each.parameters()) for each in (model, reference)]
        for step in range(steps):
            x, where = _local_samples(mesh, device, step), f"of step {step}, reshard {reshard}"
            # Gradients are set to zero, from the third step on, and removed, in turn.
            to_none = bool(step % 2)
            with CommunicationCounter() as counter:
                loss = _forward_backward(model, optimizers[0], x, to_none)
            gathers[reshard] += counter.counts["all_gather"]
            expected_loss = _forward_backward(reference, optimizers[1], x, to_none)
            # OneDevice would add the ranks' gradients in another order than an all-reduce.
            for parameter in reference.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=mesh.get_group())
                parameter.grad /= mesh.size()
            found.count_gradients(reference)
            for optimizer in optimizers:
                optimizer.step()
            for plain in tensors.plain_tensors(loss):
                found.compare_tensor(f"loss {where}", plain, expected_loss)
            pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
            for (name, mine), expected in pairs:
                _compare_shard(found, f"parameter {name}, {where}", mine, expected.detach())
                _compare_shard(found, f"gradient {name}, {where}", mine.grad, expected.grad)
    a_step = halves * (1 + count_tensors(reference, "parameter"))
    a_step += count_tensors(reference, "gradient")
    # gloo adds for both in the same order, and so do two ranks. NCCL chooses an algorithm for each.
    exact = dist.get_backend(mesh.get_group()) == "gloo" or mesh.size() <= 2
    limit = 0.0 if exact else LIMITS[torch.float32]
    verdict = found.verdict(limit=limit, expected=2 * steps * a_step)
    # A unit that frees its parameters after the forward pass gathers them again in the backward.
    both_ways = mesh.size() == 1 or gathers[True] == 2 * gathers[False] > 0
    return verdict | {
        "reference": "plain training",
        "all_gathers": {"with reshard": gathers[True], "without": gathers[False]},
        "ok": verdict["ok"] and both_ways,
    }


def _compare_shard(found: Parity, what: str, shard: Tensor | None, whole: Tensor | None) -> None:
    """Compare this rank's shard, or both halves of a TwoTensor, with its part of a whole tensor."""
    assert isinstance(shard, DTensor) and whole is not None
    part = local_shard(whole, shard)
    for index, plain in enumerate(tensors.plain_shards(shard)):
        found.compare_tensor(f"half {index} of {what}", plain, part)


def train_from_meta_device(
    mesh: DeviceMesh, device: torch.device, extension: ExtensionChoice, steps: int
) -> dict[str, Any]:
    """Build on the meta device, shard, materialise, initialise, and train in bfloat16.

    It is done with and without resharding, and the counts of parameters are sums.
    """
    counts, ok = Counter[str](), True
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for reshard in (True, False):
        how: Any = {"mp_policy": policy, "reshard_after_forward": reshard}
        model = apply_extension(three_mlps("meta"), mesh, extension, **how)
        on_meta = sum(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device=device)
        parameters = list(model.parameters())
        for parameter in parameters:
            # Fresh memory often holds zeros, which would hide what an extension forgot.
            nn.init.constant_(parameter, math.nan)
        poisoned = sum(map(_has_nan, parameters))
        torch.manual_seed(0)
        for parameter in parameters:
            _initialise_shard(parameter)
        shards = [tensors.plain_shards(parameter) for parameter in parameters]
        # The halves of a TwoTensor must be equal at the start.
        ok &= all(half.equal(halves[0]) for halves in shards for half in halves)
        start = [halves[0].clone() for halves in shards]
        add_extension_hooks(model, extension)
        optimizer, x = make_foreach_adam(parameters), _local_samples(mesh, device, 0).bfloat16()
        losses: list[float] = []
        for _ in range(steps):
            losses.append(float(_forward_backward(model, optimizer, x)))
            optimizer.step()
        nan_after = sum(map(_has_nan, parameters))
        pairs = zip(parameters, start, strict=True)
        trained = sum(not tensors.plain_shards(now)[0].equal(old) for now, old in pairs)
        count = len(parameters)
        ok &= count == on_meta == poisoned == trained and not nan_after and losses[-1] < losses[0]
        counts.update(compared=count, parameters=count, on_meta=on_meta, poisoned=poisoned)
        counts.update(nan_after=nan_after, trained=trained)
    ends = {"first_loss": losses[0], "last_loss": losses[-1]}
    return {"check": "meta", **counts, **ends, "ok": ok}


def _initialise_shard(parameter: Tensor) -> None:
    """Draw a shard's values, and make both halves of a TwoTensor equal."""
    with warnings.catch_warnings():
        # Ranks may draw different numbers on a CPU.
        warnings.filterwarnings("ignore", message="DTensor random operators")
        nn.init.trunc_normal_(parameter, std=0.2)
    first, *others = tensors.plain_shards(parameter)
    for other in others:
        other.copy_(first)


def _has_nan(parameter: Tensor) -> bool:
    return any(bool(plain.isnan().any()) for plain in tensors.plain_shards(parameter))


def _local_samples(mesh: DeviceMesh, device: torch.device, step: int) -> Tensor:
    return random_normal(BATCH, DIM, device=device, seed=sample_seed(step, mesh.get_local_rank()))


def _forward_backward(
    model: nn.Module, optimizer: Optimizer, x: Tensor, set_to_none: bool = True
) -> Tensor:
    """Run forward and backward, and return the loss, the mean squared distance to 1."""
    optimizer.zero_grad(set_to_none)
    # The loss of torch's test, a sum of ReLU outputs, is 0 from the third step on, and so are all
    # gradients.
    loss = (upcast_to_float32(model(x)) - 1).square().mean()
    loss.backward()
    return loss.detach()


def compare_bytes(
    mesh: DeviceMesh,
    build: Callable[[str], nn.Module],
    backward: Callable[[nn.Module], Any],
    reshard: bool,
) -> dict[str, Any]:
    """Compare the bytes of each extension's all-gathers in one step with theory.

    ``build`` makes the network with an extension; its root holds no parameters of its own.
    ``backward`` runs both passes; with ``reshard``, each of them gathers parameters.
    """
    measured, predicted = {}, {}
    for name in theory.EXTENSION_BYTES:
        model = build(name)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        predicted[name] = theory.step_gather_bytes(shapes, mesh.size(), name, reshard=reshard)
        with CommunicationCounter() as counter:
            backward(model)
        measured[name] = counter.bytes["all_gather"]
    ok = measured == predicted and all(measured.values())
    return {"check": "wire", "compared": len(measured), **measured, "theory": predicted, "ok": ok}


def compare_final_losses(
    mesh: DeviceMesh, train: Callable[[str], Sequence[Tensor]]
) -> dict[str, Any]:
    """Compare the final loss of each extension, averaged over ranks, with fp32's.

    ``train`` takes an extension, uses the same samples for each, and returns this rank's losses.
    """
    final = {}
    for name in theory.LOSS_LIMITS:
        total = torch.stack([*train(name)][-theory.FINAL_STEPS :]).mean()
        dist.all_reduce(total, group=mesh.get_group())
        final[name] = float(total) / mesh.size()
    limits = theory.LOSS_LIMITS.items()
    ok = all(abs(final[name] / final["fp32"] - 1) <= limit for name, limit in limits)
    return {"check": "loss", "compared": len(final), **final, "ok": ok}
