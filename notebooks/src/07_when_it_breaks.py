# %% [markdown]
# # Lab 7. When it breaks
#
# A distributed program breaks in ways that a single process does not: it hangs without a word, it shows an error of a
# rank that did nothing wrong, or it trains, and the numbers are wrong. Here you find hidden faults of
# real ranks.
#
# After this lab you can
#
# - say which rank began it, when all of them show errors;
# - read the stacks of all ranks, and find the call in which they disagree;
# - tell a slow rank from a slow link, and wrong numbers from right ones;
# - go from a symptom to its cause in at most three looks.
#
# You need lab 0: rank, collective, deadlock, data-parallel training. The lab takes about
# {core_minutes} minutes. Exercises have dots for their difficulty: •, •• or •••. Cells with `--fails`, `Mystery` or
# `KnownFault` break on purpose.

# %% tags=["nbval-ignore-output"]
import copy
import os
import time
from collections.abc import Callable

import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.theory import failures as theory
from labkit_course.checks import failures as checks
from labkit_course.checks.claims import claim, commit
from labkit_course.checks.mystery import HealthyRun, KnownFault, Mystery, ends_table, rank_ends, show_causes
from labkit_course.checks.ranks.failures import right_odd_ranks
from labkit_course.checks.symptoms import card

doctor.show(lab="7")

# %% tags=["parameters"] small={"RANKS": 3} points=[[2,0],[3,24],[4,36]]
RANKS: int = 2  # ranks of the parity check in section 5; other cells say their own numbers
SEED: int = 27  # which mystery you meet last, in section 6

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one rank has nobody to disagree with, and four share two cores")
require("SEED", SEED, at_least=0, because="mysteries are counted from 0")

WORK_MS, SLOW_STEPS = [5, 10, 15, 40], 6  # section 4: what each rank computes in a step

# %% [markdown]
# ## 1. One case, worked together ({minutes} minutes)
#
# Llama 3's training on 16,384 GPUs was stopped every three hours, mostly by hardware. With sixteen GPUs that would be
# once in four months, so look at your own code first: you see a **symptom**, look with a **tool**, and name a rank and
# a cause.
#
# Four real ranks train a small network on this machine, over gloo. In each step a rank loads a batch, swaps a few
# numbers with its partner (`swap_boundary`), computes gradients, and all-reduces them layer by layer
# (`average_gradients`). Ranks 0 and 1 are partners, and so are 2 and 3; the even rank sends first. A rank that is done
# waits for the others in `wait_for_all`. This run hangs.
#
# In a hang, look first at the **stack** of every rank: the calls in which it stands. The lab's tools are thin forms of
# common ones: this one of `py-spy dump --pid …`, and the card in section 7 names the others. A diagnosis is a rank, a
# cause, and the line that proves it.

# %%
worked = Mystery(135, beside=True)
print(worked)
worked.ask("stacks")

# %% [markdown]
# Do not ask which rank looks broken, ask who waits for whom. Ranks 0 and 1 stand in an all-reduce, so they wait for
# ranks 2 and 3. Rank 2 sends to its partner, rank 3, and over gloo a send waits for the partner's `recv`. So three
# ranks wait for rank 3, which waits at the end of its training as if it were done. Its log should say why.

# %%
worked.ask("logs")
worked.name(rank=3, cause="fewer batches", because="logs: rank 3")

# %% [markdown]
# <details><summary>Reading without a kernel? The same tables as text</summary>
#
# The symptom: no rank has made a step for 3 s, so the run was stopped. `stacks` says where each rank stood then:
#
# ```
# rank 0  train → average_gradients → reduce → all_reduce
# rank 1  train → average_gradients → reduce → all_reduce
# rank 2  train → swap_boundary → send
# rank 3  train → wait_for_all
# ```
#
# Only rank 3 believes that it is done. `logs` has the last lines of each rank, here beside those of a healthy run:
#
# ```
#         this run                                     healthy, same data
# rank 0  step 2: loss 1.021 / step 3: loss 0.945      step 7: loss 1.080 / epoch over: 8 batches
# rank 1  step 2: loss 1.248 / step 3: loss 1.071      step 7: loss 1.012 / epoch over: 8 batches
# rank 2  step 1: loss 0.882 / step 2: loss 1.159      step 7: loss 0.871 / epoch over: 8 batches
# rank 3  step 2: loss 0.940 / epoch over: 3 batches   step 7: loss 1.070 / epoch over: 8 batches
# ```
#
# Normal are eight batches on each rank. Rank 3 had three: "fewer batches", proved by "logs: rank 3".
#
# </details>
#
# <details><summary>How is it mended, and how long until an error?</summary>
#
# Agree beforehand: an all-reduce with `ReduceOp.MIN` over the numbers of batches. `DistributedSampler` repeats samples
# instead.
#
# By default gloo waits for half an hour until an error says that somebody timed out, and NCCL for ten minutes. With
# NCCL a collective returns at once, so a stack stands at the next call that needs a result, such as `loss.item()`.
#
# </details>
#
# *Takeaway: in a hang, look at the stack of every rank, and follow who waits for whom.*
#
# ## 2. Errors and their echoes ({minutes} minutes)
#
# The friendliest failure is an exception, here on rank 2.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name raised
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    time.sleep(0.2)
    raise ValueError("sample 1701 has no label")
