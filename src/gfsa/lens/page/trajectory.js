// Coefficients over training: by layer (mean over heads), and head by head in one panel a layer.

const trajectories = report.trajectories;
const path = { run: 0, power: 0 };
const usualOf = (power) => (power === 1 ? 1 : 0);
const stepAxis = { label: "step" };
const atStep = (step) => `step ${step}`;
// the first layer is faint and the last one strong
const shadeOf = (i, count, colour) =>
  `color-mix(in srgb, var(--series-${colour}) ${Math.round(25 + (75 * (i + 1)) / count)}%, var(--card))`;
const powersOf = (run) => Math.max(...run.layers.flatMap((layer) => layer.coefficients.flatMap((heads) => heads.map((row) => row.length))));
const coefficientName = (power) => `c${"₀₁₂₃₄₅₆₇₈₉"[power] ?? power}`;

function overSteps(run, pick) {
  return run.steps.map((step, at) => [step, pick(at)]);
}

function drawPathsByLayer(run) {
  const canvas = canvasOf("path");
  canvas.replaceChildren();
  const count = run.layers.length;
  Array.from({ length: powersOf(run) }, (_, power) => {
    const inside = element("div", { class: "canvas" });
    canvas.append(element("div", { class: "column" }, element("h3", {}, coefficientName(power)), inside));
    return [power, inside];
  }).forEach(([power, inside]) => {
    const values = (layer, at) => layer.coefficients[at].map((row) => row[power]).filter(known);
    linePlot(inside, {
      plot: "path", height: 220, x: stepAxis, at: atStep,
      y: zoomed.has("path") ? { label: coefficientName(power) } : { label: coefficientName(power), low: usualOf(power), high: usualOf(power) },
      series: run.layers.map((layer, i) => ({
        name: `layer ${layer.depth}`, colour: shadeOf(i, count, run.series), points: overSteps(run, (at) => mean(values(layer, at))),
      })),
    });
  });
}

function drawPathsByHead(run) {
  const canvas = canvasOf("path-heads");
  canvas.replaceChildren();
  const { power } = path;
  const rows = run.layers.map((layer) => layer.coefficients[0].map((_, head) => ({
    name: `head ${head + 1}`, colour: shadeOf(head, layer.coefficients[0].length, run.series),
    points: overSteps(run, (at) => layer.coefficients[at][head][power] ?? null),
  })));
  // all panels have the same axes, so that layers can be compared
  const [low, high] = reach(rows.flat(), zoomed.has("path-heads") ? [] : [usualOf(power)]);
  run.layers.map((layer, i) => {
    const inside = element("div", { class: "canvas" });
    canvas.append(element("div", { class: "column" }, element("b", {}, `layer ${layer.depth}`), inside));
    return [inside, i];
  }).forEach(([inside, i]) => linePlot(inside, {
    series: rows[i], x: stepAxis, y: { label: coefficientName(power), low, high }, at: atStep, compact: true, height: 130,
    title: `${coefficientName(power)} over training, layer ${run.layers[i].depth}`,
  }));
}

function drawTrajectories() {
  if (!trajectories.length) return;
  const run = trajectories[path.run];
  document.getElementById("path-scale").style.setProperty("--series", `var(--series-${run.series})`);
  drawPathsByLayer(run);
  drawPathsByHead(run);
}

function startTrajectories() {
  const chooseRun = (value) => {
    path.run = Number(value);
    const powers = powersOf(trajectories[path.run]);
    path.power = Math.min(path.power, powers - 1);
    choices("path-power", Array.from({ length: powers }, (_, k) => [k, coefficientName(k)]), path.power,
      (power) => { path.power = Number(power); drawTrajectories(); });
    drawTrajectories();
  };
  choices("path-run", trajectories.map((run, i) => [i, run.name]), 0, chooseRun);
  chooseRun(0);
}
