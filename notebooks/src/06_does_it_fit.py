# %% [markdown]
# # Lab 6. Does it fit?
#
# A wrong guess on a cluster is paid by the hour: the job waits in a queue, starts, and runs out of memory. In this lab
# one process plays one rank of a thousand. It runs the real program, but its tensors have no memory, and its
# collectives send nothing.
#
# The example of this lab and of lab 6b is `train.py`, a program that you have not seen, which trains Llama 2 with 7
# billion parameters. You are given 64 H100, and another job leaves you 24 GiB of each.
#
# After this lab you can
#
# - run a PyTorch program as one rank of many, without the others and without a GPU;
# - say at which moment of a step a rank holds the most, and what more GPUs can do about it;
# - find the smallest cluster on which a model fits, and confirm it before you pay;
# - search mesh, batch and checkpointing for what fits and is quick, and ask whether a slower network changes the answer;
# - name what no simulation can know.
#
# You need labs 0 and 2. The lab takes about {core_minutes} minutes, and its exercises are marked • (easy) or ••
# (harder). Cells that simulate take some seconds, and one in section 6 about two minutes on two cores.
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas
from IPython.display import Code, display
from matplotlib import pyplot

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.plots import style
from labkit_course.checks import simulation as checks
from labkit_course.checks.claims import claim, commit, prediction_text
from labkit_course.plan_explorer import CandidateExplorer
from labkit_simulate import plots as simulate_plots
from labkit_simulate.block_memory import block_memory_table, peak_phase_and_block
from labkit_simulate.estimate import estimate_rank_step
from labkit_simulate.link_traffic import link_traffic_table
from labkit_simulate.memory_fit import GIB, memory_fit
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import Hardware, get_hardware
from labkit_simulate.theory.transformer import LLAMA_2_7B
from launch.given import TRAIN

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
# Five GPUs would hold the state. No one trains it on five: activations need room as well, and so do gathered layers and
# buffers.
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
# does the rank hold at its peak, in the backward pass? As in lab 2, one layer is gathered ahead while another computes,
# and the gradient of a third is still being reduced.

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
peak_parts = {
    "shard_mib": sizes_mib["Sharded Param"],
    "whole_layers": sum(255 < size < 258 for size in sizes_mib.values()),
}
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
# `labkit.simulate`, which also counts what is sent.
#
# *Takeaway: a simulated rank is the real program with a fake process group and fake tensors. One process is enough for
# a thousand ranks, whose number only changes the size of a shard.*
#
# ## 3. Is it true? ({minutes} minutes)
#
# Here is the program that you are given. Read its `main`, and look for four things: what a unit of FSDP is, what the
# mesh looks like, what `shard_over` does, and in which dtype parameters are gathered.

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
# `labkit.simulate(program, world_size=…, batch=…, …)` takes the program, the number of ranks and any field of its
# `Config`. It plays rank 0, and returns what `labkit.run` returns: `result.summary()` shows all that was recorded, and
# `result.value("peak_total_bytes")` the bytes that the rank holds at its peak, all kinds of tensors together.
#
# Is that true? Let two real ranks train a small model here, and then simulate rank 0, as one of two and as one of many.
# PyTorch's tracker counts in all three runs, so what is compared is which tensors live when.
#
# Commit: by how many bytes, as a bet, will the simulated peak of one of two be off? And how many times as large are a
# rank's activations on 2 ranks as on 1024, if each rank has as many sequences of its own?

# %% tags=["commit"]
mine_same = commit(off_bytes=None, activations=None)
### BEGIN SOLUTION
mine_same = commit(off_bytes=0, activations=1)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
small = {"model": "tiny", "layers": 3, "sequence": 64, "batch": 16}
real = labkit.run(TRAIN, nproc=2, device="cpu", **small)
begun = time.perf_counter()
one_of_two = labkit.simulate(TRAIN, world_size=2, **small)
then = time.perf_counter()
one_of_many = labkit.simulate(TRAIN, world_size=RANKS, **small)
print(f"one of 2: {then - begun:.1f} s, one of {RANKS}: {time.perf_counter() - then:.1f} s")

