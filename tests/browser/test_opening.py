"""What a learner sees after `labkit lab`: the first lab, the copies alone, and no question about news."""

import os
import re
import subprocess
import sys

import pytest
from fixture_server import stop, wait_for_info

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'labkit[dev]'").expect
pytestmark = [pytest.mark.browser, pytest.mark.calm, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]
LONG_MS = 40_000


@pytest.fixture
def address(tmp_path):
    """JupyterLab as `labkit lab` starts it, for somebody who never used it before."""
    places = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    places |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "IPYTHONDIR": str(tmp_path / "ipython")}
    options = ["--no-browser", "--folder", str(tmp_path / "my"), "--jupyter-options=--port=0"]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "labkit", "lab", *options]
        server = subprocess.Popen(command, env=os.environ | places, stdout=output, stderr=output)
    try:
        info = wait_for_info(server, tmp_path / "RUNTIME", log)
        yield f"{info['url']}?token={info['token']}"
    finally:
        stop(server.pid)


def test_the_first_lab_opens_by_itself_among_copies_alone(address, browser, screenshots, tmp_path):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address, timeout=LONG_MS)
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=LONG_MS)
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=LONG_MS)
    expect(page.locator(".jp-NotebookPanel h1").first).to_contain_text("Lab 0")
    names = page.locator(".jp-DirListing-itemText").all_inner_texts()
    assert sorted(names) == sorted(["AGENTS.md", *(path.name for path in (tmp_path / "my").glob("*.ipynb"))])
    page.wait_for_timeout(2000)  # where there is a question about news, it comes after the notebook
    assert page.get_by_text(re.compile("Jupyter news", re.IGNORECASE)).count() == 0
    assert [url for url in asked if "/lab/api/news" in url] == []
    page.screenshot(path=screenshots / "copies.png")
    page.close()
    assert not list((tmp_path / "CONFIG").rglob("*.json")), "no settings were written for this person"
