# %% [markdown]
# # Lab 1. Sharding ConvNeXt's activations
#
# A convolutional network on large images runs out of memory because of its activations (what is kept for the backward
# pass), not its weights. So we cut (*shard*) every image into vertical strips and give each rank one strip. All ranks
# hold all weights, and each holds a part of every feature map.
#
# **After this lab you can**
#
# - say which operations of a convolutional network need their neighbours' pixels, and how many bytes that is;
# - write the exchange of these pixels, forward and backward, and train a real network with it;
# - tell a right sharding from a wrong one, which may look just as good;
# - work out from a few numbers whether cutting images pays.
#
# **Time.** The sections marked *core* take about 100 minutes, the others 25. Difficulty of an exercise: • one line, ••
# some thought, ••• the heart of the lab. You need PyTorch on one device, and lab 0's words: a **rank** is one process
# of a run, the number of ranks is the **world size**, and an **all-reduce** adds up a tensor over all ranks and leaves
# the sum on each.
#
# Everything runs if you answer nothing, and no section needs an earlier answer. Where you see `None`, put down your own
# number first. Then run, and compare.

# %% tags=["nbval-ignore-output"]
import math
from functools import partial

import numpy
import pandas
import torch
from matplotlib import pyplot
from torch import distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import labkit
from labkit import doctor, plots, requirements, widgets
from labkit.checks import spatial as checks
from labkit.checks.claims import claim, commit
from labkit.config import require
from labkit.local_ranks import shards_by_rank
from labkit.models import photo
from labkit.parallel.halo import Strip, pad_with_halo
from labkit.theory import collectives, sizes, spatial

doctor.show()

# %% [markdown]
# What the doctor notes about DTensor's convolution is explained in section 7.
#
# The parameters of this notebook. The images and the network are small, so that each run takes seconds on two cores.
# You may change them; the next cell refuses what cannot work. The text speaks of these; cells say what yours change.

# %% tags=["parameters"] small={"STEPS": 2, "BATCH": 4, "HEIGHT": 48, "WIDTH": 128} points=[[2,1,2,8,48],[3,3,4,40,240],[8,12,8,96,256]]
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
widths = "all strips must be equally wide, and 3 columns or more in the last stage, at an eighth of the width"
require("WIDTH", WIDTH, at_least=8 * 3 * RANKS, multiple_of=math.lcm(8 * 2, 8 * RANKS), because=widths)
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, STEPS, BATCH, HEIGHT, WIDTH) == (4, 10, 6, 64, 256)  # the values that the text speaks of
DEPTHS, DIMS = (1, 1), (32, 64)  # blocks and channels in each stage
SETUP = {
    "data": "photo", "batch": BATCH, "height": HEIGHT, "width": WIDTH, "depths": DEPTHS, "dims": DIMS,
    "layer_scale_init_value": 1.0, "learning_rate": 1e-3, "steps": STEPS,
}  # fmt: skip
stages = spatial.convnext_stages(HEIGHT, WIDTH, DEPTHS, DIMS)
parameters = spatial.convnext_parameters(DEPTHS, DIMS, num_classes=10)

# %% [markdown]
# ## 1. Why: an image that fits only when it is cut (core, 5 minutes)
#
# Take a large ConvNeXt: stages of 3, 3, 27 and 3 blocks with 256 to 2048 channels. For training in float32, each weight
# costs 16 bytes, four numbers of 4: itself, its gradient, and two of Adam. The activations depend on the image. Here is
# one image.

# %%
LARGE = {"depths": (3, 3, 27, 3), "dims": (256, 512, 1024, 2048)}
weights_bytes = 16 * spatial.convnext_parameters(**LARGE, num_classes=1000)
why = {}
for size in (256, 512, 1024, 2048, 4096):
    large = spatial.convnext_stages(size, size, **LARGE)
    why[f"{size} × {size}"] = spatial.convnext_activation_bytes(stages=large, batch=1)
pandas.DataFrame(
    {
        "activations of one image": {size: sizes.readable_bytes(held) for size, held in why.items()},
        "weights, gradients, Adam": dict.fromkeys(why, sizes.readable_bytes(weights_bytes)),
    }
)

# %% tags=["claim"]
claim("at 512 x 512 the weights are more", why["512 × 512"] < weights_bytes)
claim(
    "at 2048 x 2048 one image's activations are more than six times all weights",
    why["2048 × 2048"] > 6 * weights_bytes,
)
claim("4096 x 4096 needs more than the 141 GB of an H200", why["4096 × 4096"] > 141e9)

# %% [markdown]
# Satellite pictures, tissue scans and weather maps are of that size. At 512 × 512 pixels the weights are the larger
# part. At 2048 × 2048 the activations of a *single* image are more than six times that, and 4096 × 4096 needs more than
# the 141 GB of an H200. A smaller batch does not help: one is the smallest. Numbers of 2 bytes, or computing
# activations again in the backward pass (*checkpointing*), save only so much, and the second costs time. Cutting the
# image saves more with every rank, and goes together with both.
#
# Here it is on this machine. Each rank may allocate 250 MiB, as if it were a small device. Two images of 512 × 1024
# pixels do not fit; they stand for one image of twice that size, which no smaller batch would save. **The first run is
# meant to fail.**


# %%
def fits(ranks: int, strategy: str) -> str:
    """Whether a step of training stays below 250 MiB on each rank. The cap on a CPU's memory needs Linux."""
    large = {"height": 512, "width": 1024, "steps": 1, "memory_cap_mib": 250, "device": "cpu"}
    try:
        labkit.run("convnext_spatial", nproc=ranks, strategy=strategy, **large)
    except labkit.RankFailed as failure:
        return f"{failure.exc_type} on rank {failure.rank}"
    return "trained"


# %%
alone, shared = fits(1, "plain"), fits(2, "local")
print(f"1 rank, whole images: {alone}\n2 ranks, a strip each: {shared}")

# %% tags=["claim"]
claim("one rank runs out of memory, and two train", (alone, shared) == ("MemoryCapExceeded on rank 0", "trained"))

# %% [markdown]
# ## 2. The code you would write (core, 8 minutes)
#
# How does a rank begin, and who cuts the data? Below is all of it: plain PyTorch, on two real ranks. `%%torchrun -n 2`
# starts this cell twice, as `torchrun` starts a script. The same text in a file works: `torchrun --nproc-per-node 2
# script.py`. At first read only the loop. `padded` gives a strip three columns of each neighbour (section 3), and
# `DTensor` says how the ranks' parts make a whole (section 4).

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

dist.init_process_group("gloo")  # gloo is for CPUs, nccl for GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))  # all ranks, in a line
torch.manual_seed(0)  # the same weights and the same images on every rank
images, labels = torch.randn(4, 3, 16, 64), torch.randint(10, (4,))
strip = images.chunk(ranks, dim=3)[rank]  # each rank cuts for itself
stem = nn.Conv2d(3, 8, 4, stride=4)
depthwise = nn.Conv2d(8, 8, 7, padding=(3, 0), groups=8)  # pads the height; padded() does the width
head, cut = nn.Linear(8, 10), [*stem.parameters(), *depthwise.parameters()]
optimizer = torch.optim.SGD([*cut, *head.parameters()], lr=0.3)


