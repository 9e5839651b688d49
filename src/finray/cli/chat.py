"""``finray chat``: a conversation with a trained model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from finray.cli import show
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


def chat(
    model: Annotated[str, typer.Argument(help="Run, checkpoint or model directory, or a Hub id.", show_default=False)],
    system: Annotated[str | None, typer.Option(help="System message, instead of the one used in training.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: show.Temperature = 0.0,
    top_p: show.TopP = 1.0,
    top_k: show.TopK = 0,
    seed: show.Seed = 0,
    engine: Annotated[str, typer.Option(help="Engine that runs the model: transformers or vllm.")] = "transformers",
    base: show.BaseModel = None,
    trust_run: show.TrustRun = False,
) -> None:
    """Talk with a trained model in the terminal; /help lists the words for it."""
    show.trust(model, trust_run)
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
    sampling = Sampling(max_new_tokens, temperature, top_p, seed, top_k)
    artifact = artifact_of(model, base=base)
    asking = Asking.of(artifact, load_tokenizer(ModelConfig(name=str(artifact.folder))))
    require_template(asking)
    with closing(make_engine(engine, artifact, batch_size=1, notify=show.note)) as running:
        conversation = Conversation(running, asking, sampling, system=system)
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
    """What is typed next; None where that is the end."""
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
