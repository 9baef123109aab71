"""Checks of lab 5, tensor parallelism and two mesh axes."""

from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import labkit
from labkit.checks.judge import (
    NotAttempted,
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    exercise,
    is_tensor_close,
    judge_values,
    passing_verdict,
    value_text,
)
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks.two_dim import (
    CPU,
    DATA,
    TOKENS,
    TP,
    make_exercise_model,
    rank_tensors,
    whole_layer,
)
from labkit.theory import two_dim as theory

RANKS = DATA * TP
WAIT_HINT = "is the plan the same on all of them?"
GROUP_WAIT_HINT = "does every rank of the group call the same all-reduces, in the same order?"
TOLERANCES = {"rtol": 1e-4, "atol": 1e-6}
COUNT_HINTS = {
    "tp/all_reduce": (
        "Forward, each pair sums its parts; backward, each sums the gradient of its input, but the"
        " first."
    ),
    "data/all_gather": (
        "Each MLP is a unit of FSDP: gathered for the forward pass, and again for the backward"
        " pass."
    ),
    "data/reduce_scatter": "Each unit's gradients are reduced once.",
}
AXIS_HINTS = {
    "tp/": "Along tp activations are added up, which is an all-reduce.",
    "data/": "Along data FSDP gathers parameters and reduce-scatters gradients.",
}
RETURN_HINT = (
    "backward returns one value for each argument of forward, None for what has no gradient"
)
FUNCTION_ERROR_HINTS = {
    "incorrect number of gradients": RETURN_HINT,
    "gradient for input": RETURN_HINT,
    "must implement either the backward": "backward is missing, or has another name",
    "non-static forward": "forward and backward are static: write @staticmethod above each",
    "modified by an inplace": (
        "a tensor that autograd needs was changed in place: clone before you sum"
    ),
}


@exercise
def parts(answer: Callable[..., list[Tensor]]) -> Verdict:
    """Exercise 1: what each rank contributes to the result of two layers, from (x, first, second,
    ranks).

    ``first`` [inner, D] and ``second`` [D, inner] are the weights of two linear layers without
    bias, with ReLU between them.
    """
    for ranks, inner in ((2, 8), (4, 8), (1, 6)):
        draw = torch.Generator().manual_seed(ranks)
        x, first, second = (
            torch.randn(shape, generator=draw) for shape in ((3, 5), (inner, 5), (5, inner))
        )
        shapes = f"with x {[*x.shape]} and first {[*first.shape]},"
        asked = f"{answer_name(answer)}(x, first, second, ranks={ranks}), {shapes}"
        _judge_parts(
            call_answer(answer, x, first, second, ranks, in_words=asked),
            x,
            first,
            second,
            ranks,
            asked,
        )
    return passing_verdict(
        "each rank computes with its own features alone, and the parts add up to one device's"
        " result"
    )


def _judge_parts(
    found: Any, x: Tensor, first: Tensor, second: Tensor, ranks: int, asked: str
) -> None:
    """Raise WrongAnswer unless these parts add up to the layers' result."""
    if not isinstance(found, list | tuple) or not all(isinstance(each, Tensor) for each in found):
        raise WrongAnswer(
            f"{asked} gave {type(found).__name__}, not a list of tensors",
            hint="Does every path return?",
        )
    if len(found) != ranks:
        raise WrongAnswer(
            f"{asked} gave {len(found)} tensors",
            expected=f"{ranks}",
            hint="Every rank has one.",
        )
    shapes = {tuple(each.shape) for each in found} - {tuple(x.shape)}
    if shapes:
        hint = (
            "Each rank's part is as large as the result: the inner features are gone after the"
            " second layer."
        )
        raise WrongAnswer(
            f"{asked} gave a tensor of shape {list(shapes.pop())}",
            expected=f"{[*x.shape]}",
            hint=hint,
        )
    cuts = list(zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True))
    right = [relu(x @ rows.T) @ columns.T for rows, columns in cuts]
    total, whole = sum(found, torch.zeros_like(x)), sum(right, torch.zeros_like(x))
    if not is_tensor_close(total, whole, atol=1e-4):
        without = sum((x @ rows.T @ columns.T for rows, columns in cuts), torch.zeros_like(x))
        if is_tensor_close(total, without, atol=1e-4):
            raise WrongAnswer(
                f"{asked} gave parts without the ReLU",
                hint="It stands between the layers, on every rank.",
            )
        if all(is_tensor_close(each, whole, atol=1e-4) for each in found):
            raise WrongAnswer(
                f"{asked} gave the whole result for each rank",
                hint="A rank has its own features alone.",
            )
        hint = "Rank r takes rows of first, dim 0, and the same columns of second, dim 1."
        raise WrongAnswer(f"{asked} gave parts whose sum is not the result", hint=hint)
    if not all(is_tensor_close(a, b, atol=1e-4) for a, b in zip(found, right, strict=True)):
        hint = "Cut in order, evenly."
        raise WrongAnswer(
            f"{asked} gave parts that add up, but rank 0's is not what the first features give",
            hint=hint,
        )


