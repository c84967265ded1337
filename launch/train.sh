#!/usr/bin/env bash
# Train on this machine: ./launch/train.sh [-n RANKS] [PRESET.toml | --resume RUN] [options of pala.train]
#   ./launch/train.sh                                                     the quickstart, 2 ranks
#   ./launch/train.sh -n 4 configs/pong.toml --a2c.learning-rate 1e-3
# Makes .venv on first use.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ranks=2
if [ "${1-}" = -n ]; then
    [[ "${2-}" =~ ^[1-9][0-9]*$ ]] || fail "'-n' needs a number of ranks, as in: ./launch/train.sh -n 4 configs/pong.toml"
    ranks=$2
    shift 2
fi
case " $* " in
    *" --resume"* | *" --help "* | *" -h "*) ;;
    *) [[ "${1-}" == *.toml ]] || set -- "$repository/configs/quickstart.toml" "$@" ;;
esac

use_environment openmpi
run_mpi -np "$ranks" python -m pala.train "$@"
