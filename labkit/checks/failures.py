"""Checks of lab 7, when it breaks."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    exercise,
    is_tensor_close,
    passing_verdict,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.failures import BATCH_COUNTS, SAMPLES, train_with_faults
from labkit.theory.failures import balance_samples as right_deal
from labkit.theory.failures import first_diverging_call as right_part
from labkit.theory.failures import first_failed_rank as right_culprit
from labkit.theory.failures import is_only_rounding as right_rounding

RANKS = 4
WAIT_HINT = "does every rank make the same calls?"
CONNECTION_ERROR = "RuntimeError: Connection closed by peer"
SUM_CALL, MAX_CALL, BROADCAST_CALL = (
    ("all_reduce", (8, 8)),
    ("all_reduce", (8,)),
    ("broadcast", (8,)),
)


@exercise
def culprit(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the rank that failed first by itself, from how each rank ended."""
    raised = [
        _rank_exit(0, 1, 5.4, CONNECTION_ERROR),
        _rank_exit(1, -15, 5.6),
        _rank_exit(2, 1, 5.1, "ValueError: no label"),
        _rank_exit(3, -15, 5.6),
    ]
    killed = [
        _rank_exit(0, 1, 7.2, CONNECTION_ERROR),
        _rank_exit(1, -9, 7.3),
        _rank_exit(2, 1, 7.25, CONNECTION_ERROR),
        _rank_exit(3, -15, 7.4),
    ]
    two = [
        _rank_exit(0, 1, 9.4, "KeyError: 'lr'"),
        _rank_exit(1, -15, 9.6),
        _rank_exit(2, 0, 8.0),
        _rank_exit(3, 1, 9.1, "ValueError: NaN"),
    ]
    for name, ends in {
        "one that raised": raised,
        "one that was killed": killed,
        "two that raised": two,
    }.items():
        right = right_culprit(ends)
        found = call_answer(
            answer,
            [dict(end) for end in ends],
            in_words=f"{answer_name(answer)} of a run with {name}",
        )
        if found == right:
            continue
        end = next((end for end in ends if end["rank"] == found), None)
        hint = (
            "Leave out who ended well, who was ended by torchrun, and who lost a connection. Then"
            " who was first?"
        )
        said = (
            f"in a run with {name} it blames rank {found}, {_excuse_text(end)}"
            if end
            else f"{value_text(found)} is no rank"
        )
        raise WrongAnswer(said, expected=f"rank {right}", hint=hint)
    return passing_verdict("3 runs agree")


def _rank_exit(rank: int, status: int, time: float, error: str = "") -> dict[str, Any]:
    return {"rank": rank, "status": status, "time": time, "error": error}


def _excuse_text(end: dict[str, Any]) -> str:
    """Return why a rank is not to blame."""
    if end["error"] == CONNECTION_ERROR:
        return "which only lost a connection"
    if end["status"] == -15:
        return "which torchrun ended"
    return "which ended well" if end["status"] == 0 else "which failed later"


