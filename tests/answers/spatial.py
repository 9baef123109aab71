"""Lab 1."""

from answers import Exercise, changed
from labkit_course.checks import spatial as checks

TRADE = """
to_left, to_right = {left}.contiguous(), {right}.contiguous()
from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
messages = []
if rank > 0:
    messages += [dist.P2POp(dist.isend, to_left, rank - 1), dist.P2POp(dist.irecv, from_left, rank - 1)]
if rank < ranks - 1:
    messages += [dist.P2POp(dist.isend, to_right, rank + 1), dist.P2POp(dist.irecv, from_right, rank + 1)]
for handle in dist.batch_isend_irecv(messages):
    handle.wait()
"""
OUT = TRADE.format(left="strip[..., :halo]", right="strip[..., -halo:]")
HOME = TRADE.format(left="grad[..., :halo]", right="grad[..., -halo:]") + "own = grad[..., halo:-halo].clone()\n"
PADDED = "return torch.cat([from_left, strip, from_right], dim=-1)"
ADDED = "own[..., :halo] += from_left\nown[..., -halo:] += from_right\nreturn own"
LAST_IS_3 = ("torch.zeros_like(to_right)", "0 * to_right if rank == 3 else to_right.clone()")
"""Which is right on four ranks alone."""
TO_ALL = """
import threading
def tell_all():
    everyone = [torch.empty(2, 3, 5, 16) for _ in range(ranks)]
    dist.all_gather(everyone, torch.zeros(2, 3, 5, 16))
thread = threading.Thread(target=tell_all)
thread.start()
thread.join()
"""
"""Sends what nobody needs, where only the process group sees it."""
EXERCISES = [
    Exercise(
        "1.1",
        "extra_columns",
        checks.extra_columns,
        {
            "extra_columns(depths=[1], kernel=7) gave 3": "return sum(depths) * (kernel // 2)",
            "extra_columns(depths=[1, 1], kernel=7) gave 24": "return 4 * sum(depths) * (kernel // 2)",
            "extra_columns(depths=[1], kernel=7) gave 24": (
                "return sum(blocks * (kernel - 1) * 4 * 2**stage for stage, blocks in enumerate(depths))"
            ),
            "extra_columns(depths=[2], kernel=7) gave 12": (
                "return sum(kernel // 2 * 4 * 2**stage for stage, _ in enumerate(depths))"
            ),
            "extra_columns(depths=[1, 2], kernel=5) gave 60": (
                "return sum(blocks * 3 * 4 * 2**stage for stage, blocks in enumerate(depths))"
            ),
            "extra_columns(depths=[1, 1], kernel=7) gave 60": (
                "return sum(blocks * (kernel // 2) * 4 ** (stage + 1) for stage, blocks in enumerate(depths))"
            ),
        },
    ),
    Exercise(
        "1.2",
        "exchange_halo",
        checks.halo_exchange,
        {
            "on rank 0, the last 3 columns are all zero": "return torch.nn.functional.pad(strip, (halo, halo))",
            "on rank 0, the first 3 columns are rank 1's first 3": OUT
            + "return torch.cat([from_right, strip, from_left], dim=-1)",
            "on rank 0, the last 3 columns are rank 1's columns from 3 on": OUT.replace(
                "strip[..., :halo]", "strip[..., halo : 2 * halo]"
            )
            + PADDED,
            "rank 0 returned while 2 messages were under way": OUT.replace("handle.wait()", "pass") + PADDED,
            "right on 4 ranks, but with 3 ranks: on rank 2, ValueError: send: there is no rank 3": OUT.replace(
                "rank < ranks - 1", "rank < 3"
            )
            + PADDED,
            "on rank 0, the shape is (2, 3, 5, 11)": OUT + "return torch.cat([strip, from_right], dim=-1)",
            "right on 4 ranks, but with 3 ranks: on rank 2, the last 3 columns are rank 2's": OUT.replace(*LAST_IS_3)
            + PADDED,
            "on rank 0, the numbers are right, but the rank sends 1 all_gather call with 1,920 bytes and 1 send": TO_ALL
            + OUT
            + PADDED,
            "on rank 0, the numbers are torch.float64": OUT + f"{PADDED}.double()",
        },
    ),
    Exercise(
        "1.3",
        "return_gradients",
        checks.halo_gradient,
        {
            "on rank 0, the last 3 columns are this rank's own gradient alone": "return grad[..., halo:-halo]",
            "on rank 0, the last 3 columns are what rank 1 sent, alone: assigned, not added": HOME
            + "if rank > 0:\n    own[..., :halo] = from_left\nif rank < ranks - 1:\n    own[..., -halo:] = from_right\n"
            + "return own",
            "on rank 0, the first 3 columns are this rank's own gradient plus that of the wrong neighbour": HOME
            + "own[..., :halo] += from_right\nown[..., -halo:] += from_left\nreturn own",
            "on rank 0, the shape is (2, 3, 5, 14)": HOME + "return grad",
            "right on 4 ranks, but with 3 ranks: on rank 2, the last 3 columns are with the halo's": HOME.replace(
                *LAST_IS_3
            )
            + ADDED,
            "on rank 0, the numbers are right, but the rank sends 1 all_gather call with 1,920 bytes and 1 send": TO_ALL
            + HOME
            + ADDED,
            "on rank 0, the numbers are torch.float64": HOME + f"{ADDED}.double()",
            "on rank 0, the result is right, but the gradient that was given is changed": (HOME + ADDED).replace(
                "halo:-halo].clone()", "halo:-halo]"
            ),
        },
    ),
    Exercise(
        "1.4",
        "reduce_gradients",
        checks.reduce_gradients,
        {
            "on rank 0, the gradients of cut are this rank's own part, not reduced": """
for gradient in cut:
    dist.all_reduce(gradient.clone())
""",
            "on rank 0, the gradients of cut are divided by the number of ranks": """
for gradient in cut:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
""",
            "on rank 0, the gradients of head are multiplied by the number of ranks": """
for gradient in cut + head:
    dist.all_reduce(gradient)
""",
            "on rank 0, the gradients of head are divided by the number of ranks": """
for gradient in cut:
    dist.all_reduce(gradient)
for gradient in head:
    gradient /= dist.get_world_size()
""",
            "right on 4 ranks, but with 3 ranks: on rank 0, the gradients of cut are wrong": """
flat = torch.cat([gradient.flatten() for gradient in cut])
dist.all_reduce(flat)
flat *= dist.get_world_size() / 4
for gradient, part in zip(cut, flat.split([gradient.numel() for gradient in cut])):
    gradient.copy_(part.view_as(gradient))
""",
            "on rank 0, the numbers are right, but the rank sends 2 all_reduce calls": """
for gradient in cut:
    dist.all_reduce(gradient)
""",
            "on rank 0, the numbers are right, but the rank sends 4 all_reduce calls": """
for gradient in cut + head:
    dist.all_reduce(gradient)
for gradient in head:
    gradient /= dist.get_world_size()
""",
        },
    ),
    Exercise(
        "1.5",
        "strips_seconds",
        checks.strips_seconds,
        {
            "strips_seconds(compute_s=6.0, ranks=4, blocks=0, halo_bytes=0, gradient_bytes=0, latency_s=0.0, "
            "bytes_per_s=1e+06) gave 6.0": changed("01", "strips_seconds", ("compute_s / ranks", "compute_s")),
            "strips_seconds(compute_s=0.0, ranks=4, blocks=2, halo_bytes=500000, gradient_bytes=0, latency_s=0.0, "
            "bytes_per_s=1e+06) gave 2.0": changed("01", "strips_seconds", ("2 * 2 * blocks", "2 * blocks")),
            "strips_seconds(compute_s=0.0, ranks=4, blocks=0, halo_bytes=0, gradient_bytes=1000000, latency_s=0.0, "
            "bytes_per_s=1e+06) gave 6.0": changed(
                "01", "strips_seconds", ("gradient_bytes / ranks", "gradient_bytes")
            ),
            "strips_seconds(compute_s=0.0, ranks=4, blocks=2, halo_bytes=0, gradient_bytes=0, latency_s=0.1, "
            "bytes_per_s=1e+06) gave 1.4": changed("01", "strips_seconds", ("halos + 2 * ring", "halos + ring")),
            "strips_seconds(compute_s=0.0, ranks=4, blocks=2, halo_bytes=0, gradient_bytes=0, latency_s=0.1, "
            "bytes_per_s=1e+06) gave 0.1": changed(
                "01", "strips_seconds", ("(halos + 2 * ring) * latency_s", "latency_s")
            ),
        },
    ),
]
