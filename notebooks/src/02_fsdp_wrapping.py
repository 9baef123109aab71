# %% [markdown]
# # Lab 2. FSDP: what to wrap, what it costs, what it saves
#
# A network and its optimizer are often larger than one device. Fully sharded data parallelism (FSDP) lets every rank
# keep a part of each parameter, gradient and optimizer state. When a layer computes, its parameters are put together;
# then the copy is thrown away.
#
# After this lab you can
#
# - say what each rank holds and sends in a step, in bytes, before you launch it;
# - write a small FSDP yourself, and prove on real ranks that it trains as one device does;
# - choose what to wrap for a memory limit, and (optional) find a block that somebody forgot to wrap;
# - say from which batch size on FSDP's messages can hide behind arithmetic.
#
# You need Lab 0's words: rank, process group, all-reduce, all-gather, reduce-scatter. You need no GPU. The sections
# marked **core** take about 95 minutes. The others are optional to read; run their cells all the same, since later ones
# use what they give. Exercises have dots for their difficulty: •, •• or •••. Where a cell says `commit`, put down your
# own numbers before you launch. Leave None where you have none.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import tempfile

import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots, widgets
from labkit.checks import fsdp as checks
from labkit.checks.claims import claim, commit
from labkit.config import require
from labkit.parallel.small_fsdp import shard_unit
from labkit.plots.collectives import fastest_all_reduce_times
from labkit.theory import fsdp as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network is a stack of three multilayer perceptrons: linear, ReLU, linear, ReLU,
# with an inner width of 3, 4 and 3 times `DIM`. Each of the three is a *block*. You may change them; the next cell
# refuses what cannot work. The text speaks of these; cells say what yours change.

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
TOLD = (RANKS, DIM, BATCH) == (2, 128, 32)  # the values that the text speaks of
TOKENS = 8 * BATCH
UNITS = [4 * (2 * times * DIM**2 + (times + 1) * DIM) for times in (3, 4, 3)]  # bytes of each block's parameters
PARAMETERS = sum(UNITS) // 4

# %% [markdown]
# ## 1. Why: a model that fits on no device
#
# **core, 10 minutes**
#
# Take a model of P parameters in float32. Training keeps four numbers for each of them: the parameter, its gradient,
# and the two running means of Adam. That is 16 P bytes. A language model of 7 billion parameters needs 112 GB before a
# single activation. A GPU of 80 GB cannot hold that.
#
# In plain data parallelism (DDP) every rank holds all 16 P bytes, although all ranks hold the same. (PyTorch's DDP
# holds the gradients a second time by default, in its buckets: 20 P. With `gradient_as_bucket_view=True` it does not.)
# More ranks do not help. ZeRO (Rajbhandari et al., 2020) removes the copies in three stages:
#
# | stage | between two steps, each rank holds | in PyTorch |
# |---|---|---|
# | 0 | everything whole | DDP |
# | 1 | a share of the optimizer's state | ZeroRedundancyOptimizer |
# | 2 | a share of the gradients as well | (section 3 has something like it) |
# | 3 | a share of the parameters as well | FSDP |
#
# ### Exercise 1: bytes of each stage (•, 5 minutes)
#
# How many bytes does a rank hold between two steps, that is after `optimizer.step()` and before `zero_grad()`? All
# sizes divide evenly.
#
# <details><summary>Hint 1</summary>
#
# Write down the bytes of whole parameters, whole gradients and whole optimizer state first.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Stage s divides one more of the three by the number of ranks. Adam keeps two numbers for each parameter.
#
# </details>


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
held = {
    "stage 0\n(DDP)" if stage == 0 else f"stage {stage}": theory.zero_bytes(7 * 10**9, 8, stage) for stage in range(3)
}
held["stage 3\n(FSDP)"] = theory.zero_bytes(7 * 10**9, 8, 3)
_ = plots.memory_comparison(held, unit="GB", ylabel="held by each of 8 ranks between steps")

# %% [markdown]
# *Seven billion parameters on 8 ranks. With DDP each rank holds 112 GB. In stage 3 it holds 14 GB.*

# %% tags=["claim"]
totals = [sum(sizes.values()) for sizes in held.values()]
claim("with DDP each rank holds 112 GB", totals[0] == 112e9)
claim("in stage 3 it holds 14 GB", totals[3] == 14e9)

# %% [markdown]
# Small enough for this machine: a model of 18 million parameters, 290 MB with gradients and Adam. Both runs below have
# a cap: a rank that allocates more than 320 MiB, that is 336 MB, is ended. Besides the 290 MB, a step needs room to
# work in. The program `fsdp_matrix` is this lab's `fsdp_wrap` with more options, the cap among them.


# %%
def fits(wrap: str) -> str:
    """Whether a rank stays below the cap; on a system that knows no such cap, why not."""
    try:
        model = {"model": "toy", "hidden": 3000, "narrow": 16, "batch": 1, "steps": 1}
        labkit.run("fsdp_matrix", nproc=4, wrap=wrap, memory_cap_mib=320, **model)
    except labkit.RankFailed as failure:
        return failure.exc_type
    return "trained"


outcome = {"DDP, every rank holds all": fits("none"), "FSDP, every rank holds a quarter": fits("layer")}
print("\n".join(f"{how}: {what}" for how, what in outcome.items()))

# %% [markdown]
# *DDP breaks the cap, FSDP keeps it, with the same model and the same samples.* (A cap on a CPU's memory needs Linux.
# On another system both lines name an error.)

# %% tags=["claim"]
claim("DDP breaks the cap, FSDP keeps it", list(outcome.values()) == ["MemoryCapExceeded", "trained"])

# %% [markdown]
# Sharding has a price. A rank cannot compute with half of a matrix, so the missing parts must come from the others,
# again and again.

# %% [markdown]
# ## 2. The code you would write
#
# **core, 10 minutes**
#
# This is all that your own script needs, as long as every rank can build the whole model in its host's memory: 8 ranks
# on a host, 8 copies. `fully_shard` changes a module in place: its parameters become `DTensor`s, of which each rank
# holds a part. The *mesh* says which ranks share them; `Shard(dim=0)` means cut by rows. Call it on the parts first,
# then on the whole. Make the optimizer afterwards.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
torch.manual_seed(0)  # all ranks start with the same parameters
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)])
for block in model:
    fully_shard(block, mesh=mesh)  # each block is a unit
fully_shard(model, mesh=mesh)  # what is left is the root's
optimizer = torch.optim.Adam(model.parameters())

torch.manual_seed(dist.get_rank())  # every rank has its own samples
samples = torch.randn(32, 64)  # on GPUs: device="cuda"
for _ in range(5):
    optimizer.zero_grad()
    (model(samples) - samples).square().mean().backward()
    optimizer.step()

weight = model[0][0].weight
print(f"a weight of {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} are here: {weight.placements}")
dist.destroy_process_group()

