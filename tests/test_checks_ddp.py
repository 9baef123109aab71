"""labkit.checks.ddp: solutions pass, wrong answers fail with the reason, empty ones are not attempted."""

from pathlib import Path

import pytest

import labkit
from labkit import inductor
from labkit.checks import ddp as checks
from labkit.theory import ddp as theory

DATA = Path(__file__).parent / "data"

HEADS = {
    "alpha_beta": "def fitted(small_bytes, small_s, large_bytes, large_s):",
    "bucket_count": "def buckets(sizes: list[int], bucket_mb: float) -> int:",
    "bounded_buckets": "def cut(sizes: list[int], limit: int) -> list[list[int]]:",
    "early_uses": "def too_early(lines: list) -> list[int]:",
    "wire_bytes": "def sent(parameters: int, micro_batches: int, no_sync: bool, bf16: bool) -> int:",
}
SOLUTIONS = {
    "alpha_beta": """
        beta = (large_s - small_s) / (large_bytes - small_bytes)
        return small_s - beta * small_bytes, beta
    """,
    "bucket_count": """
        count, held, limit = 0, 0, 2**20
        for size in sizes:
            held += size
            if held >= limit:
                count, held, limit = count + 1, 0, bucket_mb * 2**20
        return count + (held > 0)
    """,
    "bounded_buckets": """
        buckets, held = [], 0
        for position, size in enumerate(sizes):
            if not buckets or held + size > limit:
                buckets.append([])
                held = 0
            buckets[-1].append(position)
            held += size
        return buckets
    """,
    "early_uses": """
        in_flight, found = set(), []
        for line in lines:
            if line.kind == "wait":
                in_flight -= set(line.buffers)
            elif in_flight & set(line.buffers):
                found.append(line.number)
            if line.kind == "collective":
                in_flight |= set(line.buffers)
        return found
    """,
    "wire_bytes": "return parameters * (2 if bf16 else 4) * (1 if no_sync else micro_batches)",
}


@pytest.fixture
def answer(answer_to):
    """A function from the text of its body, with the signature of a check's exercise."""
    return lambda check, body: answer_to(HEADS[check], body)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    monkeypatch.setattr(labkit, "run", lambda *arguments, **parameters: pytest.fail("a run was started"))


@pytest.mark.parametrize("check", SOLUTIONS)
def test_solution_passes(check, answer):
    verdict = getattr(checks, check)(answer(check, SOLUTIONS[check]))
    assert verdict.state == "passed", verdict


@pytest.mark.parametrize("check", HEADS)
@pytest.mark.parametrize("body", ["...  # your code here", "pass", '"""Not yet."""'])
def test_an_empty_answer_is_not_attempted(check, body, answer):
    assert repr(getattr(checks, check)(answer(check, body))) == "not attempted"


def changed(check, old, new):
    """A solution with one thing wrong."""
    assert SOLUTIONS[check].count(old) == 1
    return SOLUTIONS[check].replace(old, new)


