"""Inside a rank: join the process group, choose the device, measure, and always leave in order.

    with rank.session() as here:
        mesh = here.mesh(space=here.world_size)
        for step in here.steps(20, track=[model, optimizer]):
            with step.span("forward"):
                ...

A program that uses this runs under labkit.run, under bare torchrun, and alone as one rank. Under labkit.run its records
go into the folder of the run; otherwise they stay in memory and rank 0 prints a table of them when it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit import config as configs
from labkit.errors import ParameterError
from labkit.folder import RunFolder
from labkit.meter import Meter, Step
from labkit.records import Writer

ConfigType = TypeVar("ConfigType")
Measure = Callable[..., Iterator[Step]]  # Here.steps, Here.plain_steps or Here.one_step


class Here:
    """This rank, for as long as its session lasts.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        device: where this rank's tensors live.
        note: why it is not the device one would expect, or "".
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, note: str, writer: Writer):
        self.rank, self.world_size, self.device, self.note = rank, world_size, device, note
        self._writer = writer
        self._meter = Meter(writer, device)

    def mesh(self, **axes: int) -> DeviceMesh:
        """A device mesh over all ranks, one named axis a keyword: ``mesh(data=2, space=2)``.

        Raises:
            ValueError: the sizes do not multiply to the number of ranks.
        """
        size = 1
        for length in axes.values():
            size *= length
        if size != self.world_size:
            shape = " x ".join(str(length) for length in axes.values())
            raise ValueError(f"mesh {shape} = {size} does not cover {self.world_size} ranks")
        with threads_that_wait_their_turn(self.device):
            return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def steps(
        self,
        count: int,
        *,
        warmup: int = 1,
        track: Sequence[Any] = (),
        units: Mapping[str, Sequence[nn.Module]] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Iterator[Step]:
        """Run a loop body as measured training steps: ``warmup`` unrecorded, ``count`` timed, then traced ones.

        The first traced step, where ``units`` are given, is profiled: its time line goes into the records and its raw
        trace into the folder of the run. The last one records communication and, for the models and optimizers in
        ``track``, memory by category. The loop body runs ``warmup + count + 1`` times, or once more.

        Args:
            count: timed steps.
            warmup: steps before them.
            track: models and optimizers whose memory is followed.
            units: modules by the name that they shall have in the time line.
            mesh: what runs along one of its axes is counted for this axis as well, as ``tp/all_reduce``.
        """
        axes = {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()} if mesh else {}
        return self._meter.steps(count, warmup, track, units, axes)

    def plain_steps(self, count: int, *, most: int | None = None, **unused: Any) -> Iterator[Step]:
        """Steps that are not measured, for a check, ``most`` at most; takes the arguments of ``steps`` as well."""
        return (Step(-1, False, self._meter) for _ in range(count if most is None else min(count, most)))

    def one_step(self, count: int, *, track: Sequence[Any] = ()) -> Iterator[Step]:
        """One step that is not measured, for a check; takes the arguments of ``steps`` and ignores them."""
        yield Step(-1, False, self._meter)

    def scalar(self, name: str, value: float, unit: str = "") -> None:
        """Record one number about the whole run."""
        self._writer.write("scalar", name, -1, value=float(value), unit=unit)

    def comm(self, name: str, size: int) -> None:
        """Record the bytes that this rank hands to a collective in one step."""
        self._writer.write("comm", name, -1, count=1, bytes=size)

    def keep_code(self, programs: Sequence[str]) -> None:
        """Keep in the run's folder, if there is one, the last of these programs that communicates: a backward pass."""
        communicating = [program for program in programs if "_c10d_functional" in program]
        if communicating and self._writer.folder:
            RunFolder(self._writer.folder).code(self.rank).write_text(communicating[-1])

    def print(self, text: str) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(text, flush=True)

    def verdict(self, **result: Any) -> None:
        """End a check: record its numbers, print one JSON line on rank 0, leave with status 1 if a rank is not ok."""
        if "ok" not in result:
            raise ValueError(f"a verdict needs ok=True or ok=False, got {sorted(result)}")
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, bool(result["ok"]))
        result["ok"] = all(everyone)
        for name, value in result.items():
            if isinstance(value, int | float):
                self.scalar(name, value)
        self.print(json.dumps(result))
        if not result["ok"]:
            sys.exit(1)


