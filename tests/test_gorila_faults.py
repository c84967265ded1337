"""Gorila when ranks die or stop at bad moments: who answers, who is paired with whom, and what ends a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from signal import SIGUSR1

import pytest

from pala.comm.base import Bytes
from pala.config import GorilaConfig
from pala.exchange.budget import Stop
from pala.gorila import exchange as exchange_module
from pala.gorila import worker as worker_module
from pala.gorila.exchange import GorilaExchange
from pala.gorila.members import Watch
from pala.gorila.messages import Kind
from pala.gorila.shard import assemble
from pala.system.errors import EndError
from pala.testing.faults import Fault, fail_at, fail_at_message, stop_at_message
from pala.testing.memory import Killed, MemoryCommunicator
from support.gorila_ranks import LOCAL, MANY, make_config, make_ranks, play
from support.memory_jobs import ENDLESS, GORILA, SEPARATE, Trained, gorila, stop_when, stopped_well, train

SILENT = "has not answered for 1 s ('gorila.patience_s'), which"
FEW = replace(SEPARATE, replay="global", num_replays=1, num_actors=1, num_learners=1, num_shards=1)


@pytest.fixture
def in_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits. Learners of a whole training do, or they would take the actors' core."""
    monkeypatch.setattr(worker_module, "_PATIENCE_S", 0.0)


# ---- who answers -----------------------------------------------------------------------------------------------------


class Peers:
    """Whom a `Watch` pings: some take pings in, others do not."""

    def __init__(self, ranks: Iterable[int], patience_s: float) -> None:
        self.stopped: set[int] = set()
        self.pings: list[tuple[int, Bytes]] = []
        self.watch = Watch(ranks, patience_s, self.ping)

    def ping(self, rank: int) -> Bytes:
        packet = Bytes(b"")  # type: ignore[arg-type]
        packet.pending = 1
        self.pings.append((rank, packet))
        return packet

    def look(self, *times_s: float) -> set[int]:
        for now_s in times_s:
            self.watch.look(now_s)
            for rank, packet in self.pings:
                packet.pending = int(rank in self.stopped)
        return self.watch.silent


def test_who_takes_no_ping_in_for_the_patience_is_silent_until_it_does() -> None:
    peers = Peers([1, 2], patience_s=8.0)
    peers.look(*range(100, 110))
    peers.stopped = {2}
    assert peers.look(*range(110, 118)) == set()  # shorter than the patience: nothing happens
    assert peers.look(*range(118, 123)) == {2}
    peers.stopped = set()
    assert peers.look(123, 124) == set()
    assert sum(rank == 1 for rank, _ in peers.pings) == 13  # each quarter of the patience


def test_a_rank_that_was_itself_stopped_blames_nobody() -> None:
    """Nor if all were: their answers come when they continue, as it does."""
    peers = Peers([1], patience_s=8.0)
    peers.stopped = {1}
    assert peers.look(0, 1, 1000, 1001, 2000, 2001) == set()
    peers.stopped = set()
    assert peers.look(2002, 2003, 2004) == set()


def test_who_has_died_is_not_silent() -> None:
    peers = Peers([1, 2], patience_s=1.0)
    peers.stopped = {1, 2}
    assert peers.look(*(0.2 * look for look in range(10))) == {1, 2}
    peers.watch.forget(1)
    assert peers.look(2.0) == {2}


@pytest.mark.parametrize(
    ("roles", "num_ranks", "silent", "says"),
    [
        ({}, 3, [1, 2], ""),
        ({"num_shards": 2}, 3, [1], "Rank 1 has not answered for 60 s ('gorila.patience_s'), which serves shard 1;"),
        (LOCAL, 5, [1, 4], ""),
        (LOCAL, 5, [1, 2], "Rank 1, 2 has not .* which learns, as no other rank does that answers;"),
        (MANY, 8, [2, 4, 6], ""),
        (MANY, 8, [2, 3], "Rank 2, 3 has not .* which holds replay, as no other"),
        (MANY, 8, [6, 7], "Rank 6, 7 has not .* which acts, as no other"),
    ],
)  # fmt: skip
def test_only_the_silence_of_what_nobody_else_has_ends_training(
    roles: dict, num_ranks: int, silent: list[int], says: str
) -> None:
    """As the first shard sees it, who looks at all."""
    first = make_ranks(num_ranks, make_config(**roles))[0]
    assert set(silent) <= set(first.node.roles.watched_by(0))
    first.node.members.watch.silent.update(silent)
    first.node.members.judge_silence()
    if not says:
        assert first.exchange.stop is Stop.NONE
        return
    with pytest.raises(EndError, match=f"^{says}.* by `--resume`.$".replace("(", r"\(").replace(")", r"\)")):
        _ = first.exchange.stop


def test_what_dies_when_training_has_ended_is_missed_only_if_it_serves_a_shard() -> None:
    server, learner, actor = make_ranks(3, make_config(**{**LOCAL, "num_actors": 1, "num_learners": 1}))
    server.exchange.stop_now(Stop.BUDGET)
    for rank, dead, fault in ((server, 2, False), (server, 1, False), (actor, 1, False), (learner, 0, True)):
        rank.node.members.peer_died(dead)
        assert bool(rank.node.members.fault) == fault


