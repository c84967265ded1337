"""CPU time of recording one part of a rank's time: `python event.py`. The least and the most of seven turns."""

import tempfile
import time
from pathlib import Path

from pala.system.trace import Trace

EVENTS = 50_000
trace = Trace(Path(tempfile.mkdtemp()) / "rank-0000.trace", format=1)
took_us = []
for _ in range(7):
    now_s, began_s = time.perf_counter(), time.process_time()
    for _ in range(EVENTS):
        trace.span("update", now_s - 1, now_s)
    took_us.append(1e6 * (time.process_time() - began_s) / EVENTS)
print(f"{min(took_us):.2f} to {max(took_us):.2f} us an event")
