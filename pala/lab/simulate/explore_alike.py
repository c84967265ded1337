"""Ranks and messages of the explorer that are alike: whatever happens to them, the same comes of it.

`simplest` gives one of all that it takes to be alike. That is a claim, for which each line has its reason; and the
search proves it while it runs (`World.check_alike`): whatever happens to the simplest is tried with all that were taken
for it, too, and has to send the same, do the same wrong, and lead to ranks that are alike again. So they are bisimilar,
and what can be seen in a search of all states (what the ranks do, what goes wrong, who waits and what goes on) can be
seen in the search of the simplest. A claim that is wrong stops the search. What is on its way is made alike by its
receiver's state (`World._tidy`), and each such change is tried in the first state in which it comes only; tests compare
small cases with a search of all states.
What the checks of whole states read (budgets, weights, updates made, the inbox of a rank that is not alone) is left as
it is.
"""

from __future__ import annotations

import math
from typing import Any

from pala.exchange.budget import Stop
from pala.exchange.gossip.messages import Kind
from pala.lab.simulate.explore_states import NO_PATIENCE_S, Case, Frozen, Letter, Mode

_NOBODY: tuple[Any, ...] = ()


class NotAlikeError(Exception):
    """Two that were taken to be alike are not."""


def simplest_letter(letter: Letter, case: Case) -> Letter:
    """The one that stands for all that are like this one."""
    if letter.kind is Kind.ASK_WHOLE and _only_whole(case):
        letter = letter._replace(kind=Kind.CREDIT)
    if letter.kind is Kind.ANSWER:  # it is a difference, however old
        letter = letter._replace(old=False)
    return letter


def simplest(frozen: Frozen, case: Case) -> Frozen:
    """The one that stands for all that are like this one."""
    if frozen.mode is Mode.DEAD:
        return frozen
    p, budget = dict(frozen.protocol), dict(frozen.budget)
    changed: dict[str, Any] = {}
    _never_looked_at(p, frozen, case)
    alone = len(budget["living"][1]) <= 1
    if alone or frozen.mode >= Mode.ENDED:
        changed |= _waits_for_nobody(p)
    if frozen.mode >= Mode.ENDED:
        changed |= _has_ended(p, frozen, case)
    if "inbox" not in changed:
        changed |= {"inbox": _as_old(frozen.inbox)} if alone else _drops_what_it_has(p, frozen, case)
    is_back = p["_returning"] or (p["_now_s"] < 0 and _only_whole(case))
    if is_back and not alone and case.mixing != "paired" and "patience" not in case.faults:
        p["healthy"], changed["finite"] = True, True  # it can do nothing but heal
    if frozen.mode is Mode.LEFT:  # nobody gets its model
        changed["finite"] = True
    if alone:  # no model is fresher
        changed["old"] = False
    if alone or budget["stop"] is not Stop.NONE:  # so the next look at the clock makes it
        p["_waits_since_s"] = p["_sent_again_s"] = math.inf
    else:
        changed |= _counts_anew(p, frozen, case)
    return frozen._replace(protocol=tuple(sorted(p.items())), **changed)


def _never_looked_at(p: dict[str, Any], frozen: Frozen, case: Case) -> None:
    p["_stale"] = "set", tuple(peer for peer in p["_stale"][1] if peer != frozen.number)  # it sends itself nothing
    if "_refusing" in p:  # only asked of peers with higher numbers
        p["_refusing"] = "set", tuple(peer for peer in p["_refusing"][1] if peer > frozen.number)
    elif case.max_staleness > 0:  # all whose lock is free get one
        p["_owed"] = "list", tuple(sorted(p["_owed"][1]))
    if case.max_staleness == 0:  # a mix is of one at least, and makes at most so many rounds due as there are ranks
        most = case.ranks * (case.ranks - 1 if case.topology == "complete" else 1) - 1
        p["_num_rejected"] = min(p["_num_rejected"], most)
    if not case.has_clock:  # no patience ends, whatever a rank's pace
        p["_update_s"], p["patience_s"] = 0.0, NO_PATIENCE_S
    if _only_whole(case):
        p["_wants_whole"] = "set", _NOBODY
        if frozen.mode is Mode.UPDATES and case.mixing != "paired":
            p["healthy"] = True  # what it replies does not matter, and it looks at its model after the update


