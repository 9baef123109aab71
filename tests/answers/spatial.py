"""Lab 1."""

from answers import Exercise
from labkit.checks import spatial as checks

EXERCISES = [
    Exercise(
        "1.1",
        "local_columns",
        checks.local_columns,
        {
            "local_columns(width=256, ranks=1, stage=0) gave 256": "return width // ranks",
            "local_columns(width=256, ranks=4, stage=1) gave 16": "return width // 4 // ranks",
            "local_columns(width=256, ranks=4, stage=0) gave 64": "return width // 4 // 2**stage",
        },
    ),
]
