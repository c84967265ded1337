"""The look at a policy's entropy early in training: where it stays as it was, nothing is being learned. Pure."""

from __future__ import annotations

_SHARE_OF_BUDGET = 0.05
"""Part of the budget after which the entropy should have moved."""
_SHARE_OF_START = 0.01  # of the budget, in which a run that continues may still count as at its start
_TIMES_FIRST = 5  # steps before the second look, in those before the first: a short run's first record comes late
_FLAT = 0.01  # of the first value, or of one nat if that is more


class EntropyWatch:
    """Compares the entropy at 5 % of the budget, or later, with the first that was seen, once."""

    def __init__(self, budget_steps: int, begin_steps: int | None) -> None:
        """`begin_steps`: steps of all ranks when the watch begins; None: not known. A run that continues has no start
        to compare with."""
        self._budget_steps = budget_steps
        self._first: float | None = None
        self._due_steps = _SHARE_OF_BUDGET * budget_steps
        self._is_done = begin_steps is None or begin_steps > _SHARE_OF_START * budget_steps

    def look(self, entropy: float | None, global_steps: int) -> str:
        """Return what to tell the user, once; else an empty string. `entropy`: mean over the ranks, in nats, None where
        it is not known."""
        if self._is_done or entropy is None:
            return ""
        if self._first is None:
            self._first = entropy
            self._due_steps = max(self._due_steps, _TIMES_FIRST * global_steps)
            return ""
        if global_steps < self._due_steps:
            return ""
        self._is_done = True
        if abs(entropy - self._first) > _FLAT * max(1.0, abs(self._first)):
            return ""
        share = min(1.0, global_steps / self._budget_steps)
        return (
            f"After {share:.0%} of the budget the policy's entropy is what it was at the start "
            f"({self._first:.3f} nats): it has not begun to learn. Look whether there are rewards yet; else try a "
            "larger `--a2c.learning-rate`, or a smaller `--a2c.entropy-coefficient`."
        )
