#!/usr/bin/env bash
# `python tests/explorer check` or `explore` with what takes most of their time compiled by mypyc:
#   ./tests/compiled.sh check --schedules 1000000     protocol, driver and virtual cluster: 2.5 times as fast
#   ./tests/compiled.sh explore --faults stop nan     the search, but not the ranks
# In a copy, so that no compiled file outlives its source. Needs a C compiler, mypy and
# setuptools: those of the environment that ./launch/test.sh made, or the `python` that comes first in PATH.
set -euo pipefail
case ${1-} in
check)
    modules=(pala/exchange/{budget,wire}.py pala/comm/base.py
        pala/exchange/gossip/{driver,messages,one_way,paired,process_lock,protocol,state,topology}.py
        pala/lab/simulate/{scenario,vector_models,virtual_network,virtual_cluster}.py
        explorer/{faulty_cluster,schedules}.py) ;;
explore) modules=(explorer/{tables,world}.py) ;;
*) echo "usage: $0 check|explore [OPTIONS]" >&2 && exit 2 ;;
esac
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
made=${PALA_VENV:-$repository/.venv}
if "$made/bin/python" -c 'import mypyc' 2>/dev/null; then export PATH="$made/bin:$PATH"; fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$repository"/{pala,tests/explorer,pyproject.toml} "$copy"
cd "$copy"
echo "compiles ${#modules[@]} modules of PALA" >&2
python -m mypyc "${modules[@]}" >build.log 2>&1 || { cat build.log >&2 && exit 1; }
python -m explorer "$@"
