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
# be read in any order, but for section 8, which needs 4, 5 and 7.

# %% tags=["nbval-ignore-output"]
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
# block is a unit, and the root owns no parameters. We try both ways with eight blocks on four ranks. Three wide blocks
# have 0.53 MB of parameters each, and five narrow ones 0.40 MB, together 3.56 MB. If they are freed, two are whole at
# the peak: a wide one, which computes its backward pass, and a narrow one, gathered ahead. Commit: how many MB does the
# peak grow if all blocks are kept?

# %% tags=["commit"]
mine_kept = commit(more_mb=None)
### BEGIN SOLUTION
mine_kept = commit(more_mb=3.56 - 0.53 - 0.40)
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
sizes_mb = [whole / 1e6 for _, whole in theory.unit_bytes(theory.mlp_stack_layers("block", DIM, 8), 4).values()]
wide_mb, narrow_mb = max(sizes_mb), min(sizes_mb)
claim("three are wide, and five narrow", (sizes_mb.count(wide_mb), sizes_mb.count(narrow_mb)) == (3, 5))
rounded = [round(size, 2) for size in (wide_mb, narrow_mb, sum(sizes_mb))]
claim("0.53 and 0.40 MB, together 3.56", rounded == [0.53, 0.4, 3.56], where=DIM == 128)
claim("keeping costs 2.63 MB", round(more_mb, 2) == 2.63, where=(DIM, BATCH) == (128, 32))
others_mb = sum(sizes_mb) - wide_mb - narrow_mb
claim("it costs all but two blocks", abs(more_mb / others_mb - 1) < 0.01, where=(DIM, BATCH) == (128, 32))

# %% [markdown]
# Keeping saves half of the all-gathers, and costs the parameters of the other six blocks, 2.63 MB. Section 4 measures
# what it saves in time.
#
# The explorer draws a step event by event: what a rank of two holds, and what it sends. Dashed outlines are predictions,
# and the areas below them have the legend's colours, but paler. The dotted line is a device's memory, a budget of 5 MB,
# and the peak is 1 MB above it. Recomputed activations lower it, and so does making each layer a unit. Does one of
# them get below 5 MB, or does it take both? Try before you open the answer.

# %%
widgets.WrappingExplorer()

# %% tags=["claim"]
need = {
    (wrap, again): theory.fsdp_step_peak(theory.mlp_stack_layers(wrap, 128), 256, 2, checkpointing=again)["total"]
    for wrap in ("block", "layer")
    for again in (False, True)
}
claim("the four peaks", [round(each / 1e6, 2) for each in need.values()] == [5.98, 5.59, 5.26, 4.86])

# %% [markdown]
# <details><summary>Answer</summary>
#
# It takes both. Blocks need 5.98 MB, and 5.59 if activations are recomputed; layers need 5.26 MB, and 4.86 if they are.
#
# </details>
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
# | after the reduce-scatter | the row and its copy are freed |
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
# Now measured: the program's `fsdp="yours"` takes a small FSDP like lab 2's in the place of PyTorch's, here labkit's
# own answer to lab 2. One sample keeps activations small, and PyTorch's `MemTracker` follows every tensor of the step.

# %% tags=["nbval-ignore-output"]
small = labkit.run("fsdp_wrap", fsdp="yours", **SETUP | {"batch": 1})
of_ledger = {"peak_total_bytes": theory.small_fsdp_peak_bytes(UNITS, RANKS)}
mine_peak = {"peak_total_bytes": peak_bytes(UNITS, RANKS)}
plots.comparison_table(small, of_ledger, yours=mine_peak, tolerance=0.01)

