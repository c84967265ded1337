"""Train to the end: start a job by mpirun, and resume it when it ends before the run is complete.

    pala train -n 4 pong --a2c.learning-rate 1e-3
    pala train --host node1:4,node2:4 --restarts 10 pong
    pala train -n 4 --spares 1 pong        5 ranks: one sleeps until another dies
    pala train -n 4 --resume runs/pong-20260101-120000

`pala train` does this if one of these options is given, and `./launch/train.sh` in PALA's own environment. Options
that `--help` does not explain are those of `pala.train`. Where the MPI can (Open MPI 5), a rank's death does not end
the job.

Whether the run is complete is read in its `run.json`; mpirun's exit status can be 0 when a host was lost. A host that
does not start a process any more is left out, and asked again at the next restart. Nothing is restarted after a mistake
of the user's, after SIGTERM, SIGUSR1, ^C or a closed terminal (the job is told to write its checkpoint and end; another
^C is passed to mpirun as it is), when all ranks were told to leave, or when two restarts one after the other brought no
newer checkpoint. A job whose ranks outlive mpirun is waited for: the run's folder is locked as long as one of them
lives. An mpirun that outlives its ranks by three minutes is ended. A run has one supervisor at a time, which locks
`.NAME.supervisor` next to its folder. Runs without a name that begin in the same second get names of their own.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a job begins there is nothing to end, nor to tell
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for one rank, which then leaves

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pala.config import to_table
from pala.run import run_folder
from pala.run.attempt import GENTLY, Attempt, say
from pala.run.lock import SupervisedError, cannot_be_made, supervised, who_trains
from pala.system.command_line import exit_on_mistake
from pala.system.errors import PalaError, reason
from pala.system.files import dated
from pala.system.hosts import Host, answering, read_hosts
from pala.system.interrupt import LEAVE, hangup
from pala.system.jobs import command_of, environment_of_jobs
from pala.system.launcher import Launch
from pala.system.output import SUPERVISED, log
from pala.system.search_path import refuse_another_pala
from pala.system.tables import flatten, shown
from pala.system.waiting import nap
from pala.train import Command, parse

_LONGEST_PAUSE_S = 300.0
_LEFT_OVER_S = 150.0  # for ranks to end after their mpirun; NFS often holds a dead host's lock for 90 s
_LOCK_S = 10.0  # between two tries to lock a run
_FUTILE_RESTARTS = 2
_MOST_RANKS = 100_000


# Of Open MPI; the user's own and options in `--mpirun` win. A host that is lost ends the job after 15
# to 35 s; Open MPI's own settings leave that to 8 minutes.
_BETWEEN_HOSTS = {
    "PRTE_MCA_oob_tcp_keepalive_time": "20",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}


def _environment(between_hosts: bool) -> dict[str, str]:
    """Return mpirun's environment."""
    if not between_hosts:
        return environment_of_jobs()
    return _BETWEEN_HOSTS | environment_of_jobs(on_one_host=False)


# Until Python notes SIGUSR2, by which a rank is told to leave, that must not kill it.
_AS_RANK = ("env", f"{SUPERVISED}=1", "sh", "-c", 'trap "" USR2; exec "$@"', "sh")


