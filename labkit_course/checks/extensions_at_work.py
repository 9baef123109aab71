"""Checks of lab 3b, all-gather extensions at work."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.tensors import TwoTensor
from labkit.theory import extensions as theory
from labkit.torch_private import foreach_mul
from labkit_course.checks import judge
from labkit_course.checks.extensions import TOLERANCES, WAIT_HINT, judge_codec, judge_hook
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks

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

# Why a test may not see what a hook does.
HALF_HINT = "Choose halves that differ, so that the test can tell which of them came."
PADDING_HINT = "Nothing is padded if every rank has equally many rows."
SEND_HINTS = {
    "sends a twice": HALF_HINT,
    "swaps a and b": HALF_HINT,
    "sends zeros for b": "Numbers that are zero anyway show no mistake.",
    "rounds b to bfloat16": "bfloat16 holds small whole numbers exactly: take others.",
    "leaves out the padding": PADDING_HINT,
    "pads in front": PADDING_HINT,
}


@exercise
def new_two(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: ``__new__`` of a tensor that holds two tensors, from (cls, a, b)."""
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
    """Exercise 2: ``__torch_dispatch__`` of TwoTensor, from (cls, func, types, args, kwargs)."""
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
    """Exercise 3: what a TwoTensor sends, from the arguments of ``fsdp_pre_all_gather``."""
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
    """Exercise 4: the post-all-gather hook of TwoTensor, which also casts, on real ranks."""
    passed = ", in float32 and cast to bfloat16: right losses, and all memory freed"
    return judge_hook(answer, "cast", passed)


@exercise
def halves(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 5: what a test gathers, halves a and b [R, C] and a number of ranks.

    Gathered on so many ranks, both must arrive as they are from a right hook, and from no wrong
    one.
    """
    found = judge.call_answer(answer)
    said = f"{judge.answer_name(answer)}() gave"
    is_three = type(found) is tuple and len(found) == 3
    judge.expect(is_three, f"{said} {judge.value_text(found)}, not three values: a, b and ranks")
    a, b, ranks = found
    for name, half in (("a", a), ("b", b)):
        given = f"{said} as {name} a {type(half).__name__}"
        judge.expect(type(half) is Tensor, f"{given}, not a tensor")
        is_matrix = half.dtype == torch.float32 and half.ndim == 2 and 0 < half.numel() <= 10_000
        shown = f"{said} as {name} a tensor {[*half.shape]} of {half.dtype}"
        judge.expect(is_matrix, shown, "[rows, columns] of float32, at most 10,000 numbers")
    judge.expect(a.shape == b.shape, f"{said} {[*a.shape]} and {[*b.shape]}", "equal shapes")
    few = type(ranks) is int and 2 <= ranks <= 4
    judge.expect(few, f"{said} {judge.value_text(ranks)} ranks", "2, 3 or 4")

    def judge_rank(count: int, index: int, sent: dict[str, bool]) -> None:
        right = f"on {count} ranks the test fails with the right hook, too"
        judge.expect(sent[""], right, hint="NaN is not equal to itself.")
        if unseen := [name for name in SEND_HINTS if sent[name]]:
            more = f", nor do {len(unseen) - 1} other wrong ones" if len(unseen) > 1 else ""
            missed = f"on {count} ranks a hook that {unseen[0]} does not fail the test{more}"
            raise judge.WrongAnswer(missed, hint=SEND_HINTS[unseen[0]])

    how: dict[str, Any] = {"judge": judge_rank, "timeout_s": timeout_s, "waiting": WAIT_HINT}
    arguments = {"what": "halves", "a": a.detach().tolist(), "b": b.detach().tolist()}
    judge_on_ranks("extensions", sizes=(ranks,), **how, **arguments)
    passed = f"on {ranks} ranks the test passes with the right hook"
    return judge.passing_verdict(f"{passed}, and fails with each of {len(SEND_HINTS)} wrong ones")


@exercise
def four_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 6: a gather with at most 0.14 of float32's bytes, and 15 steps a row."""
    return judge_codec(encode, decode, 0.14, theory.rounding_error("int4"), by_row=True)
