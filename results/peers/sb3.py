"""Train Stable-Baselines3's A2C or PPO on an Atari game until the mean of 100 episodes is at a target.

    python sb3.py a2c Breakout --target 30.5 --seed 1 --minutes 60 --output a2c-Breakout-1.csv

Settings: rl-baselines3-zoo's of Atari (hyperparams/a2c.yml and ppo.yml; PPO's rate and clip range fall over 10 million
steps). A line of the output is an episode: seconds since training began, steps of all environments, unclipped return.
"""

import argparse
import csv
import platform
import time
from collections import deque
from pathlib import Path

import ale_py
import gymnasium
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

STEPS = 10_000_000
NUM_ENVS = {"a2c": 16, "ppo": 8}


class Record(BaseCallback):
    """Writes each episode, and ends training at the target or at the limit of time."""

    def __init__(self, writer, target, limit_s):
        super().__init__()
        self._writer, self._target, self._limit_s = writer, target, limit_s
        self._returns = deque(maxlen=100)

    def _on_training_start(self):
        self._begin_s = time.perf_counter()

    def _on_step(self):
        took_s = time.perf_counter() - self._begin_s
        for info in self.locals["infos"]:
            if "episode" in info:
                self._returns.append(info["episode"]["r"])
                self._writer.writerow([f"{took_s:.2f}", self.num_timesteps, info["episode"]["r"]])
        is_there = len(self._returns) == 100 and sum(self._returns) / 100 >= self._target
        return not is_there and took_s < self._limit_s


def make_model(algorithm, environments, seed):
    """With rl-baselines3-zoo's settings."""
    if algorithm == "a2c":
        optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
        return stable_baselines3.A2C(
            "CnnPolicy", environments, ent_coef=0.01, vf_coef=0.25, policy_kwargs=optimizer, seed=seed
        )
    return stable_baselines3.PPO(
        "CnnPolicy", environments, n_steps=128, n_epochs=4, batch_size=256, vf_coef=0.5, ent_coef=0.01, seed=seed,
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0), clip_range=LinearSchedule(0.1, 0.0, 1.0),
    )  # fmt: skip


def main():
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["a2c", "ppo"])
    parser.add_argument("game")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--environments", choices=["dummy", "subproc"], default="subproc")
    parser.add_argument("--output", type=Path, required=True)
    command = parser.parse_args()
    gymnasium.register_envs(ale_py)
    kind = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[command.environments]
    environments = make_atari_env(
        f"{command.game}NoFrameskip-v4", n_envs=NUM_ENVS[command.algorithm], seed=command.seed, vec_env_cls=kind
    )
    model = make_model(command.algorithm, VecFrameStack(environments, n_stack=4), command.seed)
    with command.output.open("w", newline="") as file:
        versions = f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}, "
        versions += (
            f"gymnasium {gymnasium.__version__}, ale-py {ale_py.__version__}, Python {platform.python_version()}"
        )
        file.write(f"# {versions}; {torch.get_num_threads()} threads, {command.environments}\n")
        writer = csv.writer(file)
        writer.writerow(["seconds", "steps", "return"])
        model.learn(STEPS, callback=Record(writer, command.target, 60 * command.minutes))
    environments.close()


if __name__ == "__main__":
    main()
