# %% [markdown]
# # Lab 1b. Spatial sharding at work
#
# This companion of lab 1 covers what you meet when you shard images in your own program. After it you can
#
# - describe how a tensor is distributed by a mesh and placements;
# - cut samples and images at the same time, and predict memory and bytes;
# - write a test of sharding that can fail, and say what DTensor's own convolution does.
#
# You need lab 1. The notebook takes about {core_minutes} minutes. Once the cells above section 1 have run, its sections
# can be read in any order.

# %% tags=["nbval-ignore-output"]
import math
from collections.abc import Callable

import numpy
import pandas
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import labkit
from labkit import doctor, plots, requirements
from labkit.config import require
from labkit.local_ranks import shards_by_rank
from labkit.parallel.halo import Strip, pad_with_halo
from labkit.theory import spatial
from labkit_course import widgets
from labkit_course.checks import spatial_at_work as checks
from labkit_course.checks.claims import claim, commit

doctor.show(lab="1b")

# %% tags=["parameters"] small={"STEPS": 2, "BATCH": 4, "HEIGHT": 48, "WIDTH": 128} points=[[2,1,2,8,96],[3,3,4,40,288],[8,12,8,96,256]]
RANKS: int = 4  # ranks that share an image
STEPS: int = 10  # timed training steps in each run
BATCH: int = 6  # images in a step
HEIGHT: int = 64  # of an image, in pixels
WIDTH: int = 256  # of an image, in pixels

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has no neighbour, and more than 8 take minutes")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
require("BATCH", BATCH, at_least=2, multiple_of=2, because="the mesh of 2 x 2 ranks cuts the batch into halves")
require("HEIGHT", HEIGHT, at_least=8, multiple_of=8, because="the two stages divide height and width by 8")
widths = "RANKS or 4 strips must be equally wide, 3 columns or more in the last stage, at an eighth of the width"
require("WIDTH", WIDTH, at_least=8 * 3 * max(RANKS, 4), multiple_of=math.lcm(8 * 4, 8 * RANKS), because=widths)
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, STEPS, BATCH, HEIGHT, WIDTH) == (4, 10, 6, 64, 256)  # the values that the text speaks of
DEPTHS, DIMS = (1, 1), (32, 64)  # blocks and channels in each stage
SETUP = {
    "data": "photo", "batch": BATCH, "height": HEIGHT, "width": WIDTH, "depths": DEPTHS, "dims": DIMS,
    "layer_scale_init_value": 1.0, "learning_rate": 1e-3, "steps": STEPS,
}  # fmt: skip
stages = spatial.convnext_stages(HEIGHT, WIDTH, DEPTHS, DIMS)
halved = labkit.run("convnext_spatial", nproc=2, strategy="local", **SETUP)  # two strips: sections 4, 5 and 8 use it

# %% [markdown]
# ## 1. How narrow may a strip be? ({minutes} minutes)
#
# The stem divides an image's width by 4, and each later stage begins with a downsampling that halves it.
#
# ### Exercise 1: how wide is a strip? (•, {minutes} minutes)
#
# How many columns of a feature map does a rank hold? Stages count from 0, and the ranks share the width equally.
#
# <details><summary>Hint</summary>
#
# Stage 2 lies behind the stem and two downsamplings: the width is divided by 4 · 2 · 2.
#
# </details>


# %%
def local_columns(width: int, ranks: int, stage: int) -> int:
    ### BEGIN SOLUTION
    return width // (4 * 2**stage) // ranks
    ### END SOLUTION


# %%
checks.local_columns(local_columns)

# %% [markdown]
# A strip must not be narrower than the halo, or a rank would need columns from beyond its neighbour. labkit refuses
# such a run before it launches anything. The next cell is meant to be refused: its images have 16 columns for each
# rank.

# %%
try:
    labkit.run("convnext_spatial", nproc=RANKS, width=16 * RANKS)
except labkit.ParameterError as error:
    print(error)

