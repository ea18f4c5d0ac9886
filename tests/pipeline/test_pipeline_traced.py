"""Models of any shape, traced between their split points."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.pipeline.stages.partition import partition
from tests.pipeline.test_pipeline_partition import assert_same, forward_backward, full_gradients, gradients


class Encoder(nn.Module):
    """Down and up again, as a U-Net: early levels feed late ones; a parameter and a norm are used by several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.offset = nn.Parameter(torch.randn(6))
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, gate: Tensor, mask: Tensor | None = None) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(self.norm(x))) + self.offset
            kept.append(x)
        for layer in self.up:
            x = layer(x * gate + kept.pop() * self.scale)
        return self.norm(x * mask)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder, self.head = nn.Linear(4, 6), Encoder(), nn.Linear(6, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, input: Tensor, gate: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.stem(input)
        return {"out": self.head(self.encoder(hidden, gate, mask)), "stem": F.relu(hidden)}


POINTS = ["encoder.down.1", "encoder.up.0", "encoder.up.2"]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs() -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    return (torch.randn(5, 4), torch.rand(5, 1)), {"mask": torch.rand(5, 1)}


def run(model: Net, batch: int = 5) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the whole model."""
    (x, gate), keywords = inputs()
    outputs = model(x[:batch], gate[:batch], keywords["mask"][:batch])
    outputs["out"].sum().backward()
    return outputs, full_gradients(model)


def test_traced_parts_equal_the_model_with_skips_shared_modules_and_inputs_used_late() -> None:
    model = net()
    outputs, grads = run(copy.deepcopy(model))
    state = copy.deepcopy(model.state_dict())
    cut = partition(model, split_points=POINTS)
    tied = {group.names[group.parts[0]][0]: group.parts for group in cut.tied}
    assert tied == {"encoder.offset": (0, 1), "encoder.norm.weight": (0, 1, 3), "encoder.norm.bias": (0, 1, 3)}
    assert "mask" in cut.keywords(3)
    assert "mask" not in cut.keywords(2)
    assert {(e.source, e.destination) for e in cut.edges} == {(0, 2), (0, 3)}
    stages = cut.stages(range(4))
    args, keywords = inputs()
    found = forward_backward_dict(stages, args, keywords)
    assert torch.equal(found["out"], outputs["out"])
    assert torch.equal(found["stem"], outputs["stem"])
    united: dict[str, Tensor] = {}
    for stage in stages:
        part = stage.module.state_dict()
        assert set(part) & set(united) <= set(tied), stage.part
        united |= part
    trained = {name for name, value in united.items() if "running" in name or "num_batches" in name}
    assert_same({n: v for n, v in united.items() if n not in trained}, {n: state[n] for n in state if n not in trained})
    assert trained == {name for name in state if "running" in name or "num_batches" in name}
    grads_found = gradients(stages, cut.tied)
    assert set(grads_found) == set(grads)
    for name, grad in grads.items():  # three gradients of one tensor may meet in another order: exact to rounding
        torch.testing.assert_close(grads_found[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def forward_backward_dict(stages: Any, args: Any, keywords: Any) -> dict[str, Tensor]:
    """The gradient of the sum of "out", of a model that returns a dict."""
    last = stages[-1].module
    outputs: dict[str, Tensor] = {}

    def loss_of(_module: nn.Module, _args: Any, output: dict[str, Tensor]) -> Tensor:
        outputs.update(output)
        return output["out"].sum()

    handle = last.register_forward_hook(loss_of)
    forward_backward(stages, args, keywords)
    handle.remove()
    return outputs


def test_optional_inputs_are_refused_by_position() -> None:
    stages = partition(net(), split_points=POINTS).stages(range(4))
    args, keywords = inputs()
    with pytest.raises(TypeError, match=r"got 3 positional inputs; pass all but \['input', 'gate'\] by name"):
        stages[0].run((*args, keywords["mask"]))


def test_another_batch_size_needs_no_new_trace() -> None:
    model = net()
    outputs, _ = run(copy.deepcopy(model), batch=3)
    stages = partition(model, split_points=POINTS).stages(range(4))
    (x, gate), keywords = inputs()
    found = forward_backward_dict(stages, (x[:3], gate[:3]), {"mask": keywords["mask"][:3]})
    assert torch.equal(found["out"], outputs["out"])


def test_leaf_modules_keep_their_objects_and_others_are_freed() -> None:
    model = net()
    head, stem = model.head, weakref.ref(model.stem.weight)
    (stage,) = partition(model, split_points=POINTS).stages([3])
    gc.collect()
    assert stage.module.head is head
    assert stem() is None
    assert {n.split(".")[0] for n, _ in model.named_parameters()} == {"encoder", "head"}
    assert set(stage.module.state_dict()) == {
        name for name in net().state_dict() if name.startswith(("encoder.up.2.", "encoder.norm.", "head."))
    }
    assert torch.equal(copy.deepcopy(stage.module).head.weight, head.weight)


def test_parts_of_a_model_in_eval_mode_are_in_eval_mode() -> None:
    model = net().eval()
    model.encoder.up[2].train()  # as a user who tunes some statistics has it
    modes = {name: module.training for name, module in model.named_modules()}
    for stage in partition(model, split_points=POINTS).stages(range(4)):
        assert all(module.training == modes[name] for name, module in stage.module.named_modules())


class Reads(nn.Module):
    """Reads a weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(F.embedding(ids, self.table.weight)) @ self.table.weight.t()


def test_constants_of_the_traced_code_are_in_no_state_dict() -> None:
    model = Cases("apart")
    full = copy.deepcopy(model)
    x = torch.randn(2, 4)
    stages = partition(model, split_points=["a"]).stages([0, 1])
    assert torch.equal(forward_backward(stages, (x,)), full(x))
    assert_same({n: v for stage in stages for n, v in stage.module.state_dict().items()}, full.state_dict())
    assert vars(model).keys() == vars(full).keys()


def test_weights_read_inside_a_module_bring_the_module_along() -> None:
    torch.manual_seed(0)
    model = Reads()
    full = copy.deepcopy(model)
    ids, grad = torch.randint(0, 5, (3, 2)), torch.randn(3, 2, 5)
    expected = full(ids)
    expected.backward(grad)
    cut = partition(model, split_points=["fc"])
    assert [dict(group.names) for group in cut.tied] == [{0: ("table.weight",), 1: ("table.weight",)}]
    stages = cut.stages([0, 1])
    assert type(stages[1].module.table) is nn.Embedding
    assert torch.equal(forward_backward(stages, (ids,), None, grad), expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))


