"""The program of lab 7's mystery runs: four real ranks train, one fault is hidden in it.

``draw_fault`` chooses the fault by a seed. While it runs, every rank writes down what each tool
would have seen, in a folder from which ``labkit_course.checks.mystery`` reads it.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import rank

RANKS, STEPS, BATCH, WIDTH, LAYERS, RATE = 4, 8, 8, 12, 3, 0.02
# A rank that has made no step for so long is taken to hang. A step takes some hundredths of it;
# with 1.2 s a slow run on a crowded machine was once taken to hang.
QUIET_S, TICK_S = 3.0, 0.05
COMPUTE_S, SLOW_S = 0.004, 0.06
# A sender and a receiver of each pair; ranks 0 and 1, 2 and 3 swap a boundary in each step.
PAIRS = ((0, 1), (2, 3))
# All neighbours in the ring, in an order in which no two ranks wait for each other.
LINKS = (*PAIRS, (1, 2), (3, 0))
# Faults of the whole program, which no rank is to blame for.
ALL_RANKS = ("same samples", "wrong scale")
CAUSES = {
    "left out": "the rank leaves out a collective",
    "other order": "the rank reduces two gradients in another order",
    "other shape": "the rank reduces another shape or dtype",
    "fewer batches": "the rank has fewer batches than the others",
    "deadlock": "the rank breaks the rule that even ranks send first",
    "killed": "the rank was killed from outside",
    "out of memory": "the rank ran out of memory",
    "straggler": "the rank computes more slowly than the others",
    "slow link": "the link from the rank to its partner is slow",
    "nan": "the first NaN was born on the rank",
    "other weights": "the rank started from other weights",
    "same samples": "all ranks read the same samples; rank=None",
    "wrong scale": "gradients are summed, not averaged; rank=None",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a run: one of CAUSES, on a rank or on all (None), from a step on."""

    cause: str
    rank: int | None
    step: int
    layer: int

    def lines(self) -> tuple[str, ...]:
        """Return the lines of evidence, each a tool and a row, that no other cause would leave."""
        place = self.step * LAYERS + LAYERS - 1 - self.layer
        own = f"rank {self.rank}"
        # Where the labels part, a call that is left out looks like one that is swapped; the next
        # one tells. There is none if the rank waits in a swap that the others have not reached.
        record = {
            "left out": (f"record: call {place + (self.layer > 0)}",),
            "other shape": (f"record: call {place}",),
            "other order": (f"record: call {self.step * LAYERS + 1}",),
        }
        everyone = range(RANKS)
        lines = {
            **record,
            "fewer batches": (f"stacks: {own}", f"logs: {own}"),
            "killed": (f"ends: {own}",),
            "out of memory": (f"ends: {own}",),
            "straggler": (f"times: {own}",),
            "nan": (f"losses: step {self.step}",),
            "other weights": (f"weights: {own}",),
            "same samples": (
                *(f"samples: rank {each}" for each in everyone),
                *(f"losses: step {each}" for each in range(STEPS)),
            ),
            "wrong scale": tuple(f"gradients: rank {each}" for each in everyone),
        }
        if self.rank is not None:
            other = self.rank ^ 1
            # Its partner stands where it also waits in a healthy run.
            lines["deadlock"] = (f"stacks: {own}",)
            lines["slow link"] = (f"links: rank {self.rank} → {other}",)
        return lines[self.cause]


def draw_fault(seed: int) -> Fault:
    """Return the fault of a seed, always the same."""
    draw = random.Random(f"mystery {seed}")
    cause, index = draw.choice(list(CAUSES)), draw.randrange(RANKS)
    step, layer = draw.randrange(1, STEPS - 2), draw.randrange(LAYERS)
    return Fault(cause, None if cause in ALL_RANKS else index, step, layer)


@dataclass
class Config:
    """Which fault, of a seed or, if a cause is named, a known one, and where the ranks write."""

    seed: int = 0
    folder: str = ""
    cause: str = ""
    rank: int = 0
    step: int = 3
    layer: int = LAYERS - 1

    def fault(self) -> Fault:
        """Return the fault of this run."""
        if self.cause:
            index = None if self.cause in ALL_RANKS else self.rank
            return Fault(self.cause, index, self.step, self.layer)
        return draw_fault(self.seed)


