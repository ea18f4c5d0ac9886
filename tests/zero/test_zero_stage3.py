"""ZeRO stage 3: the model computes what it would whole, with rows at rest and at most two units gathered."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.comm import Communicator, record
from fastpar.pipeline import Pipeline, add_unshard, make_schedule
from fastpar.precision import Precision
from fastpar.zero.flat import MemoryPool
from fastpar.zero.groups import Groups
from fastpar.zero.options import ShardOptions
from fastpar.zero.stage3 import Stage3
from fastpar.zero.unit_plan import plan_units, small_names
from tests.dist import run_ranks
from tests.zero.zero_ranks import whole_values

TRANSPORTS = ("auto", "torch")  # gathers that copy at once, and gathers that are begun early


class Layer(nn.Module):
    """13 rows: uneven on 2 and 3 ranks."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Text(nn.Module):
    """A model with layers, a tied embedding and head, and a parameter that the model's own forward reads."""

    def __init__(self, layers: int = 3, width: int = 13, vocab: int = 17) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(5, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids_of(step: int, rank: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(17, (2, 5), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


def make(model: nn.Module, transport: str = "auto", **options: Any) -> Stage3:
    groups = Groups(dist.group.WORLD, is_sharded=True)
    groups.shard = Communicator(dist.group.WORLD, transport=transport)
    options.setdefault("persistent_share", 0.02)
    budget = options.pop("budget", None)
    return Stage3(model, groups, ShardOptions(stage=3, **options), budget=budget)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def update(stage3: Stage3, optimizer: torch.optim.Optimizer) -> None:
    stage3.released()
    optimizer.step()
    for param in stage3.params:
        if param.model_rows is not None:
            param.model_rows.copy_(param.optim_param.detach()._local_tensor)
    optimizer.zero_grad()
    stage3.published()


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def plain_run(size: int, steps: int, accumulate: int = 1, make_model: Any = Text) -> dict[str, Tensor]:
    """What `size` ranks compute, in one process: each rank's gradient for itself, and their mean in the order of
    ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: sums in norms depend on it
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(size):
            optimizer.zero_grad()
            for microbatch in range(accumulate):
                (loss_of(model, ids_of(step, rank, microbatch)) / accumulate).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / size if name in sums else None
        optimizer.step()
    torch.set_num_threads(threads)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sharded_run(steps: int, accumulate: int, transport: str, options: dict[str, Any]) -> dict[str, Tensor]:
    model = Text()
    stage3 = make(model, transport, **options)
    optimizer = optimizer_of([param.optim_param for param in stage3.params])
    for step in range(steps):
        for microbatch in range(accumulate):
            stage3.reducer.is_syncing = microbatch == accumulate - 1
            (loss_of(model, ids_of(step, dist.get_rank(), microbatch)) / accumulate).backward()
        update(stage3, optimizer)
    assert stage3.whole_bytes == 0
    return whole(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_the_mean_of_plain_gradients_bit_for_bit(size: int, transport: str) -> None:
    expected = plain_run(size, 6)
    for found in run_ranks(size, sharded_run, 6, 1, transport, {}):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"units": ["layers.1", "head"]}, {"budget": 0}])
def test_how_and_when_units_are_gathered_does_not_change_the_bits(options: dict[str, Any]) -> None:
    expected = plain_run(2, 3)
    for found in run_ranks(2, sharded_run, 3, 1, "torch", options):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_gradients_summed_before_they_travel_are_those_of_one_backward() -> None:
    expected = plain_run(2, 3, accumulate=3)
    for found in run_ranks(2, sharded_run, 3, 3, "auto", {}):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


# ---- memory and words


def allocated(stage3: Stage3) -> int:
    """Bytes of whole parameters that exist now, by the storages themselves."""
    return sum(
        local_of(part.versioned[0]).untyped_storage().nbytes()  # which is all of the part's
        for unit in stage3.units
        for part in unit.parts
    )


def local_of(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def watch_memory(stage3: Stage3) -> list[int]:
    """Notes what exists before and after every module's forward, and whenever a gradient is there."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(allocated(stage3))

    for module in stage3.model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for param in stage3.params:
        param.parameter.register_hook(look)
    return seen


class Stack(nn.Module):
    """Layers and nothing beside them."""

    def __init__(self, layers: int = 5, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def memory_run(transport: str) -> tuple[int, int, int, int, int]:
    model = Stack()
    stage3 = make(model, transport, persistent_share=0.0)
    seen = watch_memory(stage3)
    x = torch.randn(3, 16)
    for _ in range(3):
        model(x).sum().backward()
    rows = sum(local_of(parameter).numel() for parameter in model.parameters())
    assert stage3.pool.peak == stage3.peak_bytes  # what is kept included
    return max(seen), stage3.peak_bytes, stage3.units[0].nbytes, allocated(stage3), rows


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_at_most_two_units_are_whole_and_none_at_rest(transport: str) -> None:
    for most, peak, unit, sharded, rows in run_ranks(2, memory_run, transport):
        assert unit == 1088  # 16 x 16 weights and 16 biases, whose places begin at multiples of 64 bytes
        assert most == peak == (unit if transport == "auto" else 2 * unit)
        assert sharded == 0
        assert rows == 5 * (16 * 16 + 16) // 2


def words_run(reshard: bool, transport: str) -> dict[str, int]:
    model = Stack()
    stage3 = make(model, transport, persistent_share=0.0, reshard_after_forward=reshard)
    words: dict[str, int] = {}
    with record() as log:
        model(torch.randn(3, 16)).sum().backward()
    for entry in log:
        if entry.dtype == torch.float32:
            words[entry.op] = words.get(entry.op, 0) + entry.numel
    words["calls"] = sum(entry.op == "all_gather" and entry.dtype == torch.float32 for entry in log)
    words["persistent"] = len(stage3.persistent)
    return words


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_travel_twice_and_gradients_once(transport: str) -> None:
    numel = 5 * (16 * 16 + 16)
    for words in run_ranks(2, words_run, True, transport):
        assert words == {"all_gather": 2 * numel, "reduce_scatter": numel, "calls": 10, "persistent": 0}
    for words in run_ranks(2, words_run, False, transport):
        assert words == {"all_gather": numel, "reduce_scatter": numel, "calls": 5, "persistent": 0}


def order_run() -> tuple[list[str], list[str]]:
    """What is begun when, with layers that run in another order than they are registered in."""
    model = Stack(4)
    stage3 = make(model, "torch", persistent_share=0.0)
    events: list[str] = []
    for unit in stage3.units:
        launch = unit.launch
        unit.launch = lambda pool, launch=launch, unit=unit: (events.append("begin " + unit.name[-1]), launch(pool))[1]
        stage3.model.get_submodule(unit.name).register_forward_hook(
            lambda *_, unit=unit: events.append("end " + unit.name[-1])
        )
    order = [model.layers[index] for index in (2, 0, 3, 1)]

    def forward(x: Tensor) -> Tensor:
        for layer in order:
            x = layer(x)
        return x

    model.forward = forward
    x = torch.randn(3, 16)
    model(x).sum().backward()
    first = list(events)
    events.clear()
    model(x).sum().backward()
    return first, events


def test_the_next_unit_is_begun_before_one_runs_in_the_order_of_the_last_pass() -> None:
    for _, second in run_ranks(2, order_run):
        forward = ["begin 2", "begin 0", "end 2", "begin 3", "end 0", "begin 1", "end 3", "end 1"]
        assert second == [*forward, "begin 1", "begin 3", "begin 0", "begin 2"]


# ---- what models do


def equal_to_plain(make_model: Any, run: Any, options: dict[str, Any] | None = None, passes: int = 2) -> list[str]:
    """Names of parameters whose gradient is another than that of the whole model on the same data. `run(model, step)`
    does forward and backward."""
    plain, model = make_model(), make_model()
    stage3 = make(model, **(options or {}))
    for step in range(passes):
        run(plain, step)
        run(model, step)
    assert stage3.whole_bytes == 0
    assert stage3.peak_bytes <= stage3.budget + max(unit.nbytes for unit in stage3.units)
    wrong = []
    for (name, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        found = parameter.grad
        if isinstance(found, DTensor):
            found = found.full_tensor()
        if (found is None) != (expected.grad is None) or (found is not None and not torch.equal(found, expected.grad)):
            wrong.append(name)
    return wrong


class Two(nn.Module):
    """Several inputs, outputs in containers, a value that every layer reads, layers used twice, frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Cross() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        memory = self.source(x)
        total = x.new_zeros(())
        for layer in (*self.layers, self.layers[0]):
            found = layer(x, memory=memory)
            x, total = found["x"], total + found["aux"][0]
        return x.sum() + total


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor, *, memory: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.a(x) + self.b(memory)) * self.scale
        return {"x": x, "aux": (x.square().mean(),)}


def backward_of_two(model: nn.Module, step: int) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
    model(x).backward()


def step_of_text(model: nn.Module, step: int) -> None:
    loss_of(model, ids_of(step, 0)).backward()


def two_forwards(model: nn.Module, step: int) -> None:
    losses = [loss_of(model, ids_of(step, 0, microbatch)) for microbatch in range(3)]
    with torch.no_grad():
        model(ids_of(9, 0))
    for loss in losses:
        loss.backward()


def twice_through_one_graph(model: nn.Module, step: int) -> None:
    loss = loss_of(model, ids_of(step, 0))
    loss.backward(retain_graph=True)
    loss.backward()


def model_run(transport: str) -> dict[str, list[str]]:
    options = {"transport": transport}
    return {
        "containers, frozen parameters, layers used twice": equal_to_plain(Two, backward_of_two, options),
        "several forwards before their backwards": equal_to_plain(Text, two_forwards, options),
        "a graph that is kept": equal_to_plain(Text, twice_through_one_graph, options),
        "frozen layers first": equal_to_plain(frozen_text, step_of_text, options),
        "a parameter that nothing uses": equal_to_plain(spare_text, step_of_text, options),
    }


def frozen_text() -> Text:
    model = Text()
    for module in (model.embed, model.layers[0], model.layers[2].up):
        module.requires_grad_(False)
    return model


def spare_text() -> Text:
    model = Text()
    model.layers[1].spare = nn.Parameter(torch.ones(13, 4))
    return model


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_those_of_the_whole_model(transport: str) -> None:
    for wrong in run_ranks(2, model_run, transport):
        assert wrong == {name: [] for name in wrong}


class Raw(nn.Module):
    """A layer whose own forward reads its parameters: no module within it is called."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


def raw_text() -> Text:
    model = Text()
    model.layers = nn.ModuleList([Raw() for _ in range(4)])
    return model


class Checkpointed(Text):
    """torch's own recomputation, around the layers."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


def under(policy: Any) -> Any:
    def run(model: nn.Module, step: int) -> None:
        if step == 0:
            fp.apply_recompute(model, policy)
        step_of_text(model, step)

    return run


def recomputed_first() -> Text:
    return fp.apply_recompute(Text(), fp.recompute.Segments(1))


def recompute_run(transport: str) -> dict[str, list[str]]:
    options = {"transport": transport}
    policies = {
        "full": fp.recompute.Full(),
        "segments": fp.recompute.Segments(2),
        "one segment": fp.recompute.Segments(1),
        "selective": fp.recompute.Selective(),
        "binomial": fp.recompute.Binomial(2),
    }
    found = {
        f"{name}, {kind.__name__}": equal_to_plain(kind, under(policy), options)
        for name, policy in policies.items()
        for kind in (Text, raw_text)
    }
    found["recompute, then stage 3"] = equal_to_plain(recomputed_first, step_of_text, options)
    for kind in (Checkpointed, Reentrant):
        found[kind.__name__] = equal_to_plain(kind, step_of_text, options)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_recomputed_layers_are_gathered_again(transport: str) -> None:
    for wrong in run_ranks(2, recompute_run, transport):
        assert wrong == {name: [] for name in wrong}


# ---- what goes wrong, and what is done by hand


class Choosing(nn.Module):
    """A layer of which each rank uses another part, and one part no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]) for _ in range(2)])
        for layer in self.layers:
            layer.forward = lambda x, rank, layer=layer: torch.tanh(layer[rank](x))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, rank)
        return x


