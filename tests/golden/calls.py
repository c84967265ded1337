"""Every call that the golden files need into PALA: where its modules or names change, this file alone is mended.

What is encoded is described by values (`wire.json`); `test_golden.py` compares what these functions give.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from safetensors.torch import load_file

import pala
from explorer.explore import Explorer
from explorer.states import Case
from pala.config import EnvConfig, ExchangeConfig, GorilaConfig
from pala.exchange.budget import Stop
from pala.exchange.gossip.codecs import Codec, make_codec
from pala.exchange.gossip.messages import Kind, gossip_sizes
from pala.exchange.gossip.models import ReceiveBuffer, SendBuffer
from pala.exchange.wire import Format, Message, Refusal, Wire
from pala.gorila.messages import Kind as GorilaKind
from pala.gorila.node import Formats, Rules
from pala.gorila.replay import Batch, Experience
from pala.report import runs as report_runs
from pala.run.metrics import read_run
from pala.run.run_folder import read as read_record

Values = dict[str, Any]
CPU = torch.device("cpu")


# ---- messages --------------------------------------------------------------------------------------------------------


def encode(case: Values) -> bytes:
    """Return the bytes that a case of `wire.json` puts on the wire."""
    return (_encode_gossip if case["algorithm"] == "gossip" else _encode_gorila)(case)


def decode(case: Values, data: bytes) -> Values:
    """Return what these bytes say, in the terms of `wire.json`; an error says that they were refused."""
    return (_decode_gossip if case["algorithm"] == "gossip" else _decode_gorila)(case, np.frombuffer(data, np.uint8))


def kinds() -> dict[str, set[str]]:
    """Return the names of all kinds of messages, of gossip and of Gorila."""
    return {"gossip": {kind.name for kind in Kind}, "gorila": {kind.name for kind in GorilaKind}}


def _header(case: Values, kinds: Any, format_: Format = Format.FLOAT32) -> Message:
    header = case["header"]
    steps = np.array(header["local_steps"], np.uint64)
    kind, stop = kinds[header["kind"]], Stop[header["stop"]]
    return Message(kind, header["sender"], header["round"], header["weight"], stop, steps, format_)


def _told(message: Message) -> Values:
    """Return a decoded header as `wire.json` has it."""
    return {
        "kind": message.kind.name,
        "sender": message.sender,
        "round": message.round,
        "weight": message.weight,
        "stop": message.stop.name,
        "local_steps": message.steps_by_rank.tolist(),
    }


def _decoded(wire: Wire, data: np.ndarray) -> Message:
    message = wire.decode(data)
    if isinstance(message, Refusal):
        raise ValueError(message.reason)
    return message


def _gossip(case: Values, parameters: list[float]) -> tuple[Wire, Codec, torch.Tensor]:
    """Make a rank's wire and codec as training does; the codec begins with these parameters."""
    flat = torch.tensor(parameters, dtype=torch.float32)
    config = ExchangeConfig(compression=case["compression"], top_k_fraction=case["top_k_fraction"])
    codec = make_codec(config, flat, case["num_exact"])
    sizes = gossip_sizes(codec.sizes)
    return Wire(case["num_ranks"], len(parameters), case["signature"], sizes), codec, flat


def _encode_gossip(case: Values) -> bytes:
    wire, codec, _ = _gossip(case, case["before"])
    message = _header(case, Kind)
    if case["model"] is None:
        return wire.encoded(message).tobytes()
    model, buffer = torch.tensor(case["model"], dtype=torch.float32), SendBuffer(wire, codec, CPU)
    if case["part"] is None:
        buffer.fill(message, model, case["whole"])
    else:
        buffer.fill_part(message, model, torch.tensor(case["part"], dtype=torch.int32))
    assert buffer.ready()
    return buffer.data.tobytes()


