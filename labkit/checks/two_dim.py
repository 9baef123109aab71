"""Checks of lab 5, tensor parallelism and two mesh axes."""

from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

import labkit
from labkit.checks.ask import Verdict, Wrong, call, check_values, exercise, name_of, passed, same, shown
from labkit.checks.on_ranks import on_ranks
from labkit.checks.ranks.two_dim import DATA, TP, build
from labkit.theory import two_dim as theory

RANKS = DATA * TP
WAITING = "is the plan the same on all of them?"
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
HINTS = {
    "tp/all_reduce": "forward, each pair sums its parts; backward, each sums the gradient of its input, but the first",
    "data/all_gather": "each MLP is a unit of FSDP: gathered for the forward pass, and again for the backward pass",
    "data/reduce_scatter": "each unit's gradients are reduced once",
}


@exercise
def parts(answer: Callable[..., list[Tensor]]) -> Verdict:
    """Exercise 1: what each rank contributes to a pair's result, from (x, first, second, ranks).

    ``first`` [inner, D] and ``second`` [D, inner] are the weights of two linear layers without bias, ReLU in between.
    """
    for ranks, inner in ((2, 8), (4, 8), (1, 6)):
        draw = torch.Generator().manual_seed(ranks)
        x, first, second = (torch.randn(shape, generator=draw) for shape in ((3, 5), (inner, 5), (5, inner)))
        shapes = f"with x {[*x.shape]} and first {[*first.shape]},"
        asked = f"{name_of(answer)}(x, first, second, ranks={ranks}), {shapes}"
        problem = _wrong_parts(call(answer, x, first, second, ranks, in_words=asked), x, first, second, ranks)
        if problem:
            raise Wrong(f"{asked} {problem}")
    return passed("each rank computes with its own features alone, and the parts add up to one device's result")


@exercise
def tp_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: bytes that a rank hands to all-reduces along tp in a training step, from (places, dim, mlps)."""
    once = "One all-reduce sums a tensor of places x dim numbers, 4 bytes each."
    backward = "Forward there is one all-reduce for each MLP; backward one for each but the first."
    return check_values(
        answer,
        lambda places, dim, mlps: theory.activations_sent([(dim, 4 * dim)] * mlps, places, 2)["tp/all_reduce_bytes"],
        [(1, 1, 1), (32, 8, 1), (32, 8, 3), (8, 16, 2)],
        [once, once, backward, backward],
    )


@exercise
def collectives(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 3: how often each collective runs along each axis, as a dict such as ``{"tp/all_reduce": 5}``.

    Args:
        answer: the learner's function.
        result: a run of two_dim, whose measured counts are the truth.

    Raises:
        ValueError: the run counted nothing by axis.
    """
    ending = "_count"
    measured = {
        name.removesuffix(ending): int(result.value(name))
        for name in result.summary()
        if "/" in name and name.endswith(ending)
    }
    if not measured:
        raise ValueError("this run counted no collective along an axis: take a run of two_dim that measures")
    said = call(answer)
    if not isinstance(said, Mapping):
        raise Wrong(f"{name_of(answer)}() gave {shown(said)}, not a dict such as {{'tp/all_reduce': 1}}")
    for name in [*said, *measured]:
        mine, counted = said.get(name, 0), measured.get(name, 0)
        if not isinstance(mine, Integral) or mine != counted:
            hint = f". Hint: {HINTS[name]}" if name in HINTS else ""
            raise Wrong(f"{name}: you say {shown(mine)}, the ranks counted {counted}{hint}")
    return passed(", ".join(f"{count} {name}" for name, count in sorted(measured.items())) + ", as counted")


@exercise
def gated_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 4: a plan for ``GatedMLP`` on 2 x 2 real ranks that needs one all-reduce a step along tp."""
    detail = "equal to one device on 2 x 2 ranks, every matrix shared out, one all-reduce along tp"
    return _judge_plan(answer, "gated", timeout_s, detail, most_sent=1)


@exercise
def stack_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 5: a plan for ``MLPStack`` on 2 x 2 real ranks, equal to one device in output and gradients."""
    detail = "equal to one device on 2 x 2 ranks, output and gradients, and every matrix shared out"
    return _judge_plan(answer, "stack", timeout_s, detail)


