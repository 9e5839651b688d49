"""A peer: LoRA fine-tuning with PEFT and Accelerate's FSDP2, in several processes over Gloo.

The rows of a step are dealt out to the ranks in turn, so that the caller can give the ranks rows of similar length.
Weights are stored and gathered in bf16, adapters are fp32 and their gradients are summed in fp32; no checkpointing. The
loss is the sum over the targets of all ranks, divided by their number; each rank's result has its share of it.

Accelerate 1.15 supports FSDP only on accelerators: on a CPU it falls back to DDP, regardless of the plugin. So its
state is set to FSDP here; everything else is Accelerate's own code (`prepare`, `backward`, `clip_grad_norm_`). Gloo
cannot average in a reduction, so FSDP2 is set to sum and the loss is scaled.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 python accelerate_train.py '{"model": "DIR", ...}'
"""

from __future__ import annotations

from functools import partial

import hf
import measuring
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import AutoTokenizer


def make_accelerator(precision: str) -> Accelerator:
    """Accelerate with FSDP2 on a CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    mixed = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    if mixed == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # Both store it, and each copies it from the other when the state is requested again.
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


job: measuring.Job = measuring.job(measuring.Job)
torch.manual_seed(job.seed)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
accelerator = make_accelerator(job.precision)
tokenizer = AutoTokenizer.from_pretrained(job.model)
rows = hf.read_tokens(job.rows, tokenizer, job.max_length)
recorder = hf.Recorder(partial(hf.pad, padding=tokenizer.pad_token_id or 0), rows)
batches = [recorder([rows[number] for number in step[rank::ranks]]) for step in job.steps]
model = hf.trained_model(job)
hf.start_adapter(model, job)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
count = sum(parameter.numel() for parameter in trained)
optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=0.0, fused=True)
model, optimizer = accelerator.prepare(model, optimizer)
for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
model.train()
clock = measuring.Clock()
losses, norms = [], []
clock.begin()
for number, batch in enumerate(batches):
    targets = torch.tensor(float((batch["labels"][:, 1:] != hf.IGNORED).sum()))
    dist.all_reduce(targets)
    loss = model(**batch, num_items_in_batch=targets).loss
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = job.learning_rate * (1 - number / len(batches))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
    norms.append(float(getattr(norm, "full_tensor", lambda norm=norm: norm)()))
    clock.step_done()
settings = {
    "distributed_type": str(accelerator.state.distributed_type),
    "fsdp_version": accelerator.state.fsdp_plugin.fsdp_version,
    "sharded_modules": sum(isinstance(module, FSDPModule) for module in model.modules()),
    "parameters_held": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters()),
    "threads": torch.get_num_threads(),
}
seen = recorder.seen(len(batches))
result = measuring.trained(clock, settings, **seen, losses=losses, norms=norms, trainable_parameters=count)
measuring.emit(result, "torch", "transformers", "peft", "accelerate")
dist.destroy_process_group()