def choosing_run(transport: str) -> dict[str, Tensor | None]:
    model = Choosing()
    make(model, transport)
    for _ in range(2):
        model(torch.ones(3, 8), dist.get_rank()).sum().backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_may_use_different_parameters_of_a_unit(transport: str) -> None:
    expected: dict[str, Tensor] = {}
    for rank in range(2):
        model = Choosing()
        for _ in range(2):
            model(torch.ones(3, 8), rank).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[name] = parameter.grad / 2
    assert len(expected) == 8
    for found in run_ranks(2, choosing_run, transport):
        assert {name for name, grad in found.items() if grad is None} == found.keys() - expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=0, atol=0, msg=name)


def failing_run(transport: str) -> tuple[list[str], list[int], list[str]]:
    """A forward that raises in a layer, and a backward that raises in a hook; then a step that goes well."""
    plain, model = Text(), Text()
    stage3 = make(model, transport)
    messages, whole_bytes = [], []

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    handle = model.layers[1].down.register_forward_hook(fail)
    try:
        model(ids_of(0, 0))
    except ArithmeticError as error:
        messages.append(str(error))
    whole_bytes.append(stage3.whole_bytes)
    handle.remove()
    loss = loss_of(model, ids_of(0, 0))
    handle = stage3.params[5].parameter.register_hook(fail)
    try:
        loss.backward()
    except ArithmeticError as error:
        messages.append(str(error))
    handle.remove()
    stage3.reducer.forget_sums(stage3.params)
    for parameter in model.parameters():
        parameter.grad = None
    del loss
    step_of_text(model, 1)
    step_of_text(plain, 1)
    whole_bytes.append(stage3.whole_bytes)
    wrong = [
        name
        for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(parameter.grad.full_tensor(), expected.grad)
    ]
    return messages, whole_bytes, wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_forward_or_backward_leaves_nothing_behind(transport: str) -> None:
    for messages, whole_bytes, wrong in run_ranks(2, failing_run, transport):
        assert messages == ["on purpose", "on purpose"]
        assert whole_bytes[1] == 0
        assert wrong == []


