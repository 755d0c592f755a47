"""A results folder with finished, failed, unfinished and damaged runs, for tests of reports."""

import json
from pathlib import Path

import pytest

from wsam.lab import records
from wsam.lab.callbacks import Callback
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.paper import minima

CPU = ExecutionConfig(device="cpu", keep_weights=True)
SMALL = {"model": "mlp", "train_limit": 128, "test_limit": 64, "batch_size": 32, "epochs": 3}
METHODS = {"vanilla": {}, "sam": {"rho": 0.1}, "wsam": {"rho": 0.1, "gamma": 0.8}}
HOSTILE = "folder:<script>alert(1)</script><img src=x onerror=alert(2)>"
RESULTS = Path(__file__).parents[1] / "results"


class StopAfter(Callback):
    """Interrupt training like Ctrl-C, before the second checkpoint."""

    def on_epoch_end(self, metrics):
        if metrics["epoch"] == 2:
            raise KeyboardInterrupt


def small(method="vanilla", **changes):
    return Run(**(SMALL | {"method": method, "hyper": METHODS[method]} | changes))


def make_folder(root):
    """Fill a folder whose name needs escaping; return it."""
    out = root / "my <b>results</b>"
    for method in METHODS:
        for seed in (0, 1):
            train(small(method, seed=seed), out, CPU)
    minima.measure(small("wsam"), out, CPU)
    broken = train(small(base_args={"lr": 1e12}), out, CPU)
    assert broken["status"] == "failed"
    often = ExecutionConfig(device="cpu", checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        train(small("sam", seed=9), out, often, [StopAfter()])
    record = records.read(out, small("sam"))
    foreign = small("sam", data=HOSTILE)
    changed = {**record, "key": foreign.key, "settings": foreign.to_dict(), "title": foreign.title}
    changed["hardware"] = {"cpu": "<script>alert(3)</script>"}
    changed["commit"] = "<img src=x onerror=alert(4)>"
    records.write(out, foreign, changed)
    (out / "0123456789ab.json").write_text('{"key": "<script>')
    (out / "ba9876543210.json").write_text(json.dumps({**record, "settings": {"method": HOSTILE}}))
    (out / f"{small('sam').key}.minimum.json").write_text("{}")
    return out
