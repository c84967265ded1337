"""The gossip protocol of one rank as a state machine: no MPI, no torch, no threads, no clock, no I/O.

Events go in (an update finished, a model came, a credit came back, a peer died, what the clock says, stop); what to
do comes out (send to these peers with this weight, wait, mix with these weights, tell these peers to stop). The same
object is driven by MPI in training (`gossip.py`) and by a virtual network in tests (`virtual.py`).

After each update, a rank
1. *owes* its model to the peers that the topology names for this round, and sends it to those whose process lock is
   free; a debt that meets a held lock is dropped at the next update, as in GALA, but a rank that must wait pays it as
   soon as the lock is free. (Without this two ranks could wait for each other for ever.)
2. *mixes* if it has a full round of models in its inbox (one, or one from every living peer in the complete graph);
3. *waits* first if it made more than `max_staleness` updates since its last mix.

A model can be lost with a peer that dies, or be refused; then all can come to wait for each other. So a rank that has
waited for `again_s` sends its model once more, to the next round's peers.

A peer may stop without dying: suspended, or behind a link that is cut. `patience_s` bounds what it can do to others (or
five of this rank's own updates, if they are slower than that):
- a peer that has held a model for so long is *silent*: left out of the topology until it gives the credit back;
- a rank that has waited for so long goes on without a mix, and waits no more until a model comes;
- a rank that finds that it was itself away for so long *returns*: it refuses what peers sent meanwhile, asks them for
  whole models and takes those in place of its own, which is as stale as what came.

Models may travel in parts (`top_k`): then every so many sends carry a whole model. A rank that has no model of use (not
finite, or it returns) is healed by a whole one only; it gives parts back as if it had refused them, and asks their
senders for whole ones.

With `max_staleness` 0 each update needs a model that another update gave. If debts were dropped, or two models mixed
for one that is sent, there would soon be fewer models than ranks, and most ranks would always be waiting. So there a
debt stays until it is paid, and a rank that mixed k rounds at once owes its model for k rounds.

Mixing. `uniform`: x <- (x + sum of k models) / (1 + k), the rule of GALA and PALA. `push_sum`: each model carries a
weight; a sender keeps one part of its weight and gives the others away; a receiver takes the weighted mean and adds
the weights. The sum of all weights, those in flight included, is the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip import topology as graph
from pala.exchange.gossip.process_lock import ProcessLock


class Mix(NamedTuple):
    """x <- (1 - fraction) x + fraction * (weighted mean of the inbox); then return the credit to the senders."""

    fraction: float
    senders: tuple[int, ...]


class GossipProtocol(StepBudget):
    """The state of one rank. Every method is a pure transition; none communicates."""

    def __init__(
        self, rank: int, size: int, *, topology: str, mixing: str, max_staleness: int, budget_steps: int, seed: int,
        local_steps: Iterable[int] | None = None, base_steps: int = 0, round_: int = 0, weight: float = 1.0,
        whole_every: int = 1, again_s: float = 2.0, patience_s: float = 5.0,
    ) -> None:  # fmt: skip
        """`local_steps`, `base_steps`: as in `StepBudget`.

        `whole_every`: of so many sends one must carry the whole model, the others may carry a part. Prime, or in the
        exponential graph, whose rounds repeat, some ranks might get no whole model at all.
        """
        super().__init__(rank, size, budget_steps, local_steps, base_steps)
        self.topology, self.push_sum, self.max_staleness = topology, mixing == "push_sum", max_staleness
        self.seed = seed
        self.round, self.weight = round_, weight
        self.staleness = 0
        self.lock = ProcessLock()
        self.healthy = True  # this rank's model is finite
        self.waits_given_up = 0
        self._owed: list[int] = []
        self._rounds_due = 1
        self._inbox: dict[int, float] = {}
        self._whole_came = False  # of the models in the inbox
        self._num_refused = 0  # since the last mix
        self._whole_every, self._num_sends = whole_every, rank * whole_every // size  # not all at the same time
        self._wants_whole: set[int] = set()  # peers that could do nothing with a part
        self._again_s, self._patience_s = again_s, patience_s
        self._now_s = -math.inf  # when the clock was last looked at
        self._resumed_s = math.nan  # when this update began
        self._update_s = math.inf  # what an update usually takes
        self._transfer_s = 0.0  # what a model usually takes to come
        self.silent: set[int] = set()  # peers that have held a model of this rank for too long
        self._waits_since_s = self._sent_again_s = math.inf
        self._gave_up = False  # waited in vain: goes on without a mix until a model comes
        self._returning = False
        self._stale: set[int] = set()  # of a returning rank: peers whose next model may be as old as its own

    # ---- what happened -------------------------------------------------------------------------------------------

    def clock(self, now_s: float) -> None:
        """What a clock says that only goes forward: before each `update_finished`, and else as often as may be. That
        nobody looked at it for long means that this rank was away."""
        gap_s, self._now_s = now_s - self._now_s, now_s
        if gap_s > self.patience_s and len(self.living) > 1:
            self._returning, self._whole_came = True, False
            self._stale = set(range(self.size)).difference(self._inbox)  # the dead sent some, too
            self._waits_since_s = math.inf
        self.silent = self.lock.held_before(now_s - self.patience_s)
        if not self.must_wait:
            self._waits_since_s = self._sent_again_s = math.inf
            return
        if self._waits_since_s == math.inf:
            self._waits_since_s = self._sent_again_s = now_s
        if now_s - self._waits_since_s > self.patience_s and self.healthy:  # a rank without a model has no choice
            self._gave_up, self._returning = True, False
            self._stale.clear()
            self.waits_given_up += 1
        elif now_s - self._sent_again_s > self._again_s:
            self._sent_again_s = now_s
            self._owed += [p for p in self._next_peers() if p not in self._owed and self.lock.is_free(p)]

    def update_finished(self, steps: int, healthy: bool = True) -> None:
        """This rank made one update from `steps` environment steps. `healthy`: its model is finite."""
        self.healthy = healthy
        self._learn_pace()
        self.staleness += len(self.living) > 1
        if self.max_staleness > 0:
            self._owed.clear()
        for _ in range(self._rounds_due):
            self._owed += self._next_peers()
        del self._owed[: -self.size]  # more debts than ranks are never needed
        # Who waits to heal should not have to wait for its turn as well.
        self._owed += [p for p in sorted(self._wants_whole) if p in self.living and p not in self._owed]
        self._rounds_due = 1
        self.add_steps(steps)

    def is_stale(self, sender: int, took_s: float) -> bool:
        """True if the model that has come from `sender`, in so many seconds, is too old to be received: its sender
        stopped while it sent it, or this rank stopped (and is returning) before it could take it in."""
        stale = took_s > self.transfer_patience_s or sender in self._stale
        self._transfer_s = 0.8 * self._transfer_s + 0.2 * min(took_s, 2 * self.transfer_patience_s)
        self._stale.discard(sender)
        return stale

    def model_received(self, sender: int, weight: float, whole: bool = True) -> float:
        """A model, or a part of one, passed the door and is in the inbox. Returns its weight in the weighted mean."""
        self._whole_came |= whole
        self._gave_up = False
        assert sender not in self._inbox, f"peer {sender} sent twice on one credit"
        self._inbox[sender] = weight if self.push_sum else 1.0
        return self._inbox[sender]

    def model_refused(self, weight: float) -> None:
        """A model was thrown away. It counts in its round; its push-sum weight stays with this rank: none is lost."""
        self._num_refused += 1
        if self.push_sum:
            self.weight += weight

    def credit_returned(self, peer: int, wants_whole: bool = False) -> None:
        """`peer` has taken in (or refused) the last model sent to it, or waits to heal and asks for a whole one."""
        self.lock.release(peer)
        self.silent.discard(peer)
        if wants_whole:
            self._wants_whole.add(peer)

    def peer_died(self, peer: int) -> None:
        """`peer` is gone, and with it the weight it held."""
        super().peer_died(peer)
        self.lock.release(peer)
        self.silent.discard(peer)
        self._owed = [p for p in self._owed if p != peer]

    # ---- what to do ----------------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long others may keep this rank waiting: longer if its own updates take long."""
        return max(self._patience_s, 5 * self._update_s)

    @property
    def transfer_patience_s(self) -> float:
        """How long a model may be on its way: longer on a slow link."""
        return max(self.patience_s, 5 * self._transfer_s)

    @property
    def has_model(self) -> bool:
        """False of a rank whose own model is of no use: not finite, or as old as the time that it was away."""
        return self.healthy and not self._returning

    @property
    def must_wait(self) -> bool:
        """True if the rank may not go on before a mix, or, if its own model is of no use, before a whole one comes."""
        if len(self.living) == 1 or self.stop is not Stop.NONE:
            return False
        if not self.has_model:
            return not self._whole_came
        return self.staleness > self.max_staleness and not self.can_mix and not self._gave_up

    def drop_parts(self) -> tuple[int, ...]:
        """Of a rank that has no model: parts, or what is as old as its own, are of no use to it, and while they fill
        the inbox their senders may send nothing else. They count as refused; returns the senders, to ask for whole
        models."""
        senders = () if self._whole_came or self.has_model else tuple(self._inbox)
        for sender in senders:
            self.model_refused(self._inbox.pop(sender))
        return senders

    def sendable(self) -> tuple[int, ...]:
        """Peers that are owed a model and whose lock is free."""
        if self.stop is not Stop.NONE or not self.has_model:
            return ()
        return tuple(dict.fromkeys(peer for peer in self._owed if self.lock.is_free(peer)))

    def whole_is_due(self, peers: tuple[int, ...]) -> bool:
        """True if what is sent to `peers` next must be the whole model: in its turn, or because one of them asked."""
        return self._num_sends % self._whole_every == 0 or not self._wants_whole.isdisjoint(peers)

    def sent(self, peers: tuple[int, ...]) -> float:
        """The model goes to `peers` now; returns the push-sum weight that each copy carries (1 if uniform)."""
        if self.whole_is_due(peers):
            self._wants_whole.difference_update(peers)
        self._num_sends += 1
        for peer in peers:
            self.lock.acquire(peer, self._now_s)
            self._owed.remove(peer)
        if not self.push_sum:
            return 1.0
        self.weight /= len(peers) + 1
        return self.weight

    def take(self, everything: bool = False) -> Mix | None:
        """The mix that is due, or None. A rank that has no model takes any whole one, and its own has no part.

        `everything`: at the end, whatever has come.
        """
        self._resumed_s = self._now_s
        is_due = (self.can_mix or everything) if self.has_model else self._whole_came
        if not self._inbox or not is_due:
            return None
        if self.max_staleness == 0:
            self._rounds_due = max(1, self._num_come // max(1, self._models_a_round))
        senders, received = tuple(self._inbox), sum(self._inbox.values())
        own = self.weight if self.push_sum else 1.0
        fraction = received / (own + received) if self.has_model else 1.0
        self._inbox.clear()
        self._stale.clear()
        self._whole_came = self._returning = self._gave_up = False
        self._num_refused = 0
        self.staleness = 0
        if self.push_sum:
            self.weight += received
        return Mix(fraction, senders)

    @property
    def can_mix(self) -> bool:
        """True if a full round of models has come, and at least one could be accepted."""
        return len(self._inbox) > 0 and 0 < self._models_a_round <= self._num_come

    @property
    def _num_come(self) -> int:
        """Models that came since the last mix, the refused included."""
        return len(self._inbox) + self._num_refused

    @property
    def _models_a_round(self) -> int:
        return graph.num_in_peers(self.topology, len(self._in_touch()))

    def _learn_pace(self) -> None:
        """A single long update, or a time that the rank was away, does not change much; a slower environment soon."""
        took_s = self._now_s - self._resumed_s
        if self._update_s == math.inf:
            self._update_s = took_s if took_s >= 0 else math.inf  # not a number: nobody looked at the clock
        else:
            self._update_s = 0.8 * self._update_s + 0.2 * min(took_s, 2 * self.patience_s)

    def _next_peers(self) -> tuple[int, ...]:
        """Begin a new round of sending."""
        self.round += 1
        return graph.out_peers(self.topology, self.rank, self._in_touch(), self.round - 1, self.seed)

    def _in_touch(self) -> Sequence[int]:
        """The living without the silent. Whose model has come is not silent: it may wait for this rank's answer."""
        if not self.silent:
            return self.living
        return [peer for peer in self.living if peer not in self.silent or peer in self._inbox]
