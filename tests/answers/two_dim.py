"""Lab 5."""

import functools
from types import SimpleNamespace

import pandas

import answers
from answers import Exercise
from labkit.checks import two_dim as checks
from labkit.parallel import small_tensor_parallel as ours
from labkit.theory import two_dim as theory

changed = functools.partial(answers.changed, "05")
COUNTS = theory.step_collectives_by_axis(theory.mlp_pairs(64), 192, data=2, tp=2)
COUNTED = SimpleNamespace(
    summary=lambda: pandas.DataFrame({name: [count] for name, count in COUNTS.items()}),
    value=lambda name: float(COUNTS[name]),
)
"""A run of the stack, as theory has it."""


def with_earlier_answers(check):
    """The check of a layer, which uses the functions of exercises 3 and 4, as it does in the notebook."""

    def judge(layer):
        for member in vars(layer).values():
            if hasattr(member, "__globals__"):
                member.__globals__.update(copy_to_ranks=ours.copy_to_ranks, sum_over_ranks=ours.sum_over_ranks)
        return check(layer)

    return judge


def collectives(answer):
    return checks.collectives(answer, COUNTED)


def plan(**layers):
    """A plan as text, from the names of layers to what stands in the parentheses."""
    inside = {"C": "ColwiseParallel({})", "R": "RowwiseParallel({})"}
    return "return {" + ", ".join(f'"{name}": {inside[how[0]].format(how[1:])}' for name, how in layers.items()) + "}"


def stack(comes, leaves):
    return f"""
plan = {{}}
for index in range(3):
    first, last = index == 0, index == 2
    plan[f"layers.{{index}}.in_proj"] = ColwiseParallel(input_layouts={comes})
    plan[f"layers.{{index}}.out_proj"] = RowwiseParallel(output_layouts={leaves})
return plan
"""


THREE = "right on 4 ranks, but with 3 ranks: "
SUMMED = "{0} = {0}.clone()\n    dist.all_reduce({0}, group=group)\n    "
WHOLE = "output_layouts=Replicate()"
ATTENTION = {"query": "C", "key": "C", "value": "C", "out": "R"}
MLP = {"gate": "C", "up": "C", "down": "R"}
X = "parts(x, first, second, ranks=2), with x [3, 5] and first [8, 5], gave "

