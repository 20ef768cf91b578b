// Tasks in parallel coordinates: an axis for each setting in which they differ, and one for the result.

import { $, colour, earlier, loss } from "/format.js";
import { isWanted, settingNames, shown, toggleOnly, valuesOf } from "/settings.js";

const SVG = "http://www.w3.org/2000/svg";
const [HEIGHT, TOP, BOTTOM, SIDE] = [300, 34, 282, 90];
/** The maximum number of labelled values on an axis. */
const NAMED = 12;

function svg(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** The current value of the metric that ranks a task, and whether a higher one is better. */
function result(task) {
  const last = task.validation ?? earlier(task)?.[1];
  if (!last) return { name: "training loss", value: task.training_loss ?? null, rising: false };
  const by = last.selected_by;
  if (by && last.metrics?.[by.name] !== undefined) return { name: by.name, value: last.metrics[by.name], rising: by.higher_is_better };
  if (last.metrics?.accuracy !== undefined) return { name: "accuracy", value: last.metrics.accuracy, rising: true };
  return { name: "validation loss", value: last.loss, rising: false };
}

const height = (share) => BOTTOM - share * (BOTTOM - TOP);

/** The axis of a setting: numbers on a linear axis, or a logarithmic one if their magnitudes differ; texts at even distances. */
function axisOf(name) {
  const all = valuesOf(name);
  const numbers = all.every((value) => typeof value === "number");
  const log = numbers && Math.min(...all) > 0 && Math.max(...all) / Math.min(...all) >= (["batch", "lr", "lora"].includes(name) ? 2 : 200);
  const scaled = (value) => (log ? Math.log10(value) : numbers ? value : all.indexOf(value));
  const [low, high] = [Math.min(...all.map(scaled)), Math.max(...all.map(scaled))];
  const at = (value) => height(high > low ? (scaled(value) - low) / (high - low) : 0.5);
  const every = Math.ceil(all.length / NAMED) || 1;
  const ticks = all.filter((_, index) => index % every === 0).map((value) => [at(value), shown(value, name), value]);
  return { name, at: (task) => at(task.differs?.[name] ?? null), ticks };
}

function axisOfResults(tasks) {
  const results = tasks.map(result);
  const best = results.find(({ name }) => name !== "training loss") ?? results[0];
  const values = results.filter(({ name, value }) => name === best.name && Number.isFinite(value)).map(({ value }) => value).toSorted((a, b) => a - b);
  const [low, most] = [values[0] ?? 0, values.at(-1) ?? 1];
  // A diverged task does not compress the scale of the others.
  const typical = values[Math.floor((values.length - 1) * 0.75)] ?? most;
  const high = best.rising ? most : Math.min(most, low + 5 * Math.max(typical - low, 0.1));
  const share = (value) => (high > low ? (Math.min(value, high) - low) / (high - low) : 0.5);
  const at = (value) => height(best.rising ? share(value) : 1 - share(value));
  const steps = high > low ? [0, 0.25, 0.5, 0.75, 1] : [0.5];
  const ticks = steps.map((step) => low + step * (high - low)).map((value) => [at(value), loss(value)]);
  const place = (task) => {
    const { name, value } = result(task);
    return name === best.name && Number.isFinite(value) ? at(value) : null;
  };
  return { name: best.name, at: place, ticks };
}

/** Draws the tasks that pass the filters, the best one last. A click on a value toggles a filter. */
export function draw(tasks) {
  const names = settingNames();
  $("parallel-section").hidden = tasks.length < 2 || !names.length;
  if ($("parallel-section").hidden) return;
  const axes = [...names.map(axisOf), axisOfResults(tasks)];
  const width = Math.max($("parallel").clientWidth, 100 * axes.length);
  const x = (index) => SIDE + (index * (width - 2 * SIDE)) / Math.max(axes.length - 1, 1);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" });
  drawing.setAttribute("aria-label", `${tasks.length} tasks by ${names.join(", ")} and ${axes.at(-1).name}`);
  const wanted = tasks.filter(isWanted);
  for (const task of wanted.toReversed()) {
    const points = axes.map((axis, index) => [x(index), axis.at(task)]).filter(([, y]) => y !== null);
    const path = svg("path", { d: points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") });
    path.setAttribute("class", task.rank === 1 ? "task best" : "task");
    path.setAttribute("stroke", colour(task.name));
    path.append(svg("title", {}, `${task.name}${task.rank ? `, rank ${task.rank}` : ""}`));
    path.dataset.line = task.name;
    drawing.append(path);
  }
  axes.forEach((axis, index) => drawing.append(...frame(axis, x(index))));
  $("parallel").replaceChildren(drawing);
}

function frame(axis, x) {
  const line = svg("line", { x1: x, x2: x, y1: TOP, y2: BOTTOM, class: "axis" });
  const name = svg("text", { x, y: 16, class: "axis-name" }, axis.name);
  const ticks = axis.ticks.map(([y, text, value]) => {
    const made = svg("text", { x: x + 6, y: y + 4, class: value === undefined ? "tick" : "tick value" }, text);
    if (value !== undefined) {
      made.append(svg("title", {}, `show only ${axis.name} ${text}, or all again`));
      made.addEventListener("click", () => toggleOnly(axis.name, value));
    }
    return made;
  });
  return [line, name, ...ticks];
}
