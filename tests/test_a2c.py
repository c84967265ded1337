"""The loss, the optimiser and the action distributions, each against a slow formula or torch's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pala.a2c.update import A2C, Loss, Rollout, UpdateResult, a2c_loss
from pala.config import A2CConfig, NetworkConfig
from pala.networks.distributions import Categorical, Gaussian
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.optimisers import clip_gradient_, rmsprop_
from pala.networks.tape import AutogradTape

torch.set_num_threads(1)  # a second thread only costs time on tensors this small
STEPS, ENVS, ACTIONS = 3, 4, 5
CPU = torch.device("cpu")
SPACES = {
    "vector": (Box(-1, 1, (3,)), Discrete(ACTIONS)),
    "image": (Box(0, 255, (2, 36, 36), np.uint8), Discrete(ACTIONS)),
    "box": (Box(-1, 1, (3,)), Box(-1, 1, (2,))),
}


def make_network(kind: str) -> ActorCritic:
    torch.manual_seed(0)
    network = ActorCritic(*SPACES[kind], NetworkConfig((4, 4, 4), 8, (8,), background=0.0))
    with torch.no_grad():
        network.policy_head.weight.normal_()  # the first policy is too nearly uniform to show a mistake
    return network


def play(network: ActorCritic, tape: AutogradTape, kind: str) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """(rollout through the network with an end inside, its observations [T, B, ...], V after the last step)."""
    generator, rollout = torch.Generator().manual_seed(1), Rollout()
    tape.begin()
    space = SPACES[kind][0]
    space.seed(2)
    observations = torch.from_numpy(np.stack([[space.sample() for _ in range(ENVS)] for _ in range(STEPS)]))
    for t in range(STEPS):
        output, value = tape.forward(observations[t])
        rollout.policy_outputs.append(output)
        rollout.values.append(value.squeeze(-1))
        rollout.actions.append(network.distribution.sample(output, generator))
        rollout.rewards.append(torch.randn(ENVS, generator=generator))
        rollout.ended.append((torch.arange(ENVS) == t).float())
    return rollout, observations, torch.randn(ENVS, generator=generator)


def update(a2c: A2C, rollout: Rollout, bootstrap: torch.Tensor, learning_rate: float) -> UpdateResult:
    return a2c.step(a2c.differentiate(rollout, bootstrap), learning_rate)


@pytest.mark.parametrize("kind", SPACES)
def test_gradients_that_an_environment_has_switched_off_are_computed(kind: str) -> None:
    gradients = []
    for enabled in (True, False):
        network = make_network(kind)
        flat, tape = FlatParameters(network, CPU), AutogradTape(network)
        a2c = A2C(network.distribution, tape, flat, A2CConfig())
        with torch.set_grad_enabled(enabled):
            rollout, _, bootstrap = play(network, tape, kind)
            update(a2c, rollout, bootstrap, 7e-4)
        gradients.append(flat.gradient.clone())
    assert gradients[0].equal(gradients[1]) and gradients[0].any()


def slow_loss(rollout: Rollout, bootstrap: torch.Tensor, config: A2CConfig) -> tuple[float, float, float, float]:
    """(total, policy, value, entropy), one sample at a time in Python's floats."""
    policy = value_loss = entropy = 0.0
    for b in range(ENVS):
        following, advantage = float(bootstrap[b]), 0.0
        for t in reversed(range(STEPS)):
            weights = [math.exp(x) for x in rollout.policy_outputs[t][b].tolist()]
            p = [w / sum(weights) for w in weights]
            v, on = rollout.values[t][b].item(), 1 - float(rollout.ended[t][b])
            delta = float(rollout.rewards[t][b]) + config.gamma * on * following - v
            advantage = delta + config.gamma * config.gae_lambda * on * advantage
            following = v
            policy -= math.log(p[int(rollout.actions[t][b])]) * advantage
            value_loss += advantage**2
            entropy -= sum(q * math.log(q) for q in p)
    policy, value_loss, entropy = (x / (STEPS * ENVS) for x in (policy, value_loss, entropy))
    total = policy + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
    return total, policy, value_loss, entropy


