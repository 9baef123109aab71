# %% [markdown]
# # Lab 7. When it breaks
#
# A distributed program breaks in ways that one process does not know. It hangs without a word. It shows an error of a
# rank that did nothing wrong. It trains, and the numbers are wrong. In this lab you break programs on purpose, on real
# ranks, find the cause with a tool, and repair them.
#
# After this lab you can
#
# - say which rank began it, when all of them show errors;
# - find the call in which ranks disagree, with a recorder of your own and with PyTorch's;
# - find a rank that makes all others wait, and one that runs out of memory;
# - tell three kinds of silently wrong numbers apart, and rounding from a fault.
#
# You need lab 0: rank, collective, deadlock, data-parallel training. You need no GPU. The sections marked **core** take
# about {core_minutes} minutes. The others are optional. Exercises have dots for their difficulty: •, •• or •••. Many cells fail on
# purpose; the text says so before each. Where a cell says `commit`, put down your own numbers before you run. Leave
# None where you have none.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import json
import os
import re
import time
from collections.abc import Callable

import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.parallel import failures
from labkit.theory import failures as theory
from labkit_course.checks import failures as checks
from labkit_course.checks.claims import claim, commit

doctor.show()

# %% [markdown]
# The parameters of this notebook. You may change them; the next cell refuses what cannot work. The text speaks of
# these; cells say what yours change.

# %% tags=["parameters"] small={"RANKS": 3, "DIM": 20} points=[[2,4],[3,65],[4,256]]
RANKS: int = 2  # ranks in sections 6 (parity), 9 and 11; other cells say their own numbers
DIM: int = 64  # width of the parity program's four linear layers, and of section 11's gradients

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one rank has nobody to disagree with, and four share two cores")
require("DIM", DIM, at_least=4, because="a layer needs a width")


def given(answer: object) -> object:
    """An answer, and – for none."""
    return "–" if answer is None else answer


# %% [markdown]
# ## 1. Why
#
# **core, {minutes} minutes**
#
# Llama 3 with 405 billion parameters was trained on 16,384 GPUs. In 54 days of it, the training had 419 unplanned
# interruptions (Llama Team 2024, table 5). In data-parallel training all ranks wait for each other in every step. So
# one failed rank stops all.
#
# Assume that each GPU fails as often as there, and independently of the others. How many hours pass between two
# failures on 16,384 GPUs, and how many on 1024?

# %% tags=["commit"]
mine = commit(hours_16384=None, hours_1024=None)
### BEGIN SOLUTION
mine = commit(hours_16384=54 * 24 / 419, hours_1024=54 * 24 / 419 * 16)
### END SOLUTION

# %%
by_theory = {"hours_16384": 54 * 24 / 419, "hours_1024": 54 * 24 / 419 * 16384 / 1024}
rows = {name: ["–" if mine[name] is None else f"{mine[name]:.3g}", f"{hours:.3g}"] for name, hours in by_theory.items()}
pandas.DataFrame.from_dict(rows, orient="index", columns=["yours", "theory"])

# %% [markdown]
# A run of that size must expect a failure every three hours. Some of them are faults of code, and those do not need
# many GPUs. All of this lab happens on at most four ranks of one machine, over gloo. Elsewhere the kinds of failures
# are the same. Their messages differ; section 12 says how with NCCL.
#
# ## 2. The code you would write
#
# **core, {minutes} minutes**
#
# A script can be written so that it tells you what went wrong. This one has five such lines, each with a comment that
# begins with a number. The sections below show what each of them is for, and section 11 what they cost.

# %% tags=["script"]
# %%torchrun -n 4
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record  # 1: an exception is written to a file with its time, so torchrun can show the first
def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # 2: who waits longer than this gets an error
    torch.manual_seed(0)  # the same weights on every rank ...
    model = torch.nn.Linear(8, 1)
    torch.manual_seed(1000 + dist.get_rank())  # 3: ... samples of its own, and tomorrow the same ones
    for step in range(20):
        dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)  # 4: names who is missing
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
        if step % 10 == 9:
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            largest = weights.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            assert torch.equal(weights, largest), "ranks differ in their weights"  # 5: are all equal?
    print("equal to the end")
    dist.destroy_process_group()


main()

# %% [markdown]
# `monitored_barrier` knows gloo only. With NCCL one makes a second group for it: `dist.new_group(backend="gloo")`.
#
# Line 4 must stand before the first collective that a rank may miss. Otherwise the others wait for that rank in an
# all-reduce, whose error says only that somebody timed out.
#
# Line 5 deserves a word. Each rank compares its weights with the largest over all ranks. If any two ranks differ in a
# place, the one whose weight is smaller there sees it. So who raises need not be who is wrong. For a large model
# compare one parameter at a time. With FSDP the shards of ranks differ, as they should.
#
# Now the tour. For each failure: what you see, where to look first, what it was.
#
# ## 3. A rank that raises, a rank that dies
#
# **core, {minutes} minutes**
#
# The first is the friendliest failure: rank 2 raises an exception. The others wait for it in an all-reduce. The next
# cell fails on purpose. `--name` keeps the failure for the cells below.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name raised
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    time.sleep(0.2)
    raise ValueError("sample 1701 has no label")
dist.all_reduce(torch.ones(1))

# %% [markdown]
# labkit shows rank 2's exception and none of the others'. How does it know? Here is how all four ranks ended.


# %%
def ends_of(failure: labkit.RankFailed) -> list[dict]:
    """How each rank of a failed run ended, from the files in the run's folder."""
    folder = failure.log.parent
    errors = [json.loads(path.read_text()) for path in folder.glob("rank_*.error.json")]
    ends = {end["rank"]: end | {"status": 1, "error": f"{end['exc_type']}: {end['message']}"} for end in errors}
    for end in json.loads((folder / "exit.json").read_text())["failures"]:  # how torchrun saw them
        ends[end["rank"]] = end | {"error": ""} | ends.get(end["rank"], {}) | {"status": end["exitcode"]}
    return [{name: ends[rank][name] for name in ("rank", "status", "time", "error")} for rank in sorted(ends)]


def shown(ends: list[dict]) -> pandas.DataFrame:
    """The same as a table: seconds after the first error, for ranks that have one."""
    first = min((end["time"] for end in ends if end["error"]), default=0.0)
    rows = {
        f"rank {end['rank']}": {
            "status": end["status"],
            "s after the first error": f"{end['time'] - first:.2f}" if end["error"] else "–",
            "error": re.sub(r"\[/.*?\] | \[127.*", "", end["error"]),
        }
        for end in ends
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


# %% tags=["nbval-ignore-output"]
shown(ends_of(raised))

# %% [markdown]
# *How each rank ended. Only rank 2 has an error of its own. What others say of a closed connection is an **echo**: the
# rank that they talked with had gone.* A status below 0 is the signal that ended a process: -15 is SIGTERM, by which
# torchrun ends those that are left.

# %% tags=["claim"]
own = [end["rank"] for end in ends_of(raised) if end["error"] and "Connection closed" not in end["error"]]
claim("only rank 2 has an error of its own", own == [2])
claim("labkit names it", (raised.rank, raised.exc_type) == (2, "ValueError"))

# %% [markdown]
# Such **error files** are what you look for in a run of your own, too: one for each rank that raised, with the time and
# the traceback. labkit writes them, and so does `@record` of section 2. torchrun gives each rank the name of its file
# in an environment variable, keeps the files where `--log-dir` says, and prints the first failure at the end. This is
# what `@record` writes; one rank is enough to see it. The cell fails on purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 1 --fails --name noted
from torch.distributed.elastic.multiprocessing.errors import record

from labkit.rank import report


@record
def main():
    raise ValueError("sample 1701 has no label")


try:
    main()
finally:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
        report(error_file=file.read())

# %%
error_file = json.loads(labkit.load(noted.log.parent).ranks[0].reported["error_file"])["message"]
print(error_file["message"], "and:", ", ".join(sorted(error_file["extraInfo"])))

# %% tags=["claim"]
claim("the error file has time and traceback", {"timestamp", "py_callstack"} <= error_file["extraInfo"].keys())

# %% [markdown]
# The second failure says nothing at all. A rank dies by SIGKILL: that is what Linux sends when the machine's memory is
# full, and what a scheduler sends when a job's time is over. There is no exception and no file. The next cell fails on
# purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name killed
import signal

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))

