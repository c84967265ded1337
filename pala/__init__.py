"""PALA: gossip actor-learners for deep reinforcement learning over MPI.

    pala train -n 4 pong           # one policy, four gossiping A2C actor-learners
    pala evaluate runs/pong-...    # score it
    pala plot runs/pong-...        # see it

From Python ([docs/python.md](../docs/python.md)); each rank runs the same script:

    result = pala.fit(pala.load_preset("my_preset.toml"))    # trains, evaluates, draws
    policy = pala.load_policy(result.run)                    # no MPI from here on
    policy.act(observations)
    pala.evaluate_policy(result.run, episodes=100)

Gossip for a training loop of your own, whatever it trains: `pala.Gossip` (`pala/gossip.py`).

`import pala` loads neither torch nor MPI: what needs them is imported in the functions that call it.
"""

from __future__ import annotations

import pala.system.search_path  # first of all: it takes the working directory off the path

# isort: split
import pala.system.dependencies  # noqa: F401  before what needs them

# isort: split
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.config import Config, checked, load_preset
from pala.run.hooks import Callback, Callbacks, Moment, UserCode
from pala.system.errors import PalaError

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from pala.evaluation.policy import Policy
    from pala.evaluation.record import Evaluation
    from pala.gossip import Gossip
    from pala.job.request import Request, Result
    from pala.networks.own import MakeNetwork

__version__ = "0.2.0"
__all__ = [
    "Config",
    "Gossip",
    "Moment",
    "PalaError",
    "evaluate_policy",
    "fit",
    "load_config",
    "load_policy",
    "load_preset",
    "make_envs",
]


def __getattr__(name: str) -> Any:
    """Import `pala.Gossip` when it is asked for: it loads torch."""
    if name == "Gossip":
        from pala.gossip import Gossip

        return Gossip
    raise AttributeError(f"module 'pala' has no attribute {name!r}")


def fit(
    config: Config,
    make_env: Callable[[], Any] | None = None,
    resume: str | PathLike[str] | None = None,
    trust_run: bool = False,
    *,
    make_network: MakeNetwork | None = None,
    on_update: Callback | None = None,
    on_interval: Callback | None = None,
) -> Result:
    """Train one policy on all ranks of MPI.COMM_WORLD, evaluate it and draw the learning curve, as `python -m
    pala.train` does. Collective: every rank calls it with the same arguments, and gets the same evaluation.

    `make_env`: returns one fresh `gymnasium.Env`; wins over `config.env.id` and travels with cloudpickle to where a
    process needs it. `make_network(observation_space, num_outputs)`: returns a torch module with `trunk` and `heads`
    (`pala/networks/own.py`). The run keeps both: by name if they are defined in a module that can be imported, else as
    a pickle. `on_update`, `on_interval`: called on every rank with a `Moment`, after each of its updates and whenever
    it has written to its metrics file; one that returns False ends training on all ranks, and the run is complete: it
    is evaluated, and `run.json` says why it ended.

    The run is called after the environment unless `config.run.name` says how. `resume`: the folder or result of an
    earlier run to continue, by `config`'s settings, not the run's: `load_config` reads those. `make_env` and
    `make_network` are the run's if none are given. `trust_run`: run the code that it names or holds though it came from
    elsewhere.

    Raises PalaError for a mistake that all ranks see; a script that does not catch it ends with the sentence alone,
    printed once. With several ranks, any other error ends the whole job with its traceback, because the other ranks
    would wait for this one forever; where the job outlives its ranks (ULFM), it ends this rank alone. The call does
    not return, and its process ends, on a rank that was told to leave and on a spare that was never needed, where the
    others continue without it.
    """
    from pala.comm.agreement import collectively
    from pala.comm.mpi_process import leave_job, note_spares
    from pala.job import entry
    from pala.job.request import Request
    from pala.run.run_folder import folder_of

    with entry.script() as comm:
        callbacks = Callbacks(on_update, on_interval)
        collectively(comm, lambda: _check_callable(make_env=make_env, make_network=make_network, **callbacks._asdict()))
        config = collectively(comm, lambda: checked(config))
        folder = None if resume is None else collectively(comm, lambda: folder_of(resume))
        if config.run.spares and comm.outlives_ranks:  # else they are refused
            note_spares()
        request = Request(
            config,
            UserCode(make_env, make_network),
            callbacks,
            folder,
            facts=entry.facts(),
            trust_run=trust_run,
            conclude=entry.evaluate_and_draw,
        )
        with _with_random_numbers_of_its_own():
            result = entry.train(comm, request, lambda job: _note_on_unused(request))
        if result.departs:
            leave_job()
        return _with_evaluation(result)


@contextmanager
def _with_random_numbers_of_its_own() -> Iterator[None]:
    """Restore the global generators that training seeds: a script then draws from them what it would have drawn."""
    own, numpy = random.getstate(), sys.modules.get("numpy")  # a spare that sleeps loads neither it nor torch
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with _with_random_numbers_of_torch():
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        elif "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()


@contextmanager
def _with_random_numbers_of_torch() -> Iterator[None]:
    if "torch" not in sys.modules:
        yield
        return
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield
    if not devices and torch.cuda.is_initialized():  # by training
        torch.cuda.manual_seed_all(torch.initial_seed())


