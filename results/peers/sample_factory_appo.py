"""Train Sample Factory's APPO on an Atari game until the mean of 100 episodes is at a target.

    python sample_factory_appo.py Breakout --target 30.5 --seed 1 --minutes 60 --output appo-Breakout-1.csv

Settings: those of Sample Factory's own Atari example (sf_examples/atari/atari_params.py), on the processor. A line of
the output is an episode: seconds since the first environment began, steps of all environments, unclipped return.
`--option` passes one of Sample Factory's options over these, as `--option async_rl=True`.
"""

import argparse
import csv
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium

FOLDER = "PALA_PEERS_EPISODES"
START_S = 120.0


class Record(gymnasium.Wrapper):
    """Writes each episode of one environment: the time, this environment's steps so far, unclipped return."""

    def __init__(self, env, folder):
        super().__init__(env)
        self._path = Path(folder) / f"{os.getpid()}-{id(self)}.csv"
        self._steps = 0
        self._write("")

    def step(self, action):
        outcome = self.env.step(action)
        self._steps += 1
        if "episode" in outcome[4]:
            self._write(float(outcome[4]["episode"]["r"]))
        return outcome

    def _write(self, value):
        with self._path.open("a") as file:
            file.write(f"{time.time()},{self._steps},{value}\n")


def make(name, config, env_config, render_mode=None):
    """An environment as Sample Factory's example makes it; in its workers, which give `env_config`, recorded."""
    from sf_examples.atari.atari_utils import make_atari_env

    env = make_atari_env(name, config, env_config, render_mode)
    return env if env_config is None else Record(env, os.environ[FOLDER])


def train(arguments):
    """The program that trains, as Sample Factory's example does."""
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import run_rl
    from sf_examples.atari.train_atari import parse_atari_args, register_atari_components

    register_atari_components()
    cfg = parse_atari_args(arguments)
    register_env(cfg.env, make)
    sys.exit(run_rl(cfg))


def episodes_in(folder):
    """The episodes of all environments, in the order of time: [seconds, steps of all, return]."""
    rows, begin_s = [], None
    for number, path in enumerate(sorted(folder.glob("*.csv"))):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and line.count(",") == 2:
                time_s, steps, value = line.strip().split(",")
                rows.append((float(time_s), number, int(steps), value))
    rows.sort()
    made, episodes = {}, []
    for time_s, number, steps, value in rows:
        begin_s = time_s if begin_s is None else begin_s
        made[number] = steps
        if value:
            episodes.append([f"{time_s - begin_s:.2f}", sum(made.values()), float(value)])
    return episodes


def main():
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    command = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "episodes"
        folder.mkdir()
        arguments = ["--algo=APPO", f"--env=atari_{command.game.lower()}", "--device=cpu", f"--seed={command.seed}"]
        arguments += ["--experiment=peer", f"--train_dir={temporary}"] + [f"--{option}" for option in command.option]
        code = "import sys, sample_factory_appo as s; s.train(sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], start_new_session=True, cwd=Path(__file__).parent,
            env=os.environ | {FOLDER: str(folder)},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        episodes, start_s = [], time.perf_counter()
        begin_s = start_s
        try:
            while process.poll() is None and time.perf_counter() - begin_s < 60 * command.minutes:
                time.sleep(2)
                if not any(folder.iterdir()):
                    begin_s = time.perf_counter()
                    if begin_s - start_s > START_S:
                        sys.exit(f"No environment has begun within {START_S:.0f} s; errors stand above.")
                episodes = episodes_in(folder)
                last = [value for _, _, value in episodes[-100:]]
                if len(last) == 100 and sum(last) / 100 >= command.target:
                    break
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    with command.output.open("w", newline="") as file:
        packages = ", ".join(f"{name} {version(name)}" for name in ("sample-factory", "torch", "gymnasium", "ale-py"))
        options = " ".join(command.option) or "no option"
        file.write(f"# {packages}, Python {platform.python_version()}; {options}\n")
        writer = csv.writer(file)
        writer.writerow(["seconds", "steps", "return"])
        writer.writerows(episodes)


if __name__ == "__main__":
    main()
