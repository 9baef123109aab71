"""Lab 8."""

from answers import Exercise
from labkit_course.checks import hosts as checks

NEWEST = """
found = [path for path in folder.glob("step_*"){complete}]
return {choice}
"""
COMPLETE = ' if (path / ".metadata").exists()'
BY_NUMBER = 'max(found, key=lambda path: int(path.name.split("_")[1]), default=None)'
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
script = script.replace("is_host=1", "{host}")
script = script.replace("--signal=USR1", "--signal={letter}USR1")
return script.replace('torchrun "$@"\\n', 'torchrun "$@"{wait}\\n')
"""
RIGHT = {"host": "is_host=$((SLURM_NODEID == 0))", "letter": "B:", "wait": " &\\nwait $!\\nwait $!"}
NODE_1 = "is_host=$((SLURM_NODEID == 1))"
EXERCISES = [
    Exercise(
        "8.1",
        "newest_complete",
        checks.newest_complete,
        {
            "it gave step_11, which was cut off": NEWEST.format(complete="", choice=BY_NUMBER),
            "it gave step_9, and step_10 is newer": NEWEST.format(complete=COMPLETE, choice="max(found, default=None)"),
            "newest_complete of an empty folder raised": NEWEST.format(
                complete=COMPLETE, choice=BY_NUMBER.replace(", default=None", "")
            ),
        },
    ),
    Exercise(
        "8.2",
        "mend_first",
        checks.mend_first,
        {
            "the line is as it was": "return line.replace('hostname -f', 'alpha')",
            "beta looks for the endpoint at 10.77.0.2": "return line.replace('$(hostname -i)', '$ADDRESS')",
            "beta looks for the endpoint at 127.0.0.1": "return line.replace('$(hostname -i)', 'localhost')",
            "alpha looks for the endpoint at 10.77.0.2": "return line.replace('$(hostname -i)', 'beta')",
            "each host takes itself for the endpoint's host, and waits": "return line.replace('$IS_HOST', '1')",
            "torchrun on alpha refuses": "return line.replace('--nnodes', '--nodes')",
        },
    ),
    Exercise(
        "8.3",
        "mend_second",
        checks.mend_second,
        {
            "ranks on alpha give the others an address on lo": "return line.replace('docker0', 'lo')",
            "ranks on alpha give the others an address on no interface": (
                "return line.replace('GLOO_SOCKET_IFNAME=docker0', '')"
            ),
            "alpha gives itself the address 127.0.1.1": (
                "return line.replace('docker0', 'eth0').replace('--local-addr $ADDRESS', '')"
            ),
        },
    ),
    Exercise(
        "8.4",
        "mend_third",
        checks.mend_third,
        {
            "both join, but alpha trains alone if the other is late": (
                "return line.replace('$(cat head.txt || echo localhost)', 'alpha')"
            ),
            "each host takes itself for the endpoint's host, and waits": (
                "return line.replace('--nnodes 1:2', '--nnodes 2')"
            ),
            "each host takes itself for the endpoint's host, and trains alone": (
                "return line.replace('echo localhost', 'echo 127.0.0.1')"
            ),
            "alpha looks for the endpoint at 10.77.0.1, where nobody": (
                "return line.replace('$(cat head.txt || echo localhost)', '10.77.0.1')"
                ".replace('--nnodes 1:2', '--nnodes 2')"
            ),
            "on alpha --nnodes is 1": "return line.replace('--nnodes 1:2', '--nnodes 1')",
        },
    ),
    Exercise(
        "8.5",
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
        "8.6",
        "mend_script",
        checks.mend_script,
        {
            "both nodes take the endpoint for their own": MENDED.format(**RIGHT | {"host": "is_host=true"}),
            "the endpoint is not node 0's address": MENDED.format(**RIGHT | {"host": NODE_1}),
            "Slurm sent USR1 to the tasks and not to the script": MENDED.format(**RIGHT | {"letter": ""}),
            "the signal came, but nobody was asked to save": MENDED.format(**RIGHT | {"wait": ""}),
            "the signal came, and the script ended before": MENDED.format(**RIGHT | {"wait": " &\\nwait $!"}),
            "torchrun did not start on two nodes": 'return "sleep"',
        },
    ),
]