def loss_of(rollout: Rollout, bootstrap: torch.Tensor, config: A2CConfig, outputs=None, values=None) -> Loss:
    outputs = torch.stack(rollout.policy_outputs) if outputs is None else outputs
    values = torch.stack(rollout.values) if values is None else values
    return a2c_loss(Categorical(ACTIONS), outputs, values, rollout, bootstrap, config)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
def test_loss_is_the_mean_over_samples(gae_lambda):
    config = A2CConfig(gamma=0.9, gae_lambda=gae_lambda, value_coefficient=0.3, entropy_coefficient=0.2)
    network = make_network("vector")
    rollout, _, bootstrap = play(network, AutogradTape(network), "vector")
    loss = [term.item() for term in loss_of(rollout, bootstrap, config)]
    assert loss == pytest.approx(slow_loss(rollout, bootstrap, config), rel=1e-5)


@pytest.mark.parametrize("kind", SPACES)
def test_reused_passes_have_the_gradient_of_a_second_pass(kind):
    """What an update differentiates, the acting passes, against a fresh pass over the stacked batch."""
    network = make_network(kind)
    flat = FlatParameters(network, CPU)
    tape = AutogradTape(network)
    rollout, observations, bootstrap = play(network, tape, kind)
    a2c = A2C(network.distribution, tape, flat, A2CConfig(max_gradient_norm=0))
    update(a2c, rollout, bootstrap, learning_rate=0.0)
    output, value = network(observations.flatten(0, 1))
    outputs = [tensor.unflatten(0, (STEPS, ENVS)) for tensor in (output, value)]
    loss = a2c_loss(network.distribution, *outputs, rollout, bootstrap, A2CConfig())
    expected = torch.autograd.grad(loss.total, list(network.parameters()))
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert flat.gradient.norm() > 0.01


def test_no_gradient_flows_through_the_targets():
    """The policy term alone has no gradient by the values."""
    network = make_network("vector")
    rollout, _, bootstrap = play(network, AutogradTape(network), "vector")
    outputs, values = (torch.stack(x).requires_grad_() for x in (rollout.policy_outputs, rollout.values))
    loss_of(rollout, bootstrap, A2CConfig(), outputs, values).policy.backward()
    assert values.grad is None
    assert outputs.grad.any()


# ---- the optimiser ---------------------------------------------------------------------------------------------------


def gradients_of_several_steps(count: int = 5, size: int = 7) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 1, size)


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("inside", [False, True])
def test_rmsprop_is_the_scalar_formula(inside, share):
    rate, alpha, epsilon = 0.01, 0.9, 1e-3
    x, v = torch.ones(7), torch.full((7,), 0.5)
    slow_x, slow_v = x.tolist(), v.tolist()
    for gradient in gradients_of_several_steps():
        rmsprop_(x, gradient, v, rate, alpha, epsilon, inside, share)
        for i, g in enumerate(gradient.tolist()):
            slow_v[i] = alpha * slow_v[i] + (1 - alpha) * g * g
            u = slow_v[i] / share
            slow_x[i] -= rate * g / (math.sqrt(u + epsilon) if inside else math.sqrt(u) + epsilon)
    assert x.tolist() == pytest.approx(slow_x, rel=1e-5)
    assert v.tolist() == pytest.approx(slow_v, rel=1e-5)


def test_rmsprop_is_torchs():
    x, v, parameter = torch.ones(7), torch.zeros(7), torch.nn.Parameter(torch.ones(7))
    optimiser = torch.optim.RMSprop([parameter], lr=7e-4, alpha=0.99, eps=1e-5)
    for gradient in gradients_of_several_steps():
        rmsprop_(x, gradient, v, 7e-4, 0.99, 1e-5, epsilon_inside_root=False)
        parameter.grad = gradient
        optimiser.step()
    torch.testing.assert_close(x, parameter.data)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_clipping_is_torchs(scale):
    gradient = torch.linspace(-1, 1, 9) * scale
    parameter = torch.nn.Parameter(torch.zeros(9))
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    assert clip_gradient_(gradient, 0.5) == pytest.approx(float(norm))
    torch.testing.assert_close(gradient, parameter.grad)


