"""Short runs of the lab, and a watcher that ends them."""

from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.watch import Watcher

CPU = Means(device="cpu", checkpoint_seconds=0)
SHORT = Run(method="wsam", epochs=3, train_limit=300, test_limit=100, batch_size=64)


class Stop(Exception):
    """Stands for anything that ends a process."""


class StopAfter(Watcher):
    def __init__(self, epochs=None, steps=None):
        self.epochs, self.steps, self.said = epochs, steps, []
        self.closed = False

    def epoch(self, row):
        if row["epoch"] == self.epochs:
            raise Stop

    def step(self, row):
        if self.steps is not None:
            self.steps -= 1
            if self.steps == 0:
                raise Stop

    def say(self, message):
        self.said.append(message)

    def close(self):
        self.closed = True


def curve(record):
    """Return the curve without what is timing."""
    return [{n: v for n, v in row.items() if n != "seconds"} for row in record["curve"]]
