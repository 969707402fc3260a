"""What an agent loop returns: refused where no trajectory can be made of it, plain lists where one can."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lineage.trainer.agent_loop import AgentLoopOutput
from lineage.trainer.agent_loop.base import SessionError
from lineage.trainer.agent_loop.postprocess import check_outputs


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [AgentLoopOutput([1], [], [])],
        [AgentLoopOutput([], [1], [1])],
        [AgentLoopOutput([1], [1, 2], [1])],
        [AgentLoopOutput([1], [1, 2], [1, 1], [-0.1])],
        [AgentLoopOutput([1], [1.5], [1])],
        [AgentLoopOutput(["one"], [1], [1])],
        [AgentLoopOutput([1], 7, [1])],
        [AgentLoopOutput([[1]], [1], [1])],
        [([1], [1], [1])],
        [AgentLoopOutput([1], [12], [1])],
        [AgentLoopOutput([-1], [1], [1])],
        [AgentLoopOutput([1], [1], [1], [math.nan])],
    ],
)
def test_outputs_no_trajectory_can_be_made_of(outputs):
    """Nothing, an empty prompt or response, parts of other lengths, and what are no numbers are refused."""
    with pytest.raises(SessionError):
        check_outputs(outputs, vocab_size=12)


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, iter])
def test_an_output_is_lists_of_numbers_whatever_a_loop_gave(kind):
    """Tuples, arrays, tensors and iterators become lists of plain numbers; what was given stays as it is."""
    given = AgentLoopOutput(kind([1]), kind([2, 3]), kind([True, False]), kind([-0.5, 0.0]))
    (output,) = check_outputs([given])
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1], [2, 3], [1, 0])
    assert output.response_logprobs == [-0.5, 0.0]
    numbers = [*output.prompt_ids, *output.response_ids, *output.response_mask, *output.response_logprobs]
    assert [type(number) for number in numbers] == [int] * 5 + [float] * 2
    assert given is not output
