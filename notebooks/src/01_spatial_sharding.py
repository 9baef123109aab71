# %% [markdown]
# # Lab 1. Sharding ConvNeXt's activations
#
# A convolutional network on large images runs out of memory because of its activations, not its weights. So we cut every
# image into vertical strips and give each rank one strip. All ranks hold all weights, and each holds a part of every
# feature map.
#
# In this lab you launch real ranks, on this machine. You predict what they send and what they keep, then measure it, and
# you check that together they compute what one device computes. You need to know PyTorch on one device. You need to know
# nothing of distributed training.
#
# A **rank** is one process of a run. The number of ranks is the **world size**. On a machine with enough GPUs each rank
# takes one; elsewhere ranks run on CPU cores and talk over the loopback interface. The program is the same.

# %% [markdown]
# ## What this machine can do
#
# The doctor looks at Python, PyTorch, cores, memory, GPUs and known problems of the installed PyTorch.

# %% tags=["nbval-ignore-output"]
import math

import pandas
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard

import labkit
from labkit import doctor, plots
from labkit.checks import spatial as checks
from labkit.config import require
from labkit.local_ranks import shards_by_rank
from labkit.models import photo
from labkit.theory import collectives, spatial

doctor.show()

# %% [markdown]
# The parameters of this notebook. The images and the network are small, so that each run takes seconds on two cores. Change
# them if you like: the next cell refuses values that cannot work. The text speaks of the values below.

# %% tags=["parameters"]
RANKS: int = 4  # ranks that share an image
STEPS: int = 10  # timed training steps in each run
BATCH: int = 6  # images in a step
HEIGHT: int = 64  # of an image, in pixels
WIDTH: int = 256  # of an image, in pixels

# %%
require("RANKS", RANKS, at_least=2, because="one rank has no neighbour")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
require("BATCH", BATCH, at_least=2, multiple_of=2, because="the mesh of 2 x 2 ranks cuts the batch into halves")
require("HEIGHT", HEIGHT, at_least=8, multiple_of=8, because="the two stages divide height and width by 8")
widths = "all strips must be equally wide, and 3 columns or more in the last stage, at an eighth of the width"
require("WIDTH", WIDTH, at_least=8 * 3 * RANKS, multiple_of=math.lcm(8 * 2, 8 * RANKS), because=widths)

DEPTHS, DIMS = (1, 1), (32, 64)  # blocks and channels in each stage
SETUP = {
    "data": "photo", "batch": BATCH, "height": HEIGHT, "width": WIDTH, "depths": DEPTHS, "dims": DIMS,
    "layer_scale_init_value": 1.0, "learning_rate": 1e-3, "steps": STEPS,
}  # fmt: skip

# %% [markdown]
# ## Placements: who holds what
#
# PyTorch describes a distributed tensor by a **mesh** of ranks and one **placement** for each axis of the mesh.
# `Shard(dim)` cuts the tensor along a dimension. `Replicate()` gives every rank the whole tensor. A `DTensor` is a local
# tensor together with this description.
#
# Nothing is launched here. PyTorch can play all ranks inside one process, so we can look at every shard at once.

# %%
matrix = torch.arange(16.0).reshape(4, 4)
held = {
    "mesh (4,): Shard(0)": shards_by_rank(matrix, (4,), [Shard(0)]),
    "mesh (4,): Shard(1)": shards_by_rank(matrix, (4,), [Shard(1)]),
    "mesh (2, 2): Shard(0), Shard(1)": shards_by_rank(matrix, (2, 2), [Shard(0), Shard(1)]),
    "mesh (2, 2): Shard(0), Replicate()": shards_by_rank(matrix, (2, 2), [Shard(0), Replicate()]),
}
row, square = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
grids = dict(zip(held, ([[0], [1], [2], [3]], row, square, square), strict=True))
_ = plots.shards(held, grids)

