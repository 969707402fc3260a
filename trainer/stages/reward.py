"""The reward stage of a sampled batch: scores of a colocated reward model, written back by key."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import DataProto, KVBatchMeta, lengths_of, valid_mask
from lineage.trainer.reward.loop_manager import EXTRA_KEYS, INPUT_FIELDS, READ, ROW_FIELDS
from lineage.trainer.stages.fields import put

MANAGER, DRIVER = "RewardLoopManager.compute_rm_score", "PPOTrainer._compute_reward_colocate"


@traced("reward", component=DRIVER, consumer="PPOTrainer._compute_advantage")
async def compute_reward_colocate(parts: Parts, batch: KVBatchMeta) -> None:
    """Score a batch as a whole (verl ``_compute_reward_colocate``); padding rows come after it.

    What the scorer said beside the score becomes a field each; the batch keeps their names in ``extra_info``.
    """
    nested = fetch(parts.queue, batch, [*INPUT_FIELDS, *ROW_FIELDS])
    prompt_lens, response_lens = lengths_of(nested["prompts"]), lengths_of(nested["responses"])
    data = DataProto.from_tensordict(nested)
    # the mask of [prompts | responses]: the sequences' own is not of this layout
    data.batch["attention_mask"] = torch.cat(
        [
            valid_mask(prompt_lens, data.batch["prompts"].shape[1], side="left"),
            valid_mask(response_lens, data.batch["responses"].shape[1]),
        ],
        dim=1,
    ).long()
    stage, spans = hooks.current(), {"response": response_lens.tolist(), "prompt": prompt_lens.tolist()}
    spans["sequence"] = (prompt_lens + response_lens).tolist()
    stage.pad(data, keys=batch.keys, lengths=spans, consumer=MANAGER)
    result = await parts.reward.compute_rm_score(data)
    with traced("reward", component=MANAGER, consumer=DRIVER) as scoring:
        read = result.meta_info.get(READ) or [None]
        if all(read):
            given = {
                "responses": [torch.as_tensor(one.response_ids, dtype=torch.int64) for one in read],
                "reward_model": [one.reward_model for one in read],
            }
            scoring.consume(given, keys=batch.keys, producer=DRIVER)
        sources = {"data_source": [str(source) for source in data.non_tensor_batch["data_source"]]}
        scores = {"rm_scores": result.batch["rm_scores"]}
        scoring.score(scores, keys=batch.keys, lengths={"response": spans["response"]}, columns=sources)
    fields = dict(result.to_nested(["rm_scores"], response_lens).items())
    stage.unpad(fields, keys=batch.keys)
    batch.extra_info[EXTRA_KEYS] = result.meta_info[EXTRA_KEYS]
    for name in result.meta_info[EXTRA_KEYS]:
        fields[name] = NonTensorStack(*result.non_tensor_batch[name].tolist())
    put(parts, batch, fields)
