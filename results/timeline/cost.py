"""What recording a timeline costs: one training in which every other update is recorded.

    mpirun -np 2 python cost.py cost-cartpole.json 1200 --env.id CartPole-v1
    mpirun -np 2 python cost.py cost-atari.json 150 --env.id ALE/Breakout-v5

The second argument is the number of pairs of updates. Which update of a pair is recorded is drawn. What counts is the
CPU time of rank 0's process for an update, with its rollout and messages. Where other work disturbs most updates, the
undisturbed ones tell: so the 10th percentiles of both kinds are compared, beside the median over pairs of the ratio.
The ranges hold 95 % of 2,000 samples of the pairs, drawn with replacement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pala.train as program
from pala.exchange.budget import Stop
from pala.run.loop import Loop
from pala.system.trace import EVENT

OUTPUT, PAIRS = Path(sys.argv[1]), int(sys.argv[2])
WARM_UP = 20  # updates
RUN = Loop.run


def measured(loop: Any, *given: Any) -> Any:
    """Train as `Loop.run` does, and measure."""
    exchange, trace, draw = loop._exchange, loop._exchange.trace, np.random.default_rng(loop._rank)
    order = np.stack([first := draw.random(PAIRS) < 0.5, ~first], 1).ravel()  # whether each update is recorded
    cpu_s = np.zeros(2 * PAIRS)
    began_s = 0.0

    def turn(is_on: bool) -> None:
        loop._watch._trace = exchange.trace = exchange.driver.trace = trace if is_on else None

    def on_update(updates: int) -> None:
        nonlocal began_s
        number = updates - WARM_UP
        if 0 < number <= 2 * PAIRS:
            cpu_s[number - 1] = time.process_time() - began_s
        if number == 2 * PAIRS and loop._rank == 0:
            exchange.stop_now(Stop.CALLBACK)
        if 0 <= number < 2 * PAIRS:
            turn(bool(order[number]))
        began_s = time.process_time()

    turn(False)
    ended = RUN(loop, *given[:3], on_update)
    made = int(np.count_nonzero(cpu_s)) // 2  # pairs, if it was ended before
    if loop._rank == 0 and made:
        trace._write()
        off, on = (cpu_s[: 2 * made][of[: 2 * made]] for of in (~order, order))
        write(np.stack([off, on], 1), trace._size // EVENT.size / made)
    turn(True)
    return ended


def write(pairs: np.ndarray, events: float) -> None:
    """Write the figures and the raw data: [pairs, off and on]."""
    draw = np.random.default_rng(1)
    samples = [pairs, *(pairs[draw.integers(0, len(pairs), len(pairs))] for _ in range(2000))]
    tenths = np.array([np.percentile(sample, 10, 0) for sample in samples])
    medians = np.array([np.median(sample[:, 1] / sample[:, 0]) for sample in samples])
    figures: dict[str, Any] = {"pairs": len(pairs), "events_an_update": events, "load_average": os.getloadavg()}
    figures["cpu_ms_an_update_not_recorded"] = 1e3 * tenths[0, 0]
    for name, ratios in (("ratio_of_10th_percentiles", tenths[:, 1] / tenths[:, 0]), ("median_ratio", medians)):
        figures[name] = [ratios[0], *np.percentile(ratios[1:], [2.5, 97.5])]
    print(json.dumps(figures, default=float), flush=True)
    raw = {"cpu_us_off_on": np.round(1e6 * pairs).astype(int).tolist()}
    OUTPUT.write_text(json.dumps(figures | raw, default=float) + "\n")


Loop.run = measured  # type: ignore[method-assign]
sys.argv[1:] = [*sys.argv[3:], "--run.trace", "--run.no-tensorboard", "--run.console", "none"]
sys.argv += ["--evaluation.episodes", "0"]
program.main()
