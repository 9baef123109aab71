# %% [markdown]
# # Lab 3. All-gather extensions: change what FSDP sends
#
# With FSDP every parameter crosses the wire in each step, mostly twice. FSDP2 asks each parameter what it wants to send,
# and what to make of what arrives. In this lab you answer both questions.
#
# After this lab you can
#
# - write a tensor subclass with FSDP2's two hooks, and prove on real ranks that it trains as plain parameters do;
# - send a quarter of the bytes, and say what that costs in error, in memory and in time;
# - find a hook that leaks memory while every loss is right;
# - say when one line of PyTorch is enough, and when fewer bytes save time at all.
#
# You need Lab 2's words: unit, all-gather, reduce-scatter, resharding (the gathered parameters are freed). You need no
# GPU. The sections marked **core** take about 95 minutes, the others are optional. Exercises have one to three dots,
# from easy (•) to hard (•••). Where a cell says `commit`, put down your own numbers before you launch. Leave None where
# you have none.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from matplotlib import pyplot
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map, tree_map_only

import labkit
from labkit import doctor, local_ranks, plots, tensors, widgets
from labkit.checks import extensions as checks
from labkit.checks.claims import claim, commit
from labkit.config import require
from labkit.tensors import EXTENSIONS, pad_rows, refill
from labkit.theory import extensions as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network looks at tiles of a photo, 16 × 16 pixels each, and says from which of
# ten regions a tile was cut. It has a linear layer, two multilayer perceptrons of inner width 4 × `DIM`, and a linear
# layer, all without bias. These four are its units. You may change them; the next cell refuses what cannot work. The
# text speaks of these; cells say what yours change.

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
    "STEPS",
    STEPS,
    at_least=20,
    because="the last ten losses are compared, and the network must have learned something before them",
)
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
SHORT = SETUP | {"steps": 3}
TOLD = (RANKS, DIM, BATCH, STEPS) == (2, 128, 64, 60)  # the values that the text speaks of
SHAPES = [(DIM, 768), *[(4 * DIM, DIM), (DIM, 4 * DIM)] * 2, (10, DIM)]
NUMBERS = sum(rows * columns for rows, columns in SHAPES)

# %% [markdown]
# ## 1. Why: the slow wire
#
# **core, 8 minutes**
#
# Take "Your turn" of lab 2's section 8 again. A model of 7 billion parameters is sharded over two hosts of 8 GPUs, and
# each host has one network card of 50 GB/s. In bfloat16 the parameters are 14 GB. A step moves them over the wire three
# times: two all-gathers of all parameters and a reduce-scatter of all gradients. Each such pass sends 15/16 of 14 GB
# from a rank.

# %%
passes = {"bfloat16": 2, "int8": 1}
for name, number_bytes in passes.items():
    seconds = 2 * number_bytes * 7e9 * 15 / 16 / 50e9
    print(f"two gathers in {name}: {seconds:.2f} s of every step")

# %% [markdown]
# If the batch is too small to hide half a second behind arithmetic, the GPUs wait. You can buy network cards. Or you can
# send fewer bytes.
#
# Why may a gathered parameter be rounded at all? The optimizer's small updates need float32: a step of one part in a
# thousand vanishes in bfloat16, which has about two and a half decimal digits.

# %%
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight += 1e-3
    print(f"1 + 1000 × 0.001 in {str(dtype).removeprefix('torch.')}: {weight:.3f}")

# %% [markdown]
# But with FSDP updates happen in the shard, on the rank that owns it, and the shard stays in float32. What is gathered is
# only computed with, and forgotten. Its rounding errors do not add up over the steps: each step rounds the exact shard
# anew.
#
# ### Rows that do not divide
#
# FSDP2 cuts a parameter by rows. An all-gather wants the same number of bytes from each rank. Three rows on two ranks do
# not divide, so the shorter shard is filled up with rows of zeros, here by `pad_rows`.

# %%
weight = torch.arange(1.0, 13.0).view(3, 4)
held = local_ranks.shards_by_rank(weight, (2,), [Shard(0)])
sent = {rank: pad_rows(torch.from_numpy(rows), 2).numpy() for rank, rows in held.items()}
_ = plots.shard_padding(weight.numpy(), held, sent)

# %% [markdown]
# *Three rows on two ranks. Rank 1 holds one row and sends two, the last one of zeros.*

# %% tags=["claim"]
claim("rank 1 holds one row and sends two", (len(held[1]), len(sent[1])) == (1, 2))
claim("the last one is of zeros", not sent[1][1].any() and bool(sent[1][0].all()))

# %% [markdown]
# The zeros end up below the last row of the whole parameter, where FSDP2 cuts them off. In the bytes they count.
#
# ### Exercise 1: bytes of an all-gather (•, 4 minutes)
#
# How many bytes does one rank **hand to** one all-gather of a parameter [rows, columns]?
#
# <details><summary>Hint 1</summary>
#
# A rank hands over its own rows. How many are these on the rank that has most of them?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `-(-rows // ranks)` is `rows / ranks`, rounded up.
#
# </details>


