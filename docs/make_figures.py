"""Draw the figures of the documentation into docs/_static, from runs of the optimizers.

python docs/make_figures.py            # all, about five minutes on one core
python docs/make_figures.py weight     # one of: toy, directions, weight, stability, minima,
                                       #         sensitivity, error_over_time, label_noise,
                                       #         over_adamw, demo_errors, demo_landscape
"""

import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.lines import Line2D
from torch import Tensor, nn

from wsam import SAM, WSAM, CoupledWSAM, SharpnessAware
from wsam.lab.records import record_path
from wsam.paper import (
    comparison,
    plot,
    plot_adam,
    plot_eigenvalues,
    plot_noise,
    plot_time,
    registry,
)
from wsam.plot_style import (
    COLORS,
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    RC_PARAMS,
    label_points,
    method_title,
    new_figure,
    set_title,
)
from wsam.plots.directions import directions
from wsam.plots.toy import trajectories
from wsam.theory import effective_weight, parity_gamma
from wsam.toy import FLAT, trace, updates

STATIC = Path(__file__).parent / "_static"
RESULTS = Path(__file__).parents[1] / "results"
DEMO = RESULTS / "demo" / "compare.json"
"""The figures of `make demo`."""


def save(figure, name, description=None, dpi=100):
    path = STATIC / name
    with rc_context(RC_PARAMS):
        # Reproducible files: no date, no version of matplotlib.
        metadata = {"Date": None} if name.endswith("svg") else {"Software": None}
        metadata |= {"Description": description} if description else {}
        figure.savefig(path, dpi=dpi, metadata=metadata)
    print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KB)")


def draw_toy():
    runs = [trace(rule="sam"), trace(rule="gsam")]
    runs += [trace(rule=r, gamma=g) for g in (0.6, 0.95) for r in ("wsam", "coupled_wsam")]
    figure = trajectories(runs)
    with rc_context(RC_PARAMS):
        (only,) = [run.setting for run in runs if run.minimum == FLAT]
        name = method_title(only.rule)
        set_title(figure, f"Only {name} with γ = {only.gamma:g} reaches the flat minimum")
    save(figure, "toy.svg", dpi=110)


def draw_directions():
    save(directions(updates((0.0, 0.3, 0.5, 0.65, 0.75))), "directions.svg")


# ---- effective weight of gamma ----


def drift(make: Callable[[torch.optim.Optimizer], SharpnessAware], momentum: float) -> Tensor:
    """Return one step in units of lr, after momentum has converged.

    The lr is so small that both gradients are constant, so that the step depends only on how the
    optimizer combines them.
    """
    lr, curvature = 1e-9, torch.tensor([1.0, 4.0], dtype=torch.float64)
    w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = make(torch.optim.SGD([w], lr=lr, momentum=momentum))

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (curvature * w.square()).sum()
        loss.backward()
        return loss

    before = w.detach().clone()
    for _ in range(math.ceil(12 / (1 - momentum))):
        before.copy_(w.detach())
        optimizer.step(closure)
    return (before - w.detach()) / lr


def measured_weight(gamma: float, momentum: float) -> float:
    """Return the weight of (g1 - g0) in a step, relative to SAM's, which is 1."""
    base = drift(lambda base: WSAM(base, rho=0.1, gamma=0.0), momentum)
    sam = drift(lambda base: SAM(base, rho=0.1), momentum) - base
    mine = drift(lambda base: WSAM(base, rho=0.1, gamma=gamma), momentum) - base
    return ((mine @ sam) / (sam @ sam)).item()


