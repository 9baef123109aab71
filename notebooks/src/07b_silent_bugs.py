# %% [markdown]
# # Lab 7b. The museum of silent bugs
#
# A program hangs or raises, and you know that you have a bug. The bugs of this lab are worse. Each was published, in a
# public program for training. Nothing raises, the loss falls as it should, and the gradient of some weight is
# wrong. After this lab you can
#
# - write parity, a comparison of a step's gradients with one device's;
# - tell from its numbers what kind of mistake a step has, and whether the ranks drift apart;
# - read a step of parallel training, say whose gradient is wrong, and mend it;
# - declare the types of its tensors, and say which of these bugs a type checker refuses before any rank starts.
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
# report. One of the thirteen rooms has no bug. The step gets `weights`, a dict of what this rank holds, and the
# `inputs` and `targets` of all ranks. It leaves gradients in `.grad` and returns the loss that a run would log. Above
# the code of a step stand the shapes that one device has. A weight is whole on every rank unless its line says
# otherwise. Six functions are given:
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
#
# ## 2. Parity ({minutes} minutes)
#
# Weights, inputs and targets come from seeds, so one device can compute the same step with whole weights and all
# tokens. **Parity** compares each gradient on a rank with that device's. Two numbers describe the difference:
#
# - **off by** is ‖got − right‖ / ‖right‖, the length of the difference as a part of the right length.
# - **factor** is got·right / right·right, by which the right gradient comes nearest to the one that the rank got.
#
# Together they say what kind of mistake it is. If somebody forgot a division, every element has the same ratio to the
# right one. Then the factor explains everything: no **rest** is left once the right gradient is multiplied by it. If a
# term of a sum is missing, has a wrong weight or is rounded, the ratio changes from element to element, and a rest is
# left that no factor explains. As the two parts are at a right angle, off by² = (factor − 1)² + rest².
#
# ### Exercise 1: the comparison (•, {minutes} minutes)
#
# It runs on each rank. `got` holds the gradients that a step left on this rank, by name. `whole` holds one device's
# gradients, of whole weights. `cut` says of each weight that is cut over the ranks along which dimension it is, such as
# `{"up": 0}`; a weight without an entry is whole on this rank. Return `{name: (off by, factor)}` for each name in
# `got`, with numbers, not tensors. A stage of a pipeline does not have all weights.
#
# <details><summary>Hint 1</summary>
#
# `part(tensor, dim)` gives this rank's share along a dimension. Compare with that where the weight is cut.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(a - b).norm()` is the length of a difference, `(a * b).sum()` is a·b, and `.item()` makes a number.
#
# </details>


# %%
def parity(got: dict[str, Tensor], whole: dict[str, Tensor], cut: dict[str, int]) -> dict[str, tuple[float, float]]:
    ### BEGIN SOLUTION
    found = {}
    for name, mine in got.items():
        right = part(whole[name], cut[name]) if name in cut else whole[name]
        off_by = (mine - right).norm() / right.norm()
        factor = (mine * right).sum() / right.square().sum()
        found[name] = (off_by.item(), factor.item())
    return found
    ### END SOLUTION


# %%
judged = checks.parity(parity)
judged

# %% [markdown]
# Your comparison now works in every room; if it is not right yet, labkit's own stands in. `visit` runs a step on real
# ranks, compares, and then trains it with Adam beside one device.

# %%
use = {"parity": parity} if judged.ok else None
runs: dict[str, labkit.RunResult] = {}


def visit(room: str, you: dict[str, float | None]) -> pandas.DataFrame:
    ranks = 2 if room == "tied" else RANKS
    runs[room] = labkit.run("silent_bugs", nproc=ranks, room=room, steps=STEPS, device="cpu", use=use)
    return museum.gradient_table(runs[room].ranks[0].reported, you)


# %% [markdown]
# Float32 rounds to about 10⁻⁷ and errors add up, so we call a gradient wrong if it is off by more than 10⁻⁴. The table
# of a visit shows the rank that is furthest off. Its numbers are rounded, but `rest` is computed before the rounding.
#
# In each room read the step. Commit to the weights whose gradient is wrong: 1 for wrong, 0 for right. Then visit it. In
# the rooms with an exercise, copy the step and mend it.
#
# *Takeaway: one wrong factor on the whole gradient leaves no rest. A term that is missing, wrongly weighed or rounded
# does.*
#
# ## 3. A norm ({minutes} minutes)
#
# We walk through the first three rooms. Under sequence parallelism each rank has its share of the tokens between the
# pairs of layers.