dist.all_reduce(torch.ones(1))

# %% [markdown]
# The second failure says nothing at all: a rank dies by SIGKILL, which Linux sends when the machine's memory is full,
# and a scheduler when a job's time is over. The third is a timeout: rank 2 leaves out a call, and the others wait for
# it for at most 1 s.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name killed
import signal

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name late
from datetime import timedelta

from labkit.rank import report
from labkit_course.checks.ranks.failures import recorded_calls

dist.init_process_group("gloo", timeout=timedelta(seconds=1))
try:
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(4))  # the call that rank 2 leaves out
    dist.all_reduce(torch.ones(4))
finally:
    report(calls=recorded_calls())  # with an error or without; section 3 reads it
time.sleep(10)  # rank 2 alone comes here, and believes that it is done

# %% tags=["nbval-ignore-output"]
for title, failure in {"raised": raised, "killed": killed, "late": late}.items():
    print(f"{title}:\n{ends_table(rank_ends(failure)).to_string()}")

# %% [markdown]
# A status below 0 is the signal that ended a process: -9 is SIGKILL, and -15 is SIGTERM, which torchrun sends to all
# that still run after the first failure. So -15 with no error proves nothing: it may end an innocent rank, and in
# `late` it ended the guilty one, rank 2. *The ranks with an error there are those that waited.* A time says when Python
# caught the error, so an echo may stand before its cause.
#
# The fourth failure accuses an innocent rank. The program of section 1 runs again, and in the all-reduce of layer 1
# rank 3 brings float64, where the others bring float32. This lab counts another dtype as `other shape`.

# %% tags=["nbval-ignore-output"]
aborted = KnownFault("other shape", rank=3, layer=1)
aborted.ask("ends")
aborted.ask("logs")

# %% [markdown]
# *Rank 2 was aborted (status -6, SIGABRT) and has no error, but the fault is rank 3's.* In gloo's all-reduce data go
# round a ring. Rank 2's log says why it gave up: its neighbour, rank 3, sent it 144 bytes instead of 72.
#
# ### Exercise 1: who began it? (•, {minutes} minutes)
#
# `ends` is what `rank_ends` gives: of each rank its `rank`, `status`, `time` and `error`. Return the rank whose own end
# began it, a killed one included, or None if the ends do not tell.
#
# Decide from the four tables above, whose faults you know: which statuses, and which errors, say nothing about a rank's
# own guilt? Status 0 is a good end. A lost connection may also read "Connection reset by peer", "Read error" or "Broken pipe". Where
# a table shows "–", the `error` is an empty text, and the `time` is when torchrun noticed the end.
#
# <details><summary>Hint 1</summary>
#
# List the ranks that did nothing wrong in the four runs, with what each of them left in its table. What stands on this
# list proves nothing, and an abort proves nothing either.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `any(echo in end["error"] for echo in ("Connection closed by peer", …))` recognises an echo. Collect them
# from the tables, and take the two that the exercise names as well.
#
# </details>


# %%
def culprit(ends: list[dict]) -> int | None:
    ### BEGIN SOLUTION
    echoes = ("closed by peer", "reset by peer", "Broken pipe", "Read error", "Timed out")
    failed = [end for end in ends if end["status"] not in (0, -15, -6)]
    own = [end for end in failed if not any(echo in end["error"] for echo in echoes)]
    return min(own, key=lambda end: end["time"])["rank"] if own else None
    ### END SOLUTION


# %% tags=["summary"]
told = checks.culprit(culprit)
blamed = culprit if told.ok else theory.first_failed_rank
runs = {"raised": rank_ends(raised), "killed": rank_ends(killed), "late": rank_ends(late), "aborted": aborted.ends}
blames = {name: blamed(ends) for name, ends in runs.items()}
print("your function blames" if told.ok else "a right function blames", blames)
told

# %% [markdown]
# *Of `late` and `aborted` the ends do not tell (None).* In general:
#
# |A rank left|What it proves|
# |---|---|
# |an error of its own|the rank failed by itself|
# |-9 and no error|the rank was killed|
# |a lost connection, an **echo**|another rank ended before|
# |"Timed out"|another rank did not come|
# |-6|nothing: another rank's call may be the reason|
# |-15|nothing: mostly torchrun ended it|
#
# <details><summary>After a kill, and with NCCL</summary>
#
# An allocation that is refused raises an exception, "out of memory"; a kill leaves none. torchrun gives its
# status as -9; a shell, or the runtime of a container whose main process was killed, shows it as 137, which is 128 + 9.
# Look into the system's log (`dmesg | grep -i "out of memory"`) or the scheduler's. A failing GPU leaves a line there,
# too, with `Xid` and a number.
#
# With NCCL, a **watchdog**, a thread of PyTorch's, aborts a process whose collective takes too long, often because
# *another* rank did not come. It leaves "Watchdog caught collective operation timeout" in the log. A GPU that waits in
# a collective shows 100 % utilization and little power in `nvidia-smi`.
#
# </details>
#
# *Takeaway: look for an error that is no echo, or a signal such as -9. If there is neither, compare the calls.*
#
# ## 3. A record of calls ({minutes} minutes)
#
# The run `late` stopped in line 12, its last call, although rank 2 left out the one of line 11. A collective carries no
# name: rank 2's second all-reduce, in line 12, met the others' second, in line 11, and for their third it was no longer
# there. If shapes are equal, nobody complains, and the sums are wrong.
#
# <details><summary>PyTorch can compare the calls for you: DETAIL</summary>
#
# With `TORCH_DISTRIBUTED_DEBUG=DETAIL` ranks exchange a fingerprint before each call, so switch it on only while you
# search. Where rank 0 calls an all-reduce of 3 elements and rank 1 a broadcast of 4, it says
#
# ```
# Detected mismatch between collectives on ranks. … Collectives differ in the following aspects:
#   Op type: BROADCAST vs ALLREDUCE  Tensor shapes: 4 vs 3
# ```
#
# A fingerprint holds no name of a tensor, so DETAIL lets two swapped all-reduces of one shape pass.
#
# </details>
#
# A **recorder** keeps a list of calls on each rank, and after a hang you compare the lists. PyTorch has one, the
# **flight recorder**, which `late` has read. It knows each call's name, size, and line in the cell.
#
# <details><summary>How it is read, and with NCCL</summary>
#
# `recorded_calls` unpickles what `torch._C._distributed_c10d._dump_fr_trace()` returns, a private function. With NCCL
# set `TORCH_NCCL_DUMP_ON_TIMEOUT=1`; when a timeout strikes, each rank writes a file for
# `python -m torch.distributed.flight_recorder.fr_trace`.
#
# </details>

