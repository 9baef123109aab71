"""Lab 6."""

from functools import partial

from answers import Exercise, changed
from labkit_course.checks import simulation as checks

trained = partial(changed, "06", "train")
fullest = partial(changed, "06", "fullest_block")
planned = partial(changed, "06", "quickest")
CLAMPED = "model.weight.grad.div_(norm.clamp(min=1))"
HOSTS = "fewest_hosts(shared_bytes={}, own_bytes={}, budget_bytes={}) gave {}"
CHOICE = 'return {{"shard_over": {}, "batch": {}, "checkpointing": "{}"}}'
EXERCISES = [
    Exercise(
        "6.1",
        "train",
        checks.train,
        {
            "with 2 ranks the weights after 3 steps are those of a loop that never clips": trained((CLAMPED, "pass")),
            "with 2 ranks the weights after 3 steps are those of a loop that always divides": trained(
                (".clamp(min=1)", "")
            ),
            # Each rank clips its own gradient, and the sum is longer.
            "with 2 ranks the weights after 3 steps are not those of clips.py": trained(
                ("dist.all_reduce(model.weight.grad)", "pass"),
                (CLAMPED, f"{CLAMPED}\n    dist.all_reduce(model.weight.grad)"),
            ),
            "train as one of 1,024 ranks: ": trained((CLAMPED, f"if norm > 1:\n        {CLAMPED}")),
            "with 2 ranks the weights are right, and the losses are a NoneType": trained(("return losses", "pass")),
            "as one of 1,024 ranks it makes 0 all-reduces in 3 steps": trained(
                (
                    "losses = []",
                    'losses = []\nif "LABKIT_SIMULATED" in __import__("os").environ:\n    return losses',
                )
            ),
        },
    ),
    Exercise(
        "6.2",
        "fullest_block",
        checks.fullest_block,
        {
            "fullest_block of 4 blocks on 64 ranks gave block 2 and 1.865 GiB": fullest(
                ("block_parameters * (1 + (block > 0))", "block_parameters")
            ),
            "fullest_block of 4 blocks on 64 ranks gave block 1": fullest((" + kept_bytes * (block + 1)", "")),
            "fullest_block of 4 blocks on 64 ranks gave block 3": fullest((" * (block < blocks - 1)", "")),
            "fullest_block of 4 blocks on 64 ranks gave block 2 and 2.29": fullest(
                ("12 * parameters + 4 * block_parameters * (blocks - 1 - block)", "16 * parameters"),
            ),
            "fullest_block of 4 blocks on 8 ranks gave block 0": fullest(("(1 + (block > 0))", "2")),
            "fullest_block of 4 blocks on 8 ranks gave block 2": fullest(
                ("4 * block_parameters * (blocks - 1 - block)", "4 * block_parameters")
            ),
            "fullest_block of 4 blocks on 64 ranks gave 2": "return 2",
        },
    ),
    Exercise(
        "6.3",
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
        "6.4",
        "quickest",
        checks.quickest,
        {
            "quickest of 16 ranks gave batch 1, shard_over 8: ": planned(
                ('(rows["batch"] / rows["step_s"]).idxmax()', 'rows["step_s"].idxmin()')
            ),
            # It plans for the hosts of the text, whatever it is given.
            "quickest of 16 ranks gave batch 2, shard_over None, which is the best on h100-8x": planned(
                ("hardware=hosts", 'hardware="h100-8x"')
            ),
            "quickest of 16 ranks gave batch 4, shard_over 8, which needs": planned(("0.9 * budget_gib", "budget_gib")),
            "quickest of 16 ranks gave batch 1, shard_over None: ": planned(
                ('(rows["batch"] / rows["step_s"]).idxmax()', 'rows["needed_bytes"].idxmin()')
            ),
            "quickest of 16 ranks gave None": planned(("return found.candidates", "found.candidates")),
        },
    ),
    Exercise(
        "6.5",
        "chosen",
        checks.chosen,
        {
            "it gave (None, 1, 'none')": 'return None, 1, "none"',
            "{'shard_over': 24, 'batch': 1, 'checkpointing': 'none'} is refused: train: shard_over = 24": CHOICE.format(
                24, 1, "none"
            ),
            "{'shard_over': None, 'batch': 4, 'checkpointing': 'none'} needs": CHOICE.format(None, 4, "none"),
            # The quicker one of the lab's two meshes, with the batch that fits.
            "{'shard_over': 8, 'batch': 1, 'checkpointing': 'none'} needs 28.5 GiB of 40 and trains": CHOICE.format(
                8, 1, "none"
            ),
            # All messages of seven hosts.
            "{'shard_over': None, 'batch': 2, 'checkpointing': 'none'} needs 33.2 GiB of 40 and trains": CHOICE.format(
                None, 2, "none"
            ),
            "{'shard_over': 32, 'batch': 4, 'checkpointing': 'selective'} needs 28.8 GiB of 40": CHOICE.format(
                32, 4, "selective"
            ),
            # It fits, but leaves no tenth free.
            "{'shard_over': 16, 'batch': 2, 'checkpointing': 'none'} needs 3": CHOICE.format(16, 2, "none"),
        },
    ),
]
