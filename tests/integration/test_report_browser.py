"""The page that `finray report` writes, opened in headless Chromium: drawn, operated, read by axe-core, and large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from finray.records import Note
from tests.support.browser import PATIENCE, contrast, opened, require_sound, violations
from tests.support.recorded import answers, machine, prediction, write_evaluation, write_large, write_run
from tests.support.runs import finray

pytestmark = pytest.mark.nightly

EVIL = "<script>document.title = 'stolen'</script><img src=x onerror=\"document.title = 'stolen'\">"


def report(*runs: Path, output: Path) -> Path:
    code, _, err = finray("report", *runs, "--output", output)
    assert code == 0, err
    return output


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with all that a page shows, and its page."""
    folder = tmp_path_factory.mktemp("one")
    samples = [machine(step) for step in range(1, 41, 2)]
    notes = [Note("look here", 12, "warning")]
    run = write_run(folder / "mine", starts=[(0, 2), (20, 4)], notes=notes, samples=samples)
    rows = answers(33)
    long = {"base": "one line of many\n" * 60, "tuned": "tuned says 2"}
    rows[2] = prediction(2, base=0, tuned=1, answers=long)
    rows[4] = prediction(4, base=0, tuned=1, prompt=EVIL, reference=EVIL, answers={"base": EVIL, "tuned": EVIL})
    write_evaluation(run, rows, confusion=True)
    return run, report(run, output=folder / "page.html")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three runs: one whole, one with another config, one that was cut off."""
    folder = tmp_path_factory.mktemp("several")
    first = write_run(folder / "first")
    second = write_run(folder / "second", steps=25, shift=0.3, config={"train": {"learning_rate": 0.02}})
    third = write_run(folder / "third", steps=5, finished=False)
    (third / "summary.json").write_text("{")
    write_evaluation(first, answers(12))
    write_evaluation(second, [prediction(row, base=0, tuned=int(row % 2)) for row in range(12)])
    return report(first, second, third, output=folder / "page.html")


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (768, "light"), (1440, "light")])
def test_pages_fit_ask_for_nothing_and_have_no_serious_fault_of_accessibility(
    browser: Browser, one: tuple[Path, Path], several: Path, scheme: str, width: int
) -> None:
    for path in (one[1], several):
        with opened(browser, path, width=width, scheme=scheme) as found:
            require_sound(found, path, width)


def test_axe_would_see_a_fault(browser: Browser, tmp_path: Path) -> None:
    """The negative control of the test above."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><title>x</title><img src='data:,'><p style='color: #eee'>pale</p><input>")
    with opened(browser, path) as found:
        named = " ".join(violations(found.page))
    assert "html-has-lang" in named
    assert "color-contrast" in named
    assert "image-alt" in named


def test_hostile_text_is_shown_and_not_run(browser: Browser, one: tuple[Path, Path]) -> None:
    with opened(browser, one[1]) as found:
        page = found.page
        page.get_by_label("text").fill("stolen")
        assert page.locator("#answers article").count() == 1
        said = page.locator("#answers article .said").all_inner_texts()
        assert said == [EVIL] * 4
        assert page.locator("img").count() == 0
        assert page.title() == "mine: finray report"
        assert found.console == []


CURVES = """() => Object.fromEntries([...document.querySelectorAll('figure.plot')].map((figure) => {
  const [xs, ys] = figure.plot.data;
  return [figure.querySelector('h3').innerText, [...xs].map((x, at) => [x, ys[at]])];
}))"""
# Of each plot, how many pixels have the colour of its first curve.
DRAWN = """() => [...document.querySelectorAll('figure.plot')].map(({plot}) => {
  const {ctx, bbox} = plot;
  const fill = getComputedStyle(document.documentElement).getPropertyValue('--plot-1').trim();
  const wanted = [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16));
  const {data} = ctx.getImageData(bbox.left, bbox.top, bbox.width, bbox.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (wanted.every((part, channel) => Math.abs(data[at + channel] - part) < 12)) count++;
  }
  return count;
})"""


