"""Checks of lab 7, when it breaks."""

import operator
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from labkit.theory import failures as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import (
    Verdict,
    WrongAnswer,
    exercise,
    expect,
    passing_verdict,
    value_text,
)
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks.collectives import SAMPLES, train_all_ranks
from labkit_course.checks.ranks.failures import BATCH_COUNTS
from labkit_course.checks.traffic import expect_traffic

# Numbers of ranks on which an answer has to be right.
SIZES, SMALL_SIZES = (4, 3), (2, 3)
# Of float32 parameters and gradients.
TOLERANCES: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
# Of the network in exercise 7.
PARAMETERS = [*product(("first", "last"), ("weight", "bias"))]
LOST = "RuntimeError: Connection closed by peer"
# How each rank of a run ended: exit status, time, error. torchrun ends ranks with signal 15.
ENDED_RUNS = {
    "one that raised": [(1, 5.4, LOST), (-15, 5.6, ""), (1, 5.1, "ValueError"), (-15, 5.6, "")],
    "one that was killed": [(1, 7.2, LOST), (-9, 7.3, ""), (1, 7.25, LOST), (-15, 7.4, "")],
    "two that raised": [(1, 9.4, "KeyError"), (-15, 9.6, ""), (0, 8.0, ""), (1, 9.1, "ValueError")],
}
CALLS = {"s": ("all_reduce", (8, 8)), "m": ("all_reduce", (8,)), "b": ("broadcast", (8,))}
WAIT_HINT = "does every rank make the same calls?"
_on_ranks = partial(judge_on_ranks, "failures", waiting=WAIT_HINT, name_rank=True)


