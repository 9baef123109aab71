# %% [markdown]
# # Lab 4. DDP and the compiler: buckets, waits, and what hides
#
# In data-parallel training every rank holds the whole model, and computes gradients from samples of its own. Before the
# optimizer steps, each gradient is replaced by its mean over the ranks. PyTorch's wrapper for this is
# `DistributedDataParallel` (DDP). This lab takes it apart.
#
# After this lab you can
#
# - use DDP's options and `no_sync` in a script of your own (and, in an optional section, communication hooks);
# - write a small DDP that sends gradients while the backward pass runs, and race it against PyTorch's;
# - predict from two measured numbers what the size of a bucket does to a step, and choose it;
# - say what `torch.compile` does with a DDP model (and, in an optional section, read when its program sends and waits).
#
# You need Lab 0's words: rank, process group, all-reduce, bytes handed to the call. You need no GPU. The sections
# marked **core** take about 95 minutes. The others are optional to read; run their cells all the same, since later ones
# use what they give. Section 12 needs a C++ compiler, and the table below says whether there is one. Exercises have
# dots for their difficulty: •, •• or •••. Where a cell says `commit`, put down your own numbers before you launch.
# Leave None where you have none.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import statistics
import time

import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import doctor, inductor, plots, widgets
from labkit.checks import ddp as checks
from labkit.checks.claims import claim, commit
from labkit.checks.fsdp import replace_source_line
from labkit.config import require
from labkit.parallel.buckets import assign_buckets
from labkit.parallel.small_ddp import small_ddp as labkits_ddp
from labkit.plots.collectives import all_reduce_rounds
from labkit.plots.ddp import pass_seconds
from labkit.theory import ddp as theory
from labkit.theory.collectives import AlphaBeta

doctor.show()

# %% [markdown]
# The parameters of this notebook. They are those of its *wide* network, a row of four linear layers with biases. There
# is a *deep* one, too: 100 linear layers of 64 × 64. You may change them; the next cell refuses what cannot work. The
# text speaks of these; cells say what yours change.

# %% tags=["parameters"] small={"DIM": 512, "BUCKET_MB": 1.5, "STEPS": 1} points=[[2,512,1.01,1],[3,700,3.0,5],[4,1500,17.0,10]]
RANKS: int = 2  # ranks that share the samples
DIM: int = 1000  # width of the wide network's layers
BUCKET_MB: float = 5.0  # size at which a bucket of the wide network is sent, in MiB
STEPS: int = 20  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one has nobody to average with, and each compiles for itself")
require("DIM", DIM, at_least=512, because="a weight has to fill the compiler's first bucket of 1 MiB")
layer_mb, bias_mb = 4 * DIM * (DIM + 1) / 2**20, 4 * DIM / 2**20
fills = f"two layers, of {layer_mb:.2f} MiB each with this DIM, fill a bucket, and one does not"
require("BUCKET_MB", BUCKET_MB, float, above=layer_mb + bias_mb, at_most=2 * layer_mb, because=fills)
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

WIDE = {"nproc": RANKS, "dim": DIM, "bucket_mb": BUCKET_MB, "steps": STEPS}
DEEP = {"nproc": RANKS, "dim": 64, "layers": 100, "batch": 8, "steps": STEPS}
MIB = 2**20

# %% [markdown]
# ## 1. Why: a network has many small gradients
#
# **core, 5 minutes**
#
# Each gradient needs an all-reduce. One for each gradient? Take ResNet-50, a network for images. It has 161 parameters,
# and so 161 gradients. 106 of them belong to batch normalisation, two for each of its 53 layers. These have 256 bytes
# to 8 KB each.

# %%
normalisation, convolutions, classifier = 53_120, 23_454_912, 2_049_000  # numbers in ResNet-50
numbers = normalisation + convolutions + classifier
print(f"{106 / 161:.0%} of ResNet-50's gradients hold {normalisation / numbers:.1%} of its {4 * numbers / 1e6:.0f} MB")

# %% [markdown]
# A message costs something before its first byte. If that is 0.1 ms, 161 messages cost 16 ms a step, most of it for
# next to no bytes.
#
# One all-reduce for everything? It has to wait for the last gradient. The backward pass goes from the last layer to the
# first, so the last layer's gradients are ready long before. Meanwhile the wire stands idle.
#
# Buckets are the way between. Gradients that are ready at about the same time travel together:
#
# ```
#                          time ->
# backward pass            [ layer 4 ][ layer 3 ][ layer 2 ][ layer 1 ]
# a message for each                  [4]        [3]        [2]        [1]        each pays its latency
# one message for all                                                  [4  3  2  1]   nothing hides
# buckets of two layers                          [4  3]                [2  1]
# ```
#
# ## 2. The code you would write
#
# **core, 8 minutes**
#
# This is all that your own script needs. DDP first sends rank 0's parameters to all. From then on each backward pass
# leaves in every `grad` the mean over the ranks. Four *micro-batches* make one step here, as one does if a large batch
# does not fit into memory. Section 9 explains their three lines.

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(dist.get_rank())  # samples of its own; weights, too, but DDP replaces them by rank 0's
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))  # on GPUs: see below
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
*first, last = torch.randn(4, 32, 64).unbind()  # four micro-batches

for _ in range(5):
    optimizer.zero_grad()
    for inputs in first:
        with model.no_sync():  # sends nothing
            ((model(inputs) - inputs).square().mean() / 4).backward()
    ((model(last) - last).square().mean() / 4).backward()  # sends the sums of all four
    optimizer.step()

mine, largest = net[0].weight.detach(), net[0].weight.detach().clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
print(f"all ranks end with the same weights: {torch.equal(mine, largest)}")
del model  # before its process group
dist.destroy_process_group()

# %% [markdown]
# Under `torchrun --nproc-per-node 2` the same lines run as a file of their own. (On GPUs each rank first takes its own,
# as in lab 0: `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`. Then `.to("cuda")` for the network and the
# samples.) What you can say to DDP:
#
# | | what it does | use it |
# |---|---|---|
# | `bucket_cap_mb=…` | a bucket is sent once it holds so many MiB; left out, 25, and 1 for the first one | sections 4, 6, 13 |
# | `gradient_as_bucket_view=True` | after the backward pass gradients lie inside the buckets: no copy back, and no second set of gradients | nearly always |
# | `find_unused_parameters=True` | looks in each forward pass for parameters that get no gradient | only if there are any; see below |
# | `model.no_sync()` | backward passes in here add up gradients and send nothing | micro-batches, section 9 |
# | `model.register_comm_hook(state, hook)` | your function sends the buckets | fewer bytes, section 10 |
#
# What if a parameter gets no gradient? Its bucket never fills, and the all-reduce is never asked for. DDP notices in
# the next forward pass; by then one step may have been taken with gradients that nobody averaged. The next cell fails
# on purpose, and shows in red how that looks.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails
dist.init_process_group()


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


model = torch.nn.parallel.DistributedDataParallel(Forgetful())  # with find_unused_parameters=True it would work
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()

# %% [markdown]
# The better repair is to freeze what the model does not use, or to take it out. `find_unused_parameters` walks through
# the graph in every step, and it keeps DDP from putting its buckets into a better order (section 8).
#
# ### Commit, run, compare
#
# Now the measured run, on the wide network: four layers of `DIM × DIM` weights and `DIM` biases, 4 bytes a number.
# `launch/ddp_compile.py` wraps it with `DistributedDataParallel(…, bucket_cap_mb=BUCKET_MB)`. How many bytes does a
# rank **hand to all-reduces** in one step?

# %% tags=["commit"]
mine = commit(all_reduce_bytes=None)
### BEGIN SOLUTION
mine = commit(all_reduce_bytes=4 * 4 * (DIM * DIM + DIM))
### END SOLUTION


# %%
def predict(way: str, bucket_mb: float = BUCKET_MB, **more: bool) -> dict[str, int]:
    """What theory says of one step of the wide network: all-reduces, and the bytes that a rank hands to them."""
    buckets = theory.chain_buckets(DIM, bucket_mb, way=way, **more)
    return {"all_reduce_count": len(buckets), "all_reduce_bytes": sum(sum(each.values()) for each in buckets)}