def test_clipping_can_be_off():
    gradient = torch.full((4,), 100.0)
    assert clip_gradient_(gradient, 0.0) == 200.0
    assert gradient.tolist() == [100.0] * 4


@pytest.mark.parametrize("corrects", [False, True])
def test_an_update_is_clip_then_rmsprop_of_the_losss_gradient(corrects):
    network = make_network("vector")
    config = A2CConfig(max_gradient_norm=0.1, rmsprop_bias_correction=corrects, momentum=0.0)
    flat = FlatParameters(network, CPU)
    tape = AutogradTape(network)
    rollout, observations, bootstrap = play(network, tape, "vector")
    total = loss_of(rollout, bootstrap, config, *map(torch.stack, zip(*map(network, observations), strict=True))).total
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, network.parameters(), retain_graph=True)])
    before = flat.data.clone()
    result = update(A2C(network.distribution, tape, flat, config), rollout, bootstrap, learning_rate=0.01)
    assert result.applied
    assert result.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    gradient *= 0.1 / gradient.norm()
    root = (1.0 if corrects else 0.1) * gradient.abs()  # of g^2, or of 0.01 g^2, whose other 0.99 is 0
    torch.testing.assert_close(flat.data, before - 0.01 * gradient / (root + 1e-5), rtol=1e-4, atol=0)


def test_the_mean_squares_are_corrected_until_they_are_full():
    """With equal gradients every step is as long as the rate says, also after a restart, and after updates that were
    left out."""
    network, config = make_network("vector"), A2CConfig(momentum=0.0, max_gradient_norm=0.0, rmsprop_epsilon=1e-12)
    flat = FlatParameters(network, CPU)
    a2c = A2C(network.distribution, AutogradTape(network), flat, config)
    for updates in range(300):
        if updates == 150:
            a2c.restart_mean_square()
        before = flat.data.clone()
        flat.gradient.fill_(math.nan)
        assert not a2c.step(Loss(*torch.zeros(4)), 0.01).applied
        flat.gradient.fill_(0.5)
        a2c.step(Loss(*torch.zeros(4)), 0.01)
        torch.testing.assert_close(flat.data, before - 0.01, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e30], ids=["nan", "inf", "overflow"])
def test_a_gradient_that_is_not_finite_is_not_applied(reward):
    network = make_network("vector")
    flat = FlatParameters(network, CPU)
    tape = AutogradTape(network)
    a2c = A2C(network.distribution, tape, flat, A2CConfig())
    update(a2c, *play(network, tape, "vector")[::2], learning_rate=0.01)
    before, mean_square = flat.data.clone(), a2c.mean_square.clone()
    rollout, _, bootstrap = play(network, tape, "vector")
    rollout.rewards[1][2] = reward
    assert not update(a2c, rollout, bootstrap, learning_rate=0.01).applied
    assert flat.data.equal(before)
    assert a2c.mean_square.equal(mean_square)
    assert update(a2c, *play(network, tape, "vector")[::2], learning_rate=0.01).applied
    assert flat.data.isfinite().all()
    assert not flat.data.equal(before)


# ---- the distributions -----------------------------------------------------------------------------------------------

LOGITS = torch.tensor([1.0, -2.0, 0.0, 2.5])


def test_categorical_is_torchs():
    logits = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(4))
    actions = torch.arange(12).reshape(6, 2) % 4
    log_prob, entropy = Categorical(4).log_prob_and_entropy(logits, actions)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_prob, expected.log_prob(actions))
    torch.testing.assert_close(entropy, expected.entropy())


def test_categorical_samples_as_often_as_softmax_says():
    count = 40_000
    samples = Categorical(4).sample(LOGITS.expand(count, 4), torch.Generator().manual_seed(5))
    p = LOGITS.double().softmax(-1)
    error = samples.bincount(minlength=4) / count - p
    assert (error.abs() < 4 * (p * (1 - p) / count).sqrt()).all()