# %% [markdown]
# Under `torchrun --nproc-per-node 2` the same lines run as a file of their own.
#
# A model that is too large for that is made on PyTorch's *meta* device, where tensors have shapes and no memory. Shard
# it there, and then give memory to the shards only:
#
# ```python
# with torch.device("meta"):
#     model = build()
# ...  # fully_shard, as above
# model.to_empty(device="cuda")
# initialise(model)  # or load a checkpoint; buffers, too
# ```
#
# `torch.nn.utils.clip_grad_norm_` works on the sharded parameters as usual.
#
# ### Units
#
# Each module that you gave to `fully_shard` is a **unit**. A unit lives like this:
#
# 1. Before its forward pass, an **all-gather** collects its parameters from all ranks.
# 2. It computes.
# 3. The full parameters are freed. This is called *resharding*.
# 4. Before its backward pass, they are gathered once more.
# 5. After its backward pass, the full parameters are freed again. A **reduce-scatter** adds up the gradients, FSDP
#    divides them by the number of ranks, and each rank receives only its own part.
#
# ```
# unit 0   gather compute free                                         gather compute free reduce
# unit 1                        gather compute free gather compute free reduce
#          forward pass ------------------------->  backward pass ----------------------------->
# ```
#
# What lies in no other unit belongs to the root unit, the model itself. By default the root is not resharded after the
# forward pass: its backward pass comes next. (Say `reshard_after_forward=True` for the root as well, and it is.) The
# root of the stack above holds nothing, since its blocks hold everything.
#
# ### Exercise 2: how many all-gathers? (•, 5 minutes)
#
# Count the all-gathers of one training step. `units` includes the root if the root holds parameters of its own. For the
# root `reshard_after_forward` is left out, so that it keeps its default.
#
# <details><summary>Hint</summary>
#
# Steps 1 and 4 gather. Which of the two does the root skip? What if step 3 is left out?
#
# </details>


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
# ### Commit, run, compare
#
# Now the measured run. `launch/fsdp_wrap.py` does what the script in section 2 does, with this notebook's stack: three
# blocks, three units, nothing left for the root. It counts in one more step, which is not timed.
#
# Commit to five numbers. Bytes are summed over one step. They are those that a rank **hands to the calls**: to an
# all-gather its own part, to a reduce-scatter the whole gradients. The stack has `PARAMETERS` parameters, 329,344 of
# them. `end_parameter_bytes` is this rank's share of the parameters alone, a quarter of what your `zero_bytes` gives
# for stage 3.

# %% tags=["commit"]
mine = commit(
    all_gather_count=lambda: all_gathers(units=3, reshard_after_forward=True, root_has_parameters=False),
    all_gather_bytes=None,
    reduce_scatter_count=None,
    reduce_scatter_bytes=None,
    end_parameter_bytes=None,
)
### BEGIN SOLUTION
mine |= commit(
    reduce_scatter_count=3,
    all_gather_bytes=2 * 4 * PARAMETERS / RANKS,
    reduce_scatter_bytes=4 * PARAMETERS,
    end_parameter_bytes=lambda: zero_bytes(PARAMETERS, RANKS, 3) / 4,
)
### END SOLUTION

# %%
layers = theory.mlp_stack_layers("block", DIM)
predicted = theory.step_collectives(layers, RANKS) | theory.resident_bytes(layers, RANKS)
block = labkit.run("fsdp_wrap", wrap="block", **SETUP)
plots.comparison_table(block, predicted, yours=mine)

# %% [markdown]
# *Real ranks trained, and one of their steps was traced. Every count and every byte is as theory says.*
#
# Adam's state is a little more than two numbers a parameter: it also counts its steps, 4 bytes for each tensor.

# %% tags=["claim"]
claim(
    "every count and every byte is as theory says", all(block.value(name) == size for name, size in predicted.items())
)

# %% [markdown]
# ## 3. What travels: FSDP sends 1.5 times as much as DDP
#
# **core, 10 minutes**
#
# In the table both rows of bytes are equal, but the all-gathers went through the parameters twice and the
# reduce-scatters once. In one pass the all-gathers were handed half of the parameters, the reduce-scatters all of them.
# On 8 ranks it would be an eighth against all. So it looks as if a gather were eight times cheaper. It is not. Both
# move the same bytes **over the wire**, and that is what takes time.
#
# Let S be the bytes of all parameters. In a ring of N ranks, a gather starts with S/N bytes on each rank, and each rank
# passes on N − 1 such parts. A reduce-scatter starts with all S bytes, and each rank passes on N − 1 sums of S/N bytes.
# Either way a rank sends S (N − 1)/N bytes. Call that one **pass** over the parameters.
#
# DDP's all-reduce is a reduce-scatter followed by an all-gather. That is two passes.
#
# ### Exercise 3: bytes on the wire (••, 6 minutes)
#
# How many bytes does a rank send in one step? `technique` is `"ddp"`, `"fsdp"`, or `"kept"`: FSDP which keeps the
# gathered parameters from the forward to the backward pass.
#
# <details><summary>Hint 1</summary>
#
# Count the passes first: gathers and reduce-scatters of each technique.
#
# </details>
# <details><summary>Hint 2</summary>
#
# One pass sends `parameter_bytes * (ranks - 1) / ranks`. FSDP gathers twice and reduces once.
#
# </details>


# %%
def wire_bytes(parameter_bytes: int, ranks: int, technique: str) -> float:
    ### BEGIN SOLUTION
    passes = {"ddp": 2, "fsdp": 3, "kept": 2}[technique]
    return passes * parameter_bytes * (ranks - 1) / ranks
    ### END SOLUTION


# %%
checks.wire_bytes(wire_bytes)

# %%
passes = {
    "DDP": theory.wire_bytes(1, 8, all_gathers=1),
    "FSDP": theory.wire_bytes(1, 8),
    "FSDP, parameters kept": theory.wire_bytes(1, 8, all_gathers=1),
}
_ = plots.communication_passes(passes)

# %% [markdown]
# *Bytes on the wire, for 8 ranks, as theory says. FSDP sends 1.5 times as much as DDP. DDP's bar is its all-reduce,
# drawn as the two passes that it consists of.*

# %% tags=["claim"]
sent = {name: sum(each.values()) for name, each in passes.items()}
claim("FSDP sends 1.5 times as much as DDP", sent["FSDP"] == 1.5 * sent["DDP"])

# %% [markdown]
# ### Gather once or twice
#
# `reshard_after_forward=False` keeps the parameters between forward and backward pass. That saves one all-gather for
# each unit, but during a step it costs memory that FSDP should save, and more of it with more units. PyTorch's older
# name for it is SHARD_GRAD_OP. It computes as ZeRO stage 2 does, with whole parameters. But between the steps the
# parameters are sharded as well, which stage 2 does not do.
#
# What does it change for the stack? Commit to what a rank hands to its calls.

# %% tags=["commit"]
mine = commit(all_gather_count=None, all_gather_bytes=None, reduce_scatter_count=None)
### BEGIN SOLUTION
mine = commit(
    all_gather_count=lambda: all_gathers(units=3, reshard_after_forward=False, root_has_parameters=False),
    all_gather_bytes=4 * PARAMETERS / RANKS,
    reduce_scatter_count=3,
)
### END SOLUTION

# %%
kept = labkit.run("fsdp_wrap", wrap="block", reshard_after_forward=False, **SETUP)
plots.comparison_table(kept, theory.step_collectives(layers, RANKS, reshard_after_forward=False), yours=mine)

# %% [markdown]
# And what does it cost in memory? A rank's **peak** is the moment at which it holds most in all.

# %%
gathered = {name: run.value("peak_unsharded_parameter_bytes") for name, run in {"freed": block, "kept": kept}.items()}
for name, size in gathered.items():
    print(f"{name} after the forward pass: {size:,.0f} bytes of gathered parameters at the peak")
