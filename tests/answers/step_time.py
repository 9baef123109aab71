"""Lab 6b."""

from answers import Exercise, changed
from labkit_course.checks import step_time as checks

RANGES = "untold({'a': (1.0, 2.0), 'b': (2.5, 4.0), 'c': (1.5, 9.0)}) gave "
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
        "untold",
        checks.untold,
        {
            RANGES + "['a']": "return [min(ranges, key=lambda name: ranges[name][1])]",
            RANGES + "['a', 'b', 'c']": "return list(ranges)",
            "untold({'a': (1.0, 10.0), 'b': (2.0, 3.0), 'c': (4.0, 5.0)}) gave ['a', 'b', 'c']": (
                "_, high = min(ranges.values())\nreturn [name for name, (low, _) in ranges.items() if low <= high]"
            ),
            RANGES + "'a'": "return min(ranges, key=lambda name: ranges[name][1])",
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
