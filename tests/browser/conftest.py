"""A real JupyterLab and a real browser, each started once."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixture_server import stop, wait_for_info

BROWSER_OPTIONS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
LONG_MS = 60_000


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    folder: Path
    runs: Path

    def page_of(self, name: str) -> str:
        """The address of one notebook, alone in its own workspace."""
        return f"{self.url}lab/workspaces/{Path(name).stem}/tree/{name}?token={self.token}&reset"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on an empty folder, on a port that the system chose, with settings of its own."""
    pytest.importorskip("jupyterlab", reason="no jupyterlab: pip install 'labkit[notebook]'")
    home = tmp_path_factory.mktemp("jupyter")
    folder, runs = home / "notebooks", home / "runs"
    folder.mkdir()
    notifications = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notifications.parent.mkdir(parents=True)
    notifications.write_text('{"fetchNews": "false"}')
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
        "LABKIT_RUNS": "runs",
    }
    environment = os.environ | {name: str(home / place) for name, place in places.items()}
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}"),
        *("--IdentityProvider.token=browser-test", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
    ]
    log = home / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        info = wait_for_info(server, home / "runtime", log)
        yield Lab(info["url"], info["token"], folder, runs)
    finally:
        stop(server.pid)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """The system's Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'labkit[dev]'")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=BROWSER_OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def open_notebook(browser: Any, lab: Lab) -> Callable[..., Any]:
    """Opens a notebook of the folder and waits until its kernel is known and idle."""

    def open_it(name: str, *, width: int = 1280, height: int = 900) -> Any:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(lab.page_of(name), timeout=LONG_MS)
        # The indicator is idle before there is a kernel; a cell executed then asks which kernel to take.
        page.locator(".jp-Toolbar-kernelName", has_text="Python 3").wait_for(timeout=LONG_MS)
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=LONG_MS)
        return page

    return open_it


@pytest.fixture(scope="session")
def run_all(browser: object) -> Callable[[Any], None]:
    """Chooses Run All Cells until a cell is taken: for a moment after its start the page loses what it is told."""
    from playwright.sync_api import TimeoutError

    def choose(page: Any) -> None:
        taken = page.locator(".jp-InputPrompt").filter(has_text=re.compile(r"\[(\*|\d+)\]")).first
        for _ in range(10):
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            with contextlib.suppress(TimeoutError):
                return taken.wait_for(timeout=3000)
        raise AssertionError("no cell was ever executed")

    return choose


@pytest.fixture(scope="session")
def screenshots(repository: Path) -> Path:
    """Where to look afterwards."""
    folder = repository / "out" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
