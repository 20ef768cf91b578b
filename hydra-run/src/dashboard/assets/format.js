// Numbers, colours and elements, shared by all parts of the dashboard.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
export function el(name, properties = {}, ...children) {
  const { data, ...rest } = properties;
  const made = Object.assign(document.createElement(name), rest);
  for (const [key, value] of Object.entries(data ?? {})) made.dataset[key] = value;
  made.append(...children);
  return made;
}

/** The figure by which evaluations of a task are compared, smaller being better: the loss, or the metric of `--metric`. */
export function cost(evaluation) {
  const { loss: value = null, metrics, selected_by: by } = evaluation ?? {};
  const figure = metrics && by && by.name in metrics ? metrics[by.name] : value;
  if (figure === null) return Infinity;
  return by?.higher_is_better ? -figure : figure;
}

/** The best evaluation of a task while it trains, with its minibatch. */
export const earlier = (task) => (task.evaluations ?? []).reduce((a, b) => (a && cost(a[1]) <= cost(b[1]) ? a : b), null);

export const loss = (x) => (x === null || x === undefined ? "–" : x.toPrecision(5));

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = n > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** unit).toFixed(unit ? 2 : 0)} ${units[unit]}`;
}

export function seconds(s) {
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${(s / 60).toFixed(0)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

// Okabe and Ito (2008) without black, readable on light and on dark backgrounds; more tasks rotate the hue.
const FIRST = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"];
const order = new Map();

/** Assigns a colour to each new task; it stays the same when the leaderboard changes. */
export function nameTasks(names) {
  for (const name of names) if (!order.has(name)) order.set(name, order.size);
}
export const forgetTasks = () => order.clear();

// Viridis, from dark to light, without its ends: readable on light and on dark backgrounds.
const ORDERED = [[72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 205, 45]];

/** The colour of value number `place` of `count`: from the ordered palette for numbers, else from the categorical one. */
export function key(place, count, ordered) {
  if (!ordered) return distinct(place);
  const at = (place / Math.max(count - 1, 1)) * (ORDERED.length - 1);
  const low = Math.min(Math.floor(at), ORDERED.length - 2);
  const mixed = ORDERED[low].map((channel, index) => Math.round(channel + (at - low) * (ORDERED[low + 1][index] - channel)));
  return `rgb(${mixed.join(" ")})`;
}

const distinct = (place) => FIRST[place] ?? `hsl(${(place * 137.508 + 20) % 360} 62% ${place % 2 ? 42 : 58}%)`;

let painted = null;

/** Colours tasks by the values of a setting. Each task maps to its value's place, the count, and whether the values are numbers. */
export const paint = (values) => (painted = values);

export function colour(task) {
  const value = painted?.get(task);
  return value ? key(...value) : distinct(order.get(task) ?? 0);
}

/** A variable of the style sheet, for canvases. */
export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colour of a variable in the current theme. */
export function ink(name) {
  const probe = el("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
