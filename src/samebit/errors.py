"""Why a run ended before its last step, and errors that a command adds to. Imports nothing."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be had. Whoever knows where its name came from says so before the text."""


class RunStopped(Exception):  # noqa: N818 - an outcome, not an error
    """The watchdog ended the run. The text is the diagnosis in one line; `bundle` its folder."""

    def __init__(self, text: str, bundle: str = "") -> None:
        super().__init__(text)
        self.bundle = bundle


class RunLeft(Exception):  # noqa: N818 - an outcome, not an error
    """A signal asked the run to leave, or another process of it ended. exit_code: 128 + signal, or 1.

    at_once: for a second signal, which does not wait for a checkpoint.
    """

    def __init__(self, text: str, exit_code: int, at_once: bool = False) -> None:
        super().__init__(text)
        self.exit_code, self.at_once = exit_code, at_once
