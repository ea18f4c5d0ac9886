"""`load_pretrained`: a model split over ranks from a folder, of which each rank reads what it keeps.

The model is built with parameters on the meta device, split, and filled. A rank needs memory for its shards, for one
layer of each kind and for the embeddings (see the note), and for one tensor that is converted.

Note: stand-ins
    `parallelize` runs the model and trials of its blocks, which the meta device cannot. So parameters get numbers for
    that time, and all layers share theirs: parameters whose paths differ in numbers alone lie in one memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.comm.agree import problem_of, raise_on_all
from fastpar.comm.ranges import annotate
from fastpar.context.region import Context
from fastpar.mesh import Mesh
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.api import parallelize
from fastpar.parallel.model_methods import same_draws
from fastpar.parallel.styles import Style
from fastpar.pretrained.conversions import Sources, sources_of
from fastpar.pretrained.folder import WeightFolder
from fastpar.tensor import local_tensor
from fastpar.tensor.binding import GroupLike
from fastpar.tensor.held import HeldTensor, index_of, take

_log = logging.getLogger("fastpar.load_pretrained")
_SHOWN = 6  # names in an error


@checked(computed=False, but=("model", "plan"))
def load_pretrained(
    model: Any,
    folder: str | Path,
    mesh: Mesh | GroupLike = None,
    plan: str | Mapping[str, str | Style] = "auto",
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    device: str | torch.device | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool | None = None,
    overlap: bool | Overlap = True,
    context: Context | None = None,
) -> Any:
    """Build a model, split it as `parallelize` does, and read each rank's slices from a folder; returns the model.

        model = fp.load_pretrained(transformers.AutoModelForCausalLM, folder, mesh)
        model = fp.load_pretrained(lambda: Llama(config), folder, mesh, plan)

    model    a class of transformers (its config is read from the folder), a config, or a function without arguments
             that builds the model
    folder   with model.safetensors, or an index and its files, as `save_pretrained` writes it
    mesh     as for `parallelize`; None: the whole model, on one rank
    dtype    of the parameters; None: the config's, or that in which the function builds them
    strict   True: ValueError where the folder lacks a tensor, or has one without a place. False: these are listed in a
             warning of the logger "fastpar.load_pretrained"; what is missing is initialised as the model does
    device   of the parameters; None: the mesh's

    The others are those of `parallelize`. A rank reads the rows (or columns, or experts) that it keeps; whole tensors
    where it keeps them whole, where key/value heads are shared, and where transformers converts several tensors into
    one, but for experts. Data-parallel ranks read the same; ZeRO shards afterwards.

    Models of transformers come in eval mode with their generation config, as from `from_pretrained`.

    Collective: every rank of the job calls it. What is wrong on one rank is raised on all: FileNotFoundError without
    files, ValueError for broken ones and for tensors that are missing or have another shape; what `parallelize` raises.
    """
    if isinstance(model, nn.Module):
        raise TypeError(
            f"load_pretrained builds the model itself: give the class of transformers or a function that builds it, "
            f"not a {type(model).__name__}"
        )
    everyone = Communicator(dist.group.WORLD if dist.is_initialized() else None)
    target = device_of(mesh, device)
    with (
        annotate("fastpar::load_pretrained"),
        opened_on_all(Path(folder), model, everyone, dtype=dtype, strict=strict) as loading,
    ):
        loading.give_stand_ins(target)
        if mesh is not None:
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "gather_logits": gather_logits}
            options |= {"overlap": overlap, "context": context, "sync_weights": "none"}
            parallelize(loading.model, mesh, plan, **options)
        loading.give_memory(loading.model.parameters())
        loading.fill_on_all([HeldTensor(n, index_of(x), local_tensor(x)) for n, x in _tensors(loading.model)])
    return loading.model


@contextlib.contextmanager
def opened_on_all(
    path: Path, model: Any, everyone: Communicator, *, dtype: torch.dtype | None = None, strict: bool = True
) -> Iterator[PretrainedWeights]:
    """A folder and the model that it is for, which may have to be built. Collective: as `load_pretrained` raises."""
    found: list[PretrainedWeights] = []
    problem = problem_of(lambda: found.append(_opened(model, path, everyone, dtype, strict)))
    try:
        raise_on_all(problem, everyone, _of_others)
        yield found[0]
    finally:
        for each in found:
            each.folder.close()


@dataclass
class PretrainedWeights:
    """A model whose parameters have no values yet, and where in a folder these are.

    expected   what its state dict has, on the meta device
    sources    by the first tensor of those that are converted together
    source_of  the key of `sources`, by name; tied parameters have several names
    missing    what the folder lacks, and is initialised
    """

    model: Any
    folder: WeightFolder
    everyone: Communicator
    expected: dict[str, Tensor]
    sources: dict[str, Sources]
    source_of: dict[str, str]
    missing: set[str]
    stand_ins: dict[Any, Tensor] = field(default_factory=dict)
    before: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def give_stand_ins(self, device: torch.device) -> None:
        """Give parameters on the meta device memory: what is missing its own, and its first values; the others
        stand-ins. Parameters and buffers that have values keep them."""
        _compute_buffers(self.model, device, self.source_of.keys() | self.missing)
        made: dict[int, nn.Parameter] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.device.type != "meta":
                    continue
                if id(parameter) not in made:
                    full = f"{path}.{name}" if path else name
                    value = (_empty if full in self.missing else self._stand_in)(full, parameter, device)
                    made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    vars(made[id(parameter)]).update(vars(parameter))
                self.before.append((module._parameters, name, parameter))  # which keeps it, and so its id, alive
                module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    self.before.append((module._buffers, name, buffer))
                    module._buffers[name] = buffer.to(device)
        if self.missing:
            with same_draws(self.everyone, device), torch.no_grad():
                _first_values(self.model, self.missing)

    def _stand_in(self, name: str, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """A tensor that all parameters share whose paths differ in numbers alone; the same on every rank."""
        key = re.sub(r"\d+", "*", name), tuple(parameter.shape), parameter.dtype
        if key not in self.stand_ins:
            value = _empty(name, parameter, device)
            if value.is_floating_point() and value.element_size() > 1:
                generator = torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))
                value.normal_(0.0 if value.dim() > 1 else 1.0, 0.02, generator=generator)
            else:
                value.zero_()
            self.stand_ins[key] = value
        return self.stand_ins[key].view(parameter.shape)

    def take_back(self) -> None:
        """Put what stand-ins have replaced where it was."""
        for held, name, value in reversed(self.before):
            held[name] = value
        self.before.clear()

    def give_memory(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give memory of their own to parameters that lie in stand-ins still, as no layout has copied them."""
        for parameter in parameters:
            if self._is_stand_in(local_tensor(parameter)):
                parameter.data = torch.empty_like(parameter.data)

    def _is_stand_in(self, value: Tensor) -> bool:
        storage = value.untyped_storage().data_ptr()
        return any(value.untyped_storage().data_ptr() == storage for value in self.stand_ins.values())

    def fill_on_all(self, held: Sequence[HeldTensor]) -> None:
        """Read what this rank holds of each tensor. Collective: what is wrong on one rank is raised on all."""
        raise_on_all(problem_of(lambda: self._fill(held)), self.everyone, _of_others)
        total = sum(entry.nbytes for entry in self.folder.entries.values())
        _log.info("read %d of %d bytes in %s", self.folder.bytes_read, total, self.folder.path)

    @torch.no_grad()
    def _fill(self, held: Sequence[HeldTensor]) -> None:
        together: dict[str, list[HeldTensor]] = {}
        for each in {id(one.value): one for one in reversed(held)}.values():  # tied ones once
            name = each.name.partition("@")[0]  # of a second copy on this rank
            if name not in self.expected:
                raise ValueError(f"{name} of the laid out model is not in the model's state dict, and has no values")
            if name not in self.source_of or each.value.numel() == 0:  # initialised, or a buffer that is computed
                continue
            if self._is_stand_in(each.value):
                raise AssertionError(f"{name} lies in memory that it shares with others")
            together.setdefault(self.source_of[name], []).append(replace(each, name=name))
        for key, some in together.items():
            sources = self.sources[key]
            if sources.convert is None:
                for each in some:
                    _put_into(each, self.folder.read_at(sources.names[0][1], each.index))
            else:
                self._fill_converted(key, sources, some)

    def _fill_converted(self, key: str, sources: Sources, some: Sequence[HeldTensor]) -> None:
        """Fill what is converted: of stacked tensors (experts) those of this rank are read, of others all."""
        first, runs = 0, [each.index[0] for each in some]
        if sources.are_stacked and None not in runs and sources.num_rows() == self.expected[key].shape[0]:
            rows = torch.cat(cast(list[Tensor], runs))
            first = int(rows.min())
            sources = sources.rows(first, int(rows.max()) + 1)
        found = sources.converted(self.model, key, {name: self.folder.read(name) for _, name in sources.names})
        for each in some:
            value = found[each.name]
            whole = self.expected[each.name].shape
            if value.shape[1:] != whole[1:] or (first == 0 and each.index[0] is None and value.shape != whole):
                raise ValueError(
                    f"{each.name} made of {_some([n for _, n in sources.names])} has the shape {list(value.shape)}, and"
                    f" the model {list(whole)}: they are of different configurations"
                )
            index = each.index if each.index[0] is None else (each.index[0] - first, *each.index[1:])
            _put_into(each, take(value, index))


