"""The gossip protocol of one rank as a state machine: no MPI, no torch, no threads, no clock, no I/O.

Events go in: `update_finished`, `message_came`, `peer_died`, `end`, what the `clock` says, and `advance`, by which a
rank asks to go on. Each gives the actions (`actions.py`) that its driver is to carry out, in that order. So the order
of things stands here, once; the driver (`driver.py`) is the same over MPI, threads and a simulated network.

After each update, a rank
1. *owes* its model to the peers that the topology names for this round, and sends it to those whose process lock is
   free; a debt that meets a held lock is dropped at the next update, but with `max_staleness` 0 it stays;
2. *mixes* if it has a full round of models in its inbox (one, or one from every living peer in the complete graph);
3. *waits* first if it made more than `max_staleness` updates since its last mix, and goes on paying its debts. After
   `again_s` it sends its model once more, to the next round's peers; after `patience_s` it *gives up*, and waits no
   more until a model comes.

A peer that has held a model for `patience_s` is *silent*; a rank that finds that it was itself away for so long
*returns*. Why all this is so: docs/architecture.md, "One update, seen from one rank"; for models that travel in parts
"Compression". What models weigh is the mixing rule's (`mixing.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip import topology as graph
from pala.exchange.gossip.actions import Accept, Action, Clear, GoOn, Heal, Mix, SendControl, SendModel, Wait
from pala.exchange.gossip.messages import WITHOUT_MODEL, Kind
from pala.exchange.gossip.mixing import Mixing
from pala.exchange.gossip.process_lock import ProcessLock
from pala.exchange.wire import Message


@dataclass(frozen=True)
class Rules:
    """What all ranks of a run keep to."""

    topology: str
    max_staleness: int
    seed: int = 0
    """Seed of the random topology."""
    whole_every: int = 1
    """One of so many sends must carry the whole model, the others may carry a part. Prime, or in the exponential graph,
    whose rounds repeat, some ranks might get no whole model at all."""
    again_s: float = 2.0
    """Seconds until a waiting rank sends its model once more."""
    patience_s: float = 5.0
    """How long others may keep a rank waiting; longer if its own updates take long."""
    exchanges_per_update: int = 1
    """Offers that a rank may make in an update of the paired exchange. With more than one, ranks offer, answer and
    move between two steps of a rollout, too."""


class GossipProtocol:
    """The state of one rank. Every method is a pure transition; none communicates."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.MODEL, *WITHOUT_MODEL)  # of its messages

    def __init__(self, budget: StepBudget, mixing: Mixing, rules: Rules, round_: int = 0) -> None:
        self.budget, self.mixing, self.rules, self.round = budget, mixing, rules, round_
        self.rank, self.size = budget.rank, budget.size
        self.lock = ProcessLock()
        self.staleness = 0  # updates since the last mix
        self.healthy = True  # this rank's model is finite
        self.silent: set[int] = set()  # peers that have held a model of this rank for too long
        self.counts: Counter[str] = Counter()  # for the metrics; whoever reads them may empty it
        self._owed: list[int] = []
        self._rounds_due = 1
        self._inbox: dict[int, float] = {}  # sender -> what its model counts
        self._whole_came = False  # of the models in the inbox
        self._num_rejected = 0  # since the last mix
        self._num_sends = budget.rank * rules.whole_every // budget.size  # whole models not all at the same time
        self._wants_whole: set[int] = set()  # peers that could do nothing with a part
        self._now_s = -math.inf  # when the clock was last looked at
        self._resumed_s = math.nan  # when this update began
        self._update_s = math.inf  # what an update usually takes
        self.patience_s = math.inf  # how long others may keep this rank waiting: longer if its own updates take long
        self._transfer_s = 0.0  # what a model usually takes to come
        self._between_updates = False
        self._has_put_off = False  # a send of this update, since there was no memory for it
        self._waits_since_s = self._sent_again_s = math.inf
        self._gave_up = False  # waited in vain: goes on without a mix until a model comes
        self._returning = False
        self._asks_again_s, self._num_asked = math.inf, 0  # of a rank that takes a place: when it asks for a model
        self._stale: set[int] = set()  # of a rank that was away: peers whose next model may be as old as its own was

    # ---- events --------------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> None:
        """The first update begins."""
        self.clock(now_s)
        self._resumed_s = now_s

    def clock(self, now_s: float) -> None:
        """What a clock says that only goes forward, as often as may be. That nobody looked at it for long means that
        this rank was away."""
        gap_s, self._now_s = now_s - self._now_s, now_s
        if gap_s > self.patience_s and len(self.living) > 1:
            self._returning, self._whole_came = True, False
            self._stale = set(range(self.size)).difference(self._inbox)  # the dead sent some, too
            self._waits_since_s = math.inf
        self.silent = self.lock.held_before(now_s - self.patience_s)
        if not (self._between_updates and self.must_wait):
            self._waits_since_s = self._sent_again_s = math.inf
            return
        if self._waits_since_s == math.inf:
            self._waits_since_s = self._sent_again_s = now_s
        if now_s - self._waits_since_s > self.patience_s and self.healthy:  # a rank without a model has no choice
            self._gave_up, self._returning = True, False
            self._stale.clear()
            self.counts["waits_given_up"] += 1
        elif now_s - self._sent_again_s > self.rules.again_s:
            self._sent_again_s = now_s
            self._owed += [p for p in self._next_peers() if p not in self._owed and self.lock.is_free(p)]

    def update_finished(self, now_s: float, steps: int, healthy: bool = True) -> list[Action]:
        """This rank made one update from `steps` environment steps. `healthy`: its model is finite."""
        self.clock(now_s)
        self.healthy = healthy
        self._learn_pace()
        self._between_updates = True
        if len(self.living) > 1:
            self.staleness += 1
            self.counts["staleness_updates"] = max(self.counts["staleness_updates"], self.staleness)
        self._has_put_off = False
        if not self._debts_stay:
            self._owed.clear()
        for _ in range(self._rounds_due):
            self._owed += self._next_peers()
        del self._owed[: -self.size]  # more debts than ranks are never needed
        # Who waits to heal should not have to wait for its turn as well.
        self._owed += [p for p in sorted(self._wants_whole) if p in self.living and p not in self._owed]
        self._rounds_due = 1
        self.budget.add_steps(steps)
        return self._tell_stop()

    def advance(self, now_s: float, can_send: Callable[[], bool] = lambda: True) -> list[Action]:
        """After `update_finished`, and again while it says `Wait`. The last action is `GoOn` or `Wait`.

        `can_send`: whether there is memory for a snapshot of the model.
        """
        self.clock(now_s)
        actions = [*self._move(), *self._send_owed(can_send)]
        if self.must_wait:
            return [*actions, *self._offer(), *self._drop_parts(), *self._ask(), Wait()]
        self._begin_update()
        if self._mix_is_due:
            actions += self._mix(give_credit=True)
        return [*actions, *self._offer(), GoOn()]

    def between_steps(self, now_s: float) -> list[Action]:
        """In the middle of a rollout, whose parameters must not change: what the rank does all the same. Its moves are
        owed to its model, and made at the end of the update. By the rules by which models go one way, nothing."""
        return []

    def message_came(
        self, message: Message, took_s: float = 0.0, late: bool = False, rejected: bool = False
    ) -> list[Action]:
        """From `message.sender`. Of a model: the seconds that it took to come; `late`: so many that its memory has been
        given up; `rejected`: it holds what no model may hold."""
        self.budget.news(message.local_steps, message.stop)
        if message.kind is Kind.LEAVE:
            self.budget.rank_left(message.sender)
            return self._forget(message.sender) + self._tell_stop()
        if message.kind is Kind.JOIN:
            self._joined(message.sender)
        if self.has_left:
            if message.kind is Kind.MODEL:
                self.mixing.reject(message.weight)
            return self._tell_stop()
        return self._take_in(message, took_s, late, rejected) + self._tell_stop()

    def unreadable_model_came(self, sender: int) -> list[Action]:
        """Something as large as a model came that is no message of this run; its sender may send again."""
        self.counts["models_refused"] += 1
        return self._return_credit(sender)

    def peer_died(self, peer: int) -> list[Action]:
        """`peer` is gone, and with it the weight it held."""
        self.budget.peer_died(peer)
        return self._forget(peer) + self._tell_stop()

    def take_place(self, now_s: float) -> None:
        """This rank, which has slept, trains from now on. It has no model, and `advance` asks for one."""
        self.clock(now_s)
        self.budget.rank_joined(self.rank)
        self.healthy, self._between_updates, self._asks_again_s = False, True, now_s
        self.patience_s = self.rules.patience_s  # it does not know its own pace yet

    def leave(self) -> list[Action]:
        """This rank trains no more, and the others take over its share of the budget. Nothing of its models should be
        on the way any more: the news might overtake it."""
        self.budget.rank_left(self.rank)
        return [SendControl(self._message(Kind.LEAVE), peer) for peer in self.budget.present if peer != self.rank]

    def end(self, reason: Stop) -> list[Action]:
        """This rank ends training."""
        self.budget.stop_now(reason)
        return self._tell_stop()

    def finish(self) -> list[Action]:
        """All ranks have ended and nothing is in flight: mix whatever has come, and give no credit."""
        return self._mix(give_credit=False) if self.has_model or self._whole_came else []

    def _begin_update(self) -> None:
        if len(self.living) == 1:  # nobody's model is newer; for a spare that joins it waits anew
            self.staleness, self._gave_up, self._returning = 0, False, False
        self._between_updates, self._resumed_s = False, self._now_s

    # ---- what follows from them ----------------------------------------------------------------------------------

    @property
    def living(self) -> Sequence[int]:
        """Ranks that live and train, as far as known here; sorted."""
        return self.budget.living

    @property
    def has_left(self) -> bool:
        """True of a rank that trains no more, though others do."""
        return self.rank in self.budget.left

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
        if len(self.living) == 1 or self.budget.stop is not Stop.NONE:
            return False
        if not self.has_model:
            return not self._whole_came
        return self.staleness > self.rules.max_staleness and not self._gave_up and not self.can_mix

    @property
    def _mix_is_due(self) -> bool:
        """A rank that has no model takes any whole one."""
        return self.can_mix if self.has_model else self._whole_came

    @property
    def can_mix(self) -> bool:
        """True if a full round of models has come, and at least one could be accepted. Who is alone by now waits for no
        other, and mixes what the dead have sent while it is fresh."""
        is_full = len(self.living) == 1 or 0 < self._models_a_round <= len(self._inbox) + self._num_rejected
        return len(self._inbox) > 0 and is_full

    # ---- models and credits --------------------------------------------------------------------------------------

    @property
    def _debts_stay(self) -> bool:
        return self.rules.max_staleness == 0

    def _take_in(self, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        if message.kind is Kind.MODEL:
            if message.sender in self._inbox:
                return self._second_model_came(message)
            return self._model_came(message, took_s, late, rejected)
        if message.kind in (Kind.CREDIT, Kind.ASK_WHOLE):
            self._credit_came(message.sender, wants_whole=message.kind is Kind.ASK_WHOLE)
        return []

    def _ask(self) -> list[Action]:
        """A rank that takes a place tells log2 n peers that it is there and needs a whole model; after a while, others.
        The rest hear of it by the steps that it makes."""
        if self._now_s < self._asks_again_s:
            return []
        n, place = len(self.living), self.living.index(self.rank)
        first, self._num_asked = self._num_asked, self._num_asked + 1
        self._asks_again_s = self._now_s + self.rules.again_s
        further = {1 + (first + (1 << k) - 1) % (n - 1) for k in range((n - 1).bit_length())}
        return [SendControl(self._message(Kind.JOIN), self.living[(place + i) % n]) for i in sorted(further)]

    def _joined(self, peer: int) -> None:
        """`peer` takes a place; it gets a whole model with the next, or at once if this rank waits."""
        self.budget.rank_joined(peer)
        if peer not in self.living:
            return
        self._wants_whole.add(peer)
        if self._between_updates and peer not in self._owed:
            self._owed.append(peer)

    def _forget(self, peer: int) -> list[Action]:
        """Nothing is expected of this peer any more, nor sent to it."""
        self.lock.release(peer)
        self.silent.discard(peer)
        self._owed = [p for p in self._owed if p != peer]
        return []

    def _move(self) -> list[Action]:
        """By what came in answer to this rank's own model. Where models go one way, nothing does."""
        return []

    def _offer(self) -> list[Action]:
        """Send the model to a peer that will answer. Where models go one way, none does."""
        return []

    def _send_owed(self, can_send: Callable[[], bool]) -> list[Action]:
        """To the peers that are owed a model and whose lock is free."""
        if not self._owed or self.budget.stop is not Stop.NONE or not self.has_model:
            return []
        peers = tuple(dict.fromkeys(peer for peer in self._owed if self.lock.is_free(peer)))
        if not peers:
            return []
        if not can_send():
            self.counts["sends_without_buffer"] += not self._has_put_off
            self._has_put_off = True
            return []
        whole = self._goes_whole(*peers)
        for peer in peers:
            self.lock.acquire(peer, self._now_s)
            self._owed.remove(peer)
        return [SendModel(self._message(Kind.MODEL, self.mixing.send(len(peers))), peers, whole)]

    def _goes_whole(self, *peers: int) -> bool:
        """True if the model that leaves now for these peers must not be only a part."""
        whole = self._num_sends % self.rules.whole_every == 0 or not self._wants_whole.isdisjoint(peers)
        if whole:
            self._wants_whole.difference_update(peers)
        self._num_sends += 1
        return whole

    def _model_came(self, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender, stale = message.sender, self._is_stale(message.sender, took_s, late)
        self._note_transfer(sender, took_s)
        if stale or rejected:  # it counts in its round; its weight stays with this rank
            self.counts["models_refused" if rejected else "models_stale"] += 1
            self._num_rejected += 1
            self.mixing.reject(message.weight)
            return self._return_credit(sender)
        dropped = self._drop_parts()  # now, or they would be part of what takes the model's place
        self.counts["models_received"] += 1
        self._whole_came |= message.format.is_whole
        self._gave_up = False
        self._inbox[sender] = self.mixing.receive(message.weight)
        return [*dropped, Accept(self._inbox[sender])]

    def _second_model_came(self, message: Message) -> list[Action]:
        """Its sender had a credit too many, as from a message that was damaged on its way. The credit for the first
        model is one for both."""
        self.counts["models_refused"] += 1
        self.mixing.reject(message.weight)
        return []

    def _is_stale(self, sender: int, took_s: float, late: bool) -> bool:
        """True if the model that has come from `sender`, in so many seconds, is too old to be received: its sender
        stopped while it sent it, or this rank stopped (and is returning) before it could take it in."""
        return late or took_s > self.transfer_patience_s or sender in self._stale

    def _note_transfer(self, sender: int, took_s: float) -> None:
        """A model has come from `sender`, in so many seconds; its next one is as young as any."""
        self._transfer_s = 0.8 * self._transfer_s + 0.2 * min(took_s, 2 * self.transfer_patience_s)
        self._stale.discard(sender)

    def _credit_came(self, peer: int, wants_whole: bool) -> None:
        """`peer` has taken in (or rejected) the last model sent to it, or waits to heal and asks for a whole one."""
        self.lock.release(peer)
        self.silent.discard(peer)
        if wants_whole:
            self._wants_whole.add(peer)

    def _return_credit(self, peer: int, weight: float = 1.0) -> list[Action]:
        """For a model that was thrown away; once training ends nobody needs it. `weight`: why, where that matters."""
        if self.budget.stop is not Stop.NONE:
            return []
        reply = self._reply(Kind.CREDIT if self.has_model else Kind.ASK_WHOLE, peer)
        return [SendControl(reply._replace(weight=weight), peer)]

    def _drop_parts(self) -> list[Action]:
        """Empty the inbox of a rank that has no model. Parts, or models as old as its own, are of no use to it, and
        while they fill the inbox their senders may send nothing else. They count as rejected; their senders are asked
        for whole models."""
        if self._whole_came or self.has_model or not self._inbox:
            return []
        self.counts["models_stale"] += len(self._inbox) if self.healthy else 0
        self._num_rejected += len(self._inbox)
        senders = list(self._inbox)
        for weight in self._inbox.values():
            self.mixing.reject(weight)
        self._inbox.clear()
        return [Clear(), *itertools.chain.from_iterable(map(self._return_credit, senders))]

    def _mix(self, give_credit: bool) -> list[Action]:
        """Take the inbox into the model, or in its place if that is of no use."""
        if not self._inbox:
            return []
        if self.rules.max_staleness == 0:
            num_come = len(self._inbox) + self._num_rejected
            self._rounds_due = min(max(1, num_come // max(1, self._models_a_round)), self.size)
        senders, received = list(self._inbox), sum(self._inbox.values())
        mix = Mix(self.mixing.weight, len(senders)) if self.has_model else Heal(len(senders))
        self._inbox.clear()
        self.healthy, self._asks_again_s = True, math.inf  # who had no model has one now
        self._whole_came = self._returning = self._gave_up = False
        self._num_rejected = self.staleness = 0
        self.mixing.mixed(received)
        return [mix, *(SendControl(self._reply(Kind.CREDIT, sender), sender) for sender in senders if give_credit)]

    def _tell_stop(self) -> list[Action]:
        if self.budget.stop is Stop.NONE:
            return []
        return [SendControl(self._message(Kind.STOP), peer) for peer in self.budget.tell_stop()]

    def _reply(self, kind: Kind, peer: int) -> Message:
        """To a model of this peer that was mixed or thrown away."""
        return self._message(kind)

    def _message(self, kind: Kind, weight: float = 1.0) -> Message:
        return Message(kind, self.rank, self.round, weight, self.budget.stop, self.budget.local_steps)

    # ---- rounds --------------------------------------------------------------------------------------------------

    @property
    def _models_a_round(self) -> int:
        return graph.num_in_peers(self.rules.topology, len(self._in_touch()))

    def _learn_pace(self) -> None:
        """A single long update, or a time that the rank was away, does not change much; a slower environment soon."""
        took_s = self._now_s - self._resumed_s
        if self._update_s == math.inf:
            self._update_s = took_s if took_s >= 0 else math.inf  # not a number: it was never started
        else:
            self._update_s = 0.8 * self._update_s + 0.2 * min(took_s, 2 * self.patience_s)
        self.patience_s = max(self.rules.patience_s, 5 * self._update_s)

    def _next_peers(self) -> tuple[int, ...]:
        """Begin a new round of sending."""
        self.round += 1
        return graph.out_peers(self.rules.topology, self.rank, self._in_touch(), self.round - 1, self.rules.seed)

    def _in_touch(self) -> Sequence[int]:
        """The living without the silent. Whose model has come is not silent: it may wait for this rank's answer."""
        if not self.silent:
            return self.living
        return [peer for peer in self.living if peer not in self.silent or peer in self._inbox]
