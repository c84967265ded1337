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
from collections.abc import Callable, Mapping, Sequence
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

_PROGRAM = "pala compare"


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


@dataclass(frozen=True)
class _Asked:
    """A command, and what it names."""

    command: Command
    plan: Plan
    runs: list[Planned]
    added: list[Path]
    results: Path


def compare(command: Command) -> list[Planned]:
    """Run, collect and report; returns the runs that failed. Raises PalaError."""
    mode = _mode(command)
    starts = mode in ("run", "submit")
    if starts and not command.dry_run:
        refuse_another_pala()
    if command.preset is None:
        raise PalaError("Name a preset, such as `pong`; `--help` explains the options.")
    plan = Plan(command.preset)
    results = command.output or Path("results") / plan.preset.name
    asked = _Asked(command, plan, chosen(plan, command.only), runs_in(command.add), results)
    _check(asked)
    if asked.runs or not starts:
        return _MODES[mode](asked)
    if not asked.added:
        for note in left_out(plan):
            log(note)
        raise PalaError(f"{plan.source} starts no run of what was asked for; give those made elsewhere by `--add`.")
    if command.dry_run:
        print_result(f"{plan.source} starts no run of what was asked for; what `--add` gives would be reported.")
        return []
    return _report(asked)


def _mode(command: Command) -> str:
    """Return the one of `_MODES` that is asked for. Raises PalaError if several are."""
    modes = [mode for mode in _MODES if getattr(command, mode, False)]
    options = [*modes, "dry_run"] if command.dry_run and not command.submit else modes
    if len(options) > 1:
        raise PalaError(f"Give only one of {', '.join(f'--{option}' for option in options).replace('_', '-')}.")
    return modes[0] if modes else "run"


def _run(asked: _Asked) -> list[Planned]:
    runs, results = asked.runs, asked.results
    missing = missing_of(runs, results)
    if asked.command.dry_run:
        return _preview([task.words for task in missing.tasks], missing.unfit, results)
    if not any(missing) and not asked.added and not any(run.folder.exists() for run in runs):  # the results have all
        print_result(nothing_missing(results))
        return []
    _check_place(results)
    return _report(asked, execute(asked.plan, runs, results, missing))


def _submit(asked: _Asked) -> list[Planned]:
    submission = _submission(asked)
    if asked.command.dry_run:
        return _preview(submission.commands(), submission.unfit, asked.results)
    _check_place(asked.results)
    refused = submission.submit()
    return refused if submission.jobs else _gather(asked)


def _gather(asked: _Asked) -> list[Planned]:
    """Report, and return the runs that the jobs of a cluster have not finished."""
    found = unfinished(asked.runs, asked.results)
    for run, why in found:
        print_result(f"      {run}: FAILED. {why}")
    return _report(asked, [run for run, _ in found])


def _check(asked: _Asked) -> None:
    """Find mistakes now, and not when all has been trained. Raises PalaError."""
    plan, results = asked.plan, asked.results
    _check_conditions(plan, results)
    for run in (*asked.added, *copies_in(results)):
        plan.game_of(run_folder.config_of(run), run)
    for run in asked.added:
        run_folder.check_trains_as_before(run, "compared")
    if left := left_out_of(results):
        log(f"Trained with settings that are gone, and left out: {', '.join(left)}.")


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


def _preview(commands: Sequence[Sequence[str]], unfit: Mapping[Planned, str], results: Path) -> list[Planned]:
    """Print what would be started; returns nothing that failed."""
    for run, why in unfit.items():
        log(f"{run}: {why}")
    if commands or not unfit:
        print_result("\n".join(map(shlex.join, commands)) or nothing_missing(results))
    return []


def _submission(asked: _Asked) -> Submission:
    """Return the jobs, with a last one that does as this command, without submitting."""
    command = asked.command
    for note in left_out(asked.plan):
        log(note)
    added = ["--add", *map(str, command.add)] if command.add else []
    report = [str(command.preset), "--gather", "--output", str(asked.results), *added]
    return Submission(asked.plan, asked.runs, asked.results, report, command.only)


def _report(asked: _Asked, failures: Sequence[Planned] = ()) -> list[Planned]:
    """Copy all runs into the results and report what is there; returns the failures."""
    plan, results, added = asked.plan, asked.results, asked.added
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
    return list(failures)


_MODES: dict[str, Callable[[_Asked], list[Planned]]] = {
    "run": _run,
    "report_only": _report,
    "submit": _submit,
    "gather": _gather,
}


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
