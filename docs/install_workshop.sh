#!/bin/sh
# Install this folder without a network, and say in the last line whether it is ready for a class: PASS or FAIL.
#
#     ./install.sh            # all labs
#     ./install.sh 0 1 2      # these labs: what concerns the others is no failure
#     PYTHON=python3.12 ./install.sh
#
# `make workshop` has put it here, with all wheels. It writes in this folder alone.
set -eu
cd "$(dirname "$0")"
: "${PYTHON:=python3}"

fail() {
    echo "FAIL: $1"
    exit 1
}

made_for=$(cat wheels/made-for)
this=$("$PYTHON" -c "$(cat wheels/made-for.py)") || fail "there is no $PYTHON here: PYTHON=/path/to/python3 $0"
[ "$this" = "$made_for" ] || fail "the wheels are for $made_for, and $PYTHON is $this: PYTHON=/path/to/another $0"
command -v make >/dev/null || fail "there is no make here: install it, for Debian and Ubuntu as apt-get install make"

echo "Installing into $(pwd)/.venv, which takes some minutes."
PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels make PYTHON="$PYTHON" TORCH_INDEX= .venv/.installed >install.log 2>&1 || {
    tail -n 5 install.log
    fail "not installed, see $(pwd)/install.log"
}
exec .venv/bin/python -m labkit_course.preflight "$@"
