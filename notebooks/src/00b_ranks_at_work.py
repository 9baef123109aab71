# %% [markdown]
# # Lab 0b. Ranks at work
#
# This companion of lab 0 has what you meet once your own programs run on ranks. After it you can
#
# - let only some ranks talk, and say when a barrier is needed;
# - count the bytes that a library really sends, and tell whether a formula holds for it;
# - time a collective, find the latency and bandwidth of your machine, and predict with them;
# - choose data with which a test notices a missing all-reduce;
# - say how many tokens a GPU needs in a step, so that it computes longer than it sends.
#
# You need lab 0. The notebook takes about {core_minutes} minutes, and its parts can be read in any order, but section 3
# before section 4. What the text says about GPUs and NCCL, the library between them, comes from documentation and
# formulas, and was not run for this lab.
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import statistics
import time
from collections.abc import Callable

import pandas
import torch
from torch import distributed as dist

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.plots import style
from labkit.plots.collectives import all_reduce_rounds, fastest_all_reduce_times
from labkit.theory import collectives as theory
from labkit_course.checks import collectives_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="0b")

# %% tags=["parameters"] small={"RANKS": 3, "REPEATS": 4} points=[[2,1],[3,5],[8,30]]
RANKS: int = 2  # ranks of the measured runs
REPEATS: int = 15  # rounds in which each message is timed

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nobody to talk to, and more than 8 take minutes")
require("REPEATS", REPEATS, at_least=1, because="without a round nothing is measured")
device = labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank; some cells start 4
print(f"labkit.run measures on: {device}")

# %% [markdown]
# ## 1. Groups and barriers ({minutes} minutes)
#
# The ranks that talk with each other are a **process group**. At first there is one group, with all ranks. `new_group`
# makes smaller ones, such as the ranks of one host. It is a call of all ranks: everyone makes all groups, in the same
# order, even those to which it does not belong. Below, two groups of two ranks each add up their numbers. Such a cell has
# the modules that the notebook has imported, like `torch` and `dist`, but none of its functions and variables.

# %%
# %%torchrun -n 4 --name grouped
from labkit.rank import report  # sends values home to the notebook

dist.init_process_group()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
x = torch.tensor(dist.get_rank())
dist.all_reduce(x, group=groups[dist.get_rank() // 2])
report(x=x)

# %%
[rank.reported["x"].item() for rank in grouped.ranks]

# %% [markdown]
# Now rank 3 leaves out a group to which it does not belong. The cell hangs on purpose, and is stopped after 5 seconds.
# Commit: how many ranks are in `new_group` then?

# %% tags=["commit"]
mine_left_out = commit(in_new_group=None)
### BEGIN SOLUTION
mine_left_out = commit(in_new_group=3)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 5 --fails --name left_out
dist.init_process_group()
if dist.get_rank() != 3:
    pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1))

# %% tags=["nbval-ignore-output"]
in_new_group = sum('"<cell>", line 4' in stack for stack in left_out.stacks.values())
print(f"in new_group: {in_new_group} ranks; you: {prediction_text(mine_left_out['in_new_group'])}")

# %% tags=["claim"]
have_started = all('"<cell>"' in stack for stack in left_out.stacks.values())
claim("three ranks wait in new_group", in_new_group == 3, where=have_started)

# %% [markdown]
# Ranks 0 to 2 wait for rank 3, which waits for them in the all-reduce. They wait so early because labkit sets
# `TORCH_DIST_INIT_BARRIER=1` for its ranks. Without it, torch 2.13 goes on: each rank only counts its groups. If a next
# group followed, of ranks 2 and 3, it would have another number on rank 3, and these two would wait for each other.
#
# ### Exercise 1: average by host (••, {minutes} minutes)
#
# Each host has `per_host` ranks: with 2, ranks 0 and 1 are on the first host, ranks 2 and 3 on the next. Return two new
# tensors: the mean of `mine` over this rank's host, and the mean over all ranks. For the second one, a rank averages the
# first with one rank of every other host. Make no group of all ranks. Your function runs on 2 and on 3 hosts.
#
# <details><summary>Hint 1</summary>
#
# On 4 ranks there are four groups: the hosts `[0, 1]` and `[2, 3]`, and across hosts `[0, 2]` and `[1, 3]`. Every rank
# makes all of them, and uses one of each kind.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The hosts' groups are `dist.new_group(list(range(first, first + per_host)))` for each `first` in `range(0, ranks,
# per_host)`, and a rank is in number `rank // per_host`. Those across are of `range(place, ranks, per_host)`, and a rank
# is in number `rank % per_host`. An all-reduce works in place, so `clone` before each.
#
# </details>


