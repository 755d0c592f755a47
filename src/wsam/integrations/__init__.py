"""Other people's training loops: `lightning`, `transformers` and `accelerate`.

Each is a module of its own; none is imported here, and importing one needs nothing but torch: the
framework itself is looked for when it is used. What they have in common is in `window`.
"""

from wsam.integrations.window import Window, unwrap

__all__ = ["Window", "unwrap"]
