"""Score a run's policy on whole games with unclipped rewards: `pala evaluate runs/pong-...`.

    100 episodes, greedy actions      pala evaluate RUN --episodes 100 --greedy
    and a video of one more episode   pala evaluate RUN --video pong.mp4
    the video alone                   pala evaluate RUN --video pong.mp4 --episodes 0
    a curve, while it trains          pala evaluate RUN --follow
    several runs                      pala evaluate runs/pong-*
    with sticky actions               pala evaluate RUN --repeat-action-probability 0.25
    other games, as a table           pala evaluate RUN --env.id A B

Prints a line for each run, or a table of several environments. `RUN/evaluation.json` holds the newest result of the
final policy in the run's own environment (it says whether by `--greedy`), while the run is not complete that of any
policy, and `RUN/evaluations.jsonl` every one.

The policy is `RUN/policy.safetensors`, by `--best` `RUN/best_policy.safetensors`; a run that has not completed is
scored on the mean of its ranks' newest checkpoints. It is computed on the CPU. What a run was trained with that was
made in Python (environment, network) or named (wrappers) is loaded, which runs code. If the run came from elsewhere,
that asks for `--trust-run`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pala.config import EvaluationConfig
from pala.evaluation.record import save
from pala.run import run_folder
from pala.system.command_line import check_least, exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.output import log, print_result
from pala.system.resources import loading, prepare, usable_cores
from pala.system.text import short_number, table

if TYPE_CHECKING:
    from pala.evaluation.record import Evaluation
    from pala.evaluation.scoring import Acting

_PROGRAM = "pala evaluate"
_LOOK_S = 5.0  # for a newer checkpoint


@dataclass(frozen=True)
class Command:
    """Score a run's policy on whole games. Defaults come from the run's own `evaluation` settings."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs."""
    episodes: int = EvaluationConfig.episodes
    """Whole episodes; 0, together with `--video`, makes the video alone."""
    num_envs: int = EvaluationConfig.num_envs
    """Episodes played at the same time."""
    greedy: bool = EvaluationConfig.greedy
    """The most probable action instead of a sampled one; Gorila: no random actions."""
    seed: int = 0
    """Equal seeds give equal episodes."""
    video: Path | None = None
    """Also record one more episode into this MP4 file."""
    best: bool = False
    """Not the final policy, but the one of the checkpoint after which 100 training episodes had the best mean."""
    follow: bool = False
    """Score the newest checkpoints of a run that trains, then the next newer ones, and so on to the final policy."""
    threads: int = 0
    """Threads of torch and Atari; 0: all cores."""
    trust_run: bool = False
    """Run the code that the run names or holds (environment, network, wrappers, modules), though it came from
    elsewhere."""
    noop_max: int | None = None
    """Atari, other than the run's: up to this many no-ops before an episode."""
    repeat_action_probability: float | None = None
    """Atari, other than the run's: sticky actions."""
    max_episode_frames: int | None = None
    """Atari, other than the run's: emulator frames after which an episode is cut."""
    epsilon: float | None = None
    """Gorila, other than the run's: probability of a random action."""
    env_ids: Annotated[tuple[str, ...], tyro.conf.arg(name="env.id")] = ()
    """Environments in place of the run's own, by its other settings; several make a table. They must have the
    observations and actions that the policy was trained with."""


def parse(arguments: list[str]) -> list[tuple[Path, Command]]:
    """Return each run, with the command line over its own settings. Raises PalaError."""
    runs = read_command(_PROGRAM, arguments, Command()).runs
    if not runs:
        raise PalaError("Name the folder of at least one run to score.")
    commands = [(run, _over_settings_of(run, arguments)) for run in runs]
    first = commands[0][1]
    check_least("threads", first.threads, 0)
    for number, what in ((len(runs), "run"), (len(first.env_ids), "environment")):
        if number > 1 and (first.follow or first.video is not None):
            option = "--follow" if first.follow else "--video"
            raise PalaError(f"'{option}' is of one {what}, but {number} are named.")
    if first.follow and (first.best or first.video is not None or first.episodes < 1):
        raise PalaError(
            "'--follow' scores checkpoints as they come: without '--best' and '--video', and with '--episodes' above 0."
        )
    return commands


def _over_settings_of(run: Path, arguments: list[str]) -> Command:
    settings = run_folder.config_of(run).evaluation
    default = Command((), settings.episodes_by_hand, settings.num_envs, settings.greedy)
    return read_command(_PROGRAM, arguments, default)


