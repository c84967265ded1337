"""The plan of a comparison: a preset of variants x games x rank counts x seeds, and the runs that it asks for.

A preset is a TOML file (docs/compare.md). The settings of a run come in layers, the later over the earlier: the game's
preset of pala.train, `[train]`, the variant.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pala.config import Config, from_table, load_preset, presets, to_table
from pala.system.errors import PalaError, nearest
from pala.system.tables import build, flatten, merged
from pala.system.text import counted

_GIVEN = ("seed", "run.name", "env.id")  # settings that seeds, games and variants give


@dataclass(frozen=True)
class SlurmJobs:
    """Resources that the jobs of `--submit` ask a cluster for."""

    ranks_per_node: int = 0
    """At most; a run with more takes several nodes. 0: all ranks of a run on one node."""
    options: tuple[str, ...] = ()
    """Options of sbatch, for every job that trains."""


@dataclass(frozen=True)
class Preset:
    """A comparison, as its file has it."""

    name: str = ""
    """Results go to results/NAME, runs to runs/NAME."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """A run for each."""
    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks."""
    launcher: str = "mpirun -np {ranks}"
    """Command that starts the ranks; `{ranks}` stands for their number."""
    undisturbed: bool = True
    """Whether nothing else ran on the machine. If not, the report leaves out what depends on time."""
    games: dict[str, str] = field(default_factory=dict)
    """Name of a game -> its preset of pala.train, by name or path."""
    drawn: tuple[str, ...] = ()
    """Variants whose learning curves are drawn; by default all."""
    target_return: dict[str, float] = field(default_factory=dict)
    """Name of a game -> mean return of 100 episodes whose time is asked for."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings of every run, as in a preset of pala.train."""
    slurm: SlurmJobs = SlurmJobs()
    """Jobs on a cluster."""
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> settings; also `ranks`, `seeds`, `games` and `launcher`, where they differ from the above. `ranks = []`:
    made elsewhere."""


@dataclass(frozen=True)
class Variant:
    """A way to train. What it does not say itself, the preset says for all."""

    ranks: tuple[int, ...]
    """Numbers of ranks of its runs; none: they are made elsewhere."""
    seeds: tuple[int, ...]
    launcher: str
    games: tuple[str, ...]
    settings: dict[str, Any]
    """Settings over those of the game and of `[train]`."""


@dataclass(frozen=True)
class Cell:
    """The common part of runs that differ only in their seed."""

    variant: str
    game: str
    ranks: int

    def run_name(self, seed: int) -> str:
        """Return the name that the comparison gives its run with this seed."""
        return f"{self.variant}-{self.game}-{self.ranks}-{seed}"

    def __str__(self) -> str:
        return f"{self.variant} {self.game}, {counted(self.ranks, 'rank')}"


@dataclass(frozen=True)
class Planned:
    """A run that the preset asks for."""

    cell: Cell
    game_preset: str
    config: Config
    launcher: str
    others: frozenset[str] = frozenset()  # the names of the same run of the other variants

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir) / self.config.run.name

    @property
    def log(self) -> Path:
        """The output of its jobs."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def __str__(self) -> str:
        return f"{self.cell}, seed {self.config.seed}"


def shipped_preset(name: str) -> Path:
    """Return where the comparison of this name that comes with PALA is, or would be."""
    return presets.FOLDER / "compare" / f"{name}.toml"


