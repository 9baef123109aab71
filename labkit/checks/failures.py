"""Checks of lab 7, when it breaks."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.checks.ask import Verdict, Wrong, call, exercise, name_of, passed, same, shown
from labkit.checks.on_ranks import on_ranks
from labkit.checks.ranks.failures import BATCHES, SAMPLES, trained
from labkit.theory.failures import culprit as right_culprit
from labkit.theory.failures import deal as right_deal
from labkit.theory.failures import rounding_alone as right_rounding
from labkit.theory.failures import where_they_part as right_part

RANKS = 4
WAITING = "does every rank make the same calls?"
LOST = "RuntimeError: Connection closed by peer"
SUM, LARGEST, BROADCAST = ("all_reduce", (8, 8)), ("all_reduce", (8,)), ("broadcast", (8,))


@exercise
def culprit(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: the rank that failed first by itself, from how each rank ended."""
    raised = [_end(0, 1, 5.4, LOST), _end(1, -15, 5.6), _end(2, 1, 5.1, "ValueError: no label"), _end(3, -15, 5.6)]
    killed = [_end(0, 1, 7.2, LOST), _end(1, -9, 7.3), _end(2, 1, 7.25, LOST), _end(3, -15, 7.4)]
    two = [_end(0, 1, 9.4, "KeyError: 'lr'"), _end(1, -15, 9.6), _end(2, 0, 8.0), _end(3, 1, 9.1, "ValueError: NaN")]
    for name, ends in {"one that raised": raised, "one that was killed": killed, "two that raised": two}.items():
        right = right_culprit(ends)
        found = call(answer, [dict(end) for end in ends], in_words=f"{name_of(answer)} of a run with {name}")
        if found == right:
            continue
        end = next((end for end in ends if end["rank"] == found), None)
        hint = "Leave out who ended well, who was ended by torchrun, and who lost a connection. Then who was first?"
        said = f"in a run with {name} it blames rank {found}, {_excuse(end)}" if end else f"{shown(found)} is no rank"
        raise Wrong(said, expected=f"expected rank {right}", hint=hint)
    return passed("3 runs agree")


def _end(rank: int, status: int, time: float, error: str = "") -> dict[str, Any]:
    return {"rank": rank, "status": status, "time": time, "error": error}


def _excuse(end: dict[str, Any]) -> str:
    """Why a rank is not to blame."""
    if end["error"] == LOST:
        return "which only lost a connection"
    if end["status"] == -15:
        return "which torchrun ended"
    return "which ended well" if end["status"] == 0 else "which failed later"


