"""Action masks: read from environments, and kept in acting, loss, evaluation and export."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import pala
from pala.a2c.update import A2C, Rollout
from pala.config import A2CConfig, Config, EnvConfig, EvaluationConfig, GorilaConfig, NetworkConfig, RunConfig
from pala.envs.masks import MaskReader, an_action
from pala.envs.vector import make_envs
from pala.evaluation.policy import load_policy
from pala.evaluation.video import _film
from pala.networks.distributions import Categorical, MultiCategorical, distribution_of, masked
from pala.networks.make import make_tape
from pala.networks.network import ActorCritic, FlatParameters
from pala.system.errors import PalaError
from support.learning import Run, configured
from support.masks import CHOICES, Fickle, Unmasked
from support.policies import make_run

torch.set_num_threads(1)
INFO = partial(Fickle, "info")
MAKERS = [INFO, partial(Fickle, "method"), partial(Fickle, "tuple", CHOICES), partial(Fickle, "method", CHOICES)]
NAMES = ["info", "method", "tuple of choices", "choices by a method"]


# ---- reading them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_env", "vectorization"),
    [*((make_env, "sync") for make_env in MAKERS), *((make_env, "async") for make_env in MAKERS[1:3])],
)
@pytest.mark.slow
def test_masks_are_those_of_the_next_step(make_env: Any, vectorization: str) -> None:
    """An environment that ended shows the mask of its reset. Actions by the masks never raise."""
    envs = make_envs(EnvConfig("x", num_envs=3, vectorization=vectorization), make_env=make_env)
    distribution = distribution_of(envs.action_space)
    generator = torch.Generator().manual_seed(0)
    ended = 0
    with envs:
        envs.reset(np.arange(3, dtype=np.int32))
        for _ in range(30):
            assert envs.action_masks is not None
            assert envs.action_masks.shape == (3, distribution.num_outputs) and envs.action_masks.dtype == bool
            masks = torch.from_numpy(envs.action_masks)
            logits = masked(torch.randn(masks.shape, generator=generator), masks)
            actions = distribution.to_env(distribution.sample(logits, generator, masks=masks))
            ended += len(envs.step(actions.numpy()).episodes)
    assert ended == 3 * (30 // 7) and envs.num_failures == 0


def test_environments_without_masks_have_none() -> None:
    for make_env in (lambda: gymnasium.make("CartPole-v1"), lambda: Unmasked(INFO())):
        with make_envs(EnvConfig("x", num_envs=2), make_env=make_env) as envs:
            envs.reset(np.arange(2, dtype=np.int32))
            assert envs.action_masks is None


def test_a_mask_that_lacks_later_is_an_error() -> None:
    with make_envs(EnvConfig("x", num_envs=1), make_env=lambda: Unmasked(INFO(), first=2)) as envs:
        envs.reset(np.zeros(1, np.int32))
        envs.step(envs.action_masks.argmax(-1))
        with pytest.raises(PalaError, match=r"'Fickle' must give an action mask .* but a mask is missing"):
            envs.step(envs.action_masks.argmax(-1))


def test_a_mask_that_lacks_in_the_first_step_shows_as_an_environment_is_tried_out() -> None:
    with (
        make_envs(EnvConfig("x", num_envs=1), make_env=lambda: Unmasked(INFO(), first=1)) as envs,
        pytest.raises(PalaError, match=r"'Fickle' must give an action mask .* but a mask is missing"),
    ):
        envs.try_out(3)


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (Discrete(3, start=5), [0, 0, 1]),
        (MultiDiscrete([2, 3], start=[4, -1]), [0, 1, 0, 0, 1]),
        (MultiDiscrete([[2, 3], [1, 2]]), [0, 1, 0, 1, 1, 1, 0, 1]),
        (MultiDiscrete([[2, 3], [1, 2]]), None),
        (gymnasium.spaces.MultiBinary([2, 2]), None),
        (Box(2, 3, (2,)), None),
    ],
)
def test_an_environment_is_tried_out_with_an_action_that_is_allowed(space: Any, mask: Any) -> None:
    allowed = None if mask is None else np.array(mask, bool)
    action = an_action(space, allowed)
    assert space.contains(action) and np.array_equal(action, an_action(space, allowed))
    if allowed is not None:
        sizes = np.atleast_1d(space.n if isinstance(space, Discrete) else space.nvec).reshape(-1)
        starts = np.cumsum(sizes) - sizes
        assert allowed[starts + np.reshape(action - space.start, -1)].all()


def test_environments_of_which_some_give_masks_are_an_error() -> None:
    left = itertools.cycle([INFO, lambda: Unmasked(INFO())])
    envs = make_envs(EnvConfig("x", num_envs=2), make_env=lambda: next(left)())
    with pytest.raises(PalaError, match="a mask is missing"):
        envs.reset(np.arange(2, dtype=np.int32))


class Given(gymnasium.Env[np.ndarray, Any]):
    """Gives this mask."""

    observation_space = Box(-1, 1, (1,))

    def __init__(self, mask: Any, space: gymnasium.Space) -> None:
        self.action_masks = lambda: mask
        self.action_space = space


TWO = MultiDiscrete([2, 3])


@pytest.mark.parametrize(
    ("mask", "space", "words"),
    [
        ([0, 0], Discrete(2), "'it' gives an action mask that allows no action"),
        ([1, 1, 0, 0, 0], TWO, "allows no action"),
        ([1, 1, 1], Discrete(2), r"'it' gives action masks, but one has the shape \(3,\)"),
        ([[1, 1]], Discrete(2), r"the shape \(1, 2\), not \(2,\)"),
        ([[1, 1], [1, 1, 1]], TWO, r"of MultiDiscrete.* give one mask a choice in a tuple, or all joined"),
        (([1, 1], [1, 1]), TWO, r"the shape \(4,\), where .* needs 5 numbers"),
        ([0.0, -math.inf], Discrete(2), "other numbers than 0 and 1"),
        ([1, 1], Box(-1, 1, (2,)), "only Discrete and MultiDiscrete ones can be masked"),
        ({}, Discrete(2), r"the shape \(\)"),
    ],
)  # fmt: skip
def test_a_mask_that_cannot_be_names_the_environment(mask: Any, space: gymnasium.Space, words: str) -> None:
    with pytest.raises(PalaError, match=words):
        MaskReader(Given(mask, space), "it").read({})


def test_a_mask_of_all_zeros_ends_training_with_its_environment(tmp_path: Path) -> None:
    class Stuck(Fickle):
        def _mask(self) -> Any:
            return np.zeros(5, np.int8)

    with pytest.raises(PalaError, match="'Stuck' gives an action mask that allows no action"):
        Run(configured(), Stuck).go()


# ---- acting and learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_env", MAKERS, ids=NAMES)
@pytest.mark.slow
def test_training_never_takes_a_masked_action(make_env: Any) -> None:
    """The environment would raise."""
    run = Run(configured(total_steps=400), make_env)
    run.go()
    assert run.counters.applied == run.counters.updates == 40
    assert run.envs.num_failures == 0
    assert all(record["entropy"] > 0 for record in run.of_type("interval"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_also_a_ruined_network_takes_allowed_actions(bad: float) -> None:
    masks = torch.tensor([[False, False, True, False, True]])
    for logits in (torch.full((1, 5), bad), torch.tensor([[0.0, bad, bad, 0.0, bad]])):
        for greedy in (False, True):
            action = Categorical(5).sample(masked(logits, masks), torch.Generator(), greedy, masks)
            assert masks[0, action]


def test_samples_have_the_probabilities_among_the_allowed() -> None:
    logits, masks = torch.tensor([0.0, 1.0, 50.0, 2.0]), torch.tensor([True, True, False, True])
    count = 20_000
    wide = masks.expand(count, 4)
    samples = Categorical(4).sample(masked(logits.expand(count, 4), wide), torch.Generator().manual_seed(1), masks=wide)
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    found = torch.bincount(samples, minlength=4)[masks] / count
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)
    assert not (samples == 2).any()


def slow_loss(logits: torch.Tensor, masks: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor, c: float):
    """-mean(log pi(a) A) - c mean(H), choice by choice, over the allowed actions alone: no infinity in it."""
    total = torch.zeros(())
    for row, allowed, taken, advantage in zip(logits, masks, actions, advantages, strict=True):
        begin = 0
        for size, action in zip(CHOICES, taken, strict=True):
            numbers = [i for i in range(size) if allowed[begin + i]]
            exponentials = [row[begin + i].exp() for i in numbers]
            probabilities = [e / sum(exponentials) for e in exponentials]
            chosen = probabilities[numbers.index(int(action))]
            entropy = -sum(p * p.log() for p in probabilities)
            total = total - chosen.log() * advantage - c * entropy
            begin += size
    return total / len(logits)


def test_the_gradient_is_that_of_a_slow_formula() -> None:
    torch.manual_seed(0)
    distribution, count = MultiCategorical(MultiDiscrete(CHOICES)), 50
    masks = torch.rand(count, sum(CHOICES)) < 0.5
    for begin in (0, 3, 5):
        masks[:, begin] = True  # some choices have one action alone
    logits = torch.randn(count, sum(CHOICES))
    actions = distribution.sample(masked(logits, masks), torch.Generator().manual_seed(2), masks=masks)
    advantages = torch.randn(count)
    fast, slow = (logits.clone().requires_grad_() for _ in range(2))
    log_prob, entropy = distribution.log_prob_and_entropy(masked(fast, masks), actions)
    loss = -(log_prob * advantages).mean() - 0.3 * entropy.mean()
    expected = slow_loss(slow, masks, actions, advantages, 0.3)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(fast.grad, slow.grad)
    assert (fast.grad[~masks] == 0).all() and (fast.grad[masks] != 0).any()


@pytest.mark.parametrize("passes", ["auto", "autograd"])
def test_the_networks_gradient_is_that_of_autograd_through_the_whole_formula(passes: str) -> None:
    """By the hand-written passes as by autograd's."""
    space, steps, envs = Box(0, 255, (2, 36, 36), np.uint8), 3, 4
    torch.manual_seed(0)
    network = ActorCritic(space, MultiDiscrete(CHOICES), NetworkConfig((4, 4, 4), 8, background=0.0))
    torch.nn.init.normal_(network.policy_head.weight)
    flat = FlatParameters(network, torch.device("cpu"))
    observations = torch.randint(0, 256, (steps, envs, 2, 36, 36), dtype=torch.uint8)
    masks = torch.rand(steps, envs, sum(CHOICES)) < 0.5
    masks[..., (0, 3, 5)] = True
    tape = make_tape(network, NetworkConfig((4, 4, 4), 8, passes=passes, precision="float32"), steps, observations[0])
    a2c = A2C(network.distribution, tape, flat, A2CConfig(entropy_coefficient=0.3, value_coefficient=0.0))
    rollout, generator = Rollout(), torch.Generator().manual_seed(1)
    tape.begin()
    for seen, allowed in zip(observations, masks, strict=True):
        logits, value = tape.forward(seen)
        rollout.policy_outputs.append(masked(logits, allowed))
        rollout.actions.append(network.distribution.sample(rollout.policy_outputs[-1], generator, masks=allowed))
        rollout.values.append(value.squeeze(-1).clone())
        rollout.rewards.append(torch.randn(envs))
        rollout.ended.append(torch.ones(envs))  # the advantage is the reward less the value
    loss = a2c.differentiate(rollout, torch.zeros(envs))
    found = flat.gradient.clone()
    flat.gradient.zero_()
    logits = network.outputs(observations.flatten(0, 1))[0]
    advantages = (torch.stack(rollout.rewards) - torch.stack(rollout.values)).flatten()
    expected = slow_loss(logits, masks.flatten(0, 1), torch.stack(rollout.actions).flatten(0, 1), advantages, 0.3)
    expected.backward()
    torch.testing.assert_close(loss.total, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, flat.gradient, rtol=1e-3, atol=1e-5)
    assert float(found.norm()) > 0.01


