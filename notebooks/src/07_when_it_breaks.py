# %% [markdown]
# # Lab 7. When it breaks
#
# A distributed program breaks in ways that a single process does not: it hangs without a word, it shows an error of a
# rank that did nothing wrong, or it trains, and the numbers are wrong. In this lab you meet real ranks with a fault that
# nobody tells you, choose your tools, and name the rank and the cause.
#
# After this lab you can
#
# - say which rank began it, when all of them show errors;
# - read the stacks of all ranks, and find the call in which they disagree;
# - tell a slow rank from a slow link, and wrong numbers from right ones;
# - go from a symptom to its cause in at most three looks.
#
# You need lab 0: rank, collective, deadlock, data-parallel training. You need no GPU. The lab takes about
# {core_minutes} minutes. Exercises have dots for their difficulty: •, •• or •••. Many cells fail on purpose; the text
# says so before each.

# %% tags=["nbval-ignore-output"]
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
from labkit_course.checks.mystery import CAUSES, KnownFault, Mystery, ends_table, rank_ends
from labkit_course.checks.symptoms import card

doctor.show()

# %% tags=["parameters"] small={"RANKS": 3} points=[[2,0],[3,24],[4,36]]
RANKS: int = 2  # ranks of the parity check in section 6; other cells say their own numbers
SEED: int = 47  # which mystery you meet last, in section 7

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one rank has nobody to disagree with, and four share two cores")
require("SEED", SEED, at_least=0, because="mysteries are counted from 0")

WORK_MS, SLOW_STEPS = [5, 10, 15, 40], 6  # section 5: what each rank computes in a step

# %% [markdown]
# ## 1. One case, worked together ({minutes} minutes)
#
# Llama 3 with 405 billion parameters was trained on 16,384 GPUs. In 54 days the training had 419 unplanned
# interruptions, one in three hours, because one failed rank stops all. Its authors say what they were:
#
# | cause | interruptions |
# |---|---|
# | a faulty GPU, its NVLink included | 148 |
# | a GPU's memory (HBM3) | 72 |
# | a software bug | 54 |
# | a network switch or cable | 35 |
# | maintenance of a host | 32 |
# | all others, most of them hardware | 78 |
#
# So hardware leads, and only three interruptions took much work by hand: programs found and replaced what was broken. On
# sixteen GPUs hardware fails a thousand times less often, and your own code fails as often as anybody's. Either way
# the work is the same. You see a **symptom**, you look with a **tool**, and you name a rank and a cause.
#
# In this case four real ranks train a small network on this machine, over gloo. In each step a rank loads a
# batch, swaps a boundary with its partner (ranks 0 and 1 are a pair, so are 2 and 3; the even rank sends first),
# computes gradients, and reduces them layer by layer. Something is wrong with this run: it hangs.
#
# In a hang, look first at the **stacks** of all ranks. A stack is the list of calls in which a process stands; without
# labkit you get one by `py-spy dump --pid …`.

# %%
worked = Mystery(33)
print(worked)
worked.ask("stacks")

# %% [markdown]
# Do not ask which rank looks broken, ask who waits for whom. Ranks 2 and 3 stand in an all-reduce, so they wait for
# ranks 0 and 1. Rank 0 sends to its partner, rank 1, so it waits for rank 1. And rank 1 waits at the end of its
# training. Three ranks wait for rank 1, which believes that it is done. Its log should say why. A diagnosis is a rank,
# a cause, and the line that proves it, as "tool: row".

# %%
worked.ask("logs")
worked.name(rank=1, cause="fewer batches", because="logs: rank 1")

# %% [markdown]
# Rank 1 had three batches, and the others went on to a fourth. The repair is to agree beforehand: an all-reduce with
# `ReduceOp.MIN` over the numbers of batches. PyTorch's `DistributedSampler` instead repeats some samples, so that all
# ranks have equally many.
#
# *Takeaway: in a hang, look at the stack of every rank, and follow who waits for whom. It leads to a rank that stands
# elsewhere, or round in a circle.*
#
# ## 2. Errors and their echoes ({minutes} minutes)
#
# The friendliest failure is an exception. The next cell fails on purpose, on rank 2, while the others wait for it.
# `--name` keeps the failure for the cells below.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name raised
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    time.sleep(0.2)
    raise ValueError("sample 1701 has no label")
