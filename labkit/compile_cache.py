"""Keep labkit's own folder of compiled code, and find libraries that a stopped compile left.

torch.compile writes a library under its final name, and takes every file of that name for a whole
one. If the compile is killed, or the disk is full, part of a library stays, and each later run that
needs it fails with "file too short". So labkit removes such files before ranks start, and stops the
compilers of notebooks that are gone, which would go on to write them.
"""

import contextlib
import os
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from labkit.environment import ENV_NOTEBOOK_PID
from labkit.runs import private_files

ENV_COMPILE_CACHE, TORCH_CACHE_PREFIX = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"
LOCK_TIMEOUT_S = 1.0
LIBRARY_SUFFIXES = (".so", ".o")
ELF_MAGIC = b"\x7fELF"
# Magic, place of the table of sections, size and number of its entries. Linkers write it last.
ELF_HEADER = struct.Struct("=4s36xQ10xHH2x")
# What the system, Python and the linker say of such a file.
PARTIAL_LIBRARY_WORDS = ("file too short", "invalid ELF header", "file truncated")
PARTIAL_LIBRARY_FIX = (
    "a compile that was stopped has left only part of this file: delete the file, and torch"
    " compiles it again (`python -m labkit doctor` lists such files)"
)


def cache_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives ranks labkit's folder, after removing partial libraries; {} if
    the user has chosen a folder.
    """
    # The default lies in /tmp, where another user may have created it before.
    default = os.path.join(tempfile.gettempdir(), TORCH_CACHE_PREFIX)
    if not (inherited.get(ENV_COMPILE_CACHE) or default).startswith(default):
        return {}
    # If the folder cannot be made, torch reports it when it compiles.
    with contextlib.suppress(OSError):
        folder = own_folder()
        _stop_orphaned_compilers(folder)
        partial_libraries(folder, remove=True)
        return {ENV_COMPILE_CACHE: str(folder)}
    return {}


def own_folder() -> Path:
    """Return labkit's folder of compiled code, private to this user."""
    return private_files.per_user_folder(f"{TORCH_CACHE_PREFIX}{os.getuid()}")


def partial_libraries(folder: Path, *, remove: bool = False) -> list[Path]:
    """List, or remove, the libraries in a folder that are not whole and not being compiled now."""
    found = []
    for library in sorted(folder.glob("*/*")):
        if library.suffix not in LIBRARY_SUFFIXES or not _is_partial(library):
            continue
        # torch holds this lock while it compiles, and a killed compile for a moment longer. Without
        # the folder nothing was compiled lately.
        lock = folder / "locks" / f"{library.name.partition('.')[0]}.lock"
        held = (
            private_files.lock_file(lock, timeout_s=LOCK_TIMEOUT_S)
            if lock.parent.is_dir()
            else None
        )
        with contextlib.suppress(OSError), held or contextlib.nullcontext():
            if _is_partial(library):
                found.append(library)
                if remove:
                    library.unlink()
    return found


def _stop_orphaned_compilers(folder: Path) -> None:
    # Only where a source has no library yet, because looking at every process takes time.
    names = [set(os.listdir(place.path)) for place in os.scandir(folder) if place.is_dir()]
    if not any(
        name.endswith(".cpp") and f"{name[:-4]}.so" not in own for own in names for name in own
    ):
        return
    orphans = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(str(folder) in word for word in process.cmdline()):
                notebook = process.environ().get(ENV_NOTEBOOK_PID, os.getpid())
                if not psutil.pid_exists(int(notebook)):
                    process.kill()
                    orphans.append(process)
    psutil.wait_procs(orphans, LOCK_TIMEOUT_S)


def _is_partial(library: Path) -> bool:
    try:
        with library.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(ELF_HEADER.size)
    except OSError:
        return False
    if sys.platform != "linux":
        return not size
    if len(head) < ELF_HEADER.size:
        return True
    magic, place, entry_bytes, entries = ELF_HEADER.unpack(head)
    return bool(magic != ELF_MAGIC or size < place + entry_bytes * entries)


def folders_of_torch() -> list[Path]:
    """List the folders in which torch compiles without labkit: its default's, and a chosen one."""
    defaults = Path(tempfile.gettempdir()).glob(f"{TORCH_CACHE_PREFIX}*")
    chosen = os.environ.get(ENV_COMPILE_CACHE)
    folders = {*filter(private_files.is_own_folder, defaults), *([Path(chosen)] if chosen else [])}
    with contextlib.suppress(OSError):
        folders.discard(own_folder())
    return sorted(folders)
