"""The plan "auto": what a model declares or its modules suggest, as far as trials confirm it.

Where a plan comes from is of no consequence for whether it is right: Hugging Face's `tp_plan`, the table of known
architectures, or a guess from the order in which a block calls its linears. Every kind of layer is tried
(`parallel/trial`), block by block, then as a whole. A block whose trial fails is left whole, which is always right, and
`fastpar.explain` says why; trials also say which gradients of its other parameters are parts.

With sequence parallelism every other module of a layer is either found to compute each token by itself, or is left
whole on all tokens ("gathered").
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fastpar.pipeline.stages.absent import Absent
from fastpar.parallel.heads import KEY_COUNTS, QUERY_COUNTS, HeadsError, HeadSplit, said, split_heads
from fastpar.parallel.plan import Style, UnknownModelError, auto_plan, match_plan
from fastpar.parallel.stacked_experts import is_stacked
from fastpar.parallel.trial import Call, DifferenceError, Trial, TrialError, is_linear, is_per_token, record_calls
from fastpar.tensor.own_forward import check_parameters, has_hooks, has_own_forward

_SPLIT = ("colwise", "rowwise")
_FULL = ("colwise_gather_output", "rowwise_split_input")
_TRIED = ("colwise", "rowwise", "heads", "partial", "replicate", "dropout")  # what a block may hold to be tried
_KEPT = ("expert", "dropout", "replicate", "vocab")  # of what is declared inside a layer: no trial is needed
_MAX_GUESSES = 32
_PLAIN = (int, float, str, bool, type(None))


def proven_plan(model: nn.Module, size: int, *, sequence_parallel: bool = False) -> dict[str, str | Style]:
    """The plan "auto" for a tensor-parallel group of so many ranks, by path.

    Runs the model once on a few tokens, in this process, and trials of one layer of each kind. A model that cannot be
    run so, a part of a pipeline among them, gets what it declares, untried. ValueError for a model of which nothing is
    known and nothing can be found, for a number of heads that does not divide, and with sequence parallelism for a
    layer that cannot work on a part of the sequence.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    is_part = any(isinstance(module, Absent) for module in modules.values())
    styles, unknown = _first_plan(model, modules)
    if unknown is not None and (is_part or not styles):
        raise unknown
    if is_part or size == 1:
        return dict(styles.items())
    kinds: dict[Any, list[str]] = {}
    for path, style in styles.items():
        if style.kind == "stream":
            kinds.setdefault(_kind_of(modules[path], styles, path), []).append(path)
    inside = [name for group in kinds.values() for name in _inside(modules[group[0]], group[0])]
    try:
        calls = record_calls(model, inside, 2 * size + 1)
    except Exception as error:  # of the model's own code: any
        if unknown is not None:
            raise UnknownModelError(f"{unknown}. Nor can it be found out: a run on a few ids failed: {error}") from None
        return dict(styles.items())
    for group in kinds.values():
        if group[0] not in calls:
            continue
        found = _Layer(modules, group[0], styles, calls, size, sequence_parallel).settle()
        for path in group:
            styles = {name: style for name, style in styles.items() if not name.startswith(f"{path}.")}
            styles |= {f"{path}.{name}": style for name, style in found.items()}
    return dict(styles.items())


