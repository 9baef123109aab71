"""Checks of lab 3, changing what FSDP gathers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    call_text,
    exercise,
    is_tensor_close,
    judge_values,
    passing_verdict,
    raise_if_not_attempted,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.extensions import (
    HOOK_DTYPES,
    HOOK_WIDTHS,
    LEARNING_RATE,
    STEPS,
    make_codec_model,
    make_linear_stack,
    sample_inputs,
)
from labkit.tensors import EXTENSIONS, TwoTensor
from labkit.theory import extensions as theory
from labkit.torch_private import foreach_mul

RANKS = 2
REFILL_HINT = "autograd has saved this parameter: fill it with refill"
ERROR_HINTS = {
    "modified by an inplace operation": REFILL_HINT,
    "Please clone()": REFILL_HINT,
    "cannot be 0 to view": (
        "what is sent needs a first dimension: send one scale as scale.reshape(1)"
    ),
    "Invalid scalar type": (
        "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its scale"
    ),
}
"""What to do about an error of torch, by a part of its message."""
WAIT_HINT = "does every rank send tensors of the same size?"
LAUNCH_OPTIONS: dict[str, Any] = {
    "ranks": RANKS,
    "timeout_s": 60,
    "waiting": WAIT_HINT,
    "hints": ERROR_HINTS,
}
GATHER_LIMITS = {
    "bf16": (0.5, theory.rounding_error("bf16")),
    "8 bits": (0.26, theory.rounding_error("float8")),
    "4 bits": (0.14, theory.rounding_error("int4")),
}
"""Of a gather: the part of float32's bytes that it may send, and the error that it may make."""
CODEC_WEIGHT_TEXT = {
    "0.weight": "the weights with a row of zeros",
    "1.weight": "the tiny weights",
    "2.weight": "the weights whose first half is 3 times larger",
}
"""What is special about each parameter of ``codec_model``."""


@exercise
def gather_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the bytes that one rank passes to one all-gather, from (rows, columns, ranks,
    bytes_per_number).
    """

    def right_bytes(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:
        return theory.gather_bytes((rows, columns), ranks, {4: "fp32", 2: "bf16"}[bytes_per_number])

    own = "A rank sends its own rows, not the whole parameter: rows / ranks x columns."
    most = "Every rank sends as many rows as the rank with most of them: rows / ranks, rounded up."
    cases = [(8, 4, 2, 4), (8, 4, 4, 2), (5, 6, 2, 4), (10, 128, 4, 2), (2, 8, 4, 4)]
    return judge_values(answer, right_bytes, cases, [own, own, most, most, most])


@exercise
def new_two(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: ``__new__`` of a tensor that holds two tensors, from (cls, a, b)."""
    kind = type("Two", (Tensor,), {"__torch_dispatch__": TwoTensor.__dict__["__torch_dispatch__"]})
    plain = torch.arange(6.0).view(2, 3)
    for a, what in (
        (plain, "of shape (2, 3)"),
        (plain.double(), "of 64-bit numbers"),
        (plain.t(), "that are transposed"),
        (plain.clone().requires_grad_(), "that need a gradient"),
    ):
        b = (a.detach() + 10).requires_grad_(a.requires_grad)
        said = f"of two tensors {what}, {answer_name(answer)}"
        two = call_answer(answer, kind, a, b, in_words=said)
        if not isinstance(two, Tensor) or kind is not type(two):
            hint = "Tensor._make_wrapper_subclass(cls, …) makes the tensor to return."
            raise WrongAnswer(
                f"{said} gave a {type(two).__name__}, not a tensor of class cls", hint=hint
            )
        for name, seen, right in (
            ("shape", tuple(two.shape), tuple(a.shape)),
            ("dtype", two.dtype, a.dtype),
            ("strides", two.stride(), a.stride()),
        ):
            if seen != right:
                hint = (
                    "_make_wrapper_subclass takes the shape, and strides=, dtype= and device= as"
                    " well."
                )
                raise WrongAnswer(f"{said} gave {name} {seen}", expected=f"{right}", hint=hint)
        for name, given, other in (("a", a, b), ("b", b, a)):
            _judge_half(
                f"{said} gave a tensor whose .{name}", getattr(two, name, None), given, other
            )
    return passing_verdict("it looks like its halves, holds both, and copies nothing")


