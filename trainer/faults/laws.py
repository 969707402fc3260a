"""Laws of the trainer that no single trace can show: the same work done twice, in another way, must end the same.

A law is a function that does both and says in a sentence what differs; nothing, when it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: the function that tries it.
        says: what must hold.
        broken: tries it; a sentence on what differs, empty when it holds.
    """

    name: str
    says: str
    broken: Callable[[], str]


LAWS: dict[str, Law] = {}


def law(broken: Callable[[], str]) -> Callable[[], str]:
    """Register a function as a law; its docstring is the sentence."""
    LAWS[broken.__name__] = Law(broken.__name__, " ".join((broken.__doc__ or "").split()), broken)
    return broken
