"""Files of a run that come home from a host as they grow."""

import pytest

from labkit_cluster import file_sync
from labkit_cluster.file_sync import FileChanges, FileReceiver


@pytest.fixture
def there(tmp_path):
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def bring(growth, arrivals, at_end=False):
    """Bring what is new; which parts that were, by name and place."""
    parts = list(growth.read_changes(at_end))
    for name, place, part in parts:
        arrivals.write_chunk(name, place, part)
    return [(name, place, len(part)) for name, place, part in parts if part]


def test_files_come_as_they_grow_and_others_at_the_end(there, home, monkeypatch):
    monkeypatch.setattr(file_sync, "CHUNK_BYTES", 4)
    growth, arrivals = FileChanges(there, {"given.pickle"}), FileReceiver(home)
    for name in ("rank_00000.log", "given.pickle", ".session.json.7.tmp", "rank_00000.trace.json.gz"):
        (there / name).write_bytes(b"abcdef")
    (there / "rank_00000.stack").touch()
    (there / "torchrun").mkdir()
    assert bring(growth, arrivals) == [("rank_00000.log", 0, 4), ("rank_00000.log", 4, 2)]
    assert sorted(path.name for path in home.iterdir()) == ["rank_00000.log", "rank_00000.stack"]
    assert bring(growth, arrivals) == []
    with (there / "rank_00000.log").open("ab") as file:
        file.write(b"gh")
    assert bring(growth, arrivals) == [("rank_00000.log", 6, 2)]
    assert bring(growth, arrivals, at_end=True)[0] == ("rank_00000.trace.json.gz", 0, 4)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == {
        "rank_00000.log": b"abcdefgh",
        "rank_00000.stack": b"",
        "rank_00000.trace.json.gz": b"abcdef",
    }


def test_a_file_that_was_replaced_comes_anew(there, home):
    growth, arrivals = FileChanges(there, set()), FileReceiver(home)
    (there / "exit.json").write_text("a long text")
    bring(growth, arrivals)
    (there / "new").write_text("short")
    (there / "new").rename(there / "exit.json")
    bring(growth, arrivals)
    assert (home / "exit.json").read_text() == "short"


def test_no_host_writes_over_what_is_not_its_own(there, home):
    (home / "run.json").write_text("of the notebook")
    first, second = FileReceiver(home), FileReceiver(home)
    for arrivals, text in ((first, b"first"), (second, b"second")):
        for name in ("run.json", "notes.txt", "../outside.txt", ".hidden"):
            arrivals.write_chunk(name, 0, text)
    assert (home / "run.json").read_text() == "of the notebook"
    assert (home / "notes.txt").read_text() == (home / "outside.txt").read_text() == "first"
    assert sorted(path.name for path in home.iterdir()) == ["notes.txt", "outside.txt", "run.json"]
    assert [path.name for path in home.parent.iterdir() if path.is_file()] == []
