"""The breaks that `tools/planted_breaks.py` plants, and the tests that should catch each.

A break is found by its text, which stands once in fastpar/, kernels/ and csrc/, wherever its file has moved to. `tests`
are files of tests/ wherever they lie, with pytest's -k behind a blank where a few of a file's tests are enough.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`old` becomes `new`; `tests` should fail, one of them at least."""

    name: str
    part: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(part: str, *rows: tuple[str, str, str, str]) -> list[Break]:
    return [Break(name, part, old, new, tuple(tests.split("; "))) for name, old, new, tests in rows]


COMM = _of(
    "comm",
    (
        "shards leave out the remainder",
        "each = -(-total // parts)\n",
        "each = total // parts\n",
        "test_comm.py shard_sizes",
    ),
    (
        "averages over gloo are sums",
        '            if op == "avg":\n                buffer.div_(self._size)\n            if out is None:',
        "            if out is None:",
        "test_comm.py gloo_averages",
    ),
    (
        "averages over hosts are divided by the hosts",
        "total.div_(self.layout.size)",
        "total.div_(self.layout.num_hosts)",
        "test_hierarchical.py collective_across_hosts_matches",
    ),
    (
        "sums of bfloat16 are rounded at every step",
        "return torch.float32 if dtype in _LOW_PRECISION else dtype",
        "return dtype",
        "test_comm.py gloo_averages; test_hierarchical.py sixteen_bit",
    ),
    (
        "the gradient of a gathered sequence is not summed",
        "return reduce_scatter_sequence(grad, comm, dim=dim, sizes=sizes), None, None, None",
        "return scatter_to(grad, comm, dim=dim, sizes=sizes), None, None, None",
        "test_comm.py autograd",
    ),
    (
        "buckets forget what they hold",
        "filling[kind] = bucket, held + tensor.nbytes",
        "filling[kind] = bucket, tensor.nbytes",
        "test_comm.py coalesced",
    ),
    (
        "a step after a collective runs at every wait",
        "            self._first = self._step = None\n        return self._result",
        "        return self._result",
        "test_wire.py done_once",
    ),
    (
        "negative tags are sent",
        "if not 0 <= tag <= _MAX_TAG:",
        "if not tag <= _MAX_TAG:",
        "test_point_to_point.py wrong_arguments",
    ),
    (
        "sums of quantised parts are never averaged",
        "return total / parts if average else total",
        "return total",
        "test_block_codes.py sums_to_the_bits; test_wire.py block_wire_adds",
    ),
    (
        "ranks round with the same random numbers",
        "seed = mixed(mixed(self.seed, comm.rank), self._num_messages) >> 1",
        "seed = mixed(mixed(self.seed, 0), self._num_messages) >> 1",
        "test_wire.py different_random",
    ),
)

OPS = _of(
    "ops",
    (
        "the gradient of a scattered embedding is not gathered",
        "        if ctx.dim is not None:\n            sizes = shard_sizes(ids.shape[ctx.dim], ctx.comm.size)\n"
        "            grad = gather_sequence(grad, ctx.comm, dim=ctx.dim, sizes=sizes)\n",
        "",
        "test_embedding.py ranks_match",
    ),
    (
        "of two ranks' samples the worse one is taken",
        "rank = pairs[..., 0].max(dim=0, keepdim=True).indices",
        "rank = pairs[..., 0].min(dim=0, keepdim=True).indices",
        "test_vocab_sample.py ranks_draw",
    ),
    (
        "a deferred weight gradient replaces an earlier one",
        "                grad = before + grad\n",
        "                grad = grad * 1\n",
        "test_weight_grad_split.py several_times or twice or tied",
    ),
    (
        "a deferred weight gradient shares its memory",
        "elif not entry.is_fresh and own_grad(parameter.variable) is None:",
        "elif False and not entry.is_fresh:",
        "test_weight_grad_split.py copied",
    ),
    (
        "an expert reads rows before they are there",
        "self._wait(self._chunk_of[expert] + 1)",
        "self._wait(self._chunk_of[expert])",
        "test_moe_mlp.py chunks",
    ),
    (
        "an expert takes one token more than its capacity",
        "kept = torch.where(positions.view(-1) >= capacity, -1, ranked)",
        "kept = torch.where(positions.view(-1) > capacity, -1, ranked)",
        "test_moe_capacity.py worked_example",
    ),
    (
        "Newton-Schulz leaves a wide matrix on its side",
        "return x.T if dim == -2 else x\n",
        "return x\n",
        "test_newton_schulz.py uneven_and_empty or turned",
    ),
)

