"""Converts the schema of a Kubernetes resource to a JSON Schema that is small enough for the repository
(`tests/examples`).

    python tools/crd_schema.py CRD.yaml VERSION ORIGIN > SCHEMA.json

The result lacks the status and Kubernetes' own rules (`x-kubernetes-*`). Parts that occur repeatedly are in `$defs`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SMALL = 300
"""Minimum number of characters of a part in `$defs`. A shorter part is repeated where it is used."""

Schema = dict[str, Any]


def main() -> None:
    crd, version, origin = sys.argv[1:]
    resource = yaml.safe_load(Path(crd).read_text())
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in resource["spec"]["versions"] if one["name"] == version)
    del schema["properties"]["status"]
    print(json.dumps({"$comment": origin, **shared(without_rules(schema))}, separators=(",", ":")))


def without_rules(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: without_rules(inner) for name, inner in part.items() if not name.startswith("x-kubernetes-")}
    return [without_rules(inner) for inner in part] if isinstance(part, list) else part


def shared(schema: Schema) -> Schema:
    """Returns an equivalent schema in which each part that occurs repeatedly is in `$defs`."""
    times: Counter[str] = Counter()

    def count(part: Any) -> None:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if isinstance(part, dict) and isinstance(part.get("type"), str):  # a schema, not names of fields
            times[json.dumps(part)] += 1
            if times[json.dumps(part)] > 1:
                return  # its inner parts do not count again
        for one in inner:
            count(one)

    count(schema)
    parts: dict[str, str] = {}
    defs: Schema = {}

    def put(part: Any) -> Any:
        if isinstance(part, list):
            return [put(one) for one in part]
        if not isinstance(part, dict):
            return part
        text = json.dumps(part)
        if times[text] < 2 or len(text) < SMALL:
            return {name: put(one) for name, one in part.items()}
        if text not in parts:
            parts[text] = f"part{len(parts)}"
            defs[parts[text]] = {name: put(one) for name, one in part.items()}
        return {"$ref": f"#/$defs/{parts[text]}"}

    return {**put(schema), "$defs": defs}


if __name__ == "__main__":
    main()
