"""Notes on a comparison's limits: what differs among its runs, or is rough; and where they were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pala.evaluation.record import action_words
from pala.lab.compare.measures import Comparison, Run
from pala.lab.compare.plan import Cell, Plan
from pala.system.text import counted

_FEW_RUNS = 10


def notes(comparison: Comparison) -> list[str]:
    """Return sentences on what is not alike among the runs, or rough."""
    done = [run for runs in comparison.cells.values() for run in runs]
    drawn = comparison.preset.drawn or comparison.variants
    hidden = list(dict.fromkeys(run.cell.variant for run in comparison.runs if run.cell.variant not in drawn))
    found = [
        "" if comparison.preset.undisturbed else
        "Other work ran on the machine in the meantime, so what depends on time is left out (`undisturbed = false`).",
        f"The learning curves leave out {', '.join(f'`{name}`' for name in hidden)} (`drawn`)." if hidden else "",
        _named({
            "Not completed, so in the learning curves alone": [run for run in comparison.runs if not run.completed],
            "left out for a longer run of the same seed": comparison.replaced,
            "without an evaluation of the final policy": [run for run in done if run.evaluation is None],
        }),
        _few({len(runs) for runs in comparison.cells.values()}),
        _unlike(done),
        _named({
            "Resumed; pauses do not count as time": [r for r in done if len(r.segments) > 1],
            "resumed with another number of ranks, so without a speed": [run for run in done if run.was_resized],
            "lost ranks, so without a speed": [run for run in done if run.count("lost_ranks")],
            "ranks left, so without a speed": [run for run in done if run.count("left_ranks")],
            "spares took places": [run for run in done if run.count("joined_ranks")],
            "ended early by a callback": [run for run in done if run.last.get("stopped_early")],
        }),
        _named({"More ranks than cores": [run for run in done if run.is_beyond_cores]}),
        "Independent learners (`none`) export one rank's policy, which has seen only its share of the steps: they are "
        "the measure of speed, not of learning." if any(r.is_independent and r.cell.ranks > 1 for r in done) else "",
    ]  # fmt: skip
    return [note for note in found if note]


def _named(groups: dict[str, list[Run]]) -> str:
    """Return one sentence that names the runs of each group, without those that are empty."""
    parts = [f"{what}: {', '.join(f'`{run.name}`' for run in runs)}" for what, runs in groups.items() if runs]
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}." if parts else ""


def _few(numbers: set[int]) -> str:
    """Return what the smallest numbers of runs of a cell say of spreads and intervals."""
    fewest = min(numbers - {1}, default=0)  # of those that have an interval
    found = ["A variant has a single run: nothing is known of its spread."] if 1 in numbers else []
    if fewest in (2, 3, 4):
        found.append(f"A variant has {fewest} runs: its intervals of one game go from the lowest run to the highest.")
    elif 4 < fewest < _FEW_RUNS:
        found.append(f"A variant has {fewest} runs: intervals of so few are rough, and rather too narrow.")
    return " ".join(found)


def _unlike(runs: Sequence[Run]) -> str:
    """Return the names of facts that differ among runs that are put beside each other."""
    differing = [name for name, fact in FACTS.items() if fact.differs(runs)]
    if not differing:
        return ""
    timed = [name for name in differing if FACTS[name].decides_speed]
    speeds = f" Do not compare speeds over unlike {', '.join(timed)}." if timed else ""
    return f"Runs differ in {', '.join(differing)}; runs.csv has each.{speeds}"


def left_out(plan: Plan) -> list[str]:
    """Return sentences on what cannot be run."""
    ranks: dict[str, list[int]] = {}
    for cell in plan.left_out:
        ranks.setdefault(cell.variant, []).append(cell.ranks)
    nodes = f"span nodes of {counted(plan.preset.slurm.ranks_per_node, 'rank')} ('slurm.ranks_per_node')"
    return [
        f"`{variant}` is for one node: left out with {' and '.join(map(str, dict.fromkeys(of)))} ranks, which {nodes}."
        for variant, of in ranks.items()
    ]


def not_begun(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """Return a sentence, or none, that names what the preset asks for and is not there: runs that it makes, and
    variants without any run whose runs are all made elsewhere."""
    there = {(run.cell, run.seed) for run in runs}
    seeds: dict[Cell, list[int]] = {}
    for run in plan.runs:
        if (run.cell, run.config.seed) not in there:
            seeds.setdefault(run.cell, []).append(run.config.seed)
    absent = [f"{cell}, seed{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for cell, of in seeds.items()]
    cells = [*(run.cell for run in plan.runs), *(run.cell for run in runs), *plan.left_out]
    named = {cell.variant for cell in cells}
    absent += [f"any run of {variant}" for variant in plan.preset.variants if variant not in named]
    return [f"Asked for by the preset, but not there: {'; '.join(absent)}."] if absent else []


_Segment = dict[str, Any]


def _in_turn(of: Callable[[_Segment], str]) -> Callable[[Run], str]:
    """Return a fact of a run: what its segments have, once each, in their order, without those that have none."""
    return lambda run: ", then ".join(dict.fromkeys(filter(None, map(of, run.segments))))


def _commit(segment: _Segment) -> str:
    """Return the commits, PALA's and the user's, and whether their files had been changed."""
    own = segment.get("project_git_commit")
    project = f" with the project's {own[:10]}" if own else ""
    changed = " (changed)" if segment.get("git_dirty") or segment.get("project_git_dirty") else ""
    return f"{str(segment.get('git_commit'))[:10]}{project}{changed}"


def _versions(segment: _Segment) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in segment.get("versions", {}).items())
    return f"{packages}; {' '.join(str(segment.get('mpi')).split(',')[0].split())}"


def _platform(segment: _Segment) -> str:
    """Return platform and device, without the hosts: jobs of a cluster have others."""
    return f"{segment.get('platform')}, {segment.get('device')}"


def _machine(segment: _Segment) -> str:
    hosts = ", ".join(sorted(set(segment.get("hosts", []))))
    return f"{hosts} ({segment.get('platform')}), {segment.get('device')}"


def _hosts(run: Run) -> str:
    return " ".join(sorted({host for segment in run.segments for host in segment.get("hosts", [])}))


def _evaluation(run: Run) -> str:
    facts = run.evaluation
    if facts is None:
        return ""
    most = "" if run.is_atari else f", of at most {run.config.evaluation.max_episode_steps:,} steps"
    actions = action_words(facts.get("greedy", False), facts.get("epsilon"))
    return f"{counted(facts['episodes'], 'episode')}, {actions}{most}"


@dataclass(frozen=True)
class Fact:
    """Something that should be alike among the runs of a comparison."""

    of: Callable[[Run], str]
    """Its value, as text; empty if the record of an earlier version lacks it."""
    decides_speed: bool = False
    among: Callable[[Run], object] = lambda run: None
    """Value that has to be equal in two runs for their facts to be compared."""

    def differs(self, runs: Sequence[Run]) -> bool:
        """Return whether two of the runs that are compared have unlike values."""
        known = {(self.among(run), self.of(run)) for run in runs if self.of(run)}
        return len(known) > len({group for group, _ in known})


FACTS = {
    "commits": Fact(_in_turn(_commit)),
    "versions": Fact(_in_turn(_versions)),
    "platform": Fact(_in_turn(_platform), decides_speed=True),
    "processor": Fact(_in_turn(lambda segment: str(segment.get("cpu") or "")), decides_speed=True),
    "hosts": Fact(_hosts, decides_speed=True),
    # Older records lack the precision that was computed in.
    "precision": Fact(lambda run: str(run.last.get("precision", run.config.network.precision)), decides_speed=True),
    "threads": Fact(
        lambda run: f"{_in_turn(lambda segment: str(segment.get('threads_per_rank')))(run)} a rank",
        decides_speed=True,
        among=lambda run: run.cell.ranks,
    ),
    "budget": Fact(lambda run: f"{run.config.total_steps}", among=lambda run: run.cell.game),
    "evaluation": Fact(_evaluation, among=lambda run: run.cell.game),
    "checkpoint interval": Fact(lambda run: f"{run.config.run.checkpoint_interval_s:g} s"),
    "log interval": Fact(lambda run: f"{run.config.run.log_interval_s:g} s"),
}
"""Facts that may differ, by their names in the page and, with underscores, in runs.csv."""

ORIGIN = {"commit": _in_turn(_commit), "versions": _in_turn(_versions), "machine": _in_turn(_machine)}
"""Origin of runs, as a page gives it."""
