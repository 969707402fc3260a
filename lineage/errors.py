"""The library's errors: each says in one line what is wrong, where, and how to mend it."""

from __future__ import annotations

_LINE = 300  # characters: some errors of others quote a page


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LINE]


class LineageError(Exception):
    """Base of every error this library raises on purpose."""


class UserError(LineageError):
    """Bad input from a user. The command line prints it as one line and exits with 2."""


class RecorderError(LineageError):
    """The recorder could not start, or was used out of order."""


class UsageError(LineageError):
    """A call of the recorder that cannot be meant: an option or column it does not know, or of the wrong length."""


class MissingExtraError(UserError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str, module: str | None = None) -> None:
        missing = f" ({module} is missing)" if module else ""
        super().__init__(f'{feature} needs the {extra!r} extra{missing}: pip install "rl-lineage[{extra}]"')


class ViolationError(LineageError):
    """A step that was just sealed broke a contract, and the run was told to stop there.

    Attributes:
        headline: what broke, where, for which trajectories, as ``lineage check`` prints it.
        global_steps: the step.
    """

    def __init__(self, headline: str, global_steps: int) -> None:
        super().__init__(headline)
        self.headline, self.global_steps = headline, global_steps


class CheckError(UserError):
    """A sealed step could not be checked, and the run was told to let no step pass unchecked."""
