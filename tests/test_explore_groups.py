"""Every order of events inside groups of two and three ranks, and some in larger ones; planted bugs are found."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from explorer.groups import Case, Member, Phase, explore, walk
from pala.exchange.budget import Stop

pytestmark = pytest.mark.often(
    "test_a_planted_bug_is_found",
    "test_a_trace_is_told_in_words",
)

ALL = frozenset({"death", "leave", "signal", "callback"})


def case(members: int, updates: int, faults: str = "", most: int = 1, hears: str = "", **options: Any) -> Case:
    return Case(members, updates, frozenset(faults.split()), most, frozenset(hears.split()), **options)


# ---- planted bugs ----------------------------------------------------------------------------------------------------


class LeadsWhileALowerLives(Member):
    @property
    def _is_leader(self) -> bool:
        return True


class DecidesBeforeAllHaveArrived(Member):
    def waits_for_decision(self) -> Phase:
        if self._is_leader and not self._memory.is_decided(self._update):
            self._decide(self._update, self._members, Stop.NONE)
            return Phase.TAKES_DECISION
        return super().waits_for_decision()


class LeavesTheSlicesOfTheDead(Member):
    def _complete_mean(self) -> bool:
        return all(self._memory.members[rank]["reduced"] >= self._update for rank in self._members)


class CopiesTheMeanTooEarly(Member):
    def waits_for_mean(self) -> Phase:
        return Phase.UPDATES


class TakesNoModel(Member):
    def _take_published(self, healthy: bool) -> bool:
        self._gossips = True
        return super()._take_published(healthy)


class CountsWhatItHears(Member):
    @property
    def global_steps(self) -> int:
        return self._state.budget.global_steps


class KnowsBetterWhoLives(Member):
    @property
    def num_learners(self) -> int:
        return len(self._state.living)


class PublishesOnceMore(Member):
    def _gossip_if_leader(self, healthy: bool) -> bool:
        if self._is_leader:
            self._gossip(healthy)
            return True
        return super()._gossip_if_leader(healthy)


class WaitsForWhoLeft(Member):
    def _is_gone(self, rank: int) -> bool:
        return rank not in self._state.budget.present


class EndsWhenItHears(Member):
    @property
    def stop(self) -> Stop:
        return self._state.budget.stop


class EndsWithoutAWord(Member):
    def _arrive_at_end(self) -> None:
        self._update += 1

    def stop_now(self, reason: Stop) -> None:
        self._memory.end = lambda reason: None  # type: ignore[method-assign]
        super().stop_now(reason)


class ArrivesForItself(Member):
    def _arrive(self, gradient: Tensor) -> None:
        super()._arrive(gradient)
        if self._is_leader:
            self._decide(self._update, [self._comm.rank], Stop.NONE)


BUGS: list[tuple[type[Member], str, Case]] = [
    (LeadsWhileALowerLives, "two leaders", case(2, 1)),
    (DecidesBeforeAllHaveArrived, "a mean of", case(2, 1)),
    (LeavesTheSlicesOfTheDead, "deadlock", case(2, 1, "death")),
    (CopiesTheMeanTooEarly, "a mean of", case(2, 1)),
    (TakesNoModel, "has the model", case(2, 1)),
    (CountsWhatItHears, "makes update", case(2, 1, hears="news")),
    (KnowsBetterWhoLives, "makes update", case(3, 1, "death")),
    (PublishesOnceMore, "has the model", case(3, 1, "death")),
    (WaitsForWhoLeft, "deadlock", case(2, 2, "leave")),
    (EndsWhenItHears, "deadlock", case(2, 2, hears="stop")),
    (EndsWithoutAWord, "deadlock", case(2, 1, "callback")),
    (ArrivesForItself, "taken it for dead", case(2, 1)),
]


@pytest.mark.parametrize(("bug", "symptom", "where"), BUGS)
def test_a_planted_bug_is_found(bug: type[Member], symptom: str, where: Case) -> None:
    found = explore(Case(where.members, where.updates, where.faults, where.most_faults, where.hears, bug)).violations
    assert found and symptom in found[0].what and found[0].trace, found


def test_a_trace_is_told_in_words() -> None:
    (found,) = explore(case(2, 1, "death", member=LeavesTheSlicesOfTheDead)).violations
    assert found.what == "deadlock: ranks [0] wait forever"
    assert "1 dies" in found.trace and "0 hears that 1 is dead" in found.trace


# ---- what holds ------------------------------------------------------------------------------------------------------


# No fault need happen, nor is anything heard that need be: each has all states of one with less.
CASES = [
    case(2, 3, hears="news"),
    case(3, 1, "death", most=2),
    case(3, 1, "death", hears="news"),
    case(3, 2, "death"),
    case(3, 2, "leave"),
    case(2, 2, " ".join(ALL), most=2, hears="stop"),
]


LARGEST = pytest.param(case(3, 1, "death signal", most=2), marks=pytest.mark.soak)


@pytest.mark.parametrize("what", [*CASES, LARGEST])
def test_a_group_holds(what: Case) -> None:
    found = explore(what)
    assert found.finished and not found.violations, "\n".join(map(str, found.violations))


@pytest.mark.parametrize("block", range(4))
def test_larger_groups_hold_on_random_runs(block: int) -> None:
    """Of three to six members, of which one at least stays."""
    for seed in range(50 * block, 50 * block + 50):
        size = 3 + seed % 4
        hears = "news stop" if seed % 3 == 0 else "news"
        faults = "death leave signal callback" if seed % 2 else "death leave"
        end = walk(case(size, 4, faults, size - 1, hears), seed)
        assert all(rank.phase in (Phase.ENDED, Phase.LEFT, Phase.DEAD) for rank in end.ranks)
