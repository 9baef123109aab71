# %% [markdown]
# # Lab 2b. FSDP at work
#
# This companion of lab 2 covers what you meet when you train your own model with FSDP. After it you can
#
# - predict the peak of a step by a ledger, and write a test of gradients that can fail;
# - read a time line, and find a block that somebody forgot to wrap;
# - use mixed precision, frozen and tied parameters, HSDP and sharded checkpoints.
#
# You need lab 2. The notebook takes about {core_minutes} minutes. Once the cells above section 1 have run, its parts can
# be read in any order.

# %% tags=["nbval-ignore-output"]
import tempfile

import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.theory import fsdp as theory
from labkit_course import widgets
from labkit_course.checks import fsdp_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="2b")

# %% tags=["parameters"] small={"DIM": 20, "BATCH": 4, "STEPS": 1} points=[[2,1,1,1],[3,100,8,4],[8,256,48,12]]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 32  # sequences of a rank in a step, of 8 tokens each
STEPS: int = 10  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank shares with nobody, and more than 8 take minutes")
require("DIM", DIM, at_least=1, because="a layer needs a width")
require("BATCH", BATCH, at_least=1, because="a step needs a sample")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

SETUP = {"nproc": RANKS, "model": "mlp_stack", "dim": DIM, "batch": BATCH, "steps": STEPS}
UNITS = [4 * (2 * times * DIM**2 + (times + 1) * DIM) for times in (3, 4, 3)]  # bytes of each block's parameters
PARAMETERS = sum(UNITS) // 4
layers = theory.mlp_stack_layers("block", DIM)
predicted = theory.step_collectives(layers, RANKS) | theory.resident_bytes(layers, RANKS)
block = labkit.run("fsdp_wrap", wrap="block", **SETUP)

# %% [markdown]
# ## 1. Gather once or twice ({minutes} minutes)
#
# FSDP gathers a unit's parameters in the forward pass, frees them, and gathers them again in the backward pass.
# `fully_shard(block, reshard_after_forward=False)` keeps them in between, which PyTorch's older API calls
# SHARD_GRAD_OP. Then a step sends as many bytes as DDP's all-reduce, and not 1.5 times as many, but every gathered
# block stays in memory until its backward pass is over.
#
# We try both with eight blocks on four ranks. The root owns no parameters here. Commit: how many all-gathers does a
# step take if the blocks are kept?

# %% tags=["commit"]
mine_kept = commit(kept=None)
### BEGIN SOLUTION
mine_kept = commit(kept=8)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
DEEP = SETUP | {"nproc": 4, "layers": 8, "steps": 2}
choices = {"freed": True, "kept": False}
deep = {
    name: labkit.run("fsdp_wrap", wrap="block", reshard_after_forward=freed, **DEEP) for name, freed in choices.items()
}
print(f"you predicted {prediction_text(mine_kept['kept'])} all-gathers if the blocks are kept")
for name, run in deep.items():
    count, peak_mb = run.value("all_gather_count"), run.value("peak_total_bytes") / 1e6
    print(f"{name}: {count:.0f} all-gathers, {peak_mb:.1f} MB at the peak")

# %% tags=["claim"]
claim("half the all-gathers", 2 * deep["kept"].value("all_gather_count") == deep["freed"].value("all_gather_count"))
ratio = deep["kept"].value("peak_total_bytes") / deep["freed"].value("peak_total_bytes")
claim("keeping costs a quarter more", 1.2 < ratio < 1.35, where=(DIM, BATCH) == (128, 32))

# %% [markdown]
# Keeping the parameters costs a quarter more memory at the peak here. The explorer draws a step event by event: what a
# rank of two holds, and beside it what it sends. The dotted line is a device's memory, a budget to stay below.
#
# <details><summary>At the default both ways have the same peak. Why gather twice?</summary>
#
# Choose 6 blocks of width 128. Of three blocks, gathering twice holds two at the peak anyway: one computes, the next
# one is gathered ahead. Gathering once holds all blocks that the backward pass has not yet freed: 11.0 MB against 9.66
# MB on each of two ranks. The more blocks, the wider the gap.
#
# </details>

# %%
widgets.WrappingExplorer()

# %% [markdown]
# *Takeaway: keeping the parameters saves a third of the bytes on the wire, and costs memory.*
#
# ## 2. A ledger of memory ({minutes} minutes)
#
# ### Exercise 1: predict the peak (••, {minutes} minutes)
#
# Whether a model fits is decided at the peak. You find it with a ledger: walk through the step, add what is allocated,
# subtract what is freed, and remember the largest sum.
#
# Here is the ledger of lab 2's small FSDP, activations left out. `units` are the bytes of each unit's parameters, in
# the order of the forward pass. The previous step's gradients are dropped before the forward pass begins.
#
# - Always there: this rank's share of the parameters, and of Adam's two numbers for each.
# - The backward pass goes from the last unit to the first. When the gradients of a unit are complete, its gathered
#   parameters are freed. A flat row of the gradients is made, as large as the whole unit. Then the gradients themselves
#   are dropped.
# - This rank's share of the unit's gradients is allocated, and stays to the end of the step.
# - Gloo, the backend for CPUs, makes a working copy of the row. (NCCL, on GPUs, needs none of that size.)
#
# The network of this lab has three blocks, whose inner widths are 3, 4 and 3 times `DIM`. How many bytes are held at its peak? It
# lies at the reduce-scatter of one of the units.
#
# <details><summary>Hint 1</summary>
#
# At the reduce-scatter of unit i: the row, the working copy, and shares of the gradients of units i, i + 1, …
#
# </details>
# <details><summary>Hint 2</summary>
#
# `3 * sum(units) / ranks` are always there. Add the largest of `2 * units[i] + sum(units[i:]) / ranks`.
#
# </details>


# %%
def peak_bytes(units: list[int], ranks: int) -> float:
    ### BEGIN SOLUTION
    always = 3 * sum(units) / ranks
    return always + max(2 * unit + sum(units[index:]) / ranks for index, unit in enumerate(units))
    ### END SOLUTION


# %%
checks.peak_bytes(peak_bytes)

# %% [markdown]
# Now measured, with labkit's small FSDP and one sample, so that activations hardly count. PyTorch's `MemTracker`
# follows every tensor of the step.

# %% tags=["nbval-ignore-output"]
own = labkit.run("fsdp_wrap", fsdp="yours", **SETUP | {"batch": 1})
yours = {"peak_total_bytes": peak_bytes(UNITS, RANKS)}
plots.comparison_table(
    own, {"peak_total_bytes": theory.small_fsdp_peak_bytes(UNITS, RANKS)}, yours=yours, tolerance=0.05
)

# %% tags=["claim"]
excess = own.value("peak_total_bytes") / theory.small_fsdp_peak_bytes(UNITS, RANKS) - 1
claim("the peak is within 5 % of the ledger's", 0 <= excess < 0.05, where=DIM >= 128)

# %% [markdown]
# *Takeaway: the peak lies where most is whole at once, at the reduce-scatter of a large unit.*
#
# ## 3. A test that can fail ({minutes} minutes)
#
# ### Exercise 2: compare gradients (••, {minutes} minutes)
#
# In lab 2 gradients twice too large left no trace in the losses. Write the test that would have caught it. `mine` and
# `reference` are gradients by name, dicts of tensors. Return True if they agree: the same names, at least one, and for
# each the largest absolute difference is finite, and at most 1e-5 of the largest absolute value of its reference.
#
# <details><summary>Hint 1</summary>
#
# What does your test say of two empty dicts? Of a gradient that is NaN? Of a reference that is infinite?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `NaN <= x` is False, and so is `NaN > x`. Ask for each name whether the difference is small enough, and return all of
# it. `inf <= inf` is True, and `isfinite()` tells.
#
# </details>


# %%
def gradients_agree(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> bool:
    ### BEGIN SOLUTION
    if mine.keys() != reference.keys() or not mine:
        return False
    errors = {name: (mine[name] - reference[name]).abs().max() for name in reference}
    return all(bool(error.isfinite() and error <= 1e-5 * reference[name].abs().max()) for name, error in errors.items())
    ### END SOLUTION


# %%
checks.gradients_agree(gradients_agree)

# %% [markdown]
# *Takeaway: a test of nothing must fail, and so must NaN.*
#
# ## 4. Read a time line ({minutes} minutes)
#
# `torch.profiler` records one step. Each block computes 5 ms longer here, so that there is something to hide behind,
# and labkit prefetches: while a block computes, the next one is on its way. On GPUs FSDP2 does this by itself;
# `block.set_modules_to_forward_prefetch([next_block])` asks for more.

# %% tags=["nbval-ignore-output"]
slow = SETUP | {"timeline": True, "delay_ms": 5.0, "dim": 512, "batch": 4, "steps": 2}
ahead = labkit.run("fsdp_wrap", prefetch=True, **slow)
_ = plots.timeline(ahead)

# %% [markdown]
# *Two rows for each rank, with the numbers of the blocks. Exposed time is underlined: all-gathers at the start of a
# pass and, on CPU ranks, reduce-scatters, because the backward pass waits for each.*
#
# The raw traces are in the folder of the run, and ui.perfetto.dev opens them.
#
# ### Exercise 3: the forgotten block (•, {minutes} minutes)
#
# Somebody wrapped all nine blocks of another model but one. It still trains, and its losses are right. In the time
# line the forgotten block has no all-gather of its own, and its parameters are gathered with the root's. Which block it
# is was drawn by lot inside the program.

# %% tags=["nbval-ignore-output"]
other = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "delay_ms": 3.0, "steps": 2}
mystery = labkit.run("fsdp_wrap", forget=2026, timeline=True, **other)
_ = plots.timeline(mystery, ranks=[0])