# %% tags=["nbval-ignore-output"]
flight = labkit.load(late.log.parent)
for index in (0, 2):  # an older torch keeps no record of gloo's calls
    print(f"rank {index}:", *flight.ranks[index].reported["calls"])

# %% [markdown]
# ### Exercise 2: where do they part, and since when? (••, {minutes} minutes)
#
# `logs` holds of each rank its calls in order, each a tuple such as `("all_reduce", (8, 8))`. Find the first `place`
# at which not all ranks made the same call, and the list of `ranks` that differ from what most did there. A rank whose
# log has ended made no call. There are three ranks or more, and most agree. With letters for calls:
#
# ```
# rank 0:  a b b c
# rank 1:  a b b c
# rank 2:  a b c
# rank 3:  a b b c
# ```
#
# These part at place 2, because of rank 2. But it may have left out either b, call 1 or call 2, so the fault may be as
# early as 1. To find this `earliest`, go back from `place`, in what most did, as long as the call before is equal to
# the one at `place`. Return `(earliest, place, ranks)`, here `(1, 2, [2])`, or None if the logs never differ.
#
# <details><summary>Hint 1</summary>
#
# At each place make a list of the ranks' calls. `itertools.zip_longest(*logs)` does that, with None for ended logs.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `collections.Counter(calls).most_common(1)[0][0]` is what most did. `earliest` begins at `place`, and becomes one
# less while the call before is equal to this.
#
# </details>


# %%
def where_they_part(logs: list[list[tuple]]) -> tuple[int, int, list[int]] | None:
    ### BEGIN SOLUTION
    from collections import Counter
    from itertools import zip_longest

    table = list(zip_longest(*logs))
    usual = [Counter(calls).most_common(1)[0][0] for calls in table]
    for place, calls in enumerate(table):
        odd = [rank for rank, call in enumerate(calls) if call != usual[place]]
        if odd:
            earliest = place
            while earliest > 0 and usual[earliest - 1] == usual[place]:
                earliest -= 1
            return earliest, place, odd
    return None
    ### END SOLUTION


# %%
parted = checks.where_they_part(where_they_part)
parts = where_they_part if parted.ok else checks.first_parting
flown = {
    name: parts([[tuple(call[:fields]) for call in rank.reported["calls"]] for rank in flight.ranks])
    for name, fields in {"name and size": 2, "name, size and line": 3}.items()
}
print(*flown.items(), sep="\n")
parted

# %% [markdown]
# *By name and size rank 2 may have left out any of calls 0 to 2. By line it is call 1, the one of line 11.*
#
# <details><summary>Where your rule ends</summary>
#
# It is one for a single call left out. With an *extra* call go back in the odd rank's own log: where most did `a a b`
# and one rank did `a a a b`, they part at place 2, and any of its three a's may be the extra one. Where a whole cycle
# is missing, such as one `a b c` of two, no rule tells which.
#
# </details>
#
# Lines do not help where one line makes all calls, as in a loop over layers. There the script must write a **label** of
# its own before each call. The program of section 1 does: its `3.2` is layer 2 in step 3. In each step it reduces
# layers 2, 1 and 0, and all tensors are (12, 12).
#
# In the first run below rank 1 leaves out layer 2 in step 3 (call 9), and waits for rank 0 in step 4's swap; in the
# second it swaps layers 2 and 1.

# %% tags=["nbval-ignore-output"]
left_out, other_order = KnownFault("left out", rank=1), KnownFault("other order", rank=1)
left_out.ask("record")
other_order.ask("record")

# %%
for name, labels in {"name and shape": False, "with labels": True}.items():
    print(f"{name:14}", *(f"{case.cause}: {parts(case.calls(labels=labels))}" for case in (left_out, other_order)))

