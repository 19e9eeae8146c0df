"""accelerate launch train.py --config FILE [key.path=value ...]"""

import sys

from flowalign.system.exit import end_process, run_command

if __name__ == "__main__":
    end_process(run_command("train", sys.argv[1:], "flowalign.commands.train:main"))