for name, run in {"freed": block, "kept": kept}.items():
    print(f"{name} after the forward pass: {run.value('peak_total_bytes'):,.0f} bytes in all at the peak")

# %% [markdown]
# *Half the all-gathers, half their bytes. Reduce-scatters stay as they were. At the peak, more gathered parameters are
# held, yet with these sizes the peak as a whole is the same.*
#
# How can that be? The peak lies in the backward pass of the middle block. The last block is freed by then, so two
# blocks of three are held. Where parameters are freed, FSDP has by then gathered the first block, which comes next,
# into a buffer; that counts as another category (section 6). With three blocks the two come out alike. With many blocks
# "kept" holds nearly the whole model, and "freed" two blocks.

# %% tags=["claim"]
claim("half the all-gathers", 2 * kept.value("all_gather_count") == block.value("all_gather_count"))
claim("half their bytes", 2 * kept.value("all_gather_bytes") == block.value("all_gather_bytes"))
claim("more gathered parameters are held at the peak", gathered["kept"] > gathered["freed"])
all_parameters = RANKS * block.value("end_parameter_bytes")
same = kept.value("peak_total_bytes") == block.value("peak_total_bytes")
claim("the peak as a whole is the same", same, where=TOLD)
claim("two blocks of three are held there", 0.6 < gathered["kept"] / all_parameters < 0.8, where=TOLD)

# %% [markdown]
# ## 4. Build it: a small FSDP
#
# **core, 30 minutes**
#
# You write what `fully_shard` does to one unit. It takes about 35 lines. These are the pieces.
#
# - A **shard**: this rank's part of all parameters of the unit, in one flat row. It is an `nn.Parameter`, and the
#   optimizer will train it.
# - A **buffer**: a flat tensor for all parameters of the unit. The module's weights are views of it. A tensor's memory
#   can be given back while the tensor stays: `tensor.untyped_storage().resize_(0)`. Resize it to its old number of
#   bytes, and there is memory again, with nothing useful in it.
# - **Hooks**: functions that PyTorch calls at certain moments. The table below names four. Hooks return None here.
# - **Collectives**: `dist.all_gather_into_tensor(whole, part)` and `dist.reduce_scatter_tensor(part, whole)`. The
#   second adds up and does not divide. (From PyTorch 2.13 on they are called `all_gather_single` and
#   `reduce_scatter_single`, with the same arguments. The old names still work, with a warning.)
#
# | you write | it calls | when |
# |---|---|---|
# | `module.register_forward_pre_hook(f)` | `f(module, inputs)` | before the module computes |
# | `module.register_forward_hook(f)` | `f(module, inputs, output)` | after it has computed |
# | `tensor.register_hook(f)` | `f(gradient)` | in the backward pass, when this tensor's gradient is known |
# | `parameter.register_post_accumulate_grad_hook(f)` | `f(parameter)` | when `parameter.grad` is complete |
#
# ### Exercise 4: shard one unit (•••, 20 minutes)
#
# Complete `small_fsdp(unit)`. It shards the unit in place and returns the shard. All parameters are float32 and
# trained, and the unit gives one tensor.
#
# - The shard: all parameters in the order of `unit.parameters()`, flat, one after another, with zeros at the end until
#   the number of ranks divides its length. Rank r keeps part r.
# - Whole parameters have memory only from the forward pre-hook to the end of the forward pass, and again in the
#   backward pass.
# - When the last gradient of the unit is there: free the buffer, make a flat row of the gradients, set each parameter's
#   own `.grad` to None, and leave in `shard.grad` this rank's part of the **mean** over the ranks.
#
# The check trains two steps on two real ranks. It looks at outputs, gradients, memory and calls. A rank that reads
# parameters whose memory is gone gets an error, or crashes; the check tells you which.
#
# <details><summary>Hint 1: the order of things</summary>
#
# Make the flat row first. Cut the shard out of it, and clone it. Point each parameter at its piece of the row:
# `parameter.data = piece.view(parameter.shape)`. Then free the row's memory. From here on the row is the buffer.
#
# </details>
# <details><summary>Hint 2: the functions inside</summary>
#
# `gather(*_)` resizes the storage and gathers `shard.detach()` into the row. It serves as forward pre-hook and as the
# hook on the output. The forward hook frees, and registers `gather` on the output. The gradient hook counts: once it
# has been called for all parameters, it reduces.
#
# </details>
# <details><summary>Hint 3: the last hook</summary>
#
# `ready.append(parameter)`; if `len(ready) == len(parameters)`: clear the list, resize to 0, cat the gradients and as
# many zeros as before, forget the gradients, `shard.grad = torch.empty_like(shard)`, reduce-scatter into it, divide.
#
# </details>


# %%
def small_fsdp(unit: nn.Module) -> nn.Parameter:
    ### BEGIN SOLUTION
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    zeros = parameters[0].new_zeros(-sum(p.numel() for p in parameters) % ranks)
    full = torch.cat([*(p.detach().flatten() for p in parameters), zeros])
    shard = nn.Parameter(full.chunk(ranks)[dist.get_rank()].clone())
    start = 0
    for parameter in parameters:
        parameter.data = full[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    buffer, size = full.untyped_storage(), full.untyped_storage().nbytes()
    ready = []

    def gather(*_: object) -> None:
        buffer.resize_(size)
        dist.all_gather_into_tensor(full, shard.detach())

    def free_until_backward(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        buffer.resize_(0)
        if output.requires_grad:
            output.register_hook(gather)

    def reduce(parameter: nn.Parameter) -> None:
        ready.append(parameter)
        if len(ready) == len(parameters):
            ready.clear()
            buffer.resize_(0)
            gradients = torch.cat([*(p.grad.flatten() for p in parameters), zeros])
            for each in parameters:
                each.grad = None
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, gradients)
            shard.grad /= ranks

    buffer.resize_(0)
    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free_until_backward)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduce)
    return shard
    ### END SOLUTION


# %%
verdict = checks.small_fsdp(small_fsdp)
verdict

# %% [markdown]
# ### Use it
#
# Now your function shards the stack, on real ranks. `fsdp="yours"` calls it with every block. Until your function
# passes, labkit's own stands in for it: `labkit/parallel/small_fsdp.py`, which you may read afterwards.
#
# `labkit.check` gives the same parameters and samples to one device. It compares the losses and outputs of all three
# steps, and after the last one 12 gradients and 12 parameters: 30 tensors.

# %%
working = small_fsdp if verdict.ok else shard_unit
PARITY = {"nproc": RANKS, "model": "mlp_stack", "fsdp": "yours", "steps": 3}
print(labkit.check("fsdp_wrap", use={"small_fsdp": working}, **PARITY).verdict_text)

# %% [markdown]
# ### Exercise 5: predict the peak (••, 6 minutes)
#
# Whether a model fits is decided at the peak. You find it with a ledger: walk through the step, add what is allocated,
# subtract what is freed, and remember the largest sum.
#
# Here is the ledger of the small FSDP, activations left out. `units` are the bytes of each unit's parameters, in the
# order of the forward pass. The last step's gradients are dropped before the forward pass begins.
#
# - Always there: this rank's share of the parameters, and of Adam's two numbers for each.
# - The backward pass goes from the last unit to the first. When the gradients of a unit are complete, its buffer is
#   freed. A flat row of the gradients is made, as large as the unit. Then the gradients themselves are dropped.
# - This rank's share of the unit's gradients is allocated, and stays to the end of the step.
# - Gloo, the backend for CPUs, makes a working copy of the row. (NCCL, on GPUs, needs none of that size.)
#
# What is the peak? It lies at the reduce-scatter of one of the units.
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
# Commit, and measure your FSDP. The batch is one sample, so that activations hardly count. `UNITS` are the bytes of the
# three blocks. The measurement is PyTorch's `MemTracker`: it follows every tensor that the step makes.

