# %% [markdown]
# # Lab 4. DDP and the compiler: buckets, waits, and what hides
#
# In data-parallel training every rank holds the whole model and computes gradients from its own samples. Before the
# optimizer steps, each gradient is replaced by its mean over the ranks (lab 0). `DistributedDataParallel` (DDP) sends
# gradients for that while the backward pass still runs. After this lab you can
#
# - write a small DDP, mend a silent mistake, and prove that it trains as one device does;
# - predict what the size of a bucket does to a step, choose it, and measure what sending adds to a step;
# - read a time line: which bucket is late, and what mends it;
# - accumulate gradients over micro-batches without sending each of them;
# - say what `torch.compile` does with a DDP model, and what switching that off costs.
#
# You need lab 0 and PyTorch on one device, and no GPU. The lab takes about {core_minutes} minutes, and its exercises
# have one dot (easy) or two. The companion 04b has more.

# %% tags=["nbval-ignore-output"]
import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.parallel import small_ddp as labkits
from labkit.parallel.buckets import assign_buckets
from labkit.theory import ddp as theory
from labkit.theory import emulated_steps
from labkit_course import bucket_lines
from labkit_course.checks import ddp as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="4")

# %% [markdown]
# You may change these parameters.

# %% tags=["parameters"] small={"DIM": 512, "BUCKET_MB": 1.5, "STEPS": 1} points=[[2,512,1.01,1],[3,700,3.0,2],[4,1500,17.0,4]]
RANKS: int = 2  # ranks that share the samples
DIM: int = 1000  # width of section 3's four layers
BUCKET_MB: float = 5.0  # size at which their buckets close, in MiB: more than one layer, at most two
STEPS: int = 2  # timed steps with each size of bucket

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one has nobody to average with, and each needs a core")
require("DIM", DIM, at_least=512, because="a layer should be larger than 1 MiB")
layer_mb, bias_mb = 4 * DIM * (DIM + 1) / 2**20, 4 * DIM / 2**20
fills = f"two layers, of {layer_mb:.2f} MiB each with this DIM, fill a bucket, and one does not"
require("BUCKET_MB", BUCKET_MB, float, above=layer_mb + bias_mb, at_most=2 * layer_mb, because=fills)
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

# %% [markdown]
# ## 1. Why buckets? ({minutes} minutes)
#
# Most gradients of a network are small: 106 of ResNet-50's 161 hold 0.2 % of its bytes. Each message, here one
# all-reduce, costs its latency alpha, and each byte its time beta (lab 0). So one message for each gradient pays alpha
# 161 times, while one message for all has to wait for the last gradient, and nothing hides it.
# DDP takes the middle way: gradients that are ready at about the same time travel together in a **bucket**.
#
# We measure all three ways under emulation: real ranks train a chain of six layers, `fc1` to `fc6`, and wait as long as
# an imagined device and wire would take. The forward pass takes 60 ms, the backward pass 180, 30
# for each layer from `fc6` to `fc1`. Each message costs alpha = 15 ms, and the bytes of all gradients 120 ms.
#
# Which way is the fastest?

# %% tags=["nbval-ignore-output"]
SIX = {"dim": 128, "layers": 6}
TRAIN = {"nproc": RANKS, "mode": "ddp", "batch": 2, "steps": 1}
slow_wire = emulated_steps.ddp_hardware(RANKS, alpha_ms=15, bytes_ms=120, forward_ms=60, backward_ms=180, **SIX)
ways = {
    "a message for\neach gradient": {"bucket_mb": 0.0001},
    "two layers\ntogether": {"bucket_mb": 0.12},
    "one message\nfor all": {"bucket_mb": 100.0},
}
pictures = labkit.compare("ddp_compile", ways, rounds=1, timeline=True, emulate=slow_wire, **TRAIN, **SIX)
_ = plots.timelines_by_run(pictures)

# %% tags=["claim"]
# Other programs can delay a step: times are claimed of undisturbed runs only, which way is fastest of all runs.
for said_ms, picture in zip((390, 295, 375), pictures.values(), strict=True):
    claim(f"{said_ms} ms", abs(picture.value("step_ms") / said_ms - 1) < 0.15 or picture.cores_of_others)
each_ms, pairs_ms, all_ms = (picture.value("step_ms") for picture in pictures.values())
claim("buckets of two layers win on both sides", pairs_ms < min(each_ms, all_ms))
for picture in pictures.values():
    forward = picture.frame.query("kind == 'bar' and rank == 0 and phase == 'forward' and name != 'root'")
    claim("six blocks of forward pass", forward["name"].nunique() == 6)
    claim("which begin with the step", forward["start_us"].min() < 10e3)
claim("106 of 161 hold 0.2 %", round(100 * 53_120 / (53_120 + 23_454_912 + 2_049_000), 1) == 0.2)

