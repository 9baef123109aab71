"""Lab 8."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import hosts as checks

changed = functools.partial(answers.changed, "08")

REDUCED = """
anyone = torch.tensor(float(asked))
dist.all_reduce(anyone, op=dist.ReduceOp.{op})
return {answer}
"""
BROADCAST = """
first = torch.tensor(float(asked))
dist.broadcast(first, src=0)
return bool(first)
"""
MENDED = """
script = script.replace("is_host=$SLURM_NODEID", "{host}")
script = script.replace("--signal=USR1", "--signal={letter}USR1")
return script.replace('torchrun "$@"\\n', 'torchrun "$@"{wait}\\n')
"""
RIGHT = {"host": "is_host=$((SLURM_NODEID == 0))", "letter": "B:", "wait": " &\\nwait $!\\nwait $!"}
RIGHTLY = MENDED.format(**RIGHT)
NODE_1 = "is_host=$((SLURM_NODEID == 1))"
ACROSS = """
from torch.distributed.device_mesh import DeviceMesh
rows = torch.arange(hosts * ranks).reshape(ranks, hosts).T
mesh = DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard"))
for block in model:
    fully_shard(block, mesh=mesh)
"""
LOAD = "dcp.load(state, checkpoint_id=newest)"


def line(*pairs: tuple[str, str]) -> str:
    return changed("launch_line", *pairs)


EXERCISES = [
    Exercise(
        "8.1",
        "launch_line",
        checks.launch_line,
        {
            "host1 looks for the endpoint at 10.77.0.2": line(
                ("host0:29500", "$ADDRESS:29500 --rdzv-conf is_host=$IS_HOST")
            ),
            "both join, but host0 trains alone if the other is late": line(("--nnodes 2", "--nnodes 1:2")),
            "host1 looks for the endpoint at 127.0.1.1": line(
                ("host0:29500", "$(hostname -i):29500 --rdzv-conf is_host=$IS_HOST")
            ),
            "host0 looks for the endpoint at 10.77.0.1": line(("host0:", "10.77.0.1:")),
            "each host takes itself for the endpoint's host, and waits": line(("host0:", "localhost:")),
            "each host takes itself for the endpoint's host, and trains alone": (
                line(("host0:", "localhost:"), ("--nnodes 2", "--nnodes 1:2"))
            ),
            "ranks on host0 give the others an address on docker0": line(("=eth0", "=docker0")),
            "ranks on host0 give the others an address on no interface": line(("GLOO_SOCKET_IFNAME=eth0", "")),
            "host0 gives itself the address 127.0.1.1": line(("--local-addr $ADDRESS", "")),
            "torchrun on host0 refuses": line(("--nnodes", "--nodes")),
            "on host0 --nnodes is 1": line(("--nnodes 2", "--nnodes 1")),
            "launch_line(3, 'train.py') starts 2 ranks of train.py": line(("{ranks}", "2")),
            "launch_line(3, 'train.py') starts 3 ranks of who.py": line(("{program}", "who.py")),
            "launch_line(2, 'who.py') gave 'python who.py'": "return 'python ' + program",
        },
    ),
    Exercise(
        "8.2",
        "shard_hybrid",
        checks.shard_hybrid,
        {
            "all 6 ranks together hold one copy": changed(
                "shard_hybrid", ('(hosts, ranks), mesh_dim_names=("replicate", "shard")', "(hosts * ranks,)")
            ),
            "rank 0 holds 0.33 of the model's parameters": changed(
                "shard_hybrid", ("(hosts, ranks)", "(ranks, hosts)")
            ),
            "with 3 hosts of 2 ranks, 3 calls of all_gather join": ACROSS,
            "the model is gathered in 1 call": changed("shard_hybrid", ("for block in model:", "for block in ():")),
            "on rank 0, 0.0.weight, 0.0.bias": changed("shard_hybrid", ('"shard"))', '"shard"))["shard"]')),
            "rank 0 holds 1 of the model's parameters": "print(len(model))",
        },
    ),
    Exercise(
        "8.3",
        "train",
        checks.train,
        {
            "after 10 steps there are saves of 1, 5, 9 steps": changed("train", ("(step + 1) % every", "step % every")),
            "it went on with step 0": changed("train", ("newest_complete(folder)", "None")),
            "after 10 steps there are saves of no steps": changed("train", ("(step + 1) % every == 0", "step < 0")),
            "after 10 steps there are saves of 1, 2, 3, 4, 5, 6, 7, 8, 9": changed(
                "train", ("if stop or (step + 1) % every == 0", "if every")
            ),
            "it went on with step 7": changed("train", ('"step": step + 1', '"step": step')),
            "it went on with step 9": changed("train", ("range(first", "range(first + 1")),
            "step 8 has the loss": changed("train", (LOAD, 'state["step"] = 8')),
            "step 9 has the loss": changed(
                "train", (LOAD, 'dcp.load({"model": weights}, checkpoint_id=newest)\n    state["step"] = 8')
            ),
            "it did not go on": changed("train", ("checkpoint_id=newest", "checkpoint_id=folder")),
            "before a host was lost it trained 0 steps: NameError": "return learn(model)",
            "it ended after step 11": changed("train", ("first, steps", "first, 12")),
            "one_step(16) returned True, and it trained 16 steps": changed(
                "train", ("    if stop:\n        return\n", "")
            ),
            "one_step(16) returned True, and the newest save has 16 steps": changed("train", ("if stop or ", "if ")),
        },
    ),
    Exercise(
        "8.4",
        "all_stop",
        checks.all_stop,
        {
            "if rank 0 is asked, only rank 0 stops": "return asked",
            "if rank 0 is asked, nobody stops": REDUCED.format(op="MIN", answer="bool(anyone)"),
            "if the last rank is asked, nobody stops": BROADCAST,
            "if nobody is asked, everybody stops": "return True",
            "all_stop returned NoneType": REDUCED.format(op="MAX", answer="None"),
        },
    ),
    Exercise(
        "8.5",
        "mend_script",
        checks.mend_script,
        {
            "both nodes take the endpoint for their own": MENDED.format(**RIGHT | {"host": "is_host=true"}),
            "node 1 takes the endpoint for its own": MENDED.format(**RIGHT | {"host": NODE_1}),
            "the endpoint is not node 0's address": 'script = script.replace("$address:", "localhost:")' + RIGHTLY,
            "Slurm sent USR1 to the tasks and not to the script": MENDED.format(**RIGHT | {"letter": ""}),
            "the signal came, but nobody was asked to save": MENDED.format(**RIGHT | {"wait": ""}),
            "the signal came, and the script ended before": MENDED.format(**RIGHT | {"wait": " &\\nwait $!"}),
            "torchrun did not start on two nodes": 'return "sleep"',
        },
    ),
]
