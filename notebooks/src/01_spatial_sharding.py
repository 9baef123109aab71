# %% [markdown]
# # Lab 1. Sharding ConvNeXt's activations
#
# A convolutional network on large images runs out of memory because of its activations, the tensors that are kept for
# the backward pass. In this lab every image is cut (*sharded*) into vertical strips, and each rank holds one strip of
# every feature map. After it you can
#
# - say which operations of a convolutional network need their neighbours' pixels, and how many bytes that is;
# - write the exchange of these pixels, forward and backward, and train a real network with it;
# - tell a right sharding from a wrong one that looks just as good;
# - say when cutting images pays, and what to try before.
#
# You need PyTorch on one device and lab 0, no GPU. The lab takes about {core_minutes} minutes, and its exercises are
# marked • (easy) or •• (harder).

# %% tags=["nbval-ignore-output"]
import math

import pandas
import torch
from matplotlib import pyplot
from torch import distributed as dist

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.models import photo
from labkit.theory import emulated_steps, sizes, spatial
from labkit_course import strips_cost
from labkit_course.checks import spatial as checks
from labkit_course.checks import spatial_mutations as mutations
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="1")

# %% [markdown]
# You may change these parameters. Each run takes seconds on two cores.

# %% tags=["parameters"] small={"STEPS": 2, "BATCH": 4, "HEIGHT": 48, "WIDTH": 128} points=[[2,1,2,8,48],[3,3,4,40,240],[8,12,8,96,256]]
RANKS: int = 4  # ranks that share an image
STEPS: int = 10  # timed training steps in each run
BATCH: int = 6  # images in a step
HEIGHT: int = 64  # of an image, in pixels
WIDTH: int = 256  # of an image, in pixels

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has no neighbour, and more than 8 take minutes")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
require("BATCH", BATCH, at_least=1, because="a step needs an image")
require("HEIGHT", HEIGHT, at_least=8, multiple_of=8, because="the two stages divide height and width by 8")
widths = "all strips must be equally wide, and 3 columns or more in the last stage, at an eighth of the width"
require("WIDTH", WIDTH, at_least=8 * 3 * RANKS, multiple_of=math.lcm(8 * 2, 8 * RANKS), because=widths)
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, STEPS, BATCH, HEIGHT, WIDTH) == (4, 10, 6, 64, 256)  # the values that the text speaks of
DEPTHS, DIMS = (1, 1), (32, 64)  # blocks and channels in each stage
IMAGES = {"data": "photo", "batch": BATCH, "height": HEIGHT, "width": WIDTH}
# ConvNeXt begins with layer scales of 1e-6, which would hide what a block gets wrong.
NETWORK = {"depths": DEPTHS, "dims": DIMS, "layer_scale_init_value": 1.0}
SETUP = IMAGES | NETWORK | {"learning_rate": 1e-3, "steps": STEPS}
stages = spatial.convnext_stages(HEIGHT, WIDTH, DEPTHS, DIMS)

# %% [markdown]
# ## 1. Why cut an image? ({minutes} minutes)

# %%
_ = plots.halo_diagram(photo.load_photo()[60:300], ranks=4, halo=12)

# %% [markdown]
# *One image on four ranks: rank 1 holds its strip, and needs a few columns of ranks 0 and 2, its **halo**. They travel
# before each convolution that looks over the cut.*
#
# The figure shows pixels, but columns of *features* travel: 3 in the first stage of ConvNeXt, which stand for these 12
# columns of the image, as its first layer makes one pixel of 4 × 4.
#
# A large ConvNeXt has stages of 3, 3, 27 and 3 blocks with 256 to 2048 channels. Here is what it keeps for **one**
# image in float32. *Checkpointing* keeps only each block's input, and computes the rest again in the backward pass.

# %%
LARGE = {"depths": (3, 3, 27, 3), "dims": (256, 512, 1024, 2048)}
weights_bytes = 16 * spatial.convnext_parameters(**LARGE, num_classes=1000)  # with gradients and Adam's two means
kept = {}
for size in (512, 2048, 4096, 16_384):
    large = spatial.convnext_stages(size, size, **LARGE)
    held = [spatial.convnext_activation_bytes(stages=large, batch=1), spatial.checkpointed_bytes(large, batch=1)]
    kept[f"{size:,} × {size:,}"] = [sizes.readable_bytes(each) for each in (*held, weights_bytes)]
columns = ["activations", "with checkpointing", "weights, gradients, Adam"]
pandas.DataFrame.from_dict(kept, orient="index", columns=columns)

# %% [markdown]
# At 4096 pixels a side the activations of a single image no longer fit an H200 with 141 GB. So checkpoint first. That brings 155 GB down to 15, most
# of it the one block that is being computed again. The price is one more forward pass.
#
# Cut the image where that is not enough: in float32 an image of 16,384 pixels a side does not fit even then, and bfloat16
# halves this. Or cut it to have one image sooner.

# %% tags=["claim"]
plain_gb, checkpointed_gb = (
    [held(spatial.convnext_stages(size, size, **LARGE), batch=1) / 1e9 for size in (4096, 16_384)]
    for held in (
        lambda stages, batch: spatial.convnext_activation_bytes(stages=stages, batch=batch),
        spatial.checkpointed_bytes,
    )
)
claim("155 GB do not fit 141, and 15 do", [round(plain_gb[0]), round(checkpointed_gb[0])] == [155, 15])
claim("an image of 16,384 pixels does not fit even so", checkpointed_gb[1] > 141)
block_gb = spatial.checkpointed_bytes(spatial.convnext_stages(4096, 4096, (1,), (256,)), batch=1) / 1e9
claim("most of it is one block", 0.8 < block_gb / checkpointed_gb[0] < 0.9)

