# %% [markdown]
# # Lab 2. FSDP: what to wrap, what it costs, what it saves
#
# A network and its optimizer are often larger than one device. Fully sharded data parallelism (FSDP) lets every rank keep
# a part of each parameter, gradient and optimizer state. When a layer computes, its parameters are put together; then the
# copy is thrown away.
#
# How much is put together at once is your choice. It decides how much memory a rank needs, how many messages it sends, and
# whether they hide behind arithmetic. In this lab you predict all three, then measure them on real ranks.
#
# You need lab 1's words: rank, world size, all-reduce. You need no GPU.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.checks import fsdp as checks
from labkit.config import require
from labkit.theory import fsdp as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network is a stack of three multilayer perceptrons: linear, ReLU, linear, ReLU, with
# an inner width of 3, 4 and 3 times `DIM`. Each of the three is a *block*. Change the values if you like: the next cell
# refuses those that cannot work. The text speaks of the values below.

# %% tags=["parameters"]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 32  # samples of a rank in a step, of 8 places each
STEPS: int = 10  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, because="one rank has nobody to share parameters with")
require("DIM", DIM, at_least=1, because="a layer needs a width")
require("BATCH", BATCH, at_least=1, because="a step needs a sample")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")

SETUP = {"nproc": RANKS, "model": "mlp_stack", "dim": DIM, "batch": BATCH, "steps": STEPS}
SAMPLES = 8 * BATCH

# %% [markdown]
# ## Who holds what
#
# Take a model of P parameters in float32. Training keeps four numbers for each of them: the parameter, its gradient, and
# the two running means of Adam. That is 16 P bytes. In plain data parallelism (DDP) every rank holds all 16 P, although
# all ranks hold the same.
#
# ZeRO removes the copies in three stages. Stage 1 shards the optimizer's state, stage 2 the gradients as well, and stage 3
# the parameters too. FSDP is stage 3.
#
# ### Exercise 1: bytes of each stage
#
# How many bytes does a rank hold between two steps? Stage 0 is DDP. All sizes divide evenly.


# %%
def zero_bytes(parameters: int, ranks: int, stage: int) -> float:
    ### BEGIN SOLUTION
    whole, share = 4 * parameters, 4 * parameters / ranks
    parameter = share if stage >= 3 else whole
    gradient = share if stage >= 2 else whole
    optimizer = 2 * (share if stage >= 1 else whole)
    return parameter + gradient + optimizer
    ### END SOLUTION


# %%
checks.zero_bytes(zero_bytes)

# %%
billion = 10**9
stages = {f"stage {stage}": theory.zero_bytes(billion, 8, stage) for stage in range(4)}
ax = plots.breakdown(stages, ylabel="held by each of 8 ranks, MB")

# %% [markdown]
# *One billion parameters on 8 ranks. With DDP each rank holds 16 GB; in stage 3 it holds 2 GB.*
#
# Stage 3 has a price. A rank cannot compute with an eighth of a matrix, so the missing parts must come from the others,
# again and again.

# %% [markdown]
# ## Units
#
# FSDP cuts a model into **units**. You make a unit by *wrapping* a module. A unit lives like this:
#
# 1. Before its forward pass, an **all-gather** collects its parameters from all ranks.
# 2. It computes.
# 3. The full parameters are freed. This is called *resharding*.
# 4. Before its backward pass, they are gathered once more.
# 5. After its backward pass, a **reduce-scatter** averages its gradients. Each rank receives only its own part.
#
# What lies in no other unit belongs to the root unit, the model itself. The root is not resharded after the forward pass:
# its backward pass comes next.
#
# ### Exercise 2: how many all-gathers?
#
# Count the all-gathers of one training step. `units` includes the root if the root holds parameters of its own.


# %%
def all_gathers(units: int, reshard_after_forward: bool, root_has_parameters: bool) -> int:
    ### BEGIN SOLUTION
    if not reshard_after_forward:
        return units
    return 2 * units - root_has_parameters
    ### END SOLUTION


# %%
checks.all_gathers(all_gathers)

# %% [markdown]
# Our stack has three blocks and nothing else. Wrapped by block it makes three units, and the root is left with nothing. So
# theory says six all-gathers and three reduce-scatters. It also says how many bytes a rank hands over, and what it holds
# when the step is over.

