// Lines over the last minutes, drawn into the page's SVG elements. A point is {at, and a value for each line}.

import { tenths, timeOf, whole } from "./format.js";

export const HISTORY_S = 300;
const SPANS_S = [60, 120, HISTORY_S]; // the time axis grows until it is that long
export const seconds = () => performance.now() / 1000; // the clock of the points

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 14, bottom: 16 };
const asTime = (value) => timeOf(value).join(" ");
const asCount = (value) => (value < 10 && value % 1 ? tenths : whole).format(value);

const CHARTS = [
  { id: "throughput-chart", lines: [["rate", "first", "tokens/s"]], format: asCount, isFilled: true },
  {
    id: "requests-chart",
    lines: [["running", "first", "running"], ["waiting", "second", "waiting"], ["retracted", "third", "retracted"]],
    format: asCount,
  },
  { id: "ttft-chart", lines: [["ttft", "first", "median"], ["ttft90", "second", "90 %"]], format: asTime },
  { id: "tpot-chart", lines: [["tpot", "first", "median"], ["tpot90", "second", "90 %"]], format: asTime },
];

const pointers = new Map(); // chart id -> where the pointer is, in pixels from its left

let points = []; // what is shown

// Draw all charts. `latest`: the points, oldest first.
export function drawCharts(latest) {
  points = latest;
  for (const chart of CHARTS) draw(chart);
}

function draw(chart) {
  const svg = document.getElementById(chart.id);
  const { width, height } = svg.getBoundingClientRect();
  const now = points.length ? points.at(-1).at : seconds();
  const top = ceilingOf(chart);
  const span = SPANS_S.find((one) => !points.length || now - points[0].at <= one) ?? HISTORY_S;
  const x = (at) => width * (1 - (now - at) / span);
  const y = (value) => height - MARGIN.bottom - (height - MARGIN.top - MARGIN.bottom) * (value / (top || 1));
  const parts = [...frame(chart, top, span, width, height)];
  for (const [name, kind] of chart.lines) parts.push(...curve(name, kind, chart.isFilled, x, y));
  parts.push(...readout(chart, x, width, height));
  svg.replaceChildren(...parts);
}

// The largest value, rounded up to one that reads well.
function ceilingOf({ lines }) {
  const largest = Math.max(0, ...points.flatMap((point) => lines.map(([name]) => point[name] ?? 0)));
  if (!largest) return 0;
  const power = 10 ** Math.floor(Math.log10(largest));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= largest * 0.999) * power;
}

function frame({ format }, top, span, width, height) {
  const lines = [MARGIN.top, height - MARGIN.bottom].map((y) => shape("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
  const words = [
    label(0, MARGIN.top - 4, "start", top ? format(top).replace(/\.0+(?= )/, "") : ""),
    label(0, height - 3, "start", `${span / 60} min ago`),
    label(width, height - 3, "end", "now"),
  ];
  return [...lines, ...words];
}

// A line broken where nothing is known, with a dot where a stretch has one point only.
function curve(name, kind, isFilled, x, y) {
  const stretches = [[]];
  for (const point of points) {
    if (point[name] === undefined || point[name] === null) stretches.push([]);
    else stretches.at(-1).push([x(point.at).toFixed(1), y(point[name]).toFixed(1)]);
  }
  return stretches.filter((stretch) => stretch.length).flatMap((stretch) => {
    const path = `M${stretch.map((point) => point.join(",")).join("L")}`;
    const line = shape("path", { class: `line ${kind}`, d: stretch.length > 1 ? path : `${path}h0.01` });
    if (!isFilled) return [line];
    const [from, to, floor] = [stretch[0][0], stretch.at(-1)[0], y(0)];
    return [shape("path", { class: `area ${kind}`, d: `${path}L${to},${floor}L${from},${floor}Z` }), line];
  });
}

// What the chart says under the pointer.
function readout(chart, x, width, height) {
  const pointer = pointers.get(chart.id);
  const isKnown = (point, [name]) => point[name] !== undefined && point[name] !== null;
  const some = points.filter((point) => chart.lines.some((line) => isKnown(point, line)));
  if (pointer === undefined || !some.length) return [];
  const point = some.reduce((best, one) => (Math.abs(x(one.at) - pointer) < Math.abs(x(best.at) - pointer) ? one : best));
  const known = chart.lines.filter((line) => isKnown(point, line));
  const when = `${Math.round(points.at(-1).at - point.at)} s ago: `;
  const words = known.map(([name, , title]) => `${chart.format(point[name])} ${title}`).join(", ");
  const at = x(point.at);
  return [
    shape("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom }),
    label(width, MARGIN.top - 4, "end", when + words),
  ];
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function label(x, y, anchor, words) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}

for (const { id } of CHARTS) {
  const svg = document.getElementById(id);
  svg.addEventListener("pointermove", (event) => {
    pointers.set(id, event.clientX - svg.getBoundingClientRect().left);
    drawCharts(points);
  });
  svg.addEventListener("pointerleave", () => {
    pointers.delete(id);
    drawCharts(points);
  });
}
addEventListener("resize", () => drawCharts(points));
