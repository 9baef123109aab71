# %% [markdown]
# # Lab 5b. Two dimensions at work
#
# This companion of lab 5 has what you meet once two axes train a model of your own. After it you can
#
# - say what crosses each axis of a mesh, and what a rank's memory holds;
# - cut embedding, output layer and loss over the vocabulary;
# - repair a plan with wrong layouts, and say what cutting the sequence saves and when a norm's gradient is summed;
# - compute a language model's loss and gradients on two axes in plain PyTorch;
# - recognise a test that cannot fail.
#
# You need lab 5. The notebook takes about {core_minutes} minutes.

# %% tags=["nbval-ignore-output"]
import copy

import pandas
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.parallel.tensor_parallel import transformer_plan
from labkit.theory import fsdp
from labkit.theory import two_dim as theory
from labkit_course.checks import two_dim_at_work as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="5b")

# %% [markdown]
# The network is lab 5's stack of three MLPs, with inner widths of 3, 4 and 3 times `DIM`, and in section 4 its two
# transformer blocks. A sample is a text of 8 tokens.

# %% tags=["parameters"] small={"DIM": 16, "BATCH": 8} points=[[4,16,4,1],[4,48,24,2],[8,128,64,3]]
RANKS: int = 4  # ranks of the mesh
DIM: int = 64  # width of the network
BATCH: int = 48  # samples of all ranks together in a step
STEPS: int = 1  # timed training steps in each run

# %%
require("RANKS", RANKS, at_least=4, at_most=8, multiple_of=4, because="section 3 cuts 8 tokens over all ranks")
require("DIM", DIM, at_least=16, multiple_of=16, because="two ranks share the heads, of 8 features each")
require("BATCH", BATCH, at_least=1, multiple_of=RANKS, because="the ranks share the samples evenly")
require("STEPS", STEPS, at_least=1, because="without a step nothing is measured")
labkit.use_one_device(RANKS)  # GPUs if there is one for each rank of this lab, else the CPU

