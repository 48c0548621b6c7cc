// The page: what each plot shows, and what choosing something changes.

const report = JSON.parse(document.getElementById("data").textContent);
const models = report.models;
// the number of each model's colour: one method has one colour on every page
const colours = report.series;
const mean = (values) => {
  const usable = values.filter(known);
  return usable.length ? usable.reduce((a, b) => a + b, 0) / usable.length : null;
};
const canvasOf = (name) => document.querySelector(`[data-plot="${name}"] .canvas`);
// what heads pass of the upper half of the frequencies, relative to frequency 0: a ratio of means
const passed = (responses) => {
  const low = mean(responses.map((row) => row[0]));
  return low > 0 ? mean(responses.map((row) => mean(row.slice(Math.floor(row.length / 2))))) / low : null;
};
const depths = (list) => [...new Set(models.flatMap((model) => model[list].map((one) => one.depth)))].sort((a, b) => a - b);
const state = { depth: null, singular: null, model: 0, quantity: "", head: [0, 0] };

function byDepth(pick, list) {
  return models.map((model, i) => ({
    name: model.name, colour: colours[i], dots: true, points: model[list].map((one) => [one.depth, pick(one)]),
  }));
}

const layerAxis = { label: "layer", low: 0, whole: true };
const afterLayer = (depth) => (depth === 0 ? "input" : `after layer ${depth}`);

function drawFeatures() {
  const plot = (name, pick, y, usual) =>
    linePlot(canvasOf(name), { plot: name, series: byDepth(pick, "features"), x: layerAxis, y, usual, at: afterLayer });
  plot("cosine", (one) => one.cosine, { label: "cosine similarity", low: 0, high: 1 }, report.usual.similarity);
  plot("rank", (one) => (known(one.effective_rank) ? (100 * one.effective_rank) / one.most_rank : null),
    { label: "effective rank, % of most", low: 0, high: 100 });
  plot("residual", (one) => one.residual, { label: "rank-one residual", low: 0, high: 1 });
  plot("norm", (one) => one.norm, { label: "token norm", low: 0 });
}

function drawSingular() {
  const series = models.map((model, i) => {
    const found = model.features.find((one) => one.depth === state.singular);
    const values = found ? found.singular_values : [];
    const last = Math.max(1, values.length - 1);
    return { name: model.name, colour: colours[i], points: values.map((value, at) => [at / last, value]) };
  });
  linePlot(canvasOf("singular"), {
    plot: "singular", series, x: { label: "index of the singular value, as a share of all", low: 0, high: 1 },
    y: { label: "σ / σ₁", low: 0, high: 1 }, at: (x) => `at ${(100 * x).toFixed(0)} % of the values`,
  });
}

function responseSeries(layerOf) {
  const series = [];
  models.forEach((model, number) => {
    const colour = colours[number];
    const layer = layerOf(model);
    if (!layer || !layer.spectrum) return;
    const { frequencies, map_response: map, filter_response: filtered } = layer.spectrum;
    const over = (rows) => frequencies.map((f, i) => [f, mean(rows.map((row) => row[i]))]);
    series.push({ name: model.name, colour, points: over(filtered) });
    if (layer.filter !== null)
      series.push({ name: `${model.name}, map alone`, colour, dashed: true, points: over(map) });
  });
  return series;
}

const frequencyAxis = { label: "frequency, cycles per token", low: 0, high: 0.5 };
const atFrequency = (f) => `frequency ${show(f)}`;

function drawResponse() {
  linePlot(canvasOf("response"), {
    plot: "response", series: responseSeries((model) => model.attention.find((one) => one.depth === state.depth)),
    x: frequencyAxis, y: { label: "gain", low: 0, high: 1 }, at: atFrequency,
    nothing: "Not measured: the report was made without spectral measurements.",
  });
}

function drawPanels() {
  const canvas = canvasOf("layers");
  const list = depths("attention");
  const rows = list.map((depth) => responseSeries((model) => model.attention.find((one) => one.depth === depth)));
  // all panels have the same axes, so that layers can be compared
  const gains = rows.flat().flatMap((one) => one.points.map(([, y]) => y).filter(known));
  const whole = zoomed.has("layers") ? gains : [0, 1, ...gains];
  const [lowest, highest] = [Math.min(...whole), Math.max(...whole)];
  if (!rows.some((series) => series.length)) {
    canvas.replaceChildren(element("p", { class: "nothing" }, "Not measured."));
    return;
  }
  canvas.replaceChildren();
  const drawn = list.map((depth) => {
    const inside = element("div", { class: "canvas" });
    const button = element("button", { class: "panel", type: "button", "data-depth": depth, "aria-pressed": String(depth === state.depth) },
      element("b", {}, `layer ${depth}`), inside);
    button.addEventListener("click", () => setDepth(depth));
    canvas.append(button);
    return inside;
  });
  drawn.forEach((inside, i) => linePlot(inside, {
    series: rows[i], x: frequencyAxis, y: { label: "gain", low: lowest, high: highest }, small: true, height: 92,
    title: `gain over frequency, layer ${list[i]}`,
  }));
}