# %% tags=["nbval-ignore-output"]
shown(ends_of(killed))

# %% [markdown]
# *Rank 1 left no error: only its status, -9, says that it was killed.* In a container the same is shown as 137, which
# is 128 + 9. Where to look next: the system's log (`dmesg | grep -i "out of memory"`), or the scheduler's.

# %% tags=["claim"]
(end,) = (end for end in ends_of(killed) if end["rank"] == 1)
claim("rank 1 left no error, only its status", (end["status"], end["error"]) == (-9, ""))
claim("labkit names it", (killed.rank, killed.exc_type) == (1, "SIGKILL"))

# %% [markdown]
# A crash in native code is the third of this kind. There is no Python exception, but Python can still say where it was:
# set `PYTHONFAULTHANDLER=1`. labkit does the same for every rank. The next cell reads address 0, and fails on purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails --name crashed
import ctypes

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    ctypes.string_at(0)
dist.all_reduce(torch.ones(1))

# %% tags=["claim"]
claim("the stack names the line of the cell", crashed.exc_type == "SIGSEGV" and '"<cell>", line 6' in crashed.traceback)

# %% [markdown]
# ### Exercise 1: who began it? (•, {minutes} minutes)
#
# `ends` is what `ends_of` gives: of each rank its `rank`, `status`, `time` and `error`. Return the rank that failed
# first by itself. Whoever ended well (status 0), was ended by torchrun (-15), or only lost a connection did not begin
# it. Mind the times: an echo may be written before torchrun notices that a rank was killed.
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

# %%
pandas.DataFrame(
    {
        "yours": [given(culprit(ends_of(run))) for run in (raised, killed)],
        "labkit's": [raised.rank, killed.rank],
    },
    index=["raised", "killed"],
)

# %% [markdown]
# ## 4. A rank that does not come
#
# **core, {minutes} minutes**
#
# Ranks can disagree about *how many* collectives there are. Here rank 3 has one batch less than the others. It leaves
# the loop and goes on to something else. The others wait for it. The next cell hangs on purpose, and is stopped after 3
# seconds.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 3 --fails --name hung
dist.init_process_group("gloo")
batches = 2 if dist.get_rank() == 3 else 3
for _ in range(batches):
    dist.all_reduce(torch.ones(1))
time.sleep(60)  # rank 3 computes something else

# %% [markdown]
# *Three ranks stand in the all-reduce, and rank 3 does not.* A **stack** is the list of calls in which a process
# stands; the lines marked above are its last ones in the cell. In a hang, look at the stack of *every* rank, and look
# for the odd one. Without labkit: `py-spy dump --pid …`.

# %% tags=["claim"]
inside = [rank for rank, stack in hung.stacks.items() if "all_reduce" in stack]
claim("three ranks stand in the all-reduce, and rank 3 does not", inside == [0, 1, 2])

# %% [markdown]
# Nobody looks at stacks at night. How many seconds would gloo wait by default, if nobody stops it? Lab 0 told it.

# %% tags=["commit"]
mine = commit(gloo_s=None)
### BEGIN SOLUTION
mine = commit(gloo_s=1800)
### END SOLUTION

# %%
from torch.distributed.constants import default_pg_timeout

plots.comparison_table({"gloo_s": default_pg_timeout.total_seconds()}, {"gloo_s": 30 * 60}, yours=mine, tolerance=0.05)

# %% [markdown]
# NCCL waits 10 minutes. With a `timeout` of your own in `init_process_group`, a hang becomes an error. But the error
# only says that somebody timed out. A **monitored barrier** says who is missing: rank 0 asks every rank for a sign of
# life. The next cell fails on purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails --name missing
from datetime import timedelta

dist.init_process_group("gloo")
batches = 2 if dist.get_rank() == 3 else 3
for _ in range(batches):
    dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    dist.all_reduce(torch.ones(1))
time.sleep(60)

# %% [markdown]
# *The barrier names rank 3, after the one second of its timeout.* Who raises is not to blame: rank 0 asks all the others,
# so the error is its own, and the name is in its message. What ranks 1 and 2 say after that is an echo of another kind.

# %% tags=["claim"]
claim("the barrier names rank 3", "Ranks 3 failed to pass monitoredBarrier" in missing.message)

# %% [markdown]
# ### Exercise 2: take as many steps as all can (•, {minutes} minutes)
#
# The repair is to agree beforehand. `batches` is how many batches this rank has. Return the number of steps that every
# rank can take. Your function runs on four real ranks.
#
# <details><summary>Hint 1</summary>
#
# It takes one collective. Which rank sets the number?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.all_reduce(tensor, op=dist.ReduceOp.…)`, and `.item()` makes an int of the result.
#
# </details>


# %%
def steps_in_common(batches: int) -> int:
    ### BEGIN SOLUTION
    fewest = torch.tensor(batches)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
    return fewest.item()
    ### END SOLUTION


# %%
checks.steps_in_common(steps_in_common)

# %% [markdown]
# That drops the batches that some ranks have beyond this number. PyTorch's `DistributedSampler` does the contrary: it
# repeats some samples, so that all ranks have equally many. `torch.distributed.algorithms.Join` lets ranks that are
# done answer the others' collectives with zeros.
#
# ## 5. Ranks that disagree about a call
#
# **core, {minutes} minutes**
#
# All ranks come, but to different calls. Three cases, on two ranks: another collective, another shape, and another
# order of two tensors with equal shapes.
#
# Ranks do not send names. The first all-reduce of one rank meets the first of the other, whatever tensor it carries. In
# the third case both ranks want to add up `a`, full of 1, and `b`, full of 100. Rank 0 begins with `a`, rank 1 with
# `b`. What does rank 0 hold as `a` afterwards? Right would be 1 + 1.

# %% tags=["commit"]
mine = commit(a_on_rank_0=None)
### BEGIN SOLUTION
mine = commit(a_on_rank_0=1 + 100)
### END SOLUTION

# %% [markdown]
# Each case is run twice: as usual, and with `TORCH_DISTRIBUTED_DEBUG=DETAIL`. In that mode PyTorch compares, before
# every collective, what all ranks are about to call. The variable is read when `torch.distributed` is imported;
# `dist.set_debug_level` sets the same for groups made afterwards. The limit is one second.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name disagreed
from datetime import timedelta

from labkit.rank import report

dist.init_process_group("gloo")
rank = dist.get_rank()


def another_collective(group):
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        dist.broadcast(torch.ones(3), src=0, group=group)


def another_shape(group):
    dist.all_reduce(torch.ones(3 + rank), group=group)


def another_order(group):
    a, b = torch.full((2,), 1.0), torch.full((2,), 100.0)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor, group=group)
    report(a=a[0].item())


groups = {}
for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
    dist.set_debug_level(level)
    for case in (another_collective, another_shape, another_order):
        groups[level.name, case] = dist.new_group(timeout=timedelta(seconds=1))
said, took = {}, {}
for (level, case), group in groups.items():
    dist.barrier()
    start = time.perf_counter()
    try:
        case(group)
        said[f"{level} {case.__name__}"] = ""
    except RuntimeError as error:
        said[f"{level} {case.__name__}"] = str(error)
    took[f"{level} {case.__name__}"] = time.perf_counter() - start
    dist.barrier()
