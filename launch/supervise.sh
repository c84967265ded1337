#!/usr/bin/env bash
# As train.sh, and a job that dies is resumed: ./launch/supervise.sh [-n RANKS] [--restarts 3] [PRESET.toml | --resume RUN] ...
#   ./launch/supervise.sh -n 4 configs/pong.toml
# Makes .venv on first use. All options: ./launch/supervise.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment openmpi
exec python "$repository/launch/supervise.py" "$@"