def _judge_half(said: str, held: Any, given: Tensor, other: Tensor) -> None:
    """Judge whether a tensor that was made of two holds one of them correctly."""
    if not isinstance(held, Tensor):
        raise WrongAnswer(
            f"{said} is {value_text(held)}",
            hint="Attributes can be set on the new tensor: two.a = …",
        )
    if held.data_ptr() == other.data_ptr():
        raise WrongAnswer(f"{said} is the other half", hint="a comes first.")
    if held.data_ptr() != given.data_ptr():
        raise WrongAnswer(
            f"{said} is a copy", hint="detach() shares the memory, clone() copies it."
        )
    if held.requires_grad:
        hint = "Autograd follows the new tensor and not what it holds: detach the halves."
        raise WrongAnswer(f"{said} asks autograd for a gradient of its own", hint=hint)


@exercise
def dispatch(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: ``__torch_dispatch__`` of TwoTensor, from (cls, func, types, args, kwargs)."""
    x, y = torch.arange(6.0).view(3, 2), torch.ones(2, 3)
    cases: list[tuple[str, Callable[[Tensor], Any], str]] = [
        (
            "two * 2",
            lambda two: two * 2,
            "Call func once for each half, and make a cls of the two results.",
        ),
        ("y @ two", lambda two: y @ two, "Plain tensors among the arguments stay as they are."),
        (
            "torch.add(two, two, alpha=3)",
            lambda two: torch.add(two, two, alpha=3),
            "Pass the keyword arguments on.",
        ),
        (
            "two.chunk(3)",
            lambda two: two.chunk(3),
            "A result may be a list: tree_map goes through it.",
        ),
        (
            "torch.equal(two, two)",
            lambda two: torch.equal(two, two),
            "What is no tensor, such as True, stays.",
        ),
        (
            "_foreach_mul([two, two], 2)",
            lambda two: foreach_mul([two, two], 2),
            "Arguments may be lists of tensors: tree_map_only goes through them.",
        ),
        (
            "two.add_(1)",
            lambda two: two.clone().add_(1),
            "An operation in place changes both halves.",
        ),
    ]
    raise_if_not_attempted(answer)
    deep = 0

    def limit_recursion(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        nonlocal deep
        deep += 1
        # Stop long before Python's own limit, at which a kernel may crash.
        if deep > 50:
            raise WrongAnswer(
                f"{answer_name(answer)} calls itself without end",
                hint="Hand func the halves, not the wrapper.",
            )
        try:
            return answer(cls, func, types, args, kwargs)
        finally:
            deep -= 1

    kind = type("Two", (TwoTensor,), {"__torch_dispatch__": classmethod(limit_recursion)})

    def call_operation(
        text: str, operation: Callable[[Tensor], Any], two: Tensor, hint: str
    ) -> Any:
        try:
            return call_answer(
                partial(operation, two), in_words=f"with {answer_name(answer)}, {text}"
            )
        except WrongAnswer as wrong:
            inner = wrong.__cause__
            raise (
                inner if isinstance(inner, WrongAnswer) else WrongAnswer(str(wrong), hint=hint)
            ) from None

    for text, operation, hint in cases:
        a, b = x.clone(), x + 10
        _judge_operation(
            text,
            call_operation(text, operation, kind(a, b), hint),
            operation(a),
            operation(b),
            kind,
            hint,
        )
    out = torch.zeros(3, 2)
    text, hint = "torch.add(two, 0, out=plain)", "FSDP2 reduces gradients so, and keeps those of a."
    call_operation(text, lambda two: torch.add(two, 0, out=out), kind(x, x + 10), hint)
    if not is_tensor_close(out, x):
        hint += " Call func with b first, then with a."
        raise WrongAnswer(
            f"{text} leaves half b's result in the plain tensor",
            expected="half a's",
            hint=hint,
        )
    return passing_verdict(f"{len(cases) + 1} kinds of operations are done twice")


def _judge_operation(text: str, found: Any, a: Any, b: Any, kind: type, hint: str) -> None:
    """Judge whether an operation on a wrapper gave its result for both halves."""
    if isinstance(a, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(a):
            raise WrongAnswer(
                f"{text} gave a {type(found).__name__}, not {len(a)} tensors", hint=hint
            )
        for parts in zip(found, a, b, strict=True):
            _judge_operation(f"one of {text}", *parts, kind, hint)
        return
    if not isinstance(a, Tensor):
        if found is not a:
            raise WrongAnswer(f"{text} gave {value_text(found)}", expected=f"{a}", hint=hint)
        return
    if type(found) is not kind:
        raise WrongAnswer(f"{text} gave a {type(found).__name__}, not a cls", hint=hint)
    halves = {"a": (found.a, a, b), "b": (found.b, b, a)}  # type: ignore[attr-defined]
    for name, (held, right, other) in halves.items():
        if not is_tensor_close(held, right):
            seen = (
                f"is what half {'ab'[name == 'a']} gives"
                if is_tensor_close(held, other)
                else "is wrong"
            )
            raise WrongAnswer(f"half {name} of {text} {seen}", hint=hint)


@exercise
def pre_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: what a TwoTensor sends, from (self, mesh, outer_size, outer_stride, module,
    mp_policy).
    """
    whole = torch.arange(1.0, 13.0)
    for rows, held, ranks in ((6, 3, 2), (5, 2, 2), (3, 0, 4)):
        a = whole.view(-1, 2)[:held]
        mesh, size = SimpleNamespace(size=lambda ranks=ranks: ranks), torch.Size([rows, 2])
        said = f"of {held} rows, where {ranks} ranks share {rows}, {answer_name(answer)}"
        found = call_answer(
            answer, TwoTensor(a, -a), mesh, size, (2, 1), nn.Identity(), None, in_words=said
        )
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], tuple):
            kinds = ", ".join(
                type(each).__name__ for each in (found if isinstance(found, tuple) else (found,))
            )
            hint = (
                "The first is a tuple of the tensors to send. The second is None here: return (…,"
                " …), None"
            )
            raise WrongAnswer(
                f"{said} gave {kinds}, not two things, the first of them a tuple", hint=hint
            )
        sent = found[0]
        if len(sent) != 2 or not all(type(each) is Tensor for each in sent):
            kinds = ", ".join(type(each).__name__ for each in sent)
            hint = "FSDP2 sends plain tensors: self.a and self.b, padded."
            raise WrongAnswer(f"{said} sends {kinds}, not two plain tensors", hint=hint)
        most = -(-rows // ranks)
        for name, each, half, other in (("first", sent[0], a, -a), ("second", sent[1], -a, a)):
            if each.shape != (most, 2):
                hint = (
                    "Every rank sends as many rows as the one with most of them: rows / ranks,"
                    " rounded up."
                )
                expected = f"{(most, 2)}"
                raise WrongAnswer(
                    f"{said} sends a {name} tensor of shape {tuple(each.shape)}",
                    expected=expected,
                    hint=hint,
                )
            if not is_tensor_close(each[:held], half):
                seen = (
                    "holds the rows of the other half"
                    if is_tensor_close(each[:held], other)
                    else "does not hold its rows"
                )
                raise WrongAnswer(
                    f"{said} sends a {name} tensor that {seen}", hint="First a, then b."
                )
            if each[held:].any():
                raise WrongAnswer(
                    f"{said} pads the {name} tensor with something else than zeros",
                    hint="pad_rows does it.",
                )
    return passing_verdict("both halves are sent, padded to the longest shard")


@exercise
def post_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: the post-all-gather hook of TwoTensor in its own dtype, on 2 real ranks."""
    _judge_hook(answer, "two_tensor")
    return passing_verdict(f"trained on {RANKS} ranks: right losses, no copy, and all memory freed")


@exercise
def cast_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 12: the same hook with a dtype to compute in."""
    _judge_hook(answer, "cast")
    return passing_verdict(
        f"trained on {RANKS} ranks, in float32 and cast to bfloat16: right losses, and all memory"
        " freed"
    )


@exercise
def mended(answer: Callable[..., Any]) -> Verdict:
    """Exercise 7: a post-all-gather hook for int8 numbers with a scale for each row, without a
    leak.
    """
    _judge_hook(answer, "int8")
    return passing_verdict(
        f"trained on {RANKS} ranks, in float32 and bfloat16: right losses, and nothing is left"
        " after reshard"
    )


@exercise
def bf16_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 6: a gather with half the bytes of float32 and the error of bfloat16."""
    return _judge_codec(encode, decode, "bf16")


@exercise
def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 8: a gather with at most 0.26 of the bytes of float32 and at most the error of
    float8.
    """
    return _judge_codec(encode, decode, "8 bits")


@exercise
def four_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 13: a gather with at most 0.14 of the bytes of float32 and the error of 15 steps a
    row.
    """
    return _judge_codec(encode, decode, "4 bits")


@exercise
def rms_error(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: the root mean squared error over that of the exact weights, from (exact,
    rounded).
    """
    draw = torch.Generator().manual_seed(0)
    for what, exact in (
        ("one row", torch.tensor([[3.0, -4.0, 3.0, -4.0]])),
        ("a matrix", torch.randn(6, 5, generator=draw)),
    ):
        off = 0.01 * torch.randn(exact.shape, generator=draw)
        found = call_answer(
            answer, exact, exact + off, in_words=f"of {what}, {answer_name(answer)}(exact, rounded)"
        )
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        if not isinstance(found, Real):
            raise WrongAnswer(
                f"of {what}, {answer_name(answer)} gave {value_text(found)}, not one number"
            )
        right, root = (
            float((off.square().mean() / exact.square().mean()).sqrt()),
            float(off.square().mean().sqrt()),
        )
        seen = {
            "the square of it": right**2,
            "the error itself, over nothing": root,
            "the largest error": float(off.abs().max()),
            "the largest error over the largest weight": float(off.abs().max() / exact.abs().max()),
            "the mean error over the mean weight, without their signs": float(
                off.abs().mean() / exact.abs().mean()
            ),
            "an error whose signs cancel": float(off.mean()),
            "an error whose signs cancel, over the weights'": float(
                off.mean().abs() / exact.square().mean().sqrt()
            ),
        }
        if not _is_number_close(found, right):
            words = next((w for w, n in seen.items() if _is_number_close(found, n)), "")
            said = (
                f"of {what}, {answer_name(answer)} gave {_number_text(found)}"
                + f", {words}" * bool(words)
            )
            hint = (
                "Square each error, take the mean, then the root; do the same with the exact"
                " weights; divide."
            )
            raise WrongAnswer(said, expected=f"{right:.4g}", hint=hint)
    return passing_verdict("2 cases agree")


@exercise
def held_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 10: the bytes that one parameter occupies during the computation, from (numbers,
    sent_bytes, compute_bytes).
    """
    whole = "All that was gathered is held, and from all ranks: numbers * sent_bytes."
    both = "What was gathered stays until the parameter is freed: both are held."
    shares = (
        "Where what was gathered has the right dtype already, it is the parameter, and no copy is"
        " made."
    )
    cases = [(100, 4, 4), (100, 2, 2), (100, 2, 4), (100, 1, 4), (100, 1, 2)]

    def right_bytes(numbers: int, sent_bytes: int, compute_bytes: int) -> int:
        return numbers * (sent_bytes if sent_bytes == compute_bytes else sent_bytes + compute_bytes)

    return judge_values(answer, right_bytes, cases, [shares, whole, both, both, both])


@exercise
def pays_below(answer: Callable[..., float]) -> Verdict:
    """Exercise 11: the bandwidth below which a compressed gather is faster, from (bytes_saved,
    coding_s, ranks).
    """
    cases = [
        (
            (1000, 1.0, 2),
            "On the wire of a ring, a rank sends (ranks - 1) / ranks of the parameter's bytes.",
        ),
        ((1000, 0.5, 2), "Coding that is twice as fast pays up to twice the bandwidth."),
        ((1000, 1.0, 8), "A ring of 8 sends 7/8 of the bytes."),
        (
            (3_000_000, 0.001, 4),
            "Set the time that is saved, bytes over bandwidth, equal to coding_s.",
        ),
    ]
    for arguments, hint in cases:
        expected = theory.pays_below(*arguments)
        named: dict[str, Any] = dict(
            zip(("bytes_saved", "coding_s", "ranks"), arguments, strict=True)
        )
        found = call_answer(answer, **named)
        said = f"{call_text(answer, **named)} gave {value_text(found)}"
        if not isinstance(found, Real):
            raise WrongAnswer(f"{said}, not a number: does every path return?")
        if not _is_number_close(found, expected):
            raise WrongAnswer(said, expected=f"{expected:,.6g}", hint=hint)
    return passing_verdict(f"{len(cases)} cases agree")


def _is_number_close(found: Real, expected: float) -> bool:
    """Tell whether two numbers agree up to rounding; a number too large for a float does not."""
    try:
        return abs(float(found) - expected) <= 1e-4 * abs(expected)
    except OverflowError:
        return False


def _number_text(found: Real) -> str:
    """Format a number with four digits, if it can be."""
    try:
        return f"{float(found):.4g}"
    except OverflowError:
        return value_text(found)


def _judge_hook(hook: Callable[..., Any], what: str) -> None:
    """Train with the hook on ranks and with its expected result on one device; raise WrongAnswer if
    they differ.
    """
    right = {dtype: _one_device_losses(what, dtype) for dtype in HOOK_DTYPES[what]}

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for dtype, expected in right.items():
            where = str(dtype).removeprefix("torch.")
            _judge_losses(sent[where]["losses"], expected, dtype, where)
            if sent[where]["left"]:
                growth = ", ".join(f"{size:,}" for size in accumulate(sent[where]["left"].values()))
                said = (
                    f"in {where}, memory grows with every unit: {growth} bytes are left after"
                    " reshard"
                )
                hint = "Which memory did the hook make, and who was told to free it?"
                raise WrongAnswer(said, expected="0", hint=hint)

    judge_on_ranks("extensions", hook, judge=judge_rank, what=what, **LAUNCH_OPTIONS)


def _one_device_losses(what: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return one device's losses by half and step. Both halves are updated with the first one's
    gradient.
    """
    models = [make_linear_stack(HOOK_WIDTHS) for _ in range(1 if what == "int8" else 2)]
    with torch.no_grad():
        for parameter in models[-1].parameters():
            parameter.mul_(len(models))
    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in models]
    codec, losses = EXTENSIONS["int8" if what == "int8" else "fp32"], [[] for _ in models]  # type: ignore[var-annotated]
    for step in range(STEPS):
        gradients: dict[str, Any] = {}
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            own = dict(model.named_parameters())
            whole = {
                n: codec.decode(codec.encode(each.detach()), dtype).requires_grad_()
                for n, each in own.items()
            }
            output = functional_call(model, whole, sample_inputs(step, HOOK_WIDTHS[0]).to(dtype))
            loss = (output.float() - 1).square().mean()
            loss.backward()
            gradients = gradients or {name: each.grad for name, each in whole.items()}
            for name, each in own.items():
                each.grad = gradients[name].float()
            optimizer.step()
            seen.append(loss.detach())
    return losses


