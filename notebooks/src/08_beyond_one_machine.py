# %% [markdown]
# # Lab 8. Beyond one machine
#
# Most machines end at eight GPUs. A larger run has several **hosts**, which Slurm calls nodes: machines that share a
# network, often a disk, and nothing else. The program stays the same, but three things are new. The hosts must find
# each other. Bytes between hosts are slow. And the more hosts there are, the sooner one of them fails.
#
# After this lab you can
#
# - find out from what torchrun prints why a launch on several hosts fails, and write one that works;
# - lay out the ranks so that few bytes leave a host, and measure how many do;
# - lose a host under your own training loop, and go on with fewer ranks;
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
import tempfile
from pathlib import Path

import pandas
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from IPython.display import Code
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit import doctor, plots
from labkit.config import require
from labkit_cluster import theory
from labkit_cluster.local_hosts import start_local_hosts
from labkit_cluster.typed import Terminals
from labkit_course import job_script, launches, widgets
from labkit_course.checks import hosts as checks
from labkit_course.checks.claims import claim, commit, prediction_text

doctor.show(lab="8")

# %% [markdown]
# You may change these parameters of section 3:

# %% tags=["parameters"] small={"DIM": 256} points=[[2,256],[3,768],[4,512]]
RANKS: int = 2  # ranks of each of the two hosts
DIM: int = 512  # width of the network

# %%
require("RANKS", RANKS, at_least=2, at_most=4, because="a host needs two, and more than 4 on each take minutes here")
require(
    "DIM", DIM, at_least=256, multiple_of=2 * RANKS, because="every rank holds equally many rows, and enough of them"
)

# %% [markdown]
# The hosts are called host0 and host1. If you are root on Linux, they are network namespaces: each has a name, a file
# `/etc/hosts`, a loopback and a network card of its own. They share this machine's cores and a folder, which stands
# for a cluster's shared disk. Otherwise both use this machine's loopback, and sections 2 and 3 show recorded output.

# %% tags=["nbval-ignore-output"]
at_end = contextlib.ExitStack()
hosts = at_end.enter_context(start_local_hosts(2))
place = Path(at_end.enter_context(tempfile.TemporaryDirectory()))  # the shared folder
terminals = Terminals(hosts, place)  # what you type in them runs on the hosts, in that folder
os.environ["SAVES"] = str(place / "by_hand")  # for the program of section 1
hosts

# %% [markdown]
# ## 1. The code you would write ({minutes} minutes)
#
# This program trains with FSDP on any number of ranks that divides 256, and saves after each step. Its folder has to be
# on a disk that all hosts see.

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
# *Each save has a file of each rank, and `.metadata`.* That says of each tensor its whole shape, and which rows lie in
# which file, so any number of ranks can load shards from it. It is written last. So a save without it was cut off,
# and can never be loaded. A number in a folder's name counts finished steps, so `step_00000003` is what step 2 saved.
#
# The samples of a step depend on the step alone. Otherwise a run that goes on would see other data.
#
# *Takeaway: a program that is to survive makes saves that any number of ranks can load.*
#
# ## 2. Three launches that fail ({minutes} minutes)
#
# On several hosts, you start torchrun once on each, with the same line. They meet at the **endpoint**, a name and a
# port of one of them; this is the **rendezvous**. torchrun then starts the ranks and leaves in their environment who
# they are: `RANK` and `WORLD_SIZE`, `LOCAL_RANK` for the GPU on this host, and `GROUP_RANK` for the host. Ranks are
# numbered host by host.
#
# |option|says|
# |---|---|
# |`--nnodes 2`, `--nnodes 1:2`|how many hosts; at least one, at most two|
# |`--rdzv-endpoint`|where the hosts meet|
# |`--rdzv-conf is_host=1`|this host owns the endpoint; without it, torchrun guesses from the host's name|
# |`--rdzv-backend c10d`|hosts meet over a store at the endpoint|
# |`--local-addr`|the address that this host tells the others|
# |`GLOO_SOCKET_IFNAME`|the network interface of the ranks; NCCL reads `NCCL_SOCKET_IFNAME`|
#
# Here is what the hosts know of the network, and what you find in three scripts of colleagues. `$ADDRESS` is the
# host's own address, and `$IS_HOST` is 1 on host0. `who.py` adds up a one from each rank; all is well if four ranks
# find 4.