@exercise
def steps_in_common(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: how many steps all ranks can take, from this rank's number of batches, on 4 real
    ranks.
    """
    found: dict[int, Any] = {}

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        if sent["kind"] != "int":
            raise WrongAnswer(
                f"rank {index} got a {sent['kind']}",
                expected="an int",
                hint="tensor.item()",
            )
        found[index] = sent["got"]

    judge_on_ranks(
        "failures",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="common",
    )
    got, had = (
        [found[index] for index in range(RANKS)],
        f"of {list(BATCH_COUNTS)} batches the ranks take",
    )
    if got == list(BATCH_COUNTS):
        raise WrongAnswer(
            f"{had} {got} steps: each its own",
            hint="The ranks must agree. Which collective lets them?",
        )
    if got == [max(BATCH_COUNTS)] * RANKS:
        raise WrongAnswer(
            f"{had} {got[0]} steps: the others run dry",
            hint="Whoever has the fewest sets the number.",
        )
    if got == [sum(BATCH_COUNTS)] * RANKS:
        raise WrongAnswer(
            f"{had} {got[0]} steps, which is the sum",
            hint="all_reduce adds up unless op= says otherwise.",
        )
    if got != [min(BATCH_COUNTS)] * RANKS:
        raise WrongAnswer(
            f"{had} {got} steps", expected=f"{min(BATCH_COUNTS)}", hint="ReduceOp.MIN"
        )
    return passing_verdict(
        f"of {list(BATCH_COUNTS)} batches, all {RANKS} ranks take {min(BATCH_COUNTS)} steps"
    )


@exercise
def where_they_part(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the first call in which ranks differ, and the ranks in the minority, from each
    rank's calls in order.
    """
    cases: dict[str, list[list[Any]]] = {
        "four equal logs": [[SUM_CALL, MAX_CALL]] * 4,
        "rank 2 in another call": [
            [SUM_CALL, MAX_CALL],
            [SUM_CALL, MAX_CALL],
            [SUM_CALL, BROADCAST_CALL],
            [SUM_CALL, MAX_CALL],
        ],
        "rank 0 with another shape": [
            [SUM_CALL, MAX_CALL],
            [SUM_CALL, SUM_CALL],
            [SUM_CALL, SUM_CALL],
            [SUM_CALL, SUM_CALL],
        ],
        "rank 3 one call short": [[SUM_CALL, MAX_CALL, SUM_CALL]] * 3 + [[SUM_CALL, MAX_CALL]],
        "two places where they differ": [
            [SUM_CALL, SUM_CALL, SUM_CALL],
            [SUM_CALL, SUM_CALL, SUM_CALL],
            [SUM_CALL, MAX_CALL, BROADCAST_CALL],
            [SUM_CALL, SUM_CALL, SUM_CALL],
        ],
    }
    hints = {
        "four equal logs": "Return None if no place differs.",
        "rank 2 in another call": "Compare all ranks at place 0, then at place 1, and so on.",
        "rank 0 with another shape": (
            "Name the few, not those that differ from rank 0. Compare shapes as well."
        ),
        "rank 3 one call short": (
            "zip stops at the shortest log. What does the rank do that calls nothing more?"
        ),
        "two places where they differ": (
            "The first place counts: what comes after it is a consequence."
        ),
    }
    for name, logs in cases.items():
        right = right_part(logs)
        found = call_answer(
            answer, [list(log) for log in logs], in_words=f"{answer_name(answer)} of {name}"
        )
        if (tuple(found) if isinstance(found, list) else found) != right:
            raise WrongAnswer(
                f"of {name} it gave {value_text(found)}",
                expected=f"{right}",
                hint=hints[name],
            )
    return passing_verdict(f"{len(cases)} sets of logs agree")


@exercise
def recorded(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: a collective that is logged before and after, on 2 real ranks."""

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        two = [{"call": "all_reduce", "shape": shape, "done": True} for shape in ([3], [2, 2])]
        if sent["handle"] == "NoneType":
            raise WrongAnswer(
                f"rank {index} got None from an asynchronous call",
                hint="Return what the collective returned.",
            )
        if not is_tensor_close(sent["sums"][0], torch.full((3,), 2.0)) or not is_tensor_close(
            sent["sums"][1], torch.full((2, 2), 2.0)
        ):
            raise WrongAnswer(
                f"on rank {index} the collective left other numbers:"
                f" {[each.tolist() for each in sent['sums']]}",
                hint="Hand everything on: collective(tensor, *args, **kwargs), once.",
            )
        last = sent["during"][-1:]
        if not sent["called"] or len(sent["log"]) != 2:
            raise WrongAnswer(
                f"after two calls the log of rank {index} has {len(sent['log'])} entries"
            )
        if not last or last[0]["call"] != "all_gather":
            raise WrongAnswer(
                f"while a call was under way, rank {index}'s log did not have it",
                hint=(
                    "In a hang the call that matters is the one that never returns: append before"
                    " you call."
                ),
            )
        if last[0]["done"]:
            raise WrongAnswer(
                f"while a call was under way, rank {index}'s log called it done",
                hint="Set done after the call.",
            )
        if sent["log"] != two:
            first = next(pair for pair in zip(sent["log"], two, strict=True) if pair[0] != pair[1])
            raise WrongAnswer(f"rank {index} logged {first[0]}", expected=f"{first[1]}")
        if sent["swallowed"]:
            raise WrongAnswer(
                f"on rank {index} an error of the collective did not come out",
                hint="Catch nothing.",
            )
        if sent["after"] and sent["after"][0]["done"]:
            raise WrongAnswer(
                f"rank {index} called a collective done that raised an error",
                hint="Without try and finally, an error leaves before done is set.",
            )

    judge_on_ranks(
        "failures",
        answer,
        judge=judge_rank,
        ranks=2,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="recorded",
    )
    return passing_verdict(
        "four calls recorded on 2 ranks: done, asynchronous, under way and failed"
    )


@exercise
def deal(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 5: which samples each rank takes, from (lengths, ranks), so that all ranks have
    about the same work.
    """
    draw = random.Random(7)
    cases = [([8, 1, 1, 1] * 4, 4), ([9, 7, 6, 5, 5, 4, 2, 2], 2), ([10] + [1] * 10, 2)]
    cases.append(([draw.randint(10, 400) for _ in range(64)], 4))
    for lengths, ranks in cases:
        asked = (
            f"{answer_name(answer)}({lengths if len(lengths) < 20 else '64 lengths'},"
            f" ranks={ranks})"
        )
        found = call_answer(answer, list(lengths), ranks, in_words=asked)
        try:
            dealt = [[int(index) for index in each] for each in found]
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}",
                expected="a list of indices for each rank",
            ) from None
        if len(dealt) != ranks:
            raise WrongAnswer(f"{asked} gave {len(dealt)} lists", expected=f"{ranks}")
        taken = Counter(index for each in dealt for index in each)
        if lost := [index for index in range(len(lengths)) if index not in taken]:
            raise WrongAnswer(
                f"{asked} gave sample {lost[0]} to nobody",
                hint="Each index from 0 to len(lengths) - 1, once.",
            )
        if twice := [index for index, times in taken.items() if times > 1]:
            raise WrongAnswer(
                f"{asked} gave sample {twice[0]} to two",
                hint="Each index from 0 to len(lengths) - 1, once.",
            )
        work = [sum(lengths[index] for index in each) for each in dealt]
        best = max(sum(lengths[index] for index in each) for each in right_deal(lengths, ranks))
        if max(work) > 1.05 * best:
            counts = {len(each) for each in dealt}
            rule = ", in the order of the list" if dealt == [sorted(each) for each in dealt] else ""
            like = "equally many samples" if len(counts) == 1 else "different numbers of samples"
            said = (
                f"{like} each{rule}: rank {work.index(max(work))} has {max(work)} of {sum(lengths)}"
                " to do"
            )
            hint = "The longest first, each to the rank that has least so far."
            raise WrongAnswer(said, expected=f"at most {best}", hint=hint)
    return passing_verdict(
        f"{len(cases)} batches dealt, and no rank has much more to do than it must"
    )


