"""Reports what an engine process would find on this machine, without loading weights.

`motet doctor` runs `python -m motet.engines.native.probe` in a process of its own, since importing torch and starting
NIXL takes seconds and can fail in any way. The settings of an engine are read from standard input. Each part is one
line of JSON on standard output, so that the parts before a crash are known:

    {"torch": {...}}        version, build, GPUs
    {"model": {...}}        dtype and KV cache of the model, if a folder was given
    {"transport": {...}}    the transport that would move KV between the engines of a cell
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
import zmq

from motet.engines.native.build import MemoryNeeds, choose_blocks, max_model_len_of
from motet.engines.native.kv.storage import KVLayout
from motet.engines.native.model import read_config, read_shape, resolve_device, resolve_dtype, weights_in_memory
from motet.errors import MotetError
from motet.settings.engine_config import EngineConfig
from motet.system.machine import read_memory
from motet.transfer.backends.start import start_transport
from motet.transfer.proof import Proof
from motet.transfer.transport import RegisteredMemory

Facts = dict[str, object]


def torch_facts() -> Facts:
    gpus = (
        [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "triton": find_spec("triton") is not None,
        "nvidia": Path("/proc/driver/nvidia/version").exists(),
    }


def model_facts(config: EngineConfig) -> Facts:
    """Returns the sizes of the model and of its KV cache. Raises MotetError if an engine would not start with it."""
    folder = Path(config.model_path)
    hf_config = read_config(folder)
    shape, device, dtype = (
        read_shape(folder, hf_config),
        resolve_device(config.device),
        resolve_dtype(config.dtype, hf_config),
    )
    max_model_len = max_model_len_of(config.max_model_len, shape)
    layout = KVLayout(shape.num_layers, config.block_size, shape.num_kv_heads, shape.head_dim, dtype)
    needs = MemoryNeeds(max_model_len, weights_in_memory(folder, hf_config, dtype=dtype))
    num_blocks, reason = choose_blocks(config, layout, needs=needs, device=device)
    return {
        "architecture": ", ".join(hf_config.architectures or []),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "max_model_len": max_model_len,
        "weights_bytes": needs.weights_bytes,
        "kv_cache_bytes": num_blocks * layout.bytes_per_block,
        "kv_cache_tokens": num_blocks * layout.block_size,
        "kv_cache_reason": reason,
    }


def transport_facts(config: EngineConfig) -> Facts:
    """Starts a transport over one small block, and returns its kind."""
    region, proof = bytearray(4096), Proof(1)
    memory = RegisteredMemory(
        regions=(torch.frombuffer(region, dtype=torch.uint8).data_ptr(),),
        region_block_bytes=len(region),
        num_blocks=1,
        device=-1,
        proof=proof.address,
        proof_entries=proof.num_entries,
    )
    transport = start_transport(
        config.kv_transfer_backend, "doctor", memory=memory, host=config.side_channel_host, poller=zmq.Poller()
    )
    transport.close()
    return {"kind": str(transport.kind)}


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    config = replace(config, available_bytes=read_memory().available_bytes)
    report("torch", torch_facts)
    if config.model_path:
        report("model", lambda: model_facts(config))
    report("transport", lambda: transport_facts(config))
    os._exit(0)  # threads of NIXL could delay the end


def report(part: str, facts: Callable[[], Facts]) -> None:
    """Writes one part to standard output: its facts, or the error for which there are none."""
    try:
        found = facts()
    except MotetError as error:
        found = {"error": error.message}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"{json.dumps({part: found})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
