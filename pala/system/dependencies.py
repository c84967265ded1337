"""Importing this module checks that a Python which runs one of PALA's programs has the packages that they need: a
checkout is imported by any Python."""

import sys
from importlib.util import find_spec

if sys.argv[:1] == ["-m"]:  # `python -m pala.train`; a script may need less: `pala.Gossip` alone works without mpi4py
    _needed = ("cloudpickle", "gymnasium", "mpi4py", "numpy", "torch", "tyro")
    _missing = [name for name in _needed if find_spec(name) is None]
    if _missing:
        sys.exit(
            f"pala: error: {sys.executable} does not have {', '.join(_missing)}. In a checkout run `source "
            ".venv/bin/activate`, which `./launch/train.sh` makes, or install PALA: `pip install -e .`."
        )
