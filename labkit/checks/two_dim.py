"""Checks of lab 5, tensor parallelism and two mesh axes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

import labkit
from labkit.checks.verdict import Verdict, check_values, is_empty, passed, source_of, wrong
from labkit.theory import tensor as theory

RANKS = 4
PLAN_PROGRAM = Path(__file__).with_name("plan_ranks.py")
HINTS = {
    "tp/all_reduce": "forward, each pair sums its parts; backward, each sums the gradient of its input, but the first",
    "dp/all_gather": "each MLP is a unit of FSDP: gathered for the forward pass, and again for the backward pass",
    "dp/reduce_scatter": "each unit's gradients are reduced once",
}


def parts(answer: Callable[..., list[Tensor]]) -> Verdict:
    """Exercise 1: what each rank contributes to a pair's result, from (x, first, second, ranks).

    ``first`` [inner, D] and ``second`` [D, inner] are the weights of two linear layers without bias, ReLU in between.
    """
    if is_empty(answer):
        return Verdict("not attempted")
    for ranks, inner in ((2, 8), (4, 8), (1, 6)):
        draw = torch.Generator().manual_seed(ranks)
        x, first, second = (torch.randn(shape, generator=draw) for shape in ((3, 5), (inner, 5), (5, inner)))
        call = f"{answer.__name__}(x, first, second, ranks={ranks}), with x {[*x.shape]} and first {[*first.shape]},"
        try:
            found = answer(x, first, second, ranks)
        except Exception as error:
            return wrong(f"{call} raised {type(error).__name__}: {error}")
        problem = _wrong_parts(found, x, first, second, ranks)
        if problem:
            return wrong(f"{call} {problem}")
    return passed("each rank computes with its own features alone, and the parts add up to one device's result")


def tp_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: bytes that a rank hands to all-reduces along tp in a training step, from (places, dim, mlps)."""
    hint = "One all-reduce sums a tensor of places x dim numbers, 4 bytes each."
    backward = "Forward there is one all-reduce for each MLP; backward one for each but the first."
    cases = []
    for places, dim, mlps, said in ((1, 1, 1, hint), (32, 8, 1, hint), (32, 8, 3, backward), (8, 16, 2, backward)):
        expected = theory.activations_sent([(dim, 4 * dim)] * mlps, places, 2)["tp/all_reduce_bytes"]
        cases.append(({"places": places, "dim": dim, "mlps": mlps}, expected, said))
    return check_values(answer, cases)


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
    if is_empty(answer):
        return Verdict("not attempted")
    try:
        said = answer()
    except Exception as error:
        return wrong(f"{answer.__name__}() raised {type(error).__name__}: {error}")
    if not isinstance(said, Mapping):
        return wrong(f"{answer.__name__}() gave {said!r}, not a dict such as {{'tp/all_reduce': 1}}")
    for name in [*said, *measured]:
        if said.get(name, 0) != measured.get(name, 0):
            hint = f". Hint: {HINTS[name]}" if name in HINTS else ""
            return wrong(f"{name}: you say {said.get(name, 0)}, the ranks counted {measured.get(name, 0)}{hint}")
    return passed(", ".join(f"{count} {name}" for name, count in sorted(measured.items())) + ", as counted")


def gated_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 4: a plan for ``GatedMLP`` on 2 x 2 real ranks that needs one all-reduce a step along tp."""
    detail = "equal to one device on 2 x 2 ranks, every matrix shared out, one all-reduce along tp"
    return _judge_plan(answer, timeout_s, detail, model="gated", most_sent=1)


def stack_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 5: a plan for ``MLPStack`` on 2 x 2 real ranks, equal to one device in output and gradients."""
    detail = "equal to one device on 2 x 2 ranks, output and gradients, and every matrix shared out"
    return _judge_plan(answer, timeout_s, detail, model="stack")


def _judge_plan(answer: Callable[[], Any], timeout_s: float, detail: str, **parameters: Any) -> Verdict:
    if is_empty(answer):
        return Verdict("not attempted")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.py"
        file.write_text(source_of(answer))
        parameters |= {"answer": str(file), "name": answer.__name__}
        try:
            labkit.run(PLAN_PROGRAM, nproc=RANKS, device="cpu", timeout_s=timeout_s, **parameters)
        except labkit.RankFailed as failure:
            return wrong(failure.message if failure.exc_type == "Wrong" else f"{failure.exc_type}: {failure.message}")
        except labkit.RunTimedOut:
            return wrong(f"the ranks waited for each other for {timeout_s:g} s: is the plan the same on all of them?")
    return passed(detail)


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
    if not torch.allclose(sum(found, torch.zeros_like(whole)), whole, atol=1e-4):
        return "gave parts whose sum is not the result: first is cut by rows of its weight, second by columns"
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, right, strict=True)):
        return "gave parts that add up, but rank 0's is not what the first features give: cut in order, evenly"
    return ""
