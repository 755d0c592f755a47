"""The lab: one run from data to record.

`run.Run` says what to train, `train.train` trains it, `records` holds what came of it.
"""
