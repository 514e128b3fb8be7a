"""The sampling parameters of a request. Unsupported parameters are rejected with an error that names them."""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from rlightning.environments.endpoint.errors import APIError
from rlightning.foreign_text import cut_line, cut_value
from rlightning.python_values import JsonObject
from rlightning.rollout import Sampling
from rlightning.seeds import mix_seed
from rlightning.types.trajectory import TEMPERATURES

log = logging.getLogger(__name__)

MAX_CHOICES = 64
"""Maximum number of choices (``n``) of a request."""
RESPONSE_FORMAT = "response_format"
TRUNCATION = ("top_p", "top_k", "min_p")
"""Parameters that truncate the distribution of a turn's tokens."""
ALLOWABLE = (RESPONSE_FORMAT, *TRUNCATION)
"""Parameters that are refused unless the endpoint allows them."""
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "cache_salt"),
    *("safety_identifier", "request_id", "include", "skip_special_tokens", "spaces_between_special_tokens"),
    *("routed_experts_prompt_start", "prompt_cache_options", "prediction"),
    "max_tool_calls",  # of tools that OpenAI's servers run
}
"""Parameters that do not affect sampling."""
LEFT_TO_TEMPLATE = {"reasoning", "reasoning_effort", "thinking", "verbosity"}
"""Parameters for how much a model reasons and says, which SDKs set by default. Here the chat template decides."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Parameters that no engine here supports, with the values at which they have no effect."""
Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1)]


class StreamOptions(BaseModel):
    """The field ``stream_options`` of a request."""

    include_usage: bool | None = None


class RequestParameters(BaseModel):
    """The parameters of a request besides its messages, by OpenAI's names."""

    model: str | None = None
    temperature: float | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | list[Stop] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    seed: int | None = None
    response_format: JsonObject | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        """Stop strings, which end a turn and are removed from the text for the client."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def json_schema(self) -> str | None:
        """The JSON schema that the completion must follow; None for free text."""
        given = self.response_format or {"type": "text"}
        if given == {"type": "text"}:
            return None
        named = given.get("json_schema")
        schema = {"type": "object"} if given.get("type") == "json_object" else None
        if given.get("type") == "json_schema" and isinstance(named, Mapping):
            schema = named.get("schema")
        if not isinstance(schema, Mapping):
            rule = "has to be of type text, json_object, or json_schema with a schema"
            raise APIError(f"response_format={cut_value(given)} {rule}.", param="response_format")
        return json.dumps(schema)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response includes log-probabilities."""
        return self.logprobs is not False


def read_parameters(
    body: Mapping[str, object],
    sampling: Sampling,
    *,
    ignored: Collection[str],
    allowed: Collection[str] = (),
    others: Collection[str] = (),
) -> RequestParameters:
    """Return the parameters in a request's body, except those in ``ignored`` or in ``others``, which the route reads.

    Other values of :data:`TRUNCATION` than the run's are unsupported unless ``allowed`` has the parameter. Raises an
    APIError for a parameter of the wrong type, or an unsupported one.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in ignored}
    neutral = {**NEUTRAL, "top_p": (sampling.top_p,), "min_p": (sampling.min_p,)}
    neutral["top_k"] = (sampling.top_k,) if sampling.top_k else (0, -1)
    fields = RequestParameters.model_fields.keys() - set(TRUNCATION).difference(allowed)
    for name, value in given.items():
        if name in fields or name in others or name in WITHOUT_EFFECT:
            continue
        if name in LEFT_TO_TEMPLATE:
            log_left_to_template(name)
            continue
        if name not in neutral:
            raise APIError(f"Unknown parameter: '{name}'. {way_out(name)}", param=name, code="unknown_parameter")
        if value not in neutral[name]:
            rule = f"is not supported, other than {cut_value(neutral[name][0])}"
            raise APIError(
                f"{name}={cut_value(value)} {rule}. {way_out(name)}", param=name, code="unsupported_parameter"
            )
    values = {name: value for name, value in given.items() if name in fields}
    try:
        return RequestParameters.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part) in values)
        raise APIError(f"{place}={cut_value(first['input'])}: {cut_line(first['msg'])}.", param=place) from None


def refuse_choices(body: JsonObject) -> None:
    """Raise an APIError for the parameter ``n`` in an API whose responses have one choice."""
    if "n" in body:
        raise APIError("Unknown parameter: 'n'.", param="n", code="unknown_parameter")


def to_sampling(asked: RequestParameters, own: Sampling, stream: int, temperature: float | None) -> Sampling:
    """Return the settings with which to sample for a request: its own parameters, and the run's where it gives none.

    Args:
        own: the trajectory's settings, from the run.
        stream: number of the trajectory's random stream, so that the same seed gives other samples in each trajectory.
        temperature: temperature of the trajectory's earlier turns; None without any.

    Raises:
        APIError: the temperature is invalid, or differs from that of the earlier turns.
    """
    wanted = own.temperature if asked.temperature is None else asked.temperature
    lowest, highest = TEMPERATURES
    if wanted != own.temperature and not lowest <= wanted <= highest:
        rule = f"has to be from {lowest} to {highest:g}: what is sampled greedily cannot be trained"
        raise APIError(f"temperature={wanted} {rule}. {way_out('temperature')}", param="temperature")
    if temperature not in (None, wanted):
        raise APIError(
            f"temperature={wanted} differs from {temperature}, at which earlier turns of this session were sampled: a "
            f"trajectory has one temperature. {way_out('temperature')}",
            param="temperature",
        )
    limits = [own.max_new_tokens, asked.max_tokens, asked.max_completion_tokens]
    return replace(
        own,
        temperature=wanted,
        top_p=own.top_p if asked.top_p is None else asked.top_p,
        top_k=own.top_k if asked.top_k is None else max(asked.top_k, 0),
        min_p=own.min_p if asked.min_p is None else asked.min_p,
        max_new_tokens=min(limit for limit in limits if limit is not None),
        stop=(*own.stop, *asked.stops),
        stop_token_ids=(*own.stop_token_ids, *asked.stop_token_ids),
        json_schema=asked.json_schema,
        seed=own.seed if asked.seed is None else mix_seed(stream, "client", asked.seed),
    )


@cache
def log_left_to_template(name: str) -> None:
    """Log, once for each parameter, that it has no effect."""
    log.info("Requests of an agent set '%s', without effect: the chat template decides how much is said.", name)


def way_out(name: str) -> str:
    """Return what to do about a parameter that is not supported."""
    ignored = f"Leave it out, or add '{name}' to the endpoint's ignored parameters (environment.endpoint.ignored)"
    allowed = " or to those that it honours (environment.endpoint.allowed)" if name in ALLOWABLE else ""
    return f"{ignored}{allowed}."