eager = labkit.run("ddp_compile", mode="ddp", timeline=True, **WIDE)
plots.comparison_table(eager, {"all_reduce_bytes": predict("eager")["all_reduce_bytes"]}, yours=mine)

# %% [markdown]
# *All gradients, once. With 2 ranks as many bytes leave a rank: on the wire it is 2 (n − 1) / n of what is handed over.*

# %% tags=["claim"]
handed = eager.value("all_reduce_bytes")
claim("all gradients, once", handed == 16 * (DIM * DIM + DIM))
claim("with 2 ranks as many bytes leave a rank", RANKS != 2 or eager.value("all_reduce_wire_bytes") == handed)

# %% [markdown]
# ## 3. What a message costs
#
# **core, 10 minutes**
#
# A message, here one all-reduce, has two costs. Each message takes a **latency**, called alpha. And each byte takes its
# time, called beta. So m messages of S bytes in all take
#
# `m * alpha + S * beta`
#
# Lab 0 waited for each message before it sent the next. DDP does not: it asks for many and waits at the end. So the
# alpha that counts here is that of messages *asked for at once*. It may differ from lab 0's.
#
# ### Exercise 1: find alpha and beta (••, 8 minutes)
#
# The same bytes were sent in 1, 2, 20 and 200 messages, asked for at once. `rounds` holds, for each number of messages,
# the seconds of several rounds. `total_bytes` is what a round sends in all. Return `(alpha, beta)`, in seconds, and
# seconds a byte. Take the **median** round: we want to predict a typical step, not a lucky one.
#
# <details><summary>Hint 1</summary>
#
# `statistics.median` of each list first. Then the fewest and the most messages will do.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The bytes are the same in both. So what do the additional messages cost? Beta is what is left of the shortest time,
# for each byte.
#
# </details>


# %%
def fitted(rounds: dict[int, list[float]], total_bytes: int) -> tuple[float, float]:
    ### BEGIN SOLUTION
    typical = {count: statistics.median(times) for count, times in rounds.items()}
    few, many = min(typical), max(typical)
    alpha = (typical[many] - typical[few]) / (many - few)
    return alpha, (typical[few] - few * alpha) / total_bytes
    ### END SOLUTION


# %%
checks.fitted(fitted)

# %% [markdown]
# Now real messages. The bytes are those of the deep network's gradients: 100 layers of 64 × 64 weights and 64 biases,
# 1,664,000 bytes. It has 200 gradients, so 200 messages are what "a message for each gradient" costs. Commit: how long
# do they take, in ms? A guess is welcome.

# %% tags=["commit"]
mine = commit(pieces_200_ms=None)
### BEGIN SOLUTION
mine = commit(pieces_200_ms=200 * 0.15 + 1)  # 0.15 ms a message
### END SOLUTION

# %% tags=["nbval-ignore-output"]
total = sum(size for _, size in theory.chain_gradients(64, layers=100))
messages = labkit.run("all_reduce", nproc=RANKS, total_bytes=total, pieces=(1, 2, 20, 200), at_once=True)
rounds = all_reduce_rounds(messages, "pieces").groupby(level=0).agg(list).to_dict()
found = fitted(rounds, total)
network = AlphaBeta(*found) if found else theory.fit_from_message_counts(rounds, total)
print(f"alpha {network.alpha_s * 1e6:.0f} µs a message, beta {network.beta_s_per_byte * 1e12:.0f} µs a MB")
plots.comparison_table(
    messages, {"pieces_200_ms": network.seconds(total, messages=200) * 1e3}, yours=mine, tolerance=0.5
)

# %% tags=["nbval-ignore-output"]
_ = plots.all_reduce_time_by_count(messages, network=network, typical=True)

# %% [markdown]
# *The same bytes, in 1 to 200 messages. 200 messages take more than three times as long as one. The dashed lines are
# your alpha and beta. They are fitted at both ends, so only what they say of 2 and 20 is a prediction. (The bars are
# median rounds, the table has the mean, so the two differ a little. Few messages asked for at once can overlap. So alpha
# here is that of long queues, and may say too much of 20.)*

# %% tags=["claim"]
pieces = {count: statistics.median(times) for count, times in rounds.items()}
claim("200 messages take more than three times as long as one", pieces[200] > 3 * pieces[1])

# %% [markdown]
# ## 4. Buckets, in the order of readiness
#
# **core, 10 minutes, and 8 for an optional exercise**
#
# DDP has a *reducer*, written in C++. It hangs a hook on every parameter: a function that autograd calls when this
# parameter's gradient is complete. Which gradients share a bucket is fixed before the backward pass: a bucket closes
# once its gradients have `bucket_cap_mb` MiB, or more. When all gradients of a bucket are there, and all earlier
# buckets have left, the reducer asks for its all-reduce and returns at once: the backward pass goes on. Gradients that
# are left over form the last bucket, even if it is not full. At the end of the pass the reducer waits for all buckets.
#
# Three details:
#
# - Before the first step the reducer does not know in which order gradients become ready. So it sends everything in one
#   bucket, notes the order, and **rebuilds** its buckets for all later steps.
# - If you leave `bucket_cap_mb` out, the first bucket closes at 1 MiB already, so that the first message leaves early;
#   the others close at 25. Any number that you give, 25 as well, holds for all buckets.
# - A bucket may become larger than its size by almost one gradient: it closes after the gradient that fills it.
#
# **Why is averaging by bucket the same as by tensor?** A bucket is an envelope. The all-reduce adds numbers place by
# place, and never one gradient to another. So each number is the mean of the same numbers as before. Only rounding may
# differ: with three ranks or more, the order in which a sum is taken can depend on the place in the envelope.
#
# ### Exercise 2: which gradients travel together? (••, 8 minutes)
#
# `sizes` are the bytes of the gradients in the order of readiness. Return the buckets, each a list of positions in
# `sizes`. The first closes once it holds `first_mb` MiB or more, the others at `bucket_mb`. A MiB has 2**20 bytes.
#
# <details><summary>Hint 1</summary>
#
# Go through `enumerate(sizes)` with two things in hand: what the open bucket holds, and its limit.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Before you put a gradient in: is there no bucket yet, or is the last one full? Then open one. The limit is `first_mb`
# if it is the first.
#
# </details>


# %%
def bucket_plan(sizes: list[int], bucket_mb: float, first_mb: float) -> list[list[int]]:
    ### BEGIN SOLUTION
    buckets, held, limit = [], 0, first_mb * 2**20
    for position, size in enumerate(sizes):
        if not buckets or held >= limit:
            limit = (bucket_mb if buckets else first_mb) * 2**20
            buckets.append([])
            held = 0
        buckets[-1].append(position)
        held += size
    return buckets
    ### END SOLUTION


# %%
verdict = checks.bucket_plan(bucket_plan)
verdict

# %%
plan = bucket_plan if verdict.ok else theory.bucket_plan  # while exercise 2 is open, labkit's stands in for yours

# %% [markdown]
# The wide network's gradients, in the order in which autograd has them ready: of each layer, from the last one on, the
# bias and then the weight. Commit: how many all-reduces does the run of section 2 make in a step?

# %% tags=["commit"]
mine = commit(all_reduce_count=None)
### BEGIN SOLUTION
gradients = theory.chain_gradients(DIM)
mine = commit(all_reduce_count=lambda: len(bucket_plan([size for _, size in gradients], BUCKET_MB, BUCKET_MB)))
### END SOLUTION

# %%
plots.comparison_table(eager, predict("eager"), yours=mine)

# %%
sent = eager.frame.query("kind == 'bucket' and rank == 0")
for index, names in sent.groupby("index")["name"]:
    print(f"bucket {index}: {', '.join(names)}")

# %% [markdown]
# *Eight gradients travel in two buckets. A layer has less than BUCKET_MB, and two fill a bucket.*

# %% tags=["claim"]
claim("eight gradients travel in two buckets", sent["index"].nunique() == 2 and len(sent) == 8)

