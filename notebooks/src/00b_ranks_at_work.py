# %% [markdown]
# # Lab 0b. Ranks at work
#
# This companion of lab 0 has what you meet once your own programs run on ranks. After it you can
#
# - let only some ranks talk, and say when a barrier is needed;
# - count the bytes that a library really sends, and tell whether a formula holds for it;
# - measure the latency and bandwidth of an all-reduce on your machine, and predict with them;
# - say how many tokens a GPU needs in a step, so that it computes longer than it sends.
#
# You need lab 0. The notebook takes about {core_minutes} minutes, and its parts can be read in any order, but section 3
# before section 4.
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import time

import pandas
import torch
from torch import distributed as dist

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.plots.collectives import all_reduce_rounds, fastest_all_reduce_times
from labkit.theory import collectives as theory
from labkit_course.checks import collectives_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="0b")

# %% tags=["parameters"] small={"RANKS": 3, "REPEATS": 4} points=[[2,1],[3,5],[8,30]]
RANKS: int = 2  # ranks of the measured run
REPEATS: int = 15  # rounds in which each message is timed

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nobody to talk to, and more than 8 take minutes")
require("REPEATS", REPEATS, at_least=1, because="without a round nothing is measured")
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank, else the CPU

# %% [markdown]
# ## 1. Groups and barriers ({minutes} minutes)
#
# The ranks that talk with each other are a **process group**. At first there is one group, with all ranks. `new_group`
# makes smaller ones, such as the ranks of one host. It is a call of all ranks: everyone makes all groups, in the same
# order, even those to which it does not belong. Below, four ranks make two groups, and each group adds up the numbers of its ranks. Commit:
# what does rank 3 hold afterwards?

# %% tags=["commit"]
mine_sum = commit(rank_3_holds=None)
### BEGIN SOLUTION
mine_sum = commit(rank_3_holds=5)
### END SOLUTION

# %%
# %%torchrun -n 4 --name grouped
from labkit.rank import report  # sends values home to the notebook

dist.init_process_group()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
x = torch.tensor(dist.get_rank())
dist.all_reduce(x, group=groups[dist.get_rank() // 2])
report(x=x)

# %%
held = [rank.reported["x"].item() for rank in grouped.ranks]
print(f"ranks 0 to 3 hold {held}; rank 3, by you: {prediction_text(mine_sum['rank_3_holds'])}")

# %% [markdown]
# A **barrier** returns when all ranks have reached it. Use it where a rank must not run ahead: rank 0 downloads a file,
# and the others wait until the file is there. Below rank 0 is late by a second, and the others wait for it.

# %%
# %%torchrun -n 4
dist.init_process_group()
if dist.get_rank() == 0:
    time.sleep(1)
start = time.perf_counter()
dist.barrier()
f"waited for more than half a second: {time.perf_counter() - start > 0.5}"

# %% [markdown]
# Training hardly ever needs a barrier, because no rank gets the result of an all-reduce before all ranks have joined
# it.
#
# *Takeaway: every rank makes every group, in the same order. A barrier is for files and for measurements (section 4),
# and rarely for training.*
#
# ## 2. Messages between GPUs ({minutes} minutes)
#
# Why did lab 0 start its messages in one batch? Two calls one after the other, `isend` and then `irecv`, work on CPUs,
# and may hang on GPUs. NCCL, the library between GPUs, works off a rank's calls in turn, and a send ends only when its
# receiver has come to the receive. If all ranks send first, nobody comes to a receive. On CPUs the plain `send` shows the
# same. This cell hangs on purpose, and is stopped after 5 seconds. In which call will each rank stand?

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 5 --fails
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mine, arrived = torch.tensor([float(rank)]), torch.empty(1)
dist.send(mine, (rank + 1) % ranks)
dist.recv(arrived, (rank - 1) % ranks)

# %% [markdown]
# <details><summary>Why do some programs deadlock only in real training?</summary>
#
# Some libraries have a buffer for small messages, NCCL among them on some links, so that the sender goes on at once. A
# large message waits for its receiver. Then the program works in a test with small tensors, and hangs with large ones.
#
# </details>
#
# Each rank stands in its `send`, since nobody comes to a `recv`. The cure is to start both together, and then to wait:

# %%
# %%torchrun -n 4 --name batched
from labkit.rank import report

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mine, arrived = torch.tensor([float(rank)]), torch.empty(1)
ring = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)]
for message in dist.batch_isend_irecv(ring):
    message.wait()