@exercise
def backward_in_pieces(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the gradient of a batch's mean squared error, computed from the batch's pieces in
    turn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        inputs, targets = torch.randn(10, 6), torch.randn(10, 2)
    kept = ActivationCounter(model)
    gradients, pieces = {}, 4
    for how in ("whole", "pieces"):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack_tensor, kept.unpack_tensor):
            if how == "whole":
                nn.functional.mse_loss(model(inputs), targets).backward()
                whole, kept.most = kept.most, 0
            else:
                asked = f"{answer_name(answer)}(model, inputs, targets, pieces={pieces})"
                call_answer(answer, model, inputs.clone(), targets.clone(), pieces, in_words=asked)
        gradients[how] = [
            None if each.grad is None else each.grad.clone() for each in model.parameters()
        ]
    _judge_gradients(gradients["pieces"], gradients["whole"], inputs, targets, model, pieces)
    if kept.most > 0.6 * whole:
        said = (
            f"the gradient is right, and {kept.most / whole:.0%} of the whole batch's activations"
            " were held at once"
        )
        raise WrongAnswer(
            said,
            hint="Each piece needs a backward pass of its own, before the next piece computes.",
        )
    return passing_verdict(f"the same gradient, with {kept.most / whole:.0%} of the activations")


class ActivationCounter:
    """Counts the numbers that autograd keeps for a model's backward passes, now and at most.

    Parameters do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.held, self.most = 0, 0
        self._parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack_tensor(self, tensor: Tensor) -> Any:
        """Count a tensor that autograd keeps."""
        is_parameter = tensor.untyped_storage().data_ptr() in self._parameters
        return _TensorHandle(tensor, self, 0 if is_parameter else tensor.numel())

    def unpack_tensor(self, kept: Any) -> Tensor:
        """Return a kept tensor when a backward pass needs it."""
        return kept.tensor


class _TensorHandle:
    """One tensor, for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, all_of_them: ActivationCounter, size: int):
        self.tensor, self._all, self._size = tensor, all_of_them, size
        all_of_them.held += size
        all_of_them.most = max(all_of_them.most, all_of_them.held)

    def __del__(self) -> None:
        self._all.held -= self._size


