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
    """The merged notebook; how many untouched cells took a new text, were added and were removed;
    and a message for each cell that stayed although the notebook's own has changed.
    """

    notebook: Notebook
    changed: int = 0
    added: int = 0
    removed: int = 0
    left: list[str] = field(default_factory=list)


def merge_notebooks(base: Notebook, new: Notebook, mine: Notebook) -> MergeResult:
    """Return the learner's notebook with what is new since ``base``; no argument is modified."""
    after = _match_cells(base.cells, new.cells)
    before = {place: base.cells[old] for old, place in after.items()}
    merged = MergeResult(copy.deepcopy(mine))
    theirs, own = _place_cells(base.cells, new.cells, merged, after)
    cells = list(own.get(-1, []))
    for place, cell in enumerate(new.cells):
        if place in theirs:
            cells.append(_merge_cell(before.get(place), cell, theirs[place], merged))
        elif place not in before:
            merged.added += 1
            cells.append(copy.deepcopy(cell))
        elif cell.source != before[place].source:
            merged.left.append(_conflict_text(before[place], cell, "you removed it"))
        cells += own.get(place, [])
    _make_ids_unique(cells, {cell.id for cell in new.cells})
    merged.notebook.cells = cells
    # Cells have ids from nbformat 4.5 on.
    merged.notebook.nbformat_minor = max(5, mine.nbformat_minor)
    if "labkit" in new.metadata:
        merged.notebook.metadata["labkit"] = copy.deepcopy(new.metadata["labkit"])
    return merged


def _match_cells(base: list[Cell], new: list[Cell]) -> dict[int, int]:
    """Map indices in ``base`` to ``new``: by id, or by similarity between neighbours."""
    places = {(cell.cell_type, cell.id): place for place, cell in enumerate(new)}
    keys = [(cell.cell_type, cell.id) for cell in base]
    found = {old: places[key] for old, key in enumerate(keys) if key in places}
    for old, cell in enumerate(base):
        if old in found:
            continue
        start = max((place for earlier, place in found.items() if earlier < old), default=-1) + 1
        later = [place for later, place in found.items() if later > old and place >= start]
        free = set(range(start, min(later, default=len(new)))) - set(found.values())
        scores = {place: _text_similarity(cell, new[place]) for place in sorted(free)}
        best = max(scores, key=lambda place: scores[place], default=-1)
        if scores.get(best, 0) >= MIN_SIMILARITY:
            found[old] = best
    return found


def _text_similarity(one: Cell, other: Cell) -> float:
    if one.cell_type != other.cell_type:
        return 0.0
    words = one.source.split(), other.source.split()
    return difflib.SequenceMatcher(None, *words, autojunk=False).ratio()


def _place_cells(
    base: list[Cell], new: list[Cell], merged: MergeResult, after: dict[int, int]
) -> tuple[dict[int, Cell], dict[int, list[Cell]]]:
    """Return the learner's cells by place in the new notebook, and their own by the place before.

    Each cell of the notebook is found once, so that a copy of it counts as the learner's own.
    """
    mine = merged.notebook.cells
    by_id = {cell.id: old for old, cell in enumerate(base)}
    # After an interrupted update the learner's notebook already has cells of the new one.
    by_new_id = {cell.id: place for place, cell in enumerate(new)}
    # Some editors drop ids, so cells without one are found by their text.
    ids = {cell.get("id") for cell in mine}
    without_id = {old: cell for old, cell in enumerate(base) if cell.id not in ids}
    by_text = {(cell.cell_type, cell.source): old for old, cell in without_id.items()}
    theirs: dict[int, Cell] = {}
    own: dict[int, list[Cell]] = {}
    current = -1
    for cell in mine:
        old = by_id.pop(cell.get("id"), None)
        if old is None:
            old = by_text.pop((cell.cell_type, cell.source), None)
        place = by_new_id.get(cell.get("id")) if old is None else after.get(old)
        if place in theirs:
            old = place = None
        if place is not None:
            theirs[place], current = cell, place
        elif old is not None and cell.source == base[old].source:
            merged.removed += 1
        else:
            own.setdefault(current, []).append(cell)
            if old is not None:
                why = "the notebook has it no more, but you changed it; it stays"
                merged.left.append(f"{_cell_title(base[old])}: {why}")
    return theirs, own


def _merge_cell(before: Cell | None, cell: Cell, mine: Cell, merged: MergeResult) -> Cell:
    """Return the learner's cell with new metadata, or the new cell if only its text is new."""
    if before is not None and mine.source != cell.source:
        if mine.source == before.source:
            merged.changed += 1
            return copy.deepcopy(cell)
        if cell.source != before.source:
            merged.left.append(_conflict_text(before, cell, "you changed yours"))
    known = {} if before is None else before.metadata
    mine.id = cell.id
    own = {name: value for name, value in mine.metadata.items() if name not in known}
    mine.metadata = type(mine.metadata)(own | copy.deepcopy(cell.metadata))
    return mine


def _make_ids_unique(cells: list[Cell], reserved: set[str]) -> None:
    """Give a new id to every cell without one, or with one that is taken."""
    seen = {""}
    # The notebook's own cells come first, so that they keep their ids.
    for cell in sorted(cells, key=lambda each: each.get("id") not in reserved):
        if cell.get("id", "") in seen:
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
