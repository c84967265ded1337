"""The loop of one rank, on environments and networks whose every number is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import replace
from signal import SIGTERM
from typing import Any, cast
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from pala.comm.alone import Alone
from pala.config import Config, EnvConfig, ExchangeConfig, NetworkConfig, RunConfig
from pala.envs.vector import make_envs
from pala.exchange.budget import Stop
from pala.exchange.none import NoExchange
from pala.networks.distributions import Categorical
from pala.run import loop
from pala.run.agent import Counters, device_and_precision
from pala.run.metrics import SECTIONS
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt
from pala.system.seeding import derive
from support.learning import BATCH, ENVS, STEPS, Clock, Run, configured


class Teller(nn.Module):
    """V = 10 * steps of the episode, and every action is as good as another."""

    distribution = Categorical(2)
    state_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([10.0]))

    def advance(self, observations, state):
        return [self.scale * torch.zeros(len(observations), 2), self.scale * observations[:, :1]], None


def test_a_time_limit_is_bootstrapped_with_the_final_observation():
    """Episodes of 3 steps: the truncated step pays 1 + gamma * V(step 3), not V of the next episode's first."""
    run = Run(configured(BATCH, gamma=0.9), network=Teller())
    run.go()
    (rollout, bootstrap, *_), *_ = run.updates
    for b in range(ENVS):
        assert [float(r[b]) for r in rollout.rewards] == pytest.approx([1, 1, 1 + 0.9 * 30, 1, 1])
        assert [float(e[b]) for e in rollout.ended] == [0, 0, 1, 0, 0]
        assert [v[b].item() for v in rollout.values] == [0, 10, 20, 0, 10]
    assert bootstrap.tolist() == [20, 20]


def test_a_termination_is_not_bootstrapped():
    class Ending(Clock):
        def step(self, action):
            *step, _, _ = super().step(action)
            return (*step[:2], self.steps == self.limit, False, {})

    run = Run(configured(BATCH), Ending, Teller())
    run.go()
    rollout = run.updates[0][0]
    assert [float(r[0]) for r in rollout.rewards] == [1] * STEPS
    assert [float(e[0]) for e in rollout.ended] == [0, 0, 1, 0, 0]


