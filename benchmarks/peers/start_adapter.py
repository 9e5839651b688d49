"""Write an untrained LoRA adapter, initialized by PEFT, for all contenders to start from: the job's `save_start`."""

from __future__ import annotations

import hf
import measuring
import torch

job: measuring.Job = measuring.job(measuring.Job)
torch.manual_seed(job.seed)
hf.start_adapter(hf.trained_model(job), job)
measuring.emit({}, "torch", "peft")
