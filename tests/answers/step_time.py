"""Lab 6b."""

from answers import Exercise, changed
from labkit_course.checks import step_time as checks

NEAR_FAR = "robust({'a': {'near': 1.2, 'far': 2.0}, 'b': {'near': 1.0, 'far': 8.0}}, 0.01) gave ['b']"
SHARE = "robust({'a': {'near': 2.0, 'far': 8.0}, 'b': {'near': 1.0, 'far': 9.0}}, 0.01) gave ['a']"
TIED = "robust({'a': {'x': 1.05, 'y': 4.0, 'z': 7.0}"
DEFENCE = 'return {{"shard_over": {}, "low_ms": {}, "high_ms": {}, "measure_first": {!r}}}'
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
        "robust",
        checks.robust,
        {
            NEAR_FAR: "return [min(steps, key=lambda way: min(steps[way].values()))]",
            SHARE: "return [min(steps, key=lambda way: max(steps[way].values()))]",
            TIED: changed("06b", "robust", (">= worst[order[0]] - tie", "== worst[order[0]]")),
        },
    ),
    Exercise(
        "6b.4",
        "defence",
        checks.defence,
        {
            "it gave (32, 60, 140)": "return 32, 60, 140",
            "measure_first is 'share'": DEFENCE.format(32, 60, 140, "share"),
            "shard_over 24 is refused": DEFENCE.format(24, 60, 140, "cards"),
            "shard_over None has": DEFENCE.format(None, 60, 140, "cards"),
            "shard_over 64 has": DEFENCE.format(64, 60, 150, "cards"),
            "with 14 µs and whole cards the step may take": DEFENCE.format(32, 75, 140, "cards"),
            "30.0 to 300.0 ms is wider": DEFENCE.format(32, 30, 300, "cards"),
            "the step depends on latency": DEFENCE.format(32, 60, 140, "latency"),
        },
    ),
]