# %% [markdown]
# ### Exercise 3: a bound that holds (optional, ••, 8 minutes)
#
# A bucket may be larger than `bucket_cap_mb`. Where memory is tight, one may want a real bound. Cut the gradients into
# buckets of at most `limit` bytes. Keep their order, and use as few buckets as you can. Only a gradient that is itself
# larger may break the limit, alone in its bucket.
#
# <details><summary>Hint</summary>
#
# Ask before you put the gradient in, with its size: `held + size > limit`.
#
# </details>


# %%
def bounded_buckets(sizes: list[int], limit: int) -> list[list[int]]:
    ### BEGIN SOLUTION
    buckets, held = [], 0
    for position, size in enumerate(sizes):
        if not buckets or held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(position)
        held += size
    return buckets
    ### END SOLUTION


# %%
bounded = checks.bounded_buckets(bounded_buckets)
bounded

# %% [markdown]
# `mode="yours"` trains with a DDP in Python, whose rule for buckets can be replaced. With your rule no bucket holds
# more than 5 MiB, so there are more of them. Until exercise 3 passes, the rule is DDP's.

# %%
rule = {"bounded_buckets": bounded_buckets if bounded.ok else assign_buckets}
own_rule = labkit.run("ddp_compile", mode="yours", use=rule, **WIDE)
largest = own_rule.frame.query("kind == 'bucket' and rank == 0").groupby("index")["bytes"].sum().max()
print(f"{own_rule.value('all_reduce_count'):.0f} buckets, the largest of {largest:,} bytes")

# %% [markdown]
# ## 5. Build it: a small DDP
#
# **core, 25 minutes**
#
# You write what DDP's reducer does. It takes about 20 lines. These are the pieces.
#
# - `parameter.register_post_accumulate_grad_hook(f)`: autograd calls `f(parameter)` when `parameter.grad` is complete.
# - `handle = dist.all_reduce(row, async_op=True)` asks for the sum and returns at once. Until `handle.wait()` has
#   returned, leave `row` alone: it is *in flight*.
# - `torch.cat` makes one row of many tensors, `row.split([…])` cuts it up again. The pieces are views of the row.
# - `assign_buckets(sizes, limit)` is exercise 2's rule with one limit in bytes: a list of buckets, each a list of
#   positions.
#
# ### Exercise 4: the reducer (•••, 20 minutes)
#
# Complete `small_ddp(model, bucket_bytes)`. Afterwards every backward pass shall leave in each `parameter.grad` the
# mean over all ranks.
#
# - Buckets: go from the last parameter to the first. A bucket closes once it holds `bucket_bytes`, or more.
# - When the last gradient of a bucket is there, ask for its all-reduce, and do not wait.
# - When the last gradient of all is there, wait for all buckets, and put the means in place.
# - Then be ready for the next backward pass.
#
# All ranks have the same model, and every parameter gets a gradient in each backward pass. The check runs two passes on
# two real ranks, then on three. It looks at gradients, at what was sent, and at *when* you asked and waited.
#
# <details><summary>Hint 1: what to remember</summary>
#
# A list of buckets, each a list of parameters. For each bucket, how many gradients are still missing. And a list of
# what is on its way: bucket, row, handle.
#
# </details>
# <details><summary>Hint 2: the functions inside</summary>
#
# `arrived(index)` is called for each gradient, with the index of its bucket: count down; at 0 make the row, ask, note
# it. If no bucket misses anything, `finish()`: wait, divide, cut, put in place; then clear the list and set the counts
# anew.
#
# </details>
# <details><summary>Hint 3: the hooks</summary>
#
# In a loop over `enumerate(buckets)`:
# `parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))`. The default value keeps each
# hook's own index. And `parameter.grad = piece.view_as(parameter)` copies nothing.
#
# </details>


# %%
def small_ddp(model: nn.Module, bucket_bytes: int) -> None:
    ### BEGIN SOLUTION
    parameters = list(model.parameters())[::-1]
    places = assign_buckets([parameter.nbytes for parameter in parameters], bucket_bytes)
    buckets = [[parameters[place] for place in bucket] for bucket in places]
    missing = [len(bucket) for bucket in buckets]
    on_their_way = []

    def arrived(index: int) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            row = torch.cat([parameter.grad.flatten() for parameter in buckets[index]])
            on_their_way.append((buckets[index], row, dist.all_reduce(row, async_op=True)))
        if not any(missing):
            finish()

    def finish() -> None:
        for bucket, row, handle in on_their_way:
            handle.wait()
            row /= dist.get_world_size()
            for parameter, piece in zip(bucket, row.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = piece.view_as(parameter)
        on_their_way.clear()
        missing[:] = [len(bucket) for bucket in buckets]

    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))
    ### END SOLUTION


# %%
verdict = checks.small_ddp(small_ddp)
verdict

# %% [markdown]
# ### Use it
#
# Now your function trains the deep network, on real ranks. Until it passes, labkit's own stands in for it:
# `labkit/parallel/small_ddp.py`, which you may read afterwards. `labkit.check` gives the same parameters and samples
# to one device. It compares the output and all 200 gradients of two steps, and the 200 parameters after them: 602
# tensors.

# %%
working = small_ddp if verdict.ok else labkits_ddp
PARITY = {"nproc": RANKS, "dim": 64, "layers": 100, "bucket_mb": 0.1, "mode": "yours"}
right = labkit.check("ddp_compile", use={"data_parallel": working}, **PARITY)
print(f"{right.value('compared'):.0f} tensors, equal to 1 part in a million: {right.value('max_rel_error') <= 1e-6}")

# %% tags=["claim"]
claim("equal to 1 part in a million", right.value("max_rel_error") <= 1e-6)

# %% [markdown]
# Is it fast? A race: each step is taken twice, once with your function and once with `DistributedDataParallel`, in
# turn, in buckets of 1 MiB, with 32 samples a rank. Whatever disturbs one then disturbs the other. Commit: how many
# times as long as DDP's does your step take, in the median?

# %% tags=["commit"]
mine = commit(times_ddp=None)
### BEGIN SOLUTION
mine = commit(times_ddp=1.1)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
racing = DEEP | {"batch": 32, "bucket_mb": 1.0, "steps": 2 * STEPS}
race = labkit.run("ddp_compile", mode="yours", race=True, use={"data_parallel": working}, **racing)
spans = race.frame[race.frame["name"].isin(["yours", "ddp"])].groupby(["step", "name"])["dur_us"].max()
steps_ms = spans.unstack() / 1e3
times_ddp = (steps_ms["yours"] / steps_ms["ddp"]).median()
guess = "–" if mine["times_ddp"] is None else f"{mine['times_ddp']:.2f}"
print(f"yours takes {times_ddp:.2f} times as long as DDP's; you said {guess}")
steps_ms.agg(["min", "median", "max"]).round(1)

# %% [markdown]
# *A step in ms. With buckets, yours takes at most 1.15 times as long as DDP's, which is written in C++.* Two hundred
# calls of a Python hook take little beside the messages that they save.

# %% tags=["claim"]
claim("yours takes at most 1.15 times as long as DDP's", times_ddp <= 1.15, where=STEPS >= 5)

# %% [markdown]
# What does DDP do that yours does not? It sends rank 0's parameters, and buffers such as a batch normalisation's, to
# all ranks. It learns the order of readiness. It sends buckets in a fixed order. Yours sends what is complete: were
# gradients ready in another order on another rank, two different buckets would meet. It notices parameters without a
# gradient, where yours would never finish: nothing is averaged, and it says nothing. It has `no_sync`. And it works on
# several streams of a GPU.
#
# ## 6. Buckets pay
#
# **core, 8 minutes**
#
# Now predict the forward and backward pass of the deep network from your own pieces. `plan` says into how many messages
# a size of bucket cuts its gradients; alpha and beta say what these cost. What do the passes take without any messages?
# Run them with a function that averages nothing. (It trains wrongly, and takes the time of the arithmetic.)


# %%
def nothing(model: nn.Module, bucket_bytes: int) -> None:
    """Each rank keeps its own gradients."""


alone = labkit.run("ddp_compile", mode="yours", use={"data_parallel": nothing}, **DEEP)
gradients = [size for _, size in theory.chain_gradients(64, layers=100)]
sizes_mb = {"each gradient": 0.0001, "0.02 MiB": 0.02, "0.1 MiB": 0.1, "1 MiB": 1.0, "100 MiB": 100.0}
messages_sent = {label: len(plan(gradients, size, size)) for label, size in sizes_mb.items()}
messages_sent

