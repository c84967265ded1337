"""PALA's programs by one command: `pala train pong` is `python -m pala.train pong`.

    train      a policy: pala train pong, on 4 ranks pala train -n 4 pong
    tune       which learning rate suits an environment, by a few short simulated trainings
    doctor     what would stop training here, and what to do about it
    evaluate   score a run's policy on whole games, and make a video of it
    play       show a run's policy in a window
    plot       learning curves of one or several runs
    trace      the timeline of a run: what its ranks do, and their messages
    compare    variants x games x rank counts x seeds, and a report
    benchmark  how fast training is on this machine
    simulate   gossip on simulated ranks: learning, progress, speed
    chaos      kill, stop and slow ranks of one's own running job
    scores     the table of the 49 games from runs of Gorila
    presets    the presets that come with PALA

`pala PROGRAM --help` explains each program's options; `pala --version` says which PALA this is.
"""

from __future__ import annotations

import importlib
import re
import signal
import sys

import pala
from pala.system.interrupt import note_leave
from pala.system.output import open_closed_streams, print_result

PROGRAMS = {
    "train": "pala.train",
    "tune": "pala.lab.simulate.tune",
    "doctor": "pala.doctor.__main__",
    "evaluate": "pala.evaluation.evaluate",
    "play": "pala.evaluation.play",
    "plot": "pala.report.plot",
    "trace": "pala.report.draw_timeline",
    "compare": "pala.lab.compare.__main__",
    "benchmark": "pala.lab.benchmark.__main__",
    "simulate": "pala.lab.simulate.__main__",
    "chaos": "pala.lab.chaos.__main__",
    "scores": "pala.lab.scores",
    "presets": "pala.presets",
}
"""Module of each program, which has a `main`."""
_OF_RANKS = ("-n", "-np", "--host", "--hostfile", "--restarts", "--spares", "--continue", "--mpirun")


def main() -> None:
    """Run the program that the first argument names, or print the list of programs."""
    open_closed_streams()
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load there is nothing to keep
    name = (sys.argv[1:2] or [""])[0]
    if name == "train":
        note_leave()
    if name in ("", "-h", "--help"):
        print_result(__doc__)
        return
    if name == "--version":
        print_result(f"pala {pala.__version__}")
        return
    if name not in PROGRAMS:
        from pala.system.errors import nearest
        from pala.system.output import log

        log(f"pala: error: '{name}' is none of: {', '.join(PROGRAMS)}{nearest(name, PROGRAMS) or '.'}")
        sys.exit(2)
    sys.argv[:2] = [f"pala {name}"]
    starts_ranks = name == "train" and _starts_ranks(sys.argv[1:])
    program = importlib.import_module("pala.supervise" if starts_ranks else PROGRAMS[name])
    signal.signal(signal.SIGINT, handler)
    program.main()


def _starts_ranks(arguments: list[str]) -> bool:
    """Return whether `pala train` is to start mpirun by itself: an option says on how many ranks, or where."""
    return any(re.sub(r"^-n\d+$", "-n", argument).split("=")[0] in _OF_RANKS for argument in arguments)


if __name__ == "__main__":
    main()
