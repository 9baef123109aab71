# %% [markdown]
# # Lab 3. All-gather extensions: change what FSDP sends
#
# With FSDP every parameter crosses the wire twice in each step, if it is resharded in between. FSDP2 asks each
# parameter what it wants to send, and what to make of the bytes that arrive. In this lab you answer both questions.
# After it you can
#
# - write FSDP2's two hooks on a plain tensor, and train a real network whose gathers send a quarter;
# - tell a hook that leaks memory, though every loss is right;
# - say what fewer bytes cost in error and in peak memory;
# - predict on which wire they save time, and on which they lose it.
#
# You need lab 2's words: unit, all-gather, reduce-scatter, resharding. The lab takes about {core_minutes} minutes and
# needs no GPU. The companion 03b, *All-gather extensions at work*, makes the hooks methods of a tensor type.

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from matplotlib import pyplot

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.tensors import EXTENSIONS, add_codec_hooks, pad_rows, refill
from labkit.theory import emulated_steps
from labkit.theory import extensions as theory
from labkit_course.checks import extensions as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="3")

# %% [markdown]
# You may change these parameters. The network looks at tiles of a photo, 16 × 16 pixels each, and says from which of
# ten regions a tile was cut; the loss is the cross entropy. Its four units are a linear layer, two multilayer
# perceptrons of inner width 4 × `DIM`, and a linear layer, all without bias.

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
# Take a model of 7 billion parameters that is sharded over two hosts of eight H100s. In bfloat16 the parameters are 14
# GB, and to gather them in a ring of 16 GPUs, 15/16 of that leave each host. Over a single network card of 50 GB/s the
# two gathers of a step take 0.53 s, and over the eight cards of lab 0's reference cluster an eighth. With too few
# tokens to hide that, the GPUs wait. You can buy network cards, or you can send fewer bytes:
#
# ```
# float32 rows --encode--> 8 bits a number --all-gather--> all rows, 8 bits --decode--> parameter --compute--> freed
#      ^
#      Adam updates these, and never sees what was rounded
# ```
#
# Others do the same:
#
# | who | sends | how |
# |---|---|---|
# | FSDP2's `MixedPrecisionPolicy` | bfloat16 | one line, without hooks |
# | torchao, for float8 training | float8 and scales | the two hooks of this lab, in a tensor subclass |
# | ZeRO++ in DeepSpeed (2023) | int8 and scales, one for each block of numbers | inside its own engine |
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
# With FSDP the updates happen in the shard, on the rank that owns it, and the shard stays in float32. What is gathered
# is only computed with, and forgotten. Its rounding errors do not add up over the steps, because each step rounds the
# exact shard again.
#
# Then why hooks, if a policy halves the bytes in one line? A policy has one dtype for the parameters, and FSDP uses it
# both for the message and for the computation. So it cannot send bfloat16 and compute in float32, nor can it send int8,
# whose numbers are of no use without their scales.
#
# *Takeaway: a gathered parameter may be rounded because it is only a copy, and if bfloat16 is enough, a policy does
# it.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# FSDP2 looks for two functions on the **local tensor** of each sharded parameter: this rank's rows, in its attribute
# `_local_tensor`. A plain tensor can have them, because Python lets you set attributes on it. These hooks change
# nothing yet: they send the shard as it is. Their `mesh` is the group of ranks that share the parameter.

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
for parameter in model.parameters():
    send_as_it_is(parameter._local_tensor)  # before the first forward pass
output = model(torch.ones(8, 64))
output.square().mean().backward()
print(f"{len(sent)} gathers went through hooks, and the gradient is {tuple(parameter.grad.shape)}")
dist.destroy_process_group()

