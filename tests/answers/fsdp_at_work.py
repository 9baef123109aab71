"""Lab 2b."""

import functools

from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states

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

NOT_SAVED = "what is loaded was not saved, or under another name (RuntimeError: Missing key in checkpoint state_dict: "
WHOLE = """
how = states.StateDictOptions(full_state_dict=True)
weights, updates = states.get_state_dict(model, optimizer, options=how)
if dist.get_rank() == 0:
    torch.save({"model": weights, "optimizer": updates}, f"{folder}/all.pt")
"""
RAW = """
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
checkpoint.load(state, checkpoint_id=folder)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
"""
COPIES = """
copies = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
checkpoint.load({"model": copies}, checkpoint_id=folder)
"""


def save_training(model, optimizer, folder):
    weights, updates = states.get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": updates}, checkpoint_id=folder)


def load_training(model, optimizer, folder):
    weights, updates = states.get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": updates}, checkpoint_id=folder)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)


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
        "shard_model",
        checks.shard_model,
        {
            "on rank 0, norm.weight and norm.bias did not get sharded": changed(
                "shard_model", ("\nfully_shard(model, mesh=mesh, mp_policy=policy)", "")
            ),
            "on rank 0, a rank keeps 24 of the 96 of embedding.weight": changed(
                "shard_model", ("(groups, group), mesh_dim_names=names", "(groups * group,)")
            ),
            "two units would hold the tied matrix (ValueError: Parameter 'head.weight' is shared": changed(
                "shard_model", ("[model.embedding, model.head]", "model.embedding, model.head")
            ),
            "on rank 0, the gradients are right, but a step sends 7 shard/all_gather calls with 2,064": changed(
                "shard_model", ("([model.embedding, model.head], *model.blocks)", "model.blocks")
            ),
            "on rank 0, the gradients are right, but a step sends 9 shard/all_gather calls with 2,176": changed(
                "shard_model", ("fully_shard(model, mesh=mesh, mp_policy=policy)", "fully_shard(model, mesh=mesh)")
            ),
            "on rank 0, the gradients are right, but a step sends 5 shard/reduce_scatter calls with 2,176": changed(
                "shard_model", (", reduce_dtype=torch.float32", "")
            ),
            "on rank 0, embedding.weight is kept in torch.bfloat16": changed(
                "shard_model", ("policy = ", "model.bfloat16()\npolicy = ")
            ),
            "right on 4 ranks, but with 2 ranks: on rank 0, RuntimeError: Mesh should not be bigger": changed(
                "shard_model", ("dist.get_world_size() // group", "2")
            ),
        },
    ),
    Exercise(
        "2b.4",
        "save_training",
        lambda save: checks.saved_training(save, load_training),
        {
            "the folder is empty after save_training": "states.get_state_dict(model, optimizer)",
            "all.pt holds 100% of the bytes that 2 ranks saved": WHOLE,
            f"{NOT_SAVED}optimizer": (
                'checkpoint.save({"model": states.get_model_state_dict(model)}, checkpoint_id=folder)'
            ),
        },
    ),
    Exercise(
        "2b.4",
        "load_training",
        lambda load: checks.saved_training(save_training, load),
        {
            "on rank 0, after the load the parameters are right, but training goes on as with a new Adam": RAW,
            "on rank 0, after the load 0.weight is what it was before": COPIES,
            f"{NOT_SAVED}weights": (changed("load_training", ('"model"', '"weights"'))),
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
