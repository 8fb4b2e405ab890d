"use strict";
// Draws what /charts and /rollouts say. All text goes in as text, never as markup: rollouts are a model's words.

const byId = id => document.getElementById(id);
const EVERY_MS = 2000;
let newest = null, read = "", drawing = 0;
const drawn = new Map();  // the figure of each chart that is on the page
const hidden = new Map();  // of each chart, the names that somebody switched off
// Three megabytes: what is to be drawn is asked for meanwhile.
const plotly = new Promise((done, failed) => {
  if (window.Plotly) return done();
  byId("plotly").addEventListener("load", done);
  byId("plotly").addEventListener("error", () => failed(new Error("plotly.js did not load")));
});

function element(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  made.append(...children);
  return made;
}

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  return {
    ...rest,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), size: 12 },
    margin: { l: 62, r: 12, t: 26, b: 42 },  // given, for with automargin plotly draws each chart twice; at the top is its bar
    showlegend: false,  // ours are buttons: a keyboard reaches them, and they wrap as text does
    hoverlabel: { namelength: -1 },
    uirevision: "kept",  // zoom survives new data
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
  };
}

const resized = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.data && target.clientWidth) Plotly.Plots.resize(target);
});

function card({ id, title, says }) {
  const plot = element("div", { class: "plot", id: `plot-${id}`, role: "img", "aria-label": `${title}: ${says}`, tabindex: "0" });
  byId("grid").append(element("article", { id: `card-${id}`, class: id === "timeline" ? "card wide" : "card", "aria-label": title },
    element("h2", { text: title }), element("div", { class: "says", text: says }), element("div", { class: "legend", id: `legend-${id}` }), plot));
  resized.observe(plot);
  hidden.set(id, new Set());
}

// A button for each name, which hides and shows it.
function legend({ id, figure }) {
  const off = hidden.get(id), traces = figure.layout.showlegend === false ? [] : figure.data;
  byId(`legend-${id}`).replaceChildren(...traces.map((trace, at) => {
    const key = element("i", { class: trace.fillcolor || trace.type === "bar" ? "area" : trace.line ? trace.line.dash || "solid" : "mark" });
    key.style.color = (trace.line || trace.marker).color;
    const button = element("button", { "aria-pressed": !off.has(trace.name) }, key, trace.name);
    button.addEventListener("click", () => {
      if (!off.delete(trace.name)) off.add(trace.name);
      button.setAttribute("aria-pressed", !off.has(trace.name));
      Plotly.restyle(byId(`plot-${id}`), { visible: off.has(trace.name) ? "legendonly" : true }, [at]);
    });
    return button;
  }));
}

