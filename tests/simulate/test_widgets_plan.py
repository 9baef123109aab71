"""The explorer of plans: every control alone, what it says against the plan, and a fresh simulation of a chosen row."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fixture_explorers import drawn
from fixture_time import within
from matplotlib.legend import Legend

import labkit
from labkit.plots import style
from labkit_course.plan_explorer import CandidateExplorer
from labkit_course.widgets import explorer as explorer_module
from labkit_simulate.plots.plan import SMALL_AREA

TINY = {"model": "tiny", "layers": 1, "sequence": 256, "samples": 16, "precision": "bf16", "hybrid": None, "tp": 1}


def every_value():
    explorer = CandidateExplorer()
    return [(name, value) for name, control in explorer.controls.items() for _, value in control.options]


@pytest.mark.parametrize(("name", "value"), every_value())
def test_every_value_of_every_control_is_drawn_or_says_what_to_change(name, value):
    explorer = CandidateExplorer()
    chosen = explorer.chosen | {name: value}
    try:
        with within(0.5, time.process_time):
            figure, said = drawn(explorer, **chosen)
    except ValueError as error:
        assert "none fits in" in str(error) and "the least that is needed is" in str(error)
        return
    row = explorer.current_row(**chosen)
    assert f"takes {style.duration_text(row['step_s'])} a step" in said
    (ring,) = [each for each in figure.axes[0].collections if each.get_sizes().tolist() == [160]]
    unit_s = {"s": 1, "ms": 1e-3}[figure.axes[0].get_ylabel().rpartition(" ")[2]]
    assert ring.get_offsets().tolist() == [pytest.approx([row["needed_bytes"] / 2**30, row["step_s"] / unit_s])]


def test_it_says_what_the_plan_says():
    explorer = CandidateExplorer()
    chosen = explorer.chosen | {"budget_gib": 40, "price": 2.0}
    rows = explorer.plan.with_limits(budget_gib=40, dollars_per_hour=2.0).fitting_rows.query("hardware == 'h100-8x'")
    best = rows.iloc[0]
    said = drawn(explorer, **chosen)[1]
    of = len(explorer.plan.frame.query("hardware == 'h100-8x'"))
    assert said.startswith(f"{len(rows)} of {of} fit in 40 GiB; the 1st ({best['world_size']} GPUs, ")
    assert explorer.current_row(**chosen | {"place": 2})["candidate"] == rows.iloc[2]["candidate"] != best["candidate"]
    assert "dollars for 1,000 steps" in said and "continued" not in said
    lines = [replace(each, continued_from=[4, 6]) for each in explorer.plan.candidates]
    assert (
        "continued from fewer blocks" in drawn(CandidateExplorer(replace(explorer.plan, candidates=lines)), **chosen)[1]
    )
    roomy = chosen | {"budget_gib": 140}
    fastest, cheapest = (explorer.current_row(**roomy | {"by": by}) for _, by in explorer.controls["by"].options)
    assert cheapest["step_s"] > fastest["step_s"] and cheapest["dollars_per_step"] < fastest["dollars_per_step"]


def test_times_are_compared_by_sequence_where_batches_differ():
    by_step, by_share = CandidateExplorer(), CandidateExplorer(budget_gib=140, per="batch")
    assert by_share.chosen["budget_gib"] == 140 and by_share.plan.frame["batch"].nunique() > 1
    fitting = by_share.candidate_rows(**by_share.chosen).query("fits")
    assert list(fitting["compared_s"]) == sorted(fitting["step_s"] / fitting["batch"])
    figure, _ = drawn(by_share, **by_share.chosen)
    (ring,) = [each for each in figure.axes[0].collections if each.get_sizes().tolist() == [160]]
    assert ring.get_offsets()[0][1] == pytest.approx(1e3 * fitting["compared_s"].iloc[0])
    assert figure.axes[0].get_ylabel() == "estimated time of a step / batch, ms"
    assert "/" not in drawn(by_step, **by_step.chosen)[0].axes[0].get_ylabel()


@pytest.mark.long  # the largest plan; test_planner.py compares smaller ones
def test_the_plan_that_it_begins_with_is_what_simulate_says():
    plan = CandidateExplorer().plan
    number = next(number for number, each in enumerate(plan.candidates) if not each.reason)
    result = labkit.simulate("decoder", hardware="h100-8x", warm=True, **plan.simulate_arguments(number))
    row = plan.frame.query(f"candidate == {number} and hardware == 'h100-8x'").iloc[0]
    assert row["peak_bytes"] == result.value("peak_total_bytes")
    assert row["step_s"] == pytest.approx(result.value("reckoned_step_s"))


def test_what_it_runs_is_called_simulated_and_not_measured():
    explorer = CandidateExplorer()
    result = SimpleNamespace(value=lambda name: 3.0)
    assert explorer.table_row("step", 3.0, result) == {"plan": "3", "simulated again": "3", "plan is": "the same"}
    assert explorer.table_row("step", 6.0, result)["plan is"] == "2 × too large"
    panel = explorer_module._Panel(explorer)
    assert "simulate" in panel._run.tooltip and "simulated again" in panel._table.value
    assert "real ranks" not in panel._run.tooltip and "measured</th>" not in panel._table.value


@pytest.mark.long  # simulated twice
def test_a_chosen_row_is_simulated_anew_and_equals_the_plan(monkeypatch):
    monkeypatch.setenv("LABKIT_WARM", "1")
    explorer = CandidateExplorer(labkit.plan(**TINY, world_size=[8, 16], checkpointing=["none", "full"]))
    explorer.chosen |= {"place": 2}
    predicted = explorer.prediction
    result = explorer.run_current()
    assert result.is_simulated and len(predicted) == 4
    for name, said in predicted.items():
        assert result.value(name) == said
    assert "simulated" in result.stamp
    panel = explorer_module._Panel(explorer)
    assert "the same" in panel._table.value and "–" not in panel._table.value
    panel._knobs["place"].value = 5
    assert "only 4 fit: take a lower place, or a larger budget" in panel._picture.value


def test_a_second_field_of_two_values_has_small_marks_and_legends_name_them():
    plan = CandidateExplorer().plan
    few = [each for each in plan.candidates if each.params["tp"] == 1 and each.world_size == 64]
    explorer = CandidateExplorer(replace(plan, varied=["hybrid", "checkpointing"], candidates=few), budget_gib=80)
    axes = drawn(explorer, **explorer.chosen)[0].axes[0]
    rows = explorer.candidate_rows(**explorer.chosen)
    small = [x for each in axes.collections if SMALL_AREA in each.get_sizes() for x in small_offsets(each)]
    assert sorted(small) == pytest.approx(sorted(rows.query("hybrid == 8")["needed_bytes"] / 2**30))
    words = [text.get_text() for legend in axes.findobj(Legend) for text in legend.get_texts()]
    assert {"does not fit", "hybrid 8", "checkpointing full"} <= {*words}
    # More than one other field: no mark is small.
    whole = CandidateExplorer()
    axes = drawn(whole, **whole.chosen)[0].axes[0]
    assert not any(SMALL_AREA in each.get_sizes() for each in axes.collections)


def small_offsets(marks):
    """Where the small ones of a scatter's marks lie, along the axis of memory."""
    places = marks.get_offsets()
    return [x for (x, _), area in zip(places, marks.get_sizes(), strict=False) if area == SMALL_AREA]
