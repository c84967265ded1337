"""The gossip protocol put to the test, for developers: `python tests/explorer check --help`.

    check     thousands of schedules drawn at random, with faults, against what must hold in every one
    explore   every order of events of two or three ranks, with faults

Its README tells what is checked and what is not.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(_TESTS), str(_TESTS.parent)]  # in place of this folder: a package, not a heap of modules

from explorer import check, explore  # noqa: E402
from pala.system.command_line import exit_on_mistake  # noqa: E402
from pala.system.errors import PalaError, nearest  # noqa: E402

_PROGRAMS = {"check": check.run, "explore": explore.run}


@exit_on_mistake()
def main() -> None:
    """Run what the command line names."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once: its processes end with it, and no file is left
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in ("", "-h", "--help"):
        print(__doc__)
        return
    if name not in _PROGRAMS:
        raise PalaError(f"'{name}' is none of: {', '.join(_PROGRAMS)}{nearest(name, _PROGRAMS) or '.'}")
    _PROGRAMS[name](arguments)


if __name__ == "__main__":
    main()