def test_reading_freed_parameters_in_backward_is_an_error() -> None:
    """Backward of a graph that no hook watches: the layer's output is where nobody can look."""
    kept: list[Tensor] = []

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> None:
            kept.append(self.inner(x))

    model = nn.Sequential(Hiding(), Hiding())
    stage3 = make_alone(model, units=["0", "1"])
    model[0](torch.randn(2, 4, requires_grad=True))
    model[1](kept[-1])
    stage3.reshard()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 100000"):
        kept[-1].sum().backward()


def make_alone(model: nn.Module, **options: Any) -> Stage3:
    return Stage3(model, Groups(None, is_sharded=True), ShardOptions(stage=3, persistent_share=0.0, **options))


def test_an_update_between_forward_and_backward_is_an_error() -> None:
    model = Stack(2)
    stage3 = make_alone(model)
    loss = model(torch.randn(3, 16, requires_grad=True)).sum()
    stage3.released()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    stage3.published()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_that_backward_has_left_without_gradients_warns() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = fp.zero.shard(model, optimizer, group=Communicator(None), stage=3)
    model(torch.randn(3, 16)).sum().backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=r"updates nothing.*loss\.backward\(\)"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # nothing has run since
        model(torch.randn(3, 16)).sum().backward()
        optimizer.step()
    zero.detach()


