# %% [markdown]
# # Lab 2. FSDP: what to wrap, what it costs, what it saves
#
# A network and its optimizer are often larger than one device. With fully sharded data parallelism (FSDP) every rank
# keeps a part of each parameter, gradient and optimizer state, and gathers a layer's parameters only while it computes.
# After this lab you can
#
# - say what each rank holds and sends in a step, in bytes, before you launch it;
# - write a small FSDP yourself, and prove on real ranks that it trains as one device does;
# - choose what to wrap for a memory limit;
# - let FSDP's messages travel behind arithmetic, and say when they hide there.
#
# You need lab 0 and PyTorch on one device, and no GPU. The lab takes about {core_minutes} minutes, and its exercises
# have one dot (easy) or two. Mixed precision, saving, tied weights and FSDP1 are in the companion 02b, *FSDP at work*.

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.parallel import small_fsdp as labkits
from labkit.theory import emulated_steps
from labkit.theory import fsdp as theory
from labkit_course.checks import fsdp as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="2")

# %% [markdown]
# You may change these parameters of the network, which is a stack of *blocks*: linear, ReLU, linear, ReLU, with an
# inner width of 3, 4, 3, 3, 4, 3 … times `DIM`.

# %% tags=["parameters"] small={"DIM": 20, "BATCH": 4, "STEPS": 1} points=[[2,1,1,1],[3,100,8,4],[8,256,48,12]]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 32  # samples of a rank in a step, each of 8 rows, called tokens
STEPS: int = 10  # timed training steps in the runs of sections 2 and 3

# %% [markdown]
# The next cell checks them, and keeps in `SETUP` what most runs share.

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank shares with nobody, and more than 8 take minutes")
require("DIM", DIM, at_least=1, because="a layer needs a width")
require("BATCH", BATCH, at_least=1, because="a step needs a sample")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

SETUP = {"nproc": RANKS, "model": "mlp_stack", "dim": DIM, "batch": BATCH, "steps": STEPS}
TOLD = (RANKS, DIM, BATCH) == (2, 128, 32)  # the values that the text speaks of
PARAMETERS = sum(2 * times * DIM**2 + (times + 1) * DIM for times in (3, 4, 3))  # of three blocks

# %% [markdown]
# ## 1. Why shard? ({minutes} minutes)
#
# Training in float32 with Adam keeps four numbers for each parameter: the parameter, its gradient and two running
# means, 16 bytes together. For 7 billion parameters that is 112 GB, and each data-parallel rank holds the same 112 GB.
# The ZeRO paper removes the copies in three stages:
#
# | stage | between two steps, each rank holds | in PyTorch |
# |---|---|---|
# | 0 | everything whole | DDP |
# | 1 | a share of the optimizer's state | ZeroRedundancyOptimizer |
# | 2 | a share of the gradients as well | |
# | 3 | a share of the parameters as well | FSDP |
#
# For 7 billion parameters on 8 ranks, between two steps:

# %%
names = ["stage 0\n(DDP)", "stage 1", "stage 2", "stage 3\n(FSDP)"]
by_stage = {name: theory.zero_bytes(7 * 10**9, 8, stage) for stage, name in enumerate(names)}
_ = plots.memory_comparison(by_stage, unit="GB", ylabel="held by each of 8 ranks between steps")

# %% [markdown]
# *In GB: 112 with DDP. Stage 1 leaves 28 + 28 + 56/8 = 63, stage 2 28 + 28/8 + 56/8 = 38.5, and stage 3 an eighth of
# everything, 14.*
#
# In all figures a dashed frame means computed, not measured.
#
# Now on this machine, with a toy model of 18 million parameters, 9 million of them in one layer: 290 MB with gradients
# and Adam. DDP copies all gradients into flat **buckets** before it sends them, another 72 MB. A rank that allocates
# more than 336 MB (320 MiB) is stopped. **The first of the two runs is meant to fail.**

# %% tags=["claim"]
totals = [sum(part.values()) for part in by_stage.values()]
claim("112 GB with DDP, then 63, 38.5 and 14", totals == [112e9, 63e9, 38.5e9, 14e9])


# %%
def fits(wrap: str) -> str:
    """Tell whether a rank stays below the cap, which needs Linux."""
    try:
        model = {"model": "toy", "hidden": 3000, "narrow": 16, "batch": 1, "steps": 1}
        result = labkit.run("fsdp_matrix", nproc=4, wrap=wrap, memory_cap_mib=320, **model)
    except labkit.RankFailed as failure:
        return failure.exc_type
    return f"trained, with {result.value('peak_total_bytes') / 1e6:.0f} MB at the peak"


outcome = {"DDP, every rank holds all": fits("none"), "FSDP, every rank holds a quarter": fits("layer")}
print("\n".join(f"{how}: {what}" for how, what in outcome.items()))

# %% tags=["claim"]
ddp, fsdp = outcome.values()
toy = theory.toy_layers("layer", 3000, 16)
claim("9 million in one layer", round(max(each.elements for each in toy) / 1e6, 1) == 9.0)
toy_size = sum(each.elements for each in toy)
claim("290 MB, and 72 for the buckets", (round(16 * toy_size / 1e6, -1), round(4 * toy_size / 1e6)) == (290, 72))
claim("DDP breaks the cap, FSDP keeps it", ddp == "MemoryCapExceeded" and fsdp.startswith("trained"))

