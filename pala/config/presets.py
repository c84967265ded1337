"""Presets: TOML files with settings. Those that come with PALA go by name, from any folder and in a wheel too.

    quickstart        configs/quickstart.toml
    gorila/krull      configs/gorila.toml, a family: one file for all games that its key `games` lists
    pong              configs/atari.toml, the family whose games need no folder
    my/preset.toml    a file of the user's own

Beside the settings a preset may have the keys `base` (another preset, over whose settings it lies) and `game` (an Atari
game, in place of `env.id`).

`pala/configs` is the checkout's folder `configs`, by a link; a wheel has a copy in its place.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from pala.system.errors import PalaError, nearest, reason
from pala.system.tables import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "configs"
COMPARISONS = "compare"  # folder of presets of another kind, that of pala compare
_ENV_ID = re.compile(r"([\w.]+:)?([\w-]+/)?[\w-]+-v\d+(\(.*\))?")  # as Gymnasium's are
_PLAIN_FAMILY = "atari"  # the family whose games go by their own name


def names(folder: str = "") -> list[str]:
    """Return the names of the presets that come with PALA: all, or those in one folder, without the folder."""
    files = (FOLDER / folder).rglob("*.toml")
    found = {file.relative_to(FOLDER / folder).with_suffix("").as_posix() for file in files}
    if not folder:
        members = _members()
        found = {name for name in found if not name.startswith(f"{COMPARISONS}/")} | set(members)
        found -= {family.stem for family, _ in members.values()}
    return sorted(found)


def families() -> dict[str, tuple[list[str], str]]:
    """Return what each file of presets holds: the file's name -> (its presets' names, the first sentence of its
    comment)."""
    members, found = _members(), dict[str, tuple[list[str], str]]()
    for file in sorted(FOLDER.glob("*.toml")):
        comment = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        text = " ".join(line.removeprefix("# ") for line in comment)
        names_of_file = [name for name, (family, _) in members.items() if family == file]
        found[file.stem] = (names_of_file or [file.stem], re.split(r"(?<=[.])\s(?=[A-Z])", text)[0])
    return found


def _members() -> dict[str, tuple[Path, str]]:
    """Return what the families hold: a preset's name -> its family's file, and its game."""
    found = {}
    for file in sorted(FOLDER.glob("*.toml")):
        for game in read(file).get("games", []):
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", game).lower()  # as the emulator calls its file: UpNDown is up_n_down
            found[name if file.stem == _PLAIN_FAMILY else f"{file.stem}/{name}"] = (file, game)
    return found


def find(preset: str | Path, folder: str = "") -> Path:
    """Return the file of a preset that is given by path or by name. `folder`: a folder in FOLDER, for names. Raises
    PalaError if there is none."""
    return _locate(preset, folder)[0]


def _locate(preset: str | Path, folder: str = "") -> tuple[Path, str]:
    """Return a preset's file and, if that is a family's, its game. Raises PalaError if there is none."""
    path = Path(preset)
    try:
        if path.exists() and (path.suffix == ".toml" or not path.is_dir()):
            return path, ""
        if not path.is_absolute() and (named := FOLDER / folder / f"{path}.toml").is_file():
            return named, ""
    except OSError as error:
        raise PalaError(f"Preset '{preset}' cannot be read: {reason(error)}.") from None
    if not folder and (member := _members().get(path.as_posix())):
        return member
    if (path / "run.json").exists():
        raise PalaError(f"'{preset}' is the folder of a run, not a preset; continue it by `--resume`.")
    if not path.name:
        raise PalaError(f"Preset '{preset}' is neither a file nor a name; `pala presets` lists the names, by family.")
    if not folder and _ENV_ID.fullmatch(str(preset)) and not Path(f"{preset}.toml").exists():
        raise PalaError(f"Preset '{preset}' does not exist; did you mean `--env.id {shlex.quote(str(preset))}`?")
    raise PalaError(f"Preset '{preset}' does not exist{_guess(path, folder)}")


def _guess(path: Path, folder: str) -> str:
    """Return the end of the error message about a preset that does not exist: what may have been meant."""
    known = names(folder)
    siblings = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    name = str(path.with_suffix("")).removeprefix("configs/").removeprefix(f"{folder}/")
    if name in known:
        return f" here; the one that comes with PALA goes by its name, '{name}'."
    if guess := nearest(str(path), siblings) or nearest(name, known):
        return guess
    is_file = path.suffix == ".toml" or path.is_absolute()
    return ": there is no such file." if is_file else f"; there are {', '.join(known)}."


def chain(preset: str | Path) -> list[tuple[str | Path, dict[str, Any]]]:
    """Return the preset and those that it builds on, the last one first: the name or path that each goes by, and its
    tables, without the key `base` and with `env.id` for `game`. A base goes by its name, or by its path from the folder
    of the preset that names it. Raises PalaError that names the file."""
    found: list[tuple[str | Path, dict[str, Any]]] = []
    seen: list[Path] = []
    following: str | Path | None = preset
    while following is not None:
        path, game = _locate(following)
        if path.resolve() in seen:
            raise PalaError(f"Preset '{preset}': by 'base', '{following}' builds on itself.")
        seen.append(path.resolve())
        table = read(path, following)
        if path.resolve().parent == FOLDER.resolve():
            table.pop("games", None)
        base = table.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise PalaError(f"Preset '{following}': 'base' is {shown(base)} but must be the name or path of a preset.")
        found.append((following, _with_id(table | {"game": game} if game else table, following)))
        beside = path.parent / base if base is not None else None
        following = beside if beside is not None and os.path.isfile(beside) else base  # noqa: PTH113 - of any length
    return found[::-1]


def _with_id(table: dict[str, Any], preset: str | Path) -> dict[str, Any]:
    """Return a preset's tables with `env.id` in place of `game`. Raises PalaError."""
    if "game" not in table:
        return table
    game = table["game"]
    if not isinstance(game, str) or not re.fullmatch("[A-Z][A-Za-z0-9]*", game):
        raise PalaError(
            f"Preset '{preset}': 'game' is {shown(game)} but must be an Atari game as its id has it, such as "
            "'SpaceInvaders'; other environments are named by 'env.id'."
        )
    env = table.get("env", {})
    if isinstance(env, dict) and "id" in env:
        raise PalaError(f"Preset '{preset}': 'game' and 'env.id' both name what is played; leave one out.")
    rest = {key: value for key, value in table.items() if key != "game"}
    return rest | ({"env": env | {"id": f"ALE/{game}-v5"}} if isinstance(env, dict) else {})


def read(path: Path, preset: str | Path = "") -> dict[str, Any]:
    """Return the tables of a preset's file. `preset`: the user's name for it. Raises PalaError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin files with a byte order mark
    except RecursionError:
        raise PalaError(f"Preset '{preset or path}' cannot be read: its tables or lists are nested too deep.") from None
    except (OSError, ValueError) as error:  # also what tomllib and UTF-8 say
        raise PalaError(f"Preset '{preset or path}' cannot be read: {reason(error)}.") from None