@contextlib.contextmanager
def session() -> Iterator[Here]:
    """Join the process group that torchrun's environment describes (one rank without it); always leave it.

    NCCL where every rank has a GPU of its own, else gloo on CPU. LABKIT_DEVICE, which ``labkit.run(device=...)`` sets,
    can ask for ``cpu`` or ``cuda``.

    Raises:
        ParameterError: ``cuda`` is asked for and there are fewer GPUs than ranks.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, note = choose_device()
    cores = available_cores()
    if device.type == "cpu":
        stay_on_own_cores(cores)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder = os.environ.get("LABKIT_RUN_FOLDER")
    writer = Writer(Path(folder) if folder else None, rank)
    with threads_that_wait_their_turn(device):
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    try:
        here = Here(rank, world_size, device, note, writer)
        if folder and rank == 0:
            (Path(folder) / "session.json").write_text(json.dumps(describe(here, len(cores))))
        yield here
        if not folder and rank == 0:
            print(table_of(writer), end="", flush=True)
    finally:
        writer.close()
        dist.destroy_process_group()


def choose_device() -> tuple[torch.device, str]:
    """This rank's device, and a note where GPUs were there but not used."""
    wish = os.environ.get("LABKIT_DEVICE", "auto")
    ranks, index = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cuda" and gpus < ranks:
        raise ParameterError(
            f"device cuda needs a GPU a rank: {gpus} GPUs for {ranks} ranks; use device='auto' or 'cpu'"
        )
    if wish != "cpu" and gpus >= ranks:
        return torch.device("cuda", index), ""
    return torch.device("cpu"), f"{gpus} GPU for {ranks} ranks: ran on CPU" if gpus and wish != "cpu" else ""


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def stay_on_own_cores(cores: list[int]) -> None:
    """Keep this rank's threads, and those of gloo, on its share of the cores, where there is a core for each rank.

    Otherwise the scheduler puts one rank's communication on another's core, where it waits for that one's arithmetic.
    """
    ranks, index = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ["LOCAL_RANK"])
    share = len(cores) // ranks
    if share and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[index * share : (index + 1) * share])


@contextlib.contextmanager
def threads_that_wait_their_turn(device: torch.device) -> Iterator[None]:
    """Make process groups in here, on CPU: gloo's threads will run while the rank waits, not interrupt its arithmetic.

    A gloo thread that wakes for a message polls the lock of the connection (``Pair::handleEvents`` in pytorch/gloo). If
    it takes the core just while the rank holds that lock, to post a message of its own, it polls until its time slice
    ends, some 5 ms later: measured, four ranks on two cores took 1.5 to 2.3 times as long. A thread inherits its
    starter's policy, and under Linux's SCHED_BATCH one that wakes does not interrupt another.
    """
    if device.type != "cpu" or not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):  # as in some containers; then it is only slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, policy, param)


def describe(here: Here, cores: int) -> dict[str, Any]:
    """What a reader of this run must know of the machine; rank 0 leaves it in session.json."""
    name = torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else "CPU"
    return {
        "device": here.device.type,
        "device_name": name,
        "backend": dist.get_backend(),
        "world_size": here.world_size,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "note": here.note,
    }


def table_of(writer: Writer) -> str:
    """This rank's records as text: spans averaged over timed steps in ms, memory in MB, communication in one step."""
    rows: list[str] = []
    durations: dict[str, list[float]] = {}
    for line in writer.lines:
        if line["kind"] == "span" and "/" not in line["name"]:  # a bar of a time line has one
            durations.setdefault(line["name"], []).append(line["dur_us"] / 1000)
    for name, values in durations.items():
        rows.append(f"{name:<18} {sum(values) / len(values):10.1f} ms    mean of {len(values)} steps")
    for line in writer.lines:
        if line["kind"] == "scalar" and line["unit"] == "ms":
            rows.append(f"{line['name']:<22} {line['value']:6.1f} ms    in the profiled step")
        if line["kind"] == "memory":
            rows.append(f"{line['name']:<18} {line['bytes'] / 1e6:10.1f} MB")
        elif line["kind"] == "comm":
            rows.append(f"{line['name']:<18} {line['bytes'] / 1e6:10.3f} MB    in {line['count']} calls a step")
    return "".join(f"{row}\n" for row in [f"rank {writer.rank}", *rows]) if rows else ""


def start(main: Callable[[ConfigType], None], config_class: type[ConfigType]) -> None:
    """Run a rank program's ``main`` with the Config read from its command line and checked for this number of ranks.

    A refused value ends all ranks with status 2 and one line from rank 0, before any communication.
    """
    config = configs.parse_argv(config_class)
    try:
        configs.validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ParameterError as error:
        refuse(str(error))
    main(config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can crash while the interpreter is taken down around them; nothing is left to do


def refuse(reason: str) -> None:
    """Leave with status 2. Rank 0 says why; the others wait, since torchrun stops all with the first."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(reason, file=sys.stderr, flush=True)
    else:
        time.sleep(2)
    sys.exit(2)
