"""Lab 0b."""

from answers import Exercise, changed
from labkit_course.checks import collectives_at_work as checks

FIRST = (
    "balancing_tokens(parameters=1e+06, flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2,"
    " latency_s=0.0002)"
)

EXERCISES = [
    Exercise(
        "0b.1",
        "means_by_host",
        checks.means_by_host,
        {
            "right on 4 ranks, but with 6 ranks: on rank 0, the second mean is": changed(
                "00b", "means_by_host", ("total / (ranks // per_host)", "total / per_host")
            ),
            "rank 0 makes a group of ranks [0, 1] while rank 2 makes [2, 3]": """
first, place = rank // per_host * per_host, rank % per_host
host = dist.new_group(list(range(first, first + per_host)))
across = dist.new_group(list(range(place, ranks, per_host)))
mean = mine.clone()
dist.all_reduce(mean, group=host)
mean /= per_host
total = mean.clone()
dist.all_reduce(total, group=across)
return mean, total / (ranks // per_host)
""",
            "on rank 0, the host's mean is the sum over the host": changed(
                "00b", "means_by_host", ("mean /= per_host\n", "")
            ),
            "on rank 0, the host's mean is the mean over all ranks": changed(
                "00b",
                "means_by_host",
                ("total = mean.clone()", "total = mean"),
                ("return mean, total / (ranks // per_host)", "total /= ranks // per_host\nreturn mean, total"),
            ),
            "on rank 0, the host's mean is the mean of ranks [0, 2]": changed(
                "00b",
                "means_by_host",
                ("group=hosts[rank // per_host]", "group=across[rank % per_host]"),
                ("group=across[rank % per_host])\nreturn", "group=hosts[rank // per_host])\nreturn"),
            ),
            "on rank 0, the means are right, but a group of all ranks was used": """
hosts = [dist.new_group(list(range(first, first + per_host))) for first in range(0, ranks, per_host)]
mean, total = mine.clone(), mine.clone()
dist.all_reduce(mean, group=hosts[rank // per_host])
dist.all_reduce(total)
return mean / per_host, total / ranks
""",
            "on rank 0, the function returned a tensor": "return mine",
        },
    ),
    Exercise(
        "0b.2",
        "all_reduce_in_two",
        checks.all_reduce_in_two,
        {
            "on rank 0, the sums are right, made by all_reduce": "dist.all_reduce(mine)\nreturn mine",
            "on rank 0, the shape is (3,)": """
part = torch.empty_like(mine[: len(mine) // ranks])
dist.reduce_scatter(part, list(mine.chunk(ranks)))
return part
""",
            "right on 4 ranks, but with 3 ranks: on rank ": """
parts = list(mine.chunk(4))
part, sums = torch.empty_like(parts[0]), [torch.empty_like(parts[0]) for each in parts]
dist.reduce_scatter(part, parts)
dist.all_gather(sums, part)
return torch.cat(sums)
""",
            "on rank 0, the sums are right, made by all_gather, broadcast, reduce_scatter": """
parts = list(mine.chunk(ranks))
part, sums = torch.empty_like(parts[0]), [torch.empty_like(parts[0]) for each in parts]
dist.reduce_scatter(part, parts)
dist.all_gather(sums, part)
total = torch.cat(sums)
dist.broadcast(total, 0)
return total
""",
            "on rank 0, of 12 numbers, part 0 begins": """
parts = list(mine.chunk(ranks))
sums = [torch.empty_like(part) for part in parts]
dist.reduce_scatter(sums[0], parts)
dist.all_gather(sums, parts[rank])
return torch.cat(sums)
""",
            "on rank 0, all 4 parts of the result are equal": """
parts = list(mine.chunk(ranks))
part = torch.empty_like(parts[0])
sums = [torch.empty_like(part)] * ranks
dist.reduce_scatter(part, parts)
dist.all_gather(sums, part)
return torch.cat(sums)
""",
            "on rank 0, the result is the mean": """
parts = list(mine.chunk(ranks))
part, sums = torch.empty_like(parts[0]), [torch.empty_like(part) for part in parts]
dist.reduce_scatter(part, parts)
dist.all_gather(sums, part)
return torch.cat(sums) / ranks
""",
        },
    ),
    Exercise(
        "0b.3",
        "time_once",
        checks.time_once,
        {
            "time_once of a collective of 0.31 s gave 0.01 s, the call alone, without the work of the device": changed(
                "00b", "time_once", ("collective()\nsynchronize()", "collective()")
            ),
            "time_once of a collective of 0.31 s gave 2.31 s, with the wait for a late rank": changed(
                "00b", "time_once", ("barrier()\nstart = now()", "start = now()\nbarrier()")
            ),
            "time_once of a collective of 0.31 s gave 1.01 s, with earlier work of the device": changed(
                "00b", "time_once", ("synchronize()\nbarrier()", "barrier()")
            ),
            "time_once of a collective of 0.31 s gave 2.01 s, the wait for a late rank, without the work": changed(
                "00b", "time_once", ("synchronize()\nbarrier()\n", ""), ("collective()\nsynchronize()", "collective()")
            ),
            "time_once of a collective of 0.31 s gave 3.01 s, with the wait for a late rank and earlier work": changed(
                "00b", "time_once", ("synchronize()\nbarrier()\nstart = now()", "start = now()\nbarrier()")
            ),
            "time_once of a collective of 0.31 s called it 2 times": changed(
                "00b", "time_once", ("synchronize()\nbarrier()", "collective()\nsynchronize()\nbarrier()")
            ),
        },
    ),
    Exercise(
        "0b.4",
        "fitted",
        checks.fitted,
        {
            "fitted of a network with known alpha and beta gave beta first, then alpha": """
fastest = {size: min(times) for size, times in rounds.items()}
small, large = min(fastest), max(fastest)
beta = (fastest[large] - fastest[small]) / (large - small)
return beta, fastest[small] - beta * small
""",
            "fitted of a network with known alpha and beta gave the numbers of disturbed rounds": """
mean = {size: sum(times) / len(times) for size, times in rounds.items()}
small, large = min(mean), max(mean)
beta = (mean[large] - mean[small]) / (large - small)
return mean[small] - beta * small, beta
""",
            "fitted of a network with known alpha and beta gave a beta that has a latency inside": """
small, large = min(rounds), max(rounds)
beta = min(rounds[large]) / large
return min(rounds[small]) - beta * small, beta
""",
            "fitted of a network with known alpha and beta gave an alpha that has the small message's bytes": """
small, large = min(rounds), max(rounds)
return min(rounds[small]), (min(rounds[large]) - min(rounds[small])) / (large - small)
""",
        },
    ),
    Exercise(
        "0b.5",
        "balancing_tokens",
        checks.balancing_tokens,
        {
            f"{FIRST} gave 200.0, the tokens of bytes alone, without latency": """
return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 6
""",
            f"{FIRST} gave 400.0, with the latency of one step": """
bytes_s = 2 * (ranks - 1) / ranks * gradient_bytes * parameters / bytes_per_s
return (latency_s + bytes_s) * flops_per_s / 6 / parameters
""",
            f"{FIRST} gave 300": """
step_s = latency_s + gradient_bytes * parameters / ranks / bytes_per_s
return (ranks - 1) * step_s * flops_per_s / 6 / parameters
""",
            f"{FIRST} gave 1,800": """
step_s = latency_s + gradient_bytes * parameters / ranks / bytes_per_s
return 2 * (ranks - 1) * step_s * flops_per_s / 2 / parameters
""",
            "balancing_tokens(parameters=7e+09, flops_per_s=4e+14, bytes_per_s=5e+10, ranks=8, gradient_bytes=2, ": """
steps_s = 2 * (ranks - 1) * latency_s + gradient_bytes * parameters / bytes_per_s
return steps_s * flops_per_s / 6 / parameters
""",
        },
    ),
]
