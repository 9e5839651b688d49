"""What DeepSpeed's JSON may say beside the YAML, and what it may not: at the border of every rule."""

from __future__ import annotations

from typing import Any

import pytest

from finray.config.resolved import Resolved
from finray.errors import ConfigError
from finray.parallel.deepspeed.config import check, conflicts, filled, stage
from tests.support import runs


def config(given: dict[str, Any] | None, **fields: Any) -> Any:
    train = {"global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16", **fields.pop("train", {})}
    parallel = {"strategy": "deepspeed", "deepspeed_config": given, **fields.pop("parallel", {})}
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "train": train, "parallel": parallel}
    return runs.config_of({**plain, **fields})


def found(given: dict[str, Any], *, precision: str = "bf16", workers: int = 2, **fields: Any) -> list[str]:
    made = config(given, **fields)
    size, rate = made.train.global_batch_size, made.train.learning_rate
    return list(conflicts(given, made, precision=precision, workers=workers, size=size, rate=rate))


DECIDED = Resolved("bf16", None, None, True, "deepspeed", False, learning_rate=0.5)
ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
FP16 = {"precision": "fp16", "train": {"precision": "fp16"}}


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, {}),
        ({"gradient_clipping": 1.0}, {}),
        ({"gradient_clipping": 1}, {}),
        ({"gradient_clipping": 1 + 1e-12}, {}),
        ({"gradient_clipping": 0}, {"train": {"max_grad_norm": None}}),
        ({"train_micro_batch_size_per_gpu": 3}, {"train": {"micro_batch_size": 3}}),
        # Three micro-batches, of which one worker has two.
        ({"gradient_accumulation_steps": 2}, {"train": {"micro_batch_size": 3}}),
        ({"gradient_accumulation_steps": 4, "train_batch_size": 8}, {}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, {}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {"precision": "auto"}),
        ({"zero_optimization": {"stage": "auto"}}, {}),
        *(({"zero_optimization": {"stage": number}}, {}) for number in (1, 2, 3)),
        ({"zero_optimization": {"stage": 3}}, {"parallel": {"zero_stage": 3}}),
        ({"activation_checkpointing": {}}, {}),
        ({"gradient_allreduce_op": "mean"}, {}),
        ({"optimizer": ADAMW}, {}),
        ({"optimizer": {"params": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}}}, {}),
        ({"optimizer": None}, {"train": {"optimizer": "adamw_8bit"}}),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, {}),
        (OFFLOAD, {"parallel": {"cpu_offload": True}}),
        ({"zero_force_ds_cpu_optimizer": True}, {}),
        ({"zero_force_ds_cpu_optimizer": False, **OFFLOAD}, {}),
        ({"zero_force_ds_cpu_optimizer": True, "optimizer": ADAMW, **OFFLOAD}, {}),
        ({"fp16": {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": "auto"}}, FP16),
        ({"fp16": {"loss_scale": "auto", "initial_scale_power": "auto"}}, FP16),
        ({"fp16": {"loss_scale": 128, "fp16_master_weights_and_grads": True}}, {}),
        ({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
        ({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}}, {}),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"precision": "fp32", "train": {"precision": "fp32"}},
        ),
        ({"zero_optimization": {"sub_group_size": "auto"}, "train_batch_size": "auto"}, {}),
        ({"amp": {}, "elasticity": None, "pipeline": False}, {}),
        ({"steps_per_print": 7, "comms_logger": {"verbose": True}}, {}),
    ],
)
def test_what_agrees_is_no_contradiction(given: dict[str, Any], fields: dict[str, Any]) -> None:
    assert found(given, **fields) == []


REFUSED = (
    *("amp", "autotuning", "compression_training", "curriculum_learning", "data_efficiency", "elasticity", "pipeline"),
    *("progressive_layer_drop", "sparse_attention", "tensor_parallel", "torch_autocast"),
)


