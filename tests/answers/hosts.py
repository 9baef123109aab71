"""Lab 8."""

from answers import Exercise
from labkit_course.checks import hosts as checks

NEWEST = """
found = [path for path in folder.glob("step_*"){complete}]
return {choice}
"""
COMPLETE = ' if (path / ".metadata").exists()'
BY_NUMBER = 'max(found, key=lambda path: int(path.name.split("_")[1]), default=None)'
EXERCISES = [
    Exercise(
        "8.1",
        "place_of",
        checks.place_of,
        {
            "place_of(3, nproc=4) gave (3, 0): the local rank first": "return rank % nproc, rank // nproc",
            "place_of(4, nproc=4) gave (0, 0)": "return 0, rank % nproc",
            "place_of(0, nproc=4) gave 0": "return rank // nproc",
            "place_of(0, nproc=4) gave tensor([0, 0])": (
                "import torch\nreturn torch.tensor([rank // nproc, rank % nproc])"
            ),
        },
    ),
    Exercise(
        "8.2",
        "leaves_a_host",
        checks.leaves_a_host,
        {
            "with FSDP over all ranks, leaves_a_host(1200.0, hosts=2, nproc=2, hybrid=False) gave 3,600.0": (
                "return 3 * parameter_bytes"
            ),
            "with HSDP, leaves_a_host(1200.0, hosts=2, nproc=2, hybrid=True) gave 600.0": (
                "ranks = hosts * nproc\n"
                "if hybrid:\n"
                "    return 2 * (hosts - 1) / hosts * parameter_bytes / nproc\n"
                "return 3 * (ranks - 1) / ranks * parameter_bytes"
            ),
            "with HSDP, leaves_a_host(1200.0, hosts=2, nproc=2, hybrid=True) gave 2,700.0": (
                "ranks = hosts * nproc\nreturn 3 * (ranks - 1) / ranks * parameter_bytes"
            ),
        },
    ),
    Exercise(
        "8.3",
        "newest_complete",
        checks.newest_complete,
        {
            "it gave step_11, which was cut off": NEWEST.format(complete="", choice=BY_NUMBER),
            "it gave step_9, and step_10 is newer": NEWEST.format(complete=COMPLETE, choice="max(found, default=None)"),
            "newest_complete of an empty folder raised": NEWEST.format(
                complete=COMPLETE, choice=BY_NUMBER.replace(", default=None", "")
            ),
        },
    ),
    Exercise(
        "8.4",
        "interval_s",
        checks.interval_s,
        {
            "interval_s(2.0, 10000.0) gave 141.42": "return (save_s * between_failures_s) ** 0.5",
            "interval_s(2.0, 10000.0) gave 0.02: that loses": "return (2 * save_s / between_failures_s) ** 0.5",
            "interval_s(2.0, 10000.0) gave 10,000.0: that loses": "return between_failures_s",
        },
    ),
]
