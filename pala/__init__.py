"""PALA: gossip actor-learners for deep reinforcement learning over MPI.

    mpirun -np 4 python -m pala.train configs/pong.toml      # one policy, four gossiping A2C actor-learners
    python -m pala.evaluate runs/pong-...                    # score it
    python -m pala.plot runs/pong-...                        # see it

From Python (each rank runs the same script): `pala.fit(config, make_env=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pala.config import Config, checked, load_preset
from pala.system.errors import PalaError

if TYPE_CHECKING:
    from pala.run.result import Result

__version__ = "0.1.0"
__all__ = ["Config", "PalaError", "fit", "load_preset"]


def fit(
    config: Config, make_env: Callable[[], Any] | None = None, resume: str | Path | None = None, trust_run: bool = False
) -> Result:
    """Train one policy on all ranks of MPI.COMM_WORLD. Collective: every rank calls it with the same arguments.

    `make_env`: returns one fresh `gymnasium.Env`; wins over `config.env.id` and travels with cloudpickle to where a
    process needs it. The run keeps it: by name if it is defined in a module that can be imported, else as a pickle.
    `resume`: the folder of an earlier run to go on with; without `make_env`, in the environment that it keeps.
    `trust_run`: load that also if it is a pickle, or a `module:id`, that came from elsewhere, which runs its code.

    The run is called after the environment, unless `config.run.name` says how. Raises PalaError for a mistake that all
    ranks see; a script that does not catch it ends with the sentence alone, printed once. With several ranks, any other
    error ends the whole job with its traceback, because the other ranks would wait for this one for ever. Where the
    others go on without a rank, one that was told to leave or a spare that nobody needed, it does not return: the
    process ends.
    """
    from pala.system.errors import CollectiveError
    from pala.system.runtime import one_sentence_for_mistakes, prepare
    from pala.transport.agreement import collectively, cores_per_rank
    from pala.transport.mpi_process import abort, leave_job, start_mpi

    comm = start_mpi()
    one_sentence_for_mistakes(comm.rank)
    try:
        config = collectively(comm, lambda: checked(config))
        cores = cores_per_rank(comm, config.run.spares)
        prepare(config.run.threads or cores)
        from pala.run.rank import run_rank

        result = run_rank(
            comm, config, make_env=make_env, resume=Path(resume) if resume is not None else None, trust_run=trust_run
        )
        if result.departs:
            leave_job()
        return result
    except CollectiveError:
        raise  # on every rank
    except BaseException as error:
        if comm.size > 1:
            abort(comm, error)  # the other ranks would wait for ever
        raise
