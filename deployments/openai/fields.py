"""Types of request fields: what each accepts, its bounds, and its JSON Schema.

Owns parsing of single values. An error says what is wrong; `deployments.errors` adds the name of the field. Does not
know which body a field belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_STOPS = 16
MAX_STOP_LEN = 1024
"""Most characters of one stop string."""
MAX_STOP_IDS = 64
MAX_LABEL_LEN = 1024
MAX_BIASES = 300
MAX_ABS_BIAS = 100
MAX_N = 16
MAX_PROMPTS = 16
MAX_CHOICES = 128
"""Most choices of one HTTP request: prompts times n."""

TokenIds = tuple[int, ...]


class Body(BaseModel):
    """An object that a client sends. A field that is not declared may only be null, which means that it is absent."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="after")
    def _unknown_fields_are_null(self) -> Self:
        name = next((name for name, value in (self.model_extra or {}).items() if value is not None), None)
        if name is not None:
            raise PydanticCustomError("unknown_field", "unknown field", {"field": name})
        return self


def value_error(message: str) -> PydanticCustomError:
    """An error of the value being parsed."""
    # Braces would be read as placeholders, and clients' own text may hold some.
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def field_error(field: str, message: str) -> PydanticCustomError:
    """An error of one field that depends on other fields."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message, "field": field})


class Only:
    """Annotation of an option that this server does not support: only values that change nothing are accepted.

    null is always accepted.

    Args:
        neutral: the accepted values.
    """

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def check(self, value: Any) -> Any:
        for allowed in self._neutral:
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return value
        if value is None:
            return value
        hint = " or ".join(repr(allowed) for allowed in self._neutral)
        raise value_error("is not supported; leave it out" + (f" or set it to {hint}" if hint else ""))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"enum": [None, *self._neutral]}


Absent = Annotated[Any, Only()]
"""An option of OpenAI's that this server does not support: null only."""


def _parse_prompts(value: Any) -> tuple[str | TokenIds, ...]:
    """Prompts: a text or a list of token ids is one prompt, a list of texts or of lists is several."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise value_error("must be a string, a list of token ids, or a list of those")
    if not value:
        raise value_error("must not be empty")
    if not any(isinstance(item, str | list) for item in value):
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise value_error(f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item for item in value):
        return tuple(_token_ids(item) for item in value)
    raise value_error("must hold either texts only or non-empty lists of token ids only")


def _token_ids(items: Sequence[Any]) -> TokenIds:
    for index, item in enumerate(items):
        if type(item) is not int:
            raise value_error(f"must hold token ids only; item {index} is {_shown(item)}")
    return tuple(items)


def _parse_token_ids(value: Any) -> TokenIds:
    if not isinstance(value, list):
        raise value_error("must be a list of token ids")
    return _token_ids(value)


def _parse_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise value_error("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise value_error(f"holds {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LEN:
            raise value_error(f"string {index} has {len(stop)} characters; allowed are 1 to {MAX_STOP_LEN}")
    return tuple(dict.fromkeys(stops))


def _parse_stop_ids(value: Any) -> TokenIds:
    if value is None:
        return ()
    ids = _parse_token_ids(value)
    if len(ids) > MAX_STOP_IDS:
        raise value_error(f"holds {len(ids)} token ids; at most {MAX_STOP_IDS} are allowed")
    return tuple(dict.fromkeys(ids))


def _parse_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise value_error('must be an object from token id to bias, like {"50": -100}')
    if len(value) > MAX_BIASES:
        raise value_error(f"holds {len(value)} token ids; at most {MAX_BIASES} are allowed")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise value_error(f"has the key {key[:40]!r}, which is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_ABS_BIAS:
            raise value_error(f"of token {key} must be a number from -{MAX_ABS_BIAS} to {MAX_ABS_BIAS}")
        if int(key) in biases:
            raise value_error(f"names token {int(key)} twice")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _parse_plain(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float):
        return value
    raise value_error("must be a string, a number, a boolean or null")


def _shown(value: Any) -> str:
    try:
        return repr(value)[:40]
    except ValueError:  # An integer with more digits than Python prints.
        return "a number too long to print"


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}
_BIAS_SCHEMA = {"type": "number", "minimum": -MAX_ABS_BIAS, "maximum": MAX_ABS_BIAS}

Prompts = Annotated[
    tuple[str | TokenIds, ...],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS_SCHEMA,
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
Ids = Annotated[
    TokenIds, PlainValidator(_parse_token_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_stop),
    WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
]
StopIds = Annotated[
    TokenIds,
    PlainValidator(_parse_stop_ids),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {"type": "integer"}, "maxItems": MAX_STOP_IDS}, {"type": "null"}]}
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": _BIAS_SCHEMA,
                    "maxProperties": MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]
PlainValue = Annotated[
    str | int | float | bool | None,
    PlainValidator(_parse_plain),
    WithJsonSchema({"type": ["string", "number", "boolean", "null"]}),
]
Label = Annotated[str, Field(max_length=MAX_LABEL_LEN)]
"""A text that clients attach to a request and that changes nothing."""
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.1, le=10)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
MinTokens = Annotated[int, Field(ge=0, lt=2**31)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_N)]
