"""Models are added and removed: they are listed, counted and reported."""

import msgspec
import pytest
from anthropic.types import ModelInfo

from motet.api.served import TextModel
from motet.engines.http import server_client
from motet.engines.remote import EngineServer
from motet.engines.upstream.text_source import TextGroupStream, TextRequest
from motet.errors import EngineError
from motet.ids import ModelName
from motet.text.tokenizer import Tokenizer
from tests.api.engine_requests import group, post
from tests.api.messaging import checked_error
from tests.api.messaging import post as post_message
from tests.api.serving import MODEL, EngineWithoutWorkers, Served, Serving, group_lines
from tests.api.two_models import PLAIN, TURNED, Tokenizers, TwoModels, every_route, served_as
from tests.api.two_models import post as post_model
from tests.error_response import assert_error
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(serve: Serving, models: TwoModels) -> Served:
    return await serve.several(models, *models.engines)


async def test_the_models_are_listed_with_all_known_facts(
    serve: Serving, models: TwoModels, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = served_as("adapter", models.plain, tokenizer, root="hub/adapter", parent=PLAIN, created=5)
    models.listed += [adapter, text_model("elsewhere")]
    served = await serve.several(models, *models.engines)
    cards = (await served.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards] == [
        (PLAIN, "weights/plain", None, 4096),
        (TURNED, "weights/turned", None, 64),
        ("adapter", "hub/adapter", PLAIN, 4096),
        ("elsewhere", "far/away", None, None),
    ]
    assert {(card["object"], card["owned_by"]) for card in cards} == {("model", "motet")}
    assert [card["weight_version"] for card in cards] == ["0", "0", "0", None]
    assert cards[2]["created"] == 5
    for card in cards:
        assert (await served.http.get(f"/v1/models/{card['id']}")).json() == card
    refused = await served.http.get("/v1/models/other/one")
    assert_error(refused, status=404, code="model_not_found", param="model")
    assert f"`{PLAIN}`, `{TURNED}`, `adapter`, `elsewhere`" in refused.json()["error"]["message"]
    with caplog.at_level("INFO", logger="motet.api"):
        await post_model(served, "/v1/completions", "adapter")
    (line,) = group_lines(caplog)
    assert (line["model"], line["adapter"]) == (PLAIN, "adapter")
    status = await served.status()
    assert (status["model"], status["models"]) == (PLAIN, [PLAIN, TURNED, "adapter", "elsewhere"])


async def test_anthropics_client_lists_models_in_its_own_shape(serve: Serving, models: TwoModels) -> None:
    models.listed.append(text_model("elsewhere"))
    served = await serve.several(models, *models.engines)
    client = served.anthropic.models
    page = await client.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, PLAIN, "elsewhere")
    listed = [ModelInfo.model_validate_json(model.to_json()) async for model in page]
    assert [(model.id, model.display_name, model.max_input_tokens, model.max_tokens) for model in listed] == [
        (PLAIN, PLAIN, 4096, 4096),
        (TURNED, TURNED, 64, 64),
        ("elsewhere", "elsewhere", None, None),
    ]
    assert listed[0].created_at.timestamp() == served.service.served(PLAIN).created
    assert await client.retrieve(TURNED) == page.data[1]
    response = await served.http.get("/v1/models/claude", headers={"anthropic-version": "2023-06-01"})
    assert_error(checked_error(response), status=404, type="not_found_error")
    models.listed.clear()
    assert (await client.list()).to_dict() == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@every_route
async def test_a_model_that_goes_is_not_found_and_found_when_it_is_back(
    served: Served, models: TwoModels, path: str
) -> None:
    gone = models.listed.pop()
    assert_error(await post_model(served, path, TURNED), status=404, code="model_not_found")
    assert (await post_model(served, path, None)).status_code == 200
    models.listed.append(gone)
    assert (await post_model(served, path, TURNED)).status_code == 200
    assert (await post_model(served, path, None)).status_code == 400


async def test_an_answer_of_a_removed_model_continues_to_its_end(serve: Serving, tokenizers: Tokenizers) -> None:
    models = TwoModels(tokenizers, gated=True)
    served = await serve.several(models, *models.engines)
    request = await models.turned.start_request(post_model(served, "/v1/completions", TURNED))
    models.listed.clear()
    models.turned.go(3)
    answer = (await request).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (TURNED, "ba")


@every_route
async def test_without_any_model_clients_can_retry(served: Served, models: TwoModels, path: str) -> None:
    models.listed.clear()
    for model in (None, PLAIN):
        assert_error(await post_model(served, path, model), status=503, retry_after="2", code="no_worker")
    assert (await served.http.get("/v1/models")).json()["data"] == []
    status = await served.status()
    assert (status["model"], status["models"]) == (None, [])
    assert (await served.http.get("/metrics")).status_code == 200


