"""A LoRA adapter on the model: only it trains, and the model without it is the reference policy.

The adapter is made in memory by peft, never read from a hub (LoRA: arXiv:2106.09685). Its second factor begins at
zero, so that before the first update the actor is the model it was put on, bit for bit. Outside the worker nobody sees
it: the rollout gets merged weights under the names of the base model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import OmegaConf
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lineage.hooks import UserError, first_line
from lineage.trainer.engine.sharded import full
from lineage.trainer.policy import Policy


class AdapterError(UserError):
    """An adapter that cannot be put on this model."""


class LoraPolicy(Policy):
    """A model with a LoRA adapter that trains, everything else frozen; the layers of ``module`` are changed in place.

    Args:
        module: the base model.
        config: ``actor_rollout_ref.model``.

    Raises:
        AdapterError: ``target_modules`` names nothing that can carry an adapter, or a weight that is tied.
    """

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.model = _with_adapter(module, config)
        self.adapter = str(self.model.active_adapter)
        super().__init__(self.model)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Merged weights by the base model's names.

        The module is left alone: merged in place and taken apart again, it would not be the same in the last bits.
        """
        adapted = {f"{name}.weight": layer for name, layer in _adapted(self.model)}
        for name, tensor in _base_tensors(self.model):
            yield name, full(_merged(adapted[name]) if name in adapted else tensor)

    def names(self) -> list[str]:
        """Names of the base model's tensors."""
        return [name for name, _ in _base_tensors(self.model)]

    def parameters(self) -> dict[str, bool]:
        """The base model's parameters: those with an adapter train, by it."""
        adapted = {f"{name}.weight" for name, _ in _adapted(self.model)}
        base = self.model.get_base_model().state_dict(keep_vars=True).items()
        named = [_base_name(name) for name, tensor in base if isinstance(tensor, nn.Parameter) and _is_base(name)]
        return {name: name in adapted for name in named}

    def resident_copy(self) -> nn.Module:
        """The base model without a trace of the adapter."""
        copied: nn.Module = copy.deepcopy(self.model).unload()
        return copied

    def reference(self) -> WithoutAdapter:
        """The same model, its adapter switched off while it scores."""
        return WithoutAdapter(self.model)


class WithoutAdapter:
    """The actor's own model without its adapter: no second model (verl ``ref_in_actor``, ``no_lora_adapter``)."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    @property
    def training(self) -> bool:
        """The actor's mode: it is one module."""
        return self.model.training

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        """The model; the adapter is on again at the end of the block, whatever happens in it."""
        with self.model.disable_adapter():
            yield self.model

    def state_dict(self) -> dict[str, Tensor]:
        """The base model's tensors, by its names."""
        return dict(_base_tensors(self.model))


def _with_adapter(module: nn.Module, config: Any) -> PeftModel:
    targets = config.target_modules
    if OmegaConf.is_config(targets):
        targets = OmegaConf.to_container(targets)
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*a tied layer is part of the adapter")  # refused below
            model = get_peft_model(module, lora)
    except (ValueError, TypeError) as error:
        where = f"actor_rollout_ref.model.target_modules={config.target_modules}"
        raise AdapterError(f"{where}: {first_line(error)}") from error
    _refuse_tied(model)
    model.eval()  # a new adapter begins in training mode, and the first log-probs are not trained on
    if config.enable_gradient_checkpointing:
        model.enable_input_require_grads()  # else the first checkpointed layer has no input that takes a gradient
    return model


def _refuse_tied(model: PeftModel) -> None:
    """Merged, a tied weight would be two, and the rollout keeps one."""
    shared: dict[int, list[str]] = {}
    for name, tensor in _base_tensors(model):
        shared.setdefault(tensor.data_ptr(), []).append(name)
    for name, layer in _adapted(model):
        tied = shared[layer.get_base_layer().weight.data_ptr()]
        if len(tied) > 1:
            raise AdapterError(
                f"actor_rollout_ref.model.target_modules: {' and '.join(tied)} are one tied weight, which an adapter "
                f"on {name} would make two; leave it out"
            )


@torch.no_grad()
def _merged(layer: LoraLayer) -> Tensor:
    """Weight of an adapted layer with its adapter added, a tensor of its own."""
    weight: Tensor = layer.get_base_layer().weight.detach().clone()
    for adapter in layer.active_adapters:
        weight += layer.get_delta_weight(adapter)
    return weight


def _base_tensors(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model without its adapter, by its own names, detached."""
    for name, tensor in model.get_base_model().state_dict().items():
        if _is_base(name):
            yield _base_name(name), tensor.detach()


def _is_base(name: str) -> bool:
    return ".lora_" not in name


def _base_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _adapted(model: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    """Layers that carry the adapter, by the base model's names."""
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer
