"""GPUs for a simulated program that was written for them: there are none, and its tensors stay on
the CPU.

A program names GPUs where it makes and moves tensors, and asks ``torch.cuda`` and
``torch.accelerator`` this and that. Here every tensor that it wants on a GPU is on the CPU, like
all simulated ones. The questions are answered as on the cluster that is simulated, as far as a
simulation knows the answer:

- a host has GPUs, one for each of its ranks, and they can do bfloat16. Most programs take another
  way without a GPU, or leave; to simulate that way would be to simulate another run. torch itself
  is told the truth, since it would use them;
- what is held is what the simulation holds;
- a time is ``nan``: it goes through a program's arithmetic, and shows in what that prints;
- other questions, such as the size of a GPU's memory, are errors that name the line.

Where a CPU takes another way than a GPU, the simulation takes the CPU's: autocast has another list
of operations that stay in float32, and what a program keeps in host memory is counted with the
rest.
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

BFLOAT16_CAPABILITY = (8, 0)
"""The compute capability that is given: of an A100."""
NO_GPU_ERROR_TEXTS = (
    "not compiled with CUDA",
    "Cannot access accelerator",
    "NVIDIA driver",
    "_cuda_",
    "No CUDA GPUs",
)
"""Words of the errors with which torch says that there is no GPU."""


class MemoryCounter(Protocol):
    """What knows how many bytes are held, and how many were at most."""

    most: int

    @property
    def current_bytes(self) -> int: ...


@contextlib.contextmanager
def simulate_gpus(memory: MemoryCounter) -> Iterator[None]:
    """In here, a program may use GPUs; torch stays as it is made here for the rest of this
    process.
    """
    patch_devices()
    answers = CudaAnswers(memory)
    for module, names in DEVICE_FUNCTIONS.items():
        for name in names:
            if hasattr(getattr(torch, module), name):  # torch 2.11 lacks one
                replace(f"{module}.{name}", getattr(answers, name, do_nothing))
    told = {
        "is_available": True,
        "device_count": gpus_on_this_host(),
        "current_accelerator": torch.device("cuda"),
    }
    for question in DEVICE_QUESTIONS:
        wrap(
            question,
            functools.partial(answer_programs_only, answer=told[question.partition(".")[2]]),
        )
    wrap("is_nccl_available", functools.partial(answer_programs_only, answer=True))
    with CPUPlacementMode():
        yield


def do_nothing(*unused: Any, **others: Any) -> None:
    """In place of a function of torch.cuda that a simulation has nothing to do for."""


def gpus_on_this_host() -> int:
    """One for each of its ranks."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def answer_programs_only(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """The same function for torch itself; all others get this answer."""

    @functools.wraps(function)
    def call_or_answer(*args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return function(*args, **kwargs) if asks.partition(".")[0] == "torch" else answer

    return call_or_answer


class PlaceholderEvent(torch.cpu.Event):
    """A moment that nobody has measured; takes the arguments of torch.cuda's."""

    def __init__(self, *unused: Any, **others: Any):
        super().__init__()

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to another moment: nobody knows."""
        return math.nan


class PlaceholderStream(torch.cpu.Stream):
    """Work in its order, which is all the order there is; takes the arguments of torch.cuda's."""

    def __init__(self, *unused: Any, **others: Any):
        super().__init__()

    def synchronize(self) -> None:
        """All work is done."""

    def record_event(self, event: Any = None) -> Any:
        """The moment at which the work so far is done."""
        return event or PlaceholderEvent()


class CudaAnswers:
    """Functions of ``torch.cuda`` and ``torch.accelerator``, by their names."""

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
        return BFLOAT16_CAPABILITY


def gpu_index(device: Any, current: int) -> int:
    """Which of the host's GPUs a program means.

    Raises:
        ParameterError: the host has none of this index.
    """
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
    """Whether a program means a GPU by it; one of its own host."""
    named = (
        torch.device(device)
        if isinstance(device, str) and device.partition(":")[0] == "cuda"
        else device
    )
    found = isinstance(named, torch.device) and named.type == "cuda"
    if found:
        gpu_index(named, 0)
    return found


def cpu_for_gpu(device: Any) -> Any:
    """The CPU in place of a GPU; all else as it is."""
    return torch.device("cpu") if is_gpu(device) else device


def cpu_for_gpu_or_index(place: Any) -> Any:
    """The same of an argument that may be the bare number of a GPU."""
    if isinstance(place, int) and not isinstance(place, bool):
        gpu_index(place, 0)
        return torch.device("cpu")
    return cpu_for_gpu(place)


class CPUPlacementMode(TorchFunctionMode):
    """Every tensor that is made or moved in here is on the CPU."""

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
    """Let torch take the CPU where a program names a GPU, and no tensor does; for the rest of this
    process.
    """
    wrap("parse_to", wrap_parse_to)  # of model.to(...)
    made_for = {
        "amp:autocast": "device_type",
        "amp:GradScaler": "device",
        # Used by `with torch.device(...)` and by set_default_device.
        "DeviceContext": "device",
        "DeviceMesh": "device_type",
    }
    for kind, name in made_for.items():
        wrap(f"{kind}.__init__", functools.partial(wrap_init_for_cpu, name=name))
    # it refuses a list of GPUs for a model that is on none
    wrap(
        "DistributedDataParallel.__init__",
        lambda init: drop_arguments(init, "device_ids", "output_device"),
    )


def wrap_parse_to(parse: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which reads the arguments of ``to``."""

    def parse_for_cpu(*args: Any, **kwargs: Any) -> Any:
        return parse(
            *map(cpu_for_gpu_or_index, args),
            **{name: cpu_for_gpu_or_index(value) for name, value in kwargs.items()},
        )

    return parse_for_cpu


def wrap_init_for_cpu(init: Callable[..., None], name: str) -> Callable[..., None]:
    """The same initialiser, whose argument of this name says for which kind of device."""
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