@exercise
def culprit(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the rank that failed first by itself, from how each rank ended."""
    hint = "Leave out who ended well, was ended by torchrun, or lost a connection. Who was first?"
    for name, rows in ENDED_RUNS.items():
        ends: list[dict[str, Any]] = [
            {"rank": rank, "status": status, "time": time, "error": error}
            for rank, (status, time, error) in enumerate(rows)
        ]
        right, copies = theory.first_failed_rank(ends), [dict(end) for end in ends]
        asked = f"{judge.answer_name(answer)} of a run with {name}"
        found = judge.call_answer(answer, copies, in_words=asked)
        is_rank = isinstance(found, Integral) and found in range(len(ends))
        expect(is_rank, f"{value_text(found)} is no rank", f"rank {right}", hint)
        said = f"in a run with {name} it blames rank {found}, {_excuse_text(ends[found])}"
        expect(found == right, said, f"rank {right}", hint)
    return passing_verdict("3 runs agree")


def _excuse_text(end: dict[str, Any]) -> str:
    # A lost connection is the echo of another rank's failure.
    if end["error"] == LOST:
        return "which only lost a connection"
    if end["status"] == -15:
        return "which torchrun ended"
    return "which ended well" if end["status"] == 0 else "which failed later"


@exercise
def steps_in_common(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: the steps that all real ranks can take, from this rank's number of batches."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        expect(sent["kind"] == "int", f"the result is a {sent['kind']}", "an int", "tensor.item()")

    def judge_all(ranks: int, outputs: list[dict[str, Any]]) -> None:
        got, counts = [output["got"] for output in outputs], [*BATCH_COUNTS[:ranks]]
        most, total, fewest = max(counts), sum(counts), min(counts)
        agree = "The ranks must agree. Which collective lets them?"
        sums = "all_reduce adds up unless op= says otherwise."
        likely = {
            f"{counts} steps: each its own": (counts, agree),
            f"{most} steps: the others run dry": ([most] * ranks, "The fewest set the number."),
            f"{total} steps, which is the sum": ([total] * ranks, sums),
        }
        said = f"of {counts} batches the ranks take"
        shown, right = f"{value_text(got)} steps", [fewest] * ranks
        judge.expect_close(got, right, said, likely, shown, fewest, "ReduceOp.MIN")

    how: dict[str, Any] = {"judge": judge_rank, "judge_all": judge_all, "timeout_s": timeout_s}
    _on_ranks(answer, sizes=SIZES, what="common", **how)
    counts = [*BATCH_COUNTS]
    seen = f"of {counts} batches, all 4 ranks take {min(counts)} steps"
    return passing_verdict(f"{seen}; without the last rank, {min(counts[:3])}")


@exercise
def where_they_part(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the first call in which the ranks' logs differ, and the ranks in the minority."""
    in_turn = "Compare all ranks at place 0, then at place 1, and so on."
    minority = "Name the few, not those that differ from rank 0. Compare shapes as well."
    short = "zip stops at the shortest log. What does the rank do that calls nothing more?"
    first = "The first place counts: what comes after it is a consequence."
    cases = (
        ("four equal logs", "sm sm sm sm", "Return None if no place differs."),
        ("rank 2 in another call", "sm sm sb sm", in_turn),
        ("rank 0 with another shape", "sm ss ss ss", minority),
        ("rank 3 one call short", "sms sms sms sm", short),
        ("two places where they differ", "sss sss smb sss", first),
    )
    # Each word is a rank's log, each letter one of its calls.
    for name, text, hint in cases:
        logs = [[CALLS[letter] for letter in log] for log in text.split()]
        right, asked = theory.first_diverging_call(logs), f"{judge.answer_name(answer)} of {name}"
        found = judge.call_answer(answer, [list(log) for log in logs], in_words=asked)
        said = f"of {name} it gave {value_text(found)}"
        is_pair = isinstance(found, list | tuple) and len(found) == 2
        expect(found is None or is_pair, said, right, "Return the place and a list of ranks.")
        expect((tuple(found) if is_pair else None) == right, said, right, hint)
    return passing_verdict(f"{len(cases)} sets of logs agree")


@exercise
def recorded(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: a collective that is logged before and after, on real ranks."""
    shapes = (3,), (2, 2)
    right = [{"call": "all_reduce", "shape": [*shape], "done": True} for shape in shapes]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        total, largest = sum(range(1, ranks + 1)), ranks
        reduced = [
            torch.full(shape, float(value))
            for shape, value in zip(shapes, (total, largest), strict=True)
        ]
        log, last = sent["log"], [{}, *sent["during"]][-1]
        hint = "Return what the collective returned."
        expect(sent["handle"] != "NoneType", "an asynchronous call returned None", hint=hint)
        said = f"the collective left other numbers: {[each.tolist() for each in sent['reduced']]}"
        hint = "Hand everything on: collective(tensor, *args, **kwargs), once."
        expect(judge.is_close(sent["reduced"], reduced), said, hint=hint)
        size = sum(each.nbytes for each in reduced)
        said = "the numbers are right, but for two calls the rank sends"
        expect_traffic(sent["sent"], {"all_reduce": [2, size]}, said, hint)
        expect(len(log) == 2, f"after two calls the log has {len(log)} entries")
        under_way = "while a call was under way, the log"
        hint = "The call that hangs is the one that matters: append before you call."
        expect(last.get("call") == "all_gather", f"{under_way} did not have it", hint=hint)
        said = f"{under_way} called it done"
        expect(last["done"] is not True, said, hint="Set done after the call.")
        for entry, wanted in zip(log, right, strict=True):
            expect(entry == wanted, f"the log has {entry}", wanted)
        said = "an error of the collective did not come out"
        expect(not sent["swallowed"], said, hint="Catch nothing.")
        said = "a collective that raised an error was called done"
        hint = "Without try and finally, an error leaves before done is set."
        expect(all(entry["done"] is not True for entry in sent["after"]), said, hint=hint)

    how: dict[str, Any] = {"judge": judge_rank, "timeout_s": timeout_s}
    _on_ranks(answer, sizes=SMALL_SIZES, what="recorded", **how)
    seen = "four calls recorded on 2 and 3 ranks: done, asynchronous, under way and failed"
    return passing_verdict(seen)


@exercise
def deal(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 5: samples of each rank, from (lengths, ranks), so that all have similar work."""
    draw = random.Random(7)
    cases = [([8, 1, 1, 1] * 4, 4), ([9, 7, 6, 5, 5, 4, 2, 2], 2), ([10] + [1] * 10, 2)]
    cases.append(([draw.randint(10, 400) for _ in range(64)], 4))
    for lengths, ranks in cases:
        shown = lengths if len(lengths) < 20 else "64 lengths"
        asked = f"{judge.answer_name(answer)}({shown}, ranks={ranks})"
        found = judge.call_answer(answer, list(lengths), ranks, in_words=asked)
        no_lists = f"{asked} gave {value_text(found)}"
        with judge.expect_no_error(no_lists, "a list of indices for each rank"):
            dealt = [[int(index) for index in each] for each in found]
        expect(len(dealt) == ranks, f"{asked} gave {len(dealt)} lists", ranks)
        # Counters also find an index that is no sample's.
        taken, once = Counter(chain.from_iterable(dealt)), Counter(range(len(lengths)))
        hint = "Each index from 0 to len(lengths) - 1, once."
        lost, extra = min(once - taken, default=None), min(taken - once, default=None)
        expect(lost is None, f"{asked} gave sample {lost} to no rank", hint=hint)
        expect(extra is None, f"{asked} gave sample {value_text(extra)} too often", hint=hint)
        # The greedy rule is near the best, so an answer may be a little worse than it.
        balanced = theory.balance_samples(lengths, ranks)
        best = max(sum(lengths[index] for index in each) for each in balanced)
        work = [sum(lengths[index] for index in each) for each in dealt]
        is_equal = len({len(each) for each in dealt}) == 1
        like = "equally many samples" if is_equal else "different numbers of samples"
        rule = ", in the order of the list" if dealt == [sorted(each) for each in dealt] else ""
        load = f"rank {work.index(max(work))} has {max(work)} of {sum(lengths)} to do"
        hint = "The longest first, each to the rank that has least so far."
        is_balanced = max(work) <= 1.05 * best
        expect(is_balanced, f"{like} each{rule}: {load}", f"at most {best}", hint)
    seen = f"{len(cases)} batches dealt, and no rank has much more to do than it must"
    return passing_verdict(seen)


@exercise
def backward_in_pieces(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the gradient of a batch's mean squared error, from the batch's pieces in turn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        inputs, targets = torch.randn(10, 6), torch.randn(10, 2)
    # 10 samples make pieces of 3, 3, 2 and 2, so the plain mean of their gradients is wrong.
    pieces = 4
    parts = zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True)
    each = [_run_backward(model, partial(_train_on, model, *part))[0] for part in parts]
    whole, whole_held = _run_backward(model, partial(_train_on, model, inputs, targets))
    asked = f"{judge.answer_name(answer)}(model, inputs, targets, pieces={pieces})"
    copies = (inputs.clone(), targets.clone())
    call = partial(judge.call_answer, answer, model, *copies, pieces, in_words=asked)
    found, held = _run_backward(model, call)
    hint = "Call backward() on the loss of each piece."
    expect(all(grad is not None for grad in found), "a parameter has no gradient", hint=hint)
    added = [sum(place) for place in zip(*each, strict=True)]
    weigh = "Each piece is a part of the batch: weigh it."
    shorter = "the plain mean of the pieces, though some are shorter"
    stays = "Gradients add up in .grad until zero_grad."
    likely = {
        f"{pieces} means added up, {pieces} times too much": (added, weigh),
        shorter: ([g / pieces for g in added], "A piece of 3 samples out of 10 counts 3 / 10."),
        "the last piece's gradient alone": (each[-1], stays),
        "sums over samples, not a mean": ([10 * grad for grad in whole], "Divide by the batch."),
    }
    weights = "Add up len(piece) / len(inputs) times the gradient of each piece."
    other = "not that of the whole batch"
    how: dict[str, Any] = {"hint": weights, **TOLERANCES}
    judge.expect_close(found, whole, "the gradient is", likely, other, **how)
    share = f"{held / whole_held:.0%}"
    said = f"the gradient is right, and {share} of the whole batch's activations were held at once"
    hint = "Each piece needs a backward pass of its own, before the next piece computes."
    expect(held <= 0.6 * whole_held, said, hint=hint)
    return passing_verdict(f"the same gradient, with {share} of the activations")


def _train_on(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    nn.functional.mse_loss(model(inputs), targets).backward()


def _run_backward(model: nn.Module, backward: Callable[[], Any]) -> tuple[list[Any], int]:
    """Return the gradients that ``backward`` leaves, and the most elements held meanwhile."""
    model.zero_grad()
    counter = ActivationCounter(model)
    unpack = operator.attrgetter("tensor")
    with torch.autograd.graph.saved_tensors_hooks(counter.pack_tensor, unpack):
        backward()
    return [parameter.grad for parameter in model.parameters()], counter.most


class ActivationCounter:
    """Counts the elements, except parameters, that autograd keeps for backward passes."""

    def __init__(self, model: nn.Module) -> None:
        self.held, self.most = 0, 0
        self._parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack_tensor(self, tensor: Tensor) -> "_KeptTensor":
        """Count a tensor for as long as autograd keeps it."""
        # Autograd drops this object, and with it the count, once backward has used it.
        kept = _KeptTensor(tensor)
        if tensor.untyped_storage().data_ptr() not in self._parameters:
            self._add_elements(tensor.numel())
            weakref.finalize(kept, self._add_elements, -tensor.numel())
        return kept

    def _add_elements(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)


@dataclass(eq=False)
class _KeptTensor:
    tensor: Tensor


@exercise
def mended(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a training loop without its three bugs, on real ranks."""

    def judge_all(ranks: int, outputs: list[dict[str, Any]]) -> None:
        _judge_trained(ranks, [output["got"] for output in outputs])

    _on_ranks(answer, judge_all=judge_all, sizes=SMALL_SIZES, timeout_s=timeout_s, what="mended")
    seen = "2 and 3 ranks ended with the weights of one device that saw all samples"
    return passing_verdict(seen)


def _judge_trained(ranks: int, found: list[list[Tensor]]) -> None:
    """Raise WrongAnswer, with the likely bug, unless all ranks' parameters are one device's."""
    train = partial(train_all_ranks, ranks, zero_last=True)
    right, first = train(), found[0]
    for parameters in found:
        said = f"the model now has {len(parameters)} parameters"
        expect(len(parameters) == len(right[0]), said, len(right[0]))
        for (layer, part), got, wanted in zip(PARAMETERS, parameters, right[0], strict=True):
            seen, form = (f"{each.dtype} of shape {(*each.shape,)}" for each in (got, wanted))
            expect(seen == form, f"the {layer} layer's {part} is {seen}", form)
    if judge.is_close(found, right, **TOLERANCES):
        return
    # A stale parameter also differs from one device's, so the faults are looked for one by one.
    said = "the last layer's weight is still zero after 3 steps: a stale parameter"
    hint = "Which tensors does the optimizer hold, and since when?"
    expect(bool(first[2].any()), said, hint=hint)
    hint = "Which parameters are left out of the all-reduce?"
    for (layer, part), one, *others in zip(PARAMETERS, *found, strict=True):
        said = f"the {layer} layer's {part} differs between the ranks: a missed reduction"
        expect(judge.is_close(others, [one] * len(others), **TOLERANCES), said, hint=hint)
    # The right divisor is the number of ranks.
    divisors = {f"divided by {each}": each for each in SMALL_SIZES if each != ranks}
    divisors |= {f"divided by {SAMPLES} samples": SAMPLES, "not divided": 1}
    divisors |= {f"divided by {ranks * SAMPLES} samples": ranks * SAMPLES}
    hint = "mse_loss is a mean over this rank's samples already. What is left to divide by?"
    for words, divisor in divisors.items():
        said = f"all ranks agree, and their gradients are sums {words}: a wrong scaling"
        is_scaled = judge.is_close(first, train(factor=ranks / divisor)[0], **TOLERANCES)
        expect(not is_scaled, said, hint=hint)
    hint = "Compare one gradient with one device's."
    raise WrongAnswer("all ranks agree, on other weights than one device's", hint=hint)


@exercise
def rounding_alone(answer: Callable[..., Any]) -> Verdict:
    """Exercise 8: whether a difference is rounding, from its size in float32 and in float64."""
    grows = "Rounding can grow over a long run. What matters is how far it shrinks in float64."
    bits = "A little less is not enough: float64 has 29 bits more, a factor of 500 million."
    cases = [
        (3e-6, 4e-15, "In float64 it is a billionth: what shrinks with the digits is rounding."),
        (1e-2, 3e-11, grows),
        (2e-7, 2e-7, "It is small, and float64 does not make it smaller."),
        (1e-3, 0.9e-3, bits),
        (0.0, 0.0, "No difference is no fault. Do you divide by zero?"),
    ]
    judge.judge_cases(answer, theory.is_only_rounding, cases)
    return passing_verdict(f"{len(cases)} differences told apart")


@exercise
def my_indices(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: a rank's samples in an epoch, from (count, seed, epoch, rank, ranks)."""
    count, ranks = 24, 3

    def call_on_ranks(epoch: int, seed: int) -> list[list[int]]:
        each = []
        for rank in range(ranks):
            given = f"{count}, seed={seed}, epoch={epoch}, rank={rank}, ranks={ranks}"
            asked = f"{judge.answer_name(answer)}({given})"
            found = judge.call_answer(answer, count, seed, epoch, rank, ranks, in_words=asked)
            said = f"{asked} gave {value_text(found)}"
            with judge.expect_no_error(said, "a list of indices"):
                each.append([int(index) for index in found])
        return each

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = call_on_ranks(epoch=0, seed=5)
        # An answer that uses a global generator depends on what ran before.
        torch.manual_seed(2)
        torch.rand(3)
        random.seed(9)
        said = "a second run with the same seed takes other samples"
        hint = "A generator of its own: torch.Generator().manual_seed(...), handed to randperm."
        expect(call_on_ranks(epoch=0, seed=5) == first, said, hint=hint)
    hint = "All ranks shuffle alike, with the same seed; each then takes its own part."
    taken = Counter(chain.from_iterable(first))
    for index, times in taken.items():
        expect(times == 1, f"sample {index} goes to two ranks", hint=hint)
    is_even = set(taken) == set(range(count)) and len(first[0]) * ranks == count
    expect(is_even, "some samples go to no rank, or not evenly", hint=hint)
    said = "epoch 1 takes the samples in the order of epoch 0"
    expect(call_on_ranks(epoch=1, seed=5) != first, said, hint="Let the epoch change the seed.")
    said = "another seed takes the samples in the same order"
    expect(call_on_ranks(epoch=0, seed=6) != first, said, hint="Use seed, and epoch.")
    seen = f"{count} samples on {ranks} ranks: shuffled anew in each epoch, and the same tomorrow"
    return passing_verdict(seen)
