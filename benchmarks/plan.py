"""How long does it take to find out how 7 billion parameters are best trained?

    python benchmarks/plan.py                                # two cores, and nothing beside it
    python benchmarks/plan.py --keep labkit_course/plans   # and keep it, as what the explorer begins with

All ways to train Llama 2 7B on 16 and on 64 GPUs, cut by tensor parallelism, hybrid sharding and three ways of
checkpointing, are simulated; those that the program refuses cost nothing. Prints the table, and last one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import labkit

HARDWARE = ["h100-8x", "a100-8x", "h200-8x", "b200-8x"]
LIMIT_S, CANDIDATES = 120, 40


def main(words: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--layers", type=int, help="of the model; its own 32 by default")
    arguments.add_argument("--world-size", type=int, nargs="+", default=[16, 64])
    arguments.add_argument("--checkpointing", nargs="+", default=["none", "selective", "full"])
    arguments.add_argument("--keep", type=Path, help="a folder for the plan")
    chosen = arguments.parse_args(words)
    begun = time.monotonic()
    how = {"model": "llama_2_7b", "layers": chosen.layers, "sequence": 4096, "precision": "bf16"}
    lists = {"world_size": chosen.world_size, "checkpointing": chosen.checkpointing}
    found = labkit.plan("decoder", samples=64, hardware=HARDWARE, **lists, **how)
    took_s = time.monotonic() - begun
    print(found)
    simulated = [candidate for candidate in found.candidates if not candidate.reason]
    if chosen.keep:
        without_runs = [replace(each, folder="") for each in found.candidates]
        replace(found, candidates=without_runs, folder=chosen.keep).save()
    of_forty_s = took_s / len(simulated) * CANDIDATES
    result = {"simulated": len(simulated), "took_s": round(took_s, 1), "of_forty_s": round(of_forty_s, 1)}
    print(json.dumps({"bench": "plan", **result, "ok": of_forty_s <= LIMIT_S}))


if __name__ == "__main__":
    main()
