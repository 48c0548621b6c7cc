"use strict";
// Small plots in SVG: lines with a crosshair, and a grid of cells.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function show(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  return size < 0.001 ? value.toExponential(1) : Number(value.toPrecision(3)).toString();
}

// about `count` round numbers that cover [low, high]
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step)
    found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

const tip = {
  node: document.getElementById("tip"),
  show(event, title, rows) {
    this.node.replaceChildren(element("b", {}, title));
    for (const row of rows) {
      const line = element("div", {});
      if (row.series !== undefined) line.append(element("i", paint(row.series)));
      line.append(row.text);
      this.node.append(line);
    }
    this.node.hidden = false;
    const width = this.node.offsetWidth, height = this.node.offsetHeight;
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - width - 8);
    const above = event.clientY - height - 12;
    this.node.style.left = `${Math.max(8, left) + window.scrollX}px`;
    this.node.style.top = `${(above < 4 ? event.clientY + 18 : above) + window.scrollY}px`;
  },
  hide() { this.node.hidden = true; },
};

// the colour of a series is the number of a model's colour
const paint = (colour) => ({ "data-series": colour });

// plots whose axes are cut to their data, by name; all others begin and end where their options say
const zoomed = new Set();

// for each line, how many of the later ones lie on it: within 2 pixels at nine of ten common points
function linesAbove(series, sy) {
  const lines = series.map((one) => new Map(one.points.filter(([, y]) => known(y)).map(([x, y]) => [x, sy(y)])));
  const same = (a, b) => {
    const common = [...a.keys()].filter((x) => b.has(x));
    return common.length > 1 && common.filter((x) => Math.abs(a.get(x) - b.get(x)) < 2).length >= 0.9 * common.length;
  };
  const draws = (one) => !one.dotsOnly && !one.silent;
  return series.map((one, i) =>
    draws(one) ? series.flatMap((other, j) => (j > i && draws(other) && same(lines[i], lines[j]) ? [j] : [])) : []);
}

