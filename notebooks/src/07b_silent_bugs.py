# %% [markdown]
# # Lab 7b. The museum of silent bugs
#
# A program hangs or raises, and you know that you have a bug. The bugs of this lab are worse. Each was published, in a
# public program for training. Nothing raises, the loss falls as it should, and the gradient of some weight is
# wrong. After this lab you can
#
# - read a step of parallel training and say whose gradient is wrong;
# - prove it with parity, one comparison with one device;
# - mend the step;
# - say which of these bugs a type checker refuses before any rank starts.
#
# You need labs 5 and 7. The notebook takes about {core_minutes} minutes.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import pandas
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import cross_entropy, gelu, rms_norm

import labkit
from labkit import doctor
from labkit.config import require
from labkit_course.checks import silent_bugs as checks
from labkit_course.checks.claims import claim, commit, prediction_text
from launch import museum
from launch.museum import typed
from launch.museum.parts import WIDTH, copy_to_ranks, gather_from_ranks, part, sum_and_share, sum_over_ranks, total

doctor.show(lab="7b")

# %% tags=["parameters"] small={"STEPS": 3} points=[[2,3],[3,20],[4,10]]
RANKS: int = 2  # ranks in each room; the pipeline has two stages, and takes two
STEPS: int = 20  # training steps, on the ranks and on one device

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="the rooms' tensors are cut evenly by 2, 3 or 4")
require("STEPS", STEPS, at_least=1, because="without a step there is no loss")

# %% [markdown]
# ## 1. How the museum works ({minutes} minutes)
#
# A **room** is a step of training in miniature: at most 15 lines of our own, which repeat the mistake of a published
# report. The first line names it. The step gets `weights`, a dict of what this rank holds, and the `inputs` and `targets` of all ranks. It
# leaves gradients in `.grad` and returns the loss that a run would log. Six functions are given:
#
# | function | forward pass | backward pass |
# |---|---|---|
# | `part(x)` | this rank's share of what all ranks have | – |
# | `total(loss)` | sum over the ranks, for the log | none |
# | `copy_to_ranks(x)` | identity | sum over the ranks |
# | `sum_over_ranks(x)` | sum over the ranks | identity |
# | `gather_from_ranks(x)` | the tokens of all ranks (all-gather) | sum, then this rank's tokens |
# | `sum_and_share(x)` | sum, then this rank's tokens (reduce-scatter) | the tokens of all ranks |
#
# The third and the fourth begin and end a pair of layers in lab 5, and the last two do so under sequence parallelism.
# Weights, inputs and targets come from seeds, so that one device can compute the same step. **Parity** compares each
# gradient with that one. Float32 rounds to about 10⁻⁷ and errors add up, so we call a gradient wrong if it is off by
# more than 10⁻⁴.
#
# In each room read the step. Commit to the weights whose gradient is wrong: 1 for wrong, 0 for right. Run it on real
# ranks, which also train it for 20 steps with Adam, beside one device. Then copy the step, and mend it.
#
# ## 2. A norm ({minutes} minutes)
#
# We walk through the first three rooms. Under sequence parallelism each rank has its share of the tokens between the
# pairs of layers. The weights `norm` and `head` are whole on every rank, and `up` and `down` are cut.

# %%
museum.read("norm")

