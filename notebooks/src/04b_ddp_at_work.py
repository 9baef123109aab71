# %% [markdown]
# # Lab 4b. DDP at work
#
# This companion of lab 4 has what you meet once DDP trains a model of your own. After it you can
#
# - read DDP's complaint about parameters without a gradient;
# - count what `no_sync` leaves unsent, and write a communication hook that sends half the bytes;
# - compute the smallest bucket that hides, from latency, bandwidth and the backward pass;
# - log when a compiled DDP model sends, and read a compiled backward pass that contains its all-reduces.
#
# You need lab 4. The notebook takes about {core_minutes} minutes. Sections 5 and 6 belong together and need a C++ compiler;
# the others can be read in any order, once the cells above section 1 have run.

# %% tags=["nbval-ignore-output"]
import contextlib
import copy
import logging

import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import doctor, inductor, plots
from labkit.config import require
from labkit.models.chain import LinearChain
from labkit.parallel.ddp import backward_programs, note_order
from labkit.theory import ddp as theory
from labkit.theory import emulated_steps
from labkit.theory.collectives import AlphaBeta
from labkit_course import widgets
from labkit_course.checks import ddp_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="4b")

# %% tags=["parameters"] small={"DIM": 512, "BUCKET_MB": 1.5, "STEPS": 1} points=[[2,512,1.01,1],[3,700,3.0,5],[4,1500,17.0,10]]
RANKS: int = 2  # ranks that share the samples
DIM: int = 1000  # width of the four layers
BUCKET_MB: float = 5.0  # size at which a bucket is sent, in MiB
STEPS: int = 5  # training steps in each run

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="one has nobody to average with, and each compiles for itself")
require("DIM", DIM, at_least=512, because="a weight has to fill the compiler's first bucket of 1 MiB")
layer_mb, bias_mb = 4 * DIM * (DIM + 1) / 2**20, 4 * DIM / 2**20
fills = f"two layers, of {layer_mb:.2f} MiB each with this DIM, fill a bucket, and one does not"
require("BUCKET_MB", BUCKET_MB, float, above=layer_mb + bias_mb, at_most=2 * layer_mb, because=fills)
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

WIDE = {"nproc": RANKS, "dim": DIM, "bucket_mb": BUCKET_MB, "steps": STEPS}
ALL_BYTES = 4 * 4 * (DIM * DIM + DIM)  # all gradients of sections 3 and 6, which compare with this run:
plain = labkit.run("ddp_compile", mode="ddp", **WIDE)


def predict(way: str, **more: bool) -> dict[str, int]:
    """What theory says of a step of the four layers: all-reduces, and the bytes that a rank hands to them."""
    buckets = theory.chain_buckets(DIM, BUCKET_MB, way=way, **more)
    return {"all_reduce_count": len(buckets), "all_reduce_bytes": sum(sum(each.values()) for each in buckets)}


# %% [markdown]
# ## 1. A parameter without a gradient ({minutes} minutes)
#
# What if a parameter gets no gradient? Its bucket never fills, so nobody asks for its all-reduce, and the other
# gradients of the bucket are not averaged, either. DDP notices in the next forward pass. By then your optimizer has taken a step.
#
# Two ranks train one layer that is used and one that is not, in one bucket. Rank 0's samples are ones, and rank 1's
# are threes, so alone the ranks would find 2 and 6 for each number of the used weight's gradient. Commit: what does rank 0 hold after the
# first backward pass? The next cell fails on purpose, and shows in red how that looks.

