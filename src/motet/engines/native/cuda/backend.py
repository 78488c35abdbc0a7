"""From a model on a GPU to what runs it: the device's figures, Triton's kernels, a graph for each bucket of rows."""

import torch
from transformers import PreTrainedModel

from motet.config import EngineConfig
from motet.engines.native.backend import Backend
from motet.engines.native.cuda.graphs import CudaGraphs
from motet.engines.native.cuda.layers import fuse
from motet.engines.native.cuda.runner import CudaRunner, CudaSettings
from motet.engines.native.cuda.work import NARROW, WIDE, Geometry
from motet.engines.native.fingerprint import fingerprint
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.sequence import blocks_for


def cuda_backend(
    model: PreTrainedModel, storage: KVStorage, config: EngineConfig, *, max_model_len: int, share_trunks: bool = True
) -> Backend:
    """Records the graphs, which takes seconds. Sameness is not promised: a matrix product's library chooses its method
    by the number of rows, so a row's bits depend on its company."""
    # Only here: Triton comes with torch's CUDA build alone.
    from motet.engines.native.cuda.launch import TritonOperators

    device, dtype = storage.keys.device, storage.keys.dtype
    torch.cuda.set_device(device)  # Triton and graphs use the current one
    geometry = Geometry(
        num_heads=model.config.num_attention_heads,
        num_kv_heads=storage.keys.shape[2],
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        widest=NARROW if dtype is torch.float32 else WIDE,
        share_trunks=share_trunks,
    )
    operators = TritonOperators()
    fuse(model, operators)
    settings = CudaSettings(
        geometry=geometry,
        operators=operators,
        recorder=None if config.enforce_eager else CudaGraphs(),
        max_rows=config.max_num_seqs,
        max_tables=config.max_num_seqs * (blocks_for(max_model_len, storage.block_size) + 2),
    )
    runner = CudaRunner(model, storage, settings)
    return Backend(runner, fingerprint(f"torch-{torch.__version__}", False, dtype, device))
