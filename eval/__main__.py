"""`python -m flowalign.eval --config FILE [key.path=value ...]`."""

import sys

from flowalign.entry import run

if __name__ == "__main__":
    sys.exit(run("eval", "flowalign.eval.run:main", sys.argv[1:]))