def padded(x, halo=3):  # of all ranks' outer columns, two pieces a rank, and zeros at both ends: the two around x
    edges = DTensor.from_local(torch.cat([x[..., :halo], x[..., -halo:]], dim=3), mesh, [Shard(3)])
    edges = nn.functional.pad(edges.full_tensor(grad_placements=[Partial()]), (halo, halo)).split(halo, dim=3)
    return torch.cat([edges[2 * rank], x, edges[2 * rank + 3]], dim=3)


for _ in range(20):
    means = depthwise(padded(stem(strip))).relu().mean(dim=(2, 3)) / ranks
    features = DTensor.from_local(means, mesh, [Partial()]).full_tensor()  # the sum over ranks
    loss = nn.functional.cross_entropy(head(features), labels)
    optimizer.zero_grad()
    loss.backward()
    for parameter in cut:  # each rank has seen its own columns only
        dist.all_reduce(parameter.grad)
    optimizer.step()
print(f"loss {loss.item():.3f}")
dist.destroy_process_group()

# %% [markdown]
# What happens here?
#
# - **Who cuts?** Each rank does, for itself: all make the same images from the same seed, and each takes its `chunk`. With
#   files, each rank would read its own columns.
# - **Who holds the weights?** All ranks, all of them. The seed makes them equal; nothing is sent.
# - **What is sent?** The outer columns of the strips, one mean per sample and channel, and the gradients. The first two
#   go by `DTensor.from_local(...).full_tensor()`: it gives the whole tensor to every rank, and has a backward pass. A
#   rank's gradient of the edges holds only what this rank used of them, one summand. `grad_placements=[Partial()]` says
#   so: the summands are added up, and each rank gets back the gradient of its own columns. The gradient of the means is
#   whole on every rank (section 5), and that is the default.
#
# Both ranks print the same loss. Put `-n 1` or `-n 4` there: it stays the same. (3 ranks cannot share the width evenly,
# and with 8 a strip is narrower than the halo.) That is the point of all that follows: the work is shared, and the
# training does not notice.
#
# This network is a toy, and every rank receives the columns of all. Below we train a ConvNeXt, and send to neighbours
# only. `labkit.run` starts such a program, `launch/convnext_spatial.py`, and brings home what the ranks measured. The
# strategy `local` does what the script does, but sends halos to neighbours only, and scales gradients differently
# (section 5).

# %%
local = labkit.run("convnext_spatial", nproc=RANKS, strategy="local", **SETUP)
print(f"{RANKS} ranks trained for {STEPS} steps, the network has {parameters:,} parameters")

# %% [markdown]
# The images are tiles of a portrait, and the task is to say which of ten regions a tile comes from. The batch stays the
# same, so a falling loss means that the network learns these tiles by heart.
#
# ## 3. What ConvNeXt does with a strip (core, 8 minutes)
#
# ConvNeXt is made of a few kinds of parts. The **stem** cuts the image into patches of 4 × 4 pixels and makes one pixel
# with C channels of each. **Blocks** keep the shape; blocks of one shape in a row form a **stage**. Each later stage
# begins with a **downsampling**, which halves height and width (and here doubles the channels). A norm follows the
# stem's convolution, and comes before a downsampling's. At the end come the mean over the image, and a linear layer,
# the *head*.

# %%
_ = plots.convnext_diagram(stages, HEIGHT, WIDTH)

# %% [markdown]
# *The network of this lab. In each box stands the shape that leaves this part, channels × height × width. Below: the
# inside of a block. The colours say what an operation needs once the image is cut.*
#
# - A 1 × 1 convolution, a norm over the channels, GELU (an activation function) and the **layer scale** (one learned factor
#   a channel) look at one pixel at a time. A strip is enough.
# - The stem and the downsampling are convolutions whose stride equals their kernel. Their windows do not overlap. A strip is
#   enough as long as no window crosses the cut.
# - The 7 × 7 **depthwise** convolution (each channel by itself) is different. Near the edge of a strip it looks up to
#   three columns over the cut. Those columns are the **halo**, and they live on the neighbouring rank.

# %%
_ = plots.halo_diagram(photo.load_photo()[60:300], ranks=4, halo=12)

# %% [markdown]
# *Rank 1 holds one strip of the portrait of Grace Hopper. It needs a few columns from rank 0 and a few from rank 2: the
# pixels in the thick narrow frames travel. The halo is drawn wider than three pixels, so that you can see it.*
#
# ### Exercise 1.1: how wide is a strip? (•, 3 minutes)
#
# How many columns of a feature map does a rank hold? Stages count from 0, and the ranks share the width equally. Look at the
# widths in the sketch.
#
# <details><summary>Hint 1</summary>
#
# By what does the stem divide the width, by what each downsampling?
#
# </details>
# <details><summary>Hint 2</summary>
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
# A strip must not be narrower than the halo, or a rank would need columns from beyond its neighbour. labkit refuses such a
# run before it launches anything, and says why. The next line is meant to be refused.

# %%
try:
    labkit.run("convnext_spatial", nproc=RANKS, width=16 * RANKS)
except labkit.ParameterError as error:
    print(error)

# %% [markdown]
# ## 4. Placements: who holds what (core, 9 minutes)
#
# PyTorch describes a distributed tensor by a **mesh** (the ranks, arranged in a line or a grid) and one **placement**
# for each axis of the mesh. `Shard(dim)` cuts the tensor along a dimension. `Replicate()` does not cut: all ranks along
# this axis hold the same. `Partial()` means that each rank holds a tensor of full size, and the true tensor is their
# sum (the default; other reductions exist). A `DTensor` is a local tensor together with this description.
#
# Nothing is launched here. PyTorch can play all ranks inside one process, so we can look at every shard at once.

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
# *What each rank holds of one 4 × 4 matrix. The same part has the same colour: in the fifth panel ranks 0 and 1 hold the same
# rows. In the last panel the four matrices add up to the first one; one of many ways.*
#
# A mesh of 2 × 2 has two axes. Ranks 0 and 1 lie along the last axis, ranks 0 and 2 along the first. Each axis has its own
# placement, the first axis first.
#
# ### Explore (optional, 4 minutes)
#
# Here the tensor is a photo, [rows, columns, 3]. Turn the placement on each axis, and see which ranks hold a part: "0 or
# 1" hold the same, "0 + 2" hold terms of a sum. Look at each rank's tensor: where do its bytes shrink, and where not?
# The table says what `full_tensor()` takes, which puts the whole on every rank. *run it* asks real ranks for all of this,
# and whether the photo came back.
#
# With `Partial()` on both axes a rank holds as many bytes as with `Replicate()` on both. What is the difference?
#
# <details><summary>Answer</summary>
#
# What the bytes are. With `Replicate()` each rank has the whole already. With `Partial()` it has one of four terms. The
# whole then takes two all-reduces, one along each axis; to each a rank hands as many bytes as the whole has.
#
# </details>

# %%
widgets.PlacementExplorer()

