"""Lab 6b."""

from answers import Exercise, changed
from labkit_course.checks import step_time as checks

FIRST_TABLE = "unbeaten({'a': {'near': 1.0, 'far': 2.0}, 'b': {'near': 3.0, 'far': 4.0}}) gave "
SECOND_TABLE = (
    "unbeaten({'a': {'near': 1.0, 'far': 9.0}, 'b': {'near': 2.0, 'far': 3.0}, 'c': {'near': 2.5, 'far': 8.0}}) gave "
)
THIRD_TABLE = "unbeaten({'a': {'x': 5.0, 'y': 5.0, 'z': 5.0}, 'b': {'x': 4.0, 'y': 6.0, 'z': 4.0}"
FIRST = "robust({'a': {'near': 90.0, 'far': 40.0}, 'b': {'near': 100.0, 'far': 10.0}}) gave 'b'"
SECOND = "robust({'a': {'near': 60.0, 'far': 40.0}, 'b': {'near': 100.0, 'far': 35.0}}) gave 'a'"
DEFENCE = 'return {{"shard_over": {}, "low_ms": {}, "high_ms": {}}}'
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
        "unbeaten",
        checks.unbeaten,
        {
            SECOND_TABLE + "['a', 'b', 'c']": (
                "worst = min(max(each.values()) for each in steps.values())\n"
                "return [way for way, each in steps.items() if min(each.values()) <= worst]"
            ),
            THIRD_TABLE: (
                "networks = next(iter(steps.values()))\n"
                "return sorted({min(steps, key=lambda way: steps[way][each]) for each in networks})"
            ),
            FIRST_TABLE + "[]": changed("06b", "unbeaten", ("<", "<=")),
            FIRST_TABLE + "'a'": "return min(steps, key=lambda way: sum(steps[way].values()))",
        },
    ),
    Exercise(
        "6b.3",
        "robust",
        checks.robust,
        {
            FIRST: "return max(speeds, key=lambda way: max(speeds[way].values()))",
            SECOND: "return max(speeds, key=lambda way: min(speeds[way].values()))",
            "robust({'a': {'x': 50.0, 'y': 900.0, 'z': 7.0}": (
                "return max(speeds, key=lambda way: sum(speeds[way].values()))"
            ),
        },
    ),
    Exercise(
        "6b.4",
        "defence",
        checks.defence,
        {
            "it gave (64, 60, 120)": "return 64, 60, 120",
            "shard_over 24 is refused": DEFENCE.format(24, 60, 120),
            "shard_over None has": DEFENCE.format(None, 60, 120),
            "shard_over 8 has": DEFENCE.format(8, 60, 120),
            "at 14 µs the step may take": DEFENCE.format(64, 75, 120),
            "30.0 to 300.0 ms is wider": DEFENCE.format(64, 30, 300),
        },
    ),
]
