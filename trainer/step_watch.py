"""What an optimiser step is given, and how many it has taken: what the trace says of each.

Of the gradient one number is watched, the first element of the smallest tensor that trains. It says whether the
gradient begins empty, goes on from one micro-batch to the next, and reaches the step clipped and with its own sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lineage import hooks

#: settings of a parameter group that the trace holds against the configuration
SETTINGS = ("weight_decay", "betas", "eps", "maximize")
# A gradient so many times AdamW's eps moves a weight by about the learning rate.
_FELT = 100.0


class StepWatch:
    """Watches one optimiser, while tracing; it changes nothing and makes the host wait for nothing.

    Args:
        module: the model, for the names of its parameters.
        optimizer: of some of them.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = [names.get(id(parameter), "") for parameter in self._trained]
        # of equal ones the last: of an adapter the first has no gradient before the second has moved
        self._watched = min(reversed(self._trained), key=lambda parameter: parameter.numel())
        self._given: Tensor | None = None
        self._norms: Tensor | None = None
        self._lr: float | None = None
        self._look_at_all = False
        optimizer.register_step_pre_hook(self._stepping)

    def begin(self, look_at_all: bool) -> None:
        """A mini-batch begins.

        Args:
            look_at_all: also which tensors the step is given no gradient for, which costs a pass over all of them.
        """
        self._given = self._norms = self._lr = None
        self._look_at_all = look_at_all

    def gradient(self) -> Tensor | None:
        """The watched number as it is now, None where there is no gradient."""
        grad = self._watched.grad
        return None if grad is None else grad.reshape(-1)[0].clone()

    @property
    def lr(self) -> float:
        """The learning rate: what the step was taken with, or would have been."""
        return float(self.optimizer.param_groups[0]["lr"]) if self._lr is None else self._lr

    def attrs(self) -> dict[str, str]:
        """What the row of the step says, once the host has waited for the device.

        ``optimizer_steps`` is the optimiser's own count. ``gradient`` is the watched number as the step was given it,
        ``none`` where there was none; it is absent where no step was taken.
        ``without_gradient`` names the tensors that trained by next to nothing; it is absent where nobody looked.
        """
        group = self.optimizer.param_groups[0]
        said = {name: _text(group[name]) for name in SETTINGS if name in group}
        state = self.optimizer.state.get(self._watched, {})
        said["optimizer_steps"] = str(int(state.get("step", 0)))
        if self._lr is not None:
            said["gradient"] = "none" if self._given is None else repr(float(self._given))
        if self._norms is not None:
            said["without_gradient"] = ",".join(self._unfelt(self._norms.tolist(), float(group.get("eps", 0.0))))
        return said

    def _stepping(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not hooks.recorder().tracing:
            return
        self._given, self._lr = self.gradient(), float(optimizer.param_groups[0]["lr"])
        if self._look_at_all:
            none = torch.zeros((), device=self._watched.device)
            self._norms = torch.stack(
                [none if one.grad is None else torch.linalg.vector_norm(one.grad).float() for one in self._trained]
            )

    def _unfelt(self, norms: list[float], eps: float) -> Iterator[str]:
        for name, parameter, norm in zip(self._names, self._trained, norms, strict=True):
            if not norm > _FELT * eps * parameter.numel() ** 0.5:
                yield name


def _text(value: Any) -> str:
    """A setting as the trace keeps it: a number, ``true``, or several numbers between commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, (tuple, list)) else repr(value)
