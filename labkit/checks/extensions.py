"""Checks of lab 3, changing what FSDP gathers."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from labkit.checks.ask import Verdict, Wrong, check_values, exercise, passed, same
from labkit.checks.on_ranks import on_ranks
from labkit.checks.ranks.extensions import DTYPES, HOOK_WIDTHS, LEARNING_RATE, STEPS, build, codec_model, sample
from labkit.tensors import EXTENSIONS
from labkit.theory import extensions as theory

RANKS = 2
HINTS = {
    "modified by an inplace operation": "autograd has saved this parameter: fill it with refill",
    "cannot be 0 to view": "what is sent needs a first dimension: send one scale as scale.reshape(1)",
    "Invalid scalar type": "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its scale",
}
"""What to do about an error of torch, by a part of its message."""
WAITING = "does every rank send tensors of the same size?"
LAUNCH: dict[str, Any] = {"ranks": RANKS, "timeout_s": 60, "waiting": WAITING, "hints": HINTS}
LIMITS = {"bf16": (0.5, theory.rounding_error("bf16")), "8 bits": (0.26, theory.rounding_error("float8"))}
"""Of a gather: the part of float32's bytes that it may send, and the error that it may make."""


@exercise
def uneven_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise: bytes that one rank hands to one all-gather, from (rows, columns, ranks, bytes_per_number)."""

    def right(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:
        return theory.gather_bytes((rows, columns), ranks, {4: "fp32", 2: "bf16"}[bytes_per_number])

    own = "A rank sends its own rows, not the whole parameter: rows / ranks x columns."
    most = "Every rank sends as many rows as the rank with most of them: rows / ranks, rounded up."
    cases = [(8, 4, 2, 4), (8, 4, 4, 2), (5, 6, 2, 4), (10, 128, 4, 2), (2, 8, 4, 4)]
    return check_values(answer, right, cases, [own, own, most, most, most])


@exercise
def post_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise: the post-all-gather hook of TwoTensor, without ``self``, on 2 real ranks."""
    _judge_hook(answer, "two_tensor")
    return passed(f"trained on {RANKS} ranks, in float32 and cast to bfloat16: right losses, and all memory freed")


@exercise
def mended(answer: Callable[..., Any]) -> Verdict:
    """Exercise: a post-all-gather hook for int8 numbers and a scale for each row, which leaks nothing."""
    _judge_hook(answer, "int8")
    return passed(f"trained on {RANKS} ranks: right losses, and nothing is left after reshard")


@exercise
def bf16_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise: a gather with half the bytes of float32 and the error of bfloat16."""
    return _judge_codec(encode, decode, "bf16")


@exercise
def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise: a gather with at most 0.26 of the bytes of float32 and at most the error of float8."""
    return _judge_codec(encode, decode, "8 bits")


def _judge_hook(hook: Callable[..., Any], what: str) -> None:
    """Train with the hook on ranks, and on one device with what it should gather; raises Wrong where they differ."""
    right = {dtype: _losses(what, dtype) for dtype in DTYPES[what]}

    def judge(index: int, sent: dict[str, Any]) -> None:
        for dtype, expected in right.items():
            where = str(dtype).removeprefix("torch.")
            _refuse_losses(sent[where]["losses"], expected, dtype, where)
            if sent[where]["left"]:
                growth = ", ".join(f"{size:,}" for size in accumulate(sent[where]["left"].values()))
                raise Wrong(
                    f"in {where}, memory grows with every unit: {growth} bytes are left after reshard, 0 should be. "
                    "Which memory did the hook make, and who was told to free it?"
                )

    on_ranks("extensions", hook, judge=judge, what=what, **LAUNCH)


def _losses(what: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """One device's losses by half and step. Of two halves, both are updated with the first one's gradient."""
    models = [build(HOOK_WIDTHS) for _ in range(2 if what == "two_tensor" else 1)]
    with torch.no_grad():
        for parameter in models[-1].parameters():
            parameter.mul_(len(models))
    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in models]
    codec, losses = EXTENSIONS["int8" if what == "int8" else "fp32"], [[] for _ in models]  # type: ignore[var-annotated]
    for step in range(STEPS):
        gradients: dict[str, Any] = {}
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            own = dict(model.named_parameters())
            whole = {n: codec.decode(codec.encode(each.detach()), dtype).requires_grad_() for n, each in own.items()}
            output = functional_call(model, whole, sample(step, HOOK_WIDTHS[0]).to(dtype))
            loss = (output.float() - 1).square().mean()
            loss.backward()
            gradients = gradients or {name: each.grad for name, each in whole.items()}
            for name, each in own.items():
                each.grad = gradients[name].float()
            optimizer.step()
            seen.append(loss.detach())
    return losses


def _refuse_losses(got: list[list[Tensor]], expected: list[list[Tensor]], dtype: torch.dtype, where: str) -> None:
    """Raise Wrong, naming the step, where losses differ by more than rounding."""
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    for step, mine in enumerate(got):
        for half, (loss, right) in enumerate(zip(mine, [each[step] for each in expected], strict=True)):
            if not same(loss, right, rtol=rtol):
                which = f"half {'ab'[half]} of the loss" if len(expected) == 2 else "the loss"
                cause = "the first call already gives another parameter" if step == 0 else "what `out` holds is wrong"
                seen = "is NaN" if loss.isnan() else "is wrong"
                raise Wrong(f"in {where}, {which} {seen} in step {step}: {cause}")


def _judge_codec(encode: Callable[..., Any], decode: Callable[..., Any], limits: str) -> Verdict:
    """Hold the weights that ranks gathered against the exact ones, and the bytes against float32's."""
    most_bytes, most_error = LIMITS[limits]
    exact = {name.removesuffix(".weight"): each.detach() for name, each in codec_model().named_parameters()}
    in_float32 = theory.step_bytes([tuple(weight.shape) for weight in exact.values()], RANKS, "fp32")
    ratio = error = 0.0

    def judge(index: int, sent: dict[str, Any]) -> None:
        nonlocal ratio, error
        off = {name: (sent["weights"][name] - each).abs().max() / each.abs().max() for name, each in exact.items()}
        ratio, error = sent["sent"] / in_float32, float(torch.stack([*off.values()]).max())  # NaN where one is
        if not sent["loss"].isfinite():
            raise Wrong("the loss is not a finite number: is something divided by the largest of a row of zeros?")
        if not error <= most_error:
            said = f"a gathered weight is off by {error:.2g} of its parameter's largest"
            raise Wrong(f"{said}; {most_error:.2g} is allowed")
        if ratio > most_bytes:
            raise Wrong(f"it sends {ratio:.3f} of the bytes of float32; {most_bytes:g} is allowed")

    on_ranks("extensions", encode, decode, judge=judge, what="codec", **LAUNCH)
    return passed(f"{ratio:.3f} of the bytes of float32, and no weight is off by more than {error:.4f} of the largest")
