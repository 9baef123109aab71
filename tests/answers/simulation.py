"""Lab 6."""

from answers import Exercise, changed
from labkit_course.checks import simulation as checks

HOSTS = "fewest_hosts(shared_bytes={}, own_bytes={}, budget_bytes={}) gave {}"
PEAK = "peak_bytes of {} ranks with {} gave "
TINY, RECOMPUTED = {"model": "tiny", "batch": 4}, {"model": "tiny", "checkpointing": "full"}
CHOICE = 'return {{"shard_over": {}, "batch": {}, "checkpointing": "{}"}}'
EXERCISES = [
    Exercise(
        "6.1",
        "peak_bytes",
        checks.peak_bytes,
        {
            PEAK.format(4, TINY) + "None": changed("06", "peak_bytes", ("return int", "int")),
            PEAK.format(
                64, RECOMPUTED
            ): "return int(labkit.simulate(program, world_size=4, **settings).value('peak_total_bytes'))",
            "peak_bytes of 4 ranks with {'model': 'tiny', 'batch': 4} raised": changed(
                "06", "peak_bytes", ("peak_total_bytes", "peak_bytes")
            ),
        },
    ),
    Exercise(
        "6.2",
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
            "{'shard_over': None, 'batch': 4, 'checkpointing': 'full'} needs": CHOICE.format(None, 4, "full"),
        },
    ),
]
