# %% [markdown]
# # Lab 4c. The compiler sends: SimpleFSDP and passes over its graph
#
# FSDP2 gathers parameters in hooks (lab 2), which stay outside of a compiled graph. **SimpleFSDP** writes the
# all-gather where the parameter is read, so that each collective becomes an operator of the graph, and a **pass** over
# that graph decides which parameters travel together, and when. PyTorch's compiler, inductor, has such a pass of its own.
# After this lab you can
#
# - write SimpleFSDP yourself, and prove on real ranks that it trains as one device does;
# - read where a compiled graph gathers, waits and computes;
# - complete a pass that joins gathers, starts them early and waits in time, and predict what it gains;
# - say what inductor's own pass does with the same graph, and what each schedule costs in memory.
#
# You need labs 2 and 4 and a C++ compiler, and no GPU. The lab takes about {core_minutes} minutes, and its exercises have
# one dot (easy) or two.

# %% tags=["nbval-ignore-output"]
import itertools
import json
import operator
import re
from collections.abc import Callable

import pandas
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.parallel import graph_passes as labkits
from labkit.parallel import simple_fsdp as labkits_fsdp
from labkit.parallel.buckets import assign_buckets
from labkit.parallel.graph_passes import find_gathers, gathered_bytes
from labkit.theory import emulated_steps
from labkit.theory import fsdp as theory
from labkit_course.checks import compiler_sends as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="4c")

# %% tags=["parameters"] small={"STEPS": 1} points=[[2,2],[3,1],[3,3]]
RANKS: int = 2  # ranks that share the parameters
STEPS: int = 2  # timed steps in each run, of which the fastest counts

# %%
require("RANKS", RANKS, at_least=2, at_most=3, because="one shares with nobody, and each compiles for itself")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

# %% [markdown]
# ## 1. A graph instead of hooks ({minutes} minutes)
#
# A **graph** is what `torch.compile` makes of a model: a list of operators in the order in which they run. A gather is
# two of them. `all_gather_into_tensor` starts it and returns at once, and `wait_tensor` returns when the parameter is
# there (on a GPU, it lets the stream wait). Whatever the graph computes between the two hides the gather. Time in
# which it only waits is **exposed**.
#
# We train a chain of eight linear layers, `fc1` to `fc8`, under emulation: real ranks wait as long as an imagined device
# and wire would take. A layer computes for 24 ms in the forward pass and 48 in the backward pass. It has a weight and a bias, so SimpleFSDP gathers
# twice for it: each gather takes alpha = 20 ms, and the bytes of both together 10 ms more.
#
# Commit: how long does the forward pass take, in ms, if each gather is waited for as soon as it has started?

# %% tags=["commit"]
mine_plain = commit(plain_ms=None)
### BEGIN SOLUTION
mine_plain = commit(plain_ms=8 * (20 + 20 + 10 + 24))
### END SOLUTION

# %% tags=["nbval-ignore-output"]
DIM, LAYERS = 60, 8  # 60 rows can be shared by 2 and by 3 ranks
LAYER_BYTES = 4 * DIM * (DIM + 1)
LAYER_MB = LAYER_BYTES / 2**20
ALPHA_MS, BYTES_MS, FORWARD_MS = 20, 10, 24
costs = {"alpha_ms": ALPHA_MS, "bytes_ms": BYTES_MS, "forward_ms": FORWARD_MS}
wire = emulated_steps.gather_hardware(RANKS, LAYER_BYTES, **costs)
CHAIN = {"model": "chain", "dim": DIM, "layers": LAYERS}
TRAIN = {"nproc": RANKS, "compile": True, "steps": STEPS, "emulate": wire, **CHAIN}
ways = {"as the\nmodel reads": {}, "after\na pass": {"bucketing": "passes", "bucket_mb": 2 * LAYER_MB}}
pictures = labkit.compare("simple_fsdp", ways, rounds=1, timeline=True, **TRAIN)
_ = plots.timelines_by_run(pictures)
plain, passed = pictures.values()


def fastest_ms(run: labkit.RunResult, span: str = "forward") -> float:
    """Of all steps, because other programs can only lengthen one."""
    spans = run.frame.query("kind == 'span' and name == @span")
    return spans.groupby("step")["dur_us"].max().min() / 1000


plain_ms, passed_ms = fastest_ms(plain), fastest_ms(passed)
print(f"plain, ms: {8 * 74} by the formula, {plain_ms:.0f} measured, yours: {prediction_text(mine_plain['plain_ms'])}")
print(f"after a pass: {passed_ms:.0f} ms")

# %% tags=["claim"]
claim("592 ms without a pass", abs(plain_ms / 592 - 1) < 0.15 or plain.cores_of_others)
claim("a pass makes the forward pass at least twice as fast", passed_ms < plain_ms / 2)

