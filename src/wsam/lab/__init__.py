"""Reproducible training runs.

`run.Run` describes what to train, `execution.ExecutionConfig` how to execute it, `train.train`
trains it and `records` reads and writes the results.
"""
