"""Inside a rank: join the process group, choose the device, measure, and leave cleanly.

    with rank.session() as here:
        mesh = here.mesh(space=here.world_size)
        for step in here.steps(20, track=[model, optimizer]):
            with step.span("forward"):
                ...

Such a program runs under labkit.run, and its records go into the run's folder. Under bare torchrun,
or alone as one rank, rank 0 prints a table for each rank at the end.
"""

import contextlib
import json
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from labkit import config as configs
from labkit import requirements, torch_private
from labkit.compile_cache import PARTIAL_LIBRARY_FIX, PARTIAL_LIBRARY_WORDS
from labkit.environment import (
    ENV_DEVICE,
    ENV_LOCAL_HOST,
    ENV_SHARE_GPUS,
    ENV_TOTAL_CORES,
    read_choice,
)
from labkit.errors import ParameterError
from labkit.runs.folder import RunFolder, rank_of_process, write_json, write_text
from labkit.runs.records import RecordWriter, collective_label
from labkit.session import emulated_wire, payload
from labkit.session.emulated_device import EmulatedDevice
from labkit.session.memory_cap import cap_memory
from labkit.session.meter import Meter, Step
from labkit.session.process_exit import exit_process, print_error_and_status
from labkit.theory.sizes import readable_bytes

ConfigType = TypeVar("ConfigType")
# Session.steps or Session.plain_steps
StepLoop = Callable[..., Iterator[Step]]
SHARE_CHOICES = ("0 (a GPU for each rank, or the CPU)", "1 (ranks share the GPUs)")
SHARED_GPU_NOTE = "shared GPU: mechanism, not speed"
# A module that runs rank programs, such as the simulator, sets another before the program starts.
meter_class: type[Meter] = Meter
# Keeps every process group, the meshes' too, until the process ends. A DDP model that outlives
# destroy_process_group would be the last owner. Its Reducer's destructor then joins gloo's threads
# while it holds Python's global lock, for which one of these may be waiting: the rank never ends
# (seen in 14 of 60 runs). pytorch/pytorch#56297, #75097 and #154976 are the same kind of deadlock.
_process_groups_to_keep_alive: list[dist.ProcessGroup] = []


class Session:
    """This rank, while its session lasts."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        writer: RecordWriter,
        emulated: EmulatedDevice | None = None,
        cores: Collection[int] = (),
    ):
        self._emulated = emulated
        self.rank, self.world_size, self.device = rank, world_size, device
        self._writer, self._meter = writer, meter_class(writer, device, emulated, cores)
        self.tensors_have_values = self._meter.tensors_have_values
        # Measured training steps, and those of a check.
        self.steps, self.plain_steps = self._meter.steps, self._meter.plain_steps

    def mesh(self, **axes: int) -> DeviceMesh:
        """Return a device mesh over all ranks, with these named axes: ``mesh(data=2, space=2)``."""
        size = math.prod(axes.values())
        if size != self.world_size:
            shape = " x ".join(map(str, axes.values()))
            raise ValueError(f"mesh {shape} = {size} does not cover {self.world_size} ranks")
        with batch_schedule_new_threads(self.device):
            sizes, names = tuple(axes.values()), tuple(axes)
            return device_mesh.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    @property
    def is_emulated(self) -> bool:
        """Whether this rank waits as long as emulated links and devices would take."""
        return self._emulated is not None

    def emulate_units(self, units: Iterable[nn.Module], share: float = 1.0) -> None:
        """Let these modules take the time of emulated units, where the run emulates hardware.

        Before they are wrapped: a unit's time lies between the gathering of its parameters and
        their release. ``share`` is the part of a unit's arithmetic that this rank does.
        """
        if self._emulated:
            self._emulated.add_units(units, share)

    def emulate_memory(self, *tensors: torch.Tensor) -> None:
        """Wait for as long as an emulated device reads or writes these tensors."""
        if self._emulated:
            self._emulated.move(sum(each.nbytes for each in tensors))

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Let emulated hardware take no time inside the block, for a step that nobody times."""
        if not self._emulated:
            yield
            return
        self._emulated.wire.waits = False
        try:
            yield
        finally:
            self._emulated.wire.waits = True

    def cap_memory(self, mib: int | None) -> contextlib.AbstractContextManager[None]:
        """Let this rank allocate at most ``mib`` MiB more than now, see memory_cap.cap_memory."""
        return cap_memory(mib, self.device)

    def record_scalar(self, name: str, value: torch.Tensor | float, unit: str = "") -> None:
        """Record one number for the whole run, unless it is in a tensor that has no values."""
        self._meter.write_scalar(name, -1, value, unit)

    def record_bucket(self, index: int, gradients: Mapping[str, int]) -> None:
        """Record one bucket: the gradient bytes of each parameter, in their order in it."""
        for parameter, size in gradients.items():
            self._writer.write("bucket", parameter, -1, index=index, bytes=size)

    def save_artifact(self, name: str, text: str) -> None:
        """Save a text in the run's folder, if there is one, for ``result.ranks[0].artifact(name)``;
        raise ParameterError if the name has characters other than letters, digits, - and _.
        """
        path = RunFolder(self._writer.folder or Path()).artifact(self.rank, name)
        if self._writer.folder:
            write_text(path, text)

    def print_on_rank_0(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def finish_check(self, **result: Any) -> None:
        """End a check: record its verdict, print it as JSON, and exit if any rank is not ok.

        ``compared`` is the number of values that were compared; 0 is not ok.
        """
        if missing := sorted({"ok", "compared"} - result.keys()):
            text = " and ".join(missing)
            raise ValueError(f"a verdict needs ok= and compared=, and {text} is missing")
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, bool(result["ok"]) and result["compared"] > 0)
        result["ok"] = all(everyone)
        for name, value in result.items():
            if isinstance(value, int | float):
                self.record_scalar(name, value)
        if self._writer.folder and self.rank == 0:
            write_json(RunFolder(self._writer.folder).verdict_json, result)
        self.print_on_rank_0(json.dumps(result))
        if not result["ok"]:
            # A rank that left earlier would have torchrun end rank 0 before it has printed.
            dist.barrier()
            # Under labkit.run a difference is a result of the run and not a failure.
            sys.exit(0 if self._writer.folder else 1)