report(said=said, took=took)


# %%
def in_short(text: str) -> str:
    """What an error of the cell above comes to."""
    if "Detected mismatch" in text:
        return "mismatch: " + text.partition("differ in the following aspects:")[2].strip().replace(
            "vs", " vs"
        ).replace("Tensor Tensor", "tensor")
    return "a timeout, or its echo" if text else "no error"


rows = {}
for case in ("another_collective", "another_shape", "another_order"):
    texts = {
        level: [rank.reported["said"][f"{level} {case}"] for rank in disagreed.ranks] for level in ("OFF", "DETAIL")
    }
    rows[case.replace("_", " ")] = [" / ".join(map(in_short, texts["OFF"])), in_short(texts["DETAIL"][0])]
pandas.DataFrame.from_dict(rows, orient="index", columns=["as usual, rank 0 / rank 1", "with DETAIL, rank 0"])

# %% [markdown]
# *Without DETAIL, the first two show as a timeout that does not name the calls. With DETAIL the first two are named at
# once, with the difference. The third is silent in both modes.* Look at the second row once more: rank 0 went on, as if
# all were well.

# %% tags=["claim"]
of = {name: [rank.reported["said"][name] for rank in disagreed.ranks] for name in disagreed.ranks[0].reported["said"]}
for case in ("another_collective", "another_shape"):
    claim("as usual it shows as a timeout", any("Timed out" in text for text in of[f"OFF {case}"]))
    claim("the timeout does not name the calls", not any("ALLREDUCE" in text for text in of[f"OFF {case}"]))
    claim("with DETAIL it is named", all("Detected mismatch" in text for text in of[f"DETAIL {case}"]))
    claim("at once", all(rank.reported["took"][f"DETAIL {case}"] < 0.9 for rank in disagreed.ranks))
claim(
    "DETAIL names both collectives",
    all(name in of["DETAIL another_collective"][0] for name in ("ALLREDUCE", "BROADCAST")),
)
claim("with another shape rank 0 went on, as if all were well", of["OFF another_shape"][0] == "")
claim("the third is silent in both modes", of["OFF another_order"] == of["DETAIL another_order"] == ["", ""])

# %%
plots.comparison_table({"a_on_rank_0": disagreed.ranks[0].reported["a"]}, {"a_on_rank_0": 101}, yours=mine)

# %% [markdown]
# *Rank 0's `a` met rank 1's `b`.* With equal shapes neither gloo nor DETAIL can notice, and the numbers are wrong. Where
# the ranks then hold different values, the comparison of section 2 finds it. Here both hold 101, in both tensors, and
# only one device's numbers tell.
#
# How does an order come to differ? Through a loop over a `set` of strings, whose order is another one in each Python
# process; through a dictionary that was filled in another order; through a condition that is true on one rank only.
# Sort the names first.
#
# ## 6. Build it: a flight recorder
#
# **core, {minutes} minutes**
#
# DETAIL costs time in every collective (section 11). A recorder costs hardly any: each rank keeps a list of its calls.
# When the run hangs, the lists are compared. You write both parts.
#
# ### Exercise 3: where do they part? (••, {minutes} minutes)
#
# `logs` holds of each rank its calls in order, each a tuple such as `("all_reduce", (8, 8))`. Return the first place at
# which not all ranks made the same call, and a list of those that differ from what most did: `(1, [2])`. A rank whose
# log has ended made no call there. Return None if they never differ. There are three ranks or more, and most agree.
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
parted

# %% [markdown]
# ### Exercise 4: record every call (•••, {minutes} minutes)
#
# Return a function that does what `collective` does, and leaves a trace in the list `log`. Its first argument is a
# tensor. An entry is a dict: `call`, the collective's name (`collective.__name__`); `shape`, the tensor's as a tuple;
# `done`, False until the collective has returned.
#
# Think of what you will want to see after a hang: the call that never returned. (`done` means returned. With
# `async_op=True`, and with NCCL always, a call returns before it is carried out. There the lists still show who left
# out a call.) Callers use all arguments of a collective, and what it returns. Your function runs on two real ranks.
#
# <details><summary>Hint 1</summary>
#
# Inside, define `call(tensor, *args, **kwargs)`, and return it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Append the entry, call the collective, set `entry["done"]`, return the result. In this order.
#
# </details>


# %%
def recorded(collective: Callable, log: list[dict]) -> Callable:
    ### BEGIN SOLUTION
    def call(tensor, *args, **kwargs):
        entry = {"call": collective.__name__, "shape": tuple(tensor.shape), "done": False}
        log.append(entry)
        result = collective(tensor, *args, **kwargs)
        entry["done"] = True
        return result

    return call
    ### END SOLUTION


# %%
verdict = checks.recorded(recorded)
verdict

# %% [markdown]
# Now use both. Four ranks average the gradients of a network. Somebody has written a special case, in which rank 2
# leaves out the last bias. Their process group gives up after one second. `--use` hands your recorder to the ranks; while
# exercise 4 is open, labkit's own stands in for it.

# %%
recorder = recorded if verdict.ok else failures.recorded
parts = where_they_part if parted.ok else theory.first_diverging_call

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --use recorder --name forgot
from datetime import timedelta

from labkit.rank import report

dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=1))  # made when all ranks are there
log = []
all_reduce = recorder(dist.all_reduce, log)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model(torch.randn(4, 8)).sum().backward()
try:
    for name, parameter in model.named_parameters():
        if dist.get_rank() == 2 and name == "2.bias":
            time.sleep(1.5)  # it does something else
        else:
            all_reduce(parameter.grad, group=group)
except RuntimeError as error:
    print("an error, as expected:", "timed out" if "Timed out" in str(error) else "lost a connection")
report(log=log)

# %%
logs = [[(entry["call"], tuple(entry["shape"])) for entry in rank.reported["log"]] for rank in forgot.ranks]
place, odd = parts(logs)
called = logs[odd[0]][place] if place < len(logs[odd[0]]) else "nothing"
print(f"ranks part at call {place}: rank {odd[0]} called {called}, rank 0 called {logs[0][place]}")

# %% [markdown]
# *The recorder names the call and the rank. A bias of 4 numbers is what the others wanted to add up, and rank 2 did not.
# Their last call is not done.* Calls are counted from 0.
#
# Why does rank 2 leave out the *last* bias here? Had it left out the first, its next call would have met theirs with
# another size. Then gloo may abort a whole process (status -6, SIGABRT) with "Received data size doesn't match expected
# size", and what that process kept in memory is lost. Where that can happen, write the log to a file.

# %% tags=["claim"]
claim("the recorder names the call and the rank", (place, odd) == (3, [2]))
claim("a bias of 4 numbers", logs[0][place] == ("all_reduce", (4,)))
last = [rank.reported["log"][-1]["done"] for rank in forgot.ranks]
claim("their last call is not done", last == [False, False, True, False])

# %% [markdown]
# ### PyTorch's own
#
# PyTorch has such a recorder: the **flight recorder**. With torch 2.13 it records gloo's collectives, without being
# asked to, with the line of your code that called each. Here it looks at a fault of the same kind.

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
calls = [[entry["profiling_name"], entry["input_sizes"][0], entry["state"]] for entry in entries]
lines = [[frame["line"] for frame in entry["frames"] if frame["filename"] == "<cell>"][:1] for entry in entries]
report(calls=calls, lines=lines)

# %%
flown = [[(name, tuple(shape)) for name, shape, _ in rank.reported["calls"]] for rank in flight.ranks]
at = parts(flown)
if at:
    place, odd = at
    name, shape, state = flight.ranks[0].reported["calls"][place]
    line = flight.ranks[0].reported["lines"][place][0]
    print(f"rank {odd[0]} did not make call {place}: {name} of {tuple(shape)} in line {line}, state {state}")
