"""The protocol on a virtual cluster: `pala simulate predict --help`.

    learn     whole trainings of simulated ranks: what a step teaches under each mixing rule
    progress  how much of what the ranks learn each mixing rule leaves them
    predict   how fast gossip and its alternatives would be on up to 10,000 ranks, from measured costs

docs/simulate.md tells what is modelled and what is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pala.lab.simulate import predict, progress
from pala.system.command_line import exit_on_mistake
from pala.system.errors import PalaError, nearest
from pala.system.output import print_result
from pala.system.resources import loading, prepare


def _learn(arguments: list[str]) -> None:
    prepare(1)
    with loading():
        from pala.lab.simulate import learn  # loads torch, whose threads are counted when it is loaded

    learn.run(arguments)


_PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "learn": _learn,
    "predict": predict.run,
    "progress": progress.run,
}
"""Programs by name; each takes the rest of the command line. Raises PalaError."""


@exit_on_mistake(OSError)
def main() -> None:
    """Run `pala simulate`."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in ("", "-h", "--help"):
        print_result(__doc__)
        return
    if name not in _PROGRAMS:
        raise PalaError(
            f"'{name}' is none of: {', '.join(_PROGRAMS)}{nearest(name, _PROGRAMS) or '.'} See `pala simulate --help`."
        )
    _PROGRAMS[name](arguments)


if __name__ == "__main__":
    main()