def _judge_losses(
    got: list[list[Tensor]], expected: list[list[Tensor]], dtype: torch.dtype, where: str
) -> None:
    """Raise WrongAnswer, naming the step, if losses differ by more than rounding."""
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    for step, mine in enumerate(got):
        for half, (loss, right) in enumerate(
            zip(mine, [each[step] for each in expected], strict=True)
        ):
            if not is_tensor_close(loss, right, rtol=rtol):
                which = f"half {'ab'[half]} of the loss" if len(expected) == 2 else "the loss"
                first = "The first call already gives another parameter."
                later = (
                    "What `out` holds is wrong: on later calls its memory is new, with nothing"
                    " useful in it."
                )
                seen = "is NaN" if loss.isnan() else "is wrong"
                raise WrongAnswer(
                    f"in {where}, {which} {seen} in step {step}", hint=later if step else first
                )


@dataclass
class _RankRows:
    """The rows that one rank gathered, beside the exact ones."""

    name: str
    rank: int
    found: Tensor
    exact: Tensor

    def judge_error(self, largest: Tensor, most_error: float) -> float:
        """Return the largest error over the parameter's largest weight; raise WrongAnswer if it is
        too large.
        """
        # NaN where a weight is NaN.
        error = float((self.found - self.exact).abs().max() / largest)
        if error <= most_error:
            return error
        whose = f"{CODEC_WEIGHT_TEXT[self.name]}: rank {self.rank}'s rows"
        if self.found.isnan().any():
            raise WrongAnswer(
                f"{whose} hold NaN", hint="Is something divided by the largest of a row of zeros?"
            )
        if not self.found.any():
            hint = "Rounded without a scale of their own, small numbers become 0."
            raise WrongAnswer(f"{whose} became 0", hint=hint)
        factor = float((self.found * self.exact).sum() / self.exact.square().sum())
        if abs(factor - 1) > 0.2 and float(
            (self.found - factor * self.exact).abs().max()
        ) < 0.2 * abs(factor) * float(largest):
            hint = "Was each row multiplied by the scale of its own rank, or its own row?"
            raise WrongAnswer(
                f"{whose} came back {value_text(round(factor, 1))} times as large", hint=hint
            )
        said = f"{whose} are off by {error:.2g} of the parameter's largest weight"
        raise WrongAnswer(said, expected=f"at most {most_error:.2g}")


