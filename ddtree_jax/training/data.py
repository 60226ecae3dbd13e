"""Training data: answers by the target itself, stored flat and packed into rows of documents."""

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ddtree_jax.engine import Engine, Generation, Options
from ddtree_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Documents:
    """Token sequences, one after another.

    tokens: int32, flat. starts: int64 [documents + 1], where each begins. answers: int32
    [documents], the offset in each document at which the target's answer begins.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - int(self.answers.sum())

    @staticmethod
    def of(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> "Documents":
        """From (prompt ids, answer ids) pairs."""
        pairs = list(pairs)
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        flat = [token for prompt, answer in pairs for part in (prompt, answer) for token in part]
        return Documents(
            np.array(flat, np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([len(prompt) for prompt, _ in pairs], np.int32),
        )

    def select(self, chosen: np.ndarray) -> "Documents":
        """The documents where `chosen` [documents] is true."""
        lengths = np.diff(self.starts)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
        return Documents(self.tokens[np.repeat(chosen, lengths)], starts, self.answers[chosen])

    def save(self, path: Path) -> None:
        """Writes an .npz; a partial file never carries the final name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".npz")
        os.close(handle)
        try:
            np.savez(temporary, tokens=self.tokens, starts=self.starts, answers=self.answers)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def load(paths: Iterable[Path]) -> "Documents":
        """One or more .npz files as one collection."""
        parts = []
        for path in paths:
            with np.load(path) as stored:
                parts.append(Documents(stored["tokens"], stored["starts"], stored["answers"]))
        if not parts:
            raise InputError("no training data: run the 'generate' step first")
        offsets = np.cumsum([0] + [len(part.tokens) for part in parts])
        starts = [part.starts[:-1] + base for part, base in zip(parts, offsets, strict=False)]
        return Documents(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([*starts, offsets[-1:]]).astype(np.int64),
            np.concatenate([part.answers for part in parts]),
        )


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    seed: int,
    max_new_tokens: int,
) -> Iterator[Generation]:
    """The target's own answers, in the order in which they finish; every prompt its own noise."""
    options = [
        Options(
            mode="ar",
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=(seed * 1_000_003 + index) % 2**32,
        )
        for index, temperature in enumerate(temperatures)
    ]
    for event, generation in engine.run(prompts, options):
        if event.done:
            yield generation


@dataclasses.dataclass(frozen=True)
class Rows:
    """Documents packed into rows of one length, for `loss.block_loss`; arrays are [rows, length].

    tokens: int32. document: int32, a number per document in the row, -1 for padding.
    position: int32 within the document. in_answer: bool, tokens of the target's answer.
    """

    tokens: np.ndarray
    document: np.ndarray
    position: np.ndarray
    in_answer: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: np.ndarray) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}


def pack(documents: Documents, length: int, seed: int) -> Rows:
    """First-fit packing in a random order; documents longer than a row are cut at its end."""
    order = np.random.default_rng(seed).permutation(len(documents))
    sizes = np.minimum(np.diff(documents.starts), length)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free, row), a short list of the fullest candidates
    for index in order:
        size = int(sizes[index])
        place = next((i for i, (free, _) in enumerate(open_rows) if free >= size), None)
        if place is None:
            rows.append([])
            open_rows.append((length, len(rows) - 1))
            open_rows = open_rows[-32:]
            place = len(open_rows) - 1
        free, row = open_rows[place]
        rows[row].append(int(index))
        open_rows[place] = (free - size, row)
    shape = (len(rows), length)
    tokens, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document, in_answer = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, members in enumerate(rows):
        at = 0
        for number, index in enumerate(members):
            size = int(sizes[index])
            begin = documents.starts[index]
            part = slice(at, at + size)
            tokens[row, part] = documents.tokens[begin : begin + size]
            document[row, part] = number
            position[row, part] = np.arange(size)
            in_answer[row, part] = np.arange(size) >= documents.answers[index]
            at += size
    return Rows(tokens, document, position, in_answer)
