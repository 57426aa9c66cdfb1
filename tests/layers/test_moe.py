"""Experts: equal to a loop over tokens; on any mesh, with whole or split experts; padding costs and changes nothing."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from model_harness import OracleBackend

from jaxserve.errors import ConfigError
from jaxserve.layers import expert_exchange, expert_parallel, moe
from jaxserve.layers.expert_exchange import sending_pays
from jaxserve.layers.moe import ClampedSwiGLU, MoE, MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from jaxserve.runner.placement import Placement
from sharding import DEFAULT_RULES, make_mesh

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)"),
]
BACKEND = OracleBackend()
HIDDEN, EXPERTS, FFN, TOKENS = 16, 8, 12, 24
PLAIN = MoEConfig(RouterConfig(EXPERTS, 3, renormalize=True), FFN)
SHARED = replace(PLAIN, shared_ffn_size=20, shared_gate=True)
BIASED = MoEConfig(
    RouterConfig(EXPERTS, 2, "softmax_of_chosen", bias=True),
    FFN,
    bias=True,
    clamped=ClampedSwiGLU(1.702, 1.0),
)
CONFIGS = {"plain": PLAIN, "shared": SHARED, "biased": BIASED}


def context(data: int = 1, model: int = 1, *, experts: bool = False) -> LayerContext:
    rules = DEFAULT_RULES.for_experts() if experts else DEFAULT_RULES
    return LayerContext(
        np.dtype(np.float32), BACKEND, tensor_parallel_size=model, data_parallel_size=data,
        expert_parallel=experts, rules=rules,
    )  # fmt: skip


def is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def random_weights(layer: MoE) -> dict[str, np.ndarray]:
    """By parameter path: the same on every mesh."""
    random = np.random.RandomState(3)
    variables = jax.tree.leaves_with_path(nnx.split(layer)[1], is_leaf=is_variable)
    shapes = {jax.tree_util.keystr(path): v.get_metadata()["spec"].shape for path, v in variables}
    return {name: random.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """[T, M], and which of them are live: the padding is at each rank's end, as in a step."""
    x = np.random.RandomState(4).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    live = np.arange(TOKENS) % 6 < 4
    return x, live


