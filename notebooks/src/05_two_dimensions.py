# %% [markdown]
# # Lab 5. Two dimensions: share the matrices, and share the samples
#
# In lab 2 every rank took its own samples, and parameters were put together before they were used. There is another way:
# leave a matrix in pieces, and let each rank compute with its piece. This is **tensor parallelism** (TP).
#
# The two can be combined. Ranks then form a mesh with two axes: along one they share matrices, along the other they share
# out samples. In this lab you derive TP by hand, predict what crosses each axis, and measure it on four real ranks.
#
# You need lab 1's words: rank, all-reduce, mesh. You need lab 2's FSDP: units, all-gather, reduce-scatter, and activation
# checkpointing. You need no GPU.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import inspect

import pandas
import torch
from matplotlib import pyplot
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import relu, softmax

import labkit
from labkit import doctor, plots
from labkit.checks import two_dim as checks
from labkit.checks.ranks import two_dim
from labkit.config import require
from labkit.theory import fsdp
from labkit.theory import two_dim as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network is lab 2's stack of three MLPs: linear, ReLU, linear, ReLU, with an inner width
# of 3, 4 and 3 times `DIM`. A sample is a sequence of 8 places, as a text is a sequence of words. Each place has `DIM`
# numbers. A linear layer treats every place alike. Change the values if you like: the next cell refuses those that cannot
# work. The text speaks of the values below.

# %% tags=["parameters"]
RANKS: int = 4  # ranks of the mesh
DIM: int = 64  # width of the network
BATCH: int = 48  # samples of all ranks together in a step, of 8 places each
STEPS: int = 1  # timed training steps in each run

# %%
require(
    "RANKS",
    RANKS,
    at_least=4,
    multiple_of=2,
    because="one of the meshes has 2 ranks along tp, and as many along data or more",
)
require("DIM", DIM, at_least=1, multiple_of=RANKS, because="the ranks share each layer's features evenly")
require("BATCH", BATCH, at_least=1, multiple_of=RANKS, because="the ranks share the samples evenly")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")

SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
PAIRS = theory.mlp_pairs(DIM)
MESHES = {tp: {"data": RANKS // tp, "tp": tp} for tp in (1, 2, RANKS)}  # lengths of the two axes


def places(tp):
    """Places of the samples that one rank works on, if `tp` ranks share each matrix."""
    return 8 * BATCH // MESHES[tp]["data"]


# %% [markdown]
# ## One pair of layers, by hand
#
# Take two linear layers with a ReLU between them: `y = relu(x @ first.T) @ second.T`. PyTorch stores a weight as
# [features out, features in]. Row i of `first` gives inner feature i. Column i of `second` says what feature i does to `y`.
#
# So let rank 0 have the first half of the inner features and rank 1 the second half. Each needs only some rows of `first`
# and the same columns of `second`.

# %%
first, second = torch.arange(16.0).reshape(4, 4), torch.arange(16.0, 32.0).reshape(4, 4)
cuts = {"rows of first": (first, first.chunk(2)), "columns of second": (second, second.chunk(2, dim=1))}
figure, panels = pyplot.subplots(1, 4, figsize=(10, 2.6), layout="constrained")
for axes, (name, (weight, parts)) in zip((panels[:2], panels[2:]), cuts.items(), strict=True):
    held = dict(enumerate(part.numpy() for part in parts))
    plots.shards(weight.numpy(), {f"{name}, by rank": held}, axes=axes)
    axes[0].set_title(name.split()[-1], fontsize=10, loc="left")

# %% [markdown]
# *The four inner features on two ranks. Rows of the first weight and columns of the second belong together.*
#
# In formulas a weight stands on its side, x W. So PyTorch calls the first cut **colwise** and the second **rowwise**.
#
# ### Exercise 1: each rank's part
#
# Return what each rank computes, as a list with one tensor a rank. Rank 0 has the first features. `tensor.chunk(n, dim)` cuts
# a tensor evenly.


# %%
def parts(x, first, second, ranks: int) -> list[torch.Tensor]:
    ### BEGIN SOLUTION
    pieces = zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)
    return [relu(x @ rows.T) @ columns.T for rows, columns in pieces]
    ### END SOLUTION


# %%
checks.parts(parts)

# %% [markdown]
# Each part has the full size of `y`. The true `y` is their sum. Adding tensors up over ranks is an all-reduce, and this is
# the only message of the forward pass: nothing needs to be sent between the two layers.
#
# Why may the ReLU stand in between? It treats each feature alone. A softmax does not: it divides by a sum over all features,
# and a rank sees only some of them.

# %%
features = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
for name, act in (("relu", relu), ("softmax", lambda some: softmax(some, dim=1))):
    joined = torch.cat([act(piece) for piece in features.chunk(2, dim=1)], dim=1)
    right = torch.allclose(joined, act(features))
    print(f"{name} on each rank's features, joined, is right: {right}")

# %% [markdown]
# ## And backward
#
# Each rank can take the gradient of its own two pieces. What about the gradient of `x`, which the layers before need? Let us
# look, on one device.

# %%
draw = torch.Generator().manual_seed(1)
x, first, second = (torch.randn(size, generator=draw) for size in ((3, 4), (8, 4), (4, 8)))
for tensor in (x, first, second):
    tensor.requires_grad_()
(relu(x @ first.T) @ second.T).square().sum().backward()
whole_gradient = x.grad.clone()
gradient_of_y = 2 * (relu(x @ first.T) @ second.T).detach()  # the same on every rank

from_ranks = []
for rows, columns in zip(first.detach().chunk(2), second.detach().chunk(2, dim=1), strict=True):
    copy_of_x = x.detach().clone().requires_grad_()
    (relu(copy_of_x @ rows.T) @ columns.T).backward(gradient_of_y)
    from_ranks.append(copy_of_x.grad)
print("rank 0's gradient of x is right:", torch.allclose(from_ranks[0], whole_gradient))
total = sum(from_ranks)
print("the sum over the ranks is right:", torch.allclose(total, whole_gradient, atol=1e-4))

# %% [markdown]
# It is a sum again. So the backward pass needs one all-reduce as well, in front of the pair. The very first pair is spared:
# its input is the samples, and nobody asks for their gradient.
#
# ### Exercise 2: bytes of a training step
#
# A stack has `mlps` pairs of layers. How many bytes does a rank hand to all-reduces in one training step? There are `places`
# places of `dim` numbers, 4 bytes each. The inner width does not matter. Why?


# %%
def tp_bytes(places: int, dim: int, mlps: int) -> int:
    ### BEGIN SOLUTION
    forward, backward = mlps, mlps - 1
    return (forward + backward) * places * dim * 4
    ### END SOLUTION


# %%
checks.tp_bytes(tp_bytes)

# %% [markdown]
# Why does the inner width not matter? What is added up is the result of a pair, or the gradient of its input. Both have the
# outer width.
#
# ## A mesh of two axes
#
# TP sends whole activations, several times for each layer. That is too much for many ranks. So ranks get a second axis.

# %%
ax = plots.mesh(**MESHES[2])

# %% [markdown]
# *Four ranks, 2 × 2. A row is a group along the axis `tp`: its ranks have the same samples and different features. A column is
# a group along the axis `data`: the same features, different samples.*
#
# Along the axis `data` we use FSDP. It shards what tensor parallelism leaves to a rank. To FSDP that is simply a thinner
# model: each inner width is divided by the number of ranks along `tp`, and all of lab 2's formulas hold.
#
# A **plan** says how each layer is cut. PyTorch puts in the messages.
#
# ```python
# plan = {"layers.0.in_proj": ColwiseParallel(), "layers.0.out_proj": RowwiseParallel(), ...}
# parallelize_module(model, mesh["tp"], plan)
# for layer in model.layers:
#     fully_shard(layer, mesh=mesh["data"])
# ```
#
# Let us train the stack on the mesh. The traced step notes along which axis each collective ran.

# %%
square = labkit.run("two_dim", tp=2, **SETUP)

# %% [markdown]
# ### Exercise 3: which axis does it run on?
#
# How often does each collective run in a step, and along which axis? Return a dict. Its keys are an axis and a collective:
# `"tp/all_reduce"`, `"data/all_gather"`, and so on. There are three MLPs, each a unit of FSDP. Leave out what does not happen.


# %%
def collectives() -> dict[str, int]:
    ### BEGIN SOLUTION
    return {"tp/all_reduce": 3 + 2, "data/all_gather": 3 + 3, "data/reduce_scatter": 3}
    ### END SOLUTION


# %%
checks.collectives(collectives, square)

# %% [markdown]
# Activations travel along `tp`, parameters and their gradients along `data`. Now the bytes, and what a rank keeps.

# %%
predicted = theory.collectives(PAIRS, places(2), **MESHES[2])
predicted |= theory.resident_bytes(PAIRS, **MESHES[2])
plots.table(square, predicted)

# %% [markdown]
# *One of four real ranks, in one traced step. Every count and every byte is as predicted. `end_…` is what a rank holds when
# the step ends; `optstate` is Adam's two means.*
#
# ## When two axes win
#
# Four ranks can also be used along one axis: `tp=1` is FSDP alone, `tp=4` is tensor parallelism alone. We run both.
#
# Bytes handed in do not compare: an all-gather takes a small piece and spreads it, an all-reduce takes all. So we convert
# them into bytes that a rank puts on the wire, if each collective runs in a ring of its axis: each rank sends to the next.
# In a ring of n ranks, each passes on (n - 1) / n of the whole tensor in an all-gather or a reduce-scatter, and twice that in
# an all-reduce.

# %%
runs = {tp: labkit.run("two_dim", tp=tp, **SETUP) for tp in (1, RANKS)}
runs = {1: runs[1], 2: square, RANKS: runs[RANKS]}
labels = {1: "FSDP alone", 2: f"{RANKS // 2} x 2", RANKS: "TP alone"}


def wire(tp, ranks=RANKS, pairs=PAIRS, step_places=8 * BATCH):
    """Bytes that theory lets a rank send, by axis."""
    data = ranks // tp
    sent = theory.collectives(pairs, step_places // data, data=data, tp=tp)
    return theory.wire_bytes(sent, data=data, tp=tp)


def measured_wire(tp, result):
    """The same from what was counted."""
    sent = {name: result.value(name) for name in result.summary() if "/" in name}
    return theory.wire_bytes(sent, **MESHES[tp])


by_theory = {labels[tp]: wire(tp) for tp in runs}
by_count = {labels[tp]: measured_wire(tp, result) for tp, result in runs.items()}
ax = plots.traffic(by_theory, by_count, results=list(runs.values()))

# %% [markdown]
# *Bytes that one rank sends in a step. In a dashed frame: predicted. Plain: counted. The square sends least.*
#
# Along each axis there are now only two ranks, and each collective is smaller: FSDP gathers half as many parameters, TP sums
# activations of half as many samples.
#
# What about memory? For FSDP's share lab 2's ledger walks through the step of the thinner model.

# %%
expected = {}
for tp in (1, 2):
    layers = theory.rank_layers(PAIRS, tp)
    expected[labels[tp]] = fsdp.step_peak(layers, places(tp), MESHES[tp]["data"])
kept = theory.resident_bytes(PAIRS, **MESHES[RANKS])
expected["TP alone"] = {
    "parameter": kept["end_parameter_bytes"],
    "optimizer": kept["end_optstate_bytes"],
    "activation": theory.activation_bytes(PAIRS, places(RANKS), RANKS),
}
ax = plots.breakdown(expected, {labels[tp]: result for tp, result in runs.items()})

# %% [markdown]
# *Peak memory of a rank. For TP alone theory gives only what is kept, nothing temporary. FSDP alone pays for gathered
# parameters and communication buffers, TP alone for activations; the square needs least.*
#
# TP alone keeps every sample on every rank: between the pairs all four hold the same activations. FSDP alone gathers whole
# layers. The square does half of each.
#
# It depends on the sizes. By the same formulas FSDP alone sends least with four times the samples, TP alone with layers four
# times as wide. Below, 64 ranks train 32 MLPs of width 4096 on 64 texts of 2048 places.

# %%
large = {"ranks": 64, "pairs": [(4096, 4 * 4096)] * 32, "step_places": 64 * 2048}
splits = {f"{tp}": wire(tp, **large) for tp in (1, 2, 4, 8, 16)}
ax = plots.traffic(splits, xlabel="ranks along tp; 64 divided by it are along data")

# %% [markdown]
# *Theory alone. Four ranks along `tp` halve the traffic; with sixteen it is larger than without.*
#
# There is one more reason for a second axis, and often the decisive one. Each rank along `data` needs a sample of its
# own. A batch of 64 cannot be shared out over 256 ranks.

# %%
try:
    labkit.run("two_dim", **SETUP | {"tp": 1, "batch": 2})
except labkit.ParameterError as refused:
    print(refused)

# %% [markdown]
# ## Cut the sequence, too
#
# TP leaves the activations between the pairs whole on every rank. What happens there, such as ReLU, norm or dropout, treats
# each place alone. So each rank could keep only its share of the places. This is **sequence parallelism**.
#
# An all-reduce is a reduce-scatter followed by an all-gather. We split it: reduce-scatter behind a pair, all-gather in front
# of the next. Each puts half of an all-reduce's bytes on the wire. Only the two ends of the stack, where the whole sequence
# comes in and goes out, cost one all-gather more each.

# %%
for name, cut in (("sequence whole", False), ("sequence cut", True)):
    sent = theory.activations_sent(PAIRS, places(RANKS), RANKS, sequence_parallel=cut)
    wired = theory.wire_bytes(sent, **MESHES[RANKS])["tp"]
    counts = [
        f"{count} {key.removeprefix('tp/').removesuffix('_count')}"
        for key, count in sent.items()
        if key.endswith("_count")
    ]
    print(f"{name}: {wired:,.0f} bytes on the wire in {' and '.join(counts)}")

# %% [markdown]
# Ten halves without, twelve with. In a stack of many layers, two more do not matter.
#
# And the memory? Here it pays to look closely. `ColwiseParallel` keeps the input that it has gathered, because the gradient of
# its weight needs it. In a stack of bare MLPs, that costs more than is gained. It pays off with activation checkpointing,
# where a pair keeps only its own places of the input, and gathers the others again.

# %%
rows = {}
for checkpointing in (False, True):
    for cut in (False, True):
        label = "checkpointing" if checkpointing else "everything kept"
        how = {"sequence_parallel": cut, "checkpointing": checkpointing}
        held_bytes = theory.activation_bytes(PAIRS, places(RANKS), RANKS, **how)
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
base, sizes = expected["TP alone"], rows["checkpointing"]
forecast = {f"sequence {cut}": base | {"activation": size} for cut, size in sizes.items()}
ax = plots.breakdown(forecast, sequence)

# %% [markdown]
# *Peak memory of a rank, without what is temporary in the prediction. Between the pairs a rank keeps a quarter of the places;
# all else stays as it was.*

# %%
how = {"sequence_parallel": True, "checkpointing": True}
predicted_cut = theory.collectives(PAIRS, places(RANKS), **MESHES[RANKS], **how)
plots.table(sequence["sequence cut"], predicted_cut)

# %% [markdown]
# The counts include what checkpointing repeats: each pair's forward pass runs twice, with its messages.
#
# ## DDP along the other axis
#
# Where memory is no concern, gradients can be averaged as in plain data parallelism: `replicate` instead of `fully_shard`.
# Every rank keeps its thin model whole. Here with four linear layers, two pairs. A sample has one place here, so on the 2 × 2
# mesh a rank works on `BATCH / 2` places.

# %%
replicated = labkit.run("two_dim", plan="ddp_tp", **SETUP)
chain = theory.chain_pairs(DIM)
predicted_ddp = theory.collectives(chain, BATCH // MESHES[2]["data"], **MESHES[2], plan="ddp_tp")
plots.table(replicated, predicted_ddp | {"data/all_reduce_count": 1})

# %% [markdown]
# All gradients travel in one all-reduce along `data`: they fit into one bucket, as lab 4 explains. Along `tp` there are two
# all-reduces forward and one backward.
#
# What does FSDP save against DDP on the same mesh? It divides parameters, gradients and Adam's means by the number of ranks
# along `data`. By theory:

# %%
plans = ("ddp_tp", "fsdp_tp")
states = {plan: theory.resident_bytes(PAIRS, **MESHES[2], plan=plan) for plan in plans}
pandas.DataFrame.from_dict(states, orient="index")

# %% [markdown]
# ## Is it right?
#
# A distributed program can run without an error and be wrong. So the program is held against one device: the output, each
# gradient and each parameter, in every step.

# %%
parity = labkit.run("two_dim", check="parity", seq=True, compile=False, nproc=RANKS, steps=3)
compared = int(parity.value("compared"))
print(f"{compared} tensors equal one device's to 1 part in 100,000: {parity.ok}")

# %% [markdown]
# With `compile=True` the check trains a compiled version beside it, and compares that, too. It takes longer.
#
# ### Exercise 4: complete a plan
#
# Language models use a gated MLP. Two layers read the input, and one opens and closes the other's features.

# %%
print(inspect.getsource(two_dim.GatedMLP.forward))

# %% [markdown]
# Write its plan: a dict from the names `gate`, `up` and `down` to `ColwiseParallel()` or `RowwiseParallel()`. One all-reduce a
# step is enough.
#
# Your plan runs on 2 × 2 ranks, in other processes. Whatever it uses of this notebook is copied there: imports, other
# functions, values.


# %%
def gated_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    return {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    ### END SOLUTION


# %%
checks.gated_plan(gated_plan)

# %% [markdown]
# ### Exercise 5: repair a plan that is silently wrong
#
# Somebody wanted to cut the sequence between the MLPs of our stack. `Shard(1)` is the dimension of places. In a plan,
# `input_layouts` says how a layer's input *is* laid out when it arrives, and `output_layouts` how the output shall leave.


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
# The samples come in whole on every rank of `tp`. The plan says that they are cut. So PyTorch takes two copies of a sequence
# for two halves of a longer one, computes everything twice, and adds up the gradients of both.
#
# Write a plan that is right. Between the MLPs the sequence may stay cut. Again it runs in other processes, as above.


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
# A check of the loss would not have found it. Compare gradients, and count what was compared.
#
# ## What to expect on GPUs
#
# - The same program runs unchanged, over NCCL: `labkit.run("two_dim", nproc=4, preset="paper")`.
#   Counts and bytes should be the same; no GPU run is recorded yet.
# - Messages along `tp` cannot hide: the next layer waits for their sum. So `tp` belongs on the fastest links, inside one
#   machine, and is seldom larger than 8. Along `data`, FSDP gathers ahead and hides most of its messages.
# - With more ranks a third axis can follow, such as pipeline stages. The method stays: predict each axis by itself.
#
# Figures from named GPUs belong into the folder `results`. None is recorded there yet for this lab.

# %% [markdown]
# ## Summary
#
# Predicted beside measured, for the runs above that theory covers.

# %% tags=["summary"]
tables = {labels[2]: plots.table(square, predicted)}
for tp in (1, RANKS):
    traffic = theory.collectives(PAIRS, places(tp), **MESHES[tp])
    tables[labels[tp]] = plots.table(runs[tp], traffic | theory.resident_bytes(PAIRS, **MESHES[tp]))
tables["sequence cut"] = plots.table(sequence["sequence cut"], predicted_cut)
tables["DDP x TP"] = plots.table(replicated, predicted_ddp | {"data/all_reduce_count": 1})
pandas.concat(tables)

# %% [markdown]
# ## Where to go from here
#
# - Compile it: `labkit.run("two_dim", nproc=4, plan="ddp_tp", check="parity")`. It needs a C++ compiler.
# - Read `labkit/parallel/tensor_parallel.py` (the plans), then `labkit/theory/two_dim.py`, and `labkit/rank/traffic.py` on
#   counting by axis.
# - For a model of your own: draw which tensors are whole, cut or partial between two layers. Then write the plan.