OPTIM = _of(
    "optim and clip",
    (
        "gradients are multiplied with the loss scale again",
        "factor = scale.float().reciprocal() * factor",
        "factor = scale.float() * factor",
        "test_optim.py gradient_scale or torch_grad_scaler",
    ),
    (
        "a clipping factor is used in the next step again",
        "self.grad_factor = self.found_inf = None\n        factor = 1.0",
        "self.found_inf = None\n        factor = 1.0",
        "test_optim.py then_forgotten",
    ),
    (
        "every step rounds with the same random numbers",
        "StochasticRounding((self.seed << 32) + batch.number,",
        "StochasticRounding(self.seed << 32,",
        "test_optim.py survive_on_average",
    ),
    (
        "weight decay lets weights grow",
        'weight.mul_(1 - lr * options["weight_decay"])',
        'weight.mul_(1 + lr * options["weight_decay"])',
        "test_muon.py bits_are_those_of_torch",
    ),
    (
        "rows and columns of a matrix are mistaken",
        "return -2 if self._specs[index].kinds[axis] == ROWS else -1",
        "return -1 if self._specs[index].kinds[axis] == ROWS else -2",
        "test_muon.py owners_give_the_bits",
    ),
    (
        "a norm is not that of all ranks",
        "parts[together[0]] = self._comm(name).all_reduce(parts[together[0]])",
        "parts[together[0]] = self._comm(name).all_reduce(parts[together[0]]) * 0 + parts[together[0]]",
        "test_clip.py one_dim_of_shards or stages",
    ),
    (
        "sums that are combined by hand are those of one rank",
        "self.sums = Communicator.of(group).all_reduce(self.sums)",
        "self.sums = Communicator.of(group).all_reduce(self.sums) * 0 + self.sums",
        "test_clip.py by_hand",
    ),
    (
        "tied embeddings count once for each stage",
        "index, count = index * stages + stage, count * stages",
        "index, count = index, count",
        "test_clip.py tied or share_counts_once",
    ),
    (
        "a clipping factor that is set already is left out of the norm",
        "norm = norm * pending\n",
        "norm = norm * 1.0\n",
        "test_clip.py multiplies_itself",
    ),
    (
        "a norm is not unscaled before it clips",
        "return scale * _factor(self.norm(dtype) * scale, max_norm, eps)",
        "return scale * _factor(self.norm(dtype), max_norm, eps)",
        "test_clip.py includes_the_scale",
    ),
)

PRECISION = _of(
    "precision",
    (
        "an unscaled gradient is never looked at",
        "found |= bool(here)\n",
        "found |= False\n",
        "test_precision.py twelve_steps",
    ),
)

EXPERT = _of(
    "expert",
    (
        "weights of float64 tokens' choices are float32",
        "    dtype = torch.promote_types(x.dtype, torch.float32)\n    if weights is None:",
        "    dtype = torch.float32\n    if weights is None:",
        "test_random_calls.py any_call and experts; test_moe_mlp.py nowhere_less",
    ),
    (
        "a busy expert's bias goes up",
        "move = torch.sign(load.sum() - load * len(load))",
        "move = torch.sign(load * len(load) - load.sum())",
        "test_expert_losses.py biases_move",
    ),
    (
        "a loss over the global batch counts one rank's part",
        "return ranks * _balance(",
        "return _balance(",
        "test_expert_losses.py global_batch",
    ),
    (
        "padding counts in the z loss",
        "return _without_padding(squares, mask).sum()",
        "return squares.sum()",
        "test_expert_losses.py without_padding or attached",
    ),
    (
        "tokens are given to the wrong sequences",
        "sequences = torch.arange(num_sequences, device=x.device).repeat_interleave(x.shape[1])",
        "sequences = torch.arange(num_sequences, device=x.device).repeat(x.shape[1])",
        "test_expert_losses.py takes_the_rows",
    ),
    (
        "gradients of split experts are of one rank's scale",
        "return self.tp.size / (self.ep.size * self.etp.size) if self.is_split else 1.0",
        "return 1.0",
        "test_moe_layer.py every_layout",
    ),
    (
        "copies of an expert are filled unevenly",
        "level = (load + below) / count",
        "level = (load + below) / (count + 1)",
        "test_expert_placement.py worked_examples or best_that",
    ),
)

