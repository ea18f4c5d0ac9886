"""The units of stage 3: which modules have their parameters gathered together.

Note: tied parameters. A parameter that several groups would have is taken out of them, into one of its own that is
gathered whenever one of the modules that hold it runs: the weight that an embedding and a head share is one group with
two modules. Modules that several groups have, as two models with one trunk do, are gathered when the outermost of these
runs: what it calls may be read without its own forward, as tensor-parallel linears are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from fastpar.zero.options import UnitsLike


@dataclass
class UnitPlan:
    """Parameters that are gathered together, and the modules that compute with them.

    name     for messages: the path of the first module, "" for the model itself
    modules  while one of them runs, the parameters are whole
    names    of the parameters (first names in the model)
    """

    name: str
    modules: list[nn.Module]
    names: list[str] = field(default_factory=list)


def plan_units(model: nn.Module, units: UnitsLike = None) -> list[UnitPlan]:
    """Every parameter of the model in one unit, in the order of the modules.

        model.embed, model.layers (an nn.ModuleList of 8), model.norm, model.position (a parameter that model.forward
        itself reads)  ->  "" (position; whole as long as the model runs), embed, layers.0, ..., layers.7, norm

    units  None: each entry of the outermost nn.ModuleList, nn.Sequential and nn.ModuleDict with several modules of
           one class that has parameters; then the largest other modules without such lists in them; parameters of a
           module around lists are a unit that stays whole while that module runs. What has no forward, as an
           nn.ParameterList, goes with the module around it that has one.
           Else modules, their paths, or sequences of those, each a unit, of which an inner one has its own parameters;
           what is left is a unit that stays whole while the model runs.

    Raises ValueError for a path that is not there, a module that is not the model's, and a unit given twice.
    """
    paths = {module: path for path, module in model.named_modules()}
    plans = _by_who_runs(model, list(_default(model, ""))) if units is None else _given(model, units, paths)
    claims: dict[nn.Parameter, list[int]] = {}
    for index, plan in enumerate(plans):
        for parameter in _claimed(plan, plans):
            claims.setdefault(parameter, []).append(index)
    tied: dict[tuple[int, ...], UnitPlan] = {}
    for name, parameter in model.named_parameters():
        found = claims[parameter]
        if len(found) == 1:
            plans[found[0]].names.append(name)
            continue
        owners = [
            _reader_of(module, [plans[index] for index in found])
            for module in model.modules()
            if any(p is parameter for p in module._parameters.values())
        ]
        unit = tied.setdefault(tuple(found), UnitPlan(paths[owners[0]], []))
        unit.modules += [owner for owner in owners if owner not in unit.modules]
        unit.names.append(name)
    order = {module: number for number, module in enumerate(model.modules())}
    kept = [plan for plan in [*plans, *tied.values()] if plan.names]
    return sorted(kept, key=lambda plan: order[plan.modules[0]])


def small_names(numels: dict[str, int], share: float) -> set[str]:
    """The smallest parameters, as many as have at most `share` of all elements together; and all of one element."""
    left = share * sum(numels.values())
    found = set()
    for name, numel in sorted(numels.items(), key=lambda item: (item[1], item[0])):
        left -= numel
        if left < 0 and numel > 1:
            break
        found.add(name)
    return found


def _is_chain(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    classes = [type(child) for child in module.children() if next(child.parameters(), None) is not None]
    return len(set(classes)) < len(classes)


def _default(module: nn.Module, path: str) -> Iterator[UnitPlan]:
    if _is_chain(module):
        for name, layer in module.named_children():
            yield UnitPlan(_join(path, name), [layer])
    elif not any(_is_chain(inner) for inner in module.modules()):
        yield UnitPlan(path, [module])
    else:
        if any(parameter is not None for parameter in module._parameters.values()):
            yield UnitPlan(path, [module])
        for name, child in module.named_children():
            yield from _default(child, _join(path, name))


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_read_from_around(module: nn.Module) -> bool:
    """Whether parameters in a module are those of one that does not run, and in none that does."""
    return not _runs(module) and (
        any(parameter is not None for parameter in module._parameters.values())
        or any(_is_read_from_around(child) for child in module.children())
    )


def _by_who_runs(model: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """The plans, with the module that reads them in the place of those that hold parameters and do not run."""
    found = [plan for plan in plans if not _is_read_from_around(plan.modules[0])]
    for path in [plan.name for plan in plans if plan not in found]:
        while path and not _runs(model.get_submodule(path)):
            path = path.rpartition(".")[0]
        reader = model.get_submodule(path)
        if all(plan.modules != [reader] for plan in found):
            found.append(UnitPlan(path, [reader]))
    return found


def _given(
    model: nn.Module, units: Sequence[str | nn.Module | Sequence[str | nn.Module]], paths: dict[nn.Module, str]
) -> list[UnitPlan]:
    plans = []
    seen: dict[nn.Module, str] = {}
    for unit in units:
        members = [unit] if isinstance(unit, (str, nn.Module)) else list(unit)
        modules = []
        for member in members:
            try:
                module = model.get_submodule(member) if isinstance(member, str) else member
            except AttributeError:
                raise ValueError(f"units: the model has no module {member!r}") from None
            if module not in paths:
                raise ValueError(f"units: this {type(module).__name__} is not a module of the model")
            if module in seen:
                raise ValueError(f"units: {paths[module]!r} is in two units; make them one")
            seen[module] = paths[module]
            modules.append(module)
        plans.append(UnitPlan(paths[modules[0]], modules))
    if model not in seen:
        plans.append(UnitPlan("", [model]))
    return plans


def _claimed(plan: UnitPlan, plans: Sequence[UnitPlan]) -> Iterator[nn.Parameter]:
    """The parameters in the plan's modules, without those in modules of other plans; each once."""
    others = {module for other in plans if other is not plan for module in other.modules}
    seen: set[nn.Parameter] = set()
    stack = list(plan.modules)
    visited: set[nn.Module] = set()
    while stack:
        module = stack.pop()
        if module in visited:
            continue
        visited.add(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield parameter
        stack += [child for child in module.children() if child not in others]


def _reader_of(holder: nn.Module, plans: Sequence[UnitPlan]) -> nn.Module:
    """The outermost module around the holder of a parameter that all of these plans have; else the holder."""
    first, *others = [[inner for module in plan.modules for inner in module.modules()] for plan in plans]
    shared = [module for module in first if _runs(module) and all(module in other for other in others)]
    return next((module for module in shared if holder in set(module.modules())), holder)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
