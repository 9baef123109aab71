"""Start and end of a JupyterLab, whoever started it."""

import json
import subprocess
import time
from pathlib import Path

import psutil

START_TIMEOUT_S = 60


def wait_for_info(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> dict[str, str]:
    """What the server wrote about itself once it listened."""
    path = runtime / f"jpserver-{server.pid}.json"
    limit = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < limit and server.poll() is None:
        if path.exists() and (text := path.read_text()):
            return json.loads(text)
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
