# %% [markdown]
# # Lab 5. Two dimensions: share the matrices, and share the samples
#
# With FSDP (lab 2) every rank takes samples of its own, and parameters are put together before they are used. In
# **tensor parallelism** (TP) a matrix stays in pieces, and ranks that work on the same samples each compute with their
# piece. Large models use both, on a grid of ranks with two axes. After this lab you can
#
# - cut a pair of linear layers over ranks, and prove that it trains as on one device;
# - write the plan that cuts a transformer block, and train it on a mesh of two axes;
# - catch a wrong plan that raises no error;
# - choose how many ranks share a matrix, from the batch, the layer's width and the links.
#
# You need lab 0's collectives and lab 2's FSDP, and no GPU. The lab takes about {core_minutes} minutes, and its
# exercises have one dot (easy) or two. Sequence parallelism, embedding and loss are in the companion 5b.

# %% tags=["nbval-ignore-output"]
import inspect

import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel
from torch.nn.functional import linear, relu

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.models.blocks import TransformerBlock
from labkit.parallel import small_tensor_parallel as ours
from labkit.parallel.tensor_parallel import transformer_plan
from labkit.theory import emulated_steps
from labkit.theory import two_dim as theory
from labkit_course import widgets
from labkit_course.checks import two_dim as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="5")

# %% [markdown]
# You may change these parameters. A sample is a text of 8 **tokens** of `DIM` numbers each.

# %% tags=["parameters"] small={"DIM": 16, "BATCH": 8} points=[[4,16,4,1],[4,48,24,2],[8,128,64,3]]
RANKS: int = 4  # ranks of the mesh
DIM: int = 64  # width of the network
BATCH: int = 48  # samples of all ranks together in a step
STEPS: int = 10  # timed training steps in a run, before one that counts bytes

# %%
require("RANKS", RANKS, at_least=4, at_most=8, multiple_of=4, because="both axes have 2 ranks or more")
require("DIM", DIM, at_least=16, multiple_of=16, because="two ranks share the heads, of 8 features each")
require("BATCH", BATCH, at_least=1, multiple_of=RANKS, because="the ranks share the samples evenly")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(8)  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, DIM, BATCH, STEPS) == (4, 64, 48, 10)  # the values that the text speaks of
SETUP = {"nproc": RANKS, "tp": 2, "dim": DIM, "batch": BATCH}
PARITY = SETUP | {"compile": False, "steps": 3}

# %% [markdown]
# ## 1. More ranks than samples ({minutes} minutes)
#
# FSDP shards parameters, gradients and optimizer state, but every rank needs at least one text of its own. Llama 3 with
# 405 billion parameters was trained on 16,384 GPUs with 2,048 texts in a step (Llama Team, 2024, table 4). With FSDP
# alone, seven of eight would have had no text. Besides pipelines of layers, which this course leaves out, the answer
# was to share matrices: the eight GPUs of a **host**, one machine, each held a part of every matrix, and worked on the
# same texts.
#
# Take two layers of an MLP:
#
# > `y = relu(x @ first.T) @ second.T`
#
# PyTorch stores a weight as [features out, features in]. Row i of `first` makes inner feature i, and column i of
# `second` says what feature i does to `y`. So a rank that owns some inner features needs only these rows and these
# columns.

# %%
ONE_TOKEN = {"x": [[1, 2]], "first": [[1, 0], [0, 1], [1, 1], [0, -1]], "second": [[1, 0, 2, 1], [0, 1, 0, 1]]}
_ = plots.pair_diagram(**ONE_TOKEN)

# %% [markdown]
# *One token, four inner features and two ranks. Each rank computes with its own features, nothing is sent between the
# layers, and one all-reduce adds up the parts of y.*
#
# Papers write x W, where W is the transpose of PyTorch's weight. The first layer is cut **colwise**: by columns of W,
# which are dim 0 of PyTorch's weight. The second is cut **rowwise**, dim 1.
#
# ### Exercise 1: each rank's part (•, {minutes} minutes)
#
# Return a list with what each rank computes before the all-reduce, where rank 0 owns the first features.
#
# <details><summary>Hint 1</summary>
#
# Go through the figure from left to right, for one rank.
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
# *Takeaway: colwise, then rowwise: a pair of layers needs one all-reduce forward, as long as what lies between, such as
# ReLU, treats each feature alone.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# Four ranks form a **mesh** of 2 × 2 with the axes `data` and `tp`, and a **plan** names the cut of each layer. First
# `parallelize_module` cuts the matrices along `tp`, and then `fully_shard` shards along `data` what is left.

# %% tags=["script"]
# %%torchrun -n 4
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.filterwarnings("ignore", message=".*returned a view")  # FSDP warns of changing outputs in place
dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))  # "cuda" on GPUs
torch.manual_seed(0)  # all ranks start with the same parameters
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.Adam(model.parameters())

