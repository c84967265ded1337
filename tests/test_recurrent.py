"""Policies with a memory: passes through time, states at the ends of episodes and rollouts, acting, networks of one's
own, and a task that needs one."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import pala
from pala.config import A2CConfig, Config, EnvConfig, EvaluationConfig, NetworkConfig, RunConfig
from pala.config.checks import check
from pala.envs.vector import Episode, Step
from pala.gorila.networks import q_network
from pala.networks.distributions import Categorical
from pala.networks.make import actor_critic, make_tape
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.recurrent import UNITS
from pala.networks.tape import AutogradTape
from pala.system.errors import PalaError
from pala.testing.faults import fail_at
from support import REPOSITORY, memory_jobs
from support.learning import BATCH, ENVS, Run, configured

torch.set_num_threads(1)
STEPS, ROWS = 4, 3
FLOAT32 = NetworkConfig(precision="float32")
VECTOR, IMAGE = Box(-1, 1, (3,)), Box(0, 255, (2, 36, 36), np.uint8)
MAZE = runpy.run_path(str(REPOSITORY / "examples/t_maze.py"))["TMaze"]


class TMaze(MAZE):
    corridor_steps = 3


# ---- passes through time ---------------------------------------------------------------------------------------------


def network_of(kind: str, space: Box) -> tuple[ActorCritic, NetworkConfig]:
    torch.manual_seed(0)
    config = NetworkConfig((4, 4, 4), 8, (8,), background=0.0, memory=kind, precision="float32")
    network = ActorCritic(space, Discrete(2), config)
    nn.init.normal_(network.policy_head.weight)
    return network, config


def seen(space: Box, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    observations = draw.uniform(space.low.min(), space.high.max(), (STEPS, ROWS, *space.shape))
    return torch.from_numpy(observations.astype(space.dtype))


def slowly(network: ActorCritic, kind: str, observations: list[torch.Tensor]) -> torch.Tensor:
    """The outputs [1, 3] after one environment's observations, by the cells' equations; the gates in torch's order."""
    trunks = [network.trunk] if network.is_image else [network.trunk, network.value_trunk]
    remembered = []
    for trunk, memory in zip(trunks, network.memories, strict=True):
        h, c = torch.zeros(1, UNITS), torch.zeros(1, UNITS)
        cell = memory.cell
        for observation in observations:
            x = trunk(network._inputs(observation[None]))
            of_x, of_h = (w @ v.T + b[:, None] for w, v, b in (
                (cell.weight_ih, x, cell.bias_ih), (cell.weight_hh, h, cell.bias_hh)))  # fmt: skip
            if kind == "lstm":
                i, f, g, o = (of_x + of_h).T.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                (r, z, n), (r_h, z_h, n_h) = of_x.T.chunk(3, -1), of_h.T.chunk(3, -1)
                r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
                h = (1 - z) * (n + r * n_h).tanh() + z * h
        remembered.append(h)
    return torch.cat([network.policy_head(remembered[0]), network.value_head(remembered[-1])], -1)