def _note_on_unused(request: Request) -> None:
    """Say which settings a new run does not read, also of those that a preset set; and that a thread hears no
    signals."""
    from pala.job.header import note_on_unused
    from pala.system.interrupt import note_on_thread
    from pala.system.output import log

    config, code = request.config, request.code
    if code.make_env is not None:  # which wins over the id
        config = replace(config, env=replace(config.env, id="environment made in Python"))
    note_on_thread("have `on_update` return False")
    note = note_on_unused(config, Config(), code.make_env is not None, code.make_network is not None)
    if request.resume is None and note:
        log(note)


def _check_callable(**given: Any) -> None:
    """Raise PalaError for what is not a function, or is what the function should return."""
    for name, value in given.items():
        is_module = not isinstance(value, type) and hasattr(value, "state_dict")  # which is callable, too
        if value is not None and (not callable(value) or is_module):
            what = {"make_env": " that returns an environment", "make_network": " that returns a torch module"}
            raise PalaError(f"'{name}' is {value!r}, but must be a function{what.get(name, ' of a `Moment`')}.")


def _with_evaluation(result: Result) -> Result:
    """Add to the result of a rank that did not evaluate what the evaluating rank wrote into the run's folder, if it
    did."""
    from pala.evaluation.record import read_evaluation
    from pala.run.run_folder import read

    if result.leads or result.status != "completed":
        return result
    outcomes = read(result.run)["segments"][-1].get("conclusion", {})
    return replace(
        result,
        outcomes={task: outcomes[task] for task in ("evaluation", "learning curve") if task in outcomes},
        evaluation=read_evaluation(result.run) if outcomes.get("evaluation") == "done" else None,
        learning_curve=result.run / "learning_curve.png" if outcomes.get("learning curve") == "done" else None,
    )


def load_config(run: str | PathLike[str]) -> Config:
    """Return the settings that a run was last started with, for `fit(load_config(run), resume=run)`. Raises
    PalaError."""
    from pala.run.run_folder import config_of

    return config_of(run)


def load_policy(run: str | PathLike[str], seed: int = 0, trust_run: bool = False, best: bool = False) -> Policy:
    """Load the policy of a run, on the CPU and without MPI: `policy.act(observations)` gives actions.

    A run that has not completed gives the mean of its ranks' newest checkpoints (`none`: the first's; Gorila: the
    shards'). `seed`: seed of sampled actions. `trust_run`: run the code that the run names or holds (its environment,
    network, wrappers) though it came from elsewhere. `best`: not the final policy, but the one of the checkpoint after
    which 100 training episodes had the best mean. Raises PalaError.
    """
    from pala.evaluation.policy import policy_of
    from pala.evaluation.scoring import check_numbers
    from pala.run.run_folder import folder_of

    check_numbers(seed=(seed, 0))
    return policy_of(folder_of(run), seed, trust_run, best)


def make_envs(run: str | PathLike[str], num_envs: int = 1, trust_run: bool = False) -> VectorEnv:
    """Make `num_envs` copies of a run's environment as `evaluate_policy` plays it: whole games, cut where it cuts
    them, rewards unclipped. `load_policy(run)` takes their observations.

    They are gymnasium's, in this process: an environment begins again in the step in which its episode ends
    (`AutoresetMode.SAME_STEP`). `trust_run`: see `load_policy`. Raises PalaError.
    """
    from pala.envs.vector import as_gymnasium
    from pala.evaluation.scoring import check_numbers, longest_game, whole_games
    from pala.run.user_code import load_trusted
    from pala.system.resources import usable_cores

    config = load_config(run)
    check_numbers(num_envs=(num_envs, 1))
    make_env, _ = load_trusted(Path(run), config, trust_run)
    games = replace(whole_games(config.env, num_envs), max_episode_steps=longest_game(config))
    return as_gymnasium(games, usable_cores(), make_env)


def evaluate_policy(
    run: str | PathLike[str],
    episodes: int | None = None,
    num_envs: int | None = None,
    greedy: bool | None = None,
    seed: int = 0,
    threads: int | None = None,
    trust_run: bool = False,
    best: bool = False,
    env_id: str = "",
    **other_settings: float,
) -> Evaluation:
    """Play whole games with a run's policy, without MPI; writes nothing. What is None is as in the run's own
    `evaluation` settings; `threads`, of torch and Atari: the cores that this process may use.

    Equal arguments give equal returns, unless the environment has chance of its own. `trust_run`, `best`: see
    `load_policy`. `env_id`: an environment in place of the run's own, with the observations and actions that the policy
    was trained with. `other_settings`: other than the run's; of Atari `noop_max`, `repeat_action_probability`,
    `max_episode_frames`, of Gorila `epsilon`. Raises PalaError.
    """
    import torch

    from pala.evaluation.scoring import Acting, evaluate
    from pala.system.resources import usable_cores

    own, threads_before = load_config(run).evaluation, torch.get_num_threads()
    episodes = own.episodes_by_hand if episodes is None else episodes
    num_envs = own.num_envs if num_envs is None else num_envs
    greedy = own.greedy if greedy is None else greedy
    acting = Acting(greedy, seed, threads or usable_cores(), trust_run, best, other_settings, env_id)
    try:
        return evaluate(Path(run), episodes, num_envs, acting)
    finally:
        torch.set_num_threads(threads_before)
