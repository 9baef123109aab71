# %% [markdown]
# # Lab 3. All-gather extensions: change what FSDP sends
#
# With FSDP every parameter crosses the wire twice in each step, if it is resharded in between. FSDP2 asks each
# parameter what it wants to send, and what to make of the bytes that arrive. In this lab you answer both questions.
# After it you can
#
# - write FSDP2's two hooks on a plain tensor, and train a real network whose gathers send a quarter;
# - find two faults of a hook that raise no error;
# - say what fewer bytes cost in error and in peak memory, and decode without that memory;
# - predict on which wire they save time, and on which they lose it.
#
# You need lab 2's words: unit, all-gather, reduce-scatter, resharding. The lab takes about {core_minutes} minutes and
# needs no GPU.

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from matplotlib import pyplot

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.tensors import EXTENSIONS, add_codec_hooks, pad_rows, refill
from labkit.theory import extensions as theory
from labkit_course import gather_costs, hook_costs
from labkit_course.checks import extensions as checks
from labkit_course.checks.claims import claim, commit, prediction_text
from labkit_course.gather_costs import quietly

doctor.show(lab="3")

# %% [markdown]
# You may change these parameters. The network looks at tiles of a photo, 16 × 16 pixels, and says from which of ten
# regions each was cut. Its four units are a linear layer, two multilayer perceptrons (MLPs) of inner width 4 × `DIM`,
# and a linear layer, all without bias.

# %% tags=["parameters"] small={"BATCH": 8, "STEPS": 20} points=[[2,128,1,20],[3,200,16,25],[8,256,80,30]]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 64  # tiles of a rank in a step
STEPS: int = 60  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nothing to gather, and more than 8 take minutes")
require("DIM", DIM, at_least=128, because="with shorter rows int8's scales weigh more than this lab says")
require("BATCH", BATCH, at_least=1, because="a step needs a tile")
require(
    "STEPS", STEPS, at_least=20, because="the last ten losses are compared, after the network has learned something"
)
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
SHORT = SETUP | {"steps": 2}
TOLD = (RANKS, DIM, BATCH, STEPS) == (2, 128, 64, 60)  # the values that the text speaks of
SHAPES = [(DIM, 768), *[(4 * DIM, DIM), (DIM, 4 * DIM)] * 2, (10, DIM)]

# %% [markdown]
# ## 1. Why fewer bytes? ({minutes} minutes)
#
# Take a model of 7 billion parameters, sharded over two hosts of eight H100s. In bfloat16 the parameters are 14 GB, and
# to gather them in a ring of 16 GPUs, 15/16 of that leave each host. Over a single network card of 50 GB/s the two
# gathers of a step take 0.53 s, and over the eight cards of lab 0's reference cluster an eighth. With too little
# arithmetic to hide that, the GPUs wait, unless you send fewer bytes:
#
# ```
# float32 rows --encode--> 8 bits a number --all-gather--> all rows, 8 bits --decode--> parameter --compute--> freed
#      ^
#      Adam updates these, which are never rounded
# ```
#
# Others do the same: FSDP2's `MixedPrecisionPolicy` sends bfloat16, torchao float8, through this lab's hooks in a
# tensor subclass, and ZeRO++ in DeepSpeed int8.
#
# Why may a gathered parameter be rounded at all? The optimizer's small updates need float32, because in bfloat16 many
# of them vanish:

# %%
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight += 1e-3
    print(f"1 + 1000 × 0.001 in {str(dtype).removeprefix('torch.')}: {weight:.3f}")

# %% tags=["claim"]
two_gathers_s = {size: 2 * size * 7e9 * 15 / 16 / 50e9 for size in (1, 2)}
claim("two gathers take 0.53 s in bfloat16", round(two_gathers_s[2], 2) == 0.53 and two_gathers_s[1] < 0.27)

# %% [markdown]
# With FSDP the updates happen in the shard, which stays in float32. The gathered copy is only computed with: gradients
# are taken at rounded weights, and go to the exact ones. Errors of the weights do not add up, because each step rounds
# the exact shard again.
#
# Then why hooks, if a policy halves the bytes? A policy has one dtype for parameters, sent and computed with. So it
# cannot send bfloat16 and compute in float32, nor int8, which is of no use without its scales.
#
# *Takeaway: a gathered parameter may be rounded because it is only a copy, and if bfloat16 is enough, a policy does
# it.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# FSDP2 looks for two functions on the **local tensor** of each sharded parameter: this rank's rows, in its attribute
# `_local_tensor`. These hooks send it as it is. Their `mesh` is the group of ranks that share the parameter.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sent = []


def send_as_it_is(shard):
    def pre_all_gather(mesh):
        sent.append(shard.shape)
        return (shard,), None  # the tensors to send, and a note that comes back below: here, nothing

    def post_all_gather(gathered, note, dtype, *, out=None):
        if out is None:
            return gathered[0], (gathered[0],)  # the parameter, and what to free after use

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather


dist.init_process_group("gloo")  # "nccl" on GPUs
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
for unit in (model[0], model[2], model):
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))  # "cuda" on GPUs
for weight in model.parameters():
    send_as_it_is(weight._local_tensor)  # before the first forward pass
model(torch.ones(8, 64)).square().mean().backward()
gradient = model[0].weight.grad
print(f"{len(sent)} gathers went through hooks")
print(f"of the gradient {tuple(gradient.shape)} this rank holds {tuple(gradient.to_local().shape)}")
dist.destroy_process_group()

