"""labkit.checks: the notebook's solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

import ast
import importlib.util
import json
import textwrap
from pathlib import Path

import numpy
import pytest
from programs.halo_answers import ANSWERS

import labkit
from labkit.checks import spatial as checks
from labkit.checks.verdict import Verdict, is_empty, passed, wrong

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


def load(folder, text, name):
    """A function from text, with a file behind it, as a cell of a notebook has."""
    path = folder / "cell.py"
    path.write_text(IMPORTS + textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(f"cell_{abs(hash(text))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.fixture
def solution(tmp_path):
    """The notebook's own answer for a check."""
    return lambda check: load(tmp_path, EXERCISES[check][1], EXERCISES[check][0])


@pytest.fixture
def answer(tmp_path):
    """A function from the text of its body, with the signature of a check's exercise."""

    def made(check, body):
        name, text = EXERCISES[check]
        head = text[: text.index(BEGIN)].rstrip()
        return load(tmp_path, f"{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n", name)

    return made


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(labkit, "run", lambda *arguments, **parameters: pytest.fail("a run was started"))


def test_every_exercise_of_the_notebook_has_a_check_and_every_check_an_exercise():
    assert EXERCISES.keys() == {"local_columns", "halo_bytes", "halo_exchange", "halo_gradient", "activation_bytes"}
    assert all(BEGIN in text for _, text in EXERCISES.values())
    assert SOURCE.read_text().count(BEGIN) == len(EXERCISES)


@pytest.mark.parametrize("check", EXERCISES)
def test_solution_of_the_notebook_passes(check, solution):
    verdict = getattr(checks, check)(solution(check))
    assert verdict.state == "passed", verdict
    assert verdict.ok
    assert verdict.detail


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
    assert reason in verdict.detail


def test_a_number_of_numpy_is_a_number(answer):
    right = answer("halo_bytes", "import numpy\nreturn numpy.int64(rows * (kernel - 1) // 2 * channels * batch * 4)")
    assert isinstance(right(1, 3, 1, 1), numpy.int64)
    assert checks.halo_bytes(right).ok


@pytest.fixture(scope="module")
def judged():
    """What each of four ranks says of each answer."""
    program = Path(__file__).parent / "programs" / "halo_answers.py"
    result = labkit.run(program, nproc=checks.RANKS, device="cpu", timeout_s=100)
    return [json.loads(rank.log().splitlines()[-1]) for rank in result.ranks]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_on_four_ranks_is_judged_by_what_it_does(judged, name):
    for said, expected in zip([rank[name] for rank in judged], ANSWERS[name][1], strict=True):
        assert expected in said
        assert bool(expected) == bool(said)


def test_what_a_rank_finds_wrong_becomes_the_verdict(answer):
    verdict = checks.halo_exchange(answer("halo_exchange", "return torch.nn.functional.pad(strip, (halo, halo))"))
    assert verdict.state == "wrong"
    assert verdict.detail in {
        "on rank 0, the last 3 columns are all zero",
        *(f"on rank {rank}, the first 3 columns are all zero" for rank in (1, 2, 3)),
    }


def test_ranks_that_wait_for_each_other_are_stopped_with_a_hint(answer, monkeypatch):
    run = labkit.run
    monkeypatch.setattr(labkit, "run", lambda *args, **parameters: run(*args, **parameters | {"timeout_s": 10}))
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
    verdict = checks.halo_exchange(answer("halo_exchange", everyone_receives_first))
    assert verdict.state == "wrong"
    assert "the ranks waited for each other" in verdict.detail
    assert "does every send have its receive" in verdict.detail


def test_an_error_of_the_answer_is_shown_with_its_rank(answer):
    verdict = checks.halo_gradient(answer("halo_gradient", "return grad[:, :, :, halo] + missing"))
    assert verdict.state == "wrong"
    assert verdict.detail.startswith("on rank ")
    assert verdict.detail.endswith("NameError: name 'missing' is not defined")


def test_verdicts_show_themselves():
    assert repr(passed("4 cases agree")) == "passed: 4 cases agree"
    shown = wrong("gave <1>")._repr_html_()
    assert "<b>wrong</b> gave &lt;1&gt;" in shown
    colours = {Verdict(state)._repr_html_().split("color:")[1][:7] for state in ("passed", "wrong", "not attempted")}
    assert len(colours) == 3


def test_a_body_with_anything_in_it_is_not_empty(answer):
    assert not is_empty(answer("local_columns", "return ..."))
    assert not is_empty(answer("local_columns", "width"))