TOLD = (RANKS, DIM, BATCH) == (4, 64, 48)  # the values that the text speaks of
SETUP = {"nproc": RANKS, "dim": DIM, "batch": BATCH, "steps": STEPS}
PAIRS = theory.mlp_pairs(DIM)  # (width, inner width) of each MLP
MESHES = {tp: {"data": RANKS // tp, "tp": tp} for tp in (1, 2, RANKS)}  # lengths of the two axes
LABELS = {1: "FSDP alone", 2: f"{RANKS // 2} x 2", RANKS: "TP alone"}


def tokens(tp: int) -> int:
    """Return the tokens of a rank if `tp` ranks share each matrix, and so the same samples."""
    return 8 * BATCH // MESHES[tp]["data"]


runs = {tp: labkit.run("two_dim", tp=tp, **SETUP) for tp in MESHES}

# %% [markdown]
# ## 1. What travels along which axis ({minutes} minutes)
#
# Along `data` FSDP shards what tensor parallelism leaves to a rank. To FSDP that is a thinner model, whose inner widths
# are divided by the ranks along `tp`, and all of lab 2's formulas hold.
#
# ### Exercise 1: with recomputation (•, {minutes} minutes)
#
# With activation checkpointing (lab 2) an MLP keeps only its input, and runs its forward pass once more before its
# backward pass: the whole of it, because it ends in a ReLU, which needs its output again. How often does each
# collective then run in a step with two ranks along `tp`, and along which axis? Return a dict whose keys are an axis, a
# slash and a collective, such as `"tp/all_gather"`. There are three MLPs, each a unit of FSDP that frees its parameters
# after the forward pass. Leave out what does not happen.
#
# <details><summary>Hint 1</summary>
#
# Lab 5 counted a step without checkpointing: activations travel along `tp`, parameters and their gradients along
# `data`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# What runs once more sums its parts once more. But its parameters are there already, gathered for the backward pass.
#
# </details>


# %%
def collectives() -> dict[str, int]:
    ### BEGIN SOLUTION
    return {"tp/all_reduce": 3 + 3 + 2, "data/all_gather": 3 + 3, "data/reduce_scatter": 3}
    ### END SOLUTION


# %%
recomputed = labkit.run("two_dim", tp=2, checkpointing=True, **SETUP)
checks.collectives(collectives, recomputed)

# %% [markdown]
# Four ranks can also be used along one axis: FSDP alone with `tp` 1, tensor parallelism alone with `tp` 4. To compare
# the three meshes, bytes must be those that a rank puts **on the wire**, since the same tensor costs more in a longer
# ring. In a ring of n ranks a rank passes on (n − 1)/n of the whole tensor in an all-gather or a reduce-scatter, and
# twice that in an all-reduce.
#
# Commit before you look: the 2 × 2 mesh gathers half of each layer and sums activations of half of the samples. What
# part of the bytes of FSDP alone does it send along `data`?

# %% tags=["commit"]
mine_part = commit(along_data=None)
### BEGIN SOLUTION
mine_part = commit(along_data=1 / 3)
### END SOLUTION


# %%
def on_wire(tp: int, sent: dict[str, float]) -> dict[str, float]:
    """Convert bytes handed to calls into bytes on the wire, by axis."""
    return theory.axis_wire_bytes(sent, **MESHES[tp])


def handed(result: labkit.RunResult) -> dict[str, float]:
    """Return what was counted, by axis and collective."""
    return {name: result.value(name) for name in result.summary() if "/" in name}


by_theory = {LABELS[tp]: on_wire(tp, theory.step_collectives_by_axis(PAIRS, tokens(tp), **MESHES[tp])) for tp in runs}
by_count = {LABELS[tp]: on_wire(tp, handed(runs[tp])) for tp in runs}
data_part = by_count[LABELS[2]]["data"] / by_count[LABELS[1]]["data"]
print(f"along data: {data_part:.2f} of what FSDP alone sends; you: {prediction_text(mine_part['along_data'], '.2f')}")
_ = plots.traffic_by_axis(by_theory, by_count, results=list(runs.values()))

# %% [markdown]
# *Bytes on the wire from one rank in a step. The square sends least: each of its axes carries a third of what FSDP or
# TP sends alone.*
#
# A rank hands half as much to each axis as if that were the only one, and each ring has two ranks and not four, so
# that (n − 1)/n is 1/2 and not 3/4. Together it is a third. Which mesh sends least depends on the sizes. By theory, with four times the samples FSDP alone wins,
# because activations grow and parameters do not. With layers four times as wide TP alone wins, because parameters grow
# with the square of the width.

# %% tags=["claim"]
totals = {label: sum(each.values()) for label, each in by_count.items()}
claim("they agree", by_theory == by_count)
claim("the square sends least", min(totals, key=totals.get) == LABELS[2], where=TOLD)
claim("a third along data", abs(data_part - 1 / 3) < 0.01, where=TOLD)
for samples, width, least in ((4 * BATCH, DIM, 1), (BATCH, 4 * DIM, RANKS)):
    sums = {}
    for tp, axes in MESHES.items():
        sent = theory.step_collectives_by_axis(theory.mlp_pairs(width), 8 * samples // axes["data"], **axes)
        sums[tp] = sum(on_wire(tp, sent).values())
    claim(f"with {samples} samples, width {width}: {least}", min(sums, key=sums.get) == least, where=TOLD)

# %% [markdown]
# **Memory.** With FSDP the peak lies inside the backward pass, where lab 2's ledger finds it. With TP alone it lies
# where the backward pass begins: all activations are there, and computing the gradient of the loss takes several
# tensors more of the output's size. These are *temporary*, the grey part, as are the gradients of activations on the
# way back.

# %%
expected = {
    LABELS[tp]: fsdp.fsdp_step_peak(theory.rank_layers(PAIRS, tp), tokens(tp), MESHES[tp]["data"]) for tp in (1, 2)
}
expected["TP alone"] = theory.tp_step_peak(PAIRS, tokens(RANKS), RANKS)
bars = {label: {part: size for part, size in each.items() if part != "total"} for label, each in expected.items()}
_ = plots.memory_comparison(bars, {LABELS[tp]: result for tp, result in runs.items()})

# %% [markdown]
# *Peak memory of a rank, temporary tensors in grey. Beside these, FSDP alone pays for gathered parameters and buffers,
# TP alone for activations. With these sizes the square needs least.*

# %% tags=["claim"]
peaks = {LABELS[tp]: result.value("peak_total_bytes") for tp, result in runs.items()}
claim(
    "every prediction is within 5 %", all(abs(peaks[label] / sum(bars[label].values()) - 1) < 0.05 for label in peaks)
)
claim("the square needs least", min(peaks, key=peaks.get) == LABELS[2], where=TOLD)
activations = {LABELS[tp]: result.value("peak_activation_bytes") for tp, result in runs.items()}
claim("TP alone pays for activations", max(activations, key=activations.get) == "TP alone", where=TOLD)
parts_of = ("unsharded_parameter", "all_gather", "reduce_scatter")
gathered = {tp: sum(runs[tp].value(f"peak_{part}_bytes") for part in parts_of) for tp in (1, 2)}
claim("FSDP alone pays for gathered parameters and buffers", gathered[1] > 1.5 * gathered[2], where=TOLD)
plans = ("ddp_tp", "fsdp_tp")
in_ddp, in_fsdp = (on_wire(2, theory.parameter_collectives(PAIRS, **MESHES[2], plan=plan))["data"] for plan in plans)
claim("DDP sends two thirds", abs(in_ddp / in_fsdp - 2 / 3) < 0.01)
state_ddp, state_fsdp = (sum(theory.mesh_resident_bytes(PAIRS, data=2, tp=2, plan=plan).values()) for plan in plans)
claim("twice as much state", abs(state_ddp / state_fsdp - 2) < 0.02)

# %% [markdown]
# To DDP (lab 4), too, a rank's share is a thinner model, which it keeps whole. Along `data` DDP sends two thirds of
# FSDP's bytes, and twice as much state stays on each of two ranks, by lab 2's formulas.
#
# *Takeaway: to FSDP or DDP, a rank's share along `tp` is a thinner model.*
#
# ## 2. Embedding, output layer and loss ({minutes} minutes)
#
# An **embedding** is a table with a row for each word of the vocabulary. If it is cut by rows, a rank looks up the
# words that it has and takes zeros for the others, and an all-reduce adds up. In PyTorch that is `RowwiseParallel`,
# which cuts dim 0 of the table, [words, features], and dim 1 of a linear layer's weight, [out, in]. The **output
# layer** makes a *logit* for each word. If it is cut colwise, each rank has the logits of its words.
#
# The two ends of a layer matter now. In a plan, `input_layouts` says how the input *is* laid out when it arrives, and
# `output_layouts` how the output *shall* leave: `Replicate()` is whole, and `Shard(-1)` is cut along the last
# dimension. By default a colwise layer takes `Replicate()` and leaves `Shard(-1)`, and a rowwise layer the other way
# round.
#
# ### Exercise 2: both ends (•, {minutes} minutes)
#
# Write the plan for `embed`, an `nn.Embedding`, and `head`, an `nn.Linear`, so that each rank has its share of the
# words in both. The token ids are the same on all ranks, and so shall the logits be.
#
# <details><summary>Hint 1</summary>
#
# For each of the four ends, ask whether the default is what you need.
#
# </details>
# <details><summary>Hint 2</summary>
#
# By default a rowwise layer assumes that its input is cut, and a colwise one leaves its output cut. Here both should be
# whole.
#
# </details>


# %%
def words_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    ### END SOLUTION


# %%
checks.words_plan(words_plan)

# %% [markdown]
# Whole logits are large: with Llama 3's 128,256 words, a text of 8,192 tokens has 4.2 GB of them in float32. But nobody
# needs them whole. The **cross-entropy** of a token needs three numbers from all ranks: the largest logit, the sum
# of the exponentials, and the logit of the right word. `loss_parallel` does that, with logits that stay cut.

# %%
# %%torchrun -n 2
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from labkit.session.traffic import CommunicationCounter

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
logits, words = torch.randn(16, 100, requires_grad=True), torch.randint(100, (16,))  # 16 tokens, 100 words
cross_entropy(logits, words).backward()
cut = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()  # each rank has 50 of the words
with loss_parallel(), CommunicationCounter() as sent:
    cross_entropy(cut, words).backward()
off = float((cut.grad.full_tensor() - logits.grad).norm() / logits.grad.norm())
with CommunicationCounter() as whole:
    cut.full_tensor()
f"gradient off by {off:.6f}; cut: {sum(sent.bytes.values())} bytes; gathered: {sum(whole.bytes.values())} bytes"

# %% [markdown]
# The cut loss hands over three numbers for each token, whatever the vocabulary; gathering the logits takes all that a
# rank has of them, here 50 for each token. In a plan the output layer then is
# `ColwiseParallel(use_local_output=False)`, so that the logits stay cut, and a DTensor. The loss and its backward pass
# stand inside `with loss_parallel():`.
#
# *Takeaway: cut the vocabulary at both ends, and leave the logits cut.*
#
# ## 3. Cut the sequence, too ({minutes} minutes)
#
# Between the pairs TP leaves activations whole on every rank, as lab 5 measured. What happens there, such as a norm or
# dropout, treats each token alone, so that each rank could keep only its share of the tokens. This is **sequence
# parallelism** (SP).

# %%
_ = plots.sequence_diagram()

# %% [markdown]
# *What two ranks hold of each tensor, tokens downwards and features to the right. An all-reduce becomes a
# reduce-scatter behind a pair and an all-gather in front of the next.*
#
# Somebody wrote the plan below for the stack of MLPs. `Shard(1)` is cut along the tokens, but the samples come in whole.
# PyTorch raises no error. Commit: by which factor are the output and the gradients off on two ranks (1 if they are
# right)? **The verdict behind it is meant to be red.**


# %% tags=["commit"]
def broken_plan() -> dict[str, object]:
    plan = {}
    for index in range(3):
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


mine_factor = commit(output=None, gradients=None)
### BEGIN SOLUTION
mine_factor = commit(output=1, gradients=2)
### END SOLUTION

# %%
print("you:", ", ".join(f"{name} {prediction_text(factor)}" for name, factor in mine_factor.items()))
checks.stack_plan(broken_plan)

# %% [markdown]
# ### Exercise 3: repair it (••, {minutes} minutes)
#
# Write a plan that is right. Between the MLPs the sequence should stay cut. The samples come in whole, and the result
# has to go out whole.
#
# <details><summary>Hint 1</summary>
#
# Compare what the plan says of each input with what the layer before leaves.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Draw the stack as a row of six layers, and write above each arrow whether the tensor there is whole or cut.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Only two of the six entries are wrong: how the samples arrive, and how the last result leaves.
#
# </details>


# %%
def repaired_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    plan = {}
    for index in range(3):
        comes = Replicate() if index == 0 else Shard(1)  # the samples are whole
        leaves = Replicate() if index == 2 else Shard(1)  # and so shall the result be
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(input_layouts=comes)
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=leaves)
    return plan
    ### END SOLUTION


# %%
stack_verdict = checks.stack_plan(repaired_plan)
stack_verdict

# %% [markdown]
# <details><summary>Why was the broken plan's output right, and its gradient twice as large?</summary>
#
# PyTorch believes what a plan says of a plain tensor. So the first layer takes the whole samples for a share of the
# tokens, and gathers two copies, twice as many tokens. The
# last layer leaves one half of them on each of the check's two ranks, which is one whole copy: the two mistakes cancel.
# But all layers have computed both copies, and in the backward pass every weight adds up both gradients.
#
# </details>
#
# **What does it save?** By theory a stack of bare MLPs gains nothing without checkpointing, because `ColwiseParallel`
# keeps the input that it has gathered: the gradient of its weight needs it. With checkpointing an MLP keeps only its
# own tokens of the input, and gathers them again in the backward pass.
#
# Now your plan trains the stack with all ranks along `tp` and with checkpointing. At the peak, where the backward pass
# begins, a rank holds four tensors of [tokens, `DIM`]: the samples, which are the first MLP's input, the inputs of the
# other two, and the result. Without your plan all four are whole. Commit: how many whole tensors do the four amount to
# with your plan? And how many times the bytes on the wire does it send? (An all-reduce is a reduce-scatter and an
# all-gather, lab 0.)

# %% tags=["commit"]
mine_cut = commit(whole_tensors=None, wire=None)
### BEGIN SOLUTION
mine_cut = commit(whole_tensors=2 + 2 / RANKS, wire=1)
### END SOLUTION

# %%
stack_plan = repaired_plan if stack_verdict.ok else checks.our_stack_plan
CHECKPOINTED = SETUP | {"tp": RANKS, "checkpointing": True}
sequence = {
    "sequence whole": labkit.run("two_dim", **CHECKPOINTED),
    "your plan": labkit.run("two_dim", use={"tensor_parallel_plan": lambda model: stack_plan()}, **CHECKPOINTED),
}
ONE = 4 * tokens(RANKS) * DIM  # bytes of a whole tensor
tensors = {label: result.value("peak_activation_bytes") / ONE for label, result in sequence.items()}
wire = {label: on_wire(RANKS, handed(result))["tp"] for label, result in sequence.items()}
saved = {"whole_tensors": tensors["your plan"], "wire": wire["your plan"] / wire["sequence whole"]}
whole_peak = theory.tp_step_peak(PAIRS, tokens(RANKS), RANKS, checkpointing=True)
forecast = {"sequence whole": whole_peak, "your plan": whole_peak | {"activation": checks.whole_tensors(RANKS) * ONE}}
_ = plots.memory_comparison(forecast, sequence)
plots.comparison_table(saved, yours=mine_cut, tolerance=0.02)

# %% [markdown]
# *Peak memory of a rank with TP alone and checkpointing. With your plan there are fewer activations, and all else stays
# as it was.*

# %% tags=["claim"]
claim("four whole tensors without the plan", abs(tensors["sequence whole"] - 4) < 0.02, where=TOLD)
remain = abs(tensors["your plan"] - checks.whole_tensors(RANKS))
claim("two, and two of which a rank has its share, with it", remain < 0.02, where=TOLD)
claim("the same bytes on the wire", wire["your plan"] == wire["sequence whole"])
others = [result.value("peak_total_bytes") - result.value("peak_activation_bytes") for result in sequence.values()]
claim("all else stays as it was", abs(others[0] / others[1] - 1) < 0.01, where=TOLD)
off = [result.value("peak_total_bytes") / sum(forecast[label].values()) for label, result in sequence.items()]
claim("predictions are within 2 %", all(abs(each - 1) < 0.02 for each in off))
kept = {cut: theory.tp_activation_bytes(PAIRS, tokens(RANKS), RANKS, sequence_parallel=cut) for cut in (False, True)}
claim("without checkpointing bare MLPs gain nothing", kept[True] > kept[False])

# %% [markdown]
# Your plan cuts two of the four tensors, those between the MLPs. In a deeper stack it would cut all but two. The bytes
# are the same because each MLP is recomputed as a whole; section 4 has a block of which that is not true.
#
# *Takeaway: in this stack, with checkpointing, sequence parallelism sends the same bytes and saves what lies between the
# pairs.*
#
# ## 4. A norm between the pairs ({minutes} minutes)
#
# In a transformer, norms and residual sums lie between the pairs. They are what sequence parallelism was made for: each
# rank now normalises only its own tokens, and adds residuals to them alone. PyTorch's style for a norm there is
# `SequenceParallel()`, which takes and leaves `Shard(1)`.
#
# This is a plan for lab 5's transformer block, whose input now comes in cut along its tokens, and whose result leaves
# so:


# %%
def block_plan() -> dict[str, object]:
    cut = Shard(1)
    plan = {name: ColwiseParallel(input_layouts=cut) for name in ("query", "key", "value", "gate", "up")}
    plan |= {name: RowwiseParallel(output_layouts=cut) for name in ("out", "down")}
    return plan | {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}


# %% [markdown]
# **Break it: the norms are forgotten.** No error tells you that a plan does not name a norm. The norm then gets this
# rank's tokens as a plain tensor and uses this rank's copy of the weight, as it would on one device.


# %%
def without_norms() -> dict[str, object]:
    return {name: style for name, style in block_plan().items() if "norm" not in name}


forgotten = checks.wrong_block_gradients(without_norms)
print(f"wrong, of nine gradients: {', '.join(forgotten)}")

# %% tags=["claim"]
claim("two gradients are wrong, those of the norms", forgotten == ["attention_norm.weight", "mlp_norm.weight"])

# %% [markdown]
# The gradients of both norms are wrong. The output is right, because a norm looks at one token at a time. But each rank's gradient of a norm's weight sums over
# its own tokens only, so that the copies of one weight get different updates. The mistake is easily made by
# whoever writes sequence parallelism by hand. Megatron-LM marks such weights, and all-reduces their gradients after the
# backward pass. That is one line for each, here for a norm and for a bias that is added to cut tokens, as behind a
# rowwise layer's reduce-scatter. Of eight tokens each rank has four:

# %%
# %%torchrun -n 2 --name by_hand
import torch
import torch.distributed as dist
from torch import nn

from labkit.rank import report

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(8, 16)
alone, mine = ([torch.ones(16, requires_grad=True), torch.ones(16, requires_grad=True)] for _ in range(2))
own_tokens = x.chunk(2)[dist.get_rank()]
for tokens, (weight, bias) in ((x, alone), (own_tokens, mine)):  # one device, and this rank
    (nn.functional.rms_norm(tokens, (16,), weight) + bias).square().sum().backward()
for name, one, own in zip(("norm", "bias"), alone, mine, strict=True):
    report(**{f"{name}, own tokens": float((own.grad - one.grad).norm() / one.grad.norm())})
    dist.all_reduce(own.grad)
    report(**{f"{name}, summed": float((own.grad - one.grad).norm() / one.grad.norm())})

# %%
errors = pandas.DataFrame([each.reported for each in by_hand.ranks]).rename_axis("rank")
errors.round(3)  # how far each gradient is off, relative to one device's

# %% [markdown]
# **When does PyTorch sum?** `SequenceParallel` makes the weight a DTensor that is whole on every rank, so PyTorch knows
# that its gradient has to be summed. Commit: how many all-reduces has `backward()` made for it when it returns?

# %% tags=["commit"]
mine_when = commit(backward=None)
### BEGIN SOLUTION
mine_when = commit(backward=0)
### END SOLUTION

# %%
# %%torchrun -n 2 --name when --use SequenceParallel,ColwiseParallel,Shard,parallelize_module
from torch.distributed.device_mesh import init_device_mesh

from labkit.rank import report
from labkit.session.traffic import CommunicationCounter

dist.init_process_group("gloo")
model, x = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)), torch.randn(2, 4, 16)
plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
for name, action in {
    "backward": lambda: model(x).square().sum().backward(),
    "full_tensor": lambda: model[0].weight.grad.full_tensor(),
    "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "Adam": lambda: torch.optim.Adam(model.parameters()).step(),
}.items():
    with CommunicationCounter() as sent:
        action()
    report(**{name: sent.counts["all_reduce"]})

