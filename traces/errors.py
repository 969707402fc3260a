"""The error of a trace that cannot be read, and what of others' errors becomes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa

from lineage.errors import UserError, first_line
from lineage.traces.damage import culprit


class TraceError(UserError):
    """A trace that cannot be read: what is wrong, where, and how to mend it, in one line."""


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """What pyarrow, DuckDB or the system says of a file that is damaged, or is not what it says, as one line.

    Raises:
        TraceError: the file or trace, and the first line of what was said of it.
    """
    try:
        yield
    except duckdb.InterruptException:
        raise
    except UnicodeEncodeError as error:
        raise TraceError(f"{path}: cannot be read: a name in its path is not UTF-8; rename it") from error
    except duckdb.OutOfMemoryException as error:
        raise TraceError(f"{path}: cannot be read: {first_line(error)}") from error
    except (pa.ArrowException, duckdb.Error, OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {culprit(path)}{first_line(error)}") from error
