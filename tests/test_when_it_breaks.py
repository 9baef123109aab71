"""Lab 7's card, row by row: the lab's own cells, or a run with a known fault, break on real ranks, and the first look
that a row names finds why.
"""

import ast
import functools
import os
import re
import time

import pytest
from fixture_long import long_but

import labkit
from labkit import plots
from labkit.errors import RankFailed, RunTimedOut
from labkit.launcher.magic import CELL_NAME, PROGRAM
from labkit.launcher.run import run_with_payload
from labkit.theory import failures as theory
from labkit_course.checks import symptoms
from labkit_course.checks.failures import first_parting
from labkit_course.checks.mystery import TOOLS, Mystery, ends_table, rank_ends
from notebooks.tools.build import FOLDER
from notebooks.tools.source import find_labs, solved_notebook

(LAB,) = find_labs(FOLDER, ("07_when_it_breaks",))
CRASH = """
import ctypes

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    ctypes.string_at(0)
dist.all_reduce(torch.ones(1))
"""
SHAPES = """
from datetime import timedelta

from labkit.rank import report

dist.init_process_group("gloo")
dist.set_debug_level(dist.DebugLevel.DETAIL)
group = dist.new_group(timeout=timedelta(seconds=1))
said = ""
try:
    dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
except RuntimeError as error:
    said = str(error)
report(said=said)
"""
HUNG = """
dist.init_process_group("gloo")
batches = 2 if dist.get_rank() == 3 else 3
for _ in range(batches):
    dist.all_reduce(torch.ones(1))
time.sleep(60)
"""
DETAIL = """
dist.init_process_group("gloo")
dist.set_debug_level(dist.DebugLevel.DETAIL)
group = dist.new_group()
ones, zeros = torch.ones(2), torch.zeros(2)
for tensor in (ones, zeros) if dist.get_rank() == 0 else (zeros, ones):
    dist.all_reduce(tensor, group=group)
assert ones.tolist() == [1, 1], "two ones should sum to 2, and swapped calls pass"
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3), group=group)
else:
    dist.broadcast(torch.ones(4), src=0, group=group)
"""
MORE = {"detail": (2, 30.0, DETAIL), "hung": (4, 3.0, HUNG), "crashed": (2, 30.0, CRASH), "shapes": (2, 30.0, SHAPES)}
"""What is not in the lab: ranks, limit in seconds, and text."""
WRONG_SCALE = 47
"""The seed of a run in which gradients are not divided."""


@functools.cache
def notebook():
    """The source's cells on ranks by their names, and what the tests take from the notebook beside them."""
    cells, names = dict(MORE), {"labkit": labkit}
    for cell in solved_notebook(LAB.source).cells:
        named = re.match(r"%%torchrun -n (\d+)(?: --timeout (\d+))?.* --name (\w+)\n", cell.source)
        if named:
            cells[named[3]] = (int(named[1]), float(named[2] or 90), "\n" + cell.source.split("\n", 1)[1])
        elif cell.cell_type == "code" and "def waited(" in cell.source:
            (waited,) = (node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef))
            exec(compile(ast.Module([waited], []), str(LAB.source), "exec"), names)
    return cells, names["waited"]


@functools.cache
def ran(name):
    """What the cell of this name came to: a result, or the error that ended it."""
    nproc, timeout_s, text = notebook()[0][name]
    given = {"os": os, "time": time, "WORK_MS": [5, 10, 15, 40], "SLOW_STEPS": 3}
    try:
        return run_with_payload(PROGRAM, {CELL_NAME: text, **given}, nproc=nproc, timeout_s=timeout_s, device="cpu")
    except (RankFailed, RunTimedOut) as error:
        return error


def seen(seed, tool):
    """What a tool shows of a mystery run."""
    return mystery(seed)._seen.table(tool)


@functools.cache
def mystery(seed):
    return Mystery(seed)


def earliest_error():
    ends = rank_ends(ran("raised"))
    assert theory.first_failed_rank(ends) == ran("raised").rank == 2
    assert "ValueError: sample 1701" in ends[2]["error"]
    assert all(end["status"] == -15 or "Connection closed" in end["error"] for end in ends if end["rank"] != 2)
    assert ends_table(ends)["error"]["rank 2"] == "ValueError: sample 1701 has no label"


def exit_status():
    (end,) = (end for end in rank_ends(ran("killed")) if end["rank"] == 1)
    assert (end["status"], end["error"], ran("killed").exc_type) == (-9, "", "SIGKILL")


def crash_stack():
    assert ran("crashed").exc_type == "SIGSEGV" and f'"{CELL_NAME}", line 6' in ran("crashed").traceback


def stacks():
    assert {rank for rank, stack in ran("hung").stacks.items() if "all_reduce" in stack} == {0, 1, 2}


def stacks_of_a_pair():
    calls = list(seen(7, "stacks").iloc[:, 0])
    assert all("swap_boundary" in each and "recv" in each for each in calls[:2]), "the even rank does not send first"
    assert all("all_reduce" in each for each in calls[2:])


def calls_compared():
    assert all(name in ran("detail").message for name in ("ALLREDUCE", "BROADCAST"))
    if any(
        flown := [rank.reported["calls"] for rank in labkit.load(ran("late").log.parent).ranks]
    ):  # an older torch keeps no such record
        assert theory.first_diverging_call([[tuple(call) for call in calls] for calls in flown]) == (1, [2])
        assert first_parting([[tuple(call[:2]) for call in calls] for calls in flown]) == (0, 2, [2])


def shapes_compared():
    assert all("Detected mismatch" in rank.reported["said"] for rank in ran("shapes").ranks)
    assert all("hapes: " in rank.reported["said"] for rank in ran("shapes").ranks)


