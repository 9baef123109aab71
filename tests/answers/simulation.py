"""Lab 6."""

from answers import Exercise, changed
from labkit_course.checks import simulation as checks

HOSTS = "fewest_hosts(shared_bytes={}, own_bytes={}, budget_bytes={}) gave {}"
RING = (
    "ring_s(shard_bytes={}, hosts={}, nproc={}, inside=AlphaBeta(alpha_s=2.0, beta_s_per_byte=0.5), "
    "between=AlphaBeta(alpha_s=10.0, beta_s_per_byte=6.0)) gave {}"
)
EXERCISES = [
    Exercise(
        "6.1",
        "fewest_hosts",
        checks.fewest_hosts,
        {
            HOSTS.format(1280.0, 0.0, 40.0, 32): "return math.ceil(shared_bytes / (budget_bytes - own_bytes))",
            HOSTS.format(1280.0, 20.0, 60.0, 2): "return int(shared_bytes / budget_bytes / 8)",
            HOSTS.format(1281.0, 20.0, 60.0, 4): "return int(shared_bytes // (8 * (budget_bytes - own_bytes)))",
            "fewest_hosts(640.0, 60.0, 60.0) raised": "return math.ceil(shared_bytes / 8 / (budget_bytes - own_bytes))",
        },
    ),
    Exercise(
        "6.2",
        "ring_s",
        checks.ring_s,
        {
            RING.format(4.0, 2, 8, 398.0): changed(
                "06", "ring_s", ("between.beta_s_per_byte / nproc", "between.beta_s_per_byte")
            ),
            RING.format(4.0, 2, 8, 68.0): changed(
                "06", "ring_s", ("max(inside.beta_s_per_byte, card)", "inside.beta_s_per_byte")
            ),
            RING.format(4.0, 1, 8, 32.0): changed("06", "ring_s", ("hosts * nproc - 1", "hosts * nproc")),
            RING.format(0.0, 3, 4, 22.0): changed(
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
            "forward_s(gathers_s=[1.0, 1.0, 1.0], computes_s=[3.0, 3.0, 3.0]) gave 12.0": (
                "return sum(gathers_s) + sum(computes_s)"
            ),
            "forward_s(gathers_s=[1.0], computes_s=[2.0]) gave 2.0": "return max(sum(gathers_s), sum(computes_s))",
            "forward_s(gathers_s=[1.0, 1.0, 5.0], computes_s=[4.0, 1.0, 1.0]) gave 8.0": changed(
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
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave [1.0, 2.0, 4.0]": (
                "return [total / tokens_per_s[0] for total in tokens_per_s]"
            ),
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave [10.0, 10.0, 5.0]": (
                "return [total / count for count, total in zip(ranks, tokens_per_s)]"
            ),
            "efficiencies([8, 16, 64], [80.0, 160.0, 320.0]) gave [0.25": (
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