async def test_the_root_of_a_renamed_model_is_where_it_comes_from(serve: Serving) -> None:
    served = await serve()
    served.engine.info = msgspec.structs.replace(served.engine.info, root="org/model")
    (card,) = (await served.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"]) == (MODEL, "org/model")


@every_route
async def test_a_model_without_workers_holds_up_no_other(
    serve: Serving, models: TwoModels, tokenizer: Tokenizer, path: str
) -> None:
    models.listed.append(served_as("away", EngineWithoutWorkers(), tokenizer, root="its/root"))
    served = await serve.several(models, *models.engines)
    assert_error(await post_model(served, path, "away"), status=503, code="no_worker")
    assert (await post_model(served, path, PLAIN)).status_code == 200
    cards = (await served.http.get("/v1/models")).json()["data"]
    assert [card["max_model_len"] for card in cards] == [4096, 64, None]


def no_texts(request: TextRequest) -> TextGroupStream:
    raise AssertionError("a text model got a request")


def text_model(name: str) -> TextModel:
    return TextModel(name=name, root="far/away", created=1, max_model_len=None, generate=no_texts)


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/inference/v1/generate", "/tokenize", "/detokenize", "/v1/score", "/v1/decisions"]
)
async def test_a_model_that_takes_texts_has_no_tokens(serve: Serving, models: TwoModels, path: str) -> None:
    models.listed.append(text_model("elsewhere"))
    served = await serve.several(models, *models.engines)
    assert_error(await post_model(served, path, "elsewhere"), status=400, code="unsupported_model", param="model")
    del models.listed[:2]
    assert_error(await post_model(served, path, None), status=400, code="unsupported_model", param="model")


async def test_anthropics_route_has_no_texts_either(serve: Serving, models: TwoModels) -> None:
    models.listed.append(text_model("elsewhere"))
    served = await serve.several(models, *models.engines)
    refused = checked_error(await post_message(served, model="elsewhere"))
    assert_error(refused, status=400, type="invalid_request_error")
    assert refused.json()["error"]["message"].startswith(
        "model: The model `elsewhere` runs on a server that takes texts"
    )


async def samples(served: Served) -> dict[str, float]:
    lines = (await served.metrics()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_groups_are_counted_for_their_model_and_never_for_an_unknown_name(served: Served) -> None:
    await post_model(served, "/v1/completions", PLAIN, n=3)
    await post_model(served, "/v1/completions", TURNED)
    await post_model(served, "/v1/completions", TURNED)
    await post_model(served, "/v1/completions", "gpt")
    figures = await samples(served)
    name = "motet:request_params_n"
    assert figures[f'{name}_sum{{model_name="{PLAIN}"}}'] == 3
    assert figures[f'{name}_count{{model_name="{TURNED}"}}'] == 2
    assert figures[f'motet:request_success_total{{finished_reason="stop",model_name="{TURNED}"}}'] == 2
    assert figures[f'motet:groups_total{{model_name="{PLAIN}",status="200"}}'] == 1
    assert figures[f'motet:inter_token_latency_seconds_count{{model_name="{TURNED}"}}'] == 4
    assert figures['motet:groups_without_first_token{model_name=""}'] == 0
    assert not any("gpt" in name for name in figures)


async def test_metrics_have_every_model_before_its_first_request_and_keep_it_when_it_goes(
    served: Served, models: TwoModels
) -> None:
    name = 'motet:request_params_n_count{model_name="%s"}'
    figures = await samples(served)
    assert (figures[name % PLAIN], figures[name % TURNED]) == (0, 0)
    await post_model(served, "/v1/completions", TURNED)
    models.listed.pop()
    figures = await samples(served)
    assert (figures[name % PLAIN], figures[name % TURNED]) == (0, 1)
    assert 'motet:groups_without_first_token{model_name=""}' in figures


async def test_a_gateway_of_several_models_is_no_worker_of_another(served: Served, models: TwoModels) -> None:
    response = await served.http.get("/engine")
    assert_error(response, status=404, code="no_single_model")
    assert PLAIN in response.json()["error"]["message"]
    assert (await post(served, "/engine/generate", group())).status_code == 404
    async with server_client() as client:
        server = EngineServer(served.url, client)
        with pytest.raises(EngineError, match="Use the workers of this server") as refused:
            await server.report(timeout_s=PATIENCE_S)
        assert type(refused.value) is EngineError  # otherwise it would be treated as another kind of server
        models.listed.pop()
        assert (await server.report(timeout_s=PATIENCE_S)).info.model == models.plain.info.model


async def test_a_worker_takes_groups_for_its_own_model_only(serve: Serving) -> None:
    served = await serve()
    for model, status in (("", 200), ("fake", 200), (MODEL, 503), ("other", 503)):
        response = await post(served, "/engine/generate", group(model=ModelName(model), seeded=False, stops=True))
        assert response.status_code == status
    assert "does not have 'other'" in response.json()["error"]["message"]
    assert [(request.seeded, request.stops) for request in served.engine.requests] == [(False, True)] * 2
