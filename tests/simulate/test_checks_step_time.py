"""Lab 6b: criteria that can be defended pass in their own words; a few blocks are continued to many."""

import pytest

import labkit
from labkit_course.checks import step_time as checks
from labkit_simulate.estimate import estimate_rank_step
from labkit_simulate.theory.reference_results import VTRAIN_FITTED, estimated_over_published
from launch.given import TRAIN


def criterion(rank):
    """Return a criterion that ranks bills by network, and takes only plans that are in time."""

    def choose(plans, deadline_days):
        """A reason."""
        safe = {name: plan for name, plan in plans.items() if checks._most_days(plan) <= deadline_days}
        bills = {name: [plan["gpus"] * sum(ends) for ends in plan["days"].values()] for name, plan in safe.items()}
        return min(bills, key=lambda name: rank(bills[name], bills.values()), default=None)

    return choose


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (lambda mine, every: max(mine), "keeps the largest bill low"),
        (lambda mine, every: sum(mine), "adds up the networks"),
        (
            lambda mine, every: max(a / min(b) for a, b in zip(mine, zip(*every, strict=True), strict=True)),
            "stays near",
        ),
    ],
    ids=["largest", "sum", "near"],
)
def test_each_criterion_that_can_be_defended_passes_and_hears_what_it_gives_up(rank, said):
    verdict = checks.choose(criterion(rank))
    assert verdict.ok and f"512 GPUs, groups of 32. Your criterion {said}" in verdict.detail, verdict


def test_a_criterion_that_rents_nothing_is_told_so():
    verdict = checks.choose(lambda plans, deadline_days: plans.get("none of them"))
    assert verdict.state == "wrong" and verdict.detail.startswith("it rents none")


def test_a_criterion_may_change_the_plans_that_it_is_given():
    def choose(plans, deadline_days):
        """A reason."""
        found = criterion(lambda mine, every: max(mine))(plans, deadline_days)
        plans.clear()
        return found

    assert checks.choose(choose).ok and len(checks.rental_plans()) == 6


def test_eight_blocks_are_continued_to_what_a_simulation_of_more_has():
    how = {"world_size": 64, "hardware": "h100-8x", "sequence": 512, "shard_over": 8}
    few, more = (labkit.simulate(TRAIN, layers=layers, **how) for layers in (8, 10))
    for each in ((14, 1.0), (434, 0.5)):
        known, seen = (estimate_rank_step(result, checks.network(*each)).time for result in (few, more))
        assert checks.all_blocks_s(known, whole=10) == pytest.approx(seen.step_s, rel=0.005)
        assert seen.step_s > 1.1 * known.step_s


def test_rows_that_gave_a_figure_are_left_out():
    assert len(VTRAIN_FITTED) == 5 and {row.setup.tensor for row in VTRAIN_FITTED} == {16}
    every, predicted = estimated_over_published(), estimated_over_published(fitted=False)
    assert len(predicted) == len(every) - 5 and set(predicted) < set(every)