# %% tags=["commit"]
mine_unused = commit(rank_0_holds=None)
### BEGIN SOLUTION
mine_unused = commit(rank_0_holds=2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --fails
dist.init_process_group()


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


model = torch.nn.parallel.DistributedDataParallel(Forgetful())
samples = torch.full((2, 4), 1.0 + 2 * dist.get_rank())
for step in range(2):
    model(samples).sum().backward()
    print(f"step {step}: each number of the gradient is {model.module.used.weight.grad[0, 0]:g}")

# %%
print(f"Rank 0 holds 2; you said {prediction_text(mine_unused['rank_0_holds'])}.")

# %% [markdown]
# Rank 0 holds its own 2, not the mean, 4, and the ranks' parameters drift apart from here. The indices 2 and 3 are positions in `model.parameters()`: the weight and the bias of `unused`.
# `find_unused_parameters=True` silences this complaint, but it makes DDP walk through the graph in every step, and it
# keeps DDP from putting its buckets into a better order (lab 4, section 5). What the model never uses is better taken
# out, or frozen before DDP wraps the model. The option is for branches that a step may or may not take. If every
# step leaves out the same branch, `static_graph=True` does without the walk: DDP notes in the first step what is unused.
#
# *Takeaway: look for the unused layer before you reach for `find_unused_parameters`.*
#
# ## 2. What `no_sync` sends, and what it leaves ({minutes} minutes)
#
# Three micro-batches make one step, and it is accumulated in three ways:
#
# - *both passes*: the first two run inside `no_sync`, and the last one outside, as in lab 4.
# - *backward alone*: the same, but only the backward passes of the first two are inside.
# - *last one too*: both passes of all three are inside.
#
# The model is so small that all its gradients fit into one bucket. Commit for each way: how many buckets leave a rank in
# the step? And how many of the three ways leave the gradient of one device
# that saw the samples of all ranks? The table says how far each is off, as a part of the right gradient: 0.5 is half of
# its length.

# %% tags=["commit"]
mine_leaves = commit(both_passes=None, backward_alone=None, last_one_too=None)
### BEGIN SOLUTION
mine_leaves = commit(both_passes=1, backward_alone=3, last_one_too=0)
### END SOLUTION

# %% tags=["commit"]
mine_right = commit(ways=None)
### BEGIN SOLUTION
mine_right = commit(ways=2)
### END SOLUTION

# %%
# %%torchrun -n 2 --name synced
from labkit.parallel.ddp import note_order
from labkit.rank import report

dist.init_process_group()
torch.manual_seed(0)  # all ranks draw the same, and each takes its own samples
samples = torch.randn(3, dist.get_world_size(), 4, 8)
for way in ("both_passes", "backward_alone", "last_one_too"):
    alone = nn.Linear(8, 8)  # one device
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    seen = note_order(model)
    for place, inputs in enumerate(samples[:, dist.get_rank()]):
        inside = place < 2 or way == "last_one_too"
        with model.no_sync() if inside and way != "backward_alone" else contextlib.nullcontext():
            loss = model(inputs).square().mean() / 3
        with model.no_sync() if inside else contextlib.nullcontext():
            loss.backward()
    alone(samples).square().mean().backward()
    right, found = alone.weight.grad, model.module.weight.grad
    leave = sum("leaves" in event for event in seen)
    report(**{way: [leave, float((found - right).norm() / right.norm())]})

# %%
leaving = {way: count for way, (count, _) in synced.ranks[0].reported.items()}
off = {way: f"{error:.3f}" for way, (_, error) in synced.ranks[0].reported.items()}
columns = {"yours": mine_leaves, "buckets that leave": leaving, "gradient is off by": off}
print(f"right gradients: 2 ways; you said {prediction_text(mine_right['ways'])}")
pandas.DataFrame(columns).astype(object).fillna("no prediction")

# %% tags=["claim"]
claim("one, three, and none", [*leaving.values()] == [1, 3, 0])
errors = [[error for _, error in rank.reported.values()] for rank in synced.ranks]
claim("the first two ways leave one device's gradient on both ranks", all(max(each[:2]) < 1e-6 for each in errors))
claim("the third leaves another one", all(each[2] > 0.1 for each in errors))

# %% [markdown]
# DDP decides in the forward pass whether the backward pass will send, and nothing tells you that the `with` came too
# late. The gradients do not tell, either: the mean over the ranks of what is averaged already, plus a new gradient, is the
# old average plus the mean of the new. So the second way is right, and sends three times as often. The third sends nothing, and each rank keeps the gradient of its own
# samples. In a script of your own, count the messages of one step with `torch.profiler`.
#
# *Takeaway: the forward pass belongs inside `no_sync`, too, and the last micro-batch outside.*
#
# ## 3. Fewer bytes: a communication hook ({minutes} minutes)
#
# Gradients are noisy: another batch would give others. So it often does no harm to round them for the journey, and DDP
# takes a **communication hook**, a function that sends a bucket in its own way:
#
# - `bucket.buffer()` holds the bucket's gradients, flattened into one tensor.
# - `state` is what you hand over at registration; here it is None.
# - The hook asks for the all-reduce and returns a **future**, a promise of the result, without waiting for it.
#   `handle.get_future()` is one, and `.then(f)` makes a new one, whose result is what `f` returns. `f` gets the old
#   future, and its `value()` is a list of the tensors that arrived.
# - With a hook DDP does not divide by the number of ranks, so the hook has to.
#
# ### Exercise 1: send half (••, {minutes} minutes)
#
# Write a hook that sends a bucket in bfloat16. The future's result is the mean over the ranks in float32. You may divide
# before you send or after; PyTorch's own hooks divide before, since in float16 the sum could overflow. The check runs
# on two real ranks, then on three.
#
# <details><summary>Hint 1</summary>
#
# Three steps: a copy in bfloat16, divided; an asynchronous all-reduce of it; a future that makes float32 of what came.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()` is a copy: send it.
#
# </details>
# <details><summary>Hint 3</summary>
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
verdict_hook = checks.half_hook(half_hook)
# PyTorch's own, in a lambda: by its name DDP would refuse it without a GPU.
hook = half_hook if verdict_hook.ok else lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
verdict_hook

# %% [markdown]
# `register_comm_hook` gives a hook to a DDP model. The next cell does so with yours, or with PyTorch's as long as yours is
# open, and compares the gradient with one device's.

# %% tags=["nbval-ignore-output"]
# %%torchrun -n 2 --use hook --name hooked
from labkit.rank import report

dist.init_process_group()
torch.manual_seed(0)  # all ranks draw the same, and each takes its own samples
samples, alone = torch.randn(dist.get_world_size(), 32, 8), nn.Linear(8, 8)
model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
model.register_comm_hook(None, hook)
model(samples[dist.get_rank()]).square().mean().backward()
alone(samples).square().mean().backward()
right, found = alone.weight.grad, model.module.weight.grad
report(off=float((found - right).norm() / right.norm()))

# %% tags=["nbval-ignore-output"]
print(f"The gradient is off by {hooked.ranks[0].reported['off']:.2%}.")

# %% tags=["claim"]
claim("rounding costs less than a hundredth", all(1e-4 < rank.reported["off"] < 0.01 for rank in hooked.ranks))

# %% [markdown]
# PyTorch ships such hooks: `default_hooks` has `bf16_compress_hook`
# and others. Case `bf16` registers that one for a network of four layers, each `DIM` wide. DDP plans its buckets by the
# float32 bytes, as it does without a hook: from the last parameter to the first, a layer's bias before its weight, it closes a bucket once that holds `BUCKET_MB`, here 5 MiB.
# Commit: how many all-reduces does a step make, and how many bytes does a rank hand to them?

# %% tags=["commit"]
mine_half = commit(all_reduce_count=None, all_reduce_bytes=None)
### BEGIN SOLUTION
mine_half = commit(all_reduce_count=2, all_reduce_bytes=ALL_BYTES // 2)
### END SOLUTION

# %% tags=["summary"]
bf16 = labkit.run("ddp_compile", mode="ddp", case="bf16", **WIDE)
print(
    f"in float32: {plain.value('all_reduce_count')} all-reduces of {plain.value('all_reduce_bytes'):,} bytes together"
)
plots.comparison_table(bf16, predict("eager", compressed=True), yours=mine_half)

# %% tags=["claim"]
claim("as many buckets", bf16.value("all_reduce_count") == plain.value("all_reduce_count"))
claim("half the bytes", 2 * bf16.value("all_reduce_bytes") == plain.value("all_reduce_bytes"))

# %% [markdown]
# There are as many buckets, and half as many bytes. The price is precision: bfloat16 keeps 8 significant bits, so each
# number is off by up to 0.4 %, and each addition on the way rounds once more. Whether your training minds
# is not settled by one gradient: train some hundred steps with the hook and without it, and compare the losses.
#
# *Takeaway: a hook changes what a bucket costs on the wire, and takes over the division.*
#
# ## 4. The smallest bucket that hides ({minutes} minutes)
#
# Larger buckets mean fewer messages and less latency. But the last bucket leaves when the backward pass is over, so
# nothing hides it, and the larger it is the longer everybody waits. The best size is therefore about the smallest whose
# messages still keep up with the backward pass.
#
# ### Exercise 2: how small may it be? (•, {minutes} minutes)
#
# All gradients have `total_bytes`, in buckets of b bytes each. A message takes `alpha_s`, and `beta_s_per_byte` for each
# of its bytes. Messages travel one after the other beside the arithmetic, as on a GPU. Return the b with which all of
# them together take as long as the backward pass, and `float("inf")` where no b does, however large.
#
# <details><summary>Hint</summary>
#
# There are `total_bytes / b` messages. Their bytes take `total_bytes * beta_s_per_byte` with every b, and what that
# leaves of the backward pass is for the latencies. And if it leaves nothing?
#
# </details>


# %%
def smallest_bucket(total_bytes: float, backward_s: float, alpha_s: float, beta_s_per_byte: float) -> float:
    ### BEGIN SOLUTION
    room = backward_s - total_bytes * beta_s_per_byte
    return total_bytes * alpha_s / room if room > 0 else float("inf")
    ### END SOLUTION


# %%
verdict_smallest = checks.smallest_bucket(smallest_bucket)
smallest_bytes = smallest_bucket if verdict_smallest.ok else theory.smallest_bucket_bytes
verdict_smallest

# %% [markdown]
# **An example.** BERT-large has 340 million parameters, so its gradients in bfloat16 take 680 MB. The backward pass takes
# about 4 operations for each parameter and token; with 4096 tokens a rank at 400 · 10¹² operations a second that is
# 13.9 ms. On the 8 H100s of one host beta is 2 · 7/8 / (450 · 10⁹) s a byte (lab 0's reference cluster), so all bytes
# take 2.6 ms. For alpha, which is on no data sheet, take 20 µs. Then buckets from 1.2 MB on keep up, and DDP's default
# of 25 MiB is fine.
#
# Now take 64 such GPUs in 8 hosts, and let the ring leave each host through a single network card of 50 GB/s. Then beta
# is 2 · 63/64 / (50 · 10⁹) s a byte. Take 100 µs for alpha, since a message has many hops. Commit: how many tokens must a
# rank exceed, so that there is any size of bucket with which the messages keep up?

# %% tags=["commit"]
mine_tokens = commit(tokens=None)
### BEGIN SOLUTION
mine_tokens = commit(tokens=680e6 * (2 * 63 / 64 / 50e9) * 400e12 / (4 * 340e6))
### END SOLUTION

# %%
INSIDE, ACROSS = (20e-6, 2 * 7 / 8 / 450e9), (100e-6, 2 * 63 / 64 / 50e9)  # alpha and beta
cases = {"8 GPUs, 4096 tokens": (INSIDE, 4096), "64 GPUs, 4096 tokens": (ACROSS, 4096)}
cases["64 GPUs, 16,384 tokens"] = (ACROSS, 16384)
counts_of_buckets = sorted({round(1.15**power) for power in range(56)})  # from 1 to 2,180
smallest_mb, multiples = {}, {}
for case, (network, tokens) in cases.items():
    backward_s = 4 * 340e6 * tokens / 400e12
    smallest_mb[case] = smallest_bytes(680e6, backward_s, *network) / 1e6
    multiples[case] = []
    for count in counts_of_buckets:
        ready_s = [backward_s * (place + 1) / count for place in range(count)]
        takes_s = [AlphaBeta(*network).seconds(680e6 / count)] * count
        multiples[case].append(theory.arrivals(ready_s, takes_s)[-1] / backward_s)
plots.exposure_by_bucket_size([680 / count for count in counts_of_buckets], multiples, smallest_mb)
needed = 680e6 * ACROSS[1] * 400e12 / (4 * 340e6)
print(f"more tokens than {needed:,.0f}; you said {prediction_text(mine_tokens['tokens'])}")

# %% tags=["claim"]
inside, few, many = smallest_mb.values()
claim("1.2 MB", round(inside, 1) == 1.2)
claim("no bucket keeps up with 4096 tokens", few == float("inf") and min(multiples["64 GPUs, 4096 tokens"]) > 1.9)
claim("with four times the tokens from about 2.4 MB on", 2.2 < many < 2.6)

# %% [markdown]
# *The backward pass of BERT-large by size of bucket, as theory says, in multiples of its arithmetic. A dot is exercise
# 2's size. Smaller buckets pay for latency, and larger ones for the last message.*
#
# On 64 GPUs the bytes alone take 26.8 ms, as long as the backward pass of about 7,900 tokens. With 4096 tokens the
# backward pass takes about twice as long as its arithmetic at best. With 16,384 a bucket of 2.4 MB hides nearly all. Where a ring
# runs through each of a host's eight cards, as NCCL can do it, the bytes take an eighth of that time (lab 0b).
#
# **Explore.** Left, a predicted backward pass; right, the same for other sizes of bucket. `25 MiB*` is DDP's default,
# whose first bucket closes at 1 MiB. *run it* emulates the chosen size in slow motion: two real ranks wait as long as
# network and arithmetic would take. The gradients take 1.66 MB, beta is 0.5 ns a byte, and the arithmetic takes 5 ms. With an
# alpha of 100 µs a bucket of 0.1 MiB is best. Before you turn alpha to 400 µs: which size will be best, and what is wrong
# with the sizes at both ends?
#
# <details><summary>Answer</summary>
#
# 1 MiB; the default makes the same two buckets here. Exercise 2 gives 0.16 MB, and 1 MiB is the next size to choose from.
# (With 100 µs it gives 0.04 MB.) A message for each gradient takes longer
# than the arithmetic, and one message for all starts when nothing is left to hide it.
#
# </details>

# %%
widgets.BucketExplorer()

# %% [markdown]
# *Takeaway: if the bytes alone take longer than the backward pass, no bucket hides them. More tokens do.*
#
# ## 5. Where the compiler cuts ({minutes} minutes)
#
# By default `torch.compile` cuts a DDP model where buckets end (lab 4). The part that does it, DDPOptimizer, plans
# buckets of its own from `bucket_cap_mb`: from the last layer on, a bucket closes once it holds that size, but the
# first one once it holds 1 MiB. The reducer, which still sends the buckets, closes every one at that size; only if none is given, its first closes at 1 MiB.
# So there are two plans. DDPOptimizer's decides which backward program computes a
# gradient, and the reducer's with which others the gradient travels.
#
# Take four layers of 600 × 600, `fc1` to `fc4`, each of 1.38 MiB, and `bucket_cap_mb=2`. Commit: how many backward
# programs are there, and how many of them must end before the first bucket can leave?

# %% tags=["commit"]
mine_plan = commit(programs=None, first_leaves_after=None)
### BEGIN SOLUTION
mine_plan = commit(programs=3, first_leaves_after=2)
### END SOLUTION

# %% [markdown]
# The next cells compile the model with inductor, PyTorch's compiler, and log its second backward pass, in which the
# reducer's plan is final. Each program is followed by the gradients that it completes and the buckets that leave.


# %%
def note_programs(loss: torch.Tensor, seen: list[str]) -> None:
    """Note in `seen` when each compiled backward program of this loss begins."""
    for program in backward_programs(loss):
        program.register_prehook(lambda _: seen.append("program:"))


# %%
def compiled_backward(size_mb: float | None) -> list[str]:
    """Compile a DDP model, and return the log of its second backward pass."""
    torch._logging.set_logs(all=logging.ERROR)  # no warnings about DDP's marks for profilers
    model = DistributedDataParallel(LinearChain(600), bucket_cap_mb=size_mb)
    seen, compiled = note_order(model), torch.compile(model)
    for _ in range(2):
        loss = compiled(torch.ones(8, 600)).sum()
        note_programs(loss, seen)
        seen.clear()
        loss.backward()
    torch.compiler.reset()
    return seen


# %%
# %%torchrun -n 2 --name logged --use note_programs,compiled_backward
import torch._dynamo

from labkit.rank import report

dist.init_process_group()
for size_mb in (1, 2, 25, None):
    report(**{f"{size_mb} MiB" if size_mb else "left out": compiled_backward(size_mb)})
with torch._dynamo.config.patch(optimize_ddp=False):
    report(**{"2 MiB, not cut": compiled_backward(2)})


# %%
def left_after(events: list[str]) -> list[int]:
    """For each bucket, how many programs had run when it left."""
    leaves = [place for place, event in enumerate(events) if "leaves" in event]
    return [events[:place].count("program:") for place in leaves]


logs = logged.ranks[0].reported
for name, events in logs.items():
    print(f"{name}:", " ".join(events).replace("program:", "\n  program:"))
said = " and ".join(map(prediction_text, mine_plan.values()))
print(f"\n2 MiB, programs, and how many run before the first bucket leaves: you said {said}")
plans = {name: [events.count("program:"), left_after(events)] for name, events in logs.items()}
pandas.DataFrame(plans, index=["programs", "buckets leave after"]).T.rename_axis("bucket_cap_mb")

# %% tags=["claim"]
programs = {name: count for name, (count, _) in plans.items()}
layer = 4 * (600 * 600 + 600)
as_planned = {f"{size} MiB": len(theory.bucket_plan([layer] * 4, size, 1)) for size in (1, 2, 25)}
as_planned |= {"left out": as_planned["25 MiB"], "2 MiB, not cut": 1}
claim("a program for each bucket of DDPOptimizer's plan, and one where nothing is cut", programs == as_planned)
left = {name: after for name, (_, after) in plans.items()}
claim("told 2 MiB, the first bucket waits for the second program", left["2 MiB"][0] == 2)
claim("five buckets for four layers", len(left["1 MiB"]) == 5)
claim("told 1 MiB, or nothing, a bucket leaves after the first", left["1 MiB"][0] == left["left out"][0] == 1)
claim("told 25 MiB, one bucket leaves at the end", left["25 MiB"] == [programs["25 MiB"]])
claim("uncut, all leave after the one program", set(left["2 MiB, not cut"]) == {1})
claim("all ranks log the same", all(rank.reported == logs for rank in logged.ranks))

# %% [markdown]
# With 2 MiB, DDPOptimizer cuts between `fc4` and `fc3`, but the reducer closes *all* its buckets at 2 MiB. So the
# gradients of `fc4` have to wait for the second program, and the first cut gains nothing. Even the default, 25 MiB, has
# this effect if you write it out: all gradients travel in one bucket, at the end. Left out, the reducer's first bucket
# closes at 1 MiB, as DDPOptimizer's does. And without cuts every bucket leaves after the only program. Within a program
# the compiler chooses the order: with 1 MiB each weight comes before its bias, which travels with the next layer, so four layers
# make five buckets.
#
# Is it enough that the first bucket leaves early? The network runs under emulation: forward pass 80 ms, backward 320, alpha 20
# ms a message, all bytes 160, so 40 for each layer. Commit: by the logs, how long does a step take with 1 MiB, with 2 MiB,
# and with the size left out? The logs say what travels in the last bucket: in two of the cases `fc1.bias` alone. Neglect its bytes,
# but not its alpha.

# %% tags=["commit"]
mine_steps = commit(one_ms=None, two_ms=None, left_out_ms=None)
### BEGIN SOLUTION
mine_steps = commit(
    one_ms=400 + (20 + 40) + 20,  # fc1 after the last program, and its bias alone
    two_ms=320 + 2 * (20 + 80) + 20,  # two buckets of two layers from the second program's end, and a bias
    left_out_ms=400 + 20 + 3 * 40,  # three layers after the last program
)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
FOUR = {"dim": 600, "layers": 4}
device = emulated_steps.ddp_hardware(RANKS, alpha_ms=20, bytes_ms=160, forward_ms=80, backward_ms=320, **FOUR)
# With labkit's 25, the default, no size is given to DDP.
ways = {"1 MiB": {"bucket_mb": 1.0}, "2 MiB": {"bucket_mb": 2.0}, "left out": {"bucket_mb": 25.0}}
CUT = {"nproc": RANKS, "mode": "ddp", "graph": "split", "batch": 2, "steps": 1, "emulate": device}
cut_steps = labkit.compare("ddp_compile", ways, rounds=1, timeline=True, **CUT, **FOUR)
_ = plots.timelines_by_run(cut_steps)
step_ms = [run.value("step_ms") for run in cut_steps.values()]
by_size = {"yours": [*mine_steps.values()], "measured": step_ms}
pandas.DataFrame(by_size, index=[*ways]).astype(float).round().astype(object).fillna("no prediction")

# %% tags=["claim"]
disturbed = any(run.cores_of_others for run in cut_steps.values())
off = [abs(ms / by - 1) for ms, by in zip(step_ms, (480, 540, 540), strict=True)]
claim("480, 540 and 540 ms", max(off) < 0.1 or disturbed)
claim("1 MiB is the fastest", step_ms[0] < 0.95 * min(step_ms[1:]))
claim("the rule says 0.7 MiB", round(theory.smallest_bucket_bytes(4 * layer, 320, 20, 40 / layer) / 2**20, 1) == 0.7)
messages = [run.value("all_reduce_count") for run in cut_steps.values()]
claim("the buckets of the logs", messages == [len(left[name]) for name in ways])

# %% [markdown]
# *The same network in three sizes of bucket, compiled and cut, emulated. With 1 MiB the least is left to send after the
# last program.*
#
# Each program computes 80 ms for a layer, after a forward pass of 80. So by the logs
#
# - with 1 MiB `fc1` leaves when the last program ends, after 400 ms, takes 20 + 40, and its bias 20 more: 480 ms;
# - with 2 MiB the first two layers leave after 320 ms; two buckets of 20 + 80 and a bias of 20 follow each other: 540 ms;
# - with the size left out three layers leave after 400 ms, in one bucket of 20 + 3 · 40: 540 ms.
#
# So an early first bucket is not enough: what leaves after the last program is exposed. The smallest of the three sizes
# is the best, and exercise 2's formula, which says 0.7 MiB here, makes the same buckets.
#
# *Takeaway: a bucket leaves with the program that completes its last gradient, so few bytes should wait for the last one.*
#
# ## 6. All-reduces inside the program ({minutes} minutes)
#
# Instead of cutting the graph where messages start, one could put the messages into it. Then the whole backward pass is
# one text, in which you can read and check when each message starts.
#
# PyTorch has the parts for that, but **this path has been abandoned**. They are still in PyTorch 2.13, experimental and off
# by default, but torchtitan, PyTorch's own trainer, dropped them in 2025, and the work goes on with FSDP's collectives in
# the graph (lab 4c). What you learn here about reading a program holds there, too: inductor, the compiler that turns graphs
# into programs, fuses the eight all-reduces of our network into buckets, and moves each wait down to the first line that
# uses something of its bucket.
#
# <details><summary>The parts that labkit switches on</summary>
#
# The Python reducer (`optimize_ddp="python_reducer"`) gives each parameter a hook, written in Python, that divides the
# gradient, asks for an all-reduce and waits. Compiled autograd writes down the whole backward pass, hooks included, as one
# graph. A pass of inductor's fuses and moves. The settings are in `labkit/parallel/ddp.py`.
#
# </details>
#
# Inductor's first bucket closes once it holds 1 MiB, and each later one once it holds `BUCKET_MB`, here 5 MiB. Each
# weight takes 3.8 MiB. Commit: how many
# all-reduces does a step make? Compiling takes some seconds on each rank.

# %% tags=["commit"]
mine_fused = commit(all_reduce_count=None)
### BEGIN SOLUTION
mine_fused = commit(all_reduce_count=3)
### END SOLUTION

# %%
fused = labkit.run("ddp_compile", fuse="coalesced", **WIDE)
plots.comparison_table(fused, {"all_reduce_count": predict("compiled")["all_reduce_count"]}, yours=mine_fused)

# %% tags=["claim"]
extra = fused.value("all_reduce_count") - plain.value("all_reduce_count")
claim("one bucket more than with the reducer", extra == 1)

# %% [markdown]
# There is one bucket more than in section 3, where the first one closed at 5 MiB as well. Here `fc4.weight`, larger than
# 1 MiB, travels alone.
#
# Below is what inductor wrote for the backward pass of rank 0. Only lines that compute, send or wait are shown, and the
# `return`. `bufN` are tensors that the program makes, and `argN` its inputs. Beside them stands what they hold, as far
# as labkit can tell. Point at a line that waits, or reach it by Tab, and its request and what hides it are marked.

# %% tags=["nbval-ignore-output"]
plots.backward_program(fused)

# %% [markdown]
# Read it from the top. `extern` lines are GEMMs, and `kernel` lines are loops that inductor wrote itself, such as the division
# by the number of ranks: it works in place, and the memory of `buf2` is called `buf3` from then on. A line that
# asks for a bucket returns at once, and the GEMMs below it run while the bucket travels. All waits stand at the
# end, since nothing but the `return` uses a gradient. The last bucket has nothing left to hide behind.

# %% tags=["claim"]
read = inductor.find_buckets(fused.ranks[0].artifact("code"))
alone = not read[-1].hidden_by and all(each.hidden_by for each in read[:-1])
claim("the last bucket has nothing left to hide behind", alone)

# %% [markdown]
# A compiler that moves waits must not make a mistake. Whoever reads a buffer in flight may find half a sum, whoever writes
# to it spoils the sum of the others, and nothing raises an error.
#
# ### Exercise 3: find the early use (••, {minutes} minutes)
#
# Write the reader that finds such a mistake. `lines` are the lines of a program in order. Each has a `number`, a `kind`
# (`"collective"`, `"wait"`, and others) and the tuple `buffers`, the names that it mentions. Return the numbers of the
# lines that mention a buffer in flight, other than to wait for it. A second request for such a buffer is one of them, and one
# wait ends both.
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
# Try it on the real program, as it is and without its first wait.

# %% tags=["nbval-ignore-output"]
lines = inductor.parse_lines(fused.ranks[0].artifact("code"))
first_wait = next(line for line in lines if line.kind == "wait")
for which, program in {
    "as it is": lines,
    "without its first wait": [each for each in lines if each is not first_wait],
}.items():
    print(f"{which}: {early_uses(program)}")

# %% [markdown]
# Without the wait the `return`, the last line of the listing, would hand out a sum that may not be there yet.
#
# Are the numbers right, then? The next cell trains with DDP, with two micro-batches and `no_sync`, plain and compiled
# this way, in several buckets. It compares outputs, gradients and parameters with those of one device.

# %%
print(labkit.check("ddp_compile", nproc=RANKS, dim=512, bucket_mb=1.5, case="cpu_no_sync").verdict_text)

# %% [markdown]
# Do not expect this way to be faster on a CPU: its GEMMs are library calls with a compiler or without, and the reducer
# overlaps as well.
#
# *Takeaway: what a compiler has moved can be read, and whoever goes through the names of buffers finds a line that is too
# early, unless one memory has two names.*
#
# ## 7. Take away ({minutes} minutes)
#
# 1. DDP counts on a gradient for every parameter in every step; leave out what the model does not use.
# 2. Hooks, `no_sync` and the size of buckets change what is sent, and a count of one step's all-reduces and bytes shows it.
# 3. The compiler cuts the model by a plan of its own, and a bucket leaves with the program that completes its last
#    gradient.
#
# | if | then |
# |---|---|
# | DDP complains about unused parameters | freeze or remove them before you try `find_unused_parameters` |
# | bandwidth is the limit, and no bucket hides its messages | more tokens a rank, or a bfloat16 hook for float32 gradients |
# | a compiled DDP hides little | log its programs and buckets, and try other sizes |
#
# **Ask yourself**
#
# <details><summary>1. Your hook returns the sum of all ranks. What does training see?</summary>
#
# Gradients that are too large by the number of ranks, on all ranks alike. DDP does not divide where a hook is
# registered.
#
# </details>
# <details><summary>2. A model has 340 million parameters, and no bucket hides its messages. You double the batch of a rank. What changes?</summary>
#
# The backward pass takes twice as long, and the bytes are the same. If the bytes alone fit into it now, some size of bucket may hide most of them.
#
# </details>
# <details><summary>3. A compiled program has all its waits at the end. Is that wrong?</summary>
#
# No: only the optimizer reads the gradients. It would be wrong if a line before its wait used one.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Communication hooks: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
# - DDPOptimizer: https://docs.pytorch.org/docs/stable/notes/ddp.html
# - Compiled autograd: https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html. PyTorch's trainer
#   dropped it in https://github.com/pytorch/torchtitan/pull/1939, and replicates a model with FSDP's code since:
#   https://github.com/pytorch/pytorch/pull/158207
# - BERT-large: Devlin et al., 2018, https://arxiv.org/abs/1810.04805
# - In labkit: `labkit/parallel/ddp.py` (DDP and the compiler), `labkit/inductor` (the reader of programs). PyTorch's
#   own fusion is short enough to read: `torch/_inductor/fx_passes/ddp_fusion.py`.
#
# </details>

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("ddp_at_work")