def _judge_gradients(
    found: Sequence[Tensor | None],
    right: Sequence[Tensor | None],
    inputs: Tensor,
    targets: Tensor,
    model: nn.Module,
    pieces: int,
) -> None:
    """Raise WrongAnswer, with the likely reason, unless these are the gradients of the whole
    batch.
    """
    if any(each is None for each in found):
        raise WrongAnswer(
            "a parameter has no gradient", hint="Call backward() on the loss of each piece."
        )
    if _is_equal_gradients(found, right):
        return
    parts = list(zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True))
    each = [_batch_gradients(model, *part) for part in parts]
    added = [sum(place[1:], place[0]) for place in zip(*each, strict=True)]
    likely = {
        f"{pieces} means added up, {pieces} times too much": (
            added,
            "Each piece is a part of the batch: weigh it.",
        ),
        "the plain mean of the pieces, though some are shorter": (
            [place / pieces for place in added],
            "A piece of 3 samples out of 10 counts 3 / 10.",
        ),
        "the last piece's gradient alone": (each[-1], "Gradients add up in .grad until zero_grad."),
        "sums over samples, not a mean": (
            [place * 10 for place in right if place is not None],
            "Divide by the batch.",
        ),
    }
    reason = next(
        (name for name, (wrong, _) in likely.items() if _is_equal_gradients(found, wrong)), ""
    )
    hint = (
        likely[reason][1]
        if reason
        else "Add up len(piece) / len(inputs) times the gradient of each piece."
    )
    raise WrongAnswer(f"the gradient is {reason or 'not that of the whole batch'}", hint=hint)


