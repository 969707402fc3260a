"""pytest's plugin: ``--lineage-trace`` and the fixture ``lineage_trace``; inert, and weightless, until it is used.

pytest loads it in every session of an environment that has this package, so all of ours is imported where it is first
needed. The assertions are in ``lineage.testing``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lineage.traces import Trace

_NAME = "lineage_trace"
_MEND = f"pytest --lineage-trace=PATH, or {_NAME} = PATH in pytest's settings"

#: the verdicts of the session by trace and code
_judged = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--lineage-trace`` and the setting of the same name."""
    says = "the trace that the fixture lineage_trace opens: what lineage check takes"
    parser.getgroup("lineage").addoption("--lineage-trace", metavar="PATH", help=says)
    parser.addini(_NAME, f"{says}; seen from the folder of the settings file")


def pytest_configure(config: pytest.Config) -> None:
    """Begin an account of the session."""
    config.stash[_judged] = {}


@pytest.fixture(scope="session")
def lineage_trace(request: pytest.FixtureRequest) -> Iterator[Trace]:
    """The trace named by --lineage-trace or the setting lineage_trace, open."""
    path = _path(request.config)
    if path is None:
        pytest.fail(f"lineage_trace: no trace is given: {_MEND}", pytrace=False)
    from lineage.checks.assertions import verdicts_on
    from lineage.errors import UserError
    from lineage.traces import open_trace

    try:
        trace = open_trace(path)
    except UserError as error:
        pytest.fail(f"lineage_trace: {error}", pytrace=False)
    with trace:
        yield trace
        _note(request.config, path, verdicts_on(trace))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist found."""
    for path, verdicts in getattr(node, "workeroutput", {}).get(_NAME, {}).items():
        _note(node.config, path, verdicts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for a trace that was judged."""
    for path, verdicts in config.stash[_judged].items():
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(verdicts.values()).most_common())
        terminalreporter.write_line(f"lineage: {len(verdicts)} checks on {path}: {counts}")


def _path(config: pytest.Config) -> str | None:
    """The option as it is given, or the setting from its file's folder; a URL stays one."""
    given: str | None = config.getoption(_NAME)
    if given:
        return given
    said = str(config.getini(_NAME))
    if not said or "://" in said:
        return said or None
    home = config.inipath.parent if config.inipath is not None else config.invocation_params.dir
    return str(home / said)


def _note(config: pytest.Config, path: str, verdicts: dict[str, str]) -> None:
    """Keep the verdicts on a trace; a worker hands them on to the session that started it."""
    if not verdicts:
        return
    config.stash[_judged].setdefault(path, {}).update(verdicts)
    if hasattr(config, "workeroutput"):
        config.workeroutput[_NAME] = config.stash[_judged]