def refuse_wrong_blocks(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Try one block of each kind of a plan that somebody has written; ValueError for one that, split so, computes
    something else than whole.

    As in `proven_plan` the model runs once on a few tokens. What cannot be run so is not judged: models that take other
    inputs than ids, blocks whose code needs a device or what virtual layers do not have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if size == 1 or any(isinstance(module, Absent) for module in modules.values()):
        return
    kinds: dict[Any, str] = {}
    for path, style in styles.items():
        if style.kind == "block":
            kinds.setdefault(_kind_of(modules[path], styles, path), path)
    try:
        calls = record_calls(model, kinds.values(), 2 * size + 1) if kinds else {}
    except Exception:  # of the model's own code: any
        return
    for path in kinds.values():
        inside = {name[len(path) + 1 :]: style for name, style in styles.items() if name.startswith(f"{path}.")}
        linears = [modules[f"{path}.{name}"] for name, style in inside.items() if style.kind in _SPLIT]
        if any(has_own_forward(linear) or has_hooks(linear) for linear in linears):
            continue  # virtual layers have neither; these linears have been tried by themselves
        if path in calls and all(style.kind in _TRIED for style in inside.values()):
            _refuse_wrong_block(path, modules[path], calls[path], {"": styles[path], **inside}, size)


def _refuse_wrong_block(path: str, module: nn.Module, call: Call, styles: dict[str, Style], size: int) -> None:
    where = f"{path} ({type(module).__name__}), split as the plan says,"
    advice = 'Leave the block out of the plan, or try plan="auto", which finds out what can be split'
    try:
        kinds = Trial(module, call, styles, block_splits(module, styles, size, path), size).run(False)
    except DifferenceError as error:
        raise ValueError(
            f"{where} would compute something else than whole: {error}. Between its column- and row-parallel linears a "
            "block may only do what works on each feature or head by itself, and its input may reach its output only "
            f"through them. {advice}"
        ) from None
    except TrialError:
        return
    if call.keeps_results:
        raise ValueError(
            f"{where} keeps tensors that it computes (attributes with a gradient, such as a balance loss), of which "
            f"each rank would have those of its own heads or features. {advice}"
        )
    for name, kind in kinds.items():
        said = styles.get(name) or styles.get(name.rpartition(".")[0])
        if said is not None and said.kind == "partial" and kind == "replicate":
            raise ValueError(
                f"{path}.{name} has the style 'partial', but every rank has its whole gradient, and the sum over ranks "
                f"would be {size} times that. Give it the style 'replicate'"
            )


def _first_plan(
    model: nn.Module, modules: Mapping[str, nn.Module]
) -> tuple[dict[str, Style], UnknownModelError | None]:
    """What is declared or known; for other models the embedding, the head, layers and stacked experts, and the error
    that says so. No styles where not even layers are found."""
    try:
        styles = match_plan(model, auto_plan(model))
    except UnknownModelError as error:
        layers = _find_layers(model)
        if not layers:
            return {}, error
        inner = tuple(f"{layer}." for layer in layers)
        experts = [path for path, module in modules.items() if path.startswith(inner) and is_stacked(module)]
        styles = _ends(model) | dict.fromkeys(layers, Style("stream")) | dict.fromkeys(experts, Style("expert"))
        return styles, error
    for path in [path for path, style in styles.items() if style.kind == "expert"]:
        if path in modules and not isinstance(modules[path], Absent) and not is_stacked(modules[path]):
            del styles[path]  # experts of another form, such as some that do nothing: left whole
    return styles | _unsplit_ends(modules, styles), None


def _unsplit_ends(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, Style]:
    """Embeddings and heads that a declared plan splits and that cannot be split, with all that share their weights."""
    ends = [path for path, style in styles.items() if style.kind == "vocab" and path in modules]
    found: dict[str, Style] = {}
    for path in ends:
        if not isinstance(modules[path], nn.Embedding | nn.Linear):
            continue
        try:
            check_parameters(modules[path])
        except TypeError as error:
            weights = {id(param) for param in modules[path].parameters()}
            sharing = [end for end in ends if weights & {id(param) for param in modules[end].parameters()}]
            found |= dict.fromkeys(sharing, Style("whole", note=f"left whole: {error}"))
    return found


def _ends(model: nn.Module) -> dict[str, Style]:
    """Embedding and head of a model that says where they are."""
    names = {id(module): path for path, module in model.named_modules()}
    styles = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            end = getattr(model, getter)()
        except (AttributeError, NotImplementedError, TypeError):
            continue
        if (isinstance(end, nn.Embedding) and id(end) in names) or (isinstance(end, nn.Linear) and id(end) in names):
            styles[names[id(end)]] = Style("vocab")
    return styles


def _find_layers(model: nn.Module) -> list[str]:
    """The elements of the only list of modules that hold linears; none where there are two, an encoder's among them."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [(path, module) for path, module in lists if any(is_linear(child) for child in module.modules())]
    top = [(p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)]
    if len(top) != 1:
        return []
    path, module = top[0]
    return [f"{path}.{name}" for name in module._modules]  # one that is there twice is two layers


def _inside(module: nn.Module, path: str) -> list[str]:
    found = [path]
    for name, child in module.named_children():
        if not is_linear(child) and not is_stacked(child):
            found += _inside(child, f"{path}.{name}")
        elif is_linear(child):
            found.append(f"{path}.{name}")
    return found


def _kind_of(module: nn.Module, styles: Mapping[str, Style], path: str) -> Any:
    """What two layers have in common that compute the same on other numbers."""
    rows: list[Any] = []
    for name, child in module.named_modules():
        plain = {
            k: v for k, v in vars(child).items() if isinstance(v, _PLAIN) and not re.search(r"(^|_)(id|index|idx)$", k)
        }
        shapes = {k: tuple(p.shape) for k, p in [*child._parameters.items(), *child._buffers.items()] if p is not None}
        rows.append((name, type(child), tuple(sorted(plain.items(), key=str)), tuple(shapes.items())))
    inner = tuple((name[len(path) :], style) for name, style in styles.items() if name.startswith(f"{path}."))
    return tuple(rows), inner


class _Layer:
    """One layer of a kind: its blocks are tried, and what is not a block is looked at."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        path: str,
        styles: Mapping[str, Style],
        calls: Mapping[str, Call],
        size: int,
        sequence: bool,
    ):
        self.path, self.calls, self.size, self.sequence = path, calls, size, sequence
        self.modules = {name[len(path) + 1 :]: m for name, m in modules.items() if name.startswith(f"{path}.")}
        self.modules[""] = modules[path]
        self.declared = {name[len(path) + 1 :]: s for name, s in styles.items() if name.startswith(f"{path}.")}
        self.settled: dict[str, Style] = {}
        self.pairs: list[str] = []

    def call(self, path: str) -> Call | None:
        return self.calls.get(f"{self.path}.{path}" if path else self.path)

    def settle(self) -> dict[str, Style]:
        """Relative path to style of everything in the layer."""
        self.settled = {p: s for p, s in self.declared.items() if s.kind in _KEPT}
        for name, _ in self.modules[""].named_children():
            self._visit(name)
        self._pairs()
        self._check_layer()
        return self.settled

    def _visit(self, path: str) -> None:
        module = self.modules[path]
        if path in self.declared and self.declared[path].kind == "expert":
            return
        if not any(True for _ in module.parameters()) and not self.sequence:
            return
        reason = ""
        call = self.call(path)
        if not is_linear(module) and call is not None and not _holds_experts(module):
            found, reason = self._split(path, module, call)
            if found is not None:
                self.settled |= found
                return
        if _holds_experts(module) or call is None:
            self._visit_children(path, module, call)
            return
        kept = {p: s for p, s in self.declared.items() if s.kind in _FULL and p.startswith(f"{path}.")}
        if kept and not self.sequence:
            self.settled |= kept
            return
        self._leave_whole(path, module, call, reason)

    def _visit_children(self, path: str, module: nn.Module, call: Call | None) -> None:
        """What a module holds, one by one; all of it on all tokens where one of them cannot work on a part."""
        before = dict(self.settled)
        try:
            for name, _ in module.named_children():
                self._visit(f"{path}.{name}")
        except HeadsError:
            raise
        except ValueError:
            if call is None:
                raise
            self.settled = before
            self._leave_whole(path, module, call, "")

    def _leave_whole(self, path: str, module: nn.Module, call: Call, reason: str) -> None:
        note = reason and f"left whole: {reason}"
        # Where the tokens decide which parameters are used, ranks with parts of them would disagree on whose gradients
        # to sum.
        works_on_parts = not _chooses_parameters(module) and not call.keeps_results
        if not self.sequence or (works_on_parts and is_per_token(module, call, self.size)):
            if note:
                self.settled[path] = Style("whole", note=note)
            return
        style = Style("gathered", note=note or "left whole: it needs all tokens")
        try:
            Trial(module, call, {"": style}, {}, self.size).run(True)
        except TrialError as error:
            raise ValueError(
                f"sequence_parallel=True: {self.path}.{path} ({type(module).__name__}) can work neither on a part of "
                f"the sequence nor on one that is gathered for it: {error}. Leave sequence_parallel out"
            ) from None
        self.settled[path] = style

    # ---- blocks

    def _split(self, path: str, module: nn.Module, call: Call) -> tuple[dict[str, Style] | None, str]:
        """The styles of a block that pass, by path in the layer; else None, and why the first guess did not."""
        reason = self._wrapped_linear(path)
        for guess, is_declared in self._guesses(path, module, call):
            try:
                found = self._try(path, module, call, guess)
            except HeadsError:
                if is_declared:
                    raise
                reason = reason or "its heads do not divide by the group"
            except (TrialError, ValueError, TypeError) as error:
                reason = reason or str(error)
            else:
                return {f"{path}.{name}" if name else path: style for name, style in found.items()}, ""
        return None, reason

    def _wrapped_linear(self, path: str) -> str:
        """What is said of a block whose declared linears have something else in their places, such as adapters."""
        names = [p for p, s in self.declared.items() if p.startswith(f"{path}.") and s.kind in _SPLIT]
        other = next((name for name in names if not is_linear(self.modules[name])), None)
        if other is None:
            return ""
        kind = type(self.modules[other])
        return f"{other} is a {kind.__module__}.{kind.__qualname__}, which is no linear that could be split"

    def _guesses(self, path: str, module: nn.Module, call: Call) -> Iterator[tuple[dict[str, Style], bool]]:
        """What is declared (True), and what the calls suggest; each with more and more attributes made local."""
        prefix = f"{path}."
        words = {p[len(prefix) :]: s for p, s in self.declared.items() if p.startswith(prefix) and s.kind in _SPLIT}
        usable = all(is_linear(module.get_submodule(name)) for name in words)
        bases = [(words, True)] if usable and any(s.kind == "rowwise" for s in words.values()) else []
        shapes = ((guess, False) for guess in itertools.islice(_guessed_linears(module, call), _MAX_GUESSES))
        for styles, is_declared in itertools.chain(bases, shapes):
            for local in _local_attributes(module, styles):
                for sliced in _sliced_parameters(module, styles, self.size):
                    yield (
                        {"": Style("block", local=local), **styles, **dict.fromkeys(sliced, Style("heads"))},
                        is_declared,
                    )

    def _try(self, path: str, module: nn.Module, call: Call, styles: dict[str, Style]) -> dict[str, Style]:
        if call.uses_others or call.keeps_results:
            raise TrialError("what it computes beside the hidden states may be used by other modules")
        splits = block_splits(module, styles, self.size, self.path + "." + path)
        trial = Trial(module, call, styles, splits, self.size)
        kinds = trial.run(False)
        if self.sequence:
            Trial(module, call, styles, splits, self.size).run(True)
        dropouts = dict.fromkeys(trial.whole_dropouts, Style("dropout"))
        return styles | dropouts | {name: Style(kind) for name, kind in kinds.items() if name not in styles}

    def _pairs(self) -> None:
        """Two linears of the layer itself, one after the other: an MLP without a module of its own."""
        layer, call = self.modules[""], self.call("")
        own = {name: child for name, child in layer.named_children() if is_linear(child)}
        order = [name for name in (call.order if call is not None else []) if name in own]
        for first, second in itertools.pairwise(order):
            outer = _features(own[first])
            if outer[1] != _features(own[second])[0] or outer[0] != _features(own[second])[1] or first in self.settled:
                continue
            flat = self.call(first)
            if self.sequence and (flat is None or flat.hidden().dim() < 3):
                continue  # its tokens are flattened: no sequence that could be gathered
            for name in (first, second):
                self.settled.pop(name, None)
            self.settled |= {first: Style("colwise"), second: Style("rowwise")}
            self.pairs += [first, second]

    def _check_layer(self) -> None:
        """The layer as it will run, its own code included; what is doubtful is given up step by step."""
        call = self.call("")
        if call is None:
            return
        while True:
            try:
                self._try_layer(call)
                return
            except TrialError as error:
                if self.pairs:
                    for name in self.pairs:
                        self.settled.pop(name, None)
                    self.pairs = []
                elif self.sequence:
                    raise ValueError(
                        f"sequence_parallel=True: {self.path} ({type(self.modules['']).__name__}) does not compute the "
                        f"same on parts of the sequence: {error}. Leave sequence_parallel out"
                    ) from None
                else:  # without blocks every rank computes the same, whatever a trial would say
                    blocks = [path for path, style in self.settled.items() if style.kind == "block"]
                    self.settled = {p: s for p, s in self.settled.items() if s.kind in (*_KEPT, *_FULL, "whole")}
                    whole = Style("whole", note=f"left whole: in its layer, {error}")
                    self.settled |= dict.fromkeys(blocks, whole)
                    return

    def _try_layer(self, call: Call) -> None:
        if self.sequence and call.uses_others:
            raise TrialError("it passes more on than the hidden states")
        splits = block_splits(self.modules[""], self.settled, self.size, self.path)
        for sequence in (False, True) if self.sequence else (False,):
            Trial(self.modules[""], call, self.settled, splits, self.size, cuts_all=False).run(sequence)


