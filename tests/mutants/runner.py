"""Run pytest in forks of a process that has imported torch, which is most of what a small test takes.

    python tests/mutants/runner.py FOLDER         # a copy of the checkout

Each line of the input is a JSON list of pytest's arguments, each line of the output its exit status and the end of what
it printed. Nothing of labkit may be imported here: the forks import it from the folder, as it then is.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 240


def run(folder: str, arguments: list[str]) -> tuple[int, str]:
    """Fork, and return pytest's status and output; -1 after the time limit."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if child == 0:
            run_as_child(folder, arguments, log.fileno())
        give_up = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > give_up:
                os.killpg(child, 9)
                os.waitpid(child, 0)
                return -1, f"no end after {LIMIT_S} s"
            time.sleep(0.02)
        log.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), log.read()[-2000:]


def run_as_child(folder: str, arguments: list[str], log: int) -> None:
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path[0] = folder
    sys.dont_write_bytecode = True
    status = 3
    try:
        import pytest

        status = int(pytest.main(arguments))
        sys.stdout.flush()
    finally:
        os._exit(status)


def main() -> None:
    import matplotlib  # noqa: F401
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.utils.checkpoint  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(run(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.argv[1]))
    main()
