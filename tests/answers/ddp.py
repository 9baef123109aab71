"""Lab 4."""

import functools

import answers
from answers import Exercise
from labkit.checks import ddp as checks

changed = functools.partial(answers.changed, "04")
FIT = "fitted of a network with known alpha and beta gave "
FIRST_PASS = "on rank 0, in backward pass 0, "
THREE = "right on 2 ranks, but with 3 ranks: on rank 0, "
HALF_MIB = "bucket_plan([524288], bucket_mb=25, first_mb=1) gave "
BUCKET = "smallest_bucket(total_bytes=1000000, backward_s={}, alpha_s=0.01, beta_s_per_byte=1e-06) gave {}"
HALVES = "bucket_plan([524288, 524288, 524288, 524288], bucket_mb=0.5, first_mb=1) gave "


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
        "fitted",
        checks.fitted,
        {
            FIT + "(1e-09, 0.0001), beta first": changed(
                "fitted",
                (
                    "return alpha, (typical[few] - few * alpha) / total_bytes",
                    "return (typical[few] - few * alpha) / total_bytes, alpha",
                ),
            ),
            FIT + "(9e-05, 9e-10), the numbers of the fastest round": changed(
                "fitted", ("statistics.median(times)", "min(times)")
            ),
            FIT + "(0.000153, 1.53e-09), the numbers of the mean round": changed(
                "fitted", ("statistics.median(times)", "statistics.mean(times)")
            ),
            FIT + "(0.000105, 9.95e-10), an alpha that has bytes inside": changed(
                "fitted", ("(typical[many] - typical[few]) / (many - few)", "typical[many] / many")
            ),
            FIT + "(0.0001, 1.1e-09), a beta that has latency inside": changed(
                "fitted", ("(typical[few] - few * alpha)", "typical[few]")
            ),
            FIT + "(0.0001, 2.1e-08), the right alpha and another beta": changed(
                "fitted", ("(typical[few] - few * alpha)", "typical[many]")
            ),
        },
    ),
    Exercise(
        "4.2",
        "bucket_plan",
        checks.bucket_plan,
        {
            HALF_MIB + "[[524288]]: each of 1 positions must be in one bucket": changed(
                "bucket_plan", ("append(position)", "append(size)")
            ),
            HALF_MIB + "[[], [0]]: a bucket is empty": changed(
                "bucket_plan", ("buckets, held, limit = [], 0", "buckets, held, limit = [[]], 2**30")
            ),
            "bucket_plan([524288, 1048576, 1048576], bucket_mb=25, first_mb=1) gave [[0, 1, 2]]": changed(
                "bucket_plan", ("(bucket_mb if buckets else first_mb) * 2**20", "bucket_mb * 2**20")
            ),
            "bucket_plan([2097152, 3145728, 2097152, 3145728], bucket_mb=5, first_mb=5) gave [[0, 1, 2], [3]]": changed(
                "bucket_plan", ("held >= limit", "held > limit")
            ),
            "bucket_plan([1000000, 100000, 1000000, 100000], bucket_mb=1, first_mb=1) gave [[0], [1, 2], [3]]": changed(
                "bucket_plan",
                ("(bucket_mb if buckets else first_mb) * 2**20", "(bucket_mb if buckets else first_mb) * 10**6"),
            ),
            HALVES + "[[0], [1], [2], [3]]": changed(
                "bucket_plan",
                ("(bucket_mb if buckets else first_mb) * 2**20", "min(bucket_mb, first_mb) * 2**20"),
            ),
        },
    ),
    Exercise(
        "4.3",
        "bounded_buckets",
        checks.bounded_buckets,
        {
            "bounded_buckets([4, 4, 4], limit=10) gave [[0, 1, 2]]: bucket [0, 1, 2] holds 12 bytes": changed(
                "bounded_buckets", ("held + size > limit", "held > limit")
            ),
            "bounded_buckets([4, 4, 4], limit=10) gave 3 buckets": (
                "return [[position] for position in range(len(sizes))]"
            ),
            "bounded_buckets([5, 5, 5, 5], limit=10) gave 4 buckets": changed(
                "bounded_buckets", ("held + size > limit", "held + size >= limit")
            ),
            "bounded_buckets([4, 4, 4], limit=10) gave [[2], [0, 1]]: the order changed": changed(
                "bounded_buckets", ("return buckets", "return buckets[::-1]")
            ),
            "bounded_buckets([], limit=10) gave [[]]: a bucket is empty": changed(
                "bounded_buckets", ("return buckets", "return buckets or [[]]")
            ),
        },
    ),
    Exercise(
        "4.4",
        "small_ddp",
        checks.small_ddp,
        {
            FIRST_PASS + "no all-reduce was asked for": "list(model.parameters())",
            FIRST_PASS + "each gradient had an all-reduce of its own": (
                "def average(parameter):\n"
                "    dist.all_reduce(parameter.grad)\n"
                "    parameter.grad /= dist.get_world_size()\n"
                "for parameter in model.parameters():\n"
                "    parameter.register_post_accumulate_grad_hook(average)"
            ),
            FIRST_PASS + "one all-reduce carried all gradients": changed(
                "small_ddp", ("], bucket_bytes)", "], 2**40)")
            ),
            FIRST_PASS + "all-reduces of 188, 288, 216 bytes were asked for": changed(
                "small_ddp", ("list(model.parameters())[::-1]", "list(model.parameters())")
            ),
            FIRST_PASS + "the gradient of parameter 0 is the sum over the ranks": changed(
                "small_ddp", ("row /= dist.get_world_size()", "pass")
            ),
            FIRST_PASS + "the gradient of parameter 0 is this rank's own, divided": changed(
                "small_ddp",
                ("handle.wait()", "pass"),
                ("row /= dist.get_world_size()", "row = row / dist.get_world_size()"),
            ),
            FIRST_PASS + "the rank waited while 3 gradients were still to come": changed(
                "small_ddp",
                (
                    "on_their_way.append((buckets[index], row, dist.all_reduce(row, async_op=True)))",
                    "on_their_way.append((buckets[index], row, torch.futures.Future()))\n        dist.all_reduce(row)",
                ),
                ("handle.wait()", "pass"),
            ),
            FIRST_PASS + "the first bucket left after the last gradient was there": changed(
                "small_ddp",
                (
                    "on_their_way.append((buckets[index], row, dist.all_reduce(row, async_op=True)))",
                    "on_their_way.append((buckets[index], row, None))",
                ),
                ("handle.wait()", "dist.all_reduce(row)"),
            ),
            "on rank 0, in backward pass 1, no all-reduce was asked for": changed(
                "small_ddp", ("missing[:] = [len(bucket) for bucket in buckets]", "pass")
            ),
            "on rank 0, in backward pass 1, the rank waited 6 times, before 3": changed(
                "small_ddp", ("on_their_way.clear()", "pass")
            ),
            f"{THREE}in backward pass 0, the gradient of parameter 0 is the sum, divided by 2": changed(
                "small_ddp", ("row /= dist.get_world_size()", "row /= 2")
            ),
            FIRST_PASS + "all is right, but the rank sends 3 broadcast calls with 692 bytes besides": (
                changed(
                    "small_ddp",
                    ("row /= dist.get_world_size()", "row /= dist.get_world_size()\n        dist.broadcast(row, 0)"),
                )
            ),
            FIRST_PASS + "all-reduces of 376, 504, 504 bytes were asked for": changed(
                "small_ddp",
                ("for parameter in buckets[index]])", "for parameter in buckets[index]]).double()"),
                ("row /= dist.get_world_size()", "row = row.float() / dist.get_world_size()"),
            ),
        },
    ),
    Exercise(
        "4.5",
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
            f"{THREE}the gradient of parameter 0 is another": changed("accumulate", ("len(batches)", "3")),
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
    Exercise(
        "4.7",
        "handed_bytes",
        checks.handed_bytes,
        {
            "handed_bytes(parameters=1000, micro_batches=1, no_sync=False, bf16=False) gave 1,000": changed(
                "handed_bytes", ("(2 if bf16 else 4) * ", "")
            ),
            "handed_bytes(parameters=1000, micro_batches=1, no_sync=False, bf16=True) gave 4,000": changed(
                "handed_bytes", ("(2 if bf16 else 4)", "4")
            ),
            "handed_bytes(parameters=1000, micro_batches=4, no_sync=False, bf16=False) gave 4,000": changed(
                "handed_bytes", (" * (1 if no_sync else micro_batches)", "")
            ),
            "handed_bytes(parameters=1000, micro_batches=4, no_sync=True, bf16=False) gave 16,000": changed(
                "handed_bytes", ("(1 if no_sync else micro_batches)", "micro_batches")
            ),
        },
    ),
    Exercise(
        "4.8",
        "half_hook",
        checks.half_hook,
        {
            "on rank 0, the gradient of parameter 0 is the sum over the ranks": changed(
                "half_hook", (" / dist.get_world_size()", "")
            ),
            "on rank 0, the gradients are right, but the rank sends 1 all_reduce call with 692 bytes": changed(
                "half_hook", (".to(torch.bfloat16) /", " /")
            ),
            "on rank 0, the gradient of parameter 0 is this rank's own": changed(
                "half_hook", ("future.value()[0].to(torch.float32)", "bucket.buffer()")
            ),
            "return a future of a tensor": "dist.all_reduce(bucket.buffer())\nreturn bucket.buffer()",
            f"{THREE}the gradient of parameter 0 is the sum, divided by 2": changed(
                "half_hook", ("/ dist.get_world_size()", "/ 2")
            ),
            "on rank 0, the gradients are right, but the rank sends 1 broadcast call with 346 bytes besides": changed(
                "half_hook", ("handle =", "dist.broadcast(half.clone(), src=0)\nhandle =")
            ),
            "on rank 0, the gradients are right, but the rank sends float16": changed(
                "half_hook", ("torch.bfloat16", "torch.float16")
            ),
            "on rank 0, the gradients are right, but the future holds torch.bfloat16": changed(
                "half_hook", (".to(torch.float32)", "")
            ),
        },
    ),
    Exercise(
        "4.9",
        "early_uses",
        checks.early_uses,
        {
            "for the program [1 extern a x; 2 collective a; 3 other a] early_uses gave []": "return []",
            "for the program [1 collective a b; 2 wait b; 3 kernel b y; 4 kernel a y; 5 other] early_uses gave []": (
                changed("early_uses", ("-= set(line.buffers)", "= set()"))
            ),
            "for the program [1 collective a; 2 collective a; 3 wait a; 4 other a] early_uses gave []": changed(
                "early_uses", ("elif in_flight &", 'elif line.kind != "collective" and in_flight &')
            ),
            "for the program [1 collective a b; 2 kernel a b; 3 wait a; 4 wait b; 5 other] early_uses gave [2, 2]": (
                changed(
                    "early_uses",
                    ("elif in_flight & set(line.buffers):", "else:"),
                    ("found.append(line.number)", "found += [line.number] * len(in_flight & set(line.buffers))"),
                )
            ),
        },
    ),
    Exercise(
        "4.10",
        "smallest_bucket",
        checks.smallest_bucket,
        {
            BUCKET.format(2.0, "5,000"): changed(
                "smallest_bucket", ("backward_s - total_bytes * beta_s_per_byte", "backward_s")
            ),
            BUCKET.format(2.0, "100.0"): changed("smallest_bucket", ("total_bytes * alpha_s / room", "room / alpha_s")),
            BUCKET.format(0.5, "-20,000"): (changed("smallest_bucket", (' if room > 0 else float("inf")', ""))),
        },
    ),
]
