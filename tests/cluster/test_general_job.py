"""The general script for Slurm, which needs nothing of labkit: preempted on a real Slurm, it goes on where it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from labkit.errors import LabError
from labkit_cluster import local_slurm
from labkit_course import job_script
from labkit_course.launches import TRAIN, losses, telling_lines

pytestmark = [pytest.mark.calm, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]
STEPS = 10
STEP = re.compile(r"^step (\d+) on 2 ranks", re.MULTILINE)


def submitted(slurm, folder, script):
    """The log of a job that trains on two nodes and is told to stop once step 3 is saved, and its last state."""
    (folder / "job.sbatch").write_text(script)
    (folder / "labkit.py").write_text("raise ImportError('the script needs no labkit')")
    (folder / "train.py").write_text(TRAIN.read_text())
    variables = {"SAVES": folder / "saves", "STEPS": STEPS, "STEP_S": 0.3, "RANKS": 1, "OMP_NUM_THREADS": 1}
    job = slurm.submit(folder / "job.sbatch", "train.py", folder=folder, variables=variables)
    try:
        job_script.preempt(slurm, job, folder / "saves" / "step_00000003" / ".metadata")
        state = slurm.wait(job)
    finally:
        slurm.ask("scancel", job)
    (log,) = folder.glob(f"*-{job}.out")
    return log.read_text(), state


def test_a_preempted_job_saves_queues_again_and_goes_on(slurm, tmp_path):
    log, state = submitted(slurm, tmp_path, job_script.GENERAL.read_text())
    if "terminate called without an active exception" in log:  # torch may abort a rank that ends well
        (tmp_path / "again").mkdir()
        log, state = submitted(slurm, tmp_path / "again", job_script.GENERAL.read_text())
    assert state == "COMPLETED", log
    first, second = re.split(r"^attempt 2 on n\[1-2\]$", log, flags=re.MULTILINE)
    before, after = ([int(step) for step in STEP.findall(text)] for text in (first, second))
    assert before and before[0] == 0 and 3 <= len(before) < STEPS, "stopped before it was done"
    assert before + after == [*range(STEPS)], "no step twice, and none left out"
    assert losses(log).to_list() == pytest.approx(losses(unbroken(tmp_path)).to_list(), rel=1e-5)


def unbroken(folder):
    """What two ranks on this machine print that nobody interrupts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    env = os.environ | {"SAVES": "unbroken", "STEPS": f"{STEPS}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, telling_lines(done.stderr)
    return done.stdout


def test_the_lab_shows_a_job_that_was_recorded():
    log = job_script.recorded_words()["job"]["log"]
    assert STEP.findall(log) == [str(step) for step in range(12)]
    assert "attempt 2 on n[1-2]" in log and log.endswith("(Slurm: COMPLETED)\n")


def test_elsewhere_the_lab_says_that_the_job_is_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(job_script, "can_start_slurm", lambda: False)
    assert job_script.run_job("", tmp_path, TRAIN, STEPS) == job_script.recorded_words()["job"]["log"]
    assert "(recorded: Slurm's daemons need root" in capsys.readouterr().out


def test_a_slurm_of_ones_own_ends_with_its_block(monkeypatch):
    if not local_slurm.can_start_slurm():
        pytest.skip("Slurm's daemons need root, and its packages")
    with local_slurm.start_local_slurm() as slurm:
        place = str(slurm.settings.parent)
        assert len(daemons_of(place)) >= 4
        assert slurm.ask("sinfo", "--noheader", "-o", "%N %T") == "n[1-2] idle"
        with pytest.raises(LabError, match=r"sbatch refuses: .*[Uu]nable to open file"):
            slurm.submit(Path("none.sbatch"), folder=Path("/"), variables={})
    assert not daemons_of(place) and not Path(place).exists()
    monkeypatch.setattr(local_slurm, "can_start_slurm", lambda: False)
    with pytest.raises(LabError, match="Slurm's daemons need root"), local_slurm.start_local_slurm():
        pass


def daemons_of(place):
    """The processes that were started with a file of this folder."""
    found = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return [words for words in found if any(place in word for word in words)]


def test_a_rehearsal_passes_the_general_script_and_sees_each_of_its_three_faults():
    """The signal as well, which the job above gets by hand: a time limit takes minutes to come."""
    general = job_script.GENERAL.read_text()
    assert job_script.problem_of(job_script.rehearse(general)) == ("", "")
    problems = [
        job_script.problem_of(job_script.rehearse(general.replace(right, wrong)))[0]
        for right, wrong in job_script.BREAKS.items()
    ]
    assert all(problems) and len(set(problems)) == 3