// options: series [{name, colour, dashed, points [[x, y]…], band [[x, low, high]…], dots}],
//          x and y {label, low, high, whole}, usual, height, small, at(x) for the crosshair, plot: its name
function linePlot(canvas, options) {
  const series = options.series.filter((one) => one.points.some(([, y]) => known(y)));
  canvas.drawn = { ...options, series };
  if (!series.length) {
    canvas.replaceChildren(element("p", { class: "nothing" }, options.nothing || "Not measured."));
    return;
  }
  const ends = zoomed.has(options.plot) ? { low: undefined, high: undefined } : options.y;
  // a small plot is part of a button
  const small = Boolean(options.small);
  const width = Math.max(120, canvas.clientWidth || 320);
  const height = options.height || Math.round(Math.min(300, Math.max(190, width * 0.52)));
  const margin = small ? { l: 26, r: 4, t: 4, b: 16 } : { l: 46, r: 12, t: 10, b: 40 };
  const all = series.flatMap((one) => one.points).filter(([, y]) => known(y));
  const bands = series.flatMap((one) => one.band || []);
  const ys = [...all.map(([, y]) => y), ...bands.flatMap(([, a, b]) => [a, b]).filter(known)];
  const range = (axis, values) => {
    let low = Math.min(...values, axis.low ?? Infinity);
    let high = Math.max(...values, axis.high ?? -Infinity);
    if (low === high) { low -= 0.5; high += 0.5; }
    return [low, high];
  };
  const [x0, x1] = range(options.x, all.map(([x]) => x));
  let [y0, y1] = range(ends, ys);
  const spread = y1 - y0;
  if (y1 > (ends.high ?? -Infinity)) y1 += spread * 0.05;
  if (y0 < (ends.low ?? Infinity)) y0 -= spread * 0.05;
  const left = margin.l, right = width - margin.r, top = margin.t, bottom = height - margin.b;
  const sx = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const sy = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(make("title", {}, document.createTextNode(options.title || options.y.label || "plot")));

  for (const t of ticks(y0, y1, small ? 2 : 5)) {
    svg.append(make("line", { class: "grid", x1: left, x2: right, y1: sy(t), y2: sy(t) }));
    svg.append(make("text", { x: left - 5, y: sy(t) + 4, "text-anchor": "end" }, show(t)));
  }
  let columns = ticks(x0, x1, small ? 2 : Math.min(10, Math.floor((right - left) / 55)));
  if (options.x.whole) columns = columns.filter((t) => Math.abs(t - Math.round(t)) < 1e-9);
  for (const t of columns) {
    const anchor = small && t === columns[columns.length - 1] ? "end" : "middle";
    svg.append(make("text", { x: sx(t), y: bottom + (small ? 13 : 17), "text-anchor": anchor }, show(t)));
    if (!small) svg.append(make("line", { class: "axis", x1: sx(t), x2: sx(t), y1: bottom, y2: bottom + 4 }));
  }
  svg.append(make("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  if (!small) {
    svg.append(make("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, options.x.label));
  }

  for (const one of series) {
    if (!one.band) continue;
    const usable = one.band.filter(([, a, b]) => known(a) && known(b));
    const upper = usable.map(([x, , b]) => `${sx(x)},${sy(b)}`);
    const lower = usable.map(([x, a]) => `${sx(x)},${sy(a)}`).reverse();
    svg.append(make("polygon", { class: "band", ...paint(one.colour), points: [...upper, ...lower].join(" ") }));
  }
  // where such lines usually are: [share of the x axis, low, high]
  if (options.usual && ends === options.y) {
    const at = (share, y) => `${sx(x0 + share * (x1 - x0))},${sy(y)}`;
    const points = [...options.usual.map(([u, , high]) => at(u, high)), ...options.usual.map(([u, low]) => at(u, low)).reverse()];
    svg.append(make("polygon", { class: "usual", points: points.join(" ") }));
  }
  const above = linesAbove(series, sy);
  series.forEach((one, number) => {
    const points = one.points.filter(([, y]) => known(y));
    // a line with others on it is drawn wide and faint, so that both are seen
    const under = above[number].length;
    const kind = (name) => `mark ${name}${one.dashed ? " dashed" : ""}${under ? " under" : ""}`;
    if (!one.dotsOnly) {
      const d = points.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(2)},${sy(y).toFixed(2)}`).join("");
      const path = make("path", { class: kind("line"), ...paint(one.colour), d });
      if (under) path.style.strokeWidth = 2.2 + (small ? 1.8 : 3.6) * under;
      svg.append(path);
    }
    if (one.dotsOnly || (one.dots && points.length <= 40)) {
      const r = one.dotsOnly ? 2.6 : 3 + 2 * under;
      for (const [x, y] of points)
        svg.append(make("circle", { class: kind("dot"), ...paint(one.colour), cx: sx(x), cy: sy(y), r }));
    }
  });

  const cross = make("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  svg.append(cross);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) * (width / box.width) - left) / (right - left)) * (x1 - x0);
    const near = (one) => one.points.filter(([, y]) => known(y))
      .reduce((best, p) => (Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best));
    const followed = series.filter((one) => !one.silent);
    const x = near(followed[0])[0];
    cross.setAttribute("x1", sx(x));
    cross.setAttribute("x2", sx(x));
    cross.setAttribute("visibility", "visible");
    tip.show(event, options.at ? options.at(x) : `${options.x.label} ${show(x)}`, followed.map((one) => ({
      series: one.colour, text: `${one.name}: ${show(near(one)[1])}`,
    })));
  };
  if (!small) {
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip.hide(); });
  }
  canvas.replaceChildren(svg);
  const groups = above.map((list, i) => [i, ...list]).filter((list) => list.length > 1)
    .filter((list, i, all) => !all.some((other, j) => j < i && list.every((one) => other.includes(one))));
  if (groups.length && !small) {
    const names = groups.map((list) => list.map((one) => series[one].name).join(" = "));
    canvas.append(element("p", { class: "note" }, `On top of each other: ${names.join("; ")}.`));
  }
}

// a colour for a value in [-1, 1], mixed by the style sheet: light, dark and paper differ
function diverging(value) {
  const part = 100 * Math.min(1, Math.abs(value)) ** 0.8;
  return `color-mix(in srgb, var(${value < 0 ? "--low" : "--high"}) ${part.toFixed(1)}%, var(--mid))`;
}

// options: rows [{label, cells [{value, lines}]}], colourOf(value), ends [low, middle, high] labels,
//          chosen [row, column], choose(row, column), headings
function heatMap(canvas, options) {
  canvas.drawn = options;
  const columns = Math.max(...options.rows.map((row) => row.cells.length));
  const width = Math.max(200, canvas.clientWidth || 320);
  const left = 52, top = 22;
  const wide = Math.min(64, (width - left - 4) / columns);
  const tall = Math.max(15, Math.min(30, wide));
  const bottom = top + tall * options.rows.length;
  const height = bottom + 54;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": options.title });
  svg.append(make("text", { x: left - 6, y: top - 8, "text-anchor": "end" }, "head"));
  svg.append(make("text", { x: left - 6, y: bottom + 16, "text-anchor": "end" }, "layer"));
  for (let c = 0; c < columns; c++) {
    if (wide >= 22 || c % Math.ceil(22 / wide) === 0)
      svg.append(make("text", { x: left + wide * (c + 0.5), y: top - 8, "text-anchor": "middle" }, String(c + 1)));
  }
  const cells = [];
  const frame = make("rect", { class: "chosen", rx: 3 });
  const place = (r, c) => {
    for (const cell of cells) cell.node.tabIndex = -1;
    const found = cells.find((cell) => cell.r === r && cell.c === c);
    if (!found) return;
    found.node.setAttribute("tabindex", "0");
    frame.setAttribute("x", left + wide * c);
    frame.setAttribute("y", top + tall * r);
    frame.setAttribute("width", wide);
    frame.setAttribute("height", tall);
  };
  options.rows.forEach((row, r) => {
    svg.append(make("text", { x: left - 6, y: top + tall * (r + 0.5) + 4, "text-anchor": "end" }, row.label));
    row.cells.forEach((cell, c) => {
      const node = make("rect", {
        class: "mark cell", x: left + wide * c, y: top + tall * r, width: wide, height: tall, rx: 3,
        style: `fill: ${known(cell.value) ? options.colourOf(cell.value) : "none"}`, tabindex: "-1", role: "button",
        "aria-label": `layer ${row.label}, head ${c + 1}: ${cell.lines[0]}`, "data-row": r, "data-column": c,
      });
      const pick = () => { place(r, c); options.choose(r, c); };
      node.addEventListener("pointermove", (event) =>
        tip.show(event, `layer ${row.label}, head ${c + 1}`, cell.lines.map((text) => ({ text }))));
      node.addEventListener("pointerleave", () => tip.hide());
      node.addEventListener("click", pick);
      node.addEventListener("keydown", (event) => {
        const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); }
        if (!by) return;
        event.preventDefault();
        const next = cells.find((one) => one.r === r + by[0] && one.c === c + by[1]);
        if (next) { place(next.r, next.c); next.node.focus(); options.choose(next.r, next.c); }
      });
      cells.push({ r, c, node });
      svg.append(node);
    });
  });
  svg.append(frame);
  const bar = Math.min(260, width - left - 20), steps = 40;
  for (let i = 0; i < steps; i++) {
    svg.append(make("rect", {
      x: left + (bar / steps) * i, y: bottom + 20, width: bar / steps + 0.6, height: 10,
      style: `fill: ${options.colourOf(options.from + ((options.to - options.from) * (i + 0.5)) / steps)}`,
    }));
  }
  for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const value = options.from + (options.to - options.from) * part;
    svg.append(make("text", { x: left + bar * part, y: bottom + 46, "text-anchor": anchor }, show(value)));
  }
  canvas.replaceChildren(svg);
  if (options.chosen) place(...options.chosen);
}
