"""Checks of lab 4c, the compiler sends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from labkit.parallel.graph_passes import GATHER, SCATTER, WAIT, find_gathers, list_events
from labkit.theory import fsdp as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import compiler_sends as ranks_sends
from labkit_course.checks.traffic import expect_traffic

# Numbers of ranks on which an answer has to be right.
SIZES = 2, 3
SIZES_TEXT = "2 and 3"
WAIT_HINT = "does every rank read the same parameters, in the same order?"
on_ranks = partial(judge_on_ranks, "compiler_sends", sizes=SIZES, waiting=WAIT_HINT, name_rank=True)
MEAN_HINT = 'to_local(grad_placements=[Partial("avg")]) tells DTensor what the gradient is.'
NAME_HINT = "A lambda in a loop sees the last name: lambda self, name=name: …"


@exercise
def gather(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: the whole parameter, whose gradient is reduce-scattered, on real ranks."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for place, shape in enumerate(ranks_sends.SHAPES):
            said = f"gather returned a {sent['kinds'][place]}"
            hint = "redistribute returns a DTensor; to_local makes a plain tensor of it."
            judge.expect(sent["kinds"][place] == "Tensor", said, "a plain tensor", hint)
            right = ranks_sends.whole_parameter(shape)
            said = f"the tensor that gather returned for {shape[0]} rows"
            mine = _rank_rows(right, ranks, index)
            hint = "Replicate() makes it whole on every rank."
            likely = {"has this rank's rows alone": mine}
            judge.expect_close(sent["wholes"][place], right, said, likely, "is wrong", hint=hint)
            own = [ranks_sends.rank_gradient(shape, rank) for rank in range(ranks)]
            _judge_rows(sent["gradients"][place], own, ranks, index, f"{shape[0]} rows")
        # Rows that can be shared evenly, so that no padding is sent.
        size = ranks_sends.whole_parameter(ranks_sends.SHAPES[0]).nbytes
        traffic = {
            "forward": {"all_gather": [1, size // ranks]},
            "backward": {"reduce_scatter": [1, size]},
        }
        for when, calls in traffic.items():
            said = f"all numbers are right, but the {when} pass sends"
            hint = "Let DTensor lead from the mean to rows: it needs one collective a pass."
            expect_traffic(sent[when][0], calls, said, hint)

    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, what="gather")
    return judge.passing_verdict(f"the whole and its gradient are right on {SIZES_TEXT} ranks")


def _rank_rows(whole: Tensor, ranks: int, index: int) -> Tensor:
    chunks = whole.chunk(ranks)
    return chunks[index] if index < len(chunks) else whole[:0]


def _judge_rows(got: Tensor | None, own: list[Tensor], ranks: int, index: int, name: str) -> None:
    """Expect this rank's rows of the mean of the ranks' ``own`` gradients."""
    rows = partial(_rank_rows, ranks=ranks, index=index)
    said = f"the gradient of {name}"
    judge.expect(got is not None, f"{said} is missing", "rows of the mean", MEAN_HINT)
    mean = torch.stack(own).mean(0)
    likely = {
        "is the sum over the ranks": (rows(ranks * mean), 'Partial("avg") is the mean.'),
        "is this rank's own": (rows(own[index]), MEAN_HINT),
        "is the whole one": (mean, "Only this rank's rows of it are needed."),
    }
    judge.expect_close(got, rows(mean), said, likely, "is wrong", "rows of the mean", MEAN_HINT)


@exercise
def simple_fsdp(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: shard a model's parameters, and gather them where they are read."""

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        said = "nn.Linear itself has a property weight now, and so has every layer of this process"
        hint = "Make a class for the module: module.__class__ = type(…)."
        judge.expect(not sent["shared"], said, hint=hint)
        model = ranks_sends.make_model()
        named = dict(model.named_parameters())
        said, hint = f"the model's parameters are {', '.join(sent['after'])}", "Keep the names."
        judge.expect(sent["after"] == list(named), said, ", ".join(named), hint)
        said = f"{', '.join(sent['whole'])} are whole on every rank"
        hint = "Register nn.Parameter(rows) under the old name, for every module."
        judge.expect(not sent["whole"], said, "DTensors", hint)
        held = sent["held"]
        right_held = sum(each.numel() for each in named.values()) // ranks
        hint = "distribute_tensor(whole, mesh, [Shard(0)]) keeps this rank's rows."
        judge.expect(held == right_held, f"the rank holds {held} numbers", right_held, hint)
        output = model(ranks_sends.rank_batch(index))
        hint = "Reading module.weight must return gather(module._parameters['weight'])."
        said = "the output of the forward pass is"
        judge.expect_close(sent["output"], output, said, {}, "another", "one device's", hint)
        own = [_model_gradients(rank) for rank in range(ranks)]
        for name in named:
            each = [gradients[name] for gradients in own]
            _judge_rows(sent["gradients"][name], each, ranks, index, name)
        size = sum(each.nbytes for each in named.values())
        right = {
            "all_gather": [len(named), size // ranks],
            "reduce_scatter": [len(named), size],
        }
        said = "all numbers are right, but both passes send"
        hint = "Each parameter is gathered once, where it is read."
        expect_traffic(sent["sent"], right, said, hint)

    hints = {
        "mixed torch.Tensor and DTensor": "A parameter is read as its rows: give the module a class"
        " whose properties gather.",
        "must be a matrix, got 1-D": NAME_HINT,
        "shapes cannot be multiplied": NAME_HINT,
        "a leaf Variable": "Detach the old parameter before you distribute it.",
        "is not a leaf": "Detach the old parameter before you distribute it.",
        "dictionary changed size": "Collect the parameters in a list before you change any.",
        "dictionary keys changed": "Collect the parameters in a list before you change any.",
    }
    on_ranks(answer, judge=judge_rank, timeout_s=timeout_s, hints=hints, what="model")
    return judge.passing_verdict(f"{SIZES_TEXT} ranks train as one device, each with its rows")


def _model_gradients(rank: int) -> dict[str, Tensor]:
    model = ranks_sends.make_model()
    model(ranks_sends.rank_batch(rank)).square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@exercise
def start_early(answer: Callable[[Graph], Any]) -> Verdict:
    """Exercise 3: each gather starts before the wait of the one before it, in graphs of 1 to 5."""
    for count in (1, 2, 3, 5):
        graph = gathers_graph(count)
        asked = f"start_early(a graph of {count} gathers)"
        events = _events_after(answer, graph, asked=asked, mover="prepend")
        said = f"{asked} gave {', '.join(events)}"
        right = ["gather", *["gather", "wait", "compute"] * (count - 1), "wait", "compute"]
        plain = ["gather", "wait", "compute"] * count
        hint = "wait.prepend(gather) moves a gather to the place before a wait."
        if events == plain:
            hint = (
                "Nothing moved. Each gather but the first goes before the wait of its predecessor."
            )
        elif events[:count] == ["gather"] * count and count > 2:
            hint = "All whole parameters would be in memory at once: one gather ahead is enough."
        judge.expect(events == right, said, ", ".join(right), hint)
        names = [gather.name for gather in find_gathers(graph)]
        in_order = [gather.name for gather in find_gathers(gathers_graph(count))]
        judge.expect(names == in_order, f"{asked} changed the order of the gathers")
        with judge.expect_no_error(f"{asked} uses a result before it is there"):
            graph.lint()
    return judge.passing_verdict("in graphs of 1 to 5 gathers each starts one wait earlier")


def _events_after(
    answer: Callable[..., Any], graph: Graph, *arguments: int, asked: str, mover: str
) -> list[str]:
    """Let an answer change a graph, expect that it only moves nodes, and return the new order."""
    before = sorted(node.name for node in graph.nodes)
    judge.call_answer(answer, graph, *arguments, in_words=asked)
    after = sorted(node.name for node in graph.nodes)
    hint = f"Move nodes with {mover}; make none, and erase none."
    judge.expect(after == before, f"{asked} changed which nodes there are", hint=hint)
    return list_events(graph)


def gathers_graph(count: int) -> Graph:
    """Return a graph of so many layers, each with a gather, its wait and a product."""
    graph = Graph()
    x, *rows = [graph.placeholder(name) for name in ("x", *(f"rows{k}" for k in range(count)))]
    for each in rows:
        each.meta["val"] = torch.empty(3, 6, device="meta")
        gathered = graph.call_function(GATHER, (each, 2, "0"))
        whole = graph.call_function(WAIT, (gathered,))
        x = graph.call_function(torch.ops.aten.mm.default, (x, whole))
    graph.output(x)
    return graph


@exercise
def cut(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: whole parameters from the flat row of all ranks, in graphs for 2 and 3 ranks."""
    for ranks in SIZES:
        for shapes in ([(2, 3), (4,)], [(1, 2, 2), (3,), (2, 5)], [(4, 1)]):
            asked = f"cut(…, ranks={ranks}, shapes={shapes})"
            sizes = [torch.Size(shape) for shape in shapes]
            graph = Graph()
            whole = graph.placeholder("whole")
            made = judge.call_answer(
                answer, graph.call_function, whole, ranks, sizes, in_words=asked
            )
            is_list = isinstance(made, list | tuple) and all(isinstance(m, Node) for m in made)
            hint = "Return a list with a node for each parameter."
            said = f"{asked} gave {judge.value_text(made)}"
            judge.expect(is_list, said, "a list of nodes", hint)
            judge.expect(
                len(made) == len(shapes), f"{asked} gave {len(made)} nodes", len(shapes), hint
            )
            graph.output(tuple(made))
            parts = [
                [100.0 * rank + 10 * place + torch.rand(size) for place, size in enumerate(sizes)]
                for rank in range(ranks)
            ]
            arrived = torch.cat([part.flatten() for row in parts for part in row])
            try:
                found = GraphModule(nn.Module(), graph)(arrived)
            except Exception as error:
                said = f"{asked} made a graph that fails: {judge.error_text(error)}"
                hint = "Of shapes (2, 3) and (4,) a rank's line has 10 columns: 6, then 4."
                raise judge.WrongAnswer(said, hint=hint) from error
            for place in range(len(sizes)):
                right = torch.cat([row[place] for row in parts])
                _judge_piece(found[place], right, arrived, parts, place, f"{asked}: tensor {place}")
    return judge.passing_verdict("every parameter is whole again, of 2 and of 3 ranks")


def _judge_piece(
    got: Any, right: Tensor, arrived: Tensor, parts: list[list[Tensor]], place: int, said: str
) -> None:
    judge.expect(isinstance(got, Tensor), f"{said} is a {type(got).__name__}", "a tensor")
    hint = "The rows of all ranks stand one below the other: [ranks * shape[0], *shape[1:]]."
    judge.expect(
        got.shape == right.shape, f"{said} has shape {(*got.shape,)}", (*right.shape,), hint
    )
    start = sum(part.numel() for part in parts[0][:place])
    start *= len(parts)
    piece = arrived[start : start + right.numel()].view(right.shape)
    table = "Make a table with a line for each rank first, and cut its columns."
    likely = {"is cut from the flat row, without regard to ranks": (piece, table)}
    judge.expect_close(got, right, said, likely, "has other numbers", hint=table)


@exercise
def forward_ms(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: the end of the forward pass, from (takes, computes)."""
    early = "The first two gathers are asked for at 0: the second travels behind the first."
    late = "Gather i is asked for when the arithmetic of bucket i - 2 has ended."
    wire = "One wire: a gather starts when the one before it has arrived."
    both = "Arithmetic begins when its gather has arrived and the arithmetic before it has ended."
    cases: list[tuple[list[float], list[float], str]] = [
        ([5], [7], "One bucket: its gather, then its arithmetic."),
        ([5, 5], [7, 7], early),
        ([5, 20], [7, 7], both),
        ([2, 2, 2], [10, 10, 10], both),
        ([10, 10, 10], [2, 2, 2], wire),
        ([1, 1, 30, 1], [10, 1, 1, 1], late),
        ([4, 1, 9, 3, 8], [3, 12, 2, 0, 5], late),
    ]
    return judge.judge_cases(answer, theory.prefetched_forward, cases)


@exercise
def wait_behind(answer: Callable[[Graph, int], Any]) -> Verdict:
    """Exercise 6: each wait for a reduce-scatter stands behind one that starts some later."""
    for count, behind in ((4, 2), (3, 1), (2, 5), (1, 1)):
        graph = scatters_graph(count)
        asked = f"wait_behind(a graph of {count} reduce-scatters, {behind})"
        events = _events_after(answer, graph, behind, asked=asked, mover="append")
        right = []
        for place in range(count):
            ending = min(behind + 1, count) if place == count - 1 else int(place >= behind)
            right += ["compute", "scatter", *["wait"] * ending]
        hint = "scatters[place + behind].append(wait), or behind the last where there is none."
        if events == ["compute", "scatter", "wait"] * count:
            hint = "Nothing moved: take the wait from the users of the reduce-scatter."
        elif events[-count:] == ["wait"] * count and behind < count - 1:
            hint = "All gradients would be in memory at once: some can be waited for earlier."
        judge.expect(events == right, f"{asked} gave {', '.join(events)}", ", ".join(right), hint)
        nodes = list(graph.nodes)
        waits = [node for node in nodes if node.target is WAIT][: count - behind - 1]
        in_order = [node.name for node in scatters_graph(count).nodes if node.target is WAIT]
        names = [node.name for node in waits]
        hint = "The wait that stands behind a reduce-scatter is that of an earlier one."
        judge.expect(
            names == in_order[: len(names)], f"{asked} moved other waits: {names}", hint=hint
        )
        with judge.expect_no_error(f"{asked} uses a result before it is there"):
            graph.lint()
    return judge.passing_verdict(
        "in graphs of 1 to 4 reduce-scatters each wait stands where it should"
    )


def scatters_graph(count: int) -> Graph:
    """Return a graph of so many layers, each with a product, its reduce-scatter and the wait."""
    graph = Graph()
    x = graph.placeholder("x")
    rows = []
    for _ in range(count):
        x = graph.call_function(torch.ops.aten.mm.default, (x, x))
        rows.append(graph.call_function(WAIT, (graph.call_function(SCATTER, (x, "avg", 2, "0")),)))
    graph.output(tuple(rows))
    return graph
