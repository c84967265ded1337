"""Where gossip's time goes in a training: `pala.train` with a clock around the calls of an exchange.

mpirun -np 2 python results/benchmark/profile_exchange.py pong --total-steps 90000 --run.device cuda
"""

import atexit
import functools
import os
import threading
import time
from collections import Counter

from pala.a2c.learner import Learner
from pala.comm import data_proxy
from pala.comm.data_proxy import DataProxy
from pala.comm.threaded import ThreadedTransport
from pala.exchange.gossip.codecs import Float32
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.exchange import Gossip
from pala.exchange.gossip.models import ReceiveBuffer, TensorModels
from pala.train import main

CALLS = {
    Learner: ("step", "differentiate"),
    Gossip: ("after_update", "between_steps"),
    GossipDriver: ("on_message", "advance"),
    TensorModels: ("open", "add", "mix", "fill"),
    ReceiveBuffer: ("check", "take_in"),
    Float32: ("_take_mean", "_move"),
    ThreadedTransport: ("poll",),
    DataProxy: ("_poll", "_complete_receives", "_start_receive", "_send_now", "_empty_outboxes"),
    data_proxy: ("_test",),
}
seconds, calls = Counter(), Counter()


def timed(function, name):
    """`function`, whose calls are counted under this name."""

    @functools.wraps(function)
    def call(*arguments, **named):
        begin = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            key = name if threading.current_thread() is threading.main_thread() else f"thread:{name}"
            seconds[key] += time.perf_counter() - begin
            calls[key] += 1

    return call


def report():
    """Print what has been counted."""
    updates = max(1, calls["Gossip.after_update"])
    print(f"rank 0: {updates} updates")
    for name, total in seconds.most_common():
        each, count = 1e6 * total / calls[name], calls[name] / updates
        print(f"  {name:42s} {each * count:8.1f} us/update  {count:8.3f} calls/update  {each:8.1f} us/call", flush=True)


if __name__ == "__main__":
    for owner, names in CALLS.items():
        for name in names:
            label = name if owner is data_proxy else f"{owner.__name__}.{name}"
            setattr(owner, name, timed(getattr(owner, name), label))
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        atexit.register(report)
    main()
