"""traces: opens a recorded trace and answers questions about it.

What enters: a Parquet file, a folder of parts, a run folder or a glob. What leaves: DuckDB views (``rows``, ``facts``,
``trajectories``, ``groups``, ``steps``), the trace's own account of itself, the life of one trajectory, a comparison
with another trace (``diff``). Imports lineage's schema and fingerprint, never torch; checks and cli may import it.
"""

from __future__ import annotations

from lineage.traces.errors import TraceError
from lineage.traces.life import Life, life
from lineage.traces.state import State
from lineage.traces.trace import Trace, open_trace

__all__ = ["Life", "State", "Trace", "TraceError", "life", "open_trace"]
