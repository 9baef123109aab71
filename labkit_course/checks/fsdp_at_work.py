"""Checks of lab 2b, FSDP at work."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import labkit
from labkit.runs import private_files
from labkit.theory import fsdp as theory
from labkit.theory.collectives import WIRE_FRACTIONS, collective_wire_bytes
from labkit_course.checks import judge
from labkit_course.checks.fsdp import (
    ERROR_HINTS,
    SIZES_TEXT,
    TOLERANCES,
    collective_count,
    judge_on_group,
    sums_divided_wrongly,
)
from labkit_course.checks.judge import Verdict, exercise
from labkit_course.checks.ranks import fsdp as ranks_fsdp
from labkit_course.checks.traffic import Totals, expect_traffic, traffic_text

SHARED_HINT = (
    "All ranks train the shared part together: sum over the ranks, divide by their number."
)
EXPERT_HINT = "A rank's expert is its own: nothing of it may travel. Divide it by the ranks."
# By the call whose number or bytes are wrong; the root alone is gathered once.
WRAPPING_HINTS = {
    "shard/all_gather": "Units: the tied pair, each block, the root. All of them gather bfloat16.",
    "shard/reduce_scatter": "Does the policy of every unit, the root's too, reduce in float32?",
    "replicate/all_reduce": "Each unit averages its shard over the groups, in float32.",
}
TWICE_WRAPPED = {"already managed by another FSDP": "two units would hold the tied matrix"}
FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
# Ranks that save a training, and those that load it.
SAVING, LOADING = 2, (2, 3)
# A file with more than this share of all bytes was not written in equal parts.
LARGEST_FILE = 0.8
NOT_SAVED = {"Missing key in checkpoint": "what is loaded was not saved, or under another name"}


@exercise
def peak_bytes(answer: Callable[..., float]) -> Verdict:
    """Exercise 1: the peak of the small FSDP without activations, from (units, ranks)."""
    cases = [
        (
            [800],
            1,
            "Parameters, Adam's two numbers, shares, the row, and Gloo's copy: six times 800.",
        ),
        ([800], 2, "Between steps a rank keeps its share of parameters and of Adam's numbers."),
        ([800, 800], 2, "From the last unit to the first, shares of gradients pile up."),
        ([400, 1600, 800], 4, "The units before this one have no gradients yet."),
        ([1600, 400, 1600], 8, "Compare the moment of each unit: the largest is the peak."),
    ]
    return judge.judge_cases(answer, theory.small_fsdp_peak_bytes, cases)


@exercise
def gradients_agree(answer: Callable[..., bool]) -> Verdict:
    """Exercise 2: a test that can fail, from (mine, reference): do gradients by name agree?"""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([2.0, 1e-7, -1.0])
    # One number of twelve is more than 1e-5 of the largest off; one of three is less.
    one, less = torch.zeros_like(weight), torch.tensor([0.0, 0.0, 0.9e-5 * 2])
    one[1, 1] = 1.3e-5 * weight.abs().max()
    nan, infinite = (torch.full_like(weight, value) for value in (torch.nan, torch.inf))

    def named(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"weight": weight, "bias": bias}

    wide = torch.full((3,), 2.0)
    right, small, none = named(weight, bias), named(weight, bias / 1000), dict[str, Tensor]()
    rounding = "Divide the largest difference by the largest reference value, and allow 1e-5."
    compares = "NaN compares as False with everything: ask whether the error is small."
    cancel = "Differences may cancel: take abs()"
    single = "Look at each number: sums, norms and extremes can agree."
    scale = "Each gradient has a scale of its own: the largest value of its reference."
    every, names = "Every name must agree.", "Compare the names first."
    infinite_hint = "inf <= inf is True: ask whether the difference is finite."
    # Words, gradients, their reference, whether they agree, and a hint.
    cases: list[tuple[str, dict[str, Tensor], dict[str, Tensor], bool, str]] = [
        ("the same gradients", named(weight, bias), right, True, "Equal gradients agree."),
        ("them in another order", {"bias": bias, "weight": weight}, right, True, "Go by names."),
        (
            "gradients that rounding moved by 4e-7",
            named(weight, bias + 4e-7),
            right,
            True,
            rounding,
        ),
        ("an error of 0.9e-5 of the largest", named(weight, bias + less), right, True, rounding),
        ("gradients twice as large", named(2 * weight, 2 * bias), right, False, "Compare values."),
        ("one gradient of two half as large", named(weight / 2, bias), right, False, every),
        ("one gradient with the other sign", named(weight, -bias), right, False, cancel),
        ("one gradient off by -1e-3", named(weight, bias - 1e-3), right, False, rounding),
        ("two rows exchanged", named(weight[[0, 2, 1, 3]], bias), right, False, single),
        ("one number of twelve wrong", named(weight + one, bias), right, False, single),
        ("a small gradient off by 1e-6", named(weight, small["bias"] + 1e-6), small, False, scale),
        ("a gradient of NaN", named(nan, bias), right, False, compares),
        ("a gradient of infinity", named(infinite, bias), right, False, scale),
        ("a gradient missing", {"weight": weight}, right, False, names),
        ("a gradient too many", right | {"more": bias}, right, False, names),
        ("a gradient of another name", {"weight": weight, "offset": bias}, right, False, names),
        ("no gradient at all", none, none, False, "A test that compared nothing must not pass."),
        (
            "a gradient of shape (1,) beside one of (3,)",
            named(weight, wide[:1]),
            named(weight, wide),
            False,
            "Broadcasting makes shapes equal: compare the shapes first.",
        ),
        ("a reference of infinity", right, named(infinite, bias), False, infinite_hint),
    ]
    for what, mine, reference, agree, hint in cases:
        asked = f"for {what}, {judge.answer_name(answer)}"
        # The answer may change what it is given.
        given = copy.deepcopy((mine, reference))
        found = judge.call_answer(answer, *given, in_words=asked)
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        said = f"{asked} gave {judge.value_text(found)}"
        judge.expect(isinstance(found, bool), f"{said}, neither True nor False")
        judge.expect(found == agree, said, agree, hint)
    return judge.passing_verdict(f"{len(cases)} cases agree: it can pass, and it can fail")


@exercise
def every_block_wrapped(result: labkit.RunResult, blocks: int) -> Verdict:
    """Tell whether a run of fsdp_wrap with fully_shard made each of its ``blocks`` a unit.

    Raise ValueError if the run keeps parameters after the forward pass.
    """
    if not result.params["reshard_after_forward"]:
        rule = "gathers every unit once: take a run with True"
        raise ValueError(f"reshard_after_forward = False {rule}")
    gathered = collective_count(result, "all_gather")
    reduced = collective_count(result, "reduce_scatter")
    # Gradients of each unit are reduce-scattered once. Parameters are gathered for the forward
    # pass and, except the root's, again for the backward pass.
    units = gathered - reduced
    seen = f"units beside the root: {units} ({gathered} all-gathers less {reduced} reduce-scatters)"
    problem = "More than the blocks was wrapped."
    if units < blocks:
        missing = "One block" if blocks - units == 1 else f"{blocks - units} blocks"
        problem = f"{missing} stayed with the root."
    judge.expect(units == blocks, seen, blocks, problem)
    return judge.passing_verdict(f"{seen}, one for each block")


@exercise
def shard_model(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 3: wrap a language model with tied weights, from (model, group), on real ranks."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        where, group = f"on rank {index},", ranks_fsdp.GROUP
        hint = "What lies in no other unit is the root's: give fully_shard the model, at the end."
        whole = output["whole"]
        judge.expect(not whole, f"{where} {' and '.join(whole[:2])} did not get sharded", hint=hint)
        sizes = {
            name: each.numel() for name, each in ranks_fsdp.SmallLanguageModel().named_parameters()
        }
        for name, kept in output["kept"].items():
            said, right = (
                f"{where} a rank keeps {kept} of the {sizes[name]} of",
                sizes[name] // group,
            )
            hint = "The last axis of the mesh shards, and the one before it replicates."
            judge.expect(kept == right, f"{said} {name}", right, hint)
            kind = output["dtypes"][name]
            hint = "Only what is gathered is bfloat16: leave that to the policy."
            judge.expect(kind == "torch.float32", f"{where} {name} is kept in {kind}", hint=hint)
        first = index // group * group
        neighbours = [*range(first, first + group)]
        said = f"{where} its parameters are shared by ranks {output['group']}"
        judge.expect(output["group"] == neighbours, said, neighbours, "Neighbours make a group.")
        _expect_mean_gradients(ranks, output["gradients"], where)
        for name, calls in wrapped_traffic(ranks).items():
            sent = {name: output["sent"].get(name, [0, 0])}
            said = f"{where} the gradients are right, but a step sends"
            expect_traffic(sent, {name: calls}, said, WRAPPING_HINTS[name])

    how: dict[str, Any] = {"sizes": (4, 2), "hints": ERROR_HINTS | TWICE_WRAPPED}
    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="wrap", **how)
    return judge.passing_verdict("on 4 and 2 ranks: shares, gradients, calls and bytes are right")


def wrapped_traffic(ranks: int) -> dict[str, list[int]]:
    """Return calls and bytes that a step of the wrapped language model hands over, by axis.

    A single group has nobody to average with, and may call or not.
    """
    model, group = ranks_fsdp.SmallLanguageModel(), ranks_fsdp.GROUP
    units = [model.embedding, *model.blocks]
    inner = [sum(each.numel() for each in unit.parameters()) for unit in units]
    root = sum(each.numel() for each in model.norm.parameters())
    # The root stays gathered between the passes.
    gathered = (2 * sum(inner) + root) // group
    count, every = len(inner) + 1, sum(inner) + root
    sent = {
        "shard/all_gather": [2 * len(inner) + 1, BFLOAT16_BYTES * gathered],
        "shard/reduce_scatter": [count, FLOAT32_BYTES * every],
    }
    if ranks > group:
        sent["replicate/all_reduce"] = [count, FLOAT32_BYTES * every // group]
    return sent


def _expect_mean_gradients(ranks: int, gradients: dict[str, Tensor], where: str) -> None:
    """Expect the mean of what the ranks' tokens give on one device that computes in bfloat16."""
    own = []
    for rank in range(ranks):
        model = ranks_fsdp.SmallLanguageModel().bfloat16()
        own.append(ranks_fsdp.language_model_gradients(model, rank))
    for name in own[0]:
        mean = torch.stack([each[name].float() for each in own]).mean(dim=0)
        said = f"{where} the gradient of {name}"
        judge.expect(name in gradients, f"{said} is gone")
        likely = {f"rank {rank}'s alone": each[name].float() for rank, each in enumerate(own)}
        likely["the sum over the ranks"] = ranks * mean
        # Kernels round differently with other numbers of threads.
        near = {"rtol": 0.0, "atol": 0.02 * float(mean.abs().max())}
        hint = "Every parameter belongs to one unit, and all units average over all ranks."
        judge.expect_close(
            gradients[name].float(), mean, f"{said} is", likely, "wrong", hint=hint, **near
        )


