# %% [markdown]
# # Lab 0. Ranks and collectives
#
# Distributed training is ordinary PyTorch, run by several processes that send tensors to each other. This lab shows the
# processes, what they can send, and what it costs. At its end you train a network on several processes, with an
# all-reduce of your own.
#
# You will be able to
#
# - start ranks, and say what a hang or a failed rank tells you;
# - say what every rank holds before and after each of the five collectives;
# - predict how many bytes a step sends, and how long they take;
# - write a ring all-reduce, and data-parallel training, by hand.
#
# You need PyTorch on one device, and nothing of distributed training. You need no GPU. The core path takes about 95
# minutes. Sections marked *optional* can wait. Exercises have one to three dots, from easy (•) to hard (•••). Some
# cells fail on purpose; the text says so before each.
#
# Shift+Enter runs a cell. After a break or a restart the kernel knows neither `%%torchrun` nor your functions, so choose
# *Run All Above Selected Cell* from the menu *Run* before you go on.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import os
import time

import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.checks import collectives as checks
from labkit.checks.claims import claim, commit
from labkit.config import require
from labkit.plots.collectives import all_reduce_rounds, fastest_all_reduce_times
from labkit.theory import collectives as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. You may change them; the next cell refuses what cannot work. The text speaks of
# these; cells say what yours change.

# %% tags=["parameters"] small={"RANKS": 3, "DIM": 50, "STEPS": 1, "REPEATS": 4} points=[[2,4,1,1],[3,301,2,5],[8,1200,5,30]]
RANKS: int = 2  # ranks of the measured runs; the drawn ones have four
DIM: int = 1000  # width of the network's four linear layers
STEPS: int = 3  # timed training steps in a run
REPEATS: int = 15  # rounds in which each message is timed

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nobody to talk to, and more than 8 take minutes")
require("DIM", DIM, at_least=4, because="a layer needs a width")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
require("REPEATS", REPEATS, at_least=1, because="without a round nothing is measured")
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

SETUP = {"nproc": RANKS, "dim": DIM, "steps": STEPS}

# %% [markdown]
# ## 1. Why (core, 3 minutes)
#
# One GPU is too small, and too slow. Take a model of 7 billion parameters, trained with Adam in mixed precision. Each
# parameter takes 16 bytes: 2 + 2 for weight and gradient in 16 bits, and in the optimizer 4 for a float32 copy and 4 +
# 4 for two running means. That is 112 GB before the first activation. An H100 has 80 GB.
#
# Now the time. Llama 2 with 7 billion parameters saw 2 trillion tokens and took 184,320 hours of A100 GPUs (Touvron et
# al. 2023, table 2). On one GPU that is 21 years. Section 11 explains the 6 operations below.

# %%
hours, parameters, tokens = 184_320, 7e9, 2e12
print(f"optimizer, weights and gradients: {16 * parameters / 1e9:.0f} GB")
print(f"on one GPU: {hours / 24 / 365:.0f} years; on 1024 GPUs that lose nothing: {hours / 1024 / 24:.1f} days")
print(
    f"speed of one GPU, at 6 operations a parameter and token: {6 * parameters * tokens / hours / 3600 / 1e12:.0f} TFLOP/s"
)

# %% [markdown]
# Hence several devices must share the work, and the memory. All labs of this course are about how they share. They then
# have to talk: this lab is about the talking.

# %% [markdown]
# ## 2. The code you would write (core, 4 minutes)
#
# This is a whole distributed program: data-parallel training. Every process holds the same network, and each takes
# samples of its own. `%%torchrun -n 4`, a magic that `import labkit` brings, runs the cell on four processes. Saved as
# a file `train.py`, the same lines run with `torchrun --nproc-per-node 4 train.py`. On two machines: `torchrun --nnodes
# 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py`, on both, with the name of one of them
# as HOST.

# %% tags=["script"]
# %%torchrun -n 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()  # who are the others? reads what torchrun left in the environment
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
truth = torch.randn(8, 1)  # the same on every rank
model = DistributedDataParallel(nn.Linear(8, 1, bias=False))  # averages gradients in each backward pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(rank)  # from here on, samples of its own
for _ in range(100):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.all_reduce(loss.detach_())  # the sum over all ranks, on every rank
if rank == 0:
    print(f"{ranks} ranks, mean loss below 1e-4: {loss.item() / ranks < 1e-4}")
dist.destroy_process_group()

# %% [markdown]
# Little is new: `init_process_group`, the rank, the wrapper `DistributedDataParallel` (*DDP*), `all_reduce`,
# `destroy_process_group`. The sections below take them apart. In section 8 you do the wrapper's work by hand.
#
# On a machine with GPUs each rank takes one, and the network goes there; so do the samples:
#
# ```python
# device = int(os.environ["LOCAL_RANK"])  # this rank's number on its machine
# torch.cuda.set_device(device)
# dist.init_process_group("nccl")
# model = DistributedDataParallel(network.to(device), device_ids=[device])
# ```
#
# Two lines more for your own data. `sampler = DistributedSampler(dataset)` (from `torch.utils.data`, as `DataLoader`)
# with `DataLoader(dataset, sampler=sampler)` gives each rank other samples, and `sampler.set_epoch(epoch)` shuffles
# them anew in each epoch. Without the sampler every rank trains on all of them. (It repeats a few where the ranks
# cannot share them evenly.) And save on rank 0 only: `model.module.state_dict()`.
#
# Here is a measured version of such a training, on a larger network: four linear layers, each `DIM` wide. `labkit.run`
# starts one of the course's programs, here `launch/ddp_compile.py`, and returns what it measured. `claim` speaks up if
# a sentence of the text does not hold in your run; otherwise it is silent.

# %%
trained = labkit.run("ddp_compile", mode="ddp", **SETUP)
print(
    f"{RANKS} ranks trained: {trained.ok}. In a step each handed {trained.value('all_reduce_bytes'):,.0f} bytes to all-reduces."
)

