"""Every command of `wsam`, found by walking the application: a new one cannot be forgotten.

Help with an example that parses, JSON alone on stdout, one line for a mistake, files whole or absent.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMANDS, ROOT, WRITES_ONE_FILE, error_of, wsam_command
from reporting import StopAfter

from wsam.cli import _files
from wsam.cli._app import ORDER
from wsam.cli._errors import sentence
from wsam.lab import records
from wsam.lab.checkpoint import save_state
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.sweep import Here, Processes

RUN = Run(data="digits", model="mlp", method="wsam", epochs=1, train_limit=100, test_limit=50)
ONE_CELL = "--smoke --only ResNet18/WSAM/CIFAR-10 --seeds 0 --epochs 1 --device cpu"
TRAIN = "--model mlp --epochs 1 --train-limit 100 --test-limit 50 --device cpu --no-tensorboard"

# A quick use of every command. {run} is a record, {runs} its folder, {page} a page with a table, {out}
# a new folder.
QUICK = {
    "bench": "--smoke --only WSAM --rounds 2 --device cpu --out {out}",
    "bounds convex": "",
    "bounds generalization": "",
    "bounds nonconvex": "",
    "curvature": "{run} --samples 50 --density --device cpu --out {out}",
    "demo": "--seeds 0 --out {out}",
    "directions": "--out {out}",
    "landscape": "{run} --samples 50 --points 3 --device cpu --out {out}",
    "paper list": "",
    "paper page": "{page}",
    "paper run": f"cifar {ONE_CELL} --out {{out}}",
    "paper table": "cifar --plot {out}/cifar.png",
    "report": "{runs} --out {out}/report.html",
    "sweep": f"cifar {ONE_CELL} --workers 1 --out {{out}}",
    "toy": "--gamma 0.9 --out {out}",
    "train": f"{TRAIN} --out {{out}}",
}
IN_WORKERS = {"demo", "sweep"}  # other processes write their records, with the code of `train`
NOT_RESULTS = {"lock"}  # written in place, and means nothing by its contents


def groups(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if hasattr(command, "commands"):
        yield " ".join(path)
        for name, each in command.commands.items():
            yield from groups(each, (*path, name))


GROUPS = list(groups(ROOT))


def test_every_command_has_a_quick_use() -> None:
    assert set(QUICK) == set(COMMANDS)


# --- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPS])
def test_help_has_an_example_that_parses(name: str) -> None:
    text = wsam_command(*name.split(), "--help").stdout
    told = re.search(r"Examples?: (.*)", text, re.DOTALL)
    assert told, f"wsam {name} --help has no example"
    for example in " ".join(told.group(1).split()).split("; "):
        first, *words = shlex.split(example)
        assert first == "wsam"
        assert example.startswith(f"wsam {name}".strip())
        assert "Usage: wsam" in wsam_command(*words, "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_option(name: str) -> None:
    options = [each for each in COMMANDS[name].params if each.param_type_name == "option"]
    assert [each.opts[0] for each in options if not each.help] == []


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_alone_shows_its_commands(name: str) -> None:
    answer = wsam_command(*name.split(), status=2)
    assert "Commands:" in answer.stdout + answer.stderr


def short_help(name: str) -> dict[str, str]:
    """What a group's help says beside each of its commands."""
    shown = wsam_command(*name.split(), "--help").stdout
    listed = shown.partition("Commands:\n")[2].partition("\n\n")[0]
    return dict(line.split(maxsplit=1) for line in listed.splitlines())


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_describes_each_command_in_a_line(name: str) -> None:
    told = short_help(name)
    assert told
    for text in told.values():
        assert len(text) < 55
        assert text.endswith("."), "it is cut"
        assert not text.endswith("...")


def test_commands_stand_in_the_order_a_newcomer_needs() -> None:
    assert tuple(short_help("")) == ORDER
    assert set(ORDER) == set(ROOT.commands)


