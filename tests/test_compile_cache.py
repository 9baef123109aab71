"""labkit.compile_cache: a compile that is stopped half way spoils no later run."""

import _ctypes
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import labkit
from labkit import compile_cache, doctor
from labkit.environment import ENV_NOTEBOOK_PID
from labkit.launcher import process
from labkit.runs import private_files
from labkit.runs.folder import RunFolder
from labkit.session import session

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="knows libraries of Linux")
WHOLE = Path(_ctypes.__file__).read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Labkit's own folder of compiled code, empty."""
    monkeypatch.delenv(compile_cache.ENV_COMPILE_CACHE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return compile_cache.own_folder()


def write(folder, name, content):
    path = folder / name[1:3] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@LINUX
def test_partial_libraries_are_gone_when_ranks_start_and_whole_ones_stay(folder, tmp_path):
    contents = {"caa.main.so": b"", "cab.main.so": WHOLE[:-1], "cac.main.o": WHOLE[:40], "cad.so": bytes(len(WHOLE))}
    partial = [write(folder, name, content) for name, content in contents.items()]
    kept = [write(folder, "cba.main.so", WHOLE), write(folder, "cbb.main.cpp", b"")]
    assert compile_cache.partial_libraries(folder) == sorted(partial)
    environment = process.rank_environment(RunFolder(tmp_path), 2, "cpu")
    assert environment[compile_cache.ENV_COMPILE_CACHE] == str(folder)
    assert not any(path.exists() for path in partial) and all(path.exists() for path in kept)


@LINUX
def test_a_library_that_another_run_is_compiling_now_stays(folder):
    library = write(folder, "caa.main.so", b"")
    (folder / "locks").mkdir()
    with private_files.lock_file(folder / "locks" / "caa.lock"):
        assert not compile_cache.partial_libraries(folder, remove=True) and library.exists()
    assert compile_cache.partial_libraries(folder, remove=True) == [library] and not library.exists()


def test_the_doctor_says_what_to_delete_from_torchs_own_folders(folder, tmp_path, monkeypatch):
    write(folder, "cown.main.so", b"")
    assert doctor.check_compiled_code().status == "OK", "labkit mends its own"
    partial = [write(tmp_path / "torchinductor_me", "caa.main.so", b""), write(tmp_path / "my own", "cbb.so", b"")]
    monkeypatch.setenv(compile_cache.ENV_COMPILE_CACHE, str(tmp_path / "my own"))
    found = doctor.check_compiled_code()
    assert found.status == "NOTE" and "2 unfinished" in found.detail and "bare torchrun" in found.labs
    assert found.fix.startswith("rm ") and f"'{partial[1]}'" in found.fix and str(partial[0]) in found.fix


def test_under_a_bare_torchrun_the_error_says_what_to_delete(monkeypatch, capsys):
    def main(config):
        raise RuntimeError("ImportError: /tmp/torchinductor_me/aa/caa.main.so: file too short")

    monkeypatch.setattr(session, "exit_process", lambda status: None)
    monkeypatch.setattr(session.payload, "load_config", lambda kind: None)
    monkeypatch.setattr(session.configs, "validate", lambda config, world_size: None)
    monkeypatch.setattr(session.payload, "current_run_folder", lambda: None)
    session.run_main(main, object)
    assert compile_cache.PARTIAL_LIBRARY_FIX in capsys.readouterr().err


def test_compilers_of_a_notebook_that_is_gone_are_stopped(folder):
    write(folder, "caa.main.cpp", b"")
    gone = subprocess.Popen(["true"])
    gone.wait()
    compiling = [sys.executable, "-c", "import time; time.sleep(60)", "-o", str(folder / "aa" / "caa.main.so")]
    notebooks = {"gone": gone.pid, "here": os.getpid()}
    compilers = {
        name: subprocess.Popen(compiling, env=os.environ | {ENV_NOTEBOOK_PID: str(pid)})
        for name, pid in notebooks.items()
    }
    try:
        compile_cache.cache_variables({})
        assert [name for name, each in compilers.items() if each.poll() is None] == ["here"]
    finally:
        for each in compilers.values():
            each.kill()
            each.wait()


COMPILES = """
import torch
double = torch.compile(lambda x: (2 * x).sin() + x.exp().sum())
print(double(torch.ones(100)).shape)
"""
# A compiler that is killed with its run, once it has begun to write a library of torch's.
STOPS = """#!/bin/sh
for word; do case $last in -o) output=$word;; esac; last=$word; done
case $output in *.main.so) if [ -s {left} ]; then
    sed -i 1d {left}
    : > "$output"
    kill -9 "$LABKIT_TORCHRUN_PID"
    sleep 60
fi;; esac
exec g++ "$@"
"""


@LINUX
@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_after_compiles_that_were_killed_the_next_run_compiles(folder, tmp_path, monkeypatch):
    left, program = tmp_path / "left", tmp_path / "compiles.py"
    compiler = tmp_path / "g++"
    left.write_text(2 * "once\n")
    compiler.write_text(STOPS.format(left=left))
    compiler.chmod(stat.S_IRWXU)
    program.write_text(COMPILES)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        with pytest.raises(labkit.RankFailed, match="SIGKILL"):
            labkit.run(program, nproc=1, timeout_s=100)
        assert [path for path in folder.glob("*/*.main.so") if not path.stat().st_size]
    result = labkit.run(program, nproc=1, timeout_s=100)
    assert result.ranks[0].log() == "torch.Size([100])\n"
    assert os.path.getsize(left) == 0 and not compile_cache.partial_libraries(folder)
