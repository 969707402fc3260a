"""What an optimiser step is given, and how many it has taken: what the trace says of each.

Of the gradient one number is watched, the first element of the smallest tensor that trains. It says whether the
gradient begins empty, goes on from one micro-batch to the next, and reaches the step clipped and with its own sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lineage import hooks
from lineage.trainer.engine.sharded import local, replicas

#: settings of a parameter group that the trace holds against the configuration
SETTINGS = ("weight_decay", "betas", "eps", "maximize", "amsgrad")
# Of so many steps one is looked at tensor by tensor, from the first on: it takes a pass over the gradients.
_LOOK_EVERY = 64
# A gradient so many times AdamW's eps moves a weight by about the learning rate.
_FELT = 100.0


class StepWatch:
    """Watches one optimiser, while tracing; it changes nothing and makes the host wait for nothing.

    Args:
        module: the model, for the names of its parameters.
        optimizer: of some of them.
        holds: this process has the watched number: where tensors are sharded it is the first rank alone, and the
            others have nothing to say of it.

    Attributes:
        position: of the watched tensor among those of the optimiser.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, holds: bool = True) -> None:
        self.optimizer = optimizer
        self.holds = holds
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = [names.get(id(parameter), "") for parameter in self._trained]
        # of equal ones the last: of an adapter the first has no gradient before the second has moved
        self.position = min(reversed(range(len(self._trained))), key=lambda at: self._trained[at].numel())
        self._watched = self._trained[self.position]
        self._rates: list[float] | None = None
        self._given: float | Tensor | None = None
        self._without: list[str] = []
        self._norms: list[Tensor] | None = None
        self._settings: tuple[list[Any], dict[str, str]] = ([], {})
        optimizer.register_step_pre_hook(self._stepping)

    def begin(self) -> None:
        """A mini-batch begins: what is known is of the one before."""
        self._rates = self._given = self._norms = None
        self._without = []

    def gradient(self) -> float | Tensor | None:
        """The watched number as it is now, on a device as a copy that stays there; None where there is no gradient."""
        grad = self._watched.grad
        if grad is None or not self.holds:
            return None
        number = local(grad).as_strided((), ())
        return number.item() if number.is_cpu else number.clone()

    @property
    def lr(self) -> float:
        """The learning rate of the first group: what the step was taken with, or would have been."""
        return (self._rates or self._rates_now())[0]

    def norms(self) -> list[float] | None:
        """Of each gradient the norm of what is held here, once the host has waited; None where nobody looked."""
        return None if self._norms is None else torch.stack(self._norms).tolist() if self._norms else []

    def attrs(self, norms: Sequence[list[float] | None]) -> dict[str, str]:
        """What the row of the step says, once the host has waited for the device.

        Args:
            norms: what :meth:`norms` gives, of every process.

        A setting in which the optimiser's groups differ has a value for each, ``;`` between them; ``lr`` is said where
        they differ in it. ``optimizer_steps`` is the optimiser's own count. Where a step was taken, ``gradient`` is the
        watched number as it was given it, ``none`` where there was none; ``without_gradient`` names the tensors that
        had none at all, and ``weak_gradient``, where somebody looked, those whose own was next to nothing.
        """
        said = dict(self._said_settings())
        if len(set(rates := self._rates or self._rates_now())) > 1:
            said["lr"] = _of_groups(rates)
        said["optimizer_steps"] = str(self._taken())
        if self._rates is not None:
            said["gradient"] = "none" if self._given is None else repr(float(self._given))
            said["without_gradient"] = ",".join(self._without)
        looked = [process for process in norms if process is not None]
        if looked and len(looked) == len(norms):
            said["weak_gradient"] = ",".join(self._weak([math.hypot(*parts) for parts in zip(*looked, strict=True)]))
        return said

    def _stepping(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not hooks.recorder().tracing:
            return
        self._given, self._rates = self.gradient(), self._rates_now()
        pairs = zip(self._names, self._trained, strict=True)
        self._without = [name for name, parameter in pairs if parameter.grad is None]
        if self._taken() % _LOOK_EVERY == 0:
            grads = (parameter.grad for parameter in self._trained)
            self._norms = [_norm(grad) for grad in grads if grad is not None]

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _taken(self) -> int:
        """Steps by the optimiser's own count, which a checkpoint keeps."""
        return int(self.optimizer.state.get(self._watched, {}).get("step", 0))

    def _weak(self, norms: list[float]) -> list[str]:
        absent, measured = set(self._without), iter(norms)
        eps = float(self.optimizer.param_groups[0].get("eps", 0.0))
        return [
            name
            for name, parameter in zip(self._names, self._trained, strict=True)
            if name not in absent and not next(measured) > _FELT * eps * parameter.numel() ** 0.5
        ]

    def _said_settings(self) -> dict[str, str]:
        values = [[group.get(name) for group in self.optimizer.param_groups] for name in SETTINGS]
        if values != self._settings[0]:
            said = {name: _of_groups(of) for name, of in zip(SETTINGS, values, strict=True) if of[0] is not None}
            self._settings = (values, said)
        return self._settings[1]


def _norm(grad: Tensor) -> Tensor:
    """Of what is held here: its square, added up over all processes, is that of the whole gradient."""
    norm, copies = torch.linalg.vector_norm(local(grad)).float(), replicas(grad)
    return norm if copies == 1 else norm / copies**0.5


def _of_groups(values: list[Any]) -> str:
    """One value where the groups are alike, else all of them in order, ``;`` between them."""
    alike = all(value == values[0] for value in values)
    return _text(values[0]) if alike else ";".join(map(_text, values))


def _text(value: Any) -> str:
    """A setting as the trace keeps it: a number, ``true``, or several numbers between commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, (tuple, list)) else repr(value)
