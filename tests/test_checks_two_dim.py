"""labkit.checks.two_dim: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import dataclasses

import pytest

import labkit
from labkit.checks import two_dim as checks

IMPORTS = (
    "import torch\nfrom torch.distributed.tensor import Partial, Replicate, Shard\n"
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
    "collectives": 'return {"tp/all_reduce": 5, "data/all_gather": 6, "data/reduce_scatter": 3}',
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
def test_an_empty_answer_is_not_attempted(check, body, answer, measured, nothing_starts):
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
        ('return {"tp/all_reduce": 6, "data/all_gather": 6, "data/reduce_scatter": 3}', "tp/all_reduce: you say 6,"),
        ('return {"tp/all_reduce": 5, "data/all_gather": 3, "data/reduce_scatter": 3}', "data/all_gather: you say 3,"),
        ('return {"data/all_reduce": 5, "tp/all_gather": 6, "tp/reduce_scatter": 3}', "data/all_reduce: you say 5,"),
        ('return {"tp/all_reduce": 5, "data/all_gather": 6}', "data/reduce_scatter: you say 0, the ranks counted 3."),
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
    assert reason in repr(verdict)


def test_a_run_that_counted_nothing_by_axis_is_refused(answer, measured):
    alone = dataclasses.replace(measured, lines=[line for line in measured.lines if not line.get("axis")])
    with pytest.raises(ValueError, match="this run counted no collective along an axis"):
        checks.collectives(answer("collectives", SOLUTIONS["collectives"]), alone)


LOOP = """
plan = {{}}
for index in range(3):
    first, last = index == 0, index == 2
    plan[f"layers.{{index}}.in_proj"] = ColwiseParallel(input_layouts={comes})
    plan[f"layers.{{index}}.out_proj"] = RowwiseParallel(output_layouts={leaves})
return plan
"""


def stack(comes: str, leaves: str) -> str:
    return LOOP.format(comes=comes, leaves=leaves)


# Plans, and a part of what the learner is told.
CUT = '"gate": ColwiseParallel(), "up": ColwiseParallel()'
WHOLE = '"gate": ColwiseParallel(output_layouts=Replicate()), "up": ColwiseParallel(output_layouts=Replicate())'
GATED = {
    "right": (f'return {{{CUT}, "down": RowwiseParallel()}}', "passed"),
    "nothing cut": ("return {}", "every rank holds all of gate.weight, up.weight, down.weight"),
    "one is whole": (f"return {{{WHOLE}}}", "every rank holds all of down.weight"),
    "up forgotten": (
        'return {"gate": ColwiseParallel(), "down": RowwiseParallel()}',
        "the model does not run with this plan: Run",
    ),
    "all by columns": (f'return {{{CUT}, "down": ColwiseParallel()}}', "the model does not run with this plan"),
    "gathered in between": (
        f'return {{{WHOLE}, "down": RowwiseParallel(input_layouts=Replicate())}}',
        "the result is right, but a step sends more than it needs to along tp: ",
    ),
    "left in parts": (
        f'return {{{CUT}, "down": RowwiseParallel(output_layouts=Partial())}}',
        "the output is not one device's, and nothing has raised an error",
    ),
    "left cut": (
        f'return {{{CUT}, "down": RowwiseParallel(output_layouts=Shard(-1))}}',
        "the output has shape [4, 8, 4], on one device it is [4, 8, 8]",
    ),
    "a name that is none": ('return {"gates": ColwiseParallel()}', "there is no linear layer 'gates': there are gate"),
    "no style": ('return {"gate": "colwise"}', "gate is to be 'colwise': write ColwiseParallel()"),
    "no dict": ("return [ColwiseParallel()]", "not a dict such as {'up': ColwiseParallel()}"),
}
STACK = {
    "repaired": (stack("Replicate() if first else Shard(1)", "Replicate() if last else Shard(1)"), "passed"),
    "plain pairs": (stack("Replicate()", "Replicate()"), "passed"),
    "broken": (stack("Shard(1)", "Shard(1)"), "layers.0.in_proj.bias and of 10 more is 2 times one device's"),
    "repaired in front": (
        stack("Replicate() if first else Shard(1)", "Shard(1)"), "the output has shape [4, 4, 8], on one device",
    ),
    "repaired behind": (
        stack("Shard(1)", "Replicate() if last else Shard(1)"), "the output has shape [4, 16, 8], on one device",
    ),
    "cut but never gathered": (
        stack("Replicate()", "Replicate() if last else Shard(1)"), "the output has shape [4, 2, 8], on one device",
    ),
    "nothing to share": ("return {}", "every rank holds all of layers.0.in_proj.weight"),
}  # fmt: skip


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", [*GATED, *STACK])
def test_a_plan_on_four_ranks_is_judged_by_what_it_does(name, answer):
    check = "gated_plan" if name in GATED else "stack_plan"
    body, expected = (GATED | STACK)[name]
    verdict = getattr(checks, check)(answer(check, body))
    assert verdict.state == ("passed" if expected == "passed" else "wrong")
    assert expected in repr(verdict)


def test_the_right_plan_passes_on_ranks(answer):
    verdict = checks.gated_plan(answer("gated_plan", GATED["right"][0]))
    said = "equal to one device on 2 x 2 ranks, every matrix shared out, one all-reduce along tp"
    assert repr(verdict) == f"passed: {said}"


def test_a_wrong_plan_is_told_so_in_one_line(answer):
    verdict = checks.stack_plan(answer("stack_plan", STACK["broken"][0]))
    assert verdict.state == "wrong" and verdict.detail.startswith("the output is right, but the gradient of layers.0")
