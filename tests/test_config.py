"""The configuration: presets load, mistakes are named, and what is written can be read again."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pala.config.schema
from pala import presets as presets_program
from pala.config import (
    A2CConfig,
    Config,
    EnvConfig,
    ExchangeConfig,
    NetworkConfig,
    RunConfig,
    checked,
    facts_of,
    from_table,
    load_preset,
    presets,
    to_table,
)
from pala.config.facts import Facts, setting
from pala.system.errors import PalaError
from pala.system.tables import flatten
from pala.train import parse

CONFIGS = Path(__file__).parent.parent / "configs"
FAMILIES = ("allreduce", "atari", "gala", "gorila", "in_step", "pala_paper")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.toml")), ids=lambda path: path.stem)
def test_every_file_loads_and_says_something(path):
    assert path.parent.name == "compare" or path.stem == "atari" or load_preset(path) != Config()


def test_the_names_are_those_of_the_files_and_of_what_families_hold():
    files = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.glob("**/*.toml")}
    plain = {name for name in files if not name.startswith("compare/")} - {*FAMILIES}
    assert plain == {name for name in presets.names() if name in files}
    assert set(presets.names()) >= plain


def test_the_papers_presets_have_the_papers_settings():
    """GALA's released settings, and PALA's; none of the defaults that are ours."""
    gala, paper = load_preset("gala/pong"), load_preset("pala_paper/pong")
    for config, steps, rate in ((gala, 5, 1.4e-3), (paper, 20, 7e-4)):
        assert (config.total_steps, config.env.num_envs, config.network.precision) == (40_000_000, 16, "float32")
        assert config.a2c == A2CConfig(
            rollout_steps=steps, learning_rate=rate, momentum=0.0, rmsprop_bias_correction=False
        )
    assert gala.exchange == ExchangeConfig("shared_memory", "ring", max_staleness=100_000_000)
    assert paper.exchange == ExchangeConfig("gossip", "ring", "uniform")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a2c]\ngama = 0.9", "unknown key 'a2c.gama'; did you mean 'a2c.gamma'?"),
        ("gamma = 0.9", "unknown key 'gamma'; did you mean 'a2c.gamma'?"),
        ("[a2c]\nnum_envs = 4", "unknown key 'a2c.num_envs'; did you mean 'env.num_envs'?"),
        ("[exchnage]\nkind = 'none'", "unknown key 'exchnage'"),
        ("qqqq = 1", "unknown key 'qqqq'; here are algorithm, total_steps, seed, env, "),
        ("seed = 'one'", "'seed' is 'one' (str) but must be of type int."),
        ("seed = 1.5", "'seed' is 1.5 (float) but must be of type int."),
        ("seed = true", "'seed' is True (bool) but must be of type int."),
        ("[a2c]\ngamma = true", "'a2c.gamma' is True (bool) but must be of type float."),
        ("[a2c]\nrmsprop_epsilon_inside_root = 1", "(int) but must be of type bool."),
        ("[env]\nid = 3", "'env.id' is 3 (int) but must be of type str."),
        ("env = 'ALE/Pong-v5'", "'env' is a section and needs a table, not 'ALE/Pong-v5'."),
        (
            "[exchange]\nkind = 'gosip'",
            "must be one of 'gossip', 'shared_memory', 'allreduce', 'none'; did you mean 'gossip'?",
        ),
        ("[exchange]\nkind = ['gossip']", "must be one of 'gossip', 'shared_memory', 'allreduce', 'none'"),
        ("[network]\nconv_channels = [32, 64]", "'network.conv_channels' needs 3 values, not [32, 64]."),
        ("[network]\nconv_channels = 32", "'network.conv_channels' is 32 (int) but must be of type tuple"),
        ("[network]\nmlp_hidden = [64, 'x']", "'network.mlp_hidden' is 'x' (str) but must be of type int."),
        ("[network]\nmlp_hidden = [0]", "every number must lie between 1 and 1e+06."),
        ("total_steps = 0", "'total_steps' is 0 but must lie between 1 and 1e+14."),
        ("[a2c]\ngamma = 1.1", "'a2c.gamma' is 1.1 but must lie between 0 and 1."),
        ("[a2c]\nlearning_rate = nan", "'a2c.learning_rate' is nan but must lie between"),
        ("[a2c]\nlearning_rate = inf", "'a2c.learning_rate' is inf but must lie between"),
        ("[env]\nnum_envs = -1", "'env.num_envs' is -1 but must lie between"),
        ("[run]\nname = 'a/b'", "'run.name' is 'a/b' but must be a plain folder name"),
        ("seed = ", "cannot be read"),
        ("seed = 1\nseed = 2", "cannot be read"),
        ("[exchange]\ntop_k_fraction = 0", "'exchange.top_k_fraction' is 0.0 but must lie between 1e-09 and 1"),
        ("[exchange]\ntop_k_fraction = 1.5", "'exchange.top_k_fraction' is 1.5 but must lie between"),
        ("[exchange]\ncompression = 'topk'", "did you mean 'top_k'?"),
        (
            "[exchange]\ncompression = 'top_k'\nmixing = 'push_sum'",
            "'exchange.mixing' is 'push_sum', whose weights belong to whole models, but 'exchange.compression' is",
        ),
        ("[exchange]\nkind = 'shared_memory'\ntopology = 'random'", "which has 'auto' and 'ring' and 'complete' only"),
        ("[exchange]\nkind = 'shared_memory'\ncompression = 'top_k'", "which has 'none' only; 'gossip' has all"),
        ("[exchange]\ntopology = 'complete'", "set the one to 'uniform' or the other to 'random'"),
    ],
)
def test_mistakes_are_named_with_the_file(text, words, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PalaError) as caught:
        load_preset(path)
    assert str(caught.value).startswith(f"Preset '{path}'")
    assert words in str(caught.value)


def test_a_missing_preset_is_named_with_the_nearest(tmp_path):
    (tmp_path / "pong.toml").touch()
    with pytest.raises(PalaError, match=r"pnog.toml' does not exist; did you mean '.*/pong.toml'\?"):
        load_preset(tmp_path / "pnog.toml")
    with pytest.raises(PalaError, match="does not exist"):
        load_preset(tmp_path / "nowhere" / "pong.toml")


def test_the_names_of_presets_are_listed_by_words(monkeypatch, capsys):
    def listed(*words):
        monkeypatch.setattr(sys, "argv", ["pala presets", *words])
        presets_program.main()
        return capsys.readouterr().out.splitlines()

    families = "\n".join(listed())
    assert "gala/beam_rider, gala/breakout, gala/pong" in families and "    Quickstart: an Atari game" in families
    assert "gorila/alien, gorila/amidar, gorila/assault, gorila/asterix, and 45 more" in families
    assert len(listed("gorila/")) == 49 and listed("Gorila", "pong") == ["gorila/pong"]
    assert listed("breakout", "compare")[0] == "breakout (of `pala compare`)"
    with pytest.raises(SystemExit):
        listed("pnog")
    assert "no preset's name contains 'pnog'; did you mean 'pong'?" in capsys.readouterr().err


def test_presets_go_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pong").mkdir()  # of something else
    assert load_preset("gala/pong").total_steps == 40_000_000
    assert presets.find("pong", "compare").read_text() == (CONFIGS / "compare" / "pong.toml").read_text()
    with pytest.raises(PalaError, match=r"'gala/pong.toml' does not exist here; .* goes by its name, 'gala/pong'"):
        load_preset("gala/pong.toml")
    with pytest.raises(PalaError, match=r"'pnog' does not exist; did you mean 'pong'\?"):
        load_preset("pnog")
    with pytest.raises(PalaError, match=r"'gorila/krul' does not exist; did you mean 'gorila/krull'\?"):
        load_preset("gorila/krul")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("CartPole-v1", "Preset 'CartPole-v1' does not exist; did you mean `--env.id CartPole-v1`?"),
        ("my_envs:Grid-v0", "Preset 'my_envs:Grid-v0' does not exist; did you mean `--env.id my_envs:Grid-v0`?"),
        ("ALE/Pong-v5", "Preset 'ALE/Pong-v5' does not exist; did you mean `--env.id ALE/Pong-v5`?"),
        ("/no/such/preset.toml", "Preset '/no/such/preset.toml' does not exist: there is no such file."),
    ],
)
def test_an_environment_or_a_file_in_a_presets_place_is_told(preset, message):
    with pytest.raises(PalaError) as caught:
        load_preset(preset)
    assert str(caught.value) == message


def test_a_file_that_is_named_as_an_environment_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trial").mkdir()
    Path("trial/run-v2.toml").touch()
    with pytest.raises(PalaError, match=r"'trial/run-v2' does not exist; did you mean 'trial/run-v2.toml'\?"):
        load_preset("trial/run-v2")
    with pytest.raises(PalaError, match=r"'\./CartPole-v1' does not exist; there are"):
        load_preset("./CartPole-v1")


def test_what_cannot_be_a_preset_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/run.json").touch()
    with pytest.raises(PalaError, match="'run' is the folder of a run, not a preset; continue it by `--resume`"):
        load_preset("run")
    for preset in ("", "."):
        with pytest.raises(PalaError, match="is neither a file nor a name; `pala presets` lists the names"):
            load_preset(preset)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["not text", "folder"])
def test_what_is_no_text_file_is_named(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(PalaError, match="cannot be read"):
        load_preset(path)


def test_a_preset_wins_over_the_defaults_and_leaves_the_rest(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("total_steps = 1_000\n[a2c]\nlearning_rate = 1e-3\ngamma = 1\n[network]\nconv_channels = [1, 2, 3]")
    config = load_preset(path)
    assert config == Config(
        total_steps=1000, a2c=A2CConfig(learning_rate=1e-3, gamma=1.0), network=NetworkConfig(conv_channels=(1, 2, 3))
    )
    assert type(config.a2c.gamma) is float


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.builds(
        Config,
        total_steps=st.integers(1, 10**14),
        seed=st.integers(0, 2**63 - 1),
        env=st.builds(EnvConfig, id=st.text(), num_envs=st.integers(1, 10**6), terminal_on_life_loss=st.booleans()),
        network=st.builds(NetworkConfig, mlp_hidden=st.lists(st.integers(1, 999), max_size=4).map(tuple)),
        a2c=st.builds(A2CConfig, gamma=st.floats(0, 1), learning_rate=st.floats(0, 1e6)),
        run=st.builds(RunConfig, dir=st.text()),
    )
)
def test_what_is_written_as_json_is_read_as_it_was(config):
    assert from_table(json.loads(json.dumps(to_table(config))), "JSON") == config


def test_the_default_is_in_range_and_frozen():
    assert from_table({}, "nothing") == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().a2c.gamma = 0.5  # type: ignore[misc]


def test_every_range_is_of_a_number_and_every_number_has_one():
    """A new numeric field cannot be forgotten."""
    numbers = {key for key, value in flatten(to_table(Config())).items() if type(value) in (int, float)}
    ranges = {key: facts.between for key, facts in facts_of(Config).items() if facts.between is not None}
    assert (
        set(ranges) - {"network.conv_channels", "network.mlp_hidden", "network.background", "a2c.learning_rate"}
        == numbers
    )
    assert not any(math.isnan(bound) for pair in ranges.values() for bound in pair)


def test_facts_name_settings_values_and_kinds_that_there_are():
    """A condition on another setting names one that there is, and values that it may have."""
    known = flatten(to_table(Config()))
    assert list(facts_of(Config)) == list(known)
    for facts in facts_of(Config).values():
        for other, values in facts.unless.items():
            assert all(from_table(_nested(other, value), "facts") for value in values)
    with pytest.raises(TypeError, match="betwene"):
        setting(1, betwene=(0, 1))


def _nested(key, value):
    section, _, name = key.partition(".")
    return {section: {name: value}}


def test_a_section_says_what_holds_for_all_its_settings_and_a_field_what_does_not():
    facts = facts_of(Config)
    assert facts["a2c.gamma"] == Facts(between=(0, 1), algorithms=("a2c",))
    assert (facts["run.name"].decides, facts["run.threads"].decides, facts["seed"].decides) == (
        "nothing",
        "speed",
        "learning",
    )


def test_every_field_is_explained():
    """A docstring behind each field: it is what `--help` prints."""
    classes = [node for node in ast.parse(inspect.getsource(pala.config.schema)).body if isinstance(node, ast.ClassDef)]
    assert {"Config", "A2CConfig", "EnvConfig"} <= {node.name for node in classes}
    for node in classes:
        assert ast.get_docstring(node), node.name
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and not _is_section(statement):
                explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert explained, f"{node.name}.{ast.unparse(statement.target)}"


def _is_section(field: ast.AnnAssign) -> bool:
    """Sections are explained by their class."""
    return ast.unparse(field.annotation).endswith("Config")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(exchange=ExchangeConfig(kind="all_reduce")), "'exchange.kind' is 'all_reduce' but must be one of"),
        (Config(exchange=ExchangeConfig(topology="star")), "'exchange.topology' is 'star' but must be one of"),
        (Config(a2c=A2CConfig(learning_rate=-1)), "'a2c.learning_rate' is -1.0 but must lie between"),
        (Config(a2c=A2CConfig(rollout_steps=0)), "'a2c.rollout_steps' is 0"),
        (Config(env=EnvConfig(num_envs=0)), "'env.num_envs' is 0"),
        (Config(total_steps=-1), "'total_steps' is -1"),
        (Config(seed=-1), "'seed' is -1"),
        (Config(run=RunConfig(name="../../x")), "'run.name' is '../../x' but must be a plain folder name"),
        (Config(seed=True), "'seed' is True (bool) but must be of type int"),
        (Config(env=EnvConfig(wrappers="X")), "must be of type tuple[str, ...], as ['X']"),
        ({"seed": 1}, "is of type 'dict' but must be a pala.Config"),
        ("pong", "must be a pala.Config; `pala.load_preset('pong')` reads one"),
    ],
)
def test_a_mistake_in_python_is_named_as_one_in_a_preset(config, words):
    with pytest.raises(PalaError, match=r"^(Config: |The configuration)") as caught:
        checked(config)
    assert words in str(caught.value)


def test_what_is_right_in_python_stays_as_it_is():
    config = Config(total_steps=1000, a2c=A2CConfig(gamma=1), network=NetworkConfig(mlp_hidden=[8, 8]))
    assert checked(config) == Config(
        total_steps=1000, a2c=A2CConfig(gamma=1.0), network=NetworkConfig(mlp_hidden=(8, 8))
    )


def test_numpys_numbers_and_paths_become_pythons():
    config = Config(seed=np.int64(3), a2c=A2CConfig(gamma=np.float32(0.5)), run=RunConfig(dir=Path("a") / "b"))
    same = checked(config)
    assert same == Config(seed=3, a2c=A2CConfig(gamma=0.5), run=RunConfig(dir="a/b"))
    assert json.loads(json.dumps(to_table(same))) and type(same.seed) is int


@pytest.mark.parametrize("text", [f"seed = {'9' * 5000}", f"a = {'[' * 5000}{']' * 5000}"])
def test_a_preset_that_python_cannot_take_is_told(text, tmp_path):
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(PalaError, match=r"Preset '.*odd.toml' cannot be read"):
        load_preset(tmp_path / "odd.toml")


def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 7")
    assert load_preset(path).seed == 7


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [(["--total-steps", "1e6"], 10**6), (["--total-steps=2.5E3"], 2500), (["--total_steps", "1_000"], 1000)],
)
@pytest.mark.slow
def test_whole_numbers_may_have_exponents(arguments, steps):
    assert parse([*arguments, "--run.name", "1e6"]).config == replace(
        Config(), total_steps=steps, run=RunConfig(name="1e6")
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume", "runs/r", "--run.tensorboard=False"], "write `--run.tensorboard` or `--run.no-tensorboard`"),
        (["--env.normalize_observations", "True"], "`--env.normalize-observations` or `--env.no-normalize-obs"),
        (["--run.no-tensorboard", "True"], "write `--run.tensorboard` or `--run.no-tensorboard`"),
        (["--trust-run", "yes"], "'--trust-run' is a switch and takes no value: write `--trust-run` or"),
    ],
)
def test_a_switch_with_a_value_is_refused(arguments, says):
    with pytest.raises(PalaError, match=re.escape(says)):
        parse(arguments)


def test_a_command_line_may_be_empty():
    assert parse([]).config == Config()


def test_what_is_no_whole_number_is_refused():
    with pytest.raises(PalaError, match="command line was not understood"):
        parse(["--total-steps", "1.5e0"])


def test_a_preset_beside_a_run_to_go_on_with_is_refused():
    with pytest.raises(PalaError, match="Give a preset or `--resume`, not both: 'runs/r' brings its own settings"):
        parse(["pong", "--resume", "runs/r"])


def test_a_preset_builds_on_another(tmp_path):
    """By a name, or by a path from its own folder; tables are put over tables."""
    (tmp_path / "mine.toml").write_text('base = "in_step/breakout"\nseed = 7\n[a2c]\nlearning_rate = 5e-4\n')
    (tmp_path / "more").mkdir()
    (tmp_path / "more/again.toml").write_text('base = "../mine.toml"\n[a2c]\nmomentum = 0.25\n')
    base = load_preset("in_step/breakout")
    mine = replace(base, seed=7, a2c=replace(base.a2c, learning_rate=5e-4))
    assert load_preset(tmp_path / "mine.toml") == mine
    assert load_preset(tmp_path / "more/again.toml") == replace(mine, a2c=replace(mine.a2c, momentum=0.25))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base = 3", r"'.*mine.toml': 'base' is 3 but must be the name or path"),
        ('base = "mine.toml"', r"by 'base', '.*mine.toml' builds on itself"),
        ('base = "in_step/brakeout"', r"Preset 'in_step/brakeout' does not exist; did you mean 'in_step/breakout'"),
        (f'base = "{"a" * 300}"', r"Preset 'aaa.*cannot be read"),
        ('base = "wrong.toml"', r"Preset '.*wrong.toml': unknown key 'speed'"),
    ],
)
def test_a_base_that_is_none_is_named(text, sentence, tmp_path):
    (tmp_path / "wrong.toml").write_text("speed = 3\n")
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(PalaError, match=sentence):
        load_preset(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ('game = "UpNDown"', Config(env=EnvConfig(id="ALE/UpNDown-v5"))),
        ('game = "Krull"\n[env]\nnum_envs = 2', Config(env=EnvConfig(id="ALE/Krull-v5", num_envs=2))),
        ('base = "gorila/krull"', load_preset("gorila/krull")),
        ('base = "gorila"\ngame = "Krull"', load_preset("gorila/krull")),
        ('base = "gala"\ngame = "Pong"', load_preset("gala/pong")),
        ('base = "gala/pong"\ngame = "Krull"', replace(load_preset("gala/pong"), env=EnvConfig(id="ALE/Krull-v5"))),
    ],
)
def test_a_preset_may_name_a_game(text, config, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    assert load_preset(tmp_path / "mine.toml") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("game = 3", "'game' is 3 but must be an Atari game as its id has it, such as 'SpaceInvaders'"),
        ("game = 'ALE/Pong-v5'", "'game' is 'ALE/Pong-v5' but must be an Atari game"),
        ("game = 'Pong'\nenv.id = 'CartPole-v1'", "'game' and 'env.id' both name what is played; leave one out"),
        ("game = 'Pong'\nenv = 3", "'env' is a section and needs a table, not 3"),
        ("games = ['Pong']", "unknown key 'games'"),
    ],
)
def test_a_game_that_is_none_is_named(text, sentence, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(PalaError, match=f"Preset '.*mine.toml': {re.escape(sentence)}"):
        load_preset(tmp_path / "mine.toml")
