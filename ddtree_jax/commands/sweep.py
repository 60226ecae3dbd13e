"""Many tree sizes in one run: ranges on the command line, and where a round grows too much."""

import collections
import itertools
import re
from typing import Any

from ddtree_jax.errors import InputError

TILES = (8, 16, 64)  # nodes
MOST = 4096  # numbers of a flag
LIMIT = 0.15  # growth from one tree size to the next that is worth a word


def number_list(flag: str, text: str) -> list[int]:
    """The numbers of a flag: 15, or 15,63, or 1-127 (in steps: 1-128:8), in any mixture."""
    numbers: list[int] = []
    for part in text.split(","):
        number = r"(\d{1,18})"
        pattern = rf"{number}(?:-{number}(?::{number})?)?"
        match = re.fullmatch(pattern, part.strip(), flags=re.ASCII)
        if match is None:
            raise InputError(f"{flag} is {text!r}; expected numbers as in 15,63 or 1-128:8")
        first, last, step = (None if x is None else int(x) for x in match.groups())
        assert first is not None
        if first < 1 or step == 0 or (last is not None and last < first):
            raise InputError(
                f"{flag} holds {part.strip()}; expected at least 1, and a rising range"
            )
        some = range(first, (last or first) + 1, step or 1)  # of at most 18 digits, for len
        if len(some) > MOST:
            raise InputError(f"{flag} holds {part.strip()}; expected up to {MOST} numbers")
        numbers += some
    return list(dict.fromkeys(numbers))


def jumps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a greedy tree round grows by more than LIMIT from one tree size to the next.

    Tile edges are the largest of 8, 16 and 64 nodes of which the larger tree needs one more.
    """
    found = []
    by_context: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        if row["label"] == f"ddtree {row['tree_budget']}":
            by_context[row["context"]].append(row)
    for context, group in by_context.items():
        group = sorted(group, key=lambda row: row["tree_budget"])
        for small, large in itertools.pairwise(group):
            growth = large["median_ms"] / small["median_ms"] - 1
            nodes = small["tree_budget"] + 1, large["tree_budget"] + 1
            tiles = [tile for tile in TILES if -(-nodes[0] // tile) < -(-nodes[1] // tile)]
            if growth > LIMIT:
                found.append(
                    {
                        "context": context,
                        "nodes": list(nodes),
                        "growth_percent": 100 * growth,
                        "tile_edge": max(tiles, default=None),
                    }
                )
    return found


def jump_lines(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return ["No tree size's round is more than 15 % longer than that of the size before it."]
    lines = ["Rounds more than 15 % longer than that of the size before:"]
    for jump in found:
        small, large = jump["nodes"]
        edge = "no tile edge" if jump["tile_edge"] is None else f"edge of {jump['tile_edge']}"
        lines.append(
            f"  {small} to {large} nodes, context {jump['context']}: "
            f"+{jump['growth_percent']:.0f} % ({edge})"
        )
    return lines
