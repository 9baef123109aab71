"""How far off is a reckoned step from what others have published?

    python benchmarks/published.py

Rows are those of ``labkit_simulate.theory.reference_results``, each with its configuration; the first of each
kind of hardware gave the share of the peak that matrix products reach, the others are predicted. Nothing runs. Prints a
table, and last one JSON object: the largest factor between predicted and published, of speed and of memory.
"""

import json

from labkit_simulate.theory.reference_results import A100_RESULTS, GIB, H100_RESULTS

LIMIT = 1.5


def main() -> None:
    print(f"{'model, checkpointing':<34} {'GPUs':>4} {'batch':>5} {'tokens/s a GPU':>22} {'memory in GiB':>22}")
    speed, memory = [], []
    for rows in (H100_RESULTS, A100_RESULTS):
        print(rows[0].hosts)
        for row in rows:
            step = row.estimate_step()
            ratio = step.tokens_per_s / row.tokens_per_s
            how = row.training
            line = f"  {row.name + ', ' + how.checkpointing:<32} {how.ranks:>4} {how.batch:>5}"
            line += f" {step.tokens_per_s:>6.0f} of {row.tokens_per_s:>5.0f} {100 * (ratio - 1):>+5.1f} %"
            if row is rows[0]:
                line += "  fitted to this row"
            else:
                speed.append(max(ratio, 1 / ratio))
            if row.memory_gib:
                share = step.memory_bytes / GIB / row.memory_gib
                memory.append(max(share, 1 / share))
                line += f" {step.memory_bytes / GIB:>6.1f} of {row.memory_gib:>5.1f} {100 * (share - 1):>+5.1f} %"
            print(line)
    worst = {"speed_factor": round(max(speed), 3), "memory_factor": round(max(memory), 3)}
    print(json.dumps({"bench": "published", "held_out": len(speed), **worst, "ok": max(worst.values()) <= LIMIT}))


if __name__ == "__main__":
    main()