# %%
seen = {"2 real": real, "2 simulated": one_of_two, f"{RANKS} simulated": one_of_many}
table = pandas.DataFrame({label: result.summary().loc[0] for label, result in seen.items()})
kinds = [f"peak_{kind}_bytes" for kind in ("total", "parameter", "optstate", "activation")]
kinds += ["all_gather_count", "reduce_scatter_count", "all_gather_bytes"]
counted = table.loc[kinds].astype(int)
display(counted.map("{:,}".format))
totals, kept = counted.loc["peak_total_bytes"], counted.loc["peak_activation_bytes"]
same = {"off_bytes": totals["2 simulated"] - totals["2 real"], "activations": kept["2 real"] / kept.iloc[2]}
plots.comparison_table(same, yours=mine_same, column="found")

# %% [markdown]
# *Every number of the first two columns is equal.* The program is the same, and what it allocates and sends does not
# depend on the values in its tensors. In the third column the shards have become small,
# though not 512 times as small: rank 0 keeps at least a row of each weight. No other rank keeps more.
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
claim("the activations are the same", kept.nunique() == 1)
shards = counted.loc["peak_parameter_bytes"]
claim("the shards have become small", shards.iloc[2] < shards["2 real"] / 4)

# %% [markdown]
# ## 4. When is the most held? ({minutes} minutes)
#
# Now Llama 2 7B itself, its first 8 of 32 blocks, on 64 GPUs with one sequence each. `checkpointing="full"` keeps only
# what goes into each block, and computes the rest again in the backward pass.
#
# Commit: what is the peak of a rank in GiB, without checkpointing and with it? A block keeps 396 MiB for its backward
# pass, or 16 if it is recomputed, and has 202 million parameters. The figure will show your bets as dashed lines.

# %% tags=["commit"]
mine_peaks = commit(none_gib=None, full_gib=None)
### BEGIN SOLUTION
mine_peaks = commit(none_gib=5, full_gib=3)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
eight = {"layers": 8, "sequence": SEQUENCE}
kept_all, recomputed = (labkit.simulate(TRAIN, world_size=64, checkpointing=what, **eight) for what in ("none", "full"))
peaks = {
    "none_gib": kept_all.value("peak_total_bytes") / GIB,
    "full_gib": recomputed.value("peak_total_bytes") / GIB,
}
plots.comparison_table(peaks, yours=mine_peaks, tolerance=0.1, column="simulated")

# %% tags=["nbval-ignore-output"]
figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), layout="constrained")
_ = simulate_plots.memory_curve(kept_all, ax=above)
_ = simulate_plots.memory_curve(recomputed, ax=below)
top_gib = max(above.get_ylim()[1], *(1.1 * (bet_gib or 0) for bet_gib in mine_peaks.values()))
for curve, bet_gib in zip((above, below), mine_peaks.values(), strict=True):
    _ = curve.set_ylim(0, top_gib)
    _ = curve.axhline(bet_gib, **style.PREDICTION_STYLE) if bet_gib else None
_ = plots.memory_comparison({}, {"all kept": kept_all, "recomputed": recomputed}, unit="GiB")

# %% [markdown]
# *Above, each block adds what its backward pass needs. Below, a block adds its input alone, and each tooth of the
# backward pass is a block that is computed again.* Activations are nearly half of the upper peak, and less than a
# twentieth of the lower one. Both peaks come in the last block but one. Why there?
#
# ### Exercise 1: the fullest block (••, {minutes} minutes)
#
# The model has `blocks` blocks and a root, of so many parameters each, sharded over all `ranks`. Everything is
# recomputed, so a block keeps `kept_bytes`, its input, until its own backward pass ends. The root is gathered from the
# first block's forward pass to the last backward pass, because it begins and ends both passes. In the backward pass of which
# block does a rank hold the most, and how many bytes? Return the block's number, counted from 0, and the bytes.
#
# Count all rows of section 2's table but `Temp`, whose size follows the order of PyTorch's operations. The figure calls
# it temporary, `Unsharded Param` gathered parameters, and the other two communication buffers.
#
# <details><summary>Hint 1</summary>
#
# Which rows of section 2's table does each block have, and in which dtype are they in `train.py`? The backward pass
# begins with the last block, when no other block's gradient is being reduced, and ends with block 0, when none is left
# to gather ahead. What became of the gradients of the blocks that are through?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A parameter has 12 bytes in shards from the beginning. As soon as its block's backward pass is over, it has 4 more
# there, for the shard of its gradient, even while that is being reduced. It has 2 bytes, unsharded, where it is
# gathered, and 4 while its gradient is being reduced. Write the sum for one block, and take the block with the largest.
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
# one of these two, too. `Temp` held the block's gradient in bfloat16, and that of the output layer, which waits for the
# root's end.
#
# Does it fit? A GPU's memory holds more than tensors: the allocator takes it in large pieces, and beside that there are
# CUDA's context, NCCL's buffers and the workspace of cuBLAS. `memory_fit(result, budget_gib)` models the allocator, and
# adds 1.8 GiB for all else, a round number to plan with. What it returns counts as true if the rank fits:

# %%
for label, result in {"all kept": kept_all, "recomputed": recomputed}.items():
    print(f"{label}: {memory_fit(result, BUDGET_GIB)}")

# %% [markdown]
# The allocator reserves 32 % more than the tensors, and 40 % if recomputed, because a piece that was freed serves only
# tensors that are no larger. In section 5's run of all 32 blocks it is about a tenth. On an H100 it reserved 2 to 11 %
# more than this model says ([docs/simulation.md](../docs/simulation.md)), so leave a tenth of the budget free.
#
# *Takeaway: look for the moment and the kind of the peak before you change anything. Where activations are most of it,
# recompute them or take fewer sequences.*

# %% tags=["claim"]
parts = [run.value("peak_activation_bytes") / run.value("peak_total_bytes") for run in (kept_all, recomputed)]
claim("activations are nearly half of the upper peak", 0.4 < parts[0] < 0.5, where=TOLD)
claim("and less than a twentieth of the lower one", parts[1] < 0.05, where=TOLD)
seventh = ("backward", "blocks.6")
excess = [run.value("gpu_reserved_bytes") / run.value("peak_total_bytes") for run in (kept_all, recomputed)]
claim("32 % more than the tensors, and 40", [round(100 * each) for each in excess] == [132, 140], where=TOLD)
block_mib = [block_memory_table(run).loc["blocks.0", "activation"] / 2**20 for run in (kept_all, recomputed)]
claim("396 MiB, or 16", [round(size) for size in block_mib] == [396, 16], where=TOLD)
claim("202 million parameters", round(LLAMA_2_7B.block_parameters / 1e6) == 202)
two_gradients = 2 * (LLAMA_2_7B.block_parameters + LLAMA_2_7B.vocab * LLAMA_2_7B.width)
temporary = [run.value("peak_temp_bytes") / two_gradients for run in (kept_all, recomputed)]
claim(
    "Temp has room for both gradients, and little more if all is kept",
    1 < temporary[0] < 1.1 < temporary[1],
    where=TOLD,
)
gradient_mib = [4 * LLAMA_2_7B.block_parameters / ranks / 2**20 for ranks in (64, 8)]
claim("12 MiB on 64 GPUs and 97 on 8", [round(size) for size in gradient_mib] == [12, 97])
claim("both in the last block but one", {*map(peak_phase_and_block, (kept_all, recomputed))} == {seventh}, where=TOLD)

# %% [markdown]
# ## 5. What do more GPUs change? ({minutes} minutes)
#
# Some of what a rank holds is its share of a whole: sharded parameters, gradients and Adam's means. The whole is called
# `shared_bytes`. The rest is the rank's own, whatever the number of ranks, such as activations and gathered units, and
# is called `own_bytes`.
#
# ### Exercise 2: the smallest cluster (•, {minutes} minutes)
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
# On n hosts a share has `shared_bytes / (8 * n)`. Round up.
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
# To find the rank's own part, simulate one of very many ranks, whose share is small: nearly all that is left is its
# own. And the model need not be simulated whole, because blocks are alike, and each further one adds the same to the
# peak. We take 4 and 6 blocks with one sequence and nothing recomputed, continue the line to 8 for a test, and then to
# all 32.

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
# *The continued peak is equal to the byte*, because the peak stays at the same moment of the step. But the rule
# leaves out what the allocator takes on top of tensors. So confirm the number of hosts before you pay: simulate the
# whole model on exactly so many GPUs.
#
# Commit: what is the peak of a rank there, in GiB? Exercise 1 tells which of the 16 bytes of state are there.

# %% tags=["commit"]
mine_confirmed = commit(peak_gib=None)
### BEGIN SOLUTION
mine_confirmed = commit(peak_gib=14.5 + 100.4 * 12 / 16 / 16)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
confirmed = labkit.simulate(TRAIN, world_size=8 * hosts, sequence=SEQUENCE) if hosts else None
if confirmed is None:
    print("the rule says that no number of hosts is enough, so there is nothing to confirm")