dist.all_reduce(torch.ones(1))

# %% tags=["nbval-ignore-output"]
ends_table(rank_ends(raised))

# %% [markdown]
# *How each rank ended. Only rank 2 has an error of its own. What the others say of a closed connection is an **echo**:
# the rank that they talked with had gone.*
#
# A status below 0 is the signal that ended a process: -15 is SIGTERM, by which torchrun ends those that are left.
# labkit keeps an **error file** for each rank, with the time. In a script of your own `@record` writes it (section 8).
#
# The second failure says nothing at all: a rank dies by SIGKILL, which Linux sends when the machine's memory is full,
# and a scheduler when a job's time is over. The next cell fails on purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name killed
import signal

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))

# %% tags=["nbval-ignore-output"]
ends_table(rank_ends(killed))

# %% [markdown]
# *Rank 1 left no error: only its status, -9, says that it was killed.* In a container the same is shown as 137, which
# is 128 + 9. Look next into the system's log (`dmesg | grep -i "out of memory"`) or the scheduler's. There a failing
# GPU shows up as well, as a line with `Xid` and a number.
#
# ### Exercise 1: who began it? (•, {minutes} minutes)
#
# `ends` is what `rank_ends` gives: of each rank its `rank`, `status`, `time` and `error`. Return the rank that failed
# first by itself. A rank that ended well (status 0), was ended by torchrun (-15), or only lost a connection did not
# begin it. `error` is empty if a rank left none, and `time` is when it ended, in seconds. Mind the times: an echo may be
# written before torchrun notices that a rank was killed.
#
# <details><summary>Hint 1</summary>
#
# First leave out those three kinds. Then take the earliest of the rest.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `"Connection closed by peer" in end["error"]` recognises an echo of gloo's. (Elsewhere there are also "Connection
# reset by peer" and "Broken pipe".)
#
# </details>


# %%
def culprit(ends: list[dict]) -> int:
    ### BEGIN SOLUTION
    own = [end for end in ends if end["status"] not in (0, -15) and "Connection closed by peer" not in end["error"]]
    return min(own, key=lambda end: end["time"])["rank"]
    ### END SOLUTION


# %%
checks.culprit(culprit)

# %% [markdown]
# *Takeaway: lost connections are echoes. Look for the rank with an error of its own, or with a signal that torchrun did not
# send.*
#
# ## 3. Stacks ({minutes} minutes)
#
# Here is a hang whose cause you can read. Rank 3 has one batch less than the others, leaves the loop, and goes on to
# something else. The next cell hangs on purpose, and is stopped after 3 seconds.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 3 --fails --name hung
dist.init_process_group("gloo")
batches = 2 if dist.get_rank() == 3 else 3
for _ in range(batches):
    dist.all_reduce(torch.ones(1))
time.sleep(60)  # rank 3 computes something else

# %% [markdown]
# *Three ranks stand in the all-reduce, and rank 3 does not.*
#
# Nobody watches stacks at night, but by default gloo waits for half an hour and NCCL for ten minutes, until an error says
# that somebody timed out. With a `timeout` of your own in `init_process_group` it comes sooner, and a **monitored barrier** before the collective names who is missing.
#
# With NCCL a collective returns at once, so a stack stands at the next call that needs a result, such as `loss.item()`.
#
# *Takeaway: begin with the odd stack. Where stacks do not tell the cause, compare the calls.*

# %% tags=["claim"]
own = [end["rank"] for end in rank_ends(raised) if end["error"] and "Connection closed" not in end["error"]]
claim("only rank 2 has an error of its own", own == [2])
(end,) = (end for end in rank_ends(killed) if end["rank"] == 1)
claim("rank 1 left no error, only its status", (end["status"], end["error"]) == (-9, ""))
inside = [rank for rank, stack in hung.stacks.items() if "all_reduce" in stack]
claim("three ranks stand in the all-reduce, and rank 3 does not", inside == [0, 1, 2])

