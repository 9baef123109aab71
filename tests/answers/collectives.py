"""Lab 0."""

from answers import Exercise
from labkit_course.checks import collectives as checks

RING = """
parts = list(mine.clone().tensor_split(ranks))
for step in range({steps}):
    leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
    arrived = torch.empty_like(parts[comes])
    send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    parts[comes] = {put}
return torch.cat(parts)
"""
FIRST_PASS = """
parts = list(mine.clone().tensor_split(ranks))
for step in range({steps}):
    leaves, comes = (rank - step) % {size}, (rank - step - 1) % {size}
    arrived = torch.empty_like(parts[comes])
    send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    parts[comes] = {put}
return {result}
"""
ADDED, FINISHED = "parts[comes] + arrived", "parts[(rank + 1) % ranks]"
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
send = dist.P2POp(dist.isend, mine, {to} % ranks)
receive = dist.P2POp(dist.irecv, arrived, {source} % ranks)
for handle in dist.batch_isend_irecv([send, receive]):
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
        "ring_reduce_scatter",
        checks.ring_reduce_scatter,
        {
            "on rank 0, the result is part 0, added up over 1 of 4 ranks": FIRST_PASS.format(
                steps="ranks - 1", size="ranks", put=ADDED, result="parts[rank]"
            ),
            "on rank 0, the result is part 2, added up over 3 of 4 ranks": FIRST_PASS.format(
                steps="ranks - 2", size="ranks", put=ADDED, result="parts[comes]"
            ),
            "on rank 0, the result is not part 1 of the sum": FIRST_PASS.format(
                steps="ranks - 1", size="ranks", put="arrived", result=FINISHED
            ),
            "on rank 0, the result is a whole vector": FIRST_PASS.format(
                steps="ranks - 1", size="ranks", put=ADDED, result="torch.cat(parts)"
            ),
            "right on 4 ranks, but with 3 ranks: on rank ": FIRST_PASS.format(
                steps="3", size="4", put=ADDED, result="parts[(rank + 1) % 4]"
            ),
            "on rank 0, the numbers are right, but all_reduce was used": """
dist.all_reduce(mine)
return mine.tensor_split(ranks)[(rank + 1) % ranks]
""",
            "on rank 0, the numbers are right, but 108 bytes": RING.format(
                steps="2 * (ranks - 1)", put="parts[comes] + arrived if step < ranks - 1 else arrived"
            ).replace("torch.cat(parts)", FINISHED),
            "on rank 0, the result is right, but mine was changed in place": FIRST_PASS.format(
                steps="ranks - 1", size="ranks", put=ADDED, result=FINISHED
            )
            .replace("mine.clone()", "mine")
            .replace("parts[comes] = parts[comes] +", "parts[comes] +="),
            "on rank 0, the result is right, but in torch.float64": FIRST_PASS.format(
                steps="ranks - 1", size="ranks", put=ADDED, result=FINISHED + ".double()"
            ),
        },
    ),
    Exercise(
        "0.3",
        "ring_all_reduce",
        checks.ring_all_reduce,
        {
            "on rank 0, the result is right, but mine was changed in place": RING.format(
                steps="2 * (ranks - 1)", put="PUT"
            )
            .replace("mine.clone()", "mine")
            .replace("parts[comes] = PUT", "parts[comes].mul_(step < ranks - 1).add_(arrived)"),
            "a rank received more than its tensor holds": RING.format(
                steps="2 * (ranks - 1)", put="parts[comes] + arrived if step < ranks - 1 else arrived"
            ).replace("torch.empty_like(parts[comes])", "mine.new_empty(1)"),
            "on rank 0, only part 1 is the sum": RING.format(steps="ranks - 1", put="parts[comes] + arrived"),
            "on rank 0, part 0 is the sum with numbers added once more": RING.format(
                steps="2 * (ranks - 1)", put="parts[comes] + arrived"
            ),
            "on rank 0, of 8 numbers, part 0 begins": RING.format(steps="2 * (ranks - 1)", put="arrived"),
            "right on 4 ranks, but with 3 ranks: on rank ": RING.format(
                steps="6", put="parts[comes] + arrived if step < 3 else arrived"
            ).replace("% ranks", "% 4"),
            "on rank 0, the numbers are torch.float64": "total = mine.double()\ndist.all_reduce(total)\nreturn total",
            "on rank 0, the numbers are right, but all_reduce was used": "dist.all_reduce(mine)\nreturn mine",
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
        "0.4",
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
            "on rank 0, the model used the sum over different models": TRAIN.format(
                broadcast="pass", zero=ZERO, average="dist.all_reduce(parameter.grad)"
            ),
            "on rank 0, the model added up means of different models": TRAIN.format(
                broadcast="pass", zero="pass", average=MEAN
            ),
            "on rank 0, the model added up sums of different models": TRAIN.format(
                broadcast="pass", zero="pass", average="dist.all_reduce(parameter.grad)"
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
        "0.5",
        "step_seconds",
        checks.step_seconds,
        {
            "step_seconds(compute_s=6.0, gradient_bytes=0, ranks=4, latency_s=0.0, bytes_per_s=1e+06) gave 6.0": (
                "return compute_s + 2 * (ranks - 1) * (latency_s + gradient_bytes / ranks / bytes_per_s)"
            ),
            "step_seconds(compute_s=0.0, gradient_bytes=0, ranks=4, latency_s=0.1, bytes_per_s=1e+06) gave 0.1": (
                "return compute_s / ranks + latency_s + 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s"
            ),
            "step_seconds(compute_s=0.0, gradient_bytes=0, ranks=4, latency_s=0.1, bytes_per_s=1e+06) gave 0.3": (
                "return compute_s / ranks + (ranks - 1) * (latency_s + gradient_bytes / ranks / bytes_per_s)"
            ),
            "step_seconds(compute_s=0.0, gradient_bytes=1000000, ranks=4, latency_s=0.0, bytes_per_s=1e+06) gave 6.0": (
                "return compute_s / ranks + 2 * (ranks - 1) * (latency_s + gradient_bytes / bytes_per_s)"
            ),
        },
    ),
]