# %% [markdown]
# Now train this lab's small network on two images of 512 × 1536 pixels, with at most 210 MiB for each
# rank. Strategy `plain` is one device. `local` cuts images into strips with labkit's exchange,
# and `yours`, in section 6, with your functions. **The first two runs are meant to fail.** Each then runs
# again without a limit.


# %%
def fits(ranks: int, **how) -> list:
    """Train under a memory cap, which on CPU needs Linux; return how it ended, and the tensors' peak in MiB."""
    how |= {"nproc": ranks, "batch": 2, "height": 512, "width": 1536, "steps": 1, "device": "cpu"}
    outcome = "trained"
    try:
        result = labkit.run("convnext_spatial", memory_cap_mib=210, **how)
    except labkit.RankFailed as failure:
        outcome = failure.exc_type
        result = labkit.run("convnext_spatial", **how)
    return [outcome, round(result.value("peak_total_bytes") / 2**20)]


outcomes = {
    "1 rank": fits(1, strategy="plain"),
    "1 rank, checkpointing": fits(1, strategy="plain", checkpointing=True),
    "4 ranks, strips": fits(4, strategy="local"),
    "4 ranks, strips, checkpointing": fits(4, strategy="local", checkpointing=True),
}
pandas.DataFrame.from_dict(outcomes, orient="index", columns=["with 210 MiB", "tensors at the peak, MiB"])

# %% [markdown]
# On one rank, tensors alone exceed the limit, even with checkpointing, which saves little in a network of two blocks
# (section 8). Those of a strip take little more than a third of it.

# %% tags=["claim"]
ended, peaks_mib = zip(*outcomes.values(), strict=True)
claim("only strips train", ended == ("MemoryCapExceeded", "MemoryCapExceeded", "trained", "trained"))
claim("on one rank the tensors alone are too large", min(peaks_mib[:2]) > 1.1 * 210)
claim("strips need little more than a third", max(peaks_mib[2:]) < 0.38 * 210)

# %% [markdown]
# *Takeaway: checkpoint first, and cut images where one image is still too large or too slow.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# Here are cut images in plain PyTorch, with one convolution instead of a network. A 7 × 7 convolution looks three
# columns over the cut, so each rank takes three more columns on each side of its strip.
#
# The features are means over the *whole* image. Strips are equally wide, so a rank's own mean, divided by the number of
# ranks, is its term of a sum. A `DTensor` with the placement `Partial()` stands for the sum of what the ranks hold, and
# `full_tensor()` adds it up.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

dist.init_process_group("gloo")  # gloo is for CPUs, nccl for GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))  # all ranks, in a line
torch.manual_seed(0)  # the same weights and the same images on every rank
images, labels = torch.randn(4, 3, 16, 64), torch.randint(10, (4,))
columns = 64 // ranks
padded = torch.nn.functional.pad(images, (3, 3))  # zeros at the left and right border
strip = padded[..., rank * columns : (rank + 1) * columns + 6]  # with three columns more on each side
conv, head = torch.nn.Conv2d(3, 8, 7, padding=(3, 0)), torch.nn.Linear(8, 10)  # pads the height alone

means = conv(strip).relu().mean(dim=(2, 3)) / ranks  # this rank's term of the mean over the image
features = DTensor.from_local(means, mesh, [Partial()]).full_tensor()  # the sum of all terms: the same on all ranks
loss = torch.nn.functional.cross_entropy(head(features), labels)
loss.backward()
print(f"loss {loss.item():.3f}")

# %% [markdown]
# - **Who cuts?** Each rank, for itself.
# - **Who holds the weights?** All ranks hold all of them. The seed makes them equal, and nothing is sent.
# - **What is sent?** One mean for each sample and channel. A second convolution would need three columns of its
#   neighbours' *features*, which no file holds. That message, the halo, is what you build in section 4.
# - **And the gradients?** They are not yet one device's, as section 5 will show.
#
# Try `-n 1` or `-n 4`: the loss stays the same.
#
# *Takeaway: all ranks hold all weights, and each holds a part of every feature map.*
#
# ## 3. What ConvNeXt does with a strip ({minutes} minutes)

# %%
_ = plots.convnext_diagram(stages, HEIGHT, WIDTH)

# %% [markdown]
# *The network of this lab, with the shape that leaves each part (channels × height × width), and below it the inside of
# a block. Colours say what an operation needs once the image is cut.*
#
# - 1 × 1 convolutions, norms over the channels, GELU and the **layer scale** (one learned factor a channel) look at one
#   pixel at a time. A strip is enough.
# - The stem and the downsampling have windows that do not overlap. A strip is enough if it holds whole windows.
# - The 7 × 7 **depthwise** convolution looks three columns over the cut, and only this one needs a halo. The mean over
#   the image needs a sum over all ranks.
#
# ### Exercise 1: strips without messages? (•, {minutes} minutes)
#
# Section 2's script sends no halo: each rank reads three more columns of the image on each side. Could ConvNeXt do so,
# too? Return how many more columns of the **image** a rank in the middle needs on each side, so that its strip is right
# after the last block. `depths` holds the blocks of each stage, each with one kernel × kernel convolution, kernel odd.
# A stage begins by dividing the width, the first one by four, every other by two.
#
# <details><summary>Hint 1</summary>
#
# If a block's input ends at some column, how many columns of its output are wrong there? And after a second block?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A column in the first stage stands for four of the image. And one in the second stage?
#
# </details>


