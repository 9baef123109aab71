"""Lab 4."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import ddp as checks

changed = functools.partial(answers.changed, "04")
PLAN = "bucket_plan"
FIRST = "on rank 0, "
FIRST_PASS = "on rank 0, in the first backward pass, "
THREE = "right on 2 ranks, but with 3 ranks: on rank 0, "
TIMES = "bucket_times"
TWO = "([[0, 1], [2]], [100, 200, 300], [2, 4, 8], alpha=3, beta=0.25)"


def averaged(mean, flat="flat"):
    """An accumulation without DDP's all-reduce, from what is sent of the flat gradients and what is made of the sum."""
    return f"""
with model.no_sync():
    for inputs, targets in batches:
        (nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()
flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
flat = {flat}
dist.all_reduce(flat)
nn.utils.vector_to_parameters({mean}, [parameter.grad for parameter in model.parameters()])
"""


EXERCISES = [
    Exercise(
        "4.1",
        "bucket_plan",
        checks.bucket_plan,
        {
            PLAN + "([4], bucket_bytes=10) gave [[4]]: each of 1 positions must be in one bucket": changed(
                "bucket_plan", ("append(position)", "append(size)")
            ),
            PLAN + "([4], bucket_bytes=10) gave [[], [0]]: a bucket is empty": changed(
                "bucket_plan", ("buckets, held = [], 0", "buckets, held = [[]], bucket_bytes")
            ),
            PLAN + "([4], bucket_bytes=10) gave []: each of 1 positions must be in one bucket": (
                "buckets, open_bucket, held = [], [], 0\n"
                "for position, size in enumerate(sizes):\n"
                "    open_bucket.append(position)\n"
                "    held += size\n"
                "    if held >= bucket_bytes:\n"
                "        buckets.append(open_bucket)\n"
                "        open_bucket, held = [], 0\n"
                "return buckets"
            ),
            PLAN + "([4, 4, 4, 4], bucket_bytes=8) gave [[0, 1], [2], [3]]": changed(
                "bucket_plan", ("        held = 0\n", "")
            ),
            PLAN + "([4, 4, 4, 4], bucket_bytes=8) gave [[0, 1, 2], [3]]": changed(
                "bucket_plan", ("held >= bucket_bytes", "held > bucket_bytes")
            ),
            PLAN + "([2, 5, 5], bucket_bytes=5) gave [[0], [1], [2]]": changed(
                "bucket_plan", ("held >= bucket_bytes", "held + size > bucket_bytes")
            ),
        },
    ),
    Exercise(
        "4.2",
        "average_buckets",
        checks.average_buckets,
        {
            FIRST + "the gradient of parameter 0 is the sum over the ranks": changed(
                "average_buckets", ("row /= dist.get_world_size()", "pass")
            ),
            FIRST + "the gradient of parameter 0 is this rank's own, divided": changed(
                "average_buckets",
                ("handle.wait()", "pass"),
                ("row /= dist.get_world_size()", "row = row / dist.get_world_size()"),
            ),
            f"{THREE}the gradient of parameter 0 is the sum, divided by 2": changed(
                "average_buckets", ("row /= dist.get_world_size()", "row /= 2")
            ),
            "Give each piece its own shape back: piece.view_as(parameter).": changed(
                "average_buckets", (".view_as(parameter)", "")
            ),
            FIRST + "the gradients are right, but the rank sends 3 broadcast calls with 692 bytes": changed(
                "average_buckets",
                ("row /= dist.get_world_size()", "row /= dist.get_world_size()\n    dist.broadcast(row, 0)"),
            ),
            FIRST + "the gradients are right, but 1 of 3 buckets were waited for": changed(
                "average_buckets",
                (
                    "for bucket, row, handle in in_flight:\n    handle.wait()",
                    "in_flight[-1][2].wait()\n__import__('time').sleep(0.3)\nfor bucket, row, handle in in_flight:",
                ),
            ),
        },
    ),
    Exercise(
        "4.3",
        "send_full_buckets",
        checks.send_full_buckets,
        {
            FIRST_PASS + "no all-reduce was asked for": "[*buckets]",
            FIRST_PASS + "each gradient had an all-reduce of its own": (
                "in_flight = []\n"
                "def arrived(parameter):\n"
                "    row = parameter.grad.flatten()\n"
                "    in_flight.append(([parameter], row, dist.all_reduce(row, async_op=True)))\n"
                "    if len(in_flight) == sum(map(len, buckets)):\n"
                "        finish(in_flight)\n"
                "        in_flight.clear()\n"
                "for bucket in buckets:\n"
                "    for parameter in bucket:\n"
                "        parameter.register_post_accumulate_grad_hook(arrived)"
            ),
            FIRST_PASS + "finish was never called": changed("send_full_buckets", ("finish(in_flight)", "pass")),
            FIRST_PASS + "all-reduces of 188 bytes were asked for": changed(
                "send_full_buckets",
                ("lambda _, index=index: arrived(index)", "lambda _: arrived(0)"),
            ),
            "A row was made of gradients that are not there yet": changed(
                "send_full_buckets",
                ("lambda _, index=index: arrived(index)", "lambda _: arrived(index)"),
            ),
            FIRST_PASS + "the first bucket left after the last gradient was there": changed(
                "send_full_buckets",
                (
                    "in_flight.append((buckets[index], row, dist.all_reduce(row, async_op=True)))",
                    "in_flight.append((buckets[index], row))",
                ),
                (
                    "finish(in_flight)",
                    "finish([(bucket, row, dist.all_reduce(row, async_op=True)) for bucket, row in in_flight])",
                ),
            ),
            FIRST_PASS + "the rank waited while 3 gradients were still to come": changed(
                "send_full_buckets",
                (
                    "dist.all_reduce(row, async_op=True)))",
                    "dist.all_reduce(row, async_op=True)))\n        in_flight[-1][2].wait()",
                ),
            ),
            "finish got NoneType as the handle of a bucket": changed("send_full_buckets", (", async_op=True", "")),
            "on rank 0, in the second backward pass, no all-reduce was asked for": changed(
                "send_full_buckets", ("missing[:] = [len(bucket) for bucket in buckets]", "pass")
            ),
            "on rank 0, in the second backward pass, finish got 6 buckets": changed(
                "send_full_buckets", ("in_flight.clear()", "pass")
            ),
            FIRST_PASS + "all is right, but the rank sends 3 broadcast calls with 692 bytes besides": changed(
                "send_full_buckets",
                (
                    "finish(in_flight)",
                    "finish(in_flight)\n        [dist.broadcast(row, 0) for _, row, _ in in_flight]",
                ),
            ),
        },
    ),
    Exercise(
        "4.4",
        "arrivals",
        checks.arrivals,
        {
            "arrivals([2.0], [3.0]) gave [3.0]": ("return [sum(takes[: place + 1]) for place in range(len(takes))]"),
            "arrivals([1.0, 8.0], [2.0, 2.0]) gave [3.0, 5.0]": changed(
                "arrivals", ("max(moment, arrived[-1]) if arrived", "arrived[-1] if arrived")
            ),
            "arrivals([1.0, 2.0, 3.0], [4.0, 4.0, 4.0]) gave [5.0, 6.0, 7.0]": changed(
                "arrivals", ("max(moment, arrived[-1]) if arrived else moment", "moment")
            ),
            "arrivals([9.0, 2.0, 4.0], [1.0, 1.0, 1.0]) gave [10.0, 3.0, 5.0]": (
                "arrived, free = [0.0] * len(ready), 0.0\n"
                "for place in sorted(range(len(ready)), key=ready.__getitem__):\n"
                "    arrived[place] = free = max(ready[place], free) + takes[place]\n"
                "return arrived"
            ),
        },
    ),
    Exercise(
        "4.5",
        "bucket_times",
        checks.bucket_times,
        {
            TIMES
            + "([[0]], [100], [2], alpha=3, beta=0.25): the buckets travel [25.0], without their latency": changed(
                "bucket_times", ("alpha + beta * sum", "beta * sum")
            ),
            TIMES + TWO + ": the buckets are full at [2.0, 8.0]": changed("bucket_times", ("bucket[-1]", "bucket[0]")),
            TIMES + TWO + ": the buckets travel [81.0, 78.0], with a latency for each gradient": changed(
                "bucket_times", ("alpha + beta * sum", "alpha * len(bucket) + beta * sum")
            ),
            TIMES + "([[0]], [100], [2], alpha=3, beta=0.25) gave [2], not two lists": changed(
                "bucket_times", ("return full, takes", "return full")
            ),
            TIMES + TWO + ": the buckets travel [28.0, 78.0], which is wrong": changed(
                "bucket_times", ("beta * sum(sizes[place] for place in bucket)", "beta * sizes[bucket[0]]")
            ),
        },
    ),
    Exercise(
        "4.6",
        "accumulate",
        checks.accumulate,
        {
            "on rank 0, every backward pass sent its gradients": (
                "for inputs, targets in batches:\n"
                "    (nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()"
            ),
            "on rank 0, nothing was sent": (
                "with model.no_sync():\n"
                "    for inputs, targets in batches:\n"
                "        (nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()"
            ),
            "on rank 0, the gradient of parameter 0 is 3 times too large": changed(
                "accumulate", (" / len(batches)", "")
            ),
            "on rank 0, the gradient of parameter 0 is that of the last micro-batch alone, divided": changed(
                "accumulate", ("    backward(inputs, targets)", "    pass")
            ),
            "on rank 0, 2 all-reduces were sent": changed(
                "accumulate",
                ("batches[:-1]:", "batches[:-2]:"),
                ("backward(*batches[-1])", "backward(*batches[-2])\nbackward(*batches[-1])"),
            ),
            f"{THREE}the gradient of parameter 0 is the sum, divided by 2": averaged("flat / 2"),
            f"{THREE}the gradient of parameter 0 is not one device's": changed("accumulate", ("len(batches)", "3")),
            "on rank 0, the gradients are right, but the rank sends 6 broadcast calls with 692 bytes besides": (
                changed(
                    "accumulate",
                    (
                        "backward(*batches[-1])",
                        "backward(*batches[-1])\n"
                        "for parameter in model.parameters():\n"
                        "    dist.broadcast(parameter.grad, src=0)",
                    ),
                )
            ),
            "on rank 0, the gradients are right, but the rank sends 1 all_reduce call with 1,384 bytes": averaged(
                "(flat / dist.get_world_size()).float()", "flat.double()"
            ),
        },
    ),
]
