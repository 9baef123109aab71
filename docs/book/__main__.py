"""Build the book into a folder, by default out/book: ``python -m docs.book [FOLDER]``. Any warning is an error."""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from docs.book import browser_python, explorers
from docs.book.labs import LabError
from docs.book.pages import ROOT, gather
from docs.book.slides import find_chromium, print_slides, write_slides

MAX_MIB = 40


def main() -> int:
    """Gather the pages, run Sphinx, and say where the book begins."""
    parser = argparse.ArgumentParser(prog="python -m docs.book", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "out" / "book", help="where the book goes")
    folder = parser.parse_args().folder.resolve()
    begun = time.perf_counter()
    source = folder.with_name(f"{folder.name}-source")
    for stale in (folder, source):
        shutil.rmtree(stale, ignore_errors=True)
    python, chromium = browser_python.read_files(), find_chromium()
    live = explorers.read_explorers(every_position=python is None)
    try:
        gather(source, live, has_python=python is not None, has_pdf=chromium is not None)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    # No second process: on two cores, forking costs as much as it saves.
    options = [
        "-b",
        "html",
        "-c",
        str(ROOT / "docs"),
        "-d",
        str(source / ".doctrees"),
        "-W",
        "--keep-going",
        "-q",
    ]
    done = subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(folder)], check=False)
    if done.returncode:
        print("The book has mistakes; each is named above, with its place in", source, file=sys.stderr)
        return done.returncode
    explorers.write_answers(live, python, folder / "_static" / "live")
    slides = write_slides(ROOT, folder / "slides")
    if chromium:
        print_slides(slides, chromium)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    if size > MAX_MIB:
        print(
            f"The book has {size:.0f} MiB, and {MAX_MIB} are allowed: draw figures at a lower dpi",
            file=sys.stderr,
        )
        return 1
    pages = len(list(folder.rglob("*.html")))
    print(f"{pages} pages, {size:.0f} MiB, {time.perf_counter() - begun:.0f} s. Open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