# %% tags=["claim"]
excess = small.value("peak_total_bytes") / theory.small_fsdp_peak_bytes(UNITS, RANKS) - 1
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
claim("the third one's row is kept", ledger.peak["reduce_scatter"] == UNITS[2], where=TOLD)
whole_mb = block.value("peak_total_bytes") / 1e6
claim("5.98 MB", round(whole_mb, 2) == 5.98, where=TOLD)
claim("this ledger is within 1 %", abs(1e6 * whole_mb / ledger.peak["total"] - 1) < 0.01, where=TOLD)
many = {size: theory.step_ledger(layers, 8 * size, RANKS).peak["unsharded_parameter"] for size in (1, 32, 128)}
claim("with 128 sequences it is the last block", [*many.values()] == [UNITS[1], UNITS[1], UNITS[2]], where=TOLD)

# %% [markdown]
# So the peak of 5.98 MB lies in the middle of the second block's backward pass. With 128 sequences the ledger has it in
# the last block's, which begins while all activations are still held.
#
# <details><summary>How the rows tell</summary>
#
# The gathered parameters, 526,848 bytes, are those of the second block, and an all-gather's buffer holds the first one,
# gathered ahead. The reduce-scatter's buffer, 395,264 bytes, is the row of the third block's gradients, which FSDP2
# keeps until the next reduce-scatter begins. The temporary 1,311,232 bytes are 2 × 524,288 + 262,656: the gradients
# behind and before the block's inner ReLU, as wide as the widest layer, and that of the weight behind the ReLU, with
# its bias.
#
# </details>
#
# *Takeaway: where the peak lies depends on units and samples, and a ledger tells before anything runs.*
#
# ## 3. A test that can fail ({minutes} minutes)
#
# ### Exercise 2: compare gradients (•, {minutes} minutes)
#
# In lab 2 gradients twice too large left no trace in the losses. Write the test that would have caught it. `mine` and
# `reference` are gradients by name, dicts of tensors. Rounding may move each by at most 1e-5 of the largest absolute
# value of its reference. No tensor is None or empty. What else must make the test return False?
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
# for. Commit: how many of the 90 ms are exposed then? And how many if the blocks are also kept, as in section 1?

# %% tags=["commit"]
mine_exposed = commit(prefetched_ms=None, kept_too_ms=None)
### BEGIN SOLUTION
mine_exposed = commit(prefetched_ms=9 + 9 + 30, kept_too_ms=9 + 30)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
gathers_s = 0.030  # of all three blocks; a rank sends its half
device = labkit.Emulated(gb_per_s=sum(UNITS) / RANKS * (RANKS - 1) / gathers_s / 1e9, forward_ms=20)
profiled = {}
for kept in (False, True):
    for ahead in (False, True):
        name = ("kept" if kept else "freed") + (", prefetched" if ahead else "")
        how = {"prefetch": ahead, "reshard_after_forward": not kept, "emulate": device, "timeline": True}
        profiled[name] = labkit.run("fsdp_wrap", **how, **SETUP | {"steps": 1})
for name in ("freed", "freed, prefetched"):
    _ = plots.timeline(profiled[name], ranks=[0])

# %% [markdown]
# *Blocks are freed, without prefetching and with it; the numbers are those of the blocks. Exposed time is underlined.
# With prefetching four all-gathers hide behind computing.*

# %% tags=["nbval-ignore-output"]
found_ms = {name: run.value("exposed_communication") for name, run in profiled.items()}
for name, exposed in found_ms.items():
    print(f"{name}: {exposed:.0f} ms exposed")
print("with prefetching, you predicted", ", ".join(prediction_text(each, ".0f") for each in mine_exposed.values()))

