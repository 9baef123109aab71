"""On a rank: a small FSDP2 model that gathers with a learner's functions, held against one that gathers with labkit's.

Everything here is a collective. ``Wrong`` is raised on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit import tensors
from labkit.meter import CommunicationCounter
from labkit.models.protocol import seeded_normal
from labkit.tensors import Extension, TwoTensor
from labkit.theory import extensions as theory

Hook = Callable[..., Any]
Losses = list[list[Tensor]]  # of each step: one, or those of both halves
STEPS, BATCH = 3, 4
HOOK_WIDTHS = (64, 51, 80, 33)  # weights [51, 64], [80, 51], [33, 80]: two of them do not divide by 2
CODEC_WIDTHS = (128, 128, 129, 128)  # rows long enough to have a scale each and stay below 0.26 of float32


class Wrong(Exception):
    """The answer is wrong; the message is for the learner."""


def try_hook(mesh: DeviceMesh, what: str, hook: Hook) -> None:
    """Train with a learner's post-all-gather hook. Raises Wrong.

    Args:
        mesh: one axis.
        what: "two_tensor", in float32 and with casting to bfloat16, or "int8", for what labkit's int8 gather sends.
        hook: without ``self``.
    """
    put, wanted, dtypes = TRIALS[what]
    for dtype in dtypes:
        model, expected = put(mesh, dtype, observed(hook, wanted)), put(mesh, dtype)
        where = str(dtype).removeprefix("torch.")
        compare(train(model, STEPS), train(expected, STEPS), where)
        refuse_leak(model, where)


def try_codec(
    mesh: DeviceMesh, encode: Hook, decode: Hook, *, most_bytes: float, most_error: float
) -> tuple[float, float]:
    """Train with a learner's gather: of weights that differ much in size, and with a row of zeros. Raises Wrong.

    Args:
        mesh: one axis.
        encode: as for ``tensors.Extension``.
        decode: likewise.
        most_bytes: what may be sent, as a part of float32's bytes.
        most_error: of a gathered weight, over the largest of its parameter.

    Returns:
        The measured part of float32's bytes, and the measured error.
    """
    model = build(CODEC_WIDTHS)
    first, second, third = model.parameters()
    with torch.no_grad():
        first[0] = 0
        second.mul_(1e-4)
        third[: len(third) // 2].mul_(3)
        sent = encode(first.clone())
    if not isinstance(sent, tuple) or not all(isinstance(tensor, Tensor) for tensor in sent):
        raise Wrong(f"{encode.__name__} gave {type(sent).__name__}, not a tuple of tensors")
    shard(model, mesh, torch.float32)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    tensors.extend_all(model, Extension(("tensor",) * len(sent), encode, decode))
    error = tensors.gathered_error(model)  # before training makes the tiny weights larger
    with CommunicationCounter() as counter:
        losses = train(model, steps=1)
    if not losses[0][0].isfinite():
        raise Wrong("the loss is not a finite number: is something divided by the largest of a row of zeros?")
    if error > most_error:
        raise Wrong(f"a gathered weight is off by {error:.2g} of its parameter's largest; {most_error:.2g} is allowed")
    ratio = counter.bytes["all_gather"] / theory.step_bytes(shapes, mesh.size(), "fp32")
    if ratio > most_bytes:
        raise Wrong(f"it sends {ratio:.3f} of the bytes of float32; {most_bytes:g} is allowed")
    return ratio, error


def build(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers without bias, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))


def shard(model: nn.Sequential, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    """Make each layer a unit that computes in a dtype."""
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return model


def with_two_tensors(mesh: DeviceMesh, dtype: torch.dtype, hook: Hook | None = None) -> nn.Sequential:
    """A sharded model of TwoTensors whose second half is twice the first, with a hook of its own or labkit's."""
    kind = type("Answered", (TwoTensor,), {"fsdp_post_all_gather": staticmethod(hook)}) if hook else TwoTensor
    model = build(HOOK_WIDTHS)
    for module in model:
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(kind(module.weight, 2 * module.weight.detach()))
    return shard(model, mesh, dtype)