@exercise
def tp_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: the bytes that a rank passes to all-reduces along tp in a step, from (tokens,
    dim, mlps).
    """
    once = "One all-reduce sums a tensor of tokens x dim numbers, 4 bytes each."
    forward = "Forward there is one all-reduce for each MLP."
    backward = "Backward, too, ranks add up: the gradient of an MLP's input."
    first = "The first MLP's input are samples: nobody asks for their gradient."
    found = call_answer(answer, tokens=1, dim=1, mlps=3)
    likely = {24: first, 12: backward, 5: once}
    hint = next(
        (each for wrong, each in likely.items() if isinstance(found, Integral) and found == wrong),
        "",
    )
    return judge_values(
        answer,
        lambda tokens, dim, mlps: theory.activation_collectives([(dim, 4 * dim)] * mlps, tokens, 2)[
            "tp/all_reduce_bytes"
        ],
        [(1, 1, 3), (32, 8, 3), (8, 16, 2), (32, 8, 1)],
        [hint or f"{forward} {backward}", once, first, first],
    )


def _check_function_class(answer: Any) -> None:
    if not isinstance(answer, type) or not issubclass(answer, torch.autograd.Function):
        raise WrongAnswer(
            f"{value_text(answer)} is no torch.autograd.Function",
            hint="Hand over the class, by its name.",
        )
    if "forward" not in vars(answer) and "backward" not in vars(answer):
        raise NotAttempted


@exercise
def copy_to_ranks(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 3: forward x unchanged, backward the sum over a group, on 2 x 2 real ranks; from (x,
    group).
    """
    _check_function_class(answer)

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        got, (given, _) = _check_tensor(sent["got"], index), rank_tensors(index)
        if not is_tensor_close(got, given):
            words = _likely_tensor(got, index, own=0)
            raise WrongAnswer(
                f"on rank {index}, forward returned {words}, not x", hint="Forward changes nothing."
            )
        _judge_sum(sent["grad"], index, 1, "backward returned")
        if not is_tensor_close(sent["arrived"], rank_tensors(index)[1]):
            hint = (
                "The gradient that arrives may be used elsewhere: clone it, then all-reduce the"
                " clone."
            )
            raise WrongAnswer(
                f"on rank {index}, backward changed the gradient that it was given", hint=hint
            )

    _judge_function(answer, judge_rank, timeout_s, "copy")
    return passing_verdict(
        f"as it is forward, summed over the group backward, on {DATA} x {TP} ranks"
    )