function setDepth(depth) {
  state.depth = depth;
  document.getElementById("response-depth").value = String(depth);
  for (const panel of document.querySelectorAll(".panel"))
    panel.setAttribute("aria-pressed", String(Number(panel.dataset.depth) === depth));
  drawResponse();
}

function quantities(model) {
  const most = Math.max(...model.attention.flatMap((layer) => layer.coefficients.map((row) => row.length)));
  const found = [];
  for (let k = 0; k < most; k++) {
    const usual = k === 1 ? 1 : 0;
    const power = ["the token itself, c₀", "attention, c₁", "attention twice, c₂"][k] || `power ${k}, c${k}`;
    found.push({
      key: `c${k}`, name: `coefficient of ${power}`, middle: usual,
      pick: (layer, head) => layer.coefficients[head][k] ?? 0,
      meaning: `Faint is ordinary attention (${usual}); blue is below, orange above.`,
    });
  }
  const spectral = model.attention.some((layer) => layer.spectrum);
  if (spectral) found.push({
    key: "high", name: "high frequencies, relative to f = 0", middle: 0,
    // a head that removes frequency 0 would leave all others faint
    pick: (layer, head) => (layer.spectrum ? Math.min(2, passed([layer.spectrum.filter_response[head]]) ?? 2) : null),
    meaning: "Mean gain over the upper half of the frequencies, divided by that at frequency 0 (2 at most): faint heads smooth, strong ones pass detail.",
  });
  found.push({
    key: "entropy", name: "attention entropy, share of its maximum", middle: 0,
    pick: (layer, head) => layer.entropy_share[head], meaning: "Strong: looks everywhere. Faint: looks at few tokens.",
  });
  found.push({
    key: "energy", name: "Dirichlet energy after the layer", middle: 0,
    pick: (layer, head) => layer.energy_after[head], meaning: "Faint: neighbours on the graph have become equal.",
  });
  return found;
}