# %%
print(f"all-reduces: {when.ranks[0].reported}; you: {prediction_text(mine_when['backward'])} in backward")

# %% tags=["claim"]
made = when.ranks[0].reported
claim("not in the backward pass, but by each reader", made["backward"] == 0 and made["full_tensor"] == made["SGD"] == 1)
claim("Adam sums more than once", made["Adam"] > 1)
for name in ("norm", "bias"):
    claim("each rank's own is off by about half", errors[f"{name}, own tokens"].between(0.3, 0.7).all())
    claim("the ranks' gradients differ", errors[f"{name}, own tokens"].nunique() == 2)
    claim("the sum is right", (errors[f"{name}, summed"] < 1e-6).all())

# %% [markdown]
# After `backward()` the gradient is a DTensor that is still *partial*: its value is the sum of what the ranks have.
# Whoever reads it sums it: `full_tensor()` and SGD once, Adam for each operation that needs the value. With FSDP
# along `data` the sum does come in the backward pass, in front of FSDP's reduce-scatter, as you will count below.
#
# **What does it save in a transformer?** A colwise layer with `input_layouts=Shard(1)` gathers for itself, so query,
# key and value gather the same tokens three times, and gate and up twice; each keeps its copy. `gather_once` gathers
# behind each norm instead, and the layers share the result. Two ranks train lab 5's two blocks, with TP alone. The
# whole sequence is planned as lab 5's `one_f`. The network still takes whole samples, so a style for `""`, the network
# itself, cuts them on the way in, from `input_layouts` to `desired_input_layouts`, and gathers the result on the way
# out.