class Supervisor:
    """The supervisor of one run: it starts jobs one after the other until the run is complete or there is no hope."""

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        """Read the options. `arguments`: those of `pala.train`. Raises PalaError for what is wrong with either."""
        self.mpirun = survivable(options.mpirun)
        self.restarts = options.restarts
        self.pause_s = options.pause_s
        self.hosts = read_hosts(options.host, options.hostfile)
        command = parse(arguments)
        if options.go_on and (begun := _begun(command)) is not None:
            command, arguments = _resuming(begun, command, arguments)
        self.ranks, self._spares = _num_ranks(options, command, self.hosts), command.config.run.spares
        self.arguments, self._preset = arguments, command.preset
        self.resumes = command.resume is not None
        self._is_named = self.resumes or bool(command.config.run.name)  # by the user
        if options.go_on and not self._is_named:
            raise PalaError("'--continue' needs the run's name: give '--run.name', too.")
        self.run = command.resume or _new_folder(command)
        if options.go_on and not self.resumes and not command.trust_run:
            _tell_of_trust(command)
        self._total_steps = command.config.total_steps
        self.start_timeout_s = command.config.run.start_timeout_s
        self._continues = options.go_on  # the same command may be given again, and has perhaps been given before
        self._may_have_begun = options.go_on  # a job has been told to begin the run
        self._is_own = False  # a job of this supervisor has begun the run, so its code may be trusted
        self._attempt: Attempt | None = None  # the job that runs, or whose record has not been read
        self._signal: int | None = None

    def supervise(self) -> int:
        """Supervise the run to its end. Returns the exit status. Raises PalaError if another supervises it."""
        refuse_another_pala()
        first, number, deadline = self.run, 1, time.monotonic() + _LEFT_OVER_S
        while True:
            try:
                with supervised(self.run):
                    if self._is_named:
                        return self._supervise()
                    with _made(self.run) as is_new:
                        if is_new:
                            return self._supervise()
            except SupervisedError as error:
                if self._is_named:
                    if not self._continues or error.is_here or time.monotonic() > deadline:
                        raise
                    say(f"waits for the lock of run '{self.run}', which a dead host's supervisor may keep for a while.")
                    nap(_LOCK_S)
                    continue
            number += 1
            self.run = first.with_name(f"{first.name}-{number}")

    def _supervise(self) -> int:
        """Start jobs until the run is complete; returns the exit status. With the run's supervisor lock held."""
        steps = -1
        futile = 0
        has_trained = False
        may_be_there = self._may_have_begun or self.resumes  # and a job may have outlived an earlier supervisor
        was_complete = may_be_there and self._is_trained()
        if may_be_there and (fault := self._left_over()) is not None:
            return self._give_up(fault)
        if self._may_have_begun and self._is_done():  # a whole array that was requeued, say
            say(f"run '{self.run}' is complete already{self._what_failed()}.")
            return 0
        if not may_be_there and self._has_record():  # else a restart would take it for this one's
            raise run_folder.taken(self.run)
        for start in range(self.restarts + 1):
            hosts = self.hosts if start == 0 else self._answering()
            if self.hosts and not hosts:
                return self._give_up("no host starts a process any more")
            before = run_folder.num_segments(self.run)
            attempt = self._attempt = Attempt(self.run, self._sizes(hosts)[0], self.start_timeout_s)
            status = self._run_job(attempt, start, hosts, steps)
            complete = self._is_complete(before)
            if not complete:  # else a signal that comes now must not end this process
                self._attempt = None
            if self._signal is not None:
                return self._status_after_signal(self._signal, status, complete, was_complete)
            if complete:
                times = f" after {start} restart{'s' if start > 1 else ''}" if start else ""
                say(f"run '{self.run}' is complete{times}.")
                return 0
            if self._all_left(before):
                say(f"all ranks were told to leave ({LEAVE.name}), so the run is stopped: not restarted.")
                return 128 + LEAVE
            # What has trained with these settings once cannot be a mistake of the user's: a full disk, say.
            if status == 2 and attempt.said_mistake and run_folder.num_segments(self.run) == before and not has_trained:
                say("the job ended with status 2 before it trained: not restarted.")
                return 2
            has_trained |= run_folder.num_segments(self.run) > before
            known, steps = steps, self._steps()
            what = f"with status {status}; the run is not complete" if status else "before the run was complete"
            say(f"the job ended {what}. Checkpoints: {steps:,} steps.")
            futile = futile + 1 if 0 <= known >= steps else 0
            if futile == _FUTILE_RESTARTS:
                return self._give_up(f"{futile} restarts one after the other brought no newer checkpoint")
            if (fault := self._left_over()) is not None:
                return self._give_up(fault)
            if self._is_complete(before):
                say("the ranks that outlived mpirun have completed the run.")
                return 0
            if start < self.restarts:
                nap(min(self.pause_s * 2.0 ** min(start, 30), _LONGEST_PAUSE_S))
        return self._give_up(f"{self.restarts} restarts were not enough" if self.restarts else "the job failed")

    def _status_after_signal(self, number: int, status: int, complete: bool, was_complete: bool) -> int:
        """Say how a job ended that was told to end. Returns this program's status: 0 if nothing is left to do.

        With `--continue` an evaluation that is missing is left to the next call, but is not tried call after call."""
        is_done = complete and (not self._continues or was_complete or self._is_done())
        end = "the run is not complete"
        if complete:
            left = ", except what follows training: the same command makes up for it"
            end = f"the run is complete{self._what_failed() if is_done else left}"
        how = f" with status {status}" * (status != 0)
        say(f"the job ended{how} after {signal.Signals(number).name}; {end}.")
        return 0 if is_done else 128 + number

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the job; without one, end. Schedulers repeat theirs; people mean a second ^C."""
        del frame
        if number == LEAVE:
            say(f"{LEAVE.name} is for one rank, which then leaves; this process only supervises, and continues.")
            return
        again, self._signal = self._signal is not None, number
        if self._attempt is None:
            sys.exit(128 + number)
        self._attempt.tell(number if again and number == signal.SIGINT else GENTLY)

    # ---- one job -------------------------------------------------------------------------------------------------

    def _run_job(self, attempt: Attempt, start: int, hosts: Sequence[Host], steps: int) -> int:
        """Start a job and wait for its end. Returns mpirun's status, or 128 + the signal that killed it."""
        ranks, spares = self._sizes(hosts)
        where = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        arguments = self._train_arguments(spares)
        verb = f"restart {start} of {self.restarts}" if start else "start"
        resumes = any(argument.startswith("--resume") for argument in arguments)
        aim = f"{'resume' if resumes else 'train'} '{self.run}'"
        who = f"{ranks} ranks{f', {spares} of them to spare,' * (spares > 0)}"
        say(f"{verb}: {who}{f' on {where}' if where else ''} {aim}{f' from {steps:,} steps' * (start > 0)}.")
        placed = ["-np", str(ranks), *(["--host", where] if where else [])]
        words = [*self.mpirun, *placed, *_AS_RANK, sys.executable, "-m", "pala.train", *arguments]
        return attempt.train(words, _environment(between_hosts=bool(hosts)))

    def _sizes(self, hosts: Sequence[Host]) -> tuple[int, int]:
        """Return (ranks, spares among them). Lost hosts cost spares first, so that as many ranks train as before."""
        ranks = min(self.ranks, sum(host.slots for host in hosts)) if hosts else self.ranks
        return ranks, max(0, min(self._spares, ranks - (self.ranks - self._spares)))

    def _train_arguments(self, spares: int) -> list[str]:
        """Return the arguments with the number of spares, if there were any: a restart may have fewer."""
        return [*self._run_arguments(), *(["--run.spares", str(spares)] if self._spares else [])]

    def _run_arguments(self) -> list[str]:
        """Return the arguments that begin the run, or resume it.

        A resumed run brings the preset's settings; the options are given again, in case that it never got them. A name
        is one word with its option, as it may begin with a dash."""
        if self.resumes:
            return self.arguments
        if self._may_have_begun:
            if self._has_record():
                trust = ["--trust-run"] * (self._is_own and "--trust-run" not in self.arguments)
                return [f"--resume={self.run}", *without_preset(self.arguments, self._preset), *trust]
            run_folder.set_aside(self.run)  # it failed before it had begun
        self._may_have_begun, self._is_own = True, not self._has_record()
        return [*self.arguments, f"--run.name={self.run.name}"]

    # ---- what became of it ---------------------------------------------------------------------------------------

    def _has_record(self) -> bool:
        return run_folder.has_record(self.run)

    def _is_complete(self, segments_before: int) -> bool:
        """Return True if the run's record says so and has an entry of the last job: an earlier one may have completed
        it."""
        return run_folder.num_segments(self.run) > segments_before and bool(run_folder.read(self.run)["completed"])

    def _all_left(self, segments_before: int) -> bool:
        """Return True if the last job was stopped because all its ranks were told to leave."""
        if run_folder.num_segments(self.run) <= segments_before:
            return False
        last = run_folder.read(self.run)["segments"][-1]
        return last.get("status") == "stopped" and last.get("signal") == LEAVE.name

    def _is_done(self) -> bool:
        """Return True if an earlier job has left nothing to do: no steps, and no evaluation or learning curve that was
        interrupted. One that failed, which may fail again, is named instead."""
        if not self._has_record():
            return False
        last = run_folder.read(self.run)["segments"][-1]
        outcomes = [outcome for what, outcome in last.get("conclusion", {}).items() if what != "rank"]
        if not outcomes or any(o.startswith("interrupted") for o in outcomes) or last.get("stopped_early"):
            return False
        return self._is_trained()

    def _is_trained(self) -> bool:
        """Return True if an earlier job has made all steps that are asked for."""
        if not self._has_record() or not run_folder.read(self.run)["completed"]:
            return False
        return run_folder.config_of(self.run).total_steps >= self._total_steps

    def _what_failed(self) -> str:
        """Name what failed after training; empty if nothing did."""
        last = run_folder.read(self.run)["segments"][-1] if self._has_record() else {}
        conclusion = last.get("conclusion", {})
        failed = [what for what, outcome in conclusion.items() if what != "rank" and outcome != "done"]
        if not failed:
            return ""
        from pala.run.user_code import trust_option

        run, trust = shlex.quote(str(self.run)), trust_option(self.run, run_folder.config_of(self.run))
        programs = [f"evaluate {run}{trust}" if what == "evaluation" else f"plot {run}" for what in failed]
        commands = " and ".join(f"`pala {program}`" for program in programs)
        return f", except its {' and '.join(failed)}: try {commands}"

    def _steps(self) -> int:
        from pala.run.checkpoint import global_steps  # loads torch: only when something went wrong

        return global_steps(self.run)

    def _left_over(self) -> str | None:
        """Wait for ranks that outlive their mpirun. Returns an error message if they do not end."""
        deadline, said = time.monotonic() + _LEFT_OVER_S, False
        while (who := who_trains(self.run)) is not None:
            if not said:
                say(f"waits for the ranks of a job that still train in '{self.run}' ({who}).")
                said = True
            if time.monotonic() > deadline:
                return (
                    f"ranks of a job still train in it ({who}), and a second job would mix its files; end them. If "
                    "their host is dead, a network file system may still hold its lock: start this again later"
                )
            time.sleep(0.2)
        return None

    def _answering(self) -> list[Host]:
        """Return the hosts that still start a process."""
        answers = answering(self.hosts, self.mpirun) if self.hosts else []
        for host in self.hosts:
            if host not in answers:
                say(f"host {host.name} does not start a process and is left out.")
        return answers

    def _give_up(self, why: str) -> int:
        if self._has_record():
            from pala.run.user_code import resume_option  # only when something went wrong

            go_on = f"continue with `{resume_option(self.run, run_folder.config_of(self.run))}`"
        else:
            go_on = "give the same command again"
        say(f"gives up on run '{self.run}': {why}. When the cause is mended, {go_on}.")
        return 1