torch.manual_seed(mesh["data"].get_local_rank())  # the same samples for ranks that share a matrix
samples = torch.randn(16, 8)
for _ in range(5):
    optimizer.zero_grad()
    (model(samples) - samples).square().mean().backward()
    optimizer.step()

for name, weight in model.named_parameters():
    print(f"{name} {tuple(weight.shape)}, of which {tuple(weight.to_local().shape)} here")
dist.destroy_process_group()

# %% [markdown]
# A rank keeps a quarter of each weight: half along `tp`, and half of that along `data`. The second layer's bias is
# whole along `tp`, so that only `data` cuts it.

# %%
_ = plots.mesh_diagram(data=2, tp=2)

# %% [markdown]
# *A blue row, along* `tp`*, has the same samples and different features; an orange column, along* `data`*, the reverse.
# A rank keeps the dark quarter, and FSDP gathers the light one before use.*
#
# The mesh is filled row by row, and torchrun gives neighbouring numbers to the ranks of one host. `tp` comes last, so
# that its ranks share a host, because everybody waits for its messages.
#
# `launch/two_dim.py` does the same with three MLPs, each a unit of FSDP. Commit before you run it: how many all-reduces
# along `tp` and how many all-gathers along `data` does one training step take? Backward, a rank's features give only a
# part of the gradient of x, which the pair in front needs whole; and FSDP frees a unit after its forward pass (lab 2).

# %% tags=["commit"]
mine_calls = commit(**{"tp/all_reduce_count": None, "data/all_gather_count": None})
### BEGIN SOLUTION
mine_calls = commit(**{"tp/all_reduce_count": 3 + 2, "data/all_gather_count": 3 + 3})
### END SOLUTION