else:
    print(f"{hosts} hosts: {memory_fit(confirmed, BUDGET_GIB)}")
    peak = {"peak_gib": confirmed.value("peak_total_bytes") / GIB}
    display(plots.comparison_table(peak, yours=mine_confirmed, tolerance=0.03, column="simulated"))

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
    tenth = confirmed.value("gpu_reserved_bytes") / confirmed.value("peak_total_bytes")
    claim("with all 32 blocks it is about a tenth", 1.08 < tenth < 1.13)
    twelve = own_bytes + 12 * LLAMA_2_7B.parameters / 16
    claim("12 bytes of each parameter", abs(confirmed.value("peak_total_bytes") / twelve - 1) < 0.01)

# %% [markdown]
# ## 6. Choose ({minutes} minutes)
#
# `labkit.plan` takes lists for any field, simulates every combination, and estimates how long its step takes:
# `labkit.plan(TRAIN, world_size=64, hardware="h100-8x", budget_gib=24, batch=[1, 2])`. Hosts of `"h100-8x"` have 8 H100
# with NVLink between them, and a network card of 400 Gbit/s for each GPU. labkit assumes that 95 % of this bandwidth
# is reached, and each message between hosts has a latency of 78 µs. Lab 6b says how many a call has. The result's `fitting_rows` are a pandas
# table of those that fit, with `candidate`, `batch`, `step_s` and `needed_bytes`. `result.candidates[number].params`
# are the settings of a candidate.
#
# ### Exercise 3: the quickest that fits (•, {minutes} minutes)
#
# `choices` maps fields of the program to a value or a list of values. Plan all combinations on `hosts`. Of those that
# leave a tenth of `budget_gib` free, return the settings of the one that trains the most tokens in a second, or None if
# none does.
#
# <details><summary>Hint 1</summary>
#
# The table is sorted by the time of a step. Do all candidates train equally many tokens in one? And which
# budget leaves a tenth of 24 GiB free?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# All sequences are equally long, so `rows["batch"] / rows["step_s"]` will do, and `.idxmax()` gives the label of the
# largest.
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
# Now twelve ways to train the whole model on the 64 GPUs: with nothing, something or everything recomputed, one
# sequence a GPU or four, sharded over all GPUs or the 8 of a host. *Selective* checkpointing keeps attention and every
# second GEMM, expensive to compute again. By default `labkit.plan` continues most ways from 4 and 6 blocks,
# which overstates what the allocator takes. With `whole=None` it simulates all 32 blocks, in about two minutes.
#
# Rule out some first: with one sequence and nothing recomputed a rank's own part is 14.5 GiB, and its share is 75 GiB
# divided by the GPUs that share it.
#
# The figure below the table divides the time by the batch, so that one sequence and four can be compared. What lies low
# is quick, and filled marks fit. A grey line says how far a time may be off.

# %% tags=["nbval-ignore-output"]
ways = {"checkpointing": ["none", "selective", "full"], "batch": [1, 4], "shard_over": [None, 8]}
found = labkit.plan(TRAIN, world_size=64, hardware="h100-8x", whole=None, sequence=2048, **ways)
rows = found.with_limits(budget_gib=BUDGET_GIB).frame
shown = rows[["checkpointing", "batch", "shard_over", "fits", "peak_in"]].assign(
    tensors_gib=(rows["peak_bytes"] / GIB).round(1),
    needed_gib=(rows["needed_bytes"] / GIB).round(1),
    step_s=rows["step_s"].round(3),
)
display(shown.sort_values("needed_gib", ignore_index=True))
CandidateExplorer(found, budget_gib=int(BUDGET_GIB), per="batch")

# %% [markdown]
# *All seven that fit leave a tenth free, the last one barely.* Groups of 8 hold an eighth of the state instead of a
# 64th. At 12 bytes a parameter that is 8.2 GiB more, and the table has 8.3 or 8.4 wherever the peak comes early in the
# backward pass, or in the root, whose logits are large with four sequences. With everything recomputed the groups' peak
# moves to the end, as in Exercise 1, and gradients come on top.
#
# The fitting way with the shortest step gathers over all GPUs, through the network. The next cell shows what each
# collective sends from a GPU to other hosts, with one sequence and nothing recomputed, and how long all of its calls
# take. A ring through 64 GPUs leaves a host at one in eight, so an eighth of what is gathered crosses hosts.
#
# Commit: how many GPUs share a copy in the quicker mesh, 64 or 8, with half the bandwidth? And with 1 ms a message
# instead of 78 µs?