# %% [markdown]
# *One emulated step in three ways. Underlined is what is **exposed**: the rank waits and computes nothing. With buckets
# nearly all but the last message hide behind the backward pass.*
#
# <details><summary>How do the three times come about?</summary>
#
# Alone, the twelve gradients, a weight and a bias for each layer, leave from 90 ms on, when `fc6` is done. They take
# 12 · 15 + 120 ms: 390 in all. In pairs of layers the last bucket leaves after 240 ms and takes 15 + 40: 295. One
# message leaves after 240 ms, too, and takes 15 + 120: 375.
#
# The figure shows one more step of rank 0, recorded by a profiler. A message may begin 10 ms or more after its last
# gradient, because it begins once both ranks have asked for it and its bytes have really moved. Thin orange lines after
# the backward pass are DDP's own work, such as putting means into `.grad`. In the small grey line, 7500 µs is half of
# alpha, as an all-reduce of two ranks is two steps of a ring, and units of 10 + 30 ms are the forward and backward pass
# of a layer.
#
# </details>
#
# *Takeaway: small buckets pay latency, and large ones have a long end that nothing hides.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# In your own script DDP is one line. It sends rank 0's parameters to all, and from then on each backward pass leaves
# in every `grad` the mean over the ranks. Below, each rank draws other weights. Equal ones at the end show that
# DDP sends, but not yet that the mean is right (section 4).

# %% tags=["script"]
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(dist.get_rank())  # every rank draws its own weights and samples
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))  # on GPUs: .to("cuda")
model = DistributedDataParallel(net)  # the one line
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.randn(32, 64)
for _ in range(5):
    optimizer.zero_grad()
    (model(samples) - samples).square().mean().backward()  # sends, and waits
    optimizer.step()
mine = nn.utils.parameters_to_vector(net.parameters()).detach()  # all weights and biases
largest = mine.clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
print(f"all ranks end with the same weights: {torch.equal(mine, largest)}")
del model  # before its process group
dist.destroy_process_group()

# %% [markdown]
# *Takeaway: DDP is one line. Its buckets decide how much of the sending can hide.*
#
# ## 3. What the reducer does ({minutes} minutes)
#
# DDP's **reducer** registers a **hook** with every parameter, a function that autograd calls when its gradient is
# complete. Here are four gradients in two buckets:
#
# ```
#                   time ->
# backward pass     fc2.bias   fc2.weight    fc1.bias   fc1.weight
# hook called          |           |             |           |
# bucket 0   missing   1           0  ask for its all-reduce, do not wait
#                                  [======== in flight ========]
# bucket 1   missing                             1           0  ask
#                                                            [======== in flight ========]
# last gradient of all                                       | wait for bucket 0, wait for bucket 1,
#                                                              put the means into .grad
# ```
#
# Each bucket is one flat row of gradients, and counts those that are missing. At 0, and once the buckets before it have
# left (section 5), the reducer asks for an all-reduce of the row. It returns at once, so that the backward pass goes
# on. Until somebody has waited for it, the row is **in flight**: it may still hold this rank's own numbers, and no
# error says so.
#
# Where layers follow each other, gradients are ready from the last layer to the first, within a layer the bias before
# the weight. They go into a bucket in this order, and it closes once it holds `bucket_cap_mb` MiB, or more. Without
# that option the first bucket closes at 1 MiB, and the others at 25.
#
# ### Exercise 1: which gradients travel together? (•, {minutes} minutes)
#
# `sizes` are the bytes of the gradients as they become ready. Return the buckets, each a list of
# positions in `sizes`. Each closes once it holds `bucket_bytes` or more, and what is left over is a bucket, too.
#
# <details><summary>Hint 1</summary>
#
# Go through `enumerate(sizes)`, and remember how many bytes the open bucket holds.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Before you put a gradient in, ask whether there is an open bucket. If there is none, or the last one is full, open
# one that holds 0 bytes.
#
# </details>


