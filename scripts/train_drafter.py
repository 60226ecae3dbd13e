"""Train a DFlash drafter for a target: `python scripts/train_drafter.py --help`."""

import sys

from ddtree_jax.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