# %%
chosen_rows = rows[(rows["checkpointing"] == "none") & (rows["batch"] == 1)].set_index("candidate")
meshes = {f"shard_over {row.shard_over}": found.load_simulation(number) for number, row in chosen_rows.iterrows()}
sent = pandas.concat({name: link_traffic_table(run, "h100-8x") for name, run in meshes.items()}).droplevel(1)
sent["gib_to_other_hosts"] = sent["between_hosts_bytes"] / GIB
sent[["collective", "link", "calls", "gib_to_other_hosts", "seconds"]].round(3)

# %% tags=["commit"]
mine_meshes = commit(half_the_bandwidth=None, one_ms=None)
### BEGIN SOLUTION
mine_meshes = commit(half_the_bandwidth=64, one_ms=8)
### END SOLUTION


# %%
def on_network(**slower: float) -> pandas.DataFrame:
    """Estimate both meshes on a network with ``latency_us`` or ``bandwidth_share``."""
    hosts = get_hardware("h100-8x").with_network(**slower)
    times = {name: estimate_rank_step(run, hosts).time for name, run in meshes.items()}
    parts = ("compute_s", "communication_s", "exposed_s", "step_s")
    return pandas.DataFrame({name: {part: getattr(each, part) for part in parts} for name, each in times.items()}).T


networks = {"as assumed": {}, "half_the_bandwidth": {"bandwidth_share": 0.5}, "one_ms": {"latency_us": 1000}}
steps = pandas.concat({name: on_network(**slower) for name, slower in networks.items()})
display(steps.round(3))
quicker = {name: 64 if steps.loc[name, "step_s"].idxmin().endswith("None") else 8 for name in networks}
plots.comparison_table({name: quicker[name] for name in mine_meshes}, yours=mine_meshes, column="quicker")
slow_hosts = get_hardware("h100-8x").with_network(latency_us=1000)  # of Exercise 4

# %% [markdown]
# *On the assumed network nearly all communication hides behind computation; `exposed_s` is what does not.* Groups of 8
# send nearly as much to other hosts, because they sum float32 gradients there. Their all-reduces run beside the
# collectives inside hosts, so `communication_s` is less than the sum of `seconds`.
#
# With half the bandwidth both meshes communicate equally long. But the groups' network is busy in the backward pass
# alone, for 0.28 s, while the computation to hide behind lasts 0.18 s. Sharding over all GPUs spreads its traffic over
# both passes. At 1 ms it is calls that count: 98 cross hosts, and with groups 33.
#
# ### Exercise 4: your choice (••, {minutes} minutes)
#
# Your 64 GPUs have the network with 1 ms a message, and you may use 40 GiB of each, of which a tenth has to stay free.
# Return your `shard_over`, `batch` and `checkpointing`, with sequences of 2048 tokens. Values that the table lacks are
# allowed, and `quickest` may search on `slow_hosts`. The check simulates all 32 blocks. Your choice has to train, by
# the estimate, at least 97 % as many tokens in a second as the best way that labkit knows.
#
# <details><summary>Hint 1</summary>
#
# The groups of 8 won at 1 ms with one sequence. Each further sequence adds computation and memory. What does it add to
# communication?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# With nothing recomputed, each sequence after the first adds about 13 GiB and 0.24 s of computation, behind which
# communication hides. Which ways fit into 36 GiB? To search, give `quickest` lists of all three fields, and
# `"sequence": 2048`. With `"whole": None` among them it simulates all blocks of each way, which takes longer and does
# not overstate memory.
#
# </details>


# %%
def chosen() -> dict[str, Any]:
    ### BEGIN SOLUTION
    return {"shard_over": None, "batch": 2, "checkpointing": "none"}
    ### END SOLUTION


# %%
checks.chosen(chosen)

# %% [markdown]
# *Takeaway: on the assumed network recomputing everything costs a quarter of the time, sharding over all GPUs costs
# none, and a larger batch gains a tenth or more. So here shard first, then shrink the batch, and recompute last. A
# larger batch also hides a slow network: with four sequences, sharding over all GPUs is the quicker mesh at 1 ms, too.*
#
# The grey lines overlap for most ways, but all share GPUs and network, so much of their error is common. Compare ways
# on the same network, as lab 6b does for 1024 GPUs.

