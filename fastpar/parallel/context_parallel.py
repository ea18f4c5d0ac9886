"""Context parallelism in a model that exists: Hugging Face's attention functions, and dropout of the residual stream.

A model of Hugging Face calls its attention by the name in its config, from a registry; `connect` gives this model (its
own copy of the config) the name "fastpar_context". That function attends over the tokens of all ranks, and the mask
function of the same name makes no mask at all: which token sees which is said by the layers' types and by the documents
of the batch. Whatever else would change numbers is an error: a mask of the caller's, a keyword nobody knows, a type of
layer that is no softmax attention.

transformers is imported by the call that needs it.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fastpar.comm import Communicator
from fastpar.context.region import REGION, Context, ContextRegion, TokenPlaces, region_of
from fastpar.contracts.attention import AttentionMask
from fastpar.mesh import Mesh
from fastpar.ops.context_attention.methods import Usp
from fastpar.parallel.changes import Changes
from fastpar.parallel.model_methods import inputs_by_name
from fastpar.tensor import Adoption, LayoutDropout

NAME = "fastpar_context"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase)  # layers that see other tokens than their own
# Keywords that a decoder hands to every attention function and that change no number there.
_IDLE = {"position_ids", "cache_position", "use_cache", "past_key_values", "position_embeddings", "return_dict"}
_IDLE |= {"num_items_in_batch", "shift_labels", "logits_to_keep", "output_hidden_states"}  # of loss, head and output


def region_for(model: nn.Module, mesh: Mesh, options: Context | None, *, is_planned: bool = False) -> ContextRegion:
    """Where the model's sequences are split, after a look at what stands against it; nothing is changed.

    A model of Hugging Face gets a region, and one whose attention is redirected by a plan (`is_planned`); the layers of
    another have brought theirs."""
    if is_planned and not any(REGION in vars(module) for module in model.modules()):
        return ContextRegion(mesh.group("cp"), options, batch=(mesh.rank("dp"), mesh.size("dp")))
    if not hasattr(getattr(model, "config", None), "_attn_implementation"):
        return _region_of_own(model, mesh, options)
    batch = mesh.rank("dp"), mesh.size("dp")
    queries = _queries_a_key(model)
    region = ContextRegion(mesh.group("cp"), options, windowed=_all_windowed(model), batch=batch, queries_a_key=queries)
    _check_model(model, region, mesh.size("tp"))
    return region


def _check_model(model: nn.Module, region: ContextRegion, tp: int) -> None:
    config, name = getattr(model, "config", None), type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"context parallelism splits decoders' and encoders' self-attention, but {name} has both")
    for index, kind in enumerate(getattr(_text_config(config), "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise ValueError(f"layer {index} of {name} is {kind!r}: context parallelism splits softmax attention only")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} does not take its attention from transformers' registry (_supports_attention_backend), so that "
            "its sequences cannot be split"
        )
    for path, module in model.named_modules():
        if isinstance(module, _MIXING):
            raise ValueError(f"{path} is {type(module).__name__}: context parallelism splits softmax attention only")
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            raise ValueError(
                f"{path} scales its queries by their places, which it counts by itself from 0 on every rank "
                "(attn_temperature_tuning): set it to False in the config"
            )
    _check_heads(cast(Any, config), region, tp)


def _region_of_own(model: nn.Module, mesh: Mesh, options: Context | None) -> ContextRegion:
    """The region of the layers of a model that is not Hugging Face's, which has to be of the mesh's ranks."""
    try:
        own = region_of(model)
    except ValueError as error:
        raise ValueError(
            f"context parallelism does not know the attention of {type(model).__name__}, which is no model of Hugging "
            'Face\'s: give its modules that call F.scaled_dot_product_attention the style "attention" in a plan, or it '
            f"fastpar.context.ContextAttention layers with one ContextRegion ({error})"
        ) from None
    check_ranks(own, mesh)
    if options is not None and options != own.options:
        raise ValueError(f"context={options}, but the model's ContextRegion has {own.options}: leave one away")
    if own.batch == (0, 1):
        own.batch = mesh.rank("dp"), mesh.size("dp")  # else data-parallel ranks would share their masks of dropout
    return own


def check_ranks(region: ContextRegion, mesh: Mesh) -> None:
    """ValueError for a region of other ranks than the mesh's cp."""
    found, wanted = (ranks_of(comm) for comm in (region.comm, Communicator.of(mesh.group("cp"))))
    if found != wanted:
        raise ValueError(
            f"the model's ContextRegion has the ranks {found}, but the mesh's cp has {wanted}: make it of mesh['cp']"
        )


