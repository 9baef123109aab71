"""Ends in the way that is asked for, and says so if the interpreter is taken apart."""

import sys
from dataclasses import dataclass

from labkit import rank


class Untouched:
    """Says so when the interpreter is taken apart around it."""

    def __del__(self):
        print("taken apart")


UNTOUCHED = Untouched()


@dataclass
class Config:
    ends: str = "well"
    """How."""


def main(config: Config) -> None:
    if config.ends == "well":
        return
    if config.ends == "raise":
        raise RuntimeError("the rank fails")
    sys.exit(3 if config.ends == "status" else "some words")


if __name__ == "__main__":
    rank.run_main(main, Config)
