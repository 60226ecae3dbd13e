"""Every command that the README shows is one that the programs accept."""

import re
import shlex
from pathlib import Path

import pytest

from ddtree_jax.commands import bench, decode, train

ROOT = Path(__file__).parents[1]
CARD = "ddtree_jax/bundled/smollm2-135m-instruct-dflash/README.md"
PARSERS = {
    "scripts/decode.py": decode._parser,
    "scripts/bench.py": bench._parser,
    "scripts/train_drafter.py": train._parser,
}


def commands():
    for page in ("README.md", CARD, "docs/multi-gpu.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"^([A-Z_]+=\S+ )+", "", line)  # the environment
                if line.startswith((".venv/bin/", "make ")):
                    yield shlex.split(line, comments=True)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_command(words):
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE)
    elif words[1] in PARSERS:
        PARSERS[words[1]]().parse_args(words[2:])
        assert (ROOT / words[1]).exists()
    elif words[1:3] == ["-m", "convert"]:
        from convert.__main__ import _parser

        name = words[3] if words[3] in ("inspect", "check", "doctor") else "convert"
        _parser(name).parse_args(words[3 if name == "convert" else 4 :])
    else:
        assert words[0] == ".venv/bin/pip" or words[1:3] == ["-m", "ddtree_jax.training.prompts"]


def test_there_are_commands():
    assert sum(1 for _ in commands()) >= 8
