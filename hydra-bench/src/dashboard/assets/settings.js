// The settings in which the tasks of a run differ: which tasks are shown, and what the colours mean.

import { $, el, key, paint } from "/format.js";

/** More tasks than this have the colours of a setting at first. */
const OWN = 6;

let names = [];
let values = new Map();
/** What the filters ask for, by setting; the text is looked for in names. */
const wanted = new Map();
let text = "";
let chosen = null;
let changed = () => {};

/** The text of a setting of a task, as the leaderboard shows it. */
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

/** Numbers in their order, before texts as they come. */
function sorted(all) {
  const found = [...new Set(all)];
  const number = (value) => (typeof value === "number" ? value : Infinity);
  return found.toSorted((a, b) => (number(a) === number(b) ? 0 : number(a) - number(b)));
}

/** Takes note of the tasks, and of the settings in which they differ. */
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
  // Where nobody has chosen, many tasks have the colours of the learning rate, or of what else they differ in.
  const by = chosen.by ?? (tasks.length > OWN ? compared.find((name) => name === "lr") ?? compared[0] ?? "" : "");
  colours(now.includes(by) ? by : "", tasks);
  const shape = JSON.stringify([now, [...values], by, tasks.length > 1]);
  if ($("filters").dataset.shape === shape && JSON.stringify(names) === JSON.stringify(now)) return;
  names = now;
  $("filters").dataset.shape = shape;
  controls(by);
}

/** Equal values have equal colours; numbers go from dark to light. */
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

/** Of many values, some that are spread evenly. */
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

/** Shows the tasks alone that have this value; all of them where it is undefined. */
export function only(name, value) {
  value === undefined ? wanted.delete(name) : wanted.set(name, value);
  $("filters").dataset.shape = "";
  changed();
}

/** Turns a filter on, or off where it is on. */
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
