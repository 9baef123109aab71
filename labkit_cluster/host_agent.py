"""One host's part of a run on several hosts: find the others, run torchrun, and end with the
notebook.

    python -m labkit_cluster.host_agent  # hosts.py starts it through ssh; its task comes on stdin

stdin and stdout carry lines of JSON, and the run's files to the notebook. When stdin closes, the
notebook's process or the connection is gone: then everything that this host runs for it ends, as on
one host.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from labkit.errors import HostLost, NotAllHosts
from labkit.launcher import process
from labkit.launcher.watch import watch_ranks
from labkit.runs import private_files
from labkit.runs.folder import RunFolder, write_json
from labkit_cluster.file_sync import FileChanges
from labkit_cluster.host_rendezvous import (
    Mailbox,
    RendezvousMember,
    files_digest,
    labkit_versions,
    refuse_version_mismatch,
)
from labkit_cluster.host_torchrun import start_and_rendezvous

FILE_SYNC_PERIOD_S = 0.2
# After the stacks were sent, ranks stay this long, until the notebook orders the end.
END_ORDER_TIMEOUT_S = 5.0
# The notebook's process sends a message every few seconds; after this long without, it is gone.
NOTEBOOK_SILENCE_LIMIT_S = 60


class PeersLost(HostLost):
    """Heartbeats of these hosts are missing; the fault may be on either side."""

    def __init__(self, hosts: list[str]):
        self.hosts = hosts
        super().__init__(
            f"{', '.join(hosts)} no longer answers: is it up, and the network between the hosts?"
        )


def main() -> None:
    """Run this host's part."""
    request = json.loads(sys.stdin.buffer.readline() or "{}")
    if request:
        serve_request(request, sys.stdin.buffer, sys.stdout.buffer)


def run_host(
    folder: RunFolder,
    request: Mapping[str, Any],
    member: RendezvousMember,
    mailbox: Mailbox,
    end: threading.Event,
) -> int:
    """Find the other hosts and run torchrun until it ends, or until ``end`` is set; return its exit
    status.

    Raises:
        NotAllHosts: the hosts did not find each other. No rank was started.
        PeersLost: some of them do not answer any more.
    """
    running, heartbeats = start_and_rendezvous(folder, request, member, mailbox)

    def has_ended() -> bool:
        if lost := heartbeats.unreachable_peers():
            raise PeersLost(lost)
        return end.is_set()

    with contextlib.closing(heartbeats):
        return watch_ranks(running.wait, has_ended, grace_s=0)


def serve_request(request: Mapping[str, Any], receiver: BinaryIO, sender: BinaryIO) -> NoReturn:
    """Serve a request from the notebook's process, and exit."""
    os.environ.update(request["environment"])
    # Where the folder does not exist, a relative path means nothing anyway.
    with contextlib.suppress(OSError):
        os.chdir(request["working_folder"])
    member = RendezvousMember(**request["member"])
    # This process ends without leaving the block, and so removes the folder itself.
    places = contextlib.ExitStack()
    folder = RunFolder(places.enter_context(private_files.temporary_folder()) / request["name"])
    folder.path.mkdir()
    write_json(folder.run_json, {"params": request["params"]})
    if request["given"]:
        folder.write_payload(bytes.fromhex(request["given"]))
    notebook = NotebookLink(folder, receiver, sender)
    notebook.send_message({"here": member.name})
    status = 1
    try:
        refuse_version_mismatch("the notebook", request["versions"], member.name, labkit_versions())
        _refuse_program_mismatch(member.name, request)
        status = run_host(folder, request, member, notebook, notebook.end_event)
    except NotAllHosts as error:
        notebook.send_message({"failed": str(error)})
    except PeersLost as error:
        notebook.send_message({"lost": error.hosts})
    except Exception as error:
        traceback.print_exc()
        notebook.send_message({"failed": f"{member.name}: {type(error).__name__}: {error}"})
    if notebook.wants_stacks:
        nproc = request["nproc"]
        stacks = process.collect_stacks(folder, range(member.hosts * nproc))
        own_ranks = range(member.index * nproc, (member.index + 1) * nproc)
        notebook.send_message({"stacks": {rank: stacks[rank] for rank in own_ranks}})
        # Otherwise a rank that ends would end those of other hosts before they have answered.
        notebook.end_now_event.wait(END_ORDER_TIMEOUT_S)
    immortal = process.kill_run_processes(folder.path)
    notebook.send_remaining_files()
    if immortal:
        what = f"processes {immortal} did not die of SIGKILL"
        notebook.send_message({"problem": f"{what}: they wait for a device; restart it"})
    notebook.send_message({"end": status})
    _remove_host_folder(folder)
    os._exit(0)


