"""Checks of lab 5, tensor parallelism and two mesh axes."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

import labkit
from labkit.checks import judge
from labkit.checks.judge import Verdict, exercise
from labkit.checks.on_ranks import judge_on_ranks
from labkit.checks.ranks import two_dim as ranks_two_dim
from labkit.checks.ranks.two_dim import MESH_SHAPES, rank_tensors
from labkit.checks.traffic import Totals, expect_traffic, traffic_text
from labkit.theory import two_dim as theory

MESHES_TEXT = " and ".join(f"{data} x {tp}" for data, tp in MESH_SHAPES.values())
# Of what a rank and one device calculate in another order.
TOLERANCES: dict[str, Any] = {"rtol": 1e-5, "atol": 3e-7}
# Features of all tokens of a rank's samples.
ACTIVATION_BYTES = 4 * ranks_two_dim.BATCH * ranks_two_dim.TOKENS * ranks_two_dim.DIM
SUM = "the sum over its group"
# What an autograd.Function returns in each pass, and a hint.
FUNCTION_RULES = {
    "copy": [
        ("forward", "x", "Forward changes nothing."),
        ("backward", SUM, "All-reduce with group=group."),
    ],
    "sum": [
        ("forward", SUM, "All-reduce with group=group."),
        ("backward", "the gradient as it is", "It is the same on every rank already."),
    ],
}
# What a rank sends of each pass: the tensor that was returned, and the one that was given.
PASS_TENSORS = {"forward": ("got", "x"), "backward": ("grad", "arrived")}
RETURN_HINT = "backward returns one value for each argument of forward, None where no gradient is"
ERROR_HINTS = {
    "incorrect number of gradients": RETURN_HINT,
    "gradient for input": RETURN_HINT,
    "must implement either the backward": "backward is missing, or has another name",
    "non-static forward": "forward and backward are static: write @staticmethod above each",
    "modified by an inplace": "a tensor that autograd needs was changed in place: clone it first",
}
_on_meshes = partial(judge_on_ranks, "two_dim", sizes=tuple(MESH_SHAPES))
GROUP_WAIT_HINT = "does every rank of the group call the same all-reduces, in the same order?"
_on_groups = partial(_on_meshes, waiting=GROUP_WAIT_HINT, hints=ERROR_HINTS)
CUT_HINTS = {
    "column": "The first layer is cut by rows of its weight, dim 0, and its bias with it.",
    "row": "The second layer is cut by columns of its weight, dim 1; its bias stays whole.",
}
# Hints by collective along an axis, and by axis.
COUNT_HINTS = {
    "tp/all_reduce": (
        "Forward, each pair sums its parts; backward, each but the first the gradient of its input."
    ),
    "data/all_gather": "Each MLP is a unit of FSDP, gathered for both passes.",
    "data/reduce_scatter": "Each unit's gradients are reduced once.",
    "tp": "Along tp activations are added up, which is an all-reduce.",
    "data": "Along data FSDP gathers parameters and reduce-scatters gradients.",
}


@exercise
def parts(answer: Callable[..., list[Tensor]]) -> Verdict:
    """Exercise 1: what each rank contributes to two layers' result, from (x, first, second, ranks).

    ``first`` [inner, D] and ``second`` [D, inner] are the weights of two linear layers without
    bias, with ReLU between them.
    """
    for ranks, inner in ((2, 8), (4, 8), (1, 6)):
        draw = torch.Generator().manual_seed(ranks)
        x, first = torch.randn(3, 5, generator=draw), torch.randn(inner, 5, generator=draw)
        second = torch.randn(5, inner, generator=draw)
        shapes = f"with x {[*x.shape]} and first {[*first.shape]},"
        asked = f"{judge.answer_name(answer)}(x, first, second, ranks={ranks}), {shapes}"
        found = judge.call_answer(answer, x, first, second, ranks, in_words=asked)
        # A list of another class may raise whatever is done with it.
        is_list = type(found) in (list, tuple) and all(isinstance(each, Tensor) for each in found)
        said = f"{asked} gave {type(found).__name__}, not a list of tensors"
        judge.expect(is_list, said, hint="Does every path return?")
        said = f"{asked} gave {len(found)} tensors"
        judge.expect(len(found) == ranks, said, ranks, "Every rank has one.")
        hint = "Each part is as large as the result: the second layer takes the inner features."
        for part in found:
            said = f"{asked} gave a tensor of shape {[*part.shape]}"
            judge.expect(part.shape == x.shape, said, [*x.shape], hint)
        cuts = [*zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)]
        right = torch.stack([relu(x @ rows.T) @ columns.T for rows, columns in cuts])
        given = torch.stack([part.to(x.dtype) for part in found])
        whole = right.sum(0).expand_as(right)
        no_relu = torch.stack([x @ rows.T @ columns.T for rows, columns in cuts])
        between, features = "It stands between the layers.", "A rank has its own features alone."
        likely = {
            "parts without the ReLU": (no_relu, between),
            "the whole result for each rank": (whole, features),
        }
        wrong, hint = "parts whose sum is not the result", "Cut first along dim 0, second along 1."
        # Any split of the features adds up, and so does the result divided by the ranks.
        if judge.is_tensor_close(given.sum(0), whole[0], atol=2e-6):
            wrong = "parts that add up, but rank 0's is not what the first features give"
            hint = "Cut in order, evenly."
        said = f"{asked} gave"
        how: dict[str, Any] = {"hint": hint, "rtol": 1e-5, "atol": 2e-6}
        judge.expect_close(given, right, said, likely, otherwise=wrong, **how)
    passed = "each rank computes with its own features alone"
    return judge.passing_verdict(f"{passed}, and the parts add up to one device's result")


@exercise
def tp_bytes(answer: Callable[..., int]) -> Verdict:
    """Exercise 2: bytes of a step's all-reduces along tp, from (tokens, dim, mlps)."""
    once = "One all-reduce sums a tensor of tokens x dim numbers, 4 bytes each."
    first = "The first MLP's input are samples: nothing needs their gradient."
    backward = "Backward, too, ranks add up: the gradient of an MLP's input."
    # One MLP has one all-reduce, forward; each further one has two.
    cases = [
        (1, 1, 1, f"{once} {first}"),
        (1, 1, 3, f"Forward there is one all-reduce for each MLP. {backward}"),
        (32, 8, 3, once),
        (8, 16, 2, backward),
    ]

    def right_bytes(tokens: int, dim: int, mlps: int) -> int:
        sent = theory.activation_collectives([(dim, 4 * dim)] * mlps, tokens, 2)
        return sent["tp/all_reduce_bytes"]

    return judge.judge_cases(answer, right_bytes, cases)


