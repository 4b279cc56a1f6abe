// The dashboard: asks the server for its state every second, and draws. The server sends totals and its own clock;
// rates are made here, from two states. Nothing is loaded from elsewhere, and nothing is kept when the page closes.

import { drawCharts, HISTORY_S, seconds } from "./charts.js";
import { bytesOf, durationOf, percentOf, sentence, tenths, timeOf, whole } from "./format.js";

const POLL_MS = 1000;
const AWAY_POLL_MS = 2000; // while the server does not answer
const PATIENCE_MS = 5000;
const RATE_S = 3; // a rate is over so many seconds, since tokens come in steps
const HEAT_S = 10;
const MISS_RATES = [0.5, 0.05, 0.005]; // at the ramp's low end, middle and high end: misses are what costs
const POOLS = {
  device_slots: ["Device pool", "slots"],
  host_pages: ["Host pool", "pages"],
  reservations: ["Reservations", "requests"],
  selection_state_pages: ["Selection state", "pages"],
};

// Not relative to the page's own address, which may hold a name and a password that fetch does not accept.
const STATE_URL = new URL("dashboard/state", location.origin + location.pathname);

const element = (id) => document.getElementById(id);

let states = []; // of the last HEAT_S seconds and a little more
const points = []; // what the charts show: {at, rate, ttft, ...}; null where there is nothing to show
let awaySince = null;

// Asking

async function poll() {
  try {
    const response = await fetch(STATE_URL, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!response.ok) throw new Error(refusalOf(response.status));
    show(await response.json());
  } catch (error) {
    showAway(error);
  }
  setTimeout(poll, awaySince === null ? POLL_MS : AWAY_POLL_MS);
}

function refusalOf(status) {
  return status === 401 ? "The server wants another API key: reload this page." : `The server answers with status ${status}.`;
}

function showAway(error) {
  awaySince ??= new Date();
  const what = error instanceof TypeError || error.name === "TimeoutError" ? "The server does not answer." : error.message;
  const shown = states.length ? " What you see is from before." : "";
  showStatus("away", "not answering", `${what}${shown} Asking again every 2 s, since ${awaySince.toLocaleTimeString()}.`);
  note({});
  drawCharts(points);
}

function showStatus(kind, word, message = "") {
  element("light").className = kind;
  setText("status", word);
  setText("banner", message);
  element("banner").hidden = !message;
  element("banner").className = kind;
  element("main").classList.toggle("stale", kind === "away");
}

// Showing

function show(state) {
  awaySince = null;
  if (states.length && states[0].started !== state.started) {
    states = []; // another server than before: its totals begin anew
    note({});
  }
  states.push(state);
  while (states.length > 2 && states[1].clock < state.clock - HEAT_S) states.shift();
  const rate = rateOf(state, "output_tokens");
  note({ rate, ...requestsOf(state), ...latenciesOf(state) });
  showHead(state);
  showFigures(state, rate);
  showPools(state);
  showHeat(state);
  drawCharts(points);
}

// Keep figures for the charts. None: their lines are broken here.
function note(figures) {
  points.push({ at: seconds(), ...figures });
  while (points[0].at < seconds() - HISTORY_S) points.shift();
}

function showHead(state) {
  const busy = state.unfinished > 0;
  if (state.refusal) showStatus("ending", "unavailable", sentence(state.refusal));
  else showStatus("live", busy ? "serving" : "idle");
  setText("model", state.model);
  setText("uptime", `up ${durationOf(Date.now() / 1000 - state.started)}`);
  document.title = `${busy ? `${state.unfinished} · ` : ""}hisparse`;
}

function showFigures(state, rate) {
  setText("throughput", rate === null ? "–" : (rate && rate < 10 ? tenths : whole).format(rate));
  const read = rateOf(state, "prompt_tokens");
  setText("throughput-aside", `${whole.format(state.output_tokens)} tokens since the start; reading ${whole.format(read ?? 0)} prompt tokens/s`);
  for (const name of ["running", "waiting", "retracted"]) setText(name, whole.format(state[name]));
  const ended = Object.entries(state.ended).map(([reason, count]) => `${whole.format(count)} ${reason}`);
  const retractions = state.retractions ? `; retracted ${whole.format(state.retractions)} times` : "";
  setText("requests-aside", (ended.length ? `ended: ${ended.join(", ")}` : "none ended yet") + retractions);
  for (const name of ["ttft", "tpot"]) showLatency(name, state[name]);
}

function showLatency(name, latency) {
  const [value, unit] = latency ? timeOf(latency.p50) : ["–", ""];
  setText(name, value);
  setText(`${name}-unit`, latency ? `${unit} median` : "");
  const answers = latency && `${whole.format(latency.count)} ${latency.count === 1 ? "answer" : "answers"}`;
  setText(`${name}-aside`, latency ? `90 % within ${timeOf(latency.p90).join(" ")}, of ${answers}` : "no answers in the last minute");
  element(`${name}-keys`).hidden = !latency;
}

