"use strict";
/* Draws the JSON of every <figure class="plot"> (see plots.py) with uPlot: drag or press the buttons to zoom, and read
   values off with the pointer or, when a plot has the focus, with the arrow keys. The page is shown before its plots:
   they are drawn one at a time, those in view first, so that a page of many long curves responds meanwhile. */
(() => {
  const plots = [];
  const incrs = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const between = (value, low, high) => Math.min(Math.max(value, low), high);

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e12)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: size < 1 ? 4 : Math.max(5, String(Math.trunc(size)).length) });
  }

  function axis(label, options) {
    const font = "12px " + getComputedStyle(document.body).fontFamily;
    return {
      label, font, labelFont: font, labelSize: 20, stroke: () => colour("--quiet"),
      grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1, size: 4 },
      values: (plot, splits) => splits.map((value) => (value == null ? "" : number(value))),
      ...options,
    };
  }

  /* A bar from each x to the next. One row beside a million must still be seen, so a bar has a least height. */
  function bars(plot, series, first, last) {
    const [xs, counts] = plot.data;
    const path = new Path2D();
    const base = plot.valToPos(0, "y", true);
    for (let at = Math.max(0, first - 1); at <= Math.min(last, xs.length - 2); at++) {
      if (!counts[at]) continue;
      const left = plot.valToPos(xs[at], "x", true), width = plot.valToPos(xs[at + 1], "x", true) - left;
      const top = Math.min(plot.valToPos(counts[at], "y", true), base - 1.5 * devicePixelRatio);
      path.rect(left + 0.06 * width, top, 0.88 * width, base - top);
    }
    return { fill: path, stroke: null };
  }

  /* Vertical lines with their labels; one that would cover another's label has none. */
  function marks(plot, all) {
    const { ctx, bbox } = plot, taken = [];
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.font = `${12 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textBaseline = "top";
    for (const { x: value, label, colour: at } of all) {
      const x = plot.valToPos(value, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width + 1) continue;
      ctx.strokeStyle = ctx.fillStyle = at == null ? colour("--limit") : look(at).stroke();
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const atTheRight = x > bbox.left + bbox.width / 2, width = ctx.measureText(label).width + 12 * devicePixelRatio;
      const [left, right] = atTheRight ? [x - width, x] : [x, x + width];
      if (taken.some(([low, high]) => left < high && low < right)) continue;
      taken.push([left, right]);
      ctx.textAlign = atTheRight ? "right" : "left";
      ctx.fillText(label, x + (atTheRight ? -6 : 6) * devicePixelRatio, bbox.top);
    }
    ctx.restore();
  }

  /* The colour of a number. There are no dashes: those of twenty long curves take a browser seconds to draw. */
  const look = (at) => ({ stroke: () => colour(`--plot-${(at % 24) + 1}`) });

  function options(spec, width) {
    const asBars = spec.kind === "bars";
    const lines = [...(spec.limit ? [{ x: spec.limit[0], label: spec.limit[1] }] : []), ...spec.marks];
    /* The bar under the pointer; of a curve the nearest point, since runs record at different steps. */
    const dataIdx = (plot, series, closest, x) => {
      const values = plot.data[series];
      if (asBars) return between(plot.data[0][closest] > x ? closest - 1 : closest, 0, values.length - 2);
      for (let step = 0; series && step < values.length; step++) {
        if (values[closest - step] != null) return closest - step;
        if (values[closest + step] != null) return closest + step;
      }
      return closest;
    };
    const interval = (x) => (x == null ? "–" : `${number(x + 1)} to ${number(x + spec.series[0].x[1])}`);
    return {
      width, height: 240, focus: { alpha: 0.3 },
      scales: {
        x: { time: false, range: (plot, low, high) => (low < high ? [low, high] : [low - 1, low + 1]) },
        y: asBars ? { range: (plot, low, high) => [0, (spec.limit ? 1.16 : 1.06) * (high || 1)] } : {},
      },
      axes: [
        axis(spec.x_label, { size: 30, incrs: asBars || spec.x_label === "step" ? incrs : undefined }),
        axis(spec.y_label, {
          incrs: asBars ? incrs : undefined,
          size: (plot, labels) => Math.max(52, 18 + 7 * Math.max(...(labels ?? [""]).map((label) => label.length))),
        }),
      ],
      series: [
        { label: spec.x_label, value: (plot, x) => (asBars && spec.series[0].x[1] > 1 ? interval(x) : number(x == null ? x : x + asBars)) },
        ...spec.series.map(({ label }, at) => ({
          label, value: (plot, value) => number(value), width: asBars ? 0 : 1.75,
          ...look(spec.series[at].colour ?? at),
          ...(asBars ? { fill: () => colour("--plot-1"), paths: bars, points: { show: false } } : { points: { show: spec.series[at].x.length < 60, size: 4 } }),
        })),
      ],
      cursor: { dataIdx, points: { show: !asBars }, focus: { prox: 24 }, sync: spec.group ? { key: spec.group } : undefined },
      hooks: lines.length ? { draw: [(plot) => marks(plot, lines)] } : {},
    };
  }

  function show(figure) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const area = document.createElement("div");
    const one = { figure, group: spec.group, ends: [Math.min(...spec.series.map(({ x }) => x[0])), Math.max(...spec.series.map(({ x }) => x.at(-1)))] };
    let data;
    area.className = "area";
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.ariaLabel = `Plot of ${spec.y_label} by ${spec.x_label}. Arrow keys read values, plus and minus zoom, 0 shows all.`;
    figure.append(area);
    figure.ariaBusy = "true";

    const build = () => {
      data ??= uPlot.join(spec.series.map(({ x, y }) => [x, y]));
      /* The range that the user has zoomed to, if any; a plot made in this moment has none yet. */
      const { min, max } = [one, ...together()].map(({ plot }) => plot?.scales.x).find((scale) => scale?.min != null) ?? {};
      one.plot?.destroy();
      figure.plot = one.plot = new uPlot(options(spec, area.clientWidth), data, area);
      if (min == null) all();
      else one.plot.setScale("x", { min, max });
      figure.ariaBusy = null;
      one.plot.root.querySelector(".u-legend").ariaLive = "polite";
      if (spec.series.length < 2) return;
      /* Of several curves each is hidden and shown again by its name, also from the keyboard. */
      one.plot.root.querySelectorAll(".u-legend .u-series").forEach((row, at) => {
        if (!at) return;
        const name = row.querySelector("th");
        name.tabIndex = 0;
        name.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          event.stopPropagation();
          name.click();
        });
        name.title = "Hide or show this curve";
      });
    };
    one.draw = () => one.plot ?? build();
    const together = () => plots.filter((other) => other === one || (one.group && other.group === one.group));
    const zoomTo = (low, high) => together().forEach(({ plot }) => plot?.setScale("x", { min: low, max: high }));
    const all = () => zoomTo(Math.min(...together().map(({ ends }) => ends[0])), Math.max(...together().map(({ ends }) => ends[1])));
    const zoom = (factor) => {
      one.draw();
      const { min, max } = one.plot.scales.x;
      const middle = one.plot.cursor.left >= 0 ? one.plot.posToVal(one.plot.cursor.left, "x") : (min + max) / 2;
      const half = ((max - min) * factor) / 2;
      zoomTo(Math.max(middle - half, one.ends[0]), Math.min(middle + half, one.ends[1]));
    };
    const move = (step) => {
      one.draw();
      const { cursor, series } = one.plot, bar = spec.kind === "bars";
      const [first, last] = series[0].idxs;
      const at = between(cursor.left >= 0 ? cursor.idxs[0] + step : step > 0 ? first : last - bar, first, last - bar);
      const x = bar ? (data[0][at] + data[0][at + 1]) / 2 : data[0][at];
      one.plot.setCursor({ left: one.plot.valToPos(x, "x"), top: one.plot.over.clientHeight / 2 });
    };

    const keys = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: all, Escape: all };
    area.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const buttons = document.createElement("span");
    buttons.className = "buttons";
    for (const [text, label, action] of [["−", "Zoom out", () => zoom(2)], ["+", "Zoom in", () => zoom(0.5)], ["All", "Show all", all]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.ariaLabel = button.title = label;
      button.addEventListener("click", action);
      buttons.append(button);
    }
    figure.querySelector("figcaption").append(buttons);

    plots.push(one);
    /* The legend keeps its colours from when it was made. */
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => one.plot && build());
    new ResizeObserver(() => {
      if (one.plot && one.plot.width !== area.clientWidth) one.plot.setSize({ width: area.clientWidth, height: 240 });
    }).observe(area);
  }

  function drawNext() {
    const left = plots.filter(({ plot }) => !plot);
    if (!left.length) return;
    const inView = ({ figure }) => (({ top, bottom }) => bottom > 0 && top < innerHeight)(figure.getBoundingClientRect());
    (left.find(inView) ?? left[0]).draw();
    setTimeout(drawNext);
  }

  document.querySelectorAll("figure.plot").forEach(show);
  addEventListener("beforeprint", () => plots.forEach(({ draw }) => draw()));
  setTimeout(drawNext);
})();
