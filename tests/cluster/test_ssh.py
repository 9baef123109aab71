"""labkit.run(hosts=…) through a real ssh: a server of the test's own on loopback, with keys and settings of its own."""

import os
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fixture_processes import is_alive, wait_for

import labkit
from labkit.errors import HostLost

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
MISBEHAVE, SMALL = PROGRAMS / "misbehave.py", PROGRAMS / "small.py"
SEPARATION = Path("/run/sshd")
"""sshd does not start without this empty folder."""
ENDS_WITHIN_S, TOLD_WITHIN_S = 5.0, 15.0
pytestmark = [
    pytest.mark.calm,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no sshd: apt-get install openssh-server"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd needs root"),
]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """Settings of ssh, by which host0 and host1 are this machine; and others that do not work, each in its way."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none", "UsePAM": "no"}
    server |= {"AuthorizedKeysFile": folder / "authorized", "StrictModes": "no", "PermitRootLogin": "prohibit-password"}
    (folder / "server").write_text("".join(f"{name} {value}\n" for name, value in server.items()))
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"here {key}")
    common = f"Port {port}\n HostKeyAlias here\n IdentitiesOnly yes\n StrictHostKeyChecking yes\n"
    known, user = f" UserKnownHostsFile {folder / 'known'}\n", f" IdentityFile {folder / 'user'}\n"
    here = f" HostName 127.0.0.1\n {common}"
    (folder / "client").write_text(
        f"Host host0 host1\n{here}{known}{user}"
        f"Host unlocked\n{here}{known} IdentityFile {folder / 'stranger'}\n"
        f"Host unknown\n{here} UserKnownHostsFile /dev/null\n{user}"
        f"Host closed\n HostName 127.0.0.1\n Port 1\n"
        f"Host nowhere\n HostName no-such-host.invalid\n"
    )
    made = not SEPARATION.exists()
    SEPARATION.mkdir(exist_ok=True)
    running = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", folder / "server"], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"ssh -F {folder / 'client'}"
    finally:
        running.kill()
        running.wait()
        if made:
            SEPARATION.rmdir()


@pytest.fixture(autouse=True)
def settings(ssh, monkeypatch):
    monkeypatch.setenv("LABKIT_SSH", ssh)


def test_a_run_through_ssh(ssh):
    result = labkit.run(SMALL, nproc=2, hosts=["host0", "host1"], steps=4)
    assert result.hosts == ("host0", "host0", "host1", "host1")
    assert [rank.log() for rank in result.ranks] == [f"rank {rank} of 4 has 256\n" for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unlocked", "Permission denied .publickey"),
        ("unknown", "Host key verification failed."),
        ("closed", "ssh: connect to host 127.0.0.1 port 1: Connection refused"),
        ("nowhere", "ssh: Could not resolve hostname no-such-host.invalid"),
    ],
)
def test_a_host_that_ssh_does_not_reach(ssh, name, why):
    begun = time.monotonic()
    with pytest.raises(HostLost, match=f"^{name} cannot be reached by ssh .*{why}") as caught:
        labkit.run(SMALL, nproc=2, hosts=["host0", name])
    assert time.monotonic() - begun < TOLD_WITHIN_S
    assert str(caught.value).endswith(f"mend `{ssh} {name} true`")
    assert "\n" not in str(caught.value)


def test_nothing_is_left_there_when_ssh_itself_is_killed(tmp_path):
    noted = tmp_path / "pids"
    with ThreadPoolExecutor() as threads:
        run = threads.submit(labkit.run, MISBEHAVE, nproc=1, hosts=["host0", "host1"], orphan=True, pids=str(noted))
        pids = wait_for(
            lambda: noted.exists() and len(words := noted.read_text().split()) >= 5 and set(map(int, words))
        )
        (to_host1,) = (each for each in psutil.Process().children() if "host1" in each.cmdline())
        to_host1.kill()
        with pytest.raises(HostLost, match=r"^host1 was lost: its part of the run ended without output"):
            run.result()
        wait_for(lambda: not any(map(is_alive, pids)), ENDS_WITHIN_S)
