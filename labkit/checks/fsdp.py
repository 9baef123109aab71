"""Checks of lab 2, sharding parameters with FSDP."""

import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor, nn

import labkit
from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    call_text,
    exercise,
    is_tensor_close,
    judge_values,
    passing_verdict,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.fsdp import (
    RATE,
    expert_names,
    gradients_by_name,
    make_expert_model,
    rank_batch,
    two_units,
)
from labkit.models import catalog
from labkit.parallel.fsdp import WrapMode, random_block_index
from labkit.parallel.small_fsdp import flatten_tensors
from labkit.theory import fsdp as theory

RANKS = 2
EXPERT_WAIT_HINT = "does every rank call the same all-reduces, in the same order?"
# Gloo aborts the process in this case.
EXPERT_ERROR_HINTS = {
    "SIGABRT": f"the ranks sent gradients of different sizes to each other: {EXPERT_WAIT_HINT}"
}
ROLE_HINTS = {
    "shared": (
        "All ranks train the shared part together: add up over the ranks, and divide by their"
        " number."
    ),
    "expert's": (
        "Each rank has an expert of its own: nothing of it may travel, and its scale is that of one"
        " device."
    ),
}
TOLERANCES = {"rtol": 1e-4, "atol": 1e-7}
WAIT_HINT = "does every rank call the same collectives, in the same order?"
EMPTY_BUFFER_HINT = (
    "parameters were used while their buffer was empty: gather before the forward pass and before"
    " the backward pass"
)
SHARD_ERROR_HINTS = {
    "SIGSEGV": EMPTY_BUFFER_HINT,
    "out of bounds for storage": EMPTY_BUFFER_HINT,
    "SIGABRT": f"sizes differ: {WAIT_HINT}",
}
FIRST_BLOCK_POSITION = 4
"""Where block 0 of the toy model stands in it."""
CATEGORY_TEXT = {
    "activation": "activations",
    "temp": "temporary, gradients of activations among it",
    "unsharded parameter": "gathered parameters",
}
PERSISTENT_CATEGORIES = ("parameter", "gradient", "optstate")
"""What a rank keeps between steps: no plan that wraps anything changes it."""
PLAN_CHOICES: dict[str, tuple[Any, ...]] = {
    "wrap": get_args(WrapMode),
    "checkpointing": (False, True),
    "reshard_after_forward": (True, False),
}
"""What a memory plan may choose."""
IDENTITY_HINT = "Tied means the same object: compare with `is`, or by id()."
CONTAINER_HINT = "A container holds nothing itself, its parts do: see parameters(recurse=False)."
INSIDE_HINT = "What is inside the block is in its unit already."
ALL_MODULES_HINT = (
    "Look at every module of the model, and at every parameter of the block, also deep inside."
)


@exercise
def zero_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: the bytes that a rank holds between steps, from (parameters, ranks, stage);
    float32 with Adam.
    """
    hints = [
        (
            "Stage 0 shards nothing: a parameter, its gradient and Adam's two numbers have 4 bytes"
            " each."
        ),
        (
            "Stage 1 shards what Adam keeps, two numbers a parameter; parameters and gradients stay"
            " whole."
        ),
        "Stage 2 shards gradients as well; only the parameters stay whole.",
        "Stage 3 shards everything: nothing stays whole.",
    ]
    return judge_values(
        answer,
        lambda parameters, ranks, stage: int(
            sum(theory.zero_bytes(parameters, ranks, stage).values())
        ),
        [(1000, 1, 0), (1000, 4, 0), (1000, 4, 1), (1000, 4, 2), (1000, 4, 3), (6, 2, 3)],
        [hints[stage] for stage in (0, 0, 1, 2, 3, 3)],
    )


@exercise
def all_gathers(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: the number of all-gathers in a step, from (units, reshard_after_forward,
    root_has_parameters).

    ``units`` counts the root if it holds parameters.
    """
    once = "Without resharding the parameters stay after the forward pass: one all-gather a unit."
    twice = "What is freed after the forward pass is gathered again for the backward pass."
    root = "The root is not freed after the forward pass, since its backward pass comes next."

    def right_count(units: int, reshard_after_forward: bool, root_has_parameters: bool) -> int:
        return 2 * units - root_has_parameters if reshard_after_forward else units

    cases = [
        (3, False, False),
        (4, False, True),
        (3, True, False),
        (4, True, True),
        (1, True, True),
    ]
    return judge_values(answer, right_count, cases, [once, once, twice, root, root])


