"""Requests' prompts as tokens that the model knows. Tokenizing takes a while for long prompts, so it happens aside."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hisparse.chat import encode_turns
from hisparse.server.errors import TOO_LONG, ApiError, shown
from hisparse.server.protocol import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_A_TOKEN = 16  # of a text that is looked at first: three times what they are in any language
SAME_ROLES = {"developer": "system"}  # OpenAI's newer name, which chat templates do not know


class PromptReader:
    """Turns prompts into tokens, one at a time, on a thread of its own.

    Args:
        tokenizer: the model's.
        vocab_size: tokens are below this.
        max_context: tokens of the longest prompt that is answered.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hisparse-tokenizer")
        tokenizer.encode("")  # the first call settles the tokenizer's own options, before threads share it

    async def read(self, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens. Raises `ApiError` for a token that the model does not have, or a text of far too many."""
        tokens = await self._aside(prompt) if isinstance(prompt, str) else prompt
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ApiError(
                    f"prompt: tokens must be from 0 to {self._vocab_size - 1}, got {shown(token)}", param="prompt"
                )
        return tokens

    async def read_chat(self, messages: Sequence[Message]) -> list[int]:
        """A chat's tokens in the model's template, ready for the answer."""
        return await self.read(await asyncio.get_running_loop().run_in_executor(self._thread, self._chat, messages))

    async def _aside(self, text: str) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, text)

    def _encode(self, text: str) -> list[int]:
        self._check_length(text)
        return list(self._tokenizer.encode(text))

    def _check_length(self, text: str) -> None:
        """A text that is far too long is not read to its end: others wait for this thread."""
        first = text[: self._max_context * CHARACTERS_A_TOKEN]
        if len(first) == len(text):
            return
        num_tokens = len(self._tokenizer.encode(first))
        if num_tokens > 2 * self._max_context:
            raise ApiError(
                f"the first {len(first)} of {len(text)} characters are {num_tokens} tokens already, and this server's "
                f"context is {self._max_context}: shorten the prompt",
                code=TOO_LONG,
            )

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError("this model has no chat template: use /v1/completions")
        self._check_length("\n".join(one.content for one in messages))
        turns = [{"role": SAME_ROLES.get(one.role, one.role), "content": one.content} for one in messages]
        try:
            return encode_turns(self._tokenizer, turns)
        except Exception as error:  # a template is the model's own program, and says in its own way what it refuses
            raise ApiError(f"the model's chat template refuses these messages: {error}", param="messages") from error
