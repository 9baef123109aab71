"""labkit.rank.Here: what a program keeps and records beside its steps, and the table of a rank. No group, no launch."""

import pytest
import torch

from labkit import rank
from labkit.errors import ParameterError
from labkit.runs import records
from labkit.runs.folder import RunFolder
from labkit.runs.result import RankOutput
from labkit.session.session import records_text


def test_a_rank_keeps_a_text_and_records_what_a_bucket_carries(tmp_path):
    writer = records.RecordWriter(tmp_path, 3)
    here = rank.Session(3, 4, torch.device("cpu"), writer)
    here.save_artifact("plan", "é\r\n")
    here.record_bucket(1, {"a.weight": 8, "a.bias": 4})
    writer.close()
    assert RankOutput(3, RunFolder(tmp_path)).artifact("plan") == "é\r\n"
    lines = records.read_records(tmp_path).lines
    assert [(line["kind"], line["index"], line["name"], line["bytes"]) for line in lines] == [
        ("bucket", 1, "a.weight", 8),
        ("bucket", 1, "a.bias", 4),
    ]


@pytest.mark.parametrize("folder", [None, "here"])
def test_a_text_with_another_name_than_of_a_file_is_refused_and_without_a_run_none_is_kept(
    tmp_path, monkeypatch, folder
):
    monkeypatch.chdir(tmp_path)
    here = rank.Session(0, 1, torch.device("cpu"), records.RecordWriter(folder and tmp_path, 0))
    with pytest.raises(ParameterError, match=r"cannot keep a text as '\.\./plan'"):
        here.save_artifact("../plan", "text")
    here.save_artifact("plan", "text")
    assert [path.name for path in tmp_path.glob("*.txt")] == (["rank_00000.plan.txt"] if folder else [])


def test_the_table_of_a_rank_names_the_axis_and_shows_bytes_in_words():
    writer = records.RecordWriter(None, 2)
    for axis in ("", "tp"):
        writer.write("comm", "all_reduce", 1, axis=axis, count=3, bytes=5120)
    writer.write("bar", "layers.0", 1, lane="compute", phase="forward", start_us=0.0, dur_us=9e9)
    writer.write("span", "forward", 0, start_us=0.0, dur_us=2000.0)
    writer.write("memory", "peak_total", 1, bytes=2_500_000)
    rows = [" ".join(row.split()) for row in records_text(writer).splitlines()]
    assert rows == [
        "rank 2",
        "forward 2.0 ms median of 1 steps",
        "all_reduce 5.12 kB in 3 calls a step",
        "tp/all_reduce 5.12 kB in 3 calls a step",
        "peak_total 2.5 MB",
    ]
