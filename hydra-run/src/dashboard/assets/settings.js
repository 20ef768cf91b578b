// The settings in which the tasks of a run differ: filters and colours.

import { $, el, key, paint } from "/format.js";

/** With more tasks than this, a setting gives the colours by default. */
const OWN = 6;

let names = [];
let values = new Map();
/** The wanted value of each filtered setting; names must contain the text. */
const wanted = new Map();
let text = "";
let chosen = null;
let changed = () => {};

/** The text of a setting's value, as the leaderboard shows it. */
export function shown(value, name = "") {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value).split("/").pop();
  const small = name === "lr" || Math.abs(value) < 1e-2 || Math.abs(value) >= 1e7;
  const exact = small ? value.toExponential() : String(value);
  if (exact.length <= 9) return exact.replace("e+", "e");
  return (small ? value.toExponential(3).replace("e+", "e") : value.toFixed(4)).replace(/\.?0+(?=e|$)/, "");
}

export const settingNames = () => names;
export const valuesOf = (name) => values.get(name) ?? [];

/** Distinct values: numbers in order, then texts in order of occurrence. */
function sorted(all) {
  const found = [...new Set(all)];
  const number = (value) => (typeof value === "number" ? value : Infinity);
  return found.toSorted((a, b) => (number(a) === number(b) ? 0 : number(a) - number(b)));
}

/** Updates the settings in which the tasks differ, and the filters. */
export function draw(run, tasks) {
  const now = [...new Set(tasks.flatMap((task) => Object.keys(task.differs ?? {})))];
  values = new Map(now.map((name) => [name, sorted(tasks.map((task) => task.differs?.[name] ?? null))]));
  const compared = now.filter((name) => name !== "seed");
  if (chosen === null || chosen.run !== run) {
    wanted.clear();
    text = "";
    $("filter-text").value = "";
    chosen = { run, by: null };
  }
  // By default many tasks are coloured by the learning rate, or by the first setting in which they differ.
  const by = chosen.by ?? (tasks.length > OWN ? compared.find((name) => name === "lr") ?? compared[0] ?? "" : "");
  colours(now.includes(by) ? by : "", tasks);
  const shape = JSON.stringify([now, [...values], by, tasks.length > 1]);
  if ($("filters").dataset.shape === shape && JSON.stringify(names) === JSON.stringify(now)) return;
  names = now;
  $("filters").dataset.shape = shape;
  controls(by);
}

/** Gives equal values equal colours; numbers go from dark to light. */
function colours(by, tasks) {
  const all = valuesOf(by);
  const ordered = all.every((value) => typeof value === "number");
  const place = new Map(all.map((value, index) => [value, index]));
  paint(by ? new Map(tasks.map((task) => [task.name, [place.get(task.differs?.[by] ?? null), all.length, ordered]])) : null);
  $("key").replaceChildren(...(by ? [`${by}: `, ...some(all).flatMap((value) => {
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = key(place.get(value), all.length, ordered);
    return [el("span", { className: "entry" }, swatch, shown(value, by))];
  })] : []));
}

/** Up to twelve evenly spaced values. */
function some(all) {
  const every = Math.ceil(all.length / 12) || 1;
  return all.filter((_, index) => index % every === 0);
}

function controls(by) {
  const option = (value, label, selected) => el("option", { value, textContent: label, selected });
  const filter = (name) => {
    const list = el("select", { data: { filter: name } }, option("", "any", !wanted.has(name)));
    valuesOf(name).forEach((value, index) => list.append(option(String(index), shown(value, name), wanted.has(name) && wanted.get(name) === value)));
    list.addEventListener("input", () => only(name, list.value === "" ? undefined : valuesOf(name)[Number(list.value)]));
    return el("label", {}, `${name} `, list);
  };
  $("filters").replaceChildren(...names.map(filter));
  const list = $("colour-by");
  list.replaceChildren(option("", "task", by === ""), ...names.map((name) => option(name, name, by === name)));
  $("settings-bar").hidden = !names.length;
}

/** Shows only the tasks with this value; all tasks if it is undefined. */
export function only(name, value) {
  value === undefined ? wanted.delete(name) : wanted.set(name, value);
  $("filters").dataset.shape = "";
  changed();
}

/** Toggles a filter. */
export const toggleOnly = (name, value) => only(name, wanted.has(name) && wanted.get(name) === value ? undefined : value);

export const isWanted = (task) =>
  [...wanted].every(([name, value]) => (task.differs?.[name] ?? null) === value) && task.name.includes(text);

export const isFiltered = () => wanted.size > 0 || text !== "";

export function listen(redraw) {
  changed = redraw;
  $("colour-by").addEventListener("input", () => {
    chosen.by = $("colour-by").value;
    redraw();
  });
  $("filter-text").addEventListener("input", () => {
    text = $("filter-text").value.trim();
    redraw();
  });
}
