"""Run folders from elsewhere, damaged or hostile: a sentence for each fault, no code that they bring, little memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import pala
from pala.config import EnvConfig
from pala.evaluation import evaluate as evaluate_program
from pala.evaluation.acting import Acting
from pala.evaluation.scoring import evaluate
from pala.evaluation.video import record_video
from pala.lab import scores as scores_program
from pala.lab.compare import __main__ as compare_program
from pala.lab.compare import collect
from pala.networks.network import ActorCritic
from pala.report import plot as plot_program
from pala.run import checkpoint, metrics, run_folder, user_code
from pala.run.hooks import NO_CODE, UserCode
from pala.run.lock import lock_folder, who_trains
from pala.run.metrics import LIMIT, MetricsWriter, Tail, metrics_path, read_run
from pala.run.rank import run_rank
from pala.run.request import Request
from pala.run.view import RunView
from pala.system.errors import CollectiveError, PalaError
from pala.system.files import write_atomically
from pala.testing.memory import run_ranks
from pala.train import parse
from support.helpers import memory_growth_below
from support.memory_jobs import configure, gorila, train
from test_checkpoint import SIGNATURE, file_of, make_state
from test_compare import GAME, PRESET
from test_evaluate import CARTPOLE, Sparkle, make_run, network_of

pytest.importorskip("matplotlib")
Program = Callable[[Path], object]
EPISODE = {"type": "episode", "time_s": 1.0, "local_steps": 5, "global_steps": 5, "return": 5.0, "length_steps": 5}


@pytest.fixture
def someone_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, the user is another one, with a home and a key of their own."""

    def become() -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other home"))

    return become


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A completed run of one rank."""
    folder = make_run(tmp_path / "run", CARTPOLE, network_of(CARTPOLE))
    (folder / "metrics").mkdir()
    MetricsWriter(metrics_path(folder, 0), 0).write([EPISODE, EPISODE | {"time_s": 2.0}])
    return folder


# ---- environments made in Python -------------------------------------------------------------------------------------


def five_steps() -> Sparkle:
    """A factory that other processes can import, as any module's."""
    return Sparkle("rgb_array")


def keep(folder: Path, make_env: Callable[[], Any]) -> None:
    user_code.keep(folder, CARTPOLE, UserCode(make_env))


def load(folder: Path, trust_run: bool = False) -> Any:
    return user_code.load_trusted(folder, CARTPOLE, trust_run).make_env


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def local_factory() -> Callable[[], Sparkle]:
    return lambda: Sparkle("rgb_array")


def test_a_factory_that_can_be_imported_is_kept_by_its_name(tmp_path: Path, someone_else: Callable[[], None]) -> None:
    for make_env, name in ((five_steps, "five_steps"), (Sparkle, "Sparkle")):
        keep(tmp_path, make_env)
        assert names_in(tmp_path) == ["code.signature", "make_env.txt"]
        assert (tmp_path / "make_env.txt").read_text() == f"{make_env.__module__}:{name}"
        assert load(tmp_path) is make_env
    someone_else()
    with pytest.raises(PalaError, match=r"make_env.txt' \(a name\), and no job of yours .* add `--trust-run`"):
        load(tmp_path)
    assert load(tmp_path, trust_run=True) is Sparkle


