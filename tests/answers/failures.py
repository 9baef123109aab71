"""Lab 7."""

from answers import Exercise
from labkit_course.checks import failures as checks

CALLS = """
for place in range({places}(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    others = [rank for rank, call in enumerate(calls) if {differs}]
    if others:
        return place, others
return None
"""
DIAGNOSES = """
return {{
    17: (3, "deadlock", "stacks: rank {row}"),
    1: {second},
    23: (None, "same samples", "samples: rank 0"),
}}
"""


def diagnoses(second, row=3):
    """Right answers of mysteries 17 and 23, but for the row, and this one of mystery 1."""
    return DIAGNOSES.format(second=second, row=row)


EXERCISES = [
    Exercise(
        "7.1",
        "culprit",
        checks.culprit,
        {
            "in a run with one that was killed it blames rank 0, which only lost": (
                'own = [end for end in ends if end["status"] not in (0, -15)]\n'
                'return min(own, key=lambda end: end["time"])["rank"]'
            ),
            "in a run with one that raised it blames rank 0, which only lost": (
                'return next(end["rank"] for end in ends if end["error"])'
            ),
            "in a run with one that raised it blames rank 1, which torchrun ended": (
                'return min(ends, key=lambda end: end["status"])["rank"]'
            ),
            "in a run with two that raised it blames rank 0, which failed later": """
own = [end for end in ends if end["status"] not in (0, -15) and "closed by peer" not in end["error"]]
return own[0]["rank"]
""",
        },
    ),
    Exercise(
        "7.2",
        "where_they_part",
        checks.where_they_part,
        {
            "of rank 0 with another shape it gave (1, [1, 2, 3])": CALLS.format(
                places="max", differs="call != calls[0]"
            ),
            "of rank 3 one call short it gave None": CALLS.format(
                places="min", differs="calls.count(call) < len(calls) / 2"
            ),
            "of rank 0 with another shape it gave None": CALLS.format(
                places="min", differs="[c[0] for c in calls].count(call[0]) < len(calls) / 2"
            ),
            "of rank 2 in another call it gave tensor([1, 2])": """
for place, calls in enumerate(zip(*logs)):
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    if odd:
        return torch.tensor([place, *odd])
""",
            "of two places where they differ it gave (2": """
found = None
for place in range(max(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    found = (place, odd) if odd else found
return found
""",
        },
    ),
    Exercise(
        "7.3",
        "diagnoses",
        checks.diagnoses,
        {
            "mystery 1: rank 2 is right, 'killed' is not": diagnoses('(2, "killed", "ends: rank 1")'),
            "mystery 1: 'other shape' is right, rank 1 is not": diagnoses('(1, "other shape", "record: call 4")'),
            "mystery 1: neither no single rank nor 'wrong scale'": diagnoses(
                '(None, "wrong scale", "gradients: rank 0")'
            ),
            "mystery 1: 'shape' is none of the causes": diagnoses('(2, "shape", "record: call 4")'),
            "mystery 1: (2, 'other shape') is not (rank, cause, line)": diagnoses('(2, "other shape")'),
            "mystery 1: rank 2, 'other shape' is right, 'ends: rank 1' does not prove it": diagnoses(
                '(2, "other shape", "ends: rank 1")'
            ),
            "mystery 1: rank 2, 'other shape' is right, 'float64' is not the line": diagnoses(
                '(2, "other shape", "float64")'
            ),
            "mystery 17: rank 3, 'deadlock' is right, 'stacks: rank 0' does not prove it": diagnoses(
                '(2, "other shape", "record: call 4")', row=0
            ),
            "mystery 23 is missing": """
return {17: (3, "deadlock", "stacks: rank 3"), 1: (2, "other shape", "record: call 4")}
""",
            "it gave (2, 'left out')": 'return 2, "left out"',
        },
    ),
]
