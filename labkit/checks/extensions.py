"""Checks of lab 3, changing what FSDP gathers."""

import itertools
from collections.abc import Callable
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import extensions as ranks_extensions
from labkit.tensors import EXTENSIONS, TwoTensor
from labkit.theory import extensions as theory
from labkit.torch_private import foreach_mul

RANKS = 2
REFILL_HINT = "autograd has saved this parameter: fill it with refill"
ERROR_HINTS = {
    "modified by an inplace operation": REFILL_HINT,
    "Please clone()": REFILL_HINT,
    "cannot be 0 to view": "what is sent needs a first dimension: send scale.reshape(1)",
    "Invalid scalar type": (
        "gloo sends no float8 tensor by itself: send it as .view(torch.uint8), or with its scale"
    ),
}
"""What to do about an error of torch, by a part of its message."""
WAIT_HINT = "does every rank send tensors of the same size?"
judge_on_pair = partial(
    judge_on_ranks, "extensions", ranks=RANKS, timeout_s=60, waiting=WAIT_HINT, hints=ERROR_HINTS
)
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
"""What is special about each parameter of ``make_codec_model``."""
ZERO_ROW_HINT = "Is something divided by the largest of a row of zeros?"
OPERATION_HINTS = {
    "two * 2": "Call func once for each half, and make a cls of the two results.",
    "y @ two": "Plain tensors among the arguments stay as they are.",
    "torch.add(two, two, alpha=3)": "Pass the keyword arguments on.",
    "two.chunk(3)": "A result may be a list: tree_map goes through it.",
    "torch.equal(two, two)": "What is no tensor, such as True, stays.",
    "_foreach_mul([two, two], 2)": "Arguments may be lists: tree_map_only goes through them.",
    "two.add_(1)": "An operation in place changes both halves.",
}
"""What is done to a TwoTensor, as it runs and as a verdict shows it, and a hint."""


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
    for what, a in {
        "of shape (2, 3)": plain,
        "of 64-bit numbers": plain.double(),
        "that are transposed": plain.t(),
        "that need a gradient": plain.clone().requires_grad_(),
    }.items():
        b = (a.detach() + 10).requires_grad_(a.requires_grad)
        said = f"of two tensors {what}, {judge.answer_name(answer)}"
        two = judge.call_answer(answer, kind, a, b, in_words=said)
        problem = f"{said} gave a {type(two).__name__}, not a tensor of class cls"
        hint = "Tensor._make_wrapper_subclass(cls, …) makes the tensor to return."
        judge.expect(type(two) is kind, problem, hint=hint)
        hint = "_make_wrapper_subclass takes the shape, and strides=, dtype= and device= as well."
        for name, seen, right in (
            ("shape", tuple(two.shape), tuple(a.shape)),
            ("dtype", two.dtype, a.dtype),
            ("strides", two.stride(), a.stride()),
        ):
            judge.expect(seen == right, f"{said} gave {name} {seen}", right, hint)
        for name, given, other in (("a", a, b), ("b", b, a)):
            half = f"{said} gave a tensor whose .{name}"
            _judge_half(half, getattr(two, name, None), given, other)
    return judge.passing_verdict("it looks like its halves, holds both, and copies nothing")


def _judge_half(said: str, held: Any, given: Tensor, other: Tensor) -> None:
    """Expect that a tensor made of two holds the given one without a copy."""
    hint = "Attributes can be set on the new tensor: two.a = …"
    judge.expect(isinstance(held, Tensor), f"{said} is {judge.value_text(held)}", hint=hint)
    pointer = held.data_ptr()
    judge.expect(pointer != other.data_ptr(), f"{said} is the other half", hint="a comes first.")
    hint = "detach() shares the memory, clone() copies it."
    judge.expect(pointer == given.data_ptr(), f"{said} is a copy", hint=hint)
    hint = "Autograd follows the new tensor and not what it holds: detach the halves."
    judge.expect(not held.requires_grad, f"{said} asks autograd for a gradient", hint=hint)


