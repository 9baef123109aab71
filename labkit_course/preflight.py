"""Say in one line whether this machine is ready for a class: PASS or FAIL, and the exit status.

python -m labkit_course.preflight          # for all labs
python -m labkit_course.preflight 0 1 2    # for these: what concerns other labs is no failure
"""

import sys
from collections.abc import Sequence

import labkit
from labkit import doctor
from labkit_course import lab_catalog

RANKS = 4


def main(labs: Sequence[str]) -> int:
    """Print the line and return the exit status."""
    try:
        names = [lab_catalog.find_lab(lab).name for lab in labs]
    except labkit.LabError as error:
        print(f"FAIL: {error}")
        return 2
    labs = [name.partition("_")[0].removeprefix("0") for name in names]
    problems = doctor_problems(labs) or ranks_problems()
    if problems:
        print(f"FAIL: {problems}")
        return 1
    which = f"labs {', '.join(labs)}" if labs else "all labs"
    print(f"PASS: {which}: nothing is missing, and {RANKS} ranks made right all-reduces")
    return 0


def doctor_problems(labs: Sequence[str]) -> str:
    """Return what the doctor says must be mended for these labs, "" for nothing."""
    failed = [found for found in doctor.run_checks().findings if found.status == "FAIL"]
    theirs = [found for found in failed if not labs or any(map(found.concerns, labs))]
    said = "; ".join(f"{found.what}: {found.detail}; fix: {found.fix}" for found in theirs)
    return " ".join(said.split())


def ranks_problems() -> str:
    """Return what is wrong with all-reduces of real ranks, "" for nothing."""
    try:
        outcome = labkit.check("all_reduce", nproc=RANKS, timeout_s=120)
    except labkit.LabError as error:
        return f"four ranks: {str(error).splitlines()[0]}"
    return "" if outcome.ok else f"four ranks: {outcome.verdict_text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