# %% [markdown]
# ## 3. What a rank is (core, 6 minutes)
#
# Each `%%torchrun` cell starts new processes, which remember nothing of earlier cells. For brevity the magic brings
# `torch`, `dist` and the modules that the notebook imported, and shows the value of the cell's last line on each rank.
# In a `train.py` you write the imports and `destroy_process_group` yourself.
#
# A **rank** is one process of a run, and also its number, from 0. The number of ranks is the **world size**. `torchrun`
# starts the processes and tells each its number in an environment variable. Look at them start: each has a process id of
# its own.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4
print(f"I am process {os.getpid()}, and torchrun calls me rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")

# %% [markdown]
# **Why does every rank run the same file?** It need not, but it is the simplest way. All ranks do nearly the same. Where
# they differ, the number decides: which samples, which part of a tensor, who prints. This style has a name, *single
# program, multiple data*.
#
# Ranks share no memory. A variable of rank 0 is not there on rank 1:

# %%
# %%torchrun -n 4
x = 10 * int(os.environ["RANK"])
x

# %% [markdown]
# In these cells nobody can talk yet. `init_process_group` lets each rank find the others, and may name the library that
# shall move the bytes. The barrier in the second line waits for all ranks: a rank that exits while another is still
# connecting makes that one fail.

# %%
# %%torchrun -n 4
dist.init_process_group("gloo")
dist.barrier()
f"{dist.get_backend()}: rank {dist.get_rank()} of {dist.get_world_size()}"

# %% [markdown]
# This library is the **backend**: *gloo* between CPUs, *NCCL* between NVIDIA GPUs. If you name none, PyTorch takes gloo
# for CPU tensors and, on NVIDIA GPUs, NCCL for theirs. The calls are the same.
#
# The ranks that talk with each other are a **process group**. At first there is one, with everybody. `new_group` makes
# smaller ones. Every rank makes all of them, in the same order, and then talks within its own:

