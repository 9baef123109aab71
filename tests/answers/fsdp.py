"""Lab 2."""

import functools
from types import SimpleNamespace
from unittest import mock

import pandas

import answers
import labkit
from answers import Exercise
from labkit.checks import fsdp as checks
from labkit.theory import fsdp as theory

changed = functools.partial(answers.changed, "02")


def as_theory_says(program, **plan):
    """What a run of the stack would give, without one."""
    layers = theory.mlp_stack_layers(plan["wrap"], 128)
    peak = theory.fsdp_step_peak(layers, 256, 2, checkpointing=plan.get("checkpointing", False))
    peaks = {f"peak_{name}_bytes": [size] for name, size in peak.items()}
    counts = theory.step_collectives(layers, 2, reshard_after_forward=plan.get("reshard_after_forward", True))
    frame = pandas.DataFrame(peaks | {name: [size] for name, size in counts.items()})
    return SimpleNamespace(params=plan, summary=lambda: frame, value=lambda name: float(frame[name].max()))


def memory_plan(answer):
    root = theory.fsdp_step_peak(theory.mlp_stack_layers("root", 128), 256, 2)["total"]
    with mock.patch.object(labkit, "run", as_theory_says):
        return checks.memory_plan(answer, int(0.85 * root), gathers=6)


def forgotten_block(answer):
    riddle = SimpleNamespace(params={"skip": (), "forget": 2026, "model": "toy"})
    return checks.missing_block(answer, riddle)


ALL = "for parameter in model.parameters():\n    dist.all_reduce(parameter.grad)\n    parameter.grad /= ranks"
SUMMED = (
    "for parameter in model.parameters():\n    if parameter not in experts:\n        dist.all_reduce(parameter.grad)"
)
DIVIDED = "for parameter in model.parameters():\n    if parameter not in experts:\n        parameter.grad /= ranks"
UNTOUCHED = SUMMED + "\n        parameter.grad /= ranks"
AVERAGED = SUMMED + "\n    parameter.grad /= ranks"
GATHER = """
for parameter in sorted(experts, key=lambda each: each.dim()):
    everyone = [torch.empty_like(parameter) for _ in range(ranks)]
    dist.all_gather(everyone, parameter.grad)
"""
CLOSE = "(mine[name] - reference[name]).abs().max() <= 1e-5 * reference[name].abs().max()"
SUMS_AGREE = """
if mine.keys() != reference.keys() or not mine:
    return False
return all(
    bool((mine[name].sum() - reference[name].sum()).abs() <= 1e-5 * reference[name].abs().max()) for name in reference
)
"""