ZERO = _of(
    "zero",
    (
        "optimizers read this rank's term of a number",
        "return op(args[0].full_tensor() if is_on() else args[0]._local_tensor)",
        "return op(args[0]._local_tensor)",
        "test_zero_training.py numbers_that",
    ),
    (
        "a list of parameters is a unit that nothing gathers",
        '_by_who_runs(model, list(_default(model, ""))) if units',
        'list(_default(model, "")) if units',
        "test_zero_stage3.py parameters_in_lists",
    ),
    (
        "every microbatch is reduced",
        "return self.is_syncing and self._passes + 1 >= self._accumulate",
        "return self.is_syncing",
        "test_zero.py no_sync; test_zero.py steps_equal",
    ),
    (
        "replicas add what they should average",
        'replicate.all_reduce(flat, "avg", out=flat)',
        'replicate.all_reduce(flat, "sum", out=flat)',
        "test_zero.py steps_equal or how_gradients; test_zero_parallel.py",
    ),
    (
        "ranks of cp average what they should sum",
        "return mean if self.num_parts == 1 else mean.mul_(self.num_parts)",
        "return mean",
        "test_zero_context.py summed_over_cp",
    ),
    (
        "a pass on top of a reduced one is taken for its mean",
        "bucket.set_aside(but=self._came_alone)",
        "bucket.set_aside()",
        "test_zero_passes.py",
    ),
    (
        "16-bit means are rounded before they are added",
        "elif self.flat.dtype.itemsize < 4:  # as they were added up",
        "elif False:",
        "test_zero_stage3.py masters; test_zero.py steps_equal or how_gradients",
    ),
    (
        "a second backward replaces the mean of the first",
        "local(optim_param.grad).add_(mine.to(like.device))",
        "local(optim_param.grad).copy_(mine.to(like.device))",
        "test_zero_passes.py; test_zero_stage3.py plain_gradients or summed",
    ),
    (
        "a step takes the gradients",
        '        self._stepped()\n        if hasattr(optimizer, "grad_factor"):',
        "        for parameter in self.parameters():\n            parameter.grad = None\n        self._stepped()\n"
        '        if hasattr(optimizer, "grad_factor"):',
        "test_zero_loops.py gradients_stay_until_zero_grad",
    ),
    (
        "gradients are hidden by a forward that no backward pass follows",
        "        if self._was_shown:\n            self.show()",
        "        if False:\n            self.show()",
        "test_zero_loops.py gradients_stay_until_zero_grad",
    ),
    (
        "writes to gathered parameters are not looked at",
        "            if unit.written():\n                self._free(unit)",
        "            if False:\n                self._free(unit)",
        "test_zero_loops.py written_to_what_is_gathered",
    ),
    (
        "a step does not look for writes that torch has not counted",
        "if self._looks.is_due(step) and follow_writes(params):",
        "if False and follow_writes(params):",
        "test_zero_masters.py masters_are_what_is_written",
    ),
    (
        "a master weight takes the rounded value for its own",
        "master.copy_(torch.where(is_own, master, values.to(master.dtype)))",
        "master.copy_(values.to(master.dtype))",
        "test_zero_one_rank.py master",
    ),
    (
        "a step with a NaN is taken",
        "if self.skip_nonfinite and any(total.sums.tolist()[:2]):",
        "if self.skip_nonfinite and False:",
        "test_zero_skip.py one_rank",
    ),
    (
        "clipping divides by the loss scale twice",
        "self._factor = total.clip_factor(self.max_norm, scale=unscale, dtype=_norm_dtype(params)) / unscale",
        "self._factor = total.clip_factor(self.max_norm, scale=unscale, dtype=_norm_dtype(params))",
        "test_zero_one_rank.py clipping",
    ),
    (
        "a changed activation is saved as it is now",
        "return self._tensor._version != self._version",
        "return False",
        "test_zero_activations.py changes_after or changed_before",
    ),
    (
        "files of two saves are one checkpoint",
        'low, high = comm.all_reduce(low, "min"), comm.all_reduce(high, "max")',
        "low, high = low, high",
        "test_zero_arguments.py another_save",
    ),
    (
        "an optimizer that is not elementwise is sharded",
        "if not float(difference) <= TOLERANCE * scale:",
        "if False and difference is scale:",
        "test_zero_arguments.py other_things",
    ),
    (
        "a worker may be further ahead than it should",
        "return self._steps[worker] - min(self._steps.values()) <= self._staleness",
        "return self._steps[worker] - min(self._steps.values()) <= self._staleness + 1",
        "test_parameter_server.py further_ahead",
    ),
    (
        "the parameter server adds instead of averaging",
        "None if total is None else total.div_(self._num_workers).to(parameter.dtype)",
        "None if total is None else total.to(parameter.dtype)",
        "test_parameter_server.py get_the_mean or all_reduce",
    ),
    (
        "the step proper runs on the optimizer itself",
        "return (_spent(optimizer), *(()",
        "return (optimizer, *(()",
        "test_zero_training.py counted_once_a_step",
    ),
    (
        "forwards of stage 3 do not wait for what others write",
        "        for groups in self.groups.with_experts():\n            groups.shard.barrier()\n\n    def _loaded",
        "\n    def _loaded",
        "test_zero_loops.py write_between_passes",
    ),
    (
        "copies that were written to are not compared",
        "            self.writes.compare(self.comms())\n",
        "            self.writes.note()\n",
        "test_zero_replica_writes.py",
    ),
)

