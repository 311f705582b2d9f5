"""LoRA adapters of random low-rank matrices for the tiny model, in the format of peft."""

import random
import struct
from pathlib import Path

import orjson

RANK = 8
HIDDEN, LAYERS = 64, 2
OUTPUTS = {"q_proj": 64, "v_proj": 32}  # the tiny model has two heads and one KV head of 32


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter; its matrices follow from the seed. Return its folder."""
    random_numbers = random.Random(seed)
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": shape
        for layer in range(LAYERS)
        for name, outputs in OUTPUTS.items()
        for side, shape in (("A", (RANK, HIDDEN)), ("B", (outputs, RANK)))
    }
    header, data = {}, b""
    for name, (rows, columns) in shapes.items():
        values = [random_numbers.gauss(0, 0.5) for _ in range(rows * columns)]
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, len(data)]}
    described = orjson.dumps(header)
    described += b" " * (-len(described) % 8)
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + data)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [*OUTPUTS],
    }
    (folder / "adapter_config.json").write_bytes(
        orjson.dumps({**config, "bias": "none", "base_model_name_or_path": "tiny"})
    )
    return folder
