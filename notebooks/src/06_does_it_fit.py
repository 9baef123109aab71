# %% [markdown]
# # Lab 6. Does it fit?
#
# A wrong guess on a cluster is paid by the hour: the job waits in a queue, starts, and runs out of memory. In this lab
# one process plays one rank of a thousand. It runs the real program, but its tensors have no memory, and its
# collectives send nothing.
#
# The example is `train.py`, a program that you have not seen, which trains Llama 2 with 7 billion parameters. You are
# given 64 H100, and another job leaves you 24 GiB of each.
#
# After this lab you can
#
# - run a PyTorch program as one rank of many, without the others and without a GPU, and mend one that cannot be run so;
# - say when in a step a rank holds the most, and what more GPUs change;
# - find and confirm the smallest cluster on which a model fits;
# - choose mesh, batch and checkpointing for a budget and a network;
# - work out by hand what a mesh sends to other hosts, and name what no simulation can know.
#
# You need labs 0 and 2. The lab takes about {core_minutes} minutes, and its exercises are marked • (easy) or ••
# (harder). Cells that simulate take some seconds, and one in section 6 over a minute on two cores.
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
from IPython.display import Code, display
from matplotlib import pyplot

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.plots import style
from labkit.theory.links import SIMPLE
from labkit_course.checks import simulation as checks
from labkit_course.checks.claims import claim, commit
from labkit_course.plan_explorer import CandidateExplorer
from labkit_simulate import plots as simulate_plots
from labkit_simulate.block_memory import block_memory_table, peak_phase_and_block
from labkit_simulate.estimate import estimate_rank_step
from labkit_simulate.link_traffic import link_traffic_table
from labkit_simulate.memory_fit import GIB, memory_fit
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.transformer import LLAMA_2_7B
from launch.given import CLIPS, TRAIN

doctor.show(lab="6")

# %% [markdown]
# You may change these parameters of sections 3 to 5:

# %% tags=["parameters"] small={"RANKS": 64, "SEQUENCE": 512} points=[[64,512],[256,1024],[1024,4096]]
RANKS: int = 1024  # GPUs of the large cluster, in hosts of 8
SEQUENCE: int = 2048  # tokens of a sequence

# %%
hosts_rule = "hosts have 8 GPUs, section 5 needs many of them, and 1024 are enough"
require("RANKS", RANKS, at_least=64, at_most=1024, multiple_of=64, because=hosts_rule)
require("SEQUENCE", SEQUENCE, at_least=128, at_most=4096, because="shorter ones are no load, and 24 GiB hold no longer")
TOLD = (RANKS, SEQUENCE) == (1024, 2048)  # the values that the text speaks of
BUDGET_GIB = checks.BUDGET_GIB

# %% [markdown]
# ## 1. What has to fit? ({minutes} minutes)
#
# Llama 2 7B has 6.74 billion parameters. `train.py` keeps each of them in float32, with its gradient and the two
# running means of Adam, and FSDP shards all four over the GPUs.
#
# Commit: how many GiB is this state? And how many GPUs with 24 GiB would hold it, if nothing else needed room?

# %% tags=["commit"]
mine_state = commit(state_gib=None, gpus=None)
### BEGIN SOLUTION
mine_state = commit(state_gib=6.74e9 * 16 / GIB, gpus=math.ceil(6.74e9 * 16 / (24 * GIB)))
### END SOLUTION

# %%
STATE_BYTES = 16 * LLAMA_2_7B.parameters
state = {"state_gib": STATE_BYTES / GIB, "gpus": math.ceil(STATE_BYTES / (BUDGET_GIB * GIB))}
plots.comparison_table(state, yours=mine_state, tolerance=0.01, column="theory")

# %% [markdown]
# Five GPUs would hold the state. No one trains it on five, because activations, gathered layers and buffers need room
# as well.
#
# *Takeaway: with Adam in float32 the state takes 16 bytes a parameter. What comes on top depends on the program, so let
# it tell.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# The process group `"fake"` returns from each collective at once and moves nothing.
# `FakeTensorMode` makes tensors with a shape and a dtype, but without memory. And a tracker adds up what the tensors
# would hold. The next cell is rank 0 of 1024, which shards eight layers of 256 MiB with FSDP2.
#
# Commit: of how many MiB is a rank's shard of all the layers? And how many tensors of 256 MiB, a whole layer each,
# does the rank hold at its peak? As in lab 2, one layer is gathered ahead while another computes its gradient, and the
# gradient of a third is still being reduced.

# %% tags=["commit"]
mine_fake = commit(shard_mib=None, whole_layers=None)
### BEGIN SOLUTION
mine_fake = commit(shard_mib=8 * 256 / 1024, whole_layers=2)
### END SOLUTION