# %% [markdown]
# *One emulated step of rank 0; exposed time is underlined. After a pass over the graph all gathers but the first hide
# behind the layers before them. Numbers in the text are of the fastest step, on the slowest rank.*
#
# Both ran the same model and sent the same bytes. The pass, labkit's here, changed the order of the operators, and which
# parameters travel together. What a step takes beyond the formula is the two processes' own work. In this lab you shard
# the model first, then write parts of a pass.
#
# *Takeaway: once communication is in the graph, overlapping it is a matter of moving operators.*
#
# ## 2. FSDP in two functions ({minutes} minutes)
#
# Each rank keeps its rows of every parameter, as a DTensor (lab 1). The whole parameter is made where it is needed:
#
# - `rows.redistribute(placements=[Replicate()])` all-gathers: each rank has the whole, still as a DTensor.
# - `.to_local(grad_placements=[…])` makes a plain tensor of it. In the backward pass a plain gradient comes back, and
#   `grad_placements` tells DTensor what it is: `Replicate()` if it is the same on all ranks, `Partial()` if each rank has
#   a part and the true gradient is their sum, `Partial("avg")` if it is their mean.
# - The backward pass of `redistribute` leads from there back to `Shard(0)`, with whatever collective that takes.
#
# ### Exercise 1: gather (•, {minutes} minutes)
#
# `rows` is a DTensor with `Shard(0)`. Return the whole parameter as a plain tensor. Each rank computes its loss from its own
# samples, and `rows` should get the gradient that data-parallel training needs.
#
# <details><summary>Hint 1</summary>
#
# Two calls, one after the other: the first gathers, and the second leaves DTensor. Which gradient did lab 0 put in place of
# each rank's own?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Without `grad_placements` DTensor takes each rank's gradient for the whole one, and sends nothing.
#
# </details>


# %%
def gather(rows: DTensor) -> torch.Tensor:
    ### BEGIN SOLUTION
    return rows.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    ### END SOLUTION


# %%
gather_verdict = checks.gather(gather)
gather_verdict

# %% [markdown]
# Now every `layer.weight` in a model should call `gather`. A **property** is an attribute that calls a function when it is
# read. Properties belong to classes, so a module gets a class of its own, made from its old one:


# %%
class Celsius:
    degrees = 20


def fahrenheit(self: Celsius) -> float:
    return self.degrees * 9 / 5 + 32


room = Celsius()
room.__class__ = type("Room", (Celsius,), {"fahrenheit": property(fahrenheit)})
room.fahrenheit

# %% [markdown]
# `type(name, bases, attributes)` makes the class. A module keeps its parameters in the dictionary `module._parameters`,
# and a property of the same name comes first when somebody reads `module.weight`. The optimizer still finds the rows,
# because `model.parameters()` looks into the dictionary.
#
# ### Exercise 2: SimpleFSDP (••, {minutes} minutes)
#
# For each module of `model` and each parameter of its own, register a parameter in place of the old one that holds
# this rank's rows, `distribute_tensor(whole, mesh, [Shard(0)])`. Then give the module a class whose properties gather.
# Both the check and the program of this lab pass you a `gather`, exercise 1's or labkit's.
#
# <details><summary>Hint 1</summary>
#
# `module.named_parameters(recurse=False)` gives a module's own parameters. Collect them in a list before you change
# anything.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `module.register_parameter(name, nn.Parameter(rows))` replaces. Detach the old parameter before you distribute it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A function that is made in a loop sees the loop's last name, unless it keeps its own: `lambda self, name=name: …`.
#
# </details>


# %%
def simple_fsdp(model: nn.Module, mesh: DeviceMesh, gather: Callable[[DTensor], torch.Tensor]) -> None:
    ### BEGIN SOLUTION
    for module in list(model.modules()):
        properties = {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(rows))
            properties[name] = property(lambda self, name=name: gather(self._parameters[name]))
        if properties:
            module.__class__ = type("Sharded", (type(module),), properties)
    ### END SOLUTION


# %%
fsdp_verdict = checks.simple_fsdp(simple_fsdp)
fsdp_verdict

# %% [markdown]
# Now your model trains for two steps, still uncompiled, and labkit compares outputs, gradients and parameters with one
# device that saw all samples. If a function of yours does not pass yet, labkit's takes its place.

# %% tags=["nbval-ignore-output"]
your_gather = gather if gather_verdict.ok else labkits_fsdp.gather
your_fsdp = simple_fsdp if fsdp_verdict.ok else None


def shard_model(model: nn.Module, mesh: DeviceMesh, gather: Callable[[DTensor], torch.Tensor] = your_gather) -> None:
    if your_fsdp:
        your_fsdp(model, mesh, gather)
    else:
        labkits_fsdp.gather = gather  # which labkit's properties call
        labkits_fsdp.apply_simple_fsdp(model, mesh)


MODEL = {"use": {"simple_fsdp": shard_model}}
eager = labkit.check("simple_fsdp", nproc=RANKS, steps=2, **CHAIN, **MODEL)
print(f"{eager.verdict['compared']} tensors compared; largest relative difference: {eager.verdict['max_rel_error']}")

