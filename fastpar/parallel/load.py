"""`load_pretrained`: a model split over ranks from a folder, of which each rank reads what it keeps.

The model is built with parameters on the meta device, split, and filled. A rank needs memory for its shards, for one
layer of each kind and for the embeddings (see the note), and for one tensor that is converted.

Note: stand-ins
    `parallelize` runs the model and trials of its blocks, which the meta device cannot. So parameters get numbers for
    that time, and all layers share theirs: parameters whose paths differ in numbers alone lie in one memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.comm.agree import raise_on_all
from fastpar.comm.ranges import annotate
from fastpar.context.region import Context
from fastpar.mesh import Mesh
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.api import parallelize
from fastpar.parallel.model_methods import same_draws
from fastpar.parallel.styles import Style
from fastpar.pretrained.conversions import Sources, sources_of
from fastpar.pretrained.folder import WeightFolder
from fastpar.tensor import layout_of, local_tensor
from fastpar.tensor.binding import GroupLike
from fastpar.tensor.grid_layout import GridLayout

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
    everyone = Communicator(dist.group.WORLD if dist.is_initialized() else None)
    target = _device(mesh, device)
    found: list[Any] = []
    with annotate("fastpar::load_pretrained"):
        problem = _problem_of(lambda: found.append(_opened(model, Path(folder), dtype, strict)))
        raise_on_all(problem, everyone, _of_others)
        loading: _Loading = found[0]
        with loading.folder:
            _initialise(loading, target, everyone)
            if mesh is not None:
                options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "gather_logits": gather_logits}
                options |= {"overlap": overlap, "context": context, "sync_weights": "none"}
                parallelize(loading.model, mesh, plan, **options)
            problem = _problem_of(lambda: _fill(loading))
            raise_on_all(problem, everyone, _of_others)
    return loading.model


@dataclass
class _Loading:
    """A model on the meta device, and where its tensors are."""

    model: Any
    folder: WeightFolder
    sources: dict[str, Sources]
    missing: set[str]


def _opened(model: Any, path: Path, dtype: torch.dtype | None, strict: bool) -> _Loading:
    folder = WeightFolder(path)
    try:
        built = _built(model, path, dtype)
        expected = {name: x.to("meta") for name, x in built.state_dict().items() if isinstance(x, Tensor)}
        sources, unexpected = sources_of(built, expected, folder.entries)
        missing = _missing(built, expected, sources)
        ignored = {name for name in missing if _matches(built, "_keys_to_ignore_on_load_missing", name)}
        unexpected = [name for name in unexpected if not _matches(built, "_keys_to_ignore_on_load_unexpected", name)]
        _report(path, sorted(missing - ignored), unexpected, strict)
        missing -= ignored - dict(built.named_parameters(remove_duplicate=False)).keys()  # buffers have been made
        _check_shapes(path, expected, sources, folder)
        return _Loading(built, folder, sources, missing)
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
            + ". With strict=False what is missing is initialised, and the rest left out"
        )
    if said:
        _log.warning("%s and the model: the folder lacks %s; not used: %s", path, missing, unexpected)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _missing(model: nn.Module, expected: Mapping[str, Tensor], sources: Mapping[str, Sources]) -> set[str]:
    """Tensors that no source gives, neither under their own name nor under one that they are tied to."""
    there = set(sources)
    for target, each in sources.items():
        if each.convert is not None:  # which may give several: they are compared when they are there
            there |= {name for name in expected if _is_sibling(name, target, each)}
    of_parameter: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of_parameter.setdefault(id(parameter), set()).add(name)
    tied = [names for names in of_parameter.values() if names & there]
    there = there.union(*tied)
    return {name for name in expected if name not in there}


def _is_sibling(name: str, target: str, sources: Sources) -> bool:
    patterns = sources.convert.target_patterns
    return any(target.replace(patterns[0], pattern, 1) == name for pattern in patterns)


def _matches(model: nn.Module, attribute: str, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def _check_shapes(
    path: Path, expected: Mapping[str, Tensor], sources: Mapping[str, Sources], folder: WeightFolder
) -> None:
    entries = folder.entries
    for target, each in sources.items():
        name = each.names[0][1]
        if each.convert is None and entries[name].shape != tuple(expected[target].shape):
            raise ValueError(
                f"{name} in {path} has the shape {list(entries[name].shape)}, and {target} of the model "
                f"{list(expected[target].shape)}: they are of different configurations"
            )


# ---- building


def _built(model: Any, path: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model with its parameters on the meta device and its buffers where they are made."""
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
    if isinstance(model, nn.Module):
        raise TypeError(
            f"load_pretrained builds the model itself: give the class of transformers or a function that builds it, "
            f"not a {type(model).__name__}"
        )
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


def _initialise(loading: _Loading, device: torch.device, everyone: Communicator) -> None:
    """Give the parameters memory: what is missing its own, and its first values; the others stand-ins."""
    model = loading.model
    made: dict[int, nn.Parameter] = {}
    stand_ins: dict[Any, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                full = f"{path}.{name}" if path else name
                is_missing = full in loading.missing
                value = _empty(parameter, device) if is_missing else _stand_in(full, parameter, device, stand_ins)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    # Parameters stay alive by `model`, so that no id is given twice.
    if loading.missing:
        with same_draws(everyone, device), torch.no_grad():
            _first_values(model, loading.missing)


def _empty(parameter: nn.Parameter, device: torch.device) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)