class Plan:
    """A checked preset, and the runs that it asks for."""

    def __init__(self, path: Path) -> None:
        """Read a preset by path, or by name (`pong`). Raises PalaError that names the file and the key."""
        self.source = f"Preset '{path}'"
        self.file = presets.find(path, "compare")
        self.preset = build(Preset, presets.read(self.file), self.source)
        self.text = self.file.read_bytes()  # as it was compared: the file may be changed while runs continue
        self.variants = {name: self._variant(name) for name in self.preset.variants}
        self._check()
        self._games = {name: load_preset(preset) for name, preset in self.preset.games.items()}
        self._game_of = {config.env.id: name for name, config in self._games.items()}
        if len(self._game_of) < len(self._games):
            raise PalaError(f"{self.source}: two games have the same 'env.id'; runs of them could not be told apart.")
        cells = [
            Cell(name, game, ranks)
            for game in self._games
            for ranks in sorted({ranks for variant in self.variants.values() for ranks in variant.ranks})
            for name, variant in self.variants.items()
            if ranks in variant.ranks and game in variant.games
        ]
        self.left_out = [cell for cell in cells if self.nodes(cell.ranks) > 1 and self._needs_one_host(cell)]
        """Cells that no run is made of: their method needs one host, and their ranks span nodes."""
        all_seeds = (self.preset.seeds, *(variant.seeds for variant in self.variants.values()))
        self.runs = [
            self._planned(cell, seed)
            for seed in dict.fromkeys(itertools.chain(*all_seeds))
            for cell in cells
            if cell not in self.left_out and seed in self.variants[cell.variant].seeds
        ]
        by_name: dict[str, Planned] = {}
        for run in self.runs:
            if (first := by_name.setdefault(run.config.run.name, run)) is not run:
                raise PalaError(
                    f"{self.source}: '{first}' and '{run}' would both have the name '{run.config.run.name}'; name a "
                    "game or variant otherwise."
                )

    def _check(self) -> None:
        preset = self.preset
        for key in ("name", "seeds", "games", "variants"):
            if not getattr(preset, key):
                raise PalaError(f"{self.source}: '{key}' is missing; docs/compare.md shows a whole preset.")
        for name in (preset.name, *preset.games, *preset.variants):
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise PalaError(f"{self.source}: '{name}' cannot name a folder; use letters, digits, '-', '_' and '.'.")
        for game in preset.target_return:
            if game not in preset.games:
                raise PalaError(f"{self.source}: 'target_return.{game}' is of no game{nearest(game, preset.games)}.")
        for variant in preset.drawn:
            if variant not in preset.variants:
                raise PalaError(
                    f"{self.source}: 'drawn' names '{variant}', no variant{nearest(variant, preset.variants)}."
                )
        for name, own in self.variants.items():
            for game in own.games:
                if game not in preset.games:
                    raise PalaError(
                        f"{self.source}: 'variants.{name}.games' has '{game}', no game{nearest(game, preset.games)}."
                    )
            if min(own.ranks, default=1) < 1:
                raise PalaError(f"{self.source}: 'ranks' has a number below 1.")
        for option in preset.slurm.options:
            if not option.startswith("-"):
                raise PalaError(
                    f"{self.source}: 'slurm.options' has '{option}'; write an option and its value as one word, as in "
                    "'--account=me'."
                )
        if preset.slurm.ranks_per_node < 0:
            raise PalaError(f"{self.source}: 'slurm.ranks_per_node' is {preset.slurm.ranks_per_node}, below 0.")

    def _variant(self, name: str) -> Variant:
        preset, table = self.preset, self.preset.variants[name]
        own: dict[str, Any] = {
            "ranks": preset.ranks,
            "seeds": preset.seeds,
            "launcher": preset.launcher,
            "games": tuple(preset.games),
        }
        settings = {key: value for key, value in table.items() if key not in own}
        own |= {key: table[key] for key in own if key in table}
        return build(Variant, own | {"settings": settings}, f"{self.source}, '{name}'")

    def nodes(self, ranks: int) -> int:
        """Return how many nodes of a cluster this number of ranks spans."""
        return math.ceil(ranks / (self.preset.slurm.ranks_per_node or ranks))

    def _needs_one_host(self, cell: Cell) -> bool:
        return self.config_of(cell).exchange_kind.one_host

    def _planned(self, cell: Cell, seed: int) -> Planned:
        name = cell.run_name(seed)
        others = {replace(cell, variant=variant).run_name(seed) for variant in self.preset.variants} - {name}
        config = self.config_of(cell)
        given = {"seed": seed, "run": {"name": name, "dir": str(Path(config.run.dir) / self.preset.name)}}
        config, launcher = _over(config, given, self.source), self.variants[cell.variant].launcher
        return Planned(cell, self.preset.games[cell.game], config, launcher, frozenset(others))

    def config_of(self, cell: Cell) -> Config:
        """Return the settings of a variant on a game, without the seed. Raises PalaError."""
        config, own = self._games[cell.game], self.variants[cell.variant].settings
        for where, table in (("train", self.preset.train), (f"variants.{cell.variant}", own)):
            if given := [key for key in flatten(table) if key in _GIVEN]:
                raise PalaError(f"{self.source}: '{where}.{given[0]}' is given by the comparison itself; leave it out.")
            config = _over(config, table, f"{self.source}, [{where}]")
        return config

    def game_of(self, config: Config, source: Path) -> str:
        """Return the name of the game that a run plays. Raises PalaError if the preset has none."""
        if config.env.id not in self._game_of:
            raise PalaError(
                f"Run '{source}' plays '{config.env.id}', which is none of the games of the comparison; "
                "add it to [games] or leave the run out."
            )
        return self._game_of[config.env.id]


def _over(config: Config, table: dict[str, Any], source: str) -> Config:
    return from_table(merged(to_table(config), table), source)


def options(config: Config, over: Config) -> list[str]:
    """Return the command line of pala.train that makes `config` of the settings `over`."""
    known, words = flatten(to_table(over)), []
    for key, value in flatten(to_table(config)).items():
        if value == known[key]:
            continue
        section, _, name = key.replace("_", "-").rpartition(".")
        prefix = f"--{section}." if section else "--"
        if isinstance(value, bool):
            words.append(f"{prefix}{'' if value else 'no-'}{name}")
        else:
            given = [prefix + name, *map(str, value if isinstance(value, tuple) else [value])]
            words += ["=".join(given)] if isinstance(value, str) and value.startswith("-") else given
    return words