# %%
# %%torchrun -n 4
dist.init_process_group()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
x = torch.tensor(dist.get_rank())
dist.all_reduce(x, group=groups[dist.get_rank() // 2])  # the sum over the group
dist.barrier()
x

# %% [markdown]
# **What is `barrier` for?** It returns when all ranks have reached it. One uses it where a rank must not run ahead: rank 0
# downloads a file, and the others wait until it is there. Here rank 0 is late, and the rest wait for it.

# %%
# %%torchrun -n 4
dist.init_process_group()
if dist.get_rank() == 0:
    time.sleep(1)
start = time.perf_counter()
dist.barrier()
f"waited for more than half a second: {time.perf_counter() - start > 0.5}"

# %% [markdown]
# Training needs hardly any barrier: no rank gets the result of an all-reduce before all have joined. (On GPUs the call
# itself returns at once; the GPU waits.)
#
# **What happens when a rank fails?** The others cannot go on without it. `torchrun` ends them all. The next cell fails on
# purpose, and shows in red how that looks. Rank 1 alone is at fault; the others waited for it.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails
dist.init_process_group()
if dist.get_rank() == 1:
    raise ValueError("my samples are missing")
dist.all_reduce(torch.ones(1))

# %% [markdown]
# In a long log, look for the rank that failed *first*. What others say of lost connections are its echoes.

# %% [markdown]
# ## 4. Send, receive, and the first deadlock (core, 11 minutes)
#
# The simplest message goes from one rank to another. `send` names the receiver. `recv` names the sender, and a tensor in
# which the numbers arrive.

# %%
# %%torchrun -n 2
dist.init_process_group()
x = torch.arange(3.0) if dist.get_rank() == 0 else torch.zeros(3)
dist.send(x, dst=1) if dist.get_rank() == 0 else dist.recv(x, src=0)
dist.barrier()
x

# %% [markdown]
# Now all ranks stand in a circle. Each sends a number to the next and receives one from the rank before. The next cell
# hangs on purpose. It is stopped after 5 seconds, and shows where each rank was.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 5 --fails
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
arrived = torch.zeros(1)
dist.recv(arrived, (rank - 1) % ranks)
dist.send(torch.tensor([float(rank)]), (rank + 1) % ranks)

# %% [markdown]
# All stand in `recv`. Each waits for a message that its neighbour would send next, and nobody gets there. That is a
# **deadlock**. There is no error until a timeout strikes, by default after 30 minutes, or after 10 with
# `init_process_group("nccl")`; `timeout=timedelta(minutes=2)` there sets another. Until then nothing is printed, and a
# GPU may even look busy.
#
# **What does a hang mean?** Some rank waits for something that no other will send. Either ranks wait in a circle, as
# here, or they went different ways: one called an all-reduce that another never reached. So look where *each* rank is.
# Without this magic, `py-spy dump --pid …` shows a process's stack.
#
# The way out: start everything, and wait afterwards. `dist.isend` and `dist.irecv` return at once, with a handle. Its
# `wait()` returns when the message is through. Until then, do not read the tensor that you receive, nor change the one
# that you send. Between GPUs NCCL may hang when they are started one by one. There one starts both together (gloo takes
# it, too):
#
# ```python
# both = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)]
# for handle in dist.batch_isend_irecv(both):
#     handle.wait()
# ```
#
# ### Exercise 1: mend the circle (••, 8 minutes)
#
# Send `mine` to the next rank and return what comes from the rank before. The circle is closed: after the last rank comes
# rank 0. Your function runs on four real ranks, then on three.
#
# <details><summary>Hint 1</summary>
#
# An `irecv` needs a tensor of the right size to write into: `torch.empty_like(mine)`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Two calls, two handles, two waits. `% ranks` closes the circle.
#
# </details>


# %%
def shift(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    arrived = torch.empty_like(mine)
    handles = [dist.isend(mine, (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
    for handle in handles:
        handle.wait()
    return arrived
    ### END SOLUTION


# %%
checks.shift(shift)

# %% [markdown]
# Plain `send` and `recv`, which *block* (return only when done), can do it, too: even ranks send first, odd ranks
# receive first. But where all ranks *send* first, it depends. A small message may fit into some buffer, and the sender
# goes on. A large one waits for its receiver. Such programs work in a test and hang in real training.

# %% [markdown]
# ## 5. Five collectives, drawn (core, 10 minutes, and 8 for an optional exercise)
#
# A **collective** is a message in which all ranks of a group take part. All call the same function, in the same order.
# Five of them carry nearly all of distributed training. These are two, as four real ranks did them. Every rank begins
# with numbers of its own, and sends home what it held before and after. `--name first_two` leaves that in a variable of
# this name.

# %%
# %%torchrun -n 4 --name first_two
from labkit.rank import report  # sends values home to the notebook

dist.init_process_group()
mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()  # rank 0: 1 2 3 4, rank 1: 10 20 30 40

x = mine.clone()
dist.broadcast(x, src=0)
report(broadcast={"before": mine, "after": x})

x = mine.clone()
dist.all_reduce(x)
report(all_reduce={"before": mine, "after": x})

# %%
_ = plots.values_by_rank(first_two, {"broadcast": "broadcast", "all_reduce": "all-reduce"})

# %% [markdown]
# *Each line is a rank, each box a number, coloured by the rank that had it first. After the **broadcast** every rank holds
# what rank 0 held. After the **all-reduce** every rank holds the sum, place by place: 1 + 10 + 100 + 1000 = 1111.*


# %% tags=["claim"]
def moments(result: labkit.RunResult, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks held before and after: a line a rank."""
    held = [rank.reported[name] for rank in result.ranks]
    return torch.stack([each["before"] for each in held]), torch.stack([each["after"] for each in held])


before, after = moments(first_two, "broadcast")
claim("every rank holds what rank 0 held", bool((after == before[0]).all()))
before, after = moments(first_two, "all_reduce")
claim("every rank holds the sum", bool((after == before.sum(0)).all()) and after[0, 0] == 1111)

# %% [markdown]
# A broadcast gives all ranks the same weights at the start. An all-reduce adds up the gradients.
#
# The other three cut tensors into parts, one for each rank. In a **reduce-scatter** the tensors are added up, place by
# place, and cut into as many parts as there are ranks. Rank r keeps only part r of the sum.
#
# ### Exercise 2: what does a rank hold? (•, 4 minutes)
#
# Predict it. `held` is a list with the numbers of each rank, such as `[[1, 2], [10, 20]]` for two ranks. What does rank
# `rank` hold after a reduce-scatter? Return a list. The numbers of a rank can be cut into equal parts.
#
# <details><summary>Hint</summary>
#
# `zip(*held)` goes through the places. Rank r keeps the sums from `r * size` to `(r + 1) * size`.
#
# </details>


# %%
def after_reduce_scatter(held: list[list[float]], rank: int) -> list[float]:
    ### BEGIN SOLUTION
    sums = [sum(place) for place in zip(*held, strict=True)]
    size = len(sums) // len(held)
    return sums[rank * size : (rank + 1) * size]
    ### END SOLUTION


# %%
checks.after_reduce_scatter(after_reduce_scatter)

# %% [markdown]
# Now let four ranks do it, with the other two. In an **all-gather** every rank brings one part, and all get all parts.
# In an **all-to-all** rank r sends its part s to rank s, where it becomes part r.

# %%
# %%torchrun -n 4 --name other_three
from labkit.rank import report

dist.init_process_group()
mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()

part = torch.empty(1)
dist.reduce_scatter(part, list(mine.chunk(4)))
report(reduce_scatter={"before": mine, "after": part})

parts = [torch.empty(1) for _ in range(4)]
dist.all_gather(parts, mine[:1].clone())
report(all_gather={"before": mine[:1], "after": torch.cat(parts)})

x = torch.empty(4)
dist.all_to_all_single(x, mine)
report(all_to_all={"before": mine, "after": x})

# %%
titles = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_to_all": "all-to-all"}
_ = plots.values_by_rank(other_three, titles)

# %% [markdown]
# *What four real ranks held. The **reduce-scatter** leaves a part of the sum on each rank. The **all-gather** mixes no
# numbers, it only brings them together. The **all-to-all** turns the table: what was a line becomes a column.*

# %% tags=["claim"]
before, after = moments(other_three, "reduce_scatter")
claim("each rank keeps its part of the sum", bool((after.flatten() == before.sum(0)).all()))
before, after = moments(other_three, "all_gather")
claim("all hold all parts", bool((after == before.flatten()).all()))
before, after = moments(other_three, "all_to_all")
claim("lines become columns", bool((after == before.T).all()))

# %% [markdown]
# Your prediction for each rank, beside what it held:

# %%
before, after = moments(other_three, "reduce_scatter")
yours = [after_reduce_scatter(before.tolist(), rank) or "–" for rank in range(4)]
pandas.DataFrame({"yours": yours, "held": after.tolist()}, index=[f"rank {rank}" for rank in range(4)])

# %% [markdown]
# *FSDP*, fully sharded data parallel, keeps only a part of each parameter on a rank.
#
# | collective | where you will meet it |
# |---|---|
# | broadcast | equal weights at the start |
# | all-reduce | gradients of data-parallel training; partial sums where each layer's matrix is cut (lab 5) |
# | all-gather | parameters of FSDP, just before a layer computes (lab 2) |
# | reduce-scatter | gradients of FSDP |
# | all-to-all | models of many small networks, *experts*: each token goes to the rank that holds its expert |
#
# ### An all-reduce is two collectives
#
# Look at the figures once more. After a reduce-scatter each part of the sum stands on one rank. An all-gather brings the
# parts together on all. So
#
# **all-reduce = reduce-scatter + all-gather**
#
# That is not only arithmetic. It is how a ring does it (section 6), and FSDP pulls the two apart in time.
#
# ### Exercise 3: verify it (optional, ••, 8 minutes)
#
# Make an all-reduce of the two, and return the sum. The length of `mine` is a multiple of `ranks`.
#
# <details><summary>Hint</summary>
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
# ## 6. What "bytes" means (core, 8 minutes, and 3 for an optional look)
#
# Two different numbers are called the bytes of a collective. This course keeps them apart, in all labs, tables and figures.
#
# - **Handed to the call**: the size of the tensor that a rank gives to the collective. labkit counts it, as
#   `all_reduce_bytes`, `all_gather_bytes` and so on.
# - **On the wire**: the bytes that leave a rank for it. The name then says so: `all_reduce_wire_bytes`. labkit computes
#   it from the bytes handed to the call and the number of ranks. It assumes a ring. For all-to-all and send it assumes
#   that each message goes straight to its receiver.
#
# What is a ring? Each rank sends to the next only, and all at the same time. For a reduce-scatter the tensor is cut
# into as many parts as there are ranks. In the first step rank r sends its part r to the next rank, which adds its own
# numbers to it. In the second step that rank sends the partial sum on, and so forth. After ranks - 1 steps every part
# has met all ranks. In an all-gather the parts go around in the same way and nothing is added, again in ranks - 1
# steps. A ring all-reduce is the one and then the other: first a reduce-scatter, then an all-gather of the finished
# parts.
#
# | collective | handed to the call | on the wire of n ranks |
# |---|---|---|
# | all-reduce | whole tensor, b | 2 (n - 1) / n · b |
# | reduce-scatter | whole tensor, b | (n - 1) / n · b |
# | all-gather | one part, b / n | (n - 1) / n · b = (n - 1) · what was handed |
# | all-to-all | whole tensor, b | (n - 1) / n · b |
# | broadcast | whole tensor, b | (n - 1) / n · b, the mean over the ranks |
# | send | the message, b | b |
#
# Mind the all-gather. Its rank hands in only a part, so by bytes handed it looks n times cheaper than a reduce-scatter. On
# the wire the two cost the same.
#
# ### Exercise 4: bytes of a ring (•, 4 minutes)
#
# A rank hands `handed_bytes` to an all-reduce. How many bytes leave it in a ring of `ranks` ranks?
#
# <details><summary>Hint</summary>
#
# How many steps has a reduce-scatter, how many an all-gather? How much does a rank send in a step?
#
# </details>


# %%
def ring_bytes(handed_bytes: int, ranks: int) -> float:
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) * handed_bytes / ranks
    ### END SOLUTION


# %%
checks.ring_bytes(ring_bytes)

# %% [markdown]
# Now commit to your numbers for the training of section 2, on four ranks. A step averages all gradients, four layers of
# DIM × DIM weights and DIM biases, 4 bytes each. What does a rank hand to its all-reduces, and what goes on the wire?
# Leave None where you do not want to say.

# %% tags=["commit"]
mine = commit(
    all_reduce_bytes=None,
    all_reduce_wire_bytes=None,  # for a formula of yours: lambda: ring_bytes(..., 4)
)
### BEGIN SOLUTION
mine = commit(
    all_reduce_bytes=4 * 4 * (DIM * DIM + DIM),
    all_reduce_wire_bytes=lambda: ring_bytes(4 * 4 * (DIM * DIM + DIM), 4),
)
### END SOLUTION

# %%
gradient_bytes = 4 * 4 * (DIM * DIM + DIM)  # four layers, 4 bytes a number
on_four = labkit.run("ddp_compile", mode="ddp", **SETUP | {"nproc": 4, "steps": 1})
by_theory = {
    "all_reduce_bytes": gradient_bytes,
    "all_reduce_wire_bytes": theory.collective_wire_bytes("all_reduce", gradient_bytes, 4),
}
plots.comparison_table(on_four, by_theory, yours=mine)

# %% tags=["claim"]
claim("what is handed over are the gradients, once", on_four.value("all_reduce_bytes") == gradient_bytes)
claim("in section 2 it was as much", trained.value("all_reduce_bytes") == gradient_bytes)

# %% [markdown]
# *One training step. What is handed over are the gradients, once; in section 2 it was as much. labkit counted the first
# row. It computed the second from that, so this row checks your formula, not the wire (look at the wire below, and in
# section 9). With many ranks each sends nearly twice the tensor, and never more: one reason why data-parallel training
# scales.*

# %%
ranks = [2, 4, 8, 64, 1024]
factors = [theory.collective_wire_bytes("all_reduce", 1, n) for n in ranks]
pandas.DataFrame({"on the wire / handed to the call": factors}, index=pandas.Index(ranks, name="ranks")).round(3)

# %% [markdown]
# ### Look at the wire (optional, 3 minutes)
#
# Is that so? On Linux one can look. The ranks of this machine talk over its loopback interface, and the system counts
# the bytes on it. Each line is one collective of a 4 MB tensor on four ranks: what left all four together, beside what
# a ring of four ranks sends.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4
from pathlib import Path


def sent_mb():
    """What the loopback interface has sent so far, in MB."""
    lines = Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else []
    return sum(int(line.split()[9]) / 1e6 for line in lines if line.strip().startswith("lo:"))


dist.init_process_group()
x = torch.ones(1_000_000)
parts = list(x.chunk(4))
calls = {
    "all_reduce": lambda: dist.all_reduce(x),
    "all_gather": lambda: dist.all_gather([torch.empty_like(part) for part in parts], parts[0]),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.empty_like(parts[0]), parts),
}
for name, collective in calls.items():
    dist.barrier()
    before = sent_mb()
    dist.barrier()
    collective()
    dist.barrier()
    handed = 1 if name == "all_gather" else 4  # MB
    if dist.get_rank() == 0:
        print(f"{name:15} {sent_mb() - before:5.1f} MB of {4 * theory.collective_wire_bytes(name, handed, 4):.1f} MB")

# %% [markdown]
# The all-reduce and the all-gather send what a ring sends, and a little for their headers. With torch 2.13 gloo's
# reduce-scatter sends twice as much, as many bytes as an all-reduce. So labkit's *on the wire* is what a ring would
# send. Whether your library does, only a look at the wire tells. What other programs send over loopback is counted,
# too.

# %% [markdown]
# ## 7. What a message costs (core, 5 minutes, and 8 for an optional exercise)
#
# A message, here one whole all-reduce, has two costs. Each message takes a **latency**, alpha: ranks wake up, agree and
# wait for each other. And each byte takes its time, beta; 1 / beta is the **bandwidth**. Alpha and beta belong to this
# collective and this number of ranks. So m messages that have b bytes together take
#
# `m * alpha + b * beta`
#
# This is Hockney's model of 1994. It leaves out much, and still decides most questions about messages.
#
# ### Exercise 5: find alpha and beta (optional, ••, 8 minutes)
#
# `rounds` holds what was measured: for each size in bytes, the seconds of several rounds. Whatever disturbs a message makes
# it slower. Return alpha, in seconds, and beta, in seconds a byte.
#
# <details><summary>Hint 1</summary>
#
# First choose one time for each size. Which round was disturbed least?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Beta is what additional bytes cost: a difference of times over a difference of sizes. The smallest and the largest size
# will do. What is left of the small message without its bytes is alpha.
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
# Now real messages: all-reduces of seven sizes, and 4 MiB cut into 1 to 64 messages. First commit: how long will 4 MiB take
# in 64 messages, in ms, on this machine? A guess is welcome.

# %% tags=["commit"]
mine = commit(pieces_64_ms=None)
### BEGIN SOLUTION
mine = commit(pieces_64_ms=64 * 0.1 + 4)  # 0.1 ms a message, and 1 ms a MiB
### END SOLUTION

# %% tags=["nbval-ignore-output"]
messages = labkit.run("all_reduce", nproc=RANKS, repeats=REPEATS)
ax = plots.all_reduce_time_by_size(messages)

# %% [markdown]
# *Time of one all-reduce against the bytes handed to it, on logarithmic axes. The dashed line is alpha + bytes · beta,
# fitted to the fastest rounds. It weighs relative errors of all sizes alike, and on an idle machine misses single
# points by up to a third: a real bandwidth is not quite the same at all sizes. A blue dot at more than twice the line's
# height was disturbed (grey ones often are): other programs held the cores. Then run the cell again. 1 MiB is 1024
# times 1 KiB, and takes far less than 1024 times as long.*

# %% tags=["claim"]
times = fastest_all_reduce_times(messages)
claim("1024 times the bytes take far less than 1024 times as long", times[2**20] / times[2**10] < 1024 / 4)

# %% [markdown]
# In most runs small messages lie near the horizontal line, alpha: they cost their latency, whatever their size. Large ones
# pay by the byte. Where the two costs are equal, a message has alpha / beta bytes.
#
# Your own fit predicts how long the same 4 MiB take in more and more messages. Without one, labkit's does.

# %% tags=["nbval-ignore-output"]
found = fitted(all_reduce_rounds(messages).groupby(level=0).agg(list).to_dict())
network = theory.AlphaBeta(*found) if found and min(found) > 0 else theory.fit_alpha_beta(times.to_dict())
print(f"alpha {network.alpha_s * 1e6:.0f} µs, beta {network.beta_s_per_byte * 1e12:.0f} µs a MB")
ax = plots.all_reduce_time_by_count(messages, network=network)

# %% [markdown]
# *The same bytes in 1 to 64 messages. The bytes cost the same in all; what grows is the number of latencies. The dashed
# lines are predicted from alpha and beta of single messages. Exercise 5 uses two sizes and labkit's line all seven, so
# the two fits differ. The bars may lie below the dashed lines, or above. Below, if even the fastest round of a size
# that the fit uses was disturbed: a slow small message makes alpha too large, a slow large one beta. On busy cores they
# stand far above: alpha comes from the fastest round of a single message. That they grow with the number of messages
# holds all the same.*

# %% tags=["claim"]
pieces = fastest_all_reduce_times(messages, "pieces")
claim("64 messages take longer than one", pieces[64] > pieces[1])

# %% [markdown]
# Now your guess, beside the bar of the figure. The model may be far off where ranks share cores.

# %% tags=["nbval-ignore-output"]
said = "–" if mine["pieces_64_ms"] is None else f"{mine['pieces_64_ms']:.1f}"
predicted_ms = network.seconds(2**22, messages=64) * 1e3
pandas.DataFrame(
    {"yours": said, "theory": f"{predicted_ms:.1f}", "measured": f"{pieces[64] * 1e3:.1f}"},
    index=["4 MiB in 64 messages, ms"],
)

# %% [markdown]
# So: few large messages are better than many small ones. That is why DDP puts gradients into *buckets* (lab 4), and FSDP a
# whole layer into one all-gather (lab 2).

# %% [markdown]
# ## 8. Data-parallel training by hand (core, 10 minutes)
#
# Section 2 had `DistributedDataParallel`. Two things that it does matter here. It broadcasts rank 0's weights, so that
# all ranks begin equal. And in each step it replaces every gradient by its mean over the ranks. (Besides, it sends rank
# 0's buffers, such as the running means of a batch norm, before each forward pass.)
#
# Why the mean? The loss of a batch is a mean over its samples. If n ranks have equally many samples, the mean over all
# of them is the mean of the ranks' means. The gradient of a mean is the mean of the gradients. All ranks then take the
# same step, and stay equal without another word.
#
# ### Exercise 6: ten lines (••, 10 minutes)
#
# Train `model` on this rank's `batches`, pairs of inputs and targets (equally many on each rank), with the mean squared
# error and plain gradient descent. Four ranks must end with the weights that one device gets from all samples. Each
# rank's model begins with different weights; all must start from rank 0's. Use no `DistributedDataParallel`.
#
# <details><summary>Hint 1</summary>
#
# Before the loop, `dist.broadcast` every parameter from rank 0; `parameter.data` is the tensor without its history.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Between `backward()` and the step, `dist.all_reduce` every gradient, and divide by `dist.get_world_size()`.
#
# </details>


# %%
def train(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], learning_rate: float) -> None:
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
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
checks.train(train)

# %% [markdown]
# ## 9. Build it: a ring all-reduce (core, 20 minutes)
#
# The heart of it all. You write a ring, an algorithm that gloo and NCCL have, with nothing but sends and receives, and
# a network trains with it. (NCCL also has trees, and sums inside the switch. It chooses by size and by how GPUs are
# connected; there the bytes on the wire differ.)
#
# Cut the tensor into as many parts as there are ranks. All ranks do the same thing in each step: send one part to the next
# rank, receive one from the rank before. In the first half, what arrives is added. This is who sends which part, on four
# ranks:
#
# | step | rank 0 | rank 1 | rank 2 | rank 3 | what arrives |
# |---|---|---|---|---|---|
# | 0 | 0 | 1 | 2 | 3 | is added |
# | 1 | 3 | 0 | 1 | 2 | is added |
# | 2 | 2 | 3 | 0 | 1 | is added: now rank 0 has all of part 1, rank 1 of part 2, … |
# | 3 | 1 | 2 | 3 | 0 | takes the place |
# | 4 | 0 | 1 | 2 | 3 | takes the place |
# | 5 | 3 | 0 | 1 | 2 | takes the place |
#
# Follow part 0. It starts on rank 0. Rank 1 adds its own numbers, then rank 2, then rank 3, which now holds the sum. From
# step 3 on the sum goes around. Here are four real ranks doing it, with a ring of labkit's. A part has one number.

# %%
# %%torchrun -n 4 --name ring
from labkit.parallel.ring import ring_all_reduce_steps
from labkit.rank import report

dist.init_process_group()
mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()
steps = list(ring_all_reduce_steps(mine))
report(
    ring={"start": mine, "after step 0": steps[0], "after step 2": steps[2], "after step 3": steps[3], "end": steps[5]}
)

# %%
_ = plots.values_by_rank(ring, {"ring": "all-reduce in a ring"})

# %% [markdown]
# *Steps 1 and 4 are not drawn. Light grey numbers ("over some") are sums over some ranks; their digits tell which: 220
# = 200 + 20 is of ranks 1 and 2. After step 2 every rank holds one dark number, a part of the sum over all. That is a
# reduce-scatter, shifted by one. Rank r holds part r + 1, and rank 3 part 0; `dist.reduce_scatter` would leave part r.
# Then these go around until all ranks hold all: an all-gather.*

# %% tags=["claim"]
halfway, end = (
    torch.stack([rank.reported["ring"][moment] for rank in ring.ranks]) for moment in ("after step 2", "end")
)
claim("after step 2 each rank holds one part of the sum", (halfway == end).sum(1).tolist() == [1, 1, 1, 1])
claim("in the end all ranks hold all", bool((end == torch.tensor([1111.0, 2222, 3333, 4444])).all()))

# %% [markdown]
# ### Exercise 7: the ring (•••, 16 minutes)
#
# Return the sum over all ranks of a vector `mine`. Its length need not be a multiple of `ranks`: `mine.tensor_split(ranks)`
# cuts it as evenly as it can. Four real ranks run it. Your result is held against gloo's all-reduce, and the bytes that you
# send are counted: no more than a ring's.
#
# <details><summary>Hint 1</summary>
#
# In step s rank r sends part `(r - s) % ranks`. Which part does the rank before send in this step? That one arrives.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `parts = list(mine.clone().tensor_split(ranks))`, a loop over `2 * (ranks - 1)` steps, `torch.cat(parts)` at the end. In
# the loop it is your `shift` of exercise 1, with a part to send and another one that arrives.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# Add in the first `ranks - 1` steps, and put in place in the rest. Wait for both handles before you touch a part.
#
# </details>


# %%
def ring_all_reduce(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        handles = [dist.isend(parts[leaves], (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
        for handle in handles:
            handle.wait()
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
    return torch.cat(parts)
    ### END SOLUTION


# %%
verdict = checks.ring_all_reduce(ring_all_reduce)
verdict

# %% [markdown]
# Now it trains. `averaging_with` turns any all-reduce into the averaging half of DDP: PyTorch calls `average` whenever
# a gradient is complete. No broadcast is needed here: the program starts all ranks from one seed. `use=` hands it to
# the measured program of section 2 (`launch/ddp_compile.py`), in place of that file's `data_parallel`. It needs no
# `bucket_bytes`: here each gradient goes around by itself. While exercise 7 is open, gloo's all-reduce stands in for
# yours.


# %%
def gloos(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The sum over all ranks, by gloo."""
    dist.all_reduce(mine)
    return mine


def averaging_with(all_reduce):
    """A function that lets every backward pass of a model average its gradients with this all-reduce."""

    def data_parallel(model: nn.Module, bucket_bytes: int) -> None:
        def average(parameter: nn.Parameter) -> None:
            ranks = dist.get_world_size()
            total = all_reduce(parameter.grad.flatten(), dist.get_rank(), ranks)
            if total is None:
                raise NotImplementedError("the all-reduce returned None: its body is still empty")
            parameter.grad.copy_(total.view_as(parameter.grad) / ranks)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    return data_parallel


yours = ring_all_reduce if verdict.ok else gloos

# %% [markdown]
# First commit. In a step of this training, how many bytes does your ring send on each rank, and in how many sends? The
# network has eight gradients, and the ring runs once for each.

# %% tags=["commit"]
mine = commit(send_bytes=lambda: ring_bytes(gradient_bytes, RANKS), send_count=None)
### BEGIN SOLUTION
mine = mine | commit(send_count=8 * 2 * (RANKS - 1))
### END SOLUTION

# %%
ring_run = labkit.run("ddp_compile", mode="yours", use={"data_parallel": averaging_with(yours)}, **SETUP)
by_theory = {
    "send_bytes": theory.collective_wire_bytes("all_reduce", gradient_bytes, RANKS),
    "send_count": 8 * 2 * (RANKS - 1),
}
if yours is gloos:
    print("Exercise 7 is open: nothing was sent by hand.")
    by_theory, mine = {"all_reduce_wire_bytes": by_theory["send_bytes"]}, {}
plots.comparison_table(ring_run, by_theory, yours=mine, tolerance=0.02)

# %% [markdown]
# *A real network trained with your all-reduce. What your ring handed to its sends is what section 6's formula gives for
# the wire, here on two ranks.*
#
# **Is it right?** A loss that falls proves nothing. So `labkit.check` trains the same network on one device that goes
# through all ranks' samples. Over two steps it compares the output and all 8 gradients of each, and the 8 parameters at
# the end: 26 tensors.

# %%
PARITY = {"mode": "yours", "nproc": RANKS, "dim": 64, "timeout_s": 60}
right = labkit.check("ddp_compile", use={"data_parallel": averaging_with(yours)}, **PARITY)
print(right.verdict_text)

# %% [markdown]
# ## 10. Break it (core, 5 minutes)
#
# A check that never fails is worth nothing. Copy your ring and break one thing: leave out the last step, add where it should
# put in place, or send the wrong part. Then see what parity says. Ranks that wait for each other are stopped after a minute.


# %%
def broken_ring(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1) - 1):  # the last step is left out
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        handles = [dist.isend(parts[leaves], (rank + 1) % ranks), dist.irecv(arrived, (rank - 1) % ranks)]
        for handle in handles:
            handle.wait()
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
    return torch.cat(parts)
    ### END SOLUTION


# %%
try:
    broken = labkit.check("ddp_compile", use={"data_parallel": averaging_with(broken_ring)}, **PARITY)
    print(broken.verdict_text)
except (labkit.RankFailed, labkit.RunTimedOut) as failure:  # ranks that raise, or wait for each other
    print("not compared:", type(failure).__name__)

# %% [markdown]
# ### A test that cannot fail
#
# Suppose somebody forgot the all-reduce. A test compares the gradient of that code with the right one, averaged over
# the ranks; it should fail. First all ranks use the same samples, as a careless test with a fixed seed does; then each
# has its own. Before you run it: in which case does the test fail?

# %%
# %%torchrun -n 4
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
f"without the all-reduce the test passes: {equal} with equal samples, {own} with samples of one's own"

# %% [markdown]
# The mean of four equal gradients is the gradient. With equal samples a missing averaging goes unseen, and so does a
# broken one that returns the gradient it was given. A test of distributed code needs ranks that *differ*. After you
# write a test, break the code once and watch it fail.

# %% [markdown]
# ## 11. When does it pay? (core, 6 minutes, and 6 for an optional exercise)
#
# Data-parallel training adds an all-reduce to each step. Let us say that it pays well while a rank computes longer than
# it sends. At equality, if nothing overlaps, half of each step goes into sending, and n ranks do the work of n / 2. A
# step of forward and backward pass takes about 6 operations (2 forward, 4 backward) for each parameter of a linear
# layer and each sample, or token of a text. So for P parameters, T tokens on each rank, F operations a second,
# gradients of b bytes a number and a bandwidth of B bytes a second
#
# `6 * P * T / F  >  2 * (n - 1) / n * b * P / B`
#
# P stands on both sides. What counts is the batch *of a rank*: T must be large enough. If the all-reduce runs during the
# backward pass, as in DDP, it can hide behind that, which is two thirds of the computing. Lab 4 looks at what hides.
#
# First this machine. The speed F comes from a run on one rank with all cores; `RANKS` ranks share them. B counts bytes
# on the wire, the beta of section 7 bytes handed to the call: so B is 2 (n - 1) / n / beta, not 1 / beta.

# %% tags=["nbval-ignore-output"]
alone = labkit.run("ddp_compile", mode="ddp", nproc=1, dim=DIM, steps=STEPS)
batch = alone.params["batch"]
compute_s = (alone.value("forward_ms") + alone.value("backward_ms")) / 1e3
flops_per_s = 6 * (gradient_bytes / 4) * batch / compute_s / RANKS
bytes_per_s = theory.collective_wire_bytes("all_reduce", 1, RANKS) / max(network.beta_s_per_byte, 1e-12)
pays = theory.collective_wire_bytes("all_reduce", 4, RANKS) / bytes_per_s * flops_per_s / 6
print(f"a rank computes {flops_per_s / 1e9:.1f} GFLOP/s, and sends {bytes_per_s / 1e9:.2f} GB/s")
print(f"sending takes as long as computing at {pays:.1f} samples on each rank; the runs above had {batch}")

# %% [markdown]
# Now GPUs, from data sheets. An H100 (SXM) does 989 · 10^12 operations a second in bfloat16, without sparsity. Programs
# reach perhaps 40 % of it: Llama 2's 127 TFLOP/s (section 1) are 41 % of an A100's 312. Its NVLink moves 900 GB/s in
# both directions together: 450 GB/s out, to GPUs of the same machine. Between machines we take one ring that leaves
# each machine through one adapter of 400 Gbit/s: 50 GB/s. (A DGX H100 has one adapter a GPU. There NCCL lets up to
# eight rings run side by side, and the number below falls to as little as an eighth.) Source: NVIDIA's data sheets of
# the H100 and the DGX H100, see section 12. Gradients travel in bfloat16, 2 bytes.
#
# ### Exercise 8: tokens that pay (optional, ••, 6 minutes)
#
# Solve the inequality for T. How many tokens does a GPU need in a step, at least?
#
# <details><summary>Hint</summary>
#
# Set both sides equal. P cancels.
#
# </details>


# %%
def tokens_that_pay(flops_per_s: float, bytes_per_s: float, ranks: int, gradient_bytes: int) -> float:
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s * flops_per_s / 6
    ### END SOLUTION


# %%
checks.tokens_that_pay(tokens_that_pay)

# %% [markdown]
# Commit before you compute: how many tokens a GPU, for 1024 GPUs, if one adapter of 50 GB/s a machine carries the ring?

# %% tags=["commit"]
mine = commit(tokens=None)
### BEGIN SOLUTION
mine = commit(tokens=5000)
### END SOLUTION

# %%
H100_FLOPS = 0.4 * 989e12
yours_now = [tokens_that_pay(H100_FLOPS, speed, 1024, 2) for speed in (450e9, 50e9)]
by_hand = [theory.collective_wire_bytes("all_reduce", 2, 1024) / speed * H100_FLOPS / 6 for speed in (450e9, 50e9)]
index = ["NVLink, 450 GB/s", "one adapter a machine, 50 GB/s"]
guess = f"{mine['tokens']:,.0f}" if mine["tokens"] else "–"
columns = {"your guess": ["–", guess], "your function": [f"{t:,.0f}" if t else "–" for t in yours_now]}
pandas.DataFrame(columns | {"theory": [f"{t:,.0f}" for t in by_hand]}, index=index)

# %% tags=["nbval-ignore-output"]
llama = 7e9
seconds = {speed: theory.collective_wire_bytes("all_reduce", 2 * llama, 1024) / speed for speed in (450e9, 50e9)}
panels = {
    "this machine, this lab's network": (
        6 * (gradient_bytes / 4) / flops_per_s,
        {f"{RANKS} ranks": theory.collective_wire_bytes("all_reduce", gradient_bytes, RANKS) / bytes_per_s},
    ),
    "1024 H100s, 7 billion parameters": (
        6 * llama / H100_FLOPS,
        {"NVLink, 450 GB/s": seconds[450e9], "one adapter a machine, 50 GB/s": seconds[50e9]},
    ),
}
_ = plots.communication_break_even(panels, batches={"this machine, this lab's network": batch})

# %% [markdown]
# *What computing takes grows with the tokens of a rank. What sending takes does not: a gradient is as large as the
# network, whatever the batch. A dot stands where both take equally long; right of it, computing takes longer.* All of
# it is predicted, on the left from what was measured above. There a token is a sample, and the dotted line is this
# lab's batch.
#
# *One sequence of Llama 2 has 4096 tokens. So where one adapter carries the ring a GPU wants two of them or more, and
# within a machine a part of one is enough. Both dots on the right use the factor of 1024 ranks, nearly 2. For the 8
# GPUs of one machine it is 1.75, and the 586 become 513. (Section 1's 7 billion parameters do not fit one H100. P
# cancels: the dots hold for smaller networks, too.)*

# %% tags=["claim"]
claim("a GPU wants two sequences or more", 4096 < by_hand[1] < 2 * 4096)
claim("within a machine a part of one is enough", by_hand[0] < 4096)

# %% [markdown]
# With more GPUs and the same global batch each has fewer tokens. So the inequality also says where data-parallel
# training stops scaling. Beyond it one shares each sample, too: labs 1 and 5.

# %% [markdown]
# ## 12. Leave with (core, 5 minutes)

# %% tags=["summary"]
rows = {"DDP": plots.comparison_table(trained, {"all_reduce_bytes": gradient_bytes})}
rows["your ring"] = plots.comparison_table(ring_run, by_theory, tolerance=0.02)
pandas.concat(rows)

# %% [markdown]
# | | |
# |---|---|
# | rank | a process of a run, and its number |
# | world size | how many |
# | process group | ranks that talk; collectives run within one |
# | backend | the library that moves bytes: gloo, NCCL |
# | broadcast, all-reduce, all-gather, reduce-scatter, all-to-all | section 5's figures |
# | all-reduce | = reduce-scatter + all-gather; 2 (n - 1) / n of the tensor leaves each rank |
# | time of a message | alpha + bytes · beta |
# | data-parallel training | equal weights, own samples, mean of the gradients |
#
# **Ask yourself**
#
# <details><summary>1. A run prints nothing for ten minutes. What do you do first?</summary>
#
# Look where each rank is. A rank waits for something that another does not send. If all wait in the same collective,
# suspect the network, or different shapes or different earlier calls on some rank; if one is elsewhere, look there
# first.
#
# </details>
#
# <details><summary>2. Only rank 0 calls <code>all_reduce</code>, inside <code>if rank == 0</code>. What happens?</summary>
#
# It hangs, or fails once the others exit. A collective needs every rank of its group. If the others call another
# collective later, the two may even be mixed up, and the numbers are wrong.
#
# </details>
#
# <details><summary>3. Eight ranks all-gather a tensor of 80 MB. How much does each hand to the call, how much goes on the wire?</summary>
#
# 10 MB are handed in, 70 MB leave each rank.
#
# </details>
#
# <details><summary>4. You double the number of ranks and keep the batch of each. What happens to the bytes of a rank?</summary>
#
# What is handed over stays the same. On the wire, 2 (n - 1) / n stays below 2: half more from 2 to 4 ranks, hardly more
# from 64 on. Latency grows: a ring has 2 (n - 1) steps.
#
# </details>
#
# <details><summary>5. Why do ranks stay equal, though nobody compares their weights?</summary>
#
# They began equal, by the broadcast, and each step applies the same mean gradient with the same arithmetic. Whoever skips
# one all-reduce on one rank breaks that for good, in silence.
#
# </details>
#
# **Papers and pages**
#
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009: the ring.
#   <https://doi.org/10.1016/j.jpdc.2008.09.002>
# - Hockney, *The communication challenge for MPP*, 1994: alpha and beta. <https://doi.org/10.1016/S0167-8191(06)80021-9>
# - Li and others, *PyTorch Distributed: experiences on accelerating data parallel training*, 2020.
#   <https://arxiv.org/abs/2006.15704>
# - Touvron and others, *Llama 2*, 2023: the numbers of section 1. <https://arxiv.org/abs/2307.09288>
# - PyTorch: `torch.distributed` <https://docs.pytorch.org/docs/stable/distributed.html> and torchrun
#   <https://docs.pytorch.org/docs/stable/elastic/run.html>
# - NVIDIA's data sheets: H100 <https://www.nvidia.com/en-us/data-center/h100/>, DGX H100
#   <https://www.nvidia.com/en-us/data-center/dgx-h100/>
#
# **Read in labkit**: `launch/all_reduce.py`, a whole rank program; `labkit/theory/collectives.py`, the formulas of this lab;
# `labkit/session/traffic.py`, how bytes are counted.
#
# **Next**: lab 1 cuts images over ranks, lab 2 parameters. What DDP does with buckets while the backward pass runs is lab 4.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("collectives")
