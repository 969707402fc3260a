"""What only a second look shows: a row scored alone, and whether the reference still has its weights.

Log-probs that are wrong in every row of a batch alike agree with each other. A row scored without its batch, by tokens
alone, has no padding, no neighbour and no positions but its own to be wrong by. Nothing here draws a number or touches
a gradient, so a probed run and any other end in the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import Weights
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.sharded import first_element, local
from lineage.trainer.log_prob import RowScores
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import SequenceRows

#: elements of a tensor that stand for all of them
SAMPLE = 1024
ALONE = Ranks.embedded(1)


@torch.no_grad()
def probe(
    module: nn.Module,
    rows: SequenceRows,
    scores: RowScores,
    temperature: float,
    chosen: Sequence[int | None],
    ranks: Ranks = ALONE,
) -> None:
    """Score some rows again, each alone, and record how far they are from what they had in the batch.

    By arithmetic of its own, in float32: what is wrong in the trainer's is wrong in every row. A module in training
    mode is left alone: to score it as it should have been scored would change what it draws later.

    Args:
        module: what scored the batch.
        rows: the batch.
        scores: of the batch.
        temperature: the sampler's.
        chosen: positions of the rows (:func:`to_probe`); those of models of several axes are left out.
        ranks: where they share sequences out, each of a rank's processes scores its slice.
    """
    sequence = ranks.sequence
    several_axes = any(positions.dim() > 1 for positions in rows.columns["position_ids"])
    if not hooks.recorder().enabled or module.training or several_axes:
        return
    stage = hooks.current()
    for row in chosen:
        # a forward pass of a sharded module takes all ranks: one of a token keeps another rank's row company
        ids = (rows.columns["input_ids"][0][:1] if row is None else rows.columns["input_ids"][row]).unsqueeze(0)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        given, mask = {"input_ids": ids, "position_ids": positions}, torch.ones_like(ids)
        if sequence is None:
            logits = module(**given, attention_mask=mask, use_cache=False).logits[0]
        else:
            own = {name: sequence.own(tensor) for name, tensor in given.items()}
            logits = module(**own, attention_mask=mask, use_cache=False).logits[0]
            logits = sequence.whole(logits.T, ids.shape[1]).T
        if row is None or not ranks.speaks:
            continue
        all_log_probs = (logits[:-1].float() / temperature).log_softmax(dim=-1)
        alone = {
            "log_probs": all_log_probs.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1),
            "entropy": -(all_log_probs.exp() * all_log_probs).sum(dim=-1),
        }
        for name, batched in (("log_probs", scores.log_probs), ("entropy", scores.entropy)):
            if batched:
                last = nn.functional.pad(alone[name], (0, 1))
                sides = nested_from_list([batched[row]]), nested_from_list([last])
                stage.compare(name, sides[0], "probe", sides[1], keys=[rows.keys[row]])


def to_probe(
    lengths: Sequence[int], behind: Sequence[int], is_padding: Sequence[bool], count: int, ranks: Ranks = ALONE
) -> list[int | None]:
    """The rows to probe: real ones behind another row of their forward pass, and of those the shortest.

    What leaks from one row into the next does not reach the first, and padding hurts the shortest most.

    Args:
        lengths, behind, is_padding: of the rows this process holds.
        count: rows to choose, of all that the ranks hold.

    Returns:
        Positions; None in the place of a row that another process holds.
    """
    held = ranks.gathered(list(zip(lengths, behind, is_padding, strict=True)))
    rows = [row for process in held for row in process]
    real = (place for place, (_, _, padding) in enumerate(rows) if not padding)
    chosen = sorted(real, key=lambda place: (rows[place][1] == 0, rows[place][0], -place))[:count]
    before = sum(map(len, held[: ranks.played[0]]))
    return [place - before if before <= place < before + len(lengths) else None for place in chosen]


@torch.no_grad()
def record_sample(named_tensors: Mapping[str, Tensor], weights: Weights, ranks: Ranks = ALONE) -> None:
    """Record the content of evenly spaced weights of every tensor, as one element.

    An optimiser step or a sync that should not have been moves all of them; to read every weight would cost a
    synchronisation's time each step.
    """
    held = ranks.gathered_from_all([_sampled(tensor) for tensor in named_tensors.values()])
    if not ranks.first:
        return
    # a part that several ranks hold is taken once
    whole = [dict(parts) for parts in zip(*held, strict=True)]
    sample = torch.cat([parts[at] for parts in whole for at in sorted(parts)])
    hooks.current().params("consume", {"sample": sample}, field="parameters_sample", weights=weights)


def _sampled(tensor: Tensor) -> tuple[int, Tensor]:
    """Where in the whole tensor what is held here begins, and of its weights those that are in the sample."""
    stride, start, own = -(-tensor.numel() // SAMPLE) or 1, first_element(tensor), local(tensor).reshape(-1)
    sampled = own[-start % stride :: stride].float()
    if tensor is not local(tensor):  # other processes will read it
        sampled = sampled.cpu()
    return (start, sampled) if own.numel() else (-1, sampled)
