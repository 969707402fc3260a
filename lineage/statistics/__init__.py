"""Per-row statistics of ragged content. Enters: flat values with row lengths. Leaves: one array a statistic.

numpy is what runs on the CPU, torch is its twin for tensors on a device, and the plain-Python reference says what both
must give, bit for bit. Imported by the recorder only.
"""

from lineage.statistics.rows import Rows, RowStatistics
from lineage.statistics.with_numpy import row_statistics, tree_sum

__all__ = ["RowStatistics", "Rows", "row_statistics", "tree_sum"]
