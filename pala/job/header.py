"""The description of a run that begins: in the first lines of the console, and in run.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pala.algorithms import ALGORITHMS
from pala.config import Config
from pala.config.influence import unused_overrides
from pala.exchange.groups import described, groups_of
from pala.system.text import counted

if TYPE_CHECKING:  # torch
    from pala.job.job import Job
    from pala.job.request import Request
    from pala.run.agent import Agent
    from pala.run.hooks import UserCode
    from pala.run.run import Run

_MOST_HOSTS = 4  # that are named
_MANY_MODELS = 8  # learned less from a step than groups of the same ranks: results/many_ranks


def first_line(config: Config, ranks: int) -> str:
    """Return what can be said before torch is loaded. `ranks`: that train."""
    spares = f" and {counted(config.run.spares, 'spare')}" * (config.run.spares > 0)
    steps = f"{config.total_steps:,} steps"
    return f"PALA  {config.env.id}, {steps}, {counted(ranks, 'rank')}{spares}: starts"


def describe(job: Job, request: Request, code: UserCode, agent: Agent[Any], run: Run) -> dict[str, Any]:
    """Return what run.json says of a segment when it begins."""
    return {
        **request.facts,
        "threads_per_rank": job.threads,
        "environment": agent.envs.name,
        "python_environment": code.make_env is not None,
        "python_network": code.make_network is not None,
        "ranks": job.num_trainers,
        "cores": job.cores,
        "resumed": run.previous is not None,
        **job.comm.facts(),
        "device": str(agent.device),
        "precision": agent.config.network.precision,
        "background": agent.network.background,
        "seed": run.config.seed,
        "parameters": agent.flat.data.numel(),
    }


def header(job: Job, agent: Agent[Any], run: Run) -> str:
    """Return the lines that say what is known when everything has been made."""
    config = agent.config
    hosts = job.hosts[: job.num_trainers]
    steps_made = agent.start.global_steps
    names = list(dict.fromkeys(hosts))
    shown = ", ".join(names[:_MOST_HOSTS]) + ", …" * (len(names) > _MOST_HOSTS)
    where = f"on {shown}" if len(names) == 1 else f"on {len(names)} hosts ({shown})"
    algorithm, threads = ALGORITHMS[config.algorithm], counted(job.threads, "thread")
    learns = algorithm.note_on_begin(config) if steps_made == 0 else ""  # later it depends on what is left
    groups = groups_of(hosts, config.exchange.group)
    steps = algorithm.step_length(config, 1 if config.exchange_kind.averages_gradients else len({*groups}))
    made = f", {steps_made:,} of them made before" * (steps_made > 0)
    if steps_made >= config.total_steps:
        made = f", and {steps_made:,} were made before: none is left to train (a larger `--total-steps` continues)"
    less = agent.network.background
    seen = f", images less their background, {less:.2f}" if less else ""
    lines = [
        f"PALA  {run.folder}",
        f"      {algorithm.method(config)}; {counted(len(hosts), 'rank')} {where}, {threads} and "
        f"{counted(config.env.num_envs, 'environment')} each",
        f"      network of {agent.flat.num_learned:,} parameters, {config.network.precision}, on {agent.device}{seen}",
        f"      {config.total_steps:,} steps over all ranks{made}{learns}",
    ]
    if steps:
        lines.insert(2, f"      {steps}")
    if len(hosts) >= _MANY_MODELS and (advice := _advice_on_groups(config, hosts)):
        lines.insert(3, f"      {advice}")
    if len(hosts) > job.cores:
        lines.insert(2, f"      {len(hosts)} ranks share {counted(job.cores, 'core')}")
    if config.exchange.has_groups:
        lines.insert(2, f"      {described(groups)}")
    return "\n".join(lines)


def _advice_on_groups(config: Config, hosts: Sequence[str]) -> str:
    """Return how the ranks could hold fewer models; empty if they do, or may not be in groups."""
    num_hosts = len(set(hosts))
    cannot = config.exchange_kind.name != "gossip" or config.run.spares or num_hosts == len(hosts)
    if cannot or config.exchange.has_groups:
        return ""
    group, fewer = ("host", num_hosts) if num_hosts > 1 else (str((len(hosts) + 1) // 2), 2)
    words = f"{len(hosts)} models may learn less from a step than {fewer}"
    return f"{words}: try `--exchange.group {group}` (docs/exchanges.md)"


def note_on_unused(config: Config, before: Config, own_env: bool = False, own_network: bool = False) -> str:
    """Return a sentence if the command line changes settings of `before` that the run does not read; else empty.
    `own_env`: it plays an environment made in Python; `own_network`: its network is."""
    if not (unused := unused_overrides(config, before, own_env, own_network)):
        return ""
    names = ", ".join(f"'{key}'" for key in unused)
    them, run = "it" if len(unused) == 1 else "them", f"{ALGORITHMS[config.algorithm].method(config)}, {config.env.id}"
    return f"{names}: set, but nothing reads {them} in this run ({run})."
