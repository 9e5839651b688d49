"""Models that read images beside text: which part of them is trained, and which stays as it is.

The whole model is loaded, with Transformers' class for images and text, so that its files keep their names and it
answers about images as before. Training runs its text tower alone, and no weight outside of that tower and the head
changes. The tower is found by structure; no list of families is needed.
"""

from __future__ import annotations

from typing import Any

from finray.config.tasks import CAUSAL_LM
from finray.errors import ModelError
from finray.models.saved_layout import without_adapter


def reads_images(config: Any) -> bool:
    """Whether a configuration is of a model for images and text that has a text tower of its own."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as with_images

    return type(config) in with_images and config.get_text_config() is not config


def auto_class_of(config: Any, auto_class: str) -> str:
    """The name of Transformers' class that loads a whole model, where a task asks for this one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as decoders
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as with_images

    if auto_class != CAUSAL_LM.auto_class or type(config) not in with_images:
        return auto_class
    if type(config) not in decoders:
        return "AutoModelForImageTextToText"
    # Somebody may have saved the text part alone, with the configuration of the whole.
    of_text = decoders[type(config)].__name__
    is_text = of_text != with_images[type(config)].__name__ and of_text in (config.architectures or [])
    return auto_class if is_text or not reads_images(config) else "AutoModelForImageTextToText"


def loaded_with(model: Any, auto_class: str) -> str:
    """The name of Transformers' class that loads a model as it is here, where its task asks for this one."""
    return auto_class_of(without_adapter(model).config, auto_class)


def text_tower(model: Any) -> Any:
    """What makes the hidden states of text: of a model that reads images its decoder, of another one its body."""
    inner = without_adapter(model)
    if not _reads_images(inner):
        return getattr(inner, getattr(inner, "base_model_prefix", ""), inner)
    return _chain(inner)[-1]


def text_writer(model: Any) -> Any:
    """The model that makes logits of what :func:`text_tower` returns: mostly all of it. Some hold a whole causal
    language model, and ask for an image themselves."""
    inner = without_adapter(model)
    if not _reads_images(inner):
        return inner
    return next(part for part in reversed(_chain(inner)) if part.get_output_embeddings() is not None)


def _chain(inner: Any) -> list[Any]:
    """A model that reads images, the decoder in it, and what that holds, to the last."""
    models = [inner, inner.get_decoder()]
    while hasattr(last := models[-1], "get_decoder"):
        body = last.get_decoder()
        if body is last and last.get_output_embeddings() is not None:
            # The class of Llama 4's text model names a body that it does not have.
            body = getattr(last, "model", last)
        if body is last:
            break
        models.append(body)
    return models


def text_model(model: Any) -> Any:
    """The model whose attention may be replaced: the text tower of one that reads images, else all of it."""
    inner = without_adapter(model)
    return text_tower(inner) if _reads_images(inner) else inner


def other_parts(model: Any) -> list[str]:
    """Names of the largest modules that are neither of the text tower nor the head; none of a model of text alone."""
    inner = without_adapter(model)
    if not _reads_images(inner):
        return []
    kept = {id(module) for module in text_tower(inner).modules()}
    if (head := inner.get_output_embeddings()) is not None:
        kept |= {id(module) for module in head.modules()}
    parts = list[str]()
    for name, module in inner.named_modules():
        inside = any(id(part) in kept for part in module.modules())
        is_part = any(name.startswith(f"{part}.") for part in parts)
        if name and not inside and not is_part and any(True for _ in module.parameters()):
            parts.append(name)
    return parts


def keep_others(model: Any) -> None:
    """Freeze what a Transformers model has beside its text tower and head.
    Raises ModelError: it has no decoder that can be trained alone."""
    if not _reads_images(model):
        return
    text, tower = model.config.get_text_config(), text_tower(model)
    reads = getattr(text, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False)
    is_body = tower is not model and hasattr(tower, "get_decoder") and tower.get_output_embeddings() is None
    if reads or not is_body or model.get_output_embeddings() is None:
        raise ModelError(
            f"the text part of a {model.config.model_type} cannot be trained alone: it is no decoder with a head",
            where=f"model.name={model.config.name_or_path}",
            repair="take a causal language model, or one for images whose language model is a decoder",
        )
    trained = {id(weight) for part in (tower, model.get_output_embeddings()) for weight in part.parameters()}
    for weight in model.parameters():
        if id(weight) not in trained:
            weight.requires_grad_(False)


def _reads_images(model: Any) -> bool:
    # A model of the text part alone may have the configuration of the whole.
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as with_images

    config = getattr(model, "config", None)
    return config is not None and reads_images(config) and isinstance(model, with_images[type(config)])