# %% [markdown]
# ### Exercise 1.2: place a network's tensors (••, 5 minutes)
#
# Take a mesh of two axes, `data` × `space`. Along `data` the ranks take different samples. Along `space` they share the
# width of each image. Tensors are [N, C, H, W], logits are [N, classes]. Place four of them:
#
# - the `images`, and the `weights`;
# - the `gradients` of the convolutions' weights, right after each rank's own backward pass and before anything is
#   reduced (the loss is a sum over the samples; the head is special, see section 5);
# - the `logits`, after the mean over the whole image.
#
# <details><summary>Hint 1</summary>
#
# For each axis, compare two ranks that differ along it only. Do they hold the same numbers? Different parts? Parts of a sum?
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
# ## 5. Count what travels (core, 10 minutes)
#
# ### Exercise 1.3: how many bytes go to one neighbour? (•, 3 minutes)
#
# Before one convolution with a k × k kernel, a rank sends a few columns to one neighbour: all rows, all channels, all
# samples, 4 bytes a number. How many bytes is that?
#
# <details><summary>Hint 1</summary>
#
# A 7 × 7 kernel looks three columns to each side of its centre.
#
# </details>
# <details><summary>Hint 2</summary>
#
# rows · columns · channels · samples · 4
#
# </details>


# %%
def halo_bytes(rows: int, kernel: int, channels: int, batch: int) -> int:
    ### BEGIN SOLUTION
    return rows * (kernel - 1) // 2 * channels * batch * 4
    ### END SOLUTION


# %%
checks.halo_bytes(halo_bytes)

# %% [markdown]
# Now a whole training step, of a rank in the middle. It has two neighbours. In the forward pass each block sends one
# halo to each neighbour. In the backward pass the gradient of a halo goes the opposite way: as many columns, as many
# bytes.
#
# The ranks also make two all-reduces. One is for the mean over the whole image: each rank hands in one number for each sample
# and each channel of the last stage. The other is for the gradients of all weights, put together into one flat tensor, a
# **bucket**.
#
# labkit counts what a rank **hands to the call**. For a halo that is also what goes **on the wire**: it is sent once. For an
# all-reduce it is not: a ring of n ranks (lab 0) puts 2 (n − 1) / n times as much on the wire.
#
# Put down your numbers. `halo_bytes` is yours: let it compute. `stages[0].height` and `stages[0].channels` hold what the
# sketch shows; `parameters` is the number of weights.

# %% tags=["commit"]
neighbours = min(RANKS - 1, 2)
mine = commit(
    send_count=None,  # messages to neighbours in a step
    send_bytes=None,  # handed over for them in all; for a formula: lambda: 2 * halo_bytes(rows=..., kernel=7, ...)
    all_reduce_count=None,
    all_reduce_bytes=None,  # handed to them in all
)
### BEGIN SOLUTION
mine = commit(
    send_count=neighbours * 2 * 2,  # two blocks, forward and backward
    send_bytes=lambda: neighbours * 2 * sum(halo_bytes(stage.height, 7, stage.channels, BATCH) for stage in stages),
    all_reduce_count=2,
    all_reduce_bytes=4 * (BATCH * stages[-1].channels + parameters),
)
### END SOLUTION

# %%
predicted = {
    "send_count": neighbours * 2 * sum(DEPTHS),
    "send_bytes": spatial.spatial_send_bytes(stages=stages, batch=BATCH, neighbours=neighbours),
    "all_reduce_count": 2,
    "all_reduce_bytes": collectives.all_reduce_bytes(parameters) + collectives.all_reduce_bytes(BATCH * DIMS[-1]),
}
plots.comparison_table(local, predicted, yours=mine)

# %% tags=["claim"]
claim("to the byte", all(local.value(name) == expected for name, expected in predicted.items()))

# %%
halos_sent, reduced = local.value("send_bytes"), local.value("all_reduce_bytes")
on_wire = collectives.collective_wire_bytes("all_reduce", int(reduced), RANKS)
print(f"halos: {halos_sent:,.0f} bytes handed over, and as many on the wire")
print(f"all-reduces: {reduced:,.0f} bytes handed over, {on_wire:,.0f} on the wire in a ring of {RANKS}")

# %% [markdown]
# *Real ranks trained, and one of their steps was traced. What they handed over is what the formulas say, to the byte.*
#
# If your `send_bytes` are half of what was measured, you forgot the backward pass or the second neighbour.
#
# ### Sum or average?
#
# A weight's gradient is `Partial()`: each rank's part comes from its own columns, and the whole is the **sum**. Yet
# where ranks take different samples (*data parallelism*), gradients are **averaged**. Which is right here?
#
# It depends on what each rank calls the loss. Suppose each rank's backward pass starts from the one true loss. Then the parts
# add up: sum. That is what the script of section 2 does, and there the head is left out: every rank has computed *all* of
# the head's gradient, since after the mean all hold the same features.
#
# labkit wants one rule for all weights, and the same rule as for samples: average over all ranks. So labkit's mean over
# the image multiplies the gradient that it passes back to the strip by the number of ranks that share the image. The
# average divides by it again, and the head's gradient, equal on all ranks, is its own average. Whoever forgets this
# factor gets gradients that are too small by that factor in all layers before the mean, and no error says so. Adam even
# hides it: it divides a gradient by its own size.
#
# ### Why the mean needs no all-reduce in its backward pass
#
# The forward pass adds up: each rank's features depend on all strips. In the backward pass, the derivative of a sum
# with respect to each summand is 1. Every rank already holds the gradient of the sum, since every rank has computed the
# same loss from the same features. So each passes it on to its own strip, and nobody needs to ask. That is why the
# table says two all-reduces and not three.

# %% [markdown]
# ## 6. Build it: the halo exchange (core, 25 minutes)
#
# This is the heart of the lab. You write the exchange, its way back, and the `torch.autograd.Function` that makes one
# operation of both. Then your code trains the ConvNeXt.
#
# `dist.isend(tensor, dst)` starts to send a tensor to a rank, `dist.irecv(tensor, src)` starts to receive one into a
# tensor of the right size. Both return at once, with a handle whose `wait()` returns when it is done. Start everything
# first and wait afterwards: if every rank first waited for its own send, all might wait forever. For gloo this order is
# enough. NCCL runs the messages between two ranks in the order in which they were queued: there, hand all of them
# together to `dist.batch_isend_irecv`, as labkit does.
#
# Your functions travel to the ranks with all that they use of other cells.
#
# ### Exercise 1.4: pad a strip with its neighbours' columns (•••, 10 minutes)
#
# Return the strip [N, C, H, W] with `halo` more columns on each side. At the border of the image these are zeros. A tensor
# that is sent must be contiguous.
#
# <details><summary>Hint 1</summary>
#
# Which columns does the left neighbour miss? Your first ones. Which do you miss on the left? Its last ones.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Make two tensors of zeros of a halo's shape, `from_left` and `from_right`. Receive into them where there is a neighbour. At
# the border they stay zero.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `if rank > 0: handles += [dist.isend(to_left, rank - 1), dist.irecv(from_left, rank - 1)]`, the same for the right side,
# then wait for all handles, then `torch.cat` along the last dimension.
#
# </details>


