"""Slurm, started once for all tests of jobs. Without it, or without root, these are skipped."""

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from fixture_slurm import Slurm

from labkit_cluster.local_slurm import PROGRAMS


@pytest.fixture(scope="session")
def slurm(runs_folder: Path) -> Iterator[Slurm]:
    """A cluster on this machine, which sbatch and the others find by $SLURM_CONF."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid():
        pytest.skip("only root can start Slurm's daemons")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: the socket of munged lies in it
    unseen = runs_folder / "unseen"
    unseen.mkdir()
    slurm = Slurm(folder, unseen)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(slurm.settings)
    try:
        slurm.start()
        yield slurm
    finally:
        left = slurm.end()
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)
        shutil.rmtree(folder)
        assert not left, f"processes {left} outlived their cluster"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the cluster knows to the report of a test that failed, for the cause is rarely in the test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm")
    if report.failed and cluster:
        report.sections.append(("The cluster", cluster.tell()))
    return report


@pytest.fixture(scope="session")
def runs(slurm: Slurm, runs_folder: Path) -> Iterator[Path]:
    """A runs folder with a name that shells and Slurm would read in their own way."""
    folder = runs_folder / 'runs "of" it\'s $HOME 100%j'
    folder.mkdir()
    os.environ["LABKIT_RUNS"] = str(folder)
    yield folder
    os.environ["LABKIT_RUNS"] = str(runs_folder)