@exercise
def wire_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 3: the bytes that a rank sends over the wire in a step, from (parameter_bytes,
    ranks, technique).
    """
    ddp = "DDP's all-reduce is a reduce-scatter and an all-gather: two passes."
    fsdp = (
        "FSDP gathers for the forward pass, gathers again for the backward pass, and"
        " reduce-scatters: three passes."
    )
    kept = (
        "Parameters that are kept after the forward pass are gathered once: two passes, as with"
        " DDP."
    )
    one = (
        "A ring of ranks sends (ranks - 1) / ranks of the bytes in one pass: a rank's own part need"
        " not travel to it."
    )

    def right_bytes(parameter_bytes: int, ranks: int, technique: str) -> float:
        gathers = 2 if technique == "fsdp" else 1
        return int(sum(theory.wire_bytes(parameter_bytes, ranks, all_gathers=gathers).values()))

    cases = [
        (800, 2, "ddp"),
        (800, 8, "ddp"),
        (800, 8, "fsdp"),
        (800, 8, "kept"),
        (1600, 4, "fsdp"),
        (800, 1, "fsdp"),
    ]
    return judge_values(answer, right_bytes, cases, [ddp, one, fsdp, kept, one, one])


@exercise
def small_fsdp(answer: Callable[[nn.Module], Any], timeout_s: float = 30) -> Verdict:
    """Exercise 4: shard a unit on 2 real ranks, which train for two steps and are compared with one
    device.
    """
    model, plain = nn.Sequential(*two_units()), [nn.Sequential(*two_units()) for _ in range(RANKS)]
    for index, copy in enumerate(plain):
        inputs, targets = rank_batch(index)
        (copy(inputs) - targets).square().mean().backward()
    whole = [flatten_tensors([p.detach() for p in unit.parameters()], RANKS) for unit in model]
    own = [
        [
            flatten_tensors([p.grad for p in unit.parameters() if p.grad is not None], RANKS)
            for unit in copy
        ]
        for copy in plain
    ]
    mean = [torch.stack(each).mean(dim=0) for each in zip(*own, strict=True)]
    after = nn.Sequential(*two_units())
    for parameter, *each in zip(
        after.parameters(), *(copy.parameters() for copy in plain), strict=True
    ):
        parameter.data -= RATE * torch.stack([p.grad for p in each if p.grad is not None]).mean(
            dim=0
        )

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        inputs, size = rank_batch(index)[0], whole[0].nbytes
        for rank, shards in enumerate(sent["shards"]):
            for place, (shard, right) in enumerate(zip(shards, whole, strict=True)):
                _judge_share(rank, place, shard, right)
        held = sent["held"]
        _judge_freed_memory(held["at rest"], "right after it was sharded", size)
        first, second = (each(inputs) for each in (model, after))
        if not is_tensor_close(sent["outputs"][0], first, **TOLERANCES):
            said = f"on rank {index}, the forward pass gives another output than one device"
            raise WrongAnswer(
                said, hint="The buffer must hold every rank's share, in the order of the ranks."
            )
        _judge_freed_memory(held["forward"][:1], "after its forward pass", size)
        for place, gradient in enumerate(sent["gradients"]):
            _judge_gradient(index, place, gradient, mean[place], [each[place] for each in own])
        for place, left in enumerate(sent["left"]):
            if left:
                said = (
                    f"unit {place} still has {left} bytes of whole gradients after the backward"
                    " pass"
                )
                raise WrongAnswer(
                    said,
                    expected="0",
                    hint="Set .grad of the unit's own parameters to None.",
                )
        _judge_freed_memory(held["after"], "after the backward pass", size)
        if not is_tensor_close(sent["outputs"][1], second, **TOLERANCES):
            stale = is_tensor_close(sent["outputs"][1], first, **TOLERANCES)
            said = (
                "is that of the parameters before the update"
                if stale
                else "is another than one device's"
            )
            raise WrongAnswer(
                f"on rank {index}, the output after an update {said}",
                hint=(
                    "Gather what the shard holds now, in every forward pass: the optimizer has"
                    " changed it."
                ),
            )
        for name, count in {"all_gather": 4, "reduce_scatter": 2}.items():
            if sent["sent"].get(name, 0) != count:
                said = (
                    f"on rank {index}, {sent['sent'].get(name, 0)} calls of {name} in a step of two"
                    " units"
                )
                hint = (
                    "A unit is gathered twice, for its forward and its backward pass, and reduced"
                    " once."
                )
                raise WrongAnswer(said, expected=f"{count}", hint=hint)

    judge_on_ranks(
        "fsdp",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        hints=SHARD_ERROR_HINTS,
        what="units",
    )
    return passing_verdict(
        f"equal to one device on {RANKS} ranks, and whole parameters are held only where they are"
        " used"
    )


def _judge_share(index: int, place: int, shard: Any, whole: Tensor) -> None:
    """Judge whether the answer gave a unit this rank's share of it."""
    parts, unit = whole.chunk(RANKS), f"on rank {index}, what you return for unit {place}"
    if not isinstance(shard, Tensor):
        raise WrongAnswer(
            f"{unit} is a {shard}, no nn.Parameter",
            hint="Return the shard; an optimizer will train it.",
        )
    if shard.shape != parts[0].shape:
        hint = (
            "All of the unit's numbers in one row, zeros at the end so that the ranks divide them,"
            " one part a rank."
        )
        raise WrongAnswer(
            f"{unit} has shape {tuple(shard.shape)}",
            expected=f"{tuple(parts[0].shape)}",
            hint=hint,
        )
    if not is_tensor_close(shard, parts[index], **TOLERANCES):
        other = next(
            (rank for rank, part in enumerate(parts) if is_tensor_close(shard, part, **TOLERANCES)),
            None,
        )
        seen = "is not its part of the parameters" if other is None else f"is rank {other}'s part"
        raise WrongAnswer(
            f"{unit} {seen}", hint="Flatten unit.parameters() in their order; rank r keeps part r."
        )