# %% [markdown]
# Two matrices are gathered in two passes, which makes four gathers. The gradient is a DTensor: it tells the whole
# shape, and holds this rank's rows. The hooks answer two questions.
#
# 1. **`fsdp_pre_all_gather`**: which tensors shall FSDP send of this shard? FSDP gathers each of them from all ranks.
# 2. **`fsdp_post_all_gather`**: here are the same tensors with the rows of all ranks, so what is the parameter, in the
#    `dtype` of the computation? At the first gather `out` is None, and the hook returns the parameter and a tuple of
#    the tensors whose memory holds it, which FSDP frees after use. At every later gather `out` is this first
#    parameter. FSDP has allocated its memory again, without its numbers, and the hook has to fill it.
#
# With int8 this parameter has memory of its own:

# %%
_ = plots.hook_memory("int8")

# %% [markdown]
# *A drawing: who holds what in a gather of int8. At a later gather the decoded rows are a copy,
# `whole`, beside `out` until the hook returns.*
#
# `out` must be the same object because autograd keeps the parameter of the forward pass for the backward pass. The
# hooks of the script fill nothing: their parameter *is* the gathered tensor, into which FSDP gathers again.
#
# FSDP2 cuts a parameter by rows, and every rank has to send equally many bytes. Where the rows do not divide, last
# shards are shorter or empty, and `pad_rows(shard, rows)` adds rows of zeros. The hook returns the first parameter with this
# padding, FSDP2 cuts the padding off, and every later `out` comes without it. `refill(out, whole)` therefore copies as
# many rows as `out` has, and hides that from autograd, which would refuse a saved tensor that has changed.
#
# <details><summary>Is an attribute on <code>_local_tensor</code> supported?</summary>
#
# The two hooks are FSDP2's interface for tensor subclasses. That FSDP2 also finds them on a plain tensor is how it is
# written (2.11 to 2.13), not a promise. `load_state_dict` copies into the shard, and they stay. With `assign=True`, or
# after `to_empty`, another tensor takes its place, and they are gone without an error: FSDP sends float32 again. A
# subclass keeps them, see 03b.
#
# </details>
#
# *Takeaway: two functions on a shard decide what travels and what computes.*
#
# ## 3. Build it: a quarter of the bytes ({minutes} minutes)
#
# First you write what travels: **encode** turns this rank's rows into the tensors to send, and **decode** turns the
# tensors that arrived into the parameter. To send bfloat16, for example, encode returns `(shard.bfloat16(),)`, and
# decode returns `gathered[0].to(dtype)`.
#
# ### Exercise 1: a quarter of the bytes (•, {minutes} minutes)
#
# Send `torch.int8`, whole numbers from −128 to 127, and for each row its **scale**, the float32 number by which the row
# was divided so that its largest weight just fits. The check has a parameter of tiny weights, one with a row of zeros,
# and one whose first half of rows is three times as large as the second. The ranks' tensors arrive joined along their
# first dimension, so return the scales as `[rows, 1]`.
#
# <details><summary>Hint 1</summary>
#
# Divide `shard.abs().amax(dim=1, keepdim=True)` by the largest number of the type. A row of zeros has the scale 0, and
# `clamp(min=1e-30)` lets you divide by it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(shard / scales).round().to(torch.int8)`. To decode, go to float32 first, then multiply, then cast to `dtype`.
#
# </details>


