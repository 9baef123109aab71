"""Checks of lab 2, sharding parameters with FSDP."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from torch import nn

import labkit
from labkit.checks.tied_models import IDENTITY, tied_cases
from labkit.checks.verdict import Verdict, check_values, is_empty, passed, source_of, wrong
from labkit.parallel.fsdp import Wrap
from labkit.theory import fsdp as theory

RANKS = 2
EXPERT_PROGRAM = Path(__file__).with_name("expert_ranks.py")
SAME_ORDER = "does every rank call the same all-reduces, in the same order?"
PLAN: dict[str, tuple[Any, ...]] = {
    "wrap": get_args(Wrap),
    "checkpointing": (False, True),
    "reshard_after_forward": (True, False),
}
"""What a memory plan may choose."""


def zero_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: bytes that a rank holds between steps, from (parameters, ranks, stage); float32 with Adam."""
    hints = [
        "Stage 0 shards nothing: a parameter, its gradient and Adam's two numbers have 4 bytes each.",
        "Stage 1 shards what Adam keeps, two numbers a parameter; parameters and gradients stay whole.",
        "Stage 2 shards gradients as well; only the parameters stay whole.",
        "Stage 3 shards everything: nothing stays whole.",
    ]
    cases = [
        (
            {"parameters": parameters, "ranks": ranks, "stage": stage},
            int(sum(theory.zero_bytes(parameters, ranks, stage).values())),
            hints[stage],
        )
        for parameters, ranks, stage in (
            (1000, 1, 0),
            (1000, 4, 0),
            (1000, 4, 1),
            (1000, 4, 2),
            (1000, 4, 3),
            (6, 2, 3),
        )
    ]
    return check_values(answer, cases)


