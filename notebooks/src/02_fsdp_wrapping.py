# %% [markdown]
# # Lab 2. FSDP: what to wrap, what it costs, what it saves
#
# A network and its optimizer are often larger than one device. With fully sharded data parallelism (FSDP) every rank
# keeps a part of each parameter, gradient and optimizer state, and gathers a layer's parameters only while it computes.
# After this lab you can
#
# - say what each rank holds and sends in a step, in bytes, before you launch it;
# - write a small FSDP yourself, and prove on real ranks that it trains as one device does;
# - choose the units for a memory limit, write the calls, and measure what your choice costs;
# - say when FSDP's gathers hide behind arithmetic, and when they do not.
#
# You need lab 0 and PyTorch on one device, and no GPU. The lab takes about {core_minutes} minutes, and its exercises
# have one dot (easy) or two. Mixed precision, saving and tied weights are in the companion 02b, *FSDP at work*.

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

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
# The lab measures stacks of *blocks*: linear, ReLU, linear, ReLU, with an inner width of 3, 4, 3, 3, 4, 3 … times
# `DIM`. You may change these parameters:

# %% tags=["parameters"] small={"DIM": 20, "BATCH": 4, "STEPS": 1} points=[[2,1,1,1],[3,100,8,4],[8,256,48,12]]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 32  # samples of a rank in a step, each of 8 rows, called tokens
STEPS: int = 10  # timed training steps in the runs of sections 2 and 3

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
# For 7 billion parameters on 8 ranks:

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
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # all ranks in one row; "cuda" on GPUs
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
# <details><summary>Every rank first builds the whole model. What if it is too large for that?</summary>
#
# Build it under `with torch.device("meta")`, where tensors have a shape and no memory. After `fully_shard`,
# `model.to_empty(device="cpu")` gives memory to the shards alone, which you then initialise or load.
#
# </details>
#
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
# Take the whole unit from the memory first. The shares have to fit into the rest.
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
# eight. For the toy model of section 1 the formula gives 72 + 72 = 144 MB on four ranks. Measured were 172, as the layer's
# gradient is copied into a buffer of 36 MB, while its share, 9 MB, does not exist yet.
#
# **Counted on four real ranks.** `launch/fsdp_wrap.py` does what the script does, with the stack: three blocks are three
# units, and nothing is left for the root. For a `DIM` of 128 they have 329,344 parameters of 4 bytes. Bytes are those
# that a rank **hands to the calls** in a step, as their input: its own part to an all-gather, the whole gradients to a
# reduce-scatter. Commit.

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
# *A rank keeps the rows `end_…` between steps. In the last, Adam also counts its steps.*
#
# **On the wire**, a ring (lab 0) sends N − 1 times what is handed to an all-gather, (N − 1)/N of what is handed to a
# reduce-scatter, and twice that for an all-reduce. So FSDP sends 3 · 658,688 + ¾ · 1,317,376 = 2,964,096 bytes, and DDP
# 2 · ¾ · 1,317,376 = 1,976,064.
#
# FSDP makes three passes over the parameters, gather, gather, reduce, and DDP makes two. So FSDP pays for its memory by
# sending 1.5 times as much.
#
# *Takeaway: the largest unit sets a floor that no number of ranks goes below.*
#
# ## 3. Build it: a small FSDP ({minutes} minutes)
#
# You give a unit the life that section 2 draws, in three steps. These are the pieces:
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
# <details><summary>Why does autograd not complain?</summary>
#
# It complains if a tensor that it saved was changed in place, because tensors count their changes. Here the collective
# changes `full`, and a parameter whose `.data` you have set keeps a count of its own.
#
# </details>
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
# set each parameter's own `.grad` to None, and put into `shard.grad` this rank's part of the **mean** over the ranks.
# The check trains two steps.
#
# <details><summary>May the buffer be freed so early?</summary>
#
# The gradient of the unit's input needs the weights, too. But autograd computes it in the same operation as that of
# the weight, so when your hook runs, both are there.
#
# </details>
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
# Now your code shards the stack, and labkit's stands in where a step is still open. `labkit.check` trains three steps
# with plain SGD, on ranks and on one device, and compares losses, outputs, gradients and parameters.

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
# `fully_shard` made the same calls in section 2, where the parts of four ranks were half as large.
#
# **Break it, twice.** `summing_fsdp` multiplies each gradient by N, as if you had forgotten to divide. One test trains
# with Adam and compares losses with your FSDP's, the other compares gradients with one device's. `hoarding_fsdp` frees
# too little: it keeps a copy of each unit's gathered parameters, as a careless log would.
#
# Commit: will the losses of `summing_fsdp` differ by about 0, 50 or 100 %? By how many MB will the copies raise the
# peak?