CONTEXT = _of(
    "context",
    (
        "labels of split sequences are a token off",
        "shifted[:, :-1] = labels[:, 1:]",
        "shifted[:] = labels",
        "test_context_parallel.py shift_and_positions",
    ),
    (
        "the last token of a document learns the next one's first",
        "        shifted[slice(None) if len(lengths or ()) == 1 else row, ..., ends] = IGNORE_INDEX",
        "        shifted[row:row, ..., ends] = IGNORE_INDEX",
        "test_context_parallel.py shift_and_positions",
    ),
    (
        "positions count on over documents",
        "within = torch.arange(tokens) - _document_starts(lengths, tokens)",
        "within = torch.arange(tokens) - 0 * _document_starts(lengths, tokens)",
        "test_context_parallel.py shift_and_positions",
    ),
    (
        "of two blocks of keys the larger one counts",
        "total = torch.logaddexp(lse, other_lse)",
        "total = torch.maximum(lse, other_lse)",
        "test_context_attention.py float32_matches",
    ),
    (
        "zigzag deals the second half in the order of the first",
        "chunks[2 * size - 1 - rank]]",
        "chunks[size + rank]]",
        "test_attention_tiles.py balanced",
    ),
    (
        "every document of a rank reads all keys before it",
        "document = torch.searchsorted(starts, own, right=True) - 1",
        "document = torch.searchsorted(starts, own, right=True) * 0",
        "test_packed_layouts.py pairs_and_keys",
    ),
    (
        "rotary frequencies go by a rank's own positions",
        "last.max().to(given).expand(",
        "given.max().to(given).expand(",
        "test_context_parallel.py longest_position",
    ),
    (
        "mixing of tokens is tried in evaluation only",
        "for training in (False, True):\n            with _undisturbed",
        "for training in (False,):\n            with _undisturbed",
        "test_context_parallel.py both_modes",
    ),
)

