"""Members of a Gorila run: what a rank, awake or asleep, knows of the others. No torch, MPI, threads, clock.

A rank that leaves tells all others. It may leave if it is a bundle that serves no shard: whatever it does, the shards'
ranks do as well. With `separate` roles it could be the last of its role, so all stay.

A spare wakes up by itself when it is needed (`StepBudget.is_needed`), and acts, learns and holds replay as every
bundled rank does. The shards hear of it by its first question, all others by the steps that it makes. Shards have no
successors: no other rank has their part of the parameters.

A rank is watched by pings. A message leaves when its receiver begins to take it in (`Packet.pending`), which the
receiver's transport does by itself however long its learner is busy. So a ping that does not leave tells of a rank that
is stopped, or behind a link that is cut; no answer is needed. Deaths are another matter: the transport reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pala.comm.base import Packet
from pala.exchange.budget import StepBudget, Stop
from pala.exchange.wire import Message
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.gorila.roles import Roles

_PARTS = 4  # of the patience: between two pings of a rank, and the most that the time between two looks counts


class _Ping(NamedTuple):
    packet: Packet
    sent_s: float  # of the time in which this rank was awake


class Watch:
    """The ranks that this one pings. `silent`: ranks that have not answered for `patience_s`."""

    def __init__(self, ranks: Iterable[int], patience_s: float, ping: Callable[[int], Packet]) -> None:
        """Begin with these ranks. `ping(rank)`: sends a message to that rank."""
        self.silent: set[int] = set()
        self.patience_s, self._ping = patience_s, ping
        self._pings: dict[int, _Ping | None] = dict.fromkeys(ranks)
        self._looked_s: float | None = None
        self.awake_s = 0.0  # since the first look, without the time in which this rank was itself stopped

    def look(self, now_s: float) -> None:
        """Judge the pings that were sent and send new ones. Called some times a second, at any time."""
        part_s = self.patience_s / _PARTS
        if self._looked_s is not None:
            self.awake_s += min(now_s - self._looked_s, part_s)
        self._looked_s = now_s
        for rank, ping in self._pings.items():
            waits_s = self.awake_s - ping.sent_s if ping is not None else part_s
            if ping is not None and ping.packet.pending:
                if waits_s > self.patience_s:
                    self.silent.add(rank)
                continue
            self.silent.discard(rank)
            if waits_s >= part_s:
                self._pings[rank] = _Ping(self._ping(rank), self.awake_s)

    def attend(self, ranks: Iterable[int]) -> None:
        """Watch these ranks from now on, and keep what is known of those that were watched before."""
        self._pings = {rank: self._pings.get(rank) for rank in ranks}
        self.silent.intersection_update(self._pings)

    def forget(self, rank: int) -> None:
        """Stop watching a rank that has died or left."""
        self._pings.pop(rank, None)
        self.silent.discard(rank)


class Members:
    """The present roles of all ranks, which of them answer, and whether training can continue."""

    def __init__(
        self,
        budget: StepBudget,
        roles: Roles,
        patience_s: float,
        tell: Callable[[int, Kind], Packet],
    ) -> None:
        """Begin with the roles of the ranks that train first. `tell`: sends a rank a message of a kind."""
        self.budget, self.rank = budget, budget.rank
        self.roles, self.tell = roles, tell
        self.on_gone: Callable[[int], object] = lambda rank: None  # that rank has died or left
        self.on_change: Callable[[], object] = lambda: None  # a rank has gone or come, and training continues
        self.fault = ""  # why training cannot continue
        self.gone: list[int] = []  # ranks that have died or left, in the order in which this rank heard of it
        self._has_spares = budget.size > len(roles.everybody)
        self.watch = Watch(self._watched(), patience_s, lambda rank: self.tell(rank, Kind.PING))

    @property
    def has_left(self) -> bool:
        """True of a rank that was told to go, and has told the others."""
        return self.rank in self.budget.left

    # ---- what comes ----------------------------------------------------------------------------------------------

    def hear(self, message: Message) -> None:
        """Take over the counters of any message, and that its sender leaves. A spare that has made steps, or that sends
        anything but messages about members, trains from now on."""
        self.budget.merge(message.steps_by_rank, message.stop)
        if self._has_spares:
            if message.kind not in ABOUT_MEMBERS and message.sender not in self.roles.everybody:
                self.budget.rank_joined(message.sender)
            self._admit()
        if message.kind is Kind.LEAVE:
            self.budget.rank_left(message.sender)
            self._lose(message.sender)

    def peer_died(self, rank: int) -> None:
        """Count a rank as dead. Training continues if another rank has its roles. Once it ends, only a shard's rank is
        missed."""
        self.budget.peer_died(rank)
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.watch.forget(rank)
        if rank not in self.gone:
            self.gone.append(rank)
        self.on_gone(rank)
        self._changed()

    def _admit(self) -> None:
        """Give the spares that train by now their roles."""
        before, self.roles = self.roles, self.roles.with_spares(self.budget.living)
        if self.roles is not before:
            self._changed()

    def _changed(self) -> None:
        if self.has_left:
            return
        self.judge_deaths()
        if not self.fault and self.budget.stop is Stop.NONE:
            self.watch.attend(self._watched())
            self.on_change()

    # ---- what this rank does -------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Look which ranks answer, some times a second; not once training ends."""
        if self.budget.stop is Stop.NONE and not self.has_left:
            self.watch.look(now_s)
            self.judge_silence()

    def judge_deaths(self) -> None:
        """Find the fault, if any: training needs all shards, and one rank of each other role until it ends."""
        is_over = self.budget.stop is not Stop.NONE
        if not self.fault and (loss := lost_by_deaths(self.roles, self.gone, self.budget.living, is_over)):
            (rank,) = loss.ranks
            spares = ", of which no spare has a copy" if self._has_spares and rank in self.roles.shards else ""
            self.fault = f"Rank {rank} has died, which {loss.what}{spares}; {_END}"

    def judge_silence(self) -> None:
        """Find the fault, if any: training needs an answer of all shards, and of one rank of each other role."""
        silent = self.watch.silent
        if silent and (loss := lost_by_silence(self.roles, self.budget.living, silent)):
            self.fault = (
                f"Rank {', '.join(map(str, loss.ranks))} has not answered for {self.watch.patience_s:g} s "
                f"('gorila.patience_s'), which {loss.what}; {_END}"
            )

    def join(self) -> None:
        """Train from now on, as a spare that is needed."""
        self.budget.rank_joined(self.rank)
        self._admit()

    @property
    def why_stay(self) -> str:
        """The reason why this rank cannot leave; empty if it can."""
        if self.rank in self.roles.shards:
            return "it serves a shard"
        return "" if self.roles.are_bundled else "'gorila.roles' is 'separate'"

    def leave(self) -> None:
        """Do nothing more from now on, and tell the others, which continue."""
        self.budget.rank_left(self.rank)
        for peer in self.budget.present:
            if peer != self.rank:
                self.tell(peer, Kind.LEAVE)

    def send_stop(self) -> None:
        """Tell others that training ends, if it does and they have not been told."""
        for peer in self.budget.tell_stop():
            self.tell(peer, Kind.STOP)

    def _watched(self) -> set[int]:
        return self.roles.watched_by(self.rank).intersection(self.budget.present).difference(self.gone)