# %% [markdown]
# *Without labels the first record parts only where it ends, and the second nowhere: None does not mean healthy.* With
# labels both part at call 9, and what follows tells them apart. Where a call was left out, all comes one place early,
# and the run hangs; where two were swapped, all is equal again from call 11 on, and the run ends with wrong numbers.
#
# *Takeaway: names and shapes show where records part. What happened, and where, takes stacks or labels of your own.*
#
# ## 4. A time line ({minutes} minutes)
#
# A **straggler** is a rank that needs longer than the others. Since they wait for it, all steps are equally long, and
# all ranks look busy. Below, each rank sleeps 5, 10, 15 or 40 ms (`WORK_MS`) instead of computing.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --use WORK_MS,SLOW_STEPS --name slow
from labkit.rank import report

dist.init_process_group("gloo")
steps = []
dist.barrier()
start = time.perf_counter()
for _ in range(SLOW_STEPS):
    begun = time.perf_counter() - start
    time.sleep(WORK_MS[dist.get_rank()] / 1e3)
    ready = time.perf_counter() - start
    dist.all_reduce(torch.ones(1000))
    steps.append([begun, ready, time.perf_counter() - start])
report(steps=steps)

# %% tags=["nbval-ignore-output"]
_ = plots.wait_times(slow, predicted_ms=SLOW_STEPS * max(WORK_MS))

# %% [markdown]
# *All end at about the same time, somewhat after six times rank 3's computing (dashed), and rank 3 waits least.* A
# profile of rank 0 alone would say that the all-reduce is slow.
#
# If no rank computes longer, the cause may be a **slow link**, named after the rank that sends over it. Once the other
# rank has called `recv`, a send returns, although the message may still be under way.
#
# The next run has one of the two faults, and the tool `times` shows where each rank's fastest step went. Commit: which
# rank computes slowly, or sends over a slow link? Then the tool `links` times each link of the ring by itself, one way.

# %% tags=["nbval-ignore-output"]
slow_run = Mystery(6, beside=True)
print(slow_run)
slow_run.ask("times")

# %% tags=["commit"]
suspect, fault = None, ""  # a rank; "straggler" or "slow link"
### BEGIN SOLUTION
suspect, fault = 3, "slow link"
### END SOLUTION

# %% tags=["nbval-ignore-output"]
slow_run.ask("links")
slowest = slow_run.table("links")["ms"].astype(float).idxmax()
slow_run.name(rank=suspect, cause=fault, because=f"links: {slowest}")

# %% [markdown]
# <details><summary>What the two tables say (open it once you have committed)</summary>
#
# All compute alike, and rank 2's swap takes 60 ms, because it waits for what rank 3 sends. Rank 3 goes on at once, so
# the receiver shows the wait, and the link from its sender makes it. The other ranks wait for rank 2 in the all-reduce.
# Rank 3 sends quickly to rank 0, and rank 2 receives quickly from rank 1, so neither's network card is slow, only the
# link between them, and only one way.
#
# Here the slow link is simulated: rank 2 sleeps 60 ms after each message that it has received from rank 3, in a swap or
# a test. A real one slows all-reduces, too, and ordinary data-parallel training, which swaps nothing, shows only those.
# So test every link.
#
# </details>
#
# <details><summary>Does this test work between hosts?</summary>
#
# Each message of the test carries the time at which it left, and its receiver looks at the clock, too. That works on
# one host, whose ranks read one clock. Clocks of two hosts differ by more than a message takes, and a question and its
# answer use both directions. So between hosts let the sender's clock time both: it sends many megabytes, and the
# receiver answers with a few bytes once it has them all. The answer takes little of this time, so megabytes divided by
# seconds are the bandwidth of the one direction.
#
# </details>
#
# *Takeaway: a rank that computes longer waits least, and all others wait for it. If all compute alike, time each link.*
#
# ## 5. Wrong numbers, and no error ({minutes} minutes)
#
# Training goes on, and the loss looks usual. Here is that of a healthy run and, on the same data, of two with a fault:
# rank 1 swapped two gradients in step 3 (section 3), or all ranks sum gradients instead of averaging them.

# %% tags=["nbval-ignore-output"]
healthy = HealthyRun()
other_order.healthy = healthy  # from now on its tools show the healthy run, too
scaled = KnownFault("wrong scale", healthy=healthy)
print("healthy.", healthy.symptom)
print(other_order, scaled, sep="\n")

# %% [markdown]
# *By its loss each of the three could be the healthy one; the sum has even the lowest.* Two questions find what is
# wrong.
#
# 1. **Are the weights equal on all ranks?** If not, a reduction is missing, two tensors met each other, or they
#    differed from the start.
# 2. **Is each gradient that of one device** that sees all samples? If all are off by one factor, it is a scaling.
#    Otherwise find out which samples each rank read.
#
# A NaN has a question of its own: whose loss was NaN first, before an all-reduce carried it to all ranks?
#
# Now their tools, on these two faults and a third: rank 2 reads a NaN in step 3. Commit: after the swap, on how many
# ranks do the final weights differ from most? How many have a NaN as their own loss in step 3, and how many in step 4?
# By what factor is the sum wrong?

# %% tags=["commit"]
guessed = commit(unequal=None, nan_3=None, nan_4=None, factor=None)
### BEGIN SOLUTION
guessed = commit(unequal=1, nan_3=1, nan_4=4, factor=4)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
print("you said:", guessed)
other_order.ask("weights")

# %% tags=["nbval-ignore-output"]
born = KnownFault("nan", rank=2, healthy=healthy)
born.ask("losses")

# %% tags=["nbval-ignore-output"]
scaled.ask("gradients")

