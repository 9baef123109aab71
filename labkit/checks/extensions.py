"""Checks of lab 3, changing what FSDP gathers."""

import itertools
from collections.abc import Callable
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import extensions as ranks_extensions
from labkit.checks.traffic import expect_traffic
from labkit.tensors import TwoTensor
from labkit.theory import extensions as theory
from labkit.torch_private import foreach_mul

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
# Of what is calculated once more, in the same order.
TOLERANCES: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8}
REFILL_HINT = "autograd has saved this parameter: fill it with refill"
# What to do about an error of torch, by a part of its message.
ERROR_HINTS = {
    "modified by an inplace operation": REFILL_HINT,
    "Please clone()": REFILL_HINT,
    "cannot be 0 to view": "what is sent needs a first dimension: send scale.reshape(1)",
    "Invalid scalar type": (
        "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its scale"
    ),
}
WAIT_HINT = "does every rank send tensors of the same size?"
_on_ranks = partial(
    judge_on_ranks, "extensions", sizes=SIZES, timeout_s=60, waiting=WAIT_HINT, hints=ERROR_HINTS
)
# What is special about each parameter of make_codec_model.
CODEC_WEIGHT_TEXT = {
    "0.weight": "the weights with a row of zeros",
    "1.weight": "the tiny weights",
    "2.weight": "the weights whose first half is 3 times larger",
}
ZERO_ROW_HINT = "Is something divided by the largest of a row of zeros?"
# What is done to a TwoTensor, as it runs and as a verdict shows it, and a hint.
OPERATION_HINTS = {
    "two * 2": "Call func once for each half, and make a cls of the two results.",
    "y @ two": "Plain tensors among the arguments stay as they are.",
    "torch.add(two, two, alpha=3)": "Pass the keyword arguments on.",
    "two.chunk(3)": "A result may be a list: tree_map goes through it.",
    "torch.equal(two, two)": "What is no tensor, such as True, stays.",
    "_foreach_mul([two, two], 2)": "Arguments may be lists: tree_map_only goes through them.",
    "two.add_(1)": "An operation in place changes both halves.",
}


