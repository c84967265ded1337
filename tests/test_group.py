"""Groups of ranks: who is in which, one model in each, and what becomes of a group whose ranks die, leave or resume."""

from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGUSR1
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.a2c.learner import Learner
from pala.a2c.update import A2C, Rollout
from pala.comm.mapped_file import MappedFile, _Made, share
from pala.config import A2CConfig, Config, ExchangeConfig, GorilaConfig, NetworkConfig, RunConfig
from pala.config.checks import check
from pala.exchange.base import Setup
from pala.exchange.budget import ExchangeState, StepBudget, Stop
from pala.exchange.group_memory import GroupMemory
from pala.exchange.grouped import GroupedGossip
from pala.exchange.groups import check_groups, described, groups_of, members_of
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.tape import AutogradTape
from pala.system.errors import EndError, PalaError
from pala.testing.faults import fail_at, fail_at_message
from pala.testing.memory import Killed, MemoryCommunicator, run_ranks
from support.helpers import slow_but_for
from support.memory_jobs import ENDLESS, Trained, configure, leave_at, parameters, stop_when, stopped_well, train

pytestmark = pytest.mark.often(
    "test_the_ranks_of_a_group_hold_one_model",
    "test_a_signal_and_a_callback_end_all_groups",
    "test_two_ranks_of_a_group_have_the_gradient_of_one_with_twice_the_environments",
    "test_a_group_lies_on_one_host",
    "test_a_group_that_would_span_hosts_is_refused",
    "test_groups_are_refused_where_there_can_be_none",
    "test_the_lowest_that_lives_leads",
    "test_ranks_share_a_file_that_has_no_name",
)


def slowly(cases: list[Any]) -> list[Any]:
    """The same cases, left out by -m "not slow"."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in each]


# ---- who is in which group -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "size", "groups"),
    [
        ("aaaa", 1, [0, 1, 2, 3]),
        ("aaaa", 2, [0, 0, 1, 1]),
        ("aaaaa", 2, [0, 0, 1, 1, 2]),
        ("aaabbb", 2, [0, 0, 1, 2, 2, 3]),
        ("ababab", 2, [0, 1, 0, 1, 2, 3]),
        ("aaabb", "host", [0, 0, 0, 1, 1]),
        ("aa", 4, [0, 0]),
    ],
)
def test_a_group_lies_on_one_host(hosts: str, size: Any, groups: list[int]) -> None:
    assert groups_of(hosts, size) == groups
    check_groups(hosts, size)
    for members in members_of(groups):
        assert len({hosts[rank] for rank in members}) == 1 and members == sorted(members)


def test_a_group_that_would_span_hosts_is_refused() -> None:
    with pytest.raises(PalaError) as refused:
        check_groups("aaabb", 4)
    assert str(refused.value) == (
        "'exchange.group' is 4, but a group lies on one host, and none has as many ranks: ranks 0 to 2 on a; ranks 3 "
        "to 4 on b. Set it to 3, or to 'host'."
    )
    assert described([0, 1, 0, 2]) == "3 groups, each with one model: ranks 0, 2; rank 1; rank 3"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(exchange=ExchangeConfig("allreduce", group=2)), "'exchange.group' is 2, but 'exchange.kind' is 'allr"),
        (Config(exchange=ExchangeConfig("shared_memory", group="host")), "'exchange.group' is 'host', but 'exchange."),
        (Config(exchange=ExchangeConfig("none", group=2)), "'exchange.group' is 2, but 'exchange.kind' is 'none'"),
        (Config("gorila", exchange=ExchangeConfig(group=2), gorila=GorilaConfig()), "whose ranks form no groups"),
        (Config(exchange=ExchangeConfig(group=2), run=RunConfig(spares=1)), "a spare cannot join a group"),
        (Config(exchange=ExchangeConfig(group=0)), "'exchange.group' is 0 but must lie between 1 and"),
    ],
)
def test_groups_are_refused_where_there_can_be_none(config: Config, words: str) -> None:
    with pytest.raises(PalaError, match=words):
        check(config, "it")


def test_the_lowest_that_lives_leads() -> None:
    budget = StepBudget(3, 6, 100, groups=[0, 0, 0, 1, 1, 1])
    assert budget.leaders == [0, 3]
    budget.peer_died(0)
    assert budget.leaders == [1, 3]
    budget.rank_left(3)
    budget.peer_died(2)
    assert budget.leaders == [1, 4]
    budget.peer_died(1)
    assert budget.leaders == [4]


# ---- the memory of a group -------------------------------------------------------------------------------------------


def open_blocks() -> list[str]:
    """Shared blocks whose descriptors this process has open; what is mapped alone goes with its last rank."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has been closed since
            names.append(str(link.readlink()))
    return [name for name in names if "memfd:pala" in name]