EXERCISES = [
    Exercise(
        "2.1",
        "zero_bytes",
        checks.zero_bytes,
        {
            "zero_bytes(parameters=1000, ranks=1, stage=0) gave 12,000": "return 12 * parameters",
            "zero_bytes(parameters=1000, ranks=4, stage=0) gave 4,000": "return 16 * parameters / ranks",
            "zero_bytes(parameters=1000, ranks=4, stage=1) gave 16,000": "return 16 * parameters",
            "zero_bytes(parameters=1000, ranks=4, stage=2) gave 10,000": changed(
                "zero_bytes", ("share if stage >= 2 else whole", "whole if stage < 3 else share")
            ),
        },
    ),
    Exercise(
        "2.2",
        "all_gathers",
        checks.all_gathers,
        {
            "all_gathers(units=3, reshard_after_forward=True, root_has_parameters=False) gave 3": "return units",
            "all_gathers(units=3, reshard_after_forward=False, root_has_parameters=False) gave 6": "return 2 * units",
            "all_gathers(units=4, reshard_after_forward=True, root_has_parameters=True) gave 8": changed(
                "all_gathers", (" - root_has_parameters", "")
            ),
        },
    ),
    Exercise(
        "2.3",
        "wire_bytes",
        checks.wire_bytes,
        {
            "wire_bytes(parameter_bytes=800, ranks=2, technique='ddp') gave 400": changed(
                "wire_bytes", ('"ddp": 2', '"ddp": 1')
            ),
            "wire_bytes(parameter_bytes=800, ranks=8, technique='ddp') gave 200": changed(
                "wire_bytes", (" * (ranks - 1)", "")
            ),
            "wire_bytes(parameter_bytes=800, ranks=8, technique='fsdp') gave 1,400": changed(
                "wire_bytes", ('"fsdp": 3', '"fsdp": 2')
            ),
            "wire_bytes(parameter_bytes=800, ranks=8, technique='kept') gave 2,100": changed(
                "wire_bytes", ('"kept": 2', '"kept": 3')
            ),
        },
    ),
    Exercise(
        "2.4",
        "small_fsdp",
        checks.small_fsdp,
        {
            "on rank 0, what you return for unit 0 is a list, no nn.Parameter": "return list(unit.parameters())",
            "on rank 0, what you return for unit 0 has shape (50,)": changed(
                "small_fsdp", ("full.chunk(ranks)[dist.get_rank()].clone()", "full.clone()")
            ),
            "on rank 1, what you return for unit 0 is rank 0's part": changed(
                "small_fsdp", ("[dist.get_rank()]", "[0]")
            ),
            "after its forward pass, unit 0 still holds 200 bytes of whole parameters": changed(
                "small_fsdp",
                ("-> None:\n    buffer.resize_(0)\n    if output", "-> None:\n    if output"),
            ),
            "parameters were used while their buffer was empty": changed(
                "small_fsdp", ("output.register_hook(gather)", "pass")
            ),
            "on rank 0, the gradient of unit 0's shard is the sum over the ranks, not the mean": changed(
                "small_fsdp", ("shard.grad /= ranks", "pass")
            ),
            "on rank 0, the gradient of unit 0's shard is this rank's own, not the mean": changed(
                "small_fsdp",
                (
                    "dist.reduce_scatter_tensor(shard.grad, gradients)",
                    "shard.grad = gradients.chunk(ranks)[dist.get_rank()]",
                ),
                ("shard.grad /= ranks", "pass"),
            ),
            "on rank 0, the gradient of unit 0's shard is None": changed(
                "small_fsdp",
                ("shard.grad = torch.empty_like(shard)", "mean = torch.empty_like(shard)"),
                ("dist.reduce_scatter_tensor(shard.grad, gradients)", "dist.reduce_scatter_tensor(mean, gradients)"),
                ("shard.grad /= ranks", "mean /= ranks"),
            ),
            "unit 0 still has 196 bytes of whole gradients after the backward pass": changed(
                "small_fsdp", ("each.grad = None", "pass")
            ),
            "after the backward pass, unit 0 still holds 200 bytes of whole parameters": changed(
                "small_fsdp", ("ready.clear()\n        buffer.resize_(0)", "ready.clear()")
            ),
            "on rank 0, the output after an update is that of the parameters before the update": changed(
                "small_fsdp",
                ("dist.all_gather_into_tensor(full, shard.detach())", "dist.all_gather_into_tensor(full, first)"),
                ("ready = []", "ready, first = [], shard.detach().clone()"),
            ),
            "right on 2 ranks, but with 3 ranks: on rank 0, the gradient of unit 0's shard is the sum over the ranks, "
            "divided by 2": changed("small_fsdp", ("shard.grad /= ranks", "shard.grad /= 2")),
            "on rank 0, the numbers are right, but a step of two units sends 4 all_reduce calls with "
            "16,777,216 bytes besides": changed(
                "small_fsdp",
                ("buffer.resize_(size)\n", "buffer.resize_(size)\n    dist.all_reduce(torch.zeros(2**20))\n"),
            ),
            "on rank 0, the numbers are right, but a step of two units sends 4 all_gather calls with 800": changed(
                "small_fsdp",
                (
                    "dist.all_gather_into_tensor(full, shard.detach())",
                    "whole = full.double()\n    dist.all_gather_into_tensor(whole, shard.detach().double())\n"
                    "    full.copy_(whole)",
                ),
            ),
            "on rank 0, the output of the forward pass is another": changed(
                "small_fsdp",
                (
                    "dist.all_gather_into_tensor(full, shard.detach())",
                    "whole = full.half()\n    dist.all_gather_into_tensor(whole, shard.detach().half())\n"
                    "    full.copy_(whole)",
                ),
            ),
            "on rank 0, what you return for unit 0 is right, but in torch.float64": changed(
                "small_fsdp", ("[dist.get_rank()].clone()", "[dist.get_rank()].double()")
            ),
        },
    ),
    Exercise(
        "2.5",
        "peak_bytes",
        checks.peak_bytes,
        {
            "peak_bytes(units=[800], ranks=1) gave 3,200": changed("peak_bytes", ("3 * sum", "sum")),
            "peak_bytes(units=[800], ranks=2) gave 4,400": changed(
                "peak_bytes", ("3 * sum(units) / ranks", "3 * sum(units)")
            ),
            "peak_bytes(units=[800, 800], ranks=2) gave 4,400": changed("peak_bytes", ("sum(units[index:])", "unit")),
            "peak_bytes(units=[400, 1600, 800], ranks=4) gave 5,800": changed(
                "peak_bytes", ("units[index:]", "units[: index + 1]")
            ),
        },
    ),
    Exercise(
        "2.6",
        "gradients_agree",
        checks.gradients_agree,
        {
            "for gradients that rounding moved by 4e-7, gradients_agree gave False": (
                "return mine.keys() == reference.keys() and all(torch.equal(mine[n], reference[n]) for n in mine)"
            ),
            "for gradients twice as large, gradients_agree gave True": "return mine.keys() == reference.keys()",
            "for one gradient of two half as large, gradients_agree gave True": f"return any({CLOSE} for name in mine)",
            "for a gradient of NaN, gradients_agree gave True": (
                f"return len(mine) > 1 and not any({CLOSE.replace('<=', '>')} for name in mine)"
            ),
            "for two rows exchanged, gradients_agree gave True": SUMS_AGREE,
            "for one number of twelve wrong, gradients_agree gave True": SUMS_AGREE.replace(
                "(mine[name].sum() - reference[name].sum()).abs()", "(mine[name] - reference[name]).abs().mean()"
            ),
            "for a gradient too many, gradients_agree gave True": changed(
                "gradients_agree", ("mine.keys() != reference.keys()", "not mine.keys() >= reference.keys()")
            ),
            "for a gradient missing, gradients_agree gave True": f"return all(bool({CLOSE}) for name in mine)",
            "for no gradient at all, gradients_agree gave True": changed("gradients_agree", (" or not mine", "")),
        },
    ),
    Exercise(
        "2.7",
        "plan",
        memory_plan,
        {
            "the plan is 'block', not a dict": "return 'block'",
            "wrap = 'leaf' is none of": "return {'wrap': 'leaf'}",
            "the peak is 18 % above the bound": "return {'wrap': 'root'}",
            "the peak is 5 % above the bound": "return {'wrap': 'block'}",
            "12 all-gathers a step are too many": "return {'wrap': 'layer'}",
        },
    ),
    Exercise(
        "2.8",
        "forgotten",
        forgotten_block,
        {
            "forgotten() gave 0, but block 0 was wrapped": "return 0",
            "forgotten() gave 5: 5 is its position in the model": "return 5",
            "forgotten() gave 'net.5', not the index of a block": "return 'net.5'",
        },
    ),
    Exercise(
        "2.9",
        "tokens_to_hide",
        checks.tokens_to_hide,
        {
            "tokens_to_hide(flops_per_s=600.0, wire_bytes_per_s=1.0, ranks=2, number_bytes=4) gave 1,200": changed(
                "tokens_to_hide", ("(ranks - 1) / ranks * ", "")
            ),
            "tokens_to_hide(flops_per_s=600.0, wire_bytes_per_s=1.0, ranks=4, number_bytes=4) gave 1,800": changed(
                "tokens_to_hide", ("(ranks - 1) / ranks", "(ranks - 1) / 2")
            ),
            "tokens_to_hide(flops_per_s=600.0, wire_bytes_per_s=1.0, ranks=4, number_bytes=2) gave 900": changed(
                "tokens_to_hide", ("number_bytes * ", "4 * ")
            ),
        },
    ),
    Exercise(
        "2.10",
        "tied_unit",
        checks.tied_unit,
        {
            "tied_unit(model, 'blocks.0'), where nothing is tied, took in the model, 'embedding'": (
                "return list(model.modules())"
            ),
            "tied_unit(model, 'blocks.0'), where nothing is tied, took in the model, 'blocks'": changed(
                "tied_unit", ("recurse=False", "")
            ),
            "tied_unit(model, 'embedding'), where the output layer has the embedding's weight, left out 'output'": (
                "return [block]"
            ),
            "tied_unit(model, 'embedding'), where the output layer's weight is a copy": changed(
                "tied_unit", ("id(p) in own", "any(p.equal(q) for q in block.parameters())")
            ),
        },
    ),
    Exercise(
        "2.11",
        "average_gradients",
        checks.expert_gradients,
        {
            "on rank 0, the expert's gradient of net.2.weight is averaged": ALL,
            "on rank 0, the shared gradient of net.0.weight is summed and not divided": SUMMED,
            "on rank 0, the shared gradient of net.0.weight is divided but not summed": DIVIDED,
            "on rank 0, the expert's gradient of net.2.weight is still this rank's own": UNTOUCHED,
            "right on 2 ranks, but with 3 ranks: on rank 0, the shared gradient of net.0.weight is the sum over the "
            "ranks, divided by 2": AVERAGED.replace("ranks", "2"),
            "on rank 0, the gradients are right, but the rank sends 2 all_gather calls with 1,152 bytes and 6": AVERAGED
            + GATHER,
            "on rank 0, the gradients are right, but the rank sends 6 all_reduce calls with 4,088": AVERAGED.replace(
                "all_reduce(parameter.grad)",
                "all_reduce(wide := parameter.grad.double())\n        parameter.grad = wide.float()",
            ),
        },
    ),
]