@exercise
def saved_training(
    save: Callable[..., None], load: Callable[..., None], timeout_s: float = 30
) -> Verdict:
    """Exercise 4: save on two ranks and load on two and three, from (model, optimizer, folder)."""
    parameters, losses, forgetful = ranks_fsdp.train_alone()

    def judge_saving(ranks: int, index: int, output: dict[str, Any]) -> None:
        files, total = output["files"], sum(output["files"].values())
        judge.expect(files, f"the folder is empty after {judge.answer_name(save)}")
        largest = max(files, key=lambda name: files[name])
        said = f"{largest} holds {files[largest] / total:.0%} of the bytes that {ranks} ranks saved"
        hint = "Let every rank write its own part: no rank has room for all."
        judge.expect(files[largest] < LARGEST_FILE * total, said, "about a rank's share", hint)

    def judge_loading(ranks: int, index: int, output: dict[str, Any]) -> None:
        where = f"on rank {index}, after the load"
        before = dict(ranks_fsdp.training_model(1).named_parameters())
        for name, right in parameters.items():
            hint = "checkpoint.load fills the tensors that it is given. Are they the model's?"
            likely = {"what it was before": before[name].detach()}
            said = f"{where} {name} is"
            judge.expect_close(
                output["parameters"][name], right, said, likely, "wrong", hint=hint, **TOLERANCES
            )
        hint = "A new Adam has no state that a load could fill. Who makes it?"
        likely = {"goes on as with a new Adam": torch.tensor(forgetful)}
        found, right = torch.tensor(output["losses"]), torch.tensor(losses)
        said = f"{where} the parameters are right, but training"
        judge.expect_close(found, right, said, likely, "goes on with other losses", hint=hint)

    for answer in (save, load):
        judge.raise_if_not_attempted(answer)
    how: dict[str, Any] = {"hints": ERROR_HINTS | NOT_SAVED, "timeout_s": timeout_s}
    with private_files.temporary_folder() as folder:
        how["folder"] = str(folder)
        judge_on_group(save, judge=judge_saving, sizes=(SAVING,), what="save", **how)
        judge_on_group(load, judge=judge_loading, sizes=LOADING, what="load", **how)
    seen = f"saved by {SAVING} ranks, loaded by {SIZES_TEXT}"
    return judge.passing_verdict(f"{seen}: they train on with the losses of one device")