# %% [markdown]
# The prediction adds: arithmetic, plus messages × alpha, plus bytes × beta. Nothing hides in it. Why not, if the
# backward pass goes on while a bucket travels? **Hiding is not free.** On this machine each rank has one core. Gloo's
# threads, which add and send, need the same core as the arithmetic. On a GPU the network card and a few of the GPU's
# many processors do that work, so there it hides. Section 8 shows this machine's time line.
#
# Commit: how many times as long do both passes take with a message for each gradient as with buckets of 1 MiB?

# %% tags=["commit"]
mine = commit(times_as_long=None)
### BEGIN SOLUTION
mine = commit(times_as_long=6)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
arithmetic_s = pass_seconds(alone).median()
predicted_s = {label: arithmetic_s + network.seconds(total, messages=n) for label, n in messages_sent.items()}
by_size = {
    label: labkit.run("ddp_compile", mode="ddp", **DEEP | {"bucket_mb": size}) for label, size in sizes_mb.items()
}
measured_s = {label: pass_seconds(result).median() for label, result in by_size.items()}
times_as_long = measured_s["each gradient"] / measured_s["1 MiB"]
guess = "–" if mine["times_as_long"] is None else f"{mine['times_as_long']:.1f}"
print(f"arithmetic alone: {arithmetic_s * 1e3:.1f} ms")
print(f"a message for each gradient takes {times_as_long:.1f} times as long as 1 MiB buckets; you said {guess}")
_ = plots.pass_time_by_bucket_size(by_size, predicted_s)

# %% [markdown]
# *Forward and backward pass of the deep network by the size of its buckets. A dot is one of 20 steps; the dashed line
# was predicted from your alpha and beta. A message for each gradient takes at least three times as long as buckets of 1
# MiB. From 1 MiB on little is left to gain.*
#
# On a quiet machine the predictions are within a factor of 1.5 of the bars, and mostly too low. What they leave out is
# DDP's own work: it copies 200 gradients into its buckets and back (`gradient_as_bucket_view` would save the way back;
# yours of exercise 4 has only the way in). On a busy machine the left bars can be several times as high as predicted.
# Alpha was measured on ranks that had nothing else to do, and a rank that shares its core with others wakes up late for
# each message. The dots show such steps.

# %% tags=["claim"]
claim("a message for each gradient takes at least three times as long as 1 MiB buckets", times_as_long >= 3)

# %% [markdown]
# ## 7. Break it
#
# **core, 5 minutes**
#
# Take one line out of the working function: `row /= dist.get_world_size()`. (If your line looks different, write
# yours.) `without` gives the function without that line. Now gradients are sums.

# %%
LINE = "row /= dist.get_world_size()"
try:
    broken = replace_source_line(working, LINE)
except ValueError as problem:
    print(f"{problem}. Until then labkit's own is broken instead.")
    broken = replace_source_line(labkits_ddp, "row /= dist.get_world_size()")

# %% [markdown]
# ### A test that cannot fail
#
# "After a backward pass all ranks must hold the same gradients." It sounds right. The cell makes a model on each rank,
# with samples of its own, and asks whether the gradients are the same everywhere. Before you run it: does this test
# notice the missing line?

# %%
# %%torchrun -n 2 --use broken
dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
broken(model, 2**20)
model(torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
largest = model.weight.grad.clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
f"the same gradients on all ranks: {torch.equal(largest, model.weight.grad)}"

# %% [markdown]
# The sum is the same everywhere, too. The test sees a missing all-reduce, and it cannot see a wrong factor, or the same
# wrong bucket on all ranks. Ranks must be held against something that is none of them: one device with all samples.

# %%
wrong = labkit.check("ddp_compile", use={"data_parallel": broken}, **PARITY)
print(wrong.verdict_text)

# %% tags=["claim"]
claim("parity finds the missing division", not wrong.ok)

# %% [markdown]
# Try another mutation: leave out the wait. Then it depends. If the sums happen to have arrived before somebody looks,
# all is well, and a test that looks late passes. In the next cell rank 1 is late on purpose, and rank 0 looks twice.

# %%
# %%torchrun -n 2
dist.init_process_group()
gradient = torch.ones(4)
if dist.get_rank() == 1:
    time.sleep(0.5)
handle = dist.all_reduce(gradient, async_op=True)
at_once = gradient.tolist()
time.sleep(1)  # a test that does other things first
later = gradient.tolist()
handle.wait()
print(f"read at once {at_once}, read later {later}") if dist.get_rank() == 0 else None

# %% [markdown]
# Nobody waited before either look. The first found this rank's own numbers. No error was raised.
#
# ## 8. Does it hide?
#
# **optional, 20 minutes**
#
# Here is one step of the run in section 2, recorded by `torch.profiler`: the wide network with DDP's reducer. What is
# **exposed** is communication during which the rank computes nothing. The profiler slows a step down: compare time
# lines with time lines, and take durations from timed steps.

# %% tags=["nbval-ignore-output"]
_ = plots.timeline(eager)

# %% [markdown]
# *Two rows for each rank. Bucket 0 is asked for when fc4 and fc3 are done, about halfway. On at least one rank it is on
# its way before fc1 is done. Bucket 1 leaves last, when no layer is left to hide it.*
#
# A bucket's bar may begin later than it was asked for: gloo's thread waits until the arithmetic leaves it the core.
# That is what "hiding is not free" looks like.
#
# **In some runs there is a gap in fc3's bar, or behind it.** fc3's last gradient fills bucket 0. In that moment the
# rank asks for the all-reduce, and asking is no arithmetic: the bar has a gap. What follows the gap is what fc3 has
# left to do. The bars without a name at the end are copies: DDP takes the means out of each bucket that has arrived,
# and puts them into the gradients. `gradient_as_bucket_view=True` saves these. (Where there is room for a name, they
# bear fc1's: it was the last layer at work.)
#
# A bar of communication lasts until the slower rank has arrived. So it says as much about the other rank as about the
# bytes. Two buckets may travel at once, drawn one above the other: gloo has two threads that send. So two buckets of
# equal size can differ by a factor of two.

# %% tags=["claim"]
bars = eager.frame.query("kind == 'bar' and phase in ('backward', 'all_reduce')").sort_values("start_us")
starts = bars.groupby(["name", "rank"])["start_us"].first()
lengths = bars.groupby(["name", "rank"])["dur_us"].first()
begin = {name: starts[name] if name in starts else 0 * starts["fc1"] for name in ("bucket 0", "bucket 1", "fc1")}
claim("bucket 0 is on its way before fc1 is done", (begin["bucket 0"] < begin["fc1"] + lengths["fc1"]).any())
claim("bucket 1 leaves last", (begin["bucket 1"] > begin["fc1"]).all())

# %% [markdown]
# And with one bucket for all, `bucket_cap_mb=100`?

# %% tags=["nbval-ignore-output"]
whole = labkit.run("ddp_compile", mode="ddp", timeline=True, **WIDE | {"bucket_mb": 100.0, "steps": 2})
_ = plots.timeline(whole, ranks=[0])

# %% [markdown]
# *One rank. The only bucket is asked for when fc1's gradients are there, and nearly all of it is exposed.*

# %% tags=["claim"]
bars = whole.frame.query("kind == 'bar' and rank == 0 and phase in ('backward', 'all_reduce')")
starts = bars.groupby("name")["start_us"].min().to_dict()
claim("the only bucket is asked for last", starts.get("bucket 0", 0) > starts.get("fc1", 0))
exposed, sent_ms = whole.value("exposed_communication"), whole.value("communication")
claim("nearly all of it is exposed", exposed > 0.8 * sent_ms)

# %% [markdown]
# Is hiding free? Three numbers of the wide network: forward and backward pass without any messages, the messages by
# themselves, and both together. If hiding were free, only the bucket that leaves last would come on top of the arithmetic:
# half of the messages. If nothing were gained, both would be the sum.

# %% tags=["nbval-ignore-output"]
silent = labkit.run("ddp_compile", mode="yours", use={"data_parallel": nothing}, **WIDE)
alone_ms, both_ms = (pass_seconds(run).median() * 1e3 for run in (silent, eager))
sizes = [size for _, size in theory.chain_gradients(DIM)]
traffic = labkit.run(
    "all_reduce", nproc=RANKS, total_bytes=sum(sizes), pieces=(1, 2), at_once=True, message_bytes=(1024, 4096)
)
sent_ms = all_reduce_rounds(traffic, "pieces")[2].median() * 1e3
print(f"arithmetic {alone_ms:.1f} ms, messages {sent_ms:.1f} ms, both {both_ms:.1f} ms")

# %% [markdown]
# On ranks with one core each, "both" comes out near the sum, or above it: copying and adding 16 MB takes the core, and
# evicts what the arithmetic had in its cache. So "hidden" in a time line means that a layer's bar was open at that
# time. It does not mean that nothing was lost: on a shared core that bar gets longer.
#
# ### Exercise 5: the last to arrive (••, 8 minutes)
#
# Buckets leave **in their order**, whatever becomes ready first: all ranks must make the same calls in the same order,
# and so the order is fixed. Assume that one travels at a time. `ready` holds the moments at which the buckets are
# complete, `takes` how long each travels. Return the moment at which each has arrived.
#
# <details><summary>Hint</summary>
#
# A bucket starts when it is ready *and* the one before has arrived: the later of the two moments.
#
# </details>


# %%
def arrivals(ready: list[float], takes: list[float]) -> list[float]:
    ### BEGIN SOLUTION
    arrived = []
    for moment, length in zip(ready, takes, strict=True):
        start = max(moment, arrived[-1]) if arrived else moment
        arrived.append(start + length)
    return arrived
    ### END SOLUTION


# %%
verdict = checks.arrivals(arrivals)
verdict

# %% [markdown]
# Four buckets, each of which travels 3 ms. In a good order they are ready after 4, 8, 12 and 16 ms. Then the one that
# was to leave first is ready last. Commit to the end of the second case.

# %% tags=["commit"]
mine = commit(late_ends=lambda: arrivals([16, 4, 8, 12], [3, 3, 3, 3])[-1])

# %%
ends = {"in order": [4, 8, 12, 16], "the first one late": [16, 4, 8, 12]}
rows = {label: theory.arrivals(ready, [3] * 4) for label, ready in ends.items()}
guess = "–" if mine["late_ends"] is None else f"{mine['late_ends']:g}"
print(f"the late case ends at {rows['the first one late'][-1]:g} ms; you said {guess}. When each bucket has arrived:")
pandas.DataFrame.from_dict(rows, orient="index", columns=[f"bucket {index}" for index in range(4)])

# %% [markdown]
# *One late gradient held up three buckets that were ready. The step ends after 28 ms instead of 19.*

# %% tags=["claim"]
claim("28 ms instead of 19", [row[-1] for row in rows.values()] == [19, 28])

# %% [markdown]
# ### One late gradient, on real ranks
#
# DDP's first guess at the order is that of `model.parameters()`, backwards. In this model fc1 stands last and is used
# first, so the guess is wrong: its gradient comes last, and it is meant for bucket 0. By default that does no harm,
# since the first step sends everything in one bucket; with `find_unused_parameters` it does. By default from the
# second step on, and with the option from the first, each layer has a bucket of its own. The ranks note when a gradient
# is ready, and when a bucket leaves.

# %%
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()


class OutOfOrder(nn.Module):
    def __init__(self, extra):
        super().__init__()
        for name in [*extra, "fc2", "fc3", "fc4", "fc1"]:  # fc1 stands last
            setattr(self, name, nn.Linear(64, 64, bias=False))

    def forward(self, x):
        return self.fc4(self.fc3(self.fc2(self.fc1(x))))


def noted(*extra, **how):
    net, seen = OutOfOrder(extra), []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name.removesuffix(".weight")))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, **how)

    def leaves(state, bucket):
        seen.append(f"[bucket {bucket.index()} leaves]")
        handle = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return handle.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, leaves)
    for step in range(2):
        model(torch.ones(8, 64)).sum().backward()
        print(f"  step {step}: {' '.join(seen)}") if dist.get_rank() == 0 else None
        seen.clear()


