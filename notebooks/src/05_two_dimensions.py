# %% [markdown]
# # Lab 5. Two dimensions: share the matrices, and share the samples
#
# In lab 2 every rank took its own samples, and parameters were put together before they were used. There is another
# way: leave a matrix in pieces, and let each rank compute with its piece. This is **tensor parallelism** (TP).
#
# The two can be combined. Ranks then stand in a grid, a *mesh* with two axes. Along one axis they share matrices, along
# the other they share out samples.
#
# After this lab you can
#
# - cut two linear layers over ranks, forward and backward, and prove that they train as on one device;
# - make a mesh of two axes, and read where each piece of a parameter lies;
# - say what crosses each axis in a step, in bytes and in time, and choose how many ranks share a matrix;
# - write a plan for attention, embedding and loss, and recognise one that is silently wrong (optional sections).
#
# You need lab 0's words (rank, group, all-reduce, all-gather, reduce-scatter) and lab 2's FSDP, *fully sharded data
# parallelism*: units, gathering, activation checkpointing. You need no GPU. The sections marked **core** take about 95
# minutes. The others are optional to read; run their cells all the same, since later ones use what they give. Exercises
# have dots for their difficulty: •, •• or •••. Where a cell says `commit`, put down your own numbers before you launch.
# Leave None where you have none: everything runs.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import inspect

import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import relu, scaled_dot_product_attention, softmax

import labkit
from labkit import doctor, plots, widgets
from labkit.checks import two_dim as checks
from labkit.checks.claims import claim, commit
from labkit.checks.ranks import two_dim
from labkit.config import require
from labkit.parallel import small_tensor_parallel as ours
from labkit.parallel.tensor_parallel import PlainParameters
from labkit.plots.collectives import fastest_all_reduce_times
from labkit.theory import fsdp
from labkit.theory import two_dim as theory
from labkit.theory.collectives import AlphaBeta, collective_wire_bytes, fit_alpha_beta

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network is lab 2's stack of three MLPs (multilayer perceptrons): linear, ReLU,
# linear, ReLU, with an inner width of 3, 4 and 3 times `DIM`. A sample is a text of 8 **tokens**, and each token has
# `DIM` numbers. A linear layer treats every token alike. You may change them; the next cell refuses what cannot work.
# The text speaks of these; cells say what yours change.

# %% tags=["parameters"] small={"DIM": 16, "BATCH": 8} points=[[4,4,4,1],[4,48,24,2],[8,128,64,3]]
RANKS: int = 4  # ranks of the mesh
DIM: int = 64  # width of the network
BATCH: int = 48  # samples of all ranks together in a step, of 8 tokens each
STEPS: int = 1  # timed training steps in each run

# %%
require(
    "RANKS",
    RANKS,
    at_least=4,
    at_most=8,
    multiple_of=4,
    because="one of the meshes has 2 ranks along tp, and section 10 cuts the 8 tokens of a text over all ranks",
)
require("DIM", DIM, at_least=1, multiple_of=RANKS, because="the ranks share each layer's features evenly")
require("BATCH", BATCH, at_least=1, multiple_of=RANKS, because="the ranks share the samples evenly")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, DIM, BATCH) == (4, 64, 48)  # the values that the text speaks of
SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
PAIRS = theory.mlp_pairs(DIM)  # (width, inner width) of each MLP
MESHES = {tp: {"data": RANKS // tp, "tp": tp} for tp in (1, 2, RANKS)}  # lengths of the two axes


def tokens(tp: int) -> int:
    """Tokens that one rank works on, if `tp` ranks share each matrix: those ranks have the same samples."""
    return 8 * BATCH // MESHES[tp]["data"]


# %% [markdown]
# ## 1. Why: more ranks than samples
#
# **core, 5 minutes**
#
# FSDP shares parameters, gradients and the optimizer's state. It does not share a sample: every rank needs at least one
# of its own, and holds all activations of it.
#
# Llama 3 with 405 billion parameters was trained on 16,384 GPUs, with 2,048 texts of 8,192 tokens in a step (Llama Team
# 2024, table 4). With FSDP alone, seven GPUs of eight would have had no text. More texts in a step would be another
# training: fewer steps with the same data. So the eight GPUs of a *host*, one machine, share each matrix product, and
# all eight work on the same texts. (Sixteen such groups share the layers, one after another. That is pipeline
# parallelism, and no part of this course.)
#
# The same in small: a step of two samples, on four ranks. **The first run is meant to be refused.**


# %%
def trains(tp: int) -> str:
    """What becomes of a step of two samples, if so many ranks share each matrix."""
    try:
        labkit.run("two_dim", nproc=4, tp=tp, batch=2)
    except labkit.ParameterError as refused:
        return str(refused)
    return "trained"


outcome = {"FSDP alone": trains(1), "two ranks share each matrix": trains(2)}
print("\n".join(f"{how}: {what}" for how, what in outcome.items()))

# %% tags=["claim"]
claim("the first is refused, the second trains", [what == "trained" for what in outcome.values()] == [False, True])

# %% [markdown]
# `tp` is the number of ranks that share each matrix.
#
# The second reason is memory. The activations of one long text may not fit on one GPU. FSDP cannot help there. Ranks
# that share an MLP's two matrices also share the activations between the two. What lies between MLPs stays whole on
# each, until section 10 cuts that, too.

# %% [markdown]
# ## 2. The code you would write
#
# **core, 12 minutes**
#
# A mesh with two axes, a plan, `parallelize_module`, then `fully_shard`. A **plan** says how each layer is cut: the
# first layer of a pair **colwise**, the second **rowwise**. Section 3 explains why, and section 4 what PyTorch then
# sends. Read the order: first the matrices are cut along `tp`. Then FSDP shards along `data` what is left.

# %% tags=["script"]
# %%torchrun -n 4
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.filterwarnings("ignore", message=".*returned a view")  # of PyTorch: nobody changes the output in place
dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))  # "cuda" on GPUs
torch.manual_seed(0)  # all ranks start with the same parameters
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.Adam(model.parameters())

torch.manual_seed(mesh["data"].get_local_rank())  # the same samples for the ranks of one tp group
samples = torch.randn(16, 8)  # on GPUs: device="cuda"
for _ in range(5):
    optimizer.zero_grad()
    (model(samples) - samples).square().mean().backward()
    optimizer.step()

for name, weight in model.named_parameters():
    print(f"{name} {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} here: {weight.placements}")
dist.destroy_process_group()

# %% [markdown]
# ### The mesh, and why `tp` comes last
#
# `init_device_mesh` puts the ranks into the grid row by row. The last axis runs fastest: ranks 0 and 1 are neighbours
# along `tp`, ranks 0 and 2 along `data`. `mesh["tp"]` is the row that this rank is in, `mesh["data"]` its column.
# torchrun gives neighbouring numbers to the ranks of one host. So the last axis lies inside a host, where links are
# fast, if its length divides the number of ranks in a host. That is where `tp` belongs: its messages are sent in the
# middle of the computation, and everybody waits for them. With the axes swapped, and `data` as long as a host, every
# one of them would leave the host.

# %%
SQUARE = {"data": 2, "tp": 2}  # the mesh of the script
_ = plots.mesh_diagram(**SQUARE)

# %% [markdown]
# *The ranks, 2 × 2. A blue row is a group along `tp`: the same samples, different features. An orange column is a group
# along `data`: the same features, different samples. In each rank: the two weights of a pair. Pale and dark green: what
# is this rank's along `tp`. Dark: what FSDP lets it keep of that. Each rank keeps a quarter of each weight.*

# %% tags=["claim"]
weights = [layer.shapes[0] for layer in theory.rank_layers([(8, 32)], SQUARE["tp"])]  # of a rank along tp: [out, in]
kept = [fsdp.shard_elements(shape, SQUARE["data"]) for shape in weights]  # and of that, along data
claim("each rank keeps a quarter of each weight", kept == [8 * 32 / 4] * 2)

