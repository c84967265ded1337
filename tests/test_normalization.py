"""Running moments: against numpy over all data, over ranks, through every codec, and in whole trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.a2c.normalization import Normalization
from pala.a2c.update import A2C, Rollout
from pala.config import A2CConfig, Config, EnvConfig, ExchangeConfig, NetworkConfig, checked
from pala.evaluation.scoring import Acting, evaluate
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import make_codec
from pala.exchange.gossip.messages import Kind, gossip_sizes
from pala.exchange.gossip.models import ReceiveBuffer, SendBuffer
from pala.exchange.wire import Message, Wire
from pala.job.rank import run_rank
from pala.job.request import Request
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.tape import AutogradTape
from pala.run.hooks import UserCode
from pala.system.errors import PalaError
from support.memory_jobs import ENVS, Trained, configure, run_ranks
from support.run_folders import total

CPU = torch.device("cpu")
BOTH = EnvConfig(normalize_observations=True, normalize_rewards=True)


class Far(gymnasium.Env):
    """Observations far from 0: means 1,000 and -3, deviations 1 and 0.01; rewards of 50 or so."""

    observation_space, action_space = Box(-np.inf, np.inf, (2,), np.float64), Discrete(2)

    def _look(self) -> np.ndarray:
        return self.np_random.normal([1000, -3], [1, 0.01])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._look(), float(self.np_random.normal(50, 5)), False, self.steps == 10, {}


def make(env: EnvConfig = BOTH) -> tuple[ActorCritic, FlatParameters]:
    torch.manual_seed(0)
    network = ActorCritic(Box(-9, 9, (3,)), Discrete(2), NetworkConfig(mlp_hidden=(4,)), env)
    return network, FlatParameters(network, CPU)


def rollouts(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal([300, 0, -2], [1, 0.1, 20], (8, 3)) for _ in range(count)]


def teach(normalization: Normalization, *batches: np.ndarray) -> None:
    for batch in batches:
        normalization.observe(torch.from_numpy(batch))


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_moments_are_those_of_all_that_was_seen() -> None:
    network, flat = make(replace(BOTH, normalize_rewards=False))
    normalization, batches, moments = Normalization(flat, 0.99), rollouts(40), network.observation_moments
    for first, second in zip(batches[::2], batches[1::2], strict=True):  # two steps a rollout
        teach(normalization, first, second)
        normalization.gather()
        normalization.learn(healthy=True)
    everything = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(moments.variance, everything.var(0), rtol=1e-3)
    assert float(moments.count) == len(everything)
    x = everything[:5]
    expected = ((x - everything.mean(0)) / everything.std(0)).clip(-10, 10)
    np.testing.assert_allclose(network._inputs(torch.from_numpy(x)), expected, atol=2e-3)
    assert network._inputs(torch.tensor([[1e6, 0, 0]]))[0, 0] == 10
    assert not flat.gradient.any()


def test_ranks_whose_gradients_are_averaged_know_what_all_have_seen() -> None:
    """As one rank that has seen both ranks' batches."""
    (one, flat_1), (other, flat_2) = make(), make()
    ranks = [(Normalization(flat, 0.9), flat) for flat in (flat_1, flat_2)]
    mine, theirs = rollouts(30, 1), [batch + np.array([0.5, 0, 1]) for batch in rollouts(30, 2)]
    for pair in zip(mine, theirs, strict=True):
        for (normalization, _), batch in zip(ranks, pair, strict=True):
            teach(normalization, batch)
            normalization.rewards(torch.ones(4), torch.zeros(4))
            normalization.gather()
        mean = (flat_1.gradient + flat_2.gradient) / 2
        for normalization, flat in ranks:
            flat.gradient.copy_(mean)
            normalization.learn(healthy=True)
    assert flat_1.data.equal(flat_2.data)
    everything = np.concatenate([*mine, *theirs])
    np.testing.assert_allclose(one.observation_moments.mean, everything.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(other.observation_moments.variance, everything.var(0), rtol=0.02)


def test_the_mean_of_two_ranks_moments_is_that_of_their_data() -> None:
    """What gossip does: of as many samples of one distribution each."""
    networks = [make() for _ in range(2)]
    for seed, (_, flat) in enumerate(networks):
        normalization = Normalization(flat, 0.9)
        for batch in rollouts(200, seed):
            teach(normalization, batch)
            normalization.rewards(torch.zeros(1), torch.zeros(1))
            normalization.gather()
            normalization.learn(healthy=True)
    networks[0][1].data.lerp_(networks[1][1].data, 0.5)
    moments, everything = networks[0][0].observation_moments, np.concatenate(rollouts(200, 0) + rollouts(200, 1))
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(moments.variance, everything.var(0), rtol=0.01)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    _, flat = make(replace(BOTH, normalize_observations=False))
    normalization, rng = Normalization(flat, 0.9), np.random.default_rng(0)
    rewards = rng.normal(3, 50, (60, 2)).astype(np.float32)
    ended = (rng.random((60, 2)) < 0.1).astype(np.float32)
    returns, total = [], np.zeros(2)
    for t in range(60):
        deviation = np.std(returns) if t else 1.0  # before the first update as it came
        seen = normalization.rewards(torch.from_numpy(rewards[t]), torch.from_numpy(ended[t]))
        np.testing.assert_allclose(seen, (rewards[t] / deviation).clip(-10, 10), rtol=1e-3)
        total = total * 0.9 + rewards[t]
        returns.append(total)
        total = total * (1 - ended[t])
        normalization.gather()
        normalization.learn(healthy=True)


def test_what_is_not_finite_is_not_learned() -> None:
    _, flat = make(replace(BOTH, normalize_rewards=False))
    normalization, before = Normalization(flat, 0.9), flat.data.clone()
    teach(normalization, np.full((4, 3), np.nan))
    normalization.gather()
    assert not normalization.is_finite()
    normalization.learn(healthy=False)
    assert flat.data.equal(before)


def test_new_moments_take_in_what_is_finite_of_a_rollout_that_is_left_out() -> None:
    """The model goes out after the update all the same, and one that has seen nothing would spoil its peers'."""
    network, flat = make()
    normalization = Normalization(flat, 0.9)
    teach(normalization, np.array([[1000.0, 0, 1], [1002, 0, 3], [np.nan, 0, 2]]))
    normalization.rewards(torch.tensor([1.0, 3.0, np.nan]), torch.zeros(3))
    normalization.gather()
    normalization.learn(healthy=False)
    assert network.observation_moments.mean.tolist() == [1001, 0, 2] and not network.observation_moments.is_new
    assert network.return_moments.mean.tolist() == [2] and flat.data.isfinite().all()
    before = flat.data.clone()
    teach(normalization, np.full((3, 3), np.nan))
    normalization.rewards(torch.ones(3), torch.zeros(3))
    normalization.gather()
    normalization.learn(healthy=False)
    assert flat.data.equal(before)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ends", [False, True])
def test_one_reward_that_is_not_finite_costs_one_rollout(reward: float, ends: bool) -> None:
    _, flat = make(replace(BOTH, normalize_observations=False))
    normalization, judged = Normalization(flat, 0.9), []
    for value in (1.0, reward, 1.0, 2.0):
        normalization.rewards(torch.tensor([value, 1.0]), torch.tensor([float(ends), 0.0]))
        normalization.gather()
        judged.append(normalization.is_finite())
        normalization.learn(judged[-1])
    assert judged == [True, False, True, True] and flat.data.isfinite().all()


def test_where_there_is_nothing_to_normalise() -> None:
    with pytest.raises(PalaError, match=r"'env.normalize_observations' is for vectors"):
        ActorCritic(Box(0, 255, (3, 20, 20), np.uint8), Discrete(2), NetworkConfig(), BOTH)
    with pytest.raises(PalaError, match=r"'env.normalize_rewards' is true, but 'algorithm' is 'gorila'"):
        checked(Config(algorithm="gorila", env=EnvConfig(normalize_rewards=True)))


def test_the_optimiser_leaves_the_moments_alone() -> None:
    """They are those of a network that learns nothing else, bit for bit."""
    network, flat = make()
    _, twin = make()
    tape = AutogradTape(network)
    a2c = A2C(network.distribution, tape, flat, A2CConfig(gamma=0.9, momentum=0.9))
    alone, draw, before = Normalization(twin, 0.9), torch.Generator().manual_seed(0), flat.data.clone()
    for _ in range(5):
        rollout = Rollout()
        tape.begin()
        for _ in range(2):
            observations, rewards = torch.randn(4, 3, generator=draw), torch.randn(4, generator=draw)
            for of in (a2c.normalization, alone):
                of.observe(observations)
                seen = of.rewards(rewards, torch.zeros(4))
            policy_output, value = tape.forward(observations)
            rollout.policy_outputs.append(policy_output)
            rollout.values.append(value.squeeze(-1))
            rollout.actions.append(torch.ones(4, dtype=torch.int64))
            rollout.rewards.append(seen)
            rollout.ended.append(torch.zeros(4))
        assert a2c.step(a2c.differentiate(rollout, torch.zeros(4)), 0.01).applied
        alone.gather()
        alone.learn(healthy=True)
    assert flat.data[flat.num_learned :].equal(twin.data[twin.num_learned :])
    assert (flat.data != before).all()
    assert all(tensor.shape == flat.data.shape for tensor in a2c.tensors.values())


# ---- on the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "bfloat16", "top_k"])
def test_moments_arrive_exact_by_every_codec(compression: str) -> None:
    """Mixed, pulled, moved towards an answer, and taken as a whole; the others as the codec does it."""
    draw = torch.Generator().manual_seed(0)
    config = ExchangeConfig(compression=compression, top_k_fraction=0.2)  # type: ignore[arg-type]
    mine, theirs = (1000 + torch.rand(40, generator=draw) for _ in range(2))
    codecs = [make_codec(config, x, 5) for x in (mine, theirs)]
    wire = Wire(2, 40, 1, gossip_sizes(codecs[0].sizes))
    send, inbox = SendBuffer(wire, CPU), ReceiveBuffer(wire, codecs[0], CPU)
    offer = SendBuffer(wire, CPU)
    header = Message(Kind.MODEL, 1, 0, 1.0, Stop.NONE, np.zeros(2, np.uint64))

    def deliver(whole: bool = False) -> None:
        theirs.add_(torch.rand(40, generator=draw))
        send.fill(header, codecs[1].pack(theirs, whole))
        inbox.data[: len(send.data)] = send.data
        message = wire.decode(inbox.data[: len(send.data)])
        assert isinstance(message, Message) and inbox.check(message, len(send.data)) is None

    for _ in range(3):
        deliver()
        expected = (mine + theirs)[-5:] / 2
        inbox.add(1.0)
        inbox.codec.mix(mine, 1.0)
        torch.testing.assert_close(mine[-5:], expected, rtol=1e-7, atol=1e-4)
        deliver()
        expected = (mine + 0.25 * (theirs - mine))[-5:]
        inbox.add(1.0)
        distance = inbox.codec.pull(mine, 0.25)
        torch.testing.assert_close(mine[-5:], expected, rtol=1e-7, atol=1e-4)
        assert distance is not None and distance < 30
    offer.fill(header, codecs[0].pack(mine, whole=True))
    deliver(whole=True)
    offer.fill(header, codecs[0].pack(mine, whole=True))
    assert inbox.codec.check_answer(offer.held) is None
    mine[-5:] *= 0.1  # meanwhile
    before = mine.clone()
    inbox.codec.move(mine, inbox.codec.difference(offer.held, in_place=False), 0.5)
    torch.testing.assert_close(mine[-5:], (before + theirs)[-5:] / 2, rtol=1e-7, atol=1e-4)
    torch.testing.assert_close(mine, (before + theirs) / 2, rtol=0, atol=0.0 if compression == "none" else 5.0)
    inbox.add(1.0)
    inbox.codec.heal(mine)
    assert mine[-5:].equal(theirs[-5:])


# ---- whole trainings -------------------------------------------------------------------------------------------------


def train_far(folder: Path, kind: str, resume: Path | None = None, steps: int = 1000, **exchange: Any) -> Trained:
    config = configure(folder, kind, steps=steps, **exchange)
    config = replace(
        config, env=replace(BOTH, num_envs=ENVS), a2c=replace(config.a2c, momentum=0.5, max_gradient_norm=0.5)
    )
    ranks = 2 if resume is None else 3
    request = Request(config, UserCode(Far), resume=resume)
    return Trained(config, run_ranks(ranks, lambda comm: run_rank(comm, request)))


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("allreduce", {}),
        pytest.param("shared_memory", {}, marks=pytest.mark.slow),
        pytest.param("gossip", {"mixing": "paired", "compression": "top_k"}, marks=pytest.mark.slow),
        ("gossip", {"mixing": "push_sum", "compression": "bfloat16"}),
    ],
)
def test_ranks_agree_on_the_moments(kind: str, exchange: dict[str, str], tmp_path: Path) -> None:
    """And the optimiser does not move them. All-reduce: the ranks end equal."""
    trained = train_far(tmp_path, kind, **exchange)
    assert trained.ended_well()
    states = [state.tensors["parameters"] for state in trained.states()]
    if kind == "allreduce":
        assert states[0].equal(states[1])
    if exchange.get("compression") == "bfloat16":  # header and counters; 8 moments exact, the others in two bytes
        model_bytes = 128 + 8 * 4 + (len(states[0]) - 8) * 2
        assert total(tmp_path / "runs/r", "bytes_sent") == total(tmp_path / "runs/r", "models_sent") * model_bytes
    policy = trained.policy
    moments = {name.split(".")[-1]: policy[name] for name in policy if name.startswith("observation_moments")}
    for of in (moments["mean"], *(state[-8:-6] for state in states)):  # mean, variance, count; the same of returns
        np.testing.assert_allclose(of, [1000, -3], atol=0.3)
        np.testing.assert_allclose(of[1], -3, atol=0.003)
    np.testing.assert_allclose(moments["variance"].sqrt(), [1, 0.01], rtol=0.2)
    assert float(policy["return_moments.variance"]) > 100
    assert evaluate(trained.run, 2, 2, Acting(greedy=True)).environment == "Far"


@pytest.mark.slow
def test_moments_outlive_a_resume_with_more_ranks(tmp_path: Path) -> None:
    train_far(tmp_path, "gossip")
    resumed = train_far(tmp_path, "gossip", resume=tmp_path / "r", steps=1300)
    assert resumed.ended_well()
    for state in resumed.states(first=False):
        assert float(state.tensors["parameters"][-4]) > 250  # the count of observations
        np.testing.assert_allclose(state.tensors["parameters"][-8], 1000, atol=0.3)
