"""Results of evaluations, as `evaluation.json` and `evaluations.jsonl` in a run's folder have them."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pala.run import run_folder
from pala.system.errors import PalaError, reason
from pala.system.files import append_lines, is_number, json_text, read_json, write_json
from pala.system.text import counted, short_number

_NUMBERS = ("mean_return", "episodes", "global_steps")  # that others read of an evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, and what it depends on. A return is the unclipped sum of a whole game's rewards."""

    finished: str  # UTC, ISO 8601
    environment: str
    policy: str  # "final", "best", or of which checkpoints
    global_steps: int  # of training, over all ranks
    frames_per_step: int | None = None  # Atari: emulator frames a step, so global_steps times this are the frames
    episodes: int
    num_envs: int
    greedy: bool
    epsilon: float | None  # Gorila: probability of a random action; None of a policy that is sampled
    seed: int
    noop_max: int | None = None  # Atari
    repeat_action_probability: float | None = None  # Atari
    mean_return: float
    standard_error: float | None  # of the mean, by the sample deviation (ddof 1); None for a single episode
    min_return: float
    median_return: float
    max_return: float
    mean_length_steps: float
    human_normalised_score: float | None = None  # percent: 0 is random play, 100 the human; None if not in the table
    random_score: float | None = None
    human_score: float | None = None
    score_table: str | None = None
    steps_per_s: float
    returns: list[float]
    mean_info: dict[str, float] = field(default_factory=dict)
    """Means of the numbers in `env.episode_info`, where all are finite."""
    other_settings: dict[str, float | str] = field(default_factory=dict)
    """Those that were not the run's own; such a score is no result of the run, and stands in `evaluations.jsonl`
    alone."""

    def __str__(self) -> str:
        """Return the one line for people."""
        error = "" if self.standard_error is None else f" ± {short_number(self.standard_error)} (standard error)"
        episodes = counted(self.episodes, "episode")
        parts = [f"{self.environment}: mean return {short_number(self.mean_return)}{error} over {episodes}"]
        if self.human_normalised_score is not None:
            parts.append(f"{self.human_normalised_score:.1f} % human-normalised (dqn_zoo table)")
        parts += [f"{key} {short_number(value)}" for key, value in self.mean_info.items()]
        return f"{', '.join(parts)}, {self.conditions}"

    @property
    def conditions(self) -> str:
        """Words for how it was played, and by which policy."""
        parts = [action_words(self.greedy, self.epsilon)]
        if self.noop_max:
            parts.append(f"up to {self.noop_max} no-ops")
        if self.repeat_action_probability:
            parts.append(f"sticky actions {self.repeat_action_probability:g}")
        if "max_episode_frames" in self.other_settings:
            parts.append(f"at most {self.other_settings['max_episode_frames']:,} frames")
        policy = f"{self.policy} policy" if self.policy in ("final", "best") else self.policy
        return f"{', '.join(parts)}; {policy} after {self.global_steps:,} steps"


def action_words(greedy: bool, epsilon: float | None) -> str:
    """Return how actions were chosen, in words."""
    if epsilon:
        return f"{100 * epsilon:g}% random actions"
    return "greedy actions" if greedy or epsilon is not None else "sampled actions"


def save(run: Path, evaluation: Evaluation) -> None:
    """Append to `RUN/evaluations.jsonl` and replace `RUN/evaluation.json`, unless the run has completed meanwhile and
    this is of an earlier policy, or it was played by other settings than the run's. Raises PalaError."""
    table = asdict(evaluation)
    try:
        record, steps = run_folder.read(run), evaluation.global_steps
        is_newest = evaluation.policy == "final" and record["segments"][-1].get("global_steps", steps) == steps
        if (is_newest or not record["completed"]) and not evaluation.other_settings:
            write_json(run / "evaluation.json", table, indent=2)
        append_lines(run / "evaluations.jsonl", json_text(table) + "\n")
    except OSError as error:
        raise PalaError(f"The evaluation cannot be written to '{run}': {reason(error)}.") from None


def read_evaluation(run: Path) -> Evaluation | None:
    """Return the newest evaluation of a completed run's final policy, or None. Raises PalaError."""
    table = final_evaluation(run, run_folder.read(run))
    return Evaluation(**table) if table is not None else None


def final_evaluation(folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest evaluation, if it is of the final policy of a run that has completed. Raises PalaError."""
    try:
        evaluation = read_json(folder / "evaluation.json")
    except FileNotFoundError:
        try:
            evaluation = read_json(folder / "evaluations.jsonl", last_line=True)
        except FileNotFoundError:
            return None
    numbers = [evaluation.get(key) for key in _NUMBERS] if isinstance(evaluation, dict) else [None]
    if None in numbers or not all(map(is_number, [*numbers, evaluation.get("standard_error", 0) or 0])):
        raise PalaError(
            f"The evaluation of run '{folder}' cannot be read: {', '.join(_NUMBERS)} are not all numbers; "
            f"`pala evaluate {shlex.quote(str(folder))}` makes it again."
        )
    is_final = evaluation.get("policy") == "final" and not evaluation.get("other_settings")
    is_final &= evaluation["global_steps"] == record["segments"][-1].get("global_steps")
    found: dict[str, Any] = evaluation
    return found if record["completed"] and is_final else None
