"""RMS norms as one autograd node: the values, dtypes and gradients of Transformers' own, with less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from finray.models import norms


class Rooted(LlamaRMSNorm):
    """Almost a norm: nothing is added to the mean, but to its root."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.float().pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (hidden_states.float() / (root + self.variance_epsilon)).to(hidden_states.dtype)


@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 7, 3, 24)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma3RMSNorm, GptOssRMSNorm])
def test_a_norm_is_transformers_own_and_so_are_its_gradients(norm: Any, dtype: torch.dtype, shape: Any) -> None:
    torch.manual_seed(0)
    usual = norm(24, eps=1e-3)
    torch.nn.init.normal_(usual.weight, mean=1.5)
    fused = copy.deepcopy(usual)
    assert norms.fuse(torch.nn.ModuleList([fused])) == 1
    x, factors, kept = (0.02 * torch.randn(shape)).to(dtype), torch.randn(shape), dict[int, int]()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[id(saved)] = saved.nbytes
        return saved

    def results(compute: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        x.requires_grad_()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            out = compute(x)
        kept.pop(id(weight), None)
        return [out.detach(), *torch.autograd.grad((out * factors).sum(), (x, weight))]

    weight = usual.weight.detach().double().requires_grad_()
    by = weight + 1 if norm is Gemma3RMSNorm else weight
    exact = results(lambda x: by * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(), x.double(), weight)
    theirs = results(usual, x.clone(), usual.weight)
    ours = results(fused, x.clone(), fused.weight)
    # The normed values, and a number for each row.
    assert sum(kept.values()) == x.nbytes + x.numel() // 24 * (8 if dtype == torch.float64 else 4)
    for its, of_fused, true in zip(theirs, ours, exact, strict=True):
        assert of_fused.dtype == its.dtype
        assert (of_fused - true).abs().max() <= 2 * (its - true).abs().max() + 1e-6 * true.abs().max()


@pytest.mark.parametrize("other", [torch.nn.LayerNorm(24), Qwen3NextRMSNormGated(24), Rooted(24, eps=1e-3)])
def test_what_computes_something_else_is_left_alone(other: torch.nn.Module) -> None:
    assert norms.fuse(torch.nn.ModuleList([other])) == 0
    assert "forward" not in vars(other)
