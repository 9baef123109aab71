"""Lab 1's explorers: any control alone is drawn, and real ranks measure what was predicted.

Also launch/placement, which one of them runs: shapes, bytes and collectives of every pair of placements.
"""

import itertools
import math

import numpy
import pytest
from fixture_cells import run_cells
from fixture_explorers import default
from matplotlib.figure import Figure

from labkit import local_ranks
from labkit.models import photo
from labkit.theory import placements as theory
from labkit_course import widgets
from labkit_course.widgets.spatial import PLACEMENT_NAMES

EXPLORERS = {"placement": widgets.PlacementExplorer, "spatial": widgets.SpatialExplorer}
MOVES = [
    (name, control, value)
    for name, explorer in EXPLORERS.items()
    for control, knob in explorer.controls.items()
    for _, value in knob.options
]


@pytest.mark.parametrize(("name", "control", "value"), MOVES)
def test_any_control_alone_is_predicted_and_drawn(name, control, value):
    explorer = EXPLORERS[name]()
    explorer.chosen = default(explorer) | {control: value}
    png, words = explorer.render_figure()
    assert png.startswith(b"\x89PNG")
    assert "rank" in words


@pytest.mark.parametrize(
    ("name", "moved", "message"),
    [
        ("placement", {"mesh": (2,), "rank": 3}, "a mesh of 2 ranks has no rank 3: take one from 0 to 1"),
        ("spatial", {"mesh": (1, 4), "tensor_dim": 2}, "4 ranks cannot share 64: .* use fewer ranks"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(name, moved, message):
    explorer = EXPLORERS[name]()
    with pytest.raises(ValueError, match=message):
        explorer.predict(**default(explorer) | moved)


def held_against_ranks(explorer, moved, tolerance=0):
    """Launch for these values; every prediction, and the figure with what was measured."""
    explorer.chosen = default(explorer) | moved
    predicted, result = explorer.predict(**explorer.chosen), explorer.run_current()
    for name, expected in predicted.items():
        rel = tolerance if name in explorer.tolerances else 0
        assert result.value(name) == pytest.approx(expected, rel=rel, abs=0), name
    assert explorer.result is result
    png, _ = explorer.render_figure()
    assert png.startswith(b"\x89PNG")
    return result


@pytest.mark.parametrize("moved", [{}, {"every": 100, "mesh": (4,), "rank": 3}, {"first": "Partial()", "every": 20}])
def test_a_placement_is_what_ranks_hold(moved):
    explorer = widgets.PlacementExplorer()
    result = held_against_ranks(explorer, moved)
    for rank in range(result.world_size):  # another rank to look at is no other run
        explorer.chosen["rank"] = rank
        assert explorer.result is result
        for name, expected in explorer.predict(**explorer.chosen).items():
            assert result.value(name) == expected, name


@pytest.mark.parametrize("moved", [{}, {"mesh": (2, 2), "tensor_dim": 2}, {"mesh": (1, 1)}])
def test_strips_cost_and_pay_what_ranks_measure(moved):
    explorer = widgets.SpatialExplorer()
    held_against_ranks(explorer, moved, tolerance=0.02)  # a halo more or less is more than that
    explorer.chosen["budget"] = 2
    assert explorer.result, "another budget is no other run"


def test_words_tell_the_result():
    assert drawn("placement", first="Partial()", rank=3) == (
        "rank 3 holds 300 × 128 pixels of term 2 of 2, 461 kB; "
        "the whole on every rank takes 1 all-gather and 1 all-reduce"
    )
    assert drawn("placement", first="Replicate()", second="Replicate()").endswith("takes no message")
    words = drawn("spatial", budget=4)
    assert "keeps 5.53 MB of activations, over the budget of 4 MB, and one rank alone 10.9 MB" in words
    assert "it hands over 98.3 kB for halos and 230 kB to all-reduces" in words


def drawn(name, **moved):
    explorer = EXPLORERS[name]()
    values = default(explorer) | moved
    return explorer.draw(Figure(), explorer.predict(**values), None, **values)


PLACED = [((4,), (name,)) for name in PLACEMENT_NAMES] + [
    ((2, 2), names) for names in itertools.product(PLACEMENT_NAMES, PLACEMENT_NAMES)
]


def test_every_placement_is_cut_and_made_whole_as_theory_says():
    cells = [
        {"every": every, "mesh": "x".join(map(str, mesh)), "placements": names}
        for mesh, names in PLACED
        for every in (20, 100)
        if every == 20 or len(set(names)) == 1  # with 100 some ranks hold nothing, and are asked less
    ]
    for cell, result in zip(cells, run_cells("placement", 4, cells), strict=True):
        shape, mesh = (
            photo.load_photo()[:: cell["every"], :: cell["every"]].shape,
            list(map(int, cell["mesh"].split("x"))),
        )
        for rank in range(4):
            rows, columns, _ = theory.local_piece(shape, mesh, cell["placements"], rank).shape
            assert (result.value(f"rank {rank} rows"), result.value(f"rank {rank} columns")) == (rows, columns), cell
        sent = {name: result.value(name) for name in result.summary() if name[:4] == "all_" and "wire" not in name}
        assert sent == theory.full_tensor_collectives(shape, mesh, cell["placements"]), cell
        assert result.value("values that differ") == 0


def test_the_check_of_a_placement_compares_every_value():
    (result,) = run_cells("placement", 2, [{"check": "parity", "placements": ["Partial()"], "every": 20}])
    assert (result.value("ok"), result.value("compared")) == (1, 30 * 26 * 3)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 2)])
@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 1)])
def test_pieces_are_those_of_dtensor(mesh, shape):
    from torch import arange
    from torch.distributed.tensor import Replicate, Shard

    kinds = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate()": Replicate()}
    whole = arange(math.prod(shape)).reshape(shape)
    for names in itertools.product(kinds, repeat=len(mesh)):
        for rank, local in local_ranks.shards_by_rank(whole, mesh, [kinds[name] for name in names]).items():
            rows, columns = theory.local_piece(shape, mesh, names, rank).indices
            expected = whole[rows.start : rows.stop, columns.start : columns.stop]
            assert numpy.array_equal(local, expected), (names, rank)


def test_terms_are_counted_like_ranks():
    piece = [theory.local_piece((4, 4), (2, 2), ("Partial()", "Partial()"), rank) for rank in range(4)]
    assert [(each.term, each.terms) for each in piece] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    piece = [theory.local_piece((4, 4), (2, 2), ("Shard(0)", "Partial()"), rank) for rank in range(4)]
    assert [(each.term, each.terms) for each in piece] == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4), (2, 2), ("Shard(0)",), 0), "1 placements for a mesh of 2 axes: give one for each axis"),
        (((4, 4), (2,), ("Shard(2)",), 0), r"'Shard\(2\)' of axis 0 is none of Shard\(0\), Shard\(1\), Replicate"),
        (((4, 4), (2,), ("Shard(0)",), -1), "no rank -1: take one from 0 to 1"),
    ],
)
def test_placements_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.local_piece(*arguments)


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_terms_add_up_to_the_picture(terms, kind):
    picture = photo.load_photo()[::7, ::7].astype(kind)
    parts = [photo.brightness_term(picture, index, terms) for index in range(terms)]
    assert numpy.array_equal(sum(part.astype("float32") for part in parts), picture.astype("float32"))
    assert terms == 1 or not numpy.array_equal(parts[0], parts[1])