def all_gathers(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: all-gathers of a step, from (units, reshard_after_forward, root_has_parameters).

    ``units`` counts the root if it holds parameters.
    """
    once = "Without resharding the parameters stay after the forward pass: one all-gather a unit."
    twice = "What is freed after the forward pass is gathered again for the backward pass."
    root = "The root is not freed after the forward pass, since its backward pass comes next."
    cases = [
        (
            {"units": units, "reshard_after_forward": reshard, "root_has_parameters": own},
            2 * units - own if reshard else units,
            (root if own else twice) if reshard else once,
        )
        for units, reshard, own in (
            (3, False, False),
            (4, False, True),
            (3, True, False),
            (4, True, True),
            (1, True, True),
        )
    ]
    return check_values(answer, cases)


def memory_plan(answer: Callable[[], dict[str, Any]], bound_bytes: int, gathers: int, **setup: Any) -> Verdict:
    """Exercise 3: choose among ``wrap``, ``checkpointing`` and ``reshard_after_forward`` to stay within two limits.

    The plan is launched for real. What a run says of itself moves by some kB from time to time, so the verdict names
    no bytes, and the bound should leave 1 %.

    Args:
        answer: gives the plan, parameters of fsdp_wrap by name; what it leaves out is at its default.
        bound_bytes: the largest peak that is allowed, of all categories together, on the fullest rank.
        gathers: how many all-gathers a step may take.
        **setup: the other parameters of the run, such as ``model="mlp_stack"``; 2 ranks by default.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    try:
        plan = answer()
    except Exception as error:
        return wrong(f"{answer.__name__}() raised {type(error).__name__}: {error}")
    refusal = _refused(plan)
    if refusal:
        return wrong(refusal)
    try:
        result = labkit.run("fsdp_wrap", **({"nproc": RANKS} | setup | plan))
    except labkit.RankFailed as failure:
        return wrong(f"the plan does not run: on rank {failure.rank}, {failure.exc_type}: {failure.message}")
    problems = _over_the_bound(result, bound_bytes) + _too_many_gathers(result, gathers)
    if problems:
        return wrong("; ".join(problems))
    return passed(f"below the bound, with {_count(result, 'all_gather')} all-gathers a step, and {gathers} are allowed")


def forgotten_block(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 4: the index of the block that a run of fsdp_wrap, started with ``skip``, did not wrap.

    Raises:
        ValueError: the run skipped no block, or several.
    """
    forgotten = result.params["skip"]
    if len(forgotten) != 1:
        raise ValueError(f"skip = {tuple(forgotten)}: this check takes a run that forgot one block, such as skip=(1,)")
    if is_empty(answer):
        return Verdict("not attempted")
    try:
        index = answer()
    except Exception as error:
        return wrong(f"{answer.__name__}() raised {type(error).__name__}: {error}")
    if not isinstance(index, Integral) or int(index) < 0:
        return wrong(f"{answer.__name__}() gave {index!r}, not the index of a block: count from 0")
    if index != forgotten[0]:
        hint = "The root is gathered once a step, a unit twice: whose shard is missing from all_gather_bytes?"
        return wrong(f"{answer.__name__}() gave {index}, but block {index} was wrapped. {hint}")
    return passed(f"block {index} stayed with the root")


def every_block_wrapped(result: labkit.RunResult, blocks: int) -> Verdict:
    """Whether a run of fsdp_wrap made each of its blocks a unit, judged by counting collectives.

    Each unit's gradients are reduce-scattered once. Its parameters are gathered once for the forward pass, and again
    for the backward pass unless it is the root. So the two counts differ by the units beside the root.

    Args:
        result: of a run with fully_shard that reshards after the forward pass.
        blocks: how many blocks the model has.

    Raises:
        ValueError: the run keeps parameters after the forward pass, so that the root does not differ from the others.
    """
    if not result.params["reshard_after_forward"]:
        raise ValueError("reshard_after_forward = False gathers every unit once, the root too: take a run with True")
    gathered, reduced = _count(result, "all_gather"), _count(result, "reduce_scatter")
    units = gathered - reduced
    seen = f"units beside the root: {units} ({gathered} all-gathers less {reduced} reduce-scatters)"
    if units < blocks:
        missing = "one block" if blocks - units == 1 else f"{blocks - units} blocks"
        return wrong(f"{seen}, expected {blocks}: {missing} stayed with the root")
    if units > blocks:
        return wrong(f"{seen}, expected {blocks}: more than the blocks was wrapped")
    return passed(f"{seen}, one for each block")


def tied_unit(answer: Callable[..., list[nn.Module]]) -> Verdict:
    """Exercise 5: the modules that must share a unit with a block, from (model, block).

    They are the block, and the modules outside of it that hold one of its parameters themselves.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    cases = tied_cases()
    for case in cases:
        names = {module: repr(name) if name else "the model" for name, module in case.model.named_modules()}
        call = f"{answer.__name__}(model, {names[case.block]}), where {case.where},"
        try:
            found = answer(case.model, case.block)
        except Exception as error:
            hint = f". {IDENTITY}" if isinstance(error, RuntimeError) else ""  # tensors cannot tell if they are equal
            return wrong(f"{call} raised {type(error).__name__}: {error}{hint}")
        if not isinstance(found, list) or not all(isinstance(each, nn.Module) and each in names for each in found):
            return wrong(f"{call} gave {found!r}: return a list of modules of the model")
        missing, extra = case.together - set(found), set(found) - case.together
        said = [
            f"{what} {', '.join(name for module, name in names.items() if module in some)}"
            for what, some in (("left out", missing), ("took in", extra))
            if some
        ]
        if said:
            return wrong(f"{call} {' and '.join(said)}. {case.hint(missing, extra)}")
    return passed(f"{len(cases)} models agree")


def expert_gradients(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 6: average all gradients but the experts' over 2 real ranks, from (model, experts, ranks).

    Args:
        answer: changes gradients in place.
        timeout_s: ranks that wait for each other are stopped after this.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text(source_of(answer))
        try:
            labkit.run(
                EXPERT_PROGRAM, nproc=RANKS, device="cpu", timeout_s=timeout_s, answer=str(file), name=answer.__name__
            )
        except labkit.RankFailed as failure:
            if failure.exc_type == "SIGABRT":  # so gloo answers when the sizes of two messages differ
                return wrong(f"the ranks sent gradients of different sizes to each other: {SAME_ORDER}")
            reason = failure.message if failure.exc_type == "Wrong" else f"{failure.exc_type}: {failure.message}"
            return wrong(f"on rank {failure.rank}, {reason}")
        except labkit.RunTimedOut:
            return wrong(f"the ranks waited for each other for {timeout_s:g} s: {SAME_ORDER}")
    return passed(f"equal to one device on {RANKS} ranks: shared gradients averaged, the experts' their own")


def _refused(plan: object) -> str:
    """Why a plan cannot be launched; "" if it can."""
    if not isinstance(plan, dict):
        return f"the plan is {plan!r}, not a dict such as {{'wrap': 'root'}}"
    for name, value in plan.items():
        if name not in PLAN:
            return f"{name!r} is not for the plan to choose: take some of {', '.join(PLAN)}"
        if not any(type(value) is type(choice) and value == choice for choice in PLAN[name]):
            return f"{name} = {value!r} is none of {', '.join(map(repr, PLAN[name]))}"
    return ""


def _over_the_bound(result: labkit.RunResult, bound_bytes: int) -> list[str]:
    """By how much the peak is too high, and what most of it is."""
    excess = result.value("peak_total_bytes") / bound_bytes - 1
    if excess <= 0:
        return []
    peaks = result.summary().filter(regex="^peak_(?!total_).*_bytes$").max()
    largest = str(peaks.idxmax()).removeprefix("peak_").removesuffix("_bytes")
    percent = f"{excess:.0%}".replace("%", " %") if excess >= 0.005 else "less than 1 %"
    return [f"the peak is {percent} above the bound, and the largest part of it is {largest.replace('_', ' ')}"]


def _too_many_gathers(result: labkit.RunResult, allowed: int) -> list[str]:
    """How many all-gathers were counted, where that is too many."""
    counted = _count(result, "all_gather")
    hint = "large units, and units that stay after the forward pass, are gathered less often"
    return [f"{counted} all-gathers a step are more than {allowed}: {hint}"] if counted > allowed else []


def _count(result: labkit.RunResult, collective: str) -> int:
    """How often a rank called a collective in one step; 0 where it never did."""
    counts = result.summary()
    name = f"{collective}_count"
    return int(counts[name].max()) if name in counts else 0