def lowered_layer(config: MoEConfig, where: LayerContext):
    """The layer lowered for its mesh, its weights there, and the placement."""
    graphdef, state = nnx.split(MoE(HIDDEN, config, where))
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    leaves = jax.tree.structure(state)
    assert leaves.num_leaves == len(variables)
    specs = [where.rules.partition_spec(v.get_metadata()["spec"].axes) for v in variables]

    def run(values: list[jax.Array], x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, load = nnx.merge(graphdef, leaves.unflatten(values))(x, live)
        return out, load[None]

    by_data = PartitionSpec("data")
    placement = Placement(make_mesh(where.tensor_parallel_size, data_parallel_size=where.data_parallel_size))
    step = placement.jit(run, (specs, by_data, by_data), (by_data, by_data))
    weights = list(random_weights(MoE(HIDDEN, config, where)).values())
    placed = [placement.put(weight, spec) for weight, spec in zip(weights, specs, strict=True)]
    return step.lower(placed, *(placement.put(each, by_data) for each in tokens())), placed, placement


def compiled_layer(config: MoEConfig, where: LayerContext):
    """The layer on its mesh as (x, live) to (out, load [data, E]), and the compiled program."""
    lowered, weights, placement = lowered_layer(config, where)
    compiled, by_data = lowered.compile(), PartitionSpec("data")

    def step(x: np.ndarray, live: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return compiled(weights, placement.put(x, by_data), placement.put(live, by_data))

    return step, compiled


program = functools.cache(compiled_layer)


def on_mesh(config: MoEConfig, where: LayerContext) -> tuple[np.ndarray, np.ndarray]:
    out, load = program(config, where)[0](*tokens())
    return np.asarray(out), np.asarray(load)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def looped(config: MoEConfig, x: np.ndarray) -> np.ndarray:
    """One token after another, one expert after another."""
    weights = {
        re.sub(r"\W+", " ", name).strip().removesuffix(" value"): value
        for name, value in random_weights(MoE(HIDDEN, config, context())).items()
    }
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = weights["router weight"] @ token + weights.get("router bias", 0)
        chosen = np.argsort(-logits)[: config.router.top_k]
        probabilities = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, probability in zip(chosen, probabilities):
            gate, up = (weights["experts gate_up"][expert] @ token).reshape(2, -1)
            if config.bias:
                gate, up = (
                    gate + weights["experts gate_up_bias"][expert, 0],
                    up + weights["experts gate_up_bias"][expert, 1],
                )
                gate, up = np.minimum(gate, 1.0), np.clip(up, -1.0, 1.0)
                hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            else:
                hidden = gate * sigmoid(gate) * up
            out[t] += probability * (weights["experts down"][expert] @ hidden)
            if config.bias:
                out[t] += probability * weights["experts down_bias"][expert]
        if config.shared_ffn_size is not None:
            gate, up = weights["shared gate_up"] @ token
            out[t] += sigmoid(weights["shared_gate"] @ token) * (
                weights["shared down"] @ (gate * sigmoid(gate) * up)
            )
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_loop(name: str) -> None:
    x, live = tokens()
    out, load = on_mesh(CONFIGS[name], context())
    np.testing.assert_allclose(out[live], looped(CONFIGS[name], x)[live], rtol=0, atol=2e-5)
    assert np.isfinite(out).all()
    assert load.sum() == live.sum() * CONFIGS[name].router.top_k


def test_padding_changes_nothing() -> None:
    step, _ = program(PLAIN, context())
    x, live = tokens()
    out, load = step(x, live)
    other = np.where(live[:, None], x, 1e4).astype(np.float32)
    again, same_load = step(other, live)
    np.testing.assert_array_equal(np.asarray(out)[live], np.asarray(again)[live])
    np.testing.assert_array_equal(load, same_load)
    _, nothing = step(x, np.zeros_like(live))
    np.testing.assert_array_equal(nothing, 0)


def test_no_token_is_dropped_when_all_go_to_one_expert() -> None:
    config = replace(PLAIN, router=RouterConfig(EXPERTS, 1, renormalize=True))
    for where in (context(), context(2, 2, experts=True)):
        step, _ = program(config, where)
        x = np.repeat(tokens()[0][:1], TOKENS, axis=0)
        out, load = step(x, np.ones(TOKENS, bool))
        assert load.sum(axis=0).max() == TOKENS
        np.testing.assert_allclose(out, np.broadcast_to(looped(config, x[:1]), x.shape), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "name, data, model", [("biased", 2, 2), pytest.param("plain", 1, 4, marks=pytest.mark.slow)]
)
def test_rows_of_others_are_left_out_unless_there_are_too_many_of_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, data: int, model: int
) -> None:
    monkeypatch.setattr(moe, "ENOUGH_ROWS", 8)
    config = replace(CONFIGS[name], router=replace(CONFIGS[name].router, top_k=1))
    step, compiled = compiled_layer(config, context(data, model, experts=True))
    assert compiled.as_text().count(" conditional(") == 1
    mixed, usual = tokens()[0], 2 * TOKENS // 4
    for x, too_many in ((mixed, False), (np.repeat(mixed[:1], TOKENS, axis=0), True)):
        out, load = step(x, np.ones(TOKENS, bool))
        of_devices = np.asarray(load).sum(axis=0).reshape(4, -1).sum(axis=1)
        assert (of_devices.max() > usual) == too_many
        np.testing.assert_allclose(out, looped(config, x), rtol=0, atol=2e-5)


MESHES = [
    ("shared", 2, 2, True),
    ("shared", 1, 4, True),
    ("biased", 2, 2, False),
    pytest.param("plain", 4, 1, True, marks=pytest.mark.slow),
    pytest.param("plain", 1, 2, True, marks=pytest.mark.slow),
    pytest.param("biased", 1, 4, True, marks=pytest.mark.slow),
    pytest.param("shared", 2, 4, True, marks=pytest.mark.slow),
    pytest.param("shared", 1, 4, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, data, model, experts", MESHES)
def test_equal_on_every_mesh(name: str, data: int, model: int, experts: bool) -> None:
    if data * model > jax.device_count():
        pytest.skip("needs more devices")
    _, live = tokens()
    whole, whole_load = on_mesh(CONFIGS[name], context())
    out, load = on_mesh(CONFIGS[name], context(data, model, experts=experts))
    np.testing.assert_allclose(out[live], whole[live], rtol=0, atol=2e-5)
    assert load.shape == (data, EXPERTS)
    np.testing.assert_array_equal(load.sum(axis=0), whole_load[0])


COLLECTIVES = r"= \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("


@pytest.mark.parametrize(
    "name, data, model, experts, expected",
    [
        # Whole experts of one group of devices, like split ones: one sum, which the shared expert has part in.
        ("shared", 1, 4, True, {"all-reduce": 1}),
        ("biased", 2, 2, False, {"all-reduce": 1}),
        # Over ranks: tokens, weights and choices are gathered, results scattered, then summed in the group.
        ("shared", 2, 2, True, {"all-gather": 3, "reduce-scatter": 1, "all-reduce": 1}),
    ],
)
def test_collectives(name: str, data: int, model: int, experts: bool, expected: dict[str, int]) -> None:
    _, compiled = program(CONFIGS[name], context(data, model, experts=experts))
    found = re.findall(COLLECTIVES, compiled.as_text())
    assert {name: found.count(name) for name in found} == expected


def emulated_exchange(rows, num_rows, input_offsets, send_sizes, output_offsets, recv_sizes):
    """What XLA's ragged all-to-all does, which CPUs lack: everything to everybody, and each takes what is its own."""
    me = jax.lax.axis_index("data")
    out = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    gathered = [
        jax.lax.all_gather(each, "data") for each in (rows, input_offsets, send_sizes, output_offsets)
    ]
    for sender, (theirs, begin, size, to) in enumerate(zip(*gathered)):
        index = jnp.arange(rows.shape[0])
        mine = (index >= begin[me]) & (index < begin[me] + size[me])
        out = out.at[jnp.where(mine, index - begin[me] + to[me], num_rows)].set(theirs, mode="drop")
        assert recv_sizes.shape[0] > sender
    return out


@pytest.mark.parametrize(
    "name, data, model",
    [
        ("shared", 2, 2),
        pytest.param("biased", 4, 1, marks=pytest.mark.slow),
        pytest.param("plain", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_sent_to_their_experts(
    monkeypatch: pytest.MonkeyPatch, name: str, data: int, model: int
) -> None:
    if data * model > jax.device_count():
        pytest.skip("needs more devices")
    monkeypatch.setattr(expert_exchange, "exchange", emulated_exchange)
    monkeypatch.setattr(expert_parallel, "sending_pays", lambda *sizes: True)
    where = replace(context(data, model, experts=True), ragged_exchange=True)
    _, live = tokens()
    out, load = compiled_layer(CONFIGS[name], where)[0](*tokens())
    whole, whole_load = on_mesh(CONFIGS[name], context())
    np.testing.assert_allclose(np.asarray(out)[live], whole[live], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(load).sum(axis=0), whole_load[0])


def test_two_exchanges_where_tokens_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "sending_pays", lambda *sizes: True)
    step = lowered_layer(PLAIN, replace(context(2, 2, experts=True), ragged_exchange=True))[0]
    text = step.as_text()
    assert text.count("ragged_all_to_all") == 2
    assert "reduce_scatter" not in text


def test_sending_pays_where_devices_outnumber_a_token_s_experts() -> None:
    def pays(tokens: int, top_k: int, ranks: int, devices: int) -> bool:
        return sending_pays(tokens, 4096, top_k, ranks, devices)

    assert [pays(2048, 8, ranks, ranks * 4) for ranks in (2, 4, 16)] == [False, True, True]
    assert pays(2048, 2, 2, 4)
    assert not pays(16, 8, 4, 16)  # so few tokens are sent everywhere sooner


def test_imbalance() -> None:
    load = jnp.asarray(
        [[4, 4, 4, 4, 4, 4, 4, 4], [8, 0, 8, 0, 8, 0, 8, 0], [32, 0, 0, 0, 0, 0, 0, 0]], jnp.int32
    )
    (of_experts,) = expert_parallel.expert_imbalance(load, context())
    assert float(of_experts) == pytest.approx((1 + 2 + 8) / 3)
    alone = context(1, 4, experts=True)  # two experts a device
    assert float(expert_parallel.expert_imbalance(load, alone)[0]) == pytest.approx((1 + 1 + 4) / 3)
    assert float(expert_parallel.expert_imbalance(0 * load, alone)[0]) == 1.0


def test_each_device_holds_its_share_of_the_experts() -> None:
    expected = {True: (("data", "model"), None, None, None), False: (None, None, "model", None)}
    for experts, axes in expected.items():
        where = context(2, 2, experts=experts)
        spec = MoE(HIDDEN, PLAIN, where).experts.gate_up.get_metadata()["spec"]
        assert spec.shape == (EXPERTS, 2, FFN, HIDDEN)
        assert where.rules.partition_spec(spec.axes) == PartitionSpec(*axes)


@pytest.mark.parametrize(
    "where, message",
    [
        (context(1, 3), "tensor_parallel_size 3 does not divide the feed-forward size 20"),
        (context(3, 1, experts=True), r"8 experts cannot be spread evenly over 3 devices \(data_parallel_size 3 x "
                                      r"tensor_parallel_size 1\); numbers of devices that work: 1, 2, 4, 8\."),
        (context(1, 8), "tensor_parallel_size 8 does not divide the experts' feed-forward size 12"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(where: LayerContext, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoE(HIDDEN, SHARED, where)
