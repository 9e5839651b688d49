"""OpenAI's API: validated requests, and the JSON of responses."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from finray.config.schema import NO_TEXT
from finray.files import first_line
from finray.limits import cut
from finray.serving.batching import TokenLogprob
from finray.serving.errors import ApiError, readable

# Maximum size of a request in bytes. Longer ones are refused before they are read.
MAX_BODY = 2**20
DONE = "data: [DONE]\n\n"
BYTE = re.compile("<0x([0-9A-F]{2})>")
_MODEL = "the name of a model, as text"
_STOPS = "a text, or a list of up to 16 texts, each of 1 to 256 characters"
_TOKENS = "a whole number from 1 to 2147483647"
_SWITCH = "true or false"
_PENALTY = "0, as penalties are not supported"


class Request(BaseModel):
    """A request; unknown fields are refused, so that none is silently ignored.

    The description of a field says what it must be, in the message of a value that does not fit.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(description=_MODEL)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class GenerateRequest(Request):
    """Common fields of requests for answers."""

    n: int | None = Field(None, ge=1, le=64, description="a whole number from 1 to 64")
    temperature: float | None = Field(None, ge=0, le=2, description="0, or a number from 0.001 to 2")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0, and at most 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="a whole number from 0, for all tokens, to 2147483647")
    seed: int | None = Field(None, description="a whole number")
    stop: str | list[str] | None = Field(None, description=_STOPS)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description=_TOKENS)
    stream: bool | None = Field(None, description=_SWITCH)
    stream_options: _Options | None = Field(None, description='an object such as {"include_usage": true}')
    # They would change answers; only the values without effect are accepted.
    frequency_penalty: Literal[0] | float | None = Field(None, ge=0, le=0, description=_PENALTY)
    presence_penalty: Literal[0] | float | None = Field(None, ge=0, le=0, description=_PENALTY)
    logit_bias: dict[str, float] | None = Field(None, max_length=0, description="left out, as biases are not supported")
    # The client's own notes.
    user: str | None = Field(None, description="a text")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    store: bool | None = Field(None, description=_SWITCH)
    service_tier: str | None = Field(None, description="a text")
    safety_identifier: str | None = Field(None, description="a text")
    prompt_cache_key: str | None = Field(None, description="a text")

    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > 16 or not all(stops) or any(len(stop) > 256 for stop in stops):
            raise ApiError(400, f"`stop` must be {_STOPS}", param="stop")
        return stops


class ChatRequest(GenerateRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, description="a list of objects with `role` and `content`")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description=_TOKENS)
    logprobs: bool | None = Field(None, description=_SWITCH)
    top_logprobs: int | None = Field(None, ge=0, le=20, description="a whole number from 0 to 20")
    tools: list[dict[str, Any]] | None = Field(None, description="a list of objects with `type` and `function`")
    tool_choice: Literal["auto", "none"] | None = Field(None, description="auto or none, as calls cannot be forced")
    # As in vLLM: variables of the chat template, as rows of training data have them.
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object")
    parallel_tool_calls: bool | None = Field(None, description=_SWITCH)
    response_format: _Format | None = Field(None, description='{"type": "text"}, as other formats are not supported')

    def top(self) -> int | None:
        """Number of most likely tokens to return; None means no probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerateRequest):
    """The body of `/v1/completions`; a prompt is text or token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        union_mode="left_to_right", description="a text, a list of texts, a list of token ids, or several of those"
    )
    logprobs: int | None = Field(None, ge=0, le=5, description="a whole number from 0 to 5")
    echo: Literal[False] | None = Field(None, description="false, as the prompt cannot be returned")
    suffix: Literal[""] | None = Field(None, description="left out, as text cannot be inserted")
    best_of: Literal[1] | None = Field(None, description="1, as answers are not ranked")

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [text for text in self.prompt if not isinstance(text, int)]


class ClassifyRequest(Request):
    """The body of `/v1/classify`; an input is a text, or a pair of them. A reward model takes a conversation, too."""

    input: str | list[str | tuple[str, str] | list[str]] = Field([], description="a text, or a list of texts and pairs")
    messages: list[dict[str, Any]] | None = Field(None, description="a list of objects with `role` and `content`")
    user: str | None = Field(None, description="a text")

    def texts(self) -> tuple[str, list[Sequence[Any]]]:
        """The name of the field, and one or two texts each, or the conversation.
        Raises ApiError: both fields are there."""
        if self.messages is None:
            inputs = [self.input] if isinstance(self.input, str) else self.input
            return "input", [(text,) if isinstance(text, str) else text for text in inputs]
        if self.input:
            raise ApiError(400, "give either `input` or `messages`", param="messages")
        return "messages", [self.messages]


# vLLM's other names of the fields of a request for scores.
_SCORED = {"text_1": "queries", "data_1": "queries"} | dict.fromkeys(("text_2", "data_2", "items"), "documents")


