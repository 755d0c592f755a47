"""Does a sharpness-aware method help on this problem? A comparison at equal effort.

`Request` describes a comparison, `Comparison` runs it on an executor of `wsam.sweep`, and
`summarize` returns its figures. The phases:

1. Short timing runs measure what an epoch of each method costs.
2. A search trains every method at the same number of settings and chooses by the validation figure.
3. The chosen settings are trained with several seeds.

In trials and final runs, each method gets as many epochs as fit into the training time of the base,
or into its number of passes.
"""

from wsam.compare.contenders import BASE, CHEAP
from wsam.compare.formatting import parse_budget
from wsam.compare.request import Request
from wsam.compare.runner import Comparison
from wsam.compare.summary import Summary, summarize

__all__ = ["BASE", "CHEAP", "Comparison", "Request", "Summary", "parse_budget", "summarize"]