def test_values_written_to_shards_are_used_by_the_next_forward() -> None:
    model, other = Stack(2), Stack(2)
    make_alone(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    model.load_state_dict(other.state_dict())
    x = torch.randn(3, 16)
    assert torch.equal(model(x), other(x))


def _written_after_forwards() -> None:
    models = [Stack(2), Stack(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    fp.zero.shard(models[0], optimizers[0], stage=3)
    x, found = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), []
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).sum().item()  # a forward that no backward pass follows
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
            next(model.parameters()).clamp_(-0.1, 0.1)
        nn.init.zeros_(model.layers[1].bias)
        model(x).square().mean().backward()
        optimizer.step()
        found.append(model(x).detach())
    torch.testing.assert_close(found[0], found[1])


def test_parameters_may_be_written_to_after_a_forward_that_is_dropped() -> None:
    run_ranks(2, _written_after_forwards)


def test_a_replaced_parameter_is_an_error() -> None:
    model = Stack(2)
    make_alone(model)
    model.layers[1].weight = nn.Parameter(torch.zeros(16, 16))
    with pytest.raises(RuntimeError, match=r"'weight' of a Linear in unit 'layers.1'.*was replaced"):
        model(torch.randn(3, 16))


@pytest.mark.parametrize("change", [Tensor.clone, Tensor.double])
def test_a_parameter_with_other_memory_after_its_forward_is_an_error(change: Any) -> None:
    """As a router has that converts its classifier: nobody would train it."""

    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = change(self.weight.data)
            return x @ self.weight.to(x.dtype).t()

    model = Stack(2)
    model.layers[1] = Changing(16, 16)
    make_alone(model)
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight was converted or given other memory"):
        model(torch.randn(3, 16))


def by_hand_run(transport: str) -> tuple[list[int], list[bool], int, bool]:
    """A pipeline's UNSHARD, several microbatches, RESHARD."""
    plain, model = Text(), Text()
    stage3 = make(model, transport)
    sizes = [stage3.whole_bytes]
    model.unshard()
    sizes.append(stage3.whole_bytes)
    is_plain = [not isinstance(parameter, DTensor) for parameter in model.parameters()]
    with record() as log:
        for microbatch in range(2):
            step_of_text(model, microbatch)
            step_of_text(plain, microbatch)
    gathers = sum(entry.op == "all_gather" and entry.dtype == torch.float32 for entry in log)
    model.layers[0].reshard()
    sizes.append(stage3.whole_bytes)
    model.reshard()
    sizes.append(stage3.whole_bytes)
    equal = all(
        torch.equal(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return sizes, is_plain, gathers, equal


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_units_that_are_unsharded_by_hand_stay_whole(transport: str) -> None:
    for sizes, is_plain, gathers, equal in run_ranks(2, by_hand_run, transport):
        assert sizes[0] == sizes[3] == 0
        assert sizes[1] > sizes[2] > 0
        assert all(is_plain)
        assert gathers == 0
        assert equal


def test_detach_gives_the_whole_model_back() -> None:
    model, plain = Text(), Text()
    stage3 = make_alone(model)
    step_of_text(model, 0)
    stage3.detach()
    assert not hasattr(model, "unshard")
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    model(ids_of(0, 0))


# ---- layouts and dtypes


def precision_run(full: tuple[str, ...]) -> tuple[dict[str, Tensor], list[str]]:
    """bfloat16 parameters with float32 masters; returns the masters, and what does not agree with them."""
    model = Text()
    stage3 = make(model, precision=Precision.bf16(full))
    optimizer = optimizer_of([param.optim_param for param in stage3.params])
    for step in range(3):
        loss_of(model, ids_of(step, dist.get_rank())).backward()
        update(stage3, optimizer)
    masters = {param.name: param.optim_param.detach().full_tensor() for param in stage3.params}
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter.detach().full_tensor(), masters[name].to(parameter.dtype))
    ]
    return masters, wrong


@pytest.mark.parametrize("full", [(), ("*norm*",)])
def test_masters_are_updated_and_rounded_to_the_parameters(full: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    model = Text()
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policy = Precision.bf16(full)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy.param_dtype(name, torch.float32))
    optimizer = optimizer_of(masters.values())
    for step in range(3):
        grads: list[dict[str, Tensor]] = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, ids_of(step, rank)).backward()
            grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for name in masters:
            masters[name].grad = (grads[0][name].float() + grads[1][name].float()) / 2
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name])
    torch.set_num_threads(2)
    for found, wrong in run_ranks(2, precision_run, full):
        assert wrong == []
        for name, expected in masters.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0, msg=name)


