"""Names of runs that are shown together."""

import pytest

from wsam.lab.run import Run
from wsam.lab.titles import experiment_title, group_names, run_titles


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([Run(method="sam")], ["SAM ρ 0.05"]),
        (
            [Run(method="sam"), Run(method="sam", base_args={"lr": 0.1})],
            ["SAM ρ 0.05, lr 0.05", "SAM ρ 0.05, lr 0.1"],
        ),
        (
            [Run(method="vanilla"), Run(method="vanilla", base="rmsprop"), Run(base="adamw")],
            ["SGD lr 0.05", "RMSprop lr 0.01", "WSAM (AdamW) γ 0.9, ρ 0.05, lr 0.001"],
        ),
        (
            [Run(), Run(options={"every": 5}), Run(options={"every": 5, "reuse": True})],
            [
                "WSAM γ 0.9, ρ 0.05",
                "WSAM γ 0.9, ρ 0.05, every 5",
                "WSAM reuse γ 0.9, ρ 0.05, every 5",
            ],
        ),
        (
            [Run(method="sam"), Run(method="sam", augment=False, validation=0.1)],
            ["SAM ρ 0.05, augment", "SAM ρ 0.05, validation 0.1, validation seed 0, no augment"],
        ),
        (
            [Run(method="gsam"), Run(method="asam", hyper={"weights_only": True})],
            ["GSAM α 0.1, ρ 0.05", "ASAM η 0.01, ρ 0.5, weights only"],
        ),
    ],
)
def test_names_contain_what_differs(runs, names):
    found = [sorted(name.replace(",", "").split()) for name in group_names(runs)]
    assert found == [sorted(name.replace(",", "").split()) for name in names]


def test_targets_of_a_table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,2,3\n")
    first, second = (Run(data=f"table:{path}", target=t, method="sam") for t in "bc")
    assert first.title == f"table:{path} target=b mlp sam rho=0.05 seed=0"
    assert experiment_title(first) == f"table:{path}, target b, mlp"
    assert list(run_titles([first, second]).values()) == [
        "target b SAM ρ 0.05",
        "target c SAM ρ 0.05",
    ]
    assert list(run_titles([first]).values()) == ["SAM ρ 0.05"]


def test_titles_of_one_folder_are_unique_and_have_no_keys(tmp_path):
    net = tmp_path / "net.py"
    net.write_text("def net(): ...")
    old = Run(model=f"{net}:net")
    net.write_text("def net(): return 1")
    runs = [
        *(Run(method=method, seed=seed) for method in ("sam", "wsam") for seed in (0, 1)),
        Run(data="cifar10", model="resnet18"),
        Run(noise=0.4),
        Run(noise=0.4, noise_seed=3),
        Run(batch_size=64),
        Run(train_limit=100),
        Run(base="adam", base_args={"betas": (0.8, 0.9)}),
        Run(base="adam"),
        old,
        Run(model=f"{net}:net"),
    ]
    titles = run_titles(runs)
    assert len(set(titles.values())) == len(titles) == len(runs)
    for run in runs:
        title = titles[run.key]
        assert run.key not in title
        assert not any(digest in title for digest in run.digests.values())
    assert titles[runs[0].key] == "digits cnn SAM (SGD) ρ 0.05, batch 128, lr 0.05, noise 0, seed 0"
    assert titles[runs[4].key].startswith("cifar10 resnet18 WSAM (SGD) γ 0.9")


def test_data_model_and_seed_are_named_only_if_they_differ():
    runs = [Run(method="sam", base_args={"lr": lr}) for lr in (0.1, 0.2)]
    assert list(run_titles(runs).values()) == ["SAM ρ 0.05, lr 0.1", "SAM ρ 0.05, lr 0.2"]


def test_numbers_are_short_unless_that_makes_names_equal():
    rates = [1 / 3, 2 / 3]
    runs = [Run(method="sam", base_args={"lr": lr}) for lr in rates]
    assert group_names(runs) == ["SAM ρ 0.05, lr 0.3333", "SAM ρ 0.05, lr 0.6667"]
    close = [Run(method="sam", base_args={"lr": lr}) for lr in (0.1, 0.1000001)]
    assert group_names(close) == ["SAM ρ 0.05, lr 0.1", "SAM ρ 0.05, lr 0.1000001"]
