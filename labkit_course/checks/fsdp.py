"""Checks of lab 2, sharding parameters with FSDP."""

import copy
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import labkit
from labkit.parallel.small_fsdp import flatten_tensors, split_flat
from labkit.theory import fsdp as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import fsdp as ranks_fsdp
from labkit_course.checks.traffic import expect_traffic

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
# Of float32 tensors that ranks and one device compute.
TOLERANCES: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
WAIT_HINT = "does every rank call the same collectives, in the same order?"
EMPTY_BUFFER_HINT = "parameters were used while their buffer was empty: gather before both passes"
# The first two kill the process: torch reads memory that is gone, and gloo aborts.
ERROR_HINTS = {
    "SIGSEGV": EMPTY_BUFFER_HINT,
    "SIGABRT": f"the ranks sent tensors of different sizes to each other: {WAIT_HINT}",
    "out of bounds for storage": EMPTY_BUFFER_HINT,
    "linear(): argument 'input'": "a hook returned something, and it replaced the inputs",
}
judge_on_group = partial(judge_on_ranks, "fsdp", sizes=SIZES, waiting=WAIT_HINT, hints=ERROR_HINTS)


@exercise
def fewest_ranks(answer: Callable[..., int]) -> Verdict:
    """Exercise 1: ranks that training needs, from (parameters, largest_unit, memory_bytes).

    A rank holds its share of 16 bytes a parameter, and the largest unit's parameters and gradients.
    The number is 0 if no ranks are enough.
    """
    share = "More ranks make the shares smaller: 16 bytes a parameter, by the number of ranks."
    unit = "At the peak the largest unit is whole: 4 bytes a parameter, and 4 for its gradient."
    whole = "A part of a rank is no rank: round up."
    none = "More ranks do not make a whole unit smaller."
    cases = [
        (1000, 100, 16_800, share),
        (1000, 100, 8_800, share),
        (1000, 300, 5_600, unit),
        (1000, 400, 9_000, whole),
        (1000, 1000, 9_000, unit),
        (1000, 1000, 7_000, none),
        (1000, 1000, 8_000, none),
        (7 * 10**9, 2 * 10**8, 80 * 10**9, whole),
    ]

    def right_count(parameters: int, largest_unit: int, memory_bytes: int) -> int:
        left = memory_bytes - 2 * theory.FLOAT_BYTES * largest_unit
        return -(-4 * theory.FLOAT_BYTES * parameters // left) if left > 0 else 0

    return judge.judge_cases(answer, right_count, cases)


@exercise
def shard_parameters(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: cut a unit's parameters, and point them at an empty buffer, on real ranks."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for place, unit in enumerate(ranks_fsdp.two_units()):
            whole = flatten_tensors(unit.parameters(), ranks).detach()
            where = f"on rank {index}, for unit {place}"
            said = f"{where} you return {sent['returned'][place]}"
            pair = "a pair: the shard, an nn.Parameter, and the row, a tensor"
            judge.expect(sent["returned"][place] == "Parameter, Tensor", said, pair)
            said = f"{where} the shard lies in the row's memory, which you give back"
            judge.expect(
                not sent["shared"], said, hint="A shard needs memory of its own: clone it."
            )
            _judge_share(index, place, sent["shards"][place], whole.chunk(ranks))
            shape = tuple(sent["shapes"][place])
            hint = "The row holds all of the unit's numbers, and zeros at the end."
            judge.expect(
                shape == tuple(whole.shape), f"{where} the row has shape {shape}", whole.shape, hint
            )
            said = f"{where} {sent['held'][place]} bytes of whole parameters are still there"
            judge.expect(not sent["held"][place], said, 0, "Resize the row's storage to 0.")
            said = f"{where}, once the row is filled again, the unit's parameters are"
            hint = "Each parameter is a view of its piece: parameter.data = piece.view(its shape)."
            right = [each.detach() for each in unit.parameters()]
            judge.expect_close(sent["refilled"][place], right, said, {}, "others", hint=hint)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="shard")
    return judge.passing_verdict(f"{SIZES_TEXT} ranks keep their part, and no more")


@exercise
def gather_and_free(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 3: gather a unit before both passes and free it after the first, on real ranks."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        model = nn.Sequential(*ranks_fsdp.two_units())
        inputs, where = ranks_fsdp.rank_batch(index)[0], f"on rank {index},"
        said = f"{where} autograd records {', '.join({*sent['recorded']})} of the shard"
        hint = "Send shard.detach(): with the shard itself, gloo stops in a real program."
        judge.expect(not sent["recorded"], said, hint=hint)
        said, other = f"{where} the output of the forward pass is", "another than one device's"
        hint = "The buffer must hold every rank's share, in the order of the ranks."
        judge.expect_close(
            sent["outputs"][0], model(inputs), said, {}, other, hint=hint, **TOLERANCES
        )
        _expect_freed(sent["held"]["forward"], "after its forward pass")
        own = _flat_gradients(index, ranks)
        for place, gradient in enumerate(sent["gradients"]):
            said = f"{where} the gradients of unit {place} are"
            hint = "Gather once more before the unit's backward pass."
            judge.expect_close(gradient, own[place], said, {}, "wrong", hint=hint, **TOLERANCES)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        said = f"{where} the output after the shard has changed is"
        hint = "Gather what the shard holds now: the optimizer changes it."
        judge.expect_close(
            sent["outputs"][1], model(inputs), said, {}, other, hint=hint, **TOLERANCES
        )
        for place, gradient in enumerate(sent["again"]):
            right = _flat_gradients(index, ranks, model)[place]
            said = f"{where} in a second step the gradients of unit {place} are"
            judge.expect_close(gradient, right, said, {}, "wrong", hint=hint, **TOLERANCES)
        gathered = sum(row.nbytes for row in own) // ranks
        calls = {"all_gather": [4, 2 * gathered]}
        said = f"{where} the numbers are right, but a step of two units sends"
        hint = "A unit is gathered for its forward and for its backward pass."
        expect_traffic(sent["sent"], calls, said, hint)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="gather")
    return judge.passing_verdict(f"{SIZES_TEXT} ranks compute as one device, with what they gather")


@exercise
def reduce_and_free(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: average a unit's gradients into the shard; two steps agree with one device."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        if "early" in sent:
            step, ready, count = sent["early"]
            said = f"in step {step} your hook reduced after {ready} of a unit's {count} gradients"
            hint = "Wait until the last one is there: they come in the order of the backward pass."
            if step > 1:
                hint = "Count from zero again after each reduce-scatter."
            raise judge.WrongAnswer(said, hint=hint)
        model, after = (nn.Sequential(*ranks_fsdp.two_units()) for _ in range(2))
        whole = [flatten_tensors(unit.parameters(), ranks).detach() for unit in model]
        own = [_flat_gradients(rank, ranks) for rank in range(ranks)]
        mean = [torch.stack(each).mean(dim=0) for each in zip(*own, strict=True)]
        for unit, gradient in zip(after, mean, strict=True):
            parameters = [*unit.parameters()]
            for parameter, piece in zip(parameters, split_flat(gradient, parameters), strict=True):
                parameter.data -= ranks_fsdp.RATE * piece
        where, inputs = f"on rank {index},", ranks_fsdp.rank_batch(index)[0]
        # In the order of a step, because the first difference explains the later ones.
        held, first, second = sent["held"], model(inputs), after(inputs)
        said, other = f"{where} the output of the forward pass is", "another than one device's"
        hint = "The buffer must hold every rank's share, in the order of the ranks."
        judge.expect_close(sent["outputs"][0], first, said, {}, other, hint=hint, **TOLERANCES)
        # Only the first unit: nothing is noted between the last one's passes.
        _expect_freed(held["forward"], "after its forward pass")
        for place, gradient in enumerate(sent["gradients"]):
            _judge_gradient(ranks, index, place, gradient, mean[place], own[index][place])
        for place, left in enumerate(sent["left"]):
            said = f"unit {place} still has {left} bytes of whole gradients after the backward pass"
            judge.expect(not left, said, 0, "Set .grad of the unit's own parameters to None.")
        _expect_freed(held["after"], "after the backward pass")
        said = f"{where} the output after an update is"
        likely = {"that of the parameters before the update": first}
        hint = "Gather what the shard holds now: the optimizer has changed it."
        judge.expect_close(sent["outputs"][1], second, said, likely, other, hint=hint, **TOLERANCES)
        everyone = [_flat_gradients(rank, ranks, after) for rank in range(ranks)]
        for place, got in enumerate(sent["again"]):
            right = torch.stack([own[place] for own in everyone]).mean(dim=0).chunk(ranks)[index]
            said = f"{where} in a second step the gradient of unit {place}'s shard is"
            hint = "Does the hook count from the start again?"
            judge.expect(got is not None, f"{said} None", hint=hint)
            judge.expect_close(got, right, said, {}, "wrong", hint=hint, **TOLERANCES)
        size = sum(row.nbytes for row in whole)
        calls = {"all_gather": [4, 2 * size // ranks], "reduce_scatter": [2, size]}
        said = f"{where} the numbers are right, but a step of two units sends"
        hint = "A unit is gathered for its forward and its backward pass, and reduced once."
        expect_traffic(sent["sent"], calls, said, hint)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="reduce")
    passed = "and whole parameters are held only where they are used"
    return judge.passing_verdict(f"equal to one device on {SIZES_TEXT} ranks, {passed}")


def _flat_gradients(index: int, ranks: int, model: nn.Sequential | None = None) -> list[Tensor]:
    """Return the flat gradients of each unit on one device, for one rank's batch."""
    units = ranks_fsdp.two_units() if model is None else copy.deepcopy([*model])
    inputs, targets = ranks_fsdp.rank_batch(index)
    (nn.Sequential(*units)(inputs) - targets).square().mean().backward()
    gradients = [[p.grad for p in unit.parameters() if p.grad is not None] for unit in units]
    return [flatten_tensors(each, ranks) for each in gradients]


def _judge_share(index: int, place: int, shard: Any, parts: Sequence[Tensor]) -> None:
    """Expect this rank's part of a unit; ``shard`` is the name of any type but a parameter."""
    unit = f"on rank {index}, what you return for unit {place}"
    hint = "Return the shard; an optimizer will train it."
    judge.expect(isinstance(shard, Tensor), f"{unit} is a {shard}, no nn.Parameter", hint=hint)
    shape, right = tuple(shard.shape), tuple(parts[0].shape)
    hint = "All of the unit's numbers in one row, zeros at the end so that the ranks divide them."
    if shape == (right[0] + 1,):
        hint = "Too many zeros: a row whose length the ranks divide already needs none."
    judge.expect(shape == right, f"{unit} has shape {shape}", right, hint)
    likely = {f"rank {rank}'s part": part for rank, part in enumerate(parts)}
    hint = "Flatten unit.parameters() in their order; rank r keeps part r."
    said, other = f"{unit} is", "not its part"
    judge.expect_close(shard, parts[index], said, likely, other, hint=hint, **TOLERANCES)


def _expect_freed(held: Sequence[int], moment: str) -> None:
    for place, amount in enumerate(held):
        said = f"{moment}, unit {place} still holds {amount} bytes of whole parameters"
        judge.expect(not amount, said, 0, "Resize the storage of the unit's buffer to 0.")


def _judge_gradient(
    ranks: int, index: int, place: int, got: Tensor | None, mean: Tensor, own: Tensor
) -> None:
    said = f"on rank {index}, the gradient of unit {place}'s shard is"
    if got is None:
        hint = "Once the last of the unit's gradients is there, set shard.grad."
        raise judge.WrongAnswer(f"{said} None", hint=hint)
    whole = {
        "the sum over the ranks, not the mean": ranks * mean,
        "the sum, divided twice": mean / ranks,
        "this rank's own, not the mean": own,
        "this rank's own, divided": own / ranks,
    }
    whole |= sums_divided_wrongly(mean, ranks)
    likely = {words: each.chunk(ranks)[index] for words, each in whole.items()}
    likely |= {f"rank {rank}'s part": part for rank, part in enumerate(mean.chunk(ranks))}
    hint = "reduce_scatter_tensor adds up; a mean is a sum divided by the ranks."
    right = mean.chunk(ranks)[index]
    judge.expect_close(got, right, said, likely, "wrong", hint=hint, **TOLERANCES)


@exercise
def make_units(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 5: make the fewest units that gather no more than a limit, on real ranks."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        if left := sent["left"]:
            said = f"the root gathers block {left[0]}, which you left out"
            raise judge.WrongAnswer(said, hint="Is the last list of blocks made a unit, too?")
        sizes, gathered, limit = sent["sizes"], sent["gathered"], sent["limit"]
        said = f"the units gather {_numbers_text(gathered)} bytes"
        hint = f"The blocks have {_numbers_text(sizes)}, in the order in which they compute."
        ends = list(itertools.accumulate(sizes))
        together = {*itertools.accumulate(gathered)} <= {*ends} and sum(gathered) == ends[-1]
        follow = "sums of blocks that follow one another, each block in one unit"
        judge.expect(together, said, follow, hint)
        large = [size for size in gathered if size > limit and size not in sizes]
        hint = "Begin another unit before the block with which this one would be too large."
        judge.expect(not large, f"{said}, and the limit is {limit:,}", f"at most {limit:,}", hint)
        fewest = _fewest_units(sizes, limit)
        said = f"{said}: {len(gathered)} units, with a limit of {limit:,}"
        hint = "A unit may gather as much as the limit, and has room for a block that just fits."
        judge.expect(len(gathered) == fewest, said, fewest, hint)
        calls = {"all_gather": [2 * fewest, 2 * sum(sizes) // ranks]}
        calls["reduce_scatter"] = [fewest, sum(sizes)]
        hint = "Units are gathered for each of both passes, and reduced once."
        expect_traffic(sent["sent"], calls, "the units are right, but a step sends", hint)
        where = f"on rank {index}, the output is"
        hint = "The units must leave the parameters as they are."
        right, other = sent["right"], "another than one device's"
        judge.expect_close(sent["output"], right, where, {}, other, hint=hint, **TOLERANCES)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="units")
    return judge.passing_verdict(f"the fewest units below the limit, on {SIZES_TEXT} ranks")


def _fewest_units(sizes: Sequence[int], limit: int) -> int:
    units, filled = 0, limit
    for size in sizes:
        # A larger block is a unit by itself, and leaves no room for the next.
        units, filled = (units, filled + size) if filled + size <= limit else (units + 1, size)
    return units


def _numbers_text(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def sums_divided_wrongly(mean: Tensor, ranks: int) -> dict[str, Tensor]:
    """Return what an answer gives that knows another number of ranks, by the words for it."""
    others = {*SIZES} - {ranks}
    return {f"the sum over the ranks, divided by {each}": mean * ranks / each for each in others}


def replace_source_line(
    function: Callable[..., Any], line: str, instead: str = "pass"
) -> Callable[..., Any]:
    """Return a mutant of a function, with one line of its source replaced, for a test to catch.

    Raise ValueError unless the line occurs once.
    """
    name, lines = function.__name__, textwrap.dedent(inspect.getsource(function)).splitlines()
    places = [number for number, each in enumerate(lines) if each.strip() == line.strip()]
    if len(places) != 1:
        rule = "take a line that stands once"
        raise ValueError(f"{line!r} stands {len(places)} times in {name}: {rule}")
    (place,) = places
    lines[place] = lines[place].replace(line.strip(), instead)
    text, file = "\n".join(lines) + "\n", f"<{name} without {line!r}>"
    # The mutant is sent to ranks with its source, which inspect finds here.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    known = dict(function.__globals__)
    exec(compile(text, file, "exec"), known)
    mutant: Callable[..., Any] = known[name]
    return mutant


def collective_count(result: labkit.RunResult, collective: str) -> int:
    """Return how often a rank called a collective in one step."""
    counts = result.summary().get(f"{collective}_count")
    return 0 if counts is None else int(counts.max())