@pytest.mark.parametrize(
    ("given", "fields", "said"),
    [
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping` is 0.5, `train.max_grad_norm` gives 1.0"),
        ({"gradient_clipping": True}, {}, "gradient_clipping` is true, `train.max_grad_norm` gives 1.0"),
        ({"gradient_clipping": 1 + 1e-8}, {}, "gradient_clipping` is 1.00000001"),
        ({"gradient_clipping": 1.0}, {"train": {"max_grad_norm": None}}, "`train.max_grad_norm` gives 0.0"),
        ({"gradient_accumulation_steps": 3}, {"train": {"micro_batch_size": 3}}, "is 3, `train.global_batch_size / "),
        ({"gradient_accumulation_steps": 8}, {}, "gives 4"),
        ({"gradient_accumulation_steps": 8}, {"train": {"global_batch_size": "auto"}}, 'gives "auto"'),
        ({"train_batch_size": 8}, {"train": {"global_batch_size": "auto"}}, '`train.global_batch_size` gives "auto"'),
        ({"train_batch_size": 16}, {}, "train_batch_size` is 16, `train.global_batch_size` gives 8"),
        ({"train_micro_batch_size_per_gpu": 2}, {}, "`train.micro_batch_size` gives 1"),
        ({"bf16": {"enabled": 1}}, {}, "bf16.enabled` is 1, `train.precision` gives true"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled` is true, `train.precision` gives false"),
        ({"zero_optimization": {"stage": 2}}, {"parallel": {"zero_stage": 3}}, "`parallel.zero_stage` gives 3"),
        ({"zero_optimization": {"stage": 4}}, {}, "zero_optimization.stage` is 4: `parallel.strategy: deepspeed` is"),
        ({"scheduler": {}}, {}, "scheduler` is there, and `train.schedule` decides"),
        ({"scheduler": {"params": {"warmup_num_steps": "auto"}}}, {}, "scheduler` is there"),
        ({"activation_checkpointing": {"a": 1}}, {}, "activation_checkpointing` has no effect"),
        ({"gradient_allreduce_op": "sum"}, {}, "gradient_allreduce_op` must stay the mean"),
        ({"optimizer": {}}, {"train": {"optimizer": "adamw_8bit"}}, "and `train.optimizer: adamw_8bit` each choose"),
        ({"optimizer": {"params": {"lr": 1}}}, {"train": {"learning_rate": 0.5}}, "`train.learning_rate` gives 0.5"),
        ({"optimizer": {"params": {"eps": 1}}}, {"train": {"adam_epsilon": 0.5}}, "`train.adam_epsilon` gives 0.5"),
        (
            {"optimizer": {"params": {"weight_decay": 1}}},
            {"train": {"weight_decay": 0.5}},
            "`train.weight_decay` gives",
        ),
        ({"optimizer": {"params": {"betas": [0.9]}}}, {}, "gives [0.9, 0.999]"),
        ({"optimizer": {"params": {"betas": [0.999, 0.9]}}}, {}, "is [0.999, 0.9], `train.adam_beta1, train.adam_beta"),
        ({"optimizer": {"params": {"betas": "none"}}}, {}, 'is "none", `train.adam_beta1'),
        ({"steps": 1}, {"parallel": {"cpu_offload": True}}, "`parallel.cpu_offload` is true, and `deepspeed_config: z"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "offload_optimizer.device` is nvme"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, "offload_param.device` is nvme"),
        ({"zero_force_ds_cpu_optimizer": True, **OFFLOAD}, {}, "zero_force_ds_cpu_optimizer` asks for DeepSpeed's"),
        ({"fp16": {"loss_scale": 1}}, FP16, "fp16.loss_scale` is 1: "),
        ({"fp16": {"initial_scale_power": 15}}, FP16, "fp16.initial_scale_power` is 15: "),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, FP16, "fp16_master_weights_and_grads` is true"),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            {},
            "data_types.grad_accum_dtype` is fp32: in bf16 that needs `deepspeed_config: zero_optimization.stage` 2 or",
        ),
        (
            {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            FP16,
            "data_types.grad_accum_dtype` is fp32: in fp16 that needs",
        ),
        *(({key: {"enabled": True}}, {}, f"{key}` is nothing that finray can train with") for key in REFUSED),
        ({"comms_logger": {"verbose": "auto"}}, {}, 'comms_logger.verbose` is "auto", and nothing in the YAML says'),
        ({"bf16": {"more": "auto"}}, {}, 'bf16.more` is "auto", and nothing in the YAML says'),
        ({"steps_per_print": "auto"}, {}, 'steps_per_print` is "auto", and nothing in the YAML says'),
    ],
)
def test_a_contradiction_is_one_line_with_both_places(given: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    (problem,) = found(given, **fields)
    assert said in problem
    assert "`deepspeed_config: " in problem


def test_the_parameters_of_an_optimizer_are_filled_in_where_the_json_leaves_them_to_the_yaml() -> None:
    train = {"learning_rate": 0.5, "adam_beta1": 0.25, "adam_beta2": 0.75, "adam_epsilon": 0.125, "weight_decay": 0.375}
    own = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.375, "more": 7}
    given = {"optimizer": {"type": "AdamW", "params": own}}
    settings = filled(config(given, train=train), DECIDED, workers=2, width=10)
    params = {"lr": 0.5, "betas": [0.25, 0.75], "eps": 0.125, "weight_decay": 0.375, "more": 7}
    assert settings["optimizer"] == {"type": "AdamW", "params": params}
    assert given["optimizer"]["params"] is own, "the config stays as it is"
    assert own["lr"] == "auto"


@pytest.mark.parametrize("optimizer", [{"type": "AdamW"}, {"type": "AdamW", "params": {"lr": "auto"}}])
def test_what_the_json_omits_is_taken_from_the_yaml_where_that_is_not_deepspeeds_default(
    optimizer: dict[str, Any],
) -> None:
    """DeepSpeed gets the weight decay and learning rate of each weight, but these two only from its configuration."""

    def params(**train: float) -> dict[str, Any]:
        made = config({"optimizer": optimizer}, train={"learning_rate": 0.5, "weight_decay": 0.375, **train})
        found: dict[str, Any] = filled(made, DECIDED, workers=2, width=10)["optimizer"].get("params", {})
        return found

    usual = {"lr": 0.5} if "params" in optimizer else {}
    assert params() == usual
    assert params(adam_beta2=0.95) == {**usual, "betas": [0.9, 0.95]}
    assert params(adam_epsilon=1e-6) == {**usual, "eps": 1e-6}


def test_the_json_must_hold_for_every_number_of_workers() -> None:
    given = {"gradient_accumulation_steps": 4}
    check(config(given, cluster={"num_workers": 2}))
    with pytest.raises(ConfigError) as caught:
        check(config(given, cluster={"num_workers": {"min": 1, "max": 2}}))
    assert "gives 8" in caught.value.problems[0]
    check(config(given, parallel={"strategy": "ddp", "deepspeed_config": None}, cluster={"num_workers": 1}))


@pytest.mark.parametrize(
    ("given", "zero_stage", "expected"),
    [
        ({}, None, 2),
        ({}, 1, 1),
        ({"zero_optimization": {"stage": 3}}, None, 3),
        ({"zero_optimization": {"stage": "auto"}}, 1, 1),
        ({"zero_optimization": 3}, None, 2),
    ],
)
def test_the_stage_is_that_of_the_json_else_of_the_yaml_else_two(
    given: dict[str, Any], zero_stage: int | None, expected: int
) -> None:
    assert stage(given, config(None, parallel={"zero_stage": zero_stage})) == expected
