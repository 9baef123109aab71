"""Lab 7."""

from answers import Exercise, changed
from labkit_course.checks import failures as checks

ENDS = """
failed = [end for end in ends if end["status"] not in {statuses}]
own = [end for end in failed if not any(echo in end["error"] for echo in {echoes})]
return {answer}
"""
CALLS = """
for place in range({places}(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    others = [rank for rank, call in enumerate(calls) if {differs}]
    if others:
        usual = next(log for rank, log in enumerate(logs) if rank not in others)
        earliest = place
        while earliest and {before} == usual[place]:
            earliest -= 1
        return earliest, place, others
return None
"""
ECHOES = ("closed by peer", "reset by peer", "Broken pipe", "Read error", "Timed out")
LISTED = ("closed by peer", "Read error", "Timed out")
"""The echoes that the lab's own tables show."""
HASH = "hashlib.sha256(whole).hexdigest()"
USUAL = "calls.count(call) < len(calls) / 2"
BEFORE = "usual[earliest - 1]"
GAPS = """
alone = {copied}
alone.zero_grad()
loss_of(alone, samples).backward()
gaps = dict()
for (name, mine), one in zip(model.named_parameters(), alone.parameters(), strict=True):
    gaps[name] = float({gap})
return gaps
"""
DIAGNOSES = """
return {{
    17: (3, "deadlock", "stacks: rank {row}"),
    45: {second},
    23: (None, "same samples", "{samples}"),
    48: (2, {fourth}),
}}
"""


SECOND = '(0, "other shape", "record: call 12")'
"""The right answer of mystery 45."""


def ends(statuses, echoes, answer='min(own, key=lambda end: end["time"])["rank"] if own else None'):
    """The culprit among those that have another status, and none of these in the error."""
    return ENDS.format(statuses=statuses, echoes=echoes, answer=answer)


def diagnoses(second=SECOND, row=3, samples="samples: rank 1", fourth='"left out", "record: call 11"'):
    """Right answers, but for the row of mystery 17, all of 45, the line of 23, or cause and line of 48."""
    return DIAGNOSES.format(second=second, row=row, samples=samples, fourth=fourth)