def _stand_in(name: str, parameter: nn.Parameter, device: torch.device, made: dict[Any, Tensor]) -> Tensor:
    """A tensor that all parameters share whose paths differ in numbers alone; the same on every rank."""
    key = re.sub(r"\d+", "*", name), tuple(parameter.shape), parameter.dtype
    if key not in made:
        value = _empty(parameter, device)
        if value.is_floating_point() and value.element_size() > 1:
            generator = torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))
            value.normal_(0.0 if value.dim() > 1 else 1.0, 0.02, generator=generator)
        else:
            value.zero_()
        made[key] = value
    return made[key].view(parameter.shape)


def _first_values(model: Any, missing: set[str]) -> None:
    """Initialise the modules whose parameters the folder lacks. ValueError where nobody says how, or where a module has
    only some of its own."""
    for path in sorted({name.rpartition(".")[0] for name in missing}):
        module = model.get_submodule(path)
        own = {f"{path}.{name}" if path else name for name in module.state_dict()}
        initialise = getattr(module, "reset_parameters", None)
        if hasattr(model, "_init_weights"):
            initialise = functools.partial(model._init_weights, module)
        if initialise is None or not own <= missing:
            raise ValueError(
                f"the folder lacks {sorted(own & missing)[0]}, and {path or 'the model'} ({type(module).__name__}) "
                "cannot be initialised apart from it: add the tensor to the folder"
            )
        initialise()


# ---- filling


def _fill(loading: _Loading) -> None:
    """Read what this rank keeps."""
    model, folder = loading.model, loading.folder
    targets = dict(_tensors(model))
    _own_memory(targets, loading.missing)
    with torch.no_grad():
        for name, sources in loading.sources.items():
            if sources.convert is None:
                _read(folder, sources.names[0][1], targets[name])
            else:
                _read_converted(model, folder, name, sources, targets)
    total = sum(entry.nbytes for entry in folder.entries.values())
    _log.info("read %d of %d bytes in %s", folder.bytes_read, total, folder.path)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a state dict has, as the model holds them."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, x


def _own_memory(targets: Mapping[str, Tensor], missing: set[str]) -> None:
    """Parameters that no layout has copied lie in their stand-ins still."""
    for name, target in targets.items():
        if isinstance(target, nn.Parameter) and layout_of(target) is None and name not in missing:
            target.data = torch.empty_like(target.data)


def _read(folder: WeightFolder, name: str, target: Tensor) -> None:
    layout: Any = layout_of(target)
    if isinstance(layout, GridLayout):
        value = _read_cut(folder, name, layout.index())
    elif layout is None or layout.rows is None or layout.placement.is_replicate():
        value = folder.read(name)
    else:
        value = folder.read(name, layout.dim, layout.rows.ranges[layout.comm.rank])
    local_tensor(target).copy_(value)


def _read_cut(folder: WeightFolder, name: str, index: Sequence[Tensor | None]) -> Tensor:
    """The elements at an index of a tensor that is cut along several dims: along the first by slices, and then cut."""
    dims = [dim for dim, rows in enumerate(index) if rows is not None]
    if not dims:
        return folder.read(name)
    rows = index[dims[0]]
    assert rows is not None
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(breaks) if len(run)]
    value = folder.read(name, dims[0], runs)
    for dim in dims[1:]:
        value = value.index_select(dim, cast(Tensor, index[dim]))
    return value


def _read_converted(
    model: Any, folder: WeightFolder, first: str, sources: Sources, targets: Mapping[str, Tensor]
) -> None:
    layout: Any = layout_of(targets[first])
    is_cut = False
    experts = _experts_of(layout) if sources.are_stacked else None
    if experts is not None and sources.num_rows() == layout.shape[0]:
        sources, is_cut = sources.rows(*experts), True
    tensors = {name: folder.read(name) for _, name in sources.names}
    for name, value in sources.converted(model, first, tensors).items():
        layout = layout_of(targets[name])
        if isinstance(layout, GridLayout) and is_cut:
            layout = dataclasses.replace(layout, shape=value.shape, cuts=(None, *layout.cuts[1:]))
            part = layout.local(value)
        else:
            part = value if layout is None or is_cut else layout.local(value)
        mine = local_tensor(targets[name])
        if part.shape != mine.shape:
            raise ValueError(
                f"{name} made of {_some([n for _, n in sources.names])} has the shape {list(part.shape)} on this rank, "
                f"and the model {list(mine.shape)}: they are of different configurations"
            )
        mine.copy_(part)


def _experts_of(layout: Any) -> tuple[int, int] | None:
    """The rows of dim 0 that this rank has of experts that are stacked, where they are a run of all."""
    if isinstance(layout, GridLayout):  # experts over ep, and each over etp
        rows = layout.index()[0]
        return None if rows is None else (int(rows[0]), int(rows[-1]) + 1)
    if layout is None or layout.kind != "contiguous" or layout.dim != 0:
        return None
    (found,) = layout.rows.ranges[layout.comm.rank]
    return cast(tuple[int, int], found)


def _device(mesh: Any, device: str | torch.device | None) -> torch.device:
    if device is None:
        device = mesh.device_type if isinstance(mesh, Mesh) else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _problem_of(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _of_others(ranks: list[int]) -> Exception:
    return ValueError(f"load_pretrained failed on rank {ranks[0]}: see its error")
