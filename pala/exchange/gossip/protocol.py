"""The gossip protocol of one rank as transitions of its state: no MPI, no torch, no threads, no clock, no I/O.

Events go in: `update_finished`, `message_came`, `peer_died`, `end`, what the `clock` says, and `advance`, by which a
rank asks to continue. Each gives the actions (`messages.py`) that its driver is to carry out, in that order. The driver
(`driver.py`) is the same over MPI, threads and a simulated network. All that a rank remembers is in its `GossipState`
(`state.py`), the first argument `s` of every event. Here is what all forms of gossip do; the order of things is in
`advance` of each: `paired.py` (the default) and `one_way.py` (`uniform`, `push_sum`).

Where models travel one way, after each update a rank
1. *owes* its model to the peers that the topology names for this round, and sends it to those whose process lock is
   free; a debt that meets a held lock is dropped at the next update, but with `max_staleness` 0 it stays;
2. *mixes* if it has a full round of models in its inbox (one, or one from every living peer in the complete graph);
3. *waits* first if it made more than `max_staleness` updates since its last mix, and continues to pay its debts.
   After `again_s` it sends its model once more, to the next round's peers; after `patience_s` it *gives up*, and waits
   no more until a model comes.

A peer that has held a model for `patience_s` is *silent*; a rank that finds that it was itself away for that time
*returns*. Why all this is so: docs/architecture.md, "One update, seen from one rank"; for models that travel in parts
"Compression". What models weigh is the mixing rule's (`MixingRule`).
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from pala.config.catalogue import RULES
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.gossip.messages import Accept, Action, Clear, Close, Heal, Kind, Mix, SendControl
from pala.exchange.gossip.state import GossipState, Rules
from pala.exchange.wire import Message


class GossipProtocol(abc.ABC):
    """The transitions of a rank that keeps to the rules. Every method changes the state and nothing else; none
    communicates."""

    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of its messages."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._mixing, self._peers = RULES[rules.mixing], rules.peers

    def new_state(self, budget: StepBudget, weight: float = 1.0, round_: int = 0) -> GossipState:
        """Return the state of a rank before its first update."""
        num_sends = budget.rank * self.rules.whole_every // budget.size  # whole models not all at the same time
        return GossipState(budget, self._mixing.counted(weight), round_, num_sends)

    # ---- events --------------------------------------------------------------------------------------------------

    def start(self, s: GossipState, now_s: float) -> None:
        """Begin the first update."""
        self.clock(s, now_s)
        s.update_began_s = now_s

    def clock(self, s: GossipState, now_s: float) -> None:
        """Take in the time of a monotonic clock. To be called often: a long gap means that this rank was away."""
        gap_s = now_s - s.now_s
        s.now_s = now_s
        if gap_s > s.patience_s and len(s.budget.leaders) > 1:
            s.returning, s.whole_came = True, False
            s.stale = set(range(s.budget.size)).difference(s.to_mix)  # the dead sent some, too
            s.waits_since_s = math.inf
        s.silent = s.lock.held_before(now_s - s.patience_s)
        if not (s.between_updates and self.must_wait(s)):
            s.waits_since_s = s.sent_again_s = math.inf
            return
        if s.waits_since_s == math.inf:
            s.waits_since_s = s.sent_again_s = now_s
        if now_s - s.waits_since_s > s.patience_s and s.healthy:  # a rank without a model has no choice
            s.gave_up, s.returning = True, False
            s.stale.clear()
            s.counts["waits_given_up"] += 1
        elif now_s - s.sent_again_s > self.rules.again_s:
            s.sent_again_s = now_s
            if not s.healthy:  # it has nothing to send, and the topology may lead its peers to others first, each time
                s.asks_again_s = min(s.asks_again_s, now_s)
            s.owed += [p for p in self._next_peers(s) if p not in s.owed and s.lock.is_free(p)]

    def update_finished(self, s: GossipState, now_s: float, steps: int, healthy: bool = True) -> list[Action]:
        """Count an update of this rank from `steps` environment steps. `healthy`: its model is finite."""
        self.clock(s, now_s)
        s.healthy = healthy
        self._learn_pace(s)
        s.between_updates = True
        if len(s.budget.leaders) > 1:
            s.staleness += 1
            s.counts["staleness_updates"] = max(s.counts["staleness_updates"], s.staleness)
        s.has_put_off = False
        if not self.rules.debts_stay:
            s.owed.clear()
        for _ in range(s.rounds_due):
            s.owed += self._next_peers(s)
        del s.owed[: -s.budget.size]  # more debts than ranks are never needed
        # A rank that waits to heal should not have to wait for its turn as well.
        s.owed += [p for p in sorted(s.wants_whole) if p in s.budget.leaders and p not in s.owed]
        s.rounds_due = 1
        s.budget.add_steps(steps)
        return self._assure(s) + self._tell_stop(s)

    @abc.abstractmethod
    def advance(self, s: GossipState, now_s: float, can_send: Callable[[], bool] = lambda: True) -> list[Action]:
        """Send and mix as is due, after `update_finished`, and again while the last action is `Wait`; else it is
        `GoOn`.

        `can_send`: whether there is memory for a snapshot of the model.
        """

    def is_idle(self, s: GossipState) -> bool:
        """Return whether an update that finishes now will neither send nor mix this rank's model, if nothing comes
        meanwhile and no peer falls silent."""
        return False

    def message_came(
        self, s: GossipState, message: Message, took_s: float = 0.0, late: bool = False, rejected: bool = False
    ) -> list[Action]:
        """Take in a message of `message.sender`. Of a model: `took_s`: seconds until it came; `late`: it took too long,
        and its memory has been given up; `rejected`: it holds what no model may hold."""
        s.budget.merge(message.steps_by_rank, message.stop)
        if s.leaves:
            self._note_stayer(s, message)
        if message.kind is Kind.LEAVE:
            s.budget.rank_left(message.sender)
            return self._forget(s, message.sender) + self._tell_stop(s)
        if message.kind is Kind.JOIN:
            self._joined(s, message.sender)
        if message.kind is Kind.WISH and not s.has_left:
            s.leavers.add(message.sender)
        if s.has_left:
            if message.kind is Kind.MODEL:
                s.weight = self._mixing.gained(s.weight, message.weight)
            return self._tell_stop(s)
        return self._take_in(s, message, took_s, late, rejected) + self._tell_stop(s)

    def unreadable_model_came(self, s: GossipState, sender: int) -> list[Action]:
        """Take note of something as large as a model that is no message of this run; its sender may send again."""
        s.counts["models_refused"] += 1
        return self._return_credit(s, sender)

    def peer_died(self, s: GossipState, peer: int) -> list[Action]:
        """Take `peer` for gone, and with it the weight it held."""
        s.budget.peer_died(peer)
        return self._forget(s, peer) + self._tell_stop(s)

    def join(self, s: GossipState, now_s: float) -> None:
        """Train from now on, after sleep. This rank has no model, and `advance` asks for one."""
        self.clock(s, now_s)
        s.budget.rank_joined(s.budget.rank)
        s.healthy, s.between_updates = False, True
        s.asks_again_s = now_s
        s.patience_s = self.rules.patience_s  # it does not know its own pace yet

    def wish_to_leave(self, s: GossipState) -> list[Action]:
        """Ask the others who has a model of use: only when one has said so, `may_leave` is true. One that takes a place
        has none yet, nor has one whose own is not finite. May be asked again."""
        s.leaves = True
        return [SendControl(self._message(s, Kind.WISH), peer) for peer in s.living if peer != s.rank]

    def leave(self, s: GossipState) -> list[Action]:
        """Train no more; the others take over this rank's share of the budget. Nothing of its models should be on the
        way any more: the news might overtake it.

        It must not go before all others have the news, and then only if it still `may_leave`. Of ranks that leave in
        the same moment and count on each other, those whose news comes last find that out, and stay."""
        s.budget.rank_left(s.budget.rank)
        return [SendControl(self._message(s, Kind.LEAVE), peer) for peer in s.budget.present if peer != s.budget.rank]

    def end(self, s: GossipState, reason: Stop) -> list[Action]:
        """End training."""
        s.budget.stop_now(reason)
        return self._tell_stop(s)

    def finish(self, s: GossipState) -> list[Action]:
        """Mix whatever has come, and give no credit: all ranks have ended and nothing is in flight."""
        return self._mix(s, give_credit=False) if s.has_model or s.whole_came else []

    def restart(self, s: GossipState) -> list[Action]:
        """Mix whatever has come, and begin again between two updates: nothing is in flight, and no rank expects an
        answer. All living ranks do so together."""
        actions = self.finish(s)
        for peer in {*s.lock.held_since_s, *s.offers}:
            actions += self._forget(s, peer)
        if s.to_mix:  # of a rank that has no model, and to which no whole one has come
            actions.append(Clear())
        actions += [Close(peer) for peer in s.answers]
        for kept in (s.to_mix, s.answers, s.stale, s.owed, s.offer_numbers):
            kept.clear()
        s.silent.clear()
        s.refusing.clear()
        s.rounds_due, s.only_late_answers = 1, False
        self._has_mixed(s)
        return actions

    def averaged(self, s: GossipState, now_s: float) -> None:
        """Hold the average of all ranks' models from now on. The clock was not looked at meanwhile: this rank was not
        away."""
        s.now_s = s.update_began_s = now_s
        s.weight = 1.0
        self._took_model(s)

    def _begin_update(self, s: GossipState) -> None:
        if len(s.budget.leaders) == 1:  # no other model could be newer; once a spare has joined, this rank waits again
            s.staleness = 0
            s.gave_up = False
            s.returning = False
        s.between_updates, s.update_began_s = False, s.now_s

    # ---- what follows from them ----------------------------------------------------------------------------------

    def must_wait(self, s: GossipState) -> bool:
        """Return whether the rank must mix before it continues, or, if its own model is of no use, get a whole one."""
        if len(s.budget.leaders) == 1 or s.budget.stop is not Stop.NONE:
            return False
        if not s.has_model:
            return not s.whole_came
        return s.staleness > self.rules.max_staleness and not s.gave_up and not self.can_mix(s)

    def mix_is_due(self, s: GossipState) -> bool:
        """Return whether a mix is due; a rank that has no model takes any whole one."""
        return self.can_mix(s) if s.has_model else s.whole_came

    def can_mix(self, s: GossipState) -> bool:
        """Return whether a full round of models has come, and at least one could be accepted. A rank that is alone by
        now waits for no other, and mixes what the dead have sent while it is fresh."""
        if not s.to_mix:
            return False
        return len(s.budget.leaders) == 1 or 0 < self._models_a_round(s) <= len(s.to_mix) + s.num_rejected

    # ---- models and credits --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _take_in(self, s: GossipState, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        """Take in a model, or a reply to one."""

    def _ask(self, s: GossipState) -> list[Action]:
        """Tell log2 n peers that this rank takes a place, or waits in vain to heal, and needs a whole model; after a
        while, others. The rest hear of one that takes a place by the steps that it makes."""
        if s.now_s < s.asks_again_s:
            return []
        living = s.budget.leaders
        n, place = len(living), living.index(s.budget.rank)
        first = s.num_asked
        s.num_asked += 1
        s.asks_again_s = s.now_s + self.rules.again_s
        further = {1 + (first + (1 << k) - 1) % (n - 1) for k in range((n - 1).bit_length())}
        return [SendControl(self._message(s, Kind.JOIN), living[(place + i) % n]) for i in sorted(further)]

    def _joined(self, s: GossipState, peer: int) -> None:
        """Count in `peer`, if it takes a place; it gets a whole model with the next, or at once if this rank waits."""
        s.budget.rank_joined(peer)
        if peer not in s.budget.living:
            return
        s.wants_whole.add(peer)
        if s.between_updates and peer not in s.owed:
            s.owed.append(peer)

    def _note_stayer(self, s: GossipState, message: Message) -> None:
        """Note what the sender says of its model."""
        if message.kind is Kind.STAY:
            s.stayers.add(message.sender)
        elif message.kind in (Kind.ASK_WHOLE, Kind.JOIN):
            s.stayers.discard(message.sender)

    def _assure(self, s: GossipState) -> list[Action]:
        """Tell those who were told to leave that this rank has a model of use, if it has: at the end of an update, for
        only then does it know."""
        if not s.has_model or s.budget.stop is not Stop.NONE:
            return []
        leaving, s.leavers = sorted(s.leavers), set()
        return [SendControl(self._message(s, Kind.STAY), peer) for peer in leaving]

    def _forget(self, s: GossipState, peer: int) -> list[Action]:
        """Expect nothing of this peer any more, and send it nothing."""
        s.stayers.discard(peer)
        s.leavers.discard(peer)
        s.lock.release(peer)
        s.silent.discard(peer)
        s.owed = [p for p in s.owed if p != peer]
        return []

    def _sends_whole(self, s: GossipState, *peers: int) -> bool:
        """Count a send to these peers, and return whether the model must travel whole."""
        whole = s.num_sends % self.rules.whole_every == 0 or not s.wants_whole.isdisjoint(peers)
        if whole:
            s.wants_whole.difference_update(peers)
        s.num_sends += 1
        return whole

    def _model_came(self, s: GossipState, message: Message, took_s: float, late: bool, rejected: bool) -> list[Action]:
        sender = message.sender
        stale = self._is_stale(s, sender, took_s, late)
        self._note_transfer(s, sender, took_s)
        if stale or rejected:  # it counts in its round; its weight stays with this rank
            s.counts["models_refused" if rejected else "models_stale"] += 1
            s.num_rejected += 1
            s.weight = self._mixing.gained(s.weight, message.weight)
            return self._return_credit(s, sender)
        dropped = self._drop_parts(s)  # now, or they would be part of what takes the model's place
        s.counts["models_received"] += 1
        s.whole_came |= message.format.is_whole
        s.gave_up = False
        s.to_mix[sender] = self._mixing.counted(message.weight)
        return [*dropped, Accept(s.to_mix[sender])]

    def _is_stale(self, s: GossipState, sender: int, took_s: float, late: bool) -> bool:
        """Return whether the model that has come from `sender`, in `took_s` seconds, is too old to be received: its
        sender stopped while it sent it, or this rank stopped (and is returning) before it could take it in."""
        return late or took_s > s.transfer_patience_s or sender in s.stale

    def _note_transfer(self, s: GossipState, sender: int, took_s: float) -> None:
        """Learn how long a model of `sender` took to come; its next one is as young as any."""
        s.transfer_s = 0.8 * s.transfer_s + 0.2 * min(took_s, 2 * s.transfer_patience_s)
        s.stale.discard(sender)

    def _credit_came(self, s: GossipState, peer: int, wants_whole: bool) -> None:
        """Note that `peer` has taken in (or rejected) the last model sent to it, or waits to heal and asks for a whole
        one."""
        s.lock.release(peer)
        s.silent.discard(peer)
        if wants_whole:
            s.wants_whole.add(peer)

    def _return_credit(self, s: GossipState, peer: int) -> list[Action]:
        """Reply to a model that was thrown away; once training ends it is not needed."""
        if s.budget.stop is not Stop.NONE:
            return []
        return [SendControl(self._reply(s, Kind.CREDIT if s.has_model else Kind.ASK_WHOLE, peer), peer)]

    def _drop_parts(self, s: GossipState) -> list[Action]:
        """Empty the inbox of a rank that has no model. Parts, or models as old as its own, are of no use to it, and
        while they fill the inbox their senders may send nothing else. They count as rejected; their senders are asked
        for whole models."""
        if s.whole_came or s.has_model or not s.to_mix:
            return []
        s.counts["models_stale"] += len(s.to_mix) if s.healthy else 0
        s.num_rejected += len(s.to_mix)
        senders = list(s.to_mix)
        for weight in s.to_mix.values():
            s.weight = self._mixing.gained(s.weight, weight)
        s.to_mix.clear()
        return [Clear(), *itertools.chain.from_iterable(self._return_credit(s, sender) for sender in senders)]

    def _mix(self, s: GossipState, give_credit: bool) -> list[Action]:
        """Take the inbox into the model, or in its place if that is of no use."""
        if not s.to_mix:
            return []
        if self.rules.max_staleness == 0:
            num_come = len(s.to_mix) + s.num_rejected
            s.rounds_due = min(max(1, num_come // max(1, self._models_a_round(s))), s.budget.size)
        senders, received = list(s.to_mix), sum(s.to_mix.values())
        mix = Mix(s.weight, len(senders)) if s.has_model else Heal(len(senders))
        s.to_mix.clear()
        s.weight = self._mixing.gained(s.weight, received)
        self._took_model(s)
        return [mix, *(SendControl(self._reply(s, Kind.CREDIT, peer), peer) for peer in senders if give_credit)]

    def _took_model(self, s: GossipState) -> None:
        """Note that this rank's model is of use, whatever it was before."""
        s.healthy, s.returning = True, False
        s.asks_again_s, s.num_asked = math.inf, 0
        self._has_mixed(s)

    def _has_mixed(self, s: GossipState) -> None:
        """Begin to count again, with an empty inbox, how old this rank's model is."""
        s.whole_came = s.gave_up = False
        s.num_rejected = s.staleness = 0

    def _tell_stop(self, s: GossipState) -> list[Action]:
        if s.budget.stop is Stop.NONE:
            return []
        return [SendControl(self._message(s, Kind.STOP), peer) for peer in s.budget.tell_stop()]

    def _reply(self, s: GossipState, kind: Kind, peer: int) -> Message:
        """Return the reply to a model of this peer that was mixed or thrown away."""
        return self._message(s, kind)

    def _message(self, s: GossipState, kind: Kind, weight: float = 1.0) -> Message:
        budget = s.budget
        return Message(kind, budget.rank, s.round, weight, budget.stop, budget.steps_by_rank)

    # ---- rounds --------------------------------------------------------------------------------------------------

    def _models_a_round(self, s: GossipState) -> int:
        """Return how many models complete one round of receiving."""
        others = len(self._in_touch(s)) - 1
        return others if self._peers.to_all else min(1, others)

    def _learn_pace(self, s: GossipState) -> None:
        """Learn from the last update's length how long updates take. A single long update, or a time that the rank was
        away, does not change much; a slower environment soon does."""
        took_s = s.now_s - s.update_began_s
        if s.update_s == math.inf:
            s.update_s = took_s if took_s >= 0 else math.inf  # not a number: it was never started
        else:
            s.update_s = 0.8 * s.update_s + 0.2 * min(took_s, 2 * s.patience_s)
        s.patience_s = max(self.rules.patience_s, 5 * s.update_s)

    def _next_peers(self, s: GossipState) -> tuple[int, ...]:
        """Begin a new round of sending; return its peers."""
        s.round += 1
        return self._peers.out_peers(s.budget.rank, self._in_touch(s), s.round - 1, self.rules.seed)

    def _in_touch(self, s: GossipState) -> Sequence[int]:
        """Return the living without the silent. A peer whose model has come is not silent: it may wait for this rank's
        answer."""
        if not s.silent:
            return s.budget.leaders
        return [peer for peer in s.budget.leaders if peer not in s.silent or peer in s.to_mix]
