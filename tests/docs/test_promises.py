"""The table of promises in CONTRIBUTING.md names existing tests and their tiers.

python tests/docs/test_promises.py     # writes the table again
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"(?<=<!-- promises -->\n).*?(?=<!-- end -->)", re.DOTALL)

# A promise, and what the names of its tests contain.
PROMISES = {
    "weights return from w + d bit for bit": ["restore_is_bitwise", "replicas_bit_identical"],
    "an exception or Ctrl-C restores the weights": ["raise_pass1", "raise_pass2", "ctrl_c_pass2"],
    "a state resumes bit for bit, at any step": ["resume_bitwise_every_step"],
    "no state is saved at w + d": ["state_dict_while_perturbed"],
    "loading keeps groups shared and copies tensors": ["lr_scheduler_after_load", "load_no_alias"],
    "a state that does not fit is rejected": ["shape_mismatch_load"],
    "counters keep their dtype": ["bf16_load_keeps_counters"],
    "deepcopy and pickle": ["deepcopy_pickle"],
    "torch.distributed.checkpoint": ["dcp_fresh_optimizer"],
    "groups: added, with own values, for every base": [
        *("add_param_group", "per_group_hyper", "every_torch_base"),
    ],
    "bases that write into gradients": ["grad_mutating_base"],
    "missing gradients": ["none_pass1", "none_pass2", "frozen"],
    "a zero gradient": ["zero_norm"],
    "NaN and inf": ["nan_grad", "inf_one_rank_only"],
    "GradScaler": ["inf_pass1", "inf_pass2", "scaler_parity"],
    "backward called before step": ["stale_grad"],
    "clipping scales both terms": ["test_clip"],
    "accumulation and micro-batches": ["accum_equals_big_batch", "micro_perturbation"],
    "sparse, complex, tied, several devices": [
        *("sparse_grad", "complex_param", "test_tied", "mixed_device"),
    ],
    "low precision": ["bf16_vanishing"],
    "BatchNorm moves once a step": ["bn_one_update"],
    "the same dropout mask in both passes": ["same_mask"],
    "the loss at w and the sharpness are returned": ["step_returns_loss", "sharpness_readout"],
    "outputs come from the first pass": ["outputs_of_first_pass", "every_kind_of_return"],
    "step hooks run once": ["hook_count"],
    "no global state is left behind": ["nothing_left_behind"],
    "DistributedDataParallel": ["ddp_parity", "ddp_local", "join_uneven"],
    "FSDP2": ["fsdp2_parity"],
    "no recompilation; capture or a clear error": ["no_recompile", "capture_needs_cuda"],
    "bad arguments": ["bad_arguments"],
}


def all_tests() -> dict[str, str]:
    """Return the tier of every test function: "fast" if any function of that name is."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        all_slow = re.search(r"^pytestmark = .*slow", text, re.MULTILINE) is not None
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                slow = all_slow or any("slow" in ast.dump(d) for d in node.decorator_list)
                found[node.name] = "all" if slow and found.get(node.name) != "fast" else "fast"
    return found


def table() -> str:
    known, lines = all_tests(), ["| promise | tests | tier |", "|---|---|---|"]
    for promise, parts in PROMISES.items():
        names = [
            min((n for n in known if part in n), key=len, default=f"?{part}") for part in parts
        ]
        tiers = sorted({known.get(name, "missing") for name in names}, reverse=True)
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {promise} | {shown} | {', '.join(tiers)} |")
    return "\n".join(lines) + "\n"


def test_every_promise_has_a_test() -> None:
    assert "?" not in table()


def test_the_page_has_the_table() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == table(), "run: python tests/docs/test_promises.py"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