def with_int8(mesh: DeviceMesh, dtype: torch.dtype, hook: Hook | None = None) -> nn.Sequential:
    """A sharded model that sends int8 and a scale for each row, and decodes with a hook or as labkit does."""
    model = shard(build(HOOK_WIDTHS), mesh, dtype)
    tensors.extend_all(model, "int8")
    for parameter in model.parameters() if hook else ():
        parameter._local_tensor.fsdp_post_all_gather = hook  # type: ignore[attr-defined]  # see tensors.extend
    return model


TRIALS: dict[str, tuple[Callable[..., nn.Sequential], type[Tensor], tuple[torch.dtype, ...]]] = {
    "two_tensor": (with_two_tensors, TwoTensor, (torch.float32, torch.bfloat16)),
    "int8": (with_int8, torch.Tensor, (torch.float32,)),
}
"""For each kind of hook, who builds the model, what the hook must return, and the dtypes to compute in."""


def observed(hook: Hook, kind: type[Tensor]) -> Hook:
    """A post-all-gather hook whose answers are looked at; raises Wrong for one that FSDP2 could not use."""

    def post_all_gather(gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            poison(out, gathered)
            return hook(gathered, metadata, dtype, out=out)
        answer = hook(gathered, metadata, dtype)
        check_first(answer, gathered, dtype, kind)
        return answer

    return post_all_gather


def check_first(answer: Any, gathered: Sequence[Tensor], dtype: torch.dtype, kind: type[Tensor]) -> None:
    """Raise Wrong unless this is what a hook must return on the first call."""
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], kind):
        parts = [type(each).__name__ for each in answer] if isinstance(answer, tuple) else [type(answer).__name__]
        seen = f"on the first call the hook gave {', '.join(parts)}"
        raise Wrong(f"{seen}, not two things, a {kind.__name__} and a tuple of the tensors to free")
    whole, to_free = answer
    if not isinstance(to_free, tuple | list) or not all(isinstance(each, Tensor) for each in to_free):
        raise Wrong("on the first call the second part of the answer must be a tuple of the tensors to free")
    if whole.shape != gathered[0].shape or whole.dtype != dtype:
        raise Wrong(
            f"the parameter is {tuple(whole.shape)} in {whole.dtype}, not {tuple(gathered[0].shape)} in {dtype}: "
            "all that was gathered, padding included"
        )
    if all(each.dtype == dtype for each in gathered) and not storages([whole]) <= storages(gathered):
        raise Wrong("what was gathered has the right dtype already, and a copy of it needs the memory twice")


def poison(out: Tensor, gathered: Sequence[Tensor]) -> None:
    """Fill memory that FSDP2 has just allocated again with NaN; what happens to lie there may be the old values."""
    if storages([out]) & storages(gathered):
        return
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
        for plain in tensors.plain_tensors(out):
            plain.fill_(torch.nan)


def storages(given: Sequence[Tensor]) -> set[int]:
    """Where the memory of these tensors lies."""
    return {plain.untyped_storage().data_ptr() for each in given for plain in tensors.plain_tensors(each)}


def train(model: nn.Sequential, steps: int) -> Losses:
    """A few steps on samples that all ranks share; the losses, both where there are two."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    width, losses = next(model.parameters()).shape[1], []
    for step in range(steps):
        optimizer.zero_grad()
        x = seeded_normal(BATCH, width, device=torch.device("cpu"), seed=step)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(tensors.plain_tensors(loss.detach()))
    return losses


def compare(got: Losses, expected: Losses, where: str) -> None:
    """Raise Wrong, naming the step, where losses differ by more than rounding."""
    for step, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for half, (a, b) in enumerate(zip(mine, right, strict=True)):
            if not torch.allclose(a, b, rtol=1e-5):
                which = f"half {'ab'[half]} of the loss" if len(right) == 2 else "the loss"
                call = "the first call already gives another parameter" if step == 0 else "what `out` holds is wrong"
                seen = "is NaN" if a.isnan() else "is wrong"
                raise Wrong(f"in {where}, {which} {seen} in step {step}: {call}")


def refuse_leak(model: nn.Module, where: str) -> None:
    """Raise Wrong where full parameters stay in memory, with what is left after each unit."""
    left = tensors.unfreed_bytes(model)
    if left:
        growth = ", ".join(f"{size:,}" for size in accumulate(left.values()))
        raise Wrong(
            f"in {where}, memory grows with every unit: {growth} bytes are left after reshard, 0 should be. "
            "Which memory did the hook make, and who was told to free it?"
        )