class Missing(NamedTuple):
    """A lost part without which training cannot continue."""

    ranks: list[int]  # that had it
    what: str  # completes the sentence "rank N has died, which ..."


def lost_by_deaths(roles: Roles, gone: Sequence[int], living: Collection[int], is_over: bool) -> Missing | None:
    """Return what no rank has any more. When training `is_over`, only shards are needed."""
    for index, rank in enumerate(roles.shards):
        if rank in gone:
            return Missing([rank], f"served shard {index} of the parameters")
    if is_over:
        return None
    if dead := [rank for rank in gone if rank in roles.replays and rank not in roles.actors]:
        return Missing(dead[-1:], "held the replay of other ranks")
    for ranks, name in ((roles.learners, "learner"), (roles.actors, "actor")):
        if set(ranks).isdisjoint(living):
            return Missing([rank for rank in gone if rank in ranks][-1:], f"was the last {name}")
    return None


def lost_by_silence(roles: Roles, living: Collection[int], silent: Collection[int]) -> Missing | None:
    """Return what no rank has that answers. A spare takes the place of the dead, not of the silent."""
    for index, rank in enumerate(roles.shards):
        if rank in silent:
            return Missing([rank], f"serves shard {index}")
    answering = set(living) - set(silent)
    for ranks, verb in ((roles.replays, "holds replay"), (roles.learners, "learns"), (roles.actors, "acts")):
        quiet = [rank for rank in ranks if rank in silent]
        if quiet and answering.isdisjoint(ranks):
            return Missing(quiet, f"{verb}, as no other rank does that answers")
    return None


_END = "nothing can be learned without it, so the job ends here. Continue from the last checkpoint by `--resume`."