# %% tags=["claim"]
claim("it trains as one device does", eager.ok and eager.verdict["max_rel_error"] < 1e-6)

# %% [markdown]
# The difference is 0.0 on two ranks, because the one device also takes each rank's samples by themselves.
#
# *Takeaway: FSDP is a gather where a parameter is read, and the gradient's way back is a reduce-scatter.*
#
# ## 3. What the compiler sees ({minutes} minutes)
#
# Compiling gives two graphs, one for the model's forward pass and one for its backward pass. Commit before you look: how
# many gathers are in the forward graph, and how many in the backward graph?

# %% tags=["commit"]
mine_gathers = commit(forward=None, backward=None)
### BEGIN SOLUTION
mine_gathers = commit(forward=2 * LAYERS, backward=0)
### END SOLUTION

# %%
graphs = json.loads(plain.ranks[0].artifact("graphs"))
counted = {name: events.count("gather") for name, events in graphs.items()}
print("forward: ", *graphs["forward"][:10], "…")
print("backward:", *graphs["backward"][:8], "…")
pandas.DataFrame({"yours": mine_gathers, "counted": counted}).astype(object).fillna("no prediction")

# %% tags=["claim"]
claim("each parameter once, and never again", counted == {"forward": 2 * LAYERS, "backward": 0})
pattern = ["gather", "wait", "gather", "wait", "compute"]
claim("each gather has its wait behind it", graphs["forward"] == pattern * LAYERS)

# %% [markdown]
# The backward graph gathers nothing, because the compiler keeps the weights that the forward pass has gathered. FSDP2
# does so with `reshard_after_forward=False` (lab 2). No bias is kept, since no gradient needs it, and nor is the weight of
# `fc1`, since the samples need no gradient. Section 8 measures what the seven others cost in memory.
#
# These are the first operators of the forward graph, those of `fc1` and `fc2`. `primals` are its inputs: `primals_1` are
# the samples, and `primals_2`, `primals_4` and so on a rank's rows of each weight and bias. Of an operator's arguments only nodes are shown. `addmm` is
# the layer itself, `pause` waits as long as its emulated arithmetic takes, and `pause_backward` is for the backward pass.


# %% tags=["nbval-ignore-output"]
def first_nodes(run: labkit.RunResult, count: int = 16) -> str:
    return "\n".join(json.loads(run.ranks[0].artifact("nodes"))["forward"][:count])


print(first_nodes(plain))

# %% [markdown]
# *Takeaway: SimpleFSDP's graph says for each parameter when its gather starts and when the model waits, and a compiler may
# change both.*
#
# ## 4. Start early ({minutes} minutes)
#
# A graph of `torch.fx` is a list of **nodes**, and a pass changes it in place:
#
# | you write | and get |
# |---|---|
# | `find_gathers(graph)` | the gathers, in order |
# | `node.target`, `node.args` | the operator, and what it is called with: other nodes stand for their results |
# | `gather.args` | the node of this rank's rows, the number of ranks, the group |
# | `node.meta["val"]` | a tensor without numbers, which has the shape and dtype of the node's result |
# | `node.users` | a dictionary whose keys are the nodes that use its result; a gather has one, its wait |
# | `node.prepend(other)` | `other`, moved to the place right before `node` |
#
# inductor calls a pass with each graph, forward and backward, shortly before it writes the program. In a script of your own
# you would set `post_grad_custom_post_pass` of `torch._inductor.config` to it, and `reorder_for_peak_memory` to False: that
# later step would move gathers back to where they are needed.
#
# A gather needs nothing but this rank's rows, so it may start as early as you like. But each whole parameter takes memory
# from then on, and they all share one wire. A good rule: start the next gather before you wait for this one.
#
# ### Exercise 3: start early (•, {minutes} minutes)
#
# Move each gather but the first to the place right before the wait of the gather before it.
#
# <details><summary>Hint 1</summary>
#
# Go through neighbours: `itertools.pairwise(find_gathers(graph))`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(wait,) = earlier.users`
#
# </details>


# %%
def start_early(graph: Graph) -> None:
    ### BEGIN SOLUTION
    for earlier, later in itertools.pairwise(find_gathers(graph)):
        (wait,) = earlier.users
        wait.prepend(later)
    ### END SOLUTION


# %%
early_verdict = checks.start_early(start_early)
early_verdict

# %% [markdown]
# Commit: how long does the forward pass take with it, in ms? A layer's two gathers take 50 ms, and a layer computes for 24.

# %% tags=["commit"]
mine_early = commit(early_ms=None)
### BEGIN SOLUTION
mine_early = commit(early_ms=LAYERS * 50 + 24)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
early_pass = start_early if early_verdict.ok else labkits.start_early


def early_alone(graph: Graph, bucket_bytes: int) -> None:
    early_pass(graph)