def _holds_experts(module: nn.Module) -> bool:
    return any(is_stacked(child) for child in module.modules())


def _chooses_parameters(module: nn.Module) -> bool:
    """Whether a module may leave parameters unused: experts, as modules in a list or stacked."""
    convolutions = {id(p) for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd) for p in m.parameters()}
    stacked = any(p.dim() > 2 and id(p) not in convolutions for p in module.parameters())
    return stacked or any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.modules())


def block_splits(module: nn.Module, styles: Mapping[str, Style], size: int, where: str) -> dict[str, HeadSplit]:
    """How the linears of each module inside fall on ranks, by path within it."""
    modules = dict(module.named_modules(remove_duplicate=False))
    parents: dict[str, dict[str, tuple[nn.Module, Style]]] = {}
    for path, style in styles.items():
        if style.kind == "colwise":
            parents.setdefault(path.rpartition(".")[0], {})[path] = (modules[path], style)
    splits = {}
    for parent, linears in parents.items():
        own = styles.get(parent)
        prefix = f"{parent}." if parent else ""
        params = {p: module.get_parameter(p) for p, s in styles.items() if s.kind == "heads" and p.startswith(prefix)}
        options: dict[str, Any] = {"parameters": params, "local": own.local if own is not None else ()}
        splits[parent] = split_heads(f"{where}.{parent}".strip("."), modules[parent], linears, size, **options)
    return splits