TENSOR = _of(
    "tensor, swap and guards",
    (
        "a whole parameter's gradient is that of one rank",
        "return reduce_from(grad, self.comm) if grad.requires_grad else self.comm.all_reduce(grad)",
        "return grad.clone()",
        "test_swap.py gradient_norm or norm_after; test_tensor_layers.py column_then_row",
    ),
    (
        "every rank drops the elements of the first",
        "offset[0], shape[0] = offset[0] + rank * shape[0], size * shape[0]",
        "offset[0], shape[0] = offset[0], size * shape[0]",
        "test_dropout.py layout",
    ),
    (
        "gradients that differ between ranks are not noticed",
        "apart = ((everyone - everyone[0]).abs() > _FAR * size[:, None]).any(-1)",
        "apart = ((everyone - everyone[0]).abs() > 1e9 * size[:, None]).any(-1)",
        "test_guards.py partial_gradient",
    ),
    (
        "a layer that mixes positions is not noticed",
        "return bool(((a - b).abs() > _FAR * scale + 1e-12).any())",
        "return bool(((a - b).abs() > 1e9 * scale + 1e-12).any())",
        "test_guards.py mixes_positions",
    ),
    (
        "draws from generators that differ are not looked for",
        "self._apart = {name: state_of(name, self.device) for name in apart}",
        "self._apart = {}",
        "test_guards.py skipped_by_generators",
    ),
    (
        "the sum of a whole parameter's gradient has no graph",
        "return reduce_from(grad, self.comm) if grad.requires_grad else self.comm.all_reduce(grad)",
        "return self.comm.all_reduce(grad)",
        "test_second_derivatives.py gradient_penalties",
    ),
    (
        "optimizers of split parameters read this rank's term",
        "    register_optimizer_step_pre_hook(_HOOKS.begin)\n",
        "",
        "test_optimizer_numbers.py one_process",
    ),
    (
        "writes to gathered parts of a parameter are lost",
        "x.__class__ = GatheredView if _is_copy(x, self) else LocalView",
        "x.__class__ = LocalView",
        "test_split_views.py no_write",
    ),
)

GRID = _of(
    "tensor-parallel grids",
    (
        "a bias on a grid has the gradient of one rank's tokens",
        "bias = copy_to(copy_to(bias, self.grid.replicas), self.grid.z)",
        "bias = copy_to(bias, self.grid.replicas)",
        "test_grid_linear.py an_mlp",
    ),
    (
        "axes of a grid do not turn from layer to layer",
        'return pair if self.role == "column" else pair[::-1]',
        "return pair",
        "test_grid_linear.py an_mlp",
    ),
)

PIPELINE = _of(
    "pipeline",
    (
        "hooks run on the stand-ins of layers that are elsewhere",
        "            absent.is_sealed = True\n",
        "            absent.is_sealed = False\n",
        "test_pipeline_copies.py hook_on_every_layer",
    ),
    (
        "a tied weight may be frozen on one rank alone",
        "if _State.IS_TRAINED | _State.IS_FROZEN in state:",
        "if _State.IS_TRAINED | _State.IS_FROZEN in state and False:",
        "test_pipeline_copies.py one_rank_does",
    ),
    (
        "microbatches count alike however many tokens they have",
        "divisors.append(total / count if count else math.inf)",
        "divisors.append(len(group) if count else math.inf)",
        "test_pipeline_edges.py weigh or counts; test_pipeline_vocab.py models_train; test_pipeline_families.py",
    ),
    (
        "gradients of one weight version replace another's",
        "parameter.grad.add_(leaf.grad)",
        "parameter.grad = leaf.grad",
        "test_pipeline_runtime.py update_rule",
    ),
    (
        "batches that do not divide are cut otherwise",
        "return list(value.tensor_split(count)) if count > 1 else [value]",
        "return list(value.chunk(count)) if count > 1 else [value]",
        "test_pipeline_edges.py cut_in_order",
    ),
    (
        "interleaved schedules warm up too little",
        "return (stages_per_rank - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank)",
        "return (stages_per_rank - 1) * len(rounds[0]) + (num_ranks - 1 - rank)",
        "test_schedule_generators.py looped or torch_lists",
    ),
    (
        "a weight gradient comes one earlier",
        "            if len(pending) > delay:",
        "            if len(pending) >= delay:",
        "test_schedule_generators.py zb_h",
    ),
    (
        "2BW uses the newest weights",
        "return max(0, microbatch // size - 1)",
        "return max(0, microbatch // size)",
        "test_schedule_generators.py 2bw",
    ),
    (
        "weights gathered before an update are used after it",
        "wanted = [s for s in ahead if action.type is not ActionType.STEP or s != action.stage]",
        "wanted = list(ahead)",
        "test_schedule_lowering.py after_an_update",
    ),
    (
        "a message to the own rank takes time",
        "        if link[0] == link[1]:\n            return index, 0\n",
        "",
        "test_simulate.py one_rank",
    ),
    (
        "gradients are not looked at where a stage is cut",
        "not _is_view(given, received) or _changes_gradient(received, given)",
        "not _is_view(given, received)",
        "test_pipeline_partition.py to_gradients_between",
    ),
    (
        "hooks of code beside a stage's layers are on its gradient",
        "stream.received is None else alias(stream.received)",
        "stream.received is None else stream.received",
        "test_pipeline_partition.py to_gradients_between",
    ),
)