def test_curves_are_drawn_with_the_numbers_of_the_run(browser: Browser, one: tuple[Path, Path]) -> None:
    run, path = one
    raw = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in raw if record["kind"] == "train"]
    with opened(browser, path) as found:
        shown = found.page.evaluate(CURVES)
        drawn = found.page.evaluate(DRAWN)
    for title, key in (
        ("Loss", "loss"),
        ("Learning rate", "lr"),
        ("Gradient norm", "grad_norm"),
        ("Throughput", "tokens_per_s"),
    ):
        wanted = [[record["step"], record[key]] for record in trained]
        assert [x for x, _ in shown[title]] == [x for x, _ in wanted]
        assert [y for _, y in shown[title]] == [None if y is None else pytest.approx(y, rel=1e-6) for _, y in wanted]
    memory = [record["peak_memory_bytes"] / 2**30 for record in trained]
    assert [y for _, y in shown["Peak memory of rank 0"]] == pytest.approx(memory, rel=1e-6)
    evaluated = [
        [record["step"], pytest.approx(record["eval_loss"], rel=1e-6)] for record in raw if record["kind"] == "eval"
    ]
    assert shown["Eval loss"] == evaluated
    assert [x for x, _ in shown["Power of all GPUs"]] == list(range(1, 41, 2))
    assert {y for _, y in shown["Power of all GPUs"]} == {601}
    assert len(drawn) == len(shown) == 14
    # A curve over the whole width has at least a pixel in most columns.
    assert min(drawn) > 200, drawn


# Of the first score of a model: the ends of its interval and its value, as parts of the width of the scale.
BAR = """(() => {{ const span = document.querySelector('#scores tr[data-model={}] .span');
  const scale = span.getBoundingClientRect(), of = (x) => (x - scale.left) / scale.width;
  const [bar, dot] = [...span.children].map((one) => one.getBoundingClientRect());
  return [of(bar.left), of(bar.right), of((dot.left + dot.right) / 2)]; }})()"""
# Of each part of the time: its share in words, and its width in the bar.
SPENT = """(() => { const boxes = [...document.querySelectorAll('#time .stack i')];
  const whole = document.querySelector('#time .stack').getBoundingClientRect().width;
  return [...document.querySelectorAll('#time .keys > span')].map((one, at) => [
    [...one.childNodes].find((part) => part.nodeType === 3).textContent.trim(),
    [one.querySelector('b').innerText, boxes[at].getBoundingClientRect().width / whole],
  ]); })()"""


def test_numbers_in_words_are_those_of_the_files(browser: Browser, one: tuple[Path, Path]) -> None:
    run, path = one
    scores = json.loads((run / "evaluation" / "metrics.json").read_text())["models"]
    with opened(browser, path) as found:
        page = found.page
        cells = {
            model: page.locator(f"#scores tr[data-model={model}] td b:not(.span b)").all_inner_texts()
            for model in scores
        }
        ends = {
            model: page.locator(f"#scores tr[data-model={model}] td:not(.name) .ends").all_inner_texts()
            for model in scores
        }
        bars = {model: page.evaluate(BAR.format(model)) for model in scores}
        facts = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('header dl.facts div')]"
            ".map(one => [...one.children].map(part => part.innerText)))"
        )
        spent = dict(page.evaluate(SPENT))
        table = "[...document.querySelectorAll('{} tr')].map(r => [...r.querySelectorAll('{}')].map(c => c.innerText))"
        confusion = page.evaluate(table.format("#confusion tbody", "td"))
        starts = page.evaluate(table.format("#starts tbody", "[data-key]"))
        text = page.inner_text("#findings")
    for model, own in scores.items():
        value = own["exact_match"]["value"]
        assert cells[model] == [f"{100 * value:.1f}%", f"{own['loss']['value']:.4g}", f"{own['perplexity']:.4g}"]
        low, high = own["exact_match"]["low"], own["exact_match"]["high"]
        assert ends[model] == [
            f"{100 * low:.1f}% to {100 * high:.1f}%",
            f"{own['loss']['low']:.4g} to {own['loss']['high']:.4g}",
        ]
        # The scale of a share is all of it: where the bar begins and ends, and where the dot is.
        assert bars[model] == pytest.approx([low, high, value], abs=0.02)
    assert facts == {
        **{"Model": "models/tiny", "Data": "rows.jsonl", "Method": "lora of rank 4", "Workers": "4 × CPU, fp32"},
        **{"Trained": "0.01 M of 1.0 M parameters", "Rows": "100, 10 more held out", "Batch": "4 packs per step"},
    }
    phases = json.loads((run / "summary.json").read_text())["summary"]["phases"]
    for name, label in (("evaluate", "evaluation"), ("start_ray", "starting Ray"), ("data_wait", "waiting for data")):
        share, width = spent[label]
        assert width == pytest.approx(phases[name] / phases["total"], abs=0.01)
        assert float(share.rstrip("%")) == pytest.approx(100 * phases[name] / phases["total"], abs=0.06)
    assert sum(width for _, width in spent.values()) == pytest.approx(1, abs=0.01)
    assert confusion == [["8", "1", "0"], ["2", "9", "1"], ["0", "0", "4"]]
    assert starts == [["0", "2 × CPU"], ["20", "4 × CPU"]]
    assert "step 12: look here" in text


