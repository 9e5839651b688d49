"""Learning from preferences in a config of LLaMA-Factory or Axolotl: the objective and the section `preference`."""

from __future__ import annotations

from typing import Any

from finray.config import names
from finray.config.convert_file import ForeignFile
from finray.config.foreign import AXOLOTL, LLAMA_FACTORY, PREFERENCE_KEYS
from finray.config.preference import TAKEN, UNSMOOTHED
from finray.limits import cut

# Objectives by the projects' words for methods and losses, with fields that the word says.
_OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "sigmoid": ("dpo", {}),
    "ipo": ("dpo", {"loss": "ipo"}),
    "hinge": ("dpo", {"loss": "hinge"}),
    "robust": ("dpo", {"loss": "robust"}),
    "sigmoid_norm": ("dpo", {"length_normalized": True}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "simpo": ("simpo", {}),
    "rm": ("reward", {}),
    "reward_model": ("reward", {}),
}
# What both assume of the fields that are written out.
_ASSUMED = {"beta": 0.1, "gamma": 0.5}
# Keys about how it is computed, which changes nothing of what is learned.
_NOT_NEEDED = (
    *("precompute_ref_log_probs", "dpo_padding_free", "dpo_use_logits_to_keep", "dpo_use_liger_kernel"),
    *("dpo_generate_during_eval", "num_labels", "pref_loss", "dpo_loss_type", "dpo_loss_weights"),
)


def read_preference(file: ForeignFile) -> None:
    """The objective, if it learns from preferences. Raises ConfigError: finray does not have it."""
    key = next((key for key in ("stage", "rl") if file.get(key) not in (None, False, "sft", "pt")), "")
    key = "reward_model" if not key and file.get("reward_model") else key
    if not key:
        return
    word, others, weights = key if key == "reward_model" else str(file.raw[key]), list[str](), [1.0]
    if word == "dpo" and (given := file.raw.get("pref_loss") or file.raw.get("dpo_loss_type")):
        word, *others = map(str, given if isinstance(given, list) else [given])
        weights = file.raw.get("dpo_loss_weights") or [1.0] * (1 + len(others))
        key = file.key("pref_loss", "dpo_loss_type")
    objective, fields = _OBJECTIVES.get(word, ("", {}))
    if fields.get("loss") == "robust" and not file.get(*PREFERENCE_KEYS["label_smoothing"]):
        # Then TRL computes `sigmoid`.
        fields = {}
    is_sum = isinstance(weights, list) and weights[:1] == [1.0] and len(weights) == 1 + len(others)
    if objective not in TAKEN or others not in ([], ["sft"]) or not is_sum:
        why = names.not_yet(word) or "finray does not know it"
        raise file.refused(key, f"`{key}: {cut(str(file.raw[key]), 80)}` is not supported: {why}", names.HERE_IS)
    file.put("train.objective", objective, key)
    for name, value in fields.items():
        file.put(f"preference.{name}", value, key)
    # TRL adds the chosen answer's own loss to SimPO's, unless it is told otherwise.
    if others or (objective == "simpo" and file.system == AXOLOTL):
        file.put("preference.chosen_weight", weights[-1], file.key("dpo_loss_weights", "cpo_alpha"))
    for name, keys in PREFERENCE_KEYS.items():
        value, key = file.get(*keys), file.key(*keys)
        unsmoothed = name == "label_smoothing" and fields.get("loss") in UNSMOOTHED
        if name in TAKEN[objective] and not unsmoothed:
            if (value := _ASSUMED.get(name) if value is None else value) is not None:
                file.put(f"preference.{name}", value, key)
        elif value:
            where = f"preference.loss: {fields['loss']}" if unsmoothed else f"train.objective: {objective}"
            file.lose(key, f"not supported with `{where}`")
    if file.get("dpo_label_smoothing") and file.system == AXOLOTL and not fields:
        file.notes.append("TRL 1.16 ignores dpo_label_smoothing unless the loss is robust; here it counts")
    # LLaMA-Factory switches the adapter off for it.
    continued = file.system == LLAMA_FACTORY and file.raw.get("adapter_name_or_path")
    if continued and "reference" in TAKEN[objective] and not file.get("ref_model"):
        file.put("preference.reference", "base", "adapter_name_or_path")
    file.used.update(_NOT_NEEDED)