def ranks_of(comm: Communicator) -> list[int]:
    """The ranks of the job that are in a group."""
    if comm.group is not None:
        return dist.get_process_group_ranks(comm.group)
    return [dist.get_rank() if dist.is_initialized() else 0]


def _check_heads(config: Any, region: ContextRegion, tp: int) -> None:
    method, size = region.options.method, region.comm.size
    heads = getattr(_text_config(config), "num_attention_heads", None)
    spread = size if method == "ulysses" else method.ulysses if isinstance(method, Usp) and not method.uneven else 1
    if not isinstance(heads, int) or heads % tp or heads // tp % spread == 0:
        return
    here = heads // tp
    works = [n for n in range(1, here + 1) if here % n == 0]
    raise ValueError(
        f"Context(method={method!r}): {heads} query heads / tp {tp} = {here} cannot be spread over {spread} ranks "
        f"evenly; {', '.join(map(str, works))} can. Uneven heads: Usp({spread}, uneven=True)"
    )


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _queries_a_key(model: nn.Module) -> int:
    """Query heads that read one key/value head; 1 where the config does not say."""
    config = _text_config(getattr(model, "config", None))
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads // keys if isinstance(heads, int) and isinstance(keys, int) and 0 < keys <= heads else 1


def _all_windowed(model: nn.Module) -> bool:
    """Whether every attention layer has a window or chunks."""
    kinds = [kind for module in model.modules() if (kind := _layer_type(module)) is not None]
    if kinds:
        return all(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return getattr(getattr(model, "config", None), "sliding_window", None) is not None


def connect(model: nn.Module, region: ContextRegion, changes: Changes) -> None:
    """Let the model attend over the region, as `changes` that are undone with the others."""
    if hasattr(getattr(model, "config", None), "_attn_implementation"):
        _register()
        copies: dict[int, Any] = {}  # deepcopy's memo: parts of a config stay parts of it
        for module in model.modules():
            config = getattr(module, "config", None)
            if not hasattr(config, "_attn_implementation"):
                continue
            own: Any = copy.deepcopy(config, copies)
            if own._attn_implementation != NAME:
                own._attn_implementation = NAME
            changes.set(module, "config", own)
            changes.set(module, REGION, region)
            if "_attn_implementation" in vars(module):
                changes.set(module, "_attn_implementation", NAME)
        if region.comm.size > 1:
            changes.hooked(model.register_forward_pre_hook(PositionsGiven(region), with_kwargs=True))
            _give_last_positions(model, region, changes)
    _place_dropout(model, region, changes)
    changes.explanation.add("(attention)", "context", "", f"over {region.comm.size} ranks, {region.options.method}")


@dataclass(frozen=True)
class PositionsGiven:
    """A hook that refuses inputs as long as a rank's part but without positions: those would count from 0 on each."""

    region: ContextRegion

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inputs_by_name(module, args, kwargs)
        ids: Any = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        placed = self.region.is_placed and ids is not None and ids.shape[1] == self.region.tokens_here
        if placed and given.get("position_ids") is None:
            raise ValueError(
                f"{type(module).__name__} got {ids.shape[1]} tokens without position_ids: if they are a part that "
                "fastpar.context.shard has cut, call model(**batch); if they are whole, cut them first"
            )


def _give_last_positions(model: nn.Module, region: ContextRegion, changes: Changes) -> None:
    """Give positions to modules that compute from these alone (rotary embeddings)."""
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if "position_ids" in names and next(module.parameters(), None) is None:
            hooks = LastPosition(region, names.index("position_ids"))
            changes.hooked(
                module.register_forward_pre_hook(hooks.give, with_kwargs=True),
                module.register_forward_hook(hooks.take, with_kwargs=True),
            )


@dataclass(frozen=True)
class LastPosition:
    """Hooks by which a module sees the largest position of the whole sequences, behind this rank's.

    Frequencies of rotary embeddings may go by it ("dynamic", "longrope"): ranks whose tokens all lie at the beginning
    would take others. What comes out for that token is left out again.
    """

    region: ContextRegion
    index: int  # of the argument position_ids

    def give(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._positions(args, kwargs, 0)
        last = None if given is None else self.region.placement.last
        if given is None or last is None:
            return None
        longer = torch.cat([given, last.max().to(given).expand(*given.shape[:-1], 1)], -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (*args[: self.index], longer, *args[self.index + 1 :]), kwargs

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = self._positions(args, kwargs, 1)
        if given is None:
            return None
        for x in tree_leaves(output):
            if not isinstance(x, Tensor) or x.dim() < 2 or x.size(-2) != given.size(-1):
                raise ValueError(
                    f"{type(module).__name__} computes something from position_ids that has no place [..., tokens, D] "
                    "for each, of which context parallelism does not know what it is of a split sequence"
                )
        return tree_map(lambda x: x[..., :-1, :], output)

    def _positions(self, args: tuple[Any, ...], kwargs: dict[str, Any], more: int) -> Tensor | None:
        """Positions of this rank's tokens, and of so many more."""
        given = kwargs.get("position_ids", args[self.index] if len(args) > self.index else None)
        if self.region.is_tried or not self.region.is_placed or not isinstance(given, Tensor):
            return None
        return given if given.dim() and given.size(-1) == self.region.tokens_here + more else None


def _place_dropout(model: nn.Module, region: ContextRegion, changes: Changes) -> None:
    """Masks by the places of tokens in the whole sequence, for all that is not dropped within attention."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            changes.adopted(Adoption(module, LayoutDropout))
            cast(Any, module)._configure(module.p, sequence=None, batch=region.batch, tokens=TokenPlaces(region))
        elif isinstance(module, LayoutDropout):
            changes.set(module, "tokens", TokenPlaces(region))


def _layer_type(module: nn.Module) -> str | None:
    """What transformers calls the kind of this attention layer, or None where it says nothing."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if not isinstance(types, list | tuple) or not isinstance(index, int) or not 0 <= index < len(types):
        return None
    return str(types[index])


# ---- transformers' registries ----------------------------------------------------------------------------------------


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def no_mask(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any
) -> None:
    """No mask, after a check that none is asked for beyond what layers and documents say. Documents that transformers
    infers from jumps of position_ids are left alone: those of a split sequence jump where it is cut."""
    if use_vmap or "or_masks" in getattr(mask_function, "__qualname__", ""):
        raise ValueError("context parallelism has no custom masks: causal, windows, chunks and documents are known")
    if attention_mask is not None and not bool((attention_mask != 0).all()):
        raise ValueError(
            "attention_mask has zeros: padding is no document. Give the batch to fastpar.context.shard with documents="
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, heads, s, D] to [B, s, heads, D], over the tokens of all ranks."""
    region: ContextRegion | None = getattr(module, REGION, None)
    name = type(module).__name__
    if region is None:
        raise ValueError(f"{name} has attn_implementation={NAME!r}, which fastpar.parallelize(context=...) chooses")
    if attention_mask is not None:
        raise ValueError(f"{name} got a mask of its own, {list(attention_mask.shape)}: context parallelism has none")
    if others.get("output_router_logits"):
        raise ValueError(
            "output_router_logits adds a loss that balances experts over this rank's tokens, and such losses of parts "
            "do not add up to that of the sequence: set it to False"
        )
    unknown = [key for key, given in others.items() if key not in _IDLE and given is not None and given is not False]
    if unknown:
        raise ValueError(f"{name} passes {unknown} to its attention, which context parallelism does not know")
    if getattr(module, "is_cross_attention", False):
        raise ValueError(f"{name} is cross-attention: context parallelism splits self-attention only")
    mask = _mask_of(module, sliding_window, is_causal)
    first_head = getattr(module, "_fastpar_heads", (0,))[0]
    out = region.attend(
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        softcap=softcap,
        sink=s_aux,
        dropout=dropout,
        first_head=first_head,
    )
    return out.transpose(1, 2).contiguous(), None


def _mask_of(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> AttentionMask:
    """The mask by the layer's type and what it passes; documents come with the batch."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    config: Any = getattr(module, "config", None)
    kind, name = _layer_type(module), type(module).__name__
    window = sliding_window
    if kind == "sliding_attention" and window is None:
        window = getattr(config, "sliding_window", None)
    if kind == "full_attention" and window is not None:
        raise ValueError(f"{name} is 'full_attention' and passes sliding_window={window}: which of them is meant?")
    if kind == "sliding_attention" and window is None:
        raise ValueError(f"{name} is 'sliding_attention', but neither it nor its config has a sliding_window")
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    if kind == "chunked_attention" and chunk is None:
        raise ValueError(f"{name} is 'chunked_attention', but its config has no attention_chunk_size")
    if window is None:
        return AttentionMask(causal, None, chunk)
    if not causal:  # transformers' two-sided window of w: |p - c| < w, or half of it, by the model
        raise ValueError(f"{name} has a window of {window} and sees both ways, which context parallelism does not know")
    return AttentionMask(causal, (window - 1, 0), chunk)
