// A model: its shares, unpacked, and the questions that the page asks of them.

const page = JSON.parse(document.getElementById("data").textContent);

class Model {
  constructor(about, planes) {
    Object.assign(this, about);
    this.length = this.tokens.length;
    this.planes = planes;
    this.half = planes.length / 2;
    this.triangle = (this.length * (this.length + 1)) / 2;
  }

  static async unpack(about, index) {
    const text = document.getElementById(`shares-${index}`).textContent;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Model(about, new Uint8Array(await new Response(stream).arrayBuffer()));
  }

  #number(at) {
    return (256 * this.planes[at] + this.planes[this.half + at]) / 65535;
  }

  /** What a row gives to a token at or before it. */
  share(layer, head, row, column) {
    const map = (layer * this.heads + head) * this.triangle;
    return this.#number(map + (row * (row + 1)) / 2 + column);
  }

  /** What a row gives to no token. */
  mass(layer, head, row) {
    const maps = this.layers * this.heads * this.triangle;
    return this.#number(maps + (layer * this.heads + head) * this.length + row);
  }

  /** How much of a row's pseudo mass is that of one column after it; columns exist up to the horizon. */
  pseudoPart(head, row, column) {
    if (this.gammas === null || column <= row) return 0;
    const gamma = this.gammas[head];
    const place = column - row - 1;
    if (this.horizon !== null && row + 1 > this.horizon) return place === 0 ? 1 : 0;
    const count = this.horizon === null ? Infinity : this.horizon - row - 1;
    if (place >= count) return 0;
    if (gamma === 0) return 1 / count;
    return Math.exp(-place * gamma) * (Math.expm1(-gamma) / Math.expm1(-count * gamma));
  }

  /** What a row gives to a column, a token or the pseudo score that stands there. */
  cell(layer, head, row, column) {
    if (column <= row) return this.share(layer, head, row, column);
    return this.gammas === null ? 0 : this.mass(layer, head, row) * this.pseudoPart(head, row, column);
  }

  /** The tokens that get most of a row, as [column, share]. */
  largest(layer, head, row, count) {
    const found = Array.from({ length: row + 1 }, (_, column) => [column, this.share(layer, head, row, column)]);
    return found.sort((a, b) => b[1] - a[1]).slice(0, count).filter((entry) => entry[1] >= 0.0005);
  }

  /** A row in three parts: first token, the tokens after it, no token. */
  parts(layer, head, row) {
    const first = this.share(layer, head, row, 0);
    const none = this.mass(layer, head, row);
    return { first, others: Math.max(0, 1 - first - none), none };
  }

  get hasMass() {
    return this.pseudo.some((heads) => heads.some((value) => value > 0));
  }
}

/** A share as text. */
function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.05) return "< 0.1 %";
  return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
}

const SIGNS = { "\n": "↵", "\r": "␍", "\t": "⇥", " ": "·" };

/** A token with everything that cannot be seen named. */
function visible(token) {
  if (token === "") return "∅";
  const spaced = token.replace(/^ +| +$|[\n\r\t]/g, (found) => [...found].map((c) => SIGNS[c]).join(""));
  return [...spaced].map((c) => (/[\p{C}\u2028\u2029]/u.test(c) ? `⟨${c.codePointAt(0).toString(16).toUpperCase()}⟩` : c)).join("");
}

/** An element with attributes, properties whose names begin with a dot, and children. */
function element(name, attributes = {}, ...children) {
  const made = name === "svg" || SVG_NAMES.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const SVG_NAMES = new Set(["g", "path", "line", "text", "circle", "rect"]);

const theme = () => document.documentElement.dataset.theme;

/** The step of a ramp for a share: shares are shown by their square roots, so that one per cent can be seen. */
const step = (share) => Math.max(0, Math.min(255, Math.round(255 * Math.sqrt(share))));

/** Colours an element as a share, with text that can be read on it. */
function tint(target, kind, share) {
  const at = step(share);
  target.style.backgroundColor = page.ramps[theme()][kind][at];
  target.style.color = at < 128 ? "var(--text)" : "var(--surface)";
}
