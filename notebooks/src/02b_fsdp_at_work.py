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
# be read in any order, but for section 9, which uses your test of section 3.

# %% tags=["nbval-ignore-output"]
import copy
import tempfile

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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
TOLD = (RANKS, DIM, BATCH) == (2, 128, 32)  # the values that the text speaks of
layers, five = (theory.mlp_stack_layers("block", DIM, blocks) for blocks in (3, 5))
FIVE_BLOCKS = sum(layer.elements for layer in five)  # parameters of a stack of five
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
# From lab 2: a module given to `fully_shard` is a **unit**, and what lies in no other unit is the **root's**. Here each
# block is a unit, and the root owns no parameters. We try both ways with eight blocks on four ranks. Commit: how many
# all-gathers does a step take if the blocks are kept?

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
plans = [("block", False), ("block", True), ("layer", False), ("layer", True)]  # what the explorer draws
peaks_mb = [
    theory.fsdp_step_peak(theory.mlp_stack_layers(wrap, 128), 256, 2, checkpointing=again)["total"] / 1e6
    for wrap, again in plans
]
claim("only both together stay below 5 MB", [round(peak, 2) for peak in peaks_mb] == [5.98, 5.59, 5.26, 4.86])

# %% [markdown]
# Keeping the parameters costs a quarter more memory at the peak here. The explorer draws a step event by event: what a
# rank of two holds, and beside it what it sends. The dotted line is a device's memory, a budget of 5 MB. By default the
# peak is 1 MB above it. Get below with two ranks, 32 sequences and float32: what do you change?
#
# <details><summary>One way</summary>
#
# Recompute the activations (5.59 MB), or make each layer a unit (5.26 MB): neither is enough, and both together need
# 4.86 MB. Gathering once, instead of twice, changes nothing with three blocks, because gathering twice holds two at
# the peak anyway: one computes, and the next one is gathered ahead.
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
# | event of a unit's backward pass | in the ledger |
# |---|---|
# | always there | this rank's share of the parameters, and of Adam's two numbers for each |
# | a unit's gradients are complete | its gathered parameters are freed |
# | they become one flat row | a row as large as the whole unit is made, and the gradients are dropped |
# | there must be room for the result | this rank's share of the unit's gradients, which stays to the end of the step |
# | reduce-scatter | a second copy of the row, made by Gloo, the backend for CPUs (NCCL, on GPUs, needs none of that size) |
#
# The network of this lab has three blocks, whose inner widths are 3, 4 and 3 times `DIM`. How many bytes are held at its peak? It
# lies at the reduce-scatter of one of the units.
#
# <details><summary>Hint 1</summary>
#
# At the reduce-scatter of unit i: the row, its second copy, and shares of the gradients of units i, i + 1, …
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
# Now measured: `fsdp="yours"` trains with a small FSDP like lab 2's. One sample keeps activations small, and PyTorch's
# `MemTracker` follows every tensor of the step.

# %% tags=["nbval-ignore-output"]
own = labkit.run("fsdp_wrap", fsdp="yours", **SETUP | {"batch": 1})  # without use=, labkit's own
yours = {"peak_total_bytes": peak_bytes(UNITS, RANKS)}
plots.comparison_table(
    own, {"peak_total_bytes": theory.small_fsdp_peak_bytes(UNITS, RANKS)}, yours=yours, tolerance=0.01
)

# %% tags=["claim"]
excess = own.value("peak_total_bytes") / theory.small_fsdp_peak_bytes(UNITS, RANKS) - 1
claim("the peak is within 1 % of the ledger's", 0 <= excess < 0.01, where=TOLD)
other = sorted(2 * unit + sum(UNITS[index:]) / RANKS for index, unit in enumerate(UNITS))[-2]
another = (3 * sum(UNITS) / RANKS + other) / theory.small_fsdp_peak_bytes(UNITS, RANKS)
claim("another unit would be more than 1 % off", another < 0.99, where=TOLD)

# %% [markdown]
# Within 1 %, which is close enough to tell the units apart. PyTorch's FSDP with all samples holds more: activations, and
# the next block, which is gathered ahead. `theory.step_ledger` writes down all of that.

