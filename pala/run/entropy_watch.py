"""The look at a policy's entropy over the first half of a training: where it never moves, nothing is learned. Pure."""

from __future__ import annotations

_SHARE_OF_BUDGET = 0.5
"""Part of the budget in which the entropy should have moved: 26 of 130 trainings of Atari, none of them ruined, had
the entropy of their start after 5 % of 2.5 million steps; one had not moved from it after 20 %, none after 40 %."""
_SHARE_OF_START = 0.01  # of the budget, in which a run that continues may still count as at its start
_TIMES_FIRST = 5  # steps before the second look, in those before the first: a short run's first record comes late
_FLAT = 0.01  # of the first value, or of one nat if that is more


class EntropyWatch:
    """Compares the entropy with the first that was seen, until it has moved, or half of the budget is used."""

    def __init__(self, budget_steps: int, begin_steps: int | None) -> None:
        """`begin_steps`: steps of all ranks when the watch begins; None: not known. A run that continues has no start
        to compare with."""
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
        has_moved = abs(entropy - self._first) > _FLAT * max(1.0, abs(self._first))
        self._is_done = has_moved or global_steps >= self._due_steps
        if has_moved or not self._is_done:
            return ""
        return (
            f"The policy's entropy has not moved from {self._first:.3f} nats since the start: nothing has been "
            "learned. Look whether there are rewards, and at docs/learning.md, 'If it does not learn'."
        )