# %%
layers = theory.mlp_stack_layers("block", DIM)
predicted = theory.collectives(layers, RANKS) | theory.resident_bytes(layers, RANKS)
block = labkit.run("fsdp_wrap", wrap="block", **SETUP)
plots.table(block, predicted)

# %% [markdown]
# *Two real ranks trained, and one of their steps was traced. Every count and every byte is as predicted.*

# %% [markdown]
# ## What to wrap
#
# Let us sweep the choices. `root` makes the whole model one unit. `block` makes one unit of each block. `layer` makes one
# of each linear layer. We run each with and without **activation checkpointing**: a checkpointed block keeps only its
# input, and computes its inner activations again in the backward pass.
#
# For the peak there is no simple formula, since it depends on the order of events. `theory.step_peak` walks through a step
# and keeps a ledger: take when something is allocated, free when it goes. Its result is beside the measurement.

# %%
runs, expected = {"block": block}, {}
for wrap in ("root", "block", "layer"):
    for checkpointing in (False, True):
        label = wrap + ",\ncheckpointing" * checkpointing
        walk = theory.mlp_stack_layers(wrap, DIM)
        expected[label] = theory.step_peak(walk, SAMPLES, RANKS, checkpointing=checkpointing)
        if label not in runs:
            runs[label] = labkit.run("fsdp_wrap", wrap=wrap, checkpointing=checkpointing, **SETUP)
ax = plots.breakdown(expected, runs)

# %% [markdown]
# *Peak memory of a rank. Hatched: predicted. Plain: measured. What a rank keeps between steps is the same in all of them;
# the wrapping decides about the gathered parameters and the buffers.*
#
# Wrapping the root alone saves nothing at the peak: all parameters are gathered at once, and their buffer as well. Blocks
# need only one block's parameters, and the next one's on their way. Layers need least, and send most messages.
#
# Checkpointing works on something else, the activations. The two add up. It is paid with time: the backward pass computes
# each block's forward pass once more.

# %%
names = {"block": "block", "block,\ncheckpointing": "block, checkpointing"}
ax = plots.latency({names[label]: runs[label] for label in names})

# %% [markdown]
# *Time of a step without and with checkpointing. What is computed once more is computed in the backward pass, so that is
# the bar that should grow. On a busy machine the bars move; take several runs.*

# %%
collectives = ("all_gather_count", "reduce_scatter_count")
rows = {
    " ".join(label.split()): [result.value(name) for name in collectives]
    for label, result in runs.items()
}  # fmt: skip
pandas.DataFrame.from_dict(rows, orient="index", columns=collectives).astype(int)

# %% [markdown]
# Every collective costs at least its latency, so many small units are slow where messages are slow. A transformer block a
# unit is the usual choice: large enough to keep the network busy, small enough to be a small part of the model.
#
# ## Gather once or twice
#
# `reshard_after_forward=False` keeps the parameters between forward and backward pass. That saves one all-gather for each
# unit. It is ZeRO stage 2: parameters are sharded between steps only.

# %%
kept = labkit.run("fsdp_wrap", wrap="block", reshard_after_forward=False, **SETUP)
plots.table(kept, theory.collectives(layers, RANKS, reshard_after_forward=False))

# %% [markdown]
# *Half the all-gathers, half their bytes. Reduce-scatters stay as they were.*

# %%
for name, result in (("freed and gathered again", block), ("kept", kept)):
    held = result.value("peak_unsharded_parameter_bytes")
    print(f"{name}: {held:,.0f} bytes of gathered parameters at the peak")

# %% [markdown]
# ### Exercise 3: meet a bound
#
# A rank may use at most 85 % of what `root` needs at its peak, and a step may take at most six all-gathers. Choose `wrap`,
# `checkpointing` and `reshard_after_forward`. Your plan is launched and measured. Use the figure above.


# %%
def plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    return {"wrap": "block", "checkpointing": True, "reshard_after_forward": True}
    ### END SOLUTION


# %%
bound = int(0.85 * runs["root"].value("peak_total_bytes"))
checks.memory_plan(plan, bound, gathers=6, **SETUP)