# ---- who is paired with whom -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_lockstep")
def test_a_learner_without_an_actor_takes_over_those_of_the_dead_learner() -> None:
    """In lockstep: ranks 1 and 2 learn from 3 and 4."""
    cluster = make_ranks(5, make_config(**LOCAL))
    lockstep = play(cluster)
    for _ in range(40):
        next(lockstep)
    for dead in (3, 2):
        cluster[dead].worker._advance = lambda: None
        cluster[dead].hear = lambda source, data: None
        for rank in cluster[:2] + cluster[4:]:
            rank.node.members.peer_died(dead)
    before = cluster[1].worker.counters.updates
    for _ in range(40):
        next(lockstep)
    assert cluster[1].worker.counters.updates >= before + 40 // 4
    assert cluster[4].sent[Kind.BATCH] > 0 and all(rank.node.members.fault == "" for rank in cluster)
    assert len(cluster[1].node.batches) <= 1, "one asked for at each replay"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["learner first", "actor first"])
def test_what_is_left_learns_to_the_end(order: str, tmp_path: Path) -> None:
    """Learner 2 had actor 4, learner 3 actor 5. Actor 4 paid for some 7 minibatches."""
    faults = {"learner first": [fail_at(3, 2), fail_at_message(4, 30)], "actor first": [
        fail_at_message(4, 10), fail_at(3, 20)
    ]}[order]  # fmt: skip
    trained = train(6, gorila(tmp_path, SEPARATE, steps=2400), faults)  # time enough: actors wait for no learner
    assert isinstance(trained.results[3], Killed) and isinstance(trained.results[4], Killed)
    assert trained.ended_well(but_for=[3, 4])
    assert trained.total("gradients_sent", rank=2) > 60
    assert assemble([trained.states()[rank] for rank in (0, 1)]).version > 60


# ---- ranks that stop -------------------------------------------------------------------------------------------------


def ended_by(trained: Trained, sentence: str) -> None:
    """Everybody ended, somebody with that sentence, and the run continues from its checkpoint."""
    assert all(isinstance(result, EndError) for result in trained.results), trained.results
    assert any(sentence in str(result) for result in trained.results), trained.results
    assert not trained.record["completed"]
    resumed = trained.resume(len(trained.results), 200)
    assert resumed.ended_well() and resumed.results[0].global_steps >= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "config", "fault", "sentence"),
    [
        (3, GORILA, stop_at_message(1, 20), f"Rank 1 {SILENT} serves shard 1"),
        (6, SEPARATE, stop_at_message(0, 1), f"Rank 0 {SILENT} serves shard 0"),
        (4, FEW, stop_at_message(1, 9), f"Rank 1 {SILENT} holds replay, as no other"),
        (4, FEW, stop_at_message(3, 40), f"Rank 3 {SILENT} acts, as no other"),
    ],
    ids=["shard", "shard, at its first message", "replay", "actor"],
)
def test_a_rank_that_stops_and_cannot_be_spared_ends_the_job(
    ranks: int, config: GorilaConfig, fault: Fault, sentence: str, tmp_path: Path
) -> None:
    trained = train(ranks, gorila(tmp_path, replace(config, patience_s=1.0), ENDLESS), [fault])
    ended_by(trained, sentence)


@pytest.mark.slow
def test_an_actor_plays_on_without_its_replay_until_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks: 2 shards, 2 replays, 2 learners, 2 actors. Replay 3, of actor 7, stops; replay 2 is learned from."""
    config = replace(SEPARATE, replay="global", num_replays=2, patience_s=1.0)
    said: list[str] = []
    monkeypatch.setattr(exchange_module, "log", said.append)
    silent, answers = "[rank 7] rank 3 has not answered for 1 s", "[rank 7] rank 3 answers again"
    learned = 0

    def on_count(comm: MemoryCommunicator, updates: int) -> None:
        nonlocal learned
        learned += silent in said and answers not in said
        if learned > 20:
            comm.world.stopped_until_s[3] = 0.0
        if answers in said and comm.rank == 4:
            comm.interrupt.signal = SIGUSR1

    trained = train(8, gorila(tmp_path, config, ENDLESS), [stop_at_message(3, 10)], on_count=on_count)
    assert all(getattr(result, "status", result) == "stopped" for result in trained.results), trained.results
    assert trained.total("steps_not_sent", rank=7) > 0 == trained.total("steps_not_sent", rank=6)
    assert trained.total("messages_refused") == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 3], ids=["shard", "replay", "actor"])
def test_a_rank_that_stops_for_less_than_the_patience_changes_nothing(rank: int, tmp_path: Path) -> None:
    fault = stop_at_message(rank, 20, seconds=0.5)
    trained = train(4, gorila(tmp_path, FEW, ENDLESS), [fault], on_count=stop_when(2, updates=100))
    assert stopped_well(trained, but_for=[])
    assert trained.total("messages_refused") == trained.total("steps_not_sent") == 0
    assert 80 < trained.total("gradients_sent") <= (trained.results[0].global_steps - 60) // 4


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_left", [False, True])
def test_a_shard_that_dies_before_its_slice_is_fetched_leaves_no_policy(
    has_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slice would be zeros. Those who remain may be about to leave."""
    final_parameters = GorilaExchange.final_parameters

    def dies_before(exchange: GorilaExchange, timeout_s: float):
        if exchange._comm.rank == 1:
            exchange._comm.die()
        elif has_left:
            with exchange.node() as node:
                node.budget.rank_left(exchange._comm.rank)
        return final_parameters(exchange, timeout_s)

    monkeypatch.setattr(GorilaExchange, "final_parameters", dies_before)
    trained = train(3, gorila(tmp_path))
    for rank in (0, 2):
        assert "Rank 1 has died, which served shard 1" in str(trained.results[rank])
    assert not trained.record["completed"] and not (trained.run / "policy.safetensors").exists()
    monkeypatch.undo()
    assert trained.resume(3, 400).ended_well()
