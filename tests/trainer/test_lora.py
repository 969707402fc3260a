"""A LoRA adapter: what trains, what the rollout gets, and what the reference is."""

from __future__ import annotations

import copy

import pytest
import torch
from omegaconf import OmegaConf

from lineage.trainer.config.actor_rollout_ref import ModelConfig, OptimConfig
from lineage.trainer.lora import AdapterError, LoraPolicy
from lineage.trainer.models import load_model
from lineage.trainer.optim import build_optimizer
from lineage.trainer.policy import FrozenCopy, Policy, make_policy
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.setup import use_few_threads

IDS = torch.arange(5, 15).unsqueeze(0)


@pytest.fixture(scope="module")
def base(tiny):
    """The tiny model; tests take copies."""
    model = load_model(tiny)
    use_few_threads(model)
    return model


def lora(base, **changes):
    """A policy with an adapter on a copy of the tiny model."""
    return LoraPolicy(copy.deepcopy(base), OmegaConf.structured(ModelConfig(lora_rank=4, **changes)))


def moved(policy):
    """The same after a made-up update: the zero factor is no longer zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in policy.module.named_parameters():
            if "lora_B" in name:
                tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    return policy


@torch.no_grad()
def logits(module):
    """Logits of a fixed sequence."""
    return module(input_ids=IDS).logits


def test_a_fresh_adapter_changes_no_bit(base):
    """Before the first update actor, reference and merged weights are the base model's."""
    policy = lora(base)
    assert torch.equal(logits(policy.module), logits(base))
    sent = dict(policy.tensors())
    assert list(sent) == list(base.state_dict())
    assert all(torch.equal(tensor, sent[name]) for name, tensor in base.state_dict().items())


def test_the_rollout_computes_what_the_actor_computes(base):
    """Merged weights, copied by name into a model that knows no peft, give the actor's logits and leave it alone."""
    policy = moved(lora(base))
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    rollout = HFRollout(policy.resident_copy(), eos_token_ids=[3], pad_token_id=0)
    rollout.update_weights(policy.tensors(), 1)
    assert type(rollout.module) is type(base)
    assert torch.allclose(logits(rollout.module), logits(policy.module), atol=1e-5)
    assert not torch.allclose(logits(rollout.module), logits(base), atol=1e-3)
    sent, received = dict(policy.tensors()), rollout.resident()
    assert sent.keys() == received.keys()
    assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())
    after = policy.module.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_the_reference_is_the_actor_without_its_adapter(base):
    """It scores as the base model did, holds no second model, and the adapter is on again afterwards, errors or not."""
    policy = moved(lora(base))
    reference = policy.reference()
    actor = logits(policy.module)
    with reference.scoring() as module:
        assert module is policy.module
        assert torch.equal(logits(module), logits(base))
    with pytest.raises(RuntimeError, match="on purpose"), reference.scoring():
        raise RuntimeError("on purpose")
    assert torch.equal(logits(policy.module), actor)
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in reference.state_dict().items())
    assert all(parameter.requires_grad for name, parameter in policy.module.named_parameters() if "lora_" in name)


def test_only_the_adapter_trains(base):
    """The optimiser has the adapter's factors, and a step moves nothing else."""
    policy = lora(base)
    optimizer = build_optimizer(policy.module, OmegaConf.structured(OptimConfig(lr=0.1)))
    before = dict(policy.reference().state_dict())
    before = {name: tensor.clone() for name, tensor in before.items()}
    policy.module(input_ids=IDS).logits.sum().backward()
    optimizer.step()
    held = sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"])
    assert held == sum(tensor.numel() for name, tensor in policy.module.named_parameters() if "lora_" in name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.reference().state_dict().items())
    assert not torch.equal(logits(policy.module), logits(base))


def test_a_saved_adapter_is_restored(base):
    """The state dict of one, loaded into another of the same configuration, is the same policy."""
    first, second = moved(lora(base)), lora(base)
    second.module.load_state_dict(first.module.state_dict())
    assert torch.equal(logits(first.module), logits(second.module))


def test_gradient_checkpointing_reaches_the_adapter(base):
    """Recomputed activations give the adapter the same gradient."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = lora(base, enable_gradient_checkpointing=checkpointing)
        if checkpointing:
            policy.module.get_base_model().gradient_checkpointing_enable()
        policy.module.train()
        policy.module(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        grads.append(torch.cat([p.grad.reshape(-1) for n, p in policy.module.named_parameters() if "lora_B" in n]))
    assert grads[0].abs().max() > 0
    assert torch.allclose(*grads)


@pytest.mark.parametrize("targets", ["nothing_like_it", ["nor_this"]])
def test_wrong_targets_are_one_line(base, targets):
    """peft's own reason, with the key to mend."""
    with pytest.raises(AdapterError, match=r"target_modules=.*not found in the base model") as caught:
        lora(base, target_modules=targets)
    assert "\n" not in str(caught.value)


def test_a_tied_weight_carries_no_adapter(base):
    """Merged it would be two weights, and the rollout has one: refused by name."""
    model = copy.deepcopy(base)
    model.lm_head.weight = model.get_input_embeddings().weight
    with pytest.raises(AdapterError, match="one tied weight"):
        lora(model, target_modules=["lm_head"])
    sent = dict(lora(model, target_modules=["q_proj", "v_proj"]).tensors())
    assert sent["lm_head.weight"].data_ptr() == sent["model.embed_tokens.weight"].data_ptr()


def test_rank_0_is_no_adapter(base):
    """The whole model trains, and its reference is a copy."""
    policy = make_policy(base, OmegaConf.structured(ModelConfig()))
    assert type(policy) is Policy
    assert policy.adapter is None
    assert isinstance(policy.reference(), FrozenCopy)
    assert isinstance(make_policy(copy.deepcopy(base), OmegaConf.structured(ModelConfig(lora_rank=1))), LoraPolicy)