# %% [markdown]
# ## Does it hide?
#
# A message is free if it travels while the rank computes. What is left, communication during which the rank waits, is
# **exposed**. To see it we profile one step with `torch.profiler`, and make each block compute 5 ms longer, so that there
# is something to hide behind.
#
# First as FSDP does it on CPU ranks by default: each all-gather is waited for where it starts.

# %% tags=["nbval-ignore-output"]
slow = SETUP | {"timeline": True, "delay_ms": 5.0, "dim": 512, "batch": 4}
waiting = labkit.run("fsdp_wrap", **slow)
ax = plots.timeline(waiting)

# %% [markdown]
# *Two rows for each rank. The numbers are the blocks. Nearly all communication is underlined: exposed.*
#
# Read the order. In the forward pass the blocks are gathered as 0, 1, 2. In the backward pass it is 2, then 1 and 0, and
# after each block its gradients are reduce-scattered.
#
# Now with **prefetching**: while block 0 computes, block 1 is already gathered. On GPUs FSDP2 does this by itself. On CPU
# ranks labkit asks for it.

# %% tags=["nbval-ignore-output"]
ahead = labkit.run("fsdp_wrap", prefetch=True, **slow)
ax = plots.timeline(ahead)

# %% [markdown]
# *The all-gathers of blocks 1 and 2 now lie below the compute of the block before. The very first one cannot hide: nothing
# computes before it. On CPU ranks PyTorch waits for each reduce-scatter, so these stay exposed.*

# %% tags=["nbval-ignore-output"]
ax = plots.exposed({"waiting": waiting, "prefetching": ahead})

# %% [markdown]
# *Communication of one step, mean over the ranks. How long it takes varies from run to run; how much of it is exposed is
# what prefetching changes.*
#
# The raw traces are in the folder of the run, one a rank. Open them at ui.perfetto.dev to see every operator.

# %% [markdown]
# ### Exercise 4: the forgotten block
#
# Somebody wrapped all nine blocks of another model but one. It still trains, and the numbers are right. In the time line
# the forgotten block has no all-gather of its own, and it is the root that is gathered with its parameters.

# %% tags=["nbval-ignore-output"]
other = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "delay_ms": 3.0}
mystery = labkit.run("fsdp_wrap", skip=(3,), timeline=True, **other)
ax = plots.timeline(mystery, ranks=[0])

# %% [markdown]
# *One rank's step. The numbers are positions in the model: blocks 0 to 8 stand at 4 to 12.*
#
# A count finds it at once. The root is gathered once, each other unit twice. So all-gathers less reduce-scatters is the
# number of wrapped blocks.

# %%
checks.every_block_wrapped(mystery, blocks=9)

# %% [markdown]
# Which block is it? Count from 0.


# %%
def forgotten() -> int:
    ### BEGIN SOLUTION
    return 3
    ### END SOLUTION


# %%
checks.forgotten_block(forgotten, mystery)

# %% [markdown]
# ## Fewer bytes: mixed precision
#
# With a `MixedPrecisionPolicy` the shards stay in float32, but parameters are gathered and used in bfloat16. A bfloat16
# number has 2 bytes. Gradients are reduced in float32 here, since a sum of many small numbers loses digits.

