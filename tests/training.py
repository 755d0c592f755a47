"""Short runs of the lab, and a callback that stops them."""

from wsam.lab.callbacks import Callback
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run

CPU = ExecutionConfig(device="cpu", checkpoint_seconds=0)
SHORT = Run(method="wsam", epochs=3, train_limit=300, test_limit=100, batch_size=64)


class Stop(Exception):
    """Simulates anything that ends a process."""


class StopAfter(Callback):
    """Raises `Stop` after an epoch or after a number of steps; collects messages."""

    def __init__(self, epochs=None, steps=None):
        self.epochs, self.steps, self.messages = epochs, steps, []
        self.ended = False

    def on_epoch_end(self, metrics):
        if metrics["epoch"] == self.epochs:
            raise Stop

    def on_step_end(self, metrics):
        if self.steps is not None:
            self.steps -= 1
            if self.steps == 0:
                raise Stop

    def on_message(self, message):
        self.messages.append(message)

    def on_train_end(self):
        self.ended = True


def curve(record):
    """Return the curve of a record without timings."""
    return [{n: v for n, v in row.items() if n != "seconds"} for row in record["curve"]]