def test_steps_updates_and_episodes_are_counted():
    run = Run(configured(total_steps=4 * BATCH + 1))
    assert run.go() is Stop.BUDGET
    assert (run.counters.updates, run.counters.local_steps, run.exchange.global_steps) == (5, 5 * BATCH, 5 * BATCH)
    after_updates = run.of_type("interval")
    assert [record["updates"] for record in after_updates] == [1, 2, 3, 4, 5]
    assert [record["local_steps"] for record in after_updates] == [BATCH * n for n in range(1, 6)]
    assert run.saves == 5
    episodes = run.of_type("episode")
    assert [record["local_steps"] for record in episodes] == [ENVS * 3 * (n // ENVS + 1) for n in range(len(episodes))]
    assert len(episodes) == ENVS * (5 * STEPS // 3)
    assert {(record["return"], record["length_steps"]) for record in episodes} == {(3.0, 3)}


def test_of_many_episodes_in_an_interval_an_even_sample_has_records(monkeypatch):
    monkeypatch.setattr("pala.run.loop._MOST_EPISODES", 2)
    run = Run(configured(total_steps=3 * BATCH))
    assert run.go() is Stop.BUDGET
    ended, last = [], 0
    for records in by_interval(run.records):
        ended.append(len(records) - 1 + records[-1]["episodes_left_out"])
        assert len(records) - 1 == min(2, ended[-1])
        last = max(last, *(record["local_steps"] for record in records))
    assert sum(ended) == ENVS * (3 * STEPS // 3) and last == 3 * BATCH


def by_interval(records):
    """The records of each interval, which the interval's own ends."""
    groups = [[]]
    for record in records:
        groups[-1].append(record)
        if record["type"] == "interval":
            groups.append([])
    return [group for group in groups if group]


def test_a_checkpoint_has_the_training_time_of_its_own_moment():
    """Not of the last record, which may be long ago."""
    config = configured(3 * BATCH)
    run = Run(dataclasses.replace(config, run=RunConfig(log_interval_s=1000, checkpoint_interval_s=0)))
    begin = time.perf_counter()
    run.go()
    assert len(run.saved_s) == 3 and sorted(set(run.saved_s)) == run.saved_s
    assert 0 < run.saved_s[-1] < time.perf_counter() - begin + 1


@pytest.mark.parametrize("what", ["log_interval_s", "checkpoint_interval_s"])
def test_what_takes_longer_than_its_interval_is_not_done_after_every_update(what):
    """A slow file system: else a rank would do nothing else."""
    now, done = [0.0], []

    def slow(*_: object) -> None:
        now[0] += 2000
        done.append(now[0])

    intervals = {"log_interval_s": 1e6, "checkpoint_interval_s": 1e6, what: 1000}
    run = Run(dataclasses.replace(configured(10 * BATCH), run=RunConfig(**intervals)))
    each = run.learner._advance

    def advance() -> None:
        now[0] += 400
        each()

    run.learner._advance = advance
    usual_clock = time.perf_counter
    with mock.patch.object(loop.time, "perf_counter", lambda: usual_clock() + now[0]):
        usual = (run.records.extend, slow) if what == "checkpoint_interval_s" else (slow, run.save)
        run.learner.run(run.envs.reset(derive(1, 0, "environments", ENVS)), *usual)
    assert len(done) == (3 if what == "checkpoint_interval_s" else 4)  # after updates 3, 6, 9; and at the end


def test_messages_are_moved_on_after_every_step():
    class Counting(NoExchange):
        polls = 0

        def between_steps(self) -> None:
            self.polls += 1

    run = Run(configured(3 * BATCH), exchange_class=Counting)
    run.go()
    assert run.exchange.polls == 3 * STEPS


@pytest.mark.parametrize(("kind", "steps"), [("gossip", 3), ("none", 3), ("allreduce", STEPS)])
def test_a_rollout_hears_that_training_has_ended(kind, steps):
    """But for synchronous ranks, which end together."""

    class Ending(NoExchange):
        living = range(1)
        polls = 0

        def between_steps(self) -> None:
            self.polls += 1
            if self.polls == 3:
                self.stop_now(Stop.SIGNAL)

    config = configured(9 * BATCH, learning_rate=1e-3)
    run = Run(dataclasses.replace(config, exchange=ExchangeConfig(kind)), exchange_class=Ending)
    assert run.go() is Stop.SIGNAL
    assert run.exchange.polls == steps and run.counters.updates == (1 if kind == "allreduce" else 0)


def test_a_resumed_rank_goes_on_counting():
    run = Run(configured(5 * BATCH), counters=Counters(updates=3, local_steps=3 * BATCH, time_s=1000.0))
    run.go()
    assert len(run.updates) == 2
    assert run.records[-1]["updates"] == 5
    assert run.records[-1]["local_steps"] == 5 * BATCH
    assert 1000 < run.records[-1]["time_s"] < 1060


def test_time_is_split_into_parts_that_sum_to_one():
    class Waiting(NoExchange):
        def after_update(self, steps, healthy):
            begin = time.perf_counter()
            time.sleep(0.05)
            self.waited_s += time.perf_counter() - begin
            return super().after_update(steps, healthy)

    run = Run(exchange_class=Waiting)
    run.go()
    *intervals, _ = run.of_type("interval")
    for record in intervals:
        fractions = {name: record[f"time_{name}"] for name in SECTIONS}
        assert sum(fractions.values()) == pytest.approx(1, abs=1e-3)  # each is rounded to four places
        assert all(0 <= fraction < 1 for fraction in fractions.values())
        assert fractions["wait"] > 0
    assert sum(record["time_wait"] - record["time_exchange"] for record in intervals) > 0
    assert all(sum(record[f"time_{name}"] for record in intervals) > 0 for name in SECTIONS)


def poisoned(bad_steps: range) -> type[Clock]:
    """A Clock whose pay is beyond what a loss can be in these of its steps."""

    class Poisoned(Clock):
        total = 0

        def pay(self) -> float:
            self.total += 1
            return 1e30 if self.total in bad_steps else 1.0

    return Poisoned


def test_an_update_that_is_not_finite_is_left_out_and_said(capsys):
    run = Run(make_env=poisoned(range(STEPS + 1, STEPS + 2)))
    start, snapshots = run.flat.data.clone(), []
    run.save = lambda: snapshots.append(run.flat.data.clone())
    run.go()
    assert capsys.readouterr().err.count("[rank 0] update 2: the loss or its gradient is not finite") == 1
    assert [record["updates_skipped"] for record in run.of_type("interval")] == [0, 1, 0, 0, 0]
    changed = [not a.equal(b) for a, b in zip([start, *snapshots], snapshots, strict=False)]
    assert changed == [True, False, True, True, True]
    assert run.flat.data.isfinite().all()


def test_many_updates_that_are_not_finite_do_not_fill_the_console(capsys):
    """It is said of the 1st, 2nd, 4th and 8th, not of each."""
    run = Run(configured(10 * BATCH), poisoned(range(STEPS + 1, 7 * STEPS + 1)))
    run.go()
    left_out = [record["updates_skipped"] for record in run.of_type("interval")]
    bad, said = [k + 1 for k, count in enumerate(left_out) if count], capsys.readouterr().err
    assert len(bad) >= 5
    assert [f"update {k}: the loss" in said for k in bad[:5]] == [True, True, False, True, False]
    assert "4 were so far" in said


def test_what_others_are_to_blame_for_does_not_hide_the_first_of_a_rank_s_own(capsys):
    class Blaming(NoExchange):
        def after_update(self, steps, healthy):
            self.culprits = (1,) if next(updates) <= 3 else ()
            return super().after_update(steps, healthy)

    updates = itertools.count(1)
    Run(configured(5 * BATCH), poisoned(range(10**6)), exchange_class=Blaming).go()
    said = capsys.readouterr().err
    assert [f"update {k}: the loss" in said for k in range(1, 6)] == [False, False, False, True, True]
    assert "2 were so far" in said


@pytest.mark.slow
def test_rewards_that_are_never_finite_end_the_run():
    with pytest.raises(PalaError, match=r"\[rank 0\] update 100: no finite gradient for 100 updates"):
        Run(configured(10**6), poisoned(range(10**6))).go()


def test_parameters_that_are_not_finite_without_a_peer_end_the_run():
    run = Run()
    run.flat.data[3] = math.nan
    with pytest.raises(PalaError, match=r"\[rank 0\] update 1: the parameters are not finite and there is no peer"):
        run.go()


def test_parameters_that_peers_replaced_start_with_a_fresh_optimiser(capsys):
    class Rescuing(NoExchange):
        def after_update(self, steps, healthy):
            super().after_update(steps, True)
            if not healthy:
                self._parameters.zero_()
            return True

    run = Run(configured(BATCH), exchange_class=Rescuing)
    run.flat.data[3] = math.nan
    run.a2c.mean_square.fill_(1.0)
    assert run.go() is Stop.BUDGET
    assert "[rank 0] update 1: the parameters were not finite either" in capsys.readouterr().err
    assert not run.a2c.mean_square.any()


@pytest.mark.slow
def test_a_rank_that_peers_have_to_replace_again_and_again_ends_the_run():
    class Rescuing(NoExchange):
        def after_update(self, steps, healthy):
            super().after_update(steps, True)
            self._parameters.fill_(math.nan)  # its next update finds it so, too
            return True

    run = Run(configured(10**6), exchange_class=Rescuing)
    run.flat.data[3] = math.nan
    with pytest.raises(PalaError, match=r"\[rank 0\] update 100: no finite gradient for 100 updates"):
        run.go()


@pytest.mark.parametrize(("decay", "expected"), [("linear", [8, 6, 4, 2]), ("none", [8, 8, 8, 8])])
def test_learning_rate_falls_to_zero_at_the_end_of_the_budget(decay, expected):
    run = Run(configured(4 * BATCH, learning_rate=8.0, learning_rate_decay=decay))
    run.go()
    assert [rate for *_, rate in run.updates] == pytest.approx(expected)
    assert run.records[-1]["learning_rate"] == (0 if decay == "linear" else 8)


def test_the_learning_rate_rises_in_the_first_updates_and_again_when_the_mean_squares_were_lost():
    class Breaking(NoExchange):
        updates = itertools.count(1)

        def after_update(self, steps, healthy):
            super().after_update(steps, True)
            self._parameters.fill_(math.nan if next(self.updates) == 5 else 0.0)
            return True

    run = Run(configured(9 * BATCH, learning_rate=8.0, learning_rate_warmup_updates=4), exchange_class=Breaking)
    run.go()
    assert [rate for *_, rate in run.updates] == pytest.approx([2, 4, 6, 8, 8, 8, 2, 4, 6])
    assert run.learner.counters.applied == 8  # all but the sixth
    assert run.a2c.num_squares == 3


def test_updates_that_are_left_out_do_not_use_up_the_warm_up():
    """The rate rises with the squared gradients in their mean, and these add none."""
    run = Run(configured(7 * BATCH, learning_rate=8.0, learning_rate_warmup_updates=4))
    differentiate, calls = run.a2c.differentiate, itertools.count(1)

    def spoilt(*arguments):
        loss = differentiate(*arguments)
        if next(calls) in (1, 2, 4):
            run.flat.gradient.fill_(math.nan)
        return loss

    run.a2c.differentiate = spoilt
    run.go()
    assert [rate for *_, rate in run.updates] == pytest.approx([2, 2, 2, 4, 4, 6, 8])


def test_a_resumed_rank_does_not_warm_up_again():
    config = configured(12 * BATCH, learning_rate=8.0, learning_rate_warmup_updates=4)
    run = Run(config, counters=Counters(10, 10 * BATCH))
    run.a2c.num_squares = 10
    run.go()
    assert [rate for *_, rate in run.updates] == [8, 8]


class NineRanks(NoExchange):
    living = range(9)


class NobodyStays(NoExchange):
    living = ()


def test_a_rank_that_leaves_as_all_do_has_the_rate_of_one():
    config = configured(4 * BATCH, learning_rate="auto")
    run = Run(dataclasses.replace(config, exchange=ExchangeConfig("gossip")), exchange_class=NobodyStays)
    run.go()
    assert [rate for *_, rate in run.updates] == [7e-4] * 4


@pytest.mark.parametrize(("kind", "expected"), [("allreduce", 7e-4), ("gossip", 1.4e-3), ("none", 7e-4)])
def test_the_learning_rate_is_by_itself_what_the_exchange_needs(kind, expected):
    config = configured(4 * BATCH, learning_rate="auto")
    run = Run(dataclasses.replace(config, exchange=ExchangeConfig(kind)), exchange_class=NineRanks)
    run.go()
    assert [rate for *_, rate in run.updates] == pytest.approx([expected] * 4)


def test_continuous_actions_reach_the_environment_inside_the_box():
    taken = []

    class Steered(Clock):
        action_space = gymnasium.spaces.Box(-0.5, 0.25, (2, 1))

        def step(self, action):
            taken.append(action)
            return super().step(action)

    run = Run(make_env=Steered)
    before = run.flat.data.clone()
    assert run.go() is Stop.BUDGET
    assert all(Steered.action_space.contains(action) for action in taken)
    assert len(np.unique(taken)) > 10  # not the bounds alone
    assert not run.flat.data.equal(before)


def test_a_signal_ends_training_within_a_step():
    interrupt = Interrupt()

    class Signalling(Clock):
        def pay(self) -> float:
            interrupt.signal = SIGTERM
            return 1.0

    run = Run(make_env=Signalling, interrupt=interrupt)
    assert run.go() is Stop.SIGNAL
    assert run.updates == []
    assert run.records[-1]["local_steps"] == 0


def test_equal_seeds_give_equal_parameters_and_others_do_not():
    first, second, other = (Run(configured(20 * BATCH, seed=seed)) for seed in (1, 1, 2))
    for run in (first, second, other):
        run.go()
    assert first.flat.data.equal(second.flat.data)
    assert not first.flat.data.equal(other.flat.data)


class TwoRanks(Alone):
    """Rank 0 beside another whose device has instructions for bfloat16, or not; all else is alike there."""

    size = 2

    def __init__(self, other_has_them: bool) -> None:
        super().__init__("here")
        self.other_has_them = other_has_them

    def allgather(self, value: Any) -> list[Any]:
        return [value, self.other_has_them if isinstance(value, bool) else value]


@pytest.mark.parametrize(
    ("env_id", "wanted", "mine", "others", "chosen"),
    [
        ("ALE/Pong-v5", "auto", True, True, "bfloat16"),
        ("ALE/Pong-v5", "auto", True, False, "float32"),
        ("ALE/Pong-v5", "auto", False, True, "float32"),
        ("CartPole-v1", "auto", True, True, "float32"),
        ("ALE/Pong-v5", "float32", True, True, "float32"),
        ("ALE/Pong-v5", "bfloat16", True, False, "bfloat16"),
        ("ALE/Pong-v5", "bfloat16", True, True, "bfloat16"),
    ],
)
@pytest.mark.slow
def test_bfloat16_is_chosen_for_images_where_all_ranks_have_it(
    env_id: str, wanted: Any, mine: bool, others: bool, chosen: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("pala.run.agent.has_bfloat16", lambda device: mine)
    config = Config(env=EnvConfig(id=env_id, num_envs=1), network=NetworkConfig(precision=wanted))
    with make_envs(config.env) as envs:
        _, settled = device_and_precision(TwoRanks(others), config, envs)
    assert settled == replace(config, network=NetworkConfig(precision=cast(Any, chosen)))
    assert ("would be faster" in capsys.readouterr().err) == (wanted == "bfloat16" and not others)
