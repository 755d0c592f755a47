"""Run a program, started by torchrun, and end without the interpreter's clean-up.

Arguments: the program and its arguments. Gloo's worker threads may still release tensors while the
interpreter exits, which then aborts the process (https://github.com/pytorch/pytorch/issues/190489).
"""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