@exercise
def sum_over_ranks(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 4: forward the sum over a group, backward the gradient unchanged, on 2 x 2 real
    ranks; from (part, group).
    """
    _check_function_class(answer)

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        _judge_sum(_check_tensor(sent["got"], index), index, 0, "forward returned")
        if not is_tensor_close(sent["x"], rank_tensors(index)[0]):
            hint = "Autograd may still need the part: clone it, then all-reduce the clone."
            raise WrongAnswer(
                f"on rank {index}, forward changed the part that it was given", hint=hint
            )
        grad, arrived = sent["grad"], rank_tensors(index)[1]
        if grad is None:
            raise WrongAnswer(
                f"on rank {index}, the part got no gradient",
                hint="The first value that backward returns is it.",
            )
        if not is_tensor_close(grad, arrived):
            hint = (
                "A part enters the sum once, and the next layers have the same gradient on every"
                " rank already."
            )
            words = _likely_tensor(grad, index, own=1)
            raise WrongAnswer(
                f"on rank {index}, backward returned {words}, not the gradient as it is", hint=hint
            )

    _judge_function(answer, judge_rank, timeout_s, "sum")
    return passing_verdict(
        f"summed over the group forward, as it is backward, on {DATA} x {TP} ranks"
    )


def _judge_function(
    answer: Any, judge: Callable[[int, dict[str, Any]], None], timeout_s: float, what: str
) -> None:
    judge_on_ranks(
        "two_dim",
        answer,
        judge=judge,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=GROUP_WAIT_HINT,
        hints=FUNCTION_ERROR_HINTS,
        what=what,
    )


def _check_tensor(got: Tensor | str, index: int) -> Tensor:
    if isinstance(got, str):
        raise WrongAnswer(
            f"on rank {index}, forward returned {got}, not a tensor", hint="Does every path return?"
        )
    return got


def _judge_sum(got: Tensor | None, index: int, which: int, said: str) -> None:
    """Judge whether a rank has the sum over its group, of the inputs (``which`` 0) or of the
    gradients (1).
    """
    if got is None:
        raise WrongAnswer(
            f"on rank {index}, x got no gradient",
            hint="The first value that backward returns is it.",
        )
    if not is_tensor_close(got, _group_sum(index, which)):
        words = _likely_tensor(got, index, own=which)
        raise WrongAnswer(
            f"on rank {index}, {said} {words}, not the sum over its group",
            hint="All-reduce with group=group.",
        )


def _group_sum(index: int, which: int) -> Tensor:
    """Return the sum over the ranks of one tp group."""
    mates = [index - index % TP + place for place in range(TP)]
    return torch.stack([rank_tensors(mate)[which] for mate in mates]).sum(0)


def _likely_tensor(got: Tensor, index: int, own: int) -> str:
    """Say what a tensor most likely is."""
    every = torch.stack([rank_tensors(rank)[own] for rank in range(RANKS)]).sum(0)
    known = {
        "its own tensor": rank_tensors(index)[own],
        "the sum over its group": _group_sum(index, own),
        "the mean over its group": _group_sum(index, own) / TP,
        f"the sum over all {RANKS} ranks": every,
        "the sum, added up once more": TP * _group_sum(index, own),
    }
    return next(
        (words for words, each in known.items() if is_tensor_close(got, each)), "something else"
    )


@exercise
def column_parallel(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 5: a rank's share of the first of two layers, from (layer, group), on 2 x 2 real
    ranks.
    """
    return _judge_layer(answer, "column", timeout_s)


@exercise
def row_parallel(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 6: a rank's share of the second of two layers, from (layer, group), on 2 x 2 real
    ranks.
    """
    return _judge_layer(answer, "row", timeout_s)


def _judge_layer(answer: Any, which: str, timeout_s: float) -> Verdict:
    """Compare every rank's share with the whole layer: parameters, output, gradients, and what it
    sends.
    """
    if isinstance(answer, type) and not {"__init__", "forward"} & vars(answer).keys():
        raise NotAttempted

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        line, place = divmod(index, TP)
        layer, whole_x, gradient = whole_layer(which, line)
        x = whole_x.requires_grad_()
        output = layer(x)
        output.backward(gradient)
        assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
        for rank, held in enumerate(sent["parameters"]):
            _judge_parameters(held, layer, which, rank)
        if "error" in sent:
            raise WrongAnswer(
                f"on rank {index}, forward raised {sent['error']}", hint=CUT_HINTS[which]
            )
        dim = 0 if which == "column" else 1
        share = output.detach().chunk(TP, dim=-1) if which == "column" else [output.detach()] * TP
        _judge_output(sent["output"], share, layer, whole_x.detach(), which, index)
        grads = [x.grad] * TP if which == "column" else x.grad.chunk(TP, dim=-1)
        own = (
            gradient.chunk(TP, dim=-1)[place] @ layer.weight.detach().chunk(TP)[place]
            if which == "column"
            else None
        )
        _judge_input_gradient(sent["grad"], grads[place], own, index)
        right = {"weight": layer.weight.grad.chunk(TP, dim=dim)[place], "bias": layer.bias.grad}
        if which == "column":
            right["bias"] = layer.bias.grad.chunk(TP)[place]
        for name, each in right.items():
            _judge_layer_gradient(sent["gradients"][name], each, name, index)
        wanted = {"forward": int(which == "row"), "backward": int(which == "column")}
        for when, calls in wanted.items():
            if sent[when] != calls:
                said = (
                    f"the numbers are right, but rank {index} makes {sent[when]} calls in the"
                    f" {when} pass"
                )
                raise WrongAnswer(
                    said,
                    expected=f"{calls}",
                    hint="A layer of the pair needs one, in one direction.",
                )

    judge_on_ranks(
        "two_dim",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=GROUP_WAIT_HINT,
        what=which,
    )
    how = (
        "one all-reduce backward, none forward"
        if which == "column"
        else "one all-reduce forward, none backward"
    )
    return passing_verdict(
        f"output and gradients are the whole layer's on {DATA} x {TP} ranks, with {how}"
    )


def _judge_parameters(
    held: Mapping[str, Tensor] | str, layer: nn.Linear, which: str, index: int
) -> None:
    """Judge whether a rank holds its share of the weight and of the bias, and nothing else.

    Text is the name of a type, for a parameter that is no tensor.
    """
    if isinstance(held, str):
        raise WrongAnswer(
            f"on rank {index}, what you made is a {held}, no nn.Module", hint="Hand over the class."
        )
    dim, place = (0, index % TP) if which == "column" else (1, index % TP)
    weights = layer.weight.detach().chunk(TP, dim=dim)
    biases = layer.bias.detach().chunk(TP) if which == "column" else [layer.bias.detach()] * TP
    if held.keys() != {"weight", "bias"}:
        names = ", ".join(held) or "none"
        hint = "Set self.weight and self.bias to an nn.Parameter each."
        raise WrongAnswer(
            f"on rank {index}, the parameters are {names}",
            expected="weight, bias",
            hint=hint,
        )
    for name, shares in (("weight", weights), ("bias", biases)):
        got, right = held[name], shares[place]
        if got.shape != right.shape:
            said = f"on rank {index}, the {name} has shape {[*got.shape]}"
            raise WrongAnswer(said, expected=f"{[*right.shape]}", hint=CUT_HINTS[which])
        if not is_tensor_close(got, right):
            other = next(
                (rank for rank, each in enumerate(shares) if is_tensor_close(got, each)), None
            )
            whose = (
                "no share of the layer's"
                if other is None
                else f"the share of place {other} in the group"
            )
            hint = "dist.get_rank(group) is this rank's place in the group; take that part."
            raise WrongAnswer(
                f"on rank {index}, the {name} is {whose}",
                expected=f"place {place}",
                hint=hint,
            )


CUT_HINTS = {
    "column": "The first layer is cut by rows of its weight, dim 0, and its bias with it.",
    "row": "The second layer is cut by columns of its weight, dim 1; its bias stays whole.",
}


def _judge_output(
    got: Tensor | str,
    shares: list[Tensor] | tuple[Tensor, ...],
    layer: nn.Linear,
    x: Tensor,
    which: str,
    index: int,
) -> None:
    """Judge a layer's output on a rank; if it is wrong, say what it most likely is."""
    right, bias = shares[index % TP], layer.bias.detach()
    if isinstance(got, str):
        raise WrongAnswer(
            f"on rank {index}, forward returned {got}, not a tensor", hint="Does every path return?"
        )
    if got.shape != right.shape:
        raise WrongAnswer(
            f"on rank {index}, the output has shape {[*got.shape]}",
            expected=f"{[*right.shape]}",
            hint="Column-parallel: this rank's features. Row-parallel: all of them.",
        )
    if is_tensor_close(got, right, **TOLERANCES):
        return
    if which == "column":
        raise WrongAnswer(
            f"on rank {index}, the output is not the layer's at this rank's features",
            hint=CUT_HINTS[which],
        )
    part = x.chunk(TP, dim=-1)[index % TP] @ layer.weight.detach().chunk(TP, dim=1)[index % TP].T
    known = {
        f"has the bias {TP} times": (
            right + (TP - 1) * bias,
            "Every rank adds it, then the ranks are added up: sum first, add the bias after.",
        ),
        "has no bias": (right - bias, "Add it once, after the sum."),
        "is this rank's part alone": (part + bias, "Sum the parts over the group."),
        "is this rank's part alone, without bias": (
            part,
            "Sum the parts over the group; then add the bias.",
        ),
    }
    for words, (each, hint) in known.items():
        if is_tensor_close(got, each, **TOLERANCES):
            raise WrongAnswer(f"on rank {index}, the output {words}", hint=hint)
    raise WrongAnswer(
        f"on rank {index}, the output is not the layer's",
        hint="Multiply, sum over the group, add the bias.",
    )


def _judge_input_gradient(
    got: Tensor | None, right: Tensor, own: Tensor | None, index: int
) -> None:
    if got is None:
        hint = "Compute with x itself: no detach(), no .data."
        raise WrongAnswer(f"on rank {index}, the input got no gradient", hint=hint)
    if is_tensor_close(got, right, **TOLERANCES):
        return
    known = {
        f"is {TP} times the layer's": (
            TP * right,
            "Something is summed that every rank has whole already.",
        ),
        "is this rank's share alone": (own, "Every rank used all of x: their gradients add up."),
    }
    for words, (each, hint) in known.items():
        if each is not None and is_tensor_close(got, each, **TOLERANCES):
            raise WrongAnswer(f"on rank {index}, the gradient of the input {words}", hint=hint)
    hint = (
        "Column-parallel: copy_to_ranks in front of the product. Row-parallel: nothing in front"
        " of it."
    )
    raise WrongAnswer(f"on rank {index}, the gradient of the input is not the layer's", hint=hint)


def _judge_layer_gradient(got: Tensor | None, right: Tensor, name: str, index: int) -> None:
    if is_tensor_close(got, right, **TOLERANCES):
        return
    said = (
        f"the output is right, but on rank {index} the gradient of the {name}"
        f" {_gradient_difference(got, right)}"
    )
    hint = (
        "Each rank holds the whole bias, and each must get its whole gradient: add it after the"
        " sum, on every rank."
    )
    raise WrongAnswer(
        said,
        hint=(
            hint
            if name == "bias"
            else "The gradient of the output must reach the product as it is."
        ),
    )


@exercise
def collectives(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 7: how often each collective runs along each axis, as a dict such as
    ``{"tp/all_reduce": 5}``.

    Args:
        answer: the learner's function.
        result: a run of two_dim, whose measured counts are the truth.

    Raises:
        ValueError: the run has no counts by axis.
    """
    ending = "_count"
    measured = {
        name.removesuffix(ending): int(result.value(name))
        for name in result.summary()
        if "/" in name and name.endswith(ending)
    }
    if not measured:
        raise ValueError(
            "this run counted no collective along an axis: take a run of two_dim that measures"
        )
    said = call_answer(answer)
    if not isinstance(said, Mapping):
        raise WrongAnswer(
            f"{answer_name(answer)}() gave {value_text(said)}, not a dict such as"
            " {'tp/all_reduce': 1}"
        )
    strange = [
        name
        for name in said
        if not isinstance(name, str) or name.split("/")[0] not in ("tp", "data")
    ]
    if strange:
        hint = (
            "A key is an axis and a collective, with a / between: 'tp/all_reduce'. The axes are tp"
            " and data."
        )
        raise WrongAnswer(f"the key {value_text(strange[0])} names no axis", hint=hint)
    for name in [*said, *measured]:
        mine, counted = said.get(name, 0), measured.get(name, 0)
        if not isinstance(mine, Integral) or mine != counted:
            hint = COUNT_HINTS.get(name) or next(
                (each for axis, each in AXIS_HINTS.items() if name.startswith(axis)), ""
            )
            raise WrongAnswer(
                f"{name}: you say {value_text(mine)}",
                expected=f"{counted}, which the ranks counted",
                hint=hint,
            )
    return passing_verdict(
        ", ".join(f"{count} {name}" for name, count in sorted(measured.items())) + ", as counted"
    )


@exercise
def message_share(answer: Callable[..., float]) -> Verdict:
    """Exercise 8: the time of tp's messages divided by the time of the computation.

    The answer's arguments are (inner, tp, flops_per_s, wire_bytes_per_s, number_bytes).
    """
    return judge_values(
        answer,
        lambda inner, tp, flops_per_s, wire_bytes_per_s, number_bytes: theory.message_share(
            inner, tp, flops_per_s, wire_bytes_per_s, number_bytes
        ),
        [
            (4, 2, 24.0, 1.0, 2),
            (4, 4, 24.0, 1.0, 2),
            (4, 4, 24.0, 2.0, 4),
            (8, 2, 24.0, 1.0, 2),
            (8, 1, 24.0, 1.0, 2),
        ],
        [
            (
                "Two all-reduces for a pair, forward and backward; each puts 2 (tp - 1) / tp of its"
                " bytes on the wire."
            ),
            "With more ranks each computes less, and sends more.",
            "Bytes over bandwidth: count number_bytes for each number.",
            "A wider pair computes more, and sends the same.",
            "One rank sends nothing.",
        ],
    )


@exercise
def block_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 9: a plan for ``Block``, attention and gated MLP, on 2 x 2 real ranks."""
    detail = (
        "equal to one device on 2 x 2 ranks, every matrix shared out, four all-reduces along tp"
    )
    return _judge_plan(answer, "block", timeout_s, detail, most_sent=4)


@exercise
def words_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 10: a plan for ``Words``, an embedding and the last layer, on 2 x 2 real ranks."""
    detail = "equal to one device on 2 x 2 ranks, output and gradients, and both tables shared out"
    return _judge_plan(answer, "words", timeout_s, detail)


@exercise
def stack_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 11: a plan for ``MLPStack`` on 2 x 2 real ranks, with the sequence sharded between
    the MLPs.
    """
    detail = (
        "equal to one device on 2 x 2 ranks, output and gradients, every matrix and the sequence"
        " shared out"
    )
    return _judge_plan(answer, "stack", timeout_s, detail)


def _judge_plan(
    answer: Callable[[], Any],
    model: str,
    timeout_s: float,
    detail: str,
    most_sent: int | None = None,
) -> Verdict:
    """Train with the plan on ranks and on one device, and compare: the output first."""
    reference = make_exercise_model(model)
    lines = [reference.get_input(CPU, seed) for seed in range(DATA)]
    outputs = [reference(*line) for line in lines]
    for line, output in zip(lines, outputs, strict=True):
        (reference.get_loss(line, output) / DATA).backward()
    expected = dict(reference.named_parameters())

    def judge_rank(index: int, sent: dict[str, Any]) -> None:
        output, right = sent.get("output"), outputs[sent["data"]]
        if output is not None and output.shape != right.shape:
            hint = (
                "input_layouts says how a tensor is laid out when it comes, output_layouts how it"
                " shall leave."
            )
            said = f"the output has shape {[*output.shape]}"
            raise WrongAnswer(said, expected=f"{[*right.shape]}, as on one device", hint=hint)
        if output is not None and not is_tensor_close(output, right, **TOLERANCES):
            hint = "Is every part added up before it is used as the whole?"
            raise WrongAnswer(
                "the output is not one device's, and nothing has raised an error", hint=hint
            )
        if "error" in sent:
            raise WrongAnswer(
                f"the model does not run with this plan: {_stop_place(sent)}",
                hint=f"PyTorch says: {sent['error']}",
            )
        _judge_gradients(sent["gradients"], {name: each.grad for name, each in expected.items()})
        matrices = [
            name
            for name, each in expected.items()
            if each.dim() > 1 and sent["held"][name] == each.numel()
        ]
        if matrices:
            hint = "Every layer is named in the plan, as a column- or a row-parallel one."
            raise WrongAnswer(
                f"every rank holds all of {', '.join(matrices)}: nothing is shared out there",
                hint=hint,
            )
        if most_sent is not None and sum(sent["sent"].values()) > most_sent:
            seen = ", ".join(f"{count} {name}" for name, count in sorted(sent["sent"].items()))
            said = f"the result is right, but a step sends more than it needs to along tp: {seen}"
            hint = "Between the two layers of a pair nothing need be gathered."
            raise WrongAnswer(said, expected=f"at most {most_sent} all-reduces", hint=hint)
        if model == "stack" and sent["between"]["layers.0"][1] == TOKENS:
            hint = "The first MLP's result leaves as Shard(1), and comes so into the second."
            said = (
                f"all is right, but between the MLPs every rank holds all {TOKENS} tokens: the"
                " sequence is not cut"
            )
            raise WrongAnswer(said, expected=f"{TOKENS // TP}", hint=hint)

    judge_on_ranks(
        "two_dim",
        answer,
        judge=judge_rank,
        ranks=RANKS,
        timeout_s=timeout_s,
        waiting=WAIT_HINT,
        what=model,
    )
    return passing_verdict(detail)


def _stop_place(sent: Mapping[str, Any]) -> str:
    """Say in which layer a model stopped."""
    if not sent["entered"]:
        return "before any linear layer"
    name, got, whole = sent["entered"]
    if "same reduction dim" in sent["error"] or "mat1 and mat2" in sent["error"]:
        comes, wants = (
            ("cut", "a colwise layer expects whole")
            if got < whole
            else ("whole", "a rowwise layer expects cut")
        )
        return f"`{name}` receives {comes} inputs, {got} of {whole} features, and {wants} ones"
    if "must match the size" in sent["error"]:
        return f"after `{name}`, a cut tensor meets a whole one"
    return f"at or after `{name}`"


def _judge_gradients(
    gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    """Raise WrongAnswer, naming the parameters, if gradients differ from one device's."""
    problems = {
        name: _gradient_difference(gradients[name], right)
        for name, right in expected.items()
        if right is not None and not is_tensor_close(gradients[name], right, **TOLERANCES)
    }
    if problems:
        names = [*problems]
        which = ", ".join(names[:2]) + (f" and of {len(names) - 2} more" if len(names) > 2 else "")
        most = Counter(problems.values()).most_common(1)[0][0]
        cause = "A layout in the plan says something about a tensor that is not so."
        raise WrongAnswer(f"the output is right, but the gradient of {which} {most}", hint=cause)


def _gradient_difference(got: Tensor | None, expected: Tensor) -> str:
    """Say what a wrong gradient looks like."""
    if got is None:
        return "is missing"
    if got.shape != expected.shape:
        return f"has shape {[*got.shape]}, not {[*expected.shape]}"
    ratio = (got * expected).sum() / (expected * expected).sum()
    multiple = is_tensor_close(got, ratio * expected, rtol=1e-3, atol=1e-6)
    return f"is {ratio:.3g} times one device's" if multiple else "is not one device's"