# %% [markdown]
# *Rank 1 alone differs. In step 3 only rank 2 has a NaN, in step 4 all have. The sum is four times one device's
# gradient, and the rest is rounding.*
#
# ### Exercise 3: a parity check (•, {minutes} minutes)
#
# The parameters of `model` hold averaged gradients, `samples` are those of
# all ranks together, and `loss_of(model, samples)` is a mean over samples. Return for each parameter, by its name, how
# far its gradient is from one device's: the norm of the difference, divided by the norm of one device's gradient. Leave
# `model` as it is.
#
# <details><summary>Hint 1</summary>
#
# One device is a copy of the model that computes its own gradients from all samples.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `copy.deepcopy` leaves the gradients of parameters out, and `backward()` makes new ones. `named_parameters()` gives
# the names, in the order of `parameters()`.
#
# </details>


# %%
def gradient_gaps(model: nn.Module, samples: torch.Tensor, loss_of: Callable) -> dict[str, float]:
    ### BEGIN SOLUTION
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss_of(alone, samples).backward()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    return {name: float((mine.grad - one.grad).norm() / one.grad.norm()) for (name, mine), one in pairs}
    ### END SOLUTION


# %%
judged = checks.gradient_gaps(gradient_gaps)
gaps_of = gradient_gaps if judged.ok else checks.right_gaps
judged

# %% tags=["nbval-ignore-output"]
# %%torchrun -n {RANKS} --use gaps_of --name parity
from labkit.rank import report
from labkit_course.checks.failures import loss_of, small_network

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
samples = torch.randn(8 * ranks, 8, generator=torch.Generator().manual_seed(1))
found = {}
for way in ("averaged", "only summed", "biases left out"):
    model = small_network()
    loss_of(model, samples[rank::ranks]).backward()
    for parameter in model.parameters():
        if parameter.dim() > 1 or way != "biases left out":
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if way == "only summed" else ranks
    found[way] = gaps_of(model, samples, loss_of)
report(gaps=found)

# %% tags=["nbval-ignore-output"]
gaps = pandas.DataFrame(parity.ranks[0].reported["gaps"])
gaps.map("{:.7f}".format)

# %% [markdown]
# *Averaged gradients are one device's up to rounding, as all ranks have equally many samples. A sum over two ranks is
# off by 100 % everywhere, and the third way in the biases.*
#
# *Takeaway: compare gradients, not losses. A loss that looks usual proves nothing, and one gradient, beside one
# device's, proves much.*


# %% tags=["claim"]
def waited(result: labkit.RunResult) -> list[float]:
    """The part of its time that each rank waited in collectives."""
    return [
        sum(done - ready for _, ready, done in rank.reported["steps"]) / rank.reported["steps"][-1][2]
        for rank in result.ranks
    ]


claim("rank 2 raised, 1 was killed, the others' ends do not tell", list(blames.values()) == [2, 1, None, None])
waiting = {end["rank"] for end in rank_ends(late) if end["error"]}
claim("only who waited has an error", waiting and waiting <= {0, 1, 3})
claim("torchrun ended the guilty rank", [end["status"] for end in rank_ends(late) if end["rank"] == 2] == [-15])
(end,) = (end for end in rank_ends(killed) if end["rank"] == 1)
claim("rank 1 left no error, only its status", (end["status"], end["error"]) == (-9, ""))
claim("rank 2 was aborted", [end["rank"] for end in aborted.ends if end["status"] == -6] == [2])
claim("rank 2 was sent twice the bytes", "144 vs 72" in aborted.table("logs").loc["rank 2", "last lines"])
claim("Read error is among the echoes", any("Read error" in end["error"] for end in aborted.ends))
claim("rank 3 waits least", min(waited(slow)) == waited(slow)[3])
claim("most of rank 0's time goes into the all-reduce", waited(slow)[0] > 0.5)
ended_ms = [1e3 * rank.reported["steps"][-1][2] for rank in slow.ranks]
claim("all end somewhat later", SLOW_STEPS * max(WORK_MS) < min(ended_ms) <= max(ended_ms) < 1.25 * min(ended_ms))
claim("either b may be missing", parts(["abbc", "abbc", "abc", "abbc"]) == (1, 2, [2]))
has_record = any(rank.reported["calls"] for rank in flight.ranks)
claim("lines tell which call is missing", list(flown.values()) == [(0, 2, [2]), (1, 1, [2])], where=has_record)
lines = [[call[2] for call in flight.ranks[rank].reported["calls"]] for rank in (0, 2)]
claim("it is the one of line 11", lines == [[9, 11, 12], [9, 12]], where=has_record)

