#!/usr/bin/env bash
# Train the peers one after the other, each until its target or for so many minutes; what has a .csv is not run again.
#   [GAMES=Breakout] [PEERS=appo] results/peers/run.sh [MINUTES [SEED ...]]
# Nothing else should run on the machine. Their environments and output lie in runs/.
set -euo pipefail
cd "$(dirname "$0")"
minutes=${1:-60} seeds=("${@:2}")
environments=../../runs/peers_environments
logs=../../runs/peers_logs
mkdir -p "$environments" "$logs"

make_environment() { # NAME
    [ -x "$environments/$1/bin/done" ] && return
    python3 -m venv "$environments/$1"
    "$environments/$1/bin/pip" install -q -r "requirements-$1.txt"
    ln -s python "$environments/$1/bin/done"
}
make_environment sb3
make_environment appo
# ale-py 0.8.1, which Sample Factory needs, comes without games: it takes those of the other environment.
"$environments/appo/bin/ale-import-roms" "$(echo "$environments"/sb3/lib/python3*/site-packages/ale_py/roms)" >/dev/null

run() { # ENVIRONMENT NAME PROGRAM ARGUMENT...
    local output=$2-$game-$seed.csv
    [ -e "$output" ] && return
    "$environments/$1/bin/python" "${@:3}" --target "$target" --seed "$seed" --minutes "$minutes" \
        --output "$logs/$output" >"$logs/$2-$game-$seed.txt" 2>&1
    mv "$logs/$output" "$output"
    tail -n 1 "$output" | sed "s/^/$2 $game seed $seed: last episode (s, steps, return) /"
}
for seed in "${seeds[@]:-1}"; do
    for game in ${GAMES:-Breakout Pong}; do
        [ "$game" = Breakout ] && target=30.5 || target=0
        for peer in ${PEERS:-sb3-a2c sb3-ppo appo}; do
            case $peer in
                appo) run appo appo sample_factory_appo.py "$game" ;;
                sb3-*) run sb3 "$peer" sb3.py "${peer#sb3-}" "$game" ;;
                *) echo "PEERS has $peer; there are sb3-a2c, sb3-ppo and appo" >&2 && exit 2 ;;
            esac
        done
    done
done