@dataclass
class Evidence:
    """What this rank writes down, and how often it moved on."""

    folder: Path
    index: int
    moves: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def write(self, kind: str, text: str) -> None:
        """Append a line to this rank's file of a kind; it survives an abort of the process."""
        with open(self.folder / f"{kind}_{self.index}.txt", "a") as file:
            file.write(text + "\n")

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block, in ms, to a part of the step."""
        start = time.perf_counter()
        yield
        self.times.setdefault(part, []).append((time.perf_counter() - start) * 1e3)

    def finish(self) -> None:
        """Write what was found; the rename is atomic, so a file under its name is complete."""
        path = self.folder / f"found_{self.index}.part"
        path.write_text(json.dumps(self.found))
        path.rename(path.with_suffix(".json"))

    def end_when_quiet(self) -> None:
        """Watch this rank from a thread. If nothing moves, write the stack and end the process."""
        seen, ticks = self.moves, 0
        # Ticks instead of a clock, because a busy machine delays this thread as well.
        while ticks < QUIET_S / TICK_S:
            time.sleep(TICK_S)
            seen, ticks = self.moves, ticks + 1 if seen == self.moves else 0
        main_thread = sys._current_frames()[threading.main_thread().ident or 0]
        # The name of each call, the innermost last, without those of the program's start.
        calls = [frame.name for frame in traceback.extract_stack(main_thread)]
        calls = calls[calls.index("train") :] if "train" in calls else calls
        self.write("stack", "\n".join(name for name in calls if "wrapper" not in name))
        # All ranks write theirs before the first of them leaves.
        time.sleep(0.5)
        os._exit(0)


def main(config: Config) -> None:
    """Train on this rank with the fault of the seed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    index, fault = dist.get_rank(), config.fault()
    seen = Evidence(Path(config.folder), index)
    dist.barrier()
    threading.Thread(target=seen.end_when_quiet, daemon=True).start()
    Trainer(index, fault, seen, config.seed).train()
    # The watch would otherwise outlive the process group.
    sys.stdout.flush()
    os._exit(0)