# %% [markdown]
# *One rank's step. The numbers are positions in the model, not of blocks: blocks 0 to 8 stand at 4 to 12.*
#
# A count finds out at once that something is missing. Here the blocks are freed after the forward pass, and nothing is
# frozen. So the root is gathered once, each other unit twice, and each is reduced once: all-gathers less reduce-scatters
# is the number of wrapped blocks. The next verdict is red, as it should be: it is about the run, not about you.

# %%
checks.every_block_wrapped(mystery, blocks=9)

# %% [markdown]
# Which block is it, counted from 0?
#
# <details><summary>Hint</summary>
#
# At each all-gather, in it, above or below, stands the position of the unit that it gathers. Which position from 4 to
# 12 is missing? Block 0 stands at position 4.
#
# </details>


# %%
def forgotten() -> int:
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION


# %%
checks.missing_block(forgotten, mystery)

# %% [markdown]
# *Takeaway: count all-gathers and reduce-scatters first, and only then look at the time line.*
#
# ## 5. Fewer bytes: mixed precision ({minutes} minutes)
#
# With a `MixedPrecisionPolicy` (from `torch.distributed.fsdp`) the shards stay in float32, but parameters are gathered
# and used in bfloat16, of 2 bytes a number. Commit to what a rank hands to its calls in a step (its shards to the
# all-gathers, whole rows to the reduce-scatters), and to what it keeps. In your own script each `fully_shard`, the
# root's too, gets `mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. Gradients
# are reduced in float32 here, since in bfloat16 a sum of many small numbers loses digits.

# %% tags=["commit"]
mine_bytes = commit(all_gather_bytes=None, reduce_scatter_bytes=None, end_parameter_bytes=None)
### BEGIN SOLUTION
mine_bytes = commit(
    all_gather_bytes=2 * 2 * PARAMETERS / RANKS,
    reduce_scatter_bytes=4 * PARAMETERS,
    end_parameter_bytes=4 * PARAMETERS / RANKS,
)
### END SOLUTION

