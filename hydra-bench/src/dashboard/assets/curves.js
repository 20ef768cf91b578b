// The curves of losses: training as lines, validation as points with lines between them.

import { $, colour, ink, loss } from "/format.js";

/** The most points of a curve before it is asked for again, with fewer of them. */
const MOST = 12000;

let curves = new Map();
let hidden = new Set();
/** The tasks that filters leave out. */
let filtered = new Set();
let plot = null;
let shape = "";

const settings = { log: false, smoothing: 0, x: "step" };

export function begin(all) {
  curves = new Map(all.map((curve) => [curve.task, { ...curve, steps_in_all: 0 }]));
  hidden = new Set();
  plot?.destroy();
  plot = null;
}

/** Takes the lines that are new; true if there are too many points by now. */
export function news(lines) {
  for (const line of lines) {
    if (!line.task) continue;
    if (!curves.has(line.task)) {
      curves.set(line.task, { task: line.task, of: 0, each: 1, steps: [], losses: [], middles: [], means: [], validations: [] });
    }
    const curve = curves.get(line.task);
    if (line.event === "minibatch") minibatch(curve, line);
    if (line.event === "evaluation" && line.kind !== "test") validated(curve, line);
    if (line.event === "resumed") cut(curve, line.step);
  }
  return [...curves.values()].some((curve) => curve.steps.length > MOST);
}

function minibatch(curve, line) {
  cut(curve, line.step);
  curve.of = line.step + 1;
  curve.steps.push(line.step);
  curve.losses.push(line.loss);
  if (curve.each > 1) {
    curve.middles.push(line.step);
    curve.means.push(line.loss);
  }
}

function validated(curve, line) {
  curve.validations = curve.validations.filter(([step]) => step < line.step);
  curve.validations.push([line.step, line.loss]);
}

/** A run that was killed trains again what came after its last checkpoint. */
function cut(curve, step) {
  const drop = (steps, values) => {
    while (steps.length && steps[steps.length - 1] >= step) {
      steps.pop();
      values.pop();
    }
  };
  drop(curve.steps, curve.losses);
  drop(curve.middles, curve.means);
  curve.validations = curve.validations.filter(([at]) => at <= step);
}

/** The running mean, as TensorBoard has it: its weights add up to one from the first point on. */
function smoothed(values, share) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

function training(curve) {
  if (!settings.smoothing) return [curve.steps, curve.losses];
  const [steps, values] = curve.each > 1 ? [curve.middles, curve.means] : [curve.steps, curve.losses];
  return [steps, smoothed(values, settings.smoothing)];
}

// A logarithm has no place for zero and what is below.
const seen = (values) => (settings.log ? values.map((value) => (value > 0 ? value : null)) : values);

function scaled(curve, steps) {
  if (settings.x === "step") return steps;
  const whole = Math.max(curve.in_all ?? 0, curve.of, 1);
  return steps.map((step) => step / whole);
}

/** How many minibatches tasks have in all. */
export function lengths(tasks) {
  for (const task of tasks) if (curves.has(task.name)) curves.get(task.name).in_all = task.steps_in_all;
}

function data() {
  const tables = [];
  for (const curve of curves.values()) {
    const [steps, values] = training(curve);
    tables.push([scaled(curve, steps), seen(values)]);
    const at = curve.validations.map(([step]) => step);
    tables.push([scaled(curve, at), seen(curve.validations.map(([, value]) => value))]);
  }
  return tables.some(([x]) => x.length) ? uPlot.join(tables) : [[0], ...tables.map(() => [null])];
}

function series() {
  const number = (_, value) => loss(value);
  const made = [{ label: settings.x === "step" ? "minibatch" : "share" }];
  for (const curve of curves.values()) {
    const [stroke, show] = [colour(curve.task), shows(curve.task)];
    made.push({ label: curve.task, stroke, width: 1.4, show, value: number, points: { show: false } });
    made.push({ label: `${curve.task} val`, stroke, show, width: 1.4, dash: [5, 4], value: number, points: { show: true, size: 6, fill: stroke } });
  }
  return made;
}

const height = () => Math.max(220, Math.min(430, innerHeight * 0.45));

function options() {
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 } };
  return {
    width: $("curves").clientWidth,
    height: height(),
    series: series(),
    scales: { x: { time: false }, y: { distr: settings.log ? 3 : 1 } },
    axes: [{ ...axis }, { ...axis, size: 62 }],
    legend: { show: curves.size <= 12 && innerWidth > 800, live: true },
    cursor: { drag: { x: true, y: false }, focus: { prox: 24 } },
    focus: { alpha: 0.3 },
    hooks: { setSelect: [(drawn) => (drawn.zoomed ||= drawn.select.width > 0)] },
  };
}

/** Draws what is there. What was zoomed stays so. */
export function draw() {
  const looks = [...curves.keys()].map((task) => [task, colour(task), shows(task)]);
  const wanted = JSON.stringify([looks, settings.log, settings.x, innerWidth > 800]);
  if (plot && wanted === shape) {
    const { min, max } = plot.scales.x;
    const zoomed = plot.zoomed;
    plot.setData(data(), !zoomed);
    if (zoomed) plot.setScale("x", { min, max });
  } else {
    plot?.destroy();
    shape = wanted;
    plot = new uPlot(options(), data(), $("curves"));
    plot.over.addEventListener("dblclick", () => (plot.zoomed = false));
  }
  note();
}

/** Draws anew, in the colours that are on. */
export function repaint() {
  shape = "";
  if (curves.size) draw();
}

function note() {
  const fewer = [...curves.values()].filter((curve) => curve.each > 1);
  const each = Math.max(0, ...fewer.map((curve) => curve.each));
  const drawn = "Lines: the loss of each minibatch before its update. Dashed, with points: validation. Drag to zoom.";
  $("curves-note").textContent = fewer.length
    ? `${drawn} Of long runs the least and the largest loss of each ${each} minibatches are drawn; smoothing takes their means.`
    : drawn;
}

/** Hides a task's curves, or shows them again. */
export function toggle(task) {
  hidden.has(task) ? hidden.delete(task) : hidden.add(task);
  repaint();
  return shows(task);
}

export const shows = (task) => !hidden.has(task) && !filtered.has(task);

/** Leaves out the curves of tasks that filters leave out. */
export const filter = (tasks) => (filtered = new Set(tasks));

function move(by, wide) {
  const { min, max } = plot?.scales.x ?? {};
  if (typeof min !== "number") return;
  const [middle, half] = [(min + max) / 2 + by * (max - min), ((max - min) / 2) * wide];
  plot.zoomed = true;
  plot.setScale("x", { min: middle - half, max: middle + half });
}

export function listen() {
  const change = (id, key, read) => $(id).addEventListener("input", (event) => {
    settings[key] = read(event.target);
    draw();
  });
  change("log", "log", (box) => box.checked);
  change("x", "x", (list) => list.value);
  change("smoothing", "smoothing", (slider) => Number(slider.value));
  $("smoothing").addEventListener("input", () => ($("smoothing-says").textContent = $("smoothing").value));
  const moves = { "zoom-in": [0, 0.5], "zoom-out": [0, 2], left: [-0.25, 1], right: [0.25, 1] };
  for (const [id, [by, wide]] of Object.entries(moves)) $(id).addEventListener("click", () => move(by, wide));
  $("all").addEventListener("click", () => {
    if (plot) plot.zoomed = false;
    draw();
  });
  addEventListener("resize", () => {
    plot?.setSize({ width: $("curves").clientWidth, height: height() });
    if (curves.size) draw();
  });
}