# %% [markdown]
# *Takeaway: the deepest stage decides how many ranks can share an image.*
#
# ## 2. Placements: who holds what ({minutes} minutes)
#
# PyTorch describes a distributed tensor by a **mesh** (the ranks, arranged in a line or a grid) and one **placement**
# for each axis of the mesh. `Shard(dim)` cuts the tensor along a dimension. With `Replicate()` all ranks along this
# axis hold the same. With `Partial()` each rank along it holds a term, and the true tensor is the sum of the terms. A
# `DTensor` is a local tensor together with this description. PyTorch can play all ranks inside one process, so we can
# look at every shard:

# %%
matrix = torch.arange(16.0).reshape(4, 4)
held = {
    "4 ranks: Shard(0)": shards_by_rank(matrix, (4,), [Shard(0)]),
    "4 ranks: Shard(1)": shards_by_rank(matrix, (4,), [Shard(1)]),
    "2 × 2: Shard(0), Shard(1)": shards_by_rank(matrix, (2, 2), [Shard(0), Shard(1)]),
    "2 × 2: Shard(0), Replicate()": shards_by_rank(matrix, (2, 2), [Shard(0), Replicate()]),
}
summands = [numpy.full((4, 4), 1.0), numpy.eye(4), numpy.flipud(numpy.eye(4))]
held["4 ranks: Partial()"] = dict(enumerate([*summands, matrix.numpy() - sum(summands)]))
_ = plots.shard_panels(matrix.numpy(), held)

# %% tags=["claim"]
replicas = held["2 × 2: Shard(0), Replicate()"]
claim("ranks 0 and 1 hold the same rows", numpy.array_equal(replicas[0], replicas[1]))
claim("the four summands add up to the matrix", numpy.array_equal(sum(held["4 ranks: Partial()"].values()), matrix))

# %% [markdown]
# *What each rank holds of one 4 × 4 matrix. Equal parts have the same colour; with `Partial()` no two ranks hold the
# same, and the four matrices add up to the first one.*
#
# A mesh of 2 × 2 has two axes. Ranks 0 and 1 lie along the last axis, ranks 0 and 2 along the first. Below, change the
# placements of a photo, [rows, columns, 3]. Which of them leave a rank fewer rows or columns? *run it* asks real ranks.
#
# <details><summary>With Partial() on both axes a rank holds as many bytes as with Replicate() on both. What is the difference?</summary>
#
# With `Replicate()` each rank has the whole already. With `Partial()` it has one of four terms, and only an all-reduce
# over all four ranks, or one along each axis, makes the whole of them.
#
# </details>

# %%
widgets.PlacementExplorer()

# %% [markdown]
# ### Exercise 2: place a network's tensors (••, {minutes} minutes)
#
# Take a mesh of two axes, `data` × `space`. Along `data` the ranks take different samples. Along `space` they share the
# width of each image. Tensors are [N, C, H, W], logits are [N, classes]. Place four of them:
#
# - the `images`, and the `weights`;
# - the `gradients` of the convolutions' weights, right after each rank's own backward pass and before anything is
#   reduced (the loss is a sum over the samples);
# - the `logits`, after the mean over the whole image (over all ranks along `space`).
#
# Return a dictionary with these four names. Each value lists the placement along `data`, and then that along `space`.
#
# <details><summary>Hint 1</summary>
#
# For each axis, compare two ranks that differ along it only. Do they hold the same elements? Different parts? Parts of
# a sum?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A weight's gradient is a sum over all pixels of all samples. A rank has seen some of both.
#
# </details>


# %%
def placements() -> dict[str, list[Placement]]:
    ### BEGIN SOLUTION
    return {
        "images": [Shard(0), Shard(3)],
        "weights": [Replicate(), Replicate()],
        "gradients": [Partial(), Partial()],
        "logits": [Shard(0), Replicate()],
    }
    ### END SOLUTION


# %%
checks.placements(placements)

# %% [markdown]
# The classifier comes after the mean, so all ranks along `space` compute the same gradient of its weights. There it is
# `[Partial(), Replicate()]`, and a sum along `space` would double it. Strips that overlap in their halos are none of the three:
# no placement describes them.
#
# *Takeaway: for each axis of the mesh ask whether two ranks along it hold parts, copies, or terms of a sum.*
#
# ## 3. Samples and strips at once ({minutes} minutes)
#
# A mesh of 2 × 2 cuts a batch into two halves, and each image into two strips. In lab 1, a middle rank in a line of
# four had two neighbours and all samples. Now each rank has one neighbour and half of the samples. Commit: how many
# times as many bytes did the middle rank send to its neighbours as a rank sends now?

