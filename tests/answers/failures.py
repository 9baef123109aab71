"""Lab 7."""

from answers import Exercise
from labkit_course.checks import failures as checks

LIMIT = """
limit = torch.tensor(batches)
dist.all_reduce(limit, op=dist.ReduceOp.{op})
return {result}
"""
CALLS = """
for place in range({places}(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    others = [rank for rank, call in enumerate(calls) if {differs}]
    if others:
        return place, others
return None
"""
RECORDED = """
def call(tensor, *args, **kwargs):
    entry = {{"call": collective.__name__, "shape": tuple(tensor.shape), "done": {done}}}
    {before}
    result = {calls}
    {after}
    return {result}
return call
"""
GOOD = {
    "done": "False",
    "before": "log.append(entry)",
    "calls": "collective(tensor, *args, **kwargs)",
    "after": 'entry["done"] = True',
    "result": "result",
}
IN_PIECES = """
for x, y in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces)):
    loss = nn.functional.mse_loss(model(x), y)
    ({weighed}).backward()
"""
NEW_WEIGHT = "model[-1].weight = nn.Parameter(torch.zeros_like(model[-1].weight))"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)"
DIVISION = "parameter.grad /= dist.get_world_size()"
MENDED = f"""
{NEW_WEIGHT}
{OPTIMIZER}
for inputs, targets in batches:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        {DIVISION}
    optimizer.step()
"""
SHUFFLED = """
generator = torch.Generator().manual_seed({seed})
return torch.randperm(count, generator=generator)[{part}].tolist()
"""