const signed = (value) => `${value < 0 ? "−" : "+"} ${show(Math.abs(value))}`;
const superscript = ["", "", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"];
function formula(row) {
  const terms = row.map((value, k) => [value, k === 0 ? "I" : `A${superscript[k] ?? `^${k}`}`]).filter(([value]) => value);
  if (!terms.length) return "H = 0";
  return `H = ${terms.map(([value, name], i) => `${i ? signed(value) : show(value).replace("-", "−")}·${name}`).join(" ")}`;
}

const noPolynomial = "This model's method is not a polynomial of its attention maps: its tokens are shown, its response is not.";

function drawHeat() {
  const model = models[state.model];
  if (!model.attention.length) {
    document.getElementById("heat-meaning").textContent = "";
    canvasOf("heat").replaceChildren(element("p", { class: "nothing" }, noPolynomial));
    return;
  }
  const list = quantities(model);
  const quantity = list.find((one) => one.key === state.quantity) || list[0];
  document.getElementById("heat-meaning").textContent = quantity.meaning;
  const values = model.attention.flatMap((layer) => layer.coefficients.map((_, head) => quantity.pick(layer, head)));
  const largest = Math.max(1e-9, ...values.filter(known).map((value) => Math.abs(value - quantity.middle)));
  // an untouched filter is faint all over, not a storm of rounding errors
  const scale = Math.max(largest, 1e-3);
  const both = quantity.key.startsWith("c");
  heatMap(canvasOf("heat"), {
    title: `${quantity.name}, ${model.name}`,
    rows: model.attention.map((layer) => ({
      label: String(layer.depth),
      cells: layer.coefficients.map((row, head) => ({
        value: quantity.pick(layer, head),
        lines: [
          `${quantity.name}: ${show(quantity.pick(layer, head))}`, formula(row),
          `${layer.verdict[head]} by Theorem 3.1`, `entropy share ${show(layer.entropy_share[head])}`,
        ],
      })),
    })),
    from: both ? quantity.middle - scale : 0, to: quantity.middle + scale,
    colourOf: (value) => diverging((value - quantity.middle) / scale),
    chosen: state.head,
    choose: (row, column) => { state.head = [row, column]; drawHead(); },
  });
}

function drawHead() {
  const model = models[state.model];
  if (!model.attention.length) {
    document.getElementById("head-title").textContent = model.name;
    document.getElementById("head-facts").textContent = noPolynomial;
    for (const plot of ["head-response", "head-sigma"]) canvasOf(plot).replaceChildren();
    return;
  }
  const [row, head] = state.head;
  const layer = model.attention[row];
  const coefficients = layer.coefficients[head];
  document.getElementById("head-title").textContent = `${model.name}, layer ${layer.depth}, head ${head + 1}`;
  document.getElementById("head-facts").textContent =
    `${formula(coefficients)}: ${layer.verdict[head]} by Theorem 3.1; entropy share ${show(layer.entropy_share[head])}; ` +
    `energy ${show(layer.energy_before[head])} → ${show(layer.energy_after[head])}. ${layer.name}.`;
  const spectrum = layer.spectrum;
  const colour = colours[state.model];
  const series = [];
  if (spectrum) {
    const over = (values) => spectrum.frequencies.map((f, i) => [f, values[i]]);
    series.push({ name: "filter", colour, points: over(spectrum.filter_response[head]) });
    series.push({ name: "map alone", colour, dashed: true, points: over(spectrum.map_response[head]) });
  }
  linePlot(canvasOf("head-response"), {
    plot: "head-response", series, x: frequencyAxis, y: { label: "gain", low: 0, high: 1 }, at: atFrequency,
    nothing: "Not measured: the report was made without spectral measurements.",
  });
  const p = (sigma) => coefficients.reduceRight((sum, value) => sum * sigma + value, 0);
  const values = spectrum && spectrum.map_values.length ? spectrum.map_values[head].filter(known) : [];
  const most = Math.max(1, ...values);
  const grid = Array.from({ length: 81 }, (_, i) => (i / 80) * most);
  linePlot(canvasOf("head-sigma"), {
    plot: "head-sigma",
    series: [
      { name: "p(σ)", colour, points: grid.map((s) => [s, p(s)]) },
      { name: "ordinary attention", colour, dashed: true, points: grid.map((s) => [s, s]) },
      { name: "the map's σ", colour, dotsOnly: true, silent: true, points: values.map((s) => [s, p(s)]) },
    ],
    x: { label: "singular value σ of the attention map", low: 0 }, y: { label: "p(σ)", low: 0, high: 1 },
    at: (s) => `σ = ${show(s)}`,
  });
}

function drawAttention() {
  const usable = (values) => values.filter(known);
  linePlot(canvasOf("entropy"), {
    plot: "entropy", series: byDepth((layer) => mean(layer.entropy_share), "attention").map((one, i) => ({
      ...one, band: models[i].attention.map((layer) => {
        const values = usable(layer.entropy_share);
        return values.length ? [layer.depth, Math.min(...values), Math.max(...values)] : [layer.depth, null, null];
      }),
    })),
    x: { label: "layer", whole: true }, y: { label: "entropy share", low: 0, high: 1 }, at: (d) => `layer ${d}`,
  });
  const before = byDepth((layer) => mean(layer.energy_before), "attention")
    .map((one) => ({ ...one, name: `${one.name}, before`, dashed: true, dots: false }));
  linePlot(canvasOf("energy"), {
    plot: "energy", series: [...byDepth((layer) => mean(layer.energy_after), "attention"), ...before],
    x: { label: "layer", whole: true }, y: { label: "Dirichlet energy", low: 0, high: 1 }, at: (d) => `layer ${d}`,
  });
}

function choices(id, options, chosen, changed) {
  const select = document.getElementById(id);
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = String(chosen);
  select.onchange = () => changed(select.value);
}

function chooseModel(index) {
  state.model = index;
  const list = quantities(models[index]);
  const moved = models[index].attention.some((layer) => layer.filter !== null);
  // an unplugged model has the same coefficients everywhere: show what differs
  const usual = moved ? list.find((one) => one.key === "c2") || list[0] : list.find((one) => one.key === "high") || list[list.length - 2];
  state.quantity = list.some((one) => one.key === state.quantity) && state.quantity ? state.quantity : usual.key;
  choices("heat-quantity", list.map((one) => [one.key, one.name]), state.quantity, (key) => { state.quantity = key; drawHeat(); });
  const rows = models[index].attention.length;
  state.head = [Math.min(state.head[0], rows - 1), 0];
  drawHeat();
  drawHead();
}

function drawAll() {
  drawFeatures();
  drawSingular();
  drawResponse();
  drawPanels();
  drawHeat();
  drawHead();
  drawAttention();
}

function start() {
  if (models.length > 1) {
    document.getElementById("legend").append(...models.map((model, i) => element("span", paint(colours[i]), model.name)));
  }
  startModels();
  addTools();
  drawAll();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    drawAll();
  });
  // explanations belong on paper; the table of numbers as well
  window.addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
}

function startModels() {
  const featureDepths = depths("features"), attentionDepths = depths("attention");
  state.singular = featureDepths[featureDepths.length - 1] ?? 0;
  state.depth = attentionDepths[attentionDepths.length - 1];
  const label = (depth) => [depth, depth === 0 ? "input" : String(depth)];
  choices("singular-depth", featureDepths.map(label), state.singular, (value) => { state.singular = Number(value); drawSingular(); });
  choices("response-depth", attentionDepths.map(label), state.depth, (value) => setDepth(Number(value)));
  // the model whose filters differ most from ordinary attention is the one to look at first
  const moved = models.map((model) => Math.max(...model.attention.flatMap((layer) =>
    layer.coefficients.map((row) => Math.max(...row.map((value, k) => Math.abs(value - (k === 1 ? 1 : 0))))))));
  const first = moved.indexOf(Math.max(...moved));
  choices("heat-model", models.map((model, i) => [i, model.name]), first, (value) => chooseModel(Number(value)));
  state.head = [models[first].attention.length - 1, 0];
  chooseModel(first);
}
