"""Modules, operators, gradients, torch.compile and torch.export."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from conftest import random

import halfbyte

torch = pytest.importorskip("torch")

import halfbyte.torch as ht  # noqa: E402

W, BIAS = random((48, 64), 1), random((48,), 2)


def module(bias: bool = True) -> ht.Linear:
    return ht.Linear(halfbyte.Linear(W, BIAS if bias else None, "w4a16-g32"))


def dequantized() -> Any:
    return torch.from_numpy(halfbyte.quantize(W, "w4a16-g32").dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_the_dequantised_weight(dtype: Any) -> None:
    x = torch.from_numpy(random((2, 5, 64), 3)).to(dtype).requires_grad_()
    y = module()(x)
    assert y.requires_grad and y.dtype == dtype
    grad = torch.from_numpy(random((2, 5, 48), 4)).to(dtype)
    y.backward(grad)
    reference = (grad.float() @ dequantized()).to(dtype)
    assert x.grad.dtype == dtype and torch.allclose(x.grad, reference, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(module()(x), y.detach()) and not module()(x).requires_grad


def test_gradients_by_differences() -> None:
    layer = ht.Linear(halfbyte.Linear(np.eye(4, dtype=np.float32) * 3, format="w8a32-sf32"))
    x = torch.ones(2, 4, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, torch.full((2, 4), 3.0), rtol=1e-5)


def test_the_operator_is_what_pytorch_expects_of_one() -> None:
    layer = module()
    x = torch.from_numpy(random((3, 64), 5)).requires_grad_()
    torch.library.opcheck(torch.ops.halfbyte.linear.default, (x, layer.handle, 48))
    torch.library.opcheck(torch.ops.halfbyte.linear_backward.default, (torch.randn(3, 48), layer.handle, 64))
    torch.library.opcheck(torch.ops.halfbyte.linear_tangent.default, (torch.randn(3, 64), layer.handle, 48))
    number = layer.handle
    del layer
    with pytest.raises(RuntimeError, match="expected a layer that lives in this process"):
        torch.ops.halfbyte.linear(x.detach(), number, 48)


def test_compiled_as_one_graph() -> None:
    network = torch.nn.Sequential(module(), torch.nn.ReLU(), ht.Linear(halfbyte.Linear(random((8, 48), 6), format="w8a16")))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 7):
        x = torch.from_numpy(random((rows, 64), rows))
        assert torch.equal(compiled(x), network(x))
    x = torch.from_numpy(random((4, 64), 9)).requires_grad_()
    other = x.detach().clone().requires_grad_()
    compiled(x).sum().backward()
    network(other).sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_exported_with_a_batch_of_any_size() -> None:
    layer = module()
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(layer, (torch.zeros(3, 64),), dynamic_shapes=({0: batch},))
    assert any("halfbyte.linear" in str(node.target) for node in program.graph.nodes)
    x = torch.from_numpy(random((9, 64), 10))
    assert torch.equal(program.module()(x), layer(x))


def test_modules_are_copied_and_moved_as_constants() -> None:
    layer = module()
    twin = copy.deepcopy(layer)
    assert twin.layer is layer.layer and twin.handle != layer.handle
    x = torch.from_numpy(random((3, 64), 11))
    assert torch.equal(twin(x), layer(x))
    assert layer.half() is layer and layer.to("cpu") is layer and layer.state_dict() == {}
    assert torch.equal(layer(x), twin(x)) and "w4a16-g32" in repr(layer)
    with pytest.raises(ValueError, match="expected cpu or cuda"):
        layer.to("meta")
    with pytest.raises(ValueError, match="without activation function"):
        ht.Linear(halfbyte.Linear(W, activation="relu"))
    assert layer.layer.to("cpu") is layer.layer


def test_a_copy_has_all_that_modules_have() -> None:
    network = torch.nn.Sequential(module(), torch.nn.ReLU()).eval()
    network[0].note = ["kept"]
    seen: list[int] = []
    network[0].register_forward_hook(lambda *_: seen.append(1))
    shared = torch.nn.ModuleList([network, network[0]])
    twin = copy.deepcopy(shared)
    assert twin[0][0] is twin[1] and twin[1] is not network[0] and type(twin[1]) is ht.Linear
    assert not twin[1].training and module().training and copy.deepcopy(module()).training
    assert twin[1].layer is network[0].layer and twin[1].handle != network[0].handle
    assert twin[1].note == ["kept"] and twin[1].note is not network[0].note
    x = torch.from_numpy(random((3, 64), 16))
    assert torch.equal(twin[0](x), network(x)) and len(seen) == 2
    grad = x.clone().requires_grad_()
    del network, shared
    twin[1](grad).sum().backward()
    assert grad.grad is not None


def test_cuda_without_a_number_is_torchs_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    linear = halfbyte.Linear

    def recorded(*parts: Any, device: Any, **options: Any) -> halfbyte.Linear:
        made.append(str(device))
        return linear(*parts, **options)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(ht._halfbyte, "Linear", recorded)
    for device in ("cuda", torch.device("cuda"), "cuda:2", torch.device("cuda", 3), "cpu", None):
        ht.Linear.from_linear(torch.nn.Linear(64, 48), "w4a16-g32", device=device)
        ht.replace_linears(torch.nn.Sequential(torch.nn.Linear(64, 48)), "w4a16-g32", device=device)
    assert made[::2] == made[1::2] == ["cuda:5", "cuda:5", "cuda:2", "cuda:3", "cpu", "cpu"]


def test_under_vmap_and_tracing_the_operator_is_seen() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = module()
    graph = make_fx(layer)(torch.zeros(3, 64))
    assert any("halfbyte.linear" in str(node.target) for node in graph.graph.nodes)
    x = torch.from_numpy(random((7, 5, 64), 12))
    for dim in (0, 1):
        assert torch.equal(torch.vmap(layer, dim)(x), layer(x.movedim(dim, 0)))
    with torch._subclasses.FakeTensorMode() as mode:
        y = layer(mode.from_tensor(torch.zeros(3, 64)))
        assert y.shape == (3, 48)


def test_transformations_of_torch_func() -> None:
    layer, weight = module(), dequantized()
    x = torch.from_numpy(random((5, 64), 13))

    def loss(x: Any) -> Any:
        return (layer(x) ** 2).sum()

    def close(got: Any, want: Any) -> None:
        assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-3, atol=1e-3)

    gradient = 2 * layer(x) @ weight
    close(torch.func.grad(loss)(x), gradient)
    close(torch.vmap(torch.func.grad(loss))(x), gradient)
    close(torch.func.vjp(layer, x)[1](layer(x))[0], gradient / 2)
    close(torch.func.grad(lambda x: torch.vmap(layer, 1)(x).sum())(x.T), weight.sum(0).expand(5, -1).T)
    close(torch.func.jvp(layer, (x,), (x,))[1], x @ weight.T)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        close(jacobian(layer)(x[0]), weight)
    close(torch.func.hessian(loss)(x[0]), 2 * weight.T @ weight)
    # Parameters of other modules beside it.
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), layer)
    inputs = torch.from_numpy(random((3, 16), 14))

    def with_parameters(parameters: Any) -> Any:
        return torch.func.functional_call(network, parameters, (inputs,)).square().sum()

    parameters = {name: p.detach() for name, p in network.named_parameters()}
    network(inputs).square().sum().backward()
    for name, got in torch.func.grad(with_parameters)(parameters).items():
        close(got, network.get_parameter(name).grad)


def test_second_gradients_and_tangents() -> None:
    layer, weight = module(), dequantized()
    x = torch.from_numpy(random((5, 64), 15)).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, (2 * weight.T @ weight).sum(0).expand(5, -1), rtol=1e-3, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    assert torch.allclose(tangent, x.detach() @ weight.T, rtol=1e-3, atol=1e-3)


def test_linears_of_a_model_are_replaced() -> None:
    network = torch.nn.Module()
    network.block = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64, bias=False))
    network.lm_head = torch.nn.Linear(64, 7)
    first = network.block[0]
    replaced = ht.replace_linears(network, "w4a16-g32", search=True)
    assert replaced is network and type(network.lm_head) is torch.nn.Linear
    assert [type(child) for child in network.block] == [ht.Linear, torch.nn.GELU, ht.Linear]
    x = torch.randn(3, 64)
    weight = halfbyte.quantize(first.weight.detach(), "w4a16-g32", search=True).dequantize()
    expected = torch.nn.functional.linear(x, torch.from_numpy(weight), first.bias)
    assert torch.allclose(network.block[0](x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="replace_linears: lm_head: format"):
        ht.replace_linears(network, "w9a9", skip=())


def test_a_layer_in_several_places_is_replaced_in_each() -> None:
    network = torch.nn.Module()
    network.a = torch.nn.Linear(64, 64)
    network.b = network.a
    network.block = torch.nn.Sequential(network.a, torch.nn.Linear(64, 64))
    ht.replace_linears(network, "w4a16-g32")
    assert type(network.a) is ht.Linear and network.a is network.b is network.block[0]
    assert type(network.block[1]) is ht.Linear and network.block[1] is not network.a
    tied = torch.nn.Module()
    tied.lm_head = tied.other = torch.nn.Linear(64, 64)
    ht.replace_linears(tied, "w4a16-g32")
    assert tied.lm_head is tied.other and type(tied.other) is torch.nn.Linear


def test_an_error_leaves_a_model_as_it_was() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    network[1].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="replace_linears: 1: .*NaN"):
        ht.replace_linears(network, "w8a16")
    assert [type(child) for child in network] == [torch.nn.Linear] * 2
    with pytest.raises(TypeError, match=r"several names, as \['block'\], got a str"):
        ht.replace_linears(network, "w8a16", skip="block")
    with pytest.raises(ValueError, match="got a Linear itself"):
        ht.replace_linears(network[0], "w8a16")


def test_negatives_that_do_not_lie_in_memory_are_refused() -> None:
    layer = halfbyte.Linear(np.eye(1, dtype=np.float32))
    x = torch.randn(5, 1, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        layer(x)
    assert torch.equal(layer(x.resolve_neg()), x)
