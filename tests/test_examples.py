"""The examples of gossip, run as a reader would run them: alone, and with two ranks. Others are in `test_python`."""

from __future__ import annotations

import importlib.util
import math
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pala
from support import REPOSITORY
from support.mpi import Launcher

EXAMPLES = REPOSITORY / "examples"
SMALL = {
    "classifier": ["--total-images", "3200"],
    "ppo": ["--total-steps", "10240"],
    "stable_baselines3": ["--total-steps", "10240"],
}
NEEDS = {"classifier": "sklearn", "stable_baselines3": "stable_baselines3"}
SAYS = re.compile(r"(?:test accuracy|mean return) ([\d.]+) after ([\d,]+) (?:images|steps) of (\d) ranks")


def arguments(name: str) -> list[str]:
    """The words that run an example on a small budget; skips the test where its package is not installed."""
    if (package := NEEDS.get(name)) is not None:
        pytest.importorskip(package, reason=f"the example needs {package}, which is not installed")
    return [str(EXAMPLES / f"gossip_{name}.py"), *SMALL[name]]


def said(output: str) -> tuple[float, int, int]:
    """The score, the steps and the ranks of the one line that an example prints."""
    lines = SAYS.findall(output)
    assert len(lines) == 1, output
    return float(lines[0][0]), int(lines[0][1].replace(",", "")), int(lines[0][2])


def test_every_example_of_gossip_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("gossip_*.py")} == {f"gossip_{name}" for name in SMALL}
    ppo = (EXAMPLES / "gossip_ppo.py").read_text()
    assert len(ppo.splitlines()) < 250, "one readable file"


@pytest.mark.slow
def test_an_example_alone(tmp_path: Path) -> None:
    """Without mpirun; and it learns: chance is a return of about 20."""
    words = arguments("ppo")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    score, steps, ranks = said(done.stdout)
    assert int(words[-1]) <= steps <= int(words[-1]) + 256 and ranks == 1
    assert score > 40


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", list(SMALL))
def test_an_example_on_two_ranks(name: str, any_mpi: Launcher, tmp_path: Path) -> None:
    words = arguments(name)
    done = any_mpi.start("-np", "2", sys.executable, *words, cwd=tmp_path).wait()
    assert done.status == 0, done.output
    score, steps, ranks = said(done.output)
    assert steps >= int(words[-1]) and ranks == 2
    assert score > (0.5 if name == "classifier" else 20)


def test_without_stable_baselines3_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)  # an import of it fails
    with pytest.raises(SystemExit, match="pip install stable-baselines3"):
        runpy.run_path(str(EXAMPLES / "gossip_stable_baselines3.py"))


@pytest.mark.slow
def test_ranks_of_stable_baselines3_play_in_other_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    from_package = pytest.importorskip("stable_baselines3", reason="the package of the example is not installed")
    seeds: list[int] = []
    monkeypatch.setattr(from_package.PPO, "learn", lambda model, *_, **__: seeds.extend(model.get_env()._seeds))
    example = runpy.run_path(str(EXAMPLES / "gossip_stable_baselines3.py"))
    for rank in range(3):
        gossip = SimpleNamespace(rank=rank, living=[-1], signal=None)  # the score is another rank's
        monkeypatch.setattr(pala, "Gossip", lambda *_, gossip=gossip, **__: nullcontext(gossip))
        assert example["main"](10, seed=1) == 0
    assert len(set(seeds)) == 3 * example["NUM_ENVS"]


# ---- PPO's parts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ppo() -> Any:
    spec = importlib.util.spec_from_file_location("gossip_ppo", EXAMPLES / "gossip_ppo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gossip_ppo"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_ppos_advantages_are_those_of_the_sum(ppo: Any) -> None:
    """GAE's equation 16, written as the sum that it is, up to the end of each episode."""
    torch.manual_seed(0)
    steps, envs, discount, gae_lambda = 7, 2, 0.9, 0.8
    values, rewards, last = torch.randn(steps, envs), torch.randn(steps, envs), torch.randn(envs)
    ends = torch.zeros(steps, envs)
    ends[2, 0] = ends[6, 1] = 1
    rollout = ppo.Rollout(values, values, values, values, rewards, ends)
    found = rollout.advantages(last, discount, gae_lambda)
    following = torch.cat([values[1:], last[None]])
    for env in range(envs):
        for begin in range(steps):
            total = 0.0
            for step in range(begin, steps):
                future = 0.0 if ends[step, env] else discount * float(following[step, env])
                delta = float(rewards[step, env]) + future - float(values[step, env])
                total += (discount * gae_lambda) ** (step - begin) * delta
                if ends[step, env]:
                    break
            assert math.isclose(float(found[begin, env]), total, rel_tol=1e-4, abs_tol=1e-5)


def test_ppo_counts_whole_episodes_and_adds_the_value_of_what_was_cut(ppo: Any) -> None:
    """Episodes of at most 5 steps: the last reward is 1 and the discounted value of what would have come."""
    torch.manual_seed(0)
    envs = ppo.gymnasium.make_vec(
        "CartPole-v1", 2, "sync", max_episode_steps=5, vector_kwargs={"autoreset_mode": ppo.SAME_STEP}
    )
    agent, rollout = ppo.Agent(envs.single_observation_space, 2), ppo.Rollout.empty(12, envs)
    torch.nn.init.zeros_(agent.value[-1].weight)
    torch.nn.init.constant_(agent.value[-1].bias, 3.0)
    player = ppo.Player(envs, agent, seed=0)
    assert player.play(rollout, discount=0.5).tolist() == [3.0, 3.0]
    assert player.returns == [[5.0, 5.0]] * 2
    assert rollout.ends[:, 0].nonzero().flatten().tolist() == [4, 9]
    assert rollout.rewards[:, 0].tolist() == [1.0] * 4 + [2.5] + [1.0] * 4 + [2.5] + [1.0] * 2


def test_ppo_adds_no_value_where_the_time_limit_and_the_end_come_together(ppo: Any) -> None:
    class Last(ppo.gymnasium.Env):
        observation_space, action_space = ppo.gymnasium.spaces.Box(0, 1, (1,)), ppo.gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.ones(1, np.float32), 1.0, True, True, {}

    envs = ppo.gymnasium.vector.SyncVectorEnv([Last], autoreset_mode=ppo.SAME_STEP)
    rollout = ppo.Rollout.empty(2, envs)
    ppo.Player(envs, ppo.Agent(envs.single_observation_space, 2), seed=0).play(rollout, discount=0.5)
    assert rollout.rewards.tolist() == [[1.0], [1.0]]


@pytest.mark.slow
def test_ppo_plays_atari(ppo: Any) -> None:
    """Images in bytes, rewards clipped for learning, and an update by them."""
    envs = ppo.make_envs("Breakout", 2)
    agent = ppo.Agent(envs.single_observation_space, int(envs.single_action_space.n))
    rollout = ppo.Rollout.empty(4, envs)
    before = [parameter.detach().clone() for parameter in agent.parameters()]
    last = ppo.Player(envs, agent, seed=0).play(rollout, discount=0.99)
    assert rollout.observations.shape == (4, 2, 4, 84, 84) and rollout.observations.dtype == torch.uint8
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    ppo.update(agent, optimizer, rollout, rollout.advantages(last, 0.99, 0.95), ppo.ATARI, left=1.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))
    envs.close()
