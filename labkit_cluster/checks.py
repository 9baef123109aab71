"""Checks of lab 8, beyond one machine."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.checks.judge import (
    Verdict,
    WrongAnswer,
    answer_name,
    call_answer,
    exercise,
    passing_verdict,
    value_text,
)
from labkit_cluster import theory

LAB = "hosts"
TOLERANCE = 1e-6


@exercise
def place_of(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: (index of the host, local rank) of a rank, from (rank, nproc)."""
    for rank, nproc in ((0, 4), (3, 4), (4, 4), (11, 4), (5, 1), (13, 8)):
        right = theory.host_and_local_rank(rank, nproc)
        asked = f"{answer_name(answer)}({rank}, nproc={nproc})"
        found = call_answer(answer, rank, nproc, in_words=asked)
        if found is None or (tuple(found) if isinstance(found, list | tuple) else found) != right:
            said = f"{asked} gave {value_text(found)}"
            if isinstance(found, list | tuple) and tuple(found) == right[::-1]:
                raise WrongAnswer(
                    f"{said}: the local rank first",
                    expected=f"{right}",
                    hint="The host comes first.",
                )
            raise WrongAnswer(
                said,
                expected=f"{right}",
                hint="Ranks 0 to nproc - 1 are on host 0. Count on.",
            )
    return passing_verdict("6 ranks placed")


@exercise
def leaves_a_host(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: bytes that leave one host in a step, from (parameter_bytes, hosts, nproc,
    hybrid).
    """
    for size, hosts, nproc, hybrid in (
        (1200.0, 2, 2, False),
        (1200.0, 2, 2, True),
        (1200.0, 3, 4, True),
        (1200.0, 3, 4, False),
    ):
        right = theory.host_egress_bytes(size, hosts, nproc, hybrid=hybrid)
        asked = f"{answer_name(answer)}({size:g}, hosts={hosts}, nproc={nproc}, hybrid={hybrid})"
        found = call_answer(answer, size, hosts, nproc, hybrid, in_words=asked)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected="a number of bytes")
        if abs(found - right) <= TOLERANCE * right:
            continue
        ranks = hosts * nproc
        likely = {
            3 * size: "A ring of n ranks sends (n - 1) / n of the tensor for each of the three.",
            2 * (ranks - 1) / ranks * size: (
                "Parameters are gathered twice: before the forward and the backward pass."
            ),
            (ranks - 1) / ranks * size: "That is one of the three collectives.",
            2
            * (hosts - 1)
            / hosts
            * size
            / nproc: "Each of the host's ranks reduces a shard of its own.",
            2
            * (ranks - 1)
            / ranks
            * size
            * nproc: "Only one rank of a host sends to another host.",
            2 * size: "A ring of n ranks sends 2 (n - 1) / n of the tensor for an all-reduce.",
        }
        hint = next(
            (text for value, text in likely.items() if abs(found - value) <= TOLERANCE * value), ""
        )
        way = "HSDP" if hybrid else "FSDP over all ranks"
        raise WrongAnswer(f"with {way}, {asked} gave {found:g}", expected=f"{right:g}", hint=hint)
    return passing_verdict("4 cases agree")


@exercise
def newest_complete(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the newest checkpoint in a folder that was written to its end, or None."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if (
            found := call_answer(
                answer, folder, in_words=f"{answer_name(answer)} of an empty folder"
            )
        ) is not None:
            raise WrongAnswer(
                f"of an empty folder it gave {value_text(found)}",
                expected="None: begin anew",
            )
        for step in (9, 10, 11):
            (folder / f"step_{step}").mkdir()
            (folder / f"step_{step}" / "__0_0.distcp").write_bytes(b"a shard")
            if step < 11:
                (folder / f"step_{step}" / ".metadata").write_bytes(b"the table")
        asked = f"{answer_name(answer)} of step_9, step_10, and step_11 without .metadata"
        found = call_answer(answer, folder, in_words=asked)
        name = Path(found).name if isinstance(found, str | Path) else ""
        if name == "step_10" and (folder / name) == Path(found):
            return passing_verdict("the newest of two complete ones, beside one that was cut off")
        if name == "step_11":
            hint = "A save writes .metadata last. Without it the save was cut off."
            raise WrongAnswer("it gave step_11, which was cut off", expected="step_10", hint=hint)
        if name == "step_9":
            hint = (
                "As text, 'step_9' comes after 'step_10'. Compare numbers:"
                " int(path.name.split('_')[1])."
            )
            raise WrongAnswer("it gave step_9, and step_10 is newer", expected="step_10", hint=hint)
        if name == "step_10" or name == ".metadata":
            raise WrongAnswer(
                f"it gave {value_text(found)}",
                expected="the path of the folder step_10, inside folder",
            )
        raise WrongAnswer(f"it gave {value_text(found)}", expected="the folder step_10")


@exercise
def interval_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: seconds between two saves, from (save_s, between_failures_s), so that the least
    time is lost.
    """
    for save_s, between_s in ((2.0, 10_000.0), (60.0, 11_136.0), (1.0, 86_400.0)):
        right = theory.checkpoint_interval_s(save_s, between_s)
        asked = f"{answer_name(answer)}({save_s:g}, {between_s:g})"
        found = call_answer(answer, save_s, between_s, in_words=asked)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise WrongAnswer(f"{asked} gave {value_text(found)}", expected="a number of seconds")
        if abs(found - right) <= TOLERANCE * right:
            continue
        least, lost = (
            (theory.checkpoint_overhead_share(each, save_s, between_s) for each in (right, found))
            if found > 0
            else (0, 0)
        )
        likely = {
            (save_s * between_s)
            ** 0.5: "A failure costs half an interval on average, not a whole one.",
            (2 * save_s / between_s) ** 0.5: "That is the part of the time which is lost, at best.",
            2 * save_s * between_s: (
                "Set the derivative to zero, and solve for the interval itself."
            ),
        }
        hint = next(
            (text for value, text in likely.items() if abs(found - value) <= TOLERANCE * value), ""
        )
        cost = f": that loses {lost:.1%} of the time" if found > 0 else ""
        best = f", which loses {least:.1%}" if found > 0 else ""
        raise WrongAnswer(
            f"{asked} gave {found:g} s{cost}", expected=f"{right:g} s{best}", hint=hint
        )
    return passing_verdict("3 cases agree")
