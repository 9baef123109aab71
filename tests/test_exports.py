"""A learner's export, and thirty of them in one table."""

import csv
import json
import re
from importlib import metadata

import pytest

from labkit.__main__ import main
from labkit.errors import LabError
from labkit_course import exports, lab_catalog, verdict_store
from labkit_course.verdict_store import ExerciseProgress

NAMES = [each.name for each in lab_catalog.find_lab("fsdp").exercises]
PASSED, WRONG = ExerciseProgress("passed", "2026-01-02", 1, "2026-01-02"), ExerciseProgress("wrong", "2026-01-02", 3)


@pytest.fixture
def thirty(tmp_path):
    """Thirty learners; the n-th has passed n mod 11 exercises of lab 2, and failed the next."""
    for number in range(30):
        passed = number % len(NAMES)
        states = dict.fromkeys(NAMES[:passed], PASSED) | {NAMES[passed]: WRONG}
        exports.write_export(tmp_path / f"{number:02d}.json", f"learner {number:02d}", {"fsdp": states})
    return sorted(tmp_path.glob("*.json"))


def test_thirty_files_become_one_table(thirty, tmp_path, capsys):
    table, page = tmp_path / "table.csv", tmp_path / "table.html"
    files = [str(path) for path in thirty]
    assert main(["collect", *files, "--csv", str(table), "--html", str(page)]) == 0
    assert f"30 of 30 files in {table} and {page}" in capsys.readouterr().out
    rows = list(csv.DictReader(table.open()))
    assert [row["name"] for row in rows] == [f"learner {number:02d}" for number in range(30)]
    for number, row in enumerate(rows):
        passed = number % len(NAMES)
        assert int(row["passed"]) == passed
        assert [row[f"2.{place + 1}"] for place in range(len(NAMES))] == [
            *["passed"] * passed,
            "wrong",
            *[""] * (len(NAMES) - passed - 1),
        ]
    assert {f"{lab.exercises[0].number}" for lab in lab_catalog.all_labs()} <= set(rows[0]), "every lab has its columns"
    text = page.read_text()
    assert text.count("<tr") == 31 and "learner 29" in text and "://" not in text
    assert 'http-equiv="refresh" content="60"' in text, "a board of the class loads itself again"


def test_what_cannot_be_collected_is_named_and_does_not_stop_the_others(thirty, tmp_path, capsys):
    (tmp_path / "broken.json").write_text('{"kind": "labkit progress", "na')
    (tmp_path / "foreign.json").write_text('{"cells": []}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nameless.json").write_text(json.dumps(json.loads(thirty[0].read_text()) | {"name": ""}))
    (tmp_path / "odd.json").write_text(json.dumps(json.loads(thirty[0].read_text()) | {"verdicts": {"fsdp": 3}}))
    good = json.loads(thirty[0].read_text())
    for name, change in {
        "surrogate": {"name": "\ud800"},
        "lab": {"verdicts": {"\udcff": {}}},
        "year1": {"when": "0001-01-01T00:00:00+14:00"},
        "year9999": {"when": "9999-12-31T23:59:59-14:00"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(good | change))
    newer = json.loads(thirty[3].read_text()) | {"when": "2999-01-01T00:00:00+00:00", "verdicts": {}}
    (tmp_path / "00_again.json").write_text(json.dumps(newer))
    files = [*sorted(str(path) for path in tmp_path.glob("*.json")), str(tmp_path / "missing.json"), 5000 * "x"]
    assert main(["collect", *files, "--csv", str(tmp_path / "table.csv")]) == 1
    said = capsys.readouterr()
    assert "30 of 42 files" in said.out
    for name, why in {
        "broken": "not JSON",
        "foreign": "not made by `python -m labkit export`",
        "binary": "not JSON",
        "surrogate": r"broken \(surrogates not allowed\)",
        "lab": r"broken \(surrogates not allowed\)",
        "year1": "its name, version or time is missing",
        "year9999": "its name, version or time is missing",
        "nameless": "its name, version or time is missing",
        "odd": "holds no verdicts",
        "missing": "cannot be read",
        "03": "left out, .*00_again.json is of learner 03",
    }.items():
        assert re.search(rf"{name}\.json: .*{why}", said.err), (name, said.err)
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "table.csv").open())}
    assert len(rows) == 30 and rows["learner 03"]["passed"] == "0", "the newer one counts"


