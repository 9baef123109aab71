# %% [markdown]
# # Lab 3. All-gather extensions: change what FSDP sends
#
# In lab 2 you counted it: with FSDP, every parameter crosses the wire in each step, mostly twice. In float32 a number takes
# 4 bytes there. Must it?
#
# It need not. FSDP2 asks each parameter what it wants to send, and what to make of what arrives. In this lab you answer
# both questions. You write a parameter that sends itself twice, then gathers that send a half and a quarter of the bytes.
# You count every byte, and you measure what the missing ones cost in error.
#
# You need lab 2's words: unit, all-gather, reshard. You need no GPU.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from matplotlib import pyplot
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

import labkit
from labkit import doctor, local_ranks, plots
from labkit.checks import extensions as checks
from labkit.config import require
from labkit.tensors import EXTENSIONS, TwoTensor, pad_rows, refill
from labkit.theory import extensions as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network looks at tiles of a photo, 16 × 16 pixels each, and says from which of ten
# regions a tile was cut. It has a linear layer, two multilayer perceptrons of inner width 4 × `DIM`, and a linear layer,
# all without bias. Change the values if you like: the next cell refuses those that cannot work. The text speaks of the values
# below.

# %% tags=["parameters"]
RANKS: int = 2  # ranks that share the parameters
DIM: int = 128  # width of the network
BATCH: int = 64  # tiles of a rank in a step
STEPS: int = 60  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, because="one rank has nothing to gather")
require("DIM", DIM, at_least=128, because="with shorter rows int8's scales weigh more than this lab says")
require("BATCH", BATCH, at_least=1, because="a step needs a tile")
require(
    "STEPS",
    STEPS,
    at_least=20,
    because="the last ten losses are compared, and the network must have learned something before them",
)

SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
SHAPES = [(DIM, 768), *[(4 * DIM, DIM), (DIM, 4 * DIM)] * 2, (10, DIM)]

# %% [markdown]
# ## A tensor that listens
#
# When you write `x @ w`, Python calls PyTorch, autograd notes what it needs for the backward pass, and then the operation
# goes to a kernel. A **tensor subclass** can stand at that last place. Its method `__torch_dispatch__` gets every operation
# that would go to a kernel, and decides what happens.
#
# Here is the smallest one. It holds another tensor, prints what comes, and lets the inner tensor do the work.


