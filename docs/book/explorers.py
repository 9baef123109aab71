"""Explorers in the pages of the book: their controls work without a kernel, and from a folder without a server.

Where Pyodide has been fetched, labkit's own Python runs in the page (docs/live) and answers for any value. Elsewhere
the book carries the answers for every position of the controls. A page that was opened from a folder cannot fetch
files, so everything comes as scripts.
"""

import base64
import gzip
import io
import json
import re
import subprocess
import sys
import zipfile
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"^widgets\.(\w+)\(\)\s*\Z", re.MULTILINE)
IN_A_NOTEBOOK = "In the notebook, its button <em>run it</em> measures the chosen values on real ranks."
RUN = "import json\nfrom docs.live import explorers\njson.dumps(explorers.answer(name, json.loads(chosen)))"


def read_explorers(*names: str, every_position: bool) -> dict[str, Any]:
    """Return what docs/live says of these explorers, by default all: controls, first figure, files, maybe positions."""
    command = [sys.executable, "-m", "docs.live.explorers", *["--all"] * every_position, *names]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def as_html(explorer: dict[str, Any], *, has_python: bool) -> str:
    """Return an explorer with its first figure; explorers.js adds the controls."""
    first = explorer["first"]
    rows = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in first["rows"])
    told = {name: explorer[name] for name in ("name", "title", "controls")} | {"python": has_python}
    data = json.dumps(told).replace("</", "<\\/")
    return (
        f'<div class="explorer"><p class="explorer-title">{escape(explorer["title"])}</p>'
        f'<form class="explorer-controls" hidden></form>'
        f'<div class="explorer-figure">{first["svg"]}</div>'
        f'<p class="explorer-words" aria-hidden="true">{escape(first["words"])}</p>'
        f'<table class="explorer-numbers"><caption>predicted</caption><tbody>{rows}</tbody></table>'
        f'<p class="explorer-status" role="status"></p><p class="explorer-note">{IN_A_NOTEBOOK}</p>'
        f'<script type="application/json">{data}</script></div>'
    )


def bring_to_life(notebook: dict[str, Any], explorers: dict[str, Any], *, has_python: bool) -> None:
    """Put live explorers in the place of their pictures in a notebook of the book."""
    for cell in notebook["cells"]:
        named = CELL.search(cell["source"]) if cell["cell_type"] == "code" else None
        if named and named[1] in explorers:
            html = as_html(explorers[named[1]], has_python=has_python)
            cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"text/html": html}}]


def write_answers(explorers: dict[str, Any], python: dict[str, bytes] | None, folder: Path) -> None:
    """Write the scripts that explorers.js loads when a control is moved: a Python, or the answers of all positions."""
    folder.mkdir(parents=True, exist_ok=True)
    if python is None:
        for name, explorer in explorers.items():
            packed = packed_text(json.dumps(explorer["positions"]).encode())
            (folder / f"{name}.js").write_text(f"labkitLive.{name} = {json.dumps(packed)};\n")
        return
    info = json.loads(python["pyodide-lock.json"])["info"]
    parts = {
        "wasm": packed_text(python["pyodide.asm.wasm"]),
        "module": packed_text(python["pyodide.asm.mjs"]),
        "library": packed_text(python["python_stdlib.zip"], level=0),
        "sources": packed_text(sources(explorers), level=0),
        "lock": json.dumps({"info": info, "packages": {}}),
        "run": RUN,
    }
    licences = "// Pyodide, MPL-2.0, https://pyodide.org, with CPython, PSF-2.0; unchanged, packed as text.\n"
    (folder / "python.js").write_text(f"{licences}labkitLive.python = {json.dumps(parts)};\n")
    (folder / "pyodide.js").write_bytes(python["pyodide.js"])


def packed_text(data: bytes, level: int = 9) -> str:
    """Return bytes as text that a script can hold: gzip, then base64."""
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


def sources(explorers: dict[str, Any]) -> bytes:
    """Return a zip of the modules that the explorers import."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted({name for explorer in explorers.values() for name in explorer["files"]}):
            archive.write(ROOT / name, name)
    return packed.getvalue()
