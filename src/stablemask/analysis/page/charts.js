// Charts: lines with intervals, as SVG that takes its colours from the page; values are read with pointer or keys.

const FRAME = { width: 560, height: 300, left: 56, right: 14, top: 30, bottom: 44 };
const DASHES = ["", "7 4", "8 3 2 3", "2 3", "12 4", "1 4"];

class Chart {
  constructor(curve) {
    this.curve = curve;
    this.scales = [scale(curve, "x", curve.log_x), scale(curve, "y", curve.log_y)];
    this.cursor = element("line", { class: "cursor", y1: FRAME.top, y2: FRAME.height - FRAME.bottom, visibility: "hidden" });
    this.dots = element("g");
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    const svg = element("svg", { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, "aria-hidden": "true" }, ...this.#axes(), ...curve.series.flatMap((line, at) => this.#line(line, at)), this.cursor, this.dots);
    this.plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${curve.title}. Arrow keys read the values.` }, svg);
    this.svg = svg;
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.read(null));
    this.plot.addEventListener("blur", () => this.read(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.xs = [...new Set(curve.series.flatMap((line) => line.x.filter((_, i) => line.y[i] !== null)))].sort((a, b) => a - b);
    this.root = element("figure", { class: "card chart" }, element("h3", { dir: "auto" }, curve.title), this.#legend(), this.plot, this.readout);
    if (curve.note) this.root.append(element("figcaption", { dir: "auto" }, curve.note));
    this.read(null);
  }

  at(x, y) {
    const [across, up] = [this.scales[0].share(x), this.scales[1].share(y)];
    return [FRAME.left + across * (FRAME.width - FRAME.left - FRAME.right), FRAME.height - FRAME.bottom - up * (FRAME.height - FRAME.top - FRAME.bottom)];
  }

  #axes() {
    const { curve, scales } = this;
    const made = [];
    const bottom = FRAME.height - FRAME.bottom;
    for (const tick of scales[1].ticks) {
      const [, y] = this.at(scales[0].low, tick);
      made.push(element("line", { class: "grid", x1: FRAME.left, x2: FRAME.width - FRAME.right, y1: y, y2: y }), label(FRAME.left - 8, y + 4, "end", number(tick)));
    }
    for (const tick of scales[0].ticks) {
      const [x] = this.at(tick, scales[1].low);
      made.push(element("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 4 }), label(x, bottom + 17, "middle", number(tick)));
    }
    for (const [x, text] of curve.marks) {
      const [at] = this.at(x, scales[1].low);
      made.push(element("line", { class: "mark", x1: at, x2: at, y1: FRAME.top, y2: bottom }), label(at, FRAME.top - 18 + 12, "middle", text));
    }
    made.push(element("line", { class: "axis", x1: FRAME.left, x2: FRAME.width - FRAME.right, y1: bottom, y2: bottom }));
    made.push(label((FRAME.left + FRAME.width - FRAME.right) / 2, FRAME.height - 6, "middle", curve.x_label, "name"));
    made.push(label(4, 12, "start", curve.y_label, "name"));
    return made;
  }

  #line(line, at) {
    const points = line.x.map((x, i) => (line.y[i] === null ? null : this.at(x, line.y[i])));
    const made = [];
    if (line.low !== null) {
      const kept = line.x.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
      const outline = [...kept.map((i) => this.at(line.x[i], line.high[i])), ...kept.reverse().map((i) => this.at(line.x[i], line.low[i]))];
      if (outline.length) made.push(element("path", { class: `interval s${at % 6}`, d: `M${outline.map((p) => p.map(fixed).join(",")).join("L")}Z` }));
    }
    let d = "";
    points.forEach((point, i) => {
      if (point) d += `${i > 0 && points[i - 1] ? "L" : "M"}${point.map(fixed).join(",")}`;
    });
    made.push(element("path", { class: `line s${at % 6}`, d, "stroke-dasharray": DASHES[at % 6] }));
    if (points.length <= 16) made.push(...points.filter(Boolean).map(([x, y]) => element("circle", { class: `dot s${at % 6}`, cx: x, cy: y, r: 3 })));
    return made;
  }

  #legend() {
    const { series } = this.curve;
    const key = (at) => element("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" }, element("line", { class: `line s${at % 6}`, x1: 0, x2: 28, y1: 4, y2: 4, "stroke-dasharray": DASHES[at % 6] }));
    return element("ul", { class: "legend-list", hidden: series.length < 2 }, ...series.map((line, at) => element("li", {}, key(at), element("bdi", {}, line.name))));
  }

  /** Shows the values at one of the places on the horizontal axis; null shows none. */
  read(index) {
    this.index = index;
    this.dots.replaceChildren();
    this.cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index === null) {
      this.readout.replaceChildren("\u00a0");
      return;
    }
    const x = this.xs[index];
    const [place] = this.at(x, this.scales[1].low);
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    const said = [`${this.curve.x_label} ${number(x)}`];
    this.curve.series.forEach((line, at) => {
      const i = line.x.indexOf(x);
      if (i < 0 || line.y[i] === null) return;
      const [cx, cy] = this.at(x, line.y[i]);
      this.dots.append(element("circle", { class: `dot s${at % 6}`, cx, cy, r: 4 }));
      const interval = line.low === null || line.low[i] === null ? "" : ` (${number(line.low[i])} … ${number(line.high[i])})`;
      said.push(`${line.name} ${number(line.y[i])}${interval}`);
    });
    this.readout.textContent = said.join("  ·  ");
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * FRAME.width;
    const distance = (value) => Math.abs(this.at(value, this.scales[1].low)[0] - x);
    const nearest = this.xs.reduce((best, value, at) => (distance(value) < distance(this.xs[best]) ? at : best), 0);
    this.read(nearest);
  }

  #key(event) {
    const last = this.xs.length - 1;
    const now = this.index;
    const next = { ArrowRight: now === null ? 0 : now + 1, ArrowLeft: now === null ? last : now - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.read(null);
    if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.read(Math.max(0, Math.min(last, next)));
  }
}

function label(x, y, anchor, text, name = "label") {
  const made = element("text", { x, y, class: name, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

/** From values to 0 … 1, with ticks at round numbers. */
function scale(curve, axis, log) {
  const series = curve.series.flatMap((line) => (axis === "x" ? line.x : [...line.y, ...(line.low ?? []), ...(line.high ?? [])]));
  const values = [...series, ...(axis === "x" ? curve.marks.map(([x]) => x) : [])].filter((value) => value !== null && (!log || value > 0));
  let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  if (axis === "y" && !log && low >= 0 && low < 0.5 * high) low = 0;
  const ticks = log ? logTicks(low, high, axis === "x" ? 2 : 10) : linearTicks(low, high, axis === "y" ? 5 : 7);
  if (axis === "y") [low, high] = [Math.min(low, ticks[0] ?? low), Math.max(high, ticks.at(-1) ?? high)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const to = log ? Math.log : (value) => value;
  return { low, ticks: ticks.filter((tick) => tick >= low && tick <= high), share: (value) => (to(value) - to(low)) / (to(high) - to(low)) };
}

function linearTicks(low, high, count) {
  if (low === high) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let at = Math.floor(low / size); at <= Math.ceil(high / size); at++) ticks.push(Number((at * size).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, base) {
  const steps = base === 2 ? [1] : high / low > 100 ? [1] : [1, 2, 5];
  const ticks = [];
  const every = base === 2 ? Math.max(1, Math.ceil(Math.log2(high / low) / 9)) : 1;
  for (let power = Math.floor(Math.log(low) / Math.log(base)); power <= Math.ceil(Math.log(high) / Math.log(base)); power += every) {
    for (const factor of steps) ticks.push(Number((factor * base ** power).toPrecision(12)));
  }
  const [first, last] = [ticks.findLastIndex((tick) => tick <= low * 1.001), ticks.findIndex((tick) => tick >= high * 0.999)];
  return ticks.slice(Math.max(0, first), last < 0 ? ticks.length : last + 1);
}

const fixed = (value) => value.toFixed(2);

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}
