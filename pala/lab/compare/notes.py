"""What limits a comparison: sentences on what is not alike among its runs, or rough; and where they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pala.evaluation.record import action_words
from pala.lab.compare.comparison import Comparison
from pala.lab.compare.measures import WINDOW, Run
from pala.lab.compare.plan import Plan
from pala.run.run_folder import from_python
from pala.system.text import counted

_FEW_RUNS = 10


def notes(comparison: Comparison) -> list[str]:
    """Sentences on what is not alike among the runs, or rough."""
    done = [run for runs in comparison.cells.values() for run in runs]
    hidden = [name for name in comparison.looks if name not in (comparison.preset.drawn or comparison.variants)]
    cut = [run for run in comparison.runs if not run.completed]
    numbers = {len(runs) for runs in comparison.cells.values()}
    fewest = min(numbers - {1}, default=0)  # of those that have an interval
    return [note for note in (
        "" if comparison.preset.undisturbed else
        "Other work ran on the machine in the meantime, so what depends on time is left out (`undisturbed = false`).",
        f"The learning curves leave out {', '.join(f'`{name}`' for name in hidden)} (`drawn`)." if hidden else "",
        _named("Not completed, so in the learning curves only", [r for r in cut if r.cell.variant not in hidden]),
        _named("Not completed", [r for r in cut if r.cell.variant in hidden]),
        "A variant has a single run: nothing is known of its spread." if 1 in numbers else "",
        f"A variant has {fewest} runs: its intervals of one game go from the lowest run to the highest."
        if fewest in (2, 3, 4) else
        f"A variant has {fewest} runs: intervals of so few are rough, and rather too narrow."
        if 4 < fewest < _FEW_RUNS else "",
        _named("Left out for a longer run of the same seed", comparison.replaced),
        _differ(done, "the commit", commit),
        _named("Made from a changed working tree", [r for r in done if any(map(_is_changed, r.segments))]),
        _differ(done, "versions", versions),
        _differ(done, "the machine; do not compare their speeds", _kind_of_machine),
        _differ([r for r in done if r.last.get("cpu")], "the processor; do not compare their speeds", _processor),
        "Runs were made on different hosts: their speeds compare only if these are alike."
        if len({_hosts(run) for run in done}) > 1 and len(set(map(_kind_of_machine, done))) == 1 else "",
        "Games have unlike numbers of runs, by which they weigh in the table over all games."
        if _is_unbalanced(comparison) else "",
        _differ(done, "the precision of their last start", _precision),
        _differ(done, "threads", _threads, _of_ranks),
        _named("Resumed; pauses do not count as time", [run for run in done if len(run.segments) > 1]),
        _named("Resumed with another number of ranks", [run for run in done if run.was_resized]),
        _named(
            "With a network or environment from Python, whose code is not compared",
            [run for run in done if any(from_python(run.last))],
        ),
        _named("Ended early by a callback", [run for run in done if run.last.get("stopped_early")]),
        _named("More ranks than cores", [run for run in done if run.is_beyond_cores]),
        _named("Lost ranks, so without a speed", [run for run in done if run.num_lost]),
        _named("Ranks left, so without a speed", [run for run in done if run.num_left]),
        _named("Spares took places", [run for run in done if run.num_joined]),
        _named(f"Fewer than {WINDOW} training episodes", [run for run in done if 0 < len(run.returns) < WINDOW]),
        _named("Without an evaluation of the final policy", [run for run in done if run.evaluation is None]),
        _differ(done, "the time between checkpoints", lambda run: f"{run.config.run.checkpoint_interval_s:g} s"),
        _differ(done, "the log interval, within which staleness is the most", _log_interval),
        _differ(done, "the budget", lambda run: f"{run.config.total_steps:,} steps", _of_game),
        _differ([run for run in done if run.evaluation], "the evaluation", _evaluation, _of_game),
        _named("Of a cell that has another run with the same seed", _doubles(comparison)),
        "Independent learners (`none`) export one rank's policy, which has seen only its share of the steps: they are "
        "the measure of speed, not of learning." if any(r.is_independent and r.cell.ranks > 1 for r in done) else "",
    ) if note]  # fmt: skip


def left_out(plan: Plan) -> list[str]:
    """Sentences on what is not run, since it cannot be."""
    ranks: dict[str, list[int]] = {}
    for cell in plan.left_out:
        ranks.setdefault(cell.variant, []).append(cell.ranks)
    nodes = f"span nodes of {counted(plan.preset.slurm.ranks_per_node, 'rank')} ('slurm.ranks_per_node')"
    return [
        f"`{variant}` is for one node: left out with {' and '.join(map(str, dict.fromkeys(of)))} ranks, which {nodes}."
        for variant, of in ranks.items()
    ]


def not_begun(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """A sentence, or none, that names what the preset asks for and is not there: runs that it makes, and variants whose
    runs are all made elsewhere and of which there is none."""
    there = {(run.cell, run.seed) for run in runs}
    absent = [str(run) for run in plan.runs if (run.cell, run.config.seed) not in there]
    cells = [*(run.cell for run in plan.runs), *(run.cell for run in runs), *plan.left_out]
    named = {cell.variant for cell in cells}
    absent += [f"any run of {variant}" for variant in plan.preset.variants if variant not in named]
    return [f"Asked for by the preset, but not there: {'; '.join(absent)}."] if absent else []


def _in_turn(run: Run, of: Callable[[dict[str, Any]], str]) -> str:
    """What the segments have, once each, in their order; nothing of those that have none."""
    return ", then ".join(dict.fromkeys(filter(None, map(of, run.segments))))


def commit(run: Run) -> str:
    """The commits of all segments, PALA's and the user's."""

    def of(segment: dict[str, Any]) -> str:
        project = segment.get("project_git_commit")
        return str(segment.get("git_commit"))[:10] + (f" with the project's {project[:10]}" if project else "")

    return _in_turn(run, of)


def _is_changed(segment: dict[str, Any]) -> bool:
    return bool(segment.get("git_dirty") or segment.get("project_git_dirty"))


def versions(run: Run) -> str:
    """The versions of packages and of MPI in all segments."""

    def of(segment: dict[str, Any]) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in segment.get("versions", {}).items())
        return f"{packages}; {' '.join(str(segment.get('mpi')).split(',')[0].split())}"

    return _in_turn(run, of)


def machine(run: Run) -> str:
    """The hosts, platform and device of all segments."""

    def of(segment: dict[str, Any]) -> str:
        hosts = ", ".join(sorted(set(segment.get("hosts", []))))
        return f"{hosts} ({segment.get('platform')}), {segment.get('device')}"

    return _in_turn(run, of)


def _kind_of_machine(run: Run) -> str:
    """The same without the hosts, of which jobs of a cluster have others."""
    return _in_turn(run, lambda segment: f"{segment.get('platform')}, {segment.get('device')}")


def _processor(run: Run) -> str:
    return _in_turn(run, lambda segment: str(segment.get("cpu") or ""))


def _hosts(run: Run) -> tuple[str, ...]:
    return tuple(sorted({host for segment in run.segments for host in segment.get("hosts", [])}))


def _is_unbalanced(comparison: Comparison) -> bool:
    """Whether a row of the table over all games has more scores of one game than of another."""
    scores: dict[tuple[int, str], list[int]] = {}
    for cell, runs in comparison.cells.items():
        of_row = scores.setdefault((cell.ranks, cell.variant), [])
        of_row.append(sum(run.normalised is not None for run in runs))
    rows = [row for row in scores.values() if len(row) == len(comparison.preset.games) and all(row)]
    return any(len(set(row)) > 1 for row in rows)


def _precision(run: Run) -> str:
    return str(run.last.get("precision", run.config.network.precision))  # older records lack it


def _threads(run: Run) -> str:
    numbers = dict.fromkeys(str(segment.get("threads_per_rank")) for segment in run.segments)
    return f"{', then '.join(numbers)} a rank"


def _evaluation(run: Run) -> str:
    facts = run.evaluation or {}
    words = action_words(facts.get("greedy", False), facts.get("epsilon"))
    most = "" if run.is_atari else f", of at most {run.config.evaluation.max_episode_steps:,} steps"
    return f"{counted(facts['episodes'], 'episode')}, {words}{most}"


def _log_interval(run: Run) -> str:
    return f"{run.config.run.log_interval_s:g} s"


def _of_game(run: Run) -> object:
    return run.cell.game


def _of_ranks(run: Run) -> object:
    return run.cell.ranks


def _doubles(comparison: Comparison) -> list[Run]:
    return [
        run for runs in comparison.cells.values() for i, run in enumerate(runs)
        if run.seed in {other.seed for other in runs[:i]}
    ]  # fmt: skip


def _listed(runs: Iterable[Run]) -> str:
    return ", ".join(f"`{run.name}`" for run in runs)


def _named(what: str, runs: Sequence[Run]) -> str:
    return f"{what}: {_listed(runs)}." if runs else ""


def _differ(
    runs: Sequence[Run], what: str, fact: Callable[[Run], str], among: Callable[[Run], object] = lambda run: None
) -> str:
    """Which runs have which value of a fact, unless it is the same for all runs that are alike in `among`."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(fact(run), []).append(run)
    if len({(among(run), fact(run)) for run in runs}) == len({among(run) for run in runs}):
        return ""
    return f"Runs differ in {what}. " + "; ".join(f"{value}: {_listed(of)}" for value, of in groups.items()) + "."