def draw_weight():
    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 4.2)
        axes = figure.subplots()
        gammas = [i / 200 for i in range(1, 197)]
        places = {0.0: ("sgd", (0.03, 8), "left"), 0.9: ("wsam", (0.99, 0.016), "right")}
        for momentum, (method, place, side) in places.items():
            color = METHOD_STYLES[method].light
            axes.plot(gammas, [effective_weight(g, momentum) for g in gammas], color=color)
            some = [0.2, 0.5, 0.7, 0.8, 0.88, 0.94, 0.97]
            dots = [measured_weight(g, momentum) for g in some]
            axes.plot(some, dots, "o", color=color, markersize=6)
            name = f"momentum {momentum:g}" if momentum else "no momentum"
            name += f":\nSAM's weight at γ = {parity_gamma(momentum):.2f}"
            axes.text(*place, name, color=color, ha=side)
        axes.axhline(1, color=MUTED_COLOR, linewidth=1, linestyle="--")
        axes.text(0.02, 1.12, "SAM", color=MUTED_COLOR)
        axes.set(xlabel="γ", ylabel="weight of sharpness", yscale="log")
        axes.set(xlim=(0, 1), ylim=(0.008, 60))
        axes.yaxis.set_major_formatter("{x:g}")
        note = "WSAM over SGD; lines: k(1 − μ), dots: steps of the optimizer"
        axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
        set_title(figure, "Momentum 0.9 divides WSAM's weight of sharpness by 10")
    save(figure, "weight.svg")


# ---- stability by k * rho ----


def noisy_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits, 1,200 to train on with 40% of labels redrawn, 597 to test on."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=(seed := torch.Generator().manual_seed(0)))
    x = torch.tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits)[order]
    noise = torch.rand(1200, generator=seed) < 0.4
    train = y[:1200].clone()
    train[noise] = torch.randint(0, 10, (int(noise.sum()),), generator=seed)
    return x[:1200], train, x[1200:], y[1200:]


def test_error(make: Callable[..., torch.optim.Optimizer], seed: int) -> float:
    """Return the test error in % of a small perceptron trained on the noisy digits for 30 epochs."""
    x, y, x_test, y_test = noisy_digits()
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()]
    layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = make(base, model=model)
    for _ in range(30):
        for batch in torch.randperm(1200).split(100):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            optimizer.step(closure)
    model.eval()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) != y_test).float().mean().item()


PRODUCTS = tuple(0.1 * 2**i for i in range(9))


def stability_errors() -> tuple[dict[tuple[str, float], list[float]], float]:
    """Return the mean error of two seeds for each form and gamma by k rho, and that of SGD."""
    errors: dict[tuple[str, float], list[float]] = {}
    for rule, name in ((CoupledWSAM, "coupled_wsam"), (WSAM, "wsam")):
        for gamma in (0.8, 0.88, 0.94):
            for product in PRODUCTS:
                make = partial(rule, rho=product * (1 - gamma) / gamma, gamma=gamma)
                error = (test_error(make, 0) + test_error(make, 1)) / 2
                errors.setdefault((name, gamma), []).append(error)
                print(f"{name} gamma {gamma:g} k*rho {product:.1f}: {error:.1f}%", flush=True)
    return errors, (test_error(base_only, 0) + test_error(base_only, 1)) / 2


def plot_stability(errors, base):
    markers = {0.8: "o", 0.88: "s", 0.94: "^"}
    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 4.4)
        axes = figure.subplots()
        for (name, gamma), values in errors.items():
            style = {"marker": markers[gamma], "markersize": 6, "linewidth": 1.5}
            axes.plot(PRODUCTS, values, color=METHOD_STYLES[name].light, **style)
        axes.axhline(base, color=COLORS["sgd"], linestyle="--", linewidth=1.3)
        axes.set(xscale="log", ylabel="test error (%)", ylim=(0, 95))
        axes.set_xlabel("weight of sharpness times radius, k ρ = ρ γ/(1 − γ)")
        axes.text(0.1, base + 1.5, method_title("sgd"), color=COLORS["sgd"])
        for name, at, text in (
            ("coupled_wsam", (1.9, 60), "Coupled-\nWSAM"),
            ("wsam", (11, 18), "WSAM"),
        ):
            axes.text(*at, text, color=METHOD_STYLES[name].light, ha="right")
        axes.set_xticks(PRODUCTS, [f"{p:g}" for p in PRODUCTS])
        axes.minorticks_off()
        axes.grid(axis="y", color=GRID_COLOR)
        handles = [
            Line2D([], [], color=MUTED_COLOR, marker=m, linestyle="", label=f"γ = {gamma:g}")
            for gamma, m in markers.items()
        ]
        axes.legend(handles=handles, loc="upper left", handletextpad=0.2)
        note = "digits with 40% noisy labels, lr 0.05 (not tuned), two seeds"
        axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
        stable = {}  # the largest product with a lower error than SGD for all gammas
        for name in ("coupled_wsam", "wsam"):
            curves = [values for (form, _), values in errors.items() if form == name]
            worst = map(max, zip(*curves, strict=True))
            stable[name] = max(p for p, error in zip(PRODUCTS, worst, strict=True) if error < base)
        ratio = stable["wsam"] / stable["coupled_wsam"]
        set_title(
            figure,
            "The product k ρ decides, not γ alone: WSAM is stable\n"
            f"up to {ratio:.0f} times larger products than Coupled-WSAM",
        )
    save(figure, "stability.svg")


