"""Let a simulated program that was written for GPUs run with all its tensors on the CPU.

The program's tensors are placed on the CPU, and its questions to ``torch.cuda`` and
``torch.accelerator`` get the answers of the simulated cluster:

- a host has a GPU per rank, with bfloat16. Many programs take another path without GPUs, and that
  would be another run. torch itself gets the true answer, because it would use the GPUs;
- memory is what the simulation holds;
- a time is ``nan``, which passes through arithmetic and shows in what the program prints;
- other questions, such as the size of a GPU's memory, are errors that name the line.

Where CPU and GPU paths differ, the simulation takes the CPU's: autocast keeps other operations in
float32, and host memory is counted with the rest.
"""

import contextlib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.errors import ParameterError
from labkit.torch_private import DEVICE_FUNCTIONS, DEVICE_QUESTIONS, replace, wrap
from labkit_simulate.patch_training import drop_arguments

A100_CAPABILITY = (8, 0)  # the first with bfloat16
# Words of torch's errors for a missing GPU.
NO_GPU_ERROR_TEXTS = (
    "not compiled with CUDA",
    "Cannot access accelerator",
    "NVIDIA driver",
    "_cuda_",
    "No CUDA GPUs",
)


class MemoryCounter(Protocol):
    """Current and peak bytes of a simulation."""

    most: int

    @property
    def current_bytes(self) -> int: ...


@contextlib.contextmanager
def simulate_gpus(memory: MemoryCounter) -> Iterator[None]:
    """Answer the program's questions about GPUs; torch stays patched until the process ends."""
    patch_devices()
    answers = CudaAnswers(memory)
    for module, names in DEVICE_FUNCTIONS.items():
        for name in names:
            if hasattr(getattr(torch, module), name):  # torch 2.11 lacks one
                replace(f"{module}.{name}", getattr(answers, name, do_nothing))
    facts = {
        "is_available": True,
        "device_count": gpus_on_this_host(),
        "current_accelerator": torch.device("cuda"),
    }
    for question in DEVICE_QUESTIONS:
        answer = facts[question.partition(".")[2]]
        wrap(question, functools.partial(answer_programs_only, answer=answer))
    wrap("is_nccl_available", functools.partial(answer_programs_only, answer=True))
    with CPUPlacementMode():
        yield


def do_nothing(*unused: Any, **others: Any) -> None:
    """Replace a function of torch.cuda that has no effect on a simulation."""


def gpus_on_this_host() -> int:
    """Return the number of GPUs of a host, one per rank."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def answer_programs_only(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """Wrap a function: torch itself gets its result, all other callers get this answer."""

    @functools.wraps(function)
    def call_or_answer(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return function(*args, **kwargs) if caller.partition(".")[0] == "torch" else answer

    return call_or_answer


class PlaceholderEvent(torch.cpu.Event):
    """A CUDA event without a time."""

    def __init__(self, *unused: Any, **others: Any):
        super().__init__()

    def elapsed_time(self, end: Any) -> float:
        """Return nan: a simulation has no clock."""
        return math.nan


class PlaceholderStream(torch.cpu.Stream):
    """A CUDA stream; a simulation does everything in program order."""

    def __init__(self, *unused: Any, **others: Any):
        super().__init__()

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or PlaceholderEvent()


class CudaAnswers:
    """The replacements of functions of ``torch.cuda`` and ``torch.accelerator``, by name."""

    Event, Stream = PlaceholderEvent, PlaceholderStream

    def __init__(self, memory: MemoryCounter):
        self._memory, self._index = memory, 0

    def set_device(self, device: Any) -> None:
        self._index = gpu_index(device, self._index)

    set_device_index = set_device

    def current_device(self) -> int:
        return self._index

    current_device_index = current_device

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._index = self._index, gpu_index(device, self._index)
        yield
        self._index = before

    device_index = device

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def current_stream(self, device: Any = None) -> PlaceholderStream:
        return PlaceholderStream()

    default_stream = current_stream

    def memory_allocated(self, device: Any = None) -> int:
        return self._memory.current_bytes

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._memory.most

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._memory.most = self._memory.current_bytes

    reset_max_memory_allocated = reset_peak_memory_stats

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return "simulated"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return A100_CAPABILITY


def gpu_index(device: Any, current: int) -> int:
    """Return the index of the GPU that a program means; raise ParameterError if there is none."""
    named = torch.device(device) if isinstance(device, str) else device
    index = named.index if isinstance(named, torch.device) else named
    if index is None:
        return current
    last = gpus_on_this_host() - 1
    if index > last:
        raise ParameterError(
            f"cuda:{index} is not there: a host has {last + 1} GPUs, cuda:0 to cuda:{last}; "
            "take the variable LOCAL_RANK for a device, or simulate with more ranks_per_host"
        )
    return int(index)


def is_gpu(device: Any) -> bool:
    """Tell whether an argument means a GPU; raise ParameterError if the host lacks it."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return False
    gpu_index(device, 0)
    return True


def cpu_for_gpu(device: Any) -> Any:
    """Return the CPU for a GPU, and any other value unchanged."""
    return torch.device("cpu") if is_gpu(device) else device


def cpu_for_gpu_or_index(place: Any) -> Any:
    """Return the CPU for a GPU or the bare index of one."""
    if isinstance(place, int) and not isinstance(place, bool):
        gpu_index(place, 0)
        return torch.device("cpu")
    return cpu_for_gpu(place)


class CPUPlacementMode(TorchFunctionMode):
    """Place every tensor that is made or moved on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.record_stream:
            return None
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            cpu_for_gpu_or_index(kwargs.get("device", args[1] if args[1:] else 0))
            return args[0].to("cpu")
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = cpu_for_gpu_or_index(kwargs["device"])
        if func is Tensor.to:
            args = (args[0], *map(cpu_for_gpu_or_index, args[1:]))
        return func(*args, **kwargs)


def patch_devices() -> None:
    """Let torch's own classes take the CPU for a GPU, for the rest of this process."""
    wrap("parse_to", wrap_parse_to)  # of model.to(...)
    device_arguments = {
        "amp:autocast": "device_type",
        "amp:GradScaler": "device",
        # Used by `with torch.device(...)` and by set_default_device.
        "DeviceContext": "device",
        "DeviceMesh": "device_type",
    }
    for kind, name in device_arguments.items():
        wrap(f"{kind}.__init__", functools.partial(wrap_init_for_cpu, name=name))
    # It refuses a list of GPUs for a model on the CPU.
    wrap(
        "DistributedDataParallel.__init__",
        lambda init: drop_arguments(init, "device_ids", "output_device"),
    )


def wrap_parse_to(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the parser of the arguments of ``to``."""

    def parse_for_cpu(*args: Any, **kwargs: Any) -> Any:
        on_cpu = {name: cpu_for_gpu_or_index(value) for name, value in kwargs.items()}
        return parse(*map(cpu_for_gpu_or_index, args), **on_cpu)

    return parse_for_cpu


def wrap_init_for_cpu(init: Callable[..., None], name: str) -> Callable[..., None]:
    """Wrap an initialiser whose argument of this name is a device or a kind of device."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_for_cpu(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if is_gpu(given.arguments[name]):
            given.arguments[name] = "cpu"
            if given.arguments.get("dtype", "") is None:
                # On GPUs autocast defaults to float16; on CPUs to bfloat16.
                given.arguments["dtype"] = torch.float16
        init(*given.args, **given.kwargs)

    return init_for_cpu
