"""Records: what a rank writes is what the notebook reads. A cut-off last line is reported, all else is an error."""

import json

import pytest

from labkit.errors import RecordError
from labkit.runs import records

SPAN = {"start_us": 1234.5, "dur_us": 678.9}
GOOD = {"v": 2, "rank": 0, "step": 3, "kind": "span", "name": "backward", **SPAN}
SENT = {"count": 1, "bytes": 64}
NEW = {"v": 2, "rank": 0, "step": 3}
OLD = {"v": 1, "rank": 0, "step": 3}


def write(folder, rank, *lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    records.record_path(folder, rank).write_text(text)
    return records.record_path(folder, rank)


def test_what_is_written_is_read_back_in_order(tmp_path):
    for rank in (1, 0):
        writer = records.RecordWriter(tmp_path, rank)
        writer.write("span", "backward", 3, **SPAN)
        writer.write("scalar", "loss", 3, value=2, unit="")
        writer.write("memory", "peak", 4, bytes=10**12)
        writer.write("comm", "all_reduce", 4, axis="", group_size=4, count=2, bytes=64)
        writer.write("bar", "layers.0", 5, lane="compute", phase="forward", **SPAN)
        writer.write("bucket", "fc4.weight", -1, index=0, bytes=400)
        writer.close()
    found = records.read_records(tmp_path)
    assert found.incomplete_files == []
    assert [(line["rank"], line["kind"]) for line in found.lines] == [
        (rank, kind) for rank in (0, 1) for kind in ("span", "scalar", "memory", "comm", "bar", "bucket")
    ]
    assert found.lines[0] == GOOD
    assert found.lines[2]["bytes"] == 10**12


def test_without_a_folder_records_stay_in_memory():
    writer = records.RecordWriter(None, 5)
    writer.write("memory", "peak", 0, bytes=3)
    writer.close()
    assert writer.lines == [{"v": 2, "rank": 5, "step": 0, "kind": "memory", "name": "peak", "bytes": 3}]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("memory", {"bytes": 1.5}),
        ("memory", {"bytes": True}),
        ("memory", {"bytes": 2**63}),
        ("comm", {"count": 1, "bytes": 1}),
        ("comm", {"axis": "", "group_size": 1.5, "count": 1, "bytes": 1}),
        ("bar", {"lane": "compute", "phase": None, **SPAN}),
        ("memory", {}),
        ("memory", {"bytes": 1, "unit": "B"}),
        ("span", {"start_us": "0", "dur_us": 1.0}),
        ("gauge", {"value": 1.0}),
    ],
)
def test_a_wrong_record_is_refused_where_it_is_written(tmp_path, kind, fields):
    writer = records.RecordWriter(tmp_path, 0)
    with pytest.raises(RecordError):
        writer.write(kind, "name", 0, **fields)
    writer.close()
    assert records.record_path(tmp_path, 0).read_text() == ""


def test_a_cut_off_last_line_is_left_out_and_reported(tmp_path):
    write(tmp_path, 0, GOOD)
    cut = write(tmp_path, 1, GOOD | {"rank": 1}, '{"v": 1, "rank": 1, "st')
    found = records.read_records(tmp_path)
    assert [line["rank"] for line in found.lines] == [0, 1]
    assert found.incomplete_files == [cut]


def test_a_cut_inside_a_letter_is_a_cut_too(tmp_path):
    cut = write(tmp_path, 0, GOOD)
    with cut.open("ab") as file:
        file.write('{"name": "é'.encode()[:-1])
    assert records.read_records(tmp_path).incomplete_files == [cut]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("not json\n", "not JSON"),
        ("\n", "not JSON"),
        ('{"v": 1, "rank"\n', "not JSON"),
        ("[1, 2]\n", "not a JSON object"),
        ("[" * 100_000 + "\n", "not JSON"),
        (GOOD | {"v": 3}, "version 3 is none of 1, 2"),
        (GOOD | {"v": True}, "version True is none of 1, 2"),
        (GOOD | {"v": 1.0}, "version 1.0 is none of 1, 2"),
        (GOOD | {"rank": -1}, "rank = -1 is none of 0 to 3, the ranks of the run"),
        (GOOD | {"rank": 4}, "rank = 4 is none of 0 to 3, the ranks of the run"),
        (GOOD | {"kind": "gauge"}, "kind 'gauge' is none of span, bar, bucket, scalar, memory, comm"),
        (GOOD | {"kind": []}, "kind [] is none of span"),
        (GOOD | {"step": 10**22}, "step has 23 digits, more than 64 bits hold"),
        (GOOD | {"dur_us": -(10**22)}, "dur_us has 23 digits"),
        (GOOD | {"v": 1, "name": 5}, "name = 5 is not str"),
        (OLD | {"kind": "comm", "name": None, **SENT}, "fields "),
        ({"v": 1, "rank": 0, "step": 3, "kind": "span"}, "fields ['kind', 'rank', 'step', 'v'] are not"),
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
        records.read_records(tmp_path, 4)
    assert str(caught.value).startswith(f"{path}:2: {reason}")
    assert str(caught.value).endswith("remove the line, or run again")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD | {"kind": "span", "name": "backward", **SPAN}, GOOD),
        (OLD | {"kind": "span", "name": "data/load", **SPAN}, GOOD | {"name": "data/load"}),
        (
            OLD | {"kind": "span", "name": "compute/forward/layers.0", **SPAN},
            GOOD | {"kind": "bar", "lane": "compute", "phase": "forward", "name": "layers.0"},
        ),
        (
            OLD | {"kind": "span", "name": "exposed/all_reduce/bucket 1", **SPAN},
            GOOD | {"kind": "bar", "lane": "exposed", "phase": "all_reduce", "name": "bucket 1"},
        ),
        (
            OLD | {"kind": "span", "name": "compute/optimizer/", **SPAN},
            GOOD | {"kind": "bar", "lane": "compute", "phase": "optimizer", "name": ""},
        ),
        (
            OLD | {"kind": "comm", "name": "all_reduce", **SENT},
            NEW | {"kind": "comm", "name": "all_reduce", "axis": "", **SENT},
        ),
        (
            OLD | {"kind": "comm", "name": "tp/all_reduce", **SENT},
            NEW | {"kind": "comm", "name": "all_reduce", "axis": "tp", **SENT},
        ),
        (
            OLD | {"kind": "comm", "name": "bucket/12/a/b.weight", **SENT},
            NEW | {"kind": "bucket", "name": "a/b.weight", "index": 12, "bytes": 64},
        ),
        (
            OLD | {"kind": "scalar", "name": "a/b/c", "value": 1, "unit": ""},
            NEW | {"kind": "scalar", "name": "a/b/c", "value": 1, "unit": ""},
        ),
    ],
)
def test_names_of_version_1_are_read_as_the_fields_of_version_2(tmp_path, old, new):
    write(tmp_path, 0, old)
    assert records.read_records(tmp_path).lines == [new]


def test_a_record_from_before_group_sizes_were_written_is_read_as_it_is(tmp_path):
    line = NEW | {"kind": "comm", "name": "all_reduce", "axis": "", **SENT}
    write(tmp_path, 0, line, line | {"group_size": 4})
    assert [line.get("group_size") for line in records.read_records(tmp_path).lines] == [None, 4]


def test_lines_of_both_versions_may_stand_in_one_file(tmp_path):
    write(tmp_path, 0, GOOD, GOOD | {"v": 1})
    assert records.read_records(tmp_path).lines == [GOOD, GOOD]


def test_a_folder_without_records(tmp_path):
    assert records.read_records(tmp_path) == records.Records([], [])
