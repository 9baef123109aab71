"""Checks of lab 0b, ranks at work."""

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.theory.collectives import AlphaBeta, ring_s
from labkit_course.checks import judge
from labkit_course.checks.collectives import FLOAT32_BYTES, SIZES_TEXT, judge_on_group, judge_sum
from labkit_course.checks.judge import Verdict, exercise, expect, passing_verdict, value_text
from labkit_course.checks.ranks import collectives as tasks


@exercise
def means_by_host(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 1: the mean over a host, then over all ranks, on 2 and 3 hosts of 2 real ranks."""
    size, (length,) = tasks.RANKS_PER_HOST, tasks.VECTOR_LENGTHS["hosts"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        given, first, hosts = tasks.rank_vectors(length, ranks), index - index % size, ranks // size
        host, total, got = given[first : first + size].mean(0), given.mean(0), sent["got"]
        kinds = " and ".join(each if isinstance(each, str) else "a tensor" for each in got)
        expect(len(got) == 2, f"the function returned {kinds}", "two tensors")
        found = [judge.expect_tensor(each, total, name="one of both") for each in got]
        strided = [other for other in range(ranks) if other % hosts == index % hosts]
        hint = "Ranks of a host follow each other: 0 and 1, then 2 and 3."
        likely: dict[str, Any] = {
            "this rank's own vector": given[index],
            "the sum over the host": (host * size, "Divide by per_host."),
            "the mean over all ranks": (total, "The second all-reduce needs a tensor of its own."),
            "the sum over all ranks": (total * ranks, "Only the ranks of this host belong to it."),
            f"the mean of ranks {strided}": (given[strided].mean(0), hint),
        }
        said, none = "the host's mean is", f"not that of ranks {first} to {first + size - 1}"
        judge.expect_close(found[0], host, said, likely, none, "", hint)
        hint = "How many host means does the second all-reduce add up?"
        likely = {
            "the mean over the host": (host, "It has to be all-reduced across hosts, too."),
            "the sum of the hosts' means": (total * hosts, hint),
            "the sum over all ranks": (total * ranks, hint),
        }
        said, none = "the second mean is", "not the mean over all ranks"
        judge.expect_close(found[1], total, said, likely, none, "", hint)
        is_whole = sent["in_world"] or sent["largest"] == ranks
        said = "the means are right, but a group of all ranks was used"
        right = f"groups of {size} and of {hosts} ranks"
        expect(not is_whole, said, right, "Across hosts, one rank of each is enough.")

    judge_on_group(
        answer,
        judge=judge_rank,
        sizes=(2 * size, 3 * size),
        waiting="does every rank make every group, in the same order?",
        timeout_s=timeout_s,
        what="hosts",
    )
    return passing_verdict(f"right on 2 and on 3 hosts of {size} ranks")


def right_all_reduce_in_two(mine: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the sum over all ranks, by a reduce-scatter and an all-gather."""
    parts = list(mine.chunk(ranks))
    part = torch.empty_like(parts[rank])
    dist.reduce_scatter(part, parts)
    sums = [torch.empty_like(part) for _ in parts]
    dist.all_gather(sums, part)
    return torch.cat(sums)


@exercise
def all_reduce_in_two(answer: Callable[..., Any], timeout_s: float = 30) -> Verdict:
    """Exercise 2: an all-reduce made of a reduce-scatter and an all-gather, on 4 real ranks."""
    (length,) = tasks.VECTOR_LENGTHS["in_two"]

    def judge_rank(ranks: int, index: int, sent: dict[str, Any]) -> None:
        # The whole vector for the reduce-scatter, then one part for the all-gather.
        least = length * FLOAT32_BYTES * (ranks + 1) // ranks
        judge_sum(sent["got"][0], sent["gloo"][0], ranks, index)
        used = {name for name, size in sent["handed"].items() if size}
        said = f"the sums are right, made by {', '.join(sorted(used)) or 'no collective'}"
        right = "reduce_scatter and all_gather"
        expect(used == {"reduce_scatter", "all_gather"}, said, right, "One of each.")
        handed = sum(sent["handed"].values())
        said = f"the sums are right, but {handed} bytes were handed over"
        expect(handed <= least, said, least, "The all-gather needs one part of each rank.")

    judge_on_group(answer, judge=judge_rank, timeout_s=timeout_s, what="in_two")
    return passing_verdict(f"equal to gloo's all-reduce on {SIZES_TEXT} ranks")


def right_time_once(
    collective: Callable[[], object],
    barrier: Callable[[], object],
    synchronize: Callable[[], object],
    now: Callable[[], float],
) -> float:
    """Return the seconds of one call, without the wait for a late rank or earlier work."""
    synchronize()
    barrier()
    start = now()
    collective()
    synchronize()
    return now() - start


class _SlowDevice:
    """A clock, and a device that computes after its calls have returned, as GPUs do."""

    late_s, earlier_s, launch_s, collective_s = 2.0, 0.7, 0.01, 0.3

    def __init__(self) -> None:
        self.now_s, self.pending_s = 100.0, self.earlier_s
        self.collectives, self.is_late = 0, True

    def now(self) -> float:
        return self.now_s

    def barrier(self) -> None:
        # Another rank comes late, once.
        self.now_s += self.late_s * self.is_late
        self.is_late = False

    def synchronize(self) -> None:
        self.now_s += self.pending_s
        self.pending_s = 0.0

    def collective(self) -> None:
        self.barrier()
        self.collectives += 1
        self.now_s += self.launch_s
        self.pending_s += self.collective_s


@exercise
def time_once(answer: Callable[..., float]) -> Verdict:
    """Exercise 3: seconds of one collective, from (collective, barrier, synchronize, now)."""
    device = _SlowDevice()
    calls = device.collective, device.barrier, device.synchronize, device.now
    asked = f"{judge.answer_name(answer)} of a collective of 0.31 s"
    found = judge.call_answer(answer, *calls, in_words=asked)
    shown, times = value_text(found), device.collectives
    expect(isinstance(found, Real), f"{asked} gave {shown}, not a number")
    expect(times == 1, f"{asked} called it {times} times", "one call", "One round, one call.")
    right = device.launch_s + device.collective_s
    early = "The call returns before the device is done: synchronize before you stop the clock."
    late = "Meet the others at the barrier before you start the clock."
    busy = "Let the device finish what it does before you start the clock."
    mistakes = {
        "the call alone, without the work of the device": (device.launch_s, early),
        "with the wait for a late rank": (right + device.late_s, late),
        "with earlier work of the device": (right + device.earlier_s, busy),
        "with the wait for a late rank and earlier work": (
            right + device.late_s + device.earlier_s,
            f"{late} {busy}",
        ),
        "the wait for a late rank, without the work of the device": (
            device.launch_s + device.late_s,
            f"{late} {early}",
        ),
        "start minus end": (-right, "Subtract the start from the end."),
    }
    likely = {f"{float(found):.3g} s, {words}": pair for words, pair in mistakes.items()}
    hint = f"{busy} {late} {early}"
    said = f"{asked} gave"
    judge.expect_close(float(found), right, said, likely, f"{shown} s", "0.31 s", hint)
    return passing_verdict("0.31 s, although a rank came late and the device was busy before")


@exercise
def fitted(answer: Callable[..., tuple[float, float]]) -> Verdict:
    """Exercise 4: (alpha, beta) in s and s/byte, from each round's seconds by size in bytes."""
    hint = "Take the fastest round of each size. Additional bytes cost beta; alpha is what is left."
    for network, sizes in (
        (AlphaBeta(1e-4, 1e-9), (1000, 10_000, 1_000_000)),
        (AlphaBeta(2e-5, 4e-10), (4096, 2**22)),
    ):
        # Slow rounds and sizes in falling order catch an answer that takes the first of either.
        fastest = {size: network.seconds(size) for size in reversed(sizes)}
        rounds = {size: [1.7 * best, best, 3.0 * best] for size, best in fastest.items()}
        asked = f"{judge.answer_name(answer)} of a network with known alpha and beta"
        found = judge.call_answer(answer, rounds, in_words=asked)
        no_pair = f"{asked} gave {value_text(found)}, not two numbers"
        with judge.expect_no_error(no_pair, hint="Return alpha, beta."):
            alpha, beta = map(float, found)
        small, large, right = sizes[0], sizes[-1], [network.alpha_s, network.beta_s_per_byte]
        # Where one of the two numbers tells the mistake, the other is as found.
        mistakes = {
            "beta first, then alpha": right[::-1],
            "a beta that has a latency inside": [alpha, fastest[large] / large],
            "an alpha that has the small message's bytes inside": [fastest[small], beta],
        }
        for which, late in {"mean": 5.7 / 3, "first": 1.7, "slowest": 3.0}.items():
            disturbed = f"the numbers of disturbed rounds, the {which}"
            mistakes[disturbed] = [late * number for number in right]
        shown, expected = (f"({pair[0]:.3g}, {pair[1]:.3g})" for pair in ([alpha, beta], right))
        likely = {f"{words}: {shown}": pair for words, pair in mistakes.items()}
        fit, said = [alpha, beta], f"{asked} gave"
        judge.expect_close(fit, right, said, likely, shown, expected, hint, rtol=1e-3, atol=0)
    return passing_verdict("2 networks agree, though two of three rounds were disturbed")


def right_balancing_tokens(
    parameters: float,
    flops_per_s: float,
    bytes_per_s: float,
    ranks: int,
    gradient_bytes: int,
    latency_s: float,
) -> float:
    """Return the tokens of a GPU with which a step computes for as long as a ring sends."""
    link = AlphaBeta(latency_s, 1 / bytes_per_s)
    size = parameters * gradient_bytes
    sending_s = ring_s("all_reduce", size, ranks, inside=link, between=link)
    return sending_s * flops_per_s / 6 / parameters


@exercise
def balancing_tokens(answer: Callable[..., float]) -> Verdict:
    """Exercise 5: tokens per GPU at which a step computes as long as a ring takes."""
    hint = "6 FLOP a parameter and token; 2 (ranks - 1) steps, each a latency and an n-th of all."

    def likely_tokens(*network: Any) -> dict[str, float]:
        parameters, flops_per_s, bytes_per_s, ranks, gradient_bytes, latency_s = network
        right = right_balancing_tokens(*network)
        at_once = right_balancing_tokens(
            parameters, flops_per_s, bytes_per_s, ranks, gradient_bytes, latency_s=0.0
        )
        tokens_per_s = flops_per_s / 6 / parameters
        handed = parameters * gradient_bytes / bytes_per_s * tokens_per_s
        return {
            "the tokens of bytes alone, without latency": at_once,
            "with the latency of one step, not of all": at_once + latency_s * tokens_per_s,
            "the tokens of bytes handed over, not on the wire": right - at_once + handed,
            "half of what a ring needs": right / 2,
            "tokens of a forward pass alone": 3 * right,
            "the inverse": 1 / right,
            "tokens times parameters": right * parameters,
        }

    networks = (
        (1e6, 6e12, 1e10, 2, 2, 2e-4),
        (7e9, 4e14, 5e10, 8, 2, 0.0),
        (1e7, 4e14, 5e10, 64, 4, 1e-5),
    )
    cases = [(*network, hint) for network in networks]
    # A whole number of tokens is as good.
    return judge.judge_cases(answer, right_balancing_tokens, cases, likely_tokens, rtol=1e-3)
