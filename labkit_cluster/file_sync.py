"""Copy the files of a run from a host to the notebook while they grow.

The host reads what is new, and the notebook writes it. So progress is seen, and the output of a
host that is lost later has arrived. No folder has to be shared.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from labkit.runs import private_files

APPEND_ONLY_SUFFIXES = {".jsonl", ".log", ".pid", ".host", ".stack", ".json"}
"""How the names of files end that only grow, or are written in one step. All others are brought at
the end.
"""
CHUNK_BYTES = 2**20


class FileChanges:
    """Finds what is new in a folder since the last call.

    Args:
        folder: the run's, on a host.
        without: names of files that are not copied.
    """

    def __init__(self, folder: Path, without: set[str]):
        self._folder, self._without = folder, without
        # The inode of each file, and how many of its bytes were sent.
        self._sent: dict[str, tuple[int, int]] = {}

    def read_changes(self, at_end: bool = False) -> Iterator[tuple[str, int, bytes]]:
        """Return names of files, the position of what is new, and the new bytes; at the end, of all
        files.
        """
        for path in sorted(self._folder.iterdir()):
            goes = (
                path.is_file() and not path.name.startswith(".") and path.name not in self._without
            )
            if goes and (at_end or path.suffix in APPEND_ONLY_SUFFIXES):
                yield from self._read_file_changes(path)

    def _read_file_changes(self, path: Path) -> Iterator[tuple[str, int, bytes]]:
        try:
            file = path.open("rb")
        except OSError:
            # The file was replaced or removed at this moment.
            return
        with file:
            # What is written from now on is copied next time.
            now = os.fstat(file.fileno())
            known, place = self._sent.get(path.name, (None, 0))
            is_new = known != now.st_ino
            place = 0 if is_new else place
            file.seek(place)
            # An empty file is sent, too.
            while is_new or place < now.st_size:
                part = file.read(min(CHUNK_BYTES, now.st_size - place))
                # The file was cut off meanwhile.
                if not part and not is_new:
                    break
                yield path.name, place, part
                place, is_new = place + len(part), False
            self._sent[path.name] = now.st_ino, place


class FileReceiver:
    """Writes the files of one host into the run's folder. Hosts have different file names, so none
    overwrites another's.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._own: set[str] = set()

    def write_chunk(self, name: str, place: int, part: bytes) -> None:
        """Write a part of a file. Raises OSError if that is impossible."""
        path = self._folder / Path(name).name
        if name not in self._own and (path.exists() or path.name.startswith(".")):
            return
        self._own.add(name)
        if place:
            with private_files.open_file(path, "r+b") as file:
                file.seek(place)
                file.write(part)
        else:
            # Atomically, because JSON that is still empty would be an error to a reader.
            unfinished = path.with_name(f".{path.name}.tmp")
            with private_files.open_file(unfinished, "wb") as file:
                file.write(part)
            unfinished.replace(path)