def test_a_restart_is_marked_on_the_curves(browser: Browser, one: tuple[Path, Path], several: Path) -> None:
    marked = """() => { const {plot} = document.querySelector('figure.plot'); const {ctx, bbox} = plot;
      const x = Math.round(plot.valToPos(20, 'x', true));
      const fill = getComputedStyle(document.documentElement).getPropertyValue('--limit').trim();
      const wanted = [1, 3, 5].map((at) => parseInt(fill.slice(at, at + 2), 16));
      const {data} = ctx.getImageData(x - 1, bbox.top, 3, bbox.height); let count = 0;
      for (let at = 0; at < data.length; at += 4)
        if (wanted.every((part, channel) => Math.abs(data[at + channel] - part) < 12)) count++;
      return count; }"""
    with opened(browser, one[1]) as found:
        assert found.page.evaluate(marked) > 40
    with opened(browser, several) as found:
        assert found.page.evaluate(marked) == 0


def test_curves_are_hovered_and_zoomed_together(browser: Browser, one: tuple[Path, Path]) -> None:
    run, path = one
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = next(record["loss"] for record in losses if record["kind"] == "train" and record["step"] == 30)
    scales = "[...document.querySelectorAll('figure.plot')].map(f => [f.plot.scales.x.min, f.plot.scales.x.max])"
    with opened(browser, path) as found:
        page = found.page
        page.locator("figure.plot").first.scroll_into_view_if_needed()
        box = page.locator(".u-over").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * (30 - 1) / 39, box["y"] + 60)
        values = page.locator("figure.plot").first.locator(".u-value").all_inner_texts()
        assert values[0] == "30"
        assert float(values[1]) == pytest.approx(loss, rel=1e-3)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"], box["y"] + 80, steps=4)
        page.mouse.up()
        for low, high in page.evaluate(scales):
            assert low == pytest.approx(30, abs=0.6)
            assert high == pytest.approx(40, abs=0.6)


def counts(page: Page) -> dict[str, int]:
    kinds = ("all", "win", "loss", "same")
    return {kind: int(page.inner_text(f"#answers [data-count={kind}]").replace(",", "")) for kind in kinds}


def test_answers_are_filtered_and_paged_through(browser: Browser, one: tuple[Path, Path]) -> None:
    run, path = one
    rows = [json.loads(line) for line in (run / "evaluation" / "predictions.jsonl").read_text().splitlines()]
    apart = [one["scores"]["tuned"]["exact_match"] - one["scores"]["base"]["exact_match"] for one in rows]
    with opened(browser, path) as found:
        page = found.page
        wanted = {"all": 33, "win": apart.count(1), "loss": apart.count(-1), "same": apart.count(0)}
        assert min(wanted.values()) > 0
        assert counts(page) == wanted
        names = page.locator("#answers article h3")
        seen = names.all_inner_texts()
        while page.get_by_role("button", name="Next").is_enabled():
            page.get_by_role("button", name="Next").click()
            seen += names.all_inner_texts()
        assert seen == [one["where"] for one in rows]
        page.get_by_role("radio", name="losses").check()
        lost = [one["where"] for one, by in zip(rows, apart, strict=True) if by < 0]
        assert names.all_inner_texts() == lost[:5]
        assert page.inner_text("#answers [data-part=status]") == f"1 to {len(lost)} of {len(lost)} rows"
        # From the keyboard: the next choice of the group.
        page.get_by_role("radio", name="losses").press("ArrowRight")
        assert page.get_by_role("radio", name="same").is_checked()
        page.get_by_role("radio", name="all").check()
        page.get_by_label("text").fill("tuned SAYS 17")
        assert names.all_inner_texts() == ["eval.jsonl:18"]
        assert counts(page)["all"] == 1
        page.get_by_label("text").fill("nothing has this")
        assert page.inner_text("#answers [data-part=status]") == "no rows"


def test_models_of_two_runs_are_put_side_by_side(browser: Browser, several: Path) -> None:
    with opened(browser, several) as found:
        page = found.page
        assert page.locator("[data-part=left] option").all_inner_texts() == [
            *("first: base", "first: tuned", "second: base", "second: tuned")
        ]
        page.get_by_label("first model").select_option("first: tuned")
        page.get_by_label("second model").select_option("second: tuned")
        # Rows 0 to 11: the first is right but where 15 divides, the second where the row is odd.
        assert counts(page) == {"all": 12, "win": 0, "loss": 5, "same": 7}
        assert page.locator("#answers article").first.locator(".said").all_inner_texts()[1:] == [
            *("answer 0", "tuned says 0", "tuned says 0")
        ]
        differing = page.locator("#config tr[data-field='train.learning_rate'] td")
        assert differing.all_inner_texts() == ["train.learning_rate", "0.01", "0.02", "0.01"]
        assert [one.evaluate("cell => cell.classList.contains('differs')") for one in differing.all()] == [
            *(False, False, True, False)
        ]
        assert page.locator("#runs tr[data-run=third] .mark").inner_text() == "stopped"
        assert "summary.json" in page.inner_text("#findings")


