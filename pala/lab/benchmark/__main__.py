"""Measure how fast training is on this machine, and how far from its limit: `pala benchmark`.

    Pong, 1 and 2 ranks              pala benchmark --ranks 1 2
    a preset, with other settings    pala benchmark pala_paper/pong --a2c.rollout-steps 5
    under a minute                   pala benchmark --ranks 2 --seconds 1 --exchanges none gossip --precisions float32
    another launcher                 pala benchmark --launcher 'srun -n {ranks}'

Results go to a new folder: benchmark.md, benchmark.json with every round, benchmark.png. docs/benchmark.md tells how to
read them. This program starts one job of MPI for each number of ranks; it does not use MPI itself.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from pala.config import Config, load_preset, to_table
from pala.config.catalogue import KINDS
from pala.config.checks import check
from pala.lab.benchmark.analysis import BASELINE
from pala.lab.benchmark.pictures import draw
from pala.lab.benchmark.protocol import protocol_cost_us
from pala.lab.benchmark.report import markdown
from pala.run.provenance import cpu_model, now_utc, provenance
from pala.system.command_line import check_choices, exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.files import make_output_folder, write_atomically, write_json
from pala.system.jobs import launcher_of, run_job, tail
from pala.system.output import print_result
from pala.system.resources import physical_cores, usable_cores
from pala.system.search_path import refuse_another_pala
from pala.system.text import counted

_PROGRAM = "pala benchmark"
_PRECISIONS = ("float32", "bfloat16")
_PROTOCOL_RANKS = (2, 4, 8, 16, 32, 64, 256, 1000)


@dataclass(frozen=True)
class Command:
    """Measure training, its parts, and the upper bound of its speed on this machine."""

    preset: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file with settings, or the name of one of configs/; the options below win over it. Otherwise the defaults:
    Pong."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks, each a job of its own. Default: 1, 2, 4, … up to the cores that may be used, and those."""
    rounds: int = 5
    """Times that everything is measured."""
    seconds: float = 5.0
    """Length of one measurement of training; a part gets a fifth of it."""
    exchanges: tuple[str, ...] = ()
    """Kinds of exchange, for A2C. Default: all."""
    precisions: tuple[str, ...] = ()
    """float32, bfloat16. Default: both where the processor or GPU has bfloat16's instructions."""
    launcher: str = "mpirun -np {ranks}"
    """Command that starts the ranks; `{ranks}` stands for their number."""
    output: Path | None = None
    """Folder to make for the results. Default: runs/benchmark-TIME."""
    slowdown: float = 1.0
    """Factor by which the last rank is to be slower: it sleeps after each step, by the processor's time that its
    threads took. For a look at stragglers."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parse(arguments: list[str]) -> Command:
    """Return the command line over the preset over the defaults, checked and complete. Raises PalaError."""
    first = read_command(_PROGRAM, arguments, Command())
    config = load_preset(first.preset) if first.preset else Config()
    command = read_command(_PROGRAM, arguments, replace(first, config=config))
    check(command.config, source="Command line")
    has_one_exchange = command.config.exchange_kind.of_algorithm
    if has_one_exchange and command.exchanges:
        raise PalaError("'--exchanges' is for A2C: Gorila has one way to exchange, its roles; leave it out.")
    if has_one_exchange and command.config.gorila.roles == "separate":
        raise PalaError(
            "'gorila.roles' is 'separate', whose steps/s say little: actors play on though learners fall behind. The "
            "benchmark measures 'bundled'."
        )
    command = _completed(command)
    if not has_one_exchange:
        check_choices("exchanges", command.exchanges, exchange_kinds())
    check_choices("precisions", command.precisions, _PRECISIONS)
    if not all(ranks >= 1 for ranks in command.ranks):
        raise PalaError(f"'--ranks' is {shlex.join(map(str, command.ranks))} but every number must be at least 1.")
    if command.rounds < 1:
        raise PalaError(f"'--rounds' is {command.rounds} but must be at least 1; medians want 5 or more.")
    if not 1 <= command.slowdown <= 100:
        raise PalaError(f"'--slowdown' is {command.slowdown:g} but must lie between 1 and 100.")
    if command.slowdown > 1 and command.config.env.vectorization == "async":
        raise PalaError(
            "'--slowdown' does not see the time of environments with 'env.vectorization' \"async\": use \"sync\"."
        )
    if not 0 < command.seconds <= 3600:
        raise PalaError(f"'--seconds' is {command.seconds:g} but must lie above 0 and be at most 3600.")
    return command


def _completed(command: Command) -> Command:
    """Return the command with a value for each option that was not given."""
    cores = min(physical_cores(os.sched_getaffinity(0)), usable_cores())  # Open MPI starts no more ranks than the first
    powers = tuple(2**i for i in range(cores.bit_length()))
    kind = command.config.exchange_kind
    return replace(
        command,
        ranks=tuple(dict.fromkeys(command.ranks)) or tuple(sorted({*powers, cores})),
        exchanges=tuple(dict.fromkeys(command.exchanges)) or ((kind.name,) if kind.of_algorithm else exchange_kinds()),
        precisions=tuple(dict.fromkeys(command.precisions)),
    )


def exchange_kinds() -> tuple[str, ...]:
    """Return all kinds of exchange, first the one that the others are compared with."""
    return tuple(sorted(KINDS, key=lambda kind: kind != BASELINE))


def benchmark(command: Command) -> None:
    """Measure and write everything. Raises PalaError or KeyboardInterrupt, when what was measured before is written."""
    refuse_another_pala()
    launcher_of(command.launcher, 1)  # a mistake should be told before anything is made
    output = make_output_folder(command.output, "benchmark")
    options = ("ranks", "rounds", "seconds", "exchanges", "precisions", "launcher", "slowdown")
    result = provenance() | {
        "format": 1,
        "date": now_utc(),
        "jobs": [],
        "failures": [],
        "config": to_table(command.config),
        "protocol_us": {},
        "machine": {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "host": platform.node()},
        "options": {option: getattr(command, option) for option in options},
    }
    stop: BaseException | None = None
    try:
        _measure_all(command, output, result)
    except (PalaError, KeyboardInterrupt) as error:
        if not result["jobs"]:
            raise
        stop = error
        result["failures"] = [str(error) or "Stopped."]
    print_result(f"\n{markdown(result)}")  # first: it took minutes, and the disk may be full
    write_json(output / "benchmark.json", result, indent=1)
    write_atomically(output / "benchmark.md", markdown(result).encode())
    draw(result, output / "benchmark.png")
    print_result(f"{output}/benchmark.md, benchmark.json, benchmark.png")
    if stop is not None:
        raise stop


# ---- one job of MPI --------------------------------------------------------------------------------------------------


def _measure_all(command: Command, output: Path, result: dict[str, Any]) -> None:
    """Run the jobs, which take minutes each, then the protocol; put each into the result when it is done."""
    for ranks in command.ranks:
        result["jobs"].append(_measure(command, ranks, output))
    for ranks in () if command.config.exchange_kind.of_algorithm else _PROTOCOL_RANKS:
        result["protocol_us"][str(ranks)] = round(protocol_cost_us(ranks), 2)


def _measure(command: Command, ranks: int, output: Path) -> dict[str, Any]:
    """Run one job and return its result, whose files are taken away when it has succeeded. Raises PalaError."""
    folder = output / f"job-{ranks}-ranks"
    folder.mkdir()
    request = {
        "ranks": ranks,
        "exchanges": command.exchanges,
        "precisions": command.precisions,
        "rounds": command.rounds,
        "seconds": command.seconds,
        "slowdown": command.slowdown,
        "config": to_table(command.config),
        "result": str(folder.resolve() / "result.json"),
    }
    write_json(folder / "request.json", request)
    variants = len(command.exchanges) * (len(command.precisions) or len(_PRECISIONS))
    expected_s = 10 + command.rounds * command.seconds * (variants + 1)
    print_result(f"PALA  {counted(ranks, 'rank')}: {command.rounds} rounds, about {expected_s:.0f} s")
    worker = [sys.executable, "-m", "pala.lab.benchmark.worker", str(folder.resolve() / "request.json")]
    run_job(
        [*launcher_of(command.launcher, ranks), *worker],
        folder / "output.txt",
        limit_s=300 + 5 * expected_s * command.slowdown,
    )
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PalaError(
            f"The job with {ranks} ranks ended without a result ({error}).{tail(folder / 'output.txt')}"
        ) from None
    shutil.rmtree(folder)
    return result


# ---- the program -----------------------------------------------------------------------------------------------------


@exit_on_mistake(OSError)
def main() -> None:
    """Run `pala benchmark`."""
    benchmark(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
