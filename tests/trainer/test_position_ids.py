"""Shapes a loop may give: positions of several axes, opaque media. Synthetic: no built-in model has either."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

import lineage
from lineage.hooks import trace_queue
from lineage.trainer.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentLoopWorker,
    LoopContext,
    SessionError,
    register,
)
from lineage.trainer.agent_loop.postprocess import SessionResult, trajectory_fields
from lineage.trainer.padding import padding_fields, padding_rows
from lineage.trainer.protocol import DataProto, nested_tokens_last, object_array
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.rollout.base import SamplingParams


@register("test_tool_media")
class Media(AgentLoopBase):
    """Gives positions on three axes and an opaque object, as a loop of a vision model would."""

    async def run(self, sampling_params, **row):
        size = 4 + self.session.session_id * row.get("longer", 1)
        extra = {"position_ids": torch.arange(3 * (size + 1)).view(3, -1), "finish_reason": "stop"}
        media = {"pixels": [0.5], "grid": [[1, 2, 2]]}
        return AgentLoopOutput([5], [6] * size, [1] * size, [-0.5] * size, extra_fields=extra, multi_modal_data=media)


@pytest.mark.parametrize("longer", [0, 1])
def test_positions_of_several_axes_pass_the_queue(tokenizer, tmp_path, longer):
    """(k, seq) positions are padded on the last axis and the same content when read; media are opaque."""
    context = LoopContext(None, tokenizer, prompt_length=64, response_length=20)
    rows = {
        "uid": object_array(["u"]), "raw_prompt": object_array([[{"role": "user", "content": "?"}]]),
        "agent_name": object_array(["test_tool_media"]), "longer": object_array([longer]),
    }  # fmt: skip
    meta = {"global_steps": 5, "partition_id": "train", "expected": 2, "sampling_params": SamplingParams()}
    keys, queue = ["u_0_0", "u_1_0"], trace_queue(LocalTransferQueue())
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(5)
        worker = AgentLoopWorker(queue, context, None, default_agent_loop="single_turn_agent", seed=7)
        asyncio.run(worker.run(DataProto.from_dict(rows, meta)))
        with recorder.stage("old_log_prob", producer="actor"):
            data = queue.kv_batch_get(keys, "train")
    lengths = [5, 5 + longer]
    assert [list(row.shape) for row in data["position_ids"].unbind()] == [[3, length] for length in lengths]
    padded = DataProto.from_tensordict(data).batch["position_ids"]
    assert padded.shape == (2, 3, max(lengths))
    assert [row[:, :length].flatten().tolist() for row, length in zip(padded, lengths, strict=True)] == [
        list(range(3 * length)) for length in lengths
    ]
    assert data.get("extra_fields").tolist() == [{"finish_reason": "stop"}] * 2
    assert data.get("multi_modal_inputs").tolist() == [{"pixels": [0.5], "grid": [[1, 2, 2]]}] * 2
    like = TensorDict({"position_ids": nested_tokens_last(data["position_ids"].unbind()[:1])}, batch_size=[1])
    padding = padding_fields(like, padding_rows(2, {}, seed=7, global_steps=5), 3)["position_ids"]
    assert [row.tolist() for row in padding.unbind()] == [[[0, 1, 2]] * 3] * 2
    written, read = (
        lineage.open(tmp_path / "run")
        .connection.execute(
            "select fingerprint, length, shape[3] from \"rows\" where field = 'position_ids' order by seq"
        )
        .fetchall()
    )
    assert written == read
    assert written[1:] == (lengths, 3)


@pytest.mark.parametrize("positions", [[0, 1], [[0, 1]], 3])
def test_positions_that_do_not_lie_over_the_sequence_fail_the_group(positions):
    """A loop's positions are as long as its sequence, or the session is no trajectory."""
    output = AgentLoopOutput([1], [2, 3], [1, 1], extra_fields={"position_ids": positions})
    with pytest.raises(SessionError, match="position_ids of shape"):
        trajectory_fields("u", [SessionResult(0, [output], None)], {})