else:
    print("this version of torch keeps no record of gloo's calls")

# %% [markdown]
# *The flight recorder has each rank's calls, and your `where_they_part` finds rank 2 in them.*
#
# What it cannot do here, as measured with torch 2.13: for gloo the state of a call stays "scheduled", also of one that
# is done, and a timeout writes no file. One asks for the record, as above, with a private function. PyTorch's analyser
# (`python -m torch.distributed.flight_recorder.fr_trace`) stops on records of gloo with a KeyError. With NCCL it is
# different: set `TORCH_NCCL_DUMP_ON_TIMEOUT=1` and `TORCH_FR_DUMP_TEMP_FILE=/tmp/trace_`, and each rank writes a file
# when a timeout strikes, which the analyser reads (PyTorch's documentation; not tried here).

# %% tags=["claim"]
claim("where_they_part finds rank 2 in them", at == (2, [2]))
claim(
    "the state stays scheduled", {call[2] for rank in flight.ranks for call in rank.reported["calls"]} == {"scheduled"}
)
claim("the lines are those of the cell", flight.ranks[0].reported["lines"] == [[9], [10], [15]])

# %% [markdown]
# ### It changes nothing
#
# A recorder must not change what it records. So let the course's program train with it. `launch/ddp_compile.py` takes
# your averaging in place of its own, and `labkit.check` trains the same network on one device. Over two steps it
# compares outputs, gradients and parameters. PyTorch calls `average` whenever a gradient is complete (lab 0).


# %%
def averaging_with(average: Callable[[torch.Tensor], None]) -> Callable:
    """A ``data_parallel`` for the program, which averages each gradient in this way when it is complete."""

    def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: average(each.grad))

    return data_parallel


def recorded_average(gradient: torch.Tensor) -> None:
    """The mean over all ranks, by a recorded all-reduce."""
    recorder(dist.all_reduce, [])(gradient)
    gradient /= dist.get_world_size()


PARITY = {"mode": "yours", "nproc": RANKS, "dim": DIM, "timeout_s": 30}
right = labkit.check("ddp_compile", use={"data_parallel": averaging_with(recorded_average)}, **PARITY)
print(right.verdict_text)

# %% [markdown]
# ## 7. A rank that is slow
#
# **optional, {minutes} minutes**
#
# A **straggler** is a rank that needs longer than the others. All ranks then take equally long for a step: the others
# wait. So the time of a step does not tell who it is, and neither does a look at how busy they are.
#
# Here the cause is in the data. 32 texts of different lengths are sorted by length, and each of four ranks reads 8 in a
# row. `time.sleep` stands for computing, 0.02 ms a word, since four ranks would share two cores.

# %%
draw = torch.Generator().manual_seed(7)
LENGTHS = sorted(torch.randint(10, 400, (32,), generator=draw).tolist())
MS_A_WORD, SLOW_STEPS = 0.02, 6
in_a_row = [list(range(8 * rank, 8 * rank + 8)) for rank in range(4)]


def work_of(dealt: list[list[int]]) -> list[float]:
    """What each rank computes in a step, in ms."""
    return [MS_A_WORD * sum(LENGTHS[index] for index in each) for each in dealt]


work_ms = work_of(in_a_row)
print("ms of computing, by rank:", [round(each, 1) for each in work_ms])

# %% [markdown]
# How long does a step take, in ms? And how long would it take if all ranks had equally much to do?

# %% tags=["commit"]
mine = commit(step_ms=None, even_step_ms=None)
### BEGIN SOLUTION
mine = commit(step_ms=max(work_ms), even_step_ms=sum(work_ms) / 4)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --use work_ms,SLOW_STEPS --name slow
from labkit.rank import report

dist.init_process_group("gloo")
steps = []
dist.barrier()
start = time.perf_counter()
for _ in range(SLOW_STEPS):
    begun = time.perf_counter() - start
    time.sleep(work_ms[dist.get_rank()] / 1e3)
    ready = time.perf_counter() - start
    dist.all_reduce(torch.ones(1000))
    steps.append([begun, ready, time.perf_counter() - start])
report(steps=steps)

# %% [markdown]
# Measure, on each rank, how long it computes and how long it waits in collectives. Who waits least is the straggler.
# (On GPUs a profiler or CUDA events do this: `time.perf_counter` sees only the launch.)

# %% tags=["nbval-ignore-output"]
_ = plots.wait_times(slow, predicted_ms=SLOW_STEPS * max(work_ms))

# %% [markdown]
# *Six steps on four ranks. The dashed line is theory's end: six times the longest computing, without messages. All end
# within a few ms of each other. Rank 3 waits least, and all others wait for it. A profile of rank 0 alone would say
# that the all-reduce is slow: most of its time goes there.*


# %% tags=["claim"]
def waited(result: labkit.RunResult) -> list[float]:
    """The part of its time that each rank waited in collectives."""
    return [
        sum(done - ready for _, ready, done in rank.reported["steps"]) / rank.reported["steps"][-1][2]
        for rank in result.ranks
    ]


def step_ms(result: labkit.RunResult) -> float:
    """The time of the fastest step: what disturbs one makes it slower."""
    ends = [max(rank.reported["steps"][step][2] for rank in result.ranks) for step in range(SLOW_STEPS)]
    return min(end - start for start, end in zip([0.0, *ends], ends, strict=False)) * 1e3


ends_s = [rank.reported["steps"][-1][2] for rank in slow.ranks]
claim("all end within a tenth of their time", max(ends_s) - min(ends_s) < 0.1 * max(ends_s))
claim("rank 3 waits least", min(waited(slow)) == waited(slow)[3])
claim("most of rank 0's time goes into the all-reduce", waited(slow)[0] > 0.5)

# %% [markdown]
# ### Exercise 5: deal the work (••, {minutes} minutes)
#
# Return a list of indices for each rank, so that every sample has one rank, and all ranks have about as much to do. The
# rank with most may have 5 % more than the best that is known.
#
# <details><summary>Hint 1</summary>
#
# Equal numbers of samples are not equal work.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Go through the samples from the longest to the shortest. Give each to the rank that has least so far.
#
# </details>