# %%
bf16 = labkit.run("fsdp_wrap", precision="bf16", **SETUP)
halved = predicted | {"all_gather_bytes": predicted["all_gather_bytes"] // 2}
plots.table(bf16, halved)

# %% [markdown]
# The all-gathers carry half the bytes. What a rank keeps is unchanged.
#
# ## Frozen parameters
#
# In fine-tuning, part of a model is often frozen. A frozen unit is still gathered, but it has no gradient, no optimizer
# state and no reduce-scatter. Here the middle block is frozen.

# %%
frozen = labkit.run("fsdp_wrap", freeze=(1,), **SETUP)
predicted_frozen = theory.resident_bytes(layers, RANKS, frozen=("block 1",))
plots.table(frozen, predicted_frozen | {"reduce_scatter_count": 2, "all_gather_count": 6})

# %% [markdown]
# ## Tied weights
#
# Language models often use one matrix twice: to embed tokens, and to predict them. If the two modules were in different
# units, each would gather a copy of its own and reduce half a gradient. `fully_shard` refuses that. It takes a list
# instead: `fully_shard([embedding, head])` makes one unit of both.
#
# ### Exercise 5: who must share a unit?
#
# Return all modules of `model` that must be in one unit with `block`, the block first. These are the modules that hold one
# of its parameters themselves, outside of it. Two parameters are tied if they are the same object; equal values are not
# enough.


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
# `labkit/parallel/units.py` does the same for every model. Let us hold a transformer with a tied embedding against one
# device: every loss, gradient and parameter of three steps.

# %%
tied = labkit.run("fsdp_wrap", nproc=RANKS, model="transformer", wrap="layer", check="parity", steps=3)
print(f"{tied.value('compared'):.0f} tensors compared with one device, equal to 1 part in 100,000: {tied.ok}")

# %% [markdown]
# ## Experts that must not be averaged
#
# In a mixture of experts each rank owns an expert of its own. The shared part is trained by all ranks together, so its
# gradients are averaged. An expert sees only its rank's samples; averaging it with other experts would mix strangers.
#
# ### Exercise 6: average, but not everything
#
# Average every gradient over the ranks, and leave those of `experts` alone. `dist.all_reduce(tensor)` adds a tensor up over
# all ranks, in place. Your function runs on two real ranks. Whatever it uses of this notebook is copied there.


# %%
def average_gradients(model: nn.Module, experts: set[nn.Parameter], ranks: int) -> None:
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        if parameter not in experts and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    ### END SOLUTION


# %%
checks.expert_gradients(average_gradients)

# %% [markdown]
# With FSDP2 the expert is sharded over a mesh of one rank, its own. It then has nothing to gather and nothing to average.
#
# ## FSDP1 and FSDP2
#
# PyTorch has two APIs. The older one wraps the model in a new module and flattens each unit's parameters into one. The
# newer one changes the model in place, and each parameter becomes a `DTensor`, `Shard(0)`. New code should use the newer.
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
# + weight = model.layers[0].in_proj.weight.full_tensor()
# ```
#
# Both are tested against one device in this kit: twelve models, wrapped and not, with checkpointing, bfloat16 and offload.
#
# ## What to expect on GPUs
#
# - The same program runs unchanged: `labkit.run("fsdp_wrap", nproc=4, preset="paper")`. It has 217 million parameters.
# - Counts, bytes and memory between steps are the same. They do not depend on speed.
# - All-gathers and reduce-scatters run on their own CUDA streams and hide behind arithmetic by themselves. What stays
#   exposed is the first all-gather, the last reduce-scatter, and whatever is slower than the arithmetic.
#
# Figures from named GPUs belong into the folder `results`. None is recorded there yet for this lab.

# %% [markdown]
# ## Summary
#
# Predicted beside measured. Peaks are rounded: they move a little with the moment at which a message arrives.

# %% tags=["summary"]
tables = {"block": plots.table(block, predicted), "frozen": plots.table(frozen, predicted_frozen)}
tables["kept"] = plots.table(kept, theory.collectives(layers, RANKS, reshard_after_forward=False))
for label in ("root", "block", "block,\ncheckpointing"):
    peak = {"peak_total_bytes": expected[label]["total"]}
    tables[" ".join(f"peak, {label}".split())] = plots.table(runs[label], peak, tolerance=0.05)
summary = pandas.concat(tables)
peaks = summary["verdict"] != "equal"
sizes = ["predicted", "measured"]
summary.loc[peaks, sizes] = summary.loc[peaks, sizes].map(lambda size: int(float(f"{size:.2g}")))
summary.loc[peaks, "ratio"] = summary.loc[peaks, "ratio"].round(1)
summary

# %% [markdown]
# ## Where to go from here
#
# - Train a real architecture: `labkit.run("fsdp_wrap", nproc=2, model="hf_bert", check="parity")`.
# - Read `labkit/parallel/units.py` and `labkit/parallel/fsdp.py` (units and both APIs), then `labkit/theory/fsdp.py` (the ledger).
# - Where does your own model's peak come from? Draw its units on paper first, then count.