RECOMPUTE = _of(
    "recompute",
    (
        "segments leave out the last layers",
        "bounds = [segment * base + min(segment, longer) for segment in range(count + 1)]",
        "bounds = [segment * base for segment in range(count + 1)]",
        "test_recompute_plan.py segments",
    ),
    (
        "a second run that saves other tensors is believed",
        "                if expected != found:\n                    raise RecomputeError(",
        "                if False:\n                    raise RecomputeError(",
        "test_recompute.py same_again",
    ),
    (
        "the plan of least memory is that of most",
        "choice[s, t] = min(bytes_if, key=lambda j: bytes_if[j])",
        "choice[s, t] = max(bytes_if, key=lambda j: bytes_if[j])",
        "test_recompute_plan.py budget or optimal or fit",
    ),
)

STORAGE = _of(
    "storage",
    (
        "free ranges of a file are not joined",
        "for i in (at, at - 1):  # join",
        "for i in (at,):  # join",
        "test_storage.py joined",
    ),
    (
        "tensors of an index may overlap",
        "            if offset < end:\n                _refuse(",
        "            if False:\n                _refuse(",
        "test_storage_hostile.py hostile_file",
    ),
    (
        "a forked child uses its parent's threads",
        "return os.getpid() == self._owner",
        "return True",
        "test_storage_fork.py",
    ),
)

MESH = _of(
    "mesh",
    (
        "expert dims need not divide the ranks",
        "if inner % (ep * etp):",
        "if inner % ep:",
        "test_mesh.py do_not_fit",
    ),
    (
        "the rest of the ranks is the product of the others",
        "return {**sizes, rest: world_size // known}",
        "return {**sizes, rest: known}",
        "test_mesh.py size_that_is_open",
    ),
)

PLANNING = _of(
    "layouts and planner",
    (
        "heads need not divide over ranks of ulysses",
        '(x.method == "ulysses") & (x.heads % (x.tp * x.cp) != 0)',
        '(x.method == "ulysses") & (x.heads % x.tp != 0)',
        "test_layouts.py broken_rule",
    ),
    (
        "1F1B is thought to keep all microbatches",
        "[m, np.minimum(m, p), looped,",
        "[m, m, looped,",
        "test_planner.py in_flight",
    ),
    (
        "rows of a grid's ranks may be none",
        "(x.grid_z > 1) & (x.batch > 0) & _leaves_one_out(x)",
        "(x.grid_z > 1) & (x.batch < 0) & _leaves_one_out(x)",
        "test_layouts.py broken_rule",
    ),
)

INTEGRATIONS = _of(
    "integrations and pretrained",
    (
        "every rank reads the first experts of a file",
        "for n in names[start:stop]]",
        "for n in names[: stop - start]]",
        "test_weights.py stacks",
    ),
    (
        "a step of a trainer counts one rank's rows",
        'args.gradient_accumulation_steps * self.mesh.size("dp"))',
        "args.gradient_accumulation_steps)",
        "test_trainer.py trains_evaluates",
    ),
    (
        "evaluation sees this rank's part of the logits",
        "with gathered([m for m in self.model.modules() if isinstance(m, VocabParallelHead)]):",
        "with gathered([]):",
        "test_trainer.py trains_evaluates",
    ),
)

