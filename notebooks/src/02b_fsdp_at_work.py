# %% [markdown]
# # Lab 2b. FSDP at work
#
# This companion of lab 2 covers what you meet when you train your own model with FSDP. After it you can
#
# - predict the peak of parameters, gradients and optimizer state, and write a test of gradients that can fail;
# - read a time line, and find a block that somebody forgot to wrap;
# - wrap a model yourself, with mixed precision, tied weights and HSDP, and save and load it.
#
# You need lab 2. The notebook takes about {core_minutes} minutes. Once the cells above section 1 have run, its parts can
# be read in any order, but for section 8, which needs 5 and 7.

# %% tags=["nbval-ignore-output"]
import copy
import tempfile

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.theory import emulated_steps
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

# Lab 2's stack of three blocks, whose inner widths are 3, 4 and 3 times DIM
SETUP = {"nproc": RANKS, "model": "mlp_stack", "dim": DIM, "batch": BATCH, "steps": STEPS}
UNITS = [4 * (2 * times * DIM**2 + (times + 1) * DIM) for times in (3, 4, 3)]  # bytes of each block's parameters
PARAMETERS = sum(UNITS) // 4
TOLD = (RANKS, DIM, BATCH) == (2, 128, 32)  # whether the text's numbers are those of this run
layers = theory.mlp_stack_layers("block", DIM, 3)  # the stack as labkit's formulas know it
predicted = theory.step_collectives(layers, RANKS) | theory.resident_bytes(layers, RANKS)
block = labkit.run("fsdp_wrap", wrap="block", **SETUP)  # each block a unit, for comparison

# %% [markdown]
# ## 1. Gather once or twice ({minutes} minutes)
#
# FSDP gathers a unit's parameters in the forward pass, frees them, and gathers them again in the backward pass.
# `fully_shard(block, reshard_after_forward=False)` keeps them in between, which PyTorch's older API calls
# SHARD_GRAD_OP. Then a step sends as many bytes as DDP's all-reduce, and not 1.5 times as many, but every gathered
# block stays in memory until its backward pass is over.
#
# From lab 2: a module given to `fully_shard` is a **unit**, and what lies in no other unit is the **root's**. Here each
# block is a unit, and the root owns no parameters. We try both ways with eight blocks on four ranks. All blocks together
# have 3.56 MB of parameters. If they are freed, two are whole at the peak: one computes its backward pass, and the next
# one has been gathered ahead. Commit: how many MB does the peak grow if the blocks are kept?

# %% tags=["commit"]
mine_kept = commit(more_mb=None)
### BEGIN SOLUTION
mine_kept = commit(more_mb=3.56 * 6 / 8)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
DEEP = SETUP | {"nproc": 4, "layers": 8, "steps": 2}
choices = {"freed": True, "kept": False}
deep = {
    name: labkit.run("fsdp_wrap", wrap="block", reshard_after_forward=freed, **DEEP) for name, freed in choices.items()
}
print(f"you predicted {prediction_text(mine_kept['more_mb'], '.2f')} MB more if the blocks are kept")
for name, run in deep.items():
    count, peak_mb = run.value("all_gather_count"), run.value("peak_total_bytes") / 1e6
    print(f"{name}: {count:.0f} all-gathers, {peak_mb:.2f} MB at the peak")

# %% tags=["claim"]
claim("half the all-gathers", 2 * deep["kept"].value("all_gather_count") == deep["freed"].value("all_gather_count"))
more_mb = (deep["kept"].value("peak_total_bytes") - deep["freed"].value("peak_total_bytes")) / 1e6
claim("keeping costs 2.6 MB", round(more_mb, 1) == 2.6, where=(DIM, BATCH) == (128, 32))
deep_mb = sum(layer.elements for layer in theory.mlp_stack_layers("block", DIM, 8)) * 4 / 1e6
claim("eight blocks have 3.56 MB", round(deep_mb, 2) == 3.56, where=DIM == 128)

# %% [markdown]
# Keeping saves half of the all-gathers, and costs six blocks' parameters, 2.6 MB.
#
# The explorer draws a step event by event: what a rank of two holds, and below it what it sends. The dotted line is a
# device's memory, a budget of 5 MB. By default the peak is 1 MB above it. Get below with two ranks, 32 sequences and
# float32: what do you change?