# %%
def means_by_host(mine: torch.Tensor, rank: int, ranks: int, per_host: int) -> tuple[torch.Tensor, torch.Tensor]:
    ### BEGIN SOLUTION
    hosts = [dist.new_group(list(range(first, first + per_host))) for first in range(0, ranks, per_host)]
    across = [dist.new_group(list(range(place, ranks, per_host))) for place in range(per_host)]
    mean = mine.clone()
    dist.all_reduce(mean, group=hosts[rank // per_host])
    mean /= per_host
    total = mean.clone()
    dist.all_reduce(total, group=across[rank % per_host])
    return mean, total / (ranks // per_host)
    ### END SOLUTION


# %%
checks.means_by_host(means_by_host)

# %% [markdown]
# In your own programs `init_device_mesh` makes both kinds of groups in one call (lab 5).
#
# A **barrier** returns when all ranks have reached it. Use it where a rank must not run ahead: rank 0 downloads a file,
# and the others wait until the file is there. Below, rank 0 is late by a second. Commit: how many seconds do rank 0 and
# rank 1 spend in the barrier, roughly?

# %% tags=["commit"]
mine_wait = commit(rank_0_s=None, rank_1_s=None)
### BEGIN SOLUTION
mine_wait = commit(rank_0_s=0, rank_1_s=1)
### END SOLUTION

# %%
# %%torchrun -n 4 --name late
from labkit.rank import report

dist.init_process_group()
if dist.get_rank() == 0:
    time.sleep(1)
start = time.perf_counter()
dist.barrier()
report(waited_s=time.perf_counter() - start)

# %% tags=["nbval-ignore-output"]
waited_s = [rank.reported["waited_s"] for rank in late.ranks]
print("ranks 0 to 3 waited", ", ".join(f"{each:.2f}" for each in waited_s), "s")
print("ranks 0 and 1, by you:", ", ".join(map(prediction_text, mine_wait.values())))

# %% tags=["claim"]
claim("the others wait for rank 0, which waits for nobody", waited_s[0] < 0.5 < min(waited_s[1:]))

# %% [markdown]
# Training hardly ever needs a barrier, because no rank gets the result of an all-reduce before all have joined it.
#
# *Takeaway: every rank makes every group, in the same order. A barrier is for files and for measurements (section 5),
# and rarely for training.*
#
# ## 2. Messages between GPUs ({minutes} minutes)
#
# Why did lab 0 start its messages in one batch? Two calls one after the other, `isend` and then `irecv`, work on CPUs,
# and may hang on GPUs. By its documentation, NCCL works off a rank's calls in turn, and a send may hold up the next call
# until its receiver has come to the receive. If all ranks send first, they may wait for each other. It need not show:
# where a library has room for a message, the sender goes on at once. So a program may work with small tensors in a test,
# and hang with the large ones of real training.
#
# On CPUs gloo's plain `send` shows the same, even with the four bytes below. This cell hangs on purpose, and is stopped
# after 5 seconds. Commit: how many ranks are in their `recv` then?

# %% tags=["commit"]
mine_circle = commit(in_recv=None)
### BEGIN SOLUTION
mine_circle = commit(in_recv=0)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 5 --fails --name circle
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mine, arrived = torch.tensor([float(rank)]), torch.empty(1)
dist.send(mine, (rank + 1) % ranks)
dist.recv(arrived, (rank - 1) % ranks)

# %% tags=["nbval-ignore-output"]
in_recv = sum('"<cell>", line 6' in stack for stack in circle.stacks.values())
print(f"in recv: {in_recv} ranks; you: {prediction_text(mine_circle['in_recv'])}")

# %% tags=["claim"]
claim("every rank stands in its send", in_recv == 0)

# %% [markdown]
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
# *Takeaway: start messages that need each other in one batch, `dist.batch_isend_irecv`. NCCL asks for that, and gloo can
# do it, too.*
#
# ## 3. An all-reduce in two halves ({minutes} minutes)
#
# FSDP (lab 2) uses the two halves of an all-reduce at different times: the reduce-scatter for gradients, and the
# all-gather for parameters, just before they are needed. Here you put the halves together.
#
# ### Exercise 2: two collectives make one (•, {minutes} minutes)
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
judged = checks.all_reduce_in_two(all_reduce_in_two)
halves = all_reduce_in_two if judged.ok else checks.right_all_reduce_in_two
judged

# %% [markdown]
# *Takeaway: after a reduce-scatter each rank holds its part of the sum, and an all-gather gives all parts to all
# ranks.*
#
# ## 4. Look at the wire ({minutes} minutes)
#
# Lab 0 computed bytes on the wire by the formula of a ring. On Linux you can look; elsewhere the cells below print 0.0.
# The ranks of this machine talk over its loopback interface, and the system counts all bytes on it, those of other
# programs, too. Four ranks are about to make three collectives of a tensor of 4 MB, of which each rank hands a quarter
# to the all-gather. Then comes your all-reduce in two halves, or labkit's if yours is not right yet. In a ring, all four
# ranks together send 24 MB for an all-reduce and 12 for an all-gather. Commit: how many MB will you count for the
# reduce-scatter, and for the all-reduce in two halves?

# %% tags=["commit"]
mine_wire = commit(reduce_scatter_mb=None, in_two_mb=None)
### BEGIN SOLUTION
mine_wire = commit(reduce_scatter_mb=12, in_two_mb=24)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --name wire --use halves
from pathlib import Path

from labkit.rank import report


def sent_mb():
    """Return what the loopback interface has sent so far, in MB."""
    lines = Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else []
    return sum(int(line.split()[9]) / 1e6 for line in lines if line.strip().startswith("lo:"))


def measure(name, collective):
    dist.barrier()
    before = sent_mb()
    dist.barrier()
    collective()
    dist.barrier()
    if dist.get_rank() == 0:
        report(**{name: sent_mb() - before})


dist.init_process_group()
x = torch.ones(1_000_000)
parts = list(x.chunk(4))
measure("all_reduce", lambda: dist.all_reduce(x))
measure("all_gather", lambda: dist.all_gather([torch.empty_like(part) for part in parts], parts[0]))
measure("reduce_scatter", lambda: dist.reduce_scatter(torch.empty_like(parts[0]), parts))
measure("in_two", lambda: halves(x, dist.get_rank(), 4))

# %% tags=["nbval-ignore-output"]
sent = wire.ranks[0].reported
ring_mb = {"all_reduce": 24, "all_gather": 12, "reduce_scatter": 12, "in_two": 24}
for name, ring in ring_mb.items():
    yours = f"; you: {prediction_text(mine_wire[f'{name}_mb'])}" if f"{name}_mb" in mine_wire else ""
    print(f"{name:15} {sent[name]:5.1f} MB on the wire; a ring sends {ring}{yours}")

# %% tags=["claim"]
handed_mb = {"all_reduce": 4, "all_gather": 1, "reduce_scatter": 4}
by_formula = {name: 4 * theory.collective_wire_bytes(name, handed, 4) for name, handed in handed_mb.items()}
claim("24, 12 and 12 MB in a ring", by_formula | {"in_two": 24} == ring_mb)
gloo_mb = {"all_reduce": 24, "all_gather": 12, "reduce_scatter": 24, "in_two": 36}
close = [abs(sent[name] / mb - 1) < 0.05 for name, mb in gloo_mb.items()]
claim("24, 12, 24 and 36 MB", all(close), where=sent["in_two"] > 0 and torch.__version__.startswith("2.13"))

# %% [markdown]
# The all-reduce and the all-gather send about what a ring sends. With torch 2.13, gloo's reduce-scatter sends as much as
# an all-reduce. So an all-reduce in two halves is right, and yet puts 24 + 12 = 36 MB on this wire instead of 24.
#
# *Takeaway: a formula for the wire assumes an algorithm. Only a count tells whether it holds for your library.*
#
# ## 5. Latency and bandwidth of your machine ({minutes} minutes)
#
# Lab 0's model says that m calls that are handed b bytes in total take `m * alpha + b * beta`. Here alpha and beta are
# those of a whole all-reduce between this number of ranks. First you measure, then you fit both numbers, and predict
# other calls.
#
# ### Exercise 3: time one call (•, {minutes} minutes)
#
# `collective()` makes one call. Return the seconds that it takes; `now()` reads a clock. Two things must not count:
# the wait for a rank that comes late, which `barrier()` ends, and what a GPU was computing before. What must count is
# the work of the GPU for this call, which goes on after the call has returned. `synchronize()` returns when the GPU has
# done all its work. The check imitates such a GPU and a late rank.
#
# <details><summary>Hint</summary>
#
# Two calls come before `start = now()`, and one comes between `collective()` and the end.
#
# </details>


# %%
def time_once(collective: Callable, barrier: Callable, synchronize: Callable, now: Callable[[], float]) -> float:
    ### BEGIN SOLUTION
    synchronize()
    barrier()
    start = now()
    collective()
    synchronize()
    return now() - start
    ### END SOLUTION


# %%
judged_timer = checks.time_once(time_once)
timer = time_once if judged_timer.ok else checks.right_time_once
judged_timer

# %% [markdown]
# Real ranks use it now, or labkit's if yours is not right yet. The first round only warms up, and rank 1 comes 20 ms late
# in each. CPUs need no `synchronize`; on GPUs it is `torch.cuda.synchronize`.

# %%
# %%torchrun -n {RANKS} --name timed --use timer,REPEATS
from labkit.rank import report

dist.init_process_group()
x = torch.zeros(2**18)  # 1 MiB of float32; zeros stay zeros in every round
seconds = []
for _ in range(1 + REPEATS):
    if dist.get_rank() == 1:
        time.sleep(0.02)
    seconds.append(timer(lambda: dist.all_reduce(x), dist.barrier, lambda: None, time.perf_counter))
report(seconds=seconds)

# %% tags=["nbval-ignore-output"]
per_round = zip(*(rank.reported["seconds"] for rank in timed.ranks), strict=True)
first_ms, *rounds_ms = [1e3 * max(each) for each in per_round]  # until the last rank is done
median_ms = statistics.median(rounds_ms)
print(f"1 MiB: first round {first_ms:.2f} ms; then fastest {min(rounds_ms):.2f}, median {median_ms:.2f}")

# %% tags=["claim"]
claim("the fastest round does not have the late rank's 20 ms inside", min(rounds_ms) < 20, where=RANKS <= 4)

# %% [markdown]
# Other programs on the machine can only make a round slower. So the fastest is closest to what the network can do, while
# a training step pays the typical one.
#
# ### Exercise 4: find alpha and beta (•, {minutes} minutes)
#
# `rounds` holds measurements: for each size in bytes, the seconds of several rounds. Return alpha, in seconds, and beta,
# in seconds a byte, of the line through the smallest and the largest size.
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
# The program `all_reduce` times seven sizes in such a loop. The figure has your line through two of them, and a fit to all
# seven, which makes the sum of the squared *relative* errors smallest, so that a small message counts as much as a large
# one. The table says by how much each misses each size.

# %% tags=["nbval-ignore-output"]
messages = labkit.run("all_reduce", nproc=RANKS, repeats=REPEATS)
fastest = fastest_all_reduce_times(messages)
found = fitted(all_reduce_rounds(messages).groupby(level=0).agg(list).to_dict())
all_sizes = theory.fit_alpha_beta(fastest.to_dict())
fits = {"all sizes": all_sizes}
if found and min(found) > 0:
    fits["your line"] = theory.AlphaBeta(*found)
else:
    print(f"your function gave {found}, so there is no line of yours")
ax = plots.all_reduce_time_by_size(messages, network=all_sizes)
for line in list(fits.values())[1:]:
    times_us = [1e6 * line.seconds(size) for size in fastest.index]
    ax.plot(fastest.index, times_us, ":", color=style.VERMILION, label="your line")
    style.add_legend_above(ax, 2)
for whose, fit in fits.items():
    print(f"{whose}: alpha {fit.alpha_s * 1e6:.0f} µs, beta {fit.beta_s_per_byte * 1e12:.0f} µs a MB")
misses = {name: [fit.seconds(size) / time_s - 1 for size, time_s in fastest.items()] for name, fit in fits.items()}
pandas.DataFrame(misses, index=fastest.index.rename("bytes")).map("{:+.0%}".format)

# %% tags=["claim"]
squares = {name: sum(miss**2 for miss in each) for name, each in misses.items()}
claim("the fit to all sizes has the smallest sum of squares", squares["all sizes"] <= 1.001 * min(squares.values()))

# %% [markdown]
# *Grey: each round; blue: the fastest; dashed: fitted to all sizes; dotted: your line. Well below α / β the size hardly
# matters.*
#
# If the line below the figure says *disturbed*, other programs used the cores: run the cell again before you go on.
#
# A line through two sizes hits both, and believes them even where one was unlucky in all its rounds. The same run also
# sent 4 MiB, 4.2 MB, in 1 to 64 all-reduces. Commit, from the alpha and beta of all seven sizes: how many milliseconds
# do 64 take?

# %% tags=["commit"]
mine_time = commit(pieces_64_ms=None)
### BEGIN SOLUTION
mine_time = commit(pieces_64_ms=1e3 * all_sizes.seconds(2**22, messages=64))
### END SOLUTION

# %% tags=["nbval-ignore-output"]
_ = plots.all_reduce_time_by_count(messages, network=all_sizes)
pieces = fastest_all_reduce_times(messages, "pieces")
print(f"64 all-reduces: {pieces[64] * 1e3:.1f} ms; you: {prediction_text(mine_time['pieces_64_ms'], '.1f')} ms")
for whose, fit in fits.items():
    print(f"by {whose}: {fit.seconds(2**22, messages=64) * 1e3:.1f} ms")

# %% tags=["claim"]
claim("64 messages take twice as long as one, or longer", pieces[64] > 2 * pieces[1])

# %% [markdown]
# *The same bytes in 1 to 64 all-reduces; dashed, the prediction from alpha and beta.* Which of the two lines comes closer
# may change from run to run.
#
# <details><summary>Why are the bars not at the dashed lines?</summary>
#
# Two numbers are a rough model of seven sizes. Calls in a row are not single calls after a barrier: a rank that is late
# for one holds up the others in it. And the same message may take a different time in another minute of the same run:
# compare 1 × 4 MiB here with its dot in the figure above.
#
# </details>
#
# *Takeaway: synchronize and meet at a barrier before you start the clock, and synchronize before you stop it. Fit the
# fastest rounds, and try the fit on something that it has not seen.*
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
# When does a step compute for as long as it sends? A rank with T tokens computes about 6 operations for each of P
# parameters and each token, 2 in the forward pass and 4 in the backward pass, at F operations a second. Then n ranks
# average gradients of g bytes each in a ring of 2 (n − 1) steps. Each step takes a latency α and sends an n-th of the
# gradients, at B bytes a second. If nothing overlaps, both take equally long when
#
# `6 * P * T / F  =  2 * (n - 1) * (alpha + g * P / (n * B))`
#
# ### Exercise 5: tokens in a step (•, {minutes} minutes)
#
# Solve for T, and write it as a function. Where does P cancel in it, and where not? From which P on does latency add
# less than a tenth to T? You need that P below.
#
# <details><summary>Hint 1</summary>
#
# Divide by what a token costs, `6 * P / F`. P cancels in the term of the bytes alone.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Latency is a tenth of the bytes' time when `alpha` is a tenth of `g * P / (n * B)`.
#
# </details>


# %%
def balancing_tokens(
    parameters: float, flops_per_s: float, bytes_per_s: float, ranks: int, gradient_bytes: int, latency_s: float
) -> float:
    ### BEGIN SOLUTION
    step_s = latency_s + gradient_bytes * parameters / ranks / bytes_per_s
    return 2 * (ranks - 1) * step_s * flops_per_s / 6 / parameters
    ### END SOLUTION


# %%
judged_tokens = checks.balancing_tokens(balancing_tokens)
tokens_of = balancing_tokens if judged_tokens.ok else checks.right_balancing_tokens
judged_tokens

# %% [markdown]
# Take bfloat16 gradients (g = 2) on the reference cluster of lab 0, whose GPUs reach 400 · 10¹² operations a second, and
# suppose 10 µs for a step of the ring. The eight GPUs of a host have a ring over NVLink at 450 GB/s. The ring of all 64
# is as fast as its slowest link, a single network card of 50 GB/s. Commit before you call your function: how many tokens
# does a GPU need, roughly, for 7 billion parameters in each case? One sequence of Llama 2 has 4096. And with all 64, from
# how many million parameters on does latency add less than a tenth?

# %% tags=["commit"]
mine_tokens = commit(host=None, cluster=None, million_parameters=None)
### BEGIN SOLUTION
mine_tokens = commit(host=500, cluster=5000, million_parameters=160)
### END SOLUTION

# %% tags=["summary"]
H100_FLOPS, LATENCY_S = 400e12, 10e-6
links = {"8 GPUs, NVLink, 450 GB/s": (450e9, 8), "64 GPUs, cards of 50 GB/s": (50e9, 64)}


def tokens_on(link: str, parameters: float, latency_s: float = LATENCY_S) -> float:
    """Tokens of a GPU at which a step computes for as long as it sends."""
    return tokens_of(parameters, H100_FLOPS, *links[link], 2, latency_s)


host, cluster = links
latency_share = tokens_on(cluster, 7e9) / tokens_on(cluster, 7e9, 0.0) - 1
found_numbers = {
    f"tokens, {host}": tokens_on(host, 7e9),
    f"tokens, {cluster}": tokens_on(cluster, 7e9),
    "million parameters, 64 GPUs": 10 * latency_share * 7e9 / 1e6,
}
said = [prediction_text(each, ",.0f") for each in mine_tokens.values()]
pandas.DataFrame(
    {"you said": said, "formula": map("{:,.0f}".format, found_numbers.values())}, index=list(found_numbers)
)

# %% tags=["nbval-ignore-output"]
parameters = [10 ** (power / 4) for power in range(24, 45)]
curves = {link: [tokens_on(link, each) for each in parameters] for link in links}
ax = pandas.DataFrame(curves, index=parameters).plot(loglog=True, style="--", ax=style.make_axes(None))
_ = ax.set(xlabel="parameters of the model", ylabel="tokens of a rank, predicted")
style.add_legend_above(ax, 2)

# %% [markdown]
# *Predicted: the tokens of a rank with which a step computes for as long as it sends. To the right, P has canceled; to the
# left, latency counts.*
#
# For 7 billion parameters, latency adds less than 1 %. If a single ring leaves each host through one card, each GPU needs
# more than one sequence in each step, about 5,260 tokens, and inside a host about 520. For one ring both are lower
# bounds: F is what GPUs reach in practice, but B is from the data sheet, and no ring reaches it. NCCL can also run up to eight rings side
# by side, each through a card of its own. Then the bytes take an eighth of their time, and 670 tokens are enough. And where
# sending hides behind computing (lab 4), a step gets along with fewer.

# %% tags=["claim"]
claim("520 and 5,260 tokens", [round(tokens_on(link, 7e9), -1) for link in links] == [520, 5260])
claim("less than 1 %", all(tokens_on(link, 7e9) < 1.01 * tokens_on(link, 7e9, 0.0) for link in links))
eight_rings = tokens_of(7e9, H100_FLOPS, 400e9, 64, 2, LATENCY_S)
claim("670 over eight cards", round(eight_rings, -1) == 670)
claim("a tenth at 160 million", round(tokens_on(cluster, 160e6) / tokens_on(cluster, 160e6, 0.0), 3) == 1.1)

# %% [markdown]
# *Takeaway: if latency is negligible, nothing overlaps and a step takes 6 P T operations, the size of the model cancels.
# Then the tokens of a rank decide whether a step computes or sends longer, for given F, B, g and n.*
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
# | you time a collective | synchronize and meet at a barrier first, and synchronize before you stop the clock |
# | you plan with such times | fit the fastest round, but a training step pays the typical one |
#
# **Ask yourself**
#
# <details><summary>1. Rank 3 belongs to none of the new groups. Must it call <code>new_group</code>?</summary>
#
# Yes. All ranks make all groups, in the same order. A rank that leaves one out lets the others wait, or counts other
# groups than they do from then on.
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
