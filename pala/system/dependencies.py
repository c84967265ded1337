"""Importing this module checks that this Python has the packages that PALA needs: a checkout is imported by any."""

import sys
from importlib.util import find_spec

_needed = ("cloudpickle", "gymnasium", "mpi4py", "numpy", "torch", "tyro")
_missing = [name for name in _needed if find_spec(name) is None]
if _missing:
    _message = (
        f"{sys.executable} does not have {', '.join(_missing)}. In a checkout run `source .venv/bin/activate`, which "
        "`./launch/train.sh` makes, or install PALA: `pip install -e .`."
    )
    if sys.argv[:1] == ["-m"]:  # `python -m pala.train`: somebody types it
        sys.exit(f"pala: error: {_message}")
    raise ModuleNotFoundError(_message)
