"""Records: what a rank writes is what the notebook reads. A cut-off last line is reported, all else is an error."""

import json

import pytest

from labkit import records
from labkit.errors import RecordError

SPAN = {"start_us": 1234.5, "dur_us": 678.9}
GOOD = {"v": 1, "rank": 0, "step": 3, "kind": "span", "name": "backward", **SPAN}


def write(folder, rank, *lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    records.path_of(folder, rank).write_text(text)
    return records.path_of(folder, rank)


def test_what_is_written_is_read_back_in_order(tmp_path):
    for rank in (1, 0):
        writer = records.Writer(tmp_path, rank)
        writer.write("span", "backward", 3, **SPAN)
        writer.write("scalar", "loss", 3, value=2, unit="")
        writer.write("memory", "peak", 4, bytes=10**12)
        writer.write("comm", "all_reduce", 4, count=2, bytes=64)
        writer.close()
    found = records.read(tmp_path)
    assert found.truncated == []
    assert [(line["rank"], line["kind"]) for line in found.lines] == [
        (rank, kind) for rank in (0, 1) for kind in ("span", "scalar", "memory", "comm")
    ]
    assert found.lines[0] == GOOD
    assert found.lines[2]["bytes"] == 10**12


def test_without_a_folder_records_stay_in_memory():
    writer = records.Writer(None, 5)
    writer.write("memory", "peak", 0, bytes=3)
    writer.close()
    assert writer.lines == [{"v": 1, "rank": 5, "step": 0, "kind": "memory", "name": "peak", "bytes": 3}]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("memory", {"bytes": 1.5}),
        ("memory", {"bytes": True}),
        ("memory", {}),
        ("memory", {"bytes": 1, "unit": "B"}),
        ("span", {"start_us": "0", "dur_us": 1.0}),
        ("gauge", {"value": 1.0}),
    ],
)
def test_a_wrong_record_is_refused_where_it_is_written(tmp_path, kind, fields):
    writer = records.Writer(tmp_path, 0)
    with pytest.raises(RecordError):
        writer.write(kind, "name", 0, **fields)
    writer.close()
    assert records.path_of(tmp_path, 0).read_text() == ""


def test_a_cut_off_last_line_is_left_out_and_reported(tmp_path):
    write(tmp_path, 0, GOOD)
    cut = write(tmp_path, 1, GOOD | {"rank": 1}, '{"v": 1, "rank": 1, "st')
    found = records.read(tmp_path)
    assert [line["rank"] for line in found.lines] == [0, 1]
    assert found.truncated == [cut]


def test_a_cut_inside_a_letter_is_a_cut_too(tmp_path):
    cut = write(tmp_path, 0, GOOD)
    with cut.open("ab") as file:
        file.write('{"name": "é'.encode()[:-1])
    assert records.read(tmp_path).truncated == [cut]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("not json\n", "not JSON"),
        ("\n", "not JSON"),
        ('{"v": 1, "rank"\n', "not JSON"),
        ("[1, 2]\n", "not a JSON object"),
        (GOOD | {"v": 2}, "version 2 is not 1"),
        (GOOD | {"kind": "gauge"}, "kind 'gauge' is none of span, scalar, memory, comm"),
        (GOOD | {"rank": "0"}, "rank = '0' is not int"),
        (GOOD | {"dur_us": None}, "dur_us = None is not float"),
        (GOOD | {"extra": 1}, "fields "),
        ({name: value for name, value in GOOD.items() if name != "dur_us"}, "fields "),
    ],
)
@pytest.mark.parametrize("ending", ["", '{"v": 1, "ra'])
def test_any_other_malformed_line_is_an_error_with_its_place(tmp_path, bad, reason, ending):
    path = write(tmp_path, 3, GOOD, bad, GOOD, ending)
    with pytest.raises(RecordError) as caught:
        records.read(tmp_path)
    assert str(caught.value).startswith(f"{path}:2: {reason}")


def test_a_folder_without_records(tmp_path):
    assert records.read(tmp_path) == records.Records([], [])
