"""`python -m flowalign.eval ...` is `flowalign eval ...`, for `accelerate launch -m`."""

import sys

from flowalign.system.exit import end_process, run

if __name__ == "__main__":
    end_process(run("eval", sys.argv[1:], "flowalign.commands.evaluate:main"))