def _follow(run: Path, score: Callable[[], Evaluation]) -> None:
    """Score checkpoints as they come, and at last the final policy."""
    from pala.run.checkpoint import global_steps  # loads torch
    from pala.run.lock import is_locked

    scored_steps, has_said = 0, False
    while True:
        record, steps = run_folder.read(run), global_steps(run)
        is_complete = record["completed"]
        if not is_complete and steps <= scored_steps:
            if not has_said and is_locked(run) is False:
                has_said = True
                status = record["segments"][-1]["status"]
                log(f"No process trains run '{run}' now ({status}): this waits until one continues it; ^C ends it.")
            time.sleep(_LOOK_S)
            continue
        try:
            evaluation = score()
        except PalaError:
            time.sleep(_LOOK_S)
            if is_complete or global_steps(run) == steps:
                raise  # else newer checkpoints have taken the place of those that were read
        else:
            scored_steps, has_said = max(steps, evaluation.global_steps), False  # others may have saved meanwhile
            if is_complete or evaluation.policy == "final":
                return


@dataclass(frozen=True)
class _Task:
    """One score: of a run's policy in one environment."""

    run: Path
    folder: Path  # absolute: an environment may change the working directory
    command: Command
    acting: Acting

    def __str__(self) -> str:
        """Return its name in a message."""
        return f"{self.run}, {self.acting.env_id}" if self.acting.env_id else str(self.run)

    def evaluate(self) -> Evaluation:
        """Play; raises PalaError. Writes nothing."""
        from pala.evaluation.scoring import evaluate

        return evaluate(self.folder, self.command.episodes, self.command.num_envs, self.acting)


def _tasks(commands: list[tuple[Path, Command]], threads: int) -> list[_Task]:
    """Return the scores to make. Loads torch."""
    from pala.evaluation.scoring import OTHER_SETTINGS, Acting

    tasks: list[_Task] = []
    for run, command in commands:
        given = {name: getattr(command, name) for name in OTHER_SETTINGS}
        other = {name: value for name, value in given.items() if value is not None}
        acting = Acting(command.greedy, command.seed, threads, command.trust_run, command.best, other)
        played = [replace(acting, env_id=env_id) for env_id in command.env_ids or ("",)]
        tasks += [_Task(run, run.absolute(), command, acting) for acting in played]
    return tasks


_COLUMNS = (
    "run",
    "environment",
    "episodes",
    "mean return",
    "standard error",
    "min",
    "median",
    "max",
    "mean length",
    "human-normalised, %",
)


def _table(scored: list[tuple[_Task, Evaluation]]) -> str:
    """Return how was played, and a row for each run and environment."""
    several_runs = len({task.run for task, _ in scored}) > 1
    infos = list(dict.fromkeys(key for _, evaluation in scored for key in evaluation.mean_info))
    rows = []
    for task, evaluation in scored:
        returns = [evaluation.mean_return, evaluation.standard_error]
        returns += [evaluation.min_return, evaluation.median_return, evaluation.max_return]
        further = [evaluation.mean_info.get(key) for key in infos]
        numbers = [*returns, evaluation.mean_length_steps, evaluation.human_normalised_score, *further]
        cells = ["" if number is None else short_number(number) for number in numbers]
        rows.append([str(task.run) if several_runs else "", task.acting.env_id, str(evaluation.episodes), *cells])
    played = dict.fromkeys(f"{task.run}: {evaluation.conditions}" for task, evaluation in scored)
    return "\n".join([*played, "", table([*_COLUMNS, *infos], rows)])


@exit_on_mistake()
def main() -> None:
    """Run `pala evaluate`."""
    commands = parse(sys.argv[1:])
    threads = commands[0][1].threads or usable_cores()
    prepare(threads)
    # Here and no earlier: they load torch and numpy, whose thread pools are sized when they load.
    with loading():
        from pala.evaluation.video import record_video

        tasks = _tasks(commands, threads)
    failed = False
    scored: list[tuple[_Task, Evaluation]] = []
    as_table = len(tasks[0].command.env_ids) > 1
    try:
        for task in tasks:
            command = task.command
            if command.video is not None:  # first, as it is the shorter one and may find that it cannot be made
                print_result(record_video(task.folder, command.video, task.acting))

            def score(task: _Task = task) -> Evaluation:
                evaluation = task.evaluate()
                scored.append((task, evaluation))
                if not as_table:
                    print_result(f"{task.run}: {evaluation}" if len(tasks) > 1 else str(evaluation))
                save(task.folder, evaluation)
                return evaluation

            if command.follow:
                _follow(task.folder, score)
            elif command.episodes != 0 or command.video is None:
                try:
                    score()
                except PalaError as error:
                    if len(tasks) == 1:
                        raise
                    failed = True
                    log(f"pala: error: {task}: {error}")
    finally:
        if as_table and scored:
            print_result(_table(scored))
    if failed:
        sys.exit(2)
