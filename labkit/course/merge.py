"""One notebook out of three: as it was when the copy was made, as it is now, and as the learner has
it.

A cell that the learner has not touched takes the new text. A new cell comes in where the new
notebook has it, and an untouched one that is gone goes. What the learner wrote or changed stays as
it is, and what was left out for that is said. Outputs stay with every cell whose text stays.

The learner's cells are found by their ids, which JupyterLab keeps. Ids of exercises last; that of
another cell comes from its text (see notebooks/tools), so a cell whose text has changed is found
between its neighbours, as the most similar one. Where none is similar, the old one counts as
removed and the new one as new: that loses nothing.
"""

import copy
import difflib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Cell = Any  # nbformat's NotebookNode
Notebook = Any
MIN_SIMILARITY = 0.5
"""Part of the words that a cell shares with the one that it was."""
MAX_TITLE_LENGTH = 60


@dataclass
class MergeResult:
    """What came of it."""

    notebook: Notebook
    changed: int = 0
    """Untouched cells that took a new text."""
    added: int = 0
    removed: int = 0
    left: list[str] = field(default_factory=list)
    """For each cell that stayed as the learner has it, although the notebook's own has changed:
    which, why, and how.
    """


def merge_notebooks(base: Notebook, new: Notebook, mine: Notebook) -> MergeResult:
    """Bring what is new since ``base`` into the learner's notebook; none of the three is
    changed.
    """
    after = _match_cells(base.cells, new.cells)
    merged = MergeResult(copy.deepcopy(mine))
    before = {place: base.cells[old] for old, place in after.items()}
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
    merged.notebook.nbformat_minor = max(5, mine.nbformat_minor)  # from which on cells have ids
    if "labkit" in new.metadata:
        merged.notebook.metadata["labkit"] = copy.deepcopy(new.metadata["labkit"])
    return merged


def _match_cells(base: list[Cell], new: list[Cell]) -> dict[int, int]:
    """For the places of cells, those of the same cells in the new notebook: with the same id, or
    similar in a gap.
    """
    places = {(cell.cell_type, cell.id): place for place, cell in enumerate(new)}
    found = {
        old: places[key]
        for old, cell in enumerate(base)
        if (key := (cell.cell_type, cell.id)) in places
    }
    for old, cell in enumerate(base):
        if old in found:
            continue
        start = max((place for earlier, place in found.items() if earlier < old), default=-1) + 1
        end = min(
            (place for later, place in found.items() if later > old and place >= start),
            default=len(new),
        )
        free = [place for place in range(start, end) if place not in found.values()]
        scores = {place: _text_similarity(cell, new[place]) for place in free}
        best = max(scores, key=lambda place: scores[place], default=-1)
        if scores.get(best, 0) >= MIN_SIMILARITY:
            found[old] = best
    return found


def _text_similarity(one: Cell, other: Cell) -> float:
    if one.cell_type != other.cell_type:
        return 0.0
    return difflib.SequenceMatcher(
        None, one.source.split(), other.source.split(), autojunk=False
    ).ratio()


def _place_cells(
    base: list[Cell], new: list[Cell], merged: MergeResult, after: dict[int, int]
) -> tuple[dict[int, Cell], dict[int, list[Cell]]]:
    """The learner's cells: those with a place in the new notebook, and others by the place that
    they stand behind.
    """
    theirs: dict[int, Cell] = {}
    own: dict[int, list[Cell]] = {}
    current = -1
    for cell, old, place in _locate_cells(base, new, merged.notebook.cells, after):
        if place is not None:
            theirs[place], current = cell, place
        elif old is not None and cell.source == base[old].source:
            merged.removed += 1
        else:
            own.setdefault(current, []).append(cell)
            if old is not None:
                merged.left.append(
                    f"{_cell_title(base[old])}: the notebook has it no more, but you changed it; it"
                    " stays"
                )
    return theirs, own


def _locate_cells(
    base: list[Cell], new: list[Cell], mine: list[Cell], after: dict[int, int]
) -> Iterator[tuple[Cell, int | None, int | None]]:
    """Each cell of the learner with its place in the old and in the new notebook, each place
    once.
    """
    by_id = {cell.id: old for old, cell in enumerate(base)}
    by_new_id = {
        cell.id: place for place, cell in enumerate(new)
    }  # after an update that was cut off
    ids = {cell.get("id") for cell in mine}
    by_text = {
        (cell.cell_type, cell.source): old for old, cell in enumerate(base) if cell.id not in ids
    }
    taken: set[int] = set()
    for cell in mine:
        text = (cell.cell_type, cell.source)  # some editors drop ids
        old = by_id.pop(cell.get("id"), None)
        old = by_text.pop(text, None) if old is None else old
        place = by_new_id.get(cell.get("id")) if old is None else after.get(old)
        if place in taken:
            old, place = None, None
        elif place is not None:
            taken.add(place)
        yield cell, old, place


def _merge_cell(before: Cell | None, cell: Cell, mine: Cell, merged: MergeResult) -> Cell:
    """The new cell with the learner's outputs, or the learner's own."""
    same_text = mine.source == cell.source
    if not same_text and before is not None and mine.source == before.source:
        merged.changed += 1
        return copy.deepcopy(cell)
    if not same_text and before is not None and cell.source != before.source:
        merged.left.append(_conflict_text(before, cell, "you changed yours"))
    known = {} if before is None else before.metadata
    mine.id = cell.id
    mine.metadata = type(mine.metadata)(
        {name: value for name, value in mine.metadata.items() if name not in known}
        | copy.deepcopy(cell.metadata)
    )
    return mine


def _make_ids_unique(cells: list[Cell], reserved: set[str]) -> None:
    """Give a cell without an id, or with one that is taken, another."""
    seen: set[str] = set()
    for cell in sorted(
        cells, key=lambda each: each.get("id") not in reserved
    ):  # the notebook's own keep theirs
        if cell.get("id", "") in seen | {""}:
            cell.id = secrets.token_hex(4)
        seen.add(cell.id)


def _conflict_text(before: Cell, cell: Cell, why: str) -> str:
    lines = difflib.unified_diff(
        before.source.split("\n"), cell.source.split("\n"), lineterm="", n=1
    )
    return "\n".join(
        [f"{_cell_title(before)}: it has a new text, but {why}. New in it:", *list(lines)[2:]]
    )


def _cell_title(cell: Cell) -> str:
    """A cell in words: the first line that says something."""
    lines = [line for line in cell.source.split("\n") if line.strip()]
    first = lines[0].strip() if lines else "an empty cell"
    return f"`{first if len(first) <= MAX_TITLE_LENGTH else first[:MAX_TITLE_LENGTH] + '…'}`"
