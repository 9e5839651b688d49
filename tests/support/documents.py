"""The shell blocks of README.md, docs/guide and other pages with commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
PAGES.append(ROOT / "examples" / "jobs" / "README.md")
FENCED = re.compile(r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```[ ]*$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->\n\s*$")
SHELLS = ("", "shell", "bash", "sh", "console")
# A page that shows a file whole begins it with a comment that names it.
FILE = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Files that the page "Coming from another system" speaks of: a config of LLaMA-Factory, and its list of data.
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOREIGN = {
    "their-file.yaml": f"""\
model_name_or_path: {MODEL}
stage: sft
finetuning_type: lora
lora_rank: 8
dataset: mine
cutoff_len: 512
output_dir: runs/theirs
per_device_train_batch_size: 2
""",
    "data/dataset_info.json": """\
{"mine": {"file_name": "train.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
          "tags": {"role_tag": "role", "content_tag": "content"}}}
""",
}
COMMAND = re.compile(r"^\s*(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:finray|make|python3?|pip) .*)$")


def name_of(page: Path) -> str:
    """A page, as a name of one word: two are called README.md."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts)


@dataclass(frozen=True)
class Block:
    """The commands of one fenced block, comments and all.

    Attributes:
        page: file name of the page.
        line: where the block begins.
        needs: what it needs that a test has not: the names in an HTML comment just above it, `gpu`, `network`, `hosts`.
    """

    page: str
    line: int
    needs: frozenset[str]
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that hold commands; a backslash continues a line, and other lines are output."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fenced in FENCED.finditer(text):
        lines = fenced[2].replace("\\\n", " ").splitlines()
        commands = tuple(match[1] for line in lines if (match := COMMAND.match(line)))
        if fenced[1] in SHELLS and commands:
            before = text[: fenced.start()]
            needs = NEEDS.search(before)
            names = re.split(r"[ ,]+", needs[1]) if needs else ()
            found.append(Block(page.name, before.count("\n") + 1, frozenset(names), commands))
    return found
