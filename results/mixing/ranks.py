"""Why should gossip learn better than synchronous training? The candidates, measured while ranks learn CrazyClimber.

    mpirun -np 4 python results/mixing/ranks.py OUTPUT.jsonl [--steps 400000] [--segments 8] [--seed 1] [--variants ...]
    python results/mixing/ranks_report.py OUTPUT.jsonl ...     tables and a picture of them

What OUTPUT.jsonl has already is left out. Each variant trains from the same first weights. After every segment all
ranks stop together, and without learning each plays a few rollouts with its own model. Written for each segment (a
line of JSON; R ranks, M rollouts each):

gradient_cosine_between   mean cosine of two ranks' gradients, each of one rollout
gradient_cosine_within    the same of two successive rollouts of one rank
gradient_signal           |mean of all R M gradients|^2 / mean |gradient|^2: 1 if all agree, 1/(R M) if they are noise
policy_kl                 mean KL divergence between two ranks' policies, nats, on observations that all ranks are at
policy_disagreement       share of those observations at which two ranks' most probable actions differ
distance                  root mean square over ranks of |x_r - mean| / |mean|
entropy                   of the policies on those observations, nats
mean_return               of the episodes that ended in the segment, all ranks, unclipped
models_mixed, staleness   models mixed an update; the most updates without a mix
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pala.comm.agreement import cores_per_rank
from pala.comm.mpi_process import abort, start_mpi
from pala.config import Config, load_preset
from pala.run.provenance import provenance
from pala.system.interrupt import Interrupt
from pala.system.resources import prepare
from pala.system.seeding import derive

PRESET = Path(__file__).parent.parent.parent / "configs/quickstart.toml"
ROLLOUTS = 8  # of a probe, a rank
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "allreduce": {"kind": "allreduce"},
    "shared_memory ring": {"kind": "shared_memory", "max_staleness": 10},
    "gossip random, staleness 0": {"topology": "random", "max_staleness": 0},
    "gossip random, staleness 10": {"topology": "random", "max_staleness": 10},
    "gossip ring, staleness 10": {"topology": "ring", "max_staleness": 10},
    "gossip exponential, staleness 10": {"topology": "exponential", "max_staleness": 10},
    "gossip complete, staleness 10": {"topology": "complete", "max_staleness": 10},
    "gossip random every 16th update": {"topology": "random", "max_staleness": 10, "every": 16},
}


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """What every rank runs."""
    options, facts = read_options(), provenance()
    comm = start_mpi()
    try:
        threads = cores_per_rank(comm)
        prepare(threads)
        run(comm, options, facts, threads)
    except BaseException as error:
        abort(comm, error)


def run(comm: Any, options: argparse.Namespace, facts: dict[str, Any], threads: int) -> None:
    """All variants, one after the other. Collective."""
    from pala.a2c.agent import build
    from pala.lab.benchmark.measure import ContinuedEnvs
    from pala.run.agent import build_envs

    preset = load_preset(PRESET)
    # A constant rate: that of the preset falls to 0, and with it all that is measured here.
    config = replace(preset, seed=options.seed, a2c=replace(preset.a2c, learning_rate_decay="none"))
    envs = build_envs(comm, config, threads)
    agent = build(comm, config, envs)
    first = agent.flat.data.clone()
    for variant in [v for v in options.variants if not is_done(options, v, comm.size)]:
        seeds = derive(config.seed, comm.rank, f"environments {variant}", envs.num_envs)
        agent.flat.data.copy_(first)
        agent.a2c.mean_square.zero_()
        settings = dict(VARIANTS[variant])
        every = settings.pop("every", 1)
        of_variant = replace(config, exchange=replace(config.exchange, **settings))
        probe = Segments(comm, of_variant, agent, ContinuedEnvs(envs, seeds), every)
        rows = []
        for segment in range(options.segments):
            begin = time.perf_counter()
            row = probe.segment(options.steps // options.segments)
            rows.append({
                "variant": variant, "seed": options.seed, "ranks": comm.size, "segment": segment + 1,
                "segments": options.segments, "asked_steps": options.steps,
                "seconds": round(time.perf_counter() - begin, 1),
            } | row | {key: facts[key] for key in ("command", "git_commit", "git_dirty", "versions")})  # fmt: skip
            if comm.rank == 0:
                print({k: v for k, v in rows[-1].items() if k not in facts}, flush=True)
        if comm.rank == 0:
            with open(options.output, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    envs.close()


def is_done(options: argparse.Namespace, variant: str, ranks: int) -> bool:
    """Whether the output has this variant, as it is asked for now."""
    lines = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    wanted = {"variant": variant, "seed": options.seed, "ranks": ranks, "segments": options.segments}
    wanted["asked_steps"] = options.steps
    return any(wanted.items() <= json.loads(line).items() for line in lines)


class Segments:
    """A variant's training, in pieces with a probe after each."""

    def __init__(self, comm: Any, config: Config, agent: Any, envs: Any, every: int) -> None:
        import torch

        self.comm, self.config, self.agent, self.envs, self.every = comm, config, agent, envs, every
        self.generator = torch.Generator().manual_seed(int(derive(config.seed, comm.rank, "actions")[0]))
        self.seeds = derive(config.seed, comm.rank, "environments", envs.num_envs)
        self.steps = 0  # of all ranks

    def segment(self, steps: int) -> dict[str, Any]:
        """Train for `steps` of all ranks, then probe. Collective."""
        from pala.a2c.learner import Learner
        from pala.exchange.budget import ExchangeState
        from pala.exchange.make import make_exchange

        agent, comm, interrupt = self.agent, self.comm, Interrupt()
        config = replace(
            self.config, total_steps=steps,
            run=replace(self.config.run, log_interval_s=1e9, checkpoint_interval_s=1e9),
        )  # fmt: skip
        start = ExchangeState([0] * comm.size)
        exchange = make_exchange(comm, agent.flat.data, agent.flat.signature, config, start, interrupt)
        if self.every > 1:
            share_seldom(exchange, self.every)
        own = replace(agent, config=config, envs=self.envs)
        own.start, own.generator = start, self.generator
        learner = Learner(own, exchange, interrupt)
        records: list[dict[str, Any]] = []
        learner.run(self.seeds, records.extend, lambda: None)
        exchange.close(300)
        self.steps += sum(comm.allgather(learner.counters.local_steps))
        # The probe plays whole rollouts on, without the exchange, which has ended.
        exchange.between_steps = lambda: None  # type: ignore[method-assign]
        learner._ends_alone = False
        return self.probe(learner, records)

    def probe(self, learner: Any, records: list[dict[str, Any]]) -> dict[str, Any]:
        """What the ranks' models, policies and gradients say of one another. Collective; equal on all ranks."""
        import numpy as np
        import torch

        agent, comm = self.agent, self.comm
        gradients = []
        for _ in range(ROLLOUTS):
            agent.a2c.differentiate(*learner._play())
            gradients.append(agent.flat.gradient.numpy().copy())
        g = np.stack(comm.allgather(np.stack(gradients)))  # [R, M, P]
        x = np.stack(comm.allgather(agent.flat.data.numpy().copy()))  # [R, P]
        observations = torch.from_numpy(np.concatenate(comm.allgather(self.envs.observations)))
        with torch.inference_mode():
            logits = agent.network(observations)[0].float().numpy()
        logits = np.stack(comm.allgather(logits)).astype(np.float64)  # [R, N, A]
        log_p = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        p = np.exp(log_p)
        pairs = list(itertools.combinations(range(comm.size), 2))
        unit = g / np.linalg.norm(g, axis=-1, keepdims=True)
        kl = [(p[i] * (log_p[i] - log_p[j])).sum(-1).mean() for i, j in itertools.permutations(range(comm.size), 2)]
        everything = comm.allgather(records)
        intervals = [r for of_rank in everything for r in of_rank if r["type"] == "interval"]
        returns = [r["return"] for of_rank in everything for r in of_rank if r["type"] == "episode"]
        updates = sum(r["updates"] for r in intervals)
        mean = x.mean(0)
        return {
            "steps": self.steps,
            "gradient_cosine_between": float(np.mean([(unit[i] * unit[j]).sum(-1) for i, j in pairs])),
            "gradient_cosine_within": float((unit[:, 1:] * unit[:, :-1]).sum(-1).mean()),
            "gradient_signal": float((g.mean((0, 1)) ** 2).sum() / (g**2).sum(-1).mean()),
            "policy_kl": float(np.mean(kl)),
            "policy_disagreement": float(np.mean([(p[i].argmax(-1) != p[j].argmax(-1)).mean() for i, j in pairs])),
            "distance": float(np.sqrt(((x - mean) ** 2).sum(-1).mean()) / np.linalg.norm(mean)),
            "entropy": float(-(p * log_p).sum(-1).mean()),
            "mean_return": float(np.mean(returns)) if returns else None,
            "episodes": len(returns),
            "models_mixed": sum(r.get("models_mixed") or 0 for r in intervals) / updates,
            "staleness": max(r.get("staleness_updates") or 0 for r in intervals),
        }


def share_seldom(exchange: Any, every: int) -> None:
    """Keep the model from the exchange but at every so manieth update; its steps are counted then."""
    after_update, waiting = exchange.after_update, [0, 0]

    def seldom(steps: int, healthy: bool) -> bool:
        waiting[0] += 1
        waiting[1] += steps
        if waiting[0] < every:
            return healthy
        steps, waiting[:] = waiting[1], [0, 0]
        return after_update(steps, healthy)

    exchange.after_update = seldom


if __name__ == "__main__":
    main()
