"""Python's search path: the working directory is on it only for the user's own code, and only once that is trusted.

The working directory may be a run's folder from elsewhere, or hold one. torch and other libraries look for optional
modules, as `dill`: whatever has such a name there would be executed. `import pala` loads this module before all else.
"""

from __future__ import annotations

import os
import sys


def _leave_out_working_directory() -> None:
    """Take away what `python -m pala.PROGRAM` has put first. A script's own folder stays, and so does PYTHONPATH."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module.partition(".")[0] != "pala" or _is_safe():
        return
    first = sys.path.pop(0)
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    if os.path.realpath(first or os.curdir) == os.path.realpath(home) and home not in sys.path:
        sys.path.append(home)  # a checkout that is not installed: processes of environments import PALA from here


def find_own_modules() -> None:
    """Look for modules in the working directory, too: last, so that they take the place of none that is installed.

    To be called before the user's own code is imported: code that the command line names, or a run that is trusted.
    """
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # a folder that is gone
        return
    if not _is_safe() and here not in sys.path:
        sys.path.append(here)


def refuse_deleted_folder() -> None:
    """Raise PalaError if the working directory was deleted: no relative path leads anywhere, and some libraries do not
    load."""
    from pala.system.errors import PalaError

    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        raise PalaError("the current folder was deleted, or cannot be read: go to another one by `cd`.") from None


def refuse_another_pala() -> None:
    """Raise PalaError if the working directory holds another `pala`, which `python -m pala.train` there would execute.

    To be called before such processes are started. The checkout that PALA was installed from is no other."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    from pala.system.errors import PalaError

    here = os.path.realpath(os.curdir)
    others = [name for name in ("pala.py", "pala/__init__.py") if os.path.exists(name)]  # noqa: PTH110
    if not others or os.path.realpath(os.path.join(__file__, "../../..")) == here:  # noqa: PTH118
        return
    try:
        source = json.loads(distribution("pala").read_text("direct_url.json") or "{}").get("url", "")
    except (PackageNotFoundError, ValueError):
        source = ""
    checkout = unquote(urlsplit(source).path)
    if not checkout or os.path.realpath(checkout) != here:
        raise PalaError(
            f"The current folder holds '{others[0]}', which Python would take for PALA; start this in another folder."
        )


def _is_safe() -> bool:
    """Return whether Python was told (`-P`, PYTHONSAFEPATH; from 3.11 on) to leave the working directory out
    altogether."""
    return bool(getattr(sys.flags, "safe_path", False))


_leave_out_working_directory()
