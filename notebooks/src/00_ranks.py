# %% [markdown]
# # Lab 0. Ranks and collectives
#
# Distributed training is ordinary PyTorch, run by several processes that send tensors to each other. After this lab you
# can
#
# - start ranks, and read what a hang or a failed rank tells you;
# - say what each rank holds after each of the five collectives;
# - write a ring all-reduce, and data-parallel training, by hand;
# - predict how many bytes a step sends, how long they take, and whether more ranks pay.
#
# You should know PyTorch on one device; no GPU is needed. The lab takes about {core_minutes} minutes, and its exercises
# are marked • (easy) or •• (harder). After a restart of the kernel, choose *Run All Above Selected Cell* from the menu
# *Run*.
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import os

import pandas
import torch
from torch import distributed as dist
from torch import nn

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.plots.collectives import fastest_all_reduce_times
from labkit.theory import collectives as theory
from labkit_course import widgets
from labkit_course.checks import collectives as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="0")

# %% [markdown]
# You may change these parameters of the lab:

# %% tags=["parameters"] small={"RANKS": 3, "DIM": 50, "REPEATS": 4} points=[[2,4,1],[3,301,5],[8,1200,30]]
RANKS: int = 4  # ranks of the measured runs
DIM: int = 1000  # width of the network's four linear layers
REPEATS: int = 15  # rounds in which each message is timed

# %%
require("RANKS", RANKS, at_least=2, at_most=8, because="one rank has nobody to talk to, and more than 8 take minutes")
require("DIM", DIM, at_least=4, because="a layer needs a width")
require("REPEATS", REPEATS, at_least=1, because="without a round nothing is measured")
labkit.use_one_device(max(RANKS, 4))  # GPUs if there is one for each rank of this lab, else the CPU

# %% [markdown]
# ## 1. Why share? ({minutes} minutes)
#
# Most GPUs are too small for a model of 7 billion parameters that is trained with Adam in mixed precision. Each parameter
# takes 16 bytes: 2 for the weight and 2 for its gradient, both in bfloat16, and 12 in the optimizer, which keeps a
# float32 copy and two running means. That is 112 GB before the first activation, and an H100 has 80 GB.
#
# Time is the larger problem: training the 7-billion-parameter Llama 2 took 184,320 A100 GPU-hours (Touvron et
# al., 2023). On a single GPU that is 21 years, and on 1024 GPUs without any loss 7.5 days.
#
# So several devices share the work, and have to talk. Examples in the labs take this **reference cluster**:
#
# | | |
# |---|---|
# | GPUs | 64 H100 (SXM) with 80 GB each, in 8 hosts |
# | arithmetic | 989 · 10¹² bfloat16 operations a second by the data sheet, of which good programs reach 40 %: 400 · 10¹² |
# | inside a host | NVLink: 450 GB/s out of each GPU |
# | between hosts | eight network cards a host, one for each GPU: 50 GB/s (400 Gbit/s) each, 400 GB/s together |
#
# *Takeaway: training is shared because one device has neither the memory nor the time.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# Here is a complete distributed program, which trains **data-parallel**: every process holds the same network, and each
# takes its own samples. The magic `%%torchrun -n 4` runs the cell on four processes, with the notebook's imports, but not
# its variables. If you save the same lines as `train.py`, `torchrun --nproc-per-node 4 train.py` runs them, too.

# %% tags=["script"]
# %%torchrun -n 4
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()  # finds the others, from what torchrun has left in the environment
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
truth = torch.randn(8, 1)  # the same on every rank
model = DistributedDataParallel(nn.Linear(8, 1, bias=False))  # averages gradients in each backward pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(rank)  # from here on, each rank draws its own samples
for step in range(20):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x), x @ truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)  # the sum over all ranks, on every rank
    if rank == 0 and step in (0, 19):
        print(f"step {step:2}: mean loss of {ranks} ranks {total.item() / ranks:.3f}")
dist.destroy_process_group()

