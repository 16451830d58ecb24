"""A small client for vLLM's OpenAI interface: streams an answer and times its first token."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer at temperature 0."""

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float  # from sending the request to the first token
    prompt_tokens: int
    hit_tokens: int  # prompt tokens whose KV the engine did not compute


class Client:
    """Talks to one server; a connection for each request."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._host, self._port, self._model = host, port, model

    @contextlib.contextmanager
    def _post(
        self, path: str, body: dict[str, Any]
    ) -> Generator[http.client.HTTPResponse, None, None]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_TIMEOUT_S)
        content = json.dumps({"model": self._model, **body})
        with contextlib.closing(connection):
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    text = response.read().decode(errors="replace")
                    raise RuntimeError(f"{path} answered {response.status}: {text}")
                yield response

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a whole prompt, chat template included, by the server's own tokenizer."""
        body = {"messages": _messages(prompt), "add_generation_prompt": True}
        with self._post("/tokenize", body) as response:
            return int(json.load(response)["count"])

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        body = {
            "messages": _messages(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        token_ids: list[int] = []
        pieces: list[str] = []
        ttft_s = None
        usage: dict[str, Any] = {}
        started = time.perf_counter()
        with self._post("/v1/chat/completions", body) as response:
            for line in response:
                event = line.strip().removeprefix(b"data: ")
                if not event or event == b"[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise RuntimeError(f"the server broke off: {chunk['error']}")
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    # The first event carries only the role; the first token comes after it.
                    if choice.get("token_ids"):
                        if ttft_s is None:
                            ttft_s = time.perf_counter() - started
                        token_ids += choice["token_ids"]
                        pieces.append(choice["delta"].get("content") or "")
        if ttft_s is None:
            raise RuntimeError("the answer held no token")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(pieces),
            token_ids=tuple(token_ids),
            ttft_s=ttft_s,
            prompt_tokens=int(usage["prompt_tokens"]),
            hit_tokens=int(details.get("cached_tokens") or 0),
        )


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]
