"""Lab 1b."""

from answers import Exercise, changed
from answers.spatial import OUT, PADDED, TO_ALL
from labkit_course.checks import spatial_at_work as checks

DIST = "from torch import distributed as dist\n"
TIME = "strip_step_s(plain_s=1.0, ranks={}, messages={}, message_bytes={}, alpha_s={}, beta_s_per_byte={}) gave "

EXERCISES = [
    Exercise(
        "1b.1",
        "local_columns",
        checks.local_columns,
        {
            "local_columns(width=256, ranks=1, stage=0) gave 256": "return width // ranks",
            "local_columns(width=256, ranks=4, stage=1) gave 16": "return width // 4 // ranks",
            "local_columns(width=256, ranks=4, stage=0) gave 64": "return width // 4 // 2**stage",
            "local_columns(width=256, ranks=4, stage=1) gave 8.0, a float": "return width / (4 * 2**stage) / ranks",
        },
    ),
    Exercise(
        "1b.2",
        "placements",
        checks.placements,
        {
            "images: along data you say Shard(3), so the ranks along data hold different columns": """
return {"images": [Shard(3), Shard(0)], "weights": [Replicate(), Replicate()],
        "gradients": [Partial(), Partial()], "logits": [Shard(0), Replicate()]}
""",
            "weights: along data you say Shard(0), so the ranks along data hold different samples": """
return {"images": [Shard(0), Shard(3)], "weights": [Shard(0), Shard(3)],
        "gradients": [Partial(), Partial()], "logits": [Shard(0), Replicate()]}
""",
            "gradients: along data you say Replicate(), so the ranks along data hold the same numbers": """
return {"images": [Shard(0), Shard(3)], "weights": [Replicate(), Replicate()],
        "gradients": [Replicate(), Replicate()], "logits": [Shard(0), Replicate()]}
""",
            "logits: along space you say Partial(), so the tensor is the sum of what the ranks along space hold": """
return {"images": [Shard(0), Shard(3)], "weights": [Replicate(), Replicate()],
        "gradients": [Partial(), Partial()], "logits": [Shard(0), Partial()]}
""",
            "images: [Shard(dim=3)] is no list of two placements": 'return {"images": [Shard(3)]}',
        },
    ),
    Exercise(
        "1b.3",
        "activation_bytes",
        checks.activation_bytes,
        {
            "activation_bytes(batch=1, channels=1, height=1, width=1) gave 12": (
                "return 12 * batch * channels * height * width"
            ),
            "activation_bytes(batch=1, channels=1, height=1, width=1) gave 24": (
                "return 6 * batch * channels * height * width * 4"
            ),
            "activation_bytes(batch=2, channels=32, height=32, width=64) gave 3,145,728": (
                "return 12 * channels * height * width * 4"
            ),
        },
    ),
    Exercise(
        "1b.4",
        "strip_step_s",
        checks.strip_step_s,
        {
            TIME.format(4, 0, 0, 0.0, 0.0) + "1": (
                "return plain_s + messages * (alpha_s + message_bytes * beta_s_per_byte)"
            ),
            TIME.format(2, 10, 0, 0.01, 0.0) + "0.51": (
                "return plain_s / ranks + alpha_s + messages * message_bytes * beta_s_per_byte"
            ),
            TIME.format(2, 10, 1000, 0.01, 1e-05) + "0.61": (
                "return plain_s / ranks + messages * alpha_s + message_bytes * beta_s_per_byte"
            ),
        },
    ),
    Exercise(
        "1b.5",
        "sends_nothing",
        checks.sends_nothing,
        {
            "on rank 0, the rank sends 1 send call with 360 bytes": DIST + OUT + PADDED,
            "on rank 0, the rank sends 1 all_gather call with 1,920 bytes": DIST
            + TO_ALL
            + changed("01b", "sends_nothing"),
            "right on 4 ranks, but with 3 ranks: on rank 2, the test of ones caught it: the last 3": changed(
                "01b", "sends_nothing", ("rank < ranks - 1", "rank < 3")
            ),
            "on rank 0, the numbers are torch.float64": changed(
                "01b", "sends_nothing", ("strip, right", "strip.double(), right")
            ),
            "on rank 0, the test of ones caught it: the last 3 columns are all zero": (
                "return torch.nn.functional.pad(strip, (halo, halo))"
            ),
            "on rank 0, the test of ones caught it: the first 3 columns are all one": (
                "return torch.cat([strip[..., :halo], strip, strip[..., -halo:]], dim=-1)"
            ),
        },
    ),
]
