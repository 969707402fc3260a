"""Shapes a loop may give: positions of several axes, opaque media. No built-in model has either."""

from __future__ import annotations

import asyncio

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import lineage
from lineage.hooks import trace_queue
from lineage.trainer.actor import ActorRolloutRefWorker
from lineage.trainer.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentLoopWorker,
    LoopContext,
    SessionError,
    register,
)
from lineage.trainer.agent_loop.postprocess import SessionResult, trajectory_fields
from lineage.trainer.batching.padding import padding_fields, padding_rows
from lineage.trainer.config.actor_rollout_ref import ActorRolloutRefConfig
from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.log_prob import PositionError
from lineage.trainer.models import load_model
from lineage.trainer.protocol import DataProto, KVBatchMeta, nested_from_list, nested_tokens_last, object_array
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


def vision_model():
    """A small model with a rotary embedding of three axes (1, 1 and 2 of its 4 frequencies), random weights."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    text = {
        "vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": rope, "initializer_range": 0.5, "eos_token_id": 3,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 1, "mlp_ratio": 1}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()


def score(model, compute, sequences, positions):
    """Log-probs of sequences at positions by the actor worker's ``compute``, through the queue."""
    queue, keys = LocalTransferQueue(), [f"u_{place}_0" for place in range(len(sequences))]
    fields = {
        "input_ids": nested_from_list(sequences),
        "attention_mask": nested_from_list([torch.ones_like(ids) for ids in sequences]),
        "position_ids": nested_tokens_last(positions),
    }
    queue.kv_batch_put(keys, "train", TensorDict(fields, batch_size=[len(keys)]))
    worker = ActorRolloutRefWorker(
        queue,
        model,
        OmegaConf.structured(ActorRolloutRefConfig()),
        embedded_topology(1, 1),
        correction=OmegaConf.structured(RolloutCorrectionConfig()),
        total_training_steps=1,
        pad_token_id=0,
        with_reference=True,
    )
    getattr(worker, compute)(KVBatchMeta(keys, [{} for _ in keys], "train"))
    return queue.kv_batch_get(keys, "train", ["log_probs"])["log_probs"].unbind()


@pytest.mark.parametrize("compute", ["compute_log_prob", "compute_ref_log_prob"])
def test_positions_of_several_axes_reach_the_model(compute):
    """Each row is scored at its own positions on every axis, whatever rows of other lengths are beside it."""
    model = vision_model()
    sequences = [torch.arange(5, 10), torch.arange(5, 12)]
    positions = [torch.stack([torch.arange(size), torch.arange(size) // 2, torch.arange(size) * 3]) for size in (5, 7)]

    def alone(ids, axes):
        logits = model(input_ids=ids[None], position_ids=axes[:, None]).logits[0, :-1]
        return logits.detach().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    for ids, axes, found in zip(sequences, positions, score(model, compute, sequences, positions), strict=True):
        assert torch.allclose(found[:-1], alone(ids, axes), atol=1e-4)
        assert not torch.allclose(found[:-1], alone(ids, axes[[0, 0, 0]]), atol=1e-2)


def test_a_model_of_one_axis_refuses_positions_of_several(tiny):
    """It is a mistake in the loop, told in one line, and not a crash inside the model."""
    with pytest.raises(PositionError, match=r"\(3, seq\): the model has one axis.*let the agent loop give"):
        score(load_model(tiny), "compute_log_prob", [torch.arange(5, 10)], [torch.zeros(3, 5, dtype=torch.long)])