# ---- the policy of a run ---------------------------------------------------------------------------------------------

FICKLE = Config(
    env=EnvConfig("support.masks:Fickle", restarts=0),
    network=NetworkConfig(mlp_hidden=(8,)),
    evaluation=EvaluationConfig(episodes=3, num_envs=2),
)


def policy_for(path: Path, make_env: Any) -> tuple[Any, Any]:
    """(a policy that would choose by its logits alone, its environments)."""
    envs = make_envs(replace(FICKLE.env, num_envs=4), make_env=make_env)
    torch.manual_seed(0)
    network = ActorCritic(envs.observation_space, envs.action_space, FICKLE.network)
    torch.nn.init.normal_(network.policy_head.weight, std=3)
    run = make_run(path / "run", FICKLE, network)
    return load_policy(run, FICKLE, envs), envs


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("make_env", MAKERS, ids=NAMES)
def test_a_policy_acts_within_masks(tmp_path: Path, make_env: Any, greedy: bool) -> None:
    policy, envs = policy_for(tmp_path, make_env)
    observations = envs.reset(np.arange(4, dtype=np.int32))
    for _ in range(20):
        observations = envs.step(policy.act(observations, greedy, action_masks=envs.action_masks)).observations
    env = make_env()
    observation, info = env.reset(seed=0)
    masks = info.get("action_mask")
    env.step(policy.act(observation, greedy, action_masks=env._mask() if masks is None else masks))
    with pytest.raises(PalaError, match="raised AssertionError"):  # the masks were needed
        for _ in range(20):
            observations = envs.step(policy.act(observations, greedy)).observations


