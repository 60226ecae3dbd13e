"""Decode prompts with a target and its drafter: `python scripts/decode.py --help`."""

import sys

from ddtree_jax.commands.decode import main

if __name__ == "__main__":
    sys.exit(main())
