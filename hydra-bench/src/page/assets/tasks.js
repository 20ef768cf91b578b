// The leaderboard: tasks in their order, with their states, their descent, and what can be asked of them.

import { $, colour, el, loss, nameTasks } from "/format.js";
import { ask, hasToken } from "/server.js";
import * as curves from "/curves.js";

const HEADS = ["", "task", "state", "minibatches", "training loss", "validation", "test", "from", ""];
const TEXT = [1, 2, 7];
/** The rows of tasks by their names: they stay the same elements, so that a button is still there when it is let go. */
const rows = new Map();
let shown = null;
/** True while a mouse is over the table: nothing moves away from under it. */
let held = false;

export function listen() {
  $("tasks").addEventListener("pointerover", (event) => (held = event.pointerType === "mouse"));
  $("tasks").addEventListener("pointerleave", () => (held = false));
}

export function draw(run, news) {
  nameTasks(news.tasks.map((task) => task.name).toSorted());
  const counts = Map.groupBy(news.tasks, (task) => task.doing ?? task.state);
  $("counts").textContent = [...counts].map(([state, tasks]) => `${tasks.length} ${state}`).join(", ");
  if (shown !== run) begin(run);
  for (const task of news.tasks) {
    if (!rows.has(task.name)) rows.set(task.name, new Row(run, task.name));
    rows.get(task.name).draw(news, task);
  }
  order(news.tasks.flatMap(({ name }) => rows.get(name).elements()));
  $("steering").textContent = steering(news);
}

function begin(run) {
  shown = run;
  held = false;
  rows.clear();
  const head = el("tr", {}, ...HEADS.map((text, place) => cell("th", text, TEXT.includes(place))));
  $("tasks").replaceChildren(el("thead", {}, head), el("tbody"));
}

/** Puts elements into the table's body in their order; new ones come last while a mouse is over it. */
function order(elements) {
  const body = $("tasks").querySelector("tbody");
  const there = [...body.children];
  if (there.length === elements.length && there.every((element, place) => element === elements[place])) return;
  const focused = document.activeElement;
  const kept = held ? there.filter((element) => elements.includes(element)) : [];
  body.replaceChildren(...kept, ...elements.filter((element) => !kept.includes(element)));
  if (body.contains(focused)) focused.focus();
}

function steering(news) {
  if (news.state !== "running") return "Nothing runs here: tasks are paused, resumed, stopped and forked while a run goes on.";
  if (!news.steered) return "This run has no socket, so its tasks cannot be steered from here.";
  return hasToken() ? "" : "To steer tasks, open the address that was printed when the server began: it has the token.";
}

const cell = (name, text, left = false) => el(name, { className: left ? "text" : "" }, text);

class Row {
  constructor(run, name) {
    this.name = el("button", { type: "button", className: "name", data: { act: `show ${name}` }, title: "show or hide its curves" });
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = colour(name);
    this.name.append(swatch, name);
    this.name.addEventListener("click", () => {
      curves.toggle(name);
      this.mark(name);
    });
    this.steps = el("span");
    this.progress = el("progress", { max: 1 });
    this.acts = ACTS.map((what) => {
      const button = el("button", { type: "button", data: { act: `${what} ${name}` } }, what);
      button.setAttribute("aria-label", `${what} ${name}`);
      button.addEventListener("click", () => (what in ASKED ? dialog(run, what, name) : at_once(run, what, name)));
      return button;
    });
    const texts = HEADS.map((_, place) => cell("td", "", TEXT.includes(place)));
    texts[1].append(this.name);
    texts[3].append(this.steps, " ", this.progress);
    this.steering = el("span", { className: "acts" }, ...this.acts);
    texts.at(-1).append(this.steering);
    this.row = el("tr", { data: { task: name } }, ...texts);
    this.why = el("td", { className: "why", colSpan: HEADS.length - 1 });
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
      0: task.rank ?? "–", 2: task.doing ?? task.state, 4: loss(task.training_loss), 5: validation(task), 6: result(task.test),
      7: descent(task),
    };
    for (const [place, text] of Object.entries(texts)) this.row.cells[place].textContent = text;
    this.why.textContent = task.error ?? "";
    this.mark(task.name);
    this.steering.hidden = news.state !== "running";
    const able = news.steered && hasToken();
    const may = possible(task.state);
    this.acts.forEach((button, place) => {
      button.disabled = !able || !may.includes(ACTS[place]);
      // Of the two that are each other's opposites, the one that can be done is there.
      button.hidden = ACTS[place] === (task.state === "paused" ? "pause" : "resume");
    });
  }

  mark(name) {
    this.name.setAttribute("aria-pressed", curves.shows(name));
    this.row.className = curves.shows(name) ? "" : "off";
  }
}