EXERCISES = [
    Exercise(
        "7.1",
        "culprit",
        checks.culprit,
        {
            "in a run with one that was killed it blames rank 0, which only lost": ends(
                statuses=(0, -15, -6), echoes=("by peer", "Broken pipe", "Timed out")
            ),
            "in a run with one that raised on another system it blames rank 1, which only lost": ends(
                statuses=(0, -15, -6), echoes=LISTED
            ),
            "in a run with one that was aborted it blames rank 2, which was aborted": ends(
                statuses=(0, -15), echoes=ECHOES
            ),
            "in a run with one that was killed it blames no rank": ends(statuses=(0, -15, -6, -9), echoes=ECHOES),
            "in a run with one that raised it blames rank 0, which only lost": (
                'return next(end["rank"] for end in ends if end["error"])'
            ),
            "in a run with one that raised it blames rank 1, which torchrun ended": (
                'return min(ends, key=lambda end: end["status"])["rank"]'
            ),
            "in a run with one that came late it blames rank 0, which only waited": ends(
                statuses=(0, -15, -6), echoes=ECHOES[:4]
            ),
            "in a run with two that raised it blames rank 0, which failed later": ends(
                statuses=(0, -15, -6),
                echoes=("by peer", *ECHOES[2:]),
                answer='own[0]["rank"] if own else None',
            ),
        },
    ),
    Exercise(
        "7.2",
        "where_they_part",
        checks.where_they_part,
        {
            "of rank 0 with another shape it gave (1, 1, [1, 2, 3])": CALLS.format(
                places="max", differs="call != calls[0]", before=BEFORE
            ),
            "of rank 3 one call short it gave None": CALLS.format(places="min", differs=USUAL, before=BEFORE),
            "of rank 0 with another shape it gave None": CALLS.format(
                places="min", differs="[c[0] for c in calls].count(call[0]) < len(calls) / 2", before=BEFORE
            ),
            "of one call of three left out it gave (3, 3, [3])": CALLS.format(
                places="max", differs=USUAL, before="None"
            ),
            "of one call of three left out it gave (2, 3, [3])": CALLS.format(
                places="max", differs=USUAL, before="earliest == place and usual[earliest - 1]"
            ),
            "of a call that was made before, with another between it gave (1,": changed(
                "07", "where_they_part", ("earliest = place\n", "earliest = usual.index(usual[place])\n")
            ),
            "of rank 2 in another call it gave tensor([1, 2])": """
for place, calls in enumerate(zip(*logs)):
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    if odd:
        return torch.tensor([place, *odd])
""",
            "of two places where they differ it gave (2": """
found = None
for place in range(max(map(len, logs))):
    calls = [log[place] if place < len(log) else None for log in logs]
    odd = [rank for rank, call in enumerate(calls) if calls.count(call) < len(calls) / 2]
    found = (place, place, odd) if odd else found
return found
""",
        },
    ),
    Exercise(
        "7.3",
        "gradient_gaps",
        checks.gradient_gaps,
        {
            "of a sum of two it gave": GAPS.format(copied="copy.deepcopy(model)", gap="(mine.grad - one.grad).norm()"),
            "of a gradient of the wrong sign it gave 0.0 for 0.bias": GAPS.format(
                copied="copy.deepcopy(model)", gap="abs(mine.grad.norm() / one.grad.norm() - 1)"
            ),
            "gradient_gaps of equal gradients changed the model's own gradients": GAPS.format(
                copied="model", gap="(mine.grad - one.grad).norm() / one.grad.norm()"
            ).replace("alone.zero_grad()\n", ""),
            "gradient_gaps of equal gradients gave 0.0": """
alone = copy.deepcopy(model)
alone.zero_grad()
loss_of(alone, samples).backward()
return max(float((a.grad - b.grad).norm()) for a, b in zip(model.parameters(), alone.parameters()))
""",
            "of equal gradients it gave": GAPS.format(
                copied="copy.deepcopy(model)", gap="(mine.grad - one.grad).norm() / one.grad.norm()"
            ).replace("samples)", "samples[::2])"),
        },
    ),
    Exercise(
        "7.4",
        "diagnoses",
        checks.diagnoses,
        {
            "mystery 45: rank 0 is right, 'killed' is not": diagnoses('(0, "killed", "ends: rank 0")'),
            "mystery 45: 'other shape' is right, rank 1 is not": diagnoses('(1, "other shape", "record: call 12")'),
            "mystery 45: neither no single rank nor 'wrong scale'": diagnoses(
                '(None, "wrong scale", "gradients: rank 0")'
            ),
            "mystery 45: 'shape' is none of the causes": diagnoses('(0, "shape", "record: call 12")'),
            "mystery 45: (0, 'other shape') is not (rank, cause, line)": diagnoses('(0, "other shape")'),
            "mystery 45: rank 0, 'other shape' is right, 'ends: rank 0' does not prove it": diagnoses(
                '(0, "other shape", "ends: rank 0")'
            ),
            "mystery 45: rank 0, 'other shape' is right, '(11, 12)' is not the line": diagnoses(
                '(0, "other shape", "(11, 12)")'
            ),
            "mystery 17: rank 3, 'deadlock' is right, 'stacks: rank 0' does not prove it": diagnoses(row=0),
            "mystery 23: no single rank, 'same samples' is right, 'gradients: rank 0' does not prove it": diagnoses(
                samples="gradients: rank 0"
            ),
            "mystery 48: rank 2 is right, 'deadlock' is not": diagnoses(fourth='"deadlock", "stacks: rank 2"'),
            "mystery 48: rank 2, 'left out' is right, 'record: call 10' does not prove it": diagnoses(
                fourth='"left out", "record: call 10"'
            ),
            "mystery 23 is missing": """
return {17: (3, "deadlock", "stacks: rank 3"), 45: (0, "other shape", "record: call 12")}
""",
            "it gave (2, 'left out')": 'return 2, "left out"',
        },
    ),
    Exercise(
        "7.5",
        "odd_ranks",
        checks.odd_ranks,
        {
            "of two weights of rank 1 in each other's place it gave []": changed(
                "07", "odd_ranks", (HASH, "float(sum(each.double().sum() for each in model.parameters()))")
            ),
            "of other weights on rank 0 it gave [1, 2]": changed(
                "07", "odd_ranks", ("Counter(marks).most_common(1)[0][0]", "marks[0]")
            ),
            "the ranks are right, but": changed("07", "odd_ranks", (HASH, "whole")),
            "of one last bit on rank 1 it gave []": changed(
                "07",
                "odd_ranks",
                (HASH, "str([[f'{x:.3f}' for x in p.flatten().tolist()] for p in model.parameters()])"),
            ),
            "of equal weights it gave 'False'": """
whole = torch.cat([each.detach().flatten() for each in model.parameters()])
largest = whole.clone()
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
return not torch.equal(whole, largest)
""",
        },
    ),
]
