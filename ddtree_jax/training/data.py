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
    [documents], the offset in each document at which the target's answer begins. temperatures:
    float32 [documents], at which the answers were sampled; 0 is greedy.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray
    temperatures: np.ndarray

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - int(self.answers.sum())

    def prompts(self) -> list[tuple[int, ...]]:
        """The prompt ids of each document."""
        ends = self.starts[:-1] + self.answers
        return [
            tuple(self.tokens[start:end].tolist())
            for start, end in zip(self.starts[:-1], ends, strict=True)
        ]

    @staticmethod
    def of(answered: Iterable[tuple[Sequence[int], Sequence[int], float]]) -> "Documents":
        """From (prompt ids, answer ids, temperature) triples."""
        answered = list(answered)
        lengths = [len(prompt) + len(answer) for prompt, answer, _ in answered]
        parts = (part for prompt, answer, _ in answered for part in (prompt, answer))
        return Documents(
            np.array([token for part in parts for token in part], np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([len(prompt) for prompt, _, _ in answered], np.int32),
            np.array([temperature for _, _, temperature in answered], np.float32),
        )

    def select(self, chosen: np.ndarray) -> "Documents":
        """The documents where `chosen` [documents] is true."""
        lengths = np.diff(self.starts)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
        tokens = self.tokens[np.repeat(chosen, lengths)]
        return Documents(tokens, starts, self.answers[chosen], self.temperatures[chosen])

    def save(self, path: Path) -> None:
        """Writes an .npz; a partial file never carries the final name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".npz")
        os.close(handle)
        try:
            np.savez(temporary, **dataclasses.asdict(self))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def load(paths: Iterable[Path]) -> "Documents":
        """One or more .npz files as one collection."""
        names = [field.name for field in dataclasses.fields(Documents)]
        parts = []
        for path in paths:
            with np.load(path) as stored:
                missing = [name for name in names if name not in stored]
                if missing:
                    raise InputError(f"{path} has no {', '.join(missing)}; generate the data again")
                parts.append(Documents(**{name: stored[name] for name in names}))
        if not parts:
            raise InputError("no training data: run the 'generate' step first")
        offsets = np.cumsum([0] + [len(part.tokens) for part in parts])
        starts = [part.starts[:-1] + base for part, base in zip(parts, offsets, strict=False)]
        return Documents(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([*starts, offsets[-1:]]).astype(np.int64),
            np.concatenate([part.answers for part in parts]),
            np.concatenate([part.temperatures for part in parts]),
        )


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    max_new_tokens: int,
    slots: int,
) -> Iterator[tuple[int, Generation]]:
    """The target's own answers as (prompt's number, answer), in the order in which they finish.

    slots: of the cache, see `Engine.run`.
    """
    options = [
        Options(mode="ar", temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        for temperature, seed in zip(temperatures, seeds, strict=True)
    ]
    for event, generation in engine.run(prompts, options, min_slots=slots):
        if event.done:
            yield event.index, generation


@dataclasses.dataclass(frozen=True)
class Rows:
    """Documents packed into rows of one length, for `loss.block_loss`; arrays are [rows, length].

    tokens: int32. document: int32, a number per document in the row, -1 for padding.
    position: int32 within the document. in_answer: bool, tokens of the target's answer.
    temperature: float32, of the document.
    """

    tokens: np.ndarray
    document: np.ndarray
    position: np.ndarray
    in_answer: np.ndarray
    temperature: np.ndarray

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
    temperature = np.zeros(shape, np.float32)
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
            temperature[row, part] = documents.temperatures[index]
            at += size
    return Rows(tokens, document, position, in_answer, temperature)