def draw_stability():
    plot_stability(*stability_errors())


def draw_minima():
    """Draw the minima. The file lists its records, so that a test notices missing ones."""
    table = registry.find("minima")
    with rc_context(RC_PARAMS):
        figure = plot_eigenvalues.draw_eigenvalues(comparison.gather(table, RESULTS))
    save(figure, "minima.svg", " ".join(sorted(p.name for p in RESULTS.glob("*.minimum.json"))))


def draw_sensitivity():
    """Draw WSAM's error by gamma, with those of SGD and SAM. The file lists its records."""
    table = registry.find("sensitivity").select("*/ResNet18 CIFAR-10")
    others = registry.find("cifar").select("ResNet18/S*/CIFAR-10")
    entries = comparison.gather(table, RESULTS)
    with rc_context(RC_PARAMS):
        figure = plot.draw(table, entries)
        axes = figure.axes[0]
        axes.set_title("ResNet18, CIFAR-10", loc="left", fontsize=10, color=MUTED_COLOR)
        axes.set(xlabel="γ", ylim=(3.4, 4.7))
        labels, end = [], axes.get_xlim()[1]
        for entry in comparison.gather(others, RESULTS):
            ours, color = entry.ours, METHOD_STYLES[entry.cell.runs[0].method].light
            axes.axhline(ours.mean, color=color, linestyle="--", linewidth=1.3)
            name = method_title(entry.cell.runs[0].method)
            labels.append((end, ours.mean, f"{name} {ours.mean:.2f}\n(n = {ours.n})", color))
        known = sorted((e.ours.mean, e.cell.row[0]) for e in entries if e.ours.n)
        (_, best), *_, (_, worst) = known
        set_title(figure, f"WSAM's error is lowest at γ = {best} and highest at {worst}")
        label_points(axes, labels)
    shown = {record_path(RESULTS, run) for run in (*table.runs, *others.runs)}
    save(figure, "sensitivity.svg", " ".join(sorted(p.name for p in shown if p.exists())))


def draw_error_over_time():
    """Draw the error of each method over its training time. The file lists its records."""
    results = plot_time.read_times(RESULTS)
    with rc_context(RC_PARAMS):
        figure = plot_time.draw_times(results)
    save(figure, "error_over_time.svg", " ".join(sorted(k for r in results for k in r.keys)))


def draw_label_noise():
    """Draw the accuracy of each method over label noise. The file lists its records."""
    results = plot_noise.read_noise(RESULTS)
    with rc_context(RC_PARAMS):
        figure = plot_noise.draw_noise(results)
    save(figure, "label_noise.svg", " ".join(sorted(k for r in results for k in r.keys)))


def draw_over_adamw():
    """Draw the test loss of a GPT during training. The file lists its records."""
    curves = plot_adam.read_curves(RESULTS)
    with rc_context(RC_PARAMS):
        figure = plot_adam.draw_curves(curves)
    save(figure, "over_adamw.svg", " ".join(sorted(key for one in curves for key in one.keys)))