# %% tags=["claim"]
cases = (left_out, other_order)
claim("names and shapes tell little", [parts(case.calls(labels=False)) for case in cases] == [(0, 11, [1]), None])
claim("labels part at call 9", [parts(case.calls(labels=True)) for case in cases] == [(9, 9, [1])] * 2)
records = [case.table("record") for case in cases]
claim("call 9 is the same in both", records[0].loc["call 9"].tolist() == records[1].loc["call 9"].tolist())
claim("later calls are not", records[0].loc["call 10"].tolist() != records[1].loc["call 10"].tolist())
claim("the swapped run is equal from call 11 on", len(set(records[1].loc["call 11"])) == 1)
slow_times = slow_run.table("times").astype(float)
claim("over a slow link the receiver waits", slow_times["swap ms"].idxmax() == "rank 2")
claim("all compute alike", slow_times["compute ms"].max() < 2 * slow_times["compute ms"].min())
slow_links = slow_run.table("links")["ms"].astype(float)
claim("one link is slow, and one way", slow_links[slow_links > 30].index.tolist() == ["rank 3 → 2"])
claim("by 60 ms", min(slow_links["rank 3 → 2"], slow_times["swap ms"]["rank 2"]) >= 60)
differs = (other_order.table("weights") != "0").to_numpy().tolist()
claim("rank 1 alone differs in the end", differs == [[False, False], [False, True]] + [[False, False]] * 2)
nans = born.table("losses") == "nan"
claim("only rank 2 has the first NaN", nans.loc["step 3"].tolist() == [False, False, True, False])
claim("then all have", nans.loc["step 4"].all())
claim("the right way is equal up to rounding", gaps["averaged"].max() < 1e-5)
claim("a sum is off by the same share", (gaps["only summed"] - (RANKS - 1)).abs().max() < 1e-4)
is_bias = gaps.index.str.contains("bias")
claim("only the biases are off", ((gaps["biases left out"] > 1e-5) == is_bias).all())
claim("the factor is four", set(scaled.table("gradients")["factor"]) == {"4.000"})
claim("and no more is wrong", (scaled.table("gradients").iloc[:, 1].astype(float) < 1e-5).all())

# %% [markdown]
# ## 6. Mystery runs ({minutes} minutes)
#
# `Mystery(seed)` draws one of the causes below and a rank, tells you neither, and runs the program of section 1 with
# it. You see the symptom, and may ask at most three tools. Then you name the rank (None for a fault of the whole
# program), the cause, and the line that proves it.
#
# Before you ask, go through the list: which causes could look so, and which tool would show a different row for each?
# Each tool shows a healthy run with the same data, too. A wrong name costs nothing, but the check says which part is
# right: decide first.

# %% tags=["nbval-ignore-output"]
show_causes()
first, second, third, fourth = (Mystery(seed, beside=True) for seed in (17, 45, 23, 48))
print("", first, second, third, fourth, sep="\n")

# %% tags=["look", "nbval-ignore-output"]
first.ask()  # lists the tools, which costs nothing; ask here, one tool at a time
### BEGIN SOLUTION
first.ask("stacks")
second.ask("ends")
second.ask("record")
third.ask("weights")
third.ask("gradients")
third.ask("samples")
fourth.ask("stacks")
fourth.ask("record")
### END SOLUTION

# %% [markdown]
# ### Exercise 4: rank, cause and proof (•••, {minutes} minutes)
#
# Return what you found: `{17: (rank, "cause", "tool: row"), 45: …, 23: …, 48: …}`, with the causes as the list above
# spells them, and the row as the tool prints it, such as `"stacks: rank 0"`. Other looks may rule causes out, but this
# line alone must prove yours: neither the healthy run nor another cause on the list would leave it.
#
# <details><summary>Hint 1: mystery 17</summary>
#
# Two ranks wait for the other two. In which call do these stand, and who of a pair should send first?
#
# </details>
# <details><summary>Hint 2: mystery 45</summary>
#
# Which of these ends prove something, by exercise 1? If none does, what compares the ranks' calls?
#
# </details>
# <details><summary>Hint 3: mystery 23</summary>
#
# Ask the questions of section 5 in their order. Each answer leaves fewer causes; which tool tells those apart?
#
# </details>
# <details><summary>Hint 4: mystery 48</summary>
#
# One rank stands in a send, as in mystery 17. In which call does its partner stand, and what does that say about the
# step in which each of them is? Then compare the ranks' calls.
#
# </details>


# %%
def diagnoses() -> dict[int, tuple[int | None, str, str]]:
    ### BEGIN SOLUTION
    return {
        17: (3, "deadlock", "stacks: rank 3"),
        45: (0, "other shape", "record: call 12"),
        23: (None, "same samples", "samples: rank 1"),
        48: (2, "left out", "record: call 11"),
    }
    ### END SOLUTION


# %%
checks.diagnoses(diagnoses)

