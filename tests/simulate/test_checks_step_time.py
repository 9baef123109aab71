"""Lab 6b: criteria that can be defended pass in their own words; a few blocks are continued to many."""

import pytest

import labkit
from labkit_course.checks import step_time as checks
from labkit_simulate.estimate import estimate_rank_step
from labkit_simulate.theory.reference_results import VTRAIN_FITTED, estimated_over_published
from labkit_simulate.theory.simulation import sharded_step_s
from launch.given import TRAIN


def chooser(rank):
    """Return a rule that ranks bills by network, and takes only plans that are in time."""

    def choose(plans, deadline_days):
        """A reason."""
        safe = {name: plan for name, plan in plans.items() if checks._most_days(plan) <= deadline_days}
        bills = {name: [*plan["bills"].values()] for name, plan in safe.items()}
        return min(bills, key=lambda name: rank(bills[name], [*bills.values()]), default=None)

    return choose


def above_cheapest(mine, every, compare):
    return max(compare(bill, min(column)) for bill, column in zip(mine, zip(*every, strict=True), strict=True))


RULES = {
    "the smallest worst bill": (384, lambda mine, every: max(mine)),
    "the smallest sum": (512, lambda mine, every: sum(mine)),
    "the smallest regret": (768, lambda mine, every: above_cheapest(mine, every, lambda a, b: a - b)),
    "the smallest regret in percent": (1536, lambda mine, every: above_cheapest(mine, every, lambda a, b: a / b)),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_that_can_be_defended_passes_and_rents_a_plan_of_its_own(rule):
    gpus, rank = RULES[rule]
    verdict = checks.choose(chooser(rank))
    assert verdict.ok and f"by {rule} you rent {gpus} GPUs, groups of 8, for " in verdict.detail, verdict
    others = [f"{other} rents {count} GPUs" for other, (count, _) in RULES.items() if other != rule]
    assert all(other in verdict.detail for other in others)


@pytest.mark.parametrize(
    "rank",
    [
        lambda mine, every: max(mine) + sum(mine),
        lambda mine, every: 2 * mine[0] + mine[-1],
        lambda mine, every: mine[-1] if len(mine) == 3 else sum(mine),
    ],
    ids=["two rules at once", "odds of two to one", "another rule for three networks"],
)
def test_a_rule_that_is_none_of_them_is_told_what_each_of_them_would_take(rank):
    verdict = checks.choose(chooser(rank))
    assert verdict.state == "wrong" and "it follows no single rule" in verdict.detail, verdict
    assert all(f"by {rule}" in verdict.expected for rule in RULES)


def test_made_up_plans_tell_any_two_rules_apart_and_one_is_cheap_and_late():
    taken = [[checks.rented(rule, plans, 8) for rule in RULES] for plans in checks.telling_plans()]
    assert all(len({*row[:3]}) == 3 for row in taken)
    assert len(set(zip(*taken, strict=True))) == len(RULES)
    assert all(checks.rented("the smallest sum", plans, 9) == "late" for plans in checks.telling_plans())
    assert {len(plans["a"]["bills"]) for plans in checks.telling_plans()} == {2, 3}


def test_a_rule_that_rents_nothing_is_told_so():
    verdict = checks.choose(lambda plans, deadline_days: plans.get("none of them"))
    assert verdict.state == "wrong" and verdict.detail.startswith("it rents none")


def test_a_rule_may_change_the_plans_that_it_is_given():
    def choose(plans, deadline_days):
        """A reason."""
        found = chooser(lambda mine, every: max(mine))(plans, deadline_days)
        for plan in plans.values():
            plan["bills"].clear()
        plans.clear()
        return found

    assert checks.choose(choose).ok and len(checks.rental_plans()) == 8


def test_units_compute_for_as_long_as_the_record_says():
    result = labkit.simulate(TRAIN, layers=8, world_size=64, hardware="h100-8x", sequence=512, shard_over=8)
    units = checks.unit_times(result)
    bars = result.frame.query("lane == 'compute' and phase in ('forward', 'backward')")
    assert list(units.index) == ["root", "block", "head"]
    assert units.mul([1, 8, 1], axis=0).to_numpy().sum() == pytest.approx(bars.dur_us.sum() / 1e3)
    named = bars.set_index("name").dur_us / 1e3
    assert units.forward["root"] > named["embedding"].iloc[0]
    assert units.forward["head"] > named["norm"].iloc[0] + named["output"].iloc[0]
    one = bars[(bars.name == "blocks.4") & (bars.phase == "forward")].dur_us.sum() / 1e3
    assert units.forward["block"] == pytest.approx(one, rel=0.01)


def test_eight_blocks_are_continued_to_what_a_simulation_of_more_has():
    how = {"world_size": 64, "hardware": "h100-8x", "sequence": 512, "shard_over": 8}
    few, more = (labkit.simulate(TRAIN, layers=layers, **how) for layers in (8, 10))
    for each in ((14, 1.0), (434, 0.5)):
        by_shape = sharded_step_s(8, 64, 8, 512, checks.network(*each))
        known, seen = (estimate_rank_step(result, checks.network(*each)).time for result in (few, more))
        assert checks.all_blocks_s(known, whole=10) == pytest.approx(seen.step_s, rel=0.005)
        assert seen.step_s > 1.1 * known.step_s
        assert by_shape == pytest.approx(known.step_s, rel=0.04), "the formula of section 4 has the same schedule"


def test_messages_that_share_a_card_take_turns():
    how = {"world_size": 64, "hardware": "h100-8x", "sequence": 512}
    one_card = checks.network(14, 1 / 8)
    for size, slower in ((8, False), (16, True), (64, False)):
        result = labkit.simulate(TRAIN, layers=2, shard_over=size, **how)
        beside, turns = estimate_rank_step(result, one_card), checks.estimate_in_turns(result, one_card)
        # Groups of 8 send nothing but all-reduces, one group nothing but gathers and reduce-scatters.
        assert (turns.time.step_s > 1.2 * beside.time.step_s) == slower
        assert slower or turns.time.step_s == pytest.approx(beside.time.step_s)
        assert turns.low_s < turns.time.step_s < turns.high_s
        assert slower or (turns.low_s, turns.high_s) == pytest.approx((beside.low_s, beside.high_s), rel=0.01)


def test_rows_that_gave_a_figure_are_left_out():
    assert len(VTRAIN_FITTED) == 5 and {row.setup.tensor for row in VTRAIN_FITTED} == {16}
    every, predicted = estimated_over_published(), estimated_over_published(fitted=False)
    assert len(predicted) == len(every) - 5 and set(predicted) < set(every)
