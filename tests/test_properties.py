"""What holds for any records, any parameters and any damage, not only for those that somebody thought of.

hypothesis makes the examples. A failing one is printed, to be entered as a test of its own beside the others.
"""

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as some

import labkit
from labkit import config
from labkit.errors import RecordError
from labkit.runs import records

settings.register_profile("labkit", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("labkit")

WHOLE = some.integers(-records.MAX_INT64, records.MAX_INT64)
TEXT = some.text(max_size=20)
FLOAT = some.sampled_from([math.nan, math.inf, -math.inf, -0.0]) | some.floats()
VALUES = {int: WHOLE, float: FLOAT | WHOLE, str: TEXT}


@some.composite
def lines(draw):
    """What a rank may write: a kind, a name, a step and the fields of the kind."""
    kind = draw(some.sampled_from(sorted(records.FIELDS_BY_KIND)))
    wanted = {name: VALUES[kind_of] for name, kind_of in records.FIELDS_BY_KIND[kind].items()}
    optional = {name: wanted.pop(name) for name in records.OPTIONAL_FIELDS & wanted.keys()}
    return kind, draw(TEXT), draw(WHOLE), draw(some.fixed_dictionaries(wanted, optional=optional))


def written(folder, ranks):
    """Write the lines of each rank; returns what was written, in the order in which it is read."""
    expected = []
    for rank, found in enumerate(ranks):
        writer = records.RecordWriter(folder, rank)
        for kind, name, step, fields in found:
            writer.write(kind, name, step, **fields)
        writer.close()
        expected += writer.lines
    return expected


@given(some.lists(some.lists(lines(), max_size=5), max_size=3))
def test_whatever_is_written_is_read_again(ranks):
    with tempfile.TemporaryDirectory() as name:
        expected = written(Path(name), ranks)
        found = records.read_records(Path(name))
    assert repr(found.lines) == repr(expected), "as text: NaN is not equal to itself"
    assert found.incomplete_files == []


@given(some.lists(lines(), min_size=1, max_size=4), some.data())
def test_a_last_line_may_be_cut_anywhere(ranks_lines, data):
    with tempfile.TemporaryDirectory() as name:
        expected = written(Path(name), [ranks_lines])
        path = records.record_path(Path(name), 0)
        content = path.read_bytes()
        last = content.rindex(b"\n", 0, -1) + 1 if content.count(b"\n") > 1 else 0
        cut = data.draw(some.integers(last + 1, len(content) - 1))
        path.write_bytes(content[:cut])
        found = records.read_records(Path(name))
    assert repr(found.lines) == repr(expected[:-1])
    assert found.incomplete_files == [path]


@given(some.lists(lines(), min_size=1, max_size=4), some.data())
def test_any_other_damage_is_harmless_or_named_with_its_place(ranks_lines, data):
    with tempfile.TemporaryDirectory() as name:
        written(Path(name), [ranks_lines])
        path = records.record_path(Path(name), 0)
        content = path.read_bytes()
        at = data.draw(some.integers(0, len(content)))
        gone = data.draw(some.integers(0, 9))
        damaged = content[:at] + data.draw(some.binary(max_size=9)) + content[at + gone :]
        path.write_bytes(damaged)
        try:
            found = records.read_records(Path(name))
        except RecordError as error:
            assert str(error).startswith(f"{path}:")
            assert 1 <= int(str(error).removeprefix(f"{path}:").split(":")[0]) <= damaged.count(b"\n")
        else:
            assert not any(map(records.record_problem, found.lines))


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | TEXT,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SESSION = {"device": "cpu", "device_name": "CPU", "cores": 2, "torch": "2.13.0", "note": ""}
INFO = {"version": 2, "program": "strips", "params": {}, "nproc": 2, "exit": "ok", "session": SESSION}


def damaged(good):
    """Texts in place of a JSON file: any bytes, any JSON, the right object with a wrong field, or cut."""
    text = json.dumps(good)
    wrong = some.tuples(some.sampled_from(sorted(good)), JSON).map(lambda pair: json.dumps(good | dict([pair])))
    cut = some.integers(0, len(text) - 1).map(lambda length: text[:length])
    return some.binary(max_size=20) | (JSON.map(json.dumps) | wrong | cut).map(str.encode)


@given(some.sampled_from(["run.json", "session.json"]), some.data())
def test_a_result_with_damaged_json_is_read_or_named(file, data):
    info = INFO if file == "run.json" else {name: value for name, value in INFO.items() if name != "session"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "run.json").write_text(json.dumps(info))
        (folder / file).write_bytes(data.draw(damaged(INFO if file == "run.json" else SESSION)))
        try:
            result = labkit.load(folder)
        except RecordError as error:
            assert str(error).startswith(f"{folder / file}: ")
        else:
            assert repr(result) and result.stamp and result._repr_html_()


@given(some.lists(some.lists(lines(), max_size=4), max_size=2))
def test_whatever_the_ranks_wrote_can_be_shown(ranks):
    with tempfile.TemporaryDirectory() as name:
        written(Path(name), ranks)
        (Path(name) / "run.json").write_text(json.dumps(INFO))
        result = labkit.load(name)
    assert repr(result)
    assert all(isinstance(result.value(each), int | float) for each in result.summary())


@dataclass
class Config:
    """A field of every kind."""

    whole: int = 3
    number: float = 0.5
    switch: bool = False
    text: str = "plain"
    choice: Literal["one", "-two", "None", ""] = "one"
    level: Literal[1, 2, -3] = 1
    limit: int | None = 4
    rate: float | None = None
    title: str | None = "none"
    names: tuple[str, ...] = ("a", "b")
    sizes: tuple[int, ...] = ()
    tile: tuple[float, float] = (1.0, 2.0)
    flags: tuple[bool, ...] = ()
    places: tuple[str, ...] | None = None
    marks: tuple[str, ...] = ("-x", "\\-y", "\\\\", "None")


WORD = some.text(max_size=8)
FINITE = some.floats(allow_nan=False, allow_infinity=False)
PARAMETERS = {
    "whole": WHOLE,
    "number": FINITE,
    "switch": some.booleans(),
    "text": WORD,
    "choice": some.sampled_from(["one", "-two", "None", ""]),
    "level": some.sampled_from([1, 2, -3]),
    "limit": some.none() | WHOLE,
    "rate": some.none() | FINITE,
    "title": some.none() | WORD,
    "names": some.lists(WORD, max_size=3).map(tuple),
    "sizes": some.lists(WHOLE, max_size=3).map(tuple),
    "tile": some.tuples(FINITE, FINITE),
    "flags": some.lists(some.booleans(), max_size=3).map(tuple),
    "marks": some.lists(WORD, max_size=3).map(tuple),
    "places": some.none() | some.lists(WORD, max_size=3).map(tuple),
}


@given(some.fixed_dictionaries({}, optional=PARAMETERS))
def test_any_parameters_arrive_as_they_were_given(given_values):
    made = config.build_config(Config, given_values)
    params = json.loads(json.dumps(config.config_params(made), allow_nan=False))
    assert repr(asdict(config.build_config(Config, params))) == repr(asdict(made))