# %% tags=["nbval-ignore-output"]
known = terminals.run("ip -br -4 address; grep -v localhost /etc/hosts") if terminals.are_machines else {}
print(*[f"{name}:\n{text}" for name, text in known.items()], sep="\n")
print(*[f"{name}: {launches.LINES[name]}\n" for name in launches.LINES], sep="\n")

# %% [markdown]
# Commit: which sum does a rank find, 4, 2, or 0 if it never finds one? All three fail on purpose, and the limits in
# `--rdzv-conf` make them fail soon. Of hundreds of lines you see the telling ones.

# %% tags=["commit"]
mine_worlds = commit(first=None, second=None, third=None)
### BEGIN SOLUTION
mine_worlds = commit(first=0, second=0, third=2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
said = {}
for name in launches.LINES:
    print(f"\n--- {name} ---")
    said[name] = launches.launch(name, terminals)

# %%
worlds = {name: launches.world_size(each) for name, each in said.items()}
world_rows = {name: [prediction_text(mine_worlds[name]), f"{size}"] for name, size in worlds.items()}
pandas.DataFrame.from_dict(world_rows, orient="index", columns=["yours", "measured"])

# %% [markdown]
# *The first two end with an error, and the third makes two worlds of two ranks.* In the first, each host
# names itself as the endpoint. In the second, torchrun meets, but the ranks call docker0's address, which on every host
# is the host's own; if host0 fails first, host1 may blame the rendezvous, which closes. The third is the worst: a
# program that trains would train a model on each host, both losses would fall, and both would save to the same place.
#
# ### Exercise 1: the line that works (•, {minutes} minutes)
#
# None of the three is right. Return the text of a line that is: typed on both hosts, it starts `ranks` ranks of
# `program` on each, all in one world. If one host is late, the other must not train alone. For each of the three, ask
# which address a host or a rank tried, and whose it is. The check types your line on both hosts.
#
# <details><summary>Hint 1: the first</summary>
#
# `hostname -i` looks up the host's own name. On Debian and Ubuntu that leads to 127.0.1.1, a loopback address, where
# each host finds only itself.
#
# </details>
#
# <details><summary>Hint 2: the second</summary>
#
# Every host with Docker has an interface docker0 with the address 172.17.0.1. A rank that calls this address reaches
# its own host.
#
# </details>
#
# <details><summary>Hint 3: the third</summary>
#
# The file head.txt was never written, so each host takes localhost for the endpoint. And `1:2` lets one host start
# without the other. The endpoint is `host0:29500`: host1 finds host0's address in /etc/hosts, and host0 itself owns the
# store, so that its own name may lead it to 127.0.1.1. If you give an address in place of the name, say
# `--rdzv-conf is_host=$IS_HOST`, too.
#
# </details>


# %%
def launch_line(ranks: int, program: str) -> str:
    ### BEGIN SOLUTION
    return (
        f"GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node {ranks} --rdzv-backend c10d"
        f" --local-addr $ADDRESS --rdzv-endpoint host0:29500 {program}"
    )
    ### END SOLUTION


# %%
verdict_line = checks.launch_line(launch_line, terminals)
verdict_line

# %% [markdown]
# **A fixed number or a range?** With `--nnodes 2` a job waits for both hosts, and ends if one is lost. That is right
# for most jobs under a scheduler, which starts them again. With `--nnodes 1:4 --max-restarts 3` torchrun goes on with
# the hosts that are left. Choose a range only if hosts come and go, and if the program fits a world of any size.
#
# <details><summary>What else a range needs</summary>
#
# A mesh of fixed shape does not fit another world. And if each rank takes 64 samples, half of the ranks train with half
# of the batch, for which the learning rate may be too high. Section 1's program shares 256 samples among the ranks, so
# its batch stays. torchrun begins again when another host joins, too.
#
# Each restart begins with new processes, which must load a save. The host of the endpoint must live. In torch 2.13
# also set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, or ranks may read the addresses that the first attempt's ranks left
# (pytorch/pytorch#135712).
#
# </details>
#
# <details><summary>With NCCL, and without limits</summary>
#
# The lines and who.py have short limits. By default torchrun waits 60 seconds for the endpoint, ten minutes for the
# other hosts, and with a range half a minute for more of them. A rank of gloo's to which nobody connects waits for a
# multiple of its group's timeout, which is 30 minutes unless `init_process_group` says less. NCCL takes the first
# interface that looks good; `NCCL_DEBUG=INFO`
# says which. "NET/Socket" where you have InfiniBand is the slow way; `NCCL_IB_HCA` names the cards. NCCL connects to
# ports that the system chooses, so a firewall between hosts has to pass them. Before your own program, run
# `all_reduce_perf` of nccl-tests on two hosts.
#
# `labkit.run(..., hosts=["host0", "host1"])` tries all addresses from every host before it starts a rank.
#
# </details>
#
# *Takeaway: an address is good if the **other** hosts reach it. Look at each host's log for the address that it
# tried, and at the world size in the first line that your program prints.*
#
# ## 3. What leaves a host? ({minutes} minutes)
#
# Inside a host with eight H100, NVLink carries 450 GB/s out of each GPU. A network card carries 50 GB/s to other
# hosts, and some hosts have only one. FSDP over all ranks gathers each unit twice in a step and reduce-scatters its
# gradient once, all across hosts. **HSDP**, hybrid sharding, shards inside a host and keeps a copy of the model on
# each host, so gathers and reduce-scatters stay inside. Then each rank and the ranks with the same shard on the other
# hosts make an all-reduce of the shard's gradient.
#
# ### Exercise 2: HSDP on several hosts (•, {minutes} minutes)
#
# Shard `model`, an `nn.Sequential` of blocks, so that each host holds one copy of it, shared by its `ranks` ranks. Each
# block is a unit. A **mesh** arranges the ranks in a grid: `init_device_mesh("cpu", shape, mesh_dim_names=…)` fills it
# row by row. `fully_shard(module, mesh=…)` replicates along the first of two axes, and shards along the last. The check
# plays 3 hosts of 2 ranks, and looks at which calls join ranks of different hosts, and at all gradients.
#
# <details><summary>Hint 1</summary>
#
# Ranks are numbered host by host: 0 and 1 are on the first host. The ranks of a row are neighbours. How long has a row
# to be, and which axis of the shape says so?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `mesh = init_device_mesh("cpu", (hosts, ranks), mesh_dim_names=("replicate", "shard"))`. Then call
# `fully_shard(block, mesh=mesh)` for each block, and once for the model.
#
# </details>


# %%
def shard_hybrid(model: torch.nn.Sequential, hosts: int, ranks: int) -> None:
    ### BEGIN SOLUTION
    mesh = init_device_mesh("cpu", (hosts, ranks), mesh_dim_names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ### END SOLUTION


# %%
verdict_mesh = checks.shard_hybrid(shard_hybrid)
verdict_mesh

# %% [markdown]
# Now measure it. Your line starts [traffic.py](../launch/cluster/traffic.py) on both hosts. It trains a step of a small
# network under FSDP over all ranks, and one sharded by your function, and asks the network card of each host how many
# bytes it has sent. Ranks stand in a ring in their order. Double arrows leave a host:
#
# ```
# FSDP: one ring                HSDP: a ring for each shard
#    host0      host1              host0      host1
#  ┌─►0──►1══════►2──►3─┐          0◄════════►2
#  └════════════════════┘          1◄════════►3
# ```
#
# Along each arrow of a ring of n ranks, an all-gather sends (n − 1)/n of its tensor, and an all-reduce twice as much.
# Gloo has no reduce-scatter of its own: it makes an all-reduce, and keeps a part. Commit: how many times the model's
# bytes leave a host in a step?

# %% tags=["commit"]
mine_times = commit(fsdp_times=None, hsdp_times=None)
### BEGIN SOLUTION
mine_times = commit(fsdp_times=2 * 3 / 4 + 2 * 3 / 4, hsdp_times=2 * (2 * 1 / 2) / 2)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
line = launch_line if verdict_line.ok and terminals.are_machines else launches.working_line(hosts)
own_mesh = {"shard_hybrid": shard_hybrid} if verdict_mesh.ok else {}
measured = launches.measure_traffic(terminals, line, RANKS, DIM, **own_mesh)

# %% tags=["nbval-ignore-output"]
part = (2 * RANKS - 1) / (2 * RANKS)  # (n − 1)/n for all ranks of both hosts
hsdp_times = RANKS * (2 * 1 / 2) / RANKS  # RANKS rings of two hosts, each for a shard
by_theory = {"fsdp_times": 2 * part + 2 * part, "hsdp_times": hsdp_times}
plots.comparison_table(measured, by_theory, yours=mine_times, tolerance=0.03, column="measured")

# %% [markdown]
# *HSDP sends a third of what FSDP sends between hosts, with gloo.* FSDP's two gathers and its all-reduce of gradients
# send 2 · 3/4 + 2 · 3/4 of the model among four ranks. With NCCL, whose reduce-scatter sends 3/4, it would be 2.25.
# HSDP has two rings, and in each an all-reduce of half of the model between two hosts: 2 rings · 1/2 · (2 · 1/2) = 1.
# The cards count slightly more, because each packet has a header.
#
# The price is memory: every host holds a whole copy of parameters, gradients and optimizer state, 16 bytes for each
# parameter. With 8 billion parameters that makes 16 GB on each of a host's eight GPUs. With FSDP over two hosts it
# would be 8 GB.
#
# **Does it pay?** Only if a step waits for the network. Take these 8 billion parameters on 2 hosts of eight GPUs, with
# NCCL, 4,096 tokens on a GPU, and 400 · 10¹² operations a second. Weights and gradients travel in bfloat16, so a
# model's worth of either is 16 GB, of which a ring of 16 ranks carries 15/16:
#
# |pass|computing|FSDP sends|HSDP sends|
# |---|---|---|---|
# |forward|164 ms|a gather, 15 GB|nothing|
# |backward|328 ms|a gather and a reduce-scatter, 30 GB|all-reduces, 16 GB|
#
# NCCL runs a ring through each card at once. If a pass hides all that it can, it takes as long as the longer of
# computing and sending. Commit: with one card a host, how many times as long is a step with FSDP as with HSDP? And with
# eight cards?

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

# %% [markdown]
# <details><summary>Where the 1.8 comes from</summary>
#
# With one card FSDP's bytes take 300 and 600 ms, longer than the computing. HSDP's take 320 ms of a backward pass of
# 328 ms, and hide. So it is 900 / 492 = 1.8. With eight cards all bytes hide, and both take 492 ms.
#
# </details>
#
# <details><summary>Set the explorer to 128 hosts with one card. Do HSDP's bytes still hide?</summary>
#
# No. They nearly double, because (n − 1)/n goes from 1/2 to almost 1, and take 635 ms of a backward pass that
# computes for 328 ms. HSDP is still ahead. It helps to compute more for each byte: more tokens on a GPU, or gradients
# accumulated over several batches, of which only the last is reduced across hosts.
#
# </details>
#
# *Takeaway: HSDP keeps gathers inside a host, at the price of a whole copy on each. It pays where a step waits for the
# network between hosts, and gains nothing where the bytes hide anyway.*

# %% tags=["claim"]
saves = {step.name: sorted(path.name for path in step.iterdir()) for step in sorted((place / "by_hand").glob("step_*"))}
claim("a file of each rank, and .metadata", {len(files) for files in saves.values()} == {5} and len(saves) == 3)
claim("each has .metadata", all(".metadata" in files for files in saves.values()))
claim("the first two end with an error, and the third has two worlds", worlds == {"first": 0, "second": 0, "third": 2})
claim("of two ranks", all("rank 1 of 2" in text for text in said["third"].values()))
close = {way: abs(times / by_theory[way] - 1) < 0.03 for way, times in measured.items()}
claim("the cards count a little more", close == dict.fromkeys(by_theory, True), where=terminals.are_machines)
claim("a third of what FSDP sends", 0.3 < measured["hsdp_times"] / measured["fsdp_times"] < 0.37, where=RANKS == 2)
nccl = theory.host_egress_bytes(1, 2, 2, hybrid=False), theory.host_egress_bytes(1, 2, 2, hybrid=True)
claim("with NCCL it would be 2.25, and 1", nccl == (2.25, 1))
one_card = theory.pass_ms(cards=1, hosts=2, tokens=4096)
named = {"computing": [164, 328], "fsdp": [300, 600], "hsdp": [0, 320]}
claim("the passes, 15, 30 and 16 GB", {way: [round(ms) for ms in one_card[way]] for way in named} == named)
claim("1.8 and 1", [round(ratio, 1) for ratio in ratios.values()] == [1.8, 1.0])
far = {"cards": 1, "hosts": 128, "tokens": 4096}
far_ms, far_step_ms = theory.pass_ms(**far), theory.step_ms(**far)
claim("635 ms of a pass of 328 ms", (round(far_ms["hsdp"][1]), round(far_ms["computing"][1])) == (635, 328))
claim("HSDP is still ahead", far_step_ms["hsdp"] < 0.9 * far_step_ms["fsdp"])

# %% [markdown]
# ## 4. Lose a host ({minutes} minutes)
#
# While Llama 3 was trained on 16,384 GPUs, something failed every three hours. When a host is lost, the ranks of the
# others cannot finish their next collective, and what was in its memory is gone. So a program saves now and then, and
# goes on from its newest complete save with the ranks that it gets. This is how it finds that save:


# %%
def newest_complete(folder: Path) -> Path | None:
    complete = [path for path in folder.glob("step_*") if (path / ".metadata").exists()]
    newest = [max(complete, key=lambda path: int(path.name.split("_")[1]), default=None)]  # step_10 is after step_9
    dist.broadcast_object_list(newest)  # rank 0's, because hosts may see a new file at different moments
    return newest[0]


# %% [markdown]
# ### Exercise 3: save every few steps, and go on (••, {minutes} minutes)
#
# `one_step(step)` trains one step, given its number from 0, and returns True if all ranks were asked to stop. Train
# until `steps` steps are done, or until a stop. Save as section 1 does, in `folder / f"step_{done:08d}"`, whenever `done`
# is a multiple of `every`, and at a stop. If `folder` has a complete save, begin with the step after it: make
# a state such as the one that was saved, let `dcp.load(state, checkpoint_id=…)` fill it, its number of steps too, and
# let `set_state_dict(model, optimizer, model_state_dict=…, optim_state_dict=…)` put the rest in place.
#
# The next cells put your function into [train.py](../launch/cluster/train.py) and start that with your line on both
# hosts, for 16 steps with a save every 4. When step 9 has ended, everything on host1 is killed. Then host0's two ranks
# go on alone, and at last a stop is tried. Gloo's ranks wait for each other for 30 minutes by default. Commit: after
# how many minutes has torchrun on host0 ended, too: 0, or 30? And which step is the first that the two ranks train?
#
# <details><summary>Hint 1</summary>
#
# If there is a save: `weights, updates = get_state_dict(model, optimizer)`, in a dictionary with `"step": 0`; load it
# and set it. Otherwise begin with step 0, and do not call `get_state_dict` yet: of an optimizer that has no state it
# makes one by a step without gradients, and Adam counts that. After step 3, four steps are done.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `stop = one_step(step)`. `if stop or (step + 1) % every == 0:` call `get_state_dict` again, and `dcp.save` a
# dictionary with `"step": step + 1`. After that, return if `stop`.
#
# </details>


# %%
def train(model, optimizer, one_step, folder: Path, steps: int, every: int) -> None:
    ### BEGIN SOLUTION
    first = 0
    if newest := newest_complete(folder):
        weights, updates = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": updates, "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
    for step in range(first, steps):
        stop = one_step(step)
        if stop or (step + 1) % every == 0:
            weights, updates = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": updates, "step": step + 1}
            dcp.save(state, checkpoint_id=folder / f"step_{step + 1:08d}")
        if stop:
            return
    ### END SOLUTION


# %% tags=["commit"]
mine_loss = commit(minutes=None, first_step=None)
### BEGIN SOLUTION
mine_loss = commit(minutes=0, first_step=8)
### END SOLUTION

# %% tags=["nbval-ignore-output"]
happened = launches.lose_host(terminals, line, train)
verdict_train = checks.train(train, happened)
verdict_train

# %% tags=["nbval-ignore-output"]
if not verdict_train.ok:
    happened = launches.lose_host(terminals, line)  # with the course's own function
print(line(2, "train.py"), *launches.telling_lines(happened.lost), sep="\n")
unbroken = terminals.run("SAVES=unbroken STEPS=16 torchrun --standalone --nproc-per-node 4 train.py", "host0")["host0"]
texts = {"never interrupted": unbroken, "host1 lost": happened.lost, "two ranks go on": happened.resumed}
curves = pandas.DataFrame({name: launches.losses(text) for name, text in texts.items()})
axes = curves.plot(style=["-", "--", ":"], lw=2, figsize=(7, 3), xticks=[0, 4, 8, 12, 15])
axes.set(xlabel="training step", ylabel="loss (mean squared error)")
first, apart = curves["two ranks go on"].first_valid_index(), curves.div(curves["never interrupted"], axis=0) - 1
print(f"host0 ended after {happened.ended_after_s / 60:.1f} minutes; you: {prediction_text(mine_loss['minutes'])}")
print(f"two ranks go on with step {first}; you: {prediction_text(mine_loss['first_step'])}")
print(f"relative difference of the losses: at most {apart.abs().max().max():.1e}")

# %% [markdown]
# *The loss goes on as if nothing had happened, to within 10⁻⁵, with half the ranks.* Two finished steps were lost and
# trained again. Gradients of fewer ranks are added in another order, so the last digits differ.
#
# **Why may a log blame a healthy host?** The ranks of host1 died together with their torchrun, so nobody there
# reports a failure. On host0, the rank that first notices a closed connection ends with an error, which names the lost
# host's address, 10.77.0.2. Its connections now close as well, so its neighbour may complain of 10.77.0.1, which is
# host0 itself. torchrun calls the first of its own ranks that ended the cause. So look for the address in the first
# error, and for the host whose log just stops.
#
# host0's ranks noticed at once, because host1's system closed the connections of killed processes. After a power cut
# nobody does that, and ranks wait for the limit of their process group: 30 minutes with gloo, 10 with NCCL, or what
# `init_process_group(timeout=...)` says.
#
# *Takeaway: a program goes on without a host if any number of ranks can load its saves. In a log, trust the address in
# the first error more than the rank that reports it.*
#
# ## 5. How often should you save? ({minutes} minutes)
#
# A save takes time, in which nothing is trained. A failure costs what was trained since the last save, half an
# interval on average, and the pause until ranks notice it and train again. So the lost share of the time is
#
# `save / interval + (interval / 2 + pause) / time between failures`
#
# and it is smallest for `interval = √(2 · save · time between failures)` (Young, 1974). Take 16,384 GPUs with a failure
# every 3.1 hours, as for Llama 3, and saves of 60 seconds. Commit: how many minutes lie between two saves at best? And
# which percentage of the time does a pause of 10 minutes cost, NCCL's limit?

# %% tags=["commit"]
mine_saving = commit(minutes=None, pause_percent=None)
### BEGIN SOLUTION
mine_saving = commit(minutes=(2 * 1 * 186) ** 0.5, pause_percent=100 * 10 / 186)
### END SOLUTION

# %%
between_s, pause_s = 54 * 24 / 419 * 3600, 600  # 419 interruptions in 54 days
saving_rows = {}
for save_s in (60, 5):
    best_s = theory.checkpoint_interval_s(save_s, between_s)
    share = theory.checkpoint_overhead_share(best_s, save_s, between_s)
    saving_rows[f"saves of {save_s} s"] = [f"{best_s / 60:.1f}", f"{share:.1%}", f"{pause_s / between_s:.1%}"]
print(", ".join(f"your {name}: {prediction_text(each, '.1f')}" for name, each in mine_saving.items()))
columns = ["minutes between saves", "lost to saves and repeated steps", "lost to pauses of 10 minutes"]
pandas.DataFrame.from_dict(saving_rows, orient="index", columns=columns)

# %% [markdown]
# *Saves and repeated steps cost a tenth of the time if a save takes a minute, and 3 % if it takes five seconds. Then
# pauses of 10 minutes cost more, 5.4 %.* A save of a few seconds goes to memory first, and to disk while training goes
# on (`torch.distributed.checkpoint.async_save`).
#
# *Takeaway: save every √(2 · save · time between failures). Make saves short, because their share falls with the
# square root, and choose a limit by which ranks notice a failure soon.*
#
# ## 6. A job that survives preemption ({minutes} minutes)
#
# On a cluster, `sbatch` hands a script to the scheduler Slurm. When two nodes are free, Slurm runs it on the first of
# them, and each `srun` in it starts a command on both.
#
# A host is often lost without any failure: the time limit comes, or a job with higher priority takes the nodes
# (**preemption**). `#SBATCH --signal` asks Slurm for a signal two minutes before the time limit, here USR1. The script
# then makes a file called `stop`. The ranks look for it after each step, save, and end. At last the script asks for
# another attempt, by `scontrol requeue`.
#
# Ranks look at slightly different moments. If rank 0 sees the file and rank 1 does not, rank 0 saves while rank 1
# trains the next step. Their collectives do not match, so they hang or fail, and the save stays incomplete.
#
# ### Exercise 4: stop together (•, {minutes} minutes)
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
# Here is a colleague's script, which starts torchrun once on each node. Slurm gives each node its number as
# `SLURM_NODEID`, from 0. The endpoint is node 0's, and its address is right. Where a node's name leads to its address in
# the cluster, the script needs neither `--local-addr` nor `GLOO_SOCKET_IFNAME`. `trap` says what to do at a signal:
#
# - With `--signal=USR1@120` Slurm signals what `srun` has started, and with `--signal=B:USR1@120` the script alone.
# - bash runs a trap only between commands. `command &` starts one in the background, and `wait $!` waits for it.
# - A signal ends the `wait`, but not the command.

# %%
Code(job_script.broken_script(), language="bash")

# %% [markdown]
# ### Exercise 5: mend the script (••, {minutes} minutes)
#
# It never trains: after a minute, both nodes say that nobody answers at the endpoint. Nor would it survive a
# preemption. Find three faults, and return the mended script. The check runs it with stand-ins for Slurm's commands,
# and tells one symptom at a time.
#
# <details><summary>Hint 1</summary>
#
# Who owns the endpoint, on each node? Who gets the signal? And when does bash run a trap?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# On node 0, where `SLURM_NODEID` is 0, `is_host` has to be 1. The trap is the script's, so the signal has to be, too.
# Start `srun` in the background, with `&` at the end of its last line, and `wait $!` for it. The signal ends that
# `wait`, so a second `wait $!` follows.
#
# </details>
#
# <details><summary>Hint 3</summary>
#
# `script.replace("is_host=$SLURM_NODEID", "is_host=$((SLURM_NODEID == 0))")`, and two more. The last line of `srun`
# ends in `torchrun "$@"` and a line break, `\n`.
#
# </details>


# %%
def mend_script(script: str) -> str:
    ### BEGIN SOLUTION
    script = script.replace("is_host=$SLURM_NODEID", "is_host=$((SLURM_NODEID == 0))")
    script = script.replace("--signal=USR1", "--signal=B:USR1")
    return script.replace('torchrun "$@"\n', 'torchrun "$@" &\nwait $!\nwait $!\n')
    ### END SOLUTION


# %%
verdict_script = checks.mend_script(mend_script)
verdict_script

# %% [markdown]
# Now submit it. As root, with Slurm's packages, the cell starts a real Slurm of two nodes here; elsewhere it shows a
# recorded log. The job has one rank on each node, and runs your `train` and `all_stop`: 12 steps, with a save every 4.
# Once the first 4 are saved, the cell sends its script USR1, as Slurm would.

# %% tags=["nbval-ignore-output"]
own = ({"train": train} if verdict_train.ok else {}) | ({"all_stop": all_stop} if verdict_stop.ok else {})
script = mend_script(job_script.broken_script()) if verdict_script.ok else job_script.GENERAL.read_text()
log = job_script.run_job(script, place, launches.write_program(place, **own), steps=12)
print(log)
trained = [int(step) for step in re.findall(r"^step (\d+) on 2 ranks", log, flags=re.MULTILINE)]

# %% [markdown]
# *The first attempt saves when it is told to stop, so the second one goes on there, and no step is trained twice.* A
# line with CANCELLED is no failure: `scontrol requeue` ends the script that asks for it.
#
# <details><summary>Does a job that is preempted get the signal on your cluster, too, and how long before?</summary>
#
# It does if `scontrol show config` lists `send_user_signal` under PreemptParameters, and `scontrol show partition` a
# GraceTime into which a save fits. Otherwise the ranks get TERM, or nothing, and you lose what was trained since the
# last save.
#
# </details>
#
# [launch/cluster/general.sbatch](../launch/cluster/general.sbatch) is the whole script, with a reason for each line,
# and needs nothing of labkit: copy it.
#
# *Takeaway: a time limit announces itself, and preemption can. Let the script catch the signal, let all ranks agree to
# stop, save, and queue again.*

# %% tags=["claim"]
claim("the loss goes on, to within 1e-5", apart.abs().max().max() < 1e-5 and curves.index[-1] == 15)
claim("two finished steps were lost", first == 8 and curves["host1 lost"].last_valid_index() == 9)
claim("host0's ranks noticed at once", happened.ended_after_s < 30)
claim("a tenth, and 3 %", [row[1] for row in saving_rows.values()] == ["10.4%", "3.0%"])
claim("pauses cost 5.4 %", {row[2] for row in saving_rows.values()} == {"5.4%"})
claim("the second attempt goes on, and no step is trained twice", trained == [*range(12)] and "attempt 2" in log)
claim("Slurm says completed", "COMPLETED" in log)

# %% [markdown]
# ## 7. Take away ({minutes} minutes)
#
# 1. Hosts need one endpoint that all of them reach, an interface that joins them, and one answer to how many they are.
# 2. Keep inside a host what is large: HSDP, if a host holds a whole copy.
# 3. Every large run loses hosts. It survives by saves that any number of ranks can load, samples that depend on the
#    step, and ranks that stop together.
#
# | if | then |
# |---|---|
# | torchrun waits or times out | look in each host's log for the address that it tried |
# | each host has a rank 0 | stop it: each trains alone |
# | a step waits for the network between hosts | HSDP, more tokens on a GPU, or more cards |
# | your cluster warns jobs before it preempts them | `--signal=B:USR1@120`, save, `scontrol requeue` |
#
# **Ask yourself**
#
# <details><summary>1. torchrun waits, and ends after a minute. Where do you look?</summary>
#
# A host that joins gives up after a minute, one that waits for others later. If both end after a minute, neither took the
# endpoint for its own. If host1 ends first, a firewall is between them, or on host1 the endpoint leads elsewhere.
#
# </details>
#
# <details><summary>2. The loss falls, but each host's log speaks of a rank 0. What has happened?</summary>
#
# Each host trains a model of its own, and all hosts save to the same place. If every rank draws its own batch, a step
# also has fewer samples than you think.
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
# Half an hour for each failure, a sixth of the time, the pause after it, and in each hour the time of one save.
#
# </details>
#
# <details><summary>5. Why does the script wait for <code>srun</code> twice?</summary>
#
# The signal ends the first wait. Without the second, the script would go on before the ranks have saved, with a status
# that says that it was interrupted, and would not queue the job again.
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
# - In labkit: `labkit_cluster/host_rendezvous.py`, how hosts find each other; `labkit_cluster/theory.py`, the formulas;
#   [docs/clusters.md](../docs/clusters.md), its own jobs.
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
