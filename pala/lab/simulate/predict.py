"""`pala simulate predict`: how fast gossip and its alternatives would be, from 2 to 10,000 ranks.

    what a cluster would do   pala simulate predict --benchmark results/simulation/benchmark/benchmark.json.gz
    another network           … --ranks-per-host 8 --latency-us 5 --bandwidth-gbit 100

Results go to a new folder: simulation.md, simulation.json, simulation.png. docs/simulate.md tells how to read them.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pala.config.catalogue import TOPOLOGIES
from pala.lab.benchmark.analysis import precision_of
from pala.lab.simulate.costs import Costs, costs_of, read_benchmark
from pala.lab.simulate.gossip import Cluster
from pala.lab.simulate.groups import group_costs, of_groups
from pala.lab.simulate.methods import METHODS
from pala.lab.simulate.report import draw, markdown
from pala.run.provenance import now_utc, provenance
from pala.system.command_line import check_choices, check_least, read_command
from pala.system.errors import PalaError
from pala.system.files import make_output_folder, write_atomically, write_json
from pala.system.output import print_result

_PROGRAM = "pala simulate predict"
_MOST_RANKS = 10_000  # every rank has a counter for every rank: 100 times the memory for 10 times the ranks
_STRAGGLER = 4.0  # the factor by which the slow rank is slower


@dataclass(frozen=True)
class Command:
    """Predict speed, waiting, traffic and consensus distance, with all ranks alike and with one slow rank."""

    benchmark: Path | None = None
    """benchmark.json (or .json.gz) with the costs of one rank (`pala benchmark`)."""
    ranks: tuple[int, ...] = (2, 4, 8, 16, 64, 256, 1024, 4096, 10_000)
    """Numbers of ranks."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Gossip by topology (random, exponential, ring), allreduce (synchronous A2C)."""
    ranks_per_host: int = 16
    """Ranks on one host, each with cores of its own."""
    group: int = 1
    """Ranks of a host that hold one model (`exchange.group`): gossip then goes between groups. 1: each has its own."""
    latency_us: float = 50.0
    """Latency between two hosts."""
    bandwidth_gbit: float = 10.0
    """Bandwidth of a host's link, in each direction."""
    seed: int = 1
    """Seed of everything that is drawn."""
    output: Path | None = None
    """Folder to make for the results. Default: runs/simulation-TIME."""


def parse(arguments: list[str]) -> Command:
    """Return the checked command line. Raises PalaError."""
    command = read_command(_PROGRAM, arguments, Command())
    check_choices("methods", command.methods, tuple(METHODS))
    for ranks in command.ranks:
        if not 2 <= ranks <= _MOST_RANKS:
            raise PalaError(f"'--ranks' has {ranks} but every number must lie between 2 and {_MOST_RANKS}.")
    check_least("ranks-per-host", command.ranks_per_host, 1)
    check_least("group", command.group, 1)
    if command.ranks_per_host % command.group:
        raise PalaError(
            f"'--group' is {command.group}, but '--ranks-per-host' is {command.ranks_per_host}: only groups of equal "
            "size are predicted."
        )
    check_least("latency-us", command.latency_us, 0)
    check_least("seed", command.seed, 0)
    if not 0 < command.bandwidth_gbit < math.inf:
        raise PalaError(f"'--bandwidth-gbit' is {command.bandwidth_gbit:g} but must lie above 0.")
    _check_that_something_is_left(command)
    if command.benchmark is None:
        raise PalaError("Name the measured costs: `--benchmark FILE`, a benchmark.json of `pala benchmark`.")
    return command


def predict(command: Command, benchmark: dict[str, Any], costs: Costs, output: Path) -> dict[str, Any]:
    """Simulate and write everything; returns what is in simulation.json. `costs` are of `benchmark`. Raises
    PalaError."""
    options = asdict(command) | {"benchmark": str(command.benchmark), "output": str(output)}
    facts = provenance() | {"format": 1, "date": now_utc()}
    result = facts | {
        "options": options,
        "costs": asdict(costs),
        "one_rank_steps_per_s": costs.steps_per_s,
        "measured": {
            "environment": benchmark["config"]["env"]["id"],
            "precision": precision_of(benchmark),
            "cpu": benchmark["machine"]["cpu"],
            "git_commit": benchmark["git_commit"],
            "date": benchmark["date"],
        },
        "predictions": predictions(command, costs),
    }
    print_result(f"\n{markdown(result)}")  # first: it took minutes, and the disk may be full
    write_json(output / "simulation.json", result, indent=1)
    write_atomically(output / "simulation.md", markdown(result).encode())
    draw(result, output / "simulation.png")
    return result


def predictions(command: Command, costs: Costs) -> list[dict[str, Any]]:
    """Return a row for each method, straggler and number of ranks: figures, or the reason why there are none."""
    rows = []
    for straggler in (1.0, _STRAGGLER):
        for method in dict.fromkeys(command.methods):
            for ranks in sorted(set(command.ranks)):
                rows.append(_row(command, costs, method, ranks, straggler))  # noqa: PERF401  it takes minutes, and prints
    return rows


def _row(command: Command, costs: Costs, method: str, ranks: int, straggler: float) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "straggler": straggler, "ranks": ranks}
    if reason := _reason_against(command, method, ranks, costs):
        return row | {"reason": reason}
    cluster = Cluster(
        ranks,
        command.ranks_per_host,
        1e-6 * command.latency_us,
        command.bandwidth_gbit * 1e9 / 8,
        straggler,
    )
    begin = time.perf_counter()
    group = command.group if method in TOPOLOGIES else 1
    prediction = METHODS[method](of_groups(cluster, group), group_costs(costs, group), command.seed)
    seconds = time.perf_counter() - begin
    row |= {"efficiency": prediction.steps_per_s / (ranks * costs.steps_per_s)} | asdict(prediction)
    print_result(
        f"PALA  {method}, {ranks} ranks{f', one {straggler:g} times slower' if straggler > 1 else ''}: "
        f"{prediction.steps_per_s:,.0f} steps/s, efficiency {row['efficiency']:.3f} ({seconds:.1f} s)"
    )
    return row | {"updates_a_rank": of_groups(cluster, group).updates_a_rank, "seconds_to_simulate": round(seconds, 2)}


def _check_that_something_is_left(command: Command, costs: Costs | None = None) -> None:
    """Raise PalaError if no method can be simulated with any number of ranks."""
    reasons = [_reason_against(command, method, ranks, costs) for method in command.methods for ranks in command.ranks]
    if all(reasons):
        raise PalaError(f"There is nothing to simulate: {'; '.join(dict.fromkeys(reasons))}.")


def _reason_against(command: Command, method: str, ranks: int, costs: Costs | None) -> str:
    """Return why a method is not simulated with this number of ranks and these costs, or nothing."""
    if method in TOPOLOGIES and command.group > 1 and (ranks % command.group or ranks < 2 * command.group):
        return f"not two or more groups of {command.group} ranks"
    if costs is not None and method not in TOPOLOGIES and costs.compression != "none":
        return f"not from costs of '{costs.compression}', which is gossip's alone; measure without compression"
    return ""


def run(arguments: list[str]) -> None:
    """Do what `pala simulate predict` does. Raises PalaError."""
    command = parse(arguments)
    assert command.benchmark is not None
    # A mistake should be told before anything is made.
    benchmark = read_benchmark(command.benchmark)
    costs = costs_of(benchmark, command.benchmark)
    _check_that_something_is_left(command, costs)
    output = make_output_folder(command.output, "simulation")
    predict(command, benchmark, costs, output)
    print_result(f"{output}/simulation.md, simulation.json, simulation.png")