# %% [markdown]
# <details><summary>The four, look by look (open it once you have named them)</summary>
#
# **17**, a hang. `stacks`, which a healthy run does not leave, since it ends:
#
# ```
# rank 0  train → average_gradients → reduce → all_reduce
# rank 1  train → average_gradients → reduce → all_reduce
# rank 2  train → swap_boundary → send
# rank 3  train → swap_boundary → send
# ```
#
# Ranks 0 and 1 wait for 2 and 3. Both of these stand in `send`, each waiting for the other: a circle. Rank 2 is even
# and may send first, so rank 3 broke the rule.
#
# **45**, a failure. `ends`: rank 0 was aborted (-6), and the others left echoes, or -15 if torchrun was faster. None of
# these proves anything. A healthy run has four times 0. `record`, where the rows of the healthy run are all (12, 12):
#
# ```
#          rank 0                  rank 1                  rank 2                  rank 3
# call 11  3.0 (12, 12) float32    3.0 (12, 12) float32    3.0 (12, 12) float32    3.0 (12, 12) float32
# call 12  4.2 (11, 12) float32 …  4.2 (12, 12) float32 …  4.2 (12, 12) float32 …  4.2 (12, 12) float32 …
# ```
#
# In call 12 rank 0 brings one row less. So here the aborted rank is the guilty one: its neighbour in the ring, rank 1,
# sends more bytes than it expects.
#
# **23**, a run that ends, with a usual loss; its cause is new, too. `weights` are equal, as in the healthy run, so all
# ranks do the same. `gradients`: no factor explains them, since the rest is nearly as large as the gradient itself.
# `samples`:
#
# ```
#                     this run   healthy, same data
# factor              1.063      1.000
# rest                8.8e-01    1e-07
# rank 0 read first   104, 11    104, 11
# rank 1 read first   104, 11    77, 110
# ```
#
# All ranks share their samples: "samples: rank 1" proves it, or another rank's row.
#
# **48**, a hang again. At the first look its `stacks` resemble those of 17:
#
# ```
# rank 0  train → average_gradients → reduce → all_reduce
# rank 1  train → average_gradients → reduce → all_reduce
# rank 2  train → swap_boundary → send
# rank 3  train → average_gradients → reduce → all_reduce
# ```
#
# Rank 2 is even and may send first, and its partner, rank 3, stands in no swap at all. So this is no deadlock of a
# pair: rank 2 has come to the next step's swap, while the others still reduce. `record`, where the healthy run's rows
# are equal on all ranks:
#
# ```
#          rank 0                  rank 1                  rank 2                rank 3
# call 9   3.2 (12, 12) float32    3.2 (12, 12) float32    3.2 (12, 12) float32  3.2 (12, 12) float32
# call 10  3.1 (12, 12) float32    3.1 (12, 12) float32    3.0 (12, 12) float32  3.1 (12, 12) float32
# call 11  3.0 (12, 12) float32 …  3.0 (12, 12) float32 …  –                     3.0 (12, 12) float32 …
# ```
#
# In call 10 rank 2 reduces layer 0 where the others reduce layer 1, as it would if it swapped the two. Call 11 decides:
# rank 2 does not make it, so layer 1 was left out.
#
# What tells most causes apart? For a hang it is the stacks and then the record, for a failure the ends and then the
# record, for a slow run the times, and for wrong numbers the weights.
#
# </details>
#
# The last one has no hints. Any other seed is another run.

# %% tags=["nbval-ignore-output"]
# then, in a cell of your own: last.ask("…"), and last.name(rank=…, cause="…", because="…")
last = Mystery(SEED, beside=True)
last

# %% [markdown]
# <details><summary>Mystery 27, look by look (open it once you have named it)</summary>
#
# The run ends, with a usual loss and usual steps, so the numbers may be wrong: are the weights equal? `weights`, where
# the healthy run has only zeros:
#
# ```
#         start    end
# rank 0      0      0
# rank 1  0.549  0.549
# rank 2      0      0
# rank 3      0      0
# ```
#
# Rank 1 differed before the first step, so no reduction is to blame: "other weights", proved by "weights: rank 1".
# Since all ranks apply the same averaged gradients, the difference stays as it was.
#
# </details>
#
# *Takeaway: choose the tool by the symptom, and ask first what tells most causes apart.*
#
# ## 7. The code you would write ({minutes} minutes)
#
# ### Exercise 5: whose weights are different? (•, {minutes} minutes)
#
# Every rank calls `odd_ranks(model)` at the same time, and gets the same list: the ranks whose weights are not, bit for
# bit, those of most ranks. Send much less than the weights. The check changes as little as one bit, or swaps two
# weights.
#
# <details><summary>Hint 1</summary>
#
# What short text differs whenever any of many bytes does, or two of them change places?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `parameter.detach().cpu().numpy().tobytes()` gives bytes, and `dist.all_gather_object(marks, mine)` fills a list with
# one object from each rank. For "most" see exercise 2.
#
# </details>


# %%
def odd_ranks(model: nn.Module) -> list[int]:
    ### BEGIN SOLUTION
    import hashlib
    from collections import Counter

    whole = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    marks = [None] * dist.get_world_size()
    dist.all_gather_object(marks, hashlib.sha256(whole).hexdigest())
    usual = Counter(marks).most_common(1)[0][0]
    return [rank for rank, mark in enumerate(marks) if mark != usual]
    ### END SOLUTION


# %%
searched = checks.odd_ranks(odd_ranks)
find_odd = odd_ranks if searched.ok else right_odd_ranks
searched

# %% [markdown]
# In this script five lines help to find a fault; their comments begin with a number. In the two runs below it, rank 2
# has only three batches, or begins with other weights.

# %% tags=["script"]
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record  # 1: each rank's exception goes to a file with its time, from which torchrun makes its report
def main(seed=0, batches=20, wait_s=60, find_odd=lambda model: []):
    dist.init_process_group("gloo", timeout=timedelta(seconds=wait_s))  # 2: who waits longer than this gets an error
    torch.manual_seed(seed)  # the same weights on every rank ...
    model = torch.nn.Linear(8, 1)
    torch.manual_seed(1000 + dist.get_rank())  # 3: ... samples of its own, and tomorrow the same ones
    for _ in range(batches):
        dist.monitored_barrier(timeout=timedelta(seconds=wait_s / 2), wait_all_ranks=True)  # 4: names who is missing
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
    odd = find_odd(model)  # 5: your exercise; without it, nothing is compared
    assert not odd, f"other weights on ranks {odd}"
    dist.destroy_process_group()


