"""Serve takes the config that `motet ray --print-config` prints. Apart from the rest, for it imports Ray."""

import pytest
import yaml  # type: ignore[import-untyped]

from motet.deploy.ray.serve_config import serve_config
from motet.settings import resolve_settings
from motet.settings.record import RAY
from tests.deploy.ray.test_serve_config import FLAGS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),  # Ray's, of pydantic
]


@pytest.mark.parametrize("flags", [FLAGS, {}])
def test_the_config_is_one_for_serve(flags: dict[str, object]) -> None:
    from ray.serve.schema import ServeDeploySchema  # here: it takes seconds, also where this test is not selected

    text = serve_config(resolve_settings(flags, environ={}, names=RAY))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.port == flags.get("port", 8000)
    (application,) = schema.applications
    assert application.import_path == "motet.deploy.ray.app:application"
    assert set(application.args) <= set(RAY)