report(arrived=arrived)

# %%
[rank.reported["arrived"].item() for rank in batched.ranks]

# %% [markdown]
# *Takeaway: messages that start in one batch (`dist.batch_isend_irecv`) run on CPUs and on GPUs.*
#
# ## 3. An all-reduce in two halves ({minutes} minutes)
#
# FSDP (lab 2) uses the two halves of an all-reduce at different times: the reduce-scatter for gradients, and the
# all-gather for parameters, just before they are needed. Here you put the halves together.
#
# ### Exercise 1: two collectives make one (••, {minutes} minutes)
#
# Build an all-reduce from a reduce-scatter and an all-gather, without `dist.all_reduce`, and return the sum as a new
# tensor. The length of `mine` is a multiple of `ranks`.
#
# <details><summary>Hint 1</summary>
#
# The reduce-scatter takes a list of `ranks` parts, and `chunk` gives a tuple. The all-gather takes one part, and fills
# such a list.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `dist.reduce_scatter(part, list_of_parts)` writes into `part`, `dist.all_gather(list_of_parts, part)` into the list.
#
# </details>


# %%
def all_reduce_in_two(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.chunk(ranks))
    part = torch.empty_like(parts[rank])
    dist.reduce_scatter(part, parts)
    sums = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(sums, part)
    return torch.cat(sums)
    ### END SOLUTION


# %%
checks.all_reduce_in_two(all_reduce_in_two)

# %% [markdown]
# *Takeaway: after a reduce-scatter each rank holds its part of the sum, and an all-gather gives all parts to all
# ranks.*
#
# ## 4. Look at the wire ({minutes} minutes)
#
# Lab 0 computed bytes on the wire by the formula of a ring. On Linux you can look. The ranks of this machine talk over
# its loopback interface, and the system counts all bytes on it, those of other programs, too. Four ranks are about to
# make three collectives of a tensor that has 4 MB as a whole. In a ring, all four ranks together send 24 MB for the
# all-reduce and 12 for the all-gather. Commit: how many MB will you count for the reduce-scatter?

# %% tags=["commit"]
mine_wire = commit(reduce_scatter_mb=None)
### BEGIN SOLUTION
mine_wire = commit(reduce_scatter_mb=12)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --name wire
from pathlib import Path

from labkit.rank import report


def sent_mb():
    """Return what the loopback interface has sent so far, in MB."""
    lines = Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else []
    return sum(int(line.split()[9]) / 1e6 for line in lines if line.strip().startswith("lo:"))


def measure(name, collective, handed_mb):
    dist.barrier()
    before = sent_mb()
    dist.barrier()
    collective()
    dist.barrier()
    if dist.get_rank() == 0:
        ring = 4 * theory.collective_wire_bytes(name, handed_mb, 4)
        print(f"{name:15} {sent_mb() - before:5.1f} MB on the wire; a ring sends {ring:.0f}")
        report(**{name: sent_mb() - before})


dist.init_process_group()
x = torch.ones(1_000_000)
parts = list(x.chunk(4))
measure("all_reduce", lambda: dist.all_reduce(x), 4)
measure("all_gather", lambda: dist.all_gather([torch.empty_like(part) for part in parts], parts[0]), 1)
measure("reduce_scatter", lambda: dist.reduce_scatter(torch.empty_like(parts[0]), parts), 4)

# %% tags=["nbval-ignore-output"]
sent = wire.ranks[0].reported
print(f"reduce-scatter: {sent['reduce_scatter']:.1f} MB; you: {prediction_text(mine_wire['reduce_scatter_mb'], '.1f')}")

