"""The demonstration: a comparison of SGD, SAM and WSAM on digits with wrong labels.

It is `wsam.compare` with a preset request, and some words on the page.
"""

from wsam.demo.preset import SEEDS, demo_request

__all__ = ["SEEDS", "demo_request"]