# %% tags=["claim"]
shards = [emulated_steps.FSDPUnit(size / RANKS) for size in UNITS]
steps_ms = [1e3 * emulated_steps.fsdp_step_s(device, RANKS, shards, prefetch=ahead) for ahead in (False, True)]
claim("90 ms, and 48", [round(each - 3 * 60) for each in steps_ms] == [90, 48], where=TOLD)
gather_ms = [1e3 * device.collective_s("all_gather", size / RANKS, RANKS) for size in UNITS]
claim("9, 12 and 9 ms", [round(each) for each in gather_ms] == [9, 12, 9], where=DIM == 128)
claim("without prefetching all is exposed", abs(found_ms["freed"] - 90) < 5, where=TOLD)
claim("with it close to 48 ms are", 45 < found_ms["freed, prefetched"] < 60, where=TOLD)
saved_ms = [found_ms["freed" + ahead] - found_ms["kept" + ahead] for ahead in ("", ", prefetched")]
claim("keeping saves close to 30 ms, or 9", abs(saved_ms[0] - 30) < 5 and abs(saved_ms[1] - 9) < 5, where=TOLD)
drawn = profiled["freed"].frame.query("kind == 'bar' and lane == 'compute' and rank == 0 and name != 'root'")
longest_ms = drawn.groupby("phase")["dur_us"].max() / 1e3
claim("bars are some ms longer", 20 < longest_ms["forward"] < 32 and 40 < longest_ms["backward"] < 55, where=TOLD)

# %% [markdown]
# The first gather of each pass has nothing to hide behind, and with gloo `fully_shard` waits for each reduce-scatter:
# 9 + 9 + 30 ms. Keeping spares the backward pass its gathers. It saves 30 ms where they are exposed, and 9 ms where most
# of them hide. The blocks' bars are some ms longer than 20 and 40, because the CPU's own work comes on top. The raw
# traces are in the folder of the run, and ui.perfetto.dev opens them.
#
# **The forgotten block.** Another model is an `nn.Sequential` of linear layers, 256 wide. Nine of them, at the positions
# 4 to 12, are its blocks, and the figures name them so. Somebody wrapped all blocks but one, which a seed chose, and
# training goes on as if nothing were wrong.

# %% tags=["nbval-ignore-output"]
toy = {"nproc": RANKS, "model": "toy", "hidden": 256, "narrow": 256, "steps": 1}
toy |= {"emulate": labkit.Emulated(latency_us=2000 / (RANKS - 1), forward_ms=12), "timeline": True}  # 2 ms a gather
mystery, complete = (labkit.run("fsdp_wrap", forget=seed, **toy) for seed in (2026, None))
for what, run in {"all but one": mystery, "all wrapped": complete}.items():
    print(f"{what}: loss {run.value('loss'):.4f}, {run.value('peak_total_bytes') / 1e6:.2f} MB at the peak")
_ = plots.timeline(mystery, ranks=[0])

# %% tags=["claim"]
claim("the forgotten block costs memory", mystery.value("peak_total_bytes") > complete.value("peak_total_bytes"))
claim("the loss is the same", round(mystery.value("loss") / complete.value("loss"), 5) == 1)

# %% [markdown]
# The loss is the same, and the peak is higher, because the forgotten block is gathered with the root and stays whole
# until the backward pass is over. In the lower lane each all-gather has its block's number above or below it, and
# reduce-scatters have none. Commit: which position was forgotten?

# %% tags=["commit"]
mine_forgotten = commit(position=None)
### BEGIN SOLUTION
mine_forgotten = commit(position=5)
### END SOLUTION

# %% [markdown]
# A count tells at once *that* a block is missing. If units are freed and nothing is frozen, the root is gathered once,
# each other unit twice, and each is reduced once. So all-gathers less reduce-scatters is the number of units beside the
# root, here of wrapped blocks. The next verdict is red, as it should be: it is about the run, not about you.

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
claim("the root computes for a block's time", longest_us["forward"] > 9000 and longest_us["backward"] > 18_000)

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
# bfloat16 keeps 8 binary digits.
#
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
# optimizer state. Of four blocks we freeze block 1, then the first two, 0 and 1, and then block 2 as well. Commit: how
# many all-gathers does a step take in the first case, and how many in the second? The program `fsdp_matrix` is
# `fsdp_wrap` with more options.

