"""Returns and advantages against formulas that look at one environment and one step at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pala.a2c.update import advantages_and_returns


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Rewards, ends and values of 1 to 8 steps of 1 to 4 environments."""
    steps, envs = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {
        "rewards": rng.normal(size=(steps, envs)),
        "ended": (rng.random((steps, envs)) < draw(st.sampled_from([0.0, 0.3, 1.0]))).astype(float),
        "values": rng.normal(size=(steps, envs)),
        "bootstrap": rng.normal(size=envs),
    }


def computed(data: dict[str, np.ndarray], gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    arrays = (torch.from_numpy(data[key]) for key in ("rewards", "ended", "values", "bootstrap"))
    advantages, returns = advantages_and_returns(*arrays, gamma, gae_lambda)
    return advantages.numpy(), returns.numpy()


def next_value(data: dict[str, np.ndarray], t: int, b: int) -> float:
    """V of the observation after step t of environment b; nothing is worth anything after an end."""
    if data["ended"][t, b]:
        return 0.0
    return data["values"][t + 1, b] if t + 1 < len(data["values"]) else data["bootstrap"][b]


def n_step_return(data: dict[str, np.ndarray], t: int, b: int, gamma: float) -> float:
    """The discounted rewards from t to the first end, or to the last step and what V says of the rest."""
    total = 0.0
    for k in range(t, len(data["rewards"])):
        total += gamma ** (k - t) * data["rewards"][k, b]
        if data["ended"][k, b]:
            return total
    return total + gamma ** (len(data["rewards"]) - t) * data["bootstrap"][b]


def gae(data: dict[str, np.ndarray], t: int, b: int, gamma: float, gae_lambda: float) -> float:
    """The sum of (gamma lambda)^l delta_(t+l) up to the first end (arXiv 1506.02438, eq. 16)."""
    total = 0.0
    for k in range(t, len(data["rewards"])):
        delta = data["rewards"][k, b] + gamma * next_value(data, k, b) - data["values"][k, b]
        total += (gamma * gae_lambda) ** (k - t) * delta
        if data["ended"][k, b]:
            break
    return total


def everywhere(data: dict[str, np.ndarray], formula) -> np.ndarray:
    steps, envs = data["rewards"].shape
    return np.array([[formula(t, b) for b in range(envs)] for t in range(steps)])


unit = st.floats(0, 1)


@settings(derandomize=True, deadline=None)
@given(rollouts(), unit, unit)
def test_gae_is_the_sum_of_discounted_errors(data, gamma, gae_lambda):
    advantages, returns = computed(data, gamma, gae_lambda)
    expected = everywhere(data, lambda t, b: gae(data, t, b, gamma, gae_lambda))
    np.testing.assert_allclose(advantages, expected, atol=1e-10)
    np.testing.assert_allclose(returns, expected + data["values"], atol=1e-10)


@settings(derandomize=True, deadline=None)
@given(rollouts(), unit)
def test_lambda_one_gives_n_step_returns(data, gamma):
    _, returns = computed(data, gamma, 1.0)
    np.testing.assert_allclose(returns, everywhere(data, lambda t, b: n_step_return(data, t, b, gamma)), atol=1e-10)


@settings(derandomize=True, deadline=None)
@given(rollouts(), unit)
def test_lambda_zero_gives_one_step_targets(data, gamma):
    _, returns = computed(data, gamma, 0.0)
    target = everywhere(data, lambda t, b: data["rewards"][t, b] + gamma * next_value(data, t, b))
    np.testing.assert_allclose(returns, target, atol=1e-10)


def test_by_hand_with_an_end_inside():
    """gamma 1/2: the reward 4 of the next episode must not leak into the one that ended with the second step."""
    rewards, ended = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    advantages, returns = advantages_and_returns(rewards, ended, torch.ones(3, 1), torch.tensor([8.0]), 0.5, 1.0)
    assert returns.squeeze().tolist() == [2.0, 2.0, 8.0]
    assert advantages.squeeze().tolist() == [1.0, 1.0, 7.0]
