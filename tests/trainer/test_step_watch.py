"""What the trace says of an optimiser step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lineage import hooks
from lineage.trainer.step_watch import StepWatch


@pytest.fixture
def tracing(tmp_path):
    """A recorder that traces."""
    with hooks.recording(tmp_path) as recorder:
        recorder.step(1)
        yield


def model():
    """Two layers, of which the bias of the second is the smallest tensor, and an optimiser."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return module, torch.optim.AdamW(module.parameters(), lr=0.5, weight_decay=0.1)


def stepped(module, optimizer, watch, *, unused=(), dead=()):
    """One step, in which some tensors have no gradient and some one of 0; what was watched and what is said of it."""
    watch.begin()
    optimizer.zero_grad()
    assert watch.gradient() is None
    module(torch.ones(1, 4)).sum().backward()
    for name, parameter in module.named_parameters():
        if name in unused:
            parameter.grad = None
        elif name in dead:
            parameter.grad.zero_()
    seen = watch.gradient()
    optimizer.step()
    return seen, watch.attrs([watch.norms()])


def test_a_step_says_what_it_was_given(tracing):
    """The optimiser's settings and count, the watched number as it was, and which tensors had no gradient."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer)
    seen, attrs = stepped(module, optimizer, watch, unused=["0.bias"], dead=["1.weight"])
    assert seen == 1.0 == float(attrs["gradient"])
    assert (attrs["optimizer_steps"], attrs["without_gradient"], attrs["weak_gradient"]) == ("1", "0.bias", "1.weight")
    assert (attrs["weight_decay"], attrs["betas"], attrs["maximize"]) == ("0.1", "0.9,0.999", "false")
    optimizer.param_groups[0]["weight_decay"] = 0.2
    later = stepped(module, optimizer, watch)[1]
    assert (later["optimizer_steps"], later["without_gradient"], later["weight_decay"]) == ("2", "", "0.2")
    assert "weak_gradient" not in later  # looked at once in a while


def test_groups_that_differ_are_listed(tracing):
    """Of what they have in common there is one value; the learning rate is said where it is not one."""
    module, optimizer = model()
    first, *others = optimizer.param_groups[0]["params"]
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.0}]
    grouped = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1)
    watch = StepWatch(module, grouped)
    attrs = stepped(module, grouped, watch)[1]
    assert (attrs["weight_decay"], attrs["betas"]) == ("0.1;0.0", "0.9,0.999")
    assert "lr" not in attrs
    grouped.param_groups[1].update(lr=0.25, betas=(0.5, 0.9))
    attrs = stepped(module, grouped, watch)[1]
    assert (attrs["lr"], attrs["betas"], watch.lr) == ("0.5;0.25", "0.9,0.999;0.5,0.9", 0.5)


def test_a_step_that_was_not_taken_says_so(tracing):
    """Nothing was given; the learning rate is what it would have been, or what it was if somebody sets it back."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer)
    stepped(module, optimizer, watch)
    optimizer.param_groups[0]["lr"] = 0.25
    assert watch.lr == 0.5
    watch.begin()
    assert watch.lr == 0.25
    assert watch.attrs([watch.norms()])["optimizer_steps"] == "1"
    assert not {"gradient", "without_gradient"} & watch.attrs([watch.norms()]).keys()


def test_a_tensor_without_a_gradient_takes_no_step(tracing):
    """Where it is the one that is watched the count does not move, and the row says why."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer)
    seen, attrs = stepped(module, optimizer, watch, unused=["1.bias"])
    assert seen is None
    assert (attrs["gradient"], attrs["optimizer_steps"]) == ("none", "0")


def test_nothing_is_looked_at_untraced():
    """Without a trace a step costs what it costs."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer)
    assert "gradient" not in stepped(module, optimizer, watch)[1]


def test_where_the_number_is_another_ranks_nothing_is_said_of_it(tracing):
    """The count and the settings are the same on every rank."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer, holds=False)
    seen, attrs = stepped(module, optimizer, watch)
    assert seen is None
    assert (attrs["gradient"], attrs["optimizer_steps"]) == ("none", "1")


def test_the_norm_of_a_gradient_is_that_of_all_its_parts(tracing):
    """What each process holds of it may be next to nothing, and is left out where one of them did not look."""
    module, optimizer = model()
    watch = StepWatch(module, optimizer)
    stepped(module, optimizer, watch)
    none, some = [0.0] * 4, [0.0, 1.0, 0.0, 1.0]
    assert watch.attrs([none, some])["weak_gradient"] == "0.weight,1.weight"
    assert "weak_gradient" not in watch.attrs([some, None])
