"""labkit_course.checks.spatial beyond tests/answers: other right answers, waste, deadlocks and errors."""

import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
import torch
from answers import changed, spatial, spatial_at_work
from answers.spatial import HOME, OUT, PADDED

from labkit.models.convnext import ConvNeXt
from labkit_course.checks import spatial as checks
from labkit_course.checks import spatial_at_work as checks_at_work
from labkit_course.checks import spatial_mutations as mutations
from notebooks.tools.build import FOLDER
from notebooks.tools.source import find_labs

IMPORTS = "import torch\nfrom torch import distributed as dist\n\n\n"
HEADS = {
    "halo_exchange": "def exchange_halo(strip, halo, rank, ranks):",
    "halo_gradient": "def return_gradients(grad, halo, rank, ranks):",
    "activation_bytes": "def activation_bytes(batch, channels, height, width):",
    "local_columns": "def local_columns(width, ranks, stage):",
    "placements": "def placements():",
    "sends_nothing": "def sends_nothing(strip, halo, rank, ranks):",
    "exchange_test": "def exchange_test(exchange, rank, ranks):",
    "reduce_gradients": "def reduce_gradients(cut, head):",
    "extra_columns": "def extra_columns(depths, kernel):",
}


@pytest.fixture
def judge(answer_to):
    """The verdict on a function from the text of its body."""

    def judged(check, body, **more):
        module = checks if hasattr(checks, check) else checks_at_work
        return getattr(module, check)(answer_to(HEADS[check], body, IMPORTS), **more)

    return judged


@pytest.mark.parametrize(("module", "answers"), [(checks, spatial), (checks_at_work, spatial_at_work)])
def test_every_check_has_an_exercise(module, answers):
    of_this_module = {name for name, each in vars(module).items() if hasattr(each, "__wrapped__")}
    assert len(answers.EXERCISES) == len(of_this_module)


def test_the_solution_passes_on_ranks_of_its_own(judge):
    verdict = judge("halo_exchange", OUT + "return torch.cat([from_left, strip, from_right], dim=-1)")
    assert repr(verdict) == "passed: equal to one device on 4 and 3 ranks, and no byte more than the halos was sent"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("check", HEADS)
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""', '"""Not yet."""\n...'])
def test_an_empty_answer_is_not_attempted(check, body, judge):
    verdict = judge(check, body)
    assert (verdict.state, verdict.ok, repr(verdict)) == ("not attempted", False, "not attempted")


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("check", "body", "reason"),
    [
        ("local_columns", "width // 4", "gave None, not a number: does every path return?"),
        ("local_columns", "return width // stage", "stage=0) raised ZeroDivisionError"),
        ("local_columns", "return width / (4 * 2**stage) / ranks", "expected 8. Columns are counted"),
        ("activation_bytes", "return 'many'", "gave 'many', not a number"),
        ("placements", "return []", "placements() gave []. Return a dict"),
        ("placements", "return {'images': 'S0'}", "images: 'S0' is no list of two placements, expected [Shard(0), Sh"),
    ],
)
def test_a_wrong_value_fails_with_the_call_and_a_hint(check, body, reason, judge):
    verdict = judge(check, body)
    assert verdict.state == "wrong"
    assert reason in repr(verdict)


GATHER = """
everyone = [torch.zeros_like({0}) for _ in range(ranks)]
dist.all_gather(everyone, {0})
"""