# %% tags=["nbval-ignore-output"]
ledger = theory.step_ledger(layers, 8 * BATCH, RANKS)
peak = {f"peak_{part}_bytes": size for part, size in ledger.peak.items()}
plots.comparison_table(block, peak, tolerance=0.01)

# %% tags=["claim"]
inner = layers[2].outputs * 8 * BATCH * 4  # bytes of the widest activation
claim("gradients before and behind its ReLU", ledger.peak["temp"] == 2 * inner + 4 * layers[3].elements, where=TOLD)
whole_mb = block.value("peak_total_bytes") / 1e6
claim("5.98 MB", round(whole_mb, 2) == 5.98, where=TOLD)
claim("this ledger is within 1 %", abs(1e6 * whole_mb / ledger.peak["total"] - 1) < 0.01, where=TOLD)

# %% [markdown]
# With activations the peak, 5.98 MB, does not lie at a reduce-scatter, but in the middle of the second block's backward
# pass: at its inner ReLU the gradients before and behind it, as wide as the widest layer, exist at once.
#
# *Takeaway: without activations the peak lies at the reduce-scatter of a large unit, and with them inside its backward
# pass.*
#
# ## 3. A test that can fail ({minutes} minutes)
#
# ### Exercise 2: compare gradients (••, {minutes} minutes)
#
# In lab 2 gradients twice too large left no trace in the losses. Write the test that would have caught it. `mine` and
# `reference` are gradients by name, dicts of tensors. Rounding may move each by at most 1e-5 of the largest absolute
# value of its reference. What else must make the test return False?
#
# <details><summary>Hint 1</summary>
#
# What does your test say of two empty dicts? Of a gradient that is NaN? Of a reference that is infinite? Of a gradient
# of shape (1,) beside one of shape (3,)?
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
    if any(mine[name].shape != reference[name].shape for name in reference):
        return False
    errors = {name: (mine[name] - reference[name]).abs().max() for name in reference}
    return all(bool(error.isfinite() and error <= 1e-5 * reference[name].abs().max()) for name, error in errors.items())
    ### END SOLUTION


# %%
checks.gradients_agree(gradients_agree)

# %% [markdown]
# Now lab 2's bug on two ranks: gradients twice too large, and then its repair. `whole_gradients` gathers the shards.


# %%
def whole_gradients(model: nn.Module, *inputs: torch.Tensor, factor: float = 1) -> dict[str, torch.Tensor]:
    """Return the gradients of the output's mean square, times a factor, by name."""
    (factor * model(*inputs).square().mean()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


# %%
# %%torchrun -n 2 --use gradients_agree,whole_gradients,fully_shard,init_device_mesh
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))  # of both ranks together
for factor in (2, 1):
    torch.manual_seed(1)
    alone = nn.Linear(4, 3)
    sharded = copy.deepcopy(alone)
    fully_shard(sharded, mesh=mesh)
    mine = whole_gradients(sharded, samples.chunk(2)[dist.get_rank()], factor=factor)
    print(f"{factor} times the gradients agree:", gradients_agree(mine, whole_gradients(alone, samples)))
dist.destroy_process_group()

# %% [markdown]
# *Takeaway: a test of nothing must fail, and so must NaN and another shape.*
#
# ## 4. Read a time line ({minutes} minutes)
#
# `torch.profiler` records one step, here twice. Each block computes 5 ms longer, so that there is something to hide
# behind. In the second step labkit prefetches: while a block computes, the next one is on its way. On GPUs FSDP2 does
# this by itself; `block.set_modules_to_forward_prefetch([next_block])` asks for more.

# %% tags=["nbval-ignore-output"]
slow = SETUP | {"timeline": True, "delay_ms": 5.0, "dim": 512, "batch": 4, "steps": 2}
hidden_ms = []
for prefetch in (False, True):
    profiled = labkit.run("fsdp_wrap", prefetch=prefetch, **slow)
    hidden_ms.append(checks.hidden_gather_ms(profiled))
    print(f"prefetch={prefetch}: {hidden_ms[-1]:.1f} ms of all-gathers lie behind computing")
    _ = plots.timeline(profiled, ranks=[0])

