"""The public API equals its snapshot, and files written by version 0.1 still load.

`public_api.json` holds names, signatures and defaults, the command line, the keys of `state_dict`
and the format of records. After a deliberate change, write it again and review the diff:

    python tests/api/test_public_api.py --write

Order of keyword-only arguments and type annotations are not part of the snapshot. A module without
`__all__` exports the classes and functions it defines; add `__all__` where they move elsewhere.
"""

import dataclasses
import enum
import inspect
import json
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

import wsam
from wsam.lab import records
from wsam.lab.run import Run
from wsam.lab.settings import BASES
from wsam.report import write

SNAPSHOT = Path(__file__).with_name("public_api.json")
V0_1 = Path(__file__).parents[1] / "fixtures" / "v0_1"

# As in docs/api.md and the pages it lists. None: all that the module exports.
DOCUMENTED = {
    "wsam": None,
    "wsam.geometry": None,
    "wsam.rule": None,
    "wsam.schedule": None,
    "wsam.accel.cuda_graph": ["CapturedStep", "capture"],
    "wsam.integrations": None,
    "wsam.integrations.lightning": None,
    # SharpnessAwareTrainer is left out: importing the Trainer takes 9 s, and its own tests use it.
    "wsam.integrations.transformers": ["SharpnessAwareMixin"],
    "wsam.integrations.accelerate": None,
    "wsam.curvature": None,
    "wsam.theory": None,
    "wsam.toy": None,
    "wsam.lab": None,
    "wsam.lab.run": ["Run"],
    "wsam.lab.execution": ["ExecutionConfig"],
    "wsam.lab.train": ["train"],
    "wsam.lab.records": None,
    "wsam.paper": None,
    "wsam.sweep": None,
    "wsam.report": None,
}
# Methods of `SharpnessAware` that docs/api/optimizer.md lists; subclasses inherit them.
OPTIMIZER_METHODS = (
    *("step", "begin", "ascend", "descend", "abandon", "first_step", "second_step", "perturbed"),
    *("select", "sharpness", "second_pass", "state_dict", "load_state_dict", "add_param_group"),
)
OPTIMIZER_ATTRIBUTES = ("base", "skipped", "param_groups", "state", "defaults")
BASE_OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
MAY_BE_NULL = ("commit", "cuda", "cudnn")  # depends on the machine


# Names and signatures ---------------------------------------------------------------------------


def python_api():
    """Return {module: {name: description}}; a name exported twice is described once."""
    seen, found = {}, {}
    for module_name, names in DOCUMENTED.items():
        found[module_name] = {}
        try:
            module = import_module(module_name)
        except ModuleNotFoundError:
            continue
        for name in names or exported(module):
            value = getattr(module, name, None)
            path = seen.setdefault(id(value), f"{module_name}.{name}")
            same = path != f"{module_name}.{name}" and callable(value)
            found[module_name][name] = f"same as {path}" if same else describe(value)
    del found["wsam"]["__version__"]
    return found


def exported(module):
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    public = [n for n in own if not n.startswith("_") and callable(getattr(module, n))]
    return getattr(module, "__all__", public)


def describe(value):
    if inspect.isclass(value):
        return describe_class(value)
    if callable(value):
        return signature(value)
    if isinstance(value, dict):
        return f"dict with keys {', '.join(map(str, value))}"
    return type(value).__name__


def describe_class(kind):
    if issubclass(kind, enum.Enum):
        return {member.name: member.value for member in kind}
    entry = {"__init__": "" if issubclass(kind, BaseException) else signature(kind)}
    if issubclass(kind, wsam.SharpnessAware):
        entry["attributes"] = readable_attributes(kind)
        names = OPTIMIZER_METHODS if kind is wsam.SharpnessAware else ()
    else:
        ours = [c for c in kind.__mro__ if c.__module__.startswith("wsam")]
        names = {n for c in ours for n in vars(c) if not n.startswith("_")} - arguments_of(kind)
    for name in filter(lambda name: hasattr(kind, name), names):
        value = getattr(kind, name)
        entry[name] = signature(value) if callable(value) else "attribute"
    return entry


def arguments_of(kind):
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return fields | {*getattr(kind, "_fields", ())}


def readable_attributes(kind):
    """Return the constructor's arguments and other documented values that an optimizer shows."""
    weights = torch.nn.Parameter(torch.zeros(2))
    own = {"rule": wsam.rule.Perturbed()} if kind is wsam.SharpnessAware else {}
    optimizer = kind(torch.optim.SGD([weights], lr=0.1), **own)
    names = {*OPTIMIZER_ATTRIBUTES, *inspect.signature(kind).parameters}
    return ", ".join(sorted(name for name in names if hasattr(optimizer, name)))


