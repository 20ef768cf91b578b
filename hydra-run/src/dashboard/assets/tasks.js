// The leaderboard: ranked tasks with their states, their parents, and buttons for run control.

import { $, colour, cost, earlier, el, loss, nameTasks } from "/format.js";
import { command as send, hasToken } from "/server.js";
import { isFiltered, isWanted, settingNames, shown as shownSetting } from "/settings.js";
import * as curves from "/curves.js";

/** The columns before and after those of the settings in which the tasks differ: a key, a heading, and the sort key. */
const BEFORE = [
  ["rank", "rank", (task) => task.rank ?? Infinity],
  ["task", "task", (task) => task.name],
];
const AFTER = [
  ["state", "state", (task) => task.doing ?? task.state],
  ["steps", "minibatches", (task) => task.steps],
  ["training", "training loss", (task) => task.training_loss ?? Infinity],
  ["validation", "validation", (task) => cost(best(task))],
  ["test", "test", (task) => cost(task.test)],
  ["from", "parent", (task) => parent(task)],
];
const TEXT = ["task", "state", "from"];
/** The rows by task name. The elements are reused, so that a click is not lost to an update. */
const rows = new Map();
let shown = null;
/** The sort column and direction; null for the order of the leaderboard. */
let sorting = null;
let redraw = () => {};
/** True while a mouse is over the table: rows then keep their places. */
let held = false;

export function listen(again) {
  redraw = again;
  $("tasks").addEventListener("pointerover", (event) => (held = event.pointerType === "mouse"));
  $("tasks").addEventListener("pointerleave", () => (held = false));
}

export function draw(run, news) {
  nameTasks(news.tasks.map((task) => task.name).toSorted());
  const wanted = news.tasks.filter(isWanted);
  const counts = Map.groupBy(news.tasks, (task) => task.doing ?? task.state);
  const shownOf = isFiltered() ? `${wanted.length} of ${news.tasks.length} shown; ` : "";
  $("counts").textContent = shownOf + [...counts].map(([state, tasks]) => `${tasks.length} ${state}`).join(", ");
  const columns = JSON.stringify([run, settingNames()]);
  if (shown !== columns) begin(columns);
  for (const task of news.tasks) {
    if (!rows.has(task.name)) rows.set(task.name, new Row(run, task.name));
    rows.get(task.name).draw(news, task);
  }
  order(inOrder(wanted).flatMap(({ name }) => rows.get(name).elements()));
  $("control").textContent = controlMessage(news);
  seeds(news.seeds ?? []);
}

const columns = () => [...BEFORE, ...settingNames().map((name) => [name, name, (task) => task.differs?.[name] ?? null]), ...AFTER];

function begin(all) {
  shown = all;
  held = false;
  rows.clear();
  if (!columns().some(([key]) => key === sorting?.key)) sorting = null;
  const heads = columns().map(([key, text]) => {
    const button = el("button", { type: "button", className: "name", data: { sort: key }, title: "sort by this column" }, text);
    button.addEventListener("click", () => sort(key));
    return el("th", { className: TEXT.includes(key) ? "text" : "", data: { column: key } }, button);
  });
  $("tasks").replaceChildren(el("thead", {}, el("tr", {}, ...heads, el("th"))), el("tbody"));
  mark();
}

/** Cycles the sorting of a column: ascending, descending, the order of the leaderboard. */
function sort(key) {
  if (sorting?.key !== key) sorting = { key, down: false };
  else sorting = sorting.down ? null : { key, down: true };
  // The mouse is over the heading; a click on it moves the rows.
  held = false;
  mark();
  redraw();
}

function mark() {
  for (const head of $("tasks").querySelectorAll("th[data-column]")) {
    const own = head.dataset.column === sorting?.key;
    head.setAttribute("aria-sort", own ? (sorting.down ? "descending" : "ascending") : "none");
  }
}

function inOrder(tasks) {
  const value = columns().find(([key]) => key === sorting?.key)?.[2];
  if (!value) return tasks;
  const compare = (a, b) => {
    const [one, other] = [value(a), value(b)];
    if (typeof one === "number" && typeof other === "number") return one === other ? 0 : one - other;
    return String(one ?? "").localeCompare(String(other ?? ""), undefined, { numeric: true });
  };
  return tasks.toSorted((a, b) => (sorting.down ? compare(b, a) : compare(a, b)));
}