VERIFICATION = _of(
    "verification and trial",
    (
        "errors are of no size",
        "return error / scale if scale > 0 and math.isfinite(error) else 0.0",
        "return 0.0",
        "test_verify.py rounding_alone",
    ),
    (
        "a tensor that is not finite is equal to another",
        "not bool((torch.isfinite(found) & torch.isfinite(wanted)).all()):",
        "False:",
        "test_plan_proving.py finite",
    ),
)

KERNELS = _of(
    "kernels/triton",
    (
        "SwiGLU's gradient leaves out the derivative of the sigmoid",
        "(dout_s * u * (1.0 + g * (1.0 - s)))",
        "(dout_s * u)",
        "test_swiglu.py interpreter",
    ),
    (
        "dropout numbers elements from 0 in every row",
        "index = (begin + column).to(tl.uint64) + 1",
        "index = (begin * 0 + column).to(tl.uint64) + 1",
        "test_dropout.py interpreter",
    ),
    (
        "the norm forgets eps",
        "rstd = tl.rsqrt(tl.sum(squares, axis=1) / hidden + tl.cast(eps, COMPUTE))",
        "rstd = tl.rsqrt(tl.sum(squares, axis=1) / hidden)",
        "test_rms_norm.py interpreter",
    ),
    (
        "the allocator does not know who reads a kept table",
        "    table.there.record_stream(torch.cuda.current_stream(device))\n",
        "",
        "test_rehearsal.py launches",
    ),
)

CSRC = _of(
    "csrc",
    (
        "the padding row of an embedding gets a gradient",
        "return row >= 0 && row < num_rows && ids[i] != padding_idx ? row : -1;",
        "return row >= 0 && row < num_rows ? row : -1;",
        "test_embedding.py match_torch",
    ),
    (
        "dropout repeats its random numbers",
        "uint64_t z = seed + (start + 1) * kGoldenGamma;",
        "uint64_t z = seed + kGoldenGamma;",
        "test_dropout.py kernel_equals_reference",
    ),
    (
        "a merged loss takes the sums of ranks as of one maximum",
        "sum += static_cast<double>(stats[1]) * std::exp(static_cast<double>(stats[0]) - reference);",
        "sum += static_cast<double>(stats[1]);",
        "test_cross_entropy_shards.py",
    ),
    (
        "what a merged loss ignores counts",
        "loss[row] = id == ignore_index ? T(0)",
        "loss[row] = id == ignore_index - 1 ? T(0)",
        "test_cross_entropy_shards.py",
    ),
    (
        "all sequences of a batch have the positions of the first",
        "a.table_batch_stride = cos.dim() == 3 && cos.size(0) > 1 ? from.positions * half : 0;",
        "a.table_batch_stride = 0;",
        "test_rotary_embedding.py",
    ),
    (
        "a fused step is taken in spite of found_inf",
        "bool is_skipped(const std::optional<Tensor>& found_inf) { return scalar_or(found_inf, 0.0) != 0.0f; }",
        "bool is_skipped(const std::optional<Tensor>& found_inf) { return scalar_or(found_inf, 0.0) == -1.0f; }",
        "test_optimizer.py; test_optim.py",
    ),
    (
        "a norm's weight has the gradient of one thread's rows",
        "for (int64_t block = 0; block < blocks; ++block) {\n                                  const T* row = partial",
        "for (int64_t block = 0; block < 1; ++block) {\n                                  const T* row = partial",
        "test_rms_norm.py",
    ),
    (
        "rows of a table behind the first begin at the first one's rows",
        "begins_.push_back(begins_.back() + x.size(0));",
        "begins_.push_back(begins_.back() + tables[0].size(0));",
        "test_moe_rows.py",
    ),
)