def test_greedy_is_the_most_probable_action():
    assert Categorical(4).sample(LOGITS[None], torch.Generator(), greedy=True).tolist() == [3]
    mean = torch.tensor([[0.1, -0.2]])
    assert Gaussian(Box(-1, 1, (2,))).sample(mean, torch.Generator(), greedy=True).equal(mean)


def test_actions_begin_where_the_space_begins():
    network = ActorCritic(Box(-1, 1, (3,)), Discrete(3, start=5), NetworkConfig(mlp_hidden=(4,)))
    actions = network.distribution.sample(torch.zeros(200, 3), torch.Generator().manual_seed(6))
    assert set(actions.tolist()) == {0, 1, 2}
    assert network.distribution.to_env(actions).equal(actions + 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_some_action(bad):
    actions = Categorical(4).sample(torch.full((3, 4), bad), torch.Generator().manual_seed(7))
    assert ((actions >= 0) & (actions < 4)).all()


def test_gaussian_is_torchs():
    distribution = Gaussian(Box(-1, 1, (3,)))
    with torch.no_grad():
        distribution.log_std.copy_(torch.tensor([-1.0, 0.0, 0.5]))
    mean, actions = torch.randn(2, 5, 6, 3, generator=torch.Generator().manual_seed(8))
    expected = torch.distributions.MultivariateNormal(mean, (2 * distribution.log_std).exp().diag())
    log_prob, entropy = distribution.log_prob_and_entropy(mean, actions)
    torch.testing.assert_close(log_prob, expected.log_prob(actions))
    torch.testing.assert_close(entropy, expected.entropy())


@pytest.mark.parametrize(("wants", "bound"), [(1.0, 2.0), (-1.0, -20.0)])
def test_a_gaussians_deviation_is_bounded_and_comes_back(wants: float, bound: float) -> None:
    """By SAC's bounds, in steps of 0.1, where nothing but the entropy matters; it once grew without end."""
    distribution, mean = Gaussian(Box(-1, 1, (2,))), torch.zeros(1, 2)
    optimiser = torch.optim.RMSprop(distribution.parameters(), 0.1)

    def learn(sign: float, updates: int) -> float:
        for _ in range(updates):
            entropy = distribution.log_prob_and_entropy(mean, mean)[1].mean()
            optimiser.zero_grad()
            (-sign * entropy).backward()
            optimiser.step()
        return float(entropy.detach()) / 2 - 0.5 * math.log(2 * math.pi * math.e)

    assert math.isclose(learn(wants, 300), bound, rel_tol=1e-5)
    assert abs(float(distribution.log_std.detach()[0]) - bound) < 1.0
    samples = distribution.sample(mean.expand(10_000, 2), torch.Generator().manual_seed(9))
    assert math.isclose(math.log(float(samples.std())), bound, abs_tol=0.05)
    assert abs(learn(-wants, 30) - bound) > 1.0


def test_gaussian_samples_have_its_mean_and_deviation():
    distribution, count = Gaussian(Box(-1, 1, (2,))), 40_000
    with torch.no_grad():
        distribution.log_std.copy_(torch.tensor([-1.0, 0.7]))
    mean, std = torch.tensor([3.0, -2.0]), distribution.log_std.exp()
    samples = distribution.sample(mean.expand(count, 2), torch.Generator().manual_seed(9))
    assert not samples.requires_grad
    assert ((samples.mean(0) - mean).abs() < 4 * std / count**0.5).all()
    assert ((samples.std(0) / std - 1).abs() < 4 / (2 * count) ** 0.5).all()


def test_box_actions_are_clipped_shaped_and_finite():
    space = Box(np.float32([[0, -1], [-2, -3]]), np.float32([[1, 1], [2, 3]]))
    actions = Gaussian(space).to_env(torch.tensor([[9.0, -9, 1.5, 0.25], [math.nan, math.inf, -math.inf, 9]]))
    assert actions.tolist() == [[[1, -1], [1.5, 0.25]], [[0, 1], [-2, 3]]]
    assert all(space.contains(action) for action in actions.numpy())