ALONE = {"bucketing": "passes", "use": {"change_graph": early_alone}}
early = labkit.run("simple_fsdp", timeline=True, **ALONE, **TRAIN)
_ = plots.timelines_by_run({"no pass": plain, "start_early": early})
early_ms = fastest_ms(early)
said = prediction_text(mine_early["early_ms"])
print(f"ms: {plain_ms:.0f} before, {early_ms:.0f} with early starts, {LAYERS * 50 + 24} by the formula, yours: {said}")
print(first_nodes(early, 5))

# %% tags=["claim"]
claim("424 ms", abs(early_ms / 424 - 1) < 0.1 or early.cores_of_others)


def busy(run: labkit.RunResult) -> float:
    """The part of the time from the first gather to the last in which one is on the wire."""
    sent = run.frame.query("kind == 'bar' and rank == 0 and lane == 'communication' and phase == 'all_gather'")
    ends = sent["start_us"] + sent["dur_us"]
    return sent["dur_us"].sum() / (ends.max() - sent["start_us"].min())


claim("with early starts the wire is never idle, without it often is", busy(early) > 0.97 and busy(plain) < 0.8)

# %% [markdown]
# *The same step twice. Started early, one gather follows the other without a gap until all have arrived, and seven of the
# eight layers compute meanwhile.*
#
# Now the gathers hide the arithmetic, and only the last layer computes after the last gather. To
# get faster, the gathers themselves have to take less time. Their bytes are what they are, so the latency has to shrink.
#
# *Takeaway: starting early hides what is on its way while a layer computes. It makes no communication cheaper.*
#
# ## 5. Join ({minutes} minutes)
#
# A bucket is one gather of several parameters. The row that a rank sends holds its part of each parameter, one behind the
# other. What arrives has one such row from every rank:
#
# ```
#             rank 0's row    rank 1's row
# arrives     a0 a0 b0        a1 a1 b1           a0: rank 0's rows of parameter a
# as a table  a0 a0 b0        one line a rank
#             a1 a1 b1
# a           a0 a0 a1 a1     its columns, line after line
# ```
#
# ### Exercise 4: cut (••, {minutes} minutes)
#
# `whole` is the node of what arrives, flat. `shapes` are those of a rank's rows of each parameter, and `shape.numel()` is
# the number of elements. Return a list of nodes, one for each parameter, in the shape of the whole parameter. You make a
# node by `call(operator, arguments)`, and three operators are enough:
#
# - `call(labkits.RESHAPE, (node, shape))`
# - `call(labkits.SPLIT, (node, sizes, dim))` for the list of parts
# - `call(operator.getitem, (parts, place))` for one of them
#
# <details><summary>Hint 1</summary>
#
# First the table, in the shape `[ranks, -1]`. Then cut its columns.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The sizes of the cuts are the elements of a rank's rows, and they are cut along dimension 1.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A whole parameter has `ranks` times as many rows: `[ranks * shape[0], *shape[1:]]`.
#
# </details>


# %%
def cut(call: Callable[..., Node], whole: Node, ranks: int, shapes: list[torch.Size]) -> list[Node]:
    ### BEGIN SOLUTION
    table = call(labkits.RESHAPE, (whole, [ranks, -1]))
    pieces = call(labkits.SPLIT, (table, [shape.numel() for shape in shapes], 1))
    tensors = []
    for place, shape in enumerate(shapes):
        piece = call(operator.getitem, (pieces, place))
        tensors.append(call(labkits.RESHAPE, (piece, [ranks * shape[0], *shape[1:]])))
    return tensors
    ### END SOLUTION


# %%
cut_verdict = checks.cut(cut)
cut_verdict

# %% [markdown]
# Around it a pass makes the row, gathers it, and replaces each old parameter by the new one in all nodes that use it.
# labkit's `cut` takes the place of yours until yours passes.

# %%
cut_pass = cut if cut_verdict.ok else labkits.cut


def join(graph: Graph, gathers: list[Node]) -> None:
    parts = [gather.args[0] for gather in gathers]
    _, ranks, group = gathers[0].args
    with graph.inserting_before(gathers[0]):
        call = graph.call_function
        row = call(labkits.CAT, ([call(labkits.RESHAPE, (part, [-1])) for part in parts],))
        whole = call(labkits.WAIT, (call(labkits.GATHER, (row, ranks, group)),))
        tensors = cut_pass(call, whole, ranks, [part.meta["val"].shape for part in parts])
    for gather, tensor in zip(gathers, tensors, strict=True):
        (wait,) = gather.users
        wait.replace_all_uses_with(tensor)
        graph.erase_node(wait)
        graph.erase_node(gather)


# %% [markdown]
# One trap is left. A joined gather needs its row, which the graph makes right in front of it. So `start_early` would move
# a gather ahead of its own row, and torch, which sorts the graph after you, would put it back to where nothing hides it.
# labkit's `raise_inputs` first moves the making of all rows to the head of the graph. Here are four gathers, joined in
# pairs, without it and with it:

