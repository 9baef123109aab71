"""labkit_course.checks.two_dim beyond tests/answers: launched ranks, other right answers, whatever else is given."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import labkit
from labkit.parallel import small_tensor_parallel as ours
from labkit_course.checks import two_dim as checks
from labkit_course.checks import two_dim_at_work as at_work
from labkit_course.checks.judge import WrongAnswer

IMPORTS = (
    "import torch\nfrom torch import distributed as dist, nn\n"
    "from torch.distributed.tensor import Partial, Replicate, Shard\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
    "from labkit.parallel.small_tensor_parallel import *\n\n\n"
)
PLANS = {
    "block_plan": "def block_plan() -> dict[str, object]:",
    "words_plan": "def words_plan() -> dict[str, object]:",
    "stack_plan": "def repaired_plan() -> dict[str, object]:",
}
ATTENTION = '"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel()'
BLOCK = f'{{{ATTENTION}, "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}}'


@pytest.fixture
def plan(answer_to):
    """A plan's function from its text, with the signature of a check's exercise."""
    return lambda check, text: answer_to(PLANS[check], f"return {text}", IMPORTS)


@pytest.fixture(scope="module")
def measured():
    return labkit.run("two_dim", nproc=4, device="cpu", dim=16, steps=1)


def test_what_a_run_counted_is_the_truth(measured):
    right = {"tp/all_reduce": 5, "data/all_gather": 6, "data/reduce_scatter": 3}
    assert at_work.collectives(lambda: right, measured).ok
    assert at_work.collectives(lambda: right | {"tp/all_gather": 0}, measured).ok, "none is none"
    for said in (14, [right], None):
        assert at_work.collectives(lambda said=said: said, measured).state in ("wrong", "not attempted")
    verdict = at_work.collectives(lambda: right | {"tp/reduce_scatter": 3}, measured)
    assert verdict.detail == "tp/reduce_scatter: you say 3" and verdict.expected == "0, which the ranks counted"
    assert "Along tp activations are added up" in verdict.hint


def test_a_run_that_counted_nothing_by_axis_is_refused(measured):
    alone = dataclasses.replace(measured, lines=[line for line in measured.lines if not line.get("axis")])
    with pytest.raises(ValueError, match="this run counted no collective along an axis"):
        at_work.collectives(lambda: {"tp/all_reduce": 5}, alone)


OTHER_RIGHT = {
    "the last layer by rows": (
        "words_plan",
        '{"embed": RowwiseParallel(input_layouts=Replicate()), "head": RowwiseParallel(input_layouts=Replicate())}',
    ),
}


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", OTHER_RIGHT)
def test_another_right_plan_passes(name, plan):
    check, text = OTHER_RIGHT[name]
    assert getattr(at_work, check)(plan(check, text)).ok


@pytest.mark.usefixtures("ranks_at_hand")
def test_the_plans_that_run_while_an_exercise_is_open_are_right():
    assert at_work.stack_plan(at_work.our_stack_plan).ok
    assert at_work.language_plan(at_work.our_language_plan).ok
    assert at_work.language_step(at_work.our_language_step).ok


@pytest.mark.usefixtures("ranks_at_hand")
def test_wrong_gradients_are_named_and_a_wrong_output_is_refused():
    def cut(comes=None, leaves=None):
        columns = {name: ColwiseParallel(input_layouts=comes) for name in ("query", "key", "value", "gate", "up")}
        return columns | {name: RowwiseParallel(output_layouts=leaves) for name in ("out", "down")}

    forgetful, norms = cut(Shard(1), Shard(1)), ["attention_norm.weight", "mlp_norm.weight"]
    assert at_work.wrong_block_gradients(lambda: forgetful) == norms
    assert at_work.wrong_block_gradients(lambda: forgetful | {"mlp_norm": SequenceParallel()}) == norms[:1]
    with pytest.raises(WrongAnswer, match="the output is not one device's"):
        at_work.wrong_block_gradients(cut)
    with pytest.raises(WrongAnswer, match="the model does not run with this plan: after `out`"):
        at_work.wrong_block_gradients(lambda: cut(Shard(1)))


WRONG_PLANS = {
    "left in parts": (
        BLOCK.replace('"down": RowwiseParallel()', '"down": RowwiseParallel(output_layouts=Partial())'),
        "the output is not one device's, and nothing has raised an error",
    ),
    "no style": ('{"gate": "colwise"}', "gate is to be 'colwise': write ColwiseParallel()"),
    "no dict": ("[ColwiseParallel()]", "not a dict such as {'up': ColwiseParallel()}"),
    "nothing cut": ("{}", "every rank holds all of query.weight, key.weight, value.weight, out.weight, gate.weight"),
}


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_plan_is_told_what_it_does(name, plan):
    text, said = WRONG_PLANS[name]
    verdict = checks.block_plan(plan("block_plan", text))
    assert verdict.state == "wrong" and said in repr(verdict)


@pytest.mark.long
def test_right_answers_pass_on_launched_ranks(plan):
    said = "equal to one device on 2 x 2 and 1 x 3 ranks, every matrix shared out"
    assert repr(checks.block_plan(plan("block_plan", BLOCK))) == f"passed: {said}"
    assert checks.row_parallel(ours.RowParallel).ok


@pytest.mark.parametrize("answer", [None, 3, print, ours.copy_to_ranks, ours.RowParallel])
def test_what_is_no_autograd_function_is_told_so(answer, nothing_starts):
    assert "is no torch.autograd.Function" in repr(checks.pair_ends(answer, ours.SumOverRanks))
    assert "is no torch.autograd.Function" in repr(checks.pair_ends(ours.CopyToRanks, answer))


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group): ...

    @staticmethod
    def backward(ctx, grad): ...


def test_two_empty_ends_are_not_attempted(nothing_starts):
    assert checks.pair_ends(Empty, Empty).state == "not attempted"


@pytest.mark.usefixtures("ranks_at_hand")
def test_one_end_of_two_is_judged_while_the_other_is_empty():
    verdict = checks.pair_ends(ours.CopyToRanks, Empty)
    assert repr(verdict) == "not attempted: CopyToRanks is right, and Empty is still empty"
    verdict = checks.pair_ends(Empty, ours.CopyToRanks)
    assert verdict.state == "wrong" and "CopyToRanks.forward returned its own tensor" in verdict.detail


@pytest.mark.usefixtures("ranks_at_hand")
def test_what_makes_no_module_is_told_so(answer_to):
    answer = answer_to("def made(layer, group):", "return layer.weight", IMPORTS)
    verdict = checks.row_parallel(answer)
    assert verdict.detail == "on rank 0, what you made is a Parameter, no nn.Module"


@pytest.mark.usefixtures("ranks_at_hand")
def test_a_layer_that_sends_in_the_backward_pass_is_told_so(answer_to):
    body = "def forward(self, x):\n    return super().forward(x) + 0 * copy_to_ranks(self.bias, self.group)"
    verdict = checks.row_parallel(answer_to("class More(RowParallel):", body, IMPORTS))
    said = "the numbers are right, but in the backward pass rank 0 sends 1 tp/all_reduce call with 48 bytes"
    assert (verdict.detail, verdict.expected) == (said, "nothing")
