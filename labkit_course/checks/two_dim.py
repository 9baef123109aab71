"""Checks of lab 5, tensor parallelism and a mesh of two axes."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from labkit.theory import two_dim as theory
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.on_ranks import judge_on_ranks
from labkit_course.checks.ranks import two_dim as ranks_two_dim
from labkit_course.checks.ranks.two_dim import MESH_SHAPES, rank_tensors
from labkit_course.checks.traffic import Totals, expect_traffic, traffic_text

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
CUT_HINT = "The second layer is cut by columns of its weight, dim 1; its bias stays whole."


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
            judge.expect(part.dtype == x.dtype, f"{asked} gave {part.dtype}", x.dtype)
        cuts = [*zip(first.chunk(ranks), second.chunk(ranks, dim=1), strict=True)]
        right = torch.stack([relu(x @ rows.T) @ columns.T for rows, columns in cuts])
        given = torch.stack([*found])
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
def pair_ends(copy: Any, total: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 2: autograd functions of (x, group) where x enters a pair and where parts leave it.

    ``copy`` returns x, and sums its gradient over the group; ``total`` does the reverse.
    """
    answers = dict(zip(ranks_two_dim.ENDS, (copy, total), strict=True))
    for answer in answers.values():
        is_function = isinstance(answer, type) and issubclass(answer, torch.autograd.Function)
        said = f"{judge.value_text(answer)} is no torch.autograd.Function"
        judge.expect(is_function, said, hint="Hand over the class, by its name.")
    empty = {what: _has_empty_methods(answer) for what, answer in answers.items()}
    if all(empty.values()):
        raise judge.NotAttempted

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        for what, answer in answers.items():
            if not empty[what]:
                _judge_end(answer.__name__, what, ranks, index, sent[what])

    _on_groups(copy, total, judge=judge_rank, timeout_s=timeout_s, name_rank=True, what="ends")
    if any(empty.values()):
        done, left = sorted(answers, key=empty.__getitem__)
        said = f"{answers[done].__name__} is right, and {answers[left].__name__} is still empty"
        return Verdict("not attempted", said)
    passed = "one all-reduce backward where x enters, one forward where the parts leave"
    return judge.passing_verdict(f"{passed}, on {MESHES_TEXT} ranks")


def _has_empty_methods(answer: type) -> bool:
    """Tell whether no method of a class does anything, beyond a call of the base's ``__init__``."""
    methods = [getattr(answer, name) for name, each in vars(answer).items() if callable(each)]
    codes = [each.__code__ for each in methods if hasattr(each, "__code__")]
    return all(
        judge.is_empty_code(code) or {*code.co_names} <= {"super", "__init__"} for code in codes
    )


def _judge_end(name: str, what: str, ranks: int, index: int, sent: dict[str, Any]) -> None:
    """Compare what an autograd.Function returns in both passes, as ``FUNCTION_RULES`` say."""
    judge.expect_tensor(sent["got"], rank_tensors(index)[0], name=name)
    missing = "The first value that backward returns is the gradient."
    judge.expect(sent["grad"] is not None, f"with {name}, x got no gradient", hint=missing)
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
        said = f"{name}.{when} returned"
        how: dict[str, Any] = {"expected": rule, "hint": hint}
        judge.expect_close(sent[got], right, said, likely, other, **how, **TOLERANCES)
        said = f"{name}.{when} changed the tensor that it was given"
        hint = "It may be used elsewhere: clone it, then all-reduce the clone."
        judge.expect(judge.is_tensor_close(sent[given], own), said, hint=hint)
        said = f"{name}.{when} returned the right numbers, but sends"
        usual = {"tp/all_reduce": [1, own.nbytes]} if rule == SUM else {}
        expect_traffic(sent["sent"][when], usual, said, "A sum is one all-reduce.")


