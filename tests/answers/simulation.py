"""Lab 6."""

from answers import Exercise, changed
from labkit_simulate import checks

EXERCISES = [
    Exercise(
        "6.1",
        "fewest_hosts",
        checks.fewest_hosts,
        {
            "fewest_hosts(1280, 20, 60) gave 32": "return math.ceil(shared_bytes / (budget_bytes - own_bytes))",
            "fewest_hosts(1280, 20, 60) gave 2": "return int(shared_bytes / budget_bytes / 8)",
            "fewest_hosts(1281, 20, 60) gave 4": "return int(shared_bytes // (8 * (budget_bytes - own_bytes)))",
            "fewest_hosts(640, 60, 60) raised": "return math.ceil(shared_bytes / 8 / (budget_bytes - own_bytes))",
        },
    ),
    Exercise(
        "6.2",
        "ring_s",
        checks.ring_s,
        {
            "ring_s(4, hosts=2, nproc=8, inside, between) gave 398 s": changed(
                "06", "ring_s", ("between.beta_s_per_byte / nproc", "between.beta_s_per_byte")
            ),
            "ring_s(4, hosts=2, nproc=8, inside, between) gave 68 s": changed(
                "06", "ring_s", ("max(inside.beta_s_per_byte, card)", "inside.beta_s_per_byte")
            ),
            "ring_s(4, hosts=1, nproc=8, inside, between) gave 32 s": changed(
                "06", "ring_s", ("hosts * nproc - 1", "hosts * nproc")
            ),
            "ring_s(4, hosts=2, nproc=8, inside, between) gave 75 s": changed(
                "06",
                "ring_s",
                ("(hops - crossing) * inside.alpha_s + crossing * between.alpha_s", "hops * inside.alpha_s"),
            ),
        },
    ),
    Exercise(
        "6.3",
        "forward_s",
        checks.forward_s,
        {
            "forward_s([1.0, 1.0, 1.0], [3.0, 3.0, 3.0]) gave 12 s": "return sum(gathers_s) + sum(computes_s)",
            "forward_s([1.0], [2.0]) gave 2 s": "return max(sum(gathers_s), sum(computes_s))",
            "forward_s([1.0, 1.0, 5.0], [4.0, 1.0, 1.0]) gave 8 s": changed(
                "06", "forward_s", ("max(gathered, ends[-2]) + gather_s", "gathered + gather_s")
            ),
        },
    ),
    Exercise(
        "6.4",
        "hosts_spanned",
        checks.hosts_spanned,
        {
            "hosts_spanned(size=16, stride=8, nproc=8) gave 2": "return max(1, size // nproc)",
            "hosts_spanned(size=3, stride=16, nproc=8) gave 6": "return max(1, size * stride // nproc)",
            "hosts_spanned(size=8, stride=1, nproc=8) gave 8": "return size",
        },
    ),
    Exercise(
        "6.5",
        "efficiencies",
        checks.efficiencies,
        {
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave 1, 2, 4": (
                "return [total / tokens_per_s[0] for total in tokens_per_s]"
            ),
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave 10, 10, 5": (
                "return [total / count for count, total in zip(ranks, tokens_per_s)]"
            ),
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave 0.25": (
                "return [total / tokens_per_s[-1] for total in tokens_per_s]"
            ),
        },
    ),
    Exercise(
        "6.6",
        "can_know",
        checks.can_know,
        {
            "can_know('loss after 100 steps') gave True": "return True",
            "can_know('peak memory of a rank') gave False": "return False",
            "can_know('which rank is late') gave True": 'return "loss" not in question and "overflow" not in question',
        },
    ),
]
