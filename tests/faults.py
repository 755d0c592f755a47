"""Deliberate faults, each of which `make test` must detect.

    python tests/faults.py            # all faults, in a copy of the repository
    python tests/faults.py sign       # those whose name contains "sign"

Each fault is one replacement in the source. The program applies it to a copy, runs the fast tests of
the given folders until one fails, and prints the name of that test.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTEST = (
    *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    *("-m", "not slow and not browser"),
)


class Fault(NamedTuple):
    """A replacement in a file of src/wsam, and the tests that should detect it."""

    name: str
    file: str
    old: str
    new: str
    tests: str = "tests/core"


FAULTS = [
    Fault(
        "sign of the sharpness term",
        "_core/step.py",
        "            torch._foreach_sub_(difference, g0)\n",
        "            torch._foreach_sub_(difference, g0)\n"
        "            torch._foreach_neg_(difference)\n",
        "tests/core/test_reference_agreement.py",
    ),
    Fault(
        "weights left at w + d under weight decay",
        "_core/step.py",
        "            block.saved.restore(block.weights())",
        "            block.saved.restore(block.weights()) if not block.group.get('weight_decay') "
        "else None",
        "tests/core/test_reference_agreement.py",
    ),
    Fault(
        "statistics counted twice",
        "_core/norm_stats.py",
        "            torch._foreach_copy_(tensors, kept)\n\n    def rebind",
        "            pass\n\n    def rebind",
        "tests/core/test_norm_stats.py",
    ),
    Fault(
        "norm per group instead of global",
        "_core/step.py",
        "    norm = squared_norm(blocks, whitened).sqrt()\n    # An",
        "    norm = squared_norm(blocks[:1], whitened[:1]).sqrt()\n    # An",
        "tests/core/test_identities.py",
    ),
    Fault(
        "stale autocast cache",
        "optimizer.py",
        "        torch.clear_autocast_cache()\n        for module",
        "        for module",
    ),
    Fault(
        "momentum lost on resume",
        "_core/state_dict.py",
        "base.load_state_dict(copy.deepcopy(state))",
        "base.load_state_dict({**copy.deepcopy(state), 'state': {}})",
        "tests/core/test_state_dict.py",
    ),
    Fault(
        "clipping of the base's gradient alone",
        "_core/step.py",
        "        term.scale = on_device(factor, term.block.device) * term.scale",
        "        pass",
        "tests/core/test_reference_agreement.py",
    ),
    Fault(
        "dropout masks differ between the passes",
        "optimizer.py",
        "            self._rng.write(before)\n\n    def",
        "            pass\n\n    def",
        "tests/core/test_rng.py",
    ),
    Fault(
        "first gradients not unscaled",
        "_core/step.py",
        "        torch._foreach_div_(block.shards(block.g0), grad_scale)",
        "        pass",
        "tests/core/test_grad_scaler.py",
    ),
    Fault(
        "weights restored by subtraction of d",
        "_core/param_blocks.py",
        "        torch._foreach_copy_(list(weights), self.tensors)",
        "        torch._foreach_add_(list(weights), torch._foreach_sub(self.tensors, list(weights)))",
    ),
    Fault(
        "ESAM keeps one sample fewer",
        "_core/sample_selection.py",
        "max(1, math.floor(self.keep * len(losses) + 1e-9))",
        "max(1, math.floor(self.keep * len(losses) + 1e-9) - 1)",
        "tests/core/test_sample_selection.py",
    ),
    Fault(
        "weight swap not undone after an error",
        "optimizer.py",
        "                self._restore()\n        if state.is_done",
        "                pass\n        if state.is_done",
        "tests/core/test_interruptions.py",
    ),
    Fault(
        "train_step: micro-batches not weighted by their sizes",
        "training_step.py",
        "loss * weight",
        "loss / self.micro_batches",
        "tests/training_step",
    ),
    Fault(
        "train_step: outputs of the second pass",
        "training_step.py",
        "            if index not in outputs:  # of the first pass\n",
        "            if True:\n",
        "tests/training_step",
    ),
    Fault(
        "train_step: a scaled step that fails leaves the weights at w + d",
        "training_step.py",
        "            optimizer.abandon()\n            state =",
        "            state =",
        "tests/training_step",
    ),
    Fault(
        "train_step: local=True reduces the first gradients of a scaled step",
        "optimizer.py",
        "is_local = self.local and not self._in_last_pass",
        "is_local = False",
        "tests/training_step/test_train_step.py",
    ),
    Fault(
        "train_step: samples are selected without autocast",
        "training_step.py",
        "        with self._autocast_context():\n            found = sharp",
        "        if True:\n            found = sharp",
        "tests/training_step/test_train_step_selection.py",
    ),
    Fault(
        "preconditioned WSAM: the base's squares lack those of the term",
        "_core/step.py",
        "    add_squares(state.base, state.decoupled)\n",
        "",
        "tests/core/test_precondition.py",
    ),
    Fault(
        "preconditioned WSAM: classes derived from a known base are unknown",
        "_core/preconditioners.py",
        "for kind in type(base).__mro__ if kind",
        "for kind in type(base).__mro__[:1] if kind",
        "tests/core/test_precondition.py",
    ),
    Fault(
        "reuse: the steps between are not clipped with their sharpness term",
        "_core/step.py",
        "        p.grad = g\n    if state.max_norm is not None:\n"
        "        clip(blocks, state.decoupled, state.max_norm)",
        "        p.grad = g\n    if state.max_norm is not None:\n"
        "        clip(blocks, [], state.max_norm)",
        "tests/core/test_reuse.py",
    ),
    Fault(
        "LookSAM: the kept part is not orthogonal to g0",
        "peers/looksam.py",
        "return Part(g0=1 - ratio, difference=1.0)",
        "return Part(g0=1.0, difference=1.0)",
        "tests/core/test_peers.py",
    ),
    Fault(
        "VaSSO: theta is the share of the old average",
        "geometry.py",
        "torch._foreach_lerp(before, g0, self.theta)",
        "torch._foreach_lerp(g0, before, self.theta)",
        "tests/core/test_peers.py",
    ),
    Fault(
        "FriendlySAM: the average that is removed includes this step",
        "geometry.py",
        "        vector = list(torch._foreach_add(g0, before",
        "        before = memory.read_each(block, AVERAGE)\n"
        "        vector = list(torch._foreach_add(g0, before",
        "tests/core/test_peers.py",
    ),
    Fault(
        "MSAM: sign of the perturbation",
        "geometry.py",
        "torch._foreach_mul(momentum, -block.sign)",
        "torch._foreach_mul(momentum, block.sign)",
        "tests/core/test_msam.py",
    ),
    Fault(
        "compare: seeds are not paired",
        "compare/differences.py",
        "            if seed in base\n",
        "            if True\n",
        "tests/compare/test_compare_summary.py",
    ),
    Fault(
        "compare: the worst trial is chosen",
        "compare/runner.py",
        "best = min(found, key",
        "best = max(found, key",
        "tests/compare/test_compare_run.py",
    ),
    Fault(
        "validation samples stay among the training samples",
        "lab/data/feed.py",
        "return order[chosen:].sort()",
        "return order.sort()",
        "tests/lab/test_lab_validation.py",
    ),
    Fault(
        "a table's columns are standardized with test rows",
        "lab/data/table_feed.py",
        "float(column[train].mean()), float(column[train].std(correction=0))",
        "float(column.mean()), float(column.std(correction=0))",
        "tests/lab/data/test_lab_tables.py",
    ),
    Fault(
        "the target of a text is its input",
        "lab/data/text.py",
        "for at in (0, 1))",
        "for at in (0, 0))",
        "tests/lab/data/test_lab_text.py",
    ),
]


def detect(fault: Fault) -> str | None:
    """Return the first test that fails with the fault, None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "wsam"
        ignored = shutil.ignore_patterns(".git", ".venv*", "results", "_static", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        path = copy / "src" / "wsam" / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(
                f"{fault.name}: the text to replace occurs {text.count(fault.old)} times"
            )
        path.write_text(text.replace(fault.old, fault.new))
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*PYTEST, *fault.tests.split()],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0].split(" - ")[0] if failed else None


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = 0
    for fault in (fault for fault in FAULTS if wanted in fault.name):
        found = detect(fault)
        missed += found is None
        print(f"{fault.name}: {found or 'NOT DETECTED'}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
