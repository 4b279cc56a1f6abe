"""From a checked request to an answer, whole or streamed: the same way for completions and chats."""

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import Response

from hisparse.errors import NeverFitsError
from hisparse.server.connection import EventStream, read_body, while_connected
from hisparse.server.engine_loop import EngineLoop
from hisparse.server.errors import TOO_LONG, ApiError, as_api_error
from hisparse.server.generation import Answers, Job
from hisparse.server.logprobs import LogprobWriter
from hisparse.server.prompts import PromptReader
from hisparse.server.protocol import ChatRequest, CompletionRequest, GenerateRequest, parse
from hisparse.server.replies import ChatForm, CompletionForm, Form, Text, Usage

BODY_BYTES, BYTES_A_TOKEN = 1 << 20, 64  # what a body may have, and more for each token that can be read at once


class Call(NamedTuple):
    """A request whose prompts are tokens."""

    asked: GenerateRequest
    prompts: Sequence[list[int]]
    form: Form

    @property
    def num_choices(self) -> int:
        """Texts of each prompt."""
        return self.asked.n or 1


class Endpoints:
    """Answers requests.

    Args:
        loop: generates.
        reader: tokenizes.
        model_name: the one model that there is.
        max_context: positions of the longest request, prompt and answer, that the cache can hold.
    """

    def __init__(self, loop: EngineLoop, reader: PromptReader, model_name: str, max_context: int) -> None:
        self.loop, self.reader, self.model_name = loop, reader, model_name
        self._writer = LogprobWriter(loop.engine.tokenizer)
        self.max_context = max_context

    async def complete(self, request: Request) -> Response:
        """Answer /v1/completions."""
        asked = parse(CompletionRequest, await self._body(request))
        self._check(asked, len(asked.prompt))
        prompts = await while_connected(request.receive, self._read_all(asked.prompt))
        return await self._answer(request, Call(asked, prompts, CompletionForm(self.model_name, self._writer)))

    async def chat(self, request: Request) -> Response:
        """Answer /v1/chat/completions."""
        asked = parse(ChatRequest, await self._body(request))
        self._check(asked, 1)
        prompt = await while_connected(request.receive, self.reader.read_chat(asked.messages))
        return await self._answer(request, Call(asked, [prompt], ChatForm(self.model_name, self._writer)))

    async def _body(self, request: Request) -> bytes:
        self.loop.check_open()  # before work is put into what would be refused
        return await read_body(request, BODY_BYTES + BYTES_A_TOKEN * self.max_context * self.loop.max_unfinished)

    async def _read_all(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [await self.reader.read(prompt) for prompt in prompts]

    def _check(self, asked: GenerateRequest, num_prompts: int) -> None:
        if asked.model not in (None, self.model_name):
            raise ApiError(
                f"the model {asked.model!r} is not here: this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        try:
            self.loop.check_open(num_prompts * (asked.n or 1))
        except ValueError as error:
            raise ApiError(str(error)) from error

    async def _answer(self, request: Request, call: Call) -> Response:
        if not call.asked.stream:
            reply = await while_connected(request.receive, self._whole(call))
            return Response(reply, media_type="application/json")
        answers = await self._submit(call)
        return EventStream(_events(call, answers), on_end=answers.cancel)

    async def _submit(self, call: Call) -> Answers:
        jobs = [
            Job(prompt, call.asked.sampling(choice, room=self._room_after(prompt)), call.asked.priority or 0)
            for prompt in call.prompts
            for choice in range(call.num_choices)
        ]
        try:
            return await self.loop.submit(jobs, at_once=not call.asked.stream)
        except NeverFitsError as error:
            raise ApiError(str(error), code=TOO_LONG) from error
        except ValueError as error:
            raise ApiError(str(error)) from error

    def _room_after(self, prompt: Sequence[int]) -> int:
        """Tokens that an answer can have. Raises `ApiError` if there are none."""
        too_many = len(prompt) + 1 - self.max_context
        if too_many > 0:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens, this server's context is {self.max_context}, and the answer "
                f"needs room: shorten it by at least {too_many} tokens",
                code=TOO_LONG,
            )
        return self.max_context - len(prompt)

    async def _whole(self, call: Call) -> str:
        answers = await self._submit(call)
        weighed = call.asked.num_logprobs is not None
        texts = [Text([] if weighed else None) for _ in answers.generations]
        async for piece in answers.pieces():
            texts[piece.job].add(piece)
        return call.form.whole(texts, _usage(call, [text.num_tokens for text in texts])).to_json()


async def _events(call: Call, answers: Answers) -> AsyncGenerator[str, None]:
    """The data of every event of a stream; an error that comes too late for a status is an event as well."""
    counts = [0] * len(answers.generations)
    for reply in call.form.begin(len(counts)):
        yield reply.to_json()
    try:
        async with aclosing(answers.pieces()) as pieces:
            async for piece in pieces:
                counts[piece.job] = piece.num_tokens
                yield call.form.chunk(piece).to_json()
    except Exception as error:
        logging.getLogger(__name__).warning("a stream ended early: %s", error)
        yield json.dumps(as_api_error(error).body())
        return
    if call.asked.include_usage:
        yield call.form.end(_usage(call, counts)).to_json()


def _usage(call: Call, counts: Sequence[int]) -> Usage:
    """A prompt counts once, however many texts it gets."""
    prompt, completion = sum(len(prompt) for prompt in call.prompts), sum(counts)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
