"""Checks of lab 5b, two dimensions at work."""

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import labkit
from labkit.parallel.tensor_parallel import Plan
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.ranks import two_dim as ranks_two_dim
from labkit_course.checks.two_dim import ACTIVATION_BYTES, judge_plan

# Hints by collective along an axis, and by axis.
COUNT_HINTS = {
    "tp/all_reduce": (
        "Each pair sums its parts forward, and once more as it is recomputed; backward, each but "
        "the first sums the gradient of its input."
    ),
    "data/all_gather": "Each MLP is a unit of FSDP, gathered for both passes, and not once more.",
    "data/reduce_scatter": "Each unit's gradients are reduced once.",
    "tp": "Along tp activations are added up, which is an all-reduce.",
    "data": "Along data FSDP gathers parameters and reduce-scatters gradients.",
}


@exercise
def collectives(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 1: how often each collective runs along each axis, as ``{"tp/all_reduce": 5}``.

    A run of two_dim measured the right counts; raise ValueError if it has none by axis.
    """
    counts = [name for name in result.summary() if "/" in name and name.endswith("_count")]
    measured = {name.removesuffix("_count"): int(result.value(name)) for name in counts}
    if not measured:
        rule = "take a run of two_dim that measures"
        raise ValueError(f"this run counted no collective along an axis: {rule}")
    found = judge.call_answer(answer)
    said = f"{judge.answer_name(answer)}() gave {judge.value_text(found)}"
    judge.expect(isinstance(found, Mapping), f"{said}, not a dict such as {{'tp/all_reduce': 1}}")
    for name in found:
        known = isinstance(name, str) and name.split("/")[0] in ("tp", "data")
        hint = "A key is an axis, tp or data, and a collective, with a / between: 'tp/all_reduce'."
        judge.expect(known, f"the key {judge.value_text(name)} names no axis", hint=hint)
    # Names that only one of the two has are judged too, as a count of 0.
    for name in [*found, *measured]:
        mine, counted = found.get(name, 0), measured.get(name, 0)
        is_right = isinstance(mine, Integral) and mine == counted
        hint = COUNT_HINTS.get(name) or COUNT_HINTS[name.split("/")[0]]
        said, expected = f"{name}: you say {judge.value_text(mine)}", "which the ranks counted"
        judge.expect(is_right, said, f"{counted}, {expected}", hint)
    seen = ", ".join(f"{count} {name}" for name, count in sorted(measured.items()))
    return judge.passing_verdict(f"{seen}, as counted")


@exercise
def words_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 2: a plan for ``Words``, an embedding and the last layer, on real ranks."""
    passed = "output and gradients, and the words of both tables shared out"
    return judge_plan(answer, "words", timeout_s, passed, judge_rest=_judge_words)


@exercise
def stack_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 3: a plan for ``MLPStack`` that shards the sequence between the MLPs."""
    passed = "output and gradients, every matrix and the sequence shared out"

    # Of five all-reduces four become a reduce-scatter, and an all-gather of a rank's tokens.
    def enough(tp: int) -> tuple[int, int]:
        return 9, 5 * ACTIVATION_BYTES + 4 * ACTIVATION_BYTES // tp

    return judge_plan(answer, "stack", timeout_s, passed, enough, _judge_sequence)


@exercise
def cut_block_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 4: a plan for a transformer block whose tokens come in cut, and leave so."""
    passed = "output and gradients, those of the norms included"
    hint = "On each rank a norm sees its own tokens. Who adds up the gradients of its weight?"
    return judge_plan(answer, "cut_block", timeout_s, passed, hint=hint)


def our_stack_plan() -> Plan:
    """Return a right answer to exercise 3, which runs while the learner's is open."""
    whole, cut = Replicate(), Shard(1)
    columns = zip(range(3), (whole, cut, cut), strict=True)
    rows = zip(range(3), (cut, cut, whole), strict=True)
    first = {f"layers.{i}.in_proj": ColwiseParallel(input_layouts=comes) for i, comes in columns}
    return first | {f"layers.{i}.out_proj": RowwiseParallel(output_layouts=to) for i, to in rows}


def our_block_plan() -> Plan:
    """Return a right answer to exercise 4, which runs while the learner's is open."""
    styles = {
        ("query", "key", "value", "gate", "up"): ColwiseParallel(input_layouts=Shard(1)),
        ("out", "down"): RowwiseParallel(output_layouts=Shard(1)),
        ("attention_norm", "mlp_norm"): SequenceParallel(),
    }
    return {name: style for names, style in styles.items() for name in names}


def _judge_words(sent: Mapping[str, Any], tp: int) -> None:
    rows, words = sent["held"]["embed.weight"][0], ranks_two_dim.VOCABULARY_SIZE
    if rows == words:
        said = f"all is right, but every rank looks up all {words} words, in a part of the features"
        hint = "RowwiseParallel cuts an embedding's table by its rows, which are the words."
        raise judge.WrongAnswer(said, expected=f"rows of {words // tp} words", hint=hint)


def _judge_sequence(sent: Mapping[str, Any], tp: int) -> None:
    tokens = ranks_two_dim.TOKENS
    if sent["between"]["layers.0"][1] == tokens:
        said = f"all is right, but between the MLPs every rank holds all {tokens} tokens"
        hint = "The first MLP's result leaves as Shard(1), and comes so into the second."
        raise judge.WrongAnswer(said, expected=str(tokens // tp), hint=hint)
