"""Host memory of loading a safetensors checkpoint: writes a dummy one of the size asked for, loads it over a mesh of
virtual CPU devices, and prints the peak of resident memory above what the process had before.

Each parameter is dropped when it has arrived, as if its devices had memory of their own: what remains is what loading
itself needs. The bound is the largest tensor plus ``--allowance-mib``; the exit code says whether it was kept.

    python benchmarks/load_memory.py --gib 16 --devices 4
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
SIZES = {
    "small": dict(
        vocab_size=32768, hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4
    ),
    "8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
    ),
}  # fmt: skip


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama checkpoint with this config."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (n, hidden) for part, n in rows.items()}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, ffn)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def write_checkpoint(folder: Path, config: dict, file_bytes: int) -> int:
    """A checkpoint of bfloat16 tensors in files of about ``file_bytes``: bytes in all. Values are no good weights."""
    import numpy as np

    (folder / "config.json").write_text(json.dumps(config))
    chunk = np.arange(8 * MIB, dtype=np.uint16).tobytes()
    files: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        if filled + size > file_bytes and files[-1]:
            files.append({})
            filled = 0
        files[-1][name] = shape
        filled += size
    weight_map = {}
    for number, tensors in enumerate(files):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        header, offset = {}, 0
        for name, shape in tensors.items():
            end = offset + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
            weight_map[name] = path.name
            offset = end
        encoded = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for begin in range(0, offset, len(chunk)):
                file.write(chunk[: offset - begin])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The largest that ``resident`` has been since ``reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder: Path, devices: int, in_flight_bytes: int) -> dict[str, float]:
    """Load over ``devices`` devices, each array dropped as it arrives."""
    import jax.numpy as jnp
    import numpy as np

    from jaxserve.models import build
    from jaxserve.weights.checkpoint import open_checkpoint
    from jaxserve.weights.loader import stream_params
    from jaxserve.weights.resolve import resolve_model
    from pallas_kernels.dispatch import BlockedBackend
    from sharding import make_mesh

    files = resolve_model(str(folder))
    model = build(files.config, BlockedBackend(), jnp.bfloat16, devices)
    mesh = make_mesh(devices)
    jnp.zeros(8).block_until_ready()
    before = resident()
    reset_peak()
    started = time.monotonic()
    loaded = checksum = 0
    checkpoint = open_checkpoint(files.path, files.format)
    for _, value in stream_params(
        model.specs, model.weight_map, checkpoint, mesh=mesh, in_flight_bytes=in_flight_bytes
    ):
        loaded += value.nbytes
        checksum += int(np.asarray(value.addressable_shards[-1].data).view(np.uint16).ravel()[-1])
        value.delete()
    return {
        "seconds": time.monotonic() - started, "loaded": loaded, "peak": peak() - before, "before": before,
        "largest_tensor": max(2 * int(np.prod(source.shape)) for source in model.weight_map), "checksum": checksum,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=16.0, help="size of the checkpoint")
    parser.add_argument("--size", choices=SIZES, default="8b", help="shapes of a layer")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--in-flight-mib", type=int, default=1024, help="the loader's own limit")
    parser.add_argument("--allowance-mib", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where to write it; default: a temporary folder")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    config = CONFIG | SIZES[arguments.size]

    def size_of(layers: int) -> int:
        shapes = tensor_shapes(config | {"num_hidden_layers": layers})
        return sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())

    layers = max(1, round((arguments.gib * 2**30 - size_of(0)) / (size_of(1) - size_of(0))))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        total = write_checkpoint(Path(name), config | {"num_hidden_layers": layers}, 4 << 30)
        found = measure(Path(name), arguments.devices, arguments.in_flight_mib * MIB)
    bound = found["largest_tensor"] + arguments.allowance_mib * MIB
    print(
        f"checkpoint {total / MIB:,.0f} MiB ({layers} layers), {arguments.devices} devices: loaded "
        f"{found['loaded'] / MIB:,.0f} MiB in {found['seconds']:.1f} s; peak {found['peak'] / MIB:,.0f} MiB above the "
        f"{found['before'] / MIB:,.0f} MiB before; largest tensor {found['largest_tensor'] / MIB:,.0f} MiB, bound "
        f"{bound / MIB:,.0f} MiB"
    )
    return 0 if found["peak"] <= bound and found["loaded"] >= total else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