@pytest.mark.parametrize("space", [VECTOR, IMAGE], ids=["vector", "image"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.slow
def test_passes_and_gradient_are_those_of_the_slow_equations(kind: str, space: Box) -> None:
    """Environment 1 begins an episode after the second step; the gradient goes back through all steps of an episode."""
    network, config = network_of(kind, space)
    flat = FlatParameters(network, torch.device("cpu"))
    observations = seen(space)
    tape = make_tape(network, config, STEPS, observations[0])
    assert tape.remembers
    tape.begin()
    passes = []
    for t, each in enumerate(observations):
        passes.append(torch.cat(tape.forward(each), -1))
        if t == 1:
            tape.forget(torch.tensor([False, True, False]))
    begins = [0, 2, 0]
    expected = torch.stack([
        torch.cat([slowly(network, kind, [*observations[(begins[b] if t > 1 else 0) : t + 1, b]]) for b in range(ROWS)])
        for t in range(STEPS)
    ])  # fmt: skip
    torch.testing.assert_close(torch.stack(passes), expected.detach())
    weights = torch.randn(STEPS, ROWS, 3)
    tape.backward([weights[..., :2], weights[..., 2:]])
    found = flat.gradient.clone()
    flat.gradient.zero_()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, flat.gradient, rtol=1e-4, atol=1e-5)
    assert (found != 0).float().mean() > 0.5


@pytest.mark.slow
def test_a_rollout_begins_where_the_last_ended_and_its_gradient_stays_inside() -> None:
    """The first state is kept over an update, in which the parameters change, and no gradient goes through it."""
    network, config = network_of("lstm", VECTOR)
    flat = FlatParameters(network, torch.device("cpu"))
    observations, ones = seen(VECTOR), torch.ones(STEPS, ROWS, 3)
    tape = make_tape(network, config, STEPS, observations[0])
    for each in observations:
        tape.forward(each)
    tape.backward([ones[..., :2], ones[..., 2:]])
    state = tape._states.detach().clone()
    flat.data.mul_(0.9)
    tape.begin()
    flat.gradient.zero_()
    found = torch.cat(tape.forward(observations[0]), -1)
    tape.backward([ones[:1, :, :2], ones[:1, :, 2:]])
    gradient = flat.gradient.clone()
    flat.gradient.zero_()
    outputs = torch.cat(network.advance(observations[0], state)[0], -1)
    torch.testing.assert_close(found, outputs.detach())
    outputs.sum().backward()
    torch.testing.assert_close(gradient, flat.gradient)


def test_states_of_a_ruined_network_do_not_outlast_its_healing() -> None:
    network, config = network_of("gru", VECTOR)
    flat = FlatParameters(network, torch.device("cpu"))
    healthy = flat.data.clone()
    observations = seen(VECTOR)
    tape = make_tape(network, config, STEPS, observations[0])
    flat.data.fill_(math.nan)
    assert tape.forward(observations[0])[0].isnan().all()
    flat.data.copy_(healthy)
    assert tape.forward(observations[0])[0].isnan().all()
    tape.begin()
    assert tape.forward(observations[0])[0].isfinite().all()


def test_bfloat16_keeps_memory_and_heads_in_float32() -> None:
    network, config = network_of("lstm", IMAGE)
    observations = seen(IMAGE)
    tape = make_tape(network, replace(config, precision="bfloat16"), STEPS, observations[0])
    outputs = tape.forward(observations[0])
    assert {*(output.dtype for output in outputs), tape._states.dtype} == {torch.float32}
    expected = network.outputs(observations[0])[0].detach()
    assert 0 < float((outputs[0] - expected).norm() / expected.norm()) < 0.05


# ---- the learner -----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Remembers how many steps its episode has had, n: V = 10 n. Sees nothing."""

    distribution = Categorical(2)
    state_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([10.0]))

    def advance(self, observations: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = torch.zeros(len(observations), 1) if state is None else state
        return [self.scale * torch.zeros(len(observations), 2), self.scale * state], state + 1


def test_memory_ends_with_an_episode_and_lasts_over_updates() -> None:
    """Episodes of 3 steps in rollouts of 5. The truncated step is bootstrapped by the memory of the episode that ends:
    1 + gamma V(step 3)."""
    run = Run(configured(3 * BATCH, gamma=0.9, learning_rate=0.0), network=Counting())
    run.go()
    values = [[round(v[b].item()) for rollout, *_ in run.updates for v in rollout.values] for b in range(ENVS)]
    rewards = [[r[b].item() for rollout, *_ in run.updates for r in rollout.rewards] for b in range(ENVS)]
    assert values == [[0, 10, 20] * 5] * ENVS
    assert rewards[0] == pytest.approx([1, 1, 1 + 0.9 * 30] * 5) == rewards[1]
    assert [bootstrap.tolist() for _, bootstrap, *_ in run.updates] == [[20, 20], [10, 10], [0, 0]]


def test_new_games_begin_without_memory() -> None:
    run = Run(configured(BATCH), network=Counting())
    run.go()
    run.learner.begin(run.envs.reset(np.arange(ENVS, dtype=np.int32)))
    assert run.a2c.tape.peek(torch.zeros(ENVS, 2))[1].tolist() == [[0.0]] * ENVS


def test_a_lost_life_ends_no_memory() -> None:
    nothing = np.zeros(3)
    step = Step(nothing, nothing, np.ones(3, bool), nothing, nothing, [Episode(1.0, 5, 1)], nothing > 0)
    assert step.began.tolist() == [False, True, False]
    assert step._replace(failed=np.array([True, False, False])).began.tolist() == [True, True, False]


# ---- networks of one's own -------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A recurrent network as the documentation shows it."""

    def __init__(self, space: gymnasium.Space, num_outputs: tuple[int, ...], width: int = 8) -> None:
        super().__init__()
        self.state_size = width
        self.cell = nn.GRUCell(math.prod(space.shape), width)
        self.heads = nn.ModuleList(nn.Linear(width, outputs) for outputs in num_outputs)

    def trunk(self, observations: torch.Tensor, state: torch.Tensor) -> Any:
        state = self.cell(observations.flatten(1), state)
        return state, state


def made(make: Callable[..., nn.Module], space: Box = VECTOR) -> Any:
    torch.manual_seed(0)
    return actor_critic(space, Discrete(2), Config(), make)


@pytest.mark.parametrize("space", [VECTOR, IMAGE], ids=["vector", "image"])
def test_ones_own_memory_is_carried_on(space: Box) -> None:
    network = made(Own, space)
    observations = seen(space)
    tape = make_tape(network, FLOAT32, STEPS, observations[0])
    assert tape.remembers
    first, second = (tape.forward(observations[0])[0] for _ in range(2))
    assert not first.allclose(second)
    state = network.own.trunk(network._inputs(observations[0]), torch.zeros(ROWS, 8))[1]
    torch.testing.assert_close(second, network.advance(observations[0], state)[0][0].detach())


class GivesNoState(Own):
    def trunk(self, observations: torch.Tensor, state: torch.Tensor) -> Any:
        return state


class GivesAnotherState(Own):
    def trunk(self, observations: torch.Tensor, state: torch.Tensor) -> Any:
        return state, state[:, 1:]


class Sizeless(Own):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state_size = "8"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (GivesNoState, r"with 'state_size' its trunk must give \(features, state\)"),
        (GivesAnotherState, r"gives a state of shape \(2, 7\), not \(2, 8\)"),
        (Sizeless, "'state_size' is '8', but must be a whole number"),
    ],
)
def test_a_memory_that_cannot_be_is_told(make: Callable[..., nn.Module], words: str) -> None:
    with pytest.raises(PalaError, match=words):
        made(make)


