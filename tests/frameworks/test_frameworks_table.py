"""The tables of docs/frameworks list exactly the tests in this folder.

The table of the index is generated from test names: run this file as a program to write it. Each page
must list every test of its framework. Every Python block of the pages runs.
"""

import ast
import logging
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_helpers import reset_accelerate

import wsam

TESTS = Path(__file__).parent
PAGES = TESTS.parents[1] / "docs" / "frameworks"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?<=test_frameworks_table.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
ROW = re.compile(r"^\| .* \| (works|refused) \| `(test_\w+)` \|$", re.MULTILINE)

# page -> (title, files of the tests)
FRAMEWORKS = {
    "lightning": ("Lightning", ("test_lightning.py", "test_lightning_errors.py")),
    "transformers": ("HF Trainer", ("test_transformers.py",)),
    "accelerate": ("Accelerate", ("test_accelerate.py",)),
    "fabric": ("Fabric", ("test_fabric.py",)),
    "skorch": ("skorch", ("test_skorch.py",)),
}
TEST_NAME = re.compile(r"test_(works|refuses)_(\w+)")
FEATURES = {
    "training": "equals the plain loop",
    "one_step_per_step": "counters, schedulers and loggers see one step per step",
    "metrics": "metrics and logs count each sample once",
    "accumulation": "gradient accumulation",
    "clipping_by_norm": "clipping by norm",
    "bf16": "bfloat16",
    "fp16_scaler": "float16 with GradScaler",
    "fp16_overflow": "an overflow leaves the weights unchanged",
    "resume": "save, load and resume, bit for bit",
    "ddp_with_accumulation_and_clipping": "two processes (DDP) with accumulation and clipping",
    "fsdp2_with_accumulation_and_clipping": "two processes (FSDP2) with accumulation and clipping",
    "fsdp2_resume": "FSDP2: save, load and resume, bit for bit",
    "same_dropout_masks": "the same dropout masks in both passes",
    "sharpness_readout": "`sharpness` can be read",
    "interval": "`when=`: steps without a second pass",
    "error_in_second_pass": "an exception in the second pass restores the weights",
    "clipping_by_value": "clipping by value",
    "clipping_with_lean": "the framework's clipping with `lean=True`",
    "fsdp1": "FSDP1",
    "deepspeed": "DeepSpeed",
    "sharding": "other sharding, such as Megatron and XLA",
    "local_perturbation": "`local=True`",
}


def features_of(page: str) -> dict[str, tuple[str, str]]:
    """Return {feature: ("works" or "refused", name of its test)} of a framework."""
    _, files = FRAMEWORKS[page]
    found = {}
    for node in (node for file in files for node in ast.parse((TESTS / file).read_text()).body):
        match = TEST_NAME.fullmatch(node.name) if isinstance(node, ast.FunctionDef) else None
        if match:
            found[match[2]] = ("works" if match[1] == "works" else "refused", match[0])
    return found


def table() -> str:
    columns = {page: features_of(page) for page in FRAMEWORKS}
    titles = " | ".join(f"[{title}]({page}.md)" for page, (title, _) in FRAMEWORKS.items())
    lines = [f"| | {titles} |", "|---" * (len(columns) + 1) + "|"]
    for feature, label in FEATURES.items():
        cells = [column.get(feature, ("-", ""))[0] for column in columns.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_index_is_generated_from_test_names() -> None:
    found = TABLE.search((PAGES / "index.md").read_text())
    assert found is not None
    assert found[0] == table(), (
        "run: PYTHONPATH=tests python tests/frameworks/test_frameworks_table.py"
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_every_row_has_a_test(feature: str) -> None:
    assert any(feature in features_of(page) for page in FRAMEWORKS)


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_page_lists_every_test(page: str) -> None:
    listed = {(status, name) for status, name in ROW.findall((PAGES / f"{page}.md").read_text())}
    assert listed == set(features_of(page).values())


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_no_listed_test_is_skipped(page: str) -> None:
    text = "".join((TESTS / file).read_text() for file in FRAMEWORKS[page][1])
    assert not re.search(r"pytest\.(skip|importorskip|xfail)|mark\.(skip|skipif|xfail)", text)


@pytest.mark.slow
def test_integrations_need_no_framework() -> None:
    """Importing an integration requires only torch."""
    code = (
        "import sys\n"
        "for name in ('accelerate', 'lightning', 'pytorch_lightning', 'skorch', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import wsam.integrations.accelerate, wsam.integrations.lightning\n"
        "import wsam.integrations.transformers as trainer\n"
        "try:\n"
        "    trainer.SharpnessAwareTrainer\n"
        "except ImportError:\n"
        "    print('imported on first use')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "imported on first use", done.stderr


@pytest.fixture
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    reset_accelerate()
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield
    reset_accelerate()


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page; return its names."""
    text = (PAGES / f"{page}.md").read_text()
    names: dict[str, Any] = {"__name__": page}
    for block in BLOCK.finditer(text):
        code = "\n" * (text.count("\n", 0, block.start()) + 1) + block.group(1)
        exec(compile(code, f"{page}.md", "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("page", ["accelerate", "fabric", "skorch"])
def test_blocks_run(page: str) -> None:
    run_blocks(page)


def sam_on_every_other_step(base: Any) -> wsam.SharpnessAware:
    return wsam.SAM(base, when=wsam.schedule.Every(2))


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_lightning_blocks_run_and_log_no_nan() -> None:
    """`sharpness` is NaN on the steps that `when` leaves to the base."""
    page = run_blocks("lightning")
    logged = []

    class Net(page["Net"]):
        def log(self, name: str, value: Any) -> None:
            if name == "sharpness":
                logged.append(float(value))

        def configure_optimizers(self) -> Any:
            return sam_on_every_other_step(torch.optim.SGD(self.parameters(), lr=0.1))

    from lightning_helpers import trainer

    trainer(max_epochs=1).fit(Net(), page["DataLoader"](page["data"], batch_size=8))
    assert len(logged) == 2
    assert all(map(math.isfinite, logged))


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_transformers_blocks_run_and_log_no_nan() -> None:
    page = run_blocks("transformers")
    again = page["MyTrainer"](
        page["trainer"].model,
        page["trainer"].args,
        train_dataset=page["data"],
        wrap=sam_on_every_other_step,
    )
    again.train()
    steps = [row for row in again.state.log_history if "loss" in row]
    assert len(steps) == 2
    assert [row["sharpness"] > 0 for row in steps if "sharpness" in row] == [True]


if __name__ == "__main__":
    index = PAGES / "index.md"
    index.write_text(TABLE.sub(lambda _: table(), index.read_text()))
