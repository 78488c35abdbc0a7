"""The version of the weights in the deltas of a group, when weights or adapters are replaced during it."""

import msgspec
import pytest

from motet.engine_info import AdapterInfo, EngineInfo
from motet.engines.native.client import PipeStream
from motet.ids import ModelName, RequestId
from motet.testing.fake_engine import fake_info
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, SamplingParams, choice_starts

pytestmark = pytest.mark.anyio


def info_of(adapter: str | None, weights: str = "0") -> EngineInfo:
    adapters = () if adapter is None else (AdapterInfo(name=ModelName("a"), digest="d", version=adapter, rank=1),)
    return msgspec.structs.replace(fake_info(max_adapters=1), adapters=adapters, weight_version=weights)


@pytest.mark.parametrize(
    ("model", "infos", "versions"),
    [
        ("a", [info_of("2")], ["1", "2"]),
        ("a", [info_of("1", weights="7")], ["1", ""]),
        ("a", [info_of(None)], ["1", ""]),
        ("", [info_of("2", weights="1")], ["1", ""]),
        ("", [info_of("1", weights="7")], ["1", "7"]),
    ],
)
async def test_a_group_reports_the_version_of_its_own_weights(
    model: str, infos: list[EngineInfo], versions: list[str]
) -> None:
    request = GenerateRequest(
        request_id=RequestId("r"),
        prompt=(1, 2),
        choices=choice_starts(1, 0),
        sampling=SamplingParams(max_tokens=4),
        model=ModelName(model),
    )
    stream = PipeStream(request, lambda _: None, version="1", is_new=True)
    delta = GroupDelta(RequestId("r"), (ChoiceDelta(0, (1,), None, None),))
    stream.feed(delta)
    seen = [(await anext(stream)).weight_version]
    for info in infos:
        stream.use_version_of(info)
    stream.feed(delta)
    seen.append((await anext(stream)).weight_version)
    assert seen == versions
