// Draws the memory and the timeline with Vega-Lite, and moves their time axes together.
// The data is columns of numbers (chart_data.py). Colours are those of the page's style sheet.

const data = JSON.parse(document.getElementById("data").textContent);
const range = { lo: 0, hi: data.end };
let views = [];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const roleColor = (role) => color(role === "other" ? "scalars" : role);
const narrow = () => window.innerWidth < 600;

// Columns to rows: {time: [0, 1], op: [5, 6]} -> [{time: 0, op: 5}, {time: 1, op: 6}]
function rows(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function size(number) {  // of the unit of the axis
  let unit = UNITS.indexOf(data.byte_unit);
  for (; unit > 0 && Math.abs(number) < 1; unit--) number *= 1024;
  return `${Number(number.toPrecision(4))} ${UNITS[unit]}`;
}
const duration = (number) => `${Number(number.toPrecision(4))} ${data.time_unit}`;

// What a tooltip shows: an object becomes a table.
const text = (op) => data.texts[op] ?? "";
function memoryTip(row) {
  const roles = data.roles.filter((role) => row[role] > 0).reverse().map((role) => [data.words[role], size(row[role])]);
  const host = row.host ? [["host memory", size(row.host)]] : [];
  return Object.fromEntries([["op", text(row.op)], ["from", duration(row.time)], ["all", size(row.total)], ...roles, ...host]);
}
const eventTip = (row) => ({
  name: row.name, takes: duration(row.end - row.start), from: duration(row.start), kind: row.kind, op: text(row.op),
});
const memory = rows(data.memory).map((row, i, all) => ({
  ...row, until: i + 1 < all.length ? all[i + 1].time : data.end, tip: memoryTip(row),
}));
const events = rows(data.events).map((row) => ({ ...row, tip: eventTip(row) }));

function config() {
  const ink = color("ink"), soft = color("soft"), rule = color("rule");
  return {
    background: null,
    view: { stroke: null },
    font: getComputedStyle(document.body).fontFamily,
    axis: { labelColor: soft, titleColor: soft, domainColor: rule, tickColor: rule, gridColor: rule,
            labelFontSize: narrow() ? 10 : 12, titleFontSize: 12, titleFontWeight: "normal" },
    text: { color: ink },
  };
}

const time = {
  type: "quantitative",
  scale: { domainMin: { expr: "lo" }, domainMax: { expr: "hi" }, nice: false, zero: false },
  axis: { title: `time in ${data.time_unit}`, grid: false, tickCount: narrow() ? 4 : 10 },
};
const params = () => [{ name: "lo", value: range.lo }, { name: "hi", value: range.hi }];
// The width of the vertical axes: the same, so that both charts have the same width.
const longest = Math.max(...data.queues.map((name) => name.length));
const edge = () => Math.min(Math.max(7 * longest + 10, 76), narrow() ? 96 : 170);
const common = () => ({ width: "container", autosize: { type: "fit-x", contains: "padding" }, params: params(), config: config() });

// Text on top of areas: twice, the first time with a thick outline in the colour of the paper.
function labels(mark, encoding) {
  const halo = { stroke: color("paper"), strokeWidth: 4, strokeJoin: "round" };
  return [halo, {}].map((more) => ({ mark: { type: "text", clip: true, ...mark, ...more }, encoding: { ...encoding, text: { field: "label" } } }));
}

function memoryChart() {
  const x = { ...time, field: "time" };
  const peak = memory.find((row) => row.peak);
  const left = peak.time < data.end / 2;
  const tooltip = { expr: "datum.tip" };
  const y = (field, more) => ({ field, type: "quantitative", axis: { title: null, labelExpr: `datum.label + " ${data.byte_unit}"`, tickCount: 5, minExtent: edge(), maxExtent: edge() }, ...more });
  const layer = [
    {
      transform: [{ fold: data.roles, as: ["role", "bytes"] }, { calculate: `indexof(${JSON.stringify(data.roles)}, datum.role)`, as: "rank" }],
      mark: { type: "area", interpolate: "step-after", clip: true, strokeWidth: 0 },
      encoding: {
        x, y: y("bytes", { stack: "zero" }), order: { field: "rank" },
        color: { field: "role", type: "nominal", legend: null, scale: { domain: data.roles, range: data.roles.map(roleColor) } },
      },
    },
    {
      mark: { type: "rect", clip: true, opacity: 0, tooltip },
      encoding: { x, x2: { field: "until" }, y: { value: 0 }, y2: { value: "height" } },
    },
    {
      data: { values: [{ ...peak, label: `peak ${peak.total.toPrecision(4)} ${data.byte_unit}` }] },
      layer: [
        { mark: { type: "point", filled: true, size: 70, color: color("ink"), clip: true, tooltip }, encoding: { x, y: y("total") } },
        ...labels({ align: left ? "left" : "right", dx: left ? 8 : -8, dy: -10, fontSize: 13, fontWeight: 600 }, { x, y: y("total") }),
      ],
    },
  ];
  if (data.memory.host) {
    layer.push({ mark: { type: "line", interpolate: "step-after", color: color("ink"), strokeWidth: 1.2, clip: true }, encoding: { x, y: y("host") } });
  }
  if (data.limit !== null) {
    const values = [{ limit: data.limit, label: `may use ${data.limit.toPrecision(4)} ${data.byte_unit}` }];
    layer.push({
      data: { values },
      layer: [
        { mark: { type: "rule", strokeDash: [6, 4], color: color("bad") }, encoding: { y: y("limit") } },
        // at the other end than the peak
        ...labels({ align: left ? "right" : "left", x: left ? "width" : 0, dx: left ? -4 : 6, dy: -9, color: color("bad"), fontSize: 12 }, { y: y("limit") }),
      ],
    });
  }
  const top = 1.15 * Math.max(peak.total, data.limit ?? 0, ...(data.memory.host ?? []));
  layer[0].encoding.y.scale = { domain: [0, top], nice: false };
  return { ...common(), height: narrow() ? 220 : 300, data: { values: memory }, layer };
}

function timelineChart() {
  const y = { field: "queue", type: "nominal", sort: data.queues, scale: { domain: data.queues, paddingInner: 0.25, paddingOuter: 0.15 },
              axis: { title: null, domain: false, ticks: false, minExtent: edge(), maxExtent: edge(), labelLimit: edge() - 6 } };
  const x = { ...time, field: "start" };
  const kinds = [...new Set(data.events.kind)].sort();
  const pixels = "(scale('x', datum.end) - scale('x', datum.start))";
  return {
    ...common(),
    height: data.queues.length * (narrow() ? 26 : 32),
    data: { values: events },
    layer: [
      {
        mark: { type: "rect", clip: true, stroke: { expr: `${pixels} > 4 ? "${color("paper")}" : scale("color", datum.kind)` },
                strokeWidth: 0.7, tooltip: { expr: "datum.tip" } },
        encoding: {
          x, x2: { field: "end" }, y,
          color: { field: "kind", type: "nominal", legend: null, scale: { domain: kinds, range: kinds.map((kind) => color(kind.replaceAll(" ", "-"))) } },
        },
      },
      {
        mark: { type: "text", align: "left", dx: 4, fontSize: 11, color: "#ffffff", clip: true,
                limit: { expr: `max(1, ${pixels} - 8)` }, opacity: { expr: `${pixels} > 40 ? 1 : 0` } },
        encoding: { x, y, text: { field: "name" } },
      },
    ],
  };
}

// --- zoom: both charts have the signals lo and hi ---

function show(lo, hi) {
  const width = Math.min(Math.max(hi - lo, data.end * 1e-4), data.end);
  range.lo = Math.min(Math.max(0, lo), data.end - width);
  range.hi = range.lo + width;
  for (const view of views) view.signal("lo", range.lo).signal("hi", range.hi).runAsync();
}

function zoom(factor, at = (range.lo + range.hi) / 2) {
  show(at - (at - range.lo) * factor, at + (range.hi - at) * factor);
}

function makeMovable(element) {
  const width = () => Math.max(1, element.clientWidth - edge());
  const at = (event) => range.lo + ((event.clientX - element.getBoundingClientRect().left - edge()) / width()) * (range.hi - range.lo);
  element.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;  // the wheel alone scrolls the page
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, at(event));
  }, { passive: false });
  let from = null;
  element.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") from = at(event); });
  window.addEventListener("pointermove", (event) => {
    if (from !== null) show(range.lo + from - at(event), range.hi + from - at(event));
  });
  window.addEventListener("pointerup", () => { from = null; });
}

