"""Each optimizer does what its reference does, keeps the state it should, and changes nothing where it must not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.checkpoint.pieces import PieceReader, TensorPiece, file_name, write_pieces
from finray.config.load import build_config
from finray.errors import CheckpointError, ConfigError
from finray.training.optim import sharded
from finray.training.optim.adamw_8bit import pack, unpack
from finray.training.optim.optimizer import Optimizer, torch_optimizer, warnings_of
from tests.support.optimizing import ROLES, SHAPES, gradients, new_parameters, train_config

KINDS = ["adamw", "adamw_8bit", "adafactor", "muon", "bf16-true"]
STEPS = 6
# No defaults of anybody.
BETA1, BETA2, EPSILON = 0.8, 0.97, 1e-2
ADAM = {"adam_beta1": BETA1, "adam_beta2": BETA2, "adam_epsilon": EPSILON}


@pytest.fixture(autouse=True)
def _as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon computes in bf16 on every CPU."""
    monkeypatch.setattr(sharded, "cpu_has_bf16", lambda: True)


def moved(
    kind: str, steps: range, *, start: Callable[[Optimizer], None] = lambda optimizer: None, **extra: Any
) -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
    parameters = new_parameters(kind)
    optimizer = Optimizer(parameters, train_config(kind, **ADAM), roles=ROLES)
    start(optimizer)
    for step in steps:
        push(optimizer, step, **extra)
    return parameters, optimizer


def push(optimizer: Optimizer, step: int, *, bad: float | None = 0.0, poison: bool = False) -> None:
    for name, value in gradients(step).items():
        parameter = optimizer.parameters[name]
        parameter.grad = (value * float("nan") if poison else value).to(parameter.dtype)
    optimizer.step(0.02 / (1 + step), found_inf=None if bad is None else torch.tensor(bad))


def muon_by_torch() -> dict[str, torch.nn.Parameter]:
    parameters = new_parameters()
    hidden = [parameters[name] for name in ("matrix", "wide")]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(
        [
            {"params": [parameters["stack"], parameters["embed"]], "weight_decay": 0.1},
            {"params": [parameters["vector"]], "weight_decay": 0.0},
        ],
        betas=(BETA1, BETA2),
        eps=EPSILON,
    )
    by_torch(parameters, [muon, adam])
    return parameters


def adafactor_by_torch() -> dict[str, torch.nn.Parameter]:
    parameters = new_parameters()
    vector = parameters["vector"]
    rest = [one for one in parameters.values() if one is not vector]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    by_torch(parameters, [torch.optim.Adafactor(groups, lr=0.02)])
    return parameters


def adamw_by_hand() -> dict[str, torch.Tensor]:
    """Loshchilov & Hutter's algorithm 2, in fp64."""
    weights = {name: one.detach().double() for name, one in new_parameters().items()}
    first = {name: torch.zeros_like(one) for name, one in weights.items()}
    second = {name: torch.zeros_like(one) for name, one in weights.items()}
    for step in range(STEPS):
        rate = 0.02 / (1 + step)
        for name, gradient in gradients(step).items():
            g = gradient.double()
            first[name] = BETA1 * first[name] + (1 - BETA1) * g
            second[name] = BETA2 * second[name] + (1 - BETA2) * g * g
            m, v = first[name] / (1 - BETA1 ** (step + 1)), second[name] / (1 - BETA2 ** (step + 1))
            decay = 0.0 if name == "vector" else 0.1
            weights[name] = weights[name] * (1 - rate * decay) - rate * m / (v.sqrt() + EPSILON)
    return weights


def by_torch(parameters: dict[str, torch.nn.Parameter], optimizers: list[Any]) -> None:
    for step in range(STEPS):
        for name, value in gradients(step).items():
            parameters[name].grad = value
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + step)
            optimizer.step()


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    return max(float((left[name].detach().double() - right[name].detach().double()).abs().max()) for name in right)


@pytest.mark.parametrize(
    ("kind", "reference", "tolerance"),
    [
        ("adamw", adamw_by_hand, 1e-6),
        ("muon", muon_by_torch, 1e-6),
        ("adafactor", adafactor_by_torch, 1e-6),
        # A byte holds a value to about 2 %.
        ("adamw_8bit", adamw_by_hand, 3e-3),
    ],
)
@pytest.mark.parametrize("bad", [None, 0.0])
def test_the_weights_are_those_of_the_reference(
    kind: str, reference: Callable[[], dict[str, Any]], tolerance: float, bad: float | None
) -> None:
    found, _ = moved(kind, range(STEPS), bad=bad)
    expected = reference()
    assert largest_difference(found, expected) < tolerance
    # The comparison sees steps that are left out.
    fewer, _ = moved(kind, range(STEPS - 3), bad=bad)
    assert largest_difference(fewer, expected) > 2 * tolerance