const ACTS = ["pause", "resume", "stop", "fork", "extend", "delete"];

/** What can be asked of a task in a state. */
function possible(state) {
  if (state === "left out" || state === "deleted") return [];
  if (state === "failed") return ["delete"];
  return ["done", "stopped"].includes(state) ? ["fork", "delete"] : ACTS;
}

function result(evaluation) {
  if (!evaluation) return "–";
  const { loss: value, perplexity, metrics } = evaluation;
  const measured = Object.entries(metrics ?? {}).map(([name, figure]) => `${name} ${Number(figure).toPrecision(4)}`);
  const besides = [...(perplexity ? [`ppl ${perplexity.toPrecision(5)}`] : []), ...measured];
  return besides.length ? `${loss(value)} (${besides.join(", ")})` : loss(value);
}

function validation(task) {
  if (task.validation) return result(task.validation);
  const best = task.evaluations.reduce((a, b) => (a && a[1].loss <= b[1].loss ? a : b), null);
  return best ? `${result(best[1])} at ${best[0]}` : "–";
}

function descent(task) {
  const parent = task.parent?.task ?? task.parent;
  const at = task.forked_at ?? task.parent?.at;
  return parent ? `${parent}${at !== null && at !== undefined ? ` at ${at}` : ""}` : "";
}

async function at_once(run, command, task) {
  try {
    says(`${command} ${task}: asked`);
    const reply = await ask(run, { command, task });
    says(`${command} ${task}: done${place(reply)}`);
  } catch (error) {
    says(error.message);
  }
}

const place = (reply) => (Number.isInteger(reply.at) ? ` at minibatch ${reply.at}` : "");
const says = (text) => ($("steering").textContent = text);

// What is asked before it is done: what it does, what there is to say of it, and what was done.
const ASKED = {
  stop: {
    says: "It ends there; its weights are written.",
    fields: ["at"],
    done: (task, reply) => `${task} was stopped${place(reply)}`,
  },
  fork: {
    says: "A new task begins with this one's weights, and trains beside it.",
    fields: ["at", "name", "changes", "weights"],
    done: (task, reply) => `${reply.task} was forked from ${task}${place(reply)}`,
  },
  extend: {
    says: "It ends there, and a new task goes on in its place, to more minibatches.",
    fields: ["at", "name", "steps"],
    done: (task, reply) => `${reply.task} goes on in place of ${task}${place(reply)}`,
  },
  delete: {
    says: "It ends there; its checkpoint and its model are removed.",
    fields: ["at"],
    done: (task, reply) => `${task} was deleted${place(reply)}`,
  },
};

function dialog(run, command, task) {
  const { says: explained, fields, done } = ASKED[command];
  $("ask-title").textContent = `${command} ${task}`;
  $("ask-says").textContent = explained;
  for (const field of document.querySelectorAll("#ask-fields label")) field.hidden = !fields.includes(field.dataset.field);
  $("ask-problem").hidden = true;
  $("ask-yes").textContent = command;
  $("ask-yes").disabled = false;
  $("ask-form").onsubmit = async (event) => {
    event.preventDefault();
    $("ask-yes").disabled = true;
    try {
      const reply = await ask(run, request(command, task, fields));
      $("ask").close();
      says(done(task, reply));
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

// Numbers and texts that were given; what was left empty is the run's to choose.
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
    if (!value) throw new Error(`\`${line}\` is no change: expected a name and a value, such as lr=1e-4`);
    changed[name.replace(/^-+/, "")] = value;
  }
  return changed;
}
