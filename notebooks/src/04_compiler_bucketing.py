# %% [markdown]
# # Lab 4. DDP and the compiler: buckets, waits, and what hides
#
# In data-parallel training every rank holds the whole model and computes gradients from its own samples. Before the
# optimizer may step, the gradients must be averaged over the ranks. That takes an all-reduce.
#
# One all-reduce for each gradient costs too many messages. One for all gradients starts too late. So gradients travel
# in **buckets**. In this lab you predict the buckets, count them, and read the program that a compiler makes of them.
#
# You need lab 2's words: exposed communication and time line. You need no GPU, but `torch.compile` needs a C++
# compiler. If the table below says that there is none, mend that first: the cells that compile would stop with one
# line that says so.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import pandas

import labkit
from labkit import doctor, inductor, plots
from labkit.checks import ddp as checks
from labkit.config import require
from labkit.theory import ddp as theory

doctor.show()

# %% [markdown]
# The parameters of this notebook. The network is a chain of four linear layers, each `DIM` wide, with biases.
# Change the values if you like: the next cell refuses those that cannot work. The text speaks of the values below.

# %% tags=["parameters"]
RANKS: int = 2  # ranks that share the samples
DIM: int = 1000  # width of the four layers
BUCKET_MB: float = 5.0  # size at which a bucket is sent, in MiB
STEPS: int = 3  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=2, because="one rank has nobody to average with")
require("DIM", DIM, at_least=1, because="a layer needs a width")
require("BUCKET_MB", BUCKET_MB, float, above=0, because="a bucket has to hold something")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")

SETUP = {"nproc": RANKS, "dim": DIM, "bucket_mb": BUCKET_MB, "steps": STEPS}

# %% [markdown]
# ## What a message costs
#
# A message has two costs. Each one takes a **latency**, called alpha: ranks wake up, agree and wait for each other.
# And each byte takes its time, called beta. So `n` messages of `b` bytes in all take
#
# `n * alpha + b * beta`
#
# This is Hockney's model of 1994. It leaves out much, and still decides most questions about messages.
#
# ### Exercise 1: two measurements, two numbers
#
# A message of `small_bytes` took `small_s` seconds, one of `large_bytes` took `large_s`. What are alpha, in seconds,
# and beta, in seconds for each byte? Return `(alpha, beta)`.


# %%
def fitted(small_bytes: int, small_s: float, large_bytes: int, large_s: float):
    ### BEGIN SOLUTION
    beta = (large_s - small_s) / (large_bytes - small_bytes)
    return small_s - beta * small_bytes, beta
    ### END SOLUTION


# %%
checks.alpha_beta(fitted)

# %% [markdown]
# Two points are at the mercy of chance. Let us measure seven sizes in fifteen rounds. Whatever disturbs a message
# makes it slower, so we take the fastest round of each size, and the line that fits these best.

# %% tags=["nbval-ignore-output"]
messages = labkit.run("all_reduce", nproc=RANKS)
ax = plots.messages(messages)

# %% [markdown]
# *Time of one all-reduce, on logarithmic axes. Small messages lie near the horizontal dotted line, alpha: they cost
# their latency, whatever their size. Large ones pay by the byte.*
#
# Where the two costs are equal, a message has alpha / beta bytes. Below this size a rank mostly waits for latency. The
# bias of one of our layers is far below.
#
# Now the same 4 MiB, cut into more and more messages.

# %% tags=["nbval-ignore-output"]
ax = plots.pieces(messages)

# %% [markdown]
# *The same bytes, in 1 to 64 messages. The dashed lines were predicted from the line above. Measured anew, so 4 MiB may
# differ from above.*
#
# The bytes cost the same in all of them. What grows is the number of latencies. That is the first half of the
# question: few large messages are better than many small ones.
#
# ## Buckets in the order of readiness
#
# The second half is time. The backward pass runs from the last layer to the first, so the last layer's gradients are
# ready early. Whoever waits for all of them sends nothing while the rank computes.
#
# Buckets do both. Gradients fill a bucket in the order in which they become ready. Once it holds `bucket_mb` MiB, or
# more, it is closed and sent, while the backward pass goes on. The first bucket closes at 1 MiB already, so that the
# first message leaves early. What is left at the end is a bucket too.
#
# ### Exercise 2: how many buckets?
#
# `sizes` are the bytes of the gradients in the order of readiness. How many buckets do they make? The first bucket
# closes at 1 MiB, whatever `bucket_mb` is. A MiB has 2**20 bytes.


