"""A conversation with a model: its turns, rendered as they were in training, and answered one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finray.errors import ModelError
from finray.evaluation.engines import Engine, Sampling
from finray.evaluation.generate import Asking, TextStream
from finray.evaluation.prompts import Prompt


def require_template(asking: Asking) -> None:
    """Refuse a model that cannot chat. Raises ModelError: it has no chat template, or was trained without one."""
    if (why := asking.why_no_chat) is not None:
        raise ModelError(
            f"a conversation needs a chat template, but the model {why}",
            where="finray chat",
            repair="`finray generate` answers single prompts",
        )


@dataclass(slots=True)
class Conversation:
    """Turns with a model."""

    engine: Engine  # of the model; the KV cache of earlier turns is reused
    asking: Asking  # how the model is prompted
    sampling: Sampling  # sampling settings
    adapter: bool = True  # whether to apply the adapter; without it the base model answers
    system: str | None = None  # system message; None means that of training
    messages: list[dict[str, Any]] = field(default_factory=list)  # the turns so far
    forgotten: int = 0  # number of turns that the model no longer gets

    def say(self, text: str, write: Callable[[str], None]) -> list[str]:
        """Answer a user's message.

        If too little room is left for an answer, the oldest turns are dropped. An interrupted answer is kept as far as
        it was generated; a message without one is dropped.

        Args:
            text: of the user.
            write: called with each piece of the answer.

        Returns:
            Messages for the user, one line each.

        Raises:
            FinrayError: the message alone is too long, or the template refuses the conversation.
        """
        pieces, notes, before = list[str](), list[str](), self.forgotten

        def keep(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        stream = TextStream(self.engine.tokenizer, self.sampling.stop, keep)
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._fitting()
            if self.forgotten > before:
                turns = sum(message["role"] == "user" for message in self.messages[before : self.forgotten])
                what = "turn was" if turns == 1 else f"{turns} turns were"
                notes.append(f"the conversation is too long for the model: its oldest {what} dropped")
            for answer in self.engine.generate([ids], self.sampling, adapter=self.adapter, on_token=stream.token):
                stream.end(answer.text)
                if answer.finish == "length":
                    notes.append("the answer is cut off (by --max-new-tokens or the model's context length)")
                if not pieces:
                    notes.append("the answer is empty")
        except BaseException:
            if not pieces:
                self.messages.pop()
                self.forgotten = before
            raise
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if not pieces:
            self.messages.append({"role": "assistant", "content": ""})
        return notes

    def reset(self) -> None:
        """Start a new conversation with the same system message."""
        self.messages.clear()
        self.forgotten = 0

    def _fitting(self) -> list[int]:
        """Token ids of the conversation, starting at the first turn that leaves room for an answer."""
        limit = self.engine.max_length
        while True:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            ids = self.asking.ids(Prompt(messages=(*system, *self.messages[self.forgotten :])))
            later = [at for at, turn in enumerate(self.messages) if turn["role"] == "user" and at > self.forgotten]
            # Reserve at most a quarter of the context for the answer.
            if limit is None or not later or len(ids) + min(self.sampling.max_new_tokens, limit // 4) <= limit:
                return ids
            self.forgotten = later[0]
