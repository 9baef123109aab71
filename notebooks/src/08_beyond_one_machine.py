# %% [markdown]
# # Lab 8. Beyond one machine
#
# One machine usually ends at eight GPUs (there are racks that join more by NVLink). Beyond that, a run has several
# **hosts**: machines that share a network, perhaps a disk, and nothing else. The programs stay the same. Three things
# are new. The hosts must find each other. What goes from host to host is slower than what stays inside. And with many
# hosts, one of them will fail while the run goes on.
#
# After this lab you can
#
# - start a run on several hosts with torchrun, and say what each rank is told;
# - lay out parallelism so that little leaves a host;
# - save a training run whose state is sharded, lose a host, and go on with another number of ranks;
# - choose how often to save;
# - read the script of a cluster's job line by line.
#
# You need labs 0 and 2: collectives, FSDP, HSDP. You need no cluster: the hosts of this lab are staged on this machine,
# and the next section says how. The sections marked **core** take about {core_minutes} minutes. Exercises have dots for their
# difficulty: •, •• or •••. Where a cell says `commit`, put down your own numbers before you run. Leave None where you
# have none. Sentences in italics are checked by a cell with claims.

# %% [markdown]
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas
from IPython.display import Markdown

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.errors import HostLost, NotAllHosts
from labkit.runs import history
from labkit.runs.folder import ROOT
from labkit.theory import fsdp as fsdp_theory
from labkit_cluster import theory
from labkit_cluster.local_hosts import start_local_hosts
from labkit_course.checks import hosts as checks
from labkit_course.checks.claims import claim, commit

doctor.show()

# %% [markdown]
# The parameters of this notebook. You may change them; the next cell refuses what cannot work. The text speaks of
# these; cells say what yours change.

# %% tags=["parameters"] small={"DIM": 32} points=[[2,4],[3,48],[4,128]]
RANKS: int = 2  # ranks of each of the two hosts
DIM: int = 64  # width of the network

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="a host needs two, and more than 4 on each take minutes here")
require("DIM", DIM, at_least=4, multiple_of=2 * RANKS, because="every rank holds equally many rows")

# %% [markdown]
# Now two hosts, alpha and beta. They are **staged**: both are parts of this machine. As root on Linux each is a network
# namespace. It has a network interface and a loopback of its own, and a virtual cable leads from each to a bridge,
# which is a switch. Over the network, what runs in one reaches the other only through these cables. They share this
# machine's cores and its disk, which stands for the shared disk of a cluster. Without root, the two are groups of
# processes that meet on this machine's loopback. The cell says which it is.

# %% tags=["nbval-ignore-output"]
at_end = contextlib.ExitStack()
hosts = at_end.enter_context(start_local_hosts(2))
hosts

# %% [markdown]
# ## 1. Why
#
# **core, {minutes} minutes**
#
# Inside a host with eight H100 GPUs, NVLink carries up to 450 GB/s from each GPU. Between hosts, a network card carries
# 400 Gb/s, which is 50 GB/s (both from NVIDIA's data sheets; each in one direction). Some hosts have one such card. The
# best have one for each GPU.
#
# A model of 8 billion parameters has 16 GB in bfloat16. An all-gather on two hosts of 8 GPUs is a ring of 16 ranks:
# 15/16 of the model goes from each GPU to the next, and so from one host to the other. With eight cards there are eight
# rings, each with an eighth of the model and a card of its own. Leave latency out. How many milliseconds does that take
# with one card, with eight, and if NVLink joined all 16 GPUs?

# %% tags=["commit"]
mine = commit(nvlink_ms=None, one_card_ms=None, eight_cards_ms=None)
### BEGIN SOLUTION
mine = commit(nvlink_ms=15 / 450 * 1e3, one_card_ms=15 / 50 * 1e3, eight_cards_ms=15 / (8 * 50) * 1e3)
### END SOLUTION

# %%
speeds = {"nvlink_ms": 450, "one_card_ms": 50, "eight_cards_ms": 8 * 50}
milliseconds = {name: 15 / 16 * 16 / speed * 1e3 for name, speed in speeds.items()}
rows = {name: ["–" if mine[name] is None else f"{mine[name]:.3g}", f"{ms:.3g}"] for name, ms in milliseconds.items()}
pandas.DataFrame.from_dict(rows, orient="index", columns=["yours", "theory"])

# %% [markdown]
# With one card it takes nine times as long as over NVLink, and FSDP gathers twice in a step and reduces once. Eight
# cards almost make up for it. That is why the best hosts have eight. The cards and the switches behind them cost money,
# and other jobs share them. Where hosts have fewer, it is worth a lot to keep most of the bytes inside a host. Section
# 4 does that, and computes when it pays.
#
# ## 2. The code you would write
#
# **core, {minutes} minutes**
#
# The program of a run on many hosts is the program that you know. It must not care how many there are (here, any number
# of ranks that divides the 16 samples of a step), and it must be able to go on after a loss. This one does both. It
# shards a network with FSDP2. After each step it saves with `torch.distributed.checkpoint`, in which each rank writes
# its own shards. When it starts, it looks for the newest save.

# %% tags=["nbval-ignore-output"]
place = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
os.environ["CHECKPOINTS"] = str(place / "by_hand")  # where the next cell saves