# %% [markdown]
# ## 4. A record of calls ({minutes} minutes)
#
# Ranks can all come, and to different calls. Calls carry no names: the first all-reduce of one rank meets the first of
# another, whatever tensor it carries. In the next cell two ranks want to add up `a`, which is 1 on rank 0 and 2 on rank
# 1, and `b`, which is 100 and 200. Rank 0 begins with `a`, rank 1 with `b`. Commit: what does each hold as `a`
# afterwards? Right would be 1 + 2 on both.

# %% tags=["commit"]
mine = commit(a_on_rank_0=None, a_on_rank_1=None)
### BEGIN SOLUTION
mine = commit(a_on_rank_0=1 + 200, a_on_rank_1=2 + 100)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name swapped
from labkit.rank import report

dist.init_process_group("gloo")
a, b = torch.tensor([1.0, 2.0])[dist.get_rank()], torch.tensor([100.0, 200.0])[dist.get_rank()]
for tensor in (a, b) if dist.get_rank() == 0 else (b, a):
    dist.all_reduce(tensor)
report(a=a.item())

# %%
held = {f"a_on_rank_{index}": rank.reported["a"] for index, rank in enumerate(swapped.ranks)}
plots.comparison_table(held, {"a_on_rank_0": 201, "a_on_rank_1": 102}, yours=mine)

# %% [markdown]
# *Each rank's `a` met the other's `b`, nobody complains, and the ranks go on with different numbers.* The order can
# differ because of a loop over a `set`, a dictionary that was filled in another order, or a condition that is true on
# one rank only. With another collective or another shape a run hangs, times out or aborts, and does not say why.
#
# PyTorch can compare what ranks are about to call, with `TORCH_DISTRIBUTED_DEBUG=DETAIL`. It notices another collective
# and another shape at once, but not the swap above: there both are the same, and only the weights tell (section 6).
# Since all ranks must agree before each call, it costs time in every step, so switch it on for the one run in which you
# search. The next cell fails on purpose. (The variable is read when a group is made, so the cell sets the level, and
# makes a new group.)

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails --name detail
dist.init_process_group("gloo")
dist.set_debug_level(dist.DebugLevel.DETAIL)
group = dist.new_group()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3), group=group)
else:
    dist.broadcast(torch.ones(3), src=0, group=group)

# %% [markdown]
# A **recorder** costs hardly any time: each rank keeps a list of its calls, and after a hang the lists are compared.
# PyTorch has one, the **flight recorder**: with NCCL, set `TORCH_NCCL_DUMP_ON_TIMEOUT=1`; when a timeout strikes, each
# rank writes a file for `python -m torch.distributed.flight_recorder.fr_trace`. For gloo one asks for the record with a
# private function. Here rank 2 leaves out a call; in the records calls count from 0.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --name flight
import pickle
from datetime import timedelta

from labkit.rank import report

dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=1))
dist.all_reduce(torch.ones(16, 8), group=group)
dist.all_reduce(torch.ones(16), group=group)
try:
    if dist.get_rank() == 2:
        time.sleep(1.5)
    else:
        dist.all_reduce(torch.ones(4, 16), group=group)
except RuntimeError:
    pass
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
entries = pickle.loads(dump()).get("entries", []) if dump else []
report(calls=[[entry["profiling_name"], entry["input_sizes"][0]] for entry in entries])

# %% [markdown]
# ### Exercise 2: where do they part? (••, {minutes} minutes)
#
# `logs` holds of each rank its calls in order, each a tuple such as `("all_reduce", (8, 8))`. Return the first place at
# which not all ranks made the same call, and a list of those that differ from what most did: `(1, [2])`,
# or None if they never differ. A rank whose log has ended made no call there. There are three ranks or more, and most agree.
#
# <details><summary>Hint 1</summary>
#
# At each place make a list of the ranks' calls. `itertools.zip_longest(*logs)` does that, with None for ended logs.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `collections.Counter(calls).most_common(1)[0][0]` is what most did.
#
# </details>


