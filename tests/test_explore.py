"""Every order of events of two and three ranks: small cases hold, and planted bugs are found with a trace."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from explorer import explore, planted
from explorer.explore import Explored, Explorer
from explorer.states import Case, Mode, freeze
from explorer.world import Label, State, Successor, World
from pala.config.catalogue import TOPOLOGIES
from pala.exchange.gossip.canonical import canonical
from pala.exchange.gossip.driver import GossipDriver
from pala.exchange.gossip.paired import Paired
from pala.exchange.gossip.protocol import GossipProtocol
from pala.system.errors import PalaError
from support.helpers import slow_but_for

pytestmark = pytest.mark.often(
    "test_a_planted_bug_is_found",
    "test_a_bug_planted_in_the_driver_is_found",
    "test_two_ranks_hold_with_worse_faults",
    "test_a_search_that_is_given_up_says_so",
    "test_who_goes_must_leave_a_model_of_use_behind",
    "test_mistakes_are_named",
)


def explored(faults: str = "", symmetry: bool = False, first_only: bool = False, **options: Any) -> Explored:
    case = Case(faults=frozenset(faults.split()), **options)
    return Explorer(case, symmetry, not symmetry).run(most_states=300_000, first_only=first_only)


# ---- planted bugs ----------------------------------------------------------------------------------------------------


PROTOCOL_BUGS: list[tuple[type[GossipProtocol], str, dict[str, Any]]] = [
    (planted.LosesCreditsWhileItWaits, "deadlock", {}),
    (planted.CountsReceivedWeightTwice, "push-sum weight", {"mixing": "push_sum", "updates": 6}),
    (planted.KeepsTheWeightItSends, "push-sum weight", {"mixing": "push_sum", "updates": 6}),
    (planted.LosesTheWeightOfTheRefused, "push-sum weight", {"mixing": "push_sum", "updates": 6, "faults": "nan"}),
    (planted.PaysNoDebtsWhileItWaits, "deadlock", {}),
    (planted.IgnoresTheLock, "process lock", {}),
    (planted.WaitsOneUpdateTooLate, "staleness", {}),
    (planted.AddsUpWhatItHears, "known steps", {"updates": 6}),
    (planted.TellsNobodyOfTheEnd, "deadlock", {"faults": "stop"}),
    (planted.ForgetsTheDead, "deadlock", {"faults": "death"}),
    (planted.NeverSendsOnceMore, "deadlock", {"faults": "nan"}),
    (planted.CountsTheDeadsStepsTwice, "known steps", {"faults": "death", "updates": 6}),
    (planted.HealsFromParts, "healed by a part", {"faults": "nan", "whole_every": 2}),
    (planted.KeepsPartsWhileItMustHeal, "wait", {"faults": "nan", "whole_every": 5}),
    (planted.KeepsItsStaleModel, "stale", {"faults": "absence"}),
    (planted.TakesWhatWasSentLongAgo, "stale", {"faults": "absence"}),
    (planted.TakesTheDeadsWeightForLost, "inbox", {"faults": "death"}),
    (planted.WaitsForTheStopped, "wait", {"faults": "patience garbled"}),
    (planted.RefusesWhoRefuses, "endless wait", {"faults": "nan"}),
    (planted.IgnoresWhoLeaves, "deadlock", {"faults": "leave"}),
    (planted.CountsOnAnyRank, "no rank that stays has a model", {"faults": "leave nan"}),
    (planted.CountsOnTheDead, "no rank that stays has a model", {"faults": "leave"}),
    pytest.param(
        planted.WaitsForTheAnswerOfWhoIsGone,
        "wait",
        {"faults": "death", "ranks": 3, "max_staleness": 0},
        marks=pytest.mark.slow,
    ),
    (planted.NobodyAnswersWhenOffersCross, "wait", {}),
    (planted.MakesASecondOffer, "second offer", {"ranks": 3}),
    (planted.MovesByItsOwnFraction, "sum of all models", {"ranks": 3}),
    pytest.param(
        planted.ForgetsToCloseAtADeath,
        "deadlock",
        {"ranks": 3, "faults": "death", "max_staleness": 0},
        marks=pytest.mark.slow,
    ),
    (planted.ForgetsTheAnswersOfTheDead, "sum of all models", {"faults": "death"}),
    (planted.AnswersWithoutMoving, "staleness", {}),
    (planted.AnswersWhenItHasMoved, "moved", {}),
    (planted.AnswersOnlyTheFirst, "sum of all models", {"ranks": 3}),
    (planted.ClosesNothingThatIsRefused, "wait", {"faults": "nan", "max_staleness": 0}),
    (planted.ClosesOffersToTheSilent, "memory for", {"faults": "patience"}),
    (planted.KeepsTheAnswersToVoidOffers, "only when it was answered", {"faults": "nan"}),
    (planted.DoesNotVoidAfterHealing, "before it was healed", {"faults": "nan"}),
    (planted.IgnoresTheNumber, "answer to another", {"faults": "garbled"}),
    (planted.RepliesToNothingThatCannotBeRead, "wait", {"faults": "garbled"}),
    (planted.LeavesAnAnswerThatCannotBeReadOpen, "wait", {"faults": "garbled"}),
    (planted.SendsToAllOfAGroup, "deadlock", {"ranks": 3, "groups": (0, 0, 1)}),
    (planted.NeverHearsWhoLeads, "wait", {"ranks": 3, "groups": (0, 0, 1), "faults": "death"}),
]
DRIVER_BUGS: list[tuple[type[GossipDriver], str, dict[str, Any]]] = [
    (planted.KeepsTheCredit, "deadlock", {}),
    (planted.TellsNoDeaths, "deadlock", {"faults": "death"}),
    (planted.AcceptsPoison, "poison", {"faults": "nan"}),
    (planted.AddsNothing, "inbox", {}),
    (planted.KeepsWhatItShouldForget, "inbox", {"faults": "nan", "whole_every": 5}),
    (planted.FillsASnapshotOnItsWay, "wrote over a message", {"ranks": 3, "topology": "complete"}),
    (planted.AnswersAnother, "to itself", {"faults": "garbled"}),
    (planted.SendsToOneOnly, "deadlock", {"ranks": 3, "topology": "complete"}),
    (planted.ReusesAnOpenOffersSnapshot, "wrote over an open offer", {"mixing": "paired"}),
    (planted.AnswersFromItsOffersSnapshot, "wrote over an open offer", {"mixing": "paired"}),
    (planted.MovesTwice, "moved twice", {"mixing": "paired"}),
    (planted.KeepsNothing, "only when it was answered", {"mixing": "paired"}),
    pytest.param(
        planted.KeepsForAnother,
        "only when it was answered",
        {"mixing": "paired", "faults": "patience", "ranks": 3},
        marks=pytest.mark.slow,
    ),
    (planted.AddsTheAnswerToTheInbox, "sum of all models", {"mixing": "paired"}),
    (planted.ClosesNothing, "offers: kept", {"mixing": "paired"}),
    (planted.PullsTwice, "moved otherwise", {"mixing": "paired"}),
]


class AllLeave(World):
    """Three ranks, from where each was told to leave, has heard who stays, and has left in the same moment."""

    def initial(self) -> list[State]:
        (state,) = super().initial()

        def each(word: str) -> list[Label]:
            return [(word, rank) for rank in range(self.n)]

        messages: list[Label] = [("deliver", *pair, "message") for pair in itertools.permutations(range(self.n), 2)]
        models: list[Label] = [(*message[:3], "model") for message in messages]
        for label in each("tell") + messages + each("finish") + messages + models + each("leave"):
            found = [successor.state for successor in self.successors(state) if successor.label[: len(label)] == label]
            assert found or label in models, label
            state = next((after for after in found if after is not None), state)
        return [state]


def explored_with(bug: str, type_: type, options: dict[str, Any]) -> Explored:
    options = {"mixing": "paired" if issubclass(type_, Paired) else "uniform", bug: type_} | options
    return explored(first_only=True, **options)


@pytest.mark.parametrize(("bug", "symptom", "options"), PROTOCOL_BUGS)
def test_a_planted_bug_is_found(bug: type[GossipProtocol], symptom: str, options: dict[str, Any]) -> None:
    found = explored_with("protocol", bug, options).violations
    assert found and re.search(symptom, found[0].what) and found[0].trace, found


@pytest.mark.parametrize(("bug", "symptom", "options"), DRIVER_BUGS)
def test_a_bug_planted_in_the_driver_is_found(bug: type[GossipDriver], symptom: str, options: dict[str, Any]) -> None:
    found = explored_with("driver", bug, options).violations
    assert found and re.search(symptom, found[0].what) and found[0].trace, found


def test_a_rare_fault_comes_so_often_and_no_more() -> None:
    def states(most: int) -> int:
        found = explored("nan", rare=frozenset({"nan"}), most_rare=most, driver=planted.AcceptsPoison)
        assert (most > 0) == any("poison" in violation.what for violation in found.violations)
        return explored("nan", rare=frozenset({"nan"}), most_rare=most).states

    assert states(0) < states(1) < states(2)


def test_a_trace_is_the_shortest_and_told_in_words() -> None:
    (found, *_) = explored_with("protocol", planted.IgnoresTheLock, {}).violations
    assert found.what == "process lock: rank 1 holds two models of rank 0" and found.trace == ("finish 0", "finish 0")
    (found, *_) = explored_with("protocol", planted.ForgetsTheDead, {"faults": "death"}).violations
    assert str(found) == (
        "deadlock: ranks [0] wait forever, after 3 events:\n    1. finish 0\n    2. finish 0\n    3. death 1"
    )


# ---- what holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
@pytest.mark.parametrize("max_staleness", slow_but_for([0, 1, 2], 1))
@pytest.mark.parametrize("faults", ["stop", "timer", "death stop", "leave death", "duplicate"])
def test_two_ranks_hold(mixing: str, max_staleness: int, faults: str) -> None:
    """No fault need happen: what is possible without one is among the states of `stop`, where nothing is sent again."""
    assert_holds(explored(faults, mixing=mixing, max_staleness=max_staleness))


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
@pytest.mark.parametrize("faults", ["nan", "patience"])
def test_two_ranks_hold_with_worse_faults(mixing: str, faults: str) -> None:
    assert_holds(explored(faults, mixing=mixing, max_staleness=0))


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "paired"], "uniform"))
def test_who_leaves_takes_no_last_model_along(mixing: str) -> None:
    """Whether another rank's model is finite is not known: it has to say so."""
    assert_holds(explored("leave nan", mixing=mixing, max_staleness=0, rare=frozenset({"nan"}), most_rare=1))


