"""The gossip protocol of one rank as a state machine: no MPI, no torch, no threads, no clock, no I/O.

Events go in (an update finished, a model came, a credit came back, a peer died, stop); what to do comes out (send
to these peers with this weight, wait, mix with these weights, tell these peers to stop). The same object is driven by
MPI in training (`gossip.py`) and by a virtual network in tests (`virtual.py`).

After each update, a rank
1. *owes* its model to the peers that the topology names for this round, and sends it to those whose process lock is
   free; a debt that meets a held lock is dropped at the next update, as in GALA, but a rank that must wait pays it as
   soon as the lock is free. (Without this two ranks could wait for each other for ever.)
2. *mixes* if it has a full round of models in its inbox (one, or one from every living peer in the complete graph);
3. *waits* first if it made more than `max_staleness` updates since its last mix.

Mixing. `uniform`: x <- (x + sum of k models) / (1 + k), the rule of GALA and PALA. `push_sum`: each model carries a
weight; a sender keeps one part of its weight and gives the others away; a receiver takes the weighted mean and adds
the weights. The sum of all weights, those in flight included, is the number of ranks.

Budget. Every message carries the local steps of all ranks as far as its sender knows; they are merged by maximum, so
the known total never exceeds the true one. A rank that sees the budget met stops and tells log2 n others, who pass it
on. Overshoot: what is done while the news travels.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pala.exchange import topology as graph
from pala.exchange.process_lock import ProcessLock


class Stop(enum.IntEnum):
    """Why training ends."""

    NONE = 0
    BUDGET = 1
    SIGNAL = 2


class Mix(NamedTuple):
    """x <- (1 - fraction) x + fraction * (weighted mean of the inbox); then return the credit to the senders."""

    fraction: float
    senders: tuple[int, ...]


class GossipProtocol:
    """The state of one rank. Every method is a pure transition; none communicates."""

    def __init__(
        self, rank: int, size: int, *, topology: str, mixing: str, max_staleness: int, budget_steps: int, seed: int,
        local_steps: Iterable[int] | None = None, base_steps: int = 0, round_: int = 0, weight: float = 1.0,
    ) -> None:  # fmt: skip
        """`local_steps`: of every rank at the start; `base_steps`: made by an earlier run with other ranks."""
        self.rank, self.size = rank, size
        self.topology, self.push_sum, self.max_staleness = topology, mixing == "push_sum", max_staleness
        self.budget_steps, self.base_steps, self.seed = budget_steps, base_steps, seed
        self.local_steps = np.array(list(local_steps) if local_steps is not None else [0] * size, np.uint64)
        self.round, self.weight = round_, weight
        self.staleness = 0
        self.stop = Stop.NONE
        self.lock = ProcessLock()
        self.living = list(range(size))
        self._owed: tuple[int, ...] = ()
        self._inbox: dict[int, float] = {}
        self._stop_told = False
        self._check_budget()

    # ---- what happened -------------------------------------------------------------------------------------------

    def update_finished(self, steps: int) -> None:
        """This rank made one update from `steps` environment steps."""
        self.local_steps[self.rank] += np.uint64(steps)
        self.staleness += len(self.living) > 1
        self._owed = graph.out_peers(self.topology, self.rank, self.living, self.round, self.seed)
        self.round += 1
        self._check_budget()

    def model_received(self, sender: int, weight: float) -> float:
        """A model that passed the door is in the inbox. Returns its weight in the inbox's weighted mean."""
        assert sender not in self._inbox, f"peer {sender} sent twice on one credit"
        self._inbox[sender] = weight if self.push_sum else 1.0
        return self._inbox[sender]

    def model_refused(self, weight: float) -> None:
        """A model was thrown away. Its push-sum weight stays with this rank, so that none is lost."""
        if self.push_sum:
            self.weight += weight

    def credit_returned(self, peer: int) -> None:
        """`peer` has taken in (or refused) the last model sent to it."""
        self.lock.release(peer)

    def peer_died(self, peer: int) -> None:
        """`peer` is gone, and with it the weight it held."""
        if peer in self.living:
            self.living.remove(peer)
            self.lock.release(peer)
            self._owed = tuple(p for p in self._owed if p != peer)

    def news(self, local_steps: np.ndarray, stop: Stop) -> None:
        """What a message says of everyone's steps and of the end. uint64 [size]."""
        np.maximum(self.local_steps, local_steps, out=self.local_steps)
        if self.stop is Stop.NONE and stop is not Stop.NONE:
            self.stop = stop
        self._check_budget()

    def stop_now(self, reason: Stop) -> None:
        """This rank ends training, and will tell the others."""
        if self.stop is Stop.NONE:
            self.stop = reason

    # ---- what to do ----------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Environment steps of all ranks, as far as known here: never more than were made."""
        return self.base_steps + int(self.local_steps.sum())

    @property
    def must_wait(self) -> bool:
        """True if the rank may not go on before a mix."""
        too_stale = self.staleness > self.max_staleness
        return too_stale and len(self.living) > 1 and self.stop is Stop.NONE and not self.can_mix

    def sendable(self) -> tuple[int, ...]:
        """Peers that are owed a model and whose lock is free."""
        if self.stop is not Stop.NONE:
            return ()
        return tuple(peer for peer in self._owed if self.lock.is_free(peer))

    def sent(self, peers: tuple[int, ...]) -> float:
        """The model goes to `peers` now; returns the push-sum weight that each copy carries (1 if uniform)."""
        for peer in peers:
            self.lock.acquire(peer)
        self._owed = tuple(peer for peer in self._owed if peer not in peers)
        if not self.push_sum:
            return 1.0
        self.weight /= len(peers) + 1
        return self.weight

    def take(self, healthy: bool = True, everything: bool = False) -> Mix | None:
        """The mix that is due, or None. An unhealthy rank (not finite) gives its own model no part in it.

        `everything`: at the end, whatever has come.
        """
        if not self._inbox or not (self.can_mix or everything):
            return None
        senders, received = tuple(self._inbox), sum(self._inbox.values())
        own = self.weight if self.push_sum else 1.0
        self._inbox.clear()
        self.staleness = 0
        if self.push_sum:
            self.weight += received
        return Mix(received / (own + received) if healthy else 1.0, senders)

    def tell_stop(self) -> tuple[int, ...]:
        """Peers to tell that training ends: once, when it does."""
        if self.stop is Stop.NONE or self._stop_told:
            return ()
        self._stop_told = True
        return graph.broadcast_peers(self.rank, self.living)

    @property
    def can_mix(self) -> bool:
        """True if a full round of models is in the inbox."""
        return 0 < graph.num_in_peers(self.topology, len(self.living)) <= len(self._inbox)

    def _check_budget(self) -> None:
        if self.stop is Stop.NONE and self.global_steps >= self.budget_steps:
            self.stop = Stop.BUDGET