def test_ranks_share_a_file_that_has_no_name() -> None:
    def main(comm: MemoryCommunicator) -> list[int]:
        block = share(comm, 4096, [0, 2] if comm.rank in (0, 2) else [1])
        block.data[comm.rank] = comm.rank + 1
        block.fence()
        comm.barrier()
        return block.data[:3].tolist()

    assert run_ranks(3, main) == [[1, 0, 3], [0, 2, 0], [1, 0, 3]]
    assert open_blocks() == []


def test_a_rank_that_dies_as_memory_is_shared_leaves_none() -> None:
    def main(comm: MemoryCommunicator) -> None:
        if comm.rank == 1:
            raise Killed
        share(comm, 2**20, [0, 1])

    error = run_ranks(2, main)[0]
    assert isinstance(error, EndError) and open_blocks() == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "1 MiB of memory cannot be shared with ranks of this host: No space left on device."),
        (errno.ENOENT, "they are in containers apart"),
        (errno.EACCES, "they are in containers apart"),  # with users of their own
        (errno.EMFILE, "1 MiB of memory cannot be shared with ranks of this host: Too many open files."),
    ],
)
def test_a_group_without_memory_in_common_ends_with_a_sentence(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is too little of it, one rank does not see the other's, as in containers apart, or something else."""

    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    place = "os.posix_fallocate" if number == errno.ENOSPC else "mmap.mmap"
    monkeypatch.setattr(f"pala.comm.mapped_file.{place}", fail)
    errors = run_ranks(2, lambda comm: share(comm, 2**20, [0, 1]))
    assert all(isinstance(error, PalaError) and words in str(error) for error in errors), errors
    assert open_blocks() == []


def test_a_file_of_another_process_with_the_same_number_is_not_taken() -> None:
    """As where ranks in containers apart number their processes alike."""
    file = os.memfd_create("other")
    try:
        with pytest.raises(FileNotFoundError, match="it is another file"):
            MappedFile(_Made(f"/proc/{os.getpid()}/fd/{file}", inode=os.fstat(file).st_ino + 1), 1)
    finally:
        os.close(file)


def test_a_gradient_that_is_not_finite_is_known_of_its_update() -> None:
    """A member may look when another has already arrived at the next update."""

    def main(comm: MemoryCommunicator) -> list[list[int]]:
        memory, seen = GroupMemory(comm, [0, 1], num_parameters=2), []
        for update, guilty in enumerate([[0], [], [1], [0, 1], []], start=1):
            memory.arrive(update, torch.zeros(2), comm.rank not in guilty, heard=0)
            comm.barrier()
            seen += [memory.not_finite(number, [0, 1]) for number in range(max(update - 1, 1), update + 1)]
            comm.barrier()
        return seen

    expected = [[0], [0], [], [], [1], [1], [0, 1], [0, 1], []]
    assert run_ranks(2, main) == [expected] * 2


# ---- one model in a group --------------------------------------------------------------------------------------------


class Watch:
    """The parameters of every rank after each of its updates, and the gradients that it brought to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: dict[int, dict[int, bytes]] = defaultdict(dict)  # rank -> update -> parameters
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}  # by rank and update
        average_gradient, after_update = GroupedGossip.average_gradient, GroupedGossip.after_update

        def averaged(exchange: GroupedGossip, gradient: torch.Tensor) -> bool:
            self._gradients[exchange._comm.rank, exchange._update + 1] = gradient.clone()
            goes_on = average_gradient(exchange, gradient)
            if goes_on:
                self._check_mean(exchange, gradient)
            return goes_on

        def updated(exchange: GroupedGossip, steps: int, healthy: bool) -> bool:
            finite = after_update(exchange, steps, healthy)
            assert exchange._update not in self.models[exchange._comm.rank]
            self.models[exchange._comm.rank][exchange._update] = exchange._parameters.numpy().tobytes()
            return finite

        monkeypatch.setattr(GroupedGossip, "average_gradient", averaged)
        monkeypatch.setattr(GroupedGossip, "after_update", updated)

    def _check_mean(self, exchange: GroupedGossip, mean: torch.Tensor) -> None:
        """Compare with a slow mean over those who are said to have brought something."""
        gradients = [self._gradients[rank, exchange._update] for rank in exchange._members]
        assert exchange._comm.rank in exchange._members
        assert torch.equal(mean, sum(gradients[1:], gradients[0]) / len(gradients)) or not bool(mean.isfinite().all())

    def are_one(self, *ranks: int) -> bool:
        """Whether ranks held the same model after each update that all of them made, and ended with the same one, if
        they made equally many."""
        models = [self.models[rank] for rank in ranks]
        updates = set(models[0]).intersection(*models[1:])
        assert len(updates) > 3
        return all(one[update] == models[0][update] for one in models for update in updates)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


SETTINGS: list[dict[str, Any]] = [
    {"mixing": "uniform"},
    {"mixing": "paired"},
    {"mixing": "push_sum", "topology": "exponential"},
    {"compression": "bfloat16", "mixing": "paired"},
    {"compression": "top_k"},
    {"mixing": "uniform", "max_staleness": 0},
    {"topology": "complete", "mixing": "uniform"},
]


@pytest.mark.parametrize("settings", SETTINGS[:2] + slowly(SETTINGS[2:]))
def test_the_ranks_of_a_group_hold_one_model(settings: dict[str, Any], watch: Watch, tmp_path: Path) -> None:
    job = train(4, configure(tmp_path, steps=1200, group=2, **settings))
    assert job.ended_well() and job.met(1200)
    assert watch.are_one(0, 1) and watch.are_one(2, 3) and not watch.are_one(0, 2)
    # All members end after the same update.
    assert watch.models[0].keys() == watch.models[1].keys() and watch.models[2].keys() == watch.models[3].keys()
    leaders = [job.total("mixes", rank) for rank in (0, 2)]
    assert all(leaders) and job.total("mixes") == sum(leaders) and job.total("models_refused") == 0
    assert sum(state.counters["local_steps"] for state in job.states()) == job.segment["global_steps"]


def test_a_group_of_all_ranks_is_synchronous_a2c(watch: Watch, tmp_path: Path) -> None:
    settings = {"learning_rate": "auto", "learning_rate_decay": "linear"}
    jobs = []
    for name, exchange in (("group", ExchangeConfig(group="host")), ("allreduce", ExchangeConfig("allreduce"))):
        config = configure(tmp_path / name, steps=600)
        jobs.append(train(3, replace(config, exchange=exchange, a2c=replace(config.a2c, **settings))))
    assert all(job.ended_well() for job in jobs) and watch.are_one(0, 1, 2)
    group, allreduce = (parameters(job.states()) for job in jobs)
    torch.testing.assert_close(group, allreduce)


def test_what_changes_a_step_is_the_same_in_a_group(watch: Watch, tmp_path: Path) -> None:
    """The rate by the steps left and by the number of models, quasi-global momentum and running moments."""
    config = configure(tmp_path, steps=1500, group=2, mixing="paired")
    a2c = replace(config.a2c, learning_rate="auto", learning_rate_decay="linear", momentum=0.5)
    env = replace(config.env, normalize_observations=True, normalize_rewards=True)
    job = train(5, replace(config, a2c=a2c, env=env), [fail_at(4, update=10)])
    assert job.ended_well(but_for=[4])
    assert watch.are_one(0, 1) and watch.are_one(2, 3)


STEPS, ENVS = 3, 4
SPACES = Box(-1, 1, (3,)), Discrete(3)


def gradient_of(columns: slice) -> torch.Tensor:
    """The gradient of a rollout by some of its environments."""
    torch.manual_seed(0)
    network = ActorCritic(*SPACES, NetworkConfig(mlp_hidden=(8,)))
    tape, flat = AutogradTape(network), FlatParameters(network, torch.device("cpu"))
    a2c, generator = A2C(network.distribution, tape, flat, A2CConfig()), torch.Generator().manual_seed(1)
    rollout = Rollout()
    tape.begin()
    for t in range(STEPS):
        observations, rewards = torch.randn(ENVS, 3, generator=generator), torch.randn(ENVS, generator=generator)
        actions = torch.randint(3, (ENVS,), generator=generator)
        output, value = tape.forward(observations[columns])
        rollout.policy_outputs.append(output)
        rollout.values.append(value.squeeze(-1))
        rollout.actions.append(actions[columns])
        rollout.rewards.append(rewards[columns])
        rollout.ended.append((torch.arange(ENVS) == t).float()[columns])
    a2c.differentiate(rollout, torch.randn(ENVS, generator=generator)[columns])
    return flat.gradient.clone()


def exchange_of(comm: MemoryCommunicator, parameters: torch.Tensor) -> GroupedGossip:
    """That of ranks in groups of two."""
    config = Config(total_steps=10**6, exchange=ExchangeConfig(group=2))
    return GroupedGossip(Setup(comm, parameters, config, ExchangeState([0] * comm.size)))


def test_two_ranks_of_a_group_have_the_gradient_of_one_with_twice_the_environments() -> None:
    halves = [gradient_of(slice(2)), gradient_of(slice(2, 4))]
    all_have_updated = threading.Barrier(4)

    def main(comm: MemoryCommunicator) -> torch.Tensor:
        gradient = halves[comm.rank % 2].clone() * (1 + comm.rank // 2)
        exchange = exchange_of(comm, torch.zeros_like(gradient))
        assert exchange.average_gradient(gradient) and not exchange.culprits
        assert exchange.after_update(10, healthy=True)
        all_have_updated.wait()
        exchange.stop_now(Stop.CALLBACK)
        assert exchange.close(60.0) is Stop.CALLBACK and exchange.global_steps == 40
        return gradient

    means = run_ranks(4, main)
    assert not [error for error in means if isinstance(error, BaseException)]
    whole = gradient_of(slice(4))
    for group in (0, 1):
        one, other = means[2 * group : 2 * group + 2]
        assert torch.equal(one, other) and torch.equal(one, (halves[0] + halves[1]) / 2 * (1 + group))
        torch.testing.assert_close(one, whole * (1 + group))


def test_a_gradient_that_is_not_finite_is_left_out_by_all_of_the_group(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    differentiate = Learner.differentiate

    def spoilt(learner: Learner) -> Any:
        loss = differentiate(learner)
        if learner._rank == 1 and learner.counters.updates == 5:
            learner._flat.gradient[3] = math.nan
        return loss

    monkeypatch.setattr(Learner, "differentiate", spoilt)
    job = train(4, configure(tmp_path, steps=1200, group=2))
    assert job.ended_well() and watch.are_one(0, 1) and watch.are_one(2, 3)
    assert [job.total("updates_skipped", rank) for rank in range(4)] == [1, 1, 0, 0]
    said = capsys.readouterr().err
    assert said.count("is not finite; the update is left out") == 1 and "[rank 1] update 6: the loss" in said


def test_a_group_whose_model_is_not_finite_takes_that_of_others(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    finish_update = Learner._finish_update

    def spoilt(learner: Learner, result: Any) -> None:
        if learner._rank in (2, 3) and learner.counters.updates == 6:
            learner._flat.data.fill_(math.nan)
            result = result._replace(applied=False)
        finish_update(learner, result)

    monkeypatch.setattr(Learner, "_finish_update", spoilt)
    job = train(4, configure(tmp_path, steps=2400, group=2, mixing="paired"))
    assert job.ended_well() and watch.are_one(0, 1) and watch.are_one(2, 3)
    assert bool(parameters(job.states()).isfinite().all())
    assert capsys.readouterr().err.count("they are replaced by what the peers sent") == 2


def test_the_waits_of_a_group_are_in_its_timeline() -> None:
    class Waits:
        def __init__(self) -> None:
            self.took_s = 0.0

        def span(self, name: str, begin_s: float, end_s: float) -> None:
            assert name == "wait"
            self.took_s += end_s - begin_s

    def main(comm: MemoryCommunicator) -> tuple[float, float]:
        exchange, waits = exchange_of(comm, torch.zeros(3)), Waits()
        exchange.trace = waits
        for update in range(2):
            time.sleep(0.05 * (comm.rank == update))  # each waits for the other
            assert exchange.average_gradient(torch.zeros(3)) and exchange.after_update(1, healthy=True)
        exchange.stop_now(Stop.CALLBACK)
        exchange.close(60.0)
        return waits.took_s, exchange.waited_s

    for in_timeline, waited in run_ranks(2, main):
        assert in_timeline == waited > 0.025


def test_a_leader_that_was_away_heals_with_its_group() -> None:
    """All members have to know: momentum begins again at all of them, or their models would part."""

    def main(comm: MemoryCommunicator) -> list[int]:
        exchange = exchange_of(comm, torch.zeros(3))
        heals = []
        for update in range(40):
            exchange._state.returning |= update == 5 and comm.rank == 0
            if not exchange.average_gradient(torch.zeros(3)):
                break
            time.sleep(0.001)
            exchange.after_update(1, healthy=True)
            heals.append(exchange.heals)
        exchange.stop_now(Stop.CALLBACK)
        exchange.close(60.0)
        return heals

    leader, member, *others = run_ranks(4, main)
    assert leader == member and 1 in leader and others[0] == others[1] and not any(others[0])


def test_a_rank_whose_model_is_not_that_of_its_group_ends(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_update = Learner._finish_update

    def damaged(learner: Learner, result: Any) -> None:
        if learner._rank == 1 and learner.counters.updates == 6:
            learner._flat.data.fill_(math.nan)
            result = result._replace(applied=False)
        finish_update(learner, result)

    monkeypatch.setattr(Learner, "_finish_update", damaged)
    job = train(4, configure(tmp_path, steps=1200, group=2))
    assert job.ended_well(but_for=[1]) and watch.are_one(2, 3)
    assert "no longer that of its group" in str(job.results[1])


# ---- ranks that die and leave ----------------------------------------------------------------------------------------


def lost(job: Trained) -> list[int]:
    return [entry["rank"] for entry in job.segment.get("lost_ranks", [])]


@pytest.mark.parametrize("mixing", slow_but_for(["uniform", "push_sum", "paired"], "paired"))
@pytest.mark.parametrize("dead", [[1], [0], *slowly([[0, 1], [0, 2], [0, 1, 2, 3]])])
def test_a_group_continues_without_its_dead(dead: list[int], mixing: str, watch: Watch, tmp_path: Path) -> None:
    """Groups of three: a member, a leader, a leader and the next, two leaders, a whole group and the other's leader."""
    faults = [fail_at(rank, update=10 + 3 * rank) for rank in dead]
    job = train(6, configure(tmp_path, steps=2400, group=3, mixing=mixing), faults)
    assert job.ended_well(but_for=dead) and all(isinstance(job.results[rank], Killed) for rank in dead)
    assert sorted(lost(job)) == dead
    for group in ([0, 1, 2], [3, 4, 5]):
        living = [rank for rank in group if rank not in dead]
        assert not living or watch.are_one(*living)
        assert len({len(watch.models[rank]) for rank in living}) <= 1
    assert job.met(2400)
    leaders = {min(living) for group in ([0, 1, 2], [3, 4, 5]) if (living := [r for r in group if r not in dead])}
    if len(leaders) > 1:
        assert all(job.total("mixes", rank) for rank in leaders)


@pytest.mark.parametrize("n", [1, 2, 4, *slowly([3, 5, 6, 7, 8, 12, 16, 20])])
def test_a_leader_may_die_in_the_middle_of_its_messages(n: int, watch: Watch, tmp_path: Path) -> None:
    job = train(4, configure(tmp_path, steps=1200, group=2, mixing="paired"), [fail_at_message(0, n)])
    assert job.ended_well(but_for=[0]) and watch.are_one(2, 3) and isinstance(job.results[0], Killed)


class Deadly:
    """Lets a rank die at its n-th announcement to its group: before it, or just after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, comms: dict[int, MemoryCommunicator]) -> None:
        self.rank, self.n, self.after, self._made = -1, 0, False, 0
        announce = GroupMemory._announce

        def announced(memory: GroupMemory, row: np.void, word: str, value: int) -> None:
            if memory._rank == self.rank:
                self._made += 1
            dies = memory._rank == self.rank and self._made == self.n
            if dies and not self.after:
                comms[self.rank].die()
            announce(memory, row, word, value)
            if dies:
                comms[self.rank].die()

        monkeypatch.setattr(GroupMemory, "_announce", announced)


@pytest.mark.parametrize("after", slow_but_for([False, True], False))
@pytest.mark.parametrize("rank", slow_but_for([0, 1, 2], 0))
def test_a_rank_may_die_at_any_moment_of_an_update(
    rank: int, after: bool, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All moments of the first three updates, of groups of three and one."""
    comms: dict[int, MemoryCommunicator] = {}
    init = MemoryCommunicator.__init__

    def remembered(comm: MemoryCommunicator, world: Any, number: int) -> None:
        init(comm, world, number)
        comms[number] = comm

    monkeypatch.setattr(MemoryCommunicator, "__init__", remembered)
    deadly, num_moments = Deadly(monkeypatch, comms), 12 if rank == 0 else 6
    for n in range(1, num_moments + 1):
        deadly.rank, deadly.n, deadly.after, deadly._made = rank, n, after, 0
        watch.models.clear()
        job = train(4, configure(tmp_path / str(n), steps=600, group=3))
        assert job.ended_well(but_for=[rank]) and isinstance(job.results[rank], Killed), n
        living = [other for other in (0, 1, 2) if other != rank]
        assert watch.are_one(*living) and lost(job) == [rank], n
        assert watch.models[living[0]].keys() == watch.models[living[1]].keys(), n


@pytest.mark.parametrize("leaving", [[0], *slowly([[1], [0, 1], [0, 1, 2]])])
def test_ranks_of_a_group_leave(leaving: list[int], watch: Watch, tmp_path: Path) -> None:
    job = train(6, configure(tmp_path, steps=2400, group=3), on_count=leave_at(*leaving, update=10))
    assert [job.results[rank].status for rank in range(6)] == [
        "left" if rank in leaving else "completed" for rank in range(6)
    ]
    living = [rank for rank in (0, 1, 2) if rank not in leaving]
    assert watch.are_one(3, 4, 5) and (not living or watch.are_one(*living))
    assert all(10 <= len(watch.models[rank]) <= 25 for rank in leaving)  # they ask, and may be 11 without a mix
    assert job.met(2400)


def test_a_signal_and_a_callback_end_all_groups(watch: Watch, tmp_path: Path) -> None:
    stopped = train(4, configure(tmp_path, steps=ENDLESS, group=2), on_count=stop_when(1, updates=12))
    assert stopped_well(stopped, but_for=[]) and watch.are_one(0, 1) and watch.are_one(2, 3)
    assert watch.models[0].keys() == watch.models[1].keys() and watch.models[2].keys() == watch.models[3].keys()
    assert stopped.results[1].signal == SIGUSR1


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_resumed_group_begins_with_its_newest_model(tmp_path: Path, watch: Watch) -> None:
    """Its ranks save at unlike times: here one has died, and the job was stopped later."""
    job = train(4, configure(tmp_path, steps=1200, group=2))
    assert job.ended_well()
    made = job.segment["global_steps"]
    watch.models.clear()
    resumed = job.resume(4, made + 1200)
    assert resumed.ended_well() and watch.are_one(0, 1) and watch.are_one(2, 3)
    assert resumed.met(made + 1200)
    first = resumed.states(first=True)
    assert torch.equal(*(parameters(first[:2]))) and not torch.equal(*(parameters(first[1:3])))


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), *slowly([(2, 4), (2, "host"), ("host", 2)])])
def test_a_run_continues_with_other_groups(
    before: Any, now: Any, tmp_path: Path, watch: Watch, capsys: pytest.CaptureFixture
) -> None:
    job = train(4, configure(tmp_path, steps=1200, group=before))
    assert job.ended_well()
    made = job.segment["global_steps"]
    watch.models.clear()
    other = replace(job.config, exchange=replace(job.config.exchange, group=now))
    resumed = train(4, replace(other, total_steps=made + 1200), resume=job.run)
    assert resumed.ended_well() and resumed.met(made + 1200)
    if now == 1:
        assert not watch.models and "brought together" not in capsys.readouterr().err
    else:
        assert "which are now brought together" in capsys.readouterr().err
        assert watch.are_one(0, 1) and watch.are_one(2, 3)


