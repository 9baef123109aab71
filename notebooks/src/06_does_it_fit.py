# %% [markdown]
# # Lab 6. Does it fit?
#
# A wrong guess on a cluster is paid by the hour: the job waits in a queue, starts, and runs out of memory. In this lab
# one process plays one rank of a thousand. It runs the real program, but its tensors have no memory, and its
# collectives send nothing.
#
# The example of this lab and of lab 6b is `train.py`, a program that you have not seen, which trains Llama 2 with 7
# billion parameters. You are given 64 H100, and another job leaves you 24 GiB of each. In section 6 you see which ways to
# train fit there, choose one for another budget, and a simulation judges your choice.
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
from labkit_simulate.block_memory import peak_phase_and_block
from labkit_simulate.estimate import estimate_rank_step
from labkit_simulate.link_traffic import link_traffic_table
from labkit_simulate.memory_fit import GIB, memory_fit
from labkit_simulate.theory import simulation as theory
from labkit_simulate.theory.hardware import get_hardware
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
# buffers. How much they need depends on the program, line by line.
#
# *Takeaway: with Adam in float32 the state takes 16 bytes a parameter. What comes on top of it depends on the program,
# so let the program tell.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# PyTorch has all that is needed. The process group `"fake"` returns from each collective at once and moves nothing.
# `FakeTensorMode` makes tensors with a shape and a dtype, but without memory. And a tracker adds up what the tensors
# would hold. The next cell is rank 0 of 1024, which shards eight layers of 256 MiB with FSDP2.
#
# Commit: of how many MiB is a rank's shard of all the layers? And how many tensors of 256 MiB, a whole layer each,
# does the rank hold at its peak? You can compute the first, while the second is a bet.

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
# Four of the imports are private to PyTorch and may change. labkit keeps them behind one function, `labkit.simulate`,
# which also handles models that look at their own weights, and counts what is sent.
#
# *Takeaway: a simulated rank is the real program with a fake process group and fake tensors. A thousand ranks cost no
# more than two, because the number of ranks only changes the size of a shard.*

# %% tags=["claim"]
claim("6.74 billion, five GPUs", (round(LLAMA_2_7B.parameters / 1e7), state["gpus"]) == (674, 5))
claim(
    "the shard is as small as 1024 ranks make it",
    peak_parts["shard_mib"] == round(8 * (8192**2 + 8192) * 4 / 2**30, 1),
)
claim("four whole layers are there", peak_parts["whole_layers"] == 4)
four = ("Unsharded Param", "All Gather", "Temp", "Reduce Scatter")
claim("they are those of the table", all(255 < sizes_mib[name] < 258 for name in four))

# %% [markdown]
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
# same (HSDP). Parameters are gathered in bfloat16, and gradients are reduced in float32. Three names are labkit's and
# train nothing: `here.steps(…, track=…)` measures, `ALIKE` says which field counts equal blocks, and `run_main` reads the
# command line.
#
# </details>
#
# `labkit.simulate(program, world_size=…, batch=…, …)` takes the program, the number of ranks and any field of its
# `Config`. It plays rank 0, and returns what `labkit.run` returns: `result.summary()` shows all that was recorded, and
# `result.value("peak_total_bytes")` the bytes that the rank holds at its peak, all kinds of tensors together.
#
# Is that true? Let two real ranks train a small model on this machine, and then simulate rank 0, once as one of two and
# once as one of many. PyTorch's tracker counts in all three runs, so what is compared is which tensors live when.
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
# *Every number of the first two columns is equal.* That is no accident: the program is the same, line by line, and what
# it allocates and sends does not depend on the values in its tensors. In the third column the shards have become small,
# though not 512 times as small: rank 0 keeps at least a row of each weight.
#
# *Takeaway: simulated tensors are those of real CPU ranks, to the byte. A GPU keeps some others, and its allocator takes
# more than the tensors need.*

