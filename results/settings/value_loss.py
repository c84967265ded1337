"""Mean value loss between 250,000 and 400,000 steps of the runs on Pong, with warm-up and without.

`python results/settings/value_loss.py > results/settings/value_loss.md`. A network that was ruined by its first updates
stays at 0.06; of those that learned, one had as much until then.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from pala.report.runs import published
from pala.run.metrics import read_run
from pala.run.run_folder import config_of
from pala.system.text import table

RESULTS = Path(__file__).parent.parent


def value_loss(run: Path) -> float:
    """Over all ranks' intervals in these steps."""
    intervals = [record for rank in read_run(run) for record in rank if record["type"] == "interval"]
    return statistics.fmean(
        record["loss_value"] for record in intervals if 250_000 <= record["global_steps"] < 400_000
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    rows = []
    for name in ("pong", "settings"):
        for run in published(RESULTS / name):
            if "-Pong-" not in run.name or "_long-" in run.name:  # those were prolonged, and are there from before that
                continue
            a2c, exchange = config_of(run).a2c, config_of(run).exchange
            rule = exchange.mixing if exchange.kind == "gossip" else exchange.kind
            settings = (rule, f"{a2c.learning_rate:g}", f"{a2c.momentum:g}", str(a2c.learning_rate_warmup_updates))
            rows.append((*settings, f"{name}/{run.name}", f"{value_loss(run):.3f}"))
    print(table(("exchange", "rate", "momentum", "warm-up", "run", "value loss"), sorted(rows)))


if __name__ == "__main__":
    main()
