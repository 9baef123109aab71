"""Lab 8's launches on two hosts: three broken lines, what torchrun prints, and how a line is read.

Where hosts have networks of their own (as root on Linux), the lines really run there. Elsewhere the
lab shows what such hosts printed, and a line is judged by what it would tell torchrun on each.

A learner's line then starts two programs: one counts the bytes that leave a host, and the other
loses a host while it trains.
"""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas

from labkit.errors import LabError
from labkit.runs.folder import ROOT
from labkit_cluster.local_hosts import LocalHosts
from labkit_cluster.typed import OWN_NAME_ADDRESS, Terminals

TRAIN = ROOT / "launch" / "cluster" / "train.py"
TRAFFIC = ROOT / "launch" / "cluster" / "traffic.py"
ADDRESSES = {"host0": "10.77.0.1", "host1": "10.77.0.2"}
INTERFACE = "eth0"
_SAME = "--nproc-per-node 2 --rdzv-backend c10d --local-addr $ADDRESS"
_LIMITS = "join_timeout=12,read_timeout=5,last_call_timeout=2"
LINES = {
    "first": (
        f"GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 {_SAME} --rdzv-endpoint $(hostname -i):29500"
        f" --rdzv-conf is_host=$IS_HOST,{_LIMITS} who.py"
    ),
    "second": (
        f"GLOO_SOCKET_IFNAME=docker0 torchrun --nnodes 2 {_SAME} --rdzv-endpoint host0:29500"
        f" --rdzv-conf is_host=$IS_HOST,{_LIMITS} who.py"
    ),
    "third": (
        f"GLOO_SOCKET_IFNAME=eth0 LOGLEVEL=INFO torchrun --nnodes 1:2 {_SAME} --rdzv-endpoint"
        f" $(cat head.txt || echo localhost):29500 --rdzv-conf {_LIMITS} who.py"
    ),
}
"""The broken launches. Their limits are short; by default a host waits 60 s for the endpoint, ten
minutes for the others to join, and half a minute for more of them."""

WHO = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
total = torch.ones(1)
dist.all_reduce(total)
rank, ranks = dist.get_rank(), dist.get_world_size()
place = f"host {os.environ['GROUP_RANK']}, local rank {os.environ['LOCAL_RANK']}"
print(f"rank {rank} of {ranks}: {place}, sum of ones {int(total)}\\n", end="", flush=True)
dist.destroy_process_group()
"""
"""What the lines start, as who.py."""

RECORDED = Path(__file__).with_name("recorded") / "words.json"
"""What hosts of lab 8 printed, by launch and host, and a job's log."""
RANKS_SAID = re.compile(r"^rank \d+ of (\d+): ", re.MULTILINE)
# Of hundreds of lines, those that say something; tracebacks and retries repeat it.
TELLING = re.compile(
    r"^rank \d|^(?!.*ChildFailed)[\w.]*Error\b|^The client socket|^failed \(exitcode|^cat: "
    r"|^rdzv_endpoint|^(?:group|global)_world_size"
)
# What a line has beside its words: whose it is, when it was printed, by which file and process, and
# the number that gloo gives a connection, after its port.
NOISE = re.compile(
    r"^\[rank\d+\]:\s*|^\[?[WEI]\d{4} [\d:.]+ (?:\d+ )?\S+\] *(?:\[c10d\] )?"
    r"|\[/\S+\] (?:ERROR )?| \(pid: .*| of binary: .*|(?<=\d)\$\d+$"
)
MAX_LINES, MAX_LETTERS = 7, 200
READ_LIMIT_S = 20


def telling_lines(text: str) -> list[str]:
    """Return the lines of a host's output that say what happened, each once, without times."""
    lines = (NOISE.sub("", NOISE.sub("", line)).strip() for line in text.splitlines())
    found = [line[:MAX_LETTERS] for line in lines if TELLING.search(line)]
    return list(dict.fromkeys(found))[:MAX_LINES]