# %% [markdown]
# The all-reduce and the all-gather send about what a ring sends. With torch 2.13, gloo's reduce-scatter sends as much as
# an all-reduce. So an all-reduce in two halves, like yours in exercise 1, is right, and
# yet puts 24 + 12 = 36 MB on this wire instead of 24.
#
# *Takeaway: a formula for the wire assumes an algorithm. Only a count tells whether it holds for your library.*
#
# ## 5. Latency and bandwidth of your machine ({minutes} minutes)
#
# Lab 0's model says that m calls that are handed b bytes in total take `m * alpha + b * beta`. Here alpha and beta are
# those of a whole all-reduce between this number of ranks. You fit them to measured all-reduces, and predict others.
#
# ### Exercise 2: find alpha and beta (••, {minutes} minutes)
#
# `rounds` holds measurements: for each size in bytes, the seconds of several rounds. Other programs on the machine can
# only make a message slower. Return alpha, in seconds, and beta, in seconds a byte. A line through the smallest and the
# largest size will do.
#
# <details><summary>Hint 1</summary>
#
# First choose one time for each size. Which round was disturbed least?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Beta is the cost of additional bytes: a difference of times over a difference of sizes. What the small message takes
# beyond its bytes is alpha.
#
# </details>


# %%
def fitted(rounds: dict[int, list[float]]) -> tuple[float, float]:
    ### BEGIN SOLUTION
    fastest = {size: min(times) for size, times in rounds.items()}
    small, large = min(fastest), max(fastest)
    beta = (fastest[large] - fastest[small]) / (large - small)
    return fastest[small] - beta * small, beta
    ### END SOLUTION


# %%
checks.fitted(fitted)

# %% [markdown]
# Now real all-reduces of seven sizes, and your line through two of them:

# %% tags=["nbval-ignore-output"]
messages = labkit.run("all_reduce", nproc=RANKS, repeats=REPEATS)
found = fitted(all_reduce_rounds(messages).groupby(level=0).agg(list).to_dict())
is_yours = bool(found) and min(found) > 0
all_sizes = theory.fit_alpha_beta(fastest_all_reduce_times(messages).to_dict())
yours = theory.AlphaBeta(*found) if is_yours else all_sizes
_ = plots.all_reduce_time_by_size(messages, network=yours)
for whose, fit in {"drawn": yours, "all seven sizes": all_sizes}.items():
    print(f"{whose}: alpha {fit.alpha_s * 1e6:.0f} µs, beta {fit.beta_s_per_byte * 1e12:.0f} µs a MB")

# %% [markdown]
# *Grey: each round; blue: the fastest; dashed: alpha + bytes · beta. Well below α / β the size hardly matters.*
#
# If the line below the figure says *disturbed*, other programs used the cores: run the cell again before you go on.
#
# A line through two sizes believes both of them, and one may have been unlucky in all its rounds. The second fit listens to all seven: it makes the sum of
# the squared *relative* errors smallest, so that a small message counts as much as a large one. The same run also sent 4 MiB, 4.2 MB, in 1 to 64 all-reduces. Commit, from the
# alpha and beta of all seven sizes: how many milliseconds do 64 take?

# %% tags=["commit"]
mine_time = commit(pieces_64_ms=None)
### BEGIN SOLUTION
mine_time = commit(pieces_64_ms=1e3 * all_sizes.seconds(2**22, messages=64))
### END SOLUTION

# %% tags=["nbval-ignore-output"]
_ = plots.all_reduce_time_by_count(messages, network=all_sizes)
pieces = fastest_all_reduce_times(messages, "pieces")
print(f"64 all-reduces: {pieces[64] * 1e3:.1f} ms; you: {prediction_text(mine_time['pieces_64_ms'], '.1f')} ms")
print(f"by the line through two sizes: {yours.seconds(2**22, messages=64) * 1e3:.1f} ms")