@exercise
def row_parallel(answer: Any, timeout_s: float = 30) -> Verdict:
    """Exercise 3: a rank's share of the second layer, from (layer, group), on real ranks."""
    # A class is never empty for judge_on_ranks, which looks at the code of functions.
    if isinstance(answer, type) and _has_empty_methods(answer):
        raise judge.NotAttempted

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        where, right = f"on rank {index},", sent["right"]
        _, tp = MESH_SHAPES[ranks]
        # A wrong share on one rank makes the results of others wrong, so all are judged first.
        for rank, held in enumerate(sent["parameters"]):
            _judge_parameters(held, right["parameters"], rank, tp)
        if "error" in sent:
            said = f"{where} forward raised {sent['error']}"
            raise judge.WrongAnswer(said, hint=CUT_HINT)
        _judge_passes(where, sent, right, right["parameters"][index], tp)
        hint = "Add the bias last, after the sum, on every rank."
        bias, whole = sent["gradients"]["bias"], right["gradients"]["bias"]
        if bias is not None and judge.is_tensor_close(tp * bias, whole, **TOLERANCES):
            hint = f"Each rank used 1/{tp} of the bias. Add the whole bias, after the sum."
        _judge_gradients(sent["gradients"], right["gradients"], hint, where=f"{where} ")
        for when in ("forward", "backward"):
            said = f"the numbers are right, but in the {when} pass rank {index} sends"
            hint = "This layer needs one all-reduce, in the forward pass."
            expect_traffic(sent[when], right[when], said, hint)

    _on_groups(answer, judge=judge_rank, timeout_s=timeout_s, what="row")
    passed = f"output and gradients are the whole layer's on {MESHES_TEXT} ranks"
    return judge.passing_verdict(f"{passed}, with one all-reduce forward, none backward")


def _judge_parameters(held: Any, shares: list[dict[str, Tensor]], index: int, tp: int) -> None:
    """Expect a rank's share of weight and bias, and nothing else; text names another type."""
    where = f"on rank {index},"
    said = f"{where} what you made is a {held}, no nn.Module"
    judge.expect(not isinstance(held, str), said, hint="Hand over the class.")
    said = f"{where} the parameters are {', '.join(held) or 'none'}"
    hint = "Set self.weight and self.bias to an nn.Parameter each."
    judge.expect(held.keys() == shares[index].keys(), said, "weight, bias", hint)
    for name, right in shares[index].items():
        said, shape = f"{where} the {name} has shape {[*held[name].shape]}", [*right.shape]
        judge.expect([*held[name].shape] == shape, said, shape, CUT_HINT)
        likely: dict[str, Any]
        if name == "bias":
            likely = {f"the layer's divided by {tp}": right / tp}
            wants, other = "the layer's", "not the layer's"
            hint = "Keep it whole on every rank, and add it once, after the sum."
        else:
            likely = {
                f"the share of place {place} in the group": share[name]
                for place, share in enumerate(shares[:tp])
            }
            wants, other = f"place {index % tp}", "no share of the layer's"
            hint = "Take part dist.get_rank(group), its place there."
        got, said = held[name], f"{where} the {name} is"
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
    hint = "It returns the whole output, not this rank's features."
    judge.expect([*got.shape] == shape, said, shape, hint)
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
    hint = "Multiply, sum over the group, add the bias."
    wrong = "is not the layer's"
    said = f"{where} the output"
    judge.expect(got.dtype == output.dtype, f"{said} is {got.dtype}", output.dtype)
    judge.expect_close(got, output, said, likely, otherwise=wrong, hint=hint, **TOLERANCES)
    got, gradient = sent["grad"], right["grad"]
    hint = "Compute with x itself: no detach(), no .data."
    judge.expect(got is not None, f"{where} the input got no gradient", hint=hint)
    times = "Something is summed that every rank has whole already."
    likely = {f"is {tp} times the layer's": (tp * gradient, times)}
    said = f"{where} the gradient of the input"
    hint = "Use sum_over_ranks on the product, and nothing before it."
    judge.expect_close(got, gradient, said, likely, otherwise=wrong, hint=hint, **TOLERANCES)