@exercise
def copy_to_ranks(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 3: forward x, backward the sum over a group; from (x, group)."""
    in_words = "as it is forward, summed over the group backward"
    return _judge_function(answer, "copy", timeout_s, in_words)


@exercise
def sum_over_ranks(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 4: forward the sum over a group, backward the gradient; from (part, group)."""
    in_words = "summed over the group forward, as it is backward"
    return _judge_function(answer, "sum", timeout_s, in_words)


def _judge_function(answer: Any, what: str, timeout_s: float, in_words: str) -> Verdict:
    """Compare what an autograd.Function returns in both passes, as ``FUNCTION_RULES`` say."""
    is_function = isinstance(answer, type) and issubclass(answer, torch.autograd.Function)
    said = f"{judge.value_text(answer)} is no torch.autograd.Function"
    judge.expect(is_function, said, hint="Hand over the class, by its name.")
    # The base class has both methods, so only those of the class itself count.
    if not {"forward", "backward"} & vars(answer).keys():
        raise judge.NotAttempted

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        judge.expect_tensor(sent["got"], rank_tensors(index)[0])
        missing = "The first value that backward returns is the gradient."
        judge.expect(sent["grad"] is not None, "x got no gradient", hint=missing)
        _, tp = MESH_SHAPES[ranks]
        start = index - index % tp
        for number, (when, rule, hint) in enumerate(FUNCTION_RULES[what]):
            every = torch.stack([rank_tensors(rank)[number] for rank in range(ranks)])
            own, group = every[index], every[start : start + tp].sum(0)
            likely = {
                "its own tensor": own,
                SUM: group,
                "the mean over its group": group / tp,
                f"the sum over all {ranks} ranks": every.sum(0),
                "the sum, added up once more": tp * group,
                "the mean over its group, times 2": 2 * group / tp,
            }
            got, given = PASS_TENSORS[when]
            right, other = group if rule == SUM else own, "something else"
            said = f"{when} returned"
            how: dict[str, Any] = {"expected": rule, "hint": hint}
            judge.expect_close(sent[got], right, said, likely, other, **how, **TOLERANCES)
            said = f"{when} changed the tensor that it was given"
            hint = "It may be used elsewhere: clone it, then all-reduce the clone."
            judge.expect(judge.is_tensor_close(sent[given], own), said, hint=hint)
            said, hint = f"{when} returned the right numbers, but sends", "A sum is one all-reduce."
            usual = {"tp/all_reduce": [1, own.nbytes]} if rule == SUM else {}
            expect_traffic(sent["sent"][when], usual, said, hint)

    _on_groups(answer, judge=judge_rank, timeout_s=timeout_s, name_rank=True, what=what)
    return judge.passing_verdict(f"{in_words}, on {MESHES_TEXT} ranks")


@exercise
def column_parallel(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 5: a rank's share of the first layer, from (layer, group), on real ranks."""
    return _judge_layer(answer, "column", timeout_s, "one all-reduce backward, none forward")


@exercise
def row_parallel(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 6: a rank's share of the second layer, from (layer, group), on real ranks."""
    return _judge_layer(answer, "row", timeout_s, "one all-reduce forward, none backward")


def _judge_layer(answer: Any, which: str, timeout_s: float, passed: str) -> Verdict:
    """Compare each rank's share with labkit's own: parameters, results, gradients, calls."""
    # A class is never empty for judge_on_ranks, which looks at the code of functions.
    if isinstance(answer, type) and not {"__init__", "forward"} & vars(answer).keys():
        raise judge.NotAttempted

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        where, right = f"on rank {index},", sent["right"]
        _, tp = MESH_SHAPES[ranks]
        # A wrong share on one rank makes the results of others wrong, so all are judged first.
        for rank, held in enumerate(sent["parameters"]):
            _judge_parameters(held, right["parameters"], which, rank, tp)
        if "error" in sent:
            said = f"{where} forward raised {sent['error']}"
            raise judge.WrongAnswer(said, hint=CUT_HINTS[which])
        _judge_passes(where, sent, right, right["parameters"][index], tp)
        hint = "The output's gradient must reach the product. Add the bias last, on every rank."
        _judge_gradients(sent["gradients"], right["gradients"], hint, where=f"{where} ")
        for when in ("forward", "backward"):
            said = f"the numbers are right, but in the {when} pass rank {index} sends"
            hint = "A layer of the pair needs one all-reduce, in one direction."
            expect_traffic(sent[when], right[when], said, hint)

    _on_groups(answer, judge=judge_rank, timeout_s=timeout_s, what=which)
    return judge.passing_verdict(
        f"output and gradients are the whole layer's on {MESHES_TEXT} ranks, with {passed}"
    )


def _judge_parameters(
    held: Any, shares: list[dict[str, Tensor]], which: str, index: int, tp: int
) -> None:
    """Expect a rank's share of weight and bias, and nothing else; text names another type."""
    where = f"on rank {index},"
    said = f"{where} what you made is a {held}, no nn.Module"
    judge.expect(not isinstance(held, str), said, hint="Hand over the class.")
    said = f"{where} the parameters are {', '.join(held) or 'none'}"
    hint = "Set self.weight and self.bias to an nn.Parameter each."
    judge.expect(held.keys() == shares[index].keys(), said, "weight, bias", hint)
    for name, right in shares[index].items():
        said, shape = f"{where} the {name} has shape {[*held[name].shape]}", [*right.shape]
        judge.expect([*held[name].shape] == shape, said, shape, CUT_HINTS[which])
        likely = {
            f"the share of place {place} in the group": share[name]
            for place, share in enumerate(shares[:tp])
        }
        got, said, other = held[name], f"{where} the {name} is", "no share of the layer's"
        hint, wants = "Take part dist.get_rank(group), its place there.", f"place {index % tp}"
        # A share is a copy.
        how: dict[str, Any] = {"expected": wants, "hint": hint, "rtol": 0, "atol": 0}
        judge.expect_close(got, right, said, likely, otherwise=other, **how)


def _judge_passes(
    where: str, sent: dict[str, Any], right: dict[str, Any], share: dict[str, Tensor], tp: int
) -> None:
    """Expect the output of a layer, and the gradient of its input."""
    got, output, bias = sent["output"], right["output"], share["bias"]
    if isinstance(got, str):
        said = f"{where} forward returned {got}, not a tensor"
        raise judge.WrongAnswer(said, hint="Does every path return?")
    said, shape = f"{where} the output has shape {[*got.shape]}", [*output.shape]
    hint = "Column-parallel: this rank's features. Row-parallel: all of them."
    judge.expect([*got.shape] == shape, said, shape, hint)
    # If the layer is column-parallel, only the first two can happen: its part is the output.
    part, alone = right["given"] @ share["weight"].T, "is this rank's part alone"
    twice = "Add the bias after the sum: every rank adds it."
    likely = {
        f"has the bias {times} times": (output + (times - 1) * bias, twice)
        for times in range(2, tp + 1)
    } | {
        "has no bias": (output - bias, "Add it once, after any sum."),
        alone: (part + bias, "Sum the parts over the group."),
        f"{alone}, without bias": (part, "Sum over the group, then add the bias."),
    }
    hint = "Multiply; if row-parallel, sum over the group; add the bias."
    wrong = "is not the layer's"
    said = f"{where} the output"
    judge.expect(got.dtype == output.dtype, f"{said} is {got.dtype}", output.dtype)
    judge.expect_close(got, output, said, likely, otherwise=wrong, hint=hint, **TOLERANCES)
    got, gradient = sent["grad"], right["grad"]
    hint = "Compute with x itself: no detach(), no .data."
    judge.expect(got is not None, f"{where} the input got no gradient", hint=hint)
    share_alone = right["arrived"] @ share["weight"]
    times = "Something is summed that every rank has whole already."
    adds = "Every rank used all of x: their gradients add up."
    likely = {
        f"is {tp} times the layer's": (tp * gradient, times),
        "is this rank's share alone": (share_alone, adds),
    }
    said = f"{where} the gradient of the input"
    hint = "Column-parallel: copy_to_ranks before the product. Row-parallel: nothing before it."
    judge.expect_close(got, gradient, said, likely, otherwise=wrong, hint=hint, **TOLERANCES)


@exercise
def collectives(answer: Callable[[], Any], result: labkit.RunResult) -> Verdict:
    """Exercise 7: how often each collective runs along each axis, as ``{"tp/all_reduce": 5}``.

    A run of two_dim measured the right counts; raise ValueError if it has none by axis.
    """
    counts = [name for name in result.summary() if "/" in name and name.endswith("_count")]
    measured = {name.removesuffix("_count"): int(result.value(name)) for name in counts}
    if not measured:
        rule = "take a run of two_dim that measures"
        raise ValueError(f"this run counted no collective along an axis: {rule}")
    found = judge.call_answer(answer)
    said = f"{judge.answer_name(answer)}() gave {judge.value_text(found)}"
    judge.expect(isinstance(found, Mapping), f"{said}, not a dict such as {{'tp/all_reduce': 1}}")
    for name in found:
        known = isinstance(name, str) and name.split("/")[0] in ("tp", "data")
        hint = "A key is an axis, tp or data, and a collective, with a / between: 'tp/all_reduce'."
        judge.expect(known, f"the key {judge.value_text(name)} names no axis", hint=hint)
    # Names that only one of the two has are judged too, as a count of 0.
    for name in [*found, *measured]:
        mine, counted = found.get(name, 0), measured.get(name, 0)
        is_right = isinstance(mine, Integral) and mine == counted
        hint = COUNT_HINTS.get(name) or COUNT_HINTS[name.split("/")[0]]
        said, expected = f"{name}: you say {judge.value_text(mine)}", "which the ranks counted"
        judge.expect(is_right, said, f"{counted}, {expected}", hint)
    seen = ", ".join(f"{count} {name}" for name, count in sorted(measured.items()))
    return judge.passing_verdict(f"{seen}, as counted")


@exercise
def message_share(answer: Callable[..., float]) -> Verdict:
    """Exercise 8: time of tp's messages over that of computing, with the arguments of theory's."""
    pair = "Two all-reduces for a pair, forward and backward, of 2 (tp - 1) / tp of their bytes."
    cases = [
        (4, 2, 24.0, 1.0, 2, pair),
        (4, 4, 24.0, 1.0, 2, "With more ranks each computes less, and sends more."),
        (4, 4, 24.0, 2.0, 4, "Bytes over bandwidth: count number_bytes for each number."),
        (8, 2, 24.0, 1.0, 2, "A wider pair computes more, and sends the same."),
        (8, 1, 24.0, 1.0, 2, "One rank sends nothing."),
    ]
    return judge.judge_cases(answer, theory.message_share, cases)


@exercise
def block_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 9: a plan for ``Block``, attention and gated MLP, on real ranks."""
    passed = "every matrix shared out, four all-reduces along tp"

    def enough(tp: int) -> tuple[int, int]:
        return 4, 4 * ACTIVATION_BYTES

    return _judge_plan(answer, "block", timeout_s, passed, enough)


@exercise
def words_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 10: a plan for ``Words``, an embedding and the last layer, on real ranks."""
    passed = "output and gradients, and both tables shared out"
    return _judge_plan(answer, "words", timeout_s, passed)


@exercise
def stack_plan(answer: Callable[[], Any], timeout_s: float = 60) -> Verdict:
    """Exercise 11: a plan for ``MLPStack`` that shards the sequence between the MLPs."""
    passed = "output and gradients, every matrix and the sequence shared out"

    # Eight sums of five all-reduces become a reduce-scatter and an all-gather of a rank's tokens.
    def enough(tp: int) -> tuple[int, int]:
        return 9, 5 * ACTIVATION_BYTES + 4 * ACTIVATION_BYTES // tp

    return _judge_plan(answer, "stack", timeout_s, passed, enough)


def _judge_plan(
    answer: Callable[[], Any],
    model: str,
    timeout_s: float,
    passed: str,
    most_sent: Callable[[int], tuple[int, int]] | None = None,
) -> Verdict:
    """Train with the plan on ranks and on one device, and compare: the output first.

    ``most_sent`` returns the calls and bytes along ``tp`` that are enough for that many ranks.
    """

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        data, tp = MESH_SHAPES[ranks]
        outputs, gradients = _one_device_step(model, data)
        # A wrong layout often stops the backward pass; the output shows the mistake more plainly.
        if "output" in sent:
            _judge_plan_output(sent["output"], outputs[sent["data"]])
        if "error" in sent:
            said = f"the model does not run with this plan: {_stop_place(sent)}"
            raise judge.WrongAnswer(said, hint=f"PyTorch says: {sent['error']}")
        hint = "A layout in the plan says something about a tensor that is not so."
        _judge_gradients(sent["gradients"], gradients, hint)
        _judge_plan_memory(sent["held"], gradients)
        # The stack's exercise is about the sequence between its MLPs.
        if model == "stack":
            _judge_sequence(sent["between"]["layers.0"][1], tp)
        if most_sent:
            _judge_plan_traffic(sent["sent"], *most_sent(tp))

    # Ranks with different plans wait for each other.
    waiting = "is the plan the same on all of them?"
    _on_meshes(answer, judge=judge_rank, timeout_s=timeout_s, waiting=waiting, what=model)
    return judge.passing_verdict(f"equal to one device on {MESHES_TEXT} ranks, {passed}")


def _one_device_step(model: str, data: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return one device's outputs for each of ``data`` lines of ranks, and its gradients."""
    reference = ranks_two_dim.make_exercise_model(model)
    lines = [reference.get_input(ranks_two_dim.CPU, seed) for seed in range(data)]
    # Ranks along data share the mean loss, so one device takes all their samples.
    outputs = [reference(*line) for line in lines]
    for line, output in zip(lines, outputs, strict=True):
        (reference.get_loss(line, output) / data).backward()
    named = reference.named_parameters()
    return outputs, {name: each.grad for name, each in named if each.grad is not None}


def _judge_plan_output(output: Tensor, right: Tensor) -> None:
    said, shape = f"the output has shape {[*output.shape]}", f"{[*right.shape]}, as on one device"
    hint = "input_layouts: how a tensor is laid out when it comes; output_layouts: leaves."
    judge.expect(output.shape == right.shape, said, shape, hint)
    wrong = "is not one device's, and nothing has raised an error"
    hint = "Is every part added up before it is used as the whole?"
    judge.expect_close(output, right, "the output", {}, wrong, hint=hint, **TOLERANCES)


def _judge_plan_memory(held: Mapping[str, int], gradients: Mapping[str, Tensor]) -> None:
    # A plan that names no layer computes the right thing, and saves no memory.
    matrices = {name: each.numel() for name, each in gradients.items() if each.ndim > 1}
    if whole := [name for name, elements in matrices.items() if held[name] == elements]:
        said = f"every rank holds all of {', '.join(whole)}: nothing is shared out there"
        hint = "Every layer is named in the plan, as a column- or a row-parallel one."
        raise judge.WrongAnswer(said, hint=hint)


def _judge_plan_traffic(sent: Totals, most_calls: int, most_bytes: int) -> None:
    # FSDP's own are along data.
    along = {name: each for name, each in sent.items() if not name.startswith("data/")}
    calls, size = (sum(column) for column in zip((0, 0), *along.values(), strict=True))
    said = f"the result is right, but a step sends more than it needs to: {traffic_text(along)}"
    hint = "Between the two layers of a pair nothing need be gathered."
    wants = f"at most {most_calls} calls with {most_bytes:,} bytes along tp"
    judge.expect(calls <= most_calls and size <= most_bytes, said, wants, hint)


def _judge_sequence(tokens_between: int, tp: int) -> None:
    tokens = ranks_two_dim.TOKENS
    if tokens_between == tokens:
        said = f"all is right, but between the MLPs every rank holds all {tokens} tokens"
        hint = "The first MLP's result leaves as Shard(1), and comes so into the second."
        raise judge.WrongAnswer(said, expected=str(tokens // tp), hint=hint)


def _stop_place(sent: Mapping[str, Any]) -> str:
    """Say in which layer a model stopped."""
    if not sent["entered"]:
        return "before any linear layer"
    name, got, whole = sent["entered"]
    # Torch names shapes of matrices, and no layer.
    if "same reduction dim" in sent["error"] or "mat1 and mat2" in sent["error"]:
        seen, wants = "whole", "a rowwise layer expects cut ones"
        if got < whole:
            seen, wants = "cut", "a colwise layer expects whole ones"
        return f"`{name}` receives {seen} inputs, {got} of {whole} features, and {wants}"
    if "must match the size" in sent["error"]:
        return f"after `{name}`, a cut tensor meets a whole one"
    return f"at or after `{name}`"


def _judge_gradients(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], hint: str, where: str = ""
) -> None:
    """Expect these gradients; name the wrong ones and their commonest difference."""
    differences = {name: _gradient_difference(got[name], each) for name, each in expected.items()}
    wrong = [name for name, difference in differences.items() if difference]
    if wrong:
        which = ", ".join(wrong[:2]) + (f" and of {len(wrong) - 2} more" if len(wrong) > 2 else "")
        most = Counter(differences[name] for name in wrong).most_common(1)[0][0]
        said = f"{where}the output is right, but the gradient of {which} {most}"
        raise judge.WrongAnswer(said, hint=hint)


def _gradient_difference(got: Tensor | None, expected: Tensor) -> str:
    """Say what a wrong gradient looks like; "" for a right one."""
    if got is None:
        return "is missing"
    if got.shape != expected.shape:
        return f"has shape {[*got.shape]}, not {[*expected.shape]}"
    if judge.is_tensor_close(got, expected, **TOLERANCES):
        return ""
    # The factor that fits best; it is the mistake if nothing is left over.
    ratio = (got * expected).sum() / expected.square().sum()
    multiple = judge.is_tensor_close(got, ratio * expected, rtol=1e-3, atol=1e-6)
    return f"is {ratio:.3g} times one device's" if multiple else "is not one device's"