def _judge_freed_memory(held: Sequence[int], moment: str, size: int) -> None:
    """Judge whether the memory of every unit's whole parameters was freed."""
    for place, amount in enumerate(held):
        if amount:
            said = f"{moment}, unit {place} still holds {amount} bytes of whole parameters"
            raise WrongAnswer(
                said,
                expected="0",
                hint=f"Resize the buffer's storage of {size} bytes to 0.",
            )


def _judge_gradient(
    index: int, place: int, got: Tensor | None, mean: Tensor, own: Sequence[Tensor]
) -> None:
    """Judge whether a shard's gradient is its part of the mean over the ranks."""
    shard = f"on rank {index}, the gradient of unit {place}'s shard"
    if got is None:
        raise WrongAnswer(
            f"{shard} is None",
            hint="Once the last of the unit's gradients is there, set shard.grad.",
        )
    known = {
        "is the sum over the ranks": RANKS * mean,
        "is the sum, divided twice": mean / RANKS,
        "is this rank's own": own[index],
        "is this rank's own, divided": own[index] / RANKS,
    }
    seen = {f"{words}, not the mean": each.chunk(RANKS)[index] for words, each in known.items()}
    seen |= {
        f"is rank {rank}'s part": part
        for rank, part in enumerate(mean.chunk(RANKS))
        if rank != index
    }
    if not is_tensor_close(got, mean.chunk(RANKS)[index], **TOLERANCES):
        words = next(
            (words for words, each in seen.items() if is_tensor_close(got, each, **TOLERANCES)),
            "is wrong",
        )
        raise WrongAnswer(
            f"{shard} {words}",
            hint="reduce_scatter_tensor adds up; a mean is a sum divided by the ranks.",
        )