# %% [markdown]
# *What each rank holds of one 4 × 4 matrix. In the last panel ranks 0 and 1 hold the
# same rows: along that axis the matrix is replicated.*
#
# There is a third placement, `Partial()`. Each rank holds a tensor of full size, and the true tensor is their sum. A
# gradient that each rank computed from its own pixels is of that kind. An **all-reduce** adds the parts up and leaves the
# sum on every rank.
#
# We cut images `[N, C, H, W]` along the width: `Shard(3)`. The weights are replicated.

# %% [markdown]
# ## What a convolution needs from its neighbours
#
# ConvNeXt uses three kinds of convolution. A 1 × 1 convolution looks at one pixel at a time, so a strip is enough. A
# convolution whose stride equals its kernel looks at windows that do not overlap, so a strip is enough as long as no
# window crosses the cut.
#
# The 7 × 7 depthwise convolution is different. Near the edge of a strip it looks three columns over the cut. Those columns
# are the **halo**, and they live on the neighbouring rank.

# %%
_ = plots.halos(photo.photo()[60:360], ranks=RANKS, halo=12)

# %% [markdown]
# *Rank 1 holds one strip of the portrait of Grace Hopper. It needs a few columns from rank 0 and a few from rank 2. The
# halo is drawn wider than three pixels, so that you can see it.*
#
# ### Exercise 1: how wide is a strip?
#
# The stem divides the width by 4, each later stage divides it by 2 more, and the ranks share the rest. Complete the
# function. Stages count from 0.


# %%
def local_columns(width: int, ranks: int, stage: int) -> int:
    ### BEGIN SOLUTION
    return width // (4 * 2**stage) // ranks
    ### END SOLUTION


# %%
checks.local_columns(local_columns)

# %% [markdown]
# A strip must not be narrower than the halo, or a rank would need columns from beyond its neighbour. labkit refuses such a
# run before it launches anything, and says why.

# %%
try:
    labkit.run("convnext_spatial", nproc=RANKS, width=16 * RANKS)
except labkit.ParameterError as error:
    print(error)

# %% [markdown]
# ### Exercise 2: how many bytes cross a cut?
#
# Before one convolution with a k × k kernel, a rank sends a few columns to one neighbour: all rows, all channels, all
# samples, 4 bytes a number. How many bytes is that?


# %%
def halo_bytes(rows: int, kernel: int, channels: int, batch: int) -> int:
    ### BEGIN SOLUTION
    return rows * (kernel - 1) // 2 * channels * batch * 4
    ### END SOLUTION


# %%
checks.halo_bytes(halo_bytes)

# %% [markdown]
# Now predict a whole training step. Each block exchanges one halo in the forward pass, and the gradient of one in the
# backward pass. A rank in the middle has two neighbours.
#
# The ranks also need two kinds of all-reduce. The mean over the whole image adds up what the strips contribute, one number
# for each sample and channel of the last stage. The gradients of all weights are averaged, here in one flat bucket.

# %%
neighbours = min(RANKS - 1, 2)
stages = spatial.convnext_stages(HEIGHT, WIDTH, DEPTHS, DIMS)
parameters = spatial.convnext_parameters(DEPTHS, DIMS, num_classes=10)
predicted = {
    "send_bytes": spatial.spatial_send_bytes(stages=stages, batch=BATCH, neighbours=neighbours),
    "send_count": neighbours * 2 * sum(DEPTHS),
    "all_reduce_bytes": collectives.all_reduce_bytes(parameters) + collectives.all_reduce_bytes(BATCH * DIMS[-1]),
    "all_reduce_count": 2,
}
local = labkit.run("convnext_spatial", nproc=RANKS, strategy="local", **SETUP)
plots.table(local, predicted)

# %% [markdown]
# *Four real ranks trained, and one of their steps was traced. What they sent is what the formulas say, to the byte.*

# %% [markdown]
# ## Write the halo exchange
#
# This is the heart of the lab. Your function runs on four real ranks, and what it returns is compared with what one device
# holds.
#
# `dist.isend(tensor, dst)` starts to send a tensor to a rank, `dist.irecv(tensor, src)` starts to receive one into a tensor
# of the right size. Both return at once, with a handle whose `wait()` returns when it is done. Start everything first and
# wait afterwards. If every rank first waits for its own send, they may all wait forever.
#
# ### Exercise 3: pad a strip with its neighbours' columns
#
# Return the strip with `halo` more columns on each side. At the border of the image these are zeros. A tensor that is sent
# must be contiguous.