def _decode_gossip(case: Values, data: np.ndarray) -> Values:
    """Return header, format, and what becomes of a receiver whose parameters are all 0, when it mixes half and half."""
    wire, codec, receiver = _gossip(case, [0.0] * len(case["before"]))
    message = _decoded(wire, data)
    told: Values = {"header": _told(message), "format": message.format.name, "mixed": None}
    if case["model"] is None:
        return told
    inbox = ReceiveBuffer(wire, codec, CPU)
    inbox.take_in(data)
    refusal = inbox.check(message, len(data))
    if refusal is not None:
        raise ValueError(refusal.reason)
    inbox.add(1.0)
    codec.mix(receiver, own_weight=1.0)
    return told | {"mixed": receiver.tolist()}


def _gorila(case: Values) -> Rules:
    """Make the rules that all ranks of a run of Gorila share."""
    space, env = case["space"], EnvConfig(num_envs=case["num_envs"])
    config = GorilaConfig(minibatch_size=case["minibatch_size"])
    box = Box(space["low"], space["high"], tuple(space["shape"]), np.dtype(space["dtype"]).type)
    formats = Formats.of(env, case["frame_stack"], config, box, case["num_actions"])
    flat = SimpleNamespace(data=torch.zeros(case["num_parameters"]), signature=case["signature"])
    roles = SimpleNamespace(shards=range(case["num_shards"]))
    return Rules.of(config, roles, case["num_ranks"], flat, formats)  # type: ignore[arg-type]


def _gorila_format(rules: Rules, kind: str) -> Any:
    """Return how arrays travel in messages of this kind; None of other kinds."""
    formats = rules.formats
    return {"RESET": formats.reset, "EXPERIENCE": formats.experience, "BATCH": formats.batch}.get(kind)


def _encode_gorila(case: Values) -> bytes:
    rules, kind = _gorila(case), case["header"]["kind"]
    format_, body = _gorila_format(rules, kind), b""
    if format_ is not None:
        value = _value_of(kind, {name: _array(*of) for name, of in case["arrays"].items()})
        body = format_.encode(value, np.zeros(format_.sizes[-1], np.uint8)).tobytes()
    elif case["values"] is not None:
        body = np.array(case["values"], np.float32).tobytes()
    header = np.zeros(rules.wire.control_bytes, np.uint8)
    rules.wire.encode(_header(case, GorilaKind, Format.ARRAYS if format_ else Format.FLOAT32), header)
    return header.tobytes() + body


def _array(dtype: str, shape: list[int], values: list[Any]) -> np.ndarray:
    return np.array(values, dtype).reshape(shape)


def _listed(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape), array.flatten().tolist()]


def _value_of(kind: str, arrays: dict[str, np.ndarray]) -> Any:
    if kind == "RESET":
        return arrays["frames"]
    return Experience(**arrays) if kind == "EXPERIENCE" else Batch(**arrays)


def _decode_gorila(case: Values, data: np.ndarray) -> Values:
    """Return header, format, and the values or arrays behind the counters."""
    rules = _gorila(case)
    message, body = _decoded(rules.wire, data), data[rules.wire.control_bytes :]
    told: Values = {"header": _told(message), "format": message.format.name, "values": None, "arrays": None}
    format_ = _gorila_format(rules, message.kind.name)
    if format_ is None:
        return told | ({"values": body.view(np.float32).tolist()} if len(body) else {})
    decoded = format_.decode(body.copy())
    if isinstance(decoded, Refusal):
        raise ValueError(decoded.reason)
    arrays = {"frames": decoded} if message.kind.name == "RESET" else decoded._asdict()
    return told | {"arrays": {name: _listed(array) for name, array in arrays.items()}}


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


# ---- the explorer ----------------------------------------------------------------------------------------------------


def explored(case: Values) -> Values:
    """Return what the explorer finds of a case of `explorer.json`."""
    settings = {name: value for name, value in case.items() if name not in ("faults", "symmetry")}
    symmetry = case.get("symmetry", False)
    explorer = Explorer(Case(faults=frozenset(case["faults"].split()), **settings), symmetry, not symmetry)
    found = explorer.run(most_states=100_000)
    return {
        "finished": found.finished,
        "violations": [violation.what for violation in found.violations],
        "states": found.states,
        "transitions": found.transitions,
    }
