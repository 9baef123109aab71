# %% [markdown]
# # Lab 8. Beyond one machine
#
# Most machines end at eight GPUs. A larger run has several **hosts**, which Slurm calls nodes: machines that share a
# network, often a disk, and nothing else. The program stays the same, but three things are new. The hosts must find
# each other. Bytes between hosts are slow. And the more hosts there are, the sooner one of them fails.
#
# After this lab you can
#
# - mend a launch on several hosts from what torchrun prints;
# - say how many bytes leave a host in a step, and lay out the ranks so that few do;
# - lose a host under your own program, and go on with fewer ranks;
# - choose how often to save, and write a Slurm job that survives preemption.
#
# You need labs 0 and 2, and no cluster: this machine plays two hosts. The lab takes about {core_minutes} minutes, and
# its exercises are marked • (easy) or •• (harder).
#
# ## What this machine can do

# %% tags=["nbval-ignore-output"]
import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pandas
import torch
from IPython.display import Code
from torch import distributed as dist

import labkit
from labkit import doctor, plots
from labkit.config import require
from labkit.theory import fsdp as fsdp_theory
from labkit_cluster import theory
from labkit_cluster.local_hosts import start_local_hosts
from labkit_cluster.typed import Terminals
from labkit_course import job_script, launches, widgets
from labkit_course.checks import hosts as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="8")

# %% [markdown]
# You may change these parameters of section 4:

# %% tags=["parameters"] small={"DIM": 32} points=[[2,4],[3,48],[4,128]]
RANKS: int = 2  # ranks of each of the two hosts
DIM: int = 64  # width of the network

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="a host needs two, and more than 4 on each take minutes here")
require("DIM", DIM, at_least=4, multiple_of=2 * RANKS, because="every rank holds equally many rows")

# %% [markdown]
# The hosts are called alpha and beta. If you are root on Linux, they are network namespaces: each has a name, a file
# `/etc/hosts`, a loopback and a network card of its own, and a virtual cable to a switch. They share this machine's
# cores and a folder, which stands for a cluster's shared disk. Otherwise both use this machine's loopback, and
# section 3 shows recorded output.

# %% tags=["nbval-ignore-output"]
at_end = contextlib.ExitStack()
hosts = at_end.enter_context(start_local_hosts(2))
place = Path(at_end.enter_context(tempfile.TemporaryDirectory()))  # the shared folder
terminals = Terminals(hosts, place)  # what you type in them runs on the hosts, in that folder
os.environ["SAVES"] = str(place / "by_hand")  # for the program of section 2
hosts

# %% [markdown]
# ## 1. What does a byte between hosts cost? ({minutes} minutes)
#
# Inside a host with eight H100, NVLink carries 450 GB/s out of each GPU. A network card carries 50 GB/s to other
# hosts. Some hosts have one card, and the best have one for each GPU.
#
# A model with 8 billion parameters in bfloat16 has 16 GB. FSDP on two hosts gathers it over a ring of 16 GPUs, in
# which 15/16 of the model pass from each GPU to the next, and so from one host to the other. With eight cards there
# are eight rings, each with an eighth of the model. Commit: how many milliseconds does the all-gather take over one
# card, over eight, and if NVLink could join all 16 GPUs? Leave latency out.

# %% tags=["commit"]
mine_gather = commit(nvlink_ms=None, one_card_ms=None, eight_cards_ms=None)
### BEGIN SOLUTION
mine_gather = commit(nvlink_ms=15 / 450 * 1e3, one_card_ms=15 / 50 * 1e3, eight_cards_ms=15 / (8 * 50) * 1e3)
### END SOLUTION

# %%
speeds = {"nvlink_ms": 450, "one_card_ms": 50, "eight_cards_ms": 8 * 50}
gather_ms = {name: 15 / 16 * 16 / speed * 1e3 for name, speed in speeds.items()}
gather_rows = {name: [prediction_text(mine_gather[name], ".3g"), f"{ms:.3g}"] for name, ms in gather_ms.items()}
pandas.DataFrame.from_dict(gather_rows, orient="index", columns=["yours", "theory"])

# %% [markdown]
# *Takeaway: one card for eight GPUs makes the same gather nine times as long as NVLink, and eight cards almost make
# up for that. Where cards are few, keep the bytes inside a host.*
#
# ## 2. The code you would write ({minutes} minutes)
#
# This program trains with FSDP on any number of ranks that divides 256, and saves after each step. Each rank writes
# its own shards into a folder, which has to be on a disk that all hosts see.

