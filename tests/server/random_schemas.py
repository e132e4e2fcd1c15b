"""Random JSON schemas of the kinds that people write for answers, all of which can be enforced."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "tags", "items", "kind", "id", "größe", "a b", 'quo"te', "x/y", "$ref", "type", "")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema; most of its values are bounded, so that a model that knows nothing ends them."""
    kinds = [_text, _number, _constant, _format]
    if depth:
        kinds += [_object, _object, _array, _either, _reference]
    return rng.choice(kinds)(rng, depth)


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    return rng.choice(
        (
            {"type": "string", "maxLength": 6}, {"type": "string", "minLength": low, "maxLength": low + 4},
            {"type": "string", "pattern": rng.choice(("^[a-z]{2,5}$", "^[0-9]+(-[0-9]{2})?$", "^(yes|no)\\.$"))},
        )
    )  # fmt: skip


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    return rng.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 1}, {"type": "boolean"}, {"type": "null"},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}, {"type": ["integer", "null"]},
        )
    )  # fmt: skip


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, "a", 'ü\n"', True, None, [1, "b"], {"k": {}}]
    return {"const": rng.choice(values)} if rng.random() < 0.5 else {"enum": rng.sample(values, 3)}


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(("date", "time", "date-time", "uuid", "ipv4", "email", "duration"))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    required = [name for name in names if rng.random() < 0.7]
    schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    return schema | {"required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [random_schema(rng, depth - 1) for _ in range(2)], "items": False,
                "minItems": 2}  # fmt: skip
    return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """A list that refers to itself."""
    node = {
        "type": "object", "properties": {"value": random_schema(rng, 0), "next": {"anyOf": [
            {"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": False,
    }  # fmt: skip
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def hoisted(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the definitions of its parts at its top, where references look for them."""
    definitions: dict[str, Any] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(one) for one in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"$ref", "$defs"} and isinstance(value["$defs"], dict):
            name = f"node{len(definitions)}"
            definitions[name] = None
            node = walk(value["$defs"]["node"])
            node["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
            definitions[name] = node
            return {"$ref": f"#/$defs/{name}"}
        return {key: one if key in ("const", "enum") else walk(one) for key, one in value.items()}

    result: dict[str, Any] = walk(schema)
    return result | ({"$defs": definitions} if definitions else {})