# %%
def whole_sequence(model) -> dict[str, object]:
    as_dtensor = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
    )
    return transformer_plan() | {"blocks.*.*_norm": as_dtensor}  # * stands for any block, and either norm


def each_gathers(model) -> dict[str, object]:
    around = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1), "use_local_input": True}
    around |= {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    blocks = {f"blocks.*.{name}": style for name, style in block_plan().items()}
    return blocks | {"": PrepareModuleInputOutput(**around)}


def gather_once(model) -> dict[str, object]:
    gather = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
    colwise = {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    return each_gathers(model) | colwise | {"blocks.*.*_norm": gather}


# %% tags=["summary"]
PAIR, rows = SETUP | {"nproc": 2, "tp": 2, "network": "transformer"}, {}
for plan in (whole_sequence, each_gathers, gather_once):
    row = rows.setdefault(plan.__name__, {})
    for suffix, checkpointing in (("", False), (", checkpointed", True)):
        found = labkit.run("two_dim", checkpointing=checkpointing, use={"tensor_parallel_plan": plan}, **PAIR)
        sent = theory.axis_wire_bytes(handed(found), data=1, tp=2)["tp"]
        for name, size in (("sent", sent), ("peak", found.value("peak_total_bytes"))):
            row[f"{name}{suffix}"] = size / (4 * 8 * BATCH * DIM)
transformer = pandas.DataFrame.from_dict(rows, orient="index")
# In tensors of [tokens, DIM]. On two ranks a gather or a reduce-scatter sends half a tensor, and an all-reduce a whole one.
transformer.round(1)

# %% tags=["claim"]
whole, each, once = (transformer.loc[plan.__name__] for plan in (whole_sequence, each_gathers, gather_once))
claim("each gathers: 1.8 times the bytes", 1.7 < each["sent"] / whole["sent"] < 1.9, where=TOLD)
claim("and more memory", (each > whole).all(), where=TOLD)
claim("once: about the same bytes", 0 < once["sent"] / whole["sent"] - 1 < 0.1, where=TOLD)
for suffix in ("", ", checkpointed"):
    claim("once: a lower peak", once[f"peak{suffix}"] < 0.96 * whole[f"peak{suffix}"], where=TOLD)
more = once["sent, checkpointed"] - once["sent"]
claim("three tensors more, and two", abs(more - 3) < 0.01, where=TOLD)
claim("two", abs(whole["sent, checkpointed"] - whole["sent"] - 2) < 0.01, where=TOLD)

# %% [markdown]
# If each layer gathers, the cut network sends 1.8 times the bytes of the whole one and needs more memory. If each
# norm's result is gathered once, it sends little more (its result is gathered at the end) and its peak is lower.
#
# Checkpointing adds two tensors to what the whole network sends, and three to `gather_once`. PyTorch ends a
# recomputation once the backward pass has all that it needs. A block ends in a residual sum, which keeps nothing, so
# its last all-reduce is not repeated. A cut block must still repeat the gather in front of its MLP.
#
# ### From token ids to the loss
#
# One plan can cut a whole language model: the vocabulary at both ends, the MLP's matrices, and the sequence.


# %%
class LanguageModel(nn.Module):
    def __init__(self, words: int = 100, width: int = 16):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.last_norm, self.head = nn.RMSNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)  # [samples, tokens, features]
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x))


