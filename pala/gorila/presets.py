"""Make Gorila's presets of the 49 games from one template, in the repository: `python -m pala.gorila.presets`."""

from __future__ import annotations

import argparse
from pathlib import Path
from string import Template

import ale_py
import gymnasium

from pala.evaluation.references import score_table
from pala.lab.scores import PUBLISHED
from pala.system.command_line import exit_on_mistake
from pala.system.errors import PalaError, reason
from pala.system.files import write_atomically

FOLDER = Path("configs/gorila")


def presets(template: str) -> dict[str, str]:
    """The ROM's name of each game -> the text of its preset. `template` has $game, $rom and $id. Raises PalaError."""
    gymnasium.register_envs(ale_py)
    ids = {spec.kwargs["game"]: spec.id for spec in gymnasium.registry.values() if spec.id.startswith("ALE/")}
    roms = score_table(PUBLISHED)
    if missing := roms.keys() - ids.keys():
        raise PalaError(f"ale-py registers no environment for {', '.join(sorted(missing))}; install a newer one.")
    games = {rom: ids[rom].removeprefix("ALE/").split("-v")[0] for rom in roms}
    return {rom: Template(template).substitute(rom=rom, id=ids[rom], game=games[rom]) for rom in roms}


def make(folder: Path) -> int:
    """Write them beside their template; returns how many. Raises PalaError."""
    file = folder / "template.toml.in"
    try:
        texts = presets(file.read_text(encoding="utf-8"))
        for rom, text in texts.items():
            write_atomically(folder / f"{rom}.toml", text.encode())
    except OSError as error:
        raise PalaError(
            f"The presets cannot be made: {reason(error)}; start this in the repository's folder."
        ) from None
    except (KeyError, ValueError) as error:
        raise PalaError(f"'{file}' has a placeholder other than $game, $rom and $id: {error}.") from None
    return len(texts)


@exit_on_mistake()
def main() -> None:
    """What `python -m pala.gorila.presets` runs."""
    argparse.ArgumentParser(prog="python -m pala.gorila.presets", description=__doc__).parse_args()
    print(f"{make(FOLDER)} presets are in '{FOLDER}'.")


if __name__ == "__main__":
    main()