# ---- random schedules ------------------------------------------------------------------------------------------------


class Announcements:
    """Lets ranks die at their n-th announcement to their groups, and others be late with theirs, all from a seed."""

    def __init__(self, seed: int, ranks: int, num_dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(seed)
        self.group = draw.choice([2, 3, "host"])
        self.mixing = draw.choice(["uniform", "push_sum", "paired"])
        self.dies_at = {rank: draw.randrange(1, 60) for rank in draw.sample(range(ranks), num_dead)}
        self._made, self._late = [0] * ranks, [random.Random(draw.random()) for _ in range(ranks)]
        self._comms: dict[int, MemoryCommunicator] = {}
        announce = GroupMemory._announce

        def announced(memory: GroupMemory, row: np.void, word: str, value: int) -> None:
            rank = memory._rank
            self._made[rank] += 1
            if self._made[rank] >= self.dies_at.get(rank, math.inf) and rank in self._comms:
                self._comms[rank].die()
            if self._late[rank].random() < 0.05:
                time.sleep(self._late[rank].uniform(0, 0.01))
            announce(memory, row, word, value)

        monkeypatch.setattr(GroupMemory, "_announce", announced)

    def on_count(self, comm: MemoryCommunicator, updates: int) -> None:
        """Learn of a rank's communicator: none dies before its first update."""
        self._comms[comm.rank] = comm


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 40))])
def test_random_schedules(seed: int, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dies, and whenever: those that live end together with one model a group, and the budget met."""
    ranks, num_dead = 6, 1 + seed % 4
    plan = Announcements(seed, ranks, num_dead, monkeypatch)
    config = configure(tmp_path, steps=2000, group=plan.group, mixing=plan.mixing)
    job = train(ranks, config, on_count=plan.on_count)
    dead = sorted(rank for rank in range(ranks) if isinstance(job.results[rank], Killed))
    assert set(dead) <= plan.dies_at.keys() and job.ended_well(but_for=dead)
    assert job.met(2000)
    for members in members_of(groups_of(["a"] * ranks, plan.group)):
        living = [rank for rank in members if rank not in dead]
        assert not living or watch.are_one(*living)
        assert len({max(watch.models[rank]) for rank in living}) <= 1, "they end after the same update"