function draw(chart) {
  const { id, figure } = chart, said = JSON.stringify(figure);
  if (drawn.get(id) === said) return;
  drawn.set(id, said);
  legend(chart);
  const plot = byId(`plot-${id}`);
  if (figure.data.length === 0) {
    Plotly.purge(plot);
    plot.replaceChildren(element("div", { class: "none", text: "nothing measured yet" }));
    return;
  }
  if (plot.querySelector(".none")) plot.replaceChildren();
  if (figure.layout.height) plot.style.height = `${figure.layout.height}px`;
  const data = figure.data.map(trace => ({ ...trace, visible: hidden.get(id).has(trace.name) ? "legendonly" : true }));
  Plotly.react(plot, data, themed(figure.layout), { displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
}

// What is in sight first, and never so many at once that the page does not answer.
async function drawAll() {
  const turn = ++drawing;
  await plotly;
  const inSight = ({ id }) => {
    const { top, bottom } = byId(`card-${id}`).getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  const [seen, others] = [newest.charts.filter(inSight), newest.charts.filter(chart => !inSight(chart))];
  for (const chart of [...seen, ...others]) {
    if (turn !== drawing) return;  // there is something newer to draw
    draw(chart);
    await new Promise(done => setTimeout(done));
  }
}

async function refresh() {
  try {
    const response = await fetch("/charts");
    if (!response.ok) throw new Error(await response.text());
    const text = await response.text();
    if (text !== read) {  // redrawing would take a label from under the mouse
      newest = JSON.parse(text);
      read = text;
      show();
    }
    const broken = newest.runs.flatMap(run => run.unreadable);
    byId("trouble").textContent = broken.length ? `cannot be read: ${broken.join(", ")}` : "";
  } catch (error) {
    byId("trouble").textContent = `the dashboard's server does not answer (${error.message})`;
  }
}

function show() {
  const [run, ...others] = newest.runs;
  document.title = `${run.name} · step ${run.step}`;
  byId("name").textContent = [run, ...others].map(one => one.name).join(" against ");
  byId("status").textContent = run.status;
  byId("status").dataset.status = run.status;
  byId("step").textContent = `step ${run.step}`;
  byId("tiles").replaceChildren(...newest.tiles.map(tile =>
    element("div", { class: "tile" }, element("span", { text: tile.name }), element("b", { text: tile.value }))));
  newest.charts.filter(chart => !byId(`card-${chart.id}`)).forEach(card);
  drawAll().catch(error => { byId("trouble").textContent = error.message; });
  const which = byId("which"), chosen = which.value, { rollouts, evals } = newest.steps;
  if (which.options.length === rollouts.length + evals.length) return;
  const options = (of, steps) => [...steps].reverse().map(step => element("option", { value: `step=${step}&of=${of}`, text: step }));
  which.replaceChildren(...options("rollouts", rollouts));
  if (evals.length) which.append(element("optgroup", { label: "evaluations" }, ...options("evals", evals)));
  if ([...which.options].some(option => option.value === chosen)) which.value = chosen;
}

// Rollouts

const TOKENS = 3000;  // a sample's that are shown at once: each is an element
let asked = 0;

function message(text, kind) {
  byId("groups").replaceChildren(element("div", { class: kind, text }));
}

async function ask(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

async function loadRollouts() {
  const step = byId("which").value, turn = ++asked;
  if (!step) return message("no rollouts yet", "none");
  try {
    const groups = await ask(`/rollouts?${step}`);
    if (turn === asked) byId("groups").replaceChildren(...groups.map(group => groupCard(step, group)));
  } catch (error) {
    if (turn === asked) message(error.message, "trouble");
  }
}

function groupCard(step, group) {
  const mean = group.mean_reward === null ? "unscored" : `mean reward ${group.mean_reward.toFixed(3)}`;
  const card = element("details", {},
    element("summary", { text: `${group.prompt_id} · ${mean} · ${group.num_samples} samples · ${group.prompt}` }));
  card.addEventListener("toggle", async () => {
    if (!card.open || card.children.length > 1) return;
    const body = element("div", { class: "says", text: "loading" });
    card.append(body);
    try {
      const whole = await ask(`/rollouts?${step}&prompt=${encodeURIComponent(group.prompt_id)}`);
      body.replaceWith(element("div", { class: "tokens", text: whole.prompt }),
        element("div", { class: "says", text: whole.ground_truth ? `ground truth: ${whole.ground_truth}` : "" }),
        element("div", { class: "samples" }, ...whole.samples.map(sampleCard)));
    } catch (error) {
      body.textContent = error.message;
      body.className = "trouble";
    }
  });
  return card;
}

function sampleCard(sample) {
  const facts = [sample.rollout_id, sample.reward === null ? sample.verdict : `reward ${sample.reward}`,
    sample.advantage === null ? null : `advantage ${sample.advantage.toFixed(3)}`, sample.fate, sample.finish_reason, sample.worker];
  const tokens = element("div", { class: "tokens", tabindex: "0" });
  showTokens(tokens, sample, 0);
  return element("div", { class: "sample" }, element("div", { class: "says", text: facts.filter(Boolean).join(" · ") }), tokens,
    element("div", { class: "says", text: sample.detail || "" }));
}

function showTokens(tokens, sample, from) {
  const to = Math.min(from + TOKENS, sample.tokens.length);
  for (let at = from; at < to; at++) {
    const text = sample.tokens[at];
    const ratio = sample.ratios[at] === null ? "not trained" : `importance ratio ${sample.ratios[at]}`;
    const told = `${JSON.stringify(text)} · logprob ${sample.logprobs[at]} · version ${sample.versions[at]} · ${ratio}`;
    const span = element("span", { text, title: told });
    span.of = { logprobs: sample.logprobs[at], versions: sample.versions[at], ratios: sample.ratios[at] };
    paint(span);
    tokens.append(span);
  }
  if (to === sample.tokens.length) return;
  const more = element("button", { text: `${sample.tokens.length - to} more tokens` });
  more.addEventListener("click", () => { more.remove(); showTokens(tokens, sample, to); });
  tokens.append(more);
}

function paint(span) {
  span.style.background = shade(byId("colour").value, span.of);
}

function shade(by, { logprobs, versions, ratios }) {
  if (by === "logprobs") return `rgba(213,94,0,${Math.min(0.75, logprobs === null ? 1 : -logprobs / 6).toFixed(3)})`;
  if (by === "ratios") {
    if (ratios === null) return "transparent";
    return `rgba(${ratios > 1 ? "213,94,0" : "0,114,178"},${Math.min(0.75, Math.abs(Math.log2(ratios))).toFixed(3)})`;
  }
  const hues = [205, 35, 160, 320, 55];
  return `hsla(${hues[((versions % 5) + 5) % 5]},80%,50%,0.28)`;
}

const LEGENDS = {
  logprobs: "darker: less likely",
  versions: "a new colour: new weights",
  ratios: "orange: the learner finds it likelier than it was when drawn; blue: less likely; none: not trained",
};

function explain() {
  byId("legend").textContent = LEGENDS[byId("colour").value];
}

// The frame around it

function select(name) {
  for (const view of ["charts", "rollouts"]) {
    byId(view).hidden = view !== name;
    byId(`tab-${view}`).setAttribute("aria-selected", String(view === name));
  }
  if (name === "rollouts") loadRollouts();
  else if (newest) show();  // plots were sized while hidden
}

byId("tab-charts").addEventListener("click", () => select("charts"));
byId("tab-rollouts").addEventListener("click", () => select("rollouts"));
byId("which").addEventListener("change", loadRollouts);
byId("colour").addEventListener("change", () => { explain(); document.querySelectorAll(".tokens span").forEach(paint); });
byId("follow").addEventListener("click", event => {
  const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(on));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn.clear(); if (newest) show(); });

async function follow() {
  if (byId("follow").getAttribute("aria-pressed") === "true" && !document.hidden && !byId("charts").hidden) await refresh();
  setTimeout(follow, EVERY_MS);
}
explain();
refresh().then(() => setTimeout(follow, EVERY_MS));