# %% [markdown]
# The two hooks answer two questions.
#
# 1. **`fsdp_pre_all_gather`**: which tensors shall FSDP send of this shard? FSDP gathers each of them from all ranks.
# 2. **`fsdp_post_all_gather`**: here are the same tensors with the rows of all ranks, so what is the parameter, in the
#    `dtype` of the computation? At the first gather `out` is None, and the hook returns the parameter and a tuple of
#    the tensors in whose memory it lies, so that FSDP can free them after use. At every later gather `out` is the
#    parameter of the first one, with memory again but without its numbers, and the hook has to fill it.
#
# `out` must be the same object because autograd keeps the parameter of the forward pass for the backward pass. The hook
# above has nothing to fill: its parameter *is* a gathered tensor, into which FSDP gathers again.
#
# FSDP2 cuts a parameter by rows, and every rank has to send equally many bytes. Where the rows do not divide, the last
# shard is shorter, and `pad_rows(shard, rows)` fills it up with rows of zeros. They come back among the decoded rows,
# and FSDP2 leaves them out of the parameter, so `out` may be shorter than what you decode. `refill(out, whole)` copies
# the rows that `out` has. It does so without telling autograd, which would refuse a saved tensor that has changed.
#
# *Takeaway: two functions on a shard decide what travels and what computes.*
#
# ## 3. Build it: a quarter of the bytes ({minutes} minutes)
#
# First you write what travels: **encode** turns this rank's rows into the tensors to send, and **decode** turns the
# tensors that arrived into the parameter. Then you write the hooks around them. All run in other processes, which get
# copies of your imports and functions.
#
# As an example, this pair would send bfloat16 and compute in float32, which no policy grants: encode returns
# `(shard.bfloat16(),)`, and decode returns `gathered[0].to(dtype)`.
#
# ### Exercise 1: a quarter of the bytes (••, {minutes} minutes)
#
# The format is your choice. Send at most 0.26 of float32's bytes, and let no weight be off by more than one part in 16
# of the largest weight of its parameter. PyTorch has `torch.int8`, whole numbers from −128 to 127, and
# `torch.float8_e4m3fn`, which has 3 binary digits behind the first and reaches 448. The check has a parameter of tiny
# weights, one with a row of zeros, and one whose first half of rows is three times larger than the second.
#
# Two rules come from the plumbing. The ranks' tensors are joined along their first dimension, so a single scale of each
# rank arrives as a tensor of `RANKS` scales. And gloo does not know float8, but it takes float8 next to a tensor of
# another dtype, because FSDP2 then sends plain bytes.
#
# <details><summary>Hint 1</summary>
#
# Divide by a **scale**, so that the largest number just fits into the type, and send the scales as a second tensor.
#
# </details>
# <details><summary>Hint 2</summary>
#
# One for each row: divide `shard.abs().amax(dim=1, keepdim=True)` by the largest number of the type. A row of zeros has the
# scale 0, and `clamp(min=1e-30)` lets you divide by it.
#
# </details>
# <details><summary>Hint 3</summary>
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
# `rows` is how many rows every rank has to send. The check trains three layers on 2 and on 3 ranks, then gathers and
# frees each once, and counts the memory that is left.
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
# From here on your functions do the work. Where an exercise is still open, labkit's stand in.

# %%
hooks = add_hooks if hooks_verdict.ok else add_codec_hooks
encode, decode = EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode
if eight_verdict.ok:
    encode, decode = encode_8bit, decode_8bit


def send_8bit(shard, rows):
    hooks(shard, rows, encode, decode)


# %% [markdown]
# **Break it: the leak.** These hooks compute exactly what yours do, but on the first call they name the gathered
# tensors, as section 2 did.


# %%
def leaky(shard, rows, encode, decode):
    hooks(shard, rows, encode, decode)
    right = shard.fsdp_post_all_gather

    def post_all_gather(gathered, note, dtype, *, out=None):
        answer = right(gathered, note, dtype, out=out)
        return (answer[0], tuple(gathered)) if out is None else None

    shard.fsdp_post_all_gather = post_all_gather


# %%
checks.both_hooks(leaky)

