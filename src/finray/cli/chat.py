"""``finray chat``: a conversation with a trained model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from finray.cli import show
from finray.cli.options import takes
from finray.config.environment import limit_spinning
from finray.config.requests import ConversationRequest
from finray.errors import ConfigError, FinrayError
from finray.runtime import signals

if TYPE_CHECKING:
    from finray.evaluation.chat import Conversation

_HELP = """\
/base          the base model answers, without the adapter
/tuned         the trained model answers
/system TEXT   another system message, and a new conversation; without TEXT that of the training
/reset         a new conversation
/quit          leave; so do Ctrl-D, and Ctrl-C where nothing is being answered"""
_PROMPT = "> "


@takes(ConversationRequest)
def chat(
    model: Annotated[str, typer.Argument(help="Run, checkpoint or model directory, or a Hub id.", show_default=False)],
    request: ConversationRequest,
) -> None:
    """Talk with a trained model in the terminal; /help lists the words for it."""
    show.trust(model, request.trust_run)
    limit_spinning()
    from finray.config.schema import ModelConfig
    from finray.evaluation.artifacts import artifact_of
    from finray.evaluation.chat import Conversation, require_template
    from finray.evaluation.engines import Sampling, make_engine
    from finray.evaluation.generate import Asking
    from finray.pretrained.tokenizers import load_tokenizer

    if show.mode().json:
        raise ConfigError(
            "a conversation cannot be printed as JSON", where="--json", repair="use `finray generate --json`"
        )
    sampling = Sampling.of(request, request.max_new_tokens)
    artifact = artifact_of(model, base=request.base)
    asking = Asking.of(artifact, load_tokenizer(ModelConfig(name=str(artifact.folder))))
    require_template(asking)
    with closing(make_engine(request.engine, artifact, batch_size=1, notify=show.note)) as running:
        conversation = Conversation(running, asking, sampling, system=request.system)
        show.remark(f"{model}{f' on {artifact.model.name}' if artifact.is_adapter else ''} answers; /help, /quit")
        while (line := _read()) is not None:
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                break
            if word == "/reset":
                conversation.reset()
                show.note("new conversation")
            elif word == "/system":
                conversation.system = rest.strip() or None
                conversation.reset()
                show.note("new conversation with that system message" if rest.strip() else "a new conversation")
            elif word in ("/base", "/tuned") and artifact.is_adapter:
                conversation.adapter = word == "/tuned"
                show.note(f"the {word[1:]} model answers")
            elif word in ("/base", "/tuned"):
                show.note("this is a full model, not an adapter: it has no base model")
            elif word.startswith("/") and word[1:].isalpha():
                show.note(_HELP if word == "/help" else f"unknown command {word}\n{_HELP}")
            elif word:
                _answer(conversation, line.strip())


def _answer(conversation: Conversation, text: str) -> None:
    notes = []
    try:
        notes = conversation.say(text, show.write)
    except KeyboardInterrupt as error:
        # SIGTERM ends the command.
        if not signals.is_ctrl_c(error):
            raise
        notes = ["stopped"]
    except FinrayError as error:
        notes = [str(error)]
    show.write("\n")
    for note in notes:
        show.note(note)


def _read() -> str | None:
    """The next line that the user types; None at the end of input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with suppress(ImportError):
        import readline  # noqa: F401  # Arrows, and what was typed before.
    try:
        return input(_PROMPT)
    except EOFError:
        show.write("\n")
    except KeyboardInterrupt as error:
        if not signals.is_ctrl_c(error):
            raise
        show.write("\n")
    return None