# %%
def encode_8bit(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ### BEGIN SOLUTION
    largest = shard.abs().amax(dim=1, keepdim=True)
    scales = largest.clamp(min=1e-30) / 127  # a row of zeros has nothing to divide by
    return (shard / scales).round().to(torch.int8), scales
    ### END SOLUTION


def decode_8bit(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    ### BEGIN SOLUTION
    numbers, scales = gathered
    return (numbers.float() * scales).to(dtype)
    ### END SOLUTION


# %%
eight_verdict = checks.eight_bit_gather(encode_8bit, decode_8bit)
eight_verdict

# %% [markdown]
# ### Exercise 2: the two hooks (••, {minutes} minutes)
#
# Put both hooks onto a plain shard, for any `encode` and `decode`, and for computation in float32 and in bfloat16.
# `rows` is how many rows every rank has to send: those of the whole matrix, divided by the ranks and rounded up. The
# check trains three layers on 2 and on 3 ranks.
#
# <details><summary>Hint 1</summary>
#
# Begin with the hooks of section 2, and go through its text below them: equal sizes, `dtype`, the first gather, the
# later ones. What does the parameter lie in now?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Adam changes the shard in each step, so encode inside `pre_all_gather`. In `post_all_gather` decode at every gather,
# and then ask for `out`.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `encode(pad_rows(shard, rows))` is sent. The decoded tensor is memory that your hook made, so it is what FSDP has to
# be told to free. Later on, `refill(out, whole)`.
#
# </details>


# %%
def add_hooks(shard, rows, encode, decode):
    ### BEGIN SOLUTION
    def pre_all_gather(mesh):
        return encode(pad_rows(shard, rows)), None

    def post_all_gather(gathered, note, dtype, *, out=None):
        whole = decode(gathered, dtype)
        if out is None:
            return whole, (whole,)
        refill(out, whole)

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather
    ### END SOLUTION


# %%
hooks_verdict = checks.both_hooks(add_hooks)
hooks_verdict

# %% [markdown]
# The rest of this section and section 6 run your functions; where an exercise is open, labkit's stand in.

# %%
hooks = add_hooks if hooks_verdict.ok else add_codec_hooks
encode, decode = EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode
if eight_verdict.ok:
    encode, decode = encode_8bit, decode_8bit


def send_8bit(shard, rows):
    hooks(shard, rows, encode, decode)


# %% [markdown]
# **Train with them.** The network's six matrices have 361,728 parameters in 1,418 rows. A rank sends its rows in your
# format, in both passes, and then the gradients of *all* rows in float32. Commit: how many bytes of a step does it hand
# to the all-gathers, and how many to the reduce-scatters?

# %% tags=["commit"]
mine_bytes = commit(all_gather_bytes=None, reduce_scatter_bytes=None)
### BEGIN SOLUTION
longest = [(-(-rows // RANKS), columns) for rows, columns in SHAPES]  # rows of the rank that holds most
mine_bytes = commit(
    all_gather_bytes=2 * sum(rows * (columns + 4) for rows, columns in longest),
    reduce_scatter_bytes=4 * RANKS * sum(rows * columns for rows, columns in longest),
)
### END SOLUTION

# %% tags=["summary"]
plain = labkit.run("allgather_extensions", extension="none", **SETUP)
own = labkit.run("allgather_extensions", extension="your_hooks", use={"add_hooks": send_8bit}, **SETUP)
gradients = RANKS * sum(theory.gather_bytes(shape, RANKS, "fp32") for shape in SHAPES)
coded = [encode(torch.ones(-(-rows // RANKS), columns)) for rows, columns in SHAPES]  # in your format
handed = 2 * sum(each.nbytes for tensors in coded for each in tensors)
plots.comparison_table(own, {"all_gather_bytes": handed, "reduce_scatter_bytes": gradients}, yours=mine_bytes)

# %% tags=["nbval-ignore-output"]
print(f"mean of the last ten losses: {own.losses[-10:].mean():.2f}, plain FSDP's {plain.losses[-10:].mean():.2f}")

# %% tags=["claim"]
share = own.value("all_gather_bytes") / plain.value("all_gather_bytes")
claim("a quarter of the bytes, and the scales", 0.25 < share < 0.26)
counted = [sum(r * c for r, c in SHAPES), sum(r for r, _ in SHAPES)]
claim("361,728 parameters in 1,418 rows", counted == [361_728, 1418], where=TOLD)
off = abs(own.losses[-10:].mean() / plain.losses[-10:].mean() - 1)
claim("the last ten losses are within 10 % of plain FSDP's", off < 0.1, where=TOLD)

# %% [markdown]
# Both gathers of each unit carry a quarter of the bytes, while the gradients are reduced in float32 as before. The
# losses are within 10 % of plain FSDP's, though sixty steps prove nothing about a long training.
#
# <details><summary>How the bytes come about</summary>
#
# Two gathers, each of half of 361,728 bytes and of half of 1,418 scales of 4 bytes: 2 · (180,864 + 2,836) = 367,400.
# The reduce-scatters get 4 · 361,728 = 1,446,912.
#
# </details>
#
# **Break it: find two faults.** Two colleagues built hooks on yours. They raise no error, and each has one fault:


# %%
def first_hooks(shard, rows, encode, decode):
    hooks(shard, rows, encode, decode)
    yours = shard.fsdp_post_all_gather

    def post_all_gather(gathered, note, dtype, *, out=None):
        answer = yours(gathered, note, dtype, out=out)
        return (answer[0], tuple(gathered)) if out is None else None

    shard.fsdp_post_all_gather = post_all_gather


def second_hooks(shard, rows, encode, decode):
    hooks(shard, rows, encode, decode)
    yours, tensors = shard.fsdp_pre_all_gather, []

    def pre_all_gather(mesh):
        tensors[:] = tensors or [yours(mesh)]
        return tensors[0]

    shard.fsdp_pre_all_gather = pre_all_gather


# %% [markdown]
# Commit for each: how many bytes of decoded rows of a (51, 64) layer are still in memory on each of 2 ranks, after it
# has been gathered in float32 and freed? And what is the mean of the last ten losses above, with these hooks?

# %% tags=["commit"]
mine_faults = commit(first_bytes=None, first_loss=None, second_bytes=None, second_loss=None)
### BEGIN SOLUTION
# One never frees what it decoded, with the padding; the other guesses among ten with its first weights: ln 10.
mine_faults = commit(first_bytes=52 * 64 * 4, first_loss=own.losses[-10:].mean(), second_bytes=0, second_loss=2.3)
### END SOLUTION

# %%
print(
    f"bytes that the first leaves of the (51, 64) layer: you say {prediction_text(mine_faults['first_bytes'])}; the check:"
)
checks.both_hooks(first_hooks)


# %% tags=["nbval-ignore-output"]
def send_second(shard, rows):
    second_hooks(shard, rows, encode, decode)


stale = labkit.run("allgather_extensions", extension="your_hooks", use={"add_hooks": send_second}, **SETUP)
found = {"first_loss": own.losses[-10:].mean(), "second_bytes": 0, "second_loss": stale.losses[-10:].mean()}
for name, number in found.items():
    print(f"{name}: {number:.3g}; you: {prediction_text(mine_faults[name], '.3g')}")
print("The check found the first's losses right, so they are yours. A run that leaves bytes would have raised.")

# %% tags=["claim"]
claim("before it is mended, the second's loss is 2.3", abs(stale.losses[-10:].mean() - 2.3) < 0.1, where=TOLD)
claim("and the right hooks learn", own.losses[-10:].mean() < 0.8 * stale.losses[-10:].mean(), where=TOLD)
leaked = [round(4 * counted[0] / size / 1e6, 2) for size in (1, RANKS)]
claim("1.45 MB leak, twice the shards", leaked == [1.45, 0.72], where=TOLD)

# %% [markdown]
# **Mend them.** Change one line in each of the two functions above. Then run their cell and those below it again, until
# the check passes, and the second's loss falls to yours.
#
# <details><summary>What was wrong</summary>
#
# The first **leaks**. FSDP frees what it gathered anyway, but learns of the decoded parameter only from the hook, so
# the right line is `return (answer[0], (answer[0],)) if out is None else None`. Each layer leaves its rows, padding
# included: 52 × 64 × 4 = 13,312 bytes for the first. This notebook's network would once leave 1.45 MB on each rank,
# twice its 0.72 MB of shards.
#
# The second leaves no decoded rows, but sends **stale** ones: `tensors or` keeps the first for ever. Adam updates the
# shards, while every unit computes with its first weights and guesses among ten: ln 10 ≈ 2.3. The right line is
# `tensors[:] = [yours(mesh)]`.
#
# </details>
#
# *Takeaway: a hook must name the memory that it allocates for the parameter, or nobody frees it. What it keeps of the
# shard is stale after a step.*
#
# ## 4. What it costs in error ({minutes} minutes)
#
# bfloat16 has 8 significant binary digits, so rounding moves each number by at most 1/256 of *itself*. float8 (here
# e4m3) has 4. One scale for a rank's rows of a matrix makes their largest number 448, float8's last, where neighbours
# are 32 apart, so rounding moves no number by more than 16/448 = 0.036 of *the largest*. int8 has 127 steps up to the
# largest of a row, and half a step is 1/254 of it. A second measure takes all weights into account: the root of the
# mean square (RMS) of the errors, over the RMS of the weights.

# %% tags=["nbval-ignore-output"]
runs = {"fp32": plain} | {
    name: labkit.run("allgather_extensions", extension=name, **SETUP) for name in ("bf16", "float8", "int8")
}
figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
bounds = {name: theory.rounding_error(name) for name in runs if name != "fp32"}
plots.error_by_bytes(runs, bounds=bounds, ax=panels[0]).set_title("largest error")
plots.error_by_bytes(runs, error="rms", ax=panels[1]).set_title("RMS error")
print({name: f"loss {run.losses[-10:].mean():.2f}" for name, run in runs.items()})

# %% tags=["claim"]
largest, rms = ({k: run.value(v) for k, run in runs.items()} for v in ("weight_error", "weight_rms_error"))
claim("int8 and bfloat16 have nearly the same bound", abs(bounds["int8"] / bounds["bf16"] - 1) < 0.02)
claim("no point lies above its bound", all(largest[name] <= bound + 1e-6 for name, bound in bounds.items()))
claim("int8's largest error is at its bound", largest["int8"] > 0.97 * bounds["int8"], where=TOLD)
claim(
    "and float8's at 0.036",
    round(bounds["float8"], 3) == 0.036 and largest["float8"] > 0.97 * bounds["float8"],
    where=TOLD,
)
claim("bfloat16's is below", largest["bf16"] < 0.9 * bounds["bf16"], where=TOLD)
claim("in RMS int8 errs nearly three times as much", 2.5 < rms["int8"] / rms["bf16"] < 3.2, where=TOLD)
losses = [run.losses[-10:].mean() for run in runs.values()]
worst = {max(each, key=each.get) for each in (largest, rms)}
claim("float8 is the worst by both", worst == {"float8"}, where=TOLD)
claim("all four losses are nearly the same", max(losses) < 1.02 * min(losses), where=TOLD)

# %% [markdown]
# *int8 and bfloat16 have nearly the same bound, but by RMS int8 errs nearly three times as much. float8 is the worst by
# both.*
#
# A float rounds each number to some digits, so that small weights have small errors, but float8 has few digits. int8 has
# one step for a whole row, too coarse for its small weights. Among so many weights one lies almost halfway between two of
# int8's steps, so that the largest error reaches the bound, 0.0039.
#
# **Which of the two errors does the loss follow?** All four losses are nearly the same. So round trained weights to 2
# or 3 bits, steps from −1 to 1 or −3 to 3, or *clip* them, exact up to 2 or 1.5 times their matrix's RMS.

# %% tags=["nbval-ignore-output"]
rises = gather_costs.rounded_losses(gather_costs.trained_network(DIM), gather_costs.COARSE)
rises.round(3)

# %% tags=["claim"]
told, rise = rises.T, rises["loss rises by %"]
three, two_rms, less = told["3 bits"], told["clip at 2 RMS"], told["clip at 1.5 RMS"]
claim("the first clip's largest error is larger", two_rms["largest"] > 1.1 * three["largest"], where=TOLD)
claim("a tenth of the RMS error", 0.05 < two_rms["RMS"] / three["RMS"] < 0.15, where=TOLD)
claim("and it does a tenth of the harm", 0.05 < rise["clip at 2 RMS"] / rise["3 bits"] < 0.15, where=TOLD)
claim("the second has half of the RMS error", 0.45 < less["RMS"] / three["RMS"] < 0.65, where=TOLD)
claim("and does six times the harm", 5 < rise["clip at 1.5 RMS"] / rise["3 bits"] < 7.5, where=TOLD)
claim(
    "3 bits cost more than 8, and 2 bits far more",
    rise["8 bits"] < 0.1 < rise["3 bits"] < rise["2 bits"] / 10,
    where=TOLD,
)

# %% [markdown]
# Compare with 3 bits: clipped at 2 RMS, the largest error is larger, and the loss rises a tenth as much; at 1.5 RMS,
# the RMS error is half, and the loss rises six times as much. So neither error alone tells the harm.
#
# *Takeaway: a float's error follows each number, and an integer's the largest of its row. What a rounding does to the
# loss has to be measured.*
#
# ## 5. What it costs in memory ({minutes} minutes)
#
# In plain FSDP the gathered tensor *is* the parameter, so a computing unit holds 4 bytes a number. With int8 it holds
# the gathered byte and the decoded parameter: *more*, by a quarter. But a rank's **peak** decides whether a model fits,
# and it may lie elsewhere: while a hook decodes. labkit's int8 hooks run here, and keep each step until decode returns:
#
# ```
# floats = numbers.float()
# product = floats * scales
# return product.to(dtype)  # float32: the same tensor; bfloat16: a new one
# ```
#
# The memory has lab 2's parts. *Gathered parameters* are here encoded and decoded; a unit gathered ahead waits in a
# *communication buffer*, until FSDP copies it out. *Temporary* are decode's copies, gradients of activations, and whole
# gradients before they are reduced.
#
# Commit: at a later gather, how many bytes a number are alive when decode is about to return, with the gathered int8
# and `out`? First in float32, then with a policy of bfloat16.

# %% tags=["commit"]
mine_alive = commit(float32=None, bfloat16=None)
### BEGIN SOLUTION
# numbers, out, floats, product, and in bfloat16 the cast
mine_alive = commit(float32=1 + 4 + 4 + 4, bfloat16=1 + 2 + 4 + 4 + 2)
### END SOLUTION

# %%
short = {"policy": labkit.run("allgather_extensions", extension="none", policy="bf16", **SHORT)}
short["both"] = labkit.run("allgather_extensions", extension="int8", policy="bf16", **SHORT)
costs = {  # what is sent, and bytes of a number in arithmetic
    "plain": (plain, "fp32", 4),
    "policy": (short["policy"], "bf16", 2),
    "int8": (runs["int8"], "int8", 4),
    "both": (short["both"], "int8", 2),
}
expected = {
    label: theory.step_peak(DIM, BATCH, RANKS, kind, compute_bytes=size) for label, (_, kind, size) in costs.items()
}
peaks = {label: run.value("peak_total_bytes") for label, (run, *_) in costs.items()}
decoding = gather_costs.decoding_bytes(expected, SHAPES[0], BATCH, RANKS)

# %% tags=["nbval-ignore-output"]
parts = {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()}
_ = plots.memory_comparison(parts)
alive = dict(zip(mine_alive, decoding.values(), strict=True))
print({name: f"{alive[name]:.0f}; you: {prediction_text(number)}" for name, number in mine_alive.items()})
MOMENTS = ("MLP backward", "reducing", "decoding", "decoding")  # where each peak lies
at = {label: f"{label}: {moment}" for label, moment in zip(expected, MOMENTS, strict=True)}
gather_costs.ledger_mb(expected, measured=peaks).rename(columns=at)

# %% [markdown]
# *Peak memory of a rank in theory, each at its own moment, and the measured sum. The policy lowers it by an eighth, and
# int8 hooks on top of the policy raise it again, nearly to plain FSDP's.*

# %% tags=["claim"]
on_cpu = plain.device == "cpu"
there = TOLD and on_cpu
totals = {label: sizes["total"] for label, sizes in expected.items()}
claim("each peak is as predicted, to the byte", peaks == totals, where=on_cpu)
claim("the policy lowers it by an eighth", -0.14 < peaks["policy"] / peaks["plain"] - 1 < -0.11, where=there)
claim("int8 alone raises it by less than one percent", 0 < peaks["int8"] / peaks["plain"] - 1 < 0.01, where=there)
claim("int8 on the policy raises its peak by an eighth", 0.11 < peaks["both"] / peaks["policy"] - 1 < 0.14, where=there)
claim("and is nearly plain's", -0.03 < peaks["both"] / peaks["plain"] - 1 < 0, where=there)
claim("13 bytes a number in both", {round(each, 1) for each in decoding.values()} == {13}, where=TOLD)
gathered = [expected[label].get("unsharded_parameter", 0) for label in ("plain", "policy")]
claim("plain peaks with an MLP gathered, the policy with nothing", gathered == [4 * 8 * DIM * DIM, 0], where=TOLD)
claim("1.28 MB", round(13 * DIM * 768 / 1e6, 2) == 1.28, where=TOLD)

# %% [markdown]
# Plain FSDP peaks while an MLP computes its gradients, and the policy while they are reduced. The other two peak while
# the largest matrix is decoded: 13 bytes a number, 1.28 MB, of which 8 in float32 and 10 in bfloat16 are decode's
# temporary copies.
#
# <details><summary>How the peak is measured on a CPU, and what it leaves out</summary>
#
# PyTorch's `MemTracker` adds up the tensors that operators return. It does not see what an operator allocates and frees
# inside. The three steps of decode above allocate nothing else.
#
# </details>
#
# ### Exercise 3: decode without copies (••, {minutes} minutes)
#
# Write the second hook for labkit's int8, `gathered = (numbers, scales)` with a scale for each row. Its parameter has
# to be the same as before, in float32 and in bfloat16, but whatever else your hook allocates may take at most 1 byte a
# number at any time. Write into `out` inside `with quietly(out):`, as `refill` does by itself. It is `torch.no_grad()`,
# and puts back the version counter by which autograd notices a change.
#
# The check reads PyTorch's profiler, which also sees what operators allocate inside. On a CPU, `mul_` of a bfloat16
# tensor by float32 scales makes two float32 copies of it there.
#
# <details><summary>Hint 1</summary>
#
# At the first gather make an empty parameter of the right `dtype`, with the padding. From then on both kinds of gather
# do the same: they fill a tensor. `refill` is of no use, because it wants all decoded rows.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Copies of a few rows weigh little. The check has a matrix of 256 rows.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A loop over blocks of rows, in which an assignment to `whole[rows]` converts. `out` has no padding: its last block
# ends before that of `numbers` and `scales`.
#
# </details>


# %%
def lean_post_all_gather(gathered, note, dtype, *, out=None):
    ### BEGIN SOLUTION
    numbers, scales = gathered
    whole = torch.empty_like(numbers, dtype=dtype) if out is None else out
    with quietly(whole):
        for start in range(0, len(whole), 8):
            rows = slice(start, min(start + 8, len(whole)))
            whole[rows] = numbers[rows].float() * scales[rows]
    return (whole, (whole,)) if out is None else None
    ### END SOLUTION


# %%
lean_verdict = checks.lean_decode(lean_post_all_gather)
lean_verdict

# %% [markdown]
# Where is the peak now, on top of the policy?

# %%
lean_hook = lean_post_all_gather if lean_verdict.ok else gather_costs.lean_decoder(8)


def send_lean(shard, rows):
    add_codec_hooks(shard, rows, EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode)
    shard.fsdp_post_all_gather = lean_hook


lean = labkit.run(
    "allgather_extensions", extension="your_hooks", use={"add_hooks": send_lean}, policy="bf16", **SHORT
).value("peak_total_bytes")
print(f"the policy {peaks['policy'] / 1e6:.2f} MB, both {peaks['both'] / 1e6:.2f}, with a lean decode {lean / 1e6:.2f}")

# %% tags=["claim"]
claim("4.19 and 4.71 MB", [round(peaks[each] / 1e6, 2) for each in ("policy", "both")] == [4.19, 4.71], where=there)
claim("a lean decode peaks 97,792 bytes below the policy", peaks["policy"] - lean == 97_792, where=there)
ahead = [expected[label].get("all_gather", 0) for label in ("policy", "both")]
claim("196,608 and 98,816 bytes ahead", ahead == [196_608, 98_816], where=TOLD)

# %% [markdown]
# Decode no longer makes the peak. It is back where gradients are reduced, and 97,792 bytes below the policy's: the next
# unit, the largest matrix, waits in a communication buffer as 98,816 bytes of int8 and scales, not 196,608 of bfloat16.
#
# How many rows should a block have? This is what it takes to decode a matrix of 1024 × 1024 to bfloat16:

# %% tags=["nbval-ignore-output"]
sample = torch.zeros(512, 1024)  # one rank's rows
add_codec_hooks(sample, 512, EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode)
decoders = {"all rows, three steps": sample.fsdp_post_all_gather, "yours": lean_hook}
decoders |= {f"blocks of {rows}": gather_costs.lean_decoder(rows) for rows in (1, 8, 64)}
decode_costs = pandas.DataFrame(hook_costs.decode_costs(decoders, (1024, 1024), torch.bfloat16)).T
decode_costs.round(3)

# %% tags=["claim"]
taken, own_bytes = decode_costs["ms"], decode_costs["bytes a number of its own"]
claim("three steps hold 10 bytes a number", own_bytes["all rows, three steps"] == 10, where=on_cpu)
claim("64 rows hold half a byte", own_bytes["blocks of 64"] == 0.5, where=on_cpu)
claim("one row at a time takes several times as long as 64", taken["blocks of 1"] > 3 * taken["blocks of 64"])

# %% [markdown]
# Each block calls three operators, so single rows take several times as long as blocks of 64, which hold half a byte a
# number here.
#
# *Takeaway: a policy lowers the peak. Hooks on top of it eat the saving if they decode through copies, and keep it if
# they decode in blocks of rows.*
#
# ## 6. When does it pay? ({minutes} minutes)
#
# A gather that hides behind arithmetic (lab 2) has no time to save. An exposed one pays if the bytes saved would take
# longer than the coding, in which a rank encodes its rows and decodes all. In a ring of n ranks, that is below a
# bandwidth of
#
# ```
# bytes saved × (n − 1) / n ÷ seconds of coding
# ```
#
# The profiler tells where one gather of all four units spends its time; a step makes two:

# %%
# %%torchrun -n {RANKS} --timeout 180 --use send_8bit,send_lean,DIM --name gathered
import torch.distributed as dist

from labkit.rank import report
from labkit_course.hook_costs import gather_parts

dist.init_process_group("gloo")
report(ms=gather_parts({"float32, no hooks": None, "yours": send_8bit, "lean decode": send_lean}, DIM))
dist.destroy_process_group()

# %% tags=["nbval-ignore-output"]
parts_ms = pandas.DataFrame(gathered.ranks[0].reported["ms"])
coding_ms, saved = parts_ms["yours"][["encode", "decode"]].sum(), gather_costs.saved_bytes(SHAPES, RANKS)
below = theory.pays_below(saved, coding_ms / 1e3, RANKS)
print(f"{saved / 1e6:.2f} MB saved, {coding_ms:.2f} ms of coding: exposed, it pays below {below / 1e6:,.0f} MB/s")
parts_ms.loc["sum"] = parts_ms.sum()
parts_ms.round(2).rename_axis("ms of one gather")

# %% tags=["claim"]
busy = plain.cores_of_others or own.cores_of_others
float_ms, yours_ms = parts_ms["float32, no hooks"], parts_ms["yours"]
quarters = [part for part in ("copy in", "all-gather", "copy out") if yours_ms[part] <= float_ms[part] / 4]
claim("no part is four times as fast", not quarters or busy, where=TOLD and on_cpu)

# %% [markdown]
# A quarter of the bytes makes no part of the gather four times as fast. The copies handle twelve tensors instead of six,
# and between two ranks of one machine the all-gather is mostly latency, which the formula leaves out. Your hooks come on top, and a decode in many small blocks is mostly calls.
#
# **Emulated, in slow motion.** Real ranks now train this network with your hooks, seven steps of 4 tiles a rank, and
# *wait* as long as imagined devices and an imagined wire without latency would take (`emulate=`). Coding all parameters
# once takes 40 ms, so the threshold is 1.08 MB × 1/2 ÷ 40 ms = 13.5 MB/s. Each unit is gathered twice in a step, while
# the unit before it computes:
#
# ```
# rank  encode_1            decode_1  encode_2  compute_1  decode_2  encode_3  compute_2  …
# wire            gather_1                      gather_2                       gather_3
# ```
#
# *How each pass begins. Where a gather takes longer than the arithmetic above it, the rank waits.*
#
# On gloo, FSDP2 also waits for each reduce-scatter.
#
# Commit: how many ms of a step do your hooks save, as a negative number where they lose,
#
# - on a wire of half the threshold, 6.7 MB/s, with no arithmetic to hide behind;
# - on a wire of four times the threshold, 54 MB/s, again with none;
# - on the first wire, while each unit computes for 50 ms forward and 100 backward, longer than any gather takes? The first unit has
#   98,304 of the 361,728 numbers, and the last 1,280.

# %% tags=["commit"]
mine_saved = commit(narrow_exposed=None, wide_exposed=None, narrow_hidden=None)
### BEGIN SOLUTION
# At the threshold the wire saves the coding's 40 ms a gather, at half of it 80. Hidden, that counts for two units alone.
mine_saved = commit(
    narrow_exposed=2 * 80 - 2 * 40,
    wide_exposed=2 * 10 - 2 * 40,
    narrow_hidden=(98_304 + 1_280) / 361_728 * 80 - 2 * 40,
)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
variants, expected_ms = gather_costs.wire_cases(SHAPES, RANKS, send_8bit)
emulated = labkit.compare("allgather_extensions", variants, rounds=1, **SHORT | {"batch": 4, "steps": 7})
_ = plots.latency_bars(emulated, predicted=expected_ms)
step_ms = {label: result.value("step_ms") for label, result in emulated.items()}
columns = {"theory": gather_costs.saved_ms(expected_ms), "emulated": gather_costs.saved_ms(step_ms)}
columns = {"yours": dict(zip(columns["theory"], mine_saved.values(), strict=True))} | columns
pandas.DataFrame(columns).round().astype(object).fillna("no prediction")

# %% tags=["nbval-ignore-output"]
gather_costs.step_parts(expected_ms, variants, SHAPES, RANKS, emulated=step_ms)

# %% tags=["claim"]
threshold = theory.pays_below(saved, gather_costs.CODING_S, RANKS) / 1e6
claim(
    "13.5, 6.7 and 54 MB/s",
    [round(threshold, 1), round(threshold / 2, 1), round(4 * threshold)] == [13.5, 6.7, 54],
    where=TOLD,
)
saves = columns["emulated"]
claim("each bar ends beyond its dash", all(step_ms[label] > expected_ms[label] for label in step_ms), where=RANKS <= 4)
claim("your hooks win on the narrow wire", saves["narrow, exposed"] > 0, where=RANKS <= 4)
claim("and lose on the wide one", saves["wide, exposed"] < 0, where=RANKS <= 4)
claim("and lose on the narrow wire where it hides", saves["narrow, hidden"] < 0, where=RANKS <= 4)
sent = [2 * sum(theory.gather_bytes(shape, RANKS, kind) for shape in SHAPES) for kind in ("fp32", "int8")]
waits = [round(size * share / threshold * 2 / 1e3) for size, share in ((sent[0], 1), (sent[1], 1), (sent[0], 0.5))]
claim("gathers of 214 and 54 ms, reduce-scatters of 107", waits == [214, 54, 107], where=TOLD)
claim("they lose 58 ms there", round(columns["theory"]["narrow, hidden"]) == -58, where=TOLD)

# %% [markdown]
# *Emulated steps; dashed, theory. On the same narrow wire your hooks win where the gather is exposed, and lose where it
# hides.*
#
# Without arithmetic, all waits add up. In the hidden case only the first gather of each pass is exposed, and nothing
# hides the coding. The ranks really work, too, so each bar ends beyond its dash, and a saving is off by the difference of two such excesses.
#
# **On GPUs: an estimate.** An H100's memory moves at most 3.35 · 10¹² bytes a second. Suppose that this alone limits
# the coding. A *fused kernel* has no tensors between its steps, as PyTorch's operators have, one after another:
#
# | bytes a number | fused | one after another |
# |---|---|---|
# | encode a rank's rows | 4 for the largest, 4 + 1 | `abs` 8, `amax` 4, division 8, `round` 8, to int8 5 |
# | decode all rows to bfloat16 | 1 + 2 | to float32 5, product 8, to bfloat16 6, `refill` 4 |
#
# `torch.compile` fuses such steps. Against a policy's bfloat16, int8 saves 7 GB of 7
# billion parameters. Commit: below how many GB/s does it pay in the ring of 16 GPUs, fused, and one after another?

# %% tags=["commit"]
mine_gpu = commit(fused=None, separate=None)
### BEGIN SOLUTION
# 7e9 bytes × 15/16 ÷ (7e9 × bytes a number ÷ 3350 GB/s), where a rank encodes a sixteenth
mine_gpu = commit(fused=15 / 16 * 3350 / (9 / 16 + 3), separate=15 / 16 * 3350 / (33 / 16 + 23))
### END SOLUTION

# %%
moved = {"fused": (4 + 4 + 1, 1 + 2), "one after another": (8 + 4 + 8 + 8 + 5, 5 + 8 + 6 + 4)}
pays = pandas.DataFrame({"yours": dict(zip(moved, mine_gpu.values(), strict=True))})
for ring, where in ((16, "16 GPUs, two hosts"), (8, "8 GPUs, one host")):
    coding_s = {how: 7e9 * (first / ring + second) / 3.35e12 for how, (first, second) in moved.items()}
    pays[where] = {how: theory.pays_below(7e9, taken, ring) / 1e9 for how, taken in coding_s.items()}
pays.rename_axis("pays below GB/s").astype(float).round().astype(object).fillna("no prediction")

# %% tags=["claim"]
claim(
    "it pays below 882, 125, 711 and 108 GB/s", pays.iloc[:, 1:].T.round().values.tolist() == [[882, 125], [711, 108]]
)
a_number = [first / 16 + second for first, second in moved.values()]  # as a rank encodes a sixteenth
on_cards_ms = [1e3 * 7e9 * 15 / 16 / 400e9, *(1e3 * 7e9 * each / 3.35e12 for each in a_number)]
claim("400 GB/s save 16 ms, and coding takes 7 or 52", [round(each) for each in on_cards_ms] == [16, 7, 52])
claim("in place, below 347 GB/s", round(15 / 16 * 3350 / (33 / 16 + 3 + 4)) == 347)

# %% [markdown]
# By this estimate an exposed gather in int8 pays either way over one card of 50 GB/s between hosts. Over the reference
# cluster's eight cards, 400 GB/s, a gather saves 16 ms, so it pays with 7 ms of fused coding, and loses with 52. NVLink
# inside a host, 450 GB/s, needs fused kernels, too. Without its blocks, exercise 3 has a third way: `copy_` and `mul_` in
# `out` move 3 + 4 bytes instead of 23, and pay below 347 GB/s.
#
# *Takeaway: fewer bytes pay if the gather is exposed and the wire is slower than the coding.*

# %% [markdown]
# ## 7. Take away ({minutes} minutes)
#
# 1. FSDP2 asks each shard what to send and what to make of it. Two functions on a plain tensor answer, and what they
#    round never reaches the shard that Adam updates.
# 2. A hook that decodes must name its memory, and keep nothing of the shard: otherwise FSDP leaks the model, or computes
#    with old weights, without an error.
# 3. If bfloat16 arithmetic is fine, then a policy halves the bytes in one line. If a slow wire is exposed after that,
#    then hooks halve them again, with any decode if it is slow enough, and fused on a faster one. If gathers hide, then
#    leave them as they are.
#
# **Ask yourself**
#
# <details><summary>1. Your cluster has 200 GB/s a host. Do int8 gathers of the 7 billion parameters pay on 16 GPUs?</summary>
#
# If they are exposed after a policy's bfloat16, and if the hooks are fused or at least decode in place: 200 lies above
# 125 and below 347 and 882 GB/s. A gather saves 33 ms, and fused coding takes 7.
#
# </details>
# <details><summary>2. A colleague's hook encodes when it is put onto the shard, once. What happens, and who tells you?</summary>
#
# Every unit computes with its first weights for ever, while Adam updates shards that nobody reads. Nothing tells you,
# except a loss that does not fall.
#
# </details>
# <details><summary>3. Why does the hook get <code>out</code> from the second gather on, instead of returning a new parameter?</summary>
#
# Autograd saved the first one for the backward pass. That object must hold the numbers again.
#
# </details>
# <details><summary>4. Somebody says that int8 gathers save memory. True?</summary>
#
# It depends on the decode. The gathered bytes lie beside the decoded parameter, and copies in float32 lift the peak of
# a bfloat16 policy by an eighth here. Decoded in small parts, it even falls a little, with the buffers.
#
# </details>
# <details><summary>5. Your gathers hide behind arithmetic already. What does int8 bring?</summary>
#
# Nothing, or it costs: encode and decode take time from the arithmetic. Look for what is exposed first.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - `fully_shard` and its policies: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
# - Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023:
#   https://arxiv.org/abs/2306.10209
# - torchao's float8 training: https://github.com/pytorch/ao/tree/main/torchao/float8
# - Micikevicius et al., "FP8 Formats for Deep Learning", 2022: https://arxiv.org/abs/2209.05433
# - The H100's data sheet: https://www.nvidia.com/en-us/data-center/h100/
# - In labkit: `labkit/tensors/quantisation.py` (hooks like yours), `labkit/theory/extensions.py` (the ledger of the
#   peak).
#
# </details>
#
# **Next**: 03b puts the hooks into a tensor type, `TwoTensor`. Lab 4 puts many small messages into few
# large ones.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("extensions")