WRONG_ANSWERS = {
    "alpha_beta": [
        ("return small_s, large_s / large_bytes", "The large message's time holds a latency too."),
        (changed("alpha_beta", "small_s - beta * small_bytes, beta", "small_s, beta"), "message's time holds its"),
        (changed("alpha_beta", "small_s - beta * small_bytes, beta", "beta, small_s - beta * small_bytes"),
         "fitted(1000, 0.000101, 1e+06, 0.0011) gave (1e-09, 0.0001), expected (0.0001, 1e-09). Is the latency first?"),
        (changed("alpha_beta", "(large_bytes - small_bytes)", "large_bytes"), "Beta is what the additional bytes cost"),
        ("return small_s", "gave 0.000101, not two numbers: return alpha, beta"),
        ("beta = 1", "gave None, not two numbers"),
        ("return large_s / 0, 1", "fitted(1000, 0.000101, 1e+06, 0.0011) raised ZeroDivisionError"),
    ],
    "bucket_count": [
        (changed("bucket_count", "= 0, 0, 2**20", "= 0, 0, bucket_mb * 2**20"), "expected 2. The first bucket closes"),
        (changed("bucket_count", "held >= limit", "held > limit"), "gave 2, expected 3. A bucket closes once"),
        ("return -(-sum(sizes) // int(bucket_mb * 2**20))", "gave 1, expected 2. The first bucket"),
        (changed("bucket_count", " + (held > 0)", ""), "gave 0, expected 1. What is left"),
        (changed("bucket_count", "limit = count + 1, 0, bucket_mb * 2**20", "limit = count + 1, 0, limit"), "A bucket"),
        ("return len(sizes)", "gave 3, expected 2. The first bucket"),
        ("total = sum(sizes)", "gave None, not a number"),
    ],
    "bounded_buckets": [
        ("return [list(range(len(sizes)))]", "cut([], limit=10) gave [[]]: a bucket is empty"),
        ("return [[position] for position in range(len(sizes))]", "gave [[0], [1], [2]]: 3 buckets, and 2 would do"),
        (changed("bounded_buckets", "held + size > limit", "held > limit"), "holds 12 bytes, more than 10"),
        (changed("bounded_buckets", "held + size > limit", "held + size >= limit"), "4 buckets, and 2 would do"),
        (changed("bounded_buckets", "append(position)", "append(size)"), "each position must be in one bucket"),
        (changed("bounded_buckets", "return buckets", "return buckets[::-1]"), "the order changed"),
        (changed("bounded_buckets", "return buckets", "return [tuple(each) for each in buckets] or [()]"),
         "return a list of lists of positions"),
        (changed("bounded_buckets", "not buckets or ", ""), "raised IndexError: list index out of range"),
        ("return [[0.0] for size in sizes]", "a bucket lists positions, which are whole numbers"),
        (
            "return [[i for i, size in enumerate(sizes) if size <= limit]]"
            " + [[i] for i, size in enumerate(sizes) if size > limit]",
            "a bucket is empty",
        ),
        ("buckets = []", "gave None: return a list of lists"),
    ],
    "early_uses": [
        ("return []", "[1 extern a x; 2 collective a; 3 other a] too_early gave [], expected [3]. Nothing waits for a"),
        ("return [line.number for line in lines if line.kind == 'wait']", "gave [4], expected []. What touches other"),
        (changed("early_uses", "-= set(line.buffers)", "= set()"), "gave [], expected [4]. A wait is for the buffer"),
        (changed("early_uses", "in_flight & set(line.buffers)", "in_flight"), "gave [3], expected []. What touches"),
        (
            """
            waited = {buffer for line in lines if line.kind == "wait" for buffer in line.buffers}
            sent = [buffer for line in lines if line.kind == "collective" for buffer in line.buffers]
            return [lines[-1].number for buffer in sent if buffer not in waited]
            """,
            "gave [], expected [2]. The wait comes too late for the kernel.",
        ),
        (changed("early_uses", "return found", "return found[:1]"), "gave [2], expected [2, 3]. Each line"),
        (changed("early_uses", "return found", "return set(found)"), "gave set(), expected []"),
        ("return [line.index for line in lines]", "raised AttributeError: 'Line' object has no attribute 'index'"),
    ],
    "wire_bytes": [
        ("return parameters * micro_batches", "gave 1,000, expected 4,000. The hook sends bfloat16"),
        ("return parameters * 4", "bf16=True) gave 4,000, expected 2,000. The hook sends bfloat16"),
        ("return parameters * (2 if bf16 else 4)", "gave 4,000, expected 16,000. Without no_sync"),
        (changed("wire_bytes", "(1 if no_sync else micro_batches)", "micro_batches"), "expected 4,000. With no_sync"),
        (changed("wire_bytes", "1 if no_sync", "0 if no_sync"), "gave 0, expected 4,000. With no_sync"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("check", "body", "reason"), [(check, *each) for check, answers in WRONG_ANSWERS.items() for each in answers]
)
def test_a_wrong_answer_fails_with_the_reason(check, body, reason, answer):
    verdict = getattr(checks, check)(answer(check, body))
    assert verdict.state == "wrong"
    assert reason in repr(verdict)


@pytest.mark.parametrize("program", ["ddp_coalesced", "ddp_concat", "ddp_coalesced_again", "ddp_concat_again"])
def test_the_reader_of_exercise_4_finds_each_missing_wait_in_programs_of_the_compiler(program, answer):
    early_uses, code = answer("early_uses", SOLUTIONS["early_uses"]), (DATA / f"{program}.py.txt").read_text()
    lines = inductor.read(code)
    waits = [line for line in lines if line.kind == "wait"]
    assert early_uses(lines) == [] == inductor.missing_waits(code)
    assert waits
    for wait in waits:
        assert early_uses([line for line in lines if line is not wait]), wait
        assert inductor.missing_waits(code.replace(wait.text, "pass")), wait


@pytest.mark.parametrize("bucket_mb", [1, 5, 25, 100])
@pytest.mark.parametrize("dim", [64, 1000, 2000])
def test_the_counts_of_exercise_2_are_those_of_the_compiled_chain(dim, bucket_mb, answer):
    sizes = [size for _, size in theory.chain_gradients(dim, "compiled")]
    counted = answer("bucket_count", SOLUTIONS["bucket_count"])(sizes, bucket_mb)
    assert counted == len(theory.chain_buckets(dim, bucket_mb, way="compiled"))
