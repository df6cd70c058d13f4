// A map: rows of one head as a canvas, the pseudo mass as a column beside it.

const STRIP = 3; // columns' worth of the strip, at least this many pixels times two
const LARGEST = 540; // pixels

class AttentionMap {
  /** Calls onPreview(row or null, column), onSelect(row) as somebody points and clicks, or uses the keyboard. */
  constructor(onPreview, onSelect) {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.band = element("div", { class: "band" });
    this.spot = element("div", { class: "spot", hidden: true });
    this.tip = element("div", { class: "tip", hidden: true });
    this.root = element("div", { class: "map", tabindex: "0", role: "slider", "aria-orientation": "vertical", "aria-label": "Row of the map" }, this.canvas, this.band, this.spot, this.tip);
    this.onPreview = onPreview;
    this.onSelect = onSelect;
    this.root.addEventListener("pointermove", (event) => this.#point(event));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("click", (event) => this.onSelect(this.#place(event).row));
    this.root.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(model, layer, head) {
    Object.assign(this, { model, layer, head });
    const n = model.length;
    const ratio = window.devicePixelRatio || 1;
    const room = Math.min(this.root.parentElement.clientWidth || LARGEST, LARGEST);
    this.cell = Math.max(1, Math.floor((room * ratio) / (n + STRIP + 1))) / ratio;
    if (this.cell * n < 0.8 * room) this.cell = (room / (n + STRIP + 1)); // many tokens on few pixels: fractions
    this.stripAt = this.cell * n + 4;
    this.strip = Math.max(10, STRIP * this.cell);
    const [width, height] = [this.stripAt + this.strip, this.cell * n];
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    Object.assign(this.root.style, { width: `${width}px`, height: `${height}px` });
    this.#paint(this.canvas.getContext("2d"), ratio);
  }

  #paint(context, ratio) {
    const { model, layer, head } = this;
    const n = model.length;
    const ramps = Object.fromEntries(Object.entries(page.ramps[theme()]).map(([kind, ramp]) => [kind, ramp.map(bytes)]));
    const map = pixels(n, n, (row, column) => ramps[column <= row ? "attention" : "pseudo"][step(model.cell(layer, head, row, column))]);
    const side = pixels(1, n, (row) => ramps.pseudo[step(model.mass(layer, head, row))]);
    context.imageSmoothingEnabled = false;
    context.drawImage(map, 0, 0, this.cell * n * ratio, this.cell * n * ratio);
    context.drawImage(side, this.stripAt * ratio, 0, this.strip * ratio, this.cell * n * ratio);
    context.strokeStyle = getComputedStyle(this.root).getPropertyValue("--line");
    context.lineWidth = ratio;
    context.strokeRect(ratio / 2, ratio / 2, this.cell * n * ratio - ratio, this.cell * n * ratio - ratio);
    context.strokeRect(this.stripAt * ratio, ratio / 2, this.strip * ratio - ratio / 2, this.cell * n * ratio - ratio);
  }

  /** Marks a row; the text is what a screen reader says of it. */
  mark(row, text) {
    const height = Math.max(this.cell, 3);
    Object.assign(this.band.style, { top: `${(row + 0.5) * this.cell - height / 2}px`, height: `${height}px` });
    for (const [name, value] of [["min", 1], ["max", this.model.length], ["now", row + 1], ["text", text]]) {
      this.root.setAttribute(`aria-value${name}`, value);
    }
    this.row = row;
  }

  leave() {
    this.tip.hidden = this.spot.hidden = true;
    this.onPreview(null);
  }

  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    const n = this.model.length;
    const within = (x) => Math.max(0, Math.min(n - 1, Math.floor(x / this.cell)));
    const x = event.clientX - box.left;
    return { row: within(event.clientY - box.top), column: x >= this.stripAt - 2 ? n : within(x) };
  }

  #point(event) {
    if (!this.model) return;
    const { row, column } = this.#place(event);
    this.onPreview(row);
    const { model, layer, head } = this;
    const n = model.length;
    this.spot.hidden = column === n;
    Object.assign(this.spot.style, { left: `${column * this.cell}px`, top: `${row * this.cell}px`, width: `${this.cell}px`, height: `${this.cell}px` });
    const share = column === n ? model.mass(layer, head, row) : model.cell(layer, head, row, column);
    const target = column === n ? `goes to no token (${model.rest})` : column <= row ? `to ${quote(model, column)}` : `to pseudo column ${column + 1}`;
    this.tip.replaceChildren(element("b", {}, percent(share)), ` ${target}`, element("br"), `from ${quote(model, row)}`);
    this.tip.hidden = column > row && column < n && model.gammas === null;
    const left = Math.min(column, n - 1) * this.cell;
    const onRight = left < (this.cell * n) / 2;
    Object.assign(this.tip.style, { top: `${Math.min(row * this.cell + 14, this.cell * n - 44)}px`, left: onRight ? `${left + 16}px` : "auto", right: onRight ? "auto" : `${this.cell * n + this.strip + 4 - left + 12}px` });
  }

  #key(event) {
    const last = this.model.length - 1;
    const moves = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.onSelect(Math.max(0, Math.min(last, this.row + moves[event.key])));
  }
}

/** A token in quotation marks, kept apart from text that runs the other way. */
const quote = (model, at) => `\u2068“${visible(model.tokens[at])}”\u2069 (${at + 1})`;

const bytes = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function pixels(width, height, colour) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      image.data.set([...colour(row, column), 255], 4 * (row * width + column));
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