# %% tags=["commit"]
mine_ratio = commit(times_as_many=None)
### BEGIN SOLUTION
mine_ratio = commit(times_as_many=4)
### END SOLUTION

# %% tags=["summary"]
line = labkit.run("convnext_spatial", nproc=4, strategy="local", **SETUP | {"steps": 1})
grid = labkit.run("convnext_spatial", nproc=4, strategy="local", mesh="2x2", **SETUP | {"steps": 1})
more = {"times_as_many": line.value("send_bytes") / grid.value("send_bytes")}
plots.comparison_table(more, {"times_as_many": 4}, yours=mine_ratio)

# %% [markdown]
# So sharing samples makes halos cheaper, and does not make the gradients cheaper: labkit all-reduces them axis by axis, in
# one bucket each time. The bucket holds terms and copies together (exercise 2), and labkit takes the mean of it over
# the ranks. So copies stay what they are, and to make up for it, the backward pass of the mean over the image multiplies the
# terms by the number of strips. The table lists
# all calls of a rank in a step, and the bytes **handed over** in them, those of the tensors that a rank gives to its
# sends and all-reduces:

# %%
gradients = 4 * spatial.convnext_parameters(DEPTHS, DIMS, num_classes=10)
calls = {
    "sends: halos and their gradients": (
        2 * sum(DEPTHS),
        spatial.spatial_send_bytes(stages=stages, batch=BATCH // 2, neighbours=1),
    ),
    "all-reduce along space: means over the image": (1, 4 * (BATCH // 2) * DIMS[-1]),
    "all-reduce along space: all gradients": (1, gradients),
    "all-reduce along data: all gradients": (1, gradients),
}
called = pandas.DataFrame.from_dict(calls, orient="index", columns=["calls", "bytes"])
called

# %% tags=["claim"]
sends, sums = called.iloc[0], called.iloc[1:].sum()
claim("the sends, to the byte", [grid.value("send_count"), grid.value("send_bytes")] == [*sends])
claim("the all-reduces, to the byte", [grid.value("all_reduce_count"), grid.value("all_reduce_bytes")] == [*sums])
claim("one all-reduce fewer in a line of four", line.value("all_reduce_count") == sums["calls"] - 1)

# %% [markdown]
# A line of four needs one all-reduce fewer, since it has one axis. The explorer shows strips and halos, a rank's
# activations against a budget, and the bytes handed over. It begins with this network and 4 images.
#
# <details><summary>Four ranks share 4 images, as 1 × 4 or as 2 × 2. Which hands over less?</summary>
#
# 1 × 4 hands over 426 kB and 2 × 2 507 kB. The halos of 2 × 2 have a quarter of the bytes, but labkit makes
# two all-reduces of all gradients and not one. Now count what goes over the wire. In a ring of 4 ranks an all-reduce sends
# 1.5 times its bytes, and in one of 2 ranks its bytes once, so that 1 × 4 sends 541 kB, and 2 × 2 still 507 kB. For
# this small network that is 6 % less; the larger the images are beside the weights, the more the halos decide.
#
# </details>

# %%
widgets.SpatialExplorer()

# %% tags=["claim"]
explorer = widgets.SpatialExplorer()
strips, mesh = (explorer.predict(**explorer.chosen | {"mesh": shape}) for shape in ((1, 4), (2, 2)))
claim("1 x 4 hands over 426 kB", round((strips["send_bytes"] + strips["all_reduce_bytes"]) / 1e3) == 426)
claim("2 x 2 hands over 507 kB", round((mesh["send_bytes"] + mesh["all_reduce_bytes"]) / 1e3) == 507)
claim("in a ring 1 x 4 sends 541 kB", round((strips["send_bytes"] + 1.5 * strips["all_reduce_bytes"]) / 1e3) == 541)

# %% [markdown]
# *Takeaway: as long as there are samples to share, sharing them first makes halos cheapest, but count the all-reduces, too.*
#
# ## 4. What does a block keep? ({minutes} minutes)
#
# ### Exercise 3: activations of a block (••, {minutes} minutes)
#
# Between the forward and the backward pass PyTorch keeps what the backward pass will need. A convolution, a linear
# layer, a norm, GELU and the layer scale need their **input**, and an addition needs nothing. A ConvNeXt block is:
# depthwise convolution, norm, linear layer to four times the channels, GELU, linear layer back, layer scale, addition.
# How many bytes does it keep, at 4 bytes an element? Leave out weights, halos, and the norm's few numbers a pixel.
#
# <details><summary>Hint 1</summary>
#
# Call one feature map A: batch × channels × height × width elements. All operations but the addition keep one input.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two of the six inputs have four times the channels. Which?
#
# </details>


# %%
def activation_bytes(batch: int, channels: int, height: int, width: int) -> int:
    ### BEGIN SOLUTION
    return (1 + 1 + 1 + 4 + 4 + 1) * batch * channels * height * width * 4
    ### END SOLUTION


# %%
checks.activation_bytes(activation_bytes)

# %% [markdown]
# Your sum over the two blocks of a network, on half of the width, is a part of what two ranks measured with
# PyTorch's `MemTracker`, which follows every tensor of a step. Theory counts what you left out. By how much do you
# differ?

# %% tags=["nbval-ignore-output"]
by_you = [activation_bytes(BATCH, stage.channels, stage.height, stage.width // 2) for stage in stages]
half = spatial.convnext_stages(HEIGHT, WIDTH // 2, DEPTHS, DIMS)
by_theory = {"peak_activation_bytes": spatial.convnext_activation_bytes(stages=half, batch=BATCH, ranks=2)}
yours = {"peak_activation_bytes": None if None in by_you else sum(by_you)}
plots.comparison_table(halved, by_theory, yours=yours, tolerance=0.05)

# %% [markdown]
# This table says which bytes are which:

# %%
pixels = [4 * BATCH * stage.height * stage.width for stage in half]  # bytes of one channel of a feature map
maps = [channels * size for channels, size in zip(DIMS, pixels, strict=True)]  # bytes of a feature map
kept = {
    "both blocks, as in exercise 3": 12 * sum(maps),
    "the halos of their convolutions": sum(4 * BATCH * stage.height * 2 * 3 * stage.channels for stage in half),
    "norm of the stem: its input": maps[0],
    "norm of the downsampling: its input and output": 2 * maps[0],
    "all norms: a mean and a deviation of each pixel": 2 * (3 * pixels[0] + pixels[1]),
    "freed before the peak: last layer scale's input": -maps[1],
}
kept["theory"] = sum(kept.values())
pandas.Series(kept).to_frame("bytes")

# %% tags=["claim"]
claim("the parts are all of theory", kept["theory"] == by_theory["peak_activation_bytes"])
claim("theory is right to 1 %", abs(halved.value("peak_activation_bytes") / kept["theory"] - 1) < 0.01, where=TOLD)
claim("the blocks are most of it", kept["both blocks, as in exercise 3"] > 0.7 * kept["theory"])

# %% [markdown]
# *Takeaway: a block keeps twelve times the bytes of its input.*
#
# ## 5. The longer side ({minutes} minutes)
#
# Lab 1 gave the time of a step in strips: T / n + messages · (latency + bytes / bandwidth). What if images grow? Here
# they are twice as wide, still on two ranks. Commit: by what factor do the arithmetic and the halos' bytes grow?

# %% tags=["commit"]
mine_growth = commit(arithmetic=None, halos=None)
### BEGIN SOLUTION
mine_growth = commit(arithmetic=2, halos=1)
### END SOLUTION

# %% [markdown]
# The arithmetic is a formula, operations by size, and the halos' bytes are measured.

# %%
wide = labkit.run("convnext_spatial", nproc=2, strategy="local", **SETUP | {"width": 2 * WIDTH, "steps": 1})
wide_stages = spatial.convnext_stages(HEIGHT, 2 * WIDTH, DEPTHS, DIMS)
work = [sum(each.channels**2 * each.height * each.width * each.depth for each in s) for s in (stages, wide_stages)]
grown = {"arithmetic": work[1] / work[0], "halos": wide.value("send_bytes") / halved.value("send_bytes")}
plots.comparison_table(grown, yours=mine_growth)

# %% tags=["claim"]
claim("twice the width doubles the arithmetic, and the halos stay", grown == {"arithmetic": 2, "halos": 1})

# %% [markdown]
# The halos stay the same while the arithmetic doubles.
#
# *Takeaway: the halo is as long as the cut, so a longer image adds arithmetic, and no bytes.*
#
# ## 6. A test that cannot fail ({minutes} minutes)
#
# Somebody tests an exchange with an image of ones: each padded strip must be ones, with zeros at the border of the
# image.
#
# ### Exercise 4: fool the test (•, {minutes} minutes)
#
# Show that this test is worthless: write any "exchange" that **sends nothing** and passes it.
#
# <details><summary>Hint 1</summary>
#
# In an image of ones, what do your own columns look like?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Rank 0 has a border on the left, the last rank one on the right. There the test wants zeros.
#
# </details>


# %%
def sends_nothing(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    left, right = strip[..., :halo], strip[..., -halo:]
    return torch.cat([left if rank > 0 else 0 * left, strip, right if rank < ranks - 1 else 0 * right], dim=-1)
    ### END SOLUTION


# %%
fooled_verdict = checks.sends_nothing(sends_nothing)
fooled_verdict

# %% [markdown]
# And lab 1's parity check? It starts from random weights and different images, and it must fail here: it compares a
# step of your broken exchange with one device.


# %%
def swapped(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    """Swap the halos: another broken exchange, so that the next line can show it until exercise 4 is solved."""
    padded = pad_with_halo(strip, halo, Strip(dim=3, group=None, rank=rank, ranks=ranks))
    return torch.cat([padded[..., -halo:], strip, padded[..., :halo]], dim=-1)


nothing_sent = sends_nothing if fooled_verdict.ok else swapped
use = {"exchange_halo": nothing_sent}
print(labkit.check("convnext_spatial", nproc=RANKS, width=WIDTH, strategy="yours", use=use).verdict_text)

# %% [markdown]
# They differ, so the check has caught it.
#
# ### Exercise 5: write a test that can fail (••, {minutes} minutes)
#
# Now write a better test. It runs on every rank, and gets `exchange(strip, halo, rank, ranks)`, which autograd can
# differentiate, like lab 1's `HaloExchange.apply`. Choose an image, a halo, and the gradient that you pass to
# `backward`. Return True if this rank's padded strip, and the gradient of its strip, are those that one device
# computes.
#
# The check hands your test a right exchange and seven broken ones, on real ranks. It must return True for the right
# one on every rank, and False for each broken one on at least one rank. Go forward and backward first, and compare at
# the end: a rank that returns early leaves its neighbours waiting.
#
# <details><summary>Hint 1</summary>
#
# Which mistakes would an image of ones hide? A single image? A gradient of ones, as from `padded.sum()`? With the same
# seed every rank can draw the same whole image, and all ranks' gradients.
#
# </details>
# <details><summary>Hint 2</summary>
#
# On one device a padded strip is a view of the padded image: `whole = torch.nn.functional.pad(image, (3, 3))`, and with
# strips of 8 columns `whole[..., 8 * rank : 8 * rank + 14]`. Make the views of all ranks.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.autograd.backward(views, gradients)` goes backward from all views at once, and `image.grad` has the sum. The strip
# has to be a leaf: `….detach().clone().requires_grad_()`. Then `padded = exchange(strip, 3, rank, ranks)`, `padded.backward(gradients[rank])`, and two times `torch.allclose`.
#
# </details>


# %%
def exchange_test(exchange: Callable[..., torch.Tensor], rank: int, ranks: int) -> bool:
    ### BEGIN SOLUTION
    torch.manual_seed(0)  # every rank draws the same
    image = torch.randn(2, 3, 5, 8 * ranks, requires_grad=True)
    whole = torch.nn.functional.pad(image, (3, 3))
    views = [whole[..., 8 * each : 8 * each + 14] for each in range(ranks)]  # the padded strip of each rank
    gradients = [torch.randn_like(view) for view in views]
    torch.autograd.backward(views, gradients)  # one device
    strip = image.detach().chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    padded = exchange(strip, 3, rank, ranks)
    padded.backward(gradients[rank])
    right = image.grad.chunk(ranks, dim=-1)[rank]
    return torch.allclose(padded, views[rank]) and torch.allclose(strip.grad, right)
    ### END SOLUTION


# %%
checks.exchange_test(exchange_test)

# %% [markdown]
# <details><summary>The seven broken exchanges, and what catches each</summary>
#
# | the broken exchange | what a test needs |
# |---|---|
# | sends nothing, and repeats a strip's own columns | columns that differ |
# | swaps the left and the right halo | a comparison of the padded strip |
# | repeats columns at the right border, where zeros belong | a comparison on the last rank, too |
# | gives every image the halo of the first | several images |
# | rounds the halo to bfloat16 | random numbers, and a small tolerance |
# | sends no gradient home | a comparison of the strip's gradient |
# | sends home the gradients of the wrong columns | an incoming gradient that differs from column to column |
#
# </details>
#
# *Takeaway: a test of sharding needs images, weights and gradients that differ everywhere. Before you trust it, break
# the code and see it fail.*
#
# ## 7. A silent error in the wild ({minutes} minutes)
#
# PyTorch's DTensor has a convolution of its own. Here it is on two ranks: one 7 × 7 convolution, an image cut along the
# width into two strips of 8 columns. The right result is known, since each rank has computed the whole one first.
# Something is wrong with this convolution, and no error says so. Commit: how many columns of each strip will be wrong?

# %% tags=["commit"]
mine_columns = commit(rank_0=None, rank_1=None)
### BEGIN SOLUTION
mine_columns = commit(rank_0=3, rank_1=3)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name silent
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from labkit.rank import report

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
conv, images = nn.Conv2d(4, 4, 7, padding=3, groups=4), torch.randn(3, 4, 8, 16)
whole = conv(images)
distribute_module(conv, mesh)  # the weights become replicated DTensors
out = conv(distribute_tensor(images, mesh, [Shard(3)]))
mine = whole.chunk(2, dim=3)[mesh.get_local_rank()]
wrong = [column for column in range(8) if not torch.allclose(out.to_local()[..., column], mine[..., column], atol=1e-5)]
print(f"labelled {out.placements}, wrong columns of this strip: {wrong}")
report(wrong=wrong)

# %%
columns_off = [rank.reported["wrong"] for rank in silent.ranks]
measured_columns = {f"rank_{rank}": len(wrong) for rank, wrong in enumerate(columns_off)}
pandas.DataFrame({"yours": mine_columns, "wrong": measured_columns}).astype(object).fillna("no prediction")

# %% tags=["claim"]
if requirements.torch_version() >= (2, 12):
    claim("the three columns at the cut are wrong", columns_off == [[5, 6, 7], [0, 1, 2]])
else:
    claim("on 2.11 the outputs are right", columns_off == [[], []])

# %% [markdown]
# The three columns at the cut are wrong on either side. A window of 7 reaches 3 columns to each side, but no halo was
# exchanged, and the convolution took zeros.
#
# **The cause.** DTensor first asks a rule how an operation's output is placed, and in torch 2.13 the rule for
# convolutions knows a cut along the samples alone: for strips it answers "gather the input, and the output is
# `Replicate()`". The convolution's own code, torch/distributed/tensor/_tp_conv.py, gathers nothing, keeps the wrong
# label, and exchanges halos only if that label says that the width is cut. Even if it did, the images' gradients would
# be lost, because `_ring_send_recv_aggregate`, which adds what comes home from the neighbours, has no `return`.
#
# <details><summary>Versions, and the upstream issue</summary>
#
# Read and run on torch 2.13; the outputs are wrong on 2.12, too (pytorch/pytorch#191926). On 2.11 they are right, and
# what comes back through a padded convolution is lost.
#
# </details>
#
# What does that do to a training run? labkit refuses the strategy `native`, which uses this convolution. For this lab alone
# `native_unguarded` lets it run, and puts the right label back after every convolution, since a later operation would
# stumble over the wrong one. So the run is rigged on purpose: nothing is wrong in it but the missing halos.

# %%
# The ranks cannot divide this batch: one that they can, DTensor might cut because of the wrong label.
odd_batch = SETUP | {"batch": RANKS + 1, "steps": 5}
native = labkit.run("convnext_spatial", nproc=RANKS, strategy="native_unguarded", **odd_batch)
beside = labkit.run("convnext_spatial", nproc=1, strategy="plain", **odd_batch)
_ = plots.loss_curves({"one device": beside, f"rigged: native_unguarded, {RANKS} ranks": native}, chance=math.log(10))
print(labkit.check("convnext_spatial", nproc=2, strategy="native_unguarded", batch=3).verdict_text)

# %% tags=["claim"]
gap = (native.losses - beside.losses).abs() / beside.losses
claim("the first losses already differ by more than 10 %", gap.iloc[0] > 0.1, where=TOLD)
claim(
    "the rigged loss falls, and stays higher",
    beside.losses.iloc[-1] < native.losses.iloc[-1] < native.losses.iloc[0],
    where=TOLD,
)

# %% [markdown]
# *Both trainings see the same images and start from the same weights. The rigged one's loss falls, too. Without the
# curve beside it, who would know?*
#
# Step 0 is proof enough here: with equal weights and images the two losses differ before anything was trained. A forward
# pass beside one device's finds wrong outputs that a falling loss hides. (Wrong gradients show in the next step at the
# earliest, so compare the gradients as well.)
#
# The comparison needs weights that differ. Give the broken network weights of ones and biases of zero: the classifier then
# gives all 10 classes the same logit, and the loss is ln(10), whatever the convolution did.

# %%
ones = SETUP | {"init": "ones", "steps": 1, "batch": 3}
trap = {
    "the broken run": labkit.run("convnext_spatial", nproc=2, strategy="native_unguarded", **ones),
    "one device": labkit.run("convnext_spatial", nproc=1, strategy="plain", **ones),
}
first = {name: run.frame.query("kind == 'scalar' and name == 'loss'")["value"].iloc[0] for name, run in trap.items()}
for name, loss in (first | {"ln(10)": math.log(10)}).items():
    print(f"{name}: {loss:.4f}")

# %% tags=["claim"]
claim("both have the loss ln(10)", all(abs(loss - math.log(10)) < 1e-4 for loss in first.values()))

# %% [markdown]
# *Takeaway: a library's label of a tensor is a claim, so compare its values with one device's.*
#
# ## 8. What DTensor costs ({minutes} minutes)
#
# labkit can cut activations in two ways that are right. With `dtensor` every tensor is a DTensor, and labkit exchanges
# the halo; the gradients come one by one, and each of those that are terms is reduced by itself. With `local` only the
# input is a DTensor, inside are plain tensors, and all gradients are reduced in one bucket. Both make one all-reduce
# more, for the mean over the image.

# %%
runs = {"plain, 1 rank": labkit.run("convnext_spatial", nproc=1, strategy="plain", **SETUP), "local, 2 ranks": halved}
runs["dtensor, 2 ranks"] = labkit.run("convnext_spatial", nproc=2, strategy="dtensor", **SETUP)
_ = plots.latency_bars(runs)
reduces = {name: int(run.value("all_reduce_count")) for name, run in runs.items() if run.world_size > 1}
print({name: f"{count} all-reduces" for name, count in reduces.items()})

# %% tags=["claim"]
slower = runs["dtensor, 2 ranks"].value("backward_ms") > halved.value("backward_ms")
claim("dtensor's backward pass takes longer than local's", slower, where=STEPS >= 10)
claim("more than ten times as many all-reduces", reduces["dtensor, 2 ranks"] > 10 * reduces["local, 2 ranks"])
reference = runs["plain, 1 rank"].losses
worst = max(((run.losses - reference).abs() / reference).max() for run in runs.values())
claim("every loss equals one device's to 1 part in 10,000, at every step", worst < 1e-4)

# %% [markdown]
# *`dtensor` takes longest, and makes more than ten times as many all-reduces.*
#
# Even `local` is hardly faster than one rank, or slower. Lab 1's formula assumes a device for each rank, while on this machine one rank has all cores to itself,
# and two have to share them. Most of what DTensor adds lies in the backward pass.
#
# Besides its all-reduces, DTensor costs **dispatch**: for each operation PyTorch looks at the placements of the inputs,
# decides how the output is placed, and wraps the result. Here is one addition, of few elements and of many, and a small
# all-reduce, each with the fastest of ten rounds.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name dispatch
import timeit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from labkit.rank import report

mesh = init_device_mesh("cpu", (2,))
for size, times in {4: 100, 2**22: 3}.items():
    plain = torch.ones(size)
    distributed = DTensor.from_local(plain, mesh, [Shard(0)])
    for name, x in {"plain": plain, "dtensor": distributed}.items():
        x + x  # fills the cache of placements
        report(**{f"{name}_{size}": min(timeit.repeat(lambda x=x: x + x, number=times, repeat=10)) / times * 1e6})
bucket = torch.ones(1024)
report(all_reduce=min(timeit.repeat(lambda: dist.all_reduce(bucket), number=100, repeat=10)) / 100 * 1e6)

# %% tags=["nbval-ignore-output"]
costs = dispatch.ranks[0].reported
for size in (4, 2**22):
    each = f"plain tensor {costs[f'plain_{size}']:.1f} µs, DTensor {costs[f'dtensor_{size}']:.1f} µs"
    print(f"one addition of {size:,} elements: {each}")
longer_ms = runs["dtensor, 2 ranks"].value("step_ms") - halved.value("step_ms")
more_reduces = reduces["dtensor, 2 ranks"] - reduces["local, 2 ranks"]
reduces_ms = more_reduces * costs["all_reduce"] / 1e3
print(f"dtensor's step takes {longer_ms:.1f} ms longer; {more_reduces} more all-reduces take {reduces_ms:.1f} ms of it")

# %% tags=["claim"]
claim("a small addition costs more than three times as much on a DTensor", costs["dtensor_4"] > 3 * costs["plain_4"])
claim("a large one less than twice as much", costs[f"dtensor_{2**22}"] < 2 * costs[f"plain_{2**22}"])
claim("the all-reduces by themselves are not the whole difference", reduces_ms < longer_ms, where=STEPS >= 10)

# %% [markdown]
# With large tensors the cost of dispatch is lost in the arithmetic. The last line sets what the all-reduces take by
# themselves beside the whole difference. What is in the rest? torch.profiler and cProfile were run on such a step, with
# torch 2.13 and two ranks on a busy machine, so that counts mean more than times. A step has 171 operations on
# DTensors, and 24,000 calls of Python functions where `local` makes 1,600. More than half of the step's time went into
# reducing the gradients one by one, most of it in the collectives, where ranks wait for each other.
#
# *Takeaway: count the collectives that DTensor makes for you. Each operation costs some microseconds as well.*
#
# ## 9. Take away ({minutes} minutes)
#
# 1. A mesh and one placement for each of its axes say who holds what.
# 2. Halos are cheapest if ranks share samples first, and if the cut runs across the longer side.
# 3. A test needs inputs that differ, and has to be seen failing once.
#
# | if | then |
# |---|---|
# | a strip would be narrower than the halo | take fewer ranks along the image, and more along the samples |
# | a library cuts your tensors | compare one step with one device, gradients included |
# | DTensor is slow on small tensors | count its collectives, and unwrap inside (`to_local`) |
#
# **Ask yourself**
#
# <details><summary>1. Four ranks share a photo as 2 × 2, rows and columns. Which placements does the mean of each row have, after each rank has added up its own columns and divided by all?</summary>
#
# Shard(0) along the first axis, since the ranks hold different rows. Partial() along the second: the terms of its ranks
# add up to the mean.
#
# </details>
#
# <details><summary>2. You cut the height instead, and your images are four times as wide as high. What happens to the halos?</summary>
#
# The cut is four times as long, and so the halos have four times the bytes.
#
# </details>
#
# <details><summary>3. Why does a broken convolution have the right loss where all weights are ones?</summary>
#
# All classes get the same logit, whatever was exchanged, and the loss is ln(10).
#
# </details>
#
# <details><summary>4. A loss falls nicely on four ranks. Which one number would you compare with one device, and with which weights?</summary>
#
# The loss of step 0, with random weights, before training can hide a difference. It tells whether the outputs are right;
# for the gradients compare them, or the loss of step 1.
#
# </details>
#
# <details><summary>Pages</summary>
#
# PyTorch, DTensor and placements: <https://docs.pytorch.org/docs/stable/distributed.tensor.html>
#
# </details>

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("spatial_at_work")
