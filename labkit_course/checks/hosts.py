"""Checks of lab 8, beyond one machine."""

import tempfile
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from labkit_cluster import theory
from labkit_course.checks import judge
from labkit_course.checks.judge import Verdict, exercise

LAB = "hosts"
# Any order of the operations is right, so rounding may differ.
TOLERANCES = {"rtol": 1e-9, "atol": 0.0}


@exercise
def place_of(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: (index of the host, local rank) of a rank, from (rank, nproc)."""
    for rank, nproc in ((0, 4), (3, 4), (4, 4), (11, 4), (5, 1), (13, 8)):
        right = theory.host_and_local_rank(rank, nproc)
        found = judge.call_answer(answer, rank, nproc=nproc)
        said = f"{judge.call_text(answer, rank, nproc=nproc)} gave {judge.value_text(found)}"
        # A list of two is as good as a tuple.
        is_pair = isinstance(found, list | tuple) and len(found) == 2
        judge.expect(is_pair, said, right, "Return two numbers: the host, and the local rank.")
        place = tuple(found)
        is_reversed = place == right[::-1] != right
        judge.expect(not is_reversed, f"{said}: the local rank first", right, "The host is first.")
        judge.expect(place == right, said, right, "Ranks 0 to nproc - 1 are on host 0. Count on.")
    return judge.passing_verdict("6 ranks placed")


@exercise
def leaves_a_host(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: bytes out of a host in a step, from (parameter_bytes, hosts, nproc, hybrid)."""
    size, cases = 1200.0, [(2, 2, False), (2, 2, True), (3, 4, True), (3, 4, False)]
    for hosts, nproc, hybrid in cases:
        right = theory.host_egress_bytes(size, hosts, nproc, hybrid=hybrid)
        asked = judge.call_text(answer, size, hosts=hosts, nproc=nproc, hybrid=hybrid)
        found = judge.call_answer(answer, size, hosts, nproc, hybrid, in_words=asked)
        way = "HSDP" if hybrid else "FSDP over all ranks"
        said = f"with {way}, {asked} gave {judge.value_text(found)}"
        judge.expect(isinstance(found, Real), said, "a number of bytes")
        # The parts of a tensor that leave a rank in a ring of all ranks, and in one of the hosts.
        ring, between = 1 - 1 / (hosts * nproc), 1 - 1 / hosts
        likely = {
            "A ring of n ranks sends (n - 1) / n of the tensor for each of the three.": 3 * size,
            "Parameters are gathered twice: before forward and before backward.": 2 * ring * size,
            "That is one of the three collectives.": ring * size,
            "Each of the host's ranks reduces a shard of its own.": 2 * between * size / nproc,
            "Only one rank of a host sends to another host.": 2 * ring * size * nproc,
            "A ring of n ranks sends 2 (n - 1) / n of the tensor for an all-reduce.": 2 * size,
        }
        is_right = judge.is_close(found, right, **TOLERANCES)
        judge.expect(is_right, said, judge.value_text(right), judge.likely_hint(found, likely))
    return judge.passing_verdict(f"{len(cases)} cases agree")


@exercise
def newest_complete(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the newest checkpoint in a folder that was written to its end, or None."""
    with tempfile.TemporaryDirectory() as place:
        folder, name = Path(place), judge.answer_name(answer)
        found = judge.call_answer(answer, folder, in_words=f"{name} of an empty folder")
        said = f"of an empty folder it gave {judge.value_text(found)}"
        judge.expect(found is None, said, "None: begin at step 0")
        for step in (9, 10, 11):
            checkpoint = folder / f"step_{step}"
            checkpoint.mkdir()
            (checkpoint / "__0_0.distcp").write_bytes(b"a shard")
            # A save that is cut off has shards, but no table of them.
            if step < 11:
                (checkpoint / ".metadata").write_bytes(b"the table")
        asked = f"{name} of step_9, step_10, and step_11 without .metadata"
        found = judge.call_answer(answer, folder, in_words=asked)
    name = Path(found).name if isinstance(found, str | Path) else ""
    cut_off = "A save writes .metadata last. Without it the save was cut off."
    judge.expect(name != "step_11", "it gave step_11, which was cut off", "step_10", cut_off)
    as_text = "As text, 'step_9' comes after 'step_10'. Compare int(path.name.split('_')[1])."
    judge.expect(name != "step_9", "it gave step_9, and step_10 is newer", "step_10", as_text)
    is_right = bool(name) and Path(found) == folder / "step_10"
    judge.expect(is_right, f"it gave {judge.value_text(found)}", "the path of step_10 in folder")
    return judge.passing_verdict("the newest of two complete ones, beside one that was cut off")


@exercise
def interval_s(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: seconds between two saves at which the least time is lost, from (save_s,
    between_failures_s).
    """
    cases = [(2.0, 10_000.0), (60.0, 11_136.0), (1.0, 86_400.0)]
    for save_s, between_s in cases:
        right = theory.checkpoint_interval_s(save_s, between_s)
        asked = judge.call_text(answer, save_s, between_s)
        found = judge.call_answer(answer, save_s, between_s, in_words=asked)
        said = f"{asked} gave {judge.value_text(found)}"
        judge.expect(isinstance(found, Real), said, "a number of seconds")
        expected, product = f"{right:g} s", save_s * between_s
        # The loss of time shows how much, or how little, the mistake matters.
        if found > 0:
            lost, least = (
                f"{theory.checkpoint_overhead_share(each, save_s, between_s):.1%}"
                for each in (found, right)
            )
            said, expected = f"{said}: that loses {lost} of the time", f"{expected}, with {least}"
        likely = {
            "A failure costs half an interval on average, not a whole one.": product**0.5,
            "That is the least part of the time that is lost.": (2 * save_s / between_s) ** 0.5,
            "Set the derivative to zero, and solve for the interval itself.": 2 * product,
        }
        is_right = judge.is_close(found, right, **TOLERANCES)
        judge.expect(is_right, said, expected, judge.likely_hint(found, likely))
    return judge.passing_verdict(f"{len(cases)} cases agree")
