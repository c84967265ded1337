"""Presets: TOML files with settings. Those that come with PALA go by name, from any folder and in a wheel too.

    pong              configs/pong.toml, with GALA's settings
    gorila/pong       configs/gorila/pong.toml
    my/preset.toml    a file of the user's own

`pala/configs` is the checkout's folder `configs`, by a link; a wheel has a copy in its place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pala.system.errors import PalaError, nearest, reason
from pala.system.output import tell
from pala.system.tables import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "configs"
_COMPARISONS = "compare"  # folder of presets of another kind, that of pala.compare


def names(folder: str = "") -> list[str]:
    """Names of the presets that come with PALA: all, or those in one folder, without the folder in the name."""
    files = (FOLDER / folder).rglob("*.toml")
    found = sorted(file.relative_to(FOLDER / folder).with_suffix("").as_posix() for file in files)
    return [name for name in found if not name.startswith(f"{_COMPARISONS}/")]


def find(preset: str | Path, folder: str = "") -> Path:
    """The file of a preset that is given by path or by name. `folder`: of FOLDER, for names. Raises PalaError if there
    is none."""
    path = Path(preset)
    try:
        if path.exists() and (path.suffix == ".toml" or not path.is_dir()):
            return path
        if not path.is_absolute() and (named := FOLDER / folder / f"{path}.toml").is_file():
            return named
    except OSError as error:
        raise PalaError(f"Preset '{preset}' cannot be read: {reason(error)}.") from None
    if (path / "run.json").exists():
        raise PalaError(f"'{preset}' is the folder of a run, not a preset; go on with it by `--resume`.")
    if not path.name:
        raise PalaError(f"Preset '{preset}' is neither a file nor a name; `pala presets` lists the names.")
    raise PalaError(f"Preset '{preset}' does not exist{_guess(path, folder)}")


def _guess(path: Path, folder: str) -> str:
    known = names(folder)
    siblings = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    name = str(path.with_suffix("")).removeprefix("configs/").removeprefix(f"{folder}/")
    if name in known:
        return f" here; the one that comes with PALA goes by its name, '{name}'."
    return nearest(str(path), siblings) or nearest(name, known) or f"; there are {', '.join(known)}."


def main() -> None:
    """What `pala presets` runs: the names, one a line."""
    tell("\n".join([*names(), *(f"{name} (of `pala compare`)" for name in names(_COMPARISONS))]))


def chain(preset: str | Path) -> list[tuple[str | Path, dict[str, Any]]]:
    """The preset and those that it builds on, by their key `base`, the last one first: how each is called, and its
    tables without that key. A base goes by its name, or by its path from the folder of who names it. Raises PalaError
    that names the file."""
    found: list[tuple[str | Path, dict[str, Any]]] = []
    seen: list[Path] = []
    following: str | Path | None = preset
    while following is not None:
        path = find(following)
        if path.resolve() in seen:
            raise PalaError(f"Preset '{preset}': by 'base', '{following}' builds on itself.")
        seen.append(path.resolve())
        table = read(following)
        found.append((following, table))
        base = table.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise PalaError(f"Preset '{following}': 'base' is {shown(base)} but must be the name or path of a preset.")
        beside = path.parent / base if base is not None else None
        following = beside if beside is not None and os.path.isfile(beside) else base  # noqa: PTH113 - of any length
    return found[::-1]


def read(preset: str | Path) -> dict[str, Any]:
    """The tables of a preset. Raises PalaError that names the file."""
    path = find(preset)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a byte order mark
    except RecursionError:
        raise PalaError(f"Preset '{preset}' cannot be read: its tables or lists are nested too deep.") from None
    except (OSError, ValueError) as error:  # also what tomllib and UTF-8 say
        raise PalaError(f"Preset '{preset}' cannot be read: {reason(error)}.") from None
