"""What is answered, in OpenAI's shapes: one form for completions, one for chats, each whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from hisparse.engine.logprobs import ChosenLogprob
from hisparse.engine.request import FinishReason
from hisparse.server.generation import Piece
from hisparse.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter


class Usage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    """One text of a completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None


class ChatMessage(BaseModel):
    """A model's message."""

    role: str = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One message of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None


class ChunkChoice(BaseModel):
    """A piece of a message."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Reply(BaseModel):
    """An answer, or a chunk of one."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: Sequence[Choice | ChatChoice | ChunkChoice]
    usage: Usage | None = None

    def to_json(self) -> str:
        """Without the usage, where there is none: clients tell by that whether it comes."""
        return self.model_dump_json(exclude={"usage"} if self.usage is None else None)


@dataclass
class Text:
    """A text, piece by piece."""

    logprobs: list[ChosenLogprob] | None  # None: not asked for
    text: str = ""
    num_tokens: int = 0
    finish_reason: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        self.text += piece.text
        self.num_tokens, self.finish_reason = piece.num_tokens, piece.finish_reason
        if self.logprobs is not None:
            self.logprobs += piece.logprobs


class Form(Protocol):
    """How an endpoint writes its answers."""

    def whole(self, texts: Sequence[Text], usage: Usage) -> Reply:
        """Everything at once."""

    def begin(self, num_texts: int) -> list[Reply]:
        """The chunks before any text."""

    def chunk(self, piece: Piece) -> Reply:
        """A piece of one text."""

    def end(self, usage: Usage) -> Reply:
        """The chunk with the usage, after all text."""


class _Form:
    """What both forms have."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, model_name: str, writer: LogprobWriter) -> None:
        self._writer = writer
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
        }

    def end(self, usage: Usage) -> Reply:
        """The chunk with the usage, after all text."""
        return Reply(**self._head, object=self.chunk_object, choices=[], usage=usage)


class CompletionForm(_Form):
    """Answers of /v1/completions."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def whole(self, texts: Sequence[Text], usage: Usage) -> Reply:
        """Everything at once."""
        choices = [self._choice(i, one.text, one.finish_reason, one.logprobs) for i, one in enumerate(texts)]
        return Reply(**self._head, object=self.object, choices=choices, usage=usage)

    def begin(self, num_texts: int) -> list[Reply]:
        """Nothing comes before the text."""
        return []

    def chunk(self, piece: Piece) -> Reply:
        """A piece of one text."""
        choice = self._choice(piece.job, piece.text, piece.finish_reason, piece.logprobs or None)
        return Reply(**self._head, object=self.chunk_object, choices=[choice])

    def _choice(
        self, index: int, text: str, reason: FinishReason | None, tokens: Sequence[ChosenLogprob] | None
    ) -> Choice:
        logprobs = None if tokens is None else self._writer.completion(tokens)
        return Choice(index=index, text=text, logprobs=logprobs, finish_reason=_name(reason))


class ChatForm(_Form):
    """Answers of /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, texts: Sequence[Text], usage: Usage) -> Reply:
        """Everything at once."""
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessage(content=one.text),
                logprobs=None if one.logprobs is None else self._writer.chat(one.logprobs),
                finish_reason=_name(one.finish_reason),
            )
            for i, one in enumerate(texts)
        ]
        return Reply(**self._head, object=self.object, choices=choices, usage=usage)

    def begin(self, num_texts: int) -> list[Reply]:
        """Who speaks."""
        return [self._chunk(ChunkChoice(index=i, delta={"role": "assistant", "content": ""})) for i in range(num_texts)]

    def chunk(self, piece: Piece) -> Reply:
        """A piece of one message."""
        delta = {"content": piece.text} if piece.text else {}
        logprobs = self._writer.chat(piece.logprobs) if piece.logprobs else None
        reason = _name(piece.finish_reason)
        return self._chunk(ChunkChoice(index=piece.job, delta=delta, logprobs=logprobs, finish_reason=reason))

    def _chunk(self, choice: ChunkChoice) -> Reply:
        return Reply(**self._head, object=self.chunk_object, choices=[choice])


def _name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