# %% [markdown]
# Every loss was right, or the verdict would have said so first. But each unit leaves its full parameters in memory, on
# every rank. This notebook's network has 361,728 parameters, so the leak would be 1.45 MB a rank, twice its 0.72 MB of
# shards. PyTorch gives no error message, and what FSDP saves of the parameters'
# memory is gone.

# %%
figure, panels = pyplot.subplots(2, 1, figsize=(10, 7.2), layout="constrained")
for leaks, panel in enumerate(panels):
    plots.hook_memory("int8", leaky=bool(leaks), ax=panel)
    panel.set_ylabel("leaky hooks" if leaks else "right hooks", weight="bold")

# %% [markdown]
# *FSDP frees the tensors that it gathered, but it learns of the decoded parameter only from the hook. At a later gather
# `whole` is a copy beside `out` until the hook returns.*
#
# **Train with them.** The 361,728 parameters lie in six matrices with 1,418 rows together. With a gather in the forward
# pass and another in the backward pass, your hooks now train them on real ranks.
#
# Commit: how many bytes does a rank hand to the all-gathers of one step, which are its own rows in your format? And how
# many to the reduce-scatters, which are gradients of all rows, in float32?

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
leaked = [round(4 * counted[0] / size / 1e6, 2) for size in (1, RANKS)]
claim("1.45 MB leak, twice the shards", leaked == [1.45, 0.72], where=TOLD)
off = abs(own.losses[-10:].mean() / plain.losses[-10:].mean() - 1)
claim("the last ten losses are within 10 % of plain FSDP's", off < 0.1, where=TOLD)

# %% [markdown]
# Both gathers of each unit carry a quarter of the bytes, while the gradients are reduced in float32 as before. They are
# not rounded so easily, because numbers can be added only if they share a scale, and a rounded gradient stays in Adam's
# averages.
#
# Over the last ten steps the losses lie within 10 % of plain FSDP's. Sixty steps prove nothing about a long training.
#
# <details><summary>How the bytes come about</summary>
#
# Two gathers, each of half of 361,728 bytes and of half of 1,418 scales of 4 bytes: 2 · (180,864 + 2,836) = 367,400.
# The reduce-scatters get 4 · 361,728 = 1,446,912.
#
# </details>
#
# **Break it: the stale rows.** Encoding takes time, so somebody saves it: this hook encodes at the first gather, keeps
# the result, and sends it again at every later one.


# %%
def send_once(shard, rows):
    send_8bit(shard, rows)
    encode_again, kept = shard.fsdp_pre_all_gather, []

    def pre_all_gather(mesh):
        if not kept:
            kept.append(encode_again(mesh))
        return kept[0]

    shard.fsdp_pre_all_gather = pre_all_gather


# %% [markdown]
# Commit: what is the mean of the last ten losses now? The line below the table above is the mean with your own hooks.

# %% tags=["commit"]
mine_stale = commit(last_losses=None)
### BEGIN SOLUTION
mine_stale = commit(last_losses=2.3)  # ln 10: the network computes with its first weights, and guesses
### END SOLUTION

# %% tags=["nbval-ignore-output"]
stale = labkit.run("allgather_extensions", extension="your_hooks", use={"add_hooks": send_once}, **SETUP)
print(f"your hooks: {own.losses[-10:].mean():.2f}")
print(f"sent once: {stale.losses[-10:].mean():.2f}; you: {prediction_text(mine_stale['last_losses'], '.2f')}")

# %% tags=["claim"]
claim("guessing among ten costs 2.3", abs(stale.losses[-10:].mean() - 2.3) < 0.1, where=TOLD)
claim("the right hooks learn", own.losses[-10:].mean() < 0.8 * stale.losses[-10:].mean(), where=TOLD)

