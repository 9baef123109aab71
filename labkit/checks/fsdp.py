"""Checks of lab 2, sharding parameters with FSDP."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, get_args

import torch
from torch import nn

import labkit
from labkit.checks.ask import Verdict, Wrong, call, check_values, exercise, name_of, passed, same, shown
from labkit.checks.on_ranks import on_ranks
from labkit.checks.ranks.fsdp import experts_of, gradients_of, trained
from labkit.parallel.fsdp import Wrap
from labkit.theory import fsdp as theory

RANKS = 2
SAME_ORDER = "does every rank call the same all-reduces, in the same order?"
HINTS = {"SIGABRT": f"the ranks sent gradients of different sizes to each other: {SAME_ORDER}"}  # so gloo answers
CLOSE = {"rtol": 1e-4, "atol": 1e-7}
PLAN: dict[str, tuple[Any, ...]] = {
    "wrap": get_args(Wrap),
    "checkpointing": (False, True),
    "reshard_after_forward": (True, False),
}
"""What a memory plan may choose."""
IDENTITY = "Tied means the same object: compare with `is`, or by id()."
OWN = "A container holds nothing itself, its parts do: see parameters(recurse=False)."
INSIDE = "What is inside the block is in its unit already."
ALL = "Look at every module of the model, and at every parameter of the block, also deep inside."


@exercise
def zero_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: bytes that a rank holds between steps, from (parameters, ranks, stage); float32 with Adam."""
    hints = [
        "Stage 0 shards nothing: a parameter, its gradient and Adam's two numbers have 4 bytes each.",
        "Stage 1 shards what Adam keeps, two numbers a parameter; parameters and gradients stay whole.",
        "Stage 2 shards gradients as well; only the parameters stay whole.",
        "Stage 3 shards everything: nothing stays whole.",
    ]
    return check_values(
        answer,
        lambda parameters, ranks, stage: int(sum(theory.zero_bytes(parameters, ranks, stage).values())),
        [(1000, 1, 0), (1000, 4, 0), (1000, 4, 1), (1000, 4, 2), (1000, 4, 3), (6, 2, 3)],
        [hints[stage] for stage in (0, 0, 1, 2, 3, 3)],
    )