def _put_into(held: HeldTensor, value: Tensor) -> None:
    held.value.copy_(value.view(held.value.shape))  # a scalar may be held as a row


def _opened(
    model: Any, path: Path, everyone: Communicator, dtype: torch.dtype | None, strict: bool
) -> PretrainedWeights:
    folder = WeightFolder(path)
    try:
        built = _built(model, path, dtype)
        expected = {name: x.to("meta") for name, x in built.state_dict().items() if isinstance(x, Tensor)}
        sources, unexpected = sources_of(built, expected, folder.entries)
        source_of = _source_of(built, expected, sources)
        missing = expected.keys() - source_of.keys()
        ignored = {name for name in missing if _matches(built, "_keys_to_ignore_on_load_missing", name)}
        unexpected = [name for name in unexpected if not _matches(built, "_keys_to_ignore_on_load_unexpected", name)]
        _report(path, sorted(missing - ignored), unexpected, strict)
        missing -= ignored - dict(built.named_parameters(remove_duplicate=False)).keys()  # buffers have been made
        _check_entries(path, expected, sources, folder)
        return PretrainedWeights(built, folder, everyone, expected, sources, source_of, missing)
    except BaseException:
        folder.close()
        raise


def _report(path: Path, missing: list[str], unexpected: list[str], strict: bool) -> None:
    said = [f"{kind} {_some(names)}" for kind, names in (("lacks", missing), ("has no place for", unexpected)) if names]
    if said and strict:
        raise ValueError(
            f"the model and {path} do not fit: the folder {said[0] if missing else 'has ' + _some(unexpected)}"
            + (", for which the model has no place" if not missing else "")
            + (f"; the model {said[1]}" if len(said) > 1 else "")
            + ". With strict=False of fp.load_pretrained what is missing is initialised, and the rest left out"
        )
    if said:
        _log.warning("%s and the model: the folder lacks %s; not used: %s", path, missing, unexpected)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _source_of(model: nn.Module, expected: Mapping[str, Tensor], sources: Mapping[str, Sources]) -> dict[str, str]:
    """The key of the sources that give a tensor, under its own name or one that it is tied to."""
    found = {target: target for target in sources}
    for target, each in sources.items():
        if each.convert is not None:  # which may give several: they are compared when they are there
            found |= {name: target for name in expected if name not in found and _is_sibling(name, target, each)}
    of_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of_parameter.setdefault(id(parameter), []).append(name)
    for names in of_parameter.values():
        if there := [name for name in names if name in found]:
            found |= {name: found[there[0]] for name in names if name not in found}
    return {name: source for name, source in found.items() if name in expected}