# %%
class Listener(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        # to PyTorch a tensor of this shape, but without memory of its own
        listener = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        listener.inner = inner
        return listener

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        print("   ", func)
        plain = tree_map_only(Listener, lambda listener: listener.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Listener, func(*plain[0], **plain[1]))


weight = nn.Parameter(Listener(torch.ones(3, 4)))
x = torch.ones(2, 4)
print("forward")
loss = nn.functional.linear(x, weight).relu().sum()
print("backward")
loss.backward()

# %% [markdown]
# Read the list. `aten` is the name of PyTorch's own operations. `linear` is gone: what arrives is `t` and `mm`, the operations
# that it is made of. The backward pass comes the same way, since autograd works above. So a few lines see all that a training
# step computes. Each `detach` is autograd taking a tensor for itself; the first one comes from `nn.Parameter`.
#
# `TwoTensor` does more than listen. It holds two tensors, and does each operation twice.

# %%
two = TwoTensor(torch.ones(2, 2), torch.full((2, 2), 5.0))
two * 2 + 1

# %% [markdown]
# Nobody needs two copies of a parameter. But it is the smallest type that *must* send something else than FSDP expects:
# two tensors instead of one. Real types do the same. One sends numbers and their scales, another one packed bits.

# %% [markdown]
# ## Two questions
#
# Each parameter is sharded by rows. Before a unit computes, FSDP2 asks the shard of each of its parameters:
#
# 1. **`fsdp_pre_all_gather`**: which tensors shall I send of you? The answer is a tuple of tensors, and anything that you
#    want to be told again later.
# 2. **`fsdp_post_all_gather`**: here are the same tensors with the rows of all ranks. What is the parameter?
#
# FSDP2 counts the arguments of the first hook. There are two forms, and everything else is refused:
#
# ```python
# def fsdp_pre_all_gather(self, mesh): ...
# def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy): ...
# ```
#
# The long form also tells the shape of the whole parameter, the module that holds it, and the dtypes that were asked for.
# A parameter type needs the shape for its padding, as we shall see.
#
# Who holds which memory? For a `TwoTensor` it looks like this.

# %%
ax = plots.hook_memory("TwoTensor")

# %% [markdown]
# *Time goes from left to right. Hatched tensors lie in memory that belongs to another row. Only the gathered tensors
# are new memory, and they go after use.*
#
# Three things decide whether a hook is right. The first two are in this figure.
#
# **The second call.** Autograd keeps the parameter of the first gather for the backward pass. FSDP2 frees its memory after
# the forward pass, but the tensor object stays. At the next gather the *same* object must come back to life. So from the
# second call on, FSDP2 passes it as `out`, and the hook returns nothing. It fills `out`, if that is needed at all.
#
# **What must be freed.** FSDP2 knows the tensors that it gathered, and frees them. It cannot know what the hook allocated.
# So the first call returns two things: the parameter, and the tensors whose memory FSDP2 shall free after use and allocate
# again before the next call.
#
# **Casting.** With mixed precision a unit computes in another dtype, `param_dtype`. Then the gathered tensors are not the
# parameter. A cast makes new memory, which must be named, and `out` must be filled at every later call.

# %% [markdown]
# ### Exercise 1: build the parameter
#
# Write the second hook of `TwoTensor`; `self` is not needed. `all_gather_outputs` are all rows of a and all rows of b, with
# padding at the end. `metadata` is what the first hook wanted to be told again: nothing here.
#
# Two helpers. A tensor's `.to(dtype)` gives the tensor itself if it has that dtype already. `refill(tensor, gathered)`
# copies gathered rows, without padding, into a tensor that autograd may have saved.
#
# To name a gathered tensor as well does no harm: FSDP2 frees it anyway.
#
# Your hook is put into a model that trains on two real ranks, in float32 and cast to bfloat16. Your function runs in other
# processes. Whatever it uses of this notebook is copied there: imports, other functions, values.


# %%
def post_all_gather(all_gather_outputs, metadata, param_dtype, *, out=None):
    ### BEGIN SOLUTION
    a, b = all_gather_outputs
    if out is None:
        whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    if a.dtype != param_dtype:
        refill(out.a, a)
        refill(out.b, b)
    ### END SOLUTION


# %%
checks.post_all_gather(post_all_gather)

# %% [markdown]
# Does such a model train as it should? Predict: a `TwoTensor` whose halves are equal computes what a plain parameter
# computes, twice. Nothing is rounded. So the difference is not small, it is 0. We compare every loss, gradient and shard of
# ten steps with plain training on one device, with resharding and without. Two ranks do it: to halve a sum is exact, while a
# third of it would be rounded.

# %%
parity = labkit.run("allgather_extensions", nproc=2, check="parity", steps=10)
compared, difference = parity.value("compared"), parity.value("max_rel_error")
print(f"{compared:.0f} tensors compared, largest difference {difference}")

# %% [markdown]
# ## Rows that do not divide
#
# An all-gather wants the same number of bytes from each rank. Three rows on two ranks do not divide, so the shorter shard is
# filled up with rows of zeros. The first hook does that, with `pad_rows`. So it needs the shape of the whole parameter.

# %%
weight = torch.arange(1.0, 13.0).view(3, 4)
held = local_ranks.shards_by_rank(weight, (2,), [Shard(0)])
sent = {rank: pad_rows(torch.from_numpy(rows), 2).numpy() for rank, rows in held.items()}
figure, panels = pyplot.subplots(1, 4, figsize=(10, 2.6), layout="constrained")
plots.shards(weight.numpy(), {"held": held}, axes=panels[:2])
_ = plots.shards(pad_rows(weight, 4).numpy(), {"sent": sent}, axes=panels[2:])
panels[2].set_title("the matrix, padded", fontsize=10, loc="left")

# %% [markdown]
# *Three rows on two ranks. Rank 1 holds one row and sends two, the last one of zeros.*
#
# The zeros end up below the last row of the whole parameter. FSDP2 lays a view of the right shape over what the hook built
# and so cuts them off. In the bytes they count.
#
# ### Exercise 2: bytes of an all-gather
#
# How many bytes does one rank hand to one all-gather of a parameter [rows, columns]?


# %%
def gather_bytes(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:
    ### BEGIN SOLUTION
    longest = -(-rows // ranks)  # rounded up
    return longest * columns * bytes_per_number
    ### END SOLUTION


# %%
checks.uneven_bytes(gather_bytes)

# %% [markdown]
# ## Fewer bytes
#
# Adam's small updates need float32: a step of one part in a thousand would vanish in a type with two or three digits. But
# they happen in the shard, on the rank that owns it. What is gathered is only computed with, and forgotten. It may be
# rounded.
#
# labkit puts the two hooks onto plain parameters. You give an *encode*, from the rows of this rank to the tensors that are
# sent, and a *decode*, from all that arrived to the parameter.
#
# An 8-bit integer holds whole numbers from -127 to 127. So each row gets a **scale**, its largest absolute value over 127.
# The row is divided by it and rounded. The scales are sent as a second tensor.

# %%
encode, decode = EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode
rows = torch.tensor([[0.5, -0.25, 0.1], [0.002, -0.004, 0.0]])
numbers, scales = encode(rows)
print(numbers, scales, decode((numbers, scales), torch.float32), sep="\n")

# %% [markdown]
# Row 2 is 125 times smaller than row 1 and just as exact, since it has a scale of its own. The largest error is half
# a step, the row's largest value over 254.
#
# Who holds which memory now?

# %%
ax = plots.hook_memory("int8")

# %% [markdown]
# *No tensor shares another's memory any more. What is sent, what is gathered and what computes are three different things.*
#
# Mind what this figure does not promise. The wire carries a quarter of the bytes, but a rank holds *more* while it
# computes: the parameter in float32, and the gathered numbers beside it. Compression saves traffic, not memory.

# %% [markdown]
# ### Exercise 3: the leak
#
# Here is a second hook for what the int8 gather sends. It trains well, and every loss is right. Still something is wrong.


# %%
def leaky(all_gather_outputs, metadata, param_dtype, *, out=None):
    numbers, scales = all_gather_outputs
    whole = (numbers.float() * scales).to(param_dtype)
    if out is None:
        return whole, (numbers, scales)
    refill(out, whole)


# %%
checks.mended(leaky)

# %% [markdown]
# The check gathers each of the three units once, frees it, and counts what is left. After the last unit the whole model
# lies in memory, on every rank. Nobody gets an error message. FSDP is on, and its savings are gone.
#
# Write it again, without the leak. Your function runs in other processes, as before.


# %%
def mended(all_gather_outputs, metadata, param_dtype, *, out=None):
    ### BEGIN SOLUTION
    numbers, scales = all_gather_outputs
    whole = (numbers.float() * scales).to(param_dtype)
    if out is None:
        return whole, (whole,)  # FSDP frees the gathered tensors anyway
    refill(out, whole)
    ### END SOLUTION


# %%
checks.mended(mended)

# %% [markdown]
# ### Exercise 4: half of the bytes
#
# Gather in bfloat16, which has 2 bytes a number. `encode_bf16` gets this rank's rows in float32 and returns a tuple of
# tensors. `decode_bf16` gets the same tensors with all rows, and returns the parameter in `dtype`. Both run in other processes,
# as before.


# %%
def encode_bf16(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ### BEGIN SOLUTION
    return (shard.bfloat16(),)
    ### END SOLUTION


def decode_bf16(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    ### BEGIN SOLUTION
    return gathered[0].to(dtype)
    ### END SOLUTION


# %%
checks.bf16_gather(encode_bf16, decode_bf16)

# %% [markdown]
# The error is what a type with 7 bits of **mantissa** must have. These are the binary digits behind the first one. Rounding
# changes each number by up to 2 ** -8 of it, so by at most 0.0039 of the largest.
#
# ### Exercise 5: halve them again
#
# Send at most 0.26 of float32's bytes. No weight may be off by more than one part in 16 of the largest weight of its
# parameter. The check has a parameter of tiny weights and a row of zeros. You may use `torch.int8` or
# `torch.float8_e4m3fn`, and one scale or many.
#
# On CPU ranks float8 does not travel alone: gloo does not know the type. With a tensor of another type beside it, FSDP2
# sends both as plain bytes. float8 reaches 448.
#
# Everything that is sent needs a first dimension: one scale is `.reshape(1)`, and arrives as one for each rank.


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
checks.eight_bit_gather(encode_8bit, decode_8bit)

# %% [markdown]
# ## What it costs
#
# Now the network of this notebook learns its photo four times, from the same start. Only what is gathered differs: float32,
# bfloat16, float8 with a scale for each shard, int8 with a scale for each row.
#
# Predict first. A step gathers each parameter twice. The bytes follow from the shapes alone.

# %%
NAMES = ("fp32", "bf16", "float8", "int8")
predicted = {name: theory.step_bytes(SHAPES, RANKS, name) for name in NAMES}
runs = {name: labkit.run("allgather_extensions", extension=name, **SETUP) for name in NAMES}
tables = [plots.table(runs[name], {"all_gather_bytes": predicted[name]}) for name in NAMES]
wire = pandas.concat(tables, keys=NAMES)
wire

# %% [markdown]
# Equal to the byte. bfloat16 sends exactly a half. The 8-bit gathers send a little more than a quarter, because of their
# scales: float8 48 bytes more, int8 5,672 more. A `TwoTensor` would send twice float32's.
#
# And the error? Theory gives the largest one. A float rounds each number to some digits, so large and small weights keep
# the same number of them. int8 rounds to steps of equal size, which suits the large weights of a row better.

# %%
bounds = {name: theory.rounding_error(name) for name in NAMES}
ax = plots.bytes_against_error(runs, bounds=bounds)

# %% [markdown]
# *One point a run: the further left, the fewer bytes; the lower, the more exact. No point lies above its line. With as many
# bytes, int8 is more exact than float8 here, and as exact as bfloat16.*
#
# float8 has 3 bits of mantissa, so a weight may be off by a sixteenth. int8 pays with its scales: one for each row instead
# of one for each shard.
#
# Does the network notice?

# %%
ax = plots.loss(runs)

# %% [markdown]
# *Loss by step, mean of the ranks. The four curves lie close together; a peak is a batch that is hard for all of them.*


# %%
def last_loss(result: labkit.RunResult) -> float:
    losses = result.frame.query("kind == 'scalar' and name == 'loss' and step >= 0")
    return losses[losses["step"] > STEPS - 10]["value"].mean()


for name, percent in (("bf16", 2), ("float8", 10), ("int8", 10)):
    off = abs(last_loss(runs[name]) / last_loss(runs["fp32"]) - 1)
    print(f"{name}: last ten losses within {percent} % of float32's: {off <= percent / 100}")

# %% [markdown]
# The numbers that the optimizer keeps and updates are float32 in all four runs. Only what computes is rounded, and anew in
# each step.
#
# ## What to know before you use it
#
# - Whatever replaces a parameter's local tensor loses hooks that were put onto it: `to_empty`, moving the model,
#   `load_state_dict(assign=True)`. A parameter *type* such as `TwoTensor` keeps them.
# - Gradients are not compressed. The reduce-scatter carries float32, or what the unit's `reduce_dtype` says.
# - One rank has nothing to gather. The program wants at least two.
# - `torch.compile` takes a `TwoTensor` apart and builds it again, since the type says how (`__tensor_flatten__`). Compile
#   each layer by itself, so that FSDP2's hooks stay outside: `compile=True` does that in this lab's program.
#
# ## What to expect on GPUs
#
# - Bytes and errors should be the same: they do not depend on speed. No GPU run is recorded yet.
# - Encode and decode are kernels of their own, between the messages. Fuse them, or what you save on the wire is lost there.
# - torchao has a float8 parameter type of this kind, for layers that also multiply in float8. Then nothing is decoded.

# %% [markdown]
# ## Summary
#
# Predicted beside measured, in bytes that one rank hands to the all-gathers of a step.

# %% tags=["summary"]
summary = wire.droplevel(1)
summary["part of fp32"] = (summary["measured"] / summary.loc["fp32", "measured"]).round(4)
summary["error at most"] = pandas.Series(bounds).round(4)
errors = {name: result.value("weight_error") for name, result in runs.items()}
summary["error is within"] = [errors[name] <= bounds[name] + 1e-6 for name in NAMES]
summary

# %% [markdown]
# ## Where to go from here
#
# - All extensions at once: `labkit.run("allgather_extensions", nproc=2, check="wire")`.
# - Built without memory: `labkit.run("allgather_extensions", nproc=2, check="meta")` shards a model on the meta device (shapes
#   without memory) first and fills it afterwards.
# - Read `labkit/tensors/two_tensor.py`, then `labkit/tensors/quantised.py`. The hooks are a few lines in each.
# - Could you send 4 bits? Two numbers fit into a byte. What error do you predict?
