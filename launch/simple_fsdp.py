"""Train a model whose parameters the compiler gathers: SimpleFSDP.

    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --compile
    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --bucketing passes --bucket-mb 1
    torchrun --standalone --nproc-per-node 2 -m launch.simple_fsdp --check parity

``fsdp_wrap`` gathers a unit's parameters in a hook. Here reading a parameter gathers it, so a
compiled step holds every collective as an operator, which a pass over the graph may join with
others and start earlier. The compiler keeps gathered parameters for the backward pass, so a step
gathers each one once.
"""

import contextlib
import itertools
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from labkit import parity, rank, requirements, torch_private
from labkit.config import PositiveFloat, PositiveInt
from labkit.models import catalog
from labkit.models.chain import LinearChain
from labkit.models.protocol import LabModel
from labkit.parallel import graph_passes
from labkit.parallel.checkpointing import find_blocks
from labkit.parallel.ddp import capture_generated_code
from labkit.parallel.simple_fsdp import apply_simple_fsdp
from labkit.parity.fsdp import StepOutcome, compare_fsdp_training, forward_backward
from labkit.session import timeline
from labkit.session.emulated_wire import release_last_message
from labkit.session.meter import Step
from labkit.session.payload import load_emulated
from labkit.theory.emulated import Emulated
from labkit.torch_private import TorchDispatchMode

# More would reach the compiler's limit for one model.
MAX_SIZES = 7


@dataclass
class Config:
    """Which model, what the compiler does, and what is measured."""

    model: catalog.ModelName | Literal["chain"] = "mlp_stack"
    """The model to train; hf_bert and hf_t5 need transformers. Not moe."""
    compile: bool = False
    """Compile the model, gathers included, into one graph."""
    bucketing: Literal["none", "passes", "inductor"] = "none"
    """Who changes the compiled graphs: nobody, labkit's passes (or change_graph of use=), which
    join gathers and start them early, or inductor's own pass, which is experimental.
    """
    bucket_mb: PositiveFloat | None = None
    """A bucket of gathers closes once it holds this many MiB; by default none are joined."""
    sizes_mb: tuple[PositiveFloat, ...] = ()
    """Run every forward pass once with each of these sizes of buckets, in turn, and time it."""
    dim: PositiveInt | None = None
    """Width of chain, mlp_stack, double_linear, unused_linear and skip."""
    layers: PositiveInt | None = None
    """Layers of chain, hf_bert and hf_t5, blocks of mlp_stack."""
    batch: PositiveInt | None = None
    """Samples per rank and step, if the model lets you choose."""
    steps: PositiveInt = 5
    """Timed steps, after one to warm up, or to compile; with a check, compared."""
    timeline: bool = False
    """Record one more step with torch.profiler."""
    check: Literal["none", "parity"] = "none"
    """parity: compare every step with one device instead of measuring."""

    def validate(self, world_size: int) -> None:
        if self.model != "chain":
            catalog.check_model(self.model, sizes=self.model_sizes())
        if self.model == "moe":
            fix = "use another model, or the program fsdp_wrap"
            raise ValueError(f"model moe has parameters that differ from rank to rank: {fix}")
        if self.bucketing != "none" and not self.compile:
            raise ValueError(f"bucketing {self.bucketing} changes compiled graphs: use compile")
        if (self.bucket_mb or self.sizes_mb) and self.bucketing == "none":
            raise ValueError("buckets are made by bucketing passes or inductor: choose one")
        torch_version = requirements.torch_version()
        if self.bucketing == "inductor" and torch_version < (2, 12):
            raise ValueError("bucketing inductor needs torch 2.12: use bucketing passes")
        if self.bucketing == "inductor" and self.bucket_mb and torch_version < (2, 13):
            raise ValueError("bucket_mb with bucketing inductor needs torch 2.13: leave it out")
        if self.sizes_mb and (self.check != "none" or self.bucket_mb or self.timeline):
            fix = "use check none, no bucket_mb and no timeline"
            raise ValueError(f"sizes_mb compares times of several sizes: {fix}")
        if len(self.sizes_mb) > MAX_SIZES:
            raise ValueError(f"{len(self.sizes_mb)} sizes_mb, at most {MAX_SIZES}: make two runs")
        if self.compile:
            requirements.refuse_without_compiler()

    def model_sizes(self) -> dict[str, int]:
        """Return the sizes that were asked for; the model knows the others."""
        asked = {name: getattr(self, name) for name in ("dim", "layers", "batch")}
        return {name: size for name, size in asked.items() if size is not None}