@pytest.mark.parametrize("where", ["__main__", "by value"])
def test_a_factory_that_others_cannot_import_is_pickled(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "__main__":
        monkeypatch.setattr(five_steps, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "five_steps", five_steps, raising=False)
    else:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        keep(tmp_path, five_steps)
    finally:
        if where != "__main__":
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert (tmp_path / "make_env.pkl").exists() and not (tmp_path / "make_env.txt").exists()


def test_a_pickle_is_loaded_without_a_question_only_by_whose_job_wrote_it(
    tmp_path: Path, someone_else: Callable[[], None]
) -> None:
    assert load(tmp_path) is None
    keep(tmp_path, local_factory())
    made = load(tmp_path)
    assert made is not None and isinstance(made(), Sparkle)
    someone_else()
    with pytest.raises(PalaError, match=r"make_env.pkl' \(a pickle\), and no job of yours .* add `--trust-run`"):
        load(tmp_path)
    assert load(tmp_path, trust_run=True) is not None


def test_another_pickle_under_a_signature_is_asked_for(tmp_path: Path) -> None:
    keep(tmp_path, local_factory())
    (tmp_path / "make_env.pkl").write_bytes(cloudpickle.dumps(lambda: None))
    with pytest.raises(PalaError, match="--trust-run"):
        load(tmp_path)
    (tmp_path / "code.signature").unlink()
    with pytest.raises(PalaError, match="--trust-run"):
        load(tmp_path)


def test_without_a_home_every_pickle_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Which is told when the run begins, not first when it is resumed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    user_code.keep(tmp_path, CARTPOLE, UserCode())
    assert capsys.readouterr().err == "", "this run has none"
    keep(tmp_path, local_factory())
    assert "cannot be signed" in (said := capsys.readouterr().err) and "`--trust-run`" in said
    with pytest.raises(PalaError, match="--trust-run"):
        load(tmp_path)
    assert load(tmp_path, trust_run=True) is not None


def test_the_key_is_the_users_alone(tmp_path: Path, someone_else: Callable[[], None]) -> None:
    someone_else()
    keep(tmp_path, local_factory())
    key = tmp_path / "other home" / "pala" / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    assert names_in(key.parent) == ["key"]


def test_a_home_without_hard_links_keeps_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, someone_else) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    someone_else()
    monkeypatch.setattr(os, "link", refused)
    keep(tmp_path, local_factory())
    assert load(tmp_path) is not None and names_in(tmp_path / "other home" / "pala") == ["key"]


@pytest.mark.parametrize("module", ["harm", "run.harm", "run.inside.harm"])
def test_a_module_in_the_runs_own_folder_is_never_imported(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's working folder is on the path of imports, and a folder in it is a package."""
    (tmp_path / "run" / "inside").mkdir(parents=True)
    for folder in ("run", "run/inside"):
        for name in ("harm", "__init__"):
            (tmp_path / folder / f"{name}.py").write_text("raise AssertionError('imported')\ndef make(): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "run" if module == "harm" else tmp_path)
    (tmp_path / "run" / "make_env.txt").write_text(f"{module}:make")
    with pytest.raises(PalaError, match="in the run's own folder, which is not imported"):
        load(tmp_path / "run", trust_run=True)


@pytest.mark.parametrize(
    "name",
    ["os:abort", "http.server:test", "pala.run.user_code:sys.exit", "pala.run.environment:load_nothing",
     "pala.run.user_code:NAME", "../x:y", "x", "", ":", "a:b:c", "\0", "x" * 5000],
)  # fmt: skip
def test_a_name_leads_to_nothing_but_a_modules_own_factory(name: str, tmp_path: Path) -> None:
    (tmp_path / "make_env.txt").write_text(name)
    with pytest.raises(PalaError, match=r"make_env\.txt' (names|is larger)"):
        load(tmp_path, trust_run=True)


def test_a_name_wins_over_a_pickle_and_takes_its_place(tmp_path: Path) -> None:
    keep(tmp_path, local_factory())
    keep(tmp_path, five_steps)
    assert names_in(tmp_path) == ["code.signature", "make_env.txt"]
    (tmp_path / "make_env.pkl").write_bytes(cloudpickle.dumps(local_factory()))
    assert load(tmp_path) is five_steps
    keep(tmp_path, local_factory())
    assert names_in(tmp_path) == ["code.signature", "make_env.pkl"]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"env.wrappers": ("FlattenObservation",)}, "'env.wrappers'"),
        ({"env.id": "harm:Pong-v0"}, "'env.id'"),
        ({"env.id": "FrozenLake-v1(map_name='8x8')"}, "'env.id'"),
        ({"network.custom": "harm:Network"}, "'network.custom'"),
    ],
)
def test_names_in_the_configuration_are_asked_for(named: dict[str, Any], says: str, tmp_path: Path) -> None:
    """By who signed them without a question; not in a run that has been given others."""
    ((key, value),) = named.items()
    section, name = key.split(".")
    config = replace(CARTPOLE, **{section: replace(getattr(CARTPOLE, section), **{name: value})})
    with pytest.raises(PalaError, match=rf"brings code along, {says} .* add `--trust-run`"):
        user_code.check_trust(tmp_path, config, trust_run=False)
    user_code.check_trust(tmp_path, config, trust_run=True)
    user_code.keep(tmp_path, config, UserCode())
    user_code.check_trust(tmp_path, config, trust_run=False)
    other = replace(config, env=replace(config.env, wrappers=("ClipReward",)))
    with pytest.raises(PalaError, match="--trust-run"):
        user_code.check_trust(tmp_path, other, trust_run=False)


