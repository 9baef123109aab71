"""Checks of lab 3, changing what FSDP gathers."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from labkit.theory import extensions as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import extensions as ranks_extensions
from labkit_course.checks.traffic import expect_traffic

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
# Of what is calculated once more, in the same order.
TOLERANCES: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8}
REFILL_HINT = "autograd has saved this parameter: fill it with refill"
ROWS_HINT = "does `out` have as many rows as what is copied into it? refill leaves the padding out"
# What to do about an error of torch, by a part of its message.
ERROR_HINTS = {
    "modified by an inplace operation": REFILL_HINT,
    "Please clone()": REFILL_HINT,
    "must match the size of tensor": ROWS_HINT,
    "must match the existing size": ROWS_HINT,
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


@exercise
def eight_bit_gather(encode: Callable[..., Any], decode: Callable[..., Any]) -> Verdict:
    """Exercise 1: a gather with at most 0.26 of float32's bytes and the error of float8."""
    best = f"; half a step of int8 is {theory.rounding_error('int8'):.4f}"
    # Whatever its scale, a float8 e4m3fn misses a number by at most half of its eighth.
    return judge_codec(encode, decode, 0.26, 2**-4, best=best)


@exercise
def both_hooks(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: both hooks of a plain shard, put there from (shard, rows, encode, decode)."""
    passed = ", in float32 and bfloat16: right losses, and nothing is left after reshard"
    return judge_hook(answer, "both", passed)


@exercise
def lean_decode(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: a post-all-gather hook for int8 that allocates at most 1 byte a number."""
    passed = ", in float32 and bfloat16: right losses, nothing left, and beside the parameter at"
    passed += " most 1 byte a number, also inside operators"
    return judge_hook(answer, "lean", passed)


def judge_hook(hook: Callable[..., Any], what: str, passed: str) -> Verdict:
    """Train with the hook on ranks, and compare with labkit's own hook there."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for dtype, found in sent.items():
            calls, gathers = found.get("encoded"), found.get("right_encoded")
            seen = f"in {dtype}, encode was called {calls} times in {gathers} gathers"
            hint = "Adam changes the shard in every step: what was encoded before is out of date."
            judge.expect(calls == gathers, seen, hint=hint)
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
            own = found.get("own", 0.0)
            seen = f"in {dtype}, all is right, but the hook holds {own:.1f} bytes a number"
            seen += " of its own, beside the gathered tensors and the parameter"
            hint = "Which operation copies all rows, as its result or inside it?"
            judge.expect(own <= 1, seen, "at most 1", hint)

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


def judge_codec(
    encode: Callable[..., Any],
    decode: Callable[..., Any],
    most_bytes: float,
    most_error: float,
    *,
    by_row: bool = False,
    best: str = "",
) -> Verdict:
    """Compare gathered weights with the exact ones, and the bytes with those of float32.

    Errors are parts of the largest weight of the parameter or, ``by_row``, of each row. ``best``
    is said of the error of a right answer.
    """
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
                # No row has a largest weight of 0 to divide by.
                own = right.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
                largest = own if by_row else weight.abs().max()
                errors.append(_judge_rows(whose, got, right, largest, most_error))
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
    off += " in its row" if by_row else ""
    return judge.passing_verdict(f"{seen}, and {off}{best}")


def _judge_rows(
    whose: str, found: Tensor, exact: Tensor, largest: Tensor, most_error: float
) -> float:
    """Return the largest error of a rank's rows over the largest weight, of all or of each row."""
    # NaN where a weight is NaN, which is no small error.
    error = float(((found - exact).abs() / largest).max())
    if error <= most_error * (1 + 1e-5):
        return error
    judge.expect(not found.isnan().any(), f"{whose} hold NaN", hint=ZERO_ROW_HINT)
    hint = "Small numbers become 0 without a scale of their own, or if that scale became 0."
    judge.expect(bool(found.any()), f"{whose} became 0", hint=hint)
    # The factor that fits best; it is the mistake if little is left over.
    factor = judge.projection(found, exact)
    rest = float(((found - factor * exact).abs() / largest).max())
    is_scaled = abs(factor - 1) > 0.2 and rest < 0.2 * abs(factor)
    hint = "Was each row multiplied by the scale of its own rank, or its own row?"
    times = judge.value_text(round(factor, 1))
    judge.expect(not is_scaled, f"{whose} came back {times} times as large", hint=hint)
    of = "their row's" if largest.ndim else "the parameter's"
    said = f"{whose} are off by {error:.2g} of {of} largest weight"
    raise judge.WrongAnswer(said, expected=f"at most {most_error:.2g}")
