"""Lab 7's table, row by row: the lab's own cells break on real ranks, and the first look that a row names finds why."""

import ast
import functools
import json
import os
import re
import time

import pandas
import pytest
import torch
from fixture_long import long_but
from torch import nn

import labkit
from labkit import plots
from labkit.errors import RankFailed, RunTimedOut
from labkit.launcher.magic import CELL_NAME, PROGRAM
from labkit.launcher.run import run_with_payload
from labkit.parallel import failures
from labkit.theory import failures as theory
from notebooks.tools.build import FOLDER
from notebooks.tools.source import find_labs, solved_notebook

(LAB,) = find_labs(FOLDER, ("07_when_it_breaks",))
RANKS = 2
"""The lab's parameter, for the cells that say ``-n $RANKS``."""
NAMES = {"json": json, "re": re, "labkit": labkit, "pandas": pandas, "torch": torch, "nn": nn}
SPACE = {"deep", "ROWS", "WIDTH", "LAYERS", "CAP_MIB", "ends_of", "answers_to", "waited"}
"""What the tests take from the notebook beside its cells on ranks."""


@functools.cache
def notebook():
    """The source's cells on ranks by their names, and the functions and constants in ``SPACE``."""
    cells, names = {}, dict(NAMES)
    for cell in solved_notebook(LAB.source).cells:
        named = re.match(r"%%torchrun -n (\d+|\$RANKS)(?: --timeout (\d+))?.* --name (\w+)\n", cell.source)
        if named:
            cells[named[3]] = (
                int(named[1].replace("$RANKS", f"{RANKS}")),
                float(named[2] or 90),
                "\n" + cell.source.split("\n", 1)[1],
            )
        elif cell.cell_type == "code" and not cell.source.startswith("%%"):
            for node in ast.parse(cell.source).body:
                target = node.targets[0] if isinstance(node, ast.Assign) else node
                found = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
                if getattr(node, "name", "") in SPACE or (isinstance(node, ast.Assign) and found & SPACE):
                    exec(compile(ast.Module([node], []), str(LAB.source), "exec"), names)
    assert names.keys() >= SPACE
    return cells, names


@functools.cache
def ran(name):
    """What the cell of this name came to: a result, or the error that ended it."""
    cells, names = notebook()
    nproc, timeout_s, text = cells[name]
    given = {"os": os, "time": time, "nn": nn, "recorder": failures.recorded, "SLOW_STEPS": 3}
    given |= {"work_ms": [5, 10, 15, 40], **{each: names[each] for each in ("deep", "ROWS", "CAP_MIB")}}
    try:
        return run_with_payload(PROGRAM, {CELL_NAME: text, **given}, nproc=nproc, timeout_s=timeout_s, device="cpu")
    except (RankFailed, RunTimedOut) as error:
        return error


def own(name):
    """A function of the notebook."""
    return notebook()[1][name]


def earliest_error():
    ends = own("ends_of")(ran("raised"))
    assert theory.first_failed_rank(ends) == ran("raised").rank == 2
    assert "ValueError: sample 1701" in ends[2]["error"]
    assert all(end["status"] == -15 or "Connection closed" in end["error"] for end in ends if end["rank"] != 2)


def exit_status():
    (end,) = (end for end in own("ends_of")(ran("killed")) if end["rank"] == 1)
    assert (end["status"], end["error"], ran("killed").exc_type) == (-9, "", "SIGKILL")


def crash_stack():
    assert ran("crashed").exc_type == "SIGSEGV" and f'"{CELL_NAME}", line 6' in ran("crashed").traceback


def stacks():
    inside = {rank for rank, stack in ran("hung").stacks.items() if "all_reduce" in stack}
    assert inside == {0, 1, 2}


def monitored_barrier():
    assert "Ranks 3 failed to pass monitoredBarrier" in ran("missing").message


def said(case, level):
    return [rank.reported["said"][f"{level} {case}"] for rank in ran("disagreed").ranks]


def detail_of_calls():
    assert all("ALLREDUCE" in text and "BROADCAST" in text for text in said("another_collective", "DETAIL"))
    assert not any("ALLREDUCE" in text for text in said("another_collective", "OFF"))


def detail_of_shapes():
    assert all("Detected mismatch" in text and "hapes: " in text for text in said("another_shape", "DETAIL"))
    assert any(said("another_shape", "OFF")) and not any("hapes: " in text for text in said("another_shape", "OFF"))


def records():
    logs = [[(entry["call"], *entry["shape"]) for entry in rank.reported["log"]] for rank in ran("forgot").ranks]
    assert theory.first_diverging_call(logs) == (3, [2])
    if any(flown := [rank.reported["calls"] for rank in ran("flight").ranks]):  # an older torch may keep no such record
        assert theory.first_diverging_call([[(name, *shape) for name, shape, _ in calls] for calls in flown]) == (
            2,
            [2],
        )