# %% [markdown]
# ## 2. The code you would write ({minutes} minutes)
#
# `fully_shard` changes a module in place: its parameters become `DTensor`s, tensors of which each rank holds some rows.
# Call it on the parts first and then on the whole, and make the optimizer afterwards.

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
samples, losses = torch.randn(32, 64), []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(samples) - samples).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} in the fifth step")
weight = model[0][0].weight
print(f"a weight of {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} are here: {weight.placements}")
dist.destroy_process_group()

# %% [markdown]
# Each module that you gave to `fully_shard` is a **unit**, and the root has the rest. A unit lives like this:
#
# 1. Before its forward pass, an **all-gather** collects its parameters from all ranks.
# 2. It computes, and then its full parameters are freed, which is called *resharding*.
# 3. Before its backward pass, they are gathered once more.
# 4. After its backward pass they are freed again, and a **reduce-scatter** adds up the gradients of all ranks. FSDP
#    divides the sums by the number of ranks, and each rank receives only its own part.
#
# ```
# unit 0   gather compute free                                         gather compute free reduce
# unit 1                        gather compute free gather compute free reduce
#          forward pass ------------------------->  backward pass ----------------------------->
# ```
#
# By default only the root is kept after the forward pass. Even the last block is freed, and gathered again, unless you
# say `reshard_after_forward=False`.
#
# ### Exercise 1: the fewest ranks (•, {minutes} minutes)
#
# A model has `parameters` parameters, its largest unit has `largest_unit` of them, and each rank has `memory_bytes`
# bytes of memory. Between steps a rank holds its share of the 16 bytes of each parameter. At the peak, add one whole
# unit: its gathered parameters, and its whole gradients just before the reduce-scatter. Leave out activations and the
# buffers of collectives. How many ranks does training need at least? Return 0 if no number of ranks is enough.
#
# <details><summary>Hint 1</summary>
#
# Which of the two parts becomes smaller with more ranks? What is left of the memory for it?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A whole unit has 8 bytes for each of its parameters. With `left` bytes for the shares, 16 `parameters` / ranks may be
# at most `left`. Ranks are whole numbers.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `-(-a // b)` divides whole numbers and rounds up.
#
# </details>


