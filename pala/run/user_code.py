"""Code of the user's that a run needs, and when it is trusted.

| where | holds |
|---|---|
| `make_env.txt`, `make_network.txt` | the name, `module:name`, of a factory that can be imported |
| `make_env.pkl`, `make_network.pkl` | any other factory, by cloudpickle |
| `run.json` | names in `env.wrappers` and `network.custom`, a module in `env.id`, or arguments, which may be names |

Importing what a folder names, or loading its pickles, runs code. So all of it asks for `--trust-run`, except from the
processes of the job that has kept it there.
"""

from __future__ import annotations

import os
import platform
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle

from pala.config import Config
from pala.run import run_folder
from pala.run.hooks import NO_CODE, UserCode
from pala.run.run_folder import CODE_ENDINGS, CODE_FILES
from pala.system.errors import PalaError
from pala.system.files import open_to_read, refuse_links, write_atomically
from pala.system.names import cannot_be_loaded, import_named, name_of
from pala.system.output import log
from pala.system.search_path import find_own_modules

_own_runs: set[tuple[int, int]] = set()  # device and inode of the folders of this job's runs


def keep(run: Path, code: UserCode) -> None:
    """Write it into the run's folder: by name what can be imported by that, else as a pickle. Raises OSError, and
    PalaError if one cannot be kept: then all is as it was."""
    kept = {what: _to_keep(what, factory) for what, factory in code._asdict().items() if factory is not None}
    for what, (ending, data) in kept.items():  # all can be kept: nothing is changed else
        write_atomically(run / f"{what}.{ending}", data)
        for other in CODE_ENDINGS:
            if other != ending:
                (run / f"{what}.{other}").unlink(missing_ok=True)


def trust_own(run: Path) -> None:
    """Trust a run from here on in this process, whose job trains it: its code was given, or has been trusted."""
    _own_runs.add(_identity(run))


def forget(run: Path) -> None:
    """Delete what another job has kept here. Raises OSError."""
    for file in CODE_FILES:
        (run / file).unlink(missing_ok=True)


def check_trust(run: Path, config: Config, trust_run: bool, given: UserCode = NO_CODE) -> None:
    """Raise PalaError if the run holds links, brings code along without being trusted, or lacks code of its own.

    `config`: the run's. What is `given` is not loaded from the run.
    """
    refuse_links(run)
    _check_whole(run, given)
    pieces = _pieces(run, config, given)
    if pieces and not trust_run and _identity(run) not in _own_runs:
        raise PalaError(
            f"Run '{run}' brings code along, {' and '.join(pieces)}. Loading it runs whatever it is: if it is yours, "
            "or you trust whoever made it, add `--trust-run` (from Python: `trust_run=True`)."
        )


def trust_option(run: Path, config: Config) -> str:
    """Return ` --trust-run`, to end a command with, for a run that brings code along; else nothing."""
    return " --trust-run" * bool(_pieces(run, config, NO_CODE))


def resume_option(run: Path, config: Config) -> str:
    """Return the options that continue a run, with `--trust-run` if it brings code along."""
    return f"--resume {shlex.quote(str(run))}{trust_option(run, config)}"


def _identity(run: Path) -> tuple[int, int]:
    status = os.stat(run)  # noqa: PTH116
    return status.st_dev, status.st_ino


def _check_whole(run: Path, given: UserCode) -> None:
    """Raise PalaError if a factory that the run was made with is neither there nor given: another environment of the
    same id, say, would be played in its place."""
    if not (run / "run.json").exists():
        return
    last = run_folder.read(run)["segments"][-1]
    for what, is_made in zip(UserCode._fields, run_folder.from_python(last), strict=True):
        if is_made and getattr(given, what) is None and _kept(run, what) is None:
            files = " or ".join(f"'{what}.{ending}'" for ending in CODE_ENDINGS)
            raise PalaError(
                f"Run '{run}' was made with a `{what}` from Python, but the file that keeps it, {files}, is not there: "
                "copy it from where the run was made. (`pala.fit` can continue the run if it is given again.)"
            )
    made_by, here = last.get("versions", {}).get("python"), platform.python_version()
    pickles = [f"{what}.pkl" for what in UserCode._fields if getattr(given, what) is None and _is_pickled(run, what)]
    if pickles and made_by is not None and _minor(made_by) != _minor(here):
        _say_once(
            f"Run '{run}' keeps '{pickles[0]}', which Python {made_by} has written, and this is {here}. A pickle with "
            "functions may not work with another Python: if it does not, use that one, or give a factory that can be "
            "imported by its name."
        )


@cache
def _say_once(text: str) -> None:
    log(text)


def load(run: Path, given: UserCode = NO_CODE) -> UserCode:
    """Return the factories that the run was made with, in place of those not `given`. Runs their code: call
    `check_trust` first. Raises PalaError if one cannot be loaded."""
    return UserCode(*(factory or _load_one(run, what) for what, factory in given._asdict().items()))


def load_trusted(run: Path, config: Config, trust_run: bool) -> UserCode:
    """Check trust in a run's code, then load it."""
    check_trust(run, config, trust_run)
    return load(run)


def _kept(run: Path, what: str) -> Path | None:
    """Return the file that a factory is kept in; a name wins over a pickle."""
    return next((file for ending in CODE_ENDINGS if (file := run / f"{what}.{ending}").exists()), None)


def _is_pickled(run: Path, what: str) -> bool:
    file = _kept(run, what)
    return file is not None and file.suffix == ".pkl"


def _minor(version: str) -> list[str]:
    return str(version).split(".")[:2]


def _to_keep(what: str, factory: Any) -> tuple[str, bytes]:
    """Return the ending and the content of the file that a factory is kept in."""
    imported_by = name_of(factory)
    if imported_by is not None:
        return "txt", imported_by.encode()
    advice = "define it in a module that can be imported, so that its name is enough."
    try:
        data = cloudpickle.dumps(factory)
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(f"'{what}' cannot be kept with the run ({error}): {advice}") from error
    return "pkl", data


def _load_one(run: Path, what: str) -> Any:
    file = _kept(run, what)
    if file is None:
        return None
    try:
        with open_to_read(file) as opened:
            content = opened.read()
        if file.suffix == ".txt":
            return import_named(content.decode(errors="replace"), f"'{file}'")
        find_own_modules()
        return cloudpickle.loads(content)
    except PalaError:
        raise
    except Exception as error:  # it is the user's code: anything may happen
        raise cannot_be_loaded(f"'{file}'", error) from error


def _pieces(run: Path, config: Config, given: UserCode) -> list[str]:
    """Describe the parts of a run's code that would be run."""
    files = [_kept(run, what) for what, factory in given._asdict().items() if factory is None]
    pieces = [f"'{file}' (a {'name' if file.suffix == '.txt' else 'pickle'})" for file in files if file is not None]
    return pieces + [f"{key!r} {value}" for key, value in named_code(config).items()]


def named_code(config: Config) -> dict[str, list[str]]:
    """Return the settings that name code which neither PALA nor Gymnasium brings, or give it arguments."""
    names = {
        "env.wrappers": [name for name in config.env.wrappers if not name.isidentifier()],  # else Gymnasium's own
        "env.id": [config.env.id] if ":" in config.env.id or "(" in config.env.id else [],
        "network.custom": [config.network.custom] if config.network.custom else [],
    }
    return {key: value for key, value in names.items() if value}