# %% [markdown]
# ### Reading `placements`
#
# A parameter is now a `DTensor` with one *placement* for each axis of the mesh, the first axis first. `Shard(0)` is cut
# by rows, `Shard(1)` by columns, and `Replicate()` is not cut.
#
# - The second weight is `(Shard(0), Shard(1))`: rows over `data`, columns over `tp`.
# - The second bias is `(Shard(0), Replicate())`. Along `tp` it is whole on every rank. Section 5 shows what a trap that
#   is.
# - The first weight is cut by rows along both axes. TP came first and gave rank 0 the rows 0–15, rank 1 the rows 16–31.
#   FSDP then halved what was there: rank 0 keeps 0–7, rank 2 8–15, rank 1 16–23, rank 3 24–31. Read by the order of the
#   axes, first `data`, then `tp`, this would be another cut. So PyTorch writes `_StridedShard`: the rows at one place
#   along `data` (0–7 on rank 0, 16–23 on rank 1) are not one block of the whole. `sf=2` counts the parts that the other
#   axis had made before.
#
# ### Commit, run, compare
#
# Now the measured program, `launch/two_dim.py`. It does what the script does, with this notebook's stack. How many
# bytes of parameters does a rank keep between steps? Mind the biases. An MLP of width d and inner width h has weights
# of d · h numbers, twice, and biases of h and of d.

# %% tags=["commit"]
mine = commit(end_parameter_bytes=None)
### BEGIN SOLUTION
thin = [2 * width * inner / RANKS + inner / RANKS + width / MESHES[2]["data"] for width, inner in PAIRS]
mine = commit(end_parameter_bytes=4 * sum(thin))
### END SOLUTION

# %%
square = labkit.run("two_dim", tp=2, **SETUP)
resident = theory.mesh_resident_bytes(PAIRS, **MESHES[2])
plots.comparison_table(square, resident, yours=mine)

# %% [markdown]
# *What one of the ranks holds when a step ends: as theory says, to the byte.* `end_optstate_bytes` are Adam's two means
# for each parameter, and 4 bytes for each of 12 tensors, in which Adam counts its steps.

# %% tags=["claim"]
claim("as theory says, to the byte", all(square.value(name) == size for name, size in resident.items()))
kept = {name: square.value(f"end_{name}_bytes") for name in ("parameter", "optstate")}
claim("two means, and 4 bytes for each of 12 tensors", kept["optstate"] == 2 * kept["parameter"] + 4 * 12)

# %% [markdown]
# ## 3. One pair of layers, by hand
#
# **core, 9 minutes**
#
# Take two linear layers with a ReLU between: `y = relu(x @ first.T) @ second.T`. PyTorch stores a weight as [features
# out, features in]. Row i of `first` makes inner feature i. Column i of `second` says what feature i does to `y`. So a
# rank that has some inner features needs only these rows of `first` and these columns of `second`.

# %%
x, first, second = [[1, 2]], [[1, 0], [0, 1], [1, 1], [0, -1]], [[1, 0, 2, 1], [0, 1, 0, 1]]
_ = plots.pair_diagram(x, first, second)

# %% [markdown]
# *One token with two numbers, four inner features, two ranks. Each rank computes with its own features, and nothing is
# sent between the layers. The two parts add up to y.* `.T` *means that the weight is drawn as it is multiplied, with
# rows and columns exchanged.*

# %% tags=["claim"]
numbers = [torch.tensor(each, dtype=torch.float) for each in (x, first, second)]
claim("the parts add up to y", (relu(numbers[0] @ numbers[1].T) @ numbers[2].T).tolist() == [[7, 2]])

# %% [markdown]
# Why are these cuts called colwise and rowwise, the other way round? The names come from papers, which write x W. That
# W is PyTorch's weight with rows and columns exchanged. The rows of `first` are the columns of that W. So **colwise**
# cuts PyTorch's weight along dim 0, and **rowwise** along dim 1.
#
# ### Exercise 1: each rank's part (•, 5 minutes)
#
# Return what each rank computes, as a list with one tensor for each rank. Rank 0 has the first features.
# `tensor.chunk(n, dim)` cuts a tensor evenly.
#
# <details><summary>Hint 1</summary>
#
# Go through the figure from left to right, for one rank. The ReLU comes before the second product.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `zip(first.chunk(ranks), second.chunk(ranks, dim=1))` gives each rank's two pieces.
#
# </details>


# %%
def parts(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    ### BEGIN SOLUTION
    pieces = zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)
    return [relu(x @ rows.T) @ columns.T for rows, columns in pieces]
    ### END SOLUTION


# %%
checks.parts(parts)

# %% [markdown]
# Each part has the full size of `y`. Adding tensors up over ranks is an all-reduce, and this is the only message of the
# forward pass.
#
# Why may the ReLU stand in between? It treats each feature alone. A softmax over the features does not: it divides by a
# sum over all of them, and a rank sees only some.

# %%
features = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
for name, act in (("relu", relu), ("softmax", lambda some: softmax(some, dim=1))):
    joined = torch.cat([act(piece) for piece in features.chunk(2, dim=1)], dim=1)
    right = torch.allclose(joined, act(features))
    print(f"{name} on each rank's features, joined, is right: {right}")

# %% [markdown]
# ## 4. And backward
#
# **core, 9 minutes**
#
# Each rank can take the gradient of its own two pieces. What about the gradient of `x`, which the layers before need?
# Let us look, on one device. The gradient of `y` is the same on every rank, since `y` is.

# %%
draw = torch.Generator().manual_seed(1)
x, first, second = (torch.randn(size, generator=draw) for size in ((3, 4), (8, 4), (4, 8)))
x.requires_grad_()
y = relu(x @ first.T) @ second.T
gradient_of_y = torch.randn(y.shape, generator=draw)
y.backward(gradient_of_y)

from_ranks = []
for rows, columns in zip(first.chunk(2), second.chunk(2, dim=1), strict=True):
    copy_of_x = x.detach().clone().requires_grad_()
    (relu(copy_of_x @ rows.T) @ columns.T).backward(gradient_of_y)
    from_ranks.append(copy_of_x.grad)
print("rank 0's gradient of x is right:", torch.allclose(from_ranks[0], x.grad))
print("the sum over the ranks is right:", torch.allclose(sum(from_ranks), x.grad, atol=1e-5))

# %% [markdown]
# Every rank has used all of `x`, so the gradients of all these uses add up. It is a sum again: the backward pass needs
# one all-reduce in front of the pair. The very first pair is spared: its input are the samples, and nobody asks for
# their gradient.
#
# So there are two functions, and they mirror each other:
#
# | where | forward | backward |
# |---|---|---|
# | `x` enters the pair | as it is | all-reduce |
# | the parts leave it | all-reduce | as it is |
#
# ### Exercise 2: bytes of a training step (•, 5 minutes)
#
# A stack has `mlps` pairs of layers. How many bytes does a rank **hand to all-reduces** along `tp` in one training
# step? There are `tokens` tokens of `dim` numbers, 4 bytes each. The inner width does not matter. Why?
#
# <details><summary>Hint 1</summary>
#
# How many all-reduces does the forward pass take, how many the backward pass? What is added up in each?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Backward it is one less, because of the first pair.
#
# </details>


# %%
def tp_bytes(tokens: int, dim: int, mlps: int) -> int:
    ### BEGIN SOLUTION
    forward, backward = mlps, mlps - 1
    return (forward + backward) * tokens * dim * 4
    ### END SOLUTION


# %%
checks.tp_bytes(tp_bytes)

# %% [markdown]
# Why does the inner width not matter? What is added up is the result of a pair, or the gradient of its input. Both have
# the outer width.

# %% [markdown]
# ## 5. Build it: the two functions, and the two layers
#
# **core, 25 minutes**
#
# You write what PyTorch's plan does, without DTensor. First the two functions of the table, as
# `torch.autograd.Function`s. Such a class tells autograd what to do: `forward(ctx, ...)` computes. `backward(ctx,
# grad)` gets the gradient of what `forward` returned, and gives one value for each argument of `forward` after `ctx`,
# None for what has no gradient. Both are static methods. `ctx` carries along what `backward` needs. You call it by
# `apply`: `CopyToRanks.apply(x, group)`.
#
# `group` is the process group of the ranks that share the matrix: `dist.all_reduce(tensor, group=group)` adds a tensor
# up over these ranks alone, in place.
#
# ### Exercise 3: where x enters (••, 4 minutes)
#
# Forward: x as it is. Backward: the sum over the group. Do not change the gradient that you are given.
#
# <details><summary>Hint 1</summary>
#
# `forward` keeps the group, `ctx.group = group`, and returns x. `backward` clones, all-reduces the clone, and returns
# two values.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The second value belongs to `group`, which has no gradient: None.
#
# </details>


# %%
class CopyToRanks(torch.autograd.Function):
    ### BEGIN SOLUTION
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None

    ### END SOLUTION


# %%
copy_verdict = checks.copy_to_ranks(CopyToRanks)
copy_verdict

