"""Ranks as threads of one process, with faults by script: test a loop that uses `pala.Gossip` without MPI.

import pala
from pala.testing import Killed, fail_at, run_ranks

def train(rank):                                # your own loop; its pala.Gossip finds its rank by itself
    ...

results = run_ranks(8, train, faults=[fail_at(2, update=10), fail_at(5, update=30)])
assert isinstance(results[2], Killed)           # what each returned, or the exception that ended it
"""

from pala.testing.faults import (
    Fault,
    corrupt,
    drop,
    fail_at,
    fail_at_message,
    leave_at,
    signal_at,
    stop_at,
    stop_at_message,
)
from pala.testing.memory import Killed, run_ranks

__all__ = [
    "Fault",
    "Killed",
    "corrupt",
    "drop",
    "fail_at",
    "fail_at_message",
    "leave_at",
    "run_ranks",
    "signal_at",
    "stop_at",
    "stop_at_message",
]