# %% tags=["summary"]
bf16 = labkit.run("fsdp_wrap", precision="bf16", **SETUP)
halved = predicted | {"all_gather_bytes": predicted["all_gather_bytes"] // 2}
plots.comparison_table(bf16, halved, yours=mine_bytes)

# %% [markdown]
# *The all-gathers were handed half the bytes, and what a rank keeps is unchanged. On the wire, a step sends 1/2 + 1/2 + 1 instead of
# 1 + 1 + 1, a third less.*

# %% tags=["claim"]
claim(
    "the all-gathers were handed half the bytes", 2 * bf16.value("all_gather_bytes") == block.value("all_gather_bytes")
)
claim("what a rank keeps is unchanged", bf16.value("end_parameter_bytes") == block.value("end_parameter_bytes"))

# %% [markdown]
# *Takeaway: gather in bfloat16, and reduce and keep in float32.*
#
# ## 6. Frozen parameters ({minutes} minutes)
#
# In fine-tuning, part of a model is often frozen, with `requires_grad_(False)`. A frozen unit has no gradients and no
# optimizer state. We freeze the middle one of three blocks. Commit: how many all-gathers and how many reduce-scatters
# does a step take?

# %% tags=["commit"]
mine_frozen = commit(all_gather_count=None, reduce_scatter_count=None)
### BEGIN SOLUTION
mine_frozen = commit(all_gather_count=6, reduce_scatter_count=2)
### END SOLUTION

# %%
frozen = labkit.run("fsdp_matrix", freeze=(1,), **SETUP)
predicted_frozen = theory.resident_bytes(layers, RANKS, frozen=("block 1",))
predicted_frozen |= {"all_gather_count": 6, "reduce_scatter_count": 2}
plots.comparison_table(frozen, predicted_frozen, yours=mine_frozen)

# %% [markdown]
# The frozen block is gathered in both passes all the same, because the gradients of block 0 come through its weights. And
# if the first block is frozen, or the first two, as in most fine-tuning?

# %%
fewer = {"the first": (0,), "the first two": (0, 1)}
fewer = {name: labkit.run("fsdp_matrix", freeze=blocks, **SETUP) for name, blocks in fewer.items()}
counts = {
    name: [int(run.value(f"{call}_count")) for call in ("all_gather", "reduce_scatter")] for name, run in fewer.items()
}
for name, (gathers, scatters) in counts.items():
    print(f"{name} frozen: {gathers} all-gathers, {scatters} reduce-scatters")

# %% tags=["claim"]
claim("one gather is saved where two are frozen", [*counts.values()] == [[6, 2], [5, 1]])

# %% [markdown]
# Nothing has to come through these weights, and yet the last frozen block is gathered twice: in the backward pass FSDP2
# gathers ahead whichever block ran before. The blocks in front of that one are spared.
#
# *Takeaway: freezing saves gradients, their reduce-scatter and optimizer state. It saves gathers only in front of the
# last frozen block, if nothing before it is trained.*
#
# ## 7. HSDP: shard inside, replicate outside ({minutes} minutes)
#
# Inside a host the network is fast, between hosts it is slow. **Hybrid sharding** (HSDP) cuts the ranks into groups.
# Each group holds all parameters, sharded over its ranks, and gathers and reduces inside. Then each rank averages its
# shard's gradients with the ranks of the other groups that hold the same shard: one all-reduce for each unit, of a
# shard's size. In your own script that is `fully_shard` with a mesh of two axes: `init_device_mesh("cuda", (2, 8),
# mesh_dim_names=("replicate", "shard"))`.
#
# Now four ranks form two groups of two. Commit, for one rank: the bytes that it hands to the all-reduces of a step, and
# the bytes of parameters that it keeps. The whole model has `4 * PARAMETERS` bytes.

# %% tags=["commit"]
mine_hybrid = commit(all_reduce_bytes=None, end_parameter_bytes=None)
### BEGIN SOLUTION
mine_hybrid = commit(all_reduce_bytes=4 * PARAMETERS / 2, end_parameter_bytes=4 * PARAMETERS / 2)
### END SOLUTION

# %%
hybrid = labkit.run("fsdp_matrix", wrap="block", hybrid=2, **SETUP | {"nproc": 4, "steps": 2})
half = {"end_parameter_bytes": theory.resident_bytes(layers, 2)["end_parameter_bytes"]}
yours = {"replicate/all_reduce_bytes": mine_hybrid["all_reduce_bytes"]}
yours |= {"end_parameter_bytes": mine_hybrid["end_parameter_bytes"]}
plots.comparison_table(hybrid, theory.hybrid_collectives(layers, 2) | half, yours=yours)

# %% [markdown]
# *The names say along which axis of the mesh a call went; labkit calls the shard axis `data`. Along `replicate` there is
# one all-reduce for each of the three blocks.*
#
# The slow network carries one all-reduce of a shard for each unit, and no gathers. The price is memory, because a rank
# holds half of the parameters instead of a quarter.

# %% tags=["claim"]
across = theory.hybrid_collectives(layers, 2)["replicate/all_reduce_bytes"]
claim("along replicate, half of the parameters is handed over", hybrid.value("replicate/all_reduce_bytes") == across)
claim("a rank holds a half", hybrid.value("end_parameter_bytes") == half["end_parameter_bytes"])
claim("one all-reduce for each block", hybrid.value("replicate/all_reduce_count") == 3)

# %% [markdown]
# *Takeaway: HSDP keeps the gathers where the network is fast.*
#
# ## 8. How do I save a sharded model? ({minutes} minutes)
#
# No rank has the whole model, so there are two ways. With `torch.distributed.checkpoint` each rank writes its part into
# one folder. Every tensor there knows its place in the whole, so any other number of ranks can load it. Or you gather
# everything on rank 0 and save one plain file, as long as one host can hold it. The next cell does both.

# %% tags=["script"]
# %%torchrun -n 2
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Linear(4, 6)
fully_shard(model, mesh=mesh)
place = tempfile.TemporaryDirectory()  # on a cluster: a folder that all hosts see
folder = [place.name]
dist.broadcast_object_list(folder)  # all ranks write into rank 0's folder
checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])  # a part from each rank
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:  # the others hold nothing
    torch.save(whole, f"{folder[0]}/whole.pt")
    found = torch.load(f"{folder[0]}/whole.pt", weights_only=True)  # on one device
    print({name: tuple(tensor.shape) for name, tensor in found.items()})