# %% tags=["commit"]
mine_frozen = commit(block_1=None, blocks_0_and_1=None)
### BEGIN SOLUTION
mine_frozen = commit(block_1=8, blocks_0_and_1=7)
### END SOLUTION

# %%
cases = {"1": (1,), "0 and 1": (0, 1), "0, 1 and 2": (0, 1, 2)}
short = SETUP | {"layers": 4, "steps": 1}
frozen = {name: labkit.run("fsdp_matrix", freeze=blocks, **short) for name, blocks in cases.items()}
counts = {
    name: [int(run.value(f"{call}_count")) for call in ("all_gather", "reduce_scatter")] for name, run in frozen.items()
}
for name, (gathers_now, scatters) in counts.items():
    kept_mb = frozen[name].value("end_optstate_bytes") / 1e6
    print(f"{name} frozen: {gathers_now} all-gathers, {scatters} reduce-scatters, {kept_mb:.2f} MB of optimizer state")
print("you predicted all-gathers:", ", ".join(prediction_text(each) for each in mine_frozen.values()))

# %% tags=["claim"]
claim("k - 1 gathers are saved", [*counts.values()] == [[8, 3], [7, 2], [6, 1]])

# %% [markdown]
# Block 1 alone is gathered in both passes like the others, because the gradients of block 0 come through its weights.
# With the first two frozen, no gradient has to come through theirs, so six gathers would do. But in the backward pass
# FSDP2 asks ahead for the block that ran before, frozen or not: while block 2 computes, block 1 is gathered, and nothing
# uses it. Block 0 is spared, because block 1 has no backward pass that could ask for it.
#
# *Takeaway: freezing saves gradients, their reduce-scatter and optimizer state. If the first k blocks are frozen, k − 1
# of them are gathered once instead of twice.*
#
# ## 7. HSDP: shard inside, replicate outside ({minutes} minutes)
#
# Inside a host the network is fast, between hosts it is slow. **Hybrid sharding** (HSDP) cuts the ranks into groups.
# Each group holds all parameters, sharded over its ranks, and gathers and reduces inside. Then each rank averages its
# shard's gradients with the ranks of the other groups that hold the same shard: one all-reduce for each unit, of a
# shard's size. In your own script that is `fully_shard` with a mesh of two axes. Two
# hosts of eight GPUs would be `init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "data"))`.
#
# Now four ranks stand for two hosts of two, and train five blocks, first as one group, then as a group in each host. The
# network is emulated: between hosts a rank has a ninth of the bandwidth inside. Commit, for one rank of two groups: the
# bytes that it hands to the all-reduces of a step, and those that it hands to the all-gathers.

# %% tags=["commit"]
five = theory.mlp_stack_layers("block", DIM, 5)
FIVE_BLOCKS = 4 * sum(layer.elements for layer in five)
print(f"FIVE_BLOCKS = {FIVE_BLOCKS:,} bytes of parameters")
mine_hybrid = commit(all_reduce_bytes=None, all_gather_bytes=None)
### BEGIN SOLUTION
mine_hybrid = commit(all_reduce_bytes=FIVE_BLOCKS / 2, all_gather_bytes=2 * FIVE_BLOCKS / 2)
### END SOLUTION

# %%
hosts = labkit.Emulated(gb_per_s=0.063, between_gb_per_s=0.007, ranks_per_host=2, forward_ms=5)
ways = {"one group of four": 4, "two groups of two": 2}
setup = SETUP | {"nproc": 4, "layers": 5, "steps": 2, "emulate": hosts}
hsdp = {name: labkit.run("fsdp_matrix", wrap="block", hybrid=size, **setup) for name, size in ways.items()}
hybrid = hsdp["two groups of two"]
half = {"end_parameter_bytes": theory.resident_bytes(five, 2)["end_parameter_bytes"]}
yours = {"replicate/all_reduce_bytes": mine_hybrid["all_reduce_bytes"]}
yours |= {"data/all_gather_bytes": mine_hybrid["all_gather_bytes"]}
plots.comparison_table(hybrid, theory.hybrid_collectives(five, 2) | half, yours=yours)

