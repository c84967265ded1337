"""What a memory gives and costs: a T-maze, CartPole without velocities, ranks side by side, and the speed on Atari.

    python results/memory/memory.py maze lstm 1          # task, variant (lstm, gru, none), seed
    mpirun -np 2 python results/memory/memory.py maze lstm 1 gossip 160000       # exchange, steps
    mpirun -np 2 python results/memory/memory.py maze lstm 1 allreduce 160000
    python results/memory/memory.py cartpole lstm 1
    python results/memory/memory.py maze lstm 1 gossip 80000 linear              # with a rate that falls to 0
    python results/memory/memory.py speed                # interleaved rounds of each variant on Pong

appends to results/memory/memory.jsonl.
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import pala
from pala.config import A2CConfig, Config, EnvConfig, EvaluationConfig, ExchangeConfig, NetworkConfig, RunConfig
from pala.run import run_folder

HERE = Path(__file__).resolve().parent
TMaze = runpy.run_path(str(HERE.parents[1] / "examples/t_maze.py"))["TMaze"]
STEPS = {"maze": 80_000, "cartpole": 100_000}
INTERVALS = 10  # numbers of a curve
SPEED_ROUNDS = 6
SPEED_UPDATES = 10


class WithoutVelocities(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the cart's place and the pole's angle alone."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        """Leave the velocities out."""
        return observation[::2]


TASKS: dict[str, Any] = {"maze": TMaze, "cartpole": WithoutVelocities}


def write(record: dict[str, Any]) -> None:
    """Append a record, with the command and versions."""
    versions = {"gymnasium": gymnasium.__version__, "torch": torch.__version__, "python": platform.python_version()}
    words = " ".join(["python results/memory/memory.py", *sys.argv[1:]])
    with (HERE / "memory.jsonl").open("a") as file:
        file.write(json.dumps({"command": words, "versions": versions} | record) + "\n")


def curve_of(run: Path, steps: int, ranks: int) -> list[float | None]:
    """Return the mean return of the training episodes that ended in each tenth of the budget, over all ranks."""
    ended: list[list[float]] = [[] for _ in range(INTERVALS)]
    for file in (run / "metrics").glob("rank-*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["type"] == "episode":
                at = min(record["local_steps"] * ranks, steps) - 1
                ended[at * INTERVALS // steps].append(record["return"])
    return [round(statistics.fmean(returns), 3) if returns else None for returns in ended]


def train(task: str, memory: Any, seed: int, exchange: Any = "gossip", steps: int = 0, decay: Any = "none") -> None:
    """Train and evaluate once; rank 0 appends the figures."""
    steps = steps or STEPS[task]
    config = Config(
        total_steps=steps, seed=seed, env=EnvConfig(f"{task}-{memory}"), network=NetworkConfig(memory=memory),
        a2c=A2CConfig(rollout_steps=20, learning_rate_decay=decay), exchange=ExchangeConfig(exchange),
        run=RunConfig(dir=os.environ.get("MEMORY_RUNS", "runs"), console="none", threads=1, tensorboard=False),
        evaluation=EvaluationConfig(episodes=100 if task == "maze" else 30),
    )  # fmt: skip
    begin = time.perf_counter()
    result = pala.fit(config, make_env=TASKS[task])
    if not result.leads:
        return
    assert result.evaluation is not None
    segment = run_folder.read(result.run)["segments"][-1]
    write(
        {
            "commit": segment["git_commit"],
            "task": task,
            "memory": memory,
            "seed": seed,
            "exchange": exchange,
            "learning_rate": config.a2c.learning_rate,
            "learning_rate_decay": decay,
            "ranks": segment["ranks"],
            "steps": result.global_steps,
            "mean_return": result.evaluation.mean_return,
            "standard_error": result.evaluation.standard_error,
            "curve": curve_of(result.run, steps, segment["ranks"]),
            "took_s": round(time.perf_counter() - begin),
        }
    )


def speed() -> None:
    """Measure CPU seconds of training a step of Pong, variant by variant, in rounds."""
    from pala.a2c.agent import make_agent
    from pala.a2c.learner import Learner
    from pala.comm.mpi_process import start_mpi
    from pala.envs.vector import make_envs
    from pala.exchange.base import Setup
    from pala.exchange.budget import ExchangeState
    from pala.exchange.none import NoExchange
    from pala.run.agent import make_generator
    from pala.run.provenance import provenance

    commit, comm = provenance()["git_commit"], start_mpi()
    torch.set_num_threads(1)
    learners = {}
    for name, network in {
        "none": NetworkConfig(background=0.0, precision="float32"),
        "none, autograd": NetworkConfig(background=0.0, precision="float32", passes="autograd"),
        "lstm": NetworkConfig(background=0.0, precision="float32", memory="lstm"),
        "gru": NetworkConfig(background=0.0, precision="float32", memory="gru"),
    }.items():
        config = replace(Config(), network=network)
        envs, device = make_envs(config.env), torch.device("cpu")
        agent = make_agent(0, config, envs, device)
        agent.generator = make_generator(1, 0, device)
        exchange = NoExchange(Setup(comm, agent.flat.data, config, ExchangeState([0])))
        learners[name] = Learner(agent, exchange)
        learners[name].begin(envs.reset(np.arange(config.env.num_envs, dtype=np.int32)))
        learners[name]._advance()
    steps = Config().steps_per_update * SPEED_UPDATES
    for number in range(SPEED_ROUNDS):
        cpu_s = {}
        for name, learner in learners.items():
            begin = time.process_time()
            for _ in range(SPEED_UPDATES):
                learner._advance()
            cpu_s[name] = round(1e6 * (time.process_time() - begin) / steps, 1)
        write({"commit": commit, "task": "speed", "round": number, "cpu_us_a_step": cpu_s})


if __name__ == "__main__":
    if sys.argv[1] == "speed":
        speed()
    else:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:5], *map(int, sys.argv[5:6]), *sys.argv[6:])
