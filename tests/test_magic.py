"""%%torchrun: a cell's code on real ranks, with their output, their values and their errors in terms of the cell."""

import textwrap

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit.launcher import magic, run

GATHER = """
import torch.distributed as dist
dist.init_process_group()
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
"""


@pytest.fixture
def shell(monkeypatch):
    """An IPython in which labkit was imported."""
    monkeypatch.setenv("LABKIT_PROGRESS", "off")
    shell = InteractiveShell()
    labkit.load_ipython_extension(shell)
    return shell


@pytest.fixture
def cell(shell, capsys):
    """Runs a cell of %%torchrun; what it printed."""

    def execute(options, code):
        outcome = shell.run_cell(f"%%torchrun {options}\n{textwrap.dedent(code).lstrip()}")
        if outcome.error_in_exec:
            raise outcome.error_in_exec
        assert outcome.success
        return capsys.readouterr().out

    return execute


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(run.process, "start", lambda *arguments: pytest.fail("a run was started"))


def test_a_plain_script_runs_on_every_rank_and_its_last_value_is_shown_once(cell):
    assert cell("-n 3", GATHER + "x") == "ranks 0–2: tensor([6., 6.])\n"


def test_values_and_output_that_differ_are_shown_by_rank(cell):
    code = """
        import os
        print("hello")
        if os.environ["RANK"] == "1":
            print("and again")
        {"rank": int(os.environ["RANK"]), "half": int(os.environ["RANK"]) // 2}
    """
    assert cell("-n 3", code).splitlines() == [
        "[ranks 0, 2] hello",
        "[rank 1] hello",
        "[rank 1] and again",
        "rank 0: {'rank': 0, 'half': 0}",
        "rank 1: {'rank': 1, 'half': 0}",
        "rank 2: {'rank': 2, 'half': 1}",
    ]


@pytest.mark.parametrize("last", ["x;", "x = 1", "None"])
def test_no_value_is_shown_where_an_ordinary_cell_shows_none(cell, last):
    assert cell("", f"x = 2\n{last}") == ""


def test_the_cell_is_a_main_module_with_classes_and_functions(cell):
    code = """
        import pickle
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        def double(point):
            return Point(2 * point.x)
        (__name__, double(pickle.loads(pickle.dumps(Point(2)))))
    """
    assert cell("", code) == "ranks 0–1: ('__main__', Point(x=4))\n"


def test_names_of_the_notebook_reach_the_ranks_when_they_are_listed_and_modules_anyway(cell, shell):
    shell.run_cell("import math as m\nbatch = [1, 2]\ndef twice(x):\n    return [*x, *x] if m else x")
    assert cell("--use batch,twice", "twice(batch) + [m.pi > 3]") == "ranks 0–1: [1, 2, 1, 2, True]\n"
    with pytest.raises(labkit.RankFailed) as caught:
        cell("", "len(batch)")
    assert "batch is a name of the notebook: hand it to the ranks with --use batch" in str(caught.value)


def test_the_result_is_bound_and_values_come_home(cell, shell):
    code = """
        from labkit import rank
        from torch.distributed.tensor import DTensor
        with rank.session() as here:
            rank.give(mine=torch.ones(2) * here.rank, sizes=(1, 2))
            rank.give(more={"a": None})
    """
    cell("-n 2 --name halo", code)
    result = shell.user_ns["halo"]
    assert isinstance(result, labkit.RunResult) and result.info["program"] == "cell"
    first, second = (rank.gave for rank in result.ranks)
    assert first.keys() == {"mine", "sizes", "more"}
    assert torch.equal(second["mine"], torch.ones(2)) and second["sizes"] == [1, 2] and second["more"] == {"a": None}


def test_what_cannot_be_sent_home_is_refused(cell):
    with pytest.raises(labkit.RankFailed, match=r"give\(x=...\): a function cannot be sent home"):
        cell("", "from labkit import rank\nrank.give(x=lambda: 1)")


FAILING = """\
print("before")
dist.init_process_group()
if dist.get_rank() == 2:
    raise ValueError("widths differ")
dist.barrier()"""


def test_an_error_says_which_rank_and_marks_the_line(cell, capsys):
    with pytest.raises(labkit.RankFailed) as caught:
        cell("-n 3", FAILING)
    assert caught.value.rank == 2
    lines = str(caught.value).splitlines()
    assert lines[:5] == [
        "rank 2 failed: ValueError: widths differ",
        "      3 | dist.init_process_group()",
        "      4 | if dist.get_rank() == 2:",
        '-->   5 |     raise ValueError("widths differ")',
        "      6 | dist.barrier()",
    ]
    assert lines[5].startswith("its output: ") and caught.value._render_traceback_() == lines
    shown = capsys.readouterr().out
    assert shown.startswith("[ranks 0–2] before\n") and "Traceback" not in shown.partition("rank 2 failed")[0]


def test_a_deadlock_shows_every_ranks_line(cell):
    code = GATHER + "if dist.get_rank() == 0:\n    dist.all_reduce(x)\nelse:\n    while True:\n        pass"
    with pytest.raises(labkit.RunTimedOut) as caught:
        cell("-n 3 --timeout 2", code)
    text = str(caught.value)
    assert "no end after 2 s" in text
    first, others = text.split("ranks 1–2:")
    assert "rank 0:" in first and "-->   7 |     dist.all_reduce(x)" in first
    assert "-->  10 |         pass" in others or "-->   9 |     while True:" in others


@pytest.mark.usefixtures("nothing_starts")
def test_nothing_starts_with_a_syntax_error(cell, shell):
    outcome = shell.run_cell("%%torchrun\nx = 1\nfor in range(3)")
    assert isinstance(outcome.error_in_exec, labkit.ParameterError)
    assert "-->   3 | for in range(3)\nSyntaxError: invalid syntax. Nothing was started." in str(outcome.error_in_exec)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("-n 0", labkit.ParameterError, "nproc = 0 is not a number of ranks"),
        ("--timeout -1", labkit.ParameterError, "timeout_s = -1"),
        ("--device tpu", labkit.ParameterError, "'tpu' is none of"),
        ("--use nobody", UsageError, "--use nobody: the notebook has no such name"),
        ("--name 3x", UsageError, "--name 3x is no name"),
        ("--nodes 3", UsageError, "unrecognized arguments: --nodes 3"),
    ],
)
def test_wrong_options_are_refused_before_a_start(cell, options, error, message):
    with pytest.raises(error, match=message):
        cell(options, "1")


@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_leave_the_notebook_is_named(cell, shell):
    shell.run_cell("import threading\nlock = threading.Lock()")
    with pytest.raises(labkit.ParameterError, match=r"cannot be sent to the ranks .*lock"):
        cell("--use lock", "lock")


@pytest.mark.parametrize(("ranks", "words"), [([2], "rank 2"), ([0, 1, 2], "ranks 0–2"), ([0, 2, 3], "ranks 0, 2–3")])
def test_ranks_in_words(ranks, words):
    assert magic.in_words(ranks) == words