# %% [markdown]
# *One rank without prefetching, and with it; the numbers are those of the blocks. Exposed time is underlined. With
# prefetching some all-gathers lie below computing.* Since they use the same cores, both take longer. And on CPU ranks the
# backward pass waits for every reduce-scatter.
#
# The raw traces are in the folder of the run, and ui.perfetto.dev opens them.
#
# ### Exercise 3: the forgotten block (•, {minutes} minutes)
#
# Somebody wrapped all nine blocks of another model but one, which a seed chose. It still trains. The forgotten block has
# no all-gather of its own: its parameters are gathered with the root's, and are whole until the backward pass is over.

# %% tags=["nbval-ignore-output"]
toy = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "steps": 2}
mystery, complete = (labkit.run("fsdp_wrap", forget=seed, timeline=True, **toy) for seed in (2026, None))
for what, run in {"all but one": mystery, "all wrapped": complete}.items():
    print(f"{what}: {run.value('peak_total_bytes') / 1e6:.2f} MB at the peak")

# %% tags=["claim"]
claim("prefetching hides all-gathers", hidden_ms[1] > hidden_ms[0])
claim("the forgotten block costs memory", mystery.value("peak_total_bytes") > complete.value("peak_total_bytes"))

# %% [markdown]
# A count finds out at once that something is missing. Here the blocks are freed after the forward pass, and nothing is
# frozen. So the root is gathered once, each other unit twice, and each is reduced once: all-gathers less reduce-scatters
# is the number of wrapped blocks. The next verdict is red, as it should be: it is about the run, not about you.

# %%
checks.every_block_wrapped(mystery, blocks=9)

# %% [markdown]
# Which block is it? `gathered` has for each all-gather of a step the name of its unit, and `blocks` the names of all
# blocks, in the order of the model. Return the numbers, counted from 0, of all forgotten blocks.
#
# <details><summary>Hint</summary>
#
# `enumerate(blocks)` gives numbers and names.
#
# </details>


# %%
def forgotten_blocks(gathered: list[str], blocks: list[str]) -> list[int]:
    ### BEGIN SOLUTION
    return [index for index, block in enumerate(blocks) if block not in gathered]
    ### END SOLUTION


# %%
checks.forgotten_blocks(forgotten_blocks)

# %% [markdown]
# Now the mystery: its blocks stand at positions 4 to 12 of the model.

# %%
gathers = mystery.frame.query("kind == 'bar' and phase == 'all_gather' and rank == 0")
print("forgotten:", forgotten_blocks(gathers["name"].tolist(), [f"net.{place}" for place in range(4, 13)]))

# %% [markdown]
# *Takeaway: count all-gathers and reduce-scatters first, and only then ask which units they belong to.*
#
# ## 5. Fewer bytes: mixed precision ({minutes} minutes)
#
# With a `MixedPrecisionPolicy` (from `torch.distributed.fsdp`) the shards stay in float32, but parameters are gathered
# and used in bfloat16, of 2 bytes a number. In your own script each `fully_shard`, the root's too, gets
# `mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. Gradients are reduced in
# float32 here, since in bfloat16 a sum of many small numbers loses digits.
#
# This time the blocks are also kept between the passes, as in section 1. Commit to what a rank hands to its calls in a
# step (its shards to the all-gathers, whole rows to the reduce-scatters), and to what it keeps. The three blocks have
# `PARAMETERS` parameters.

# %% tags=["commit"]
mine_bytes = commit(all_gather_bytes=None, reduce_scatter_bytes=None, end_parameter_bytes=None)
### BEGIN SOLUTION
mine_bytes = commit(
    all_gather_bytes=2 * PARAMETERS / RANKS,
    reduce_scatter_bytes=4 * PARAMETERS,
    end_parameter_bytes=4 * PARAMETERS / RANKS,
)
### END SOLUTION