# %% [markdown]
# Adam updates the shards, but every unit goes on computing with the first weights. A network that guesses among ten
# regions has a loss of ln 10 ≈ 2.3. There is no error message.
#
# *Takeaway: a hook must name the memory that it allocates for the parameter, or nobody frees it. What it keeps of the
# shard is stale after a step.*
#
# ## 4. What it costs in error ({minutes} minutes)
#
# bfloat16 has 8 significant binary digits, so rounding moves each number by at most 1/256 of *itself*. int8 has 127
# steps up to the largest number of a row, and rounding moves each number by at most half a step, 1/254 of *the
# largest*. So both have nearly the same bound for the largest error.
#
# A second measure takes all weights into account: the root of the mean square (RMS) of the errors, over the RMS of the
# weights. Rounding to steps of width s has an RMS error of s/√12. After this training a row's largest weight is about 2.2 times the RMS of the weights, and bfloat16's RMS error is 0.0017 of that RMS. Commit: how many times as
# large as bfloat16's are int8's largest error, and its RMS error?

# %% tags=["commit"]
mine_errors = commit(largest_times=None, rms_times=None)
### BEGIN SOLUTION
mine_errors = commit(largest_times=1, rms_times=2.9)  # 2.2 / 127 / √12 = 0.0050, over 0.0017
### END SOLUTION

# %% tags=["nbval-ignore-output"]
runs = {"fp32": plain} | {
    name: labkit.run("allgather_extensions", extension=name, **SETUP) for name in ("bf16", "float8", "int8")
}
figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
bounds = {name: theory.rounding_error(name) for name in runs if name != "fp32"}
plots.error_by_bytes(runs, bounds=bounds, ax=panels[0])
plots.error_by_bytes(runs, error="rms", ax=panels[1])
largest, rms = ({k: run.value(v) for k, run in runs.items()} for v in ("weight_error", "weight_rms_error"))
print({name: f"loss {run.losses[-10:].mean():.2f}" for name, run in runs.items()})
times = {"largest_times": largest["int8"] / largest["bf16"], "rms_times": rms["int8"] / rms["bf16"]}
pandas.DataFrame({"yours": mine_errors, "measured": times}).round(1).astype(object).fillna("no prediction")

# %% [markdown]
# *Left the largest error, where int8 and bfloat16 have nearly the same bound; right the RMS error, where int8 errs more
# than twice as much. int8 is more exact than float8 in both.*

# %% tags=["claim"]
claim("int8 and bfloat16 have nearly the same bound", abs(bounds["int8"] / bounds["bf16"] - 1) < 0.02)
claim("no point lies above its bound", all(largest[name] <= bound + 1e-6 for name, bound in bounds.items()))
claim("int8's largest error is at most a third larger", times["largest_times"] <= 4 / 3, where=TOLD)
claim("in RMS int8 errs more than twice as much as bfloat16", times["rms_times"] > 2, where=TOLD)
more_exact = largest["int8"] < largest["float8"] and rms["int8"] < rms["float8"]
claim("int8 is more exact than float8 by both", more_exact, where=TOLD)
claim("bfloat16's RMS error is 0.0017", round(rms["bf16"], 4) == 0.0017, where=TOLD)
claim("int8's step is that of a largest weight of 2.2 RMS", 2.1 < rms["int8"] * 127 * 12**0.5 < 2.3, where=TOLD)

