"""Checks of lab 5b, two dimensions at work."""

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy

import labkit
from labkit.parallel.tensor_parallel import Plan
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import two_dim as ranks_two_dim
from labkit_course.checks.ranks.two_dim import MESH_SHAPES
from labkit_course.checks.traffic import expect_traffic
from labkit_course.checks.two_dim import ACTIVATION_BYTES, judge_plan, wrong_gradients

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
NORM_HINT = "On each rank a norm sees its own tokens. Who adds up the gradients of its weight?"
# What shares parameters out along an axis of a language model's step.
STEP_HINTS = {
    "tp": "parallelize_module(model, mesh, plan) cuts it, along the axis of its mesh.",
    "data": "fully_shard(model, mesh=…) shards it, along the axis of its mesh.",
}
# Hints by a part of the error that a step raises.
ERROR_HINTS = {
    "mixed torch.Tensor and DTensor": "the logits are cut: loss and backward() stand inside "
    "`with loss_parallel():`"
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
def language_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 4: a plan for ``LanguageModel`` whose tokens and logits stay cut."""
    passed = "output and gradients, with tokens and logits cut"
    return judge_plan(answer, "language", timeout_s, passed, None, _judge_language, NORM_HINT)


@exercise
def language_step(answer: Callable[..., Any], timeout_s: float = 60) -> Verdict:
    """Exercise 5: a step of a language model on both axes, from (model, ids, mesh, plan)."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        data, _ = MESH_SHAPES[ranks]
        whole = ranks_two_dim.make_exercise_model("language")
        # Shares first, because they explain a wrong gradient.
        axes = {"data": "norm.weight", "tp": "up.weight"} if data > 1 else {"tp": "up.weight"}
        for axis, name in axes.items():
            held, right = sent["held"][name], sent["right_held"][name]
            said = f"along {axis} nothing is shared out: a rank holds {held} numbers of {name}"
            judge.expect(held <= right, said, right, STEP_HINTS[axis])
        missing = [name for name, each in sent["gradients"].items() if each is None]
        judge.expect(
            not missing, f"{', '.join(missing[:2])} got no gradient", hint="Call backward."
        )
        for place in range(data):
            ids = ranks_two_dim.language_ids(place)
            loss = cross_entropy(whole(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            (loss / data).backward()
        for name, each in whole.named_parameters():
            said, close = f"the gradient of {name}", {"rtol": 1e-4, "atol": 1e-6}
            hint = "The logits at a token are for the next: compare them with ids[:, 1:]."
            wrong = "is not one device's"
            judge.expect_close(
                sent["gradients"][name], each.grad, said, {}, wrong, hint=hint, **close
            )
        said = "the gradients are right, but along tp a step sends"
        hint = "With loss_parallel nothing need be gathered behind the output layer."
        # Along data the calls depend on the units of FSDP, which are free.
        made, right = (
            {name: each for name, each in sent[which].items() if not name.startswith("data/")}
            for which in ("sent", "right_sent")
        )
        expect_traffic(made, right, said, hint)

    waiting = "do all of them call the same?"
    how: dict[str, Any] = {"sizes": tuple(MESH_SHAPES), "timeout_s": timeout_s, "waiting": waiting}
    judge_on_ranks("two_dim", answer, judge=judge_rank, what="step", hints=ERROR_HINTS, **how)
    return judge.passing_verdict("gradients and collectives as they should be, on both axes")


def wrong_block_gradients(answer: Callable[[], Any]) -> list[str]:
    """Name the wrong gradients of a transformer block whose tokens come in cut, with this plan."""
    return wrong_gradients(answer, "cut_block")


def whole_tensors(ranks: int) -> float:
    """Return the whole tensors that remain at the peak with exercise 3's plan, by theory."""
    # The samples and the result are whole; of the two tensors between a rank has its share.
    return 2 + 2 / ranks


def our_stack_plan() -> Plan:
    """Return a right answer to exercise 3, which runs while the learner's is open."""
    whole, cut = Replicate(), Shard(1)
    columns = zip(range(3), (whole, cut, cut), strict=True)
    rows = zip(range(3), (cut, cut, whole), strict=True)
    first = {f"layers.{i}.in_proj": ColwiseParallel(input_layouts=comes) for i, comes in columns}
    return first | {f"layers.{i}.out_proj": RowwiseParallel(output_layouts=to) for i, to in rows}


our_language_plan = ranks_two_dim.language_plan
"""A right answer to exercise 4, which runs while the learner's is open."""
our_language_step = ranks_two_dim.language_step
"""A right answer to exercise 5, which runs while the learner's is open."""


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


def _judge_language(sent: Mapping[str, Any], tp: int) -> None:
    _judge_words(sent, tp)
    tokens, words = ranks_two_dim.TOKENS, ranks_two_dim.VOCABULARY_SIZE
    for name, which in (("embed", "behind the embedding"), ("down", "behind the MLP")):
        if sent["between"][name][1] == tokens:
            said = f"all is right, but {which} every rank holds all {tokens} tokens"
            hint = (
                "What a rowwise layer leaves is said by output_layouts, and Shard(1) cuts tokens."
            )
            raise judge.WrongAnswer(said, expected=str(tokens // tp), hint=hint)
    if sent["between"]["head"][-1] == words:
        said = f"all is right, but every rank holds the logits of all {words} words"
        hint = "Section 2 says what leaves them cut, and a DTensor."
        raise judge.WrongAnswer(said, expected=str(words // tp), hint=hint)