dist.barrier()  # no rank takes the folder away from rank 0
place.cleanup()
dist.destroy_process_group()

# %% [markdown]
# Only rank 0 holds the whole state: offloading it to every rank would fill the host's memory once per rank.
#
# To load, build the model on the new ranks, and then `state = {"model": get_model_state_dict(model)}`. Now
# `checkpoint.load(state, checkpoint_id=folder)` fills `state`, and `set_model_state_dict(model, state["model"])` puts it
# back.
#
# To go on with the training you need the optimizer's state as well:
#
# ```python
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#
# model_state, optimizer_state = get_state_dict(model, optimizer)
# state = {"model": model_state, "optimizer": optimizer_state}
# checkpoint.save(state, checkpoint_id=folder)
#
# # on the new ranks: make `state` in the same way, then
# checkpoint.load(state, checkpoint_id=folder)
# set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# ```
#
# labkit does that: it trains on some ranks, saves, and goes on with one rank more.


# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:
    before = labkit.run("fsdp_matrix", save=f"{folder}/state", **SETUP)
    after = labkit.run("fsdp_matrix", load=f"{folder}/state", **SETUP | {"nproc": RANKS + 1, "steps": 1})
lower = after.losses.iloc[0] < before.losses.iloc[0]
print(f"{RANKS} ranks: the loss falls from {before.losses.iloc[0]:.4f} to {before.losses.iloc[-1]:.4f}")
print(f"{RANKS + 1} ranks go on at {after.losses.iloc[0]:.4f}")

# %% tags=["claim"]
claim("training goes on below the loss at which it began", lower, where=STEPS >= 10 and BATCH >= 32)

# %% [markdown]
# Training goes on below the loss at which it began. That is weak evidence, because the third rank brings samples of its
# own, and a lost state of Adam would hardly show. Where the samples are the same, the losses must be, too; labkit's
# tests compare them for 4 ranks that save, and 2 or 1 that go on (`tests/test_saving.py`).
#
# *Takeaway: let each rank write its part, and load it on any number of ranks.*
#
# ## 9. Tied weights ({minutes} minutes)
#
# Language models often use one matrix twice: to embed tokens, and to predict them. If the two modules were in different
# units, each would gather a copy of its own and reduce only its own part of the gradient. PyTorch refuses that with an
# error since 2.12; 2.11 went on. `fully_shard` takes a list instead: `fully_shard([embedding, head])` makes one unit of
# both.
#
# ### Exercise 4: who must share a unit? (••, {minutes} minutes)
#
# Return the block, and behind it all modules of `model` outside of the block that hold one of its parameters themselves.
# Two parameters are tied if they are the same object; equal values are
# not enough.
#
# <details><summary>Hint 1</summary>
#
# `module.parameters(recurse=False)` gives the parameters that a module holds itself, and not those of its parts.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `set(block.modules())` is all that is inside. Compare parameters by `id`, since `==` compares numbers.
#
# </details>