# %%
def extra_columns(depths: list[int], kernel: int) -> int:
    ### BEGIN SOLUTION
    return sum(blocks * (kernel // 2) * 4 * 2**stage for stage, blocks in enumerate(depths))
    ### END SOLUTION


# %%
checks.extra_columns(extra_columns)

# %% [markdown]
# Section 1's network would need 1,692 on each side of a strip that has 512 itself, where eight ranks share 4096.
#
# *Takeaway: every block widens what a pixel sees, so ranks exchange a halo before each block.*
#
# ## 4. Build it: the halo exchange ({minutes} minutes)
#
# As in lab 0, start all messages in one batch and wait afterwards: `dist.P2POp(dist.isend, tensor, rank)` and
# `dist.P2POp(dist.irecv, tensor, rank)` describe messages, `dist.batch_isend_irecv(list)` starts them and returns handles, and
# each handle has a `wait()`. What is sent must be contiguous.
#
# ### Exercise 2: pad a strip with its neighbours' columns (••, {minutes} minutes)
#
# Return the strip [N, C, H, W] with `halo` more columns on each side. At the border of the image these are zeros.
#
# <details><summary>Hint 1</summary>
#
# Which columns does the left neighbour miss? Your first ones. Which do you miss on the left? Its last ones.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Make two tensors of zeros of a halo's shape, `from_left` and `from_right`. Receive into them where there is a
# neighbour. At the border they stay zero.
#
# </details>
# <details><summary>Hint 3</summary>
#
# There are two messages with each neighbour, one in each direction, and a list of both sides' messages starts at once.
#
# </details>


# %%
def exchange_halo(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    to_left, to_right = strip[..., :halo].contiguous(), strip[..., -halo:].contiguous()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    messages = []
    if rank > 0:
        messages += [dist.P2POp(dist.isend, to_left, rank - 1), dist.P2POp(dist.irecv, from_left, rank - 1)]
    if rank < ranks - 1:
        messages += [dist.P2POp(dist.isend, to_right, rank + 1), dist.P2POp(dist.irecv, from_right, rank + 1)]
    for handle in dist.batch_isend_irecv(messages):
        handle.wait()
    return torch.cat([from_left, strip, from_right], dim=-1)
    ### END SOLUTION


# %%
forward_verdict = checks.halo_exchange(exchange_halo)
forward_verdict

# %%
from labkit.parallel.halo import swap_columns  # the messages of exercise 2, to use again

_ = plots.halo_diagram(photo.load_photo()[60:300] // 3 + 170, ranks=4, halo=12, backward=True)

# %% [markdown]
# *The way back, on the faded image: the halo's part of rank 1's gradient goes home, and its owner adds it (+) to its
# own.*
#
# ### Exercise 3: send the gradients home (••, {minutes} minutes)
#
# In the backward pass you get `grad`, the gradient of the padded strip. Send its outer columns home, receive what your
# neighbours send you, and add that to the gradient of your own outer columns. Return the gradient of the strip, which
# is `2 * halo` columns narrower than `grad`. At the border of the image nobody owns the outer columns.
#
# You need not write the messages of exercise 2 again: `swap_columns(to_left, to_right, rank, ranks)` is labkit's function
# of them. It sends one tensor to each neighbour and returns what they sent, `(from_left, from_right)`, with zeros at
# the border.
#
# <details><summary>Hint 1</summary>
#
# A pixel near the cut was used twice: by its own rank, and by the neighbour as part of the halo. Its gradient is the
# sum of both uses.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Send the outer `halo` columns of `grad`. What remains is yours: `own = grad[..., halo:-halo].clone()`.
#
# </details>
# <details><summary>Hint 3</summary>
#
# What comes from the left belongs to your first `halo` columns, and what comes from the right to your last.
#
# </details>


# %%
def return_gradients(grad: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    own = grad[..., halo:-halo].clone()
    from_left, from_right = swap_columns(grad[..., :halo], grad[..., -halo:], rank, ranks)
    own[..., :halo] += from_left
    own[..., -halo:] += from_right
    return own
    ### END SOLUTION


# %%
backward_verdict = checks.halo_gradient(return_gradients)
backward_verdict

# %% [markdown]
# Messages have no backward pass, unlike section 2's `full_tensor()`. So this class joins your two functions to one
# operation for autograd. `ctx` carries values from `forward` to `backward`, which returns a gradient for each argument of
# `forward`, or None.


# %%
class HaloExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, strip, halo, rank, ranks):
        ctx.place = halo, rank, ranks
        return exchange_halo(strip, halo, rank, ranks)

    @staticmethod
    def backward(ctx, grad):
        return return_gradients(grad, *ctx.place), None, None, None


# %% [markdown]
# *Takeaway: what travels to a neighbour in the forward pass comes back as a gradient, and is added there.*
#
# ## 5. Sum, or average? ({minutes} minutes)
#
# In lab 0 gradients were averaged, because each rank had samples of its own. Now all ranks have the same samples and
# the same loss, but each has seen its own columns only. Below, section 2's network with a 1 × 1 convolution runs on
# four ranks and on one device. In the backward pass `full_tensor()` sends nothing: it hands the gradient of the sum,
# unchanged, to this rank's term.
#
# Each rank reports what part of one device's gradient it holds: the projection (own · whole) / (whole · whole), which
# is 1 if the two are equal. Commit: what part does each rank hold, roughly, of the convolution's gradient, and of the
# head's?

# %% tags=["commit"]
mine_parts = commit(convolution=None, head=None)
### BEGIN SOLUTION
mine_parts = commit(convolution=1 / 4, head=1)
### END SOLUTION

# %%
# %%torchrun -n 4 --name own
from torch import nn
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

from labkit.rank import report  # sends numbers to the notebook, where own.ranks holds them

mesh = init_device_mesh("cpu", (4,))  # sets up the process group, too
torch.manual_seed(0)
images, labels = torch.randn(4, 3, 16, 64), torch.randint(10, (4,))
conv, head = nn.Conv2d(3, 8, 1), nn.Linear(8, 10)  # 1 x 1 needs no halo
strip = images.chunk(4, dim=3)[dist.get_rank()]
means = DTensor.from_local(conv(strip).relu().mean(dim=(2, 3)) / 4, mesh, [Partial()]).full_tensor()
nn.functional.cross_entropy(head(means), labels).backward()
mine = {"convolution": conv.weight.grad.clone(), "head": head.weight.grad.clone()}
conv.zero_grad(), head.zero_grad()
nn.functional.cross_entropy(head(conv(images).relu().mean(dim=(2, 3))), labels).backward()
whole = {"convolution": conv.weight.grad, "head": head.weight.grad}
report(**{name: (mine[name] * right).sum() / right.square().sum() for name, right in whole.items()})

# %%
reported = [rank.reported for rank in own.ranks]
shares = pandas.DataFrame([{name: float(each) for name, each in parts.items()} for parts in reported])
ax = shares.plot.bar(figsize=(7, 2.6), rot=0, xlabel="rank", ylabel="part of the gradient", ylim=(0, 1.15))
for bars in ax.containers:
    ax.bar_label(bars, fmt="%.2f", fontsize=8)
_ = ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
for name, mean in shares.mean().items():
    you = prediction_text(mine_parts[name], ".2f")
    print(f"{name}: a rank holds {mean:.2f} on average, {4 * mean:.2f} all together; you: {you}")

# %% [markdown]
# *The parts, before anything is reduced.*
#
# The convolution's gradient is a sum over pixels, and each rank has seen a quarter of them. The head has seen the means over
# the whole image, so its gradient is complete on every rank.

# %% tags=["claim"]
claim("the parts add up to 1", abs(shares["convolution"].sum() - 1) < 1e-5)
claim("of the head each rank holds all", (shares["head"] - 1).abs().max() < 1e-5)

# %% [markdown]
# ### Exercise 4: reduce the gradients (•, {minutes} minutes)
#
# `cut` is a list of gradients of everything before the mean over the image, and `head` a list of the head's. Change
# them in place, so that every rank holds one device's gradients. Each collective costs its latency again, so
# use only one, and send no more bytes than you need.
#
# <details><summary>Hint 1</summary>
#
# Look at the bars: what do the four ranks hold together of each gradient? Which list is right already?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.all_reduce` adds up one tensor in place. So copy the gradients into one flat tensor, and its parts back.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `torch.cat` joins flattened tensors, and `split` with a list of sizes takes them apart. `copy_` writes into a tensor that
# exists.
#
# </details>


# %%
def reduce_gradients(cut: list[torch.Tensor], head: list[torch.Tensor]) -> None:
    ### BEGIN SOLUTION
    flat = torch.cat([gradient.flatten() for gradient in cut])
    dist.all_reduce(flat)
    for gradient, part in zip(cut, flat.split([gradient.numel() for gradient in cut]), strict=True):
        gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


# %%
reduce_verdict = checks.reduce_gradients(reduce_gradients)
reduce_verdict

# %% [markdown]
# *Takeaway: ask which samples and pixels a rank's gradient has seen. Parts of one loss are summed, and means over
# different samples are averaged.*
#
# ## 6. Your code trains ConvNeXt ({minutes} minutes)
#
# `launch/convnext_spatial.py` trains the network of section 3 with Adam on tiles of section 1's photo, to tell which of
# ten regions a tile comes from. It calls `padded_strip` before each depthwise convolution and `reduce_gradients` after
# each backward pass. Your functions go in once they are right, and until then labkit's.
#
# First commit: how many messages does a rank in the middle send to its neighbours in a training step, forward and
# backward, and how many bytes, in float32? Section 3's diagram has the shapes.

# %% tags=["commit"]
mine_traffic = commit(send_count=None, send_bytes=None)
### BEGIN SOLUTION
sends = 2 * min(RANKS - 1, 2)  # forward and backward, to each neighbour
mine_traffic = commit(
    send_count=sends * 2,  # two blocks
    send_bytes=sends * sum(stage.height * 3 * stage.channels * BATCH * 4 for stage in stages),
)
### END SOLUTION


# %% tags=["summary"]
def padded_strip(strip: torch.Tensor, halo: int, rank: int, ranks: int) -> torch.Tensor:
    return HaloExchange.apply(strip, halo, rank, ranks)


use = {"padded_strip": padded_strip} if forward_verdict.ok and backward_verdict.ok else {}
use |= {"reduce_gradients": reduce_gradients} if reduce_verdict.ok else {}
print("your functions in this run:", ", ".join(use) or "nothing yet")
yours_run = labkit.run("convnext_spatial", nproc=RANKS, strategy="yours", use=use, **SETUP)
neighbours = min(RANKS - 1, 2)
predicted = {
    "send_count": neighbours * 2 * sum(DEPTHS),
    "send_bytes": spatial.spatial_send_bytes(stages=stages, batch=BATCH, neighbours=neighbours),
}
plots.comparison_table(yours_run, predicted, yours=mine_traffic)

# %% [markdown]
# To see whether it is right, `labkit.check` gives the cut network and one device the same random images and weights. It
# takes three steps, and compares the last outputs, all 28 gradients and all 28 weights.

# %%
PARITY = {"nproc": RANKS, "width": WIDTH, "strategy": "yours"} | NETWORK
print(labkit.check("convnext_spatial", **PARITY, use=use).verdict_text)

# %% [markdown]
# <details><summary>Where do 294,912 bytes come from?</summary>
#
# In the first stage a message has 16 rows · 3 columns · 32 channels · 6 images · 4 bytes =
# 36,864 bytes. The second stage has half the rows and twice the channels, so it sends as many. Two blocks, two neighbours
# and two passes make 8 messages.
#
# </details>

# %% tags=["claim"]
claim("to the byte", all(yours_run.value(name) == expected for name, expected in predicted.items()))
wanted = sum(12 * 2**stage * blocks for stage, blocks in enumerate(LARGE["depths"]))
claim("1,692 columns, and a strip of 512", (wanted, 4096 // 8) == (1692, 512))
claim("8 of 36,864 bytes", predicted == {"send_count": 8, "send_bytes": 8 * 36_864}, where=TOLD)

# %% [markdown]
# <details><summary>In your own network</summary>
#
# Set `conv.padding = (conv.padding[0], 0)`, call `conv(HaloExchange.apply(x, 3, rank, ranks))`, and take the mean over
# the image as in section 2. Sum the gradients over the ranks, but not the head's, which every rank has whole. Stochastic depth, and dropout after the mean, must draw the same random numbers on all ranks,
# and dropout of single pixels different ones. Pooling that overlaps and the statistics of a batch norm need an exchange of their own.
#
# </details>
#
# *Takeaway: halo traffic grows with the length of the cut, the channels and the samples, for each block, there and
# back. So cut parallel to the image's shorter side.*
#
# ## 7. Break it ({minutes} minutes)
#
# A wrongly sharded program still runs. Runs A to D have one deliberate mistake (*mutation*) each:
#
# 1. the halos are swapped, left and right;
# 2. the halo's gradients are not sent home;
# 3. gradients are averaged instead of added up;
# 4. gradients are not reduced at all: each rank keeps its own part.
#
# `labkit.check` fails for all four, and prints what differs most. It does not say why, so diagnose them by the gradients of
# the first step.

# %%
ONE_STEP = PARITY | {"steps": 1}
uses = {name: mutations.MISTAKES[number] for name, number in mutations.UNLABELLED.items()}
right_check, *found = [
    labkit.check("convnext_spatial", **ONE_STEP, use=mutations.reporting(mistake)) for mistake in ({}, *uses.values())
]
checked = dict(zip(uses, found, strict=True))
print("\n".join(f"{name}: {each.verdict_text}" for name, each in checked.items()))
ratios = mutations.gradient_ratios(checked, right_check)
ratios.round(3)

# %% [markdown]
# *What part of the right gradient each gradient of rank 0 holds, as in section 5. The backward pass goes from the bottom
# row up.*
#
# Commit: which mistake, 1 to 4, does each run have? And which of them, if Adam trains with it, cannot be told from the
# right run by the loss?
#
# <details><summary>Hint</summary>
#
# The head's gradient depends on the forward pass alone, so it says whether the features are right. Then go up: where is the
# first gradient that is wrong, and what does its value remind you of?
#
# </details>

# %% tags=["commit"]
mine_mistakes = commit(A=None, B=None, C=None, D=None, not_in_the_loss=None)
### BEGIN SOLUTION
mine_mistakes = commit(A=2, B=3, C=1, D=4, not_in_the_loss=3)
### END SOLUTION

# %%
how = {"nproc": RANKS, "strategy": "yours"}
broken = {name: labkit.run("convnext_spatial", use=use, **how, **SETUP) for name, use in uses.items()}
far = {name: ((each.losses - yours_run.losses).abs() / yours_run.losses).max() for name, each in broken.items()}
answers = mutations.UNLABELLED | {"not_in_the_loss": mutations.UNLABELLED[min(far, key=far.get)]}
print("\n".join(f"{name}: {number}; you: {prediction_text(mine_mistakes[name])}" for name, number in answers.items()))
for name, mistake in uses.items():
    print(f"\n# {name}\n{mutations.source(mistake)}", end="")
_, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
plots.loss_curves({**broken, "section 6": yours_run}, chance=math.log(10), ax=left)
_ = plots.loss_difference_curves(broken, yours_run, name="the right run", ax=right)

# %% [markdown]
# *Left: the loss falls in all five runs. Right: how far each loss is from the right run's.*
#
# In A all gradients are right back to the last halo exchange. Before it, a part of each never came home. In C the features are wrong
# already, and so is the head. In B exactly a quarter is left of each gradient before the mean, for four ranks: an average.
# In D it is only about a quarter: what rank 0's own columns gave, as in section 5. Adam divides the running mean of a
# gradient by the root of the running mean of its square, so a factor in both drops out, and the loss cannot show B. SGD's
# steps would be a quarter as long in all tensors but the head's. D's loss even ends below the right run's.

# %% tags=["claim"]
for name, each in broken.items():
    claim(f"the loss of {name} falls", each.losses.iloc[-1] < each.losses.iloc[0], where=TOLD)
claim("A, C and D are other trainings", min(far["A"], far["C"], far["D"]) > 1e-4, where=TOLD)
right_end = yours_run.losses.iloc[-1]
claim("D ends below the right run", broken["D"].losses.iloc[-1] < right_end, where=TOLD)
claim("B cannot be told by its loss", far["B"] < 1e-4, where=TOLD)
claim("the parity check fails for all four, not for the right one", not any(r.ok for r in checked.values()))
claim("and passes without a mistake", right_check.ok)
wrong = (ratios - 1).abs() > 1e-4
claim("A is right from the last halo on", list(wrong["A"]) == [True] * 4 + [False] * 3, where=TOLD)
claim("C is wrong in the head", wrong["C"]["head"], where=TOLD)
claim("B has one part of each before the mean", (ratios["B"][:-1] * RANKS - 1).abs().max() < 1e-4)
claim("and all of the head", not wrong["B"]["head"] and not wrong["D"]["head"])
claim("D has about a quarter", 0.03 < (ratios["D"][:-1] * RANKS - 1).abs().max() < 0.1, where=TOLD)

# %% [markdown]
# *Takeaway: a falling loss proves nothing, so compare outputs and every gradient with one device.*
#
# ## 8. Memory of a rank ({minutes} minutes)
#
# What does checkpointing save here, and what do strips? In a block every layer but the last addition keeps its input, and
# the two blocks' own inputs have 0.79 and 0.39 MB. Commit: how many times the size of its own input does a block keep, and
# how many MB does one device keep with checkpointing, at the peak, soon after it has computed the first block again?
#
# <details><summary>Hint</summary>
#
# Count in section 3's figure. Between the two 1 × 1 convolutions there are four times as many channels. The backward pass
# begins with the second block. When it computes the first one again, what is left of the second?
#
# </details>

# %% tags=["commit"]
mine_memory = commit(times_input=None, checkpointed_mb=None)
### BEGIN SOLUTION
mine_memory = commit(times_input=12, checkpointed_mb=12 * 0.79)
### END SOLUTION

# %%
runs = {"plain, 1 rank": labkit.run("convnext_spatial", nproc=1, strategy="plain", **SETUP)}
runs["checkpointed, 1 rank"] = labkit.run("convnext_spatial", nproc=1, strategy="plain", checkpointing=True, **SETUP)
for ranks in dict.fromkeys((2, RANKS)):
    runs[f"local, {ranks} ranks"] = labkit.run("convnext_spatial", nproc=ranks, strategy="local", **SETUP)
expected = {
    name: spatial.convnext_activation_bytes(
        stages=spatial.convnext_stages(HEIGHT, WIDTH // run.world_size, DEPTHS, DIMS), batch=BATCH, ranks=run.world_size
    )
    for name, run in runs.items()
}
expected["checkpointed, 1 rank"] = spatial.checkpointed_bytes(stages, BATCH)
_ = plots.memory_by_category(runs, predicted=expected)
input_bytes = 4 * BATCH * DIMS[0] * stages[0].height * stages[0].width
times_input = spatial.checkpointed_bytes(stages[:1], BATCH) / input_bytes
print(f"a block keeps {times_input:.0f} times its input; you: {prediction_text(mine_memory['times_input'])}")
checkpointed_mb = runs["checkpointed, 1 rank"].value("peak_activation_bytes") / 1e6
you_mb = prediction_text(mine_memory["checkpointed_mb"], ".1f")
print(f"checkpointed: {checkpointed_mb:.1f} MB of activations; you: {you_mb}")

# %% tags=["claim"]
held = {name: run.value("peak_activation_bytes") for name, run in runs.items()}
part = held["local, 2 ranks"] / held["plain, 1 rank"]
claim("a little more than a half", 0.5 < part < 0.6, where=TOLD)
fair = held["plain, 1 rank"] / RANKS
claim("the halos keep it above a fair share", fair < held[f"local, {RANKS} ranks"] < 1.2 * fair, where=TOLD)
by_theory = held["checkpointed, 1 rank"] / expected["checkpointed, 1 rank"]
claim("checkpointing, by theory", abs(by_theory - 1) < 0.03, where=TOLD)
claim("strips keep less", held[f"local, {RANKS} ranks"] < held["checkpointed, 1 rank"], where=TOLD)
inputs_mb = [round(4e-6 * BATCH * each.channels * each.height * each.width, 2) for each in stages]
plain, checkpointed = runs["plain, 1 rank"], runs["checkpointed, 1 rank"]
saved = [1 - checkpointed.value(name) / plain.value(name) for name in ("peak_activation_bytes", "peak_total_bytes")]
temporary_mb = [round(each.value("peak_temp_bytes") / 1e6, 1) for each in (plain, checkpointed)]
on_cpu = TOLD and plain.device == "cpu"  # a GPU's kernels have other temporary tensors
claim("temporary tensors, without the images", temporary_mb == [2.4, 4.7], where=on_cpu)
claim("of activations and of all", [round(100 * each) for each in saved] == [41, 21], where=on_cpu)
claim("the images, not the labels", round(plain.value("peak_other_bytes") / 1e6, 2) == 1.18, where=TOLD)
norms = 2 * 2 * 4 * BATCH * stages[0].height * stages[0].width  # mean and deviation of each pixel, in two norms
beside_norms = (1e6 * checkpointed_mb - norms) / input_bytes
claim("12 times the input, and two norms", abs(beside_norms - 12) < 0.01, where=TOLD)
claim("the inputs of the two blocks", inputs_mb == [0.79, 0.39], where=TOLD)

# %% [markdown]
# *Peak memory of a rank, the images among the temporary; dashed, the predicted activations. These shrink with every rank,
# and the halos keep them a little above a fair share.*
#
# A block keeps the input of each layer, here in units of the block's own:
#
# |7 × 7|norm|1 × 1, C → 4C|GELU|1 × 1, 4C → C|layer scale|together|
# |---|---|---|---|---|---|---|
# |1|1|1|4|4|1|12|
#
# With two blocks, not 36, checkpointing saves 41 % of the activations, and 21 % of the peak. The peak moves from the second
# block to the first, whose maps and gradients are twice as large.
#
# <details><summary>And what is outside blocks?</summary>
#
# The stem's norm keeps its input, as large as the first block's. But the peak comes a moment after the backward pass of the
# first block has begun, with its layer scale, and what that kept is free by then. So the sum is 13 − 1 = 12 again.
#
# </details>
#
# *Takeaway: cutting images divides the activations. Weights and Adam's state stay whole on every rank.*
#
# ## 9. Does it pay? ({minutes} minutes)
#
# Strips have two rivals: one device, and data parallelism, in which each rank takes images of its own.
#
# ### Exercise 5: the time of a step in strips (•, {minutes} minutes)
#
# One device takes `compute_s` for all images, and strips share this. How many seconds does a step take on a rank in the
# middle of at least three? Each halo has `halo_bytes`; count them as in section 6. The gradients and the mean over the
# image each go around a ring (lab 0), but only the gradients have many bytes, `gradient_bytes`. A message takes
# `latency_s`, and its bytes over `bytes_per_s`. Count one after another, which is the worst case: messages that start
# together may share their latency.
#
# <details><summary>Hint 1</summary>
#
# Add four parts: arithmetic, the halos' bytes, the gradients' bytes, and the latency of all messages.
#
# </details>
# <details><summary>Hint 2</summary>
#
# How many messages does a rank send in a ring of n ranks, and what part of the tensor does each of them carry?
#
# </details>


# %%
def strips_seconds(
    compute_s: float,
    ranks: int,
    blocks: int,
    halo_bytes: int,
    gradient_bytes: int,
    latency_s: float,
    bytes_per_s: float,
) -> float:
    ### BEGIN SOLUTION
    halos, ring = 2 * 2 * blocks, 2 * (ranks - 1)
    sent = halos * halo_bytes + ring * gradient_bytes / ranks
    return compute_s / ranks + (halos + 2 * ring) * latency_s + sent / bytes_per_s
    ### END SOLUTION


# %%
seconds_verdict = checks.strips_seconds(strips_seconds)
seconds_verdict

# %% [markdown]
# **First**, four real ranks train 4 blocks, and *wait* (`emulate=`) as if one device took 600 ms an image, and any
# message 3 ms between near devices and 20 ms between distant ones, whatever its bytes.
#
# **Then** your formula takes section 1's network to eight GPUs of lab 0's reference cluster, in bfloat16, with 400 · 10¹²
# operations a second and 10 µs a message. Its gradients have 0.7 GB, and 1024 × 1024 pixels take 7.5 · 10¹² operations. The
# cases: (1) such an image over NVLink (450 GB/s), (2) over network cards (50 GB/s), (3) and (4) likewise for
# 2048 × 2048.
#
# Commit: how many ms does one image take in strips on near devices? Which of the cases 1 to 4 loses to one device,
# and what takes most of its time: 1 arithmetic, 2 the halos' bytes, 3 the gradients' bytes, or 4 latency?

# %% tags=["commit"]
mine_steps = commit(near_ms=None, loses=None, largest_part=None)
### BEGIN SOLUTION
mine_steps = commit(near_ms=1e3 * strips_seconds(0.6, 4, 4, 0, 0, 3e-3, math.inf), loses=2, largest_part=3)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
small = {"height": 32, "width": 256, "depths": (2, 2), "dims": (16, 32)}
cases = {  # images, latency in ms, and how many ranks share the images and the width of each
    "1 image, one device": (1, 3, 1, 1),
    "1 image, strips, near": (1, 3, 1, 4),
    "1 image, strips, distant": (1, 20, 1, 4),
    "4 images, strips, near": (4, 3, 1, 4),
    "4 images, one for each rank": (4, 3, 4, 1),
}
variants, expected_ms = {}, {}
for label, (batch, latency_ms, data, space) in cases.items():
    hardware = labkit.Emulated(latency_us=1e3 * latency_ms, forward_ms=50 * batch)  # of a block; backward, twice that
    variants[label] = {"batch": batch, "emulate": hardware, "nproc": data * space, "mesh": f"{data}x{space}"}
    expected_ms[label] = 1e3 * emulated_steps.spatial_step_s(hardware, **small, batch=batch, data=data, space=space)
emulated = labkit.compare("convnext_spatial", variants, rounds=1, steps=1, **small)
_ = plots.latency_bars(emulated, predicted=expected_ms).set_xlabel("time of one step, ms (slowest rank)")
near = emulated["1 image, strips, near"]
messages = near.value("send_count") + 2 * (4 - 1) * near.value("all_reduce_count")  # halos, rings
print(f"1 image, strips, near: {messages:.0f} messages; theory: {4 * 4 + 2 * 6}")
near_ms = near.value("step_ms"), expected_ms["1 image, strips, near"]
print("{:.0f} ms; theory: {:.0f}; you: {}".format(*near_ms, prediction_text(mine_steps["near_ms"], ".0f")))

# %% [markdown]
# *Emulated steps; dashed, theory. One image is faster in strips on near devices, and slower on distant ones. With an
# image for each rank, data parallelism is faster: it sends no halos, and adds up no means.*
#
# By theory all 28 messages take 84 ms beside the 150 of one image, so one image pays up to (600 − 150) / 28 = 16 ms a
# message. What the run takes beyond theory is the work of four processes on few cores.

# %%
links = {"NVLink": 450e9, "network cards": 50e9}
formula = strips_seconds if seconds_verdict.ok else None  # or labkit's
cluster_ms = strips_cost.table_ms(formula, (1024, 2048), links, **LARGE)
lost = list(cluster_ms["strips"] > cluster_ms["one device"])
largest = list(cluster_ms.iloc[lost.index(True), 3:].argsort())[-1]
print(f"loses: case {lost.index(True) + 1}; you: {prediction_text(mine_steps['loses'])}")
print(f"largest part: {largest + 1}; you: {prediction_text(mine_steps['largest_part'])}")
cluster_ms.round(1)

# %% tags=["claim"]
claim("16 sends, 2 all-reduces", (near.value("send_count"), near.value("all_reduce_count")) == (16, 2))
step_ms = {label: result.value("step_ms") for label, result in emulated.items()}
claim("near devices: strips win", step_ms["1 image, strips, near"] < 0.9 * step_ms["1 image, one device"])
claim("distant devices: strips lose", step_ms["1 image, strips, distant"] > 1.1 * step_ms["1 image, one device"])
rival = step_ms["4 images, one for each rank"]
claim("where each rank can have an image of its own, that is faster", rival < 0.95 * step_ms["4 images, strips, near"])
claim("the small image over network cards loses", lost == [False, True, False, False])
gradients_ms = cluster_ms["gradients"]
claim("there, gradients take longer than one device", gradients_ms.iloc[1] > cluster_ms["one device"].iloc[1])
claim("they do not grow with the image", list(gradients_ms[:2]) == list(gradients_ms[2:]))
claim("halos take less than a tenth as long", (cluster_ms["halos"] < 0.1 * gradients_ms).all())
operations = cluster_ms["one device"].iloc[0] * 1e-3 * 400e12
claim("7.5 · 10¹² operations", round(operations / 1e12, 1) == 7.5)
eight = cluster_ms["data parallel"]
claim("data parallelism wins in all cases but one device's", (eight < cluster_ms["strips"]).all())

# %% [markdown]
# *Milliseconds of a step with one image; `data parallel` is for one of eight, each on a rank of its own. `strips` is your
# formula, once it is right; its parts follow.*
#
# The small image loses over network cards. There the gradients alone take longer than one device needs for
# all. They do not grow with the image, while the arithmetic does. Data parallelism sends them, too, but once for eight images.
#
# *Takeaway: cut images if one does not fit, or if a single image must be fast and sharing its arithmetic saves more than
# all messages take. Otherwise give each rank images of its own.*
#
# ## 10. Take away ({minutes} minutes)
#
# 1. A convolution at the edge of a strip needs the neighbour's pixels. So a rank receives a halo before each block, and
#    sends the halo's gradient back after it.
# 2. Activations shrink with every rank, while a halo does not depend on the number of ranks.
# 3. A sharded network that trains may still be wrong. Compare its outputs and every gradient with one device's.
#
# |if|then|
# |---|---|
# |activations do not fit|checkpoint first, and cut the image where that is not enough|
# |images fit, and are at least as many as the ranks|give each rank images of its own|
# |the image is small and the cards are slow|do not cut: summing the gradients costs more than strips save|
# |you wrap a cut network in DDP|stop: it averages gradients that must be summed|
#
# **Ask yourself**
#
# <details><summary>1. A 5 × 5 convolution with stride 1: how many columns does a rank get from each neighbour?</summary>
#
# Two, (5 − 1) / 2. At the border of the image it pads zeros instead.
#
# </details>
#
# <details><summary>2. Why does a rank <em>add</em> the gradients that arrive, and not overwrite its own with them?</summary>
#
# The columns were used twice, by their owner and by the neighbour. The gradient of a value that is used twice is the
# sum over both uses.
#
# </details>
#
# <details><summary>3. You double the ranks. What happens to a middle rank's halos, activations and arithmetic?</summary>
#
# The halos stay, because the cut is as long as before. Activations and arithmetic are nearly halved. So the halos weigh
# twice as much beside arithmetic.
#
# </details>
#
# <details><summary>4. A colleague's sharded network trains, and its loss falls. What do you ask for?</summary>
#
# A comparison with one device, from random weights, because constant ones hide mistakes: outputs, each gradient, each
# weight. And that this comparison was seen to fail once.
#
# </details>
#
# <details><summary>5. Why does the mean over the image need no all-reduce in its backward pass?</summary>
#
# The derivative of a sum with respect to each summand is 1. Every rank has computed the same loss from the same
# features, so it already holds the gradient of the sum, and passes it on to its own strip. `full_tensor()` does that.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - In labkit: `labkit/parallel/halo.py` (the exchange), `labkit/parallel/spatial.py` (the strategies),
#   `launch/convnext_spatial.py` (the program of this lab). `preset="paper"` is a large ConvNeXt for four GPUs. ConvNeXt's last norm,
#   before the head, is left out.
# - Liu et al., *A ConvNet for the 2020s*, 2022: <https://arxiv.org/abs/2201.03545>
# - Dryden et al., *Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism*, 2019, which cuts
#   images as we do: <https://arxiv.org/abs/1903.06681>
# - PhysicsNeMo: domain parallelism with `ShardTensor`, <https://docs.nvidia.com/deeplearning/physicsnemo/>
# - PyTorch: point-to-point messages, <https://docs.pytorch.org/docs/stable/distributed.html>; `autograd.Function`,
#   <https://docs.pytorch.org/docs/stable/notes/extending.html>
#
# </details>
#
# **Next**: [lab 1b](01b_spatial_at_work.ipynb) has what you meet with images of your own. Here every rank held all weights;
# [lab 2](02_fsdp_wrapping.ipynb) cuts them.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("spatial")