@exercise
def dispatch(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: ``__torch_dispatch__`` of TwoTensor, from (cls, func, types, args, kwargs)."""
    judge.raise_if_not_attempted(answer)
    x, plain = torch.arange(6.0).view(3, 2), torch.zeros(3, 2)
    names = {"torch": torch, "_foreach_mul": foreach_mul, "y": torch.ones(2, 3), "plain": plain}

    def run(text: str, hint: str, kind: type[TwoTensor]) -> Any:
        two = kind(x.clone(), x + 10)
        asked = f"with {judge.answer_name(answer)}, {text}"
        try:
            return judge.call_answer(eval, text, names | {"two": two}, in_words=asked)
        except judge.WrongAnswer as wrong:
            # call_answer wraps every error, also the verdict on an endless recursion.
            if isinstance(wrong.__cause__, judge.WrongAnswer):
                raise wrong.__cause__ from None
            raise judge.WrongAnswer(str(wrong), hint=hint) from None

    for text, hint in OPERATION_HINTS.items():
        kind = _dispatching_class(answer)
        a, b = (eval(text, names | {"two": half}) for half in (x.clone(), x + 10))
        _judge_operation(text, run(text, hint, kind), a, b, kind, hint)
    text, hint = "torch.add(two, 0, out=plain)", "FSDP2 reduces gradients so, and keeps those of a."
    # Both halves are written into one tensor, so the last one stays.
    run(text, hint, _dispatching_class(answer))
    said, hint = f"{text} leaves half b's result", f"{hint} Call func with b first, then with a."
    judge.expect(judge.is_tensor_close(plain, x), f"{said} in the plain tensor", "half a's", hint)
    return judge.passing_verdict(f"{len(OPERATION_HINTS) + 1} kinds of operations are done twice")


def _dispatching_class(answer: Callable[..., Any]) -> type[TwoTensor]:
    """Return a TwoTensor whose operations the answer handles, for one operation."""
    calls = itertools.count()

    def limited(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Stop long before Python's own limit, at which a kernel may crash.
        said = f"{judge.answer_name(answer)} calls itself without end"
        judge.expect(next(calls) < 50, said, hint="Hand func the halves, not the wrapper.")
        return answer(cls, func, types, args, kwargs)

    return type("Two", (TwoTensor,), {"__torch_dispatch__": classmethod(limited)})


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
        said = f"half a of {text}"
        judge.expect_close(found.a, a, said, {"is what half b gives": b}, hint=hint)
        said = f"half b of {text}"
        judge.expect_close(found.b, b, said, {"is what half a gives": a}, hint=hint)


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
            tensor, shape = f"{said} sends a {name} tensor", tuple(each.shape)
            hint = "Every rank sends as many rows as the one with most: rows / ranks, rounded up."
            problem = f"{tensor} of shape {shape}"
            judge.expect(shape == (most, 2), problem, (most, 2), hint)
            judge.expect_close(
                each[:held],
                half,
                f"{tensor} that",
                {"holds the rows of the other half": -half},
                otherwise="does not hold its rows",
                hint="First a, then b.",
            )
            problem = f"{tensor} padded with something else than zeros"
            judge.expect(not each[held:].any(), problem, hint="pad_rows does it.")
    return judge.passing_verdict("both halves are sent, padded to the longest shard")


def _type_names(values: tuple[Any, ...]) -> str:
    return ", ".join(type(each).__name__ for each in values)


@exercise
def post_all_gather(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: the post-all-gather hook of TwoTensor in its own dtype, on 2 real ranks."""
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
    return _judge_codec(encode, decode, "bf16")


@exercise
def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 8: a gather with at most 0.26 of float32's bytes and the error of float8."""
    return _judge_codec(encode, decode, "8 bits")


@exercise
def four_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 13: a gather with at most 0.14 of float32's bytes, and 15 steps a row."""
    return _judge_codec(encode, decode, "4 bits")


@exercise
def rms_error(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: the root mean squared error over that of the weights, from (exact, rounded)."""
    draw = torch.Generator().manual_seed(0)
    for what, exact in (
        ("one row", torch.tensor([[3.0, -4.0, 3.0, -4.0]])),
        ("a matrix", torch.randn(6, 5, generator=draw)),
    ):
        off, asked = 0.01 * torch.randn(exact.shape, generator=draw), judge.answer_name(answer)
        said = f"of {what}, {asked}"
        found = judge.call_answer(answer, exact, exact + off, in_words=f"{said}(exact, rounded)")
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        # No tensor holds an integer of hundreds of digits.
        is_number = issubclass(type(found), Real) and abs(found) < 1e30
        judge.expect(is_number, f"{said} gave {judge.value_text(found)}, not one number")
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
        judge.expect_close(
            torch.tensor(float(found)),
            right,
            f"{said} gave {found:.4g},",
            likely,
            otherwise="which is wrong",
            expected=f"{right:.4g}",
            hint="Take the root of the mean of the squared errors; the same of the exact weights.",
            atol=0,
        )
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
    """Train with the hook on ranks and with its expected result on one device, and compare."""
    dtypes = ranks_extensions.HOOK_DTYPES[what]
    right = {str(dtype).removeprefix("torch."): _device_losses(what, dtype) for dtype in dtypes}

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        for dtype, losses in right.items():
            _judge_losses(sent[dtype]["losses"], losses, dtype)
            left = sent[dtype]["left"].values()
            growth = ", ".join(f"{size:,}" for size in itertools.accumulate(left))
            said = f"in {dtype}, memory grows with every unit: {growth} bytes"
            hint = "Which memory did the hook make, and who was told to free it?"
            judge.expect(not left, f"{said} are left after reshard", 0, hint)

    judge_on_pair(hook, judge=judge_rank, what=what)
    return judge.passing_verdict(f"trained on {RANKS} ranks{passed}")


def _device_losses(what: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return one device's losses by step and half; both halves follow the first one's gradient."""
    codec = EXTENSIONS["int8" if what == "int8" else "fp32"]
    models = [
        ranks_extensions.make_linear_stack(ranks_extensions.HOOK_WIDTHS)
        for _ in range(1 if what == "int8" else 2)
    ]
    # The second half holds twice the weights, as in make_hook_model.
    with torch.no_grad():
        for parameter in models[-1].parameters():
            parameter.mul_(len(models))
    rate = ranks_extensions.LEARNING_RATE
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model in models]
    losses: list[list[Tensor]] = []
    for step in range(ranks_extensions.STEPS):
        inputs = ranks_extensions.sample_inputs(step, ranks_extensions.HOOK_WIDTHS[0]).to(dtype)
        gradients: dict[str, Any] = {}
        losses.append([])
        for model, optimizer in zip(models, optimizers, strict=True):
            own = dict(model.named_parameters())
            whole = {
                name: codec.decode(codec.encode(each.detach()), dtype).requires_grad_()
                for name, each in own.items()
            }
            loss = (functional_call(model, whole, inputs).float() - 1).square().mean()
            loss.backward()
            # FSDP2 reduces a gradient into a plain tensor, which keeps that of the first half.
            gradients = gradients or {name: each.grad for name, each in whole.items()}
            for name, each in own.items():
                each.grad = gradients[name].float()
            optimizer.step()
            losses[-1].append(loss.detach())
    return losses


def _judge_losses(got: list[list[Tensor]], expected: list[list[Tensor]], dtype: str) -> None:
    """Expect these losses up to rounding, by step and half."""
    for step, losses in enumerate(got):
        for half, (loss, right) in enumerate(zip(losses, expected[step], strict=True)):
            which = f"half {'ab'[half]} of the loss" if len(losses) == 2 else "the loss"
            hint = "The first call already gives another parameter."
            if step:
                hint = "What `out` holds is wrong: on later calls its memory is new, and empty."
            close = judge.is_tensor_close(loss, right, rtol=1e-5 if dtype == "float32" else 2e-3)
            seen = "is NaN" if loss.isnan() else "is wrong"
            judge.expect(close, f"in {dtype}, {which} {seen} in step {step}", hint=hint)


def _judge_codec(encode: Callable[..., Any], decode: Callable[..., Any], limits: str) -> Verdict:
    """Compare gathered weights with the exact ones, and the bytes with those of float32."""
    most_bytes, most_error = GATHER_LIMITS[limits]
    model = ranks_extensions.make_codec_model()
    exact = {name: each.detach() for name, each in model.named_parameters()}
    shapes = [tuple(weight.shape) for weight in exact.values()]
    in_float32 = theory.step_gather_bytes(shapes, RANKS, "fp32")
    ratio = error = 0.0

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        nonlocal ratio, error
        ratio = sent["sent"] / in_float32
        for name, weight in exact.items():
            found, rows = sent["weights"][name.removesuffix(".weight")], -(-len(weight) // RANKS)
            pieces = zip(found.split(rows), weight.split(rows), strict=True)
            for rank, (got, right) in enumerate(pieces):
                whose = f"{CODEC_WEIGHT_TEXT[name]}: rank {rank}'s rows"
                error = max(error, _judge_rows(whose, got, right, weight.abs().max(), most_error))
        finite = bool(sent["loss"].isfinite())
        judge.expect(finite, "the loss is not a finite number", hint=ZERO_ROW_HINT)
        said = f"it sends {ratio:.3f} of the bytes of float32"
        hint = "Count all tensors that encode returns."
        judge.expect(ratio <= most_bytes, said, f"at most {most_bytes:g}", hint)

    judge_on_pair(encode, decode, judge=judge_rank, what="codec")
    off = f"no weight is off by more than {error:.4f} of the largest"
    return judge.passing_verdict(f"{ratio:.3f} of the bytes of float32, and {off}")


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