def _features(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear."""
    weight = linear._parameters.get("weight")
    if weight is None:  # one that is computed, at each reading again (spectral norm counts them)
        return linear.in_features, linear.out_features  # type: ignore[return-value]
    return (weight.shape[1], weight.shape[0]) if isinstance(linear, nn.Linear) else (weight.shape[0], weight.shape[1])


def _guessed_linears(module: nn.Module, call: Call) -> Iterator[dict[str, Style]]:
    """Column- and row-parallel linears by how the block calls them: the last gives the block's output, others its
    heads or features, some of them through a smaller one (latent attention)."""
    if len(call.order) < 2 or call.order[-1] in call.reads:
        return
    modules = dict(module.named_modules())
    last, reads = call.order[-1], call.reads
    between = [name for name in call.order[:-1] if name not in reads]
    inner = _features(modules[last])[0]
    subsets = [tuple(reads)] if not between else []
    if between and len(reads) <= 3:
        subsets = [c for n in range(len(reads) + 1) for c in itertools.combinations(reads, n)]
    for subset in subsets:
        columns = [*subset, *between]
        if not columns:
            continue
        choices = [_fused(module, _features(modules[name])[1], inner) for name in columns]
        for choice in itertools.product(*choices):
            yield {**dict(zip(columns, choice, strict=True)), last: Style("rowwise")}


def _fused(module: nn.Module, features: int, inner: int) -> list[Style]:
    """How the output features of a linear may be laid out, where the row-parallel one takes `inner` features."""
    heads, kv_heads = said(module, QUERY_COUNTS), said(module, KEY_COUNTS)
    if not heads or inner % heads:
        plain = [Style("colwise")]
        return plain if features != 2 * inner else [Style("colwise", sections=2), Style("colwise", unit=2), *plain]
    width = inner // heads
    kv_heads = kv_heads or heads
    sections = (heads * width, kv_heads * width, kv_heads * width)
    found = []
    if features == sum(sections):
        found.append(Style("colwise", sections=sections, unit=width))
        found.append(Style("colwise", unit=features // kv_heads))
    if features == 3 * inner:
        found += [Style("colwise", sections=3, unit=width), Style("colwise", unit=3 * width)]
    if features == inner + 2 * width:
        found.append(Style("colwise", sections=(inner, width, width), unit=width))
    if features == 2 * inner:
        found += [Style("colwise", unit=2 * width), Style("colwise", sections=2, unit=width)]
    if features % heads == 0 and features not in (inner, kv_heads * width):
        found.append(Style("colwise", unit=features // heads))
    if features % width == 0:
        found.append(Style("colwise", unit=width))
    return list(dict.fromkeys(found)) or [Style("colwise")]


def _local_attributes(module: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, ...]]:
    """Attributes to be divided beside the well-known ones: none; those of the split width; and those of heads."""
    yield ()
    last = next(name for name, style in styles.items() if style.kind == "rowwise")
    inner = _features(module.get_submodule(last))[0]
    heads, kv_heads = said(module, QUERY_COUNTS), said(module, KEY_COUNTS)
    known = (*QUERY_COUNTS, *KEY_COUNTS, "num_key_value_groups", "layer_idx")
    own = {k: v for k, v in vars(module).items() if type(v) is int and k not in known}
    by_width = tuple(name for name, value in own.items() if value == inner)
    by_heads = tuple(name for name, value in own.items() if value in (heads, kv_heads) and value > 1)
    seen: set[tuple[str, ...]] = {()}
    for names in (by_width, by_heads, by_width + by_heads):
        if names not in seen:
            seen.add(names)
            yield names


def _sliced_parameters(module: nn.Module, styles: Mapping[str, Style], size: int) -> Iterator[tuple[str, ...]]:
    """Parameters with a row per head, beside those of linears: none of them, or all."""
    yield ()
    counts = {said(module, QUERY_COUNTS), said(module, KEY_COUNTS)} - {0}
    linears = tuple(f"{name}." for name, child in module.named_modules() if is_linear(child))
    names = tuple(
        name for name, p in module.named_parameters() if p.dim() and len(p) in counts and not name.startswith(linears)
    )
    if names:
        yield names