# %% [markdown]
# ### Exercise 4: the whole plan (•, {minutes} minutes)
#
# Write the plan for this model's six layers. The token ids come in whole, tokens are cut wherever activations wait, and
# the logits stay cut over the words.
#
# <details><summary>Hint 1</summary>
#
# Begin with section 2's plan for both ends. What should the embedding leave, and what does the output layer get?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The four layers between them are as in the block. The output layer is colwise, and `use_local_output=False` keeps what
# it leaves a DTensor.
#
# </details>


# %%
def whole_plan() -> dict[str, object]:
    ### BEGIN SOLUTION
    cut = Shard(1)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=cut),
        "down": RowwiseParallel(output_layouts=cut),
        "last_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, use_local_output=False),
    }
    ### END SOLUTION


# %%
plan_verdict = checks.language_plan(whole_plan)
the_plan = (whole_plan if plan_verdict.ok else checks.our_language_plan)()
plan_verdict

# %% [markdown]
# ### Exercise 5: both axes (••, {minutes} minutes)
#
# Now without labkit: share `model` out by `plan` along `mesh["tp"]`, then with FSDP along `mesh["data"]`, and compute
# the gradients of the loss. `ids` [samples, tokens + 1] are token ids of this rank; each token is to predict the next.
# The logits stay cut.
#
# <details><summary>Hint 1</summary>
#
# TP comes first, because FSDP shards what the plan leaves to a rank. `parallelize_module` and `fully_shard` change the
# model in place.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The model gets `ids[:, :-1]`, and the right words are `ids[:, 1:]`. `cross_entropy` takes logits [all tokens, words]
# and words [all tokens]: flatten both.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `parallelize_module(model, mesh["tp"], plan)`, `fully_shard(model, mesh=mesh["data"])`; then the model, the loss and
# `backward()` inside `with loss_parallel():`.
#
# </details>