# %%
def bucket_count(sizes: list[int], bucket_mb: float) -> int:
    ### BEGIN SOLUTION
    count, held, limit = 0, 0, 2**20
    for size in sizes:
        held += size
        if held >= limit:
            count, held, limit = count + 1, 0, bucket_mb * 2**20
    return count + (held > 0)
    ### END SOLUTION


# %%
checks.bucket_count(bucket_count)

# %% [markdown]
# Our chain has two kinds of gradients. This is what your function says of them, in the order of a compiled backward
# pass, each weight before its bias:

# %%
gradients = [size for _, size in theory.chain_gradients(DIM, "compiled")]
print(f"{len(gradients)} gradients of {max(gradients):,} or {min(gradients):,} bytes")
for size in (1, 5, 25, 100):
    print(f"buckets of {size:>3} MiB: {bucket_count(gradients, size)}")

# %% [markdown]
# Note what the rule does not promise. A bucket may become much larger than `bucket_mb`: it closes after the gradient
# that fills it, not before. Some networks and some memories want a real bound.
#
# ### Exercise 3: meet a bound
#
# Cut the gradients into buckets of at most `limit` bytes. Keep their order, and use as few buckets as you can. Only a
# gradient that is larger than the limit may break it, in a bucket of its own. A bucket is a list of positions in
# `sizes`.


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
checks.bounded_buckets(bounded_buckets)

# %% [markdown]
# ## DDP's own reducer
#
# `DistributedDataParallel` (DDP) has a *reducer*, written in C++. It hangs a hook on every parameter. When autograd
# has finished a gradient, the hook notes it; when a bucket is full, the reducer starts its all-reduce and returns at
# once. At the end of the backward pass it waits for all of them.
#
# In the first step the reducer does not know the order of readiness, so it sends everything in one bucket. It notes
# the order, and *rebuilds* its buckets for all later steps. One more thing differs from the rule above: the first
# bucket is a small one only where you leave `bucket_mb` at its default of 25. Autograd has a bias ready before its
# weight.


# %%
def predict(way: str, bucket_mb: float = BUCKET_MB, **more: bool) -> dict[str, int]:
    buckets = theory.chain_buckets(DIM, bucket_mb, way=way, **more)
    sent = sum(sum(bucket.values()) for bucket in buckets)
    return {"all_reduce_count": len(buckets), "all_reduce_bytes": sent}


eager = labkit.run("ddp_compile", mode="ddp", timeline=True, **SETUP)
plots.table(eager, predict("eager"))

# %% [markdown]
# *All-reduces of one step and the bytes that a rank hands to them, on two real ranks. The eight gradients travel in
# two buckets.*

# %% [markdown]
# ## What the compiler sees
#
# `torch.compile` makes one program of many operations. But it cannot move what it does not see. The reducer's hooks
# are C++ code, and they run inside autograd. Two changes open them:
#
# - **The Python reducer.** Each parameter gets a hook in Python: divide the gradient by the number of ranks, ask for
#   an all-reduce, wait for it. These are operators like any other, so they can be traced.
# - **Compiled autograd.** The backward pass is not run node by node. Autograd first writes down all that it would do,
#   hooks included, as one graph, and hands the graph to a compiler.
#
# So programs are made at these moments:
#
# | when | what is compiled |
# |---|---|
# | first forward pass | the forward pass, by `torch.compile` |
# | first backward pass | the backward pass and its communication, by compiled autograd |
# | first backward pass that finds gradients | the same once more: now it must add to them |
# | later | nothing: the programs are there |
#
# The graph of our backward pass has eight gradients, so at first it has eight all-reduces, each with its wait. Then a
# step of inductor, the compiler, fuses them into buckets. Such a step is called a pass. This one uses the rule of
# exercise 2, with the small first bucket always. Compiling takes some seconds on each rank.
#
# There are two ways to fuse. `coalesced` hands the list of a bucket's gradients to one call. `concat` copies them into
# one flat tensor, sends that, and cuts it up again.

# %%
coalesced = labkit.run("ddp_compile", fuse="coalesced", timeline=True, **SETUP)
plots.table(coalesced, predict("compiled"))

# %% [markdown]
# *One bucket more than with the reducer. The compiler's first one closes at 1 MiB already, so `fc4.weight` travels
# alone: a compiled backward pass computes the gradient of a weight before that of its bias.*
#
# Here is what inductor wrote for the backward pass of rank 0. Only lines that compute, send or wait are shown. Open
# the fold below them for the whole program.

# %% tags=["nbval-ignore-output"]
inductor.Listing(coalesced.ranks[0].kept("code"))

