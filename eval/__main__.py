"""`python -m flowalign.eval --config FILE [key.path=value ...]`."""

import sys

from flowalign.system.exit import end_process, run

if __name__ == "__main__":
    end_process(run("eval", "flowalign.eval.run:main", sys.argv[1:]))
