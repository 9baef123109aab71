"""Execute one lab with its solutions and leave pages and pictures: what `make run` does.

    python -m notebooks.tools.run 01_spatial_sharding

Writes out/01_spatial_sharding.ipynb, .html and out/figures/01_*.png, prints the outputs of the cell tagged `summary`.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path

import nbformat
import tyro
from nbconvert import HTMLExporter

from notebooks.tools.execute import CellFailed, execute, sections, strip
from notebooks.tools.source import Notebook, SourceError, find_labs, solved_notebook

FOLDER = Path(__file__).resolve().parents[1]


def main(name: tyro.conf.Positional[str], /, folder: Path = FOLDER, out: Path = FOLDER.parent / "out") -> int:
    """Execute one lab with its solutions and leave pages and pictures.

    Args:
        name: the source to execute, without .py.
        folder: the folder that holds src/.
        out: where to write.
    """
    try:
        (lab,) = find_labs(folder, (name,))
        source = solved_notebook(lab.source)
        page = out / f"{name}.ipynb"
        print(f"Executing {name}, which starts real ranks on this machine ...", flush=True)
        notebook = execute(source, page, title=name)
    except (SourceError, CellFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the kernel has gone by now, and its ranks with it
        return 130
    strip(notebook)
    nbformat.write(notebook, page)
    html = write_html(notebook, page.with_suffix(".html"), title=name)
    figures = write_figures(notebook, out / "figures", prefix=name.partition("_")[0])
    print("\n".join(["", *summary(notebook), "", f"read     {shown(html)}", f"edit     {shown(page)}"]))
    print("\n".join(f"{'' if number else 'figures':<9}{shown(figure)}" for number, figure in enumerate(figures)))
    return 0


def shown(path: Path) -> str:
    """The path as seen from here, where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def write_html(notebook: Notebook, path: Path, title: str) -> Path:
    """Write the notebook as one page that needs no other file and no network."""
    exporter = HTMLExporter(embed_images=True)
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    # Scripts for live widgets and TeX, which a notebook of this project uses neither of once it is executed.
    path.write_text(re.sub(r'<script[^>]* src="https?://[^"]*"[^>]*>\s*</script>', "", body))
    return path


def write_figures(notebook: Notebook, folder: Path, prefix: str) -> list[Path]:
    """Write every picture among the outputs as <prefix>_<number>_<its section>.png, in place of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{prefix}_*.png"):
        old.unlink()
    headings = sections(notebook)
    paths: list[Path] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                paths.append(folder / f"{prefix}_{len(paths) + 1:02d}_{slug(headings[cell.id])}.png")
                paths[-1].write_bytes(base64.b64decode(output.data["image/png"]))
    return paths


def slug(text: str) -> str:
    """A heading as part of a file name: its first words, lower case."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "_".join(words[1:6] if words and words[0].isdigit() else words[:5]) or "figure"


def summary(notebook: Notebook) -> list[str]:
    """The text outputs of the cells tagged summary."""
    texts = []
    for cell in notebook.cells:
        if "summary" in cell.metadata.get("tags", []):
            for output in cell.outputs:
                texts.append(str(output.get("text") or output.get("data", {}).get("text/plain", "")).rstrip())
    return texts


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