# %%
NAMES = {labkits.CAT: "row", labkits.GATHER: "gather", labkits.WAIT: "wait", torch.ops.aten.mm.default: "compute"}


def order(*changes: Callable[[Graph], None]) -> str:
    graph = checks.gathers_graph(4)
    first, second, third, fourth = find_gathers(graph)
    join(graph, [first, second])
    join(graph, [third, fourth])
    for change in changes:
        change(graph)
    return " ".join(NAMES[node.target] for node in graph.nodes if node.target in NAMES)


print("start_early alone: ", order(early_pass))
print("raise_inputs first:", order(labkits.raise_inputs, early_pass))

# %% tags=["claim"]
claim("alone it moves a gather ahead of its row", order(early_pass).startswith("row gather gather wait"))
claim("not if rows come first", order(labkits.raise_inputs, early_pass).startswith("row row gather gather wait"))

# %% [markdown]
# By lab 4's rule a bucket closes once it holds `bucket_bytes`, and with that the pass is complete. The backward graph sends
# gradients: only the optimizer needs what a reduce-scatter returns, so labkit's `wait_late` moves all waits for them to
# the end. Section 8 comes back to that.


# %%
def change_graph(graph: Graph, bucket_bytes: int) -> None:
    gathers = find_gathers(graph)
    for bucket in assign_buckets([gathered_bytes(each) for each in gathers], bucket_bytes):
        join(graph, [gathers[place] for place in bucket])
    labkits.raise_inputs(graph)
    early_pass(graph)
    labkits.wait_late(graph)


PASS = {"bucketing": "passes", "use": {"change_graph": change_graph} | MODEL["use"]}

# %% [markdown]
# Before we time it: does the model still train as one device does?

# %% tags=["nbval-ignore-output"]
changed = labkit.check("simple_fsdp", nproc=RANKS, compile=True, bucket_mb=2 * LAYER_MB, steps=2, **CHAIN, **PASS)
changed.verdict["max_rel_error"]

# %% tags=["claim"]
claim("your pass changes no number", changed.ok and changed.verdict["max_rel_error"] < 1e-6)

# %% [markdown]
# *Takeaway: a joined gather pays alpha once, and what arrives is a table with a line for each rank.*
#
# ## 6. Which size? ({minutes} minutes)
#
# ### Exercise 5: a formula for the forward pass (•, {minutes} minutes)
#
# `takes` are the times of the buckets' gathers, and `computes` those of the arithmetic that follows each bucket and needs
# it. Gathers 0 and 1 are asked for at 0. Gather i is asked for before the wait for gather i − 1, which is when the
# arithmetic of bucket i − 2 has ended. The wire carries one gather after the other. The arithmetic of a bucket begins
# when its gather has arrived and the arithmetic before it has ended. Return the end of the last arithmetic.
#
# <details><summary>Hint 1</summary>
#
# Go through the buckets in order, and keep two things: when the last gather arrived, and the ends of all arithmetic.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A gather starts at `max(asked, arrived)`, where `arrived` is still the arrival of the one before it.
#
# </details>


# %%
def forward_ms(takes: list[float], computes: list[float]) -> float:
    ### BEGIN SOLUTION
    ends, arrived = [0.0, 0.0], 0.0
    for take, compute in zip(takes, computes, strict=True):
        arrived = max(ends[-2], arrived) + take
        ends.append(max(ends[-1], arrived) + compute)
    return ends[-1]
    ### END SOLUTION


# %%
forward_verdict = checks.forward_ms(forward_ms)
forward_verdict

# %% [markdown]
# We try buckets of one, two, four and all eight layers. Commit: how long does the forward pass take, in ms, with four
# layers in a bucket, and with all eight?

# %% tags=["commit"]
mine_sizes = commit(four_ms=None, eight_ms=None)
### BEGIN SOLUTION
mine_sizes = commit(four_ms=20 + 40 + 8 * 24, eight_ms=20 + 80 + 8 * 24)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
formula = forward_ms if forward_verdict.ok else theory.prefetched_forward
TOGETHER = (1, 2, 4, 8)
names = ["1 layer", "2 layers", "4 layers", "8 layers"]
predicted = []
for layers in TOGETHER:
    buckets = LAYERS // layers
    predicted.append(formula([ALPHA_MS + layers * BYTES_MS] * buckets, [layers * FORWARD_MS] * buckets))
sizes = {"sizes_mb": tuple(layers * LAYER_MB for layers in TOGETHER), "steps": 3}
curve = labkit.run("simple_fsdp", **TRAIN | sizes, **PASS)
measured = plots.step_ms_by_size(curve)
by_size = dict(zip(measured, predicted, strict=True))
_ = plots.step_time_by_bucket_size({"yours": curve}, {"yours": by_size}, ylabel="forward pass, ms", sizes=names)
measured = list(measured.values())
yours = [None, None, *mine_sizes.values()]
columns = {"you said": [prediction_text(each) for each in yours], "formula": predicted, "measured": measured}
pandas.DataFrame(columns, index=names).round().T

