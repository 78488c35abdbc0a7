"""The answers of files and batches fit the schemas in `GET /openapi.json`."""

import jsonschema
import pytest

from tests.api.batches.batch_serving import CHAT, BatchServing, line

pytestmark = pytest.mark.anyio


async def test_the_answers_of_all_routes_are_as_documented(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        http, batch = server.served.http, await server.ended(await server.create(line("a")))
        described = (await http.get("/openapi.json")).json()
        form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
        new = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        seen = set()
        for method, path, sent in (
            ("POST", "/v1/files", form),
            ("GET", "/v1/files", {}),
            ("GET", f"/v1/files/{batch.output_file_id}", {}),
            ("GET", f"/v1/files/{batch.output_file_id}/content", {}),
            ("POST", "/v1/batches", {"json": new}),
            ("GET", "/v1/batches", {}),
            ("GET", f"/v1/batches/{batch.id}", {}),
            ("POST", f"/v1/batches/{batch.id}/cancel", {}),
            ("DELETE", f"/v1/files/{batch.output_file_id}", {}),
        ):
            answer = await http.request(method, path, **sent)
            assert answer.status_code == (400 if path.endswith("/cancel") else 200), answer.text
            route = path.replace(batch.id, "{id}").replace(str(batch.output_file_id), "{id}")
            operation = described["paths"][route][method.lower()]
            seen.add((method, route))
            status = "4XX" if answer.status_code == 400 else "200"
            kind = answer.headers["content-type"].partition(";")[0]
            content = operation["responses"][status]["content"][kind]
            if kind == "application/json":
                jsonschema.validate(answer.json(), {**content["schema"], "components": described["components"]})
        documented = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
        assert seen == {route for route in documented if route[1].startswith(("/v1/files", "/v1/batches"))}