# %% [markdown]
# ### Exercise 4: where the parts leave (••, 4 minutes)
#
# Forward: the sum over the group. Backward: the gradient as it is. Why no all-reduce there? Each part enters the sum
# once, with factor 1. And what comes after the pair is the same on all ranks, so all have the same gradient of the sum
# already. (`torch.distributed.nn.functional.all_reduce` does sum in its backward pass: it takes every rank's loss for a
# different one. Here its gradients would be too large by the number of ranks.)
#
# <details><summary>Hint</summary>
#
# It is exercise 3 with the two methods exchanged. Again, clone before you all-reduce.
#
# </details>


# %%
class SumOverRanks(torch.autograd.Function):
    ### BEGIN SOLUTION
    @staticmethod
    def forward(ctx, part, group):
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None

    ### END SOLUTION


# %%
sum_verdict = checks.sum_over_ranks(SumOverRanks)
sum_verdict

# %% [markdown]
# The next cell gives both a short name. Until yours pass, labkit's own stand in for them.


# %%
def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """x as it is; backward, the sum over the group."""
    return (CopyToRanks if copy_verdict.ok else ours.CopyToRanks).apply(x, group)


def sum_over_ranks(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the group; backward, the gradient as it is."""
    return (SumOverRanks if sum_verdict.ok else ours.SumOverRanks).apply(part, group)


# %% [markdown]
# ### Exercise 5: the first layer (••, 6 minutes)
#
# Write a module that holds this rank's share of a linear layer and computes this rank's features. `layer` is the whole
# layer, with a bias, equal on all ranks. `dist.get_rank(group)` is this rank's place in the group, and
# `dist.get_world_size(group)` the number of ranks in it.
#
# - `__init__(self, layer, group)` makes two `nn.Parameter`s, `self.weight` and `self.bias`: copies of this rank's part.
# - `forward(self, x)` takes whole inputs and returns this rank's features. Use `copy_to_ranks` and
#   `nn.functional.linear(x, weight, bias)`.
#
# <details><summary>Hint 1</summary>
#
# A rank's features are rows of the weight. Each feature has one number of the bias.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `layer.weight.detach().chunk(ranks)[rank].clone()`; and begin with `super().__init__()`.
#
# </details>


# %%
class ColumnParallel(nn.Module):
    ### BEGIN SOLUTION
    def __init__(self, layer, group):
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[rank].clone())

    def forward(self, x):
        return nn.functional.linear(copy_to_ranks(x, self.group), self.weight, self.bias)

    ### END SOLUTION


# %%
column_verdict = checks.column_parallel(ColumnParallel)
column_verdict

# %% [markdown]
# ### Exercise 6: the second layer, and the trap (•••, 8 minutes)
#
# The same for the second layer: it takes this rank's features and returns the whole output. Its weight is cut by
# columns. Its bias is whole on every rank. Mind where you add it.
#
# The check looks at the output and at every gradient. There are three ways to go wrong with the bias. One shows in the
# output, the other two only in the bias's gradient.
#
# <details><summary>Hint 1</summary>
#
# If every rank adds the bias to its part, how often is it in the sum?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Adding it on one rank alone mends the output, but then the other ranks' biases get no gradient, and the ranks drift
# apart. Divided by the number of ranks, it gets a part of its gradient.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Multiply without a bias, sum over the ranks, then add the bias, on every rank.
#
# </details>


# %%
class RowParallel(nn.Module):
    ### BEGIN SOLUTION
    def __init__(self, layer, group):
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks, dim=1)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        return sum_over_ranks(nn.functional.linear(x, self.weight), self.group) + self.bias

    ### END SOLUTION


# %%
row_verdict = checks.row_parallel(RowParallel)
row_verdict

# %% [markdown]
# After the sum all ranks add the same bias to the same tensor. Each computes the whole gradient of the bias, and all
# compute the same one. So the biases stay equal, without a message. PyTorch's `RowwiseParallel` comes to the same: the
# parts are `Partial`, a sum that is still to be made, and the bias is `Replicate`. (DTensor adds 1/n of the bias on
# each rank before the sum. It knows that this is a part, and gives the bias its whole gradient.)
#
# ### Use it
#
# Now your layers train the stack, on four real ranks. `layers="yours"` puts them in the place of each pair's layers, in
# the groups along `tp`; FSDP shards them along `data`. A layer that has not passed is replaced by labkit's.
#
# `labkit.check` gives the same parameters and samples to one device. In three steps it compares the output, every
# gradient and every updated parameter: one output and 12 of each, 75 tensors.

# %%
verdicts = {"column_parallel": column_verdict, "row_parallel": row_verdict}
layers = {"column_parallel": ColumnParallel, "row_parallel": RowParallel}
working = {name: layer for name, layer in layers.items() if verdicts[name].ok}
print("yours:", ", ".join(working) or "none yet, labkit's in their place")
PARITY = {
    "nproc": RANKS,
    "tp": 2,
    "dim": DIM,
    "batch": BATCH,
    "layers": "yours",
    "compile": False,
    "steps": 3,
    "timeout_s": 60,
}
right = labkit.check("two_dim", use=working or None, **PARITY)
print(right.verdict_text)

# %% tags=["claim"]
claim("all 75 are equal", right.ok and right.value("compared") == 75)

# %% [markdown]
# And what do your layers send? Commit: how many all-reduces along `tp` in a step of the three MLPs, and how many bytes
# does a rank hand to them? `tokens(2)` tokens are on each rank.

# %% tags=["commit"]
mine = commit(
    **{
        "tp/all_reduce_count": None,
        "tp/all_reduce_bytes": lambda: tp_bytes(tokens(2), DIM, 3),
    }
)
### BEGIN SOLUTION
mine |= commit(**{"tp/all_reduce_count": 3 + 2})
### END SOLUTION

# %%
own = labkit.run("two_dim", tp=2, layers="yours", use=working or None, **SETUP)
sent = theory.activation_collectives(PAIRS, tokens(2), 2)
plots.comparison_table(own, sent, yours=mine)

# %% [markdown]
# *The same counts and bytes as PyTorch's plan sent in section 2.*

# %% tags=["claim"]
claim(
    "the same counts and bytes as PyTorch's plan",
    all(own.value(name) == square.value(name) == sent[name] for name in sent),
)

# %% [markdown]
# ## 6. Break it
#
# **core, 8 minutes**
#
# A check that never fails is worth nothing. Below, two layers are broken: the first forgets `copy_to_ranks`, so that
# nothing is summed in the backward pass; the second adds its bias on every rank. Before you run: in how many of the two
# is the very first loss right? In how many does parity fail?

# %% tags=["commit"]
mine = commit(loss_right=None, parity_fails=None)
### BEGIN SOLUTION
mine = commit(loss_right=1, parity_fails=2)
### END SOLUTION


# %%
class Forgetful(ours.ColumnParallel):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class BiasOnEachRank(ours.RowParallel):
    def forward(self, x):
        return ours.sum_over_ranks(nn.functional.linear(x, self.weight, self.bias), self.group)


def first_loss(result: labkit.RunResult) -> float:
    """Of the warm-up step, before any parameter has changed: the mean over ranks."""
    return result.frame.query("name == 'loss' and step == -1")["value"].mean()


broken = {"forgetful": {"column_parallel": Forgetful}, "bias on each rank": {"row_parallel": BiasOnEachRank}}
checked = {name: labkit.check("two_dim", use=use, **PARITY) for name, use in broken.items()}
print("\n".join(f"{name}: {each.verdict_text}" for name, each in checked.items()))
runs = {name: labkit.run("two_dim", tp=2, layers="yours", use=use, **SETUP) for name, use in broken.items()}
seen = {
    "loss_right": sum(abs(first_loss(run) / first_loss(square) - 1) < 1e-5 for run in runs.values()),
    "parity_fails": sum(not each.ok for each in checked.values()),
}
guesses = {name: "–" if number is None else f"{number:g}" for name, number in mine.items()}
pandas.DataFrame.from_dict({"yours": guesses, "measured": seen}).T

# %% tags=["claim"]
claim("one first loss of two is right", seen["loss_right"] == 1)
claim("parity fails for both", seen["parity_fails"] == 2)

# %% [markdown]
# *Without the sum in the backward pass, the first loss is that of the right program. Parity fails for both.*
#
# Now your own mistake. Change something in the first layer: hold other rows, divide, leave something out. `Broken`
# begins as labkit's layer, which is right.


# %%
class Broken(ours.ColumnParallel):
    ### BEGIN SOLUTION
    def __init__(self, layer, group):
        super().__init__(layer, group)
        self.bias = nn.Parameter(layer.bias.detach()[: len(self.bias)].clone())  # rank 0's part, on every rank

    ### END SOLUTION


# %%
print(labkit.check("two_dim", use={"column_parallel": Broken}, **PARITY).verdict_text)

# %% [markdown]
# ### A test that cannot fail
#
# Some language models begin with biases of zero; GPT-2 and BERT do. Suppose somebody tests the second layer with such a
# model: its output on two ranks must equal one device's. Will this test find the bias that is added twice? Here are
# both ranks' parts on one device.

# %%
draw = torch.Generator().manual_seed(2)
x, weight = torch.randn(3, 8, generator=draw), torch.randn(4, 8, generator=draw)
for name, bias in {"biases of zero": torch.zeros(4), "random biases": torch.randn(4, generator=draw)}.items():
    cuts = zip(x.chunk(2, dim=1), weight.chunk(2, dim=1), strict=True)
    on_each_rank = sum(features @ columns.T + bias for features, columns in cuts)  # the trap
    passes = torch.allclose(on_each_rank, x @ weight.T + bias, atol=1e-5)
    print(f"{name}: the test passes although the layer is wrong: {passes}")

# %% [markdown]
# With zeros it cannot fail: twice zero is zero. After the first step it would. A test wants numbers that are not
# special, and more than one step. labkit's check draws all biases at random.

# %% [markdown]
# ## 7. Two axes: what travels where
#
# **core, 8 minutes, and 4 for an optional part**
#
# With n pairs, TP adds up activations 2 n - 1 times in a step, nearly twice for each pair. Each time everybody waits.
# Let more ranks share the same tokens. Each computes less, but sends a little more. So the part of a step that is spent
# waiting grows. This is why one does not simply put all ranks along `tp`. A second axis takes the others.
#
# Along `data` FSDP shards what tensor parallelism leaves to a rank. To FSDP that is a thinner model: each inner width
# is divided by the ranks along `tp`, and all of lab 2's formulas hold.
#
# ### Exercise 7: which axis does it run on? (•, 4 minutes)
#
# Take section 2's run, 2 × 2 ranks. How often does each collective run in a step, and along which axis? Return a dict.
# A key is an axis, a slash and a collective, such as `"tp/all_gather"`. There are three MLPs, each a unit of FSDP.
# Leave out what does not happen.
#
# <details><summary>Hint 1</summary>
#
# Activations travel along `tp`, parameters and their gradients along `data`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Lab 2: a unit is gathered for the forward pass and once more for the backward pass, and reduced once.
#
# </details>


# %%
def collectives() -> dict[str, int]:
    ### BEGIN SOLUTION
    return {"tp/all_reduce": 3 + 2, "data/all_gather": 3 + 3, "data/reduce_scatter": 3}
    ### END SOLUTION


# %%
checks.collectives(collectives, square)

# %% [markdown]
# Now the bytes that a rank hands to them. Along `data`, an all-gather is handed this rank's shard, and a reduce-scatter
# the whole gradients of the thin model. Use section 2's `end_parameter_bytes`, and your `tp_bytes`.

# %% tags=["commit"]
mine = commit(
    **{
        "tp/all_reduce_bytes": lambda: tp_bytes(tokens(2), DIM, 3),
        "data/all_gather_bytes": None,
        "data/reduce_scatter_bytes": None,
    }
)
### BEGIN SOLUTION
shard = resident["end_parameter_bytes"]
mine |= commit(**{"data/all_gather_bytes": 2 * shard, "data/reduce_scatter_bytes": MESHES[2]["data"] * shard})
### END SOLUTION

# %%
predicted = theory.step_collectives_by_axis(PAIRS, tokens(2), **MESHES[2])
plots.comparison_table(square, predicted, yours=mine)

# %% tags=["claim"]
claim(
    "every count and every byte is as theory says", all(square.value(name) == size for name, size in predicted.items())
)

# %% [markdown]
# *Every count and every byte is as theory says.*
#
# Four ranks can also be used along one axis: `tp=1` is FSDP alone, `tp=4` is tensor parallelism alone; the 2 × 2 mesh
# between them is *the square*. Bytes handed to calls do not compare: an all-gather is handed a small piece, an
# all-reduce everything. So we convert them into bytes that a rank puts **on the wire**, for a ring along each axis (lab
# 0). Of n ranks, each passes on (n - 1) / n of the whole tensor in an all-gather or a reduce-scatter, and twice that in
# an all-reduce.

# %%
runs = {1: labkit.run("two_dim", tp=1, **SETUP), 2: square, RANKS: labkit.run("two_dim", tp=RANKS, **SETUP)}
labels = {1: "FSDP alone", 2: f"{RANKS // 2} x 2", RANKS: "TP alone"}


def on_wire(tp: int) -> dict[str, float]:
    """Bytes that theory lets a rank send in a step, by axis."""
    return theory.axis_wire_bytes(theory.step_collectives_by_axis(PAIRS, tokens(tp), **MESHES[tp]), **MESHES[tp])


def measured_on_wire(tp: int) -> dict[str, float]:
    """The same from what was counted."""
    handed = {name: runs[tp].value(name) for name in runs[tp].summary() if "/" in name}
    return theory.axis_wire_bytes(handed, **MESHES[tp])


by_theory, by_count = ({labels[tp]: each(tp) for tp in runs} for each in (on_wire, measured_on_wire))
_ = plots.traffic_by_axis(by_theory, by_count, results=list(runs.values()))

# %% [markdown]
# *Bytes on the wire from one rank in a step. In a dashed frame: predicted. Plain: computed from what was counted. They
# agree. The square sends least: each of its two parts is a third of what it is alone.*
#
# Why a third? Each axis carries half: half the parameters, and activations of half the samples. That alone would save
# nothing, since there are two axes now. But each ring has two ranks and not four, and (n - 1) / n is 1/2 and not 3/4.
#
# It depends on the sizes. By the same formulas FSDP alone sends least with four times the samples, and TP alone with
# layers four times as wide.

# %% tags=["claim"]
totals = {label: sum(parts.values()) for label, parts in by_count.items()}
claim("they agree", by_theory == by_count)
claim("the square sends least", min(totals, key=totals.get) == labels[2], where=TOLD)
for samples, width, least in ((4 * BATCH, DIM, 1), (BATCH, 4 * DIM, RANKS)):
    wide = theory.mlp_pairs(width)
    wires = {
        tp: sum(
            theory.axis_wire_bytes(
                theory.step_collectives_by_axis(wide, 8 * samples // axes["data"], **axes), **axes
            ).values()
        )
        for tp, axes in MESHES.items()
    }
    fewest = min(wires, key=wires.get)
    claim(f"with {samples} samples and width {width} tp = {least} sends least", fewest == least, where=TOLD)
thin, whole = (theory.parameter_count(theory.rank_layers(PAIRS, tp)) for tp in (2, 1))
claim("FSDP gathers half as many parameters", abs(thin / whole - 0.5) < 0.02)
claim("TP sums activations of half as many samples", tokens(2) * RANKS == 2 * tokens(RANKS))

# %% [markdown]
# ### Memory (optional, 4 minutes)
#
# What does a rank hold at its peak, the moment when it holds most? The moments differ. With FSDP the peak lies inside
# the backward pass, where *temporary* are gradients on their way: of the activations, and of a layer's weight that is not
# sharded yet. Lab 2's ledger walks there, here with the thinner model. With TP alone it lies where the backward pass begins: all activations are there,
# and the gradient of the loss needs four tensors of the output's size while it is worked out (*temporary*).

# %%
expected = {}
for tp in (1, 2):
    expected[labels[tp]] = fsdp.fsdp_step_peak(theory.rank_layers(PAIRS, tp), tokens(tp), MESHES[tp]["data"])
expected["TP alone"] = theory.tp_step_peak(PAIRS, tokens(RANKS), RANKS)
_ = plots.memory_comparison(
    {label: {part: size for part, size in sizes.items() if part != "total"} for label, sizes in expected.items()},
    {labels[tp]: result for tp, result in runs.items()},
)

# %% [markdown]
# *Peak memory of a rank. Every prediction is within 5 % of the measurement. FSDP alone pays for gathered parameters and
# communication buffers, TP alone for activations; the square needs least.*
#
# TP alone keeps every sample on every rank: between the pairs all four hold the same activations. FSDP alone gathers
# whole layers. The square keeps half of the samples and gathers half of each layer. Not every part of
# its bar is a half: it has twice the samples of FSDP alone, with half of the inner features.

# %% tags=["claim"]
peaks = {labels[tp]: result.value("peak_total_bytes") for tp, result in runs.items()}
sums = {label: sum(size for part, size in sizes.items() if part != "total") for label, sizes in expected.items()}
claim("every prediction is within 5 %", all(abs(peaks[label] / sums[label] - 1) < 0.05 for label in peaks))
claim("the square needs least", min(peaks, key=peaks.get) == labels[2], where=TOLD)
activations = {labels[tp]: result.value("peak_activation_bytes") for tp, result in runs.items()}
claim("TP alone pays for activations", max(activations, key=activations.get) == "TP alone", where=TOLD)
parts_of = ("unsharded_parameter", "all_gather", "reduce_scatter")
gathered = {tp: sum(runs[tp].value(f"peak_{part}_bytes") for part in parts_of) for tp in (1, 2)}
claim("FSDP alone pays for gathered parameters and buffers", gathered[1] > 1.5 * gathered[2], where=TOLD)

# %% [markdown]
# ## 8. When does it pay?
#
# **core, 14 minutes**
#
# Bytes are not time. Bytes along `data` can travel while a rank computes. Those along `tp` are waited for, but on
# faster links. So compare times.
#
# Take one pair, of width d and inner width h, and T tokens on a rank.
#
# - Arithmetic: a step takes 6 operations for each number of the two weights and each token, and a rank has 1/tp of
#   them: `12 d h T / tp / F` seconds, with F operations a second.
# - Messages: two all-reduces, one forward and one backward, of T d numbers of b bytes. On the wire each takes
#   2 (tp - 1) / tp of that: `4 (tp - 1) / tp * b T d / B` seconds, with B bytes a second.
#
# ### Exercise 8: what the messages cost (••, 5 minutes)
#
# Return the time of the messages as a part of the time of the arithmetic. `inner` is h. Which of the letters drop out?
#
# <details><summary>Hint</summary>
#
# Compute both times for d = 1 and T = 1, and divide.
#
# </details>


# %%
def message_share(inner: int, tp: int, flops_per_s: float, wire_bytes_per_s: float, number_bytes: int) -> float:
    ### BEGIN SOLUTION
    arithmetic_s = 12 * inner / tp / flops_per_s
    messages_s = 4 * (tp - 1) / tp * number_bytes / wire_bytes_per_s
    return messages_s / arithmetic_s
    ### END SOLUTION


# %%
checks.message_share(message_share)

# %% [markdown]
# T and d drop out:
#
# > messages / arithmetic = (tp - 1) · b · F / (3 · h · B)
#
# With FSDP the batch decided (lab 2). Here it is the **inner width**: a wide layer can be shared by many ranks, a
# narrow one by few.
#
# **An example.** An NVIDIA H100 (SXM) does 989 · 10¹² bfloat16 operations a second by its data sheet, of which 40 % is
# a good result in training: F = 400 · 10¹². NVLink moves 450 GB/s in each direction. GPT-3 has an inner width of
# 49,152. Eight GPUs share it: 7 · 2 · 400 · 10¹² / (3 · 49,152 · 450 · 10⁹) = 0.084. The messages cost 8 % of the MLP's
# arithmetic. (An attention block's projections have half as many weights, and as many messages: 17 %.) In a model with
# an inner width of 4,096 they cost as much as the arithmetic itself.
#
# **Your turn.** Sixteen GPUs in two hosts share GPT-3's MLPs. Each host has a single network card of 50 GB/s, which
# the ring must cross, so that B is 50 GB/s. What do the messages cost now?

# %% tags=["commit"]
mine = commit(two_hosts=None)
### BEGIN SOLUTION
mine = commit(two_hosts=lambda: message_share(49_152, 16, 400e12, 50e9, 2))
### END SOLUTION

# %%
said = mine["two_hosts"]
by_theory = {tp: theory.message_share(49_152, tp, 400e12, speed, 2) for tp, speed in ((8, 450e9), (16, 50e9))}
print(
    f"eight GPUs of one host: {by_theory[8]:.3f} of the arithmetic; with an inner width of 4,096: "
    f"{theory.message_share(4096, 8, 400e12, 450e9, 2):.2f}"
)
print(f"two hosts: {by_theory[16]:.2f}; yours: {'–' if said is None else format(said, '.2f')}")

# %% tags=["claim"]
claim("8 % in one host, more than the arithmetic between two", 0.08 < by_theory[8] < 0.09 and by_theory[16] > 1)
claim(
    "with an inner width of 4,096 as much as the arithmetic",
    0.9 < theory.message_share(4096, 8, 400e12, 450e9, 2) < 1.1,
)

# %% [markdown]
# **This machine.** To get a rank's speed, one rank runs with all cores, and each of the four ranks is given a quarter
# of its speed. Alpha is what a message costs whatever its size, beta what each byte adds (lab 0), here for an
# all-reduce of two ranks.

# %% tags=["nbval-ignore-output"]
alone = labkit.run("two_dim", nproc=1, tp=1, **{name: SETUP[name] for name in ("dim", "batch")}, steps=5)
numbers = sum(2 * width * inner for width, inner in PAIRS)  # of all weights
speed = 6 * numbers * 8 * BATCH / ((alone.value("forward_ms") + alone.value("backward_ms")) / 1e3) / RANKS
sizes = {"message_bytes": (2**12, 2**18, 2**22), "total_bytes": 2**12, "pieces": (1,), "repeats": 15}
fitted = fit_alpha_beta(fastest_all_reduce_times(labkit.run("all_reduce", nproc=2, **sizes)).to_dict())
link = AlphaBeta(fitted.alpha_s, fitted.beta_s_per_byte / collective_wire_bytes("all_reduce", 1, 2))
bytes_per_s = 1 / link.beta_s_per_byte if link.beta_s_per_byte else float("inf")
here = theory.step_seconds(PAIRS, tokens(2), **MESHES[2], flops_per_s=speed, links={"tp": link, "data": link})
latency_s = 5 * link.alpha_s  # five all-reduces along tp
print(
    f"a rank: {speed / 1e9:.1f} GFLOP/s; a link: alpha {link.alpha_s * 1e6:.0f} µs, {bytes_per_s / 1e9:.2f} GB/s on the wire"
)
share = theory.message_share(4 * DIM, 2, speed, bytes_per_s, 4)
print(f"without latency the messages of the MLP of inner width {4 * DIM} cost {share:.2f} of its arithmetic")
print(
    f"so a step of 2 x 2 has {1e3 * here['compute']:.1f} ms of arithmetic, "
    f"and {1e3 * here['tp']:.2f} ms of messages along tp, of which {1e3 * latency_s:.2f} ms are latency"
)
took_ms = {"PyTorch's plan": square.value("step_ms"), "section 5's layers": own.value("step_ms")}
print("measured steps: " + ", ".join(f"{step_ms:.0f} ms with {how}" for how, step_ms in took_ms.items()))

# %% [markdown]
# In most runs the real steps take far longer than arithmetic and messages together. We take two causes to be the main
# ones: four ranks share two cores, and on tensors as small as these PyTorch's own work for every operation weighs much.
# This run does not tell them apart. Latency is often the larger part of the messages' time here, and exercise 8's
# formula leaves it out. With more tokens, bytes and arithmetic grow, and latency does not.
#
# ### How many ranks along tp?
#
# Now a whole step, both axes, on a cluster: 64 H100s in eight hosts, with a card of 50 GB/s for *each* GPU. The network
# has 32 MLPs of width 4096 and inner width 16,384, and a step takes 64 texts of 2048 tokens, in bfloat16. Two links:
#
# - Along `tp`, inside a host: NVLink, 450 GB/s. With 16 ranks along `tp` the message is split
#   over eight rings, which leave the host through one card each: 400 GB/s.
# - Along `data`, between hosts. Rings run side by side, one for each card. A group that has k GPUs in a host sends in k
#   rings, each with a k-th of the bytes and a card of its own at the host's border; inside it uses NVLink. So its bytes
#   move at k · 50 GB/s, with k = 8/tp, but at least 1. With one rank along `tp` that is 400 GB/s.
#
# Latency is left out: data sheets do not give it, and these messages are large.

# %%
CARD, NVLINK, HOST = AlphaBeta(0, 1 / 50e9), AlphaBeta(0, 1 / 450e9), 8
deep = [(4096, 4 * 4096)] * 32
wires, seconds = {}, {}
for tp in (1, 2, 4, 8, 16):
    axes, of_rank = {"data": 64 // tp, "tp": tp}, 64 * 2048 * tp // 64
    links = {
        "tp": theory.host_link(CARD, NVLINK, tp, 1, HOST),
        "data": theory.host_link(CARD, NVLINK, axes["data"], tp, HOST),
    }
    sent = theory.axis_wire_bytes(theory.step_collectives_by_axis(deep, of_rank, **axes), **axes)
    wires[str(tp)] = {axis: size / 2 for axis, size in sent.items()}  # theory counts 4 bytes a number
    seconds[str(tp)] = theory.step_seconds(deep, of_rank, **axes, flops_per_s=400e12, links=links, number_bytes=2)
panels = {
    title: {tp: theory.seconds_after_overlap(parts, overlap) for tp, parts in seconds.items()}
    for title, overlap in (("time, nothing hidden", False), ("time, data hidden behind computing", True))
}
_ = plots.step_time_by_tp(panels, sent=wires, xlabel="ranks along tp, of 64")

# %% [markdown]
# *Theory alone. Left: bytes that a rank puts on the wire; four ranks along `tp` send least, half of what one sends.
# Middle and right: a step's time. The computing is the same everywhere. Along `data` it takes nearly the same time
# from 1 to 8. The more ranks along `tp`, the longer a step takes, whether data is hidden or not. With data hidden,
# FSDP alone waits for nothing (the first and the last message, which nothing can hide, are left out).*

# %% tags=["claim"]
bytes_by_tp = {tp: sum(parts.values()) for tp, parts in wires.items()}
claim("four send least", min(bytes_by_tp, key=bytes_by_tp.get) == "4")
claim("half of what one sends", 0.45 < bytes_by_tp["4"] / bytes_by_tp["1"] < 0.55)
claim("the computing is the same", max(each["compute"] for each in seconds.values()) / seconds["1"]["compute"] < 1.001)
by_data = [seconds[tp]["data"] for tp in ("1", "2", "4", "8")]
claim("along data nearly the same time from 1 to 8", max(by_data) / min(by_data) < 1.15)
for bars in panels.values():
    times = [sum(parts.values()) for parts in bars.values()]
    claim("the more ranks along tp, the longer a step takes", times == sorted(times))
claim("with data hidden, FSDP alone waits for nothing", panels["time, data hidden behind computing"]["1"]["data"] == 0)

# %% [markdown]
# Three things are worth a thought.
#
# - The bytes mislead. They add a slow and hidden byte to a fast and exposed one.
# - Along `data` the time hardly depends on `tp`, up to 8. A host needs all parameters, however its GPUs share them, and
#   all of them come in through the same eight cards. With 16, two hosts share them, and each needs half.
# - So `tp` does not make the step faster here. It makes steps **possible**: with 16 texts instead of 64, one or two
#   ranks along `tp` cannot be had at all, and a long text's activations may not fit on one GPU.
#
# With 16 the messages still take less than the computing, since eight rings share eight cards and latency is left out.
# With one card for a host, as in the question above, they cost more than the arithmetic. Hence the rule: **take the
# smallest `tp` that batch and memory allow, and stay inside a host.** It must also divide the inner widths and the
# attention heads (section 9). Then check the cost, with the alpha and beta of your links: for each pair, `2 (alpha + b
# T d · beta)` against `12 d h T / (tp F)`, where beta is for a byte handed to the all-reduce. For many tokens alpha
# drops out, and this is exercise 8. For few, as when a model writes one token after another, alpha decides.
#
# Can the messages along `tp` hide after all? In part. Megatron-LM computes the weight's gradient while the backward
# all-reduce travels. PyTorch can cut a product into pieces and send each while the next is computed (*asynchronous
# TP*). The figure is for a stack without any of this.

# %% [markdown]
# ### Explore (optional, 5 minutes)
#
# The stack of this lab, by the formulas of this section: left what a rank sends in a step, right its time, for every
# length of `tp` that the ranks and the samples allow. Numbers have 4 bytes here. Until a run has measured it, a rank is
# taken to do 400 · 10¹² operations a second. *run it* trains on this machine's ranks, counts bytes, and predicts the
# time again with what it has measured of them. Ranks that share a core wait for each other's turn at every message, so
# there a step takes longer than predicted. More ranks than this machine can run are theory.
#
# Mind one difference from the figure above: a link keeps its speed here, whatever `tp` is. So 50 GB/s along `data` is a
# group of ranks with one card, also with one rank along `tp`, which had eight cards above.
#
# Take 64 ranks, width 4096 and 131,072 tokens, with 450 GB/s along `tp` and 50 along `data`. Which `tp` is best? Then
# let messages along `data` travel meanwhile, and give that axis 400 GB/s, which are eight cards. Which `tp` is best
# now? And why does the first answer not agree with the figure above?
#
# <details><summary>Answer</summary>
#
# First 8: the messages along `data` are waited for, and `tp` makes them smaller, while their link stays as slow. In a
# real host fewer ranks along `tp` have more cards each, which makes up for it: that is the figure above. Then 1:
# messages along `data` hide behind the computing, and those along `tp` do not.
#
# </details>

# %%
widgets.TwoAxesExplorer()

# %% [markdown]
# ## 9. A real block: attention, embedding, loss
#
# **optional, 22 minutes**
#
# ### How is attention cut? By heads
#
# An attention layer projects each token to a query, a key and a value, and cuts these into **heads**. Each head mixes
# the values of the tokens by itself. So heads are to attention what inner features are to an MLP: give each rank some
# of them. Query, key and value are colwise, the projection behind is rowwise, and one all-reduce adds up the parts.
# There is a softmax in between. It sums over tokens, inside a head, and each rank has all tokens.
#
# So the number of heads must be a multiple of `tp`. (With grouped queries, several heads share a key and a value: then
# the number of those counts. Llama 3 has 8.) And the code that cuts features into heads must know that a rank has fewer
# of them. If it insists on the number of heads, it runs without an error, and cuts heads that are too small:

# %%
HEADS, SIZE = 4, 2
draw = torch.Generator().manual_seed(3)
x, query, key, value = (torch.randn(size, generator=draw) for size in ((5, 8), (8, 8), (8, 8), (8, 8)))


def attend(x, weights, shape):
    q, k, v = ((x @ weight.T).unflatten(1, shape).transpose(0, 1) for weight in weights)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


whole = attend(x, (query, key, value), (HEADS, SIZE))
pieces = [[weight.chunk(2)[rank] for weight in (query, key, value)] for rank in range(2)]
for name, shape in {"heads of 2 features": (-1, SIZE), "4 heads": (HEADS, -1)}.items():
    joined = torch.cat([attend(x, piece, shape) for piece in pieces], dim=1)
    print(f"each rank cuts its features into {name}: right: {torch.allclose(joined, whole, atol=1e-5)}")

# %% [markdown]
# ### Exercise 9: a block's plan (••, 7 minutes)
#
# This block has what those of language models have: attention, and a *gated* MLP, in which one layer opens and closes
# the other's features. (Norms are left out. They treat each token alone, and every rank does the same.)

# %%
print(inspect.getsource(two_dim.Block.forward))

# %% [markdown]
# Write its plan: a dict from the names `query`, `key`, `value`, `out`, `gate`, `up` and `down` to `ColwiseParallel()`
# or `RowwiseParallel()`. It runs on 2 × 2 ranks, in other processes; whatever it uses of this notebook is copied there.
# Four all-reduces along `tp` are enough for a step.
#
# <details><summary>Hint 1</summary>
#
# Find the pairs. Which layers make features, and which one takes them in?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `gate` and `up` make features side by side, and `down` takes them. In attention three layers make features.
#
# </details>


# %%
def block_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    first = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    return first | {name: RowwiseParallel() for name in ("out", "down")}
    ### END SOLUTION


# %%
checks.block_plan(block_plan)

# %% [markdown]
# Why four, and not three? Forward there are two, one behind each pair. Backward, `gate` and `up` have the same input,
# and PyTorch's plan sums the gradient of each by itself. Query, key and value are spared: their input here are the
# samples. In a deeper model they would cost three more. Megatron-LM makes one matrix of such layers, with one
# all-reduce. In PyTorch, `PrepareModuleInput` for the module around them does the same.
#
# ### How are embedding and loss cut?
#
# An **embedding** is a table with a row for each word of the vocabulary. Cut it by rows: a rank looks up the words that
# it has, takes zeros for the others, and an all-reduce adds up. In PyTorch that is `RowwiseParallel`, which here does
# cut dim 0: the table already is the papers' matrix, not its transpose. The **last layer** makes a *logit* for each
# word: cut it colwise, and each rank has the logits of its words.
#
# Now the two ends of such a layer matter. In a plan, `input_layouts` says how its input *is* laid out when it arrives,
# and `output_layouts` how the output *shall* leave: `Replicate()` is whole, `Shard(-1)` is cut along the last
# dimension. If you say nothing, a colwise layer takes `Replicate()` and leaves `Shard(-1)`, and a rowwise layer the
# other way round.
#
# ### Exercise 10: both ends (••, 5 minutes)
#
# Write the plan for `embed`, an `nn.Embedding`, and `head`, an `nn.Linear`. Token ids come in whole, and whole logits
# shall come out.
#
# <details><summary>Hint</summary>
#
# By default a rowwise layer believes that its input comes cut, and a colwise one leaves its output cut. Neither is so
# here.
#
# </details>


# %%
def words_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    ### END SOLUTION


# %%
checks.words_plan(words_plan)

# %% [markdown]
# Whole logits are large: with Llama 3's 128,256 words, a text of 8,192 tokens has 4.2 GB of them in float32. They need
# not be put together. The **cross-entropy** of a token needs three numbers from all ranks: the largest logit, the sum
# of the exponentials, and the logit of the right word. `loss_parallel` does that, with logits that stay cut:

# %%
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
logits, words = torch.randn(16, 100, requires_grad=True), torch.randint(100, (16,))  # 16 tokens, 100 words
cross_entropy(logits, words).backward()
cut = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()  # each rank has 50 of the words
with loss_parallel(), CommDebugMode() as counted:
    cross_entropy(cut, words).backward()
right = torch.allclose(cut.grad.full_tensor(), logits.grad)
f"the gradient is right: {right}; collectives: {sum(counted.get_comm_counts().values())}"

# %% [markdown]
# In a plan the last layer then is `ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)`: the logits stay
# a DTensor. In your own script, the loss and its backward pass stand inside `with loss_parallel():`.

# %% [markdown]
# ## 10. Cut the sequence, too
#
# **optional, 10 minutes**
#
# This section has all four ranks along `tp`. TP leaves the activations between the pairs whole on every rank. What
# happens there, such as ReLU, norm or dropout, treats each token alone. So each rank could keep only its share of the
# tokens. This is **sequence parallelism**.
#
# An all-reduce is a reduce-scatter followed by an all-gather (lab 0). Split it: reduce-scatter behind a pair,
# all-gather in front of the next. Each puts half of an all-reduce's bytes on the wire. Our three pairs had five
# all-reduces, that is ten halves. Now there are five reduce-scatters and five all-gathers, ten halves as well. The
# result goes out whole: one all-gather more. And labkit treats the samples like everything between the pairs: each rank
# cuts out its tokens, and they are gathered before the first pair. That is another one: twelve halves. (A plan that
# leaves the samples whole, as in exercise 11, pays less.)

# %%
halves = {}
for name, cut in (("sequence whole", False), ("sequence cut", True)):
    sent = theory.activation_collectives(PAIRS, tokens(RANKS), RANKS, sequence_parallel=cut)
    halves[name] = theory.axis_wire_bytes(sent, **MESHES[RANKS])["tp"]
    counts = [
        f"{count} {key.removeprefix('tp/').removesuffix('_count')}"
        for key, count in sent.items()
        if key.endswith("_count")
    ]
    print(f"{name}: {halves[name]:,.0f} bytes on the wire in {' and '.join(counts)}")

# %% tags=["claim"]
claim("twelve halves instead of ten", abs(halves["sequence cut"] / halves["sequence whole"] - 12 / 10) < 1e-9)

# %% [markdown]
# In a stack of many layers, two more do not matter.
#
# And the memory? Here it pays to look closely. `ColwiseParallel` keeps the input that it has gathered, because the
# gradient of its weight needs it. In a stack of bare MLPs that costs more than is gained. (In a transformer the norms
# and residuals between the pairs gain, too.) It pays off with activation checkpointing, where a pair keeps only its own
# tokens of the input, and gathers the others again.

# %%
rows = {}
for checkpointing in (False, True):
    for cut in (False, True):
        label = "checkpointing" if checkpointing else "everything kept"
        how = {"sequence_parallel": cut, "checkpointing": checkpointing}
        held_bytes = theory.tp_activation_bytes(PAIRS, tokens(RANKS), RANKS, **how)
        rows.setdefault(label, {})["cut" if cut else "whole"] = held_bytes
pandas.DataFrame.from_dict(rows, orient="index").add_prefix("bytes, sequence ")

# %% [markdown]
# By theory: these are the activations of TP alone when the forward pass ends. Let us measure the second line.

# %%
checkpointed = SETUP | {"tp": RANKS, "checkpointing": True}
sequence = {
    "sequence whole": labkit.run("two_dim", **checkpointed),
    "sequence cut": labkit.run("two_dim", seq=True, **checkpointed),
}
forecast = {
    f"sequence {cut}": theory.tp_step_peak(
        PAIRS, tokens(RANKS), RANKS, sequence_parallel=cut == "cut", checkpointing=True
    )
    for cut in ("whole", "cut")
}
_ = plots.memory_comparison(forecast, sequence)

# %% [markdown]
# *Peak memory of a rank. With the sequence cut, activations are fewer: between the pairs a rank keeps a quarter of the
# tokens; the samples and the result stay whole. All else stays as it was, and every prediction is within 2 % of the
# measurement.*

# %% tags=["claim"]
held = {label: result.value("peak_activation_bytes") for label, result in sequence.items()}
claim("activations are fewer", held["sequence cut"] < held["sequence whole"])
others = [result.value("peak_total_bytes") - held[label] for label, result in sequence.items()]
claim("all else stays as it was", abs(others[0] / others[1] - 1) < 0.01)
off = [result.value("peak_total_bytes") / sum(forecast[label].values()) for label, result in sequence.items()]
claim("within 2 %", all(abs(each - 1) < 0.02 for each in off))

# %%
how = {"sequence_parallel": True, "checkpointing": True}
predicted_cut = theory.step_collectives_by_axis(PAIRS, tokens(RANKS), **MESHES[RANKS], **how)
plots.comparison_table(sequence["sequence cut"], predicted_cut)

# %% [markdown]
# The counts include what checkpointing repeats: each pair's forward pass runs twice, with its messages.

# %% [markdown]
# ## 11. A plan that is silently wrong
#
# **optional, 14 minutes**
#
# Somebody wanted to cut the sequence between the MLPs of our stack. In a plan, `input_layouts` says how a layer's input
# *is* laid out when it arrives, and `output_layouts` how the output *shall* leave. `Shard(1)` is cut along the tokens.
# **The next verdict is meant to be red.**


# %%
def broken_plan() -> dict[str, object]:
    plan = {}
    for index in range(3):
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


checks.stack_plan(broken_plan)

# %% [markdown]
# The output is right on every rank, and so is the loss of the first step. But each gradient is twice as large as it
# should be.
#
# The samples come in whole on every rank of `tp`. The plan says that they are cut. So PyTorch takes two copies of a
# text for two halves of a longer one, computes everything twice, and adds up the gradients of both.
#
# ### The loss hides it
#
# Does training show it? Both plans train the stack with Adam. Before you run: by how much, in percent, does the loss of
# the wrong plan differ after ten steps?

# %% tags=["commit"]
mine = commit(percent=None)
### BEGIN SOLUTION
mine = commit(percent=0)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
long = SETUP | {"tp": 2, "steps": 10}
pairwise = labkit.run("two_dim", **long)
doubled = labkit.run("two_dim", use={"tensor_parallel_plan": lambda model: broken_plan()}, **long)
apart = 100 * (doubled.losses / pairwise.losses - 1).abs()
said = mine["percent"]
print(f"after ten steps by {apart.iloc[-1]:.1g} %; yours: {'–' if said is None else format(said, 'g')} %")

# %% tags=["nbval-ignore-output"]
_ = plots.loss_difference_curves({"every gradient twice as large": doubled}, pairwise, name="the right plan")

# %% [markdown]
# *How far the wrong plan's loss is from the right one's, as a part of it. It stays below a thousandth in all these
# steps. In a curve of these ten steps nobody would see it; how far it grows later was not measured.*

# %% tags=["claim"]
claim("below a thousandth in all these steps", apart.max() < 0.1, where=TOLD)

# %% [markdown]
# Adam divides each gradient's running mean by its running size. A factor in all gradients drops out, but for the tiny ε
# in the denominator, and for rounding. These differences are small at first, and training makes them grow. The curve
# still looks right here. With SGD, or with weight decay inside the
# gradient, the same plan would train differently. A check of the loss would not have found it. Compare gradients, and
# count what was compared.
#
# ### Exercise 11: repair it (•••, 8 minutes)
#
# Write a plan that is right. Between the MLPs the sequence shall stay cut. The samples come in whole, and the result
# shall go out whole. Your plan runs in other processes, as above.
#
# <details><summary>Hint 1</summary>
#
# Go through the stack. How does the input of each MLP really arrive? How shall the last result leave?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Only the first `in_proj` and the last `out_proj` differ from the plan above.
#
# </details>


# %%
def repaired_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    plan = {}
    for index in range(3):
        comes = Replicate() if index == 0 else Shard(1)  # the samples are whole
        leaves = Replicate() if index == 2 else Shard(1)  # and so shall the result be
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(input_layouts=comes)
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=leaves)
    return plan
    ### END SOLUTION


# %%
checks.stack_plan(repaired_plan)

# %% [markdown]
# ## 12. DDP along the other axis
#
# **optional, 10 minutes**
#
# Where memory is no concern, gradients can be averaged along `data` as in plain data parallelism (DDP): every rank
# keeps its thin model whole, and one all-reduce averages. DDP comes as `replicate`, which changes a model in place. Is
# it enough to write `replicate` where section 2 has `fully_shard`? Look at `parameters()`.

# %%
# %%torchrun -n 4
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
replicate(model, device_mesh=mesh["data"])
before = len(list(model.parameters()))
model(torch.randn(3, 4)).sum().backward()
f"parameters: {before} before the first forward pass, {len(list(model.parameters()))} after it"

# %% [markdown]
# The parameters are gone. DDP knows no DTensors. So `replicate` makes plain parameters of them, for DDP, and before
# each forward pass it puts DTensors made from these into the modules, as ordinary attributes
# ([pytorch#152712](https://github.com/pytorch/pytorch/issues/152712)). There is no error. But a test that goes through
# `parameters()` afterwards compares nothing, and passes, and a checkpoint of the model is empty.
#
# labkit works around it with a wrapper, `PlainParameters`. It keeps this rank's shards as plain parameters, which DDP
# takes as they are. In every forward pass it makes DTensors of them for this one call:

# %%
print(inspect.getsource(PlainParameters.forward))
print(inspect.getsource(PlainParameters.as_dtensors))

# %% [markdown]
# Your own layers of section 5 need no workaround: their parameters are plain. (PyTorch has a newer `replicate`, made of
# FSDP's parts, in `torch.distributed._composable.replicate_with_fsdp`. It takes DTensors and keeps the parameters. The
# underscore says that it may still change.)
#
# Now DDP along `data`, measured. **This run has another model**, four linear layers, as in lab 0: two pairs, with no
# ReLU. A sample has one token there, so on the 2 × 2 mesh a rank works on `BATCH / 2` tokens.

# %%
replicated = labkit.run("two_dim", plan="ddp_tp", **SETUP)
chain = theory.chain_pairs(DIM)
predicted_ddp = theory.step_collectives_by_axis(chain, BATCH // MESHES[2]["data"], **MESHES[2], plan="ddp_tp")
plots.comparison_table(replicated, predicted_ddp | {"data/all_reduce_count": 1})

# %% [markdown]
# All gradients travel in one all-reduce along `data`. DDP puts small gradients together into a *bucket*, and sends it
# as one message; here one bucket holds all. Along `tp` there are two all-reduces forward and one backward.
#
# What does FSDP save against DDP on the same mesh? It divides parameters, gradients and Adam's means by the number of
# ranks along `data`. By theory, for this lab's stack:

# %%
plans = ("ddp_tp", "fsdp_tp")
states = {plan: theory.mesh_resident_bytes(PAIRS, **MESHES[2], plan=plan) for plan in plans}
pandas.DataFrame.from_dict(states, orient="index")

# %% [markdown]
# ### What to expect on GPUs (2 minutes)
#
# - The same program is written to run unchanged, over NCCL: `labkit.run("two_dim", nproc=4, preset="paper")`. It is
#   wider (`dim=2000`). Counts and bytes should again be those of theory; no GPU run is recorded yet.
# - `tp` belongs inside a host, and is seldom larger than 8. FSDP gathers ahead along `data`, on streams of its own.
# - A third axis can follow, such as pipeline stages. The method stays: predict each axis by itself.
#
# Figures from named GPUs belong in the folder `results`. None is recorded there yet for this lab.

# %% [markdown]
# ## 13. Leave with
#
# **core, 5 minutes**
#
# Predicted beside measured, for the runs above that theory covers.

# %% tags=["summary"]
tables = {
    labels[2]: plots.comparison_table(square, predicted | resident),
    "your layers": plots.comparison_table(own, predicted | resident),
}
for tp in (1, RANKS):
    traffic = theory.step_collectives_by_axis(PAIRS, tokens(tp), **MESHES[tp])
    tables[labels[tp]] = plots.comparison_table(runs[tp], traffic | theory.mesh_resident_bytes(PAIRS, **MESHES[tp]))
tables["sequence cut"] = plots.comparison_table(sequence["sequence cut"], predicted_cut)
tables["DDP x TP"] = plots.comparison_table(replicated, predicted_ddp | {"data/all_reduce_count": 1})
pandas.concat(tables)

# %% [markdown]
# | | |
# |---|---|
# | colwise | PyTorch's weight along dim 0: a rank makes some features; backward, an all-reduce of the input's gradient |
# | rowwise | along dim 1: a rank takes in some features; forward, an all-reduce; the bias added once, after it |
# | what may stand between | what treats each feature, or each head, alone |
# | mesh | `("data", "tp")`, `tp` last: inside a host |
# | along `tp` | activations, 2 n - 1 all-reduces for n pairs, waited for |
# | along `data` | parameters and gradients of the thin model, hidden while the batch is large enough |
# | how many along `tp` | as few as batch and memory allow |
#
# ### Five questions
#
# <details><summary>1. Why is the first layer of a pair cut colwise and the second rowwise, and not the other way round?</summary>
#
# Rowwise first would need an all-reduce before the ReLU, since the ReLU of a sum is not the sum of the ReLUs. Colwise
# first lets each rank go on with its features.
#
# </details>
# <details><summary>2. A row-parallel layer on 8 ranks gives outputs that are off by the same vector everywhere. What do you look at?</summary>
#
# The bias. It is in the sum eight times. The vector is seven biases.
#
# </details>
# <details><summary>3. You double the texts on each rank. What happens to the part of a step that waits for tp? And for data?</summary>
#
# For tp it stays, where latency does not matter: bytes and arithmetic both double. For data it shrinks: the parameters stay as large as they are,
# and there is more to hide behind.
#
# </details>
# <details><summary>4. A model has 32 heads, 8 of them for keys and values. Which tp are possible?</summary>
#
# 1, 2, 4 and 8: tp must divide both numbers, and more than 8 would need copies of keys and values.
#
# </details>
# <details><summary>5. The output and the loss curve of a plan are those of one device. Is it right?</summary>
#
# Not proven. Gradients may be off by a factor, and Adam hides that. Compare gradients, and count what was compared.
#
# </details>
#
# ### Read on
#
# - Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019:
#   https://arxiv.org/abs/1909.08053
# - Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022:
#   https://arxiv.org/abs/2205.05198
# - Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3: https://arxiv.org/abs/2407.21783
# - PyTorch's tutorial: https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, and its pages on
#   `torch.distributed.tensor.parallel`: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html, and on
#   meshes: https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
# - NVIDIA's data sheet of the H100: https://www.nvidia.com/en-us/data-center/h100/
# - In labkit: `labkit/parallel/small_tensor_parallel.py` (yours), `labkit/parallel/tensor_parallel.py` (the plans, and
#   `PlainParameters`), `labkit/theory/two_dim.py` (the formulas), `labkit/session/traffic.py` (counting by axis).
#
# ### What comes next
#
# - Compile it: `labkit.check("two_dim", nproc=4, plan="ddp_tp")`. It needs a C++ compiler.
# - For a model of your own: draw which tensors are whole, cut or partial between two layers. Then write the plan.
# - Lab 6 plays one rank of a thousand. Lab 7 lets runs break, and finds out why.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("two_dim")