@exercise
def gather_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: a rank's bytes in one all-gather of a (rows, columns) matrix."""
    own = "A rank sends its own rows, not the whole parameter: rows / ranks x columns."
    most = "Every rank sends as many rows as the rank with most of them: rows / ranks, rounded up."
    cases = [
        (8, 4, 2, 4, own),
        (8, 4, 4, 2, own),
        (5, 6, 2, 4, most),
        (10, 128, 4, 2, most),
        (2, 8, 4, 4, most),
    ]

    def right_bytes(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:
        return theory.gather_bytes((rows, columns), ranks, {4: "fp32", 2: "bf16"}[bytes_per_number])

    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def new_two(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: ``__new__`` of a tensor that holds two tensors, from (cls, a, b)."""
    kind = type("Two", (Tensor,), {"__torch_dispatch__": TwoTensor.__dict__["__torch_dispatch__"]})
    plain = torch.arange(6.0).view(2, 3)
    # Each differs from the first in what a wrapper has by default.
    cases = {
        "of shape (2, 3)": plain,
        "of 64-bit numbers": plain.double(),
        "that are transposed": plain.t(),
        "that need a gradient": plain.clone().requires_grad_(),
    }
    for what, a in cases.items():
        b = (a.detach() + 10).requires_grad_(a.requires_grad)
        said = f"of two tensors {what}, {judge.answer_name(answer)}"
        two = judge.call_answer(answer, kind, a, b, in_words=said)
        problem = f"{said} gave a {type(two).__name__}, not a tensor of class cls"
        hint = "Tensor._make_wrapper_subclass(cls, …) makes the tensor to return."
        judge.expect(type(two) is kind, problem, hint=hint)
        hint = "_make_wrapper_subclass takes the shape, and strides=, dtype= and device= as well."
        shape, right = (*two.shape,), (*a.shape,)
        judge.expect(shape == right, f"{said} gave shape {shape}", right, hint)
        judge.expect(two.dtype == a.dtype, f"{said} gave dtype {two.dtype}", a.dtype, hint)
        strides = a.stride()
        judge.expect(two.stride() == strides, f"{said} gave strides {two.stride()}", strides, hint)
        _judge_half(f"{said} gave a tensor whose .a", getattr(two, "a", None), a, b)
        _judge_half(f"{said} gave a tensor whose .b", getattr(two, "b", None), b, a)
    return judge.passing_verdict("it looks like its halves, holds both, and copies nothing")


def _judge_half(said: str, held: Any, given: Tensor, other: Tensor) -> None:
    """Expect that a tensor made of two holds the given one without a copy."""
    hint = "Attributes can be set on the new tensor: two.a = …"
    judge.expect(isinstance(held, Tensor), f"{said} is {judge.value_text(held)}", hint=hint)
    # Tensors share their memory if they begin at the same address.
    pointer = held.data_ptr()
    judge.expect(pointer != other.data_ptr(), f"{said} is the other half", hint="a comes first.")
    hint = "detach() shares the memory, clone() copies it."
    judge.expect(pointer == given.data_ptr(), f"{said} is a copy", hint=hint)
    hint = "Autograd follows the new tensor and not what it holds: detach the halves."
    judge.expect(not held.requires_grad, f"{said} asks autograd for a gradient", hint=hint)


@exercise
def dispatch(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: ``__torch_dispatch__`` of TwoTensor, from (cls, func, types, args, kwargs)."""
    # The answer is called by torch, where an empty one would show up as some other error.
    judge.raise_if_not_attempted(answer)
    x, plain = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    names = {"torch": torch, "_foreach_mul": foreach_mul, "y": torch.ones(2, 3), "plain": plain}

    class Two(TwoTensor):
        calls = 0

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Two.calls += 1
            # Stop long before Python's own limit, at which a kernel may crash.
            if Two.calls > 50:
                rule = "hand func the halves, not the wrapper"
                name = judge.answer_name(answer)
                raise RecursionError(f"{name} calls itself without end: {rule}")
            return answer(cls, func, types, args, kwargs)

    def run(text: str, hint: str) -> Any:
        two, asked = Two(x.clone(), x + 10), f"with {judge.answer_name(answer)}, {text}"
        Two.calls = 0
        try:
            return judge.call_answer(eval, text, names | {"two": two}, in_words=asked)
        except judge.WrongAnswer as wrong:
            raise judge.WrongAnswer(str(wrong), hint=hint) from None

    for text, hint in OPERATION_HINTS.items():
        # New tensors for each operation, as one of them works in place.
        a, b = (eval(text, names | {"two": half}) for half in (x.clone(), x + 10))
        _judge_operation(text, run(text, hint), a, b, Two, hint)
    text, hint = "torch.add(two, 0, out=plain)", "FSDP2 reduces gradients so, and keeps those of a."
    # Both halves are written into one tensor, so the last one stays.
    run(text, hint)
    said, hint = f"{text} leaves half b's result", f"{hint} Call func with b first, then with a."
    judge.expect(judge.is_tensor_close(plain, x), f"{said} in the plain tensor", "half a's", hint)
    return judge.passing_verdict(f"{len(OPERATION_HINTS) + 1} kinds of operations are done twice")


def _judge_operation(text: str, found: Any, a: Any, b: Any, kind: type, hint: str) -> None:
    """Expect the operation's result for both halves, in a list if it gives one."""
    what = f"{text} gave a {type(found).__name__}"
    if isinstance(a, list | tuple):
        is_list = isinstance(found, list | tuple) and len(found) == len(a)
        judge.expect(is_list, f"{what}, not {len(a)} tensors", hint=hint)
        for parts in zip(found, a, b, strict=True):
            _judge_operation(f"one of {text}", *parts, kind, hint)
    elif not isinstance(a, Tensor):
        judge.expect(found is a, f"{text} gave {judge.value_text(found)}", a, hint)
    else:
        judge.expect(type(found) is kind, f"{what}, not a cls", hint=hint)
        likely_a, likely_b = {"is what half b gives": b}, {"is what half a gives": a}
        judge.expect_close(found.a, a, f"half a of {text}", likely_a, hint=hint, **TOLERANCES)
        judge.expect_close(found.b, b, f"half b of {text}", likely_b, hint=hint, **TOLERANCES)


@exercise
def pre_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: what a TwoTensor sends, from the arguments of ``fsdp_pre_all_gather``."""
    whole = torch.arange(1.0, 13.0)
    # Even rows, uneven rows, and a rank that holds none.
    for rows, held, ranks in ((6, 3, 2), (5, 2, 2), (3, 0, 4)):
        a, most = whole.view(-1, 2)[:held], -(-rows // ranks)
        mesh = SimpleNamespace(size=lambda ranks=ranks: ranks)
        given = (TwoTensor(a, -a), mesh, torch.Size([rows, 2]), (2, 1), nn.Identity(), None)
        said = f"of {held} rows, where {ranks} ranks share {rows}, {judge.answer_name(answer)}"
        found = judge.call_answer(answer, *given, in_words=said)
        parts = found if isinstance(found, tuple) else (found,)
        is_pair = parts is found and len(parts) == 2 and isinstance(parts[0], tuple)
        problem = f"{said} gave {_type_names(parts)}, not two things, the first of them a tuple"
        hint = "First a tuple of the tensors to send, then None here: return (…, …), None"
        judge.expect(is_pair, problem, hint=hint)
        sent = parts[0]
        are_plain = len(sent) == 2 and all(type(each) is Tensor for each in sent)
        problem = f"{said} sends {_type_names(sent)}, not two plain tensors"
        judge.expect(are_plain, problem, hint="FSDP2 sends plain tensors: self.a, self.b, padded.")
        for name, each, half in (("first", sent[0], a), ("second", sent[1], -a)):
            tensor = f"{said} sends a {name} tensor"
            hint = "Every rank sends as many rows as the one with most: rows / ranks, rounded up."
            problem = f"{tensor} of shape {(*each.shape,)}"
            judge.expect(each.shape == (most, 2), problem, (most, 2), hint)
            likely = {"holds the rows of the other half": -half}
            how: dict[str, Any] = {"hint": "First a, then b.", "rtol": 0, "atol": 0}
            wrong, got = "does not hold its rows", each[:held]
            judge.expect_close(got, half, f"{tensor} that", likely, otherwise=wrong, **how)
            problem = f"{tensor} padded with something else than zeros"
            judge.expect(not each[held:].any(), problem, hint="pad_rows does it.")
    return judge.passing_verdict("both halves are sent, padded to the longest shard")


def _type_names(values: tuple[Any, ...]) -> str:
    return ", ".join(type(each).__name__ for each in values)


@exercise
def post_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: the post-all-gather hook of TwoTensor in its own dtype, on real ranks."""
    return _judge_hook(answer, "two_tensor", ": right losses, no copy, and all memory freed")


@exercise
def cast_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 12: the same hook with a dtype to compute in."""
    passed = ", in float32 and cast to bfloat16: right losses, and all memory freed"
    return _judge_hook(answer, "cast", passed)


@exercise
def mended(answer: Callable[..., Any]) -> Verdict:
    """Exercise 7: a post-all-gather hook for int8 rows with scales, without a leak."""
    passed = ", in float32 and bfloat16: right losses, and nothing is left after reshard"
    return _judge_hook(answer, "int8", passed)


@exercise
def bf16_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 6: a gather with half the bytes of float32 and the error of bfloat16."""
    return _judge_codec(encode, decode, 0.5, "bf16")


@exercise
def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 8: a gather with at most 0.26 of float32's bytes and the error of float8."""
    return _judge_codec(encode, decode, 0.26, "float8")


@exercise
def four_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 13: a gather with at most 0.14 of float32's bytes, and 15 steps a row."""
    return _judge_codec(encode, decode, 0.14, "int4")


@exercise
def rms_error(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: the root mean squared error over that of the weights, from (exact, rounded)."""
    draw = torch.Generator().manual_seed(0)
    row, matrix = torch.tensor([[3.0, -4.0, 3.0, -4.0]]), torch.randn(6, 5, generator=draw)
    for what, exact in (("one row", row), ("a matrix", matrix)):
        rounded = exact + 0.01 * torch.randn(exact.shape, generator=draw)
        said = f"of {what}, {judge.answer_name(answer)}"
        asked = f"{said}(exact, rounded)"
        found = judge.call_answer(answer, exact.clone(), rounded.clone(), in_words=asked)
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        # A tensor cannot hold an integer of hundreds of digits.
        is_number = issubclass(type(found), Real) and abs(found) < 1e30
        judge.expect(is_number, f"{said} gave {judge.value_text(found)}, not one number")
        off = rounded - exact
        root, size = off.square().mean().sqrt(), exact.square().mean().sqrt()
        right, largest = root / size, off.abs().max()
        likely = {
            "the square of it": right.square(),
            "the error itself, over nothing": root,
            "the largest error": largest,
            "the largest error over the largest weight": largest / exact.abs().max(),
            "the mean error over the mean weight": off.abs().mean() / exact.abs().mean(),
            "an error whose signs cancel": off.mean(),
            "an error whose signs cancel, over the weights'": off.mean().abs() / size,
        }
        number, said, wrong = (
            torch.tensor(float(found)),
            f"{said} gave {found:.4g},",
            "which is wrong",
        )
        hint = "Take the root of the mean of the squared errors; the same of the exact weights."
        wants = f"{right:.4g}"
        # Errors are small, so only a relative tolerance tells them apart.
        how: dict[str, Any] = {"expected": wants, "hint": hint, "rtol": 1e-5, "atol": 0}
        judge.expect_close(number, right, said, likely, otherwise=wrong, **how)
    return judge.passing_verdict("2 cases agree")


@exercise
def held_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 10: bytes held of a parameter, from (numbers, sent_bytes, compute_bytes)."""
    both = "What was gathered stays until the parameter is freed: both are held."
    cases = [
        (100, 4, 4, "What was gathered is the parameter if its dtype is right: there is no copy."),
        (100, 2, 2, "All that was gathered from all ranks is held: numbers * sent_bytes."),
        (100, 2, 4, both),
        (100, 1, 4, both),
        (100, 1, 2, both),
    ]

    def right_bytes(numbers: int, sent_bytes: int, compute_bytes: int) -> int:
        return numbers * (sent_bytes if sent_bytes == compute_bytes else sent_bytes + compute_bytes)

    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def pays_below(answer: Callable[..., float]) -> Verdict:
    """Exercise 11: bandwidth below which coding pays, from (bytes_saved, coding_s, ranks)."""
    solve = "Set the time that is saved, bytes over bandwidth, equal to coding_s."
    cases = [
        (1000, 1.0, 2, "In a ring, a rank sends (ranks - 1) / ranks of the parameter's bytes."),
        (1000, 0.5, 2, "Coding that is twice as fast pays up to twice the bandwidth."),
        (1000, 1.0, 8, "A ring of 8 sends 7/8 of the bytes."),
        (3_000_000, 0.001, 4, solve),
    ]
    return judge.judge_cases(answer, theory.pays_below, cases)


def _judge_hook(hook: Callable[..., Any], what: str, passed: str) -> Verdict:
    """Train with the hook on ranks, and compare with labkit's own hook there."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for dtype, found in sent.items():
            # Wrong losses come first: a hook that fails may also leave memory behind.
            _judge_losses(found["losses"], found["right_losses"], dtype)
            left = found["left"].values()
            growth = ", ".join(f"{size:,}" for size in itertools.accumulate(left))
            said = f"in {dtype}, memory grows with every unit: {growth} bytes"
            hint = "Which memory did the hook make, and who was told to free it?"
            judge.expect(not left, f"{said} are left after reshard", 0, hint)
            said = f"in {dtype}, all is right, but training sends"
            hint = "FSDP2 has gathered all that the hook needs: call no collective in it."
            expect_traffic(found["sent"], found["right_sent"], said, hint)

    _on_ranks(hook, judge=judge_rank, what=what)
    return judge.passing_verdict(f"trained on {SIZES_TEXT} ranks{passed}")


def _judge_losses(got: list[list[Tensor]], expected: list[list[Tensor]], dtype: str) -> None:
    """Expect these losses up to rounding, by step and half."""
    rtol, hint = 1e-5 if dtype == "float32" else 2e-3, "The first call gives another parameter."
    for step, losses in enumerate(got):
        for half, (loss, right) in enumerate(zip(losses, expected[step], strict=True)):
            which = f"half {'ab'[half]} of the loss" if len(losses) == 2 else "the loss"
            said = f"in {dtype}, {which} is {'NaN' if loss.isnan() else 'wrong'} in step {step}"
            judge.expect(judge.is_tensor_close(loss, right, rtol=rtol), said, hint=hint)
        # Every later step reuses the first call's parameter.
        hint = "What `out` holds is wrong: on later calls its memory is new, and empty."


def _judge_codec(
    encode: Callable[..., Any], decode: Callable[..., Any], most_bytes: float, rounding: str
) -> Verdict:
    """Compare gathered weights with the exact ones, and the bytes with those of float32."""
    most_error = theory.rounding_error(rounding)
    model = ranks_extensions.make_codec_model()
    exact = {name: each.detach() for name, each in model.named_parameters()}
    shapes = [tuple(weight.shape) for weight in exact.values()]
    errors = []

    def share_of_float32(ranks: int, sent: dict[str, Any]) -> float:
        return sent["sent"]["all_gather"][1] / theory.step_gather_bytes(shapes, ranks, "fp32")

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for name, weight in exact.items():
            found, rows = sent["weights"][name.removesuffix(".weight")], -(-len(weight) // ranks)
            # A mistake with scales may show in the rows of one rank alone.
            pieces = zip(found.split(rows), weight.split(rows), strict=True)
            for rank, (got, right) in enumerate(pieces):
                whose = f"{CODEC_WEIGHT_TEXT[name]}: rank {rank}'s rows"
                errors.append(_judge_rows(whose, got, right, weight.abs().max(), most_error))
        finite = bool(sent["loss"].isfinite())
        judge.expect(finite, "the loss is not a finite number", hint=ZERO_ROW_HINT)
        share, hint = share_of_float32(ranks, sent), "Count all tensors that encode returns."
        said = f"it sends {share:.3f} of the bytes of float32"
        judge.expect(share <= most_bytes, said, f"at most {most_bytes:g}", hint)
        # Each weight is gathered in both passes, and its gradient is reduced once.
        gathered = [2 * len(shapes), sent["sent"]["all_gather"][1]]
        padded = ranks * sum(theory.gather_bytes(shape, ranks, "fp32") for shape in shapes)
        usual = {"all_gather": gathered, "reduce_scatter": [len(shapes), padded]}
        hint = "FSDP2 sends what encode returns: call no collective in either function."
        expect_traffic(sent["sent"], usual, "all is right, but a step sends", hint)

    outputs = _on_ranks(encode, decode, judge=judge_rank, what="codec")
    seen = f"{share_of_float32(SIZES[0], outputs[0]):.3f} of the bytes of float32"
    off = f"no weight is off by more than {max(errors):.4f} of the largest"
    return judge.passing_verdict(f"{seen}, and {off}")


def _judge_rows(
    whose: str, found: Tensor, exact: Tensor, largest: Tensor, most_error: float
) -> float:
    """Return the largest error of a rank's rows over the parameter's largest weight."""
    # NaN where a weight is NaN, which is no small error.
    error = float((found - exact).abs().max() / largest)
    if error <= most_error:
        return error
    judge.expect(not found.isnan().any(), f"{whose} hold NaN", hint=ZERO_ROW_HINT)
    hint = "Rounded without a scale of their own, small numbers become 0."
    judge.expect(bool(found.any()), f"{whose} became 0", hint=hint)
    # The factor that fits best; it is the mistake if little is left over.
    factor = float((found * exact).sum() / exact.square().sum())
    rest = float((found - factor * exact).abs().max() / largest)
    is_scaled = abs(factor - 1) > 0.2 and rest < 0.2 * abs(factor)
    hint = "Was each row multiplied by the scale of its own rank, or its own row?"
    times = judge.value_text(round(factor, 1))
    judge.expect(not is_scaled, f"{whose} came back {times} times as large", hint=hint)
    said = f"{whose} are off by {error:.2g} of the parameter's largest weight"
    raise judge.WrongAnswer(said, expected=f"at most {most_error:.2g}")
