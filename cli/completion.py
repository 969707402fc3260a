"""What the shell offers at TAB: codes and families of the invariant catalogue."""

from __future__ import annotations

from collections.abc import Iterable


def complete_code(incomplete: str) -> list[tuple[str, str]]:
    """Codes that begin so, in any case, with their names; behind a comma, the list so far stays."""
    from lineage.checks.catalogue import catalogue

    return _fitting(incomplete, ((one.code, one.name) for one in catalogue()))


def complete_choice(incomplete: str) -> list[tuple[str, str]]:
    """Families and codes that begin so: what ``--select`` and ``--ignore`` take."""
    from lineage.checks.catalogue import catalogue

    families: dict[str, list[str]] = {}
    for one in catalogue():
        families.setdefault(one.family, []).append(one.code)
    listed = [(family, f"all of {', '.join(codes)}") for family, codes in families.items()]
    return _fitting(incomplete, [*listed, *((one.code, one.name) for one in catalogue())])


def _fitting(incomplete: str, known: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    before, comma, last = incomplete.rpartition(",")
    found = [(name, said) for name, said in known if name.startswith(last.upper())]
    # a shell drops what does not begin as typed, so small letters are answered in small letters
    return [(f"{before}{comma}{name.lower() if last.islower() else name}", said) for name, said in found]