if dist.is_torchelastic_launched():  # torchrun has started this file
    main()  # in a file of your own, with your function in it: main(find_odd=odd_ranks)

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name missing --use main
main(batches=3 if os.environ["RANK"] == "2" else 20, wait_s=2)

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name unequal --use main,find_odd
main(seed=int(os.environ["RANK"] == "2"), find_odd=find_odd)

# %% [markdown]
# *Of the run that waits, the headline is rank 0's, and its message names rank 2, which did not come (line 4).* Ranks 1 and
# 3 may stop earlier. labkit's headline passes over these, but torchrun alone calls the earliest error the root cause. In the other run each rank that
# reports an error names rank 2 (line 5).
#
# <details><summary>The other lines, and what they cost</summary>
#
# Line 1 shows nothing here, because labkit keeps each rank's error anyway. Without it, torchrun alone says of an
# exception only "To enable traceback see …". Line 2 alone would say what you saw of the timeout in section 2. Line 3
# gives each rank other samples, and makes the same failure come again tomorrow.
#
# Line 4 comes before the first collective that a rank may miss. It sends messages in every step, so take it out when
# the search is over. Line 5 reads all weights, so do it every hundred steps.
#
# Line 4 knows gloo only: make a second group for it, `dist.new_group(backend="gloo")`.
#
# </details>
#
# *Takeaway: a limit ends the wait, a monitored barrier names who is missing, and error files keep what each rank said.*

# %% tags=["claim"]
last_losses = [run.table("losses").astype(float).loc["step 7"].mean() for run in (healthy, other_order, scaled)]
claim("no loss gives its run away", max(last_losses) < 1.05 * min(last_losses))
claim("the wrong scale has the lowest", min(last_losses) == last_losses[2])
sound, swift = third.healthy, slow_run.healthy
right = (sound.table("gradients")["factor"] == "1.000").all() and (sound.table("weights") == "0").all().all()
claim("a healthy run has right numbers", right)
claim("and its links are fast", swift.table("links")["ms"].astype(float).max() < 30)
claim("all its ranks end well", set(second.healthy.table("ends")["status"]) == {0})
claim("the headline is rank 0's", missing.rank == 0)
claim("rank 0 names rank 2", "Ranks 2 failed" in missing.log.with_name("rank_00000.log").read_text())
said = [end["error"] for end in rank_ends(unequal) if end["status"] != -15]
claim("all that are not stopped name rank 2", bool(said) and all("ranks [2]" in error for error in said))

# %% [markdown]
# ### The card
#
# Keep this card for the day when something breaks; now find the rows of mysteries 17 and 45. Its second table names
# tools outside this lab.

# %%
card  # card.write("card.html") writes a page to print

# %% [markdown]
# ## 8. Leave with ({minutes} minutes)
#
# - If a run hangs, then look at all stacks, and follow who waits for whom.
# - If all ranks show errors, then look for an error that is no echo, or a signal such as -9; if there is none, compare
#   the ranks' calls.
# - If nothing looks wrong, then compare weights between ranks, and a gradient with one device's.
#
# ### Five questions
#
# <details><summary>1. Seven of eight ranks say "Connection closed by peer". Where do you look?</summary>
#
# At the eighth. The seven are echoes. If it left no exception, its exit status and the system's log say why it is gone: -9
# if it was killed, 0 if it believed that it was done. With -6 it may have been aborted for another rank's call, and a
# record of calls tells; -15 says nothing.
#
# </details>
# <details><summary>2. A run hangs. All ranks stand in an all-reduce, in the same line. What may it be?</summary>
#
# Their tensors may differ in size, as when one rank has left out an earlier call, so that its calls meet other ones of the
# others. Compare records, with labels or stacks. Or the ranks are in different groups, or the network is broken.
#
# </details>
# <details><summary>3. A profile of rank 0 shows 70 % of the time in all-reduces. Is the network slow?</summary>
#
# Not necessarily. It may wait for a slower rank. Look at the same number on all ranks: if one of them waits much less,
# and computes longer, that is the one.
#
# </details>
# <details><summary>4. Weights are equal on all ranks, the loss falls. What can still be wrong?</summary>
#
# All ranks may do the same wrong thing: a wrong factor, or the same samples. Compare gradients with one device's.
#
# </details>
# <details><summary>5. All ranks compute alike, and rank 5 waits long for what rank 4 sends. Which is slow?</summary>
#
# Perhaps neither. Time the link from 4 to 5, one way, and then others of rank 4 and of rank 5: if these are fast, it is
# the link.
#
# </details>
#
# ### Papers and pages
#
# - Llama Team, *The Llama 3 herd of models*, 2024: table 5, and section 3.3.4 on finding failures.
#   <https://arxiv.org/abs/2407.21783>
# - PyTorch: debugging `torch.distributed`
#   <https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications>, the flight
#   recorder <https://docs.pytorch.org/tutorials/intermediate/debug_hangs_with_flight_recorder.html>, error files
#   <https://docs.pytorch.org/docs/stable/elastic/errors.html>
# - NVIDIA: Xid errors <https://docs.nvidia.com/deploy/xid-errors/index.html>
#
# **Next**: take a script of your own, add the five lines of section 7 with your `odd_ranks`, and break it on purpose.
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("failures")
