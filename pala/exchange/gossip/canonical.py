"""The canonical form of a rank's state: `canonical` makes states equal that no later event can tell apart. Pure.

A search of all states (`tests/explorer/`) rests on it. It stands beside the protocol because each line is a claim about
the protocol: whatever changes there may make one of them false.
"""

from __future__ import annotations

import math

from pala.config.catalogue import TOPOLOGIES
from pala.exchange.budget import Stop
from pala.exchange.gossip.state import GossipState, Rules

FIRST_ROUND = 3
"""Rounds of canonical states begin here."""
OFFER = 1
"""Number of the open offer to a peer, in a canonical state."""


def canonical(s: GossipState, rules: Rules, now_s: float, has_ended: bool, period: int) -> None:
    """Change a state to the one that stands for all that differ only in what can influence nothing any more.

    `now_s`: the time, which is 0 in a canonical state. `has_ended`: the rank makes no more updates. `period`: rounds
    that are so far apart have the same peers.
    """
    size = s.budget.size
    _forget_times(s, rules, now_s)
    s.counts.clear()
    s.has_put_off = False  # only counted
    # Rounds matter by their peers, and as numbers of offers, of which a later one is never that of an earlier one.
    s.round = FIRST_ROUND + (s.round - FIRST_ROUND) % period
    s.offers = {peer: offer._replace(number=OFFER) for peer, offer in s.offers.items()}
    s.num_sends %= rules.whole_every
    s.staleness = min(s.staleness, rules.max_staleness + 1)  # only compared with the bound
    if not s.between_updates and not rules.debts_stay:
        s.owed.clear()  # what is owed now is dropped at the end of the update
    # Added to what is in the inbox, which must be something, and compared with the models of a round ...
    a_round = size - 1 if TOPOLOGIES[rules.topology].to_all else 1
    if rules.max_staleness == 0:  # ... or divided by them: a number of rounds, of which the last ones leave a debt
        s.rounds_due = _least(s.rounds_due, size, period)
        s.num_rejected = _least(s.num_rejected, a_round * (size + period) - 1, a_round * period)
    else:
        s.num_rejected = min(s.num_rejected, a_round - 1)
    if not s.leaves or s.budget.stop is not Stop.NONE:
        s.leaves = False
        s.stayers.clear()
    if s.has_left or s.budget.stop is not Stop.NONE:
        s.leavers.clear()
    s.num_asked %= math.lcm(*range(1, size))  # counts the peers to ask, among all others or fewer
    if s.budget.stop is not Stop.NONE:  # it sends no models of its own, and never waits
        s.asks_again_s, s.num_asked = math.inf, 0
        s.owed.clear()
        s.wants_whole.clear()
        s.gave_up, s.staleness = False, 0
        if rules.patience_s == math.inf:  # no lock is held until its peer is silent
            s.lock.held_since_s.clear()
    if has_ended:  # nor does it mix, but at the close
        s.lock.held_since_s.clear()
        s.owed.clear()
        s.num_rejected = 0
        s.rounds_due = 1
        s.round = FIRST_ROUND


def _forget_times(s: GossipState, rules: Rules, now_s: float) -> None:
    """Make times alike: each is only ever compared with the patience, or with the time until a rank sends again. What
    is older than that stays older, and what is younger is as if it had just been."""

    def since(time_s: float, limit_s: float) -> float:
        return -2 * limit_s if now_s - time_s > limit_s else 0.0

    held = sorted((since(time_s, rules.patience_s), peer) for peer, time_s in s.lock.held_since_s.items())
    s.lock.held_since_s = {peer: time_s for time_s, peer in held}
    if not s.between_updates:  # the next look at the clock sets them so
        s.waits_since_s = s.sent_again_s = math.inf
    if s.waits_since_s != math.inf:
        s.waits_since_s = since(s.waits_since_s, rules.patience_s)
        s.sent_again_s = since(s.sent_again_s, rules.again_s)
    if s.asks_again_s != math.inf:
        s.asks_again_s = rules.again_s if now_s < s.asks_again_s else 0.0
    s.now_s = since(s.now_s, rules.patience_s)
    # Updates and transfers are taken to be short, so after the first update patience is as set. Longer ones would make
    # it longer; here it may end at any time, or never.
    s.update_began_s = s.transfer_s = 0.0
    s.update_s = math.inf if s.update_s == math.inf and rules.patience_s < math.inf else 0.0


def _least(count: int, cap: int, period: int) -> int:
    """Return the least number that is `count` up to the cap, and beyond it the same as `count` modulo the period."""
    return count if count <= cap else cap + (count - cap) % period
