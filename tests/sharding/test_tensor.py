"""The tensor axis on fake devices: tokens, logits and weights are the single device's; refusals have both numbers."""

from __future__ import annotations

import collections
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import TOLERANCE, forward, read, supported
from golden_configs import TINY_CASES, llama_config, qwen3_config
from jax.sharding import Mesh
from mesh_cases import GREEDY, PARAMS, SETTINGS, compare_logprobs, run
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig, Kernels
from jaxinfer.engine.build import load_weights
from jaxinfer.kernels.all_reduce import all_reduce_norm
from jaxinfer.layers import stream
from jaxinfer.loaders import Dummy, open_checkpoint, save_orbax
from jaxinfer.loaders.dummy import _maker
from jaxinfer.models import Partition, build_model, cut_stages, divide, parse_config
from jaxinfer.models.partition import narrow, own_place, own_shape, widen
from jaxinfer.sharding.describe import describe, lines
from jaxinfer.sharding.mesh import make_mesh, resolve_mesh
from jaxinfer.sharding.parameters import abstract_parameters
from jaxinfer.sharding.placement import device_bytes


def cut_of(config: dict, mesh: str | None) -> Partition:
    return divide(parse_config(config), resolve_mesh(mesh))


def load(folder, mesh: str | None, **settings) -> tuple[Partition, dict[tuple, jax.Array]]:
    checkpoint = open_checkpoint(str(folder), settings.get("load_format", "auto"))
    cut = cut_of(checkpoint.config, mesh)
    model = build_model(cut, "float32")
    weights = load_weights(EngineConfig(**settings), checkpoint, cut, model, jax.devices()[0])
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    return cut, dict(zip(paths, weights, strict=True))


# -- tokens --------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_single_devices(tmp_path):
    """Four devices, two KV heads with QK-norm, so each lies on two; and a vocabulary that is padded."""
    golden, _ = read("qwen3_gqa")
    folder = write_model(tmp_path / "m", golden["config"], seed=golden["seed"], with_tokenizer=False)
    with LLM(str(folder), mesh="tensor=4", enable_prefix_caching=False, **SETTINGS) as llm:
        assert llm.generate(golden["input_ids"], GREEDY)[0].outputs[0].token_ids == golden["greedy_ids"]
        runner = llm.engine.runner
        assert runner.programs.num_logits == 512  # of 256, four devices and tiles of 128
        caches = {cache.sharding.shard_shape(cache.shape)[1] for pair in runner.caches for cache in pair}
        assert caches == {1}
        account, config = llm.engine.account, llm.config
        assert account.weights == device_bytes(runner.weights)
        assert account.block * config.num_blocks == device_bytes(runner.caches)