# %%
def language_step(model: nn.Module, ids: torch.Tensor, mesh, plan) -> None:
    ### BEGIN SOLUTION
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["data"])
    with loss_parallel():
        logits = model(ids[:, :-1])
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    ### END SOLUTION


# %%
step_verdict = checks.language_step(language_step)
the_step = language_step if step_verdict.ok else checks.our_language_step
step_verdict

# %% [markdown]
# Your step and your plan now run on 2 × 2 ranks with 100 words. Commit: how many collectives does the step take along
# `tp`, in both passes? In its cell, `--use` hands names of the notebook to the ranks; the notebook's modules, such as
# `torch`, `dist` and `copy`, come by themselves.

# %% tags=["commit"]
mine_language = commit(all_gather=None, reduce_scatter=None, all_reduce=None)
### BEGIN SOLUTION
mine_language = commit(all_gather=4, reduce_scatter=4, all_reduce=3 + 2)
### END SOLUTION

# %%
# %%torchrun -n 4 --name language_model --use LanguageModel,the_plan,the_step,cross_entropy
import logging
import warnings

from torch.distributed.device_mesh import init_device_mesh

from labkit.rank import report
from labkit.session.traffic import CommunicationCounter

warnings.filterwarnings("ignore", message="Full backward hook")  # token ids have no gradient
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor gathers along both axes, slowly
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
torch.manual_seed(0)
alone, ids = LanguageModel(), torch.randint(100, (6, 9))  # 8 tokens, and the next of each
cross_entropy(alone(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
model = copy.deepcopy(alone)
with CommunicationCounter(mesh) as sent:
    the_step(model, ids.chunk(2)[mesh["data"].get_local_rank()], mesh, the_plan)
pairs = zip(alone.parameters(), model.parameters(), strict=True)
off = [float((mine.grad.full_tensor() - one.grad).norm() / one.grad.norm()) for one, mine in pairs]
report(off=max(off), gradients=len(off), **{axis: dict(sent.along[axis].counts) for axis in ("tp", "data")})

# %%
model_report = language_model.ranks[0].reported
along_tp = {name: model_report["tp"][name] for name in mine_language}
print(
    f"{model_report['gradients']} gradients, off by {model_report['off']:.5f} at most; along data {model_report['data']}"
)
plots.comparison_table(along_tp, yours=mine_language)

# %% tags=["claim"]
claim("all nine gradients are right", model_report["gradients"] == 9 and model_report["off"] < 1e-5)
claim("as the text counts", along_tp == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 5})

# %% [markdown]
# Each of the four boundaries between cut tokens and whole ones costs an all-gather in one pass and a reduce-scatter in
# the other: behind the embedding, around the MLP, and before the output layer. Three all-reduces are the loss's
# numbers, and two are the gradients of the norms, for which FSDP does not wait until the optimizer reads them. The
# bias of `down` needs none: it is added before the reduce-scatter, whose backward pass gathers all tokens.
#
# *Takeaway: a weight that each rank uses on its own tokens has a gradient that must be summed along `tp`. FSDP does it
# in the backward pass, without FSDP whoever reads the gradient does, and by hand you do.*
#
# ## 5. A test that cannot fail ({minutes} minutes)
#
# Some language models begin with biases of zero, as GPT-2 and BERT do. In lab 5's second layer each rank has a part of
# the sum, and the bias must be added once. Suppose that somebody tests that layer with such a model: its output on two
# ranks must equal one device's. Does the test find a bias that every rank adds?

# %%
draw = torch.Generator().manual_seed(2)
x, weight = torch.randn(3, 8, generator=draw), torch.randn(4, 8, generator=draw)
for name, bias in {"biases of zero": torch.zeros(4), "random biases": torch.randn(4, generator=draw)}.items():
    cuts = zip(x.chunk(2, dim=1), weight.chunk(2, dim=1), strict=True)
    on_each_rank = sum(features @ columns.T + bias for features, columns in cuts)  # the trap
    off_by = (on_each_rank - (x @ weight.T + bias)).abs().max()
    print(f"{name}: the output is off by {off_by:.1f} at most")

# %% [markdown]
# With zeros the test cannot find this mistake, because twice zero is zero.
#
# *Takeaway: test with numbers that are not special, such as random biases.*
#
# ## 6. Take away ({minutes} minutes)
#
# 1. To FSDP or DDP along `data`, a rank's share along `tp` is a thinner model, and their formulas hold.
# 2. The vocabulary is cut at both ends of a language model, and `loss_parallel` needs no whole logits.
# 3. Sequence parallelism splits each all-reduce in two and shares what lies between the pairs; the gradient of a norm's
#    weight there must be summed along `tp`.
#
# | if | then |
# |---|---|
# | there are many tokens and narrow layers | more ranks along `data` |
# | layers are wide and tokens few | more along `tp`, on the fastest links |
# | activations between the pairs are too large | cut the sequence, and gather once for layers with one input |
# | a norm works on cut tokens | give it a style, so that its gradient is summed along `tp` |
# | logits are too large | leave them cut, and use `loss_parallel` |
# | memory is no concern along `data` | use DDP there (`launch/two_dim.py`, `--plan ddp_tp`), which sends less |
# | a plan gives layouts | write above each arrow what is whole, and compare gradients |
#
# **Ask yourself**
#
# <details><summary>1. With plain TP, too, every rank has a copy of a norm's weight. Why need its gradient not be summed there?</summary>
#
# Every rank has all tokens, and where the pair begins an all-reduce has summed the gradient of the norm's output. So
# every rank computes the same gradient of the weight; a sum over the ranks would be `tp` times too large.
#
# </details>
# <details><summary>2. Why does `RowwiseParallel` cut an embedding along dim 0, and a linear layer along dim 1?</summary>
#
# Both cut what the result is a sum over. A lookup is a sum over the words of a table [words, features], so dim 0. A
# linear layer sums over the inputs of a weight [outputs, inputs], so dim 1.
#
# </details>
# <details><summary>3. Why can a norm be computed on a part of the tokens, and not on a part of the features?</summary>
#
# It treats each token alone, but divides by a mean over all of its features.
#
# </details>
# <details><summary>4. What does sequence parallelism save in a stack of bare MLPs without checkpointing?</summary>
#
# Nothing. By theory it costs some memory: each pair keeps the whole input that it has gathered, beside its share.
#
# </details>
# <details><summary>5. Your test of a sharded layer passes with biases of zero. What do you know of the bias?</summary>
#
# Nothing, because any multiple of zero is zero.
#
# </details>
#
# <details><summary>Papers and pages</summary>
#
# - Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022:
#   https://arxiv.org/abs/2205.05198
# - PyTorch's pages: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html, and on meshes:
#   https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
# - On GPUs the same programs are written to run unchanged, `labkit.run("two_dim", nproc=4, preset="paper")`, which has
#   not been verified yet.
#
# </details>
#
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("two_dim_at_work")
