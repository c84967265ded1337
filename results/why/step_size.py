"""Mean height of Breakout's learning curves over the first million steps, and the way to a human's score, of runs.

python results/why/step_size.py results/breakout/runs/* results/why/step_size/*
"""

import sys
from pathlib import Path

from pala.lab.compare.collect import load
from pala.lab.compare.plan import Plan

END, TARGET = 1_000_000, 30.5  # steps; a human's score (dqn_zoo table)

plan = Plan(Path("configs/compare/breakout.toml"))
runs = [load(Path(word), plan) for word in sys.argv[1:]]
print(f"| exchange | learning rate | seed | mean height to {END:,} steps | steps to {TARGET} |")
print("|---|---:|---:|---:|---:|")
for run in sorted(runs, key=lambda run: (run.config.exchange.kind, run.config.a2c.learning_rate, run.seed)):
    reached, config = run.reaches(TARGET), run.config
    steps = f"{reached[0]:,.0f}" if reached else "not reached"
    print(f"| {config.exchange.kind} | {config.a2c.learning_rate:g} | {run.seed} | {run.area(END):.1f} | {steps} |")