# %%
def gather_bytes(rows: int, columns: int, ranks: int, bytes_per_number: int) -> int:
    ### BEGIN SOLUTION
    longest = -(-rows // ranks)  # rounded up
    return longest * columns * bytes_per_number
    ### END SOLUTION


# %%
checks.gather_bytes(gather_bytes)

# %% [markdown]
# ## 2. The code you would write
#
# **core, 6 minutes**
#
# Begin with what costs one line. A `MixedPrecisionPolicy` says in which dtype a unit computes, `param_dtype`. FSDP2 then
# casts the shard before the all-gather, so fewer bytes travel. `reduce_dtype` is that of the gradients' reduce-scatter.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # the one line
for unit in (*model, model):
    fully_shard(unit, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.Adam(model.parameters())

torch.manual_seed(dist.get_rank())
samples = torch.randn(32, 64)  # on GPUs: device="cuda"
for _ in range(5):
    optimizer.zero_grad()
    output = model(samples)
    (output - samples).square().mean().backward()
    optimizer.step()

print(f"the shard is {model[0][0].weight.dtype}, the unit computed in {output.dtype}")
dist.destroy_process_group()

# %% [markdown]
# Now measured, with this notebook's network: once without a policy, once with this one. `NUMBERS` is how many numbers the
# parameters have, 361,728. Commit to what a rank hands to its calls in one step **with** the policy. Remember Lab 2: each
# unit is gathered twice and reduced once.

# %% tags=["commit"]
mine = commit(
    all_gather_bytes=lambda: 2 * sum(gather_bytes(rows, columns, RANKS, 2) for rows, columns in SHAPES),
    reduce_scatter_bytes=None,
)
### BEGIN SOLUTION
mine |= commit(reduce_scatter_bytes=sum(4 * RANKS * -(-rows // RANKS) * columns for rows, columns in SHAPES))
### END SOLUTION

# %%
plain = labkit.run("allgather_extensions", extension="none", **SETUP)
policy = labkit.run("allgather_extensions", extension="none", policy="bf16", **SETUP)
gradients = RANKS * sum(theory.gather_bytes(shape, RANKS, "fp32") for shape in SHAPES)
predicted = {"all_gather_bytes": theory.step_gather_bytes(SHAPES, RANKS, "bf16"), "reduce_scatter_bytes": gradients}
plots.comparison_table(policy, predicted, yours=mine)

# %% [markdown]
# *The all-gathers were handed half the bytes that they get without the policy. The reduce-scatter was handed as many as
# without: gradients are reduced in float32.*

# %% tags=["claim"]
claim(
    "the all-gathers were handed half the bytes",
    2 * policy.value("all_gather_bytes") == plain.value("all_gather_bytes"),
)
claim(
    "the reduce-scatter was handed as many", policy.value("reduce_scatter_bytes") == plain.value("reduce_scatter_bytes")
)

# %% [markdown]
# ## 3. Why hooks, when one line halves the bytes?
#
# **core, 3 minutes**
#
# If bfloat16 is what you want, use the policy. Of what is gathered a policy knows one thing, a dtype, and uses it for
# two: what is sent, and what is computed with. Four wishes are beyond it.
#
# | wish | policy | hooks |
# |---|---|---|
# | bfloat16 on the wire and in arithmetic | one line | possible, more work |
# | bfloat16 on the wire, float32 in arithmetic | no | encode and decode |
# | int8 on the wire: numbers **and** their scales, two tensors for one parameter | no: a cast knows no scales | send both |
# | a parameter that computes directly in the gathered memory, such as float8 with its scale | no | share that memory |
# | decide what is freed after use, and what is filled again | no | name it |
#
# Hooks are two functions of a parameter. FSDP2 calls them around its all-gather. So a parameter must be a tensor with
# functions of its own. Let us make one.
#
# ## 4. A tensor that listens
#
# **core, 15 minutes**
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
        listener.inner = inner.detach()
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
# Read the list. `aten` is the name of PyTorch's own operations. `linear` is gone: what arrives is `t` and `mm`, the
# operations that it is made of. The backward pass comes the same way, since autograd works above. So a few lines see all
# that a training step computes. Each `detach` is autograd taking a tensor for itself; the first one comes from
# `nn.Parameter`.
#
# `tree_map_only(kind, f, what)` goes through tuples, lists and dicts, and replaces every value of that kind by `f` of it.
# `Listener` uses it twice: to take the inner tensors out of the arguments, and to wrap every tensor of the result.
#
# ### Your own: TwoTensor
#
# You now write a tensor that holds two, `a` and `b`, and does every operation with each. Nobody needs two copies of a
# parameter. But it is the smallest type that *must* send something else than FSDP expects: two tensors instead of one.
# Real types do the same. One sends numbers and their scales, another one packed bits.
#
# You write its methods one by one, as functions. Then a class is made of them.
#
# ### Exercise 2: a tensor that holds two (•, 5 minutes)
#
# `a` and `b` are tensors of equal shape. Return a tensor of class `cls` that looks like `a`: the same shape, strides, dtype
# and device. Its attributes `.a` and `.b` are the two, in the memory that they have (no copies), and detached: autograd
# follows the wrapper, not what it holds.
#
# <details><summary>Hint 1</summary>
#
# `Listener` has the three lines. It leaves out the strides and the device.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=…, device=…)`
#
# </details>


# %%
def new_two(cls: type, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ### BEGIN SOLUTION
    two = torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)
    two.a, two.b = a.detach(), b.detach()
    return two
    ### END SOLUTION


# %%
looks = checks.new_two(new_two)
looks

# %% [markdown]
# ### Exercise 3: every operation twice (••, 8 minutes)
#
# `func` is an operation, called with `args` and `kwargs`. Among these are instances of `cls`, alone or in lists, and plain
# tensors and numbers. Call `func` with the halves `b` in place of these instances, and with the halves `a`. Make a `cls`
# of each tensor of the two results: `cls(x, y)` calls your `new_two`. What is no tensor stays as it is.
#
# Call it with `b` first. FSDP2 copies gradients into a plain buffer through `out=`. Both calls write there, and the
# second one's numbers stay. They should be those of `a`.
#
# <details><summary>Hint 1</summary>
#
# `args_a, kwargs_a = tree_map_only(cls, lambda two: two.a, (args, kwargs or {}))`, and the same for b.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `tree_map(f, first, second)` goes through two structures side by side and gives `f(x, y)` in their place.
#
# </details>


# %%
def dispatch(cls: type, func, types, args=(), kwargs=None):
    ### BEGIN SOLUTION
    args_a, kwargs_a = tree_map_only(cls, lambda two: two.a, (args, kwargs or {}))
    args_b, kwargs_b = tree_map_only(cls, lambda two: two.b, (args, kwargs or {}))
    b = func(*args_b, **kwargs_b)
    a = func(*args_a, **kwargs_a)
    return tree_map(lambda x, y: cls(x, y) if isinstance(x, torch.Tensor) else x, a, b)
    ### END SOLUTION


# %%
twice = checks.dispatch(dispatch)
twice

# %% [markdown]
# labkit's own (`labkit/tensors/two_tensor.py`) does two things more. It keeps views what they are, by PyTorch's
# `return_and_correct_aliasing`. And it refuses an operation such as `plain.add_(two)`, which would add both halves.

# %% [markdown]
# ## 5. Build it: two hooks
#
# **core, 16 minutes**
#
# Before a unit computes, FSDP2 asks the shard of each of its parameters two questions:
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
# The long form also tells the shape of the whole parameter, `outer_size`, the module that holds it, and the policy.
# `mesh.size()` is the number of ranks.
#
# ### Exercise 4: what to send (•, 4 minutes)
#
# Send both halves, padded to the rows of the rank with most of them. The second part of the answer is None: there is
# nothing to be told again. `pad_rows(tensor, rows)` adds rows of zeros.
#
# <details><summary>Hint 1</summary>
#
# Exercise 1 has the number of rows. Here the whole parameter has `outer_size[0]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `return (pad_rows(self.a, rows), …), None`
#
# </details>


# %%
def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
    ### BEGIN SOLUTION
    rows = -(-outer_size[0] // mesh.size())
    return (pad_rows(self.a, rows), pad_rows(self.b, rows)), None
    ### END SOLUTION


# %%
sends = checks.pre_all_gather(pre_all_gather)
sends

# %% [markdown]
# ### Who holds which memory?

# %%
_ = plots.hook_memory("TwoTensor")

# %% [markdown]
# *Time goes from left to right. Hatched tensors lie in memory that belongs to another row. Only the gathered tensors
# are new memory (where rows must be padded, what is sent as well), and they go after use. FSDP2's communication buffer,
# of lab 2, is not drawn.*
#
# Look at the parameter in the right half. Autograd kept the parameter of the first gather for the backward pass. FSDP2
# freed its memory after the forward pass, but the tensor object stays. At the next gather the *same* object must come back
# to life.
#
# So from the second call on, FSDP2 passes that object as `out`, and the hook returns nothing. Before it calls, FSDP2
# allocates the memory again and gathers into it. If the parameter lies in the gathered memory, nothing is left to do.
#
# And what must be freed? FSDP2 knows the tensors that it gathered. It cannot know what a hook allocated. So the first call
# returns two things: the parameter, and a tuple of the tensors whose memory FSDP2 shall free after use and allocate again
# before the next call. To name a gathered tensor as well does no harm.
#
# ### Exercise 5: what is the parameter? (••, 6 minutes)
#
# Write the second hook. `all_gather_outputs` are all rows of a and all rows of b, padding included; leave that on. The
# parameter computes in its own dtype here, so nothing is cast. `type(self)` is your class: `type(self)(x, y)` makes one.
#
# Your hook is put into a model that trains on two real ranks, then on three. Your function runs in other processes. Whatever it uses of
# this notebook is copied there: imports, other functions, values.
#
# <details><summary>Hint 1</summary>
#
# On the first call (`out is None`), put the parameter around the gathered tensors. Do not copy.
#
# </details>
# <details><summary>Hint 2</summary>
#
# On later calls the gathered tensors are the memory of `out.a` and `out.b`, and they are filled already.
#
# </details>


# %%
def post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    ### BEGIN SOLUTION
    a, b = all_gather_outputs
    if out is None:
        return type(self)(a, b), (a, b)
    ### END SOLUTION


# %%
becomes = checks.post_all_gather(post_all_gather)
becomes

# %% [markdown]
# ### Use it
#
# A class of your four functions. `__tensor_flatten__` names the inner tensors for others: `torch.compile` takes a tensor
# apart so, and labkit looks inside. While one of the four is open, labkit's own class stands in for yours.


# %%
class TwoTensor(torch.Tensor):
    __new__ = staticmethod(new_two)
    __torch_dispatch__ = classmethod(dispatch)
    fsdp_pre_all_gather = pre_all_gather
    fsdp_post_all_gather = post_all_gather

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return TwoTensor(inner["a"], inner["b"])


done = all(verdict.ok for verdict in (looks, twice, sends, becomes))
working = TwoTensor if done else tensors.TwoTensor

# %% [markdown]
# Every parameter of a real network becomes such a tensor. `labkit.check` trains ten steps with Adam, with resharding and
# without. Beside it, each rank trains a whole, plain copy of the network on its own samples and averages its gradients by
# hand. Every loss, gradient and shard is held against that.
#
# Predict the largest difference. A `TwoTensor` whose halves are equal computes what a plain parameter computes, twice.
# Nothing is rounded. Two ranks do it: to halve a sum is exact, while a third of it would be rounded.


# %%
def in_both_halves(kind: type) -> dict[str, object]:
    """What ``use`` takes, for parameters of this type whose two halves are the weight."""

    def parameter(weight: torch.Tensor) -> torch.Tensor:
        return kind(weight, weight.clone())

    return {"parameter": parameter}


PARITY = {"nproc": 2, "extension": "your_type", "steps": 10}
found = labkit.check("allgather_extensions", use=in_both_halves(working), **PARITY)
print(found.verdict_text)

# %% [markdown]
# *Not small, but 0.*

# %% tags=["claim"]
claim("the difference is 0", found.value("max_rel_error") == 0)

# %% [markdown]
# Now it trains the network of this notebook. Commit: what does a rank hand to the all-gathers of one step, and how many of
# them are there, for four units?

# %% tags=["commit"]
mine = commit(all_gather_bytes=None, all_gather_count=None)
### BEGIN SOLUTION
mine = commit(
    all_gather_bytes=lambda: 2 * 2 * sum(gather_bytes(rows, columns, RANKS, 4) for rows, columns in SHAPES),
    all_gather_count=8,
)
### END SOLUTION


# %%
def doubled(weight: torch.Tensor) -> torch.Tensor:
    return working(weight, weight.clone())


two = labkit.run("allgather_extensions", extension="your_type", use={"parameter": doubled}, **SHORT)
expected = {"all_gather_bytes": theory.step_gather_bytes(SHAPES, RANKS, "two_tensor"), "all_gather_count": 8}
plots.comparison_table(two, expected, yours=mine)

# %% [markdown]
# *Twice the bytes of plain parameters, in as many calls: a unit's tensors travel together.*

# %% tags=["claim"]
claim("twice the bytes", two.value("all_gather_bytes") == 2 * plain.value("all_gather_bytes"))
claim("in as many calls", two.value("all_gather_count") == plain.value("all_gather_count"))

# %% [markdown]
# ## 6. Break it
#
# **core, 6 minutes**
#
# ### A hook that remembers (••, 3 minutes)
#
# To encode a shard takes time. Somebody saves it: the hook keeps what it sent at the first call, and sends it again. Write
# that mutant of your `pre_all_gather`. You may set an attribute, such as `self.kept`; the shard's object stays the same.
# Cloning matters: `pad_rows` gives the shard itself where nothing is to be padded.


# %%
def remembering(self, mesh, outer_size, outer_stride, module, mp_policy):
    ### BEGIN SOLUTION
    if not hasattr(self, "kept"):
        rows = -(-outer_size[0] // mesh.size())
        self.kept = pad_rows(self.a, rows).clone(), pad_rows(self.b, rows).clone()
    return self.kept, None
    ### END SOLUTION


class Remembering(working):
    fsdp_pre_all_gather = remembering


try:
    print(labkit.check("allgather_extensions", use=in_both_halves(Remembering), **PARITY).verdict_text)
except labkit.RankFailed as failure:  # the hook raises, or returns nothing yet
    print("not compared:", failure.exc_type)

# %% [markdown]
# Parity catches it, from the second step on: the optimizer updates the shards, and the units compute with stale parameters.
# There is no error message. The loss even changes, since every step has other samples.
#
# ### A test that cannot fail
#
# Now another mistake: this hook sends `a` twice. Before you run it: what will parity say?


# %%
def only_a(self, mesh, outer_size, outer_stride, module, mp_policy):
    rows = -(-outer_size[0] // mesh.size())
    return (pad_rows(self.a, rows), pad_rows(self.a, rows)), None


class OnlyA(working):
    fsdp_pre_all_gather = only_a


missed = labkit.check("allgather_extensions", use=in_both_halves(OnlyA), **PARITY)
print(missed.verdict_text)

# %% [markdown]
# *Parity passes.* Its two halves are equal, so a test with them cannot see which one travelled. A test of something that
# tells two things apart needs two things that differ. The check of exercise 4 uses halves of opposite sign. The next
# verdict is red, as it should be.

# %% tags=["claim"]
claim("parity passes where one half is never sent", missed.ok)

# %%
checks.pre_all_gather(only_a)

# %% [markdown]
# ## 7. Fewer bytes
#
# **core, 17 minutes**
#
# For real use nothing needs to be held twice. The parameter stays a plain tensor, and labkit puts the two hooks onto it.
# You give an *encode*, from the rows of this rank to the tensors that are sent, and a *decode*, from all that arrived to
# the parameter. The rows that encode gets are padded already, and the matrices of this lab always have two dims.
#
# ### Exercise 6: bfloat16 on the wire, float32 in arithmetic (optional, •, 4 minutes)
#
# This is the first wish that no policy grants. `encode_bf16` gets this rank's rows in float32 and returns a tuple of tensors.
# `decode_bf16` gets the same tensors with all rows, and returns the parameter in `dtype`, contiguous. Both run in other
# processes, as before.
#
# <details><summary>Hint</summary>
#
# A tuple of one: `(x,)`. A tensor's `.to(dtype)` gives the tensor itself if it has that dtype already.
#
# </details>


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
# bfloat16 has 7 bits of **mantissa**, the binary digits behind the first one. So rounding changes each number by up to
# 2⁻⁸ of it, 0.4 %.
#
# ### int8 and scales
#
# An 8-bit integer holds whole numbers, here from -127 to 127. So each row gets a **scale**, its largest absolute value over
# 127. The row is divided by it and rounded. The scales are sent as a second tensor.

# %%
encode, decode = EXTENSIONS["int8"].encode, EXTENSIONS["int8"].decode
rows = torch.tensor([[0.5, -0.25, 0.1], [0.002, -0.004, 0.0]])
numbers, scales = encode(rows)
print(numbers, scales, decode((numbers, scales), torch.float32), sep="\n")

# %% [markdown]
# Row 2 is 125 times smaller than row 1 and just as exact, since it has a scale of its own. The largest error is half a step,
# the row's largest value over 254.
#
# Who holds which memory now?

# %%
_ = plots.hook_memory("int8")

# %% [markdown]
# *No tensor shares another's memory any more. What is sent, what is gathered and what computes are three different things.*
#
# In the right half, `out` has to be filled at each later call: its memory is new, with nothing useful in it.
# `refill(out, rows)` copies gathered rows, without padding, into a parameter that autograd may have saved. A plain `copy_`
# would tell autograd that a saved tensor has changed, and the backward pass would refuse.
#
# ### Exercise 7: the leak (••, 7 minutes)
#
# Here is a second hook for what the int8 gather sends. It trains well, and every loss is right. Still something is wrong.
# The next verdict is red.


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
# The check gathers each of the three units of a model once, frees it, and counts what is left. After the last unit the whole
# model lies in memory, on every rank. Nobody gets an error message. FSDP is on, and its savings are gone.
#
# Write it again, without the leak: in float32, and where `param_dtype` is bfloat16. Your function runs in other processes,
# as before.
#
# <details><summary>Hint 1</summary>
#
# Look at the figure. Which row's memory did FSDP2 not allocate itself?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The second part of the answer must be a tuple of the tensors that the hook made and that live on. Mind casting: of
# `(x * y).to(dtype)` only the last tensor lives on.
#
# </details>


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
# ### Exercise 8: a quarter of the bytes (••, 9 minutes)
#
# Send at most 0.26 of float32's bytes. No weight may be off by more than one part in 16 of the largest weight of its
# parameter. The check has a parameter of tiny weights, one with a row of zeros, and one whose first half of rows is three
# times larger than the second. You may use `torch.int8` or `torch.float8_e4m3fn`, which reaches 448, and one scale or many.
#
# Two rules of the road. Everything that is sent needs a first dimension: one scale is `.reshape(1)`, and arrives as one for
# each rank. And on CPU ranks float8 does not travel alone: gloo does not know the type. With a tensor of another type beside
# it, FSDP2 sends both as plain bytes.
#
# <details><summary>Hint 1</summary>
#
# A scale for each row: `shard.abs().amax(dim=1, keepdim=True)`, over the largest number of the type.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A row of zeros has the scale 0. `clamp(min=1e-30)` lets you divide by it.
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
eight = checks.eight_bit_gather(encode_8bit, decode_8bit)
eight

# %% [markdown]
# Use it: the network of this notebook trains with your two functions, or with labkit's while the exercise is open.

# %%
use = {"encode": encode_8bit, "decode": decode_8bit} if eight.ok else {"encode": encode, "decode": decode}
yours = labkit.run("allgather_extensions", extension="yours", use=use, **SETUP | {"steps": 10})
part = yours.value("all_gather_bytes") / plain.value("all_gather_bytes")
print(f"at most 0.26 of the bytes without hooks: {part <= 0.26}")

# %% [markdown]
# ## 8. What it costs
#
# **core, 10 minutes, and 4 for an optional exercise**
#
# ### In error
#
# The largest error says little about the others. Another measure is the root of the mean of the squares (RMS): of the
# errors, over that of the weights.
#
# ### Exercise 9: RMS error (optional, •, 4 minutes)
#
# `exact` and `rounded` are matrices of equal shape. Return the RMS of their difference over the RMS of `exact`.
#
# <details><summary>Hint</summary>
#
# `x.square().mean().sqrt()` is the RMS of x.
#
# </details>


# %%
def rms_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    ### BEGIN SOLUTION
    return float((rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    ### END SOLUTION


# %%
checks.rms_error(rms_error)

# %% [markdown]
# What should it be for int8? Rounding to steps of equal size misses by anything from minus to plus half a step, evenly: its
# RMS is the step over √12. The step is the largest weight over 127. Weights that lie evenly between minus and plus the
# largest have an RMS of the largest over √3. So the ratio is √3 / (127 √12) = 1/254. Try it on such weights:

# %%
torch.manual_seed(0)
even = torch.empty(4 * DIM, DIM).uniform_(-1, 1)
found = rms_error(even, decode(encode(even), torch.float32))
print(f"predicted {1 / 254:.4f}, your function gives {'–' if found is None else format(found, '.4f')}")

# %% [markdown]
# Trained weights lie less evenly, with more small ones, so that their RMS error is larger.
#
# Now the same network learns its photo with different gathers, from the same start and with the same samples. Besides
# plain FSDP there are hooks that send bfloat16, float8 (e4m3: 3 bits of mantissa, so errors up to 2⁻⁴ of each number; a
# scale for each shard) and int8 (a scale for each row), all computing in float32. The policy of section 2 comes back
# below, with memory and time. Each run also holds what it gathers against the exact weights at its end, in the worst
# parameter.
#
# Commit to int8: bytes handed to the all-gathers of a step, scales included (4 bytes a row, for the rows that a rank sends),
# and the largest error, over the largest weight.

# %% tags=["commit"]
mine = commit(all_gather_bytes=None, weight_error=None)
### BEGIN SOLUTION
mine = commit(
    all_gather_bytes=lambda: 2 * sum(gather_bytes(rows, columns + 4, RANKS, 1) for rows, columns in SHAPES),
    weight_error=1 / 254,
)
### END SOLUTION

# %%
NAMES = ("bf16", "float8", "int8")
runs = {"fp32": plain} | {name: labkit.run("allgather_extensions", extension=name, **SETUP) for name in NAMES}
int8 = {
    "all_gather_bytes": theory.step_gather_bytes(SHAPES, RANKS, "int8"),
    "weight_error": round(theory.rounding_error("int8"), 5),
}
plots.comparison_table(runs["int8"], int8, yours=mine, tolerance=0.02)

# %%
figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
bounds = {name: theory.rounding_error(name) for name in NAMES}
plots.error_by_bytes(runs, bounds=bounds, ax=panels[0])
_ = plots.error_by_bytes(runs, error="rms", ax=panels[1])

# %% [markdown]
# *One point a run. Left the largest error: int8 and bfloat16 have nearly the same bound, and int8's error is at most a
# third larger. No point lies above its bound. Right the RMS: int8 errs more than twice as much as bfloat16. With nearly
# as many bytes, int8 is more exact than float8 by both.*
#
# Is int8 as exact as bfloat16, then? By the largest error nearly, by the RMS not. A float rounds each number to some
# digits, so that small weights have small errors. int8 rounds to steps of equal size, so that all weights of a row have
# errors of the size that suits the largest. Most weights are small. So "int8 is as exact as bfloat16" holds for the
# largest error alone.

# %% tags=["claim"]
largest = {name: run.value("weight_error") for name, run in runs.items()}
rms = {name: run.value("weight_rms_error") for name, run in runs.items()}
claim("int8 and bfloat16 have nearly the same bound", abs(bounds["int8"] / bounds["bf16"] - 1) < 0.02)
claim("int8's largest error is at most a third larger", largest["int8"] <= 4 / 3 * largest["bf16"], where=TOLD)
claim("no point lies above its bound", all(largest[name] <= bounds[name] + 1e-6 for name in NAMES))
claim("in RMS int8 errs more than twice as much as bfloat16", rms["int8"] > 2 * rms["bf16"], where=TOLD)
claim(
    "int8 is more exact than float8 by both",
    largest["int8"] < largest["float8"] and rms["int8"] < rms["float8"],
    where=TOLD,
)

# %% [markdown]
# ### Explore (optional, 5 minutes)
#
# The same network again. Left what a rank hands to the all-gathers of a step, right how the errors of all weights lie.
# The weights were trained on one device for 100 steps. *run it* lets real ranks start with these weights, gather them,
# and change nothing: so bytes and errors are measured on the very same numbers.
#
# Turn *one scale for* from a shard to 32 numbers: the bound stays where it is, and the errors draw together. Then do the
# same before training: there is little to gain, since these weights still lie evenly.
#
# Question: go from a scale for a shard to one for 32 numbers, and watch `weight_rms_error` in the table below. int4
# (whole numbers from -7 to 7) gains more than float8 does. Why?
#
# <details><summary>Answer</summary>
#
# A float carries a scale of its own in each number: its exponent. A shared scale only says where its range lies. int4
# has nothing else: one large weight makes the steps of all that share its scale coarse. From a shard to 32 numbers the
# RMS error of the worst parameter falls from 13 % to 8 % with int4, and from 2.7 % to 2.5 % with float8.
#
# </details>

# %%
widgets.GatherExplorer()

# %% [markdown]
# ### In the loss
#
# Does the network notice? Two things must be kept apart. What does rounding do to a loss by itself? At the end of each run
# the same samples went through the gathered weights and through the exact ones.

# %% tags=["nbval-ignore-output"]
for name in NAMES:
    print(f"{name:7} changes the loss of the trained network by {runs[name].value('loss_change'):+.3%}")

# %% [markdown]
# float8, whose error is by far the largest, changes it most. Which of the other two changes it more, one number cannot
# say. And during training? The small errors push the weights onto another path.


# %% tags=["nbval-ignore-output"]
_ = plots.loss_difference_curves({name: runs[name] for name in NAMES}, plain, name="plain FSDP")

# %% [markdown]
# *How far each run's loss is from that of plain FSDP, by step. All begin within 0.1 % and end more than ten times further
# apart. On average the three are within a factor of 2 of each other, although their errors are not.*
#
# So this figure says little about precision. Training enlarges any small disturbance until the paths have parted, and then
# the distance no longer tells how small it was. Nor is a difference a loss of quality: it may have either sign.


# %% tags=["claim"]
changes = {name: abs(runs[name].value("loss_change")) for name in NAMES}
claim("float8 changes the loss most", changes["float8"] == max(changes.values()), where=TOLD)
apart = {name: (runs[name].losses / plain.losses - 1).abs() for name in NAMES}
claim("all begin within 0.1 %", all(each.iloc[0] < 1e-3 for each in apart.values()), where=TOLD)
further = all(each.iloc[-10:].mean() > 10 * each.iloc[0] for each in apart.values())
claim("and end more than ten times further apart", further, where=TOLD)
means = [each.mean() for each in apart.values()]
claim("on average they are within a factor of 2 of each other", max(means) < 2 * min(means), where=TOLD)

# %% [markdown]
# What can be asked of it: does training still get there? Compare the last ten losses with those of plain FSDP.

# %%
for name, percent in (("bf16", 2), ("float8", 10), ("int8", 10)):
    off = abs(runs[name].losses[-10:].mean() / plain.losses[-10:].mean() - 1)
    print(f"{name}: the last ten losses are within {percent} % of plain FSDP's: {off <= percent / 100}")

# %% [markdown]
# Sixty steps of a small network prove nothing about a long training. They show that nothing breaks at once. The numbers
# that the optimizer keeps and updates are float32 in all runs: only what computes is rounded, and anew in each step.
#
# ### In memory and in time
#
# What a rank keeps between steps is the float32 shard, whatever is sent. What differs is held while a unit computes.
#
# ### Exercise 10: what a rank holds (•, 4 minutes)
#
# A unit computes with a parameter of `numbers` numbers, in `compute_bytes` each. It was gathered with `sent_bytes` a
# number. How many bytes does a rank hold of it, what was gathered included? If both are equal, what was gathered *is*
# the parameter. Leave out padding, scales, and FSDP2's communication buffer (lab 2).
#
# <details><summary>Hint</summary>
#
# In the figure for int8, which two rows beside the local shard lie in memory of their own while the unit computes? How
# large is each?
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
# One more run puts both together: int8 on the wire, and a policy that computes in bfloat16. Then the time of each gather is
# measured, alone, without arithmetic beside it. Which bar of memory will be the highest? Commit to three of them.

# %% tags=["commit"]
mine = {
    "policy": commit(held_bytes=lambda: held_bytes(NUMBERS, 2, 2)),
    "int8": commit(held_bytes=lambda: held_bytes(NUMBERS, 1, 4)),
    "both": commit(held_bytes=lambda: held_bytes(NUMBERS, 1, 2)),
}

# %%
both = labkit.run("allgather_extensions", extension="int8", policy="bf16", **SHORT)
costs = {
    "plain": (plain, "fp32", 4),
    "policy\nbf16": (policy, "bf16", 2),
    "hook\nbf16": (runs["bf16"], "bf16", 4),
    "hook\nfloat8": (runs["float8"], "float8", 4),
    "hook\nint8": (runs["int8"], "int8", 4),
    "hook int8,\npolicy bf16": (both, "int8", 2),
}
expected = {
    label: sum(theory.held_bytes(shape, RANKS, sent, compute_bytes=size) for shape in SHAPES)
    for label, (_, sent, size) in costs.items()
}
labels = {"policy": "policy\nbf16", "int8": "hook\nint8", "both": "hook int8,\npolicy bf16"}
rows = [
    plots.comparison_table(costs[label][0], {"held_bytes": expected[label]}, yours=mine[name], tolerance=0.02)
    for name, label in labels.items()
]
pandas.concat(rows, keys=labels)

# %% tags=["nbval-ignore-output"]
_ = plots.gather_costs({label: run for label, (run, _, _) in costs.items()}, predicted=expected)

# %% [markdown]
# *Right: what all units would hold of gathered parameters while they compute, each counted at its own turn. It is as
# predicted to the byte. A hook that sends less and computes in float32 holds **more** than plain FSDP does: the
# bfloat16 hook holds half more. The policy holds half. int8 with the policy holds less than plain FSDP, and more than
# the policy. Left: time of the gathers, the fastest of 15. On shared cores these bars move by a factor of two from run
# to run, even between two bars with the same hook.*
#
# So compression saves traffic, not memory. Memory is saved by what computes: the policy's dtype. And on this small network
# it saves no time either: in most runs no hook is faster than the plain gather.

# %% tags=["claim"]
held = {label: run.value("held_bytes") for label, (run, _, _) in costs.items()}
claim("it is as predicted to the byte", held == expected)
claim("the bfloat16 hook holds half more", held["hook\nbf16"] == 1.5 * held["plain"])
claim("the policy holds half", held["policy\nbf16"] == 0.5 * held["plain"])
claim(
    "int8 with the policy holds less than plain FSDP, and more than the policy",
    held["policy\nbf16"] < held["hook int8,\npolicy bf16"] < held["plain"],
)

# %% [markdown]
# ## 9. When does it pay?
#
# **core, 9 minutes**
#
# Does a gather of fewer bytes save time? Three things decide.
#
# 1. *Is the gather exposed?* Lab 2's inequality: with enough tokens on each rank it hides behind arithmetic. Then there is
#    nothing to save. Encode and decode still cost: they run on the cores, or the GPU, that would compute.
# 2. *How slow is the wire?* A parameter that is S bytes smaller saves S (N - 1)/N / B seconds, at B bytes a second.
# 3. *How slow is the coding?* Encode goes through a rank's rows, decode through all rows, in every gather.
#
# If the gather is exposed, it pays where the second is larger than the third.
#
# ### Exercise 11: the bandwidth below which it pays (••, 5 minutes)
#
# All parameters together are `bytes_saved` smaller than before. A rank takes `coding_s` seconds to encode its rows and to
# decode all. Below which bandwidth, in bytes a second on the wire, does the gather of fewer bytes take less time?
#
# <details><summary>Hint</summary>
#
# Set `bytes_saved * (ranks - 1) / ranks / bandwidth` equal to `coding_s`.
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
# **An example, with this machine.** In the network of this notebook a gather takes 2 ms or so, and what disturbs it is
# as large as what fewer bytes save. So take one that is four times as wide, 4.6 million numbers for the parameters
# given, gathered once without hooks and once with int8. The bandwidth comes from the plain gather, its copies and
# latency included. The time in the hooks was measured while int8 was gathered.

# %% tags=["nbval-ignore-output"]
wide = {"nproc": RANKS, "dim": 4 * DIM, "batch": 4, "steps": 1}
large = {name: labkit.run("allgather_extensions", extension=name, **wide) for name in ("none", "int8")}
plain_s, int8_s = (run.value("gather_ms") / 1e3 for run in large.values())
coding_s = large["int8"].value("hooks_ms") / 1e3
on_wire = {name: (RANKS - 1) * run.value("all_gather_bytes") / 2 for name, run in large.items()}  # of one gather of all
bandwidth = on_wire["none"] / plain_s
threshold = (on_wire["none"] - on_wire["int8"]) / coding_s
print(f"the hooks take {1e3 * coding_s:.1f} ms, so int8 pays below {threshold / 1e9:.2f} GB/s")
print(f"this machine moves {bandwidth / 1e9:.2f} GB/s between its ranks")
by_theory_s = on_wire["int8"] / bandwidth + coding_s
print(
    f"int8: {1e3 * by_theory_s:.1f} ms predicted, {1e3 * int8_s:.1f} ms measured; plain: {1e3 * plain_s:.1f} ms measured"
)

# %% tags=["nbval-ignore-output"]
_ = plots.gather_time_by_bandwidth(
    {"float32": (on_wire["none"], 0.0), "int8": (on_wire["int8"], coding_s)},
    machines={"this machine": bandwidth},
    measured={"float32": (bandwidth, plain_s), "int8": (bandwidth, int8_s)},
    results=large.values(),
)

# %% [markdown]
# *Predicted time of gathering all units of the wider network once. Left of the crossing the bytes decide and int8 is
# faster. Right of it int8 is slower, and its line runs level: that is the coding. float32's point lies on its line,
# since the bandwidth was taken from it. int8's point mostly lies above: two tensors for each parameter travel in the
# same call, but two must be copied in and out instead of one, which the inequality leaves out.*
#
# Where a machine stands close to the crossing, such things and noise decide, and only the measurement counts. Between
# processes of one machine a message is a copy in memory, and so is coding. Close to the crossing the inequality may say
# that int8 pays, and the measurement that it loses. So here int8 saves little or nothing, or costs. It is made for
# wires that are slow beside memory.

# %% tags=["claim"]
ends = {name: on_wire[name] / (1e3 * threshold) + coding_s * (name == "int8") for name in on_wire}
claim("right of the crossing int8 is slower", ends["int8"] > ends["none"])
claim("its line runs level", ends["int8"] < 1.01 * coding_s)

# %% [markdown]
# **Your turn, with a GPU's data sheet.** The memory of an H100 (SXM) moves 3.35 · 10¹² bytes a second. Coding is bound
# by that. Say that encode reads each of a rank's numbers twice, 4 bytes each time (for the scale, then to round), and
# writes 1 byte; decode reads 1 byte of each number and writes 2, to compute in bfloat16. Take 7 billion parameters on
# 16 GPUs. The plain gather is the policy's, 2 bytes a number, so 7 · 10⁹ bytes are saved. Below which bandwidth does
# int8 pay? Commit, in GB/s.

# %% tags=["commit"]
mine = commit(threshold_gb_s=None)
### BEGIN SOLUTION
mine = commit(threshold_gb_s=lambda: pays_below(7e9, 7e9 * (9 / 16 + 3) / 3.35e12, 16) / 1e9)
### END SOLUTION

# %%
gpu_coding_s = 7e9 * (9 / 16 + 3) / 3.35e12
gpu_threshold = theory.pays_below(7e9, gpu_coding_s, 16)
said = mine["threshold_gb_s"]
print(f"coding: {1e3 * gpu_coding_s:.1f} ms; it pays below {gpu_threshold / 1e9:,.0f} GB/s; yours: "
      f"{'–' if said is None else format(said, ',.0f')}")  # fmt: skip
_ = plots.gather_time_by_bandwidth(
    {"bfloat16, by the policy": (15 / 16 * 14e9, 0.0), "int8": (15 / 16 * 7e9, gpu_coding_s)},
    machines={"a card for 8 GPUs": 50e9, "NVLink": 450e9},
)

# %% [markdown]
# *Seven billion parameters on 16 H100, predicted. Over one card of 50 GB/s int8 saves nearly half of the time. If
# NVLink joined all 16 it would save less than a quarter, if the kernels are as fast as the memory.*
#
# Inside a host, Lab 2 found that one sequence of tokens hides the gathers. So int8 is for the slow wire between hosts.

# %% tags=["claim"]
gpu = {
    bandwidth: (15 / 16 * 7e9 / bandwidth + gpu_coding_s) / (15 / 16 * 14e9 / bandwidth) for bandwidth in (50e9, 450e9)
}
claim("over the card it saves nearly half", 0.5 < gpu[50e9] < 0.6)
claim("over NVLink less than a quarter", 0.75 < gpu[450e9] < 1)

# %% [markdown]
# ## 10. Questions, and more
#
# **optional, 40 minutes.** Each part stands alone.
#
# ### Why not compress gradients, too? (3 minutes)
#
# A gather only copies. A reduce-scatter adds, and that changes three things.
#
# - Numbers can be added only if they have the same scale. Two ranks have two scales, and integers overflow:

# %%
print(torch.tensor(100, dtype=torch.int8) + torch.tensor(100, dtype=torch.int8))

# %% [markdown]
# - So a rank would have to decode, add and encode again, in each of the N - 1 steps of a ring. Each time rounds.
# - A gathered parameter is forgotten after use. A gradient goes into Adam's running means and into the parameter, and
#   stays. Coarsely rounded gradients need a remedy: remember what was rounded away and add it next time (*error
#   feedback*, 1-bit Adam), or keep the sum in more bits.
#
# ZeRO++ avoids the ring. By all-to-alls, one inside each host and one between hosts, each rank gets its piece of the
# others' gradients and adds it up in more bits. So a gradient is rounded twice, not N - 1 times.
#
# bfloat16 gradients are common: `reduce_dtype=torch.bfloat16` in the policy, again one line. DDP has `register_comm_hook`
# for more, see Lab 4.
#
# ### Can Adam's state be 8-bit, too? (4 minutes)
#
# Yes, but that is about memory: the state never travels. And a scale for each row is not enough. Adam divides by the root of
# its second number, the running mean of squared gradients. Squares differ by many powers of ten within a row. What are the
# small ones, in steps of equal size? Here are the states of a layer after 20 steps on one device.

# %%
torch.manual_seed(0)
layer = nn.Linear(256, 256)
adam = torch.optim.Adam(layer.parameters())
samples = torch.randn(64, 256) * torch.logspace(0, -2, 256)  # inputs of different size
for _ in range(20):
    adam.zero_grad()
    (layer(samples) - samples).square().mean().backward()
    adam.step()
mean, square = (adam.state[layer.weight][name] for name in ("exp_avg", "exp_avg_sq"))
for name, state in (("running mean", mean), ("running mean of squares", square)):
    zeros = (encode(state)[0] == 0).float().mean()
    print(f"{name}: more than half became 0: {bool(zeros > 0.5)}")

# %% [markdown]
# Where the square becomes 0, Adam divides by ε = 10⁻⁸ alone, and takes a huge step. The 8-bit Adam of Dettmers and others
# (2021) has a scale for each block of 2048 numbers, and steps that are fine near 0 and coarse far from it.
#
# ### Exercise 12: casting (•••, 10 minutes)
#
# With a policy a unit computes in another dtype, `param_dtype`. Then the gathered tensors are not the parameter. A cast makes
# new memory, which must be named, and `out` must be filled at every later call. Extend your hook: without a cast it does what
# it did, with one it casts both halves. `refill(tensor, gathered)` copies gathered rows into a half.
#
# <details><summary>Hint 1</summary>
#
# `.to(param_dtype)` gives the tensor itself where it has the dtype already. So one line serves both cases of the first call.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Refill `out.a` and `out.b`, and only if the dtypes differ: otherwise they lie in the gathered memory.
#
# </details>


# %%
def cast_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    ### BEGIN SOLUTION
    a, b = all_gather_outputs
    if out is None:
        whole = type(self)(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    if a.dtype != param_dtype:
        refill(out.a, a)
        refill(out.b, b)
    ### END SOLUTION


# %%
casts = checks.cast_all_gather(cast_all_gather)
casts

# %% [markdown]
# Use it. `check="meta"` builds a network on the meta device, where tensors have shapes and no memory. It shards it, gives it
# memory full of NaN, fills that, and trains with a policy of bfloat16.


# %%
class Casting(working):
    fsdp_post_all_gather = cast_all_gather if casts.ok else tensors.TwoTensor.fsdp_post_all_gather


def cast_double(weight: torch.Tensor) -> torch.Tensor:
    return Casting(weight, weight.clone())


meta = {"nproc": 2, "extension": "your_type", "steps": 5}
built = labkit.check("allgather_extensions", check="meta", use={"parameter": cast_double}, **meta)
print(f"{built.value('trained'):.0f} of {built.value('parameters'):.0f} parameters trained in bfloat16: {built.ok}")

# %% [markdown]
# ### Exercise 13: four bits (•••, 12 minutes)
#
# Two numbers of 4 bits fit into a byte. Send at most 0.14 of float32's bytes, with a scale for each row. No weight may be off
# by more than 0.0714 of the largest: that is half a step, if 7 steps reach the largest value of a row. All matrices have an
# even number of columns.
#
# <details><summary>Hint 1</summary>
#
# Divide by a scale with which the largest is 7, round, and add 8: then each number is from 1 to 15. Convert to `torch.uint8`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `numbers[:, ::2] * 16 + numbers[:, 1::2]` packs. `// 16` and `% 16` unpack.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.stack([high, low], dim=2).flatten(1)` puts the columns into their old order.
#
# </details>


# %%
def encode_4bit(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ### BEGIN SOLUTION
    scales = shard.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
    numbers = ((shard / scales).round() + 8).to(torch.uint8)
    return numbers[:, ::2] * 16 + numbers[:, 1::2], scales
    ### END SOLUTION


def decode_4bit(gathered: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    ### BEGIN SOLUTION
    packed, scales = gathered
    numbers = torch.stack([packed // 16, packed % 16], dim=2).flatten(1)
    return ((numbers.float() - 8) * scales).to(dtype)
    ### END SOLUTION


# %%
checks.four_bit_gather(encode_4bit, decode_4bit)

# %% [markdown]
# With 4 bits a scale for each row is coarse. Formats in use give one to each block of 16 or 32 numbers.
#
# ### The hooks without labkit (4 minutes)
#
# The same int8 gather in plain PyTorch, for rows that divide. FSDP2 looks for hooks on the local tensor of each sharded
# parameter, whatever its type. It looks for the last time at the first forward pass, so put them there before.
# `_local_tensor` and `_unsafe_preserve_version_counter` are private names (torch 2.11 to 2.13): a type with hooks needs
# neither the first, nor, where it shares the gathered memory, the second.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def send_int8(local):
    def pre_all_gather(mesh):
        scales = local.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        return ((local / scales).round().to(torch.int8), scales), None

    def post_all_gather(gathered, metadata, dtype, *, out=None):
        whole = (gathered[0].float() * gathered[1]).to(dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
for unit in (model[0], model[2], model):
    fully_shard(unit, mesh=mesh)
for parameter in model.parameters():
    send_int8(parameter._local_tensor)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(torch.ones(8, 64)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"the loss is a tenth of the first or less: {losses[-1] <= 0.1 * losses[0]}")
dist.destroy_process_group()

# %% [markdown]
# ### What to know before you use it (3 minutes)
#
# - Whatever replaces a parameter's local tensor loses hooks that were put onto it: `to_empty`, moving the model,
#   `load_state_dict(assign=True)`. A parameter *type* such as `TwoTensor` keeps them.
# - With `CPUOffloadPolicy` on a GPU the shard is copied to the GPU before its hook is called. The copy of a plain
#   tensor has no hook: AttributeError. `reshard_after_forward` with a number is not implemented for parameters with
#   hooks (NotImplementedError).
# - One rank has nothing to gather. The program wants at least two.
# - `torch.compile` takes a `TwoTensor` apart and builds it again, since the type says how (`__tensor_flatten__`). Compile
#   each layer by itself, so that FSDP2's hooks stay outside: `compile=True` does that in this lab's program.
# - A model that is built without memory gets its hooks after `to_empty`, by `tensors.extend_model`.
#
# ### What to expect on GPUs (2 minutes)
#
# - Bytes and errors should be the same: they do not depend on speed. No GPU run is recorded yet.
# - Encode and decode are kernels of their own, between the messages. Section 9 takes them to be as fast as the memory. Fuse
#   them, or what you save on the wire is lost there.
# - torchao has a float8 parameter type of this kind, for layers that also multiply in float8. Then nothing is decoded, and
#   what was gathered is what computes.

# %% [markdown]
# ## 11. Leave with
#
# **core, 4 minutes**
#
# Bytes are those that one rank hands to the all-gathers of a step.

# %% tags=["summary"]
sizes = {label: theory.step_gather_bytes(SHAPES, RANKS, sent) for label, (_, sent, _) in costs.items()}
tables = {
    " ".join(label.split()): plots.comparison_table(
        costs[label][0], {"all_gather_bytes": sizes[label], "held_bytes": expected[label]}
    )
    for label in costs
}
tables["TwoTensor"] = plots.comparison_table(
    two, {"all_gather_bytes": theory.step_gather_bytes(SHAPES, RANKS, "two_tensor")}
)
pandas.concat(tables)

# %% [markdown]
# | | bytes on the wire | held while it computes | error | needs |
# |---|---|---|---|---|
# | policy, bfloat16 | 1/2 | 1/2 | 0.4 % of each number | one line |
# | hook, bfloat16 | 1/2 | 3/2 | 0.4 % of each number | two functions |
# | hook, int8, a scale a row | 1/4 and scales | 5/4 | 0.4 % of the row's largest | two functions |
# | int8 with the policy | 1/4 and scales | 3/4 | both | two functions, one line |
#
# ### Five questions
#
# <details><summary>1. You want bfloat16 parameters on the wire, and bfloat16 arithmetic is fine. Hooks?</summary>
#
# No. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, one line.
#
# </details>
# <details><summary>2. Your hook decodes, and the second part of its answer is an empty tuple. What happens?</summary>
#
# All losses are right. Every decoded parameter stays in memory after its unit is done, until the whole model lies on every
# rank.
#
# </details>
# <details><summary>3. Why does the hook get <code>out</code> from the second call on, instead of returning a new parameter?</summary>
#
# Autograd saved the first one for the backward pass. That object must hold the numbers again.
#
# </details>
# <details><summary>4. Somebody says that int8 gathers save memory. True?</summary>
#
# Not while a unit computes: the decoded parameter is there, and the gathered numbers beside it. It is less only if what
# computes is shorter, too.
#
# </details>
# <details><summary>5. Your gathers hide behind arithmetic already. What does int8 bring?</summary>
#
# Nothing, or it costs: encode and decode take time from the arithmetic. Look for what is exposed first.
#
# </details>
#
# ### Read on
#
# - `fully_shard` and its policies: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
# - Extending PyTorch, with `__torch_dispatch__`: https://docs.pytorch.org/docs/stable/notes/extending.html
# - Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021: https://arxiv.org/abs/2110.02861
# - Tang et al., "1-bit Adam", 2021: https://arxiv.org/abs/2102.02888
# - Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, which gathers
#   weights in int8: https://arxiv.org/abs/2306.10209
# - Micikevicius et al., "FP8 Formats for Deep Learning", 2022: https://arxiv.org/abs/2209.05433
# - The H100's data sheet: https://www.nvidia.com/en-us/data-center/h100/
# - In labkit: `labkit/tensors/two_tensor.py`, then `labkit/tensors/quantisation.py`. The hooks are a few lines in each.
#
# ### What comes next
#
# - All extensions at once: `labkit.check("allgather_extensions", check="wire", nproc=2)`.
# - Train with your 4 bits: `extension="yours"`, `use={"encode": encode_4bit, "decode": decode_4bit}`. What does the loss say?
# - Lab 4 puts many small messages into few large ones.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("extensions")
