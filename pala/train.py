"""Train: `pala train -n 4 pong --a2c.learning-rate 1e-3`.

    one rank                pala train pong
    one machine             pala train -n 4 pong
    in a script of Slurm    srun python -m pala.train pong
    outliving its ranks     mpirun --with-ft ulfm -np 4 python -m pala.train pong      (Open MPI 5)
    continue a run          pala train -n 4 --resume runs/pong-20260101-120000
    from nothing installed  ./launch/train.sh

Results go to a new folder in `runs/`. `--help` explains every option.
"""

from __future__ import annotations

import signal
import sys

from pala.system.interrupt import note_leave

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins there is nothing to keep, nor to tell
    note_leave()

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from pala.comm.agreement import collectively
from pala.comm.mpi_process import close_mpi, leave_job
from pala.config import Config, load_preset
from pala.config.checks import check
from pala.job import entry
from pala.job.header import first_line, note_on_unused
from pala.job.job import Job
from pala.job.request import Request
from pala.run import run_folder
from pala.system.command_line import read_command
from pala.system.errors import PalaError
from pala.system.output import log, open_closed_streams, print_result

_PROGRAM = "python -m pala.train"


@dataclass(frozen=True)
class Command:
    """Train one policy on MPI ranks: A2C actor-learners that gossip, or Gorila DQN (`--algorithm gorila`).

    Examples:
        pala train -n 2 pong                                      # two ranks, by mpirun
        pala train -n 2 --env.id my_envs:Grid-v0 --total-steps 1e6
        pala train -n 2 allreduce/pong --a2c.learning-rate 1e-3 --seed 2
        pala train -n 2 --resume runs/pong-20260101-120000        # continue a run

    Usual options: --env.id, --total-steps, --seed, --env.num-envs, --a2c.learning-rate, --exchange.kind,
    --run.name, --run.device. `pala train -n 2 --help` has those of mpirun, hosts, spares and restarts.
    """

    preset: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = None
    """A TOML file with settings, or the name of one of configs/, such as `pong` or `gorila/pong`. The options below win
    over it."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Folder of an earlier run to continue, perhaps with another number of ranks. Its settings are the defaults."""
    trust_run: bool = False
    """Run, with `--resume`, the code that the run names or holds (environment, network, wrappers, modules), though it
    came from elsewhere."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    @property
    def preset_name(self) -> str:
        """The preset's name in that of its runs: `allreduce-pong` of `allreduce/pong`, `mine` of `my/mine.toml`; empty:
        there is no preset."""
        if self.preset is None:
            return ""
        return self.preset.stem if self.preset.suffix == ".toml" else self.preset.as_posix().replace("/", "-")


def read(arguments: list[str]) -> tuple[Command, Config]:
    """Read the command line over the preset or the resumed run over the defaults; return that base, too. Raises
    PalaError."""
    first = read_command(_PROGRAM, arguments, Command())  # for the preset or the run, whose settings are the defaults
    if first.preset is not None and first.resume is not None:
        raise PalaError(f"Give a preset or `--resume`, not both: '{first.resume}' brings its own settings.")
    base, command = Config(), first
    if first.resume:
        base = run_folder.config_of(first.resume)
    elif first.preset:
        base = load_preset(first.preset)
    if first.resume or first.preset:
        command = read_command(_PROGRAM, arguments, replace(first, config=base))
    check(command.config, source="Command line")
    return command, base


def parse(arguments: list[str]) -> Command:
    """Read the command line over the preset or the resumed run over the defaults. Raises PalaError."""
    return read(arguments)[0]


def _greet(command: Command, base: Config, job: Job) -> None:
    """Say the first words, before torch is loaded, which takes seconds."""
    if command.config.run.console == "none":
        return
    print_result(first_line(command.config, job.num_trainers))
    if command.preset is None and command.resume is None and "--env.id" not in " ".join(sys.argv):
        log("No preset and no `--env.id` is given, so this trains the default. `pala presets` lists others.")
    own = run_folder.from_python(run_folder.read(command.resume)["segments"][-1]) if command.resume else ()
    if note := note_on_unused(command.config, base, *own):
        log(note)


def main() -> None:
    """Do what `python -m pala.train` does on every rank."""
    open_closed_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with entry.program() as comm:
        command, base = collectively(comm, lambda: read(sys.argv[1:]))
        request = Request(
            command.config,
            resume=command.resume,
            preset=command.preset_name,
            facts=entry.facts(),
            trust_run=command.trust_run,
            conclude=entry.evaluate_and_draw,
        )
        result = entry.train(comm, request, lambda job: _greet(command, base, job))
    if result.departs:
        leave_job()
    close_mpi(comm, finalize=command.config.run.spares == 0)(result.exit_status)


if __name__ == "__main__":
    main()