@exercise
def expert_gradients(answer: Callable[..., None], timeout_s: float = 30) -> Verdict:
    """Exercise 5: average shared gradients, divide the experts', from (model, experts, ranks)."""

    def judge_rank(ranks: int, index: int, output: dict[str, Any]) -> None:
        models = [ranks_fsdp.make_expert_model(rank) for rank in range(ranks)]
        before = [ranks_fsdp.gradients_by_name(model) for model in models]
        experts, left = ranks_fsdp.expert_names(models[0]), output["gradients"]
        for name, own in before[index].items():
            mean = torch.stack([each[name] for each in before]).mean(dim=0)
            likely = {
                "still this rank's own": own,
                "averaged": mean,
                "summed and not divided": ranks * mean,
                "divided but not summed": own / ranks,
            }
            kind, right, rule, hint = "shared", mean, "the mean over the ranks", SHARED_HINT
            likely |= sums_divided_wrongly(mean, ranks)
            if name in experts:
                kind, right, hint = "expert's", own / ranks, EXPERT_HINT
                rule = "this rank's own, divided by the ranks"
            said = f"on rank {index}, the {kind} gradient of {name}"
            judge.expect(left[name] is not None, f"{said} is gone")
            how: dict[str, Any] = {"expected": rule, "hint": hint}
            judge.expect_close(
                left[name], right, f"{said} is", likely, "wrong", **how, **TOLERANCES
            )
        shared = sum(own.nbytes for name, own in before[index].items() if name not in experts)
        said = f"on rank {index}, the gradients are right, but the rank sends"
        _expect_reduced_once(output["sent"], shared, ranks, said)

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s)
    seen = "shared gradients are the mean, and those of experts their own, divided"
    return judge.passing_verdict(f"as asked on {SIZES_TEXT} ranks: {seen}")


def _expect_reduced_once(sent: Totals, shared: int, ranks: int, said: str) -> None:
    """Expect no more bytes on the wire than an all-reduce of ``shared`` bytes sends in a ring."""
    # A reduce-scatter may have to pad each tensor.
    padded = shared + FLOAT32_BYTES * (ranks - 1) * sent.get("reduce_scatter", (0, 0))[0]
    on_wire = sum(
        collective_wire_bytes(name, size, ranks) if name in WIRE_FRACTIONS else size
        for name, (_, size) in sent.items()
    )
    is_least = on_wire <= collective_wire_bytes("all_reduce", padded, ranks)
    right = f"an all-reduce of the {shared:,} bytes of shared gradients, or no more than it sends"
    hint = "All-reduce each shared gradient once. Of an expert's nothing may travel."
    judge.expect(is_least, f"{said} {traffic_text(sent)}", right, hint)