def test_a_film_plays_within_masks(tmp_path: Path) -> None:
    """As `pala play` shows it."""
    policy, _ = policy_for(tmp_path, INFO)
    envs, ended = make_envs(replace(FICKLE.env, num_envs=1), make_env=INFO), []
    pictures = _film(envs, policy, False, lambda actions: np.zeros((1, 1, 3)), np.zeros(1, np.int32), ended, 5)
    assert len(list(pictures)) == 5 * 7 and len(ended) == 5


def test_masks_of_another_shape_are_refused(tmp_path: Path) -> None:
    policy, envs = policy_for(tmp_path, INFO)
    observations = envs.reset(np.arange(4, dtype=np.int32))
    for masks, words in (
        (np.ones((3, 5)), r"of shape \(3, 5\), but must be \(4, 5\)"),
        (np.ones(5), r"of shape \(5,\), but must be \(4, 5\)"),
        (np.ones((4, 6)), "needs 5 numbers"),
        (np.zeros((4, 5)), "allows no action"),
    ):
        with pytest.raises(PalaError, match=words):
            policy.act(observations, action_masks=masks)


@pytest.mark.parametrize("make_env", [INFO, partial(Fickle, "tuple", CHOICES)])
@pytest.mark.slow
def test_an_export_takes_masks(tmp_path: Path, make_env: Any) -> None:
    policy, envs = policy_for(tmp_path, make_env)
    policy.export(tmp_path / "policy.pt2", action_masks=True)
    program = torch.export.load(tmp_path / "policy.pt2").module()
    observations = torch.from_numpy(envs.reset(np.arange(4, dtype=np.int32)))
    masks = torch.from_numpy(envs.action_masks)
    logits, value = program(observations, action_masks=masks)
    expected, expected_value = policy.network(observations)
    torch.testing.assert_close(logits, expected.masked_fill(~masks, -math.inf))
    torch.testing.assert_close(value, expected_value)
    envs.step(policy.network.distribution.to_env(policy.network.distribution.sample(
        logits, torch.Generator(), greedy=True)).numpy())  # fmt: skip