# %% tags=["claim"]
claim("the formula is within 10 %", max(abs(a / b - 1) for a, b in zip(measured, predicted, strict=True)) < 0.1)
claim("two layers together are predicted to be the fastest", min(predicted) == predicted[1] == 232)
claim("90 % of the bandwidth takes 18 layers", 9 * ALPHA_MS / BYTES_MS == 18)
claim("both ends lose", min(measured[0], measured[-1]) > 1.08 * min(measured))

# %% [markdown]
# *The forward pass by size of bucket, emulated; dashed, your formula. Small buckets pay latency too often, and one for
# all has nothing to hide behind.*
#
# This is lab 4's lesson from the other side: the smallest bucket that keeps up is about the best. A bucket of b layers
# takes 20 + 10 b ms and hides behind 24 b ms of arithmetic if b is at least 20 / (24 − 10) = 1.4. So take two.
#
# <details><summary>A size that inductor can choose</summary>
#
# inductor can also join FSDP's gathers before it orders anything (`pre_bucketing_fsdp_collectives`, off in the next
# section). It takes the size from `compute_min_saturation_bytes` in `torch/_inductor/comm_analysis.py`: the bytes at
# which the link reaches 90 % of its bandwidth. By alpha and beta these take 9 times as long as alpha, here 18 layers, so
# all eight would share one gather. Such a rule knows the link and not the arithmetic, and nothing hides the first bucket.
#
# </details>
#
# *Takeaway: take the smallest bucket whose gather fits into the arithmetic of a bucket.*
#
# ## 7. inductor's own pass ({minutes} minutes)
#
# inductor can order collectives itself, once `aten_distributed_optimizations.enable_overlap_scheduling` is set. Its pass
# estimates how long each operator takes, starts gathers where something hides them, and joins some. Here the emulated times
# are its estimates.


# %% tags=["nbval-ignore-output"]
def gathers_in(run: labkit.RunResult, graph: str) -> int:
    return json.loads(run.ranks[0].artifact("graphs"))[graph].count("gather")


rivals = {"yours": {"bucket_mb": 2 * LAYER_MB, **PASS}, "inductor": {"bucketing": "inductor", **MODEL}}
runs = {"no pass": plain, **labkit.compare("simple_fsdp", rivals, rounds=1, timeline=True, **TRAIN)}
_ = plots.timelines_by_run(runs)
print(f"of 16 gathers inductor leaves {gathers_in(runs['inductor'], 'forward')}")
for name, run in runs.items():
    print(
        f"{name}: forward {fastest_ms(run):.0f} ms, the rest of the step {fastest_ms(run, 'step') - fastest_ms(run):.0f}"
    )

# %% tags=["claim"]
exposed = {name: fastest_ms(run) - LAYERS * FORWARD_MS for name, run in runs.items()}
claim("both passes win, and here yours wins more", exposed["yours"] < exposed["inductor"] < exposed["no pass"] / 2)
claim("all hand over the same bytes", len({run.value("all_gather_bytes") for run in runs.values()}) == 1)
claim("inductor leaves half of the gathers", gathers_in(runs["inductor"], "forward") == LAYERS)
scatters = {name: run.value("reduce_scatter_count") for name, run in runs.items()}
claim("and half of the reduce-scatters, your pass all", scatters == {"no pass": 16, "yours": 16, "inductor": 8})

# %% [markdown]
# *One step of each; exposed time is underlined.*
#
# Which parameters travel together in inductor's schedule? In its graph, as in yours, a `cat` makes the row that is sent,
# and the next cell reads from what.

# %% tags=["nbval-ignore-output"]
names_in_order = [f"fc{layer}.{what}" for layer in range(1, LAYERS + 1) for what in ("weight", "bias")]
by_input = {f"primals_{2 * place + 2}": name for place, name in enumerate(names_in_order)}
lines = json.loads(runs["inductor"].ranks[0].artifact("nodes"))["forward"]
made_by = {node: re.findall(r"\w+", call) for node, call in (line.split(" = ") for line in lines)}  # operator, inputs
rows = [inputs for name, *inputs in made_by.values() if name == "cat"]
together = [[by_input[made_by[part][1]] for part in row] for row in rows]
for names in together:
    print(*names, sep=" + ")
for name in ("yours", "inductor"):
    print(f"{name}:", *json.loads(runs[name].ranks[0].artifact("graphs"))["forward"])

# %% tags=["claim"]
claim("a layer's weight travels with the bias of the next", together[1] == ["fc2.weight", "fc3.bias"])