# %%
square = labkit.run("two_dim", steps=1, **SETUP)
predicted = theory.step_collectives_by_axis(theory.mlp_pairs(DIM), 8 * BATCH * 2 // RANKS, data=RANKS // 2, tp=2)
counts = {name: predicted[name] for name in mine_calls}
plots.comparison_table(square, counts, yours=mine_calls)

# %% tags=["claim"]
claim(
    "every count and every byte is as theory says", all(square.value(name) == size for name, size in predicted.items())
)
x, first, second = (torch.tensor(each, dtype=torch.float) for each in ONE_TOKEN.values())
claim("the parts add up to y", (relu(x @ first.T) @ second.T).tolist() == [[7, 2]])
weights = [layer.shapes[0] for layer in theory.rank_layers([(8, 32)], 2)]  # of a rank along tp: [out, in]
claim("each rank keeps a quarter of each weight", [rows * cols // 2 for rows, cols in weights] == [8 * 32 // 4] * 2)

# %% [markdown]
# *Takeaway: activations and their gradients travel along `tp`, parameters and theirs along `data`.*
#
# ## 3. Build it, forward and backward ({minutes} minutes)
#
# In the backward pass the gradient of `y` is whole on every rank, because `y` is. Each rank can follow it through its
# own two pieces.

# %%
_ = plots.pair_diagram(**ONE_TOKEN, gradient=[[1, 2]])

# %% [markdown]
# *The same pair backward: every rank has used all of x, so its gradient is a sum over the ranks.*
#
# The first MLP of a stack is spared, since nobody asks for the gradient of samples: 3 + 2 = 5. Gradients of weights do
# not travel along `tp`: a rank computes those of its own pieces whole.
#
# A pair has two ends, which Megatron-LM calls f and g. At f, x enters as it is; at g the parts leave, and an all-reduce
# adds them up. The figure tells what each end does with a gradient.
#
# ### Exercise 2: the two ends (••, {minutes} minutes)
#
# Write f as `CopyToRanks` and g as `SumOverRanks`. Each is a `torch.autograd.Function`, whose `forward(ctx, ...)`
# computes, and keeps in `ctx` what `backward` needs. `backward` gets the gradient of what `forward` returned, and
# returns one value for each argument of `forward` after `ctx`: a gradient, or None. `group` is the process group of the
# ranks that share the matrix, and `dist.all_reduce(tensor, group=group)` sums over it in place. Do not change a tensor
# that you are given.
#
# <details><summary>Hint 1</summary>
#
# In each of the four methods: is the tensor whole on every rank already, or is it one rank's part of a sum?
#
# </details>
# <details><summary>Hint 2</summary>
#
# f and g need the same three lines, in different methods: copy, all-reduce the copy, return it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# f: `ctx.group = group` and `return x`; then `total = grad.clone()`, `dist.all_reduce(total, group=ctx.group)`,
# `return total, None`.
#
# </details>


# %%
class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ### BEGIN SOLUTION
        ctx.group = group
        return x
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ### BEGIN SOLUTION
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
        ### END SOLUTION


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ### BEGIN SOLUTION
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ### BEGIN SOLUTION
        return grad, None
        ### END SOLUTION


# %%
ends_verdict = checks.pair_ends(CopyToRanks, SumOverRanks)
ends_verdict

# %% [markdown]
# The first layer uses your f or, until it passes, labkit's.


# %%
def copy_to_ranks(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return (CopyToRanks if ends_verdict.ok else ours.CopyToRanks).apply(x, group)


def sum_over_ranks(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return (SumOverRanks if ends_verdict.ok else ours.SumOverRanks).apply(part, group)


class ColumnParallel(nn.Module):
    def __init__(self, layer: nn.Linear, group: ProcessGroup):
        super().__init__()
        self.group, place, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[place].clone())
        self.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[place].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(copy_to_ranks(x, self.group), self.weight, self.bias)


# %% [markdown]
# ### Exercise 3: the second layer, and its trap (••, {minutes} minutes)
#
# Write the second layer, which takes this rank's features and returns the whole output. Its weight is cut along dim 1,
# and its bias is whole on every rank. There are three ways to go wrong with the bias, and only one of them shows in the
# output.
#
# <details><summary>Hint 1</summary>
#
# If every rank adds the bias to its part, how often is it in the sum?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Adding it on one rank alone mends the output. Then the other ranks' biases get no gradient, and copies that should be
# equal drift apart.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `sum_over_ranks(linear(x, self.weight), self.group) + self.bias`
#
# </details>


# %%
class RowParallel(nn.Module):
    def __init__(self, layer: nn.Linear, group: ProcessGroup):
        super().__init__()
        ### BEGIN SOLUTION
        self.group, place, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(layer.weight.detach().chunk(ranks, dim=1)[place].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return sum_over_ranks(linear(x, self.weight), self.group) + self.bias
        ### END SOLUTION


# %%
row_verdict = checks.row_parallel(RowParallel)
row_verdict

# %% [markdown]
# <details><summary>The three ways to go wrong</summary>
#
# 1. Every rank adds the bias before the sum. The output has it `tp` times.
# 2. Only one rank adds it. The output and this rank's bias train as they should, but the other ranks' copies get no
#    gradient. A checkpoint that takes one of these has a bias that was never trained.
# 3. Every rank adds 1/`tp` of it. The output is right, but the gradient is 1/`tp` of the right one.
#
# </details>
#
# Now these layers train the three MLPs, with FSDP along `data`. In each of three steps `labkit.check` compares the
# output, 12 gradients and 12 parameters with one device's.

# %%
layers = {"column_parallel": ColumnParallel, "row_parallel": RowParallel if row_verdict.ok else ours.RowParallel}
pairs = labkit.check("two_dim", layers="yours", use=layers, **PARITY)
print(pairs.verdict_text)

# %% [markdown]
# **What does a rank save?** Your layers now train on the same texts with 2, 4 and 8 ranks along `tp`, without FSDP. At
# the peak a rank holds weights, Adam's averages and activations. The MLPs have inner widths of 3, 4 and 3 times the
# network's, and keep these features once, after the ReLU. Five tensors are as wide as the network: three inputs of
# MLPs, the last output, and its distance from the target.
#
# Commit two numbers, for weights with averages and for activations: the bytes with `tp` 8 over those with `tp` 2.

# %% tags=["commit"]
mine_memory = commit(weights_and_adam=None, activations=None)
### BEGIN SOLUTION
mine_memory = commit(weights_and_adam=2 / 8, activations=(10 / 8 + 5) / (10 / 2 + 5))
### END SOLUTION

# %%
memory = {}
for tp in (2, 4, 8):
    run = labkit.run("two_dim", nproc=tp, tp=tp, dim=DIM, batch=BATCH, steps=1, layers="yours", use=layers)
    state = run.value("peak_parameter_bytes") + run.value("peak_optstate_bytes")
    memory[f"tp {tp}, kB"] = {"weights_and_adam": state / 1e3, "activations": run.value("peak_activation_bytes") / 1e3}
table = pandas.DataFrame(memory)
part = table["tp 8, kB"] / table["tp 2, kB"]
table.assign(part=part, yours=pandas.Series(mine_memory)).astype(float).round(3).astype(object).fillna("no prediction")

# %% tags=["claim"]
claim("all 75 are equal", pairs.ok and pairs.value("compared") == 3 * (1 + 12 + 12) == 75)
peaks = [theory.tp_step_peak(theory.mlp_pairs(DIM), 8 * BATCH, tp) for tp in (2, 4, 8)]
kept = [[sizes["parameter"] + sizes["optstate"], sizes["activation"]] for sizes in peaks]
claim("the memory is theory's", abs(1e3 * table.T.to_numpy() / kept - 1).max() < 0.02, where=TOLD)
claim("a quarter of the weights, 5/8 of the activations", (part - [1 / 4, 5 / 8]).abs().max() < 0.01, where=TOLD)
between = 5 * 4 * 8 * BATCH * DIM / 1e3 / table["tp 8, kB"]["activations"]
claim("four fifths of them lie between the pairs", abs(between - 4 / 5) < 0.01, where=TOLD)

# %% [markdown]
# What lies between the pairs is whole on every rank. With `tp` 8 that is four fifths of the activations. Lab 5b cuts
# that, too.
#
# *Takeaway: f and g are each other's backward pass. What is whole on every rank, such as the second bias, is added on
# every rank, after the sum.*
#
# ## 4. A transformer block ({minutes} minutes)
#
# **Attention is cut by heads.** It projects each token to a query, a key and a value, and splits these into *heads*,
# each of which mixes the values of the tokens by itself. Heads are to attention what inner features are to an MLP: a
# rank computes some of them, for all tokens. The softmax in between does no harm, because it sums over tokens inside
# one head. So the number of heads must be a multiple of `tp`, and so must the number of key and value heads, where
# several heads share one (8 in Llama 3).
#
# The MLP of today's language models is *gated*: one layer, `gate`, opens and closes the features of another, `up`. A
# *norm* treats each token alone, and has a weight. Every rank keeps it whole. Below, `unflatten` counts a rank's heads
# from its features.

# %%
print(inspect.getsource(TransformerBlock.forward))

# %% [markdown]
# ### Exercise 4: the plan (•, {minutes} minutes)
#
# Return a dict from the names of the block's seven linear layers to `ColwiseParallel()` or `RowwiseParallel()`. The
# check trains a block on 2 × 2 ranks and on 1 × 3.
#
# <details><summary>Hint 1</summary>
#
# Find the pairs: which layers make features, and which one takes them in?
#
# </details>
# <details><summary>Hint 2</summary>
#
# There are two pairs, and each has several first layers side by side.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `{name: ColwiseParallel() for name in (...)} | {name: RowwiseParallel() for name in (...)}`
#
# </details>


# %%
def block_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    first = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    return first | {name: RowwiseParallel() for name in ("out", "down")}
    ### END SOLUTION


# %%
plan_verdict = checks.block_plan(block_plan)
plan_verdict

# %% [markdown]
# Your plan now cuts a network of two such blocks, with 18 parameters. PyTorch cuts each layer by itself: in the
# backward pass a colwise layer all-reduces its own gradient of its input, even if another layer has the same input.
#
# `one_f` below says that a norm's output is whole on every rank and stays so (`Replicate`), but as a **DTensor**
# (`use_local_output=False`), a tensor that knows its layout. The gradients from the layers behind the norm then stay
# parts: a rank adds up its own, and one all-reduce at the norm's output sums them over ranks.
#
# Commit: how many all-reduces along `tp` does a step take with your plan, and how many with `one_f`? Is the first block
# spared?

# %% tags=["commit"]
mine_sums = commit(your_plan=None, one_f=None)
### BEGIN SOLUTION
mine_sums = commit(your_plan=2 * (2 + 5), one_f=2 * (2 + 2))
### END SOLUTION


# %% tags=["summary"]
def network_plan(model: nn.Module) -> dict[str, object]:
    """Cut every block by your plan, or by labkit's until yours passes."""
    return {f"blocks.*.{name}": cut for name, cut in block_plan().items()} if plan_verdict.ok else transformer_plan()


def one_f(model: nn.Module) -> dict[str, object]:
    whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate(), "use_local_output": False}
    return network_plan(model) | {"blocks.*.*_norm": PrepareModuleOutput(**whole)}


BLOCKS = {"network": "transformer", "use": {"tensor_parallel_plan": network_plan}}
transformer = labkit.check("two_dim", **BLOCKS, **PARITY)
print(f"your plan: {transformer.verdict_text}")
shared = labkit.check("two_dim", network="transformer", use={"tensor_parallel_plan": one_f}, **PARITY)
print(f"one_f: {shared.verdict_text}")
right = labkit.run("two_dim", steps=STEPS, **BLOCKS, **SETUP)
once = labkit.run("two_dim", steps=1, network="transformer", use={"tensor_parallel_plan": one_f}, **SETUP)
sums = {name: run.value("tp/all_reduce_count") for name, run in (("your_plan", right), ("one_f", once))}
plots.comparison_table(sums, yours=mine_sums)

# %% tags=["claim"]
claim("one_f has parity, too", shared.ok)
claim("your plan trains two blocks with parity", transformer.ok and transformer.value("max_rel_error") <= 1e-5)
claim("111 tensors are compared", transformer.value("compared") == 3 * (1 + 18 + 18) == 111)
claim("seven all-reduces a block, and four with one f", sums == {"your_plan": 2 * theory.BLOCK_SUMS, "one_f": 2 * 4})
one_f_bytes, plan_bytes = (run.value("tp/all_reduce_bytes") for run in (once, right))
claim("and four sevenths of the bytes", 7 * one_f_bytes == 4 * plan_bytes)

# %% [markdown]
# Each block has two all-reduces forward and five backward, because query, key and value each sum the gradient of their
# common input, and so do gate and up. With `one_f` it has two backward. The first block is not spared, because the norm
# in front of query, key and value has a weight, whose gradient needs that of their input.
#
# *Takeaway: colwise for every layer that makes heads or features, rowwise for the one that takes them in.*
#
# ## 5. Break it: a copied plan ({minutes} minutes)
#
# The sequence, too, can be cut over `tp` (5b). In such a plan `input_layouts` says how a layer's input *is* laid out,
# and `output_layouts` how the output *shall* leave; `Shard(1)` means cut along the tokens. So a colwise layer first
# all-gathers the ranks' tokens, which makes one longer text. A rowwise layer ends in a reduce-scatter: it adds up the
# ranks' parts, and each rank keeps its own stretch of the tokens. Backward, each of the two becomes the other.
#
# Somebody copies the MLP's lines from such a plan, and leaves the rest of the block as it was.


# %%
def copied_plan() -> dict[str, object]:
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"out": RowwiseParallel()}
    plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
    return plan | {"down": RowwiseParallel(output_layouts=Shard(1))}


# %% [markdown]
# But here the input of the MLP is whole on both ranks already. Follow a text's 8 tokens forward and backward. Commit:
# how many times as large as it should be is the gradient of each weight?

# %% tags=["commit"]
mine_factors = commit(gate=None, down=None, query=None)
### BEGIN SOLUTION
mine_factors = commit(gate=2, down=2, query=1)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
copied = BLOCKS | {"use": {"tensor_parallel_plan": lambda _: {f"blocks.*.{n}": c for n, c in copied_plan().items()}}}
wrong = labkit.run("two_dim", steps=STEPS, **copied, **SETUP)
apart = 100 * (wrong.losses / right.losses - 1).abs()
print(f"after the last step the losses differ by {apart.iloc[-1]:.4f} %")
_ = plots.loss_curves({"your plan": right, "the copied plan": wrong}, ylabel="loss (mean squared distance)")

# %% [markdown]
# *One line covers the other: the losses differ by less than a thousandth of a per cent.*
#
# Is the plan right, then? Compare gradients: **this verdict is meant to be red.**

# %%
print("you:", ", ".join(f"{name} {prediction_text(factor)}" for name, factor in mine_factors.items()))
caught = checks.block_plan(copied_plan)
caught

# %% tags=["claim"]
claim("the losses differ by less than a thousandth of a per cent", apart.max() < 1e-3, where=TOLD)
claim("three gradients are twice as large", "gate.weight, up.weight, down.weight is 2 times" in repr(caught))

# %% [markdown]
# PyTorch takes two copies of a text for the halves of a longer one:
#
# 1. Forward, `gate` and `up` gather 8 tokens of each rank: 16, the text twice.
# 2. `down` adds up the ranks' parts, and each rank keeps 8, one copy. So the output is right.
# 3. Backward, `down` gathers the gradients of 16 tokens. The weights' gradients sum over all 16: twice as large.
# 4. `gate` and `up` add up the ranks' parts, and each rank keeps the gradient of one copy. So all others are right.
#
# Adam divides each gradient by its own running size, so that a constant factor drops out almost entirely.
#
# *Takeaway: a wrong layout may raise no error. Compare gradients with one device, not losses.*
#
# ## 6. Does it pay? ({minutes} minutes)
#
# Take a pair of width d and **inner width** h, and T tokens on a rank, with F operations a second.
#
# - Arithmetic: 6 operations (2 forward, 4 backward) for each number of the two weights and each token, of which a rank
#   does 1/tp. That is `12 d h T / tp / F` seconds.
# - Messages: one all-reduce forward and one backward, of T d numbers with b bytes each, in lab 0's ring, where a rank
#   sends B bytes a second.
#
# ### Exercise 5: what the messages cost (•, {minutes} minutes)
#
# Return the time of the messages as a part of the time of the arithmetic, where `inner` is h. Why is
# there no argument for d or T?
#
# <details><summary>Hint 1</summary>
#
# Of the bytes of an all-reduce, a rank in a ring of n sends one part of n in each of 2 (n − 1) steps.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Both times are proportional to T and to d, so take 1 for each of them. Then write two lines, and divide.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `messages_s = 2 * 2 * (tp - 1) / tp * number_bytes / wire_bytes_per_s`
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
# T and d drop out. With FSDP the batch decided; here it is the inner width, so that many ranks can share a wide layer
# and few a narrow one. On H100s with F = 400 · 10¹² and b = 2, over NVLink with B = 450 · 10⁹ (lab 0's reference
# cluster), eight GPUs pay 8 % for GPT-3's inner width of 49,152, and as much as the arithmetic itself for 4,096.
#
# Between hosts, each GPU has a network card of 50 GB/s, which is B for a group with one rank a host. A group with four
# ranks a host runs four rings side by side, each with a quarter of the bytes. In each ring another rank sends through
# its card, and the others over NVLink: B = 200 in all.
#
# **Emulated: inside a host, and across two.** Hosts have four GPUs, h is 2,048, and a step has two texts of 8,192
# tokens, for which FSDP alone can use two GPUs. Real ranks train your layers on less, and *wait* as long as H100s would
# take, slowed down until a step's arithmetic takes 3,000 ms on one GPU, with nothing overlapping. Do eight GPUs pay?
#
# | | along `data` | along `tp` | arithmetic + `tp` + `data`, ms |
# |---|---|---|---|
# | *FSDP alone*, 2 GPUs | 2, in a host: B = 450 | 1 | 3000 / 2 + 0 + 81 = 1581 |
# | *tp inside*, 8 GPUs | 2, one a host: B = 50 | 4, in a host: B = 450 | 3000 / 8 + ? + 184 |
# | *tp across*, 8 GPUs | 1 | 8, four a host: B = 200 | 3000 / 8 + ? + 0 |
#
# Along `data`, messages take T₀/T of the arithmetic: lab 2's T₀ is 444 tokens in a host and 4,000 across.
# Your formula gives each question mark as a part of 3000 / 8. Take 5/6 of it, because the first MLP saves
# one of six messages. Commit: how many ms does a step take, inside and across?

# %% tags=["commit"]
mine_ms = commit(inside=None, across=None)
### BEGIN SOLUTION
mine_ms = commit(
    inside=lambda: 3000 / 8 * (1 + 5 / 6 * message_share(2048, 4, 400e12, 450e9, 2)) + 184,
    across=lambda: 3000 / 8 * (1 + 5 / 6 * message_share(2048, 8, 400e12, 200e9, 2)),
)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
STACK, TOKENS = theory.mlp_pairs(64), 2 * 864  # what really trains: layers and texts a tenth of the H100s'
gpus = emulated_steps.slow_h100s(STACK, TOKENS, inner=2048, step_ms=3000, ranks_per_host=4)
meshes = {"FSDP alone": (2, 1), "tp inside": (2, 4), "tp across": (1, 8)}  # data, tp
variants, by_theory = {}, {}
for label, (data, tp) in meshes.items():
    own = {"layers": "yours", "use": layers} if tp > 1 else {}
    variants[label] = {"nproc": data * tp, "tp": tp} | own
    by_theory[label] = 1e3 * emulated_steps.mesh_step_s(gpus, STACK, TOKENS // data, data=data, tp=tp)
emulated = labkit.compare("two_dim", variants, rounds=1, dim=64, batch=TOKENS // 8, steps=2, emulate=gpus)
_ = plots.latency_bars(emulated, predicted=by_theory)
phases = ("forward_ms", "backward_ms", "optimizer_ms")  # as the bars add them up
step_ms = {label: sum(result.value(phase) for phase in phases) for label, result in emulated.items()}
rows = {"yours": mine_ms}
for column, by_label in (("theory", by_theory), ("measured", step_ms)):
    rows[column] = {name: by_label[f"tp {name}"] for name in mine_ms}
pandas.DataFrame(rows).round().astype(object).fillna("no prediction")

# %% tags=["claim"]
alone_ms, inside_ms, across_ms = step_ms.values()
claim("inside a host, four times the GPUs are 1.3 times as fast or more", alone_ms > 1.3 * inside_ms)
claim("less than twice as fast", alone_ms < 2 * inside_ms)
claim("across hosts, eight GPUs are slower than two", across_ms > alone_ms)
claim("tp inside a host beats tp across", across_ms > 1.4 * inside_ms)
claim("every step is longer than theory", all(step_ms[label] > took for label, took in by_theory.items()))
ideal_ms = [round(took) for took in by_theory.values()]
claim("theory's 1581 ms, of which 81 along data, 830 and 1799", ideal_ms == [3000 / 2 + 81, 830, 1799])
share = theory.message_share(2048, 4, 400e12, 450e9, 2)
claim("184 ms along data", round(by_theory["tp inside"] - 3000 / 8 * (1 + 5 / 6 * share)) == 184)
claim("81 and 183 without biases", [round(444 / 8192 * 1500), round(4000 / 8192 * 375)] == [81, 183])
claim("a tenth", [round(64 * 10 / 3 / 2048, 1), round(TOKENS / 2 / 8192, 1)] == [0.1, 0.1])
claim("1.9 times as fast, 48 % of a GPU", [round(1581 / 830, 1), round(100 * 1581 / 830 / 4)] == [1.9, 48])
sent = theory.step_collectives_by_axis(STACK, TOKENS // 2, data=2, tp=4)
claim("14 collectives", sum(number for name, number in sent.items() if name.endswith("_count")) == 14)
claim("8 % and as much", round(theory.message_share(49152, 8, 4e14, 45e10, 2), 2) == 0.08)
claim("as much for 4,096", 0.9 < theory.message_share(4096, 8, 4e14, 45e10, 2) < 1.1)

# %% [markdown]
# *Emulated steps, with theory dashed. Real ranks take longer: eight processes share a few cores, and each of the 14
# collectives in a step of* tp inside *waits for the last rank.*
#
# Do eight pay? In time, they do with `tp` inside a host: by theory a step is 1.9 times as fast. Per GPU, they do not:
# each does 48 % of what it did. Across hosts, eight are slower than two.
#
# **How many ranks along tp?** Now by theory, without latency: 64 H100s in hosts of eight, 32 MLPs of width 4096 and
# inner width 16,384, and 64 texts of 2048 tokens in a step.

# %%
MLPS = [(4096, 16384)] * 32
_, seconds = theory.cluster_steps(MLPS, 64 * 2048, (1, 2, 4, 8, 16), ranks=64, host=8)
panels = {
    title: {str(tp): theory.seconds_after_overlap(parts, overlap) for tp, parts in seconds.items()}
    for title, overlap in (("time, nothing hidden", False), ("time, data hidden behind computing", True))
}
_ = plots.step_time_by_tp(panels, xlabel="ranks along tp, of 64")

# %% [markdown]
# *Theory. More ranks along* `tp` *make a step longer, whether messages along* `data` *are hidden or not.*
#
# <details><summary>Why do messages along <code>data</code> hardly get shorter up to <code>tp</code> 8, and fall at 16?</summary>
#
# With `tp` 8 a rank gathers an eighth of each matrix, but the host's eight rings now have one card each, where one ring
# had all eight. What is left is the ring's factor (n − 1)/n for n ranks along `data`, which falls only from 63/64 to
# 7/8. With `tp` 16 a ring still has one card, and only half the bytes; the factor is 3/4.
#
# </details>
#
# So with 64 texts `tp` does not pay. **With 16 texts**, FSDP alone can use 16 GPUs, which take 132 ms again; all 64
# work if `tp` is 4 or more. Computing and messages along `tp` then take a quarter. Those along `data` carry parameters
# and take as long as in the figure, of which computing hides what it can. Commit: how many ms does a step take?

# %% tags=["commit"]
mine_few = commit(tp_4=None, tp_8=None, tp_16=None)
### BEGIN SOLUTION
# Computing or data, whichever is longer, and a quarter of tp; data is the left bar less the right one.
mine_few = commit(
    tp_4=max(132 / 4, 206 - 146) + (146 - 132) / 4,
    tp_8=max(132 / 4, 221 - 165) + (165 - 132) / 4,
    tp_16=max(132 / 4, 235 - 211) + (211 - 132) / 4,
)
### END SOLUTION

# %%
_, few = theory.cluster_steps(MLPS, 16 * 2048, (4, 8, 16), ranks=64, host=8)
waited = {f"tp {tp}": theory.seconds_after_overlap(parts, overlap=True) for tp, parts in few.items()}
few_ms = 1e3 * pandas.DataFrame(waited).T.rename(columns={"tp": "along tp", "data": "data, not hidden"})
few_ms = few_ms.assign(step=few_ms.sum(axis=1), yours=list(mine_few.values())).astype(float)
few_ms.round().astype(object).fillna("no prediction")

# %% tags=["claim"]
for bars in panels.values():
    times = [sum(each.values()) for each in bars.values()]
    claim("the more ranks along tp, the longer a step takes", times == sorted(times))
claim("with data hidden, FSDP alone waits for nothing", panels["time, data hidden behind computing"]["1"]["data"] == 0)
claim("the computing is the same", max(each["compute"] for each in seconds.values()) / seconds[1]["compute"] < 1.001)
inside_host, beyond = seconds[8]["data"] / seconds[1]["data"], seconds[16]["data"] / seconds[8]["data"]
claim("along data falls as (n - 1)/n, from 63/64 to 7/8", abs(inside_host / (7 / 8 / (63 / 64)) - 1) < 0.01)
claim("and then to half of 3/4", abs(beyond / (3 / 4 / (7 / 8) / 2) - 1) < 0.01)
_, sixteen = theory.cluster_steps(MLPS, 16 * 2048, (1,), ranks=16, host=8)
sixteen_ms = 1e3 * sum(theory.seconds_after_overlap(sixteen[1], overlap=True).values())
claim("16 GPUs take 132 ms", round(sixteen_ms) == 132)
claim("53 ms with tp 16, the best", round(few_ms["step"].min()) == 53 == round(few_ms["step"]["tp 16"]))
claim(
    "2.5 times as fast as 16 GPUs, 2.1 with tp 4",
    [round(sixteen_ms / ms, 1) for ms in few_ms["step"]][::2] == [2.1, 2.5],
)
claim("along data as with 64 texts", all(abs(few[tp]["data"] / seconds[tp]["data"] - 1) < 0.01 for tp in few))
hidden = [
    round(each[tp]["data"] / each[tp]["compute"] * own, -2)
    for each, own in ((seconds, 2048), (few, 512))
    for tp in (4, 8)
]
claim("1,000 tokens a GPU, or (n - 1)/n of that", hidden == [900, 900] * 2)
few_parts = [round(1e3 * each) for each in (few[4]["compute"], few[4]["data"], few[16]["data"])]
claim("33 ms of computing, 60 and 24 along data", few_parts == [33, 60, 24])

# %% [markdown]
# `tp` 16 is best, although it leaves the host: with four times the GPUs, 2.5 times as fast. Each GPU computes for 33 ms,
# and messages along `data` take 60 with `tp` 4, too long to hide, but 24 with 16. The rule:
#
# > If computing hides the messages along `data`, take the smallest `tp` that batch and memory allow, inside a host. If
# > not, calculate: a larger `tp` may be faster.
#
# In the explorer's two hosts of four, take cards of 10 GB/s and 32,768 tokens. Which `tp` is best, and why not 8?
#
# <details><summary>Answer</summary>
#
# 4. A GPU has 4,096 tokens, and T₀ is about 9,000, since four cards send 40 GB/s: messages along `data` take twice as
# long as the arithmetic. From `tp` 1 to 4, n falls from 8 to 2, and (n − 1)/n from 7/8 to 1/2. This saves more than the
# messages along `tp` cost on NVLink. With `tp` 8 they leave the host, and everybody waits for the cards.
#
# </details>

# %%
widgets.TwoAxesExplorer()

# %% tags=["claim"]
slow_cards = theory.cluster_steps(theory.mlp_pairs(4096), 32_768, (1, 2, 4, 8), ranks=8, host=4, card_bytes_per_s=10e9)[
    1
]
totals = {tp: sum(parts.values()) for tp, parts in slow_cards.items()}
claim("4 is best where cards are slow", min(totals, key=totals.get) == 4)
claim("along data takes twice as long as computing", slow_cards[1]["data"] > 2 * slow_cards[1]["compute"])
two_hosts = slow_cards[4]["data"] / slow_cards[1]["data"]
claim("along data falls from 7/8 to 1/2", abs(two_hosts / (1 / 2 / (7 / 8)) - 1) < 0.01)
claim("which is more than tp costs", slow_cards[1]["data"] - slow_cards[4]["data"] > slow_cards[4]["tp"])

# %% [markdown]
# *Takeaway: messages along `tp` cost (tp − 1) b F / (3 h B) of the arithmetic, and everybody waits for them;
# those along `data` cost T₀/T, and can hide.*
#
# ## 7. Take away ({minutes} minutes)
#
# 1. A pair of layers, cut colwise and then rowwise, costs one all-reduce forward and one backward; heads are cut like
#    inner features.
# 2. Activations and their gradients travel along `tp` and are waited for; parameters and theirs travel along `data` and
#    can hide.
# 3. A wrong layout in a plan may raise no error and leave the loss as it is, so compare gradients with one device.
#
# | if | then |
# |---|---|
# | each rank has a text that fits, and tokens enough to hide messages | use FSDP alone |
# | there are more ranks than texts, or a text does not fit | take the smallest `tp` that is enough, or calculate |
# | ranks have few tokens, or `tp` would leave the host | calculate each `tp`, and fewer GPUs |
# | layers are narrow | keep `tp` small |
#
# **Ask yourself**
#
# <details><summary>1. Why is the first layer cut colwise and the second rowwise, and not the other way round?</summary>
#
# Rowwise first would need an all-reduce before the ReLU, since the ReLU of a sum is not the sum of the ReLUs.
#
# </details>
# <details><summary>2. A row-parallel layer on 8 ranks gives outputs that are off by the same vector everywhere. What is it?</summary>
#
# Seven biases: every rank has added its own before the sum.
#
# </details>
# <details><summary>3. You double the texts of each rank. How long do messages take then beside the arithmetic, along `tp` and along `data`?</summary>
#
# Along `tp` as long as before, because bytes and arithmetic both double. Along `data` half as long, because the
# parameters stay as they are.
#
# </details>
# <details><summary>4. A model has 32 heads, and 8 of keys and values. Which `tp` are possible?</summary>
#
# 1, 2, 4 and 8: `tp` must divide both.
#
# </details>
# <details><summary>5. Output and loss curve of a plan are those of one device. Is it right?</summary>
#
# That cannot be told from them. Gradients may be off by a factor, and Adam hides it.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Shoeybi et al., "Megatron-LM", 2019: https://arxiv.org/abs/1909.08053
# - Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3: https://arxiv.org/abs/2407.21783
# - PyTorch's tutorial: https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html, and the pages on
#   https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
# - In labkit: `labkit/parallel/small_tensor_parallel.py` (yours), `labkit/parallel/tensor_parallel.py` (the plans),
#   `labkit/theory/two_dim.py` (the formulas). docs/meshes.md has what PyTorch does to placements and to `replicate`.
#
# </details>
#
# **Next**: lab 6 plays one rank of a thousand.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("two_dim")
