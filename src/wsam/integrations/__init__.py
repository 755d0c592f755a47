"""Integrations with training frameworks: `lightning`, `transformers` and `accelerate`.

Importing one of these modules requires only torch. The framework is imported on first use.
"""

from wsam.integrations.microbatch_replay import MicrobatchReplay, unwrap

__all__ = ["MicrobatchReplay", "unwrap"]