# %% [markdown]
# The wrapper is `DistributedDataParallel` (*DDP*).
#
# <details><summary>On GPUs, with your own data, on several machines</summary>
#
# Each rank takes one GPU. The network goes there, and so do the samples:
#
# ```python
# device = int(os.environ["LOCAL_RANK"])  # this rank's number on its machine
# torch.cuda.set_device(device)
# dist.init_process_group("nccl")
# model = DistributedDataParallel(network.to(device), device_ids=[device])
# ```
#
# For your own data, give `DataLoader` a `DistributedSampler(dataset)` as its sampler, and call `set_epoch(epoch)` on it
# in each epoch, which shuffles anew. Without the sampler every rank trains on all samples. Save
# `model.module.state_dict()` on rank 0 only.
#
# On two machines, run this on both, with the name of one of them as HOST: `torchrun --nnodes 2 --nproc-per-node 8
# --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py`.
#
# </details>
#
# *Takeaway: a distributed program is a normal program that runs several times, and DDP adds one wrapper.*
#
# ## 3. A rank is a process ({minutes} minutes)
#
# A **rank** is one process of a run, and also its number, counted from 0, and the number of ranks is the **world
# size**. `torchrun` starts the processes and tells each one its number in an environment variable. Ranks share no
# memory.
#
# Before ranks can talk, `init_process_group` lets them find each other. They talk through a **backend**, a library that
# moves the bytes, which is *gloo* between CPUs and *NCCL* between NVIDIA GPUs.
#
# **What happens when a rank fails?** The others cannot go on without it, so `torchrun` ends them all. The next cell
# fails on purpose.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --fails
print(f"I am process {os.getpid()}, rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
dist.init_process_group()
if dist.get_rank() == 1:
    raise ValueError("my samples are missing")
dist.all_reduce(torch.ones(1))

# %% [markdown]
# <details><summary>The same in the log of a plain <code>torchrun</code>, shortened. Which rank failed first?</summary>
#
# ```
# [rank1]: ValueError: my samples are missing
# [rank0]: RuntimeError: [...] Connection closed by peer [127.0.0.1]:54428.
# [rank2]: RuntimeError: [...] Connection closed by peer [127.0.0.1]:48339.
# Sending process 7469 closing signal SIGTERM
# failed (exitcode: 1) local_rank: 1 (pid: 7470)
# rank : 0 (local_rank: 0) exitcode : -15 (pid: 7469) (SIGTERM)
# ```
#
# Rank 1: its error is about samples. The others lost their connection to it, or were ended by torchrun's SIGTERM.
#
# </details>
#
# *Takeaway: look for the rank that failed **first**. Errors of other ranks about lost connections only follow from it.*
#
# ## 4. Send, receive, and a deadlock ({minutes} minutes)
#
# The simplest message goes from one rank to another: `send(tensor, receiver)` names the receiver, and `recv(tensor,
# sender)` names the sender and writes the elements that arrive into its tensor. Suppose that four ranks stand in a
# circle, and each one receives from the rank before it, then sends to the next:
#
# ```python
# dist.recv(arrived, (rank - 1) % ranks)
# dist.send(mine, (rank + 1) % ranks)
# ```
#
# Every rank is in `recv`, and waits for a message that its neighbour would only send afterwards. This is called a
# **deadlock**, and PyTorch prints nothing until a timeout, after 30 minutes (10 with NCCL). Sending first is no cure,
# because a `send` may wait until its message is received.
#
# The way out is to start everything first and to wait afterwards. A message is planned as `dist.P2POp(dist.isend,
# tensor, receiver)` or `dist.P2POp(dist.irecv, tensor, sender)`. `dist.batch_isend_irecv` starts a list of them and
# returns handles, whose `wait()` returns when a message is through. Until then, neither change the tensor you send nor
# read the one you receive.
#
# ### Exercise 1: mend the circle (••, {minutes} minutes)
#
# Send `mine` to the next rank, and return what comes from the rank before; rank 0 comes after the last. Your function
# runs on four real ranks, then on three. A deadlock is stopped after 30 seconds, so you may try `send`
# first.
#
# <details><summary>Hint 1</summary>
#
# `irecv` needs a tensor of the right size to write into. Both messages go into one list.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `arrived = torch.empty_like(mine)`, a list of two `P2POp`, a wait for each handle, `return arrived`. `% ranks` closes
# the circle.
#
# </details>


# %%
def shift(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    arrived = torch.empty_like(mine)
    send = dist.P2POp(dist.isend, mine, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    return arrived
    ### END SOLUTION


# %%
checks.shift(shift)

# %% [markdown]
# *Takeaway: start sends and receives in one batch, before you wait for one of them.*
#
# ## 5. Five collectives ({minutes} minutes)
#
# A **collective** is a call that all ranks make, in the same order. Five of them carry nearly all of distributed
# training:
#
# | collective | afterwards | where you will meet it |
# |---|---|---|
# | broadcast | every rank holds rank 0's tensor | equal weights at the start |
# | all-reduce | every rank holds the sum over all ranks | gradients of data-parallel training |
# | reduce-scatter | rank r holds part r of that sum | gradients of FSDP, fully sharded data parallelism (lab 2) |
# | all-gather | every rank holds every rank's part | parameters of FSDP |
# | all-to-all | rank r holds part r of every rank | mixtures of experts, where each token goes to its expert's rank |
#
# Four ranks are about to run all five. Rank 0 begins each call with 1 2 3 4, rank 1 with 10 20 30 40, rank 2 with 100 200
# 300 400, and so on; the all-gather alone begins with what the reduce-scatter leaves. Ranks and parts are counted from 0.
# Commit to a prediction, that is, write it in place of `None`: which is the **first** number on rank 2 after each call?

# %% tags=["commit"]
mine_first = commit(broadcast=None, all_reduce=None, reduce_scatter=None, all_gather=None, all_to_all=None)
### BEGIN SOLUTION
mine_first = commit(broadcast=1, all_reduce=1111, reduce_scatter=3333, all_gather=1111, all_to_all=3)
### END SOLUTION

# %%
# %%torchrun -n 4 --name five
from labkit.rank import report  # sends values home to the notebook

dist.init_process_group()
mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()
x, total, turned, part = mine.clone(), mine.clone(), torch.empty(4), torch.empty(1)
parts = [torch.empty(1) for _ in range(4)]

dist.broadcast(x, src=0)  # in place, as the next one
dist.all_reduce(total)
dist.reduce_scatter(part, list(mine.chunk(4)))
dist.all_gather(parts, part)
dist.all_to_all_single(turned, mine)

report(broadcast={"before": mine, "after": x}, all_reduce={"before": mine, "after": total})
report(reduce_scatter={"before": mine, "after": part}, all_to_all={"before": mine, "after": turned})
report(all_gather={"before": part, "after": torch.cat(parts)})

# %%
titles = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_reduce": "all-reduce"}
_ = plots.values_by_rank(five, titles)
_ = plots.values_by_rank(five, {"broadcast": "broadcast", "all_to_all": "all-to-all"})
first = {name: five.ranks[2].reported[name]["after"].flatten()[0].item() for name in mine_first}
pandas.DataFrame({"yours": mine_first, "rank 2 holds": first}).astype(object).fillna("no prediction")

# %% [markdown]
# *A number has the colour of the rank that held it before the call, and a new sum is dark.*
#
# The all-gather collects the parts that the reduce-scatter has left, so the two in turn leave what an all-reduce leaves.


# %% tags=["claim"]
def before_and_after(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks held before and after: a line a rank."""
    reported = [rank.reported[name] for rank in five.ranks]
    return torch.stack([each["before"] for each in reported]), torch.stack([each["after"] for each in reported])


for name, right in {
    "broadcast": lambda before: before[:1].expand(4, 4),
    "all_reduce": lambda before: before.sum(0).expand(4, 4),
    "reduce_scatter": lambda before: before.sum(0)[:, None],
    "all_gather": lambda before: before.T.expand(4, 4),
    "all_to_all": lambda before: before.T,
}.items():
    claim(
        f"{name} leaves what the table says",
        bool((before_and_after(name)[1] == right(before_and_after(name)[0])).all()),
    )
claim(
    "the two in turn are an all-reduce",
    bool((before_and_after("all_gather")[1] == before_and_after("all_reduce")[1]).all()),
)

# %% [markdown]
# **One rank does something else.** Below, only rank 0 asks for a sum, because it alone prints. This cell hangs on
# purpose: it is stopped after 5 seconds, and shows where each rank was.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 4 --timeout 5 --fails
dist.init_process_group()
loss = torch.ones(1)
if dist.get_rank() == 0:
    dist.all_reduce(loss)
    print(f"sum of the losses: {loss.item()}")
dist.barrier()  # returns when all ranks have called it

# %% [markdown]
# <details><summary>Where is each rank, outside this notebook?</summary>
#
# `pip install py-spy`, let `pgrep -f train.py` list the processes, and call `py-spy dump --pid` with each number.
#
# </details>
#
# *Takeaway: **all-reduce = reduce-scatter + all-gather**. In a hang, look where **each** rank is.*
#
# ## 6. Build it: a ring all-reduce ({minutes} minutes)
#
# Large tensors are added up in a **ring**: each rank sends only to the next one, all at the same time. The
# tensor is cut into as many parts as there are ranks. In the first pass the parts go around and are added up, and in
# the second the finished sums go around, here on four real ranks:

# %%
# %%torchrun -n 4 --name ring
from labkit.parallel.ring import ring_all_reduce_steps
from labkit.rank import report

dist.init_process_group()
mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()
steps = list(ring_all_reduce_steps(mine))
report(ring={"start": mine} | {f"after step {step}": values for step, values in enumerate(steps)})

# %%
_ = plots.values_by_rank(ring, {"ring": "all-reduce in a ring"})

# %% [markdown]
# *Frames mark what has just changed. Rank 0 sends its 1 to rank 1, which adds 10 and sends 11 on. After step 2
# each rank holds one finished part (dark). These then travel on and replace the others.*

# %% tags=["claim"]
held_then, end = (torch.stack([rank.reported["ring"][f"after step {step}"] for rank in ring.ranks]) for step in (2, 5))
claim("after step 2 each rank holds one part of the sum", (held_then == end).sum(1).tolist() == [1, 1, 1, 1])
claim("in the end all ranks hold all", bool((end == torch.tensor([1111.0, 2222, 3333, 4444])).all()))

# %% [markdown]
# In step 0 rank r sends part r, and in each later step the partial sum that it has just formed.
#
# ### Exercise 2: the first pass (••, {minutes} minutes)
#
# Send parts around, add them up, and return the one part that this rank then holds in full, part `(rank + 1) % ranks`:
# the ring leaves the parts shifted by one, unlike `dist.reduce_scatter`. The length of `mine` need not be a multiple of
# `ranks`: `mine.tensor_split(ranks)` cuts it as evenly as it can. Use only messages, no collective, and
# leave `mine` as it is: its parts are views, so add to copies.
#
# <details><summary>Hint 1</summary>
#
# The body of the loop is your `shift` of exercise 1, with one part to send and another one that arrives. Write down
# what leaves each rank:
#
# | step | rank 0 sends part | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|---|
# | 0 | 0 | 1 | 2 | 3 |
# | 1 | 3 | 0 | 1 | 2 |
# | 2 | 2 | 3 | 0 | 1 |
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `parts = list(mine.clone().tensor_split(ranks))`, then a loop over `ranks - 1` steps. Part `(rank - step) % ranks`
# leaves, part `(rank - step - 1) % ranks` arrives.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `arrived = torch.empty_like(parts[comes])`; start both messages, wait for both; `parts[comes] = parts[comes] +
# arrived`.
#
# </details>


# %%
def ring_reduce_scatter(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.clone().tensor_split(ranks))
    for step in range(ranks - 1):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
        for handle in dist.batch_isend_irecv([send, receive]):
            handle.wait()
        parts[comes] = parts[comes] + arrived
    return parts[(rank + 1) % ranks]
    ### END SOLUTION


# %%
checks.ring_reduce_scatter(ring_reduce_scatter)

# %% [markdown]
# ### Exercise 3: both passes (•, {minutes} minutes)
#
# Now return the whole sum. The second pass has as many steps as the first, and each rank still sends the part that it
# has just received, beginning with the one that it has finished. This part replaces the receiver's instead of being
# added to it.
#
# <details><summary>Hint</summary>
#
# Copy your loop of exercise 2, and let it run for `2 * (ranks - 1)` steps. From step `ranks - 1` on, `parts[comes] =
# arrived`. At the end, `torch.cat(parts)`.
#
# </details>


# %%
def ring_all_reduce(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
        for handle in dist.batch_isend_irecv([send, receive]):
            handle.wait()
        parts[comes] = parts[comes] + arrived if step < ranks - 1 else arrived
    return torch.cat(parts)
    ### END SOLUTION


# %%
verdict = checks.ring_all_reduce(ring_all_reduce)
verdict

# %% [markdown]
# **Count the bytes.** Each of the 2 (n − 1) steps sends one part, b / n bytes of a tensor of b bytes. These are the
# bytes *on the wire*. The bytes that a rank *hands to the call* are those of its own tensor, and the course keeps the
# two apart. Here b is the whole tensor, before a reduce-scatter or after an all-gather:
#
# | | handed to the call | on the wire, sent by each rank |
# |---|---|---|
# | all-reduce | b | 2 (n − 1)/n · b |
# | reduce-scatter | b | (n − 1)/n · b |
# | all-gather | one part, b / n | (n − 1)/n · b |
#
# *Takeaway: in a ring no rank ever sends more than twice its tensor, however many ranks there are.*
#
# ## 7. Data-parallel training by hand ({minutes} minutes)
#
# DDP broadcasts rank 0's weights, so that all ranks begin equal, and in each step it replaces every gradient by its
# mean over the ranks. All ranks then take the same step and stay equal.
#
# <details><summary>Why the mean?</summary>
#
# The loss of a batch is a mean over its samples. If all ranks have equally many samples, the mean over all of them is
# the mean of the ranks' losses, and the same holds for gradients.
#
# </details>
#
# ### Exercise 4: ten lines (•, {minutes} minutes)
#
# Train `model` on this rank's `batches`, pairs of inputs and targets, with the mean squared error and plain gradient
# descent. Each rank's model begins with different weights, and all must start from rank 0's. Four ranks must end with
# the weights that one device gets from all samples. Use collectives of `dist` here; your ring comes in section 8.
#
# <details><summary>Hint 1</summary>
#
# Two calls of `dist` are missing from an ordinary training loop: one before the loop, and one between the backward pass
# and the optimizer's step.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Before the loop, `dist.broadcast(parameter.data, src=0)` for every parameter (`.data` is the tensor without its
# history). After `backward()`, `dist.all_reduce(parameter.grad)`, and divide by `dist.get_world_size()`.
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
# *Takeaway: data-parallel training is one broadcast at the start, and one averaged gradient in each step.*
#
# ## 8. Your ring trains a real network ({minutes} minutes)
#
# `labkit.run` starts one of the course's programs on real ranks and returns what it measured. Here
# `launch/ddp_compile.py` trains four linear layers, each `DIM` wide. `mode="yours"` and `use=` put your ring into it:
# `averaging_with` calls it once for each gradient.
#
# Each layer has two gradients, of its weight and its bias. With `DIM` 1000, all eight together have 16,016,000 bytes.
# Commit: in one step, how many bytes does each of the `RANKS` ranks send, and in how many messages?

# %% tags=["commit"]
mine_sends = commit(send_bytes=None, send_count=None)
### BEGIN SOLUTION
mine_sends = commit(send_bytes=2 * (RANKS - 1) / RANKS * 16 * (DIM * DIM + DIM), send_count=8 * 2 * (RANKS - 1))
### END SOLUTION

# %% tags=["summary"]
from labkit.parallel.ring import ring_all_reduce as labkits_ring
from labkit.parallel.small_ddp import averaging_with

yours = ring_all_reduce if verdict.ok else labkits_ring
gradient_bytes = 4 * 4 * (DIM * DIM + DIM)
ring_run = labkit.run("ddp_compile", mode="yours", use={"data_parallel": averaging_with(yours)}, nproc=RANKS, dim=DIM)
sent_bytes = theory.collective_wire_bytes("all_reduce", gradient_bytes, RANKS)
by_theory = {"send_bytes": sent_bytes, "send_count": 8 * theory.ring_step_count("all_reduce", RANKS)}
plots.comparison_table(ring_run, by_theory, yours=mine_sends, tolerance=0.02)

# %% [markdown]
# Does a falling loss prove that training is right? `labkit.check` trains the same network on one device that sees
# all samples, and compares outputs, gradients and parameters over two steps.
#
# **Break it.** Copy your ring and break one thing: leave out the last step, add where it should replace, or send the
# wrong part. Each ring is then checked, and trains 20 steps on random targets, from which little can be learned.


# %%
def broken_ring(mine: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    ### BEGIN SOLUTION
    parts = list(mine.clone().tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        leaves, comes = (rank - step) % ranks, (rank - step - 1) % ranks
        arrived = torch.empty_like(parts[comes])
        send = dist.P2POp(dist.isend, parts[leaves], (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
        for handle in dist.batch_isend_irecv([send, receive]):
            handle.wait()
        parts[comes] = parts[comes] + arrived  # added in the second pass, too
    return torch.cat(parts)
    ### END SOLUTION


# %%
losses = {}
for name, ring_to_check in {"your ring": yours, "broken ring": broken_ring}.items():
    how = {"mode": "yours", "use": {"data_parallel": averaging_with(ring_to_check)}, "nproc": 4, "dim": 64}
    try:
        print(f"{name}: {labkit.check('ddp_compile', timeout_s=60, **how).verdict_text}")
        losses[name] = labkit.run("ddp_compile", steps=20, **how).losses
        print(f"  loss: {losses[name].iloc[0]:.3f}, after 20 steps {losses[name].iloc[-1]:.3f}")
    except (labkit.RankFailed, labkit.RunTimedOut) as failure:  # ranks that raise, or wait for each other
        first, *rest = str(failure).splitlines()
        places = [line.strip() for line in rest if f"in {ring_to_check.__name__}" in line]
        print(f"{name}: not compared: {first}", *places[:1])

# %% tags=["claim"]
falls = [each.iloc[-1] < each.iloc[0] for each in losses.values() if not each.isna().any()]
claim("the loss may fall with wrong sums, too", all(falls))
claim("here it even falls further", losses["broken ring"].iloc[-1] < losses["your ring"].iloc[-1])

# %% [markdown]
# A ring that adds in both passes counts some gradients several times, on each rank others. Longer gradients make longer
# steps, so its loss falls even further. Only the comparison tells.
#
# *Takeaway: compare gradients rather than losses. After you write a test, break the code once and watch the test fail.*
#
# ## 9. What a collective costs ({minutes} minutes)
#
# Each call of a collective takes α (alpha) seconds, however small the tensor. On top of that, each byte handed to an
# all-reduce takes β (beta) seconds. If m calls are handed b bytes in total, they take
#
# `m · α + b · β`
#
# Two ranks measure seven sizes:

# %% tags=["nbval-ignore-output"]
messages = labkit.run("all_reduce", nproc=2, repeats=REPEATS)
_ = plots.all_reduce_time_by_size(messages)

# %% tags=["claim"]
times = fastest_all_reduce_times(messages)
claim("1024 times the bytes take far less than 1024 times as long", times[2**20] / times[2**10] < 1024 / 4)

# %% [markdown]
# *One all-reduce by its size; dashed, α + bytes · β, fitted to the fastest rounds. Small ones cost
# α, and large ones pay by the byte; at α / β both cost the same.*
#
# Can two numbers predict another size? Take α and β from the figure's legend and
# commit: how many milliseconds will an all-reduce of 16 MiB, four times the largest, take on your machine?

# %% tags=["commit"]
mine_16_mib = commit(ms=None)
### BEGIN SOLUTION
mine_16_mib = commit(ms=round(1e3 * theory.fit_alpha_beta(times.to_dict()).seconds(2**24), 1))
### END SOLUTION

# %% tags=["nbval-ignore-output"]
larger = labkit.run("all_reduce", nproc=2, repeats=REPEATS, message_bytes=(2**20, 2**24))
larger_ms = 1e3 * fastest_all_reduce_times(larger)[2**24]
print(f"16 MiB: {larger_ms:.1f} ms; you: {prediction_text(mine_16_mib['ms'])}")

# %% tags=["claim"]
by_fit_ms = 1e3 * theory.fit_alpha_beta(times.to_dict()).seconds(2**24)
claim("the fit is right within a factor of two", 0.5 < larger_ms / by_fit_ms < 2)

# %% [markdown]
# The line fits best between the sizes that it has seen, since large tensors may travel in another way than small ones. In a
# ring of n ranks, α is 2 (n − 1) times the **latency** of one step: 2 steps for the figure's two ranks. β
# is 2 (n − 1)/n divided by the **bandwidth** of a link, so even very many ranks at most double that of two. The explorer
# answers the question below it.

# %%
widgets.RingExplorer()

# %% [markdown]
# <details><summary>64 ranks add up 1 MiB, with 10 µs a step and 10 GB/s. Which helps more, ten times the bandwidth or a
# tenth of the latency?</summary>
#
# A tenth of the latency: 126 steps take 1.26 ms, and the bytes only 0.21 ms. For small tensors on many ranks NCCL
# therefore takes trees instead of a ring: their number of steps grows with the logarithm of n.
#
# </details>
#
# **One call or eight?** Your ring makes a call for each of the eight gradients. DDP packs them into **buckets** of
# up to 25 MiB and makes one call for each. Four ranks now train layers that are 64 wide, whose gradients have 66,560
# bytes and fit into one bucket. The wire is emulated: each step of a ring waits 10 ms, and then 100 ns a byte. Commit: how
# many milliseconds of a training step does the bucket save?

# %% tags=["commit"]
mine_saves = commit(saved_ms=None)
### BEGIN SOLUTION
mine_saves = commit(saved_ms=7 * 6 * 10)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
slow_wire = labkit.Emulated(latency_us=10_000, gb_per_s=0.01, hardware="a wire of 10 ms and 10 MB/s")
ways = {"eight rings": {"mode": "yours", "use": {"data_parallel": averaging_with(yours)}}, "bucket": {"mode": "ddp"}}
by_way = labkit.compare("ddp_compile", ways, nproc=4, dim=64, steps=2, rounds=1, emulate=slow_wire)
eight_ms, one_ms = (run.value("step_ms") for run in by_way.values())
print(f"{eight_ms:.0f} - {one_ms:.0f} = {eight_ms - one_ms:.0f} ms; you: {prediction_text(mine_saves['saved_ms'])}")
print(f"beyond the wire's 420 ms: {(eight_ms - one_ms - 420) / 42:.1f} ms for each of 42 steps")

# %% tags=["claim"]
claim("the bucket saves about the latency of 42 messages", 0.9 < (eight_ms - one_ms) / 420 < 1.5)

# %% [markdown]
# The bucket's ring has 6 steps, the eight rings have 48. So 42 · 10 ms are saved, and the processes' own time for each step.
#
# *Takeaway: every call pays α once more, so few large messages are better than many small ones. DDP fills buckets (lab
# 4), and FSDP gathers whole layers (lab 2).*
#
# ## 10. Does it pay? ({minutes} minutes)
#
# If n ranks share a batch, each computes an n-th of it, and then they average the gradients. The time of a step is the
# sum of both. Lab 4 lets them overlap, but gradients that fit into one bucket are sent in one call at the end.
#
# ### Exercise 5: the time of a step (•, {minutes} minutes)
#
# One device needs `compute_s` seconds for the whole batch. How many seconds does a step take on `ranks` ranks?
# Gradients of `gradient_bytes` go through one ring, whose steps each have a latency of `latency_s` and whose links
# carry `bytes_per_s`.
#
# <details><summary>Hint 1</summary>
#
# Three terms: a rank's share of the computing, the latencies of the ring's steps, and the bytes on the wire over the
# bandwidth.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The ring has `steps = 2 * (ranks - 1)`, and each one takes `latency_s + gradient_bytes / ranks / bytes_per_s`.
#
# </details>


# %%
def step_seconds(compute_s: float, gradient_bytes: int, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    ### BEGIN SOLUTION
    steps = 2 * (ranks - 1)
    return compute_s / ranks + steps * (latency_s + gradient_bytes / ranks / bytes_per_s)
    ### END SOLUTION


# %%
checks.step_seconds(step_seconds)

# %% [markdown]
# **On two wires.** Real ranks now train with DDP, and *wait* as long as an imagined device and wire would take. One
# device computes the whole batch in 8 layers of 20 ms forward and 40 ms backward, 480 ms in all. The gradients have 133,120
# bytes, and links carry 10 MB a second. A ring's step has a latency of 1 ms on the near wire, and 40 ms on the far one.
# Commit, before you call your function: on each wire, which of 1, 2, 4 and 8 ranks is fastest?

# %% tags=["commit"]
mine_fastest = commit(near=None, far=None)
### BEGIN SOLUTION
mine_fastest = commit(near=8, far=2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
net = {"mode": "ddp", "batch": 8, "steps": 1, "dim": 64, "layers": 8}
alone = labkit.run("ddp_compile", nproc=1, emulate=labkit.Emulated(forward_ms=20, hardware="one device"), **net)
by_wire, your_s = {}, {}
for wire, ms in {"near": 1, "far": 40}.items():
    link = {"latency_us": 1e3 * ms, "gb_per_s": 0.01, "hardware": f"{wire} wire, {ms} ms and 10 MB/s"}
    cases = {f"{n} ranks": {"nproc": n, "emulate": labkit.Emulated(forward_ms=20 / n, **link)} for n in (2, 4, 8)}
    by_wire[wire] = [alone, *labkit.compare("ddp_compile", cases, rounds=1, **net).values()]
    your_s[wire] = {n: step_seconds(0.48, 133_120, n, ms / 1e3, 1e7) for n in (1, 2, 4, 8)}
_ = plots.step_time_by_ranks(by_wire, your_s)
for wire, runs in by_wire.items():
    best = min(runs, key=lambda run: run.value("step_ms")).world_size
    print(f"fastest on the {wire} wire: {best} ranks; you: {prediction_text(mine_fastest[wire])}")

# %% tags=["claim"]
near_ms, far_ms = ([run.value("step_ms") for run in runs] for runs in by_wire.values())
claim("on the near wire eight ranks are over three times as fast as one", 3 * near_ms[3] < near_ms[0])
claim("DDP makes one call", by_wire["far"][-1].value("all_reduce_count") == 1)
claim("on the far wire two ranks win, and eight lose", far_ms[1] < 0.8 * far_ms[0] and far_ms[3] > 1.2 * far_ms[0])

# %% [markdown]
# *Emulated steps; dashed, as your function predicts. On the near wire each doubling pays. On the far wire two ranks are
# fastest, and eight are slower than one device. Above the lines lies the processes' own time.*
#
# <details><summary>On the far wire, which number of ranks is fastest with twice the batch?</summary>
#
# Four, by the formula: `step_seconds(0.96, 133_120, n, 0.04, 1e7)` is smallest for n = 4.
#
# </details>
#
# <details><summary>On the reference cluster, do 64 GPUs pay for 7 billion parameters, 4 million tokens a step?</summary>
#
# Training takes about 6 operations a parameter and token, so each GPU computes 6 · 7e9 · 4e6 / 64 / 400e12 = 6.6 s.
#
# The gradients in bfloat16 have 14 GB. One ring through all 64 GPUs would leave every host over one card, at 50 GB/s. So
# NCCL makes eight rings. Each leaves the hosts over another card and carries an eighth of the gradients, which takes
# 2 · 63/64 · (14 / 8) / 50 = 0.07 s.
#
# It pays, and it still does with a single sequence of 4096 tokens a GPU: computing takes 0.43 s, and 64 GPUs are 55 times
# as fast as one. With one card a host, sending takes 0.55 s, and they are 28 times as fast. But no H100 holds 112 GB, so
# lab 2 cuts them up.
#
# </details>
#
# *Takeaway: with more ranks, computing shrinks, a rank's bytes at most double from two ranks on, and a ring's latency
# grows. So there is a best number of ranks, and it grows with the batch and with faster links.*

# %% tags=["claim"]
claim("133,120 bytes of gradients", 4 * 8 * (64 * 64 + 64) == 133_120)
computing_s, sending_s = 6 * 7e9 * 4e6 / 400e12 / 64, 2 * 63 / 64 * 14e9 / 400e9
claim("6.6 s and 0.07 s", (round(computing_s, 1), round(sending_s, 2)) == (6.6, 0.07))
sequence_s = 6 * 7e9 * 4096 / 400e12
claim("0.43 s for one sequence", round(sequence_s, 2) == 0.43)
times_as_fast = [round(64 * sequence_s / (sequence_s + cards * sending_s)) for cards in (1, 8)]
claim("0.55 s over one card; 55 and 28 times as fast", (round(8 * sending_s, 2), times_as_fast) == (0.55, [55, 28]))
twice_s = {n: 0.96 / n + 2 * (n - 1) * (0.04 + 133_120 / n / 1e7) for n in (1, 2, 4, 8)}
claim("twice the batch: four ranks", min(twice_s, key=twice_s.get) == 4)
claim("112 GB; 21 years, or 7.5 days", (16 * 7, round(184_320 / 24 / 365), 184_320 / 1024 / 24) == (112, 21, 7.5))

# %% [markdown]
# ## 11. Take away ({minutes} minutes)
#
# 1. All ranks run the same program, and make the same collectives in the same order. Most hangs are ranks in different
#    places: one waits for a call that another never makes.
# 2. An all-reduce is a reduce-scatter and an all-gather. In a ring each rank sends 2 (n − 1)/n of the tensor.
# 3. A collective costs α + bytes · β, so make few large ones. More ranks pay as long as they save more computing than
#    they add sending.
#
# | if | then |
# |---|---|
# | a run prints nothing | look where each rank is |
# | each rank has little to compute | enlarge the batch |
# | a test of distributed code passes | give the ranks different data, break the code once, and watch the test fail |
#
# **Ask yourself**
#
# <details><summary>1. A run prints nothing for ten minutes. What do you do first?</summary>
#
# Look where each rank is. If all wait in the same collective, suspect the network, or different shapes or different
# earlier calls on some rank. If one rank is elsewhere, look there first.
#
# </details>
#
# <details><summary>2. Only rank 0 calls <code>all_reduce</code>, inside <code>if rank == 0</code>. What happens?</summary>
#
# It hangs, or fails once the others exit. A collective needs every rank of its group.
#
# </details>
#
# <details><summary>3. Eight ranks all-gather a tensor of 80 MB. How much does each hand to the call, how much goes on the wire?</summary>
#
# Each rank hands in 10 MB, and 70 MB leave it.
#
# </details>
#
# <details><summary>4. You double the number of ranks and keep the batch of each. What happens to the bytes of a rank?</summary>
#
# The bytes handed to the call stay the same. On the wire, 2 (n − 1)/n stays below 2: it grows by a half from 2
# to 4 ranks, and hardly from 64 on. Latency grows, because a ring has 2 (n − 1) steps.
#
# </details>
#
# <details><summary>5. Why do ranks stay equal, though nobody compares their weights?</summary>
#
# They began equal, by the broadcast, and each step applies the same mean gradient with the same arithmetic. If all of
# them skip the same all-reduce once, nothing hangs, and they differ from then on in silence.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009: the ring.
#   <https://doi.org/10.1016/j.jpdc.2008.09.002>
# - Hockney, *The communication challenge for MPP*, 1994: alpha and beta.
#   <https://doi.org/10.1016/S0167-8191(06)80021-9>
# - Li and others, *PyTorch Distributed: experiences on accelerating data parallel training*, 2020.
#   <https://arxiv.org/abs/2006.15704>
# - Touvron and others, *Llama 2*, 2023: the numbers of section 1. <https://arxiv.org/abs/2307.09288>
# - PyTorch: `torch.distributed` <https://docs.pytorch.org/docs/stable/distributed.html> and torchrun
#   <https://docs.pytorch.org/docs/stable/elastic/run.html>
# - NVIDIA's data sheets: H100 <https://www.nvidia.com/en-us/data-center/h100/>, DGX H100
#   <https://www.nvidia.com/en-us/data-center/dgx-h100/>
# - In labkit: `launch/all_reduce.py`, a whole rank program; `labkit/theory/collectives.py`, the formulas of this lab;
#   `labkit/session/traffic.py`, how bytes are counted.
#
# </details>
#
# **Next**: lab 1 cuts images over ranks, lab 2 parameters.
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("collectives")