def time_in_collectives():
    waits = own("waited")(ran("slow"))
    assert waits.index(min(waits)) == 3
    ends = [rank.reported["steps"][-1][2] for rank in ran("slow").ranks]
    assert max(ends) < 1.5 * min(ends), "all steps are about equally long"


def which_rank():
    assert (ran("full").rank, ran("full").exc_type) == (1, "MemoryCapExceeded")
    assert own("ROWS")[1] > own("ROWS")[0]


def silent(fault):
    equal, factor, moved = own("answers_to")(ran("silent").ranks[0].reported[fault])
    return equal, factor, moved


def weights_on_all_ranks():
    assert silent("missed reduction")[0] == "no" and silent("right")[0] == "yes"


def gradient_against_one_device():
    assert silent("wrong scaling") == ("yes", f"{RANKS}", "1.00") and silent("right")[1] == "1"


def moves():
    assert silent("stale parameter") == ("yes", "1", "0.00") and silent("right")[2] == "1.00"


def apart(name):
    return ran("yesterday").ranks[0].reported["apart"][name]


def seeds():
    assert apart("without a seed")[0] > 1e-4 and max(apart("the same again")) == 0


def in_float64():
    assert theory.is_only_rounding(apart("another order, float32")[-1], apart("another order, float64")[-1])
    assert 0 < apart("another order, float32")[0] < 1e-6, "all steps differ, at first in the last digits"


def as_large_in_float64():
    assert max(apart("a fault, float64")[:10]) == 0 < apart("a fault, float64")[10], "equal up to a step"
    assert not theory.is_only_rounding(apart("a fault, float32")[-1], apart("a fault, float64")[-1])


ROWS = {
    "ranks show errors": earliest_error,
    "a rank is gone, without any exception": exit_status,
    "a rank is gone, with status -11": crash_stack,
    "nothing happens": stacks,
    "a timeout, and one rank has run ahead": monitored_barrier,
    "a timeout, and all ranks are in collectives": detail_of_calls,
    "some ranks time out": detail_of_shapes,
    "a timeout, and DETAIL is too slow": records,
    "slow": time_in_collectives,
    "out of memory on one rank": which_rank,
    "the loss falls, and the weights differ": weights_on_all_ranks,
    "weights agree": gradient_against_one_device,
    "gradients are right": moves,
    "the first step differs": seeds,
    "all steps differ": in_float64,
    "equal up to a step": as_large_in_float64,
}
LONG = {"a timeout, and all ranks are in collectives", "some ranks time out", "a timeout, and DETAIL is too slow"}


@pytest.mark.parametrize("symptom", long_but([row for row in ROWS if row not in LONG], ROWS))
def test_the_first_look_of_each_row_finds_the_cause(symptom):
    if symptom == "out of memory on one rank" and not os.path.exists("/proc/self/status"):
        pytest.skip("a cap on a CPU's memory needs Linux")
    ROWS[symptom]()


def test_each_row_of_the_table_has_a_test():
    table = LAB.source.read_text().partition("| symptom |")[2].partition("\n#\n")[0]
    symptoms = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert len(symptoms) == len(ROWS)
    assert all(symptom.startswith(row) for symptom, row in zip(symptoms, ROWS, strict=True))


@pytest.mark.parametrize("case", [[], [[], []], [[("a",)], [("a",)]]])
def test_equal_logs_part_nowhere(case):
    assert theory.first_diverging_call(case) is None


def test_a_run_in_which_no_rank_failed_by_itself_has_no_culprit():
    ends = [{"rank": 0, "status": 1, "time": 1.0, "error": "Connection closed by peer"}]
    with pytest.raises(ValueError, match="no rank failed by itself"):
        theory.first_failed_rank([*ends, {"rank": 1, "status": -15, "time": 2.0, "error": ""}])


def test_an_aid_pays_up_to_what_it_saves():
    assert theory.break_even_slowdown(hours_between=10, hours_lost=1, hours_lost_with_aid=0.5) == 0.05


def test_the_time_line_says_of_each_rank_what_part_it_waited():
    ax = plots.wait_times(ran("slow"), predicted_ms=120)
    shown = [text.get_text().split() for text in ax.texts]
    assert [word for word, _ in shown] == ["waited"] * 4
    parts = [int(part.rstrip("%")) for _, part in shown]
    assert parts[3] == min(parts) and parts[0] > 50
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]


def test_curves_by_step_leave_out_zeros_on_a_logarithmic_axis_and_say_so():
    ax = plots.values_by_step({"equal": [0.0, 0.0], "apart": [0.0, 1e-7]}, ran("slow"), ylabel="difference", log=True)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["equal (0 everywhere)", "apart"]
    assert ax.get_yscale() == "log" and ax.lines[1].get_ydata()[1] == 1e-7


def test_each_aid_has_its_time_and_its_factor():
    ax = plots.debug_costs({"plain": 2.0, "DETAIL": 7.0}, ran("slow"))
    assert [text.get_text().strip() for text in ax.texts] == ["2 ms", "7 ms, 3.5 ×"]
