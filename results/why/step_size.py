"""Mean height of Breakout's learning curve until the smallest budget of the runs, and the way to a human's score:

    python results/why/step_size.py results/breakout/runs/* results/why/step_size/*
"""

import sys
from pathlib import Path

from pala.compare.collect import load
from pala.compare.plan import Plan

TARGET = 30.5  # a human's score (dqn_zoo table)

plan = Plan(Path("configs/compare/breakout.toml"))
runs = sorted((load(Path(word), plan) for word in sys.argv[1:]), key=lambda run: (run.cell.variant, run.seed))
end = 1_000_000
print(f"| variant | learning rate | seed | mean height to {end:,} steps | steps to {TARGET} |\n|---|---:|---:|---:|---:|")
for run in runs:
    reached = run.reaches(TARGET)
    steps = f"{reached[0]:,.0f}" if reached else "not reached"
    kind, rate = run.config.exchange.kind, run.config.a2c.learning_rate
    print(f"| `{kind}` | {rate:g} | {run.seed} | {run.area(end):.1f} | {steps} |")