# %%
widgets.WrappingExplorer()

# %%
plans = {"blocks": ("block", False), "blocks, recomputed": ("block", True)}
plans |= {"layers": ("layer", False), "layers, recomputed": ("layer", True)}
for name, (wrap, again) in plans.items():
    need = theory.fsdp_step_peak(theory.mlp_stack_layers(wrap, 128), 256, 2, checkpointing=again)
    print(f"{name}: {need['total'] / 1e6:.2f} MB")

# %% [markdown]
# Only both together stay below 5 MB: recomputed activations, and each layer a unit.
#
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
# | when | in the ledger |
# |---|---|
# | from the beginning to the end of the step | this rank's share of the parameters, and of Adam's two numbers for each |
# | a unit's gradients are complete | its gathered parameters are freed |
# | the gradients are copied into one flat row | a row as large as the whole unit is added, and then the gradients are dropped |
# | before the reduce-scatter | this rank's share of the unit's gradients is added, and stays to the end of the step |
# | during the reduce-scatter | a second copy of the row, made by Gloo, the backend for CPUs; NCCL, on GPUs, needs none of that size |
#
# How many bytes are held at the peak? It lies at the reduce-scatter of one of the units.
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
weight = 4 * layers[3].elements  # bytes of the weight behind it, and of its bias
claim(
    "gradients before and behind its ReLU, and one of a weight", ledger.peak["temp"] == 2 * inner + weight, where=TOLD
)
claim("524,288 and 262,656 bytes", (inner, weight) == (524_288, 262_656), where=TOLD)
claim("the second block is whole", ledger.peak["unsharded_parameter"] == UNITS[1], where=TOLD)
claim("the first one is gathered ahead", ledger.peak["all_gather"] == UNITS[0], where=TOLD)
whole_mb = block.value("peak_total_bytes") / 1e6
claim("5.98 MB", round(whole_mb, 2) == 5.98, where=TOLD)
claim("this ledger is within 1 %", abs(1e6 * whole_mb / ledger.peak["total"] - 1) < 0.01, where=TOLD)

# %% [markdown]
# Its rows tell where the peak of 5.98 MB lies. The gathered parameters, 526,848 bytes, are those of the second block,
# and an all-gather's buffer holds the first one, gathered ahead. The temporary 1,311,232 bytes are 2 × 524,288 +
# 262,656: the gradients behind and before the block's inner ReLU, as wide as the widest layer, and that of the weight
# behind the ReLU, with its bias. So the peak lies in the middle of the second block's backward pass.
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
# of shape (1,) compared with one of shape (3,)?
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
def whole_gradients(model: nn.Module, inputs: torch.Tensor, factor: float = 1) -> dict[str, torch.Tensor]:
    """Return the gradients of the output's mean square, times a factor, by name."""
    (factor * model(inputs).square().mean()).backward()
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
# `torch.profiler` records one step, and labkit draws it. Two ranks emulate devices whose times are known: a block's
# forward pass takes 20 ms and its backward pass 40 ms, and the all-gathers of the three blocks take 9, 12 and 9 ms, as
# do their reduce-scatters. A message is **exposed** while it travels and nothing computes.
#
# In the backward pass FSDP2 asks for the next block ahead, before this one computes. Whether the message then overlaps
# with the computing depends on the backend. On GPUs it does, while on CPUs FSDP2 waits for each message at once. The
# gathers of each pass and the reduce-scatters take 30 ms, and all 90 ms are exposed.
#
# labkit's `prefetch=True` removes that wait from the all-gathers, and also asks ahead in the forward pass, as
# `block.set_modules_to_forward_prefetch([next_block])` does in your own script. The reduce-scatters are still waited
# for. Commit: how many of the 90 ms are exposed then?

# %% tags=["commit"]
mine_exposed = commit(exposed_ms=None)
### BEGIN SOLUTION
mine_exposed = commit(exposed_ms=9 + 9 + 30)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
gathers_s = 0.030  # of all three blocks; a rank sends its half
device = labkit.Emulated(gb_per_s=sum(UNITS) / RANKS * (RANKS - 1) / gathers_s / 1e9, forward_ms=20)
profiled = {}
for prefetch in (False, True):
    profiled[prefetch] = labkit.run(
        "fsdp_wrap", prefetch=prefetch, emulate=device, timeline=True, **SETUP | {"steps": 1}
    )
    _ = plots.timeline(profiled[prefetch], ranks=[0])