@contextlib.contextmanager
def session() -> Iterator[Session]:
    """Join the process group that torchrun's environment describes, or make one of a single rank.

    The backend is NCCL if every rank has a GPU of its own, and gloo on the CPU otherwise.
    """
    # Without a barrier, a rank that leaves soon after joining could break connections that others
    # are still making: "Connection closed by peer" (pytorch/pytorch#53270).
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCH_DIST_INIT_BARRIER": "1"}
    defaults |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(defaults | os.environ)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, note, joining = agree_with_other_hosts(*choose_device())
    cores = requirements.usable_cores()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif meter_class.pins_cores:
        pin_to_own_cores(cores)
    separate_compiled_code(rank)
    folder = payload.current_run_folder()
    writer = RecordWriter(folder.path if folder else None, rank)
    hardware = payload.load_emulated()
    emulated = EmulatedDevice(emulated_wire.use_wire(hardware)) if hardware else None
    with batch_schedule_new_threads(device):
        backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        if emulated:
            backend = emulated_wire.BACKEND
        dist.init_process_group(backend, device_id=own, **joining)
    failed = True
    try:
        here = Session(rank, world_size, device, writer, emulated, cores)
        if folder and rank == rank_of_process(0):
            kind, name = here._meter.device_kind_and_name()
            machine: dict[str, Any] = {"device": kind, "device_name": name, "note": note}
            machine |= {"backend": dist.get_backend(), "torch": torch_private.TORCH_VERSION}
            machine |= {"cores": int(os.environ.get(ENV_TOTAL_CORES, len(cores)))}
            machine |= {"threads": torch.get_num_threads(), "world_size": world_size}
            machine |= {"tf32_convolutions": torch.backends.cudnn.allow_tf32}
            machine |= {"tf32_matmuls": torch.backends.cuda.matmul.allow_tf32}
            if device.type == "cuda":
                machine |= {"cuda": torch.version.cuda, "driver": requirements.driver_version()}
                machine |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
            write_json(folder.session_json, machine)
        yield here
        if not folder:
            tables: list[Any] = [None] * world_size
            dist.all_gather_object(tables, records_text(writer))
            if any(tables):
                here.print_on_rank_0("\n".join(filter(None, tables)).rstrip("\n"))
        failed = False
    finally:
        writer.close()
        _process_groups_to_keep_alive.extend(torch_private.world.pg_map)
        # With NCCL this waits until all ranks call it (pytorch/pytorch#119250): a rank that fails
        # among others must end at once, or its error would never be told.
        if not failed or world_size == 1:
            dist.destroy_process_group()


def separate_compiled_code(rank: int) -> None:
    """Let this rank reuse only code that it compiled itself.

    torch's caches know a DTensor by its global shape, and a graph as it is before gathers are
    joined. So ranks whose rows differ took each other's code, and waited for ever or read wrong
    rows (pytorch/pytorch#188390, #188332).
    """
    torch.compiler.config.cache_key_tag += f" rank {rank}"


def choose_device() -> tuple[torch.device, str]:
    """Return this rank's device, and a note if GPUs are there but not used; raise ParameterError
    if ``labkit.run(device="cuda")`` asks for more GPUs than there are.
    """
    wish, share = os.environ.get(ENV_DEVICE, "auto"), read_choice(ENV_SHARE_GPUS, *SHARE_CHOICES)
    # Where ranks compute on the CPU, the driver is not even asked: a context takes seconds and
    # hundreds of MB of a GPU.
    if wish == "cpu":
        return torch.device("cpu"), ""
    ranks, index = local_world_size_and_rank()
    gpus, problem = requirements.usable_gpus()
    if gpus >= ranks:
        return torch.device("cuda", index), ""
    if gpus and share == "1":
        # NCCL refuses two ranks on a GPU of one host, and takes these for several hosts.
        os.environ["NCCL_HOSTID"] = f"labkit-{os.environ['RANK']}"
        return torch.device("cuda", index % gpus), SHARED_GPU_NOTE
    if wish == "cuda" and gpus < ranks:
        need = f"device cuda needs a GPU a rank: {gpus} GPUs for {ranks} ranks"
        fix = f"use device='auto' or 'cpu', or set {ENV_SHARE_GPUS}=1"
        raise ParameterError(f"{need}{problem and f' ({problem})'}; {fix}")
    note = f"{gpus} GPU for {ranks} ranks: ran on CPU" if gpus else problem
    return torch.device("cpu"), note