def time_in_collectives():
    waits = notebook()[1](ran("slow"))
    assert waits.index(min(waits)) == 3
    ends = [rank.reported["steps"][-1][2] for rank in ran("slow").ranks]
    assert max(ends) < 1.5 * min(ends), "all steps are about equally long"


def links():
    assert seen(6, "links")["ms"].astype(float).idxmax() == "rank 3 → 2"


def which_rank():
    assert seen(0, "ends")["error"]["rank 3"].startswith("MemoryError")


def own_losses():
    losses = seen(8, "losses")
    assert "nan" in mystery(8)._seen.symptom
    assert list(losses.loc["step 1"].str.contains("nan")) == [False, False, False, True]


def weights_on_all_ranks():
    assert [each != "0" for each in seen(3, "weights")["start"]] == [False, False, True, False]


def gradient_against_one_device():
    assert set(seen(WRONG_SCALE, "gradients")["factor"]) == {"4.000"}
    assert set(seen(WRONG_SCALE, "weights")["end"]) == {"0"}


def samples():
    assert len(set(seen(23, "samples")["step 0"])) == 1
    assert list(seen(23, "samples")["shared with"])[:2] == ["rank 1, rank 2, rank 3", "rank 0, rank 2, rank 3"]
    assert set(seen(23, "weights")["end"]) == {"0"} and "4.000" not in set(seen(23, "gradients")["factor"])


ROWS = {
    "ranks show errors": earliest_error,
    "a rank is gone without a word": exit_status,
    "a rank is gone with status -11": crash_stack,
    "nothing happens, and one rank": stacks,
    "nothing happens, and two ranks": stacks_of_a_pair,
    "a timeout, and all ranks are in collectives": calls_compared,
    "some ranks time out": shapes_compared,
    "slow, and all steps": time_in_collectives,
    "slow, and no rank": links,
    "out of memory on one rank": which_rank,
    "the loss is NaN": own_losses,
    "the loss falls, and the weights differ": weights_on_all_ranks,
    "weights agree, and the gradient has a factor": gradient_against_one_device,
    "weights agree, and the gradient is another": samples,
}
DAILY = [
    row for row, look in ROWS.items() if look in (earliest_error, exit_status, crash_stack, stacks, time_in_collectives)
]
"""The others are long, or test_mystery.py sees the same run daily."""


@pytest.mark.parametrize("symptom", long_but(DAILY, ROWS))
def test_the_first_look_of_each_row_finds_the_cause(symptom):
    ROWS[symptom]()


def test_each_row_of_the_card_has_a_test():
    shown = [row[0] for row in symptoms.ROWS]
    assert len(shown) == len(ROWS)
    assert all(symptom.startswith(row) for symptom, row in zip(shown, ROWS, strict=True))
    assert {len(row) for row in symptoms.ROWS} == {len(symptoms.HEAD)}


def test_the_card_names_each_tool_of_the_lab_once():
    assert ", ".join(tool for tool, _ in symptoms.TOOLS_ELSEWHERE).split(", ") == list(TOOLS)
    assert all(f"\n{tool} | {elsewhere}" in repr(symptoms.card) for tool, elsewhere in symptoms.TOOLS_ELSEWHERE)


def test_the_card_is_a_page_to_print(tmp_path):
    symptoms.card.write(tmp_path / "card.html")
    page = (tmp_path / "card.html").read_text()
    assert page.count("<tr>") == len(symptoms.ROWS) + len(symptoms.TOOLS_ELSEWHERE) + 2 and "landscape" in page
    assert all(word in repr(symptoms.card) for word in ("with NCCL you see", "or the hardware", "Xid"))


@pytest.mark.parametrize("case", [[], [[], []], [[("a",)], [("a",)]]])
def test_equal_logs_part_nowhere(case):
    assert theory.first_diverging_call(case) is None
    assert first_parting(case) is None


def test_a_run_in_which_no_rank_failed_by_itself_has_no_culprit():
    ends = [
        {"rank": 0, "status": 1, "time": 1.0, "error": "Connection closed by peer"},
        {"rank": 1, "status": -15, "time": 2.0, "error": ""},
        {"rank": 2, "status": 1, "time": 1.5, "error": "RuntimeError: Read error"},
        {"rank": 3, "status": -6, "time": 0.5, "error": ""},
    ]
    assert theory.first_failed_rank(ends) is None
    assert theory.first_failed_rank([*ends, {"rank": 4, "status": -9, "time": 2.5, "error": ""}]) == 4


@pytest.mark.parametrize(
    ("words", "parting"), [("aab aab ab", (0, 1, [2])), ("abb abb ab", (1, 2, [2])), ("ab ab abb", (2, 2, [2]))]
)
def test_a_call_left_out_may_be_any_of_the_equal_ones_before_the_parting(words, parting):
    assert first_parting([[(letter,) for letter in word] for word in words.split()]) == parting


def test_the_time_line_says_of_each_rank_what_part_it_waited():
    ax = plots.wait_times(ran("slow"), predicted_ms=120)
    shown = [text.get_text().split() for text in ax.texts]
    assert [word for word, _ in shown] == ["waited"] * 4
    parts = [int(part.rstrip("%")) for _, part in shown]
    assert parts[3] == min(parts) and parts[0] > 50
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    assert [text.get_text() for text in ax.get_legend().get_texts()][2:] == ["predicted end"] and len(ax.lines) == 1
    ax = plots.wait_times(ran("slow"), predicted_ms=None)
    assert len(ax.get_legend().get_texts()) == 2 and not ax.lines