# %% [markdown]
# A float rounds each number to some digits, so that small weights have small errors. int8 has one step for a whole row,
# whose largest weight sets it. So int8 is as exact as bfloat16 in the largest error alone.
#
# <details><summary>The RMS of int8 is 1/254 for evenly spread weights. Is that the same 1/254?</summary>
#
# No, it is a coincidence. The step is the row's largest weight over 127, and the RMS error is the step over √12.
# Weights that lie evenly between minus and plus the largest have an RMS of the largest over √3. The ratio is
# √3 / (127 √12) = 1/254. Trained weights have more small ones, so theirs is larger.
#
# </details>
#
# *Takeaway: a float's error follows each number, and an integer's follows the largest of its row, so ask which error is
# meant.*
#
# ## 5. What it costs in memory ({minutes} minutes)
#
# ### Exercise 3: one parameter while its unit computes (•, {minutes} minutes)
#
# A parameter of `numbers` numbers was gathered with `sent_bytes` a number, and computes with `compute_bytes` a number.
# How many bytes does a rank hold of the gathered tensors and of the parameter, for int8 in hooks and for plain FSDP?
# Do not count scales, padding and FSDP's communication buffer.
#
# <details><summary>Hint</summary>
#
# The figure of section 3 shows your hooks while the unit computes. Section 2 says where plain FSDP's parameter lies.
#
# </details>


# %%
def held_bytes(numbers: int, sent_bytes: int, compute_bytes: int) -> int:
    ### BEGIN SOLUTION
    if sent_bytes == compute_bytes:
        return numbers * compute_bytes
    return numbers * (sent_bytes + compute_bytes)
    ### END SOLUTION


# %%
checks.held_bytes(held_bytes)

# %% [markdown]
# So a hook that sends less and computes in float32 holds *more* of a computing parameter than plain FSDP does: int8 a
# quarter more. But the **peak** of a rank decides whether a model fits, as in lab 2, and it may lie at another moment:
# while a hook decodes. labkit's int8 hooks run here, and keep each step until decode returns:
#
# ```
# whole = numbers.float()
# product = whole * scales
# return product.to(dtype)  # float32: the same tensor; bfloat16: a new one
# ```
#
# Commit: how many bytes of memory are there for each number of the parameter when decode is about to return, at a later
# gather? Count the gathered int8, `out` and the tensors above, without scales: once for arithmetic in float32, and once
# with int8 hooks on top of a policy of bfloat16.

