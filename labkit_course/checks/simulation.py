"""Checks of lab 6, does it fit?"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import labkit
from labkit.errors import ParameterError
from labkit.theory.links import SIMPLE
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise, expect
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import simulation as on_rank
from labkit_simulate.block_memory import block_memory_table, peak_phase_and_block
from labkit_simulate.memory_fit import GIB, memory_fit
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.simulation import ALLOCATOR_FACTOR, RESERVED_GIB
from labkit_simulate.theory.transformer import LLAMA_2_7B, TrainingSetup
from launch.given import TRAIN

LAB = "simulation"
HOSTS = "h100-8x"
# Exercise 1 trains on real ranks, and then on one of very many.
REAL_RANKS, MANY_RANKS = 2, 1024
# Exercise 2 simulates these blocks on so many ranks, and exercise 4 plans the choices.
BLOCKS, FULLEST_RANKS, FULLEST_NEAR = 4, (64, 8), 0.01
CHOICES: dict[str, Any] = {"batch": [1, 2, 4], "shard_over": [None, 8], "layers": 2}
PLAN_RANKS = 16
# On these hosts of exercise 4 another mesh is the quicker one than on HOSTS.
BANDWIDTH_SHARE = 0.2
# The task of exercise 5, and how near to the quickest way an answer has to come.
RANKS, BUDGET_GIB, CHOICE_GIB, SEQUENCE, NEAR = 64, 24.0, 40.0, 2048, 0.97
NAMES = ("shard_over", "batch", "checkpointing")
LATENCY_US = 600
# Of a budget, as section 4 advises: an H100's allocator took up to 11 % more than modelled.
USABLE = 0.9


@exercise
def train(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: a loop that can be simulated, and trains on real ranks as the given one."""
    outputs = judge_on_ranks(
        "simulation",
        answer,
        judge=_judge_training,
        sizes=(REAL_RANKS,),
        timeout_s=60,
        waiting="Does every rank make the same all-reduces?",
    )
    try:
        result = labkit.simulate(
            Path(on_rank.__file__), world_size=MANY_RANKS, use={"train": answer}
        )
    except labkit.RankFailed as failure:
        said = f"{judge.answer_name(answer)} as one of {MANY_RANKS:,} ranks: {failure.message}"
        raise judge.WrongAnswer(
            said.partition("\n")[0], expected="no value is asked for", hint=_NO_VALUE_HINT
        ) from None
    steps, made = len(on_rank.SCALES), int(result.summary().iloc[0].get("all_reduce_count", 0))
    said = f"as one of {MANY_RANKS:,} ranks it makes {made} all-reduces in {steps} steps"
    hint = "A simulation is of use if the program does there what it does on real ranks."
    expect(made == steps, said, steps, hint)
    return judge.passing_verdict(
        f"{steps} steps give the weights and losses of clips.py on {len(outputs)} real ranks,"
        f" and {made} all-reduces as one of {MANY_RANKS:,}"
    )


_NO_VALUE_HINT = (
    "Can a tensor be computed that does the same in both cases? And does anything need the number"
    " before training is over?"
)


def _judge_training(ranks: int, index: int, output: dict[str, Any]) -> None:
    """Raise WrongAnswer unless weights and losses of a real rank are those of the given loop."""
    weights = output["weights"]
    likely = {
        "are those of a loop that never clips": weights["never"],
        "are those of a loop that always divides by the norm": weights["always"],
    }
    said = f"with {ranks} ranks the weights after {len(on_rank.SCALES)} steps"
    judge.expect_close(
        weights["answer"],
        weights["right"],
        said,
        likely,
        "are not those of clips.py",
        "those of clips.py",
        "By which factor does clips.py multiply a gradient with a norm of 4, and one of 0.5?",
    )
    losses, right = output["losses"], output["right_losses"]
    said = f"with {ranks} ranks the weights are right, and the losses "
    expect(isinstance(losses, list), f"{said}are a {losses}", "a list of a loss for each batch")
    said += judge.value_text([round(each, 3) for each in losses])
    expect(len(losses) == len(right) and judge.is_close(losses, right), said, right)