# %%
def where_they_part(logs: list[list[tuple]]) -> tuple[int, list[int]] | None:
    ### BEGIN SOLUTION
    from collections import Counter
    from itertools import zip_longest

    for place, calls in enumerate(zip_longest(*logs)):
        usual = Counter(calls).most_common(1)[0][0]
        odd = [rank for rank, call in enumerate(calls) if call != usual]
        if odd:
            return place, odd
    return None
    ### END SOLUTION


# %%
parted = checks.where_they_part(where_they_part)
parts = where_they_part if parted.ok else theory.first_diverging_call
flown = [[(name, tuple(shape)) for name, shape in rank.reported["calls"]] for rank in flight.ranks]
place, odd = parts(flown) or (0, [0])  # an older torch keeps no record of gloo's calls
print(f"rank {odd[0]} did not make call {place}: {flown[0][place] if flown[0] else 'no record'}")
parted

# %% [markdown]
# Above, rank 2's record merely ends, but if it goes on, a single place does not tell what happened. The next cell runs the
# program of section 1 with two faults that we know, both on rank 1. The tool `record` shows the calls around the first
# place where the ranks part: `3.2` is layer 2 in step 3, and `…` a call that is not done.

# %% tags=["nbval-ignore-output"]
left_out, other_order = KnownFault("left out", rank=1), KnownFault("other order", rank=1)
left_out.ask("record")
other_order.ask("record")

# %% [markdown]
# *Call 9 is the same line in both, and call 10 is not.* Where a call was left out, what follows comes one place
# early, until rank 1 waits in its next swap, for which rank 0 is not ready. Where two were swapped, call 10 has the other one, and from call 11 on all is equal again. The first run hangs
# in the end; the second goes on, with wrong numbers.
#
# *Takeaway: find the first place at which the records part, and look one call further.*
#
# ## 5. A time line ({minutes} minutes)
#
# A **straggler** is a rank that needs longer than the others. Since they wait for it, all ranks take equally long for a
# step, and all look busy. In the next cell sleeping stands for computing, and rank 3 has most to do.

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
# *Six steps on four ranks; the dashed line is six times the longest computing. Rank 3 waits least, and all others wait
# for it. A profile of rank 0 alone would say that the all-reduce is slow.*


# %% tags=["claim"]
def waited(result: labkit.RunResult) -> list[float]:
    """The part of its time that each rank waited in collectives."""
    return [
        sum(done - ready for _, ready, done in rank.reported["steps"]) / rank.reported["steps"][-1][2]
        for rank in result.ranks
    ]


claim("rank 3 waits least", min(waited(slow)) == waited(slow)[3])
claim("most of rank 0's time goes into the all-reduce", waited(slow)[0] > 0.5)

# %% [markdown]
# If no rank computes longer, a link may be slow. Time each by itself: the tool `links` sends a question one way and waits for
# the answer. Here are a straggler and a slow link side by side, both on rank 3.

# %% tags=["nbval-ignore-output"]
straggler, slow_link = KnownFault("straggler", rank=3), KnownFault("slow link", rank=3)
straggler.ask("times")
slow_link.ask("times")
slow_link.ask("links")

# %% [markdown]
# *The straggler computes for 60 ms, while with the slow link nobody computes longer, but rank 2's swap takes 60 ms, because it waits for what rank 3 sends.* A receiver shows the wait, and the
# link from its sender makes it. On a cluster send to it from a third rank, too: if that is
# as slow, it is the receiver's card.
#
# If the slow rank stays the same when the data move, it is the machine: a hot GPU, a slow disk, a neighbour. On GPUs
# take a profiler, because `time.perf_counter` sees only the launch.
#
# *Takeaway: a rank that computes longer waits least, and all others wait for it. If all compute alike, time each link.*
#
# ## 6. Wrong numbers, and no error ({minutes} minutes)
#
# The worst failures do not look like failures: the loss falls. Three questions find them, in the order below.
#
# 1. **Are the weights equal on all ranks?** If not, a reduction is missing, two tensors met each other, or the weights
#    differed from the start. (Shards of FSDP differ, as they should.)
# 2. **Is each gradient that of one device** that sees all samples? If all are off by one factor, it is a scaling.
#    Otherwise find out which samples each rank read.
# 3. **Does each parameter move as its gradient says?** If not, the optimizer holds another tensor.
#
# A NaN has a question of its own: whose loss was NaN first, before an all-reduce carried it to all ranks? Two tools, on
# known faults: `weights` on the swapped calls of section 4, and `losses` on a NaN.

