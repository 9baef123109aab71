"""Lab 2b."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import fsdp_at_work as checks

changed = functools.partial(answers.changed, "02b")


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
        "2b.1",
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
        "2b.2",
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
            "for a gradient of shape (1,) beside one of (3,), gradients_agree gave True": changed(
                "gradients_agree", ("mine[name].shape != reference[name].shape", "False")
            ),
            "for a reference of infinity, gradients_agree gave True": changed(
                "gradients_agree", ("error.isfinite() and ", "")
            ),
        },
    ),
    Exercise(
        "2b.3",
        "forgotten_blocks",
        checks.forgotten_blocks,
        {
            "for net.4 to net.7 without net.6, forgotten_blocks gave [6]": (
                "return [int(block.split('.')[1]) for block in blocks if block not in gathered]"
            ),
            "for net.4 to net.7 without net.4 and net.7, forgotten_blocks gave [0]": (
                "return [index for index, block in enumerate(blocks) if block not in gathered][:1]"
            ),
            "for blocks net.4 to net.7, all gathered once, forgotten_blocks gave [0, 1, 2, 3]": (
                "return [index for index, block in enumerate(blocks) if gathered.count(block) != 2]"
            ),
            "for layers.0 to layers.10 without layers.1, forgotten_blocks gave []": (
                "return [index for index, block in enumerate(blocks) if block not in ' '.join(gathered)]"
            ),
        },
    ),
    Exercise(
        "2b.4",
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
                "tied_unit", ("p in own", "any(p.equal(q) for q in block.parameters())")
            ),
        },
    ),
    Exercise(
        "2b.5",
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
