"""Right and wrong plans of both exercises, judged in one launch by the check's own program.

Every rank prints one JSON object: what that program says of each plan on this rank, "" where it finds nothing wrong.
"""

from __future__ import annotations

import json
import textwrap
import warnings
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from labkit import rank
from labkit.checks import plan_ranks

LOOP = """
plan = {{}}
for index in range(3):
    first, last = index == 0, index == 2
    plan[f"layers.{{index}}.in_proj"] = ColwiseParallel(input_layouts={comes})
    plan[f"layers.{{index}}.out_proj"] = RowwiseParallel(output_layouts={leaves})
return plan
"""


def stack(comes: str, leaves: str) -> str:
    return LOOP.format(comes=comes, leaves=leaves)


# Plans, and a part of what the learner is told; "" where nothing is wrong.
CUT = '"gate": ColwiseParallel(), "up": ColwiseParallel()'
WHOLE = '"gate": ColwiseParallel(output_layouts=Replicate()), "up": ColwiseParallel(output_layouts=Replicate())'
GATED = {
    "right": (f'return {{{CUT}, "down": RowwiseParallel()}}', ""),
    "nothing cut": ("return {}", "every rank holds all of gate.weight, up.weight, down.weight"),
    "one is whole": (f"return {{{WHOLE}}}", "every rank holds all of down.weight"),
    "up forgotten": (
        'return {"gate": ColwiseParallel(), "down": RowwiseParallel()}',
        "the model does not run with this plan: Run",
    ),
    "all by columns": (f'return {{{CUT}, "down": ColwiseParallel()}}', "the model does not run with this plan"),
    "gathered in between": (
        f'return {{{WHOLE}, "down": RowwiseParallel(input_layouts=Replicate())}}',
        "the result is right, but a step sends more than it needs to along tp: ",
    ),
    "left in parts": (
        f'return {{{CUT}, "down": RowwiseParallel(output_layouts=Partial())}}',
        "the output is not one device's, and nothing has raised an error",
    ),
    "left cut": (
        f'return {{{CUT}, "down": RowwiseParallel(output_layouts=Shard(-1))}}',
        "the output has shape [4, 8, 4], on one device it is [4, 8, 8]",
    ),
    "a name that is none": ('return {"gates": ColwiseParallel()}', "there is no linear layer 'gates': there are gate"),
    "no style": ('return {"gate": "colwise"}', "gate is to be 'colwise': write ColwiseParallel()"),
    "no dict": ("return [ColwiseParallel()]", "not a dict such as {'up': ColwiseParallel()}"),
}
STACK = {
    "repaired": (stack("Replicate() if first else Shard(1)", "Replicate() if last else Shard(1)"), ""),
    "plain pairs": (stack("Replicate()", "Replicate()"), ""),
    "broken": (stack("Shard(1)", "Shard(1)"), "layers.0.in_proj.bias and of 10 more is 2 times one device's"),
    "repaired in front": (
        stack("Replicate() if first else Shard(1)", "Shard(1)"), "the output has shape [4, 4, 8], on one device",
    ),
    "repaired behind": (
        stack("Shard(1)", "Replicate() if last else Shard(1)"), "the output has shape [4, 16, 8], on one device",
    ),
    "cut but never gathered": (
        stack("Replicate()", "Replicate() if last else Shard(1)"), "the output has shape [4, 2, 8], on one device",
    ),
    "nothing to share": ("return {}", "every rank holds all of layers.0.in_proj.weight"),
}  # fmt: skip


@dataclass
class Config:
    pass


def main(config: Config) -> None:
    warnings.simplefilter("ignore")
    with rank.session() as here:
        mesh, said = here.mesh(dp=2, tp=2), {}
        for model, plans, most in (("gated", GATED, 1), ("stack", STACK, 0)):
            for name, (body, _) in plans.items():
                names = {each.__name__: each for each in (ColwiseParallel, RowwiseParallel, SequenceParallel)}
                names |= {each.__name__: each for each in (Replicate, Shard, Partial)}
                exec(f"def plan():\n{textwrap.indent(body, '    ')}", names)
                said[name] = ""
                try:
                    plan_ranks.judge(names["plan"](), model, mesh, most)
                except plan_ranks.Wrong as wrong:
                    said[name] = str(wrong)
        print(json.dumps(said))


if __name__ == "__main__":
    rank.start(main, Config)
