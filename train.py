"""accelerate launch train.py --config FILE [key.path=value ...]"""

import sys

from flowalign.entry import run

if __name__ == "__main__":
    sys.exit(run("train", "flowalign.train:main", sys.argv[1:]))
