"""Gorila's ranks without MPI: beside plain DQN, and with strange messages, old gradients, outliers and deaths."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pala.comm.base import Bytes
from pala.config import Config, GorilaConfig
from pala.exchange.budget import Stop
from pala.gorila import worker as worker_module
from pala.gorila.messages import ABOUT_MEMBERS, Kind
from pala.system.errors import EndError, PalaError
from support.gorila_ranks import (
    CELLS,
    ENV_SEEDS,
    GLOBAL,
    LOCAL,
    MANY,
    SEED,
    SEPARATE,
    Corridor,
    Rank,
    make_config,
    make_network,
    make_ranks,
    play,
    play_steps,
)
from support.gorila_ranks import without_patience as without_patience
from support.helpers import slow_but_for

# ---- plain DQN -------------------------------------------------------------------------------------------------------


def plain_dqn(config: Config, steps: int, acts_with_fetched: bool) -> tuple[list[Tensor], Tensor]:
    """DQN without ranks, written out. Returns the flat parameters after each update, and the target's at the end.

    `acts_with_fetched`: actions are chosen by a copy of the network that is renewed every so many steps, before the
    learning of the last of them, as an actor's is on a rank of its own.
    """
    gorila, count = config.gorila, config.env.num_envs
    network, target = make_network(), make_network()
    acting = copy.deepcopy(network)
    optimiser = torch.optim.Adagrad(network.parameters(), gorila.adagrad_learning_rate, eps=1e-5)
    squares = [torch.zeros_like(parameter) for parameter in network.parameters()]
    rng, generator = np.random.default_rng(SEED), torch.Generator().manual_seed(SEED)
    envs = [Corridor() for _ in range(count)]
    observations = [env.reset(seed=int(seed))[0] for env, seed in zip(envs, ENV_SEEDS, strict=False)]
    memories: list[deque] = [deque(maxlen=gorila.replay_capacity_steps // count) for _ in envs]
    history: list[Tensor] = []
    since_fetch = 0
    for step in range(count, steps + 1, count):
        progress = min(max((step - count - gorila.min_replay_steps) / gorila.epsilon_decay_steps, 0), 1)
        epsilon = 1 + progress * (gorila.epsilon_last - 1)
        best = (acting if acts_with_fetched else network)(torch.from_numpy(np.array(observations))).argmax(-1)
        anything = torch.randint(3, (count,), generator=generator)
        explores = torch.rand(count, generator=generator) < epsilon
        for i, env in enumerate(envs):
            action = int(anything[i] if explores[i] else best[i])
            following, reward, terminated, truncated, _ = env.step(action - 1)
            memories[i].append((observations[i], action, reward, following, terminated))
            if truncated and not terminated:
                memories[i].append(None)  # the last observation takes a row, but is no transition
            observations[i] = env.reset()[0] if terminated or truncated else following
        if since_fetch >= gorila.update_period_steps:
            acting, since_fetch = copy.deepcopy(network), 0
        since_fetch += count
        while len(history) < (step - gorila.min_replay_steps) // gorila.update_period_steps:
            rows = [row for memory in memories for row in memory]
            drawn = rng.integers(len(rows), size=gorila.minibatch_size)
            while gaps := [i for i, row in enumerate(drawn) if rows[row] is None]:
                drawn[gaps] = rng.integers(len(rows), size=len(gaps))
            learn_plainly(network, target, [rows[row] for row in drawn], gorila)
            if gorila.optimiser == "adagrad":
                optimiser.step()
            else:  # torch's epsilon is outside the root
                for square, parameter in zip(squares, network.parameters(), strict=True):
                    square.mul_(gorila.rmsprop_alpha).add_((1 - gorila.rmsprop_alpha) * parameter.grad**2)
                    step_size = gorila.rmsprop_learning_rate / (square + gorila.rmsprop_epsilon).sqrt()
                    parameter.data -= step_size * parameter.grad
            history.append(vector(network))
            if len(history) % gorila.target_period_updates == 0:
                target.load_state_dict(network.state_dict())
    return history, vector(target)


def learn_plainly(network: nn.Module, target: nn.Module, batch: list[tuple], gorila: GorilaConfig) -> None:
    """The gradient: of the clipped error, as DQN's paper has it."""
    observations, actions, rewards, following, terminated = (np.array(column) for column in zip(*batch, strict=True))
    next_values = target(torch.from_numpy(following))
    judge = network(torch.from_numpy(following)) if gorila.double_dqn else next_values
    best = next_values[range(len(batch)), judge.argmax(-1)].detach()
    y = torch.from_numpy(rewards).float() + gorila.gamma * best * torch.from_numpy(~terminated)
    chosen = network(torch.from_numpy(observations))[range(len(batch)), actions]
    error = (y - chosen).detach()
    network.zero_grad()
    (-error.clamp(-1, 1) * chosen).mean().backward()


