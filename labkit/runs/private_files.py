"""Create files and folders that only their owner can open, on shared machines too.

Permissions are set at creation, so that nothing is ever open to others; no link is followed.
"""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FOLDER_MODE, FILE_MODE = 0o700, 0o600
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_PERIOD_S = 0.002
TEMPORARY_AGE_S = 10.0


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file like ``open``; a new file gets its folder's permissions, whatever the umask."""
    return open(path, mode, opener=_open_with_folder_mode, **options)


def _open_with_folder_mode(path: str, flags: int) -> int:
    # The umask would open files to others, or close a shared folder's files to its group.
    mode = os.stat(os.path.dirname(path) or ".").st_mode & 0o666
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def make_private_folder(path: Path) -> None:
    """Create this folder, if it does not exist, with mode 700, and its parents as usual."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def is_own_folder(path: Path) -> bool:
    """Tell whether this is a folder of this user, and not a link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def make_own_folder(path: Path) -> None:
    """Create a private folder; raise PermissionError if another user's, or a file, is there."""
    with contextlib.suppress(FileExistsError):
        make_private_folder(path)
    if not is_own_folder(path):
        raise PermissionError(errno.EPERM, "it belongs to another user, or is no folder", str(path))


def per_user_folder(name: str, *places: str) -> Path:
    """Return this user's private folder on this machine, in the first usable of several places."""
    # The home folder comes last, since other machines may share it, and so has this one's name.
    home = Path(os.path.realpath(os.path.expanduser("~")), f".{name}-{platform.node()}")
    shared = [*places, os.path.realpath(tempfile.gettempdir())]
    problems = []
    for folder in [*(Path(place, name) for place in shared), home]:
        try:
            if folder.is_absolute() and _is_safe_parent(folder.parent):
                make_own_folder(folder)
                return folder
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    raise PermissionError(errno.EPERM, "; ".join(problems), name)


# In a safe parent only this user and root can remove or rename what this user creates.
def _is_safe_parent(place: Path) -> bool:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        return False
    return bool(found.st_mode & stat.S_ISVTX or not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextlib.contextmanager
def lock_file(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Let one process in at a time; raise TimeoutError if another stays in, by default for 10 s."""
    # What another user may have put in its place is neither followed nor waited for.
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    try:
        # flock has no time limit of its own.
        timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
        give_up = time.monotonic() + timeout_s
        while not _try_lock(number):
            if time.monotonic() > give_up:
                what = f"another process keeps it locked for more than {timeout_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, what, str(path))
            time.sleep(LOCK_POLL_PERIOD_S)
        yield
    finally:
        os.close(number)


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a private folder that is removed at the end; those of killed processes go as well."""
    place = per_user_folder(f"labkit_temporary_{os.getuid()}")
    for left in place.iterdir():
        with contextlib.suppress(OSError):
            # Another process may have just made it, and not locked it yet.
            if time.time() - left.stat().st_mtime > TEMPORARY_AGE_S:
                with _locked_folder(left):
                    shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(dir=place))
    with _locked_folder(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    # A killed process loses its lock. BlockingIOError where another process has it.
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _try_lock(number):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process uses it", str(folder))
        yield
    finally:
        os.close(number)