# %% tags=["nbval-ignore-output"]
whole, part = FIVE_BLOCKS, FIVE_BLOCKS / 2
between = {"one group of four": 3 * hosts.collective_s("reduce_scatter", whole, 4, hosts=2)}
between["two groups of two"] = hosts.collective_s("all_reduce", part, 2, hosts=2)
inside = {"one group of four": 0.0, "two groups of two": 3 * hosts.collective_s("reduce_scatter", whole, 2)}
for name, run in hsdp.items():
    kept_mb, took = run.value("end_parameter_bytes") / 1e6, run.value("step_ms")
    predicted_ms = 5 * (5 + 10) + 1e3 * (between[name] + inside[name])
    print(f"{name}: {kept_mb:.2f} MB of parameters, a step in {took:.0f} ms, by theory {predicted_ms:.0f}")

# %% [markdown]
# *Calls are named by the axis along which they went.*
#
# The slow network carries one all-reduce of a shard for each unit, and no gathers, which makes the step shorter. Four
# real ranks take longer than theory. The price is memory: half of the parameters, their gradients and Adam's numbers
# instead of a quarter.

# %% tags=["claim"]
across = theory.hybrid_collectives(five, 2)["replicate/all_reduce_bytes"]
claim("along replicate, half of the parameters is handed over", hybrid.value("replicate/all_reduce_bytes") == across)
parts = [FIVE_BLOCKS / run.value("end_parameter_bytes") for run in hsdp.values()]
claim("a quarter, and a half", parts == [4, 2], where=DIM % 4 == 0)
claim("one all-reduce for each block", hybrid.value("replicate/all_reduce_count") == 5)
hsdp_ms = [run.value("step_ms") for run in hsdp.values()]
claim("the step is shorter with HSDP", hsdp_ms[1] < 0.9 * hsdp_ms[0], where=DIM == 128)

# %% [markdown]
# *Takeaway: HSDP keeps gathers on the fast network, for more memory.*
#
# ## 8. Wrap a model yourself ({minutes} minutes)
#
# Now for your own `fully_shard` calls. Language models often use one matrix twice, to embed tokens and to predict them.
# Such weights are **tied**. Here the two modules become two units, and then one, because `fully_shard` also takes a
# list. `--use` hands names of this notebook to the ranks.

# %%
# %%torchrun -n 2 --use fully_shard,init_device_mesh,DTensor --name tied
# tied is this run's name in later cells
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for one_unit in (False, True):
    embedding, middle, head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, middle, head)
    for unit in ([embedding, head],) if one_unit else (embedding, head):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    middle.register_forward_hook(
        lambda *_, e=embedding: print("whole in the middle:", not isinstance(e.weight, DTensor))
    )
    try:
        with torch.no_grad():
            model(torch.arange(12))
    except ValueError as error:
        print(error)
dist.destroy_process_group()

# %% [markdown]
# Two units are refused in the first forward pass, and the error names the call that works. That call has a price: the
# unit is gathered for the embedding and stays whole until the head has run, while all blocks in between compute.
#
# ### Exercise 3: shard a language model (••, {minutes} minutes)
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
# All calls get the same `mesh=` and `mp_policy=`. The pair comes as a list, `[model.embedding, model.head]`, and the
# model itself last.
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
# Now try section 4's rule on it, with PyTorch's own counter. The model has three blocks.

# %%
# %%torchrun -n 2 --use shard_model --name counted
import warnings

from torch.distributed.tensor.debug import CommDebugMode

from labkit_course.checks.ranks.fsdp import SmallLanguageModel

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
model = SmallLanguageModel()
shard_model(model, 2)
with CommDebugMode() as calls:
    model(torch.arange(12)[None]).float().mean().backward()