# %%
museum.read("norm")

# %% tags=["commit"]
mine_norm = commit(norm=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_norm = commit(norm=1, up=0, down=0, head=0)
### END SOLUTION

# %%
visit("norm", mine_norm)

# %% [markdown]
# `head` and `norm` are alike, because only a rank's own tokens pass through them, but the step adds up only the
# gradient of `head`. In `norm` the terms of the other ranks' tokens are missing. With two ranks the factor is near a
# half, but a rest is left, because the two ranks' terms are not equal.
#
# The column **ranks differ by** is for weights that every rank holds whole: the largest distance of a rank's gradient
# from rank 0's, as a part of the right gradient's length. It may exceed 100 %. Each rank updates its own copy with its
# own gradient. If these differ, so do the copies after the first step, and nothing brings them together again: the
# ranks **drift apart**. Nobody sees it in the loss, since every copy of `norm` still moves in a sensible direction.

# %% tags=["claim"]
at_norm = runs["norm"].ranks[0].reported
claim("the norm's gradient is wrong, and no other", at_norm["wrong"] == ["norm"])
rest = museum.unexplained(at_norm["errors"]["norm"], at_norm["ratios"]["norm"])
claim("a rest is left, and the ranks differ", rest > 0.03 and at_norm["spread"]["norm"] > 0.1)
claim("the factor is near a half", abs(at_norm["ratios"]["norm"] - 0.5) < 0.05, where=RANKS == 2)
claim("the ranks agree on the gradient of head", at_norm["spread"]["head"] == 0)


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
# ## 4. Tokens that do not count ({minutes} minutes)
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
visit("counts", mine_counts)

# %% [markdown]
# Both gradients are near the right ones, and neither is right. A mean of the ranks' means is not the mean of all
# tokens: a token weighs more where it has fewer companions. No term is missing, but terms weigh wrongly, so a rest is
# left. No rank drifts, because all take the same wrong step. The mend divides by the number of tokens on all ranks.
# Here every rank has all `targets` and can count; in a real program the number takes an all-reduce.
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
# Parity sees this bug only because the ranks count different numbers of tokens. In the batch of the room `unwaited`
# every token has a target, and there the same step passes:

# %%
with_equal_counts = checks.mended(museum.open_room("counts").step, "unwaited")
with_equal_counts

# %% tags=["claim"]
at_counts = runs["counts"].ranks[0].reported
claim("both gradients are wrong", at_counts["wrong"] == ["first", "last"])
claim("they are near", all(abs(ratio - 1) < 0.25 for ratio in at_counts["ratios"].values()), where=RANKS == 2)
claim("with equal counts the step passes", with_equal_counts.state != "wrong")
claim("no rank drifts", max(at_counts["spread"].values()) == 0)

# %% [markdown]
# *Takeaway: divide a sum by a number of tokens that all ranks share, never a mean by the number of ranks.*
#
# ## 5. Experts ({minutes} minutes)
#
# Under expert parallelism an expert lives on one rank. The tokens come to it from all ranks, and go back. `choose`
# gives 1 where a token goes to an expert, and 0 elsewhere. The other weights are whole, and their gradients are
# averaged.

# %%
museum.read("experts")

# %% tags=["commit"]
mine_experts = commit(embed=None, experts=None, head=None)
### BEGIN SOLUTION
mine_experts = commit(embed=0, experts=1, head=0)
### END SOLUTION

# %%
visit("experts", mine_experts)

# %% [markdown]
# Here no rest is left: it is a factor, and the factor is the number of ranks. Each rank's loss is a mean over its own
# tokens, and the loss of the run is the mean of those. The backward pass of `sum_and_share` brings the gradients of all
# ranks' losses to the expert, so its gradient is that of their sum, and nobody divides. For `embed` and `head` the loop
# adds up and divides. With 64 ranks the experts' gradient would be 64 times too large.
#
# ```diff
#       weights[name].grad /= dist.get_world_size()
# + weights["experts"].grad /= dist.get_world_size()
# ```
#
# The loss does not show it (section 8). Adam divides a gradient by its own size, so a constant factor does almost
# nothing, where with plain SGD it would be a factor in the learning rate.
#
# *Takeaway: with Adam the loss hardly shows a factor. A comparison of gradients does.*

# %% tags=["claim"]
at_experts = runs["experts"].ranks[0].reported
claim("the experts' gradient is wrong", at_experts["wrong"] == ["experts"])
claim("by a factor, the number of ranks", abs(at_experts["ratios"]["experts"] - RANKS) < 1e-3)
claim("and nothing else", museum.unexplained(at_experts["errors"]["experts"], at_experts["ratios"]["experts"]) < 1e-2)
off = max(abs(here / right - 1) for here, right in zip(at_experts["logged"], at_experts["right"], strict=True))
claim("the loss does not show it", off < 1e-3)

# %% [markdown]
# ## 6. Three rooms to mend ({minutes} minutes)
#
# Copy the lines of the step from the output into your answer, and change what is wrong. A check runs your step on two
# and on three ranks.
#
# ### Exercise 2: one text, many features (•, {minutes} minutes)
#
# Tensor parallelism, as in lab 5: all ranks have all tokens, and each computes its features of the pair `up` and
# `down`.
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
visit("tokens", mine_tokens)


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
# The gradient of `tokens` has two terms. What flows back past the pair, by the addition, is whole on every rank. What
# flows back through the pair comes from this rank's features alone. An all-reduce of `embed.grad` would add up both,
# and so count the first term once for each rank. The sum belongs where the pair begins, because only the second term
# passes there.
#
# </details>
#
# ### Exercise 3: pictures and texts (•, {minutes} minutes)
#
# Here `inputs` are pictures, and `targets` are their texts. A contrastive loss compares each picture with the texts of
# all ranks, so the ranks gather their texts.
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
visit("gathered", mine_gathered)


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
# A text has a gradient from its own rank's loss alone. With `gather_from_ranks` the backward pass adds up those from
# all ranks' losses. The division afterwards stays right, because the loss of the run is the mean of the ranks' losses.
#
# </details>
#
# ### Exercise 4: the word after the next (•, {minutes} minutes)
#
# A second head predicts one word further, so `targets` has two columns. Its loss counts 0.3, and is not logged. Both
# losses are means over the tokens of all ranks: one is a sum divided by the number of all tokens, the other a rank's
# mean, weighed by its share of the tokens.
#
# <details><summary>Hint</summary>
#
# `all_reduce` works in place. How many tensors are there behind the names `own` and `everyone`?
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
visit("extra", mine_extra)


# %%
def mended_extra(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    ### BEGIN SOLUTION
    hidden = torch.tanh(part(inputs) @ weights["trunk"].T)
    first, second = part(targets).T
    own = (first >= 0).sum()
    everyone = own.clone()
    dist.all_reduce(everyone)
    loss = cross_entropy(hidden @ weights["head"].T, first, reduction="sum") / everyone
    more = 0.3 * cross_entropy(hidden @ weights["extra"].T, second) * own / everyone
    (loss + more).backward()
    for weight in weights.values():
        dist.all_reduce(weight.grad)
    return total(loss)
    ### END SOLUTION


# %%
checks.mended(mended_extra, "extra")

# %% [markdown]
# <details><summary>What the bug did</summary>
#
# Both names stand for one tensor, and the all-reduce overwrites it. So a rank's share of the tokens is 1, and the
# second loss counts once for each rank. Only that head feels the factor alone; in `trunk` both losses meet, and a rest
# is left.
#
# </details>
#
# *Takeaway: mend a gradient where its terms are still apart, not where they have met.*
#
# ## 7. Seven rooms to judge ({minutes} minutes)
#
# In these rooms you commit and visit. Read what is in the fold afterwards.
#
# **The router.** Every rank has all tokens, and the features of every expert are cut over the ranks. The scores of the
# router `gate` are the same on all ranks.

# %%
museum.read("router")

# %% tags=["commit"]
mine_router = commit(gate=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_router = commit(gate=1, up=0, down=0, head=0)
### END SOLUTION

# %%
visit("router", mine_router)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# Tokens and scores enter the region where each rank has a part of the features, so the gradient of each is a sum over
# the ranks. The inputs have no gradient here, but `gate` has: each rank keeps one term of it, and the copies drift
# apart.
#
# ```diff
#   scores = torch.softmax(inputs @ weights["gate"].T, dim=1)
# + tokens, scores = copy_to_ranks(inputs), copy_to_ranks(scores)
# - inner = gelu(torch.einsum("td,ehd->teh", inputs, weights["up"]))
# + inner = gelu(torch.einsum("td,ehd->teh", tokens, weights["up"]))
# ```
#
# </details>
#
# **A norm that clips.** Before the update the whole gradient is scaled to a norm of 0.1 at most.

# %%
museum.read("clip")

# %% tags=["commit"]
mine_clip = commit(up=None, down=None, head=None)
### BEGIN SOLUTION
mine_clip = commit(up=1, down=1, head=1)
### END SOLUTION

# %%
visit("clip", mine_clip)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# `down` is taken for a whole weight, so only rank 0's part of it counts. The norm is too small, and each rank shrinks
# its gradients too little. All are then wrong by one factor, without a rest.
#
# ```diff
# - mine = squares["up"]
# - if dist.get_rank() == 0:
# -     mine += squares["down"] + squares["head"]
# + mine = squares["up"] + squares["down"]
# + if dist.get_rank() == 0:
# +     mine += squares["head"]
# ```
#
# </details>
#
# **Another norm.** Tensor parallelism again: every rank has all tokens, and `scale` is the norm's weight.

# %%
museum.read("scale")

# %% tags=["commit"]
mine_scale = commit(scale=None, up=None, down=None, head=None)
### BEGIN SOLUTION
mine_scale = commit(scale=0, up=0, down=0, head=0)
### END SOLUTION

# %%
visit("scale", mine_scale)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# This room is right. In section 3 a rank saw its own tokens, so the norm's gradient was one term of a sum. Here every
# rank sees all tokens, and `copy_to_ranks` adds up what comes back through the cut layers, before it reaches the norm.
# An all-reduce at the end would make the gradient too large by the number of ranks.
#
# </details>
#
# **A share of the words.** Each rank scores its own words of the vocabulary. The targets are smoothed: 0.9 of the loss
# is that of the right word, and 0.1 is the mean over all 12 words.

# %%
museum.read("smoothing")

# %% tags=["commit"]
mine_smoothing = commit(trunk=None, head=None)
### BEGIN SOLUTION
mine_smoothing = commit(trunk=1, head=1)
### END SOLUTION

# %%
visit("smoothing", mine_smoothing)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# Each rank takes the mean over its own words, so with two ranks the smoothing pulls at them twice as hard. It is a
# tenth of the loss, and most of it cancels in the mean over the tokens. So the loss hardly moves.
#
# ```diff
# - average = logits.mean(dim=1)  # the smoothed part
# + average = sum_over_ranks(logits.sum(dim=1)) / 12
# ```
#
# </details>
#
# **One table at both ends.** A pipeline of two stages. The first looks words up in the table `words`, and the last
# scores them with it.

# %%
museum.read("tied")

# %% tags=["commit"]
mine_tied = commit(words=None, first=None, last=None)
### BEGIN SOLUTION
mine_tied = commit(words=1, first=0, last=0)
### END SOLUTION

# %%
visit("tied", mine_tied)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# Rank 0 has the term of the lookup, rank 1 that of the scores. Each updates its own copy, so two tables grow out of
# one. Both ranks reach the line with `return`, so the all-reduce stands before it.
#
# ```diff
#       dist.send(received.grad, dst=0)
# + dist.all_reduce(weights["words"].grad)
#   return total(loss)
# ```
#
# </details>
#
# **A sum that is on its way.** An asynchronous all-reduce is meant to overlap with other work. The sleep makes rank 1
# late, and `288` is the number of elements of each weight.

# %%
museum.read("unwaited")

# %% tags=["commit"]
mine_unwaited = commit(first=None, last=None)
### BEGIN SOLUTION
mine_unwaited = commit(first=1, last=1)
### END SOLUTION

# %%
visit("unwaited", mine_unwaited)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# `all_reduce` with `async_op=True` returns at once. Ranks divide before each other's numbers have arrived, and mostly
# keep half of their own. On a lucky day the sum is there in time, and the bug is gone.
#
# ```diff
#   handle = dist.all_reduce(row, async_op=True)
# + handle.wait()
#   mean = row / dist.get_world_size()
# - handle.wait()
# ```
#
# To wait at once gives up the overlap. A real program puts other work between the two lines; on a GPU, `wait` lets the
# stream wait, and not the program.
#
# </details>
#
# **Fewer digits.** The gradients are meant to be added up in float32.

# %%
museum.read("bfloat")

# %% tags=["commit"]
mine_bfloat = commit(first=None, last=None)
### BEGIN SOLUTION
mine_bfloat = commit(first=0, last=1)
### END SOLUTION

# %%
visit("bfloat", mine_bfloat)

# %% [markdown]
# <details><summary>What happens here</summary>
#
# bfloat16 has 8 bits for the digits, so each rounding is off by up to 2⁻⁸, about 0.4 %. An error of this size is no
# rounding of float32; it may be a dtype, or a small term that is missing.
#
# ```diff
# - sent["last"] = sent["last"].bfloat16()
# ```
#
# </details>
#
# *Takeaway: a missing sum shows if you ask of each whole weight: is what flows back into it whole on every rank, or one
# term of a sum?*
#
# ## 8. What the loss showed, and what the table ({minutes} minutes)
#
# Every visit also trained, with the bug on the ranks and without it on one device.

# %%
rooms = {name: run.ranks[0].reported for name, run in runs.items() if name != "scale"}
figure, axes = plt.subplots(3, 4, figsize=(9, 5), layout="constrained", sharex=True)
for ax, (name, each) in zip(axes.flat, rooms.items(), strict=True):
    ax.plot(each["logged"], color="tab:red", label="with the bug")
    ax.plot(each["right"], "k--", label="one device")
    ax.set_title(name, fontsize=9)
axes[0, 0].legend(fontsize=7)
figure.supylabel("loss", fontsize=9)
_ = figure.supxlabel(f"step ({runs['norm'].stamp.splitlines()[0]})", fontsize=7)

# %% [markdown]
# *The loss of each room with a bug. The red curve alone tells nothing, and in `tokens` and `tied` it even ends lower.
# In `counts` it differs from the start, since that run logs a mean of means.*


# %%
def largest_difference(each: dict) -> float:
    return max(abs(here / right - 1) for here, right in zip(each["logged"], each["right"], strict=True))


# %% tags=["claim"]
claim("parity catches twelve of twelve", sum(bool(each["wrong"]) for each in rooms.values()) == 12)
claim("and finds nothing where nothing is wrong", runs["scale"].ranks[0].reported["wrong"] == [])
claim("each loss is within 2 % of one device's", max(map(largest_difference, rooms.values())) < 0.02, where=RANKS == 2)
lower = [rooms[name]["logged"][-1] < rooms[name]["right"][-1] for name in ("tokens", "tied")]
claim("in two rooms it even ends lower", all(lower), where=(RANKS, STEPS) == (2, 20))
falls = [each[curve][-1] / each[curve][0] for each in rooms.values() for curve in ("logged", "right")]
claim("and each loss falls by a twelfth at least", max(falls) < 11 / 12, where=STEPS >= 20)

# %% [markdown]
# ### Exercise 5: only the table (••, {minutes} minutes)
#
# In a program of your own you have the table before you know which lines to read. `rows` holds
# `(off by, factor, ranks differ by)` for each weight, unrounded and as parts: 0.5 for 50 %. The third is `None` for a
# weight that is not whole on every rank. Return the first of these that fits:
#
# | answer | what the room has |
# |---|---|
# | `"right"` | no wrong gradient |
# | `"factor"` | a wrong factor; some weight feels it alone, though others may have a rest, as in `extra` |
# | `"small"` | no error of 1 %: a dtype, or a small term of the loss |
# | `"sum"` | a sum that is missing or came too late: the ranks differ |
# | `"terms"` | a wrong gradient, the same on all ranks: terms of it are lost or weigh wrongly |
#
# The check asks about all rooms, and about four tables that you have not seen. In float32 a rest is seldom exactly 0.
#
# <details><summary>Hint 1</summary>
#
# Keep the weights that are off by more than 10⁻⁴. A rest below a hundredth of `off by` is rounding.
#
# </details>
# <details><summary>Hint 2</summary>
#
# rest² = off by² − (factor − 1)² may come out below 0. Compare squares, and there is no root to take.
#
# </details>


# %%
def diagnose(rows: dict[str, tuple[float, float, float | None]]) -> str:
    ### BEGIN SOLUTION
    wrong = [row for row in rows.values() if row[0] > 1e-4]
    if not wrong:
        return "right"
    if any(off_by**2 - (factor - 1) ** 2 < (0.01 * off_by) ** 2 for off_by, factor, _ in wrong):
        return "factor"
    if max(off_by for off_by, _, _ in wrong) < 0.01:
        return "small"
    return "sum" if any((differ or 0) > 1e-4 for _, _, differ in wrong) else "terms"
    ### END SOLUTION


# %%
diagnosed = checks.diagnosed(diagnose)
diagnosed

# %% [markdown]
# *Takeaway: the loss does not show that there is a bug. The table shows of which kind it is.*
#
# ## 9. A judge that needs no ranks ({minutes} minutes)
#
# PyTorch's package `spmd_types` gives each tensor a type over the ranks, and each operation a rule. There are four
# types, and the gradient of a tensor has a type of its own:
#
# | type | values | type of its gradient |
# |---|---|---|
# | R, replicate | the same on all ranks | P |
# | I, invariant | the same on all ranks | I |
# | V, varying | a rank's own | V |
# | P, partial | one term of a sum on each rank | R |
#
# Three rules find bugs:
#
# - A varying tensor may meet a replicated one. An invariant one has to become replicated first, by `copy_to_ranks`,
#   because what flows back is only a term. So a rule of the forward pass sees a sum that the backward pass lacks.
# - A partial tensor may pass only linear operations. Rounding is none: a sum of rounded terms is not the rounded sum.
# - Before the update, the gradient of a whole weight has to be the same on all ranks. That of an R weight is P, so the
#   step has to sum it. In its messages labkit writes R for every gradient that is the same on all ranks.
#
# ### Exercise 6: declare the types (•, {minutes} minutes)
#
# The package derives the type of every result, but not of what the step begins with. You declare that, for the step as
# it is meant and not for its bug. In `counts`, for example, `first` is whole, and each rank's gradient of it comes from
# the rank's own tokens. It is a term of a sum, P, so `first` is R, and so is `last`. A gradient of `inputs` would be
# zero on a rank outside its own tokens: a term again, so `inputs` is R.
#
# Return the types of the `inputs` and of each weight as `{"inputs": "R", …}`, for the rooms `tokens` and `norm`.
#
# <details><summary>Hint</summary>
#
# `up` and `down` are cut, so they vary. In `tokens` every rank computes with all tokens, so a whole weight should get
# the same gradient on all ranks. In `norm` each rank takes its own tokens.
#
# </details>


# %%
def declared(room: str) -> dict[str, str]:
    ### BEGIN SOLUTION
    whole = "I" if room == "tokens" else "R"
    names = {"tokens": ("inputs", "embed", "head"), "norm": ("inputs", "norm", "head")}[room]
    return {**dict.fromkeys(names, whole), "up": "V", "down": "V"}
    ### END SOLUTION


# %%
types_passed = checks.declared(declared)
types_passed

# %% [markdown]
# With your types, the package judges the two steps as published and as mended. If yours are not right yet, labkit's
# stand in. "accepted" means that it found nothing.

# %%
for name, mended in {"tokens": mended_tokens, "norm": mended_norm}.items():
    kinds = declared(name) if types_passed.ok else typed.declare(name)
    for what, step in {"as published": None, "mended": mended}.items():
        print(f"{name}, {what}: {typed.verdict(name, step, kinds)}")

# %% [markdown]
# The next cell asks about all rooms, without a rank. One of them, `tied`, it cannot judge; commit:
# how many of the other eleven bugs do the types refuse?

# %% tags=["commit"]
mine_types = commit(refused=None)
### BEGIN SOLUTION
mine_types = commit(refused=5)
### END SOLUTION

# %%
pandas.set_option("display.max_colwidth", None)
said = typed.ask_all()
refused = {name: complaint for name, complaint in said.items() if complaint}
ASKED = said["norm"] is not None
print(f"refused: {len(refused)} of 11; you: {prediction_text(mine_types['refused'])}")
pandas.DataFrame.from_dict(refused, orient="index", columns=["the types say"])

# %% [markdown]
# The types refuse a sum that is missing, a number that differs between ranks where it must not, and a rounding before
# the sum. They cannot see a wrong factor or count, a weight that is taken for whole, a wait that comes too late, or a
# gradient that stays on its rank as in `gathered`: all these have the right types. And they take your word for what the
# step begins with, which parity does not.
#
# *Takeaway: types ask where sums belong, before any rank starts. Parity asks whether the numbers are right.*

# %% tags=["claim"]
claim("five are refused", [*refused] == ["norm", "tokens", "router", "smoothing", "bfloat"], where=ASKED)

# %% [markdown]
# ## 10. The whole museum ({minutes} minutes)

# %% tags=["summary"]
everything = rooms | {"scale": runs["scale"].ranks[0].reported}
table = {
    name: {
        "published": ", ".join(filter(None, museum.thread(name))) or "–",
        "wrong": ", ".join(each["wrong"]) or "nothing",
        "loss off by": f"{largest_difference(each):.1%}",
        "you": diagnose(museum.table_rows(each)) if diagnosed.ok else "–",
        "types": {None: "not asked", "": "accepted"}.get(said[name], "refused"),
    }
    for name, each in everything.items()
}
if ASKED:
    table["tied"]["types"] = "no rule for send and recv"
pandas.DataFrame.from_dict(table, orient="index")

# %% [markdown]
# For `tied` the types have no verdict. The package has a rule for each collective, in which all ranks take part in the
# same call. In a pipeline one rank calls `send` where the other calls `recv`, and for such a pair it has none yet.
#
# 1. A loss curve alone says little about gradients, be they off by a factor or by a term.
# 2. Parity of one step caught all twelve, because each was chosen for its wrong gradient. Parity sees nothing of the
#    optimizer, of the order of the data, or of what its batch and its number of ranks hide.
# 3. Types refuse five of them before any rank starts: mostly sums that are missing.
#
# | if | then |
# |---|---|
# | no rest is left | a factor: look for a mean that was taken once too often or not at all, or for clipping |
# | the error is below 1 % | look for a dtype, or for a small term of the loss |
# | a rest is left, and the ranks differ | a sum is missing, or came too late: where the weight enters the ranks' own region, or at its other use |
# | a rest is left, and the ranks agree | look at counts, for a factor on one of several losses, or for a gradient that stayed on its rank |
#
# **Ask yourself**
#
# <details><summary>1. Why does the loss of the experts' room agree to a tenth of a per cent?</summary>
#
# Only the length of one gradient is wrong, by a constant factor, and Adam divides it out.
#
# </details>
# <details><summary>2. Would SGD have shown that bug in the loss?</summary>
#
# Not for certain. Its step for the experts would have been too long by the number of ranks, and a longer step may help
# or harm.
#
# </details>
# <details><summary>3. In the room of the tokens only `embed` is wrong. Why not `up`?</summary>
#
# Each rank computes all of the gradient of its own rows of `up`. Only the gradient of what enters is a sum.
#
# </details>
# <details><summary>4. Why is the head of the clipping room wrong, although no rank has cut it?</summary>
#
# One norm scales all gradients, and the norm is too small.
#
# </details>
# <details><summary>5. Parity passes with two ranks. What is left to try?</summary>
#
# Three ranks, because a division by 2 is right on two ranks only. And a batch in which the ranks have different numbers
# of tokens, because `counts` passes on any other.
#
# </details>
#
# <details><summary>Parity for a step of your own</summary>
#
# 1. Make the model small, and leave out what is random: dropout, shuffling, atomic sums.
# 2. Draw whole weights and a whole batch from one seed in every process, and let each rank cut its share.
# 3. One process without ranks makes one forward and one backward pass with the whole, and saves the gradients.
# 4. Each rank compares its gradients, after the last collective and before the update, with the same share of those:
#    your function of exercise 1.
# 5. Do it on two and on three ranks with unequal numbers of tokens, and put a bug in once, to see it caught.
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
