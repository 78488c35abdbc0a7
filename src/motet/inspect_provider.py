"""Inspect's provider `motet`, which Inspect finds by an entry point if both are installed in one environment.

    inspect eval sums.py --model motet/smollm2 -M group='{"stop_when": {"finished": 4}, "keep": "finished"}'

It is Inspect's provider for OpenAI-compatible servers with three additions: the server is the one at `MOTET_BASE_URL`,
by default http://127.0.0.1:8000/v1; a server without keys needs no `MOTET_API_KEY`; and `group` is sent with every
request of a task that has no `group` in its `extra_body`.
"""

from typing import Any

from inspect_ai.model import GenerateConfig, ModelAPI, modelapi

from motet.settings.server_config import environment

SERVICE = "motet"
DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLE = "MOTET_API_KEY"
NO_KEY = "none"


@modelapi(name=SERVICE)  # type: ignore[untyped-decorator]
def motet() -> type[ModelAPI]:
    """Returns the provider's class. Its import needs OpenAI's client, so it waits until a model is used."""
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI  # noqa: PLC2701

    class MotetAPI(OpenAICompatibleAPI):  # type: ignore[misc]
        """Sends the requests of an evaluation to a Motet server."""

        def __init__(
            self,
            model_name: str,
            *,
            base_url: str | None = None,
            api_key: str | None = None,
            group: dict[str, Any] | None = None,
            **options: Any,
        ) -> None:
            """`group` is the policy of requests without their own. The other arguments are Inspect's."""
            self._group = group
            super().__init__(
                model_name,
                base_url=base_url,
                api_key=api_key or environment().get(KEY_VARIABLE) or NO_KEY,
                service=SERVICE,
                service_base_url=DEFAULT_URL,
                **options,
            )

        def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
            params: dict[str, Any] = super().completion_params(config, tools)
            if self._group is not None:
                params["extra_body"] = {"group": self._group, **params.get("extra_body", {})}
            return params

    return MotetAPI
