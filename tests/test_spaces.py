"""Spaces of observations and actions: what the network gets, what the environment gets, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from torch import nn

from pala.a2c.agent import with_background
from pala.comm.alone import Alone
from pala.config import Config, EnvConfig, NetworkConfig
from pala.envs.spaces import background_of, channel_axis, image_scale, inputs_of
from pala.envs.vector import make_envs
from pala.evaluation.policy import policy_of
from pala.evaluation.scoring import Acting, evaluate
from pala.job.request import Request
from pala.networks.distributions import distribution_of
from pala.networks.make import make_tape
from pala.networks.network import ActorCritic, FlatParameters, blank_observations
from pala.networks.tape import AutogradTape
from pala.report.plot import read as read_run
from pala.run import run_folder
from pala.run.hooks import UserCode
from pala.system.errors import PalaError
from support.environments import Sparkle
from support.helpers import slow_but_for
from support.memory_jobs import GORILA, configure, run_rank, run_ranks

CPU = torch.device("cpu")
SMALL = NetworkConfig((4, 8, 4), 8, (8,), background=0.0, precision="float32")


class Odd(gymnasium.Env):
    """Whatever spaces; says what it was done to it."""

    def __init__(self, observations: gymnasium.Space, actions: gymnasium.Space = Discrete(2)) -> None:  # noqa: B008
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 4, {}


# ---- observations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((210, 160, 3), 2), ((3, 210, 160), 0), ((84, 84, 4), 2), ((4, 84, 84), 0), ((10, 10, 10), 2), ((8, 8, 111), 2),
        ((12, 96, 96), 0),
    ],
)  # fmt: skip
def test_the_shape_of_an_image_tells_its_channels(shape: tuple[int, ...], axis: int) -> None:
    assert channel_axis(shape) == axis
    assert (channel_axis(shape, "channels_first"), channel_axis(shape, "channels_last")) == (0, 2)


def test_a_shape_that_does_not_tell_is_asked_for() -> None:
    for shape in ((40, 60, 80), (50, 60, 50)):
        with pytest.raises(PalaError, match=r"set 'env.image_layout' to 'channels_first' or 'channels_last'"):
            inputs_of(Box(0, 255, shape, np.uint8))
    assert inputs_of(Box(0, 255, (40, 60, 80), np.uint8), "channels_last").space.shape == (80, 40, 60)


IMAGES = {
    "bytes": Box(0, 255, (12, 14, 3), np.uint8),
    "MinAtar": Box(0, 1, (10, 10, 4), bool),
    "reals": Box(-1, 3, (20, 17, 2), np.float32),
    "whole numbers": Box(2, 9, (3, 40, 38), np.int64),
    "unbounded": Box(-np.inf, np.inf, (7, 8, 3), np.float64),
    "grey": Box(0, 255, (36, 48), np.uint8),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_reach_the_network_scaled_and_with_channels_first(kind: str) -> None:
    """By hand: transposed, (x - low) / (high - low), less the background. The hand-written passes give what autograd
    gives."""
    space = IMAGES[kind]
    inputs = inputs_of(space)
    space.seed(1)
    images = [space.sample() for _ in range(6)]
    planes = [x[None] if x.ndim == 2 else x if kind == "whole numbers" else x.transpose(2, 0, 1) for x in images]
    bounds = float(space.low.min()), float(space.high.max())
    low, width = (bounds[0], bounds[1] - bounds[0]) if kind != "unbounded" else (0, 1)
    expected = (np.stack(planes).astype(np.float64) - low) / width - (0.25 if kind != "unbounded" else 0)
    encoded = np.stack([inputs.encode(image) for image in images])
    assert inputs.space.contains(encoded[0]), (encoded.dtype, inputs.space)
    torch.manual_seed(0)
    network = ActorCritic(inputs.space, Discrete(3), replace(SMALL, background=0.25))
    seen = network._inputs(torch.from_numpy(encoded))
    np.testing.assert_allclose(seen.numpy(), expected, rtol=1e-5, atol=1e-6)
    flat = FlatParameters(network, CPU)
    gradients = []
    by_hand = make_tape(network, SMALL, 1, blank_observations(inputs.space, 6, CPU))
    for tape in (by_hand, AutogradTape(network)):
        tape.begin()
        outputs = tape.forward(torch.from_numpy(encoded))
        flat.gradient.zero_()
        tape.backward([output.unsqueeze(0) for output in outputs])
        gradients.append((torch.cat(outputs, 1), flat.gradient.clone()))
    assert not isinstance(by_hand, AutogradTape)
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_background_is_the_median_pixel() -> None:
    """Scaled by the bounds of the space; nothing where there are none, or no images."""
    grey = np.full((3, 7, 8), 51, np.uint8)
    grey[..., :3] = 255
    assert background_of(grey, Box(0, 255, grey.shape, np.uint8)) == 51 / 255
    assert background_of(grey, Box(-49, 351, grey.shape, np.int16)) == 0.25
    assert background_of(grey, Box(60, 255, grey.shape, np.uint8)) == 0  # an environment may leave its space
    assert background_of(grey, Box(-np.inf, np.inf, grey.shape, np.float32)) == 0
    assert background_of(grey.reshape(-1), Box(0, 255, (168,), np.uint8)) == 0
    parts = {
        "grey": Box(0, 255, (3, 7, 8), np.uint8),
        "unbounded": Box(-np.inf, np.inf, (9, 9, 1)),
        "many": Box(-np.inf, np.inf, (500,)),
    }
    inputs = inputs_of(Dict(parts))
    row = inputs.encode({"grey": grey, "unbounded": np.ones((9, 9, 1)), "many": np.full(500, 0.7)})
    assert background_of(row, inputs.space) == pytest.approx(51 / 255)


def test_the_background_of_pong_is_that_of_its_newest_frame() -> None:
    """87 of 255: the other frames of a stack are black when a game begins."""
    with make_envs(EnvConfig("ALE/Pong-v5", num_envs=2)) as envs:
        assert background_of(envs.first_frame(1), envs.observation_space) == 87 / 255
        assert np.median(envs.reset(np.array([1, 2], np.int32))) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
def test_the_largest_number_is_no_bound(dtype: Any) -> None:
    largest = (np.finfo if np.dtype(dtype).kind == "f" else np.iinfo)(dtype).max
    for low in (-largest, 0):
        inputs = inputs_of(Box(low, largest, (7, 8, 3), dtype))
        assert image_scale(inputs.space) == (0.0, 1.0) and not inputs.space.is_bounded()
    tiny = inputs_of(Box(-largest, largest, (2, 2, 2), dtype))
    assert tiny.encode(np.full((2, 2, 2), 7, dtype)).tolist() == [7.0] * 8


NESTED = Dict({"a": Discrete(3, start=2), "b": Tuple((Box(0, 1, (2, 2)), MultiBinary(2))), "c": MultiDiscrete([2, 3])})


@pytest.mark.parametrize(
    "space",
    [
        NESTED,
        Discrete(5),
        MultiDiscrete([[2, 2], [3, 3]]),
        MultiBinary((2, 2)),
        Box(-1, 1, ()),
        Box(0, 1, (3, 3)),
        Box(0, 1, (4,), bool),
    ],
)
def test_other_observations_are_flattened_as_gymnasium_does(space: gymnasium.Space) -> None:
    """Also by the vector environment, whose last observations of cut episodes are flat, too."""
    inputs = inputs_of(space)
    sample = space.sample()
    np.testing.assert_array_equal(inputs.encode(sample), gymnasium.spaces.flatten(space, sample).astype(np.float32))
    assert inputs.space.contains(inputs.encode(sample))
    envs = make_envs(EnvConfig(num_envs=2), make_env=lambda: Odd(space))
    assert envs.reset(np.array([1, 2], np.int32)).shape == (2, *inputs.space.shape)
    for _ in range(4):
        step = envs.step(np.array([0, 1]))
    assert step.final_observations.shape == step.observations.shape
    assert inputs.space.contains(step.final_observations[0])
    envs.close()


def test_toy_text_plays_by_its_id() -> None:
    """FrozenLake's 16 fields; Blackjack's sum of the player, card of the dealer and usable ace."""
    for name, size in (("FrozenLake-v1", 16), ("Blackjack-v1", 32 + 11 + 2)):
        envs = make_envs(EnvConfig(name, num_envs=2))
        observations = [envs.reset(np.array([1, 2], np.int32)), envs.step(np.array([1, 0])).observations]
        assert all(of.shape == (2, size) and (of.sum(1) == (3 if size == 45 else 1)).all() for of in observations)
        envs.close()


def test_a_vector_of_bools_can_be_normalised() -> None:
    inputs = inputs_of(Box(0, 1, (4,), bool))
    network = ActorCritic(inputs.space, Discrete(2), SMALL, EnvConfig(normalize_observations=True))
    seen = torch.from_numpy(inputs.encode(np.array([True, False, True, True])))
    assert network._inputs(seen[None]).tolist() == [[1, 0, 1, 1]]  # mean 0 and variance 1, before the first update


@pytest.mark.parametrize("space", [Box(-1, 1, (0,)), Box(0, 1, (2, 0), np.uint8)])
def test_empty_actions_are_refused(space: gymnasium.Space) -> None:
    with pytest.raises(PalaError, match="are empty"):
        distribution_of(space)


def test_tiny_images_are_vectors_from_0_to_1() -> None:
    space = Box(0, 10, (5, 8, 3), np.uint8)
    inputs, image = inputs_of(space), np.full((5, 8, 3), 4, np.uint8)
    np.testing.assert_allclose(inputs.encode(image), np.full(120, 0.4))
    assert inputs.space.contains(inputs.encode(image))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (Sequence(Discrete(2)), "cannot be taken"),
        (Dict({"a": Discrete(2), "b": Text(5)}), "cannot be taken"),
        (Box(0, 255, (4, 84, 84, 3), np.uint8), "4 dimensions"),
        (Box(-1, 1, (0,)), "are empty"),
        (Dict({}), "are empty"),
    ],
)
def test_observations_that_are_refused(space: gymnasium.Space, words: str) -> None:
    with pytest.raises(PalaError, match=words):
        make_envs(EnvConfig(num_envs=1), make_env=lambda: Odd(space))


# ---- actions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        MultiDiscrete([3, 2, 5], start=[1, 0, -2]),
        MultiDiscrete([[2, 3], [4, 2]]),
        MultiDiscrete([2, 3], dtype=np.uint8),
        MultiBinary(3),
    ],
)
def test_several_choices_are_independent_ones(space: Any) -> None:
    """Log-probability and entropy against torch.distributions; the samples are elements of the space."""
    sizes = [2] * 3 if isinstance(space, MultiBinary) else space.nvec.reshape(-1).tolist()
    distribution, generator = distribution_of(space), torch.Generator().manual_seed(0)
    logits = torch.randn(7, sum(sizes), generator=generator)
    actions = distribution.sample(logits, generator)
    log_prob, entropy = distribution.log_prob_and_entropy(logits, actions)
    choices = [torch.distributions.Categorical(logits=part) for part in logits.split(sizes, -1)]
    expected = sum(choice.log_prob(action) for choice, action in zip(choices, actions.unbind(-1), strict=True))
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, sum(choice.entropy() for choice in choices))
    assert all(space.contains(action) for action in distribution.to_env(actions).numpy())
    greedy = distribution.sample(logits, generator, greedy=True)
    assert greedy.equal(torch.stack([part.argmax(-1) for part in logits.split(sizes, -1)], -1))
    many = distribution.sample(logits[:1].expand(20_000, -1), generator)
    for k, choice in enumerate(choices):
        frequencies = torch.bincount(many[:, k], minlength=sizes[k]) / len(many)
        torch.testing.assert_close(frequencies, choice.probs[0], rtol=0, atol=0.02)


def test_actions_that_a_network_rules_out_have_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.5]], requires_grad=True)
    log_prob, entropy = distribution_of(Discrete(3)).log_prob_and_entropy(logits, torch.tensor([2]))
    expected = torch.distributions.Categorical(logits=torch.tensor([[0.5, 1.5]]))
    torch.testing.assert_close(entropy, expected.entropy())
    torch.testing.assert_close(log_prob, expected.log_prob(torch.tensor([1])))
    (log_prob + entropy).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16])
def test_one_choice_has_the_dtype_of_its_space(dtype: Any) -> None:
    space = Discrete(3, start=5, dtype=dtype)
    actions = distribution_of(space).to_env(torch.arange(3)).numpy()
    assert [space.contains(action) for action in actions] == [True] * 3 and actions.tolist() == [5, 6, 7]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
def test_actions_of_a_box_have_its_dtype(dtype: Any) -> None:
    space = Box(0, 10, (2, 3), dtype)
    actions = distribution_of(space).to_env(torch.tensor([[-4.0, 0.2, 3.7, 9.6, 99.0, float("nan")]])).numpy()
    assert space.contains(actions[0])
    near = [0, 0.2, 3.7, 9.6, 10, 0] if np.issubdtype(dtype, np.floating) else [0, 0, 4, 10, 10, 0]
    assert actions.reshape(-1) == pytest.approx(near)


# ---- whole trainings, and what they are called -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (NESTED, MultiDiscrete([[2, 3], [4, 2]])),
        (IMAGES["MinAtar"], MultiBinary(3)),
        (IMAGES["reals"], Discrete(3, start=4)),
    ],
    ids=["nested", "MinAtar", "reals"],
)
def test_odd_environments_train_and_are_called_by_their_class(observations: Any, actions: Any, tmp_path: Any) -> None:
    config = configure(tmp_path, steps=60)
    config = replace(config, run=replace(config.run, name=""))
    (result,) = run_ranks(1, lambda comm: run_rank(comm, Request(config, UserCode(lambda: Odd(observations, actions)))))
    assert result.status == "completed" and result.run.name.startswith("Odd-20")
    record = run_folder.read(result.run)
    assert record["segments"][0]["environment"] == record["config"]["env"]["id"] == "Odd"
    evaluation = evaluate(result.run, 2, 2, Acting())
    assert (evaluation.returns, evaluation.environment) == ([4.0, 4.0], "Odd")
    assert read_run(result.run).game == "Odd"


class Grey(Odd):
    """Shows one shade at the beginning of an episode, then black."""

    def __init__(self, shade: int, size: tuple[int, ...] = (7, 8, 1)) -> None:
        super().__init__(Box(0, 255, size, np.uint8))
        self._shown = np.zeros(size, np.uint8)
        self._shade = shade

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._shown[:] = self._shade
        return self._shown, super().reset(seed=seed)[1]

    def step(self, action: Any) -> Any:
        self._shown[:] = 0  # the array that the reset gave
        return self._shown, *super().step(action)[1:]


def test_a_run_keeps_the_background_that_its_first_rank_saw(tmp_path: Any) -> None:
    """Through a resume, though the environment has become darker, and in its policy; a run of before has none."""
    config = configure(tmp_path, steps=60)

    def train(shade: int, config: Config, resume: Any = None, grey: Any = Grey) -> float:
        def main(comm: Any) -> Any:
            make_env = partial(grey, shade + 20 * comm.rank)
            return run_rank(comm, Request(config, UserCode(make_env), resume=resume))

        results = run_ranks(2, main)
        assert [getattr(result, "status", result) for result in results] == ["completed"] * 2
        assert run_folder.config_of(results[0].run).network.background == config.network.background
        policy = policy_of(results[0].run, trust_run=True)
        found: float = run_folder.read(results[0].run)["segments"][-1]["background"]
        assert policy.network.background == found
        return found

    def called(name: str, **network: Any) -> Config:
        return replace(
            config, network=replace(config.network, **network), run=replace(config.run, name=name), total_steps=60
        )

    assert train(102, config) == 0.4
    assert train(51, replace(config, total_steps=120), tmp_path / "r") == 0.4
    assert train(102, called("asked", background=0.1)) == 0.1
    with pytest.raises(AssertionError, match=r"'network.background' is 0.2, but the network of run .* with 0.1; leave"):
        train(102, replace(called("asked", background=0.2), total_steps=120), tmp_path / "asked")
    assert train(102, called("pixels"), grey=partial(Grey, size=(2, 2, 1))) == 0  # a vector
    assert train(102, replace(called("gorila"), algorithm="gorila", gorila=GORILA, total_steps=400)) == 0
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    del record["config"]["network"]["background"], record["segments"][-1]["background"]
    (tmp_path / "r" / "run.json").write_text(json.dumps(record))
    assert policy_of(tmp_path / "r", trust_run=True).network.background == 0
    before = run_folder.config_of(tmp_path / "r")
    assert before.network.background == 0
    assert train(102, replace(before, total_steps=180), tmp_path / "r") == 0


class OwnNetwork(nn.Module):
    def __init__(self, observation_space: Any, num_outputs: tuple[int, ...]) -> None:
        super().__init__()
        self.trunk = nn.Flatten()
        self.heads = nn.ModuleList(nn.Linear(56, outputs) for outputs in num_outputs)


GREY = UserCode(partial(Grey, 102))


@pytest.mark.parametrize("codes", [(GREY, UserCode(Sparkle)), (GREY, UserCode(GREY.make_env, OwnNetwork))])
@pytest.mark.parametrize("first", [0, 1])
def test_images_or_an_own_network_on_one_rank_alone_are_told(codes: Any, first: int, tmp_path: Any) -> None:
    config = configure(tmp_path, steps=60)

    def main(comm: Any) -> Any:
        return run_rank(comm, Request(config, codes[comm.rank ^ first]))

    assert ["is not that of rank 0" in str(result) for result in run_ranks(2, main)] == [True, True]


class Painted(Grey):
    """Draws its shade from the generator of the whole process."""

    def __init__(self) -> None:
        super().__init__(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._shade = np.random.randint(256)  # noqa: NPY002 - that very one
        return super().reset(seed=seed)


@pytest.mark.parametrize("vectorization", slow_but_for(["sync", "async"], "sync"))
def test_the_background_is_a_seeds_own(vectorization: Any) -> None:
    def found(seed: int, make_env: Any = Painted) -> Any:
        config = Config(seed=seed, env=EnvConfig(num_envs=2, vectorization=vectorization))
        with make_envs(config.env, make_env=make_env) as envs:
            return with_background(Alone("here"), config, envs).network.background

    assert found(1, partial(Grey, 51)) == 51 / 255
    assert found(1) == found(1) != found(2)


def test_an_environment_from_a_specification_is_called_by_that(tmp_path: Any) -> None:
    envs = make_envs(
        EnvConfig(num_envs=1), make_env=lambda: gymnasium.wrappers.TimeLimit(gymnasium.make("Acrobot-v1"), 9)
    )
    assert envs.name == "Acrobot-v1"
    assert EnvConfig(id="module:space/Env-v0").short_id == "Env-v0"


def test_a_module_is_imported_for_its_environments(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_my_own.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', lambda: gymnasium.make('CartPole-v1').unwrapped)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make_envs(EnvConfig(id="of_my_own:Mine-v0", num_envs=1))
    assert (envs.name, envs.observation_space.shape) == ("Mine-v0", (4,))
    for name, words in (
        ("of_my_own:Mien-v0", "did you mean 'Mine-v0'"), ("not_there:Mine-v0", "No module named 'not_there'"),
        ("of my own:Mine-v0", "No module named 'of my own'"), ("ale_py:ALE/Pong-v5", "did you mean 'ALE/Pong-v5'"),
    ):  # fmt: skip
        with pytest.raises(PalaError, match=words):
            make_envs(EnvConfig(id=name, num_envs=1))