# %%
def bucket_plan(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    ### BEGIN SOLUTION
    buckets, held = [], 0
    for position, size in enumerate(sizes):
        if not buckets or held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(position)
        held += size
    return buckets
    ### END SOLUTION


# %%
plan_verdict = checks.bucket_plan(bucket_plan)
plan_verdict

# %% tags=["summary"]
# Does DDP follow your rule? launch/ddp_compile.py wraps four layers with bucket_cap_mb=BUCKET_MB, and takes some steps.
four_layers = labkit.run("ddp_compile", nproc=RANKS, mode="ddp", dim=DIM, bucket_mb=BUCKET_MB, steps=1)
names = [f"fc{layer}.{part}" for layer in (4, 3, 2, 1) for part in ("bias", "weight")]  # as they become ready
sizes = [4 * DIM * (DIM if name.endswith("weight") else 1) for name in names]
by_rule = [[names[place] for place in bucket] for bucket in bucket_plan(sizes, int(BUCKET_MB * 2**20)) or []]
sent = [list(each["name"]) for _, each in four_layers.frame.query("kind == 'bucket' and rank == 0").groupby("index")]
pandas.DataFrame({"DDP sent": pandas.Series(sent), "your rule": pandas.Series(by_rule, dtype=object)}).fillna("–")

# %% tags=["claim"]
if plan_verdict.ok:
    claim("DDP's buckets are those of your rule", sent == by_rule)
claim("two layers fill a bucket, so there are two", four_layers.value("all_reduce_count") == 2)

# %% [markdown]
# DDP's buckets are those of your rule: two layers fill one.
#
# *Takeaway: no bucket leaves before its last gradient is ready, and the rank waits only after the last one of all.*
#
# ## 4. Build it: a small DDP ({minutes} minutes)
#
# Your rule plans the buckets. Two functions are missing: one sends a full bucket, and one waits at the end and puts the
# means in place. The second stands below, and says what the first has to keep: triples of a bucket's parameters, the
# flat row of their gradients, and the `handle` of its all-reduce.


# %%
def average_buckets(in_flight: list[tuple[list[nn.Parameter], torch.Tensor, dist.Work]]) -> None:
    """Wait for each bucket, and put the means of its row into the gradients."""
    for bucket, row, handle in in_flight:
        handle.wait()  # without it, this rank's own numbers
        row /= dist.get_world_size()  # an all-reduce adds up
        pieces = row.split([each.numel() for each in bucket])  # views of the row
        for parameter, piece in zip(bucket, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


# %% [markdown]
# ### Exercise 2: send what is full (••, {minutes} minutes)
#
# `buckets` are lists of parameters, and every parameter gets a gradient in each backward pass. When the last gradient
# of a bucket is there, make its row with `torch.cat` and ask for the all-reduce with `async_op=True`, which returns its
# `dist.Work` at once. The hook of the last gradient of all calls `finish(in_flight)`, once, with the triples, and
# prepares for the next backward pass. Your function is called once, before training, and only registers hooks:
# `parameter.register_post_accumulate_grad_hook(f)` makes autograd call `f(parameter)` when `parameter.grad` is complete.
# The check also looks at *when* you ask and wait.
#
# <details><summary>Hint 1: what to remember</summary>
#
# For each bucket, how many gradients are missing: `missing = [len(bucket) for bucket in buckets]`. And the list of what
# is in flight.
#
# </details>
# <details><summary>Hint 2: the function inside</summary>
#
# `arrived(index)` is called for each gradient, with the index of its bucket. It counts down, and at 0 it makes the row
# and asks. If `not any(missing)`, it finishes, clears the list and sets the counts to the start.
#
# </details>
# <details><summary>Hint 3: the hooks</summary>
#
# A hook gets the parameter, and not the index. Make a function for each hook that remembers it: a lambda with a default
# value, such as `lambda _, index=index: …`, since a plain lambda looks `index` up later. Change `missing` in place.
#
# </details>


# %%
def send_full_buckets(buckets: list[list[nn.Parameter]], finish) -> None:
    ### BEGIN SOLUTION
    missing = [len(bucket) for bucket in buckets]
    in_flight = []

    def arrived(index: int) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            row = torch.cat([parameter.grad.flatten() for parameter in buckets[index]])
            in_flight.append((buckets[index], row, dist.all_reduce(row, async_op=True)))
        if not any(missing):
            finish(in_flight)
            in_flight.clear()
            missing[:] = [len(bucket) for bucket in buckets]

    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))
    ### END SOLUTION


# %%
send_verdict = checks.send_full_buckets(send_full_buckets)
send_verdict

# %% [markdown]
# Together they average gradients as DDP does, here for 100 layers. `labkit.check` gives all ranks, and one device,
# the same parameters and samples, and compares outputs and gradients of two steps, and the parameters after them.

# %%
plan = bucket_plan if plan_verdict.ok else assign_buckets
send = send_full_buckets if send_verdict.ok else labkits.send_full_buckets
verdicts = {"bucket_plan": plan_verdict, "send_full_buckets": send_verdict}
print("labkit's own stand in for:", ", ".join(name for name, each in verdicts.items() if not each.ok) or "none")


def small_ddp(model: nn.Module, bucket_bytes: int, finish=average_buckets) -> None:
    """Average all gradients by the end of each backward pass, in buckets."""
    parameters = list(model.parameters())[::-1]
    buckets = plan([parameter.nbytes for parameter in parameters], bucket_bytes)
    send([[parameters[place] for place in bucket] for bucket in buckets], finish)


PARITY = {"nproc": RANKS, "dim": 64, "layers": 100, "bucket_mb": 0.1, "mode": "yours"}
right = labkit.check("ddp_compile", use={"data_parallel": small_ddp}, **PARITY)
print(f"{right.value('compared'):.0f} tensors, equal to 1 part in a million: {right.value('max_rel_error') <= 1e-6}")

# %% [markdown]
# Your row is a copy, so until the wait each gradient is in memory twice. With `gradient_as_bucket_view=True` DDP avoids
# the second copy: each `grad` is a view of its piece of the row. `thrifty_ddp` tries the same, and has a mistake that
# raises no error. The check trains two steps, with `optimizer.zero_grad()` before each.


