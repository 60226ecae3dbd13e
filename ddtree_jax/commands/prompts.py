"""Prompts of the command line: arguments, text files, JSON lines, token ids."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_jax import text
from ddtree_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Conversation:
    """User turns, answered one after the other, or one prompt of token ids."""

    turns: tuple[str, ...] = ()
    ids: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return 1 if self.ids is not None else len(self.turns)

    def encode(
        self,
        tokenizer: Any,
        answers: Sequence[str],
        *,
        raw: bool = False,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of the turn that follows the `answers` given so far."""
        if self.ids is not None:
            return list(self.ids)
        turns = self.turns[: len(answers) + 1]
        if raw:
            parts = [part for pair in zip(turns, [*answers, ""], strict=True) for part in pair]
            return text.encode_raw(tokenizer, "".join(parts))
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn, answer in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return text.encode_chat(tokenizer, messages, thinking=thinking)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason})") from None


def _check_text(where: str, value: str) -> None:
    """Refuses what no tokenizer can take: nothing, or bytes that are not UTF-8."""
    if not value.strip():
        raise InputError(f"{where} is empty; expected some text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{where} is not valid UTF-8 text") from None


def from_arguments(prompts: Sequence[str]) -> list[Conversation]:
    for index, prompt in enumerate(prompts):
        _check_text(f"prompt {index}", prompt)
    return [Conversation((prompt,)) for prompt in prompts]


def from_file(path: str) -> list[Conversation]:
    """JSON lines with "prompt" or "turns", or plain text with one prompt a line."""
    lines = [(n, line) for n, line in enumerate(_read(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path}: is empty; expected at least one prompt")
    if not path.endswith(".jsonl") and not lines[0][1].lstrip().startswith("{"):
        return [Conversation((line,)) for _, line in lines]
    conversations = []
    for number, line in lines:
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: is not valid JSON") from None
        if not isinstance(entry, dict) or not ("prompt" in entry or "turns" in entry):
            raise InputError(f"{where}: expected an object with 'prompt' or 'turns'")
        key = "turns" if "turns" in entry else "prompt"
        turns = entry[key] if key == "turns" else [entry[key]]
        texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
        if not texts or not turns or not all(turn.strip() for turn in turns):
            expected = "a non-empty text" if key == "prompt" else "a list of non-empty texts"
            raise InputError(f"{where}: '{key}' is {entry[key]!r}; expected {expected}")
        for turn in turns:
            _check_text(f"{where}: '{key}'", turn)
        conversations.append(Conversation(tuple(turns)))
    return conversations


def from_ids_file(path: str) -> list[Conversation]:
    """A JSON list of token ids, or a list of such lists."""
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not valid JSON; expected a list of token ids") from None
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for ids in lists:
        integers = isinstance(ids, list) and all(type(token) is int for token in ids)
        if not integers or not ids:
            raise InputError(f"{path}: expected a non-empty list of token ids, or a list of those")
    return [Conversation(ids=tuple(ids)) for ids in lists]