# %% [markdown]
# *One rank without prefetching, and with it; the numbers are those of the blocks. Exposed time is underlined. With
# prefetching four all-gathers hide behind computing.*
#
# The first gather of each pass has nothing to hide behind, and neither has a reduce-scatter. The raw traces are in the
# folder of the run, and ui.perfetto.dev opens them.
#
# ### Exercise 3: measure what is exposed (•, {minutes} minutes)
#
# `computing` and `messages` are the bars of the two lanes, each a start and an end in ms. Bars of the same lane do not
# overlap. Return for how many ms a message is on its way while nothing computes.
#
# <details><summary>Hint 1</summary>
#
# Subtract from the length of all messages what lies behind computing, for each message and each bar of computing.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two bars share the time from the later start to the earlier end. What if the later start comes after that?
#
# </details>


# %%
def exposed_ms(computing: list[tuple[float, float]], messages: list[tuple[float, float]]) -> float:
    ### BEGIN SOLUTION
    hidden = 0.0
    for start, end in messages:
        for begun, done in computing:
            hidden += max(0, min(end, done) - max(start, begun))
    return sum(end - start for start, end in messages) - hidden
    ### END SOLUTION


# %%
checks.exposed_ms(exposed_ms)

# %% tags=["nbval-ignore-output"]
print(f"with prefetching, you predicted {prediction_text(mine_exposed['exposed_ms'], '.0f')} ms")
found_ms = {prefetch: run.value("exposed_communication") for prefetch, run in profiled.items()}
for prefetch, run in profiled.items():
    computing, messages = (checks.lane_bars(run, lane) for lane in ("compute", "communication"))
    shown = prediction_text(exposed_ms(computing, messages), ".0f")
    print(f"prefetch={prefetch}, exposed ms: {shown} by your function, {found_ms[prefetch]:.0f} by labkit's")

# %% tags=["claim"]
shards = [emulated_steps.FSDPUnit(size / RANKS) for size in UNITS]
steps_ms = [1e3 * emulated_steps.fsdp_step_s(device, RANKS, shards, prefetch=ahead) for ahead in (False, True)]
claim("90 ms, and 48", [round(each - 3 * 60) for each in steps_ms] == [90, 48], where=TOLD)
gather_ms = [1e3 * device.collective_s("all_gather", size / RANKS, RANKS) for size in UNITS]
claim("9, 12 and 9 ms", [round(each) for each in gather_ms] == [9, 12, 9], where=DIM == 128)
claim("without prefetching all is exposed", abs(found_ms[False] - 90) < 5, where=TOLD)
claim("with it close to 48 ms are", 45 < found_ms[True] < 60, where=TOLD)

# %% [markdown]
# **The forgotten block.** Somebody wrapped all blocks of another model but one, which a seed chose. The nine blocks
# stand at the positions 4 to 12 of the model, and the figures name them so. Training goes on as if nothing were wrong.

# %% tags=["nbval-ignore-output"]
toy = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "steps": 1}
toy |= {"emulate": labkit.Emulated(latency_us=3000 / (RANKS - 1), forward_ms=8), "timeline": True}  # 3 ms a gather
mystery, complete = (labkit.run("fsdp_wrap", forget=seed, **toy) for seed in (2026, None))
for what, run in {"all but one": mystery, "all wrapped": complete}.items():
    print(f"{what}: loss {run.value('loss'):.4f}, {run.value('peak_total_bytes') / 1e6:.2f} MB at the peak")
_ = plots.timeline(mystery, ranks=[0])

# %% tags=["claim"]
claim("the forgotten block costs memory", mystery.value("peak_total_bytes") > complete.value("peak_total_bytes"))
claim("the loss is the same", round(mystery.value("loss") / complete.value("loss"), 5) == 1)

# %% [markdown]
# The loss is the same, and the peak is higher, because the forgotten block is gathered with the root and stays whole
# until the backward pass is over. Look at the time line, and commit: which position was forgotten?

# %% tags=["commit"]
mine_forgotten = commit(position=None)
### BEGIN SOLUTION
mine_forgotten = commit(position=5)
### END SOLUTION