# %% tags=["summary"]
bf16 = labkit.run("fsdp_wrap", precision="bf16", reshard_after_forward=False, **SETUP)
once = theory.step_collectives(layers, RANKS, reshard_after_forward=False)
halved = predicted | once | {"all_gather_bytes": once["all_gather_bytes"] // 2}
plots.comparison_table(bf16, halved, yours=mine_bytes)

# %% [markdown]
# *The all-gathers were handed a quarter of the bytes, and what a rank keeps is unchanged. On the wire, a step sends 1/2 +
# 1 instead of 1 + 1 + 1.*
#
# In the last row Adam's step counts come on top of two numbers a parameter: 4 bytes for each of the 12 tensors.

# %% tags=["claim"]
claim("a quarter of the bytes", 4 * bf16.value("all_gather_bytes") == block.value("all_gather_bytes"))
claim("what a rank keeps is unchanged", bf16.value("end_parameter_bytes") == block.value("end_parameter_bytes"))
counts_bytes = bf16.value("end_optstate_bytes") - 2 * bf16.value("end_parameter_bytes")
claim("4 bytes for each of the 12 tensors", counts_bytes == 4 * 12)

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
how = {"frozen": ("block 1",)}
predicted_frozen = theory.step_collectives(layers, RANKS, **how) | theory.resident_bytes(layers, RANKS, **how)
plots.comparison_table(frozen, predicted_frozen, yours=mine_frozen)

# %% [markdown]
# The frozen block is gathered in both passes all the same, because the gradients of block 0 come through its weights. And
# if the first blocks are frozen, as in most fine-tuning? Now of four blocks:

# %%
fewer = {"0": (0,), "0 and 1": (0, 1), "0, 1 and 3": (0, 1, 3)}
short = SETUP | {"layers": 4, "steps": 1}
fewer = {name: labkit.run("fsdp_matrix", freeze=blocks, **short) for name, blocks in fewer.items()}
counts = {
    name: [int(run.value(f"{call}_count")) for call in ("all_gather", "reduce_scatter")] for name, run in fewer.items()
}
for name, (gathers_now, scatters) in counts.items():
    print(f"{name} frozen: {gathers_now} all-gathers, {scatters} reduce-scatters")

# %% tags=["claim"]
claim("one gather is saved where 0 and 1 are frozen", [*counts.values()] == [[8, 3], [7, 2], [7, 1]])

# %% [markdown]
# Nothing has to come through the weights of blocks 0 and 1, and yet block 1 is gathered twice: in the backward pass FSDP2
# gathers ahead whichever block ran before. Only block 0 is spared, and freezing block 3 as well changes nothing about
# that.
#
# *Takeaway: freezing saves gradients, their reduce-scatter and optimizer state. Of gathers it saves those of the frozen
# blocks at the beginning of the model, but for the last of these.*
#
# ## 7. HSDP: shard inside, replicate outside ({minutes} minutes)
#
# Inside a host the network is fast, between hosts it is slow. **Hybrid sharding** (HSDP) cuts the ranks into groups.
# Each group holds all parameters, sharded over its ranks, and gathers and reduces inside. Then each rank averages its
# shard's gradients with the ranks of the other groups that hold the same shard: one all-reduce for each unit, of a
# shard's size. In your own script that is `fully_shard` with a mesh of two axes: `init_device_mesh("cuda", (2, 8),
# mesh_dim_names=("replicate", "shard"))`.
#
# Now four ranks form two groups of two, and train five blocks of `4 * FIVE_BLOCKS` bytes. Commit, for one rank: the bytes
# that it hands to the all-reduces of a step, and those that it hands to the all-gathers.

# %% tags=["commit"]
mine_hybrid = commit(all_reduce_bytes=None, all_gather_bytes=None)
### BEGIN SOLUTION
mine_hybrid = commit(all_reduce_bytes=4 * FIVE_BLOCKS / 2, all_gather_bytes=2 * 4 * FIVE_BLOCKS / 2)
### END SOLUTION

# %%
hybrid = labkit.run("fsdp_matrix", wrap="block", hybrid=2, **SETUP | {"nproc": 4, "layers": 5, "steps": 2})
half = {"end_parameter_bytes": theory.resident_bytes(five, 2)["end_parameter_bytes"]}
yours = {"replicate/all_reduce_bytes": mine_hybrid["all_reduce_bytes"]}
yours |= {"data/all_gather_bytes": mine_hybrid["all_gather_bytes"]}
plots.comparison_table(hybrid, theory.hybrid_collectives(five, 2) | half, yours=yours)

# %% [markdown]
# *The names say along which axis of the mesh a call went; labkit calls the shard axis `data`. Along `replicate` there is
# one all-reduce for each of the five blocks.*
#
# The slow network carries one all-reduce of a shard for each unit, and no gathers. The price is memory, because a rank
# holds half of the parameters instead of a quarter.

# %% tags=["claim"]
across = theory.hybrid_collectives(five, 2)["replicate/all_reduce_bytes"]
claim("along replicate, half of the parameters is handed over", hybrid.value("replicate/all_reduce_bytes") == across)
claim("a rank holds a half", hybrid.value("end_parameter_bytes") == half["end_parameter_bytes"])
claim("one all-reduce for each block", hybrid.value("replicate/all_reduce_count") == 5)

# %% [markdown]
# *Takeaway: HSDP keeps the gathers where the network is fast.*
#
# ## 8. How do I save a sharded model? ({minutes} minutes)
#
# No rank has the whole model, so there are two ways. With `torch.distributed.checkpoint` each rank writes its part into
# one folder. Every tensor there knows its place in the whole, so any other number of ranks can load it. Or you gather
# everything on rank 0 and save one plain file, as long as one host can hold it. Two ranks now train two steps, do both,
# and train on.


# %%
def start_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(torch.arange(12.0).view(3, 4) / 10) - 1).square().mean()  # each rank has the same samples


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> str:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
    return " ".join(f"{loss:.5f}" for loss in losses)


