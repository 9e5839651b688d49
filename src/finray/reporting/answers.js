"use strict";
/* Answers of two models side by side, to page through and to filter: the JSON of #answers-data (see answers.py) in
   #answers. Whatever the data hold is put into the page as text, never as markup. */
(() => {
  const section = document.getElementById("answers");
  if (!section) return;
  const PAGE = 5;
  const { texts, models, sets } = JSON.parse(document.getElementById("answers-data").textContent);
  const part = (name) => section.querySelector(`[data-part=${name}]`);
  const [which, left, right, score, outcome, text, list, status] =
    ["set", "left", "right", "score", "outcome", "text", "list", "status"].map(part);
  const lower = texts.map(() => null);
  const holds = (at, words) => at >= 0 && (lower[at] ??= texts[at].toLowerCase()).includes(words);
  let page = 0, shown = [];

  function make(tag, className, content) {
    const made = document.createElement(tag);
    made.className = className;
    if (content != null) made.textContent = content;
    return made;
  }

  function fill(select, names, chosen) {
    select.replaceChildren(...names.map(([value, label]) => Object.assign(make("option", "", label), { value })));
    select.value = String(chosen);
  }

  const set = () => sets[Number(which.value)];

  /* The models of a set and the scores that both have. */
  function choose() {
    const own = set().models;
    const options = own.map((at) => [at, models[at]]);
    const keep = (select, otherwise) => (own.includes(Number(select.value)) && select.value !== "" ? Number(select.value) : otherwise);
    const [first, second] = [keep(left, own[0]), keep(right, own.at(-1))];
    fill(left, options, first);
    fill(right, options, second);
    left.closest("label").hidden = own.length < 2;
    chooseScore();
  }

  function chooseScore() {
    const { scores } = set(), a = Number(left.value), b = Number(right.value);
    const both = scores.flatMap((name, at) => (set().rows.some((row) => row[4][a]?.[at] != null && row[4][b]?.[at] != null) && a !== b ? [[at, name.replaceAll("_", " ")]] : []));
    const before = score.value;
    fill(score, both, both.some(([at]) => String(at) === before) ? before : (both[0]?.[0] ?? ""));
    score.closest("label").hidden = both.length < 2;
    outcome.hidden = !both.length;
    if (!both.length) outcome.querySelector("[value=all]").checked = true;
    apply();
  }

  /* Whether the second model is better on a row (1), worse (-1), or as good (0); null where that is not known. */
  function compared(row) {
    if (score.value === "") return null;
    const at = Number(score.value), a = row[4][Number(left.value)]?.[at], b = row[4][Number(right.value)]?.[at];
    if (a == null || b == null || set().less[at] == null) return null;
    return Math.sign(b - a) * (set().less[at] ? -1 : 1);
  }

  const KINDS = { win: 1, loss: -1, same: 0 };

  function apply() {
    const words = text.value.trim().toLowerCase(), chosen = outcome.querySelector(":checked").value;
    const a = Number(left.value), b = Number(right.value), counts = { all: 0, win: 0, loss: 0, same: 0 };
    shown = [];
    for (const row of set().rows) {
      if (words && ![row[0], row[1], row[2], row[3][a], row[3][b]].some((at) => holds(at, words))) continue;
      const found = compared(row);
      counts.all++;
      for (const [kind, value] of Object.entries(KINDS)) if (found === value) counts[kind]++;
      if (chosen === "all" || found === KINDS[chosen]) shown.push([row, found]);
    }
    for (const [kind, count] of Object.entries(counts)) outcome.querySelector(`[data-count=${kind}]`).textContent = count.toLocaleString("en-US");
    page = 0;
    draw();
  }

  function block(label, at, className, values, none = "(no answer)") {
    const made = make("div", `answer ${className}`);
    const head = make("div", "small quiet", label);
    if (values) head.append(make("span", "values", values));
    made.append(head);
    if (at >= 0 || none) made.append(make("div", "said", at >= 0 ? texts[at] || "(empty)" : none));
    return made;
  }

  function values(row, model) {
    const number = (value) => (Number.isInteger(value) ? String(value) : value.toLocaleString("en-US", { maximumSignificantDigits: 4 }));
    return set().scores.flatMap((name, at) => (row[4][model]?.[at] == null ? [] : [`${name.replaceAll("_", " ")} ${number(row[4][model][at])}`])).join(" · ");
  }

  function article([row, found]) {
    const made = make("article", "row"), head = make("div", "row-head");
    const a = Number(left.value), b = Number(right.value);
    head.append(make("h3", "mono", texts[row[0]]));
    if (found != null) head.append(make("span", `mark ${found > 0 ? "ok" : found < 0 ? "problem" : "note"}`, found > 0 ? "win" : found < 0 ? "loss" : "same"));
    const pair = make("div", "pair");
    pair.append(block("Prompt", row[1], "prompt"), block("Expected", row[2], "expected"));
    /* Nothing is answered where answers are compared by how likely they are. */
    const none = row[3].some((at) => at >= 0) ? "(no answer)" : "";
    if (a !== b) pair.append(block(models[a], row[3][a] ?? -1, "", values(row, a), none));
    pair.append(block(models[b], row[3][b] ?? -1, "", values(row, b), none));
    made.append(head, pair);
    return made;
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const first = page * PAGE, rows = shown.slice(first, first + PAGE);
    list.replaceChildren(...rows.map(article));
    /* A long text scrolls, also from the keyboard. */
    for (const said of list.querySelectorAll(".said")) {
      if (said.scrollHeight > said.clientHeight) Object.assign(said, { tabIndex: 0, role: "group", ariaLabel: said.previousSibling.firstChild.textContent });
    }
    status.textContent = rows.length ? `${(first + 1).toLocaleString("en-US")} to ${(first + rows.length).toLocaleString("en-US")} of ${shown.length.toLocaleString("en-US")} rows` : "no rows";
    part("previous").disabled = page === 0;
    part("next").disabled = page === pages - 1;
  }

  fill(which, sets.map(({ name }, at) => [at, name]), 0);
  which.closest("label").hidden = sets.length < 2;
  which.addEventListener("change", choose);
  for (const select of [left, right]) select.addEventListener("change", chooseScore);
  score.addEventListener("change", apply);
  outcome.addEventListener("change", apply);
  text.addEventListener("input", apply);
  const turn = (by) => {
    page += by;
    draw();
    section.querySelector(".filters").scrollIntoView({ block: "nearest" });
  };
  part("previous").addEventListener("click", () => turn(-1));
  part("next").addEventListener("click", () => turn(1));
  choose();
})();
