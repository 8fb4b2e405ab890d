"use strict";
// Draws what /charts and /rollouts say. All text goes in as text, never as markup: rollouts are a model's words.

const byId = id => document.getElementById(id);
const EVERY_MS = 2000;
let newest = null, read = "", drawing = 0;
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
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = layout;
  return {
    ...rest,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), size: 12 },
    margin: { l: 48, r: 12, t: 8, b: 36 },
    legend: { orientation: "h", y: 1.03, yanchor: "bottom", x: 0, font: { size: 11 } },
    hoverlabel: { namelength: -1 },
    uirevision: "kept",  // zoom and hidden lines survive new data
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
  };
}

const resized = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.data && target.clientWidth) Plotly.Plots.resize(target);
});

function card({ id, title, says }) {
  const plot = element("div", { class: "plot", id: `plot-${id}`, role: "img", "aria-label": `${title}: ${says}`, tabindex: "0" });
  byId("grid").append(element("article", { id: `card-${id}`, class: id === "timeline" ? "card wide" : "card", "aria-label": title },
    element("h2", { text: title }), element("div", { class: "says", text: says }), plot));
  resized.observe(plot);
}

function draw({ id, figure }) {
  const plot = byId(`plot-${id}`);
  if (figure.data.length === 0) {
    Plotly.purge(plot);
    plot.replaceChildren(element("div", { class: "none", text: "nothing measured yet" }));
    return;
  }
  if (plot.querySelector(".none")) plot.replaceChildren();
  plot.style.height = figure.data.length > 5 ? "330px" : "";  // room for the names
  Plotly.react(plot, figure.data, themed(figure.layout), { displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
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
    byId("trouble").textContent = "";
    if (text === read) return;  // redrawing would take a label from under the mouse
    read = text;
    newest = JSON.parse(text);
  } catch (error) {
    byId("trouble").textContent = `the dashboard's server does not answer (${error.message})`;
    return;
  }
  show();
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
  const which = byId("which"), chosen = which.value;
  if (which.options.length !== newest.steps.length) {
    which.replaceChildren(...[...newest.steps].reverse().map(step => element("option", { value: step, text: step })));
    if (newest.steps.map(String).includes(chosen)) which.value = chosen;
  }
}

// Rollouts

let groups = [];

async function loadRollouts() {
  const step = byId("which").value;
  if (!step) { byId("groups").replaceChildren(element("div", { class: "none", text: "no rollouts yet" })); return; }
  const response = await fetch(`/rollouts?step=${encodeURIComponent(step)}`);
  if (!response.ok) { byId("groups").replaceChildren(element("div", { class: "trouble", text: await response.text() })); return; }
  groups = await response.json();
  byId("groups").replaceChildren(...groups.map(groupCard));
}

function groupCard(group) {
  const mean = group.mean_reward === null ? "unscored" : `mean reward ${group.mean_reward.toFixed(3)}`;
  const card = element("details", {},
    element("summary", { text: `${group.prompt_id} · ${mean} · ${group.samples.length} samples · ${group.prompt.slice(0, 120)}` }));
  card.addEventListener("toggle", () => {
    if (card.open && card.children.length === 1) {
      card.append(element("div", { class: "tokens", text: group.prompt }),
        element("div", { class: "says", text: group.ground_truth ? `ground truth: ${group.ground_truth}` : "" }),
        element("div", { class: "samples" }, ...group.samples.map(sampleCard)));
    }
  });
  return card;
}

function sampleCard(sample) {
  const facts = [sample.rollout_id, sample.reward === null ? sample.verdict : `reward ${sample.reward}`,
    sample.advantage === null ? null : `advantage ${sample.advantage.toFixed(3)}`, sample.fate, sample.finish_reason, sample.worker];
  const tokens = element("div", { class: "tokens", tabindex: "0" });
  const by = byId("colour").value;
  sample.tokens.forEach((text, at) => {
    const ratio = sample.ratios[at] === null ? "not trained" : `importance ratio ${sample.ratios[at]}`;
    const told = `${JSON.stringify(text)} · logprob ${sample.logprobs[at]} · version ${sample.versions[at]} · ${ratio}`;
    tokens.append(element("span", { text, title: told, style: `background:${shade(by, sample, at)}` }));
  });
  return element("div", { class: "sample" }, element("div", { class: "says", text: facts.filter(Boolean).join(" · ") }), tokens,
    element("div", { class: "says", text: sample.detail || "" }));
}

function shade(by, sample, at) {
  if (by === "logprobs") return `rgba(213,94,0,${Math.min(0.75, -sample.logprobs[at] / 6).toFixed(3)})`;
  if (by === "ratios") {
    const ratio = sample.ratios[at];
    if (ratio === null) return "transparent";
    return `rgba(${ratio > 1 ? "213,94,0" : "0,114,178"},${Math.min(0.75, Math.abs(Math.log2(ratio))).toFixed(3)})`;
  }
  const hues = [205, 35, 160, 320, 55];
  return `hsla(${hues[((sample.versions[at] % 5) + 5) % 5]},80%,50%,0.28)`;
}

const LEGENDS = {
  logprobs: "darker: less likely",
  versions: "a new colour: new weights",
  ratios: "orange: the learner finds it likelier than it was when drawn; blue: less likely; none: not trained",
};

function legend() {
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
byId("colour").addEventListener("change", () => { legend(); byId("groups").replaceChildren(...groups.map(groupCard)); });
byId("follow").addEventListener("click", event => {
  const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
  event.currentTarget.setAttribute("aria-pressed", String(on));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => newest && show());

async function follow() {
  if (byId("follow").getAttribute("aria-pressed") === "true" && !document.hidden && !byId("charts").hidden) await refresh();
  setTimeout(follow, EVERY_MS);
}
legend();
refresh().then(() => setTimeout(follow, EVERY_MS));
