"""A sampler for any server with OpenAI's /v1/completions, used to inspect rollouts, not to train."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from rlightning import intervals
from rlightning.errors import ConfigError, EngineError, RequestRefusedError
from rlightning.foreign_text import cut_line
from rlightning.rollout.engine import make_samples
from rlightning.rollout.engine_output import EngineOutput
from rlightning.rollout.model_files import ModelFiles
from rlightning.rollout.sampler import OnTokens, Sampling, TokenSampler
from rlightning.types import Sample

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 600.0
"""Maximum seconds of a completion, where the environment has no time limit for trajectories."""
WRONG_SERVER = (401, 403, 404, 405)
"""HTTP statuses that any further request would get too."""


Choice = Mapping[str, Any]
"""One completion of a server's response, from JSON."""


class EndpointSampler(TokenSampler):
    """A sampler that sends prompts as token ids to an OpenAI-compatible server. Its weights count as version 0.

    Samples are exact if the server returns token ids, as vLLM's does. Otherwise their text is tokenized again, which is
    logged once; such samples must not be trained on.

    Args:
        url: URL of the API, such as ``http://127.0.0.1:8000/v1``.
        files: files of the policy, for its tokenizer and end tokens.
        model: name of the model at the server; None for the server's only model.
        key: the API key that the server requires.

    Attributes:
        max_length: maximum tokens of a sequence, set by :meth:`connect`; None if the server does not report it.
    """

    def __init__(self, url: str, files: ModelFiles, *, model: str | None = None, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint {url} is no address. Write one such as http://127.0.0.1:8000/v1.")
        url = url.rstrip("/")
        self.url = url if url.endswith("/v1") else f"{url}/v1"
        self.model, self.files = model, files
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None
        self._returns_ids = True
        self.max_length: int | None = None

    def connect(self) -> None:
        """Request the server's list of models; set :attr:`max_length`, and ``model`` if the server has only one.

        Raises:
            ConfigError: the server cannot be reached, or does not have the model.
        """
        try:
            response = httpx.get(f"{self.url}/models", headers=self._headers, timeout=intervals.SERVICE_CONNECT_TIMEOUT)
            response.raise_for_status()
            models = {str(one["id"]): one for one in response.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--endpoint {self.url}: {cut_line(error) or type(error).__name__}. Is an OpenAI-compatible server "
                "there? It must answer GET /v1/models."
            ) from error
        if self.model is None and len(models) == 1:
            (self.model,) = models
        if self.model not in models:
            named = "no --endpoint-model is named" if self.model is None else f"it has no model '{self.model}'"
            raise ConfigError(f"--endpoint {self.url}: {named}. It has: {', '.join(models) or 'none'}.")
        limit = models[self.model].get("max_model_len")
        self.max_length = limit if isinstance(limit, int) else None

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        session: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sample]:
        """Sample from the server (:meth:`TokenSampler.sample`), without partial output; ``session`` has no effect."""
        prompt = list(token_ids)
        text = await self._request(make_body(self.model, prompt, sampling, num_samples, self._returns_ids))
        try:
            choices = sorted(json.loads(text)["choices"], key=lambda choice: choice.get("index", 0))
            outputs = [self._read(choice) for choice in choices]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self.url}/completions answered something else than completions: {error!r}") from error
        if len(outputs) != num_samples:
            raise EngineError(f"{self.url}/completions returned {len(outputs)} completions of {num_samples}.")
        samples = make_samples(self.files, prompt, outputs)
        for sample, choice in zip(samples, choices, strict=True):
            if choice.get("token_ids") is None:
                sample.text = str(choice["text"])  # decoding the tokens may give another text
        return samples

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Raise an error: OpenAI's API does not return log-probabilities of a prompt."""
        raise EngineError(f"{self.url} cannot score sequences, which verifying trajectories needs. Turn that off.")

    async def _request(self, body: dict[str, object]) -> str:
        """Send a request and return the body of the response.

        Raises:
            RequestRefusedError: the server rejects this request.
            EngineError: the server fails, or would reject any request.
        """
        if self._client is None:
            timeout = httpx.Timeout(REQUEST_TIMEOUT, connect=intervals.SERVICE_CONNECT_TIMEOUT)
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits)
        try:
            response = await self._client.post(f"{self.url}/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}: {cut_line(error) or type(error).__name__}. Is the server up?") from error
        if response.is_success:
            return response.text
        reason = f"HTTP {response.status_code}: {cut_line(response.text)}"
        if "return_token_ids" in body and response.status_code in (400, 422) and "return_token_ids" in response.text:
            self._returns_ids = False
            return await self._request({name: value for name, value in body.items() if name != "return_token_ids"})
        if response.status_code in WRONG_SERVER or response.status_code >= 500:
            raise EngineError(f"{self.url}/completions cannot be used, {reason}")
        raise RequestRefusedError(reason)

    def _read(self, choice: Choice) -> EngineOutput:
        """Convert a completion of the response to the output of an engine's process."""
        token_ids = choice.get("token_ids")
        if token_ids is None:
            if self._returns_ids:
                self._returns_ids = False
                log.warning("%s returns no token ids: its texts are tokenized again, to count their tokens.", self.url)
            token_ids = self.files.tokenizer(choice["text"], add_special_tokens=False).input_ids
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        known = [math.nan if value is None else float(value) for value in logprobs]
        return {
            "token_ids": np.array(token_ids, np.int64),
            "logprobs": np.array(known if len(known) == len(token_ids) else [math.nan] * len(token_ids), np.float32),
            "weight_versions": np.zeros(len(token_ids), np.int32),
            "end": None if choice.get("finish_reason") == "length" else "stop",
        }


def make_body(
    model: str | None, prompt: list[int], sampling: Sampling, num_samples: int, returns_ids: bool
) -> dict[str, object]:
    """Return the body of a request; fields that only vLLM has are left out if they have their default values."""
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "n": num_samples,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 1,
    }
    optional = {
        "stop": list(sampling.stop),
        "seed": None if sampling.seed is None else sampling.seed % 2**31,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "return_token_ids": returns_ids,
    }
    return body | {name: value for name, value in optional.items() if value}
