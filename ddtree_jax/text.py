"""Between text and token ids: tokenizer, chat template, and streamed text that never breaks."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_jax.config import read_json
from ddtree_jax.errors import InputError

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are not (yet) a character
# transformers imports a name when it is asked for one, and fails two threads that ask at once.
_importing = threading.Lock()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder (transformers, without torch)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no advice about missing torch
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise InputError(
            f"{folder}: has no tokenizer.json; use --prompt-ids to decode token ids without one"
        )
    try:
        with _importing:
            kind = _tokenizer_class(folder)
        return kind.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({error})") from None


def _tokenizer_class(folder: Path) -> Any:
    """The class that the checkpoint names, if it is the plain one: a third of a second sooner."""
    settings = folder / "tokenizer_config.json"
    named = read_json(settings).get("tokenizer_class") if settings.exists() else None
    if named == "PreTrainedTokenizerFast" and (folder / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode_chat(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, thinking: bool | None = None
) -> list[int]:
    """Token ids of a conversation with the generation prompt, through the model's template.

    `thinking` is handed to templates that know `enable_thinking`; None leaves their default.
    """
    if tokenizer.chat_template is None:
        raise InputError("the tokenizer has no chat template; use --raw")
    extra = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **extra
    )


def encode_raw(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text."""
    return tokenizer.encode(text)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids: special tokens are left out, and nothing is tidied up.

    Some tokenizers drop spaces before punctuation afterwards; a streamed text could not follow.
    """
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StreamDecoder:
    """Turns tokens into text as they arrive; holds back what may still change.

    Only a suffix is decoded each time. A tokenizer may join neighbouring tokens (spaces, bytes of
    one character), so the last piece already shown stays in the window as context.

    Args:
      stops: the text ends before the first of these strings. What may become one is held back, so
        no part of it is ever returned. Tokens are looked at one by one: the end does not depend on
        how they arrive.
      unstopped: the first tokens, in whose text no stop string ends.

    After the end `stopped` is True; `count` is the number of tokens taken in, with the one that
    completes the stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), unstopped: int = 0):
        self._tokenizer, self._stops, self._unstopped = tokenizer, tuple(stops), unstopped
        self._ids: list[int] = []
        self._context = 0  # where the window begins
        self._settled = 0  # tokens whose text is whole and has been taken out of the window
        self._taken = 0  # characters taken out of what follows those, before half a character
        self._held = ""  # what may be the beginning of a stop string
        self._exempt = 0  # characters at its beginning that are of the unstopped tokens
        self.stopped = False

    @property
    def count(self) -> int:
        return len(self._ids)

    def _decode(self, begin: int, end: int) -> str:
        return decode(self._tokenizer, self._ids[begin:end])

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """The new text; `final` also releases an incomplete character."""
        if not self._stops:
            return self._extend(tokens, final)
        shown = ""
        for place, token in enumerate(tokens, start=1):
            if self.stopped:
                break
            shown += self._search([token], final and place == len(tokens))
        return shown

    def _extend(self, tokens: Sequence[int], final: bool) -> str:
        self._ids.extend(tokens)
        before = self._decode(self._context, self._settled)
        piece = self._decode(self._context, len(self._ids))[len(before) :]
        whole = piece if final else piece.rstrip(REPLACEMENT)
        new, self._taken = whole[self._taken :], len(whole)
        if whole == piece:
            if piece:  # special tokens alone are no context: the next may not look like the first
                self._context = self._settled
            self._settled, self._taken = len(self._ids), 0
        return new

    def _search(self, tokens: Sequence[int], final: bool) -> str:
        text = self._held + self._extend(tokens, final)
        if self.count <= self._unstopped:
            self._exempt = len(text)
        else:
            begins = ((stop, max(0, self._exempt - len(stop) + 1)) for stop in self._stops)
            found = [place for stop, begin in begins if (place := text.find(stop, begin)) >= 0]
            if found:
                self._held, self.stopped = "", True
                return text[: min(found)]
        keep = 0 if final else max(_overlap(text, stop) for stop in self._stops)
        shown = len(text) - keep
        self._held, self._exempt = text[shown:], max(0, self._exempt - shown)
        return text[:shown]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which a stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