# %% tags=["script"]
# %%torchrun -n 4 --name by_hand
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs. torchrun has told this process who it is, and where the others are
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))  # "cuda" on GPUs. One unit: the network is tiny
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
folder = Path(os.environ.get("CHECKPOINTS", "checkpoints"))  # on a disk that all hosts see
complete = sorted(folder.glob("step_*/.metadata"))  # written last: a save without it was cut off
newest = [complete[-1].parent if complete else None]
dist.broadcast_object_list(newest)  # rank 0's: hosts may see a new file of a shared disk at different moments
done = 0
if newest[0]:
    weights, updates = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": updates, "step": 0}
    dcp.load(state, checkpoint_id=newest[0])  # cuts each tensor anew for as many ranks as there are now
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = state["step"]
for step in range(done, done + 3):
    samples = torch.Generator().manual_seed(step)  # those of this step, whoever computes them
    x = torch.randn(16, 16, generator=samples).chunk(ranks)[rank]  # on GPUs: .to("cuda")
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    weights, updates = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": updates, "step": step + 1}, checkpoint_id=folder / f"step_{step + 1:08d}")
print(f"rank {rank} of {ranks} trained steps {done} to {step}")
dist.destroy_process_group()

# %% [markdown]
# *Each of the four ranks trained steps 0 to 2, and every step is saved whole.* Some lines deserve a word. The folder
# must be one that all hosts see: otherwise each host has the shards of its own ranks alone, and none can load them. The
# newest save may be half written, for the run may have died while it saved; so look for `.metadata`, which is written
# last. `get_state_dict` gives names that do not depend on the sharding. `dcp.load` gives nothing back: it fills the
# state that it is handed, so there must be one of the right shapes first (the step 0 in it is a placeholder). And the
# samples depend on the step alone, not on the number of ranks or on what was drawn before. On GPUs,
# `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` comes first, as in lab 0.

# %% tags=["claim"]
said = [rank.log() for rank in by_hand.ranks]
claim("each of the four ranks trained steps 0 to 2", all("trained steps 0 to 2" in text for text in said))
saves = sorted(path.parent.name for path in (place / "by_hand").glob("step_*/.metadata"))
claim("every step is saved whole", saves == [f"step_{step:08d}" for step in (1, 2, 3)])

# %% [markdown]
# Now run the program's cell again, with `-n 2` in its first line. (The claims above speak of its first run.) Two ranks
# go on, and each says "trained steps 3 to 5". (Nothing deletes old saves here. labkit's programs keep the newest two.)
# The state on disk knows the whole shape of each tensor, and the place of each shard in it.
#
# ## 3. Rendezvous: how hosts find each other
#
# **core, {minutes} minutes**
#
# torchrun is started once on each host. All of them are given the same **endpoint**, a name and a port of the first
# host, here of alpha. There they meet; that is the **rendezvous**. Each then starts its ranks, and tells them through
# environment variables who they are:
#
# | variable | says |
# |---|---|
# | `RANK`, `WORLD_SIZE` | which rank among all |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | which rank on this host: the number of its GPU |
# | `GROUP_RANK` | which host (also called node rank) |
# | `MASTER_ADDR`, `MASTER_PORT` | where the store is through which process groups find each other. With `--rdzv-backend c10d` it has a port of its own, not the endpoint's |
#
# Ranks are numbered host by host. On which host is rank 11, if each has 8 ranks, and which local rank is it there? And
# which local rank is rank 20? Count from 0.

# %% tags=["commit"]
mine = commit(host_of_11=None, local_of_11=None, local_of_20=None)
### BEGIN SOLUTION
mine = commit(host_of_11=1, local_of_11=3, local_of_20=4)
### END SOLUTION

# %% [markdown]
# ### Exercise 1: who is where (•, {minutes} minutes)
#
# Return the index of a rank's host, and its local rank there.
#
# <details><summary>Hint</summary>
#
# `divmod` gives quotient and remainder at once.
#
# </details>


# %%
def place_of(rank: int, nproc: int) -> tuple[int, int]:
    ### BEGIN SOLUTION
    return rank // nproc, rank % nproc
    ### END SOLUTION


# %%
verdict = checks.place_of(place_of)
verdict

# %%
where = place_of if verdict.ok else theory.host_and_local_rank
by_theory = {"host_of_11": where(11, 8)[0], "local_of_11": where(11, 8)[1], "local_of_20": where(20, 8)[1]}
rows = {name: ["–" if mine[name] is None else f"{mine[name]:g}", str(value)] for name, value in by_theory.items()}
pandas.DataFrame.from_dict(rows, orient="index", columns=["yours", "theory"])

# %% [markdown]
# ### By hand, without labkit
#
# Now start torchrun on both hosts, as you would type it there. `--rdzv-backend c10d` is the usual kind of rendezvous,
# and `--rdzv-id` any name for the run, the same on all hosts. Three settings are what people most often get wrong:
#
# - `--rdzv-conf is_host=1` on alpha says that the endpoint is alpha's own, and `is_host=0` on beta that it is not;
# - `--local-addr` is this host's own address;
# - `GLOO_SOCKET_IFNAME` is the network interface that the ranks shall use (with NCCL it is `NCCL_SOCKET_IFNAME`; over
#   InfiniBand that carries the first meeting alone, and `NCCL_IB_HCA` names the cards).
#
# (`OMP_NUM_THREADS=1` gives each rank one thread: two hosts share this machine's cores.)
#
# Left out, the first two and gloo's interface are guessed from the host's name. On many machines that name leads to the
# loopback, where no other host can be found. Or no host takes the endpoint for its own, and all wait for a minute
# (pytorch/pytorch#73656). NCCL guesses, too: it takes the first interface that looks good.

# %%
script = place / "who.py"
script.write_text("""
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
line = " ".join(["who", *(os.environ[name] for name in names), str(int(total))])
print(line, flush=True)  # in one piece: ranks of a host write into the same pipe
dist.destroy_process_group()
""")


