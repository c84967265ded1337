"""The look at a policy's entropy early in training: where it stays as it was, nothing is being learned. Pure."""

from __future__ import annotations

SHARE_OF_BUDGET = 0.05
"""Part of the budget after which the entropy should have moved."""
_SHARE_OF_START = 0.01  # of the budget, in which the first value must have been seen
_FLAT = 0.01  # of the first value, or of one nat if that is less


class EntropyWatch:
    """Compares the entropy at 5 % of the budget with the first that was seen, once."""

    def __init__(self, budget_steps: int) -> None:
        self._budget_steps = budget_steps
        self._first: float | None = None
        self._is_done = False

    def look(self, entropy: float | None, global_steps: int) -> str:
        """Return what to tell the user, once; else an empty string. `entropy`: mean over the ranks, in nats, None where
        it is not known. A run that continues has no start to compare with."""
        if self._is_done or entropy is None:
            return ""
        if self._first is None:
            self._first = entropy
            self._is_done = global_steps > _SHARE_OF_START * self._budget_steps
            return ""
        if global_steps < SHARE_OF_BUDGET * self._budget_steps:
            return ""
        self._is_done = True
        if abs(entropy - self._first) > _FLAT * max(1.0, abs(self._first)):
            return ""
        return (
            f"After {SHARE_OF_BUDGET:.0%} of the budget the policy's entropy is what it was at the start "
            f"({self._first:.3f} nats): it has not begun to learn. Look whether there are rewards yet; else try a "
            "larger `--a2c.learning-rate`, or a smaller `--a2c.entropy-coefficient`."
        )
