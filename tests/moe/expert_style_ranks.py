"""What ranks do with models whose experts `fastpar.parallelize` spreads."""

from __future__ import annotations

import copy
from typing import Any

import torch

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.moe.moe_models import batch, build, loss_of, step


def parallelized_steps(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[Any]:
    """Of every (model, mesh sizes, options): the averaged step of a model that `fp.parallelize` spreads, each
    data-parallel rank on its own batch, and how many elements of experts this rank keeps.
    """
    return [parallelized_step(*case) for case in cases]


def parallelized_step(name: str, sizes: dict[str, int], options: dict[str, Any]) -> Any:
    mesh = fp.init_mesh(**sizes, device="cpu")
    plain = build(name)
    model = fp.parallelize(build(name), mesh, gather_logits=True, **options)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    logits, grads = step(model, batch(mesh.rank("dp")))
    is_spread = bool({"ep", "etp"} & set(sizes))
    dense, expert = (fp.comm.Communicator(mesh.group(dim)) for dim in ("dp", "edp" if is_spread else "dp"))
    for key, grad in grads.items():
        over = expert if ".experts." in key else dense
        grads[key] = over.all_reduce(grad, "avg") if over.size > 1 else grad
    stored = sum(param.to_local().numel() for key, param in model.named_parameters() if ".experts." in key)
    with torch.no_grad():
        twin = copy.deepcopy(model)(batch(mesh.rank("dp"))).logits
        assert torch.equal(twin, model(batch(mesh.rank("dp"))).logits)
        if not options:  # with sequence parallelism no rank may be without tokens
            token = batch(mesh.rank("dp"))[:1, :1]  # one, as when a text is generated: fewer than ranks
            torch.testing.assert_close(model(token).logits, plain(token).logits, rtol=1e-4, atol=2e-5)
    assert any(row["style"] == "expert" for row in fp.explain(model).rows)
    restored = fp.unparallelize(model).state_dict()
    assert all(torch.equal(restored[key], value) for key, value in plain.state_dict().items())
    mesh.close()
    return logits, grads, stored


def trained_step(name: str, sizes: dict[str, int], stage: int) -> tuple[float, dict[str, Any]]:
    """The gradients' norm, and all parameters after a step of SGD in a stage of ZeRO, each rank on its own batch."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    model = fp.parallelize(build(name), mesh, gather_logits=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, max_norm=1e9)
    ids = batch(mesh.rank("dp"))
    loss_of(model(ids).logits, ids).backward()
    optimizer.step()
    assert zero.norm is not None
    norm = float(zero.norm)
    full = {key: full_parameter(param) for key, param in model.named_parameters()}
    mesh.close()
    return norm, full


def pipelined_gradients(name: str, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The averaged gradients of this rank's stage of a pipeline, each data-parallel rank on its own batch.

    With options the head is split, and the loss given its targets.
    """
    mesh = fp.init_mesh(**sizes, device="cpu")
    pipe = fp.parallelize_pipeline(build(name), mesh, "1f1b", num_microbatches=2, **options)
    ids = batch(mesh.rank("dp"))
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    pipe.step(ids, **({"target": shifted} if options else {"labels": ids}))
    grads = {}
    for key, param in pipe.named_parameters():
        over = fp.comm.Communicator(mesh.group("edp" if ".experts." in key else "dp"))
        full = full_parameter(param, param.grad)
        grads[key] = over.all_reduce(full, "avg") if over.size > 1 else full
    mesh.close()
    return grads


def refusals() -> list[tuple[type[Exception], str]]:
    """On two ranks: what is refused, with its message. The model is left as it was."""
    found = []
    plans: list[tuple[str, dict[str, int], Any]] = [
        ("gpt_oss", {"tp": 2, "ep": 2}, {"model.layers.*": "stream", "model.layers.*.mlp.experts": "expert"}),
        ("mixtral", {"tp": 2}, {"model.layers.*.mlp.gate": "expert"}),
        ("mixtral", {"tp": 2}, {"model.layers.*.mlp": "block", "model.layers.*.mlp.experts": "expert"}),
        ("mixtral", {"dp_shard": 2, "ep": 2}, {"model.embed_tokens": "vocab"}),
    ]
    for name, sizes, plan in plans:
        mesh, model = fp.init_mesh(**sizes, device="cpu"), build(name)
        before = {key: type(module) for key, module in model.named_modules()}
        try:
            fp.parallelize(model, mesh, plan, sequence_parallel="model.layers.*" in plan)
        except (TypeError, ValueError) as error:
            found.append((type(error), str(error)))
        assert before == {key: type(module) for key, module in model.named_modules()}
        mesh.close()
    return found
