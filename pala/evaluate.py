"""Score a run's policy on whole games with unclipped rewards: `python -m pala.evaluate runs/pong-...`.

    100 episodes, greedy actions      python -m pala.evaluate RUN --episodes 100 --greedy
    and a video of one more episode   python -m pala.evaluate RUN --video pong.mp4
    the video alone                   python -m pala.evaluate RUN --video pong.mp4 --episodes 0
    a curve, while it trains          python -m pala.evaluate RUN --follow

Prints one line; `RUN/evaluation.json` holds the newest result of the final policy,
`RUN/evaluations.jsonl` every one.

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
from pala.evaluation.record import EPISODES, save
from pala.run import run_folder
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.runtime import loading, prepare, tell, usable_cores

if TYPE_CHECKING:
    from pala.evaluation.record import Evaluation

_PROGRAM = "pala.evaluate"
_LOOK_S = 5.0  # for a newer checkpoint


@dataclass(frozen=True)
class Command:
    """Score a run's policy on whole games. Defaults come from the run's own `evaluation` settings."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    episodes: int = EPISODES
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


def parse(arguments: list[str]) -> Command:
    """The command line over the run's own settings. Raises PalaError."""
    first = read_command(_PROGRAM, arguments, Command(run=tyro.MISSING))
    settings = run_folder.config_of(first.run).evaluation
    default = Command(first.run, settings.episodes or Command.episodes, settings.num_envs, settings.greedy)
    command = read_command(_PROGRAM, arguments, default)
    if command.follow and (command.best or command.video is not None or command.episodes < 1):
        raise PalaError(
            "'--follow' scores checkpoints as they come: without '--best' and '--video', and with '--episodes' above 0."
        )
    return replace(command, threads=command.threads or usable_cores())


def _follow(run: Path, score: Callable[[], Evaluation]) -> None:
    """Score checkpoints as they come, and at last the final policy."""
    from pala.run.checkpoint import global_steps  # loads torch

    scored_steps = 0
    while True:
        is_complete, steps = run_folder.read(run)["completed"], global_steps(run)
        if not is_complete and steps <= scored_steps:
            time.sleep(_LOOK_S)
            continue
        try:
            is_complete |= score().policy == "final"
        except PalaError:
            time.sleep(_LOOK_S)
            if is_complete or global_steps(run) == steps:
                raise  # else newer checkpoints have taken the place of those that were read
        else:
            scored_steps = steps
            if is_complete:
                return


@exit_on_mistake()
def main() -> None:
    """What `python -m pala.evaluate` runs."""
    command = parse(sys.argv[1:])
    prepare(command.threads)
    # Here and no earlier: they load torch and numpy, whose thread pools are sized when they load.
    with loading():
        from pala.evaluation.play import evaluate
        from pala.evaluation.video import record_video

    common = command.greedy, command.seed, command.threads, command.trust_run
    if command.video is not None:  # first, as it is the shorter one and may find that it cannot be made
        tell(record_video(command.run, command.video, *common, best=command.best))

    def score() -> Evaluation:
        evaluation = evaluate(command.run, command.episodes, command.num_envs, *common, best=command.best)
        tell(str(evaluation))
        save(command.run, evaluation)
        return evaluation

    if command.follow:
        _follow(command.run, score)
    elif command.episodes != 0 or command.video is None:
        score()


if __name__ == "__main__":
    main()