print("by default:") if dist.get_rank() == 0 else None
noted()
print("with a layer that is not used, and find_unused_parameters:") if dist.get_rank() == 0 else None
noted("unused", find_unused_parameters=True)

# %% [markdown]
# *By default the first step sends everything in one bucket, at the end. Then DDP knows the order, and each bucket
# leaves as soon as its gradient is there. With* `find_unused_parameters=True` *there is no such first step: DDP makes
# buckets of the given size at once, in the order that it guesses, and never rebuilds them. Those of fc4, fc3 and fc2
# are ready and wait for bucket 0, which waits for fc1, in every step. (Bucket 4 is the unused layer's.)*
#
# So list the layers in the order in which they are used, above all if you need that option.

# %% [markdown]
# ## 9. Fewer messages: `no_sync`
#
# **core, 8 minutes, and 4 for an optional exercise**
#
# A large batch may not fit into memory. Then one takes several micro-batches, adds up their gradients, and steps once.
# The mean over the ranks is needed only once, at the end. In `with model.no_sync():` DDP sends nothing.
#
# Two things go wrong often. **The forward pass must be inside, too**: DDP arms its hooks in the forward pass. A
# backward pass alone in `no_sync` sends as ever. And **divide by the number of micro-batches**: backward passes *add*
# to `grad`, while the loss of the whole batch is a *mean*.
#
# ### Exercise 6: accumulate (••, 8 minutes)
#
# `model` is in DDP; its gradients are None. `batches` are the micro-batches of one step, pairs of inputs and targets,
# all of one size. Leave in each `grad` the gradient of the mean squared error over all samples of all ranks, with one
# all-reduce. It runs on two real ranks, then on three.
#
# <details><summary>Hint 1</summary>
#
# All micro-batches but the last one go into `no_sync`. The last one's backward pass sends the sums.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()`
#
# </details>