def grid_run(replicate: int, tp: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Sharded over two ranks, within replicas or with tensor parallelism."""
    mesh = fp.init_mesh(dp_replicate=replicate, dp_shard=2, tp=tp)
    model = Blocks()
    if tp > 1:
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        fp.parallelize(model, mesh, plan=plan)
    stage3 = Stage3(model, Groups(mesh, is_sharded=True), ShardOptions(stage=3, persistent_share=0.02))
    optimizer = optimizer_of([param.optim_param for param in stage3.params])
    for step in range(3):
        data = mesh.rank("dp")
        generator = torch.Generator().manual_seed(10 * step + data)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        update(stage3, optimizer)
    placements = {name: str(parameter.placements) for name, parameter in model.named_parameters()}
    return whole(model), placements


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("replicate", "tp"), [(2, 1), (1, 2)])
def test_replicas_and_tensor_parallel_layers_compose(replicate: int, tp: int) -> None:
    model = Blocks()
    optimizer = optimizer_of(model.parameters())
    size = 2 * replicate
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            generator = torch.Generator().manual_seed(10 * step + rank)
            (model(torch.randn(4, 8, generator=generator)).square().mean() / size).backward()
        optimizer.step()
    for found, placements in run_ranks(4, grid_run, replicate, tp):
        for name, parameter in model.named_parameters():
            # Adam amplifies the rounding of small gradients, whose sums associate otherwise
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)
        if tp > 1:
            assert "Shard(dim=0)" in placements["layers.0.down.weight"]
            assert "Shard(dim=1)" in placements["layers.0.down.weight"]


def evaluation_run(transport: str) -> tuple[bool, int, list[int]]:
    plain, model = Text(), Text()
    stage3 = make(model, transport, reshard_after_forward=False)
    sizes = []
    with torch.inference_mode():
        equal = torch.equal(model(ids_of(0, 0)), plain(ids_of(0, 0)))
        sizes.append(stage3.whole_bytes)
    with torch.no_grad():
        equal = equal and torch.equal(model(ids_of(1, 0)), plain(ids_of(1, 0)))
        sizes.append(stage3.whole_bytes)
        part = model.layers[1].up(torch.ones(2, 13))  # a module within a unit, called alone
        equal = equal and torch.equal(part, plain.layers[1].up(torch.ones(2, 13)))
    return equal, stage3.whole_bytes, sizes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_evaluation_frees_units_and_parts_run_alone(transport: str) -> None:
    for equal, left, sizes in run_ranks(2, evaluation_run, transport):
        assert equal
        assert sizes == [0, 0]
        assert left == 13 * 26 * 4 * 2 + 208 + 64 + 64 or left > 0  # the part's unit, until room is needed


def test_kept_memory_goes_to_the_next_of_its_size_and_never_beyond_the_limit() -> None:
    pool = MemoryPool(limit=300)
    first, second = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    pool.lend(first.untyped_storage(), 200)
    address = first.untyped_storage().data_ptr()
    pool.take_back(first.untyped_storage())
    assert (first.untyped_storage().nbytes(), pool.nbytes) == (0, 200)
    pool.lend(second.untyped_storage(), 200)
    assert second.untyped_storage().data_ptr() == address
    pool.take_back(second.untyped_storage())
    pool.lend(first.untyped_storage(), 150)  # the 200 that are kept would make it 350
    assert (pool.nbytes, pool.peak) == (150, 200)
    pool.take_back(first.untyped_storage())
    pool.release()
    assert pool.nbytes == 0


# ---- units


def names_of(model: nn.Module, units: Any = None) -> dict[str, list[str]]:
    return {plan.name: plan.names for plan in plan_units(model, units)}


def test_a_sequence_of_layers_between_others_is_cut_too():
    model = nn.Sequential(nn.Embedding(17, 13), Layer(), nn.Identity(), Layer(), nn.Linear(13, 17))
    assert [plan.name for plan in plan_units(model)] == ["0", "1", "3", "4"]
    assert [plan.name for plan in plan_units(nn.Sequential(nn.Embedding(17, 13), nn.Linear(13, 17)))] == [""]


def test_units_are_layers_and_what_stands_beside_them() -> None:
    layer = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
    assert names_of(Text(layers=2)) == {
        "": ["position"],
        "embed": ["embed.weight"],  # and of the head, which holds the same weight
        "layers.0": [f"layers.0.{name}" for name in layer],
        "layers.1": [f"layers.1.{name}" for name in layer],
        "norm": ["norm.weight", "norm.bias"],
    }
    (tied,) = [plan for plan in plan_units(Text()) if plan.name == "embed"]
    assert [type(module) for module in tied.modules] == [nn.Embedding, nn.Linear]


def test_given_units_leave_the_rest_to_the_model() -> None:
    model = Text(layers=2)
    found = names_of(model, ["layers.0.up", ("layers.0", model.layers[1].norm)])
    assert found["layers.0.up"] == ["layers.0.up.weight", "layers.0.up.bias"]
    assert found["layers.0"] == [
        *("layers.0.norm.weight", "layers.0.norm.bias", "layers.0.down.weight"),
        *("layers.1.norm.weight", "layers.1.norm.bias"),
    ]
    assert found[""][:2] == ["position", "embed.weight"]
    assert sorted(name for names in found.values() for name in names) == sorted(dict(model.named_parameters()))


def test_a_weight_that_layers_share_is_a_unit_of_its_own() -> None:
    model = Text(layers=3)
    for layer in model.layers[1:]:
        layer.down.weight = model.layers[0].down.weight
    plans = {plan.name: plan for plan in plan_units(model)}
    assert plans["layers.0.down"].names == ["layers.0.down.weight"]
    assert plans["layers.0.down"].modules == [layer.down for layer in model.layers]


def test_what_models_share_is_gathered_when_the_outermost_module_of_it_runs() -> None:
    trunk = Text(layers=2)
    plans = {plan.name: plan for plan in plan_units(nn.ModuleList(nn.Sequential(trunk, nn.Tanh()) for _ in range(2)))}
    assert [plan.modules for plan in plans.values()] == [[trunk]]


class Lists(nn.Module):
    """Reads parameters of lists and dicts, which have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gates = nn.ParameterList(nn.Parameter(torch.rand(5, 5)) for _ in range(2))
        self.held = nn.ModuleDict({"ends": nn.ParameterDict({"last": nn.Parameter(torch.rand(5, 3))})})
        self.sides = nn.ModuleList(nn.ModuleDict({"w": nn.ParameterList([torch.rand(5, 5)])}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate, side in zip(self.layers, self.gates, self.sides, strict=True):
            x = torch.tanh(layer(x) @ gate @ side["w"][0])
        return x @ self.held["ends"]["last"]


def lists_run() -> list[dict[str, Tensor]]:
    found = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), Lists())
        fp.zero.shard(model, torch.optim.SGD(model.parameters()), stage=stage, persistent_share=0.0)
        model(torch.full((2, 5), dist.get_rank() + 0.5)).square().sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})  # type: ignore[union-attr]
    return found


