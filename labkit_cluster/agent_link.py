"""The notebook's connection to the agent of one host (host_agent.py)."""

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
from labkit.runs import private_files
from labkit.runs.folder import RunFolder
from labkit_cluster.file_sync import FileReceiver

AGENT_HEARTBEAT_PERIOD_S = 5.0
AGENT_EXIT_TIMEOUT_S = 1.0
Message = Mapping[str, Any]


class AgentLink:
    """The connection to one host's agent, over the stdin and stdout of the command that starts it
    there.

    Attributes:
        status: of its torchrun, negative for a signal that ended it; None while it runs.
        start_failure: why its ranks were not started; "" if they were.
        unreachable_peers: the hosts whose heartbeats it misses.
        problem: what else went wrong; "" for nothing.
        stacks: of its ranks, if they were requested.
        is_closed: whether it has closed the connection.
        has_answered: whether it has sent anything at all.

    Args:
        command: starts the agent, and ends with it.
        folder: of the run, on this machine.
        index: of the host.
        change: notified of every change here.
        broadcast: takes the messages for all hosts.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: RunFolder,
        index: int,
        change: threading.Condition,
        broadcast: Callable[[Message], None],
    ):
        self.status: int | None = None
        self.start_failure = self.problem = ""
        self.unreachable_peers: list[str] = []
        self.stacks: dict[int, str] = {}
        self.is_closed = self.has_answered = False
        self._command, self._change, self._broadcast = list(command), change, broadcast
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder.host_log(index)
        self._arrivals = FileReceiver(folder.path)
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the agent and its two threads; raise HostLost if the command does not exist."""
        with private_files.open_file(self._log, "wb") as log:
            try:
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise HostLost(
                    f"there is no {self._command[0]!r} to reach a host with: {error.strerror}"
                ) from None
        assert process.stdin and process.stdout
        threading.Thread(target=self._send_messages, args=[process.stdin], daemon=True).start()
        threading.Thread(target=self._receive_messages, args=[process.stdout], daemon=True).start()

    def send_message(self, message: Message) -> None:
        """Queue a message to the agent."""
        self._outbox.put(message)

    def _send_messages(self, pipe: IO[bytes]) -> None:
        """Send queued messages, and a heartbeat now and then, until ``close_stdin``."""
        with contextlib.suppress(OSError), pipe:
            while True:
                message: Message | None = {}
                with contextlib.suppress(queue.Empty):
                    message = self._outbox.get(timeout=AGENT_HEARTBEAT_PERIOD_S)
                if message is None:
                    return
                pipe.write(json.dumps(dict(message)).encode() + b"\n")
                pipe.flush()

    def _receive_messages(self, pipe: IO[bytes]) -> None:
        """Receive its messages and files, until it ends."""
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                message = _parse_message(line)
                self.has_answered = self.has_answered or bool(message)
                if "put" in message:
                    self._broadcast(message)
                elif "file" in message:
                    self._write_chunk(message, pipe.read(message["size"]))
                elif message:
                    self._update_status(message)
        with self._change:
            self.is_closed = True
            self._change.notify_all()

    def _write_chunk(self, message: Message, part: bytes) -> None:
        try:
            self._arrivals.write_chunk(message["file"], message["place"], part)
        except OSError as error:
            with self._change:
                self.problem = (
                    f"cannot write {message['file']} to {self._log.parent}: {error.strerror}"
                )
                self._change.notify_all()

    def _update_status(self, message: Message) -> None:
        with self._change:
            self.start_failure = message.get("failed", self.start_failure)
            self.unreachable_peers = message.get("lost", self.unreachable_peers)
            self.stacks |= {int(rank): stack for rank, stack in message.get("stacks", {}).items()}
            self.problem = message.get("problem", self.problem)
            self.status = message.get("end", self.status)
            self._change.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self.is_closed or self.status is not None or not self.has_answered

    def exit_status_and_stderr(self) -> tuple[int | None, str]:
        """Return the status of a disconnected agent's command (None: it runs) and its stderr."""
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(AGENT_EXIT_TIMEOUT_S)
        return self._process.returncode, self._log.read_text(errors="replace")

    def close_stdin(self) -> None:
        """Close its stdin, which ends it."""
        self._outbox.put(None)

    def close(self) -> None:
        """Wait for its end after ``close_stdin``, and kill a command that does not end."""
        if not self._process:  # it was not started
            return
        try:
            self._process.wait(AGENT_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):  # the folder was deleted
            if not self._log.stat().st_size:
                self._log.unlink()


def _parse_message(line: bytes) -> dict[str, Any]:
    """Return the message in this line; {} for other output, such as that of a .bashrc."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        return message if isinstance(message, dict) else {}
    return {}
