"""What an error of Ray means to the run."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from lineage.trainer.ray.errors import ProcessDiedError, unwrap_error


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed: the node is low on memory")])
def test_a_process_that_is_ended_is_one_line_that_names_it(error):
    """By whom does not matter: the system, or Ray's guard of the machine's memory."""
    said = unwrap_error(error, "actor:1", "update_actor")
    assert isinstance(said, ProcessDiedError)
    assert "process actor:1 died in update_actor" in str(said)