@exercise
def peak_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: the peak of the small FSDP without activations, from (units, ranks)."""
    return judge_values(
        answer,
        lambda units, ranks: int(theory.small_fsdp_peak_bytes(units, ranks)),
        [([800], 1), ([800], 2), ([800, 800], 2), ([400, 1600, 800], 4), ([1600, 400, 1600], 8)],
        [
            (
                "One rank and one unit: parameters and Adam's two numbers, gradients, and their"
                " flat copy."
            ),
            (
                "Between steps a rank keeps its share of parameters and of Adam's two numbers, of"
                " all units."
            ),
            "Walk from the last unit to the first: shares of gradients pile up, whole ones go.",
            "The units before this one in the forward pass have no gradients yet.",
            "Compare the moment of each unit: the largest is the peak.",
        ],
    )


@exercise
def gradients_agree(answer: Callable[..., bool]) -> Verdict:
    """Exercise 6: a test that can fail, from (mine, reference): do gradients by name agree?"""
    draw = torch.Generator().manual_seed(0)
    right = {"weight": torch.randn(4, 3, generator=draw), "bias": torch.tensor([2.0, 1e-7, -1.0])}

    def with_changes(**changed: Tensor) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in (right | changed).items()}

    weight, bias = right["weight"], right["bias"]
    cases = [
        (True, with_changes(), "the same gradients", "Equal gradients agree."),
        (
            True,
            with_changes(bias=bias + 4e-7),
            "gradients that rounding moved by 4e-7, where the largest is 2",
            (
                "Divide the largest difference by the largest value of the same reference gradient,"
                " and allow 1e-5."
            ),
        ),
        (
            False,
            {name: 2 * each for name, each in right.items()},
            "gradients twice as large",
            "Compare values.",
        ),
        (
            False,
            with_changes(weight=weight / 2),
            "one gradient of two half as large",
            "Every name must agree, not one of them.",
        ),
        (
            False,
            with_changes(bias=-bias),
            "one gradient with the other sign",
            "A sum of differences may cancel: take abs().",
        ),
        (
            False,
            with_changes(bias=bias + 1e-3),
            "one gradient off by 1e-3",
            "1e-3 of 2 is more than 1 part in 100,000.",
        ),
        (
            False,
            with_changes(weight=torch.full_like(weight, torch.nan)),
            "a gradient of NaN",
            (
                "NaN compares as False with everything: ask whether the error is small, not whether"
                " it is large."
            ),
        ),
        (False, {"weight": weight}, "a gradient missing", "Compare the names first."),
        (False, {}, "no gradient at all", "A test that compared nothing must not pass."),
    ]
    for expected, mine, what, hint in cases:
        reference = right if mine else {}
        found = call_answer(
            answer, mine, reference, in_words=f"for {what}, {answer_name(answer)}(mine, reference)"
        )
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        if not isinstance(found, bool):
            raise WrongAnswer(
                f"for {what}, the answer is {value_text(found)}, neither True nor False"
            )
        if found != expected:
            raise WrongAnswer(
                f"{what[0].upper()}{what[1:]}: your test says {found}",
                expected=f"{expected}",
                hint=hint,
            )
    return passing_verdict(f"{len(cases)} cases agree: it can pass, and it can fail")


@exercise
def tokens_to_hide(answer: Callable[..., float]) -> Verdict:
    """Exercise 9: the number of tokens from which on communication is hidden, from (flops_per_s,
    wire_bytes_per_s, ranks, number_bytes).

    The answer may differ by 1 part in a million, so that the order of operations is free.
    """
    cases = [
        (
            (600.0, 1.0, 2, 4),
            "Three passes, each of (ranks - 1) / ranks of the bytes, at so many bytes a second.",
        ),
        ((1200.0, 1.0, 2, 4), "Arithmetic that is twice as fast hides half as much."),
        ((600.0, 1.0, 4, 4), "In a ring of 4, a rank sends 3/4 of the parameters in each pass."),
        ((600.0, 1.0, 4, 2), "A bfloat16 number has 2 bytes."),
        ((4e14, 4.5e11, 8, 2), "A token takes 6 operations for each parameter; P drops out."),
    ]
    for arguments, hint in cases:
        expected = theory.tokens_to_hide(*arguments)
        named: dict[str, Any] = dict(
            zip(
                ("flops_per_s", "wire_bytes_per_s", "ranks", "number_bytes"), arguments, strict=True
            )
        )
        found = call_answer(answer, **named)
        said = f"{call_text(answer, **named)} gave {value_text(found)}"
        if not isinstance(found, Real):
            raise WrongAnswer(f"{said}, not a number: does every path return?")
        if abs(float(found) - expected) > 1e-6 * expected:
            raise WrongAnswer(said, expected=f"{expected:,.6g}", hint=hint)
    return passing_verdict(f"{len(cases)} cases agree")


def replace_source_line(
    function: Callable[..., Any], line: str, instead: str = "pass"
) -> Callable[..., Any]:
    """Return the same function with one line of its source replaced: a mutant, which a good test
    should catch.

    Raises:
        ValueError: the line is missing, or occurs more than once.
    """
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    places = [number for number, each in enumerate(lines) if each.strip() == line.strip()]
    if len(places) != 1:
        raise ValueError(
            f"{line!r} stands {len(places)} times in {function.__name__}: take a line that stands"
            " once"
        )
    (place,) = places
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines[place] = f"{indent}{instead}"
    text, file = "\n".join(lines) + "\n", f"<{function.__name__} without {line!r}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    known = dict(function.__globals__)
    exec(compile(text, file, "exec"), known)
    mutant: Callable[..., Any] = known[function.__name__]
    return mutant


@exercise
def memory_plan(
    answer: Callable[[], dict[str, Any]], bound_bytes: int, gathers: int, **setup: Any
) -> Verdict:
    """Exercise 7: choose ``wrap``, ``checkpointing`` and ``reshard_after_forward`` to stay within
    two limits.

    The plan is launched on real ranks. What a run measures differs by some kB from time to time, so
    the verdict names no bytes, and the limit should leave 1 %.

    Args:
        answer: returns the plan, parameters of fsdp_wrap by name; the others keep their defaults.
        bound_bytes: the largest peak allowed, of all categories together, on the rank that holds
            most.
        gathers: the largest number of all-gathers in a step.
        **setup: the other parameters of the run, such as ``model="mlp_stack"``; 2 ranks by default.
    """
    plan = call_answer(answer)
    refusal = _plan_error(plan)
    if refusal:
        raise WrongAnswer(refusal)
    try:
        result = labkit.run("fsdp_wrap", **({"nproc": RANKS} | setup | plan))
    except labkit.RankFailed as failure:
        said = f"on rank {failure.rank}, {failure.exc_type}: {failure.message}"
        raise WrongAnswer(f"the plan does not run: {said}") from failure
    except labkit.RunTimedOut as stopped:
        limit = f"{stopped.timeout_s:g} s"
        raise WrongAnswer(
            f"a run with this plan had no end after {limit}; raise timeout_s if it is only slow"
        ) from stopped
    counted = _collective_count(result, "all_gather")
    excess = result.value("peak_total_bytes") / bound_bytes - 1
    if excess > 0:
        peaks = result.summary().filter(regex="^peak_(?!total_).*_bytes$").max()
        sizes = {
            str(name).removeprefix("peak_").removesuffix("_bytes"): size
            for name, size in peaks.items()
        }
        kept = () if result.params["wrap"] == "none" else PERSISTENT_CATEGORIES
        largest = max((size, name) for name, size in sizes.items() if name not in kept)[1].replace(
            "_", " "
        )
        percent = f"{100 * excess:.0f} %" if excess >= 0.005 else "less than 1 %"
        hint = (
            "Of the parts that a plan can change, the largest is"
            f" {CATEGORY_TEXT.get(largest, largest)}."
        )
        raise WrongAnswer(f"the peak is {percent} above the bound", hint=hint)
    if counted > gathers:
        hint = "Large units, and units that stay after the forward pass, are gathered less often."
        raise WrongAnswer(
            f"{counted} all-gathers a step are too many", expected=f"at most {gathers}", hint=hint
        )
    return passing_verdict(
        f"below the bound, with {counted} all-gathers a step, and {gathers} are allowed"
    )


@exercise
def missing_block(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 8: the index of the block that a run did not wrap, because of ``forget`` or
    ``skip``.

    Raises:
        ValueError: the run skipped no block, or several.
    """
    forgotten = tuple(result.params.get("skip", ()))
    entry, seed = catalog.MODELS[result.params["model"]], result.params.get("forget")
    if seed is not None:
        forgotten += (
            random_block_index(seed, sum(entry.class_counts[name] for name in entry.block_types)),
        )
    if len(forgotten) != 1:
        raise ValueError(
            f"skip = {forgotten}: this check takes a run that forgot one block, such as skip=(1,)"
        )
    index = call_answer(answer)
    said = f"{answer_name(answer)}() gave {value_text(index)}"
    if not isinstance(index, Integral) or int(index) < 0:
        raise WrongAnswer(f"{said}, not the index of a block: count from 0")
    if index == forgotten[0] + FIRST_BLOCK_POSITION and result.params["model"] == "toy":
        hint = f"Blocks 0–8 stand at positions {FIRST_BLOCK_POSITION}–{FIRST_BLOCK_POSITION + 8}."
        raise WrongAnswer(
            f"{said}: {value_text(index)} is its position in the model, not its number", hint=hint
        )
    if index != forgotten[0]:
        hint = "Above the all-gathers stand the units' positions: which one of 4 to 12 is missing?"
        raise WrongAnswer(
            f"{said}, but block {value_text(index)} was wrapped or is not there", hint=hint
        )
    return passing_verdict(f"block {index} stayed with the root")