# %% tags=["nbval-ignore-output"]
other_order.ask("weights")
born = KnownFault("nan", rank=2)
born.ask("losses")

# %% [markdown]
# *Weights: equal at the start, and rank 1 alone differs at the end. Losses: in step 3 only rank 2 has a NaN; one step
# later all ranks do.* The other three agree on wrong numbers, since they averaged what rank 1 sent.
#
# A **parity check** asks the second question: it trains the same network on one device and compares tensor by tensor.
# PyTorch calls `average` whenever a gradient is complete, so three ways to average are three short functions.


# %%
def right(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def not_divided(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


def weights_alone(gradient: torch.Tensor) -> None:
    if gradient.dim() > 1:  # the biases are left out
        right(gradient)


def averaging_with(average: Callable[[torch.Tensor], None]) -> Callable:
    def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: average(each.grad))

    return data_parallel


# %% tags=["nbval-ignore-output"]
PARITY = {"mode": "yours", "nproc": RANKS, "dim": 64, "timeout_s": 30}
checked = {
    average.__name__: labkit.check("ddp_compile", use={"data_parallel": averaging_with(average)}, **PARITY)
    for average in (right, not_divided, weights_alone)
}
for name, result in checked.items():
    print(f"{name}: {result.verdict_text}")

# %% [markdown]
# *Parity names the tensor that is furthest off, which is a bias where the biases were left out.*
#
# Compare gradients, not losses, because Adam divides each gradient by its own running size, so a factor in all gradients hardly
# changes its steps, and the loss hardly shows it. With another order of adding up, numbers differ in their last digits only:
# repeat both runs in float64, and rounding shrinks by a million or more, whereas a fault stays.
#
# *Takeaway: a falling loss proves nothing, and one gradient, compared with one device's, proves much.*

# %% tags=["claim"]
claim("DETAIL names both collectives", all(name in detail.message for name in ("ALLREDUCE", "BROADCAST")))
claim("the ranks part at call 2, which rank 2 did not make", (place, odd) == (2, [2]))
records = [case.table("record") for case in (left_out, other_order)]
claim("call 9 is the same in both", records[0].loc["call 9"].tolist() == records[1].loc["call 9"].tolist())
claim("later calls are not", records[0].loc["call 10"].tolist() != records[1].loc["call 10"].tolist())
claim("the swapped run is equal from call 11 on", len(set(records[1].loc["call 11"])) == 1)
claim("a straggler computes longer", straggler.table("times")["compute ms"].astype(float).idxmax() == "rank 3")
claim("over a slow link the receiver waits", slow_link.table("times")["swap ms"].astype(float).idxmax() == "rank 2")
claim("one way is slow", slow_link.table("links")["ms"].astype(float).idxmax() == "rank 3 → 2")
claim(
    "rank 1 alone differs in the end",
    (other_order.table("weights")["end"] != "0").tolist() == [False, True] + [False] * 2,
)
claim(
    "only rank 2 has the first NaN",
    (born.table("losses").loc["step 3"] == "nan").tolist() == [False, False, True, False],
)
claim("then all have", (born.table("losses").loc["step 4"] == "nan").all())
claim("only the right one is equal", [result.ok for result in checked.values()] == [True, False, False])
claim("it is a bias", "bias" in checked["weights_alone"].verdict_text)

# %% [markdown]
# ## 7. Mystery runs ({minutes} minutes)
#
# Now nobody tells you the fault. `Mystery(seed)` draws one of the causes below and a rank, and runs the program of
# section 1 with it. You see the symptom, and may ask at most three tools, one call each: think before you ask. Then you
# name the rank, the cause, and the line that proves it. For a fault of the whole program, the rank is None. If you run
# a mystery's cell again, you have three looks again.
#
# Without a name, `ask` lists the tools and costs nothing. Of the three runs below the first hangs, the second fails, and the third looks as if nothing were wrong. Before you ask, go through the list: which causes could look so, and
# which tool would show a different row for each? Ask in the cell below each run.

# %%
pandas.DataFrame.from_dict(CAUSES, orient="index", columns=["what it means"])

# %% tags=["nbval-ignore-output"]
first = Mystery(17)
first

# %% tags=["commit", "nbval-ignore-output"]
first.ask()
### BEGIN SOLUTION
first.ask("stacks")
### END SOLUTION

# %% tags=["nbval-ignore-output"]
second = Mystery(1)
second

# %% tags=["commit", "nbval-ignore-output"]
second.ask()
### BEGIN SOLUTION
second.ask("ends")
second.ask("record")
### END SOLUTION

# %% tags=["nbval-ignore-output"]
third = Mystery(23)
third

# %% tags=["commit", "nbval-ignore-output"]
third.ask()
### BEGIN SOLUTION
third.ask("weights")
third.ask("gradients")
third.ask("samples")
### END SOLUTION

# %% [markdown]
# ### Exercise 3: rank, cause and proof (•••, {minutes} minutes)
#
# Return what you found: `{17: (rank, "cause", "tool: row"), 1: …, 23: …}`, with the causes as the table above spells
# them, and the row as the tool prints it, such as `"stacks: rank 0"`. A line proves a cause if no other cause on the
# list would leave it. The check tells which part is right.
#
# <details><summary>Hint 1: mystery 17</summary>
#
# Two ranks wait for the other two. In which call do these stand, and who of a pair should send first?
#
# </details>
# <details><summary>Hint 2: mystery 1</summary>
#
# The rank that was aborted got something that it could not take, from a neighbour. What does each rank send?
#
# </details>
# <details><summary>Hint 3: mystery 23</summary>
#
# Ask the questions of section 6 in their order. A gradient that is not one device's, and not by a factor alone, comes
# of other samples.
#
# </details>


# %%
def diagnoses() -> dict[int, tuple[int | None, str, str]]:
    ### BEGIN SOLUTION
    return {
        17: (3, "deadlock", "stacks: rank 3"),
        1: (2, "other shape", "record: call 4"),
        23: (None, "same samples", "samples: rank 0"),
    }
    ### END SOLUTION


# %%
checks.diagnoses(diagnoses)

# %% [markdown]
# <details><summary>The three, look by look (open it once you have named them)</summary>
#
# - **17**. Stacks: ranks 0 and 1 stand in an all-reduce, so they wait for 2 and 3. Both of these stand in `send`, each
#   waiting for the other: a circle. Rank 2 is even and may send first, so rank 3 broke the rule.
# - **1**. Ends: rank 1 was aborted (-6), so it looks guilty. The others lost their connections: `Read error` is an echo,
#   too. Record: in call 4 rank 2 sends float64, twice the bytes, and its neighbour in the ring stumbles over them. An abort
#   may be somebody else's doing. (Rank 1's
#   log says "144 vs 72" bytes.)
# - **23**. Weights are equal, so all ranks do the same. Gradients: no factor explains them, since what it leaves is as
#   large as the gradient itself. Samples: all ranks read the same ones.
#
# What tells most causes apart? For a hang it is the stacks, for a failure the ends and then the record, for a slow run the
# times, and for wrong numbers the weights.
#
# </details>
#
# The last one has no hints and no answer in this notebook. `Mystery(SEED)` with any other seed is another run, for
# as long as you like.

# %% tags=["nbval-ignore-output"]
last = Mystery(SEED)  # then, in a cell of your own: last.ask("…"), and last.name(rank=…, cause="…", because="…")
last

# %% [markdown]
# *Takeaway: choose the tool by the symptom, and ask first what tells most causes apart.*
#
# ## 8. The code you would write ({minutes} minutes)
#
# A script can help you find what went wrong. This one has five such lines, each with a comment that begins with a number.

# %% tags=["script"]
# %%torchrun -n 4
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record  # 1: an exception goes to a file with its time, so torchrun can show the first
def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # 2: who waits longer than this gets an error
    torch.manual_seed(0)  # the same weights on every rank ...
    model = torch.nn.Linear(8, 1)
    torch.manual_seed(1000 + dist.get_rank())  # 3: ... samples of its own, and tomorrow the same ones
    for _ in range(20):
        dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)  # 4: names who is missing
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
    for parameter in model.parameters():
        largest = parameter.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(parameter, largest), "ranks differ in their weights"  # 5: are all equal?
    dist.destroy_process_group()