# %% tags=["claim"]
claim("64 messages take twice as long as one, or longer", pieces[64] > 2 * pieces[1])

# %% [markdown]
# *The same bytes in 1 to 64 all-reduces; dashed, the prediction from alpha and beta.*
#
# <details><summary>Why are the bars not at the dashed lines?</summary>
#
# Two numbers are a rough model of seven sizes. And the same message may take a different time in another minute of the
# same run: compare 1 × 4 MiB here with its dot in the figure above.
#
# </details>
#
# *Takeaway: fit the fastest round of each size, because a disturbance only ever adds time, and do not trust two sizes
# alone.*
#
# ## 6. Data for a test ({minutes} minutes)
#
# Suppose that somebody forgot the all-reduce. A test compares the gradient of that code with the averaged one, as the
# cell below does. The test runs twice. In case 1 all ranks draw their samples with the same seed, and in case 2 each rank has a seed of its
# own. Commit: in which case, 1 or 2, does the test find the mistake?

# %% tags=["commit"]
mine_case = commit(finds=None)
### BEGIN SOLUTION
mine_case = commit(finds=2)
### END SOLUTION

# %%
# %%torchrun -n 4 --name tested
from labkit.rank import report

dist.init_process_group()


def gradient(seed, averaged):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    if averaged:
        dist.all_reduce(model.weight.grad)
        model.weight.grad /= dist.get_world_size()
    return model.weight.grad


equal = torch.allclose(gradient(0, averaged=False), gradient(0, averaged=True))
own = torch.allclose(gradient(dist.get_rank(), averaged=False), gradient(dist.get_rank(), averaged=True))
report(passes_1=torch.tensor(equal), passes_2=torch.tensor(own))

# %%
passes = [bool(tested.ranks[0].reported[f"passes_{case}"]) for case in (1, 2)]
print(f"without the all-reduce the test passes in case 1: {passes[0]}, in case 2: {passes[1]}")
print(f"it finds the mistake in case {passes.index(False) + 1}; you: {prediction_text(mine_case['finds'])}")

# %% [markdown]
# The mean of four equal gradients is the gradient itself. So with equal samples a missing average goes unseen.
#
# *Takeaway: a test of distributed code needs ranks whose data differ.*
#
# ## 7. How large a batch keeps GPUs busy? ({minutes} minutes)
#
# The all-reduce of a large model takes as long as its bytes need, because latency hardly counts. Assume that nothing
# overlaps. Then a rank spends more than half of its time on computing when
#
# `6 * P * T / F  >  2 * (n - 1) / n * g * P / B`
#
# On the left, a step takes about 6 operations for each of P parameters and T tokens of a rank (2 in the forward pass
# and 4 in the backward pass), at F operations a second. On the right, n ranks average gradients of g bytes each in a
# ring, whose links carry B bytes a second. F is what GPUs reach in practice, and B is from the data sheet.
#
# ### Exercise 3: tokens in a step (•, {minutes} minutes)
#
# Solve the inequality for T. How many tokens does a GPU need in a step, at least?
#
# <details><summary>Hint</summary>
#
# Set both sides equal. P cancels.
#
# </details>


# %%
def balancing_tokens(flops_per_s: float, bytes_per_s: float, ranks: int, gradient_bytes: int) -> float:
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 6
    ### END SOLUTION


# %%
checks.balancing_tokens(balancing_tokens)

# %% [markdown]
# Take bfloat16 gradients (g = 2) on the reference cluster of lab 0, whose GPUs reach 400 · 10¹² operations a second.
# Your function answers for the eight GPUs of a host, whose ring runs over NVLink at 450 GB/s, and for all 64, whose ring
# is as fast as its slowest link, a single network card of 50 GB/s. Commit before you call it: how many tokens does a GPU need, roughly, in
# each case? One sequence of Llama 2 has 4096.

# %% tags=["commit"]
mine_tokens = commit(host=None, cluster=None)
### BEGIN SOLUTION
mine_tokens = commit(host=500, cluster=5000)
### END SOLUTION

