"""`python -m flowalign.eval --config FILE [key.path=value ...]`."""

import sys

from flowalign.eval.run import main

if __name__ == "__main__":
    sys.exit(main())