folder = tempfile.TemporaryDirectory()
PLACE = folder.name  # on a cluster: a folder that all hosts see

# %%
# %%torchrun -n 2 --use start_training,train,PLACE --name saved
dist.init_process_group("gloo")
model, optimizer = start_training(seed=0)
train(model, optimizer, steps=2)
model_state, optimizer_state = states.get_state_dict(model, optimizer)
checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{PLACE}/parts")
options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = states.get_model_state_dict(model, options=options)
if dist.get_rank() == 0:  # the others hold nothing
    torch.save(whole, f"{PLACE}/whole.pt")
print("two ranks train on:", train(model, optimizer, steps=3))
dist.destroy_process_group()

# %% [markdown]
# Only rank 0 holds the whole state: offloading it to every rank would fill the host's memory once per rank. Now three
# ranks, whose model begins with other values, load the parts, and one device the plain file.

# %%
# %%torchrun -n 3 --use start_training,train,PLACE --name resumed
dist.init_process_group("gloo")
model, optimizer = start_training(seed=1)
model_state, optimizer_state = states.get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state}
checkpoint.load(state, checkpoint_id=f"{PLACE}/parts")  # fills state
how = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
states.set_state_dict(model, optimizer, **how)  # puts it back
print("three ranks train on:", train(model, optimizer, steps=3))
dist.destroy_process_group()

# %%
on_one_device = nn.Linear(4, 6)
on_one_device.load_state_dict(torch.load(f"{PLACE}/whole.pt", weights_only=True))
print(f"one device: {loss_of(on_one_device):.5f}")
folder.cleanup()

# %% tags=["claim"]
went_on = [run.ranks[0].log().split()[-3:] for run in (saved, resumed)]
claim("three ranks have the losses of two", went_on[0] == went_on[1])
claim("one device begins there, too", went_on[0][0] == f"{loss_of(on_one_device):.5f}")