class Trunk(nn.Module):
    """A network of this trunk."""

    def __init__(self, trunk: nn.Module, width: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList([nn.Linear(width, 2), nn.Linear(width, 1)])


class First(nn.Module):
    """The first of what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)[0]


class Centred(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean(0)


class Noisy(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn_like(inputs)


@pytest.mark.parametrize(
    "trunk",
    [
        lambda: First(nn.LSTM(3, 8)),
        lambda: First(nn.GRU(3, 8)),
        lambda: nn.Sequential(nn.Linear(3, 8), Centred()),
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, track_running_stats=False)),
    ],
    ids=["LSTM", "GRU", "mean", "BatchNorm"],
)
@pytest.mark.slow
def test_a_trunk_that_mixes_the_rows_of_a_batch_is_refused(trunk: Callable[[], nn.Module]) -> None:
    """torch takes [B, features] for one sequence: each environment would remember what the one before it saw."""
    with pytest.raises(PalaError, match=r"depends on the others of its batch, so the environments would mix"):
        made(lambda *_: Trunk(trunk(), 8))


class Mixing(Own):
    """Mixes by the state alone."""

    def trunk(self, observations: torch.Tensor, state: torch.Tensor) -> Any:
        features, after = super().trunk(observations, state)
        return features, after.mean(0, keepdim=True).expand_as(after)


def test_a_state_that_mixes_rows_is_refused() -> None:
    with pytest.raises(PalaError, match="environments would mix"):
        made(Mixing)


@pytest.mark.parametrize(
    "trunk",
    [
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)),
        lambda: nn.Sequential(Noisy(), nn.Linear(3, 8), nn.LayerNorm(8)),
        lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), First(nn.LSTM(1, 8, batch_first=True)), nn.Flatten(1, 2),
                              nn.Linear(24, 8)),
    ],
    ids=["dropout", "noise", "LSTM over an observation"],
)  # fmt: skip
@pytest.mark.slow
def test_a_trunk_that_keeps_rows_apart_is_taken(trunk: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    network = made(lambda *_: Trunk(trunk(), 8))
    assert isinstance(make_tape(network, FLOAT32, 1, seen(VECTOR)[0]), AutogradTape)
    assert not torch.get_rng_state().equal(before)


# ---- Gorila ----------------------------------------------------------------------------------------------------------


def test_gorila_refuses_a_memory() -> None:
    config = Config(algorithm="gorila", network=NetworkConfig(memory="lstm"))
    with pytest.raises(PalaError, match=r"'network\.memory' is 'lstm', but 'algorithm' is 'gorila'"):
        check(config, "here")
    with pytest.raises(PalaError, match=r"Your own network has a memory \('state_size'\)"):
        q_network(VECTOR, Discrete(2), Config(algorithm="gorila"), Own)


# ---- a task that needs it --------------------------------------------------------------------------------------------


def config_of(folder: Path, memory: str, steps: int) -> Config:
    return Config(
        total_steps=steps, env=EnvConfig("TMaze"), network=NetworkConfig(mlp_hidden=(32,), memory=memory),
        a2c=A2CConfig(rollout_steps=20, learning_rate=2e-3), evaluation=EvaluationConfig(episodes=200),
        run=RunConfig(dir=str(folder), name=memory, console="none", threads=1, tensorboard=False),
    )  # fmt: skip


OF_ONE_RUN = pytest.mark.xdist_group("recurrent run")  # it is trained once for all of them


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained and resumed, in the maze of the example."""
    config = config_of(tmp_path_factory.mktemp("runs"), "lstm", 16_000)
    result = pala.fit(replace(config, evaluation=EvaluationConfig(episodes=0)), make_env=TMaze)
    result = pala.fit(replace(config, total_steps=20_000), resume=result.run)
    assert result.evaluation is not None and result.evaluation.mean_return > 0.8
    return result.run


@pytest.mark.slow
def test_without_a_memory_the_maze_is_a_coin(tmp_path: Path) -> None:
    """The bound: junctions look alike, so the mean return is 0, here of 200 episodes; deviation 0.07."""
    result = pala.fit(config_of(tmp_path, "none", 10_000), make_env=TMaze)
    assert abs(result.evaluation.mean_return) < 0.3


def played(policy: Any, act: Callable[[np.ndarray], Any], episodes: int = 20) -> float:
    env, total = TMaze(), 0.0
    for number in range(episodes):
        observation, _ = env.reset(seed=number)
        policy.reset()
        has_ended = False
        while not has_ended:
            observation, reward, has_ended, _, _ = env.step(act(observation))
            total += reward
    return total / episodes


@pytest.mark.slow
@OF_ONE_RUN
def test_a_loaded_policy_remembers_until_it_is_reset(run: Path) -> None:
    policy = pala.load_policy(run)
    assert played(policy, lambda observation: policy.act(observation, greedy=True)) > 0.8

    def act_alone(observation: np.ndarray) -> Any:
        policy.reset()
        return policy.act(observation, greedy=True)

    assert abs(played(policy, act_alone)) < 0.8  # 20 episodes by a coin


@pytest.mark.slow
@OF_ONE_RUN
def test_states_go_in_and_out(run: Path) -> None:
    policy = pala.load_policy(run)
    assert policy.state is None
    space = policy.observation_space
    space.seed(0)
    first, second = (np.stack([space.sample() for _ in range(4)]) for _ in range(2))
    policy.act(first)
    state = policy.state
    assert state.shape == (4, 4 * UNITS)

    def outputs() -> torch.Tensor:
        return policy.network.advance(torch.from_numpy(second), policy.state)[0][0]

    expected = outputs()
    policy.act(second)
    assert not policy.state.equal(state)
    policy.state = state
    assert outputs().equal(expected)
    policy.reset([False, True, False, False])
    alone = policy.network.outputs(torch.from_numpy(second))[0]
    torch.testing.assert_close(outputs(), torch.stack([expected[0], alone[1], *expected[2:]]))
    with pytest.raises(PalaError, match="remembers 4 environments, but there are 1 observations"):
        policy.act(second[0])
    policy.reset()
    policy.act(second[0])
    assert policy.state.shape == (1, 4 * UNITS)


@pytest.mark.slow
@OF_ONE_RUN
def test_an_export_takes_and_gives_the_state(run: Path, tmp_path: Path) -> None:
    policy = pala.load_policy(run)
    policy.export(tmp_path / "policy.pt2", action_masks=True)
    program = torch.export.load(tmp_path / "policy.pt2").module()
    observations, state = seen(VECTOR)[0], torch.zeros(ROWS, 4 * UNITS)
    masks = torch.tensor([[True, False]] * ROWS)
    for _ in range(2):
        expected, after = policy.network.advance(observations, state)
        logits, value, state = program(observations, state=state, action_masks=masks)
        torch.testing.assert_close(logits[:, 0], expected[0][:, 0])
        torch.testing.assert_close((value, state), (expected[1].squeeze(-1), after))
        assert (logits[:, 1] == -math.inf).all()


@pytest.mark.parametrize("kind", ["gossip", "allreduce"])
@pytest.mark.slow
def test_ranks_exchange_a_memory_as_all_else(tmp_path: Path, kind: str) -> None:
    config = memory_jobs.configure(tmp_path, kind, steps=400)
    job = memory_jobs.train(2, replace(config, network=replace(config.network, memory="gru")))
    assert job.ended_well()
    assert {name.split(".")[0] for name in job.policy} >= {"memories"}
    assert job.resume(2, 600).ended_well()


@pytest.mark.slow
def test_a_spare_takes_a_place_with_a_memory_that_begins(tmp_path: Path) -> None:
    config = memory_jobs.with_spares(tmp_path, spares=1, steps=1000)
    config = replace(config, network=replace(config.network, memory="lstm"))
    job = memory_jobs.train(3, config, [fail_at(0, update=5)], on_count=memory_jobs.slow_until_joined(2))
    assert job.ended_well(but_for=[0]) and memory_jobs.ranks_in(job, "joined_ranks") == [2]
