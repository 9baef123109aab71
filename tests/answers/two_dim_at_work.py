"""Lab 5b."""

import functools
from types import SimpleNamespace

import pandas

import answers
from answers import Exercise
from answers.two_dim import WHOLE, plan
from labkit.theory import two_dim as theory
from labkit_course.checks import two_dim_at_work as checks

changed = functools.partial(answers.changed, "05b")
COUNTS = theory.step_collectives_by_axis(theory.mlp_pairs(64), 192, data=2, tp=2, checkpointing=True)
COUNTED = SimpleNamespace(
    summary=lambda: pandas.DataFrame({name: [count] for name, count in COUNTS.items()}),
    value=lambda name: float(COUNTS[name]),
)
"""A run of the stack with checkpointing, as theory has it."""


def collectives(answer):
    return checks.collectives(answer, COUNTED)


def stack(comes, leaves):
    return f"""
plan = {{}}
for index in range(3):
    first, last = index == 0, index == 2
    plan[f"layers.{{index}}.in_proj"] = ColwiseParallel(input_layouts={comes})
    plan[f"layers.{{index}}.out_proj"] = RowwiseParallel(output_layouts={leaves})
return plan
"""


EXERCISES = [
    Exercise(
        "5b.1",
        "collectives",
        collectives,
        {
            "tp/all_reduce: you say 5": changed("collectives", ("3 + 3 + 2", "3 + 2")),
            "tp/all_reduce: you say 9": changed("collectives", ("3 + 3 + 2", "3 + 3 + 3")),
            "data/all_gather: you say 9": changed(
                "collectives", ('"data/all_gather": 3 + 3', '"data/all_gather": 3 + 3 + 3')
            ),
            "data/all_reduce: you say 3": changed("collectives", ("data/reduce_scatter", "data/all_reduce")),
            "the key 'all_reduce' names no axis": changed("collectives", ("tp/all_reduce", "all_reduce")),
            "data/reduce_scatter: you say 0": changed("collectives", (', "data/reduce_scatter": 3', "")),
        },
    ),
    Exercise(
        "5b.2",
        "words_plan",
        checks.words_plan,
        {
            "the output has shape [4, 12, 18]": plan(embed="R", head=f"C{WHOLE}"),
            "the output has shape [4, 6, 9]": plan(embed="Rinput_layouts=Replicate()", head="C"),
            "every rank holds all of embed.weight": plan(head=f"C{WHOLE}"),
            "all is right, but every rank looks up all 18 words": plan(embed=f"C{WHOLE}", head=f"C{WHOLE}"),
            "the model does not run with this plan: `head` receives cut inputs": plan(embed="C", head=f"C{WHOLE}"),
        },
    ),
    Exercise(
        "5b.3",
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
    Exercise(
        "5b.4",
        "whole_plan",
        checks.language_plan,
        {
            "the output is right, but the gradient of norm.weight, last_norm.weight is not": changed(
                "whole_plan", ('"norm": SequenceParallel(),', ""), ('"last_norm": SequenceParallel(),', "")
            ),
            "the output has shape [4, 6, 9]": changed("whole_plan", (", use_local_output=False", "")),
            "all is right, but every rank holds the logits of all 18 words": changed(
                "whole_plan", ("use_local_output=False", "output_layouts=Replicate()")
            ),
            "the model does not run with this plan: at or after `head`": changed(
                "whole_plan", ('"head": ColwiseParallel(input_layouts=cut, use_local_output=False),', "")
            ),
            "the model does not run with this plan: after `down`, a cut tensor meets a whole one": changed(
                "whole_plan", ('"down": RowwiseParallel(output_layouts=cut)', '"down": RowwiseParallel()')
            ),
            "there is no layer 'embedding': there are embed": changed("whole_plan", ('"embed":', '"embedding":')),
        },
    ),
    Exercise(
        "5b.5",
        "language_step",
        checks.language_step,
        {
            "the logits are cut: loss and backward() stand inside": changed(
                "language_step", ("with loss_parallel():", "if True:")
            ),
            "along data nothing is shared out": changed("language_step", ('fully_shard(model, mesh=mesh["data"])', "")),
            "along tp nothing is shared out": changed(
                "language_step", ('parallelize_module(model, mesh["tp"], plan)', "")
            ),
            "the gradient of embed.weight is not one device's": changed(
                "language_step", ("ids[:, 1:].flatten()", "ids[:, :-1].flatten()")
            ),
            "the gradients are right, but along tp a step sends": changed(
                "language_step", ("logits = model(ids[:, :-1])", "logits = model(ids[:, :-1]).full_tensor()")
            ),
        },
    ),
]
