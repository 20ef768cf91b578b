// The loss plot: training as solid lines, validation as dashed lines with points.

import { $, colour, ink, loss } from "/format.js";

/** The maximum number of points of a curve; above it the run is loaded again with fewer points. */
const MOST = 12000;

let curves = new Map();
let hidden = new Set();
/** The tasks that the filters hide. */
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

/** Adds new lines of the log; returns true if a curve has too many points now. */
export function news(lines) {
  for (const line of lines) {
    if (!line.task) continue;
    if (!curves.has(line.task)) {
      curves.set(line.task, { task: line.task, of: 0, each: 1, steps: [], losses: [], middles: [], means: [], validations: [] });
    }
    const curve = curves.get(line.task);
    if (line.event === "minibatch") minibatch(curve, line);
    if (line.event === "evaluation" && line.kind !== "test") validation(curve, line);
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

function validation(curve, line) {
  curve.validations = curve.validations.filter(([step]) => step < line.step);
  curve.validations.push([line.step, line.loss]);
}

/** Drops the points from a step on: a resumed run repeats the minibatches after its last checkpoint. */
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

/** The exponential moving average, debiased as in TensorBoard: the weights add up to one from the first point on. */
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

// A logarithmic axis cannot show values that are not positive.
const drawable = (values) => (settings.log ? values.map((value) => (value > 0 ? value : null)) : values);

function scaled(curve, steps) {
  if (settings.x === "step") return steps;
  const whole = Math.max(curve.in_all ?? 0, curve.of, 1);
  return steps.map((step) => step / whole);
}

/** Sets the total number of minibatches of each task. */
export function lengths(tasks) {
  for (const task of tasks) if (curves.has(task.name)) curves.get(task.name).in_all = task.steps_in_all;
}

function data() {
  const tables = [];
  for (const curve of curves.values()) {
    const [steps, values] = training(curve);
    tables.push([scaled(curve, steps), drawable(values)]);
    const at = curve.validations.map(([step]) => step);
    tables.push([scaled(curve, at), drawable(curve.validations.map(([, value]) => value))]);
  }
  return tables.some(([x]) => x.length) ? uPlot.join(tables) : [[0], ...tables.map(() => [null])];
}

function series() {
  const number = (_, value) => loss(value);
  const made = [{ label: settings.x === "step" ? "minibatch" : "progress" }];
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

/** Draws the curves, and keeps the zoom. */
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

/** Draws again, in the current colours. */
export function repaint() {
  shape = "";
  if (curves.size) draw();
}

function note() {
  const fewer = [...curves.values()].filter((curve) => curve.each > 1);
  const each = Math.max(0, ...fewer.map((curve) => curve.each));
  const drawn = "Solid: training loss of each minibatch, before its update. Dashed with points: validation loss. Drag to zoom.";
  $("curves-note").textContent = fewer.length
    ? `${drawn} Long runs show the smallest and the largest loss of every ${each} minibatches; smoothing uses their means.`
    : drawn;
}

/** Hides the curves of a task, or shows them again; returns whether they are shown. */
export function toggle(task) {
  hidden.has(task) ? hidden.delete(task) : hidden.add(task);
  repaint();
  return shows(task);
}

export const shows = (task) => !hidden.has(task) && !filtered.has(task);

/** Hides the curves of these tasks, which the filters exclude. */
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
  $("smoothing").addEventListener("input", () => ($("smoothing-value").textContent = $("smoothing").value));
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