def signature(function):
    found = [
        p.replace(annotation=p.empty, default=plain_default(p.default))
        for p in inspect.signature(function).parameters.values()
    ]
    found.sort(key=lambda p: (p.kind, p.name if p.kind is p.KEYWORD_ONLY else ""))
    return str(inspect.Signature(found))


class Text(str):
    """A string shown without quotes."""

    __repr__ = str.__str__


def plain_default(value):
    """Return a default whose representation does not depend on the machine or on private names."""
    if value is inspect.Parameter.empty or not (callable(value) or " at 0x" in repr(value)):
        return value
    named = inspect.isclass(value)
    return Text(value.__name__ if named else "<function>" if callable(value) else "<factory>")


# The command line -------------------------------------------------------------------------------


def command_line():
    """Return {verb: {option: "type = default"}}."""
    from typer.main import get_command

    from wsam.cli import app

    found = {}

    def walk(words, command):
        if command.params or not hasattr(command, "commands"):
            found[words] = dict(map(describe_option, command.params))
        for name, inner in getattr(command, "commands", {}).items():
            walk(f"{words} {name}", inner)

    walk("wsam", get_command(app))
    return found


def describe_option(parameter):
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.metavar] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    kind = parameter.type_descriptor.annotation
    kind = kind.__name__ if type(kind) is type else str(kind).replace("pathlib.", "")
    limits = parameter.type_descriptor.parameter_info
    for sign, limit in ((">=", limits.min), ("<=", limits.max)):
        kind += f" {sign} {limit}" if limit is not None else ""
    default = parameter.default
    value = str(default) if isinstance(default, Path) else repr(plain_default(default))
    many = ", repeated" if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
    return " / ".join(names), kind + many + (", required" if parameter.required else f" = {value}")


# States, and steps from a saved state -----------------------------------------------------------


def cases():
    """Return {name: (method, base optimizer, arguments)} of the saved optimizer states."""
    from wsam.schedule import Every, InverseSqrt, NormAbove, Warmup

    each = {f"{m} over {b}": (m, b, {}) for m in wsam.METHODS for b in BASE_OPTIMIZERS}
    scheduled = {"rho": Warmup(0.2, 4), "gamma": InverseSqrt(0.9), "when": Every(2)}
    return {
        **each,
        "wsam with schedules": ("wsam", "sgd", scheduled),
        "gsam with rho_min": ("gsam", "sgd", {"rho": 0.2, "rho_min": 0.01}),
        "sam with NormAbove": ("sam", "adamw", {"when": NormAbove(factor=-1.0)}),
    }


def initial_weights():
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4), "1.bias": (2,)}
    random = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()}


def optimizer_of(case, weights):
    """Return an optimizer of a case in `cases` and the parameters it trains."""
    method, base, arguments = cases()[case]
    kind, base_arguments = BASE_OPTIMIZERS[base]
    named = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    if method == "wsam":
        arguments = {"precondition": False, **arguments}  # the only form of version 0.1
    return wsam.create(method, kind(named.values(), **base_arguments), **arguments), named


def make_steps(optimizer, named, first, last):
    """Train a network of two layers in float64; each step has data of its own."""
    for number in range(first, last):
        x = torch.sin(torch.arange(50).double().reshape(10, 5) * (0.7 + 0.31 * number))

        def closure(x=x):
            hidden = torch.tanh(x[:, :3] @ named["0.weight"].T + named["0.bias"])
            errors = hidden @ named["1.weight"].T + named["1.bias"] - x[:, 3:]
            loss = optimizer.select(errors.square().sum(1))
            loss.backward()
            return loss

        optimizer.step(closure)
    return {name: p.detach().clone() for name, p in named.items()}


def state_keys():
    """Return what the state of a method holds beyond that of its base optimizer."""
    found = {}
    for case, (_, base, _) in cases().items():
        optimizer, named = optimizer_of(case, initial_weights())
        make_steps(optimizer, named, 0, 1)
        state, plain = optimizer.state_dict(), optimizer.base.state_dict()
        kind, arguments = BASE_OPTIMIZERS[base]
        torch_keys = kind(named.values(), **arguments).param_groups[0].keys()
        group = state["param_groups"][0]
        assert group.keys() > torch_keys
        assert state["state"].keys() == plain["state"].keys()
        found[case] = {
            "keys": ", ".join(sorted(state)),
            "param_group": types({k: v for k, v in group.items() if k not in torch_keys}),
            "sharpness": types(state["sharpness"]),
            "state of a parameter": types(state["state"][0]),
        }
    return found


