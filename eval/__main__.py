"""`python -m flowalign.eval --config FILE [key.path=value ...]`."""

import sys

from flowalign.system.exit import leaving, run

if __name__ == "__main__":
    sys.exit(leaving(run("eval", "flowalign.eval.run:main", sys.argv[1:])))
