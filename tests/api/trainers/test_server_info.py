"""What a trainer reads of the server's configuration, under vLLM's names."""

import msgspec
import pytest

from tests.api.noted_control import NotedControl
from tests.api.serving import Serving, WatchedEngine, hello
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("max_adapters", [0, 3])
async def test_a_trainer_reads_the_configuration_as_of_vllm(serve: Serving, max_adapters: int) -> None:
    """The bug: `lora_config` was null also if adapters could be loaded, so trainers merged them into all weights."""
    engine = WatchedEngine(hello)
    adapters = {"max_adapters": max_adapters, "max_adapter_rank": 16}
    engine.info = msgspec.structs.replace(engine.info, dtype="bfloat16", **adapters)
    served = await serve(rl=True, engine=engine, logprobs_mode="processed_logprobs")
    served.service.control = NotedControl()
    info = (await served.http.get("/server_info", params={"config_format": "json"})).json()
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["max_model_len"] == engine.info.max_model_len
    assert config["weight_transfer_config"] == {"backend": "http"}
    assert config["parallel_config"]["data_parallel_size"] == 1
    if max_adapters:
        limits = {"max_lora_rank": 16, "max_loras": 3, "max_cpu_loras": 3, "lora_dtype": "torch.bfloat16"}
        assert config["lora_config"] == limits | {"fully_sharded_loras": False, "target_modules": None}
    else:
        assert config["lora_config"] is None
    assert {"vllm_env", "system_env"} < set(info)
    text = (await served.http.get("/server_info")).json()["vllm_config"]
    assert "dtype='torch.bfloat16'" in text and f"lora_config={'LoraConfig(' if max_adapters else None}" in text


async def test_a_server_is_one_receiver_of_weights(serve: Serving) -> None:
    served = await serve(rl=True)
    served.service.control = NotedControl()
    for query in ("", "?include_dp=true", "?include_dp=false"):
        assert (await served.http.get(f"/get_world_size{query}")).json() == {"world_size": 1}
    assert_error(await served.http.get("/get_world_size?include_dp=perhaps"), status=400, param="include_dp")
    assert_error(await served.http.get("/server_info?config_format=yaml"), status=400, param="config_format")


async def test_the_routes_are_closed_without_rl_and_where_there_are_no_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        for path in ("/server_info", "/get_world_size"):
            assert_error(await closed.http.get(path), status=404, code=code)
