"""Files and folders that are their owner's alone, also on a machine that others use.

What others may do is settled where a file or folder is made, so that there is no moment in which it
is open to them; a umask can only take more away. Nothing here follows a link in the place of what
it makes or opens.
"""

import contextlib
import errno
import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FOLDER_MODE, FILE_MODE = 0o700, 0o600
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_PERIOD_S = 0.002


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """``open``. A new file is as open as its folder, so that in a private one it is private,
    whatever the umask.
    """
    return open(path, mode, opener=_open_with_folder_mode, **options)


def _open_with_folder_mode(path: str, flags: int) -> int:
    mode = os.stat(os.path.dirname(path) or ".").st_mode & 0o666
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def make_private_folder(path: Path) -> None:
    """Make this folder, if it is not there, with mode 700; those above it as usual."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def is_own_folder(path: Path) -> bool:
    """Whether this is a folder of this user, and no link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def make_own_folder(path: Path) -> None:
    """``make_folder``. Raises PermissionError where something else is in its place, such as another
    user's folder.
    """
    with contextlib.suppress(FileExistsError):
        make_private_folder(path)
    if not is_own_folder(path):
        raise PermissionError(errno.EPERM, "it belongs to another user, or is no folder", str(path))


def per_user_folder(name: str, *places: str) -> Path:
    """A private folder for what all processes of this user on this machine share; made where it is
    not there.

    It lies in the first place where nobody else is in the way: those given, the folder for
    temporary files, where another user may have made one of this name before, or the home folder,
    which this machine may share with others.

    Raises:
        PermissionError: there is none; it says of each place why not.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")), f".{name}-{platform.node()}")
    problems = []
    for folder in (
        *(Path(place, name) for place in (*places, os.path.realpath(tempfile.gettempdir()))),
        home,
    ):
        try:
            if folder.is_absolute() and _is_safe_parent(folder.parent):
                make_own_folder(folder)
                return folder
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    raise PermissionError(errno.EPERM, "; ".join(problems), name)


def _is_safe_parent(place: Path) -> bool:
    """Whether it is a folder in which nobody but this user and root can remove or rename what this
    user makes.
    """
    found = place.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0)
    return ours and bool(
        found.st_mode & stat.S_ISVTX or not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """One process at a time in here.

    Raises:
        TimeoutError: another process has kept it for ten seconds.
    """
    # what another user may have put in its place is neither followed nor waited for
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    try:
        give_up = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(number):
            if time.monotonic() > give_up:
                what = f"another process keeps it locked for more than {LOCK_TIMEOUT_S:g} s"
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