# %% [markdown]
# A count tells at once *that* a block is missing. If blocks are freed and nothing is frozen, the root is gathered once,
# each other unit twice, and each is reduced once, so all-gathers less reduce-scatters is the number of wrapped blocks.
# The next verdict is red, as it should be: it is about the run, not about you.

# %%
checks.every_block_wrapped(mystery, blocks=9)

# %%
gathered = set(mystery.frame.query("kind == 'bar' and phase == 'all_gather' and rank == 0")["name"])
forgotten = [place for place in range(4, 13) if f"net.{place}" not in gathered]
print(f"never gathered: {forgotten}; you said {prediction_text(mine_forgotten['position'])}")

# %% tags=["claim"]
bars = mystery.frame.query("kind == 'bar' and lane == 'compute' and rank == 0")
claim("no bar is named 5", forgotten == [5] and "net.5" not in set(bars["name"]))
longest_us = bars.query("name == 'root'").groupby("phase")["dur_us"].max()
claim("the root computes for a block's time", longest_us["forward"] > 6000 and longest_us["backward"] > 12_000)

# %% [markdown]
# No bar of either lane is named 5. The block computes between 4 and 6, but as a part of the root.
#
# *Takeaway: count all-gathers and reduce-scatters first, and then ask a time line which unit is missing or exposed.*
#
# ## 5. Fewer bytes: mixed precision ({minutes} minutes)
#
# With a `MixedPrecisionPolicy` the shards stay in float32, but parameters are gathered and used in bfloat16, of 2 bytes
# a number. In your own script each `fully_shard`, the root's too, gets it as `mp_policy=`. Its `param_dtype` is what is
# gathered and computed with, and `reduce_dtype` what gradients are added up in. That should be float32, because
# bfloat16 keeps 8 binary digits:

# %%
total = torch.tensor(0, dtype=torch.bfloat16)
for _ in range(1000):
    total += 1
print(f"a thousand ones, added up in bfloat16: {total:.0f}")

# %% [markdown]
# Commit to what a rank now hands to its calls in a step, and to what it keeps. As in lab 2, it hands its shard to an
# all-gather, and the whole row to a reduce-scatter. The three blocks have `PARAMETERS` parameters, and are freed and
# gathered again.

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
for name in mine_bytes:
    print(f"{name} in float32: {block.value(name):,.0f}")