/** Draws groups of tasks that differ only in the seed: means and standard deviations. */
function seeds(all) {
  $("seeds-section").hidden = !all.length;
  const names = [...new Set(all.flatMap((one) => Object.keys(one.differs)))];
  const figure = (result) => {
    const metrics = Object.keys(result ?? {}).filter((key) => key !== "perplexity" && key !== "loss");
    const [name, sample] = [...metrics, "perplexity", "loss"].map((key) => [key, result?.[key]]).find(([, found]) => found) ?? [];
    if (!sample) return "–";
    const deviation = sample.deviation === null ? "" : ` ± ${sample.deviation.toPrecision(3)}`;
    return `${name === "perplexity" ? "ppl" : name} ${loss(sample.mean)}${deviation}`;
  };
  const heads = [...names, "seeds", "validation", "test"];
  const row = (one) => {
    const count = one.n === one.tasks.length ? one.n : `${one.n} of ${one.tasks.length}`;
    const texts = [...names.map((name) => shownSetting(one.differs[name], name)), count, figure(one.validation), figure(one.test)];
    return el("tr", { title: one.tasks.join(", ") }, ...texts.map((text) => el("td", {}, String(text))));
  };
  $("seeds").replaceChildren(el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", {}, text)))), el("tbody", {}, ...all.map(row)));
}

/** Places elements in the table's body in their order; while a mouse is over it, new ones are appended. */
function order(elements) {
  const body = $("tasks").querySelector("tbody");
  const there = [...body.children];
  if (there.length === elements.length && there.every((element, place) => element === elements[place])) return;
  const focused = document.activeElement;
  const kept = held ? there.filter((element) => elements.includes(element)) : [];
  body.replaceChildren(...kept, ...elements.filter((element) => !kept.includes(element)));
  if (body.contains(focused)) focused.focus();
}

function controlMessage(news) {
  if (news.state !== "running") return "This run is not in progress. Tasks can be paused, resumed, stopped and forked only during a run.";
  if (!news.controllable) return "This run has no control socket, so its tasks cannot be controlled.";
  return hasToken() ? "" : "To control tasks, open the address that was printed when the server started: it contains the token.";
}

class Row {
  constructor(run, name) {
    this.name = el("button", { type: "button", className: "name", data: { act: `show ${name}` }, title: "show or hide its curves" });
    this.swatch = el("span", { className: "swatch" });
    this.name.append(this.swatch, name);
    this.name.addEventListener("click", () => {
      curves.toggle(name);
      this.mark(name);
    });
    this.steps = el("span");
    this.progress = el("progress", { max: 1 });
    this.acts = ACTS.map((what) => {
      const button = el("button", { type: "button", data: { act: `${what} ${name}` } }, what);
      button.setAttribute("aria-label", `${what} ${name}`);
      button.addEventListener("click", () => (what in DIALOGS ? dialog(run, what, name) : execute(run, what, name)));
      return button;
    });
    const cell = ([key]) => [key, el("td", { className: TEXT.includes(key) ? "text" : "", data: { cell: key } })];
    this.cells = new Map(columns().map(cell));
    this.cells.get("task").append(this.name);
    this.cells.get("steps").append(this.steps, " ", this.progress);
    this.control = el("span", { className: "acts" }, ...this.acts);
    this.row = el("tr", { data: { task: name } }, ...this.cells.values(), el("td", {}, this.control));
    this.why = el("td", { className: "why", colSpan: this.cells.size });
    this.error = el("tr", {}, el("td"), this.why);
  }

  elements() {
    return this.why.textContent ? [this.row, this.error] : [this.row];
  }

  draw(news, task) {
    const share = task.steps_in_all ? task.steps / task.steps_in_all : 0;
    this.steps.textContent = `${task.steps}${task.steps_in_all ? ` / ${task.steps_in_all}` : ""}`;
    this.progress.value = share;
    this.progress.title = `${(100 * share).toFixed(0)} %`;
    this.progress.setAttribute("aria-label", `${task.name}: ${(100 * share).toFixed(0)} percent`);
    const texts = {
      rank: task.rank ?? "–", state: task.doing ?? task.state, training: loss(task.training_loss), validation: validation(task),
      test: result(task.test), from: parent(task),
    };
    for (const name of settingNames()) texts[name] = shownSetting(task.differs?.[name], name);
    for (const [key, text] of Object.entries(texts)) this.cells.get(key).textContent = text;
    this.swatch.style.background = colour(task.name);
    this.why.textContent = task.error ?? "";
    this.mark(task.name);
    this.control.hidden = news.state !== "running";
    const able = news.controllable && hasToken();
    const may = possible(task.state);
    this.acts.forEach((button, place) => {
      button.disabled = !able || !may.includes(ACTS[place]);
      // Only one of pause and resume is shown.
      button.hidden = ACTS[place] === (task.state === "paused" ? "pause" : "resume");
    });
  }

  mark(name) {
    this.name.setAttribute("aria-pressed", curves.shows(name));
    this.row.className = curves.shows(name) ? "" : "off";
  }
}

const ACTS = ["pause", "resume", "stop", "fork", "extend", "delete"];

/** The commands that a task in a state accepts. */
function possible(state) {
  if (state === "skipped" || state === "deleted") return [];
  if (state === "failed") return ["delete"];
  return ["done", "stopped"].includes(state) ? ["fork", "delete"] : ACTS;
}

function result(evaluation) {
  if (!evaluation) return "–";
  const { loss: value, perplexity, metrics } = evaluation;
  const measured = Object.entries(metrics ?? {}).map(([name, figure]) => `${name} ${Number(figure).toPrecision(4)}`);
  const others = [...(perplexity ? [`ppl ${perplexity.toPrecision(5)}`] : []), ...measured];
  return others.length ? `${loss(value)} (${others.join(", ")})` : loss(value);
}

/** The validation result that ranks a task. */
const best = (task) => task.validation ?? earlier(task)?.[1];

function validation(task) {
  if (task.validation) return result(task.validation);
  const found = earlier(task);
  return found ? `${result(found[1])} at ${found[0]}` : "–";
}

function parent(task) {
  const name = task.parent?.task ?? task.parent;
  const at = task.forked_at ?? task.parent?.at;
  return name ? `${name}${at !== null && at !== undefined ? ` at ${at}` : ""}` : "";
}

async function execute(run, command, task) {
  try {
    message(`${command} ${task}: sent`);
    const reply = await send(run, { command, task });
    message(`${command} ${task}: done${place(reply)}`);
  } catch (error) {
    message(error.message);
  }
}

const place = (reply) => (Number.isInteger(reply.at) ? ` at minibatch ${reply.at}` : "");
const message = (text) => ($("control").textContent = text);

// The commands that open a dialog: the explanation, the fields, and the message on success.
const DIALOGS = {
  stop: {
    message: "Stops the task at this minibatch and writes its weights.",
    fields: ["at"],
    done: (task, reply) => `${task} was stopped${place(reply)}`,
  },
  fork: {
    message: "Starts a new task from the weights of this one. This task continues.",
    fields: ["at", "name", "changes", "weights"],
    done: (task, reply) => `${reply.task} was forked from ${task}${place(reply)}`,
  },
  extend: {
    message: "Stops the task at this minibatch. A new task continues from there, for more minibatches.",
    fields: ["at", "name", "steps"],
    done: (task, reply) => `${reply.task} continues ${task}${place(reply)}`,
  },
  delete: {
    message: "Stops the task at this minibatch and removes its checkpoint and its model.",
    fields: ["at"],
    done: (task, reply) => `${task} was deleted${place(reply)}`,
  },
};

function dialog(run, command, task) {
  const { message: explanation, fields, done } = DIALOGS[command];
  $("ask-title").textContent = `${command} ${task}`;
  $("ask-message").textContent = explanation;
  for (const field of document.querySelectorAll("#ask-fields label")) field.hidden = !fields.includes(field.dataset.field);
  $("ask-problem").hidden = true;
  $("ask-yes").textContent = command;
  $("ask-yes").disabled = false;
  $("ask-form").onsubmit = async (event) => {
    event.preventDefault();
    $("ask-yes").disabled = true;
    try {
      const reply = await send(run, request(command, task, fields));
      $("ask").close();
      message(done(task, reply));
    } catch (error) {
      $("ask-problem").textContent = error.message;
      $("ask-problem").hidden = false;
      $("ask-yes").disabled = false;
    }
  };
  $("ask-no").onclick = () => $("ask").close();
  $("ask-form").reset();
  $("ask").showModal();
}

// The request with the filled fields; the run chooses the empty ones.
function request(command, task, fields) {
  const made = { command, task };
  for (const field of fields) {
    const input = $(`ask-${field}`);
    if (field === "changes") made.changes = changes(input.value);
    else if (field === "weights") Object.assign(made, input.checked ? { weights_only: true } : {});
    else if (input.value) made[field] = field === "name" ? input.value : Number(input.value);
  }
  return made;
}

function changes(text) {
  const changed = {};
  for (const line of text.split("\n").map((line) => line.trim()).filter(Boolean)) {
    const [name, value] = line.split(/[=:](.*)/s).map((part) => part?.trim());
    if (!value) throw new Error(`\`${line}\` is not a setting: expected a name and a value, such as lr=1e-4`);
    changed[name.replace(/^-+/, "")] = value;
  }
  return changed;
}