# %%
def accumulate(model: DistributedDataParallel, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    ### BEGIN SOLUTION
    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        (nn.functional.mse_loss(model(inputs), targets) / len(batches)).backward()

    with model.no_sync():
        for inputs, targets in batches[:-1]:
            backward(inputs, targets)
    backward(*batches[-1])
    ### END SOLUTION


# %%
checks.accumulate(accumulate)

# %% [markdown]
# ### Exercise 7: bytes of a step (optional, •, 4 minutes)
#
# How many bytes does a rank hand to all-reduces before one step of the optimizer? `no_sync` means that all
# micro-batches but the last are not sent. `bf16` means that gradients are rounded to bfloat16 before they are sent, 2
# bytes a number instead of 4 (section 10).


# %%
def handed_bytes(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:
    ### BEGIN SOLUTION
    return parameters * (2 if bf16 else 4) * (1 if no_sync else micro_batches)
    ### END SOLUTION


# %%
checks.handed_bytes(handed_bytes)

# %% [markdown]
# Case `cpu_no_sync` trains the wide network with two micro-batches a step. Commit before you run.

# %% tags=["commit"]
mine = commit(
    all_reduce_count=None,
    all_reduce_bytes=lambda: handed_bytes(4 * (DIM * DIM + DIM), micro_batches=2, no_sync=True, bf16=False),
)
### BEGIN SOLUTION
mine |= commit(all_reduce_count=2)
### END SOLUTION

# %%
no_sync = labkit.run("ddp_compile", mode="ddp", case="cpu_no_sync", **WIDE)
plots.comparison_table(no_sync, predict("eager"), yours=mine)

# %% [markdown]
# *Two backward passes, and the messages of one.*

# %% tags=["claim"]
claim("the messages of one", no_sync.value("all_reduce_count") == eager.value("all_reduce_count"))

# %% [markdown]
# ## 10. Fewer bytes: a communication hook
#
# **optional, 15 minutes**
#
# Gradients are noisy anyway, so they may be rounded for the journey. DDP takes a **communication hook**, a function
# that sends a bucket in its own way:
#
# - `bucket.buffer()` is the row of the bucket's gradients, `bucket.index()` its number.
# - The hook asks for the all-reduce and returns a **future**: a promise of the result. `handle.get_future()` is one,
#   and `.then(f)` makes a new one, whose result is what `f` returns. `f` gets the old future, and its `value()` is a
#   list of the tensors that arrived.
# - With a hook DDP does not divide. The hook does.
#
# ### Exercise 8: send half (••, 8 minutes)
#
# Write a hook that sends a bucket in bfloat16. The future's result is the mean over the ranks in float32. Divide before
# you send, as PyTorch's own hooks do: in float16 a sum could overflow. (bfloat16 has float32's range.) It runs on two
# real ranks.
#
# <details><summary>Hint 1</summary>
#
# `half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()` is a copy: send it.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `handle.get_future().then(lambda future: future.value()[0].to(torch.float32))`
#
# </details>


# %%
def half_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    ### BEGIN SOLUTION
    half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    handle = dist.all_reduce(half, async_op=True)
    return handle.get_future().then(lambda future: future.value()[0].to(torch.float32))
    ### END SOLUTION


# %%
checks.half_hook(half_hook)

# %% [markdown]
# PyTorch brings such hooks along: `torch.distributed.algorithms.ddp_comm_hooks.default_hooks` has `bf16_compress_hook`
# and others. Case `bf16` registers that one. Commit to what a rank hands over.

# %% tags=["commit"]
mine = commit(
    all_reduce_count=None,
    all_reduce_bytes=lambda: handed_bytes(4 * (DIM * DIM + DIM), micro_batches=1, no_sync=False, bf16=True),
)
### BEGIN SOLUTION
mine |= commit(all_reduce_count=2)
### END SOLUTION

# %%
bf16 = labkit.run("ddp_compile", mode="ddp", case="bf16", **WIDE)
plots.comparison_table(bf16, predict("eager", compressed=True), yours=mine)

# %% [markdown]
# *The same buckets, half the bytes.* The price is precision: bfloat16 keeps 8 significant bits of a number, and the
# ranks' sum is rounded to them, too.

# %% tags=["claim"]
claim("the same buckets", bf16.value("all_reduce_count") == eager.value("all_reduce_count"))
claim("half the bytes", 2 * bf16.value("all_reduce_bytes") == eager.value("all_reduce_bytes"))

# %% [markdown]
# ## 11. What `torch.compile` does with DDP
#
# **core, 5 minutes**
#
# `torch.compile(DistributedDataParallel(model))` works, and this is what you should write. The compiler turns the
# forward pass into a **graph**, a list of operations, and writes one program for it and one for its backward pass. That
# is a problem for DDP. The reducer's hooks fire when gradients are complete, and *one* backward program completes all
# of them at its end. Nothing would hide.
#
# So by default PyTorch **splits the graph where buckets end**. Its part for this is called DDPOptimizer. Each piece has
# a backward program of its own, and between two of them the hooks fire.
#
# Four layers of 600 × 600 have 1.38 MiB each. The cell compiles with a backend of its own, which counts the graphs that
# it gets and runs them as they are. Commit: how many, if a bucket holds 2 MiB? DDPOptimizer lets the first bucket close
# at 1 MiB.

# %% tags=["commit"]
mine = commit(graphs=None)
### BEGIN SOLUTION
mine = commit(graphs=lambda: len(bucket_plan([4 * (600 * 600 + 600)] * 4, bucket_mb=2, first_mb=1)))
### END SOLUTION

# %%
# %%torchrun -n 2 --name compiled_ddp
import logging

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.rank import report

dist.init_process_group()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def graphs(**how):
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph

    torch.compile(DistributedDataParallel(Layers(), **how), backend=backend)(torch.ones(8, 600))
    torch.compiler.reset()
    return len(found)


torch._logging.set_logs(all=logging.ERROR)  # no warnings about DDP's marks for profilers
report(graphs={"1 MiB": graphs(bucket_cap_mb=1), "2 MiB": graphs(bucket_cap_mb=2), "left out": graphs()})
with torch._dynamo.config.patch(optimize_ddp=False):
    report(whole=graphs(bucket_cap_mb=2))

# %%
gave = compiled_ddp.ranks[0].reported  # noqa: F821 (the cell above gave it this name)
counted, in_one = gave["graphs"], gave["whole"]
print(f"graphs by bucket_cap_mb: {counted}; with optimize_ddp=False: {in_one}")
print(f"you said {'–' if mine['graphs'] is None else int(mine['graphs'])} for 2 MiB")

# %% [markdown]
# *A graph for each bucket of DDPOptimizer's plan, whose first bucket closes at 1 MiB. With*
# `torch._dynamo.config.optimize_ddp = False` *it is one, and nothing hides.*
#
# The reducer does not know this plan. Told 2 MiB, all of its buckets close at 2 MiB (section 4): there are two, of two
# layers each, and the first leaves after the second of three backward programs. With the size left out the two agree.

# %% tags=["claim"]
layers = [4 * (600 * 600 + 600)] * 4
as_planned = [len(theory.bucket_plan(layers, size, 1)) for size in (1, 2, 25)]
claim("a graph for each bucket", list(counted.values()) == as_planned)
claim("with optimize_ddp=False it is one", in_one == 1)

# %% [markdown]
# So a small bucket now has a second price: the compiler cannot fuse operations across pieces. (With torch 2.13 a
# `bucket_cap_mb` below 1 stops with an error here: DDPOptimizer's first bucket would be larger than the others.)
#
# ## 12. Experimental: the messages inside the program
#
# **optional, 25 minutes**
#
# Instead of cutting the graph where messages start, one could put the messages into it. PyTorch has the parts for that.
# They are **off by default and experimental**: their names begin with an underscore or may change. labkit switches on
# three of them.
#
# - **The Python reducer** (`optimize_ddp="python_reducer"`). Each parameter gets a hook in Python: divide the gradient
#   by the ranks, ask for an all-reduce, wait. These are operators like any other, so they can be traced.
# - **Compiled autograd.** The backward pass is not run node by node. Autograd first writes down all that it would do,
#   hooks included, as one graph, and hands that to a compiler.
# - **Inductor's fusion of DDP's messages.** Inductor is the compiler that writes the programs. Our backward pass has
#   eight gradients, so at first eight all-reduces, each with its wait. One step of inductor fuses them into buckets by
#   the rule of exercise 2, and its first bucket always closes at 1 MiB. Another moves each wait down to the first line
#   that uses something of its bucket.
#
# There are two ways to fuse. `concat`, inductor's default, copies a bucket's gradients into one flat tensor, sends that
# and cuts it up again. `coalesced` hands the list of gradients to one call. We look at `coalesced`, whose program is
# shorter. Compiling takes some seconds on each rank.
#
# One detail: a compiled backward pass computes a weight's gradient before its bias's, autograd the bias's first.

# %% tags=["commit"]
mine = commit(all_reduce_count=None)
### BEGIN SOLUTION
compiled_order = [size for _, size in theory.chain_gradients(DIM, "compiled")]
mine = commit(all_reduce_count=lambda: len(bucket_plan(compiled_order, BUCKET_MB, first_mb=1)))
### END SOLUTION

# %%
coalesced = labkit.run("ddp_compile", fuse="coalesced", timeline=True, **WIDE)
plots.comparison_table(coalesced, predict("compiled"), yours=mine)

# %% [markdown]
# *One bucket more than with the reducer: the first one closes at 1 MiB, so fc4.weight travels alone.*

# %% tags=["claim"]
extra = coalesced.value("all_reduce_count") - eager.value("all_reduce_count")
claim("one bucket more than with the reducer", extra == 1)

# %% [markdown]
# Here is what inductor wrote for the backward pass of rank 0. Only lines that compute, send or wait are shown, and the
# `return`. `bufN` are tensors that the program makes, `argN` what it is given. Beside them stands what they hold, as
# far as labkit can tell. Point at a line that waits, or reach it by Tab: its request and what hides it are marked. Open
# the fold below for the whole program.

# %% tags=["nbval-ignore-output"]
plots.backward_program(coalesced)

# %% [markdown]
# Read it from the top. `extern` lines are products of matrices. `kernel` lines are loops that inductor wrote itself:
# the first makes the gradient of the loss, the others add up the biases' gradients and divide by the number of ranks.
# Each layer but fc1 has two products (the samples need no gradient): `fc3.output.grad` times `fc3.weight` is the
# gradient that goes on to fc2, and `fc3.output.grad` times `fc3.input` is the gradient of fc3's weight. A yellow line
# asks for a bucket and returns at once; products below it run while the bucket travels. All waits stand at the end,
# since nothing but the `return` uses a gradient. (Inductor reuses memory. A buffer may then have a new name and the
# same gradient; lines that only rename are left out.)

# %% tags=["nbval-ignore-output"]
_ = plots.bucket_schedule(coalesced)

# %% [markdown]
# *Left: the gradients of each bucket, as wide as their bytes. Right: the lines between its request and its waits; a
# dot is compute that hides it. The last bucket has nothing left to hide behind.*

# %% tags=["claim"]
read = inductor.find_buckets(coalesced.ranks[0].artifact("code"))
claim(
    "the last bucket has nothing left to hide behind",
    not read[-1].hidden_by and all(each.hidden_by for each in read[:-1]),
)

# %% [markdown]
# A collective that was asked for is not done. Its buffer is *in flight* until a wait for this buffer returns. Who reads
# it before may find half a sum; who writes to it spoils the sum of the others. Nothing raises an error. So a compiler
# that moves waits had better be right.
#
# ### Exercise 9: find the missing wait (••, 8 minutes)
#
# Write the reader that finds such a mistake. `lines` are the lines of a program in order. Each has a `number`, a `kind`
# (`"collective"`, `"wait"`, and others) and the tuple `buffers`, the names that it mentions. Return the numbers of the
# lines that mention a buffer in flight, other than to wait for it. A second request for such a buffer is one of them.
#
# <details><summary>Hint 1</summary>
#
# Go through the lines with a set of the buffers in flight.
#
# </details>
# <details><summary>Hint 2</summary>
#
# First look whether the line is too early, then note what it puts in flight. `set & set` are common members.
#
# </details>


# %%
def early_uses(lines: list[inductor.ProgramLine]) -> list[int]:
    ### BEGIN SOLUTION
    in_flight, found = set(), []
    for line in lines:
        if line.kind == "wait":
            in_flight -= set(line.buffers)
        elif in_flight & set(line.buffers):
            found.append(line.number)
        if line.kind == "collective":
            in_flight |= set(line.buffers)
    return found
    ### END SOLUTION


# %%
checks.early_uses(early_uses)

# %% [markdown]
# Try it on the real program, as it is and without its first wait. The line that it names is the `return`, the last one
# of the listing.

# %% tags=["nbval-ignore-output"]
lines = inductor.parse_lines(coalesced.ranks[0].artifact("code"))
first_wait = next(line for line in lines if line.kind == "wait")
for which, program in {
    "as it is": lines,
    "without its first wait": [each for each in lines if each is not first_wait],
}.items():
    numbers = early_uses(program)
    print(f"{which}: {'–' if numbers is None else numbers}")

# %% [markdown]
# And the time line? The backward pass is one program, so its bars bear no layer's name: `root` is the whole model.

# %% tags=["nbval-ignore-output"]
_ = plots.timeline(coalesced)

# %% [markdown]
# *The compiled step. `root` is the whole network: the compiler has made one program of its layers. The long empty
# stretch before the optimizer is the waits at the end of the listing. A shorter one between two `root` bars is no such
# wait: there gloo's threads need the core.* In some runs a bucket arrives before one that left earlier.

# %% tags=["nbval-ignore-output"]
_ = plots.communication_exposure({"reducer": eager, "compiled": coalesced})

# %% [markdown]
# *Communication of one profiled step, mean over the ranks: the time in which any bucket was under way. Two at once
# count once. Which of the two exposes more is not the same in every run.*
#
# Do not expect this path to win here. Products of matrices are library calls in both, and the reducer overlaps as well.
# What is gained is sight: the order of a compiled step is a text that you can read, check and change.
#
# Is it right? This trains with DDP, with `replicate` (DDP without a wrapper), and with both of them compiled so. It
# compares the output and each gradient of two steps, and each parameter after them, with one device: 26 tensors in each
# of the four trainings.

# %%
print(labkit.check("ddp_compile", nproc=RANKS, dim=64, case="cpu_no_sync").verdict_text)

# %% [markdown]
# A communication hook has a price here: inductor fuses an all-reduce only if its result is the gradient itself. With a
# hook it is not, and every gradient travels alone.
#
# ## 13. When does it pay? How do I choose `bucket_cap_mb`?
#
# **core, 8 minutes**
#
# Take a network card that works beside the arithmetic, as on a GPU. S bytes of gradients travel in buckets of b bytes,
# so there are S / b messages. Two times matter.
#
# - All messages together: `S / b * alpha + S * beta`. What is more than the backward pass takes is exposed. Larger
#   buckets make the first term smaller, and leave the second as it is.
# - The last bucket: `alpha + b * beta`. Nothing is left to hide it.
#
# So small buckets pay latency, and large ones have a long end. The smallest bucket that still hides is about the best:
#
# > S / b · alpha + S · beta = backward pass, so **b = S · alpha / (backward − S · beta)**
#
# If S · beta alone is longer than the backward pass, no bucket helps. Then the *batch* of a rank is too small: the
# backward pass takes about 4 operations for each parameter and token, and grows with it, while S does not.
#
# **An example.** BERT-large, a language model, on the 8 H100s of one machine, with 4096 tokens a rank.
#
# | | |
# |---|---|
# | S | 340 million parameters, in bfloat16: 680 MB |
# | beta | over the wire go 2 · 7/8 bytes for each one handed over; NVLink moves 450 GB/s in each direction by the data sheet: 1.75 / (450 · 10⁹) s = 3.9 ps a byte |
# | alpha | on no data sheet; we take 20 µs, and you should measure it |
# | speed | 989 · 10¹² bfloat16 operations a second by the data sheet, of which one reaches 40 %: 400 · 10¹² |
# | backward pass | 4 · 340 · 10⁶ · 4096 / (400 · 10¹²) s = 13.9 ms |
# | all bytes | 680 MB · 3.9 ps = 2.6 ms |
# | smallest bucket | 680 MB · 20 µs / (13.9 − 2.6) ms = 1.2 MB |
#
# Even a message for each of its 391 gradients would cost 391 · 20 µs = 7.8 ms, and between 13.9 and 2.6 ms there are 11.3.
# So there any size hides. A gradient is never cut. Its last one is that of the word embedding, 30,522 × 1024 numbers or
# 62.5 MB. So the last bucket takes at least 20 µs + 62.5 MB · 3.9 ps = 0.26 ms, whatever b is. With the default of
# 25 MiB there are 22 messages, and the last one takes 0.3 ms: 2 % of the backward pass. So here the default is fine.

# %% tags=["claim"]
width = 1024
block_numbers = [width**2, width] * 4 + [width] * 2 + [4 * width**2, 4 * width, 4 * width**2, width] + [width] * 2
embeddings = [30_522 * width, 512 * width, 2 * width, width, width]
bert_bytes = [2 * numbers for numbers in reversed([*embeddings, *24 * block_numbers, width**2, width])]
bert_plan = theory.bucket_plan(bert_bytes)
last_s = 20e-6 + sum(bert_bytes[place] for place in bert_plan[-1]) * 1.75 / 450e9
claim("391 gradients", len(bert_bytes) == 391)
claim(
    "22 messages, the last of them 2 % of the backward pass", (len(bert_plan), round(last_s / 13.9e-3, 2)) == (22, 0.02)
)

# %% [markdown]
#
# ### Exercise 10: the smallest bucket that hides (••, 6 minutes)
#
# Write it as a function. Return the bytes of a bucket, and `float("inf")` where no size of bucket lets the messages
# hide, however large.
#
# <details><summary>Hint</summary>
#
# `room = backward_s - total_bytes * beta_s_per_byte` is what is left for latencies. `total_bytes / b * alpha_s` must
# fit into it. And if there is no room?
#
# </details>


# %%
def smallest_bucket(total_bytes: float, backward_s: float, alpha_s: float, beta_s_per_byte: float) -> float:
    ### BEGIN SOLUTION
    room = backward_s - total_bytes * beta_s_per_byte
    return total_bytes * alpha_s / room if room > 0 else float("inf")
    ### END SOLUTION


# %%
checks.smallest_bucket(smallest_bucket)

# %% [markdown]
# **Your turn.** The same model on 64 such GPUs in 8 machines, joined by one adapter of 50 GB/s for each GPU. Take
# alpha = 100 µs, since a message now has many hops. Beta = 2 · 63/64 / (50 · 10⁹) s, that is 39 ps a byte. What is the
# smallest bucket, in MB, with 4096 tokens a rank, and with 16,384? Commit.

# %% tags=["commit"]
mine = commit(mb_4096=None, mb_16384=None)
### BEGIN SOLUTION
mine = commit(
    mb_4096=lambda: smallest_bucket(680e6, 4 * 340e6 * 4096 / 400e12, 100e-6, 2 * 63 / 64 / 50e9) / 1e6,
    mb_16384=lambda: smallest_bucket(680e6, 4 * 340e6 * 16384 / 400e12, 100e-6, 2 * 63 / 64 / 50e9) / 1e6,
)
### END SOLUTION

# %%
for tokens in (4096, 16384):
    size_mb = theory.smallest_bucket_bytes(680e6, 4 * 340e6 * tokens / 400e12, 100e-6, 2 * 63 / 64 / 50e9) / 1e6
    guess = mine[f"mb_{tokens}"]
    print(f"{tokens:>6} tokens: {size_mb:.2g} MB; you said {'–' if guess is None else format(guess, '.2g')}")

# %% [markdown]
# With 4096 tokens the bytes alone take 26.8 ms and the backward pass 13.9: no bucket hides them. With four times the
# samples buckets from about 2.4 MB on do.
#
# And this machine? Here hiding is not free (section 6). The passes take arithmetic + S / b · alpha + S · beta. So a
# larger bucket is never worse, and for the deep network from 1 MiB on hardly better: then a single alpha is left to
# save.
#
# So this is how to choose:
#
# 1. Start with the default, 25 MiB. In the example above it cost 2 %.
# 2. Measure one step without communication (`no_sync` around everything), and one with. If they are close, stop.
# 3. If not, take 4 times as much and a quarter, and look at the time line: many short messages want larger buckets; a
#    long message after the end of the backward pass wants smaller ones.
# 4. If the bytes alone, S · beta, take longer than the backward pass, leave the buckets alone. Send less: a larger
#    batch a rank, `no_sync`, bfloat16.

# %% tags=["claim"]
by_hand = [
    theory.smallest_bucket_bytes(680e6, 4 * 340e6 * t / 400e12, 100e-6, 2 * 63 / 64 / 50e9) for t in (4096, 16384)
]
claim("no bucket hides them with 4096 tokens", by_hand[0] == float("inf"))
claim("with four times the tokens from about 2.4 MB on", 2.2e6 < by_hand[1] < 2.6e6)

# %% [markdown]
# ### Explore (optional, 5 minutes)
#
# Left, a predicted backward pass; right, the same for other sizes of bucket. With *the computing core*, arithmetic
# stands still while a bucket travels, as on this machine. With *a network card* it goes on. *run it* measures alpha,
# beta and the arithmetic of this machine beside its steps, and predicts again with these. (With \* the first bucket
# closes at 1 MiB.)
#
# Take the card, and turn alpha. Then press *reset*, and take the card again.
#
# Question: which size is best for 100 layers of 64 with an alpha of 100 µs, and what is wrong with the sizes at both
# ends?
#
# <details><summary>Answer</summary>
#
# 0.1 MiB. A message for each gradient takes longer than the arithmetic. One message for all starts when there is nothing
# left to hide it.
#
# </details>

# %%
widgets.BucketExplorer()

# %% [markdown]
# ### What to expect on GPUs
#
# - The same program is written to run unchanged, which has not been verified yet: `labkit.run("ddp_compile", nproc=4,
#   case="gpu")`. Counts and bytes should be the same.
# - The listing has Triton kernels where there was C++. Messages run on a stream of their own.
# - Measure alpha and beta with `labkit.run("all_reduce", nproc=4, at_once=True)`.
#
# Figures from named GPUs belong in the folder `results`. None is recorded there yet for this lab.

# %% [markdown]
# ## 14. Leave with
#
# **core, 5 minutes**
#
# Predicted beside measured, in one step of a rank.

# %% tags=["summary"]
deep = {"all_reduce_count": messages_sent["1 MiB"], "all_reduce_bytes": total}
tables = {
    "reducer": plots.comparison_table(eager, predict("eager")),
    "deep, 1 MiB": plots.comparison_table(by_size["1 MiB"], deep),
}
tables["no_sync"] = plots.comparison_table(no_sync, predict("eager"))
tables["bf16 hook"] = plots.comparison_table(bf16, predict("eager", compressed=True))
tables["compiled"] = plots.comparison_table(coalesced, predict("compiled"))
pandas.concat(tables)

# %% [markdown]
# `all_reduce_count` are the all-reduces of a step, `all_reduce_bytes` what a rank hands to them. *Reducer* is DDP as it
# is, on the wide network; *compiled* the experimental path.
#
# ### Five questions
#
# <details><summary>1. A model has 300 gradients, most of a few KB. What do you look at first: alpha or beta?</summary>
#
# Alpha. Small messages cost their latency. Buckets turn 300 latencies into a few.
#
# </details>
# <details><summary>2. You put only <code>loss.backward()</code> into <code>no_sync</code>. What is sent?</summary>
#
# Everything, as without it: DDP decides in the forward pass. Each micro-batch pays for its messages, and nothing tells
# you so.
#
# </details>
# <details><summary>3. One layer's gradient is always the last to be ready. Which buckets wait for it?</summary>
#
# Its own, and all that come after it in the order. After the first step DDP puts it last, so that it is only its own,
# unless <code>find_unused_parameters=True</code> keeps the old order.
#
# </details>
# <details><summary>4. Somebody compiles a DDP model with <code>optimize_ddp=False</code> to get one large graph. What is lost?</summary>
#
# Overlap. One backward program completes all gradients at its end, so no bucket leaves early.
#
# </details>
# <details><summary>5. All ranks hold the same gradients after the backward pass. Is the averaging right?</summary>
#
# That cannot be told from it: a sum, or a wrong bucket, is the same everywhere, too. Hold one rank against one device
# that saw all samples.
#
# </details>
#
# ### Read on
#
# - Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020: buckets, hooks, no_sync.
#   https://arxiv.org/abs/2006.15704
# - Hockney, "The communication challenge for MPP", 1994: alpha and beta.
#   https://doi.org/10.1016/S0167-8191(06)80021-9
# - `DistributedDataParallel`:
#   https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html, and how it works:
#   https://docs.pytorch.org/docs/stable/notes/ddp.html (with a section on DDPOptimizer)
# - Communication hooks: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
# - Compiled autograd: https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html
# - BERT-large: Devlin et al., 2018, https://arxiv.org/abs/1810.04805. ResNet-50: He et al., 2015,
#   https://arxiv.org/abs/1512.03385. The H100's data sheet: https://www.nvidia.com/en-us/data-center/h100/
# - In labkit: `labkit/parallel/small_ddp.py` (yours), `labkit/parallel/ddp.py` (DDP and the compiler),
#   `labkit/theory/ddp.py` (where the buckets of the reducer and the compiler differ). PyTorch's own fusion is short
#   enough to read: `torch/_inductor/fx_passes/ddp_fusion.py`.
#
# ### What comes next
#
# - `labkit.run("ddp_compile", fuse="concat")` and `late_waits=False`: compare the listings.
# - Run your own model with `bucket_cap_mb` at a quarter of the default and at four times.
# - Lab 5 cuts the model as well as the samples.

# %% [markdown]
# ### What you have passed

# %%
from labkit.course.verdict_store import so_far

so_far("ddp")