main()

# %% [markdown]
# Line 4 must come before the first collective that a rank may miss. It knows gloo only: with NCCL make a second group
# for it, `dist.new_group(backend="gloo")`. It sends messages in every step, so take it out when the search is over.
# Line 5 costs a reduction of all weights, so do it every hundred steps. It says that ranks differ, not which is wrong:
# a rank whose weights are all the largest passes.
#
# ## 9. The card ({minutes} minutes)
#
# Begin with what you see. All symptoms were provoked by this course's own tests; the last two columns were not, they
# come from documentation. `card.write("card.html")` writes a page to print.

# %%
card

# %% [markdown]
# With NCCL a **watchdog**, a thread of PyTorch's, ends a process whose collective takes too long: status -6, and
# "Watchdog caught collective operation timeout" in the log. A GPU that waits in a collective shows 100 % utilization
# and little power in `nvidia-smi`; so a hang can be seen from outside.
#
# Before a long run, many clusters test every host: a large matrix multiplication on each GPU, an all-reduce within the
# host and one over all hosts, each against a number that is known to be good. A host that falls behind is left out.
#
# ## 10. Leave with ({minutes} minutes)
#
# - If a run hangs, then look at all stacks, and follow who waits for whom.
# - If all ranks show errors, then find the one with an error or a signal of its own.
# - If nothing looks wrong, then compare weights between ranks, and a gradient with one device's.

