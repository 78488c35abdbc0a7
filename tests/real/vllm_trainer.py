"""vLLM's unchanged trainer engine for NCCL, with vLLM's HTTP client: it sends each safetensors file to the server.

    vllm_trainer.py SERVER PACKED FILE [FILE...]

`VLLM_NCCL_SO_PATH` names a library that moves bytes in main memory. Streams and the device, which torch for the CPU
does not have, are replaced by objects that do nothing.
"""

import contextlib
import socket
import sys

import torch
from safetensors.torch import load_file

torch.accelerator.current_device_index = lambda: "cpu"
torch.accelerator.device_index = contextlib.nullcontext

from vllm.distributed.device_communicators import pynccl  # noqa: E402
from vllm.distributed.weight_transfer import packed_tensor  # noqa: E402
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: E402
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: E402
from vllm.distributed.weight_transfer.nccl_engine import (  # noqa: E402
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

BUFFER_BYTES = 40_000


class NoStream:
    """A stream whose work is complete when a call returns."""

    cuda_stream = 0

    def synchronize(self) -> None:
        pass


class Files(WeightSource):
    """The tensors of each file in turn."""

    def __init__(self, files: list[str]) -> None:
        self._files = files
        self.number = 0

    def __iter__(self):
        return iter(load_file(self._files[self.number]).items())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]


def main(server: str, packed: str, files: list[str]) -> None:
    pynccl.current_stream = torch.cuda.current_stream = NoStream
    torch.cuda.stream = contextlib.nullcontext
    packed_tensor._get_streams = lambda _, count: (NoStream(),) * count  # noqa: SLF001  it makes streams of a GPU
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    info = NCCLTrainerInitInfo(
        "127.0.0.1", port, 2, packed=packed == "packed", packed_buffer_size_bytes=BUFFER_BYTES, rank=0
    )
    source, client = Files(files), HTTPVLLMWeightSyncClient(server)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    assert engine.model_update_group.available
    for source.number in range(len(files)):
        engine.send_weights()


main(sys.argv[1], sys.argv[2], sys.argv[3:])