@exercise
def every_block_wrapped(result: labkit.RunResult, blocks: int) -> Verdict:
    """Tell whether a run of fsdp_wrap made each of its blocks a unit, by counting its collectives.

    Each unit's gradients are reduce-scattered once. Its parameters are gathered once for the
    forward pass, and again for the backward pass unless it is the root. So the two counts differ by
    the number of units other than the root.

    Args:
        result: of a run with fully_shard that reshards after the forward pass.
        blocks: the number of blocks in the model.

    Raises:
        ValueError: the run keeps parameters after the forward pass, so that the root does not
            differ from the others.
    """
    if not result.params["reshard_after_forward"]:
        raise ValueError(
            "reshard_after_forward = False gathers every unit once, the root too: take a run with"
            " True"
        )
    gathered, reduced = (
        _collective_count(result, "all_gather"),
        _collective_count(result, "reduce_scatter"),
    )
    units = gathered - reduced
    seen = f"units beside the root: {units} ({gathered} all-gathers less {reduced} reduce-scatters)"
    if units != blocks:
        missing = "one block" if blocks - units == 1 else f"{blocks - units} blocks"
        problem = (
            f"{missing} stayed with the root"
            if units < blocks
            else "more than the blocks was wrapped"
        )
        raise WrongAnswer(seen, expected=f"{blocks}", hint=f"{problem[0].upper()}{problem[1:]}.")
    return passing_verdict(f"{seen}, one for each block")