function showPools(state) {
  const pools = element("pools");
  const names = Object.keys(state.pools);
  if (pools.dataset.names !== names.join()) {
    pools.dataset.names = names.join();
    pools.replaceChildren(...names.map(newPool));
  }
  names.forEach((name, i) => fillPool(pools.children[i], name, state.pools[name], state.pool_bytes[name]));
}

function newPool(name) {
  const pool = make("div", "pool");
  const title = make("div", "name");
  title.append(make("span", "title", (POOLS[name] ?? [name])[0]), make("span", "percent"));
  const track = make("div", "track");
  track.append(make("div", "fill"));
  const amounts = make("div", "amounts");
  amounts.append(make("span", "amount"), make("span", "bytes"));
  pool.append(title, track, amounts);
  return pool;
}

function fillPool(pool, name, { used, size }, bytes) {
  const share = size ? used / size : 0;
  const unit = (POOLS[name] ?? [name, ""])[1];
  pool.querySelector(".percent").textContent = `${whole.format(100 * share)} %`;
  pool.querySelector(".fill").style.width = `${100 * share}%`;
  pool.querySelector(".amount").textContent = `${whole.format(used)} of ${whole.format(size)} ${unit}`;
  pool.querySelector(".bytes").textContent = bytes === undefined ? "" : `${bytesOf(share * bytes)} of ${bytesOf(bytes)}`;
}

// Hit rates: of the last seconds while there are any, or else since the start

function showHeat(state) {
  const [rates, when] = hitRates(state);
  const heat = element("heat");
  if (heat.children.length !== rates.length) buildHeat(rates.length);
  rates.forEach((rate, layer) => {
    const cell = heat.children[layer];
    cell.title = `layer ${layer}: ${rate === null ? "nothing selected yet" : percentOf(rate)}`;
    cell.style.backgroundColor = rate === null ? "" : heatColour(rate);
  });
  const summary = summaryOf(rates, when);
  setText("heat-aside", summary + fetchedOf(state));
  heat.setAttribute("aria-label", `Hit rate by layer: ${summary}`);
}

function hitRates(state) {
  const before = states[0];
  const since = (name) => state[name].map((count, layer) => count - (before[name][layer] ?? 0));
  const [hits, misses] = [since("hits"), since("misses")];
  const isRecent = hits.some((count, layer) => count + misses[layer] > 0);
  const [hit, miss] = isRecent ? [hits, misses] : [state.hits, state.misses];
  const rates = hit.map((count, layer) => (count + miss[layer] ? count / (count + miss[layer]) : null));
  return [rates, isRecent ? `in the last ${HEAT_S} s` : "since the start"];
}

function summaryOf(rates, when) {
  const known = rates.filter((rate) => rate !== null);
  if (!known.length) return "no selections yet";
  const mean = known.reduce((sum, rate) => sum + rate, 0) / known.length;
  const lowest = Math.min(...known);
  return `mean ${percentOf(mean)}, lowest ${percentOf(lowest)} (layer ${rates.indexOf(lowest)}), ${when}`;
}

function fetchedOf(state) {
  const bytes = (one) => one.misses.reduce((sum, count) => sum + count, 0) * one.record_bytes;
  const before = states[0];
  if (state.clock <= before.clock) return "";
  return `; ${bytesOf((bytes(state) - bytes(before)) / (state.clock - before.clock))}/s fetched from the host`;
}

function buildHeat(count) {
  const every = [1, 2, 5, 10, 20, 50].find((step) => count / step <= 20) ?? 100;
  element("heat").replaceChildren(...Array.from({ length: count }, () => make("div", "cell")));
  element("heat-axis").replaceChildren(...Array.from({ length: count }, (_, layer) => axisLabel(layer, every)));
  const [low, middle, high] = MISS_RATES.map((miss) => `${+(100 * (1 - miss)).toFixed(1)} %`);
  setText("heat-low", `${low} or less`);
  setText("heat-middle", middle);
  setText("heat-high", `${high} or more`);
}

function axisLabel(layer, every) {
  const label = make("span");
  if (layer % every) return label;
  const middle = make("i");
  middle.append(make("b", "", String(layer)));
  label.append(middle);
  return label;
}

function heatColour(rate) {
  const [most, , least] = MISS_RATES;
  const miss = Math.min(most, Math.max(least, 1 - rate));
  const share = Math.log(most / miss) / Math.log(most / least);
  return `color-mix(in oklab, var(--heat-high) ${(100 * share).toFixed(1)}%, var(--heat-low))`;
}

// Figures from states

function rateOf(state, name) {
  const before = states.find((one) => one.clock >= state.clock - RATE_S - 0.5);
  return before && before.clock < state.clock ? (state[name] - before[name]) / (state.clock - before.clock) : null;
}

function requestsOf({ running, waiting, retracted }) {
  return { running, waiting, retracted };
}

function latenciesOf({ ttft, tpot }) {
  return { ttft: ttft?.p50, ttft90: ttft?.p90, tpot: tpot?.p50, tpot90: tpot?.p90 };
}

function setText(id, text) {
  if (element(id).textContent !== text) element(id).textContent = text;
}

function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

poll();
