"""The look at the policy's entropy over the first half of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pala.config import Config, RunConfig
from pala.run.console import Reporter
from pala.run.entropy_watch import EntropyWatch
from pala.run.metrics import MetricsWriter, metrics_path


@pytest.mark.parametrize(
    ("entropies", "says"),
    [
        ({1_000: 1.792, 200_000: 1.79, 490_000: 1.79, 510_000: 1.785, 800_000: 1.785}, [510_000]),
        ({1_000: 1.792, 20_000: 1.79, 510_000: 1.70, 900_000: 1.792}, []),
        ({1_000: 1.759, 20_000: 1.713, 400_000: 1.762, 510_000: 1.767}, []),
        ({1_000: None, 2_000: 1.792, 510_000: None, 520_000: 1.792}, [520_000]),
        ({150_000: 1.792, 740_000: 1.792, 760_000: 1.792, 800_000: 1.792}, [760_000]),
        ({150_000: 1.6, 800_000: 1.2}, []),
        ({1_000: 0.001, 510_000: 0.0}, [510_000]),
        ({1_000: 0.0, 510_000: 0.5}, []),
        ({1_000: -3.0, 510_000: -3.001}, [510_000]),
    ],
    ids=[
        "flat",
        "falls",
        "falls and comes back",
        "not known at first",
        "first seen late",
        "learned by then",
        "none from the start",
        "rises",
        "negative",
    ],
)
def test_entropy_that_stays_flat_is_said_once(entropies: dict[int, float | None], says: list[int]) -> None:
    watch = EntropyWatch(budget_steps=1_000_000, begin_steps=0)
    said = {steps: text for steps, entropy in entropies.items() if (text := watch.look(entropy, steps))}
    assert list(said) == says
    for text in said.values():
        assert "has not moved from" in text and "If it does not learn" in text


@pytest.mark.parametrize(("begin_steps", "says"), [(0, True), (500, True), (40_000, False), (None, False)])
def test_a_short_run_says_it_and_one_that_continues_does_not(
    begin_steps: int | None, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fast environments make over 1 % of their budget before the first record, and heard nothing."""
    reporter = Reporter(tmp_path, 1, Config(total_steps=100_000, run=RunConfig(console="none")), begin_steps)
    metrics_path(tmp_path, 0).parent.mkdir()
    writer = MetricsWriter(metrics_path(tmp_path, 0), 0)
    for steps in (15_000, 70_000, 95_000):
        writer.write([{"type": "interval", "time_s": steps / 1000, "global_steps": steps, "entropy": 0.693}])
        reporter.report(steps)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("nothing has been learned") == says