# Answers, and a part of what their learner is told: of the first rank that is wrong.
ANSWERS = {
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
    "whole_image_gathered": (
        "halo_exchange",
        GATHER.format("strip")
        + """
image = torch.nn.functional.pad(torch.cat(everyone, dim=-1), (halo, halo))
return image[..., rank * strip.shape[-1] : (rank + 1) * strip.shape[-1] + 2 * halo]
""",
        "on rank 0, the numbers are right, but the rank sends 1 all_gather call with 960 bytes, expected 1 send",
    ),
    "nothing_returned": ("halo_exchange", OUT, "on rank 0, the function returned NoneType, not a tensor"),
    "mirrored": (
        "halo_exchange", OUT + "return torch.cat([from_left, strip, from_right.flip(-1)], dim=-1)",
        "on rank 0, the last 3 columns are rank 1's first 3, in reverse order, expected rank 1's first 3",
    ),
    "strip_changed": (
        "halo_exchange", OUT + "return torch.cat([from_left, 2 * strip, from_right], dim=-1)",
        "on rank 0, the columns between are not the strip's own",
    ),
    "another_type": (
        "halo_exchange", OUT + "return torch.cat([from_left, strip, from_right], dim=-1).double()",
        "on rank 0, the numbers are torch.float64, expected torch.float32",
    ),
    "not_contiguous": ("halo_exchange", (OUT + "return strip").replace(".contiguous()", ""), "contiguous"),
    "row_by_row": (
        "halo_exchange",
        """
left, right = torch.zeros(2, *strip[..., :halo].shape)
handles = []
for row in range(strip.shape[2]):
    for inbox, edge, other in ((left, strip[..., :halo], rank - 1), (right, strip[..., -halo:], rank + 1)):
        if 0 <= other < ranks:
            arrived = torch.zeros(2, 3, halo)
            works = dist.isend(edge[:, :, row].contiguous(), other), dist.irecv(arrived, other)
            handles.append((works, inbox[:, :, row], arrived))
for works, inbox, arrived in handles:
    for work in works:
        work.wait()
    inbox.copy_(arrived)
return torch.cat([left, strip, right], dim=-1)
""",
        "on rank 0, the numbers are right, but the rank sends 5 send calls with 360 bytes, expected 1 send call",
    ),
    "gradients_right": (
        "halo_gradient", HOME + "own[..., :halo] += from_left\nown[..., -halo:] += from_right\nreturn own", "passed",
    ),
    "gradients_kept_and_added": (
        "halo_gradient", "own = grad[..., halo:-halo].clone()\nown[..., -halo:] += grad[..., -halo:]\nreturn own",
        "the last 3 columns are with the halo's gradient added that should have been sent",
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
        "the numbers are right, but the rank sends 1 all_gather call with 1,680 bytes",
    ),
    "middle_changed": (
        "halo_gradient",
        HOME + "own[..., :halo] += from_left\nown[..., -halo:] += from_right\nown[..., 4] = 0\nreturn own",
        "on rank 0, the columns between are wrong",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_on_four_ranks_is_judged_by_what_it_does(name, judge):
    check, body, expected = ANSWERS[name]
    verdict = judge(check, body)
    assert verdict.state == ("passed" if expected == "passed" else "wrong"), verdict
    assert expected in repr(verdict)


def test_who_sends_beyond_the_last_of_three_ranks_is_told_so(judge):
    body = OUT.replace("rank < ranks - 1", "rank < 3") + PADDED
    verdict = judge("halo_exchange", body)
    said = "wrong: right on 4 ranks, but with 3 ranks: on rank 2, ValueError: send: there is no rank 3 among 3 ranks"
    assert repr(verdict).startswith(said)


def test_ranks_that_wait_for_each_other_are_stopped_with_a_hint(judge):
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
    verdict = judge("halo_exchange", everyone_receives_first, timeout_s=5)
    assert verdict.state == "wrong"
    assert "the ranks waited for each other" in repr(verdict)
    assert "does every send have its receive" in repr(verdict)


OWN_TEST = changed("01b", "exchange_test")


@pytest.mark.usefixtures("ranks_at_hand")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (OWN_TEST, "passed: your test passes the right exchange and fails 7 broken ones, on 4 and 3 ranks"),
        (OWN_TEST.replace("return ", "assert ") + "return True", "passed: "),
        (OWN_TEST.replace("return torch", "return not not torch"), "passed: "),
        (
            OWN_TEST.replace(
                "return torch.allclose(padded, views[rank]) and", "return (padded == views[rank]).all() &"
            ),
            "passed: ",
        ),
        (
            "calls = globals().setdefault('calls', [])\ncalls.append(exchange)\nreturn len(calls) == 1",
            "wrong: on rank 0, your test fails the right exchange",
        ),
        (OWN_TEST.replace("3, rank", "2, rank"), "wrong: on rank "),
    ],
    ids=["own", "asserts", "negations", "tensors", "remembers", "raises"],
)
def test_a_learners_test_is_judged_by_what_it_lets_pass(body, reason, judge):
    assert repr(judge("exchange_test", body)).startswith(reason)


@pytest.mark.usefixtures("ranks_at_hand")
def test_an_error_of_the_answer_is_shown_with_its_rank(judge):
    verdict = judge("halo_gradient", "return grad[:, :, :, halo] + missing")
    assert verdict.state == "wrong"
    assert verdict.detail.startswith("on rank ")
    assert verdict.detail.endswith("NameError: name 'missing' is not defined")


@pytest.mark.long  # four processes that import torch; test_scripts.py runs it on two
def test_the_script_of_the_lab_gives_on_four_ranks_the_loss_of_the_notebooks_two(tmp_path):
    (lab,) = find_labs(FOLDER, ("01_spatial_sharding",))
    cells = nbformat.read(lab.solved, as_version=4).cells
    (cell,) = (cell for cell in cells if "script" in cell.metadata.get("tags", []))
    losses = re.compile(r"loss \d\.\d+")
    on_two = {loss for output in cell.outputs for loss in losses.findall(output.get("text", ""))}
    assert len(on_two) == 1
    path = tmp_path / "script.py"
    path.write_text(cell.source.split("\n", 1)[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(path)]
    on_four = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert set(losses.findall(on_four)) == on_two


def test_the_table_of_mutations_has_the_part_of_each_right_gradient():
    torch.manual_seed(0)
    named = {name: torch.randn_like(each) for name, each in ConvNeXt().named_parameters()}
    head = [each for name, each in named.items() if name.startswith("head.")]
    cut = [each for name, each in named.items() if not name.startswith("head.")]

    def reported(factor):
        gradients = {"cut": [each * factor for each in cut], "head": head}
        return SimpleNamespace(ranks=[SimpleNamespace(reported=gradients)])

    table = mutations.gradient_ratios({"A": reported(0.25)}, reported(1))
    assert list(table["A"]) == pytest.approx([0.25] * 6 + [1])
    assert list(table.index)[-1] == "head"


def test_each_unlabelled_run_has_a_mistake_of_its_own_and_reports():
    assert sorted(mutations.UNLABELLED.values()) == sorted(mutations.MISTAKES)
    for use in ({}, *mutations.MISTAKES.values()):
        assert set(mutations.reporting(use)) == {*use, "reduce_gradients"}
        assert mutations.source(use).count("def ") == len(use)