# %% [markdown]
# Both orders keep a gather on its way while a layer computes. inductor's buckets hold the weight of one layer and the bias
# of the next; the first has its own bias, too, and the last weight travels alone. So each gather takes about 30 ms, of
# which a layer hides 24: 8 · 30 + 24 = 264 ms by your formula. With two layers in a gather, all but the first hide. But
# inductor also joins the reduce-scatters, from 16 to 8, so in the backward pass it is ahead of yours.
#
# <details><summary>Why these buckets?</summary>
#
# inductor walks over the graph once. Beside each computation it starts gathers of the next layer, the
# longest first, until their estimated times fill it, and one weight, of 30 ms, fills a layer's 24. The bias of that layer
# is left over, and is joined to the gather before it. Nothing here searches for the best size.
#
# </details>
#
# <details><summary>What is experimental here (torch 2.13)</summary>
#
# - The pass is off by default, and so is a check that all ranks have the same graph, because the check itself could hang.
# - A rank could take another rank's code from torch's cache: where ranks have different numbers of rows
#   (pytorch/pytorch#188390), and where gathers are joined (pytorch/pytorch#188332). labkit keeps each rank's code apart.
# - A later step of inductor, which saves memory, may move gathers back to where they are needed. labkit switches it off
#   (`reorder_for_peak_memory`).
#
# </details>
#
# *Takeaway: compare a compiler's schedule with one of your own, and with none, before you trust it.*
#
# ## 8. What it costs in memory ({minutes} minutes)
#
# The model keeps seven whole weights until the backward pass. Where these take too much memory, one **checkpoints** the
# gather: the compiler then drops the weight, and gathers it again in the backward pass.
#
# Memory peaks in the backward pass. While a weight's gradient is reduce-scattered, the rank holds it
# twice, because gloo works on a copy. Beside it are this rank's rows of all weights' gradients so far, this one included,
# and the weights that were kept for layers still to come. The layer's own weight is gone by then.
#
# Commit, without a pass, in whole weights of 14.4 kB, and beside this rank's own parameters: how high is the peak with
# kept weights, at the gradient of `fc8`, and with checkpointed gathers, at that of `fc1`? And with your pass over
# the checkpointed model, how many gathers does the backward graph have? A bucket closes once it holds 29.28 kB.

# %% tags=["commit"]
mine_peaks = commit(kept=None, checkpointed=None, gathers=None)
### BEGIN SOLUTION
mine_peaks = commit(kept=2 + 1 / RANKS + LAYERS - 2, checkpointed=2 + LAYERS / RANKS, gathers=3)
### END SOLUTION


# %% tags=["nbval-ignore-output", "summary"]
def gather_again(rows: DTensor) -> torch.Tensor:
    return checkpoint(your_gather, rows, use_reentrant=False)


def shard_again(model: nn.Module, mesh: DeviceMesh) -> None:
    shard_model(model, mesh, gather_again)


def peak_weights(run: labkit.RunResult) -> float:
    return run.value("step_peak_bytes") / (4 * DIM**2)


AGAIN = {"use": {"simple_fsdp": shard_again}}
BOTH = {"use": PASS["use"] | AGAIN["use"], "bucketing": "passes", "bucket_mb": 2 * LAYER_MB}
twice = {"checkpointed": AGAIN, "checkpointed, yours": BOTH}
runs |= {"start_early": early} | labkit.compare("simple_fsdp", twice, rounds=1, **TRAIN)
table = pandas.DataFrame({"forward, ms": {name: fastest_ms(run) for name, run in runs.items()}})
table["step, ms"] = [fastest_ms(run, "step") for run in runs.values()]
for graph in ("forward", "backward"):
    table[f"gathers, {graph}"] = [gathers_in(run, graph) for run in runs.values()]
table["reduce-scatters"] = [run.value("reduce_scatter_count") for run in runs.values()]
table["peak, weights"] = [*map(peak_weights, runs.values())]
print("peaks and gathers, you said:", *(prediction_text(each) for each in mine_peaks.values()))
table.round(1)

# %% tags=["claim"]
claim("14.4 kB", 4 * DIM**2 == 14_400)
claim("29.28 kB", 2 * LAYER_BYTES == 29_280)
peaks, steps, on_cpu = table["peak, weights"], table["step, ms"], plain.device == "cpu"  # gloo's copy
kept, again, waits = LAYERS + 1 / RANKS, 2 + LAYERS / RANKS, LAYERS * (2 + 1 / RANKS)
expected = {"no pass": kept, "start_early": kept, "yours": waits, "inductor": waits}
expected |= {"checkpointed": again, "checkpointed, yours": waits}
claim("peaks within 3 %", all(abs(peaks[name] / each - 1) < 0.03 for name, each in expected.items()), where=on_cpu)
claim("nearly a third less", 0.65 < again / kept < 0.72, where=RANKS == 2)
claim("20 weights", waits == 20, where=RANKS == 2)
claim("checkpointed takes longest", steps.idxmax() == "checkpointed")
claim("inductor nearly catches up", abs(steps["inductor"] / steps["yours"] - 1) < 0.1)
claim("faster under the pass", steps["checkpointed, yours"] < 0.9 * steps["checkpointed"])
backward = table["gathers, backward"]
claim("seven, and three", [*backward[["checkpointed", "checkpointed, yours"]]] == [LAYERS - 1, 3])