def vector(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


LEARNING = {
    "adagrad": (1, {}),
    "rmsprop, double, three environments": (
        3, {"optimiser": "rmsprop", "rmsprop_learning_rate": 0.01, "double_dqn": True, "update_period_steps": 2}
    ),
}  # fmt: skip
RANKS = {
    "one rank": (1, {}),
    "three ranks": (3, SEPARATE),
    "five ranks, two of them shards, one the replay": (5, GLOBAL | {"num_shards": 2}),
}


@pytest.mark.parametrize("learning", slow_but_for(LEARNING, "rmsprop, double, three environments"))
@pytest.mark.parametrize("ranks", slow_but_for(RANKS, "five ranks, two of them shards, one the replay"))
def test_one_actor_and_one_learner_in_lockstep_are_plain_dqn(learning: str, ranks: str) -> None:
    """After every update, whatever the roles' ranks and the number of shards."""
    num_envs, how = LEARNING[learning]
    num_ranks, roles = RANKS[ranks]
    config, steps = make_config(num_envs, **how | roles), 321
    expected, expected_target = plain_dqn(config, steps, acts_with_fetched=num_ranks > 1)
    assert len(expected) == (321 - 20) // config.gorila.update_period_steps
    cluster = make_ranks(num_ranks, config)
    shards = [rank.shard for rank in cluster if rank.shard is not None]
    history: list[Tensor] = []

    def record(apply, last):
        def recorded(*arguments, **options):
            assert apply(*arguments, **options)
            if last:
                history.append(torch.cat([shard.parameters for shard in shards]))
            return True

        return recorded

    for shard in shards:
        shard.apply = record(shard.apply, shard is shards[-1])
    play_steps(cluster, steps // num_envs)
    assert len(history) == len(expected)
    for update, (ours, plain) in enumerate(zip(history, expected, strict=True)):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5, msg=f"after update {update + 1}")
    learner = cluster[cluster[0].node.roles.learners[0]]
    torch.testing.assert_close(learner.target.data, expected_target, rtol=1e-4, atol=1e-5)


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_every_gradient_may_fetch_and_then_the_actor_beside_it_need_not() -> None:
    """But for what it fetches while nothing is learned yet, and at the end."""
    cluster = make_ranks(2, make_config(num_envs=3, update_period_steps=2))
    lockstep = play(cluster)
    while cluster[1].worker.counters.updates < 5:
        next(lockstep)
    before = cluster[1].sent.copy()
    for _ in range(20):
        next(lockstep)
    later = cluster[1].sent - before
    assert later[Kind.GRADIENT_AND_FETCH] == 30
    assert later[Kind.FETCH] == 0


@pytest.mark.parametrize("base_steps", [0, 1000])
def test_nobody_fetches_what_cannot_have_changed_before_learners_can_learn(base_steps: int) -> None:
    """A resumed run's replay is empty again."""
    cluster = make_ranks(2, make_config(num_envs=3, update_period_steps=2, min_replay_steps=60), base_steps)
    lockstep = play(cluster)
    while cluster[0].exchange.global_steps - base_steps < 50:
        next(lockstep)
    assert cluster[1].sent[Kind.FETCH] == 0 == cluster[1].worker.counters.updates


def test_a_learner_asks_for_parameters_with_every_third_gradient() -> None:
    cluster = make_ranks(3, make_config(parameters_period_updates=3, **SEPARATE))
    play_steps(cluster, 140)
    learner, server = cluster[1], cluster[0]
    assert learner.worker.counters.updates == server.shard.version == 30
    assert (learner.sent[Kind.GRADIENT], learner.sent[Kind.GRADIENT_AND_FETCH]) == (20, 10)
    assert cluster[2].sent[Kind.FETCH] == 140 // (3 * 4)  # the actor's own pace
    assert server.sent[Kind.PARAMETERS] == 10 + cluster[2].sent[Kind.FETCH]
    assert learner.node.parameters.versions == [27]
    learner.node.take_parameters(learner.flat.data)
    assert learner.node.parameters.versions == [30]
    assert learner.flat.data.equal(server.shard.parameters)


def test_a_learner_waits_for_all_shards_before_it_sends_what_they_are_to_answer() -> None:
    """With every second gradient to be answered: it may be one ahead."""
    cluster = make_ranks(4, make_config(parameters_period_updates=2, num_shards=2, **SEPARATE))
    learner, gradient = cluster[2], torch.ones(len(cluster[2].flat.data))
    held: list[tuple[Rank, int, bytes]] = []
    for shard in cluster[:2]:
        shard.hear = lambda source, data, shard=shard: held.append((shard, source, data))
    for expected in (True, True, True, False):
        assert learner.node.may_send_gradient is expected
        if expected:
            learner.node.send_gradient(gradient)
    answered = []
    for shard, source, data in held:  # of the first, second and third gradient
        Rank.hear(shard, source, data)
        answered.append(learner.node.may_send_gradient)
    assert answered == [False, False, False, True, True, True]


def test_targets_come_when_a_shards_version_passes_a_multiple_of_the_period() -> None:
    """Over two shards, one of which is ahead of the other."""
    period = 4
    cluster = make_ranks(4, make_config(target_period_updates=period, num_shards=2, **SEPARATE))
    learner, shards = cluster[2], [cluster[0].shard, cluster[1].shard]
    gradients = torch.randn(20, len(learner.flat.data), generator=torch.Generator().manual_seed(1))
    first, fetches = learner.target.data.clone(), []
    shards[1].apply(gradients[0][learner.parts[1]], 0)  # another learner's came to this one only
    for number, gradient in enumerate(gradients[1:10], 1):
        learner.node.send_gradient(gradient)
        learner.node.take_parameters(learner.flat.data)
        learner.node.take_target(learner.target.data)
        assert [shard.version for shard in shards] == [number, number + 1]
        for shard, part in zip(shards, learner.parts, strict=True):
            assert learner.flat.data[part].equal(shard.parameters)
            assert learner.target.data[part].equal(shard.target)
            assert learner.target.data[part].equal(first[part]) == (shard.version < period)
        fetches.append(learner.sent[Kind.FETCH_TARGET])
    assert fetches == [0, 0, 1, 2, 2, 2, 3, 4, 4]


def test_a_target_that_is_long_under_way_is_asked_for_once() -> None:
    cluster = make_ranks(3, make_config(target_period_updates=2, **SEPARATE))
    learner, server, gradient = cluster[1], cluster[0], torch.ones(len(cluster[1].flat.data))
    held: list[bytes] = []

    def hear(source: int, data: bytes) -> None:
        is_target = Kind.TARGET in server.last and server.last[Kind.TARGET][1] == data
        held.append(data) if is_target else Rank.hear(learner, source, data)

    learner.hear = hear
    for _ in range(3):
        learner.node.send_gradient(gradient)
        learner.node.take_parameters(learner.flat.data)
        learner.node.take_target(learner.target.data)
    assert learner.sent[Kind.FETCH_TARGET] == len(held) == 1
    assert not learner.target.data.equal(server.shard.target)
    Rank.hear(learner, 0, held[0])
    learner.node.take_target(learner.target.data)
    assert learner.target.data.equal(server.shard.target)


def test_an_actor_is_no_more_than_four_steps_ahead_of_what_its_replay_has_received() -> None:
    cluster = make_ranks(4, make_config(**GLOBAL))
    actor, under_way, waits = cluster[3], deque[Bytes](), Counter[int]()

    def send(peer: int, packet: Bytes) -> None:
        actor.send(peer, packet)
        if actor.wire.decode(packet.data).kind is Kind.EXPERIENCE:
            packet.pending = 1
            under_way.append(packet)

    def wait(timeout_s: float) -> None:
        waits[len(under_way)] += 1
        under_way.popleft().pending = 0

    actor.transport.send, actor.exchange.wait = send, wait
    play_steps(cluster, 10)
    assert waits == {5: 6}
    actor.exchange.stop_now(Stop.SIGNAL)  # then nobody is waited for
    actor.worker._advance()
    assert waits == {5: 6} and len(under_way) == 5


# ---- what is discarded -----------------------------------------------------------------------------------------------


def test_an_old_gradient_is_discarded_counted_and_answered_with_what_is_new() -> None:
    cluster = make_ranks(3, make_config(max_staleness_updates=2))
    server, ahead, behind = cluster
    gradient = torch.ones(len(server.flat.data))
    for _ in range(3):
        ahead.exchange.send_gradient(gradient)
        ahead.node.take_parameters(ahead.flat.data)
    before = server.shard.parameters.clone()
    behind.exchange.send_gradient(gradient)  # computed with version 0, three updates ago
    assert server.shard.parameters.equal(before)
    figures = server.exchange.metrics()
    assert (figures["gradients_stale"], figures["server_updates"]) == (1, 3)
    behind.node.take_parameters(behind.flat.data)
    assert behind.flat.data.equal(before)
    behind.exchange.send_gradient(gradient)
    figures = server.exchange.metrics()
    assert (figures["gradients_stale"], figures["server_updates"]) == (0, 4)  # since the last record
    sent = behind.exchange.metrics()
    assert (sent["gradients_sent"], sent["parameters_received"]) == (2, 2)
    assert behind.exchange.metrics()["gradients_sent"] == 0
    assert "gradients_stale" not in sent  # it serves no shard


def test_a_servers_own_learner_is_judged_alike() -> None:
    server, other = make_ranks(2, make_config(max_staleness_updates=2))
    gradient = torch.ones(len(server.flat.data))
    for _ in range(3):
        other.node.send_gradient(gradient)
        other.node.take_parameters(other.flat.data)
    server.node.send_gradient(gradient)
    assert (server.shard.stale, server.shard.version) == (1, 3)
    server.node.take_parameters(server.flat.data)
    server.node.send_gradient(gradient)
    assert (server.shard.stale, server.shard.version) == (1, 4)


def test_minibatches_with_a_planted_outlier_send_no_gradient_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rewards of a million; every minibatch that one of them is in."""
    monkeypatch.setattr("pala.gorila.dqn._FILTER_HORIZON", 10)
    config = make_config(loss_filter_deviations=6.0, **SEPARATE)
    server, learner, actor = cluster = make_ranks(3, config)
    lockstep, next_batch, planted = play(cluster), learner.exchange.next_batch, []

    def watched(timeout_s: float) -> Any:
        batch = next_batch(timeout_s)
        if batch is not None:
            planted.append(bool((batch.rewards > 1e5).any()))
        return batch

    learner.exchange.next_batch = watched
    for step in range(220):
        if step == 120:
            actor.envs.vector_env.envs[0].step = lambda _: (
                np.eye(CELLS, dtype=np.float32)[0],
                1e6,
                False,
                False,
                {},
            )
        if step == 124:
            del actor.envs.vector_env.envs[0].step
        next(lockstep)
    assert 3 < sum(planted) < 20
    assert not any(planted[:20])
    assert server.shard.version == learner.sent[Kind.GRADIENT_AND_FETCH] == len(planted) - sum(planted)
    assert learner.sent[Kind.FETCH] == sum(planted)  # else it would learn on with the parameters that it has
    (record,) = (record for record in learner.worker.take_records() if record["type"] == "interval")
    assert (record["gradients_filtered"], record["updates"]) == (sum(planted), len(planted))
    assert record["gradients_sent"] == server.shard.version
    assert record["absolute_error"] < 10  # of the others


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [(), (0,), (4,), (1, 2, 5)])
@pytest.mark.parametrize("who", [3, 6])
def test_everybody_hears_of_the_end_from_whoever_sees_it(who: int, dead: tuple[int, ...]) -> None:
    cluster = make_ranks(7, make_config(total_steps=10, num_shards=1))
    living = [rank for rank in cluster if rank.rank not in dead]
    for rank in dead:
        cluster[rank].hear = lambda source, data: None
        for other in living:
            other.node.members.peer_died(rank)
            other.node.members.fault = ""
    cluster[who].node.stepped(10)
    cluster[who].node.members.send_stop()
    assert [rank.node.budget.stop for rank in living] == [Stop.BUDGET] * len(living)
    assert [rank.node.budget.global_steps for rank in living] == [10] * len(living)


def test_the_budget_ends_the_loops_of_all_roles() -> None:
    cluster = make_ranks(4, make_config(total_steps=100, **GLOBAL))
    lockstep = play(cluster)
    while cluster[3].worker.counters.local_steps < 100:
        assert not any(rank.exchange.stop for rank in cluster)
        next(lockstep)
    assert [rank.exchange.stop for rank in cluster] == [Stop.BUDGET] * 4
    assert cluster[0].shard.version == (99 - 20) // 4  # the last minibatch was due when all was over


def test_a_rank_alone_trains_from_its_first_step_to_its_last() -> None:
    """By the loop as it is run, not in lockstep."""
    (rank,) = make_ranks(1, make_config(total_steps=100))
    records: list[dict] = []
    assert rank.worker.run(rank.envs.reset(ENV_SEEDS[:1]), records.extend, lambda: None) is Stop.BUDGET
    assert records[-1]["local_steps"] == records[-1]["global_steps"] == 100
    assert records[-1]["server_updates"] == records[-1]["updates"] == 19
    assert not rank.sent


def test_who_is_behind_with_learning_plays_on_when_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a minibatch takes most of the while that is left to learning."""
    config = make_config(num_envs=3, update_period_steps=1)
    (rank,) = make_ranks(1, config)
    ticks = itertools.count(step=0.6)
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    play_steps([rank], 60)
    steps, updates = rank.node.budget.global_steps, rank.worker.counters.updates
    assert 20 < updates < 60
    assert steps - config.gorila.min_replay_steps - updates <= 3


def test_losses_that_are_never_finite_end_training_with_a_sentence() -> None:
    (rank,) = make_ranks(1, make_config(update_period_steps=1))
    next_batch = rank.exchange.next_batch

    def poisoned(timeout_s: float) -> Any:
        batch = next_batch(timeout_s)
        return batch and batch._replace(rewards=batch.rewards * np.nan)

    rank.exchange.next_batch = poisoned  # type: ignore[method-assign]
    with pytest.raises(PalaError, match=r"\[rank 0\] update 100: no finite loss and gradient for 100 updates\. Resume"):
        play_steps([rank], 1000)


def test_parameters_of_a_shard_that_are_not_finite_end_training_with_a_sentence() -> None:
    """A learner of another rank would else wait for better ones, which never come."""
    cluster = make_ranks(4, make_config(update_period_steps=1, **GLOBAL))
    lockstep = play(cluster)
    for _ in range(40):
        next(lockstep)
    cluster[SHARD].shard.parameters.fill_(np.nan)
    cluster[LEARNER].exchange.wait = lambda timeout_s: pytest.fail("it waits")
    with pytest.raises(PalaError, match=r"\[rank 2\] update \d+: no finite loss and gradient for 100 updates\. Resume"):
        for _ in range(400):
            next(lockstep)


def test_after_the_end_nobody_is_answered_and_gradients_are_still_applied() -> None:
    cluster, messages = every_kind()
    cluster[0].exchange.stop_now(Stop.SIGNAL)
    assert all(rank.exchange.stop is Stop.SIGNAL for rank in cluster)
    before, version = [rank.sent.copy() for rank in cluster], cluster[0].shard.version
    for sender, receiver, data in messages.values():
        cluster[receiver].hear(sender, data)
    assert [rank.sent for rank in cluster] == before
    assert cluster[0].shard.version == version + 2
    assert cluster[2].node.next_batch() is not None  # what has come may still be learned from
    assert not any(rank.node.counts["messages_refused"] for rank in cluster)


# ---- strange messages ------------------------------------------------------------------------------------------------

SHARD, REPLAY, LEARNER, ACTOR = range(4)


def every_kind() -> tuple[list[Rank], dict[Kind, tuple[int, int, bytes]]]:
    """Ranks that have learned a little, and of each kind (sender, receiver, bytes) of a message that went."""
    cluster = make_ranks(4, make_config(parameters_period_updates=2, **GLOBAL))
    play_steps(cluster, 70)
    messages = {kind: (rank.rank, *rank.last[kind]) for rank in cluster for kind in rank.last}
    assert messages.keys() == {*Kind} - {*ABOUT_MEMBERS}
    return cluster, messages


def from_rank(rank: Rank, data: bytes, **changes: Any) -> bytes:
    """The same message with another header."""
    changed = np.frombuffer(bytearray(data), np.uint8)
    rank.wire.encode(rank.wire.decode(changed)._replace(**changes), changed)
    return changed.tobytes()


def trace(rank: Rank) -> tuple:
    """What a message may change, but for the news of steps."""
    node, shard, store = rank.node, rank.shard, rank.store
    served = shard and (shard.version, shard.stale, shard.not_finite, shard.parameters.tolist(), shard.target.tolist())
    held = store and (len(store), store.steps, list(store.waiting), store.owed)
    return (
        served,
        held,
        len(node.batches),
        sorted(node.parameters.arrived),
        sorted(node.target.arrived),
        rank.sent.copy(),
    )


def test_a_damaged_message_is_refused_counted_and_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, messages = every_kind()
    for sender, receiver, data in messages.values():
        rank = cluster[receiver]
        before = trace(rank)
        for damaged in (data[:-1], b"X" + data[1:]):
            rank.hear(sender, damaged)
        assert trace(rank) == before
    assert sum(rank.exchange.metrics()["messages_refused"] for rank in cluster) == 2 * len(messages)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len({way[:2] for way in messages.values()})
    assert all("refused a message" in line and line.endswith("Later ones are only counted.") for line in lines)


def numbered(rank: Rank, data: bytes, first: int, last: int) -> list[bytes]:
    """The same step as an actor's first to its last."""
    return [from_rank(rank, data, round=number) for number in range(first, last + 1)]


def test_what_was_played_around_a_step_that_was_not_sent_is_not_joined() -> None:
    _, messages = every_kind()
    replay = make_ranks(4, make_config(**GLOBAL))[REPLAY]
    first, _, *rest = numbered(replay, messages[Kind.EXPERIENCE][2], 2, 5)
    lengths = []
    for data in (messages[Kind.RESET][2], first, *rest):
        replay.hear(ACTOR, data)
        lengths.append(len(replay.store))
    assert lengths == [0, 1, 1, 2] and replay.node.counts["messages_refused"] == 0


# ---- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "num_ranks", "dead", "loss"),
    [
        ({}, 3, [1, 2], ""),
        ({"replay": "global"}, 3, [1, 2], ""),
        ({}, 3, [0], "served shard 0 of the parameters"),
        ({"num_shards": 2}, 3, [2, 1], "served shard 1 of the parameters"),
        (LOCAL, 5, [1, 4], ""),
        (LOCAL, 5, [0], "served shard 0 of the parameters"),
        (LOCAL, 5, [1, 2], "was the last learner"),
        (LOCAL, 5, [4, 3], "was the last actor"),
        (MANY, 8, [5, 6], ""),
        (MANY, 8, [1], "served shard 1 of the parameters"),
        (MANY, 8, [3], "held the replay of other ranks"),
        (MANY, 8, [4, 5], "was the last learner"),
        (MANY, 8, [7, 6], "was the last actor"),
    ],
)  # fmt: skip
def test_only_the_loss_of_what_nobody_else_has_ends_training(
    roles: dict[str, Any], num_ranks: int, dead: list[int], loss: str
) -> None:
    """The last in `dead` decides."""
    for rank in make_ranks(num_ranks, make_config(**roles)):
        if rank.rank in dead:
            continue
        for peer in dead:
            assert rank.node.members.fault == ""
            rank.exchange.on_death(peer)
        if not loss:
            assert rank.exchange.stop is Stop.NONE
            continue
        with pytest.raises(EndError, match=f"^Rank {dead[-1]} has died, which {loss}; .* by `--resume`.$"):
            _ = rank.exchange.stop
        with pytest.raises(EndError):  # the checkpoints of all are of before
            rank.exchange.state()


def test_who_lives_goes_on_learning_from_what_the_dead_played() -> None:
    cluster = make_ranks(8, make_config(**MANY))
    lockstep = play(cluster)
    for _ in range(40):
        next(lockstep)
    lost: list[int] = []
    for dead in (4, 6):
        cluster[dead].worker._advance = lambda: None
        cluster[dead].hear = lambda source, data: lost.append(source)
        for rank in cluster:
            rank.node.members.peer_died(dead)
    updates, held = cluster[5].worker.counters.updates, len(cluster[2].store)
    learned_before = cluster[2].sent[Kind.BATCH]
    for _ in range(40):
        next(lockstep)
    assert len(cluster[2].store) == held  # it was filled by the dead actor
    assert cluster[2].sent[Kind.BATCH] <= learned_before + 1
    assert cluster[5].worker.counters.updates > updates + 5
    assert not lost
    assert all(rank.exchange.stop is Stop.NONE for rank in cluster)