def test_a_learners_text_is_neither_computed_nor_executed(tmp_path):
    exports.write_export(tmp_path / "a.json", '=HYPERLINK("x")', {})
    exports.write_export(tmp_path / "b.json", "<script>alert(1)</script>", {"later": {"<b>": PASSED}})
    content = json.loads((tmp_path / "b.json").read_text())
    content["verdicts"]["=1"] = content["verdicts"]["later"]
    (tmp_path / "b.json").write_text(json.dumps(content | {"labkit": "=2"}))
    found, problems = exports.newest_exports([tmp_path / "a.json", tmp_path / "b.json"])
    assert not problems
    frame = exports.progress_frame(found)
    exports.write_csv(frame, tmp_path / "table.csv")
    exports.write_html(frame, tmp_path / "table.html")
    assert [row["name"][:2] for row in csv.DictReader((tmp_path / "table.csv").open())] == ["<s", "'="]
    cells = [cell for row in csv.reader((tmp_path / "table.csv").open()) for cell in row]
    assert "'=2" in cells and "'=1.<b>" in cells and not any(cell.startswith("=") for cell in cells)
    page = (tmp_path / "table.html").read_text()
    assert "<script" not in page and "<b>" not in page
    assert frame["later.<b>"].tolist() == ["passed", ""], "an exercise of another version of labkit has its column, too"


def test_export_writes_one_file_with_name_version_and_verdicts(tmp_path, capsys, monkeypatch):
    (tmp_path / "progress.json").write_text(
        json.dumps(verdict_store.verdicts_to_json({"fsdp": {"zero_bytes": PASSED}}))
    )
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--name", "Ada B. / Lovelace", "--folder", str(tmp_path)]) == 0
    assert "wrote labkit-Ada_B____Lovelace.json, of Ada B. / Lovelace; exercises passed: 1" in capsys.readouterr().out
    found = exports.read_export(tmp_path / "labkit-Ada_B____Lovelace.json")
    assert (found.name, found.labkit) == ("Ada B. / Lovelace", metadata.version("labkit"))
    assert found.verdicts == {"fsdp": {"zero_bytes": PASSED}}
    assert main(["export", "mine.json", "--folder", str(tmp_path)]) == 0, "without a terminal: the account's name"
    assert exports.read_export(tmp_path / "mine.json").name
    assert main(["export", "mine.json", "--name", "  ", "--folder", str(tmp_path)]) == 1
    assert "needs a name" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "progress"])
def test_a_folder_without_copies_is_refused(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--folder", "elsewhere"]) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path / 'elsewhere'} holds no copies of the labs: go to the folder that holds my/, or name yours with"
        " --folder\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_collect_wants_files_and_shows_no_table_of_nobody(tmp_path, capsys):
    assert main(["collect"]) == 2
    assert capsys.readouterr().err == "no file is given: name those that `export` wrote, such as *.json\n"
    assert main(["collect", str(tmp_path / "*.json")]) == 1
    shown = capsys.readouterr()
    assert shown.out == "0 of 1 files\n" and "*.json: cannot be read" in shown.err


def test_export_writes_over_no_other_file(tmp_path):
    (tmp_path / "thesis.json").write_text('{"years": 4}')
    with pytest.raises(LabError, match=r"thesis.json: not made by"):
        exports.write_export(tmp_path / "thesis.json", "me", {})
    exports.write_export(tmp_path / "me.json", "me", {})
    exports.write_export(tmp_path / "me.json", "me", {"fsdp": {"zero_bytes": PASSED}})
    assert exports.read_export(tmp_path / "me.json").verdicts
