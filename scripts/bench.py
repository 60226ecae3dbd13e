"""Measure a pair of models: `python scripts/bench.py --help`."""

import sys

from ddtree_jax.commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
