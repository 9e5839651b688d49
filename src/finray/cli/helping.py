"""What `--help` adds to the texts of the commands: an example of each, plain values, options in groups."""

from __future__ import annotations

from typing import Any

from finray.compat import hide_range

# Of every command.
EXAMPLES: dict[str, str] = {
    "init": "finray init my-run.yaml --data rows.jsonl",
    "convert": "finray convert their-file.yaml -o my-run.yaml --workers 4",
    "plan": "finray plan my-run.yaml train.max_steps=100 --gpu h100-80gb",
    "inspect": "finray inspect my-run.yaml --html data.html",
    "prepare": "finray prepare my-run.yaml",
    "config show": "finray config show my-run.yaml train.learning_rate=1e-4",
    "config schema": "finray config schema",
    "config docs": "finray config docs",
    "config presets": "finray config presets smollm2-lora",
    "doctor": "finray doctor my-run.yaml --report report.md",
    "train": "finray train my-run.yaml run.name=second train.learning_rate=1e-4",
    "watch": "finray watch runs/my-run",
    "runs list": "finray runs list runs",
    "runs compare": "finray runs compare runs/first runs/second",
    "report": "finray report runs/first runs/second -o both.html",
    "sync": "finray sync runs/my-run --to mlflow",
    "evaluate": "finray evaluate runs/my-run --metrics exact_match,rougeL --max-rows 200",
    "generate": "finray generate runs/my-run 'What is LoRA?' --max-new-tokens 200",
    "chat": "finray chat runs/my-run --temperature 0.7",
    "serve": "finray serve runs/my-run --port 8000",
    "export": "finray export runs/my-run -o my-model",
    "push": "finray push runs/my-run --to me/my-model",
    "pull": "finray pull me/my-model -o runs/my-run",
    "cluster up": "finray cluster up",
    "cluster join": "finray cluster join 10.0.0.1:6379",
    "cluster status": "finray cluster status",
    "cluster down": "finray cluster down",
    "submit": "finray submit my-run.yaml --env HF_TOKEN --detach",
    "jobs list": "finray jobs list",
    "jobs logs": "finray jobs logs JOB --follow",
    "jobs stop": "finray jobs stop JOB",
    "jobspec": "finray jobspec my-run.yaml --to slurm --nodes 2 --gpus-per-node 8 -o job.sh",
    "cache list": "finray cache list my-run.yaml",
    "cache verify": "finray cache verify my-run.yaml",
    "cache prune": "finray cache prune my-run.yaml --older-than-days 30",
    "import-gguf": "finray import-gguf model.gguf my-model",
    "version": "finray version",
}
_COMMON = "Output and progress"
# Options that stand together, by their names.
_PANELS: dict[str, tuple[str, ...]] = {
    "Sampling": ("temperature", "top_p", "top_k", "seed", "stop", "repetition_penalty", "max_new_tokens"),
    "Engine": ("engine", "merge", "batch_size", "replicas", "slots", "max_queue", "max_length", "grace"),
    "Machines": (
        *("nodes", "gpus_per_node", "cpus_per_node", "memory_gb", "min_nodes", "max_nodes", "gpu_type", "image"),
        *("shared", "claim", "storage", "queue", "hours", "secrets", "hosts", "user"),
    ),
    "What is evaluated": ("split", "file", "baselines", "metrics", "max_rows", "harness"),
    _COMMON: ("as_json", "quiet", "verbose"),
}


def explain(command: Any, name: str) -> None:
    """Give a command, or each of a group, its example, and its options words for their values and their groups."""
    if hasattr(command, "commands"):
        for member, subcommand in command.commands.items():
            explain(subcommand, f"{name} {member}")
        return
    if name in EXAMPLES:
        command.epilog = f"Example: {EXAMPLES[name]}"
    for option in command.params:
        if option.param_type_name == "option" and option.metavar is None and not getattr(option, "is_flag", False):
            # `<int range> [0<=x<=9223372036854775807]` helps nobody: the help says what a number is.
            hide_range(option)
            kind = str(option.type_descriptor.annotation)
            words = (("int", "N"), ("float", "NUMBER"), ("Path", "PATH"), ("str", "TEXT"))
            option.metavar = next((word for part, word in words if part in kind), None)
        if option.param_type_name == "option":
            option.rich_help_panel = next((panel for panel, names in _PANELS.items() if option.name in names), None)
