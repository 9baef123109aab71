"""Lab 6."""

from answers import Exercise, changed
from labkit_course.checks import simulation as checks

HOSTS = "fewest_hosts(shared_bytes={}, own_bytes={}, budget_bytes={}) gave {}"
CHOICE = 'return {{"shard_over": {}, "batch": {}, "checkpointing": "{}"}}'
EXERCISES = [
    Exercise(
        "6.1",
        "fewest_hosts",
        checks.fewest_hosts,
        {
            HOSTS.format(1280.0, 0.0, 40.0, 32): "return math.ceil(shared_bytes / (budget_bytes - own_bytes))",
            HOSTS.format(1280.0, 20.0, 60.0, 2): "return int(shared_bytes / budget_bytes / 8)",
            HOSTS.format(1281.0, 20.0, 60.0, 4): "return int(shared_bytes // (8 * (budget_bytes - own_bytes)))",
            "fewest_hosts(640.0, 60.0, 60.0) raised": "return math.ceil(shared_bytes / 8 / (budget_bytes - own_bytes))",
        },
    ),
    Exercise(
        "6.2",
        "first_that_fits",
        checks.first_that_fits,
        {
            "first_that_fits from hosts=1 with 5.79 GiB gave MemoryFit(": changed(
                "06", "first_that_fits", ("return result", "return memory_fit(result)")
            ),
            "first_that_fits from hosts=1 with 5.79 GiB raised RuntimeError: it simulates 1 ranks": changed(
                "06", "first_that_fits", ("8 * hosts", "hosts")
            ),
            "first_that_fits from hosts=1 with 5.79 GiB raised RuntimeError: it simulated 4 times": changed(
                "06", "first_that_fits", ("hosts += 1", "pass")
            ),
            "first_that_fits from hosts=1 with 5.79 GiB gave the simulation of 8 ranks": changed(
                "06",
                "first_that_fits",
                ("memory_fit(result, budget_gib)", "result.value('peak_total_bytes') <= budget_gib * GIB"),
            ),
            "first_that_fits from hosts=2 with 6.96 GiB gave the simulation of 8 ranks": changed(
                "06", "first_that_fits", ("while True", "hosts = 1\nwhile True")
            ),
        },
    ),
    Exercise(
        "6.3",
        "quickest",
        checks.quickest,
        {
            "quickest of 16 ranks gave checkpointing 'none', batch 1: ": changed(
                "06", "quickest", ('(rows["batch"] / rows["step_s"]).idxmax()', 'rows["step_s"].idxmin()')
            ),
            "quickest of 16 ranks gave checkpointing 'none', batch 4, which needs": changed(
                "06", "quickest", ("found.fitting_rows", "found.frame")
            ),
            "quickest of 16 ranks gave None": changed(
                "06", "quickest", ("return found.candidates", "found.candidates")
            ),
        },
    ),
    Exercise(
        "6.4",
        "chosen",
        checks.chosen,
        {
            "it gave (None, 1, 'none')": 'return None, 1, "none"',
            "{'shard_over': 24, 'batch': 1, 'checkpointing': 'none'} is refused: train: shard_over = 24": CHOICE.format(
                24, 1, "none"
            ),
            "{'shard_over': None, 'batch': 4, 'checkpointing': 'none'} needs": CHOICE.format(None, 4, "none"),
            "{'shard_over': None, 'batch': 1, 'checkpointing': 'none'} needs 19.8 GiB of 40 and trains": CHOICE.format(
                None, 1, "none"
            ),
            "{'shard_over': None, 'batch': 4, 'checkpointing': 'selective'} needs 27.2 GiB of 40": CHOICE.format(
                None, 4, "selective"
            ),
            "{'shard_over': 8, 'batch': 2, 'checkpointing': 'none'} needs": CHOICE.format(8, 2, "none"),
        },
    ),
]
