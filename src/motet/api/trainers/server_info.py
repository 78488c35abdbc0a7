"""The routes that a trainer reads before it starts (`--rl`), as in vLLM: the server's configuration, and the number of
receivers of weights."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from motet import __version__
from motet.api.http.routes import json_response, new_router
from motet.api.service import Service
from motet.engine_info import EngineInfo
from motet.types import LogprobsMode


class VllmModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    served_model_name: str
    dtype: str
    """The name in torch, such as `torch.bfloat16`."""
    max_model_len: int
    logprobs_mode: LogprobsMode
    """Mode of requests that do not name a mode."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    num_gpu_blocks: int
    """Number of KV blocks of an engine, on any device."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All sizes are 1: the server receives weights once, however many engines it has."""

    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of LoRA adapters."""

    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int
    """Equal to `max_loras`: every loaded adapter can be used in any step."""
    lora_dtype: str
    fully_sharded_loras: bool = False
    target_modules: None = None
    """Not restricted: adapters can change all linear layers."""

    @classmethod
    def of(cls, info: EngineInfo) -> "LoraConfig | None":
        """Returns None for engines that load no adapters, as in vLLM without `--enable-lora`."""
        rank, number = info.max_adapter_rank, info.max_adapters
        if not (rank and number):
            return None
        return cls(max_lora_rank=rank, max_loras=number, max_cpu_loras=number, lora_dtype=f"torch.{info.dtype}")


class WeightTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    """`nccl` if the engines are on GPUs. Such servers accept tensors over HTTP too."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of vLLM's configuration that this server has too."""

    model_config: VllmModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig = ParallelConfig()
    lora_config: LoraConfig | None
    weight_transfer_config: WeightTransferConfig


def _config_of(info: EngineInfo, logprobs_mode: LogprobsMode) -> VllmConfig:
    return VllmConfig(
        model_config=VllmModelConfig(
            model=info.model,
            served_model_name=info.model,
            dtype=f"torch.{info.dtype}",
            max_model_len=info.max_model_len,
            logprobs_mode=logprobs_mode,
        ),
        lora_config=LoraConfig.of(info),
        weight_transfer_config=WeightTransferConfig(backend="nccl" if info.device.startswith("cuda") else "http"),
        cache_config=CacheConfig(block_size=info.block_size, num_gpu_blocks=info.num_blocks),
    )


def server_info_router(service: Service) -> APIRouter:
    router = new_router()

    @router.get("/server_info")
    async def server_info(config_format: Annotated[Literal["text", "json"], Query()] = "text") -> Response:
        """`vllm_config` is an object, or its text by default, as in vLLM."""
        service.opened(service.control)
        config = _config_of(service.only_model().info, service.config.logprobs_mode)
        text = ", ".join(f"{name}={value!r}" for name, value in msgspec.structs.asdict(config).items())
        shown = msgspec.to_builtins(config) if config_format == "json" else text
        environment = {"vllm_env": {}, "system_env": {"motet_version": __version__}}
        return json_response({"vllm_config": shown, **environment})

    @router.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> Response:
        """One receiver of weights, with data parallelism or without."""
        service.opened(service.control)
        return json_response({"world_size": ParallelConfig().world_size})

    return router