EXERCISES = [
    Exercise(
        "7.1",
        "culprit",
        checks.culprit,
        {
            "in a run with one that was killed it blames rank 0, which only lost": (
                'own = [end for end in ends if end["status"] not in (0, -15)]\n'
                'return min(own, key=lambda end: end["time"])["rank"]'
            ),
            "in a run with one that raised it blames rank 0, which only lost": (
                'return next(end["rank"] for end in ends if end["error"])'
            ),
            "in a run with one that raised it blames rank 1, which torchrun ended": (
                'return min(ends, key=lambda end: end["status"])["rank"]'
            ),
            "in a run with two that raised it blames rank 0, which failed later": """
own = [end for end in ends if end["status"] not in (0, -15) and "closed by peer" not in end["error"]]
return own[0]["rank"]
""",
        },
    ),
    Exercise(
        "7.2",
        "steps_in_common",
        checks.steps_in_common,
        {
            "of [5, 7, 4, 3] batches the ranks take [5, 7, 4, 3] steps: each its own": "return batches",
            "of [5, 7, 4, 3] batches the ranks take 7 steps": LIMIT.format(op="MAX", result="int(limit)"),
            "of [5, 7, 4, 3] batches the ranks take 19 steps": LIMIT.format(op="SUM", result="limit.item()"),
            "of [5, 7, 4, 3] batches the ranks take [5, 5, 5, 5]": """
limit = torch.tensor(batches)
dist.broadcast(limit, src=0)
return limit.item()
""",
            "on rank 0, the result is a Tensor": LIMIT.format(op="MIN", result="limit"),
            "on rank 0, the result is a float": LIMIT.format(op="MIN", result="float(limit)"),
            "right on 4 ranks, but with 3 ranks: on rank 0, RuntimeError: ProcessGroupGloo::allgather: invalid": """
everyone = [torch.tensor(0) for _ in range(4)]
dist.all_gather(everyone, torch.tensor(batches))
return min(each.item() for each in everyone)
""",
        },
    ),
    Exercise(
        "7.3",
        "where_they_part",
        checks.where_they_part,
        {
            "of rank 0 with another shape it gave (1, [1, 2, 3])": CALLS.format(
                places="max", differs="call != calls[0]"
            ),
            "of rank 3 one call short it gave None": CALLS.format(
                places="min", differs="calls.count(call) < len(calls) / 2"
            ),
            "of rank 0 with another shape it gave None": CALLS.format(
                places="min", differs="[c[0] for c in calls].count(call[0]) < len(calls) / 2"
            ),
            "of rank 2 in another call it gave tensor([1, 2])": """
for place, calls in enumerate(zip(*logs)):
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    if odd:
        return torch.tensor([place, *odd])
""",
            "of two places where they differ it gave (2": """
found = None
for place in range(max(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    found = (place, odd) if odd else found
return found
""",
        },
    ),
    Exercise(
        "7.4",
        "recorded",
        checks.recorded,
        {
            "on rank 0, while a call was under way, the log did not have it": RECORDED.format(
                **GOOD | {"before": "pass", "after": 'entry["done"] = True; log.append(entry)'}
            ),
            "on rank 0, while a call was under way, the log called it done": RECORDED.format(
                **GOOD | {"done": "True", "after": "pass"}
            ),
            "on rank 0, an asynchronous call returned None": RECORDED.format(**GOOD | {"result": "None"}),
            "on rank 0, the collective left other numbers": RECORDED.format(
                **GOOD | {"calls": "collective(tensor, **{name: kwargs[name] for name in kwargs if name != 'op'})"}
            ),
            "on rank 0, TypeError": RECORDED.format(**GOOD | {"calls": "collective(tensor, *args, kwargs)"}),
            "on rank 0, the numbers are right, but for two calls the rank sends 3 all_reduce calls": RECORDED.format(
                **GOOD | {"after": 'entry["done"] = True\n    if args or kwargs: dist.all_reduce(tensor.clone()[0])'}
            ),
            "on rank 0, a collective that raised an error was called done": """
def call(tensor, *args, **kwargs):
    entry = {"call": collective.__name__, "shape": tuple(tensor.shape), "done": False}
    log.append(entry)
    try:
        return collective(tensor, *args, **kwargs)
    finally:
        entry["done"] = True
return call
""",
        },
    ),
    Exercise(
        "7.5",
        "deal",
        checks.deal,
        {
            "equally many samples each, in the order of the list: rank 0 has 32 of 44": (
                "return [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]"
            ),
            "equally many samples each, in the order of the list: rank 0 has 27 of 40": """
size = len(lengths) // ranks
return [list(range(rank * size, (rank + 1) * size)) for rank in range(ranks)]
""",
            "deal([10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], ranks=2) gave sample 10 to no rank": """
order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
rounds = [order[start : start + ranks] for start in range(0, len(order) - ranks + 1, ranks)]
turned = [each[::-1] if number % 2 else each for number, each in enumerate(rounds)]
return [[each[rank] for each in turned] for rank in range(ranks)]
""",
            "different numbers of samples each": """
dealt, work = [[] for _ in range(ranks)], [0] * ranks
for index in range(len(lengths)):
    least = work.index(min(work))
    dealt[least].append(index)
    work[least] += lengths[index]
return dealt
""",
        },
    ),
    Exercise(
        "7.6",
        "backward_in_pieces",
        checks.backward_in_pieces,
        {
            "the gradient is 4 means added up, 4 times too much": IN_PIECES.format(weighed="loss"),
            "the gradient is the plain mean of the pieces": IN_PIECES.format(weighed="loss / pieces"),
            "the gradient is the last piece's gradient alone": (
                IN_PIECES.replace("    loss =", "    model.zero_grad()\n    loss =").format(weighed="loss")
            ),
            "the gradient is right, and 100% of the whole batch's activations": """
loss = 0
for x, y in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces)):
    loss = loss + nn.functional.mse_loss(model(x), y) * len(x) / len(inputs)
loss.backward()
""",
            "a parameter has no gradient": "return nn.functional.mse_loss(model(inputs), targets)",
        },
    ),
    Exercise(
        "7.7",
        "mended",
        checks.mended,
        {
            "the last layer's weight is still zero": MENDED.replace(
                f"{NEW_WEIGHT}\n{OPTIMIZER}", f"{OPTIMIZER}\n{NEW_WEIGHT}"
            ),
            "the first layer's bias differs between the ranks": MENDED.replace(
                "        dist.all_reduce",
                "        if parameter.dim() == 1:\n            continue\n        dist.all_reduce",
            ),
            "all ranks agree, and their gradients are sums divided by 4 samples": MENDED.replace(
                DIVISION, "parameter.grad /= len(inputs)"
            ),
            "right on 2 ranks, but with 3 ranks: all ranks agree, and their gradients are sums divided by 2": (
                MENDED.replace(DIVISION, "parameter.grad /= 2")
            ),
            "the first layer's weight is torch.float64 of shape (4, 5)": MENDED.replace(
                OPTIMIZER, OPTIMIZER.replace("model.p", "model.double().p")
            ).replace("model(inputs), targets", "model(inputs.double()), targets.double()"),
            "all ranks agree, and their gradients are sums not divided: a wrong scaling": MENDED.replace(
                DIVISION, "pass"
            ),
        },
    ),
    Exercise(
        "7.8",
        "rounding_alone",
        checks.rounding_alone,
        {
            "rounding_alone(apart32=0.01, apart64=3e-11) gave False": "return apart32 < 1e-5 and apart64 < 1e-12",
            "rounding_alone(apart32=2e-07, apart64=2e-07) gave True": "return apart32 < 1e-5 or apart64 < 1e-9",
            "rounding_alone(apart32=0.001, apart64=0.0009) gave True": "return apart64 < apart32 or apart32 == 0",
            "rounding_alone(apart32=0.0, apart64=0.0) gave False": "return apart64 < apart32 / 1e6",
            "rounding_alone(apart32=0.0, apart64=0.0) raised ZeroDivisionError": "return apart64 / apart32 < 1e-6",
        },
    ),
    Exercise(
        "7.9",
        "my_indices",
        checks.my_indices,
        {
            "a second run with the same seed takes other samples": (
                "return torch.randperm(count)[rank::ranks].tolist()"
            ),
            "sample 3 goes to two ranks": SHUFFLED.format(seed="1000 * seed + epoch + rank", part="rank::ranks"),
            "epoch 1 takes the samples in the order of epoch 0": SHUFFLED.format(seed="seed", part="rank::ranks"),
            "another seed takes the samples in the same order": SHUFFLED.format(seed="epoch", part="rank::ranks"),
        },
    ),
]