@exercise
def all_gathers(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: all-gathers of a step, from (units, reshard_after_forward, root_has_parameters).

    ``units`` counts the root if it holds parameters.
    """
    once = "Without resharding the parameters stay after the forward pass: one all-gather a unit."
    twice = "What is freed after the forward pass is gathered again for the backward pass."
    root = "The root is not freed after the forward pass, since its backward pass comes next."

    def right(units: int, reshard_after_forward: bool, root_has_parameters: bool) -> int:
        return 2 * units - root_has_parameters if reshard_after_forward else units

    cases = [(3, False, False), (4, False, True), (3, True, False), (4, True, True), (1, True, True)]
    return check_values(answer, right, cases, [once, once, twice, root, root])


@exercise
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
    plan = call(answer)
    refusal = _refused(plan)
    if refusal:
        raise Wrong(refusal)
    try:
        result = labkit.run("fsdp_wrap", **({"nproc": RANKS} | setup | plan))
    except labkit.RankFailed as failure:
        said = f"on rank {failure.rank}, {failure.exc_type}: {failure.message}"
        raise Wrong(f"the plan does not run: {said}") from failure
    except labkit.RunTimedOut as stopped:
        limit = f"{stopped.timeout_s:g} s"
        raise Wrong(f"a run with this plan had no end after {limit}; raise timeout_s if it is only slow") from stopped
    problems, counted = [], _count(result, "all_gather")
    excess = result.value("peak_total_bytes") / bound_bytes - 1
    if excess > 0:
        peaks = result.summary().filter(regex="^peak_(?!total_).*_bytes$").max()
        largest = str(peaks.idxmax()).removeprefix("peak_").removesuffix("_bytes").replace("_", " ")
        percent = f"{100 * excess:.0f} %" if excess >= 0.005 else "less than 1 %"
        problems.append(f"the peak is {percent} above the bound, and the largest part of it is {largest}")
    if counted > gathers:
        hint = "large units, and units that stay after the forward pass, are gathered less often"
        problems.append(f"{counted} all-gathers a step are more than {gathers}: {hint}")
    if problems:
        raise Wrong("; ".join(problems))
    return passed(f"below the bound, with {counted} all-gathers a step, and {gathers} are allowed")


@exercise
def forgotten_block(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 4: the index of the block that a run of fsdp_wrap, started with ``skip``, did not wrap.

    Raises:
        ValueError: the run skipped no block, or several.
    """
    forgotten = result.params["skip"]
    if len(forgotten) != 1:
        raise ValueError(f"skip = {tuple(forgotten)}: this check takes a run that forgot one block, such as skip=(1,)")
    index = call(answer)
    said = f"{name_of(answer)}() gave {shown(index)}"
    if not isinstance(index, Integral) or int(index) < 0:
        raise Wrong(f"{said}, not the index of a block: count from 0")
    if index != forgotten[0]:
        hint = "The root is gathered once a step, a unit twice: whose shard is missing from all_gather_bytes?"
        raise Wrong(f"{said}, but block {shown(index)} was wrapped. {hint}")
    return passed(f"block {index} stayed with the root")


@exercise
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
    if units != blocks:
        missing = "one block" if blocks - units == 1 else f"{blocks - units} blocks"
        problem = f"{missing} stayed with the root" if units < blocks else "more than the blocks was wrapped"
        raise Wrong(f"{seen}, expected {blocks}: {problem}")
    return passed(f"{seen}, one for each block")


@exercise
def tied_unit(answer: Callable[..., list[nn.Module]]) -> Verdict:
    """Exercise 5: the modules that must share a unit with a block, from (model, block).

    They are the block, and the modules outside of it that hold one of its parameters themselves.
    """
    cases = tied_cases()
    for case in cases:
        names = {module: repr(name) if name else "the model" for name, module in case.model.named_modules()}
        asked = f"{name_of(answer)}(model, {names[case.block]}), where {case.where},"
        # a RuntimeError comes of comparing tensors, which cannot tell if they are equal
        found = call(answer, case.model, case.block, in_words=asked, hint=IDENTITY)
        if not isinstance(found, list) or not all(isinstance(each, nn.Module) and each in names for each in found):
            raise Wrong(f"{asked} gave {shown(found)}: return a list of modules of the model")
        missing, extra = case.together - set(found), set(found) - case.together
        said = [
            f"{what} {', '.join(name for module, name in names.items() if module in some)}"
            for what, some in (("left out", missing), ("took in", extra))
            if some
        ]
        if said:
            raise Wrong(f"{asked} {' and '.join(said)}. {case.hint(missing, extra)}")
    return passed(f"{len(cases)} models agree")


@exercise
def expert_gradients(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 6: average all gradients but the experts' over 2 real ranks, from (model, experts, ranks).

    Args:
        answer: changes gradients in place.
        timeout_s: ranks that wait for each other are stopped after this.
    """
    models = [trained(index) for index in range(RANKS)]
    before, experts = [gradients_of(model) for model in models], experts_of(models[0])

    def judge(index: int, left: dict[str, Any]) -> None:
        for name, own in before[index].items():
            mean = torch.stack([each[name] for each in before]).mean(dim=0)
            kind, expected, rule = "shared", mean, "it must be the mean over the ranks"
            if name in experts:
                kind, expected, rule = "expert's", own, "it must stay this rank's own"
            if left[name] is None:
                raise Wrong(f"on rank {index}, the {kind} gradient of {name} is gone")
            known = {
                "is still this rank's own": own,
                "was averaged": mean,
                "was summed and not divided": RANKS * mean,
                "was divided but not summed": own / RANKS,
            }
            if not same(left[name], expected, **CLOSE):
                seen = next((words for words, each in known.items() if same(left[name], each, **CLOSE)), "is wrong")
                raise Wrong(f"on rank {index}, the {kind} gradient of {name} {seen}: {rule}")

    on_ranks("fsdp", answer, judge=judge, ranks=RANKS, timeout_s=timeout_s, waiting=SAME_ORDER, hints=HINTS)
    return passed(f"equal to one device on {RANKS} ranks: shared gradients averaged, the experts' their own")


def _refused(plan: object) -> str:
    """Why a plan cannot be launched; "" if it can."""
    if not isinstance(plan, dict):
        return f"the plan is {shown(plan)}, not a dict such as {{'wrap': 'root'}}"
    for name, value in plan.items():
        if name not in PLAN:
            return f"{name!r} is not for the plan to choose: take some of {', '.join(PLAN)}"
        if not any(type(value) is type(choice) and value == choice for choice in PLAN[name]):
            return f"{name} = {shown(value)} is none of {', '.join(map(repr, PLAN[name]))}"
    return ""


def _count(result: labkit.RunResult, collective: str) -> int:
    """How often a rank called a collective in one step; 0 where it never did."""
    counts = result.summary().get(f"{collective}_count")
    return 0 if counts is None else int(counts.max())


@dataclass(frozen=True)
class TiedCase:
    """A question to the learner, and its answer."""

    model: nn.Module
    block: nn.Module
    """The part of the model that becomes a unit."""
    together: set[nn.Module]
    """What must be in that unit, ``block`` included."""
    where: str
    """Which parameters are tied, for a message that starts with "where"."""

    def hint(self, missing: set[nn.Module], extra: set[nn.Module]) -> str:
        """For an answer that left out some modules, or took in some that do not belong there."""
        if missing:
            return ALL
        if extra & set(self.block.modules()):
            return INSIDE
        if any(next(module.parameters(recurse=False), None) is None for module in extra):
            return OWN
        return IDENTITY


def tied_cases() -> list[TiedCase]:
    """From nothing tied to a tie of three, with pitfalls between."""
    copied = tied("the output layer's weight is a copy of the embedding's", "embedding")
    embedding, output = (copied.model.get_submodule(name) for name in ("embedding", "output"))
    output.load_state_dict(embedding.state_dict(), strict=False)  # equal numbers in two parameters
    return [
        tied("nothing is tied", "blocks.0"),
        tied("the output layer has the embedding's weight", "embedding", "embedding", "output"),
        tied("two layers inside the block share a weight", "blocks.0", "blocks.0.0", "blocks.0.2"),
        copied,
        tied(
            "a layer inside it shares a bias with another block's", "blocks.0", "blocks.0.2", "blocks.1.0", name="bias"
        ),
        tied("three modules share its weight", "output", "embedding", "output", "heads.0"),
    ]


def tied(where: str, block: str, *holders: str, name: str = "weight") -> TiedCase:
    """A case in which some modules hold the first one's parameter of this name."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    parts = {"embedding": nn.Embedding(6, 4), "blocks": nn.Sequential(*blocks), "output": nn.Linear(4, 6)}
    model = nn.ModuleDict(parts | {"heads": nn.Sequential(nn.Linear(4, 6))})
    unit, modules = model.get_submodule(block), [model.get_submodule(each) for each in holders]
    for module in modules[1:]:
        setattr(module, name, getattr(modules[0], name))
    return TiedCase(model, unit, {unit, *modules} - set(unit.modules()) | {unit}, where)
