"""Change what a compiled graph sends: join its gathers, start them early, wait late.

A graph of torch.fx is a list of nodes in the order in which they run. A node has a ``target``, the
operator that it calls, and ``args``, in which other nodes stand for their results. Of SimpleFSDP it
has, for each parameter,

    gather = all_gather_into_tensor(rows, ranks, group)     starts, and returns at once
    whole = wait_tensor(gather)                             returns when the rows are there

in front of the product that needs it. Each function below changes a graph in place.
"""

import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from labkit import torch_private
from labkit.parallel.buckets import assign_buckets

RESHAPE, CAT = torch.ops.aten.reshape.default, torch.ops.aten.cat.default
SPLIT = torch.ops.aten.split_with_sizes.default
GATHER, SCATTER, WAIT = (
    torch_private.get(f"_c10d_functional.{name}.default")
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
)
WORDS = {"all_gather": "gather", "reduce_scatter": "scatter", "wait_tensor": "wait"}
PAUSE = "labkit.pause.default"


@contextlib.contextmanager
def pass_over_graphs(change: Callable[[Graph], Any]) -> Iterator[None]:
    """Let a function change each graph that inductor compiles inside the block."""
    # Last of all inductor saves memory: it starts a gather where it is needed, and not earlier.
    config = torch_private.get("_inductor:config")
    with config.patch(post_grad_custom_post_pass=change, reorder_for_peak_memory=False):
        yield


def find_gathers(graph: Graph) -> list[Node]:
    """Return the gathers of a graph in the order in which they start."""
    return [node for node in graph.nodes if node.target is GATHER]


def gathered_bytes(gather: Node) -> int:
    """Return the bytes of the whole tensor that a gather makes."""
    arguments: Any = gather.args
    return int(arguments[0].meta["val"].nbytes * arguments[1])


def list_events(graph: Graph) -> list[str]:
    """Return what a graph does, in order: gather, scatter, wait, and compute for the arithmetic of
    an emulated unit, or else for a matrix product.
    """
    names = [str(node.target) for node in graph.nodes if node.op != "placeholder"]
    # inductor's pass wraps operators that shall stay in their places.
    pause = re.compile(rf"{re.escape(PAUSE)}|subgraph_pause(_\d+)?")
    names = [PAUSE if pause.fullmatch(name) else name for name in names]
    words = WORDS | {PAUSE if PAUSE in names else "mm": "compute"}
    found = (next((words[part] for part in words if part in name), "") for name in names)
    return [word for word in found if word]


def raise_inputs(graph: Graph) -> None:
    """Put what the gathers start from, such as a joined row, at the head of the graph."""
    heads = [node for node in graph.nodes if node.op == "placeholder"]
    needed: set[Node] = set()
    waiting = [gather.args[0] for gather in find_gathers(graph)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node.op != "placeholder" and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in [node for node in graph.nodes if node in needed]:
        heads[-1].append(node)
        heads.append(node)


def join_gathers(graph: Graph, bucket_bytes: int) -> None:
    """Replace the gathers of each bucket by one; a bucket closes once it holds so many bytes."""
    gathers = find_gathers(graph)
    for bucket in assign_buckets([*map(gathered_bytes, gathers)], bucket_bytes):
        if len(bucket) > 1:
            join(graph, [gathers[place] for place in bucket])


def join(graph: Graph, gathers: Sequence[Node]) -> None:
    """Replace these gathers and their waits by one gather, where the first one stands."""
    parts: list[Any] = [gather.args[0] for gather in gathers]
    _, ranks, group = gathers[0].args
    with graph.inserting_before(gathers[0]):
        call = graph.call_function
        flat = [call(RESHAPE, (part, [-1])) for part in parts]
        whole = call(WAIT, (call(GATHER, (call(CAT, (flat,)), ranks, group)),))
        tensors = cut(call, whole, ranks, [part.meta["val"].shape for part in parts])
    for gather, tensor in zip(gathers, tensors, strict=True):
        (wait,) = gather.users
        wait.replace_all_uses_with(tensor)
        graph.erase_node(wait)
        graph.erase_node(gather)


def cut(
    call: Callable[..., Node], whole: Node, ranks: Any, shapes: Sequence[torch.Size]
) -> list[Node]:
    """Return nodes of the whole parameters, of which ``shapes`` are a rank's rows."""
    # A line for each rank, which holds that rank's part of every parameter.
    table = call(RESHAPE, (whole, [ranks, -1]))
    counts = [shape.numel() for shape in shapes]
    pieces = call(SPLIT, (table, counts, 1))
    tensors = []
    for place, (rows, *others) in enumerate(shapes):
        piece = call(operator.getitem, (pieces, place))
        tensors.append(call(RESHAPE, (piece, [rows * ranks, *others])))
    return tensors


def start_early(graph: Graph) -> None:
    """Start each gather before the graph waits for the one before it; first ``raise_inputs``."""
    for earlier, gather in itertools.pairwise(find_gathers(graph)):
        (wait,) = earlier.users
        wait.prepend(gather)


def wait_late(graph: Graph) -> None:
    """Wait for the reduce-scatters at the end, where only the optimizer needs their results."""
    *_, output = graph.nodes
    for node in list(graph.nodes):
        if node.target is WAIT and node.args[0].target is SCATTER and set(node.users) == {output}:
            output.prepend(node)