@pytest.mark.parametrize(("scheme", "card"), [("light", "ffffff"), ("dark", "181c20")])
def test_every_colour_of_a_curve_can_be_seen(browser: Browser, several: Path, scheme: str, card: str) -> None:
    """Contrast of 3 with the card that it is drawn on (WCAG 2.2, level AA); and no two are the same."""
    style = "getComputedStyle(document.documentElement)"
    values = f"[...Array(24).keys()].map((at) => {style}.getPropertyValue(`--plot-${{at + 1}}`))"
    with opened(browser, several, scheme=scheme) as found:
        colours = [one.strip() for one in found.page.evaluate(values)]
    assert len(set(colours)) == 24
    for colour in colours:
        assert contrast(bytes.fromhex(colour[1:]), bytes.fromhex(card)) >= 3, colour


def test_a_page_responds_before_its_plots_are_drawn(browser: Browser, one: tuple[Path, Path]) -> None:
    """With the page's clock stopped; those in view are drawn first when it goes on."""
    drawn = (
        "[...document.querySelectorAll('figure.plot')].flatMap((one, at) => one.querySelector('canvas') ? [at] : [])"
    )
    watch = """() => { window.order = [];
      [...document.querySelectorAll('figure.plot')].forEach((one, at) =>
        new MutationObserver(() => order.push(at)).observe(one, {attributeFilter: ['aria-busy']})); }"""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.clock.install(time="2029-12-31")
    page.clock.pause_at("2030-01-01")
    page.goto(one[1].resolve().as_uri())
    assert page.evaluate(drawn) == []
    page.get_by_label("text").fill("tuned says 17")
    assert counts(page)["all"] == 1
    # A plot that is asked for something is drawn.
    page.get_by_role("button", name="Zoom in").nth(2).click()
    assert page.evaluate(drawn) == [2]
    page.locator("figure.plot").last.scroll_into_view_if_needed()
    in_view = page.evaluate("""[...document.querySelectorAll('figure.plot')].flatMap((one, at) => {
      const {top, bottom} = one.getBoundingClientRect(); return bottom > 0 && top < innerHeight ? [at] : []; })""")
    assert 0 < len(in_view) < 8
    assert 2 not in in_view
    page.evaluate(watch)
    page.clock.run_for(1000)
    found = page.evaluate("order")
    assert sorted(found) == [0, 1, *range(3, 14)]
    assert sorted(found[: len(in_view)]) == in_view
    # All have the range to which the first one was zoomed.
    ranges = page.evaluate(
        "[...document.querySelectorAll('figure.plot')].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
    )
    assert len({tuple(one) for one in ranges}) == 1
    assert ranges[0][1] - ranges[0][0] < 21
    page.close()


def test_a_curve_is_hidden_by_its_name_from_the_keyboard(browser: Browser, several: Path) -> None:
    shown = "document.querySelector('figure.plot').plot.series.map(one => one.show)"
    with opened(browser, several) as found:
        page = found.page
        name = page.locator("figure.plot").first.locator(".u-legend .u-series").nth(2).locator("th")
        name.focus()
        page.keyboard.press("Enter")
        assert page.evaluate(shown) == [True, True, False, True]
        page.keyboard.press("Enter")
        assert page.evaluate(shown) == [True, True, True, True]


def test_twenty_long_runs_make_a_page_that_can_be_mailed_and_answers(browser: Browser, tmp_path: Path) -> None:
    """How soon it answers is measured by `python benchmarks/run.py pages`."""
    path = report(*write_large(tmp_path), output=tmp_path / "page.html")
    assert path.stat().st_size < 15_000_000
    with opened(browser, path) as found:
        page = found.page
        assert page.evaluate("document.querySelectorAll('figure.plot').length") == 14
        assert counts(page)["all"] == page.evaluate(
            "JSON.parse(document.getElementById('answers-data').textContent).sets[0].rows.length"
        )
        page.get_by_label("text").fill("1: 4000 said")
        page.get_by_role("button", name="Zoom in").first.click()
        low, high = page.evaluate("(({min, max}) => [min, max])(document.querySelector('figure.plot').plot.scales.x)")
        assert high - low <= 5001
        assert found.console == []
