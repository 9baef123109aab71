"""Merge a notebook as it was when copied, as it is now, and as the learner has changed it.

An untouched cell takes its new text, and disappears if the new notebook no longer has it. A new
cell is inserted where the new notebook has it. What the learner wrote or changed stays, and every
update that was left out for that reason is reported. A cell whose text stays keeps its outputs.

Cells are matched by id, which JupyterLab keeps. The id of an exercise never changes; that of
another cell is derived from its text (see notebooks/tools). A cell whose text has changed is
therefore matched to the most similar cell between its neighbours. If none is similar, the old one
counts as removed and the new one as added, which loses nothing.
"""

import copy
import difflib
import secrets
from dataclasses import dataclass, field
from typing import Any

Cell = Any  # nbformat's NotebookNode
Notebook = Any
# Fraction of words that two versions of a cell must share.
MIN_SIMILARITY = 0.5
MAX_TITLE_LENGTH = 60


@dataclass
class MergeResult:
    """The merged notebook, and what became of its cells."""

    notebook: Notebook
    # Numbers of cells that the learner had not touched.
    changed: int = 0
    added: int = 0
    removed: int = 0
    # A message for each cell that stayed although the notebook's own has changed.
    left: list[str] = field(default_factory=list)


def merge_notebooks(base: Notebook, new: Notebook, mine: Notebook) -> MergeResult:
    """Return the learner's notebook with what is new since ``base``; no argument is modified."""
    base, merged = copy.deepcopy(base), MergeResult(copy.deepcopy(mine))
    _rename_cells(base.cells, new.cells, merged.notebook.cells)
    before = {cell.id: cell for cell in base.cells}
    theirs, own = _sort_cells(before, {cell.id for cell in new.cells}, merged)
    cells = list(own.get("", []))
    for cell in new.cells:
        if cell.id in theirs:
            cells.append(_merge_cell(before.get(cell.id), cell, theirs[cell.id], merged))
        elif cell.id not in before:
            merged.added += 1
            cells.append(copy.deepcopy(cell))
        elif cell.source != before[cell.id].source:
            merged.left.append(_conflict_text(before[cell.id], cell, "you removed it"))
        cells += own.get(cell.id, [])
    _make_ids_unique(cells, {cell.id for cell in new.cells})
    merged.notebook.cells = cells
    # Cells have ids from nbformat 4.5 on.
    merged.notebook.nbformat_minor = max(5, mine.nbformat_minor)
    if "labkit" in new.metadata:
        merged.notebook.metadata["labkit"] = copy.deepcopy(new.metadata["labkit"])
    return merged


# Gives the cells of base and mine the ids that the new notebook has for them.
def _rename_cells(base: list[Cell], new: list[Cell], mine: list[Cell]) -> None:
    ids = {cell.get("id") for cell in mine}
    # Some editors drop ids, so cells without one are found by their text.
    by_text = {(cell.cell_type, cell.source): cell.id for cell in base if cell.id not in ids}
    known, new_ids = {cell.id for cell in base}, _match_cells(base, new)
    for cell in mine:
        name = cell.get("id", "")
        if name not in known:
            name = by_text.pop((cell.cell_type, cell.source), name)
        cell.id = new_ids.get(name, name)
    for cell in base:
        cell.id = new_ids.get(cell.id, cell.id)


def _match_cells(base: list[Cell], new: list[Cell]) -> dict[str, str]:
    """Map ids in ``base`` to ``new``: the same, or that of a similar cell between neighbours."""
    places = {cell.id: place for place, cell in enumerate(new)}
    found = {old: places[cell.id] for old, cell in enumerate(base) if cell.id in places}
    for old, cell in enumerate(base):
        if old in found:
            continue
        # Only what lies between the nearest matched neighbours can be the same cell.
        start = max((place for earlier, place in found.items() if earlier < old), default=-1) + 1
        later = [place for later, place in found.items() if later > old and place >= start]
        free = set(range(start, min(later, default=len(new)))) - set(found.values())
        scores = {place: _text_similarity(cell, new[place]) for place in sorted(free)}
        best = max(scores, key=lambda place: scores[place], default=-1)
        if scores.get(best, 0) >= MIN_SIMILARITY:
            found[old] = best
    return {base[old].id: new[place].id for old, place in found.items()}


def _text_similarity(one: Cell, other: Cell) -> float:
    if one.cell_type != other.cell_type:
        return 0.0
    words = one.source.split(), other.source.split()
    return difflib.SequenceMatcher(None, *words, autojunk=False).ratio()


def _sort_cells(
    before: dict[str, Cell], new_ids: set[str], merged: MergeResult
) -> tuple[dict[str, Cell], dict[str, list[Cell]]]:
    """Return the notebook's cells by id, and the learner's by the id of the cell before them."""
    theirs: dict[str, Cell] = {}
    own: dict[str, list[Cell]] = {}
    gone = {name: cell for name, cell in before.items() if name not in new_ids}
    current = ""
    for cell in merged.notebook.cells:
        # Each cell is found once, so that a copy of it counts as the learner's own.
        if cell.id in new_ids and cell.id not in theirs:
            theirs[cell.id], current = cell, cell.id
            continue
        old = gone.pop(cell.id, None)
        if old is not None and cell.source == old.source:
            merged.removed += 1
            continue
        own.setdefault(current, []).append(cell)
        if old is not None:
            why = "the notebook has it no more, but you changed it; it stays"
            merged.left.append(f"{_cell_title(old)}: {why}")
    return theirs, own


def _merge_cell(before: Cell | None, cell: Cell, mine: Cell, merged: MergeResult) -> Cell:
    """Return the learner's cell with new metadata, or the new cell if only its text is new."""
    is_same = (mine.cell_type, mine.source) == (cell.cell_type, cell.source)
    if before is not None and not is_same:
        if mine.source == before.source:
            merged.changed += 1
            return copy.deepcopy(cell)
        if cell.source != before.source:
            merged.left.append(_conflict_text(before, cell, "you changed yours"))
    known = {} if before is None else before.metadata
    own = {name: value for name, value in mine.metadata.items() if name not in known}
    mine.metadata = type(mine.metadata)(own | copy.deepcopy(cell.metadata))
    return mine


def _make_ids_unique(cells: list[Cell], reserved: set[str]) -> None:
    seen = {""}
    # The notebook's own cells come first, so that they keep their ids.
    for cell in sorted(cells, key=lambda each: each.get("id") not in reserved):
        if cell.id in seen:
            cell.id = secrets.token_hex(4)
        seen.add(cell.id)


def _conflict_text(before: Cell, cell: Cell, why: str) -> str:
    texts = before.source.split("\n"), cell.source.split("\n")
    # The first two lines name files.
    lines = list(difflib.unified_diff(*texts, lineterm="", n=1))[2:]
    head = f"{_cell_title(before)}: it has a new text, but {why}. New in it:"
    return "\n".join([head, *lines])


def _cell_title(cell: Cell) -> str:
    first = cell.source.strip().split("\n")[0].strip() or "an empty cell"
    return f"`{first[:MAX_TITLE_LENGTH]}{'…' * (len(first) > MAX_TITLE_LENGTH)}`"