def _refuse_program_mismatch(name: str, request: Mapping[str, Any]) -> None:
    """Raise NotAllHosts unless the program's file is the same here as on the notebook's machine."""
    target, theirs = Path(request["target"]), request["sum"]
    if theirs and not target.is_file():
        raise NotAllHosts(
            f"{name} has no {target}: copy it there, or keep it in a folder that all hosts see"
        )
    if theirs and files_digest(target) != theirs:
        raise NotAllHosts(f"{name} has another {target} than the notebook: copy it there")


def _remove_host_folder(folder: RunFolder) -> None:
    shutil.rmtree(folder.path.parent, ignore_errors=True)


class NotebookLink:
    """The connection to the notebook's process, which orders, receives files and relays messages.

    Attributes:
        end_event: set when the notebook wants the run to end.
        wants_stacks: whether it first wants the stacks of the ranks.
        end_now_event: set when it needs nothing more.
    """

    def __init__(self, folder: RunFolder, receiver: BinaryIO, sender: BinaryIO):
        self.end_event, self.end_now_event = threading.Event(), threading.Event()
        self.wants_stacks = False
        self._folder, self._receiver, self._sender = folder, receiver, sender
        self._messages: dict[str, dict[str, Any]] = {}
        self._send_lock = threading.Lock()
        own_files = {folder.payload.name, folder.run_json.name}
        self._changes = FileChanges(folder.path, without=own_files)
        self._silent_periods, self._stop_event = 0, threading.Event()
        threading.Thread(target=self._receive_messages, daemon=True).start()
        self._file_thread = threading.Thread(target=self._send_files_until_end, daemon=True)
        self._file_thread.start()

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Send a message to all hosts; the notebook's process relays it."""
        self._messages[name] = dict(content)
        self.send_message({"put": name, "content": dict(content)})

    def get(self, name: str) -> dict[str, Any]:
        return self._messages.get(name, {})

    def send_message(self, message: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message, followed by ``content``."""
        # Missing messages from the notebook's process will end this host.
        with self._send_lock, contextlib.suppress(OSError):
            self._sender.write(json.dumps(dict(message)).encode() + b"\n" + content)
            self._sender.flush()

    def send_remaining_files(self) -> None:
        """Send everything that is in the folder by now."""
        self._stop_event.set()
        self._file_thread.join()
        self._send_file_changes(at_end=True)

    def _send_files_until_end(self) -> None:
        while not self._stop_event.wait(FILE_SYNC_PERIOD_S):
            self._send_file_changes()
            self._silent_periods += 1
            if self._silent_periods * FILE_SYNC_PERIOD_S > NOTEBOOK_SILENCE_LIMIT_S:
                self._kill_host_processes()

    def _send_file_changes(self, at_end: bool = False) -> None:
        # The program deleted the folder.
        with contextlib.suppress(FileNotFoundError):
            for name, place, part in self._changes.read_changes(at_end):
                self.send_message({"file": name, "place": place, "size": len(part)}, part)

    def _receive_messages(self) -> None:
        """Receive messages and the order to end; kill everything once the notebook is gone."""
        for line in self._receiver:
            message = json.loads(line)
            self._silent_periods = 0
            if "put" in message:
                self._messages[message["put"]] = message["content"]
            if "end" in message:
                self.wants_stacks = self.wants_stacks or message["end"] == "stacks"
                self._messages["failed"] = {"message": "the run was ended before all hosts had met"}
                self.end_event.set()
                if message["end"] == "now":
                    self.end_now_event.set()
        self._kill_host_processes()

    def _kill_host_processes(self) -> None:
        process.kill_run_processes(self._folder.path)
        _remove_host_folder(self._folder)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
