"""The notebook's connection to the agent of one host (node.py): what it is told, what it has said, and its files."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from labkit.errors import HostLost
from labkit.runs import private
from labkit.runs.folder import RunFolder
from labkit_cluster.carrying import Arrivals

BEAT_PERIOD_S = 5.0
HANGS_UP_WITHIN_S = 1.0
Word = Mapping[str, Any]


class Connection:
    """One host's agent, over the stdin and stdout of the command that starts it there.

    Attributes:
        status: of its torchrun, negative for a signal that ended it; None before its end.
        failed: why its ranks were not started, "" for no reason.
        lost: the hosts that it no longer hears.
        problem: what else went wrong, "" for nothing.
        stacks: of its ranks, if they were asked for.
        gone: whether it has hung up.
        there: whether it has said anything at all.

    Args:
        command: starts it, and ends with it.
        folder: of the run, here.
        index: of the host.
        change: is told of all that changes here.
        pass_on: takes what it leaves for all hosts.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: RunFolder,
        index: int,
        change: threading.Condition,
        pass_on: Callable[[Word], None],
    ):
        self.status: int | None = None
        self.failed = self.problem = ""
        self.lost: list[str] = []
        self.stacks: dict[int, str] = {}
        self.gone = self.there = False
        self._command, self._change, self._pass_on = list(command), change, pass_on
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder.host_log(index)
        self._arrivals = Arrivals(folder.path)
        self._to_say: queue.SimpleQueue[Word | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start it, tell it what there is to tell, and listen to it. Raises HostLost where there is no such command."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        with private.open_file(self._log, "wb") as log:
            try:
                self._process = process = subprocess.Popen(self._command, stderr=log, **pipes)
            except OSError as error:
                raise HostLost(f"there is no {self._command[0]!r} to reach a host with: {error.strerror}") from None
        assert process.stdin and process.stdout
        for work, pipe in ((self._speak, process.stdin), (self._listen, process.stdout)):
            threading.Thread(target=work, args=[pipe], daemon=True).start()

    def tell(self, word: Word) -> None:
        """Say something to it, once it has taken what was said before."""
        self._to_say.put(word)

    def _speak(self, pipe: IO[bytes]) -> None:
        """Say what there is to say, and now and then that somebody is still here, until ``hang_up``."""
        with contextlib.suppress(OSError), pipe:
            while True:
                word: Word | None = {}
                with contextlib.suppress(queue.Empty):
                    word = self._to_say.get(timeout=BEAT_PERIOD_S)
                if word is None:
                    return
                pipe.write(json.dumps(dict(word)).encode() + b"\n")
                pipe.flush()

    def _listen(self, pipe: IO[bytes]) -> None:
        """Take what it says: words for all, its files, its end."""
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                said = _word_in(line)
                self.there = self.there or bool(said)
                if "put" in said:
                    self._pass_on(said)
                elif "file" in said:
                    self._take(said, pipe.read(said["size"]))
                elif said:
                    self._hear(said)
        with self._change:
            self.gone = True
            self._change.notify_all()

    def _take(self, said: Word, part: bytes) -> None:
        try:
            self._arrivals.put(said["file"], said["place"], part)
        except OSError as error:
            with self._change:
                self.problem = f"cannot write {said['file']} to {self._log.parent}: {error.strerror}"
                self._change.notify_all()

    def _hear(self, said: Word) -> None:
        with self._change:
            self.failed, self.lost = said.get("failed", self.failed), said.get("lost", self.lost)
            self.stacks |= {int(rank): stack for rank, stack in said.get("stacks", {}).items()}
            self.problem = said.get("problem", self.problem)
            self.status = said.get("end", self.status)
            self._change.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to come from it."""
        return self.gone or self.status is not None or not self.there

    def last_words(self) -> tuple[int | None, str]:
        """Of one that hung up: the exit status of its command, None where that goes on, and what its stderr says."""
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HANGS_UP_WITHIN_S)
        return self._process.returncode, self._log.read_text(errors="replace")

    def hang_up(self) -> None:
        """Close its stdin, by which it ends."""
        self._to_say.put(None)

    def close(self) -> None:
        """Wait for its end after ``hang_up``; a command that does not end is killed, here at least."""
        if not self._process:  # it was not started
            return
        try:
            self._process.wait(HANGS_UP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):  # the folder was deleted
            if not self._log.stat().st_size:
                self._log.unlink()


def _word_in(line: bytes) -> dict[str, Any]:
    """What an agent says in this line; {} for what somebody else says there, such as the host's .bashrc."""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        return said if isinstance(said, dict) else {}
    return {}
