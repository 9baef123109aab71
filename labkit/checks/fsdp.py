"""Checks of lab 2, sharding parameters with FSDP."""

import copy
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor, nn

import labkit
from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import fsdp as ranks_fsdp
from labkit.checks.traffic import Totals, expect_traffic, traffic_text
from labkit.models import catalog
from labkit.parallel.fsdp import WrapMode, random_block_index
from labkit.parallel.small_fsdp import flatten_tensors, split_flat
from labkit.theory import fsdp as theory
from labkit.theory.collectives import WIRE_FRACTIONS, collective_wire_bytes

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
FLOAT32_BYTES = 4
# Of float32 tensors that ranks and one device compute.
TOLERANCES: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
WAIT_HINT = "does every rank call the same collectives, in the same order?"
EMPTY_BUFFER_HINT = "parameters were used while their buffer was empty: gather before both passes"
# The first two kill the process: torch reads memory that is gone, and gloo aborts.
ERROR_HINTS = {
    "SIGSEGV": EMPTY_BUFFER_HINT,
    "SIGABRT": f"the ranks sent tensors of different sizes to each other: {WAIT_HINT}",
    "out of bounds for storage": EMPTY_BUFFER_HINT,
}
_on_ranks = partial(judge_on_ranks, "fsdp", sizes=SIZES, waiting=WAIT_HINT, hints=ERROR_HINTS)
SHARED_HINT = (
    "All ranks train the shared part together: sum over the ranks, divide by their number."
)
EXPERT_HINT = "A rank's expert is its own: nothing of it may travel, and its scale is one device's."
# Position of block 0 in the toy model.
FIRST_BLOCK_POSITION = 4
CATEGORY_TEXT = {
    "temp": "temporary, gradients of activations among it",
    "activation": "activations",
    "unsharded_parameter": "gathered parameters",
}
# What a rank keeps between steps: no plan that wraps anything changes it.
PERSISTENT_CATEGORIES = ["parameter", "gradient", "optstate"]
# What a memory plan may choose.
PLAN_CHOICES: dict[str, tuple[Any, ...]] = {
    "wrap": get_args(WrapMode),
    "checkpointing": (False, True),
    "reshard_after_forward": (True, False),
}
IDENTITY_HINT = "Tied means the same object: compare with `is`, or by id()."


@exercise
def zero_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: a rank's bytes between steps with Adam, from (parameters, ranks, stage)."""
    # By stage.
    hints = [
        "Stage 0 shards nothing: a parameter, its gradient and Adam's two have 4 bytes each.",
        "Stage 1 shards what Adam keeps, two numbers a parameter; the others stay whole.",
        "Stage 2 shards gradients as well; only the parameters stay whole.",
        "Stage 3 shards everything: nothing stays whole.",
    ]
    cases = [(1000, 1, 0), (1000, 4, 0), (1000, 4, 1), (1000, 4, 2), (1000, 4, 3), (6, 2, 3)]

    def right_bytes(parameters: int, ranks: int, stage: int) -> float:
        return sum(theory.zero_bytes(parameters, ranks, stage).values())

    return judge.judge_cases(answer, right_bytes, [(*case, hints[case[-1]]) for case in cases])