@exercise
def fullest_block(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: the block in whose backward pass a rank holds most, and bytes, as simulated."""
    judge.raise_if_not_attempted(answer)
    sizes = LLAMA_2_7B.block_parameters, LLAMA_2_7B.root_parameters
    passed = []
    for ranks in FULLEST_RANKS:
        right, held, kept_bytes = _simulated_peak(ranks)
        asked = f"{judge.answer_name(answer)} of {BLOCKS} blocks on {ranks} ranks"
        found = judge.call_answer(answer, BLOCKS, *sizes, ranks, kept_bytes, in_words=asked)
        parts = ", ".join(f"{name} {size / GIB:.3f}" for name, size in held.items())
        total = sum(held.values())
        wanted = f"block {right} and {total / GIB:.3f} GiB, of which {parts}"
        said = f"{asked} gave {judge.value_text(found)}"
        is_pair = isinstance(found, tuple) and len(found) == 2
        expect(is_pair, said, wanted, "Return a pair: the block's number, and the bytes.")
        block, most = found
        said = f"{asked} gave block {block} and {most / GIB:.3f} GiB"
        hint = (
            "From each block to the one before, what blocks keep becomes less, and the shards of"
            " gradients become more. What does the first block lack, and the last?"
        )
        expect(block == right, said, wanted, hint)
        hint = "Which row of the exercise's list is missing, and in which dtype is each one?"
        expect(abs(most / total - 1) <= FULLEST_NEAR, said, wanted, hint)
        passed.append(f"block {block} and {most / GIB:.3f} GiB on {ranks} ranks")
    return judge.passing_verdict(
        f"of {BLOCKS} blocks, {' and '.join(passed)}, as simulated without Temp"
    )


@functools.cache
def _simulated_peak(ranks: int) -> tuple[int, dict[str, int], int]:
    """Return the block of a simulated peak, its bytes by kind, and those that a block keeps."""
    settings: dict[str, Any] = {"layers": BLOCKS, "checkpointing": "full", "sequence": SEQUENCE}
    result = labkit.simulate(TRAIN, world_size=ranks, **settings)
    block = peak_phase_and_block(result)[1].removeprefix("blocks.")
    kinds = {
        "parameters": "parameter",
        "Adam": "optstate",
        "gradients": "gradient",
        "gathered": "unsharded_parameter",
        "gathered ahead": "all_gather",
        "being reduced": "reduce_scatter",
        "kept by blocks": "activation",
    }
    held = {name: int(result.value(f"peak_{kind}_bytes")) for name, kind in kinds.items()}
    kept_bytes = int(block_memory_table(result).loc["blocks.0", "activation"])
    return int(block), held, kept_bytes


@exercise
def fewest_hosts(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: hosts of 8 on which each rank finds room, or None, as ``theory.fewest_hosts``."""

    def right_hosts(shared_bytes: float, own_bytes: float, budget_bytes: float) -> int:
        return math.ceil(shared_bytes / 8 / (budget_bytes - own_bytes))

    # Each case brings one more rule into play.
    cases = [
        (1280.0, 0.0, 40.0, "That many ranks share the bytes, and a host has 8 of them."),
        (1280.0, 20.0, 60.0, "Each rank also holds its own bytes."),
        (1281.0, 20.0, 60.0, "Rounded down, the last bytes find no room."),
    ]
    judge.judge_cases(answer, right_hosts, cases)
    # None is no number, so this case is judged by itself.
    asked = judge.call_text(answer, 640.0, 60.0, 60.0)
    found = judge.call_answer(answer, 640.0, 60.0, 60.0)
    hint = "The own bytes alone fill the budget. More ranks do not make them fewer."
    said, expected = f"{asked} gave {judge.value_text(found)}", "None: no number of hosts is enough"
    expect(found is None, said, expected, hint)
    return judge.passing_verdict("4 cases agree, one of them without an answer")


@exercise
def quickest(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: of the settings that leave a tenth free, those of most tokens a second."""
    judge.raise_if_not_attempted(answer)
    small = _small_plan()
    asked = f"{judge.answer_name(answer)} of {PLAN_RANKS} ranks"
    given = TRAIN, PLAN_RANKS, _plan_hosts(), small.budget_gib, dict(CHOICES)
    found = judge.call_answer(answer, *given, in_words=asked)
    names = [name for name, values in CHOICES.items() if isinstance(values, list)]
    wanted = f"the settings of one candidate, with {' and '.join(names)}"
    is_choice = isinstance(found, Mapping) and all(name in found for name in names)
    expect(is_choice, f"{asked} gave {judge.value_text(found)}", wanted)
    key = tuple(found[name] for name in names)
    said = f"{asked} gave {', '.join(f'{name} {found[name]!r}' for name in names)}"
    expect(key in small.rows, f"{said}, which is no candidate", wanted)
    needed_gib, step_s, speed = small.rows[key]
    best = ", ".join(f"{name} {value!r}" for name, value in zip(names, small.right, strict=True))
    seen = f"{said}, which needs {needed_gib:.2f} GiB of {small.budget_gib:.2f}"
    hint = "Does it leave a tenth of the budget free?"
    expect(needed_gib <= USABLE * small.budget_gib, seen, best, hint)
    seen = f"{said}, which is the best on {HOSTS}, not on the hosts that were given"
    hint = f"Their network cards have a share of {BANDWIDTH_SHARE:g} of the bandwidth."
    expect(key != small.right_elsewhere, seen, best, hint)
    hint = ""
    if step_s < small.rows[small.right][1]:
        hint = "Its step is shorter, but how many sequences does it train in it?"
    expect(key == small.right, f"{said}: {speed:,.0f} tokens a second", best, hint)
    return judge.passing_verdict(
        f"{best}: {speed:,.0f} tokens a second on a GPU, with a tenth of"
        f" {small.budget_gib:.2f} GiB free ({CHOICES['layers']} blocks, and a share of"
        f" {BANDWIDTH_SHARE:g} of the network)"
    )


def _plan_hosts() -> Hardware:
    """Return the hosts of exercise 4."""
    slow = get_hardware(HOSTS).with_network(bandwidth_share=BANDWIDTH_SHARE)
    return replace(slow, name=f"{HOSTS}, slow network")


@dataclass(frozen=True)
class SmallPlan:
    """The plan of exercise 4.

    Attributes:
        rows: GiB, seconds of a step and tokens a second by choice.
        right: the choice of most tokens a second that leaves a tenth free.
        right_elsewhere: the same on ``HOSTS``.
        budget_gib: the way that trains most tokens fits into it, without leaving a tenth free.
    """

    rows: Mapping[tuple[Any, ...], tuple[float, float, float]]
    right: tuple[Any, ...]
    right_elsewhere: tuple[Any, ...]
    budget_gib: float


@functools.cache
def _small_plan() -> SmallPlan:
    hosts = [_plan_hosts(), get_hardware(HOSTS)]
    found = labkit.plan(TRAIN, world_size=PLAN_RANKS, hardware=hosts, **CHOICES)
    names = [name for name, values in CHOICES.items() if isinstance(values, list)]
    by_hosts: dict[str, dict[tuple[Any, ...], tuple[float, float, float]]] = {}
    for row in found.frame.to_dict("records"):
        speed = SEQUENCE * row["batch"] / row["step_s"]
        key = tuple(row[name] for name in names)
        figures = row["needed_bytes"] / GIB, row["step_s"], speed
        by_hosts.setdefault(row["hardware"], {})[key] = figures
    rows, elsewhere = (by_hosts[each.name] for each in hosts)
    most = max(rows, key=lambda key: rows[key][2])
    budget_gib = rows[most][0] / ((1 + USABLE) / 2)
    fitting = [key for key in rows if rows[key][0] <= USABLE * budget_gib]
    right = max(fitting, key=lambda key: rows[key][2])
    right_elsewhere = max(fitting, key=lambda key: elsewhere[key][2])
    return SmallPlan(rows, right, right_elsewhere, budget_gib)


@exercise
def chosen(answer: Callable[..., Any]) -> Verdict:
    """Exercise 5: mesh, batch and checkpointing on a slow network; simulated with all blocks."""
    found = judge.call_answer(answer)
    # The settings of a candidate hold all that was asked for, such as the sequence.
    is_choice = isinstance(found, Mapping) and set(NAMES) <= set(found)
    said = f"it gave {judge.value_text(found)}"
    expect(is_choice, said, f"a dict with {', '.join(NAMES)}")
    shown = judge.value_text({name: found[name] for name in NAMES})
    try:
        needed_gib, speed = simulated_choice(*(found[name] for name in NAMES))
    except (ParameterError, TypeError) as error:
        said = f"{shown} is refused: {str(error).partition(chr(10))[0]}"
        raise judge.WrongAnswer(said, expected="values that train.py takes") from None
    said = f"{shown} needs {needed_gib:.1f} GiB of {CHOICE_GIB:g}"
    hint = "Shard over more ranks, take fewer sequences, or keep less for the backward pass."
    usable_gib = USABLE * CHOICE_GIB
    expect(needed_gib <= usable_gib, said, f"at most {usable_gib:g} GiB, a tenth is free", hint)
    best = quickest_by_formula()
    best_speed = max(speed, simulated_choice(*best)[1])
    said += f" and trains {speed:,.0f} tokens a second on a GPU"
    hint = "What does recomputing cost? Behind what can the slow network hide?"
    expect(speed >= NEAR * best_speed, said, f"at least {NEAR * best_speed:,.0f}", hint)
    return judge.passing_verdict(said)


def slow_hosts() -> Hardware:
    """Return the hosts of exercise 5, with the one protocol whose messages section 7 counts."""
    return get_hardware(HOSTS).with_network(latency_us=LATENCY_US, protocols=(SIMPLE,))


@functools.cache
def simulated_choice(shard_over: int | None, batch: int, checkpointing: str) -> tuple[float, float]:
    """Return the GiB that a rank of the task needs, and the tokens of a GPU in a second."""
    settings: dict[str, Any] = dict(zip(NAMES, (shard_over, batch, checkpointing), strict=True))
    hosts = slow_hosts()
    result = labkit.simulate(TRAIN, world_size=RANKS, hardware=hosts, sequence=SEQUENCE, **settings)
    fit = memory_fit(result, CHOICE_GIB)
    speed = batch * SEQUENCE / result.value("reckoned_step_s")
    return (fit.budget_bytes - fit.margin_bytes) / GIB, speed


def quickest_by_formula() -> tuple[int | None, int, str]:
    """Return the settings of most tokens a second that surely leave a tenth free."""
    hosts = slow_hosts()
    speeds: dict[tuple[int | None, int, str], float] = {}
    for shard_over in (None, 8, 16, 32):
        for batch in (1, 2, 4, 8):
            for checkpointing in ("none", "selective", "full"):
                setup = TrainingSetup(
                    LLAMA_2_7B,
                    batch,
                    SEQUENCE,
                    RANKS,
                    checkpointing,
                    shard_ranks=shard_over,
                )
                step = setup.estimate_step(hosts)
                needed_gib = ALLOCATOR_FACTOR * step.memory_bytes / GIB + RESERVED_GIB
                if needed_gib <= USABLE * CHOICE_GIB:
                    speeds[shard_over, batch, checkpointing] = step.tokens_per_s
    return max(speeds, key=lambda key: speeds[key])