# %%
def fewest_ranks(parameters: int, largest_unit: int, memory_bytes: int) -> int:
    ### BEGIN SOLUTION
    left = memory_bytes - 8 * largest_unit
    if left <= 0:
        return 0
    return -(-16 * parameters // left)
    ### END SOLUTION


# %%
checks.fewest_ranks(fewest_ranks)

# %%
for size, unit in ((200, "a block"), (7000, "the whole model")):
    print(f"7 billion parameters, 24 GB, {unit} as unit: {fewest_ranks(7 * 10**9, size * 10**6, 24 * 10**9)} ranks")

# %% [markdown]
# With blocks of 200 million parameters five GPUs hold it, with no byte left for what the formula leaves out, so take
# eight. For the toy model of section 1 the formula gives 72 + 72 = 144 MB on four ranks, and 172 were measured: a
# buffer of 36 MB still holds the gradients of the layer before, whose shard of 9 MB is still to come.
#
# **Counted on real ranks.** `launch/fsdp_wrap.py` does what the script does, with this notebook's stack of three
# blocks: three units on four ranks, and nothing left for the root. For a `DIM` of 128 they have 329,344 parameters of
# 4 bytes. Bytes are those that a rank **hands to the calls** in a step, as their input: its own part to an all-gather,
# the whole gradients to a reduce-scatter. Commit before you run it.

# %% tags=["commit"]
mine_traffic = commit(all_gather_count=None, all_gather_bytes=None, reduce_scatter_bytes=None)
### BEGIN SOLUTION
mine_traffic = commit(
    all_gather_count=6,
    all_gather_bytes=2 * 4 * PARAMETERS / 4,
    reduce_scatter_bytes=4 * PARAMETERS,
)
### END SOLUTION

# %% tags=["summary"]
layers = theory.mlp_stack_layers("block", DIM)
predicted = theory.step_collectives(layers, 4) | theory.resident_bytes(layers, 4)
block = labkit.run("fsdp_wrap", wrap="block", **SETUP | {"nproc": 4})
replicated = labkit.run("fsdp_wrap", wrap="none", **SETUP | {"nproc": 4, "steps": 1})
print(f"data parallel, as DDP: {replicated.value('all_reduce_bytes'):,.0f} bytes handed to all_reduce")
plots.comparison_table(block, predicted, yours=mine_traffic)

# %% tags=["claim"]
claim(
    "every count and every byte is as theory says", all(block.value(name) == size for name, size in predicted.items())
)
claim("329,344 parameters", PARAMETERS == 329_344, where=DIM == 128)
wire_dp = 2 * 3 / 4 * replicated.value("all_reduce_bytes")
wire_fsdp = 3 * block.value("all_gather_bytes") + 3 / 4 * block.value("reduce_scatter_bytes")
# Rows that four ranks cannot share evenly are padded.
claim("FSDP sends 1.5 times as much", wire_fsdp == 1.5 * wire_dp, where=DIM % 4 == 0)
claim("the bytes of both", (wire_fsdp, wire_dp) == (2_964_096, 1_976_064), where=DIM == 128)
toy_peak = theory.fsdp_step_peak(toy, 1, 4)
claim("72 + 72 MB", (round(16 * toy_size / 4e6), round(8 * 9_003_000 / 1e6)) == (72, 72))
in_buffers = {name: round(toy_peak[name] / 1e6) for name in ("reduce_scatter", "total")}
claim("36 MB of buffer, 172 in all", [*in_buffers.values()] == [36, 172])
claim("172 MB are measured", fsdp.endswith(" 172 MB at the peak"))

# %% [markdown]
# *The rows `end_…` are what a rank keeps between steps. The last is above two numbers a parameter, because Adam counts
# its steps.*
#
# **On the wire**, a ring (lab 0) sends N − 1 times what is handed to an all-gather, (N − 1)/N of what is handed to a
# reduce-scatter, and 2 (N − 1)/N of what is handed to an all-reduce, which is both. So FSDP's numbers stand for
# 3 · 658,688 + ¾ · 1,317,376 = 2,964,096 bytes. DDP hands all gradients to an all-reduce, 2 · ¾ · 1,317,376 = 1,976,064.
#
# FSDP makes three passes over the parameters, gather, gather, reduce, and DDP makes two. So FSDP pays for the memory
# that it saves by sending 1.5 times as much.
#
# *Takeaway: the largest unit sets a floor that no number of ranks goes below.*
#
# ## 3. Build it: a small FSDP ({minutes} minutes)
#
# You give a unit the life that section 2 draws, in three steps. Your shard is one flat row for each unit, as in
# PyTorch's older FSDP1, while `fully_shard` cuts each parameter by rows. These are the pieces:
#
# - A **shard**: this rank's part of all parameters of the unit, in one flat `nn.Parameter`, which the optimizer will
#   train.
# - A **buffer** `full`: a flat tensor for all parameters of the unit, and the module's weights are views of it. Its
#   memory can be given back while the tensor stays: `full.untyped_storage().resize_(0)`. With `resize_(full.nbytes)`
#   there is memory again, with nothing useful in it.
# - **Collectives**: `dist.all_gather_into_tensor(whole, part)` and `dist.reduce_scatter_tensor(part, whole)`, which
#   adds up and does not divide.
#
# ### Exercise 2: cut the parameters (••, {minutes} minutes)
#
# Return the shard and the buffer. All parameters stand in the order of `unit.parameters()`, flat, one after another,
# with zeros at the end until the number of ranks divides the length. Rank r keeps part r, in memory of its own. Point
# each parameter at its piece of the buffer, and give the buffer's memory back.
#
# <details><summary>Hint 1</summary>
#
# The buffer comes first, and the shard is a copy of a part of it. Why would a view not do?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Join the detached, flattened parameters and `-sum(p.numel() for p in parameters) % ranks` zeros with `torch.cat`.
# `chunk(ranks)` cuts the row. A parameter's `.data` can be set to a view of its piece.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `parameter.data = full[start : start + parameter.numel()].view(parameter.shape)`, and `start += parameter.numel()`.
#
# </details>


# %%
def shard_parameters(unit: nn.Module) -> tuple[nn.Parameter, torch.Tensor]:
    ### BEGIN SOLUTION
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    zeros = parameters[0].new_zeros(-sum(p.numel() for p in parameters) % ranks)
    full = torch.cat([*(p.detach().flatten() for p in parameters), zeros])
    shard = nn.Parameter(full.chunk(ranks)[dist.get_rank()].clone())
    start = 0
    for parameter in parameters:
        parameter.data = full[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    full.untyped_storage().resize_(0)
    return shard, full
    ### END SOLUTION


# %%
shard_verdict = checks.shard_parameters(shard_parameters)
shard_verdict

# %% [markdown]
# **Hooks** are functions that PyTorch calls at certain moments:
#
# | you write | it calls | when |
# |---|---|---|
# | `module.register_forward_pre_hook(f)` | `f(module, inputs)` | before the module computes |
# | `module.register_forward_hook(f)` | `f(module, inputs, output)` | after it has computed |
# | `tensor.register_hook(f)` | `f(gradient)` | when this tensor's gradient is known |
# | `parameter.register_post_accumulate_grad_hook(f)` | `f(parameter)` | when `parameter.grad` is complete |
#
# If one of the first three returns something, it replaces the inputs, the output or the gradient. So let your hooks
# return nothing.
#
# The gradient of a unit's *output* is known just before the unit's backward pass begins. So a hook on the output is the
# place to gather once more.
#
# ### Exercise 3: gather, and free (••, {minutes} minutes)
#
# Register hooks on `unit`. Whole parameters have memory from the forward pre-hook to the end of the forward pass, and
# again from the gradient of the output on. Send `shard.detach()`, so that autograd does not record the collective. A
# forward pass under `torch.no_grad()` must work as well.
#
# Autograd complains if a tensor that it saved was changed in place: tensors count their changes. Here the collective
# changes `full`, and a parameter whose `.data` you have set keeps a count of its own.
#
# <details><summary>Hint 1</summary>
#
# The same must happen at two moments. At which of them does the output exist, on which the second hook is registered?
#
# </details>
# <details><summary>Hint 2</summary>
#
# One function, `gather(*_)`, serves for both moments. Another one frees after the forward pass, and registers `gather`
# on the output.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `if output.requires_grad: output.register_hook(gather)`, since other outputs take no hook.
#
# </details>


# %%
def gather_and_free(unit: nn.Module, shard: nn.Parameter, full: torch.Tensor) -> None:
    ### BEGIN SOLUTION
    def gather(*_: object) -> None:
        full.untyped_storage().resize_(full.nbytes)
        dist.all_gather_into_tensor(full, shard.detach())

    def free_until_backward(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        full.untyped_storage().resize_(0)
        if output.requires_grad:
            output.register_hook(gather)

    unit.register_forward_pre_hook(gather)
    unit.register_forward_hook(free_until_backward)
    ### END SOLUTION


# %%
gather_verdict = checks.gather_and_free(gather_and_free)
gather_verdict

# %% [markdown]
# ### Exercise 4: reduce the gradients (••, {minutes} minutes)
#
# When the last gradient of the unit is there, free the buffer, make a flat row of the gradients (and zeros as before),
# set each parameter's own `.grad` to None, and leave in `shard.grad` this rank's part of the **mean** over the ranks.
# The check trains two steps.
#
# The gradient of the unit's input needs the weights, too. But autograd computes it in the same operation as that of
# the weight, so when your hook runs, both are there.
#
# <details><summary>Hint 1</summary>
#
# Which hook of the table tells that one gradient is there, and how do you know that it was the last one?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A hook on each parameter counts: once it has been called for all parameters, it reduces, and counts from the start.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `ready.append(parameter)`; if `len(ready) == len(parameters)`: clear the list, free the buffer, join the gradients,
# forget them, `shard.grad = torch.empty_like(shard)`, reduce-scatter into it, divide.
#
# </details>


# %%
def reduce_and_free(unit: nn.Module, shard: nn.Parameter, full: torch.Tensor) -> None:
    ### BEGIN SOLUTION
    parameters, ranks = list(unit.parameters()), dist.get_world_size()
    zeros = shard.detach().new_zeros(full.numel() - sum(p.numel() for p in parameters))
    ready = []

    def reduce(parameter: nn.Parameter) -> None:
        ready.append(parameter)
        if len(ready) == len(parameters):
            ready.clear()
            full.untyped_storage().resize_(0)
            gradients = torch.cat([*(p.grad.flatten() for p in parameters), zeros])
            for each in parameters:
                each.grad = None
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, gradients)
            shard.grad /= ranks

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(reduce)
    ### END SOLUTION


# %%
reduce_verdict = checks.reduce_and_free(reduce_and_free)
reduce_verdict

# %% [markdown]
# An FSDP this small has limits: gradients do not accumulate over backward passes, and a unit with an unused parameter
# never reduces.
#
# Now your code shards the stack: `fsdp="yours"` calls `small_fsdp` with every block. Where a step is still open,
# labkit's stands in. `labkit.check` trains three steps with plain SGD, here and on one device, and compares losses,
# outputs, gradients and parameters.

# %%
steps = [
    shard_parameters if shard_verdict.ok else labkits.shard_parameters,
    gather_and_free if gather_verdict.ok else labkits.gather_and_free,
    reduce_and_free if reduce_verdict.ok else labkits.reduce_and_free,
]


def small_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit in place."""
    shard, full = steps[0](unit)
    steps[1](unit, shard, full)
    steps[2](unit, shard, full)
    return shard


PARITY = {"nproc": RANKS, "model": "mlp_stack", "fsdp": "yours", "steps": 3}
print(labkit.check("fsdp_wrap", use={"small_fsdp": small_fsdp}, **PARITY).verdict_text)
own = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": small_fsdp}, **SETUP)
for name in ("all_gather", "reduce_scatter"):
    print(f"{own.value(f'{name}_count'):.0f} {name} calls in a step, handed {own.value(f'{name}_bytes'):,.0f} bytes")

# %% tags=["claim"]
in_shards = sum(-(-(2 * times * DIM**2 + (times + 1) * DIM) // RANKS) for times in (3, 4, 3))  # elements of a rank
flat = {"all_gather_bytes": 2 * 4 * in_shards, "reduce_scatter_bytes": 4 * RANKS * in_shards}
rows = theory.step_collectives(layers, RANKS) | flat
claim("your FSDP sends what flat rows need", all(own.value(name) == size for name, size in rows.items()))

# %% [markdown]
# `fully_shard` makes as many calls. On two ranks a part is twice as large as on four.
#
# **Break it.** The cell below makes each gradient N times as large before your code averages it, so that your shards get
# sums, as if you had forgotten to divide. Then it runs two tests: one compares losses with the right run's, which uses
# Adam as well, the other gradients with one device's. Commit: will the losses differ by about 0, 50 or 100 %?

# %% tags=["commit"]
mine_broken = commit(losses_percent=None)
### BEGIN SOLUTION
mine_broken = commit(losses_percent=0)
### END SOLUTION


# %% tags=["nbval-ignore-output"]
def broken_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit, and undo the division by the number of ranks."""
    for parameter in unit.parameters():
        parameter.register_hook(lambda gradient: dist.get_world_size() * gradient)
    return small_fsdp(unit)


wrong = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": broken_fsdp}, **SETUP)
apart = (wrong.losses / own.losses - 1).abs()
against = labkit.check("fsdp_wrap", use={"small_fsdp": broken_fsdp}, **PARITY | {"steps": 1})
typed = prediction_text(mine_broken["losses_percent"], "g")
losses_pass = bool(apart.max() < 0.01)
print(f"test of losses, to 1 %: {'passed' if losses_pass else 'failed'}")
print(f"  they differ by at most {100 * apart.max():.2g} %; you: {typed} %")
print(f"test of gradients, to 1 part in 100,000: {'passed' if against.ok else 'failed'}")
print(f"  {against.verdict['worst']} differs most, by {against.verdict['max_rel_error']:.1%}")

# %% tags=["claim"]
claim("the test of losses passes, to within 0.5 %", losses_pass and apart.max() < 0.005, where=TOLD)
claim("the test of gradients fails", not against.ok)
claim("gradients are off by 100 %", round(against.verdict["max_rel_error"], 3) == RANKS - 1)

# %% [markdown]
# On two ranks each gradient is the sum and not the mean, so it is 100 % too large. The losses agree to within 0.5 % all
# the same, because Adam divides each gradient by a running average of its size, so a constant factor nearly cancels.
#
# *Takeaway: FSDP is a handful of hooks. Test it by gradients and by memory.*
#
# ## 4. What to wrap ({minutes} minutes)
#
# The units decide what is whole at the same time. `root` makes the model one unit, `block` makes one of each block,
# and `layer` one of each linear layer. Eight blocks, together 3.56 MB of parameters, now train on four ranks, and each
# rank keeps 4.6 MB of activations until the backward pass.
#
# With activation **checkpointing** a block keeps only its input, here 0.13 MB, and computes the rest again when its
# backward pass begins, while it is gathered anyway. That is one more forward pass.
#
# With data parallelism a rank's peak is 17.9 MB, after the backward pass: parameters, gradients, Adam's two numbers and
# the buckets, DDP's flat copy of all gradients, take 5 × 3.56 MB, and the samples 0.13.
#
# If each block is a unit, the peak lies where the backward pass begins. All activations are there, the last block,
# 0.53 MB, is gathered, and there are no gradients yet. Commit: how many MB does a rank hold then, without
# *communication buffers* (FSDP's flat tensors) and *temporary* tensors (mostly gradients of activations, and for DDP
# the buckets)? About how many MB does checkpointing save, if eight inputs stay, and one block's eighth of the
# activations is there again?

# %% tags=["commit"]
mine_peak = commit(block_mb=None, saved_mb=None)
### BEGIN SOLUTION
mine_peak = commit(block_mb=3 * 3.56 / 4 + 4.6 + 0.53, saved_mb=4.6 * 7 / 8 - 8 * 0.13)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
DEEP = SETUP | {"nproc": 4, "layers": 8, "steps": 1}
TOLD_DEEP, TOKENS = (DIM, BATCH) == (128, 32), 8 * BATCH
UNSHARDED = "data\nparallel"
runs = {UNSHARDED: labkit.run("fsdp_wrap", wrap="none", **DEEP)}
expected = {UNSHARDED: theory.ddp_step_peak(theory.mlp_stack_layers("block", DIM, 8), TOKENS)}
WRAPS = {wrap: {"wrap": wrap} for wrap in ("root", "block", "layer")}
WRAPS |= {"block,\ncheckpointing": {"wrap": "block", "checkpointing": True}}
for name, how in WRAPS.items():
    stack = theory.mlp_stack_layers(how["wrap"], DIM, 8)
    expected[name] = theory.fsdp_step_peak(stack, TOKENS, 4, checkpointing="checkpointing" in how)
    runs[name] = labkit.run("fsdp_wrap", **DEEP | how)
bound = 0.5 * runs["root"].value("peak_total_bytes")
parts = {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()}
_ = plots.memory_comparison(parts, runs, bound=bound)

# %% tags=["nbval-ignore-output"]
peaks = {label: result.value("peak_total_bytes") for label, result in runs.items()}
saved = peaks["block"] - peaks["block,\ncheckpointing"]
beside = sum(runs["block"].value(f"peak_{part}_bytes") for part in ("all_gather", "temp"))
you = {name: prediction_text(number, ".1f") for name, number in mine_peak.items()}
print(f"block: {(peaks['block'] - beside) / 1e6:.1f} MB; you: {you['block_mb']}. Besides: {beside / 1e6:.1f} MB")
print(f"checkpointing saves {saved / 1e6:.1f} MB; you: {you['saved_mb']}")
counts = {wrap: int(runs[wrap].value("all_gather_count")) for wrap in ("root", "block", "layer")}
print("all-gathers of a step:", counts)

# %% [markdown]
# *Peak memory of a rank, each bar at its own moment; dotted, half of what `root` needs. Wrapping the root alone saves
# little, because it gathers everything at once; blocks save nearly half. Only checkpointing meets the bound.*
#
# For `block`, 3 × 3.56/4 = 2.67 MB of parameters and Adam's numbers, 4.59 of activations and 0.53 make 7.8. The grey of
# data parallelism is its buckets, and `root` has its parameters twice: gathered, and in the buffer of the gather.
# Checkpointing saves a little less than the estimate, because its peak lies later, among gradients and more temporary
# tensors.

# %% tags=["claim"]
claim("the root alone saves little", 0.75 < peaks["root"] / peaks[UNSHARDED] < 0.9, where=TOLD_DEEP)
claim("blocks need less than the root, layers less than blocks", peaks["layer"] < peaks["block"] < peaks["root"])
claim("blocks save nearly half", 0.4 < 1 - peaks["block"] / peaks[UNSHARDED] < 0.5, where=TOLD_DEEP)
claim("layers need twice as many calls as blocks", counts["layer"] == 2 * counts["block"])
claim("the root gathers once", counts["root"] == 1)
deep_bytes = [sizes[1] for sizes in theory.unit_bytes(theory.mlp_stack_layers("block", DIM, 8), 4).values()]
claim("0.53 MB in the last block", round(deep_bytes[-1] / 1e6, 2) == 0.53, where=TOLD_DEEP)
claim("7.8 MB", round((peaks["block"] - beside) / 1e6, 1) == 7.8, where=TOLD_DEEP)
claim("checkpointing alone meets the bound", [n for n in peaks if peaks[n] < bound] == [[*peaks][-1]], where=TOLD_DEEP)
estimate = 4.6 * 7 / 8 - 8 * 0.13
claim("a little less than the estimate", 0.8 * estimate < saved / 1e6 < estimate, where=TOLD_DEEP)
at_peak = [runs[name].summary().filter(regex="peak_(temp|gradient)_").max() for name in ("block", [*WRAPS][-1])]
temporary, gradients = ([each.get(f"peak_{part}_bytes", 0) for each in at_peak] for part in ("temp", "gradient"))
claim("more temporary tensors at its peak", temporary[1] > 1.2 * temporary[0], where=TOLD_DEEP)
claim("and gradients, of which a plain block has none", gradients[1] > 0 == gradients[0], where=TOLD_DEEP)
in_buckets = runs[UNSHARDED].value("peak_temp_bytes")
buffered = runs["root"].value("peak_all_gather_bytes")
claim("the root's buffer is as large as the model", abs(buffered / sum(deep_bytes) - 1) < 0.01, where=TOLD_DEEP)
whole = sum(each.elements for each in theory.mlp_stack_layers("block", DIM, 8))
claim("3.56 MB of parameters", round(4 * whole / 1e6, 2) == 3.56, where=TOLD_DEEP)
claim("the grey of data parallelism is as large", abs(in_buckets / (4 * whole) - 1) < 0.01, where=TOLD_DEEP)
gathered = runs["root"].value("peak_unsharded_parameter_bytes")
claim("the root's parameters are gathered as well", abs(gathered / sum(deep_bytes) - 1) < 0.01, where=TOLD_DEEP)
claim("4.6 MB of activations", round(runs["block"].value("peak_activation_bytes") / 1e6, 1) == 4.6, where=TOLD_DEEP)
claim("17.9 MB", round(peaks[UNSHARDED] / 1e6, 1) == 17.9, where=TOLD_DEEP)

# %% [markdown]
# **What it costs.** Why not always layers? Each collective takes at least its latency, and layers need twice as
# many as blocks.
#
# Emulated: two ranks train four blocks, each 25 ms forward and 50 ms backward, and a collective takes 10 ms.

# %% tags=["nbval-ignore-output"]
LINK = labkit.Emulated(latency_us=10_000, forward_ms=25, hardware="a link with a latency of 10 ms")
PLANS = {"block": {}, "layer": {"wrap": "layer"}, "block, checkpointing": {"checkpointing": True}}
cost_ms = {"block": 4 * 75 + 12 * 10, "layer": 4 * 75 + 24 * 10, "block, checkpointing": 4 * (25 + 75) + 12 * 10}
costs = labkit.compare("fsdp_wrap", PLANS, rounds=1, emulate=LINK, **SETUP | {"nproc": 2, "layers": 4, "steps": 3})
_ = plots.latency_bars(costs, predicted=cost_ms)

# %% tags=["claim"]
took_ms = {label: result.value("step_ms") for label, result in costs.items()}
claim("layers cost time", took_ms["layer"] > 1.2 * took_ms["block"], where=DIM <= 128)
claim("checkpointing costs time", took_ms["block, checkpointing"] > 1.05 * took_ms["block"], where=DIM <= 128)
claim("no step is shorter than in theory", all(took_ms[label] > cost_ms[label] for label in cost_ms), where=DIM <= 128)

# %% [markdown]
# *Dashed, theory: 300 ms of arithmetic and 12 collectives for blocks, 24 for layers, and 100 ms more of arithmetic with
# checkpointing. What a bar has beyond it is **overhead**: what these ranks copy, send and compute.*
#
# *Takeaway: take a block of the model as a unit, large enough to keep the network busy and a small part of the whole.
# Sharding leaves activations alone; checkpointing saves them.*
#
# ## 5. Does it hide? ({minutes} minutes)
#
# Time for which a rank has to wait for a message is **exposed**. Your FSDP gathers, and waits. FSDP can **prefetch**:
# while one block computes, the all-gather of the next is on its way. After
# `block.set_modules_to_forward_prefetch([following])`, FSDP starts the gather of `following` whenever `block` begins its
# forward pass. In the backward pass it prefetches by itself, in the reverse order. With NCCL a CPU that runs
# ahead starts gathers early anyway.
#
# ### Exercise 5: start gathers early (•, {minutes} minutes)
#
# `blocks` are units of a model that computes them in another order than that of the list, and only training shows that
# order. From the second step on, each block has to start the gather of the one that computes next in the forward pass,
# and the last block none.
#
# <details><summary>Hint 1</summary>
#
# Which hook of section 3 is called in the order in which the blocks compute?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A list keeps the blocks that have computed so far. A new block tells the last one of the list that it comes next. What
# happens when the second step begins?
#
# </details>
# <details><summary>Hint 3</summary>
#
# In a forward pre-hook of every block: unless `block` is in the list, call
# `seen[-1].set_modules_to_forward_prefetch([block])` if there is a last one, and append `block`.
#
# </details>


# %%
def prefetch(blocks: list[nn.Module]) -> None:
    ### BEGIN SOLUTION
    seen = []

    def follow(block: nn.Module, inputs: object) -> None:
        if block not in seen:
            if seen:
                seen[-1].set_modules_to_forward_prefetch([block])
            seen.append(block)

    for block in blocks:
        block.register_forward_pre_hook(follow)
    ### END SOLUTION


# %%
prefetch_verdict = checks.prefetch(prefetch)
prefetch_verdict

# %% [markdown]
# **When does a gather hide?** Take a block of P parameters that N ranks share, T tokens on each rank, and a device with
# F operations a second. The block's forward pass takes 2 P T / F seconds. Its all-gather sends b P (N − 1)/N bytes, with
# b bytes a parameter, at B bytes a second. The gather hides if the arithmetic takes at least as long:
#
# > T ≥ T₀ = b (N − 1)/N · F / (2 B)
#
# P drops out: without latency a gather takes T₀/T times as long as the arithmetic of a block's forward pass.
#
# **Emulated: two wires.** Two H100s, F = 400 · 10¹², train six blocks with T = 2048 tokens each in bfloat16, b = 2. If
# NVLink links them, B is 450 · 10⁹ and T₀ is 2 · ½ · 400 · 10¹² / (2 · 450 · 10⁹) = 444 tokens. In two hosts with one
# network card each, B is 50 · 10⁹. Two ranks emulate both in slow motion, so that a block's forward pass takes 20 ms.
# The runs with prefetching call your function, and let gathers travel in the background, which gloo does not by itself.
#
# Commit: the card's T₀, and for each wire how many milliseconds the forward pass of all six blocks takes with
# prefetching. It begins with a gather that has nothing to hide behind.

# %% tags=["commit"]
mine_hiding = commit(card_tokens=None, nvlink_ms=None, card_ms=None)
### BEGIN SOLUTION
mine_hiding = commit(
    card_tokens=2 * (2 - 1) / 2 * 400e12 / (2 * 50e9),
    nvlink_ms=20 * 444 / 2048 + 6 * 20,
    card_ms=6 * 20 * 4000 / 2048 + 20,
)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
options, step_ms, forward_in_theory = emulated_steps.two_wires(2, DIM)
by_you = {"use": {"prefetch": prefetch}} if prefetch_verdict.ok else {}  # else labkit's prefetches
variants = {label: each | (by_you if each["prefetch"] else {}) for label, each in options.items()}
emulated = labkit.compare("fsdp_wrap", variants, rounds=1, **SETUP | {"nproc": 2, "layers": 6, "steps": 3})
_ = plots.latency_bars(emulated, predicted=step_ms, arithmetic={"forward": 6 * 20, "backward": 6 * 40})

# %% [markdown]
# *Hatched: what a pass takes beyond its arithmetic. Up to the dashed line, theory for the step, that is exposed time;
# the rest is overhead.*

# %% tags=["nbval-ignore-output"]
WIRES = {"nvlink_ms": "NVLink, prefetch", "card_ms": "network card, prefetch"}
in_theory = {"card_tokens": theory.tokens_to_hide(400e12, 50e9, 2, 2)}
in_theory |= {name: forward_in_theory[wire] for name, wire in WIRES.items()}
measured = {name: emulated[wire].value("forward_ms") for name, wire in WIRES.items()}
columns = {"yours": mine_hiding, "theory": in_theory, "measured": measured}
beyond_ms = {label: (emulated[label].value("step_ms") - ms) / 18 for label, ms in step_ms.items()}
print("overhead of each collective:", ", ".join(f"{ms:.1f} ms" for ms in beyond_ms.values()))
pandas.DataFrame(columns).loc[list(mine_hiding)].round().astype(object).fillna("–")

# %% tags=["claim"]
alone_ms = 6 * 20
unhidden_ms = emulated["NVLink, no prefetch"].value("forward_ms")
busy = any(run.cores_of_others for run in emulated.values())
claim("over NVLink gathers hide", measured["nvlink_ms"] < 1.2 * alone_ms or busy, where=DIM <= 128)
claim("without prefetching they do not", unhidden_ms > 1.15 * alone_ms)
claim("through a card more than twice as long", measured["card_ms"] > 2 * alone_ms)
claim("444 tokens, and 4000", [round(theory.tokens_to_hide(400e12, b, 2, 2)) for b in (450e9, 50e9)] == [444, 4000])
claim("124 and 254 ms", [round(in_theory[name]) for name in WIRES] == [124, 254], where=DIM == 128)
backward_ms = step_ms["NVLink, prefetch"] - forward_in_theory["NVLink, prefetch"]
claim("270 ms backward", round(backward_ms) == 270, where=DIM == 128)
claim("some ms for each collective", busy or all(0 < ms < 10 for ms in beyond_ms.values()), where=DIM <= 128)
close = [abs(measured[name] / in_theory[name] - 1) for name in WIRES]
claim("the formula holds within 20 %", max(close) < 0.2 or busy, where=DIM <= 128)
both = {label: emulated[label].value("step_ms") for label in step_ms}
claim("prefetching shortens the card's step", both["network card, prefetch"] < 0.85 * both["network card, no prefetch"])
exposed_ms = emulated["NVLink, prefetch"].value("backward_ms") - 6 * 40
claim("the backward pass has exposed time over NVLink", exposed_ms > 0)
claim("no step is shorter than in theory", all(both[label] > step_ms[label] for label in both), where=DIM <= 128)

# %% [markdown]
# Over NVLink a gather takes 20 · 444/2048 = 4.3 ms and hides behind the 20 ms of a block. Only the first is exposed:
# 4.3 + 6 · 20 = 124 ms. Through a card T₀ is 4000 tokens, and a gather takes 39 ms. The wire is never idle, and the last
# block computes when the last gather has arrived: 6 · 39 + 20 = 254 ms.
#
# The backward pass over NVLink has 240 ms of arithmetic, and takes 270 in theory, because with gloo `fully_shard` waits
# for each reduce-scatter. With NCCL they can travel while the next block computes. The overhead is a few ms for each of
# the 18 collectives, with either wire.
#
# *Takeaway: gathers cost the forward pass little time as long as each rank has more than T₀ tokens.*
#
# ## 6. Take away ({minutes} minutes)
#
# 1. FSDP keeps 1/N of parameters, gradients and optimizer state on each of N ranks, and gathers a unit before it
#    computes.
# 2. It sends 1.5 times as much as DDP if it gathers twice. A rank's tokens decide if that costs time.
# 3. With small units less is whole at once, and each pays the latency of its messages.
#
# | if | then |
# |---|---|
# | the model fits without it | use DDP, which sends less |
# | there is memory to spare during a step | `reshard_after_forward=False` saves one of the two gathers |
# | each rank has few tokens | enlarge the batch, gather fewer bytes, or shard only inside a host (HSDP, 02b) |
# | the peak is still too high | use checkpointing, and pay for a second forward pass |
#
# **Ask yourself**
#
# <details><summary>1. Adam, 7 billion parameters, 16 ranks of FSDP: what does each hold between steps?</summary>
#
# 16 bytes × 7 · 10⁹ / 16 = 7 GB. At the peak the gathered unit, its gradients, buffers and activations come on top.
#
# </details>
# <details><summary>2. The gathered unit and its gradients alone do not fit one GPU. Do more ranks help?</summary>
#
# No. More ranks make the shares smaller, but a unit is whole on each of them. Make smaller units.
#
# </details>
# <details><summary>3. A block's gather is exposed, although T is twice T₀. What do you look for?</summary>
#
# Is it the first one of a pass, which has nothing to hide behind? Else, was it prefetched?
#
# </details>
# <details><summary>4. The loss curve of a sharded run lies on that of one device. Is the sharding right?</summary>
#
# That cannot be told from it. With Adam a factor in all gradients changes the curve hardly at all. Compare gradients.
#
# </details>
# <details><summary>5. Does the share of time spent on messages fall with more ranks and the same batch each?</summary>
#
# No, it rises: (N − 1)/N is a half with 2 ranks and 7/8 with 8, and once the
# ranks span hosts the share rises further, because the network card is slower, nine times in section 5. It falls with a larger
# batch of each rank.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020:
#   https://arxiv.org/abs/1910.02054
# - Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023:
#   https://arxiv.org/abs/2304.11277
# - `fully_shard`: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html, and the tutorial:
#   https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
# - In labkit: `labkit/parallel/small_fsdp.py` (yours), `labkit/parallel/fsdp.py` (both APIs), `labkit/theory/fsdp.py`
#   (the ledger behind the figures).
#
# </details>
#
# **Next**: lab 3 changes what the all-gathers carry, 8 bits instead of 32.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("fsdp")
