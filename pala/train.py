"""Train: `mpirun -np 4 python -m pala.train pong --a2c.learning-rate 1e-3`.

    one rank                python -m pala.train pong
    one machine             mpirun -np 4 python -m pala.train pong
    outliving its ranks     mpirun --with-ft ulfm -np 4 python -m pala.train pong      (Open MPI 5)
    go on with a run        mpirun -np 4 python -m pala.train --resume runs/pong-20260101-120000
    from nothing installed  ./launch/train.sh

Results go to a new folder in `runs/`. `--help` explains every option.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins there is nothing to keep, nor to tell

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from pala.comm.agreement import collectively, cores_per_rank
from pala.comm.mpi_process import abort, check_slurm_tasks, leave_job, leave_mpi, start_mpi_or_exit
from pala.config import Config, load_preset
from pala.config.checks import check
from pala.run import run_folder
from pala.run.header import first_line, note_on_ranks, note_on_vain
from pala.run.provenance import provenance
from pala.system.command_line import read_command
from pala.system.errors import CollectiveError, PalaError
from pala.system.launcher import Launch, die_with_launcher
from pala.system.output import announce, say, tell
from pala.system.resources import prepare

_PROGRAM = "pala.train"


@dataclass(frozen=True)
class Command:
    """Train one policy on MPI ranks: A2C actor-learners that gossip, or Gorila DQN (`--algorithm gorila`)."""

    preset: Annotated[Path | None, tyro.conf.Positional] = None
    """A TOML file with settings, or the name of one of configs/, such as `pong` or `gorila/pong`. The options below win
    over it."""
    resume: Path | None = None
    """Folder of an earlier run to go on with, perhaps with another number of ranks. Its settings are the defaults."""
    trust_run: bool = False
    """With `--resume`: run the code that the run names or holds (environment, network, wrappers, modules), though it
    came from elsewhere."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parse(arguments: list[str]) -> Command:
    """The command line over the preset or the resumed run over the defaults. Raises PalaError."""
    first = read_command(_PROGRAM, arguments, Command())  # for the preset or the run, whose settings are the defaults
    if first.preset is not None and first.resume is not None:
        raise PalaError(f"Give a preset or `--resume`, not both: '{first.resume}' brings its own settings.")
    command = read_command(_PROGRAM, arguments, replace(first, config=_before(first)))
    check(command.config, source="Command line")
    return command


def _before(command: Command) -> Config:
    """Of the command line's options."""
    if command.resume:
        return run_folder.config_of(command.resume)
    return load_preset(command.preset) if command.preset else Config()


def _greet(command: Command, ranks: int) -> None:
    """The first words, before torch is loaded, which takes seconds."""
    tell(first_line(command.config, ranks))
    last = run_folder.read(command.resume)["segments"][-1] if command.resume else {}
    on_ranks = note_on_ranks(command.preset, command.config, ranks)
    for note in filter(None, (on_ranks, note_on_vain(command.config, _before(command), *run_folder.from_python(last)))):
        say(note)


def main() -> None:
    """What `python -m pala.train` runs on every rank."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_launcher()
    announce("begun")
    facts = provenance() if Launch.detect().rank == 0 else {}
    comm = start_mpi_or_exit()
    rank = comm.rank
    announce("up")
    try:
        command = collectively(comm, lambda: parse(sys.argv[1:]))
        if rank == 0:
            check_slurm_tasks(comm.size, command.config.run.spares)
        cores = cores_per_rank(comm, command.config.run.spares)
        if rank == 0 and command.config.run.console != "none" and comm.size > command.config.run.spares:
            _greet(command, comm.size - command.config.run.spares)
        prepare(command.config.run.threads or cores)
        # Here and no earlier: it loads torch and numpy, whose thread pools are sized when they load.
        from pala.run.rank import evaluate_and_draw, run_rank
        from pala.run.request import Request

        preset = command.preset.stem if command.preset else ""
        request = Request(
            command.config, resume=command.resume, preset=preset, facts=facts, trust_run=command.trust_run,
            conclude=evaluate_and_draw,
        )  # fmt: skip
        result = run_rank(comm, request)
    except CollectiveError as error:  # every rank is here
        if rank == 0:
            say(f"pala: error: {error}")
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        abort(comm, error)
    except SystemExit as error:
        if "pala.run.rank" not in sys.modules:  # `--help`, on all ranks
            raise
        abort(comm, error)  # of the user's code, on this rank: the others would wait for it
    if result.departs:
        leave_job()
    leave_mpi(comm, finalize=command.config.run.spares == 0)(result.exit_status)


if __name__ == "__main__":
    main()
