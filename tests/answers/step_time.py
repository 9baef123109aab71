"""Lab 6b."""

from answers import Exercise, changed
from labkit_course.checks import step_time as checks

EXERCISES = [
    Exercise(
        "6b.1",
        "forward_s",
        checks.forward_s,
        {
            "forward_s(gathers_s=[1.0, 1.0, 1.0], computes_s=[3.0, 3.0, 3.0]) gave 12.0": (
                "return sum(gathers_s) + sum(computes_s)"
            ),
            "forward_s(gathers_s=[1.0], computes_s=[2.0]) gave 2.0": "return max(sum(gathers_s), sum(computes_s))",
            "forward_s(gathers_s=[1.0, 1.0, 5.0], computes_s=[4.0, 1.0, 1.0]) gave 8.0": changed(
                "06b", "forward_s", ("max(gathered, ends[-2]) + gather_s", "gathered + gather_s")
            ),
        },
    ),
    Exercise(
        "6b.2",
        "backward_s",
        checks.backward_s,
        {
            "backward_s(gathers_s=[1.0], computes_s=[2.0], reduces_s=[4.0]) gave 3.0": (
                "computed, gathered = 0.0, 0.0\n"
                "for gather_s, compute_s in zip(gathers_s, computes_s, strict=True):\n"
                "    gathered += gather_s\n"
                "    computed = max(computed, gathered) + compute_s\n"
                "return computed"
            ),
            "backward_s(gathers_s=[1.0, 1.0], computes_s=[3.0, 3.0], reduces_s=[0.5, 0.5]) gave 9.0": (
                "return sum(gathers_s) + sum(computes_s) + sum(reduces_s)"
            ),
            "backward_s(gathers_s=[1.0], computes_s=[2.0], reduces_s=[4.0]) gave 5.0": changed(
                "06b", "backward_s", ("max(sent, computed) + reduce_s", "sent + reduce_s")
            ),
            "backward_s(gathers_s=[1.0, 1.0, 1.0], computes_s=[2.0, 2.0, 2.0], reduces_s=[4.0, 4.0, 4.0])": (
                "gathered, computed, sent = 0.0, 0.0, 0.0\n"
                "for gather_s, compute_s, reduce_s in zip(gathers_s, computes_s, reduces_s, strict=True):\n"
                "    gathered += gather_s\n"
                "    computed = max(computed, gathered) + compute_s\n"
                "    sent = max(sent, computed, gathered) + reduce_s\n"
                "return sent"
            ),
        },
    ),
    Exercise(
        "6b.3",
        "choose",
        checks.choose,
        {
            "it gave 512": "return 512",
            "it rents the plan that is late for certain": (
                "return min(plans, key=lambda name: sum(plans[name]['bills'].values()))"
            ),
            "it rents a plan that may take 9 days": changed(
                "06b",
                "choose",
                ("max(most for _, most in days.values())", "max(sum(ends) / 2 for ends in days.values())"),
            ),
            "no plan is sure to be over in 8 days": changed(
                "06b", "choose", ("default=None", "default=list(plans)[-1]")
            ),
            "it rents the plan that is over first": changed(
                "06b", "choose", ("key=regret", "key=lambda name: plans[name]['days']['quick']")
            ),
            "it rents the plan with the narrow range": changed(
                "06b",
                "choose",
                ("key=regret", "key=lambda name: max(b - a for a, b in plans[name]['days'].values())"),
            ),
            "it saves 1 if the network is quick": changed(
                "06b", "choose", ("key=regret", "key=lambda name: min(safe[name].values())")
            ),
            "it follows no single rule": changed(
                "06b", "choose", ("for each in safe.values()", "for each in (plan['bills'] for plan in plans.values())")
            ),
            "your rule works, and does not say why it is right": changed(
                "06b",
                "choose",
                ('"""Their owners will see which network it was, and ask what they paid more than they had to."""', ""),
            ),
        },
    ),
]