class ScoreRequest(Request):
    """The body of `/v1/score`: one prompt for all answers, or one for each."""

    queries: str | list[str] = Field(description="a prompt, or a list with one for each of `documents`")
    documents: str | list[str] = Field(description="an answer, or a list of answers")
    user: str | None = Field(None, description="a text")

    @model_validator(mode="before")
    @classmethod
    def _names(cls, raw: Any) -> Any:
        return {_SCORED.get(name, name): value for name, value in raw.items()} if isinstance(raw, dict) else raw

    def texts(self) -> tuple[str, list[Sequence[Any]]]:
        """The name of a field, and prompts with their answers.
        Raises ApiError: there are neither one nor as many prompts as answers."""
        prompts, answers = ([each] if isinstance(each, str) else each for each in (self.queries, self.documents))
        if len(prompts) not in (1, len(answers)):
            message = f"there are {len(prompts)} prompts for {len(answers)} answers; give one, or one for each"
            raise ApiError(400, message, param="queries")
        prompts = prompts * (len(answers) if len(prompts) == 1 else 1)
        return "documents", list(zip(prompts, answers, strict=True))


class AdapterRequest(BaseModel):
    """The body of a POST to `/v1/adapters`; vLLM's field names are accepted, too."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = Field(alias="lora_name", description="the name that clients will use, as text")
    path: str = Field(alias="lora_path", description="the directory of the adapter on the server's machine, as text")


class RemovalRequest(BaseModel):
    """The body of `/v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    lora_name: str = Field(description=_MODEL)


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """Parse a request's body. Raises ApiError: it is not JSON, or does not fit the endpoint."""
    try:
        # What Python or Pydantic alone let pass: other encodings, names that occur twice, NaN, and numbers of any size.
        json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_number, parse_float=_number)
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is not valid JSON: {first['msg']}") from None
        names = [readable(str(part)) for part in first["loc"]]
        if not names:
            raise ApiError(400, "the body must be a JSON object") from None
        if first["type"] == "extra_forbidden":
            message = f"`{'.'.join(names)}` is not supported"
            raise ApiError(400, message, param=names[0], code="unsupported") from None
        # By either of its names.
        field, info = next((name, info) for name, info in kind.model_fields.items() if names[0] in (name, info.alias))
        if first["type"] == "missing" and len(names) == 1:
            raise ApiError(400, f"`{field}` is missing; it must be {info.description}", param=field) from None
        raise ApiError(400, f"`{names[0]}` must be {info.description}", param=names[0]) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not text in UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {first_line(error)}") from None
    except ValueError:
        # Python's limit on digits.
        raise ApiError(400, "the body has a whole number of too many digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(400, f"`{readable(twice)}` occurs twice in an object of the body", param=readable(twice))
    return members


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ApiError(400, f"the body has {cut(text, 40)}, which is not a finite number")
    return number


def event(document: Mapping[str, Any]) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def model_document(
    name: str, source: str, created: int, *, parent: str | None = None, max_length: int | None
) -> dict[str, Any]:
    """A model as listed by `/v1/models`; of its path only the last component."""
    about = {"id": name, "object": "model", "created": created, "owned_by": "finray"}
    return {**about, "root": Path(source).name, "parent": parent, "max_model_len": max_length}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Numbers of prompt and completion tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def chat_logprobs(tokenizer: Any, chosen: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in the format of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, content = token_text(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(content)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*other) for other in each.top]} for each in chosen
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Any, chosen: Sequence[TokenLogprob], at: int = 0) -> dict[str, Any]:
    """Log-probabilities in the format of a completion choice; ``at`` is the text offset of the first token."""
    texts = [token_text(tokenizer, each.token) for each in chosen]
    lengths = [len(content.decode(errors="replace")) for _, content in texts]
    if at == 0 and chosen:
        # The text begins without the space that a decoder takes from it.
        lengths[0] = len(tokenizer.decode([chosen[0].token]))
    return {
        "tokens": [text for text, _ in texts],
        "token_logprobs": [each.logprob for each in chosen],
        "top_logprobs": [{token_text(tokenizer, token)[0]: logprob for token, logprob in each.top} for each in chosen],
        "text_offset": list(accumulate(lengths, initial=at))[:-1],
    }


def token_text(tokenizer: Any, token: int) -> tuple[str, bytes]:
    """Text and bytes of a token. As in OpenAI's API, the text of part of a character is ``bytes:`` and its bytes."""
    text = str(tokenizer.decode([token]))
    if "\ufffd" not in text:
        # Decoders like Llama 2's take a space from the beginning of a text, so the token is put behind itself.
        text = str(tokenizer.decode([token, token]))[len(text) :]
    content = text.encode(errors="replace")
    if "\ufffd" in text:
        # Vocabularies of bytes write them as characters; SentencePiece, where it falls back to them, as `<0xE2>`.
        raw = str(tokenizer.convert_ids_to_tokens(token))
        if (number := BYTE.fullmatch(raw)) is not None:
            content = bytes.fromhex(number[1])
        elif set(raw) <= (byte_of := _byte_of()).keys():
            content = bytes(byte_of[character] for character in raw)
        if "\ufffd" in content.decode(errors="replace") and content != text.encode():
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
    return text, content


@cache
def _byte_of() -> dict[str, int]:
    """The byte of each character of a vocabulary of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def require_text(value: Any, param: str) -> None:
    """Refuse invalid characters (half of a surrogate pair) anywhere in a request. Raises ApiError: there is one."""
    if isinstance(value, str):
        if (odd := NO_TEXT.search(value)) is not None:
            raise ApiError(400, f"U+{ord(odd[0]):04X} is not a valid character; remove it", param=param)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            require_text(item, param)
    elif isinstance(value, list):
        for item in value:
            require_text(item, param)
