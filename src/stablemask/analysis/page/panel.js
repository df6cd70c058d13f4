// A panel: one model, one of its heads, one of its rows. Pages have one panel or two.

const STATISTICS = {
  first: { label: "attention on the first token", ramp: "attention", value: (model, layer, head) => model.first[layer][head], text: percent },
  pseudo: { label: "pseudo mass", ramp: "pseudo", value: (model, layer, head) => model.pseudo[layer][head], text: percent },
  entropy: {
    label: "entropy",
    ramp: "attention",
    value: (model, layer, head) => model.entropy[layer][head] / Math.log(Math.max(2, model.length)),
    text: (value, model) => `${(value * Math.log(Math.max(2, model.length))).toFixed(2)} nats`,
  },
};
const PARTS = [["first", "first token"], ["others", "other tokens"], ["none", "no token"]];

class Panel {
  /** Calls onChange(panel, what) after somebody chose a model, a head, or a row; onPreview(panel, row or null). */
  constructor(models, start, onChange, onPreview) {
    Object.assign(this, { models, onChange, onPreview, statistic: "first" });
    this.map = new AttentionMap((row) => this.#preview(row), (row) => this.#choose({ row }));
    this.layerSelect = element("select", { onchange: () => this.#choose({ layer: Number(this.layerSelect.value) }) });
    this.headSelect = element("select", { onchange: () => this.#choose({ head: Number(this.headSelect.value) }) });
    this.title = element("h3", { dir: "auto" });
    this.details = element("dl", { class: "details" });
    this.heads = element("div", { class: "heads", role: "radiogroup" });
    this.heads.addEventListener("keydown", (event) => this.#headKey(event));
    this.rowName = element("p", { class: "row-name" });
    this.bar = element("div", { class: "bar", "aria-hidden": "true" });
    this.split = element("dl", { class: "split" });
    this.largest = element("ol", { class: "largest" });
    this.text = element("p", { class: "text", dir: "auto", tabindex: "0", role: "group", "aria-label": "The text" });
    this.text.addEventListener("pointerleave", () => this.#preview(null));
    this.root = this.#layout();
    this.show(start);
  }

  #layout() {
    const pick = element("div", { class: "pick" }, element("label", {}, "Layer ", this.layerSelect), element("label", {}, "Head ", this.headSelect));
    const name = this.models.length > 2 ? this.#modelSelect() : this.title;
    const legend = element("div", { class: "legends" }, ...["attention", "pseudo"].map((kind) => this.#legend(kind)));
    const grid = element("div", {}, element("p", { class: "axes", "aria-hidden": "true" }, "layers ↓ heads →"), this.heads);
    const summary = element("div", { class: "summary" }, this.rowName, this.bar, this.split);
    const see = element("div", { class: "see" }, element("div", { class: "above" }, grid, summary), element("div", { class: "frame" }, this.map.root), legend);
    const read = element("div", { class: "read" }, element("h4", {}, "Most of it goes to"), this.largest, element("h4", {}, "In the text"), this.text);
    return element("article", { class: "card panel" }, element("div", { class: "head" }, name, pick), this.details, element("div", { class: "body" }, see, read));
  }

  #modelSelect() {
    const options = this.models.map((model, at) => element("option", { value: at }, model.name));
    this.modelSelect = element("select", { "aria-label": "Model", onchange: () => this.#choose({ model: this.models[this.modelSelect.value] }) }, ...options);
    return this.modelSelect;
  }

  #legend(kind) {
    const gradient = element("span", { class: "ramp" });
    const legend = element("div", { class: `legend ${kind}` }, element("span", { class: "legend-name" }, kind === "attention" ? "attention" : "no token"), element("span", {}, "0"), gradient, element("span", {}, "100 %"));
    this.legends = { ...this.legends, [kind]: { legend, gradient } };
    return legend;
  }

  /** Shows another model, layer, head or row; what is not given stays. */
  show(change) {
    const before = this.state ?? {};
    const state = { ...before, ...change };
    state.layer = Math.min(state.layer, state.model.layers - 1);
    state.head = Math.min(state.head, state.model.heads - 1);
    state.row = Math.min(state.row, state.model.length - 1);
    this.state = state;
    this.preview = null;
    if (state.model !== before.model) this.#drawModel();
    if (state.layer !== before.layer || state.head !== before.head || state.model !== before.model) this.#drawHead();
    this.#drawRow(state.row);
  }

  /** Draws everything again, in the colours of the theme. */
  redraw() {
    this.#drawHeads();
    this.#drawHead();
    this.#drawRow(this.state.row);
  }

  showStatistic(name) {
    this.statistic = name;
    this.#drawHeads();
  }

  /** Shows a row for as long as somebody points at it; null goes back to the chosen one. */
  showPreview(row) {
    if (row === this.preview || (row !== null && row >= this.state.model.length)) return;
    this.preview = row;
    this.#drawRow(row ?? this.state.row);
  }

  #choose(change) {
    this.show(change);
    this.onChange(this, change);
  }

  #preview(row) {
    if (row === this.preview) return;
    this.showPreview(row);
    this.onPreview(this, row);
  }

  #drawModel() {
    const { model } = this.state;
    this.title.textContent = model.name;
    if (this.modelSelect) this.modelSelect.value = this.models.indexOf(model);
    this.root.setAttribute("aria-label", model.name);
    this.heads.setAttribute("aria-label", `Heads of ${model.name}: a row for every layer`);
    this.map.root.setAttribute("aria-label", `Row of the map of ${model.name}`);
    for (const [select, count] of [[this.layerSelect, model.layers], [this.headSelect, model.heads]]) {
      select.replaceChildren(...Array.from({ length: count }, (_, at) => element("option", { value: at }, at)));
    }
    const radios = [];
    for (let layer = 0; layer < model.layers; layer++) {
      for (let head = 0; head < model.heads; head++) {
        radios.push(element("button", { type: "button", role: "radio", "data-layer": layer, "data-head": head, onclick: () => this.#choose({ layer, head }) }));
      }
    }
    this.heads.style.gridTemplateColumns = `repeat(${model.heads}, minmax(6px, 22px))`;
    this.heads.replaceChildren(...radios);
    this.#drawHeads();
    this.words = model.tokens.map((token, at) => this.#word(token, at));
    this.text.replaceChildren(...this.words.flatMap((word, at) => (model.tokens[at].includes("\n") ? [word, element("br")] : [word])));
  }

  #word(token, at) {
    const word = element("bdi", { class: "token", onpointerenter: () => this.#preview(at), onclick: () => this.#choose({ row: at }) });
    word.textContent = visible(token).replace(/^·/, " ");
    return word;
  }

  #drawHeads() {
    const { model } = this.state;
    const { label, ramp, value, text } = STATISTICS[this.statistic];
    for (const radio of this.heads.children) {
      const { layer, head } = radio.dataset;
      const found = value(model, layer, head);
      const says = `Layer ${layer}, head ${head}: ${label} ${text(found, model)}`;
      radio.style.backgroundColor = page.ramps[theme()][ramp][step(found)];
      radio.setAttribute("aria-label", says);
      radio.title = says;
    }
  }

  #drawHead() {
    const { model, layer, head } = this.state;
    this.layerSelect.value = layer;
    this.headSelect.value = head;
    for (const radio of this.heads.children) {
      const chosen = Number(radio.dataset.layer) === layer && Number(radio.dataset.head) === head;
      radio.setAttribute("aria-checked", chosen);
      radio.tabIndex = chosen ? 0 : -1;
    }
    const ofHead = model.gammas === null ? [] : [["γ of this head", String(Number(model.gammas[head].toPrecision(3)))]];
    const details = [...model.details, ...ofHead, ...(model.hasMass ? [["no token is", model.rest]] : [])];
    this.details.replaceChildren(...details.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", { dir: "auto" }, value))));
    this.map.draw(model, layer, head);
    for (const [kind, { legend, gradient }] of Object.entries(this.legends)) {
      legend.hidden = kind === "pseudo" && !model.hasMass;
      gradient.style.background = `linear-gradient(to right, ${page.ramps[theme()][kind].filter((_, at) => at % 17 === 0).join(",")})`;
    }
  }

  #drawRow(row) {
    const { model, layer, head } = this.state;
    const parts = model.parts(layer, head, row);
    this.rowName.replaceChildren("Row ", element("strong", {}, row + 1), " ", element("bdi", { class: "quoted" }, `“${visible(model.tokens[row])}”`), ` gives`);
    const shown = PARTS.filter(([part]) => part !== "none" || model.hasMass);
    this.bar.replaceChildren(...shown.map(([part]) => segment(part, parts[part])));
    this.split.replaceChildren(...shown.map(([part, label]) => element("div", {}, element("dt", { class: part }, label), element("dd", { "data-part": part }, percent(parts[part])))));
    const largest = model.largest(layer, head, row, 5);
    this.largest.replaceChildren(...largest.map(([column, share]) => element("li", {}, element("bdi", { class: "quoted" }, `“${visible(model.tokens[column])}”`), element("span", { class: "at" }, ` ${column + 1} `), element("b", {}, percent(share)))));
    this.words.forEach((word, column) => {
      tint(word, column <= row ? "attention" : "pseudo", model.cell(layer, head, row, column));
      word.classList.toggle("current", column === row);
    });
    this.map.mark(row, this.describe(row));
    if (this.preview === null) this.#scrollTo(this.words[row]);
  }

  #scrollTo(word) {
    const above = word.offsetTop - this.text.offsetTop;
    if (above < this.text.scrollTop || above + word.offsetHeight > this.text.scrollTop + this.text.clientHeight) {
      this.text.scrollTop = above - this.text.clientHeight / 2;
    }
  }

  /** A row in a sentence. */
  describe(row = this.state.row) {
    const { model, layer, head } = this.state;
    const { first, none } = model.parts(layer, head, row);
    const largest = model.largest(layer, head, row, 3).map(([column, share]) => `“${visible(model.tokens[column])}” ${percent(share)}`);
    const rest = model.hasMass ? `, no token ${percent(none)}` : "";
    return `Row ${row + 1}, “${visible(model.tokens[row])}”: first token ${percent(first)}${rest}; most to ${largest.join(", ")}`;
  }

  #headKey(event) {
    const { model, layer, head } = this.state;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const next = { layer: (layer + down + model.layers) % model.layers, head: (head + right + model.heads) % model.heads };
    this.#choose(next);
    this.heads.children[next.layer * model.heads + next.head].focus();
  }
}

function segment(part, share) {
  const made = element("span", { class: part });
  made.style.flexGrow = share;
  return made;
}