@pytest.mark.parametrize("name", [*COMMANDS, *GROUPS])
def test_help_is_short_to_type_and_shows_no_types_of_ours(name: str) -> None:
    text = wsam_command(*name.split(), "-h").stdout
    assert text == wsam_command(*name.split(), "--help").stdout
    assert not re.search(r"[{}]|list\[|range>", text)


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line(name: str) -> None:
    line = error_of(*name.split(), "--nope")
    assert "no such option: --nope" in line
    assert f"(see wsam {name} --help)" in line


@pytest.mark.parametrize(
    "words",
    [
        "toy --gamma x",
        "train --epochs x",
        "bounds convex -T x",
        "bench --rounds x",
        "sweep a --gpus x",
    ],
)
def test_a_word_for_a_number_is_one_line(words: str) -> None:
    *_, option, _ = words.split()
    line = error_of(*words.split()).replace("'--steps' / ", "")
    assert f"invalid value for '{option}': 'x' is not a " in line
    assert "Input" not in line


@pytest.mark.parametrize("name", GROUPS)
def test_an_unknown_command_is_one_line(name: str) -> None:
    assert "no such command 'nope'" in error_of(*name.split(), "nope")


@pytest.mark.parametrize(
    "name", [n for n, c in COMMANDS.items() if any(p.required for p in c.params)]
)
def test_a_missing_argument_is_one_line(name: str) -> None:
    assert "missing argument" in error_of(*name.split())


@pytest.mark.parametrize("name", sorted(WRITES_ONE_FILE))
def test_a_file_that_is_a_folder_is_told(name: str, tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder" in error_of(name, tmp_path, "--out", tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file", "a.json"), "there is no a.json"),
        (FileExistsError(17, "File exists", "a"), "a cannot be a folder"),
        (IsADirectoryError(21, "Is a directory", "a"), "a is a folder"),
        (PermissionError(13, "Permission denied", "a"), "a: permission denied"),
        (OSError(28, "cannot write a: no space"), "cannot write a: no space"),
        (OSError("another process works on this run"), "another process works"),
    ],
)
def test_errors_of_files_are_sentences(error: OSError, words: str) -> None:
    assert sentence(error).startswith(words)


def test_a_seed_beyond_torchs_is_named(run: Path, tmp_path: Path) -> None:
    words = ("landscape", run, "--samples", 50, "--points", 3, "--device", "cpu", "--out", tmp_path)
    assert "--seed 99999999999999999999999: too large" in error_of(*words, "--seed", "9" * 23)
    assert not list(tmp_path.iterdir())


def test_an_overflow_without_an_extreme_number_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsam.toy.updates", lambda *gammas, rho: math.exp(1e4))
    with pytest.raises(OverflowError):
        wsam_command("directions", "--rho", "3", "--gamma", "0")
    assert "--rho 1e30: too large" in error_of("directions", "--rho", "1e30")


# --- files -------------------------------------------------------------------------------------


