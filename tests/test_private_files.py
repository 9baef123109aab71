"""labkit.runs.private_files: a killed process leaves no temporary folder for long."""

import os
import subprocess
import sys
import time

from labkit.runs import private_files

HOLD = """
import os, signal, sys
from labkit.runs import private_files
with private_files.temporary_folder() as folder:
    (folder / "file").write_text("text")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_temporary_folder_goes_at_the_end_and_that_of_a_killed_process_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(private_files.tempfile, "tempdir", None)
    command, pipe = [sys.executable, "-c", HOLD], subprocess.PIPE
    alive, killed = (subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2))
    folders = [each.stdout.readline().strip() for each in (alive, killed)]
    killed.kill()
    killed.wait()
    long_ago = time.time() - 60
    for folder in folders:
        os.utime(folder, (long_ago, long_ago))
    with private_files.temporary_folder() as own:
        assert [os.path.exists(folder) for folder in folders] == [True, False]
        assert own.stat().st_mode & 0o077 == 0 and own.parent == private_files.Path(folders[0]).parent
    assert not own.exists()
    alive.communicate()
    assert not os.path.exists(folders[0])
