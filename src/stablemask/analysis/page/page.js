// The page: reads the data, puts the parts in their places and connects them.

const byId = (id) => document.getElementById(id);

function showTiles(models) {
  const tiles = [
    ["Sink rate", `heads that give their first token more than ${percent(page.sinkThreshold)} on average`, (m) => m.first.flat().filter((value) => value > page.sinkThreshold).length / (m.layers * m.heads)],
    ["On the first token", "mean share of all rows, layers and heads", (m) => mean(m.first.flat())],
  ];
  if (models.some((m) => m.hasMass)) tiles.push(["On no token", "mean pseudo mass 1 − α", (m) => mean(m.pseudo.flat())]);
  const entropy = ["Spread of the rest", "mean entropy of a row, in nats", (m) => mean(m.entropy.flat())];
  const longest = Math.max(...models.map((m) => Math.log(Math.max(2, m.length))));
  for (const [name, note, value] of tiles) byId("tiles").append(tile(models, name, note, value, percent, 1));
  byId("tiles").append(tile(models, ...entropy, (value) => value.toFixed(2), longest));
}

function tile(models, name, note, value, text, whole) {
  const rows = models.map((model) => {
    const found = value(model);
    const bar = element("span", { class: "meter", "aria-hidden": "true" }, element("span"));
    bar.firstChild.style.width = `${Math.min(100, (100 * found) / whole)}%`;
    return element("div", {}, element("dt", { dir: "auto" }, model.name), element("dd", {}, text(found)), bar);
  });
  return element("div", { class: `card tile ${name === "On no token" ? "pseudo" : ""}` }, element("h3", {}, name), element("p", {}, note), element("dl", {}, ...rows));
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** The head with the strongest sink of a model, and a row in the middle of the text. */
function startState(model) {
  const scores = model.first.flat();
  const at = scores.indexOf(Math.max(...scores));
  return { layer: Math.floor(at / model.heads), head: at % model.heads, row: Math.floor(0.6 * (model.length - 1)) };
}

function showPanels(models) {
  const panels = [];
  const together = element("input", { type: "checkbox", id: "together" });
  together.checked = true;
  const others = (panel) => panels.filter((other) => other !== panel);
  const alike = (a, b) => a.state.model.tokens.join("\0") === b.state.model.tokens.join("\0");
  const changed = (panel, change) => {
    for (const other of others(panel)) {
      const { row, model, ...head } = change;
      const next = together.checked && model === undefined ? { ...head } : {};
      if (row !== undefined && alike(panel, other)) next.row = row;
      if (Object.keys(next).length) other.show(next);
    }
    byId("announce").textContent = panel.describe();
  };
  const preview = (panel, row) => others(panel).forEach((other) => alike(panel, other) && other.showPreview(row));
  const start = startState(models[0]);
  for (const model of models.slice(0, 2)) {
    const panel = new Panel(models, { model, ...start }, changed, preview);
    panels.push(panel);
    byId("panels").append(panel.root);
  }
  const statistic = element("select", { id: "statistic", onchange: () => panels.forEach((panel) => panel.showStatistic(statistic.value)) });
  const offered = Object.entries(STATISTICS).filter(([name]) => name !== "pseudo" || models.some((m) => m.hasMass));
  statistic.append(...offered.map(([name, { label }]) => element("option", { value: name }, label)));
  byId("controls").append(element("label", {}, "Colour heads by ", statistic));
  if (panels.length > 1) byId("controls").append(element("label", {}, together, " Same layer and head in both"));
  byId("pseudo-how").hidden = !models.some((m) => m.hasMass);
  const cut = models.find((m) => m.allTokens > m.length);
  byId("cut").hidden = cut === undefined;
  if (cut) byId("cut").textContent = `This part of the page shows the first ${cut.length} of ${cut.allTokens} tokens.`;
  return panels;
}

function sortTables() {
  for (const table of document.querySelectorAll("table")) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      const button = element("button", { type: "button", onclick: () => sortTable(table, head, column) });
      button.textContent = head.textContent;
      head.replaceChildren(button);
      if (table.querySelector(`tbody tr > :nth-child(${column + 1}).number`)) head.classList.add("number");
    });
  }
}

function sortTable(table, head, column) {
  const falling = head.getAttribute("aria-sort") === "ascending";
  table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const key = (row) => row.children[column];
  const order = (a, b) => {
    const [x, y] = [a, b].map((row) => key(row).dataset.value);
    if (x !== undefined && y !== undefined) return (falling ? -1 : 1) * (Number(x) - Number(y));
    if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1; // what is missing comes last
    return (falling ? -1 : 1) * key(a).textContent.localeCompare(key(b).textContent, undefined, { numeric: true });
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
}

function showTheme(onChange) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const now = chosen ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now;
    byId("theme").textContent = now === "dark" ? "☀ Light" : "☾ Dark";
    onChange();
  };
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

async function start() {
  let redraw = [];
  showTheme(() => redraw.forEach((draw) => draw()));
  sortTables();
  if (page.curves.length) byId("charts").append(...page.curves.map((curve) => new Chart(curve).root));
  if (!page.models.length) return;
  const models = await Promise.all(page.models.map((about, index) => Model.unpack(about, index)));
  showTiles(models);
  const panels = showPanels(models);
  redraw = panels.map((panel) => () => panel.redraw());
  const fit = () => redraw.forEach((draw) => draw());
  fit();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) fit();
    width = innerWidth;
  });
}

start().then(() => { document.documentElement.dataset.ready = "yes"; });