def types(value):
    """Return the tree of keys with the types of the leaves; of a list, its first element."""
    if isinstance(value, dict):
        return {k: "str or null" if k in MAY_BE_NULL else types(v) for k, v in value.items()}
    if isinstance(value, list):
        first = types(value[0]) if value else ""
        return f"[{first}]" if isinstance(first, str) else [first]
    return "null" if value is None else type(value).__name__


# Records ----------------------------------------------------------------------------------------


def run_keys():
    """Return the keys that name the records of default runs."""
    by_method = {name: Run(method=name).key for name in ("vanilla", *wsam.METHODS)}
    return {**by_method, **{f"wsam over {base}": Run(base=base).key for base in BASES}}


def lab_run():
    return Run.from_dict(json.loads((V0_1 / "run.json").read_text()))


def resume(out):
    """Finish the run of the saved checkpoint; return its record and the measured minimum."""
    from wsam.lab.execution import ExecutionConfig
    from wsam.lab.train import train
    from wsam.paper.minima import measure

    shutil.copytree(V0_1 / "interrupted", out, dirs_exist_ok=True)
    run, execution = lab_run(), ExecutionConfig(device="cpu", keep_weights=True)
    return train(run, out, execution), measure(run, out, execution)


def record_format(record, minimum):
    # Sessions on other machines or commits are listed under "earlier".
    return {"record": types({**record, "earlier": []}), "minimum": types(minimum)}


# Tests ------------------------------------------------------------------------------------------


def compare(section, found):
    """Fail with a list of what was added, removed or changed since the snapshot."""
    old = flat(json.loads(SNAPSHOT.read_text(encoding="utf-8"))[section])
    new = flat(json.loads(json.dumps(found)))
    lines = [f"removed  {key}: {old[key]}" for key in sorted(old.keys() - new.keys())]
    lines += [f"added    {key}: {new[key]}" for key in sorted(new.keys() - old.keys())]
    for key in sorted(key for key in old.keys() & new.keys() if old[key] != new[key]):
        lines += [f"changed  {key}:", f"    from {old[key]}", f"    to   {new[key]}"]
    if lines:
        pytest.fail("\n".join([f"The public API ({section}) changed:", *lines]), pytrace=False)


def flat(tree, path=""):
    """Return {"a > b": leaf} of nested dictionaries."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    items = tree.items()
    return {k: v for n, t in items for k, v in flat(t, f"{path} > {n}" if path else n).items()}


def test_names_and_signatures():
    compare("python", python_api())


def test_command_line():
    compare("command line", command_line())


def test_state_dict_keys_and_run_keys():
    compare("state_dict", state_keys())
    compare("keys of runs", run_keys())


def test_optimizer_states_of_v0_1_continue_as_before():
    saved = torch.load(V0_1 / "optimizers.pt", weights_only=True)
    assert saved.keys() <= cases().keys()
    for case, (weights, state, expected) in saved.items():
        optimizer, named = optimizer_of(case, weights)
        optimizer.load_state_dict(state)
        found = make_steps(optimizer, named, 3, 5)
        torch.testing.assert_close(
            found, expected, rtol=1e-12, atol=1e-14, msg=lambda m, case=case: f"{case}: {m}"
        )


def test_lab_files_of_v0_1_load_and_an_interrupted_run_ends_in_the_same_record(tmp_path):
    run = lab_run()
    expected = records.read_file(V0_1 / "finished" / f"{run.key}.json")
    found, minimum = resume(tmp_path)
    compare("records", record_format(found, minimum))
    fixed = ("format", "key", "title", "status", "failure", "settings", "data", "parameters")
    for name in (*fixed, "resumed", "execution"):
        assert found[name] == expected[name], name
    assert len(found["curve"]) == len(expected["curve"]) == run.epochs
    for new, old in zip(found["curve"], expected["curve"], strict=True):
        # Another processor rounds differently, which may change the class of a few images.
        for name in new.keys() - {"seconds"}:
            tolerance = {"abs": 2.0} if name.endswith("error") else {"rel": 1e-3}
            assert new[name] == pytest.approx(old[name], **tolerance), name
    _, report = write(V0_1 / "finished", tmp_path / "report.html")
    assert [result.record["key"] for result in report.results] == [run.key]
    assert not report.troubles


def write_snapshot():
    with tempfile.TemporaryDirectory() as out:
        snapshot = {
            "python": python_api(),
            "command line": command_line(),
            "state_dict": state_keys(),
            "keys of runs": run_keys(),
            "records": record_format(*resume(Path(out))),
        }
    SNAPSHOT.write_text(json.dumps(snapshot, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write_snapshot()