halved = predicted | {"all_gather_bytes": predicted["all_gather_bytes"] // 2}
plots.comparison_table(bf16, halved, yours=mine_bytes)

# %% [markdown]
# *The all-gathers were handed half of the bytes, and the counts are unchanged. On the wire, a step sends (N − 1)/N of
# 1/2 + 1/2 + 1 times the parameters' float32 bytes instead of 1 + 1 + 1.*
#
# In the last row Adam's step counts come on top of two numbers a parameter: 4 bytes for each of the 12 tensors.

# %% tags=["claim"]
claim("a sum of ones stops at 256", total == 256)
claim("half of the bytes", 2 * bf16.value("all_gather_bytes") == block.value("all_gather_bytes"))
others = ("all_gather_count", "reduce_scatter_count", "reduce_scatter_bytes", "end_parameter_bytes")
claim("all else is unchanged", all(bf16.value(name) == block.value(name) for name in others))
counts_bytes = bf16.value("end_optstate_bytes") - 2 * bf16.value("end_parameter_bytes")
claim("4 bytes for each of the 12 tensors", counts_bytes == 4 * 12)

# %% [markdown]
# *Takeaway: gather in bfloat16, and reduce and keep in float32.*
#
# ## 6. Frozen parameters ({minutes} minutes)
#
# In fine-tuning, part of a model is often frozen, with `requires_grad_(False)`. A frozen unit has no gradients and no
# optimizer state. Of four blocks we freeze block 1, then the first two, 0 and 1, and then block 3 as well. Commit: how
# many all-gathers does a step take in the first case, and how many in the second?

# %% tags=["commit"]
mine_frozen = commit(block_1=None, blocks_0_and_1=None)
### BEGIN SOLUTION
mine_frozen = commit(block_1=8, blocks_0_and_1=7)
### END SOLUTION

# %%
cases = {"1": (1,), "0 and 1": (0, 1), "0, 1 and 3": (0, 1, 3)}
short = SETUP | {"layers": 4, "steps": 1}
frozen = {name: labkit.run("fsdp_matrix", freeze=blocks, **short) for name, blocks in cases.items()}
counts = {
    name: [int(run.value(f"{call}_count")) for call in ("all_gather", "reduce_scatter")] for name, run in frozen.items()
}
for name, (gathers_now, scatters) in counts.items():
    print(f"{name} frozen: {gathers_now} all-gathers, {scatters} reduce-scatters")
print("you predicted all-gathers:", ", ".join(prediction_text(each) for each in mine_frozen.values()))

# %% tags=["claim"]
claim("one gather is saved where 0 and 1 are frozen", [*counts.values()] == [[8, 3], [7, 2], [7, 1]])

# %% [markdown]
# Block 1 alone is gathered in both passes like the others, because the gradients of block 0 come through its weights.
# With the first two frozen, no gradient has to come through theirs, so six gathers would do. But in the backward pass
# FSDP2 asks ahead for the block that ran before, frozen or not: while block 2 computes, block 1 is gathered. Nothing
# uses it, and nothing frees it before the end of the backward pass. Block 0 is spared, because block 1 has no backward
# pass that could ask for it.
#
# *Takeaway: freezing saves gradients, their reduce-scatter and optimizer state. If the first k blocks are frozen, k − 1
# of them are gathered once instead of twice.*
#
# ## 7. HSDP: shard inside, replicate outside ({minutes} minutes)
#
# Inside a host the network is fast, between hosts it is slow. **Hybrid sharding** (HSDP) cuts the ranks into groups.
# Each group holds all parameters, sharded over its ranks, and gathers and reduces inside. Then each rank averages its
# shard's gradients with the ranks of the other groups that hold the same shard: one all-reduce for each unit, of a
# shard's size. In your own script that is `fully_shard` with a mesh of two axes. Two hosts of eight GPUs would be
# `init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))`.
#
# Now four ranks form two groups of two, and train five blocks. Commit, for one rank: the bytes that it hands to the
# all-reduces of a step, and those that it hands to the all-gathers.

# %% tags=["commit"]
five = theory.mlp_stack_layers("block", DIM, 5)
FIVE_BLOCKS = sum(layer.elements for layer in five)
print(f"FIVE_BLOCKS = {FIVE_BLOCKS:,} parameters, of 4 bytes each")
mine_hybrid = commit(all_reduce_bytes=None, all_gather_bytes=None)
### BEGIN SOLUTION
mine_hybrid = commit(all_reduce_bytes=4 * FIVE_BLOCKS / 2, all_gather_bytes=2 * 4 * FIVE_BLOCKS / 2)
### END SOLUTION

# %%
ways = {"one group of four": 4, "two groups of two": 2}
setup = SETUP | {"nproc": 4, "layers": 5, "steps": 2}
hsdp = {name: labkit.run("fsdp_matrix", wrap="block", hybrid=size, **setup) for name, size in ways.items()}
hybrid = hsdp["two groups of two"]
for name, run in hsdp.items():
    print(f"{name}: a rank keeps {run.value('end_parameter_bytes'):,.0f} bytes of parameters")
half = {"end_parameter_bytes": theory.resident_bytes(five, 2)["end_parameter_bytes"]}
yours = {"replicate/all_reduce_bytes": mine_hybrid["all_reduce_bytes"]}
yours |= {"data/all_gather_bytes": mine_hybrid["all_gather_bytes"]}
plots.comparison_table(hybrid, theory.hybrid_collectives(five, 2) | half, yours=yours)

# %% [markdown]
# *The names say along which axis of the mesh a call went; labkit calls the shard axis `data`. Along `replicate` there is
# one all-reduce for each of the five blocks.*
#
# The slow network carries one all-reduce of a shard for each unit, and no gathers. The price is memory, because a rank
# keeps half of the parameters instead of a quarter.

# %% tags=["claim"]
across = theory.hybrid_collectives(five, 2)["replicate/all_reduce_bytes"]
claim("along replicate, half of the parameters is handed over", hybrid.value("replicate/all_reduce_bytes") == across)
kept = [4 * FIVE_BLOCKS / run.value("end_parameter_bytes") for run in hsdp.values()]
claim("a quarter, and a half", kept == [4, 2])
claim("one all-reduce for each block", hybrid.value("replicate/all_reduce_count") == 5)

# %% [markdown]
# *Takeaway: HSDP keeps the gathers where the network is fast.*
#
# ## 8. Wrap a model yourself ({minutes} minutes)
#
# Now for your own `fully_shard` calls. Language models often use one matrix twice, to embed tokens and to predict them.
# Such weights are **tied**. If the two modules are in different units, FSDP2 refuses, and its error names the call that
# works.
#
# ### Exercise 4: shard a language model (••, {minutes} minutes)
#
# The model has an `embedding`, some `blocks`, a `norm`, and a `head` whose matrix is the embedding's. Shard it in place.
#
# - Neighbouring ranks form groups of `group`, and each group holds the whole model: HSDP.
# - Embedding and head make one unit, and each block makes another. The root has what is left.
# - Everything is gathered in bfloat16, and kept and reduced in float32.
#
# Your function runs on four CPU ranks, then on two, in groups of two. It is judged by what a rank keeps, by gradients,
# and by the calls and bytes of a step. Whatever it uses of this notebook is copied there.
#
# <details><summary>Hint 1</summary>
#
# Build the mesh first: how many groups are there? Its last axis is the one that shards.
#
# </details>
# <details><summary>Hint 2</summary>
#
# All calls get the same `mesh=` and `mp_policy=`, and the model itself comes last.
#
# </details>


# %%
def shard_model(model: nn.Module, group: int) -> None:
    ### BEGIN SOLUTION
    groups, names = dist.get_world_size() // group, ("replicate", "shard")
    mesh = init_device_mesh("cpu", (groups, group), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in ([model.embedding, model.head], *model.blocks):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    ### END SOLUTION


# %%
checks.shard_model(shard_model)

# %% [markdown]
# *Takeaway: modules that share a parameter share a unit, and every unit gets the same mesh and policy.*
#
# ## 9. How do I save a sharded model? ({minutes} minutes)
#
# No rank has the whole model. With `torch.distributed.checkpoint` each rank writes its part into one folder. Every
# tensor there knows its place in the whole, so any other number of ranks can load it. Two ranks train two steps, save,
# and train on.


# %%
def start_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> str:
    losses, samples = [], torch.arange(12.0).view(3, 4) / 10  # each rank has the same samples
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append((model(samples) - 1).square().mean())
        losses[-1].backward()
        optimizer.step()
    return " ".join(f"{loss:.5f}" for loss in losses)


folder = tempfile.TemporaryDirectory()
PLACE = folder.name  # on a cluster: a folder that all hosts see

# %%
# %%torchrun -n 2 --use start_training,train,PLACE --name saved
# saved is this run's name in later cells
dist.init_process_group("gloo")
model, optimizer = start_training(seed=0)
train(model, optimizer, steps=2)
model_state, optimizer_state = states.get_state_dict(model, optimizer)
checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=PLACE)
print("two ranks train on:", train(model, optimizer, steps=3))
dist.destroy_process_group()

# %% [markdown]
# Three ranks, whose model begins with other values, now load the parts: once the model's alone, and once Adam's state as
# well. Commit: without Adam's state, which of the three losses is the first to differ, the first, second or third?

# %% tags=["commit"]
mine_load = commit(first_to_differ=None)
### BEGIN SOLUTION
mine_load = commit(first_to_differ=2)
### END SOLUTION

# %%
# %%torchrun -n 3 --use start_training,train,PLACE --name resumed
dist.init_process_group("gloo")
for parts in ("the model", "the model and Adam"):
    model, optimizer = start_training(seed=1)
    state = {"model": states.get_model_state_dict(model)}
    if "Adam" in parts:  # which has not stepped yet: this makes its state, for load to fill
        state["optimizer"] = states.get_optimizer_state_dict(model, optimizer)
    checkpoint.load(state, checkpoint_id=PLACE)  # fills the tensors in place
    states.set_model_state_dict(model, state["model"])
    if "Adam" in parts:
        states.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    print(f"three ranks, with {parts}:", train(model, optimizer, steps=3))
dist.destroy_process_group()

# %%
folder.cleanup()
(two,) = (line.split()[-3:] for line in saved.ranks[0].log().splitlines() if "train on" in line)
alone, both = (line.split()[-3:] for line in resumed.ranks[0].log().splitlines() if "three ranks" in line)
first = 1 + [a == b for a, b in zip(alone, two, strict=True)].index(False)
print(f"without Adam's state loss {first} is the first to differ; you: {prediction_text(mine_load['first_to_differ'])}")

# %% tags=["claim"]
claim("three ranks have the losses of two", both == two)
claim(
    "the second one differs, and the wrong losses fall faster",
    first == 2 and all(a < b for a, b in zip(alone[1:], two[1:], strict=True)),
)

# %% [markdown]
# With Adam's state, three ranks have the losses of two. Without it the first loss is right, because it depends on the
# parameters alone, and the second one differs. No error says so, and here the wrong losses even fall faster: compare
# them with those of a run that was never stopped.
#
# *Takeaway: let each rank write its part, and load model and optimizer on any number of ranks.*
#
# ## 10. Experts ({minutes} minutes)
#
# In a mixture of experts, each rank owns an expert of its own, which here sees its own rank's samples only. The shared
# part is trained by all ranks together. Each rank's loss is the mean over its own samples, of which all ranks have
# equally many. One device that held all experts would take the mean over all samples of all ranks.
#
# <details><summary>How experts are used in large models</summary>
#
# With **expert parallelism** a router chooses an expert for each token, and an all-to-all carries the tokens to its
# rank and back. Then an expert sees samples of all ranks.
#
# </details>
#
# ### Exercise 5: the gradients of one device (•, {minutes} minutes)
#
# After this rank's backward pass each parameter has a gradient. Turn it into the one that the single device would have.
# `experts` are this rank's own parameters, of which nothing may be sent, and `ranks` is the number of ranks. `dist.all_reduce(tensor)` adds a tensor
# up over all ranks, in place. Your function runs on two real ranks, then on three.
#
# <details><summary>Hint 1</summary>
#
# How much does a sample weigh in its rank's loss, and how much in the single device's?
#
# </details>
# <details><summary>Hint 2</summary>
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
# Each sample weighs N times as much in its rank's loss as in the single device's. Averaging makes up for that in the
# shared part. An expert's gradients are not averaged, because that would mix unrelated weights, but they are divided by
# N all the same. "Nothing to average, so leave it alone" is a known trap: pytorch/pytorch#160285 and #167178.
#
# With FSDP2, by its documentation, you shard the expert over a mesh of one rank, its own, and
# `expert.set_gradient_divide_factor(ranks)` divides its gradient. That has not been tried here: compare it with one
# device on your GPUs.
#
# *Takeaway: average what all ranks train, and only scale what one rank owns.*
#
# ## 11. Take away ({minutes} minutes)
#
# 1. A ledger of what is allocated and freed predicts the peak before anything runs. A whole one has activations in it,
#    and the copies that the backend makes.
# 2. Counts of collectives tell what is wrapped, and a time line tells which unit is missing or exposed.
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
# <details><summary>2. HSDP on two hosts of 8: how much does a rank hold, compared with FSDP over 16?</summary>
#
# Twice as much, an eighth instead of a sixteenth.
#
# </details>
# <details><summary>3. Blocks are kept and gathered in bfloat16. What does a step send, compared with DDP's 1 + 1?</summary>
#
# 1/2 + 1, so it sends less than DDP.
#
# </details>
# <details><summary>4. All gradients are NaN on both sides. What does your test of section 3 say?</summary>
#
# False: a NaN agrees with nothing, not even with another NaN.
#
# </details>
#
# <details><summary>From FSDP1 to FSDP2, and on GPUs</summary>
#
# The older API wraps the model in a new module and flattens each unit's parameters into one. The newer one changes the
# model in place, and each parameter becomes a `DTensor`, `Shard(0)`. New code should use the newer.
#
# ```diff
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
# `labkit.run` takes GPUs by itself where there are enough. The cells that begin with `%%torchrun`, and `start_training`,
# name `gloo` and `cpu`: write `nccl` and `cuda`, and set each rank's device. Neither has been verified on GPUs yet.
#
# Saving: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
#
# </details>
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("fsdp_at_work")