@contextmanager
def _made(run: Path) -> Iterator[bool]:
    """Make the folder of a run whose name is not the user's, and delete it in the end if nothing was put there. False
    if it is there: another process has made it, which no lock tells where there are none. Raises PalaError."""
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        yield False
        return
    except OSError as error:
        raise cannot_be_made(run, reason(error)) from None
    try:
        yield True
    finally:
        with suppress(OSError):
            run.rmdir()


def survivable(mpirun: str) -> list[str]:
    """Return the command, with the option by which the job outlives its ranks (ULFM) where there is one. The program
    that is asked is the one that a job starts. Raises PalaError if it cannot be run."""
    command = command_of(mpirun)
    try:
        version = subprocess.run(
            [*command, "--version"], env=environment_of_jobs(), capture_output=True, text=True, check=False
        ).stdout
    except OSError as error:
        raise PalaError(f"'--mpirun {mpirun}' cannot be run: {reason(error)}; name another.") from None
    ulfm = [] if "--with-ft" in command or "(Open MPI) 5" not in version else ["--with-ft", "ulfm"]
    return [*command, *ulfm]


def _begun(command: Command) -> Path | None:
    """Return the run that this would begin, if it is there."""
    name = command.config.run.name
    run = Path(command.config.run.dir) / name
    is_there = command.resume is None and name and run_folder.has_record(run)
    return run if is_there else None