# %% [markdown]
# - `start_early` holds as much as no pass, because kept weights have all arrived by the end of the forward pass anyway.
# - Your pass and inductor's hold over twice as much. Both wait for reduce-scatters at the end of the backward
#   pass, and until then all eight gradients are there, whole, with gloo's copy and this rank's rows: 20 weights.
# - Checkpointing takes nearly a third off the peak, but makes the slowest step. All weights but one travel twice, and
#   nothing hides them.
# - Your pass joins the seven gathers in the backward pass to three, since two weights, of 28.8 kB, do not fill a bucket. The
#   step gets faster again, but now the gradients fill the memory.
#
# ### Exercise 6: wait in time (•, {minutes} minutes)
#
# Gradients should leave while the next layer computes, and be done soon after. A layer starts two reduce-scatters, so a
# wait may stand two of them further on. Move each reduce-scatter's wait right behind the reduce-scatter that comes
# `behind` places later, and where there is none, behind the last. `node.append(other)` moves `other` right behind `node`,
# and a reduce-scatter has the target `SCATTER`, of `labkits`.
#
# <details><summary>Hint 1</summary>
#
# As a gather, a reduce-scatter has one user, its wait.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Make a list of the reduce-scatters. The place of the one that comes later is at most that of the last.
#
# </details>


# %%
def wait_behind(graph: Graph, behind: int) -> None:
    ### BEGIN SOLUTION
    scatters = [node for node in graph.nodes if node.target is labkits.SCATTER]
    for place, scatter in enumerate(scatters):
        (wait,) = scatter.users
        scatters[min(place + behind, len(scatters) - 1)].append(wait)
    ### END SOLUTION


# %%
behind_verdict = checks.wait_behind(wait_behind)
behind_verdict


# %% tags=["nbval-ignore-output"]
def change_and_wait(graph: Graph, bucket_bytes: int) -> None:
    change_graph(graph, bucket_bytes)
    if behind_verdict.ok:
        wait_behind(graph, 2)


IN_TIME = {**rivals["yours"], "use": PASS["use"] | {"change_graph": change_and_wait}}
in_time = labkit.compare("simple_fsdp", {"yours": rivals["yours"], "in time": IN_TIME}, rounds=1, **TRAIN)
for name, run in in_time.items():
    print(f"{name}: {fastest_ms(run, 'step'):.0f} ms, {peak_weights(run):.1f} weights")

# %% tags=["claim"]
step_ms, weights = [fastest_ms(run, "step") for run in in_time.values()], [*map(peak_weights, in_time.values())]
claim("as fast", abs(step_ms[1] / step_ms[0] - 1) < 0.08, where=behind_verdict.ok)
claim("with little more than half of the memory", weights[1] < 0.6 * weights[0], where=behind_verdict.ok and on_cpu)

# %% [markdown]
# The step is as fast as before, with little more than half of the memory. What it holds above the model without a pass
# comes with the joined gathers, which arrive as one row and are then cut.
#
# *Takeaway: a schedule that is faster may hold more, so read the peak beside the milliseconds, and wait in time.*
#
# ## To take along ({minutes} minutes)
#
# 1. A gather where a parameter is read makes FSDP, and puts each of its collectives into the graph.
# 2. A pass changes which parameters travel together, and when; values and bytes stay.
# 3. Starting early hides the shorter of arithmetic and communication, and joining saves latency.
#
# | if | then |
# |---|---|
# | waits stand right behind their gathers | start gathers early |
# | the wire is busy all the time with small gathers | join them |
# | a long first gather is exposed | take smaller buckets |
# | whole parameters do not fit until the backward pass | checkpoint the gather, and read the peak under your pass |
# | the peak rises under a pass | wait for the reduce-scatters a layer later, not at the end |
#
# **Ask yourself**
#
# <details><summary>1. Why can the compiler not move FSDP2's gathers?</summary>
#
# They are started in hooks, which run outside of the compiled graph.
#
# </details>
# <details><summary>2. Suppose a pass starts all gathers at the head of the graph. What gets worse?</summary>
#
# Memory, where gathers are checkpointed: all whole parameters wait there until they are used. (Kept ones are all there at the end
# of the forward pass in any case.) The time is about the same, since they share one wire.
#
# </details>
# <details><summary>3. Rank 1's pass joins other gathers than rank 0's. What happens?</summary>
#
# Their collectives no longer match: they wait for ever, or get wrong numbers. So a pass has to decide the same on all
# ranks, by sizes and order, and not by times that one rank measured.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile", 2024:
#   https://arxiv.org/abs/2411.00284
# - Graphs and passes: https://docs.pytorch.org/docs/stable/fx.html
# - In labkit: `labkit/parallel/simple_fsdp.py` and `labkit/parallel/graph_passes.py` (yours), `launch/simple_fsdp.py`
#   (the program). In PyTorch: `torch/_inductor/fx_passes/overlap_scheduling.py`.
#
# </details>

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("compiler_sends")