@pytest.mark.parametrize(
    ("others", "is_found"),
    [
        ({"mode": Mode.UPDATES}, False),
        ({"mode": Mode.LEFT, "may_leave": True}, False),  # it may find that all it counts on are gone, and stay
        ({"finite": False}, True),
        ({"mode": Mode.DEAD, "finite": False}, True),
    ],
)
def test_who_goes_must_leave_a_model_of_use_behind(others: dict[str, Any], is_found: bool) -> None:
    world = World(Case(3, faults=frozenset({"leave"})))
    state = world.initial()[0]
    first, *rest = (world._about[number] for number in state[: world.n])
    about = [first._replace(mode=Mode.LEFT, may_leave=True, present=()), *(one._replace(**others) for one in rest)]
    found: list[Successor] = []
    world._departs(found, state, about, 0)
    assert [bool(successor.faults) for successor in found] == [is_found]


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
def test_of_three_ranks_that_leave_at_once_one_stays(mixing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every order in which the news of the three come, and of those who have gone."""
    monkeypatch.setattr(explore, "World", AllLeave)
    found = explored("leave", ranks=3, mixing=mixing, topology="ring")
    assert_holds(found)
    assert found.states > 300


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_ranks_hold(max_staleness: int) -> None:
    assert_holds(explored(symmetry=True, ranks=3, topology="ring", max_staleness=max_staleness))
    assert_holds(explored(ranks=3, topology="ring", mixing="paired", max_staleness=max_staleness))


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("faults", ["", "death stop"])
def test_two_groups_hold_whoever_leads(mixing: str, max_staleness: int, faults: str) -> None:
    """No fault need happen: those of a death alone are among the states of both. Without any, nothing is sent again."""
    assert_holds(explored(faults, ranks=3, groups=(0, 0, 1), mixing=mixing, max_staleness=max_staleness))


@pytest.mark.parametrize("faults", ["", "nan", "death"])
def test_push_sum_keeps_its_weights(faults: str) -> None:
    assert_holds(explored(faults + " resume", mixing="push_sum", updates=4))


def test_push_sum_of_three_ranks_computes_with_exact_weights() -> None:
    """Thirds are no floats."""
    case = Case(3, "ring", "push_sum", faults=frozenset({"resume"}), updates=3)
    assert not Explorer(case, symmetry=True, liveness=False).run(most_states=10_000).violations


def test_every_choice_of_the_rounds_that_an_event_may_begin_is_tried() -> None:
    assert [len(Case(n, "random").first_rounds) for n in (2, 3, 4, 5)] == [0, 2, 6, 12]
    offset = TOPOLOGIES["random"].offset
    assert offset is not None
    rounds = Case(3, "random", max_staleness=0).first_rounds  # a rank may owe for as many as there are ranks
    assert len({tuple(offset(3, round_ + k, 0) for k in range(3)) for round_ in rounds}) == 2**3


@pytest.mark.parametrize("mixing", ["uniform", "paired"])
def test_a_state_survives_freezing_and_a_canonical_one_is_its_own(mixing: str) -> None:
    case = Case(3, "random", mixing, max_staleness=0, faults=frozenset({"patience", "nan", "death"}))
    explorer = Explorer(case)
    explorer.run(most_states=2000)
    states = [rank.state for rank in explorer.world.ranks if rank.mode is not Mode.DEAD]
    assert len(states) > 300
    for values in states:
        state = case.thaw(values)
        assert freeze(state) == values
        canonical(state, case.rules, 0.0, has_ended=False, period=case.period)
        assert freeze(state) == values


def test_ranks_that_resume_begin_in_all_rounds() -> None:
    assert len(World(Case(3, "exponential", faults=frozenset({"resume"}))).initial()) == 2**3


def test_ranks_that_resume_in_unlike_rounds_hold() -> None:
    assert_holds(explored("resume", symmetry=True, ranks=3, topology="exponential", max_staleness=0, updates=2))


def assert_holds(found: Explored) -> None:
    assert found.finished and not found.violations, "\n".join(map(str, found.violations))


@pytest.mark.parametrize(
    ("topology", "ranks", "faults"),
    [("ring", 3, ""), ("ring", 2, "leave"), pytest.param("complete", 2, "stop nan", marks=pytest.mark.slow)],
)
def test_symmetry_leaves_out_nothing(topology: str, ranks: int, faults: str) -> None:
    """The least of each class of states that differ by the ranks' numbers is what is found with symmetry."""
    case = Case(ranks, topology, max_staleness=0, faults=frozenset(faults.split()))
    plain, reduced = Explorer(case, liveness=False), Explorer(case, symmetry=True, liveness=False)
    plain.run()
    reduced.run()

    assert classes(plain, reduced) == set(reduced.index) and len(reduced.index) < len(plain.index)


def classes(plain: Explorer, reduced: Explorer) -> set[State]:
    """The states of one search as the other knows them."""
    world, other = reduced.world, plain.world
    letters = [world.letter_id(letter) for letter in other.letters]
    lanes = [world.lane_id(tuple(letters[k] for k in lane)) for lane in other.lanes]
    ranks = [world.rank_id(rank) for rank in other.ranks]
    n = world.n
    return {
        world.least((*(ranks[i] for i in state[:n]), *(lanes[i] for i in state[n:-1]), state[-1]))
        for state in plain.index
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    explore.run(["--mixings", "paired", "--staleness", "0", "1", "--faults", "stop", "timer", "--together", "1"])
    printed = capsys.readouterr().out
    assert printed.count("| yes ") == 4 and "| stop " in printed and "| timer " in printed
    explore.run(["--faults", "help"])
    assert "false-death" in capsys.readouterr().out


def test_the_table_names_the_limit_of_rare_faults() -> None:
    explored = explore.Explored()
    command = explore.Command(mixings=("uniform",), staleness=(1,), faults=("nan", "garbled"), rare_faults=("nan",))
    assert "nan + garbled, at most 2 of garbled + nan" in explore.row(explore.cases(command)[0], explored)


def test_a_search_that_is_given_up_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    explore.run(["--mixings", "paired", "--staleness", "1", "--most-states", "100"])
    assert "| no " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--faults", "rain"], "'rain' is none of"), (["--mixings", "push_sum"], "without '--updates'"),
        (["--together", "2", "--faults", "stop"], "'--together' is 2, but '--faults' names 1"),
        (["--mixings", "paired", "--topologies", "complete"], "no case to explore"),
        (["--faults", "death", "timer", "--rare-faults", "timer"], "'timer' cannot be rare"),
        (["--rare-faults", "nan"], "'nan' is none of '--faults'"),
        (["--mixings", "paired", "--whole-every", "0"], "'--whole-every'.* must be at least 1"),
        (["--ranks", "6", "--topologies", "random"], "too many choices with more than 4 ranks"),
        (["--ranks", "20", "--topologies", "random", "--staleness", "1"], "too many choices with more than 10 ranks"),
        (["--group", "2"], "one group of all ranks"), (["--ranks", "1"], "at least 2"),
        (["--topologies", "star"], "'star' is none of"),
        (["--ranks"], "'--ranks' names nothing"), (["--staleness"], "'--staleness' names nothing"),
        (["--most-s", "nan"], "'--most-s' is nan but must lie above 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(arguments: list[str], sentence: str) -> None:
    with pytest.raises(PalaError, match=sentence):
        explore.run(arguments)