EXERCISES = [
    Exercise(
        "5.1",
        "parts",
        checks.parts,
        {
            X + "parts without the ReLU": changed("parts", ("relu(x @ rows.T)", "(x @ rows.T)")),
            X + "the whole result for each rank": "return [relu(x @ first.T) @ second.T] * ranks",
            X + "parts that add up, but rank 0's is not": "return [relu(x @ first.T) @ second.T / ranks] * ranks",
            X + "parts whose sum is not the result": changed(
                "parts", ("second.chunk(ranks, dim=1)", "second.chunk(ranks, dim=1)[::-1]")
            ),
            X + "a tensor of shape [3, 4]": "return [relu(x @ rows.T) for rows in first.chunk(ranks)]",
            X + "1 tensors": "return [relu(x @ first.T) @ second.T]",
        },
    ),
    Exercise(
        "5.2",
        "tp_bytes",
        checks.tp_bytes,
        {
            "tp_bytes(tokens=1, dim=1, mlps=1) gave 8": changed("tp_bytes", ("mlps, mlps - 1", "mlps, mlps")),
            "tp_bytes(tokens=1, dim=1, mlps=3) gave 12": "return mlps * tokens * dim * 4",
            "tp_bytes(tokens=1, dim=1, mlps=1) gave 1": changed("tp_bytes", (" * 4", "")),
            "tp_bytes(tokens=32, dim=8, mlps=3) gave 160": "return (2 * mlps - 1) * dim * 4",
        },
    ),
    Exercise(
        "5.3",
        "CopyToRanks",
        checks.copy_to_ranks,
        {
            "on rank 0, backward returned its own tensor": changed(
                "CopyToRanks", ("dist.all_reduce(total, group=ctx.group)", "pass")
            ),
            "on rank 0, backward returned the sum over all 4 ranks": changed(
                "CopyToRanks", ("dist.all_reduce(total, group=ctx.group)", "dist.all_reduce(total)")
            ),
            "on rank 0, backward returned the mean over its group": changed(
                "CopyToRanks", ("return total, None", "return total / dist.get_world_size(ctx.group), None")
            ),
            "on rank 0, backward changed the tensor that it was given": changed(
                "CopyToRanks", ("grad.clone()", "grad")
            ),
            "backward returns one value for each argument of forward": changed(
                "CopyToRanks", ("return total, None", "return total")
            ),
            "on rank 0, forward returned the sum over its group": changed(
                "CopyToRanks", ("return x.view_as(x)", f"{SUMMED.format('x')}return x")
            ),
            f"{THREE}on rank 0, backward returned the mean over its group, times 2": changed(
                "CopyToRanks", ("return total, None", "return total / dist.get_world_size(ctx.group) * 2, None")
            ),
            "on rank 0, backward returned the right numbers, but sends 1 tp/all_gather call with 48 bytes": changed(
                "CopyToRanks",
                (
                    "dist.all_reduce(total, group=ctx.group)",
                    "every = [grad.clone() for _ in range(dist.get_world_size(ctx.group))]\n"
                    "    dist.all_gather(every, total, group=ctx.group)\n"
                    "    total = torch.stack(every).sum(0)",
                ),
            ),
            "on rank 0, backward returned the right numbers, but sends 1 tp/all_reduce call with 96 bytes": changed(
                "CopyToRanks",
                ("total = grad.clone()", "total = grad.double()"),
                ("return total,", "return total.float(),"),
            ),
        },
    ),
    Exercise(
        "5.4",
        "SumOverRanks",
        checks.sum_over_ranks,
        {
            "on rank 0, backward returned the sum over its group": changed(
                "SumOverRanks",
                ("total = part.clone()", "ctx.group, total = group, part.clone()"),
                ("return grad, None", f"group = ctx.group\n    {SUMMED.format('grad')}return grad, None"),
            ),
            "on rank 0, forward returned its own tensor": changed(
                "SumOverRanks", ("dist.all_reduce(total, group=group)", "pass")
            ),
            "on rank 0, forward returned the mean over its group": changed(
                "SumOverRanks", ("return total", "return total / dist.get_world_size(group)")
            ),
            "on rank 0, forward changed the tensor that it was given": changed(
                "SumOverRanks",
                ("total = part.clone()", "total = part.detach()"),
                ("return total", "return total.clone()"),
            ),
            "on rank 0, the function returned NoneType, not a tensor": changed(
                "SumOverRanks", ("return total", "return")
            ),
            f"{THREE}on rank 0, forward returned the mean over its group, times 2": changed(
                "SumOverRanks", ("return total", "return total / dist.get_world_size(group) * 2")
            ),
            "on rank 0, forward returned the right numbers, but sends 1 world/broadcast call with 48": changed(
                "SumOverRanks", ("return total", "dist.broadcast(part.clone(), src=0)\n    return total")
            ),
            "on rank 0, backward returned the right numbers, but sends 1 tp/all_reduce call with 48 bytes": changed(
                "SumOverRanks",
                ("total = part.clone()", "ctx.group, total = group, part.clone()"),
                ("return grad, None", "dist.all_reduce(grad.clone(), group=ctx.group)\n    return grad, None"),
            ),
            "on rank 0, the numbers are torch.float64": changed("SumOverRanks", ("part.clone()", "part.double()")),
        },
    ),
    Exercise(
        "5.5",
        "ColumnParallel",
        with_earlier_answers(checks.column_parallel),
        {
            "on rank 1, the weight is the share of place 0 in the group": changed(
                "ColumnParallel", ("layer.weight.detach().chunk(ranks)[rank]", "layer.weight.detach().chunk(ranks)[0]")
            ),
            "on rank 0, the weight has shape [48, 6]": changed(
                "ColumnParallel", ("layer.weight.detach().chunk(ranks)", "layer.weight.detach().chunk(ranks, dim=1)")
            ),
            "on rank 0, the bias has shape [48]": changed(
                "ColumnParallel", ("layer.bias.detach().chunk(ranks)[rank]", "layer.bias.detach()")
            ),
            "on rank 0, the parameters are weight": changed(
                "ColumnParallel",
                (
                    "self.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[rank].clone())",
                    "self.bias = layer.bias.detach().chunk(ranks)[rank].clone()",
                ),
            ),
            "on rank 0, the gradient of the input is this rank's share alone": changed(
                "ColumnParallel", ("copy_to_ranks(x, self.group)", "x")
            ),
            "on rank 0, the output is not the layer's": changed(
                "ColumnParallel", ("copy_to_ranks(x, self.group)", "sum_over_ranks(x, self.group)")
            ),
            f"{THREE}on rank 0, the weight has shape [24, 12]": changed(
                "ColumnParallel",
                ("layer.weight.detach().chunk(ranks)[rank]", "layer.weight.detach().chunk(2)[rank % 2]"),
            ),
            "the numbers are right, but in the forward pass rank 0 sends 1 tp/all_reduce call with 144 bytes": changed(
                "ColumnParallel",
                ("return nn", "dist.all_reduce(x.detach().clone(), group=self.group)\n    return nn"),
            ),
            "on rank 0, the weight is right, but in torch.float64": changed(
                "ColumnParallel",
                (
                    "self.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[rank].clone())",
                    "self.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[rank].double())",
                ),
            ),
        },
    ),
    Exercise(
        "5.6",
        "RowParallel",
        with_earlier_answers(checks.row_parallel),
        {
            "on rank 0, the output has the bias 2 times": changed(
                "RowParallel",
                (
                    "nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "nn.functional.linear(x, self.weight, self.bias), self.group)",
                ),
            ),
            "on rank 1, the output is right, but the gradient of bias is missing": changed(
                "RowParallel",
                (
                    "return sum_over_ranks(nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "bias = self.bias if dist.get_rank(self.group) == 0 else None\n"
                    "    return sum_over_ranks(nn.functional.linear(x, self.weight, bias), self.group)",
                ),
            ),
            "on rank 0, the output is right, but the gradient of bias is 0.5 times one device's": changed(
                "RowParallel",
                (
                    "nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "nn.functional.linear(x, self.weight, self.bias / 2), self.group)",
                ),
            ),
            "on rank 0, the output has no bias": changed("RowParallel", (" + self.bias", "")),
            "on rank 0, the output is this rank's part alone": changed(
                "RowParallel",
                (
                    "sum_over_ranks(nn.functional.linear(x, self.weight), self.group)",
                    "nn.functional.linear(x, self.weight)",
                ),
            ),
            "on rank 0, the weight has shape [6, 48]": changed("RowParallel", (", dim=1", "")),
            f"{THREE}on rank 0, the output has the bias 2 times": changed(
                "RowParallel",
                (
                    "nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "nn.functional.linear(x, self.weight, self.bias), self.group) - self.bias.detach()",
                ),
            ),
            "the numbers are right, but in the forward pass rank 0 sends 2 tp/all_reduce calls with 288 bytes": changed(
                "RowParallel",
                (
                    "sum_over_ranks(nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "(sum_over_ranks(nn.functional.linear(x, self.weight), self.group) + self.bias\n"
                    "        + 0 * sum_over_ranks(x.detach() @ self.weight.detach().T, self.group))",
                ),
            ),
            "the numbers are right, but in the forward pass rank 0 sends 1 tp/all_reduce call with 288 bytes": changed(
                "RowParallel",
                (
                    "sum_over_ranks(nn.functional.linear(x, self.weight), self.group) + self.bias",
                    "sum_over_ranks(nn.functional.linear(x, self.weight).double(), self.group).float() + self.bias",
                ),
            ),
            "on rank 0, the output is torch.float64": changed("RowParallel", (" + self.bias", " + self.bias.double()")),
        },
    ),
    Exercise(
        "5.7",
        "collectives",
        collectives,
        {
            "tp/all_reduce: you say 6": changed("collectives", ("3 + 2", "3 + 3")),
            "data/all_gather: you say 3": changed("collectives", ('"data/all_gather": 3 + 3', '"data/all_gather": 3')),
            "data/all_reduce: you say 3": changed("collectives", ("data/reduce_scatter", "data/all_reduce")),
            "the key 'all_reduce' names no axis": changed("collectives", ("tp/all_reduce", "all_reduce")),
            "data/reduce_scatter: you say 0": changed("collectives", (', "data/reduce_scatter": 3', "")),
        },
    ),
    Exercise(
        "5.8",
        "message_share",
        checks.message_share,
        {
            "message_share(inner=4, tp=2, flops_per_s=24.0, wire_bytes_per_s=1.0, number_bytes=2) gave 2.0": changed(
                "message_share", ("4 * (tp - 1)", "2 * (tp - 1)")
            ),
            "message_share(inner=4, tp=2, flops_per_s=24.0, wire_bytes_per_s=1.0, number_bytes=2) gave 8.0": changed(
                "message_share", ("4 * (tp - 1) / tp", "4")
            ),
            "message_share(inner=4, tp=4, flops_per_s=24.0, wire_bytes_per_s=1.0, number_bytes=2) gave 6.0": (
                "return (tp - 1) * number_bytes * flops_per_s / (3 * inner * wire_bytes_per_s) * 2 / tp"
            ),
            "message_share(inner=4, tp=2, flops_per_s=24.0, wire_bytes_per_s=1.0, number_bytes=2) gave 0.25": changed(
                "message_share", ("messages_s / arithmetic_s", "arithmetic_s / messages_s")
            ),
        },
    ),
    Exercise(
        "5.9",
        "block_plan",
        checks.block_plan,
        {
            "every rank holds all of query.weight, key.weight, value.weight, out.weight": plan(**MLP),
            "the model does not run with this plan: `out` receives cut inputs": plan(**ATTENTION | {"out": "C"}, **MLP),
            "the model does not run with this plan: `down` receives whole inputs": plan(
                **ATTENTION, gate=f"C{WHOLE}", up=f"C{WHOLE}", down="R"
            ),
            "the model does not run with this plan: after `up`, a cut tensor meets a whole one": plan(
                **ATTENTION, gate="C", down="R"
            ),
            "the result is right, but a step sends more than it needs to: 3 tp/all_gather": plan(
                **ATTENTION, gate=f"C{WHOLE}", up=f"C{WHOLE}", down="Rinput_layouts=Replicate()"
            ),
            "there is no layer 'gates'": plan(**ATTENTION, gates="C"),
        },
    ),
    Exercise(
        "5.10",
        "words_plan",
        checks.words_plan,
        {
            "the output has shape [4, 12, 18]": plan(embed="R", head=f"C{WHOLE}"),
            "the output has shape [4, 6, 9]": plan(embed="Rinput_layouts=Replicate()", head="C"),
            "every rank holds all of embed.weight": plan(head=f"C{WHOLE}"),
            "the model does not run with this plan: `head` receives cut inputs": plan(embed="C", head=f"C{WHOLE}"),
        },
    ),
    Exercise(
        "5.11",
        "repaired_plan",
        checks.stack_plan,
        {
            "the output is right, but the gradient of layers.0.in_proj.weight": stack("Shard(1)", "Shard(1)"),
            "the output has shape [4, 3, 12]": stack("Replicate() if first else Shard(1)", "Shard(1)"),
            "the output has shape [4, 12, 12]": stack("Shard(1)", "Replicate() if last else Shard(1)"),
            "all is right, but between the MLPs every rank holds all 6 tokens": stack("Replicate()", "Replicate()"),
            "every rank holds all of layers.0.in_proj.weight": "return {}",
            "the result is right, but a step sends more than it needs to: 10 tp/all_gather": stack(
                "Replicate() if first else Shard(1), output_layouts=Replicate()",
                "Replicate() if last else Shard(1), input_layouts=Replicate()",
            ),
        },
    ),
]