# %%
def deal(lengths: list[int], ranks: int) -> list[list[int]]:
    ### BEGIN SOLUTION
    dealt, work = [[] for _ in range(ranks)], [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        least = work.index(min(work))
        dealt[least].append(index)
        work[least] += lengths[index]
    return dealt
    ### END SOLUTION


# %%
verdict = checks.deal(deal)
verdict

# %%
work_ms = work_of(deal(LENGTHS, 4) if verdict.ok else theory.balance_samples(LENGTHS, 4))

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --use work_ms,SLOW_STEPS --name even
from labkit.rank import report

dist.init_process_group("gloo")
steps = []
dist.barrier()
start = time.perf_counter()
for _ in range(SLOW_STEPS):
    begun = time.perf_counter() - start
    time.sleep(work_ms[dist.get_rank()] / 1e3)
    ready = time.perf_counter() - start
    dist.all_reduce(torch.ones(1000))
    steps.append([begun, ready, time.perf_counter() - start])
report(steps=steps)

# %% tags=["nbval-ignore-output"]
_ = plots.wait_times(even, predicted_ms=SLOW_STEPS * max(work_ms))

# %% [markdown]
# *The same texts, dealt by work. The steps are shorter, and each rank waits for a smaller part of its time than rank 0
# did.* What is left is the all-reduce itself, and the time that a rank needs to wake up.

# %% tags=["claim"]
claim("the steps are shorter", step_ms(even) < step_ms(slow))
claim("each rank waits for a smaller part of its time than rank 0 did", max(waited(even)) < waited(slow)[0])

# %% tags=["nbval-ignore-output"]
by_theory = {"step_ms": max(work_of(in_a_row)), "even_step_ms": sum(work_ms) / 4}
steps_ms = {"step_ms": step_ms(slow), "even_step_ms": step_ms(even)}
plots.comparison_table(steps_ms, by_theory, yours=mine, tolerance=0.15)

# %% [markdown]
# Of each run the fastest step counts. Theory leaves out the all-reduce, and the time that a rank needs to wake up; so
# the runs end behind the dashed lines.
#
# One thing has to change with it. Ranks now have different numbers of samples, so the mean of the ranks' mean losses is
# no longer the mean over all samples. Let each rank sum its losses, and divide by the number of samples of all ranks.
# The gradients are then added up and not averaged. DDP averages: multiply the loss by the number of ranks.
#
# Other causes show the same picture: a hot GPU that slows down, a slow disk, a neighbour on the same machine, rank 0
# that writes logs. If the slow rank stays the same when the data move, it is the machine, or what only this rank
# does.
#
# ## 8. Out of memory
#
# **optional, {minutes} minutes**
#
# Memory runs out on one rank first: the one with the longest batch. On a GPU that is `torch.OutOfMemoryError`, with the
# sizes in its text. On a CPU Linux kills the process (section 3). labkit can set a cap on Linux, so that asking for
# more raises an error, as on a GPU. Rank 1 has eight times as many rows as rank 0 here.

# %%
ROWS, WIDTH, LAYERS, CAP_MIB = [4096, 32768], 64, 8, 64


def deep() -> nn.Module:
    """Eight pairs of linear and tanh."""
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


# %% [markdown]
# For the backward pass each linear layer keeps its input, and each tanh its output. The output of a tanh is the next
# layer's input: the same memory. The loss keeps the targets, too. All of this is called **activations**. How many MB
# does rank 1 keep, and how many in each of eight pieces of its batch?

# %% tags=["commit"]
mine = commit(kept_mb=None, kept_in_a_piece_mb=None)
### BEGIN SOLUTION
mine = commit(
    kept_mb=(LAYERS + 2) * ROWS[1] * WIDTH * 4 / 1e6, kept_in_a_piece_mb=(LAYERS + 2) * ROWS[0] * WIDTH * 4 / 1e6
)
### END SOLUTION


# %%
def kept_mb(rows: int) -> float:
    """What autograd keeps for the backward pass of so many rows, parameters left out."""
    model, sizes = deep(), {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes() / 1e6
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inputs = torch.randn(rows, WIDTH)
        nn.functional.mse_loss(model(inputs), torch.zeros_like(inputs))
    return sum(sizes.values())


by_theory = {
    "kept_mb": (LAYERS + 2) * ROWS[1] * WIDTH * 4 / 1e6,
    "kept_in_a_piece_mb": (LAYERS + 2) * ROWS[1] / 8 * WIDTH * 4 / 1e6,
}
kept = {"kept_mb": kept_mb(ROWS[1]), "kept_in_a_piece_mb": kept_mb(ROWS[1] // 8)}
plots.comparison_table(kept, by_theory, yours=mine, tolerance=0.05)

# %% [markdown]
# The cap is 64 MiB, 67 MB, for what is allocated after the inputs: nine outputs of 8.4 MB, 75 MB, are too many. The
# next cell fails on purpose. (A cap on a CPU's memory needs Linux. On another system both cells with a cap name an
# error.)

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails --use deep,ROWS,CAP_MIB --name full
from labkit.session.memory_cap import cap_memory

dist.init_process_group("gloo")
model, inputs = deep(), torch.randn(ROWS[dist.get_rank()], 64)
with cap_memory(CAP_MIB, torch.device("cpu")):
    nn.functional.mse_loss(model(inputs), torch.zeros_like(inputs)).backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)

# %% [markdown]
# *Rank 1 alone went over its cap.* So the model fits, and a batch does not. Find the largest batch, and where in the
# step the peak lies: labkit's memory tables (lab 2) say it by category, on a GPU `torch.cuda.memory_summary()`, and
# `torch.cuda.memory._record_memory_history()` with every allocation.

# %% tags=["claim"]
claim("rank 1 alone went over its cap", (full.rank, full.exc_type) == (1, "MemoryCapExceeded"))

# %% [markdown]
# ### Exercise 6: a batch in pieces (••, {minutes} minutes)
#
# Leave in every parameter's `.grad` the gradient of the mean squared error over the whole batch. But never hold the
# activations of more than one piece. `tensor_split(pieces)` cuts a batch into pieces whose lengths may differ by one.
#
# <details><summary>Hint 1</summary>
#
# `backward()` frees what a piece kept, and adds to `.grad`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The loss of a piece is a mean over the piece. Which part of the batch is it?
#
# </details>


# %%
def backward_in_pieces(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, pieces: int) -> None:
    ### BEGIN SOLUTION
    for x, y in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        (loss * len(x) / len(inputs)).backward()
    ### END SOLUTION


# %%
verdict = checks.backward_in_pieces(backward_in_pieces)
verdict

# %%
in_pieces = backward_in_pieces if verdict.ok else failures.backward_in_pieces

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails --use deep,ROWS,CAP_MIB,in_pieces --name fitted
from labkit.session.memory_cap import cap_memory

dist.init_process_group("gloo")
model, inputs = deep(), torch.randn(ROWS[dist.get_rank()], 64)
with cap_memory(CAP_MIB, torch.device("cpu")):
    in_pieces(model, inputs, torch.zeros_like(inputs), 8)
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
print("a whole backward pass, below the same cap")

# %% [markdown]
# *The same batch below the same cap.* (To train on, weigh each rank's gradients by its number of rows: section 7.) This is
# **gradient accumulation**. With DDP, wrap all pieces but the last in
# `model.no_sync()`, or each piece pays an all-reduce. Other ways: checkpointing (lab 2), sharding (labs 1 and 2).

# %% tags=["claim"]
claim("the same batch fits below the same cap", isinstance(fitted, labkit.RunResult))

# %% [markdown]
# ## 9. Wrong numbers, and no error
#
# **core, {minutes} minutes**
#
# The worst failures end well. Here four programs train the same network on RANKS ranks. One is right. The others have one
# fault each:
#
# - **a missed reduction**: the biases' gradients are not averaged;
# - **a wrong scaling**: gradients are added up, and not divided;
# - **a stale parameter**: the last layer gets a new weight after the optimizer was made. The optimizer still holds the
#   old one.
#
# The cell is long: `train` holds the faults, and `audit` measures in the first step what the questions below ask.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n $RANKS --name silent
from labkit.rank import report

dist.init_process_group("gloo")
rank, ranks, RATE = dist.get_rank(), dist.get_world_size(), 0.05


def batch(of, step):
    draw = torch.Generator().manual_seed(1000 * step + of)
    x = torch.randn(16, 4, generator=draw)
    return x, x.sum(1, keepdim=True) + 1 + of


def train(fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if fault == "stale parameter":
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    losses = []
    for step in range(40):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(batch(rank, step)[0]), batch(rank, step)[1])
        loss.backward()
        for parameter in model.parameters():
            if fault == "missed reduction" and parameter.dim() == 1:
                continue
            dist.all_reduce(parameter.grad)
            if fault != "wrong scaling":
                parameter.grad /= ranks
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        if step == 0:
            first = audit(model, before)
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / ranks)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    largest, smallest = weights.clone(), weights.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return {"losses": losses, "apart": (largest - smallest).max().item(), **first}


def audit(model, before):
    """In the first step: each gradient as a factor of one device's, what is left of it, and how far each weight moved."""
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    alone.load_state_dict(dict(zip(alone.state_dict(), before, strict=True)))
    x, y = (torch.cat(each) for each in zip(*[batch(of, 0) for of in range(ranks)], strict=True))
    nn.functional.mse_loss(alone(x), y).backward()
    factors, rests, moved = [], [], []
    for parameter, right, old in zip(model.parameters(), alone.parameters(), before, strict=True):
        factors.append(((parameter.grad * right.grad).sum() / right.grad.square().sum()).item())
        rests.append(((parameter.grad - factors[-1] * right.grad).norm() / right.grad.norm()).item())
        moved.append(((parameter.detach() - old).norm() / (RATE * parameter.grad.norm())).item())
    return {"factors": factors, "rests": rests, "moved": moved}


report(**{fault: train(fault) for fault in ("right", "missed reduction", "wrong scaling", "stale parameter")})

# %% [markdown]
# First the test that everybody makes: does the loss fall?

# %% tags=["nbval-ignore-output"]
FAULTS = ("right", "missed reduction", "wrong scaling", "stale parameter")
found = {fault: silent.ranks[0].reported[fault] for fault in FAULTS}
_ = plots.values_by_step(
    {fault: found[fault]["losses"] for fault in FAULTS}, silent, ylabel="loss (mean squared error)"
)

# %% [markdown]
# *The loss of all four falls to less than half. None of the three faults fails this test. The lowest in the end is that
# of the missed reduction: each rank fits its own samples, and not those of others.*

# %% tags=["claim"]
for fault in FAULTS:
    claim(f"the loss falls: {fault}", found[fault]["losses"][-1] < found[fault]["losses"][0] / 2)
in_the_end = {fault: sum(found[fault]["losses"][-10:]) for fault in FAULTS}
claim(
    "the lowest in the end is that of the missed reduction", min(in_the_end, key=in_the_end.get) == "missed reduction"
)

# %% [markdown]
# Three questions tell them apart. Ask them in this order.
#
# 1. **Are the weights equal on all ranks?** If not, ranks are trained apart: a reduction is missing, two tensors met
#    each other (section 5), or the weights were not equal at the start.
# 2. **Is each gradient that of one device** that sees all samples (as many from each rank)? If all are off by one
#    factor, it is a scaling.
# 3. **Does each parameter move as its gradient says?** With plain SGD that is learning rate × gradient. With any
#    optimizer: does it move at all? If not, look whether the optimizer holds this very tensor.
#
# Before you look: by what factor is the gradient too large if the ranks' sums are not divided?

# %% tags=["commit"]
mine = commit(factor=None)
### BEGIN SOLUTION
mine = commit(factor=RANKS)
### END SOLUTION


# %%
def answers_to(one: dict) -> list[str]:
    """The three questions, for one program."""
    factors = sorted({round(factor, 3) for factor in one["factors"]})
    same = f"{factors[0]:g}" if len(factors) == 1 and max(one["rests"]) < 1e-4 else "differs"
    return ["yes" if one["apart"] == 0 else "no", same, f"{min(one['moved']):.2f}"]


questions = ["equal on all ranks?", "gradient / one device's", "least move / (rate × gradient)"]
pandas.DataFrame.from_dict({fault: answers_to(found[fault]) for fault in FAULTS}, orient="index", columns=questions)

# %% [markdown]
# *The wrong scaling fails the second question alone, the stale parameter the third alone. The missed reduction fails
# the first, and the second with it: the biases' gradients are one rank's own.*

# %% tags=["claim"]
claim("right: all three hold", answers_to(found["right"]) == ["yes", "1", "1.00"])
claim(
    "the missed reduction fails the first and the second",
    answers_to(found["missed reduction"])[:2] == ["no", "differs"],
)
claim(
    "the wrong scaling is a factor, and nothing else", answers_to(found["wrong scaling"]) == ["yes", f"{RANKS}", "1.00"]
)
claim(
    "the stale parameter does not move, and nothing else", answers_to(found["stale parameter"]) == ["yes", "1", "0.00"]
)

# %%
scaling = round(found["wrong scaling"]["factors"][0], 3)
plots.comparison_table({"factor": scaling}, {"factor": RANKS}, yours=mine, tolerance=0.05)

# %% [markdown]
# One warning for question 2: Adam divides each gradient by its own running size. So a factor in all gradients hardly
# changes its steps, and no curve shows it. Compare gradients, not losses.
#
# ### Exercise 7: three faults (••, {minutes} minutes)
#
# This function holds all three at once. Write it anew, right. The last layer shall begin with a weight of zeros. Two
# ranks must end with the weights of one device that sees all samples.
#
# ```python
# def broken(model, batches, learning_rate):
#     optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
#     model[-1].weight = nn.Parameter(torch.zeros_like(model[-1].weight))
#     for inputs, targets in batches:
#         optimizer.zero_grad()
#         nn.functional.mse_loss(model(inputs), targets).backward()
#         for parameter in model.parameters():
#             if parameter.dim() > 1:
#                 dist.all_reduce(parameter.grad)
#                 parameter.grad /= len(inputs)
#         optimizer.step()
# ```
#
# <details><summary>Hint 1</summary>
#
# Ask the three questions. Which parameters are not reduced? What is the sum divided by? What does the optimizer hold?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The optimizer comes after the new weight. Every parameter is reduced, and divided by `dist.get_world_size()`.
#
# </details>


# %%
def mended(model: nn.Sequential, batches: list[tuple[torch.Tensor, torch.Tensor]], learning_rate: float) -> None:
    ### BEGIN SOLUTION
    model[-1].weight = nn.Parameter(torch.zeros_like(model[-1].weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    ### END SOLUTION


# %%
checks.mended(mended)

# %% [markdown]
# ### Break it ({minutes} minutes)
#
# A parity check asks question 2 for you. Break the averaging of section 6 in one way: leave the division out, reduce
# only gradients with two dimensions, or average only half of each. Then see what parity says.


# %%
def broken_average(gradient: torch.Tensor) -> None:
    ### BEGIN SOLUTION
    if gradient.dim() > 1:  # the biases are left out
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    ### END SOLUTION


# %%
wrong = labkit.check("ddp_compile", use={"data_parallel": averaging_with(broken_average)}, **PARITY)
print(wrong.verdict_text)

# %% [markdown]
# ## 10. A run that differs from yesterday's
#
# **optional, {minutes} minutes**
#
# Two runs of the same program give different losses. Is something wrong? Three causes are usual.
#
# - **Other random numbers**: no seed, or one that depends on the time. Then the first step differs already,
#   by far more than in the last digits.
# - **Another order of adding up.** Computers round: (a + b) + c need not be a + (b + c). Another number of ranks, other
#   buckets, another version of a library add in another order. GPUs add some sums in any order (`scatter_add`, some
#   convolutions); `torch.use_deterministic_algorithms(True)` forbids those.
# - **A fault**, such as a race, or one rank with other samples.
#
# How large is the second? float32 keeps 24 bits, so one rounding is off by up to 6 · 10⁻⁸ of the number. float64 keeps
# 53, which is 5 · 10⁸ times finer. Here four ranks train a network for 30 steps in float32. Then they train again:
#
# - the same once more;
# - with samples that are drawn without a seed;
# - in another order: gradients are reduced in 3 pieces, which changes the order in which gloo adds;
# - with a small fault: in one step the inputs of one rank are multiplied by 1.001.
#
# The last two are repeated in float64.
#
# How large, relative to the weights, is the difference after 30 steps: for another order in float32, and for the fault?
# A power of ten will do. For the fault: 10⁻³ of one step's gradient, on one rank of four, and say that one
# step moves the weights by a few percent.

# %% tags=["commit"]
mine = commit(another_order=None, a_fault=None)
### BEGIN SOLUTION
mine = commit(another_order=1e-7, a_fault=1e-5)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --name yesterday
from labkit.rank import report

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def train(dtype=torch.float32, pieces=1, fault=False, seeded=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    draw, path = torch.Generator().manual_seed(100 + rank), []
    if not seeded:
        draw.seed()
    for step in range(30):
        x = torch.randn(8, 16, generator=draw).to(dtype)
        y = torch.sin(x.sum(1, keepdim=True))
        if fault and step == 10 and rank == 3:
            x = 1.001 * x
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        for piece in gradient.chunk(pieces):
            dist.all_reduce(piece)
        parts = (gradient / ranks).split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        path.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double())
    return torch.stack(path)


def apart(left, right):
    return ((left - right).norm(dim=1) / left.norm(dim=1)).tolist()


single, double = train(), train(torch.float64)
report(
    apart={
        "the same again": apart(single, train()),
        "without a seed": apart(single, train(seeded=False)),
        "another order, float32": apart(single, train(pieces=3)),
        "another order, float64": apart(double, train(torch.float64, pieces=3)),
        "a fault, float32": apart(single, train(fault=True)),
        "a fault, float64": apart(double, train(torch.float64, fault=True)),
    }
)

# %% tags=["nbval-ignore-output"]
apart = yesterday.ranks[0].reported["apart"]
_ = plots.values_by_step(apart, yesterday, ylabel="difference of the weights, relative", log=True)

# %% [markdown]
# *Difference of the weights from the first run of the same precision. The same again is exactly the same, so it has no
# line: here gloo adds in the same order each time. Without a seed the first step differs, by far more than by rounding.
# Another order differs from the first steps on, in the last digits. In float64 the same is a million times smaller or
# more. The fault has no difference before its step 11, and then it is equally large in both precisions, to within one
# percent.*

# %% tags=["claim"]
claim("the same again is exactly the same", max(apart["the same again"]) == 0)
claim("without a seed the first step differs, by far more than by rounding", apart["without a seed"][0] > 1e-4)
claim("another order differs in the first steps", 0 < apart["another order, float32"][2] < 1e-6)
ends = {name: values[-1] for name, values in apart.items()}
claim(
    "in float64 it is a million times smaller or more",
    ends["another order, float64"] < ends["another order, float32"] / 1e6,
)
claim(
    "the fault has no difference before its step",
    max(apart["a fault, float64"][:10]) == 0 < apart["a fault, float64"][10],
)
claim("and is equally large in both precisions", abs(ends["a fault, float32"] / ends["a fault, float64"] - 1) < 0.01)

# %% tags=["nbval-ignore-output"]
rounded = {"another_order": ends["another order, float32"], "a_fault": ends["a fault, float32"]}
rows = [["–" if mine[name] is None else f"{mine[name]:.0e}", f"{value:.0e}"] for name, value in rounded.items()]
pandas.DataFrame(rows, index=list(rounded), columns=["yours", "measured"])

# %% [markdown]
# ### Exercise 8: rounding or a fault? (•, {minutes} minutes)
#
# Size alone does not tell: rounding can grow over many steps, and a fault can be small. Repeating in float64 does.
# `apart32` is a difference in float32, `apart64` the same in float64. Return True if it is rounding alone: in float64
# at most a millionth is left, which leaves room beside the 5 · 10⁸ of the bits.
#
# <details><summary>Hint</summary>
#
# Compare the two. Mind two runs that do not differ at all: that counts as True.
#
# </details>


# %%
def rounding_alone(apart32: float, apart64: float) -> bool:
    ### BEGIN SOLUTION
    return apart64 <= apart32 / 1e6
    ### END SOLUTION


# %%
checks.rounding_alone(rounding_alone)

# %%
cases = ("another order", "a fault")
said = [given(rounding_alone(ends[f"{case}, float32"], ends[f"{case}, float64"])) for case in cases]
pandas.DataFrame({"rounding alone?": said}, index=list(cases))

# %% [markdown]
# ### Exercise 9: the same samples tomorrow (••, {minutes} minutes)
#
# Return the indices of the samples that rank `rank` takes in an epoch, a list of `count / ranks`. All ranks together
# take each of `count` samples once. The order is shuffled, anew in each epoch, and tomorrow it is the same: whatever
# else draws random numbers must not matter. `ranks` divides `count`.
#
# <details><summary>Hint 1</summary>
#
# A `torch.Generator` of its own does not mind what else draws. `torch.randperm(count, generator=…)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# All ranks shuffle alike: so the seed must not depend on the rank, but on seed and epoch. Then each takes its part.
#
# </details>


# %%
def my_indices(count: int, seed: int, epoch: int, rank: int, ranks: int) -> list[int]:
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return torch.randperm(count, generator=generator)[rank::ranks].tolist()
    ### END SOLUTION


# %%
checks.my_indices(my_indices)

# %% [markdown]
# `DistributedSampler` does this. Its `set_epoch(epoch)` must be called before each epoch; who forgets it sees the same
# order in all of them. To go on with a run as if it had not stopped, save the step and the state of the random
# generators as well (lab 2 saves models).
#
# ## 11. What the aids cost, and when they pay
#
# **core, {minutes} minutes**
#
# Why not always switch on everything? Take a step that reduces 8 gradients of 64 × 64 (DIM × DIM) numbers. Messages of
# this size cost mostly their latency, the same for each (lab 0). Before every collective, DETAIL lets all ranks meet in a
# monitored barrier, and then exchange what they are about to call in two small all-gathers. By what factor does it make
# the communication slower?

# %% tags=["commit"]
mine = commit(detail_factor=None)
### BEGIN SOLUTION
mine = commit(detail_factor=4)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n $RANKS --use recorder,DIM --name costs
import random
from datetime import timedelta

from labkit.rank import report

dist.init_process_group("gloo")
dist.set_debug_level(dist.DebugLevel.DETAIL)
detail = dist.new_group()
gradients = [torch.ones(DIM, DIM) for _ in range(8)]
all_reduce = recorder(dist.all_reduce, [])


def reduce_all(group=None):
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)


def with_recorder():
    for gradient in gradients:
        all_reduce(gradient)


def with_barrier():
    reduce_all()
    dist.monitored_barrier(timeout=timedelta(seconds=30))


def with_comparison():
    reduce_all()
    largest = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)


ways = {
    "plain": reduce_all,
    "your recorder": with_recorder,
    "monitored barrier in each step": with_barrier,
    "weights compared in each step": with_comparison,
    "DETAIL": lambda: reduce_all(detail),
}
times = {name: [] for name in ways}
for turn in range(25):
    for name, way in random.Random(turn).sample(list(ways.items()), len(ways)):  # another order, alike on all ranks
        for gradient in gradients:
            gradient.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        way()
        times[name].append((time.perf_counter() - start) * 1e3)
alone_us = []
call = recorder(lambda tensor: None, [])
for _ in range(10):  # what the recorder itself takes, without a collective
    start = time.perf_counter()
    for _ in range(100):
        call(gradients[0])
    alone_us.append((time.perf_counter() - start) / 100 * 1e6)
report(ms={name: min(each) for name, each in times.items()}, alone_us=min(alone_us))

# %% tags=["nbval-ignore-output"]
cost_ms = {name: max(rank.reported["ms"][name] for rank in costs.ranks) for name in costs.ranks[0].reported["ms"]}
ax = plots.debug_costs(cost_ms, costs)
alone_us = max(rank.reported["alone_us"] for rank in costs.ranks)
print(f"a message takes {cost_ms['plain'] / 8 * 1e3:.0f} µs; the recorder itself {alone_us:.1f} µs a call")

# %% [markdown]
# *Time of a step's communication, in the fastest of 25 rounds. DETAIL costs most of these in most runs, since it makes
# all ranks agree before every single collective.* Beside DETAIL the upper four bars differ by less, and by how much
# moves from run to run. So the recorder was measured by itself, too: what its bar is longer by is mostly noise. *It takes less than a tenth of a message.* The comparison of weights can be made in every
# hundredth step. The barrier adds messages to each step, and more with more ranks, since all report to rank 0. It names
# a rank only if it stands before the first collective that this rank misses. So leave it on where it costs little, and
# otherwise switch it on while you search.

# %% tags=["claim"]
claim("DETAIL makes it slower", cost_ms["DETAIL"] > cost_ms["plain"])
claim("the recorder takes less than a tenth of a message", alone_us < 0.1 * cost_ms["plain"] / 8 * 1e3)

# %% tags=["nbval-ignore-output"]
factor = cost_ms["DETAIL"] / cost_ms["plain"]
plots.comparison_table({"detail_factor": factor}, {"detail_factor": 1 + 3}, yours=mine, tolerance=0.5)

# %% [markdown]
# When does an aid pay? It makes every hour of the run longer by a part c. It saves time once in each failure: from h
# hours until somebody knows the cause, to h' hours. With M hours between two failures that the aid helps to find:
#
# > c < (h - h') / M
#
# **An example.** Say that every tenth of section 1's failures is a call that ranks disagree on: M = 31 hours. Say that
# a timeout of 10 minutes and a search of 20 minutes become one minute. How much may the aid cost? And from which length
# of a step on is DETAIL below that, with what it adds here?

# %%
part = theory.break_even_slowdown(hours_between=10 * 54 * 24 / 419, hours_lost=0.5, hours_lost_with_aid=1 / 60)
print(f"an aid may cost {part:.1%} of a step")

# %% tags=["nbval-ignore-output"]
added_ms = cost_ms["DETAIL"] - cost_ms["plain"]
print(f"DETAIL adds {added_ms:.1f} ms here: below that in steps of {added_ms / part:.0f} ms or more")

# %% [markdown]
# That is with a few ranks. With thousands DETAIL adds more, since all of them must agree: measure it there.
#
# A recorder is far below that in any step that computes. DETAIL is, too, where a step is long and its collectives are
# few. With many small collectives it is not.
#
# **Your turn.** On your 8 GPUs something fails twice a week, and each time you search for an hour. An aid would leave
# 6 minutes of it. How much may it cost, as a part of the step?

# %% tags=["commit"]
mine = commit(part=None)
### BEGIN SOLUTION
mine = commit(part=0.9 / 84)
### END SOLUTION

# %%
allowed = theory.break_even_slowdown(hours_between=7 * 24 / 2, hours_lost=1.0, hours_lost_with_aid=0.1)
print(f"yours: {'–' if mine['part'] is None else format(mine['part'], '.1%')}; theory: {allowed:.1%} of the step")

# %% [markdown]
# About 1 %: an aid for every step must be cheap, as a recorder is. And DETAIL? Switch it on for the one run in which
# you search.
#
# ## 12. What to look at first
#
# **core, {minutes} minutes**
#
# Begin with what you see. All but one of these were provoked in this lab (the abort with status -6 was only told), and
# the course's own tests provoke them again. With NCCL much looks different (not measured here). A collective returns at
# once, so in a hang a stack stands at the next call that needs a result. After the timeout a watchdog, a thread of
# PyTorch's that looks for collectives that take too long, ends the process: status -6, "Watchdog caught collective
# operation timeout" in the log, and no error file.
#
# | symptom | first look | likely cause |
# |---|---|---|
# | ranks show errors, most of a closed connection | the earliest error that is no echo, in the error files | that rank's data or code |
# | a rank is gone, without any exception: status -9 or 137 | the exit status, then the system's log | out of host memory, or the scheduler |
# | a rank is gone, with status -11 | the stack that faulthandler left | native code, often a wrong index or a library |
# | nothing happens, and one rank's stack is elsewhere | the stacks of all ranks | a collective under a condition that is not true on all |
# | a timeout, and one rank has run ahead or is done | a monitored barrier: it names who is missing | another number of batches |
# | a timeout, and all ranks are in collectives | DETAIL: it names both collectives | another collective: ranks took different branches |
# | some ranks time out, others go on, or one aborts with status -6 | DETAIL: it names both shapes | another shape, such as outputs gathered from a shorter last batch |
# | a timeout, and DETAIL is too slow to leave on | each rank's record of calls, compared | a rank left out a call |
# | slow, and all steps are equally long on all ranks | time in collectives by rank: who waits least? | a straggler: its data or its machine |
# | out of memory on one rank | which rank, and how large is its batch? | the longest batch |
# | the loss falls, and the weights differ between ranks | weights against their maximum over the ranks | a missed reduction, tensors in another order, or other weights at the start |
# | weights agree, the gradient has a factor | one gradient against one device's | a sum that should be a mean |
# | gradients are right, a parameter stays where it was | each move against rate × gradient | the optimizer holds another tensor |
# | the first step differs from yesterday's, not only in the last digits | the indices and seeds of each rank | random numbers without a seed |
# | all steps differ, at first in the last digits alone | the same in float64 | another order of adding up |
# | equal up to a step, then far more than rounding | the same in float64: it is as large there | a fault in that step |
#
# ## 13. Leave with
#
# **core, {minutes} minutes**

# %% tags=["summary"]
tools = {
    "raised": ("error files", raised.rank == 2),
    "killed": ("exit status", killed.exc_type == "SIGKILL"),
    "crashed": ("faulthandler's stack", "<cell>" in crashed.traceback),
    "one batch less": ("stacks; monitored barrier", "Ranks 3" in missing.message),
    "another collective or shape": (
        "DETAIL",
        all("Detected mismatch" in of[f"DETAIL {case}"][0] for case in ("another_collective", "another_shape")),
    ),
    "a call left out": ("your recorder; flight recorder", (parts(logs), parts(flown)) == ((3, [2]), (2, [2]))),
    "straggler": ("time in collectives", waited(slow).index(min(waited(slow))) == 3),
    "out of memory": ("which rank", full.rank == 1),
    "missed reduction": ("weights on all ranks", found["missed reduction"]["apart"] > 0),
    "wrong scaling": ("gradients", answers_to(found["wrong scaling"])[1] == f"{RANKS}"),
    "stale parameter": ("moves", answers_to(found["stale parameter"])[2] == "0.00"),
    "other rounding": (
        "float64",
        theory.is_only_rounding(ends["another order, float32"], ends["another order, float64"]),
    ),
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
# the wrong ones of the others. If the shapes differ, that can hang. All have made equally many calls: compare their
# shapes, with DETAIL or a recorder. Or the ranks are in different groups, or the network is broken.
#
# </details>
# <details><summary>3. A profile of rank 0 shows 70 % of the time in all-reduces. Is the network slow?</summary>
#
# Not necessarily. It may wait for a slower rank. Look at the same number on all ranks: if one of them is near zero,
# that is the one.
#
# </details>
# <details><summary>4. Weights are equal on all ranks, the loss falls. What can still be wrong?</summary>
#
# All ranks may do the same wrong thing: a wrong factor, a parameter that the optimizer does not hold, two gradients
# mixed up. Compare gradients with one device's.
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
# - Graham, *Bounds on multiprocessing timing anomalies*, 1969: dealing the longest first.
#   <https://doi.org/10.1137/0117039>
# - Goldberg, *What every computer scientist should know about floating-point arithmetic*, 1991.
#   <https://doi.org/10.1145/103162.103163>
# - PyTorch: debugging `torch.distributed`
#   <https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications>, the flight
#   recorder <https://docs.pytorch.org/tutorials/intermediate/debug_hangs_with_flight_recorder.html>, error files
#   <https://docs.pytorch.org/docs/stable/elastic/errors.html>, reproducibility
#   <https://docs.pytorch.org/docs/stable/notes/randomness.html>
#
# **Read in labkit**: `labkit/launcher/failure.py` finds the first failure of a run; `labkit/parallel/failures.py` and
# `labkit/theory/failures.py` hold code and rules of this lab.
#
# **Next**: take a script of your own, add the five lines of section 2, and break it once on purpose.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("failures")