# %% tags=["commit"]
mine_decode = commit(float32_bytes=None, bfloat16_bytes=None)
### BEGIN SOLUTION
mine_decode = commit(float32_bytes=1 + 4 + 4 + 4, bfloat16_bytes=1 + 2 + 4 + 4 + 2)
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
numbers = -(-DIM // RANKS) * RANKS * 768  # of the first layer, the largest matrix
decoding = {}
for name, label, size in (("float32_bytes", "int8", 4), ("bfloat16_bytes", "both", 2)):
    held = sum(expected[label].get(part, 0) for part in ("unsharded_parameter", "temp"))
    decoding[name] = (held - BATCH * DIM * size) / numbers  # without the gradient of the layer's result

# %% tags=["nbval-ignore-output"]
parts = {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()}
_ = plots.memory_comparison(parts)
print({label: f"measured {size / 1e6:.2f} MB" for label, size in peaks.items()})
pandas.DataFrame({"yours": mine_decode, "by the ledger": decoding}).round(1).astype(object).fillna("no prediction")

# %% [markdown]
# *Peak memory of a rank, from a ledger whose sums are the measured peaks, to the byte. The policy lowers the peak by an
# eighth. int8 hooks on top of the policy raise it again, nearly to plain FSDP's.*

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
claim("0.52 MB and 1.28 MB", [round(each / 1e6, 2) for each in (gathered[0], 13 * numbers)] == [0.52, 1.28], where=TOLD)

# %% [markdown]
# The bars show different moments of the backward pass.
#
# | bar | moment | of gathered parameters and of decoding, a rank holds |
# |---|---|---|
# | plain | an MLP computes its gradients | that MLP in float32, 0.52 MB |
# | policy | an MLP's gradients are reduced, in float32 as always here | nothing: the MLP is freed |
# | int8 and both | the first layer, the largest matrix, is decoded | 13 bytes a number, 1.28 MB |
#
# The chart counts decode's copies as temporary. int8 alone stays within one percent of plain FSDP, helped by smaller
# communication buffers. On top of the policy it costs an eighth, because decode works in float32 whatever the policy
# says. A fused kernel that writes straight into `out` would need no copies.
#
# *Takeaway: fewer bytes on the wire are not fewer bytes in memory. A policy lowers the peak, and hooks that decode in
# float32 on top of it eat its saving.*
#
# ## 6. When does it pay? ({minutes} minutes)
#
# Three things decide whether a gather of fewer bytes saves time.
#
# 1. **Is the gather exposed?** With enough tokens it hides behind arithmetic (lab 2), and there is nothing to save.
# 2. **How slow is the wire?** The bytes that a rank no longer sends are time saved, and more so on a slow wire.
# 3. **How slow is the coding?** Encode goes through a rank's rows and decode through all rows, in every gather, and
#    decode comes right before the arithmetic.
#
# ### Exercise 4: the bandwidth below which it pays (•, {minutes} minutes)
#
# Take an exposed gather of all parameters, which are `bytes_saved` smaller than before. A rank takes `coding_s` seconds
# to encode its rows and to decode all. Below which bandwidth, in bytes a second, does the gather take less time?
#
# <details><summary>Hint</summary>
#
# At that bandwidth the bytes that a rank no longer sends would have taken exactly `coding_s`. In a ring a rank does not
# send all that is gathered: see section 1.
#
# </details>


# %%
def pays_below(bytes_saved: float, coding_s: float, ranks: int) -> float:
    ### BEGIN SOLUTION
    return bytes_saved * (ranks - 1) / ranks / coding_s
    ### END SOLUTION


# %%
checks.pays_below(pays_below)

# %% [markdown]
# **Emulated, on two wires.** Real ranks now train this network with your hooks, and *wait* as long as imagined devices
# and an imagined wire would take (`emulate=`). To encode and decode all parameters once takes 40 ms, and a step gathers
# them twice, with nothing to hide behind. One wire has a quarter of the bandwidth that your function gives, 3.4 MB/s, and the other one four times as
# much, 54 MB/s. Commit: how many ms of a step do your hooks save on each, as a negative number where
# they lose?

# %% tags=["commit"]
mine_saved = commit(narrow_ms=None, wide_ms=None)
### BEGIN SOLUTION
mine_saved = commit(narrow_ms=4 * 80 - 80, wide_ms=80 / 4 - 80)
### END SOLUTION

# %%
units = [SHAPES[:1], SHAPES[1:3], SHAPES[3:5], SHAPES[5:]]
float_bytes, coded_bytes = (sum(theory.gather_bytes(each, RANKS, kind) for each in SHAPES) for kind in ("fp32", "int8"))
coding = {"memory_gb_per_s": (1 + RANKS) * (float_bytes + coded_bytes) / 40e-3 / 1e9}  # so that it takes 40 ms
saved = (RANKS * (float_bytes - coded_bytes), 40e-3, RANKS)
threshold = pays_below(*saved) or theory.pays_below(*saved)
yours = {"extension": "your_hooks", "use": {"add_hooks": send_8bit}}
variants, expected_ms = {}, {}
for wire, times in (("narrow", 1 / 4), ("wide", 4)):
    hardware = labkit.Emulated(gb_per_s=times * threshold / 1e9, forward_ms=10, **coding)
    for name, kind, how in (("float32", "fp32", {"extension": "none"}), ("yours", "int8", yours)):
        variants[f"{name}, {wire} wire"] = how | {"emulate": hardware}
        expected_ms[f"{name}, {wire} wire"] = 1e3 * emulated_steps.extension_step_s(hardware, RANKS, units, kind)

# %% tags=["nbval-ignore-output"]
emulated = labkit.compare("allgather_extensions", variants, rounds=1, **SHORT | {"batch": 4, "steps": 3})
_ = plots.latency_bars(emulated, predicted=expected_ms)
step_ms = {label: result.value("step_ms") for label, result in emulated.items()}
columns = {"yours": mine_saved} | {
    column: {f"{wire}_ms": ms[f"float32, {wire} wire"] - ms[f"yours, {wire} wire"] for wire in ("narrow", "wide")}
    for column, ms in {"theory": expected_ms, "emulated": step_ms}.items()
}
pandas.DataFrame(columns).round().astype(object).fillna("no prediction")

# %% tags=["claim"]
claim("3.4 and 54 MB/s", [round(times * threshold / 1e6, 1) for times in (1 / 4, 4)] == [3.4, 54.0], where=TOLD)
claim("your hooks win on the narrow wire", step_ms["yours, narrow wire"] < 0.9 * step_ms["float32, narrow wire"])
claim("and lose on the wide one", step_ms["yours, wide wire"] > 1.1 * step_ms["float32, wide wire"], where=RANKS <= 4)

# %% [markdown]
# *Emulated steps; dashed, theory. On the narrow wire your hooks win, because the bytes decide. On the wide one they
# lose, because the coding decides.*
#
# A step also reduces its gradients, in float32 with and without hooks, which is why your bar on the narrow wire stays
# long. What a bar has beyond its dashes is mostly this machine's own work.
#
# **On GPUs.** The memory of an H100 moves 3.35 · 10¹² bytes a second. Say that encode reads each of a rank's numbers
# twice, 4 bytes each time, and writes 1 byte, while decode reads 1 byte of each number and writes 2. Then 7 billion
# parameters on 16 GPUs cost 7.44 ms of coding in a gather, if each function is one fused kernel. Against bfloat16,
# which a policy sends, int8 saves 7 GB, so it pays below 882 GB/s. Over one card, at 50 GB/s, it saves nearly half of
# an exposed gather. Inside a host it may pay too, but only where the gather is exposed.
#
# *Takeaway: fewer bytes pay if the gather is exposed and the wire is slower than the coding.*

# %% tags=["claim"]
gpu_coding_s = 7e9 * (9 / 16 + 3) / 3.35e12
claim("7.44 ms of coding", round(1e3 * gpu_coding_s, 2) == 7.44)
claim("it pays below 882 GB/s", round(theory.pays_below(7e9, gpu_coding_s, 16) / 1e9) == 882)
claim("it saves nearly half", 0.4 < 1 - (two_gathers_s[1] / 2 + gpu_coding_s) / (two_gathers_s[2] / 2) < 0.5)

# %% [markdown]
# ## 7. Take away ({minutes} minutes)
#
# 1. FSDP2 asks each shard what to send and what to make of it. Two functions on a plain tensor answer, and Adam never
#    sees what they rounded.
# 2. A hook that decodes must name its memory, or FSDP keeps the whole model on every rank while all losses are right.
# 3. Fewer bytes save time on a slow wire, if the gather is exposed. They save no memory here: hooks on top of a policy
#    eat the policy's saving.
#
# | if | then |
# |---|---|
# | bfloat16 arithmetic is fine | use `MixedPrecisionPolicy`, one line: half the bytes, and the peak falls by an eighth here |
# | float32 arithmetic is needed | write hooks: the peak stays within one percent here |
# | a quarter of the bytes, bfloat16 arithmetic | add hooks to the policy: its peak rises by an eighth here |
# | gathers hide behind arithmetic | leave them as they are, since coding only costs |
# | layers multiply in float8 | take torchao's subclass, whose gathered bytes compute directly |
#
# **Ask yourself**
#
# <details><summary>1. You want bfloat16 on the wire, and bfloat16 arithmetic is fine. Hooks?</summary>
#
# No. `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` is one line.
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
# Not here. The gathered bytes lie beside the decoded parameter, and decode makes float32 copies for a moment. With
# float32 arithmetic the peak stays, and on top of a bfloat16 policy it rises.
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
# **Next**: 03b puts the hooks into a tensor type, `TwoTensor`, which is how torchao does it. Lab 4 puts many small
# messages into few large ones.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("extensions")
