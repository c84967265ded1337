#!/usr/bin/env bash
# Train: ./launch/train.sh [-n RANKS] [--restarts 3] [PRESET | --resume RUN] [options of pala.train]
#   ./launch/train.sh                                        the quickstart, 2 ranks
#   ./launch/train.sh -n 4 pong --a2c.learning-rate 1e-3
#   ./launch/train.sh -n 4 --restarts 3 pong                 the same, and a job that dies is resumed
#   ./launch/train.sh -n 4 --spares 1 pong                   a fifth rank replaces one that dies
# Makes .venv on first use. Its options: ./launch/train.sh --help; training's: .venv/bin/python -m pala.train --help
set -euo pipefail
trap '' USR2 # for one rank, which then leaves
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

use_environment openmpi
# An environment that holds a copy of PALA may have one of another state of the checkout.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec python -m pala.supervise "${@:-quickstart}"