def _is_sibling(name: str, target: str, sources: Sources) -> bool:
    patterns = sources.convert.target_patterns
    return any(target.replace(patterns[0], pattern, 1) == name for pattern in patterns)


def _matches(model: nn.Module, attribute: str, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def _check_entries(
    path: Path, expected: Mapping[str, Tensor], sources: Mapping[str, Sources], folder: WeightFolder
) -> None:
    entries = folder.entries
    for target, each in sources.items():
        wanted = expected[target]
        for _, name in each.names:
            said = entries[name]
            if each.convert is None and said.shape != tuple(wanted.shape):
                raise ValueError(
                    f"{name} in {path} has the shape {list(said.shape)}, and {target} of the model "
                    f"{list(wanted.shape)}: they are of different configurations"
                )
            if said.dtype.is_floating_point != wanted.is_floating_point() or said.dtype.is_complex:
                raise ValueError(
                    f"{name} in {path} is {said.dtype}, and {target} of the model {wanted.dtype}: values of another "
                    "kind, as of a quantised model, are not converted"
                )


# ---- building


def _built(model: Any, path: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model with its parameters on the meta device and its buffers where they are made; one that is there as it
    is."""
    if isinstance(model, nn.Module):
        return model
    make, is_pretrained = _maker(model, path, dtype)
    with _meta_parameters():
        built = make()
    if not isinstance(built, nn.Module):
        raise TypeError(f"model must build an nn.Module, got {type(built).__name__}")
    strays = [name for name, x in built.named_parameters() if x.device.type != "meta"]
    strays += [name for name, x in built.named_buffers() if x.device.type == "meta"]
    if strays:
        raise ValueError(
            f"{strays[0]} was made outside of the function: model must be a function that builds all of the model when "
            "it is called, or a class of transformers"
        )
    if dtype is not None and not is_pretrained:
        built.to(dtype)
    if is_pretrained:
        built.eval()
        if (path / "generation_config.json").is_file() and hasattr(built, "generation_config"):
            from transformers import GenerationConfig

            vars(built)["generation_config"] = GenerationConfig.from_pretrained(path)
    return built


def _maker(model: Any, path: Path, dtype: torch.dtype | None) -> tuple[Callable[[], Any], bool]:
    """What builds the model, and whether it is one of transformers."""
    options = {} if dtype is None else {"dtype": dtype}
    build = getattr(model, "from_config", None) or getattr(model, "_from_config", None)
    if build is not None:
        from transformers import AutoConfig

        return lambda: build(AutoConfig.from_pretrained(path), **options), True
    architectures = getattr(model, "architectures", None)
    if hasattr(model, "model_type"):
        import transformers

        cls = getattr(transformers, architectures[0], None) if architectures else None
        if cls is None:
            raise ValueError(
                f"the config ({type(model).__name__}) names no architecture of transformers ({architectures}): pass "
                "the class, whose config is read from the folder"
            )
        return lambda: cls._from_config(model, **options), True
    if not callable(model):
        raise TypeError(
            "model must be a class of transformers, a config, or a function without arguments that builds a model, got "
            f"{type(model).__name__}"
        )
    return model, False


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Let modules that this thread builds keep parameters of the meta device. What initialises them then does nothing,
    and memory that was allocated for one is given back untouched. Buffers stay, as their values are in no file."""
    thread = threading.get_ident()

    def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook: Any = on_meta  # torch says that it returns nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# ---- stand-ins


def _compute_buffers(model: Any, device: torch.device, found: Container[str]) -> None:
    """Give buffers on the meta device that are not `found` elsewhere the values that their modules compute, by
    transformers' `_init_weights` or torch's convention for that device, `reset_parameters`. Computed twice, over
    different memory: elements that nobody writes, or that are drawn, differ then, and are refused."""
    for path, module in model.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        strange = [name for name, x in vars(module).items() if isinstance(x, Tensor) and x.is_meta]
        where = f"{path}." if path else ""
        if strange:
            raise ValueError(
                f"{where}{strange[0]} is on the meta device and no buffer, so that nobody gives it values: build the "
                "model in a function that is passed in its place, or register_buffer(..., persistent=False)"
            )
        kept = {name: module._buffers[name] for name in names}
        runs = []
        for byte in (0x55, 0x2A) if names else ():
            for name in names:
                value = torch.empty_like(kept[name], device=device)
                value.view(-1).view(torch.uint8).fill_(byte) if value.dtype != torch.bool else value.fill_(byte == 0x55)
                module._buffers[name] = value
            initialise = _initialiser(model, module)
            if initialise is not None:
                with torch.no_grad():
                    initialise()
            runs.append({name: module._buffers[name] for name in names})
        unset = [name for name in names if not torch.equal(*(run[name].view(-1).view(torch.uint8) for run in runs))]
        unset = [name for name in unset if name in module._non_persistent_buffers_set or where + name not in found]
        if unset:
            module._buffers.update(kept)
            raise ValueError(
                f"{where}{unset[0]} is a buffer on the meta device that no folder has, and {type(module).__name__} "
                "does not compute it (reset_parameters, or transformers' _init_weights): pass a function that builds "
                "the model in the place of the model"
            )


def _initialiser(model: Any, module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module its first values."""
    if hasattr(model, "_init_weights"):
        return functools.partial(model._init_weights, module)
    return getattr(module, "reset_parameters", None)


def _empty(_name: str, parameter: nn.Parameter, device: torch.device) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


def _first_values(model: Any, missing: set[str]) -> None:
    """Initialise the modules whose parameters the folder lacks. ValueError where nobody says how, or where a module has
    only some of its own."""
    for path in sorted({name.rpartition(".")[0] for name in missing}):
        module = model.get_submodule(path)
        own = {f"{path}.{name}" if path else name for name in module.state_dict()}
        initialise = _initialiser(model, module)
        if initialise is None or not own <= missing:
            raise ValueError(
                f"the folder lacks {sorted(own & missing)[0]}, and {path or 'the model'} ({type(module).__name__}) "
                "cannot be initialised apart from it: add the tensor to the folder"
            )
        initialise()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a state dict has, as the model holds them."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, x


def device_of(mesh: Any, device: str | torch.device | None = None) -> torch.device:
    """The device of this rank's parameters."""
    if device is None:
        device = mesh.device_type if isinstance(mesh, Mesh) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _of_others(ranks: list[int]) -> Exception:
    return ValueError(f"load_pretrained failed on rank {ranks[0]}: see its error")