# %%
def grads_in_row(bucket: list[nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy gradients into a row, and make each a view of it; return the row and the views."""
    row = torch.cat([each.grad.flatten() for each in bucket])
    pieces = row.split([each.numel() for each in bucket])
    views = [piece.view_as(each) for each, piece in zip(bucket, pieces, strict=True)]
    for parameter, view in zip(bucket, views, strict=True):
        parameter.grad = view
    return row, views


# %%
def thrifty_ddp(model: nn.Module, bucket_bytes: int, before_sending=lambda bucket, views: None) -> None:
    """Average in rows that are made once; later backward passes write into them."""
    parameters, in_flight = list(model.parameters())[::-1], []
    places = plan([parameter.nbytes for parameter in parameters], bucket_bytes)
    buckets = [[parameters[place] for place in bucket] for bucket in places]
    rows, missing = {}, [len(bucket) for bucket in buckets]

    def arrived(index: int) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            if index not in rows:
                rows[index] = grads_in_row(buckets[index])
            row, views = rows[index]
            before_sending(buckets[index], views)
            in_flight.append((row, dist.all_reduce(row, async_op=True)))
        if not any(missing):
            for row, handle in in_flight:
                handle.wait()
                row /= dist.get_world_size()
            in_flight.clear()
            missing[:] = [len(bucket) for bucket in buckets]

    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived(index))


# %%
wrong = labkit.check("ddp_compile", use={"data_parallel": thrifty_ddp}, **PARITY)
print(wrong.verdict_text)

# %% tags=["claim"]
claim("your small_ddp is equal to 1 part in a million", right.value("max_rel_error") <= 1e-6)
claim("parity finds it, in the second step", not wrong.ok and ", step 1, gradient" in wrong.verdict_text)

# %% [markdown]
# ### Exercise 3: mend it (•, {minutes} minutes)
#
# The verdict counts steps from 0, so what is different in the one that it names? Write `put_into_row`, which
# `thrifty_ddp` is to call as `before_sending`, before it sends the row of a `bucket`: `views` are the row's pieces, one
# for each parameter.
#
# <details><summary>Hint 1</summary>
#
# What does `zero_grad()` do to a `grad`, and where does the next backward pass put its gradient?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two things for each parameter: the row has to hold this step's gradient when it leaves, and `grad` has to be where the
# mean will be.
#
# </details>


# %%
def put_into_row(bucket: list[nn.Parameter], views: list[torch.Tensor]) -> None:
    ### BEGIN SOLUTION
    for parameter, view in zip(bucket, views, strict=True):
        view.copy_(parameter.grad)
        parameter.grad = view
    ### END SOLUTION


# %%
checks.put_into_row(put_into_row)

# %% [markdown]
# `zero_grad()` sets each `grad` to None, and the next backward pass makes a new tensor outside the row. So the row
# leaves with old means in it, and each rank trains on its own gradients. The first step is right, so compare at least
# two.
#
# `small_ddp` still lacks DDP's first act. Ranks that begin with different weights, as in section 2, would keep them
# different, and no error would say so. Two lines before training mend it:
#
# ```python
# for parameter in model.parameters():
#     dist.broadcast(parameter.detach(), src=0)  # rank 0's, to all
# ```
#
# *Takeaway: a small DDP sends rank 0's parameters once. Then it plans buckets, sends what is full, waits, and divides.*
#
# ## 5. Buckets leave in order ({minutes} minutes)
#
# All ranks must make the same collectives in the same order (lab 0). Your `send_full_buckets` sends a bucket as soon as
# it is full, which needs the same order of gradients on all ranks. DDP does not rely on that and fixes the order of its
# buckets: bucket 1 never leaves before bucket 0, even if it is full. What does that cost?
#
# ### Exercise 4: when has each bucket arrived? (•, {minutes} minutes)
#
# `buckets` are lists of positions in `sizes` (bytes) and `ready` (the moment at which each gradient is ready, in ms).
# A message costs `alpha` ms, and each byte `beta` ms. Buckets travel in their order, one at a time. Return the moment
# at which each has arrived.
#
# <details><summary>Hint 1</summary>
#
# Which of a bucket's gradients completes it? And how often does a bucket pay alpha?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A bucket starts when it is full *and* the one before has arrived: at the later of the two moments.
#
# </details>


# %%
def arrivals(buckets: list[list[int]], sizes: list[int], ready: list[float], alpha: float, beta: float) -> list[float]:
    ### BEGIN SOLUTION
    arrived, end = [], 0
    for bucket in buckets:
        full = max(ready[place] for place in bucket)
        start = max(full, end)
        end = start + alpha + beta * sum(sizes[place] for place in bucket)
        arrived.append(end)
    return arrived
    ### END SOLUTION


# %%
arrivals_verdict = checks.arrivals(arrivals)
arrivals_verdict

# %%
arrive = arrivals if arrivals_verdict.ok else lambda *each: theory.arrivals(*theory.bucket_times(*each))
orders = ([4, 8, 12, 16], [16, 4, 8, 12])  # when four buckets are full, in ms; each travels for 3 ms
arrived_ms = [arrive([[0], [1], [2], [3]], [0] * 4, full_ms, 3, 0) for full_ms in orders]
for full_ms, ends_ms in zip(orders, arrived_ms, strict=True):
    print(f"full after {full_ms} ms, arrived after {ends_ms}")

# %% [markdown]
# If bucket 0 is full last, it holds up three full buckets: the last arrives after 28 ms instead of 19.
#
# In the first step DDP has one bucket for everything, and notes in which order gradients become ready. Before the
# second it **rebuilds** its buckets in rank 0's order, which rank 0 broadcasts, and from then on they close at
# `bucket_cap_mb`.
#
# A parameter that the forward pass leaves out gets no gradient. So its bucket never leaves, nor does any behind it; each
# rank keeps its own gradients, and the next forward pass raises an error (4b). With `find_unused_parameters=True` no
# bucket waits for it, but DDP rebuilds nothing, as the next step may leave out another one. The buckets then follow a
# guess, `model.parameters()` backwards.
#
# In the model below `fc1` stands last and is used first, so the guess is wrong. Each layer has a bucket of its own. DDP
# warns, rightly, that no parameter is unused. Commit: how many of the four buckets leave before `fc1`'s gradient is
# ready, in the second step, by default and with the option?

# %% tags=["commit"]
mine_early = commit(default=None, find_unused=None)
### BEGIN SOLUTION
mine_early = commit(default=3, find_unused=0)
### END SOLUTION


# %%
class OutOfOrder(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ["fc2", "fc3", "fc4", "fc1"]:  # fc1 stands last
            setattr(self, name, nn.Linear(64, 64, bias=False))

    def forward(self, x):
        return self.fc4(self.fc3(self.fc2(self.fc1(x))))


# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --use OutOfOrder --name ordered
# torch, nn and dist are this notebook's, --use adds the class, and `ordered` gets what ranks report.
from labkit.parallel.ddp import note_order
from labkit.rank import report

dist.init_process_group()
for name, options in {"default": {}, "find_unused": {"find_unused_parameters": True}}.items():
    model = nn.parallel.DistributedDataParallel(OutOfOrder(), bucket_cap_mb=0.001, **options)
    seen = note_order(model)
    for step in range(2):
        seen.clear()
        model(torch.ones(8, 64)).sum().backward()
        report(**{f"{name}, step {step}": " ".join(seen)})

# %%
noted = ordered.ranks[0].reported
for step, events in noted.items():
    print(f"{step}: {events}")
early = {name: noted[f"{name}, step 1"].split("fc1")[0].count("leaves") for name in mine_early}
pandas.DataFrame({"yours": mine_early, "measured": early}).convert_dtypes().astype(object).fillna("no prediction")

# %% tags=["claim"]
claim("28 ms instead of 19", [each[-1] for each in arrived_ms] == [19, 28])
claim("the first step has one bucket", noted["default, step 0"].count("leaves") == 1)
claim("then each leaves at once", noted["default, step 1"].startswith("fc4 [bucket 0 leaves] fc3 [bucket 1 leaves]"))
late = [noted[f"find_unused, step {step}"].startswith("fc4 fc3 fc2 fc1 [bucket 0 leaves]") for step in range(2)]
claim("with the option all wait for fc1, in every step", all(late) and early == {"default": 3, "find_unused": 0})

# %% [markdown]
# With the option full buckets wait for `fc1`'s in every step, by default in none.
#
# *Takeaway: one late gradient at the front of the order holds up every bucket behind it.*
#
# ## 6. Which size pays? ({minutes} minutes)
#
# `bucket_plan` and `arrivals` together say when the backward pass ends: with the last arrival. We train three networks,
# each on hardware of its own. In *far* the ranks are far apart.

# %%
NETWORKS = {
    "deep": {"dim": 128, "layers": 24, "backward_ms": 240, "alpha_ms": 15, "bytes_ms": 120},
    "wide": {"dim": 384, "layers": 6, "backward_ms": 240, "alpha_ms": 15, "bytes_ms": 120},
    "far": {"dim": 64, "layers": 24, "backward_ms": 120, "alpha_ms": 100, "bytes_ms": 12},
}
SIZES_MB = {"deep": (0.0001, 0.06, 0.12, 0.25, 1, 25), "wide": (0.0001, 0.5, 2, 25), "far": (0.1, 0.2, 25)}
chains = pandas.DataFrame(NETWORKS).T
chains["MiB"] = 4 * chains["layers"] * chains["dim"] * (chains["dim"] + 1) / 2**20
a_layer = chains[["MiB", "backward_ms", "bytes_ms"]].div(chains["layers"], axis=0).round(3)
chains[["layers", "alpha_ms"]].join(a_layer.add_suffix(" a layer"))

# %% [markdown]
# Commit: which of `SIZES_MB` is the best for each? With 0.0001 MiB each gradient has a message, with 25 all share one.
# You need not draw schedules: compare a bucket's message with the backward pass of as many layers.

# %% tags=["commit"]
mine_best = commit(deep=None, wide=None, far=None)
### BEGIN SOLUTION
mine_best = commit(deep=0.25, wide=0.5, far=25)
### END SOLUTION


# %%
def backward_ms(network: dict[str, float], bucket_mb: float) -> float:
    """Return the end of the backward pass, as your functions predict it."""
    sizes = [size for _, size in theory.chain_gradients(network["dim"], layers=network["layers"])]
    layer_ms = network["backward_ms"] / network["layers"]
    ready = [layer_ms * (place // 2 + 1) for place in range(len(sizes))]  # a bias and a weight for each layer
    buckets = plan(sizes, bucket_mb * 2**20)
    return arrive(buckets, sizes, ready, network["alpha_ms"], network["bytes_ms"] / sum(sizes))[-1]


predicted_ms = {
    name: {f"{mb:g} MiB": backward_ms(NETWORKS[name], mb) for mb in sizes} for name, sizes in SIZES_MB.items()
}
best = {name: min(ends, key=ends.get) for name, ends in predicted_ms.items()}
print("your formula's best:", best)

# %% tags=["nbval-ignore-output"]
trained = {}  # now your small_ddp trains all three under emulation
for name, network in NETWORKS.items():
    chain = {"dim": network["dim"], "layers": network["layers"]}
    trained[name] = {"emulate": emulated_steps.ddp_hardware(RANKS, **network), "sizes_mb": SIZES_MB[name], **chain}
YOURS = {"mode": "yours", "use": {"data_parallel": small_ddp}, "steps": STEPS}
curves = labkit.compare("ddp_compile", trained, rounds=1, **TRAIN | YOURS)
_ = plots.step_time_by_bucket_size(curves, predicted_ms)
measured_ms = {name: plots.step_ms_by_size(result) for name, result in curves.items()}
fastest = {name: min(ends, key=ends.get) for name, ends in measured_ms.items()}
off = {name: max(abs(ms / predicted_ms[name][mb] - 1) for mb, ms in measured_ms[name].items()) for name in best}
columns = {"formula": best, "measured": fastest, "bars are off by up to": {name: f"{off[name]:.1%}" for name in best}}
pandas.DataFrame({"yours": {name: f"{prediction_text(mb, 'g')} MiB" for name, mb in mine_best.items()}} | columns)

# %% tags=["claim"]
least = -(-chains["alpha_ms"] / (chains["backward_ms"] - chains["bytes_ms"]) * chains["layers"] // 1)
claim("a bucket keeps up from 3 layers, 1 and 23 on", [*least] == [3, 1, 23])
held = [-(-mb // a_layer.loc[name, "MiB"]) for name, mb in (("deep", 0.25), ("wide", 0.5))]
claim("the best sizes hold 4 layers and 1", held == [4, 1])
claim("three networks, three best sizes", best == {"deep": "0.25 MiB", "wide": "0.5 MiB", "far": "25 MiB"})
for name, result in curves.items():
    claim("the formula is within 15 %", off[name] < 0.15 or result.cores_of_others)
    claim("the best size that it names is the measured best", best[name] == fastest[name] or result.cores_of_others)
for name in ("deep", "wide"):
    first_ms, *_, last_ms = measured_ms[name].values()
    claim("both ends lose", min(first_ms, last_ms) > measured_ms[name][best[name]])
claim("where ranks are far apart, one message is best", fastest["far"] == "25 MiB")

# %% [markdown]
# *The backward pass with your `small_ddp`, emulated; dashed, your formula. In the first two networks both ends lose.*
#
# The emulated wire waits by the same alpha and beta, so this tests which bucket starts when, and says nothing about a
# real wire (section 7).
#
# A rule names all three: the best bucket is about the smallest that **keeps up**, so that its message takes no longer
# than the backward pass that fills it. In *deep* n layers take 15 + 5n ms to send and 10n to compute: three keep up,
# and 0.25 MiB holds four. In *wide* one does, with 35 ms against 40. *far* needs 23 of its 24 layers, so one message is
# best.
#
# ### Exercise 5: which bucket is late? (••, {minutes} minutes)
#
# The figure below has three time lines, in which each layer has one gradient. Numbers are layers, first computed and then
# sent; buckets count from 0 and close at the cap on the left. Answer twice for each:
#
# - Before which bucket is the wire idle longest while a gradient waits to be sent? None, if that never happens.
# - If all buckets close at one cap, and the order stays as drawn, which cap ends the pass within 2 % of the shortest
#   that any cap reaches? None, if the line as drawn does.
#
# <details><summary>Hint 1</summary>
#
# In which line is the wire never idle once the first layer is computed? What does it spend its time on?
#
# </details>
# <details><summary>Hint 2</summary>
#
# When was the last layer of each message ready? Would another size change that?
#
# </details>
# <details><summary>Hint 3</summary>
#
# Try sizes: `bucket_plan` and `arrivals` take any unit, also MiB, and `ready` is where the layers end in the figure.
#
# </details>

# %%
_ = bucket_lines.draw()


# %%
def diagnose() -> dict[str, tuple[int | None, float | None]]:
    """Return a late bucket and a cap in MiB for each line, such as {"A": (3, 16), …}."""
    ### BEGIN SOLUTION
    return {"A": (1, 4), "B": (None, 1), "C": (0, None)}
    ### END SOLUTION


# %%
diagnosis = checks.diagnose(diagnose)
_ = bucket_lines.draw({name: size for name, (_, size) in diagnose().items()} if diagnosis.ok else {})  # with your sizes
diagnosis

# %% [markdown]
# <details><summary>What was wrong in each?</summary>
#
# In A, DDP's default sizes, layers 7 to 2 wait for layer 1. In B alpha is paid 16 times. In C layer 1 stands first in
# the order, so nothing leaves early. No size mends that, but `find_unused_parameters=False` does.
#
# </details>
#
# *Takeaway: predict with alpha, beta and the backward pass: the last message counts, and whether the others hide.*
#
# ## 7. Send once for several micro-batches ({minutes} minutes)
#
# A large batch that does not fit into memory is computed in several **micro-batches**, whose gradients add up. Their
# mean over the ranks is needed only once: in `with model.no_sync():` DDP sends nothing.
#
# It takes effect in the *forward* pass, where DDP decides whether the hooks of the backward pass will send.
#
# ### Exercise 6: accumulate (•, {minutes} minutes)
#
# `model` is in DDP, and its gradients are None. `batches` are the micro-batches of one step, pairs of inputs and
# targets. They differ in size, but every rank has the same number of samples in all. Leave in each `grad` the gradient
# of the mean squared error over all samples of all ranks, and send each bucket once. You decide which backward passes
# send, and how much each loss counts.
#
# <details><summary>Hint 1</summary>
#
# Which of the micro-batches has to send? The backward pass of that one sends the sums of all.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The last micro-batch stands outside `with model.no_sync():`. Backward passes *add* to `grad`, while each loss is the
# *mean* of its own micro-batch. In the mean of the whole, one sample counts as much as any other: what is the share of
# a micro-batch?
#
# </details>


# %%
def accumulate(model: DistributedDataParallel, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    ### BEGIN SOLUTION
    samples = sum(len(inputs) for inputs, _ in batches)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        (len(inputs) / samples * nn.functional.mse_loss(model(inputs), targets)).backward()

    with model.no_sync():
        for inputs, targets in batches[:-1]:
            backward(inputs, targets)
    backward(*batches[-1])
    ### END SOLUTION


# %%
checks.accumulate(accumulate)

# %% [markdown]
# What does it save? A step inside `no_sync` sends nothing, so the difference to a step outside is what sending adds.
# The next cell measures it **without emulation, on this machine**, also in CPU time. For your formula it times
# all-reduces of one number, which gives alpha, and of the gradients' 32 MiB.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --name on_cpu
from labkit.rank import report
from labkit_course.clocks import median_ms  # of five calls, by the clock and of CPU time


def step(model):
    model(torch.ones(64, 1024)).square().mean().backward()


dist.init_process_group()
(alpha_ms, _), (bytes_ms, _) = [median_ms(dist.all_reduce, torch.ones(count)) for count in (1, 2**23)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), bucket_cap_mb=8)
sends = median_ms(step, model)
with model.no_sync():
    silent = median_ms(step, model)
report(alpha_ms=alpha_ms, bytes_ms=bytes_ms, sends=sends, silent=silent)

# %% tags=["nbval-ignore-output"]
cpu = on_cpu.ranks[0].reported
added_ms, added_cpu_ms = [sends - silent for sends, silent in zip(cpu["sends"], cpu["silent"], strict=True)]
print(f"a step takes {cpu['sends'][0]:.0f} ms, in no_sync {cpu['silent'][0]:.0f}")
print(f"sending adds {added_ms:.0f} ms, and {added_cpu_ms:.0f} ms of CPU time")
cores = {"dim": 1024, "layers": 8, "alpha_ms": cpu["alpha_ms"], "bytes_ms": cpu["bytes_ms"]}
cores["backward_ms"] = 2 / 3 * cpu["silent"][0]  # the forward pass has half as many multiplications
last_ms, unhidden_ms = [backward_ms(cores, mb) - cores["backward_ms"] for mb in (8, 100)]
print(f"by your formula it adds {last_ms:.0f} ms, and {unhidden_ms:.0f} if nothing hides")

# %% tags=["claim"]
claim("sending takes CPU time", added_cpu_ms > 0.15 * cpu["silent"][1])
on_two_cores = on_cpu.device == "cpu" and on_cpu.session["cores"] == 2
claim("more is added than messages take", added_ms > unhidden_ms > last_ms, where=on_two_cores)

# %% [markdown]
# On two cores sending adds more than its messages take, even if none hides, and it adds CPU time: DDP and gloo copy,
# add up and transport on the cores that compute. These numbers do not tell the parts apart. Your formula counts only
# the wire, so it is a lower bound here. A network card transports for a GPU, but NCCL's all-reduce is a kernel, and
# takes multiprocessors and memory bandwidth from the backward pass. With k micro-batches, `no_sync` saves k − 1 times
# what sending adds.
#
# *Takeaway: all micro-batches but the last go into `no_sync`, forward pass included, and each loss counts by its share of
# the samples.*
#
# ## 8. What `torch.compile` does with the buckets ({minutes} minutes)
#
# In your script, where `net` is a class with its own `forward`:
#
# ```python
# model = torch.compile(DistributedDataParallel(net))
# torch._dynamo.config.optimize_ddp = False  # no cuts; before the first step
# ```
#
# The compiler writes a model's operations into a **graph**, and makes two programs of it, for the forward and the
# backward pass. But *one* backward program hands over all gradients at its end. So by default its DDPOptimizer, which
# reads the size of the buckets from DDP, **cuts the graph where buckets end**, and gives each piece a backward program;
# between two of them the hooks fire.
#
# We compile six layers of 600 × 600, 1.4 MiB each, with `bucket_cap_mb=1`, so that each layer is a piece. They train
# under emulation: forward pass 60 ms, backward 180, alpha 15 ms, all bytes 60. A layer takes its 30 ms cut or whole, so
# what cuts cost a compiler, fusion and more launches, is zero here. Not compiled, each layer's message takes 15 + 10 ms
# and hides behind the 30 ms of the next layer, so that only the last one is exposed: a step takes 60 + 180 + 25 = 265
# ms.
#
# A backward program hands over each weight *before* its bias, and the reducer rebuilds its buckets in that order. A
# weight fills a bucket, so each bias travels with the next weight, and the last one alone:
#
# ```
# program 1               program 2               …  program 6
# fc6.weight   fc6.bias   fc5.weight   fc5.bias   …  fc1.weight   fc1.bias
# [bucket 0]   [     bucket 1      ]   [  …           bucket 5]   [bucket 6]
# ```
#
# As one graph there are seven messages, too. Commit: how long does a step take cut, how long as one graph, and how long
# as one graph with all gradients in one bucket?

# %% tags=["commit"]
mine_compiled = commit(cut_ms=None, whole_ms=None, one_bucket_ms=None)
### BEGIN SOLUTION
mine_compiled = commit(cut_ms=60 + 180 + 25 + 15, whole_ms=60 + 180 + 7 * 15 + 60, one_bucket_ms=60 + 180 + 15 + 60)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
LARGE = {"dim": 600, "layers": 6}
wire = emulated_steps.ddp_hardware(RANKS, alpha_ms=15, bytes_ms=60, forward_ms=60, backward_ms=180, **LARGE)
programs = {
    "not compiled": {"graph": "none", "bucket_mb": 1.0},
    "compiled, cut\nwhere buckets end": {"graph": "split", "bucket_mb": 1.0},
    "compiled\nas one graph": {"graph": "whole", "bucket_mb": 1.0},
    "one graph,\none bucket": {"graph": "whole", "bucket_mb": 100.0},
}
compiled = labkit.compare("ddp_compile", programs, rounds=1, timeline=True, emulate=wire, **TRAIN, **LARGE)
_ = plots.timelines_by_run(compiled)
formula = bucket_lines.compiled_steps_ms(wire, RANKS, bucket_mb=1.0, **LARGE)
found = {name: result.value("step_ms") for name, result in zip(formula, compiled.values(), strict=True)}
table = pandas.DataFrame({"yours": mine_compiled, "formula": formula, "measured": found}, index=list(formula))
table.astype(float).round().convert_dtypes().astype(object).fillna("–")

# %% tags=["claim"]
_, cut, whole, one_bucket = compiled.values()
marks = [result.frame.query("kind == 'bar' and phase == 'backward' and rank == 0") for result in (cut, whole)]
shown = [sorted({name for name in each["name"] if name.startswith("program")}) for each in marks]
claim("the bars count the programs", [len(each) for each in shown] == [6, 1])
sent = cut.frame.query("kind == 'bucket' and rank == 0").groupby("index")["name"].apply(list)
between = [[f"fc{layer}.bias", f"fc{layer - 1}.weight"] for layer in range(6, 1, -1)]
claim("each weight closes a bucket", [*sent] == [["fc6.weight"], *between, ["fc1.bias"]])
counts = [result.value("all_reduce_count") for result in (cut, whole)]
claim("seven messages, cut or whole", counts == [7, 7])
claim("a graph for each bucket, or one", (cut.value("graphs"), whole.value("graphs")) == (6, 1))
claim("one bucket, one message", one_bucket.value("all_reduce_count") == 1)
claim("one bucket gains, cuts gain more", found["cut_ms"] < found["one_bucket_ms"] < found["whole_ms"])
claim("265 ms, and 15 more when cut", [round(each) for each in formula.values()] == [265, 280, 405, 315])
exposed = [result.value("exposed_communication") / result.value("communication") for result in (cut, whole)]
claim(
    "cut, more of the sending hides, and the step is shorter",
    exposed[0] < exposed[1] and found["cut_ms"] < found["whole_ms"],
)
if not any(result.cores_of_others for result in compiled.values()):
    drawn = {name: each.value("profiled_step") for name, each in zip(formula, compiled.values(), strict=True)}
    for each in (found, drawn):
        claim("both are above the formula", all(each[name] > formula[name] for name in formula))
        claim("table and figure are within 15 %", all(abs(each[name] / formula[name] - 1) < 0.15 for name in formula))
    claim("cut, most of the sending hides; whole, nothing", exposed[0] < 0.5 and exposed[1] > 0.85)

# %% [markdown]
# *Numbers in bars count backward programs. Cut, the compiled model sends during its backward pass, as DDP does; as one
# graph, afterwards.*
#
# Cut, the seventh message adds an alpha to the 265 ms of the model that is not compiled. As one graph, one bucket is
# best. On this wire the cuts gain more, as they let messages hide.
#
# <details><summary>How do the times come about?</summary>
#
# Cut, the bias of `fc1` leaves last: 60 + 180 + 25 + 15 = 280 ms. As one graph, seven messages follow the whole
# backward pass: 60 + 180 + 7 · 15 + 60 = 405 ms. One message saves six alphas: 60 + 180 + 15 + 60 = 315 ms.
#
# The layers are in a class with its own `forward`, because PyTorch 2.13 compiles nothing of a bare `nn.Sequential` in
# DDP.
#
# The table has the timed step. The figure shows one more, which also writes down its events. Both are within 15 % of
# the formula, and above it, because it leaves out what really runs: hooks, copies and the optimizer.
#
# </details>
#
# *Takeaway: with one large graph DDP's reducer hides nothing, so leave `optimize_ddp` on, unless you measured that the
# cuts cost more.*
#
# ## 9. Take away ({minutes} minutes)
#
# 1. DDP sends full buckets in a fixed order during the backward pass, and waits once, after it.
# 2. Small buckets pay latency and large ones have an exposed end. Where messages take no time from the cores that
#    compute, alpha, beta and the backward pass tell the best size.
# 3. What holds all gradients back, one huge bucket or one compiled graph, leaves nothing to hide behind.
#
# | if | then |
# |---|---|
# | a step is about as long as one inside `no_sync` | leave the buckets as they are |
# | a long message is exposed, part of its gradients was ready long before | take smaller buckets |
# | many short messages follow each other without a gap | take larger buckets |
# | full buckets wait for the first one | leave `find_unused_parameters` off, if every parameter is used |
# | the bytes alone take longer than the backward pass | use `no_sync`, or send bfloat16 (04b) |
# | sending adds far more than your formula says | it competes with the computation: send less, or leave it cores |
# | you compile | wrap the model in DDP first, as its manual asks, and leave `optimize_ddp` on |
#
# **Ask yourself**
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
# <details><summary>Papers, pages and code</summary>
#
# - Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020: buckets, hooks, no_sync.
#   https://arxiv.org/abs/2006.15704
# - `DistributedDataParallel`:
#   https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html, and how it works:
#   https://docs.pytorch.org/docs/stable/notes/ddp.html (with a section on DDPOptimizer)
# - ResNet-50: He et al., 2015, https://arxiv.org/abs/1512.03385
# - In labkit: `labkit/parallel/small_ddp.py` (yours), `labkit/theory/ddp.py` (the formulas), `launch/ddp_compile.py`
#   (the program of this lab).
#
# </details>
#
# **Next**: lab 5 cuts the model as well as the samples.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("ddp")
