"""Lab 4b."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import ddp_at_work as checks

changed = functools.partial(answers.changed, "04b")
THREE = "right on 2 ranks, but with 3 ranks: on rank 0, "
BUCKET = "smallest_bucket(total_bytes=1000000, backward_s={}, alpha_s=0.01, beta_s_per_byte=1e-06) gave {}"


EXERCISES = [
    Exercise(
        "4b.1",
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
        "4b.2",
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
    Exercise(
        "4b.3",
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
]
