"""Lab 0b."""

from answers import Exercise
from labkit_course.checks import collectives_at_work as checks

EXERCISES = [
    Exercise(
        "0b.1",
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
        "0b.2",
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
        "0b.3",
        "balancing_tokens",
        checks.balancing_tokens,
        {
            "balancing_tokens(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 100.0, half": """
return (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 6
""",
            "balancing_tokens(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 600.0, tokens": """
return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 2
""",
            "balancing_tokens(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 0.005, the": """
return 6 * bytes_per_s / flops_per_s / (2 * (ranks - 1) / ranks * gradient_bytes)
""",
            "balancing_tokens(flops_per_s=4e+14, bytes_per_s=5e+10, ranks=8, gradient_bytes=2) gave 2,666.66": """
return gradient_bytes / bytes_per_s * flops_per_s / 6
""",
        },
    ),
]