class Trainer:
    """One rank of data-parallel training, whose pairs of ranks swap a boundary in each step."""

    def __init__(self, index: int, fault: Fault, seen: Evidence, seed: int) -> None:
        self.index, self.fault, self.seen = index, fault, seen
        torch.manual_seed(int(self.has("other weights")))
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        # Each mystery has data of its own, or its loss, beside another's, would tell a fault.
        draw = torch.Generator().manual_seed(7 + seed)
        self.inputs = torch.randn(RANKS * STEPS * BATCH, WIDTH, generator=draw)
        self.order = torch.randperm(len(self.inputs), generator=draw)

    def has(self, cause: str, step: int | None = None) -> bool:
        """Tell whether this rank has the fault, in this step if one is given."""
        hit = self.fault.cause == cause and self.fault.rank in (None, self.index)
        return hit and step in (None, self.fault.step)

    def train(self) -> None:
        """Train for an epoch, and write down what was seen."""
        losses: list[float] = []
        self.seen.found |= {"losses": losses, "start": self.weights()}
        batches = self.fault.step if self.has("fewer batches") else STEPS
        for step in range(batches):
            start = time.perf_counter()
            inputs = self.load_batch(step)
            with self.seen.timed("swap ms"):
                self.swap_boundary(step)
            with self.seen.timed("compute ms"):
                losses.append(self.compute_gradients(inputs, step))
            self.seen.write("log", f"step {step}: loss {losses[-1]:.3f}")
            with self.seen.timed("reduce ms"):
                self.average_gradients(step)
            if step == 0:
                self.seen.found["gradient"] = self.compare_gradient()
            with torch.no_grad():
                for parameter, gradient in zip(
                    self.model.parameters(), gradients_of(self.model), strict=True
                ):
                    parameter.sub_(RATE * gradient)
            self.seen.times.setdefault("step ms", []).append((time.perf_counter() - start) * 1e3)
            self.seen.moves += 1
        self.seen.write("log", f"epoch over: {batches} batches")
        # Of the fastest step, because other programs on this machine only make steps slower.
        times = {part: min(each) for part, each in self.seen.times.items()}
        self.seen.found |= {"times": times, "end": self.weights()}
        if self.fault.cause not in ("fewer batches", "left out"):
            self.probe_links()
        self.seen.finish()
        self.wait_for_all()

    def load_batch(self, step: int) -> Tensor:
        """Return this rank's samples of a step: every fourth of the shuffled ones."""
        mine = 0 if self.has("same samples") else self.index
        indices = self.order[mine::RANKS][step * BATCH : (step + 1) * BATCH]
        self.seen.found.setdefault("samples", indices.tolist())
        inputs = self.inputs[indices].clone()
        if self.has("nan", step):
            inputs[0, 0] = float("nan")
        if self.has("killed", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.has("out of memory", step):
            # Raised by hand, since a real shortage would hit the learner's machine.
            raise MemoryError("tried to allocate 6.00 GiB, and 1.25 GiB are free")
        return inputs

    def swap_boundary(self, step: int) -> None:
        """Exchange a boundary with the other rank of the pair: the even rank sends first."""
        sends_first = self.index % 2 == 0
        if self.has("deadlock", step):
            sends_first = not sends_first
        other, mine = self.index ^ 1, torch.ones(4, dtype=torch.float64)
        for sends in (sends_first, not sends_first):
            if sends:
                dist.send(mine, other)
            else:
                self.receive(other)

    def receive(self, source: int) -> Tensor:
        """Receive four float64 from another rank, as late as the link is slow."""
        received = torch.empty(4, dtype=torch.float64)
        dist.recv(received, source)
        if self.fault.cause == "slow link" and self.fault.rank == source == self.index ^ 1:
            time.sleep(SLOW_S)
        return received

    def compute_gradients(self, inputs: Tensor, step: int) -> float:
        """Run forward and backward, and return the loss."""
        time.sleep(SLOW_S if self.has("straggler") else COMPUTE_S)
        self.model.zero_grad()
        loss = loss_of(self.model, inputs)
        loss.backward()
        return loss.item()

    def average_gradients(self, step: int) -> None:
        """Average each layer's gradient over the ranks, the last layer first."""
        layers = list(reversed(range(LAYERS)))
        gradients = gradients_of(self.model)
        if self.has("other order", step):
            layers[:2] = layers[1], layers[0]
        for layer in layers:
            gradient = gradients[layer]
            if self.has("left out", step) and layer == self.fault.layer:
                continue
            if self.has("other shape", step) and layer == self.fault.layer:
                gradient = gradient.double() if self.fault.layer % 2 else gradient[1:].contiguous()
            self.reduce(gradient, f"{step}.{layer}")
            if self.fault.cause != "wrong scale":
                gradient /= RANKS

    def reduce(self, gradient: Tensor, name: str) -> None:
        """All-reduce a tensor, and record the call before and after."""
        kind = str(gradient.dtype).removeprefix("torch.")
        self.seen.write("record", f"{name} {(*gradient.shape,)} {kind}")
        dist.all_reduce(gradient)
        self.seen.write("record", "done")

    def compare_gradient(self) -> list[float]:
        """Compare with one device that sees the samples of all ranks: factor, and what is left."""
        alone = nn.Sequential(*[type(part)(*size_of(part)) for part in self.model])
        alone.load_state_dict(self.model.state_dict())
        loss_of(alone, self.inputs[self.order[: RANKS * BATCH]]).backward()
        mine, right = (
            torch.cat([gradient.flatten() for gradient in gradients_of(model)])
            for model in (self.model, alone)
        )
        factor = (mine @ right / right.square().sum()).item()
        return [factor, ((mine - factor * right).norm() / right.norm()).item()]

    def weights(self) -> list[float]:
        """Return all weights as one list."""
        return torch.cat([each.detach().flatten() for each in self.model.parameters()]).tolist()

    def probe_links(self) -> None:
        """Time a message over each link in each direction, one way: all ranks read one clock."""
        self.seen.found["links"] = {}
        for pair in LINKS:
            for source, target in (pair, pair[::-1]):
                times = []
                for _ in range(3):
                    # The target asks first, so that no message waits for it; the question may take
                    # long, too, and is not timed, because the answer carries when it left.
                    if self.index == target:
                        dist.send(torch.ones(4, dtype=torch.float64), source)
                        left_s = self.receive(source)[0].item()
                        times.append((time.perf_counter() - left_s) * 1e3)
                    elif self.index == source:
                        self.receive(target)
                        left = torch.full((4,), time.perf_counter(), dtype=torch.float64)
                        dist.send(left, target)
                if times:
                    self.seen.found["links"][f"{source} → {target}"] = min(times)

    def wait_for_all(self) -> None:
        """Wait until each rank has written what it found; the watch ends a wait that is vain."""
        everyone = [self.seen.folder / f"found_{each}.json" for each in range(RANKS)]
        while not all(path.exists() for path in everyone):
            time.sleep(0.005)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters, first layer first."""
    return [each.grad for each in model.parameters() if each.grad is not None]


def size_of(part: nn.Module) -> tuple[Any, ...]:
    """Return the arguments that make such a part of the network."""
    return (WIDTH, WIDTH, False) if isinstance(part, nn.Linear) else ()


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean squared error; the network learns to give the inputs back."""
    return nn.functional.mse_loss(model(inputs), inputs)


if __name__ == "__main__":
    rank.run_main(main, Config)
