"""Who is there: what a rank of Gorila knows of the others, whether it has a place or sleeps. No torch, MPI, threads,
clock.

    a rank dies ──▶ first shard ──GO──▶ spare, which wakes up ──JOIN──▶ all others
    a rank is told to leave ──ASK_LEAVE──▶ first shard ──MAY_LEAVE──▶ the rank, which goes ──LEAVE──▶ all others

A message can be refused. So with each ping the first shard says again what it has told spares to do (GO; a spare that
has done it answers), and who has joined (PLACE).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from pala.comm.base import Packet
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.wire import Message, Refusal
from pala.gorila.messages import ORDERS, Kind
from pala.gorila.places import Places, lost_by_deaths, lost_by_silence
from pala.gorila.watch import Watch

NOBODY_ELSE = "no other rank can do what it does"


class Members:
    """What one rank knows. Whoever has it may set `on_gone` and `on_change`."""

    def __init__(
        self, budget: StepBudget, places: Places, patience_s: float, tell: Callable[[int, Kind, int], Packet]
    ) -> None:
        """`tell`: sends a rank a message of this kind and round."""
        self.budget, self.places, self.rank, self.tell = budget, places, budget.rank, tell
        self.on_gone: Callable[[int], object] = lambda rank: None  # that rank has died or left
        self.on_change: Callable[[], object] = lambda: None  # somebody has gone or come, and training goes on
        self.fault = ""  # why training cannot go on
        self.order: int | None = None  # the place that this rank, a spare, has been told to take
        self.may_leave: bool | None = None  # the first shard's answer, when it has come
        self._let_go: set[int] = set()  # of the first shard: ranks that it has allowed to leave
        self.is_first = self.rank == places.roles.shards[0]
        self.watch = Watch(self._watched(), patience_s, self._ping)

    @property
    def has_left(self) -> bool:
        """True of a rank that was told to go, and has told the others."""
        return self.rank in self.budget.left

    # ---- what comes ----------------------------------------------------------------------------------------------

    def hear(self, message: Message) -> Refusal | None:
        """A message of one of the kinds `ABOUT_MEMBERS`, whose counters are known."""
        kind, sender = message.kind, message.sender
        if kind in (Kind.STOP, Kind.PING):
            return None
        place, rank = divmod(message.round - 1, self.places.size)
        if kind in (*ORDERS, Kind.PLACE) and sender != self.places.roles.shards[0]:
            return Refusal(f"rank {sender} is not the first shard, but its kind is {kind.name}")
        if place < 0 or (kind is not Kind.PLACE and rank != (self.rank if kind in ORDERS else sender)):
            return Refusal("it is about another rank")
        if kind is Kind.ASK_LEAVE:
            return self._hear_question(place, sender)
        if kind in (Kind.MAY_LEAVE, Kind.MUST_STAY):
            self.may_leave = kind is Kind.MAY_LEAVE
            return None
        if kind is Kind.LEAVE:
            return self._hear_leave(place, sender)
        if kind is Kind.GO:
            return self._hear_order(place, sender)
        reason = self.places.take(place, rank)
        if reason:
            return Refusal(reason)
        if rank in self.budget.present:
            self.budget.rank_joined(rank)
        self._changed()
        return None

    def _hear_leave(self, place: int, rank: int) -> Refusal | None:
        if place in self.places.first_roles.shards or place != self.places.place_of(rank):
            return Refusal(f"rank {rank} has not place {place} to leave")
        self.budget.rank_left(rank)
        self._lose(rank)
        return None

    def _hear_question(self, place: int, rank: int) -> Refusal | None:
        """A rank asks whether it may leave. If several ask at once, only so many may as the others can do without."""
        if not self.is_first or place != self.places.place_of(rank):
            return Refusal(f"this rank cannot let rank {rank} go from place {place}")
        if self.budget.stop is not Stop.NONE:
            return None
        stays = bool(self.why_stay(rank))
        if not stays:
            self._let_go.add(rank)
        self.tell(rank, Kind.MUST_STAY if stays else Kind.MAY_LEAVE, self._number(place, rank))
        return None

    def _hear_order(self, place: int, first: int) -> Refusal | None:
        if self.budget.stop is not Stop.NONE:
            return None
        if (place, self.rank) in self.places.replaced:
            self.tell(first, Kind.JOIN, self._number(place, self.rank))  # it has not heard that
        elif self.rank not in self.places.spares or not self.places.can_be_taken(place):
            return Refusal(f"this rank cannot take place {place}")
        else:
            self.order = place
        return None

    def peer_died(self, rank: int) -> None:
        """Actors, learners and replay may die, as long as somebody else has their role or can take it; when training
        ends, everybody but the shards."""
        self.budget.peer_died(rank)
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.watch.forget(rank)
        self.places.lose(rank)
        self.on_gone(rank)
        self._changed()

    def _changed(self) -> None:
        if self.has_left:
            return
        self.judge_deaths()
        if not self.fault and self.budget.stop is Stop.NONE:
            self.watch.attend(self._watched())
            self._give_places()
            self.on_change()

    # ---- what this rank does -------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Some times a second: see who answers. Nothing once training ends."""
        if self.budget.stop is not Stop.NONE or self.has_left:
            return
        self.watch.look(now_s)
        self.judge_silence()
        self._give_places()

    def judge_deaths(self) -> None:
        """Training goes on as long as all shards live, and somebody of each other role; when it ends, shards do."""
        is_over = self.budget.stop is not Stop.NONE
        if not self.fault and (loss := lost_by_deaths(self.places, self.budget.living, is_over)):
            (rank,) = loss.ranks
            fate = "left" if rank in self.budget.left else "died"
            self.fault = f"Rank {rank} has {fate}, which {loss.what}; {_END}"

    def judge_silence(self) -> None:
        """Training goes on as long as all shards answer, and somebody of each other role."""
        silent = self.watch.silent
        if silent and (loss := lost_by_silence(self.places, self.budget.living, silent)):
            self.fault = (
                f"Rank {', '.join(map(str, loss.ranks))} has not answered for {self.watch.patience_s:g} s "
                f"('gorila.patience_s'), which {loss.what}; {_END}"
            )

    def join(self) -> None:
        """This rank, a spare, takes the place that it was told to."""
        assert self.order is not None
        self.places.take(self.order, self.rank, certain=True)
        self.budget.rank_joined(self.rank)
        self._tell_others(Kind.JOIN, self.order)
        self._changed()

    def why_stay(self, rank: int | None = None) -> str:
        """Why this rank, or another, cannot leave: what others need of it, or nothing. Spares take what places they
        can; who is silent does nothing for others."""
        rank = self.rank if rank is None else rank
        if rank in self.places.roles.shards:
            return "it serves a shard"
        without, going, silent = copy.deepcopy(self.places), {rank, *self._let_go}, self.watch.silent
        for gone in sorted(going):
            without.lose(gone)
        without.give(unfit=silent)
        successors = dict(without.orders)
        for spare, place in successors.items():
            without.take(place, spare, certain=True)
        living = {*self.budget.living, *successors} - going
        lost = lost_by_deaths(without, living, is_over=False) or lost_by_silence(without, living, silent)
        return NOBODY_ELSE if lost else ""

    def ask_to_leave(self) -> None:
        """`may_leave` tells when the first shard has answered."""
        self.may_leave = None
        self.tell(self.places.roles.shards[0], Kind.ASK_LEAVE, self._number(self.own_place, self.rank))

    def leave(self) -> None:
        """This rank does nothing more; tell the others, who go on."""
        place = self.own_place
        self.budget.rank_left(self.rank)
        self._tell_others(Kind.LEAVE, place)

    def send_stop(self) -> None:
        """Tell others that training ends, if it does and they have not been told."""
        for peer in self.budget.tell_stop():
            self.tell(peer, Kind.STOP, 0)

    @property
    def own_place(self) -> int:
        """Of this rank, which does not sleep."""
        place = self.places.place_of(self.rank)
        assert place is not None, "a rank that sleeps has none"
        return place

    def _give_places(self) -> None:
        """If this rank is the first shard, tell spares to take the places of those who are gone."""
        if self.is_first:
            for spare, place in self.places.give(self.watch.silent):
                self.tell(spare, Kind.GO, self._number(place, spare))

    def _tell_others(self, kind: Kind, place: int) -> None:
        for peer in self.budget.present:
            if peer != self.rank:
                self.tell(peer, kind, self._number(place, self.rank))

    def _watched(self) -> set[int]:
        watched = self.places.roles.watched_by(self.rank)
        if self.is_first:
            watched |= {*self.places.spares}
        return watched.intersection(self.budget.present).difference(self.places.gone)

    def _ping(self, rank: int) -> Packet:
        if self.is_first:
            if rank in self.places.orders:
                self.tell(rank, Kind.GO, self._number(self.places.orders[rank], rank))
            for place, holder in self.places.replaced:
                self.tell(rank, Kind.PLACE, self._number(place, holder))
        return self.tell(rank, Kind.PING, 0)

    def _number(self, place: int, rank: int) -> int:
        """A place and a rank in one; never 0, as other messages have."""
        return 1 + place * self.places.size + rank


_END = "nothing can be learned without it, so the job ends here. Go on from the last checkpoint by `--resume`."
