"""Short trainings on a GPU, which all ranks share. Skipped where there is none; tests/test_tape.py, test_wire.py and
test_codecs.py have what is smaller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pala.a2c.agent import make_agent
from pala.a2c.update import Rollout
from pala.config import A2CConfig, Config, EnvConfig, NetworkConfig
from pala.envs.vector import make_envs
from pala.networks.graphed_tape import GraphedTape
from pala.run.checkpoint import load_policy
from support.helpers import CARTPOLE, record_of
from support.mpi import Launcher
from support.run_folders import all_intervals, intervals, states_of, total

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BREAKOUT = [
    "--env.id", "ALE/Breakout-v5", "--evaluation.episodes", "0", "--run.log-interval-s", "0.5", "--run.no-tensorboard",
    "--run.name", "r",
]  # fmt: skip
EXCHANGES = {
    "gossip": ["--exchange.kind", "gossip", "--exchange.mixing", "uniform"],
    "gossip in bfloat16": ["--exchange.mixing", "uniform", "--exchange.compression", "bfloat16"],
    "gossip of a part": ["--exchange.mixing", "uniform", "--exchange.compression", "top_k"],
    "paired": ["--exchange.mixing", "paired"],
    "paired in step": ["--exchange.mixing", "paired", "--exchange.max-staleness", "0"],
    "paired in bfloat16": ["--exchange.mixing", "paired", "--exchange.compression", "bfloat16"],
    "paired by autograd": ["--exchange.mixing", "paired", "--network.passes", "autograd"],
    "shared memory": ["--exchange.kind", "shared_memory"],
    "allreduce": ["--exchange.kind", "allreduce"],
}


def assert_trained_on_the_gpu(run: Path, ranks: int, mixes: bool = False) -> None:
    """And exchanged models, if the exchange `mixes`."""
    record, last_interval = record_of(run), lambda rank: intervals(run, rank)[-1]
    assert record["completed"] and "cuda" in record["segments"][-1]["device"]
    assert sum(record.get("updates_skipped", 0) for record in all_intervals(run)) == 0
    assert all(record["updates"] > 10 for record in map(last_interval, range(ranks)))
    assert not mixes or all(total(run, "models_mixed", rank) > 5 for rank in range(ranks))
    assert total(run, "models_refused") == 0
    for state in states_of(run, ranks):
        assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    named, _ = load_policy(run / "policy.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in named.values())


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
def test_ranks_that_share_a_gpu_train(exchange: list[str], any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.train(
        2, *BREAKOUT, *exchange, "--run.device", "cuda", "--network.precision", "bfloat16",
        "--a2c.momentum", "0.5", "--total-steps", "8000", cwd=tmp_path,
    )  # fmt: skip
    assert job.status == 0, job.output
    assert_trained_on_the_gpu(tmp_path / "runs/r", 2, mixes="allreduce" not in exchange)


def test_independent_learners_and_vectors_train(any_mpi: Launcher, tmp_path: Path) -> None:
    """A network without written-out passes, and running moments that travel exact beside rounded parameters."""
    for name, exchange in (("alone", ["none"]), ("moments", ["gossip", "--exchange.compression", "bfloat16"])):
        job = any_mpi.train(
            2, *CARTPOLE, "--run.name", name, "--run.device", "cuda", "--env.normalize-observations",
            "--env.normalize-rewards", "--total-steps", "6000", "--exchange.kind", *exchange, cwd=tmp_path,
        )  # fmt: skip
        assert job.status == 0, job.output
        assert_trained_on_the_gpu(tmp_path / "runs" / name, 2, mixes=name == "moments")


def test_gorila_trains_on_the_gpu(any_mpi: Launcher, tmp_path: Path) -> None:
    job = any_mpi.train(
        2, *BREAKOUT, "--algorithm", "gorila", "--run.device", "cuda", "--gorila.min-replay-steps", "500",
        "--gorila.replay-capacity-steps", "5000", "--total-steps", "3000", cwd=tmp_path,
    )  # fmt: skip
    assert job.status == 0, job.output
    assert_trained_on_the_gpu(tmp_path / "runs/r", 2)


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_run_goes_on_on_another_device(devices: tuple[str, str], any_mpi: Launcher, tmp_path: Path) -> None:
    first, second = devices
    job = any_mpi.train(2, *BREAKOUT, "--run.device", first, "--total-steps", "2000", cwd=tmp_path)
    assert job.status == 0, job.output
    arguments = ["--resume", "runs/r", "--run.device", second, "--total-steps", "4000"]
    job = any_mpi.train(2, *arguments, cwd=tmp_path)
    assert job.status == 0, job.output
    assert ("of another kind of device" in job.output) == (first != second), job.output
    assert record_of(tmp_path / "runs/r")["completed"]


def parameters_after(device: str, passes: str, updates: int = 3) -> torch.Tensor:
    """Of as many updates on made-up observations, actions and rewards; in float32, on the CPU."""
    config = Config(
        env=EnvConfig(id="ALE/Breakout-v5", num_envs=4), network=NetworkConfig(passes=passes, precision="float32"),
        a2c=A2CConfig(rollout_steps=3, momentum=0.5),
    )  # fmt: skip
    envs, draw = make_envs(config.env), np.random.default_rng(5)
    parts = make_agent(0, config, envs, torch.device(device))
    assert isinstance(parts.a2c.tape, GraphedTape) == (device == "cuda" and passes == "auto")
    a2c, on_device = parts.a2c, lambda array: torch.from_numpy(array).to(device)
    for _ in range(updates):
        rollout = Rollout()
        a2c.tape.begin()
        for _ in range(config.a2c.rollout_steps):
            observations = draw.integers(0, 256, (4, *envs.observation_space.shape), np.uint8)
            policy_output, value = a2c.tape.forward(on_device(observations))
            rollout.policy_outputs.append(policy_output)
            rollout.values.append(value.squeeze(-1))
            rollout.actions.append(on_device(draw.integers(0, 4, 4)))
            rollout.rewards.append(on_device(draw.normal(size=4).astype(np.float32)))
            rollout.ended.append(on_device(np.zeros(4, np.float32)))
        loss = a2c.differentiate(rollout, on_device(draw.normal(size=4).astype(np.float32)))
        assert a2c.step(loss, 7e-4).applied
    return parts.flat.data.cpu()


@pytest.mark.parametrize("passes", ["auto", "autograd"])
def test_updates_on_the_gpu_are_those_of_the_cpu(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    begin, on_cpu = parameters_after("cpu", "auto", updates=0), parameters_after("cpu", "auto")
    moved = float((on_cpu - begin).norm())
    assert moved > 0 and float((parameters_after("cuda", passes) - on_cpu).norm()) < 0.01 * moved