async function draw() {
  for (const view of views) view.finalize();
  views = [];
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  const options = { mode: "vega-lite", actions: false, renderer: "canvas", tooltip: { theme: dark ? "dark" : "light" } };
  for (const [id, make] of [["memory-chart", memoryChart], ["timeline-chart", timelineChart]]) {
    const element = document.getElementById(id);
    try {
      views.push((await window.vegaEmbed(element, make(), options)).view);
    } catch (error) {
      element.classList.add("failed");
      element.textContent = `This browser cannot draw the chart: ${error.message}`;
      console.error(error);
    }
  }
  document.body.dataset.drawn = String(views.length);
}

for (const button of document.querySelectorAll("[data-zoom], [data-pan]")) {
  button.addEventListener("click", () => {
    const width = range.hi - range.lo;
    if (button.dataset.pan) show(range.lo + button.dataset.pan * width, range.hi + button.dataset.pan * width);
    else if (button.dataset.zoom === "reset") show(0, data.end);
    else zoom(Number(button.dataset.zoom));
  });
}
document.getElementById("copy").addEventListener("click", async (event) => {
  const code = document.querySelector("#code pre").textContent;
  try {
    await navigator.clipboard.writeText(code);
    event.target.textContent = "Copied";
  } catch {  // without permission: select it
    getSelection().selectAllChildren(document.querySelector("#code pre"));
    event.target.textContent = "Selected";
  }
});
for (const id of ["memory-chart", "timeline-chart"]) makeMovable(document.getElementById(id));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
await draw();