def type_on(host: labkit.Host, arguments: str, script: Path, *variables: str) -> subprocess.Popen:
    """Start torchrun with a script, these arguments and environment variables on a host, as if typed there."""
    own = [f"GLOO_SOCKET_IFNAME={hosts.interface}", "OMP_NUM_THREADS=1", *variables]
    print(f"{host.name}$ {' '.join(own)} torchrun {arguments} {script.name}")
    words = ["env", *own, sys.executable, "-m", "torch.distributed.run", *arguments.split(), str(script)]
    return subprocess.Popen([*host.command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# %% tags=["nbval-ignore-output"]
endpoint = f"{hosts.host_address('alpha')}:29500"
started = [
    type_on(
        host,
        f"--nnodes 2 --nproc-per-node {RANKS} --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id lab8 "
        f"--rdzv-conf is_host={int(host.name == 'alpha')} --local-addr {hosts.host_address(host.name)}",
        script,
    )
    for host in hosts
]
lines = []
for host, process in zip(hosts, started, strict=True):
    said = process.communicate(timeout=120)[0]
    lines += [[host.name, *map(int, numbers.split())] for numbers in re.findall(r"who((?: \d+){6})", said)]
columns = ["typed on", "RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "sum of ones"]
who = pandas.DataFrame(lines, columns=columns).sort_values("RANK").set_index("RANK")
who

# %% [markdown]
# *All ranks are in one world: the sum of ones over all of them is the world size. Each has the place that the rule
# gives.* Which host becomes number 0? The rendezvous sorts the hosts by `--local-addr`, as text (10.0.0.10 comes before
# 10.0.0.9). It need not be the host of the endpoint, and `--node-rank` has no say here.

# %% tags=["claim"]
claim("all ranks are in one world", set(who["sum of ones"]) == {2 * RANKS} and sorted(who.index) == [*range(2 * RANKS)])
places = {rank: (int(row.GROUP_RANK), int(row.LOCAL_RANK)) for rank, row in who.iterrows()}
claim("each has the place that the rule gives", places == {rank: where(rank, RANKS) for rank in places})

# %% [markdown]
# ### The same with labkit
#
# `labkit.run(…, hosts=[…])` does this for you. On your own machines, give the names by which ssh reaches them without a
# password: `hosts=["alpha", "beta"]`. An agent on each host says at which addresses it can be found, and all try all of
# them. So no address has to be known, and what goes wrong is told before any rank starts.
#
# Here is one thing that goes wrong: alpha is given an address that is not its own. torchrun would wait for the endpoint
# and give up after 60 seconds. How long does it take here? The cell fails on purpose.

# %% tags=["nbval-ignore-output"]
begun = time.monotonic()
try:
    labkit.run("all_reduce", nproc=1, hosts=[replace(hosts[0], address="10.77.0.99"), hosts[1]])
except NotAllHosts as error:
    told = f"{error}"
told_after_s = time.monotonic() - begun
print(f"after {told_after_s:.1f} s: {told}")

# %% [markdown]
# *The message names the host and what to do, in less than 15 seconds.*
#
# What the hosts also compare before they start: the versions of Python and torch, and the sources of labkit. And a
# world that is smaller than asked for never trains. Without that check, where the number of hosts is a range (`--nnodes
# 1:4`) or was forgotten, a host that takes the endpoint for its own and finds nobody begins alone. Its loss looks fine.

# %% tags=["claim"]
claim("the message names the host and what to do", "alpha" in told and "give one of" in told)
claim("in less than 15 seconds", told_after_s < 15)

# %% [markdown]
# ## 4. What leaves a host
#
# **core, {minutes} minutes**
#
# FSDP over all ranks gathers every unit from all hosts. **HSDP** (lab 2) shards inside a host and replicates from host
# to host: gathers stay inside, and only the gradients' shards are added up across. Each host then holds a whole copy.
#
# In your own program that is a mesh of two axes: `init_device_mesh("cuda", (hosts, nproc), mesh_dim_names=("replicate",
# "shard"))`, given to `fully_shard`. Ranks are numbered host by host, so the last axis lies inside a host. The other
# way round, every gather would leave it. labkit's `hybrid=` is the size of that last axis.
#
# A ring of all ranks in their order leaves each host once: where its last rank sends to the first of the next host. So
# what leaves a host in a ring is what one rank sends.
#
# ### Exercise 2: bytes that leave a host in a step (••, {minutes} minutes)
#
# `parameter_bytes` is the size of the model; its gradients are as large. FSDP over all ranks gathers every unit twice
# and reduce-scatters it once. Under HSDP (`hybrid`), each of a host's ranks has a shard of 1/nproc, and is in a ring of
# its own with the ranks of the other hosts that hold the same shard. There they do an all-reduce. Return the bytes on
# the wire that leave one host. (Lab 0: a ring of n ranks sends (n − 1)/n of a tensor for an all-gather or a
# reduce-scatter, and twice that for an all-reduce.)
#
# <details><summary>Hint 1</summary>
#
# FSDP: three times (n − 1)/n of the model, with n for all ranks.
#
# </details>
# <details><summary>Hint 2</summary>
#
# HSDP: `nproc` rings of `hosts` ranks each, and each moves `parameter_bytes / nproc`.
#
# </details>


# %%
def leaves_a_host(parameter_bytes: float, hosts: int, nproc: int, hybrid: bool) -> float:
    ### BEGIN SOLUTION
    if hybrid:
        return nproc * 2 * (hosts - 1) / hosts * parameter_bytes / nproc
    ranks = hosts * nproc
    return 3 * (ranks - 1) / ranks * parameter_bytes
    ### END SOLUTION


# %%
verdict = checks.leaves_a_host(leaves_a_host)
verdict

# %% [markdown]
# Now run it. The same network is trained on two hosts, once with FSDP over all ranks and once with HSDP. labkit counts
# in each rank the calls and their sizes, and which had ranks of another host in their group. The bytes on the wire
# follow by the rule of the ring, as NCCL's rings send them. (gloo may send more, and NCCL has trees, too.) How many
# bytes will leave a host in each case?

# %%
layers = fsdp_theory.mlp_stack_layers("block", DIM)
parameter_bytes = sum(whole for _, whole in fsdp_theory.unit_bytes(layers, 1).values())
print(f"the model has {parameter_bytes:,} bytes")

# %% tags=["commit"]
mine = commit(fsdp_bytes=None, hsdp_bytes=None)
### BEGIN SOLUTION
mine = commit(fsdp_bytes=3 * 3 / 4 * 331_008, hsdp_bytes=331_008)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
how = {"model": "mlp_stack", "dim": DIM, "device": "cpu"}
flat = labkit.run("fsdp_wrap", nproc=RANKS, hosts=hosts, steps=2, timeline=True, **how)
hybrid = labkit.run("fsdp_matrix", nproc=RANKS, hosts=hosts, steps=2, timeline=True, hybrid=RANKS, **how)

# %%
predict = (
    leaves_a_host
    if verdict.ok
    else lambda size, n, each, hybrid: theory.host_egress_bytes(size, n, each, hybrid=hybrid)
)
by_theory = {
    "fsdp_bytes": predict(parameter_bytes, 2, RANKS, False),
    "hsdp_bytes": predict(parameter_bytes, 2, RANKS, True),
}
measured = {
    "fsdp_bytes": flat.value("all_gather_wire_bytes") + flat.value("reduce_scatter_wire_bytes"),
    "hsdp_bytes": RANKS * hybrid.value("all_reduce_wire_bytes"),
}
plots.comparison_table(measured, by_theory, yours=mine, tolerance=0.01, column="counted")

# %% [markdown]
# *The counted bytes are those of theory, and with HSDP less than half as many bytes leave a host.* And which calls are
# they? The table has the bytes that one rank hands to its calls in a step, and how many of them go to calls that have
# ranks of both hosts in them. A gather is handed the rank's shard, a reduce-scatter the whole gradient, and an
# all-reduce the shard of it; what goes over the wire for them is another number.

# %%
kinds = ("all_gather", "reduce_scatter", "all_reduce")
rows = {
    (name, kind): [run.value(f"{kind}_bytes"), run.value(f"{kind}_between_hosts_bytes")]
    for name, run in {"FSDP": flat, "HSDP": hybrid}.items()
    for kind in kinds
    if f"{kind}_bytes" in run.summary()
}
pandas.DataFrame.from_dict(rows, orient="index", columns=["all", "between hosts"]).astype(int)

# %% [markdown]
# *Under HSDP all-gathers and reduce-scatters stay inside the hosts; all-reduces alone go between them.*

# %% tags=["claim"]
claim(
    "the counted bytes are those of theory", all(abs(by_theory[name] / measured[name] - 1) < 1e-9 for name in measured)
)
claim("with HSDP less than half as many bytes leave a host", measured["hsdp_bytes"] < measured["fsdp_bytes"] / 2)
inside = [hybrid.value(f"{kind}_between_hosts_bytes") for kind in ("all_gather", "reduce_scatter")]
claim("all-gathers and reduce-scatters stay inside the hosts", inside == [0, 0])
claim(
    "all-reduces alone go between them",
    hybrid.value("all_reduce_between_hosts_bytes") == hybrid.value("all_reduce_bytes") > 0,
)

# %% [markdown]
# The time line of one step with HSDP, by host:

# %% tags=["nbval-ignore-output"]
_ = plots.timeline(hybrid)

# %% [markdown]
# Two rows for each rank, a line between the hosts. The numbers are units, as in lab 2's time line, where there is room
# for them; white above a call is waiting for it, and white in both rows is Python, or waiting for a core. Compute is
# all that a rank does except to ask and to wait: before a unit's gather, too, such as copying its shard into the
# message. In yellow are the all-reduces: *they alone leave a host*. Each rank's time begins with its own step, so one
# call may stand at different places in different rows. And a bar includes waiting: who comes first has the longest. On
# two cores, which four ranks and gloo share, hardly anything hides. The hosts' cores are all this machine's, and the
# cable between them is memory: the figure shows which calls there are and in which order, but not the speed of a
# network.
#
# The price of HSDP is memory. Each host holds a whole copy of the model, its gradients and the optimizer's state, where
# FSDP over all hosts holds one in all. So HSDP is possible when the state fits into one host. When it does not fit,
# shard over as few hosts as it needs. *After a step a rank holds twice as many bytes with HSDP on two hosts as with
# FSDP.* (Adam also counts its steps, with four bytes for each parameter tensor: the 48 bytes by which the last column
# is more than twice the first.)

# %%
parts = [f"end_{part}_bytes" for part in ("parameter", "gradient", "optstate")]
held = {name: [run.value(part) for part in parts] for name, run in {"FSDP": flat, "HSDP": hybrid}.items()}
pandas.DataFrame.from_dict(held, orient="index", columns=["parameters", "gradients", "state of Adam"]).astype(int)

# %% tags=["claim"]
steps_bytes = 0, 0, 48  # in which Adam counts
more = [(hsdp - ours) / (fsdp - ours) for hsdp, fsdp, ours in zip(held["HSDP"], held["FSDP"], steps_bytes, strict=True)]
claim("twice as much with HSDP on two hosts", more == [2, 2, 2])

# %% [markdown]
# ### When does it pay?
#
# Take 8 billion parameters with gradients, both in bfloat16: 16 GB each (with Adam's state they fit into one host).
# There are 2 hosts of 8 GPUs, with one card in each host (50 GB/s), or with eight (400 GB/s). For how many milliseconds
# of a step are the cards busy?

# %% tags=["commit"]
mine = commit(fsdp_one_card=None, hsdp_one_card=None, fsdp_eight_cards=None, hsdp_eight_cards=None)
### BEGIN SOLUTION
mine = commit(fsdp_one_card=45 / 50 * 1e3, hsdp_one_card=320, fsdp_eight_cards=45 / 400 * 1e3, hsdp_eight_cards=40)
### END SOLUTION

# %%
by_theory = {
    f"{name}_{cards}": predict(16e9, 2, 8, name == "hsdp") / bytes_per_s * 1e3
    for cards, bytes_per_s in {"one_card": 50e9, "eight_cards": 400e9}.items()
    for name in ("fsdp", "hsdp")
}
rows = {name: ["–" if mine[name] is None else f"{mine[name]:.4g}", f"{ms:.4g}"] for name, ms in by_theory.items()}
pandas.DataFrame.from_dict(rows, orient="index", columns=["yours, ms", "theory, ms"])

# %% [markdown]
# Bytes hide only behind the computation of their own pass. It takes about two operations for each parameter and token
# in the forward pass, and four in the backward pass. FSDP gathers in both and reduces in the backward pass. HSDP's
# all-reduces come in the backward pass alone. For 4,096 tokens on each GPU, at 400 TFLOP/s, in milliseconds:

# %%
passes = {"computing": [flops * 8e9 * 4096 / 400e12 * 1e3 for flops in (2, 4)]}
for cards in ("one_card", "eight_cards"):
    passes[f"FSDP, {cards}"] = [part / 3 * by_theory[f"fsdp_{cards}"] for part in (1, 2)]
    passes[f"HSDP, {cards}"] = [0, by_theory[f"hsdp_{cards}"]]
many_ms = predict(16e9, 128, 8, True) / 50e9 * 1e3
print(f"HSDP, one_card, on 128 hosts: {many_ms:.0f} ms in the backward pass")
table = pandas.DataFrame.from_dict(passes, orient="index", columns=["forward", "backward"])
table["step, if all hides that can"] = table.clip(lower=table.loc["computing"], axis=1).sum(axis=1)
table.round(1)

# %% [markdown]
# - With one card, *FSDP's bytes take nearly twice as long as the computation of each pass*: nearly half of them is
#   exposed. *HSDP's can hide, but only just, on two hosts*, and only on paper: no network gives all of its 50 GB/s, and
#   gradients that are reduced in float32 are twice as many bytes.
# - With eight cards *both fit four times into their pass*. So there is little for HSDP to gain: *with one card a step
#   takes 1.8 times as long with FSDP as with HSDP, with eight equally long*.
# - *On 128 hosts HSDP's bytes nearly double, and with one card they no longer hide.* It is still ahead, by a factor of
#   1.2. FSDP's hardly change, since (n − 1)/n is almost 1 already. What helps then is to compute more for each byte:
#   more tokens on a GPU, or gradients that are accumulated over several batches. (With HSDP,
#   `set_requires_all_reduce(False)` keeps all but the last batch from reducing across hosts. FSDP gathers for each
#   batch all the same.)
#
# HSDP's gathers and reduce-scatters have not gone away. They are inside the host now, and NVLink needs 93 ms for the
# three. The reduction of the unit that the backward pass reaches last has nothing left to hide behind. And latency,
# which these numbers leave out, grows with the length of a ring. On 128 hosts FSDP's ring has 1,024 ranks, HSDP's 128.

# %% tags=["claim"]
computing = passes["computing"]
ratios = [busy / ms for busy, ms in zip(passes["FSDP, one_card"], computing, strict=True)]
claim("with one card FSDP's bytes take nearly twice as long as each pass", all(1.7 < ratio < 2 for ratio in ratios))
claim("HSDP's hide, but only just", 0.9 < passes["HSDP, one_card"][1] / computing[1] < 1)
most = max(passes["FSDP, eight_cards"][1], passes["HSDP, eight_cards"][1])
claim("with eight cards both fit four times into their pass", 4 * most < computing[1])
step_ms = table[table.columns[-1]]
claim("with one card 1.8 times as long", 1.8 < step_ms["FSDP, one_card"] / step_ms["HSDP, one_card"] < 1.9)
claim("with eight equally long", step_ms["FSDP, eight_cards"] == step_ms["HSDP, eight_cards"])
claim(
    "on 128 hosts HSDP's bytes nearly double, and no longer hide",
    2 * by_theory["hsdp_one_card"] > many_ms > computing[1],
)

# %% [markdown]
# ## 5. A host is lost
#
# **core, {minutes} minutes**
#
# While Llama 3 was trained, on 16,384 GPUs, something failed every three hours. What happens to such a run? All ranks
# wait for the lost ones in the next collective. Nothing that was in the memory of the lost ones comes back. So a run
# that is to survive must save.
#
# We train for 12 steps on both hosts (with labkit's one to warm up, and a last one that is traced, they are 14), save
# after each, and pull the plug of beta while that runs. The plug is staged: all processes on beta are killed at once.
# Their system still closes their connections, so alpha's ranks notice in the same moment (with gloo; with NCCL over
# InfiniBand even this may be noticed only at a limit of time). After a real power cut nobody closes anything. Then
# ranks may wait for the limit of their process group (30 minutes with gloo, 10 with NCCL, or what
# `init_process_group(timeout=…)` says), unless the network gives up earlier. The hosts of a labkit run also ask each
# other whether they are there.

# %% tags=["nbval-ignore-output"]
checkpoints = place / "checkpoints"
how |= {"steps": 12}
unbroken = labkit.run("fsdp_matrix", nproc=2 * RANKS, **how)  # to compare with: as many ranks, and one host


def cut_power() -> None:
    """Kill all of beta's processes as soon as step 4 is saved."""
    while not (checkpoints / "step_00000004" / ".metadata").exists():
        time.sleep(0.01)
    hosts.kill_host("beta")


power_cut = threading.Thread(target=cut_power, daemon=True)
power_cut.start()
try:
    labkit.run("fsdp_matrix", nproc=RANKS, hosts=hosts, checkpoints=str(checkpoints), **how)
except HostLost as error:
    told = f"{error}"
power_cut.join(timeout=10)  # what runs on beta meanwhile would be killed, too
print(told)
killed = labkit.load(history.find_runs(program="fsdp_matrix", limit=1)[0].folder)

# %% [markdown]
# *The run fails, and the message names beta.* What both hosts had recorded is brought here while they run. Of beta, up
# to the last fifth of a second may be missing.
#
# ### Exercise 3: the newest complete save (••, {minutes} minutes)
#
# Return the folder of the newest checkpoint in `folder` that is complete, or None if there is none. Checkpoints are
# folders called `step_9`, `step_10` and so on (labkit's have zeros in front; yours need not). A complete one has a file
# `.metadata` inside.
#
# <details><summary>Hint 1</summary>
#
# `folder.glob("step_*")` gives their paths, in no order. `path.name` is the last part of a path.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `max(paths, key=…, default=None)`. As text "step_9" comes after "step_10": compare numbers.
#
# </details>


# %%
def newest_complete(folder: Path) -> Path | None:
    ### BEGIN SOLUTION
    complete = [path for path in folder.glob("step_*") if (path / ".metadata").exists()]
    return max(complete, key=lambda path: int(path.name.split("_")[1]), default=None)
    ### END SOLUTION


# %%
verdict = checks.newest_complete(newest_complete)
verdict

# %% [markdown]
# Why it matters: here a save is cut off on purpose. The `.metadata` of a copy is removed, as if the host had died a
# moment earlier. A run that should load this copy is refused; the one before it is whole.

# %% tags=["nbval-ignore-output"]
newest = max(checkpoints.glob("step_*/.metadata")).parent
shutil.copytree(checkpoints, place / "cut_off")
(place / "cut_off" / newest.name / ".metadata").unlink()
try:
    labkit.run("fsdp_matrix", nproc=2, load=str(place / "cut_off" / newest.name), **(how | {"steps": 1}))
    refused = ""
except labkit.ParameterError as error:
    refused = str(error)
print(refused)
if verdict.ok:
    print("yours would take", newest_complete(place / "cut_off"))

# %% tags=["claim"]
claim("the run fails, and the message names beta", told.startswith("beta was lost"))
claim("a save that was cut off cannot be loaded", ".metadata" in refused)
claim("the one before it is whole", not verdict.ok or newest_complete(place / "cut_off").name < newest.name)

# %% [markdown]
# Now go on. beta is back, but suppose that each host has only half its GPUs: one rank instead of two. To keep the same
# samples in each step, every rank now takes two batches and accumulates their gradients. With `checkpoints=…` a run
# begins with the newest complete save there, found as in exercise 3.
#
# Save 1 is made after
# the one to warm up, which the figure leaves out, save 2 after step 0, and save 4 after step 2. The line of the killed
# run may end earlier, where beta's last records did not come home.
#
# The number of ranks changes, and so does every shard. Will the losses be those of the run that was never interrupted?

# %% tags=["nbval-ignore-output"]
fewer = {"nproc": 1, "accumulate": RANKS, "checkpoints": str(checkpoints)}
resumed = labkit.run("fsdp_matrix", hosts=hosts, **fewer, **how)
_ = plots.loss_curves({"never interrupted": unbroken, "beta lost": killed, "resumed on fewer ranks": resumed})

# %%
right = unbroken.losses
apart = {step: abs(loss / right[step] - 1) for run in (killed, resumed) for step, loss in run.losses.items()}
begins, ends = resumed.losses.index.min(), resumed.losses.index.max()
print(f"resumed with step {begins}, to step {ends}; the largest relative difference is {max(apart.values()):.1e}")

# %% [markdown]
# *The resumed run takes over where the newest save was, and its losses are those of the run that was never interrupted,
# to within 10⁻⁵.* (Gradients of fewer ranks are added in another order, so the last digits differ.) In your run a step
# may be in both: then it was done twice, for it had not been saved. A step between the end of "beta lost" and the
# beginning of "resumed" was saved, but beta's record of it did not come home.

# %% tags=["claim"]
saved = int(newest.name.removeprefix("step_")) - 1  # so many steps, beside the one to warm up
claim("the resumed run takes over where the newest save was", begins == saved >= 3 and ends == right.index.max())
claim("its losses are those of the run that was never interrupted", max(apart.values()) < 1e-5)

# %% [markdown]
# ### Elastic: torchrun starts again
#
# torchrun can do the restart itself. With `--max-restarts 3` it ends all ranks when one fails, meets again, and starts
# them anew. With `--nnodes 2` it waits until somebody has started torchrun on a second host: for up to ten minutes,
# which is another limit than the minute within which the endpoint must be reached. With `--nnodes 1:4` it goes on with
# any number of hosts from one to four, once it has waited half a minute for more; the program must be able to train
# with any. One host must live, though: that of the endpoint, where they meet. Ranks are new processes each time, and
# remember nothing. So elastic restarts are worth something only together with saves.
#
# One thing survives a restart and should not: the store through which the ranks find each other. In it, ranks of the
# second attempt may read where those of the first were, and wait for them (pytorch/pytorch#135712, which is closed;
# torch 2.13 still does so). We saw this in two of six restarts. With `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, on all
# hosts, each attempt has a store of its own; the cell sets it.
#
# Here, on one host (`--standalone` chooses an endpoint there, and loopback is the right address), rank 1 dies in the
# first attempt when step 2 begins. A step is only a barrier, which stands for training, and after each the number of
# steps done is saved. How many steps are finished in all, both attempts together, if 4 are wanted?

# %% tags=["commit"]
mine = commit(steps_done=None)
### BEGIN SOLUTION
mine = commit(steps_done=4)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
restart = place / "restart.py"
restart.write_text(f"""
import os
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
attempt, saved = os.environ["TORCHELASTIC_RESTART_COUNT"], Path({str(place / "done")!r})
done = int(saved.read_text()) if saved.exists() else 0
for step in range(done, 4):
    if (attempt, step, dist.get_rank()) == ("0", 2, 1):
        os._exit(1)
    dist.barrier()  # the step
    if dist.get_rank() == 0:
        print("attempt " + attempt + " step " + str(step), flush=True)
        saved.write_text(str(step + 1))
    dist.barrier()
dist.destroy_process_group()
""")
restarting = "--standalone --local-addr 127.0.0.1 --nproc-per-node 2 --max-restarts 1"
process = type_on(hosts[0], restarting, restart, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
said = process.communicate(timeout=120)[0]
trained = re.findall(r"attempt \d step \d", said)
print("\n".join(trained))

# %%
pandas.DataFrame(
    {"yours": ["–" if mine["steps_done"] is None else f"{mine['steps_done']:g}"], "measured": [len(trained)]},
    index=["steps_done"],
)

# %% [markdown]
# *The second attempt goes on with step 2, and no step is done twice.* labkit's own runs never restart by themselves:
# in a lab, a failure is something to look at.

# %% tags=["claim"]
claim(
    "the second attempt goes on with step 2, and no step is done twice",
    trained == [f"attempt {int(step > 1)} step {step}" for step in range(4)],
)

# %% [markdown]
# ## 6. How often to save
#
# **core, {minutes} minutes**
#
# A save takes time, in which nothing is trained. A failure costs what was trained since the last save: half an interval
# on average, as long as intervals are short beside the time between failures. So of each hour, `save_s / interval_s`
# goes into saves, and `interval_s / 2 / between_failures_s` into repeated steps. To notice a failure, to queue and to
# load takes time as well. That does not depend on the interval, and is left out here.
#
# ### Exercise 4: the best interval (•, {minutes} minutes)
#
# Return the interval in seconds that makes the sum of both smallest. You may solve it on paper.
#
# <details><summary>Hint</summary>
#
# The derivative of the sum by the interval, `-save_s / interval_s ** 2 + 1 / (2 * between_failures_s)`, is zero there.
#
# </details>


# %%
def interval_s(save_s: float, between_failures_s: float) -> float:
    ### BEGIN SOLUTION
    return (2 * save_s * between_failures_s) ** 0.5
    ### END SOLUTION


# %%
verdict = checks.interval_s(interval_s)
verdict

# %% [markdown]
# For 16,384 GPUs with a failure every 3.1 hours, and saves of one minute: how many minutes between two saves, and what
# part of the time is lost at best?

# %% tags=["commit"]
mine = commit(minutes=None, lost_percent=None)
### BEGIN SOLUTION
mine = commit(minutes=19.3, lost_percent=10.4)
### END SOLUTION

# %%
between_s = 54 * 24 / 419 * 3600  # 419 failures in 54 days of training Llama 3
best_s = (interval_s if verdict.ok else theory.checkpoint_interval_s)(60, between_s)
by_theory = {"minutes": best_s / 60, "lost_percent": 100 * theory.checkpoint_overhead_share(best_s, 60, between_s)}
rows = {name: ["–" if mine[name] is None else f"{mine[name]:.3g}", f"{value:.3g}"] for name, value in by_theory.items()}
pandas.DataFrame.from_dict(rows, orient="index", columns=["yours", "theory"])

# %% [markdown]
# A tenth of sixteen thousand GPUs is a lot. What is lost grows with the square root of the time of a save. So those who
# train at that size make saves short: each rank writes its own shard, to memory first, and to disk while training goes
# on (`torch.distributed.checkpoint.async_save`; on GPUs it wants `init_process_group("cpu:gloo,cuda:nccl")`).
#
# ## 7. What NCCL needs from the network
#
# **optional, {minutes} minutes**
#
# On GPUs the ranks talk through NCCL. What follows is from its documentation and from common practice. It was not tried
# for this lab, which needs no GPU.
#
# | question | what to look at, or to set |
# |---|---|
# | Which interface does it take? | `NCCL_DEBUG=INFO` prints "NET/IB", "NET/Socket" or the name of a cloud's plugin (such as "NET/OFI"). "Socket" where you have InfiniBand is the slow way |
# | The wrong one? | `NCCL_SOCKET_IFNAME=eth0` for the first meeting, `NCCL_IB_HCA==mlx5_0,mlx5_1` for the cards (with two =, exactly those) |
# | Is the network itself fast? | nccl-tests' `all_reduce_perf` on two hosts, before your own program |
# | Do GPUs talk to the card directly? | "GDRDMA" in what `NCCL_DEBUG=INFO` prints |
# | Can ranks connect at all? | NCCL connects to ports that the system chooses: a firewall between hosts must pass them |
#
# ## 8. A job's script, line by line
#
# **core, {minutes} minutes**
#
# On a cluster you do not log in to hosts. You hand a script to a scheduler, and it starts your program where and when
# there is room. This is labkit's script for Slurm. `labkit.submit("fsdp_wrap", cluster="slurm", nodes=2, nproc=4)`
# hands it over, and returns a handle with the job's progress and result.

# %%
job = (ROOT / "launch" / "cluster" / "slurm.sh").read_text()
print(job)

# %%
explained = {
    "#!/bin/bash": "Slurm runs the script on the first node of the job, once in each attempt",
    "#SBATCH --ntasks-per-node=1": "one agent a node; the agent starts the ranks of its node. With more tasks, each "
    "would start them",
    "#SBATCH --requeue": "if a node dies, the job goes into the queue again and not to its end",
    "#SBATCH --open-mode=append": "the log of the first attempt is not overwritten by the second's",
    "python=$1": "the Python to use, the same path on all nodes",
    "folder=$2${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}": "the run's folder, which all nodes see. In an array of "
    "jobs (one script, many values) each has a number, which is added with _ between",
    'srun --kill-on-bad-exit=1 --wait=5 --cpus-per-task="$SLURM_CPUS_PER_TASK"': "srun starts the agent on all nodes. "
    "If one fails, the others are ended at once; if one ends well, they have 5 s. Without the last option all ranks of a "
    "node may share one core",
    '"$python" -P -m labkit_cluster.agent "$folder"': "the agent: finds the others through the folder, then starts "
    "torchrun. -P: no file of the current folder is taken for a module",
    "status=$?": "how the agents ended",
    'if ((status && ${SLURM_RESTART_COUNT:-0} < 5)) && grep -q \'"exit": "host lost"\' "$folder/run.json"; then': "if a "
    "node was lost in mid-run, which the agents have noted: five restarts at most. srun ends before Slurm has noticed the "
    "dead node, so --requeue alone would not act",
    'scontrol requeue "$SLURM_JOB_ID"': "ask for another attempt; the program goes on from its newest save",
    "fi": "end of the condition. A job that reached its limit of time does not meet it: submit it again, and it goes on "
    "from its newest save",
    'exit "$status"': "so Slurm shows whether the run was good",
}
Markdown("\n".join(["| line | why |", "|:---|:---|", *(f"| `{line}` | {why} |" for line, why in explained.items())]))

# %% tags=["claim"]
lines = [line.split(" # ")[0].strip() for line in job.splitlines() if line and not re.match("#( |$)", line)]
whole = " ".join(lines) == " ".join(explained) and all(explained.values())
claim("every line of the script is explained", whole)

# %% [markdown]
# How many nodes, for how long, with which GPUs and on whose account: that is said to `sbatch`, and `submit` says it.
# `nodes=2` becomes `--nodes=2`, and `nproc=4` with `device="cuda"` becomes `--gpus-per-node=4`. Your own options go
# into `Slurm(partition="gpu", options=("--account=physics",))`.
#
# What is nowhere: an address, a port, the names of hosts. The agents find those out. Scripts that people copy from
# each other have lines such as `MASTER_ADDR=$(hostname -i)`; on a machine where that is 127.0.1.1, no host finds the
# others. A fallback such as `|| echo localhost` can be worse: where the number of hosts is a range or left out, every
# host then trains alone.
#
# Without labkit, the middle of a script with one task a node may look like this (a sketch; it was not run for this
# lab). The single quotes matter: each node fills in its own `SLURM_NODEID`. `ib0` stands for the interface that joins
# your nodes (for a group with gloo, `GLOO_SOCKET_IFNAME` needs it, too), 29500 for a port that no other job uses.
#
# ```bash
# #SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=8
# export endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500 NCCL_SOCKET_IFNAME=ib0
# srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
#     own=$(ip -4 -o addr show "$NCCL_SOCKET_IFNAME" | grep -oP "inet \K[0-9.]+")
#     torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
#         --rdzv-endpoint "$endpoint" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" --local-addr "$own" train.py'
# ```
#
# More about jobs, and about Kubernetes, is in [docs/clusters.md](../docs/clusters.md).
#
# ## Summary

# %% tags=["summary", "nbval-ignore-output"]
found = {
    "two hosts, one world": set(who["sum of ones"]) == {2 * RANKS},
    "a wrong address is reported": told_after_s < 15,
    "HSDP keeps gathers inside": inside == [0, 0],
    "a host lost, the loss curve goes on": max(apart.values()) < 1e-5,
    "an elastic restart goes on from its save": len(trained) == 4,
}
pandas.DataFrame.from_dict(found, orient="index", columns=["seen"])

# %% [markdown]
# ### Five questions
#
# <details><summary>1. torchrun waits on both hosts, and ends after a minute. Where do you look?</summary>
#
# If both end: no host took the endpoint for its own, or its address is not alpha's. If beta alone ends: a firewall, or
# the name leads elsewhere on beta; alpha waits another nine minutes for it. (Both after ten minutes: their `--rdzv-id`
# differs, or one was never started. After the ranks have started: the firewall stops ports that the system chose.)
#
# </details>
# <details><summary>2. The job trains and the loss falls, but each host's log speaks of a rank 0. What has happened?</summary>
#
# Each host trains alone: the world size is that of one host. With a fixed batch for each rank, a step sees half the
# samples. And both save to the same places.
#
# </details>
# <details><summary>3. Two hosts are slower than one. Why may that be right?</summary>
#
# What leaves a host takes longer than the computation that it could hide behind. Lay out so that less leaves it, or
# compute more for each byte: a larger batch on each rank.
#
# </details>
# <details><summary>4. You save every hour, and a failure comes every three. What do you lose?</summary>
#
# Half an hour for each failure: a sixth of the time. And each hour the time of one save.
#
# </details>
# <details><summary>5. May a run go on with half the ranks?</summary>
#
# Yes, if its save knows whole shapes, and if the samples of a step do not depend on the number of ranks. Accumulate
# gradients, so that a step still sees the same samples.
#
# </details>
#
# ### Papers and pages
#
# - Young, *A first order approximation to the optimum checkpoint interval*, 1974.
#   <https://doi.org/10.1145/361147.361115>
# - Zhao et al., *PyTorch FSDP*, 2023: section 3.2.2 on hybrid sharding. <https://arxiv.org/abs/2304.11277>
# - Llama Team, *The Llama 3 herd of models*, 2024: section 3.3 on its network and its failures.
#   <https://arxiv.org/abs/2407.21783>
# - PyTorch: torchrun <https://docs.pytorch.org/docs/stable/elastic/run.html>, rendezvous
#   <https://docs.pytorch.org/docs/stable/elastic/rendezvous.html>, distributed checkpoints
#   <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>
# - NCCL's environment variables <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>
#
# **Read in labkit**: `labkit_cluster/host_rendezvous.py` is how hosts find each other; `labkit/parallel/saving.py` saves and
# goes on; `launch/cluster/` has the job's templates.
#
# **Next**: ask for two nodes of a cluster, and run lab 2's program there.

# %% [markdown]
# ### What you have passed

# %%
from labkit_course.verdict_store import so_far

so_far("hosts")

# %%
at_end.close()
