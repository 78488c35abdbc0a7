"""A msgspec struct as a JSON response."""

import msgspec
from fastapi import Response


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
