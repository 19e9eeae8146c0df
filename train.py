"""accelerate launch train.py --config FILE [key.path=value ...]"""

import sys

from flowalign.system.exit import leaving, run

if __name__ == "__main__":
    sys.exit(leaving(run("train", "flowalign.commands.train:main", sys.argv[1:])))
