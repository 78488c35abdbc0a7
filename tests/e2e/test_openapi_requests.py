"""Random requests that the OpenAPI document allows: no answer has the status 500, or a form outside the document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from motet.deploy.child import ChildServer
from tests.forked import ForkingProcess
from tests.property_settings import examples

pytestmark = [pytest.mark.slow, pytest.mark.long]

ENDING = {"/drain"}
"""Routes that end the server."""
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(folder: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    """A server whose routes for rollouts can be used without a key."""
    arguments = [str(folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--rl"]
    with forking.server(arguments) as running:
        yield running


def test_answers_to_random_requests_are_documented_and_no_server_error(server: ChildServer) -> None:
    import schemathesis  # takes 2 s, which other tests would wait for
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi import checks

    documented = [
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    ]
    found = schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations()
    operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
    assert len(operations) > 50
    for operation in operations:
        if operation.path in ENDING:
            continue

        @settings(examples(3), suppress_health_check=list(HealthCheck), phases=[Phase.generate], database=None)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            response = case.call(timeout=TIMEOUT_S)
            assert response.status_code not in (500, 502), response.text
            case.validate_response(response, checks=documented)

        check()
        for path in ("/wake_up", "/resume"):  # the requests of the next operation are served
            httpx.post(f"{server.url}{path}", timeout=TIMEOUT_S).raise_for_status()
    assert httpx.get(f"{server.url}/health").is_success