# %% tags=["script"]
# %%torchrun -n 4 --name by_hand
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))  # "cuda" on GPUs
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    samples = torch.Generator().manual_seed(step)  # those of this step, whoever computes them
    x = torch.randn(256, 16, generator=samples).chunk(ranks)[rank]
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    weights, updates = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": updates, "step": step + 1}
    dcp.save(state, checkpoint_id=f"{os.environ.get('SAVES', 'saves')}/step_{step + 1:08d}")
dist.destroy_process_group()

# %%
print(*sorted(f"{path.parent.name}/{path.name}" for path in (place / "by_hand").glob("*/*")), sep="\n")

# %% [markdown]
# *Each save has a file of each rank, and `.metadata`, which says what lies where.* It is written last. So a save
# without it was cut off, and can never be loaded.
#
# A number in a folder's name counts finished steps, so `step_00000003` is what step 2 saved.
#
# To go on, a program loads the newest complete save before its loop:
#
# ```python
# weights, updates = get_state_dict(model, optimizer)
# state = {"model": weights, "optimizer": updates, "step": 0}
# dcp.load(state, checkpoint_id=newest)  # fills this state, and cuts each tensor for as many ranks as there are now
# set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
# ```
#
# ### Exercise 1: the newest complete save (•, {minutes} minutes)
#
# Return the path of the newest complete save in `folder`, or None if there is none. Saves are folders called
# `step_9`, `step_10` and so on, with or without zeros in front.
#
# <details><summary>Hint 1</summary>
#
# `folder.glob("step_*")` gives paths in no order. As text, "step_9" comes after "step_10".
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `max(complete, key=lambda path: int(path.name.split("_")[1]), default=None)`
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
# Your function now goes into `train.py`, which is [launch/cluster/train.py](../launch/cluster/train.py): the program
# above, with loading. It needs no labkit. We start it on alpha, with two ranks instead of four.

# %% tags=["nbval-ignore-output"]
yours = {"newest_complete": newest_complete} if verdict.ok else {}
launches.write_program(place, **yours)
copied = "rm -rf copy; cp -r by_hand copy; SAVES=copy STEPS=6"
two_ranks = terminals.run(f"{copied} torchrun --standalone --nproc-per-node 2 train.py", "alpha")["alpha"]
print(*re.findall("^step.*", two_ranks, flags=re.MULTILINE), sep="\n")

# %% tags=["claim"]
claim("one card: nine times as long", round(gather_ms["one_card_ms"] / gather_ms["nvlink_ms"]) == 9)
claim("eight cards almost make up for that", gather_ms["eight_cards_ms"] < 1.2 * gather_ms["nvlink_ms"])
saves = {step.name: sorted(path.name for path in step.iterdir()) for step in sorted((place / "by_hand").glob("step_*"))}
claim("a file of each rank, and .metadata", {len(files) for files in saves.values()} == {5} and len(saves) == 3)
claim("each has .metadata", all(".metadata" in files for files in saves.values()))
claim("two ranks go on with step 3", [*launches.losses(two_ranks).index] == [3, 4, 5])

# %% [markdown]
# *Two ranks go on with step 3, although four had saved.* The samples of a step depend on the step alone, and neither
# on the number of ranks nor on what was drawn before. Otherwise a run that goes on would see other data.
#
# *Takeaway: a save that knows whole shapes can be loaded by any number of ranks. Load the newest one with
# `.metadata`.*
#
# ## 3. Three launches that fail ({minutes} minutes)
#
# On several hosts, you start torchrun once on each, with the same line. They meet at the **endpoint**, a name and a
# port of one of them; this is the **rendezvous**. torchrun then starts the ranks and leaves in their environment who
# they are: `RANK` and `WORLD_SIZE`, `LOCAL_RANK` for the GPU on this host, `GROUP_RANK` for the host, and
# `MASTER_ADDR` for the address where ranks meet. Ranks are numbered host by host.
#
# | option | says |
# |---|---|
# | `--nnodes 2`, `--nnodes 1:2` | how many hosts; at least one, at most two |
# | `--rdzv-endpoint` | where the hosts meet |
# | `--rdzv-conf is_host=1` | this host owns the endpoint; without it, torchrun guesses from the host's name |
# | `--local-addr` | this host's own address |
# | `GLOO_SOCKET_IFNAME` | the network interface of the ranks; NCCL reads `NCCL_SOCKET_IFNAME` |
#
# Here is what the hosts know of the network, and what you find in three scripts of colleagues. `$ADDRESS` is the
# host's own address, and `$IS_HOST` is 1 on alpha. `who.py` adds up a one from each rank; all is well if four ranks
# find 4.