# %%
def exchange_halo(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    to_left, to_right = strip[..., :halo].contiguous(), strip[..., -halo:].contiguous()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    handles = []
    if rank > 0:
        handles += [dist.isend(to_left, rank - 1), dist.irecv(from_left, rank - 1)]
    if rank < ranks - 1:
        handles += [dist.isend(to_right, rank + 1), dist.irecv(from_right, rank + 1)]
    for handle in handles:
        handle.wait()
    return torch.cat([from_left, strip, from_right], dim=-1)
    ### END SOLUTION


# %%
forward_verdict = checks.halo_exchange(exchange_halo)
forward_verdict

# %% [markdown]
# ### Exercise 1.5: send the gradients home (••, 7 minutes)
#
# In the backward pass you get the gradient of the padded strip. Its outer columns belong to your neighbours: they are
# copies of the neighbours' pixels. Send them back, receive what your neighbours send you, and add that to the gradient
# of your own outer columns. At the border of the image the outer columns were zeros that nobody owns.
#
# Return the gradient of the strip, `2 * halo` columns narrower than what you got.
#
# <details><summary>Hint 1</summary>
#
# A pixel near the cut was used twice: by its own rank, and by the neighbour as part of the halo. Its gradient is the sum of
# both uses.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The messages are those of exercise 1.4. What is sent are the outer `halo` columns of `grad`, what arrives is added with `+=` to
# the outer columns of `grad[..., halo:-halo].clone()`.
#
# </details>


# %%
def return_gradients(grad: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    own = grad[..., halo:-halo].clone()
    to_left, to_right = grad[..., :halo].contiguous(), grad[..., -halo:].contiguous()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    handles = []
    if rank > 0:
        handles += [dist.isend(to_left, rank - 1), dist.irecv(from_left, rank - 1)]
    if rank < ranks - 1:
        handles += [dist.isend(to_right, rank + 1), dist.irecv(from_right, rank + 1)]
    for handle in handles:
        handle.wait()
    own[..., :halo] += from_left
    own[..., -halo:] += from_right
    return own
    ### END SOLUTION


# %%
backward_verdict = checks.halo_gradient(return_gradients)
backward_verdict

# %% [markdown]
# ### Exercise 1.6: one operation of both (••, 6 minutes)
#
# Autograd knows nothing of messages. A `torch.autograd.Function` tells it: `forward` computes, `backward` gets the
# gradient of what `forward` returned and gives one value for each argument of `forward` after `ctx`, `None` for what
# has no gradient. Both are static, and share a context `ctx`, on which `forward` may leave what `backward` needs.
#
# Write the class. It is called as `HaloExchange.apply(strip, halo, rank, ranks)`; `ctx` comes by itself, as first argument.
# Use your two functions.
#
# <details><summary>Hint 1</summary>
#
# `forward(ctx, strip, halo, rank, ranks)` leaves `halo`, `rank` and `ranks` on `ctx` and returns the padded strip.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `backward(ctx, grad)` returns four values, of which three are `None`.
#
# </details>


# %%
class HaloExchange(torch.autograd.Function):
    ### BEGIN SOLUTION
    @staticmethod
    def forward(ctx, strip, halo, rank, ranks):
        ctx.place = halo, rank, ranks
        return exchange_halo(strip, halo, rank, ranks)

    @staticmethod
    def backward(ctx, grad):
        return return_gradients(grad, *ctx.place), None, None, None

    ### END SOLUTION


# %%
function_verdict = checks.halo_function(HaloExchange)
function_verdict

# %% [markdown]
# ### Train with it
#
# The program calls a function `padded_strip` before each depthwise convolution, and lets a notebook replace it. Yours goes in
# if it is right. If you have not written it, labkit's own runs in its place, and the cell says so.
#
# `labkit.check` gives the cut network and one device the same weights and the same images, takes three steps, and
# compares the last outputs, all 28 gradients and all 28 weights: 57 tensors. It wants them equal to 1 part in
# 100,000.


# %%
def padded_strip(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    return HaloExchange.apply(strip, halo, rank, ranks)


all_right = forward_verdict.ok and backward_verdict.ok and function_verdict.ok
your_way = {"strategy": "yours", "use": {"padded_strip": padded_strip}} if all_right else {"strategy": "yours"}
print("your HaloExchange" if all_right else "labkit's own, until 1.4 to 1.6 pass")
PARITY = {"nproc": RANKS, "width": WIDTH}
print(labkit.check("convnext_spatial", **PARITY, **your_way).verdict_text)

# %%
yours_run = labkit.run("convnext_spatial", nproc=RANKS, **your_way, **SETUP)
plots.comparison_table(yours_run, {name: predicted[name] for name in ("send_count", "send_bytes")})

# %% tags=["claim"]
apart = (yours_run.losses - local.losses).abs() / local.losses
claim("the same loss as labkit's own exchange at every step, to 1 part in 10,000", apart.max() < 1e-4)

# %% [markdown]
# *A ConvNeXt trained with this exchange on real ranks. At every step its loss is that of labkit's own exchange, to better
# than 1 part in 10,000, and it sends as many bytes.*
#
# Compare with `labkit/parallel/halo.py`. It does the same for height or width and on any axis of a mesh. In the backward
# pass it computes the weight's gradient while the gradients of the halos travel.
#
# **In your own network.** Set `conv.padding = (conv.padding[0], 0)`, call `conv(HaloExchange.apply(x, 3, rank, ranks))`,
# and take the mean over the image as in section 2. After `backward()`, all-reduce the gradients of everything before
# the mean. Leave the head's alone: each rank has all of it. Do not wrap it in DDP, which averages: everything before
# the mean would get gradients too small by the number of ranks.
#
# Dropout between the mean and the head, and drop path in the blocks, must draw the same random numbers on all ranks.
# Dropout inside a strip must draw different ones. Whatever else looks across pixels, such as pooling that overlaps or
# the statistics of a batch norm, needs a treatment of its own. On GPUs, collect the messages and start them together:
#
# ```python
# messages = []
# if rank > 0:
#     messages += [dist.P2POp(dist.isend, to_left, rank - 1), dist.P2POp(dist.irecv, from_left, rank - 1)]
# if rank < ranks - 1:
#     messages += [dist.P2POp(dist.isend, to_right, rank + 1), dist.P2POp(dist.irecv, from_right, rank + 1)]
# for handle in dist.batch_isend_irecv(messages) if messages else []:
#     handle.wait()
# ```

# %% [markdown]
# ## 7. Break it (core, 10 minutes)
#
# A sharded program that exchanges the wrong columns still runs. Below are two deliberate mistakes (*mutations*) in the
# exchange: the halos swapped, and no gradient sent home. Before you run them: in how many of the two does the loss fall
# all the same? In how many does the parity check fail?

# %% tags=["commit"]
mine = commit(
    loss_falls=None,  # of 2
    parity_fails=None,  # of 2
)
### BEGIN SOLUTION
mine = commit(loss_falls=2, parity_fails=2)
### END SOLUTION


# %%
def swapped(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    """The columns that came from the left are put on the right, and the other way round."""
    padded = pad_with_halo(strip, halo, Strip(3, None, rank, ranks))  # labkit's own; yours will do as well
    return torch.cat([padded[..., -halo:], strip, padded[..., :halo]], dim=-1)


def forgotten(grad: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    """No gradient goes home."""
    return grad[..., halo:-halo].contiguous()


mutations = {"swapped": {"exchange_halo": swapped}, "forgotten": {"return_gradients": forgotten}}
broken = {
    name: labkit.run("convnext_spatial", nproc=RANKS, strategy="yours", use=use, **SETUP)
    for name, use in mutations.items()
}
checked = {
    name: labkit.check("convnext_spatial", **PARITY, strategy="yours", use=use) for name, use in mutations.items()
}
print("\n".join(f"{name}: {each.verdict_text}" for name, each in checked.items()))
seen = {
    "loss_falls": sum(each.losses.iloc[-1] < each.losses.iloc[0] for each in broken.values()),
    "parity_fails": sum(not each.ok for each in checked.values()),
}
pandas.DataFrame({"yours": mine, "measured": seen}).astype(object).fillna("–")

# %%
_, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
plots.loss_curves({f"right, {RANKS} ranks": local, **broken}, chance=math.log(10), ax=left)
_ = plots.loss_difference_curves({"section 6": yours_run, **broken}, local, name="the right run", ax=right)

# %% tags=["claim"]
for name, each in broken.items():
    claim(f"the loss of {name} falls", each.losses.iloc[-1] < each.losses.iloc[0], where=TOLD)
    far = ((each.losses - local.losses).abs() / local.losses).max()
    claim(f"{name} is further from the right loss than rounding", far > 100 * max(apart.max(), 1e-7), where=TOLD)
    claim(f"{name} stays within half of the right loss", far < 0.5, where=TOLD)

# %% [markdown]
# *Left: the loss falls with both mutations. The network learns around the mistake, and each loss differs from the right
# one by less than half of it; `forgotten` lies almost on it. Grey: the loss of guessing one of ten regions, ln 10.*
#
# *Right: how far each loss is from the right run's. The exchange of section 6 differs by rounding, each mutation by
# more than a hundred times that. (Small print: step 0 follows one step of warm-up, so its weights have felt a wrong
# gradient already. The last step is the traced one. Differences below 10⁻⁹, zero too, are drawn at 10⁻⁹.)*
#
# The curve alone says little. The comparison with one device catches both.
#
# ### Exercise 1.7: a test that cannot fail (••, 5 minutes)
#
# Somebody tests an exchange with an image of ones: each padded strip must be ones, with zeros at the border of the image.
# Show that this test is worthless. Write an "exchange" that **sends nothing** and passes it.
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
# And the parity check? It starts from random weights and different images.

# %%
nothing_sent = sends_nothing if fooled_verdict.ok else swapped  # until you have written it
fooled = labkit.check("convnext_spatial", **PARITY, strategy="yours", use={"exchange_halo": nothing_sent})
print(fooled.verdict_text)

# %% [markdown]
# ### A silent error in the wild (optional, 8 minutes)
#
# PyTorch's DTensor has a convolution of its own. Here it is on two ranks: one 7 × 7 convolution, an image cut along the
# width. The right result is known, since each rank has computed the whole one first.

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

# %% tags=["claim"]
wrong = [rank.reported["wrong"] for rank in silent.ranks]  # noqa: F821 (the cell above gave it this name)
if requirements.torch_version() >= (2, 12):
    claim("the three columns at the cut are wrong", wrong == [[5, 6, 7], [0, 1, 2]])
else:
    claim("on 2.11 the outputs are right", wrong == [[], []])

# %% [markdown]
# No error, no warning, and the three columns at the cut are wrong (measured on torch 2.12 and 2.13; of the same cause
# as pytorch/pytorch#191926, whose fix covers convolutions with windows that do not overlap). No halo was exchanged: the
# convolution took zeros. The label is wrong as well. The result is called replicated, though each rank holds a
# different strip.
#
# On 2.11 the outputs are right, and the gradients are not: what comes back through a padded convolution to its input is
# lost. So labkit refuses the strategy `native`, which uses this convolution.

# %% tags=["nbval-ignore-output"]
try:
    labkit.run("convnext_spatial", nproc=RANKS, strategy="native")
except labkit.ParameterError as error:
    print(error)

# %% [markdown]
# Would a whole training run be silent, too? No: the wrong label makes a later operation stop, with an error that names
# another cause. The following run is therefore **staged**. `native_unguarded` puts the right label back on the input
# and the output of every convolution, so that training goes on with the wrong numbers.
#
# For the same reason the batch is one larger than the number of ranks. If the ranks could share it evenly, DTensor,
# misled by the label, would cut the batch, and a later operation would stop. The one convolution above is silent by
# itself; the training below is silent because we made it so.

# %%
odd_batch = SETUP | {"batch": RANKS + 1, "steps": 5}
native = labkit.run("convnext_spatial", nproc=RANKS, strategy="native_unguarded", **odd_batch)
beside = labkit.run("convnext_spatial", nproc=1, strategy="plain", **odd_batch)
_ = plots.loss_curves({"one device": beside, f"staged: native_unguarded, {RANKS} ranks": native}, chance=math.log(10))

# %% tags=["claim"]
gap = (native.losses - beside.losses).abs() / beside.losses
claim("the staged run's loss differs from one device's by more than 1 % somewhere", gap.max() > 0.01, where=TOLD)
claim("both begin above guessing", min(native.losses.iloc[0], beside.losses.iloc[0]) > math.log(10), where=TOLD)
claim(
    "the staged loss falls, and stays higher",
    beside.losses.iloc[-1] < native.losses.iloc[-1] < native.losses.iloc[0],
    where=TOLD,
)

# %%
print(labkit.check("convnext_spatial", nproc=2, strategy="native_unguarded", batch=3).verdict_text)

# %% [markdown]
# *Both trainings see the same images and start from the same weights, and both begin above guessing; not at the same
# loss, since the forward pass is wrong from the start. The staged one is another training: its loss falls, but more
# slowly. Without the curve beside it, who would know?*
#
# Now give this broken network the test with ones: all **weights** are 1, all biases 0. Then all channels of a feature
# map are equal. The stem's norm subtracts their mean, and what is left is zero, from there to the end. So the logits
# are zero, and the loss is ln(10), whatever the convolution did.

# %%
ones = SETUP | {"init": "ones", "steps": 1, "batch": 3}
trap = labkit.run("convnext_spatial", nproc=2, strategy="native_unguarded", **ones)
first = trap.frame.query("kind == 'scalar' and name == 'loss'")["value"].iloc[0]
print(f"the broken run's first loss is {first:.4f}, one device's is ln(10) = {math.log(10):.4f}")

# %% [markdown]
# The broken convolution passes. A test of sharding needs weights that differ, in every channel, and it must compare gradients
# as well. After you write a test, break the code once and watch it fail.

# %% [markdown]
# ## 8. Memory per rank (core, 8 minutes)
#
# Activations dominate here, and they are what cutting divides. Parameters, gradients and the optimizer's state stay whole
# on every rank.
#
# ### Exercise 1.8: what does one block keep? (••, 5 minutes)
#
# Between forward and backward pass, PyTorch keeps what the backward pass will need. A convolution, a linear layer, a norm and GELU
# need their **input**. The layer scale needs its input, too. An addition needs nothing. Go through the block in the
# sketch of section 3. How many bytes does it keep, at 4 bytes a number? Leave out weights, halos, and the norm's few numbers a
# pixel.
#
# <details><summary>Hint 1</summary>
#
# Call one feature map A: batch × channels × height × width numbers. Each of the six operations in the block keeps one input.
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
# What will a rank keep at its peak if two ranks share the images? Add up your function over the two blocks, on half the
# width. The halos, and the layers outside the blocks, come on top: add your estimate, or leave them out and see how
# much they are.

# %% tags=["commit"]
mine = commit(peak_activation_bytes=None)  # of one of two ranks; for a formula: lambda: activation_bytes(...) + ...
### BEGIN SOLUTION
mine = commit(
    peak_activation_bytes=lambda: sum(
        activation_bytes(BATCH, stage.channels, stage.height, stage.width // 2) for stage in stages
    )
)
### END SOLUTION

# %%
runs = {"plain, 1 rank": labkit.run("convnext_spatial", nproc=1, strategy="plain", **SETUP)}
cells = [(strategy, ranks) for strategy in ("local", "dtensor") for ranks in dict.fromkeys((2, RANKS))]
for strategy, ranks in cells:
    known = strategy == "local" and ranks == RANKS
    result = local if known else labkit.run("convnext_spatial", nproc=ranks, strategy=strategy, **SETUP)
    runs[f"{strategy}, {ranks} ranks"] = result
expected = {
    name: spatial.convnext_activation_bytes(
        stages=spatial.convnext_stages(HEIGHT, WIDTH // run.world_size, DEPTHS, DIMS), batch=BATCH, ranks=run.world_size
    )
    for name, run in runs.items()
}
halved = runs["local, 2 ranks"]

# %% tags=["nbval-ignore-output"]
plots.comparison_table(halved, {"peak_activation_bytes": expected["local, 2 ranks"]}, yours=mine, tolerance=0.05)

# %% [markdown]
# The blocks are most of it. The image counts as data, not as an activation. The rest: the input of the stem's norm, the
# inputs of the downsampling's norm and convolution, the halos, and the norms' few numbers a pixel; the last layer
# scale's input is already gone at the peak. Theory counts all of these. The measurement is PyTorch's `MemTracker`, in a
# step of its own: it follows every tensor that the step makes.

# %%
_ = plots.memory_by_category({name.replace(", ", "\n"): run for name, run in runs.items()},
                 predicted={name.replace(", ", "\n"): size for name, size in expected.items()})  # fmt: skip

# %% tags=["claim"]
activations = {name: run.value("peak_activation_bytes") for name, run in runs.items()}
most = f"local, {RANKS} ranks"
claim(
    "the activations shrink with the number of ranks",
    activations["plain, 1 rank"] > activations["local, 2 ranks"] >= activations[most],
)
fair = activations["plain, 1 rank"] / RANKS
claim("the halos keep them above a fair share, by less than a fifth", fair < activations[most] < 1.2 * fair, where=TOLD)
same = activations["dtensor, 2 ranks"] == activations["local, 2 ranks"]
claim("as DTensors the activations take the same bytes", same, where=TOLD)
claim(
    "dtensor's peak is higher than local's",
    runs["dtensor, 2 ranks"].value("peak_total_bytes") > halved.value("peak_total_bytes"),
    where=TOLD,
)

# %% [markdown]
# *Peak memory of a rank. Dashed: the activations as predicted. They shrink with the number of ranks; the halos keep them a
# little above a fair share. Stored as DTensors (next section) they take the same bytes, but the peak is higher.*
#
# **Temporary** is what the backward pass holds for a moment: gradients of activations, on their way from one layer to the one
# before. Gradients of weights are hardly there at the peak, since the peak is at the beginning of the backward pass.

# %% [markdown]
# ## 9. What DTensor costs (optional, 10 minutes)
#
# labkit can cut activations in two ways that are right.
#
# - `dtensor`: every tensor is a DTensor, and labkit exchanges the halo. PyTorch knows the placement of each tensor.
# - `local`: only the input is a DTensor. Inside are plain tensors, and the gradients are reduced in one bucket.
#
# Here they are beside plain training on one device, which has all the cores that the ranks share.

# %%
_ = plots.latency_bars(runs)

# %% tags=["claim"]
for ranks in dict.fromkeys((2, RANKS)):
    slower = runs[f"dtensor, {ranks} ranks"].value("backward_ms") > runs[f"local, {ranks} ranks"].value("backward_ms")
    claim(f"at {ranks} ranks dtensor's backward pass takes longer than local's", slower, where=STEPS >= 10)
reduces = {name: int(run.value("all_reduce_count")) for name, run in runs.items() if run.world_size > 1}
claim(
    "dtensor makes more than ten times as many all-reduces",
    reduces["dtensor, 2 ranks"] > 10 * reduces["local, 2 ranks"],
)
reduces

# %% [markdown]
# *Time of a step; below it, the number of all-reduces. With more ranks than cores the bars show the mechanism, not the
# speed that GPUs would have. Two ranks on two cores have a core each. A bar many times as long as its neighbours is a
# disturbed run: other programs held the cores. Then run it again before you compare.*
#
# At both numbers of ranks the backward pass of `dtensor` takes longer. `dtensor` reduces the gradients one by one: 26
# weights before the mean, and the mean itself, make 27. Each time all ranks wait for the last. `local` puts all
# gradients into one bucket and waits for them once.
#
# The second cost is **dispatch**. For each operation, PyTorch looks at the placements of the inputs, decides how the
# output is placed, runs the operation on the local tensors and wraps the result. Once decided, a placement comes from a
# cache, and in recent versions much of that happens in C++. How much is left? We measure one addition of four numbers.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name dispatch
import time

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from labkit.rank import report

mesh = init_device_mesh("cpu", (2,))
plain = torch.ones(4)
distributed = DTensor.from_local(plain, mesh, [Shard(0)])


def microseconds(x, rounds=10, times=100):
    """The fastest of several rounds: what else runs on this machine can only add to one."""
    seconds = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        for _ in range(times):
            x + x
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / times * 1e6  # the first round fills the cache


report(plain_us=microseconds(plain), dtensor_us=microseconds(distributed))

# %% tags=["nbval-ignore-output"]
costs = dispatch.ranks[0].reported  # noqa: F821 (the cell above gave it this name)
print(f"one addition: plain tensor {costs['plain_us']:.1f} µs, DTensor {costs['dtensor_us']:.1f} µs")

# %% tags=["claim"]
claim("the same addition costs more than three times as much on a DTensor", costs["dtensor_us"] > 3 * costs["plain_us"])

# %% [markdown]
# *The same addition costs several times as much on a DTensor.* A training step has hundreds of operations. Hundreds of
# such differences make some milliseconds, a part of the gap in the figure. The waiting in 27 all-reduces, and
# operations whose dispatch costs more than an addition's, come on top; we did not measure them apart. On large tensors
# dispatch disappears behind the arithmetic. `torch.compile` can remove most of it, since it decides placements while
# compiling.
#
# And is it the same training?

# %%
_ = plots.loss_difference_curves({name: run for name, run in runs.items() if run.world_size > 1}, runs["plain, 1 rank"])

# %% tags=["claim"]
reference = runs["plain, 1 rank"].losses
worst = max(((run.losses - reference).abs() / reference).max() for run in runs.values())
claim("every loss equals one device's to 1 part in 10,000, at every step", worst < 1e-4)

# %% [markdown]
# *How far each loss is from one device's. All stay below 1 part in 10,000 at every step. What is left is rounding:
# ranks add numbers in another order. The two runs with 2 ranks may coincide; differences below 10⁻⁹ are drawn at 10⁻⁹.*

# %% [markdown]
# ## 10. When does it pay? (core, 10 minutes)
#
# For memory the answer is easy: when one image does not fit. For time there is an inequality. Let a step take T on one device.
# With n ranks the arithmetic takes T / n. Then come the messages. A message of b bytes takes α + β · b (lab 0): a latency α,
# and β for each byte. Suppose that nothing hides behind arithmetic. Strips win time if
#
# > messages · (α + β · bytes)  <  T · (1 − 1 / n)
#
# ### Exercise 1.9: the time of a step (•, 3 minutes)
#
# Write T / n plus the left side as one function: seconds of a step with `ranks` ranks, of which each waits for
# `messages` messages of `message_bytes` bytes, one after another.
#
# <details><summary>Hint 1</summary>
#
# Arithmetic and messages add up. Every message pays its own latency.
#
# </details>


# %%
def strip_step_s(
    plain_s: float, ranks: int, messages: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    ### BEGIN SOLUTION
    return plain_s / ranks + messages * (alpha_s + message_bytes * beta_s_per_byte)
    ### END SOLUTION


# %%
time_verdict = checks.strip_step_s(strip_step_s)
time_verdict

# %% [markdown]
# Now this machine's α and β. Two ranks exchange tensors of several sizes, as neighbours do.

# %%
# %%torchrun -n 2 --name pings
import time

import torch
import torch.distributed as dist

from labkit.rank import report

dist.init_process_group("gloo")
other, fastest = 1 - dist.get_rank(), {}
for size in (1024, 16384, 262144, 1048576):
    out, inbox, times = torch.zeros(size // 4), torch.zeros(size // 4), []
    for _ in range(30):
        start = time.perf_counter()
        for work in (dist.isend(out, other), dist.irecv(inbox, other)):
            work.wait()
        times.append(time.perf_counter() - start)
    fastest[size] = min(times)
report(fastest=fastest)

# %% tags=["nbval-ignore-output"]
here = collectives.fit_alpha_beta(pings.ranks[0].reported["fastest"])  # noqa: F821
print(f"alpha = {here.alpha_s * 1e6:.0f} µs, beta = {here.beta_s_per_byte * 1e12:.0f} µs a MB")

# %% [markdown]
# **An example.** In our network a rank waits for four exchanges in a step: two blocks, forward and backward. The
# gradients' bucket and the mean are two more messages. We take the arithmetic from the run with two ranks: its step
# minus its messages, times two.
#
# For GPUs we take data sheets, and some assumptions.
#
# - Arithmetic: an H200 promises 494 TFLOP/s in TF32; take 40 % of it, 200.
# - Messages: NVLink carries 450 GB/s in each direction. No sheet tells the latency; take 15 µs.
# - A training step costs about three times the forward pass. We count the 1 × 1 convolutions only, 16 · C² operations
#   a pixel and block: nearly all of the large network's, about three quarters of ours.
# - Left out: memory traffic (norm, GELU) and the launch of each kernel. For our small network they would take far
#   longer than its arithmetic.
# - Both neighbours' messages go at the same time, and count as one. An all-reduce pays one latency; a ring would pay
#   2 (n − 1).


# %%
def plain_step_s(stages: list, batch: int, operations_per_s: float) -> float:
    """Arithmetic of a training step on one device, in seconds."""
    a_pixel = sum(16 * stage.channels**2 * stage.height * stage.width * stage.depth for stage in stages)
    return 3 * batch * a_pixel / operations_per_s


def ladder(plain_s: float, stages: list, batch: int, bucket: int, line: collectives.AlphaBeta) -> dict:
    """For 1, 2, 4 and 8 ranks: seconds of arithmetic, seconds of messages."""
    exchanges = 2 * sum(stage.depth for stage in stages)
    halo = spatial.spatial_send_bytes(stages=stages, batch=batch, neighbours=1) / exchanges
    function = strip_step_s if time_verdict.ok else spatial.strip_step_s  # yours, once it is right
    step = partial(function, alpha_s=line.alpha_s, beta_s_per_byte=line.beta_s_per_byte)
    steps = {1: (plain_s, 0.0)}
    for ranks in (2, 4, 8):
        bucket_on_wire = collectives.collective_wire_bytes("all_reduce", bucket, ranks)
        steps[ranks] = plain_s / ranks, step(0, ranks, exchanges, halo) + step(0, ranks, 2, bucket_on_wire / 2)
    return steps


H200 = collectives.AlphaBeta(alpha_s=15e-6, beta_s_per_byte=1 / 450e9)
two = ladder(0, stages, BATCH, 4 * parameters, here)[2][1]
ours_here = ladder(2 * (runs["local, 2 ranks"].value("step_ms") / 1e3 - two), stages, BATCH, 4 * parameters, here)
ours_gpu = ladder(plain_step_s(stages, BATCH, 200e12), stages, BATCH, 4 * parameters, H200)
paper = spatial.convnext_stages(512, 1024, **LARGE)
paper_gpu = ladder(plain_step_s(paper, 7, 200e12), paper, 7, weights_bytes // 4, H200)
_ = plots.strip_step_times(
    {
        "these cores, one for each rank": ours_here,
        "H200s, our network": ours_gpu,
        "H200s, the large ConvNeXt": paper_gpu,
    }
)

# %% tags=["claim"]
claim("on H200s our network is fastest on one", min(ours_gpu, key=lambda ranks: sum(ours_gpu[ranks])) == 1, where=TOLD)
claim(
    "on H200s the large one gains at 2, 4 and 8",
    sum(paper_gpu[8]) < sum(paper_gpu[4]) < sum(paper_gpu[2]) < sum(paper_gpu[1]),
)
claim("with 8 ranks it is more than five times as fast as with one", sum(paper_gpu[1]) > 5 * sum(paper_gpu[8]))

# %% [markdown]
# *All bars are predicted. On the left they come from the run with two ranks, as if each rank had a core of its own. So,
# on an idle machine, one rank takes about twice as long as plain training with both cores, and with more ranks than
# cores section 9's bars are several times as long.*
#
# *On H200s our small network is fastest on one: all its arithmetic takes 3 µs, and six messages of 15 µs each take 90.
# The large ConvNeXt (preset `paper`), 7 images of 512 × 1024 pixels, gains with every doubling, and is more than five
# times as fast with 8.*
#
# **Your turn.** Make the images twice as wide, and keep two ranks. By what factor does the arithmetic grow, and by what
# do the bytes of a rank's halos? Commit to both; the run tells about the bytes.

# %% tags=["commit"]
mine = commit(
    arithmetic=None,  # a factor
    halos=None,  # a factor
)
### BEGIN SOLUTION
mine = commit(arithmetic=2, halos=1)
### END SOLUTION

# %%
wide = labkit.run("convnext_spatial", nproc=2, strategy="local", **SETUP | {"width": 2 * WIDTH, "steps": 3})
grown = wide.value("send_bytes") / runs["local, 2 ranks"].value("send_bytes")
wide_stages = spatial.convnext_stages(HEIGHT, 2 * WIDTH, DEPTHS, DIMS)
more = plain_step_s(wide_stages, 1, 1) / plain_step_s(stages, 1, 1)
pandas.DataFrame({"yours": mine, "right": {"arithmetic": more, "halos": grown}}).astype(object).fillna("–")

# %% tags=["claim"]
claim("twice the width doubles the arithmetic, and the halos stay", (more, grown) == (2, 1))

# %% [markdown]
# The halo lies along the cut, and the cut has the image's height. So the wider the strip, the better it pays: cut the
# longer side.
#
# **Do strips ever win time on this machine?** The figure of section 9 has two ranks beside plain training on *the same
# two cores*, and on an idle machine they are mostly about equal: PyTorch uses both cores for one process, too. Against
# one core the gain is real. `python -m benchmarks.spatial` pins plain training to one core. On a machine of two cores
# it found two ranks about 1.8 times as fast, on images of 256 × 512 pixels. GPUs are like that: no device helps another
# unless somebody cuts the work.

# %% [markdown]
# ## 11. Two axes: samples and strips (optional, 6 minutes)
#
# Ranks can form a mesh with two axes, as in exercise 1.2. A mesh of 2 × 2 cuts a batch into two halves, and each image
# into two strips. Each rank now has one neighbour, and half the samples. What does that do to the bytes that it sends?

# %% tags=["commit"]
mine = commit(
    send_count=None,
    send_bytes=None,
)
### BEGIN SOLUTION
mine = commit(
    send_count=1 * 2 * 2,
    send_bytes=lambda: 1 * 2 * sum(halo_bytes(stage.height, 7, stage.channels, BATCH // 2) for stage in stages),
)
### END SOLUTION

# %%
predicted_2d = {
    "send_count": 1 * 2 * sum(DEPTHS),
    "send_bytes": spatial.spatial_send_bytes(stages=stages, batch=BATCH // 2, neighbours=1),
}
mesh_run = labkit.run("convnext_spatial", nproc=4, strategy="local", mesh="2x2", **SETUP)
plots.comparison_table(mesh_run, predicted_2d, yours=mine)

# %% tags=["claim"]
if RANKS == 4:
    claim(
        "a middle rank of four sent four times as much", local.value("send_bytes") == 4 * mesh_run.value("send_bytes")
    )

# %% [markdown]
# *A middle rank in the line of four sent four times as much: twice the neighbours, twice the samples.*
#
# So in halos the data axis is the cheaper one, as long as there are samples to share. Cut the images when one sample no
# longer fits, or when the batch must stay small.
#
# ### Explore (optional, 5 minutes)
#
# All of it at once: the strips and their halos, the activations of a rank against a budget, the bytes handed over.
# Set the budget to 4 MB, and look for the smallest number of ranks within it. Then make the images wider, and see what
# grows and what stays. Go back to 1 × 2 and cut the height instead (four strips of 64 rows are too narrow): what does
# it do to the halos? *run it* trains one step on real ranks.
#
# Four ranks share 4 images, as 1 × 4 or as 2 × 2. Which keeps less, and which hands over less?
#
# <details><summary>Answer</summary>
#
# A rank keeps about the same: 2.81 and 2.76 MB, for a quarter of the pixels each. In all, 1 × 4 hands over less: 426 kB
# against 507 kB. The mesh of 2 × 2 hands over a quarter of the halos' bytes (49 kB, not 197), but twice as many to
# all-reduces: one of all gradients along each axis. On the wire of a ring it is the other way round, 541 kB against
# 507 kB: an all-reduce over 4 ranks sends 1.5 times its bytes, one over 2 ranks sends them once.
#
# </details>

# %%
widgets.SpatialExplorer()

# %% tags=["claim"]
spatial = widgets.SpatialExplorer()
strips, grid = (spatial.predict(**spatial.chosen | {"mesh": shape}) for shape in ((1, 4), (2, 2)))
claim("1 x 4 hands over 426 kB", round((strips["send_bytes"] + strips["all_reduce_bytes"]) / 1e3) == 426)
claim("2 x 2 hands over 507 kB", round((grid["send_bytes"] + grid["all_reduce_bytes"]) / 1e3) == 507)
claim("in a ring 1 x 4 sends 541 kB", round((strips["send_bytes"] + 1.5 * strips["all_reduce_bytes"]) / 1e3) == 541)
claim(
    "a rank keeps about the same", [round(each["peak_activation_bytes"] / 1e4) for each in (strips, grid)] == [281, 276]
)

# %% [markdown]
# ## 12. Leave with (core, 5 minutes)
#
# Theory beside measured, for what this lab claims.

# %% tags=["summary"]
rows = {
    f"activations, {name}": plots.comparison_table(run, {"peak_activation_bytes": expected[name]}, tolerance=0.05)
    for name, run in runs.items()
    if not name.startswith("dtensor")  # whose peak may come at another moment
}
rows[f"traffic, {RANKS} ranks"] = plots.comparison_table(local, predicted)
rows["traffic, 2 x 2 mesh"] = plots.comparison_table(mesh_run, predicted_2d)
summary = pandas.concat(rows)
peaks = summary["verdict"] != "equal"  # a peak moves by a few kilobytes with the moment at which a message arrives
columns = ["predicted", "measured"]
summary.loc[peaks, columns] = summary.loc[peaks, columns].map(lambda size: int(float(f"{size:.3g}")))
summary.loc[peaks, "ratio"] = summary.loc[peaks, "ratio"].round(2)
summary

# %% [markdown]
# **Test yourself.**
#
# 1. A 5 × 5 convolution with stride 1: how many columns does a rank get from each neighbour?
# <details><summary>Answer</summary>Two: (5 − 1) / 2. At the border of the image it pads zeros instead.</details>
#
# 2. Why does a rank *add* the gradients that arrive, and not overwrite its own with them?
# <details><summary>Answer</summary>The columns were used twice, by their owner and by the neighbour. The gradient of a value that is used
# twice is the sum over both uses.</details>
#
# 3. You double the ranks along `space`. What happens to a middle rank's halo bytes, to its activations, to the time of its arithmetic?
# <details><summary>Answer</summary>The halo bytes stay: the cut is as long as before. Activations and arithmetic are nearly halved. So messages
# weigh twice as much as before, beside arithmetic.</details>
#
# 4. A colleague's sharded network trains, and its loss falls. What do you ask for?
# <details><summary>Answer</summary>A comparison with one device after one step, from weights that differ: outputs, each gradient, each weight. And
# that this comparison was seen to fail once.</details>
#
# 5. Each rank backpropagates the same loss. For which weights must gradients be summed, for which not, if nobody scales anything?
# <details><summary>Answer</summary>Summed: all before the mean, since each rank has seen its own columns only. Not summed: the head's, which every
# rank computed whole.</details>
#
# **On GPUs** the same program is written to run unchanged, which has not been verified yet:
# `labkit.run("convnext_spatial", nproc=4, preset="paper")`. The bytes of tensors and of messages are those of this
# notebook's formulas. What the GPU reports as used is more: its allocator keeps freed memory in blocks, and cuDNN and
# NCCL take work space of their own.
#
# **Read on**
#
# - In labkit: `labkit/parallel/halo.py` (the exchange), then `labkit/parallel/spatial.py` (the strategies), `launch/convnext_spatial.py`
#   (the program of this lab).
# - Liu et al., *A ConvNet for the 2020s*, 2022: <https://arxiv.org/abs/2201.03545>
# - Dryden et al., *Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism*, 2019, which cuts
#   images as we do: <https://arxiv.org/abs/1903.06681>
# - PyTorch: DTensor and placements, <https://docs.pytorch.org/docs/stable/distributed.tensor.html>; point-to-point messages,
#   <https://docs.pytorch.org/docs/stable/distributed.html>; `autograd.Function`,
#   <https://docs.pytorch.org/docs/stable/notes/extending.html>
#
# **Try**: cut the height with `labkit.run("convnext_spatial", nproc=4, tensor_dim=2)`. The images are wider than high: what happens to the
# bytes?
# <details><summary>Answer</summary>This program's images are twice as wide as high, and now the cut is as long as they are wide: twice the bytes.</details>
#
# **Next**: here every rank held all weights. [Lab 2](02_fsdp_wrapping.ipynb) cuts the weights.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("spatial")