# %% tags=["claim"]
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
# Commit: what is the peak of a rank in GiB, without checkpointing and with it? Both are bets, which the figure will show
# as dashed lines.

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
# first block's forward pass to the last backward pass. In the backward pass of which block does a rank hold the most, and
# how many bytes? Return the block's number, counted from 0, and the bytes. Count everything but `Temp`.
#
# <details><summary>Hint 1</summary>
#
# Which rows of section 2's table does each block have, and in which dtype are they in `train.py`? The block that runs
# first has none before it, and the one that runs last has none to come. What became of the gradients of the blocks
# that are through?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A parameter has 12 bytes in shards from the beginning, and 4 more once its gradient is reduced. It has 2 bytes where it
# is gathered, and 4 while its gradient is being reduced. Write the sum for one block, and take the block with the largest.
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
# *On 64 GPUs the peak comes early in the backward pass, and on 8 late.* From block to block `kept_bytes` are freed, 16 MiB
# here, while the shard of a gradient comes, 12 MiB on 64 GPUs and 97 on 8. The last block itself is never the fullest here, since no
# gradient is being reduced yet.
#
# Does it fit on a GPU? The memory of a GPU holds more than tensors: the allocator takes it in large pieces, and beside
# that there are CUDA's context, NCCL's buffers and the workspace of cuBLAS. `memory_fit(result, budget_gib)` models the
# allocator, and adds 1.8 GiB for all else, a round number to plan with. What it returns counts as true if the rank fits:

# %%
for label, result in {"all kept": kept_all, "recomputed": recomputed}.items():
    print(f"{label}: {memory_fit(result, BUDGET_GIB)}")

# %% [markdown]
# The allocator reserves a third more than the tensors here, because a piece that was freed serves only tensors that are no
# larger. In section 5's run of all 32 blocks it is about a tenth, and with other settings more: ask for each. On an H100 it reserved 2 to 11 % more than this model
# says ([docs/simulation.md](../docs/simulation.md)), so leave a tenth of the budget free.
#
# *Takeaway: look for the moment and the kind of the peak before you change anything. Where activations are most of it,
# recompute them or take fewer sequences.*

# %% tags=["claim"]
parts = [run.value("peak_activation_bytes") / run.value("peak_total_bytes") for run in (kept_all, recomputed)]
claim("activations are nearly half of the upper peak", 0.4 < parts[0] < 0.5, where=TOLD)
claim("and less than a twentieth of the lower one", parts[1] < 0.05, where=TOLD)
seventh = ("backward", "blocks.6")
excess = [run.value("gpu_reserved_bytes") / run.value("peak_total_bytes") for run in (kept_all, recomputed)]
claim("a third more than the tensors", all(1.3 < each < 1.42 for each in excess), where=TOLD)
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
# peak. We take 4 and 6 blocks, continue the line to 8 for a test, and then to all 32.
#
# Commit to a bet: on how many hosts does Llama 2 7B fit with 24 GiB a GPU, one sequence each and nothing recomputed?

