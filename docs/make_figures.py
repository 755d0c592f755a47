"""Draw the figures of the documentation into docs/_static; their code is in docs/figures.

python docs/make_figures.py            # all, about five minutes on one core
python docs/make_figures.py weight     # one of: toy, directions, weight, stability, minima,
                                       #         sensitivity, error_over_time, label_noise,
                                       #         over_adamw, demo_errors, demo_landscape

The file of a figure of records lists them in its description, so that a test notices missing ones.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import (
    demo,
    error_over_time,
    label_noise,
    minima,
    over_adamw,
    sensitivity,
    stability,
    weight,
)
from matplotlib import rc_context
from matplotlib.figure import Figure

from wsam._utils.plot_style import RC_PARAMS, method_title, set_title
from wsam.paper import find, gather
from wsam.toy import FLAT, trace, updates
from wsam.toy.plot_trajectories import plot_trajectories
from wsam.toy.plot_updates import plot_updates

STATIC = Path(__file__).parent / "_static"
RESULTS = Path(__file__).parents[1] / "results"
DEMO = RESULTS / "demo" / "compare.json"
"""The record of `make demo`."""

Drawing = tuple[Figure, Sequence[str]]
"""A figure, and the names of its records."""


def draw_toy() -> Drawing:
    runs = [trace(rule="sam"), trace(rule="gsam")]
    runs += [trace(rule=r, gamma=g) for g in (0.6, 0.95) for r in ("wsam", "coupled_wsam")]
    figure = plot_trajectories(runs)
    (only,) = [run.setting for run in runs if run.minimum == FLAT]
    name = method_title(only.rule)
    set_title(figure, f"Only {name} with γ = {only.gamma:g} reaches the flat minimum")
    return figure, ()


def draw_directions() -> Drawing:
    return plot_updates(updates((0.0, 0.3, 0.5, 0.65, 0.75))), ()


def draw_weight() -> Drawing:
    return weight.draw_weight(), ()


def draw_stability() -> Drawing:
    return stability.draw_stability(*stability.stability_errors()), ()


def draw_minima() -> Drawing:
    figure = minima.draw_eigenvalues(gather(find("minima"), RESULTS))
    return figure, sorted(path.name for path in RESULTS.glob("*.minimum.json"))


def draw_sensitivity() -> Drawing:
    return sensitivity.draw_sensitivity(RESULTS), sorted(sensitivity.record_names(RESULTS))


def draw_error_over_time() -> Drawing:
    results = error_over_time.read_times(RESULTS)
    return error_over_time.draw_times(results), sorted(key for one in results for key in one.keys)


def draw_label_noise() -> Drawing:
    results = label_noise.read_noise(RESULTS)
    return label_noise.draw_noise(results), sorted(key for one in results for key in one.keys)


def draw_over_adamw() -> Drawing:
    curves = over_adamw.read_curves(RESULTS)
    return over_adamw.draw_curves(curves), sorted(key for one in curves for key in one.keys)


def draw_demo_errors() -> Drawing:
    record = json.loads(DEMO.read_text())
    return demo.draw_errors(record), demo.run_keys(record)


def draw_demo_landscape() -> Drawing:
    record = json.loads(DEMO.read_text())
    return demo.draw_landscape(record), demo.run_keys(record)


FIGURES = {
    "toy": draw_toy,
    "directions": draw_directions,
    "weight": draw_weight,
    "stability": draw_stability,
    "minima": draw_minima,
    "sensitivity": draw_sensitivity,
    "error_over_time": draw_error_over_time,
    "label_noise": draw_label_noise,
    "over_adamw": draw_over_adamw,
    "demo_errors": draw_demo_errors,
    "demo_landscape": draw_demo_landscape,
}


def main() -> None:
    STATIC.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        if name not in FIGURES:
            sys.exit(f"there is no figure {name!r}: choose from {', '.join(FIGURES)}")
        path = STATIC / f"{name}.svg"
        with rc_context(RC_PARAMS):
            figure, shown = FIGURES[name]()
            # Without a date, so that the file is reproducible.
            description = {"Description": " ".join(shown)} if shown else {}
            figure.savefig(path, dpi=110, metadata={"Date": None} | description)
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KB)")


if __name__ == "__main__":
    main()