@exercise
def all_gathers(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: all-gathers in a step, from (units, reshard_after_forward, root_has_parameters).

    ``units`` counts the root if it holds parameters.
    """
    once = "Without resharding the parameters stay after the forward pass: one all-gather a unit."
    twice = "What is freed after the forward pass is gathered again for the backward pass."
    root = "The root is not freed after the forward pass, since its backward pass comes next."
    cases = [
        (3, False, False, once),
        (4, False, True, once),
        (3, True, False, twice),
        (4, True, True, root),
        (1, True, True, root),
    ]

    def right_count(units: int, reshard_after_forward: bool, root_has_parameters: bool) -> int:
        return 2 * units - root_has_parameters if reshard_after_forward else units

    return judge.judge_cases(answer, right_count, cases)


@exercise
def wire_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 3: bytes that a rank sends in a step, from (parameter_bytes, ranks, technique)."""
    one = "In one pass of a ring a rank sends (ranks - 1) / ranks of the bytes: not its own part."
    cases = [
        (800, 2, "ddp", "DDP's all-reduce is a reduce-scatter and an all-gather: two passes."),
        (800, 8, "ddp", one),
        (800, 8, "fsdp", "FSDP gathers, gathers again, and reduce-scatters: three passes."),
        (800, 8, "kept", "Parameters that are kept are gathered once: two passes, as with DDP."),
        (1600, 4, "fsdp", one),
        (800, 1, "fsdp", one),
    ]

    def right_bytes(parameter_bytes: int, ranks: int, technique: str) -> float:
        gathers = 2 if technique == "fsdp" else 1
        return sum(theory.wire_bytes(parameter_bytes, ranks, all_gathers=gathers).values())

    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def small_fsdp(answer: Callable[[nn.Module], Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: shard units on real ranks; two training steps agree with one device."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
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
        for rank, shards in enumerate(sent["shards"]):
            for place, shard in enumerate(shards):
                _judge_share(rank, place, shard, whole[place].chunk(ranks))
        held, first, second = sent["held"], model(inputs), after(inputs)
        _expect_freed(held["at rest"], "right after it was sharded")
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
        row = whole[0].nbytes
        right = {"all_gather": [4, 4 * row // ranks], "reduce_scatter": [2, 2 * row]}
        said = f"{where} the numbers are right, but a step of two units sends"
        hint = "A unit is gathered for its forward and its backward pass, and reduced once."
        expect_traffic(sent["sent"], right, said, hint)

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="units")
    passed = "and whole parameters are held only where they are used"
    return judge.passing_verdict(f"equal to one device on {SIZES_TEXT} ranks, {passed}")


def _flat_gradients(index: int, ranks: int) -> list[Tensor]:
    """Return the flat gradients of each unit on one device, for one rank's batch."""
    units, (inputs, targets) = ranks_fsdp.two_units(), ranks_fsdp.rank_batch(index)
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
    whole |= _sums_divided_wrongly(mean, ranks)
    likely = {words: each.chunk(ranks)[index] for words, each in whole.items()}
    likely |= {f"rank {rank}'s part": part for rank, part in enumerate(mean.chunk(ranks))}
    hint = "reduce_scatter_tensor adds up; a mean is a sum divided by the ranks."
    right = mean.chunk(ranks)[index]
    judge.expect_close(got, right, said, likely, "wrong", hint=hint, **TOLERANCES)


def _sums_divided_wrongly(mean: Tensor, ranks: int) -> dict[str, Tensor]:
    """Return what an answer gives that knows another number of ranks, by the words for it."""
    others = {*SIZES} - {ranks}
    return {f"the sum over the ranks, divided by {each}": mean * ranks / each for each in others}


@exercise
def peak_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: the peak of the small FSDP without activations, from (units, ranks)."""
    cases = [
        ([800], 1, "A unit has parameters, Adam's two numbers, gradients and their flat copy."),
        ([800], 2, "Between steps a rank keeps its share of parameters and of Adam's numbers."),
        ([800, 800], 2, "From the last unit to the first, shares of gradients pile up."),
        ([400, 1600, 800], 4, "The units before this one have no gradients yet."),
        ([1600, 400, 1600], 8, "Compare the moment of each unit: the largest is the peak."),
    ]
    return judge.judge_cases(answer, theory.small_fsdp_peak_bytes, cases)


@exercise
def gradients_agree(answer: Callable[..., bool]) -> Verdict:
    """Exercise 6: a test that can fail, from (mine, reference): do gradients by name agree?"""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([2.0, 1e-7, -1.0])
    # One number of twelve is more than 1e-5 of the largest off; one of three is less.
    one, less = torch.zeros_like(weight), torch.tensor([0.0, 0.0, 0.9e-5 * 2])
    one[1, 1] = 1.3e-5 * weight.abs().max()
    nan, infinite = (torch.full_like(weight, value) for value in (torch.nan, torch.inf))

    def named(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"weight": weight, "bias": bias}

    right, small, none = named(weight, bias), named(weight, bias / 1000), dict[str, Tensor]()
    rounding = "Divide the largest difference by the largest reference value, and allow 1e-5."
    compares = "NaN compares as False with everything: ask whether the error is small."
    cancel = "Differences may cancel: take abs()"
    single = "Look at each number: sums, norms and extremes can agree."
    scale = "Each gradient has a scale of its own: the largest value of its reference."
    every, names = "Every name must agree.", "Compare the names first."
    # Words, gradients, their reference, whether they agree, and a hint.
    cases: list[tuple[str, dict[str, Tensor], dict[str, Tensor], bool, str]] = [
        ("the same gradients", named(weight, bias), right, True, "Equal gradients agree."),
        ("them in another order", {"bias": bias, "weight": weight}, right, True, "Go by names."),
        (
            "gradients that rounding moved by 4e-7",
            named(weight, bias + 4e-7),
            right,
            True,
            rounding,
        ),
        ("an error of 0.9e-5 of the largest", named(weight, bias + less), right, True, rounding),
        ("gradients twice as large", named(2 * weight, 2 * bias), right, False, "Compare values."),
        ("one gradient of two half as large", named(weight / 2, bias), right, False, every),
        ("one gradient with the other sign", named(weight, -bias), right, False, cancel),
        ("one gradient off by -1e-3", named(weight, bias - 1e-3), right, False, rounding),
        ("two rows exchanged", named(weight[[0, 2, 1, 3]], bias), right, False, single),
        ("one number of twelve wrong", named(weight + one, bias), right, False, single),
        ("a small gradient off by 1e-6", named(weight, small["bias"] + 1e-6), small, False, scale),
        ("a gradient of NaN", named(nan, bias), right, False, compares),
        ("a gradient of infinity", named(infinite, bias), right, False, scale),
        ("a gradient missing", {"weight": weight}, right, False, names),
        ("a gradient too many", right | {"more": bias}, right, False, names),
        ("a gradient of another name", {"weight": weight, "offset": bias}, right, False, names),
        ("no gradient at all", none, none, False, "A test that compared nothing must not pass."),
    ]
    for what, mine, reference, agree, hint in cases:
        asked = f"for {what}, {judge.answer_name(answer)}"
        # The answer may change what it is given.
        given = copy.deepcopy((mine, reference))
        found = judge.call_answer(answer, *given, in_words=asked)
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        said = f"{asked} gave {judge.value_text(found)}"
        judge.expect(isinstance(found, bool), f"{said}, neither True nor False")
        judge.expect(found == agree, said, agree, hint)
    return judge.passing_verdict(f"{len(cases)} cases agree: it can pass, and it can fail")


@exercise
def tokens_to_hide(answer: Callable[..., float]) -> Verdict:
    """Exercise 9: tokens that hide communication, from the arguments of theory's function."""
    ring = "In a ring of 4, a rank sends 3/4 of the parameters in each pass."
    cases = [
        (600.0, 1.0, 2, 4, "Three passes, each of (ranks - 1) / ranks of the bytes."),
        (1200.0, 1.0, 2, 4, "Arithmetic that is twice as fast hides half as much."),
        (600.0, 1.0, 4, 4, ring),
        (600.0, 1.0, 4, 2, "A bfloat16 number has 2 bytes."),
        (4e14, 4.5e11, 8, 2, "A token takes 6 operations for each parameter; P drops out."),
    ]
    return judge.judge_cases(answer, theory.tokens_to_hide, cases)


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


@exercise
def memory_plan(
    answer: Callable[[], dict[str, Any]], bound_bytes: int, gathers: int, **setup: Any
) -> Verdict:
    """Exercise 7: a plan for real ranks, ``PLAN_CHOICES``, within two limits.

    ``bound_bytes`` limits a rank's peak of all categories together; runs differ by some kB, so it
    should leave 1 %. ``gathers`` limits the all-gathers in a step. ``setup`` holds the other
    parameters of fsdp_wrap; 2 ranks by default.
    """
    plan = judge.call_answer(answer)
    _expect_plan(plan)
    # Only a real run shows what a plan costs.
    try:
        result = labkit.run("fsdp_wrap", **({"nproc": 2} | setup | plan))
    except labkit.RankFailed as failure:
        error = f"on rank {failure.rank}, {failure.exc_type}: {failure.message}"
        raise judge.WrongAnswer(f"the plan does not run: {error}") from failure
    except labkit.RunTimedOut as stopped:
        said = f"a run with this plan had no end after {stopped.timeout_s:g} s"
        raise judge.WrongAnswer(f"{said}; raise timeout_s if it is only slow") from stopped
    # The verdict names no bytes, because runs differ by some kB.
    excess = result.value("peak_total_bytes") / bound_bytes - 1
    percent = f"{100 * excess:.0f} %" if excess >= 0.005 else "less than 1 %"
    hint = f"Of the parts that a plan can change, the largest is {_largest_category(result)}."
    judge.expect(excess <= 0, f"the peak is {percent} above the bound", hint=hint)
    counted = _collective_count(result, "all_gather")
    hint = "Large units, and units that stay after the forward pass, are gathered less often."
    said = f"{counted} all-gathers a step are too many"
    judge.expect(counted <= gathers, said, f"at most {gathers}", hint)
    seen = f"{counted} all-gathers a step, and {gathers} are allowed"
    return judge.passing_verdict(f"below the bound, with {seen}")


def _expect_plan(plan: Any) -> None:
    said = f"the plan is {judge.value_text(plan)}"
    judge.expect(isinstance(plan, dict), f"{said}, not a dict such as {{'wrap': 'root'}}")
    for name, value in plan.items():
        said = f"{name!r} is not for the plan to choose: take some of {', '.join(PLAN_CHOICES)}"
        judge.expect(name in PLAN_CHOICES, said)
        # 1 equals True, so the types are compared as well.
        choices = PLAN_CHOICES[name]
        known = any(type(value) is type(choice) and value == choice for choice in choices)
        said = f"{name} = {judge.value_text(value)} is none of {', '.join(map(repr, choices))}"
        judge.expect(known, said)


def _largest_category(result: labkit.RunResult) -> str:
    """Return the largest peak among the categories of memory that a plan can change."""
    peaks = result.summary().filter(regex="^peak_(?!total_).*_bytes$").max()
    peaks.index = peaks.index.str.removeprefix("peak_").str.removesuffix("_bytes")
    kept = [] if result.params["wrap"] == "none" else PERSISTENT_CATEGORIES
    name = str(peaks.drop(kept, errors="ignore").idxmax())
    return CATEGORY_TEXT.get(name, name.replace("_", " "))


def _collective_count(result: labkit.RunResult, collective: str) -> int:
    """Return how often a rank called a collective in one step."""
    counts = result.summary().get(f"{collective}_count")
    return 0 if counts is None else int(counts.max())


@exercise
def missing_block(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 8: the index of the block that a run did not wrap, for its ``forget`` or ``skip``.

    Raise ValueError unless the run left out one block.
    """
    forgotten = [*result.params.get("skip", ())]
    entry, seed = catalog.MODELS[result.params["model"]], result.params.get("forget")
    if seed is not None:
        blocks = sum(entry.class_counts[name] for name in entry.block_types)
        forgotten.append(random_block_index(seed, blocks))
    if len(forgotten) != 1:
        rule = "this check takes a run that forgot one block, such as skip=(1,)"
        raise ValueError(f"skip = {tuple(forgotten)}: {rule}")
    right, index = forgotten[0], judge.call_answer(answer)
    text = judge.value_text(index)
    said = f"{judge.answer_name(answer)}() gave {text}"
    is_index = type(index) is not bool and isinstance(index, Integral) and int(index) >= 0
    judge.expect(is_index, f"{said}, not the index of a block: count from 0")
    is_position = result.params["model"] == "toy" and index == right + FIRST_BLOCK_POSITION
    problem = f"{said}: {text} is its position in the model, not its number"
    judge.expect(not is_position, problem, hint="Blocks 0–8 stand at positions 4–12.")
    hint = "Above the all-gathers stand the units' positions: which one of 4 to 12 is missing?"
    problem = f"{said}, but block {text} was wrapped or is not there"
    judge.expect(index == right, problem, hint=hint)
    return judge.passing_verdict(f"block {index} stayed with the root")


@exercise
def every_block_wrapped(result: labkit.RunResult, blocks: int) -> Verdict:
    """Tell whether a run of fsdp_wrap with fully_shard made each of its ``blocks`` a unit.

    Raise ValueError if the run keeps parameters after the forward pass.
    """
    if not result.params["reshard_after_forward"]:
        rule = "gathers every unit once: take a run with True"
        raise ValueError(f"reshard_after_forward = False {rule}")
    gathered = _collective_count(result, "all_gather")
    reduced = _collective_count(result, "reduce_scatter")
    # Gradients of each unit are reduce-scattered once. Parameters are gathered for the forward
    # pass and, except the root's, again for the backward pass.
    units = gathered - reduced
    seen = f"units beside the root: {units} ({gathered} all-gathers less {reduced} reduce-scatters)"
    problem = "More than the blocks was wrapped."
    if units < blocks:
        missing = "One block" if blocks - units == 1 else f"{blocks - units} blocks"
        problem = f"{missing} stayed with the root."
    judge.expect(units == blocks, seen, blocks, problem)
    return judge.passing_verdict(f"{seen}, one for each block")


@dataclass(frozen=True)
class TyingCase:
    """A part ``block`` of a model, all modules that must be in its unit, and what is tied where."""

    model: nn.Module
    block: nn.Module
    together: set[nn.Module]
    where: str


@exercise
def tied_unit(answer: Callable[..., list[nn.Module]]) -> Verdict:
    """Exercise 10: the modules that must share a unit with a block, from (model, block).

    They are the block, and the modules outside it that directly hold one of its parameters.
    """
    cases = tying_cases()
    for case in cases:
        names = {module: repr(name) for name, module in case.model.named_modules()}
        names[case.model] = "the model"
        asked = f"{judge.answer_name(answer)}(model, {names[case.block]}), where {case.where},"
        # A RuntimeError comes of comparing tensors, which cannot tell if they are equal.
        given = (case.model, case.block)
        found = judge.call_answer(answer, *given, in_words=asked, hint=IDENTITY_HINT)
        form = f"{asked} gave {judge.value_text(found)}: return a list of modules of the model"
        judge.expect(isinstance(found, list), form)
        judge.expect(all(isinstance(each, nn.Module) and each in names for each in found), form)
        wrong = {"left out": case.together - {*found}, "took in": {*found} - case.together}
        # The model's own order, so that the words are the same each time.
        said = []
        for what, modules in wrong.items():
            listed = ", ".join(names[module] for module in names if module in modules)
            said += [f"{what} {listed}"] if listed else []
        judge.expect(not said, f"{asked} {' and '.join(said)}", hint=_tying_hint(case, found))
    return judge.passing_verdict(f"{len(cases)} models agree")


def _tying_hint(case: TyingCase, found: list[nn.Module]) -> str:
    extra = {*found} - case.together
    if not case.together <= {*found}:
        return "Look at every module of the model, and at each parameter, also deep inside."
    if extra & {*case.block.modules()}:
        return "What is inside the block is in its unit already."
    if any(not [*module.parameters(recurse=False)] for module in extra):
        return "A container holds nothing itself, its parts do: see parameters(recurse=False)."
    return IDENTITY_HINT


def tying_cases() -> list[TyingCase]:
    """Return the cases, from nothing tied to a tie of three, with pitfalls between."""
    copied = _tying_case("the output layer's weight is a copy of the embedding's", "embedding")
    embedding, output = (copied.model.get_submodule(name) for name in ("embedding", "output"))
    # Two separate parameters with equal values, instead of a shared one.
    output.load_state_dict(embedding.state_dict(), strict=False)
    inside = "two layers inside the block share a weight"
    bias = "a layer inside it shares a bias with another block's"
    return [
        _tying_case("nothing is tied", "blocks.0"),
        _tying_case("the output layer has the embedding's weight", "embedding", "output"),
        _tying_case(inside, "blocks.0", "blocks.0.2", first="blocks.0.0"),
        copied,
        _tying_case(bias, "blocks.0", "blocks.1.0", first="blocks.0.2", name="bias"),
        _tying_case("three modules share its weight", "output", "embedding", "heads.0"),
    ]


def _tying_case(
    where: str, block: str, *others: str, first: str = "", name: str = "weight"
) -> TyingCase:
    """Give the other modules the named parameter of ``first``, which is the block by default."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    parts = {"embedding": nn.Embedding(6, 4), "blocks": nn.Sequential(*blocks)}
    parts |= {"output": nn.Linear(4, 6), "heads": nn.Sequential(nn.Linear(4, 6))}
    model = nn.ModuleDict(parts)
    unit, modules = model.get_submodule(block), [model.get_submodule(each) for each in others]
    for module in modules:
        setattr(module, name, getattr(model.get_submodule(first or block), name))
    return TyingCase(model, unit, {*modules} - {*unit.modules()} | {unit}, where)


@exercise
def expert_gradients(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 11: average shared gradients, divide the experts', from (model, experts, ranks)."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        models = [ranks_fsdp.make_expert_model(rank) for rank in range(ranks)]
        before = [ranks_fsdp.gradients_by_name(model) for model in models]
        experts, left = ranks_fsdp.expert_names(models[0]), output["gradients"]
        for name, own in before[index].items():
            mean = torch.stack([each[name] for each in before]).mean(dim=0)
            likely = {
                "still this rank's own": own,
                "averaged": mean,
                "summed and not divided": ranks * mean,
                "divided but not summed": own / ranks,
            }
            kind, right, rule, hint = "shared", mean, "the mean over the ranks", SHARED_HINT
            likely |= _sums_divided_wrongly(mean, ranks)
            if name in experts:
                kind, right, hint = "expert's", own / ranks, EXPERT_HINT
                rule = "this rank's own, divided by the ranks"
            said = f"on rank {index}, the {kind} gradient of {name}"
            judge.expect(left[name] is not None, f"{said} is gone")
            how: dict[str, Any] = {"expected": rule, "hint": hint}
            judge.expect_close(
                left[name], right, f"{said} is", likely, "wrong", **how, **TOLERANCES
            )
        shared = sum(own.nbytes for name, own in before[index].items() if name not in experts)
        said = f"on rank {index}, the gradients are right, but the rank sends"
        _expect_reduced_once(output["sent"], shared, ranks, said)

    _on_ranks(answer, judge=judge_rank, timeout_s=timeout_s)
    seen = "shared gradients are the mean, the experts' their own, divided"
    return judge.passing_verdict(f"as asked on {SIZES_TEXT} ranks: {seen}")


def _expect_reduced_once(sent: Totals, shared: int, ranks: int, said: str) -> None:
    """Expect no more bytes on the wire than an all-reduce of ``shared`` bytes sends in a ring."""
    # A reduce-scatter may have to pad each tensor.
    padded = shared + FLOAT32_BYTES * (ranks - 1) * sent.get("reduce_scatter", (0, 0))[0]
    on_wire = sum(
        collective_wire_bytes(name, size, ranks) if name in WIRE_FRACTIONS else size
        for name, (_, size) in sent.items()
    )
    is_least = on_wire <= collective_wire_bytes("all_reduce", padded, ranks)
    right = f"an all-reduce of the {shared:,} bytes of shared gradients, or no more than it sends"
    hint = "All-reduce each shared gradient once. Of an expert's nothing may travel."
    judge.expect(is_least, f"{said} {traffic_text(sent)}", right, hint)