def _resuming(begun: Path, command: Command, arguments: list[str]) -> tuple[Command, list[str]]:
    """Return a command and its arguments that resume the run which the given ones have begun."""
    spares = command.config.run.spares  # as asked for: the run's last start may have had fewer
    arguments = [f"--resume={begun}", *without_preset(arguments, command.preset)]
    if spares and not any(argument.startswith("--run.spares") for argument in arguments):
        arguments += ["--run.spares", str(spares)]
    resuming = parse(arguments)
    if command.preset is not None:
        _tell_of_other_settings(command, resuming)
    return resuming, arguments


def _tell_of_other_settings(asked: Command, command: Command) -> None:
    """Report that a new run would get other settings than the resumed one has: its preset may have been edited."""
    now, own = (flatten(to_table(each.config)) for each in (asked, command))
    changed = [key for key in now if now[key] != own[key] and not key.startswith("run.")]
    if changed:
        named = "; ".join(f"'{key}' is {shown(now[key])}, in the run {shown(own[key])}" for key in changed)
        log(
            f"pala train: run '{command.resume}' continues with its own settings, which are not those that "
            f"'{asked.preset}' would give a new one: {named}. What is to change has to be given as an option."
        )


def _tell_of_trust(command: Command) -> None:
    """Report, before the first start, that a later one with the same command would be refused."""
    from pala.run.user_code import named_code

    if named := named_code(command.config):
        settings = " and ".join(f"'{key}'" for key in named)
        log(
            f"pala train: {settings} names code of your own, which a later start with '--continue' runs only by "
            "`--trust-run`: add it now, so that the same command continues the run."
        )


