"""The look at the policy's entropy at 5 % of the budget."""

from __future__ import annotations

import pytest

from pala.run.entropy_watch import EntropyWatch


@pytest.mark.parametrize(
    ("entropies", "says"),
    [
        ({1_000: 1.792, 20_000: 1.79, 49_000: 1.79, 60_000: 1.785, 80_000: 1.785}, [60_000]),
        ({1_000: 1.792, 20_000: 1.79, 60_000: 1.70, 90_000: 1.792}, []),
        ({1_000: None, 2_000: 1.792, 60_000: None, 61_000: 1.792}, [61_000]),
        ({400_000: 1.792, 500_000: 1.792}, []),
        ({1_000: 0.001, 60_000: 0.0}, [60_000]),
        ({1_000: 0.0, 60_000: 0.5}, []),
        ({1_000: -3.0, 60_000: -3.001}, [60_000]),
    ],
    ids=["flat", "falls", "not known at first", "of a run that continues", "none from the start", "rises", "negative"],
)
def test_entropy_that_stays_flat_is_said_once(entropies: dict[int, float | None], says: list[int]) -> None:
    watch = EntropyWatch(budget_steps=1_000_000)
    said = {steps: text for steps, entropy in entropies.items() if (text := watch.look(entropy, steps))}
    assert list(said) == says
    for text in said.values():
        assert "After 5% of the budget" in text and "--a2c.learning-rate" in text