# %% tags=["summary"]
tools = {
    "raised": ("error files", raised.rank == 2),
    "killed": ("exit status", killed.exc_type == "SIGKILL"),
    "one batch less": ("stacks", inside == [0, 1, 2]),
    "another collective": ("DETAIL", "ALLREDUCE" in detail.message),
    "a call left out": ("flight recorder", (place, odd) == (2, [2])),
    "straggler": ("time line", waited(slow).index(min(waited(slow))) == 3),
    "slow link": ("links", slow_link.table("links")["ms"].astype(float).idxmax() == "rank 3 → 2"),
    "NaN": ("losses", (born.table("losses").loc["step 3"] == "nan")["rank 2"]),
    "wrong averaging": ("parity", not checked["not_divided"].ok),
}
pandas.DataFrame.from_dict(tools, orient="index", columns=["found by", "found"])

# %% tags=["claim"]
claim("each failure was found by the tool that the text names", all(held for _, held in tools.values()))

# %% [markdown]
# ### Five questions
#
# <details><summary>1. Seven of eight ranks say "Connection closed by peer". Where do you look?</summary>
#
# At the eighth. The seven are echoes. If it left no exception, its exit status and the system's log say why it is gone.
#
# </details>
# <details><summary>2. A run hangs. All ranks stand in an all-reduce, in the same line. What may it be?</summary>
#
# They may carry different tensors in that line: one rank has left out an earlier call, and since then its calls meet
# the wrong ones of the others. Compare records. Or the ranks are in different groups, or the network is broken.
#
# </details>
# <details><summary>3. A profile of rank 0 shows 70 % of the time in all-reduces. Is the network slow?</summary>
#
# Not necessarily. It may wait for a slower rank. Look at the same number on all ranks: if one of them waits much less, and computes longer, that is the one.
#
# </details>
# <details><summary>4. Weights are equal on all ranks, the loss falls. What can still be wrong?</summary>
#
# All ranks may do the same wrong thing: a wrong factor, or the same samples. Compare gradients with one device's, and
# then the weights after a step, because a parameter may be missing from the optimizer.
#
# </details>
# <details><summary>5. Your loss differs from yesterday's by 10⁻⁴ after a thousand steps. Rounding?</summary>
#
# The size does not tell. Repeat both in float64: if the difference shrinks by a million or more, it was rounding.
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
# **Next**: take a script of your own, add the five lines of section 8, and break it once on purpose.
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("failures")