def _num_ranks(options: argparse.Namespace, command: Command, hosts: Sequence[Host]) -> int:
    """Return the number of ranks, spares among them. Raises PalaError if that is too many, or if none would train."""
    slots, spares = sum(host.slots for host in hosts), command.config.run.spares
    ranks: int = slots if slots and options.ranks is None else (options.ranks or usual_ranks(command)) + spares
    if ranks > _MOST_RANKS:
        raise PalaError(f"{ranks:,} ranks are asked for, but a job may have at most {_MOST_RANKS:,}.")
    if hosts and ranks > slots:
        more = f" and {spares} spare{'s' * (spares > 1)}" if spares else ""
        raise PalaError(
            f"'-n {options.ranks}'{more} is more than the hosts take, {slots}; say how many each takes, as in "
            "'--host node1:4,node2:4'."
        )
    if spares >= ranks:
        raise PalaError(f"'--spares' is {spares}, but the hosts take {ranks} ranks in all: none would train.")
    return ranks


def usual_ranks(command: Command) -> int:
    """Return the usual number of ranks: 2, or a resumed run's last number. Raises PalaError."""
    if command.resume is None:
        return 2
    return int(run_folder.read(command.resume)["segments"][-1].get("ranks", 2))


def _new_folder(command: Command) -> Path:
    """Return the folder of the run that a command begins. Raises PalaError if none can be made there."""
    run = command.config.run
    run_folder.check_place(command.config)
    return Path(run.dir) / (run.name or dated(command.preset_name or command.config.env.short_id))


def without_preset(arguments: list[str], preset: Path | None) -> list[str]:
    """Return the arguments of `pala.train` without the preset, whose name may be an option's value, too."""
    for place, argument in enumerate(arguments):
        if preset is not None and Path(argument) == preset:
            rest = [*arguments[:place], *arguments[place + 1 :]]
            with suppress(PalaError):
                if parse(rest).preset is None:
                    return rest
    return arguments


def read_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (this program's options, those of `pala.train`)."""
    parser = argparse.ArgumentParser(
        prog="pala train",
        allow_abbrev=False,
        usage="%(prog)s [options] [PRESET | --resume RUN] [options of pala.train]",
        description="Start a training job by mpirun, and resume it when it ends before the run is complete. What is "
        "not listed here is passed on to pala.train (`pala train --help`).",
    )
    parser.add_argument(
        "-n",
        "-np",
        dest="ranks",
        type=int,
        metavar="RANKS",
        help="ranks that train (by default 2; with hosts as many as they take; with --resume as many as before)",
    )
    parser.add_argument("--spares", type=int, help="further ranks, which sleep until one dies ('--run.spares')")
    parser.add_argument("--host", metavar="NAME:RANKS,...", help="hosts; one that is lost is left out of restarts")
    parser.add_argument("--hostfile", type=Path, help="the same, one a line: 'name:4' or 'name slots=4'")
    going_on = "resume '--run.name' if it has begun, and do nothing if it is done"
    parser.add_argument("--continue", dest="go_on", action="store_true", help=going_on)
    parser.add_argument("--restarts", type=int, default=0, help="the most restarts (%(default)s)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="seconds before the first; it doubles (%(default)s)")
    parser.add_argument("--mpirun", default="mpirun", help="the program with its options, in quotes (%(default)s)")
    options, others = parser.parse_known_args(arguments)
    lower_bounds = (("-n", options.ranks, 1), ("--restarts", options.restarts, 0), ("--pause-s", options.pause_s, 0))
    for name, value, least in lower_bounds:
        if value is not None and not value >= least:
            raise PalaError(f"'{name}' must be at least {least}.")
    return options, others + (["--run.spares", str(options.spares)] if options.spares is not None else [])


@exit_on_mistake(OSError)
def main() -> None:
    """Supervise one run; the exit status is 0 only if it is complete."""
    supervisor = Supervisor(*read_options(sys.argv[1:]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, *hangup(), LEAVE):
        signal.signal(number, supervisor.on_signal)
    launch = Launch.detect()
    if launch.size > 1 and launch.rank == 0:
        log(
            f"pala train: this was started {launch.size} times at once, as by srun or mpirun, and each starts a job of "
            "its own. For one run start it once: it calls mpirun itself."
        )
    sys.exit(supervisor.supervise())


if __name__ == "__main__":
    main()
