"""accelerate launch train.py --config FILE [key.path=value ...]"""

import sys

from flowalign.entry import leaving, run

if __name__ == "__main__":
    sys.exit(leaving(run("train", "flowalign.train:main", sys.argv[1:])))