# %%
def tied_unit(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    ### BEGIN SOLUTION
    own, inside = {id(p) for p in block.parameters()}, set(block.modules())
    return [block] + [
        module
        for module in model.modules()
        if module not in inside and any(id(p) in own for p in module.parameters(recurse=False))
    ]
    ### END SOLUTION


# %%
checks.tied_unit(tied_unit)

# %% [markdown]
# `labkit/parallel/units.py` does the same for every model. The next cell trains a transformer with a tied embedding and
# compares losses, outputs, gradients, parameters and buffers of three steps with one device.

# %%
print(labkit.check("fsdp_wrap", nproc=RANKS, model="transformer", wrap="layer", steps=3).verdict_text)

# %% [markdown]
# *Takeaway: modules that share a parameter share a unit.*
#
# ## 10. Experts that must not be averaged ({minutes} minutes)
#
# In a mixture of experts, each rank owns an expert of its own, which here sees its own rank's samples only. The shared
# part is trained by all ranks together, so its gradients are averaged. Averaging the experts would mix unrelated
# weights.
#
# But their gradients have to be scaled. On one device the loss is the mean over all samples. Each rank's own loss is the mean
# over its own samples, so each sample weighs N times as much in it. Averaging the shared gradients makes up for that.
# An expert's gradients are not averaged, but they must be divided by N all the same to equal one device's. "Nothing to
# average, so leave it alone" is a known trap: pytorch/pytorch#160285 and #167178.
#
# <details><summary>How experts are used in large models</summary>
#
# With **expert parallelism** a router chooses an expert for each token, and an all-to-all carries the tokens to its
# rank and back. Then an expert sees samples of all ranks.
#
# </details>
#
# ### Exercise 5: average, but not everything (••, {minutes} minutes)
#
# Every parameter has a gradient: average the shared ones over the ranks. Send nothing for those of `experts`, but divide
# them by the number of ranks. `dist.all_reduce(tensor)` adds a tensor up over all ranks, in place. Your function runs on two real ranks,
# then on three. Whatever it uses of this notebook is copied there.
#
# <details><summary>Hint</summary>
#
# Go through `model.parameters()`. All ranks must call the same all-reduces in the same order.
#
# </details>


# %%
def average_gradients(model: nn.Module, experts: set[nn.Parameter], ranks: int) -> None:
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    ### END SOLUTION


# %%
checks.expert_gradients(average_gradients)

# %% [markdown]
# With FSDP2 you shard the expert over a mesh of one rank, its own, and `expert.set_gradient_divide_factor(ranks)` divides
# its gradient. Compare it with one device, since older versions ignored the factor (pytorch/pytorch#167178).
#
# *Takeaway: average what all ranks train, and only scale what one rank owns.*
#
# ## 11. FSDP1 and FSDP2 ({minutes} minutes)
#
# PyTorch has two APIs. The older one wraps the model in a new module and flattens each unit's parameters into one, as
# you did. The newer one changes the model in place, and each parameter becomes a `DTensor`, `Shard(0)`. New code should
# use the newer.
#
# ```diff
# - from torch.distributed.fsdp import FullyShardedDataParallel
# - from torch.distributed.fsdp.wrap import ModuleWrapPolicy
# + from torch.distributed.fsdp import fully_shard
#
# - policy = ModuleWrapPolicy({MLP})
# - model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
# + for block in model.layers:
# +     fully_shard(block, mesh=mesh)
# + fully_shard(model, mesh=mesh)
#
# - FullyShardedDataParallel(..., sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
# + fully_shard(..., reshard_after_forward=False)
#
# - with FullyShardedDataParallel.summon_full_params(model):
# -     weight = model.layers[0].in_proj.weight.clone()
# + weight = model.layers[0].in_proj.weight.full_tensor()  # all ranks must call it
# ```
#
# *Takeaway: new code uses `fully_shard`.*
#
# ## 12. Take away ({minutes} minutes)
#
# 1. A ledger of what is allocated and freed predicts the peak before anything runs.
# 2. Counts of collectives tell what is wrapped, before any time line is read.
# 3. Precision, freezing and what is kept between the passes are choices for each unit.
#
# | if | then |
# |---|---|
# | the network between hosts is slow | shard inside a host, and replicate outside (HSDP) |
# | all-gathers bind | gather in bfloat16, or keep parameters between the passes |
# | nothing is kept or frozen, and all-gathers less reduce-scatters is not the number of blocks | somebody forgot to wrap one |
# | two modules share a parameter | put them into one unit |
#
# **Ask yourself**
#
# <details><summary>1. Why does a frozen unit in the middle need its all-gather in the backward pass?</summary>
#
# If a layer before it is trained, that layer's gradients must come through it.
#
# </details>
# <details><summary>2. HSDP on two hosts of 8: how much does a rank hold, beside FSDP over 16?</summary>
#
# Twice as much, an eighth instead of a sixteenth.
#
# </details>
# <details><summary>3. Why are gradients reduced in float32 though parameters are gathered in bfloat16?</summary>
#
# A sum of many small numbers loses digits in bfloat16.
#
# </details>
# <details><summary>4. A checkpoint was saved on 4 ranks. Can 3 load it?</summary>
#
# Yes, with `torch.distributed.checkpoint`: every tensor knows its place in the whole.
#
# </details>
# <details><summary>5. An expert sees its own rank's samples only. Why must its gradient be divided by N?</summary>
#
# Each rank's loss is the mean over its own samples, so each sample weighs N times as much in it as on one device.
#
# </details>
#
# <details><summary>Pages</summary>
#
# Saving: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html. On GPUs the same programs are written to run
# unchanged, which has not been verified yet.
#
# </details>
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("fsdp_at_work")