def recorded_words() -> dict[str, dict[str, str]]:
    """Return what was printed on hosts with networks of their own."""
    words: dict[str, dict[str, str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return words


def launch(name: str, terminals: Terminals) -> dict[str, str]:
    """Type a broken line on both hosts, show the telling lines, and return all that they print."""
    print(LINES[name])
    if terminals.are_machines:
        (terminals.folder / "who.py").write_text(WHO)
        said = terminals.run(LINES[name])
    else:
        print("(recorded: without root on Linux the hosts here share one network)")
        said = recorded_words()[name]
    for host, text in said.items():
        print(f"\n{host}:", *(telling_lines(text) or ["(nothing)"]), sep="\n  ")
    return said


def world_size(said: Mapping[str, str]) -> int:
    """Return the largest number of ranks that a rank of who.py has counted, or 0."""
    return max([0, *(int(each) for text in said.values() for each in RANKS_SAID.findall(text))])


def write_program(folder: Path, program: Path = TRAIN, **functions: Callable[..., Any]) -> Path:
    """Write a program into a folder, with these functions in the place of its own."""
    text = whole = program.read_text(encoding="utf-8")
    for node in ast.parse(whole).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            own = ast.get_source_segment(whole, node)
            yours = textwrap.dedent(inspect.getsource(functions[node.name])).rstrip()
            assert own is not None
            text = text.replace(own, yours)
    path = folder / program.name
    path.write_text(text)
    return path


Line = Callable[[int, str], str]
"""Makes the line that starts a program on each of two hosts: from ranks of a host, and its name."""


def working_line(hosts: LocalHosts) -> Line:
    """Return what makes a line that works on these hosts."""
    endpoint = hosts.host_address(hosts[0].name)
    return lambda ranks, program: (
        f"GLOO_SOCKET_IFNAME={hosts.interface} torchrun --nnodes 2 --nproc-per-node {ranks}"
        f" --rdzv-backend c10d --rdzv-endpoint {endpoint}:29500 --rdzv-conf is_host=$IS_HOST"
        f" --local-addr $ADDRESS {program}"
    )


def measure_traffic(
    terminals: Terminals, line: Line, ranks: int, dim: int, **functions: Callable[..., Any]
) -> dict[str, float]:
    """Return the bytes that leave host 0 in a step, by way of sharding, in model sizes.

    Hosts that share one network cannot tell; there it is what other hosts have counted.
    """
    said = recorded_words()["traffic"]
    if terminals.are_machines:
        write_program(terminals.folder, TRAFFIC, **functions)
        said = terminals.run(f"export DIM={dim}; {line(ranks, TRAFFIC.name)}")
    else:
        print("(recorded, with 2 ranks on each host: these hosts share one network card)")
    for text in said.values():
        print(*(re.findall("^host .*", text, re.MULTILINE) or telling_lines(text)), sep="\n")
    found = re.findall(r"^host 0: (\w+) .* = (\S+) times", "\n".join(said.values()), re.MULTILINE)
    return {f"{way}_times": float(times) for way, times in found}


@dataclass(frozen=True)
class LostHost:
    """What happened to a training of which a host was lost, and when it then went on."""

    lost: str
    """What the host that is left printed."""
    saves: list[str]
    """The names of the saves that were complete when the host was lost."""
    ended_after_s: float
    """How long the torchrun of the other host went on."""
    resumed: str
    """What was printed when the ranks of one host went on."""
    stopped: str
    """What was printed when they then went on for more steps, and were to stop after the first."""
    last_save: str
    """The name of the newest save after that."""


EMPTY = (lambda: None).__code__
STEPS, EVERY, LOST_AT = 16, 4, 9
"""Steps of that training, the steps between two saves, and in which step the host is lost."""


def lose_host(
    terminals: Terminals, line: Line, train: Callable[..., Any] | None = None
) -> LostHost | None:
    """Train with two ranks on each of two hosts, kill one host, and go on with those of the other.

    At last go on once more, for further steps, and ask for a stop.

    Return None if ``train``, which takes the place of the program's own, is empty or no function.
    """
    code = getattr(train, "__code__", EMPTY)
    if train is not None and code.co_code == EMPTY.co_code:
        return None
    write_program(terminals.folder, TRAIN, **({"train": train} if train else {}))
    saves = terminals.folder / "lost"
    shutil.rmtree(saves, ignore_errors=True)  # of an earlier try
    first, second = (host.name for host in terminals.hosts)
    setting = f"export SAVES={saves.name} STEPS={STEPS} EVERY={EVERY}"
    terminals.start(f"{setting} STEP_S=0.1; {line(2, TRAIN.name)}")
    terminals.wait_for(f"step {LOST_AT} on", first)
    terminals.hosts.kill_host(second)
    killed_at = time.monotonic()
    complete = sorted(path.parent.name for path in saves.glob("step_*/.metadata"))
    lost = terminals.wait()[first]
    ended_after_s = time.monotonic() - killed_at
    alone = f"torchrun --standalone --nproc-per-node 2 {TRAIN.name}"
    resumed = terminals.run(f"{setting}; {alone}", first)[first]
    stopped = ""
    if f"step {STEPS - 1} on" in resumed:
        (saves / "stop").touch()
        stopped = terminals.run(f"{setting}; STEPS={2 * STEPS} {alone}", first)[first]
    last_save = max((path.parent.name for path in saves.glob("step_*/.metadata")), default="")
    return LostHost(lost, complete, ended_after_s, resumed, stopped, last_save)


def losses(text: str) -> pandas.Series:
    """Return the loss by step that train.py has printed."""
    found = re.findall(r"^step (\d+) on \d+ ranks: loss (\S+)$", text, flags=re.MULTILINE)
    return pandas.Series({int(step): float(loss) for step, loss in found}, dtype=float)


@dataclass(frozen=True)
class Told:
    """What a line tells torchrun on one host."""

    ranks: str
    program: str
    nodes: int
    most_nodes: int
    endpoint: str
    is_host: bool | None
    local_address: str
    interface: str


STAND_INS = {
    "torchrun": 'printf "%s\\n" "$GLOO_SOCKET_IFNAME" "$@"',
    "hostname": (
        f'case "$1" in -i) echo {OWN_NAME_ADDRESS};; -I) echo $ADDRESS;; *) echo $HOST;; esac'
    ),
}


def read_line(line: str) -> dict[str, Told]:
    """Return what a shell on each host would tell torchrun.

    Raises:
        LabError: it would not start torchrun, or with options that torchrun does not know.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, body in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o700)
        return {host: _read_on(host, line, folder) for host in ADDRESSES}


def _read_on(host: str, line: str, folder: Path) -> Told:
    from torch.distributed.run import config_from_args, get_args_parser

    own = {"ADDRESS": ADDRESSES[host], "IS_HOST": str(int(host == "host0")), "HOST": host}
    plain = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=plain | own | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=READ_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"on {host} it has not started torchrun after {READ_LIMIT_S} s") from None
    interface, *words = done.stdout.split("\n")[:-1] or [""]
    if done.returncode or not words:
        raise LabError(f"on {host} it does not start torchrun: {done.stderr.strip()[-200:]}")
    try:
        # It would warn where this is not set, and set it.
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            options = get_args_parser().parse_args(words)
            config, _, _ = config_from_args(options)
    except (Exception, SystemExit) as error:
        given = shlex.join(["torchrun", *words])
        raise LabError(f"torchrun on {host} refuses `{given}`: {error}") from None
    says = config.rdzv_configs.get("is_host")
    is_host = None if says is None else str(says).lower() in ("1", "true", "t", "yes")
    if config.rdzv_backend == "static":
        is_host = config.rdzv_configs.get("rank") == 0
    return Told(
        options.nproc_per_node,
        options.training_script,
        config.min_nodes,
        config.max_nodes,
        config.rdzv_endpoint.partition(":")[0],
        is_host,
        config.local_addr or "",
        interface,
    )


def problem_of(told: Mapping[str, Told]) -> tuple[str, str]:
    """Return what goes wrong on two hosts that are told this, and a hint; empty if nothing does."""
    for host, each in told.items():
        if each.most_nodes != 2:
            said = f"on {host} --nnodes is {each.most_nodes}, and there are two hosts"
            return said, "--nnodes says how many hosts take part."
    stores = {host: _store_of(host, told) for host in told}
    for host, (place, store) in stores.items():
        if not store:
            return (
                f"{host} looks for the endpoint at {place}, where nobody is the endpoint's host",
                "All hosts need the address of one of them, by which the others reach it.",
            )
    if len({store for _, store in stores.values()}) > 1:
        alone = min(each.nodes for each in told.values()) < 2
        seen = "each host takes itself for the endpoint's host"
        return (
            f"{seen}, and {'trains alone' if alone else 'waits for another'}",
            "All hosts need the same endpoint, and exactly one is its host.",
        )
    for host, each in told.items():
        if each.interface != INTERFACE:
            return (
                f"ranks on {host} give the others an address on {each.interface or 'no interface'}",
                "GLOO_SOCKET_IFNAME names the interface by which hosts reach each other.",
            )
        if each.local_address != ADDRESSES[host]:
            return (
                f"{host} gives itself the address {each.local_address or OWN_NAME_ADDRESS}",
                "--local-addr is the host's own address.",
            )
    return "", ""


def begins_alone(told: Mapping[str, Told]) -> str:
    """Return which host would train without the other, if that one is late; "" for none."""
    return next((host for host, each in told.items() if each.nodes < 2), "")


def _store_of(host: str, told: Mapping[str, Told]) -> tuple[str, str]:
    """Return to which address a host's endpoint leads, and whose store is there; "" for none."""
    endpoint = told[host].endpoint
    if endpoint == "localhost" or endpoint == host or endpoint.startswith("127."):
        place, owner = "127.0.0.1" if endpoint == "localhost" else endpoint, host
        place = OWN_NAME_ADDRESS if endpoint == host else place
    else:
        place = ADDRESSES.get(endpoint, endpoint)
        owner = next((each for each, address in ADDRESSES.items() if address == place), "")
    return place, owner if owner and _is_host(owner, told) else ""


def _is_host(host: str, told: Mapping[str, Told]) -> bool:
    """Return whether torchrun on a host opens the store."""
    if (given := told[host].is_host) is not None:
        return given
    # torchrun compares the endpoint with the host's name, and with the address to which that leads.
    endpoint = told[host].endpoint
    return endpoint in (host, "localhost", OWN_NAME_ADDRESS) or endpoint.startswith("127.")
