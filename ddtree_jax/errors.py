"""The errors that reach a user as one sentence. Every other exception is a bug."""


class InputError(Exception):
    """Bad usage or input (exit code 2). The message names file, key and what is expected."""


class RunError(Exception):
    """A run that started and failed (exit code 1)."""