# %% [markdown]
# Three ranks have the losses of two. The second and third depend on Adam's state, so it has come along. One device begins
# with the same loss.
#
# *Takeaway: let each rank write its part, and load it on any number of ranks.*
#
# ## 9. Tied weights ({minutes} minutes)
#
# Language models often use one matrix twice: to embed tokens, and to predict them. If the two modules are in different units,
# FSDP2 refuses, as you will see below. `fully_shard` takes a list instead: `fully_shard([embedding, head])` makes one unit of both.
#
# ### Exercise 4: who must share a unit? (••, {minutes} minutes)
#
# Return the block, and behind it all modules of `model` outside of the block that hold one of its parameters themselves.
# Two parameters are tied if they are the same object; equal values are not enough.
#
# <details><summary>Hint 1</summary>
#
# `module.parameters(recurse=False)` gives the parameters that a module holds itself, and not those of its parts.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `set(block.modules())` is all that is inside. A set finds a parameter by identity, while `==`, and `in` of a list,
# compare numbers.
#
# </details>


# %%
def tied_unit(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    ### BEGIN SOLUTION
    own, inside = set(block.parameters()), set(block.modules())
    return [block] + [
        module
        for module in model.modules()
        if module not in inside and any(p in own for p in module.parameters(recurse=False))
    ]
    ### END SOLUTION


# %%
checks.tied_unit(tied_unit)

# %% [markdown]
# A transformer whose head has the embedding's matrix is wrapped in the wrong way, each in a unit of its own, and then by
# your function.

# %%
# %%torchrun -n 2 --use tied_unit,gradients_agree,whole_gradients,fully_shard,init_device_mesh
from labkit.models.transformer import TransformerWithSharedParams
from launch.fsdp_wrap import silence_warnings

silence_warnings()
dist.init_process_group("gloo")
mesh, tokens = init_device_mesh("cpu", (2,)), torch.arange(10).view(1, 10).split([6, 4], dim=1)
for how in ("each alone", "tied_unit"):
    torch.manual_seed(0)
    alone = TransformerWithSharedParams(dropout=0.0, add_bn=False)
    sharded = copy.deepcopy(alone)
    embedding, head = sharded.embed_tokens, sharded.output_proj
    try:
        for unit in [[embedding], [head]] if how == "each alone" else [tied_unit(sharded, embedding) or [embedding]]:
            fully_shard(unit, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        agree = gradients_agree(whole_gradients(sharded, *tokens), whole_gradients(alone, *tokens))
        print(f"{how}: the gradients are one device's: {agree}")
    except ValueError as error:
        print(f"{how}: {error}")
dist.destroy_process_group()

# %% [markdown]
# `labkit/parallel/units.py` does the same for every model.
#
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
# ### Exercise 5: average, but not everything (•, {minutes} minutes)
#
# Every parameter has a gradient: average the shared ones over the ranks. Send nothing for those of `experts`, but divide
# them by the number of ranks. `dist.all_reduce(tensor)` adds a tensor up over all ranks, in place. Your function runs on two real ranks,
# then on three. Whatever it uses of this notebook is copied there.
#
# <details><summary>Hint</summary>
#
# Go through `model.parameters()`. All ranks must call the same all-reduces in the same order. `experts` is a set, which
# finds a parameter by identity.
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
# With FSDP2, by its documentation, you shard the expert over a mesh of one rank, its own, and
# `expert.set_gradient_divide_factor(ranks)` divides its gradient. Gloo cannot, so it is not tried here: compare it with
# one device on your GPUs.
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
# <details><summary>1. Of 12 blocks the first 8 are frozen. How many all-gathers does a step take?</summary>
#
# 12 forward. Backward the four trained blocks and, gathered ahead, the last frozen one: 17 together.
#
# </details>
# <details><summary>2. HSDP on two hosts of 8: how much does a rank hold, beside FSDP over 16?</summary>
#
# Twice as much, an eighth instead of a sixteenth.
#
# </details>
# <details><summary>3. Blocks are kept and gathered in bfloat16. What does a step send, beside DDP's 1 + 1?</summary>
#
# 1/2 + 1, so it sends less than DDP.
#
# </details>
# <details><summary>4. A run goes on after a load, and its losses look right. What may still be lost?</summary>
#
# Adam's state. Compare several losses with those of a run that was never stopped, on the same samples.
#
# </details>
# <details><summary>5. All gradients are NaN on both sides. What does your test of section 3 say?</summary>
#
# False: a NaN agrees with nothing, not even with another NaN.
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