# %% tags=["claim"]
network = get_hardware("h100-8x").links.between
claim("78 µs, and 95 % of 400 Gbit/s", (network.alpha_s, network.beta_s_per_byte) == (78e-6, 1e-9 / (0.95 * 50)))
tensors = {(row.checkpointing, row.batch, row.shard_over): round(row.peak_bytes / GIB, 1) for row in rows.itertuples()}
more = {(how, many): tensors[how, many, 8] - tensors[how, many, None] for how, many, over in tensors if over}
late = {(row.checkpointing, row.batch) for row in rows.itertuples() if row.shard_over and row.peak_in.endswith("s.1")}
claim("all seven leave a tenth free", rows.loc[rows["fits"], "needed_bytes"].le(0.9 * BUDGET_GIB * GIB).sum() == 7)
claim("the groups' peak moves to the end", late == {("full", 1), ("full", 4)})
claim("else it is early, or in the root", rows["peak_in"].str.contains(r"s\.30$|root$|s\.1$").all())
claim("in the root with four sequences", {*rows.loc[rows["peak_in"].str.endswith("root"), "batch"]} == {4})
claim("8.3 or 8.4 where it is early", all(8.25 < size < 8.45 for way, size in more.items() if way not in late))
claim("more where it is late", all(9 < more[way] < 11 for way in late))

# %% tags=["claim"]
claim("the groups win at 1 ms alone", [*quicker.values()] == [64, 64, 8])
outside = sent[sent["link"] == "between hosts"].groupby(level=0).sum(numeric_only=True)
claim("98 calls cross hosts, and with groups 33", [*outside["calls"].sort_values()] == [33, 98])
gathered = sent.loc["shard_over None"].iloc[0]
claim("an eighth crosses hosts", gathered["between_hosts_bytes"] == gathered["wire_bytes"] / 8)
gib = outside["gib_to_other_hosts"]
claim("nearly as much", 0.8 < gib["shard_over 8"] / gib["shard_over None"] < 0.95)
beside = sent.groupby(level=0)["seconds"].sum() - steps.loc["as assumed", "communication_s"]
claim("less than the sum, with groups alone", beside["shard_over 8"] > 0.05 and abs(beside["shard_over None"]) < 1e-6)
claim("nearly all of it hides", steps.loc["as assumed", "exposed_s"].max() < 0.02)
half, groups = steps.loc["half_the_bandwidth", "communication_s"], meshes["shard_over 8"]
claim("equally long with half the bandwidth", half.max() / half.min() < 1.02)
slow_calls = link_traffic_table(groups, get_hardware("h100-8x").with_network(bandwidth_share=0.5))
reduced_s = slow_calls.loc[slow_calls["link"] == "between hosts", "seconds"].sum()
bars = estimate_rank_step(groups, "h100-8x").time.bars
backward_s = sum(bar.dur_s for bar in bars if bar.stream == "compute" and bar.name.startswith("backward"))
claim("0.28 s behind 0.18 s", (round(reduced_s, 2), round(backward_s, 2)) == (0.28, 0.18))
fours = rows[(rows["checkpointing"] == "none") & (rows["batch"] == 4)].set_index("candidate")["shard_over"]
at_1_ms = {over: estimate_rank_step(found.load_simulation(at), slow_hosts).time.step_s for at, over in fours.items()}
claim("with four sequences the groups lose at 1 ms, too", at_1_ms[None] < at_1_ms[8])

# %% tags=["claim"]
speeds = {(row.checkpointing, row.batch, row.shard_over): row.batch / row.step_s for row in rows.itertuples()}
costs = [speeds["none", batch, over] / speeds["full", batch, over] for batch in (1, 4) for over in (None, 8)]
claim("recomputing everything costs about a quarter", all(1.2 < each < 1.3 for each in costs))
gains = [speeds[saved, 4, over] / speeds[saved, 1, over] for saved in ways["checkpointing"] for over in (None, 8)]
claim("four sequences instead of one gain 10 to 17 %", 1.095 < min(gains) < max(gains) < 1.18)
claim("sharding over all costs no time", all(speeds[how, 1, None] > speeds[how, 1, 8] for how in ways["checkpointing"]))
fits = {(row.checkpointing, row.batch, row.shard_over): row.fits for row in rows.itertuples()}
claim("one sequence and nothing recomputed fits, sharded over all", fits["none", 1, None] and not fits["none", 1, 8])
whole_mesh = rows[(rows["checkpointing"] == "none") & rows["shard_over"].isna()]
needed = whole_mesh.set_index("batch")["needed_bytes"]
claim("about 13 GiB a sequence", 12.5 < (needed[4] - needed[1]) / 3 / GIB < 13.5)
took = whole_mesh.set_index("batch")["step_s"]
claim("and 0.24 s", round((took[4] - took[1]) / 3, 2) == 0.24)
claim("it beats four sequences with everything recomputed", speeds["none", 1, None] > speeds["full", 4, None])

