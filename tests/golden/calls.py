"""Every call that the golden files need into PALA: where its modules or names change, this file alone is mended."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import pala
from pala.report import runs as report_runs
from pala.run.metrics import read_run
from pala.run.run_folder import read as read_record

Values = dict[str, Any]


# ---- runs ------------------------------------------------------------------------------------------------------------


def answers_of(run: Path, observations: list[list[float]], best: bool = False) -> Values:
    """Return what a run's policy does and computes for these observations."""
    policy = pala.load_policy(run, best=best)
    batch = np.array(observations, np.float32)
    with torch.inference_mode():
        outputs = policy.network.outputs(torch.from_numpy(batch))
    return {
        "source": policy.source,
        "global_steps": policy.global_steps,
        "epsilon": policy.epsilon,
        "actions": policy.act(batch, greedy=True).tolist(),
        "outputs": [output.tolist() for output in outputs],
    }


def evaluated(run: Path) -> Values:
    """Return the scores of a run's greedy policy in three episodes."""
    evaluation = pala.evaluate_policy(run, episodes=3, greedy=True, seed=7, threads=1)
    return {"policy": evaluation.policy, "global_steps": evaluation.global_steps, "returns": list(evaluation.returns)}


def settings_of(run: Path) -> Values:
    """Return some of a run's settings, as `pala.load_config` reads them."""
    config = pala.load_config(run)
    return {
        "algorithm": config.algorithm,
        "total_steps": config.total_steps,
        "env.id": config.env.id,
        "env.num_envs": config.env.num_envs,
        "env.normalize_observations": config.env.normalize_observations,
        "network.mlp_hidden": list(config.network.mlp_hidden),
        "a2c.learning_rate": config.a2c.learning_rate,
        "a2c.momentum": config.a2c.momentum,
        "exchange.kind": config.exchange.kind,
        "exchange.mixing": config.exchange.mixing,
        "exchange.compression": config.exchange.compression,
        "gorila.replay_capacity_steps": config.gorila.replay_capacity_steps,
        "evaluation.episodes": config.evaluation.episodes,
        "run.dir": config.run.dir,
        "run.name": config.run.name,
    }


def config_to_resume(run: Path, steps: int, ranks: int) -> pala.Config:
    """Return the settings with which a test continues a run on so many ranks, up to a budget of so many steps."""
    config = pala.load_config(run)
    own = replace(config.run, dir=str(run.parent), name=run.name, console="none", log_interval_s=0.1)
    own = replace(own, checkpoint_interval_s=1e6)  # at the begin and the end alone
    gorila = replace(config.gorila, num_shards=ranks)  # a rank serves one at most
    evaluation = replace(config.evaluation, episodes=0)
    return replace(config, total_steps=steps, run=own, gorila=gorila, evaluation=evaluation)


def reported(run: Path) -> Values:
    """Return what a report reads of a run."""
    data, ranks = report_runs.read(run)
    return {
        "num_records": [len(records) for records in ranks],
        "num_episodes": len(data.returns),
        "sum_of_returns": float(data.returns.sum()),
        "last_episode_steps": float(data.steps.max()),
        "end_steps": data.end_steps,
        "training_s": data.training_s,
        "mean_return_of_evaluation": data.evaluation and data.evaluation["mean_return"],
        "status": data.last["status"],
        "completed": data.record["completed"],
    }


def record_of(run: Path) -> Values:
    """Return `run.json`, as PALA reads it."""
    return read_record(run)


def records_of(run: Path) -> list[list[Values]]:
    """Return every rank's records of metrics, as PALA reads them."""
    return read_run(run)


def keys_of(record: Values) -> Values:
    """Return the sorted keys of `run.json`: its own, of its settings (dotted), and of its newest segment."""
    return {
        "record": sorted(record),
        "config": sorted(_dotted(record["config"])),
        "segment": sorted(record["segments"][-1]),
    }


def _dotted(table: Values, before: str = "") -> list[str]:
    return [
        name
        for key, value in table.items()
        for name in (_dotted(value, f"{before}{key}.") if isinstance(value, dict) else [before + key])
    ]


def metrics_keys(ranks: list[list[Values]]) -> dict[str, list[str]]:
    """Return the sorted keys of each type of record."""
    keys: dict[str, set[str]] = {}
    for record in (record for records in ranks for record in records):
        keys.setdefault(record["type"], set()).update(record)
    return {type_: sorted(of) for type_, of in keys.items()}


# ---- weights ---------------------------------------------------------------------------------------------------------


def weights_of(arguments: list[str], folder: Path) -> tuple[Values, Path]:
    """Train one rank in this folder, and return the hash and some of its policy's parameters, and its run."""
    command = [sys.executable, "-m", "pala.train", *arguments, "--run.name", "r"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    run = folder / "runs" / "r"
    tensors = dict(sorted(load_file(run / "policy.safetensors").items()))
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    firsts = {name: tensor.flatten()[:4].tolist() for name, tensor in tensors.items()}
    norms = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
    return {"sha256": hashlib.sha256(data).hexdigest(), "first_values": firsts, "norms": norms}, run


def machine() -> Values:
    """Return what bits depend on: libraries choose their code by maker and instructions of the processor."""
    said = dict(re.findall(r"(vendor_id|flags)\s*: (.*)", Path("/proc/cpuinfo").read_text()))
    vectors = [flag for flag in said.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": " ".join([said.get("vendor_id", "unknown"), *sorted(vectors)]),
    }