def _only_whole(case: Case) -> bool:
    """All models are whole, and it is always the only peer's turn: so who asks for a whole model gets what all get."""
    return case.ranks == 2 and case.whole_every == 1 and case.exchanges_per_update == 1 and not _in_step(case)


def _in_step(case: Case) -> bool:
    """Who goes on without a mix makes an offer, who has mixed none but to a rank that needs a model."""
    return case.mixing == "paired" and case.max_staleness == 0 and case.exchanges_per_update == 1


def _waits_for_nobody(p: dict[str, Any]) -> dict[str, Any]:
    """A rank that is alone, or has ended, waits for nobody and owes nobody."""
    p["_owed"], p["_wants_whole"] = ("list", _NOBODY), ("set", _NOBODY)
    p["_num_rejected"], p["_rounds_due"], p["staleness"], p["_gave_up"] = 0, 1, 0, False
    return {"since_mix": 0, "excused": False}


def _has_ended(p: dict[str, Any], frozen: Frozen, case: Case) -> dict[str, Any]:
    """A rank that has ended refuses nobody, and at the close forgets what was offered."""
    if case.mixing != "paired":
        p["healthy"] = True
        return {}
    if frozen.mode is Mode.LEFT or not p["healthy"] or p["_returning"]:
        return {}
    return _forgets_what_came(p)


def _forgets_what_came(p: dict[str, Any]) -> dict[str, Any]:
    p["_inbox"], p["_whole_came"], p["_stale"] = ("dict", _NOBODY), False, ("set", _NOBODY)
    if "_numbers" in p:
        p["_numbers"], p["_refusing"] = ("dict", _NOBODY), ("set", _NOBODY)
    return {"inbox": ()}


def _counts_anew(p: dict[str, Any], frozen: Frozen, case: Case) -> dict[str, Any]:
    """A rank that takes in a model before it can be too stale counts anew then; so does one whose own is of no use."""
    waits, away, changed = frozen.mode is Mode.WAITS, p["_now_s"] < 0, dict[str, Any]()
    is_back = p["_returning"] or away
    one_will_do = case.topology != "complete"
    can_mix = len(p["_inbox"][1]) > 0 and one_will_do and not _may_lose_touch(p, case)
    if _in_step(case):  # a mix is more than leave to go on
        one_will_do, can_mix = False, can_mix and not is_back
    gave_up = p["_gave_up"] and one_will_do
    will_move = len(p.get("_answers", (0, _NOBODY))[1]) > 0
    for_good = "patience" not in case.faults  # it can do nothing but heal
    if (not p["healthy"] or (is_back and for_good)) and case.max_staleness > 0 and case.mixing != "paired":
        p["_owed"] = "list", _NOBODY
    has_model = p["healthy"] and not is_back
    heals = not p["healthy"] or (is_back and (for_good or one_will_do))
    if heals or gave_up or can_mix or (will_move and not waits):
        p["staleness"] = 0
    if heals or can_mix or will_move:
        changed |= {"since_mix": 0, "excused": False}
    if waits and (can_mix or gave_up) and has_model:
        p["_waits_since_s"] = p["_sent_again_s"] = math.inf
    if away and waits:
        p["_waits_since_s"] = p["_sent_again_s"] = 0.0
    return changed


def _may_go(case: Case) -> bool:
    """Peers, for good."""
    return not case.faults.isdisjoint({"death", "leave", "false-death"})


def _may_lose_touch(p: dict[str, Any], case: Case) -> bool:
    """With all who live: whose model has come may die, and the others be silent. It then waits before it mixes."""
    return case.ranks > 2 and _may_go(case) and (len(p["silent"][1]) > 0 or "patience" in case.faults)


def _drops_what_it_has(p: dict[str, Any], frozen: Frozen, case: Case) -> dict[str, Any]:
    """A rank that was away drops all that had come."""
    away = p["_now_s"] < 0
    if away and _may_go(case):
        return {}
    if away:  # as the next look at the clock makes it
        p["_whole_came"] = False
    if not (away or p["_returning"]) or p["_whole_came"] or case.ranks > 2:
        return {}
    return {"inbox": _as_old(frozen.inbox)}


def _as_old(inbox: tuple[tuple[int, Letter], ...]) -> tuple[tuple[int, Letter], ...]:
    return tuple((peer, letter._replace(old=True)) for peer, letter in inbox)
