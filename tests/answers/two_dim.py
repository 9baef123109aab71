"""Lab 5."""

import functools

import answers
from answers import Exercise
from labkit.parallel import small_tensor_parallel as ours
from labkit_course.checks import two_dim as checks

changed = functools.partial(answers.changed, "05")


def with_earlier_answers(check):
    """The check of a layer, which uses the functions of exercise 2, as it does in the notebook."""

    def judge(layer):
        for member in vars(layer).values():
            if hasattr(member, "__globals__"):
                member.__globals__.update(copy_to_ranks=ours.copy_to_ranks, sum_over_ranks=ours.sum_over_ranks)
        return check(layer)

    return judge


def plan(**layers):
    """A plan as text, from the names of layers to what stands in the parentheses."""
    inside = {"C": "ColwiseParallel({})", "R": "RowwiseParallel({})"}
    text = ", ".join(f'"{name}": {inside[how[0]].format(how[1:])}' for name, how in layers.items())
    return f"from torch.distributed.tensor import Replicate\nreturn {{{text}}}"


WHOLE = "output_layouts=Replicate()"
THREE = "right on 4 ranks, but with 3 ranks: "
SUMMED = "{0} = {0}.clone()\n    dist.all_reduce({0}, group=group)\n    "
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
            X + "torch.float64": changed(
                "parts", ("relu(x @ rows.T)", "relu(x @ rows.T).double()"), ("columns.T", "columns.T.double()")
            ),
            X + "1 tensors": "return [relu(x @ first.T) @ second.T]",
        },
    ),
    Exercise(
        "5.2",
        "CopyToRanks",
        lambda copy: checks.pair_ends(copy, ours.SumOverRanks),
        {
            "on rank 0, CopyToRanks.backward returned its own tensor": changed(
                "CopyToRanks", ("dist.all_reduce(total, group=ctx.group)", "pass")
            ),
            "on rank 0, CopyToRanks.backward returned the sum over all 4 ranks": changed(
                "CopyToRanks", ("dist.all_reduce(total, group=ctx.group)", "dist.all_reduce(total)")
            ),
            "on rank 0, CopyToRanks.backward returned the mean over its group": changed(
                "CopyToRanks", ("return total, None", "return total / dist.get_world_size(ctx.group), None")
            ),
            "on rank 0, CopyToRanks.backward changed the tensor that it was given": changed(
                "CopyToRanks", ("grad.clone()", "grad")
            ),
            "backward returns one value for each argument of forward": changed(
                "CopyToRanks", ("return total, None", "return total")
            ),
            "on rank 0, CopyToRanks.forward returned the sum over its group": changed(
                "CopyToRanks", ("return x\n", f"{SUMMED.format('x')}return x\n")
            ),
            f"{THREE}on rank 0, CopyToRanks.backward returned the mean over its group, times 2": changed(
                "CopyToRanks", ("return total, None", "return total / dist.get_world_size(ctx.group) * 2, None")
            ),
            "on rank 0, CopyToRanks.backward returned the right numbers, but sends 1 tp/all_gather": changed(
                "CopyToRanks",
                (
                    "dist.all_reduce(total, group=ctx.group)",
                    "every = [grad.clone() for _ in range(dist.get_world_size(ctx.group))]\n"
                    "    dist.all_gather(every, total, group=ctx.group)\n"
                    "    total = torch.stack(every).sum(0)",
                ),
            ),
            "on rank 0, CopyToRanks.backward returned the right numbers, but sends 1 tp/all_reduce": changed(
                "CopyToRanks",
                ("total = grad.clone()", "total = grad.double()"),
                ("return total,", "return total.float(),"),
            ),
        },
    ),
    Exercise(
        "5.2",
        "SumOverRanks",
        lambda total: checks.pair_ends(ours.CopyToRanks, total),
        {
            "on rank 0, SumOverRanks.backward returned the sum over its group": changed(
                "SumOverRanks",
                ("total = part.clone()", "ctx.group, total = group, part.clone()"),
                ("return grad, None", f"group = ctx.group\n    {SUMMED.format('grad')}return grad, None"),
            ),
            "on rank 0, SumOverRanks.forward returned its own tensor": changed(
                "SumOverRanks", ("dist.all_reduce(total, group=group)", "pass")
            ),
            "on rank 0, SumOverRanks.forward returned the mean over its group": changed(
                "SumOverRanks", ("return total", "return total / dist.get_world_size(group)")
            ),
            "on rank 0, SumOverRanks.forward changed the tensor that it was given": changed(
                "SumOverRanks",
                ("total = part.clone()", "total = part.detach()"),
                ("return total", "return total.clone()"),
            ),
            "on rank 0, SumOverRanks returned NoneType, not a tensor": changed(
                "SumOverRanks", ("return total", "return")
            ),
            f"{THREE}on rank 0, SumOverRanks.forward returned the mean over its group, times 2": changed(
                "SumOverRanks", ("return total", "return total / dist.get_world_size(group) * 2")
            ),
            "on rank 0, SumOverRanks.forward returned the right numbers, but sends 1 world/broadcast": changed(
                "SumOverRanks", ("return total", "dist.broadcast(part.clone(), src=0)\n    return total")
            ),
            "on rank 0, SumOverRanks.backward returned the right numbers, but sends 1 tp/all_reduce": changed(
                "SumOverRanks",
                ("total = part.clone()", "ctx.group, total = group, part.clone()"),
                ("return grad, None", "dist.all_reduce(grad.clone(), group=ctx.group)\n    return grad, None"),
            ),
            "on rank 0, the numbers are torch.float64": changed("SumOverRanks", ("part.clone()", "part.double()")),
        },
    ),
    Exercise(
        "5.3",
        "RowParallel",
        with_earlier_answers(checks.row_parallel),
        {
            "on rank 0, the output has the bias 2 times": changed(
                "RowParallel",
                (
                    "linear(x, self.weight), self.group) + self.bias",
                    "linear(x, self.weight, self.bias), self.group)",
                ),
            ),
            "on rank 1, the output is right, but the gradient of bias is missing": changed(
                "RowParallel",
                (
                    "return sum_over_ranks(linear(x, self.weight), self.group) + self.bias",
                    "bias = self.bias if dist.get_rank(self.group) == 0 else None\n"
                    "    return sum_over_ranks(linear(x, self.weight, bias), self.group)",
                ),
            ),
            "on rank 0, the output is right, but the gradient of bias is 0.5 times one device's": changed(
                "RowParallel",
                (
                    "linear(x, self.weight), self.group) + self.bias",
                    "linear(x, self.weight, self.bias / 2), self.group)",
                ),
            ),
            "on rank 0, the output has no bias": changed("RowParallel", (" + self.bias", "")),
            "on rank 0, the output is this rank's part alone": changed(
                "RowParallel",
                (
                    "sum_over_ranks(linear(x, self.weight), self.group)",
                    "linear(x, self.weight)",
                ),
            ),
            "on rank 0, the weight has shape [6, 48]": changed("RowParallel", (", dim=1", "")),
            f"{THREE}on rank 0, the output has the bias 2 times": changed(
                "RowParallel",
                (
                    "linear(x, self.weight), self.group) + self.bias",
                    "linear(x, self.weight, self.bias), self.group) - self.bias.detach()",
                ),
            ),
            "the numbers are right, but in the forward pass rank 0 sends 2 tp/all_reduce calls with 288 bytes": changed(
                "RowParallel",
                (
                    "sum_over_ranks(linear(x, self.weight), self.group) + self.bias",
                    "(sum_over_ranks(linear(x, self.weight), self.group) + self.bias\n"
                    "        + 0 * sum_over_ranks(x.detach() @ self.weight.detach().T, self.group))",
                ),
            ),
            "the numbers are right, but in the forward pass rank 0 sends 1 tp/all_reduce call with 288 bytes": changed(
                "RowParallel",
                (
                    "sum_over_ranks(linear(x, self.weight), self.group) + self.bias",
                    "sum_over_ranks(linear(x, self.weight).double(), self.group).float() + self.bias",
                ),
            ),
            "on rank 0, the output is torch.float64": changed("RowParallel", (" + self.bias", " + self.bias.double()")),
        },
    ),
    Exercise(
        "5.4",
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
        "5.5",
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
]