def _batch_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    loss = nn.functional.mse_loss(model(inputs), targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _is_equal_gradients(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> bool:
    return all(
        one is not None and other is not None and is_tensor_close(one, other, atol=1e-6)
        for one, other in zip(left, right, strict=True)
    )


@exercise
def mended(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a training loop without its three bugs, on 2 real ranks, compared with one
    device.
    """
    found: dict[int, list[Tensor]] = {}

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        found[index] = [torch.as_tensor(each) for each in sent["got"]]

    judge_on_ranks(
        "failures",
        answer,
        judge=judge_rank,
        ranks=2,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what="mended",
    )
    right = train_with_faults(2)
    if all(_is_equal_gradients(found[index], right[index]) for index in range(2)):
        return passing_verdict("2 ranks ended with the weights of one device that saw all samples")
    if not found[0][2].any():
        raise WrongAnswer(
            "the last layer's weight is still zero after 3 steps: a stale parameter",
            hint="Which tensors does the optimizer hold, and since when?",
        )
    names = (
        "first layer's weight",
        "first layer's bias",
        "last layer's weight",
        "last layer's bias",
    )
    apart = [
        name
        for name, one, other in zip(names, found[0], found[1], strict=True)
        if not is_tensor_close(one, other)
    ]
    if apart:
        said = f"the {apart[0]} differs between the ranks: a missed reduction"
        raise WrongAnswer(said, hint="Which parameters are left out of the all-reduce?")
    for divisor, what in (
        (SAMPLES, f"sums divided by {SAMPLES} samples"),
        (1, "sums"),
        (2 * SAMPLES, "too small"),
    ):
        if _is_equal_gradients(found[0], train_with_faults(2, divisor=divisor)[0]):
            said = f"all ranks agree, and their gradients are {what}: a wrong scaling"
            raise WrongAnswer(
                said,
                hint=(
                    "mse_loss is a mean over this rank's samples already. What is left to"
                    " divide by?"
                ),
            )
    raise WrongAnswer(
        "all ranks agree, on other weights than one device's",
        hint="Compare one gradient with one device's.",
    )


@exercise
def rounding_alone(answer: Callable[..., Any]) -> Verdict:
    """Exercise 8: whether a difference is rounding, from its size in float32 and in float64."""
    cases = {
        (3e-6, 4e-15): "In float64 it is a billionth: what shrinks with the digits is rounding.",
        (
            1e-2,
            3e-11,
        ): "Rounding can grow over a long run. What matters is how far it shrinks in float64.",
        (2e-7, 2e-7): "It is small, and float64 does not make it smaller.",
        (
            1e-3,
            0.9e-3,
        ): "A little less is not enough: float64 has 29 bits more, a factor of 500 million.",
        (0.0, 0.0): "No difference is no fault. Do you divide by zero?",
    }
    for (single, double), hint in cases.items():
        right = right_rounding(single, double)
        asked = f"{answer_name(answer)}({single:g}, {double:g})"
        found = call_answer(answer, single, double, in_words=asked)
        if not isinstance(found, bool):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected="True or False")
        if found != right:
            raise WrongAnswer(f"{asked} gave {found}", expected=f"{right}", hint=hint)
    return passing_verdict(f"{len(cases)} differences told apart")


@exercise
def my_indices(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: the samples of a rank in an epoch, from (count, seed, epoch, rank, ranks):
    shuffled, but reproducible.
    """
    count, ranks = 24, 3

    def call_for_rank(epoch: int, rank: int, seed: int = 5) -> list[int]:
        asked = (
            f"{answer_name(answer)}({count}, seed={seed}, epoch={epoch}, rank={rank},"
            f" ranks={ranks})"
        )
        found = call_answer(answer, count, seed, epoch, rank, ranks, in_words=asked)
        try:
            return [int(index) for index in found]
        except Exception:
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}", expected="a list of indices"
            ) from None

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = [call_for_rank(0, rank) for rank in range(ranks)]
        torch.manual_seed(2)
        torch.rand(3)
        random.seed(9)
        if [call_for_rank(0, rank) for rank in range(ranks)] != first:
            hint = "A generator of its own: torch.Generator().manual_seed(...), handed to randperm."
            raise WrongAnswer("a second run with the same seed takes other samples", hint=hint)
    taken = Counter(index for each in first for index in each)
    if set(taken) != set(range(count)) or len(first[0]) * ranks != count:
        twice = [index for index, times in taken.items() if times > 1]
        said = (
            f"sample {twice[0]} goes to two ranks"
            if twice
            else "some samples go to no rank, or not evenly"
        )
        raise WrongAnswer(
            said, hint="All ranks shuffle alike, with the same seed; each then takes its own part."
        )
    if [call_for_rank(1, rank) for rank in range(ranks)] == first:
        raise WrongAnswer(
            "epoch 1 takes the samples in the order of epoch 0",
            hint="Let the epoch change the seed.",
        )
    if [call_for_rank(0, rank, seed=6) for rank in range(ranks)] == first:
        raise WrongAnswer(
            "another seed takes the samples in the same order", hint="Use seed, and epoch."
        )
    return passing_verdict(
        f"{count} samples on {ranks} ranks: shuffled anew in each epoch, and the same tomorrow"
    )