def _judge_codec(encode: Callable[..., Any], decode: Callable[..., Any], limits: str) -> Verdict:
    """Compare the weights that ranks gathered with the exact ones, and the bytes with those of
    float32.
    """
    most_bytes, most_error = GATHER_LIMITS[limits]
    exact = {name: each.detach() for name, each in make_codec_model().named_parameters()}
    in_float32 = theory.step_gather_bytes(
        [tuple(weight.shape) for weight in exact.values()], RANKS, "fp32"
    )
    ratio = error = 0.0

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        nonlocal ratio, error
        ratio = sent["sent"] / in_float32
        for name, weight in exact.items():
            found, rows = sent["weights"][name.removesuffix(".weight")], -(-len(weight) // RANKS)
            pieces = zip(found.split(rows), weight.split(rows), strict=True)
            parts = [_RankRows(name, rank, *both) for rank, both in enumerate(pieces)]
            error = max(
                error, *(part.judge_error(weight.abs().max(), most_error) for part in parts)
            )
        if not sent["loss"].isfinite():
            hint = "Is something divided by the largest of a row of zeros?"
            raise WrongAnswer("the loss is not a finite number", hint=hint)
        if ratio > most_bytes:
            said = f"it sends {ratio:.3f} of the bytes of float32"
            raise WrongAnswer(
                said,
                expected=f"at most {most_bytes:g}",
                hint="Count all tensors that encode returns.",
            )

    judge_on_ranks("extensions", encode, decode, judge=judge_rank, what="codec", **LAUNCH_OPTIONS)
    return passing_verdict(
        f"{ratio:.3f} of the bytes of float32, and no weight is off by more than {error:.4f} of the"
        " largest"
    )
