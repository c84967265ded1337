"""Score a run's policy on whole games with unclipped rewards: `python -m pala.evaluate runs/pong-...`.

    100 episodes, greedy actions      python -m pala.evaluate RUN --episodes 100 --greedy
    and a video of one more episode   python -m pala.evaluate RUN --video pong.mp4
    the video alone                   python -m pala.evaluate RUN --video pong.mp4 --episodes 0

Prints one line; `RUN/evaluation.json` holds the newest result of the final policy,
`RUN/evaluations.jsonl` every one.

The policy is `RUN/policy.safetensors`, by `--best` `RUN/best_policy.safetensors`; a run that has not completed is
scored on the mean of its ranks' newest checkpoints. It is computed on the CPU. What a run was trained with that was
made in Python (environment, network) or named (wrappers) is loaded, which runs code. If the run came from elsewhere,
that asks for `--trust-run`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from pala.config import EvaluationConfig
from pala.evaluation.record import EPISODES, save
from pala.run import run_folder
from pala.system.command_line import exit_on_mistake, read_command
from pala.system.runtime import loading, prepare, tell, usable_cores

_PROGRAM = "pala.evaluate"


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
    return replace(command, threads=command.threads or usable_cores())


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
    if command.episodes != 0 or command.video is None:
        evaluation = evaluate(command.run, command.episodes, command.num_envs, *common, best=command.best)
        tell(str(evaluation))
        save(command.run, evaluation)


if __name__ == "__main__":
    main()
