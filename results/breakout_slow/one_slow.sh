#!/usr/bin/env bash
# Open MPI on Linux; CPUs 0 and 1 must be two cores, not two threads of one (`lscpu -e`).
# Give this rank a core of its own, and the last rank's core to three busy processes as well: it gets a quarter of it.
#   mpirun -np 2 results/breakout_slow/one_slow.sh python -m pala.train breakout
set -euo pipefail
rank=$OMPI_COMM_WORLD_RANK ranks=$OMPI_COMM_WORLD_SIZE
if [ "$rank" = $((ranks - 1)) ]; then
    for _ in 1 2 3; do
        taskset -c "$rank" bash -c 'while kill -0 '$$' 2>/dev/null; do for ((i = 0; i < 100000; i++)); do :; done; done' &
    done
fi
exec taskset -c "$rank" "$@"
