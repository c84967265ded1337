"""Code of the user's that a run needs, and whom it is trusted from.

| where | holds |
|---|---|
| `make_env.txt`, `make_network.txt` | the name, `module:name`, of a factory that can be imported |
| `make_env.pkl`, `make_network.pkl` | any other factory, by cloudpickle |
| `run.json` | names in `env.wrappers` and `network.custom`, a module in `env.id`, or arguments, which may be names |
| `code.signature` | who wrote all that: its HMAC by the user's own key |

Importing what a folder names, or loading its pickles, runs code. So all of it asks for `--trust-run` unless a job of
this user's wrote it. That is told by a secret key in the user's home, as Jupyter tells trusted notebooks: no folder can
bring it along.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle

from pala.config import Config
from pala.run import run_folder
from pala.run.hooks import NO_CODE, UserCode
from pala.run.run_folder import CODE_ENDINGS, CODE_FILES, SIGNATURE
from pala.system.errors import PalaError
from pala.system.files import open_to_read, write_atomically
from pala.system.names import cannot_be_loaded, import_named, name_of
from pala.system.output import say

_MOST_NAME_BYTES = 1000
_MOST_PICKLE_BYTES = 64 << 20
_KEY_BYTES = 32


def keep(run: Path, config: Config, code: UserCode) -> None:
    """Write it into the run's folder: by name what can be imported by that, else as a pickle. Then sign it, and the
    names in the run's configuration. Raises OSError, and PalaError if one cannot be kept: then all is as it was."""
    kept = {what: _to_keep(what, factory) for what, factory in code._asdict().items() if factory is not None}
    for what, (ending, data) in kept.items():  # all can be kept: nothing is changed else
        write_atomically(run / f"{what}.{ending}", data)
        for other in CODE_ENDINGS:
            if other != ending:
                (run / f"{what}.{other}").unlink(missing_ok=True)
    if not _pieces(run, config, NO_CODE):
        return
    key = _own_key()
    if key is None:
        say(f"'{run}' cannot be signed, as your key cannot be made or read: to go on with it will take `--trust-run`.")
        return
    write_atomically(run / SIGNATURE, _signature(key, run, config).encode())


def forget(run: Path) -> None:
    """Delete what another job has kept here. Raises OSError."""
    for file in CODE_FILES:
        (run / file).unlink(missing_ok=True)


def check_trust(run: Path, config: Config, trust_run: bool, given: UserCode = NO_CODE) -> None:
    """Raise PalaError if the run, whose `config` this is, names or holds code that is not to be run without being asked
    to, or lacks code that it was made with. What is `given` is not loaded from it."""
    _check_whole(run, given)
    pieces = _pieces(run, config, given)
    if trust_run or not pieces:
        return
    try:
        with open_to_read(run / SIGNATURE) as file:
            found = file.read(_MOST_NAME_BYTES)
        key = _own_key()
        signed = key is not None and hmac.compare_digest(found, _signature(key, run, config).encode())
    except OSError:
        signed = False
    if not signed:
        raise PalaError(
            f"Run '{run}' brings code along, {' and '.join(pieces)}, and no job of yours on this machine wrote that. "
            "Loading it runs whatever it is: if you trust whoever made the run, add `--trust-run` (from Python: "
            "`trust_run=True`)."
        )


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
                "copy it from where the run was made. (`pala.fit` can go on with the run if it is given anew.)"
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
    say(text)


def load(run: Path, given: UserCode = NO_CODE) -> UserCode:
    """The factories that the run was made with, but for those `given`; runs their code. After `check_trust`. Raises
    PalaError if one cannot be loaded."""
    return UserCode(*(factory or _load_one(run, what) for what, factory in given._asdict().items()))


def load_trusted(run: Path, config: Config, trust_run: bool) -> UserCode:
    """`check_trust`, then `load`."""
    check_trust(run, config, trust_run)
    return load(run)


def _kept(run: Path, what: str) -> Path | None:
    """The file that a factory is kept in; a name wins over a pickle."""
    return next((file for ending in CODE_ENDINGS if (file := run / f"{what}.{ending}").exists()), None)


def _is_pickled(run: Path, what: str) -> bool:
    file = _kept(run, what)
    return file is not None and file.suffix == ".pkl"


def _minor(version: str) -> list[str]:
    return str(version).split(".")[:2]


def _to_keep(what: str, factory: Any) -> tuple[str, bytes]:
    """The ending of the file that a factory is kept in, and its content."""
    imported_by = name_of(factory)
    if imported_by is not None:
        return "txt", imported_by.encode()
    advice = "define it in a module that can be imported, so that its name is enough."
    try:
        data = cloudpickle.dumps(factory)
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(f"'{what}' cannot be kept with the run ({error}): {advice}") from error
    if len(data) > _MOST_PICKLE_BYTES:
        raise PalaError(f"'{what}' takes {len(data):,} bytes to be kept with the run, more than it may: {advice}")
    return "pkl", data


def _load_one(run: Path, what: str) -> Any:
    file = _kept(run, what)
    if file is None:
        return None
    try:
        content = _content(file)
        if file.suffix == ".txt":
            return import_named(content.decode(errors="replace"), f"'{file}'", kept_in=run)
        return cloudpickle.loads(content)
    except PalaError:
        raise
    except Exception as error:  # it is the user's code: anything may happen
        raise cannot_be_loaded(f"'{file}'", error) from error


def _content(file: Path) -> bytes:
    most = _MOST_NAME_BYTES if file.suffix == ".txt" else _MOST_PICKLE_BYTES
    with open_to_read(file) as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise PalaError(f"'{file}' is larger than {most:,} bytes, which no such file is.")
    return data


# ---- whose it is -----------------------------------------------------------------------------------------------------


def _pieces(run: Path, config: Config, given: UserCode) -> list[str]:
    """What would be run of a run's code, in words."""
    files = [_kept(run, what) for what, factory in given._asdict().items() if factory is None]
    pieces = [f"'{file}' (a {'name' if file.suffix == '.txt' else 'pickle'})" for file in files if file is not None]
    return pieces + [f"{key!r} {value}" for key, value in _names(config).items() if value]


def _names(config: Config) -> dict[str, list[str]]:
    """What is imported by names in a configuration."""
    names = {
        "env.wrappers": list(config.env.wrappers),
        "env.id": [config.env.id] if ":" in config.env.id or "(" in config.env.id else [],
    }
    if config.network.custom:  # else as it was signed before there was this setting
        names["network.custom"] = [config.network.custom]
    return names


def _signature(key: bytes, run: Path, config: Config) -> str:
    files = [file for what in UserCode._fields if (file := _kept(run, what)) is not None]
    signed = {file.name: hashlib.sha256(_content(file)).hexdigest() for file in files} | _names(config)
    return hmac.new(key, json.dumps(signed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


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
    """Make it once: if several processes do so at the same time, all have the same."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f".key.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(fresh, file)
        except FileExistsError:
            pass
        except OSError:  # a home without hard links
            if not file.exists():
                os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