# %%
def exchange_halo(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    from_left, from_right = torch.zeros_like(strip[..., :halo]), torch.zeros_like(strip[..., :halo])
    from_left, from_right = from_left.contiguous(), from_right.contiguous()
    to_left, to_right = strip[..., :halo].contiguous(), strip[..., -halo:].contiguous()
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
checks.halo_exchange(exchange_halo)

# %% [markdown]
# ### Exercise 4: send the gradients home
#
# In the backward pass you get the gradient of the padded strip. Its outer columns belong to your neighbours: they used to
# be their pixels. Send them back, receive what your neighbours send you, and add that to the gradient of your own outer
# columns. At the border of the image the outer columns were zeros that nobody owns.
#
# Return the gradient of the strip, `2 * halo` columns narrower than what you got. With this, automatic differentiation
# gives on four ranks what it gives on one device.


# %%
def return_gradients(grad: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    own = grad[..., halo:-halo].clone()
    from_left, from_right = torch.zeros_like(own[..., :halo]), torch.zeros_like(own[..., :halo])
    from_left, from_right = from_left.contiguous(), from_right.contiguous()
    to_left, to_right = grad[..., :halo].contiguous(), grad[..., -halo:].contiguous()
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
checks.halo_gradient(return_gradients)

# %% [markdown]
# Compare with `labkit/parallel/halo.py`. It does the same for height or width and on any axis of a mesh, and it computes
# while the halos travel.

# %% [markdown]
# ## Three strategies, raced
#
# labkit can shard the activations in three ways.
#
# - `native`: every tensor is a DTensor, and PyTorch's own DTensor convolution exchanges the halo. It is refused on this
#   PyTorch; a later section shows why.
# - `dtensor`: every tensor is a DTensor, and labkit exchanges the halo.
# - `local`: only the input is a DTensor. Inside are plain tensors, and the gradients are reduced in one bucket.
#
# Beside them runs plain training on one device, with all the cores that the ranks share.

# %%
runs = {
    "plain, 1 rank": labkit.run("convnext_spatial", nproc=1, strategy="plain", **SETUP),
    "local, 2 ranks": labkit.run("convnext_spatial", nproc=2, strategy="local", **SETUP),
    f"local, {RANKS} ranks": local,
    f"dtensor, {RANKS} ranks": labkit.run("convnext_spatial", nproc=RANKS, strategy="dtensor", **SETUP),
}
_ = plots.latency(runs)

# %% [markdown]
# *Time of a step. With more ranks than cores the bars show the mechanism, not the speed that GPUs would have.*
#
# Look at the backward pass of `dtensor`. It reduces the gradient of each weight alone, and each time all ranks wait for the
# last. `local` puts all gradients into one bucket and waits once.
#
# `dtensor` pays a second time: every operation passes through Python. PyTorch looks at the placements of all inputs, decides
# how the output is placed, runs the operation on the local tensors and wraps the result. That costs tens of microseconds
# or more each time, and a training step has hundreds of operations. On large tensors it disappears behind the arithmetic.
# On these it does not.

# %%
for name in (f"local, {RANKS} ranks", f"dtensor, {RANKS} ranks"):
    reduced, sent = (runs[name].value(f"{what}_count") for what in ("all_reduce", "send"))
    print(f"{name}: {reduced:.0f} all-reduces a step, {sent:.0f} sends")

# %% [markdown]
# The images are tiles of the portrait, and the task is to say which of ten regions a tile comes from. The batch stays the
# same, so a falling loss means that the network learns these tiles by heart.

# %%
ax = plots.loss(runs, chance=math.log(10))

# %% [markdown]
# *All curves lie on each other. However the work is shared, it is the same training.*

# %% [markdown]
# ## Memory per rank
#
# Activations dominate here, and they are what sharding divides. Parameters, gradients and the optimizer's state stay whole
# on every rank.
#
# ### Exercise 5: what does one block keep?
#
# Call one feature map A: `batch × channels × height × width` numbers of 4 bytes. For its backward pass a block keeps the
# input of the 7 × 7 convolution (A), the input of the norm (A), the input of the first 1 × 1 convolution (A), the input of
# GELU (four times the channels), the input of the second 1 × 1 convolution (again four times), and the input of the layer
# scale (A). How many bytes is that for one block?


# %%
def activation_bytes(batch: int, channels: int, height: int, width: int) -> int:
    ### BEGIN SOLUTION
    return (1 + 1 + 1 + 4 + 4 + 1) * batch * channels * height * width * 4
    ### END SOLUTION


# %%
checks.activation_bytes(activation_bytes)

# %% [markdown]
# `spatial.convnext_activation_bytes` adds the halos and the layers between the stages. Here it is beside the measurement.
# The measurement is PyTorch's `MemTracker`, in a step of its own: it follows every tensor that the step makes.

# %%
by_ranks = {1: runs["plain, 1 rank"], 2: runs["local, 2 ranks"], RANKS: local}
expected = {
    ranks: spatial.convnext_activation_bytes(
        stages=spatial.convnext_stages(HEIGHT, WIDTH // ranks, DEPTHS, DIMS), batch=BATCH, ranks=ranks
    )
    for ranks in by_ranks
}
label = {ranks: f"{ranks} rank" + "s" * (ranks > 1) for ranks in by_ranks}
_ = plots.memory({label[n]: by_ranks[n] for n in by_ranks}, predicted={label[n]: expected[n] for n in expected})

# %% [markdown]
# *Peak memory of a rank. The green part shrinks with the number of ranks; the halos keep it a little above a fair share.*

# %% [markdown]
# ## Is it right? A check that can fail, and one that cannot
#
# A sharded program that exchanges the wrong columns still runs, and its loss may still fall. Only a comparison with one
# device tells. `check="parity"` gives both sides the same weights and the same images, does one step, and compares the
# outputs, every gradient and every updated weight.


# %%
def parity(ranks: int, **parameters: object) -> str:
    """What the parity check found, whether it holds or not."""
    try:
        result = labkit.run("convnext_spatial", nproc=ranks, check="parity", **parameters)
    except labkit.RankFailed as failure:  # the program ends with status 1 where parity does not hold
        result = labkit.load(failure.log.parent)
    verdict = "all equal, to 1 part in 100,000" if result.ok else "they differ"
    if result.value("max_rel_error") > 0.1:
        verdict += " by more than 10 %"
    return f"{result.value('compared'):.0f} tensors compared with one device: {verdict}"


parity(2, strategy="local")

# %% [markdown]
# ### The silent error
#
# Since 2.12, PyTorch's own DTensor convolution does not exchange halos when the image is cut, and gives no error
# (pytorch/pytorch#191926). On 2.11 the outputs are right and the gradients are not: what comes back through a padded
# convolution is lost. labkit refuses the strategy `native`.

# %%
try:
    labkit.run("convnext_spatial", nproc=RANKS, strategy="native")
except labkit.ParameterError as error:
    print(error)

# %% [markdown]
# Let us look at what it would do. The convolution itself gives no error, but it also labels its result wrongly, and a later
# operation may stop at that. `native_unguarded` mends the label, so that the training runs to the end. Nothing warns. The batch
# has one image more than there are ranks, beside it on one device as well: some batches that the ranks divide still stop with
# an error.

# %%
odd_batch = SETUP | {"batch": RANKS + 1, "steps": 5}
native = labkit.run("convnext_spatial", nproc=RANKS, strategy="native_unguarded", **odd_batch)
alone = labkit.run("convnext_spatial", nproc=1, strategy="plain", **odd_batch)
ax = plots.loss({"plain, 1 rank": alone, f"native_unguarded, {RANKS} ranks": native}, chance=math.log(10))

# %% [markdown]
# *The loss of the unguarded run falls too. Alone it would look like success. Beside one device it is plainly another
# training.*

# %%
parity(2, strategy="native_unguarded", batch=3)

# %% [markdown]
# ### The trap: a test that cannot fail
#
# The example that this lab grew from sets all weights to one. Then all channels of a feature map are equal. The channel
# norm subtracts their mean, and what is left is zero. So the logits are zero, and the loss is ln(10), whatever the
# convolution did.

# %%
trap = labkit.run(
    "convnext_spatial", nproc=2, strategy="native_unguarded", **SETUP | {"init": "ones", "steps": 1, "batch": 3}
)
first = trap.frame.query("kind == 'scalar' and name == 'loss'")["value"].iloc[0]
print(f"the broken run's first loss is {first:.4f}, one device's is ln(10) = {math.log(10):.4f}")

# %% [markdown]
# The broken convolution passes this test. A test of sharding needs weights that differ, in every channel, and it must
# compare gradients as well. After you write a test, break the code once and watch it fail.

# %% [markdown]
# ## Two axes: samples and strips
#
# Ranks can form a mesh with two axes. Along `data` the ranks take different samples, as in data-parallel training. Along
# `space` they share each image. A 2 × 2 mesh cuts a batch into two halves, and each image into two strips.
#
# Each rank now has one neighbour, and half the samples. Work out what that does to the bytes, then look.

# %%
predicted_2d = {
    "send_bytes": spatial.spatial_send_bytes(stages=stages, batch=BATCH // 2, neighbours=1),
    "send_count": 1 * 2 * sum(DEPTHS),
    "peak_activation_bytes": spatial.convnext_activation_bytes(
        stages=spatial.convnext_stages(HEIGHT, WIDTH // 2, DEPTHS, DIMS), batch=BATCH // 2, ranks=2
    ),
}
mesh_run = labkit.run("convnext_spatial", nproc=4, strategy="local", mesh="2x2", **SETUP)
plots.table(mesh_run, predicted_2d, tolerance=0.05)

# %% [markdown]
# *A middle rank in the line of four sent four times as much. The activations per rank are nearly the same.*
#
# So the data axis is the cheaper one, as long as there are samples to share. Cut the images when one sample no longer fits,
# or when the batch must stay small.

# %% [markdown]
# ## What to expect on GPUs
#
# The same program runs unchanged on a machine with a GPU for each rank: `labkit.run("convnext_spatial", nproc=4,
# preset="paper")`. The images are then 512 × 1024 pixels, and the last stage has 2048 channels.
#
# - Arithmetic gets much faster, and the halos hardly shrink in time: a small message costs its latency. A message of n
#   bytes takes about alpha + beta · n. For halos alpha dominates.
# - The dispatch of DTensor costs the same microseconds as here, so it weighs more against faster arithmetic.
# - Memory behaves exactly as here. It is a count of bytes, and does not depend on speed.
#
# Figures from named GPUs belong into the folder `results`, each with its hardware and versions. None is recorded there yet
# for this lab, so this notebook shows none.

# %% [markdown]
# ## Summary
#
# Predicted beside measured, for all that this lab claims.

# %% tags=["summary"]
rows = {
    f"activation bytes, {label[n]}": plots.table(by_ranks[n], {"peak_activation_bytes": expected[n]}, tolerance=0.05)
    for n in by_ranks
}
rows[f"traffic, {label[RANKS]}"] = plots.table(local, predicted)
rows["2 x 2 mesh"] = plots.table(mesh_run, predicted_2d, tolerance=0.05)
summary = pandas.concat(rows)
peaks = summary["verdict"] != "equal"  # a peak moves by a few kilobytes with the moment at which a message arrives
sizes = ["predicted", "measured"]
summary.loc[peaks, sizes] = summary.loc[peaks, sizes].map(lambda size: int(float(f"{size:.3g}")))
summary.loc[peaks, "ratio"] = summary.loc[peaks, "ratio"].round(2)
summary

# %% [markdown]
# ## Where to go from here
#
# - Run it with `--tensor-dim 2` and cut the height instead: `labkit.run("convnext_spatial", nproc=4, tensor_dim=2)`.
# - Read `labkit/parallel/halo.py` (the exchange), then `labkit/parallel/spatial.py` (the three strategies).
# - Make the images wider. At which width does `local` on two ranks overtake plain training on this machine?
