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
        "defence",
        checks.defence,
        {
            "it gave (32, 60, 140)": "return 32, 60, 140",
            "measure_first is 'share'": changed("06b", "defence", ('if latency > cards else "cards"', 'and "share"')),
            "shard_over is None": changed("06b", "defence", ('"shard_over": mine', '"shard_over": None')),
            "groups of 32 have 95% of the best speed": changed(
                "06b",
                "defence",
                ("max(steps[14, 1.0], key=worst_share)", "min(steps[14, 1.0], key=steps[14, 1.0].get)"),
            ),
            "groups of 256 have 40% of the best speed": changed(
                "06b", "defence", ("max(steps[14, 1.0], key=worst_share)", "max(steps[14, 1.0])")
            ),
            "with 14 µs and 100% of each card the step may take": changed(
                "06b", "defence", (".low_s for", ".time.step_s for"), (".high_s for", ".time.step_s for")
            ),
            "with 14 µs and 90% of each card the step may take": changed(
                "06b", "defence", ("1e3 * max(sizes[mine]", "1e3 * min(sizes[mine]")
            ),
            "30.0 to 75.9 ms is wider": changed(
                "06b", "defence", ("1e3 * min(sizes[mine].low_s for sizes in found.values())", "30.0")
            ),
            "slower is {'": changed("06b", "defence", ("{at: [size for", "{str(at): [size for")),
            "with 14 µs and 100% of each card you say that": changed(
                "06b", "defence", ("row[size] > 1.2 * row[mine]", "row[size] > 1.05 * row[mine]")
            ),
            "cards moves your step by a factor of 1.04": changed(
                "06b", "defence", ("latency > cards", "latency < cards")
            ),
        },
    ),
]