# %% [markdown]
# ## 7. What can it not know? ({minutes} minutes)
#
# A simulated tensor has no values, so a program that asks for one is stopped at the line that asks. The program below
# is plain PyTorch without a line of labkit. Commit to the number of that line.

# %%
folder = tempfile.TemporaryDirectory()
clips = Path(folder.name) / "clips.py"
clips.write_text("""\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 64)).square().mean().backward()
    dist.all_reduce(model.weight.grad)
    norm = model.weight.grad.norm()
    scale = 1 / norm.clamp(min=1)
    if norm > 1:
        model.weight.grad.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()
""")
print("\n".join(f"{number:2}  {line}" for number, line in enumerate(clips.read_text().splitlines(), 1)))

# %% tags=["commit"]
mine_line = commit(line=None)
### BEGIN SOLUTION
mine_line = commit(line=12)
### END SOLUTION

# %%
try:
    labkit.simulate(clips, world_size=RANKS)
except labkit.RankFailed as error:
    said = error.message.replace(folder.name, "…")
print(f"{said}\nyou: line {prediction_text(mine_line['line'])}")

# %% [markdown]
# *Computing with tensors is no problem, and branching on one is.* Multiply always, by a factor that is at most 1, and
# the program does the same without the branch:

# %% tags=["nbval-ignore-output"]
branch = "    if norm > 1:\n        model.weight.grad.mul_(scale)\n"
clips.write_text(clips.read_text().replace(branch, "    model.weight.grad.mul_(scale)\n"))
mended = labkit.simulate(clips, world_size=RANKS)
print("a step, from one optimizer.step() to the next:")
for name in ("peak_total_bytes", "all_reduce_count", "all_reduce_wire_bytes"):
    print(f"{name:22} {mended.value(name):>9,}")

# %% [markdown]
# | it knows | it does not know |
# |---|---|
# | peak memory of rank 0, and its moment | the loss, or whether gradients overflow |
# | calls, sizes and groups of all collectives | which rank is late, or which card is broken |
# | which of these leave a host (section 6) | how long the data loader takes |
# | by estimate, seconds | seconds by measurement |
#
# *Takeaway: a simulation knows shapes, dtypes and calls. It knows no values, and of time and of other
# ranks' work only what a model says.*

# %% tags=["claim"]
claim("branching is", "clips.py:12" in said and "norm > 1" in said)

# %% [markdown]
# ## 8. Take away ({minutes} minutes)
#
# 1. One process can play one rank of a thousand. Its bytes are those of a real CPU rank.
# 2. A rank holds a share, which shrinks with the number of GPUs, and an own part, which does not.
# 3. Here it paid to shard first, to shrink the batch next, and to recompute last. Ask what a slower network changes.
#
# | if | then |
# |---|---|
# | activations are most of the peak | take fewer sequences, or recompute |
# | the state is most of the peak | shard over more GPUs |
# | the own part alone exceeds the budget | recompute, or take fewer sequences; more GPUs do not help |
# | it fits with less than a tenth to spare | try so many GPUs for an hour before you rent them for a month |

# %% tags=["summary"]
lab_found = {
    "bytes between a real peak and a simulated one": int(same["off_bytes"]),
    "bytes between a continued peak of 8 blocks and the whole": round(
        continued_bytes(8) - few[8].value("peak_total_bytes")
    ),
    "hosts by the rule, and whether they fit": f"{hosts}, {bool(confirmed and memory_fit(confirmed, BUDGET_GIB))}",
    "of twelve ways fit into 24 GiB": int(rows["fits"].sum()),
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
# `item` asks for the value, and there is none. Skip it where the environment variable `LABKIT_SIMULATED` is set.
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