# %% tags=["commit"]
mine_broken = commit(losses_percent=None, more_mb=None)
### BEGIN SOLUTION
mine_broken = commit(losses_percent=0, more_mb=4 * PARAMETERS / 1e6)
### END SOLUTION


# %%
def summing_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit, and undo the division by the number of ranks."""
    for parameter in unit.parameters():
        parameter.register_hook(lambda gradient: dist.get_world_size() * gradient)
    return small_fsdp(unit)


def hoarding_fsdp(unit: nn.Module) -> nn.Parameter:
    """Shard a unit, and keep a copy of its whole parameters."""
    shard = small_fsdp(unit)
    unit.register_forward_pre_hook(
        lambda module, _: setattr(module, "log", [p.data.clone() for p in module.parameters()])
    )
    return shard


# %% tags=["nbval-ignore-output"]
summing = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": summing_fsdp}, **SETUP)
against = labkit.check("fsdp_wrap", use={"small_fsdp": summing_fsdp}, **PARITY | {"steps": 1})
hoarding = labkit.run("fsdp_wrap", fsdp="yours", use={"small_fsdp": hoarding_fsdp}, **SETUP)
apart, copies_apart = (float((run.losses / own.losses - 1).abs().max()) for run in (summing, hoarding))
more_mb = (hoarding.value("peak_total_bytes") - own.value("peak_total_bytes")) / 1e6
you = {name: prediction_text(number, ".3g") for name, number in mine_broken.items()}
print(f"sums: the losses differ by at most {100 * apart:.2g} %; you: {you['losses_percent']}")
print(f"  test of losses, to 1 %: {'passed' if apart < 0.01 else 'failed'}")
print(f"  test of gradients, to 1 part in 100,000: off by {against.verdict['max_rel_error']:.1%}")
print(f"copies: the losses differ by {100 * copies_apart:.2g} %")
print(f"  the peak is {more_mb:.2f} MB higher; you: {you['more_mb']}")

# %% tags=["claim"]
claim("the test of losses passes, to within 0.5 %", apart < 0.005, where=TOLD)
claim("the test of gradients fails", not against.ok)
claim("gradients are off by 100 %", round(against.verdict["max_rel_error"], 3) == RANKS - 1)
claim("the copies change no loss", copies_apart == 0)
claim("the peak rises by the whole model", abs(1e6 * more_mb / (4 * PARAMETERS) - 1) < 0.01)
claim("by 1.32 MB", round(more_mb, 2) == 1.32, where=TOLD)

# %% [markdown]
# The test of gradients fails, because on two ranks a sum is 100 % larger than the mean. The test of losses passes, as
# Adam divides each gradient by a running average of its size, so a constant factor nearly cancels. The copies change no
# number, so no comparison with one device finds them. But the peak shows them, as it rises by the whole model, 1.32 MB.
#
# *Takeaway: FSDP is a handful of hooks. Test it by gradients and by memory.*
#
# ## 4. What to wrap ({minutes} minutes)
#
# The units decide what is whole at the same time. `root` makes the model one unit, `block` makes one of each block,
# and `layer` one of each linear layer. The eight blocks have 3.557 MB of parameters.
#
# With activation **checkpointing** a block keeps only its input, here 0.13 MB, and computes the rest again when its
# backward pass begins, while it is gathered anyway. That is one more forward pass.

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
parts = {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()}
_ = plots.memory_comparison(parts, runs, bound=10.6e6)

# %% [markdown]
# *Peak memory of a rank; theory is 2 % too high for `layer`, as it starts a gather too early.*
#
# Each bar stands at its own moment: data parallelism has its peak when all gradients lie in its buckets. `root` has it at
# the end of the forward pass and saves little: all parameters are gathered. A gather arrives in a buffer and is
# copied from there, and `fully_shard` keeps the buffer until the next gather or the end of the pass. `block` saves nearly
# half, with its peak in the backward pass of the last block:
#
# | it holds | MB |
# |---|---|
# | parameters and optimizer state, 3 × 3.557/4 | 2.668 |
# | activations | 4.588 |
# | gathered parameters: the last block | 0.527 |
# | communication buffers: the block before it, gathered ahead | 0.395 |
# | temporary: gradients of activations and of one layer | 1.311 |
# | sum | 9.489 |
#

# %% tags=["claim"]
peaks = {label: result.value("peak_total_bytes") for label, result in runs.items()}
ROWS = (("parameter", "optstate"), ("activation",), ("unsharded_parameter",), ("all_gather",), ("temp",))
ledger = [sum(runs["block"].value(f"peak_{part}_bytes") for part in row) for row in ROWS]
LEDGER_MB = [2.668, 4.588, 0.527, 0.395, 1.311]
claim("the rows of the table", [round(size / 1e6, 3) for size in ledger] == LEDGER_MB, where=TOLD_DEEP)
ledger_in_theory = [sum(expected["block"].get(part, 0) for part in row) for row in ROWS]
claim("theory's rows are the same", [round(size / 1e6, 3) for size in ledger_in_theory] == LEDGER_MB, where=TOLD_DEEP)
claim("no row is missing: they sum to the peak", sum(ledger) == peaks["block"], where=TOLD_DEEP)
claim("9.489 MB", round(sum(LEDGER_MB), 3) == 9.489 == round(peaks["block"] / 1e6, 3), where=TOLD_DEEP)
deep_bytes = [sizes[1] for sizes in theory.unit_bytes(theory.mlp_stack_layers("block", DIM, 8), 4).values()]
claim("the last block, and the one before it", ledger[2:4] == [*deep_bytes[:-3:-1]], where=TOLD_DEEP)
gradients = 4 * (2 * TOKENS * 4 * DIM + 4 * DIM**2 + DIM)  # of the inner activations, twice, and of the layer behind
claim("the temporary gradients", ledger[4] == gradients, where=TOLD_DEEP)
claim("0.13 MB is a block's input", round(4 * TOKENS * DIM / 1e6, 2) == 0.13, where=TOLD_DEEP)

# %% tags=["claim"]
counts = {wrap: int(runs[wrap].value("all_gather_count")) for wrap in ("root", "block", "layer")}
claim("the root alone saves little", 0.75 < peaks["root"] / peaks[UNSHARDED] < 0.9, where=TOLD_DEEP)
claim("blocks need less than the root, layers less than blocks", peaks["layer"] < peaks["block"] < peaks["root"])
claim("blocks save nearly half", 0.4 < 1 - peaks["block"] / peaks[UNSHARDED] < 0.5, where=TOLD_DEEP)
claim("layers need twice as many calls as blocks", counts["layer"] == 2 * counts["block"])
claim("the root gathers once", counts["root"] == 1)
layer_sizes = [sizes[1] for sizes in theory.unit_bytes(theory.mlp_stack_layers("layer", DIM, 8), 4).values()]
too_high = expected["layer"]["total"] - peaks["layer"]
claim("theory is 2 % too high for layer", round(too_high / peaks["layer"], 2) == 0.02, where=TOLD_DEEP)
claim("by the layer that it gathers too early", abs(too_high / layer_sizes[-3] - 1) < 0.001, where=TOLD_DEEP)
claim("checkpointing saves most", min(peaks, key=peaks.get) == [*peaks][-1], where=TOLD_DEEP)
in_buckets = runs[UNSHARDED].value("peak_temp_bytes")
buffered = runs["root"].value("peak_all_gather_bytes")
claim("the root's buffer is as large as the model", abs(buffered / sum(deep_bytes) - 1) < 0.01, where=TOLD_DEEP)
whole = sum(each.elements for each in theory.mlp_stack_layers("block", DIM, 8))
claim("3.557 MB of parameters", round(4 * whole / 1e6, 3) == 3.557, where=TOLD_DEEP)
claim("the grey of data parallelism is as large", abs(in_buckets / (4 * whole) - 1) < 0.01, where=TOLD_DEEP)
gathered = runs["root"].value("peak_unsharded_parameter_bytes")
claim("the root's parameters are gathered as well", abs(gathered / sum(deep_bytes) - 1) < 0.01, where=TOLD_DEEP)
claim("17.9 MB", round(peaks[UNSHARDED] / 1e6, 1) == 17.9, where=TOLD_DEEP)

# %% [markdown]
# **What it costs.** Why not always `layer`? Each collective takes at least its latency, and `layer` makes twice as many
# as `block`. So make as few units as the memory allows, but several: the first gather, which nothing hides (section 5),
# is as long as its unit. `fully_shard` makes one unit of a list of modules, too.
#
# ### Exercise 5: choose the units (•, {minutes} minutes)
#
# `blocks` compute in the order of the list, and differ in size. Make units of blocks that follow one another, as few as
# possible, of which none gathers more than `limit` bytes of parameters. A block that is larger becomes a unit alone.
# The caller shards the root afterwards.
#
# <details><summary>Hint 1</summary>
#
# You fill one unit after another. What do you ask before a block joins the unit that you are filling?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A list holds the unit that is being filled, and `p.nbytes` are the bytes of a parameter. If the block does not fit,
# shard the list and begin a new one.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Ask for the sizes of blocks that are not yet sharded. When the loop ends, one list is left.
#
# </details>


# %%
def make_units(blocks: list[nn.Module], mesh: DeviceMesh, limit: int) -> None:
    ### BEGIN SOLUTION
    unit = []
    for block in blocks:
        if unit and sum(p.nbytes for each in [*unit, block] for p in each.parameters()) > limit:
            fully_shard(unit, mesh=mesh)
            unit = []
        unit.append(block)
    fully_shard(unit, mesh=mesh)
    ### END SOLUTION


# %%
units_verdict = checks.make_units(make_units)
units_verdict

# %% [markdown]
# **Choose.** A rank may use 10.6 MB, the dotted line. Two rows of the table are units: gathered parameters, and
# communication buffers. With yours, each is at most as large as the limit, and the other rows stay. Commit to the largest
# limit with which this sum surely fits.
#
# Your function then makes units of the eight blocks. It also makes those of an emulated stack of four, in which a block
# takes 25 ms forward and 50 ms backward, a collective 10 ms, and nothing overlaps.

# %% tags=["commit"]
mine_units = commit(limit_mb=None)
### BEGIN SOLUTION
mine_units = commit(limit_mb=(10.6 - (2.668 + 4.588 + 1.311)) / 2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
YOURS = {"wrap": "limit", "limit": round(1e6 * (mine_units["limit_mb"] or 0.53))}  # uncommitted, a block
YOURS |= {"use": {"make_units": make_units}} if units_verdict.ok else {}  # else labkit's function makes the units
chosen = labkit.run("fsdp_wrap", **DEEP | YOURS)
chosen_mb = chosen.value("peak_total_bytes") / 1e6
print(f"{chosen.value('reduce_scatter_count'):.0f} units, {chosen_mb:.2f} MB at the peak, of 10.6")

LINK = labkit.Emulated(latency_us=10_000, forward_ms=25, hardware="a link with a latency of 10 ms")
PLANS = {"block": {}, "layer": {"wrap": "layer"}, "block, checkpointing": {"checkpointing": True}, "your units": YOURS}
costs = labkit.compare("fsdp_wrap", PLANS, rounds=1, emulate=LINK, **SETUP | {"nproc": 2, "layers": 4, "steps": 3})
calls = {label: run.value("all_gather_count") + run.value("reduce_scatter_count") for label, run in costs.items()}
cost_ms = {label: 4 * (100 if "checkpointing" in label else 75) + 10 * calls[label] for label in PLANS}
_ = plots.latency_bars(costs, predicted=cost_ms)

# %% tags=["claim"]
took_ms = {label: result.value("step_ms") for label, result in costs.items()}
claim("layers cost time", took_ms["layer"] > 1.2 * took_ms["block"], where=DIM <= 128)
claim("checkpointing costs time", took_ms["block, checkpointing"] > 1.05 * took_ms["block"], where=DIM <= 128)
claim("no step is shorter than in theory", all(took_ms[label] > cost_ms[label] for label in cost_ms), where=DIM <= 128)
CHOSEN = TOLD_DEEP and YOURS["limit"] == 1_016_500  # not an answer of another learner
claim("four units below 10.6 MB", chosen.value("reduce_scatter_count") == 4 and 10.3 < chosen_mb < 10.6, where=CHOSEN)
in_units = sum(chosen.value(f"peak_{part}_bytes") for part in ("unsharded_parameter", "all_gather")) / 1e6
claim("the other rows stay, 8.567 MB", round(chosen_mb - in_units, 3) == 8.567, where=CHOSEN)
claim("and each of the two is below the limit", in_units <= 2 * YOURS["limit"] / 1e6, where=CHOSEN)
claim("12, 24, 12 and 6 collectives", [*calls.values()] == [12, 24, 12, 6], where=CHOSEN)
claim("and less time than blocks", took_ms["your units"] < 0.95 * took_ms["block"], where=CHOSEN)

# %% [markdown]
# *Dashed, theory: arithmetic, 300 ms or with checkpointing 400, and 10 ms for each collective: 12 with `block`, 24 with
# `layer`. What a bar has beyond it is **overhead**: what these ranks copy, send and compute.*
#
# The other rows sum to 8.567 MB, so the limit is (10.6 − 8.567)/2 = 1.0165 MB. With it the eight blocks become four
# units, which fit, and the emulated four become two, which need half as many collectives.
#
# *Takeaway: small units save memory, large ones save latency, and a block is the usual choice. Sharding leaves
# activations alone; checkpointing saves them.*
#
# ## 5. Does it hide? ({minutes} minutes)
#
# Time for which a rank has to wait for a message is **exposed**. A gather hides if it
#
# - travels **in the background**: the rank computes while the message is on its way. With NCCL it does; with gloo
#   `fully_shard` waits for each gather, which labkit changes in the runs with prefetching;
# - starts early, which is called **prefetching**: while one block computes, the gather of the next begins. On a GPU this
#   comes by itself as long as the program runs ahead of the device. Where it does not, as on CPUs, you ask by
#   `block.set_modules_to_forward_prefetch([following])`, while in the backward pass FSDP prefetches by itself.
#
# **When does a gather hide?** Take a block of P parameters that N ranks share, T tokens on each rank, and a device with
# F operations a second. The block's forward pass takes 2 P T / F seconds. Its all-gather sends b P (N − 1)/N bytes, with
# b bytes a parameter, at B bytes a second. The gather hides if the arithmetic takes at least as long:
#
# > T ≥ T₀ = b (N − 1)/N · F / (2 B)
#
# As P drops out, without latency a gather takes T₀/T times as long as the block's forward pass.
#
# **Emulated: two wires.** Two H100s, F = 400 · 10¹², train six blocks with T = 2048 tokens each in bfloat16, b = 2. If
# NVLink links them, B is 450 · 10⁹ and T₀ is 2 · ½ · 400 · 10¹² / (2 · 450 · 10⁹) = 444 tokens. In two hosts with one
# network card each, B is 50 · 10⁹. Two ranks emulate both in slow motion: a block's forward pass takes 20 ms.
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
emulated = labkit.compare("fsdp_wrap", options, rounds=1, **SETUP | {"nproc": 2, "layers": 6, "steps": 3})
_ = plots.latency_bars(emulated, predicted=step_ms, arithmetic={"forward": 6 * 20, "backward": 6 * 40})

# %% [markdown]
# *Hatched: what each pass takes beyond its arithmetic. Dashed is the step in theory.*

# %% tags=["nbval-ignore-output"]
WIRES = {"nvlink_ms": "NVLink, prefetch", "card_ms": "network card, prefetch"}
in_theory = {"card_tokens": theory.tokens_to_hide(400e12, 50e9, 2, 2)}
in_theory |= {name: forward_in_theory[wire] for name, wire in WIRES.items()}
measured = {name: emulated[wire].value("forward_ms") for name, wire in WIRES.items()}
columns = {"yours": mine_hiding, "theory": in_theory, "measured": measured}
beyond_ms = {label: (emulated[label].value("step_ms") - ms) / 18 for label, ms in step_ms.items()}
print("time beyond theory, over 18 collectives:", ", ".join(f"{ms:.1f} ms" for ms in beyond_ms.values()))
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
gather_ms = 20 * theory.tokens_to_hide(400e12, 450e9, 2, 2) / 2048
claim("a gather and six reduce-scatters of 4.3 ms", abs(backward_ms - 6 * 40 - 7 * gather_ms) < 1, where=DIM == 128)
claim("some ms for each collective", busy or all(0 < ms < 10 for ms in beyond_ms.values()), where=DIM <= 128)
other = max(beyond_ms.values()) > 39 / 4 or max(beyond_ms.values()) < 4.3 / 10
claim("the overhead is small beside 39 ms, not beside 4.3", busy or not other, where=DIM <= 128)
close = [abs(measured[name] / in_theory[name] - 1) for name in WIRES]
claim("the formula holds within 20 %", max(close) < 0.2 or busy, where=DIM <= 128)
both = {label: emulated[label].value("step_ms") for label in step_ms}
claim("prefetching shortens the card's step", both["network card, prefetch"] < 0.85 * both["network card, no prefetch"])
exposed_ms = emulated["NVLink, prefetch"].value("backward_ms") - 6 * 40
claim("the backward pass has exposed time over NVLink", exposed_ms > 0)
claim("no step is shorter than in theory", all(both[label] > step_ms[label] for label in both), where=DIM <= 128)

# %% [markdown]
# Over NVLink a gather takes 20 · 444/2048 = 4.3 ms and hides behind the 20 ms of a block. Only the first is exposed:
# 4.3 + 6 · 20 = 124 ms. Through a card T₀ is 4000 tokens, and a gather takes 39 ms on average. The wire is never idle, and
# the last block computes when the last gather has arrived: 6 · 39 + 20 = 254 ms.
#
# The backward pass over NVLink has 240 ms of arithmetic, and takes 270 in theory: 4 for the first gather, which nothing
# hides, and 6 · 4.3 because with gloo `fully_shard` waits for each reduce-scatter. With NCCL they can travel while the
# next block computes.
#
# Beyond theory a step takes some ms for each of its 18 collectives: few beside 39, but not beside 4.3.
#
# *Takeaway: gathers that are prefetched, in the background, cost the forward pass little time as long as each rank has
# more than T₀ tokens.*
#
# ## 6. Take away ({minutes} minutes)
#
# 1. FSDP keeps 1/N of parameters, gradients and optimizer state on each of N ranks, and gathers a unit before it
#    computes.
# 2. It sends 1.5 times as much as DDP if it gathers twice. With prefetching, a rank's tokens decide if that costs time.
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
# Is it the first one of a pass, which has nothing to hide behind? Else, was it prefetched? On a GPU, did the program run
# ahead of the device, or does something make it wait in each block?
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
