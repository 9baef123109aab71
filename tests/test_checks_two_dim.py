"""labkit.checks.tensor: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import dataclasses
import json
from pathlib import Path

import pytest
from programs.plan_answers import GATED, STACK

import labkit
from labkit.checks import tensor as checks

IMPORTS = (
    "import torch\nfrom torch.distributed.tensor import Replicate, Shard\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
    "from torch.nn.functional import relu\n\n\n"
)
HEADS = {
    "parts": "def parts(x, first, second, ranks):",
    "tp_bytes": "def tp_bytes(places: int, dim: int, mlps: int) -> int:",
    "collectives": "def collectives() -> dict[str, int]:",
    "gated_plan": "def gated_plan() -> dict[str, object]:",
    "stack_plan": "def repaired_plan() -> dict[str, object]:",
}
SOLUTIONS = {
    "parts": """
        pieces = zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)
        return [relu(x @ rows.T) @ columns.T for rows, columns in pieces]
    """,
    "tp_bytes": "return 4 * places * dim * (2 * mlps - 1)",
    "collectives": 'return {"tp/all_reduce": 5, "dp/all_gather": 6, "dp/reduce_scatter": 3}',
}


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, with the signature of a check's exercise."""
    return lambda check, body: answer_to(HEADS[check], body, IMPORTS)


@pytest.fixture(scope="module")
def measured():
    return labkit.run("two_dim", nproc=4, device="cpu", dim=16, steps=1)


def judge(check, given, result):
    return getattr(checks, check)(given, *([result] if check == "collectives" else []))


@pytest.mark.parametrize("check", SOLUTIONS)
def test_solution_passes(check, answer, measured):
    assert judge(check, answer(check, SOLUTIONS[check]), measured).state == "passed"


@pytest.mark.parametrize("check", HEADS)
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""'])
def test_an_empty_answer_is_not_attempted(check, body, answer, measured, monkeypatch):
    monkeypatch.setattr(labkit, "run", lambda *arguments, **parameters: pytest.fail("a run was started"))
    assert repr(judge(check, answer(check, body), measured)) == "not attempted"


WRONG_ANSWERS = {
    "parts": [
        ("return [relu(x @ first.T) @ second.T] * ranks", "gave parts whose sum is not the result"),
        ("return [relu(x @ first.T) @ second.T / ranks] * ranks", "gave parts that add up, but rank 0's is not"),
        ("return [relu(x @ first.T) @ second.T]", "gave 1 tensors: every rank has one"),
        ("return [relu(x @ a.T) for a in first.chunk(ranks)]", "gave a tensor of shape [3, 4]: each rank's part is as"),
        ("return relu(x @ first.T) @ second.T", "gave Tensor, not a list of tensors"),
        ("return [relu(x @ a.T) @ b.T for a, b in zip(first.chunk(ranks, 1), second.chunk(ranks, 1))]", "raised"),
        (
            "return [relu(x @ a.T) @ b.T for a, b in zip(first.chunk(ranks), second.chunk(ranks, 1)[::-1])]",
            "gave parts whose sum is not the result",
        ),
        (
            "return [relu(x @ a.T) @ b.T for a, b in zip(first.chunk(ranks), second.chunk(ranks, 1))][::-1]",
            "cut in order, evenly",
        ),
    ],
    "tp_bytes": [
        ("return places * dim * (2 * mlps - 1)", "gave 1, expected 4. One all-reduce sums"),
        ("return 4 * places * dim * 2 * mlps", "gave 8, expected 4. One all-reduce"),
        ("return 4 * places * dim * mlps", "mlps=3) gave 3,072, expected 5,120. Forward there is one"),
        ("return 4 * dim * (2 * mlps - 1)", "gave 32, expected 1,024."),
        ("size = 4", "gave None, not a number"),
    ],
    "collectives": [
        ('return {"tp/all_reduce": 6, "dp/all_gather": 6, "dp/reduce_scatter": 3}', "tp/all_reduce: you say 6,"),
        ('return {"tp/all_reduce": 5, "dp/all_gather": 3, "dp/reduce_scatter": 3}', "dp/all_gather: you say 3,"),
        ('return {"dp/all_reduce": 5, "tp/all_gather": 6, "tp/reduce_scatter": 3}', "dp/all_reduce: you say 5,"),
        ('return {"tp/all_reduce": 5, "dp/all_gather": 6}', "dp/reduce_scatter: you say 0, the ranks counted 3. Hint"),
        ("return 14", "gave 14, not a dict"),
        ("return {}[0]", "raised KeyError"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("check", "body", "reason"), [(check, *each) for check, each_one in WRONG_ANSWERS.items() for each in each_one]
)
def test_a_wrong_answer_is_told_what_is_wrong(check, body, reason, answer, measured):
    verdict = judge(check, answer(check, body), measured)
    assert verdict.state == "wrong"
    assert reason in verdict.detail


def test_a_run_that_counted_nothing_by_axis_is_refused(answer, measured):
    alone = dataclasses.replace(measured, lines=[line for line in measured.lines if "/" not in line["name"]])
    with pytest.raises(ValueError, match="this run counted no collective along an axis"):
        checks.collectives(answer("collectives", SOLUTIONS["collectives"]), alone)


@pytest.fixture(scope="module")
def judged():
    """What each of four ranks says of each plan."""
    program = Path(__file__).parent / "programs" / "plan_answers.py"
    result = labkit.run(program, nproc=4, device="cpu", timeout_s=100)
    return [json.loads(rank.log().splitlines()[-1]) for rank in result.ranks]


@pytest.mark.parametrize("name", [*GATED, *STACK])
def test_a_plan_on_four_ranks_is_judged_by_what_it_does(judged, name):
    expected = (GATED | STACK)[name][1]
    for said in (rank[name] for rank in judged):
        assert expected in said
        assert bool(expected) == bool(said)


def test_the_right_plan_passes_on_ranks(answer):
    verdict = checks.gated_plan(answer("gated_plan", GATED["right"][0]))
    said = "equal to one device on 2 x 2 ranks, every matrix shared out, one all-reduce along tp"
    assert repr(verdict) == f"passed: {said}"


def test_a_wrong_plan_is_told_so_in_one_line(answer):
    verdict = checks.stack_plan(answer("stack_plan", STACK["broken"][0]))
    assert verdict.state == "wrong" and verdict.detail.startswith("the output is right, but the gradient of layers.0")