@exercise
def message_share(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: time of tp's messages over that of computing, with the arguments of theory's."""
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
    """Exercise 4: a plan for a transformer block, attention and gated MLP, on real ranks."""
    passed = "every matrix shared out"
    calls = theory.BLOCK_SUMS

    def enough(tp: int) -> tuple[int, int]:
        return calls, calls * ACTIVATION_BYTES

    return judge_plan(answer, "block", timeout_s, passed, enough)


def judge_plan(
    answer: Callable[[], Any],
    model: str,
    timeout_s: float,
    passed: str,
    most_sent: Callable[[int], tuple[int, int]] | None = None,
    judge_rest: Callable[[dict[str, Any], int], None] | None = None,
    hint: str = "A layout in the plan says something about a tensor that is not so.",
) -> Verdict:
    """Train with the plan on ranks and on one device, and compare: the output first.

    ``most_sent`` returns the calls and bytes along ``tp`` that are enough for that many ranks;
    ``judge_rest`` looks at what a rank returned, before what it sent; ``hint`` is shown for wrong
    gradients.
    """

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        data, tp = MESH_SHAPES[ranks]
        outputs, gradients = _one_device_step(model, data)
        _judge_plan_step(sent, outputs[sent["data"]])
        _judge_gradients(sent["gradients"], gradients, hint)
        _judge_plan_memory(sent["held"], gradients)
        if judge_rest:
            judge_rest(sent, tp)
        if most_sent:
            _judge_plan_traffic(sent["sent"], *most_sent(tp))

    # Ranks with different plans wait for each other.
    waiting = "is the plan the same on all of them?"
    _on_meshes(answer, judge=judge_rank, timeout_s=timeout_s, waiting=waiting, what=model)
    return judge.passing_verdict(f"equal to one device on {MESHES_TEXT} ranks, {passed}")


def wrong_gradients(answer: Callable[[], Any], model: str, timeout_s: float = 60) -> list[str]:
    """Train a step with a plan on 2 x 2 ranks; name the gradients that are not one device's.

    Raise WrongAnswer if the model does not run, or its output is not one device's either.
    """
    found: set[str] = set()

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        outputs, right = _one_device_step(model, MESH_SHAPES[ranks][0])
        _judge_plan_step(sent, outputs[sent["data"]])
        got = sent["gradients"]
        found.update(name for name, each in right.items() if _gradient_difference(got[name], each))

    waiting = "is the plan the same on all of them?"
    how: dict[str, Any] = {"sizes": (4,), "timeout_s": timeout_s, "waiting": waiting}
    judge_on_ranks("two_dim", answer, judge=judge_rank, what=model, **how)
    return sorted(found)


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


def _judge_plan_step(sent: Mapping[str, Any], right: Tensor) -> None:
    # A wrong layout often stops the backward pass; the output shows the mistake more plainly.
    if "output" in sent:
        _judge_plan_output(sent["output"], right)
    if "error" in sent:
        said = f"the model does not run with this plan: {_stop_place(sent)}"
        raise judge.WrongAnswer(said, hint=f"PyTorch says: {sent['error']}")


def _judge_plan_output(output: Tensor, right: Tensor) -> None:
    said, shape = f"the output has shape {[*output.shape]}", f"{[*right.shape]}, as on one device"
    hint = "input_layouts: how a tensor is laid out when it comes; output_layouts: leaves."
    judge.expect(output.shape == right.shape, said, shape, hint)
    wrong = "is not one device's, and nothing has raised an error"
    hint = "Is every part added up before it is used as the whole?"
    judge.expect_close(output, right, "the output", {}, wrong, hint=hint, **TOLERANCES)


def _judge_plan_memory(held: Mapping[str, list[int]], gradients: Mapping[str, Tensor]) -> None:
    # A plan that names no layer computes the right thing, and saves no memory.
    matrices = {name: [*each.shape] for name, each in gradients.items() if each.ndim > 1}
    if whole := [name for name, shape in matrices.items() if held[name] == shape]:
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
        shown = len(wrong) if len(wrong) < 4 else 2
        rest = f" and of {len(wrong) - shown} more" if shown < len(wrong) else ""
        which = ", ".join(wrong[:shown]) + rest
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
    ratio = judge.projection(got, expected)
    multiple = judge.is_tensor_close(got, ratio * expected, rtol=1e-3, atol=1e-6)
    return f"is {ratio:.3g} times one device's" if multiple else "is not one device's"