@rank.replaceable
def simple_fsdp(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model in place, so that reading a parameter gathers it."""
    apply_simple_fsdp(model, mesh)


@rank.replaceable
def change_graph(graph: Graph, bucket_bytes: int) -> None:
    """Join the gathers of a graph into buckets, start each early, and wait late for gradients."""
    graph_passes.join_gathers(graph, bucket_bytes)
    graph_passes.raise_inputs(graph)
    graph_passes.start_early(graph)
    graph_passes.wait_late(graph)


def main(config: Config) -> None:
    """Train and measure, or compare every step with one device's."""
    with rank.session() as here:
        if config.sizes_mb:
            time_sizes(config, here)
            return
        lab = shard_and_compile(config, here, config.bucket_mb)
        if config.compile:
            record_peak(here, lab)
        if config.check == "none":
            optimizer = torch.optim.Adam(lab.parameters(), lr=1e-3)
            # Compiling has left gradients, from which Adam makes its state: no timed step pays.
            optimizer.step()
            # A memory tracker cannot look into compiled code.
            track: list[Any] = [] if config.compile else [lab, optimizer]
            # A mark on a layer of a compiled graph would compile it again, in the profiled step.
            eager = not config.compile
            units = {name: [unit] * eager for name, unit in lab.named_children() if config.timeline}
            # Compiling has run a step.
            warmup = int(eager)
            measured = here.steps(config.steps, warmup=warmup, track=track, units=units)
            train(here, lab, optimizer, measured, keep=False)
        else:
            here.finish_check(**check_parity(config, here, lab))


def shard_and_compile(config: Config, here: rank.Session, bucket_mb: float | None) -> LabModel:
    """Return the model, sharded, and compiled if asked for, with its graphs changed."""
    lab = build_model(config, here.device)
    here.emulate_units(find_blocks(lab, lab.block_types))
    simple_fsdp(lab, here.mesh(data=here.world_size)["data"])
    if not config.compile:
        return lab
    # A check's one device is not compiled: dropout must draw the same numbers.
    options = {"fallback_random": config.check != "none"}
    lab.compile(fullgraph=True, dynamic=False, options=options)
    seen: list[list[str]] = []
    nodes: list[list[str]] = []

    def change(graph: Graph) -> None:
        graph_passes.raise_inputs(graph)
        if config.bucketing == "passes":
            change_graph(graph, round((bucket_mb or 0) * 2**20))
        elif config.bucketing == "inductor":
            inductor_pass(graph, bucket_mb, load_emulated())
        seen.append(graph_passes.list_events(graph))
        nodes.append(list_nodes(graph))

    changed = graph_passes.pass_over_graphs(change)
    with here.without_waiting(), changed, capture_generated_code() as programs:
        inputs = parity.draw_samples(lab, here.device, 0, here.rank)
        forward_backward(next(here.plain_steps(1)), lab, lab, inputs, keep=False)
    for name, found in {"graphs": seen, "nodes": nodes}.items():
        by_pass = dict(zip(("forward", "backward"), found, strict=True))
        here.save_artifact(name, json.dumps(by_pass))
    here.save_artifact("code", programs[0])
    return lab


def list_nodes(graph: Graph) -> list[str]:
    """Return a line for each operator of a graph, in order: "node = operator(nodes)"."""
    lines = []
    for node in (each for each in graph.nodes if each.op == "call_function"):
        # An operator is called "mm.default"; a Python function has no dots in its name.
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        inputs = ", ".join(each.name for each in node.all_input_nodes)
        lines.append(f"{node.name} = {name}({inputs})")
    return lines


class LetGlooFinish(TorchDispatchMode):
    """Lets each collective end before the rank goes on, so that no other thread frees its memory.

    torch's profiler would not know of it.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code stay compiled inside this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func is not graph_passes.WAIT:
            dist.barrier()
            release_last_message()
            wait_for_threads()
        return result


def wait_for_threads() -> None:
    """Wait until all other threads of this process sleep, or for 5 ms where nobody can tell."""
    own = str(threading.get_native_id())
    time.sleep(0.001 if Path("/proc/self/task").is_dir() else 0.005)
    for _ in range(1000):
        others = (each for each in Path("/proc/self/task").glob("*/stat") if own not in each.parts)
        # A thread that ended meanwhile has no state.
        with contextlib.suppress(OSError):
            if not any(each.read_text().rpartition(")")[2].split()[0] == "R" for each in others):
                return
        time.sleep(0.001)


def record_peak(here: rank.Session, lab: LabModel) -> None:
    """Record what one more step allocates at its peak, in bytes, beside what is there before it."""
    lab.zero_grad()
    inputs = parity.draw_samples(lab, here.device, 0, here.rank)

    def run() -> None:
        with here.without_waiting():
            forward_backward(next(here.plain_steps(1)), lab, lab, inputs, keep=False)

    peak = allocated_peak(run, here.device)
    here.record_scalar("step_peak_bytes", peak, "bytes")


def allocated_peak(run: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes that a function allocates at a time, compiled code included."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with timeline.silence_stderr():
        profiler.start()
    with LetGlooFinish():
        run()
    with timeline.silence_stderr():
        profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(changes, key=itemgetter(0))))


def time_sizes(config: Config, here: rank.Session) -> None:
    """Run the forward pass with each size of bucket, in spans like "0.5 MiB"."""
    nets = {f"{size:g} MiB": shard_and_compile(config, here, size) for size in config.sizes_mb}
    # Compiling has run each once.
    for index, step in enumerate(here.steps(config.steps, warmup=0)):
        if not step.timed:
            break  # other runs count what a step sends
        # In turn within each step, so that a disturbance hits all, and in alternating order.
        for name in list(nets)[:: -1 if index % 2 else 1]:
            lab = nets[name]
            with step.untimed():
                inputs = parity.draw_samples(lab, here.device, index, here.rank)
                dist.barrier()
            with step.span(name):
                lab.get_loss(inputs, lab(*inputs))


def inductor_pass(
    graph: Graph, bucket_mb: float | None = None, emulated: Emulated | None = None
) -> None:
    """Let inductor's own pass choose buckets and order, as its users switch it on (torch 2.13).

    It is experimental. ``bucket_mb`` closes the buckets that it makes first. On a CPU the emulated
    times take the place of its estimates.
    """
    options: dict[str, Any] = {"collective_bucketing": True, "insert_overlap_deps": True}
    if requirements.torch_version() >= (2, 13):
        options["pre_bucketing_fsdp_collectives"] = bucket_mb is not None
        options["pre_bucketing_fsdp_collectives_bucket_cap_mb"] = bucket_mb
    scheduling = torch_private.get("_inductor.fx_passes.overlap_scheduling")
    # It tells of each graph.
    logging.getLogger(f"{scheduling.__package__}.fsdp").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        options |= {"compute_estimator": "analytical", "enable_fusion_regions": False}
        options["custom_runtime_estimation"] = partial(estimate_ms, emulated or Emulated())
        # It asks for the speed of a GPU's memory even where it is given all times.
        torch_private.replace("estimate_roofline_runtime_ms", lambda node: 0.0)
    scheduling.schedule_overlap_bucketing(graph.owning_module, **options)


def estimate_ms(hardware: Emulated, node: Node, override_bytes: int | None = None) -> float:
    """Return the emulated milliseconds of a node."""
    name = str(node.target)
    if name.startswith("_c10d_functional") and node.target is not graph_passes.WAIT:
        collective = "all_gather" if "all_gather" in name else "reduce_scatter"
        handed = override_bytes or node.args[0].meta["val"].nbytes  # type: ignore[union-attr]
        return 1e3 * hardware.collective_s(collective, handed, dist.get_world_size())
    # See labkit.pause: a block has two of them, the second for its backward pass.
    if name == graph_passes.PAUSE:
        return hardware.unit_backward_ms if node.args[1] % 2 else hardware.forward_ms  # type: ignore[operator]
    return 0.0


def build_model(config: Config, device: torch.device, index: int = 0) -> LabModel:
    """Build the model, which is the same on every rank."""
    sizes: Mapping[str, Any] = config.model_sizes()
    if config.model == "chain":
        torch.manual_seed(0)
        return LinearChain(**sizes).to(device)
    return catalog.create_model(config.model, seed=0, **sizes).to(device)


def train(
    here: rank.Session, lab: LabModel, optimizer: Optimizer, measured: Iterable[Step], *, keep: bool
) -> list[StepOutcome]:
    """Run forward pass, backward pass and update in each step; ``keep`` their outputs."""
    outcomes: list[StepOutcome] = []
    for index, step in enumerate(measured):
        with step.untimed():
            inputs = parity.draw_samples(lab, here.device, index, here.rank)
        optimizer.zero_grad()
        outcome = forward_backward(step, lab, lab, inputs, keep=keep)
        with step.span("optimizer"):
            optimizer.step()
        step.record_scalar("loss", outcome.loss)
        outcomes.append(outcome)
    return outcomes


def check_parity(config: Config, here: rank.Session, lab: LabModel) -> dict[str, Any]:
    """Train, and return the verdict on every step beside one device's. A collective."""
    steps = here.plain_steps(config.steps)
    trained = train(here, lab, parity.make_sgd(lab), steps, keep=True)
    one_device = parity.OneDevice(partial(build_model, config, here.device), here.world_size)
    return compare_fsdp_training(one_device, lab, trained, rank=here.rank, steps=config.steps)


if __name__ == "__main__":
    rank.run_main(main, Config)