def test_what_is_given_is_not_loaded_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "make_env.pkl").write_bytes(b"harm")
    given = UserCode(five_steps)
    user_code.check_trust(tmp_path, CARTPOLE, trust_run=False, given=given)
    assert user_code.load(tmp_path, given) == given


def test_a_pickle_full_of_holes_takes_no_memory(tmp_path: Path, little_memory: None) -> None:
    keep(tmp_path, local_factory())
    os.truncate(tmp_path / "make_env.pkl", 10**12)
    with pytest.raises(PalaError, match=r"make_env.pkl' is larger than 67,108,864 bytes"):
        load(tmp_path)


def test_a_new_run_leaves_out_what_was_planted_under_its_name(tmp_path: Path) -> None:
    """A folder in which no run began is taken as if it were new."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "make_env.pkl").write_bytes(b"harm")
    assert train(1, configure(tmp_path, steps=100)).record["completed"]
    assert not list(folder.glob("make_env*"))


def python_run(folder: Path) -> Path:
    """A run as version 1 left it: with a pickle alone."""
    network = ActorCritic(Sparkle.observation_space, Sparkle.action_space, CARTPOLE.network)
    made = make_run(folder, replace(CARTPOLE, env=EnvConfig(id="ALE/Pong-v5")), network)
    (made / "make_env.pkl").write_bytes(cloudpickle.dumps(local_factory()))
    return made


def test_an_old_run_is_evaluated_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate_program, "prepare", lambda threads: None)
    folder = python_run(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["evaluate", str(folder)])
    with pytest.raises(SystemExit):
        evaluate_program.main()
    assert "add `--trust-run`" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["evaluate", str(folder), "--trust-run"])
    evaluate_program.main()
    assert "mean return 5" in capsys.readouterr().out
    with pytest.raises(PalaError, match="add `--trust-run`"):
        record_video(folder, tmp_path / "video.mp4", Acting())
    assert evaluate(folder, 1, 1, Acting(trust_run=True)).returns == [5]


def test_a_run_that_was_made_in_python_is_gone_on_with(tmp_path: Path, someone_else: Callable[[], None]) -> None:
    """By who made it without a question, also by the program; by others if they trust it."""
    config = configure(tmp_path, steps=40)

    def session(**options: Any) -> list[Any]:
        return run_ranks(2, lambda comm: run_rank(comm, Request(config, **options), comm.interrupt))

    made = session(code=UserCode(local_factory()))
    assert [result.status for result in made] == ["completed"] * 2
    folder, config = tmp_path / "r", replace(config, total_steps=80)
    assert [result.status for result in session(resume=folder)] == ["completed"] * 2
    someone_else()
    config = replace(config, total_steps=120)
    for error in session(resume=folder):
        assert isinstance(error, CollectiveError) and "add `--trust-run`" in str(error)
    assert [result.status for result in session(resume=folder, trust_run=True)] == ["completed"] * 2
    config = replace(config, total_steps=160)
    assert [result.status for result in session(resume=folder)] == ["completed"] * 2, "it is theirs now"


def test_an_id_that_a_kept_environment_wins_over_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config, UserCode(local_factory())), comm.interrupt))
    folder = tmp_path / "r"
    kept = run_folder.config_of(folder).env.id
    capfd.readouterr()
    for given in (kept, "Acrobot-v1"):
        request = Request(replace(config, env=replace(config.env, id=given), total_steps=80), resume=folder)
        run_ranks(1, lambda comm, request=request: run_rank(comm, request, comm.interrupt))
        assert ("'env.id' is 'Acrobot-v1', but the run keeps" in capfd.readouterr().err) == (given != kept)
    assert run_folder.config_of(folder).env.id == kept


@pytest.mark.parametrize(("version", "is_told"), [("3.99.1", True), (platform.python_version(), False)])
def test_a_pickle_of_another_python_is_told(
    version: str, is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config, UserCode(local_factory())), comm.interrupt))
    file = tmp_path / "r" / "run.json"
    record = json.loads(file.read_text())
    record["segments"][-1]["versions"] = {"python": version}
    file.write_text(json.dumps(record))
    capfd.readouterr()
    pala.load_policy(tmp_path / "r")
    assert ("keeps 'make_env.pkl', which Python 3.99.1 has written" in capfd.readouterr().err) == is_told


def test_packed_metrics_are_not_gone_on_with(tmp_path: Path) -> None:
    """What they hold would be hidden by the new file beside them."""
    config = configure(tmp_path, steps=40)
    run_ranks(1, lambda comm: run_rank(comm, Request(config), comm.interrupt))
    folder, config = tmp_path / "r", replace(config, total_steps=80)
    file = metrics_path(folder, 0)
    plain = file.read_bytes()
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(plain))
    file.unlink()
    request = Request(config, resume=folder)
    (error,) = run_ranks(1, lambda comm: run_rank(comm, request, comm.interrupt))
    assert isinstance(error, CollectiveError) and "are packed" in str(error) and "`gunzip` them first" in str(error)
    file.write_bytes(plain)
    (made,) = run_ranks(1, lambda comm: run_rank(comm, request, comm.interrupt))
    assert made.status == "completed" and metrics_path(folder, 0).read_bytes().startswith(plain)


def test_training_takes_the_option_with_a_resume(run: Path) -> None:
    assert parse(["--resume", str(run), "--trust-run"]).trust_run
    assert not parse(["--resume", str(run)]).trust_run


# ---- code in other files ---------------------------------------------------------------------------------------------


class Harm:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.slow
def test_no_file_of_a_run_but_the_environment_executes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "harm was done"
    pickle.loads(pickle.dumps(Harm(mark)))
    assert mark.exists()
    mark.unlink()
    base = tmp_path / "base"
    config = gorila(base, steps=200)
    config = replace(config, gorila=replace(config.gorila, save_replay=True, num_shards=1))
    train(1, config).ended_well()
    train(1, replace(configure(base, steps=40), run=replace(config.run, name="a2c"))).ended_well()
    for made in (base / "r", base / "a2c"):
        (made / "evaluation.json").write_text("{}")
        (made / "evaluations.jsonl").write_text("{}\n")
        (made / "make_env.txt").write_text("x")
        files = [file for file in sorted(made.rglob("*")) if file.is_file()]
        assert len(files) > 8 and (made.name != "r" or any(file.suffix == ".replay" for file in files))
        (made / "make_env.txt").unlink()
        for number, file in enumerate(files):
            folder = tmp_path / f"{made.name}-{number}"
            shutil.copytree(made, folder)
            # First the file alone: beside the pickle, `evaluate` and a resume are refused before they open others.
            for bad in (folder / file.relative_to(made), folder / "make_env.pkl"):
                bad.write_bytes(pickle.dumps(Harm(mark)))
                open_everywhere(folder, mark)


def open_everywhere(folder: Path, mark: Path) -> None:
    preset = folder.parent / "preset.toml"
    (folder.parent / "game.toml").write_text(GAME)
    preset.write_text(PRESET.replace('"game.toml"', f'"{folder.parent}/game.toml"'))
    readers: list[Callable[[], object]] = [
        lambda: evaluate(folder, 1, 1, Acting()),
        lambda: plot_program.read(folder),
        lambda: scores_program.read(folder),
        lambda: checkpoint.global_steps(folder),
        lambda: who_trains(folder),
        lambda: compare_program.compare(
            compare_program.Command(preset, add=(folder,), report_only=True, output=folder / "out")
        ),
        lambda: resumed(folder),
    ]
    for reader in readers:
        try:
            reader()
        except PalaError as error:
            assert "\n" not in str(error)
        assert not mark.exists(), folder


def resumed(folder: Path) -> None:
    """As `--resume` does, but for the training itself."""
    config = parse(["--resume", str(folder)]).config
    steps = checkpoint.global_steps(folder) + 1
    least = config.gorila.min_replay_steps + config.gorila.update_period_steps
    config = replace(config, total_steps=max(steps, least if config.algorithm == "gorila" else 1))
    for result in run_ranks(1, lambda comm: run_rank(comm, Request(config, resume=folder), comm.interrupt)):
        if isinstance(result, BaseException):
            raise result


def test_a_module_that_a_run_names_is_imported_for_who_made_it_or_by_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, someone_else: Callable[[], None]
) -> None:
    folder = make_run(tmp_path / "run", replace(CARTPOLE, env=EnvConfig(id="harm_of_a_run:Name-v0")))
    (tmp_path / "harm_of_a_run.py").write_text("raise ImportError('its code ran')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def film(trust_run: bool = False) -> None:
        record_video(folder, tmp_path / "video.mp4", Acting(trust_run=trust_run))

    for program in (film, lambda: evaluate(folder, 1, 1, Acting())):
        with pytest.raises(PalaError, match=r"brings code along, 'env.id' \['harm_of_a_run:Name-v0'\].*--trust-run"):
            program()
    with pytest.raises(PalaError, match="its code ran"):
        film(trust_run=True)
    user_code.keep(folder, replace(CARTPOLE, env=EnvConfig(id="another:Name-v0")), NO_CODE)
    with pytest.raises(PalaError, match="--trust-run"):
        film()
    user_code.keep(folder, run_folder.config_of(folder), NO_CODE)
    with pytest.raises(PalaError, match="its code ran"):
        film()
    someone_else()
    with pytest.raises(PalaError, match="--trust-run"):
        film()


@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics/rank-0000.jsonl", ".lock"])
def test_nothing_is_written_through_a_link(name: str, run: Path, tmp_path: Path, capsys: Any) -> None:
    """It could lead to a file that a shell executes."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    MetricsWriter(metrics_path(run, 0), 0).write([EPISODE])
    with (
        pytest.raises(PalaError, match="it is a link")
        if name != "metrics/rank-0000.jsonl"
        else contextlib.nullcontext()
    ):
        evaluate_and_save(run)
        lock_folder(run)
    assert victim.read_text() == "as it was"
    assert ("it is a link" in capsys.readouterr().err) == (name == "metrics/rank-0000.jsonl")


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "guessed")
    (run / ".evaluation.json.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(run / "evaluation.json", b"new")
    assert victim.read_text() == "as it was"


def test_links_are_not_copied_into_results(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (run / "evaluations.jsonl").unlink(missing_ok=True)
    (run / "evaluations.jsonl").symlink_to(secret)
    with pytest.raises(PalaError, match=r"evaluations.jsonl' is a link"):
        collect.keep(run, tmp_path / "copies")


def test_an_evaluation_of_checkpoints_does_not_hide_the_final_one(run: Path) -> None:
    """It may have been begun while the run trained, and be done after it has completed."""
    from pala.evaluation import record

    evaluate_and_save(run)
    final = (run / "evaluation.json").read_bytes()
    found = evaluate(run, 1, 1, Acting())
    record.save(run, replace(found, policy="mean of checkpoints of 2 ranks"))
    assert (run / "evaluation.json").read_bytes() == final
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 2


def evaluate_and_save(run: Path) -> None:
    from pala.evaluation import record

    record.save(run, evaluate(run, 1, 1, Acting()))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    with memory_growth_below(150 << 10):
        yield


def pack(file: Path, line: bytes, megabytes: int) -> None:
    with gzip.open(file, "wb", compresslevel=1) as packed:
        for _ in range(megabytes):
            packed.write(line * ((1 << 20) // len(line)))


@pytest.mark.parametrize(
    ("line", "megabytes"),
    [(json.dumps(EPISODE).encode() + b"\n", 32), (b"1", 200), (b"[" + b"1," * 500 + b"1]\n", 32)],
    ids=["records", "line", "lists"],
)
def test_a_small_file_that_unpacks_to_gigabytes_is_refused(
    line: bytes, megabytes: int, run: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run / "metrics" / "rank-0001.jsonl.gz"
    monkeypatch.setattr(metrics, "_SMALL_BYTES", 1 << 20)
    pack(file, line, megabytes)
    assert file.stat().st_size < 1 << 20
    with pytest.raises(PalaError, match=r"rank-0001.jsonl.gz' unpack to more than 30 times .* `gunzip`"):
        plot_program.read(run)


def test_metrics_beyond_the_limit_are_read_by_request(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(4):
        MetricsWriter(metrics_path(run, rank), rank).write([EPISODE] * 3000)
    monkeypatch.setenv(LIMIT, "1")
    with pytest.raises(PalaError, match=rf"metrics of '{run}' are larger than 1 MiB; .* {LIMIT} to more"):
        plot_program.read(run)
    assert metrics_path(run, 1).stat().st_size < 1 << 20, "of each alone there is less"
    monkeypatch.setenv(LIMIT, "1.5")
    assert sum(map(len, read_run(run))) == 12002
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(PalaError, match=f"{LIMIT} is 'much'"):
        plot_program.read(run)


def test_a_file_full_of_holes_takes_no_memory(run: Path, monkeypatch: pytest.MonkeyPatch, little_memory: None) -> None:
    """A few kilobytes on the disk that say they are gigabytes."""
    monkeypatch.setenv(LIMIT, "64")
    file = metrics_path(run, 1)
    with open(file, "wb") as holes:
        holes.truncate(1 << 32)
    with pytest.raises(PalaError, match="are larger than 64 MiB"):
        plot_program.read(run)
    file.unlink()
    with open(run / "run.json", "r+b") as holes:
        holes.truncate(1 << 32)
    with pytest.raises(PalaError, match=r"run.json' cannot be read: it is larger than 16 MiB"):
        run_folder.read(run)


def test_a_line_without_end_is_left_out_of_a_live_view(run: Path, little_memory: None, capsys: Any) -> None:
    with open(metrics_path(run, 0), "ab") as file:
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b"\n")
    MetricsWriter(metrics_path(run, 0), 0).write([EPISODE])
    view = RunView(run, 1)
    view.refresh()
    assert view.num_episodes == 3
    assert "a line that is no record left out, line 3 first." in capsys.readouterr().err


def forge(file: Path, header: dict[str, Any]) -> None:
    """A file of safetensors whose tensors are holes."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as forged:
        forged.write(len(text).to_bytes(8, "little") + text)
        most = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        forged.truncate(8 + len(text) + most)
    assert file.stat().st_blocks * 512 < 1 << 17


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize("which", ["parameters", "stream", "streams"])
def test_a_forged_checkpoint_is_refused_before_its_tensors_are_read(
    which: str, tmp_path: Path, little_memory: None
) -> None:
    state = make_state()
    checkpoint.save_rank(tmp_path, state)
    header = header_of(file_of(tmp_path))
    size = 1 << 29
    if which == "parameters":
        for number, name in enumerate(("mean_square", "parameters")):
            header[name] |= {"shape": [size // 4], "data_offsets": [number * size, (number + 1) * size]}
        header["random.actions"]["data_offsets"] = [2 * size, 2 * size + 8]
    else:
        begin = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        for number in range(200 if which == "streams" else 1):
            length = 1 << 20 if which == "streams" else size
            offsets = [begin + number * length, begin + (number + 1) * length]
            header[f"random.{number}"] = {"dtype": "U8", "shape": [length], "data_offsets": offsets}
    forge(file_of(tmp_path), header)
    with pytest.raises(PalaError, match=r"its tensors are not those of this run's network"):
        checkpoint.load_rank(tmp_path, 0, SIGNATURE, parameters=6)


def test_a_forged_policy_is_refused_before_its_tensors_are_read(run: Path, little_memory: None) -> None:
    header, size = header_of(run / "policy.safetensors"), 1 << 30
    name = "policy_head.bias"
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    names = sorted((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])
    names.remove(name)
    place = 0
    for key in [*names, name]:
        begin, stop = header[key]["data_offsets"]
        header[key]["data_offsets"] = [place, place + stop - begin]
        place += stop - begin
    header[name] |= {"shape": [size // 4], "data_offsets": [header[name]["data_offsets"][0], place - 8 + size]}
    assert end == place
    forge(run / "policy.safetensors", header)
    with pytest.raises(PalaError, match=rf"'{name}' should be \[2\] and is \[{size // 4}\]"):
        evaluate(run, 1, 1, Acting())


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    train(1, configure(tmp_path, steps=40)).ended_well()
    folder = checkpoint.newest_segment(tmp_path / "r")
    for file in folder.iterdir():
        state = checkpoint._read_rank(file)
        state.tensors = {name: state.tensors["parameters"].clone() for name in ("parameters", "squares", "target")}
        checkpoint.save_rank(folder, state)
    (result,) = train(1, configure(tmp_path, steps=80), resume=tmp_path / "r").results
    assert isinstance(result, CollectiveError) and "of another algorithm" in str(result)
    (tmp_path / "r" / "policy.safetensors").unlink()
    with pytest.raises(PalaError, match="of another algorithm"):
        evaluate(tmp_path / "r", 1, 1, Acting())


# ---- sentences -------------------------------------------------------------------------------------------------------


def program(of: Any, *arguments: object) -> Program:
    def start(run: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["program", *(str(a).format(run=run, folder=run.parent) for a in arguments)])
            of.main()

    return start


def start_training(run: Path) -> None:
    """What `python -m pala.train --resume` does first."""
    parse(["--resume", str(run)])
    result = run_ranks(1, lambda comm: run_rank(comm, Request(CARTPOLE, resume=run), comm.interrupt))[0]
    if isinstance(result, BaseException):
        raise result


PROGRAMS: dict[str, Program] = {
    "evaluate": program(evaluate_program, "{run}", "--episodes", "1"),
    "plot": program(plot_program, "{run}"),
    "compare": program(
        compare_program, "{folder}/preset.toml", "--report-only", "--add", "{run}", "--output", "{folder}/out"
    ),
    "scores": program(scores_program, "{run}", "--output", "{folder}/out"),
    "resume": start_training,
}


@pytest.fixture(params=PROGRAMS)
def says(
    request: pytest.FixtureRequest, own_handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[[Path], str]:
    """Start a program with a run's path; the one sentence by which it ends, or nothing."""
    monkeypatch.setattr(evaluate_program, "prepare", lambda threads: None)
    (tmp_path / "game.toml").write_text(GAME)
    (tmp_path / "preset.toml").write_text(PRESET.replace('"game.toml"', f'"{tmp_path}/game.toml"'))

    def start(run: Path) -> str:
        try:
            PROGRAMS[request.param](run)
        except SystemExit as exit_:
            if not exit_.code:
                return ""
            said = capsys.readouterr().err
            assert exit_.code == 2 and said.startswith("pala: error: ") and said.count("\n") == 1, said
            return said
        except PalaError as error:
            return str(error)
        return ""

    start.program = request.param  # type: ignore[attr-defined]
    return start


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nested": (lambda record: nested(100_000), "it is nested too deeply"),
    "nested less": (lambda record: json.dumps(record).replace('"seed": 1', f'"seed": {nested(900)}'), "seed"),
    "nothing": (lambda record: "", "cannot be read"),
    "half": (lambda record: json.dumps(record)[:200], "cannot be read"),
    "a list": (lambda record: [record], "it holds no table"),
    "a number": (lambda record: 7, "it holds no table"),
    "no completed": (lambda record: {k: v for k, v in record.items() if k != "completed"}, "'completed' is missing"),
    "completed perhaps": (lambda record: record | {"completed": "perhaps"}, "'completed' is 'perhaps'"),
    "no config": (lambda record: {k: v for k, v in record.items() if k != "config"}, "'config' is missing"),
    "another config": (lambda record: record | {"config": {"colour": 1}}, "unknown key 'colour'"),
    "no segment": (lambda record: record | {"segments": []}, "'segments' holds no segment"),
    "segments of numbers": (lambda record: record | {"segments": [1]}, "'segments' holds no segment"),
    "no start": (lambda record: record | {"segments": [{"status": "completed"}]}, "'started' of segment 0 is missing"),
    "many ranks": (
        lambda record: record | {"segments": [record["segments"][0] | {"ranks": 10**400}]},
        "'ranks' of segment 0 is 1000",
    ),
    "no ranks": (
        lambda record: record | {"segments": [record["segments"][0] | {"ranks": None}]}, "'ranks' of segment 0 is None"
    ),
}  # fmt: skip


def is_slow(program: str, fault: str) -> bool:
    """Two faults show often that the programs which take longest to start read a record as the others do."""
    return program in ("compare", "resume") and fault not in ("half", "no segment")


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        pytest.param(program, fault, marks=[pytest.mark.slow] * is_slow(program, fault))
        for program in PROGRAMS
        for fault in RECORDS
    ],
    indirect=["says"],
)
def test_a_damaged_record_is_told(fault: str, run: Path, says: Callable[[Path], str]) -> None:
    make, words = RECORDS[fault]
    made = make(json.loads((run / "run.json").read_text()))
    (run / "run.json").write_text(made if isinstance(made, str) else json.dumps(made))
    said = says(run)
    assert words in said and "run.json" in said and len(said) < 700 + len(str(run))


LINES = {
    "list": "[1, 2]", "number": "7", "null": "null", "text": '"x"', "nested": nested(100_000), "empty": "{}",
    "no type": '{"time_s": 1}', "strange type": '{"type": [1], "time_s": 1}', "no time": '{"type": "interval"}',
    "late": '{"type": "interval", "time_s": NaN}', "huge": json.dumps(EPISODE | {"return": 10**400}),
    "no return": '{"type": "episode", "time_s": 1, "global_steps": 1}',
    "text for a number": '{"type": "interval", "time_s": 1, "consensus_distance": "far"}',
    "half of a sketch": '{"type": "interval", "time_s": 1, "own_movement": [1.0]}',
    "unlike sketches": '{"type": "interval", "time_s": 1, "own_movement": [1.0], "movement": [1.0, 2.0]}',
    "list for a number": '{"type": "interval", "time_s": 1, "mixes": [1]}', "bytes": "\udcff\udcfe{",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_lines_that_are_no_records_are_left_out_and_said(line: str, run: Path, capsys: Any) -> None:
    file = metrics_path(run, 0)
    file.write_bytes(LINES[line].encode(errors="surrogateescape") + b"\n" + file.read_bytes())
    assert len(plot_program.read(run).returns) == 2
    assert capsys.readouterr().err == f"Metrics '{file}': a line that is no record left out, line 1 first.\n"
    view = RunView(run, 1)
    view.refresh()
    view.refresh()
    assert view.num_episodes == 2 and view.total("mixes") == 0 and view.mean_return == 5
    assert capsys.readouterr().err.count("\n") == 1, "once"


def test_a_damaged_packed_file_is_told(run: Path) -> None:
    file = run / "metrics" / "rank-0001.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(EPISODE | {"return": i / 7}).encode() + b"\n" for i in range(500)))
    for data in (
        whole[: len(whole) // 2],
        whole[:5],
        whole[:-1],
        b"",
        b"text",
        whole[:100] + b"\xff" * 9 + whole[109:],
    ):
        file.write_bytes(data)
        if data == b"":
            assert list(Tail(file).read()) == []
            continue
        with pytest.raises(PalaError, match=r"rank-0001.jsonl.gz' cannot be read, or are damaged"):
            plot_program.read(run)


def test_training_goes_on_beside_metrics_that_cannot_be_read(run: Path, capsys: Any) -> None:
    (run / "metrics" / "rank-0001.jsonl").mkdir()
    view = RunView(run, 2)
    view.refresh()
    view.refresh()
    assert view.num_episodes == 2
    assert capsys.readouterr().err.count("is a folder, not a file. Training goes on.") == 1


@pytest.mark.timeout(30)
def test_many_starts_that_lead_nowhere_take_no_time(run: Path) -> None:
    """Each start drops what came after it: looked through anew each time, this would take a minute."""
    start = {"type": "start", "time_s": 3.0, "segment": "segment-000"}
    metrics_path(run, 0).write_text((json.dumps(start) + "\n" + json.dumps(EPISODE | {"time_s": 2.0}) + "\n") * 20_000)
    assert len(plot_program.read(run).returns) == 20_000


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"policy": "final"}', nested(100_000),
                                  '{"policy": [], "global_steps": "x", "mean_return": 1, "episodes": 1}'])  # fmt: skip
def test_a_damaged_evaluation_is_told(text: str, run: Path) -> None:
    from pala.evaluation.record import final_evaluation

    for name in ("evaluation.json", "evaluations.jsonl"):
        (run / name).write_text(text)
        with pytest.raises(PalaError, match=r"cannot be read") as raised:
            final_evaluation(run, run_folder.read(run))
        assert str(run) in str(raised.value)
        (run / name).unlink()


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_a_path_that_is_no_runs_folder_is_told(tmp_path: Path, says: Callable[[Path], str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    (tmp_path / "empty").mkdir()
    for name, words in {
        "nowhere": "does not exist", "file": "it is a file", "empty": "no 'run.json'",
        "folder": "is a folder, not a file", "pipe": "is a pipe or a device, not a file", "\0": "", "x" * 300: "",
    }.items():  # fmt: skip
        said = says(tmp_path / name)
        assert words in said and len(said) < 900, said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_told(run: Path, says: Callable[[Path], str]) -> None:
    run.chmod(0)
    try:
        assert "Permission denied" in says(run)
    finally:
        run.chmod(0o755)


def test_a_file_that_may_not_be_read_is_told(
    run: Path, says: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever the user is."""
    really = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("run.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    said = says(run)
    assert "Permission denied" in said and str(run / "run.json") in said
