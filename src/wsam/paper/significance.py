"""Welch's t-test between the methods of a table, or the points of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from wsam._utils.significance import welch_interval, welch_p
from wsam.paper.comparison import Entry
from wsam.paper.render import markdown_table, no_break
from wsam.paper.table import ABSENT, Kind, Table


@dataclass(frozen=True)
class WelchTest:
    """Two-sided test whether two methods have the same mean, without assuming equal variances.

    Attributes:
        setting: What both have in common, such as ``ResNet18, CIFAR-10``.
        methods: Labels of both methods, or in a search those of the setting that differs.
        n: Number of runs of each.
        p_last: p-value at the last epoch.
        p_best: p-value at the best epoch; None if the table does not show it.
        difference: Mean of the second method less that of the first, at the last epoch.
        interval: Its 95% confidence interval; None without a test.
        decimals: Of the measure.
    """

    setting: str
    methods: tuple[str, str]
    n: tuple[int, int]
    p_last: float | None
    p_best: float | None = None
    difference: float = 0.0
    interval: tuple[float, float] | None = None
    decimals: int = 2


def welch_tests(table: Table, entries: Sequence[Entry]) -> list[WelchTest]:
    """Test every pair of methods in the same setting; n = 1 has no test.

    In a search every pair of rows is tested that differ in one setting. A setting that a method does
    not have makes no difference.

    Args:
        table: The table. If it has baselines, only pairs with one of them are tested.
        entries: Our results.
    """
    tests = []
    for first, second in combinations(entries, 2):
        place = _place_of_difference(table, first, second)
        if place is None or min(first.ours.n, second.ours.n) < 2:
            continue
        pair = first.cell.row[place], second.cell.row[place]
        if table.baselines and not {*pair} & {*table.baselines}:
            continue
        if first.cell.measure.is_cost:
            continue
        p_best = None
        if first.best and second.best:
            p_best = welch_p(first.best.ours.values, second.best.ours.values)
        head = table.heads[place]
        tests.append(
            WelchTest(
                _setting(table, first, second, place),
                (_named(head, pair[0]), _named(head, pair[1])),
                (first.ours.n, second.ours.n),
                welch_p(first.ours.values, second.ours.values),
                p_best,
                (second.ours.mean or 0.0) - (first.ours.mean or 0.0),
                welch_interval(first.ours.values, second.ours.values),
                first.cell.measure.decimals,
            )
        )
    return tests


def _place_of_difference(table: Table, first: Entry, second: Entry) -> int | None:
    """Return the position of the only label in which two rows differ; None if they are not compared."""
    if first.cell.column != second.cell.column:
        return None
    pairs = enumerate(zip(first.cell.row, second.cell.row, strict=True))
    places = [place for place, (a, b) in pairs if a != b and ABSENT not in (a, b)]
    last = len(table.heads) - 1
    if len(places) != 1 or (table.kind is not Kind.SEARCH and places != [last]):
        return None
    return places[0]


def _setting(table: Table, first: Entry, second: Entry, place: int) -> str:
    """Return what two rows that differ at a place have in common."""
    rows = zip(first.cell.row, second.cell.row, strict=True)
    common = [b if a == ABSENT else a for a, b in rows]
    named = [_named(head, label) for head, label in zip(table.heads, common, strict=True)]
    texts = [text for n, text in enumerate(named) if n != place and common[n] != ABSENT]
    return ", ".join((*texts, first.cell.column))


def _named(head: str, label: str) -> str:
    """Return a label, preceded by its header if it is a number."""
    try:
        float(label)
    except ValueError:
        return label
    return f"{head} {label}"


def as_dicts(table: Table, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one dictionary per test, for JSON."""
    return [asdict(test) for test in welch_tests(table, entries)]


def markdown(table: Table, entries: Sequence[Entry]) -> str:
    """Return the p-values of all pairs as a Markdown table."""
    tests = welch_tests(table, entries)
    compared = "rows that differ in one setting" if table.kind is Kind.SEARCH else "methods"
    lines = [f"Welch's t-test between {compared}. {table.title}:", ""]
    if tests:
        with_best = any(test.p_best is not None for test in tests)
        first = "value" if table.kind is Kind.SEARCH else "method"
        heads = ["setting", first, "compared with", "n", "difference, 95% interval", "p"]
        heads += ["p, best epoch"] * with_best
        rows = []
        for test in tests:
            p_values = [test.p_last, test.p_best][: 1 + with_best]
            texts = ["" if p is None else f"{p:.2g}" for p in p_values]
            other, method = test.methods
            middle = [_sizes(test.n), no_break(_difference(test))]
            rows.append([test.setting, method, other, *middle, *texts])
        lines += [*markdown_table(heads, rows), ""]
        lines += [
            "- Means at the last epoch; p is two-sided and not corrected for multiple comparisons."
        ]
    single = [e for e in entries if e.ours.n == 1 and not e.cell.measure.is_cost]
    if single:
        names = "; ".join(entry.cell.name for entry in single)
        lines.append(f"- No test, because n = 1: {names}.")
    if not tests and not single:
        lines.append("- No two methods have been run.")
    return "\n".join(lines) + "\n"


def _difference(test: WelchTest) -> str:
    """Return ``-0.12 (-0.36 to +0.11)``."""
    texts = [f"{x:+.{test.decimals}f}" for x in (test.difference, *(test.interval or ()))]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" if test.interval else texts[0]


def _sizes(n: tuple[int, int]) -> str:
    return str(n[0]) if n[0] == n[1] else f"{n[0]} and {n[1]}"
