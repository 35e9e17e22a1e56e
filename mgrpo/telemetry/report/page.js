// What is under the pointer, the search, the colours of tokens, and keeping up with a run. Text from the run is only ever set as text.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const find = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  let values = {}, cursor = null;

  // Numbers as in the charts' axes.
  function plain(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    return size && size < 1e-3 ? value.toExponential(2) : `${+value.toPrecision(4)}`;
  }
  const shown = (value, unit) => (unit === "%" ? `${plain(100 * value)} %` : plain(value));

  // Charts: one step is read out in all of them.
  function place(places, step) {
    let best = -1, distance = Infinity;
    places.forEach(([first, last], index) => {
      const away = step < first ? first - step : step > last ? step - last : 0;
      if (away < distance) [best, distance] = [index, away];
    });
    return best;
  }
  function heights(chart) {
    const [, , top, bottom] = chart.frame, [low, high] = chart.range;
    const share = chart.log ? (v) => Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
    return (value) => bottom - share(value) * (bottom - top);
  }
  function across(chart, step) {
    const [left, right] = chart.frame, span = values.last - values.first;
    return left + (span ? (step - values.first) / span : 0.5) * (right - left);
  }
  function readOut(step) {
    cursor = step;
    for (const figure of all(".chart[id]")) {
      const chart = (values.charts || {})[figure.id], group = figure.querySelector(".cursor");
      if (!chart || !group) continue;
      group.replaceChildren();
      all(".key b", figure).forEach((value) => value.remove());
      const output = figure.querySelector("output");
      output.textContent = "";
      // Values lie over the chart where they need more lines: it must not move under the pointer.
      const legend = figure.querySelector(".legend");
      legend.style.height = "";
      legend.classList.toggle("reading", step !== null);
      if (step === null || figure.classList.contains("hidden")) continue;
      legend.style.height = `${legend.offsetHeight}px`;
      const height = heights(chart), line = document.createElementNS(SVG, "line");
      let label = `step ${step}`, stacked = 0, alone = "";
      chart.series.forEach((series, index) => {
        if (runsOff.has(series.name)) return;
        const at = place(values.places[series.places], step);
        let value = at < 0 ? null : series.values[at], where = step;
        if (value === undefined) value = null;
        if (value !== null) {
          const [first, last] = values.places[series.places][at];
          where = (first + last) / 2;
          label = first === last ? `step ${first}` : `steps ${first}\u2013${last}`;
        } else if (series.dots) {
          const before = series.dots.filter(([when]) => when <= step).pop();
          if (before) [where, value] = before;
        }
        if (value === null) return;
        let words = shown(value, chart.unit);
        if (chart.series.length === 1 && series.smooth && series.smooth[at] != null) words += ` \u00b7 mean ${shown(series.smooth[at], chart.unit)}`;
        const key = all(".key", figure)[index];
        if (key) {
          const bold = document.createElement("b");
          bold.textContent = words;
          key.append(bold);
        } else alone = words;
        stacked += value;
        const dot = document.createElementNS(SVG, "circle");
        dot.setAttribute("class", `f${series.colour}`);
        dot.setAttribute("cx", across(chart, where));
        dot.setAttribute("cy", height(chart.stacked ? stacked : value));
        dot.setAttribute("r", "3.5");
        group.append(dot);
      });
      for (const [name, value] of [["x1", across(chart, step)], ["x2", across(chart, step)], ["y1", chart.frame[2]], ["y2", chart.frame[3]]])
        line.setAttribute(name, value);
      group.prepend(line);
      output.textContent = alone ? `${label}: ${alone}` : label;
    }
  }
  function stepUnder(event, figure) {
    const chart = values.charts[figure.id], svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const [left, right] = chart.frame, x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - left) / (right - left)));
    return Math.round(values.first + share * (values.last - values.first));
  }
  let drawing = 0;
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest ? event.target.closest(".chart[id] svg") : null;
    const step = svg ? stepUnder(event, svg.closest(".chart")) : null;
    if (step !== cursor) {
      cancelAnimationFrame(drawing);
      drawing = requestAnimationFrame(() => readOut(step));
    }
    point(event);
  });
  document.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (!event.target.matches(".chart[id]") || !moves[event.key]) return;
    event.preventDefault();
    const step = cursor === null ? values.last : cursor + moves[event.key];
    readOut(Math.min(values.last, Math.max(values.first, step)));
  });

  // Runs of a comparison can be switched off.
  const runsOff = new Set();
  function showRuns() {
    all(".runs button").forEach((button) => button.setAttribute("aria-pressed", !runsOff.has(button.dataset.name)));
    for (const figure of all(".chart[id]")) {
      const chart = (values.charts || {})[figure.id];
      if (!chart) continue;
      for (const series of chart.series) {
        const isOff = runsOff.has(series.name);
        all(`svg > .s${series.colour}, svg > .f${series.colour}`, figure).forEach((mark) => mark.classList.toggle("off", isOff));
      }
      all(".key", figure).forEach((key) => key.classList.toggle("off", runsOff.has(key.dataset.name)));
    }
  }

  // Samples: what is searched for and which kinds are shown.
  const field = (id) => (find(id) ? find(id).value : "");
  function filterSamples() {
    if (!find("samples-shown")) return;
    const words = field("search").trim().toLowerCase(), kind = field("kind");
    const least = parseFloat(field("least")), most = parseFloat(field("most"));
    const isFiltered = Boolean(words || kind || !isNaN(least) || !isNaN(most)), ranges = [];
    let found = 0;
    const samples = all("#samples-shown .sample");
    for (const sample of samples) {
      const { kind: is, end, reward } = sample.dataset, value = parseFloat(reward);
      const asked = all(":scope > .asked, :scope > .facts", sample.closest(".prompt")).map((part) => part.textContent).join(" ");
      const fits =
        (!kind || (kind === "cut" ? end === "length" : is === kind)) &&
        (isNaN(least) || value >= least) && (isNaN(most) || value <= most) &&
        (!words || sample.textContent.toLowerCase().includes(words) || asked.toLowerCase().includes(words));
      sample.classList.toggle("hidden", !fits);
      if (fits) found += 1;
    }
    for (const holder of all("#samples-shown .column, #samples-shown .prompt, #samples-shown details:not(.sample *)")) {
      const has = Boolean(holder.querySelector(".sample:not(.hidden)"));
      holder.classList.toggle("hidden", !has);
      if (holder.tagName === "DETAILS" && isFiltered && has && !holder.open) {
        holder.open = true;
        holder.dataset.opened = "search";
      } else if (!isFiltered && holder.dataset.opened) {
        holder.open = false;
        delete holder.dataset.opened;
      }
    }
    for (const heading of all("#samples-shown h4")) {
      let next = heading.nextElementSibling, has = false;
      while (next && next.matches(".prompt")) {
        has = has || !next.classList.contains("hidden");
        next = next.nextElementSibling;
      }
      heading.classList.toggle("hidden", !has);
    }
    find("found").textContent = isFiltered ? `${found} of ${samples.length} samples` : `${samples.length} samples`;
    if (!window.Highlight) return;
    if (words)
      for (const pre of all("#samples-shown .sample:not(.hidden) pre, #samples-shown .prompt:not(.hidden) > .asked")) {
        const walk = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
        while (walk.nextNode() && ranges.length < 2000) {
          const lower = walk.currentNode.data.toLowerCase();
          for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, at + words.length)) {
            const range = new Range();
            range.setStart(walk.currentNode, at);
            range.setEnd(walk.currentNode, Math.min(at + words.length, walk.currentNode.length));
            ranges.push(range);
          }
        }
      }
    CSS.highlights.set("search", new Highlight(...ranges));
  }
  function findCharts() {
    const words = field("find-chart").trim().toLowerCase();
    if (words && find("others")) find("others").open = true;
    all(".chart[id]").forEach((chart) => chart.classList.toggle("hidden", !chart.dataset.title.toLowerCase().includes(words)));
  }

  // Tokens by probability.
  // The text of a completion is not that of its tokens: special ones are left out, and long ones are cut off.
  const uncoloured = new WeakMap();
  const LEVELS = [0.9, 0.5, 0.1, 0.01];
  function level(logprob) {
    if (logprob === null) return 5;
    const found = LEVELS.findIndex((least) => Math.exp(logprob) > least);
    return found < 0 ? 4 : found;
  }
  function colour() {
    const box = find("colours");
    if (!box) return;
    find("samples-shown").querySelector(".swatches").hidden = !box.checked;
    for (const [id, [pieces, logprobs]] of Object.entries(values.tokens)) {
      const sample = find(id), pre = sample && sample.querySelector("pre.written");
      if (!pre) continue;
      if (box.checked === uncoloured.has(pre)) continue;
      if (!box.checked) {
        pre.replaceChildren(...uncoloured.get(pre));
        uncoloured.delete(pre);
        continue;
      }
      uncoloured.set(pre, [...pre.childNodes]);
      pre.replaceChildren(
        ...pieces.map((piece, index) => {
          const span = document.createElement("span");
          span.textContent = piece;
          span.className = `p${level(logprobs[index])}`;
          if (logprobs[index] !== null) span.dataset.logprob = logprobs[index];
          return span;
        }),
      );
    }
  }
  function point(event) {
    const tip = find("read-out"), logprob = event.target.dataset ? event.target.dataset.logprob : undefined;
    tip.hidden = logprob === undefined;
    if (tip.hidden) return;
    tip.textContent = `probability ${(+Math.exp(logprob).toPrecision(3))}, log-probability ${logprob}`;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 260)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  }

  // Keeping up with a run, without losing what the reader has set.
  const FIELDS = ["search", "kind", "least", "most", "find-chart"], KEPT = `mgrpo ${location.pathname}`;
  function state() {
    return {
      fields: FIELDS.map(field),
      colours: Boolean(find("colours") && find("colours").checked),
      open: all("details[id]").filter((one) => one.open && !one.dataset.opened).map((one) => one.id),
      known: all("details[id]").map((one) => one.id),
      off: [...runsOff],
      focus: document.activeElement && document.activeElement.id,
      selection: document.activeElement && document.activeElement.type === "search" ? document.activeElement.selectionStart : null,
    };
  }
  function restore(before) {
    FIELDS.forEach((id, index) => { if (find(id)) find(id).value = before.fields[index]; });
    if (find("colours")) find("colours").checked = before.colours;
    all("details[id]").forEach((one) => { if (before.known.includes(one.id)) one.open = before.open.includes(one.id); });
    before.off.forEach((name) => runsOff.add(name));
    begin();
    if (before.focus && find(before.focus)) {
      find(before.focus).focus({ preventScroll: true });
      if (before.selection !== null) find(before.focus).setSelectionRange(before.selection, before.selection);
    }
  }
  function begin() {
    values = JSON.parse(find("values").textContent);
    colour();
    filterSamples();
    findCharts();
    showRuns();
  }
  async function poll() {
    const root = document.documentElement;
    try {
      const now = document.hidden ? "" : await (await fetch("/version")).text();
      const isReading = String(getSelection()) !== "";
      if (now && now !== root.dataset.version && !isReading) {
        const answer = await fetch("/");
        if (answer.ok) {
          const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"), before = state(), step = cursor;
          document.querySelector("main").replaceWith(document.adoptNode(fresh.querySelector("main")));
          document.title = fresh.title;
          root.dataset.version = fresh.documentElement.dataset.version;
          restore(before);
          readOut(step);
        }
      }
      root.classList.remove("cut");
    } catch {
      root.classList.add("cut");
    }
    setTimeout(poll, 2000);
  }
  document.addEventListener("input", (event) => {
    if (event.target.id === "find-chart") findCharts();
    else if (event.target.id === "colours") { colour(); filterSamples(); }
    else if (FIELDS.includes(event.target.id)) filterSamples();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".runs button");
    if (!button) return;
    const name = button.dataset.name;
    if (!runsOff.delete(name)) runsOff.add(name);
    showRuns();
  });

  const follow = document.documentElement.dataset.follow;
  document.documentElement.classList.add("live");
  let kept = null;
  try { kept = JSON.parse(sessionStorage.getItem(KEPT)); sessionStorage.removeItem(KEPT); } catch { /* a browser that keeps nothing for files */ }
  if (kept) restore(kept); else begin();
  if (follow === "poll") setTimeout(poll, 2000);
  if (follow === "reload")
    setInterval(() => {
      if (document.hidden || String(getSelection()) !== "") return;
      try { sessionStorage.setItem(KEPT, JSON.stringify(state())); } catch { /* as above */ }
      location.reload();
    }, 30000);
})();