def test_sums_with_the_norm_in_them(tmp_path, monkeypatch):
    """The residual and the next norm done along with each sum, as the all-reduce kernel does: the same logits."""
    golden, arrays = read("qwen3_tied")
    folder = write_model(tmp_path / "m", golden["config"], seed=golden["seed"], with_tokenizer=False)
    shapes = []

    def record(part, *arguments, **options):
        shapes.append(part.shape)
        return all_reduce_norm(part, *arguments, **options)

    monkeypatch.setattr(stream, "all_reduce_norm", record)
    logits = forward(folder, golden["input_ids"], mesh="tensor=2", kernels=Kernels(all_reduce="reference"))
    np.testing.assert_allclose(logits[:, :256], arrays["logits"], atol=TOLERANCE, rtol=0)
    assert (
        shapes == [(40, 64)] * 4
    )  # of three layers, the first alone does its own first norm; the others are one trace


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", supported())
def test_every_architecture(name, size, tmp_path):
    """Logits and greedy tokens of every golden model, with 8 query heads where the golden's cannot be divided."""
    golden, arrays = read(name)
    config, mesh = dict(golden["config"]), f"tensor={size}"
    is_golden = config["num_attention_heads"] % size == 0
    if not is_golden:
        config |= {"num_attention_heads": 8, "num_key_value_heads": min(config["num_key_value_heads"], 2)}
        config["head_dim"] = config.get("head_dim", 8)
    folder = write_model(tmp_path / "m", config, seed=golden["seed"], with_tokenizer=False)
    logits = forward(folder, golden["input_ids"], mesh=mesh)
    vocab = config["vocab_size"]
    assert logits.shape[1] % (size * 128) == 0
    assert (logits[:, vocab:] == -np.inf).all()
    alone = forward(folder, golden["input_ids"])
    spread = max(1.0, float(alone.std()))  # 4 under tied heads; float32 rounds in proportion
    np.testing.assert_allclose(logits[:, :vocab], alone, atol=1e-5 * spread, rtol=0)
    if is_golden:
        np.testing.assert_allclose(logits[:, :vocab], arrays["logits"], atol=TOLERANCE, rtol=0)
    expected = golden["greedy_ids"] if is_golden else run(folder, None, [golden["input_ids"]], [GREEDY])[0][0]
    assert run(folder, mesh, [golden["input_ids"]], [GREEDY])[0][0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama2_mha", "mistral", "qwen2_bias", "qwen3_gqa"])
def test_every_family_with_every_number_of_heads(name, kv_heads, tmp_path):
    """Logits over 2, 4 and 8 devices, with a head of its own, so that they stay small; 250 ids divide into none."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "vocab_size": 250}
    config = TINY_CASES[name][1] | sizes | {"tie_word_embeddings": False}
    folder = write_model(tmp_path / "m", config, seed=4, with_tokenizer=False)
    token_ids = list(range(30, 60))
    alone = forward(folder, token_ids)
    assert np.abs(alone).max() < 10
    for size in (2, 4, 8):
        logits = forward(folder, token_ids, mesh=f"tensor={size}")
        np.testing.assert_allclose(logits[:, :250], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_way_to_sample(kv_heads, tmp_path):
    """Plain and full samplers, log-probabilities and prefix hits over 2, 4 and 8 devices; 250 ids divide into none."""
    config = qwen3_config(num_attention_heads=8, num_key_value_heads=kv_heads, vocab_size=250)
    folder = write_model(tmp_path / "m", config, seed=9, with_tokenizer=False)
    prompts = [[*range(20, 40), number] for number in range(len(PARAMS))]
    alone = run(folder, None, prompts, PARAMS)
    for size in (2, 4, 8):
        for one, other in zip(alone, run(folder, f"tensor={size}", prompts, PARAMS), strict=True):
            assert one[0] == other[0]
            compare_logprobs(one[1], other[1])
            compare_logprobs(one[2], other[2])


@pytest.mark.slow
def test_bursts_and_two_steps_in_flight(tmp_path):
    """Several decode steps in one program over four devices, at depth 2: the tokens of single steps on one."""
    folder = write_model(tmp_path / "m", qwen3_config(num_attention_heads=8), seed=9, with_tokenizer=False)
    prompts, params = [[1, 2, 3], [4, 5]], [SamplingParams(temperature=t, seed=3, max_tokens=30) for t in (0.0, 0.9)]
    alone = run(folder, None, prompts, params)
    settings = {**SETTINGS, "decode_steps": 4, "depth": 2}
    with LLM(str(folder), mesh="tensor=4", **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        names = llm.engine.runner.programs.stats.names
    assert [output.token_ids for output in outputs] == [answer[0] for answer in alone]
    assert any(name.startswith("steps-4") for name in names)


# -- where things lie ----------------------------------------------------------------------------


CONFIGS = {
    "repeated heads": qwen3_config(num_attention_heads=8, num_key_value_heads=2, vocab_size=250),
    "shared repeats": llama_config(
        num_attention_heads=12, num_key_value_heads=6, head_dim=16, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_loaded_parts_are_cuts_of_the_whole(name, tmp_path):
    """Every device reads its rows only, and has what widening and cutting the single device's weights gives."""
    config = CONFIGS[name]
    folder = write_model(tmp_path / "m", config, seed=1, with_tokenizer=False)
    _, alone = load(folder, None)
    cut, parts = load(folder, "tensor=4")
    assert cut.whole.num_kv_heads == {2: 4, 6: 12}[config["num_key_value_heads"]]
    for path, array in parts.items():
        assert own_shape(path, array.shape, cut) == alone[path].shape
        np.testing.assert_array_equal(array, widen(path, np.asarray(alone[path]), cut))
        np.testing.assert_array_equal(narrow(path, array, cut), alone[path])
        if len(array.shape) > 1:
            assert all(shard.data.size * 4 == array.size for shard in array.addressable_shards), path


def test_a_device_reads_its_own_bytes(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "m", CONFIGS["repeated heads"], seed=1, with_tokenizer=False)
    from jaxinfer.loaders.safetensors_folder import SafetensorsFolder

    read_sizes: dict[str, list[int]] = {}
    original = SafetensorsFolder.read

    def record(self, name, index):
        part = original(self, name, index)
        read_sizes.setdefault(name, []).append(part.size)
        return part

    monkeypatch.setattr(SafetensorsFolder, "read", record)
    load(folder, "tensor=4")
    checkpoint = open_checkpoint(str(folder))
    for name, sizes in read_sizes.items():
        whole = int(np.prod(checkpoint.shape(name)))
        repeats = 2 if ".k_proj" in name or ".v_proj" in name else 1
        assert sum(sizes) == whole * repeats, name
        assert whole < 100 or max(sizes) <= 0.6 * whole, name


def test_dummy_weights_are_the_same_on_every_mesh(tmp_path):
    folder = write_model(tmp_path / "m", CONFIGS["repeated heads"], seed=1, with_tokenizer=False)
    _, alone = load(folder, None, load_format="dummy", seed=3)
    cut, parts = load(folder, "tensor=4", load_format="dummy", seed=3)
    for path, array in parts.items():
        np.testing.assert_array_equal(array, widen(path, np.asarray(alone[path]), cut))
    embedding = np.asarray(alone["embed", "weight"])
    assert embedding.std() == pytest.approx(0.02, rel=0.02)
    assert abs(embedding.mean()) < 1e-3
    assert np.unique(embedding).size > 0.99 * embedding.size
    assert not np.array_equal(embedding, alone["head", "weight"])


def test_a_device_makes_its_own_dummy_weights_only():
    cut = cut_of(CONFIGS["repeated heads"], "tensor=4")
    model = build_model(cut, "float32")
    assert cut.mesh is not None
    for (path, _), leaf in zip(nnx.to_flat_state(nnx.state(model)), abstract_parameters(model, cut.mesh), strict=True):
        assert leaf.sharding is not None
        dummy = Dummy(leaf, own_shape(path, leaf.shape, cut), partial(own_place, path, partition=cut), path, 0)
        program = _maker(dummy, leaf.sharding).lower(jnp.zeros(3, jnp.uint32)).compile()
        assert program.memory_analysis().temp_size_in_bytes <= 1024  # XLA divides no `jax.random`
        if path[-1] == "gate_up":
            break


@pytest.mark.slow
def test_orbax_is_restored_on_another_mesh(tmp_path):
    """Written on one device; read on four, with repeated heads and padding, the same bits; and the other way round."""
    folder = write_model(tmp_path / "m", CONFIGS["repeated heads"], seed=1, with_tokenizer=False)
    _, alone = load(folder, None)
    checkpoint = open_checkpoint(str(folder))
    save_orbax(tmp_path / "one", checkpoint, alone, checkpoint.config)
    for mesh in ("tensor=2", "tensor=4"):
        cut, parts = load(tmp_path / "one", mesh)
        for path, array in parts.items():
            np.testing.assert_array_equal(array, widen(path, np.asarray(alone[path]), cut))
            assert len(array.sharding.device_set) == int(mesh[-1])
    cut, parts = load(folder, "tensor=4")
    own = {path: narrow(path, array, cut) for path, array in parts.items()}
    save_orbax(tmp_path / "four", checkpoint, own, checkpoint.config)
    for mesh in (None, "tensor=2", "tensor=4"):
        cut, again = load(tmp_path / "four", mesh)
        for path, array in again.items():
            np.testing.assert_array_equal(array, widen(path, np.asarray(alone[path]), cut))


def test_a_description(capsys):
    cut = cut_of(CONFIGS["repeated heads"], "tensor=4")
    model = build_model(cut, "bfloat16")
    assert cut.mesh is not None
    described = {line.name: line for line in lines(model, cut.mesh)}
    qkv = described["layers.*.attention.qkv.weight"]
    assert (qkv.count, qkv.whole, qkv.part) == (2, (64, 4, 4, 32), (64, 1, 4, 32))
    assert qkv.axes == "embed, kv_heads/tensor=4, -, head_dim"
    assert qkv.num_bytes == 2 * 64 * 4 * 32 * 2
    assert described["norm.weight"].part == (64,)
    describe(model, cut.mesh)
    total = sum(line.num_bytes for line in described.values())
    whole = sum(math.prod(line.whole) * 2 * line.count for line in described.values())
    last = f"{total / 1e6:,.2f} MB on each of 4 devices (tensor=4); the model has {whole / 1e6:,.2f} MB"
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_description_of_stages():
    """Each has its layers; together they have the model's parameters once, the tied table at both ends."""
    mesh = resolve_mesh("pipe=2,tensor=2")
    model = parse_config(CONFIGS["shared repeats"])
    assert mesh is not None
    with pytest.raises(ValueError, match="pipe=2 means stages"):
        lines(build_model(model, "bfloat16"), mesh)
    counts = collections.Counter()
    for cut in cut_stages(model, mesh):
        assert cut.mesh is not None
        for line in lines(build_model(cut, "bfloat16"), cut.mesh):
            counts[line.name] += line.count
    assert counts["layers.*.mlp.down"] == model.num_layers
    assert (counts["embed.weight"], counts["norm.weight"]) == (2, 1)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ("tensor=3", {}, "the model's num_heads, 8, cannot be divided among tensor=3"),
        (
            "tensor=8",
            {"intermediate_size": 100},
            "the model's intermediate_size, 100, cannot be divided among tensor=8",
        ),
        ("tensor=16", {}, "mesh tensor=16 needs 16 devices, there are 8"),
        ("expert=2", {}, "mesh axis expert=2 is not supported yet: only data, pipe, tensor may exceed 1"),
        ("tensro=2", {}, "unknown mesh axis 'tensro' in 'tensro=2'; did you mean tensor?"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_load(mesh, changes, message, tmp_path):
    folder = write_model(tmp_path / "m", llama_config(num_attention_heads=8) | changes, with_tokenizer=False)
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(str(folder), mesh=mesh, **SETTINGS)


def test_meshes_of_ones_are_no_meshes():
    device = jax.devices()[0]
    for setting in (None, "tensor=1", "data=1,pipe=1", make_mesh({}), Mesh(np.array([device]), ("tensor",))):
        assert resolve_mesh(setting) is None
    other = resolve_mesh(make_mesh({}, jax.devices()[3:]))
    assert other is not None
    assert divide(parse_config(llama_config()), other).axis_name is None


def test_a_users_mesh_in_any_order():
    devices = np.array(jax.devices()[2:4])
    mesh = resolve_mesh(Mesh(devices.reshape(2, 1), ("tensor", "data")))
    assert mesh is not None
    assert dict(mesh.shape) == {"data": 1, "pipe": 1, "expert": 1, "tensor": 2}
    assert list(mesh.devices.flat) == list(devices)
    with pytest.raises(ValueError, match="unknown mesh axis 'model'; axes are data, pipe, expert, tensor"):
        resolve_mesh(Mesh(devices, ("model",)))


def test_vllms_sizes_are_axes():
    assert EngineConfig.from_kwargs(tensor_parallel_size=2).mesh == "tensor=2"
    assert EngineConfig.from_kwargs(tensor_parallel_size=1, pipeline_parallel_size=1).mesh is None
    with pytest.raises(ValueError, match="are the same setting"):
        EngineConfig.from_kwargs(tensor_parallel_size=2, mesh="tensor=2")
    with pytest.raises(ValueError, match=r"mesh must be text such as 'tensor=2' or a jax\.sharding\.Mesh, got 2"):
        EngineConfig(mesh=2)