@exercise
def tied_unit(answer: Callable[..., list[nn.Module]]) -> Verdict:
    """Exercise 10: the modules that must share a unit with a block, from (model, block).

    They are the block, and the modules outside it that directly hold one of its parameters.
    """
    cases = tying_cases()
    for case in cases:
        names = {
            module: repr(name) if name else "the model"
            for name, module in case.model.named_modules()
        }
        asked = f"{answer_name(answer)}(model, {names[case.block]}), where {case.where},"
        # a RuntimeError comes of comparing tensors, which cannot tell if they are equal
        found = call_answer(answer, case.model, case.block, in_words=asked, hint=IDENTITY_HINT)
        if not isinstance(found, list) or not all(
            isinstance(each, nn.Module) and each in names for each in found
        ):
            raise WrongAnswer(
                f"{asked} gave {value_text(found)}: return a list of modules of the model"
            )
        missing, extra = case.together - set(found), set(found) - case.together
        said = [
            f"{what} {', '.join(name for module, name in names.items() if module in some)}"
            for what, some in (("left out", missing), ("took in", extra))
            if some
        ]
        if said:
            raise WrongAnswer(f"{asked} {' and '.join(said)}", hint=case.hint_for(missing, extra))
    return passing_verdict(f"{len(cases)} models agree")


