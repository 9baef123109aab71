"""Start and end of a JupyterLab, whoever started it."""

import contextlib
import json
import socket
import subprocess
import time
from pathlib import Path

import psutil

START_TIMEOUT_S = 60


def wait_for_info(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> dict[str, str]:
    """What the server wrote about itself, once it listens, which it begins only afterwards."""
    path = runtime / f"jpserver-{server.pid}.json"
    limit = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < limit and server.poll() is None:
        with contextlib.suppress(OSError, json.JSONDecodeError):  # no file, half a file, nobody who listens
            info = json.loads(path.read_text())
            socket.create_connection(("127.0.0.1", info["port"])).close()
            return info
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def stop(pid: int) -> None:
    """End the server and whatever it started."""
    try:
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