# %% tags=["script"]
# %%torchrun -n 1 --name by_hand
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # lets collectives take tensors without memory
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
mesh = init_device_mesh("cpu", (1024,))
with FakeTensorMode():
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(2):  # the first step makes Adam's running means, the second is like all others
        with FSDPMemTracker(model, optimizer) as tracker:
            model(torch.randn(16, 8192)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
for name, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items():
    print(f"{getattr(name, 'value', name):16} {size / 2**20:9.1f} MiB")
dist.destroy_process_group()

# %%
lines = [line for line in by_hand.ranks[0].log().splitlines() if line.endswith("MiB") and "Total" not in line]
sizes_mib = {line.rsplit(None, 2)[0].strip(): float(line.split()[-2]) for line in lines}
whole_layers = sum(255 < size < 258 for size in sizes_mib.values())
peak_parts = {"shard_mib": sizes_mib["Sharded Param"], "whole_layers": whole_layers}
plots.comparison_table(peak_parts, yours=mine_fake, tolerance=0.02, column="tracked")

# %% [markdown]
# *The shard is as small as 1024 ranks make it, but four whole layers are there at the peak:*
#
# | the tracker's name | what it is |
# |---|---|
# | `Unsharded Param` | the layer whose backward pass runs, gathered |
# | `All Gather` | the buffer with the layer whose backward pass runs next, gathered ahead |
# | `Temp` | the gradient that this backward pass makes |
# | `Reduce Scatter` | the buffer with the gradient of the layer whose backward pass ran just before |
#
# Four of the imports are private to PyTorch and may change, so labkit keeps them behind one function,
# `labkit.simulate(program, world_size=…)`, which plays rank 0 and also counts what is sent. It takes a plain script that
# knows nothing of labkit, such as this one:

# %%
import torch
import torch.distributed as dist
from torch import Tensor, nn

Code(filename=CLIPS, language="python")

# %%
try:
    labkit.simulate(CLIPS, world_size=RANKS)
except labkit.RankFailed as error:
    refused = error.message
    print(refused.removeprefix(f"{CLIPS.parent}/"))

# %% [markdown]
# *Computing with tensors is no problem, and asking for a value is*, because a simulated tensor has none.
#
# ### Exercise 1: a loop that can be simulated (•, {minutes} minutes)
#
# Write `train` of `clips.py` so that it can be simulated and trains the same. Tensors instead of floats may be returned.
# The check compares weights and losses on two real ranks, and then simulates one of 1024.
#
# <details><summary>Hint 1</summary>
#
# Two lines ask for a value, and the simulation stopped at the first.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A branch that only chooses a factor can become a computation of the factor. By what is the gradient divided if its
# norm is at most 1?
#
# </details>


# %%
def train(model: nn.Linear, batches: list[Tensor]) -> list[Tensor]:
    ### BEGIN SOLUTION
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        norm = model.weight.grad.norm()
        model.weight.grad.div_(norm.clamp(min=1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
    ### END SOLUTION


# %%
checks.train(train)

# %% [markdown]
# *Takeaway: a simulated rank is the real program with a fake process group and fake tensors, so it must not ask for
# values. One process is enough for a thousand ranks, whose number only changes the size of a shard.*
#
# ## 3. Is it true? ({minutes} minutes)
#
# Read the program's `main`, and look for four things: what a unit of FSDP is, what the mesh looks like, what
# `shard_over` does, and in which dtype parameters are gathered.

# %%
Code(filename=TRAIN, language="python")

# %% [markdown]
# <details><summary>What you should have found</summary>
#
# Each block is a unit, and the root has embedding, last norm and output layer. The mesh is a line of all ranks. With
# `shard_over` it has two axes: a group of that many neighbours shares one copy of the model, and the groups hold the
# same (HSDP). Parameters are gathered in bfloat16, and gradients are reduced in float32. `DecoderModel` is an ordinary
# Llama: its attention is `scaled_dot_product_attention`, which keeps no matrix of scores, and its logits are bfloat16.
# Three names are labkit's and train nothing: `here.steps(…, track=…)` measures, `ALIKE` says which field counts equal
# blocks, and `run_main` reads the command line.
#
# </details>
#
# `labkit.simulate` also takes any field of the program's `Config`, such as `batch=2`. It returns what `labkit.run`
# returns: `result.summary()` shows all that was recorded, and `result.value("peak_total_bytes")` the bytes of all
# tensors at the rank's peak.
#
# Let two real ranks train a small model here, and simulate rank 0 twice: as one of two, and as one of many, with as
# many sequences a rank.

# %% tags=["nbval-ignore-output"]
small = {"model": "tiny", "layers": 3, "sequence": 64, "batch": 16}
real = labkit.run(TRAIN, nproc=2, device="cpu", **small)
one_of_two, one_of_many = (labkit.simulate(TRAIN, world_size=size, **small) for size in (2, RANKS))
seen = {"2 real": real, "2 simulated": one_of_two, f"{RANKS} simulated": one_of_many}
table = pandas.DataFrame({label: result.summary().loc[0] for label, result in seen.items()})
kinds = [f"peak_{kind}_bytes" for kind in ("total", "parameter", "optstate", "activation")]
kinds += ["all_gather_count", "reduce_scatter_count", "all_gather_bytes"]
counted = table.loc[kinds].astype(int)
counted.map("{:,}".format)

# %% [markdown]
# *Every number of the first two columns is equal.* The program is the same, and what it allocates and sends does not
# depend on the values in its tensors. In the third column activations are the same and shards small, though not 512
# times as small: rank 0 keeps at least a row of each weight.
#
# *Takeaway: simulated tensors are those of real CPU ranks, to the byte. A GPU keeps some others, and its allocator
# takes more than the tensors need.*

# %% tags=["claim"]
claim("6.74 billion, five GPUs", (round(LLAMA_2_7B.parameters / 1e7), state["gpus"]) == (674, 5))
claim(
    "the shard is as small as 1024 ranks make it",
    peak_parts["shard_mib"] == round(8 * (8192**2 + 8192) * 4 / 2**30, 1),
)
claim("four whole layers are there", peak_parts["whole_layers"] == 4)
four = ("Unsharded Param", "All Gather", "Temp", "Reduce Scatter")
claim("they are those of the table", all(255 < sizes_mib[name] < 258 for name in four))
recorded = [
    name for name in table.index if name.endswith(("_bytes", "_count")) and not name.startswith(("gpu_", "resident"))
]
both = table.loc[recorded, ["2 real", "2 simulated"]].dropna().astype(int)
claim("every number of the first two columns is equal", both["2 real"].equals(both["2 simulated"]))
claim("there are some", (both["2 real"] > 0).sum() > 10)
claim("the activations are the same", counted.loc["peak_activation_bytes"].nunique() == 1)
claim("the script stops at the branch", "if norm > 1" in refused)
shards = counted.loc["peak_parameter_bytes"]
claim("the shards have become small", shards.iloc[2] < shards["2 real"] / 4)

# %% [markdown]
# ## 4. When is the most held? ({minutes} minutes)
#
# Now Llama 2 7B itself, its first 8 of 32 blocks, on 64 GPUs with one sequence each. `checkpointing="full"` keeps only
# what goes into each block, and computes the rest again in the backward pass.
#
# Commit: what is the peak of a rank in GiB, without checkpointing and with it? A block has 202 million parameters, and
# the root 262 million. A block keeps 396 MiB for its backward pass. If it is recomputed it keeps 16 MiB, and the 396
# are there for one block at a time. Dashed lines are your bets.

# %% tags=["commit"]
mine_peaks = commit(none_gib=None, full_gib=None)
### BEGIN SOLUTION
mine_peaks = commit(none_gib=5, full_gib=3)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
eight = {"layers": 8, "sequence": SEQUENCE}
kept_all, recomputed = (labkit.simulate(TRAIN, world_size=64, checkpointing=what, **eight) for what in ("none", "full"))
runs = {"all kept": kept_all, "recomputed": recomputed}
peaks = dict(zip(mine_peaks, (run.value("peak_total_bytes") / GIB for run in runs.values()), strict=True))
display(plots.comparison_table(peaks, yours=mine_peaks, tolerance=0.1, column="simulated"))
figure, curves = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(8, 6), layout="constrained")
for curve, (title, run), bet_gib in zip(curves, runs.items(), mine_peaks.values(), strict=True):
    _ = simulate_plots.memory_curve(run, ax=curve)
    _ = curve.set_title(f"8 blocks on 64 GPUs, {title}", loc="left", fontsize=10)
    _ = curve.axhline(bet_gib, **style.PREDICTION_STYLE) if bet_gib else None
_ = curves[0].set_ylim(0, 1.2 * max(bet_gib or 0 for bet_gib in [*peaks.values(), *mine_peaks.values()]))
_ = plots.memory_comparison({}, runs, unit="GiB")

# %% [markdown]
# *Above, each block adds what its backward pass needs. Below, a block adds its input alone, and each tooth of the
# backward pass is a block that is computed again.* The tracker counts what is computed again as temporary: at the peak
# 176 of the 396 MiB are left. So activations are nearly half of the upper peak, and less than a twentieth of the lower
# one. Both peaks come in the last block but one. Why there?
#
# ### Exercise 2: the fullest block (••, {minutes} minutes)
#
# The model has `blocks` blocks and a root, of so many parameters each, sharded over all `ranks`. Everything is
# recomputed, so a block keeps `kept_bytes`, its input, until its own backward pass ends. Return the number of the
# block, counted from 0, in whose backward pass a rank holds the most, and how many bytes. Count these rows of section
# 2. `train.py` tells how many bytes a parameter each one takes.
#
# - `Sharded Param`, `OptState`: shards of all blocks and of the root.
# - `Sharded Grad`: shards of the blocks that are through.
# - `Unsharded Param`: the whole block, and the whole root, which begins and ends both passes.
# - `All Gather`: the whole block whose turn is next.
# - `Reduce Scatter`: the whole block that was through last; its shard counts above, too.
# - `Activation`: inputs of the block and of those whose turn comes later.
#
# Leave out `Temp`, whose size follows the order of PyTorch's operations: it has what is computed again, and gradients
# that are not yet reduced.
#
# <details><summary>Hint 1</summary>
#
# In which dtype does `train.py` keep parameters, gather them, and reduce gradients? The backward pass begins with the
# last block, when no other block's gradient is being reduced, and ends with block 0, when none is left to gather ahead.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Write the bytes of one block as a sum of four terms: shards, what is gathered, what is being reduced, and what blocks
# keep. Then compare all blocks.
#
# </details>


# %%
def fullest_block(
    blocks: int, block_parameters: int, root_parameters: int, ranks: int, kept_bytes: int
) -> tuple[int, float]:
    ### BEGIN SOLUTION
    parameters = blocks * block_parameters + root_parameters

    def held_bytes(block: int) -> float:
        shards = 12 * parameters + 4 * block_parameters * (blocks - 1 - block)
        gathered = 2 * (root_parameters + block_parameters * (1 + (block > 0)))
        reduced = 4 * block_parameters * (block < blocks - 1)
        return shards / ranks + gathered + reduced + kept_bytes * (block + 1)

    block = max(range(blocks), key=held_bytes)
    return block, held_bytes(block)
    ### END SOLUTION


# %%
checks.fullest_block(fullest_block)

# %% [markdown]
# *On 64 GPUs the last block but one is the fullest, and on 8 the second.* From block to block `kept_bytes` are freed,
# 16 MiB here, while the shard of a gradient comes, 12 MiB on 64 GPUs and 97 on 8. So in deeper models the peak lies at
# one of these two, too.
#
# Does it fit? A GPU's memory holds more than tensors: the allocator takes it in large pieces, and CUDA's context,
# NCCL's buffers and the workspace of cuBLAS need room. `memory_fit(result, budget_gib)` models the allocator, and adds
# 1.8 GiB for all else:

# %%
for label, result in runs.items():
    print(f"{label}: {memory_fit(result, BUDGET_GIB)}")

# %% [markdown]
# For 5.50 GiB of tensors the allocator reserves 7.27, and 4.62 for 3.29, because a piece that was freed serves only
# tensors that are no larger. With all 32 blocks it will reserve 1.7 to 4.5 GiB more than the tensors. On an H100 it
# reserved 2 to 11 % more than this model says ([docs/simulation.md](../docs/simulation.md)), so leave a tenth of the
# budget free.
#
# *Takeaway: look for the moment and the kind of the peak before you change anything.*

# %% tags=["claim"]
parts = [run.value("peak_activation_bytes") / run.value("peak_total_bytes") for run in (kept_all, recomputed)]
claim("activations are nearly half of the upper peak", 0.4 < parts[0] < 0.5, where=TOLD)
claim("and less than a twentieth of the lower one", parts[1] < 0.05, where=TOLD)
seventh = ("backward", "blocks.6")
reserved = [(run.value("peak_total_bytes"), run.value("gpu_reserved_bytes")) for run in (kept_all, recomputed)]
reserved_gib = [[f"{size / GIB:.2f}" for size in pair] for pair in reserved]
claim("5.50 and 7.27 GiB, 3.29 and 4.62", reserved_gib == [["5.50", "7.27"], ["3.29", "4.62"]], where=TOLD)
block_mib = [block_memory_table(run).loc["blocks.0", "activation"] / 2**20 for run in (kept_all, recomputed)]
claim("396 MiB, or 16", [round(size) for size in block_mib] == [396, 16], where=TOLD)
claim("202 million parameters", round(LLAMA_2_7B.block_parameters / 1e6) == 202)
again_mib = (recomputed.value("peak_temp_bytes") - kept_all.value("peak_temp_bytes")) / 2**20
left_mib = block_memory_table(kept_all).loc["blocks.6", "activation"] / 2**20
claim("176 of the 396 MiB are left", round(again_mib) == round(left_mib) == 176, where=TOLD)
gradient_mib = [4 * LLAMA_2_7B.block_parameters / ranks / 2**20 for ranks in (64, 8)]
claim("12 MiB on 64 GPUs and 97 on 8", [round(size) for size in gradient_mib] == [12, 97])
claim("both in the last block but one", {*map(peak_phase_and_block, (kept_all, recomputed))} == {seventh}, where=TOLD)

# %% [markdown]
# ## 5. What do more GPUs change? ({minutes} minutes)
#
# A rank holds its share of a whole, `shared_bytes`: parameters, gradients and Adam's means. The rest is its own part,
# `own_bytes`, such as activations and gathered units, whatever the number of ranks.
#
# ### Exercise 3: the smallest cluster (•, {minutes} minutes)
#
# Hosts have 8 GPUs, and a rank may hold `budget_bytes`. Return the fewest hosts on which every rank finds room, or None
# if no number of hosts is enough.
#
# <details><summary>Hint 1</summary>
#
# Which part of the budget is left for the share? What if nothing is left?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Write down what must hold on n hosts, and solve it for n.
#
# </details>


# %%
def fewest_hosts(shared_bytes: float, own_bytes: float, budget_bytes: float) -> int | None:
    ### BEGIN SOLUTION
    room = budget_bytes - own_bytes
    if room <= 0:
        return None
    return max(1, math.ceil(shared_bytes / (8 * room)))
    ### END SOLUTION


# %%
hosts_verdict = checks.fewest_hosts(fewest_hosts)
hosts_verdict

# %% [markdown]
# To find the rank's own part, simulate one of very many ranks, whose share is small. The model need not be simulated
# whole, because each further block adds the same to the peak. We take 4 and 6 blocks with one sequence and nothing
# recomputed, continue the line to 8 for a test, and then to all 32.

# %% tags=["nbval-ignore-output"]
few = {blocks: labkit.simulate(TRAIN, world_size=RANKS, layers=blocks, sequence=SEQUENCE) for blocks in (4, 6, 8)}


def continued_bytes(blocks: int) -> float:
    """The peak on the line through the peaks with 4 and with 6 blocks."""
    of_four, of_six = (few[count].value("peak_total_bytes") for count in (4, 6))
    return of_six + (blocks - 6) * (of_six - of_four) / 2


print(f"8 blocks: {continued_bytes(8):,.0f} bytes continued, {few[8].value('peak_total_bytes'):,} simulated")
own_bytes = continued_bytes(32) - 12 * LLAMA_2_7B.parameters / RANKS  # few gradients exist at the peak
reserve_bytes = memory_fit(kept_all).overhead_bytes
count_hosts = fewest_hosts if hosts_verdict.ok else theory.fewest_hosts
hosts = count_hosts(STATE_BYTES, own_bytes, BUDGET_GIB * GIB - reserve_bytes)
sizes = {"a rank's own": own_bytes, "the state of all": STATE_BYTES, "not tensors": reserve_bytes}
print(", ".join(f"{name}: {size / GIB:.1f} GiB" for name, size in sizes.items()), f"-> {hosts} hosts")

# %% [markdown]
# *The continued peak is equal to the byte*, because the peak stays at the same moment of the step. But the rule leaves
# out what the allocator takes on top of tensors. So confirm the hosts with the whole model.

# %% tags=["nbval-ignore-output"]
confirmed = labkit.simulate(TRAIN, world_size=8 * hosts, sequence=SEQUENCE) if hosts else None
if confirmed is None:
    print("the rule says that no number of hosts is enough, so there is nothing to confirm")
else:
    tensors_gib = confirmed.value("peak_total_bytes") / GIB
    print(f"{hosts} hosts, {tensors_gib:.1f} GiB of tensors: {memory_fit(confirmed, BUDGET_GIB)}")

# %% [markdown]
# *Two hosts fit by this model, with 0.8 GiB to spare.* The peak comes early in the backward pass, when hardly any
# gradient has been made, so a rank holds 12 bytes of each parameter of its share, not 16. But 3 % of the budget is not
# a tenth. So try one step on two real hosts, or take three.
#
# *Takeaway: more GPUs shrink a rank's share and leave its own part as it is. If the own part alone is too large, no
# cluster is large enough.*

# %% tags=["claim"]
claim("the continued peak is equal to the byte", continued_bytes(8) == few[8].value("peak_total_bytes"))
claim(
    "the function says what labkit's says",
    hosts == theory.fewest_hosts(STATE_BYTES, own_bytes, BUDGET_GIB * GIB - reserve_bytes),
)
if TOLD and confirmed is not None:
    claim("two hosts are confirmed", hosts == 2 and bool(memory_fit(confirmed, BUDGET_GIB)))
    claim("with 0.8 GiB to spare", 0.75 < memory_fit(confirmed, BUDGET_GIB).margin_bytes / GIB < 0.85)
    more_gib = (confirmed.value("gpu_reserved_bytes") - confirmed.value("peak_total_bytes")) / GIB
    claim("with all 32 blocks 1.7 to 4.5 GiB", 1.7 < more_gib < 4.5)
    twelve = own_bytes + 12 * LLAMA_2_7B.parameters / 16
    claim("12 bytes of each parameter", abs(confirmed.value("peak_total_bytes") / twelve - 1) < 0.01)

# %% [markdown]
# ## 6. Choose ({minutes} minutes)
#
# `labkit.plan` takes lists for any field, simulates every combination, and estimates how long its step takes:
# `labkit.plan(TRAIN, world_size=64, hardware="h100-8x", budget_gib=24, batch=[1, 2])`. Hosts of `"h100-8x"` have 8
# H100, linked by NVLink, and a network card for each.
#
# The result's `fitting_rows` are a pandas table of the candidates that fit, with the numbers `candidate`, `batch`,
# `step_s` and `needed_bytes`. `result.candidates[number].params` are all settings of a candidate.
#
# ### Exercise 4: the quickest that fits (•, {minutes} minutes)
#
# `choices` maps fields of the program to a value or a list of values; only `sequence` is never a list. Plan all
# combinations on `hosts`. Of those that leave a tenth of `budget_gib` free, return the settings that train the most
# tokens in a second, a candidate's `params`, or None if there are none.
#
# <details><summary>Hint 1</summary>
#
# The table is sorted by the time of a step. Do all candidates train equally many tokens in one?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A column of pandas can be divided by another, and `.idxmax()` gives the label of its largest value, if there is one.
#
# </details>


# %%
def quickest(
    program: Path, ranks: int, hosts: str | Hardware, budget_gib: float, choices: dict[str, Any]
) -> dict[str, Any] | None:
    ### BEGIN SOLUTION
    found = labkit.plan(program, world_size=ranks, hardware=hosts, budget_gib=0.9 * budget_gib, **choices)
    rows = found.fitting_rows
    if rows.empty:
        return None
    best = rows.loc[(rows["batch"] / rows["step_s"]).idxmax()]
    return found.candidates[best["candidate"]].params
    ### END SOLUTION


# %%
checks.quickest(quickest)

# %% [markdown]
# Now nine ways to train the whole model on the 64 GPUs. Eight recompute nothing or everything, with one sequence a GPU
# or four, sharded over all GPUs or the 8 of a host. The ninth has one sequence, all GPUs, and *selective*
# checkpointing, which keeps attention and every second GEMM, expensive to compute again.
#
# The figure divides the time by the batch. Low marks are quick, and filled ones fit. A grey line says how far off a
# time may be. Most of that error is shared, because all nine have the same GPUs and network, so their order is safer
# than the lines look.
#
# Commit: how many of the nine fit into 24 GiB? And does the one of these that trains the most tokens in a second take
# one sequence a GPU or four?

# %% tags=["commit"]
mine_ways = commit(fitting=None, sequences=None)
### BEGIN SOLUTION
mine_ways = commit(fitting=6, sequences=1)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
ways = {"checkpointing": ["none", "full"], "batch": [1, 4], "shard_over": [None, 8]}
cluster = {"world_size": 64, "hardware": "h100-8x", "whole": None, "sequence": 2048}  # None: simulate all blocks
eight_ways = labkit.plan(TRAIN, **cluster, **ways)
ninth = labkit.plan(TRAIN, **cluster, checkpointing="selective", batch=1, shard_over=None)
found = replace(eight_ways, candidates=[*eight_ways.candidates, *ninth.candidates])
rows = found.with_limits(budget_gib=BUDGET_GIB).frame
most = (rows["batch"] / rows["step_s"])[rows["fits"]].idxmax()
seen_ways = {"fitting": rows["fits"].sum(), "sequences": rows.loc[most, "batch"]}
display(plots.comparison_table(seen_ways, yours=mine_ways, column="estimated"))
parts_gib = {"tensors_gib": rows["peak_bytes"] / GIB, "needed_gib": rows["needed_bytes"] / GIB}
shown = rows[["checkpointing", "batch", "shard_over", "fits", "peak_in", "step_s"]].assign(**parts_gib)
display(shown.sort_values("needed_gib", ignore_index=True).round({"tensors_gib": 1, "needed_gib": 1, "step_s": 3}))
CandidateExplorer(found, budget_gib=int(BUDGET_GIB), per="batch")

# %% [markdown]
# *All six that fit leave a tenth free, the last one barely.* Groups of 8 hold an eighth of the state instead of a 64th.
# With nothing recomputed the peak comes when few gradients are made, and parameters and Adam's means take over 8 GiB
# more. With everything recomputed the groups' peak comes in block 1, when nearly all gradients are there, too, and
# takes 9 to 11 GiB more.
#
# *Takeaway: on this network recomputing everything costs a quarter of the time and selective checkpointing an eighth,
# sharding over all GPUs costs none, and a larger batch gains a tenth or more. So shard first, then shrink the batch,
# and recompute last.*
#
# ## 7. What does the network change? ({minutes} minutes)
#
# The fitting way with the shortest step shards over all 64 GPUs. A step makes 65 all-gathers: the root, with 0.262
# billion parameters, and 32 blocks, with 6.476, for the forward pass, and the blocks again for the backward pass.
# They form **rings**, in which each GPU passes on 63 of 64 shards. In each, 8 of 64 links lead to another host, through
# other cards, so an eighth of the bytes crosses hosts:
#
# (2 · 6.476 + 0.262) · 10⁹ parameters · 2 bytes · 63/64 · 1/8 = 3.25 GB from each GPU.
#
# A shard has 7 other hosts to reach, so a call waits for 7 **messages**. labkit assumes 78 µs for
# each, with NCCL's plainest protocol *Simple*, and 47.5 GB/s for a GPU's network card, 95 % of 400 Gbit/s. All calls
# take
#
# 65 · 7 · 78 µs + 3.25 GB / 47.5 GB/s = 0.035 s + 0.068 s.
#
# Commit: the row of its reduce-scatters, which form the same ring. How many calls, messages in each, and GB?

# %% tags=["commit"]
mine_row = commit(calls=None, messages=None, gb=None)
### BEGIN SOLUTION
mine_row = commit(calls=33, messages=7, gb=6.74 * 4 * 63 / 64 / 8)
### END SOLUTION

# %%
chosen_rows = rows[(rows["checkpointing"] == "none") & (rows["batch"] == 1)].set_index("candidate")
meshes = {f"shard_over {row.shard_over}": found.load_simulation(number) for number, row in chosen_rows.iterrows()}


def on_network(**slower: float) -> Hardware:
    """Return the hosts with another ``latency_us`` or ``bandwidth_share``, and NCCL with Simple alone."""
    return get_hardware("h100-8x").with_network(protocols=(SIMPLE,), **slower)


def to_other_hosts(row: pandas.Series) -> tuple[int, float]:
    """Return the messages that each call waits for, and the GB of all calls that leave a GPU's host."""
    if row["hosts"] == 1:
        return 0, 0.0
    if row["collective"] == "all_reduce":  # along a tree, up and down
        return 2 * math.ceil(math.log2(row["hosts"])), 2 * row["handed_bytes"] / 1e9
    return row["hosts"] - 1, row["wire_bytes"] * row["hosts"] / row["ranks"] / 1e9  # along a ring


sent = pandas.concat({name: link_traffic_table(run) for name, run in meshes.items()}).droplevel(1)
sent[["messages", "gb"]] = [to_other_hosts(row) for _, row in sent.iterrows()]
display(sent[["collective", "ranks", "hosts", "calls", "messages", "gb"]].round(3))
plots.comparison_table(sent.iloc[1][[*mine_row]].to_dict(), yours=mine_row, tolerance=0.02, column="estimated")

# %% [markdown]
# *Groups of 8 send 6.74 GB to other hosts instead of 6.57, in a third of the calls.* They gather inside a host. Between
# hosts each GPU sums its eighth of the float32 gradients along a tree, three levels up and three down, which makes 6
# messages and 2 · 6.74 · 10⁹ · 4 bytes / 8 = 6.74 GB.
#
# What is sent hides only behind the computation of its own pass:
#
# - forward, 0.09 s of it: all 64 send half of their all-gathers, groups nothing;
# - backward, 0.18 s: all 64 send the other half and the reduce-scatters, groups everything.
#
# Commit: how many GPUs share a copy in the quicker mesh, 64 or 8, with half the bandwidth? And with 600 µs a message
# instead of 78?

# %% tags=["commit"]
mine_meshes = commit(half_the_bandwidth=None, slow_messages=None)
### BEGIN SOLUTION
mine_meshes = commit(half_the_bandwidth=64, slow_messages=8)
### END SOLUTION

# %%
networks = {"as assumed": {}, "half_the_bandwidth": {"bandwidth_share": 0.5}, "slow_messages": {"latency_us": 600}}
steps = {}
for name, slower in networks.items():
    gpus = on_network(**slower)
    card = gpus.links.between
    seconds = sent["calls"] * sent["messages"] * card.alpha_s + 1e9 * sent["gb"] * card.beta_s_per_byte
    forward = (seconds / 2).where(sent["collective"] == "all_gather", 0)
    for mesh, run in meshes.items():
        step = estimate_rank_step(run, gpus).time
        steps[name, mesh] = [forward[mesh].sum(), (seconds - forward)[mesh].sum(), step.exposed_s, step.step_s]
steps = pandas.DataFrame(steps, index=["forward_s", "backward_s", "exposed_s", "step_s"]).T
display(steps.round(3))
quicker = {name: 64 if steps.loc[name, "step_s"].idxmin().endswith("None") else 8 for name in networks}
plots.comparison_table({name: quicker[name] for name in mine_meshes}, yours=mine_meshes, column="quicker")
slow_hosts = on_network(latency_us=600)  # of Exercise 5

# %% [markdown]
# The first two columns are the terms above by pass, the others labkit's estimate. **Exposed** communication,
# `exposed_s`, does not hide behind computation. *On the assumed network nearly all of it hides.* With half the
# bandwidth all 64 send for longer, 0.33 s instead of 0.30, but the forward pass hides 0.09 of it, so groups expose
# more. *At 600 µs messages decide*: 98 · 7 of them take 0.41 s, and the 33 · 6 of groups 0.12 s. Groups also compute
# 0.01 s longer, mostly because Adam updates a shard 8 times as large.
#
# ### Exercise 5: your choice (••, {minutes} minutes)
#
# Your 64 GPUs have the network with 600 µs a message, and you may use 40 GiB of each, with a tenth left free. Return
# your `shard_over`, `batch` and `checkpointing` for sequences of 2048 tokens. A group may also span two or four hosts.
# By the estimate your choice has to train at least 97 % as many tokens in a second as the best that labkit knows.
#
# Calculate which ways fit and how many messages they wait for. `quickest` may search the few left, ten seconds each.
#
# <details><summary>Hint 1</summary>
#
# Which of the three decides how many messages a step waits for, which how much computation there is to hide them
# behind, and which cost memory? Count the messages of each mesh as above.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The table of nine ways tells what a sequence adds and what checkpointing costs, section 5 what a smaller group adds.
# A group of h hosts waits for 98 · (h - 1) messages of its rings, and 33 times for a tree over the 8 / h groups. Keep
# the few ways that fit. Then let `quickest` search lists of these values on `slow_hosts`, with `"sequence": 2048` and
# `"whole": None`, which simulates all blocks.
#
# </details>


# %%
def chosen() -> dict[str, Any]:
    ### BEGIN SOLUTION
    return {"shard_over": 32, "batch": 2, "checkpointing": "none"}
    ### END SOLUTION


# %%
choice_verdict = checks.chosen(chosen)
choice_verdict

# %% [markdown]
# Its neighbours, in half a minute:

# %% tags=["nbval-ignore-output"]
neighbours = {}
if choice_verdict.ok:
    group, batch, kept_by = (chosen()[name] or 64 for name in checks.NAMES)
    groups = [(each, batch, kept_by) for each in (group, group // 2, min(64, 2 * group))]
    neighbours = {way: checks.simulated_choice(*way) for way in [*groups, (group, 2 * batch, "selective")]}
near = pandas.DataFrame.from_dict(neighbours, orient="index", columns=["needed_gib", "tokens_per_s"])
near.assign(leaves_a_tenth=near["needed_gib"] <= 36).round(1)

# %% [markdown]
# *Half the group needs too much, and is no quicker. Twice the group waits for more messages, and recomputing costs more
# than a larger batch gains.*
#
# *Takeaway: where messages are slow, shard over fewer GPUs if memory lets you, and let a larger batch hide them.*

# %% tags=["claim"]
network = get_hardware("h100-8x").links.between
claim("78 µs, and 95 % of 400 Gbit/s", (network.alpha_s, network.beta_s_per_byte) == (78e-6, 1e-9 / (0.95 * 50)))
tensors = {(row.checkpointing, row.batch, row.shard_over): round(row.peak_bytes / GIB, 1) for row in rows.itertuples()}
more = {(how, many): tensors[how, many, 8] - tensors[how, many, None] for how, many, over in tensors if over}
late = {(row.checkpointing, row.batch) for row in rows.itertuples() if row.shard_over and row.peak_in.endswith("s.1")}
fitting_gib = rows.loc[rows["fits"], "needed_bytes"] / GIB
claim("the bet", seen_ways == {"fitting": 6, "sequences": 1})
claim("all six leave a tenth free", fitting_gib.le(0.9 * BUDGET_GIB).sum() == len(fitting_gib) == 6)
claim("the last one barely", fitting_gib.max() > 0.87 * BUDGET_GIB)
claim("the groups' peak moves to the end", late == {("full", 1), ("full", 4)})
claim("over 8 GiB more", all(8.25 < size < 8.45 for way, size in more.items() if way not in late))
claim("more where it is late", all(9 < more[way] < 11 for way in late))

# %% tags=["claim"]
alike = not neighbours or group != 32 or near["tokens_per_s"].iloc[1] <= near["tokens_per_s"].iloc[0]
claim("half of 32 is no quicker", alike)
claim("the groups win at 600 µs alone", [*quicker.values()] == [64, 64, 8])
claim("Exercise 5 has these hosts", slow_hosts == checks.slow_hosts())
shown = {(mesh, each["collective"]): each for mesh, each in sent.iterrows()}
gathered, reduced = shown["shard_over None", "all_gather"], shown["shard_over None", "reduce_scatter"]
summed = shown["shard_over 8", "all_reduce"]
claim("the row in question is the second", sent.iloc[1].equals(reduced))
claim("65, 33 and 33 calls", [each["calls"] for each in (gathered, reduced, summed)] == [65, 33, 33])
claim("98 calls, and a third", round((65 + 33) / 33) == 3)
claim("7, 7 and 6 messages", [each["messages"] for each in (gathered, reduced, summed)] == [7, 7, 6])
inside = sent[sent["link"] == "inside a host"]
claim("the others of groups stay inside", [*inside["collective"]] == ["all_gather", "reduce_scatter"])
claim("and send nothing to other hosts", not inside[["messages", "gb"]].any(axis=None))
claim("an eighth crosses hosts", gathered["between_hosts_bytes"] == gathered["wire_bytes"] / 8 == 1e9 * gathered["gb"])
of_blocks = 32 * LLAMA_2_7B.block_parameters
claim("6.476 and 0.262", [round(each / 1e6) for each in (of_blocks, LLAMA_2_7B.root_parameters)] == [6476, 262])
claim("3.25 GB by hand", round((2 * 6.476 + 0.262) * 2 * 63 / 64 / 8, 2) == round(gathered["gb"], 2) == 3.25)
claim("6.74 GB by hand", round(2 * 6.74 * 4 / 8, 2) == round(summed["gb"], 2) == 6.74)
claim("6.57 GB", round(gathered["gb"] + reduced["gb"], 2) == 6.57)
by_hand = 65 * 7 * 78e-6, 3.25 / 47.5
claim("0.035 s and 0.068 s", [round(each, 3) for each in by_hand] == [0.035, 0.068])

# %% tags=["claim"]
waiting = (sent["calls"] * sent["messages"]).groupby(level=0, sort=False).sum()
claim("0.41 s of messages, or 0.12", [*(600e-6 * waiting).round(2)] == [0.41, 0.12])
claim("98 · 7 and 33 · 6", [*waiting] == [98 * 7, 33 * 6])
for name, slower in networks.items():
    gpus = on_network(**slower)
    for mesh, run in meshes.items():
        calls = link_traffic_table(run, gpus)
        more_s = calls.loc[calls["link"] == "between hosts", "seconds"].sum() - steps.loc[(name, mesh)].iloc[:2].sum()
        claim("labkit, which may take a ring, estimates as long between hosts, within 0.03 s", abs(more_s) < 0.03)
claim("nearly all of it hides", steps.loc["as assumed", "exposed_s"].max() < 0.02)
half = steps.loc["half_the_bandwidth"]
told = [[*(half["forward_s"] + half["backward_s"]).round(2)], [*half["forward_s"].round(2)]]
claim("0.33 s instead of 0.30, 0.09 of them in the forward pass", told == [[0.33, 0.30], [0.09, 0]])
claim("groups expose more", half["exposed_s"].idxmax() == "shard_over 8")
by_pass = {}
for mesh, run in meshes.items():
    bars = [bar for bar in estimate_rank_step(run, on_network()).time.bars if bar.stream == "compute"]
    passes = "forward", "backward", "optimizer"
    by_pass[mesh] = [sum(bar.dur_s for bar in bars if bar.name.split()[0] == each) for each in passes]
forward_s, backward_s, _ = zip(*by_pass.values(), strict=True)
claim("computes 0.09 s and 0.18 s", {round(s, 2) for s in forward_s + backward_s} == {0.09, 0.18})
longer = [own - all_64 for all_64, own in zip(*by_pass.values(), strict=True)]
claim("0.01 s longer, mostly Adam", round(sum(longer), 2) == 0.01 and longer[2] > sum(longer) / 2)

# %% tags=["claim"]
speeds = {(row.checkpointing, row.batch, row.shard_over): row.batch / row.step_s for row in rows.itertuples()}
costs = [speeds["none", batch, over] / speeds["full", batch, over] for batch in (1, 4) for over in (None, 8)]
claim("recomputing everything costs about a quarter", all(1.2 < each < 1.3 for each in costs))
claim("selective checkpointing an eighth", 1.11 < speeds["none", 1, None] / speeds["selective", 1, None] < 1.15)
gains = [speeds[saved, 4, over] / speeds[saved, 1, over] for saved in ways["checkpointing"] for over in (None, 8)]
claim("four sequences instead of one gain 10 to 17 %", 1.095 < min(gains) < max(gains) < 1.18)
taken_gib = (rows["reserved_bytes"] - rows["peak_bytes"]) / GIB
claim("the allocator takes 1.7 to 4.5 GiB more", [round(taken_gib.min(), 1), round(taken_gib.max(), 1)] == [1.7, 4.5])
claim("sharding over all costs no time", all(speeds[how, 1, None] > speeds[how, 1, 8] for how in ways["checkpointing"]))
fits = {(row.checkpointing, row.batch, row.shard_over): row.fits for row in rows.itertuples()}
claim("one sequence and nothing recomputed fits, sharded over all", fits["none", 1, None] and not fits["none", 1, 8])
claim("it beats four sequences with everything recomputed", speeds["none", 1, None] > speeds["full", 4, None])
if [*neighbours][:1] == [(32, 2, "none")]:
    claim("groups of 16 need too much, the others do not", [*(near["needed_gib"] <= 36)] == [True, False, True, True])
    claim(
        "all 64 GPUs and recomputing are slower",
        near["tokens_per_s"].iloc[2:].max() < 0.95 * near["tokens_per_s"].iloc[0],
    )

# %% [markdown]
# ## 8. Take away ({minutes} minutes)
#
# 1. One process can play one rank of a thousand. Its bytes are those of a real CPU rank.
# 2. A rank holds a share, which shrinks with the number of GPUs, and an own part, which does not.
# 3. A simulation knows bytes, calls and links. It knows no values, such as the loss, no late rank, broken card or slow
#    data loader, and no time except by a model.
#
# | if | then |
# |---|---|
# | activations are most of the peak | take fewer sequences, or recompute |
# | the state is most of the peak | shard over more GPUs |
# | the own part alone exceeds the budget | recompute, or take fewer sequences; more GPUs do not help |
# | it fits with less than a tenth to spare | try so many GPUs for an hour before you rent them for a month |

# %% tags=["summary"]
lab_found = {
    "bytes between a real peak and a simulated one": int(counted.loc["peak_total_bytes"].diff().iloc[1]),
    "bytes between a continued peak and the whole": round(continued_bytes(8) - few[8].value("peak_total_bytes")),
    "hosts by the rule, and whether they fit": f"{hosts}, {bool(confirmed and memory_fit(confirmed, BUDGET_GIB))}",
    "of nine ways fit into 24 GiB": int(rows["fits"].sum()),
}
pandas.DataFrame.from_dict(lab_found, orient="index", columns=["seen"])

# %% [markdown]
# **Ask yourself**
#
# <details><summary>1. A simulation of 1024 ranks takes about as long as one of 8. Why?</summary>
#
# One rank runs in either. The number of ranks only changes the sizes of its shards and what it hands to collectives.
#
# </details>
#
# <details><summary>2. You shard over twice as many GPUs, and the peak hardly falls. What do you do?</summary>
#
# Most of it is the rank's own. Recompute activations, or take a smaller batch or smaller units.
#
# </details>
#
# <details><summary>3. Of two plans, one has the shorter step. Is it the quicker one?</summary>
#
# Only if both train equally many tokens in a step.
#
# </details>
#
# <details><summary>4. The simulation says that it fits, with 1 GB to spare. Do you rent?</summary>
#
# Not yet, although the two hosts of section 5 had no more. The reserve for CUDA's context and NCCL is a round number,
# and fragments depend on the order of requests. Section 4 says by how much the allocator may exceed its model.
#
# </details>
#
# <details><summary>5. Why does a program with <code>loss.item()</code> stop, and one with <code>loss.detach()</code> not?</summary>
#
# `item` asks for the value, and there is none. `detach` returns another tensor, which has a shape and needs no value.
# Skip `item` where the environment variable `LABKIT_SIMULATED` is set.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Rajbhandari et al., *ZeRO*, 2020: memory by ranks. <https://arxiv.org/abs/1910.02054>
# - Zhao et al., *PyTorch FSDP*, 2023. <https://arxiv.org/abs/2304.11277>
# - Chen et al., *Training deep nets with sublinear memory cost*, 2016: recomputing. <https://arxiv.org/abs/1604.06174>
# - PyTorch: FakeTensor <https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html>
# - In labkit: `labkit_simulate/run_rank.py`, what a simulated rank finds itself in; `labkit_simulate/planner.py`;
#   [docs/simulation.md](../docs/simulation.md), what else can be asked.
#
# </details>
#
# **Next**: simulate a program of your own: `labkit.simulate("train.py", world_size=64)`. Lab 6b asks how long its step
# takes.
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("simulation")
