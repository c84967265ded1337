"""Measure training by groups of ranks beside gossip and synchronous A2C, on 2 virtual hosts with 2 ranks each.

    python results/benchmark/groups.py

Appends a JSON line a rate to groups.jsonl, beside this file, and prints steps/s of all ranks and their ratios within a
round: medians and ranges. Pong, the default network in float32, `paired` mixing. All exchanges of a rate are measured
in one job, in turn, in every second round backwards. Needs root and Open MPI (`launch/virtual_hosts.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "launch")]

from pala.comm.agreement import cores_per_rank  # noqa: E402
from pala.comm.mpi_process import abort, start_mpi  # noqa: E402
from pala.config import Config, ExchangeConfig, NetworkConfig  # noqa: E402
from pala.run.provenance import now_utc, provenance  # noqa: E402
from pala.system.resources import prepare  # noqa: E402
from pala.system.seeding import derive  # noqa: E402
from pala.system.text import Spread, table  # noqa: E402

HOSTS, RANKS_PER_HOST = 2, 2
WARM_UP_UPDATES = 12  # of a rank
LIMIT_S = 600.0
KEPT = ("seconds", "updates", "steps_per_s", "time", "models_mixed", "bytes_sent", "staleness_updates")  # of a rank
EXCHANGES = {
    "none": ExchangeConfig("none"),
    "gossip": ExchangeConfig(mixing="paired"),
    "groups": ExchangeConfig(mixing="paired", group="host"),
    "allreduce": ExchangeConfig("allreduce"),
}


def run_ranks(options: argparse.Namespace) -> None:
    """Measure round by round; rank 0 writes the figures of every rank. What every rank runs."""
    comm = start_mpi()
    try:
        threads = cores_per_rank(comm)
        prepare(threads)
        rounds = measure(comm, threads, options)
        if comm.rank == 0:
            options.result.write_text(json.dumps(rounds), encoding="utf-8")
    except BaseException as error:
        abort(comm, error)


def measure(comm: Any, threads: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rounds: for each exchange the figures of every rank. Collective."""
    from pala.a2c.agent import build
    from pala.lab.benchmark.measure import ContinuedEnvs, Trial, figures_of
    from pala.run.agent import build_envs

    config = Config(network=NetworkConfig(background=0.0, precision="float32"), exchange=EXCHANGES["none"])
    seeds = derive(config.seed, comm.rank, "environments", config.env.num_envs)
    envs = ContinuedEnvs(build_envs(comm, config, threads), seeds, threads)
    agent = build(comm, config, envs)
    weights = agent.flat.data.clone()
    of_all = {name: replace(config, exchange=exchange) for name, exchange in EXCHANGES.items()}
    trials = {name: Trial(comm, own, envs, agent, weights) for name, own in of_all.items()}

    def train(name: str, steps: float, seconds: float) -> list[dict[str, Any]]:
        comm.barrier()
        records = trials[name].run(max(round(steps), WARM_UP_UPDATES * config.steps_per_update), seconds, seeds)
        until_s = min(comm.allgather(records[-1]["time_s"]))
        figures = figures_of(records, until_s, threads)
        return comm.allgather({key: figures[key] for key in KEPT if key in figures})

    speeds = {name: speed(train(name, WARM_UP_UPDATES * config.steps_per_update * comm.size, 0.0)) for name in trials}
    rounds = []
    for number in range(options.rounds):
        of_round = {}
        for name in list(trials)[:: -1 if number % 2 else 1]:
            of_round[name] = train(name, speeds[name] * options.seconds, options.seconds)
            speeds[name] = speed(of_round[name])
            if comm.rank == 0:
                print(f"round {number + 1}, {name}: {speeds[name]:,.0f} steps/s", flush=True)
        rounds.append(of_round)
    envs.close()
    return rounds


def speed(ranks: list[dict[str, Any]]) -> float:
    """Steps/s of all ranks."""
    return sum(rank["steps_per_s"] for rank in ranks)


def run_job(rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rounds of a job on hosts with links of this rate."""
    from virtual_hosts import VirtualHosts

    with TemporaryDirectory(prefix="groups-") as folder, VirtualHosts(HOSTS, rate) as hosts:
        result = Path(folder) / "result"
        rank = [sys.executable, str(Path(__file__).resolve()), "--result", str(result)]
        rank += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        command, more = hosts.mpirun(rank, RANKS_PER_HOST)
        subprocess.run(command, env=os.environ | more, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
        return json.loads(result.read_text(encoding="utf-8"))


def shown(rate: str, rounds: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table for a rate."""
    rows = []
    for name in EXCHANGES:
        speeds = [speed(of_round[name]) for of_round in rounds]
        row = [rate, name, Spread.of(speeds).text(",.0f")]
        for other in EXCHANGES:
            ratios = [own / speed(of_round[other]) for own, of_round in zip(speeds, rounds, strict=True)]
            row.append("" if other == name else Spread.of(ratios).text(".3f"))
        waits = [rank["time"]["wait"] for of_round in rounds for rank in of_round[name]]
        rows.append([*row, f"{Spread.of(waits).median:.3f}"])
    return rows


def main() -> None:
    """Measure all rates, one job after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one measurement")
    parser.add_argument("--output", type=Path, default=HERE / "groups.jsonl")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result is not None:
        run_ranks(options)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # on the way out the hosts end
    facts, rows = provenance(), []
    for rate in options.rates:
        line = {"rate": rate, "date": now_utc(), "load_1min_before": round(os.getloadavg()[0], 2)} | facts
        begin = time.perf_counter()
        line["rounds"] = run_job(rate, options)
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{rate}: {time.perf_counter() - begin:.0f} s", flush=True)
        rows += shown(rate, line["rounds"])
    print(table(["link", "exchange", "steps/s", *(f"of {name}" for name in EXCHANGES), "waits, share"], rows))


if __name__ == "__main__":
    main()
