"""Checks of lab 2b, FSDP at work."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import labkit
from labkit.session.timeline import LaneBar, exposed_us
from labkit.theory import fsdp as theory
from labkit.theory.collectives import WIRE_FRACTIONS, collective_wire_bytes
from labkit_course.checks import judge
from labkit_course.checks.fsdp import (
    SIZES_TEXT,
    TOLERANCES,
    collective_count,
    judge_on_group,
    sums_divided_wrongly,
)
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.ranks import fsdp as ranks_fsdp
from labkit_course.checks.traffic import Totals, traffic_text

SHARED_HINT = (
    "All ranks train the shared part together: sum over the ranks, divide by their number."
)
EXPERT_HINT = "A rank's expert is its own: nothing of it may travel. Divide it by the ranks."
IDENTITY_HINT = "Tied means the same object: compare with `is`, or look it up in a set."
FLOAT32_BYTES = 4


@exercise
def peak_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: the peak of the small FSDP without activations, from (units, ranks)."""
    cases = [
        (
            [800],
            1,
            "Parameters, Adam's two numbers, shares, the row, and Gloo's copy: six times 800.",
        ),
        ([800], 2, "Between steps a rank keeps its share of parameters and of Adam's numbers."),
        ([800, 800], 2, "From the last unit to the first, shares of gradients pile up."),
        ([400, 1600, 800], 4, "The units before this one have no gradients yet."),
        ([1600, 400, 1600], 8, "Compare the moment of each unit: the largest is the peak."),
    ]
    return judge.judge_cases(answer, theory.small_fsdp_peak_bytes, cases)


@exercise
def gradients_agree(answer: Callable[..., bool]) -> Verdict:
    """Exercise 2: a test that can fail, from (mine, reference): do gradients by name agree?"""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([2.0, 1e-7, -1.0])
    # One number of twelve is more than 1e-5 of the largest off; one of three is less.
    one, less = torch.zeros_like(weight), torch.tensor([0.0, 0.0, 0.9e-5 * 2])
    one[1, 1] = 1.3e-5 * weight.abs().max()
    nan, infinite = (torch.full_like(weight, value) for value in (torch.nan, torch.inf))

    def named(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"weight": weight, "bias": bias}

    wide = torch.full((3,), 2.0)
    right, small, none = named(weight, bias), named(weight, bias / 1000), dict[str, Tensor]()
    rounding = "Divide the largest difference by the largest reference value, and allow 1e-5."
    compares = "NaN compares as False with everything: ask whether the error is small."
    cancel = "Differences may cancel: take abs()"
    single = "Look at each number: sums, norms and extremes can agree."
    scale = "Each gradient has a scale of its own: the largest value of its reference."
    every, names = "Every name must agree.", "Compare the names first."
    infinite_hint = "inf <= inf is True: ask whether the difference is finite."
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
        (
            "a gradient of shape (1,) beside one of (3,)",
            named(weight, wide[:1]),
            named(weight, wide),
            False,
            "Broadcasting makes shapes equal: compare the shapes first.",
        ),
        ("a reference of infinity", right, named(infinite, bias), False, infinite_hint),
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
def forgotten_blocks(answer: Callable[..., list[int]]) -> Verdict:
    """Exercise 3: the numbers of the blocks that are no units, from (gathered, blocks)."""
    toy = [f"net.{place}" for place in range(4, 8)]
    long = [f"layers.{index}" for index in range(11)]
    numbers = "Count the blocks from 0, in the order of the model: net.4 is block 0."
    once = "A block whose parameters are kept is gathered once, and is wrapped all the same."
    several = "More than one block may be forgotten."
    whole_names = "Compare whole names: layers.1 is a part of layers.10."
    # Words, what is wrapped, all blocks, whether each is gathered twice, and a hint.
    cases = [
        ("blocks net.4 to net.7, all gathered twice", toy, toy, True, "No block is missing here."),
        ("net.4 to net.7 without net.6", toy[:2] + toy[3:], toy, True, numbers),
        ("net.4 to net.7 without net.4 and net.7", toy[1:3], toy, True, several),
        ("blocks net.4 to net.7, all gathered once", toy, toy, False, once),
        ("layers.0 to layers.10 without layers.1", long[:1] + long[2:], long, True, whole_names),
    ]
    for what, wrapped, blocks, again, hint in cases:
        gathered = ["root", *wrapped, *(wrapped[::-1] if again else [])]
        asked = f"for {what}, {judge.answer_name(answer)}"
        found = judge.call_answer(answer, gathered, [*blocks], in_words=asked)
        right = [index for index, block in enumerate(blocks) if block not in wrapped]
        said = f"{asked} gave {judge.value_text(found)}"
        is_list = isinstance(found, list) and all(type(each) is int for each in found)
        judge.expect(is_list, f"{said}, not a list of whole numbers")
        judge.expect(sorted(found) == right, said, right, hint)
    return judge.passing_verdict(f"{len(cases)} steps agree")


def hidden_gather_ms(result: labkit.RunResult) -> float:
    """Return the milliseconds for which rank 0 computes while an all-gather is on its way."""
    bars = result.frame.query("kind == 'bar' and rank == 0")
    names = [each.name for each in fields(LaneBar)]
    computing, gathers = (
        [LaneBar(*bar) for bar in bars.query(chosen)[names].itertuples(index=False)]
        for chosen in ("lane == 'compute'", "lane == 'communication' and phase == 'all_gather'")
    )
    return (exposed_us(gathers) - exposed_us([*computing, *gathers])) / 1000


@exercise
def every_block_wrapped(result: labkit.RunResult, blocks: int) -> Verdict:
    """Tell whether a run of fsdp_wrap with fully_shard made each of its ``blocks`` a unit.

    Raise ValueError if the run keeps parameters after the forward pass.
    """
    if not result.params["reshard_after_forward"]:
        rule = "gathers every unit once: take a run with True"
        raise ValueError(f"reshard_after_forward = False {rule}")
    gathered = collective_count(result, "all_gather")
    reduced = collective_count(result, "reduce_scatter")
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
    """Exercise 4: the modules that must share a unit with a block, from (model, block).

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
    """Exercise 5: average shared gradients, divide the experts', from (model, experts, ranks)."""

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
            likely |= sums_divided_wrongly(mean, ranks)
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

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s)
    seen = "shared gradients are the mean, and those of experts their own, divided"
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