def _judge_plan(
    answer: Callable[[], Any], model: str, timeout_s: float, detail: str, most_sent: int | None = None
) -> Verdict:
    """Train with the plan on ranks and on one device, and hold one against the other, the output first."""
    reference = build(model)
    lines = [reference.get_input(torch.device("cpu"), seed) for seed in range(DATA)]
    outputs = [reference(*line) for line in lines]
    for line, output in zip(lines, outputs, strict=True):
        (reference.get_loss(line, output) / DATA).backward()
    expected = dict(reference.named_parameters())

    def judge(index: int, sent: dict[str, Any]) -> None:
        output, right = sent.get("output"), outputs[sent["data"]]
        if output is not None and output.shape != right.shape:
            raise Wrong(f"the output has shape {[*output.shape]}, on one device it is {[*right.shape]}")
        if output is not None and not same(output, right, **CLOSE):
            raise Wrong("the output is not one device's, and nothing has raised an error")
        if "error" in sent:
            raise Wrong(f"the model does not run with this plan: {sent['error']}")
        _refuse_gradients(sent["gradients"], {name: each.grad for name, each in expected.items()})
        matrices = [name for name, each in expected.items() if each.dim() > 1 and sent["held"][name] == each.numel()]
        if matrices:
            raise Wrong(f"every rank holds all of {', '.join(matrices)}: nothing is shared out there")
        if most_sent is not None and sum(sent["sent"].values()) > most_sent:
            seen = ", ".join(f"{count} {name}" for name, count in sorted(sent["sent"].items()))
            said = f"a step sends more than it needs to along tp: {seen}, where {most_sent} will do"
            raise Wrong(f"the result is right, but {said}")

    on_ranks("two_dim", answer, judge=judge, ranks=RANKS, timeout_s=timeout_s, waiting=WAITING, model=model)
    return passed(detail)


def _refuse_gradients(gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """Raise Wrong, naming the parameters, where gradients differ from one device's."""
    problems = {
        name: _described(gradients[name], right)
        for name, right in expected.items()
        if right is not None and not same(gradients[name], right, **CLOSE)
    }
    if problems:
        names = [*problems]
        which = ", ".join(names[:2]) + (f" and of {len(names) - 2} more" if len(names) > 2 else "")
        most = Counter(problems.values()).most_common(1)[0][0]
        cause = "a layout in the plan says something about a tensor that is not so"
        raise Wrong(f"the output is right, but the gradient of {which} {most}: {cause}")


def _described(got: Tensor | None, expected: Tensor) -> str:
    """What a wrong gradient looks like."""
    if got is None:
        return "is missing"
    ratio = (got * expected).sum() / (expected * expected).sum()
    multiple = same(got, ratio * expected, rtol=1e-3, atol=1e-6)
    return f"is {ratio:.3g} times one device's" if multiple else "is not one device's"


def _wrong_parts(found: Any, x: Tensor, first: Tensor, second: Tensor, ranks: int) -> str:
    """What is wrong with the parts of a pair's result; "" for nothing."""
    if not isinstance(found, list | tuple) or not all(isinstance(each, Tensor) for each in found):
        return f"gave {type(found).__name__}, not a list of tensors: does every path return?"
    if len(found) != ranks:
        return f"gave {len(found)} tensors: every rank has one"
    shapes = {tuple(each.shape) for each in found} - {tuple(x.shape)}
    if shapes:
        return f"gave a tensor of shape {list(shapes.pop())}: each rank's part is as large as the result, {[*x.shape]}"
    whole = relu(x @ first.T) @ second.T
    right = [relu(x @ a.T) @ b.T for a, b in zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)]
    if not same(sum(found, torch.zeros_like(whole)), whole, atol=1e-4):
        return "gave parts whose sum is not the result: first is cut by rows of its weight, second by columns"
    if not all(same(a, b, atol=1e-4) for a, b in zip(found, right, strict=True)):
        return "gave parts that add up, but rank 0's is not what the first features give: cut in order, evenly"
    return ""
