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
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from labkit.errors import HostLost, NotAllHosts
from labkit.launcher import process
from labkit.launcher.backend import watch_ranks
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
END_ORDER_TIMEOUT_S = 5.0
"""So long the ranks of a run that is to end are kept where they are, once their stacks were
told.
"""
NOTEBOOK_SILENCE_LIMIT_S = 60
"""After so long without a word of the notebook's process, which says one every few seconds, it
counts as gone.
"""


class PeersLost(HostLost):
    """Hosts whose heartbeats this one misses; it cannot know on which side the fault is."""

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
    guest: RendezvousMember,
    board: Mailbox,
    end: threading.Event,
) -> int:
    """Find the other hosts and run torchrun until it ends, or until ``end`` is set; return its exit
    status.

    Raises:
        NotAllHosts: the hosts did not find each other. No rank was started.
        PeersLost: some of them do not answer any more.
    """
    running, company = start_and_rendezvous(folder, request, guest, board)

    def has_ended() -> bool:
        if lost := company.unreachable_peers():
            raise PeersLost(lost)
        return end.is_set()

    with contextlib.closing(company):
        return watch_ranks(running.wait, has_ended, grace_s=0)


def serve_request(request: Mapping[str, Any], hears: BinaryIO, says: BinaryIO) -> NoReturn:
    """Serve a request from the notebook's process. Does not return."""
    os.environ.update(request["environment"])
    # Where the folder does not exist, a relative path means nothing anyway.
    with contextlib.suppress(OSError):
        os.chdir(request["working_folder"])
    guest = RendezvousMember(**request["guest"])
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="labkit-"), request["name"]))
    folder.path.mkdir()
    write_json(folder.run_json, {"params": request["params"]})
    if request["given"]:
        folder.write_payload(bytes.fromhex(request["given"]))
    home = NotebookLink(folder, hears, says)
    home.send_message({"here": guest.name})
    status = 1
    try:
        refuse_version_mismatch("the notebook", request["versions"], guest.name, labkit_versions())
        _refuse_program_mismatch(guest.name, request)
        status = run_host(folder, request, guest, home, home.end_event)
    except NotAllHosts as error:
        home.send_message({"failed": str(error)})
    except PeersLost as error:
        home.send_message({"lost": error.hosts})
    except Exception as error:
        traceback.print_exc()
        home.send_message({"failed": f"{guest.name}: {type(error).__name__}: {error}"})
    if home.wants_stacks:
        own, stacks = (
            request["nproc"],
            process.collect_stacks(folder, range(guest.hosts * request["nproc"])),
        )
        home.send_message(
            {
                "stacks": {
                    rank: stacks[rank] for rank in range(guest.index * own, (guest.index + 1) * own)
                }
            }
        )
        # Otherwise a rank that ends would end those of other hosts before they have answered.
        home.end_now_event.wait(END_ORDER_TIMEOUT_S)
    immortal = process.kill_run_processes(folder.path)
    home.send_remaining_files()
    if immortal:
        home.send_message(
            {
                "problem": (
                    f"processes {immortal} did not die of SIGKILL: they wait for a device;"
                    " restart it"
                )
            }
        )
    home.send_message({"end": status})
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
    """The connection to the notebook's process: it gives orders, receives files, and relays
    messages between hosts.

    Attributes:
        end_event: set when the notebook wants the run to end.
        wants_stacks: whether it first wants the stacks of the ranks.
        end_now_event: set when it needs nothing more.
    """

    def __init__(self, folder: RunFolder, hears: BinaryIO, says: BinaryIO):
        self.end_event, self.wants_stacks, self.end_now_event = (
            threading.Event(),
            False,
            threading.Event(),
        )
        self._folder, self._hears, self._says = folder, hears, says
        self._words: dict[str, dict[str, Any]] = {}
        self._speaking = threading.Lock()
        self._growth = FileChanges(folder.path, without={folder.payload.name, folder.run_json.name})
        self._heard_before, self._brought = 0, threading.Event()
        threading.Thread(target=self._receive_messages, daemon=True).start()
        self._bringing = threading.Thread(target=self._send_files_until_end, daemon=True)
        self._bringing.start()

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Send a message to all hosts; the notebook's process relays it."""
        self._words[name] = dict(content)
        self.send_message({"put": name, "content": dict(content)})

    def get(self, name: str) -> dict[str, Any]:
        return self._words.get(name, {})

    def send_message(self, word: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message, followed by ``content``."""
        # A host that cannot be reached notices by itself that nobody is there.
        with (
            self._speaking,
            contextlib.suppress(OSError),
        ):
            self._says.write(json.dumps(dict(word)).encode() + b"\n" + content)
            self._says.flush()

    def send_remaining_files(self) -> None:
        """Send everything that is in the folder by now."""
        self._brought.set()
        self._bringing.join()
        self._send_file_changes(at_end=True)

    def _send_files_until_end(self) -> None:
        while not self._brought.wait(FILE_SYNC_PERIOD_S):
            self._send_file_changes()
            self._heard_before += 1
            if self._heard_before * FILE_SYNC_PERIOD_S > NOTEBOOK_SILENCE_LIMIT_S:
                self._kill_host_processes()

    def _send_file_changes(self, at_end: bool = False) -> None:
        # The program deleted the folder.
        with contextlib.suppress(FileNotFoundError):
            for name, place, part in self._growth.read_changes(at_end):
                self.send_message({"file": name, "place": place, "size": len(part)}, part)

    def _receive_messages(self) -> None:
        """Receive messages from other hosts and the order to end; end everything once the notebook
        is gone.
        """
        for line in self._hears:
            told = json.loads(line)
            self._heard_before = 0
            if "put" in told:
                self._words[told["put"]] = told["content"]
            if "end" in told:
                self.wants_stacks = self.wants_stacks or told["end"] == "stacks"
                self._words["failed"] = {"message": "the run was ended before all hosts had met"}
                self.end_event.set()
                if told["end"] == "now":
                    self.end_now_event.set()
        self._kill_host_processes()

    def _kill_host_processes(self) -> None:
        process.kill_run_processes(self._folder.path)
        _remove_host_folder(self._folder)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
