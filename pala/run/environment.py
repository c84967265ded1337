"""An environment that runs code of the user's, as a run's folder keeps it: made from Python, or a `module:id`.

| file | holds | is loaded |
|---|---|---|
| `make_env.txt` | the name, `module:name`, of a factory that can be imported | from the user's own modules |
| `make_env.pkl` | any other factory, by cloudpickle | if this user's own job wrote it, or by `--trust-run` |
| `make_env.signature` | who wrote the pickle: its HMAC by the user's own key | |
| `make_env.id.signature` | the same of an `env.id` in run.json that names a module | its module, on the same terms |

Loading a pickle runs whatever code is in it, and importing a module whatever is in that. So what came from elsewhere is
loaded only by request. Whose job wrote it is told by a secret key in the user's home, as Jupyter tells trusted
notebooks: no folder can bring it along.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.machinery
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from pala.envs import MakeEnv
from pala.run import run_folder
from pala.system.errors import PalaError
from pala.system.files import open_to_read, write_atomically

NAME, PICKLE, SIGNATURE, ID_SIGNATURE = FILES = (
    "make_env.txt", "make_env.pkl", "make_env.signature", "make_env.id.signature"
)  # fmt: skip
_MOST_NAME_BYTES = 1000
_MOST_PICKLE_BYTES = 64 << 20
_KEY_BYTES = 32


def is_kept(run: Path) -> bool:
    """Whether the run was made with an environment from Python."""
    return (run / NAME).exists() or (run / PICKLE).exists()


def keep(run: Path, make_env: MakeEnv) -> None:
    """Write it into the run's folder: its name if it can be imported by that, else a signed pickle. Raises OSError."""
    name = _name_of(make_env)
    if name is not None:
        write_atomically(run / NAME, name.encode())
        for file in (PICKLE, SIGNATURE):
            (run / file).unlink(missing_ok=True)
        return
    data = cloudpickle.dumps(make_env)
    key = _own_key()
    if key is not None:
        write_atomically(run / SIGNATURE, _signature(key, data).encode())
    write_atomically(run / PICKLE, data)
    (run / NAME).unlink(missing_ok=True)


def keep_id(run: Path, env_id: str) -> None:
    """Sign an id that names a module. Raises OSError."""
    if ":" in env_id and (key := _own_key()) is not None:
        write_atomically(run / ID_SIGNATURE, _signature(key, env_id.encode()).encode())


def forget(run: Path) -> None:
    """Delete what another job has kept here. Raises OSError."""
    for file in FILES:
        (run / file).unlink(missing_ok=True)


def check_trust(run: Path, trust_run: bool) -> None:
    """Raise PalaError if the run keeps its environment as a pickle, or names a module, that is not to be loaded without
    being asked to."""
    if trust_run or (run / NAME).exists():
        return
    if not (run / PICKLE).exists():
        _check_trust_in_id(run)
        return
    try:
        data = _pickle_of(run)
    except OSError:
        data = None
    if data is None or not _is_signed(run / SIGNATURE, data):
        raise PalaError(
            f"Run '{run}' keeps its environment, which was made in Python, as a pickle, '{run / PICKLE}', and no job "
            "of yours on this machine wrote that. Loading it runs whatever code is in it: if you trust whoever made "
            "the run, add `--trust-run` (from Python: `trust_run=True`)."
        )


def _check_trust_in_id(run: Path) -> None:
    if not (run / "run.json").exists():
        return
    env_id = run_folder.config_of(run).env.id
    if ":" in env_id and not _is_signed(run / ID_SIGNATURE, env_id.encode()):
        raise PalaError(
            f"Run '{run}' plays '{env_id}', for which the module '{env_id.rpartition(':')[0]}' would be imported, and "
            "no job of yours on this machine wrote that. Importing it runs its code: if you trust whoever made the "
            "run, add `--trust-run` (from Python: `trust_run=True`)."
        )


