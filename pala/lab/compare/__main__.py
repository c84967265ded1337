"""Compare ways to train: `pala compare pong`.

    what would be run                          pala compare PRESET --dry-run
    run what is missing, then report           pala compare PRESET
    a part of it                               pala compare PRESET --only uniform Pong
    report what is there, with other runs      pala compare PRESET --report-only --add runs/from-a-cluster
    the same as jobs of Slurm                  pala compare PRESET --submit

Each run is a job of MPI of its own, in runs/NAME; the report and copies of the runs go to results/NAME. ^C or SIGTERM
ends the present job with a checkpoint, and the next call continues. docs/compare.md explains the preset and the
measures.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from pala.config.presets import read
from pala.lab.compare.collect import copies_in, keep, left_out_of, load
from pala.lab.compare.execute import chosen, execute, missing_of, nothing_missing
from pala.lab.compare.notes import left_out
from pala.lab.compare.plan import Plan, Planned, Preset, shipped_preset
from pala.lab.compare.report import write
from pala.lab.compare.slurm import Submission, unfinished
from pala.run import run_folder
from pala.run.run_folder import runs_in
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically
from pala.system.interrupt import hangup
from pala.system.output import log, print_result
from pala.system.search_path import refuse_another_pala

_PROGRAM = "pala.compare"


@dataclass(frozen=True)
class Command:
    """Run what is missing of variants x games x rank counts x seeds, and report all of it."""

    preset: Annotated[Path | None, tyro.conf.Positional] = None
    """Preset of the comparison: a TOML file, or the name of one in configs/compare/, such as `pong`."""
    only: tuple[str, ...] = ()
    """Variants and games; runs of others are not started. The report has all."""
    add: tuple[Path, ...] = ()
    """Runs made elsewhere, or folders of such runs: they are copied into the results and reported with the others."""
    report_only: bool = False
    """Start nothing."""
    submit: bool = False
    """Submit what is missing as jobs of Slurm, each of its own size, and a last one that reports (docs/clusters.md)."""
    gather: bool = False
    """Report, and fail if a run of the preset is missing: the last job of `--submit`."""
    dry_run: bool = False
    """Print the commands of what is missing, and do nothing."""
    output: Path | None = None
    """Folder of the results. Default: results/NAME."""


def compare(command: Command) -> list[Planned]:
    """Run, collect and report; returns the runs that failed. Raises PalaError."""
    if not (command.report_only or command.gather or command.dry_run):
        refuse_another_pala()
    if command.preset is None:
        raise PalaError("Name a preset, such as `pong`; `--help` explains the options.")
    ways = [f"--{way.replace('_', '-')}" for way in ("report_only", "submit", "gather") if getattr(command, way)]
    if command.dry_run and not command.submit:
        ways.append("--dry-run")
    if len(ways) > 1:
        raise PalaError(f"Give only one of {', '.join(ways)}.")
    plan = Plan(command.preset)
    runs = chosen(plan, command.only)
    results = command.output or Path("results") / plan.preset.name
    added = runs_in(command.add)
    _check_conditions(plan, results)
    for run in (*added, *copies_in(results)):  # now, and not when all has been trained
        plan.game_of(run_folder.config_of(run), run)
    for run in added:
        run_folder.check_trains_as_before(run, "compared")
    if left := left_out_of(results):
        log(f"Trained with settings that are gone, and left out: {', '.join(left)}.")
    if not runs and not (added or command.report_only or command.gather):
        for note in left_out(plan):
            log(note)
        raise PalaError(f"{plan.source} starts no run of what was asked for; give those made elsewhere by `--add`.")
    if not runs and command.dry_run:
        print(f"{plan.source} starts no run of what was asked for; what `--add` gives would be reported.")
        return []
    failures: list[Planned] = []
    if command.submit and runs:
        submission = _submission(plan, runs, command, results)
        if command.dry_run:
            _preview(submission.commands(), submission.unfit, results)
            return []
        _check_place(results)
        failures = submission.submit()
        if submission.jobs:
            return failures
    if command.submit or command.gather:
        failures = _unfinished(runs, results)
    elif runs and not command.report_only:
        missing = missing_of(runs, results)
        if command.dry_run:
            _preview([task.words for task in missing.tasks], missing.unfit, results)
            return []
        if not any(missing) and not added and not any(run.folder.exists() for run in runs):  # the results have all
            print_result(nothing_missing(results))
            return []
        _check_place(results)
        failures = execute(plan, runs, results, missing)
    _report(plan, added, results)
    return failures


def _check_conditions(plan: Plan, results: Path) -> None:
    """Check launchers, and other work beside the runs, by the preset in the results, since a run's own record lacks
    them. Raises PalaError if this preset would have made the runs there otherwise."""
    preset, own = plan.preset, results / "preset.toml"
    file = own if own.exists() else shipped_preset(preset.name)
    if not file.exists() or not copies_in(results):
        return
    before = read(file)
    variants, launcher = before.get("variants", {}), before.get("launcher", Preset.launcher)
    changed = [
        name
        for name in variants.keys() & preset.variants.keys()
        if variants[name].get("launcher", launcher) != preset.variants[name].get("launcher", preset.launcher)
    ]
    if preset.undisturbed and before.get("undisturbed") is False:
        fault = "other work ran during its runs ('undisturbed = false'), so their times are not for a report"
    elif changed:
        fault = f"runs of {', '.join(sorted(changed))} had another 'launcher'"
    else:
        return
    raise PalaError(
        f"{plan.source}: by '{file}' {fault}. Put that back, or give the comparison another 'name' for runs of its own."
    )


def _check_place(results: Path) -> None:
    """Make the folder that copies of runs go to: not being able to should show now. Raises PalaError."""
    copies = results / "runs"
    try:
        copies.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PalaError(f"The folder '{copies}' cannot be made: {reason(error)}. Give another '--output'.") from None
    if not os.access(copies, os.W_OK):
        raise PalaError(f"The folder '{copies}' may not be written to. Give another '--output'.")


def _preview(commands: Sequence[Sequence[str]], unfit: Mapping[Planned, str], results: Path) -> None:
    for run, why in unfit.items():
        log(f"{run}: {why}")
    if commands or not unfit:
        print("\n".join(map(shlex.join, commands)) or nothing_missing(results))


def _submission(plan: Plan, runs: Sequence[Planned], command: Command, results: Path) -> Submission:
    """Return the jobs, with a last one that does as this command, without submitting."""
    for note in left_out(plan):
        log(note)
    added = ["--add", *map(str, command.add)] if command.add else []
    report = [str(command.preset), "--gather", "--output", str(results), *added]
    return Submission(plan, runs, results, report, command.only)


def _unfinished(runs: Sequence[Planned], results: Path) -> list[Planned]:
    """Return the runs that the jobs of a cluster have not finished, and say each."""
    found = unfinished(runs, results)
    for run, why in found:
        print_result(f"      {run}: FAILED. {why}")
    return [run for run, _ in found]


def _report(plan: Plan, added: list[Path], results: Path) -> None:
    """Copy all runs into the results and report what is there."""
    copies = results / "runs"
    begun = (run.folder for run in plan.runs if (run.folder / "run.json").exists())
    made = [run for run in begun if not run_folder.gone_settings(run_folder.read(run))]
    for run in added:
        load(run, plan)  # one that has no place in the comparison should not be copied
    once: dict[Path, Path] = {}
    for run in (*made, *added):
        once.setdefault(run.resolve(), run)  # by the first of its names
    for run in once.values():
        keep(run, copies)
    runs = [load(folder, plan) for folder in copies_in(results)]
    if not runs:
        raise PalaError(f"There is no run of '{plan.preset.name}' to report, neither here nor in '{copies}'.")
    is_shipped = plan.file.resolve() == shipped_preset(plan.preset.name).resolve()
    if plan.file.resolve() != (results / "preset.toml").resolve() and not is_shipped:
        write_atomically(results / "preset.toml", plan.text)
    print_result("\n".join(f"      {path}" for path in write(plan, runs, results)))


def _stop(number: int, frame: object) -> NoReturn:
    """Exit: the job that runs gets a minute to write its checkpoint (`run_job`); a second signal kills it."""
    log("Stopping; a job that runs writes its checkpoint. The same command continues later.")
    sys.exit(128 + number)


@exit_on_mistake(OSError)
def main() -> None:
    """Run `pala compare`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup()):
        signal.signal(number, _stop)
    command = read_command(_PROGRAM, sys.argv[1:], Command())
    failures = compare(command)
    if failures:
        again = "Submit again: they continue." if command.gather else "The same command tries again."
        log(f"pala: failed: {'; '.join(map(str, failures))}. {again}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
