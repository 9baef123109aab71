"""Gather every page of the book into one folder, as Sphinx wants them, with links between pages made right."""

import json
import os
import re
import shutil
from pathlib import Path

from docs.book import api, explorers, labs, messages, plans
from docs.book.terms import read_terms, written_as_glossary

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTENTS = {
    "Start": ["install", "labs", "copies", "hardware"],
    "Solved labs": [],
    "Look up": ["formulas", "troubleshooting", "faults", "glossary", "environment", "api/index"],
    "Beyond the labs": [
        "own_code",
        "command_line",
        "emulation",
        "simulation",
        "hosts",
        "clusters",
        "meshes",
    ],
    "Results": ["gpu_results"],
    "Teach": ["teachers", "plans", "room", "questions", "questions_key", "exercises"],
    "Develop": ["contributing", "security", "changelog"],
}
"""Pages by the caption above them. The solved labs are found."""
FROM_THE_ROOT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( {0,3})(```+|~~~+)")


def gather(folder: Path, live: dict, *, has_python: bool, has_pdf: bool) -> None:
    """Write all pages of the book into an empty folder; ``live`` are the explorers that work in a page."""
    folder.mkdir(parents=True)
    solved = sorted((ROOT / "notebooks" / "solved").glob("[0-9]*.ipynb"))
    pages = {path: Path(path.name) for path in DOCS.glob("*.md")}
    pages |= {ROOT / name: Path(name.lower()) for name in FROM_THE_ROOT}
    for path in solved:
        # A link to a lab, solved or not, leads to the solved one.
        pages[path] = pages[ROOT / "notebooks" / path.name] = Path("labs") / path.name
    pages[DOCS / "gpu_results.md"] = Path("gpu_results.md")
    pages[DOCS / "api" / "index.md"] = Path("api/index.md")
    book = Book(folder, pages)
    terms = read_terms((DOCS / "glossary.md").read_text())
    for path in {*DOCS.glob("*.md"), *(ROOT / name for name in FROM_THE_ROOT)}:
        text = path.read_text()
        if path.name == "index.md":
            text += contents([path.stem for path in solved])
        if path.name == "formulas.md":
            text = re.sub(r"`(labkit\w*(?:\.\w+){2,})`", r"{py:obj}`\1`", text)
        if path.name == "glossary.md":
            text = written_as_glossary(text)
        if path.name == "troubleshooting.md":
            text = messages.page(text, ROOT)
        if path.name == "plans.md":
            text = plans.plans_page(text, ROOT, has_pdf=has_pdf)
        if path.name == "room.md":
            text = plans.room_page(text, (DOCS / "exercises.md").read_text())
        book.write(path, text)
    (folder / "labs").mkdir()
    for path in solved:
        notebook = labs.lab_of_the_book(path.parent.parent / path.name, path, terms)
        explorers.bring_to_life(notebook, live, has_python=has_python)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = book.relink(cell["source"], path.parent.parent / path.name, pages[path])
        (folder / pages[path]).write_text(json.dumps(notebook))
    for name, text in api.pages(ROOT).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    book.write(DOCS / "gpu_results.md", gpu_results())


def contents(solved: list[str]) -> str:
    """The table of contents, which the sidebar shows."""
    blocks = []
    for caption, names in CONTENTS.items():
        entries = names or [f"labs/{name}" for name in solved]
        blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"]))
    return "\n" + "\n\n".join(blocks) + "\n"


class Book:
    """The folder of the pages, and where each file of the checkout goes in it."""

    def __init__(self, folder: Path, pages: dict[Path, Path]):
        self.folder, self.pages = folder, pages

    def write(self, path: Path, text: str) -> None:
        """Write the page of a file of the checkout."""
        place = self.pages[path]
        (self.folder / place).write_text(self.relink(text, path, place))

    def relink(self, text: str, path: Path, place: Path) -> str:
        """The text of a page with links to files of the checkout turned into links inside the book.

        Another page is linked, and what is no page, such as a picture or a job script, is copied.
        """

        def moved(match: re.Match[str]) -> str:
            target = Path(os.path.normpath(path.parent / match[1]))
            if target not in self.pages and not target.is_file():
                return match[0]  # Sphinx names it where it is a link that leads nowhere
            if target not in self.pages:
                self.pages[target] = Path("files") / target.relative_to(ROOT)
                (self.folder / self.pages[target]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, self.folder / self.pages[target])
            return f"]({os.path.relpath(self.pages[target], place.parent)}{match[2] or ''})"

        lines, fence = [], ""
        for line in text.split("\n"):
            mark = FENCE.match(line)
            if mark and (not fence or mark[2].startswith(fence)):
                fence = "" if fence else mark[2]
            lines.append(line if fence else LINK.sub(moved, line))
        return "\n".join(lines)


def gpu_results() -> str:
    """The page of recorded runs: what ran on which GPU, and how it ended."""
    text = [
        "# GPU results",
        "",
        "Recorded runs on named hardware, in `results/`. They are never mixed with live measurements. A run of "
        "several ranks on one GPU shows that the program is right over NCCL, and its times mean nothing.",
    ]
    for folder in sorted(path for path in (ROOT / "results").iterdir() if path.is_dir()):
        runs = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]
        summary = (folder / "README.md").read_text()
        text += ["", "## " + summary.partition("\n")[0].removeprefix("# "), ""]
        text += [line for line in summary.split("\n") if line.startswith("- ")]
        if (folder / "steps.png").is_file():
            figure = f"../results/{folder.name}/steps.png"
            text += ["", f"![Time of a step of each measured program in milliseconds]({figure})"]
        text += ["", "| question | program | ranks | parameters | outcome | step, ms | peak, GB |"]
        text += ["|---|---|---|---|---|---|---|", *map(row_of, runs)]
    text += ["", (ROOT / "results" / "README.md").read_text().partition("\n\n")[2].strip()]
    return "\n".join(text) + "\n"


def row_of(run: dict) -> str:
    """The row of one recorded run."""
    given = run.get("params", {}) | run.get("environment", {})
    parameters = ", ".join(f"`{name}={value}`" for name, value in given.items())
    outcome = "ok" if run.get("ok") else "failed: " + str(run.get("error", "see its file")).partition("\n")[0]
    if "max_rel_error" in run:
        outcome += f", largest relative error {run['max_rel_error']:.2g}"
    step = f"{run['step_ms']:.1f}" if "step_ms" in run else ""
    peak = f"{run['max_allocated_bytes'] / 1e9:.2f}" if "max_allocated_bytes" in run else ""
    cells = [
        run["question"],
        f"`{run['program']}`",
        str(run["ranks"]),
        parameters,
        outcome,
        step,
        peak,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