@pytest.mark.slow
def test_a_run_with_masks_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, evaluated, resumed, filmed and loaded: an action that is not allowed would end each."""
    config = Config(
        total_steps=1000, env=EnvConfig(num_envs=4, restarts=0), network=NetworkConfig(mlp_hidden=(8,)),
        run=RunConfig(dir=str(tmp_path), name="masked", console="none", threads=1),
        evaluation=EvaluationConfig(episodes=20),
    )  # fmt: skip
    result = pala.fit(config, make_env=INFO)
    assert result.status == "completed" and result.evaluation.episodes == 20
    assert "Action masks: the environment says" in capsys.readouterr().err
    result = pala.fit(replace(config, total_steps=2000), resume=result.run)
    assert result.global_steps >= 2000
    assert pala.evaluate_policy(result.run, episodes=10, greedy=True).episodes == 10


def test_gorila_refuses_masks(tmp_path: Path) -> None:
    config = Config(
        algorithm="gorila", total_steps=2000, env=EnvConfig(num_envs=4), network=NetworkConfig(mlp_hidden=(8,)),
        gorila=GorilaConfig(min_replay_steps=100, replay_capacity_steps=1000),
        run=RunConfig(dir=str(tmp_path), name="masked", console="none", threads=1),
    )  # fmt: skip
    with pytest.raises(PalaError, match="'Fickle' gives action masks, but 'algorithm' is 'gorila'"):
        pala.fit(config, make_env=INFO)
