"""What is answered, in OpenAI's shapes: one form for completions, one for chats, each whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel

from hisparse.engine.request import FinishReason
from hisparse.server.generation import Piece


class Usage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    """One text of a completion, or a piece of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None


class ChatMessage(BaseModel):
    """A model's message."""

    role: str = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One message of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: str | None


class ChunkChoice(BaseModel):
    """A piece of a message."""

    index: int
    delta: dict[str, str]
    logprobs: None = None
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


class Text(NamedTuple):
    """A whole text."""

    text: str
    finish_reason: FinishReason | None


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

    def __init__(self, model_name: str) -> None:
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
        choices = [
            Choice(index=i, text=one.text, finish_reason=_name(one.finish_reason)) for i, one in enumerate(texts)
        ]
        return Reply(**self._head, object=self.object, choices=choices, usage=usage)

    def begin(self, num_texts: int) -> list[Reply]:
        """Nothing comes before the text."""
        return []

    def chunk(self, piece: Piece) -> Reply:
        """A piece of one text."""
        choice = Choice(index=piece.job, text=piece.text, finish_reason=_name(piece.finish_reason))
        return Reply(**self._head, object=self.chunk_object, choices=[choice])


class ChatForm(_Form):
    """Answers of /v1/chat/completions."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, texts: Sequence[Text], usage: Usage) -> Reply:
        """Everything at once."""
        choices = [
            ChatChoice(index=i, message=ChatMessage(content=one.text), finish_reason=_name(one.finish_reason))
            for i, one in enumerate(texts)
        ]
        return Reply(**self._head, object=self.object, choices=choices, usage=usage)

    def begin(self, num_texts: int) -> list[Reply]:
        """Who speaks."""
        return [self._chunk(ChunkChoice(index=i, delta={"role": "assistant", "content": ""})) for i in range(num_texts)]

    def chunk(self, piece: Piece) -> Reply:
        """A piece of one message."""
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk(ChunkChoice(index=piece.job, delta=delta, finish_reason=_name(piece.finish_reason)))

    def _chunk(self, choice: ChunkChoice) -> Reply:
        return Reply(**self._head, object=self.chunk_object, choices=[choice])


def _name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
