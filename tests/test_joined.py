"""Observations of images and vectors together: the rows that they become, the networks for them, whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch import nn

import pala
from pala.config import A2CConfig, Config, EnvConfig, EvaluationConfig, GorilaConfig, NetworkConfig, RunConfig
from pala.envs.spaces import Joined, inputs_of, vector_size
from pala.envs.vector import make_envs
from pala.gorila.networks import QNetwork
from pala.networks.make import make_tape
from pala.networks.network import ActorCritic, blank_observations
from pala.networks.tape import AutogradTape
from pala.system.errors import PalaError
from support.environments import Both

torch.set_num_threads(1)
SMALL = NetworkConfig((4, 8, 4), 16, (8,), background=0.0, precision="float32")
CAMERAS = Dict(
    {
        "camera": Box(0, 255, (8, 9, 3), np.uint8),
        "depth": Box(-1, 3, (10, 12, 1), np.float32),
        "empty": Box(0, 1, (0,)),
        "goal": Tuple((Discrete(3), Box(-1, 1, (2,), np.float64))),
        "tiny": Box(0, 10, (2, 2, 1), np.uint8),
    }
)


class OwnNetwork(nn.Module):
    """A network that takes the rows apart by itself."""

    def __init__(self, observation_space: Joined, num_outputs: tuple[int, ...]) -> None:
        super().__init__()
        self._space = observation_space
        self.linear = nn.Linear(64, 8)
        self.heads = nn.ModuleList(nn.Linear(9, outputs) for outputs in num_outputs)

    def trunk(self, rows: torch.Tensor) -> torch.Tensor:
        vectors, (picture,) = self._space.split(rows)
        assert vectors.shape[1:] == (1,) and picture.shape[1:] == (1, 8, 8) and float(picture.max()) <= 1
        return torch.cat([vectors, self.linear(picture.flatten(1))], -1)


def configure(folder: Path, steps: int, **network: Any) -> Config:
    return Config(
        total_steps=steps,
        env=EnvConfig(num_envs=8, restarts=0),
        network=replace(SMALL, **network),
        evaluation=EvaluationConfig(episodes=20, num_envs=2),
        run=RunConfig(str(folder), "both", console="none", tensorboard=False, threads=1),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_images_follow_the_vectors_in_one_row() -> None:
    """By hand: vectors in the order of the space, one-hot or scaled as alone; images scaled, channels first."""
    inputs = inputs_of(CAMERAS)
    CAMERAS.seed(0)
    sample = CAMERAS.sample()
    row = inputs.encode(sample)
    assert row.shape == inputs.space.shape and row.dtype == np.float32 and vector_size(inputs.space) == 9
    (vectors,), (cameras, depths) = inputs.space.split(row[None])
    one_hot, numbers = np.eye(3)[sample["goal"][0]], sample["goal"][1]
    np.testing.assert_allclose(vectors, [*one_hot, *numbers, *sample["tiny"].reshape(-1) / 10], rtol=1e-6)
    np.testing.assert_allclose(cameras, sample["camera"].transpose(2, 0, 1)[None] / 255, rtol=1e-6)
    np.testing.assert_allclose(depths, (sample["depth"].transpose(2, 0, 1)[None] + 1) / 4, rtol=1e-5, atol=1e-6)
    low, high = inputs.space.low, inputs.space.high
    assert (low[3:5] == -1).all() and (high == 1).all() and (low[5:] == 0).all()


def test_stacked_frames_of_a_dict_are_channels() -> None:
    env = gymnasium.wrappers.FrameStackObservation(Both(), 4)
    space = inputs_of(gymnasium.spaces.Dict({"picture": Box(0, 255, (4, 8, 8), np.uint8)})).space
    assert [image.shape for image in space.images] == [(4, 8, 8)]
    with pytest.raises(PalaError, match=r"Observations\['picture'\] have 4 dimensions \(4, 8, 8, 1\)"):
        inputs_of(env.observation_space)


def test_the_layout_of_an_image_in_a_dict_is_asked_for() -> None:
    space = Dict({"picture": Box(0, 255, (40, 60, 80), np.uint8), "number": Box(-1, 1, (1,))})
    with pytest.raises(PalaError, match=r"set 'env.image_layout'"):
        inputs_of(space)
    assert inputs_of(space, "channels_last").space.images[0].shape == (80, 40, 60)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.slow
def test_environments_give_rows(vectorization: Any) -> None:
    """Also of the last observations of cut episodes."""
    with make_envs(EnvConfig(num_envs=2, vectorization=vectorization), make_env=Both) as envs:
        rows, cut = [envs.reset(np.array([1, 2], np.int32))], []
        for _ in range(20):
            step = envs.step(np.zeros(2, np.int64))
            rows.append(step.observations)
            cut.append(step.final_observations)
        vectors, (pictures,) = envs.observation_space.split(np.concatenate(rows + cut))
    assert len(np.concatenate(cut)) and set(vectors.reshape(-1)) == {-1, 1}
    assert set(pictures.sum((1, 2, 3))) == {32}


# ---- networks --------------------------------------------------------------------------------------------------------


def test_heads_see_all_parts() -> None:
    """By hand: the images' features joined to the vectors, an MLP for each head of an actor-critic."""
    space = inputs_of(Dict({**CAMERAS.spaces, "far": Box(-np.inf, np.inf, (8, 9, 1))})).space
    torch.manual_seed(0)
    config = replace(SMALL, background=0.25)
    critic, values = ActorCritic(space, Discrete(3), config), QNetwork(space, Discrete(3), config)
    rows = torch.rand(5, *space.shape)
    for network in (critic, values):
        vectors, images = space.split(rows)
        less = [0.25, 0.25, 0.0] if network is critic else [0.0] * 3  # what has no bounds stays
        parts = zip(network.image_trunks, images, less, strict=True)
        seen = [trunk(image - background) for trunk, image, background in parts]
        joined = torch.cat([vectors, *seen], -1)
        trunks = [network.trunk, network.value_trunk] if network is critic else [network.trunk]
        expected = [head(trunk(joined)) for head, trunk in zip(network.heads, trunks, strict=True)]
        torch.testing.assert_close(network.outputs(rows), expected)
        assert joined.shape == (5, 9 + 3 * 16)
        network.outputs(rows)[0].sum().backward()
        assert all(float(p.grad.norm()) > 0 for part in network.image_trunks for p in part.parameters())
    blank = blank_observations(space, 5, torch.device("cpu"))
    assert isinstance(make_tape(critic, SMALL, 1, blank), AutogradTape)
    with pytest.raises(PalaError, match="would round vector observations"):
        make_tape(critic, replace(SMALL, precision="bfloat16"), 1, blank)