# %% [markdown]
# Read it from the top. `extern` lines are products of matrices, `kernel` lines are loops that inductor wrote itself:
# here they add up biases' gradients and divide by the number of ranks. A yellow line asks for a bucket and returns at
# once. The products below it can run while the bucket travels. All waits stand at the end.

# %% tags=["nbval-ignore-output"]
ax = plots.buckets(coalesced)

# %% [markdown]
# *Left: the gradients of each bucket, as wide as their bytes. Right: the lines between its request and its waits; a
# dot is compute that hides it. The last bucket has nothing left to hide behind.*
#
# Now `concat`.

# %%
concat = labkit.run("ddp_compile", fuse="concat", **SETUP)
plots.table(concat, predict("compiled"))

# %% tags=["nbval-ignore-output"]
inductor.Listing(concat.ranks[0].kept("code"))

# %% [markdown]
# The same buckets and the same bytes. There is one buffer and one wait for each bucket, and more kernels: they copy
# gradients into the flat buffer. While they are copied, the gradients of a bucket are in memory twice. With
# `coalesced` the copying is left to the backend: gloo copies inside its call, NCCL sends the tensors as a group.
#
# ## Where the waits go
#
# A collective that was asked for is not done. Its buffer is *in flight* until a wait for this buffer returns. Who
# reads it before finds half a sum; who writes to it spoils the sum of the others. Nothing raises an error.
#
# The Python reducer waits right after it asked, which is safe and hides nothing. A second pass of inductor,
# `schedule_comm_wait`, moves each wait down to the first line that uses the gradient. In our program nothing uses a
# gradient but the `return`, so all waits went to the end. A program that adds to gradients that are already there has
# its waits before these additions. labkit's `--check buckets` compiles both.
#
# ### Exercise 4: find the missing wait
#
# Write the reader that finds such a mistake. `lines` are the lines of a program in order. Each has a `number`, a
# `kind` (`"collective"`, `"wait"`, and others) and the tuple `buffers`, the names that it mentions. Return the numbers
# of the lines that mention a buffer in flight, other than to wait for it.


# %%
def early_uses(lines: list[inductor.Line]) -> list[int]:
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
# Try it on the real program, as it is and without its first wait. The line that it names is the `return`.

# %% tags=["nbval-ignore-output"]
lines = inductor.read(coalesced.ranks[0].kept("code"))
first_wait = next(line for line in lines if line.kind == "wait")
print("as it is:             ", early_uses(lines))
print("without its first wait", early_uses([line for line in lines if line is not first_wait]))

# %% [markdown]
# ## Does it hide?
#
# One profiled step of each, drawn as in lab 2. First DDP's own reducer.

# %% tags=["nbval-ignore-output"]
ax = plots.timeline(eager)

# %% [markdown]
# *A backward pass with the reducer. Bucket 0 leaves when half of the layers are done and travels while the others
# compute. A bucket may outlast the layers, so that its end is exposed, too. Bucket 1 leaves last, when little or nothing
# is left to hide it.*
#
# Now the compiled program.

# %% tags=["nbval-ignore-output"]
ax = plots.timeline(coalesced)

# %% [markdown]
# *The compiled backward pass. It is one program, so its bars bear no layer's name: `root` is the whole model. The
# first bucket leaves earlier. How much of it hides changes from run to run; the last one is exposed.*
#
# A bar of communication lasts until the slower rank has arrived, so it says as much about the other rank as about the
# bytes. Two buckets may travel at once, drawn one above the other: gloo has two threads that send.

# %% tags=["nbval-ignore-output"]
ax = plots.exposed({"eager": eager, "compiled": coalesced})

# %% [markdown]
# *Communication of one step, mean over the ranks. Both hide a part; which of the two hides more changes from run to
# run.*
#
# Do not expect the compiler to win here. Products of matrices are library calls in both, and the reducer overlaps as
# well. What is gained is sight: the order of a compiled step is a text that you can read, check and change.
#
# ## The size of a bucket
#
# Small buckets leave early and pay many latencies. Large ones pay few latencies and leave late. One bucket for all
# leaves last of all. Here are four sizes for the reducer.

# %%
reducers = {BUCKET_MB: eager}
for size in (0.001, 1.0, 100.0):
    reducers[size] = labkit.run("ddp_compile", mode="ddp", **SETUP | {"bucket_mb": size})
reducers = {size: reducers[size] for size in sorted(reducers)}
predicted = [predict("eager", size)["all_reduce_count"] for size in reducers]
counted = [int(run.value("all_reduce_count")) for run in reducers.values()]
index = [f"{size:g} MiB" for size in reducers]
pandas.DataFrame({"predicted": predicted, "counted": counted}, index=index)

