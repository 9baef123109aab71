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
ARRIVALS = "arrivals"
ALONE = "([[0], [1], [2]], [4, 8, 4], [1, 2, 3], alpha=3, beta=0.25): the buckets arrive at [5.0, 7.0, 7.0], as if each"
TWO = "([[0, 1], [2]], [100, 200, 300], [2, 4, 8], alpha=3, beta=0.25)"


def averaged(mean, flat="flat"):
    """An accumulation without DDP's all-reduce, from what is sent of the flat gradients and what is made of the sum."""
    return f"""
samples = sum(len(inputs) for inputs, _ in batches)
with model.no_sync():
    for inputs, targets in batches:
        (nn.functional.mse_loss(model(inputs), targets) * len(inputs) / samples).backward()
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
        "4.3",
        "put_into_row",
        checks.put_into_row,
        {
            "on rank 0, in the second step, the gradient of parameter 0 is this rank's own": changed(
                "put_into_row", ("parameter.grad = view", "pass")
            ),
            "on rank 0, in the second step, the gradient of parameter 0 is that of the first step": changed(
                "put_into_row", ("view.copy_(parameter.grad)", "pass")
            ),
            "on rank 0, in the first step, the gradient of parameter 0 is twice the mean": changed(
                "put_into_row", ("view.copy_(parameter.grad)", "view += parameter.grad")
            ),
            "on rank 0, in the first step, the gradient of parameter 0 is 0 everywhere": changed(
                "put_into_row", ("view.copy_(parameter.grad)", "view.zero_()")
            ),
            f"{THREE}in the first step, the gradient of parameter 0 is the sum, divided by 2": changed(
                "put_into_row",
                ("view.copy_(parameter.grad)", "view.copy_(parameter.grad * dist.get_world_size() / 2)"),
            ),
            "on rank 0, in the first step, the gradients are right, but the rank sends 6 broadcast calls": changed(
                "put_into_row", ("parameter.grad = view", "parameter.grad = view\n    dist.broadcast(view.clone(), 0)")
            ),
        },
    ),
    Exercise(
        "4.4",
        "arrivals",
        checks.arrivals,
        {
            ARRIVALS + "([[0]], [100], [2], alpha=3, beta=0.25): the buckets arrive at [27.0], without": changed(
                "arrivals", ("alpha + beta", "beta")
            ),
            ARRIVALS + TWO + ": the buckets arrive at [85.0, 163.0], with a latency for each gradient": changed(
                "arrivals", ("alpha + beta", "len(bucket) * alpha + beta")
            ),
            ARRIVALS + TWO + ": the buckets arrive at [80.0, 158.0], as if full with their first": changed(
                "arrivals", ("max(ready[place] for place in bucket)", "ready[bucket[0]]")
            ),
            ARRIVALS
            + "([[0, 1], [2, 3]], [4, 4, 4, 4], [6, 2, 40, 3], alpha=1, beta=0.25): the buckets arrive at": changed(
                "arrivals", ("max(ready[place] for place in bucket)", "ready[bucket[-1]]")
            ),
            ARRIVALS + "([[0], [1]], [4, 4], [1, 8], alpha=1, beta=0.25): the buckets arrive at [3.0, 5.0]": changed(
                "arrivals", ("start = max(full, end)", "start = end or full")
            ),
            ARRIVALS + ALONE: changed("arrivals", ("start = max(full, end)", "start = full")),
        },
    ),
    Exercise(
        "4.5",
        "diagnose",
        checks.diagnose,
        {
            "A: bucket 0 is called late": changed("diagnose", ("(1, 4)", "(0, 4)")),
            "A: with 24 MiB the pass ends after 178 ms": changed("diagnose", ("(1, 4)", "(1, 24)")),
            "B: bucket 15 is called late": changed("diagnose", ("(None, 1)", "(15, 1)")),
            "B: with 0.25 MiB the pass ends after 234 ms": changed("diagnose", ("(None, 1)", "(None, 0.25)")),
            "B: no size is named, but one ends": changed("diagnose", ("(None, 1)", "(None, None)")),
            "C: bucket 3 is called late": changed("diagnose", ("(0, None)", "(3, None)")),
            "C: with 16 MiB the pass ends after 241 ms, 244 as drawn": changed("diagnose", ("(0, None)", "(0, 16)")),
            "diagnose() gave {'A': (1, 4), 'B': (None, 1), 'C': None}": changed("diagnose", ("(0, None)", "None")),
            "diagnose() gave {'A': (1, 0)": changed("diagnose", ("(1, 4)", "(1, 0)")),
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
            "on rank 0, the gradient of parameter 0 is as if all micro-batches were of one size": changed(
                "accumulate", ("len(inputs) / samples", "1 / len(batches)")
            ),
            "on rank 0, the gradient of parameter 0 is the sum over 3 micro-batches, not their mean": changed(
                "accumulate", ("len(inputs) / samples * ", "")
            ),
            "on rank 0, the gradient of parameter 0 is that of the last micro-batch alone, weighted": changed(
                "accumulate", ("    backward(inputs, targets)", "    pass")
            ),
            "on rank 0, 2 all-reduces were sent": changed(
                "accumulate",
                ("batches[:-1]:", "batches[:-2]:"),
                ("backward(*batches[-1])", "backward(*batches[-2])\nbackward(*batches[-1])"),
            ),
            f"{THREE}the gradient of parameter 0 is the sum, divided by 2": averaged("flat / 2"),
            f"{THREE}the gradient of parameter 0 is not one device's": changed("accumulate", ("/ samples", "/ 6")),
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
