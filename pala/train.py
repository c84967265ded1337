"""Train: `mpirun -np 4 python -m pala.train configs/pong.toml --a2c.learning-rate 1e-3`.

    one rank                python -m pala.train configs/pong.toml
    one machine             mpirun -np 4 python -m pala.train configs/pong.toml
    outliving its ranks     mpirun --with-ft ulfm -np 4 python -m pala.train configs/pong.toml      (Open MPI 5)
    go on with a run        mpirun -np 4 python -m pala.train --resume runs/pong-20260101-120000
    from nothing installed  ./launch/train.sh

Results go to a new folder in `runs/`. `--help` explains every option.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro

from pala.config import Config, check, load_preset
from pala.system.command_line import read_command
from pala.system.errors import CollectiveError, PalaError
from pala.system.runtime import Launch, die_with_launcher, prepare, say
from pala.transport.agreement import collectively, cores_per_rank
from pala.transport.mpi_process import abort, check_slurm_tasks, leave_mpi, start_mpi

if TYPE_CHECKING:
    from pala.run.trainer import Result

_PROGRAM = "pala.train"


@dataclass(frozen=True)
class Command:
    """Train one policy on MPI ranks: A2C actor-learners that gossip, or Gorila DQN (`--algorithm gorila`)."""

    preset: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file with settings (configs/); the options below win over it."""
    resume: Path | None = None
    """Folder of an earlier run to go on with, perhaps with another number of ranks. Its settings are the defaults."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parse(arguments: list[str]) -> Command:
    """The command line over the preset or the resumed run over the defaults. Raises PalaError."""
    first = read_command(
        _PROGRAM, arguments, Command()
    )  # to find the preset or the run, whose settings are the defaults
    if first.preset is not None and first.resume is not None:
        raise PalaError(f"Give a preset or `--resume`, not both: '{first.resume}' brings its own settings.")
    from pala.run.run_folder import config_of

    config = config_of(first.resume) if first.resume else load_preset(first.preset) if first.preset else Config()
    command = read_command(_PROGRAM, arguments, replace(first, config=config))
    check(command.config, source="Command line")
    return command


def main() -> None:
    """What `python -m pala.train` runs on every rank."""
    from pala.run.run_folder import provenance

    die_with_launcher()
    facts = provenance() if Launch.detect().rank == 0 else {}
    try:
        comm = start_mpi()
    except PalaError as error:
        if not isinstance(error, CollectiveError) or Launch.detect().rank == 0:
            say(f"pala: error: {error}")
        sys.exit(2)
    rank = comm.rank
    if rank == 0:
        check_slurm_tasks(comm.size)
    try:
        command = collectively(comm, lambda: parse(sys.argv[1:]))
        cores = cores_per_rank(comm)
        prepare(command.config.run.threads or cores)
        from pala.run import trainer

        preset = command.preset.stem if command.preset else ""
        result = trainer.train(comm, command.config, resume=command.resume, preset=preset, facts=facts)
    except CollectiveError as error:  # every rank is here
        if rank == 0:
            say(f"pala: error: {error}")
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        abort(comm, error)
    leave = leave_mpi(comm)
    status = 0 if result.signal is None else 128 + result.signal
    if result.leads:
        status = _conclude(result, command.config) or status
    leave(status)


def _conclude(result: Result, config: Config) -> int:
    """One rank, alone and without MPI: evaluate the final policy, draw the learning curve, say where everything is.

    Returns 130 if that was interrupted, else 0.
    """
    print(f"PALA  {result.status} after {result.global_steps:,} steps: {result.run}", flush=True)
    if result.signal is not None:
        print(f"      go on with: python -m pala.train --resume {result.run}")
        return 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _raise_interrupt)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the other ranks are gone: use all cores
    last_words: list[tuple[str, Callable[[], str]]] = [
        ("evaluation", lambda: _evaluate(result.run, config)),
        ("learning curve", lambda: _draw(result.run)),
    ]
    for what, action in last_words:
        try:
            print(f"      {what}: {action()}", flush=True)
        except (PalaError, OSError) as error:
            print(f"      {what}: {error}", flush=True)
        except KeyboardInterrupt:
            print(f"      {what}: interrupted; `python -m pala.evaluate {result.run}` makes up for it", flush=True)
            return 130
    return 0


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _evaluate(run: Path, config: Config) -> str:
    settings = config.evaluation
    if settings.episodes == 0:
        return "left out ('evaluation.episodes' is 0)"
    from pala.evaluation.play import evaluate
    from pala.evaluation.record import save

    evaluation = evaluate(
        run, settings.episodes, settings.num_envs, settings.greedy, config.seed, threads=len(os.sched_getaffinity(0))
    )
    save(run, evaluation)
    return f"{evaluation} ({run / 'evaluation.json'})"


def _draw(run: Path) -> str:
    from pala.plot import plot

    return str(plot([run], run / "learning_curve.png"))


if __name__ == "__main__":
    main()