# %% tags=["nbval-ignore-output"]
latencies = {f"eager, {size:g} MiB": run for size, run in reducers.items()}
latencies[f"coalesced, {BUCKET_MB:g} MiB"] = coalesced
latencies[f"concat, {BUCKET_MB:g} MiB"] = concat
ax = plots.latency(latencies)

# %% [markdown]
# *Time of one training step by the size of a bucket. With one bucket the backward pass ends before anything is sent.
# On a busy machine the bars move; take several runs.*
#
# Four of our gradients have 4 MB, above alpha / beta even alone; the four biases add a latency each. So eight messages
# cost little more than two: six times alpha, which the noise of these bars may hide. A network of many small layers is another
# matter. The default of 25 MiB is far above alpha / beta on most networks, and far below most models.

# %% [markdown]
# ## Fewer bytes: a compression hook
#
# Gradients are noisy anyway, so they may be rounded for the journey. DDP takes a *communication hook*, a function that
# sends a bucket in its own way. The hook of case `bf16` rounds to bfloat16, sends 2 bytes a number instead of 4, and
# puts the mean back into float32.

# %%
bf16 = labkit.run("ddp_compile", mode="ddp", case="bf16", **SETUP)
plots.table(bf16, predict("eager", compressed=True))

# %% [markdown]
# The same buckets, half the bytes. The price is precision: bfloat16 keeps 8 significant bits of a number, and the
# ranks' sum is rounded to them too. In a compiled program the hook has another price. Inductor fuses an all-reduce
# only if its result is the gradient itself. With a hook it is not, and every gradient travels alone.
#
# ## Fewer messages: no_sync
#
# A large batch may not fit into memory. Then one takes several micro-batches, adds their gradients up, and steps once.
# The mean over the ranks is needed only once, at the end. `no_sync` switches the communication off for the backward
# passes before the last.
#
# Case `cpu_no_sync` trains with two micro-batches a step, the first one without synchronisation.

# %%
no_sync = labkit.run("ddp_compile", mode="ddp", case="cpu_no_sync", **SETUP)
plots.table(no_sync, predict("eager"))

# %% [markdown]
# Two backward passes, and the messages of one.
#
# ### Exercise 5: bytes of a step
#
# How many bytes does a rank hand to all-reduces before one step of the optimizer? `no_sync` means that all
# micro-batches but the last are not synchronised, and `bf16` that the hook is used.


# %%
def wire_bytes(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:
    ### BEGIN SOLUTION
    return parameters * (2 if bf16 else 4) * (1 if no_sync else micro_batches)
    ### END SOLUTION


# %%
checks.wire_bytes(wire_bytes)

# %% [markdown]
# ## Is it right?
#
# Fast and wrong is easy. This trains with DDP, with `replicate` (the same without a wrapper), and with both of them
# compiled. It compares each gradient of two steps, and each parameter after them, with one device that goes through
# all ranks' samples in turn.

# %%
right = labkit.run("ddp_compile", check="parity", nproc=RANKS, dim=64, case="cpu_no_sync")
compared = int(right.value("compared"))
print(f"{compared} tensors, all equal to one device's to 1 part in 100,000: {right.ok}")

# %% [markdown]
# ## What to expect on GPUs
#
# - The same program runs unchanged: `labkit.run("ddp_compile", nproc=4, case="gpu")`. Counts and bytes should be
#   the same; no GPU run is recorded yet.
# - The listing has Triton kernels where there was C++. Collectives run on a stream of their own.
# - Latency is smaller than here and bandwidth much larger, so alpha / beta moves. Measure it with
#   `labkit.run("all_reduce", nproc=4)` before you choose a bucket size.
#
# Figures from named GPUs belong into the folder `results`. None is recorded there yet for this lab.

# %% [markdown]
# ## Summary
#
# Predicted beside measured, in one step of a rank.

# %% tags=["summary"]
tables = {"eager": plots.table(eager, predict("eager"))}
tables["coalesced"] = plots.table(coalesced, predict("compiled"))
tables["concat"] = plots.table(concat, predict("compiled"))
tables["bf16 hook"] = plots.table(bf16, predict("eager", compressed=True))
tables["no_sync"] = plots.table(no_sync, predict("eager"))
pandas.concat(tables)

# %% [markdown]
# ## Where to go from here
#
# - Switch the second pass off and compare the listings: `labkit.run("ddp_compile", late_waits=False)`.
# - Read `labkit/parallel/ddp.py` (every technique of this lab), then `labkit/theory/ddp.py` (where eager and compiled
#   buckets differ).
# - PyTorch's own fusion is short enough to read: `torch/_inductor/fx_passes/ddp_fusion.py`.