made = {str(call): count for call, count in calls.get_comm_counts().items()}
gathers, scatters = (sum(made[call] for call in made if kind in call) for kind in ("gather", "reduce_scatter"))
print(f"{gathers} all-gathers less {scatters} reduce-scatters: {gathers - scatters} units beside the root")
dist.destroy_process_group()

# %% tags=["claim"]
said = tied.ranks[0].log()
claim("the error names the list, and the unit stays whole", "fully_shard([module_a" in said and "middle: True" in said)
paired = ("9 all-gathers less 5 reduce-scatters: 4", "0 all-gathers less 0")  # of nothing, while the answer is empty
claim("blocks and the pair", any(each in counted.ranks[0].log() for each in paired))

# %% [markdown]
# Four, and nothing is wrong: three blocks, and the pair. So compare the difference with the units that you meant to
# make, not with the blocks.
#
# *Takeaway: modules that share a parameter share a unit, which is whole as long as any of them needs it.*
#
# ## 9. How do I save a sharded model? ({minutes} minutes)
#
# No rank has the whole model. With `torch.distributed.checkpoint` each rank writes its part into one folder. Every
# tensor there knows its place in the whole, so any other number of ranks can load it.
#
# ### Exercise 4: save and load (••, {minutes} minutes)
#
# Write both functions. Two ranks train, call `save_training`, and end. Then two ranks, and three, call `load_training`
# with a model of other values and an Adam that has not stepped yet, and must train on with the losses of a training
# that was never stopped. The calls are:
#
# - `states.get_state_dict(model, optimizer)` returns two dicts, whose tensors are this rank's shards;
# - `checkpoint.save(state, checkpoint_id=folder)` writes a dict, which may hold dicts;
# - `checkpoint.load(state, checkpoint_id=folder)` fills the tensors of such a dict in place;
# - `states.set_state_dict(model, optimizer, model_state_dict=…, optim_state_dict=…)` hands them back.
#
# <details><summary>Hint 1</summary>
#
# A load fills what is there, under the names with which it was saved. A new Adam's own `state_dict()` holds nothing to
# fill, but `get_state_dict` makes its state first.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Save `{"model": …, "optimizer": …}`. To load, build the same dict from the new model and optimizer, fill it, and set
# it.
#
# </details>


# %%
def save_training(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    ### BEGIN SOLUTION
    weights, updates = states.get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": updates}, checkpoint_id=folder)
    ### END SOLUTION


def load_training(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    ### BEGIN SOLUTION
    weights, updates = states.get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": updates}, checkpoint_id=folder)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)
    ### END SOLUTION


# %%
checks.saved_training(save_training, load_training)

# %% [markdown]
# *Takeaway: let each rank write its part, and load model and optimizer: without Adam's state nothing fails aloud.*
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
# `experts` are this rank's own parameters, of which nothing may be sent, and `ranks` is the number of ranks.
# `dist.all_reduce(tensor)` adds a tensor up over all ranks, in place. Your function runs on two real ranks, then on
# three.
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
# 3. Each call of `fully_shard` may choose its own precision, and whether its unit is kept between the passes.
#
# | if | then |
# |---|---|
# | the network between hosts is slow | shard inside a host, and replicate outside (HSDP) |
# | all-gathers bind | gather in bfloat16, or keep parameters between the passes |
# | nothing is kept or frozen, and all-gathers less reduce-scatters is not the number of units beside the root that you meant | somebody forgot to wrap one, or wrapped too much |
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
# `labkit.run` takes GPUs by itself where there are enough. The cells that begin with `%%torchrun` name `gloo` and
# `cpu`: write `nccl` and `cuda`, and set each rank's device. Neither has been verified on GPUs yet.
#
# Saving: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
#
# </details>
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("fsdp_at_work")