def test_normalisation_leaves_images_alone() -> None:
    space, env = inputs_of(CAMERAS).space, EnvConfig(normalize_observations=True)
    network = ActorCritic(space, Discrete(3), SMALL, env)
    network.observation_moments.mean += 2
    rows = torch.rand(5, *space.shape)
    torch.testing.assert_close(network._inputs(rows), torch.cat([rows[:, :9] - 2, rows[:, 9:]], 1))
    images = inputs_of(Dict({"picture": Box(0, 255, (8, 8, 1), np.uint8)})).space
    assert all(output.isfinite().all() for output in ActorCritic(images, Discrete(3), SMALL)(torch.rand(2, 64)))
    with pytest.raises(PalaError, match=r"'env.normalize_observations' is for vectors"):
        ActorCritic(images, Discrete(3), SMALL, env)


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "vectorization"), [("none", "sync"), ("gru", "async")])
@pytest.mark.slow
def test_a_run_with_images_vectors_and_masks_from_end_to_end(tmp_path: Path, memory: str, vectorization: Any) -> None:
    """Trained, evaluated, resumed, loaded, exported: a masked action would end each."""
    env = EnvConfig(num_envs=2, restarts=0, vectorization=vectorization, normalize_observations=True)
    config = replace(configure(tmp_path, 400, memory=memory), env=env)
    result = pala.fit(config, make_env=Both)
    assert result.status == "completed" and result.evaluation.episodes == 20
    result = pala.fit(replace(config, total_steps=800), resume=result.run)
    assert result.status == "completed" and result.global_steps >= 800
    policy = pala.load_policy(result.run)
    assert len(policy.network.observation_moments.mean) == 1
    envs = pala.make_envs(result.run, num_envs=3)
    observations, infos = envs.reset(seed=0)
    envs.close()
    actions = policy.act(observations, greedy=True, action_masks=infos["action_mask"])
    policy.reset()
    first = {key: part[0] for key, part in observations.items()}
    assert actions.shape == (3,)
    assert policy.act(first, greedy=True, action_masks=infos["action_mask"][0]) == actions[0]
    policy.reset()
    policy.export(tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    each = [{key: part[i] for key, part in observations.items()} for i in range(3)]
    rows = torch.from_numpy(np.stack([policy.inputs.encode(observation) for observation in each]))
    state = {"state": torch.zeros(3, policy.network.state_size)} if memory != "none" else {}
    expected = policy.network.outputs(rows)
    torch.testing.assert_close(program(rows, **state)[:2], (expected[0], expected[1].squeeze(-1)))
    with pytest.raises(PalaError, match=r"are of shape \(8, 8\), but the policy takes \(8, 8, 1\)"):
        policy.act(first | {"picture": first["picture"][..., 0]})


@pytest.mark.slow
def test_ones_own_network_takes_rows_apart(tmp_path: Path) -> None:
    config = replace(configure(tmp_path, 200), network=NetworkConfig(precision="float32"))
    result = pala.fit(config, make_env=Both, make_network=OwnNetwork)
    assert result.status == "completed" and pala.load_policy(result.run).network.is_own


class Unmasked(gymnasium.Wrapper):
    """Has no third action and gives no masks."""

    def __init__(self) -> None:
        super().__init__(Both())
        self.action_space = Discrete(2)

    def reset(self, **arguments: Any) -> Any:
        return self.env.reset(**arguments)[0], {}

    def step(self, action: Any) -> Any:
        return *self.env.step(action)[:4], {}


@pytest.mark.slow
def test_gorila_plays_images_and_vectors(tmp_path: Path) -> None:
    gorila = GorilaConfig(replay_capacity_steps=500, min_replay_steps=50, minibatch_size=8)
    config = replace(configure(tmp_path, 300), algorithm="gorila", gorila=gorila)
    result = pala.fit(config, make_env=Unmasked)
    assert result.status == "completed" and result.evaluation.episodes == 20


@pytest.mark.slow
def test_a_policy_learns_what_only_both_parts_tell(tmp_path: Path) -> None:
    """By the picture or the number alone the mean return is 2 of 4."""
    config = replace(configure(tmp_path, 30_000), a2c=A2CConfig(learning_rate=3e-3))
    result = pala.fit(config, make_env=Both)
    assert result.evaluation.mean_return > 3.5
