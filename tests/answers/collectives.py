"""Lab 0."""

from answers import Exercise
from labkit.checks import collectives as checks

RING = """
parts = list(mine.clone().tensor_split(ranks))
for step in range({steps}):
    leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
    arrived = torch.empty_like(parts[comes])
    handles = [dist.isend(parts[leaves], (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
    for handle in handles:
        handle.wait()
    parts[comes] = {put}
return torch.cat(parts)
"""
TRAIN = """
for parameter in model.parameters():
    {broadcast}
for inputs, targets in batches:
    {zero}
    nn.functional.mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        {average}
        parameter.data -= learning_rate * parameter.grad
"""
FIRST, ZERO = "dist.broadcast(parameter.data, src=0)", "model.zero_grad()"
MEAN = "dist.all_reduce(parameter.grad); parameter.grad /= dist.get_world_size()"
SHIFT = """
arrived = torch.empty_like(mine)
handles = [dist.isend(mine, {to} % ranks), dist.irecv(arrived, {source} % ranks)]
for handle in handles:
    handle.wait()
return {result}
"""

EXERCISES = [
    Exercise(
        "0.1",
        "shift",
        checks.shift,
        {
            "on rank 0, the result is rank 1's vector": SHIFT.format(
                to="(rank - 1)", source="(rank + 1)", result="arrived"
            ),
            "on rank 0, the result is this rank's own vector": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="mine"
            ),
            "on rank 0, the function returned NoneType": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="None"
            ),
            "right on 4 ranks, but with 3 ranks: on rank ": SHIFT.format(
                to="(rank + 1) % 4", source="(rank - 1) % 4", result="arrived"
            ).replace("% ranks", ""),
            "on rank 0, the numbers are torch.float64": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="arrived.double()"
            ),
            "on rank 3, ValueError: send: there is no rank 4 among 4 ranks": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="arrived"
            ).replace("(rank + 1) % ranks", "rank + 1"),
            "rank 0 returned while 2 messages were under way": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="arrived"
            ).replace("handle.wait()", "pass"),
            "on rank 0, the numbers are right, but 800,000 bytes": SHIFT.format(
                to="(rank + 1)", source="(rank - 1)", result="arrived"
            ).replace(
                "return",
                "from threading import Thread\nhidden = Thread(target=dist.broadcast, args=(mine, 0))\n"
                "hidden.start(); hidden.join()\nreturn",
            ),
            "on rank 0, the numbers are right, but 1,600,000 bytes": """
everyone = [torch.empty_like(mine) for _ in range(ranks)]
for _ in range(4):
    dist.all_gather(everyone, mine)
return everyone[rank - 1]
""",
        },
    ),
    Exercise(
        "0.2",
        "after_reduce_scatter",
        checks.after_reduce_scatter,
        {
            "after_reduce_scatter([[1, 2], [10, 20]], rank=1) gave all sums": "return [sum(x) for x in zip(*held)]",
            "after_reduce_scatter([[1, 2], [10, 20]], rank=1) gave this rank's own": """
size = len(held[0]) // len(held)
return held[rank][rank * size : (rank + 1) * size]
""",
            "after_reduce_scatter([[1, 2], [10, 20]], rank=1) gave the first part": """
return [sum(x) for x in zip(*held)][: len(held[0]) // len(held)]
""",
            "after_reduce_scatter([[1, 2], [10, 20]], rank=1) gave sums of each": "return [sum(x) for x in held]",
        },
    ),
    Exercise(
        "0.3",
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
            "on rank 0, part 0 of 12 numbers begins": """
parts = list(mine.chunk(ranks))
sums = [torch.empty_like(part) for part in parts]
dist.reduce_scatter(sums[0], parts)
dist.all_gather(sums, parts[rank])
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
        "0.4",
        "ring_bytes",
        checks.ring_bytes,
        {
            "ring_bytes(handed_bytes=1000, ranks=2) gave 2,000": "return 2 * handed_bytes",
            "ring_bytes(handed_bytes=1000, ranks=2) gave 500": "return (ranks - 1) * handed_bytes / ranks",
            "ring_bytes(handed_bytes=1000, ranks=4) gave 1,000": "return handed_bytes",
            "ring_bytes(handed_bytes=1000, ranks=4) gave 3,000": "return (ranks - 1) * handed_bytes",
        },
    ),
    Exercise(
        "0.5",
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
        "0.6",
        "train",
        checks.train,
        {
            "on rank 0, the model trained alone": TRAIN.format(broadcast=FIRST, zero=ZERO, average="pass"),
            "on rank 0, the model used the sum of all gradients": TRAIN.format(
                broadcast=FIRST, zero=ZERO, average="dist.all_reduce(parameter.grad)"
            ),
            "on rank 0, the model averaged gradients of different models": TRAIN.format(
                broadcast="pass", zero=ZERO, average=MEAN
            ),
            "on rank 0, the model added the gradients of earlier steps": TRAIN.format(
                broadcast=FIRST, zero="pass", average=MEAN
            ),
            "right on 4 ranks, but with 3 ranks: on rank 0, the model ended with": TRAIN.format(
                broadcast=FIRST, zero=ZERO, average=MEAN.replace("dist.get_world_size()", "4")
            ),
            "on rank 0, the model has the weights that it began with": "for parameter in model.parameters():\n    "
            + FIRST,
        },
    ),
    Exercise(
        "0.7",
        "ring_all_reduce",
        checks.ring_all_reduce,
        {
            "on rank 0, only part 1 is the sum": RING.format(steps="ranks - 1", put="parts[comes] + arrived"),
            "on rank 0, part 0 is the sum with numbers added once more": RING.format(
                steps="2 * (ranks - 1)", put="parts[comes] + arrived"
            ),
            "on rank 0, part 0 of 8 numbers begins": RING.format(steps="2 * (ranks - 1)", put="arrived"),
            "right on 4 ranks, but with 3 ranks: on rank ": RING.format(
                steps="6", put="parts[comes] + arrived if step < 3 else arrived"
            ).replace("% ranks", "% 4"),
            "on rank 0, the numbers are torch.float64": "total = mine.double()\ndist.all_reduce(total)\nreturn total",
            "on rank 0, the sums are right, but all_reduce was used": "dist.all_reduce(mine)\nreturn mine",
            "on rank 0, the numbers are right, but 216 bytes": """
total = mine.clone()
for distance in range(1, ranks):
    arrived = torch.empty_like(mine)
    handles = [dist.isend(mine, (rank + distance) % ranks), dist.irecv(arrived, (rank - distance) % ranks)]
    for handle in handles:
        handle.wait()
    total += arrived
return total
""",
            "on rank 0, the result is this rank's own numbers": "return mine",
        },
    ),
    Exercise(
        "0.8",
        "tokens_that_pay",
        checks.tokens_that_pay,
        {
            "tokens_that_pay(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 100.0, half": """
return (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 6
""",
            "tokens_that_pay(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 600.0, tokens": """
return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 2
""",
            "tokens_that_pay(flops_per_s=6e+12, bytes_per_s=1e+10, ranks=2, gradient_bytes=2) gave 0.005, the": """
return 6 * bytes_per_s / flops_per_s / (2 * (ranks - 1) / ranks * gradient_bytes)
""",
            "tokens_that_pay(flops_per_s=4e+14, bytes_per_s=5e+10, ranks=8, gradient_bytes=2) gave 2,666.66": """
return gradient_bytes / bytes_per_s * flops_per_s / 6
""",
        },
    ),
]