# %% tags=["nbval-ignore-output"]
known = terminals.run("ip -br -4 address; grep -v localhost /etc/hosts") if terminals.are_machines else {}
print(*[f"{name}:\n{text}" for name, text in known.items()], sep="\n")
print(*[f"{name}: {launches.LINES[name]}\n" for name in launches.LINES], sep="\n")

# %% [markdown]
# Commit: how many ranks will be in the world that a rank sees, 4, 2, or 0 if no world comes about? All three fail on
# purpose. Of hundreds of lines you see the telling ones.

# %% tags=["commit"]
mine_worlds = commit(first=None, second=None, third=None)
### BEGIN SOLUTION
mine_worlds = commit(first=0, second=0, third=2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
said = {"first": launches.launch("first", terminals)}

# %% [markdown]
# ### Exercise 2: mend the first (•, {minutes} minutes)
#
# Which address does each host look for, and whose is it? Return the mended line. The check types it on both hosts.
#
# <details><summary>Hint</summary>
#
# `hostname -i` looks up the host's own name. On Debian and Ubuntu that leads to 127.0.1.1, a loopback address, and
# each host would find only itself there. (alpha itself may: it listens on all of its addresses.)
#
# </details>


# %%
def mend_first(line: str) -> str:
    ### BEGIN SOLUTION
    return line.replace("$(hostname -i)", "alpha")
    ### END SOLUTION


# %%
checks.mend_first(mend_first, terminals)

# %% [markdown]
# The second launch gets further, for the hosts meet:

# %% tags=["nbval-ignore-output"]
said["second"] = launches.launch("second", terminals)

# %% [markdown]
# ### Exercise 3: mend the second (•, {minutes} minutes)
#
# Whose address do the ranks try to reach? Return the mended line.
#
# <details><summary>Hint</summary>
#
# Every host with Docker has an interface docker0 with the address 172.17.0.1. A rank that calls this address reaches
# its own host.
#
# </details>


# %%
def mend_second(line: str) -> str:
    ### BEGIN SOLUTION
    return line.replace("=docker0", "=eth0")
    ### END SOLUTION


# %%
checks.mend_second(mend_second, terminals)

# %% [markdown]
# The third one looks best. A file with the name of the first host was never written. `LOGLEVEL=INFO` makes torchrun
# say what it does.

# %% tags=["nbval-ignore-output"]
said["third"] = launches.launch("third", terminals)

# %% [markdown]
# ### Exercise 4: mend the third (•, {minutes} minutes)
#
# Both hosts run, and end without an error. What is wrong? Return the mended line, so that no host ever runs alone.
#
# <details><summary>Hint</summary>
#
# Two things: the line has to name alpha where it now reads a file, without a fallback, and the number of hosts must
# not be a range. (An address instead of the name would also need `--rdzv-conf is_host=$IS_HOST`.)
#
# </details>


# %%
def mend_third(line: str) -> str:
    ### BEGIN SOLUTION
    return line.replace("$(cat head.txt || echo localhost)", "alpha").replace("--nnodes 1:2", "--nnodes 2")
    ### END SOLUTION


# %%
checks.mend_third(mend_third, terminals)

# %%
worlds = {name: launches.world_size(each) for name, each in said.items()}
world_rows = {name: [prediction_text(mine_worlds[name]), f"{size}"] for name, size in worlds.items()}
pandas.DataFrame.from_dict(world_rows, orient="index", columns=["yours", "measured"])

# %% [markdown]
# *The first two end with an error, and the third makes two worlds of two ranks.* That is the worst of them. A program
# that trains would train a model on each host, the loss would fall on both, and both would save to the same place.
#
# <details><summary>With NCCL, and without limits</summary>
#
# The lines have short limits. By default torchrun waits 60 seconds for the endpoint, ten minutes for the other hosts,
# and with a range half a minute for more of them. NCCL takes the first interface that looks good; `NCCL_DEBUG=INFO`
# says which. "NET/Socket" where you have InfiniBand is the slow way; `NCCL_IB_HCA` names the cards. NCCL connects to
# ports that the system chooses, so a firewall between hosts has to pass them. Before your own program, run
# `all_reduce_perf` of nccl-tests on two hosts.
#
# `labkit.run(..., hosts=["alpha", "beta"])` tries all addresses from every host before it starts a rank.
#
# </details>
#
# *Takeaway: an address is good if the **other** hosts reach it. Look at each host's log for the address that it
# tried, and at the world size in the first line that your program prints.*
#
# ## 4. What leaves a host? ({minutes} minutes)
#
# FSDP over all ranks gathers each unit twice in a step and reduce-scatters its gradient once, all across hosts.
# **HSDP**, hybrid sharding, shards inside a host and replicates across hosts. So gathers and reduce-scatters stay
# inside. Then each of a host's ranks joins the ranks with the same shard on the other hosts, and they make an
# all-reduce of that shard. In code, it is a mesh of two axes, of which the last one lies inside a host:
#
# ```python
# mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("replicate", "shard"))
# fully_shard(model, mesh=mesh)
# ```
#
# Ranks stand in a ring in their order, so a ring leaves each host at one place. It carries (n − 1)/n of a tensor
# there for an all-gather or a reduce-scatter over n ranks, and twice that for an all-reduce. The same network now
# trains on both hosts in both ways. Commit: how many times the model's bytes leave a host in a step?

# %% tags=["commit"]
mine_times = commit(fsdp_times=None, hsdp_times=None)
### BEGIN SOLUTION
mine_times = commit(fsdp_times=3 * 3 / 4, hsdp_times=2 * 1 / 2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
how = {"model": "mlp_stack", "dim": DIM, "device": "cpu", "nproc": RANKS, "hosts": hosts, "steps": 2}
flat = labkit.run("fsdp_wrap", **how)
hybrid = labkit.run("fsdp_matrix", hybrid=RANKS, **how)

# %%
layers = fsdp_theory.mlp_stack_layers("block", DIM)
parameter_bytes = sum(whole for _, whole in fsdp_theory.unit_bytes(layers, 1).values())
leaving = {
    "fsdp": flat.value("all_gather_wire_bytes") + flat.value("reduce_scatter_wire_bytes"),
    "hsdp": RANKS * hybrid.value("all_reduce_wire_bytes"),
}
times, by_theory = {}, {}
for way, leaving_bytes in leaving.items():
    by_theory[f"{way}_times"] = theory.host_egress_bytes(1, 2, RANKS, hybrid=way == "hsdp")
    times[f"{way}_times"] = leaving_bytes / parameter_bytes
plots.comparison_table(times, by_theory, yours=mine_times, tolerance=0.01, column="counted")

# %% [markdown]
# *On two hosts, HSDP sends less than half as many bytes out of a host.* FSDP sends the model three times, and each time
# (n − 1)/n of it: 3 · 3/4 for four ranks. HSDP all-reduces it between two hosts: 2 · 1/2.
#
# The price is memory: every host holds a whole copy of parameters, gradients and optimizer state. At 16 bytes for a
# parameter with all three, 8 billion parameters take 128 GB of each host, 16 GB of each of its eight GPUs. With FSDP on two
# hosts it would be 8.
#
# **Does it pay?** Only if a step waits for the network. Take 8 billion parameters on 2 hosts of eight GPUs.
# Parameters and gradients have 16 GB each. A GPU computes 4,096 tokens at 400 · 10¹² operations a second: for each
# parameter and token 2 in the forward pass and 4 in the backward pass. Bytes hide only behind the computing of their
# own pass. FSDP gathers in both and reduces in the backward pass, and HSDP's all-reduces come in the backward pass.
# Commit: with one card a host, how many times as long is a step with FSDP as with HSDP? And with eight cards?

# %% tags=["commit"]
mine_ratio = commit(one_card=None, eight_cards=None)
### BEGIN SOLUTION
mine_ratio = commit(one_card=1.8, eight_cards=1)
### END SOLUTION

# %%
steps_ms = {cards: theory.step_ms(cards=cards, hosts=2, tokens=4096) for cards in (1, 8)}
ratios = {cards: each["fsdp"] / each["hsdp"] for cards, each in steps_ms.items()}
print(f"one card: {ratios[1]:.1f}; you: {prediction_text(mine_ratio['one_card'])}")
print(f"eight cards: {ratios[8]:.1f}; you: {prediction_text(mine_ratio['eight_cards'])}")
widgets.HostsExplorer()

# %% tags=["claim"]
claim("the first two end with an error, and the third has two worlds", worlds == {"first": 0, "second": 0, "third": 2})
claim("of two ranks", all("rank 1 of 2" in text for text in said["third"].values()))
claim("on two hosts HSDP sends less than half as many bytes", leaving["hsdp"] < leaving["fsdp"] / 2)
one_card = theory.pass_ms(cards=1, hosts=2, tokens=4096)
named = {"computing": [164, 328], "fsdp": [300, 600], "hsdp": [0, 320]}
claim("the passes behind the 1.8", {way: [round(ms) for ms in one_card[way]] for way in named} == named)
inside = [hybrid.value(f"{kind}_between_hosts_bytes") for kind in ("all_gather", "reduce_scatter")]
claim("gathers and reduce-scatters stay inside", inside == [0, 0])
claim("1.8 and 1", [round(ratio, 1) for ratio in ratios.values()] == [1.8, 1.0])
far = {"cards": 1, "hosts": 128, "tokens": 4096}
far_ms, far_step_ms = theory.pass_ms(**far), theory.step_ms(**far)
claim("635 ms of a pass of 328 ms", (round(far_ms["hsdp"][1]), round(far_ms["computing"][1])) == (635, 328))
claim("HSDP is still ahead", far_step_ms["hsdp"] < 0.9 * far_step_ms["fsdp"])

# %% [markdown]
# <details><summary>Where the 1.8 comes from</summary>
#
# A GPU computes for 164 ms in the forward pass and 328 in the backward pass. With one card a gather takes 300 ms (section
# 1), and so does a reduce-scatter. So FSDP's passes take 300 and 600 ms. HSDP's all-reduce takes 320 ms, and
# just hides: 164 and 328 ms. 900 / 492 = 1.8.
#
# </details>
#
# <details><summary>On 128 hosts with one card, do HSDP's bytes still hide behind the computing?</summary>
#
# No. They nearly double, because (n − 1)/n goes from 1/2 to almost 1, and take 635 ms of a backward pass that
# computes for 328 ms. HSDP is still ahead. It helps to compute more for each byte: more tokens on a GPU, or gradients
# accumulated over several batches, of which only the last is reduced across hosts.
#
# </details>
#
# *Takeaway: HSDP keeps gathers inside a host, at the price of a whole copy on each. It pays where a step waits for the
# network between hosts, and gains nothing where the bytes hide anyway.*
#
# ## 5. Lose a host ({minutes} minutes)
#
# While Llama 3 was trained on 16,384 GPUs, something failed every three hours. The other ranks cannot finish their next
# collective, and what was in the memory of the lost host is gone. So your program saves. You now start it on both
# hosts, and kill everything on beta as soon as step 8 is saved. Then beta stays away, and alpha goes on alone, with
# two ranks instead of four. To compare, four ranks also train without interruption.
#
# Commit: after how many seconds has torchrun on alpha ended, too? And how many finished steps are lost?

# %% tags=["commit"]
mine_loss = commit(seconds=None, lost_steps=None)
### BEGIN SOLUTION
mine_loss = commit(seconds=2, lost_steps=0)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
line = (
    f"GLOO_SOCKET_IFNAME={hosts.interface} SAVES=lost STEP_S=0.1 torchrun --nnodes 2 --nproc-per-node 2 "
    f"--rdzv-backend c10d --rdzv-endpoint {hosts.host_address('alpha')}:29500 "
    "--rdzv-conf is_host=$IS_HOST --local-addr $ADDRESS train.py"
)
print(line)
shutil.rmtree(place / "lost", ignore_errors=True)  # of an earlier try
terminals.start(line)
give_up = time.monotonic() + 60
while not (place / "lost" / "step_00000008" / ".metadata").exists() and time.monotonic() < give_up:
    time.sleep(0.01)
hosts.kill_host("beta")
killed_at = time.monotonic()
lost = terminals.wait()["alpha"]
ended_after_s = time.monotonic() - killed_at
print(*launches.telling_lines(lost), sep="\n")

# %% tags=["nbval-ignore-output"]
shutil.rmtree(place / "unbroken", ignore_errors=True)
go_on = "torchrun --standalone --nproc-per-node {} train.py"
resumed = terminals.run(f"SAVES=lost {go_on.format(2)}", "alpha")["alpha"]
unbroken = terminals.run(f"SAVES=unbroken {go_on.format(4)}", "alpha")["alpha"]
texts = {"never interrupted": unbroken, "beta lost": lost, "two ranks go on": resumed}
curves = pandas.DataFrame({name: launches.losses(text) for name, text in texts.items()})
_ = curves.plot(
    style=["-", "--", ":"],
    lw=2,
    xlabel="training step",
    ylabel="loss (mean squared error)",
    figsize=(7, 3),
    xticks=[0, 4, 8, 12, 16],
)
first, last = curves["two ranks go on"].first_valid_index(), curves["beta lost"].last_valid_index()
lost_steps = max(0, last + 1 - first)
apart = (curves.div(curves["never interrupted"], axis=0) - 1).abs().max().max()
print(f"alpha ended after {ended_after_s:.1f} s; you: {prediction_text(mine_loss['seconds'])}")
print(f"finished steps lost: {lost_steps}; you: {prediction_text(mine_loss['lost_steps'])}")
print(f"it went on with step {first}; losses differ by at most {apart:.1e}")

# %% [markdown]
# *The loss goes on as if nothing had happened, to within 10⁻⁵, with half the ranks.* Gradients of fewer ranks are
# added in another order, so the last digits differ.
#
# alpha noticed within seconds, because beta's system closed its connections. After a power cut nobody does that, and
# ranks wait for the limit of their process group: 30 minutes with gloo, 10 with NCCL, or what
# `init_process_group(timeout=...)` says.
#
# <details><summary>Can torchrun start again by itself?</summary>
#
# With `--max-restarts 3` it ends all ranks when one fails, meets again, and starts them anew; with `--nnodes 1:4` it
# goes on with any number of hosts from one to four. The host of the endpoint must live. Ranks are new processes and
# remember nothing, so they must load a save. In torch 2.13 also set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, or they
# may read the addresses that the first attempt's ranks left (pytorch/pytorch#135712).
#
# </details>
#
# *Takeaway: a program survives a host if its save knows whole shapes, and its samples depend on the step alone.*
#
# ## 6. How often should you save? ({minutes} minutes)
#
# A save takes time, in which nothing is trained. A failure costs what was trained since the last save, which is half
# an interval on average. So the lost share of the time is
#
# `save / interval + interval / (2 · time between failures)`
#
# and it is smallest for `interval = √(2 · save · time between failures)` (Young, 1974). For 16,384 GPUs with a
# failure every 3.1 hours, and saves of one minute, commit: how many minutes between two saves, and what percentage is
# lost?

# %% tags=["commit"]
mine_interval = commit(minutes=None, lost_percent=None)
### BEGIN SOLUTION
mine_interval = commit(minutes=19.3, lost_percent=10.4)
### END SOLUTION

# %%
between_s = 54 * 24 / 419 * 3600  # Llama 3: 419 interruptions in 54 days
saving_rows = {}
for save_s in (60, 5):
    best_s = theory.checkpoint_interval_s(save_s, between_s)
    share = theory.checkpoint_overhead_share(best_s, save_s, between_s)
    saving_rows[f"saves of {save_s} s"] = [f"{best_s / 60:.1f}", f"{share:.1%}"]
saving_rows["yours, 60 s"] = [prediction_text(mine_interval["minutes"]), prediction_text(mine_interval["lost_percent"])]
pandas.DataFrame.from_dict(saving_rows, orient="index", columns=["minutes between saves", "time lost"])

# %% [markdown]
# *With saves of a minute a tenth of the time is lost, and with saves of five seconds 3 %.* Llama 3 was trained for
# more than 90 % of its time. A save of a few seconds goes to memory first, and to disk while training goes on
# (`torch.distributed.checkpoint.async_save`).
#
# *Takeaway: save every √(2 · save · time between failures), and make saves short: the lost share falls with the square
# root.*
#
# ## 7. A job that survives preemption ({minutes} minutes)
#
# On a cluster you hand a script to a scheduler such as Slurm. `sbatch` queues it. When two nodes are free, Slurm runs
# the script on the first of them, and each `srun` in it starts a command on both.
#
# The commonest loss of a host is no failure at all: the time limit comes, or a job with higher priority takes the
# nodes (**preemption**). `#SBATCH --signal` asks Slurm for a signal two minutes before the time limit, here USR1. The script then
# makes a file called `stop`. The ranks look for it after each step, and end once they have saved. At last the script
# asks for another attempt, by `scontrol requeue`.
#
# Ranks look at the file at slightly different moments. If rank 0 sees it and rank 1 does not, rank 1 goes on alone,
# and waits in the next step until the nodes are taken away.
#
# ### Exercise 5: stop together (••, {minutes} minutes)
#
# `asked` says whether this rank has seen the file. Return True on **all** ranks if any has seen it, and else False.
# The check asks two and three real ranks.
#
# <details><summary>Hint 1</summary>
#
# A collective over all ranks, which every rank makes in every step, whether asked or not.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Make a tensor of `float(asked)`, and an all-reduce with `op=dist.ReduceOp.MAX`.
#
# </details>


# %%
def all_stop(asked: bool) -> bool:
    ### BEGIN SOLUTION
    anyone = torch.tensor(float(asked))
    dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
    return bool(anyone)
    ### END SOLUTION


# %%
verdict_stop = checks.all_stop(all_stop)
verdict_stop

# %% [markdown]
# Here is a colleague's script, which starts torchrun once on each node. In it, `trap` says what to do at a signal.
# Slurm gives each node its number as `SLURM_NODEID`, from 0, and the endpoint is node 0's.

# %%
Code(job_script.broken_script(), language="bash")

# %% [markdown]
# ### Exercise 6: mend the script (••, {minutes} minutes)
#
# It does not train, and would not survive a preemption. Find three faults, and return the mended script. The check
# runs it with stand-ins for Slurm's commands, and tells one symptom at a time.
#
# <details><summary>Hint 1</summary>
#
# Who owns the endpoint, on each node? Who gets the signal? And when does bash run a trap?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `man sbatch`: with `B:` the signal goes to the script, and otherwise to what `srun` has started. bash runs a trap
# only when the command in the foreground has ended. So start `srun` in the background, with `&` at the end of its
# last line, and `wait $!` for it. The signal also ends the `wait`, so a second `wait $!` follows.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `script.replace("is_host=1", "is_host=$((SLURM_NODEID == 0))")`, and two more. The last line of `srun` ends in
# `torchrun "$@"` and a line break, `\n`.
#
# </details>


# %%
def mend_script(script: str) -> str:
    ### BEGIN SOLUTION
    script = script.replace("is_host=1", "is_host=$((SLURM_NODEID == 0))")
    script = script.replace("--signal=USR1", "--signal=B:USR1")
    return script.replace('torchrun "$@"\n', 'torchrun "$@" &\nwait $!\nwait $!\n')
    ### END SOLUTION


# %%
verdict_script = checks.mend_script(mend_script)
verdict_script

# %% [markdown]
# Now submit it. As root, with Slurm's packages, the cell starts a real Slurm of two nodes here; elsewhere it shows a
# recorded log. The job has one rank on each node, and trains 12 steps. Once step 3 is saved, the cell sends its script
# USR1, as Slurm would. Commit: how many attempts does it take, and how many steps do they train in all?

# %% tags=["commit"]
mine_job = commit(attempts=None, steps=None)
### BEGIN SOLUTION
mine_job = commit(attempts=2, steps=12)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
yours |= {"all_stop": all_stop} if verdict_stop.ok else {}
script = mend_script(job_script.broken_script()) if verdict_script.ok else job_script.GENERAL.read_text()
log = job_script.run_job(script, place, launches.write_program(place, **yours), steps=12)
print(log)
trained = [int(step) for step in re.findall(r"^step (\d+) on 2 ranks", log, flags=re.MULTILINE)]
attempts = len(re.findall(r"^attempt \d+ on", log, flags=re.MULTILINE))
print(f"{attempts} attempts, you: {prediction_text(mine_job['attempts'])}")
print(f"{len(trained)} steps, you: {prediction_text(mine_job['steps'])}")

# %% tags=["claim"]
claim("the loss goes on, to within 1e-5", apart < 1e-5 and curves["two ranks go on"].last_valid_index() == 19)
claim("what was saved is not lost", lost_steps == 0 and first >= 8)
claim("alpha noticed within seconds", ended_after_s < 30)
claim("a tenth, and 3 %", [saving_rows[name][1] for name in [*saving_rows][:2]] == ["10.4%", "3.0%"])
claim("the second attempt goes on, and no step is trained twice", trained == [*range(12)])
claim("Slurm says completed", "COMPLETED" in log)

# %% [markdown]
# *The second attempt goes on where the first one stopped, and no step is trained twice.* Slurm gives it the same
# number and appends to the same log.
#
# **Ask your cluster** whether a job that is preempted gets the signal, too, and how long before. It does if
# `scontrol show config` lists `send_user_signal` under PreemptParameters, and `scontrol show partition` a GraceTime into
# which a save fits. Otherwise the ranks get TERM, or nothing, and you lose what was trained since the last save.
#
# [launch/cluster/general.sbatch](../launch/cluster/general.sbatch) is the whole script, with a reason for each line,
# and needs nothing of labkit: copy it. labkit's own jobs are in [docs/clusters.md](../docs/clusters.md).
#
# *Takeaway: preemption is a failure that announces itself. Let the script catch the signal, let all ranks agree to
# stop, save, and queue again.*
#
# ## 8. Take away ({minutes} minutes)
#
# 1. Hosts need one endpoint that all of them reach, an interface that joins them, and a fixed number of hosts.
# 2. Keep inside a host what is large: HSDP, if a host holds a whole copy.
# 3. Every large run loses hosts. It survives by saves that know whole shapes, samples that depend on the step, and ranks
#    that stop together.
#
# | if | then |
# |---|---|
# | torchrun waits or times out | look in each host's log for the address that it tried |
# | each host has a rank 0 | stop it: each trains alone |
# | a step waits for the network between hosts | HSDP, more tokens on a GPU, or more cards |
# | your cluster preempts jobs | `--signal=B:USR1@120`, save, `scontrol requeue` |
#
# **Ask yourself**
#
# <details><summary>1. torchrun waits on both hosts, and ends after a minute. Where do you look?</summary>
#
# If both end, no host took the endpoint for its own, or the address is none of theirs. If only beta ends, a firewall
# is between them, or the name leads elsewhere on beta.
#
# </details>
#
# <details><summary>2. The loss falls, but each host's log speaks of a rank 0. What has happened?</summary>
#
# Each host trains a model of its own, and all hosts save to the same place. If every rank draws its own batch, a step also
# has fewer samples than you think.
#
# </details>
#
# <details><summary>3. Two hosts are slower than one. Why may that be right?</summary>
#
# What leaves a host takes longer than the computing that it could hide behind.
#
# </details>
#
# <details><summary>4. You save every hour, and a failure comes every three. What do you lose?</summary>
#
# Half an hour for each failure, a sixth of the time, and in each hour the time of one save.
#
# </details>
#
# <details><summary>5. Why does <code>bash</code> have to start <code>srun</code> in the background?</summary>
#
# It runs a trap only between commands. With `srun` in the foreground, the trap would run after the ranks have ended.
#
# </details>
#
# <details><summary>Papers, pages and code</summary>
#
# - Young, *A first order approximation to the optimum checkpoint interval*, 1974.
#   <https://doi.org/10.1145/361147.361115>
# - Zhao and others, *PyTorch FSDP*, 2023: section 3.2.2 on hybrid sharding. <https://arxiv.org/abs/2304.11277>
# - Llama Team, *The Llama 3 herd of models*, 2024: section 3.3 on its network and its failures.
#   <https://arxiv.org/abs/2407.21783>
# - PyTorch: torchrun <https://docs.pytorch.org/docs/stable/elastic/run.html>, rendezvous
#   <https://docs.pytorch.org/docs/stable/elastic/rendezvous.html>, distributed checkpoints
# <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>
# - Slurm: sbatch <https://slurm.schedmd.com/sbatch.html>. NCCL's variables
#   <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>
# - In labkit: `labkit_cluster/host_rendezvous.py`, how hosts find each other; `labkit_cluster/theory.py`, the formulas.
#
# </details>
#
# **Next**: ask for two nodes of a cluster, and start with `general.sbatch`.
#
# ### What you have passed

# %% tags=["summary"]
from labkit_course.verdict_store import so_far

at_end.close()
so_far("hosts")
