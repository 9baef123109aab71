"""labkit.checks: the notebook's solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import ast
from pathlib import Path

import pytest

from labkit.checks import spatial as checks

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "notebooks" / "src" / "01_spatial_sharding.py"
BEGIN = "### BEGIN SOLUTION"
IMPORTS = "import torch\nfrom torch import distributed as dist\n\n\n"


def exercises():
    """Names of the notebook's checks, with the name and the text of the function that each one takes."""
    text = SOURCE.read_text()
    found = {}
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("checks."):
            found[node.func.attr] = node.args[0].id
    bodies = {node.name: ast.get_source_segment(text, node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {check: (name, bodies[name]) for check, name in found.items()}


EXERCISES = exercises()


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, by default the notebook's own, with the signature of a check's exercise."""

    def made(check, body=None):
        head, solution = EXERCISES[check][1].split(BEGIN)
        return answer_to(head.rstrip(), f"    {BEGIN}{solution}" if body is None else body, IMPORTS)

    return made


def test_every_exercise_of_the_notebook_has_a_check_and_every_check_an_exercise():
    assert EXERCISES.keys() == {"local_columns", "halo_bytes", "halo_exchange", "halo_gradient", "activation_bytes"}
    assert all(BEGIN in text for _, text in EXERCISES.values())
    assert SOURCE.read_text().count(BEGIN) == len(EXERCISES)


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("check", EXERCISES)
def test_solution_of_the_notebook_passes(check, answer):
    verdict = getattr(checks, check)(answer(check))
    assert verdict.ok, verdict
    assert verdict.detail


def test_the_solution_passes_on_ranks_of_its_own(answer):
    verdict = checks.halo_exchange(answer("halo_exchange"))
    assert repr(verdict) == "passed: equal to one device on 4 ranks, and no byte more than the halos was sent"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("check", EXERCISES)
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""', '"""Not yet."""\n...'])
def test_an_empty_answer_is_not_attempted(check, body, answer):
    verdict = getattr(checks, check)(answer(check, body))
    assert (verdict.state, verdict.ok, repr(verdict)) == ("not attempted", False, "not attempted")


WRONG_VALUES = [
    ("local_columns", "return width // ranks", "(width=256, ranks=1, stage=0) gave 256, expected 64. The stem divides"),
    ("local_columns", "return width // 4 // ranks", "(width=256, ranks=4, stage=1) gave 16, expected 8. The stem"),
    ("local_columns", "return width // (4 * (stage + 1)) // ranks", "stage=3) gave 16, expected 8. The stem divides"),
    ("local_columns", "return width // 4 // 2**stage", "(width=256, ranks=4, stage=0) gave 64, expected 16"),
    ("local_columns", "width // 4", "gave None, not a number: does every path return?"),
    ("local_columns", "return width // stage", "stage=0) raised ZeroDivisionError"),
    ("halo_bytes", "return rows * (kernel - 1) // 2 * channels * batch", "gave 1, expected 4. A k x k kernel reaches"),
    ("halo_bytes", "return rows * (kernel - 1) * channels * batch * 4", "batch=1) gave 8, expected 4."),
    ("halo_bytes", "return rows * (kernel - 1) // 2 * channels * 4", "batch=2) gave 12,288, expected 24,576."),
    ("halo_bytes", "return rows * kernel * channels * batch * 4", "batch=1) gave 12, expected 4."),
    ("activation_bytes", "return 12 * batch * channels * height * width", "width=1) gave 12, expected 48. Count what"),
    ("activation_bytes", "return 6 * batch * channels * height * width * 4", "width=1) gave 24, expected 48."),
    ("activation_bytes", "return 12 * channels * height * width * 4", "width=64) gave 3,145,728, expected 6,291,456."),
    ("activation_bytes", "return 'many'", "gave 'many', not a number"),
]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("check", "body", "reason"), WRONG_VALUES)
def test_a_wrong_value_fails_with_the_call_and_a_hint(check, body, reason, answer):
    verdict = getattr(checks, check)(answer(check, body))
    assert verdict.state == "wrong"
    assert not verdict.ok
    assert reason in repr(verdict)


TRADE = """
    to_left, to_right = {left}.contiguous(), {right}.contiguous()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    handles = []
    if rank > 0:
        handles += [dist.isend(to_left, rank - 1), dist.irecv(from_left, rank - 1)]
    if rank < ranks - 1:
        handles += [dist.isend(to_right, rank + 1), dist.irecv(from_right, rank + 1)]
    for handle in handles:
        handle.wait()
"""
OUT = TRADE.format(left="strip[..., :halo]", right="strip[..., -halo:]")
HOME = TRADE.format(left="grad[..., :halo]", right="grad[..., -halo:]")
GATHER = """
    everyone = [torch.zeros_like({0}) for _ in range(ranks)]
    dist.all_gather(everyone, {0})
"""

# Answers, and a part of what their learner is told: of the first rank that is wrong.
ANSWERS = {
    "right": ("halo_exchange", OUT + "    return torch.cat([from_left, strip, from_right], dim=-1)", "passed"),
    "right_blocking": (
        "halo_exchange",
        """
    left, right = torch.zeros(2, *strip[..., :halo].shape)
    for first in (0, 1):
        if rank % 2 == first:
            if rank < ranks - 1:
                dist.send(strip[..., -halo:].contiguous(), rank + 1)
                dist.recv(right, rank + 1)
        elif rank > 0:
            dist.recv(left, rank - 1)
            dist.send(strip[..., :halo].contiguous(), rank - 1)
    return torch.cat([left, strip, right], dim=-1)
""",
        "passed",
    ),
    "zeros_instead_of_neighbours": (
        "halo_exchange", "\n    return torch.nn.functional.pad(strip, (halo, halo))",
        "on rank 0, the last 3 columns are all zero",
    ),
    "left_and_right_swapped": (
        "halo_exchange", OUT + "    return torch.cat([from_right, strip, from_left], dim=-1)",
        "on rank 0, the first 3 columns are wrong",
    ),
    "inner_columns_sent": (
        "halo_exchange",
        TRADE.format(left="strip[..., halo : 2 * halo]", right="strip[..., -halo:]")
        + "    return torch.cat([from_left, strip, from_right], dim=-1)",
        "on rank 0, the last 3 columns are wrong",
    ),
    "whole_image_gathered": (
        "halo_exchange",
        GATHER.format("strip")
        + """
    image = torch.nn.functional.pad(torch.cat(everyone, dim=-1), (halo, halo))
    return image[..., rank * strip.shape[-1] : (rank + 1) * strip.shape[-1] + 2 * halo]
""",
        "on rank 0, the numbers are right, but this rank handed over 960 bytes; its halos are 360 bytes",
    ),
    "shape_of_the_strip": (
        "halo_exchange", OUT + "    return strip",
        "on rank 0, the shape is (2, 3, 5, 8), expected (2, 3, 5, 14)",
    ),
    "one_side_only": (
        "halo_exchange", OUT + "    return torch.cat([from_left, strip], dim=-1)",
        "the shape is (2, 3, 5, 11), expected (2, 3, 5, 14)",
    ),
    "nothing_returned": ("halo_exchange", OUT, "the function returned NoneType, not a tensor"),
    "strip_changed": (
        "halo_exchange", OUT + "    return torch.cat([from_left, 2 * strip, from_right], dim=-1)",
        "the columns between are wrong",
    ),
    "not_contiguous": (
        "halo_exchange", (OUT + "    return strip").replace(".contiguous()", ""),
        "contiguous",
    ),
    "gradients_right": (
        "halo_gradient", HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo] += from_left
    own[..., -halo:] += from_right
    return own
""",
        "passed",
    ),
    "gradients_kept": (
        "halo_gradient", "\n    return grad[..., halo:-halo]",
        "on rank 0, the last 3 columns are wrong",
    ),
    "gradients_replaced": (
        "halo_gradient", HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo], own[..., -halo:] = from_left, from_right
    return own
""",
        "on rank 0, the first 3 columns are all zero",
    ),
    "gradients_swapped": (
        "halo_gradient", HOME + """
    own = grad[..., halo:-halo].clone()
    own[..., :halo] += from_right
    own[..., -halo:] += from_left
    return own
""",
        "the first 3 columns are wrong",
    ),
    "gradients_of_the_padded_strip": (
        "halo_gradient", HOME + "    return grad",
        "the shape is (2, 3, 5, 14), expected (2, 3, 5, 8)",
    ),
    "gradients_gathered": (
        "halo_gradient", GATHER.format("grad") + """
    own = grad[..., halo:-halo].clone()
    if rank > 0:
        own[..., :halo] += everyone[rank - 1][..., -halo:]
    if rank < ranks - 1:
        own[..., -halo:] += everyone[rank + 1][..., :halo]
    return own
""",
        "the numbers are right, but this rank handed over 1680 bytes",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_on_four_ranks_is_judged_by_what_it_does(name, answer):
    check, body, expected = ANSWERS[name]
    verdict = getattr(checks, check)(answer(check, body))
    assert verdict.state == ("passed" if expected == "passed" else "wrong")
    assert expected in repr(verdict)


def test_ranks_that_wait_for_each_other_are_stopped_with_a_hint(answer):
    everyone_receives_first = """
        left, right = torch.zeros(2, *strip[..., :halo].shape)
        for inbox, other in ((left, rank - 1), (right, rank + 1)):
            if 0 <= other < ranks:
                dist.recv(inbox, other)
        for edge, other in ((strip[..., :halo], rank - 1), (strip[..., -halo:], rank + 1)):
            if 0 <= other < ranks:
                dist.send(edge.contiguous(), other)
        return torch.cat([left, strip, right], dim=-1)
    """
    verdict = checks.halo_exchange(answer("halo_exchange", everyone_receives_first), timeout_s=8)
    assert verdict.state == "wrong"
    assert "the ranks waited for each other" in repr(verdict)
    assert "does every send have its receive" in repr(verdict)


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_error_of_the_answer_is_shown_with_its_rank(answer):
    verdict = checks.halo_gradient(answer("halo_gradient", "return grad[:, :, :, halo] + missing"))
    assert verdict.state == "wrong"
    assert verdict.detail.startswith("on rank ")
    assert verdict.detail.endswith("NameError: name 'missing' is not defined")
