// The buttons below a plot: cut its axes to the data, and download it as SVG or CSV.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity", "font-family", "font-size", "font-weight"];

function quoted(value) {
  let text = value === null || value === undefined ? "" : String(value);
  // a spreadsheet would take it for a formula
  if (typeof value === "string" && /^([=@\t\r]|[+-](?![\d.]))/.test(text)) text = `'${text}`;
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvOf = (rows) => rows.map((row) => row.map(quoted).join(",") + "\n").join("");
const canvasesOf = (figure) => {
  const inner = [...figure.querySelectorAll(".canvas .canvas")];
  return (inner.length ? inner : [figure.querySelector(".canvas")]).filter((canvas) => canvas.drawn);
};
const captionOf = (canvas) => canvas.parentElement.querySelector(":scope > b")?.textContent ?? "";

function csvText(figure) {
  const found = canvasesOf(figure);
  if (found.length && found[0].drawn.rows) {
    const rows = found[0].drawn.rows.flatMap((row) => row.cells.map((cell, c) => [row.label, c + 1, cell.value]));
    return csvOf([["layer", "head", found[0].drawn.title], ...rows]);
  }
  const several = found.length > 1;
  const head = [...(several ? ["panel"] : []), "series", found[0]?.drawn.x.label ?? "x", several ? "value" : found[0]?.drawn.y.label ?? "y", "low", "high"];
  const rows = found.flatMap((canvas) => canvas.drawn.series.flatMap((one) => {
    const bands = new Map((one.band || []).map(([x, low, high]) => [x, [low, high]]));
    return one.points.map(([x, y]) => [...(several ? [captionOf(canvas)] : []), one.name, x, y, ...(bands.get(x) ?? ["", ""])]);
  }));
  return csvOf([head, ...rows]);
}

// a copy of an SVG that needs no style sheet
function standing(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((node, i) => {
    const style = getComputedStyle(node);
    copies[i].setAttribute("style", STYLES.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
  });
  for (const unseen of copy.querySelectorAll(".cross, .chosen")) unseen.remove();
  return copy;
}

function svgText(figure) {
  const background = getComputedStyle(figure.closest(".card")).backgroundColor;
  const ink = getComputedStyle(document.body).color;
  const write = (x, y, text, more = {}) => make("text", { x, y, style: `fill:${ink};font:13px sans-serif`, ...more }, text);
  const around = figure.querySelector(".canvas").getBoundingClientRect();
  const names = new Map();
  for (const canvas of canvasesOf(figure))
    for (const one of canvas.drawn.series ?? []) if (!one.silent) names.set(one.name, one);
  const titles = [figure.querySelector("h2, h3")?.textContent ?? ""];
  // on the page, the text above a plot says what its axis shows
  const [first] = canvasesOf(figure);
  if (first?.drawn.y) titles.push(first.drawn.y.label);
  const top = 30;
  const inside = make("g", { transform: `translate(12, ${top})` });
  for (const svg of figure.querySelectorAll(".canvas svg")) {
    const box = svg.getBoundingClientRect();
    const copy = standing(svg);
    for (const [name, value] of [["x", box.left - around.left], ["y", box.top - around.top], ["width", box.width], ["height", box.height]]) copy.setAttribute(name, value);
    inside.append(copy);
    const caption = captionOf(svg.parentElement);
    if (caption) inside.append(write(box.left - around.left + 26, box.top - around.top - 4, caption, { style: `fill:${ink};font:bold 11px sans-serif` }));
  }
  const width = around.width + 24;
  let x = 12, y = around.height + top + 22;
  const legend = make("g");
  for (const one of names.values()) {
    const probe = element("i", { style: `color:var(--series-${one.colour})` });
    document.body.append(probe);
    const resolved = getComputedStyle(probe).color;
    probe.remove();
    const long = 34 + 7.2 * one.name.length;
    if (x + long > width && x > 12) { x = 12; y += 20; }
    legend.append(make("line", { x1: x, x2: x + 18, y1: y - 4, y2: y - 4, stroke: resolved, "stroke-width": 3, "stroke-dasharray": one.dashed ? "5 3" : "none" }));
    legend.append(write(x + 24, y, one.name));
    x += long;
  }
  const height = names.size ? y + 12 : around.height + top + 12;
  const whole = make("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` },
    make("rect", { width, height, fill: background }),
    write(12, 20, titles.join("  ·  "), { style: `fill:${ink};font:bold 14px sans-serif` }), inside, legend);
  return new XMLSerializer().serializeToString(whole);
}

function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function addTools() {
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    const name = figure.dataset.plot;
    const button = (text, title, press) => {
      const made = element("button", { type: "button", title }, text);
      made.addEventListener("click", () => press(made));
      return made;
    };
    const tools = element("p", { class: "tools" });
    if (name !== "heat") {
      const zoom = button("Zoom to data", "Cut the axis to the data, or show it whole", (made) => {
        if (!zoomed.delete(name)) zoomed.add(name);
        made.setAttribute("aria-pressed", String(zoomed.has(name)));
        drawAll();
      });
      zoom.setAttribute("aria-pressed", "false");
      zoom.dataset.tool = "zoom";
      tools.append(zoom);
    }
    tools.append(
      button("SVG", "Download the picture", () => save(`${name}.svg`, "image/svg+xml", svgText(figure))),
      button("CSV", "Download the numbers", () => save(`${name}.csv`, "text/csv", csvText(figure))));
    figure.querySelector(".canvas").after(tools);
  }
}
