"""Whole prompt sets: where they come from, and through one engine."""

from collections.abc import Sequence

from ddtree_jax.commands.prompts import Conversation
from ddtree_jax.engine import Engine, Generation, Options
from ddtree_jax.errors import InputError
from ddtree_jax.training import prompts


def evaluation(path: str | None) -> dict[str, list[list[str]]]:
    """The conversations of each set: of a file of --eval, or else of the installed packages."""
    if path == "":
        raise InputError("--eval is empty; expected a file to read")
    return prompts.evaluation_sets() if path is None else prompts.load_evaluation(path)


def answer_all(
    engine: Engine,
    conversations: Sequence[Conversation],
    options: Options,
    advance=lambda: None,
    *,
    min_slots: int = 0,
) -> list[list[Generation]]:
    """Every turn of every conversation, answered with the model's own earlier answers.

    `advance` is called after each; `min_slots` as for `Engine.run`.
    """
    answers: list[list[Generation]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations), default=0)):
        members = [i for i, conversation in enumerate(conversations) if turn < len(conversation)]
        ids = [
            conversations[i].encode(engine.tokenizer, [each.text or "" for each in answers[i]])
            for i in members
        ]
        results = {}
        for event, generation in engine.run(ids, options, min_slots=min_slots):
            results[event.index] = generation
            if event.done:
                advance()
        for place, index in enumerate(members):
            answers[index].append(engine.with_text(results[place]))
    return answers
