"""Shake one's own running job: `pala chaos runs/pong`.

    kill, stop and slow ranks until the run ends    pala chaos runs/pong
    other faults, for ten minutes, one in 10 s      pala chaos runs/pong --faults stop slow --duration-s 600 --mean-s 10
    the figures as a file                           pala chaos runs/pong --output report.json

For a run that trains now, started by this user, with ranks on this host. Kills need a job that outlives its ranks
(`mpirun --with-ft ulfm`). docs/reliability.md says more. Ends with status 0 if no rank hung and none died but those
that were killed here, 1 otherwise.
"""

from __future__ import annotations

import os
import platform
import pwd
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pala.config import Config
from pala.lab.chaos.history import FAULTS, FaultName, History
from pala.lab.chaos.processes import RankProcess, find
from pala.lab.chaos.shake import TICK_S, Plan, Shaker, hang_limit_s
from pala.report.page import Column, Page, table
from pala.run import run_folder
from pala.run.lock import is_locked
from pala.run.provenance import now_utc, provenance
from pala.system.command_line import check_choices, check_least, exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.files import check_output_file, refuse_links, write_json
from pala.system.interrupt import Interrupt
from pala.system.output import print_result
from pala.system.text import counted

Result = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """Kill, stop and slow ranks of a running job of one's own, and report how the others fare."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of a run that trains now."""
    seed: int = 1
    """Seed of the faults: when, which, and to which rank."""
    mean_s: float = 30.0
    """Mean seconds between two faults. A stop, or a time in which a rank is slow, takes 0.1 to 1 of them."""
    faults: tuple[FaultName, ...] = FAULTS
    """Faults to draw from. kill: SIGKILL. stop: SIGSTOP, later SIGCONT. slow: stopped for 3 of 4 tenths of a second."""
    duration_s: float | None = None
    """Seconds after which no fault is begun. Default: until the run ends."""
    output: Path | None = None
    """JSON file for the figures; an earlier one is replaced."""


def parse(arguments: list[str]) -> tuple[Path, Command]:
    """Return the run's folder and the checked command line. Raises PalaError."""
    command = read_command("pala chaos", arguments, Command())
    if command.run is None:
        raise PalaError("Name a run that trains now, such as `runs/pong`; `--help` explains the options.")
    check_choices("faults", command.faults, FAULTS)
    check_least("seed", command.seed, 0)
    check_least("mean-s", command.mean_s, 0.1)
    if command.duration_s is not None:
        check_least("duration-s", command.duration_s, 1)
    if command.output is not None:
        check_output_file(command.output)
    return command.run, command


# ---- what is refused -------------------------------------------------------------------------------------------------


def ranks_to_shake(run: Path, faults: tuple[FaultName, ...]) -> dict[int, RankProcess]:
    """Return the processes of the run's ranks on this host. Raises PalaError if there are too few, if they cannot be
    proven to be its ranks, or if a fault would end the job."""
    record = run_folder.read(run)
    refuse_links(run)
    owner = (run / "run.json").stat().st_uid
    if owner != os.getuid():
        raise PalaError(f"Run '{run}' is {_user(owner)}'s: only your own jobs are disturbed.")
    segment = record["segments"][-1]
    if segment["status"] != "running":
        raise PalaError(f"Run '{run}' does not train: its 'run.json' says '{segment['status']}'. Start or resume it.")
    if missing := {"segment", "ranks", "hosts"} - segment.keys():
        raise PalaError(f"'{run / 'run.json'}' does not say '{min(missing)}': its job began with an earlier version.")
    found = find(run, {})
    if not found:
        raise _none_found(run, segment)
    if len(found) < 2:
        raise PalaError(
            f"Only rank {next(iter(found))} of run '{run}' can be reached from {platform.node()}, and one rank of each "
            "host is left alone. Start more ranks here."
        )
    if "kill" in faults:
        _check_outlives(run, run_folder.config_of(run, record), found)
    return found


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _none_found(run: Path, segment: dict[str, Any]) -> PalaError:
    """Return why no process here is a rank of the run."""
    here, hosts = platform.node(), sorted(set(segment["hosts"]))
    if here not in hosts:
        return PalaError(
            f"No rank of run '{run}' is on this host, {here}: they are on {', '.join(hosts)}. Processes of other hosts "
            "cannot be reached: give the command there."
        )
    if is_locked(run) is False:
        return PalaError(f"No process works in run '{run}', though its 'run.json' says 'running': its job is gone.")
    return PalaError(
        f"No process on {here} can be proven to be a rank of run '{run}': one of this user's, started by mpirun or "
        "srun, that holds the lock of the run's folder. Nothing is touched."
    )


def _check_outlives(run: Path, config: Config, found: dict[int, RankProcess]) -> None:
    """Raise PalaError if the death of a rank would end the job."""
    why = None
    if not all(process.outlived for process in found.values()):
        why = "was not started by `mpirun --with-ft ulfm`"
    elif not config.exchange_kind.outlives_ranks:
        why = f"has 'exchange.kind' '{config.exchange.kind}'"
    elif config.exchange_kind.of_algorithm:
        why = f"trains '{config.algorithm}', where some ranks cannot be spared"
    if why is not None:
        raise PalaError(f"Run '{run}' {why}: its job would end with the rank that is killed. Use `--faults stop slow`.")


