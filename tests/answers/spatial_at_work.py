"""Lab 1b."""

from answers import Exercise, changed
from answers.spatial import OUT, PADDED, TO_ALL
from labkit_course.checks import spatial_at_work as checks

DIST = "from torch import distributed as dist\n"
SLIPPED = "your test passes the right exchange, and "
BOTH = "torch.allclose(padded, views[rank]) and torch.allclose(strip.grad, right)"


def own_test_with(*lines):
    """The notebook's own test with some lines replaced."""
    return changed("01b", "exchange_test", *lines)


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
    Exercise(
        "1b.5",
        "exchange_test",
        checks.exchange_test,
        {
            SLIPPED + "2 of 7 broken ones: one that sends no gradient home; one that sends home": own_test_with(
                (" and torch.allclose(strip.grad, right)", "")
            ),
            SLIPPED + "all 7 broken ones: one that sends nothing": own_test_with(
                (BOTH, 'torch.allclose(padded, views[rank], atol=float("inf"))')
            ),
            "on rank 0, your test fails the right exchange": "return False",
            SLIPPED + "4 of 7 broken ones: one that swaps": own_test_with(
                ("torch.allclose(padded, views[rank]) and ", "")
            ),
            SLIPPED + "1 of 7 broken ones: one that repeats columns at the right border": own_test_with(
                (f"return {BOTH}", f"return rank > 0 or ({BOTH})")
            ),
            SLIPPED + "1 of 7 broken ones: one that gives every image": own_test_with(
                ("randn(2, 3, 5", "randn(1, 3, 5")
            ),
            SLIPPED + "1 of 7 broken ones: one that rounds the halo": own_test_with(
                ("views[rank])", "views[rank], atol=0.1)")
            ),
            SLIPPED + "1 of 7 broken ones: one that sends home the gradients of the wrong": own_test_with(
                ("randn_like", "ones_like")
            ),
            SLIPPED + "2 of 7 broken ones: one that gives every image": own_test_with(
                ("torch.randn(2", "torch.ones(2")
            ),
            "right on 4 ranks, but with 3 ranks: on rank 2, your test fails": own_test_with(
                ("8 * ranks, requires_grad", "32, requires_grad"),
                ("range(ranks)", "range(4)"),
                (".chunk(ranks, dim=-1)[rank].clone()", "[..., 8 * rank : 8 * rank + 8].clone()"),
                ("grad.chunk(ranks, dim=-1)[rank]", "grad[..., 8 * rank : 8 * rank + 8]"),
            ),
            "the test returned on rank": own_test_with(
                ("padded.backward", "if not torch.allclose(padded, views[rank]):\n    return False\npadded.backward")
            ),
            "on rank 0, the test returned NoneType": own_test_with((f"return {BOTH}", f"assert {BOTH}")),
        },
    ),
]