# %% tags=["commit"]
mine_hosts = commit(hosts=None)
### BEGIN SOLUTION
mine_hosts = commit(hosts=2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
few = {blocks: labkit.simulate(TRAIN, world_size=RANKS, layers=blocks, sequence=SEQUENCE) for blocks in (4, 6, 8)}


def continued_bytes(blocks: int) -> float:
    """The peak on the line through the peaks with 4 and with 6 blocks."""
    of_four, of_six = (few[count].value("peak_total_bytes") for count in (4, 6))
    return of_six + (blocks - 6) * (of_six - of_four) / 2


print(f"8 blocks: {continued_bytes(8):,.0f} bytes continued, {few[8].value('peak_total_bytes'):,} simulated")
own_bytes = continued_bytes(32) - 12 * LLAMA_2_7B.parameters / RANKS  # the gradients come later
reserve_bytes = memory_fit(kept_all).overhead_bytes
count_hosts = fewest_hosts if hosts_verdict.ok else theory.fewest_hosts
hosts = count_hosts(STATE_BYTES, own_bytes, BUDGET_GIB * GIB - reserve_bytes)
sizes = {"a rank's own": own_bytes, "the state of all": STATE_BYTES, "not tensors": reserve_bytes}
print(", ".join(f"{name}: {size / GIB:.1f} GiB" for name, size in sizes.items()))
plots.comparison_table({"hosts": hosts}, yours=mine_hosts, column="by the function")

# %% [markdown]
# *The continued peak is equal to the byte*, because the peak stays at the same moment of the step. That holds for tensors
# alone: what the allocator keeps on top of them does not grow evenly, and the rule leaves it out. So the number of hosts
# is a claim, and you should confirm it before you pay: simulate the whole model on exactly so many GPUs.
#
# Commit: what is the peak of a rank there, in GiB? The numbers are above, and Exercise 1 tells which of the 16 bytes of
# state are there at that moment.

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
# *Two hosts fit by this model, with 0.8 GiB to spare.* The peak comes early in the backward pass, when hardly any gradient
# has been made, so a rank holds 12 bytes of each parameter of its share, and not 16. But what is left is 3 % of the budget
# and not a tenth. So try one step on two real hosts, or take three.
#
# *Takeaway: more GPUs shrink a rank's share and leave its own part as it is. If the own part alone is too large, no
# cluster is large enough. A rule finds the number of hosts, and a simulation confirms it.*

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
# with NVLink between them, and a network card of 400 Gbit/s for each GPU, of which 95 % are taken to be reached. The
# result's `fitting_rows` are a pandas table of those that fit, with `candidate`, `batch`, `step_s` and `needed_bytes`.
# `result.candidates[number].params` are the settings of a candidate.
#
# ### Exercise 3: the quickest that fits (•, {minutes} minutes)
#
# `choices` maps fields of the program to a value or a list of values. Plan all combinations on hosts of `"h100-8x"`. Of
# those that fit into `budget_gib`, return the settings of the one that trains the most tokens in a second, or None if
# none fits.
#
# <details><summary>Hint 1</summary>
#
# The table is sorted by the time of a step. Do all candidates train equally many tokens in one?
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
def quickest(program: Path, ranks: int, budget_gib: float, choices: dict[str, Any]) -> dict[str, Any] | None:
    ### BEGIN SOLUTION
    found = labkit.plan(program, world_size=ranks, hardware="h100-8x", budget_gib=budget_gib, **choices)
    rows = found.fitting_rows
    if rows.empty:
        return None
    best = rows.loc[(rows["batch"] / rows["step_s"]).idxmax()]
    return found.candidates[best["candidate"]].params
    ### END SOLUTION


# %%
checks.quickest(quickest)

# %% [markdown]
# Now the task from the beginning: twelve ways to train the whole model on the 64 GPUs, with nothing, something or
# everything recomputed, one sequence a GPU or four, sharded over all GPUs or over the 8 of a host. *Selective*
# checkpointing keeps what is expensive to compute again: attention, and every second GEMM. By default `labkit.plan`
# continues most ways from 4 and 6 blocks, which overstates what the allocator takes. With `whole=None` it simulates all 32
# blocks of each, which takes about two minutes on two cores.
#
# Commit: how many of the twelve fit into 24 GiB? You can rule out some: a rank's own part is 14.5 GiB with one sequence
# and nothing recomputed, and its share is 75 or 100 GiB divided by the GPUs that share it. The rest is a bet.
#
# The figure below the table divides the time by the batch, so that ways with one sequence and with four can be compared.
# What lies low is quick, and what lies to the left of the dashed line fits. Turn the budget, and see what has to be
# given up.

# %% tags=["commit"]
mine_fitting = commit(fitting=None)
### BEGIN SOLUTION
mine_fitting = commit(fitting=7)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
ways = {"checkpointing": ["none", "selective", "full"], "batch": [1, 4], "shard_over": [None, 8]}
found = labkit.plan(TRAIN, world_size=64, hardware="h100-8x", whole=None, sequence=2048, **ways)
rows = found.with_limits(budget_gib=BUDGET_GIB).frame
shown = rows[["checkpointing", "batch", "shard_over", "fits", "peak_in"]].assign(
    tensors_gib=(rows["peak_bytes"] / GIB).round(1),
    needed_gib=(rows["needed_bytes"] / GIB).round(1),
    step_s=rows["step_s"].round(3),
)
print(f"{rows['fits'].sum()} of {len(rows)} fit; you: {prediction_text(mine_fitting['fitting'])}")
display(shown.sort_values("needed_gib", ignore_index=True))
CandidateExplorer(found, budget_gib=int(BUDGET_GIB), per="batch")

# %% [markdown]
# *All seven that fit leave a tenth free, the last one barely.* Groups of 8 hold an eighth of the state instead of a 64th.
# At 12 bytes a parameter that is 8.2 GiB more, and 8.2 or 8.3 are seen wherever the peak comes early in the backward
# pass. With everything recomputed it moves to the end, as in Exercise 1, and gradients come on top.
#
# The fitting way with the shortest step gathers over all GPUs, through the network. Would it still be the quickest on a
# slower one? The next cell shows what each collective sends from a GPU to other hosts, and how long all of its calls
# take, with one sequence and nothing recomputed. Then it estimates both meshes on other networks, where `exposed_s` is the
# communication for which computation waits. Try a network of your own.

# %%
chosen_rows = rows[(rows["checkpointing"] == "none") & (rows["batch"] == 1)].set_index("candidate")
meshes = {f"shard_over {row.shard_over}": found.load_simulation(number) for number, row in chosen_rows.iterrows()}
sent = pandas.concat({name: link_traffic_table(run, "h100-8x") for name, run in meshes.items()}).droplevel(1)
sent["gib_to_other_hosts"] = sent["between_hosts_bytes"] / GIB
display(sent[["collective", "link", "calls", "gib_to_other_hosts", "seconds"]].round(3))


def on_network(**slower: float) -> pandas.DataFrame:
    """Estimate both meshes on a network with ``latency_us`` or ``bandwidth_share``."""
    hosts = get_hardware("h100-8x").with_network(**slower)
    times = {name: estimate_rank_step(run, hosts).time for name, run in meshes.items()}
    parts = ("compute_s", "communication_s", "exposed_s", "step_s")
    return pandas.DataFrame({name: {part: getattr(each, part) for part in parts} for name, each in times.items()}).T


networks = {"as assumed": {}, "half the bandwidth": {"bandwidth_share": 0.5}, "1 ms a step": {"latency_us": 1000}}
steps = pandas.concat({name: on_network(**slower) for name, slower in networks.items()})
steps.round(3)

# %% [markdown]
# *On this network nearly all communication hides behind computation.* Groups of 8 gather inside a host, but then they sum
# float32 gradients between hosts, which sends nearly as much over the network. Each GPU also updates 8 times as many
# parameters. So with half the bandwidth both get slower, and the groups stay behind. Of these three networks they win on the
# one where latency rules: at 1 ms instead of 78 µs for each message between hosts.

# %% [markdown]
# ### Exercise 4: your choice (••, {minutes} minutes)
#
# Now you may use 40 GiB of each of the 64 GPUs. Return your `shard_over`, `batch` and `checkpointing`, with sequences of
# 2048 tokens. Other values than those of the table are allowed. The check simulates all 32 blocks. Your choice has to fit,
# and to train at least 97 % as many tokens in a second, by the estimate, as the best way that labkit knows.
#
# <details><summary>Hint 1</summary>
#
# The table has one sequence and four. Each further sequence adds about as much memory, and as much time, as the one
# before.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# With nothing recomputed, each sequence after the first adds about 13 GiB and 0.24 s. Which ways fit into 40 GiB, and how
# many sequences a second do they train?
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
# *Takeaway: on this network recomputing everything costs a quarter of the time, sharding over all GPUs costs none, and a
# larger batch gains a tenth or more. So here shard first, then shrink the batch, and recompute last. Ask again for
# another network.*
#
# The grey bars of the figure say how far each time may be off. They overlap for most ways, but one network serves all, so
# compare ways on the same network, as you did above. Lab 6b does so for 1024 GPUs.

# %% tags=["claim"]
tensors = {(row.checkpointing, row.batch, row.shard_over): row.peak_bytes / GIB for row in rows.itertuples()}
more = {(how, many): tensors[how, many, 8] - tensors[how, many, None] for how, many, over in tensors if over}
late = {(row.checkpointing, row.batch) for row in rows.itertuples() if row.shard_over and row.peak_in.endswith("s.1")}
claim("all seven leave a tenth free", rows.loc[rows["fits"], "needed_bytes"].le(0.9 * BUDGET_GIB * GIB).sum() == 7)
claim("the peak moves to the end", late == {("full", 1), ("full", 4)})
claim("8.2 or 8.3 where it is early", all(8.2 < size < 8.35 for way, size in more.items() if way not in late))
claim("more where it is late", all(9 < more[way] < 11 for way in late))
quick = {name: steps.loc[name, "step_s"].idxmin() for name in networks}
claim("the groups win at 1 ms alone", [each[-1] for each in quick.values()] == ["e", "e", "8"])
gib = sent.groupby(level=0)["gib_to_other_hosts"].sum()
claim("nearly as much", 0.8 < gib["shard_over 8"] / gib["shard_over None"] < 0.95)
claim("nearly all of it hides", steps.loc["as assumed", "exposed_s"].max() < 0.02)
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
# | peak memory of rank 0, and its moment; of others with `rank="different"` | the loss, or whether gradients overflow |
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
# 3. Here it paid to shard first, to shrink the batch next, and to recompute last. Confirm what a rule says by a whole
#    simulation, and ask what a slower network changes.
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
# <details><summary>1. A simulation of 1024 ranks takes as long as one of 8. Why?</summary>
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
