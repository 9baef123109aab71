"""Fetch the Python that runs in the book's pages, once, as ``make book`` does: ``python -m docs.book.browser_python``.

It is Pyodide (MPL-2.0; CPython, PSF-2.0), of this version and with this checksum or not at all. npm fetches it, so that
a proxy or a registry that is set for npm is used. Without npm or a network the book is built all the same, and its
explorers have a figure for each position of their controls.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
ARCHIVE = Path(sys.prefix) / f"pyodide-{VERSION}.tgz"
NEEDED = ("pyodide.js", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def is_right(path: Path) -> bool:
    """Return whether a file is the pinned one, to the last byte."""
    return path.is_file() and base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode() == SHA512


def read_files(path: Path = ARCHIVE) -> dict[str, bytes] | None:
    """Return the files that pages need, by name; None where the archive is not there or not the pinned one."""
    if not is_right(path):
        return None
    with tarfile.open(path) as archive:
        return {name: archive.extractfile(f"package/{name}").read() for name in NEEDED}


def main() -> int:
    """Fetch the archive where it is not there; the exit status is 0 in any case, since the book can do without."""
    if is_right(ARCHIVE):
        return 0
    why = "there is no npm"
    if npm := shutil.which("npm"):
        pack = [npm, "pack", "--silent", "--fetch-retries=1", "--fetch-timeout=60000", f"pyodide@{VERSION}"]
        done = subprocess.run(pack, cwd=ARCHIVE.parent, capture_output=True, text=True, check=False)
        why = "npm could not fetch it" if done.returncode else "what npm fetched has another checksum"
    if not is_right(ARCHIVE):
        ARCHIVE.unlink(missing_ok=True)
        print(
            f"No Python for the book's pages, since {why}: explorers get a figure for each position of their controls."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