# %% tags=["summary"]
H100_FLOPS = 400e12
links = {"8 GPUs, NVLink, 450 GB/s": (8, 450e9), "64 GPUs, cards of 50 GB/s": (64, 50e9)}
per_parameter_s = {name: theory.collective_wire_bytes("all_reduce", 2, n) / speed for name, (n, speed) in links.items()}
by_theory = {name: seconds * H100_FLOPS / 6 for name, seconds in per_parameter_s.items()}
by_you = [balancing_tokens(H100_FLOPS, speed, n, 2) for n, speed in links.values()]
columns = {
    "you said": [prediction_text(tokens, ",.0f") for tokens in mine_tokens.values()],
    "your function": [f"{tokens:,.0f}" if tokens else "–" for tokens in by_you],
    "theory": [f"{tokens:,.0f}" for tokens in by_theory.values()],
}
pandas.DataFrame(columns, index=list(links))

# %% tags=["nbval-ignore-output"]
llama = 7e9
seconds = {name: llama * each for name, each in per_parameter_s.items()}
_ = plots.communication_break_even({"H100s, 7 billion parameters": (6 * llama / H100_FLOPS, seconds)})

# %% [markdown]
# *Predicted: computing grows with the tokens of a rank, and sending does not, because a gradient is as large as the
# model. To the right of its dot, computing takes longer.*
#
# If a single ring leaves each host through one card, each GPU needs more than one sequence in each step. Inside a host,
# where NVLink is faster, about 500 tokens are enough. NCCL can also run up to eight rings side by side, each through a
# card of its own. Then each of the 64 GPUs needs an eighth of 5,250 tokens, which is 656. And where sending hides behind
# computing (lab 4), a step gets along with fewer.

# %% tags=["claim"]
claim("519 and 5,250 tokens", [round(tokens) for tokens in by_theory.values()] == [519, 5250])
claim("656 over eight cards", round(by_theory["64 GPUs, cards of 50 GB/s"] / 8) == 656)

# %% [markdown]
# *Takeaway: for given GPUs and links, the tokens of a rank decide whether a step computes or sends longer. The size of
# the model does not.*
#
# ## 8. Take away ({minutes} minutes)
#
# 1. Every rank makes every group, and all ranks of a group make the same calls in the same order.
# 2. Bytes on the wire depend on the algorithm, so count them once on your own cluster.
# 3. Two numbers, alpha and beta, roughly predict what collectives cost.
#
# | if | then |
# |---|---|
# | only some ranks should talk | make groups, on all ranks, before training begins |
# | a program hangs in messages | look for a `send` on all ranks before any `recv` |
# | you time a collective | take the fastest of many rounds, after a barrier |
#
# **Ask yourself**
#
# <details><summary>1. Rank 3 belongs to none of the new groups. Must it call <code>new_group</code>?</summary>
#
# Yes. `new_group` is a collective of all ranks. A rank that leaves it out has other groups than the others from then on.
#
# </details>
#
# <details><summary>2. Why does training need no barrier before <code>optimizer.step()</code>?</summary>
#
# A rank has its averaged gradient only after all ranks have joined the all-reduce. So nobody can be a step ahead.
#
# </details>
#
# <details><summary>3. An all-gather of 1 MB from each of 8 ranks: what does a rank hand to the call, and what leaves it in a ring?</summary>
#
# It hands in 1 MB, and 7 MB leave it: its own part and six of the others, each once.
#
# </details>
#
# <details><summary>4. Messages of 4 KB take 100 µs, and messages of 8 KB do, too. What do you learn about beta?</summary>
#
# Almost nothing: both are all latency. Take larger messages, until twice the bytes take nearly twice as long.
#
# </details>
#
# <details><summary>5. You halve the batch of every GPU. What happens to the time of the all-reduce?</summary>
#
# It stays the same, because a gradient is as large as the model. Its share of the step grows: from a half, for example,
# to two thirds.
#
# </details>

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("collectives_at_work")
