"""Lab 4c."""

import functools

import answers
from answers import Exercise
from labkit_course.checks import compiler_sends as checks

changed = functools.partial(answers.changed, "04c")
ASKED = "start_early(a graph of {} gathers)"
CUT = "cut(…, ranks=2, shapes=[(2, 3), (4,)])"
FORWARD = "forward_ms(takes={}, computes={}) gave"
BEHIND = "wait_behind(a graph of 4 reduce-scatters, 2)"

EXERCISES = [
    Exercise(
        "4c.1",
        "gather",
        checks.gather,
        {
            "on rank 0, the gradient of 6 rows is this rank's own": changed(
                "gather", ('grad_placements=[Partial("avg")]', "")
            ),
            "on rank 0, the gradient of 6 rows is the sum over the ranks": changed(
                "gather", ('Partial("avg")', "Partial()")
            ),
            "on rank 0, gather returned a DTensor": "return rows.redistribute(placements=[Replicate()])",
            "on rank 0, the tensor that gather returned for 6 rows has this rank's rows alone": (
                "return rows.to_local()"
            ),
            "on rank 0, the gradient of 6 rows is missing": changed(
                "gather", ("rows.redistribute", "rows.detach().redistribute")
            ),
            "on rank 0, all numbers are right, but the forward pass sends 2 all_gather calls": (
                "rows.full_tensor()\n" + changed("gather")
            ),
        },
    ),
    Exercise(
        "4c.2",
        "simple_fsdp",
        checks.simple_fsdp,
        {
            "A lambda in a loop sees the last name": changed(
                "simple_fsdp", ("lambda self, name=name: gather", "lambda self: gather")
            ),
            "A parameter is read as its rows": changed(
                "simple_fsdp",
                ("if properties:", "if False:"),
            ),
            "on rank 0, 0.weight, 0.bias, 2.weight, 2.bias are whole on every rank": "model.eval()",
            "on rank 0, the rank holds": changed("simple_fsdp", ("[Shard(0)]", "[Replicate()]")),
            "on rank 0, nn.Linear itself has a property weight now": changed(
                "simple_fsdp",
                (
                    'module.__class__ = type("Sharded", (type(module),), properties)',
                    "[setattr(nn.Linear, *each) for each in properties.items()]",
                ),
            ),
            "on rank 0, all numbers are right, but both passes send": changed(
                "simple_fsdp",
                ("gather(self._parameters[name]))", "[gather(self._parameters[name]) for _ in range(2)][0])"),
            ),
        },
    ),
    Exercise(
        "4c.3",
        "start_early",
        checks.start_early,
        {
            f"{ASKED.format(2)} gave gather, wait, compute, gather, wait, compute": "find_gathers(graph)",
            f"{ASKED.format(3)} gave gather, gather, gather, wait, compute, wait, compute, wait, compute": (
                "first, *others = find_gathers(graph)\nfor each in others[::-1]:\n    first.append(each)"
            ),
            f"{ASKED.format(2)} changed which nodes there are": (
                "for each in find_gathers(graph)[1:]:\n"
                "    with graph.inserting_before(find_gathers(graph)[0]):\n"
                "        graph.call_function(labkits.GATHER, each.args)"
            ),
        },
    ),
    Exercise(
        "4c.4",
        "cut",
        checks.cut,
        {
            f"{CUT} gave 1 nodes": changed("cut", ("enumerate(shapes)", "list(enumerate(shapes))[:1]")),
            f"{CUT}: tensor 0 has shape (2, 6)": changed("cut", ("[ranks * shape[0], *shape[1:]]", "[shape[0], -1]")),
            f"{CUT}: tensor 0 is cut from the flat row, without regard to ranks": (
                "sizes = [ranks * shape.numel() for shape in shapes]\n"
                "pieces = call(labkits.SPLIT, (whole, sizes, 0))\n"
                "parts = [call(operator.getitem, (pieces, place)) for place in range(len(shapes))]\n"
                "wholes = [[ranks * shape[0], *shape[1:]] for shape in shapes]\n"
                "return [call(labkits.RESHAPE, each) for each in zip(parts, wholes)]"
            ),
            f"{CUT} made a graph that fails: RuntimeError": changed(
                "cut", ("shape.numel() for", "ranks * shape.numel() for")
            ),
        },
    ),
    Exercise(
        "4c.5",
        "forward_ms",
        checks.forward_ms,
        {
            f"{FORWARD.format([5, 5], [7, 7])} 24": "return sum(takes) + sum(computes)",
            f"{FORWARD.format([5, 5], [7, 7])} 17.0": changed("forward_ms", ("max(ends[-1], arrived)", "arrived")),
            f"{FORWARD.format([1, 1, 30, 1], [10, 1, 1, 1])} 34": changed(
                "forward_ms", ("max(ends[-2], arrived)", "arrived")
            ),
        },
    ),
    Exercise(
        "4c.6",
        "wait_behind",
        checks.wait_behind,
        {
            f"{BEHIND} gave compute, scatter, wait, compute": "graph.lint()",
            f"{BEHIND} gave compute, scatter, compute, scatter, compute, scatter": "(labkits.wait_late)(graph)",
            f"{BEHIND} raised IndexError": changed(
                "wait_behind", ("min(place + behind, len(scatters) - 1)", "place + behind")
            ),
            f"{BEHIND} gave compute, scatter, compute, scatter, compute, wait": changed(
                "wait_behind", (".append(wait)", ".prepend(wait)")
            ),
            f"{BEHIND} changed which nodes there are": changed(
                "wait_behind",
                ("(wait,) = scatter.users", "(wait,) = scatter.users\n    graph.node_copy(wait)"),
            ),
        },
    ),
]