# ---- the report ------------------------------------------------------------------------------------------------------


def result_of(history: History, plan: Plan, limit_s: float, log_s: float, reached: list[int]) -> Result:
    """Return the figures as the report has them. `limit_s`, `log_s`: as `Shaker` has them; `reached`: the ranks on
    this host."""
    first = min((fault.at_s for fault in history.faults), default=history.end_s)
    last = max((fault.end_s for fault in history.faults), default=0.0)
    speeds = {
        "before": history.steps_per_s(history.begin_s, first),
        "between": history.steps_per_s(first, last) if history.faults else None,
        "after": history.steps_per_s(last, history.end_s) if history.faults else None,
    }
    return {
        "plan": asdict(plan),
        "host": platform.node(),
        "ranks_reached": reached,
        "ranks": sorted(history.intervals),
        "resolution_s": log_s + TICK_S,
        "hang_limit_s": limit_s,
        "watched_s": round(history.end_s, 1),
        "faults": list(history.facts()),
        "killed": sorted(history.killed),
        "died_otherwise": history.died_otherwise,
        "left": sorted(history.left),
        "survivors": history.survivors,
        "hung": history.hung,
        "status": history.status,
        "steps_per_s": {name: None if speed is None else round(speed, 1) for name, speed in speeds.items()},
    }


_COLUMNS: tuple[Column[Result], ...] = (
    Column("at s", "at_s", ".1f"),
    Column("fault", "fault"),
    Column("rank", "rank"),
    Column("for s", "lasted_s", ".1f"),
    Column("noted after s", "noticed_s", ".1f"),
    Column("others train after s", "others_s", ".1f"),
    Column("it trains after s", "back_s", ".1f"),
    Column("steps/s before", "steps_per_s_before", ",.0f"),
    Column("after", "steps_per_s_after", ",.0f"),
)


def page_of(run: Path, result: Result) -> str:
    """Return the report as a page."""
    elsewhere = sorted(set(result["ranks"]) - set(result["ranks_reached"]))
    beyond = f" Out of reach, on other hosts or come later: {_named(elsewhere)}." if elsewhere else ""
    plan = result["plan"]
    lead = (
        f"{counted(len(result['faults']), 'fault')} in {result['watched_s']:.0f} s: seed {plan['seed']}, one in "
        f"{plan['mean_s']:g} s, of {', '.join(plan['kinds'])}. Within reach on {result['host']}: "
        f"{_named(result['ranks_reached'])}.{beyond}"
    )
    phases = {"before": "before the first fault", "between": "until the last one's end", "after": "after it"}
    speeds = [f"{speed:,.0f} {phases[name]}" for name, speed in result["steps_per_s"].items() if speed is not None]
    died = f"; died otherwise: {_named(result['died_otherwise'])}" if result["died_otherwise"] else ""
    left = f"; left: {_named(result['left'])}" if result["left"] else ""
    lines = [
        f"- killed: {_named(result['killed'])}{died}{left}; survivors: {_named(result['survivors'])}",
        f"- hung, without a record for {result['hang_limit_s']:.0f} s: {_named(result['hung'])}",
        f"- steps/s of all ranks: {', '.join(speeds) or 'not known'}",
        f"- the run is {result['status']}",
    ]
    note = (
        "The others train when each has made one whole record since the fault, the rank itself since the fault's end. "
        f"Times are as fine as the records: {result['resolution_s']:g} s."
    )
    faults = table(_COLUMNS, result["faults"])
    return Page(f"Chaos in {run}").add(lead, faults, note if faults else "", "\n".join(lines)).text()


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "none"


def exit_status(result: Result) -> int:
    """Return 1 if a rank hung, or died without being killed here, or none is left; otherwise 0."""
    return int(bool(result["hung"] or result["died_otherwise"] or not result["survivors"]))


# ---- the program -----------------------------------------------------------------------------------------------------


@exit_on_mistake(OSError)
def main() -> None:
    """Run `pala chaos`."""
    run, command = parse(sys.argv[1:])
    processes = ranks_to_shake(run, command.faults)
    plan = Plan(command.seed, command.mean_s, command.faults, command.duration_s)
    config = run_folder.config_of(run)
    patience_s = config.gorila.patience_s if config.algorithm == "gorila" else config.exchange.patience_s
    limit_s = hang_limit_s(patience_s, config.run.log_interval_s)
    facts = provenance() | {"format": 1, "date": now_utc(), "run": str(run)}
    log_s = config.run.log_interval_s
    with Interrupt().installed() as interrupt:
        shaker = Shaker(run, processes, plan, limit_s, log_s)
        shaker.shake(interrupt)
    result = facts | result_of(shaker.history, plan, limit_s, log_s, sorted(shaker.processes))
    print_result(page_of(run, result).rstrip("\n"))
    if command.output is not None:
        write_json(command.output, result, indent=1)
    sys.exit(exit_status(result) if interrupt.signal is None else 128 + interrupt.signal)


if __name__ == "__main__":
    main()