@exercise
def steps_in_common(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: how many steps every rank can take, from this rank's number of batches, on 4 real ranks."""
    found: dict[int, Any] = {}

    def judge(index: int, sent: dict[str, Any]) -> None:
        if sent["kind"] != "int":
            raise Wrong(f"rank {index} got a {sent['kind']}", expected="expected an int", hint="tensor.item()")
        found[index] = sent["got"]

    on_ranks("failures", answer, judge=judge, ranks=RANKS, timeout_s=timeout_s, waiting=WAITING, what="common")
    got, had = [found[index] for index in range(RANKS)], f"of {list(BATCHES)} batches the ranks take"
    if got == list(BATCHES):
        raise Wrong(f"{had} {got} steps: each its own", hint="The ranks must agree. Which collective lets them?")
    if got == [max(BATCHES)] * RANKS:
        raise Wrong(f"{had} {got[0]} steps: the others run dry", hint="Whoever has the fewest sets the number.")
    if got == [sum(BATCHES)] * RANKS:
        raise Wrong(f"{had} {got[0]} steps, which is the sum", hint="all_reduce adds up unless op= says otherwise.")
    if got != [min(BATCHES)] * RANKS:
        raise Wrong(f"{had} {got} steps", expected=f"expected {min(BATCHES)}", hint="ReduceOp.MIN")
    return passed(f"of {list(BATCHES)} batches, all {RANKS} ranks take {min(BATCHES)} steps")


@exercise
def where_they_part(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the first call in which ranks differ, and the few that do, from each rank's calls in order."""
    cases: dict[str, list[list[Any]]] = {
        "four equal logs": [[SUM, LARGEST]] * 4,
        "rank 2 in another call": [[SUM, LARGEST], [SUM, LARGEST], [SUM, BROADCAST], [SUM, LARGEST]],
        "rank 0 with another shape": [[SUM, LARGEST], [SUM, SUM], [SUM, SUM], [SUM, SUM]],
        "rank 3 one call short": [[SUM, LARGEST, SUM]] * 3 + [[SUM, LARGEST]],
        "two places where they differ": [[SUM, SUM, SUM], [SUM, SUM, SUM], [SUM, LARGEST, BROADCAST], [SUM, SUM, SUM]],
    }
    hints = {
        "four equal logs": "Return None if no place differs.",
        "rank 2 in another call": "Compare all ranks at place 0, then at place 1, and so on.",
        "rank 0 with another shape": "Name the few, not those that differ from rank 0. Compare shapes as well.",
        "rank 3 one call short": "zip stops at the shortest log. What does the rank do that calls nothing more?",
        "two places where they differ": "The first place counts: what comes after it is a consequence.",
    }
    for name, logs in cases.items():
        right = right_part(logs)
        found = call(answer, [list(log) for log in logs], in_words=f"{name_of(answer)} of {name}")
        if (tuple(found) if isinstance(found, list) else found) != right:
            raise Wrong(f"of {name} it gave {shown(found)}", expected=f"expected {right}", hint=hints[name])
    return passed(f"{len(cases)} sets of logs agree")


@exercise
def recorded(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: a collective that leaves a trace in a log, on 2 real ranks."""

    def judge(index: int, sent: dict[str, Any]) -> None:
        two = [{"call": "all_reduce", "shape": shape, "done": True} for shape in ([3], [2, 2])]
        if sent["handle"] == "NoneType":
            raise Wrong(f"rank {index} got None from an asynchronous call", hint="Return what the collective returned.")
        if not same(sent["sums"][0], torch.full((3,), 2.0)) or not same(sent["sums"][1], torch.full((2, 2), 2.0)):
            raise Wrong(
                f"on rank {index} the collective left other numbers: {[each.tolist() for each in sent['sums']]}",
                hint="Hand everything on: collective(tensor, *args, **kwargs), once.",
            )
        last = sent["during"][-1:]
        if not sent["called"] or len(sent["log"]) != 2:
            raise Wrong(f"after two calls the log of rank {index} has {len(sent['log'])} entries")
        if not last or last[0]["call"] != "all_gather":
            raise Wrong(
                f"while a call was under way, rank {index}'s log did not have it",
                hint="In a hang the call that matters is the one that never returns: append before you call.",
            )
        if last[0]["done"]:
            raise Wrong(
                f"while a call was under way, rank {index}'s log called it done", hint="Set done after the call."
            )
        if sent["log"] != two:
            first = next(pair for pair in zip(sent["log"], two, strict=True) if pair[0] != pair[1])
            raise Wrong(f"rank {index} logged {first[0]}", expected=f"expected {first[1]}")
        if sent["swallowed"]:
            raise Wrong(f"on rank {index} an error of the collective did not come out", hint="Catch nothing.")
        if sent["after"] and sent["after"][0]["done"]:
            raise Wrong(
                f"rank {index} called a collective done that raised an error",
                hint="Without try and finally, an error leaves before done is set.",
            )

    on_ranks("failures", answer, judge=judge, ranks=2, timeout_s=timeout_s, waiting=WAITING, what="recorded")
    return passed("four calls recorded on 2 ranks: done, asynchronous, under way and failed")


@exercise
def deal(answer: Callable[..., list[list[int]]]) -> Verdict:
    """Exercise 5: which samples each rank takes, from (lengths, ranks), so that all have about as much to do."""
    draw = random.Random(7)
    cases = [([8, 1, 1, 1] * 4, 4), ([9, 7, 6, 5, 5, 4, 2, 2], 2), ([10] + [1] * 10, 2)]
    cases.append(([draw.randint(10, 400) for _ in range(64)], 4))
    for lengths, ranks in cases:
        asked = f"{name_of(answer)}({lengths if len(lengths) < 20 else '64 lengths'}, ranks={ranks})"
        found = call(answer, list(lengths), ranks, in_words=asked)
        try:
            dealt = [[int(index) for index in each] for each in found]
        except Exception:
            raise Wrong(f"{asked} gave {shown(found)}", expected="expected a list of indices for each rank") from None
        if len(dealt) != ranks:
            raise Wrong(f"{asked} gave {len(dealt)} lists", expected=f"expected {ranks}")
        taken = Counter(index for each in dealt for index in each)
        if lost := [index for index in range(len(lengths)) if index not in taken]:
            raise Wrong(f"{asked} gave sample {lost[0]} to nobody", hint="Each index from 0 to len(lengths) - 1, once.")
        if twice := [index for index, times in taken.items() if times > 1]:
            raise Wrong(f"{asked} gave sample {twice[0]} to two", hint="Each index from 0 to len(lengths) - 1, once.")
        work = [sum(lengths[index] for index in each) for each in dealt]
        best = max(sum(lengths[index] for index in each) for each in right_deal(lengths, ranks))
        if max(work) > 1.05 * best:
            counts = {len(each) for each in dealt}
            rule = ", in the order of the list" if dealt == [sorted(each) for each in dealt] else ""
            like = "equally many samples" if len(counts) == 1 else "different numbers of samples"
            said = f"{like} each{rule}: rank {work.index(max(work))} has {max(work)} of {sum(lengths)} to do"
            hint = "The longest first, each to the rank that has least so far."
            raise Wrong(said, expected=f"expected at most {best}", hint=hint)
    return passed(f"{len(cases)} batches dealt, and no rank has much more to do than it must")


@exercise
def backward_in_pieces(answer: Callable[..., Any]) -> Verdict:
    """Exercise 6: the gradient of a batch's mean squared error, from pieces of the batch one after another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        inputs, targets = torch.randn(10, 6), torch.randn(10, 2)
    kept = Activations(model)
    gradients, pieces = {}, 4
    for how in ("whole", "pieces"):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            if how == "whole":
                nn.functional.mse_loss(model(inputs), targets).backward()
                whole, kept.most = kept.most, 0
            else:
                asked = f"{name_of(answer)}(model, inputs, targets, pieces={pieces})"
                call(answer, model, inputs.clone(), targets.clone(), pieces, in_words=asked)
        gradients[how] = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    _hold_gradients(gradients["pieces"], gradients["whole"], inputs, targets, model, pieces)
    if kept.most > 0.6 * whole:
        said = f"the gradient is right, and {kept.most / whole:.0%} of the whole batch's activations were held at once"
        raise Wrong(said, hint="Each piece needs a backward pass of its own, before the next piece computes.")
    return passed(f"the same gradient, with {kept.most / whole:.0%} of the activations")


class Activations:
    """How many numbers autograd holds for backward passes of a model, its parameters left out, and the most so far."""

    def __init__(self, model: nn.Module) -> None:
        self.held, self.most = 0, 0
        self._parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(self, tensor: Tensor) -> Any:
        """Called with each tensor that autograd keeps."""
        is_parameter = tensor.untyped_storage().data_ptr() in self._parameters
        return _Kept(tensor, self, 0 if is_parameter else tensor.numel())

    def unpack(self, kept: Any) -> Tensor:
        """Called when a backward pass wants it."""
        return kept.tensor


class _Kept:
    """One tensor, as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, all_of_them: Activations, size: int):
        self.tensor, self._all, self._size = tensor, all_of_them, size
        all_of_them.held += size
        all_of_them.most = max(all_of_them.most, all_of_them.held)

    def __del__(self) -> None:
        self._all.held -= self._size


def _hold_gradients(
    found: Sequence[Tensor | None],
    right: Sequence[Tensor | None],
    inputs: Tensor,
    targets: Tensor,
    model: nn.Module,
    pieces: int,
) -> None:
    """Raise Wrong, with the likely reason, unless these are the gradients of the whole batch."""
    if any(each is None for each in found):
        raise Wrong("a parameter has no gradient", hint="Call backward() on the loss of each piece.")
    if _agree(found, right):
        return
    parts = list(zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True))
    each = [_gradient(model, *part) for part in parts]
    added = [sum(place[1:], place[0]) for place in zip(*each, strict=True)]
    likely = {
        f"{pieces} means added up, {pieces} times too much": (added, "Each piece is a part of the batch: weigh it."),
        "the plain mean of the pieces, though some are shorter": (
            [place / pieces for place in added],
            "A piece of 3 samples out of 10 counts 3 / 10.",
        ),
        "the last piece's gradient alone": (each[-1], "Gradients add up in .grad until zero_grad."),
        "sums over samples, not a mean": ([place * 10 for place in right if place is not None], "Divide by the batch."),
    }
    reason = next((name for name, (wrong, _) in likely.items() if _agree(found, wrong)), "")
    hint = likely[reason][1] if reason else "Add up len(piece) / len(inputs) times the gradient of each piece."
    raise Wrong(f"the gradient is {reason or 'not that of the whole batch'}", hint=hint)


def _gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    loss = nn.functional.mse_loss(model(inputs), targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _agree(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> bool:
    return all(
        one is not None and other is not None and same(one, other, atol=1e-6)
        for one, other in zip(left, right, strict=True)
    )


@exercise
def mended(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 7: a training loop without its three faults, on 2 real ranks, held against one device."""
    found: dict[int, list[Tensor]] = {}

    def judge(index: int, sent: dict[str, Any]) -> None:
        found[index] = [torch.as_tensor(each) for each in sent["got"]]

    on_ranks("failures", answer, judge=judge, ranks=2, timeout_s=timeout_s, waiting=WAITING, what="mended")
    right = trained(2)
    if all(_agree(found[index], right[index]) for index in range(2)):
        return passed("2 ranks ended with the weights of one device that saw all samples")
    if not found[0][2].any():
        raise Wrong(
            "the last layer's weight is still zero after 3 steps: a stale parameter",
            hint="Which tensors does the optimizer hold, and since when?",
        )
    names = ("first layer's weight", "first layer's bias", "last layer's weight", "last layer's bias")
    apart = [name for name, one, other in zip(names, found[0], found[1], strict=True) if not same(one, other)]
    if apart:
        said = f"the {apart[0]} differs between the ranks: a missed reduction"
        raise Wrong(said, hint="Which parameters are left out of the all-reduce?")
    for divisor, what in ((SAMPLES, f"sums divided by {SAMPLES} samples"), (1, "sums"), (2 * SAMPLES, "too small")):
        if _agree(found[0], trained(2, divisor=divisor)[0]):
            said = f"all ranks agree, and their gradients are {what}: a wrong scaling"
            raise Wrong(said, hint="mse_loss is a mean over this rank's samples already. What is left to divide by?")
    raise Wrong("all ranks agree, on other weights than one device's", hint="Compare one gradient with one device's.")


@exercise
def rounding_alone(answer: Callable[..., Any]) -> Verdict:
    """Exercise 8: whether a difference is rounding, from its size in float32 and in float64."""
    cases = {
        (3e-6, 4e-15): "In float64 it is a billionth: what shrinks with the digits is rounding.",
        (1e-2, 3e-11): "Rounding can grow over a long run. What matters is how far it shrinks in float64.",
        (2e-7, 2e-7): "It is small, and float64 does not make it smaller.",
        (1e-3, 0.9e-3): "A little less is not enough: float64 has 29 bits more, a factor of 500 million.",
        (0.0, 0.0): "No difference is no fault. Do you divide by zero?",
    }
    for (single, double), hint in cases.items():
        right = right_rounding(single, double)
        asked = f"{name_of(answer)}({single:g}, {double:g})"
        found = call(answer, single, double, in_words=asked)
        if not isinstance(found, bool):
            raise Wrong(f"{asked} gave {shown(found)}", expected="expected True or False")
        if found != right:
            raise Wrong(f"{asked} gave {found}", expected=f"expected {right}", hint=hint)
    return passed(f"{len(cases)} differences told apart")


@exercise
def my_indices(answer: Callable[..., Any]) -> Verdict:
    """Exercise 9: the samples of a rank in an epoch, from (count, seed, epoch, rank, ranks): shuffled, yet certain."""
    count, ranks = 24, 3

    def drawn(epoch: int, rank: int, seed: int = 5) -> list[int]:
        asked = f"{name_of(answer)}({count}, seed={seed}, epoch={epoch}, rank={rank}, ranks={ranks})"
        found = call(answer, count, seed, epoch, rank, ranks, in_words=asked)
        try:
            return [int(index) for index in found]
        except Exception:
            raise Wrong(f"{asked} gave {shown(found)}", expected="expected a list of indices") from None

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = [drawn(0, rank) for rank in range(ranks)]
        torch.manual_seed(2)
        torch.rand(3)
        random.seed(9)
        if [drawn(0, rank) for rank in range(ranks)] != first:
            hint = "A generator of its own: torch.Generator().manual_seed(...), handed to randperm."
            raise Wrong("a second run with the same seed takes other samples", hint=hint)
    taken = Counter(index for each in first for index in each)
    if set(taken) != set(range(count)) or len(first[0]) * ranks != count:
        twice = [index for index, times in taken.items() if times > 1]
        said = f"sample {twice[0]} goes to two ranks" if twice else "some samples go to no rank, or not evenly"
        raise Wrong(said, hint="All ranks shuffle alike, with the same seed; each then takes its own part.")
    if [drawn(1, rank) for rank in range(ranks)] == first:
        raise Wrong("epoch 1 takes the samples in the order of epoch 0", hint="Let the epoch change the seed.")
    if [drawn(0, rank, seed=6) for rank in range(ranks)] == first:
        raise Wrong("another seed takes the samples in the same order", hint="Use seed, and epoch.")
    return passed(f"{count} samples on {ranks} ranks: shuffled anew in each epoch, and the same tomorrow")