# %% tags=["commit"]
mine_norm = commit(norm=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_norm = commit(norm=1, up=0, down=0, head=0)
### END SOLUTION

# %%
at_norm = labkit.run("silent_bugs", nproc=RANKS, room="norm", steps=STEPS, device="cpu")
museum.gradient_table(at_norm.ranks[0].reported, mine_norm)

# %% [markdown]
# *Each gradient beside one device's. The second column is its length along the right one.* `head` and `norm` are alike,
# because a rank's loss is that of its own tokens, but the step adds up only one of their gradients. Nobody sees it in the
# loss: `norm` still moves in a sensible direction on each rank, though the ranks' copies of it drift apart.

# %% tags=["claim"]
claim("the norm's gradient is wrong, and no other", at_norm.ranks[0].reported["wrong"] == ["norm"])


# %%
def mended_norm(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    tokens = part(inputs)
    normed = rms_norm(tokens, (WIDTH,), weights["norm"])
    inner = gelu(gather_from_ranks(normed) @ weights["up"].T)
    tokens = tokens + sum_and_share(inner @ weights["down"].T)
    losses = cross_entropy(tokens @ weights["head"].T, part(targets), reduction="sum")
    loss = losses / len(targets)
    loss.backward()
    for name in ("norm", "head"):
        dist.all_reduce(weights[name].grad)
    return total(loss)


checks.mended(mended_norm, "norm")

# %% [markdown]
# *Takeaway: a whole weight behind which the ranks see different tokens needs a sum of its gradient.*
#
# ## 3. Tokens that do not count ({minutes} minutes)
#
# In plain data parallelism each rank has its texts. The tokens of a prompt have no target, which `cross_entropy` knows
# as −100, and rank 0 has more prompts than the others.

# %%
museum.read("counts")

# %% tags=["commit"]
mine_counts = commit(first=None, last=None)
### BEGIN SOLUTION
mine_counts = commit(first=1, last=1)
### END SOLUTION

# %%
at_counts = labkit.run("silent_bugs", nproc=RANKS, room="counts", steps=STEPS, device="cpu")
museum.gradient_table(at_counts.ranks[0].reported, mine_counts)

# %% [markdown]
# Both gradients are near the right ones, and neither is right. A mean of the ranks' means is not the mean of all tokens:
# a token weighs more where it has fewer companions. The mend divides by the number of tokens on all ranks. Here every rank
# has all `targets` and can count; in a real program the number takes an all-reduce.
#
# ```diff
# - loss = cross_entropy(logits, part(targets), ignore_index=IGNORED)  # the mean of its tokens
# + losses = cross_entropy(logits, part(targets), ignore_index=IGNORED, reduction="sum")
# + loss = losses / (targets != IGNORED).sum()
# -     weight.grad /= dist.get_world_size()
# - return total(loss) / dist.get_world_size()
# + return total(loss)
# ```
#
# *Takeaway: divide a sum by a number of tokens that all ranks share, never a mean by the number of ranks.*

# %% tags=["claim"]
reported = at_counts.ranks[0].reported
claim("both gradients are wrong", reported["wrong"] == ["first", "last"])
claim("they are near", all(abs(ratio - 1) < 0.25 for ratio in reported["ratios"].values()), where=RANKS == 2)

# %% [markdown]
# ## 4. Experts ({minutes} minutes)
#
# Under expert parallelism an expert lives on one rank. The tokens come to it from all ranks, and go back. The other
# weights are whole, and their gradients are averaged.

# %%
museum.read("experts")

# %% tags=["commit"]
mine_experts = commit(embed=None, experts=None, head=None)
### BEGIN SOLUTION
mine_experts = commit(embed=0, experts=1, head=0)
### END SOLUTION

# %%
at_experts = labkit.run("silent_bugs", nproc=RANKS, room="experts", steps=STEPS, device="cpu")
museum.gradient_table(at_experts.ranks[0].reported, mine_experts)

# %% [markdown]
# Each rank's loss is a mean over its own tokens, and the loss of the run is the mean of those. The backward pass of
# `sum_and_share` brings every rank's gradient to the expert and adds them up, and nobody divides. With two ranks the
# gradient is 2 times too large, with 64 ranks 64 times.
#
# ```diff
#       weights[name].grad /= dist.get_world_size()
# + weights["experts"].grad /= dist.get_world_size()
# ```
#
# The loss does not show it (section 6), and that is no luck. Adam divides a gradient by its own size, so a constant factor does
# almost nothing, until a clipped norm or another optimizer meets it.
#
# *Takeaway: with Adam the loss cannot show a factor. A comparison of gradients does.*

# %% tags=["claim"]
reported = at_experts.ranks[0].reported
claim("the experts' gradient is wrong", reported["wrong"] == ["experts"])
claim("by a factor, the number of ranks", abs(reported["ratios"]["experts"] - RANKS) < 1e-3)
off = max(abs(here / right - 1) for here, right in zip(reported["logged"], reported["right"], strict=True))
claim("the loss does not show it", off < 1e-3)

# %% [markdown]
# ## 5. Nine rooms for you ({minutes} minutes)
#
# Now you. Copy the lines of the step from the output into your answer, and change what is wrong.
# A check runs your step on two and on three ranks; the pipeline has two alone.
#
# ### Exercise 1: one text, many features (•, {minutes} minutes)
#
# Tensor parallelism, as in lab 5: all ranks have all tokens, and each computes its features of the pair `up` and `down`.
#
# <details><summary>Hint</summary>
#
# What does lab 5 put where a pair of cut layers begins?
#
# </details>

# %%
museum.read("tokens")

# %% tags=["commit"]
mine_tokens = commit(embed=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_tokens = commit(embed=1, up=0, down=0, head=0)
### END SOLUTION

# %%
at_tokens = labkit.run("silent_bugs", nproc=RANKS, room="tokens", steps=STEPS, device="cpu")
museum.gradient_table(at_tokens.ranks[0].reported, mine_tokens)


# %%
def mended_tokens(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    tokens = torch.tanh(inputs @ weights["embed"].T)
    inner = gelu(copy_to_ranks(tokens) @ weights["up"].T)
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((tokens + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()
    ### END SOLUTION


# %%
checks.mended(mended_tokens, "tokens")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# The gradient of `tokens` has two terms. What flows back past the pair, by the addition, is whole on every rank. What flows
# back through the pair is only this rank's features. A sum of both would count the first once for each rank, so the sum
# belongs where the pair begins.
#
# </details>
#
# ### Exercise 2: the router (•, {minutes} minutes)
#
# Here the features of every expert are cut over the ranks. The router `gate` is whole, and its scores are the same on
# all ranks.
#
# <details><summary>Hint</summary>
#
# Two tensors enter the region where each rank has a part of the features, and the scores are one of them.
#
# </details>

# %%
museum.read("router")

# %% tags=["commit"]
mine_router = commit(gate=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_router = commit(gate=1, up=0, down=0, head=0)
### END SOLUTION

# %%
at_router = labkit.run("silent_bugs", nproc=RANKS, room="router", steps=STEPS, device="cpu")
museum.gradient_table(at_router.ranks[0].reported, mine_router)


# %%
def mended_router(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    scores = torch.softmax(inputs @ weights["gate"].T, dim=1)
    tokens = copy_to_ranks(inputs)
    inner = gelu(torch.einsum("td,ehd->teh", tokens, weights["up"]))
    own = torch.einsum("teh,edh,te->td", inner, weights["down"], copy_to_ranks(scores))
    mixed = sum_over_ranks(own)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    return loss.detach()
    ### END SOLUTION


# %%
checks.mended(mended_router, "router")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# Each rank has the gradient of the scores from its own features, one term of a sum. The ranks' copies of `gate` get
# different terms, and drift apart.
#
# </details>
#
# ### Exercise 3: pictures and texts (•, {minutes} minutes)
#
# A contrastive loss compares each picture with the texts of all ranks, so that the ranks gather their texts.
#
# <details><summary>Hint</summary>
#
# A rank's text also stands in the losses of the other ranks. How does their gradient come back?
#
# </details>

# %%
museum.read("gathered")

# %% tags=["commit"]
mine_gathered = commit(picture=None, text=None)
### BEGIN SOLUTION
mine_gathered = commit(picture=0, text=1)
### END SOLUTION

# %%
at_gathered = labkit.run("silent_bugs", nproc=RANKS, room="gathered", steps=STEPS, device="cpu")
museum.gradient_table(at_gathered.ranks[0].reported, mine_gathered)


# %%
def mended_gathered(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    pictures, texts = part(inputs) @ weights["picture"].T, part(targets) @ weights["text"].T
    logits = pictures @ gather_from_ranks(texts).T
    loss = cross_entropy(logits, part(torch.arange(len(inputs))))
    loss.backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
    ### END SOLUTION


# %%
checks.mended(mended_gathered, "gathered")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# A text has a gradient from its own rank's loss alone. With `gather_from_ranks` the backward pass adds up those from all
# ranks' losses. The division afterwards stays right, because the loss of the run is the mean of the ranks' losses.
#
# </details>
#
# ### Exercise 4: the word after the next (•, {minutes} minutes)
#
# Context parallelism shares each sequence. A second head predicts one word further, and its loss counts 0.3.
#
# <details><summary>Hint</summary>
#
# Below, the gradients are averaged over the ranks. Is there a division by their number before?
#
# </details>

# %%
museum.read("extra")

# %% tags=["commit"]
mine_extra = commit(trunk=None, head=None, extra=None)
### BEGIN SOLUTION
mine_extra = commit(trunk=1, head=0, extra=1)
### END SOLUTION

# %%
at_extra = labkit.run("silent_bugs", nproc=RANKS, room="extra", steps=STEPS, device="cpu")
museum.gradient_table(at_extra.ranks[0].reported, mine_extra)


# %%
def mended_extra(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    hidden = torch.tanh(part(inputs) @ weights["trunk"].T)
    first, second = part(targets).T
    loss = cross_entropy(hidden @ weights["head"].T, first)
    more = 0.3 * cross_entropy(hidden @ weights["extra"].T, second)
    (loss + more).backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    return total(loss) / dist.get_world_size()
    ### END SOLUTION


# %%
checks.mended(mended_extra, "extra")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# The average over the ranks divides both losses once, and the second has been divided before. So the gradient of `extra` is
# divided by the number of ranks once too often, and `trunk` has a mixture of both.
#
# </details>
#
# ### Exercise 5: the norm that clips (•, {minutes} minutes)
#
# Before the update the whole gradient is scaled to a norm of 0.1 at most. `up` and `down` are cut over the ranks. In your
# step write 0.1 for `LIMIT`.
#
# <details><summary>Hint</summary>
#
# A rank has the squares of its own part of `up` and `down`, and those of all of `head`. Add up the former over the ranks.
#
# </details>

# %%
museum.read("clip")

# %% tags=["commit"]
mine_clip = commit(up=None, down=None, head=None)
### BEGIN SOLUTION
mine_clip = commit(up=1, down=1, head=1)
### END SOLUTION

# %%
at_clip = labkit.run("silent_bugs", nproc=RANKS, room="clip", steps=STEPS, device="cpu")
museum.gradient_table(at_clip.ranks[0].reported, mine_clip)


# %%
def mended_clip(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    inner = gelu(copy_to_ranks(inputs) @ weights["up"].T)
    mixed = sum_over_ranks(inner @ weights["down"].T)
    loss = cross_entropy((inputs + mixed) @ weights["head"].T, targets)
    loss.backward()
    squares = {name: weight.grad.square().sum() for name, weight in weights.items()}
    norm = (total(squares["up"] + squares["down"]) + squares["head"]).sqrt()
    for weight in weights.values():
        weight.grad *= (0.1 / norm).clamp(max=1)
    return loss.detach()
    ### END SOLUTION


# %%
checks.mended(mended_clip, "clip")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# Without the other ranks' squares the norm is too small, so each rank shrinks too little, and by a factor of its own. That
# is why the whole `head` also differs between the ranks.
#
# </details>
#
# ### Exercise 6: one table at both ends (•, {minutes} minutes)
#
# A pipeline of two stages. The first looks words up in the table `words`, and the last scores them with its own copy.
#
# <details><summary>Hint</summary>
#
# On one device there is one table, and its gradient has two terms. Both ranks reach the line with `return`.
#
# </details>

# %%
museum.read("tied")

# %% tags=["commit"]
mine_tied = commit(words=None, first=None, last=None)
### BEGIN SOLUTION
mine_tied = commit(words=1, first=0, last=0)
### END SOLUTION

# %%
at_tied = labkit.run("silent_bugs", nproc=2, room="tied", steps=STEPS, device="cpu")
museum.gradient_table(at_tied.ranks[0].reported, mine_tied)


# %%
def mended_tied(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    received, loss = torch.empty(len(inputs), WIDTH), torch.zeros(())
    if "first" in weights:
        hidden = torch.tanh(weights["words"][inputs] @ weights["first"].T)
        dist.send(hidden.detach(), dst=1)
        dist.recv(received, src=1)
        hidden.backward(received)
    else:
        dist.recv(received, src=0)
        hidden = torch.tanh(received.requires_grad_() @ weights["last"].T)
        loss = cross_entropy(hidden @ weights["words"].T, targets)
        loss.backward()
        dist.send(received.grad, dst=0)
    dist.all_reduce(weights["words"].grad)
    return total(loss)
    ### END SOLUTION


# %%
checks.mended(mended_tied, "tied")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# Rank 0 has the term of the lookup, rank 1 that of the scores. Each updates its own copy, so two tables grow out of one.
#
# </details>
#
# ### Exercise 7: two micro-batches (•, {minutes} minutes)
#
# Gradients are accumulated over two halves of a rank's tokens.
#
# <details><summary>Hint</summary>
#
# What does `.grad` hold when it is sent for the second time?
#
# </details>

# %%
museum.read("accumulate")

# %% tags=["commit"]
mine_accumulate = commit(first=None, last=None)
### BEGIN SOLUTION
mine_accumulate = commit(first=1, last=1)
### END SOLUTION

# %%
at_accumulate = labkit.run("silent_bugs", nproc=RANKS, room="accumulate", steps=STEPS, device="cpu")
museum.gradient_table(at_accumulate.ranks[0].reported, mine_accumulate)


# %%
def mended_accumulate(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    logged = torch.zeros(())
    for tokens, words in zip(part(inputs).chunk(2), part(targets).chunk(2), strict=True):
        logits = torch.tanh(tokens @ weights["first"].T) @ weights["last"].T
        loss = cross_entropy(logits, words, reduction="sum") / len(targets)
        loss.backward()
        logged += total(loss)
    for weight in weights.values():
        dist.all_reduce(weight.grad)
    return logged
    ### END SOLUTION


# %%
checks.mended(mended_accumulate, "accumulate")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# The first half is summed, stays in `.grad`, and is summed again with the second. On two ranks that is 2 · first + second:
# about 1.5 times the right gradient.
#
# </details>
#
# ### Exercise 8: a sum that is on its way (•, {minutes} minutes)
#
# An asynchronous all-reduce is meant to overlap with other work. `288` is the number of elements of each weight. Leave out
# the sleep, which makes rank 1 late.
#
# <details><summary>Hint</summary>
#
# `all_reduce(..., async_op=True)` returns at once. When does the row hold the sum?
#
# </details>

# %%
museum.read("unwaited")

# %% tags=["commit"]
mine_unwaited = commit(first=None, last=None)
### BEGIN SOLUTION
mine_unwaited = commit(first=1, last=1)
### END SOLUTION

# %%
at_unwaited = labkit.run("silent_bugs", nproc=RANKS, room="unwaited", steps=STEPS, device="cpu")
museum.gradient_table(at_unwaited.ranks[0].reported, mine_unwaited)


# %%
def mended_unwaited(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    logits = torch.tanh(part(inputs) @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, part(targets))
    loss.backward()
    row = torch.cat([weight.grad.flatten() for weight in weights.values()])
    handle = dist.all_reduce(row, async_op=True)
    handle.wait()
    mean = row / dist.get_world_size()
    for weight, numbers in zip(weights.values(), mean.split([288, 288]), strict=True):
        weight.grad = numbers.view_as(weight)
    return total(loss) / dist.get_world_size()
    ### END SOLUTION


# %%
checks.mended(mended_unwaited, "unwaited")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# Rank 0 divides before the other's numbers have arrived, and mostly keeps half of its own. On a lucky day the sum is there in time,
# and the bug with it is gone. To wait at once gives up the overlap. A real program puts other work between the two
# lines; on a GPU, `wait` lets the stream wait, and not the program.
#
# </details>
#
# ### Exercise 9: fewer digits (•, {minutes} minutes)
#
# The gradients are meant to be added up in float32.
#
# <details><summary>Hint</summary>
#
# In which dtype is a gradient while the ranks add it up?
#
# </details>

# %%
museum.read("bfloat")

# %% tags=["commit"]
mine_bfloat = commit(first=None, last=None)
### BEGIN SOLUTION
mine_bfloat = commit(first=0, last=1)
### END SOLUTION

# %%
at_bfloat = labkit.run("silent_bugs", nproc=RANKS, room="bfloat", steps=STEPS, device="cpu")
museum.gradient_table(at_bfloat.ranks[0].reported, mine_bfloat)


# %%
def mended_bfloat(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    logits = torch.tanh(part(inputs) @ weights["first"].T) @ weights["last"].T
    loss = cross_entropy(logits, part(targets), reduction="sum") / len(targets)
    loss.backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
    return total(loss)
    ### END SOLUTION


# %%
checks.mended(mended_bfloat, "bfloat")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# bfloat16 has 8 bits for the digits, so each rounding is off by up to 2⁻⁸, about 0.4 %.
#
# </details>
#
# ## 6. What the loss showed ({minutes} minutes)
#
# Every run above also trained, with the bug on the ranks and without it on one device.

# %%
visits = [at_norm, at_counts, at_experts, at_tokens, at_router, at_gathered]
visits += [at_extra, at_clip, at_tied, at_accumulate, at_unwaited, at_bfloat]
rooms = {run.params["room"]: run.ranks[0].reported for run in visits}
figure, axes = plt.subplots(3, 4, figsize=(9, 5), layout="constrained", sharex=True)
for ax, (name, each) in zip(axes.flat, rooms.items(), strict=True):
    ax.plot(each["logged"], color="tab:red", label="with the bug")
    ax.plot(each["right"], "k--", label="one device")
    ax.set_title(name, fontsize=9)
axes[0, 0].legend(fontsize=7)
figure.supylabel("loss", fontsize=9)
_ = figure.supxlabel(f"step ({visits[0].stamp.splitlines()[0]})", fontsize=7)

# %% [markdown]
# *The loss of each room. The red curve alone tells nothing, and in `tokens` and `tied` it even ends lower. In `counts` it differs
# from the start, since that run logs a mean of means.*


# %%
def largest_difference(each: dict) -> float:
    return max(abs(here / right - 1) for here, right in zip(each["logged"], each["right"], strict=True))


# %% tags=["claim"]
claim("parity catches twelve of twelve", sum(bool(each["wrong"]) for each in rooms.values()) == 12)
claim("each loss is within 2 % of one device's", max(map(largest_difference, rooms.values())) < 0.02, where=RANKS == 2)
lower = [rooms[name]["logged"][-1] < rooms[name]["right"][-1] for name in ("tokens", "tied")]
claim("in two rooms it even ends lower", all(lower), where=(RANKS, STEPS) == (2, 20))
falls = [each[curve][-1] / each[curve][0] for each in rooms.values() for curve in ("logged", "right")]
claim("and each loss falls by a twelfth at least", max(falls) < 11 / 12, where=STEPS >= 20)
claim("a room takes less than 5 s", max(each["seconds"] for each in rooms.values()) < 5)

# %% [markdown]
# ## 7. A judge that needs no ranks ({minutes} minutes)
#
# PyTorch's package `spmd_types` gives each tensor a type over the ranks, and each operation a rule. A search with it
# found eleven bugs in Megatron-LM (NVIDIA/Megatron-LM#7452, 17 September 2026). There are four types, R, I,
# V and P in its messages. Before the update, a whole weight's gradient has to be R.
#
# | type | values | gradient |
# |---|---|---|
# | replicate | the same on all ranks | a term of the sum on each rank |
# | invariant | the same on all ranks | the same on all ranks |
# | varying | a rank's own | a rank's own |
# | partial | a term of the sum on each rank | the same on all ranks |
#
# A varying tensor may meet a replicated one, and an invariant one has to become replicated first, by `copy_to_ranks`.
# So a rule of the forward pass sees an all-reduce that is missing in the backward pass. The cell below hands the twelve
# steps to the types, without a rank, and then mended ones. Commit: how many of the twelve do the types refuse?

# %% tags=["commit"]
mine_types = commit(refused=None)
### BEGIN SOLUTION
mine_types = commit(refused=6)
### END SOLUTION

# %%
pandas.set_option("display.max_colwidth", None)
said = typed.ask_all()
refused = {name: complaint for name, complaint in said.items() if complaint}
print(f"refused: {len(refused)} of {len(said)}; you: {prediction_text(mine_types['refused'])}")
steps = {"norm": mended_norm, "tokens": mended_tokens, "router": mended_router}
steps |= {"clip": mended_clip, "accumulate": mended_accumulate, "bfloat": mended_bfloat}
accepted = [name for name, complaint in typed.ask_all(steps).items() if complaint == ""]
print("accepted once they are mended:", ", ".join(accepted) or "none")
pandas.DataFrame.from_dict(refused, orient="index", columns=["the types say"])

# %% [markdown]
# The types refuse a sum that is missing or made twice, a number that differs between ranks where it must not, and a
# rounding before the sum. A wrong factor or count, a wait that comes too late, and a gradient that stays on its rank in
# `gathered` have the right types. For the pipeline's messages the package has no rule yet. And it takes your word for
# the type of each weight, which parity does not.

# %% tags=["claim"]
ASKED = said["norm"] is not None
claim("six are refused", [*refused] == [*steps], where=ASKED)
claim("their mended steps are accepted", [*steps] == accepted, where=ASKED)

# %% [markdown]
# ## 8. The whole museum ({minutes} minutes)

# %% tags=["summary"]
table = {
    name: {
        "published": ", ".join(museum.thread(name)),
        "wrong": ", ".join(each["wrong"]),
        "loss off by": f"{largest_difference(each):.1%}",
        "parity": "caught" if each["wrong"] else "–",
        "types": {None: "no verdict", "": "accepted"}.get(said[name], "refused"),
    }
    for name, each in rooms.items()
}
pandas.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# 1. A loss that falls says little about gradients: Adam hides a factor, and other weights make up for a wrong one.
# 2. Parity of one step catches all twelve, names the weights, and takes seconds.
# 3. Types refuse half of them before any rank starts: sums that are missing, made twice or rounded.
#
# | if | then |
# |---|---|
# | one whole weight is wrong, and those above it are right | look for the sum that is missing where it enters the ranks' own region |
# | "off by" is just what the ratio says, as in 2.00 and 100 % | a factor: a mean was taken once too often, or not at all |
# | "off by" is more than the ratio says | a term is missing: a sum, or the other use of a weight |
# | all gradients are near and none is right | look at counts, and at clipping |
# | all gradients are far off | look at what is sent twice, or read before a `wait` |
# | the error is about 10⁻³ | look for a dtype |
#
# **Ask yourself**
#
# <details><summary>1. Why does the loss of the experts' room agree to the last digit that matters?</summary>
#
# Only the length of one gradient is wrong, by a constant factor, and Adam divides it out.
#
# </details>
# <details><summary>2. Would SGD have shown that bug in the loss?</summary>
#
# Not for certain. Its step for the experts would have been too long by the number of ranks, and a longer step may help or harm.
#
# </details>
# <details><summary>3. In the room of the tokens only `embed` is wrong. Why not `up`?</summary>
#
# Each rank computes all of the gradient of its own rows of `up`. Only the gradient of what enters is a sum.
#
# </details>
# <details><summary>4. Why is the head of the clipping room wrong, although no rank has cut it?</summary>
#
# Each rank shrinks it by a factor that comes from its own part of the other weights.
#
# </details>
# <details><summary>5. Parity passes with two ranks. What is left to try?</summary>
#
# Three ranks. A division by 2 is right on two ranks only.
#
# </details>
#
# <details><summary>Parity for a step of your own</summary>
#
# 1. Make the model small, and leave out what is random: dropout, shuffling, atomic sums.
# 2. Draw whole weights and a whole batch from one seed in every process, and let each rank cut its share.
# 3. One process without ranks makes one forward and one backward pass with the whole, and saves the gradients.
# 4. Each rank compares its gradients, after the last collective and before the update, with the same share of those:
#    `(got - right).norm() / right.norm()`, for each weight by name.
# 5. Do it on two and on three ranks, and put a bug in once, to see it caught.
#
# `labkit.check` does this for labkit's programs.
#
# </details>
# <details><summary>Papers and pages</summary>
#
# - The threads of the table, each at https://github.com/ and its name, with `/issues/` for the `#`.
# - `spmd_types`: https://github.com/meta-pytorch/spmd_types, and its guide to local types.
# - Shoeybi et al., "Megatron-LM", 2019, on the two functions of lab 5: https://arxiv.org/abs/1909.08053
#
# </details>
#
# **Next**: compare a step of your own with one device.
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("silent_bugs")