@exercise
def expert_gradients(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 11: on 2 real ranks, average the shared gradients and divide the experts', from
    (model, experts, ranks).

    Args:
        answer: changes gradients in place.
        timeout_s: ranks that wait for each other are stopped after this.
    """
    models = [make_expert_model(index) for index in range(RANKS)]
    before, experts = [gradients_by_name(model) for model in models], expert_names(models[0])

    def judge_rank(index: int, left: dict[str, Any]) -> None:
        for name, own in before[index].items():
            mean = torch.stack([each[name] for each in before]).mean(dim=0)
            kind, expected, rule = "shared", mean, "the mean over the ranks"
            if name in experts:
                kind, expected, rule = (
                    "expert's",
                    own / RANKS,
                    "this rank's own, divided by the ranks",
                )
            if left[name] is None:
                raise WrongAnswer(f"on rank {index}, the {kind} gradient of {name} is gone")
            known = {
                "is still this rank's own": own,
                "was averaged": mean,
                "was summed and not divided": RANKS * mean,
                "was divided but not summed": own / RANKS,
            }
            if not is_tensor_close(left[name], expected, **TOLERANCES):
                seen = next(
                    (
                        words
                        for words, each in known.items()
                        if is_tensor_close(left[name], each, **TOLERANCES)
                    ),
                    "is wrong",
                )
                raise WrongAnswer(
                    f"on rank {index}, the {kind} gradient of {name} {seen}",
                    expected=rule,
                    hint=ROLE_HINTS[kind],
                )

    judge_on_ranks(
        "fsdp",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=EXPERT_WAIT_HINT,
        hints=EXPERT_ERROR_HINTS,
    )
    return passing_verdict(
        f"as asked on {RANKS} ranks: shared gradients are the mean, the experts' their own, divided"
    )


def _plan_error(plan: object) -> str:
    """Return why a plan cannot be launched; "" if it can."""
    if not isinstance(plan, dict):
        return f"the plan is {value_text(plan)}, not a dict such as {{'wrap': 'root'}}"
    for name, value in plan.items():
        if name not in PLAN_CHOICES:
            return f"{name!r} is not for the plan to choose: take some of {', '.join(PLAN_CHOICES)}"
        if not any(
            type(value) is type(choice) and value == choice for choice in PLAN_CHOICES[name]
        ):
            return (
                f"{name} = {value_text(value)} is none of"
                f" {', '.join(map(repr, PLAN_CHOICES[name]))}"
            )
    return ""


def _collective_count(result: labkit.RunResult, collective: str) -> int:
    """Return how often a rank called a collective in one step."""
    counts = result.summary().get(f"{collective}_count")
    return 0 if counts is None else int(counts.max())


@dataclass(frozen=True)
class TyingCase:
    """A question to the learner, with its answer."""

    model: nn.Module
    block: nn.Module
    """The part of the model that becomes a unit."""
    together: set[nn.Module]
    """What must be in that unit, ``block`` included."""
    where: str
    """Which parameters are tied, for a message that starts with "where"."""

    def hint_for(self, missing: set[nn.Module], extra: set[nn.Module]) -> str:
        """Return the hint for an answer that leaves out some modules, or has some that do not
        belong there.
        """
        if missing:
            return ALL_MODULES_HINT
        if extra & set(self.block.modules()):
            return INSIDE_HINT
        if any(next(module.parameters(recurse=False), None) is None for module in extra):
            return CONTAINER_HINT
        return IDENTITY_HINT


def tying_cases() -> list[TyingCase]:
    """Return the cases, from nothing tied to a tie of three, with pitfalls between."""
    copied = make_tying_case("the output layer's weight is a copy of the embedding's", "embedding")
    embedding, output = (copied.model.get_submodule(name) for name in ("embedding", "output"))
    # Two separate parameters with equal values, instead of a shared one.
    output.load_state_dict(embedding.state_dict(), strict=False)
    return [
        make_tying_case("nothing is tied", "blocks.0"),
        make_tying_case(
            "the output layer has the embedding's weight", "embedding", "embedding", "output"
        ),
        make_tying_case(
            "two layers inside the block share a weight", "blocks.0", "blocks.0.0", "blocks.0.2"
        ),
        copied,
        make_tying_case(
            "a layer inside it shares a bias with another block's",
            "blocks.0",
            "blocks.0.2",
            "blocks.1.0",
            name="bias",
        ),
        make_tying_case(
            "three modules share its weight", "output", "embedding", "output", "heads.0"
        ),
    ]


def make_tying_case(where: str, block: str, *holders: str, name: str = "weight") -> TyingCase:
    """Make a case in which some modules hold the first one's parameter of this name."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    parts = {
        "embedding": nn.Embedding(6, 4),
        "blocks": nn.Sequential(*blocks),
        "output": nn.Linear(4, 6),
    }
    model = nn.ModuleDict(parts | {"heads": nn.Sequential(nn.Linear(4, 6))})
    unit, modules = model.get_submodule(block), [model.get_submodule(each) for each in holders]
    for module in modules[1:]:
        setattr(module, name, getattr(modules[0], name))
    return TyingCase(model, unit, {unit, *modules} - set(unit.modules()) | {unit}, where)