class Disk:
    """What this process writes below a folder; it can press Ctrl-C when a file gets its name."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.interrupt = False
        self.opened: set[str] = set()
        sys.addaudithook(self._heard)  # stays for good, so it does nothing without a folder

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in {"open", "os.rename"}:
            return
        path, what = str(arguments[0]), arguments[1]
        if not os.path.abspath(path).startswith(self.folder):  # noqa: PTH100 (called at every open)
            return
        if event == "os.rename" and self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        if event == "open" and isinstance(what, str) and set(what) & set("wxa+"):
            self.opened.add(os.path.abspath(path))  # noqa: PTH100


DISK = Disk()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    DISK.folder, DISK.opened, DISK.interrupt = str(tmp_path.resolve()), set(), False
    yield DISK
    DISK.folder = None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(RUN, folder, Means(device="cpu", keep_weights=True))
    return records.record_path(folder, RUN)


def results(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_RESULTS)
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "demo" else n for n in COMMANDS]
)
def test_ctrl_c_leaves_nothing_and_json_stands_alone(
    name: str, tmp_path: Path, run: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- wsam paper table cifar -->\nold\n<!-- end -->\n")
    out = tmp_path / "new" / "out"
    filled = QUICK[name].format(run=run, runs=run.parent, page=page, out=out)
    words = [*name.split(), *shlex.split(filled), "--json"]
    before = results(tmp_path)
    disk.opened.clear()
    if ("{out}" in QUICK[name] or "{page}" in QUICK[name]) and name not in IN_WORKERS:
        disk.interrupt = True
        answer = wsam_command(*words, status=130)
        assert (answer.stdout, answer.stderr) == ("", "wsam: interrupted\n")
        assert results(tmp_path) == before, "Ctrl-C leaves nothing half-written"
    found = json.loads(wsam_command(*words).stdout)
    if "{out}" in QUICK[name]:
        written = set(results(tmp_path)) - set(before)
        assert written
        assert not written & disk.opened, "every file gets its name when it is complete"
        listed = found.get("files") if isinstance(found, dict) else None
        assert listed is None or (listed and all(Path(file).is_file() for file in listed))
        assert not list(tmp_path.rglob(f"{_files.PREFIX}*"))


def test_files_appear_together(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"

    def half(error: BaseException) -> None:
        with _files.together(folder) as unfinished:
            (unfinished / "one").write_text("hal")
            raise error

    with pytest.raises(KeyboardInterrupt):
        half(KeyboardInterrupt())
    assert not list(tmp_path.iterdir()), "folders made for them are gone, too"
    folder.mkdir(parents=True)
    (folder / "one").write_text("old")
    with pytest.raises(ValueError, match="no"):
        half(ValueError("no"))
    assert [path.name for path in folder.iterdir()] == ["one"]
    assert (folder / "one").read_text() == "old"
    with _files.together(folder) as unfinished:
        (unfinished / "one").write_text("new")
        (unfinished / "two").write_text("new")
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]
    assert (folder / "one").read_text() == "new"


# --- Ctrl-C --------------------------------------------------------------------------------------

KEPT = "wsam: interrupted; work is kept: the same command goes on from there"


@pytest.mark.parametrize("seconds", [0, 60])
def test_an_interrupted_training_tells_of_its_checkpoint(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wsam.cli._options.make_watchers", lambda quiet: [StopAfter()])
    words = f"{TRAIN} --epochs 3 --checkpoint-seconds {seconds} --out {tmp_path}"
    said = wsam_command("train", *words.split(), status=130).stderr
    assert said == f"{'wsam: interrupted' if seconds else KEPT}\n"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("words", ["paper run cifar", "sweep cifar", "sweep rho --optuna", "demo"])
def test_interrupted_runs_tell_of_what_is_kept(
    words: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own, that is: what other commands left in the folder is no work of theirs."""

    def interrupted(executor: Any, jobs: Any) -> Iterator[Any]:
        job = next(iter(jobs))
        run = job.run if kept else job.run.replace(seed=99)
        save_state(records.work_folder(job.out, run) / "checkpoints" / "000001.pt", {})
        raise KeyboardInterrupt
        yield

    for executor in (Here, Processes):
        monkeypatch.setattr(executor, "carry_out", interrupted)
    if "optuna" in words:
        pytest.importorskip("optuna")
    smoke = [] if words == "demo" else ["--smoke", "--device", "cpu"]
    said = wsam_command(*words.split(), *smoke, "--out", tmp_path, status=130).stderr
    assert said.splitlines()[-1] == (KEPT if kept else "wsam: interrupted")


# --- libraries that are missing ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("typer", ["--help"], "lab,plots"),
        ("rich", ["toy"], "lab"),
        ("matplotlib", ["directions", "--out", "pictures"], "plots"),
        ("sklearn", ["train", "--device", "cpu", "--no-tensorboard"], "lab"),
        ("sklearn", ["paper", "run", "gamma", "--smoke", "--device", "cpu"], "lab"),
        ("tensorboard", ["train", "--device", "cpu", "--tensorboard"], "lab"),
    ],
)
def test_a_missing_library_is_one_line(
    library: str, words: list[str], extra: str, tmp_path: Path
) -> None:
    """In a process of its own, for modules that are there already are not imported again."""
    code = f"import sys; sys.modules[{library!r}] = None; from wsam.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"needs {library}: pip install 'wsam[{extra}]'" in done.stderr
    assert not list(tmp_path.rglob("*.png"))
    assert not list(tmp_path.rglob("lock")), "what is refused claims no run"
