"""Data sets, and the data of a run as batches on the training device."""