# %% tags=["commit"]
mine = commit(
    peak_total_bytes=lambda: peak_bytes(UNITS, RANKS),
    end_parameter_bytes=None,
    all_gather_count=None,
)
### BEGIN SOLUTION
mine |= commit(end_parameter_bytes=sum(UNITS) / RANKS, all_gather_count=6)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
own = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": working}, **SETUP | {"batch": 1})
shares = [-(-unit // 4 // RANKS) for unit in UNITS]
small = theory.step_collectives(layers, RANKS) | {"end_parameter_bytes": 4 * sum(shares)}
small |= {"all_gather_bytes": 2 * 4 * sum(shares), "reduce_scatter_bytes": RANKS * 4 * sum(shares)}
plots.comparison_table(
    own, small | {"peak_total_bytes": theory.small_fsdp_peak_bytes(UNITS, RANKS)}, yours=mine, tolerance=0.05
)

# %% [markdown]
# *The counts and bytes are those of* `fully_shard`*. Between the steps a rank holds only its share of the parameters.
# The peak is within 5 % of the ledger's: what is missing is the activations.*

# %% tags=["claim"]
claim("counts and bytes are those of fully_shard", all(own.value(name) == size for name, size in small.items()))
excess = own.value("peak_total_bytes") / theory.small_fsdp_peak_bytes(UNITS, RANKS) - 1
claim("the peak is within 5 % of the ledger's", 0 <= excess < 0.05, where=DIM >= 128)

# %% [markdown]
# What does `fully_shard` do that yours does not? On GPUs it starts the next all-gather while a unit computes, so that
# it hides (section 7). It gathers into a buffer of its own and copies from there into each parameter. It takes
# parameters in other precisions, and it keeps each parameter's own shape: a shard is a `DTensor` of some rows, which
# can be saved by name.
#
# ## 5. Break it
#
# **core, 10 minutes**
#
# ### A test that cannot fail
#
# Take one line out of the working function: `shard.grad /= ranks`. Now gradients are sums, twice too large on two
# ranks. (If your line looks different, write yours.) `checks.replace_source_line` gives the function without that line.

# %%
LINE = "shard.grad /= ranks"
try:
    broken = checks.replace_source_line(working, LINE)
except ValueError as problem:
    print(f"{problem}. Until then labkit's own is broken instead.")
    broken = checks.replace_source_line(shard_unit, "shard.grad /= ranks")
wrong = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": broken}, **SETUP | {"batch": 1})

# %%
apart = (wrong.losses / own.losses - 1).abs()
print(f"the broken run's first loss differs by {apart.iloc[0]:.1%}, its last by {apart.iloc[-1]:.1%}")

# %% [markdown]
# *The losses agree, over all steps. A test that compares losses passes.*
#
# Even the first loss that is shown comes after an update, in a step of warm-up. Adam divides each gradient by its own
# running size, so a factor in all gradients drops out, but for the tiny ε in the denominator. For this error the test
# cannot fail. With SGD, with clipping, or with weight decay in the gradient, the same code would train differently.

# %% tags=["claim"]
claim("the losses agree, over all steps", apart.max() < 0.005, where=TOLD)

# %% [markdown]
# ### Exercise 6: a test that can (••, 6 minutes)
#
# Write the test that would have caught it. `mine` and `reference` are gradients by name, dicts of tensors. Return True
# if they agree: the same names, at least one, and for each the largest absolute difference is at most 1e-5 of the
# largest absolute value of the reference.
#
# <details><summary>Hint 1</summary>
#
# What does your test say of two empty dicts? Of a gradient that is NaN?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `NaN <= x` is False, and so is `NaN > x`. Ask for each name whether the difference is small enough, and return all of
# it.
#
# </details>


# %%
def gradients_agree(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> bool:
    ### BEGIN SOLUTION
    if mine.keys() != reference.keys() or not mine:
        return False
    return all(
        bool((mine[name] - reference[name]).abs().max() <= 1e-5 * reference[name].abs().max()) for name in reference
    )
    ### END SOLUTION


# %%
checks.gradients_agree(gradients_agree)

# %% [markdown]
# The parity check of this kit does the same, for outputs and parameters as well. It uses SGD.

# %%
print(labkit.check("fsdp_wrap", use={"small_fsdp": broken}, **PARITY).verdict_text)

# %% [markdown]
# Now break something else in a copy of your function. Leave out `buffer.resize_(0)` in the forward hook: the numbers
# stay right, and parity passes. Only what looks at memory sees it: `checks.small_fsdp`, and the peak of exercise 5.
# After you write a test, break the code once and watch it fail.

# %% [markdown]
# ## 6. What to wrap
#
# **core, 12 minutes**
#
# What is one unit decides what is whole at the same time. `root` makes the model one unit. `block` makes one unit of
# each block. `layer` makes one of each linear layer. Beside them stands plain data parallelism, which shards nothing
# (`wrap="none"`). It is labkit's own: the flat tensor (*bucket*) that it all-reduces lives for a moment only.
#
# One run uses **activation checkpointing** as well: a checkpointed block keeps only its input, and computes its inner
# activations again in the backward pass.
#
# The figure splits each peak into categories. Three of them need a word.
#
# - *Gathered parameters* are whole ones, while a unit computes.
# - *Communication buffers* are the tensors that an all-gather or a reduce-scatter fills or reads. `fully_shard` gathers
#   into a buffer and copies from there. In the forward pass the buffer stays until the next one is filled.
# - *Temporary* is what lives for a moment: gradients of activations, gradients of whole parameters before they are
#   reduced, and, with checkpointing, activations that are computed again.
#
# `theory.fsdp_step_peak` is a ledger like yours, for `fully_shard`. It knows the buffers and the activations, too.
#
# Before you look: what is the peak of `block`, in bytes? It lies in the backward pass of block 1, at its inner ReLU.
# One *row* below is an activation of the network's width, `4 * TOKENS * DIM` bytes.
#
# | held at that moment | bytes |
# |---|---|
# | shares of parameters and of Adam's state | `3 * sum(UNITS) / RANKS` |
# | its share of block 2's gradients | `UNITS[2] / RANKS` |
# | block 1 gathered, block 0 gathered ahead, the flat gradients of block 2 | `sum(UNITS)` |
# | activations of blocks 0 and 1: their inputs, and inner widths 3 and 4 | 9 rows |
# | temporary: gradients before and after the inner ReLU of block 1 | how many rows? |
# | temporary: one whole gradient of a weight, `DIM` × 4 `DIM` | as much as 2 rows |

# %% tags=["commit"]
mine = commit(peak_total_bytes=None)
### BEGIN SOLUTION
mine = commit(peak_total_bytes=lambda: (3 * sum(UNITS) + UNITS[2]) / RANKS + sum(UNITS) + 19 * 4 * TOKENS * DIM)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
UNSHARDED = "data\nparallel"
runs = {UNSHARDED: labkit.run("fsdp_wrap", wrap="none", **SETUP)}
expected = {UNSHARDED: theory.ddp_step_peak(layers, TOKENS)}
for wrap, checkpointing in (("root", False), ("block", False), ("block", True), ("layer", False)):
    label = wrap + ",\ncheckpointing" * checkpointing
    walk = theory.mlp_stack_layers(wrap, DIM)
    expected[label] = theory.fsdp_step_peak(walk, TOKENS, RANKS, checkpointing=checkpointing)
    known = label == "block"
    runs[label] = block if known else labkit.run("fsdp_wrap", wrap=wrap, checkpointing=checkpointing, **SETUP)
bound = 0.85 * runs["root"].value("peak_total_bytes")
plots.comparison_table(block, {"peak_total_bytes": expected["block"]["total"]}, yours=mine, tolerance=0.05)

# %%
_ = plots.memory_comparison(
    {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()},
    runs,
    bound=bound,
)

# %% [markdown]
# *Peak memory of a rank. In a dashed frame: predicted. Dotted: the bound of exercise 7. With 2 ranks, wrapping the root
# alone needs within 10 % of what data parallelism needs. Blocks need less than the root, layers less than blocks.
# Checkpointing lowers the peak of blocks. Every prediction is within 5 % of the measurement.*
#
# Wrapping the root alone gathers all parameters at once, and their buffer holds them a second time. The optimizer's
# state is sharded all the same, so between the steps the root saves as much as the others do. At the root's peak there
# is nothing temporary. Why? It lies near the end of the forward pass, at the ReLU inside the last block. The buffer is
# still there. So are nearly all activations, and for a moment this ReLU's input beside its output. No gradient exists
# yet. With blocks and layers the peak lies in the backward pass.
#
# For `layer` theory is 4 % above the measurement, more with more ranks. In its ledger the all-gather of the next layer
# is already under way while this layer's parameters are gathered. In the measured step the two did not meet at the
# peak.

# %% tags=["claim"]
peaks = {label: result.value("peak_total_bytes") for label, result in runs.items()}
claim(
    "wrapping the root alone needs within 10 % of what data parallelism needs",
    abs(peaks["root"] / peaks[UNSHARDED] - 1) < 0.1,
    where=TOLD,
)
claim("blocks need less than the root, layers less than blocks", peaks["layer"] < peaks["block"] < peaks["root"])
claim("checkpointing lowers the peak of blocks", peaks["block,\ncheckpointing"] < peaks["block"])
errors = {label: abs(peaks[label] / sizes["total"] - 1) for label, sizes in expected.items()}
claim("every prediction is within 5 % of the measurement", max(errors.values()) < 0.05, where=RANKS == 2)
claim("with more ranks all but layer's are", max(errors[label] for label in errors if label != "layer") < 0.05)
claim("at the root's peak there is nothing temporary", runs["root"].value("peak_temp_bytes") < 0.01 * peaks["root"])

# %% [markdown]
# Then why not always layers? Each collective costs at least its latency, whatever its size.

# %%
collectives = ("all_gather_count", "reduce_scatter_count")
rows = {
    " ".join(label.split()): [result.value(name) for name in collectives]
    for label, result in runs.items()
    if label != UNSHARDED
}
pandas.DataFrame.from_dict(rows, orient="index", columns=collectives).astype(int)

# %% tags=["nbval-ignore-output"]
_ = plots.latency_bars({" ".join(label.split()): result for label, result in runs.items()})

# %% [markdown]
# *Time of a step. These ranks share two cores, so the bars move from run to run: on this machine the order of the three
# lower bars may turn round in the next run, however clear it looks here. Even the checkpointed run may look faster,
# though it computes more: here waiting for messages weighs more than arithmetic. Take several runs before you believe
# an order. What can be counted are the messages, in the table above.*
#
# Layers send twice as many messages as blocks, for the same bytes. Where latency, the fixed time that a message takes
# to start, outweighs the time of the bytes, that shows.
#
# A transformer block a unit is the usual choice: large enough to keep the network busy, small enough to be a small part
# of the model.
#
# Checkpointing is paid with arithmetic: the backward pass computes each block's forward pass once more. It saves
# activations; sharding saves parameters, gradients and optimizer state. The savings add up. In your own script, before
# `fully_shard`:
#
# ```python
# from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
#
# apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
# ```

# %% tags=["claim"]
claim("layers send twice as many messages as blocks", rows["layer"] == [2 * count for count in rows["block"]])

# %% [markdown]
# ### Exercise 7: meet a bound (•, 4 minutes)
#
# A rank may use at most 85 % of what `root` needs at its peak, and a step may take at most six all-gathers. Choose
# `wrap` (`"none"`, `"root"`, `"block"`, `"layer"`), `checkpointing` and `reshard_after_forward`. Your plan is launched
# and measured. The dotted line in the figure is the bound.
#
# <details><summary>Hint</summary>
#
# Which bars lie below the dotted line? Which of them takes at most six all-gathers?
#
# </details>


# %%
def plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    return {"wrap": "block", "checkpointing": True, "reshard_after_forward": True}
    ### END SOLUTION


# %%
checks.memory_plan(plan, int(bound), gathers=6, **SETUP)

# %% [markdown]
# ### Explore (optional, 5 minutes)
#
# The same ledger, drawn event by event: what a rank holds in the course of one step, and beside it what it sends.
# *run it* measures the peak and the bytes on real ranks. The dotted line is a budget of 5 MB.
#
# Turn *sharded* from 0 to 3, and see which colours shrink. ZeRO 1 is theory alone: no program here trains with it.
# Position 2 is not ZeRO's stage 2, but section 3's `reshard_after_forward=False`: parameters are sharded too, and
# gathered once. Then turn *units*: where in the step does the peak lie? With bfloat16 (section 9) parameters are
# gathered, and activations kept, in 2 bytes a number; shards, reduced gradients and the loss stay float32.
#
# Question: gathering once sends a third less than gathering twice, and at the default both have the same peak. Why
# gather twice?
#
# <details><summary>Answer</summary>
#
# Choose 6 blocks of width 128. Of three blocks, gathering twice holds two at the peak anyway: one computes, the next
# one is gathered ahead. Gathering once holds all blocks that the backward pass has not yet freed, and these are more
# the deeper the model is: 11.0 MB against 9.66 MB.
#
# </details>

# %%
widgets.WrappingExplorer()

# %% [markdown]
# ## 7. Does it hide?
#
# **optional, 20 minutes**
#
# A message is free if it travels while the rank computes. What is left, communication during which the rank waits, is
# **exposed**. To see it we profile one step with `torch.profiler`, and make each block compute 5 ms longer, so that
# there is something to hide behind. The network is wider here, so that a message takes milliseconds. The profiler
# itself slows a step down: compare time lines with time lines, and take durations from timed steps.
#
# First as FSDP does it on CPU ranks by default: each all-gather is waited for where it starts.

# %% tags=["nbval-ignore-output"]
slow = SETUP | {"timeline": True, "delay_ms": 5.0, "dim": 512, "batch": 4, "steps": 2}
waiting = labkit.run("fsdp_wrap", **slow)
_ = plots.timeline(waiting)

# %% [markdown]
# *Two rows for each rank. The numbers are the blocks. What is underlined is exposed. Thin pale bars are small
# operations between the large ones, such as copies. A block takes the 5 ms and its own arithmetic, which the profiler
# stretches. Short bars around an all-gather are copies, of the shard in and of what was gathered out; each has the
# number of the block that FSDP is at.*
#
# Read the order. In the forward pass the blocks are gathered as 0, 1, 2. In the backward pass it is 2, then 1 and 0,
# and after each block its gradients are reduce-scattered. There FSDP asks for the next block early: block 1 is gathered
# before block 2 has computed. But a CPU rank waits for it at once, so nothing is hidden.
#
# Now with **prefetching**: while block 0 computes, block 1 is already gathered. On GPUs FSDP2 does this by itself;
# `block.set_modules_to_forward_prefetch([next_block])` asks for more. On CPU ranks labkit asks for it, and lets a rank
# wait for an all-gather where its result is used, not where it starts; so those of the backward pass can hide, too.

# %% tags=["nbval-ignore-output"]
ahead = labkit.run("fsdp_wrap", prefetch=True, **slow)
_ = plots.timeline(ahead)

# %% [markdown]
# *In the forward pass the all-gathers of blocks 1 and 2 start beside the block before, or close to it. In the backward
# pass those of blocks 1 and 0 start about when block 2, or 1, begins to compute. What is not underlined was hidden. The
# first all-gather of each pass cannot hide: no block computes beside it. On CPU ranks PyTorch waits for each
# reduce-scatter, so these stay exposed. A rank that is early waits in its calls for the other, and more of it is
# underlined. Each rank counts from its own start: compare along its rows, not across ranks.*

# %% tags=["nbval-ignore-output"]
_ = plots.communication_exposure({"waiting": waiting, "prefetching": ahead})

# %% [markdown]
# *Communication of one profiled step, mean over the ranks, and how much of it is exposed. The share varies from run to
# run, and on two cores also with what else the machine does. In most runs prefetching exposes less.*
#
# The raw traces are in the folder of the run, one a rank. Open them at ui.perfetto.dev to see every operator.

# %% [markdown]
# ### Exercise 8: the forgotten block (••, 6 minutes)
#
# Somebody wrapped all nine blocks of another model but one. It still trains, and the numbers are right. In the time
# line the forgotten block has no all-gather of its own, and its parameters are gathered with the root's. Which block it
# is was drawn by lot inside the program.

# %% tags=["nbval-ignore-output"]
other = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "delay_ms": 3.0, "steps": 2}
mystery = labkit.run("fsdp_wrap", forget=2026, timeline=True, **other)
_ = plots.timeline(mystery, ranks=[0])

# %% [markdown]
# *One rank's step. The numbers are positions in the model: blocks 0 to 8 stand at 4 to 12.*
#
# A count finds out at once that something is missing. The root is gathered once, each other unit twice. So all-gathers
# less reduce-scatters is the number of wrapped blocks. The next verdict is red, as it should be: it is about the run,
# not about you.

# %%
checks.every_block_wrapped(mystery, blocks=9)

# %% [markdown]
# Which block is it? Count from 0.
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
# ## 8. When does it pay?
#
# **core, 8 minutes**
#
# FSDP saves memory, so it pays whenever the model does not fit otherwise. The question is whether it costs time. It
# does not, if its messages hide: they travel while the rank computes. What a rank waits for is *exposed*. Compare two
# times of one step, on one rank.
#
# - Arithmetic: training takes about 6 operations for each parameter and each token, 2 in the forward pass and 4 in the
#   backward pass. With P parameters, T tokens (rows of a linear layer's input) and F operations a second: `6 P T / F`
#   seconds.
# - Communication: three passes of `b P (N - 1)/N` bytes, with b bytes a number, at B bytes a second:
#   `3 b P (N - 1)/(N B)` seconds.
#
# Communication can hide if the second is not larger than the first. P drops out:
#
# > T ≥ b (N - 1)/N · F / (2 B)
#
# So the size of the model does not matter. What matters is the **batch of each rank**, in tokens, against F/B: how many
# operations a rank does in the time in which one byte travels. Add ranks and keep the whole batch, and each rank's
# share of tokens shrinks. At some number of ranks communication binds.
#
# **An example.** An NVIDIA H100 (SXM) does 989 · 10¹² bfloat16 operations a second by its data sheet (dense), of which
# 40 % is a good result in training: F = 400 · 10¹². NVLink brings 900 GB/s by the data sheet, that is 450 GB/s in each
# direction. With 8 GPUs and 2 bytes a number, gradients included: T ≥ 2 · 7/8 · 400 · 10¹² / (2 · 450 · 10⁹) = 778
# tokens for each GPU. One sequence of 2048 tokens is enough.
#
# ### Exercise 9: tokens to hide (••, 5 minutes)
#
# Write the inequality as a function: from how many tokens of a rank on can communication hide?
#
# <details><summary>Hint</summary>
#
# Set `6 * P * T / flops_per_s` equal to `3 * number_bytes * P * (ranks - 1) / ranks / wire_bytes_per_s`, and solve for
# T.
#
# </details>


# %%
def tokens_to_hide(flops_per_s: float, wire_bytes_per_s: float, ranks: int, number_bytes: int) -> float:
    ### BEGIN SOLUTION
    return number_bytes * (ranks - 1) / ranks * flops_per_s / (2 * wire_bytes_per_s)
    ### END SOLUTION


# %%
checks.tokens_to_hide(tokens_to_hide)

# %% [markdown]
# **Your turn.** Two hosts of 8 GPUs each, 16 ranks in one FSDP group. Each host has one network card of 400 Gbit/s,
# that is 50 GB/s in each direction. The ring crosses it, and the slowest link sets the ring's pace. (With a card for
# each GPU, NCCL lets several rings cross side by side: eight cards carry up to eight times as much, and about 940
# tokens are enough.) How many tokens does a GPU need now? And this machine, with its own figures? Commit to the first.

# %% tags=["commit"]
mine = commit(two_hosts=None)
### BEGIN SOLUTION
mine = commit(two_hosts=lambda: tokens_to_hide(400e12, 50e9, 16, 2))
### END SOLUTION

# %%
right = theory.tokens_to_hide(400e12, 50e9, 16, 2)
said = mine["two_hosts"]
print(f"two hosts: {right:,.0f} tokens; yours: {'–' if said is None else format(said, ',.0f')}")

# %% tags=["nbval-ignore-output"]
sums = labkit.run("all_reduce", nproc=RANKS, message_bytes=(2**20, 2**22), total_bytes=2**12, pieces=(1,), repeats=15)
on_wire = 2 * (RANKS - 1) / RANKS * 2**22  # bytes that a rank sends for an all-reduce of 4 MiB
bandwidth = on_wire / fastest_all_reduce_times(sums)[2**22]
arithmetic_s = (runs[UNSHARDED].value("forward_ms") + runs[UNSHARDED].value("backward_ms")) / 1000
speed = 6 * PARAMETERS * TOKENS / arithmetic_s
needed = theory.tokens_to_hide(speed, bandwidth, RANKS, 4)
print(f"here: {speed / 1e9:.0f} billion operations a second, {bandwidth / 1e9:.2f} GB/s on the wire")
print(f"so communication could hide from about {needed:,.0f} tokens on; a rank of this notebook has {TOKENS}")

# %% tags=["nbval-ignore-output"]
seven_billion = 7e9
passes_on_wire = {ranks: theory.wire_bytes(2 * seven_billion, ranks) for ranks in (8, 16)}
panels = {
    "this machine, this lab's network": (
        6 * PARAMETERS / speed,
        {f"{RANKS} ranks": sum(theory.wire_bytes(4 * PARAMETERS, RANKS).values()) / bandwidth},
    ),
    "H100s, 7 billion parameters": (
        6 * seven_billion / 400e12,
        {
            "8 GPUs, one host": sum(passes_on_wire[8].values()) / 450e9,
            "16 GPUs, two hosts": sum(passes_on_wire[16].values()) / 50e9,
        },
    ),
}
_ = plots.communication_break_even(panels, batches={"this machine, this lab's network": TOKENS})

# %% [markdown]
# *Arithmetic grows with the tokens of a rank, messages do not. The dots are the numbers from above: right of its dot a
# message can hide. All of it is predicted, on the left from what was measured here; the dotted line is this lab's
# batch.*

# %% tags=["claim"]
here_equal = [messages / a_token for a_token, by_label in panels.values() for messages in by_label.values()]
thresholds = [needed, theory.tokens_to_hide(400e12, 450e9, 8, 2), right]
claim(
    "the dots are the numbers from above",
    all(abs(dot / at - 1) < 1e-9 for dot, at in zip(here_equal, thresholds, strict=True)),
)

# %% [markdown]
# The time of the arithmetic includes the all-reduces of data parallelism, so this machine's speed and tokens are a
# little too low. Slow arithmetic is easy to hide behind: a laptop's cores need few tokens, fast GPUs on a slow network
# need thousands. The inequality knows no latency. Small units, such as those of this lab, wait for messages rather than
# for bytes, and by default CPU ranks wait for each message where it starts, so that here a step of FSDP takes longer
# than one of DDP in most runs.
#
# When the batch is too small, there are four ways out: a larger batch, shorter numbers (next section), parameters that
# are kept (two passes instead of three), or groups that share parameters only where the network is fast (HSDP, below).

# %% [markdown]
# ## 9. More of FSDP
#
# **optional, 40 minutes.** Each part stands alone.
#
# ### Fewer bytes: mixed precision (3 minutes)
#
# With a `MixedPrecisionPolicy` (from `torch.distributed.fsdp`) the shards stay in float32, but parameters are gathered
# and used in bfloat16. A bfloat16 number has 2 bytes. In your own script each `fully_shard`, the root's too, gets
# `mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. Gradients are reduced in
# float32 here, since a sum of many small numbers loses digits.

# %% tags=["commit"]
mine = commit(all_gather_bytes=None, reduce_scatter_bytes=None, end_parameter_bytes=None)
### BEGIN SOLUTION
mine = commit(
    all_gather_bytes=2 * 2 * PARAMETERS / RANKS,
    reduce_scatter_bytes=4 * PARAMETERS,
    end_parameter_bytes=4 * PARAMETERS / RANKS,
)
### END SOLUTION

# %%
bf16 = labkit.run("fsdp_wrap", precision="bf16", **SETUP)
halved = predicted | {"all_gather_bytes": predicted["all_gather_bytes"] // 2}
plots.comparison_table(bf16, halved, yours=mine)

# %% [markdown]
# *The all-gathers were handed half the bytes. What a rank keeps is unchanged.*

# %% tags=["claim"]
claim(
    "the all-gathers were handed half the bytes", 2 * bf16.value("all_gather_bytes") == block.value("all_gather_bytes")
)
claim("what a rank keeps is unchanged", bf16.value("end_parameter_bytes") == block.value("end_parameter_bytes"))

# %% [markdown]
# ### Frozen parameters (3 minutes)
#
# In fine-tuning, part of a model is often frozen. A frozen unit has no gradient, no optimizer state
# and no reduce-scatter. Here the middle block is frozen. It is still gathered in both passes, since the gradients of
# block 0 must come through it.

# %%
frozen = labkit.run("fsdp_matrix", freeze=(1,), **SETUP)
predicted_frozen = theory.resident_bytes(layers, RANKS, frozen=("block 1",))
predicted_frozen |= {"reduce_scatter_count": 2, "all_gather_count": 6}
plots.comparison_table(frozen, predicted_frozen)

# %% [markdown]
# ### HSDP: shard inside, replicate outside (5 minutes)
#
# Inside a host the network is fast, between hosts it is slow. **Hybrid sharding** (HSDP) cuts the ranks into groups.
# Each group holds all parameters, sharded over its ranks, and gathers and reduces inside. Then each rank averages its
# shard's gradients with the ranks of the other groups that hold the same shard: one all-reduce a unit, of a shard's
# size. In your own script that is `fully_shard` with a mesh of two axes: `init_device_mesh("cuda", (2, 8),
# mesh_dim_names=("replicate", "shard"))`.
#
# Four ranks, in two groups of two. The names say along which axis of the mesh a call went; labkit calls the shard axis
# `data`.

# %%
hybrid = labkit.run("fsdp_matrix", wrap="block", hybrid=2, **SETUP | {"nproc": 4, "steps": 2})
plots.comparison_table(hybrid, theory.hybrid_collectives(layers, 2), yours={})

# %% [markdown]
# *Along `data` everything is as with two ranks. Along `replicate` there is one all-reduce for each unit, and what is
# handed to it is half of the parameters. So the slow network carries one all-reduce of a shard, and no gathers. The
# price is memory: a rank holds a half, not a quarter.*

# %% tags=["claim"]
across = theory.hybrid_collectives(layers, 2)["replicate/all_reduce_bytes"]
claim("along replicate, half of the parameters is handed over", hybrid.value("replicate/all_reduce_bytes") == across)
claim(
    "a rank holds a half",
    hybrid.value("end_parameter_bytes") == theory.resident_bytes(layers, 2)["end_parameter_bytes"],
)

# %% [markdown]
# ### How do I save a sharded model? (5 minutes)
#
# No rank has all of it. There are two ways. `torch.distributed.checkpoint` lets each rank write its part into one
# folder. Every tensor there knows its place in the whole, so that any other number of ranks can load it. Or gather
# everything on rank 0 and save one plain file, as long as one host can hold it.

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
place = tempfile.TemporaryDirectory()  # your own folder is one that all hosts see
folder = [place.name]
dist.broadcast_object_list(folder)  # all ranks write into rank 0's folder
checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])  # a part from each rank
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
print({name: tuple(tensor.shape) for name, tensor in whole.items()})  # rank 0 alone holds them
place.cleanup()
dist.destroy_process_group()

# %% [markdown]
# To load, make the model on the new ranks and `state = {"model": get_model_state_dict(model)}`. Then
# `checkpoint.load(state, checkpoint_id=folder)` fills it, and `set_model_state_dict(model, state["model"])` puts it
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
# # on the new ranks: make `state` in the same way, then
# checkpoint.load(state, checkpoint_id=folder)
# set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# ```
#
# labkit does that. Train on some ranks, save, and go on with one rank more.


# %%
with tempfile.TemporaryDirectory() as folder:
    before = labkit.run("fsdp_matrix", save=f"{folder}/state", **SETUP)
    after = labkit.run("fsdp_matrix", load=f"{folder}/state", **SETUP | {"nproc": RANKS + 1, "steps": 1})
lower = after.losses.iloc[0] < before.losses.iloc[0]
print(f"{RANKS} ranks saved, {RANKS + 1} went on; the loss goes on below where the first run began: {lower}")

# %% tags=["claim"]
claim("the loss goes on below where the first run began", lower, where=STEPS >= 10 and BATCH >= 32)

# %% [markdown]
# That is weak evidence: the third rank brings samples of its own, and a lost state of Adam would hardly show. Where the
# samples are the same, the losses must be, too. labkit's tests hold that for 4 ranks that save, and 2 or 1 that go on
# (`tests/test_saving.py`).

# %% [markdown]
# ### Tied weights (8 minutes)
#
# Language models often use one matrix twice: to embed tokens, and to predict them. If the two modules were in different
# units, each would gather a copy of its own and reduce only its own part of the gradient. PyTorch refuses that with an
# error since 2.12; 2.11 went on. `fully_shard` takes a list instead: `fully_shard([embedding, head])` makes one unit of
# both.
#
# ### Exercise 10: who must share a unit? (••, 8 minutes)
#
# Return all modules of `model` that must be in one unit with `block`, the block first. These are the modules that hold
# one of its parameters themselves, outside of it. Two parameters are tied if they are the same object; equal values are
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
# `labkit/parallel/units.py` does the same for every model. Let us hold a transformer with a tied embedding against one
# device: the losses and outputs of three steps, then 68 gradients, 68 parameters and 5 buffers, 147 tensors in all.

# %%
print(labkit.check("fsdp_wrap", nproc=RANKS, model="transformer", wrap="layer", steps=3).verdict_text)

# %% [markdown]
# ### Experts that must not be averaged (10 minutes)
#
# In a mixture of experts, each rank owns an expert of its own. The shared part is trained by all ranks together, so its
# gradients are averaged. An expert has one owner. To average it with the others would mix strangers. Only its scale
# needs care.
#
# In this lab's model an expert sees its own rank's samples only. **Expert parallelism** in use is different: a router
# chooses an expert for each token, and an all-to-all carries the tokens to its rank and back. Then an expert sees
# samples of all ranks.
#
# Mind the scale. On one device the loss is the mean over all samples. Each rank's own loss is the mean over its own
# samples, so each sample weighs N times as much in it. Averaging the shared gradients makes up for that. An expert's
# gradients are not averaged. To equal one device's they must be divided by N all the same. "Nothing to average, so
# leave it alone" is a known trap: pytorch/pytorch#160285 and #167178.
#
# ### Exercise 11: average, but not everything (••, 6 minutes)
#
# Average every shared gradient over the ranks. Send nothing for those of `experts`, but divide them by the number of
# ranks. `dist.all_reduce(tensor)` adds a tensor up over all ranks, in place. Your function runs on two real ranks.
# Whatever it uses of this notebook is copied there.
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
        if parameter.grad is not None:
            if parameter not in experts:
                dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    ### END SOLUTION


# %%
checks.expert_gradients(average_gradients)

# %% [markdown]
# With FSDP2 the expert is sharded over a mesh of one rank, its own. It then has nothing to gather, and nothing divides
# its gradient. `expert.set_gradient_divide_factor(ranks)` asks for that; hold it against one device, since older
# versions ignored it there (pytorch/pytorch#167178).
#
# ### FSDP1 and FSDP2 (4 minutes)
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
# Both are tested against one device in this kit: twelve models, wrapped and not, with checkpointing, bfloat16, and
# parameters that stay in the host's memory (*offload*).
#
# ### What to expect on GPUs (2 minutes)
#
# - The same program is written to run unchanged, which has not been verified yet: `labkit.run("fsdp_wrap", nproc=4,
#   preset="paper")`. It has 217 million parameters.
# - Counts, bytes and the tensors that a rank keeps between steps follow the same formulas: they do not depend on the
#   device. The allocator and NCCL take memory of their own beside them.
# - All-gathers and reduce-scatters run on their own CUDA streams and hide behind arithmetic by themselves. What stays
#   exposed is the first all-gather of each pass, the last reduce-scatter, and whatever is slower than the arithmetic.
#

# %% [markdown]
# ## 10. Leave with
#
# **core, 5 minutes**
#
# Predicted beside measured, for what this lab claims.

# %% tags=["summary"]
tables = {"block": plots.comparison_table(block, predicted), "frozen": plots.comparison_table(frozen, predicted_frozen)}
tables["kept"] = plots.comparison_table(kept, theory.step_collectives(layers, RANKS, reshard_after_forward=False))
tables["your FSDP"] = plots.comparison_table(own, small)
for label in ("root", "block", "block,\ncheckpointing"):
    peak = {"peak_total_bytes": expected[label]["total"]}
    tables[" ".join(f"peak, {label}".split())] = plots.comparison_table(runs[label], peak, tolerance=0.05)
summary = pandas.concat(tables)
close = summary["verdict"] != "equal"  # a peak moves a little with the moment at which a message arrives
sizes = ["predicted", "measured"]
summary.loc[close, sizes] = summary.loc[close, sizes].map(lambda size: int(float(f"{size:.2g}")))
summary.loc[close, "ratio"] = summary.loc[close, "ratio"].round(1)
summary

# %% [markdown]
# ### Five questions
#
# <details><summary>1. A model of 7 billion parameters, float32 with Adam, on 16 ranks of FSDP: what does each hold between steps?</summary>
#
# 16 bytes × 7 · 10⁹ / 16 = 7 GB. At the peak the gathered unit, its gradients, buffers and activations come on top.
#
# </details>
# <details><summary>2. FSDP sends 1.5 times as much as DDP. Why not 3 times, since it makes three calls for each unit?</summary>
#
# DDP's one all-reduce is a reduce-scatter and an all-gather: two passes. FSDP makes three.
#
# </details>
# <details><summary>3. Why is the root unit by default not freed after its forward pass?</summary>
#
# Its backward pass comes next. It would be gathered again at once. (So would the last block:
# `reshard_after_forward=False` for it alone saves that gather.)
#
# </details>
# <details><summary>4. The loss curve of a sharded run lies on that of one device. Is the sharding right?</summary>
#
# That cannot be told from it. With Adam a factor in all gradients changes the curve hardly at all. Compare gradients.
#
# </details>
# <details><summary>5. Your step is bound by communication. You double the number of ranks and keep the batch of each. Does a smaller part of the step stay exposed?</summary>
#
# Hardly: (N - 1)/N is near 1 already, so each rank sends as much as before, and computes as much as before. Twice the
# samples in the same time, but each rank waits as long as before. A larger batch of each rank helps.
#
# </details>
#
# ### Read on
#
# - Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020:
#   https://arxiv.org/abs/1910.02054
# - Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023:
#   https://arxiv.org/abs/2304.11277
# - `fully_shard`: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, and the tutorial:
#   https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
# - Saving: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
# - In labkit: `labkit/parallel/small_fsdp.py` (yours), `labkit/parallel/units.py` and `labkit/parallel/fsdp.py` (units
#   and both APIs), `labkit/theory/fsdp.py` (the ledger).
#
# ### What comes next
#
# - Train a real architecture: `labkit.check("fsdp_wrap", nproc=2, model="hf_bert")`.
# - Where does your own model's peak come from? Draw its units on paper first, then count.
# - Lab 3 changes what the all-gathers carry: 8 bits instead of 32.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("fsdp")