def test_muon_on_a_cpu_without_bf16_is_that_of_torch_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, _ = moved("muon", range(STEPS))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        expected = muon_by_torch()
    monkeypatch.setattr(sharded, "cpu_has_bf16", lambda: False)
    found, _ = moved("muon", range(STEPS))
    assert largest_difference(found, expected) < 1e-6
    assert largest_difference(rounded, expected) > 1e-5


@pytest.mark.parametrize(("kind", "reference"), [("muon", muon_by_torch), ("adafactor", adafactor_by_torch)])
@pytest.mark.parametrize("weight", [1.0, 1e-5, 0.0])
@pytest.mark.parametrize("gradient", [1e3, 1.0, 1e-9, 1e-20, 0.0])
def test_numbers_that_are_tiny_or_large_are_treated_as_by_torch(
    kind: str, reference: Callable[[], dict[str, Any]], weight: float, gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and scales have smallest values, which ordinary numbers do not come near."""
    here = sys.modules[__name__]
    start, pushed = new_parameters(), {step: gradients(step) for step in range(STEPS)}

    def smaller(*_: str) -> dict[str, torch.nn.Parameter]:
        return {name: torch.nn.Parameter(one.detach() * weight) for name, one in start.items()}

    monkeypatch.setattr(here, "new_parameters", smaller)
    monkeypatch.setattr(here, "gradients", lambda step: {name: one * gradient for name, one in pushed[step].items()})
    found, _ = moved(kind, range(STEPS))
    for name, expected in reference().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_changes_neither_weights_nor_state(kind: str) -> None:
    parameters, optimizer = moved(kind, range(2))
    weights = {name: one.detach().clone() for name, one in parameters.items()}
    state = copy.deepcopy(optimizer.sharded_state())
    push(optimizer, 2, bad=1.0, poison=True)
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    after = optimizer.sharded_state()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], state[key]) for key in state)
    # Without the flag the same gradients are the end of the weights.
    push(optimizer, 2, bad=0.0, poison=True)
    assert not all(torch.equal(parameters[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_first_step_is_as_if_there_had_been_none(kind: str) -> None:
    parameters, optimizer = moved(kind, range(0))
    before = {name: one.detach().clone() for name, one in parameters.items()}
    push(optimizer, 0, bad=1.0, poison=True)
    assert all(torch.equal(parameters[name], before[name]) for name in before)
    # The rounding of bf16 weights is drawn anew for each update, the bad one included.
    if kind == "bf16-true":
        push(optimizer, 0)
        assert all(bool(one.isfinite().all()) for one in parameters.values())
        return
    push(optimizer, 0)
    undisturbed, _ = moved(kind, range(1))
    assert all(torch.equal(parameters[name], undisturbed[name]) for name in undisturbed)


def written(optimizer: Optimizer, folder: Path) -> PieceReader:
    pieces = [TensorPiece(name, value, 0, tuple(value.shape)) for name, value in optimizer.sharded_state().items()]
    write_pieces(folder / file_name("optimizer", rank=0, world_size=1), pieces)
    return PieceReader(folder, "optimizer", [path.name for path in folder.iterdir()])


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_was_saved_and_restored_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    undisturbed, _ = moved(kind, range(STEPS))
    half, optimizer = moved(kind, range(3))
    reader = written(optimizer, tmp_path)

    def resume(fresh: Optimizer) -> None:
        fresh.load_sharded_state(reader)
        with torch.no_grad():
            for name, one in fresh.parameters.items():
                one.copy_(half[name])

    def forget(fresh: Optimizer) -> None:
        with torch.no_grad():
            for name, one in fresh.parameters.items():
                one.copy_(half[name])

    resumed, _ = moved(kind, range(3, STEPS), start=resume)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in SHAPES)
    forgotten, _ = moved(kind, range(3, STEPS), start=forget)
    assert not any(torch.equal(forgotten[name], undisturbed[name]) for name in SHAPES)


@pytest.mark.parametrize("parts", [2, 5])
def test_moments_of_8_bits_that_were_cut_into_parts_are_taken_up_whole(parts: int, tmp_path: Path) -> None:
    """Each part of the 96 rows of 64 has whole blocks of 256 elements, so bytes and scales are those of one part."""
    _, optimizer = moved("adamw_8bit", range(2))
    state = dict(optimizer.sharded_state())
    each = -(-96 // parts) * 64 // 256
    for number in ("1", "2"):
        # The last part may have fewer blocks than the others.
        scales = torch.zeros(parts * each)
        scales[:24] = state[f"matrix/absmax{number}"].reshape(-1)
        state[f"matrix/absmax{number}"] = scales.reshape(parts, each)
    pieces = [TensorPiece(name, value, 0, tuple(value.shape)) for name, value in state.items()]
    write_pieces(tmp_path / file_name("optimizer", rank=0, world_size=1), pieces)
    resumed = Optimizer(new_parameters(), train_config("adamw_8bit", **ADAM), roles=ROLES)
    resumed.load_sharded_state(PieceReader(tmp_path, "optimizer", [path.name for path in tmp_path.iterdir()]))

    def moment(held: Mapping[str, torch.Tensor], number: str) -> torch.Tensor:
        scales = held[f"matrix/absmax{number}"].reshape(-1)[:24].repeat_interleave(256)
        return held[f"shared/qmap{number}"][held[f"matrix/state{number}"].reshape(-1).long()] * scales

    found, expected = resumed.sharded_state(), optimizer.sharded_state()
    for number in ("1", "2"):
        before, after = moment(expected, number), moment(found, number)
        assert float((after - before).norm() / before.norm()) < 0.01
    assert float(found["matrix/step"]) == 2.0
    for name in ("vector", "embed"):
        assert torch.equal(found[f"{name}/state1"], expected[f"{name}/state1"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_another_optimizer_is_refused(kind: str, tmp_path: Path) -> None:
    other = "muon" if kind != "muon" else "adamw_8bit"
    reader = written(moved(other, range(1))[1], tmp_path)
    with pytest.raises(CheckpointError, match="a different optimizer"):
        Optimizer(new_parameters(), train_config(kind), roles=ROLES).load_sharded_state(reader)


def bytes_per_element(kind: str) -> tuple[float, set[torch.dtype]]:
    _, optimizer = moved(kind, range(1))
    own = {key: value for key, value in optimizer.sharded_state().items() if key.startswith("matrix/")}
    size = sum(value.numel() * value.element_size() for value in own.values())
    return size / 96 / 64, {value.dtype for value in own.values() if value.numel() == 96 * 64}


def test_the_state_is_as_small_as_it_should_be() -> None:
    small, kinds = bytes_per_element("adamw_8bit")
    assert kinds == {torch.uint8}
    assert small == pytest.approx(2 * (1 + 4 / 256), abs=1e-3)
    large, kinds = bytes_per_element("adamw")
    assert kinds == {torch.float32}
    assert large == pytest.approx(8, abs=1e-3)
    assert bytes_per_element("muon")[0] == pytest.approx(4, abs=1e-3)
    assert bytes_per_element("adafactor")[0] < 0.2


def test_bytes_are_unpacked_and_packed_again() -> None:
    _, optimizer = moved("adamw_8bit", range(1))
    shared = optimizer.sharded_state()
    for number in ("1", "2"):
        quantization = shared[f"shared/qmap{number}"]
        values = torch.randn(7, 130, generator=torch.Generator().manual_seed(2))
        values = values if number == "1" else values.abs()
        packed, scales = pack(values, quantization)
        assert packed.dtype == torch.uint8
        assert scales.shape == (4,)
        again = unpack(packed, scales, quantization)
        # Steps of a byte are at most 1/64 of the largest value of the block.
        assert float((again - values).abs().max()) < float(scales.max()) / 64
        # What is in the map already is found again, and so is about the scale, whose byte may stand for less than one.
        assert torch.equal(pack(again, quantization, scales)[0], packed)
        assert torch.allclose(pack(again, quantization)[1], scales, rtol=0.01)


def test_paged_is_said_to_be_unpaged_on_a_cpu() -> None:
    paged = train_config("paged_adamw_8bit")
    assert "no effect with weights in CPU memory" in warnings_of(paged, torch.device("cpu"))[0]
    assert warnings_of(paged, torch.device("cuda")) == []
    assert warnings_of(train_config("adamw_8bit"), torch.device("cpu")) == []
    assert torch_optimizer(new_parameters(), paged).is_paged is False  # type: ignore[attr-defined]
    # Elsewhere it is what was asked for; the meta device stands for a GPU.
    elsewhere = {"weight": torch.nn.Parameter(torch.empty(80, 80, device="meta"))}
    kinds = ("paged_adamw_8bit", "adamw_8bit")
    found = [torch_optimizer(elsewhere, train_config(kind)).is_paged for kind in kinds]  # type: ignore[attr-defined]
    assert found == [True, False]


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_what_flattens_matrices_is_refused(kind: str) -> None:
    def fields(strategy: str) -> dict[str, Any]:
        return {
            "model": {"name": "m"},
            "data": {"source": "rows.jsonl"},
            "train": {"optimizer": kind},
            "parallel": {"strategy": strategy},
        }

    with pytest.raises(ConfigError, match=f"{kind} needs whole matrices"):
        build_config(fields("deepspeed"), source="test")
    build_config(fields("fsdp"), source="test")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_gradients_are_freed_by_an_update_also_by_one_that_is_skipped(kind: str, bad: float) -> None:
    parameters, _ = moved(kind, range(1), bad=bad)
    assert [name for name, one in parameters.items() if one.grad is not None] == []


def test_muon_alone_updates_a_model_of_matrices() -> None:
    """There is nothing that AdamW would update."""
    ours, theirs = (torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) / 10) for _ in range(2))
    optimizer = Optimizer({"matrix": ours}, train_config("muon", **ADAM))
    muon = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradient = torch.linspace(-1, 1 + step, 12).reshape(3, 4)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step(0.02)
        muon.step()
    torch.testing.assert_close(ours, theirs)
    assert set(optimizer.sharded_state()) == {"matrix/momentum_buffer"}