def read_demo():
    """Return the figures of the demonstration, the rows by method, and the keys of its runs."""
    record = json.loads(DEMO.read_text())
    rows = {"vanilla" if name == "base" else name: row for name, row in record["methods"].items()}
    return record, rows, " ".join(key for row in rows.values() for key in row["keys"])


def is_better(row):
    """Return whether a method has a significantly lower error than SGD, corrected by Holm."""
    better = row.get("improvement")
    return bool(better and better["p_holm"] < 0.05 and better["mean"] > 0)


def draw_demo_errors():
    """Draw the test error of each method in the demonstration with its confidence interval."""
    record, rows, keys = read_demo()
    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 2.8)
        axes = figure.subplots()
        for at, (method, row) in enumerate(rows.items()):
            color, values = METHOD_STYLES[method].light, list(row["values"].values())
            axes.plot(values, [at] * len(values), "o", color=color, alpha=0.35, markersize=4)
            bar = {"xerr": row["interval"], "capsize": 4, "markersize": 8}
            axes.errorbar(row["mean"], at, fmt="o", color=color, **bar)
            text = f"{row['mean']:.1f} ± {row['interval']:.1f}"
            axes.annotate(text, (row["mean"], at), (0, 9), textcoords="offset points", ha="center")
        axes.set(xlim=(0, None), ylim=(len(rows) - 0.5, -0.7), xlabel="test error (%)")
        axes.set_yticks(range(len(rows)), [row["title"] for row in rows.values()])
        axes.grid(axis="x", color=GRID_COLOR)
        axes.tick_params(axis="y", length=0)
        note = f"mean of {len(record['seeds'])} seeds with its 95% confidence interval"
        axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
        lower = [row["title"] for row in rows.values() if is_better(row)]
        verb = "lower" if len(lower) > 1 else "lowers"
        message = f"{' and '.join(lower)} {verb} the error of tuned SGD"
        set_title(figure, f"{message}\nat equal passes")
    save(figure, "demo_errors.svg", keys)


def draw_demo_landscape():
    """Draw the training loss around the weights of the demonstration."""
    record, rows, keys = read_demo()
    distances = record["slice"]["distances"]
    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 4.0)
        axes = figure.subplots()
        labels = []
        for method, row in rows.items():
            color, losses = METHOD_STYLES[method].light, list(zip(*row["slices"], strict=True))
            means, spread = (list(map(f, losses)) for f in (statistics.fmean, statistics.stdev))
            axes.plot(distances, means, linewidth=1.8, color=color)
            low = [mean - std for mean, std in zip(means, spread, strict=True)]
            high = [mean + std for mean, std in zip(means, spread, strict=True)]
            axes.fill_between(distances, low, high, color=color, alpha=0.15, linewidth=0)
            labels.append((distances[-1], means[-1], row["title"], color))
        axes.set(xlabel="distance along a random direction", ylabel="training loss", xlim=(-1, 1))
        axes.grid(axis="y", color=GRID_COLOR)
        axes.locator_params(axis="x", nbins=5)
        note = f"direction with the norms of the filters; {len(record['seeds'])} seeds"
        axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
        set_title(
            figure,
            "Along a random direction, the loss rises\nless around the weights of SAM and WSAM",
        )
        label_points(axes, labels)
    save(figure, "demo_landscape.svg", keys)


def base_only(base, **_):
    return base


if __name__ == "__main__":
    STATIC.mkdir(exist_ok=True)
    drawings = {"toy": draw_toy, "directions": draw_directions}
    drawings |= {"weight": draw_weight, "stability": draw_stability, "minima": draw_minima}
    drawings |= {"sensitivity": draw_sensitivity}
    drawings |= {"error_over_time": draw_error_over_time, "label_noise": draw_label_noise}
    drawings |= {"over_adamw": draw_over_adamw}
    drawings |= {"demo_errors": draw_demo_errors, "demo_landscape": draw_demo_landscape}
    for wanted in sys.argv[1:] or list(drawings):
        if wanted not in drawings:
            sys.exit(f"there is no figure {wanted!r}: choose from {', '.join(drawings)}")
        drawings[wanted]()