def load(run: Path, trust_run: bool = False) -> MakeEnv | None:
    """The factory that the run was made with, if it was made with one; runs its code. Raises PalaError, as
    `check_trust`, or if it cannot be loaded."""
    check_trust(run, trust_run)
    try:
        if (run / NAME).exists():
            with open_to_read(run / NAME) as file:
                return _named(file.read(_MOST_NAME_BYTES).decode(), run)
        if not (run / PICKLE).exists():
            return None
        make_env: MakeEnv = cloudpickle.loads(_pickle_of(run))
    except PalaError:
        raise
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(
            f"The environment of run '{run}' cannot be loaded ({type(error).__name__}: {error}); start from where the "
            "modules that it was made with can be imported."
        ) from error
    return make_env


def _pickle_of(run: Path) -> bytes:
    with open_to_read(run / PICKLE) as file:
        data = file.read(_MOST_PICKLE_BYTES + 1)
    if len(data) > _MOST_PICKLE_BYTES:
        raise PalaError(f"'{run / PICKLE}' is larger than {_MOST_PICKLE_BYTES >> 20} MiB, which no environment is.")
    return data


# ---- by name ---------------------------------------------------------------------------------------------------------


def _name_of(make_env: MakeEnv) -> str | None:
    """`module:name`, if that leads to this very object in other processes, too."""
    module, name = getattr(make_env, "__module__", None), getattr(make_env, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or module == "__main__" or not _may_be_named(module):
        return None
    if not cloudpickle.list_registry_pickle_by_value().isdisjoint({module, module.partition(".")[0]}):
        return None  # its user says that others cannot import it
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is make_env else None


def _named(text: str, run: Path) -> MakeEnv:
    """What is imported by a name that the run's folder gives. It must be a factory that another module of the user's
    defines: a folder from elsewhere chooses among environments, and nothing more."""
    module, _, name = text.partition(":")
    parts = name.split(".")
    if not all(part.isidentifier() for part in [*module.split("."), *parts]) or not _may_be_named(module):
        raise PalaError(f"'{run / NAME}' is damaged: it names no environment, as 'module:name' would.")
    if _lies_in(module, run):
        raise PalaError(f"'{run / NAME}' names the module '{module}' in the run's own folder, which is not imported.")
    found: Any = importlib.import_module(module)
    for part in parts:
        found = getattr(found, part)
    own_name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not callable(found) or own_name != (module, name):
        raise PalaError(f"'{run / NAME}' names '{text}', which is no function or class of that module.")
    make_env: MakeEnv = found
    return make_env


def _may_be_named(module: str) -> bool:
    """Python's own modules make no environments, and some of their functions do harm."""
    return module.partition(".")[0] not in (*sys.stdlib_module_names, *sys.builtin_module_names)


def _lies_in(module: str, run: Path) -> bool:
    """Whether it would be imported from the run's folder, by way of any of its packages. Imports nothing."""
    folder, where = run.resolve(), None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, where)
        if spec is None:
            return False
        where = list(spec.submodule_search_locations or ())
        if any(Path(place).resolve().is_relative_to(folder) for place in [spec.origin, *where] if place is not None):
            return True
    return False


# ---- by signature ----------------------------------------------------------------------------------------------------


def _is_signed(file: Path, data: bytes) -> bool:
    """Whether a job of this user has signed these bytes there."""
    try:
        with open_to_read(file) as opened:
            found = opened.read(_MOST_NAME_BYTES)
    except OSError:
        return False
    key = _own_key()
    return key is not None and hmac.compare_digest(found, _signature(key, data).encode())


def _signature(key: bytes, data: bytes) -> str:
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _own_key() -> bytes | None:
    """This user's secret, made when it is first needed; None where the user has no home to keep it in."""
    try:
        state = os.environ.get("XDG_STATE_HOME")
        file = (Path(state) if state else Path.home() / ".local" / "state") / "pala" / "key"
        if not file.exists():
            _make_key(file)
        with open_to_read(file) as opened:
            key = opened.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _KEY_BYTES else None


def _make_key(file: Path) -> None:
    """Of several processes that do so at once, one makes it and all have the same."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f".key.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()