def agree_with_other_hosts(
    device: torch.device, note: str
) -> tuple[torch.device, str, dict[str, Any]]:
    """Return what all hosts can use, a note, and how to join: by the store that they agreed in.

    Without it, ranks of one host would join with NCCL, those of another with gloo, and all wait.
    """
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if hosts == 1:
        return device, note, {}
    store, rank, world_size = next(rendezvous("env://"))
    joining = {"store": store, "rank": rank, "world_size": world_size}
    keys = [f"labkit/device/{host}" for host in range(hosts)]
    if os.environ["LOCAL_RANK"] == "0":
        said = json.dumps([device.type, platform.node(), note])
        store.set(keys[int(os.environ["GROUP_RANK"])], said)
    found = [json.loads(each) for each in store.multi_get(keys)]
    if len({kind for kind, _, _ in found}) == 1:
        return device, note, joining
    without = [f"{name} ({why or 'no GPU'})" for kind, name, why in found if kind != "cuda"]
    return torch.device("cpu"), f"ran on CPU, as on {', '.join(without)}", joining


def local_world_size_and_rank() -> tuple[int, int]:
    """Return how many ranks run on this host, and this one's index among them.

    Hosts that were made on one machine share its devices, so they count as one.
    """
    if ENV_LOCAL_HOST in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ["LOCAL_RANK"])


def pin_to_own_cores(cores: list[int]) -> None:
    """Keep this rank's threads on its share of the cores, if there is a core for each rank."""
    # Otherwise the scheduler may put one rank's gloo threads on another's core, where they wait
    # for that rank's computation.
    ranks, index = local_world_size_and_rank()
    share = len(cores) // ranks
    if share and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[index * share : (index + 1) * share])


@contextlib.contextmanager
def batch_schedule_new_threads(device: torch.device) -> Iterator[None]:
    """Let the gloo threads that start inside the block not interrupt the rank's computation."""
    # A gloo thread that wakes for a message polls the lock of the connection (Pair::handleEvents
    # in pytorch/gloo). If it takes the core while the rank holds that lock to post a message, it
    # polls until its time slice ends, some 5 ms later: measured, four ranks on two cores took 1.5
    # to 2.3 times as long. A thread inherits its creator's policy, and under Linux's SCHED_BATCH a
    # thread that wakes does not interrupt another.
    if device.type != "cpu" or not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    # Some containers forbid this; the ranks are then only slower.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, policy, param)


def records_text(writer: RecordWriter) -> str:
    """Return this rank's records as a table: median spans, memory, and one step's communication."""
    spans, rows = defaultdict(list), []
    for line in writer.lines:
        if line["kind"] == "span":
            spans[line["name"]].append(line["dur_us"] / 1000)
    for name, took_ms in spans.items():
        rows.append(f"{name:<18} {median(took_ms):10.1f} ms    median of {len(took_ms)} steps")
    for line in writer.lines:
        match line:
            case {"kind": "scalar", "unit": "ms", "name": name, "value": value}:
                rows.append(f"{name:<22} {value:6.1f} ms    in the profiled step")
            case {"kind": "memory", "name": name, "bytes": size}:
                rows.append(f"{name:<18} {readable_bytes(size):>13}")
            case {"kind": "comm", "name": name, "axis": axis, "count": count, "bytes": size}:
                label, size = collective_label(axis, name), readable_bytes(size)
                rows.append(f"{label:<18} {size:>13}    in {count} calls a step")
    return "\n".join([f"rank {writer.rank}", *rows, ""]) if rows else ""


def run_main(main: Callable[[ConfigType], None], config_class: type[ConfigType]) -> None:
    """Run a rank program's ``main`` with its Config, checked for this number of ranks."""
    try:
        config = payload.load_config(config_class)
        configs.validate(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ParameterError as error:
        exit_with_reason(str(error))
    if getattr(config, "check", "none") != "none":
        # TF32 keeps 10 bits of a float32: two devices would differ by more than a check allows.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        main(config)
        payload.check_replacements_called()
    except BaseException as error:
        if payload.current_run_folder():
            # labkit's worker runs this program; it reports the error and leaves.
            raise
        if any(words in str(error) for words in PARTIAL_LIBRARY_WORDS):
            error.add_note(PARTIAL_LIBRARY_FIX)
        exit_process(print_error_and_status(error))
    exit_process(0)


def exit_with_reason(reason: str) -> NoReturn:
    """Exit with status 2, for a reason that rank 0 prints."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(reason, file=sys.stderr, flush=True)
    else:
        # torchrun stops all ranks as soon as one ends.
        time.sleep(2)
    sys.exit(2)
