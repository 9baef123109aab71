"""Somebody else on this machine: a real process with another user id, without root's rights, an account or a home."""

import json
import os
import signal
import stat
import tempfile
import traceback
from pathlib import Path

import pytest

NOBODY = 65534


class AnotherUser:
    """Does things as a user who is neither this one nor root, and keeps open what they have opened."""

    def __init__(self):
        self._processes = []

    def does(self, act, *arguments):
        """What ``act`` returns there, such as JSON can hold. The process then waits for the end of the test.

        It is a fork of this one: not every Python lies where another user may go.
        """
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            os.write(answer, json.dumps(_as_somebody_else(act, arguments)).encode())
            os.close(answer)
            signal.pause()
            os._exit(0)
        self._processes.append(pid)
        os.close(answer)
        with open(answers) as file:
            done = json.load(file)
        assert "value" in done, done["error"]
        return done["value"]

    def leave(self):
        for pid in self._processes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _as_somebody_else(act, arguments):
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.umask(0)
        os.chdir("/")
        return {"value": act(*arguments)}
    except BaseException:
        return {"error": traceback.format_exc()}


@pytest.fixture
def another_user():
    if os.geteuid() != 0:
        pytest.skip("only root can be another user: run this test as root, such as in a container")
    user = AnotherUser()
    yield user
    user.leave()


@pytest.fixture
def open_place(another_user):
    """A folder to which all users have access, which pytest's own are not; ``tmp`` in it is like /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "tmp").mkdir()
        (place / "tmp").chmod(0o777 | stat.S_ISVTX)
        yield place
