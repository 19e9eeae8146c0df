"""`python -m flowalign.eval ...` is `flowalign eval ...`, for `accelerate launch -m`."""

import sys

from flowalign.system.exit import end_process, run_command

if __name__ == "__main__":
    end_process(run_command("eval", sys.argv[1:], "flowalign.commands.evaluate:main"))