def test_parameters_in_lists_go_with_the_module_that_reads_them() -> None:
    assert {plan.name: len(plan.names) for plan in plan_units(Lists())} == {"": 5, "layers.0": 2, "layers.1": 2}
    for stage2, stage3 in run_ranks(2, lists_run):
        for name, grad in stage2.items():
            torch.testing.assert_close(stage3[name], grad, msg=name)


def test_units_that_do_not_fit_are_errors() -> None:
    model = Text()
    with pytest.raises(ValueError, match=r"the model has no module 'layers.7'"):
        plan_units(model, ["layers.7"])
    with pytest.raises(ValueError, match="this Linear is not a module of the model"):
        plan_units(model, [nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="'head' is in two units"):
        plan_units(model, ["head", ("norm", "head")])
    with pytest.raises(ValueError, match="persistent_share must be between 0 and 1, got 2"):
        ShardOptions(stage=3, persistent_share=2).check(model, None)


def test_the_smallest_parameters_stay_persistent_within_a_share() -> None:
    numels = {"scale": 1, "bias": 10, "norm": 10, "weight": 979}
    assert small_names(numels, 0.0) == {"scale"}
    assert small_names(numels, 0.011) == {"scale", "bias"}
    assert small_names(numels, 0.021) == {"scale", "bias", "norm"}
    assert small_names(numels, 1.0) == set(numels)


# ---- beside other parts


def pipeline_run(name: str, is_unsharded: bool) -> tuple[list[str], int]:
    """Two stages, each on one rank with its parameters in stage 3. Gathered by the hooks, or by the schedule."""
    from tests.pipeline.pipeline_models import build_batch, build_parts, loss_fn, sequential_step

    schedule = make_schedule(name, 2, 4)
    if is_unsharded:
        schedule = add_unshard(schedule)
    parts, expected = build_parts(schedule.num_parts), build_parts(schedule.num_parts)
    mine = [parts[schedule.part_of(stage)] for stage in schedule.stages_of(dist.get_rank())]
    sharded = [make_alone(part) for part in mine]
    pipe = Pipeline(mine, schedule, dist.group.WORLD, loss=loss_fn)
    for step in range(2):
        x, target = build_batch(12, seed=step)
        pipe.step(x, target=target)
        sequential_step(expected, x, target, 4)
    pipe.close()
    wrong = [
        f"{part}.{name}"
        for part in {schedule.part_of(stage) for stage in schedule.stages_of(dist.get_rank())}
        for (name, found), plain in zip(parts[part].named_parameters(), expected[part].parameters(), strict=True)
        if found.grad is None or not torch.equal(found.grad, plain.grad)
    ]
    return wrong, sum(stage3.whole_bytes for stage3 in sharded)


@pytest.mark.parametrize("is_unsharded", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_stages_of_a_pipeline_may_be_sharded(name: str, is_unsharded: bool) -> None:
    for wrong, left in run_ranks(2, pipeline_run, name, is_unsharded):
        assert wrong == []
        assert left == 0


def compiled_run() -> list[str]:
    def whole_model(model: nn.Module, step: int) -> None:
        loss_of(torch.compile(model, backend="aot_eager"), ids_of(step, 0)).backward()  # type: ignore[arg-type]

    def layers(model: nn.Module, step: int) -> None:
        if step == 0:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        step_of_text(model, step)

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
    return equal_to_plain(Text, whole_model) + equal_to_plain(Text, layers)


def test_a_compiled_model_gives_the_same_gradients() -> None:
    for wrong in run_ranks(2, compiled_run):
        assert wrong == []


class Routes(nn.Module):
    """Three layers of one shape, of which a call runs the one it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.routes = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return self.routes[route](torch.tanh(self.first(x)))


def routed_steps(transport: str) -> None:
    comm = Communicator(dist.group.WORLD, transport=transport)
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], routes: list[int]) -> None:
        (sum(model(inputs[rank], routes[rank]).square().mean() for rank in ranks) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for units in (None, ["routes"]):
        model, plain = Routes(), Routes()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
        fp.zero.shard(model, optimizers[0], group=comm, stage=3, units=units, persistent_share=0.0)
        for routes in ([0, 0], [2, 2], [1, 0], [1, 1]):
            if routes == [1, 0] and units is None:  # of one shape, so that their sums would go unnoticed
                with pytest.raises(RuntimeError, match=f"last here: .*routes.{routes[comm.rank]}"):
                    model(inputs[comm.rank], routes[comm.rank]).square().mean().backward()
                assert all(parameter.grad is None for parameter in model.parameters())
                continue
            step(model, optimizers[0], [comm.rank], routes)
            step(plain, optimizers[1], [0, 1], routes)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(whole_values(model)[name], parameter.detach())


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_ranks_that_run_other_units_are_told(transport: str) -> None:
    run_ranks(2, routed_steps, transport)
