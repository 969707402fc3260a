"""What fingerprinting both sides of a weight sync costs, beside the sync itself, at 135M parameters.

    python benchmarks/weights.py [--rounds 3] [--layers 30]

The shapes are SmolLM2-135M's, the weights random: nothing is downloaded. A tied lm_head counts on both sides, as in the
state dict, so more elements are read than the model has parameters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lineage import hooks
from lineage.hooks import Weights
from lineage.trainer.policy import Policy
from lineage.trainer.rollout.hf import HFRollout


def model(layers: int) -> LlamaForCausalLM:
    """A causal language model of SmolLM2-135M's shapes, with random weights."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def seconds(act: Callable[[], object], rounds: int) -> float:
    """The median time of an act, after one that does not count."""
    act()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured; the median counts")
    parser.add_argument("--layers", type=int, default=30, help="of the model; 30 are SmolLM2-135M's")
    options = parser.parse_args()
    policy = Policy(model(options.layers))
    engine = HFRollout(policy.resident_copy(), eos_token_ids=[2], pad_token_id=2)
    sent = dict(policy.tensors())
    elements = sum(tensor.numel() for tensor in sent.values())
    sync = seconds(lambda: engine.update_weights(sent.items(), 1), options.rounds)
    with tempfile.TemporaryDirectory() as name, hooks.recording(Path(name) / "run") as recorder:
        recorder.step(1)
        with recorder.stage("weight_sync") as stage:
            actor = Weights(1, "actor")
            one_side = seconds(lambda: stage.params("sync", sent, weights=actor), options.rounds)
    parameters = sum(parameter.numel() for parameter in policy.module.parameters())
    print(f"{parameters:,} parameters, {len(sent)} tensors, {elements:,} elements; {torch.get_num_threads()} threads")
    print(f"sync (one copy)    {sync:8.3f} s")
    print(f"one row of a side  {one_side:8.3f} s, {elements / one_side / 1e6:.0f} M elements/s")
    print(
        f"both sides         {2 * one_side:8.3f} s, {2 * one_side / sync:.0f} times the sync (trace.weights=false: 0)"
    )


if __name__ == "__main__":
    main()