class Cases(nn.Module):
    """One thing that cannot be traced, or cut, per name."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.a, self.b, self.c = case, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *rest: Tensor, y: Tensor | None = None) -> Tensor:
        if self.case == "branch" and x.sum() > 0:
            return x
        if self.case == "dropout":
            return self.b(F.dropout(self.a(x), 0.1, self.training))
        if self.case == "rest":
            return self.b(self.a(x) + rest[0])
        if self.case == "apart":
            return self.c(self.b(torch.ones(4))) + self.a(x)
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("case", "points", "message"),
    [
        ("", ["aa"], r"split point 'aa' is no module of this model; near misses: \['a'"),
        ("", ["b", "a"], r"'a' is not called after \['b'\]"),
        ("branch", ["b"], "cannot be traced between its split points: symbolically traced"),
        ("dropout", ["b"], r"something else in training than in evaluation .*functional dropout"),
        ("rest", ["b"], r"the traced forward uses \*rest"),
        ("apart", ["b", "c"], r"part 1 uses nothing that part 0 computes \(split points \['b', 'c'\]\)"),
    ],
)
def test_what_cannot_be_traced_is_explained(case: str, points: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(Cases(case), split_points=points)


class Watched(nn.Module):
    """One thing per name that a graph does not keep: the parts would be another model."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.a, self.b, self.c = case, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.kept = 0, {"hidden": [torch.zeros(())]}
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 4.0) -> Tensor:
        if self.case == "no_grad":
            with torch.no_grad():
                x = self.a(x)
        if self.case == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                x = self.a(x).float()
        if self.case == "random":
            x = x + torch.randn(4)
        if self.case == "attribute":
            self.calls += 1
        if self.case == "container":
            self.kept["hidden"].append(x)
        if self.case == "training" and not self.training:
            x = x * 2
        if self.case == "type" and not isinstance(x, Tensor):
            x = x[0]
        hidden = self.a(x)
        if self.case == "mask" and mask is None:
            hidden = hidden.cumsum(1)
        if self.case == "norm":
            hidden = self.norm(hidden)
        out = self.b(hidden)
        if self.case == "written":
            hidden.mul_(2)
        if self.case == "norm":
            out = self.norm(out)
        return self.c(out * scale**0.5) + hidden + (0 if mask is None or self.case != "mask" else mask)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no_grad", "runs a with gradients enabled: False"),
        ("autocast", "runs a with autocast of cpu: torch.bfloat16"),
        ("random", "between its split points: it draws random numbers"),
        ("attribute", r"changes self\.calls of Watched, which"),
        ("container", r"changes self\.kept of Watched, which"),
        ("training", "something else in training than in evaluation"),
        ("type", "forward asks for the type of x"),
    ],
)
def test_what_a_graph_would_not_keep_is_refused(case: str, message: str) -> None:
    model = Watched(case)
    state, kept, drawn = dict(vars(model)), list(model.kept["hidden"]), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        partition(model, split_points=["b"])
    assert vars(model) == state
    assert len(model.kept["hidden"]) == len(kept)
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)


def test_hooks_of_traced_modules_are_refused() -> None:
    model = net()
    model.encoder.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ValueError, match=r"Encoder contains a split point.*its hook .* would not run"):
        partition(model, split_points=POINTS)
    model.encoder._forward_hooks.clear()
    model.encoder.norm.register_forward_hook(lambda module, args, output: output * 2)
    assert partition(model, split_points=POINTS).num_parts == 4


@pytest.mark.parametrize("case", ["", "mask"])
def test_an_optional_input_on_which_code_decides_has_to_be_given(case: str) -> None:
    torch.manual_seed(0)
    model = Watched(case)
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        without, given = model(x), model(x, mask, scale=9.0)
        stages = partition(model, split_points=["b"]).stages([0, 1])

        def run(**keywords: Any) -> Any:
            received, _ = stages[0].run((x,), keywords)
            return stages[1].run(received, keywords)[0]

        assert torch.equal(run(mask=mask, scale=9.0), given)
        if case == "":
            assert torch.equal(run(), without)
            return
        for missing in ({}, {"mask": None}):
            with pytest.raises(TypeError, match="the forward of Watched is another one without mask"):
                run(**missing)


def test_tensors_of_several_parts_are_not_written_to_by_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    stages = partition(Watched("written"), split_points=["b", "c"]).stages(range(3))
    with torch.no_grad():
        received, _ = stages[0].run((x,))
        with pytest.raises(RuntimeError, match="part 1 of Watched has written to a in place"):
            stages[1].run(received)
    stages = partition(Watched("norm"), split_points=["b"]).stages([0, 1])
    with pytest.raises(RuntimeError, match=r"part 0 of Watched has written to norm\.num_batches_tracked in place"):
        stages[0].run((x,))
    stages = partition(Watched("norm").eval(), split_points=["b"]).stages([0, 1])
    stages[0].run((x,))