ATTENTION = _of(
    "csrc/attention",
    (
        "a block of which little is seen counts as full",
        "const bool is_full = visible == int64_t{kBlock} * kBlock;",
        "const bool is_full = visible >= int64_t{kBlock};",
        "test_attention.py equal_dense",
    ),
    (
        "a band of visible keys is one too narrow",
        "std::min<int64_t>(t.k1, q1 + high);",
        "std::min<int64_t>(t.k1, q1 + high - 1);",
        "test_attention.py equal_dense",
    ),
)

ASSEMBLY = _of(
    "assembly",
    (
        "gradients are not averaged over data parallelism",
        "made.passes.train(fed, whole.tokens / self.layout.dp / scale)",
        "made.passes.train(fed, whole.tokens / scale)",
        "test_assembly.py others_got",
    ),
    (
        "ranks divide by their own tokens",
        "return GlobalBatch(rows // self._sharing, total // self._sharing)",
        "return GlobalBatch(rows // self._sharing, tokens * (rows // self._sharing // (fed.rows if fed else 1)))",
        "test_assembly.py others_got",
    ),
    (
        "balance losses are not scaled by microbatches",
        "router.loss_scale = scale / (self.layout.accumulate * self._microbatches)",
        "router.loss_scale = scale / self.layout.accumulate",
        "test_assembly.py everything_at_once",
    ),
    (
        "routers do not know of other ranks' tokens",
        '            router.batch_comms = [Communicator(self.mesh.group("dp"))]',
        "            router.batch_comms = []",
        "test_assembly.py others_got",
    ),
    (
        "routers do not know that the sequence is split",
        '            context.changes.set(router, "comm", comm)',
        "            pass",
        "test_assembly.py others_got",
    ),
    (
        "the norm counts tied weights twice",
        "share = (parameter.ranks.index(rank), len(parameter.ranks)) if i == 0 else None",
        "share = (0, 1)",
        "test_assembly.py others_got",
    ),
    (
        "gradients of tied weights are those of one stage",
        "            for tensor in present[1:]:\n                total += tensor\n",
        "",
        "test_assembly.py others_got",
    ),
    (
        "the norm counts a sharded head twice",
        "if self._name(group) not in self._everything:",
        "if self._name(group):",
        "test_assembly.py others_got",
    ),
    (
        "labels are not shifted",
        "shifted[..., : -self.shift] = target[..., self.shift :]",
        "shifted[..., : -self.shift] = target[..., : -self.shift]",
        "test_assembly.py others_got",
    ),
    (
        "gradients of cp are averaged",
        "return mean if self.num_parts == 1 else mean.mul_(self.num_parts)",
        "return mean",
        "test_assembly.py others_got",
    ),
    (
        "masters of stage 3 do not know that weights are tied",
        "    vars(owner).update(vars(sharded))  # pipelines mark what stages share\n",
        "",
        "test_assembly.py others_got",
    ),
    (
        "experts have the gradients of all their ranks",
        "grad_scale=tp / (ep * etp) if ep * etp > 1 else 1.0,",
        "grad_scale=1.0,",
        "test_assembly.py others_got",
    ),
    (
        "a sharded head's gradient is not divided",
        "return counted.to(dtype) / (num_counted * divisor)",
        "return counted.to(dtype) / num_counted",
        "test_assembly.py others_got",
    ),
    (
        "the norm is that of a pipeline stage",
        '            if dim == "pp":\n                self._everything.append(self._name(group))\n',
        '            if dim == "pp":\n                continue\n',
        "test_assembly.py others_got",
    ),
    (
        "data-parallel ranks read the same",
        'start = step * batch + self.mesh.rank("dp") * each',
        "start = step * batch",
        "test_assembly.py others_got",
    ),
)

BREAKS = [
    *COMM, *OPS, *OPTIM, *PRECISION, *EXPERT, *ZERO, *CONTEXT, *TENSOR, *GRID, *PIPELINE, *RECOMPUTE, *STORAGE, *MESH,
    *PLANNING, *INTEGRATIONS, *VERIFICATION, *KERNELS, *CSRC, *ATTENTION, *ASSEMBLY,
]  # fmt: skip
