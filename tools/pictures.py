"""Take the screenshots in docs/guide/images of the pages that finray writes: `make pictures`.

They show the quickstart's run, which `make quickstart` must first have written to `runs/quickstart`, and its data: with
a limit that truncates some rows, and with a template whose generation prompt differs from the training text. Run the
command in the root of the repository.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import FloatRect, Page
from tests.support.browser import chromium, opened

from finray.config.load import build_config
from finray.inspection.inspect import inspect
from finray.inspection.page import page
from finray.reporting.page import write
from finray.reporting.recorded import read_run
from finray.reporting.report import page as report_page

IMAGES = Path("docs/guide/images")
RUN = Path("runs/quickstart")
MODEL = Path(".models/SmolLM2-135M-Instruct")
WIDTH = 1000
MARGIN = 14


def inspection_page(folder: Path, name: str, *, template: str | None = None, **data: Any) -> Path:
    """The page of the quickstart's training rows."""
    model: dict[str, Any] = {"name": str(MODEL)}
    if template is not None:
        model["chat_template"] = str(folder / f"{name}.jinja")
        Path(model["chat_template"]).write_text(template, encoding="utf-8")
    raw = {
        "run": {"output_dir": str(folder)},
        "model": model,
        "data": {"source": "examples/quickstart/train.jsonl", **data},
    }
    file = folder / f"{name}.html"
    write(page(inspect(build_config(raw, source="tools/pictures.py"), examples=1)), file)
    return file


def shoot(page: Page, name: str, top: str, bottom: str | None = None) -> None:
    """Write the area between the top of one element and the bottom of another, at full width, as a PNG."""
    first, last = page.locator(top).first.bounding_box(), page.locator(bottom or top).first.bounding_box()
    assert first is not None
    assert last is not None
    # Boxes are relative to the window, which a click may have scrolled; the screenshot is relative to the page.
    y = max(0, first["y"] + page.evaluate("scrollY") - MARGIN)
    clip = FloatRect(x=0, y=y, width=WIDTH, height=last["y"] + last["height"] - first["y"] + 2 * MARGIN)
    picture = Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True))).convert("RGB")
    picture.quantize(96).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    """Write the screenshots."""
    own = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    opens_reasoning = own.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    assert opens_reasoning != own
    assert (RUN / "evaluation" / "metrics.json").is_file(), "run `make quickstart` first"
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        whole = inspection_page(Path(scratch), "whole", max_length=120, eval_ratio=0.1, test_ratio=0.1)
        refused = inspection_page(Path(scratch), "refused", template=opens_reasoning)
        with opened(browser, whole, width=WIDTH) as found:
            shoot(found.page, "inspect", "header", "#examples")
            shoot(found.page, "inspect-lengths", "#lengths figure")
        report = Path(scratch) / "report.html"
        write(report_page([read_run(RUN)]), report)
        with opened(browser, report, width=WIDTH) as found:
            shoot(found.page, "report", "header", ".curves figure:nth-child(2)")
        with opened(browser, report, width=WIDTH) as found:
            found.page.get_by_role("radio", name="wins").check()
            shoot(found.page, "report-answers", "#answers", "#answers article:nth-child(2)")
        with opened(browser, refused, width=WIDTH) as found:
            shoot(found.page, "inspect-serving", "#serving")


if __name__ == "__main__":
    main()
